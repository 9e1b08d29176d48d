"""Names and globs of modules in configurations, matched as `fnmatch` does, in time that no glob can make long.

A glob of literals and ``*`` needs a search for each literal. One with ``?`` or classes becomes a `patterns` pattern.
"""

from __future__ import annotations

from collections.abc import Iterable

from .patterns import Pattern

_SPECIAL = "*?["


class Globs:
    """Names and globs of which the first that matches a name counts.

    Args:
        texts: them, in order.
        key: the key of the configuration that holds them, for errors.

    Raises:
        UnsupportedError: a glob is too long, or has a class that `patterns` does not match.
    """

    def __init__(self, texts: Iterable[str], key: str) -> None:
        self._names: dict[str, int] = {}
        self._globs: list[tuple[int, str, _Stars | Pattern]] = []
        for number, text in enumerate(texts):
            if not any(char in text for char in _SPECIAL):
                self._names[text] = number
            elif "?" in text or "[" in text:
                self._globs.append((number, text, Pattern(_expression(text), key)))
            else:
                self._globs.append((number, text, _Stars(text)))

    def first(self, name: str) -> str | None:
        """The first that matches a name; None without one."""
        own = self._names.get(name)
        for number, text, glob in self._globs:
            if own is not None and own < number:
                break
            if glob.matches(name):
                return text
        return None if own is None else name


class _Stars:
    """A glob of literals and ``*``: the leftmost place of each literal leaves most to those after it."""

    def __init__(self, text: str) -> None:
        self._first, *self._between, self._last = text.split("*")

    def matches(self, name: str) -> bool:
        """Whether all of a name matches."""
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
    """A glob as a regular expression of all of a name."""
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
    """Where the class that begins at a bracket ends; -1 if it does not, so that the bracket means itself."""
    first = begin + 1 + glob.startswith("!", begin + 1)
    return glob.find("]", first + 1)  # a bracket that comes first is one of its characters


def _escaped_in_class(char: str) -> str:
    return char if char.isalnum() or char == "-" else f"\\{char}"
