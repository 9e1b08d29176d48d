"""Open an Orbax checkpoint by ``_METADATA``, the file that describes its tree and stands for the whole folder.

1. JSON: ``tree_metadata`` maps a text for people to a leaf; ``use_ocdbt``, ``use_zarr3``,
   ``store_array_data_equal_to_fill_value`` (true: all chunks are stored), ``custom_metadata`` (of the program).
2. A leaf: ``key_metadata``, a list of ``{"key": "0", "key_type": 1}`` (1: index of a list, 2: key of a dict), and
   ``value_metadata`` with ``value_type`` and ``skip_deserialize``.
3. The name of a leaf is its keys, joined with dots. So are the names of arrays in the store.
4. Types: "jax.Array", "np.ndarray" and "scalar" are arrays; "string" is text in ``_strings.json``; "None", "Dict",
   "List", "Tuple" and "NamedTuple" are empty. Leaves of other types come from handlers of the program.
5. Random keys (`jax.random.key`) are stored as their numbers; only ``array_metadatas``, which safeload does not read,
   tells them from other arrays.
6. With ``use_ocdbt`` the arrays are in an OCDBT database (ocdbt.py), under the keys ``<name>/.zarray`` or
   ``<name>/zarr.json`` and ``<name>/<chunk>``. ``manifest.ocdbt`` is the database of all processes; if it was never
   written, the databases ``ocdbt.process_<n>/manifest.ocdbt`` together are the checkpoint.
7. Without it these keys are paths of files.
8. A `CheckpointManager` keeps a folder for each step, and in it a checkpoint, or one for each item.
   ``_CHECKPOINT_METADATA``, ``_sharding`` and ``array_metadatas`` are not needed to read tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

from ...base import dtypes
from ...base.paths import is_bare
from ...base.runtime import paused
from ...base.table import Unknown
from ...base.text import error_about, show
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, LimitError, UnsupportedError
from ...stores.json_file import MAX_JSON, parse_json, read_json
from ...stores.remote import RemoteStore
from ...stores.store import read_at
from ..boxed import MAX_RANK, BoxedListing, DataFolder
from ..metadata import depth_of, names_below, nested
from ..numbered import ORBAX_METADATA
from ..registry import Candidate, Content, OpenRequest
from .ocdbt import MANIFEST, Value, read_tree
from .zarr import V2, V3, WHOLE_FILE, ChunkFinder, StoredBytes, ZarrArray, unreadable

# Bytes of the metadata of an array. It has a few hundred.
MAX_ARRAY_METADATA = 1 << 20
# Bytes of a manifest. Orbax writes a few hundred.
MAX_MANIFEST = 16 << 20
# Folders with chunks of arrays that are not in a database. Links among them could lead in circles.
MAX_FOLDERS = 1 << 17
# Keys that lead to a leaf. Models have a dozen.
MAX_STEPS = 256
_ARRAYS, _STRING = frozenset(("jax.Array", "np.ndarray", "scalar")), "string"
_EMPTY: Mapping[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": ()}
_TREE, _CUSTOM = "tree_metadata", "custom_metadata"
_OCDBT, _ZARR3, _COMPLETE = _SWITCHES = ("use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value")
_UNREAD = "value_metadata_tree"  # the same tree, with the classes of its containers
_STRINGS = "_strings.json"
# A part of the database, written by a process; "replica_" precedes the number of a replica.
_PART = re.compile(r"ocdbt\.process_(?:replica_)?[A-Za-z0-9]{1,32}", re.ASCII)
_SHOWN = 5


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Open the checkpoint that a file ``_METADATA`` belongs to."""
    file = candidate.file
    if file.size > MAX_JSON:
        raise FormatError(f"{ORBAX_METADATA} has {file.size:,} bytes, but the limit is {MAX_JSON:,}", file.path)
    metadata = parse_json(file.read_at(0, file.size), ORBAX_METADATA, file.path)
    with _OpenFolder(file) as folder, paused(file.size):  # each chunk becomes several objects
        return _read(folder, metadata, request.root)


