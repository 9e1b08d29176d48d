"""The families of quantized tensors: a module each, listed here, with its rows at the end.

A row of `FAMILIES` says which stored tensors belong together, by the suffixes of their names, and has the function that
turns their shapes and dtypes into a `Packing`, or explains why they do not fit. Shapes decide; the configuration should
confirm. The finder (`find`) tries the rows in order, and recognizes codes of unsupported formats by the same suffixes.

A row of `PRESETS` is a format that we write for an engine: its blocks, its rounding (csrc/kernels/encode.c), its stored
parts, and the function that describes them in ``config.json``. Rows of `FAMILIES` read the result.

Quantizations that safeload recognizes and does not dequantize are rows of ``refused.json``: a ``name``, which says why,
the ``reader``, and what identifies it: the suffix ``main`` of codes with any tensor ``beside`` them (if ``fp8``, also
of fp8 codes), or ``methods`` of the configuration. Suffixes are more specific than a method, which can have different
layouts. A row hides the reason that a module gives. Sources: transformers' quantizers, ExLlamaV2 and V3, AQLM, VPTQ,
QuIP#, QTIP, SpQR, Marlin, HQQ, EETQ; Quark's as in `quark`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from ..core import arrays, dtypes, packing
from ..core.files import read_data
from ..core.text import show

# The usual formats are in the last modules.
MODULES = [
    "quark", "small_integers", "bitsandbytes", "mlx", "gptq", "gguf", "floats", "compressed_tensors",
]  # fmt: skip

FP8 = frozenset(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"))
_NOT_FP8 = dtypes.FLOAT_CODES - FP8 | dtypes.INTEGER_CODES
# The role of the tensors beside codes of an unsupported quantization.
MARK = "mark"
# The suffix of compressed-tensors' sparse values, which mean nothing without their positions.
SPARSE = ".compressed"


class Stored(NamedTuple):
    """A tensor as a file stores it."""

    row: dtypes.Dtype
    shape: tuple[int, ...]  # logical shape


class Strays(NamedTuple):
    """Parts that look like weights without the rest of their tensor."""

    method: str  # ``quant_method`` under which they are a fault
    suffixes: tuple[str, ...]
    missing: str  # for messages
    ends: tuple[str, ...] = ("",)  # of the names of tensors; other names get ".weight"


class Family(NamedTuple):
    """A family of packed tensors, or a recognized quantization that safeload does not dequantize."""

    name: str
    main: str  # suffix of the name of the codes
    dtypes: frozenset[str]  # codes of the dtypes of the codes
    required: Mapping[str, tuple[str, ...]]  # suffixes of the parts in place of ``main``, preferred first
    describe: Callable[[Any], packing.Packing] | None  # of a `PackedGroup`; may raise `Misfit`; None with a ``reader``
    optional: Mapping[str, tuple[str, ...]] = {}  # suffixes of parts that can be absent
    logical: str | None = None  # replaces ``main`` in the name of the packed tensor; None leaves it
    # required ``quant_method`` of the configuration; if set, only this row and fp8 apply to its codes
    method: str | None = None
    private: bool = False  # True if the names of parameters begin with "_" in the file: X._weight_qdata is X.weight
    telling: tuple[str, ...] = ()  # roles of parts beside codes of any dtype
    wide: bool = False  # True if codes of any dtype are a single column
    described_in: tuple[str, ...] = ()  # suffixes of small parts, to read in a batch
    strays: Strays | None = None
    reader: str | None = None  # the tool that reads an unsupported quantization; ``name`` says why it is unsupported
    methods: tuple[str, ...] = ()  # of an unsupported quantization: values of ``quant_method``, ``format`` and so on


@cache
def _modules() -> list[Any]:
    """Return the modules; they are imported here, because most checkpoints need none."""
    return [import_module(f".{name}", __package__) for name in MODULES]


@cache
def families() -> tuple[Family, ...]:
    """Return all rows of families."""
    rows = [row for module in _modules() for row in module.FAMILIES]
    for row in read_data(__name__, "refused.json")["refused"]:
        codes = dtypes.FLOAT_CODES | dtypes.INTEGER_CODES if row.get("fp8") else _NOT_FP8
        beside, methods = {MARK: row["beside"]} if "beside" in row else {}, row.get("methods", ())
        rows.append(
            Family(row["name"], row.get("main", ""), codes, beside, None, reader=row["reader"], methods=methods)
        )
    return tuple(rows)


@cache
def settings_of_modules() -> dict[str, Callable[[Any, str], Mapping[str, Any] | None]]:
    """Return functions of a `Quantization` and a module that return its own settings, by ``quant_method``."""
    tables = [getattr(module, "SETTINGS_OF_MODULES", {}) for module in _modules()]
    return {method: read for table in tables for method, read in table.items()}


# ---- writing ----

# Columns of a group of 4-bit integers by the suffix of a format; None for whole rows.
GROUP_SIZES = {"": 128, "-g32": 32, "-g64": 64, "-g128": 128, "-channel": None}

# Why a linear module stays unquantized; the reader of some formats need not be told.
IS_HEAD, IS_EXPERT = "is the head", "is an expert"


class Engine(NamedTuple):
    """The program that loads a folder."""

    title: str  # for messages
    stacks_experts: bool = False  # True to load the experts of a layer as a single tensor
    quantizes_ends: bool = False  # True to quantize embeddings and the head
    quantizes_experts: bool = True
    casts: bool = False  # True to give unquantized tensors the dtype of the weights too
    always_indexed: bool = False  # True to write an index even for a single shard
    metadata: str = "pt"  # "format" in the header of each file
    shard_size: int = 5_000_000_000  # default limit in bytes
    dropped: tuple[str, ...] = ()  # suffixes of stored tensors that the engine computes itself
    kv_cache: bool = False  # True if it reads the scales of an fp8 KV cache beside weights


class StoredPart(NamedTuple):
    """A stored tensor of a quantized weight."""

    suffix: str  # after the name of the module
    dtype: str | None  # code; None for the dtype of the weight


class Preset(NamedTuple):
    """A format of an engine."""

    name: str  # in ``quantize=``
    engine: Engine
    method: int  # SL_ENCODE_*
    bits: int  # per code
    group: int | None  # columns of a block; None for whole rows
    parts: Mapping[str, StoredPart]  # by role
    # The config.json of a folder: of the format, the source's config, the unquantized linear modules with the reason,
    # and the modules in another format of the engine.
    lay_out: Callable[[Preset, Mapping[str, Any], Mapping[str, str], Mapping[str, Preset]], dict[str, Any]]
    # The parts that do not depend on values: of the format, the shape of a weight and the name of its dtype.
    constants: Callable[[Preset, tuple[int, ...], str], dict[str, arrays.Array]] = lambda *_: {}
    row_block: int = 1  # rows of a block
    signed: bool = False  # True for codes in two's complement, without an offset
    flat: bool = False  # True if blocks cross rows
    table: tuple[float, ...] = ()  # the values of codes
    sides: int = 1  # both sides of a matrix must be multiples, or it stays unquantized
    # `packing.COLUMNS` or `packing.WORDS` if all parts are transposed, with the words of `Packing`
    layout: int = packing.ROWS
    added: int = 0  # subtracted from stored zero points, see `packing.Zeros`
    activations: str = ""  # kind of the 8-bit numbers to which an engine rounds activations; "" for none


def parts_of(codes: str, codes_dtype: str, scale: str, scale_dtype: str | None) -> dict[str, StoredPart]:
    """Return the parts of most formats."""
    return {packing.CODES: StoredPart(codes, codes_dtype), packing.SCALE: StoredPart(scale, scale_dtype)}


@cache
def presets() -> dict[str, Preset]:
    """Return the formats that we write for engines by name."""
    return {row.name: row for module in reversed(_modules()) for row in getattr(module, "PRESETS", ())}


def preset_of(scheme: object) -> Preset | None:
    """Return the preset that a scheme names, in any case, or None for other schemes."""
    if isinstance(scheme, Mapping):
        name = next((value for value in scheme.values() if isinstance(value, str) and value.lower() in presets()), None)
        if name is not None:
            raise ValueError(
                f"{show(name)} is for whole models: pass quantize={show(name)}, and ignore= for exceptions"
            )
    if not isinstance(scheme, str):
        return None
    name = scheme.lower()
    base, sign, group = name.partition("-g")
    if name not in presets() and sign and base in presets():
        sizes = "groups of 32, 64 or 128" if f"{base}-g32" in presets() else "no choice of groups"
        raise ValueError(f"unknown scheme {show(scheme)}: {base} has {sizes}, got {show(group)}")
    return presets().get(name)


def filled(key: str, **fields: Any) -> dict[str, Any]:
    """Return settings of ``engines.json`` with some fields filled in, in the order of the engine's tool."""
    return {**read_data(__name__, "engines.json")[key], **fields}
