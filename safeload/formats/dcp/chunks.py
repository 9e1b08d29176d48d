"""The chunks of a checkpoint in its files: each is found on first use.

1. Bytes [offset, offset + length) of a file are a whole zip archive of `torch.save`, of a single tensor in any strides.
   Offsets inside the archive count from its own begin.
2. Other values are archives too, without a storage, unless they hold tensors.
3. With the transform ``stream.zstd/1`` the bytes are a zstd frame around the archive. The name may carry "@domain"
   before the slash; the version is read up to the first dot and must be 1.
4. With the serialization format SAFETENSORS a file is the archives of other values, followed by a whole safetensors
   file. The offset of each chunk is the beginning of that file, and its length the bytes of the chunk. The place of the
   chunk is in the header, under the name of its tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from math import prod
from typing import Any

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, c_strides
from ...base.listed_table import ListedTable
from ...base.messages import error_about
from ...base.table import Table
from ...base.text import show
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, LimitError, UnsupportedError, missing_file
from ...stores.files import Files
from ...stores.store import ByteStore, read_at
from ...stores.windows import StoreWindow, Unpacked
from .. import foreign, zstd
from ..boxed import Region, itemsize_of, logical_shape
from ..registry import Candidate, OpenRequest
from ..safetensors import file as safetensors
from ..torch import zip_file
from ..torch.flatten import Tree
from ..zip import Archive
from .records import ChunkPlace

# Bytes of an archive beside its storage: about 1,500. Strided storages may hold a few more elements.
MAX_OVERHEAD = 1 << 20
# Bytes of a compressed value other than a tensor, unpacked.
MAX_VALUE = 1 << 30
_ZSTD, _ZSTD_VERSION = "stream.zstd", "1"


class DataFiles:
    """The files of a folder, opened on first use."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = folder
        self._parts: dict[tuple[str, int], Table] = {}
        self.stores: dict[str, ByteStore] = {}  # the open files by name

    def path(self, name: str) -> str:
        """Return the path of a file for messages."""
        return self._files.shown(self._files.join(self._folder, name))

    def open_all(self, names: Sequence[str]) -> None:
        """Open files, and keep them open."""
        stores = self._files.each(self.open, names)
        self.stores.update(zip(names, stores, strict=True))

    def open(self, name: str) -> ByteStore:
        """Open a file."""
        try:
            return self._files.open(self._files.join(self._folder, name))
        except FileNotFoundError as error:
            message = f"No such file or directory: {error.filename}; the checkpoint's metadata lists it: was it copied?"
            raise missing_file(error.filename, message) from None

    def close(self) -> None:
        """Close the files."""
        for store in self.stores.values():
            store.close()

    def table_at(self, name: str, offset: int) -> Table:
        """Return the table of the safetensors file that begins at an offset and reaches to the end of a file."""
        table = self._parts.get((name, offset))
        if table is None:
            store = self.stores[name]
            path = self.path(name)
            window = WeightFile(path, StoreWindow(store, offset, store.size - offset, path), ListedTable([]))
            try:
                table = safetensors.read(Candidate(window), OpenRequest()).file.table
            except FormatError as error:
                raise _moved(error, offset) from None
            self._parts[name, offset] = table
        return table


