"""Private helpers of ``safetensors.torch`` that other libraries call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, byteswapped, foreign_order
from ..engine.run import jobs
from ..engine.run.memory import address_of
from ..formats.safetensors import Memory
from ..frameworks import torch_arrays
from .serialize import TensorSpec

# Torch's small float dtypes; None if this version of torch lacks the dtype.
FLOAT4_E2M1_X2 = torch_arrays.TYPES.get("F4")
FLOAT8_E4M3FN = torch_arrays.TYPES.get("F8_E4M3")
FLOAT8_E4M3FNUZ = torch_arrays.TYPES.get("F8_E4M3FNUZ")
FLOAT8_E5M2 = torch_arrays.TYPES.get("F8_E5M2")
FLOAT8_E5M2FNUZ = torch_arrays.TYPES.get("F8_E5M2FNUZ")
FLOAT8_E8M0 = torch_arrays.TYPES.get("F8_E8M0")


def flatten_as_ptr(tensors: dict[str, Any], keep_alive_buffer: list[Any]) -> dict[str, TensorSpec]:
    """Describe tensors for `safeload.serialize`; objects to keep alive go to ``keep_alive_buffer``."""
    specs = {}
    for name, entry in torch_arrays.to_write(tensors, keep_alive_buffer).items():
        tensor = tensors[name]
        if not isinstance(entry, Memory):  # on a big-endian machine
            entry = np.ascontiguousarray(entry.byteswap())
            keep_alive_buffer.append(entry)
        address = entry.address if isinstance(entry, Memory) else address_of(entry)
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs[name] = TensorSpec(dtype=dtype, shape=tensor.shape, data_ptr=address, data_len=entry.nbytes)
    return specs


def getdtype(code: str) -> Any:
    """Return torch's dtype for a safetensors code, or raise KeyError."""
    return torch_arrays.TYPES[code]


def view2torch(tensors: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return tensors over the memory in the result of `safeload.deserialize`."""
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
    torch_arrays.row_of("<unnamed>", tensor)
    tensor = torch_arrays.resolved(tensor.detach().to("cpu")).contiguous()
    array = torch_arrays.to_array(tensor)
    if foreign_order(False):
        array = byteswapped(array)
    return array.reshape(-1).view(np.uint8), tensor
