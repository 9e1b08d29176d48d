"""Patterns of module names in configurations: regular expressions and globs, matched in linear time.

Configurations come from untrusted files, and `re` takes exponential time on some patterns.

`Pattern` supports a subset of regular expressions: literals, ``.``, ``*``, ``+``, ``?``, ASCII classes, groups,
alternation and anchors, with the semantics of `re`. It simulates a nondeterministic automaton (Thompson, 1968), which
takes at most the length of the pattern times the length of the name.

`Globs` matches as `fnmatch` does: a glob of literals and ``*`` by a search per literal, a glob with ``?`` or classes
as a `Pattern`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

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
_WILDCARDS = "*?["


# ---- regular expressions ----


class _State(NamedTuple):
    """A state of the automaton."""

    chars: frozenset[str]  # characters of the transition to ``after``
    negated: bool  # if set, the transition takes all characters except ``chars``
    after: list[int]  # next states after a character
    free: list[int]  # next states without a character


class Pattern:
    """A regular expression of the supported subset."""

    def __init__(self, text: str, key: str) -> None:
        self._text, self._key, self._at = text, key, 0
        if len(text) > LONGEST:
            raise UnsupportedError(f"{key}: a pattern of {len(text):,} characters exceeds the limit of {LONGEST:,}")
        self._states: list[_State] = []
        self._anchored_end: list[int] = []
        self._begins = self._new()
        end = self._alternatives(self._begins, 0)
        if self._at < len(text):
            raise self._unsupported()
        self._end = end

    def matches(self, name: str) -> bool:
        """Return True if the pattern matches at the beginning of a name, as in ``re.match``."""
        current = self._closure({self._begins}, at_end=not name)
        for k, char in enumerate(name):
            if self._end in current:
                return True
            states = self._states
            following = {
                following_state
                for number in current
                if (state := states[number]).after and (char in state.chars) != state.negated
                for following_state in state.after
            }
            current = self._closure(following, at_end=k == len(name) - 1)
            if not current:
                return False
        return self._end in current

    def _closure(self, states: set[int], at_end: bool) -> set[int]:
        closure, todo = set(states), list(states)
        while todo:
            number = todo.pop()
            if number in self._anchored_end and not at_end:
                closure.discard(number)
                continue
            for state in self._states[number].free:
                if state not in closure:
                    closure.add(state)
                    todo.append(state)
        return closure

    def _unsupported(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self._key}: the pattern {show(self._text)} has unsupported syntax at character {self._at}; expected "
            "literals, classes, groups, alternatives and repetitions"
        )

    def _new(self) -> int:
        self._states.append(_State(frozenset(), False, [], []))
        return len(self._states) - 1

    def _alternatives(self, begin: int, depth: int) -> int:
        if depth > _DEEPEST:
            raise self._unsupported()
        end = self._new()
        while True:
            first = self._new()
            self._states[begin].free.append(first)
            self._states[self._sequence(first, depth)].free.append(end)
            if not self._text.startswith("|", self._at):
                return end
            self._at += 1

    def _sequence(self, begin: int, depth: int) -> int:
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            begin = self._repeated(begin, depth)
        return begin

    def _repeated(self, begin: int, depth: int) -> int:
        start = self._new()
        self._states[begin].free.append(start)
        end = self._atom(start, depth)
        kind = self._text[self._at : self._at + 1]
        if kind and kind in "*+?":
            self._at += 1
            if self._text[self._at : self._at + 1] == "?":  # lazy quantifiers match the same names
                self._at += 1
            if kind != "+":
                self._states[start].free.append(end)
            if kind != "?":
                again = self._new()
                self._states[end].free.append(again)
                self._states[again].free.append(start)
        elif kind == "{":
            raise self._unsupported()
        return end

    def _atom(self, begin: int, depth: int) -> int:
        char = self._text[self._at]
        if char == "(":
            self._at += 1
            if self._text.startswith("?:", self._at):
                self._at += 2
            elif self._text.startswith("?", self._at):
                raise self._unsupported()
            end = self._alternatives(begin, depth + 1)
            if not self._text.startswith(")", self._at):
                raise self._unsupported()
            self._at += 1
            return end
        if char == "^":
            if self._at > 0:
                raise self._unsupported()
            self._at += 1
            return self._anchored(begin)
        if char == "$":
            self._at += 1
            end = self._new()
            self._states[begin].free.append(end)
            self._anchored_end.append(end)
            return self._anchored(end)
        if char in "*+?{":
            raise self._unsupported()
        chars, negated = self._characters()
        end = self._new()
        after = self._new()
        self._states[begin].free.append(after)
        self._states[after] = _State(chars, negated, [end], [])
        return end

    def _anchored(self, end: int) -> int:
        if self._text[self._at : self._at + 1] in ("*", "+", "?"):
            raise self._unsupported()
        return end

    def _characters(self) -> tuple[frozenset[str], bool]:
        char = self._text[self._at]
        self._at += 1
        if char == ".":
            return frozenset("\n"), True
        if char == "\\":
            return self._escaped(), False
        return self._class() if char == "[" else (frozenset(char), False)

    def _escaped(self) -> frozenset[str]:
        char = self._text[self._at : self._at + 1]
        if not char or (char.isalnum() and char not in _CLASSES):
            raise self._unsupported()
        self._at += 1
        return frozenset(_CLASSES.get(char, char))

    def _class(self) -> tuple[frozenset[str], bool]:
        negated = self._text.startswith("^", self._at)
        self._at += negated
        if self._text.startswith("]", self._at):
            raise self._unsupported()
        chars: set[str] = set()
        while not self._text.startswith("]", self._at):
            char = self._text[self._at : self._at + 1]
            if not char:
                raise self._unsupported()
            self._at += 1
            if char == "\\":
                chars |= self._escaped()
                if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                    raise self._unsupported()
            elif self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                last = self._text[self._at + 1]
                if last < char or last in "\\[":
                    raise self._unsupported()
                self._at += 2
                chars.update(map(chr, range(ord(char), min(ord(last), ord(char) + 255) + 1)))
            else:
                chars.add(char)
        self._at += 1
        return frozenset(chars), negated


@lru_cache(256)
def compiled(text: str, key: str) -> Pattern:
    """Return a compiled pattern; cached, because a configuration is applied to every module."""
    return Pattern(text, key)


# ---- globs ----


class Globs:
    """An ordered list of names and globs; the first match wins."""

    def __init__(self, texts: Iterable[str], key: str) -> None:
        self._names: dict[str, int] = {}
        self._globs: list[tuple[int, str, _Stars | Pattern]] = []
        for number, text in enumerate(texts):
            if not any(char in text for char in _WILDCARDS):
                self._names[text] = number
            elif "?" in text or "[" in text:
                self._globs.append((number, text, Pattern(_expression(text), key)))
            else:
                self._globs.append((number, text, _Stars(text)))

    def first(self, name: str) -> str | None:
        """Return the first matching name or glob, or None."""
        exact = self._names.get(name)
        for number, text, glob in self._globs:
            if exact is not None and exact < number:
                break
            if glob.matches(name):
                return text
        return None if exact is None else name


class _Stars:
    """A glob of literals and ``*``, matched greedily: the leftmost match of a literal leaves the most to the rest."""

    def __init__(self, text: str) -> None:
        self._first, *self._between, self._last = text.split("*")

    def matches(self, name: str) -> bool:
        """Return True if the whole name matches."""
        at, end = len(self._first), len(name) - len(self._last)
        if at > end or not name.startswith(self._first) or not name.endswith(self._last):
            return False
        for literal in self._between:
            at = name.find(literal, at, end)
            if at < 0:
                return False
            at += len(literal)
        return True


def _expression(glob: str) -> str:
    """Translate a glob into a regular expression for whole names."""
    parts, at = [], 0
    while at < len(glob):
        char = glob[at]
        end = _end_of_class(glob, at) if char == "[" else -1
        if end >= 0:
            inside = glob[at + 1 : end]
            negated = inside.startswith("!")
            parts.append(f"[{'^' if negated else ''}{''.join(map(_escaped_in_class, inside[negated:]))}]")
            at = end
        else:
            parts.append({"*": ".*", "?": "."}.get(char) or (char if char.isalnum() else f"\\{char}"))
        at += 1
    return "".join(parts) + "$"


def _end_of_class(glob: str, begin: int) -> int:
    """Return the position of the closing bracket of a class; -1 if the opening bracket is a literal."""
    first = begin + 1 + glob.startswith("!", begin + 1)
    return glob.find("]", first + 1)  # a leading "]" is a character of the class


def _escaped_in_class(char: str) -> str:
    return char if char.isalnum() or char == "-" else f"\\{char}"
