"""GPTQ, auto-round and AWQ: words of codes beside scales and packed zero points, most of them stored transposed.

Shapes tell the three layouts apart; the configuration confirms them, and says what zero points mean.

Sources: AutoGPTQ ``nn_modules/qlinear``; GPTQModel ``utils/model.py``; auto-round ``export/export_to_autoround``;
AutoAWQ ``modules/linear``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..base import packing
from ..base.packing import Grid, Packed, Packing, Zeros
from ..base.text import show
from ..engine.codes import zero_points
from ..engine.codes.restore import read_part
from .config import AUTO_ROUND, QUARK_ORDERS
from .grid import Misfit, Refused
from .packed_group import PackedGroup

_CODES_IN_WORD = 8  # of AWQ, whose codes have 4 bits
# Groups of scales and of zero points that AutoAWQ's gemv rounds up to, in words, by the size of a group.
_GEMV_WORDS = {64: 2, 32: 4}
# Zero points that are unpacked at a time.
_AT_A_TIME = 1 << 20
# Formats of zero points: what is added to them.
_CHECKPOINT_FORMATS = {"gptq": 1, "gptq_v2": 0}


def describe(group: PackedGroup) -> Packing:
    """The layout that fits the shapes of words, scales and zero points."""
    said = group.said()
    _refuse(group, said)
    stored, scale = group.shape(), group.shape(packing.SCALE)
    zeros = group.shape(packing.ZERO) if group.has(packing.ZERO) else None
    if len(stored) != 2 or len(scale) != 2 or 0 in (*stored, *scale):
        raise Misfit(f"words {list(stored)} and scales {list(scale)} are not those of a matrix")
    if zeros is not None and group.dtype(packing.ZERO) != "I32":
        raise Misfit(f"qzeros are {group.dtype(packing.ZERO)}, wanted I32")
    transposed = stored[1] in (scale[1], scale[1] / _CODES_IN_WORD)
    rows = stored[0] == scale[0] and zeros == (scale[0], scale[1] // _CODES_IN_WORD)
    if rows and (_version(said) == "gemv" or not transposed):
        return _gemv(group, said)
    if not transposed:
        raise Misfit(f"words {list(stored)} and scales {list(scale)} are neither GPTQ's nor AWQ's")
    return _gptq(group, said, zeros) if stored[1] == scale[1] else _gemm(group, said, zeros)


def _version(said: Mapping[str, Any]) -> str:
    """The layout of AWQ that the configuration says."""
    version = said.get("version")
    return version.lower() if isinstance(version, str) else ""


def _refuse(group: PackedGroup, said: Mapping[str, Any]) -> None:
    """Refuses what other kernels need."""
    why = None if group.config is None else group.config.variant
    if why is not None:
        raise Refused(f"{why} is not dequantized")
    if group.dtype() != "I32":
        raise Refused(f"its words are {group.dtype()}: only I32 are read (pack_dtype)")
    if said.get("rotation_config"):
        raise Refused("its weights are in a rotated basis (rotation_config)")
    if group.has_beside(".w_bf16_to_fp8_scale"):
        raise Refused("its scales are those of weights in fp8 (w_bf16_to_fp8_scale)")


def _check_method(group: PackedGroup, layout: str, methods: frozenset[str]) -> None:
    if group.method not in (None, *methods):
        raise Misfit(
            f"words {list(group.shape())} and scales {list(group.shape(packing.SCALE))} are those of {layout}, but "
            f"quant_method is {show(group.method)}"
        )


def _check_bits(group: PackedGroup, said: Mapping[str, Any], bits: int) -> None:
    given = said.get("bits", said.get("w_bit"))
    if type(given) is int and given != bits:
        raise Misfit(
            f"words {list(group.shape())} beside scales {list(group.shape(packing.SCALE))} hold {bits} bits, but bits "
            f"is {show(given)} ({group.config})"
        )


def _group_size(group: PackedGroup, said: Mapping[str, Any], length: int, groups: int) -> int:
    """Columns of the weight in a group of scales; `length` for a whole row.

    Raises:
        Misfit: the configuration has another size than the scales.
    """
    given = said.get("group_size", said.get("q_group_size"))
    if type(given) is not int or given == 0:
        size = -(-length // groups)
        if -(-length // size) != groups:
            raise Misfit(f"rows of {length} are not {groups} groups, and nothing says their size (group_size)")
        return size
    size = length if given < 0 or given > length else given
    if -(-length // size) != groups:
        raise Misfit(
            f"scales {list(group.shape(packing.SCALE))} do not fit rows of {length} in groups of "
            f"{show(given)} (group_size)"
        )
    return size


def _label(name: str, size: int, length: int) -> str:
    return f"{name} row" if size == length else f"{name} g{size}"


# ---- GPTQ, auto-round ----

_GPTQ = frozenset(("gptq", *AUTO_ROUND))
_AWQ = frozenset(("awq", *AUTO_ROUND))


def _gptq(group: PackedGroup, said: Mapping[str, Any], zeros: tuple[int, ...] | None) -> Packing:
    """Codes run down the columns, which are rows of the weight."""
    stored, scale = group.shape(), group.shape(packing.SCALE)
    _check_method(group, "GPTQ", _GPTQ)
    if zeros is None:
        raise Misfit("its qzeros are missing")
    bits, rest = divmod(32 * zeros[-1], scale[1]) if len(zeros) == 2 else (0, 0)
    if not bits or zeros[0] != scale[0] or rest or not 2 <= bits <= 8 or stored[0] % _words(bits):
        raise Misfit(f"words {list(stored)}, qzeros {list(zeros)} and scales {list(scale)} do not fit each other")
    _check_bits(group, said, bits)
    if group.config is None:
        raise Refused("nothing says what its zero points mean: the quantization of its config.json is missing")
    if bits in (5, 6, 7) and group.method == "gptq" and "autoround_version" not in said:
        raise Refused(f"GPTQModel's layout of {bits} bits is not read")
    length = stored[0] * 32 // bits
    size = _group_size(group, said, length, scale[0])
    if group.has(packing.GROUPS):
        found = group.dtype(packing.GROUPS), group.shape(packing.GROUPS)
        if found != ("I32", (length,)):
            raise Misfit(f"g_idx is {found[0]} {list(found[1])}, wanted I32 [{length}]")
    return group.packing(
        "gptq",
        _label(f"gptq{bits}", size, length),
        (scale[1], length),
        bits,
        "unsigned",
        layout=packing.COLUMNS,
        transpose=True,
        rows=length,
        columns=scale[1],
        grid=Grid(size, 1, scale[0], scale[1]),
        zeros=Zeros(packing.ROWS, bits, added=_added(group, said), symmetric=said.get("sym") is not False),
    )


def _words(bits: int) -> int:
    """The least number of words that codes fill."""
    return bits // math.gcd(bits, 32)


def _added(group: PackedGroup, said: Mapping[str, Any]) -> int:
    """What the configuration says is added to stored zero points."""
    if group.method in AUTO_ROUND:
        kind = said.get("packing_format", said.get("backend"))
        return 1 if not isinstance(kind, str) or ("gptq" in kind and "gptqmodel" not in kind) else 0
    return _CHECKPOINT_FORMATS.get(str(said.get("checkpoint_format", said.get("format"))), 1)


def zeros_disagree(packed: Packed) -> bool:
    """Whether the zero points of symmetric weights are stored in another way than the configuration says.

    Raises:
        FormatError, OSError: the file cannot be read.
    """
    zeros = packed.packing.zeros
    return zeros is not None and zeros.symmetric and _settled(packed, zeros).added != zeros.added


def wrapped_zeros(packed: Packed) -> int:
    """Zero points that are stored as all ones, less one: their writer has probably damaged the others of their word.

    Raises:
        FormatError, OSError: the file cannot be read.
    """
    zeros, grid = packed.packing.zeros, packed.packing.grid
    if zeros is None or grid is None or packed.packing.family != "gptq" or not _settled(packed, zeros).added:
        return 0
    step, found = max(1, _AT_A_TIME // grid.columns), 0
    for row in range(0, grid.rows, step):
        at = slice(row, min(row + step, grid.rows)), slice(0, grid.columns)
        codes = zero_points.read_codes(zeros, grid, _reader(packed), (0, 1), at)
        found += int((codes == (1 << zeros.bits) - 1).sum())
    return found


def _reader(packed: Packed) -> zero_points.Read:
    part = packed.parts[packing.ZERO]
    return lambda at, size: read_part(part, at, size)


def _settled(packed: Packed, zeros: Zeros) -> Zeros:
    assert packed.packing.grid is not None
    only = zero_points.only_code(zeros, packed.packing.grid, _reader(packed), packed.packing.matrices)
    return zero_points.settled(zeros, only)


# ---- AWQ ----


def _gemm(group: PackedGroup, said: Mapping[str, Any], zeros: tuple[int, ...] | None) -> Packing:
    """Words along the rows, which are columns of the weight, with permuted codes."""
    stored, scale = group.shape(), group.shape(packing.SCALE)
    _check_method(group, "AWQ", _AWQ)
    _check_bits(group, said, 4)
    if zeros is None and said.get("zero_point") is not False:
        raise Misfit("its qzeros are missing")
    if zeros is not None and zeros != (scale[0], stored[1]):
        raise Misfit(f"qzeros {list(zeros)} do not fit scales {list(scale)}")
    if group.has(packing.GROUPS):
        raise Misfit("AWQ has no g_idx")
    size = _group_size(group, said, stored[0], scale[0])
    order, signed = _as_quark(said)
    return group.packing(
        "awq",
        _label("awq4", size, stored[0]),
        (scale[1], stored[0]),
        4,
        "signed" if signed else "offset" if zeros is None else "unsigned",
        layout=order,
        transpose=True,
        rows=stored[0],
        columns=scale[1],
        grid=Grid(size, 1, scale[0], scale[1]),
        zeros=None if zeros is None else Zeros(order, 4),
    )


def _as_quark(said: Mapping[str, Any]) -> tuple[int, bool]:
    """The layout of words, and whether codes are signed: AMD Quark writes AWQ's names and configuration too.

    Raises:
        Misfit: the order of codes is unknown.
    """
    export = said.get("export")
    order = export.get("pack_method") if isinstance(export, Mapping) else said.get("pack_method")
    if order is None:
        return packing.WORDS, False
    layout = QUARK_ORDERS.get(order) if isinstance(order, str) else None
    if layout is None:
        raise Misfit(f"pack_method {show(str(order))} does not say the order of its codes")
    return layout, said.get("zero_point") is False


def _gemv(group: PackedGroup, said: Mapping[str, Any]) -> Packing:
    """Plain rows; scales and zero points of a row fill whole words, and more."""
    stored, scale = group.shape(), group.shape(packing.SCALE)
    _check_method(group, "AWQ", _AWQ)
    _check_bits(group, said, 4)
    length, given = stored[1] * _CODES_IN_WORD, said.get("group_size", said.get("q_group_size"))
    if type(given) is not int or given < 32:
        raise Misfit(f"scales {list(scale)} are padded, and nothing says the size of a group (group_size)")
    words = _GEMV_WORDS.get(given, 1)
    groups = -(-length // given)
    if length % given or -(-groups // (words * _CODES_IN_WORD)) * words * _CODES_IN_WORD != scale[1]:
        raise Misfit(f"scales {list(scale)} do not fit rows of {length} in groups of {given} (group_size)")
    return group.packing(
        "awq",
        _label("awq4", given, length),
        (stored[0], length),
        4,
        "unsigned",
        grid=Grid(1, given, scale[0], scale[1]),
        zeros=Zeros(packing.ROWS, 4),
    )