class StoredChunk:
    """A chunk of a tensor; see `Stored`."""

    __slots__ = ("_data", "_name", "_region", "_row", "_shape", "place")

    def __init__(
        self, data: DataFiles, name: str, row: dtypes.Dtype, shape: tuple[int, ...], place: ChunkPlace
    ) -> None:
        self._data = data
        self._name = name
        self._row = row
        self._shape = shape  # as torch counts
        self._region: Region | None = None
        self.place = place

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self._shape) * itemsize_of(self._row)

    def region(self) -> Region | None:
        if self._region is None and not self.place.transforms:
            self._region = self._locate()
        return self._region

    def unpack(self) -> Array:
        file, offset, length, transforms = self.place
        path = self._data.path(file)
        window = StoreWindow(self._data.stores[file], offset, length, path)
        check_transforms(transforms, path, self._name)
        content = zstd.decompressed(window, 0, length, self.nbytes + MAX_OVERHEAD, path, name=self._name)
        region = self._in_archive(Unpacked(content), path, None)
        strides = region.strides or c_strides(self._shape, itemsize_of(self._row))
        shape = (*self._shape, itemsize_of(self._row))
        elements = np.ndarray(shape, np.uint8, content, region.begin, (*strides, 1))
        return np.ascontiguousarray(elements)

    def _locate(self) -> Region:
        file, offset, length, _ = self.place
        store, path = self._data.stores[file], self._data.path(file)
        head = read_at(store, offset, foreign.HEAD_SIZE)
        if foreign.is_safetensors(head) and not foreign.is_zip(head):
            return self._in_safetensors(store, path)
        region = self._in_archive(StoreWindow(store, offset, length, path), path, offset)
        return Region(store, offset + region.begin, region.strides)

    def _in_safetensors(self, store: ByteStore, path: str) -> Region:
        offset = self.place.offset
        table = self._data.table_at(self.place.file, offset)
        index = table.find(self._name)
        if index < 0:
            text = "should be in the safetensors part, but is not there"
            raise error_about(FormatError, text, path=path, offset=offset, tensor=self._name)
        self._check(table, index, path, offset)
        return Region(store, offset + table.byte_range(index)[0])

    def _in_archive(self, store: ByteStore, path: str, offset: int | None) -> Region:
        """Return the place of the elements in an archive; ``offset`` in the file is None for a compressed archive."""
        window = WeightFile(path, store, ListedTable([]))
        try:
            tables = zip_file.read_tables(Archive(window), window, OpenRequest())
        except FormatError as error:
            raise _moved(error, offset) from None
        if len(tables.names) != 1 or tables.beside is not None:
            text = f": its chunk must hold a single tensor, got {len(tables.names)}"
            raise error_about(FormatError, text, path=path, offset=offset, tensor=self._name)
        table = tables.table
        self._check(table, 0, path, offset)
        if table.big_endian(0):
            raise error_about(UnsupportedError, "has big-endian chunks", path=path, tensor=self._name)
        begin, end = table.byte_range(0)
        if end - begin > 4 * self.nbytes + MAX_OVERHEAD:
            text = f": strides spread a chunk of {self.nbytes:,} bytes over {end - begin:,}"
            raise error_about(LimitError, text, path=path, tensor=self._name)
        return Region(store, begin, table.strides(0))

    def _check(self, table: Table, index: int, path: str, offset: int | None) -> None:
        """Check that a stored tensor is the chunk that the metadata describes."""
        unknown = table.unknown.get(table.names[index])
        if unknown is not None:
            raise error_about(UnsupportedError, f": {unknown.label} {unknown.reason}", path=path, tensor=self._name)
        row, shape, expected = table.row(index), table.shape(index), logical_shape(self._row, self._shape)
        if (row, shape) != (self._row, expected):
            text = f": the metadata says its chunk is {self._row.code} {list(expected)}, but it is "
            text += f"{row.code} {list(shape)}"
            raise error_about(FormatError, text, path=path, offset=offset, tensor=self._name)


def _moved(error: FormatError, by: int | None) -> FormatError:
    """Return an error with its position in the file instead of a window."""
    if by is None:
        error.offset = None
    elif error.offset is not None:
        error.offset += by
    return error


# ---- other values ----


def read_value(data: DataFiles, name: str, place: ChunkPlace) -> Any:
    """Return a value other than a tensor, without running code; unknown objects become placeholders."""
    path = data.path(place.file)
    with closing(data.open(place.file)) as store:
        check_inside(store, name, place, path)
        source: ByteStore = StoreWindow(store, place.offset, place.length, path)
        if place.transforms:
            check_transforms(place.transforms, path, name)
            limit = min(place.length * zstd.MAX_RATIO, MAX_VALUE)
            source = Unpacked(zstd.decompressed(source, 0, place.length, limit, path, name=name))
        window = WeightFile(path, source, ListedTable([]))
        try:
            pickled, _ = zip_file.run_pickle(Archive(window), window, inert=True)
        except FormatError as error:
            raise _moved(error, None if place.transforms else place.offset) from None
    return Tree(pickled.value, path, pickled.size).plain()


def check_inside(store: ByteStore, name: str, place: ChunkPlace, path: str) -> None:
    """Check that the bytes of a chunk or value lie inside their file."""
    end = place.offset + place.length
    if end > store.size:
        text = f": bytes [{place.offset:,}, {end:,}) lie outside the file, which has {store.size:,}; is it cut off?"
        raise error_about(FormatError, text, path=path, offset=min(place.offset, store.size), tensor=name)


# ---- zstd ----


def check_transforms(transforms: Sequence[str], path: str, name: str) -> None:
    """Refuse transforms other than zstd, and zstd without its package."""
    for text in transforms:
        kind, _, version = text.partition("/")
        if len(transforms) > 1 or kind.partition("@")[0] != _ZSTD or version.partition(".")[0] != _ZSTD_VERSION:
            shown = ", ".join(map(show, transforms[:5]))
            text = f"is stored with {shown}; of transforms safeload reads a single {_ZSTD}/{_ZSTD_VERSION}"
            raise error_about(UnsupportedError, text, path=path, tensor=name)
        zstd.check_available()
