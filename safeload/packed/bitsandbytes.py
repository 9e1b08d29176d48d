"""bitsandbytes: 4-bit codes in blocks of the flat tensor, and LLM.int8.

GPTQModel stores both under its own names: "weight_absmax" for "weight.absmax", "weight_quant_state" for every kind,
"weight_scb" for "SCB".

Sources: bitsandbytes ``functional.py`` (`QuantState.as_dict`, `dequantize_4bit`, `int8_vectorwise_dequant`),
``nn/modules.py`` (`Params4bit`, `Linear8bitLt`); GPTQModel ``nn_modules/qlinear/bitsandbytes.py``,
``utils/model_dequant.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..base import packing
from ..base.packing import Grid, Packing
from ..base.text import show
from ..errors import FormatError
from ..stores.json_file import parse_json
from .families import GPTQMODEL_PARTS, GPTQMODEL_STATE, STATE_PARTS, STATES
from .grid import Misfit, Refused, matrices_of
from .packed_group import MOST, NUMBERS, PackedGroup
from .quantization import is_length

# Values per scale, or scales per nested scale. bitsandbytes has at most 4096 and 256; a block takes memory.
_LONGEST_BLOCK = 1 << 16
# Axes of a shape: NumPy's limit before version 2.
_MOST_AXES = 32
# Orders of int8 codes for the matrix units of past generations of GPUs.
_FORMATS = {1: "col32", 2: "col_turing", 3: "col_ampere"}
# 1 / 127, as bitsandbytes writes it.
_RECIPROCAL = 7.874015718698502e-3


def four_bits(group: PackedGroup) -> Packing:
    """4-bit codes of the tensor in C order, the first in the high bits; a block can cross rows."""
    for role in (packing.SCALE, packing.TABLE):
        if not group.has(role):
            raise Misfit(f"{_missing(group, role)} is missing beside {show(group.names[packing.STATE])}")
    state = _state(group)
    kind = _kind(group, state)
    shape, block = _shape(state), _block(state, "blocksize")
    count = math.prod(shape)
    stored, needed = group.nbytes(), -(-count // 2)
    if not needed <= stored < needed + group.element_bytes():
        raise Misfit(
            f"its quant_state says shape {list(shape)}, which takes {needed} bytes at 4 bits each, got {stored} bytes"
        )
    _check_numbers(group, packing.TABLE, 16)
    flat = len(shape) < 2 or shape[-1] % block > 0
    matrices, rows, columns = (1, 1, count) if flat else matrices_of(shape)
    across = -(-columns // block)
    if math.prod(group.shape(packing.SCALE)) != matrices * rows * across:
        raise Misfit(
            f"absmax {list(group.shape(packing.SCALE))} does not fit shape {list(shape)} in blocks of {block} "
            "(blocksize in its quant_state)"
        )
    packed = group.packing(
        "bitsandbytes",
        f"{kind} b{block}",
        shape,
        4,
        packing.TABLE,
        matrices=matrices,
        rows=rows,
        columns=columns,
        row_bytes=-(-columns // 2),
        high_first=True,
        grid=Grid(1, block, rows, across),
        flat=flat,
    )
    return _nested(group, state, packed)


def _missing(group: PackedGroup, role: str) -> str:
    """Return the expected name of a missing part, for messages."""
    suffixes = GPTQMODEL_PARTS if group.names[packing.STATE].endswith(GPTQMODEL_STATE) else STATE_PARTS
    return show(group.codes + suffixes[role])


def _kind(group: PackedGroup, state: Mapping[str, Any]) -> str:
    """Return the ``quant_type`` of the JSON, which the name of its tensor repeats."""
    name, kind = group.names[packing.STATE], state.get("quant_type")
    kinds = [known for known, suffix in STATES.items() if name.endswith(suffix)] or list(STATES)
    if not isinstance(kind, str) or kind not in kinds:
        raise Misfit(f"{show(name)} has quant_type {show(kind)}, expected {' or '.join(kinds)}")
    return kind


def _nested(group: PackedGroup, state: Mapping[str, Any], packed: Packing) -> Packing:
    """Return the packing with nested scales, if the scales are 8-bit codes themselves."""
    dtype = group.dtype(packing.SCALE)
    if not group.has(packing.NESTED):
        if dtype not in NUMBERS:
            raise Misfit(f"absmax is {dtype}, but {_missing(group, packing.NESTED)} is missing")
        return packed
    if dtype != "U8":
        raise Misfit(f"absmax is {dtype}, but it must be U8 beside a nested_absmax")
    if not group.has(packing.NESTED_TABLE):
        raise Misfit(f"{_missing(group, packing.NESTED_TABLE)} is missing")
    block, scales = _block(state, "nested_blocksize"), math.prod(group.shape(packing.SCALE))
    _check_numbers(group, packing.NESTED, -(-scales // block))
    _check_numbers(group, packing.NESTED_TABLE, 256)
    return packed._replace(
        scale_rule=packing.NESTED_RULE, nested_block=block, nested_offset=_number(state, "nested_offset")
    )


def _check_numbers(group: PackedGroup, role: str, count: int) -> None:
    if group.dtype(role) not in NUMBERS or math.prod(group.shape(role)) != count:
        raise Misfit(
            f"{STATE_PARTS[role][1:]} is {group.dtype(role)} {list(group.shape(role))}, expected F32 [{count}]"
        )


# ---- the JSON ----


def _state(group: PackedGroup) -> dict[str, Any]:
    name = group.names[packing.STATE]
    try:
        return parse_json(group.content(packing.STATE), show(name), "")
    except FormatError as error:
        raise Misfit(str(error.args[0])) from None


def _shape(state: Mapping[str, Any]) -> tuple[int, ...]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) > _MOST_AXES or not all(type(n) is int and n >= 0 for n in shape):
        raise Misfit(f"the shape in its quant_state must be a list of lengths, got {show(shape)}")
    if math.prod(max(1, length) for length in shape) >= MOST:
        raise Misfit(f"its quant_state says shape {show(shape)}, which has too many elements")
    return tuple(shape)


def _block(state: Mapping[str, Any], key: str) -> int:
    length = state.get(key)
    if not is_length(length) or length % 2 or length > _LONGEST_BLOCK:
        raise Misfit(f"{key} in its quant_state must be an even length up to {_LONGEST_BLOCK}, got {show(length)}")
    return length


def _number(state: Mapping[str, Any], key: str) -> float:
    """Return a number within the range of float32."""
    number = state.get(key)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) < 2.0**127:  # false for NaN
        raise Misfit(f"{key} in its quant_state must be a finite number, got {show(number)}")
    return float(number)


# ---- 8 bits ----


def eight_bits(group: PackedGroup) -> Packing:
    """LLM.int8: a scale per row, in units of 1/127; two roundings."""
    shape, scales = group.shape(), group.shape(packing.SCALE)
    if len(shape) != 2 or scales not in (shape[:1], (shape[0], 1)):
        raise Misfit(f"SCB {list(scales)} does not fit codes {list(shape)}: expected one scale per row")
    if group.has(packing.FORMAT):
        content = group.content(packing.FORMAT)
        if content != b"\0":
            order = _FORMATS.get(content[0]) if len(content) == 1 else None
            raise Refused(f"its weight_format is {order or show(list(content[:8]))}, an order of codes for one GPU")
    grid = Grid(1, max(1, shape[1]), shape[0], 1)
    return group.packing("bitsandbytes", "int8 row", shape, 8, "I8", grid=grid, factor=_RECIPROCAL)
