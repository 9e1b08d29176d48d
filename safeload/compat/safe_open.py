"""``safe_open`` and its slices, compatible with safetensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import TracebackType
from typing import Any

from ..base.arrays import Array
from ..base.paths import PathLike
from ..base.text import clip, plural, printable
from ..engine.read.load import VIEWED_FROM, Window, check_backend, load_tensors, parse_target
from ..engine.read.tensors import Tensors
from ..engine.run.weight_file import WeightFile
from ..errors import SafetensorError, exported, folder_given, public
from ..formats.safetensors import file as safetensors
from ..stores.local import check_unchanged
from .prefetch import PrefetchLoader, planned_rows
from .safe_slice import Handle, SafeSlice
from .serialize import TensorMeta


@exported()
class safe_open:  # noqa: N801 - safetensors' name
    """An open safetensors file that reads tensors on request.

    The arrays or tensors it returns share no memory with each other, stay valid after `close`, and can be written to
    without changing the file. A `safe_open` can be pickled and copied: the copy opens the same path, and raises
    FormatError if the file has changed.

    Args:
        filename: path of the file.
        framework: "np" or "numpy" for NumPy arrays; "pt", "torch" or "pytorch" for torch tensors; "jax" or "flax" for
            JAX arrays.
        device: device of torch tensors, as torch takes it. Must be "cpu" for arrays; JAX uses its default device.
        backend: "mmap" returns copy-on-write views if possible, "pread" reads into private memory, "direct" also
            bypasses the page cache; see `safeload.load`.

    Raises:
        FileNotFoundError: the file does not exist.
        SafetensorError: the file breaks the format, or the framework, device or backend is invalid or not available.
        ImportError: the framework is not installed.

    Example:
        >>> from safeload import safe_open
        >>> with safe_open("model.safetensors", framework="np") as file:
        ...     names = file.keys()
        ...     bias = file.get_tensor("conv1.bias")
        >>> len(names), bias.shape
        (15, (128,))
    """

    @public
    def __init__(
        self, filename: PathLike, framework: str = "numpy", device: Any = "cpu", *, backend: str = "mmap"
    ) -> None:
        try:
            file = safetensors.open_file(filename)
        except IsADirectoryError as error:
            *_, loads_folders = _FRAMEWORKS.get(str(framework), ("safeload.open",))
            raise folder_given(error.filename, loads_folders) from None
        try:
            self._handle = _handle(framework, device, backend)
        except BaseException:
            file.close()
            raise
        self._file: WeightFile | None = file
        self._backend = backend
        self._window = Window()
        self._arguments = (file.path, framework, device)
        self._handed_out: dict[int, object] = {}  # index of a tensor -> token of the first call to get it
        self._mappings: dict[WeightFile, Any] = {}

    def _opened(self) -> WeightFile:
        if self._file is None:
            raise SafetensorError("File is closed")
        return self._file

    @public
    def keys(self) -> list[str]:
        """Return the names in ascending order."""
        return self._opened().table.sorted_names()

    @public
    def offset_keys(self) -> list[str]:
        """Return the names in file order."""
        return list(self._opened().table.names)

    @public
    def metadata(self) -> dict[str, str] | None:
        """Return the header's ``__metadata__``, or None."""
        metadata = self._opened().table.metadata()
        return None if metadata is None else dict(metadata)

    @public
    def get_tensor(self, name: str) -> Any:
        """Return a tensor of the framework.

        Raises:
            TensorNotFoundError: the name does not exist.
            UnsupportedError: the framework lacks the dtype.
        """
        file = self._opened()
        index = file.table.index(name)
        if self._handle is not None:
            return self._handle.tensor((name, file, index), lambda: self._array(name, file, index))
        return self._array(name, file, index)

    def _array(self, name: str, file: WeightFile, index: int) -> Array:
        entry = file.table.entry(index)
        if entry[3] - entry[2] < VIEWED_FROM[self._backend]:
            return self._window.tensor(file, index, entry)
        # The first call returns a view of the common mapping, later calls map the file anew: two views of one mapping
        # would share memory.
        caller = object()
        first = self._handed_out.setdefault(index, caller) is caller  # atomic: only one of two threads is first
        mappings = self._mappings if first else None
        arrays: dict[str, Array]
        arrays, _ = load_tensors(Tensors([file], [name], [index]), backend=self._backend, mappings=mappings)
        return arrays[name]

    @public
    def get_tensors(self, *, dtype: Any = None, out: Mapping[str, Array] | None = None) -> dict[str, Any]:
        """Return all tensors, in file order.

        Args:
            dtype: dtype to convert floating tensors to, see `safeload.numpy.load_file`.
            out: NumPy arrays to fill, by name, see `safeload.numpy.load_file`.

        Returns:
            Tensors of the framework by name.

        Raises:
            UnsupportedError: the conversion is not supported, or ``dtype`` is given for fp8 with a separate scale,
                which needs `safeload.load`.
            ValueError: an array in ``out`` does not fit.
            FormatError, OSError: the file ends too early, or cannot be read.
        """
        file = self._opened()
        parts = Tensors.in_file(file)
        if dtype is not None:
            from ..packed import finder  # only here: most loads do not need it

            finder.refuse_floating(file, parts, "get_tensors")

        def read() -> dict[str, Array]:
            arrays: dict[str, Array]
            arrays, _ = load_tensors(parts, backend=self._backend, dtype=dtype, out=out)
            return arrays

        return read() if self._handle is None else self._handle.tensors(parts, parse_target(dtype), read)

    @public
    def get_slice(self, name: str) -> SafeSlice:
        """Return a lazy tensor: indexing it reads only the selected elements, ``f.get_slice("h.0.w")[:, :128]``.

        Raises:
            TensorNotFoundError: the name does not exist.
        """
        file = self._opened()
        return SafeSlice(file, file.table.index(name), self._handle)

    @public
    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Return a tensor's header entry: dtype code, logical shape, data_offsets.

        Raises:
            TensorNotFoundError: the name does not exist.
        """
        file = self._opened()
        index = file.table.index(name)
        begin, end = file.table.byte_range(index)
        data = file.table.byte_range(0)[0]
        return TensorMeta(file.table.rows[index].code, list(file.table.shapes[index]), (begin - data, end - data))

    @public
    def prefetch(
        self, plan: Mapping[str, slice | None] | None = None, *, device: Any = None, threads: int = 8
    ) -> PrefetchLoader:
        """Start to load tensors onto a CUDA device in the background.

        The loader reads the file itself: it stays valid after `close`, and several loaders may run at a time.

        Args:
            plan: names of the tensors to load, each with None for all of it or a slice of step 1 along its first axis,
                within its bounds. None loads all tensors.
            device: CUDA device; None for the device of this `safe_open`.
            threads: number of threads that read, each into pinned buffers of up to 16 MiB.

        Returns:
            The tensors by `PrefetchLoader.take`, or by iteration as pairs of name and tensor in order of arrival.

        Raises:
            SafetensorError: the framework is not torch, the device is not a CUDA device or not available, the plan is
                invalid, or the file is closed.
            TensorNotFoundError: the plan names a tensor that does not exist.
            UnsupportedError: torch lacks a dtype.

        Example:
            >>> from safeload import safe_open
            >>> with safe_open("model.safetensors", framework="pt") as file:  # doctest: +SKIP
            ...     with file.prefetch(device="cuda") as loader:
            ...         for name, tensor in loader:
            ...             ...
        """
        file = self._opened()
        arrivals = getattr(self._handle, "arrivals", None)
        if arrivals is None:
            raise SafetensorError('prefetch needs framework="pt"')
        rows = None if plan is None else planned_rows(file, plan)
        return PrefetchLoader(*arrivals(file, rows, device, threads))

    def close(self) -> None:
        """Close the file once no slice needs it. Arrays and slices stay valid."""
        self._file = None
        self._mappings.clear()

    @public
    def __len__(self) -> int:
        return self._opened().table.count

    @public
    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    @public
    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._opened().table.find(name) >= 0

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @classmethod
    @public
    def _reopen(cls, arguments: tuple[Any, ...], backend: str, seen: tuple[int, ...]) -> safe_open:
        check_unchanged(arguments[0], seen)
        opened = cls.__new__(cls)
        safe_open.__init__(opened, *arguments, backend=backend)
        opened._opened().check_identity(seen)
        return opened

    def _copied(self, seen: tuple[int, ...]) -> tuple[tuple[Any, ...], str, tuple[int, ...]]:
        return (self._opened().place, *self._arguments[1:]), self._backend, seen

    @public
    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, self._copied(tuple(self._opened().identity[:2]))

    @public
    def __copy__(self) -> safe_open:
        return self._reopen(*self._copied(self._opened().identity))

    @public
    def __deepcopy__(self, memo: dict[int, Any]) -> safe_open:
        return self.__copy__()

    def __repr__(self) -> str:
        state = "closed" if self._file is None else plural(self._file.table.count, "tensor")
        return f"<{type(self).__name__} {self._arguments[0]!r}: {state}>"


@exported()
class _safe_open_handle(safe_open):  # noqa: N801 - safetensors' name
    """`safe_open` for an open file object, which is reopened by its name, as in safetensors.

    Args:
        f: a file object with ``name`` and ``fileno``. It can be closed afterwards.
        framework: see `safe_open`.
        device: see `safe_open`.
        backend: see `safe_open`.
    """

    @public
    def __init__(self, f: Any, framework: str = "numpy", device: Any = "cpu", *, backend: str = "mmap") -> None:
        _ = f.fileno
        super().__init__(f.name, framework, device, backend=backend)


class AliasSafeOpen(safe_open):
    """`safe_open` in the place of safetensors: TensorFlow, MLX and Paddle get that of the real package."""

    def __new__(cls, filename: PathLike = "", framework: str = "numpy", *arguments: Any, **options: Any) -> Any:
        """Return the real package's object for its frameworks, if the package is installed."""
        from .alias import real_compiled_module

        real = real_compiled_module() if framework in CONVERSIONS else None
        return super().__new__(cls) if real is None else real.safe_open(filename, framework, *arguments, **options)


