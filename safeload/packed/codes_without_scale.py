"""Finds the tensors that hold codes: numbers that mean nothing without a scale, which is stored in another tensor.

Published checkpoints keep quantized weights as several plain tensors: ``X.weight`` as fp8 beside
``X.weight_scale_inv``, ``X.qweight`` beside ``X.scales``. Read alone, the codes look like weights of any other dtype.
`find` recognises them by their dtype, their companions in the table below, and the configuration of the checkpoint.
Every operation that would treat them as plain numbers calls `refuse`.

Sources of the names: the quantizers of transformers, compressed-tensors, AutoGPTQ and GPTQModel, AutoAWQ,
bitsandbytes, EETQ, nvidia-modelopt, mlx-lm, ComfyUI, quanto, HQQ, torchao, ExLlama, AQLM, VPTQ, QuIP#, Marlin.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..base import dtypes
from ..base.text import clip, printable, show
from ..engine.read.tensors import FileTensor, Tensors
from ..engine.run.weight_file import WeightFile
from ..errors import SafeloadError, UnsupportedError
from ..stores.json_file import read_if_there, read_json
from .bitsandbytes import GPTQMODEL_STATE, STATES
from .companions import unread
from .config import Quantization, quantization_of
from .packed_group import FP8, Stored
from .refused import Refusal, refusal_of
from .sparse import BESIDE as BESIDE_SPARSE
from .sparse import SUFFIX as SPARSE

_BESIDE_WIDE = (*STATES.values(), ".quant_map", GPTQMODEL_STATE, "_quant_map")
# Beside scales with the names of others: they tell more.
_MARKS = (".comfy_quant", ".input_rotation")
_CODES = dtypes.FLOAT_CODES | dtypes.INTEGER_CODES

# Most codes in one element of these dtypes: words and bytes hold codes of one bit or more.
_PER_ELEMENT = {"I8": 8, "U8": 8, "I16": 16, "I32": 32, "U32": 32}

# Most indexes beside a shard that are read: one, and those of variants.
_INDEXES = 4


class Codes(NamedTuple):
    """What dequantizing a tensor of codes needs.

    Attributes:
        dtype: of the codes, such as "F8_E4M3".
        scale: name of the companion tensor; None if only the configuration identifies the codes.
        method: ``quant_method`` of the configuration; None without one.
        refusal: what they are, if `refused` knows them.
        reason: why this tensor of a known family is not dequantized.
    """

    dtype: str
    scale: str | None
    method: str | None
    refusal: Refusal | None = None
    reason: str | None = None


class _Row(NamedTuple):
    """A naming scheme for codes and their companions.

    Attributes:
        main: suffix of the name of the codes.
        scales: suffixes that replace ``main`` in names of companions whose shape must fit that of the codes.
        others: suffixes that replace ``main`` in names of companions of any shape.
    """

    main: str
    scales: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


_ROWS = (
    # fp8, compressed-tensors, modelopt, BitNet; fused experts have no ".weight"; EETQ; bitsandbytes, 4 bits
    _Row(
        "",
        ("_scale_inv", "_scale", "_scale_2", "_scales", ".absmax", "_absmax", "_scb"),
        (".quant_map", *STATES.values(), "_quant_map", GPTQMODEL_STATE),
    ),
    # bitsandbytes, 8 bits; ComfyUI; Mistral; MLX and transformers' metal
    _Row(".weight", (".SCB", ".scale_weight", ".qscale_weight", ".scales"), (".comfy_quant",)),
    _Row(".weight", (), (".weights_scaling_factor", ".per_channel_scale")),  # TensorRT-LLM
    _Row(".qweight", (".scales", ".weight_scales"), (".qzeros",)),  # GPTQ, AWQ, auto-round; EETQ
    _Row("_packed", ("_scale",), ("_shape", "_global_scale")),  # compressed-tensors
    _Row(".weight_packed", (), (".scale_packed",)),  # Marlin 2:4
    _Row("_blocks", ("_scales",)),  # gpt-oss
    _Row(".blocks", (".scales",)),  # gpt-oss, OpenAI's own files
    _Row("_quantized", ("_scale",)),  # Gemma
    _Row("_qdata", ("_scale",)),  # torchao
    _Row("._data", ("._scale",)),  # quanto, 8 bits
    _Row("._data._data", ("._scale",), ("._shift",)),  # quanto, 2 and 4 bits
    _Row(".W_q", (), (".scale", ".meta")),  # HQQ
    _Row(".q_weight", (), (".q_scale",)),  # EXL2
    _Row(".trellis", (), (".suh", ".svh", ".SU", ".SV")),  # EXL3; QTIP
    _Row(".codes", (), (".codebooks",)),  # AQLM
    _Row(".indices", (), (".centroids.weight",)),  # VPTQ
    _Row(".Qidxs", (), (".SU", ".SV")),  # QuIP#
    _Row(".B", (), (".s",)),  # Marlin
    _Row(".col_vals", (), (".dense_weights",)),  # SpQR
)

# Suffixes of names that are codes under a configuration with a quantization even without a companion, which may be in a
# missing shard. Floating codes need no such name.
_MAINS = tuple(dict.fromkeys((".weight", *(row.main for row in _ROWS if row.main), "gate_up_proj", "down_proj")))


def could_hold(rows: Iterable[dtypes.Dtype]) -> bool:
    """Whether any of these dtypes can store codes."""
    return any(row.code in _CODES for row in set(rows))


def find(
    tensors: Mapping[str, Stored], config: Mapping[str, Any] | None = None, elsewhere: Container[str] = ()
) -> dict[str, Codes]:
    """The tensors that hold codes.

    Args:
        tensors: all tensors of a checkpoint, by name: a companion may be in any of its files.
        config: its parsed ``config.json``; None without one.
        elsewhere: names of tensors in shards that are not open, of which only the names are known.

    Returns:
        A description of each tensor of codes, by name, in the order given.
    """
    quantization = quantization_of(config)
    companions = {
        name: _companion(name, stored, tensors) or _companion_elsewhere(name, elsewhere)
        for name, stored in tensors.items()
        if _may_be(stored)
    }
    bare = {name: name for name, companion in companions.items() if companion is None and _is_bare(tensors[name])}
    if bare:
        beside = ((name, other) for name, other in unread(tensors, bare) if not other.endswith(".scale"))
        companions.update(
            (name, other)
            for name, other in beside
            if _is_scale(tensors[other].row) and _fits(tensors[name], tensors[other].shape)
        )
    scales = set(companions.values())
    found = {}
    for name, companion in companions.items():
        if companion is not None or (
            quantization is not None and name not in scales and _is_named(name, tensors[name])
        ):
            method = None if quantization is None else quantization.shown
            code = tensors[name].row.code
            stem = name.removesuffix(".weight")
            by = next((stem + mark for mark in _MARKS if stem + mark in tensors), companion)
            found[name] = Codes(code, companion, method, refusal_of(name, code, by, quantization))
    _add_others(tensors, elsewhere, quantization, found)
    return found


def _add_others(
    tensors: Mapping[str, Stored], elsewhere: Container[str], quantization: Quantization | None, found: dict[str, Codes]
) -> None:
    """Adds codes of any dtype that only what stands beside them tells."""
    method = None if quantization is None else quantization.shown
    for name, stored in tensors.items():
        beside = () if name in found else _beside(name, stored)
        companion = next((other for other in beside if other in tensors or other in elsewhere), None)
        if companion is not None:
            code = stored.row.code
            found[name] = Codes(code, companion, method, refusal_of(name, code, companion, quantization))


def _beside(name: str, stored: Stored) -> Iterable[str]:
    """Names of which one makes a tensor of any dtype one of codes."""
    if name.endswith(SPARSE):  # values of compressed-tensors, which mean nothing without their places
        return (name.removesuffix(SPARSE) + suffix for suffix in BESIDE_SPARSE)
    # The bytes of bitsandbytes, stored as a column of elements of a wider dtype, such as BF16.
    return (name + suffix for suffix in _BESIDE_WIDE) if stored.shape[1:] == (1,) else ()


def _may_be(stored: Stored) -> bool:
    return stored.row.code in _CODES


def _is_bare(stored: Stored) -> bool:
    """Whether a companion of any name that sounds like a scale, but "scale" itself, makes this matrix one of codes."""
    return stored.row.code in FP8 and len(stored.shape) > 1


def _is_named(name: str, stored: Stored) -> bool:
    """Whether a tensor without a companion holds codes under a configuration with a quantization."""
    if stored.row.code in dtypes.FLOAT_CODES:
        return True
    return len(stored.shape) > 1 and name.endswith(_MAINS)


def _companion(name: str, stored: Stored, tensors: Mapping[str, Stored]) -> str | None:
    """The name of the companion that identifies a tensor as codes; None without one."""
    for row in _ROWS:
        if not name.endswith(row.main):
            continue
        stem = name[: len(name) - len(row.main)]
        for suffix in row.scales:
            other = tensors.get(stem + suffix)
            if other is not None and _is_scale(other.row) and _fits(stored, other.shape):
                return stem + suffix
        for suffix in row.others:
            if stem + suffix in tensors:
                return stem + suffix
    return _deepseek_scale(name, stored, tensors)


def _companion_elsewhere(name: str, elsewhere: Container[str]) -> str | None:
    """The name of a companion in a shard that is not open, of which only the name can be checked."""
    for row in _ROWS:
        if name.endswith(row.main):
            stem = name[: len(name) - len(row.main)]
            for suffix in (*row.scales, *row.others):
                if stem + suffix in elsewhere:
                    return stem + suffix
    return None


def _deepseek_scale(name: str, stored: Stored, tensors: Mapping[str, Stored]) -> str | None:
    """``X.scale`` of DeepSeek V4, with an element per block. Norms also have a parameter of that name."""
    if not name.endswith(".weight") or stored.row.block_bytes != 1:
        return None
    other = tensors.get(name[: -len("weight")] + "scale")
    if other is None or not _is_scale(other.row) or len(other.shape) != len(stored.shape) or len(stored.shape) < 2:
        return None
    smaller = all(a <= b for a, b in zip(other.shape, stored.shape, strict=True)) and other.shape != stored.shape
    return name[: -len("weight")] + "scale" if smaller else None


def _is_scale(row: dtypes.Dtype) -> bool:
    """Whether scales have this dtype: a float, or U8 with the bits of a float8."""
    return row.floating or row.code == "U8"


def _fits(codes: Stored, scale: tuple[int, ...]) -> bool:
    """Whether a scale of this shape can be broadcast over codes, with one block of codes per element.

    Axes of the scale that are longer than 1 correspond to different axes of the codes, in order, and are no longer than
    those.
    """
    per_element = _PER_ELEMENT.get(codes.row.code, 1)
    axes: Iterator[int] = iter(codes.shape)
    return all(any(length <= axis * per_element for axis in axes) for length in scale if length != 1)


def refuse(codes: Mapping[str, Codes], names: Iterable[str], what: str, where: str = "") -> None:
    """Raise an error if any of the named tensors holds codes: about the first whose reason is known, else the first.

    Args:
        codes: the codes of the checkpoint, from `find`.
        names: the requested tensors.
        what: the operation that would treat codes as numbers, as messages name it: "dtype=", "stats".
        where: the checkpoint's path; "" for arrays in memory.

    Raises:
        UnsupportedError: the message names tensor, scale and quant_method.
    """
    held = [name for name in names if name in codes] if codes else ()
    if not held:
        return
    name = next((name for name in held if codes[name].reason is not None), held[0])
    dtype, scale, method, refusal, reason = codes[name]
    kind, other = ("values", "mask") if name.endswith(SPARSE) else ("codes", "scale")
    beside = f"whose {other} is {'not here' if scale is None else show(scale)}"
    said = "" if method is None else f" (quant_method {clip(printable(method), 90)} in config.json)"
    head = f"{where}{': ' if where else ''}tensor {show(name)} holds {dtype} {kind}, {beside}{said}. "
    if refusal is not None:
        raise UnsupportedError(
            f"{head}This is {refusal.what}: safeload does not dequantize it, {refusal.reader} reads it. {what} would "
            "treat the codes as weights. safeload.load without dtype= gives them as stored",
            path=where or None,
            tensor=name,
        )
    if reason is not None:
        raise UnsupportedError(
            f"{head}safeload does not dequantize it: {reason}. {what} would treat the codes as weights. safeload.load "
            "without dtype= gives them as stored",
            path=where or None,
            tensor=name,
        )
    raise UnsupportedError(
        f"{head}{what} would treat the codes as weights. safeload.load of the whole checkpoint gives true "
        "weights where it dequantizes this quantization, and the codes as stored with stored=True",
        path=where or None,
        tensor=name,
    )


# ---- in files ----


def stored_of(parts: Iterable[FileTensor]) -> dict[str, Stored]:
    """Stored dtype and shape of tensors, without those that are already described as quantized."""
    stored = {}
    for name, file, index in parts:
        table = file.table
        if not table.is_quantized(index):
            stored[name] = Stored(table.rows[index], table.shapes[index])
    return stored


def config_beside(file: WeightFile) -> dict[str, Any] | None:
    """The ``config.json`` in the folder of a file that was opened alone; None if it is missing or unreadable."""
    files = file.files
    try:
        return read_if_there(files.join(_folder_of(file)[0], "config.json"), "config.json", files)
    except (SafeloadError, OSError):  # ignored: the file was not requested
        return None


def _folder_of(file: WeightFile) -> tuple[str, str]:
    """The folder of a file, and its name there."""
    return file.files.split(file.place if file.remote else file.path)


def shards_beside(file: WeightFile) -> Container[str]:
    """Names of tensors in the other shards of a file that was opened alone, from the index in its folder."""
    files = file.files
    folder, base = _folder_of(file)
    names: set[str] = set()
    try:
        indexes = [name for name, _ in files.listing(folder or ".") if name.endswith(".index.json")]
        for index in indexes[:_INDEXES]:
            weight_map = read_json(files.join(folder, index), "index.json", files).get("weight_map")
            if isinstance(weight_map, Mapping) and base in weight_map.values():
                names.update(name for name, shard in weight_map.items() if shard != base)
    except (SafeloadError, OSError):  # ignored: the file was not requested
        pass
    return names


def codes_of(
    files: Iterable[WeightFile],
    parts: Sequence[FileTensor],
    config: Mapping[str, Any] | None,
    *,
    alone: bool,
    indexed: bool,
    refused: Mapping[str, str],
) -> dict[str, Codes]:
    """The tensors of open files that hold codes.

    Args:
        files: the files.
        parts: their tensors.
        config: parsed ``config.json``.
        alone: whether the files were opened without their folder; see `find_alone`.
        indexed: see `find_alone`.
        refused: codes of known families that are not dequantized, with the reason.
    """
    opened = list(files)
    if not any(could_hold(file.table.rows) or file.table.quantized for file in opened):
        return {}
    found = find_alone(parts, opened, indexed=indexed) if alone else find(stored_of(parts), config)
    if refused:
        quantization = quantization_of(config)
        method = None if quantization is None else quantization.shown
        dtypes_of = {name: file.table.row(index).code for name, file, index in parts}
        for name, reason in refused.items():
            codes = found.get(name, Codes(dtypes_of[name], None, method))
            found[name] = codes._replace(reason=reason)
    return found


def find_alone(parts: Sequence[FileTensor], files: Sequence[WeightFile], *, indexed: bool) -> dict[str, Codes]:
    """`find` for files that were opened without their folder; it also consults the config and the index in the folder.

    Args:
        parts: their tensors.
        files: the files that have them.
        indexed: whether the files come from an index, so that no scale is in another shard.
    """
    if not files:
        return {}
    elsewhere = shards_beside(files[0]) if len(files) == 1 and not indexed else ()
    return find(stored_of(parts), config_beside(files[0]), elsewhere)


def refuse_floating(file: WeightFile, parts: Iterable[FileTensor], what: str) -> None:
    """Refuses ``dtype=`` for floating tensors that hold codes, in functions that return stored tensors.

    Args:
        file: the file of the tensors.
        parts: the requested tensors.
        what: the function, as messages name it.

    Raises:
        UnsupportedError: the message names tensor, scale and `safeload.load`.
    """
    rows = file.table.rows
    wide = could_hold(rows) and any(shape[1:] == (1,) for shape in file.table.shapes)
    sparse = could_hold(rows) and any(name.endswith(SPARSE) for name in file.table.names)
    if not wide and not sparse and not could_hold(row for row in set(rows) if row.floating):
        return
    codes = find_alone(Tensors.in_file(file), [file], indexed=False)
    converted = (name for name, _, index in parts if file.table.row(index).floating)
    refuse(codes, converted, f"{what} with dtype=", file.path)
