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

Its arrays are zarr arrays, versions 2 and 3, as Orbax has tensorstore write them; their chunks become boxes.

1. Version 2, ``.zarray``: JSON with ``zarr_format`` 2, ``shape``, ``chunks``, ``dtype`` (NumPy's code "<f4", or
   tensorstore's name "bfloat16"), ``order`` "C", ``compressor`` (null or ``{"id": "zstd"}``), ``filters`` (none),
   ``dimension_separator`` ".", ``fill_value``. Keys of chunks: "0.1"; "0" without axes.
2. Version 3, ``zarr.json``: ``zarr_format`` 3, ``node_type`` "array", ``shape``, ``data_type``, ``chunk_grid``
   (regular), ``chunk_key_encoding`` ("default": "c/0/1", and "c" without axes), ``codecs``, ``fill_value``.
3. Codecs of version 3: ``bytes``, little-endian, then ``zstd`` or nothing. Or a single ``sharding_indexed``: a file
   holds a grid of smaller chunks with these codecs.
4. Chunks at the border have full size. int2 and int4 take a byte each, of which the low bits count.

Chunks:

1. A key holds a chunk, or with ``sharding_indexed`` a shard: a grid of chunks in C order, then an index: u64 offset and
   u64 length of each chunk, little-endian, and a CRC-32C. Offsets count from the beginning of the value; both numbers
   are 2**64 - 1 for a chunk that is not stored.
2. A chunk that is not stored has the fill value, 0, unless the checkpoint says that all chunks were stored. tensorstore
   leaves out chunks that equal it, such as those of a new optimizer, so few keys can stand for large arrays. They cost
   memory only when they are read.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache, partial
from itertools import islice, product
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..core import dtypes
from ..core.arrays import Array, c_strides, index_of
from ..core.files import MAX_JSON, ByteStore, Unpacked, parse_json, read_at, read_json
from ..core.forking import cached_property
from ..core.names import depth_of, grouped, names_below, nested
from ..core.registry import Candidate, Content, OpenRequest
from ..core.runtime import paused
from ..core.table import Unknown
from ..core.text import error_about, is_bare, listed, show
from ..errors import FormatError, LimitError, UnsupportedError
from ..remote.remote_store import RemoteStore
from .boxed import MAX_RANK, Box, BoxedListing, DataFolder, Region, Stored
from .numbered import ORBAX_METADATA
from .ocdbt import MANIFEST, Value, crc32c, read_tree
from .zstd import MAX_RATIO, FrameStore, KeptFrames, reader

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
    needed = "the checkpoint needs it: was it copied as a whole?"
    with _OpenFolder(file, needed) as folder, paused(file.size):  # each chunk becomes several objects
        return _read(folder, metadata, request.root)


class _OpenFolder(DataFolder):
    """The folder of a checkpoint, and its open data files."""

    def open(self, name: str) -> ByteStore:
        store = super().open(name)
        if isinstance(store, RemoteStore):
            store.settle()
        return store

    def content(self, key: str, value: Value) -> bytes:
        """Return a value as a whole: the metadata of an array, or a small chunk."""
        if not value.file:
            return value.inline
        store, path = self.store(value.file), self.path_of(value.file)
        if value.length > MAX_ARRAY_METADATA:
            raise FormatError(f"the value of {show(key)} has {value.length:,} bytes", path)
        content = read_at(store, value.offset, value.length)
        if len(content) < value.length:
            text = f"the value of {show(key)} reaches beyond the end of the file; is it cut off?"
            raise FormatError(text, path, value.offset)
        return content


def _read(folder: _OpenFolder, metadata: Mapping[str, Any], root: str | None) -> Content:
    path = folder.file.path
    leaves, kinds = _leaves(metadata.get(_TREE), path)
    for switch in _SWITCHES:
        if metadata.get(switch) is not None and type(metadata[switch]) is not bool:
            raise FormatError(f"{switch} must be true or false, got {show(metadata[switch])[:100]}", path)
    names = names_below(leaves, root, path)
    notes: list[str] = []
    arrays = [name for name in names if kinds[name] in _ARRAYS]
    ocdbt = _uses_ocdbt(folder) if metadata.get(_OCDBT) is None else metadata[_OCDBT]
    values = _database(folder, notes) if ocdbt else _paths(folder, arrays)
    version = 3 if metadata.get(_ZARR3) else 2
    described = dict(zip(arrays, _described(folder, arrays, version, values if ocdbt else None), strict=True))
    readable = {name: array for name, array in described.items() if isinstance(array, ZarrArray)}
    finder = ChunkFinder(folder, values, zeros=not metadata.get(_COMPLETE))
    places = {name: finder.find(array) for name, array in readable.items()}
    needed = {value.file for chunks in places.values() for _, value in chunks if value.file}
    folder.files.each(folder.store, sorted(needed - folder.stores.keys()))
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
    kinds = {name: kinds[name] for name in names if kinds[name] not in _ARRAYS}
    rest = _rest(folder, leaves, kinds, root, notes)
    custom = metadata.get(_CUSTOM)
    if custom is not None and rest.setdefault(_CUSTOM, custom) is not custom:
        notes.append(f"{_CUSTOM} is left out: the tree has a leaf of this name")
    narrow = [name for name, array in readable.items() if array.bits is not None]
    notes += _note(narrow, "opened as I8, with the same values")
    unknown = [name for name in metadata if name not in (_TREE, _CUSTOM, _UNREAD, *_SWITCHES)]
    notes += _note(unknown, f"fields of {ORBAX_METADATA} that safeload does not know")
    return folder.joined(listings, rest, notes)


def _note(names: Sequence[str], text: str) -> list[str]:
    return [f"{listed(map(show, names), _SHOWN)}: {text}"] if names else []


# ---- the tree ----


# The keys that lead to a leaf.
_Steps: TypeAlias = tuple[str | int, ...]


def _leaves(entries: Any, path: str) -> tuple[dict[str, _Steps], dict[str, str]]:
    """Return the leaves of the tree by name, and the type of each; "" if Orbax does not read its value."""
    if type(entries) is not dict:
        raise FormatError(f"{_TREE} must be an object, got {show(entries)[:100]}", path)
    leaves: dict[str, _Steps] = {}
    kinds: dict[str, str] = {}
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
        leaves[name] = tuple(steps)
        kinds[name] = "" if skipped and kind not in _EMPTY else kind
    return leaves, kinds


def _rest(
    folder: _OpenFolder, leaves: Mapping[str, _Steps], kinds: Mapping[str, str], root: str | None, notes: list[str]
) -> dict[str, Any]:
    """Return leaves other than arrays, whose ``kinds`` these are, nested."""
    texts = {name for name, kind in kinds.items() if kind == _STRING}
    strings = read_json(folder.join(_STRINGS), _STRINGS, folder.files) if texts else {}
    for name in sorted(texts):
        if type(strings.get(name)) is not str:
            value = show(strings.get(name))[:100]
            raise folder.error(FormatError, f"{_STRINGS} must have the text {show(name)}, got {value}")
    known = {name: leaves[name] for name in kinds if name in texts or kinds[name] in _EMPTY}
    unknown = [name for name in kinds if name not in known]
    notes += _note(unknown, "left out, because only the program that wrote it knows its type")
    paths = {}
    for name, steps in known.items():
        steps = steps[0 if root is None else depth_of(steps, root) :]
        paths[name] = (str(steps[0]), *steps[1:]) if steps else ("",)
    return nested(paths, lambda name: strings[name] if name in texts else copy(_EMPTY[kinds[name]]), folder.shown)


# ---- the store of arrays ----


def _uses_ocdbt(folder: _OpenFolder) -> bool:
    """Return True if there is a database, which metadata without ``use_ocdbt`` does not say."""
    try:
        folder.store(MANIFEST)
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
            raise folder.error(FormatError, text)
        values = {}
        for part in parts:
            for key, value in _values(folder, f"{part}/").items():
                other = values.setdefault(key, value)
                if other is not value and folder.content(key, other) != folder.content(key, value):
                    raise folder.error(FormatError, f"two processes have stored {show(key)}, and their values differ")
        notes.append(f"{MANIFEST} is missing: joined the databases of {len(parts):,} processes")
    for store in folder.stores.values():
        if isinstance(store, RemoteStore):
            store.settle()
    return values


def _values(folder: _OpenFolder, part: str) -> dict[str, Value]:
    """Return the values of the database in the folder ``part``: a path that ends with a slash, or an empty path."""
    store, path = folder.store(part + MANIFEST), folder.path_of(part + MANIFEST)
    if store.size > MAX_MANIFEST:
        raise error_about(LimitError, f"the manifest has {store.size:,} bytes, more than {MAX_MANIFEST:,}", path=path)
    values = read_tree(
        read_at(store, 0, store.size), path,
        lambda name, offset, length: read_at(folder.store(part + name), offset, length),
        lambda name: folder.path_of(part + name),
    )  # fmt: skip
    if not part:
        return values
    return {key: value._replace(file=part + value.file if value.file else "") for key, value in values.items()}


def _paths(folder: _OpenFolder, arrays: Sequence[str]) -> dict[str, Value]:
    """Return the files of arrays in folders, by their paths."""
    for name in arrays:
        if not all(map(is_bare, name.split("/"))):
            raise folder.error(FormatError, "cannot be the name of a folder in the checkpoint", name)
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
                raise folder.error(LimitError, f"its chunks are in more than {MAX_FOLDERS:,} folders")
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
            shape: Any = content.get("shape")
            known = type(shape) is list and len(shape) <= MAX_RANK
            known = known and all(type(n) is int and 0 <= n < _LARGEST for n in shape)
            label = show(content.get("dtype", content.get("data_type")))[:100].strip("'")
            return Unknown(label, tuple(shape) if known else (), str(error))

    if values is None:
        return folder.files.each(
            lambda item: parsed(*item, read_json(folder.join(item[1]), base, folder.files)),
            list(zip(arrays, keys, strict=True)),
        )
    missing = next((name for name, key in zip(arrays, keys, strict=True) if key not in values), None)
    if missing is not None:
        raise folder.error(FormatError, f"is not in {MANIFEST}, although {ORBAX_METADATA} lists it", missing)
    if (total := sum(values[key].length for key in keys)) > MAX_JSON:
        raise folder.error(LimitError, f"the metadata of its arrays has {total:,} bytes, but the limit is {MAX_JSON:,}")
    small = (value for value in map(values.__getitem__, keys) if value.file and value.length <= MAX_ARRAY_METADATA)
    for data_file, inside in grouped(small, lambda value: value.file).items():  # fetched in a few requests
        if isinstance(store := folder.store(data_file), RemoteStore):
            store.prefetch([(value.offset, value.offset + value.length) for value in inside])
    return [
        parsed(name, key, parse_json(folder.content(key, values[key]), base, f"{folder.shown}/{key}"))
        for name, key in zip(arrays, keys, strict=True)
    ]


# ---- arrays ----

V2, V3 = ".zarray", "zarr.json"
ZSTD, CRC32C = "zstd", "crc32c"
_LARGEST = 1 << 62
_CODE = re.compile(r"[<|]([biufc])([0-9]{1,2})", re.ASCII)
# Dtypes of fewer than 8 bits, which take a byte each: opened as int8, with the bits that count.
_NARROW = {"int4": 4, "int2": 2}
_V2_FIELDS = {
    "zarr_format", "shape", "chunks", "dtype", "order", "compressor", "filters", "dimension_separator", "fill_value"
}  # fmt: skip
_V3_FIELDS = {
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs", "fill_value",
    "attributes", "dimension_names", "storage_transformers",
}  # fmt: skip


_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}


