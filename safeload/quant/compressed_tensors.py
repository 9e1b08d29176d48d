"""compressed-tensors: words of integers, small floats, and sparse values with a mask of their positions.

Sources: compressed-tensors ``compressors/``, and of 0.12.2 ``compressors/sparse_compressors`` (`bitmask_decompress`,
`sparse24_bitmask_decompress`), ``utils/helpers.py`` (`pack_bitmasks`), ``model_compressor.py``: sparse values can be
the codes of a quantization.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from ..core import arrays, dtypes, packing, restore
from ..core.native import lib
from ..core.text import show
from .families import FP8, GROUP_SIZES, SPARSE, Family, Preset, StoredPart, Strays, filled, parts_of
from .floats import SERVERS, fp4, plain
from .packed_group import MOST_AXES, NUMBERS, Misfit, PackedGroup, Refused, label_of, one_scale, whole_grid
from .quantization import AUTO_ROUND, is_length, quantization_of, with_quantization

# ---- integers ----


def ct_packed(group: PackedGroup) -> packing.Packing:
    """compressed-tensors, pack-quantized: words of codes, scales per group, row or tensor."""
    stored, scale = group.stored, group.scales
    if len(stored) < 2:
        raise Misfit(f"codes {list(stored)} are not a matrix")
    shape, bits, words = _ct_shape(group)
    rows = shape[-2]
    grid = group.configured_grid(shape) or _ct_grid(shape, scale)
    zeros = packing.Zeros(packing.COLUMNS, bits, words)
    if grid.row_block != 1 and packing.ZERO in group.parts and group.parts[packing.ZERO].row.code == "I32":
        raise Misfit(f"zero points are packed, but scales {list(group.scales)} are not per row")
    packed = group.packed_zeros(zeros, (*stored[:-2], restore.words_for(zeros, grid.rows), grid.columns))
    if packing.GROUPS in group.parts:
        if 1 < grid.row_block < rows:
            raise Misfit("it has a g_idx, but its scales are per block")
        group.check_form(packing.GROUPS, "g_idx", ("I32",), shape[-1:])
    grouped = grid.columns == 1 and group.configured("group_size", "group") == shape[-1]
    label = label_of(f"int{bits}", grid, shape, packing.ZERO in group.parts, grouped)
    return group.packing("int", label, shape, bits, "offset", word_codes=words, grid=grid, zeros=packed)


def _ct_grid(shape: tuple[int, ...], scale: tuple[int, ...]) -> packing.Grid:
    """Return the grid of scales per group, row or tensor if the configuration does not define it."""
    if len(scale) != len(shape) or scale[:-1] != shape[:-1]:
        if math.prod(scale) == 1:
            return one_scale(shape, shared=True)
        raise Misfit(f"scales {list(scale)} do not fit {list(shape)}")
    if not scale[-1] or shape[-1] % scale[-1]:
        raise Misfit(f"rows of {shape[-1]} codes do not divide into {scale[-1]} equal groups")
    return packing.Grid(1, max(1, shape[-1] // scale[-1]), shape[-2], scale[-1])


def _ct_shape(group: PackedGroup) -> tuple[tuple[int, ...], int, int]:
    """Return the logical shape, bits of a code, and codes per word before compressed-tensors 0.17 (since then 0)."""
    stored, scale = group.stored, group.scales
    described = [(weights.get("num_bits"), weights.get("group_size")) for weights in group.weights] or [(None, None)]
    grouped = math.prod(scale) > 1
    counts = [scale[-1] * size if grouped and is_length(size) else None for _, size in described]
    fits = _ct_fits(stored[-1], counts, described)
    shape = group.parts.get(packing.SHAPE)
    usual = shape is not None and shape.row.code in ("I32", "I64") and shape.shape in ((2,), (len(stored),))
    # Read weight_shape only if group sizes do not decide: a checkpoint of experts has 100,000 groups, and reading the
    # weights compares it anyway.
    if shape is not None and not (len(fits) == 1 and None not in counts and usual and scale[-1] > 1):
        logical = _integers(group)
        if (
            not 2 <= len(logical) <= len(stored)
            or min(logical) < 0
            or logical[-2] != stored[-2]
            or (len(logical) == len(stored) and logical[:-1] != stored[:-1])
        ):
            raise Misfit(f"weight_shape {list(logical)} does not fit codes {list(stored)}")
        counts = [logical[-1]] * len(described)
        fits = _ct_fits(stored[-1], counts, described)
    elif None in counts:
        raise Misfit("it has no weight_shape, and config.json has no group_size")
    if not fits:
        rows = " or ".join(str(count) for count in sorted({count for count in counts if count is not None}))
        bits_text = ", ".join(str(bits) for bits, _ in described) if group.weights else "1 to 8"
        raise Misfit(f"words {list(stored)} do not hold rows of {rows} codes of {bits_text} bits (config_groups)")
    if len(fits) > 1:
        raise Misfit(f"words {list(stored)} can hold codes of {', '.join(str(bits) for _, bits, _ in fits)} bits")
    count, bits, words = next(iter(fits))
    return (*stored[:-1], count), bits, words


def _integers(group: PackedGroup) -> tuple[int, ...]:
    """Return the values of the stored shape."""
    codes = ("I32", "I64") if len(group.parts[packing.SHAPE].shape) == 1 else ()
    return tuple(group.content(packing.SHAPE, codes, f"be a list of at most {MOST_AXES} integers").tolist())


def _ct_fits(
    width: int, counts: Sequence[int | None], described: Sequence[tuple[Any, Any]]
) -> dict[tuple[int, int, int], None]:
    """Return all columns, bits, and codes per word of the old layout (else 0) for rows of ``width`` words."""
    fits: dict[tuple[int, int, int], None] = {}
    known = ((count, exact) for count, (exact, _) in zip(counts, described, strict=True) if count is not None)
    for count, exact in known:
        for bits in (exact,) if type(exact) is int and 1 <= exact <= 8 else range(1, 9):
            if -(-count * bits // 32) == width:
                fits[count, bits, 0] = None
            elif -(-count // (32 // bits)) == width:
                fits[count, bits, 32 // bits] = None
    return fits


# ---- small floats ----


def ct_fp4(group: PackedGroup) -> packing.Packing:
    """compressed-tensors: NVFP4 with or without a dividing global scale; MXFP4; MXFP6 with 4 codes in 3 bytes.

    auto-round uses the same names; its ``data_type`` mx_int means other numbers.
    """
    stored, scale, dtype = group.stored, group.scales, group.scale_code
    nvfp4 = dtype if dtype in NUMBERS else "F8_E4M3"  # of NVFP4's scales; ``scale_dtype`` allows other floats
    kind = group.settings().get("data_type") if group.method in AUTO_ROUND else None
    if isinstance(kind, str) and kind.startswith("mx_int"):
        packed = fp4(group, "mxint4", 32, "F8_E8M0", "mxint4")
    elif packing.GLOBAL in group.parts:
        packed = group.check_shared(fp4(group, "nvfp4", 16, nvfp4))._replace(scale_rule=packing.DIVIDED)
    elif dtype not in ("U8", "F8_E8M0"):
        if {weights.get("strategy") for weights in group.weights} != {"group"}:  # NVFP4 has a global scale
            raise Misfit(f"scales of MXFP4 and MXFP6 must be F8_E8M0 or U8, got {dtype}")
        packed = fp4(group, "fp4 g16", 16, nvfp4)
    elif stored and scale and scale[:-1] == stored[:-1] and scale[-1] * 24 == stored[-1]:
        shape = (*stored[:-1], stored[-1] // 3 * 4)
        grid = whole_grid(shape, 1, 32)
        packed = group.packing("fp6", "mxfp6", shape, 6, "e2m3", grid=grid, scale_dtype="F8_E8M0")
    else:
        packed = fp4(group, "mxfp4", 32, "F8_E8M0")
    group.configured_grid(packed.shape)  # raises if the configured groups have another size
    return packed


# ---- sparse values ----


def bitmask(group: PackedGroup) -> packing.Packing:
    """``X.compressed`` holds the values of all rows, ``X.bitmask`` a bit per position, lowest bit first."""
    if f".{group.logical}".endswith((".weight.weight", ".bias.weight")):
        raise Misfit(f"{show(group.codes)} belongs to a tensor, not to a module")  # another family fits better
    stored, pairs = group.stored, len(group.stored) == 2  # pairs of every four values
    if pairs:
        shape: tuple[int, ...] = (stored[0], 2 * stored[1])
        if shape[1] % 4:
            raise Misfit(f"values {list(stored)} are not two of every four columns")
        group.check_form(packing.SHAPE, "shape", ("I64", "I32"), (2, 1), (2,))
    else:  # the mask only implies its number of bytes
        if len(stored) != 1:
            raise Misfit(f"values must be a list or a matrix, got shape {list(stored)}")
        shape = _integers(group)
        if len(shape) > 2:
            raise Refused(
                f"shape {list(shape)} has more than two axes, and row_offsets locate only the rows of a matrix"
            )
        if not shape or min(shape) < 0:
            raise Misfit(f"shape {list(shape)} is not the shape of a weight")
    of = f" for shape {list(shape)}"
    group.check_form(packing.MASK, "bitmask", ("U8",), (*shape[:-1], -(-shape[-1] // 8)), of=of)
    if not pairs:
        if packing.OFFSETS not in group.parts:
            raise Misfit("its row_offsets are missing")
        shapes: Sequence[tuple[int, ...]] = (shape[:1],) if len(shape) > 1 else ((), (1,))
        group.check_form(packing.OFFSETS, "row_offsets", ("I64", "I32"), *shapes, of=of)
    packed = _sparse_values(group, "sparse 2:4" if pairs else "sparse", shape)
    return packed._replace(layout=packing.MASKED, row_bytes=stored[1] * group.row.block_bytes if pairs else 0)


def _sparse_values(group: PackedGroup, prefix: str, shape: tuple[int, ...]) -> packing.Packing:
    """Return the packing of the values as if all were stored."""
    numbers = group.row.code
    if numbers in NUMBERS:
        if packing.SCALE in group.parts:
            raise Misfit(f"{numbers} values must not have a scale, got {show(group.names[packing.SCALE])}")
        bits = 8 * group.row.block_bytes
        return group.packing("sparse", f"{prefix} {numbers.lower()}", shape, bits, numbers)
    if packing.SCALE not in group.parts:
        raise Misfit(f"its values are {numbers} codes, but their scale is missing")
    dense = copy(group)
    dense.stored = shape
    packed = plain(dense)
    if packed.scale_rule != packing.STORED:
        raise Refused("its scales divide the values, which safeload does not compute for sparse tensors")
    return packed._replace(label=f"{prefix} {packed.label}")


# ---- writing ----


def lay_out(
    preset: Preset, config: Mapping[str, Any], left: Mapping[str, str], exceptions: Mapping[str, Preset]
) -> dict[str, Any]:
    """Describe the codes as llm-compressor does. Source: compressed-tensors ``quantization/quant_scheme.py``."""
    parts, blocks = preset.parts, preset.row_block > 1
    kind = "float" if parts[packing.CODES].dtype in ("F8_E4M3", "U8") else "int"
    scale_dtype, grouped = parts[packing.SCALE].dtype, preset.group is not None and not blocks
    strategy = "tensor_group" if packing.GLOBAL in parts else "group" if grouped else "channel"
    weights = _arguments(
        kind,
        preset.bits,
        "block" if blocks else strategy,
        group_size=preset.group if grouped else None,
        block_structure=[preset.row_block, preset.group] if blocks else None,
        symmetric=packing.ZERO not in parts,
        zp_dtype="torch.int8" if packing.ZERO in parts else None,
        scale_dtype=None if scale_dtype is None else f"torch.{dtypes.BY_CODE[scale_dtype].name}",
    )
    activations, stem = None, preset.name.removesuffix("a16") if scale_dtype is not None else kind
    layout = f"{stem}-quantized" if preset.bits == 8 else f"{stem}-pack-quantized"
    if packing.SHAPE in parts:
        layout = "pack-quantized"
    if preset.activations:
        by = {"group_size": 128} if blocks else {}
        activations = _arguments(preset.activations, 8, "group" if by else "token", dynamic=True, **by)
    group = {
        "format": layout,
        "input_activations": activations,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    # The names of vision models in files lack a prefix of the engine; "model." begins those of the language model.
    anywhere = [f"re:.*{re.escape(name)}$" for name in left if "." in name and not name.startswith("model.")]
    ignored = sorted({*left, *anywhere})
    fields = {"config_groups": {"group_0": group}, "format": layout, "ignore": ignored}
    return with_quantization(config, filled("compressed-tensors", **fields, kv_cache_scheme=_cache_scheme(config)))


def _cache_scheme(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how the source quantizes the KV cache, in words of compressed-tensors; AutoFP8 says "static"."""
    source = quantization_of(config)
    values = {} if source is None else source.values
    scheme, algorithm = values.get("kv_cache_scheme"), values.get("kv_cache_quant_algo")
    if not isinstance(scheme, Mapping):
        if scheme != "static" and algorithm is None:
            return None
        scheme = {}
    return {**_arguments("float", 8, "tensor"), **scheme}


