"""Private helpers of ``safetensors.numpy`` and ``safetensors.torch`` that other libraries call.

They stand apart from `serialize`, because the table of types imports ml_dtypes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..core import atomic_file, dtypes, jobs, native, resident
from ..core.arrays import Array, as_array, byteswapped, foreign_order
from ..core.safetensors import TensorToWrite
from ..core.text import show
from .serialize import TensorSpec

# ---- helpers of safetensors.numpy ----

# NumPy types by safetensors code. Programs add and replace entries, which `retyped` and `view2np` honor.
TYPES: dict[str, Any] = {
    row.code: bool if row.code == "BOOL" else dtypes.array_dtype(row.number).type
    for row in dtypes.SAFETENSORS
    if not row.packed
}
_STANDARD = dict(TYPES)
getdtype = TYPES.__getitem__


def flatten(tensor_dict: Mapping[str, Any], keep_alive_buffer: list[Any]) -> dict[str, TensorSpec]:
    """Describe arrays for `safeload.serialize`; copies in file order go to ``keep_alive_buffer``."""
    specs = {}
    for name, value in tensor_dict.items():
        array = as_array(value, name)
        dtype = dtypes.of_array(array, name).name
        if not atomic_file.written_as_is(array):
            array = array.copy(order="C") if is_little_endian(array) else byteswapped(array.copy(order="C"))
            keep_alive_buffer.append(array)
        address = native.address_of(array)
        specs[name] = TensorSpec(dtype=dtype, shape=array.shape, data_ptr=address, data_len=array.nbytes)
    return specs


def is_little_endian(tensor: Array) -> bool:
    """Return whether an array's elements are little-endian, which single bytes are."""
    order = tensor.dtype.byteorder
    return sys.byteorder == "little" if order == "=" else order != ">"


def view2np(safeview: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Array]:
    """Return arrays over the memory in the result of `safeload.deserialize`."""
    arrays = {}
    for name, entry in safeview:
        row, shape, data = dtypes.BY_CODE[entry["dtype"]], tuple(entry["shape"]), entry["data"]
        array = np.frombuffer(data, dtypes.array_dtype(row.number))
        array = jobs.native_order(array.reshape(dtypes.array_shape(row, shape, len(data))))
        arrays[name] = _retyped(name, array, row.code, TYPES)
    return arrays


def retyped(data: Any, arrays: dict[str, Array], types: Mapping[str, Any]) -> dict[str, Array]:
    """Return the arrays of a file in memory, with types a program has set in ``_TYPES``."""
    if types == _STANDARD:
        return arrays
    _, table = resident.parse_table(data)
    codes = {name: row.code for name, row in zip(table.names, table.rows, strict=True)}
    return {name: _retyped(name, array, codes[name], types) for name, array in arrays.items()}


def _retyped(name: str, array: Array, code: str, types: Mapping[str, Any]) -> Array:
    kind = types.get(code)
    if kind is None or kind is _STANDARD.get(code):
        return array
    dtype = np.dtype(kind)
    if dtype.itemsize != array.dtype.itemsize:
        raise ValueError(
            f"tensor {show(name)} is {code}, {array.dtype.itemsize} bytes per element: _TYPES[{code!r}] has "
            f"{dtype.itemsize}"
        )
    return array.view(dtype)


# ---- helpers of safetensors.torch, which import torch ----


def flatten_as_ptr(tensors: dict[str, Any], keep_alive_buffer: list[Any]) -> dict[str, TensorSpec]:
    """Describe tensors for `safeload.serialize`; objects to keep alive go to ``keep_alive_buffer``."""
    from ..frameworks import torch_arrays

    specs = {}
    for name, entry in torch_arrays.to_write(tensors, keep_alive_buffer).items():
        tensor = tensors[name]
        if not isinstance(entry, TensorToWrite):  # on a big-endian machine
            entry = np.ascontiguousarray(entry.byteswap())
            keep_alive_buffer.append(entry)
        address = entry.address if isinstance(entry, TensorToWrite) else native.address_of(entry)
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs[name] = TensorSpec(dtype=dtype, shape=tensor.shape, data_ptr=address, data_len=entry.nbytes)
    return specs


def view2torch(tensors: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return tensors over the memory in the result of `safeload.deserialize`."""
    from ..frameworks import torch_arrays

    result = {}
    for name, entry in tensors:
        row, shape = dtypes.BY_CODE[entry["dtype"]], tuple(entry["shape"])
        array = np.frombuffer(entry["data"], dtypes.array_dtype(row.number))
        shape, dtype = torch_arrays.described(name, row, shape)
        array = jobs.native_order(array.reshape(shape))
        result[name] = torch_arrays.from_array(array, name, dtype if row.packed else None)
    return result


def to_ndarray(tensor: Any) -> tuple[Array, Any]:
    """Return a tensor's bytes, flat and in file order, and the owner of the bytes."""
    from ..frameworks import torch_arrays

    torch_arrays.row_of("<unnamed>", tensor)
    tensor = torch_arrays.resolved(tensor.detach().to("cpu")).contiguous()
    array = torch_arrays.to_array(tensor)
    if foreign_order(False):
        array = byteswapped(array)
    return array.reshape(-1).view(np.uint8), tensor
