"""Save tensors one at a time, in the memory of a single tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...base import dtypes
from ...base.arrays import check_mapping
from ...base.messages import error_about
from ...base.text import show
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...errors import UnsupportedError, exported, public, unsaved
from ...formats.folder import INDEX, SINGLE
from ...formats.safetensors.file import TensorToWrite, source_of, text
from ..folders import journal
from ..folders.destinations import limit_of
from ..folders.shards import index_text
from ..folders.sink import Sink, free_names
from ..folders.targets import FileSink, SaveDestination, target_of
from .spool import Spool, declared_header
from .values import Packer, check_name, value_of

if TYPE_CHECKING:
    from typing_extensions import Self


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
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._metadata = checked_metadata(metadata)
        self._declared = None if tensors is None else _declared(tensors)
        self._missing = dict.fromkeys(self._declared or ())  # declared tensors that have not come
        self._target = target_of(
            dst, max_shard_size, overwrite=overwrite, durable=durable, storage_options=storage_options
        )
        self._in_folder = not isinstance(self._target, FileSink)
        self._in_order = isinstance(self._target, FileSink) and self._target.in_order
        if self._in_order and self._declared is None:
            raise ValueError("the destination cannot seek: pass tensors={name: (dtype, shape)} with all its tensors")
        self._limit, self._overwrite = limit_of(max_shard_size), overwrite
        self._packer = Packer(self._metadata, in_folder=self._in_folder)
        self._stack = ExitStack()
        self._names: set[str] = set()
        self._file: Spool | None = None  # open
        self._shards: list[Spool] = []  # complete
        self._weight_map: dict[str, str] = {}  # of the shards that have names
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
        self._checked_add(name, array)

    def _checked_add(self, name: str, array: Any) -> None:
        if self._state != "open":
            raise ValueError(f"the writer is {self._state}")
        if check_name(name) in self._names:
            raise ValueError(f"tensor {show(name)} was added before")
        keep: list[Any] = []
        value = value_of(name, array, keep)
        if self._declared is not None and isinstance(value, QuantizedTensor):
            raise error_about(
                UnsupportedError, "is quantized, which Writer supports only without tensors=", tensor=name
            )
        try:
            self._add(name, value)
        except OSError as error:
            raise unsaved(error) from None

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, QuantizedTensor):
            packer = Packer(None, in_folder=self._in_folder)
            sources = {part: source_of(part, plain) for part, plain in packer.parts(name, value).items()}
        else:
            sources = {name: source_of(name, value)}
        for part in sources:
            if part in self._names:
                raise ValueError(f"tensor {show(part)} was added before; it also stores a part of {show(name)}")
        self._put(self._spool(sum(source.nbytes for source in sources.values())), sources)
        if isinstance(value, QuantizedTensor):
            self._packer.parts(name, value)

    def _put(self, spool: Spool, sources: Mapping[str, TensorToWrite]) -> None:
        for part, source in sources.items():
            try:
                if self._declared is not None:
                    self._check_declared(self._declared, part, source)
                spool.add(part, source)
            except BaseException:
                # Bytes of an unfinished tensor are in the way if the file cannot seek, and parts belong together.
                if len(sources) > 1 or self._in_order:
                    self._state = "broken by an earlier error"
                raise
            self._missing.pop(part, None)
            self._names.add(part)

    def _check_declared(self, declared: Mapping[str, tuple[dtypes.Dtype, Any]], name: str, source: Any) -> None:
        """Compare a tensor with its declaration."""
        if name not in declared:
            raise ValueError(f"tensor {show(name)} is not in tensors=")
        row, shape = declared[name]
        if (row.number, tuple(shape)) != (source.row.number, tuple(source.shape)):
            raise ValueError(
                f"tensor {show(name)} is {source.row.code} {show(list(source.shape))}, but tensors= has "
                f"{row.code} {show(list(shape))}"
            )
        expected = next(iter(self._missing), None)
        if self._in_order and name != expected:
            text = f"the file cannot seek, so tensors come in the order of tensors=: expected {show(expected)}"
            raise ValueError(f"{text}, got {show(name)}")

    def _spool(self, nbytes: int = 0) -> Spool:
        """Return the file for more tensors: a new one at first, and when a shard has no space for so many bytes."""
        target, spool = self._target, self._file
        if isinstance(target, FileSink):
            if spool is None:
                header, size = None, None
                if self._declared is not None:
                    header, size = declared_header(self._declared, self._metadata, keeps_order=target.in_order)
                spool = Spool(self._stack.enter_context(target.open(size)), header, [*(self._declared or ())])
        elif spool is None or (spool.names and spool.nbytes + nbytes > self._limit):
            if spool is None:
                self._stack.enter_context(target.begin(overwrite=self._overwrite))
            else:
                self._complete_shard(spool)
                if target.location.files.remote:
                    self._upload_shard(target)
            spool = Spool(target.new(f"model-{len(self._shards) + 1:05}.safetensors", 0))
            self._packer = Packer(self._metadata, in_folder=self._in_folder)
        self._file = spool
        return spool

    def _complete_shard(self, spool: Spool) -> None:
        spool.complete(self._packer.texts)
        spool.file.seal()
        self._shards.append(spool)

    def _upload_shard(self, sink: Sink) -> None:
        """Upload the last shard of a folder whose number of shards is unknown."""
        taken = sink.names()
        names = (f"model-{k:05}.safetensors" for k in count(1))
        self._name_shard(sink, self._shards[-1], next(name for name in names if name not in taken))

    def _name_shard(self, sink: Sink, spool: Spool, name: str) -> None:
        sink.add(name, spool.file)
        self._weight_map.update(dict.fromkeys(spool.names, name))

    def _finish_folder(self, sink: Sink) -> None:
        """Put the shards and their index in place."""
        total, names = len(self._shards), [SINGLE]
        if self._weight_map:
            self._upload_shard(sink)
        else:
            usual = [f"model-{k + 1:05}-of-{total:05}.safetensors" for k in range(total)] if total > 1 else names
            names = [*free_names(sink, usual).values()]
            for spool, name in zip(self._shards, names, strict=True):
                self._name_shard(sink, spool, name)
        index = index_text(self._weight_map, sum(spool.nbytes for spool in self._shards))
        sink.commit({} if total == 1 and names == [SINGLE] else {INDEX: index})
        if self._overwrite:
            journal.clear(sink)

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
            with self._stack:
                self._finish()
        except OSError as error:
            raise unsaved(error) from None

    def _finish(self) -> None:
        if self._missing:
            first = show(next(iter(self._missing)))
            names = f"{first} and {len(self._missing) - 1:,} more" if len(self._missing) > 1 else first
            raise ValueError(f"the file is incomplete: tensors= declares {names}; add every tensor before the end")
        spool = self._spool()
        if isinstance(self._target, FileSink):
            spool.complete(self._packer.texts)
        else:
            self._complete_shard(spool)
            self._finish_folder(self._target)

    def __enter__(self) -> Self:
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
        declared[name] = dtypes.parse(pair[0]), _shape(name, pair[1])
    return declared


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(map(index, shape))
    except TypeError:
        raise TypeError(f"tensors: the shape of {show(name)} must be a list of integers, got {show(shape)}") from None
    if not all(0 <= size < 1 << 63 for size in sizes):
        raise ValueError(f"tensors: the shape of {show(name)} must have sizes in [0, 2**63), got {show(list(sizes))}")
    return sizes