# The module and class of the `Handle` for each framework other than NumPy, by upstream's names, and the function that
# loads folders.
_TORCH = ("torch_handles", "TorchHandle", "safeload.torch.load_checkpoint")
_JAX = ("jax_loading", "JaxHandle", "safeload.jax.load_checkpoint")
_FRAMEWORKS = {**dict.fromkeys(("pt", "torch", "pytorch"), _TORCH), **dict.fromkeys(("jax", "flax"), _JAX)}
# How to convert NumPy arrays for further frameworks.
CONVERSIONS = {
    **dict.fromkeys(("tf", "tensorflow"), "tf.convert_to_tensor(array), or safetensors.tensorflow"),
    "mlx": "mlx.core.array(array), or safetensors.mlx",
    "paddle": "paddle.to_tensor(array), or safetensors.paddle",
}


def _handle(framework: str, device: Any, backend: str) -> Handle | None:
    """Return the handle for a framework; None for NumPy."""
    if framework in ("np", "numpy"):
        if device not in ("cpu", None):
            raise SafetensorError(
                f'Device {clip(printable(str(device)), 200)} is not supported for framework numpy: use "cpu"'
            )
        check_backend(backend)
        return None
    if framework in _FRAMEWORKS:
        module, name, _ = _FRAMEWORKS[framework]
        handle: Handle = getattr(import_module(f"..frameworks.{module}", __package__), name)(device, backend)
        check_backend(backend)
        return handle
    shown = clip(printable(str(framework)), 200)
    conversion = CONVERSIONS.get(framework)
    if conversion is None:
        raise SafetensorError(f'framework {shown} is invalid: use "numpy", "pt" or "jax"')
    raise SafetensorError(
        f'framework {shown} is not supported: load NumPy arrays with framework="numpy" and use {conversion}'
    )
