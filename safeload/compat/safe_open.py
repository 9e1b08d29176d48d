"""``safe_open``, its slices and its loader in the background, compatible with safetensors."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from ..core import dtypes, memory, safetensors, thread_group
from ..core.arrays import Array
from ..core.files import check_unchanged
from ..core.load import VIEWED_FROM, load_tensors, parse_target
from ..core.slice import as_index, read_slice
from ..core.tensors import FileTensor, Tensors
from ..core.text import PathLike, clip, error_about, plural, printable, show
from ..core.weight_file import WeightFile
from ..errors import RangeError, SafetensorError, exported, public
from .serialize import TensorMeta

# ---- slices ----

# How to use an index that is not supported, as upstream's tensors do.
_WHOLE = "index the whole tensor, as in get_tensor(name)[rows]"


class Handle(Protocol):
    """The framework of `safe_open`: converts the tensors of an open file. Pickles as device and backend."""

    def tensor(self, part: FileTensor, read: Callable[[], Array]) -> Any:
        """Return a tensor. ``read`` returns a writable array that shares memory with no other array."""

    def tensors(
        self, parts: Iterable[FileTensor], target: dtypes.Dtype | None, read: Callable[[], dict[str, Array]]
    ) -> dict[str, Any]:
        """Return tensors by name."""

    def item(self, file: WeightFile, index: int, key: Any, select: Callable[[Any], Array]) -> Any:
        """Return the selected elements of the tensor at ``index`` in the file's table."""


@exported()
class SafeSlice:
    """A lazy tensor: indexing it reads only the selected elements.

    Indexing follows NumPy's basic indexing, with four additional errors of safetensors: a bound or an index past the
    end, a list that is not empty, more indices than axes. With ``framework="pt"`` and a mapped file, indexing follows
    torch.

    Example:
        >>> from safeload import safe_open
        >>> with safe_open("model.safetensors", framework="np") as file:
        ...     rows = file.get_slice("conv1.weight")
        ...     print(rows.get_shape(), rows.get_dtype(), rows[:2].shape)
        [128, 129, 3] F32 (2, 129, 3)
    """

    def __init__(self, file: WeightFile, index: int, handle: Handle | None = None) -> None:
        self._file = file
        self._index = index
        self._handle = handle

    @classmethod
    @public
    def _reopen(cls, path: str, name: str, seen: tuple[int, ...], handle: Handle | None = None) -> SafeSlice:
        check_unchanged(path, seen)
        file = safetensors.open_file(path)
        file.check_identity(seen)
        return cls(file, file.table.index(name), handle)

    def __reduce__(self) -> tuple[Any, ...]:
        file = self._file
        return SafeSlice._reopen, (file.place, file.table.names[self._index], tuple(file.identity[:2]), self._handle)

    @public
    def __copy__(self) -> SafeSlice:
        file = self._file
        return SafeSlice._reopen(file.place, file.table.names[self._index], file.identity, copy.copy(self._handle))

    @public
    def __deepcopy__(self, memo: dict[int, Any]) -> SafeSlice:
        return self.__copy__()

    def get_shape(self) -> list[int]:
        """Return the tensor's logical shape."""
        return list(self._file.table.shapes[self._index])

    def get_dtype(self) -> str:
        """Return the dtype as a safetensors code, such as "F32"."""
        return self._file.table.rows[self._index].code

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor as an array."""
        return self._file.table.layout(self._index).shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the whole tensor as an array."""
        return dtypes.array_dtype(self._file.table.rows[self._index].number)

    @public
    def __getitem__(self, index: Any) -> Any:
        handle = self._handle
        return self._array(index) if handle is None else handle.item(self._file, self._index, index, self._array)

    def _array(self, index: Any) -> Array:
        if isinstance(index, list):
            if index:
                raise SafetensorError("Non empty lists are not implemented")
            index = slice(0, 0)
        items = index if isinstance(index, tuple) else (index,)
        _refuse(items, self.shape)
        try:
            return read_slice(self._file, self._index, items, _WHOLE)
        except IndexError as error:
            raise SafetensorError(str(error)) from None


