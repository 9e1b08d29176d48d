"""``safe_open`` and its slices, compatible with safetensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..base.arrays import Array
from ..base.paths import PathLike
from ..base.text import clip, plural, printable
from ..engine.read.load import VIEWED_FROM, Window, check_backend, load_tensors, parse_target
from ..engine.read.tensors import Tensors
from ..engine.run.weight_file import WeightFile
from ..errors import SafetensorError
from ..formats.safetensors import file as safetensors
from ..stores.local import check_unchanged
from .safe_slice import SafeSlice
from .serialize import TensorMeta

if TYPE_CHECKING:
    from ..frameworks.handle import Handle


class safe_open:  # noqa: N801 - safetensors' name
    """An open safetensors file; tensors are read on request.

    No two arrays or tensors that it returns share memory, and writing into one changes no file. They stay valid after
    `close`.
    It can be pickled and copied: the copy opens the same path, and refuses a file that has changed since.

    Args:
        filename: path of the file.
        framework: "np" or "numpy" for arrays; "pt", "torch" or "pytorch" for tensors of torch; "jax" or "flax" for
            arrays of JAX.
        device: of tensors, as torch takes it; "cpu" for arrays, which JAX has on its default device.
        backend: "mmap" for copy-on-write views where possible, "pread" to read into private memory,
            "direct" to do so past the page cache, see `safeload.load`.

    Raises:
        FileNotFoundError: the file does not exist.
        SafetensorError: the file breaks the format; a framework that is not supported, a device that is invalid or not
            available.
        ImportError: the framework is not installed.

    Example:
        >>> from safeload import safe_open
        >>> with safe_open("model.safetensors", framework="np") as file:
        ...     names = file.keys()
        ...     bias = file.get_tensor("conv1.bias")
        >>> len(names), bias.shape
        (15, (128,))
    """

    def __init__(
        self, filename: PathLike, framework: str = "numpy", device: Any = "cpu", *, backend: str = "mmap"
    ) -> None:
        file = safetensors.open_file(filename)
        try:
            self._handle = _handle(framework, device, backend)
        except BaseException:
            file.close()
            raise
        self._file: WeightFile | None = file
        self._backend = backend
        self._window = Window()
        self._arguments = (file.path, framework, device)
        self._handed_out: dict[int, object] = {}  # index of a tensor to a token of the call that got it first
        self._mappings: dict[WeightFile, Any] = {}

    def _opened(self) -> WeightFile:
        if self._file is None:
            raise SafetensorError("File is closed")
        return self._file

    def keys(self) -> list[str]:
        """Names in ascending order."""
        return self._opened().table.sorted_names()

    def offset_keys(self) -> list[str]:
        """Names in the order of the bytes."""
        return list(self._opened().table.names)

    def metadata(self) -> dict[str, str] | None:
        """``__metadata__`` of the header; None when there is none."""
        metadata = self._opened().table.metadata()
        return None if metadata is None else dict(metadata)

    def get_tensor(self, name: str) -> Any:
        """One tensor, as array or as tensor of the framework.

        Raises:
            TensorNotFoundError: there is no such tensor.
            UnsupportedError: the framework does not have its dtype.
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
        # The first call returns a view of the common mapping, each later one that of a new mapping: views of the same
        # bytes of one mapping would share memory.
        caller = object()
        first = self._handed_out.setdefault(index, caller) is caller  # atomic: of two threads only one is first
        mappings = self._mappings if first else None
        arrays: dict[str, Array]
        arrays, _ = load_tensors(Tensors([file], [name], [index]), backend=self._backend, mappings=mappings)
        return arrays[name]

    def get_tensors(self, *, dtype: Any = None, out: Mapping[str, Array] | None = None) -> dict[str, Any]:
        """All tensors, in the order of their bytes.

        Args:
            dtype: dtype that floating tensors are converted to, see `safeload.numpy.load_file`.
            out: arrays of numpy to fill, by name, see `safeload.numpy.load_file`.

        Returns:
            Name to array, or to tensor of the framework.

        Raises:
            UnsupportedError: an unsupported conversion; ``dtype`` for fp8 with a separate scale, which only
                `safeload.load` brings together.
            ValueError: an array of ``out`` that does not fit.
            FormatError, OSError: the file ends too early, or cannot be read.
        """
        file = self._opened()
        parts = Tensors.in_file(file)
        if dtype is not None:
            from ..packed import codes_without_scale  # only here: most loads do not need it

            codes_without_scale.refuse_floating(file, parts, "get_tensors")

        def read() -> dict[str, Array]:
            arrays: dict[str, Array]
            arrays, _ = load_tensors(parts, backend=self._backend, dtype=dtype, out=out)
            return arrays

        return read() if self._handle is None else self._handle.tensors(parts, parse_target(dtype), read)

    def get_slice(self, name: str) -> SafeSlice:
        """A lazy tensor: indexing it reads only the selected elements, as in ``f.get_slice("h.0.w")[:, :128]``.

        Raises:
            TensorNotFoundError: there is no such tensor.
        """
        file = self._opened()
        return SafeSlice(file, file.table.index(name), self._handle)

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """The header entry of a tensor: dtype code, logical shape, data_offsets.

        Raises:
            TensorNotFoundError: there is no such tensor.
        """
        file = self._opened()
        index = file.table.index(name)
        begin, end = file.table.byte_range(index)
        data = file.table.byte_range(0)[0]
        return TensorMeta(file.table.rows[index].code, file.table.shapes[index], (begin - data, end - data))

    def close(self) -> None:
        """Closes the file once no slice needs it; arrays and slices stay valid."""
        self._file = None
        self._mappings.clear()

    def __len__(self) -> int:
        return self._opened().table.count

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._opened().table.find(name) >= 0

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _copied(self, seen: tuple[int, ...]) -> tuple[type[safe_open], tuple[Any, ...], str, tuple[int, ...]]:
        return type(self), (self._opened().place, *self._arguments[1:]), self._backend, seen

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, self._copied(tuple(self._opened().identity[:2]))

    def __copy__(self) -> safe_open:
        return _reopen(*self._copied(self._opened().identity))

    def __deepcopy__(self, memo: dict[int, Any]) -> safe_open:
        return self.__copy__()

    def __repr__(self) -> str:
        state = "closed" if self._file is None else plural(self._file.table.count, "tensor")
        return f"<{type(self).__name__} {self._arguments[0]!r}: {state}>"


