"""A tensor in a file: indexing reads it, and unpickling opens its file again."""

from __future__ import annotations

from typing import Any

from ..base import dtypes
from ..base.arrays import Array
from ..base.packing import Packed
from ..base.text import show
from ..engine.codes.packed_rows import read_index
from ..engine.codes.quantized_tensor import dequantize_index
from ..engine.read.load import parse_target
from ..engine.run.cast import astype
from ..engine.run.slice import read_slice
from ..engine.run.weight_file import WeightFile
from ..errors import UnsupportedError
from ..stores.files import rather_changed
from . import registry
from .registry import OpenRequest


class TensorSlice:
    """A tensor that has not been read. Basic indexing as in numpy reads only the elements that it returns.

    It is pickled as the path of its file, as a `Checkpoint` is.

    Attributes:
        shape: of the array that loading the whole tensor returns.
        dtype: of that array.

    Example:
        >>> import safeload
        >>> head = safeload.open("tiny-llama").get_slice("lm_head.weight")
        >>> head.shape, head[-2:, ::16].shape
        ((96, 64), (2, 4))
    """

    def __init__(self, file: WeightFile, index: int, wanted: OpenRequest, target: dtypes.Dtype | None = None) -> None:
        self._file = file
        self._index = index
        self._wanted = wanted
        self._target = target
        self.dtype, self.shape, *_ = file.layout(index)
        if target is not None:
            self.dtype = dtypes.array_dtype(target.number)

    def _copied(self, seen: tuple[int, ...]) -> tuple[str, tuple[Any, ...], str, tuple[int, ...], str | None]:
        self._file.check_open()
        dtype = None if self._target is None else self._target.name
        return self._file.place, tuple(self._wanted), self._file.table.names[self._index], seen, dtype

    def __reduce__(self) -> tuple[Any, ...]:
        place, *how = self._copied(tuple(self._file.identity[:2]))
        return _reopen_slice, (self._file.files.public(place), *how)

    def __copy__(self) -> TensorSlice:
        return _reopen_slice(*self._copied(self._file.identity))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorSlice:
        return self.__copy__()

    def __getitem__(self, index: Any) -> Array:
        given = index if isinstance(index, tuple) else (index,)
        values = read_slice(self._file, self._index, given, "checkpoint[name]")
        return values if self._target is None else astype(values, self.dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<TensorSlice {self.dtype} {list(self.shape)}>"


def _reopen_slice(
    path: str, wanted: tuple[Any, ...], name: str, seen: tuple[int, ...], dtype: str | None
) -> TensorSlice:
    """Opens the slice of the same file again."""
    options = OpenRequest(*wanted)
    options.files.check_unchanged(path, seen)
    with rather_changed(options.files, [(path, seen)]):
        files = registry.open_file(path, options).files
    files[0].check_identity(seen)
    file = next((file for file in files if file.table.find(name) >= 0), files[0])
    return TensorSlice(file, file.table.index(name), options, parse_target(dtype))


def slice_of(file: WeightFile, index: int, wanted: OpenRequest, dtype: Any, checkpoint: Any) -> TensorSlice:
    """A lazy tensor of a checkpoint.

    Args:
        file: the file that holds it.
        index: its index in the file's table.
        wanted: how the file was opened.
        dtype: floating dtype that a floating tensor is converted to, and a packed one dequantized; None to convert
            nothing, and for a packed one float32.
        checkpoint: what it belongs to.

    Raises:
        UnsupportedError: ``dtype`` for elements of less than a byte.
    """
    file.table.refuse_unknown([index], file.path)
    name, packed, target = file.table.names[index], file.table.packed(index), parse_target(dtype)
    if packed is not None or file.table.is_quantized(index):
        shape = file.table.shape(index) if packed is None else packed.packing.shape
        return QuantizedSlice(name, shape, packed, target or parse_target("float32"), checkpoint)
    row = file.table.row(index)
    if target is not None and row.packed:
        what = f"is {row.code}, whose elements share bytes: load it with dtype= and slice the array"
        raise UnsupportedError(f"tensor {show(name)} {what}", path=file.path, tensor=name)
    return TensorSlice(file, index, wanted, target if row.floating else None)


class QuantizedSlice(TensorSlice):
    """A lazy quantized tensor: indexing it dequantizes the rows that the first index selects.

    Args:
        name: of the tensor.
        shape: of the tensor.
        packed: what its codes mean, and where they are; None for int8 and blocks.
        row: the dtype of the arrays.
        checkpoint: what it belongs to; it is copied with the slice.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], packed: Packed | None, row: dtypes.Dtype | None, checkpoint: Any
    ) -> None:
        assert row is not None
        self._name, self._packed, self._row, self._checkpoint = name, packed, row, checkpoint
        self.shape = shape
        self.dtype = dtypes.array_dtype(row.number)

    def __reduce__(self) -> tuple[Any, ...]:
        return _slice_of, (self._checkpoint, self._name, self._row.name)

    def __copy__(self) -> QuantizedSlice:
        return QuantizedSlice(self._name, self.shape, self._packed, self._row, self._checkpoint)

    def __getitem__(self, index: Any) -> Array:
        given = index if isinstance(index, tuple) else (index,)
        if self._packed is None:
            return dequantize_index(self._checkpoint[self._name], given, self.dtype)
        return read_index(self._packed, given, self.dtype, self._name)


def _slice_of(checkpoint: Any, name: str, dtype: str) -> QuantizedSlice:
    found: QuantizedSlice = checkpoint.get_slice(name, dtype=dtype)
    return found
