"""Save tensors: all at once, in the background if requested, or one at a time, in the memory of a single tensor."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate, count
from operator import index
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from ..core import dtypes
from ..core.arrays import Array, check_mapping
from ..core.atomic_file import AtomicFile, write_pieces
from ..core.described import pack, texts_with
from ..core.files import caching
from ..core.memory import ALIGNMENT, Cache, aligned_bytes
from ..core.native import address_of, ffi
from ..core.packing import CONFIG_KEY, KEY
from ..core.quantized_tensor import QuantizedTensor
from ..core.safetensors import ROOM, FileWriter, Header, TensorToWrite, source_of, text
from ..core.text import error_about, listed, show
from ..errors import SafetensorError, UnsupportedError, exported, public, unsaved
from ..formats.folder import INDEX, SINGLE
from .destinations import FileSink, SaveDestination, index_text, limit_of, target_of, write_tensors
from .sink import Sink, free_names

# The tensors of a save.
Saved: TypeAlias = Mapping[str, Any] | Iterable[tuple[str, Any]]

# Smallest block of the buffer.
_BLOCK = 16 << 20
# The key of the header for metadata, which cannot name a tensor.
_RESERVED = "__metadata__"
# First byte of the tensors in a file with an unknown number of them.
_BEGIN = 128 << 10
# Files with at most this many bytes of tensors are written again with a header of the right size.
_SMALL = 16 << 20
# Small tensors are written together, in about this many bytes.
_TOGETHER = 1 << 20


# ---- all at once ----


@public
def save(
    tensors: Saved,
    dst: SaveDestination,
    *,
    background: bool = False,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    durable: bool = True,
    cache: Cache = "keep",
    storage_options: Mapping[str, Any] | None = None,
) -> Future[None] | None:
    """Save tensors as a safetensors file or a folder of shards.

    Args:
        tensors: a dict of arrays, or an iterable of ``(name, array)`` such as a generator, which takes the memory of a
            single tensor. See `Writer.add` for the kinds of arrays.
        dst: a path, folder, URL or binary file object, see `Writer`. A file object that cannot seek needs a dict.
        background: True returns as soon as the tensors are copied into a buffer: the arrays may then change, and
            another thread writes the file. The buffer stays allocated for the next save, which waits until it is free.
            The interpreter waits for pending saves before it exits.
        metadata: str to str, for the header.
        max_shard_size: see `Writer`.
        overwrite: False to raise FileExistsError if the destination exists.
        durable: False to skip the fsync of a file.
        cache: "drop" waits for the disk, also without ``durable``, and leaves few pages of the files in the system's
            page cache, see `load`.
        storage_options: options of the filesystem behind a URL, see `open`.

    Returns:
        None; with ``background``, a future. You should call its ``result()``, which waits for the file, because nothing
        else reports an error.

    Raises:
        FileExistsError: ``dst`` exists and ``overwrite`` is not set.
        TypeError: a value is not an array, a name is not a str, or metadata is not text.
        ValueError: an iterable has a name twice; or the suffix belongs to another format.
        SafetensorError: the format lacks a dtype or cannot store a name.
        OSError: the file cannot be written. Also a SafetensorError.

    Example:
        >>> import numpy as np, safeload
        >>> saved = safeload.save({"w": np.ones((2, 2), np.float32)}, "w.safetensors", background=True)
        >>> saved.result()
        >>> safeload.load("w.safetensors")["w"].sum()
        np.float32(4.0)
    """
    options: dict[str, Any] = {"overwrite": overwrite, "durable": durable, "storage_options": storage_options}
    if not background and isinstance(tensors, Iterable) and not _is_mapping(tensors):
        with Writer(dst, metadata=metadata, max_shard_size=max_shard_size, cache=cache, **options) as writer:
            for item in tensors:
                writer.add(*_pair(item))
                del item  # the generator may reuse its memory
        return None
    target, texts = target_of(dst, max_shard_size, **options), checked_metadata(metadata)
    limit, written = limit_of(max_shard_size), caching(cache)(write_tensors)
    write = partial(written, target, metadata=texts, limit=limit, overwrite=overwrite)
    if background:
        return _in_background(tensors, target, texts, write)
    keep: list[Any] = []
    write({check_name(name): value_of(name, value, keep) for name, value in _items(tensors)})
    return None


def _is_mapping(tensors: Any) -> bool:
    return hasattr(tensors, "keys") and hasattr(tensors, "__getitem__")


def _items(tensors: Any) -> Iterable[tuple[Any, Any]]:
    if _is_mapping(tensors):
        names = tensors.keys()
        return ((name, tensors[name]) for name in names)
    if not isinstance(tensors, Iterable):
        raise TypeError(f"tensors must be a dict or an iterable of (name, array), got {type(tensors).__name__}")
    return map(_pair, tensors)


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise TypeError(f"tensors must be a dict, or give (name, array), got {show(type(item).__name__)}")
    return item[0], item[1]


# ---- in the background ----


class SaveFuture(Future):  # type: ignore[type-arg]
    """A pending save. A forked child cannot wait for its parent's saves."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def result(self, timeout: float | None = None) -> Any:
        self._check_process()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check_process()
        return super().exception(timeout)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError("the save belongs to the parent process, which completes it")


