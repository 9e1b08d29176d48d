"""An open checkpoint of any format, a mapping from names to arrays; and `open` and `load`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, TypedDict, overload

from ..errors import FormatError, UnsupportedError, exported, public
from . import described, dtypes
from .arrays import Array, TensorLike
from .cast import astype
from .files import LOCAL, Access, Located, Location, caching
from .forking import cached_property
from .load import DtypeLike, LoadStats, access_of, load_tensors, parse_target
from .memory import Backend, Cache
from .names import Patterns, choose
from .opening import Paths, Seen, Verify, open_paths, pickled, reopen, seen_of
from .packing import CONFIG_KEY, KEY
from .packing import Part as StoredPart
from .progress import Progress
from .quantized_tensor import QuantizedTensor, read_index, take_rows
from .registry import (
    GGUF,
    KERAS,
    SAFETENSORS,
    TORCH_LEGACY,
    TORCH_ZIP,
    FormatName,
    Opened,
    OpenRequest,
    Recipe,
    UnknownGlobals,
    part,
    reopen_file,
)
from .runtime import paused
from .showing import ROWS, html_table, screen
from .slice import TAKE, read_slice
from .table import TensorInfo, distinct
from .tensors import FileTensor, Tensors
from .text import PathLike, debug, error_about, hidden, missing, more, plural, show, size
from .weight_file import WeightFile

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .stream import LayerStream, Order, Out, TensorStream

# Exact names of tensors; None for all.
Names: TypeAlias = Iterable[str] | None
# Indices of rows: integers, or a boolean mask.
Rows: TypeAlias = Sequence[int] | Array

__all__ = ["Checkpoint", "TensorLike", "TensorSlice", "load", "open"]

# What shows quantized tensors under their logical names: imported here, because a child forked during a later import
# would hang.
_codes, _quantization = map(part, ("codes", "quantization"))

# Formats that can come with a config.json.
_WITH_CONFIG = (SAFETENSORS, TORCH_ZIP, TORCH_LEGACY)


# ---- a tensor, read when it is indexed ----


@exported()
class TensorSlice:
    """A tensor of a file, not read yet. Basic NumPy indexing reads only the selected elements.

    Pickling stores the path of the file, as for a `Checkpoint`.

    Attributes:
        shape: of the loaded tensor.
        dtype: of the loaded tensor.

    Example:
        >>> import safeload
        >>> head = safeload.open("tiny-llama").get_slice("lm_head.weight")
        >>> head.shape, head[-2:, ::16].shape
        ((96, 64), (2, 4))
    """

    def __init__(
        self,
        read: Callable[[tuple[Any, ...]], Array],  # the elements at indices
        dtype: Any,
        shape: tuple[int, ...],
        again: Callable[[bool], Callable[[], TensorSlice]],  # makes this slice again; if True in any process
    ) -> None:
        self._read = read
        self._again = again
        self.dtype = dtype
        self.shape = shape

    @classmethod
    @public
    def _reopen(
        cls, path: str, request: tuple[Any, ...], name: str, seen: tuple[int, ...], dtype: str | None
    ) -> TensorSlice:
        options = OpenRequest(*request)
        files = reopen_file(path, seen, options).files
        file = next((file for file in files if file.table.find(name) >= 0), files[0])
        return slice_of(file, file.table.index(name), options, dtype, None)

    @public
    def __reduce__(self) -> tuple[Any, ...]:
        return self._again(True), ()

    @public
    def __copy__(self) -> TensorSlice:
        return self._again(False)()

    @public
    def __deepcopy__(self, memo: dict[int, Any]) -> TensorSlice:
        return self.__copy__()

    @public
    def __getitem__(self, index: Any) -> Array:
        return self._read(index if isinstance(index, tuple) else (index,))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<TensorSlice {self.dtype} {list(self.shape)}>"


def slice_of(file: WeightFile, index: int, request: OpenRequest, dtype: Any, checkpoint: Any) -> TensorSlice:
    """Return a lazy tensor; a packed tensor is pickled with its checkpoint, and float32 without ``dtype``."""
    file.table.refuse_unknown([index], file.path)
    name, packed, target = file.table.names[index], file.table.packed.get(index), parse_target(dtype)
    read: Callable[[tuple[Any, ...]], Array]
    if packed is not None or file.table.is_quantized(index):
        target = target or dtypes.BY_CODE["F32"]
        result = dtypes.array_dtype(target.number)
        shape = file.table.shape(index) if packed is None else packed.packing.shape
        read = partial(read_index, file, index, target=target, name=name)
        return TensorSlice(read, result, shape, lambda _: partial(checkpoint.get_slice, name, dtype=target.name))
    row = file.table.row(index)
    if target is not None and row.packed:
        text = f"is {row.code}, whose elements share bytes: load it with dtype= and slice the array"
        raise error_about(UnsupportedError, text, path=file.path, tensor=name)
    result, shape, *_ = file.table.layout(index)
    read = stored = partial(read_slice, file, index, advice=TAKE)
    if target is not None and row.floating:
        result = dtypes.array_dtype(target.number)

        def read(indices: tuple[Any, ...]) -> Array:
            return astype(stored(indices), result)

    def again(elsewhere: bool) -> Callable[[], TensorSlice]:
        file.check_open()
        place, seen = file.place, file.identity
        if elsewhere:  # another machine, where device and inode mean nothing
            place, seen = file.files.public(place), tuple(seen[:2])
        return partial(TensorSlice._reopen, place, tuple(request), name, seen, None if target is None else target.name)

    return TensorSlice(read, result, shape, again)


# ---- a checkpoint ----

# The value of a loaded tensor.
Value: TypeAlias = Array | QuantizedTensor


class LoadOptions(TypedDict, total=False):
    """Options of every function that loads; see `Checkpoint.load`."""

    only: Patterns
    drop: Patterns
    backend: Backend
    writable: bool
    out: Mapping[str, Array] | None
    threads: int | None
    progress: Progress


class StreamOptions(TypedDict, total=False):
    """Options of `Checkpoint.stream`."""

    only: Patterns
    drop: Patterns
    ahead: int | str
    order: Order
    out: Out
    threads: int | None
    progress: Progress


class TensorInfos(dict[str, TensorInfo]):
    """Descriptions of tensors by name, in a read-only dict; ``dict(infos)`` is a copy that can be changed."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("tensor descriptions are read-only")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorInfos, (dict(self),)

    def __repr__(self) -> str:
        return screen(f"<{plural(len(self), 'tensor')}>", self)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def _repr_html_(self) -> str:
        return _html(plural(len(self), "tensor"), self)


