"""compressed-tensors' sparse formats: the values that are not zero, and a mask of their places.

Sources: compressed-tensors 0.12.2 ``compressors/sparse_compressors`` (`bitmask_decompress`,
`sparse24_bitmask_decompress`), ``utils/helpers.py`` (`pack_bitmasks`), ``model_compressor.py``: values may be the codes
of a quantization.
"""

from __future__ import annotations

from ..base import packing
from ..base.packing import Packing
from ..base.text import show
from .floats import plain
from .grid import Misfit, Refused
from .packed_group import FP8, PackedGroup

# Dtypes of the values. Those of one byte are codes, which have a scale.
NUMBERS = frozenset(("F32", "F16", "BF16"))
CODES = FP8 | {"I8"}
SUFFIX = ".compressed"
# Suffixes of the names of the other parts, the most telling first.
BESIDE = (".bitmask", ".row_offsets", ".shape")
# Of those without which the rest means nothing.
PARTS = (SUFFIX, ".bitmask", ".row_offsets")
# What is before these suffixes: the name of the module, in early versions that of the tensor, which may be a bias.
STEMS = (".weight", ".bias", "")


def owner_of(stem: str) -> str:
    """The name of the tensor whose parts have names that begin so."""
    return stem if stem.endswith(STEMS[:-1]) else f"{stem}.weight"


def bitmask(group: PackedGroup) -> Packing:
    """``X.compressed`` has the values of all rows, ``X.bitmask`` a bit for each place, from the lowest up."""
    if f".{group.logical}".endswith((".weight.weight", ".bias.weight")):
        raise Misfit(f"{show(group.codes)} is not that of a module")  # another row of the table fits better
    shape = _shape_of_pairs(group) if len(group.shape()) == 2 else _shape(group)
    mask = (*shape[:-1], -(-shape[-1] // 8))
    if (group.dtype(packing.MASK), group.shape(packing.MASK)) != ("U8", mask):
        found = f"{group.dtype(packing.MASK)} {list(group.shape(packing.MASK))}"
        raise Misfit(f"bitmask is {found}, but shape {list(shape)} wants U8 {list(mask)}")
    pairs = len(group.shape()) == 2
    if not pairs:
        _check_offsets(group, shape)
    prefix = "sparse 2:4" if pairs else "sparse"
    return _numbers(group, prefix, shape)._replace(
        layout=packing.MASKED, row_bytes=group.shape()[1] * group.element_bytes() if pairs else 0
    )


def _numbers(group: PackedGroup, prefix: str, shape: tuple[int, ...]) -> Packing:
    """What the values are, as if none were left out."""
    numbers = group.dtype()
    if numbers in NUMBERS:
        if group.has(packing.SCALE):
            raise Misfit(f"values are {numbers}, but {show(group.names[packing.SCALE])} is there")
        bits = 8 * group.element_bytes()
        return group.packing("sparse", f"{prefix} {numbers.lower()}", shape, bits, numbers)
    if not group.has(packing.SCALE):
        raise Misfit(f"its values are {numbers} codes, but there is no scale for them")
    packed = plain(group.of_shape(shape))
    if packed.scale_rule != packing.STORED:
        raise Refused("its scales divide the values, which is not computed for sparse tensors")
    return packed._replace(label=f"{prefix} {packed.label}")


def _shape(group: PackedGroup) -> tuple[int, ...]:
    """The logical shape, which a tensor of its own says: a mask has only the number of its bytes."""
    if len(group.shape()) != 1:
        raise Misfit(f"values {list(group.shape())} are neither a list nor a matrix")
    shape = group.integers(packing.SHAPE)
    if len(shape) > 2:
        raise Refused(f"shape {list(shape)} has more than two axes, of which row_offsets do not tell where rows begin")
    if not shape or min(shape) < 0:
        raise Misfit(f"shape {list(shape)} is not that of a weight")
    return shape


def _check_offsets(group: PackedGroup, shape: tuple[int, ...]) -> None:
    if not group.has(packing.OFFSETS):
        raise Misfit("there are no row_offsets")
    form = group.dtype(packing.OFFSETS), group.shape(packing.OFFSETS)
    if form[0] not in ("I64", "I32") or form[1] not in ((shape[:1],) if len(shape) > 1 else ((), (1,))):
        raise Misfit(f"row_offsets is {form[0]} {list(form[1])}, but shape {list(shape)} wants I64 {list(shape[:-1])}")


def _shape_of_pairs(group: PackedGroup) -> tuple[int, int]:
    """The logical shape of rows that store two values of each four."""
    rows, columns = group.shape()[0], 2 * group.shape()[1]
    if columns % 4:
        raise Misfit(f"values {list(group.shape())} are not two of each four columns")
    if group.shape(packing.SHAPE) not in ((2, 1), (2,)) or group.dtype(packing.SHAPE) not in ("I64", "I32"):
        raise Misfit(f"shape is {group.dtype(packing.SHAPE)} {list(group.shape(packing.SHAPE))}, wanted I64 [2, 1]")
    return rows, columns
