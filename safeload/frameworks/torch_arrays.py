"""Arrays as tensors of torch and tensors as memory to write, without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, foreign_order
from ..base.table import Table
from ..base.text import clip, printable, show
from ..engine.read.lazy import Lazy
from ..engine.read.plan import Entry
from ..errors import InvalidDeviceError, MissingDeviceError, UnsupportedDtypeError, UnsupportedError
from ..formats.safetensors.file import Memory
from .absent import not_installed

try:
    import torch as torch  # other modules import it from here, for the message
except ImportError as error:
    raise not_installed(error, "torch", "PyTorch") from error.__cause__

Tensor = torch.Tensor
Device = torch.device
Module = torch.nn.Module

# What torch calls a dtype where that is not the table's name. The elements of this one are pairs.
_NAMES = {"float4_e2m1fn": "float4_e2m1fn_x2"}

# Torch's dtypes by safetensors code; an older torch lacks some of them.
TYPES: dict[str, Any] = {
    row.code: found
    for row in dtypes.TABLE
    if isinstance(found := getattr(torch, _NAMES.get(row.name, row.name), None), torch.dtype)
}
# Bytes of an element, by dtype; of two for the packed one.
SIZES: dict[Any, int] = {dtype: max(1, dtypes.BY_CODE[code].bits // 8) for code, dtype in TYPES.items()}
_ROWS: dict[Any, dtypes.Dtype] = {dtype: dtypes.BY_CODE[code] for code, dtype in TYPES.items()}

# `torch.from_numpy` refuses the dtypes of ml_dtypes: their arrays go through integers of the same size.
_INTEGERS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.int16)}
_OF_NUMPY = frozenset("?bBhHiIlLqQefdF")

# How arrays of a dtype become tensors: the dtype that they are viewed as, or None, and that of the tensor.
_Way = tuple["np.dtype[Any] | None", Any]
_ways: dict[np.dtype[Any], _Way] = {}


# ---- from arrays ----


def from_arrays(arrays: Mapping[str, Array], raw: Mapping[str, dtypes.Dtype] | None = None) -> dict[str, Any]:
    """Tensors on the CPU over the memory of arrays; each has a storage of its own, of its own size.

    Args:
        arrays: writable arrays by name.
        raw: rows of the dtype table of those that hold raw bytes: see `raw_of`.

    Raises:
        UnsupportedError: torch does not have a dtype.
    """
    from_numpy, ways = torch.from_numpy, _ways
    tensors = {}
    for name, array in arrays.items():
        way = ways.get(array.dtype)
        if way is None or not array.size or raw:
            tensors[name] = from_array(array, name, raw.get(name) if raw else None)
        elif way[0] is None:
            tensors[name] = from_numpy(array)
        else:
            tensors[name] = from_numpy(array.view(way[0])).view(way[1])
    return tensors


def from_array(array: Array, name: str, raw: dtypes.Dtype | None = None) -> Any:
    """A tensor on the CPU over the memory of an array, or over a copy if the array is read-only.

    Args:
        array: of any layout with strides that are not negative.
        name: of the tensor, for messages.
        raw: the row of its dtype if the array shows raw bytes.

    Raises:
        UnsupportedError: torch does not have its dtype.
    """
    way = _way(array.dtype, name) if raw is None else (array.dtype, torch_dtype(raw, name))
    if not array.size:  # `from_numpy` gives it strides of 0
        return torch.empty(array.shape, dtype=way[1], device="cpu")
    if not array.flags.writeable:
        array = array.copy()
    if way[0] is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(way[0])).view(way[1])


def _way(dtype: np.dtype[Any], name: str) -> _Way:
    known = _ways.get(dtype)
    if known is not None:
        return known
    integers = None if dtype.char in _OF_NUMPY else _INTEGERS[dtype.itemsize]
    way = _ways[dtype] = integers, torch_dtype(dtypes.BY_NAME[dtype.name], name)
    return way


def torch_dtype(row: dtypes.Dtype, name: str) -> Any:
    """Torch's dtype for a row of the dtype table.

    Raises:
        UnsupportedError: torch does not have it.
    """
    found = TYPES.get(row.code)
    if found is None:
        raise UnsupportedError(
            f'tensor {show(name)} is {row.code}, which torch {torch.__version__} does not have: pass dtype="float32" '
            "to decode it",
            tensor=name,
        )
    return found


def raw_of(tensors: Iterable[tuple[str, Table, int]]) -> dict[str, dtypes.Dtype]:
    """The rows of the dtype table of tensors that arrays show as raw bytes, by name.

    Args:
        tensors: name, table and index there of tensors that are not converted.

    Raises:
        UnsupportedError: torch cannot show one: an F6 dtype, or an odd number of F4 elements along the last axis.
    """
    raw: dict[str, dtypes.Dtype] = {}
    for name, table, index in tensors:
        row = table.row(index)
        if row.packed:
            raw[name] = row
            shape_of(name, row, table.shape(index))
    return raw


def shape_of(name: str, row: dtypes.Dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in torch of a tensor with a logical shape.

    Raises:
        UnsupportedError: see `raw_of`.
    """
    if not row.packed:
        return shape
    torch_dtype(row, name)
    if not shape or shape[-1] % row.block:
        raise UnsupportedError(
            f"tensor {show(name)} is {row.code} {list(shape)}, and torch has only pairs of it along the last axis: "
            'pass dtype="float32" to decode it',
            tensor=name,
        )
    return (*shape[:-1], shape[-1] // row.block)


def described(entry: Entry) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the tensor that an entry becomes.

    Args:
        entry: of a tensor that does not stay in parts.

    Raises:
        UnsupportedError: torch cannot show it, see `raw_of`.
    """
    assert entry.target is not None
    row = dtypes.BY_NUMBER[entry.target]
    dtype, shape = torch_dtype(row, entry.name), entry.shape
    if row.packed:  # an array shows its bytes
        shape = shape_of(entry.name, row, entry.file.table.shape(entry.at))
    return shape, dtype


def without_data(entries: Iterable[Entry]) -> dict[str, Any]:
    """Tensors on the device "meta", which have a dtype and a shape; nothing is read.

    Raises:
        UnsupportedError: torch does not have a dtype.
    """
    each = ((entry.name, described(entry)) for entry in entries)
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in each}


# ---- to memory ----


def memory_of(name: str, tensor: Any, keep: list[Any]) -> Memory | Array | Lazy:
    """What the writer of safetensors takes for a dense, contiguous tensor; that of a device is copied when written.

    Args:
        name: of the tensor.
        tensor: on any device; one whose conjugate or negative bit is set is saved with the values that it shows.
        keep: gets what must live until the memory has been written.

    Raises:
        UnsupportedDtypeError: safetensors does not have its dtype.
        NotImplementedError: it is on the device "meta", and has no values.
    """
    row = row_of(name, tensor)
    if tensor.device.type != "cpu" and not row.packed:
        return Lazy(dtypes.array_dtype(row.number), tuple(tensor.shape), lambda: to_array(resolved(tensor.to("cpu"))))
    tensor = resolved(tensor.to("cpu"))
    keep.append(tensor)
    if foreign_order(False) and row.swap > 1:
        return to_array(tensor)  # the writer swaps its bytes
    shape = tuple(tensor.shape)
    if row.packed and shape:
        shape = (*shape[:-1], shape[-1] * row.block)
    return Memory(row, shape, tensor.data_ptr(), tensor.numel() * SIZES[tensor.dtype])


def row_of(name: str, tensor: Any) -> dtypes.Dtype:
    """Return the dtype table's row for a tensor that has values.

    Raises:
        UnsupportedDtypeError, NotImplementedError: see `memory_of`.
    """
    row = _ROWS.get(tensor.dtype)
    if row is None:
        message = dtypes.not_stored(str(tensor.dtype).removeprefix("torch."), name).args[0]
        raise UnsupportedDtypeError(message, tensor=name)
    if tensor.device.type == "meta":
        raise NotImplementedError(f"tensor {show(name)}: Cannot copy out of meta tensor, which has no values")
    return row


def resolved(tensor: Any) -> Any:
    """The tensor with the values that it shows in memory."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def to_array(tensor: Any) -> Array:
    """An array over the memory of a tensor on the CPU. F4 tensors become raw uint8.

    Args:
        tensor: of a dtype that safetensors has.
    """
    row = _ROWS[tensor.dtype]
    dtype = dtypes.array_dtype(row.number)
    tensor = tensor.detach()
    if dtype.char not in _OF_NUMPY or row.packed:
        tensor = tensor.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    array: Array = tensor.numpy()
    return array if array.dtype == dtype else array.view(dtype)


# ---- devices ----


def device_of(device: Any) -> Any:
    """The device that an argument names; None for the CPU.

    Args:
        device: name, number or `torch.device`; None for the CPU.

    Raises:
        InvalidDeviceError: it does not name a device.
        MissingDeviceError: this torch or this machine lacks the device.
    """
    if device is None or (isinstance(device, str) and device == "cpu"):
        return None
    shown = clip(printable(str(device)), 200)
    if isinstance(device, bool) or not isinstance(device, (str, int, Device)):
        raise InvalidDeviceError(f"device {shown} is invalid: expected a name, a number or a torch.device")
    try:
        found = torch.device(device)
    except (RuntimeError, OverflowError, ValueError) as error:
        if isinstance(device, int) and device >= 0:
            raise MissingDeviceError(f"device {shown} is not available: {_first_sentence(error)}") from None
        raise InvalidDeviceError(f"device {shown} is invalid: {_first_sentence(error)}") from None
    if found.type == "cpu":
        if found.index:
            raise InvalidDeviceError(f"device {shown} is invalid: the CPU is one device")
        return None
    if found.type != "meta":
        try:
            torch.empty(0, device=found)
        except Exception as error:  # an AssertionError where torch was built without it, others elsewhere
            raise MissingDeviceError(f"device {shown} is not available: {_first_sentence(error)}") from None
    return found


def _first_sentence(error: Exception) -> str:
    """The first sentence of a message: those of torch go on with advice about builds and lists of backends."""
    return clip(printable(str(error).strip().partition("\n")[0].partition(". ")[0]), 200) or type(error).__name__
