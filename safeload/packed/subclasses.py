"""Inner tensors of torch.Tensor subclasses, with 8-bit codes: quanto and torchao.

Sources: optimum-quanto ``tensor/qbytes.py``; torchao ``quantize_/workflows``, ``prototype/safetensors``.
"""

from __future__ import annotations

import math

from ..base import packing
from ..base.packing import Grid, Packing
from ..base.text import show
from ..errors import FormatError
from ..stores.json_file import parse_json
from .families import FP8, Family
from .floats import plain
from .packed_group import NUMBERS, Misfit, PackedGroup, Refused, matrices_of, one_scale

# torchao's types with 8-bit numbers in the order of the tensor. Other types are in kernel order, or have two scales.
_TYPES = frozenset(("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor"))


def quanto(group: PackedGroup) -> Packing:
    """``X._data`` and ``X._scale``, one per index of the first axis, for linear layers and convolutions."""
    shape, scale = group.stored, group.scales
    if len(shape) < 3:
        return plain(group)
    if scale != (shape[0], *(1 for _ in shape[1:])):
        raise Misfit(f"scales {list(scale)} do not fit codes {list(shape)}: expected one per index of the first axis")
    inner = math.prod(shape[1:])
    grid, label = Grid(1, max(1, inner), 1, 1), f"{group.prefix} row"
    return group.in_bytes(grid, label=label, matrices=shape[0], rows=1, columns=inner, row_bytes=inner)


def torchao(group: PackedGroup) -> Packing:
    """``X._weight_qdata`` and ``X._weight_scale``, for any parameter; scales divide the codes into equal blocks."""
    shape = group.stored
    _check_type(group)
    if packing.FACTORS in group.parts:
        raise Refused("its act_pre_scale multiplies the activations, so weights alone do not give the model's results")
    if group.scale_code not in NUMBERS:
        raise Refused(f"its {group.scale_code} scales look like MXTensor's, which can be swizzled")
    zeros = group.has_zeros()
    return group.in_bytes(_grid(shape, group.scales), zeros=zeros)


def _grid(shape: tuple[int, ...], scale: tuple[int, ...]) -> Grid:
    _, rows, columns = matrices_of(shape)
    if math.prod(scale) == 1:
        return one_scale(shape, shared=True)
    down, across = scale[-2:] if len(scale) == len(shape) > 1 else (0, 0)
    if scale[:-2] != shape[:-2] or not down or not across or rows % down or columns % across:
        raise Misfit(f"scales {list(scale)} do not divide codes {list(shape)} into equal blocks")
    return Grid(max(1, rows // down), max(1, columns // across), down, across)


def _check_type(group: PackedGroup) -> None:
    """Check the type in the metadata of the file; rewritten files can have lost it."""
    text = group.context.note(group.codes, group.logical)
    if text is None:
        return
    try:
        description = parse_json(text.encode(), f"metadata of {show(group.logical)}", "")
    except FormatError as error:
        raise Misfit(str(error.args[0])) from None
    kind = description.get("_type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise Refused(f"torchao's {show(kind)} stores codes in the order of one kernel")


FAMILIES = [
    Family("quanto", "._data", FP8 | {"I8"}, {packing.SCALE: ("._scale",)}, quanto, logical=""),
    Family(
        "torchao",
        "_qdata",
        FP8 | {"I8"},
        {packing.SCALE: ("_scale",)},
        torchao,
        {packing.ZERO: ("_zero_point",), packing.FACTORS: ("_act_pre_scale",)},
        logical="",
        private=True,
    ),
]
