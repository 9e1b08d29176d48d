"""Patterns of module names in configurations: regular expressions and globs, matched in linear time.

Configurations come from untrusted files, and `re` takes exponential time on some patterns.

`Pattern` supports a subset of regular expressions: literals, ``.``, ``*``, ``+``, ``?``, ASCII classes, groups,
alternation and anchors, with the semantics of `re`. It simulates a nondeterministic automaton (Thompson, 1968), which
takes at most the length of the pattern times the length of the name.

`Globs` matches with the expressions of `fnmatch`, which never try a part of a name twice (bpo-40480).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate
from functools import lru_cache
from typing import Any

from ..base.text import show
from ..errors import UnsupportedError

# Characters of a pattern. The longest in published configurations have about 100.
LONGEST = 1000
# Nested groups of a pattern: the parser is recursive.
_DEEPEST = 50

_CLASSES = {
    "d": "0123456789",
    "w": "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_",
    "s": " \t\n\r\f\v",
}
# What can follow a backslash; and an item of a class: such an escape, a character or a range.
_ESCAPED = re.compile(r"([dws\W_])")
_ITEM = re.compile(r"\\([dws\W_])(?!-[^\]])|([^\\\]])(?:-([^\\\[\]])|(?!-[^\]]))", re.DOTALL)
_WILDCARDS = "*?["
# `fnmatch`'s expression for a class without characters.
_NOTHING = "(?!)"


# ---- regular expressions ----


class Pattern:
    """A regular expression of the supported subset."""

    def __init__(self, text: str, key: str) -> None:
        self._text, self._key, self._at = text, key, 0
        if len(text) > LONGEST:
            raise _too_long(text, key)
        # By state: the next states without a character; and characters, if set all but these, with the state after one.
        self._free: list[list[int]] = []
        self._steps: list[tuple[frozenset[str], bool, int] | None] = []
        self._at_end: set[int] = set()  # states that only the end of a name has
        self._begins = self._state()
        self._end = self._alternatives(self._begins, 0)
        if self._at < len(text):
            raise self._unsupported()

    def matches(self, name: str) -> bool:
        """Return True if the pattern matches at the beginning of a name, as in ``re.match``."""
        current = self._closure({self._begins}, at_end=not name)
        for k, char in enumerate(name):
            if self._end in current:
                return True
            following = {
                step[2] for number in current if (step := self._steps[number]) and (char in step[0]) != step[1]
            }
            current = self._closure(following, at_end=k == len(name) - 1)
            if not current:
                return False
        return self._end in current

    def _closure(self, states: set[int], at_end: bool) -> set[int]:
        closure, todo = set(states), list(states)
        while todo:
            number = todo.pop()
            if number in self._at_end and not at_end:
                closure.discard(number)
                continue
            for state in self._free[number]:
                if state not in closure:
                    closure.add(state)
                    todo.append(state)
        return closure

    # ---- parser ----

    def _unsupported(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self._key}: the pattern {show(self._text)} has unsupported syntax at character {self._at}; expected "
            "literals, classes, groups, alternatives and repetitions"
        )

    def _state(self, *before: int) -> int:
        """Return a new state, which follows others without a character."""
        number = len(self._free)
        for state in before:
            self._free[state].append(number)
        self._free.append([])
        self._steps.append(None)
        return number

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _takes(self, text: str) -> bool:
        """Skip a text if it is next."""
        is_next = self._text.startswith(text, self._at)
        self._at += len(text) * is_next
        return is_next

    def _alternatives(self, begin: int, depth: int) -> int:
        if depth > _DEEPEST:
            raise self._unsupported()
        end = self._state()
        while True:
            last = self._state(begin)
            while self._next() not in ("", "|", ")"):
                last = self._repeated(last, depth)
            self._free[last].append(end)
            if not self._takes("|"):
                return end

    def _repeated(self, begin: int, depth: int) -> int:
        start = self._state(begin)
        end = self._atom(start, depth)
        kind = self._next()
        if kind == "{":
            raise self._unsupported()
        if kind and kind in "*+?":
            self._at += 1
            self._takes("?")  # lazy quantifiers match the same names
            if kind != "+":
                self._free[start].append(end)
            if kind != "?":
                self._free[self._state(end)].append(start)
        return end

    def _atom(self, begin: int, depth: int) -> int:
        char = self._next()
        if self._takes("("):
            if not self._takes("?:") and self._next() == "?":
                raise self._unsupported()
            end = self._alternatives(begin, depth + 1)
            if not self._takes(")"):
                raise self._unsupported()
            return end
        if char in "*+?{" or (char == "^" and self._at > 0):
            raise self._unsupported()
        self._at += 1
        if char in "^$":
            if self._next() in ("*", "+", "?"):
                raise self._unsupported()
            if char == "$":
                begin = self._state(begin)
                self._at_end.add(begin)
            return begin
        chars, negated = frozenset(char), False
        if char == ".":
            chars, negated = frozenset("\n"), True
        elif char == "\\":
            (escaped,) = self._groups(_ESCAPED)
            chars = frozenset(_CLASSES.get(escaped, escaped))
        elif char == "[":
            negated = self._takes("^")
            chars = self._class()
        end, after = self._state(), self._state(begin)
        self._steps[after] = chars, negated, end
        return end

    def _class(self) -> frozenset[str]:
        chars: set[str] = set()
        while not chars or not self._takes("]"):
            escaped, first, last = self._groups(_ITEM)
            if escaped:
                chars.update(_CLASSES.get(escaped, escaped))
            elif last is None or last >= first:
                chars.update(map(chr, range(ord(first), min(ord(last or first), ord(first) + 255) + 1)))
            else:
                raise self._unsupported()
        return frozenset(chars)

    def _groups(self, expected: re.Pattern[str]) -> tuple[Any, ...]:
        """Skip an expected text, and return the groups of its expression."""
        match = expected.match(self._text, self._at)
        if match is None:
            raise self._unsupported()
        self._at = match.end()
        return match.groups()


@lru_cache(256)
def compiled(text: str, key: str) -> Pattern:
    """Return a compiled pattern; cached, because a configuration is applied to every module."""
    return Pattern(text, key)


# ---- globs ----


class Globs:
    """An ordered list of names and globs; the first match wins."""

    def __init__(self, texts: Iterable[str], key: str) -> None:
        self._names: dict[str, int] = {}
        self._globs: list[tuple[int, str, re.Pattern[str]]] = []
        for number, text in enumerate(texts):
            if any(char in text for char in _WILDCARDS):
                self._globs.append((number, text, _expression(text, key)))
            else:
                self._names[text] = number

    def first(self, name: str) -> str | None:
        """Return the first matching name or glob, or None."""
        exact = self._names.get(name)
        for number, text, glob in self._globs:
            if exact is not None and exact < number:
                break
            if glob.match(name):
                return text
        return None if exact is None else name


def _expression(glob: str, key: str) -> re.Pattern[str]:
    """Translate a glob, in which each star takes the first match for good."""
    if len(glob) > LONGEST:
        raise _too_long(glob, key)
    text = translate(glob)
    if _NOTHING in text:
        raise UnsupportedError(f"{key}: the glob {show(glob)} has an empty range of characters")
    return re.compile(text)


def _too_long(text: str, key: str) -> UnsupportedError:
    return UnsupportedError(f"{key}: a pattern of {len(text):,} characters exceeds the limit of {LONGEST:,}")
