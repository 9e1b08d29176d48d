"""Tensor names: layers, natural order, families, selection by shell patterns, renaming, nested dicts and containers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..errors import FormatError, NoMatchError, TensorNotFoundError
from .arrays import check_mapping
from .runtime import paused
from .table import distinct
from .text import clip, error_about, plural, show, similar

#: A number between dots or slashes, such as a layer's or an expert's; also after "layers_" and "blocks_", which Flax
#: writes.
NUMBER = re.compile(r"(?=[0-9])(?:(?<![^./])|(?<=layers_)|(?<=blocks_))(0|[1-9][0-9]{0,8})(?![^./])")

# Further numbers in a name are treated as text. The names of experts in layers have two.
_MOST_NUMBERS = 4

# The container and number of a layer, such as "layers.0", "h.11", "double_blocks.3" or Flax's "layers_0".
_LAYER = re.compile(r"(?<![^./])(?:\w*(?:layers?|blocks?)|h|blk)[./_](?:0|[1-9][0-9]{0,8})(?![^./])", re.ASCII)

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)
_DIGITS = re.compile(r"[0-9]+")
_LARGEST_CHARACTER = 0x10FFFF


def pattern_of(name: str) -> str:
    """Return a tensor's name with ``{}`` for its numbers, which is equal in all layers."""
    return NUMBER.sub("{}", name)


def layer_of(name: str) -> str:
    """Return the prefix of a tensor's layer, such as "model.layers.0"; "" outside layers."""
    match = _LAYER.search(name)
    return "" if match is None else name[: match.end()]


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return items by key, in order."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def natural_key(name: str) -> tuple[str, str]:
    """Return a key that sorts names in natural order: layer 2 before layer 10."""
    return _DIGITS.sub(_with_length, name), name


def _with_length(digits: re.Match[str]) -> str:
    number = digits[0].lstrip("0")
    return chr(min(len(number), _LARGEST_CHARACTER)) + number


class NameFamily(NamedTuple):
    """Tensors that differ only in the numbers of their names; all combinations of these numbers exist."""

    name: str  # such as ``h.{0..11}.w``; the plain name of a single tensor
    first: int  # index of the first tensor
    number: int  # number of tensors


def families(names: Sequence[str], kinds: Iterable[Hashable]) -> list[NameFamily]:
    """Group tensors that differ only in the numbers of their names, in the order of each group's first tensor.

    Tensors of a family have equal ``kinds``, such as dtype and shape.
    """
    groups: dict[Hashable, tuple[int, list[str], list[tuple[int, ...]]]] = {}
    with paused(len(names)):
        for index, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            parts = NUMBER.split(name, _MOST_NUMBERS)
            texts = parts[::2]
            groups.setdefault((*texts, kind), (index, texts, []))[2].append(tuple(map(int, parts[1::2])))
        result = []
        for first, texts, numbers in groups.values():
            if len(numbers) == 1:
                result.append(NameFamily(names[first], first, 1))
                continue
            for product in _products(numbers):
                spelled = "".join(map("".join, zip(texts, (*map(_ranges, product), ""), strict=True)))
                result.append(NameFamily(spelled, first, math.prod(map(len, product))))
    return result


_Product = tuple[tuple[int, ...], ...]


def _products(numbers: Sequence[tuple[int, ...]]) -> list[_Product]:
    """Split tuples of numbers into products of sets, because the layers of a model can have different experts."""
    if len(numbers) == 1 or not numbers[0]:
        return [tuple(zip(numbers[0], strict=True))]
    if len(numbers[0]) == 1:
        return [(tuple(sorted([number for (number,) in numbers])),)]
    rests: dict[int, list[tuple[int, ...]]] = {}
    for combination in numbers:
        rests.setdefault(combination[0], []).append(combination[1:])
    firsts: dict[tuple[_Product, ...], list[int]] = {}
    for first in sorted(rests):
        firsts.setdefault(tuple(_products(rests[first])), []).append(first)
    return [(tuple(group), *product) for products, group in firsts.items() for product in products]


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in braces, ``{0,2..5}``; a single number has no braces."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    spelled = ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
    return f"{{{spelled}}}"


# ---- selection and renaming ----

# A shell pattern or several; None selects everything.
Patterns: TypeAlias = str | Iterable[str] | None

