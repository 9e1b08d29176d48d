"""bitsandbytes: 4-bit codes in blocks of the flat tensor, and LLM.int8.

GPTQModel stores both under its own names: "weight_absmax" for "weight.absmax", "weight_quant_state" for every kind,
"weight_scb" for "SCB".

Sources: bitsandbytes ``functional.py`` (`QuantState.as_dict`, `dequantize_4bit`, `int8_vectorwise_dequant`),
``nn/modules.py`` (`Params4bit`, `Linear8bitLt`); GPTQModel ``nn_modules/qlinear/bitsandbytes.py``,
``utils/model_dequant.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core import arrays, native
from ..core.packing import FORMAT, NESTED, NESTED_RULE, NESTED_TABLE, SCALE, STATE, TABLE, Grid, Packing
from ..core.text import show
from .families import IS_EXPERT, IS_HEAD, Engine, Family, Preset, StoredPart, Strays, filled, parts_of
from .packed_group import LONGEST, MOST, NUMBERS, Misfit, PackedGroup, Refused, matrices_of, parsed
from .quantization import is_length, with_quantization

# The JSON beside 4-bit codes, by kind, and the other parts, by role.
_STATES = {kind: f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
_STATE_PARTS = {
    SCALE: ".absmax",
    TABLE: ".quant_map",
    NESTED: ".nested_absmax",
    NESTED_TABLE: ".nested_quant_map",
}
# GPTQModel's suffixes of the JSON and of the other parts.
_GPTQMODEL_STATE = "_quant_state"
_GPTQMODEL_PARTS = {role: f"_{suffix[1:]}" for role, suffix in _STATE_PARTS.items()}
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
    for role in (SCALE, TABLE):
        if role not in group.parts:
            raise Misfit(f"{_missing(group, role)} is missing beside {show(group.names[STATE])}")
    name = group.names[STATE]
    state = parsed(_bytes_of(group, STATE), show(name))
    kind = state.get("quant_type")
    kinds = [known for known, suffix in _STATES.items() if name.endswith(suffix)] or list(_STATES)  # in the name too
    if not isinstance(kind, str) or kind not in kinds:
        raise Misfit(f"{show(name)} has quant_type {show(kind)}, expected {' or '.join(kinds)}")
    shape, block = _shape(state), _block(state, "blocksize")
    count = math.prod(shape)
    stored, needed = group.row.nbytes(math.prod(group.stored)), -(-count // 2)
    if not needed <= stored < needed + group.row.block_bytes:
        raise Misfit(
            f"its quant_state says shape {list(shape)}, which takes {needed} bytes at 4 bits each, got {stored} bytes"
        )
    _check_numbers(group, TABLE, 16)
    flat = len(shape) < 2 or shape[-1] % block > 0
    matrices, rows, columns = (1, 1, count) if flat else matrices_of(shape)
    across = -(-columns // block)
    if math.prod(group.scales) != matrices * rows * across:
        raise Misfit(
            f"absmax {list(group.scales)} does not fit shape {list(shape)} in blocks of {block} "
            "(blocksize in its quant_state)"
        )
    sides = {"matrices": matrices, "rows": rows, "columns": columns, "row_bytes": -(-columns // 2), "flat": flat}
    grid = Grid(1, block, rows, across)
    packed = group.packing("bitsandbytes", f"{kind} b{block}", shape, 4, TABLE, high_first=True, grid=grid, **sides)
    return _nested(group, state, packed)


def _missing(group: PackedGroup, role: str) -> str:
    """Return the expected name of a missing part, for messages."""
    suffixes = _GPTQMODEL_PARTS if group.names[STATE].endswith(_GPTQMODEL_STATE) else _STATE_PARTS
    return show(group.codes + suffixes[role])


def _nested(group: PackedGroup, state: Mapping[str, Any], packed: Packing) -> Packing:
    """Return the packing with nested scales, if the scales are 8-bit codes themselves."""
    dtype = group.scale_code
    if NESTED not in group.parts:
        if dtype not in NUMBERS:
            raise Misfit(f"absmax is {dtype}, but {_missing(group, NESTED)} is missing")
        return packed
    if dtype != "U8":
        raise Misfit(f"absmax is {dtype}, but it must be U8 beside a nested_absmax")
    if NESTED_TABLE not in group.parts:
        raise Misfit(f"{_missing(group, NESTED_TABLE)} is missing")
    block, scales = _block(state, "nested_blocksize"), math.prod(group.scales)
    _check_numbers(group, NESTED, -(-scales // block))
    _check_numbers(group, NESTED_TABLE, 256)
    offset: Any = state.get("nested_offset")
    number = isinstance(offset, (int, float)) and not isinstance(offset, bool)
    if not number or not abs(offset) < 2.0**127:  # the range of float32; also for NaN
        raise Misfit(f"nested_offset in its quant_state must be a finite number, got {show(offset)}")
    return packed._replace(scale_rule=NESTED_RULE, nested_block=block, nested_offset=float(offset))


def _check_numbers(group: PackedGroup, role: str, count: int) -> None:
    row, shape = group.parts[role]
    if row.code not in NUMBERS or math.prod(shape) != count:
        raise Misfit(f"{_STATE_PARTS[role][1:]} is {row.code} {list(shape)}, expected F32 [{count}]")


# ---- the JSON ----


def _bytes_of(group: PackedGroup, role: str) -> bytes:
    return group.content(role, ("U8",), f"be U8 and have at most {LONGEST:,} bytes").tobytes()


def _shape(state: Mapping[str, Any]) -> tuple[int, ...]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) > _MOST_AXES or {*map(type, shape)} - {int} or min([0, *shape]) < 0:
        raise Misfit(f"the shape in its quant_state must be a list of lengths, got {show(shape)}")
    if math.prod([length or 1 for length in shape]) >= MOST:
        raise Misfit(f"its quant_state says shape {show(shape)}, which has too many elements")
    return tuple(shape)


def _block(state: Mapping[str, Any], key: str) -> int:
    length = state.get(key)
    if not is_length(length) or length % 2 or length > _LONGEST_BLOCK:
        raise Misfit(f"{key} in its quant_state must be an even length up to {_LONGEST_BLOCK}, got {show(length)}")
    return length


# ---- 8 bits ----


def eight_bits(group: PackedGroup) -> Packing:
    """LLM.int8: a scale per row, in units of 1/127; two roundings."""
    shape, scales = group.stored, group.scales
    if len(shape) != 2 or scales not in (shape[:1], (shape[0], 1)):
        raise Misfit(f"SCB {list(scales)} does not fit codes {list(shape)}: expected one scale per row")
    if FORMAT in group.parts:
        content = _bytes_of(group, FORMAT)
        if content != b"\0":
            order = _FORMATS.get(content[0]) if len(content) == 1 else None
            raise Refused(f"its weight_format is {order or show(list(content[:8]))}, an order of codes for one GPU")
    grid = Grid(1, max(1, shape[1]), shape[0], 1)
    return group.packing("bitsandbytes", "int8 row", shape, 8, "I8", grid=grid, factor=_RECIPROCAL)


# ---- writing ----


# Values of the codes; source: ``get_4bit_type`` in bitsandbytes' functional.py. Those of fp4 are twelfths.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_FP4 = tuple(sign * value / 12 + 0.0 for sign in (1.0, -1.0) for value in _TWELFTHS)


def lay_out(
    preset: Preset, config: Mapping[str, Any], left: Mapping[str, str], exceptions: Mapping[str, Preset]
) -> dict[str, Any]:
    """Name the unquantized modules, but not experts, which are parameters for transformers.

    Its default leaves out the head, even if it is tied.
    """
    kind = preset.name.removeprefix("bnb_")
    modules = {module: reason for module, reason in left.items() if reason != IS_EXPERT}
    skipped = None if all(reason == IS_HEAD for reason in modules.values()) else sorted(modules)
    return with_quantization(config, filled("bitsandbytes", bnb_4bit_quant_type=kind, llm_int8_skip_modules=skipped))


def _constants(preset: Preset, shape: tuple[int, ...], dtype: str) -> dict[str, arrays.Array]:
    """Return the values of codes, and the JSON beside 4-bit codes."""
    kind = preset.name.removeprefix("bnb_")
    state = {"quant_type": kind, "blocksize": preset.group, "dtype": dtype, "shape": list(shape)}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    return {TABLE: np.array(preset.table, np.float32), STATE: text}


def _preset(kind: str, table: tuple[float, ...]) -> Preset:
    parts = {
        **parts_of(".weight", "U8", ".weight.absmax", "F32"),
        TABLE: StoredPart(".weight.quant_map", "F32"),
        STATE: StoredPart(f".weight{_STATES[kind]}", "U8"),
    }
    return Preset(
        f"bnb_{kind}", _ENGINE, native.lib.SL_ENCODE_TABLE, 4, 64, parts, lay_out, _constants, flat=True, table=table
    )


_ENGINE = Engine("transformers and vLLM", quantizes_experts=False)
PRESETS = [_preset("nf4", _NF4), _preset("fp4", _FP4)]


# ---- rows ----

FAMILIES = [
    Family(
        "bitsandbytes, 4 bits",
        "",
        # Storage dtypes of the codes: `bnb_4bit_quant_storage`.
        frozenset(("U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64")),
        {STATE: (*_STATES.values(), _GPTQMODEL_STATE)},
        four_bits,
        {role: (suffix, _GPTQMODEL_PARTS[role]) for role, suffix in _STATE_PARTS.items()},
        telling=(STATE, TABLE),
        wide=True,
        described_in=(*_STATES.values(), _GPTQMODEL_STATE),
        strays=Strays(
            "bitsandbytes",
            (*_STATES.values(), *_STATE_PARTS.values(), _GPTQMODEL_STATE, *reversed(_GPTQMODEL_PARTS.values())),
            "but not the quant_state or the codes",
        ),
    ),
    Family(
        "bitsandbytes, 8 bits",
        ".weight",
        frozenset(("I8",)),
        {SCALE: (".SCB", ".weight_scb")},
        eight_bits,
        {FORMAT: (".weight_format",)},
        described_in=(".weight_format",),
    ),
]
