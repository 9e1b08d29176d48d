"""Open an Orbax checkpoint by the file that describes its tree.

1. ``_METADATA`` describes the tree (tree.py) and stands for the whole folder.
2. With ``use_ocdbt`` the arrays are in an OCDBT database (ocdbt.py), under the keys ``<name>/.zarray`` or
   ``<name>/zarr.json`` and ``<name>/<chunk>``. ``manifest.ocdbt`` is the database of all processes; if it was never
   written, the databases ``ocdbt.process_<n>/manifest.ocdbt`` together are the checkpoint.
3. Without it these keys are paths of files.
4. A `CheckpointManager` keeps a folder for each step, and in it a checkpoint, or one for each item (names.py).
   ``_CHECKPOINT_METADATA``, ``_sharding`` and ``array_metadatas`` are not needed to read tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from ...base import dtypes
from ...base.gc_pause import paused
from ...base.messages import error_about
from ...base.paths import is_bare
from ...base.table import Unknown
from ...base.text import show
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, LimitError, UnsupportedError, missing_file
from ...stores.files import Files
from ...stores.json_file import MAX_JSON, parse_json, read_json
from ...stores.remote import RemoteStore
from ...stores.store import read_at
from ..boxed import MAX_RANK, BoxedListing, assemble
from ..numbered import ORBAX_METADATA
from ..opening import depth_of, names_below, nested
from ..registry import Candidate, Content, OpenRequest
from . import tree, zarr
from .chunks import WHOLE_FILE, ChunkBytes, ChunkFinder
from .ocdbt import MANIFEST, Value, read_tree

# Bytes of the metadata of an array. It has a few hundred.
MAX_ARRAY_METADATA = 1 << 20
# Bytes of a manifest. Orbax writes a few hundred.
MAX_MANIFEST = 16 << 20
# Folders with chunks of arrays that are not in a database. Links among them could lead in circles.
MAX_FOLDERS = 1 << 17
_STRINGS = "_strings.json"
# A part of the database, written by a process; "replica_" precedes the number of a replica.
_PART = re.compile(r"ocdbt\.process_(?:replica_)?[A-Za-z0-9]{1,32}", re.ASCII)
_CUSTOM = "custom_metadata"
_SHOWN = 5


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Open the checkpoint that a file ``_METADATA`` belongs to."""
    file = candidate.file
    if file.size > MAX_JSON:
        raise FormatError(f"{ORBAX_METADATA} has {file.size:,} bytes, but the limit is {MAX_JSON:,}", file.path)
    content = parse_json(file.read_at(0, file.size), ORBAX_METADATA, file.path)
    folder, _ = file.files.split(file.place)
    opened = _OpenFiles(file.files, folder)
    try:
        with paused(file.size):  # each chunk becomes several objects
            return _OrbaxReader(file, opened, tree.parse(content, file.path), request.root).read()
    except BaseException:
        opened.close()
        raise


class _OpenFiles:
    """The data files of a checkpoint."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = folder
        self.stored: dict[str, ChunkBytes] = {}  # the open files by their paths in the folder

    def join(self, name: str) -> str:
        """Return the path of a file in the folder."""
        path = self._folder
        for part in name.split("/"):
            path = self._files.join(path, part)
        return path

    def shown(self, name: str) -> str:
        """Return the path of a file for messages."""
        return self._files.shown(self.join(name))

    def open_all(self, names: Sequence[str]) -> None:
        """Open files, and keep them open."""
        self._files.each(self.open, [name for name in names if name not in self.stored])

    def open(self, name: str) -> ChunkBytes:
        """Open a file, or return it if it is open."""
        stored = self.stored.get(name)
        if stored is None:
            try:
                store = self._files.open(self.join(name))
            except FileNotFoundError as error:
                text = (
                    f"No such file or directory: {error.filename}; the checkpoint needs it: was it copied as a whole?"
                )
                raise missing_file(error.filename, text) from None
            stored = self.stored[name] = ChunkBytes(store, 0, store.size, self.shown(name))
            if isinstance(store, RemoteStore):
                store.settle()
        return stored

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return a range of a file, fewer bytes at its end."""
        return read_at(self.open(name).store, offset, length)

    def close(self) -> None:
        """Close the files."""
        for stored in self.stored.values():
            stored.store.close()


