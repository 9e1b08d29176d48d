"""Save all tensors of a dict or an iterator, in the background if requested."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, overload

import numpy as np

from ...base.arrays import Array
from ...base.native import ffi
from ...base.text import show
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.run.memory import ALIGNMENT, address_of, aligned_bytes
from ...errors import public
from ...formats.safetensors.file import FileWriter, Memory, source_of
from ...formats.safetensors.quantized import pack
from ..folders.destinations import FileSink, SaveDestination, limit_of, target_of
from ..folders.shards import write_folder
from ..folders.sink import Sink
from .writer import Writer, check_name, checked_metadata, value_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The tensors of a save.
Saved: TypeAlias = Mapping[str, Any] | Iterable[tuple[str, Any]]

# Smallest block of the buffer.
_BLOCK = 16 << 20


class SaveOptions(TypedDict, total=False):
    """Options of `save` for its overloads."""

    metadata: Mapping[str, str] | None
    max_shard_size: int | str | None
    overwrite: bool
    durable: bool
    storage_options: Mapping[str, Any] | None


@overload
def save(
    tensors: Saved, dst: SaveDestination, *, background: Literal[False] = False, **options: Unpack[SaveOptions]
) -> None: ...
@overload
def save(
    tensors: Saved, dst: SaveDestination, *, background: bool, **options: Unpack[SaveOptions]
) -> Future[None] | None: ...
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
        with Writer(dst, metadata=metadata, max_shard_size=max_shard_size, **options) as writer:
            for item in tensors:
                writer.add(*_pair(item))
                del item  # the generator may reuse its memory
        return None
    target, texts = target_of(dst, max_shard_size, **options), checked_metadata(metadata)
    limit = limit_of(max_shard_size)

    def write(values: Mapping[str, Any]) -> None:
        if isinstance(target, FileSink):
            target.write(values, texts)
        else:
            write_folder(target, values, texts, limit=limit, overwrite=overwrite)

    if background:
        return _in_background(tensors, target, texts, write)
    keep: list[Any] = []
    write({check_name(name): value_of(name, value, keep) for name, value in _items(tensors)})
    return None


def _is_mapping(tensors: Any) -> bool:
    return isinstance(tensors, Mapping) or (hasattr(tensors, "keys") and hasattr(tensors, "__getitem__"))


def _items(tensors: Any) -> Iterable[tuple[Any, Any]]:
    if _is_mapping(tensors):
        names = tensors.keys()
        return ((name, tensors[name]) for name in names)
    if not isinstance(tensors, Iterable):
        raise TypeError(f"tensors must be a dict or an iterable of (name, array), got {type(tensors).__name__}")
    return map(_pair, tensors)


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise TypeError(f"an iterable of tensors must give (name, array), got {show(type(item).__name__)}")
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
        self._blocks: list[Array] = []
        self._block = self._used = 0

    def reset(self) -> None:
        """Reuse all memory, and release blocks that the last save has not used."""
        del self._blocks[self._block + 1 :]
        self._block = self._used = 0

    def take(self, nbytes: int) -> Array:
        """Return memory for a tensor."""
        blocks = self._blocks
        while self._block < len(blocks) and self._used + nbytes > blocks[self._block].size:
            if self._used:
                self._block, self._used = self._block + 1, 0
            else:
                del blocks[self._block]  # too small for this tensor
        if self._block == len(blocks):
            blocks.append(aligned_bytes(max(_BLOCK, nbytes)))
        begin = self._used
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return blocks[self._block][begin : begin + nbytes]

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
        for _owner, address, size in source.pieces():
            ffi.memmove(ffi.cast("char *", at), ffi.cast("char *", address), size)
            at += size
        return Memory(source.row, source.shape, begin, source.nbytes)

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
    buffer.lock.acquire()
    try:
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
    except BaseException:
        buffer.lock.release()
        raise

    def run() -> None:
        try:
            try:
                write(copies)
            finally:
                buffer.lock.release()
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