class _OpenFolder(DataFolder):
    """The folder of a checkpoint, and its open data files."""

    def __init__(self, file: WeightFile) -> None:
        super().__init__(file, "the checkpoint needs it: was it copied as a whole?")
        self.opened: dict[str, StoredBytes] = {}

    def stored(self, name: str) -> StoredBytes:
        """Open a file, and keep it open."""
        if name not in self.opened:
            store = self.stores[name] = self.open(name)
            self.opened[name] = StoredBytes(store, 0, store.size, self.path_of(name))
            if isinstance(store, RemoteStore):
                store.settle()
        return self.opened[name]

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return a range of a file, fewer bytes at its end."""
        return read_at(self.stored(name).store, offset, length)

    def content(self, key: str, value: Value) -> bytes:
        """Return a value as a whole: the metadata of an array, or a small chunk."""
        if not value.file:
            return value.inline
        if value.length > MAX_ARRAY_METADATA:
            raise FormatError(f"the value of {show(key)} has {value.length:,} bytes", self.path_of(value.file))
        content = self.read(value.file, value.offset, value.length)
        if len(content) < value.length:
            text = f"the value of {show(key)} reaches beyond the end of the file; is it cut off?"
            raise FormatError(text, self.path_of(value.file), value.offset)
        return content


def _read(folder: _OpenFolder, metadata: Mapping[str, Any], root: str | None) -> Content:
    path, leaves = folder.file.path, _leaves(metadata.get(_TREE), folder.file.path)
    for switch in _SWITCHES:
        if metadata.get(switch) is not None and type(metadata[switch]) is not bool:
            raise FormatError(f"{switch} must be true or false, got {show(metadata[switch])[:100]}", path)
    names = names_below({name: leaf.steps for name, leaf in leaves.items()}, root, path)
    notes: list[str] = []
    arrays = [name for name in names if leaves[name].is_array]
    ocdbt = _uses_ocdbt(folder) if metadata.get(_OCDBT) is None else metadata[_OCDBT]
    values = _database(folder, notes) if ocdbt else _paths(folder, arrays)
    version = 3 if metadata.get(_ZARR3) else 2
    described = dict(zip(arrays, _described(folder, arrays, version, values if ocdbt else None), strict=True))
    readable = {name: array for name, array in described.items() if isinstance(array, ZarrArray)}
    finder = ChunkFinder(values, folder.opened, folder.shown, filled=not metadata.get(_COMPLETE))
    places = {name: finder.find(array) for name, array in readable.items()}
    needed = {value.file for chunks in places.values() for _, value in chunks if value.file}
    folder.files.each(folder.stored, sorted(needed - folder.opened.keys()))
    listings: dict[str, BoxedListing] = {}
    for name, array in described.items():
        if isinstance(array, ZarrArray):
            try:
                listings[names[name]] = finder.listing(array, places[name])
                continue
            except UnsupportedError as error:
                array = Unknown(array.row.name, array.shape, str(error))
        listings[names[name]] = BoxedListing(dtypes.BY_CODE["U8"], (0,), [], unknown=array)
    finder.check_claims()
    rest = _rest(folder, {name: leaves[name] for name in names if not leaves[name].is_array}, root, notes)
    custom = metadata.get(_CUSTOM)
    if custom is not None and rest.setdefault(_CUSTOM, custom) is not custom:
        notes.append(f"{_CUSTOM} is left out: the tree has a leaf of this name")
    narrow = [name for name, array in readable.items() if array.bits is not None]
    notes += _note(narrow, "opened as I8, with the same values")
    unknown = [name for name in metadata if name not in (_TREE, _CUSTOM, _UNREAD, *_SWITCHES)]
    notes += _note(unknown, f"fields of {ORBAX_METADATA} that safeload does not know")
    return folder.joined(listings, rest, notes)


def _note(names: Sequence[str], text: str) -> list[str]:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return [f"{', '.join(map(show, names[:_SHOWN]))}{more}: {text}"] if names else []


# ---- the tree ----


class _Leaf(NamedTuple):
    """A leaf of the tree."""

    steps: tuple[str | int, ...]  # the keys that lead to it
    kind: str  # its value_type
    skipped: bool  # True if Orbax does not read its value

    @property
    def is_array(self) -> bool:
        return self.kind in _ARRAYS and not self.skipped


def _leaves(entries: Any, path: str) -> dict[str, _Leaf]:
    """Return the leaves of the tree by name."""
    if type(entries) is not dict:
        raise FormatError(f"{_TREE} must be an object, got {show(entries)[:100]}", path)
    leaves: dict[str, _Leaf] = {}
    for text, entry in entries.items():
        keys, value = (entry.get(f"{kind}_metadata") if type(entry) is dict else None for kind in ("key", "value"))
        if type(keys) is not list or type(value) is not dict:
            raise FormatError(f"leaf {show(text)} must have key_metadata and value_metadata", path)
        if len(keys) > MAX_STEPS:
            deep = f"a leaf is nested {len(keys):,} levels deep, more than {MAX_STEPS}"
            raise error_about(LimitError, deep, path=path)
        steps: list[str | int] = []
        for key in keys:
            step, kind = (key.get("key"), key.get("key_type")) if type(key) is dict else (None, None)
            index = kind == 1 and type(step) is str and step.isascii() and step.isdecimal() and len(step) < 19
            if type(step) is not str or kind not in (1, 2) or (kind == 1 and not index) or type(kind) is not int:
                raise FormatError(f"leaf {show(text)} has a malformed key: {show(key)[:100]}", path)
            steps.append(int(step) if kind == 1 and str(int(step)) == step else step)
        kind, skipped = value.get("value_type"), value.get("skip_deserialize", False)
        if type(kind) is not str or type(skipped) is not bool:
            raise FormatError(f"leaf {show(text)} has a malformed value_metadata: {show(value)[:100]}", path)
        name = ".".join(map(str, steps))
        if name in leaves:
            raise FormatError(f"two leaves of the tree are named {show(name)}", path)
        leaves[name] = _Leaf(tuple(steps), kind, skipped)
    return leaves


def _rest(folder: _OpenFolder, leaves: Mapping[str, _Leaf], root: str | None, notes: list[str]) -> dict[str, Any]:
    """Return leaves other than arrays, nested."""
    texts = {name for name, leaf in leaves.items() if leaf.kind == _STRING and not leaf.skipped}
    strings = read_json(folder.join(_STRINGS), _STRINGS, folder.files) if texts else {}
    for name in sorted(texts):
        if type(strings.get(name)) is not str:
            text = f"{_STRINGS} must have the text {show(name)}, got {show(strings.get(name))[:100]}"
            raise FormatError(text, folder.shown)
    known = {name: leaf for name, leaf in leaves.items() if name in texts or leaf.kind in _EMPTY}
    unknown = [name for name in leaves if name not in known]
    notes += _note(unknown, "left out, because only the program that wrote it knows its type")
    paths = {}
    for name, leaf in known.items():
        steps = leaf.steps[0 if root is None else depth_of(leaf.steps, root) :]
        paths[name] = (str(steps[0]), *steps[1:]) if steps else ("",)
    return nested(paths, lambda name: strings[name] if name in texts else copy(_EMPTY[leaves[name].kind]), folder.shown)


# ---- the store of arrays ----


def _uses_ocdbt(folder: _OpenFolder) -> bool:
    """Return True if there is a database, which metadata without ``use_ocdbt`` does not say."""
    try:
        folder.stored(MANIFEST)
    except FileNotFoundError:
        return False
    return True


def _database(folder: _OpenFolder, notes: list[str]) -> Mapping[str, Value]:
    """Return the values of the database, or of the databases of all processes."""
    if _uses_ocdbt(folder):
        values = _values(folder, "")
    else:
        parts = [name for name, is_folder in folder.files.listing(folder.path) if is_folder and _PART.fullmatch(name)]
        if not parts:
            text = f"there is no {MANIFEST}, although the metadata says use_ocdbt; was the checkpoint finished?"
            raise FormatError(text, folder.shown)
        values = {}
        for part in parts:
            for key, value in _values(folder, f"{part}/").items():
                other = values.setdefault(key, value)
                if other is not value and folder.content(key, other) != folder.content(key, value):
                    raise FormatError(f"two processes have stored {show(key)}, and their values differ", folder.shown)
        notes.append(f"{MANIFEST} is missing: joined the databases of {len(parts):,} processes")
    for store in folder.stores.values():
        if isinstance(store, RemoteStore):
            store.settle()
    return values


def _values(folder: _OpenFolder, part: str) -> dict[str, Value]:
    """Return the values of the database in the folder ``part``: a path that ends with a slash, or an empty one."""
    manifest = folder.stored(part + MANIFEST)
    if manifest.length > MAX_MANIFEST:
        text = f"the manifest has {manifest.length:,} bytes, more than {MAX_MANIFEST:,}"
        raise error_about(LimitError, text, path=manifest.path)

    def read(name: str, offset: int, length: int) -> bytes:
        return folder.read(part + name, offset, length)

    content = read_at(manifest.store, 0, manifest.length)
    values = read_tree(content, manifest.path, read, lambda name: folder.path_of(part + name))
    if not part:
        return values
    return {key: value._replace(file=part + value.file if value.file else "") for key, value in values.items()}


def _paths(folder: _OpenFolder, arrays: Sequence[str]) -> dict[str, Value]:
    """Return the files of arrays in folders, by their paths."""
    for name in arrays:
        if not all(map(is_bare, name.split("/"))):
            text = "cannot be the name of a folder in the checkpoint"
            raise error_about(FormatError, text, path=folder.shown, tensor=name)
    listed = 0

    def files_of(name: str) -> list[str]:
        """Return the files of an array: chunks are in folders with numbers as names, below "c" in version 3."""
        nonlocal listed
        paths: list[str] = []
        folders = [(name, 0)]
        while folders:
            inner, depth = folders.pop()
            listed += 1
            if listed > MAX_FOLDERS:
                raise error_about(LimitError, f"its chunks are in more than {MAX_FOLDERS:,} folders", path=folder.shown)
            try:
                listing = folder.files.listing(folder.join(inner))
            except (FileNotFoundError, NotADirectoryError):
                continue
            for base, is_folder in listing:
                if not is_folder:
                    paths.append(f"{inner}/{base}")
                elif depth <= MAX_RANK and (base.isdecimal() or (base == "c" and not depth)):
                    folders.append((f"{inner}/{base}", depth + 1))
        return paths

    return {path: Value(path, 0, WHOLE_FILE) for paths in folder.files.each(files_of, arrays) for path in paths}


def _described(
    folder: _OpenFolder, arrays: Sequence[str], version: int, values: Mapping[str, Value] | None
) -> list[ZarrArray | Unknown]:
    """Return the metadata of readable and of unreadable arrays; without a database (``values``) from files."""
    base = V3 if version == 3 else V2
    keys = [f"{name}/{base}" if name else base for name in arrays]

    def parsed(name: str, key: str, content: Mapping[str, Any]) -> ZarrArray | Unknown:
        try:
            return ZarrArray(content, folder.path_of(key), name, version)
        except UnsupportedError as error:
            return unreadable(content, str(error))

    if values is None:
        return folder.files.each(
            lambda item: parsed(*item, read_json(folder.join(item[1]), base, folder.files)),
            list(zip(arrays, keys, strict=True)),
        )
    missing = next((name for name, key in zip(arrays, keys, strict=True) if key not in values), None)
    if missing is not None:
        text = f"is not in {MANIFEST}, although {ORBAX_METADATA} lists it"
        raise error_about(FormatError, text, path=folder.shown, tensor=missing)
    total = sum(values[key].length for key in keys)
    if total > MAX_JSON:
        text = f"the metadata of its arrays has {total:,} bytes, but the limit is {MAX_JSON:,}"
        raise error_about(LimitError, text, path=folder.shown)
    places: dict[str, list[tuple[int, int]]] = {}  # fetched in a few requests
    for value in map(values.__getitem__, keys):
        if value.file and value.length <= MAX_ARRAY_METADATA:
            places.setdefault(value.file, []).append((value.offset, value.offset + value.length))
    for data_file, ranges in places.items():
        store = folder.stored(data_file).store
        if isinstance(store, RemoteStore):
            store.prefetch(ranges)
    return [
        parsed(name, key, parse_json(folder.content(key, values[key]), base, f"{folder.shown}/{key}"))
        for name, key in zip(arrays, keys, strict=True)
    ]