# Pairs of a regular expression and its replacement, as for `re.sub`.
Pair: TypeAlias = tuple[str | re.Pattern[str], str | Callable[[re.Match[str]], str]]
Renames: TypeAlias = Iterable[Pair] | Mapping[str, str] | Pair | None


class Selection:
    """Tensor names that match any pattern of ``only`` and no pattern of ``drop``, by `fnmatch.fnmatchcase`."""

    def __init__(self, only: Patterns = None, drop: Patterns = None) -> None:
        arguments = {"only": only, "drop": drop}
        self._patterns = {what: _listed(what, patterns) for what, patterns in arguments.items() if patterns is not None}
        self._only, self._drop = (_any_of(self._patterns.get(what, [])) for what in arguments)

    def __bool__(self) -> bool:
        """Return whether the selection may leave out a tensor."""
        return "only" in self._patterns or bool(self._patterns.get("drop"))

    def takes(self, name: str) -> bool:
        """Return whether the selection includes a name."""
        return ("only" not in self._patterns or self._only(name)) and not self._drop(name)

    def of(self, names: Collection[str]) -> list[str]:
        """Return the selected names in their order."""
        if not self:
            return list(names)
        for what, patterns in self._patterns.items():
            check_matches(what, patterns, names)
        return [name for name in names if isinstance(name, str) and self.takes(name)]


def check_matches(what: str, patterns: Patterns, names: Collection[str]) -> None:
    """Refuse patterns that match no name."""
    texts = dict.fromkeys(name for name in names if isinstance(name, str))  # a dict may have other keys
    for pattern in () if patterns is None else _listed(what, patterns):
        if not any(map(re.compile(translate(pattern)).match, texts)) if _is_pattern(pattern) else pattern not in texts:
            raise _matches_nothing(what, pattern, list(texts))


def choose(known: Collection[str], names: Iterable[str] | None, only: Patterns, drop: Patterns) -> list[str]:
    """Return the names of the tensors to work on. ``names`` are exact, and not looked up."""
    if names is not None and only is not None:
        raise ValueError("names= takes exact names and only= takes patterns: pass only one of them")
    return Selection(only, drop).of(known if names is None else list(distinct(names)))


# Marks of regular expressions that shell patterns and names hardly have.
_OF_EXPRESSIONS = ("\\", "^", "$", ".+", "(", "|")


def _listed(what: str, patterns: Patterns) -> list[str]:
    single = isinstance(patterns, (str, bytes)) or not isinstance(patterns, Iterable)
    items: list[Any] = [patterns] if single else list(patterns)  # type: ignore[arg-type]
    for pattern in items:
        if not isinstance(pattern, str):
            raise TypeError(f"{what} must be a shell pattern or a list of shell patterns, got {show(pattern)}")
    return items


def _is_pattern(text: str) -> bool:
    return any(mark in text for mark in "*?[")


def _any_of(patterns: list[str]) -> Callable[[str], bool]:
    exact = {text for text in patterns if not _is_pattern(text)}
    match = re.compile("|".join(translate(text) for text in patterns if _is_pattern(text)) or r"(?!)").match
    return lambda name: name in exact or match(name) is not None


def _matches_nothing(what: str, pattern: str, names: list[str]) -> NoMatchError:
    message = f"{what}={show(pattern)} matches none of {plural(len(names), 'name')}"
    for longer in (f"{pattern}*", f"*{pattern}", f"*{pattern}*"):
        count = sum(map(bool, map(re.compile(translate(longer)).match, names))) if pattern else 0
        if count:
            return NoMatchError(f"{message}, because it must match whole names; {show(longer)} matches {count:,}")
    if any(mark in pattern for mark in _OF_EXPRESSIONS):
        return NoMatchError(f"{message}; it is a shell pattern, not a regular expression: * stands for any text")
    literal = re.sub(r"[*?\[\]]+", "", pattern)
    close = similar(literal, names, cutoff=0.3) if literal else []
    return NoMatchError(message + (f"; similar names: {', '.join(close)}" if close else ""))


