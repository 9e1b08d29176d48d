"""An open checkpoint of any format: a mapping from names to arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from .base import log
from .base.arrays import Array
from .base.listing import TensorInfos, as_html
from .base.packing import CONFIG_KEY
from .base.packing import Part as StoredPart
from .base.selecting import Patterns, choose, distinct
from .base.table import TensorInfo, hidden, missing
from .base.text import plural, show
from .engine.read.load import Backend, DtypeLike, LoadOptions, LoadStats, load_tensors
from .engine.read.tensors import FileTensor, Tensors
from .engine.read.views import Views
from .engine.run.progress import Progress
from .engine.run.weight_file import WeightFile, infos_of, quantization_in
from .errors import FormatError
from .formats.opening import OpenedPath, Recipe, Seen, folder_of, index_of, pickled, reopen, seen_of
from .formats.registry import GGUF, SAFETENSORS, TORCH_LEGACY, TORCH_ZIP, OpenRequest
from .formats.safetensors.quantized import KEY, unpack_all
from .formats.tensor_slice import TensorSlice, slice_of
from .packed import (
    codes_without_scale,  # not where it is used: a child forked while a thread imports it would wait for ever
)
from .packed.quantization import quantization_of
from .stores.files import Location

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .engine.ahead.stream import Order, Out, TensorStream

__all__ = ["Checkpoint", "TensorSlice", "TensorStream"]

# Formats of files that stand beside a config.json.
_WITH_CONFIG = (SAFETENSORS, TORCH_ZIP, TORCH_LEGACY)
_PACKED = (SAFETENSORS, GGUF)


class Checkpoint(Mapping[str, Any]):
    """The tensors of a file or a folder, by name. Made by `safeload.open`.

    ``ckpt[name]`` is a writable copy-on-write view of the mapped file, the same memory each time (as
    ``numpy.memmap`` with mode "c"): writing into it changes no file. Views outlive `close`. Any thread may use it.

    A mapping shows the file itself: if another program truncates the file in place, touching a lost page kills the
    process (SIGBUS). ``load(backend="pread")`` has no such hazard. From a URL an array is fetched, once.

    A checkpoint pickles as its absolute path, or URL, and the arguments of `open`. Unpickling opens it again, in any
    process, and raises FormatError if the files have changed. ``copy.copy`` does the same. Both raise `ValueError` if
    the checkpoint is closed.

    Attributes:
        format: such as "safetensors", "torch zip", "torch legacy" or "gguf": a value that ``format=`` of `open` takes.
        files: paths of the files that hold the tensors.
        metadata: text from the header. For a torch checkpoint everything that is not a tensor, with its nesting, also
            outside ``root``; for a GGUF file a mapping that decodes values when they are accessed; for shards the
            metadata of all of them and of the index.
        config: parsed ``config.json`` of a folder, else None.
        index: path of the ``index.json`` that it was opened by, else None.
        notes: the kind of a folder (an adapter, a pipeline), and which of its weight files were not opened.
        last_load: `LoadStats` of the last `load`, else None.
    """

    def __init__(self, found: OpenedPath) -> None:
        where, metadata = found.where, found.metadata
        stored = found.recipe is not None and found.recipe.stored
        self._hidden: Mapping[str, str] = {}
        self.ignored: Mapping[str, StoredPart] = {}
        self._refused: Mapping[str, str] = {}
        self._quantization = quantization_of(found.config)
        self._searched = False  # for a quantization in and beside the files
        if found.format == SAFETENSORS and not stored:
            where = unpack_all(found.files, where)
            metadata = {key: value for key, value in metadata.items() if key not in (KEY, CONFIG_KEY)}
        if not stored and found.format in _PACKED and any(file.table.may_be_packed() for file in found.files):
            from .packed import families_to_tables  # only here: most checkpoints do not need it

            logical = families_to_tables.make_logical(
                found.files,
                where,
                self._quantization,
                title=found.title,
                complete=found.complete,
                in_gguf=found.format == GGUF,
            )
            where, self._hidden, self.ignored, self._refused, self._quantization = logical
            self._searched = True
        self.path = found.title  # internal, as are weight_files and ignored
        self.weight_files: Sequence[WeightFile] = found.files
        self._where = where
        self._views = Views()
        self._tensors: Mapping[str, TensorInfo] | None = None
        self._found_codes: Mapping[str, codes_without_scale.Codes] | None = None
        self._closed = False
        self._recipe = found.recipe
        self._index = found.index_file
        self.index = None if self.index_location is None else self.index_location.shown
        self.notes = list(found.notes)
        self.format = found.format
        self.files = list(dict.fromkeys(file.path for file in found.files))
        self.metadata = metadata
        self.config = found.config
        self.last_load: LoadStats | None = None

    def entries(self, names: Iterable[str] | None = None) -> Tensors:
        """The tensors of these names, or all in the order of their bytes. Internal.

        :meta private:

        Raises:
            TensorNotFoundError: an unknown name.
        """
        if names is not None and (self._where is not None or self._hidden):
            return Tensors.of((name, *self._locate(name)) for name in distinct(names))
        if self._where is None:
            return Tensors.in_file(self.weight_files[0], names)
        return Tensors.located(self._where)

    def with_aliases(self, aliases: Mapping[str, str]) -> Checkpoint:
        """A view of this checkpoint that has some tensors under a second name; it shares the open files. Internal.

        :meta private:

        Args:
            aliases: the second names, and those of the tensors.
        """
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._where = {name: (file, index) for name, file, index in self.entries()}
        view._where.update({alias: view._where[name] for alias, name in aliases.items()})
        view._views, view._tensors, view._found_codes = Views(), None, None
        return view

    def codes(self) -> Mapping[str, codes_without_scale.Codes]:
        """The tensors that hold quantization codes, whose values mean nothing without their scales. Internal.

        :meta private:
        """
        if self._found_codes is None:
            alone = self.config is None and self.format in _WITH_CONFIG
            self._found_codes = codes_without_scale.codes_of(
                self.weight_files,
                self.entries(),
                self._quantization,
                search=alone and not self._searched,
                incomplete=alone and self.index is None,
                refused=self._refused,
            )
        return self._found_codes

    def _locate(self, name: str) -> tuple[WeightFile, int]:
        if self._hidden and name in self._hidden and name not in self:
            raise hidden(name, self._hidden[name], self.path)
        if self._where is None:
            return self.weight_files[0], self.weight_files[0].table.index(name)
        found = self._where.get(name)
        if found is None:
            raise missing(name, list(self._where))
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.path} is closed")

    def __getitem__(self, name: str) -> Any:  # an array or a QuantizedTensor: a union makes correct code an error
        self._check_open()
        array = self._views.find(name)
        return self._views.make(name, self._aliases(name)) if array is None else array

    def _aliases(self, name: str) -> list[FileTensor]:
        """The tensor and those that share bytes with it: if a copy is needed, one copy serves all of them."""
        file, index = self._locate(name)
        if not file.table.shaped:
            return [(name, file, index)]
        known = ((file.table.names[k], file, k) for k in file.table.together(index))
        return [part for part in known if self._where is None or self._where.get(part[0]) == part[1:]]

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
        return as_html(repr(self)[1:-1], self.tensors.values(), len(self))

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    @property
    def nbytes(self) -> int:
        """Size in bytes of all tensors as stored."""
        sizes = {file: file.table.sizes() for file in self.weight_files}
        return sum(sizes[file][index] for _, file, index in self.entries())

    @property
    def named_globals(self) -> dict[str, bool]:
        """Classes and functions that the pickles of a torch checkpoint name, and whether each is on the harmless list.

        Empty for other formats. Only with ``unknown_globals="inert"`` can any of them be off the list.
        """
        return {name: harmless for file in self.weight_files for name, harmless in file.table.named_globals.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Description of each tensor, by name."""
        if self._tensors is None:
            self._tensors = TensorInfos(infos_of(self.weight_files, self._where))
        return self._tensors

    def get_slice(self, name: str, *, dtype: Any = None) -> TensorSlice:
        """A lazy tensor: indexing it reads only the selected elements, ``ckpt.get_slice("h.0.w")[:, :128]``.

        Args:
            name: of the tensor.
            dtype: floating dtype that a floating tensor is converted to, and a quantized one dequantized; None to
                convert nothing, and for a quantized one float32.

        Returns:
            The slice. Of a quantized tensor it reads the selected range of the first axis.

        Raises:
            TensorNotFoundError: an unknown name.
            UnsupportedError: ``dtype`` for codes of a family that is not dequantized, or for elements of less than a
                byte.
        """
        self._check_open()
        file, index = self._locate(name)
        if dtype is not None:
            codes_without_scale.refuse(self.codes(), [name], "dtype=", self.path)
        options = OpenRequest() if self._recipe is None else self._recipe.options
        return slice_of(file, index, options._replace(formats=(self.format,)), dtype, self)

    @overload
    def load(
        self, names: Iterable[str] | None = None, *, dtype: None = None, **options: Unpack[LoadOptions]
    ) -> dict[str, Any]: ...
    @overload
    def load(
        self, names: Iterable[str] | None = None, *, dtype: DtypeLike, **options: Unpack[LoadOptions]
    ) -> dict[str, Array]: ...
    def load(
        self,
        names: Iterable[str] | None = None,
        *,
        only: Patterns = None,
        drop: Patterns = None,
        dtype: Any = None,
        backend: Backend = "mmap",
        out: Mapping[str, Array] | None = None,
        threads: int | None = None,
        progress: Progress = None,
    ) -> dict[str, Any]:
        """Tensors as a dict, in the order of ``names``, or that of their bytes; from torch files, that of the pickle.

        Args:
            names: exact names; None for all.
            only: shell pattern, or several, of the names to load, such as ``"model.layers.0.*"``; instead of ``names``.
            drop: shell pattern, or several, of names to leave out.
            dtype: dtype that floating tensors are converted to while they are read, in one pass: float64, float32,
                float16, bfloat16, float8_e4m3fn or float8_e5m2 as a name ("bf16"), a code or a type of numpy,
                ml_dtypes, torch or JAX. Integer, bool and complex tensors are not converted. F4 and F6 tensors are
                decoded.
            backend: "mmap" for new copy-on-write views of tensors that are not converted, "pread" to read into private
                memory on all cores, "direct" to do so past the page cache. From URLs all read.
            out: arrays to fill, by name, each C-contiguous and of the dtype and shape of its tensor; all are checked
                before the first byte is written. If reading fails they may be partly filled.
            threads: for reading; None: chosen automatically.
            progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

        Returns:
            Name to array: writable, aligned; C-contiguous except for strided tensors of torch, which are views. A
            quantized tensor is a `QuantizedTensor` unless ``dtype`` dequantizes it. BF16 and F8 tensors have ml_dtypes
            dtypes; F4 and F6 tensors are raw uint8 unless ``dtype`` decodes them.

        Raises:
            TensorNotFoundError: an unknown name, or a pattern that matches none.
            UnsupportedError: an unsupported conversion; ``dtype`` for codes of a family that is not dequantized, such
                as EXL2, or for stored ones.
            ValueError: an array of ``out`` that does not fit; both ``names`` and ``only``.
            FormatError: a file ends too early, with path and offset.
            OSError: a file cannot be read.
        """
        parts = chosen(self, names, only, drop, dtype)
        arrays, self.last_load = load_tensors(
            parts, backend=backend, dtype=dtype, out=out, threads=threads, progress=progress
        )
        log.debug("loaded %s: %s", self.path, self.last_load)
        return arrays

    @property
    def index_location(self) -> Location | None:
        """The ``index.json`` that it was opened by. Internal.

        :meta private:
        """
        return index_of(self._recipe, self._index)

    @property
    def folder(self) -> Location | None:
        """The folder that it was opened by, as itself or by its index; None for files. Internal.

        :meta private:
        """
        return folder_of(self._recipe, self._index, self.weight_files)

    def stream(
        self,
        names: Iterable[str] | None = None,
        *,
        only: Patterns = None,
        drop: Patterns = None,
        dtype: Any = None,
        ahead: int | str = 256 << 20,
        order: Order = "file",
        out: Out = None,
        threads: int | None = None,
        progress: Progress = None,
    ) -> TensorStream:
        """Tensors one after the other, while the next ones are read: ``for name, array in ckpt.stream(): ...``.

        Nothing is read before the first tensor is taken, nor after an error or ``close()`` of the iterator.

        Args:
            names: exact names; None for all.
            only: shell pattern, or several, of the names to stream, instead of ``names``.
            drop: shell pattern, or several, of names to leave out.
            dtype: dtype that floating tensors are converted to and quantized ones dequantized to, see `load`.
            ahead: most bytes of tensors that are read and not yet taken, as a number or text such as "1GiB"; a larger
                tensor is read alone.
            order: "file" for the order of the bytes, file after file; "given" for that of `load`; "ready" for whichever
                is there first, which for local files is the order of the bytes.
            out: arrays to fill, by name, or a function that gets a name and returns one, each C-contiguous and of the
                dtype and shape of its tensor. The function is called in the caller's thread, ahead of time: an array
                may be used again only after its tensor was taken.
            threads: for reading; None: chosen automatically.
            progress: True for a bar, or a callable that gets (bytes_done, bytes_total) of the tensors taken.

        Returns:
            Iterator of (name, array). Each array is new memory of the caller's: writable, C-contiguous, aligned to 64
            bytes (repeated elements of a torch tensor stay repeated). A quantized tensor is a `QuantizedTensor` unless
            ``dtype`` dequantizes it.

        Raises:
            TensorNotFoundError, UnsupportedError, ValueError: see `load`.
            FormatError, OSError: a tensor cannot be read; it is raised in its turn, after all tensors before it.
            RuntimeError: the iterator was made before a fork.

        Example:
            >>> import safeload
            >>> with safeload.open("tiny-llama") as checkpoint:
            ...     {name: float(array.max()) for name, array in checkpoint.stream(only="model.norm.*")}
            {'model.norm.weight': 1.0546875}
        """
        from .engine.ahead.stream import stream  # only here: most programs stream nothing

        parts = chosen(self, names, only, drop, dtype)
        return stream(
            parts, self.weight_files, dtype=dtype, ahead=ahead, order=order, out=out, threads=threads, progress=progress
        )

    def close(self) -> None:
        """Closes the files. Arrays stay valid: a mapping lives as long as its last array."""
        self._closed = True
        self._views.clear()
        for file in self.weight_files:
            file.close()

    def recipe(self) -> Recipe:
        """How it was opened; TypeError if that cannot be repeated. Internal.

        :meta private:
        """
        self._check_open()
        if self._recipe is None:
            raise TypeError(f"{self.path} was not opened by safeload.open, and cannot be copied")
        return self._recipe

    def __reduce__(self) -> tuple[Any, ...]:
        kept = pickled(self.recipe(), seen_of(self.weight_files, self._index))
        return _reopen, (*kept, quantization_in(self.weight_files))

    def __copy__(self) -> Checkpoint:
        return _reopen(self.recipe(), seen_of(self.weight_files, self._index), quantization_in(self.weight_files))

    def __deepcopy__(self, memo: dict[int, Any]) -> Checkpoint:
        return self.__copy__()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def chosen(checkpoint: Checkpoint, names: Iterable[str] | None, only: Patterns, drop: Patterns, dtype: Any) -> Tensors:
    """The tensors to load, as `Checkpoint.entries` gives them; it raises what `Checkpoint.load` does."""
    checkpoint._check_open()
    if only is not None or drop is not None:
        names = choose(checkpoint, names, only, drop)
    parts = checkpoint.entries(names)
    if dtype is not None:
        codes_without_scale.refuse(checkpoint.codes(), (part[0] for part in parts), "dtype=", checkpoint.path)
    return parts


def _reopen(recipe: Sequence[Any], seen: Seen, quantization: str | None) -> Checkpoint:
    made = Checkpoint(reopen(Recipe(*recipe), seen))
    if quantization_in(made.weight_files) != quantization:
        made.close()
        raise FormatError("the quantization in config.json has changed since it was opened", made.path)
    return made


def __getattr__(name: str) -> Any:
    if name == "TensorStream":  # which is imported with the first stream
        return import_module(".engine.ahead.stream", __package__).TensorStream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
