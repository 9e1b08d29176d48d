"""Edit metadata and tensors of a file, or of a folder of shards with an index."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import chain, count, groupby
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from ..conversion.save import check_name, value_of
from ..conversion.sink import Sink, free_names, remove_killed
from ..core import dtypes
from ..core.atomic_file import AtomicFile, Swap, remove_abandoned, write_pieces
from ..core.described import CODES_SUFFIX, QUANTIZED, SCALE_SUFFIX
from ..core.files import BLOCK, LOCAL, read_json
from ..core.native import address_of, ffi
from ..core.packing import KEY
from ..core.safetensors import ROOM, Header, TensorToWrite, open_file, source_of, text
from ..core.text import PathLike, error_about, native_path, show
from ..core.weight_file import open_without_table
from ..errors import FormatError, TensorNotFoundError, UnsupportedError, exported, public, unsaved
from ..formats import gguf
from ..formats.folder import INDEX, SINGLE, parse_index
from ..formats.numbered import PART
from ..remote import url as urls
from ..remote.hub_cache import place_in_cache
from .edit_journal import Locked, recover, remove, replace_header

_LENGTH = 8


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
        keys = dict.fromkeys([*self._values, *self.changes])
        return (key for key in keys if self.changes.get(key, self) is not None)

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

    metadata: MutableMapping[str, Any]

    _stack: ExitStack  # closes the files
    _tensors: dict[str, Any]  # the place of each tensor
    _moved = _renamed = False  # True if tensors are added or removed, and renamed

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
            self._renamed = True

    @public
    def __delitem__(self, name: str) -> None:
        """Remove a tensor; see `rename` for errors."""
        self._check(name)
        self._remove(name)
        self._moved = True

    @public
    def __setitem__(self, name: str, array: Any) -> None:
        """Add or replace a tensor by an array, which must not change before the end of the block.

        Raises:
            TypeError, SafetensorError: see `Writer.add`.
        """
        self._check(name, new=name not in self)
        self._put(name, array)
        self._moved = True

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

    def _put(self, name: str, array: Any) -> None:
        raise NotImplementedError

    @abstractmethod
    def _write(self) -> None:
        """Write the changes."""

    def __enter__(self) -> Edit:
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
        self._places = count(len(self._tensors))  # of new tensors
        length = int.from_bytes(file.head(_LENGTH), "little")
        if not 0 < length <= file.identity.size - _LENGTH:
            raise FormatError("the header changed while it was read", path, 0)
        self._old = file.head(_LENGTH + length)
        self._new: bytes | None = None  # the header that replaced the old header
        self._keep: list[Any] = []

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _ in self._in_order()])

    def _in_order(self) -> list[tuple[str, _Stored | TensorToWrite]]:
        return [(name, tensor) for name, (_place, tensor) in sorted(self._tensors.items(), key=lambda item: item[1][0])]

    def _check(self, name: str, *, new: bool = False) -> None:
        super()._check(name, new=new)
        if not new and name in self._parts:
            text = "is a part of a quantized tensor; convert the file to change it"
            raise UnsupportedError(f"{self.path}: {show(name)} {text}")

    def _put(self, name: str, array: Any) -> None:
        value = value_of(name, array, self._keep)
        if isinstance(value, QUANTIZED):
            raise error_about(UnsupportedError, "is quantized; convert the file to add it", tensor=name)
        place = self._tensors[name][0] if name in self else next(self._places)
        self._tensors[name] = place, source_of(name, value)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _place, tensor in self._tensors.values())

    @property
    def in_place(self) -> bool:
        """True if only metadata changes, and the new header fits in place of the old."""
        return not self._renamed and self._fitting() is not None

    def _header(self) -> Header:
        metadata, items = dict(self.metadata), self._in_order()
        names, numbers = [name for name, _ in items], bytes(tensor.row.number for _, tensor in items)
        texts = None if self._before is None and not metadata else metadata
        return Header(names, numbers, [tensor.shape for _, tensor in items], texts, keeps_order=not self._moved)

    def _fitting(self) -> bytes | None:
        """Return the header to write in place: the old header if nothing changes, None if none fits."""
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
        """Put the old header back if another was written in its place."""
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
            ordered: Iterator[Any] = map(tensors.__getitem__, header.order.tolist())
            for kind, group in groupby(ordered, type):
                if kind is _Stored:
                    file.copy(self._file.fileno(), ((stored.begin, stored.nbytes) for stored in group))
                else:
                    write_pieces(file, chain.from_iterable(tensor.pieces() for tensor in group))
            self._file.finish_reading()


def _parts_of(metadata: Mapping[str, str]) -> set[str]:
    """Return the names of the tensors that quantized tensors consist of."""
    try:
        return {
            part
            for name, entry in json.loads(metadata.get(KEY, "{}")).items()
            for part in (name, name + SCALE_SUFFIX, name + CODES_SUFFIX, *(entry.get("parts") or {}).values())
        }
    except (ValueError, RecursionError, AttributeError, TypeError):
        raise UnsupportedError(f"the metadata {KEY} cannot be understood, so the file cannot be edited") from None


class GgufEdit(Edit):
    """An edit of the metadata of a GGUF file."""

    def __init__(self, path: str, file: Locked, *, durable: bool) -> None:
        with closing(open_without_table(file.path)) as opened:
            table = gguf.read_table(opened)
        self._tensors = dict.fromkeys(table.names)
        self._before = table.metadata()
        super().__init__(path, self._before, texts=False)
        self._file, self._durable = file, durable

    def _check(self, name: str, *, new: bool = False) -> None:
        raise UnsupportedError(f"{self.path}: only the metadata of a GGUF file can be edited; convert it instead")

    def _write(self) -> None:
        if not self._edited.changes:
            return
        self._file.check_unchanged()
        size = self._file.identity.size
        begin = min(self._before.data_begin, size) if self._before.tensor_count else size
        old, new = self._file.head(begin), self._before.head_with(self._edited.changes)
        if len(new) != len(old):
            head = np.frombuffer(new, np.uint8)
            with AtomicFile(self._file.path, len(new) + size - begin, durable=self._durable) as file:
                file.write([(address_of(head), head.size)])
                file.copy(self._file.fileno(), [(begin, size - begin)])
                self._file.finish_reading()
        elif new != old:
            replace_header(self._file, old, new, durable=self._durable)


class _FolderEdit(Edit):
    """An edit of the shards of an index."""

    _tensors: dict[str, str]  # the shard of each tensor

    def __init__(self, index: str, *, force: bool, durable: bool) -> None:
        self._real = resolved(index, force=True)  # a new file replaces it
        self._content = read_json(self._real, "an index")
        parse_index(self._content, index, LOCAL)
        self._tensors = dict(self._content["weight_map"])
        self._shards: dict[str, SafetensorsEdit] = {}
        with ExitStack() as stack:
            for file in dict.fromkeys(self._tensors.values()):
                shard = edit_file(os.path.join(os.path.dirname(self._real), file), force=force, durable=durable)
                stack.enter_context(shard._stack)
                if not isinstance(shard, SafetensorsEdit):
                    raise UnsupportedError(f"{shard.path}: only folders of safetensors shards can be edited")
                self._shards[file] = shard
            for name, file in self._tensors.items():
                if name not in self._shards[file]:
                    raise FormatError(f"the index names tensor {show(name)} in {file}, which does not have it", index)
            self._stack = stack.pop_all()
        super().__init__(index, next((dict(shard.metadata) for shard in self._shards.values()), {}))

    def _rename(self, old: str, new: str) -> None:
        self._shards[self._tensors[old]].rename(old, new)
        super()._rename(old, new)

    def _remove(self, name: str) -> None:
        del self._shards[self._tensors[name]][name]
        super()._remove(name)

    def _put(self, name: str, array: Any) -> None:
        if not self._shards:
            raise UnsupportedError(f"{self.path} names no shard that could get a tensor")
        file = self._tensors.get(name) or next(reversed(self._shards))
        self._shards[file][name] = array
        self._tensors[name] = file

    def _write(self) -> None:
        for shard in self._shards.values():
            changes = self._edited.changes.items()
            shard._edited.changes.update((key, to) for key, to in changes if to is not None or key in shard.metadata)
        replaced = {file: shard for file, shard in self._shards.items() if not shard.in_place}
        folder = os.path.dirname(self._real)
        numbers = "-00001-of-00001"  # of a shard without numbers
        numbered = [file if PART.fullmatch(file) else numbers.join(os.path.splitext(file)) for file in replaced]
        free = free_names(Sink(LOCAL, folder), numbered)
        names = dict(zip(replaced, map(free.__getitem__, numbered), strict=True))
        with ExitStack() as stack:
            # If this process is killed, the temporary index names the new shards, and the hidden index the old shards.
            index = None
            if replaced:
                content = dict(self._content)
                content["weight_map"] = {name: names.get(file, file) for name, file in self._tensors.items()}
                if isinstance(content.get("metadata"), dict) and "total_size" in content["metadata"]:
                    total = sum(shard.nbytes for shard in self._shards.values())
                    content["metadata"] = {**content["metadata"], "total_size": total}
                text = (json.dumps(content, indent=2) + "\n").encode()
                index = stack.enter_context(AtomicFile(self._real, len(text)))
                with index.stream() as stream:
                    stream.write(text)
                index.seal()
            swap = stack.enter_context(Swap())
            for file, shard in replaced.items():
                if len(shard):  # a shard without tensors leaves the folder
                    path = os.path.join(folder, names[file])
                    swap.undo.append(partial(_attempt, os.unlink, path))
                    shard.write_to(path, overwrite=False)
            for file, shard in self._shards.items():
                if file not in replaced:
                    shard._write()
                    swap.undo.append(partial(_attempt, shard.undo))
            if index is not None:
                swap.put(str(index.temporary), self._real)
            finished = swap.finish([os.path.join(folder, file) for file in replaced])
            if index is not None:
                index.temporary = None  # it is in place
        if finished and replaced:
            remove_killed(Sink(LOCAL, folder))


@public
def edit(path: PathLike, *, force: bool = False, durable: bool = True) -> Edit:
    """Change metadata, names and tensors of a safetensors file or folder, or the metadata of a GGUF file.

    Changes of metadata and names are written in place if the header has enough room, as in files by `Writer`, `save`,
    `convert` and `edit`; this takes milliseconds, however large the file is. All other changes write a new file, which
    shares blocks with the old file if the system can, and rename it. In both cases there is the old content or the new
    content after a crash: if `open` reports an interrupted edit, ``safeload edit --recover FILE`` completes it. Arrays
    of an open checkpoint keep their values.

    In a folder with an index, shards with changed tensors get new names before the index names them. Metadata is
    changed in each shard.

    Args:
        path: a ".safetensors" or ".gguf" file, a folder, or an index. Symbolic links are followed, but not into the
            cache of the Hugging Face Hub.
        force: True to edit a file that has several hard links. An edit in place then changes the file behind all links;
            a new file replaces only this link.
        durable: False to skip the fsync of files.

    Returns:
        An edit, for a ``with`` statement: ``file.metadata``, ``file.rename(old, new)``, ``del file[name]``,
        ``file[name] = array``.

    Raises:
        FormatError: the file breaks its format.
        UnsupportedError: the file has another format or several hard links, or is in the Hub's cache.
        BlockingIOError: another edit of the file is in progress.
        SafeloadError: another program has changed the file by the end of the block.
        OSError: the file cannot be read or written.

    Example:
        >>> import numpy as np, safeload
        >>> safeload.save({"w": np.ones(2, np.float32)}, "edited.safetensors", metadata={"step": "1"})
        >>> with safeload.edit("edited.safetensors") as file:
        ...     file.metadata["step"] = "2"
        ...     file.rename("w", "weight")
        >>> safeload.open("edited.safetensors").metadata, list(safeload.open("edited.safetensors"))
        ({'step': '2'}, ['weight'])
    """
    text = _local_path(path)
    if os.path.isdir(text):
        file = next((name for name in (SINGLE, INDEX) if os.path.isfile(os.path.join(text, name))), None)
        if file is None:
            raise UnsupportedError(f"{text}: a folder needs {INDEX} or {SINGLE} to be edited; pass the path of a file")
        text = os.path.join(text, file)
    if text.endswith(".index.json"):
        return _FolderEdit(text, force=force, durable=durable)
    return edit_file(text, force=force, durable=durable)


def _local_path(path: PathLike) -> str:
    """Return a path of this machine."""
    text = native_path(path)[0]
    if urls.is_url(text):
        raise UnsupportedError(f"{urls.shown(text)}: only files on this machine can be edited")
    return text


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
    if place_in_cache(path) is not None or place_in_cache(real) is not None:  # several snapshots can share a file
        text = "is in the cache of the Hugging Face Hub, which other programs share: copy the file and edit the copy"
        raise UnsupportedError(f"{path} {text}")
    links = os.stat(real).st_nlink
    if links > 1 and not force:
        raise UnsupportedError(f"{path} has {links} hard links, and an edit may change all of them; pass force=True")
    return real


def _attempt(step: Callable[..., object], *arguments: Any) -> None:
    """Take a step back; the first error tells more, and `open` says if a header must be recovered."""
    with suppress(OSError):
        step(*arguments)


def recover_edit(path: PathLike) -> str:
    """Complete an interrupted edit of a file, or of the shards of a folder or index, and remove temporary files."""
    # "nothing" if no edit was interrupted, "old" if a file has its old header again, else "new".
    text = _local_path(path)
    folder = text if os.path.isdir(text) else os.path.dirname(text) if text.endswith(".index.json") else None
    if folder is None:
        return _recover_file(text)
    remove_abandoned(folder or ".", [INDEX])
    shards = sorted(name for name in os.listdir(folder or ".") if name.endswith(".safetensors") and name[0] != ".")
    results = [_recover_file(os.path.join(folder, name)) for name in shards]
    return next((result for result in ("old", "new") if result in results), "nothing")


def _recover_file(path: str) -> str:
    real = resolved(path, force=True)
    with Locked(real) as file:
        result = recover(file)
        remove_abandoned(os.path.dirname(real) or ".", [os.path.basename(real)])
    return result
