"""Edits of a single file: of safetensors files, and of the metadata of GGUF files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...base import dtypes
from ...base.messages import error_about
from ...base.native import ffi
from ...base.text import show
from ...engine.run.atomic_file import AtomicFile
from ...engine.run.weight_file import open_without_table
from ...errors import FormatError, UnsupportedError, public, unsaved
from ...formats.gguf import read as gguf_reading
from ...formats.gguf.write import data_begin, head_with
from ...formats.safetensors.file import TensorToWrite, open_file, source_of
from ...formats.safetensors.header import ROOM, Header
from ...formats.safetensors.quantized import CODES_SUFFIX, KEY, QUANTIZED, SCALE_SUFFIX
from ...stores.edit_journal import Locked, remove, replace_header
from ...stores.local import BLOCK
from .edit_base import Edit, EditedMetadata, resolved
from .values import value_of

_LENGTH = 8


class _Stored(NamedTuple):
    """A tensor that the file has."""

    row: dtypes.Dtype
    shape: Sequence[int]
    begin: int  # first byte in the file
    nbytes: int


class SafetensorsEdit(Edit):
    """An edit of a safetensors file."""

    def __init__(self, path: str, file: Locked, *, durable: bool) -> None:
        super().__init__()
        self.path, self._file, self._durable = path, file, durable  # the path is for messages
        opened = open_file(file.path, brief=True)
        try:
            table = opened.table
            ranges = table.byte_ranges()
            self._names: list[str | None] = [*table.names]  # in file order; None for a removed tensor
            self._tensors: list[_Stored | TensorToWrite] = [
                _Stored(row, shape, begin, end - begin)
                for row, shape, (begin, end) in zip(table.rows, table.shapes, ranges, strict=True)
            ]
            self._places = {name: k for k, name in enumerate(table.names)}
            self._before = table.metadata()
        finally:
            opened.close()
        remove(file.path)  # the journal of an edit that did not damage the header
        length = int.from_bytes(file.read(_LENGTH), "little")
        if not 0 < length <= file.identity.size - _LENGTH:
            raise FormatError("the header changed while it was read", path, 0)
        self._old = file.read(_LENGTH + length)
        self._new: bytes | None = None  # the header that was written in the place of the old one
        self.metadata = self._edited = EditedMetadata(self._before or {}, texts=True)
        self._stack.enter_context(file)
        self._parts = _parts_of(self._before or {})
        self._moved = False  # True if tensors are added or removed
        self._renamed = False
        self._keep: list[Any] = []

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._names if name is not None])

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    @public
    def rename(self, old: str, new: str) -> None:
        self._check_free(old)
        if old == new:
            return
        self._check_new(new)
        place = self._places[new] = self._places.pop(old)
        self._names[place] = new
        self._renamed = True

    @public
    def __delitem__(self, name: str) -> None:
        self._check_free(name)
        self._names[self._places.pop(name)] = None
        self._moved = True

    @public
    def __setitem__(self, name: str, array: Any) -> None:
        if name in self:
            self._check_free(name)
        else:
            self._check_new(name)
        value = value_of(name, array, self._keep)
        if isinstance(value, QUANTIZED):
            raise error_about(UnsupportedError, "is quantized; convert the file to add it", tensor=name)
        tensor = source_of(name, value)
        place = self._places.setdefault(name, len(self._names))
        self._names[place : place + 1], self._tensors[place : place + 1] = [name], [tensor]
        self._moved = True

    def _check_free(self, name: str) -> None:
        self._check_known(name)
        if name in self._parts:
            raise UnsupportedError(
                f"{self.path}: {show(name)} is a part of a quantized tensor; convert the file to change it"
            )

    @property
    def in_place(self) -> bool:
        """True if only metadata changes, and the new header fits in the place of the old one."""
        if self._moved or self._renamed:
            return False
        return not self._edited.changes or self._header(keeps_order=True).nbytes <= len(self._old)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _, tensor in self._present())

    def _present(self) -> Iterator[tuple[str, _Stored | TensorToWrite]]:
        for name, tensor in zip(self._names, self._tensors, strict=True):
            if name is not None:
                yield name, tensor

    def _write(self) -> None:
        if not (self._moved or self._renamed or self._edited.changes):
            return
        self._file.check_unchanged()
        if not self._moved:
            header = self._header(keeps_order=True)
            if header.nbytes <= len(self._old):
                header.pad_to(len(self._old))
                new = bytes(ffi.buffer(header.memory, header.nbytes))
                if new != self._old:
                    replace_header(self._file, self._old, new, durable=self._durable)
                    self._new = new
                return
        try:
            self.write_to(self._file.path, overwrite=True)
        except OSError as error:
            raise unsaved(error) from None

    def undo(self) -> None:
        """Put the old header back if another one was written in its place."""
        if self._new is not None:
            replace_header(self._file, self._new, self._old, durable=self._durable)
            self._new = None

    def write_to(self, path: str, *, overwrite: bool) -> None:
        """Write the edited file to a new file."""
        header = self._header(keeps_order=not self._moved)
        # Blocks can be shared if the bytes keep their positions in blocks.
        size = header.nbytes + ROOM
        header.pad_to(size + (len(self._old) - size) % BLOCK if len(self._old) % _LENGTH == 0 else size)
        tensors = [tensor for _, tensor in self._present()]
        total = header.nbytes + int(header.sizes.sum())
        with AtomicFile(path, total, overwrite=overwrite, durable=self._durable) as file:
            file.write([(header.address, header.nbytes)])
            begin = end = 0  # neighbours are copied together
            for index in header.order.tolist():
                tensor = tensors[index]
                if isinstance(tensor, _Stored):
                    if tensor.begin != end:
                        file.copy(self._file.descriptor, begin, end - begin)
                        begin = tensor.begin
                    end = tensor.begin + tensor.nbytes
                    continue
                file.copy(self._file.descriptor, begin, end - begin)
                begin = end = 0
                for _owner, address, size in tensor.pieces():
                    file.write([(address, size)])
            file.copy(self._file.descriptor, begin, end - begin)
            self._file.finish_reading()

    def _header(self, *, keeps_order: bool) -> Header:
        metadata = dict(self.metadata)
        numbers = bytes(tensor.row.number for _, tensor in self._present())
        shapes = [tensor.shape for _, tensor in self._present()]
        texts = None if self._before is None and not metadata else metadata
        return Header([*self], numbers, shapes, texts, keeps_order=keeps_order)


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
    """An edit of the metadata of a GGUF file; see `SafetensorsEdit`."""

    def __init__(self, path: str, file: Locked, *, durable: bool) -> None:
        super().__init__()
        self.path, self._file, self._durable = path, file, durable  # the path is for messages
        opened = open_without_table(file.path)
        try:
            table = gguf_reading.read_table(opened)
        finally:
            opened.close()
        remove(file.path)  # the journal of an edit that did not damage the header
        self._names = list(table.names)
        self._before = table.metadata()
        size = file.identity.size
        self._begin = min(data_begin(self._before), size) if self._before.tensor_count else size
        self.metadata = self._edited = EditedMetadata(self._before, texts=False)
        self._stack.enter_context(file)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    @public
    def rename(self, old: str, new: str) -> None:
        raise self._only_metadata()

    @public
    def __delitem__(self, name: str) -> None:
        raise self._only_metadata()

    @public
    def __setitem__(self, name: str, array: Any) -> None:
        raise self._only_metadata()

    def _only_metadata(self) -> UnsupportedError:
        return UnsupportedError(f"{self.path}: only the metadata of a GGUF file can be edited; convert it instead")

    def _write(self) -> None:
        if not self._edited.changes:
            return
        self._file.check_unchanged()
        head = head_with(self._before, self._edited.changes)
        old = self._file.read(self._begin)
        if len(head) == len(old):
            if head != old:
                replace_header(self._file, old, head, durable=self._durable)
            return
        rest = self._file.identity.size - self._begin
        try:
            with AtomicFile(self._file.path, len(head) + rest, durable=self._durable) as new:
                with new.stream() as stream:
                    stream.write(head)
                new.seek(len(head))
                new.copy(self._file.descriptor, self._begin, rest)
                self._file.finish_reading()
        except OSError as error:
            raise unsaved(error) from None


def edit_file(path: str, *, force: bool, durable: bool) -> Edit:
    """Return the edit of a single file; see `edit`."""
    file = Locked(resolved(path, force=force))
    try:
        head = file.read(min(4, file.identity.size))
        kind = GgufEdit if head == b"GGUF" else SafetensorsEdit
        return kind(path, file, durable=durable)
    except BaseException:
        file.close()
        raise