def _arguments(kind: str, bits: int, strategy: str, **fields: Any) -> dict[str, Any]:
    return filled("arguments of compressed-tensors", **fields, num_bits=bits, strategy=strategy, type=kind)


def _shape(preset: Preset, shape: tuple[int, ...], dtype: str) -> dict[str, arrays.Array]:
    return {packing.SHAPE: np.array(shape, np.int64)}


_WORDS = {**parts_of(".weight_packed", "I32", ".weight_scale", None), packing.SHAPE: StoredPart(".weight_shape", "I64")}
_ASYMMETRIC = {**_WORDS, packing.ZERO: StoredPart(".weight_zero_point", "I32")}
_INT8 = parts_of(".weight", "I8", ".weight_scale", None)
_FLOAT8 = parts_of(".weight", "F8_E4M3", ".weight_scale", None)
_MXFP4 = parts_of(".weight_packed", "U8", ".weight_scale", "U8")
_MXFP8 = parts_of(".weight", "F8_E4M3", ".weight_scale", "U8")
_NVFP4 = {
    **parts_of(".weight_packed", "U8", ".weight_scale", "F8_E4M3"),
    packing.GLOBAL: StoredPart(".weight_global_scale", "F32"),
}


def _four_bits(suffix: str, group: int | None) -> list[Preset]:
    kinds = (("w4a16", lib.SL_ENCODE_INT, _WORDS), ("w4a16_asym", lib.SL_ENCODE_INT_ZERO, _ASYMMETRIC))
    return [Preset(name + suffix, SERVERS, method, 4, group, parts, lay_out, _shape) for name, method, parts in kinds]


