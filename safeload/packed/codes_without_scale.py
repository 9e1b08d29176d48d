"""Recognize code tensors: numbers that mean nothing without a scale, which is another tensor.

Published checkpoints keep quantized weights as plain tensors: ``X.weight`` as fp8 beside ``X.weight_scale_inv``,
``X.qweight`` beside ``X.scales``. Read alone, the codes look like weights of any other dtype. `find` recognizes codes
outside packed tensors by dtype, by the names of their companions, and by the configuration. Operations should call
`refuse` before they treat tensors as plain numbers.

Sources of the names: the quantizers of transformers, compressed-tensors, AutoGPTQ and GPTQModel, AutoAWQ,
bitsandbytes, EETQ, nvidia-modelopt, mlx-lm, ComfyUI, quanto, HQQ, torchao, ExLlama, AQLM, VPTQ, QuIP#, Marlin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..base import dtypes, packing
from ..base.text import clip, printable, show
from ..engine.read.tensors import FileTensor, Tensors
from ..engine.run.weight_file import WeightFile
from ..errors import SafeloadError, UnsupportedError, VerificationError
from ..stores.json_file import read_json
from .companions import is_zero_point, unread
from .families import FAMILIES, FP8, GPTQMODEL_STATE, SPARSE, SPARSE_PARTS, STATES, Stored
from .quantization import Quantization, quantization_beside
from .refused import REFUSALS, Refusal, refusal_of

# Parts beside bitsandbytes' 4-bit codes in a wider dtype.
_BESIDE_WIDE = (*STATES.values(), ".quant_map", GPTQMODEL_STATE, "_quant_map")
# Markers beside scales with ordinary names; the markers are more specific.
_MARKERS = (".comfy_quant", ".input_rotation")
_CODES = dtypes.FLOAT_CODES | dtypes.INTEGER_CODES

# Maximum number of codes in an element of these dtypes: words and bytes hold codes of at least 1 bit.
_PER_ELEMENT = {"I8": 8, "U8": 8, "I16": 16, "I32": 32, "U32": 32}

# Maximum number of indexes to read beside a shard: each variant of a model has its own.
_MOST_INDEXES = 4


class Codes(NamedTuple):
    """A code tensor, its companion and its quantization."""

    dtype: str  # of the codes, such as "F8_E4M3"
    scale: str | None  # the companion tensor; None if only the configuration identifies the codes
    method: str | None  # ``quant_method`` of the configuration
    refusal: Refusal | None = None  # the quantization, if `refused` lists it
    reason: str | None = None  # why this tensor of a known family is not dequantized


# ---- names ----


class _Companions(NamedTuple):
    """Names of the tensors beside codes that identify their quantization."""

    main: str  # suffix of the name of the codes
    suffixes: tuple[str, ...]  # replace ``main`` in the names of companions
    fit: bool  # the shape of the companion must fit the codes


# Companions that neither a family nor a refusal lists.
_MORE = (
    _Companions("", ("_scale_2", "_scales", "_scb"), True),
    _Companions("_quantized", ("_scale",), True),
    _Companions("_qdata", ("_scale",), True),  # torchao
    _Companions("._data._data", ("._scale",), True),  # quanto, 2 and 4 bits
    _Companions("._data._data", ("._shift",), False),
)
# Norms have a parameter of this name too: see `_deepseek_scale`.
_AMBIGUOUS = ".scale"


def _companion_names() -> tuple[_Companions, ...]:
    """Return the names of companions: scales of families, then companions in refusals, then other parts of families."""
    scales: dict[str, dict[str, None]] = {}
    parts: dict[str, dict[str, None]] = {}
    for family in reversed(FAMILIES):  # the usual names are in the last rows
        if packing.MASK in family.required:
            continue  # see `_identifying`
        for role, suffixes in (*family.required.items(), *family.optional.items()):
            rows = scales if role == packing.SCALE else parts
            names = (suffix for suffix in suffixes if suffix != _AMBIGUOUS)
            rows.setdefault(family.main, {}).update(dict.fromkeys(names))
    pairs: dict[str, dict[str, None]] = {}
    for refusal in REFUSALS:
        for main, suffix in refusal.suffixes:
            pairs.setdefault(main, {})[suffix] = None
    return (
        *(_Companions(main, tuple(suffixes), True) for main, suffixes in scales.items()),
        *_MORE,
        *(_Companions(main, tuple(suffixes), False) for main, suffixes in pairs.items()),
        *(
            _Companions(main, tuple(suffix for suffix in suffixes if suffix not in scales.get(main, ())), False)
            for main, suffixes in parts.items()
        ),
    )


_COMPANIONS = _companion_names()
_SUFFIXES = tuple({suffix: None for row in _COMPANIONS for suffix in row.suffixes})

# Names of codes without a companion, which can be in a missing shard, under a configuration with a quantization.
# Floating codes need no such name.
_MAINS = tuple(dict.fromkeys((".weight", *(row.main for row in _COMPANIONS if row.main), "gate_up_proj", "down_proj")))


def _rows_for(names: Iterable[str]) -> list[_Companions]:
    """Return the rows with suffixes that occur among the names: a checkpoint uses few of the many schemes."""
    absent, present = _SUFFIXES, set()
    for name in names:
        while name.endswith(absent):
            suffix = next(suffix for suffix in absent if name.endswith(suffix))
            present.add(suffix)
            absent = tuple(other for other in absent if other != suffix)
    if not present:
        return []
    rows = (row._replace(suffixes=tuple(suffix for suffix in row.suffixes if suffix in present)) for row in _COMPANIONS)
    return [row for row in rows if row.suffixes]


# ---- finding codes ----


def could_hold(rows: Iterable[dtypes.Dtype]) -> bool:
    """Return True if any of these dtypes can store codes."""
    return any(row.code in _CODES for row in set(rows))


def find(
    tensors: Mapping[str, Stored], quantization: Quantization | None = None, elsewhere: Collection[str] = ()
) -> dict[str, Codes]:
    """Return the code tensors, in the given order. All tensors are needed, because a companion can be in any file."""
    rows, rows_elsewhere = _rows_for(tensors), _rows_for(elsewhere)
    companions = {
        name: _companion(name, stored, tensors, rows) or _companion_elsewhere(name, elsewhere, rows_elsewhere)
        for name, stored in tensors.items()
        if stored.row.code in _CODES
    }
    bare = {name: name for name, companion in companions.items() if companion is None and _is_fp8_matrix(tensors[name])}
    if bare:
        beside = ((name, other) for name, other in unread(tensors, bare) if not other.endswith(_AMBIGUOUS))
        companions.update(
            (name, other)
            for name, other in beside
            if _is_scale(tensors[other].row) and _fits(tensors[name], tensors[other].shape)
        )
    scales = set(companions.values())
    method = None if quantization is None else quantization.shown
    codes = {}
    for name, companion in companions.items():
        if companion is None and (quantization is None or name in scales or not _is_named(name, tensors[name])):
            continue
        code, stem = tensors[name].row.code, name.removesuffix(".weight")
        marker = next((stem + suffix for suffix in _MARKERS if stem + suffix in tensors), companion)
        codes[name] = Codes(code, companion, method, refusal_of(name, code, marker, quantization))
    for name, stored in tensors.items():
        identifying = () if name in codes else _identifying(name, stored)
        companion = next((other for other in identifying if other in tensors or other in elsewhere), None)
        if companion is not None:
            code = stored.row.code
            codes[name] = Codes(code, companion, method, refusal_of(name, code, companion, quantization))
    return codes


def _identifying(name: str, stored: Stored) -> Iterable[str]:
    """Return the names of companions that make a tensor of any dtype a code tensor."""
    if name.endswith(SPARSE):  # values of compressed-tensors, which mean nothing without their positions
        return (name.removesuffix(SPARSE) + suffix for suffix in SPARSE_PARTS)
    # The bytes of bitsandbytes, stored as a column of a wider dtype such as BF16.
    return (name + suffix for suffix in _BESIDE_WIDE) if stored.shape[1:] == (1,) else ()


def _is_fp8_matrix(stored: Stored) -> bool:
    """Return True if any companion with the name of a scale is enough to identify codes."""
    return stored.row.code in FP8 and len(stored.shape) > 1


def _is_named(name: str, stored: Stored) -> bool:
    """Return True if a tensor without a companion holds codes under a configuration with a quantization."""
    if stored.row.code in dtypes.FLOAT_CODES:
        return not is_zero_point(name)
    return len(stored.shape) > 1 and name.endswith(_MAINS)


def _companion(name: str, stored: Stored, tensors: Mapping[str, Stored], rows: Iterable[_Companions]) -> str | None:
    """Return the identifying companion of a code tensor, or None."""
    for main, suffixes, fit in rows:
        if not name.endswith(main):
            continue
        stem = name[: len(name) - len(main)]
        for suffix in suffixes:
            other = tensors.get(stem + suffix)
            if other is not None and (not fit or (_is_scale(other.row) and _fits(stored, other.shape))):
                return stem + suffix
    return _deepseek_scale(name, stored, tensors)


def _companion_elsewhere(name: str, elsewhere: Collection[str], rows: Iterable[_Companions]) -> str | None:
    """Return a companion in an unopened shard: its name, not its shape, identifies the codes."""
    for main, suffixes, _ in rows:
        if name.endswith(main):
            stem = name[: len(name) - len(main)]
            for suffix in suffixes:
                if stem + suffix in elsewhere:
                    return stem + suffix
    return None


def _deepseek_scale(name: str, stored: Stored, tensors: Mapping[str, Stored]) -> str | None:
    """Return ``X.scale`` of DeepSeek V4 if it has an element per block. Norms also have such a parameter."""
    if not name.endswith(".weight") or stored.row.block_bytes != 1:
        return None
    scale = name.removesuffix(".weight") + _AMBIGUOUS
    other = tensors.get(scale)
    if other is None or not _is_scale(other.row) or len(other.shape) != len(stored.shape) or len(stored.shape) < 2:
        return None
    smaller = all(a <= b for a, b in zip(other.shape, stored.shape, strict=True)) and other.shape != stored.shape
    return scale if smaller else None


def _is_scale(row: dtypes.Dtype) -> bool:
    """Return True if scales can have this dtype: a float, or U8 with the bits of a float8."""
    return row.floating or row.code == "U8"


def _fits(codes: Stored, scale: tuple[int, ...]) -> bool:
    """Return True if a scale of this shape can be broadcast over codes, with a block of codes per element.

    Axes of the scale longer than 1 must match different axes of the codes, in order, without exceeding their lengths.
    """
    per_element = _PER_ELEMENT.get(codes.row.code, 1)
    axes: Iterator[int] = iter(codes.shape)
    return all(any(length <= axis * per_element for axis in axes) for length in scale if length != 1)


# ---- refusing ----


def refuse(codes: Mapping[str, Codes], names: Iterable[str], what: str, where: str = "") -> None:
    """Raise an error if a requested tensor holds codes, preferably about codes with a known reason."""
    refused = [name for name in names if name in codes] if codes else ()
    if not refused:
        return
    name = next((name for name in refused if codes[name].reason is not None), refused[0])
    dtype, scale, method, refusal, reason = codes[name]
    kind, other = ("values", "mask") if name.endswith(SPARSE) else ("codes", "scale")
    beside = f"whose {other} is {'not here' if scale is None else show(scale)}"
    configured = "" if method is None else f" (quant_method {clip(printable(method), 90)} in config.json)"
    head = f"{where}{': ' if where else ''}tensor {show(name)} holds {dtype} {kind}, {beside}{configured}. "
    advice = "safeload.load without dtype= returns them as stored"
    if refusal is not None:
        why = f"This is {refusal.what}: safeload does not dequantize it, {refusal.reader} reads it. "
    elif reason is not None:
        why = f"safeload does not dequantize it: {reason}. "
    else:
        why = ""
        advice = (
            "safeload.load of the whole checkpoint returns true weights if it can dequantize them, and the codes as "
            "stored with stored=True"
        )
    message = f"{head}{why}{what} would treat the codes as weights. {advice}"
    raise UnsupportedError(message, path=where or None, tensor=name)


# ---- in files ----


def stored_of(parts: Iterable[FileTensor]) -> dict[str, Stored]:
    """Return the stored dtype and shape of tensors outside packed tensors."""
    stored = {}
    for name, file, index in parts:
        table = file.table
        if not table.is_quantized(index):
            stored[name] = Stored(table.rows[index], table.shapes[index])
    return stored


def codes_of(
    files: Sequence[WeightFile],
    parts: Sequence[FileTensor],
    quantization: Quantization | None,
    *,
    search: bool = False,
    incomplete: bool = False,
    refused: Mapping[str, str] | None = None,
) -> dict[str, Codes]:
    """Return the code tensors of open files."""
    if not any(could_hold(file.table.rows) or file.table.quantized for file in files):
        return {}
    if search:
        quantization = quantization_beside(files[0])
    elsewhere = _shards_beside(files[0]) if incomplete and len(files) == 1 else ()
    codes = find(stored_of(parts), quantization, elsewhere)
    if refused:
        method = None if quantization is None else quantization.shown
        code_dtypes = {name: file.table.row(index).code for name, file, index in parts}
        for name, reason in refused.items():
            codes[name] = codes.get(name, Codes(code_dtypes[name], None, method))._replace(reason=reason)
    return codes


def codes_of_keras(parts: Iterable[FileTensor]) -> dict[str, Codes]:
    """Return the code tensors of a Keras file: matrices of 8-bit integers in a layer with floating variables.

    ``Model.quantize`` stores weight = code / scale, in 4 bits two codes a byte. Variables have numbers, not names,
    so only the configuration of the model says which scale belongs to which codes.
    """
    codes: dict[str, tuple[str, str]] = {}
    floating: dict[str, str] = {}  # by layer: the last variable before integer zero points, which is the scale
    integers: Counter[str] = Counter()
    for name, file, index in parts:
        row, layer = file.table.row(index), name.rpartition(".")[0]
        if row.floating and integers[layer] < 2:
            floating[layer] = name
        elif row.code in ("I8", "U8") and len(file.table.shape(index)) > 1:
            integers[layer] += 1
            codes[name] = row.code, layer
    reason = "a quantized layer of Keras, and only Keras computes weights from its codes"
    return {
        name: Codes(code, floating[layer], None, reason=reason)
        for name, (code, layer) in codes.items()
        if layer in floating
    }


def _shards_beside(file: WeightFile) -> Collection[str]:
    """Return the tensors in the other shards of a file opened alone, from the index in its folder."""
    files = file.files
    folder, base = files.split(file.place if file.remote else file.path)
    names: set[str] = set()
    try:
        indexes = [name for name, _ in files.listing(folder or ".") if name.endswith(".index.json")]
        for index in indexes[:_MOST_INDEXES]:
            weight_map = read_json(files.join(folder, index), "index.json", files).get("weight_map")
            if isinstance(weight_map, Mapping) and base in weight_map.values():
                names.update(name for name, shard in weight_map.items() if shard != base)
    except VerificationError:
        raise
    except (SafeloadError, OSError):  # ignored: nobody requested this file
        pass
    return names


def refuse_floating(file: WeightFile, parts: Iterable[FileTensor], what: str) -> None:
    """Refuse ``dtype=`` for floating codes, in functions that return stored tensors."""
    rows = file.table.rows
    if not could_hold(rows):
        return
    wide = any(shape[1:] == (1,) for shape in file.table.shapes)
    sparse = any(name.endswith(SPARSE) for name in file.table.names)
    if not wide and not sparse and not could_hold(row for row in set(rows) if row.floating):
        return
    codes = codes_of([file], Tensors.in_file(file), None, search=True, incomplete=True)
    converted = (name for name, _, index in parts if file.table.row(index).floating)
    refuse(codes, converted, f"{what} with dtype=", file.path)
