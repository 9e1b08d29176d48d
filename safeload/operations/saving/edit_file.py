"""Edits of a single file: of safetensors files, and of the metadata of GGUF files."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, closing
from itertools import count, pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.messages import error_about
from ...base.native import ffi
from ...base.text import show
from ...engine.run.atomic_file import AtomicFile
from ...engine.run.memory import address_of
from ...engine.run.weight_file import open_without_table
from ...errors import FormatError, TensorNotFoundError, UnsupportedError, exported, public, unsaved
from ...formats.gguf import read as gguf_reading
from ...formats.gguf.write import data_begin, head_with
from ...formats.safetensors.file import ROOM, Header, TensorToWrite, open_file, source_of, text
from ...formats.safetensors.quantized import CODES_SUFFIX, KEY, QUANTIZED, SCALE_SUFFIX
from ...stores.edit_journal import Locked, remove, replace_header
from ...stores.local import BLOCK
from .values import check_name, value_of

if TYPE_CHECKING:
    from typing_extensions import Self

_LENGTH = 8
# Folders of the Hub's cache, in which one file can belong to several snapshots.
_CACHED = ("models--", "datasets--", "spaces--")


class _EditedMetadata(MutableMapping[str, Any]):
    """The metadata of an edited file: its values, and the changes to them."""

    def __init__(self, values: Mapping[str, Any], *, texts: bool) -> None:
        self._values = values
        self._texts = texts  # True if all values are text
        self.changes: dict[str, Any] = {}  # None for a removed key

    def __getitem__(self, key: str) -> Any:
        value = self.changes[key] if key in self.changes else self._values[key]
        if value is None:
            raise KeyError(key)
        return value

    @public
    def __setitem__(self, key: str, value: Any) -> None:
        text(key, "a metadata key")
        if self._texts:
            text(value, f"metadata {show(key)}")
        elif value is None:
            raise TypeError(f"metadata {show(key)} must not be None; use del to remove it")
        self.changes[key] = value

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        if key in self._values:
            self.changes[key] = None
        else:
            del self.changes[key]

    def __iter__(self) -> Iterator[str]:
        for key in dict.fromkeys([*self._values, *self.changes]):
            if self.changes.get(key, self) is not None:
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


@exported()
class Edit(ABC):
    """An edit of a file or folder, which `safeload.edit` begins. Leaving the ``with`` block writes it.

    Names are those of the stored tensors. After an exception nothing is written.

    Attributes:
        path: path of the file or folder.
        metadata: a mutable mapping; text to text in safetensors files, text to values in GGUF files.

    Example:
        >>> import numpy as np, safeload
        >>> safeload.save({"w": np.ones(2, np.float32)}, "w.safetensors")
        >>> with safeload.edit("w.safetensors") as file:
        ...     file["bias"] = np.zeros(2, np.float32)
        ...     list(file)
        ['w', 'bias']
    """

    path: str
    metadata: MutableMapping[str, Any]

    _stack: ExitStack  # closes the files
    _tensors: dict[str, Any]  # the place of each tensor

    def __init__(self, path: str, metadata: Mapping[str, Any], *, texts: bool = True) -> None:
        self.path = path  # for messages
        self.metadata = self._edited = _EditedMetadata(metadata, texts=texts)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the tensors."""
        return iter([*self._tensors])

    def __contains__(self, name: object) -> bool:
        """Return True if there is a tensor with this name."""
        return name in self._tensors

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._tensors)

    @public
    def rename(self, old: str, new: str) -> None:
        """Rename a tensor.

        Raises:
            TensorNotFoundError: there is no tensor of the old name.
            ValueError: there is a tensor of the new name.
            UnsupportedError: GGUF, or the tensor is a part of a quantized tensor.
        """
        self._check(old)
        if old != new:
            self._check(new, new=True)
            self._rename(old, new)

    @public
    def __delitem__(self, name: str) -> None:
        """Remove a tensor; see `rename` for errors."""
        self._check(name)
        self._remove(name)

    @public
    def __setitem__(self, name: str, array: Any) -> None:
        """Add or replace a tensor by an array, which must not change before the end of the block.

        Raises:
            TypeError, SafetensorError: see `Writer.add`.
        """
        self._check(name, new=name not in self)
        self._put(name, array)

    def _check(self, name: str, *, new: bool = False) -> None:
        """Refuse a new name that is taken, and a tensor that does not exist or cannot change."""
        if new and check_name(name) in self:
            raise ValueError(f"{self.path}: there is a tensor {show(name)} already")
        if not new and name not in self:
            raise TensorNotFoundError(f"{self.path}: no tensor {show(name)}", tensor=str(name))

    def _rename(self, old: str, new: str) -> None:
        self._tensors[new] = self._tensors.pop(old)

    def _remove(self, name: str) -> None:
        del self._tensors[name]

    @abstractmethod
    def _put(self, name: str, array: Any) -> None: ...

    @abstractmethod
    def _write(self) -> None:
        """Write the changes."""

    def __enter__(self) -> Self:
        return self

    @public
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is None:
                try:
                    self._write()
                except OSError as failure:
                    raise unsaved(failure) from None


