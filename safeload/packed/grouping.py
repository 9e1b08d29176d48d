"""Which tensors hold codes, numbers that mean nothing without the scale that lies beside them.

Published checkpoints keep quantized weights as several plain tensors: ``X.weight`` as fp8 beside
``X.weight_scale_inv``, ``X.qweight`` beside ``X.scales``. Read alone, the codes look like weights of any other dtype.
`find` names them by their dtype, by their companions in the table below, and by the configuration of the checkpoint;
every operation that would take them for numbers calls `refuse`.

Sources of the names: the quantizers of transformers, compressed-tensors, AutoGPTQ and GPTQModel, AutoAWQ,
bitsandbytes, EETQ, nvidia-modelopt, mlx-lm, ComfyUI, quanto, HQQ, torchao, ExLlama, AQLM, VPTQ, QuIP#, Marlin.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..base import dtypes
from ..base.file import WeightFile
from ..base.text import clip, printable, show
from ..engine.load import Part, parts_of
from ..errors import SafeloadError, UnsupportedError

# Dtypes that codes are stored in. F8_E8M0 holds powers of two: it is a dtype of scales, never of codes.
_FLOAT_CODES = frozenset(row.code for row in dtypes.TABLE if row.floating and row.bits <= 8) - {"F8_E8M0"}
_INTEGER_CODES = frozenset(("I8", "U8", "I16", "I32", "U32"))
_CODES = _FLOAT_CODES | _INTEGER_CODES

# Codes in one element of these, at the most: words and bytes hold codes of one bit or more.
_PER_ELEMENT = {"I8": 8, "U8": 8, "I16": 16, "I32": 32, "U32": 32}

# Configurations are searched for a quantization in objects so deep: thinker_config.text_config is the deepest known.
_CONFIG_DEPTH = 4
_CONFIG_KEYS = ("quantization_config", "compression_config")
# Indexes beside a shard that are looked into: one, and those of variants.
_INDEXES = 4
# Where mlx-lm says so; it keeps a copy under the first key, without a method.
_MLX = "quantization"


class Stored(NamedTuple):
    """A tensor as a file stores it.

    Attributes:
        row: row of the dtype table.
        shape: logical shape.
    """

    row: dtypes.Dtype
    shape: tuple[int, ...]


class Codes(NamedTuple):
    """What a tensor of codes needs to become numbers.

    Attributes:
        dtype: of the codes, such as "F8_E4M3".
        scale: name of the tensor beside it that tells; None where only the configuration says what it is.
        method: ``quant_method`` of the configuration; None without one.
    """

    dtype: str
    scale: str | None
    method: str | None


class _Row(NamedTuple):
    """One way to name codes and their companions.

    Attributes:
        main: how the name of the codes ends.
        scales: what stands in place of that in the name of a companion whose shape must fit that of the codes.
        others: likewise of companions that may have any shape.
    """

    main: str
    scales: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


_ROWS = (
    # fp8, compressed-tensors, modelopt, BitNet; fused experts have no ".weight"; EETQ; bitsandbytes, 4 bits
    _Row(
        "",
        ("_scale_inv", "_scale", "_scale_2", "_scales", ".absmax"),
        (".quant_map", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
    ),
    # bitsandbytes, 8 bits; ComfyUI; Mistral; MLX and transformers' metal
    _Row(".weight", (".SCB", ".scale_weight", ".qscale_weight", ".scales"), (".comfy_quant",)),
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
    _Row(".trellis", (), (".suh", ".svh")),  # EXL3
    _Row(".codes", (), (".codebooks",)),  # AQLM
    _Row(".indices", (), (".centroids.weight",)),  # VPTQ
    _Row(".Qidxs", (), (".SU", ".SV")),  # QuIP#
    _Row(".B", (), (".s",)),  # Marlin
)

# Ends of names that a configuration with a quantization makes codes even where no companion is: it may be in a shard
# that is missing. Floating codes need no such name.
_MAINS = tuple(dict.fromkeys((".weight", *(row.main for row in _ROWS if row.main), "gate_up_proj", "down_proj")))


class Quantization(NamedTuple):
    """What a ``config.json`` says of quantized weights.

    Attributes:
        key: where it says so: "quantization_config".
        method: how they were quantized, such as "gptq"; None where it does not say.
    """

    key: str
    method: str | None

    def __str__(self) -> str:
        return self.key if self.method is None else f"{self.key} {self.method[:40]}"


def quantization_of(config: Mapping[str, Any] | None) -> Quantization | None:
    """What a ``config.json`` says of quantized weights, nested configurations included; None for nothing."""
    level = [] if config is None else [config]
    for _ in range(_CONFIG_DEPTH):
        for holder in level:
            for key in _CONFIG_KEYS:
                found = holder.get(key)
                if isinstance(found, Mapping) and found:
                    return Quantization(key, _method(found))
            found = holder.get(_MLX)
            if isinstance(found, Mapping) and {"bits", "group_size"} <= found.keys():
                return Quantization(_MLX, "mlx")
        level = [value for holder in level for value in holder.values() if isinstance(value, Mapping)]
    return None


def _method(said: Mapping[str, Any]) -> str | None:
    for key in ("quant_method", "quant_algo", "format"):
        if isinstance(said.get(key), str):
            return str(said[key])
    if said.get("load_in_4bit") or said.get("load_in_8bit"):
        return "bitsandbytes"
    return "mlx" if {"bits", "group_size"} <= said.keys() else None


def could_hold(rows: Iterable[dtypes.Dtype]) -> bool:
    """Whether any of these dtypes is one that codes are stored in."""
    return any(row.code in _CODES for row in set(rows))


def find(
    tensors: Mapping[str, Stored], config: Mapping[str, Any] | None = None, elsewhere: Container[str] = ()
) -> dict[str, Codes]:
    """The tensors that hold codes.

    Args:
        tensors: all of a checkpoint, by name: a companion may be in any of its files.
        config: its parsed ``config.json``; None without one.
        elsewhere: names of tensors of which nothing else is known, in shards that are not open.

    Returns:
        What is known of each tensor of codes, by name, in the order given.
    """
    quantization = quantization_of(config)
    companions = {
        name: _companion(name, stored, tensors) or _companion_elsewhere(name, elsewhere)
        for name, stored in tensors.items()
        if _may_be(stored)
    }
    scales = set(companions.values())
    found = {}
    for name, companion in companions.items():
        if companion is not None or (
            quantization is not None and name not in scales and _is_named(name, tensors[name])
        ):
            method = None if quantization is None else quantization.method or quantization.key
            found[name] = Codes(tensors[name].row.code, companion, method)
    return found


def _may_be(stored: Stored) -> bool:
    return stored.row.code in _CODES


def _is_named(name: str, stored: Stored) -> bool:
    """Whether a configuration with a quantization makes a tensor codes although nothing beside it does."""
    if stored.row.code in _FLOAT_CODES:
        return True
    return len(stored.shape) > 1 and name.endswith(_MAINS)


def _companion(name: str, stored: Stored, tensors: Mapping[str, Stored]) -> str | None:
    """The tensor beside codes that tells that they are such."""
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
    """The tensor beside codes in a shard that is not open: its name alone tells."""
    for row in _ROWS:
        if name.endswith(row.main):
            stem = name[: len(name) - len(row.main)]
            for suffix in (*row.scales, *row.others):
                if stem + suffix in elsewhere:
                    return stem + suffix
    return None


def _deepseek_scale(name: str, stored: Stored, tensors: Mapping[str, Stored]) -> str | None:
    """``X.scale`` of DeepSeek V4. Norms have a parameter of that name: only a grid of blocks is a scale."""
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
    """Whether a scale of this shape can broadcast over codes, a block for each element.

    Axes of a scale other than 1 stand for different axes of the codes, in their order, and are no longer than these.
    """
    per_element = _PER_ELEMENT.get(codes.row.code, 1)
    axes: Iterator[int] = iter(codes.shape)
    return all(any(length <= axis * per_element for axis in axes) for length in scale if length != 1)


def refuse(codes: Mapping[str, Codes], names: Iterable[str], what: str, where: str = "") -> None:
    """Raises for the first of some tensors that holds codes.

    Args:
        codes: those of the checkpoint, from `find`.
        names: the tensors that are asked for.
        what: what takes them for numbers, as messages name it: "dtype=", "stats".
        where: the checkpoint's path; "" for arrays in memory.

    Raises:
        UnsupportedError: the message names tensor, scale and quant_method.
    """
    name = next((name for name in names if name in codes), None)
    if name is None:
        return
    dtype, scale, method = codes[name]
    beside = f"whose scale is {show(scale)}" if scale is not None else "whose scale is not here"
    said = "" if method is None else f" (quant_method {clip(printable(method), 40)} in config.json)"
    raise UnsupportedError(
        f"{where}{': ' if where else ''}tensor {show(name)} holds {dtype} codes, {beside}{said}. {what} would take the "
        "codes for weights, and this version does not dequantize them; safeload.load without dtype= gives them stored",
        path=where or None,
        tensor=name,
    )


# ---- in files ----


def stored_of(parts: Iterable[Part]) -> dict[str, Stored]:
    """Dtype and shape of tensors as their files store them, without those that are known to be quantized."""
    stored = {}
    for name, file, index in parts:
        table = file.table
        if not (table.quantized and (table.row(index).blocked or table.scale(index) is not None)):
            stored[name] = Stored(table.rows[index], table.shapes[index])
    return stored


def config_beside(path: str) -> dict[str, Any] | None:
    """The ``config.json`` in the folder of a file that was opened alone; None where there is none that can be read."""
    from ..base.json_file import read_json

    config = os.path.join(os.path.dirname(path), "config.json")
    try:
        return read_json(config, "config.json") if os.path.exists(config) else None
    except (SafeloadError, OSError):  # it was not asked for
        return None


def shards_beside(path: str) -> Container[str]:
    """Names of the tensors in the other shards of a file that was opened alone, by the index in its folder."""
    from ..base.json_file import read_json

    folder, base = os.path.split(path)
    names: set[str] = set()
    try:
        indexes = [name for name in os.listdir(folder or ".") if name.endswith(".index.json")]
        for index in indexes[:_INDEXES]:
            weight_map = read_json(os.path.join(folder, index), "index.json").get("weight_map")
            if isinstance(weight_map, Mapping) and base in weight_map.values():
                names.update(name for name, shard in weight_map.items() if shard != base)
    except (SafeloadError, OSError):  # it was not asked for
        pass
    return names


def find_alone(parts: Sequence[Part], files: Sequence[str], *, indexed: bool) -> dict[str, Codes]:
    """`find` for files that were opened without their folder, whose other files tell what they hold all the same.

    Args:
        parts: their tensors.
        files: their paths.
        indexed: whether an index led to them, so that no scale is in a shard that is not among them.
    """
    if not files:
        return {}
    elsewhere = shards_beside(files[0]) if len(files) == 1 and not indexed else ()
    return find(stored_of(parts), config_beside(files[0]), elsewhere)


def refuse_floating(file: WeightFile, parts: Iterable[Part], what: str) -> None:
    """Refuses ``dtype=`` for floating tensors that hold codes, for functions that give stored tensors.

    Args:
        file: that has them.
        parts: the tensors that are asked for.
        what: the function, as messages name it.

    Raises:
        UnsupportedError: the message names tensor, scale and `safeload.load`.
    """
    if not could_hold(row for row in set(file.table.rows) if row.floating):
        return
    codes = find_alone(parts_of(file), [file.path], indexed=False)
    converted = (name for name, _, index in parts if file.table.row(index).floating)
    refuse(codes, converted, f"{what} with dtype=", file.path)
