"""Patterns of module names in configurations, matched in linear time: they come from files, as hostile as any other.

A subset of regular expressions: literals, ``.``, ``*``, ``+``, ``?``, classes (of ASCII), groups, alternation, anchors.
They match as those of `re` do. A pattern
becomes a nondeterministic automaton whose states are advanced together (Thompson, 1968), so that no pattern takes more
than its length times that of the name.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..base.text import show
from ..errors import UnsupportedError

# Characters of a pattern. The longest in published configurations have about 100.
LONGEST = 1000

_CLASSES = {
    "d": "0123456789",
    "w": "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_",
    "s": " \t\n\r\f\v",
}


class _State(NamedTuple):
    """A state of the automaton.

    Attributes:
        chars: characters that lead to ``after``; the empty set for none.
        negated: whether ``chars`` are those that do not.
        after: states that follow a character.
        free: states that follow without one.
    """

    chars: frozenset[str]
    negated: bool
    after: list[int]
    free: list[int]


class Pattern:
    """One pattern.

    Args:
        text: the pattern.
        key: the key of the configuration that holds it, for errors.

    Raises:
        UnsupportedError: it is too long, or has something outside the subset.
    """

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
        """Whether the pattern matches at the beginning of a name, as ``re.match`` does."""
        current = self._closure({self._begins}, at_end=not name)
        for k, char in enumerate(name):
            if self._end in current:
                return True
            states = self._states
            following = {
                state
                for number in current
                if (one := states[number]).after and (char in one.chars) != one.negated
                for state in one.after
            }
            current = self._closure(following, at_end=k == len(name) - 1)
            if not current:
                return False
        return self._end in current

    def _closure(self, states: set[int], at_end: bool) -> set[int]:
        found, todo = set(states), list(states)
        while todo:
            number = todo.pop()
            if number in self._anchored_end and not at_end:
                found.discard(number)
                continue
            for state in self._states[number].free:
                if state not in found:
                    found.add(state)
                    todo.append(state)
        return found

    def _unsupported(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self._key}: the pattern {show(self._text)} has something other than literals, classes, groups, "
            f"alternatives and repetitions at character {self._at}"
        )

    def _new(self) -> int:
        self._states.append(_State(frozenset(), False, [], []))
        return len(self._states) - 1

    def _alternatives(self, begin: int, depth: int) -> int:
        if depth > 50:
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
            if self._text[self._at : self._at + 1] == "?":  # lazy: the same names match
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
    """The pattern of a text; cached, because a configuration is applied to every module."""
    return Pattern(text, key)
