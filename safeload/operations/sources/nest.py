"""Convert dotted names to nested dicts and back: JAX pytrees, Flax parameters, torch module states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...base.arrays import check_mapping
from ...base.text import show


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