class _OrbaxReader:
    """Reads a checkpoint."""

    def __init__(self, file: WeightFile, opened: _OpenFiles, metadata: tree.TreeMetadata, root: str | None) -> None:
        self._file = file
        self._files = file.files
        self._folder = file.files.split(file.place)[0]
        self._path = file.files.shown(self._folder)
        self._opened = opened
        self._tree = metadata
        self._root = root
        self._notes: list[str] = []
        self._listed = 0  # folders of arrays

    def read(self) -> Content:
        leaves = self._tree.leaves
        names = names_below({name: leaf.steps for name, leaf in leaves.items()}, self._root, self._file.path)
        arrays = [name for name in names if leaves[name].kind in tree.ARRAYS and not leaves[name].skipped]
        uses_ocdbt = self._uses_ocdbt()
        values = self._database() if uses_ocdbt else self._paths(arrays)
        described = dict(zip(arrays, self._described(arrays, values, uses_ocdbt), strict=True))
        finder = ChunkFinder(values, self._opened.stored, self._path, filled=not self._tree.complete)
        places = {
            name: finder.find(name, array) for name, array in described.items() if isinstance(array, zarr.ZarrArray)
        }
        self._opened.open_all(sorted({value.file for chunks in places.values() for _, value in chunks if value.file}))
        listings: dict[str, BoxedListing] = {}
        for name, array in described.items():
            unknown = array if isinstance(array, Unknown) else None
            try:
                listing = None if isinstance(array, Unknown) else finder.listing(name, array, places[name])
            except UnsupportedError as error:
                listing, unknown = None, Unknown(array.row.name, array.shape, str(error))  # type: ignore[union-attr]
            listings[names[name]] = listing or BoxedListing(dtypes.BY_CODE["U8"], (0,), [], unknown=unknown)
        finder.check_claims()
        metadata = self._metadata(names)
        narrow = [name for name, array in described.items() if isinstance(array, zarr.ZarrArray) and array.narrow]
        self._note(narrow, "opened as I8, with the same values")
        self._note(self._tree.unknown, f"fields of {ORBAX_METADATA} that safeload does not know")
        stores = [stored.store for stored in self._opened.stored.values()]
        return Content(assemble(self._file, self._folder, listings, stores, metadata=metadata), notes=self._notes)

    def _note(self, names: Sequence[str], text: str) -> None:
        if names:
            shown = ", ".join(map(show, names[:_SHOWN]))
            more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
            self._notes.append(f"{shown}{more}: {text}")

    # ---- the store of arrays ----

    def _uses_ocdbt(self) -> bool:
        if self._tree.ocdbt is not None:
            return self._tree.ocdbt
        try:
            self._opened.open(MANIFEST)
        except FileNotFoundError:
            return False
        return True

    def _database(self) -> Mapping[str, Value]:
        """Return the values of the database, or of the databases of all processes."""
        try:
            self._opened.open(MANIFEST)
        except FileNotFoundError:
            listing = self._files.listing(self._folder)
            parts = [name for name, is_folder in listing if is_folder and _PART.fullmatch(name)]
            if not parts:
                text = f"there is no {MANIFEST}, although the metadata says use_ocdbt; was the checkpoint finished?"
                raise FormatError(text, self._path) from None
        else:
            parts = []
        values = self._joined(parts) if parts else self._values("")
        for stored in self._opened.stored.values():
            if isinstance(stored.store, RemoteStore):
                stored.store.settle()
        return values

    def _values(self, part: str) -> dict[str, Value]:
        """Return the values of the database in the folder ``part``: a path that ends with a slash, or an empty one."""
        manifest = self._opened.open(part + MANIFEST)
        if manifest.length > MAX_MANIFEST:
            text = f"{manifest.path}: the manifest has {manifest.length:,} bytes, more than {MAX_MANIFEST:,}"
            raise LimitError(text, path=manifest.path)

        def read(name: str, offset: int, length: int) -> bytes:
            return self._opened.read(part + name, offset, length)

        content = read_at(manifest.store, 0, manifest.length)
        values = read_tree(content, manifest.path, read, lambda name: self._opened.shown(part + name))
        if not part:
            return values
        return {key: value._replace(file=part + value.file if value.file else "") for key, value in values.items()}

    def _joined(self, parts: Sequence[str]) -> dict[str, Value]:
        """Return the values of the databases of all processes, as Orbax joins them when it finishes a checkpoint."""
        joined: dict[str, Value] = {}
        for part in parts:
            for key, value in self._values(f"{part}/").items():
                other = joined.setdefault(key, value)
                if other is not value and self._content(key, other) != self._content(key, value):
                    raise FormatError(f"two processes have stored {show(key)}, and their values differ", self._path)
        self._notes.append(f"{MANIFEST} is missing: joined the databases of {len(parts):,} processes")
        return joined

    def _content(self, key: str, value: Value) -> bytes:
        """Return a value as a whole: the metadata of an array, or a small chunk."""
        if not value.file:
            return value.inline
        if value.length > MAX_ARRAY_METADATA:
            raise FormatError(f"the value of {show(key)} has {value.length:,} bytes", self._opened.shown(value.file))
        content = self._opened.read(value.file, value.offset, value.length)
        if len(content) < value.length:
            text = f"the value of {show(key)} reaches beyond the end of the file; is it cut off?"
            raise FormatError(text, self._opened.shown(value.file), value.offset)
        return content

    def _paths(self, arrays: Sequence[str]) -> dict[str, Value]:
        """Return the files of arrays in folders, by their paths."""
        for name in arrays:
            if not all(map(is_bare, name.split("/"))):
                text = "cannot be the name of a folder in the checkpoint"
                raise error_about(FormatError, text, path=self._path, tensor=name)
        listings = self._files.each(self._files_of, arrays)
        return {path: Value(path, 0, WHOLE_FILE) for paths in listings for path in paths}

    def _files_of(self, name: str) -> list[str]:
        """Return the files of an array: chunks are in folders with numbers as names, below "c" in version 3."""
        paths: list[str] = []
        folders = [(name, 0)]
        while folders:
            folder, depth = folders.pop()
            self._listed += 1
            if self._listed > MAX_FOLDERS:
                text = f"{self._path}: its chunks are in more than {MAX_FOLDERS:,} folders"
                raise LimitError(text, path=self._path)
            try:
                listing = self._files.listing(self._opened.join(folder))
            except OSError as error:
                if isinstance(error, (FileNotFoundError, NotADirectoryError)):
                    continue
                raise
            for base, is_folder in listing:
                if not is_folder:
                    paths.append(f"{folder}/{base}")
                elif depth <= MAX_RANK and (base.isdecimal() or (base == "c" and not depth)):
                    folders.append((f"{folder}/{base}", depth + 1))
        return paths

    def _described(
        self, arrays: Sequence[str], values: Mapping[str, Value], uses_ocdbt: bool
    ) -> list[zarr.ZarrArray | Unknown]:
        """Return the metadata of readable and of unreadable arrays."""
        base = zarr.V3 if self._tree.version == 3 else zarr.V2
        keys = [f"{name}/{base}" if name else base for name in arrays]

        def parsed(name: str, key: str, content: Mapping[str, Any]) -> zarr.ZarrArray | Unknown:
            try:
                return zarr.parse(content, self._opened.shown(key), name, self._tree.version)
            except UnsupportedError as error:
                return zarr.unreadable(content, str(error))

        if not uses_ocdbt:
            return self._files.each(
                lambda item: parsed(*item, read_json(self._opened.join(item[1]), base, self._files)),
                list(zip(arrays, keys, strict=True)),
            )
        missing = next((name for name, key in zip(arrays, keys, strict=True) if key not in values), None)
        if missing is not None:
            text = f"is not in {MANIFEST}, although {ORBAX_METADATA} lists it"
            raise error_about(FormatError, text, path=self._path, tensor=missing)
        stored = [values[key] for key in keys]
        total = sum(value.length for value in stored)
        if total > MAX_JSON:
            text = f"{self._path}: the metadata of its arrays has {total:,} bytes, but the limit is {MAX_JSON:,}"
            raise LimitError(text, path=self._path)
        self._prefetch(stored)
        return [
            parsed(name, key, parse_json(self._content(key, value), base, f"{self._path}/{key}"))
            for name, key, value in zip(arrays, keys, stored, strict=True)
        ]

    def _prefetch(self, values: Sequence[Value]) -> None:
        """Fetch the metadata of all arrays in a few requests."""
        places: dict[str, list[tuple[int, int]]] = {}
        for value in values:
            if value.file and value.length <= MAX_ARRAY_METADATA:
                places.setdefault(value.file, []).append((value.offset, value.offset + value.length))
        for name, ranges in places.items():
            store = self._opened.open(name).store
            if isinstance(store, RemoteStore):
                store.prefetch(ranges)

    # ---- leaves other than arrays ----

    def _metadata(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return leaves other than arrays, nested, and the metadata that the program has added."""
        leaves = self._tree.leaves
        non_arrays = [name for name in names if leaves[name].kind not in tree.ARRAYS or leaves[name].skipped]
        texts = {name for name in non_arrays if leaves[name].kind == tree.STRING and not leaves[name].skipped}
        strings = read_json(self._opened.join(_STRINGS), _STRINGS, self._files) if texts else {}
        for name in sorted(texts):
            if type(strings.get(name)) is not str:
                text = f"{_STRINGS} must have the text {show(name)}, got {show(strings.get(name))[:100]}"
                raise FormatError(text, self._path)
        unknown = [name for name in non_arrays if name not in texts and leaves[name].kind not in tree.EMPTY]
        self._note(unknown, "left out, because only the program that wrote it knows its type")
        paths = {}
        for name in non_arrays:
            if name in texts or leaves[name].kind in tree.EMPTY:
                steps = leaves[name].steps[0 if self._root is None else depth_of(leaves[name].steps, self._root) :]
                paths[name] = (str(steps[0]), *steps[1:]) if steps else ("",)

        def value(name: str) -> Any:
            return strings[name] if name in texts else copy(tree.EMPTY[leaves[name].kind])

        metadata = nested(paths, value, self._path)
        custom = self._tree.custom
        if custom is not None and metadata.setdefault(_CUSTOM, custom) is not custom:
            self._notes.append(f"{_CUSTOM} is left out: the tree has a leaf of this name")
        return metadata
