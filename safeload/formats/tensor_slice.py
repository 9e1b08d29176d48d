"""A tensor in a file: indexing reads it, and unpickling opens its file again."""

from __future__ import annotations

from typing import Any

from ..base import dtypes
from ..base.arrays import Array
from ..base.packing import Packed
from ..base.text import error_about
from ..engine.codes.quantized_tensor import dequantize_index, read_index
from ..engine.read.load import parse_target
from ..engine.run.cast import astype
from ..engine.run.slice import TAKE, read_slice
from ..engine.run.weight_file import WeightFile
from ..errors import UnsupportedError, exported, public
from . import registry
from .registry import OpenRequest


@exported()
class TensorSlice:
    """A tensor of a file, not read yet. Basic NumPy indexing reads only the selected elements.

    Pickling stores the path of the file, as for a `Checkpoint`.

    Attributes:
        shape: of the loaded tensor.
        dtype: of the loaded tensor.

    Example:
        >>> import safeload
        >>> head = safeload.open("tiny-llama").get_slice("lm_head.weight")
        >>> head.shape, head[-2:, ::16].shape
        ((96, 64), (2, 4))
    """

    def __init__(self, file: WeightFile, index: int, request: OpenRequest, target: dtypes.Dtype | None = None) -> None:
        self._file = file
        self._index = index
        self._request = request
        self._target = target
        self.dtype, self.shape, *_ = file.table.layout(index)
        if target is not None:
            self.dtype = dtypes.array_dtype(target.number)

    def _copied(self, seen: tuple[int, ...]) -> tuple[str, tuple[Any, ...], str, tuple[int, ...], str | None]:
        self._file.check_open()
        dtype = None if self._target is None else self._target.name
        return self._file.place, tuple(self._request), self._file.table.names[self._index], seen, dtype

    @classmethod
    @public
    def _reopen(
        cls, path: str, request: tuple[Any, ...], name: str, seen: tuple[int, ...], dtype: str | None
    ) -> TensorSlice:
        options = OpenRequest(*request)
        files = registry.reopen_file(path, seen, options).files
        file = next((file for file in files if file.table.find(name) >= 0), files[0])
        return cls(file, file.table.index(name), options, parse_target(dtype))

    @classmethod
    @public
    def _of(cls, checkpoint: Any, name: str, dtype: str) -> TensorSlice:
        tensor: TensorSlice = checkpoint.get_slice(name, dtype=dtype)
        return tensor

    @public
    def __reduce__(self) -> tuple[Any, ...]:
        place, *arguments = self._copied(tuple(self._file.identity[:2]))
        return TensorSlice._reopen, (self._file.files.public(place), *arguments)

    @public
    def __copy__(self) -> TensorSlice:
        return TensorSlice._reopen(*self._copied(self._file.identity))

    @public
    def __deepcopy__(self, memo: dict[int, Any]) -> TensorSlice:
        return self.__copy__()

    @public
    def __getitem__(self, index: Any) -> Array:
        indices = index if isinstance(index, tuple) else (index,)
        values = read_slice(self._file, self._index, indices, TAKE)
        return values if self._target is None else astype(values, self.dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<TensorSlice {self.dtype} {list(self.shape)}>"


def slice_of(file: WeightFile, index: int, request: OpenRequest, dtype: Any, checkpoint: Any) -> TensorSlice:
    """Return a lazy tensor; ``dtype`` converts floating and packed tensors, and packed tensors default to float32."""
    file.table.refuse_unknown([index], file.path)
    name, packed, target = file.table.names[index], file.table.packed.get(index), parse_target(dtype)
    if packed is not None or file.table.is_quantized(index):
        shape = file.table.shape(index) if packed is None else packed.packing.shape
        return QuantizedSlice(name, shape, packed, target or parse_target("float32"), checkpoint)
    row = file.table.row(index)
    if target is not None and row.packed:
        text = f"is {row.code}, whose elements share bytes: load it with dtype= and slice the array"
        raise error_about(UnsupportedError, text, path=file.path, tensor=name)
    return TensorSlice(file, index, request, target if row.floating else None)


class QuantizedSlice(TensorSlice):
    """A lazy quantized tensor: indexing it dequantizes the rows of the first index."""

    def __init__(
        self, name: str, shape: tuple[int, ...], packed: Packed | None, row: dtypes.Dtype | None, checkpoint: Any
    ) -> None:
        assert row is not None
        # `packed` is None for int8 and blocks; the checkpoint is pickled with the slice.
        self._name, self._packed, self._row, self._checkpoint = name, packed, row, checkpoint
        self.shape = shape
        self.dtype = dtypes.array_dtype(row.number)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorSlice._of, (self._checkpoint, self._name, self._row.name)

    def __copy__(self) -> QuantizedSlice:
        return QuantizedSlice(self._name, self.shape, self._packed, self._row, self._checkpoint)

    @public
    def __getitem__(self, index: Any) -> Array:
        indices = index if isinstance(index, tuple) else (index,)
        if self._packed is None:
            return dequantize_index(self._checkpoint[self._name], indices, self.dtype)
        return read_index(self._packed, indices, self.dtype, self._name)
