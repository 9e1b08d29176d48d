"""``serialize``, ``serialize_file`` and ``deserialize``, compatible with safetensors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..core import arrays, dtypes, resident
from ..core.safetensors import FileWriter, TensorToWrite
from ..core.text import PathLike, show
from ..errors import SafetensorError, exported, public


@exported()
class TensorMeta(NamedTuple):
    """The header entry of a tensor in a safetensors file.

    Attributes:
        dtype: safetensors code, such as "F4".
        shape: logical shape, even for packed dtypes, whose arrays show bytes.
        data_offsets: byte range from the end of the header, as stated there.

    Example:
        >>> from safeload import safe_open
        >>> with safe_open("model.safetensors", framework="np") as file:
        ...     file.get_tensor_meta("conv1.bias")
        TensorMeta(dtype='F32', shape=[128], data_offsets=(462336, 462848))
    """

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@exported()
class TensorSpec:
    """A description of memory to serialize, for `serialize` and `serialize_file`.

    The caller must keep the memory alive and unchanged until these return.

    Args:
        dtype: NumPy or torch name, such as "float32" or "float4_e2m1fn_x2".
        shape: elements per axis. For "float4_e2m1fn_x2" the last axis counts bytes of two elements, as in torch; the
            property `shape` is the logical shape.
        data_ptr: address of the C-contiguous little-endian data.
        data_len: size of the data in bytes.

    Raises:
        SafetensorError: the dtype is unknown, or the shape overflows.

    Example:
        >>> import numpy as np
        >>> from safeload import TensorSpec
        >>> x = np.zeros((2, 3), np.float32)
        >>> spec = TensorSpec(dtype="float32", shape=x.shape, data_ptr=x.ctypes.data, data_len=x.nbytes)
        >>> spec.dtype, spec.shape, spec.data_len
        ('F32', [2, 3], 24)
    """

    __slots__ = ("_memory",)

    @public
    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        if not isinstance(dtype, str):
            raise TypeError(f"dtype must be str, got {type(dtype).__name__}")
        pairs = dtype == "float4_e2m1fn_x2"
        row = dtypes.BY_CODE["F4"] if pairs else dtypes.BY_NAME.get(dtype)
        if row not in dtypes.SAFETENSORS or (row.code == "F4" and not pairs):
            names = [r.name if r.code != "F4" else "float4_e2m1fn_x2" for r in dtypes.SAFETENSORS]
            raise SafetensorError(f"Unknown dtype {show(dtype)}. Supported dtypes: {', '.join(names)}")
        dims = [_index(dim, "shape") for dim in shape]
        if pairs and dims:
            dims[-1] *= 2
            if dims[-1] >= 1 << 64:
                raise SafetensorError(f"shape: {dims[-1]} elements of F4 in the last axis do not fit in 64 bits")
        pointer, size = _index(data_ptr, "data_ptr"), _index(data_len, "data_len")
        self._memory = TensorToWrite(row, dims, size, None, pointer)

    @property
    def dtype(self) -> str:
        """Safetensors code, such as "F32"."""
        return self._memory.row.code

    @property
    def shape(self) -> list[int]:
        """Logical shape, as stored in the header."""
        return list(self._memory.shape)

    @property
    def data_ptr(self) -> int:
        """Address of the data."""
        return self._memory.address

    @property
    def data_len(self) -> int:
        """Size of the data in bytes."""
        return self._memory.nbytes

    def __repr__(self) -> str:
        return (
            f"TensorSpec(dtype={self.dtype!r}, shape={self.shape}, data_ptr={self.data_ptr}, data_len={self.data_len})"
        )


def _index(value: int, argument: str) -> int:
    """Return a value as an unsigned 64-bit integer; raise TypeError or OverflowError for anything else."""
    number = operator.index(value)
    if not 0 <= number < 1 << 64:
        raise OverflowError(f"{argument} must be in 0..2^64-1, got {number}")
    return number


@public
def deserialize(bytes: Any) -> list[tuple[str, dict[str, Any]]]:
    """Parse a safetensors file in memory, like ``safetensors.deserialize``.

    Args:
        bytes: any C-contiguous bytes-like object.

    Returns:
        ``[(name, {"shape": [...], "dtype": "F32", "data": bytearray}), ...]`` in file order.

    Raises:
        FormatError: the bytes break the format.

    Example:
        >>> import numpy as np
        >>> from safeload import deserialize
        >>> from safeload.numpy import save
        >>> deserialize(save({"x": np.uint8([65, 66])}))
        [('x', {'shape': [2], 'dtype': 'U8', 'data': bytearray(b'AB')})]
    """
    view, table = resident.parse_table(bytes)
    return [
        (name, {"shape": list(shape), "dtype": row.code, "data": bytearray(view[begin:end])})
        for name, shape, row, (begin, end) in zip(
            table.names, table.shapes, table.rows, table.byte_ranges(), strict=True
        )
    ]


def _entries(tensor_dict: Mapping[str, TensorSpec]) -> dict[str, TensorToWrite]:
    """Return the writer's input for these descriptions."""
    arrays.check_mapping(tensor_dict, "tensors", "names to TensorSpec")
    for name, spec in tensor_dict.items():
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"tensor {show(name)} must be a TensorSpec, got {type(spec).__name__}")
    return {name: spec._memory for name, spec in tensor_dict.items()}


@public
def serialize(tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Serialize described memory to the bytes of a safetensors file.

    Args:
        tensor_dict: descriptions by name. The caller must keep the memory alive and unchanged.
        metadata: str to str, for the header. Keys are sorted.

    Returns:
        The file's content.

    Raises:
        TypeError: a value is not a `TensorSpec`.
        SafetensorError: a length does not fit its shape, or the format cannot store a name.

    Example:
        >>> import numpy as np
        >>> from safeload import TensorSpec, serialize
        >>> x = np.zeros((2, 3), np.float32)
        >>> spec = TensorSpec(dtype="float32", shape=x.shape, data_ptr=x.ctypes.data, data_len=x.nbytes)
        >>> serialize({"x": spec}, {"step": "100"})[8:39]
        b'{"__metadata__":{"step":"100"},'
    """
    return FileWriter(_entries(tensor_dict), metadata).to_bytes()


@public
def serialize_file(
    tensor_dict: Mapping[str, TensorSpec], filename: PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Write described memory to a safetensors file, atomically and durably.

    Args:
        tensor_dict: descriptions by name. The caller must keep the memory alive and unchanged.
        filename: see `safeload.numpy.save_file`.
        metadata: str to str, for the header. Keys are sorted.

    Raises:
        TypeError: a value is not a `TensorSpec`.
        SafetensorError: a length does not fit its shape, or the format cannot store a name.
        OSError: the file cannot be written, and the old file is still there. Also a SafetensorError.

    Example:
        >>> import numpy as np
        >>> from safeload import TensorSpec, serialize_file
        >>> from safeload.numpy import load_file
        >>> x = np.ones((2, 3), np.float32)
        >>> spec = TensorSpec(dtype="float32", shape=x.shape, data_ptr=x.ctypes.data, data_len=x.nbytes)
        >>> serialize_file({"x": spec}, "x.safetensors")
        >>> load_file("x.safetensors")["x"].sum()
        np.float32(6.0)
    """
    FileWriter(_entries(tensor_dict), metadata).to_file(filename)