def _html(title: str, infos: Mapping[str, TensorInfo]) -> str:
    """Return a table of the first tensors for a notebook."""
    rows = [(info.name, info.dtype, str(list(info.shape)), size(info.nbytes)) for info in islice(infos.values(), ROWS)]
    return html_table(title, ("tensor", "dtype", "shape", "size"), rows, "".join(more(len(infos), ROWS)))


@exported()
class Checkpoint(Mapping[str, TensorLike]):
    """The tensors of a file or a folder, by name. `safeload.open` returns it.

    ``ckpt[name]`` is a writable copy-on-write view of the mapped file, always over the same memory, like
    ``numpy.memmap`` with mode "c": writing to it does not change the file. From a URL, an array is fetched once. Views
    stay valid after `close`. A checkpoint can be used from any thread.

    A mapping shows the file itself: if another program truncates the file in place, touching a lost page kills the
    process (SIGBUS). ``load(backend="pread")`` does not have this hazard.

    A checkpoint pickles as its absolute path or URL and the arguments of `open`. Unpickling opens it again, in any
    process, and raises FormatError if the files have changed. So does ``copy.copy``. Both raise ValueError if the
    checkpoint is closed.

    Attributes:
        format: such as "safetensors", "torch zip", "torch legacy" or "gguf"; `open` accepts it as ``format=``.
        files: paths of the files that hold the tensors.
        metadata: text from the header. For a torch checkpoint, everything but the tensors, nested; with ``root``,
            everything below it. For a GGUF file, a mapping that decodes values on access. For shards, the merged
            metadata of shards and index.
        config: parsed ``config.json`` of a folder, else None.
        index: path of the ``index.json`` if the checkpoint was opened through one, else None.
        notes: the kind of a folder (an adapter, a pipeline), and the weight files in it that were not opened.
        last_load: `LoadStats` of the last `load`, else None.
    """

    path: str  # as messages show it; internal
    weight_files: Sequence[WeightFile]  # internal
    ignored: Mapping[str, StoredPart]  # internal

    def __init__(self, opened: Opened) -> None:
        if not isinstance(opened, Opened):
            raise TypeError("a checkpoint is opened with safeload.open(path)")
        self.path, self.format, files, where, metadata, self.config, self._index, self._notes, self._recipe, _ = opened
        stored = self._recipe is not None and self._recipe.stored
        if self.format == SAFETENSORS and not stored:
            if where is not None or KEY in metadata:
                with paused(sum(file.table.count for file in files)):
                    where = described.unpack_all(files, where)
            metadata = {key: value for key, value in metadata.items() if key not in (KEY, CONFIG_KEY)}
        self._hidden: Mapping[str, str] = {}
        self.ignored = {}
        self._refused: Mapping[str, str] = {}
        self._quantization: Any = None
        # For a quantization in the config, in the files and beside the files.
        self._searched = (
            not stored and self.format in (SAFETENSORS, GGUF) and any(file.table.may_be_packed() for file in files)
        )
        if self._searched:
            with paused(sum(file.table.count for file in files)):
                logical = _codes.make_logical(opened._replace(where=where))
            where, self._hidden, self.ignored, self._refused, self._quantization = logical
        self.weight_files = files
        self._where = where
        self._forget()
        self._tensors: Mapping[str, TensorInfo] | None = None
        self._codes: Mapping[str, Any] | None = None
        self._closed = False
        index = None if self._index is None else index_of(self)
        self.index = None if index is None else index.shown
        self.files = list(dict.fromkeys([file.path for file in files]))
        self.metadata = metadata
        self.last_load: LoadStats | None = None

    def _locate(self, name: str) -> tuple[WeightFile, int]:
        if self._hidden and name in self._hidden and name not in self:
            raise hidden(name, self._hidden[name], self.path)
        if self._where is None:
            return self.weight_files[0], self.weight_files[0].table.index(name)
        if (place := self._where.get(name)) is None:
            raise missing(name, list(self._where))
        return place

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.path} is closed")

    def _forget(self) -> None:
        """Drop the accessed arrays. Arrays of callers stay valid, because a mapping lives as long as its last array."""
        self._mappings: dict[WeightFile, Any] = {}
        self._arrays: dict[str, TensorLike] = {}
        self._groups: dict[str, dict[str, Any]] = {}  # tensors that share bytes, by the name of the first

    @public
    def __getitem__(self, name: str) -> TensorLike:
        self._check_open()
        tensor = self._arrays.get(name)
        if tensor is None:
            aliases = self._aliases(name)
            access: Access = "either" if self._recipe is None or self._recipe.writable else "read"
            tensors = Tensors.of(aliases)
            loaded, _ = load_tensors(tensors, backend="mmap", mappings=self._mappings, access=access)
            if len(aliases) > 1:  # setdefault is atomic: all threads get the arrays of the first
                loaded = self._groups.setdefault(aliases[0][0], loaded)
                self._arrays.update(loaded)
            tensor = self._arrays.setdefault(name, loaded[name])
        return tensor

    def _aliases(self, name: str) -> list[FileTensor]:
        """Return the tensors that share bytes with a tensor, including itself: they can share a single copy."""
        file, index = self._locate(name)
        if not file.table.shaped:
            return [(name, file, index)]
        sharing = ((file.table.names[k], file, k) for k in file.table.together(index))
        return [part for part in sharing if self._where is None or self._where.get(part[0]) == part[1:]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weight_files[0].table.names if self._where is None else self._where)

    def __len__(self) -> int:
        return self.weight_files[0].table.count if self._where is None else len(self._where)

    def __contains__(self, name: object) -> bool:
        if self._where is not None:
            return name in self._where
        return isinstance(name, str) and self.weight_files[0].table.find(name) >= 0

    def __repr__(self) -> str:
        tensors, state = plural(len(self), "tensor"), ", closed" if self._closed else ""
        return f"<Checkpoint {show(self.path)}: {self.format}, {tensors}, {self.nbytes:,} bytes{state}>"

    def _repr_html_(self) -> str:
        return _html(repr(self)[1:-1], self.tensors)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    @cached_property
    def notes(self) -> list[str]:
        """The kind of a folder or file (an adapter, a pipeline), and its unopened weight files."""
        adapters = part("adapters")
        kind = adapters.adapter_kind(self) if adapters and not any("adapter" in note for note in self._notes) else None
        return [*self._notes, *([] if kind is None else [adapters.adapter_note(kind)])]

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes, as stored."""
        sizes = {file: file.table.sizes() for file in self.weight_files}
        return sum(sizes[file][index] for _, file, index in tensors_of(self))

    @property
    def named_globals(self) -> dict[str, bool]:
        """Classes and functions named in the pickles of a torch checkpoint: True if they are on the allowlist.

        Empty for other formats. Values can be False only with ``unknown_globals="inert"``.
        """
        return {name: allowed for file in self.weight_files for name, allowed in file.table.named_globals.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Descriptions of the tensors by name: dtype, shape, file, byte range."""
        if self._tensors is None:
            infos = {file: file.infos() for file in self.weight_files}
            where = self._where
            ordered = infos[self.weight_files[0]] if where is None else (infos[f][k] for f, k in where.values())
            self._tensors = TensorInfos(zip(self, ordered, strict=True))
        return self._tensors

    @public
    def get_slice(self, name: str, *, dtype: Any = None) -> TensorSlice:
        """Return a lazy tensor: indexing it reads only the selected part, as in ``ckpt.get_slice("h.0.w")[:128]``.

        Args:
            name: of the tensor.
            dtype: floating dtype to convert a floating tensor, or dequantize a quantized tensor, to. None converts
                nothing, and dequantizes to float32.

        Returns:
            The slice. Of a quantized tensor it reads the selected range of the first axis, in whole blocks.

        Raises:
            TensorNotFoundError: the name does not exist.
            UnsupportedError: ``dtype`` is given for codes of a scheme without dequantization, or for elements smaller
                than a byte.
        """
        self._check_open()
        file, index = self._locate(name)
        if dtype is not None:
            refuse_codes(self, [name], "dtype=")
        options = OpenRequest() if self._recipe is None else self._recipe.options
        return slice_of(file, index, options._replace(formats=(self.format,)), dtype, self)

    @overload
    def take(self, name: str, rows: Rows, dtype: None = None) -> Any: ...
    @overload
    def take(self, name: str, rows: Rows, dtype: DtypeLike) -> Array: ...
    @public
    def take(self, name: str, rows: Rows, dtype: Any = None) -> Any:
        """Return rows of a tensor by index: ``ckpt.take("model.embed_tokens.weight", [5, 2, -1])``.

        Only these rows are read, in few reads if the rows are close together. Of a quantized tensor, the blocks of
        these rows are read; of layouts that store rows of values as columns (GPTQ, AWQ), all codes.

        Args:
            name: of the tensor, which must have an axis.
            rows: indices of the first axis as a list, a range or an integer array, in any order, possibly repeated;
                negative indices count from the end. Or a boolean mask with an element per row.
            dtype: dtype to convert floating rows, and dequantize quantized rows, to; see `load`. None converts nothing.

        Returns:
            The rows, in new memory of shape ``[rows, *shape[1:]]``. Rows of a quantized tensor are a
            `QuantizedTensor` unless ``dtype`` dequantizes these rows.

        Raises:
            TensorNotFoundError: the name does not exist.
            IndexError: an index is out of range, or the mask has another length than the first axis.
            TypeError: ``rows`` is neither integers nor a mask.
            UnsupportedError: the tensor has no axes; or the rows of a quantized tensor are not whole blocks, and
                ``dtype`` is None.
            FormatError, OSError: the file ends too early, or cannot be read.

        Example:
            >>> import safeload
            >>> with safeload.open("tiny-llama") as checkpoint:
            ...     checkpoint.take("model.embed_tokens.weight", [5, 2, 5], dtype="float32").shape
            (3, 64)
        """
        self._check_open()
        file, index = self._locate(name)
        if dtype is not None:
            refuse_codes(self, [name], "dtype=")
        file.table.refuse_unknown([index], file.path)
        return take_rows(file, index, rows, parse_target(dtype), name)

    @overload
    def load(
        self, names: Iterable[str] | None = None, *, dtype: None = None, **options: Unpack[LoadOptions]
    ) -> dict[str, Any]: ...
    @overload
    def load(
        self, names: Iterable[str] | None = None, *, dtype: DtypeLike, **options: Unpack[LoadOptions]
    ) -> dict[str, Array]: ...
    @public
    def load(
        self,
        names: Iterable[str] | None = None,
        *,
        only: Patterns = None,
        drop: Patterns = None,
        dtype: Any = None,
        backend: Backend = "mmap",
        writable: bool = True,
        out: Mapping[str, Array] | None = None,
        threads: int | None = None,
        progress: Progress = None,
    ) -> dict[str, Any]:
        """Load tensors into a dict, in the order of ``names`` or of the file (for torch files, of the pickle).

        Args:
            names: exact names of the tensors to load; None loads all.
            only: shell pattern, or several, of the names to load; see `safeload.load`.
            drop: shell pattern, or several, of the names to skip.
            dtype: dtype to convert floating tensors and dequantize quantized tensors to, in the pass that reads them:
                float64, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, as a name ("bf16"), a code or a type
                of NumPy, ml_dtypes, torch or JAX. F4 and F6 tensors are decoded. Integer, bool and complex tensors keep
                their dtype.
            backend: how to read, see `safeload.load`; "mmap" returns new views. "pread" should be used if another
                program may truncate the file.
            writable: False returns read-only arrays, see `safeload.load`.
            out: arrays to fill, by name. Each must be C-contiguous, have its tensor's dtype and shape, and share no
                memory with another. All are checked before the first byte is written; if reading fails, some may be
                partly filled.
            threads: number of reading threads; None chooses it.
            progress: True shows a progress bar. A callable gets (bytes_done, bytes_total).

        Returns:
            Arrays by name: aligned, and C-contiguous except for strided torch tensors, which are views. BF16 and F8
            have ml_dtypes dtypes. Without ``dtype``, quantized tensors are `QuantizedTensor`, and F4 and F6 raw uint8.

        Raises:
            TensorNotFoundError: a name does not exist, or a pattern matches none.
            UnsupportedError: the conversion is not supported, or ``dtype`` is given for stored codes or for codes of a
                scheme without dequantization, such as EXL2.
            ValueError: an array in ``out`` does not fit, or both ``names`` and ``only`` are given.
            FormatError: a file ends too early; the message has path and byte.
            OSError: a file cannot be read.
        """
        parts = chosen(self, names, only, drop, dtype)
        access = access_of(writable, out)
        arrays, self.last_load = load_tensors(
            parts, backend=backend, dtype=dtype, out=out, threads=threads, progress=progress, access=access
        )
        debug("loaded %s: %s", self.path, self.last_load)
        return arrays

    @overload
    def stream(
        self,
        names: Names = None,
        *,
        by_layer: Literal[False] = False,
        dtype: None = None,
        **options: Unpack[StreamOptions],
    ) -> TensorStream[TensorLike]: ...
    @overload
    def stream(
        self,
        names: Names = None,
        *,
        by_layer: Literal[False] = False,
        dtype: DtypeLike,
        **options: Unpack[StreamOptions],
    ) -> TensorStream[Array]: ...
    @overload
    def stream(
        self, names: Names = None, *, by_layer: Literal[True], dtype: None = None, **options: Unpack[StreamOptions]
    ) -> LayerStream[TensorLike]: ...
    @overload
    def stream(
        self, names: Names = None, *, by_layer: Literal[True], dtype: DtypeLike, **options: Unpack[StreamOptions]
    ) -> LayerStream[Array]: ...
    @overload
    def stream(
        self, names: Names = None, *, by_layer: bool, dtype: None = None, **options: Unpack[StreamOptions]
    ) -> TensorStream[TensorLike] | LayerStream[TensorLike]: ...
    @overload
    def stream(
        self, names: Names = None, *, by_layer: bool, dtype: DtypeLike, **options: Unpack[StreamOptions]
    ) -> TensorStream[Array] | LayerStream[Array]: ...
    @public
    def stream(
        self,
        names: Iterable[str] | None = None,
        *,
        by_layer: bool = False,
        only: Patterns = None,
        drop: Patterns = None,
        dtype: Any = None,
        ahead: int | str = 256 << 20,
        order: Order = "file",
        out: Out = None,
        threads: int | None = None,
        progress: Progress = None,
    ) -> TensorStream[Any] | LayerStream[Any]:
        """Iterate over tensors while the next ones are read: ``for name, array in ckpt.stream(): ...``.

        Reading starts when the first tensor is requested, and stops after an error or the iterator's ``close()``.

        Args:
            names: exact names of the tensors to stream; None streams all.
            by_layer: True yields (layer, {name: array}). A layer is the prefix of its tensors, such as
                "model.layers.0", or "" for all others. It is whole, even if its tensors are in several files, and comes
                at the place of its first tensor in ``order``. It needs the memory of a layer besides ``ahead``.
            only: shell pattern, or several, of the names to stream, instead of ``names``.
            drop: shell pattern, or several, of the names to skip.
            dtype: dtype to convert floating tensors and dequantize quantized tensors to, see `load`.
            ahead: limit on bytes of tensors that were read and not yet taken, as a number or text such as "1GiB". A
                larger tensor is read alone.
            order: "file" follows the bytes, file after file; "given" follows the order of `load`; "ready" yields the
                first tensor that arrives, which for local files is file order, and cannot be combined with
                ``by_layer``.
            out: arrays to fill, by name, or a function from names to arrays. Each array must be C-contiguous and have
                its tensor's dtype and shape. The function is called in the caller's thread, ahead of time: it may
                return an array again only after that array's tensor was taken.
            threads: number of reading threads; None chooses it.
            progress: True shows a progress bar of the tensors taken. A callable gets (bytes_done, bytes_total).

        Returns:
            Iterator of (name, array), or of (layer, {name: array}). Each array is new memory: writable, C-contiguous
            and aligned to 64 bytes (repeated elements of a torch tensor stay repeated). Memory of dropped arrays is
            reused, so a loop should drop each array before it takes the next. Quantized tensors are `QuantizedTensor`
            unless ``dtype`` dequantizes them.

        Raises:
            TensorNotFoundError, UnsupportedError, ValueError: see `load`.
            FormatError, OSError: a tensor cannot be read; raised at its turn, after all tensors before it.
            RuntimeError: the iterator was created before a fork.

        Example:
            >>> import safeload
            >>> with safeload.open("tiny-llama") as checkpoint:
            ...     {name: float(array.max()) for name, array in checkpoint.stream(only="model.norm.*")}
            {'model.norm.weight': 1.0546875}
            >>> with safeload.open("tiny-llama") as checkpoint:
            ...     {layer: len(tensors) for layer, tensors in checkpoint.stream(by_layer=True)}
            {'': 3, 'model.layers.0': 9, 'model.layers.1': 9, 'model.layers.2': 9}
        """
        from .stream import stream  # only here: most programs stream nothing

        parts = chosen(self, names, only, drop, dtype)
        how: Any = {"ahead": ahead, "order": order, "out": out, "threads": threads, "progress": progress}
        return stream(parts, self.weight_files, by_layer=by_layer, dtype=dtype, **how)

    def close(self) -> None:
        """Close the files. Arrays stay valid, because a mapping lives as long as its last array."""
        self._closed = True
        self._forget()
        for file in self.weight_files:
            file.close()

    @classmethod
    @public
    def _reopen(cls, recipe: Sequence[Any], seen: Seen, quantization: str | None) -> Checkpoint:
        checkpoint = cls(reopen(Recipe(*recipe), seen))
        if quantization_in(checkpoint.weight_files) != quantization:
            checkpoint.close()
            raise FormatError("the quantization in config.json has changed since it was opened", checkpoint.path)
        return checkpoint

    @public
    def __reduce__(self) -> tuple[Any, ...]:
        arguments = pickled(recipe_of(self), seen_of(self.weight_files, self._index))
        return Checkpoint._reopen, (*arguments, quantization_in(self.weight_files))

    @public
    def __copy__(self) -> Checkpoint:
        seen = seen_of(self.weight_files, self._index)
        return Checkpoint._reopen(recipe_of(self), seen, quantization_in(self.weight_files))

    @public
    def __deepcopy__(self, memo: dict[int, Any]) -> Checkpoint:
        return self.__copy__()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# ---- for safeload's own modules ----