class _Buffer:
    """Memory for copies of tensors, which grows and is reused by a save at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._blocks: list[Array] = []  # in use
        self._free: list[Array] = []
        self._used = 0  # bytes of the last block

    def reset(self) -> None:
        """Reuse all memory, and release blocks that the last save has not used."""
        self._blocks, self._free, self._used = [], self._blocks[::-1], 0

    def take(self, nbytes: int) -> Array:
        while not self._blocks or self._used + nbytes > self._blocks[-1].size:
            block = self._free.pop() if self._free else aligned_bytes(max(_BLOCK, nbytes))
            if block.size >= nbytes:  # else it is released
                self._blocks.append(block)
                self._used = 0
        begin = self._used
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._blocks[-1][begin : begin + nbytes]

    def copy(self, name: str, value: Any) -> Any:
        """Return a copy of a value, of the same kind to the writer."""
        if isinstance(value, QuantizedTensor):
            if value.packing is not None:
                arrays = {role: self._copy_array(array) for role, array in value.roles.items()}
                return QuantizedTensor.of_parts(value.packing, value.names, arrays)
            scale = None if value.scale is None else self._copy_array(value.scale)
            return QuantizedTensor(value.scheme, value.shape, self._copy_array(value.data), scale, value.axis)
        source = source_of(name, value)
        memory = self.take(source.nbytes)
        begin = at = address_of(memory) if source.nbytes else 0
        for _owner, address, size, _streamed in source.pieces():
            ffi.memmove(ffi.cast("char *", at), ffi.cast("char *", address), size)
            at += size
        return TensorToWrite(source.row, source.shape, source.nbytes, None, begin)

    def _copy_array(self, array: Array) -> Array:
        copy: Array = self.take(array.nbytes).view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return copy


# By process: when a child is forked, a save of its parent may be pending.
_buffers: dict[int, _Buffer] = {}


def _in_background(
    tensors: Saved,
    target: FileSink | Sink,
    metadata: Mapping[str, str] | None,
    write: Callable[[Mapping[str, Any]], None],
) -> Future[None]:
    """Copy the tensors into the buffer, and write them in a thread that ends with the save."""
    buffer = _buffers.setdefault(os.getpid(), _Buffer())
    with ExitStack() as stack:
        stack.enter_context(buffer.lock)
        buffer.reset()
        copies: dict[str, Any] = {}
        for name, value in _items(tensors):
            if check_name(name) in copies:
                raise ValueError(f"tensor {show(name)} occurs twice")
            keep: list[Any] = []
            copies[name] = buffer.copy(name, value_of(name, value, keep))
        if isinstance(target, FileSink):
            FileWriter(*pack(copies, metadata))  # refuses what cannot be written
        future = SaveFuture()
        future.set_running_or_notify_cancel()
        locked = stack.pop_all()  # until the save ends

    def run() -> None:
        try:
            with locked:
                write(copies)
        except BaseException as error:  # the future raises it
            future.set_exception(error)
        else:
            future.set_result(None)

    with suppress(RuntimeError):  # no more threads
        if threading.main_thread().is_alive():  # an exiting interpreter waits for no more threads
            threading.Thread(target=run, name="safeload-save").start()  # not a daemon: the interpreter waits for it
            return future
    run()
    return future


# ---- one at a time ----


@exported()
class Writer:
    """Write a safetensors file or folder while its tensors are produced, in the memory of a single tensor.

    Leaving the ``with`` block puts the file in place. After an exception there is no file, and an old file is
    unchanged. Arrays that share memory are written once for each name. You should use a `Writer` from a single thread.

    Without ``tensors``, tensors are written in the order of arrival, and the header last, into room that was kept for
    it. Small files, files of more than about a thousand tensors, and files in which a tensor would not be aligned are
    therefore copied once, on the disk. 4 KiB after the header stay free for `safeload.edit`.

    Args:
        dst: a path or URL of a ".safetensors" file; a folder (an existing folder, a path without suffix or with a final
            slash, or any path with ``max_shard_size``), which gets shards and an index; or a file object opened for
            writing in binary mode. For a URL and, without ``tensors``, for a file object, a file is first completed in
            TMPDIR.
        metadata: str to str, for the header of each file.
        tensors: ``{name: (dtype, shape)}`` of all tensors. With it a file is written once, in any order of tensors. A
            file object or pipe that cannot seek needs it, and tensors should then come in this order.
        max_shard_size: bytes, or text such as "500MB"; the default for folders is "5GB". A store cannot rename, so
            names of shards lack the total number of shards, unless a single shard is enough.
        overwrite: False to raise FileExistsError if the destination exists.
        durable: False to skip the fsync of a file.
        cache: "drop" leaves few pages of the files in the system's page cache, see `save`.
        storage_options: options of the filesystem behind a URL, see `open`.

    Raises:
        FileExistsError: ``dst`` exists and ``overwrite`` is not set.
        ValueError: the suffix belongs to another format; or a file object cannot seek and there is no ``tensors``.
        TypeError: metadata is not text, or ``dst`` is not a path.
        UnsupportedError: the store is read-only.

    Example:
        >>> import numpy as np, safeload
        >>> with safeload.Writer("layers.safetensors", metadata={"format": "pt"}) as writer:
        ...     for k in range(3):
        ...         writer.add(f"layers.{k}.weight", np.full((2, 2), k, np.float32))
        >>> len(safeload.load("layers.safetensors"))
        3
    """

    @public
    def __init__(
        self,
        dst: SaveDestination,
        *,
        metadata: Mapping[str, str] | None = None,
        tensors: Mapping[str, tuple[Any, Sequence[int]]] | None = None,
        max_shard_size: int | str | None = None,
        overwrite: bool = False,
        durable: bool = True,
        cache: Cache = "keep",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._metadata = checked_metadata(metadata)
        self._declared = None if tensors is None else _declared(tensors)
        self._missing = dict.fromkeys(self._declared or ())  # declared tensors that have not come
        self._target = target_of(
            dst, max_shard_size, overwrite=overwrite, durable=durable, storage_options=storage_options
        )
        self._in_order = isinstance(self._target, FileSink) and self._target.in_order
        if self._in_order and self._declared is None:
            raise ValueError("the destination cannot seek: pass tensors={name: (dtype, shape)} with all its tensors")
        self._limit, self._overwrite = limit_of(max_shard_size), overwrite
        self._cache: Cache = cache
        self._stack = ExitStack()
        self._names: set[str] = set()
        self._file: _Spool | None = None  # open
        self._shards: list[_Spool] = []  # complete, without names
        self._weight_map: dict[str, str] = {}  # of the shards that have names
        self._nbytes = 0  # of complete shards
        self._state = "open"

    @public
    def add(self, name: str, array: Any) -> None:
        """Write a tensor. The array may change once this returns.

        Args:
            name: of the tensor.
            array: a NumPy array, torch tensor (dense, on any device), JAX array or `QuantizedTensor`.

        Raises:
            ValueError: a tensor with this name was added before; the tensor does not match ``tensors``; or the writer
                is closed.
            TypeError: not an array, or the name is not a str.
            SafetensorError: the format lacks the dtype or cannot store the name.
            UnsupportedError: the tensor is quantized, and ``tensors`` was passed.
            OSError: the file cannot be written. Also a SafetensorError.
        """
        if self._state != "open":
            raise ValueError(f"the writer is {self._state}")
        if check_name(name) in self._names:
            raise ValueError(f"tensor {show(name)} was added before")
        keep: list[Any] = []
        value = value_of(name, array, keep)
        parts: Mapping[str, Any] = {name: value}
        texts = None
        if isinstance(value, QuantizedTensor):
            if self._declared is not None:
                text = "is quantized, which Writer supports only without tensors="
                raise error_about(UnsupportedError, text, tensor=name)
            parts, texts = pack(parts, None, in_folder=not isinstance(self._target, FileSink))
        try:
            sources = {part: source_of(part, plain) for part, plain in parts.items()}
            for part in sources:
                if part in self._names:
                    raise ValueError(f"tensor {show(part)} was added before; it also stores a part of {show(name)}")
            with caching(self._cache):
                spool = self._spool(sum(source.nbytes for source in sources.values()))
            for part, source in sources.items():
                self._put(spool, part, source, alone=len(sources) == 1)
            if texts is not None:
                spool.describe(texts)
        except OSError as error:
            raise unsaved(error) from None

    def _put(self, spool: _Spool, name: str, source: TensorToWrite, *, alone: bool) -> None:
        try:
            if self._declared is not None:
                if name not in self._declared:
                    raise ValueError(f"tensor {show(name)} is not in tensors=")
                row, shape = self._declared[name]
                if (row.number, tuple(shape)) != (source.row.number, tuple(source.shape)):
                    came, said = f"{source.row.code} {show(list(source.shape))}", f"{row.code} {show(list(shape))}"
                    raise ValueError(f"tensor {show(name)} is {came}, but tensors= has {said}")
                expected = next(iter(self._missing), None)
                if self._in_order and name != expected:
                    text = f"the file cannot seek, so tensors come in the order of tensors=: expected {show(expected)}"
                    raise ValueError(f"{text}, got {show(name)}")
            spool.add(name, source)
        except BaseException:
            # Bytes of an unfinished tensor are in the way if the file cannot seek, and parts belong together.
            if self._in_order or not alone:
                self._state = "broken by an earlier error"
            raise
        self._missing.pop(name, None)
        self._names.add(name)

    def _spool(self, nbytes: int = 0) -> _Spool:
        """Return the file for more tensors: a new one at first, and when a shard has no space for so many bytes."""
        target, spool = self._target, self._file
        if isinstance(target, FileSink):
            if spool is None:
                header = size = None
                if self._declared is not None:
                    numbers = bytes(row.number for row, _ in self._declared.values())
                    shapes, order = [shape for _, shape in self._declared.values()], target.in_order
                    header = Header([*self._declared], numbers, shapes, self._metadata, keeps_order=order, room=ROOM)
                    size = int(header.nbytes + header.sizes.sum())
                spool = _Spool(self._stack.enter_context(target.open(size)), header, self._declared or ())
        elif spool is None or (spool.names and spool.nbytes + nbytes > self._limit):
            if spool is None:
                self._stack.enter_context(target.begin(overwrite=self._overwrite))
            else:
                self._complete_shard(spool, target)
            spool = _Spool(target.new(f"model-{len(self._shards) + 1:05}.safetensors", 0))
        self._file = spool
        return spool

    def _complete_shard(self, spool: _Spool, sink: Sink, *, last: bool = False) -> list[str]:
        """Complete a shard, and put all shards with known names in the folder; return these names."""
        spool.complete(self._metadata)
        spool.file.seal()
        self._shards.append(spool)
        self._nbytes += spool.nbytes
        if last and not self._weight_map:
            total = len(self._shards)
            usual = [f"model-{k + 1:05}-of-{total:05}.safetensors" for k in range(total)] if total > 1 else [SINGLE]
            names = [*free_names(sink, usual).values()]
        elif sink.location.files.remote:  # uploaded at once, when the number of shards is unknown
            taken = sink.names()
            names = [next(name for k in count(1) if (name := f"model-{k:05}.safetensors") not in taken)]
        else:
            return []
        for shard, name in zip(self._shards, names, strict=True):
            sink.add(name, shard.file)
            self._weight_map.update(dict.fromkeys(shard.names, name))
        self._shards = []
        return names

    @public
    def close(self) -> None:
        """Complete the file and put it in place; the end of a ``with`` block does this.

        Raises:
            ValueError: declared tensors are missing.
            SafetensorError: the header is too large.
            OSError: the file cannot be written. Also a SafetensorError.
        """
        if self._state == "closed":
            return
        if self._state != "open":
            raise ValueError(f"the writer is {self._state}")
        self._state = "closed"
        try:
            with caching(self._cache), self._stack:
                if self._missing:
                    names = listed(map(show, self._missing), 1)
                    text = f"the file is incomplete: tensors= declares {names}; add every tensor before the end"
                    raise ValueError(text)
                spool = self._spool()
                if isinstance(self._target, FileSink):
                    spool.complete(self._metadata)
                else:
                    single = self._complete_shard(spool, self._target, last=True) == [SINGLE]
                    index = {} if single else {INDEX: index_text(self._weight_map, self._nbytes)}
                    self._target.commit(index)
                    if self._overwrite:
                        self._target.clear_records()
        except OSError as error:
            raise unsaved(error) from None

    def __enter__(self) -> Writer:
        if self._state != "open":
            raise ValueError(f"the writer is {self._state}")
        return self

    @public
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._state != "closed":
            self._state = "closed"
            self._stack.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<Writer {self._state}, {len(self._names)} tensors>"


def value_of(name: str, value: Any, keep: list[Any]) -> Any:
    """Return the writer's input for a tensor; ``keep`` receives objects that must live until the value is written."""
    if isinstance(value, (np.ndarray, np.generic, QuantizedTensor)):
        return value
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(value, torch.Tensor):
        from ..frameworks import torch_arrays

        return torch_arrays.value_of(name, value, keep)
    if jax is not None and (isinstance(value, jax.Array) or hasattr(value, "__jax_array__")):
        from ..frameworks import jax_arrays

        return jax_arrays.value_of(name, value)
    return value  # the writer explains what it expects