def renamed(names: Iterable[str], renames: Renames) -> dict[str, str]:
    """Return the new name of each tensor; a name stays as it is if no expression matches."""
    pairs = []
    try:
        for pattern, replacement in pairs_of(renames):
            pairs.append((re.compile(pattern), replacement))
    except re.error as error:
        shown = clip(str(pattern), 200)
        raise ValueError(f"rename: {show(shown)} is not a valid regular expression: {error}") from None
    new: dict[str, str] = {}
    origin: dict[str, str] = {}
    for name in names:
        new_name = name
        try:
            for expression, replacement in pairs:
                new_name = expression.sub(replacement, new_name)
        except (re.error, IndexError) as error:  # such as an unknown group
            raise ValueError(f"rename: {show(replacement)} is not a valid replacement: {error}") from None
        if name and not new_name:  # a file may have a tensor "", but rename must not
            raise ValueError(f"rename leaves tensor {show(name)} without a name")
        if new_name in origin:
            raise ValueError(
                f"rename gives tensors {show(origin[new_name])} and {show(name)} the same name {show(new_name)}"
            )
        origin[new_name] = name
        new[name] = new_name
    return new


def pairs_of(renames: Renames) -> list[tuple[Any, Any]]:
    """Return an argument as pairs: an expression, str or compiled, and its replacement, str or callable."""
    if renames is None:
        return []
    if isinstance(renames, (str, bytes)):
        raise TypeError(f"rename must be (expression, replacement) pairs, got {show(renames)}")
    pairs: list[Any] = list(renames.items()) if isinstance(renames, Mapping) else list(renames)
    if len(pairs) == 2 and isinstance(pairs[0], (str, re.Pattern)):
        pairs = [tuple(pairs)]
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"rename must be (expression, replacement) pairs, got {show(pair)}")
        pattern, replacement = pair
        if not isinstance(pattern, (str, re.Pattern)) or not (isinstance(replacement, str) or callable(replacement)):
            raise TypeError(f"rename must be (expression, replacement) pairs of str, got {show(pair)}")
    return list(map(tuple, pairs))


# ---- nested dicts: JAX pytrees, Flax parameters, torch module states ----


def nest(weights: Mapping[str, Any], sep: str = ".") -> dict[str, Any]:
    """Nest a dict of weights by the parts of its names: ``{"a.b": x}`` becomes ``{"a": {"b": x}}``.

    Numbers stay strings, as in ``{"layers": {"0": ...}}``, so that `flatten` restores the names.

    Args:
        weights: a dict with any values, or an open `Checkpoint`.
        sep: separator between the parts of a name.

    Returns:
        Nested dicts, in the order of ``weights``. Values are not copied.

    Raises:
        TypeError: ``weights`` is not a mapping, or a name is not a str.
        ValueError: a name is the beginning of another name, such as "a" and "a.b"; or ``sep`` is empty.

    Example:
        >>> import safeload
        >>> safeload.nest({"h.0.w": 1, "h.1.w": 2, "norm": 3})
        {'h': {'0': {'w': 1}, '1': {'w': 2}}, 'norm': 3}
    """
    check_mapping(weights, "weights")
    _check_separator(sep)
    tree: dict[str, Any] = {}
    created = {id(tree)}  # to tell these dicts from values, which can be dicts too
    for name, value in weights.items():
        if not isinstance(name, str):
            raise TypeError(f"names must be str, got {show(name)}")
        *path, last = name.split(sep)
        inner = tree
        for depth, part in enumerate(path):
            if part not in inner:
                inner[part] = {}
                created.add(id(inner[part]))
            inner = inner[part]
            if id(inner) not in created:
                raise _overlap(sep.join(path[: depth + 1]), name)
        if last in inner:
            raise _overlap(name, next(longer for longer in weights if longer.startswith(name + sep)))
        inner[last] = value
    return tree


def _overlap(name: str, longer: str) -> ValueError:
    return ValueError(f"tensor {show(name)} would also be the dict that holds {show(longer)}")


