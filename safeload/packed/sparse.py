"""compressed-tensors' sparse formats: the nonzero values and a mask of their positions.

Sources: compressed-tensors 0.12.2 ``compressors/sparse_compressors`` (`bitmask_decompress`,
`sparse24_bitmask_decompress`), ``utils/helpers.py`` (`pack_bitmasks`), ``model_compressor.py``: values can be the codes
of a quantization.
"""

from __future__ import annotations

from ..base import packing
from ..base.packing import Packing
from ..base.text import show
from .families import SPARSE_NUMBERS
from .floats import plain
from .grid import Misfit, Refused
from .packed_group import PackedGroup


def bitmask(group: PackedGroup) -> Packing:
    """``X.compressed`` holds the values of all rows, ``X.bitmask`` a bit per position, lowest bit first."""
    if f".{group.logical}".endswith((".weight.weight", ".bias.weight")):
        raise Misfit(f"{show(group.codes)} belongs to a tensor, not to a module")  # another family fits better
    shape = _shape_of_pairs(group) if len(group.shape()) == 2 else _shape(group)
    mask = (*shape[:-1], -(-shape[-1] // 8))
    if (group.dtype(packing.MASK), group.shape(packing.MASK)) != ("U8", mask):
        form = f"{group.dtype(packing.MASK)} {list(group.shape(packing.MASK))}"
        raise Misfit(f"bitmask is {form}, expected U8 {list(mask)} for shape {list(shape)}")
    pairs = len(group.shape()) == 2
    if not pairs:
        _check_offsets(group, shape)
    prefix = "sparse 2:4" if pairs else "sparse"
    return _numbers(group, prefix, shape)._replace(
        layout=packing.MASKED, row_bytes=group.shape()[1] * group.element_bytes() if pairs else 0
    )


def _numbers(group: PackedGroup, prefix: str, shape: tuple[int, ...]) -> Packing:
    """Return the packing of the values as if all were stored."""
    numbers = group.dtype()
    if numbers in SPARSE_NUMBERS:
        if group.has(packing.SCALE):
            raise Misfit(f"{numbers} values must not have a scale, got {show(group.names[packing.SCALE])}")
        bits = 8 * group.element_bytes()
        return group.packing("sparse", f"{prefix} {numbers.lower()}", shape, bits, numbers)
    if not group.has(packing.SCALE):
        raise Misfit(f"its values are {numbers} codes, but their scale is missing")
    packed = plain(group.of_shape(shape))
    if packed.scale_rule != packing.STORED:
        raise Refused("its scales divide the values, which safeload does not compute for sparse tensors")
    return packed._replace(label=f"{prefix} {packed.label}")


def _shape(group: PackedGroup) -> tuple[int, ...]:
    """Return the logical shape from its own tensor: the mask only implies its number of bytes."""
    if len(group.shape()) != 1:
        raise Misfit(f"values must be a list or a matrix, got shape {list(group.shape())}")
    shape = group.integers(packing.SHAPE)
    if len(shape) > 2:
        raise Refused(f"shape {list(shape)} has more than two axes, and row_offsets locate only the rows of a matrix")
    if not shape or min(shape) < 0:
        raise Misfit(f"shape {list(shape)} is not the shape of a weight")
    return shape


def _check_offsets(group: PackedGroup, shape: tuple[int, ...]) -> None:
    if not group.has(packing.OFFSETS):
        raise Misfit("its row_offsets are missing")
    form = group.dtype(packing.OFFSETS), group.shape(packing.OFFSETS)
    if form[0] not in ("I64", "I32") or form[1] not in ((shape[:1],) if len(shape) > 1 else ((), (1,))):
        raise Misfit(
            f"row_offsets is {form[0]} {list(form[1])}, expected I64 {list(shape[:-1])} for shape {list(shape)}"
        )


def _shape_of_pairs(group: PackedGroup) -> tuple[int, int]:
    """Return the logical shape if rows store two of every four values."""
    rows, columns = group.shape()[0], 2 * group.shape()[1]
    if columns % 4:
        raise Misfit(f"values {list(group.shape())} are not two of every four columns")
    if group.shape(packing.SHAPE) not in ((2, 1), (2,)) or group.dtype(packing.SHAPE) not in ("I64", "I32"):
        raise Misfit(f"shape is {group.dtype(packing.SHAPE)} {list(group.shape(packing.SHAPE))}, expected I64 [2, 1]")
    return rows, columns
