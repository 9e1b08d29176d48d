"""Private helpers of ``safetensors.numpy`` that other libraries call."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, as_array, byteswapped
from ..base.text import show
from ..engine.run import jobs
from ..engine.run.atomic_file import written_as_is
from ..engine.run.memory import address_of
from ..formats.safetensors import parse_table
from .serialize import TensorSpec

# NumPy types by safetensors code. Programs add and replace entries, which `retyped` and `view2np` honor.
TYPES: dict[str, Any] = {
    row.code: bool if row.code == "BOOL" else dtypes.array_dtype(row.number).type
    for row in dtypes.SAFETENSORS
    if not row.packed
}
_STANDARD = dict(TYPES)


def getdtype(code: str) -> Any:
    """Return the NumPy type for a safetensors code, or raise KeyError."""
    return TYPES[code]


def flatten(tensor_dict: Mapping[str, Any], keep_alive_buffer: list[Any]) -> dict[str, TensorSpec]:
    """Describe arrays for `safeload.serialize`; copies in file order go to ``keep_alive_buffer``."""
    specs = {}
    for name, value in tensor_dict.items():
        array = as_array(value, name)
        dtype = dtypes.of_array(array, name).name
        if not written_as_is(array):
            array = array.copy(order="C") if is_little_endian(array) else byteswapped(array.copy(order="C"))
            keep_alive_buffer.append(array)
        specs[name] = TensorSpec(dtype=dtype, shape=array.shape, data_ptr=address_of(array), data_len=array.nbytes)
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
    _, table = parse_table(data)
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
