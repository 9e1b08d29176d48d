"""Find the quantized tensors of a checkpoint, which become logical tensors, and codes without meaning.

A packed weight appears once, without its scales. Groups are formed over all files: a scale can be in another shard than
its weight. Codes outside all groups are numbers that mean nothing without a scale, but look like weights of any other
dtype; their dtype, the names of their companions and the configuration tell. Operations should call `refuse` before
they treat tensors as plain numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from ..core import dtypes, packing, registry
from ..core.files import read_json
from ..core.table import ListedTable, Listing, Table
from ..core.tensors import FileTensor, Tensors
from ..core.text import clip, plural, printable, show, tensor_named
from ..core.weight_file import WeightFile
from ..errors import FormatError, SafeloadError, UnsupportedError, VerificationError
from .families import FP8, SPARSE, Family, Stored, families
from .gguf import IN_GGUF, across_rows, ternary
from .packed_group import GroupContext, Misfit, PackedGroup, Refused, described, named_parts
from .quantization import (
    QUARK,
    UNCONFIGURED,
    Quantization,
    config_beside,
    config_inside,
    find_quantization,
    nested,
    quantization_beside,
    quantization_of,
)

# Faults listed in an error.
_LISTED = 5
# Maximum number of indexes to read beside a shard: each variant of a model has its own.
_MOST_INDEXES = 4
# Marks of ComfyUI, which stores 4-bit codes in another order and can rotate wider codes, except fp8.
_COMFY_METADATA, _COMFY_SUFFIX = "_quantization_metadata", ".comfy_quant"
_CODES = dtypes.FLOAT_CODES | dtypes.INTEGER_CODES
# Maximum number of codes in an element of these dtypes: words and bytes hold codes of at least 1 bit.
_PER_ELEMENT = {"I8": 8, "U8": 8, "I16": 16, "I32": 32, "U32": 32}

# The end of the names of zero points, which are plain numbers even if they have the dtype of codes.
_PLAIN = "zero_point"

# Location of a tensor: file and index in its table.
Place = tuple[WeightFile, int]


def _present(suffixes: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return the suffixes with which any name ends: a checkpoint uses few of the many families."""
    ends = "\n".join([*names, ""])
    return {suffix for suffix in suffixes if f"{suffix}\n" in ends}


# ---- packed tensors ----


def make_logical(
    opened: registry.Opened,
) -> tuple[dict[str, Place] | None, dict[str, str], dict[str, packing.Part], dict[str, str], Quantization | None]:
    """Give open files tables in which each packed tensor appears once.

    A missing scale is an error if the files are a complete checkpoint.

    Returns:
        File and index of each tensor, None for a single file; unlisted names, with their packed tensor ("" for
        activation scales); activation scales by name; unsupported codes, with the reason; and the quantization from
        the configuration, the files or their folders.
    """
    title, format, files, where, _, config, *_, complete = opened
    in_gguf, quantization = format == registry.GGUF, quantization_of(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files if in_gguf else ():
        shapes.update(registry.part("diffusion").original_shapes(file.table))
    places = dict(where) if where is not None else {n: (files[0], k) for k, n in enumerate(files[0].table.names)}
    conv1d = None
    if not in_gguf:
        quantization = quantization or find_quantization(files, title)
        if _present(CONV1D_SUFFIXES, places):
            conv1d = conv1d_model(config or config_inside(files[0]) or config_beside(files[0]))
    rival = None if quantization is None else quantization.rival
    if rival is not None and all(row.code != "U32" for file in files for row in file.table.rows):
        quantization = rival  # the settings of MLX are stray
    finder = _Finder(places, None if in_gguf else quantization, in_gguf=in_gguf, model_type=conv1d)
    try:
        finder.run(files, shapes)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{title}: {error}; pass stored=True to open the tensors as stored", path=title
        ) from None
    if finder.faults and (complete or in_gguf):
        opened.close()
        listed = "; ".join(finder.faults[:_LISTED])
        more = len(finder.faults) - _LISTED
        rest = f"; and {plural(more, 'more fault')}" if more > 0 else ""
        raise FormatError(f"{listed}{rest}. Pass stored=True to open the tensors as stored", title)
    packed, hidden = finder.packed, finder.hidden
    if not packed and not shapes:
        return None if where is None else places, {}, {}, finder.refused, quantization
    changed = {part.file for _, each in packed.values() for part in each.parts.values()}
    changed |= {places[name][0] for name in (*hidden, *shapes)}
    aside = ((name, finder.part(name)) for name, owner in hidden.items() if not owner)
    ignored = {name: part for name, part in aside if part is not None}
    for file in changed:
        unknown = file.table.unknown
        file.table = ListedTable(_listings(file.table, finder, shapes), file.table.metadata())
        file.table.unknown = unknown
    result = None
    if where is not None:
        result = {}
        for name, (file, index) in places.items():
            if name in packed or name not in hidden:
                logical = packed[name][0] if name in packed else name
                result[logical] = (file, file.table.find(logical) if file in changed else index)
    return result, hidden, ignored, finder.refused, quantization


