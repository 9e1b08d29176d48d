"""Names with dots to nested dicts, and back: pytrees of JAX, parameters of Flax, state of torch modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...base.arrays import check_mapping
from ...base.text import show


def nest(weights: Mapping[str, Any], sep: str = ".") -> dict[str, Any]:
    """Nests a dict of weights by the parts of its names: ``{"a.b": x}`` becomes ``{"a": {"b": x}}``.

    Numbers stay text, as in ``{"layers": {"0": ...}}``, so that `flatten` gives the same names again.

    Args:
        weights: name to anything: a dict, or an open `Checkpoint`.
        sep: what separates the parts of a name.

    Returns:
        Nested dicts, in the order of ``weights``; the arrays are the same objects.

    Raises:
        TypeError: ``weights`` is not a mapping, or a name is not a str.
        ValueError: one name is the beginning of another, such as "a" and "a.b"; or ``sep`` is empty.

    Example:
        >>> import safeload
        >>> safeload.nest({"h.0.w": 1, "h.1.w": 2, "norm": 3})
        {'h': {'0': {'w': 1}, '1': {'w': 2}}, 'norm': 3}
    """
    check_mapping(weights, "weights")
    _check_separator(sep)
    tree: dict[str, Any] = {}
    made = {id(tree)}  # a value may itself be a dict
    for name, value in weights.items():
        if not isinstance(name, str):
            raise TypeError(f"a name must be a str, found {show(name)}")
        *path, last = name.split(sep)
        inner = tree
        for depth, part in enumerate(path):
            if part not in inner:
                inner[part] = {}
                made.add(id(inner[part]))
            inner = inner[part]
            if id(inner) not in made:
                raise _overlap(sep.join(path[: depth + 1]), name)
        if last in inner:
            raise _overlap(name, next(other for other in weights if other.startswith(name + sep)))
        inner[last] = value
    return tree


def _overlap(name: str, other: str) -> ValueError:
    return ValueError(f"tensor {show(name)} would also be the dict that holds {show(other)}")


def flatten(tree: Mapping[str, Any], sep: str = ".") -> dict[str, Any]:
    """Flattens nested dicts and lists to one dict: ``{"a": {"b": [x, y]}}`` becomes ``{"a.b.0": x, "a.b.1": y}``.

    Args:
        tree: nested mappings, lists and tuples; keys are text or whole numbers. Anything else is a value.
        sep: what separates the parts of a name.

    Returns:
        Name to value, in the order of the tree; the values are the same objects. Empty dicts and lists leave nothing.

    Raises:
        TypeError: ``tree`` is not a mapping, or a key is neither text nor a whole number.
        ValueError: two values have the same name, the tree contains itself, or ``sep`` is empty.

    Example:
        >>> import safeload
        >>> safeload.flatten({"h": [{"w": 1}, {"w": 2}], "norm": 3})
        {'h.0.w': 1, 'h.1.w': 2, 'norm': 3}
    """
    check_mapping(tree, "tree", "names to arrays and nested dicts")
    _check_separator(sep)
    flat: dict[str, Any] = {}
    # A stack instead of recursion: a tree may be deeper than Python's limit.
    walked: list[tuple[int, Iterator[tuple[Any, Any]]]] = [(id(tree), iter(tree.items()))]
    inside = {id(tree)}
    path: list[str] = []
    while walked:
        own, items = walked[-1]
        found = next(items, None)
        if found is None:
            walked.pop()
            inside.discard(own)
            if path:
                path.pop()
            continue
        key, value = found
        path.append(key if isinstance(key, str) else _part(key, sep.join(path)))
        children = _children(value)
        if children is not None:
            if id(value) in inside:
                raise ValueError(f"{show(sep.join(path))} contains itself")
            inside.add(id(value))
            walked.append((id(value), children))
            continue
        name = sep.join(path)
        path.pop()
        if name in flat:
            raise ValueError(f"two values have the name {show(name)}")
        flat[name] = value
    return flat


def _children(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """The items of a container; None for a value."""
    if isinstance(value, Mapping):
        return iter(value.items())
    return iter(enumerate(value)) if isinstance(value, (list, tuple)) else None


def _part(key: Any, prefix: str) -> str:
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    inside = f" in {show(prefix)}" if prefix else ""
    raise TypeError(f"a key{inside} must be text or a whole number, found {show(key)}")


def _check_separator(sep: str) -> None:
    if not isinstance(sep, str) or not sep:
        raise ValueError(f"sep must be text that is not empty, found {show(sep)}")