def check_name(name: Any) -> str:
    """Check that a tensor can have this name, and return it."""
    text(name, "a tensor name", tensor=name if isinstance(name, str) else None)
    if name == _RESERVED:
        raise error_about(SafetensorError, ": this name is reserved for the metadata of safetensors", tensor=name)
    return str(name)


def checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return metadata with text only."""
    if metadata is None:
        return None
    check_mapping(metadata, "metadata", "str to str")
    return {text(key, "a metadata key"): text(value, f"metadata {show(key)}") for key, value in dict(metadata).items()}


def _declared(tensors: Mapping[str, tuple[Any, Sequence[int]]]) -> dict[str, tuple[dtypes.Dtype, tuple[int, ...]]]:
    check_mapping(tensors, "tensors", "names to (dtype, shape)")
    declared = {}
    for name in tensors:
        pair = tensors[check_name(name)]
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"tensors: {show(name)} must be (dtype, shape), got {show(pair)}")
        row, must = dtypes.parse(pair[0]), f"tensors: the shape of {show(name)} must"
        try:
            sizes = tuple(map(index, pair[1]))
        except TypeError:
            raise TypeError(f"{must} be a list of integers, got {show(pair[1])}") from None
        if not all(0 <= size < 1 << 63 for size in sizes):
            raise ValueError(f"{must} have sizes in [0, 2**63), got {show(list(sizes))}")
        declared[name] = row, sizes
    return declared


class _Spool:
    """A safetensors file with its tensors in order of arrival and its header written last, unless it is declared."""

    def __init__(
        self,
        file: Any,  # an `AtomicFile`, or an `ObjectFile` for a declared header
        header: Header | None = None,  # of all tensors; None if they are unknown
        names: Iterable[str] = (),  # of the tensors of ``header``
    ) -> None:
        self.file = file
        self.nbytes = 0  # of all tensors
        self.names: list[str] = []
        self._numbers = bytearray()
        self._shapes: list[Sequence[int]] = []
        self._begins: list[int] = []
        self._small, self._small_begin = bytearray(), 0  # small neighbours that wait, and their position
        self._described: dict[str, Any] = {}  # the quantized tensors
        self._config: str | None = None  # the quantization of packed tensors
        self._places: dict[str, int] | None = None
        if header is not None:
            file.write([(header.address, header.nbytes)])
            listed, order = [*names], header.order
            begins = accumulate(header.sizes[order].tolist(), initial=header.nbytes)
            self._places = {listed[k]: begin for k, begin in zip(order.tolist(), begins, strict=False)}

    def add(self, name: str, source: TensorToWrite) -> None:
        """Write a tensor, now or with a later call. After an error, the next tensor can take its place."""
        position = _BEGIN + self.nbytes if self._places is None else self._places[name]
        if not source.small or position != self._small_begin + len(self._small):
            self._flush()
            self._small_begin = position
        if source.small:
            for _owner, address, size, _streamed in source.pieces():
                self._small += ffi.buffer(ffi.cast("char *", address), size)
            if len(self._small) >= _TOGETHER:
                self._flush()
        else:
            self.file.seek(position)
            write_pieces(self.file, source.pieces())
            self._small_begin += source.nbytes
        self.names.append(name)
        self._numbers.append(source.row.number)
        self._shapes.append(source.shape)
        self._begins.append(self.nbytes)
        self.nbytes += source.nbytes

    def _flush(self) -> None:
        if self._small:
            small = np.frombuffer(bytes(self._small), np.uint8)
            self.file.seek(self._small_begin)
            self.file.write([(address_of(small), small.size)])
            self._small_begin += small.size
            self._small = bytearray()

    def describe(self, texts: Mapping[str, str]) -> None:
        """Add the description of a quantized tensor, as `pack` returns it."""
        config = texts.get(CONFIG_KEY)
        if config is not None and self._config not in (None, config):
            raise SafetensorError("the packed tensors come from checkpoints with different configurations")
        self._config = config or self._config
        self._described.update(json.loads(texts[KEY]))

    def complete(self, metadata: Mapping[str, str] | None) -> None:
        """Write the header. The tensors move if it does not fit before them, or if some are not aligned."""
        self._flush()
        if self._places is not None:
            return
        places = zip(self._begins, map(dtypes.array_dtype, self._numbers), strict=True)
        keeps_order = self.nbytes > _SMALL and all(begin % dtype.alignment == 0 for begin, dtype in places)
        texts = texts_with(metadata, self._described, self._config)
        header = Header(self.names, bytes(self._numbers), self._shapes, texts, keeps_order=keeps_order)
        if keeps_order and header.nbytes + ROOM <= _BEGIN:
            header.pad_to(_BEGIN)
            self.file.seek(0)
            self.file.write([(header.address, header.nbytes)])
            self.file.truncate(header.nbytes + self.nbytes)  # a tensor that failed may have been the last
        else:
            header.pad_to(header.nbytes + ROOM)
            self._move(header)

    def _move(self, header: Header) -> None:
        """Copy the tensors behind a header into another file, in the header's order."""
        file = AtomicFile(self.file.path, header.nbytes + self.nbytes, durable=False)
        try:
            file.write([(header.address, header.nbytes)])
            sizes = header.sizes.tolist()
            file.copy(self.file.descriptor, ((_BEGIN + self._begins[k], sizes[k]) for k in header.order.tolist()))
            self.file.exchange(file)
        finally:
            file.abandon()