PRESETS = [
    *(preset for suffix, group in GROUP_SIZES.items() for preset in _four_bits(suffix, group)),
    Preset("w8a16", SERVERS, lib.SL_ENCODE_INT, 8, 128, _WORDS, lay_out, _shape),
    Preset("w4afp8", SERVERS, lib.SL_ENCODE_INT, 4, 128, _WORDS, lay_out, _shape, activations="float"),
    Preset("w8a8", SERVERS, lib.SL_ENCODE_INT, 8, None, _INT8, lay_out, signed=True, activations="int"),
    Preset("fp8_dynamic", SERVERS, lib.SL_ENCODE_FP8, 8, None, _FLOAT8, lay_out, activations="float"),
    Preset("fp8_block", SERVERS, lib.SL_ENCODE_FP8, 8, 128, _FLOAT8, lay_out, row_block=128, activations="float"),
    Preset("nvfp4a16", SERVERS, lib.SL_ENCODE_NVFP4, 4, 16, _NVFP4, lay_out),
    Preset("mxfp4a16", SERVERS, lib.SL_ENCODE_MXFP4, 4, 32, _MXFP4, lay_out),
    Preset("mxfp8a16", SERVERS, lib.SL_ENCODE_MXFP8, 8, 32, _MXFP8, lay_out),
]