def flatten(tree: Mapping[str, Any], sep: str = ".") -> dict[str, Any]:
    """Flatten nested dicts and lists into one dict: ``{"a": {"b": [x, y]}}`` becomes ``{"a.b.0": x, "a.b.1": y}``.

    Args:
        tree: nested mappings, lists and tuples; keys must be str or int. Anything else is a value.
        sep: separator between the parts of a name.

    Returns:
        Values by name, in the order of the tree. Values are not copied; empty dicts and lists are dropped.

    Raises:
        TypeError: ``tree`` is not a mapping, or a key is neither a str nor an int.
        ValueError: two values would have the same name, the tree contains itself, or ``sep`` is empty.

    Example:
        >>> import safeload
        >>> safeload.flatten({"h": [{"w": 1}, {"w": 2}], "norm": 3})
        {'h.0.w': 1, 'h.1.w': 2, 'norm': 3}
    """
    check_mapping(tree, "tree", "names to arrays and nested dicts")
    _check_separator(sep)
    flat: dict[str, Any] = {}
    # A stack instead of recursion, because a tree can be deeper than Python's recursion limit.
    walked: list[tuple[int, Iterator[tuple[Any, Any]]]] = [(id(tree), iter(tree.items()))]
    inside = {id(tree)}
    path: list[str] = []
    while walked:
        container, items = walked[-1]
        item = next(items, None)
        if item is None:
            walked.pop()
            inside.discard(container)
            if path:
                path.pop()
            continue
        key, value = item
        if not isinstance(key, str) and (not isinstance(key, int) or isinstance(key, bool)):
            prefix = sep.join(path)
            inside_of = f" in {show(prefix)}" if prefix else ""
            raise TypeError(f"keys{inside_of} must be str or int, got {show(key)}")
        path.append(key if isinstance(key, str) else str(key))
        children: Any = value.items() if isinstance(value, Mapping) else None
        children = enumerate(value) if isinstance(value, (list, tuple)) else children
        if children is not None:
            if id(value) in inside:
                raise ValueError(f"{show(sep.join(path))} contains itself")
            inside.add(id(value))
            walked.append((id(value), iter(children)))
            continue
        name = sep.join(path)
        path.pop()
        if name in flat:
            raise ValueError(f"two values would have the name {show(name)}")
        flat[name] = value
    return flat


def _check_separator(sep: str) -> None:
    if not isinstance(sep, str) or not sep:
        raise ValueError(f"sep must be a nonempty str, got {show(sep)}")


# ---- nested containers of training checkpoints ----

# Most containers in a message.
_LISTED = 20


def names_below(paths: Mapping[str, Sequence[Any]], root: str | None, path: str) -> dict[str, str]:
    """Return the names of the tensors and values below a container, each with its name there."""
    if root is None:
        return {name: name for name in paths}
    names: dict[str, str] = {}
    taken: set[str] = set()
    for name, steps in paths.items():
        depth = depth_of(steps, root)
        if depth:
            known = ".".join(map(str, steps[depth:]))
            if known in taken:
                raise FormatError(f"two values below {show(root)} are named {show(known)}", path)
            taken.add(known)
            names[name] = known
    if names:
        return names
    containers = sorted({str(steps[0]) for steps in paths.values() if len(steps) > 1})
    shown = ", ".join(show(text)[1:-1] for text in containers[:_LISTED]) or "none"
    raise error_about(TensorNotFoundError, f"no container {show(root)}; containers: {shown}", path=path)


def depth_of(steps: Sequence[Any], root: str) -> int:
    """Return how many steps of a path make up the name of a container; 0 if the path is not below it."""
    text = ""
    for k, step in enumerate(steps[:-1]):
        text += f".{step}" if k else str(step)
        if text == root:
            return k + 1
        if len(text) > len(root):
            return 0
    return 0


class _Level(dict[Any, Any]):
    """A level of the tree; dicts that are values themselves are not levels."""


def nested(paths: Mapping[str, Sequence[Any]], read: Callable[[str], Any], path: str) -> dict[str, Any]:
    """Return values as nested dicts and lists; the first key of each path is text."""
    root = _Level()
    for name, steps in paths.items():
        level = root
        for step in steps[:-1]:
            below = level.setdefault(step, _Level())
            if type(below) is not _Level:
                raise FormatError(f"{show(name)} is below another value", path)
            level = below
        if steps[-1] in level:
            raise FormatError(f"{show(name)} has the path of another value", path)
        level[steps[-1]] = read(name)
    return {key: _plain(value) for key, value in root.items()}


def _plain(value: Any) -> Any:
    """Return a level as list if its keys are the indices of a whole list, else as dict with text as keys."""
    if type(value) is not _Level:
        return value
    items = {key: _plain(item) for key, item in value.items()}
    if items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items))):
        return [items[k] for k in range(len(items))]
    return {str(key): item for key, item in items.items()}
