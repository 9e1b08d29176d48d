"""A tensor in a file: indexing reads it, and unpickling opens its file again."""

from __future__ import annotations

from typing import Any

from ..base import dtypes
from ..base.arrays import Array
from ..base.packing import Packed
from ..base.text import show
from ..engine.load import parse_target
from ..engine.packed_rows import read_index
from ..engine.slice import read_slice
from ..engine.weight_file import WeightFile
from ..errors import UnsupportedError
from ..stores.local import check_unchanged
from . import registry
from .registry import Wanted


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

    def __init__(self, file: WeightFile, index: int, wanted: Wanted) -> None:
        self._file = file
        self._index = index
        self._wanted = wanted
        self.dtype, self.shape, *_ = file.layout(index)

    def _copied(self, seen: tuple[int, ...]) -> tuple[str, tuple[Any, ...], str, tuple[int, ...]]:
        _ = self._file.descriptor  # raises if the file is closed
        return self._file.place, tuple(self._wanted), self._file.table.names[self._index], seen

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_slice, self._copied(tuple(self._file.identity[:2]))

    def __copy__(self) -> TensorSlice:
        return _reopen_slice(*self._copied(self._file.identity))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorSlice:
        return self.__copy__()

    def __getitem__(self, index: Any) -> Array:
        given = index if isinstance(index, tuple) else (index,)
        return read_slice(self._file, self._index, given, "checkpoint[name]")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<TensorSlice {self.dtype} {list(self.shape)}>"


def _reopen_slice(path: str, wanted: tuple[Any, ...], name: str, seen: tuple[int, ...]) -> TensorSlice:
    """Opens the slice of the same file again."""
    options = Wanted(*wanted)
    check_unchanged(path, seen)
    files = registry.open_file(path, options).files
    files[0].check_identity(seen)
    file = next((file for file in files if file.table.find(name) >= 0), files[0])
    return TensorSlice(file, file.table.index(name), options)


def slice_of(file: WeightFile, index: int, wanted: Wanted, dtype: Any, checkpoint: Any) -> TensorSlice:
    """A lazy tensor of a checkpoint.

    Args:
        file: the file that holds it.
        index: its index in the file's table.
        wanted: how the file was opened.
        dtype: floating dtype that a packed tensor is dequantized to; None for float32.
        checkpoint: what it belongs to.

    Raises:
        UnsupportedError: it is int8 or in blocks; ``dtype`` for one that is not packed.
    """
    name, packed = file.table.names[index], file.table.packed(index)
    if packed is not None:
        return PackedSlice(name, packed, parse_target("float32" if dtype is None else dtype), checkpoint)
    if dtype is not None:
        what = "is not packed: dtype= is for packed tensors"
    elif file.table.is_quantized(index):
        what = f"is quantized: checkpoint[{show(name)}]"
        sliced = file.table.scale(index) is not None or len(file.table.shape(index)) > 1
        what += "[2:5] gives rows of it" if sliced else ".dequantize() gives its values"
    else:
        return TensorSlice(file, index, wanted)
    raise UnsupportedError(f"tensor {show(name)} {what}", path=file.path, tensor=name)


class PackedSlice(TensorSlice):
    """A lazy packed tensor: indexing it dequantizes the rows that the first index selects.

    Args:
        name: of the tensor.
        packed: what its codes mean, and where they are.
        row: the dtype of the arrays.
        checkpoint: what it belongs to; it is copied with the slice.
    """

    def __init__(self, name: str, packed: Packed, row: dtypes.Dtype | None, checkpoint: Any) -> None:
        assert row is not None
        self._name, self._packed, self._row, self._checkpoint = name, packed, row, checkpoint
        self.shape = packed.packing.shape
        self.dtype = dtypes.array_dtype(row.number)

    def __reduce__(self) -> tuple[Any, ...]:
        return _slice_of, (self._checkpoint, self._name, self._row.name)

    def __copy__(self) -> PackedSlice:
        return PackedSlice(self._name, self._packed, self._row, self._checkpoint)

    def __getitem__(self, index: Any) -> Array:
        given = index if isinstance(index, tuple) else (index,)
        return read_index(self._packed, given, self.dtype, self._name)


def _slice_of(checkpoint: Any, name: str, dtype: str) -> PackedSlice:
    found: PackedSlice = checkpoint.get_slice(name, dtype=dtype)
    return found