def _refuse(items: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """Raise the errors of safetensors, with its messages and in its order: from the last axis to the first."""
    rest = [slice(None)] * (len(shape) + 1 - len(items))  # in the place of an ellipsis
    indices = [index for item in items for index in (rest if item is Ellipsis else [item])]
    basic = all(isinstance(item, slice) or as_index(item) is not None for item in indices)
    if not basic or sum(item is Ellipsis for item in items) > 1:
        return  # NumPy's rules apply
    during = f"Error during slicing [{', '.join(map(_show, indices))}] with shape {list(shape)}"
    if len(indices) > len(shape):
        raise SafetensorError(f"{during}: more slicing indexes than dimensions in tensor")
    for axis, (item, size) in enumerate(zip(indices, shape, strict=False)):
        if isinstance(item, slice):
            if item.step == 0:
                raise SafetensorError("Slice step must be a positive integer, got 0")
            item.indices(size)  # a TypeError if a bound is no integer, before it is compared
        elif operator.index(item) < -size:
            raise SafetensorError(f"Invalid index {item} for dimension {axis} of size {size}")
    for axis in reversed(range(len(indices))):
        item, size = indices[axis], shape[axis]
        ends = [(item.start, 0), (item.stop, 1)] if isinstance(item, slice) else [(operator.index(item) + 1, 1)]
        if beyond := [end - past for end, past in ends if end is not None and end > size]:
            text = f"index {beyond[0]} out of bounds for tensor dimension #{axis} of size {size}"
            raise SafetensorError(f"{during}: {text}")


def _show(item: Any) -> str:
    if not isinstance(item, slice):
        return str(item)
    text = ":".join("" if bound is None else str(bound) for bound in (item.start, item.stop))
    return text if item.step in (None, 1) else f"{text}:{item.step}"


# ---- the loader in the background, of safetensors 0.9 ----


@exported()
class PrefetchLoader:
    """Tensors that threads load onto a device in the background. Each is returned once, by `take` or iteration.

    `safe_open.prefetch` makes it. A tensor owns its memory and is ready for use on any stream. Tensors that are not
    taken stay on the device until `close`, the end of a ``with`` block, or the last reference to the loader.

    Args:
        names: of the tensors, in file order.
        arrivals: yields name, tensor, and a function that waits until the tensor's bytes have been copied. It is
            advanced in another thread.

    Example:
        >>> from safeload import safe_open
        >>> with safe_open("model.safetensors", framework="pt") as file:  # doctest: +SKIP
        ...     with file.prefetch({"conv1.bias": None}, device="cuda") as loader:
        ...         bias = loader.take("conv1.bias")
    """

    def __init__(self, names: list[str], arrivals: Generator[tuple[str, Any, Callable[[], object]]]) -> None:
        self._names = names
        self._arrivals = arrivals
        self._left = dict.fromkeys(names)  # not taken
        self._landed: dict[str, tuple[Any, Callable[[], object]]] = {}  # waiting to be taken
        self._lock = threading.Lock()  # of the thread that takes arrivals
        self._closed = False
        # The last task finds the end, where the iterator waits for its copies.
        steps = (thread_group.Task(0, lambda: next(arrivals, None)) for _ in range(len(names) + 1))
        self._arriving = thread_group.Prefetch[tuple[str, Any, Callable[[], object]] | None](steps, 0)
        self._arriving.start()

    def names(self) -> list[str]:
        """Return the names of all tensors that this loader hands out, in file order."""
        return list(self._names)

    @public
    def take(self, name: str) -> Any:
        """Return a tensor, after waiting for its bytes.

        Raises:
            SafetensorError: the name is not in the plan, the tensor was taken before, or the loader is closed.
            FormatError, OSError: the file ends too early, or cannot be read.
        """
        if name not in self._left:
            state = "was already delivered" if name in self._names else "is not in the prefetch plan"
            raise error_about(SafetensorError, state, tensor=name)
        while name not in self._landed and self._land():
            pass
        return self._hand_out(name)

    @public
    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield name and tensor as they arrive, without the tensors that were taken."""
        while self._left:
            name = next(iter(self._landed), None)
            if name is not None:
                yield name, self._hand_out(name)
            elif not self._land():
                return

    def _land(self) -> bool:
        """Wait for the next arrival; return False if another thread got the last one."""
        with self._lock:
            self._check_open()
            try:
                arrival = next(self._arriving, None)
            except ValueError:
                self._check_open()  # closed while this thread waited
                raise
            if arrival is not None:
                self._landed[arrival[0]] = arrival[1:]
        return arrival is not None

    def _hand_out(self, name: str) -> Any:
        self._check_open()
        try:
            tensor, wait = self._landed.pop(name)
        except KeyError:  # another thread was faster
            raise error_about(SafetensorError, "was already delivered", tensor=name) from None
        del self._left[name]
        wait()
        return tensor

    def _check_open(self) -> None:
        if self._closed:
            raise SafetensorError("the prefetch loader is closed")

    def close(self) -> None:
        """Stop loading, and release the tensors that were not taken."""
        self._closed = True
        self._arriving.close()
        self._arrivals.close()  # no thread is in it any more
        self._landed.clear()

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._left)} left"
        return f"<{type(self).__name__}: {plural(len(self._names), 'tensor')}, {state}>"


def planned_rows(file: WeightFile, plan: Mapping[str, slice | None]) -> dict[str, range | None]:
    """Check a plan against a file and return the rows of each tensor; None for the whole tensor."""
    if not isinstance(plan, Mapping):
        raise SafetensorError(f"a prefetch plan maps names to None or a slice, got {type(plan).__name__}")
    rows: dict[str, range | None] = {}
    for name, value in plan.items():
        if not isinstance(name, str):
            raise SafetensorError(f"prefetch plan keys must be tensor names, got {type(name).__name__}")
        index = file.table.index(name)
        if value is not None and not isinstance(value, slice):
            kind = clip(printable(type(value).__name__), 100)
            raise SafetensorError(f"prefetch plan values must be None or a slice, got {kind} for {show(name)}")
        rows[name] = None if value is None else _rows(name, value, file, index)
    if not rows:
        raise SafetensorError("the prefetch plan selects no tensors")
    return rows


def _rows(name: str, value: slice, file: WeightFile, index: int) -> range:
    """Return the rows that a slice of a plan selects. NumPy would clamp bounds; in a plan they are mistakes."""
    shape, (begin, end) = file.table.shape(index), file.table.byte_range(index)
    if not shape:
        raise SafetensorError(f"cannot slice rows of the 0-d tensor {show(name)}")
    sides = ("start", value.start), ("stop", value.stop)
    for side, bound in [(side, bound) for side, bound in sides if bound is not None]:
        if isinstance(bound, bool) or not isinstance(bound, int):
            raise SafetensorError(f"prefetch plan slice bounds for {show(name)} must be integers or None")
        if not -shape[0] <= bound <= shape[0]:
            raise RangeError(
                f"prefetch plan slice {side} {show(bound)} for {show(name)} is out of range for {shape[0]} rows"
            )
    try:
        start, stop, step = value.indices(shape[0])
    except (TypeError, ValueError) as error:
        raise SafetensorError(f"invalid prefetch plan slice for {show(name)}: {error}") from None
    if step != 1:
        raise SafetensorError(f"prefetch plan slices must have step 1, got {show(step)} for {show(name)}")
    if shape[0] and (end - begin) % shape[0]:
        raise SafetensorError(f"cannot slice rows of {show(name)}: a row is not a whole number of bytes")
    return range(start, max(start, stop))


# ---- files ----


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
        file = safetensors.open_file(filename, folders=_FRAMEWORKS.get(str(framework), ("safeload.open",))[-1])
        try:
            self._handle = _handle(framework, device, backend)
        except BaseException:
            file.close()
            raise
        self._file: WeightFile | None = file
        self._backend = backend
        self._window = safetensors.Window()
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
        return (self._file or self._opened()).table.sorted_names()

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
        file = self._file or self._opened()
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
        tensors = Tensors([file], [name], [index])
        array: Array = load_tensors(tensors, backend=self._backend, mappings=mappings)[0][name]
        return array

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
        parts = safetensors.chosen(file, None, dtype, "get_tensors")

        def read() -> dict[str, Array]:
            return load_tensors(parts, backend=self._backend, dtype=dtype, out=out)[0]

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
        return PrefetchLoader(*arrivals(file, None if plan is None else planned_rows(file, plan), device, threads))

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

    def __exit__(self, *exception: object) -> None:
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
_FRAMEWORKS = {
    **dict.fromkeys(("pt", "torch", "pytorch"), ("torch_devices", "TorchHandle", "safeload.torch.load_checkpoint")),
    **dict.fromkeys(("jax", "flax"), ("jax_arrays", "JaxHandle", "safeload.jax.load_checkpoint")),
}
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
        handle: Handle | None = None
    elif framework in _FRAMEWORKS:
        module, name, _ = _FRAMEWORKS[framework]
        handle = getattr(import_module(f"..frameworks.{module}", __package__), name)(device, backend)
    else:
        why = 'invalid: use "numpy", "pt" or "jax"'
        if framework in CONVERSIONS:
            why = f'not supported: load NumPy arrays with framework="numpy" and use {CONVERSIONS[framework]}'
        raise SafetensorError(f"framework {clip(printable(str(framework)), 200)} is {why}")
    memory.check_backend(backend)
    return handle
