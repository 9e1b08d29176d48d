"""The tree of a checkpoint: ``_METADATA``, which says what each leaf is.

1. JSON: ``tree_metadata`` maps a text for people to a leaf; ``use_ocdbt``, ``use_zarr3``,
   ``store_array_data_equal_to_fill_value`` (true: all chunks are stored), ``custom_metadata`` (of the program).
2. A leaf: ``key_metadata``, a list of ``{"key": "0", "key_type": 1}`` (1: index of a list, 2: key of a dict), and
   ``value_metadata`` with ``value_type`` and ``skip_deserialize``.
3. The name of a leaf is its keys, joined with dots. So are the names of arrays in the store.
4. Types: "jax.Array", "np.ndarray" and "scalar" are arrays; "string" is text in ``_strings.json``; "None", "Dict",
   "List", "Tuple" and "NamedTuple" are empty. Leaves of other types come from handlers of the program.
5. Random keys (`jax.random.key`) are stored as their numbers; only ``array_metadatas``, which safeload does not read,
   tells them from other arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...base.text import show
from ...errors import FormatError, LimitError

ARRAYS = frozenset(("jax.Array", "np.ndarray", "scalar"))
STRING = "string"
EMPTY: Mapping[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": ()}
# Keys that lead to a leaf. Models have a dozen.
MAX_STEPS = 256
MARK = "tree_metadata"
_SWITCHES = ("use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value")
_CUSTOM = "custom_metadata"
_UNREAD = "value_metadata_tree"  # the same tree, with the classes of its containers


class Leaf(NamedTuple):
    """A leaf of the tree."""

    steps: tuple[str | int, ...]  # the keys that lead to it
    kind: str  # its value_type
    skipped: bool  # True if Orbax does not read its value


class TreeMetadata(NamedTuple):
    """The tree, and how its arrays are stored."""

    leaves: dict[str, Leaf]
    ocdbt: bool | None  # None: the presence of a manifest tells
    version: int  # of zarr
    complete: bool  # True if all chunks are stored
    custom: Any
    unknown: list[str]  # fields that safeload does not know


def parse(content: Mapping[str, Any], path: str) -> TreeMetadata:
    """Return the tree of ``_METADATA``."""
    entries = content.get(MARK)
    if type(entries) is not dict:
        raise FormatError(f"{MARK} must be an object, got {show(entries)[:100]}", path)
    leaves: dict[str, Leaf] = {}
    for text, entry in entries.items():
        leaf = _leaf(text, entry, path)
        name = ".".join(map(str, leaf.steps))
        if name in leaves:
            raise FormatError(f"two leaves of the tree are named {show(name)}", path)
        leaves[name] = leaf
    switches = {name: content.get(name) for name in _SWITCHES}
    for name, value in switches.items():
        if value is not None and type(value) is not bool:
            raise FormatError(f"{name} must be true or false, got {show(value)[:100]}", path)
    known = {MARK, _CUSTOM, _UNREAD, *_SWITCHES}
    return TreeMetadata(
        leaves,
        switches["use_ocdbt"],
        3 if switches["use_zarr3"] else 2,
        bool(switches["store_array_data_equal_to_fill_value"]),
        content.get(_CUSTOM),
        [name for name in content if name not in known],
    )


def _leaf(text: str, entry: Any, path: str) -> Leaf:
    keys = entry.get("key_metadata") if type(entry) is dict else None
    value = entry.get("value_metadata") if type(entry) is dict else None
    if type(keys) is not list or type(value) is not dict:
        raise FormatError(f"leaf {show(text)} must have key_metadata and value_metadata", path)
    if len(keys) > MAX_STEPS:
        text = f"{path}: a leaf is nested {len(keys):,} levels deep, more than {MAX_STEPS}"
        raise LimitError(text, path=path)
    steps: list[str | int] = []
    for key in keys:
        name, kind = (key.get("key"), key.get("key_type")) if type(key) is dict else (None, None)
        index = kind == 1 and type(name) is str and name.isascii() and name.isdecimal() and len(name) < 19
        if type(name) is not str or kind not in (1, 2) or (kind == 1 and not index) or type(kind) is not int:
            raise FormatError(f"leaf {show(text)} has a malformed key: {show(key)[:100]}", path)
        steps.append(int(name) if kind == 1 and str(int(name)) == name else name)
    kind, skipped = value.get("value_type"), value.get("skip_deserialize", False)
    if type(kind) is not str or type(skipped) is not bool:
        raise FormatError(f"leaf {show(text)} has a malformed value_metadata: {show(value)[:100]}", path)
    return Leaf(tuple(steps), kind, skipped)