# ---- rows ----


def _sparse(stem: str) -> Family:
    """Return the row of sparse values; early versions name the tensor, which can be a bias, before the suffixes."""
    return Family(
        "compressed-tensors, sparse",
        stem + SPARSE,
        NUMBERS | FP8 | {"I8"},
        {packing.MASK: (stem + ".bitmask",), packing.SHAPE: (stem + ".shape",)},
        bitmask,
        {
            packing.OFFSETS: (stem + ".row_offsets",),
            packing.SCALE: (".weight_scale",),
            packing.ZERO: (".weight_zero_point",),
        },
        logical=stem or ".weight",
    )


FAMILIES = [
    Family(
        "compressed-tensors",
        "_packed",
        frozenset(("I32",)),
        {packing.SCALE: ("_scale",)},
        ct_packed,
        {packing.ZERO: ("_zero_point",), packing.GROUPS: ("_g_idx",), packing.SHAPE: ("_shape",)},
        logical="",
    ),
    Family(
        "compressed-tensors fp4",
        "_packed",
        frozenset(("U8",)),
        {packing.SCALE: ("_scale",)},
        ct_fp4,
        {packing.GLOBAL: ("_global_scale",)},
        logical="",
    ),
    _sparse(".weight"),
    _sparse(".bias"),
    _sparse("")._replace(
        telling=(packing.MASK, packing.OFFSETS, packing.SHAPE),
        described_in=(".shape",),
        strays=Strays(
            "compressed-tensors",
            (SPARSE, ".bitmask", ".row_offsets"),
            "but not the other parts of a sparse tensor",
            (".weight", ".bias"),
        ),
    ),
]
