"""Metadata of any format as safetensors stores it: text; and as nested containers in training checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import FormatError, TensorNotFoundError
from .text import error_about, show

# Most names in a message.
_SHOWN = 20


def as_texts(metadata: Mapping[Any, Any]) -> dict[str, str]:
    """Convert metadata to text: strings stay, other values become JSON. Values without a JSON form are dropped."""
    import json  # would add a millisecond to every import

    texts = {}
    for key, value in metadata.items():
        if isinstance(value, str):
            texts[str(key)] = value
            continue
        try:
            plain = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
            texts[str(key)] = json.dumps(plain, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            continue
    return texts


# ---- nested containers of training checkpoints ----


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
    shown = ", ".join(show(text)[1:-1] for text in containers[:_SHOWN]) or "none"
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
