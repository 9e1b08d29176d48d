"""bitsandbytes: codes of 4 bits in blocks of the flat tensor, and LLM.int8.

GPTQModel stores both under names of its own: "weight_absmax" for "weight.absmax", "weight_quant_state" whatever the
kind, "weight_scb" for "SCB".

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
from .checks import MOST, NUMBERS
from .config import is_length
from .grid import Misfit, Refused
from .packed_group import PackedGroup, matrices_of

# Suffix of the JSON that describes codes of 4 bits, by their kind.
STATES = {kind: f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
# What else is stored beside codes of 4 bits, by role.
BESIDE = {
    packing.SCALE: ".absmax",
    packing.TABLE: ".quant_map",
    packing.NESTED: ".nested_absmax",
    packing.NESTED_TABLE: ".nested_quant_map",
}
# GPTQModel's suffixes of the JSON and of the rest.
GPTQMODEL_STATE = "_quant_state"
GPTQMODEL_BESIDE = {role: f"_{suffix[1:]}" for role, suffix in BESIDE.items()}
# Dtypes that bytes of codes are stored as: `bnb_4bit_quant_storage`.
STORAGE = frozenset(("U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64"))

# Values that share a scale, scales that share a nested one: the library has 4096 and 256. A block takes memory.
_LONGEST_BLOCK = 1 << 16
# Axes of a shape, which numpy before version 2 limits.
_MOST_AXES = 32
# Orders of int8 codes for matrix units of past generations of GPUs.
_FORMATS = {1: "col32", 2: "col_turing", 3: "col_ampere"}
# One over 127, as the library writes it.
_RECIPROCAL = 7.874015718698502e-3


def four_bits(group: PackedGroup) -> Packing:
    """Codes of 4 bits, the first in the high bits, of the tensor in C order; a block may cross its rows."""
    for role in (packing.SCALE, packing.TABLE):
        if not group.has(role):
            raise Misfit(f"{show(group.names[packing.STATE])} is there, but {_missing(group, role)} is not")
    state = _state(group)
    kind = _kind(group, state)
    shape, block = _shape(state), _block(state, "blocksize")
    count = math.prod(shape)
    stored, needed = group.nbytes(), -(-count // 2)
    if not needed <= stored < needed + group.element_bytes():
        raise Misfit(
            f"{stored} bytes of codes do not hold the {needed} of shape {list(shape)} in its quant_state, 4 bits each"
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
    """The name of a missing part, for messages."""
    beside = GPTQMODEL_BESIDE if group.names[packing.STATE].endswith(GPTQMODEL_STATE) else BESIDE
    return show(group.codes + beside[role])


def _kind(group: PackedGroup, state: Mapping[str, Any]) -> str:
    """The ``quant_type`` of the JSON, which its name repeats."""
    name, kind = group.names[packing.STATE], state.get("quant_type")
    kinds = [one for one, suffix in STATES.items() if name.endswith(suffix)] or list(STATES)
    if not isinstance(kind, str) or kind not in kinds:
        raise Misfit(f"{show(name)} has quant_type {show(kind)}, expected {' or '.join(kinds)}")
    return kind


def _nested(group: PackedGroup, state: Mapping[str, Any], packed: Packing) -> Packing:
    """The packing with scales that are codes of 8 bits themselves, if they are."""
    dtype = group.dtype(packing.SCALE)
    if not group.has(packing.NESTED):
        if dtype not in NUMBERS:
            raise Misfit(f"absmax is {dtype}, but there is no {_missing(group, packing.NESTED)}")
        return packed
    if dtype != "U8":
        raise Misfit(f"absmax is {dtype}, but beside a nested_absmax it is U8")
    if not group.has(packing.NESTED_TABLE):
        raise Misfit(f"there is no {_missing(group, packing.NESTED_TABLE)}")
    block, scales = _block(state, "nested_blocksize"), math.prod(group.shape(packing.SCALE))
    _check_numbers(group, packing.NESTED, -(-scales // block))
    _check_numbers(group, packing.NESTED_TABLE, 256)
    return packed._replace(
        scale_rule=packing.NESTED_RULE, nested_block=block, nested_offset=_number(state, "nested_offset")
    )


def _check_numbers(group: PackedGroup, role: str, count: int) -> None:
    if group.dtype(role) not in NUMBERS or math.prod(group.shape(role)) != count:
        found = f"{group.dtype(role)} {list(group.shape(role))}"
        raise Misfit(f"{BESIDE[role][1:]} is {found}, wanted F32 [{count}]")


# ---- the JSON ----


def _state(group: PackedGroup) -> dict[str, Any]:
    name = group.names[packing.STATE]
    try:
        return parse_json(group.content(packing.STATE), show(name), "")
    except FormatError as error:
        raise Misfit(str(error.args[0])) from None


def _shape(state: Mapping[str, Any]) -> tuple[int, ...]:
    given = state.get("shape")
    if not isinstance(given, list) or len(given) > _MOST_AXES or not all(type(n) is int and n >= 0 for n in given):
        raise Misfit(f"its quant_state has no list of lengths as shape, but {show(given)}")
    if math.prod(max(1, length) for length in given) >= MOST:
        raise Misfit(f"its quant_state says shape {show(given)}, which has too many elements")
    return tuple(given)


def _block(state: Mapping[str, Any], key: str) -> int:
    given = state.get(key)
    if not is_length(given) or given % 2 or given > _LONGEST_BLOCK:
        raise Misfit(f"its quant_state says {key} {show(given)}, which is not a length of blocks")
    return given


def _number(state: Mapping[str, Any], key: str) -> float:
    """A number that float32 holds."""
    given = state.get(key)
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not abs(given) < 2.0**127:  # false for NaN
        raise Misfit(f"its quant_state says {key} {show(given)}, which is not a finite number")
    return float(given)


# ---- 8 bits ----


def eight_bits(group: PackedGroup) -> Packing:
    """LLM.int8: a row has one scale, of which a code is 127th parts; two roundings."""
    shape, scales = group.shape(), group.shape(packing.SCALE)
    if len(shape) != 2 or scales not in (shape[:1], (shape[0], 1)):
        raise Misfit(f"SCB {list(scales)} does not fit codes {list(shape)}: each row has one scale")
    if group.has(packing.FORMAT):
        content = group.content(packing.FORMAT)
        if content != b"\0":
            said = _FORMATS.get(content[0]) if len(content) == 1 else None
            raise Refused(f"its weight_format is {said or show(list(content[:8]))}, an order of codes for one GPU")
    grid = Grid(1, max(1, shape[1]), shape[0], 1)
    return group.packing("bitsandbytes", "int8 row", shape, 8, "I8", grid=grid, factor=_RECIPROCAL)