def quantization_in(files: Iterable[WeightFile]) -> str | None:
    """Return the dequantization configuration of the packed tensors of files, as JSON; None if none is packed."""
    return next((codes.packing.config for file in files for codes in file.table.packed.values()), None)


def file_notes_of(checkpoint: Checkpoint) -> Sequence[str]:
    """Return the notes about files; `Checkpoint.notes` also looks for an adapter."""
    return checkpoint._notes


def tensors_of(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> Tensors:
    """Return the tensors with these names, or all tensors in file order."""
    where, files = checkpoint._where, checkpoint.weight_files
    if names is not None and where is not None and not checkpoint._hidden:
        names = list(distinct(names))  # may be an iterator
        with suppress(KeyError):
            return Tensors.located(where, names)
    if names is not None and (where is not None or checkpoint._hidden):
        return Tensors.of((name, *checkpoint._locate(name)) for name in distinct(names))
    return Tensors.in_file(files[0], names) if where is None else Tensors.located(where)


def chosen(checkpoint: Checkpoint, names: Iterable[str] | None, only: Patterns, drop: Patterns, dtype: Any) -> Tensors:
    """Return the tensors to load; see `Checkpoint.load` for errors."""
    checkpoint._check_open()
    if only is not None or drop is not None:
        names = choose(checkpoint, names, only, drop)
    parts = tensors_of(checkpoint, names)
    if dtype is not None:
        refuse_codes(checkpoint, (tensor[0] for tensor in parts), "dtype=")
    return parts


def with_aliases(
    checkpoint: Checkpoint,
    aliases: Mapping[str, str],
    places: Mapping[str, tuple[Checkpoint, str]] | None = None,
    names: Iterable[str] | None = None,
) -> Checkpoint:
    """Return a view of all tensors or of some, with second names, and with tensors of other checkpoints by name."""
    view = object.__new__(type(checkpoint))
    view.__dict__.update(checkpoint.__dict__)
    where = {name: (file, index) for name, file, index in tensors_of(checkpoint, names)}
    view._where = {**where, **{alias: where[name] for alias, name in aliases.items()}}
    view._where.update((name, other._locate(stored)) for name, (other, stored) in (places or {}).items())
    view.weight_files = [*dict.fromkeys((*view.weight_files, *(file for file, _ in view._where.values())))]
    view._forget()
    view._tensors = view._codes = None
    return view


def settings_of(checkpoint: Checkpoint) -> Any:
    """Return the `Quantization` with which the tensors of a checkpoint are read, or None."""
    return checkpoint._quantization if checkpoint._searched else _quantization.quantization_of(checkpoint.config)


def codes_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the `Codes` of tensors with quantization codes, which mean nothing without their scales."""
    files = checkpoint.weight_files
    if not _codes and not any(file.table.may_be_packed() or file.table.quantized for file in files):
        return {}
    if checkpoint._codes is None:
        alone = checkpoint.config is None and checkpoint.format in _WITH_CONFIG
        checkpoint._codes = _codes.codes_of(
            files,
            tensors_of(checkpoint),
            settings_of(checkpoint),
            search=alone and not checkpoint._searched,
            incomplete=alone and checkpoint.index is None,
            refused=checkpoint._refused,
        )
        if checkpoint.format == KERAS:
            checkpoint._codes = _codes.codes_of_keras(tensors_of(checkpoint))
    return checkpoint._codes


def refuse_codes(checkpoint: Checkpoint, names: Iterable[str], what: str) -> None:
    """Refuse to treat quantization codes as plain numbers."""
    codes = codes_of(checkpoint)
    if codes:
        _codes.refuse(codes, names, what, checkpoint.path)


def index_of(checkpoint: Checkpoint) -> Location | None:
    """Return the location of the ``index.json`` that the checkpoint was opened through."""
    files = LOCAL if checkpoint._recipe is None else checkpoint._recipe.files
    return None if checkpoint._index is None else Location(files, checkpoint._index[0])


def folder_of(checkpoint: Checkpoint) -> Location | None:
    """Return the folder that the checkpoint was opened by, directly or through its index; None for files."""
    index, recipe = index_of(checkpoint), checkpoint._recipe
    if index is not None:
        return Location(index.files, index.files.split(index.path)[0])
    if recipe is None or recipe.listed:
        return None
    files, path = recipe.files, recipe.paths[0]
    # Remotely, `is_folder` would take a request.
    file = any(file.place == path for file in checkpoint.weight_files) if files.remote else not files.is_folder(path)
    return None if file else Location(files, path)


def recipe_of(checkpoint: Checkpoint) -> Recipe:
    """Return how the checkpoint was opened."""
    checkpoint._check_open()
    if checkpoint._recipe is None:
        raise TypeError(f"{checkpoint.path} was not opened by safeload.open, and cannot be copied")
    return checkpoint._recipe


def opened_as_stored(checkpoint: Checkpoint) -> Checkpoint:
    """Open the files of a checkpoint again, with ``stored=True``."""
    seen = seen_of(checkpoint.weight_files, checkpoint._index)
    return Checkpoint(reopen(recipe_of(checkpoint)._replace(stored=True), seen))


# ---- `open` and `load` ----

# The `adapters=` argument: a path, a path with its weight, or a sequence of these in order.
One = PathLike | Located | tuple[PathLike | Located, float]
Adapters = One | Sequence[One] | None


class OpenOptions(LoadOptions, total=False):
    """Options of `load`: options of `Checkpoint.load` and of `open`."""

    format: FormatName | None
    root: str | None
    unknown_globals: UnknownGlobals
    stored: bool
    adapters: Any
    storage_options: Mapping[str, Any] | None
    cache: Cache
    verify: Verify


@public
def open(
    path: Paths,
    *,
    format: FormatName | None = None,
    root: str | None = None,
    unknown_globals: UnknownGlobals = "refuse",
    stored: bool = False,
    writable: bool = True,
    cache: Cache = "keep",
    storage_options: Mapping[str, Any] | None = None,
    verify: Verify = None,
) -> Checkpoint:
    """Open a weight file, a folder of weight files, an ``index.json`` or a list of files. No tensor is read.

    No code in a file is executed. Pickles of torch checkpoints are read by an interpreter limited to plain values and
    tensor descriptions. Nested containers become dotted names: ``{"model": {"w": ...}}`` holds "model.w", and the third
    item of a list is "2". If the whole content is a single array, its name is "tensor".

    Args:
        path: a path, a URL ("hf://owner/name", "s3://bucket/folder", "https://..."), a path or store of another
            library (see `safeload.remote`), or a file object opened in binary mode, such as `io.BytesIO`. From a URL,
            bytes are fetched when they are needed. A file object is read from its current position to its end; it stays
            open, and its position is restored. Pipes and decompressors such as `gzip.GzipFile` are first copied to a
            temporary file. The format is recognized by content, not by suffix. A list opens the union of its files;
            two files must not share a name. Any part of a split GGUF file opens all parts.
        format: required format, such as "safetensors", "gguf" or "torch" ("torch zip" or "torch legacy"). The guide and
            the error for an unknown value list all formats.
        root: nested container to take tensors and metadata from, such as "state_dict" or "model.ema" in a torch
            checkpoint, "params" in an Orbax checkpoint, or a model in an archive. Names omit it.
        unknown_globals: how to treat a pickle that names classes or functions outside the allowlist. "refuse" raises an
            error with all their names. "inert" replaces them by placeholders, which are never imported or called, and
            reads the tensors. Inside a placeholder, tensor names contain ``<state>`` or ``<args>``.
        stored: True shows tensors as the files name them. Otherwise a packed weight of a quantized checkpoint appears
            once, under its logical name, as a `QuantizedTensor` with its scales inside.
        writable: False makes the arrays of ``ckpt[name]`` read-only, see `load`.
        cache: "drop" reads arrays into private memory and drops the pages of the files behind reads, see `load`.
        storage_options: options of the filesystem behind a URL, as fsspec takes them (keys, ``endpoint_url``,
            ``token``, ...); for https also ``headers``, ``timeout`` and ``retries``. A dict, even an empty one, also
            allows schemes other than https, http, hf, s3, gs, az, file, memory and ollama, and chains such as
            ``filecache::s3://...``.
        verify: what to verify files against, see `load`. Each file is read whole and hashed before its first tensor is
            returned. Until then, names, shapes and metadata of large safetensors and GGUF files are not verified.

    Returns:
        The open checkpoint. ``with safeload.open(path) as checkpoint:`` closes it.

    Raises:
        FormatError: the file breaks its format, or an index does not match its folder.
        ForbiddenError: a pickle names globals outside the allowlist.
        UnsupportedError: safeload cannot read the format or a tensor, or a folder has no weights.
        LimitError: a named limit is exceeded.
        TensorNotFoundError: ``root`` does not exist; the message lists the existing roots.
        VerificationError: there is nothing to verify against, or a file is not covered or differs.
        RemoteError: the network or the server of a URL fails.
        OSError: a system error, such as FileNotFoundError or PermissionError.
        ImportError: a URL needs a package that is not installed.
        TypeError, ValueError: invalid arguments, such as a text file or a closed file object.

    Example:
        >>> import safeload
        >>> with safeload.open("model.safetensors") as checkpoint:
        ...     checkpoint.tensors["conv1.bias"].dtype, checkpoint["conv1.bias"].shape
        ('F32', (128,))
    """
    with caching(cache):
        opened = open_paths(path, format, root, unknown_globals, stored, storage_options=storage_options, verify=verify)
    if opened.recipe is not None and (not writable or cache != "keep"):
        opened = opened._replace(recipe=opened.recipe._replace(writable=writable, cache=cache))
    return Checkpoint(opened)


def check_unadapted(verify: Verify) -> None:
    """Refuse ``verify=`` with adapters, which no manifest of the model covers."""
    if verify is not None and verify is not False:
        raise ValueError("verify= does not cover adapters: merge them in a separate call, or verify them by themselves")


@overload
def load(
    path: Paths, names: Iterable[str] | None = None, *, dtype: None = None, **options: Unpack[OpenOptions]
) -> dict[str, Any]: ...
@overload
def load(
    path: Paths, names: Iterable[str] | None = None, *, dtype: DtypeLike, **options: Unpack[OpenOptions]
) -> dict[str, Array]: ...
@public
def load(
    path: Paths,
    names: Iterable[str] | None = None,
    *,
    only: Patterns = None,
    drop: Patterns = None,
    format: FormatName | None = None,
    root: str | None = None,
    unknown_globals: UnknownGlobals = "refuse",
    stored: bool = False,
    adapters: Adapters = None,
    storage_options: Mapping[str, Any] | None = None,
    dtype: Any = None,
    backend: Backend = "mmap",
    cache: Cache = "keep",
    writable: bool = True,
    out: Mapping[str, Array] | None = None,
    threads: int | None = None,
    progress: Progress = None,
    verify: Verify = None,
) -> dict[str, Any]:
    """Load the tensors of a checkpoint of any format as NumPy arrays.

    Packed weights of quantized checkpoints are dequantized if ``dtype`` is given, and `QuantizedTensor` otherwise. No
    code in a file is executed.

    Args:
        path: a file, folder, ``index.json``, URL, binary file object or list of files, see `open`.
        names: exact names of the tensors to load; None loads all.
        only: shell pattern, or several, of the names to load, such as ``"model.layers.0.*"``, instead of ``names``.
        drop: shell pattern, or several, of the names to skip.
        format: required format, such as "safetensors", "gguf" or "torch"; None accepts any.
        root: nested container to take tensors from, such as "state_dict", see `open`.
        unknown_globals: how to treat a pickle that names objects outside the allowlist, see `open`.
        stored: True loads stored tensors as they are: codes and scales of packed weights separately.
        adapters: LoRA adapters (PEFT, MLX or GGUF) to merge: a path, a pair (path, weight), or a list of these,
            merged in order. Sums are computed in float32 and rounded once, to ``dtype`` or to the tensor's dtype.
            Changes of packed tensors need ``dtype``.
        storage_options: options of the filesystem behind a URL, see `open`.
        dtype: dtype to convert floating tensors and dequantize packed tensors to, while they are read: "float32",
            "bf16", a NumPy or ml_dtypes type, ... None converts nothing. Integer, bool and complex tensors keep their
            dtype.
        backend: "mmap" returns copy-on-write views unless a tensor is converted. "pread" reads into private memory
            on all cores. "direct" also bypasses the page cache, for weights outside the cache that will not be read
            again soon; it falls back to "pread" if the system has no direct I/O (some network file systems, Windows,
            macOS). "auto" maps files that are in the page cache, reads others past it, and reads from network file
            systems in large pieces; `LoadStats` has the choice and its reason. URLs are always read.
        cache: "drop" leaves few pages of the files in the system's page cache: arrays are read into private memory, and
            pages are dropped behind reads. Blocks of 4 MiB stay if most of them were in the cache before, for
            other programs. Needs ``posix_fadvise``, which Windows and macOS do not have.
        writable: False returns read-only arrays: views of read-only mappings, which no limit of memory counts. True
            does so, too, and logs a warning, if the system refuses writable mappings.
        out: arrays to fill, by name. Each must be C-contiguous and have its tensor's dtype and shape.
        threads: number of reading threads; None chooses it.
        progress: True shows a progress bar. A callable gets (bytes_done, bytes_total).
        verify: the path of a manifest (``safeload verify --write``) or a `Signature` to compare every file
            with, in the pass that reads it. Tensors are returned only if all files match. True uses the manifest next
            to the files, or the digests of the Hub's cache or of ollama. The files that hold the tensors are read whole
            into private memory, whatever ``backend`` and ``only`` say. Cannot be combined with ``adapters``.

    Returns:
        Arrays by name: writable by default, and C-contiguous except for strided torch tensors.

    Raises:
        FormatError: a file breaks its format or ends too early; the message has path and byte.
        ForbiddenError: a pickle names globals outside the allowlist.
        UnsupportedError: safeload does not support the format, a tensor or conversion, or the system ``cache="drop"``.
        TensorNotFoundError: a name or ``root`` does not exist, a pattern matches no name, or the checkpoint lacks a
            module of an adapter.
        VerificationError: a file differs or is not covered; there is nothing to verify against, or no key.
        ValueError: an array in ``out`` does not fit, a file object is closed, or two arguments exclude each other.
        TypeError: ``path`` is neither a path nor a binary file.
        RemoteError: the network or the server of a URL fails.
        OSError: a system error, such as FileNotFoundError.

    Example:
        >>> import safeload
        >>> weights = safeload.load("tiny-llama", only="*norm.weight", dtype="float32")
        >>> weights["model.norm.weight"].dtype
        dtype('float32')
    """
    if adapters is not None:
        check_unadapted(verify)
    options: Any = {"storage_options": storage_options, "verify": verify}
    with caching(cache), Checkpoint(open_paths(path, format, root, unknown_globals, stored, **options)) as checkpoint:
        load_from: Callable[..., dict[str, Any]] = checkpoint.load
        if adapters is not None:
            load_from = partial(part("merging").load_with_adapters, checkpoint, adapters, storage_options)
        how: Any = {"backend": backend, "writable": writable, "out": out, "threads": threads, "progress": progress}
        return load_from(names=names, only=only, drop=drop, dtype=dtype, **how)
