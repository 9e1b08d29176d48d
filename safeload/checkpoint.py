"""One door for every format: a checkpoint is a mapping from names to arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any

from . import log
from .errors import UnsupportedError
from .files import Array, PathLike, WeightFile, native_path
from .formats import opening, quantized, sniffing
from .jobs import Progress
from .loading import Backend, LoadStats, Part, Value, distinct, load_parts, parts_of
from .slicing import read_slice
from .tensor import TensorInfo, missing
from .text import plural


class Checkpoint(Mapping[str, Value]):
    """The tensors of a file or a folder, by name. Made by `safeload.open`.

    ``ckpt[name]`` is a writable copy-on-write view of the mapped file, the same memory each time (as
    ``numpy.memmap`` with mode "c"): writing into it changes no file. Views stay valid after `close`. Any thread may
    use it.

    A mapping shows the file itself: if another program truncates it in place, touching a lost page kills the process
    (SIGBUS). ``load(backend="pread")`` has no such hazard.

    Attributes:
        format: "safetensors", "torch zip", "torch legacy", "pickle", "gguf", "npz" or "moon".
        files: paths of the files that hold the tensors.
        metadata: text from the header; of a torch checkpoint all that is no tensor, nested as it was, also outside
            ``root``; of a GGUF file a mapping that unpacks values when they are asked for; for shards that of all of
            them and of the index.
        config: parsed ``config.json`` of a folder, else None.
        last_load: `LoadStats` of the last `load`, else None.
    """

    def __init__(
        self,
        path: str,
        format: str,
        files: list[WeightFile],
        where: dict[str, tuple[WeightFile, int]] | None,
        metadata: Mapping[str, Any],
        config: dict[str, Any] | None,
    ) -> None:
        if format == "safetensors":
            where = _unpack(files, where)
            # what it said is in the tensors now
            metadata = {key: value for key, value in metadata.items() if key != quantized.KEY}
        self._path = path
        self._open = files
        self._where = where
        self._mappings: dict[WeightFile, Any] = {}
        self._arrays: dict[str, Value] = {}
        self._groups: dict[str, dict[str, Value]] = {}  # those that share bytes, under the first of them
        self._tensors: Mapping[str, TensorInfo] | None = None
        self._closed = False
        self.format = format
        self.files = list(dict.fromkeys(file.path for file in files))
        self.metadata = metadata
        self.config = config
        self.last_load: LoadStats | None = None

    def _parts(self, names: Iterable[str] | None = None) -> list[Part]:
        """Name, file and index of the tensors named, or of all in the order of their bytes."""
        if self._where is None:
            return parts_of(self._open[0], names)
        if names is None:
            return [(name, file, index) for name, (file, index) in self._where.items()]
        return [(name, *self._locate(name)) for name in distinct(names)]

    def _locate(self, name: str) -> tuple[WeightFile, int]:
        if self._where is None:
            return self._open[0], self._open[0].table.index(name)
        found = self._where.get(name)
        if found is None:
            raise missing(name, list(self._where))
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self._path} is closed")

    def __getitem__(self, name: str) -> Value:
        self._check_open()
        array = self._arrays.get(name)
        if array is None:
            file, index = self._locate(name)
            parts = self._together(name, file, index)
            loaded, _ = load_parts(parts, backend="mmap", mappings=self._mappings)
            if len(parts) > 1:  # one step: of threads that come here at once all get what the first has loaded
                loaded = self._groups.setdefault(parts[0][0], loaded)
                self._arrays.update(loaded)
            array = self._arrays.setdefault(name, loaded[name])
        return array

    def _together(self, name: str, file: WeightFile, index: int) -> list[Part]:
        """The tensor and those that share bytes with it: what has to be copied is copied once for all of them."""
        if not file.table.shaped:
            return [(name, file, index)]
        known = ((file.table.names[k], file, k) for k in file.table.together(index))
        return [part for part in known if self._where is None or self._where.get(part[0]) == part[1:]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open[0].table.names if self._where is None else self._where)

    def __len__(self) -> int:
        return self._open[0].table.count if self._where is None else len(self._where)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        return self._open[0].table.find(name) >= 0 if self._where is None else name in self._where

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return (
            f"<Checkpoint {self._path!r}: {self.format}, {plural(len(self), 'tensor')}, {self.nbytes:,} bytes{state}>"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are in the files."""
        sizes = {file: file.table.sizes() for file in self._open}
        if self._where is None:
            return sum(sizes[self._open[0]])
        return sum(sizes[file][index] for file, index in self._where.values())

    @property
    def named_globals(self) -> dict[str, bool]:
        """Classes and functions that the pickles of a torch checkpoint name, and whether each is on the harmless list.

        Empty for other formats. Only ``unknown_globals="inert"`` lets any be off the list.
        """
        return {name: harmless for file in self._open for name, harmless in file.table.named_globals.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What is known of each tensor, by name."""
        if self._tensors is None:
            self._tensors = MappingProxyType(self._make_tensors())
        return self._tensors

    def _make_tensors(self) -> dict[str, TensorInfo]:
        known = {file: file.infos() for file in self._open}
        return {name: known[file][index] for name, file, index in self._parts()}

    def get_slice(self, name: str) -> TensorSlice:
        """A stand-in for a tensor that reads what is asked of it: ``ckpt.get_slice("h.0.w")[:, :128]``.

        Raises:
            TensorNotFoundError: there is no such tensor.
        """
        self._check_open()
        file, index = self._locate(name)
        if file.table.quantized and (file.table.row(index).blocked or file.table.scale(index) is not None):
            raise UnsupportedError(f"tensor {name!r} is quantized: its parts are not read, only the whole")
        return TensorSlice(file, index)

    def load(
        self,
        names: Iterable[str] | None = None,
        *,
        dtype: Any = None,
        backend: Backend = "mmap",
        out: Mapping[str, Array] | None = None,
        threads: int | None = None,
        progress: Progress = None,
    ) -> dict[str, Any]:
        """Tensors as a dict, in the order of their bytes or of ``names``.

        Args:
            names: exact names; None for all.
            dtype: what floating tensors are converted to while they are read, in one pass: float64, float32, float16,
                bfloat16, float8_e4m3fn or float8_e5m2 as numpy or ml_dtypes type, name or code. Integer, bool and
                complex tensors come unchanged. F4 and F6 tensors are decoded.
            backend: "mmap" for fresh copy-on-write views of what is not converted, "pread" to read into private memory
                on all cores.
            out: arrays to fill, by name, each C-contiguous and of the dtype and shape it shall get; all are checked
                before the first byte is written. If reading fails they may be partly filled.
            threads: for what is read; None for what helps.
            progress: True for a bar (needs tqdm), or a callable that gets (bytes_done, bytes_total).

        Returns:
            Name to array: writable, aligned; C-contiguous but for strided tensors of torch, which are views. A
            quantized tensor is a `QuantizedTensor` unless ``dtype`` restores it. BF16 and F8 tensors have ml_dtypes
            dtypes, F4 and F6 ones are raw uint8 unless ``dtype`` decodes them.

        Raises:
            TensorNotFoundError: an unknown name.
            UnsupportedError: a conversion that there is not.
            ValueError: an array of ``out`` that does not fit.
            FormatError: a file ends too early, with path and offset.
            OSError: a file cannot be read.
        """
        self._check_open()
        arrays, self.last_load = load_parts(
            self._parts(names), backend=backend, dtype=dtype, out=out, threads=threads, progress=progress
        )
        log.debug("loaded %s: %s", self._path, self.last_load)
        return arrays

    def close(self) -> None:
        """Closes the files. Arrays stay valid: a mapping goes with its last array."""
        self._closed = True
        self._arrays.clear()
        self._groups.clear()
        self._mappings.clear()
        for file in self._open:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unpack(
    files: list[WeightFile], where: dict[str, tuple[WeightFile, int]] | None
) -> dict[str, tuple[WeightFile, int]] | None:
    """Finds the quantized tensors that safetensors files say they hold; scales are no tensors of their own then."""
    changed = {file for file in files if quantized.KEY in (file.table.metadata() or {}) and quantized.unpack(file)}
    if where is None or not changed:
        return where
    found = ((name, file, file.table.find(name) if file in changed else index) for name, (file, index) in where.items())
    return {name: (file, index) for name, file, index in found if index >= 0}


class TensorSlice:
    """A tensor that has not been read. Indexing it as numpy does (basic indexing) reads what it returns.

    Attributes:
        shape: of the array that the whole tensor would be.
        dtype: likewise.
    """

    def __init__(self, file: WeightFile, index: int) -> None:
        self._file = file
        self._index = index
        self.dtype, self.shape, *_ = file.layout(index)

    def __getitem__(self, index: Any) -> Array:
        return read_slice(self._file, self._index, index if isinstance(index, tuple) else (index,))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<TensorSlice {self.dtype} {list(self.shape)}>"


def open(
    path: PathLike, *, format: str | None = None, root: str | None = None, unknown_globals: str = "refuse"
) -> Checkpoint:
    """Opens a weight file, a folder of them or an ``index.json``; no tensor is read.

    Nothing that a file says is executed: the pickle of a torch checkpoint is read by a machine that builds plain values
    and descriptions of tensors. Nested containers give names with dots: ``{"model": {"w": ...}}`` gives "model.w", the
    third of a list "2", a tensor that is all there is "tensor".

    Args:
        path: what to open. The format is told from the content, not from the suffix.
        format: to insist on one: "safetensors", "torch" (either of the following), "torch zip", "torch legacy",
            "pickle" (arrays of numpy), "gguf", "npz" or "moon".
        root: name of the nested dict to take tensors from, such as "state_dict" or "model.ema"; it is left out of their
            names. For torch checkpoints.
        unknown_globals: what to do with a pickle that names classes or functions off the list of harmless ones:
            "refuse" it with an error that names them all, or keep them "inert", as placeholders, and read the tensors
            around them. They are neither imported nor called; what one was given as its state has the step ``<state>``
            in names, its arguments ``<args>``.

    Returns:
        The open checkpoint; ``with safeload.open(path) as checkpoint:`` closes it.

    Raises:
        FormatError: the file breaks its format, or an index its folder.
        ForbiddenError: foreign globals in a pickle.
        UnsupportedError: a format or a tensor that this version does not read, or a folder without weights.
        LimitError: a named limit is exceeded.
        TensorNotFoundError: there is no such root; the message lists what is there.
        OSError: the system's own errors; FileNotFoundError and PermissionError among them.

    Example:
        >>> import safeload
        >>> with safeload.open("model.safetensors") as checkpoint:
        ...     checkpoint.tensors["conv1.bias"].dtype, checkpoint["conv1.bias"].shape
        ('F32', (128,))
    """
    if format is not None and format not in opening.FORMATS:
        raise ValueError(f"format is {format!r}, known are {', '.join(opening.FORMATS)}")
    if unknown_globals not in ("refuse", "inert"):
        raise ValueError(f'unknown_globals is {unknown_globals!r}, but it is "refuse" or "inert"')
    formats = None if format is None else opening.FORMATS[format]
    wanted = opening.Wanted(formats, root, unknown_globals == "inert")
    text, _ = native_path(path)
    if text.endswith(".json") and not sniffing.is_safetensors(sniffing.read_head(text)):
        return _open_shards(text, wanted)
    try:
        opened = opening.open_file(text, wanted)
    except IsADirectoryError:
        return _open_shards(text, wanted)
    return Checkpoint(text, opened.format, opened.files, opened.where, opened.metadata, None)


def _open_shards(path: str, wanted: opening.Wanted) -> Checkpoint:
    """A folder or an ``index.json``."""
    from .formats import folder  # only here: json and pathlib take milliseconds that every import would pay

    shards, config = folder.open_path(path, wanted)
    metadata: Mapping[str, Any] = {}
    for file in shards.files:
        found = file.table.metadata() or {}
        metadata = {**metadata, **found} if metadata else found
    if shards.metadata:
        metadata = {**metadata, **shards.metadata}
    return Checkpoint(path, shards.format, shards.files, shards.where, metadata, config)


def load(
    path: PathLike,
    names: Iterable[str] | None = None,
    *,
    format: str | None = None,
    root: str | None = None,
    unknown_globals: str = "refuse",
    dtype: Any = None,
    backend: Backend = "mmap",
    out: Mapping[str, Array] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> dict[str, Any]:
    """Opens a checkpoint, loads it and closes it.

    Args:
        path: see `open`.
        names: see `Checkpoint.load`.
        format: see `open`.
        root: see `open`.
        unknown_globals: see `open`.
        dtype: see `Checkpoint.load`.
        backend: see `Checkpoint.load`.
        out: see `Checkpoint.load`.
        threads: see `Checkpoint.load`.
        progress: see `Checkpoint.load`.

    Returns:
        Name to array, see `Checkpoint.load`.

    Raises:
        SafeloadError, OSError, ValueError: see `open` and `Checkpoint.load`.

    Example:
        >>> import safeload
        >>> safeload.load("tiny-llama", ["model.norm.weight"], dtype="float32")["model.norm.weight"].dtype
        dtype('float32')
    """
    with open(path, format=format, root=root, unknown_globals=unknown_globals) as checkpoint:
        return checkpoint.load(names, dtype=dtype, backend=backend, out=out, threads=threads, progress=progress)