class ZarrArray:
    """An array as its metadata describes it, and the settings that all its chunks share."""

    row: dtypes.Dtype
    shape: tuple[int, ...]
    grid: tuple[int, ...]  # shape of a chunk with a key of its own
    chunk: tuple[int, ...]  # shape of every chunk
    bits: int | None = None  # the low bits of each byte that count, if not all
    compressed = False  # True if a chunk is a zstd frame
    sharded = False  # True if the value of a key is a grid of chunks with an index
    zeros = False  # True if chunks that a shard lacks are zeros, False if all should be stored
    frames: KeptFrames | None = None  # keeps decompressors; None to unpack chunks as a whole

    def __init__(self, fields: Mapping[str, Any], path: str, name: str, version: int) -> None:
        self.fields, self.path, self.name = fields, path, name
        if fields.get("zarr_format") != version:
            raise self._error(f"zarr_format must be {version}, got {show(fields.get('zarr_format'))}")
        for key, value in fields.items():  # an unknown field may change the meaning of the array
            optional = type(value) is dict and value.get("must_understand") is False
            if key not in (_V2_FIELDS if version == 2 else _V3_FIELDS) and not optional:
                raise self._unsupported(f"the field {show(key)}, which safeload does not know")
        self.separator, self.prefix = (".", "") if version == 2 else ("/", "c")  # of keys
        if version == 2:
            self._read_version2(fields)
        else:
            self._read_version3(fields)
        if len(self.grid) != len(self.shape) or len(self.chunk) != len(self.shape):
            raise self._error(f"chunks of shape {list(self.grid)} do not divide an array of shape {list(self.shape)}")
        if any(outer % inner for outer, inner in zip(self.grid, self.chunk, strict=True)):
            raise self._error(f"chunks of {list(self.chunk)} do not divide shards of {list(self.grid)}")
        self.itemsize = dtypes.array_dtype(self.row.number).itemsize
        self.chunk_nbytes = prod(self.chunk) * self.itemsize
        self.counts = [-(-size // chunk) for size, chunk in zip(self.shape, self.grid, strict=True)]  # along each axis

    def _error(self, text: str) -> FormatError:
        return error_about(FormatError, f": {text}", path=self.path, tensor=self.name)

    def _unsupported(self, text: str) -> UnsupportedError:
        return UnsupportedError(f"has {text}", path=self.path, tensor=self.name)

    def _sizes(self, value: Any, what: str, *, least: int = 0) -> tuple[int, ...]:
        valid = type(value) is list and all(type(n) is int and least <= n < _LARGEST for n in value)
        if not valid or len(value) > MAX_RANK:
            raise self._error(f"{what} must be a list of up to {MAX_RANK} sizes, got {show(value)[:100]}")
        return tuple(value)

    def _read_dtype(self, text: Any, match: re.Match[str] | None) -> None:
        name = text
        if match is not None:
            kind, size = match[1], int(match[2])
            name = "bool" if match[0] == "|b1" else f"{_KINDS[kind]}{8 * size}" if kind != "b" else None
        if type(name) is str and name in _NARROW:
            self.row, self.bits = dtypes.BY_NAME["int8"], _NARROW[name]
            return
        row = dtypes.BY_NAME.get(name) if type(name) is str else None
        if row is None or row.packed:
            raise self._unsupported(f"dtype {show(text)}, which no array can represent, or Orbax never writes")
        self.row = row

    def _extension(self, value: Any, what: str) -> tuple[str, Mapping[str, Any]]:
        """Return the name and the configuration of a codec or another extension of version 3."""
        if type(value) is str:
            return value, {}
        name = value.get("name") if type(value) is dict else None
        configuration = value.get("configuration", {}) if type(value) is dict else None
        if type(name) is not str or type(configuration) is not dict:
            raise self._error(f"{what} must have a name and a configuration, got {show(value)[:100]}")
        return name, configuration

    def _read_version2(self, fields: Mapping[str, Any]) -> None:
        self.shape = self._sizes(fields.get("shape"), "shape")
        self.grid = self.chunk = self._sizes(fields.get("chunks"), "chunks", least=1)
        text = fields.get("dtype")
        self._read_dtype(text, _CODE.fullmatch(text) if type(text) is str else None)
        order, separator = fields.get("order"), fields.get("dimension_separator", ".")
        if order != "C" or separator != ".":
            text = f"order {show(order)} and dimension_separator {show(separator)}"
            raise self._unsupported(f"{text}; safeload reads order C and separators .")
        if fields.get("filters"):
            raise self._unsupported(f"filters {show(fields['filters'])[:100]}, which safeload does not read")
        if (compressor := fields.get("compressor")) is not None:
            codec = compressor.get("id") if type(compressor) is dict else compressor
            if codec != ZSTD:
                raise self._unsupported(f"compressor {show(codec)[:100]}; safeload reads zstd and uncompressed chunks")
            self.compressed = True

    def _read_version3(self, fields: Mapping[str, Any]) -> None:
        if fields.get("node_type") != "array":
            raise self._error(f"node_type must be array, got {show(fields.get('node_type'))}")
        if fields.get("storage_transformers"):
            raise self._unsupported("storage_transformers, which safeload does not read")
        self.shape = self._sizes(fields.get("shape"), "shape")
        kind, configuration = self._extension(fields.get("chunk_grid"), "chunk_grid")
        if kind != "regular":
            raise self._unsupported(f"chunk_grid {show(kind)}; safeload reads regular grids")
        self.grid = self.chunk = self._sizes(configuration.get("chunk_shape"), "chunk_shape", least=1)
        encoding, configuration = self._extension(fields.get("chunk_key_encoding"), "chunk_key_encoding")
        separator = configuration.get("separator", "/")
        if encoding != "default" or separator != "/":
            raise self._unsupported(f"chunk_key_encoding {show(encoding)} with separator {show(separator)}")
        self._read_dtype(fields.get("data_type"), None)
        codecs: Any = fields.get("codecs")
        name, configuration = self._extension(codecs[0] if type(codecs) is list and codecs else None, "codecs")
        if name == "sharding_indexed":
            self.sharded = True
            if len(codecs) > 1:
                raise self._unsupported("codecs after sharding_indexed, which safeload does not read")
            self.chunk = self._sizes(configuration.get("chunk_shape"), "chunk_shape of sharding_indexed", least=1)
            location = configuration.get("index_location", "end")
            index = self._steps(configuration.get("index_codecs"), "index_codecs")
            if index != [CRC32C] or location != "end":
                text = f"an index of {', '.join(map(show, index[:8])) or 'bytes'} at {show(location)}"
                raise self._unsupported(f"{text}; safeload reads bytes and crc32c at the end")
            codecs = configuration.get("codecs")
        steps = self._steps(codecs, "codecs", endian="little" if self.row.bits <= 8 else None)
        if steps not in ([], [ZSTD]):
            raise self._unsupported(f"codecs bytes, {', '.join(map(show, steps[:8]))}; safeload reads bytes and zstd")
        self.compressed = steps == [ZSTD]

    def _steps(self, codecs: Any, what: str, endian: str | None = None) -> list[str]:
        """Return the names of the codecs after ``bytes``, which ``endian`` describes if the codec does not."""
        if type(codecs) is not list:
            raise self._error(f"{what} must be a list, got {show(codecs)[:100]}")
        names = [self._extension(codec, f"a codec of {what}") for codec in codecs]
        if not names or names[0][0] != "bytes" or names[0][1].get("endian", endian) != "little":
            raise self._unsupported(f"{what} {show(codecs)[:100]}; safeload reads little-endian bytes first")
        return [name for name, _ in names[1:]]

    def check_zero(self, path: str) -> None:
        """Refuse a fill value that is not 0, which tensorstore takes unless a program asks for another."""
        value = self.fields.get("fill_value")
        if repr(value) not in ("None", "False", "0", "0.0", "[0.0, 0.0]"):
            text = f"lacks chunks, and its fill value is {show(value)[:100]}; safeload reads 0"
            raise UnsupportedError(text, path=path, tensor=self.name)

    # ---- its chunks ----

    def inside(self, shape: Sequence[int], offsets: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the part of a chunk that is inside the array; none is positive beyond it."""
        return tuple(map(min, shape, map(int.__sub__, self.shape, offsets)))

    def key(self, index: Sequence[int]) -> str:
        """Return the key of a chunk, after the name of the array and a slash."""
        return self.separator.join([*([self.prefix] if self.prefix else ()), *map(str, index)]) or "0"

    def fault(self, text: str, stored: StoredBytes) -> FormatError:
        return error_about(FormatError, f": {text}", path=stored.path, offset=stored.begin, tensor=self.name)

    def check_length(self, length: int, stored: StoredBytes) -> None:
        if length != self.chunk_nbytes:
            raise self.fault(f"a chunk must have {self.chunk_nbytes:,} bytes, got {length:,}", stored)


# ---- chunks ----


# The length of a value that is a file.
WHOLE_FILE = -1
# Bytes of missing elements, besides those in proportion to the files: as for repeated elements of torch.
MAX_FILLED = 1 << 32
# Arrays of up to this many chunks are searched for in the order of the grid.
_FEW = 1 << 10
# Chunks in shards: each takes some 600 bytes of memory.
MAX_IN_SHARDS = 1 << 21
# Bytes of padding in chunks beyond the tensor, if they are more than three times the tensor.
MAX_PADDING = 1 << 20
# Larger compressed chunks are read forward, if up to _BESIDE lie side by side: each takes 2 MiB then. If threads
# unpacked and dropped large arrays, the allocator would keep their memory.
_STREAMED, _BESIDE = 256 << 10, 8
_CHECKSUM = 4
_ABSENT = 2**64 - 1


class StoredBytes(NamedTuple):
    """The bytes of a file, or of a chunk or shard in it."""

    store: ByteStore
    begin: int
    length: int
    path: str  # in messages


def _read_index(stored: StoredBytes, size: int) -> Array:
    """Return offset and length of each chunk of a shard."""
    begin = stored.begin + stored.length - size
    memory = bytearray(size)
    stored.store.read_into(begin, memory)
    index = memory[:-_CHECKSUM]
    if crc32c(index) != int.from_bytes(memory[-_CHECKSUM:], "little"):
        raise FormatError("the checksum of the index of a shard is wrong", stored.path, begin)
    return np.frombuffer(index, "<u8").reshape(-1, 2)


def _locate_in_shard(
    stored: StoredBytes, index: Callable[[], Array], number: int, array: ZarrArray, sizes: tuple[int, ...]
) -> Stored:
    offset, length = index()[number].tolist()
    if offset == length == _ABSENT:
        if not array.zeros:
            raise error_about(FormatError, "lacks a chunk that should be stored", path=stored.path, tensor=array.name)
        return lambda: np.broadcast_to(np.uint8(0), (*sizes, array.itemsize))
    if offset + length > stored.length:
        text = f"chunk {number} of a shard, [{offset:,}, {offset + length:,}), is outside its {stored.length:,} bytes"
        raise FormatError(text, stored.path, stored.begin)
    return _locate(stored._replace(begin=stored.begin + offset, length=length), array, sizes)


def _locate(stored: StoredBytes, array: ZarrArray, sizes: tuple[int, ...]) -> Stored:
    """Return the elements of a stored chunk, of which ``sizes`` are inside the tensor."""
    if array.bits is not None or (array.compressed and not array.frames):
        return partial(_unpacked, stored, array, sizes)
    strides = None if sizes == array.chunk else c_strides(array.chunk, array.itemsize)
    store, begin, length, path = stored
    if not array.compressed:
        array.check_length(length, stored)
        return Region(store, begin, strides)
    return Region(FrameStore(store, begin, length, array.chunk_nbytes, path, kept=array.frames), 0, strides)


def _unpacked(stored: StoredBytes, array: ZarrArray, sizes: tuple[int, ...]) -> Array:
    store, begin, length, path = stored
    content: Array = np.empty(array.chunk_nbytes, np.uint8)
    if array.compressed:
        store, begin = FrameStore(store, begin, length, content.size, path), 0
    else:
        array.check_length(length, stored)
    store.read_into(begin, content)
    elements = content.reshape(*array.chunk, array.itemsize)[tuple(map(slice, sizes))]
    if array.bits is not None:
        unused = np.int8(8 - array.bits)
        elements = (elements.view(np.int8) << unused >> unused).view(np.uint8)
    return np.ascontiguousarray(elements)


class ChunkFinder:
    """Finds the chunks of all tensors of a checkpoint."""

    def __init__(self, folder: _OpenFolder, values: Mapping[str, Value], *, zeros: bool) -> None:
        self._folder = folder
        self._values = values  # by key
        self._path_of = cache(folder.path_of)
        self._zeros = zeros  # True if chunks that are not stored are zeros
        self._frames = KeptFrames()
        self._in_shards = 0
        self._claimed = 0  # bytes of elements that are not stored
        self._provided = 0  # bytes of all chunks as stored
        self._used: dict[str, int] = {}  # bytes of chunks in each file

    @cached_property
    def _keys(self) -> list[str]:
        return sorted(self._values)

    def find(self, array: ZarrArray) -> list[tuple[tuple[int, ...], Value]]:
        """Return the first element and the value of each stored chunk."""
        stem = f"{array.name}/" if array.name else ""
        total = prod(array.counts)
        if total > _FEW:
            indices = sorted(self._stored_indices(stem, array))
        else:
            grid = product(*map(range, array.counts)) if total else ()
            indices = [index for index in grid if stem + array.key(index) in self._values]
        if len(indices) < total and not self._zeros:
            counts = tuple(array.counts)
            first = next((k for k, index in enumerate(indices) if index != index_of(k, counts)), len(indices))
            text = f": its chunk {array.key(index_of(first, counts))} is missing; was the checkpoint copied as a whole?"
            raise self._folder.error(FormatError, text, array.name)
        places: list[tuple[tuple[int, ...], Value]] = []
        stored = 0
        for index in indices:
            offsets = tuple(map(int.__mul__, index, array.grid))
            stored += prod(array.inside(array.grid, offsets))
            places.append((offsets, self._values[stem + array.key(index)]))
        self._claimed += (prod(array.shape) - stored) * array.itemsize
        return places

    def _stored_indices(self, stem: str, array: ZarrArray) -> Iterator[tuple[int, ...]]:
        """Yield the indices of the stored chunks, from the keys that begin with ``stem``."""
        counts = array.counts
        for key in islice(self._keys, bisect_left(self._keys, stem), None):
            if not key.startswith(stem):
                break
            parts = key[len(stem) :].split(array.separator)[bool(array.prefix) :]
            if len(parts) == len(counts) and all(part.isdecimal() and len(part) < 20 for part in parts):
                index = tuple(map(int, parts))
                if all(map(int.__lt__, index, counts)) and stem + array.key(index) == key:
                    yield index

    def listing(self, array: ZarrArray, places: Sequence[tuple[tuple[int, ...], Value]]) -> BoxedListing:
        """Return a tensor with its boxes; the files of ``places`` must be open."""
        nbytes = array.chunk_nbytes
        if array.compressed:
            reader()
        tensor_bytes = prod(array.shape) * array.itemsize
        if tensor_bytes and nbytes > 4 * tensor_bytes + MAX_PADDING:
            text = f": chunks of {nbytes:,} bytes are mostly padding of its {tensor_bytes:,} bytes"
            raise self._folder.error(LimitError, text, array.name)
        inner = [-(-size // chunk) for size, chunk in zip(array.shape, array.chunk, strict=True)]
        divided = next((axis for axis, count in enumerate(inner) if count > 1), len(inner))
        if nbytes > _STREAMED and prod(inner[divided + 1 :]) <= _BESIDE:
            array.frames = self._frames
        zeros = len(places) < prod(array.counts)
        array.zeros = self._zeros and array.sharded
        if zeros or array.zeros:
            array.check_zero(self._folder.shown)
        boxes: list[Box] = []
        for offsets, value in places:
            stored = self._stored(value)
            if array.sharded:
                boxes += self._in_shard(array, offsets, stored)
            else:
                sizes = array.inside(array.chunk, offsets)
                self._claim(array, stored, nbytes)
                boxes.append(Box(offsets, sizes, locate=partial(_locate, stored, array, sizes)))
        return BoxedListing(array.row, array.shape, boxes, zeros=zeros)

    def check_claims(self) -> None:
        """Refuse chunks that share bytes, and zeros that stand for far more than the files hold."""
        for file, used in self._used.items():
            if used > (size := self._folder.stores[file].size):
                text = f"its chunks have {used:,} bytes, but it has {size:,}: chunks overlap in the file"
                raise FormatError(text, self._path_of(file))
        if self._claimed > MAX_FILLED + MAX_RATIO * self._provided:
            text = f"chunks that are not stored stand for {self._claimed:,} bytes, but all others have only "
            raise self._folder.error(LimitError, f"{text}{self._provided:,} bytes")

    def _stored(self, value: Value) -> StoredBytes:
        if not value.file:
            return StoredBytes(Unpacked(value.inline), 0, value.length, self._folder.shown)
        store, path = self._folder.stores[value.file], self._path_of(value.file)
        length = store.size if value.length == WHOLE_FILE else value.length
        if (end := value.offset + length) > store.size:
            text = f"a chunk at [{value.offset:,}, {end:,}) lies outside the file, which has {store.size:,} bytes"
            raise FormatError(f"{text}; is it cut off?", path, min(value.offset, store.size))
        self._used[value.file] = self._used.get(value.file, 0) + length
        return StoredBytes(store, value.offset, length, path)

    def _claim(self, array: ZarrArray, stored: StoredBytes, nbytes: int) -> None:
        """Check that stored bytes can hold elements."""
        self._provided += stored.length
        if nbytes > stored.length * (MAX_RATIO if array.compressed or array.zeros else 1):
            raise array.fault(f"a chunk has {nbytes:,} bytes, but {stored.length:,} bytes store it", stored)

    def _in_shard(self, array: ZarrArray, offsets: tuple[int, ...], stored: StoredBytes) -> Iterator[Box]:
        """Yield the chunks of a shard that are inside the tensor; its index is read on first use."""
        counts = [outer // size for outer, size in zip(array.grid, array.chunk, strict=True)]
        count = prod(counts)
        size = 16 * count + _CHECKSUM
        if size > stored.length:
            text = f"a shard of {count:,} chunks needs an index of {size:,} bytes, but it has {stored.length:,}"
            raise array.fault(text, stored)
        self._in_shards += count
        if self._in_shards > MAX_IN_SHARDS:
            text = f": with it the shards have more than {MAX_IN_SHARDS:,} chunks"
            raise self._folder.error(LimitError, text, array.name)
        shard_index = cache(partial(_read_index, stored, size))
        inside = 0
        for number, index in enumerate(product(*map(range, counts))):
            begin = tuple(offset + k * size for offset, k, size in zip(offsets, index, array.chunk, strict=True))
            sizes = array.inside(array.chunk, begin)
            if not sizes or min(sizes) > 0:
                inside += 1
                yield Box(begin, sizes, locate=partial(_locate_in_shard, stored, shard_index, number, array, sizes))
        self._claim(array, stored, inside * array.chunk_nbytes)