class _Stored(NamedTuple):
    """A tensor that the file has."""

    row: dtypes.Dtype
    shape: Sequence[int]
    begin: int  # first byte in the file
    nbytes: int


class SafetensorsEdit(Edit):
    """An edit of a safetensors file."""

    _tensors: dict[str, tuple[int, _Stored | TensorToWrite]]  # with their positions in file order

    def __init__(self, path: str, file: Locked, *, durable: bool) -> None:
        with closing(open_file(file.path, brief=True)) as opened:
            table = opened.table
            rows = zip(table.names, table.rows, table.shapes, table.byte_ranges(), strict=True)
            self._tensors = {
                name: (place, _Stored(row, shape, begin, end - begin))
                for place, (name, row, shape, (begin, end)) in enumerate(rows)
            }
            self._before = table.metadata()
        super().__init__(path, self._before or {})
        self._file, self._durable = file, durable
        self._parts = _parts_of(self._before or {})
        self._moved = self._renamed = False  # True if tensors are added or removed, and renamed
        self._places = count(len(self._tensors))  # of new tensors
        length = int.from_bytes(file.head(_LENGTH), "little")
        if not 0 < length <= file.identity.size - _LENGTH:
            raise FormatError("the header changed while it was read", path, 0)
        self._old = file.head(_LENGTH + length)
        self._new: bytes | None = None  # the header that was written in the place of the old one
        self._keep: list[Any] = []

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _ in self._in_order()])

    def _in_order(self) -> list[tuple[str, _Stored | TensorToWrite]]:
        items = sorted(self._tensors.items(), key=lambda item: item[1][0])
        return [(name, tensor) for name, (_place, tensor) in items]

    def _check(self, name: str, *, new: bool = False) -> None:
        super()._check(name, new=new)
        if not new and name in self._parts:
            raise UnsupportedError(
                f"{self.path}: {show(name)} is a part of a quantized tensor; convert the file to change it"
            )

    def _rename(self, old: str, new: str) -> None:
        super()._rename(old, new)
        self._renamed = True

    def _remove(self, name: str) -> None:
        super()._remove(name)
        self._moved = True

    def _put(self, name: str, array: Any) -> None:
        value = value_of(name, array, self._keep)
        if isinstance(value, QUANTIZED):
            raise error_about(UnsupportedError, "is quantized; convert the file to add it", tensor=name)
        tensor = source_of(name, value)
        place = self._tensors[name][0] if name in self else next(self._places)
        self._tensors[name] = place, tensor
        self._moved = True

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _place, tensor in self._tensors.values())

    @property
    def in_place(self) -> bool:
        """True if only metadata changes, and the new header fits in the place of the old one."""
        return not self._renamed and self._fitting() is not None

    def _header(self) -> Header:
        metadata, items = dict(self.metadata), self._in_order()
        names, numbers = [name for name, _ in items], bytes(tensor.row.number for _, tensor in items)
        texts = None if self._before is None and not metadata else metadata
        return Header(names, numbers, [tensor.shape for _, tensor in items], texts, keeps_order=not self._moved)

    def _fitting(self) -> bytes | None:
        """Return the header for the place of the old one: the old one if nothing changes, None if none fits."""
        if not self._moved and not self._renamed and not self._edited.changes:
            return self._old
        if self._moved or (header := self._header()).nbytes > len(self._old):
            return None
        header.pad_to(len(self._old))
        return bytes(ffi.buffer(header.memory, header.nbytes))

    def _write(self) -> None:
        new = self._fitting()
        if new == self._old:
            return
        self._file.check_unchanged()
        if new is None:
            self.write_to(self._file.path, overwrite=True)
        else:
            replace_header(self._file, self._old, new, durable=self._durable)
            self._new = new

    def undo(self) -> None:
        """Put the old header back if another one was written in its place."""
        if self._new is not None:
            replace_header(self._file, self._new, self._old, durable=self._durable)
            self._new = None

    def write_to(self, path: str, *, overwrite: bool) -> None:
        """Write the edited file to a new file."""
        header = self._header()
        # Blocks can be shared if the bytes keep their positions in blocks.
        size = header.nbytes + ROOM
        header.pad_to(size + (len(self._old) - size) % BLOCK if len(self._old) % _LENGTH == 0 else size)
        tensors = [tensor for _, tensor in self._in_order()]
        total = header.nbytes + int(header.sizes.sum())
        with AtomicFile(path, total, overwrite=overwrite, durable=self._durable) as file:
            file.write([(header.address, header.nbytes)])
            begin = end = 0  # neighbours are copied together
            for index in header.order.tolist():
                tensor = tensors[index]
                if isinstance(tensor, _Stored):
                    if tensor.begin != end:
                        file.copy(self._file.fileno(), begin, end - begin)
                        begin = tensor.begin
                    end = tensor.begin + tensor.nbytes
                    continue
                file.copy(self._file.fileno(), begin, end - begin)
                begin = end = 0
                for _owner, address, size in tensor.pieces():
                    file.write([(address, size)])
            file.copy(self._file.fileno(), begin, end - begin)
            self._file.finish_reading()


