"""Some of the tensors: shell patterns of names to take and to leave out, and new names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import translate
from typing import Any, TypeAlias

from ..errors import TensorNotFoundError
from .table import similar
from .text import clip, plural, show

# One shell pattern or several; None for no restriction.
Patterns: TypeAlias = str | Iterable[str] | None

# Pairs of a regular expression and its replacement, as `re.sub` takes them.
Pair: TypeAlias = tuple[str | re.Pattern[str], str | Callable[[re.Match[str]], str]]
Renames: TypeAlias = Iterable[Pair] | Mapping[str, str] | Pair | None

_Compiled: TypeAlias = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]


class NoMatchError(TensorNotFoundError):
    """A pattern that the caller chose matches no name."""


class Selection:
    """Tensors whose names match any pattern of ``only`` and none of ``drop``, as `fnmatch.fnmatchcase` matches.

    Args:
        only: patterns of the names to take; None for all.
        drop: patterns of the names to leave out; None for none.

    Raises:
        TypeError: a pattern is not a str.
    """

    def __init__(self, only: Patterns = None, drop: Patterns = None) -> None:
        given = {"only": only, "drop": drop}
        self._patterns = {what: _listed(what, patterns) for what, patterns in given.items() if patterns is not None}
        self._only, self._drop = (_any_of(self._patterns.get(what, [])) for what in given)

    def __bool__(self) -> bool:
        """Whether it may leave out a tensor."""
        return "only" in self._patterns or bool(self._patterns.get("drop"))

    def takes(self, name: str) -> bool:
        """Whether it takes a tensor of this name."""
        return ("only" not in self._patterns or self._only(name)) and not self._drop(name)

    def of(self, names: Collection[str]) -> list[str]:
        """The names that it takes, in their order.

        Raises:
            NoMatchError: a pattern matches none of them.
        """
        if not self:
            return list(names)
        for what, patterns in self._patterns.items():
            check_matches(what, patterns, names)
        return [name for name in names if isinstance(name, str) and self.takes(name)]


def check_matches(what: str, patterns: Patterns, names: Collection[str]) -> None:
    """Refuses patterns that match none of the names.

    Raises:
        NoMatchError: for the first such pattern; the message has ``what``, the argument that it is from.
        TypeError: a pattern is not a str.
    """
    texts = dict.fromkeys(name for name in names if isinstance(name, str))  # a dict may have other keys
    for pattern in () if patterns is None else _listed(what, patterns):
        if not any(map(re.compile(translate(pattern)).match, texts)) if _is_pattern(pattern) else pattern not in texts:
            raise _matches_nothing(what, pattern, list(texts))


def select(names: Collection[str], only: Patterns, drop: Patterns) -> list[str]:
    """The names that a `Selection` of these patterns takes.

    Raises:
        TensorNotFoundError, TypeError: see `Selection`.
    """
    return Selection(only, drop).of(names)


def distinct(names: Iterable[str]) -> Iterable[str]:
    """Exact names, without duplicates; TypeError for a single str, whose characters would count as names."""
    if isinstance(names, str):
        raise TypeError("names must be an iterable of names, not one str")
    if not isinstance(names, Iterable):
        raise TypeError(f"names must be an iterable of names, not {type(names).__name__}")
    return dict.fromkeys(names)


def choose(known: Collection[str], names: Iterable[str] | None, only: Patterns, drop: Patterns) -> list[str]:
    """The tensors that a function works on.

    Args:
        known: all names.
        names: exact names, which are not looked up; None for all.
        only: patterns of the names to take, instead of ``names``.
        drop: patterns of the names to leave out.

    Raises:
        ValueError: both ``names`` and ``only``.
        TensorNotFoundError, TypeError: see `Selection`.
    """
    if names is not None and only is not None:
        raise ValueError("names= are exact names and only= are patterns of names: pass one of them")
    chosen = known if names is None else list(distinct(names))
    return list(chosen) if only is None and drop is None else select(chosen, only, drop)


def _listed(what: str, patterns: Patterns) -> list[str]:
    single = isinstance(patterns, (str, bytes)) or not isinstance(patterns, Iterable)
    several: list[Any] = [patterns] if single else list(patterns)  # type: ignore[arg-type]
    for pattern in several:
        if not isinstance(pattern, str):
            raise TypeError(f"{what} must be a shell pattern or a list of these, found {show(pattern)}")
    return several


def _is_pattern(text: str) -> bool:
    return any(mark in text for mark in "*?[")


def _any_of(patterns: list[str]) -> Callable[[str], bool]:
    """Whether a name matches any pattern: exact names are looked up, the others are one regular expression."""
    exact = {text for text in patterns if not _is_pattern(text)}
    match = re.compile("|".join(translate(text) for text in patterns if _is_pattern(text)) or r"(?!)").match
    return lambda name: name in exact or match(name) is not None


def _matches_nothing(what: str, pattern: str, names: list[str]) -> NoMatchError:
    message = f"{what}={show(pattern)} matches none of {plural(len(names), 'name')}"
    literal = re.sub(r"[*?\[\]]+", "", pattern)
    close = similar(literal, names, cutoff=0.3) if literal else []
    return NoMatchError(message + (f"; close to it: {', '.join(close)}" if close else ""))


def renamed(names: Iterable[str], renames: Renames) -> dict[str, str]:
    """The new name of each tensor; those that no expression matches keep theirs.

    Args:
        names: the names, which are distinct.
        renames: pairs of a regular expression and its replacement, each applied with `re.sub` to the result of the
            pair before; a dict, or a single pair.

    Raises:
        ValueError: an invalid expression or replacement, a name that becomes empty, or two tensors with one new name;
            the message has both old names.
        TypeError: something else than pairs.
    """
    pairs = [(_compiled(pattern), replacement) for pattern, replacement in pairs_of(renames)]
    new: dict[str, str] = {}
    origin: dict[str, str] = {}
    for name in names:
        to = _substituted(name, pairs)
        if name and not to:  # a tensor may be called "", but rename must not make it so
            raise ValueError(f"rename leaves tensor {show(name)} without a name")
        if to in origin:
            raise ValueError(f"rename gives tensors {show(origin[to])} and {show(name)} the same name {show(to)}")
        origin[to] = name
        new[name] = to
    return new


def _substituted(name: str, pairs: list[_Compiled]) -> str:
    replacement: object = None
    try:
        for pattern, replacement in pairs:
            name = pattern.sub(replacement, name)
    except (re.error, IndexError) as error:  # an unknown group
        raise ValueError(f"rename: the replacement {show(replacement)} is not valid: {error}") from None
    return name


def pairs_of(renames: Renames) -> list[tuple[Any, Any]]:
    """The pairs of an argument, as given: an expression, text or compiled, and its replacement, text or a function.

    Raises:
        TypeError: something else than pairs.
    """
    if renames is None:
        return []
    if isinstance(renames, (str, bytes)):
        raise TypeError(f"rename must be pairs (expression, replacement), found {show(renames)}")
    several: list[Any] = list(renames.items()) if isinstance(renames, Mapping) else list(renames)
    if len(several) == 2 and isinstance(several[0], (str, re.Pattern)):
        several = [tuple(several)]
    for pair in several:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"rename must be pairs (expression, replacement), found {show(pair)}")
        pattern, replacement = pair
        if not isinstance(pattern, (str, re.Pattern)) or not (isinstance(replacement, str) or callable(replacement)):
            raise TypeError(f"rename must be pairs of text (expression, replacement), found {show(pair)}")
    return [(pattern, replacement) for pattern, replacement in several]


def _compiled(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        shown = clip(str(pattern), 200)
        raise ValueError(f"rename: {show(shown)} is not a valid regular expression: {error}") from None