def _listings(table: Table, finder: _Finder, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[Listing]:
    for name, row, shape, (begin, end) in zip(table.names, table.rows, table.shapes, table.byte_ranges(), strict=True):
        if name in finder.packed:
            logical, packed = finder.packed[name]
            yield Listing(
                logical, dtypes.BY_CODE["U8"] if row.blocked else row, packed.packing.shape, begin, end, packed=packed
            )
        elif name not in finder.hidden:
            index, own = table.find(name), shapes.get(name, shape)
            yield Listing(name, row, own, begin, end, table.strides.get(index), table.scales.get(index))


class _Finder:
    def __init__(
        self,
        places: Mapping[str, Place],
        quantization: Quantization | None,
        *,
        in_gguf: bool,
        model_type: str | None,  # of a model with Conv1D layers
    ) -> None:
        self._rows = IN_GGUF if in_gguf else families()
        self.packed: dict[str, tuple[str, packing.Packed]] = {}  # by the name of the codes: logical name, packed tensor
        self.hidden: dict[str, str] = {}  # parts, with their packed tensor, and ignored tensors, with ""
        self.faults: list[str] = []  # missing or misfitting parts
        self.refused: dict[str, str] = {}  # unsupported codes, with the reason
        self._companions: set[str] = set()  # of refused codes
        # By family and kind: thousands of experts have the parts of the first.
        self._kinds: dict[tuple[int, object], packing.Packing] = {}
        self._in_gguf, self._has_conv1d = in_gguf, model_type is not None
        self._quantization = quantization or UNCONFIGURED
        described_in = tuple([suffix for family in self._rows for suffix in family.described_in])
        self._context = GroupContext(places, self._quantization, model_type, described_in)
        self.part, self._tensors = self._context.part, self._context.tensors

    def run(self, files: Sequence[WeightFile], shapes: Mapping[str, tuple[int, ...]]) -> None:
        if self._quantization.is_rotated:
            return  # weights in a rotated basis
        methods, codes = (None, self._quantization.method), {stored.row.code for stored in self._tensors.values()}
        rows = [row for row in self._rows if row.describe and row.method in methods and codes & row.dtypes]
        required = [suffix for row in rows for suffixes in row.required.values() for suffix in suffixes]
        present = _present((*required, _COMFY_SUFFIX), self._tensors)
        rows = [row for row in rows if not any(map(present.isdisjoint, row.required.values()))]
        comfy = not self._in_gguf and (
            _COMFY_SUFFIX in present or any(_COMFY_METADATA in (file.table.metadata() or ()) for file in files)
        )
        by_code = {code: [row for row in rows if code in row.dtypes] for code in codes if not comfy or code in FP8}
        for name, stored in self._tensors.items():
            if by_code.get(stored.row.code):
                self._group(name, stored, by_code[stored.row.code])
        self._hide_parts()
        self._refuse_unread()
        if self._in_gguf:
            self.packed.update(ternary(files))
        if self.packed:  # activation scales and similar companions
            for name in self._tensors:
                if name.rpartition(".")[2] in IGNORED and name not in self.packed:
                    self.hidden.setdefault(name, "")
        self.packed.update(across_rows(self._context, shapes))
        if self._quantization.is_covered():
            self._report_codes_alone(self._quantization)

    def _group(self, name: str, stored: Stored, rows: Iterable[Family]) -> None:
        """Add the packed tensor with codes of this name, or a fault if the codes fit no family."""
        fault = None
        for family in rows:
            named = named_parts(family, name, self._tensors)
            if named is None:
                continue
            logical, names = named
            group = PackedGroup(name, logical, names, self._context)
            kind = id(family), group.kind
            packed = self._kinds.get(kind)
            try:
                why = None if packed is not None or self._in_gguf else group.unknown()
                if why is not None:
                    raise Refused(f"{why} (config.json) can change their values in an unknown way")
                packed = packed or described(family, group)
                own = _of_conv1d(packed) if self._has_conv1d and is_named_conv1d(logical) else packed
            except Refused as refused:
                self.refused[name] = str(refused)
                self._companions.update(names.values())
                return
            except Misfit as misfit:
                fault = fault or f"tensor {show(logical)}: {misfit}"
                if family.method is not None and stored.row.code not in FP8:
                    break
                continue
            if logical != name and logical in self._tensors:
                fault = f"tensor {show(logical)}: stored twice, as itself and as {show(name)}"
                continue
            parts = {role: self.part(part) for role, part in names.items()}
            if None in parts.values():
                continue
            self.packed[name] = logical, packing.Packed(own, parts)  # type: ignore[arg-type]
            if group.is_alike and kind[1] is not None:
                self._kinds[kind] = packed
            return
        if fault is not None and (self._in_gguf or self._quantization.is_covered(name)):
            self.faults.append(fault)

    def _hide_parts(self) -> None:
        """Hide the parts of packed tensors. A part is never packed itself, and logical names are unique."""
        roles = [item for _, packed in self.packed.values() for item in packed.parts.items()]
        for name in {part.name for role, part in roles if role != packing.CODES} & self.packed.keys():
            del self.packed[name]
        owners: dict[str, str] = {}
        for name, (logical, packed) in list(self.packed.items()):
            if owners.setdefault(logical, name) != name:
                first = show(owners[logical])
                self.faults.append(f"tensor {show(logical)}: stored twice, as {first} and as {show(name)}")
                del self.packed[name]
            else:
                for part in packed.parts.values():
                    if part.name != logical:
                        self.hidden[part.name] = logical

    def _refuse_unread(self) -> None:
        """Refuse codes beside an unread companion if its name suggests a change of their values."""
        owners = {logical: codes for codes, (logical, _) in self.packed.items()}
        unknown = [name for name in self._tensors if name not in self.packed and name not in self.hidden]
        for codes, name in _unread(unknown, owners) if owners else ():
            if codes in self.packed:
                logical, packed = self.packed.pop(codes)
                shown = show(name.removeprefix(logical.removesuffix(".weight")).lstrip("._"))
                self.refused[codes] = f"{shown} beside its codes can change their values"
                parts = [part.name for part in packed.parts.values()]
                self._companions.update((name, *parts))
                for part in parts:
                    self.hidden.pop(part, None)

    # ---- faults of a covered configuration ----

    def _report_codes_alone(self, quantization: Quantization) -> None:
        """Add faults for codes without a scale, and for other parts alone: they look like weights."""
        reported = {fault.split(": ", 1)[0] for fault in self.faults}
        known = self.packed.keys() | self.hidden.keys() | self.refused.keys() | self._companions
        alone = {name: stored for name, stored in self._tensors.items() if name not in known}
        for name, stored in alone.items():
            if len(stored.shape) < 2 or not _looks_like_codes(name, stored, quantization):
                continue
            bare = name.removesuffix("_packed"), name.removesuffix("_blocks"), name.replace(".qweight", ".weight")
            is_reported = not reported.isdisjoint(map(tensor_named, (name, *bare)))
            if not is_reported and _unread_by_quark(quantization, name) is None and quantization.is_covered(name):
                self.faults.append(
                    f"tensor {show(name)} holds {stored.row.code} codes, but the checkpoint has no scale for them "
                    f"({quantization} in config.json)"
                )
        for strays in (row.strays for row in self._rows if row.strays and row.strays.method == quantization.method):
            for name in alone:
                suffix = next((suffix for suffix in strays.suffixes if name.endswith(suffix)), None)
                if suffix is None:
                    continue
                stem = name.removesuffix(suffix)
                owner = tensor_named(stem if stem.endswith(strays.ends) else f"{stem}.weight")
                if owner not in reported and not any(stem + other in self.refused for other in strays.suffixes):
                    reported.add(owner)
                    self.faults.append(f"{owner}: the checkpoint has {show(name)}, {strays.missing}")


def _looks_like_codes(name: str, stored: Stored, quantization: Quantization) -> bool:
    """Return True if a matrix without a scale must be codes under a covered configuration."""
    code = stored.row.code
    if code in FP8 or name.endswith(("_packed", "_blocks")):
        return not name.endswith(_PLAIN)
    if code == "I32":
        return name.endswith(".weight" if quantization.method == QUARK else ".qweight")
    return code in ("U8", "I8", "U32") and name.endswith(("weight", "_proj"))


# ---- Conv1D, the layer of GPT-2 with weights [in, out]; tools quantize it as a linear layer, [out, in] ----

# ``model_type`` of the models of transformers with such layers, and the last names of the layers.
CONV1D_MODELS = frozenset(("clvp", "clvp_decoder", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"))
CONV1D = frozenset(("c_attn", "c_fc", "c_proj", "q_attn"))
CONV1D_SUFFIXES = [f"{layer}.{kind}" for layer in sorted(CONV1D) for kind in ("weight", "qweight")]
# Families with tools that quantize these layers. The rest quantize the tensors of files, or leave the layers alone.
_TURNED = frozenset(("bitsandbytes", "gptq", "awq"))


def conv1d_model(config: Mapping[str, Any] | None) -> str | None:
    """Return the ``model_type`` of a model with such layers, or of such a model inside another, else None."""
    types = (inner.get("model_type") for inner in nested(config or {}))
    return next((name for name in types if isinstance(name, str) and name in CONV1D_MODELS), None)


def is_conv1d(module: str) -> bool:
    """Return True for a module with the name of such a layer."""
    return module.rpartition(".")[2] in CONV1D


def is_named_conv1d(name: str) -> bool:
    """Return True for the weight of a module with the name of such a layer."""
    module, _, last = name.rpartition(".")
    return last in ("weight", "qweight") and is_conv1d(module)


def _of_conv1d(packed: packing.Packing) -> packing.Packing:
    """Return the packing of a layer's weight as [in, out]."""
    if packed.family not in _TURNED or len(packed.shape) != 2:
        return packed
    if packed.flat:
        raise Refused("its module is a Conv1D, which stores [in, out], and its blocks cross the rows of [out, in]")
    return packed._replace(shape=packed.shape[::-1], transpose=not packed.transpose)


# ---- companions ----

# A family reads the companions in its row of `families`. Any other companion with an arithmetic name makes the values
# unknown, unless it is listed here as harmless to weights.

# Companions of activations and the KV cache, markers and bookkeeping: hidden, because no weight needs these tensors.
IGNORED = frozenset(
    (
        "input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "prob_scale", "input_global_scale",
        "input_zero_point", "comfy_quant", "gate_up_proj_input_scale", "down_proj_input_scale",
        "input_scale_ub", "activation_scale", "qscale_act", "scale_input", "scaled_fp8",
        "gate_up_proj_activation_scale", "down_proj_activation_scale", "_weight_act_quant_scale",
        "_gate_up_proj_act_quant_scale", "_down_proj_act_quant_scale",
        "_weight_act_quant_zero_point", "input_activation_scale", "output_activation_scale", "output_zero_point",
        "input_scale_2", "output_scale_2", "q_zero_point", "k_zero_point", "v_zero_point",
    )
)  # fmt: skip
# Its parts: marks of a file, and scales of the KV cache.
MARKS = (".comfy_quant", "scaled_fp8")
KV_CACHE = (".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point", ".k_proj.output_scale", ".v_proj.output_scale")
# Fused experts, which have the name of a module of a single expert.
_FUSED = re.compile(r"\._?(gate_up_proj|down_proj)_\w+\Z")
# Also harmless, but visible as tensors of the checkpoint: names too general to hide, and companions of the bias.
_HARMLESS = IGNORED | frozenset(
    (
        "input_scale_inv", "activation_scale_inv", "act_scale", "act_scales", "activation_scaling_factor",
        "input_global_scale_inv", "output_global_scale", "input_zero_point_2", "output_zero_point_2", "k_cache_scale",
        "v_cache_scale", "kv_cache_scaling_factor",
        "k_cache_scaling_factor", "v_cache_scaling_factor", "k_global_scale", "v_global_scale", "q_global_scale",
        "w1_input_scale", "w2_input_scale", "w3_input_scale", "w13_input_scale", "embed_scale",
    )
)  # fmt: skip
_OF_BIAS = ("bias_", "bias.")
# Substrings in the names of companions with an effect on weights. When in doubt, list the word: refusing is safe.
_TELLING = (
    "scal", "zero", "zp", "smooth", "rotat", "hadamard", "absmax", "factor", "shift", "perm", "g_idx", "svdquant",
    "codebook", "biases", "scb", "offset", "outlier",
)  # fmt: skip
# Maximum number of parts of a companion's name after the name of its codes: "_weight_scale_2" has three.
_MOST_PARTS = 6


def _unread(names: Iterable[str], owners: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of an owner and a companion unread by its family."""
    for name in names:
        module, _, last = name.rpartition(".")
        telling = _is_telling(last)
        if not telling and not _is_telling(module.rpartition(".")[2]):  # such as X.weight_scale.second
            continue
        # Beside the codes: X.weight or X, and X.scale. Below the codes: X.weight_scale, X.weight.absmax.
        beside = telling and not last.startswith(_OF_BIAS)
        places = [(f"{module}.weight", last), (module, last)] if beside else []
        end = len(name)
        for _ in range(_MOST_PARTS):
            end = max(name.rfind("_", 0, end), name.rfind(".", 0, end))
            if end < 0:
                break
            rest = name[end + 1 :]
            places.append((name[:end], rest))
            if name[end] == "_" and _is_telling(rest.partition("_")[0].partition(".")[0]):  # X_scale_2 of X.weight
                places.append((f"{name[:end]}.weight", rest))
        owner, rest = next(((owners[place], rest) for place, rest in places if place in owners), (None, ""))
        if owner is not None and rest not in _HARMLESS and not rest.startswith(_OF_BIAS):
            yield owner, name


def owner_of(scale: str, weights: Collection[str]) -> str | None:
    """Return the weight whose activations a scale belongs to; None for scales of the KV cache and marks of a file."""
    names = () if scale.endswith(KV_CACHE) else (f"{scale.rpartition('.')[0]}.weight", _FUSED.sub(r".\1", scale))
    return next((name for name in names if name in weights), None)


def _is_telling(last: str) -> bool:
    """Return True if the last part of a name says that the companion changes weights."""
    lower = last.lower()
    return lower not in _HARMLESS and any(word in lower for word in _TELLING)


# ---- codes outside packed tensors ----


class Codes(NamedTuple):
    """A code tensor, its companion and its quantization."""

    dtype: str  # of the codes, such as "F8_E4M3"
    scale: str | None  # the companion tensor; None if only the configuration identifies the codes
    method: str | None  # ``quant_method`` of the configuration
    reason: str | None = None  # why this tensor is not dequantized: the unsupported quantization, if it has a reader
    reader: str | None = None  # the tool that reads the codes


# The suffix of a scale that norms have too: their parameter has an element per column.
_AMBIGUOUS = ".scale"
# Companions that no family lists; the last are quanto's, of 2 and 4 bits.
_MORE = (
    Family("", "", frozenset(), {packing.SCALE: ("_scale_2", "_scales", "_scb")}, None),
    Family("", "_quantized", frozenset(), {packing.SCALE: ("_scale",)}, None),
    Family("", "._data._data", frozenset(), {packing.SCALE: ("._scale",), packing.ZERO: ("._shift",)}, None),
)
# A family, and the role and the suffix of a companion.
_Clue = tuple[Family, str, str]


@cache
def _clues() -> tuple[list[_Clue], tuple[str, ...]]:
    """Return the companions that identify codes, the usual ones first: they are in the last rows.

    Also the suffixes of codes without a companion, which can be in a missing shard, if a method is configured.
    """
    clues = [
        (row, role, suffix)
        for row in (*reversed(families()), *_MORE)
        for parts in ({**row.required, **row.optional},)
        for role in (row.telling if packing.MASK in parts else dict.fromkeys((*row.telling, *parts)))
        for suffix in parts[role]
    ]
    # Quark has some of its scales under other roles too.
    scales = {(row.main, suffix) for row, role, suffix in clues if role == packing.SCALE}
    clues = [clue for clue in clues if clue[1] == packing.SCALE or (clue[0].main, clue[2]) not in scales]
    mains = dict.fromkeys(row.main for row, _, _ in clues if row.main and packing.MASK not in row.required)
    return clues, (*mains, ".weight", "gate_up_proj", "down_proj")


def find(
    tensors: Mapping[str, Stored], quantization: Quantization | None = None, elsewhere: Collection[str] = ()
) -> dict[str, Codes]:
    """Return the code tensors, in the given order. All tensors are needed, because a companion can be in any file."""
    if not tensors:
        return {}
    names = {*tensors, *elsewhere} if elsewhere else tensors.keys()
    listed, mains = _clues()
    present = _present({suffix for _, _, suffix in listed}, names)
    clues = [clue for clue in listed if clue[2] in present]
    telling = [clue for clue in clues if clue[1] in clue[0].telling]
    companions: dict[str, str] = {}
    refusals: dict[str, tuple[str, str]] = {}
    for name, stored in tensors.items():
        code, scale, rest = stored.row.code, None, None
        narrow = code not in _CODES and stored.shape[1:] != (1,)
        for row, role, suffix in clues if code in _CODES else telling:
            other = name[: len(name) - len(row.main)] + suffix
            if other not in names or not name.endswith(row.main) or (row.wide and narrow):
                continue
            if role != packing.SCALE:
                rest = rest or other
            elif scale is None and _fits(stored, tensors.get(other), in_blocks=suffix == _AMBIGUOUS):
                scale = other
            if row.reader is not None and code in row.dtypes:
                refusals[name] = row.name, row.reader
        companion = scale or rest
        if companion is not None:
            companions[name] = companion
    # Any companion with the name of a scale identifies a matrix of fp8.
    matrices = (name for name, stored in tensors.items() if stored.row.code in FP8 and len(stored.shape) > 1)
    bare = {name: name for name in matrices if name not in companions}
    unread = ((name, other) for name, other in _unread(tensors, bare) if not other.endswith(_AMBIGUOUS))
    companions.update((name, other) for name, other in (unread if bare else ()) if _fits(tensors[name], tensors[other]))
    identifying = set(companions.values())
    method = None if quantization is None else quantization.shown
    codes = {}
    for name, stored in tensors.items():
        code = stored.row.code
        # Under a configuration, a tensor without a companion holds codes if its dtype or its name says so.
        known = (
            quantization is not None
            and name not in identifying
            and (
                (code in dtypes.FLOAT_CODES and not name.endswith(_PLAIN))
                or (code in dtypes.INTEGER_CODES and len(stored.shape) > 1 and name.endswith(mains))
            )
        )
        if name in companions or known:
            companion = None if known and name.endswith(SPARSE) else companions.get(name)
            codes[name] = Codes(code, companion, method, *(refusals.get(name) or _refusal_of(name, code, quantization)))
    return codes


def _fits(codes: Stored, scale: Stored | None, *, in_blocks: bool = False) -> bool:
    """Return True if a scale can be broadcast over codes, with a block of codes per element.

    Axes of the scale longer than 1 must match different axes of the codes, in order, without exceeding their lengths.
    ``in_blocks`` requires fewer elements, because norms have a parameter of this name too.
    """
    if scale is None:  # in an unopened shard, so that only its name is known
        return not in_blocks
    if not scale.row.floating and scale.row.code != "U8":  # U8 can have the bits of a float8
        return False
    if in_blocks:
        same = len(scale.shape) == len(codes.shape) > 1 and scale.shape != codes.shape and codes.row.block_bytes == 1
        return same and all(a <= b for a, b in zip(scale.shape, codes.shape, strict=True))
    per_element = _PER_ELEMENT.get(codes.row.code, 1)
    axes: Iterator[int] = iter(codes.shape)
    return all(any(length <= axis * per_element for axis in axes) for length in scale.shape if length != 1)


# ---- refusing ----

# Keys with more specific values than the method.
_KEYS = ("format", "checkpoint_format", "version", "quant_algo")


def _refusal_of(name: str, dtype: str, quantization: Quantization | None) -> tuple[str | None, str | None]:
    """Return the unsupported quantization of a configuration for codes, and its reader, or None twice."""
    if quantization is None:
        return None, None
    if quantization.is_rotated:
        return "compressed-tensors in a rotated basis (transform_config)", "vLLM"  # of any dtype
    if quantization.method == QUARK:
        reason = None
        with suppress(UnsupportedError):  # opening the checkpoint reports it, except with stored=True
            reason = _unread_by_quark(quantization, name)
        return reason, reason and "AMD Quark"
    values = quantization.method, *map(quantization.values.get, _KEYS)
    rows = [row for row in families() if dtype not in FP8 or dtype in row.dtypes]
    return next(((row.name, row.reader) for value in values for row in rows if value in row.methods), (None, None))


def _unread_by_quark(quantization: Quantization, name: str) -> str | None:
    """Return Quark's unsupported quantization of a tensor, or None."""
    if quantization.method != QUARK:
        return None
    from . import quark

    return quark.unread(quantization, name)


def refuse(codes: Mapping[str, Codes], names: Iterable[str], what: str, where: str = "") -> None:
    """Raise an error if a requested tensor holds codes, preferably about codes with a known reason."""
    refused = [name for name in names if name in codes] if codes else ()
    if not refused:
        return
    name = next((name for name in refused if codes[name].reason is not None), refused[0])
    dtype, scale, method, reason, reader = codes[name]
    kind, other = ("values", "mask") if name.endswith(SPARSE) else ("codes", "scale")
    beside = f"whose {other} is {'not here' if scale is None else show(scale)}"
    configured = "" if method is None else f" (quant_method {clip(printable(method), 90)} in config.json)"
    head = f"{where}{': ' if where else ''}tensor {show(name)} holds {dtype} {kind}, {beside}{configured}. "
    advice = "safeload.load without dtype= returns them as stored"
    if reader is not None:
        why = f"This is {reason}: safeload does not dequantize it, {reader} reads it. "
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
    plain = ((name, file.table, index) for name, file, index in parts if not file.table.is_quantized(index))
    return {name: Stored(table.rows[index], table.shapes[index]) for name, table, index in plain}


def codes_of(
    files: Sequence[WeightFile],
    parts: Sequence[FileTensor],
    quantization: Quantization | None,
    *,
    search: bool,
    incomplete: bool,
    refused: Mapping[str, str],
) -> dict[str, Codes]:
    """Return the code tensors of open files."""
    if not any(file.table.may_be_packed() or file.table.quantized for file in files):
        return {}
    quantization = quantization_beside(files[0]) if search else quantization
    stored = stored_of(parts)
    codes = find(stored, quantization, _shards_beside(files[0]) if incomplete and len(files) == 1 else ())
    for name, reason in refused.items():
        method = None if quantization is None else quantization.shown
        known = codes.get(name, Codes(stored[name].row.code, None, method))
        codes[name] = known if known.reader is not None else known._replace(reason=reason)
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
    if not file.table.may_be_packed():
        return
    wide = any(shape[1:] == (1,) for shape in file.table.shapes)
    sparse = any(name.endswith(SPARSE) for name in file.table.names)
    if not wide and not sparse and all(row.code not in dtypes.FLOAT_CODES for row in set(file.table.rows)):
        return
    codes = find(stored_of(Tensors.in_file(file)), quantization_beside(file), _shards_beside(file))
    converted = (name for name, _, index in parts if file.table.row(index).floating)
    refuse(codes, converted, f"{what} with dtype=", file.path)