class _safe_open_handle(safe_open):  # noqa: N801 - safetensors' name
    """`safe_open` for an open file object; only its name is used, as in safetensors.

    Args:
        f: a file object with ``name`` and ``fileno``; it may be closed afterwards.
        framework: see `safe_open`.
        device: see `safe_open`.
        backend: see `safe_open`.
    """

    def __init__(self, f: Any, framework: str = "numpy", device: Any = "cpu", *, backend: str = "mmap") -> None:
        _ = f.fileno
        super().__init__(f.name, framework, device, backend=backend)


def _reopen(kind: type[safe_open], arguments: tuple[Any, ...], backend: str, seen: tuple[int, ...]) -> safe_open:
    check_unchanged(arguments[0], seen)
    opened = kind.__new__(kind)
    safe_open.__init__(opened, *arguments, backend=backend)
    opened._opened().check_identity(seen)
    return opened


# Frameworks besides numpy by upstream's names, each with the module and the class that give its tensors.
_HANDLES = {
    **dict.fromkeys(("pt", "torch", "pytorch"), ("torch_handles", "TorchHandle")),
    **dict.fromkeys(("jax", "flax"), ("jax_handles", "JaxHandle")),
}
# How to convert arrays for other frameworks.
_OTHERS = {
    **dict.fromkeys(("tf", "tensorflow"), "tf.convert_to_tensor(array), or safetensors.tensorflow"),
    "mlx": "mlx.core.array(array), or safetensors.mlx",
    "paddle": "paddle.to_tensor(array), or safetensors.paddle",
}


def _handle(framework: str, device: Any, backend: str) -> Handle | None:
    """What gives the tensors of a framework; None for numpy.

    Raises:
        SafetensorError: the framework, the device or the backend is invalid.
        ImportError: the framework is not installed.
    """
    if framework in ("np", "numpy"):
        if device not in ("cpu", None):
            raise SafetensorError(
                f'Device {clip(printable(str(device)), 200)} is not supported for framework numpy: use "cpu"'
            )
        check_backend(backend)
        return None
    if framework in _HANDLES:
        module, name = _HANDLES[framework]
        handle: Handle = getattr(import_module(f"..frameworks.{module}", __package__), name)(device, backend)
        check_backend(backend)
        return handle
    named = clip(printable(str(framework)), 200)
    instead = _OTHERS.get(framework)
    if instead is None:
        raise SafetensorError(f'framework {named} is invalid: use "numpy", "pt" or "jax"')
    raise SafetensorError(f'framework {named}: safeload gives numpy arrays. Use framework="numpy" and {instead}')
