"""Weight files of tensors in boxes: see stores/assembled.py for the notion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..base import dtypes
from ..base.listed_table import ListedTable, Listing, unreadable
from ..base.table import Unknown
from ..engine.run.weight_file import WeightFile
from ..stores.assembled import AssembledStore, Box, checked
from ..stores.store import ByteStore


class BoxedListing(NamedTuple):
    """A tensor of a file with boxes."""

    row: dtypes.Dtype
    shape: tuple[int, ...]  # as torch counts: bytes on the last axis if elements share them
    boxes: Sequence[Box]
    flat: bool = False  # boxes divide the elements as a vector, not the axes
    unknown: Unknown | None = None  # the tensor cannot be read, and has no boxes
    fill: bytes | None = None  # of an element in no box; None if boxes cover the tensor


def itemsize_of(row: dtypes.Dtype) -> int:
    """Return the bytes of an element as torch counts them: a byte if several elements share it."""
    return max(1, row.bits // 8)


def logical_shape(row: dtypes.Dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in elements, of a shape with bytes on its last axis if elements share them."""
    return (*shape[:-1], shape[-1] * 8 // row.bits) if row.packed and shape else shape


def assemble(
    file: WeightFile,
    folder: str,
    tensors: Mapping[str, BoxedListing],
    stores: Sequence[ByteStore],
    *,
    metadata: Mapping[str, Any] | None = None,
    named_globals: Mapping[str, bool] | None = None,
) -> WeightFile:
    """Return the file of tensors in boxes in the place of ``file``, which is closed and should not be used again."""
    path = file.files.shown(folder)
    boxed = boxed_file(file, path, tensors, stores, metadata=metadata, named_globals=named_globals)
    file.close()
    return boxed


def boxed_file(
    file: WeightFile,
    path: str,
    tensors: Mapping[str, BoxedListing],
    stores: Sequence[ByteStore],
    *,
    metadata: Mapping[str, Any] | None = None,
    named_globals: Mapping[str, bool] | None = None,
) -> WeightFile:
    """Return a file of tensors in boxes, which stands for ``file``; ``file`` stays open."""
    boxed = []
    for name, (row, shape, boxes, flat, _, fill) in tensors.items():
        count = 1
        for length in shape if flat else ():
            count *= length
        boxed.append(checked(name, (count,) if flat else shape, itemsize_of(row), boxes, path, fill=fill))
    store = AssembledStore(path, boxed, stores, file.identity)
    listings = (
        _listing(name, tensor, whole.begin, whole.begin + whole.nbytes)
        for (name, tensor), whole in zip(tensors.items(), boxed, strict=True)
    )
    opened = WeightFile(path, store, ListedTable(listings, metadata, named_globals=named_globals))
    opened.stand_for(file, unpacked=False)
    return opened


def _listing(name: str, tensor: BoxedListing, begin: int, end: int) -> Listing:
    if tensor.unknown is None:
        return Listing(name, tensor.row, logical_shape(tensor.row, tensor.shape), begin, end)
    label, shape, reason, is_tensor, _ = tensor.unknown
    return unreadable(name, label, shape, reason, begin=begin, end=end, is_tensor=is_tensor)
