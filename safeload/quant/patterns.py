"""Patterns of module names in configurations: regular expressions and globs, matched in linear time.

Configurations come from untrusted files, and `re` takes exponential time on some patterns.

`Pattern` supports a subset of regular expressions: literals, ``.``, ``*``, ``+``, ``?``, ASCII classes, groups,
alternation and anchors, with the semantics of `re`. It simulates a nondeterministic automaton, which takes at most the
length of the pattern times the length of the name.

`Globs` matches with the expressions of `fnmatch`, which never try a part of a name twice (bpo-40480).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import translate
from functools import lru_cache
from typing import Any

from ..core.text import show
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
# Stands behind a name as often as a pattern has "$", which takes it.
_END = "end"


# ---- regular expressions ----


class Pattern:
    """A regular expression of the supported subset, as the automaton of its atoms (Glushkov, 1961).

    Sets of atoms are bits of an integer. An expression has a triple: whether it matches "", its first atoms, its last.
    """

    def __init__(self, text: str, key: str) -> None:
        self._text, self._key, self._at = text, key, 0
        _check_length(text, key)
        self._atoms: list[tuple[frozenset[str], bool]] = []  # characters, and whether the atom takes all but these
        self._next_atoms: list[int] = []  # by atom
        self._taking: dict[str, int] = {}  # atoms by the character that they take
        self._whole = self._alternatives(0)
        if self._at < len(text):
            raise self._unsupported()

    def matches(self, name: str) -> bool:
        """Return True if the pattern matches at the beginning of a name, as in ``re.match``."""
        empty, atoms, last = self._whole
        if empty:
            return True
        for char in (*name, *[_END] * self._text.count("$")):
            if char not in self._taking:
                takes = [(char in chars) != negated for chars, negated in self._atoms]
                self._taking[char] = sum(1 << k for k, taken in enumerate(takes) if taken)
            taking = atoms & self._taking[char]
            if taking & last:
                return True
            atoms = 0
            for k in _bits(taking):
                atoms |= self._next_atoms[k]
        return False

    # ---- parser ----

    def _unsupported(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self._key}: the pattern {show(self._text)} has unsupported syntax at character {self._at}; expected "
            "literals, classes, groups, alternatives and repetitions"
        )

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _takes(self, text: str) -> bool:
        is_next = self._text.startswith(text, self._at)
        self._at += len(text) * is_next
        return is_next

    def _follow(self, last: int, first: int) -> None:
        for k in _bits(last):
            self._next_atoms[k] |= first

    def _alternatives(self, depth: int) -> tuple[bool, int, int]:
        if depth > _DEEPEST:
            raise self._unsupported()
        empty, first, last = False, 0, 0
        while True:
            all_empty, begin, end = True, 0, 0
            while self._next() not in ("", "|", ")"):
                is_empty, following, ends = self._repeated(depth)
                self._follow(end, following)
                begin, end = begin | following * all_empty, ends | end * is_empty
                all_empty = all_empty and is_empty
            empty, first, last = empty or all_empty, first | begin, last | end
            if not self._takes("|"):
                return empty, first, last

    def _repeated(self, depth: int) -> tuple[bool, int, int]:
        empty, first, last = self._atom(depth)
        kind = self._next()
        if kind == "{":
            raise self._unsupported()
        if kind and kind in "*+?":
            self._at += 1
            self._takes("?")  # lazy quantifiers match the same names
            if kind != "?":
                self._follow(last, first)
            empty = empty or kind != "+"
        return empty, first, last

    def _atom(self, depth: int) -> tuple[bool, int, int]:
        char = self._next()
        if self._takes("("):
            if not self._takes("?:") and self._next() == "?":
                raise self._unsupported()
            group = self._alternatives(depth + 1)
            if not self._takes(")"):
                raise self._unsupported()
            return group
        if char in "*+?{" or (char == "^" and self._at > 0):
            raise self._unsupported()
        self._at += 1
        if char in "^$" and self._next() in ("*", "+", "?"):
            raise self._unsupported()
        if char == "^":
            return True, 0, 0
        chars, negated = frozenset((_END if char == "$" else char,)), False
        if char == ".":
            chars, negated = frozenset("\n"), True
        elif char == "\\":
            (escaped,) = self._groups(_ESCAPED)
            chars = frozenset(_CLASSES.get(escaped, escaped))
        elif char == "[":
            negated = self._takes("^")
            chars = self._class()
        self._atoms.append((chars | {_END} if negated else chars, negated))
        self._next_atoms.append(0)
        atom = 1 << len(self._atoms) - 1
        return False, atom, atom

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


def _bits(number: int) -> Iterator[int]:
    while number:
        bit = number.bit_length() - 1
        yield bit
        number ^= 1 << bit


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
            if any(char in text for char in "*?["):
                _check_length(text, key)
                expression = translate(text)  # each star takes the first match for good
                if "(?!)" in expression:  # a class without characters
                    raise UnsupportedError(f"{key}: the glob {show(text)} has an empty range of characters")
                self._globs.append((number, text, re.compile(expression)))
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


def _check_length(text: str, key: str) -> None:
    if len(text) > LONGEST:
        raise UnsupportedError(f"{key}: a pattern of {len(text):,} characters exceeds the limit of {LONGEST:,}")
