"""``safe_open`` and its slices, compatible with safetensors."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from ..base import dtypes
from ..base.arrays import Array
from ..base.paths import PathLike
from ..base.text import clip, plural, printable
from ..engine.jobs import read_small
from ..engine.load import check_backend, load_parts, parts_of
from ..engine.slice import as_index, read_slice
from ..engine.weight_file import WeightFile
from ..errors import SafetensorError
from ..formats.safetensors import file as safetensors
from ..stores.local import check_unchanged
from .serialize import TensorMeta

# Tensors below this size are read: a view would save less than the mapping costs.
_VIEWED_FROM = 64 << 10


class safe_open:  # noqa: N801 - safetensors' name
    """An open safetensors file; tensors are read on request.

    No two arrays that it returns share memory, and writing into one changes no file. Arrays stay valid after `close`.
    It can be pickled and copied: the copy opens the same path, and refuses a file that has changed since.

    Args:
        filename: path of the file.
        framework: "np" or "numpy".
        device: "cpu".
        backend: "mmap" for copy-on-write views where possible, "pread" to read into private memory.

    Raises:
        FileNotFoundError: the file does not exist.
        SafetensorError: the file breaks the format, or the framework or device is not numpy's.

    Example:
        >>> from safeload import safe_open
        >>> with safe_open("model.safetensors", framework="np") as file:
        ...     names = file.keys()
        ...     bias = file.get_tensor("conv1.bias")
        >>> len(names), bias.shape
        (15, (128,))
    """

    def __init__(
        self, filename: PathLike, framework: str = "numpy", device: str | int | None = "cpu", *, backend: str = "mmap"
    ) -> None:
        file = safetensors.open_file(filename)
        try:
            _check_framework(framework, device)
            check_backend(backend)
        except BaseException:
            file.close()
            raise
        self._file: WeightFile | None = file
        self._backend = backend
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

    def get_tensor(self, name: str) -> Array:
        """One tensor.

        Raises:
            TensorNotFoundError: there is no such tensor.
        """
        file = self._opened()
        index = file.table.index(name)
        layout = file.layout(index)
        if layout.end - layout.begin < _VIEWED_FROM:
            return read_small(file, layout)
        # The first call returns a view. Later ones read: another view of the same bytes would share memory with it.
        caller = object()
        first = self._handed_out.setdefault(index, caller) is caller  # atomic: of two threads only one is first
        backend = self._backend if first else "pread"
        arrays: dict[str, Array]
        arrays, _ = load_parts([(name, file, index)], backend=backend, mappings=self._mappings)
        return arrays[name]

    def get_tensors(self, *, dtype: Any = None, out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """All tensors, in the order of their bytes.

        Args:
            dtype: dtype that floating tensors are converted to, see `safeload.numpy.load_file`.
            out: arrays to fill, by name, see `safeload.numpy.load_file`.

        Returns:
            Name to array.

        Raises:
            UnsupportedError: an unsupported conversion; ``dtype`` for fp8 with a separate scale, which only
                `safeload.load` brings together.
            ValueError: an array of ``out`` that does not fit.
            FormatError, OSError: the file ends too early, or cannot be read.
        """
        file = self._opened()
        parts = parts_of(file)
        if dtype is not None:
            from ..packed import grouping  # only here: most loads do not need it

            grouping.refuse_floating(file, parts, "get_tensors")
        return load_parts(parts, backend=self._backend, dtype=dtype, out=out)[0]

    def get_slice(self, name: str) -> SafeSlice:
        """A lazy tensor: indexing it reads only the selected elements, as in ``f.get_slice("h.0.w")[:, :128]``.

        Raises:
            TensorNotFoundError: there is no such tensor.
        """
        file = self._opened()
        return SafeSlice(file, file.table.index(name))

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

    def __init__(
        self, f: Any, framework: str = "numpy", device: str | int | None = "cpu", *, backend: str = "mmap"
    ) -> None:
        _ = f.fileno
        super().__init__(f.name, framework, device, backend=backend)


def _reopen(kind: type[safe_open], arguments: tuple[Any, ...], backend: str, seen: tuple[int, ...]) -> safe_open:
    check_unchanged(arguments[0], seen)
    opened = kind.__new__(kind)
    safe_open.__init__(opened, *arguments, backend=backend)
    opened._opened().check_identity(seen)
    return opened


# torch.from_numpy refuses the dtypes of ml_dtypes.
_TORCH = (
    "torch.from_numpy(array), for bfloat16 torch.from_numpy(array.view(np.int16)).view(torch.bfloat16), "
    "or safetensors.torch"
)
# How to convert arrays for other frameworks, by upstream's names of these.
_OTHERS = {
    **dict.fromkeys(("pt", "torch", "pytorch"), _TORCH),
    **dict.fromkeys(("tf", "tensorflow"), "tf.convert_to_tensor(array), or safetensors.tensorflow"),
    **dict.fromkeys(("jax", "flax"), "jax.numpy.asarray(array), or safetensors.flax"),
    "mlx": "mlx.core.array(array), or safetensors.mlx",
    "paddle": "paddle.to_tensor(array), or safetensors.paddle",
}


def _check_framework(framework: str, device: str | int | None) -> None:
    named = clip(printable(str(framework)), 200)
    if framework not in ("np", "numpy"):
        instead = _OTHERS.get(framework)
        if instead is None:
            raise SafetensorError(f'framework {named} is invalid: safeload gives numpy arrays, use "numpy"')
        raise SafetensorError(f'framework {named}: safeload gives numpy arrays. Use framework="numpy" and {instead}')
    if device not in ("cpu", None):
        raise SafetensorError(
            f'Device {clip(printable(str(device)), 200)} is not supported for framework numpy: use "cpu"'
        )


class SafeSlice:
    """A lazy tensor: indexing it reads only the selected elements.

    Indexing follows numpy's basic indexing, except for four errors that safetensors raises and its tests assert: a
    bound or an index past the end, a list that is not empty, more indices than axes.

    Example:
        >>> from safeload import safe_open
        >>> with safe_open("model.safetensors", framework="np") as file:
        ...     rows = file.get_slice("conv1.weight")
        ...     print(rows.get_shape(), rows.get_dtype(), rows[:2].shape)
        [128, 129, 3] F32 (2, 129, 3)
    """

    def __init__(self, file: WeightFile, index: int) -> None:
        self._file = file
        self._index = index

    def __reduce__(self) -> tuple[Any, ...]:
        file = self._file
        return _reopen_slice, (file.place, file.table.names[self._index], tuple(file.identity[:2]))

    def __copy__(self) -> SafeSlice:
        return _reopen_slice(self._file.place, self._file.table.names[self._index], self._file.identity)

    def __deepcopy__(self, memo: dict[int, Any]) -> SafeSlice:
        return self.__copy__()

    def get_shape(self) -> list[int]:
        """Logical shape of the tensor."""
        return list(self._file.table.shapes[self._index])

    def get_dtype(self) -> str:
        """Its safetensors code, such as "F32"."""
        return self._file.table.rows[self._index].code

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of the whole tensor."""
        return self._file.layout(self._index).shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array of the whole tensor."""
        return dtypes.array_dtype(self._file.table.rows[self._index].number)

    def __getitem__(self, index: Any) -> Array:
        if isinstance(index, list):
            if index:
                raise SafetensorError("Non empty lists are not implemented")
            index = slice(0, 0)
        items = index if isinstance(index, tuple) else (index,)
        _refuse(items, self.shape)
        try:
            return read_slice(self._file, self._index, items, "get_tensor(name)")
        except IndexError as error:
            raise SafetensorError(str(error)) from None


def _reopen_slice(path: str, name: str, seen: tuple[int, ...]) -> SafeSlice:
    check_unchanged(path, seen)
    file = safetensors.open_file(path)
    file.check_identity(seen)
    return SafeSlice(file, file.table.index(name))


def _refuse(items: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """Raises the errors of safetensors, with its messages and in its order: from the last axis to the first."""
    if any(item is None for item in items) or sum(item is Ellipsis for item in items) > 1:
        return  # numpy's rules apply
    given = [item for item in items if item is not Ellipsis]
    where = next((k for k, item in enumerate(items) if item is Ellipsis), len(items))
    full = [slice(None)] * (len(shape) - len(given)) if where < len(items) else []
    given[where:where] = full
    if not all(isinstance(item, slice) or as_index(item) is not None for item in given):
        return
    during = f"Error during slicing [{', '.join(map(_show, given))}] with shape {list(shape)}"
    if len(given) > len(shape):
        raise SafetensorError(f"{during}: more slicing indexes than dimensions in tensor")
    for axis, (item, size) in enumerate(zip(given, shape, strict=False)):
        if not isinstance(item, slice) and operator.index(item) < -size:
            raise SafetensorError(f"Invalid index {item} for dimension {axis} of size {size}")
    for axis in reversed(range(len(given))):
        item, size = given[axis], shape[axis]
        asked = None
        if not isinstance(item, slice):
            asked = operator.index(item) if operator.index(item) >= size else None
        elif item.start is not None and item.start > size:
            asked = item.start
        elif item.stop is not None and item.stop > size:
            asked = item.stop - 1
        if asked is not None:
            raise SafetensorError(f"{during}: index {asked} out of bounds for tensor dimension #{axis} of size {size}")


def _show(item: Any) -> str:
    if not isinstance(item, slice):
        return str(item)
    text = ":".join("" if bound is None else str(bound) for bound in (item.start, item.stop))
    return text if item.step in (None, 1) else f"{text}:{item.step}"
