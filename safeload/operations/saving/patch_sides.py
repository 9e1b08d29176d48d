"""The two sides of a patch: files or dicts whose tensors are read as plain bytes, and their digests."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.native import ffi
from ...base.paths import PathLike
from ...engine.run.weight_file import WeightFile
from ...errors import UnsupportedError
from ...formats.registry import SAFETENSORS, OpenRequest, open_file
from ...formats.safetensors.file import TensorToWrite, source_of
from ...formats.safetensors.header import Header
from ...stores.places import Located, places_of
from .values import check_name, value_of

# A side of a patch.
PatchSide: TypeAlias = PathLike | Located | Mapping[str, Any]

# Bytes of a tensor that are compared or copied at once; a multiple of every element.
CHUNK = 32 << 20
_LENGTH = 8


class Described(NamedTuple):
    """A tensor without its values."""

    row: dtypes.Dtype
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        """Number of elements that a patch can change."""
        return self.nbytes // self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtypes.array_dtype(self.row.number).itemsize

    @property
    def sparse(self) -> bool:
        """True if single elements can change: they have whole bytes."""
        return not self.row.packed


class Side(ABC):
    """Tensors of a file or dict."""

    place: str  # for messages
    tensors: dict[str, Described]
    header: bytes  # of the file, with its length

    @abstractmethod
    def chunks(self, name: str) -> Iterator[Array]:
        """Iterate over the bytes of a tensor, in arrays of `CHUNK` bytes except for the last."""

    def whole(self, name: str) -> Array:
        """Return the bytes of a tensor."""
        chunks = [*self.chunks(name)]
        return chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, np.uint8), *chunks])


class FileSide(Side):
    """A safetensors file."""

    def __init__(self, file: WeightFile, place: str) -> None:
        self._file, self.place = file, place
        table = file.table
        self._ranges = dict(zip(table.names, table.byte_ranges(), strict=True))
        self.tensors = {
            name: Described(row, tuple(shape), end - begin)
            for name, row, shape, (begin, end) in zip(
                table.names, table.rows, table.shapes, table.byte_ranges(), strict=True
            )
        }
        size = int.from_bytes(file.read_at(0, _LENGTH), "little")
        self.header = bytes(file.read_at(0, _LENGTH + size))
        self.metadata = dict(table.metadata() or {})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def chunks(self, name: str) -> Iterator[Array]:
        begin, end = self._ranges[name]
        for at in range(begin, end, CHUNK):
            yield np.frombuffer(self._file.read_at(at, min(CHUNK, end - at)), np.uint8)


class DictSide(Side):
    """Arrays by name, of any library."""

    def __init__(self, arrays: Mapping[str, Any], place: str) -> None:
        self.place = place
        self._keep: list[Any] = []
        self._sources: dict[str, TensorToWrite] = {
            check_name(name): source_of(name, value_of(name, value, self._keep)) for name, value in arrays.items()
        }
        self.tensors = {
            name: Described(source.row, tuple(source.shape), source.nbytes) for name, source in self._sources.items()
        }

    @property
    def header(self) -> bytes:  # type: ignore[override]
        numbers = bytes(tensor.row.number for tensor in self.tensors.values())
        header = Header([*self.tensors], numbers, [tensor.shape for tensor in self.tensors.values()], None)
        return bytes(ffi.buffer(header.memory, header.nbytes))

    def chunks(self, name: str) -> Iterator[Array]:
        pieces = [
            np.frombuffer(ffi.buffer(ffi.cast("char *", address), size)[:], np.uint8)
            for _owner, address, size in self._sources[name].pieces()
            if size
        ]
        whole = pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint8), *pieces])
        for at in range(0, whole.size, CHUNK):
            yield whole[at : at + CHUNK]


@contextmanager
def side_of(value: Any, place: str, storage_options: Mapping[str, Any] | None) -> Iterator[Side]:
    """Open a side of a patch."""
    if isinstance(value, Mapping):
        yield DictSide(value, place)
        return
    with opened(value, storage_options) as file:
        yield file


@contextmanager
def opened(value: Any, storage_options: Mapping[str, Any] | None) -> Iterator[FileSide]:
    """Open a safetensors file; see `side_of`."""
    (path,), files = places_of((value,), storage_options)
    if not files.remote and os.path.isdir(path):
        raise UnsupportedError(f"{path} is a folder: patches are made and applied file by file")
    file = open_file(path, OpenRequest((SAFETENSORS,), files=files)).file
    try:
        yield FileSide(file, files.shown(path))
    finally:
        file.close()


class ContentDigest:
    """SHA-256 over names, dtypes, shapes and bytes of tensors, whatever their order and the metadata."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, tensor: Described, sha256: str) -> None:
        """Add a tensor, whose bytes have a SHA-256."""
        self._lines.append(json.dumps([name, tensor.row.code, list(tensor.shape), sha256]))

    def hexdigest(self) -> str:
        """Return the digest of all tensors."""
        return hashlib.sha256("\n".join(sorted(self._lines)).encode()).hexdigest()


def content_digest(side: Side) -> str:
    """Return the digest of all tensors of a side."""
    content = ContentDigest()
    for name, tensor in side.tensors.items():
        content.add(name, tensor, sha256_of(side, name))
    return content.hexdigest()


def sha256_of(side: Side, name: str) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    digest = hashlib.sha256()
    for chunk in side.chunks(name):
        digest.update(chunk.data)
    return digest.hexdigest()


def unsigned(data: Array, itemsize: int) -> Array:
    """Return bytes as elements of this size."""
    view: Array = data.view(np.dtype(f"u{itemsize}"))
    return view


def same_layout(a: Described, b: Described) -> bool:
    """Return True if two tensors have equal dtypes and shapes."""
    return (a.row.number, a.shape) == (b.row.number, b.shape)