def _parts_of(metadata: Mapping[str, str]) -> set[str]:
    """Return the names of the tensors that quantized tensors consist of."""
    parts: set[str] = set()
    if KEY not in metadata:
        return parts
    try:
        described = json.loads(metadata[KEY])
        for name, entry in described.items():
            parts |= {name, name + SCALE_SUFFIX, name + CODES_SUFFIX, *(entry.get("parts") or {}).values()}
    except (ValueError, RecursionError, AttributeError, TypeError):
        raise UnsupportedError(f"the metadata {KEY} cannot be understood, so the file cannot be edited") from None
    return parts


class GgufEdit(Edit):
    """An edit of the metadata of a GGUF file."""

    def __init__(self, path: str, file: Locked, *, durable: bool) -> None:
        with closing(open_without_table(file.path)) as opened:
            table = gguf_reading.read_table(opened)
        self._tensors = dict.fromkeys(table.names)
        self._before = table.metadata()
        super().__init__(path, self._before, texts=False)
        self._file, self._durable = file, durable

    def _check(self, name: str, *, new: bool = False) -> None:
        raise UnsupportedError(f"{self.path}: only the metadata of a GGUF file can be edited; convert it instead")

    def _put(self, name: str, array: Any) -> None:
        self._check(name)

    def _write(self) -> None:
        if not self._edited.changes:
            return
        self._file.check_unchanged()
        size = self._file.identity.size
        begin = min(data_begin(self._before), size) if self._before.tensor_count else size
        old, new = self._file.head(begin), head_with(self._before, self._edited.changes)
        if len(new) != len(old):
            head = np.frombuffer(new, np.uint8)
            with AtomicFile(self._file.path, len(new) + size - begin, durable=self._durable) as file:
                file.write([(address_of(head), head.size)])
                file.copy(self._file.fileno(), begin, size - begin)
                self._file.finish_reading()
        elif new != old:
            replace_header(self._file, old, new, durable=self._durable)


def edit_file(path: str, *, force: bool, durable: bool) -> Edit:
    """Return the edit of a single file; see `edit`."""
    with ExitStack() as stack:
        file = stack.enter_context(Locked(resolved(path, force=force)))
        kind = GgufEdit if file.head(min(4, file.identity.size)) == b"GGUF" else SafetensorsEdit
        edit = kind(path, file, durable=durable)
        remove(file.path)  # the journal of an edit that did not damage the header
        edit._stack = stack.pop_all()
        return edit


def resolved(path: str, *, force: bool) -> str:
    """Return the path of a file without symbolic links."""
    real = os.path.realpath(path, strict=True)
    for place in (os.path.abspath(path), real):
        parts = place.split(os.sep)
        if any(part.startswith(_CACHED) and inner in ("blobs", "snapshots") for part, inner in pairwise(parts)):
            raise UnsupportedError(
                f"{path} is in the cache of the Hugging Face Hub, which other programs share: copy the file and edit "
                "the copy"
            )
    links = os.stat(real).st_nlink
    if links > 1 and not force:
        raise UnsupportedError(f"{path} has {links} hard links, and an edit may change all of them; pass force=True")
    return real
