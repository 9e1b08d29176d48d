"""Subclasses of torch's tensor whose inner tensors are stored: quanto's and torchao's, with codes of 8 bits.

Sources: optimum-quanto ``tensor/qbytes.py``; torchao ``quantize_/workflows``, ``prototype/safetensors``.
"""

from __future__ import annotations

import math

from ..base import packing
from ..base.packing import Grid, Packing
from ..base.text import show
from ..errors import FormatError
from ..stores.json_file import parse_json
from .checks import NUMBERS
from .floats import plain
from .grid import Misfit, Refused
from .packed_group import FP8, PackedGroup, label_of, matrices_of

# Types of torchao that are numbers of 8 bits in the order of the tensor. The others are orders for kernels, or have two
# scales.
_TYPES = frozenset(("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor"))


def quanto(group: PackedGroup) -> Packing:
    """``X._data`` and ``X._scale``, one for each index of the first axis, also of a convolution."""
    shape, scale = group.shape(), group.shape(packing.SCALE)
    if len(shape) < 3:
        return plain(group)
    if scale != (shape[0], *(1 for _ in shape[1:])):
        raise Misfit(f"scales {list(scale)} do not fit codes {list(shape)}: each index of the first axis has one")
    inner, numbers = math.prod(shape[1:]), group.dtype()
    prefix = "fp8" if numbers in FP8 else "int8"
    return group.packing(
        prefix,
        f"{prefix} row",
        shape,
        8,
        numbers,
        matrices=shape[0],
        rows=1,
        columns=inner,
        row_bytes=inner,
        grid=Grid(1, max(1, inner), 1, 1),
    )


def torchao(group: PackedGroup) -> Packing:
    """``X._weight_qdata`` and ``X._weight_scale``, whose axes divide those of the codes into equal blocks."""
    shape, scale, numbers = group.shape(), group.shape(packing.SCALE), group.dtype()
    _check_type(group)
    if group.has_beside("._weight_act_pre_scale"):
        raise Refused("its act_pre_scale multiplies the activations, which its values do not show")
    if group.dtype(packing.SCALE) not in NUMBERS:
        raise Refused(f"scales of {group.dtype(packing.SCALE)} are those of MXTensor, which may be swizzled")
    zeros = group.has(packing.ZERO)
    if zeros and group.shape(packing.ZERO) != scale:
        raise Misfit(f"zero points {list(group.shape(packing.ZERO))} beside scales {list(scale)}")
    grid = _grid(shape, scale)
    prefix = "fp8" if numbers in FP8 else "int8"
    return group.packing(prefix, label_of(prefix, grid, shape, zeros), shape, 8, numbers, grid=grid)


def _grid(shape: tuple[int, ...], scale: tuple[int, ...]) -> Grid:
    _, rows, columns = matrices_of(shape)
    if math.prod(scale) == 1:
        return Grid(max(1, rows), max(1, columns), 1, 1, shared=True)
    down, across = scale[-2:] if len(scale) == len(shape) > 1 else (0, 0)
    if scale[:-2] != shape[:-2] or not down or not across or rows % down or columns % across:
        raise Misfit(f"scales {list(scale)} do not divide codes {list(shape)} into blocks")
    return Grid(max(1, rows // down), max(1, columns // across), down, across)


def _check_type(group: PackedGroup) -> None:
    """Checks the type that the metadata of the file says, if it does: a file that was written again may have lost it.

    Raises:
        Misfit: it is malformed.
        Refused: it is not dequantized.
    """
    text = group.note()
    if text is None:
        return
    try:
        said = parse_json(text.encode(), f"metadata of {show(group.logical)}", "")
    except FormatError as error:
        raise Misfit(str(error.args[0])) from None
    kind = said.get("_type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise Refused(f"{show(kind)} of torchao stores codes in an order for one kernel")
