"""Checks of names, shapes and dtypes: against each other, against a config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...base import dtypes
from ...base.names import pattern_of
from ...base.text import plural
from ...models.schema import NUMBER, Schema
from ...packed.codes_without_scale import Codes
from ...packed.quantization import Quantization
from ..sources.description import TensorDescription
from .findings import Finding, error, note, warning

# Parts of a name that precede a layer number, for models without a schema. Other numbers, as in torch's Sequential,
# skip modules without weights.
_CONTAINERS = ("layers", "layer", "blocks", "block", "h", "blk")
# Most levels of nested layers, as in a hierarchical model, that are checked in a name; the innermost ones.
_LAYERS_IN_LAYERS = 8
_LAYER = re.compile(rf"(?:.*\.)?(?:{'|'.join(_CONTAINERS)})\.", re.ASCII)
_NUMBERED = re.compile(rf"({NUMBER})\.(.+)", re.ASCII | re.DOTALL)

# A tensor is usual if all layers but one in this many have it.
_FEW = 10

# A layer number at least this many times the number of layers is a mistake, not a model with a part elsewhere.
_FAR = 1000

# Last part of the name of a tensor that belongs to a quantized weight: codes, scales, zero points.
_PART = re.compile(
    r".*(?:scales?|scale_inv|scale_\d|scale_ub|absmax|quant_map|quant_state|zeros|zero_point|g_idx|q_?weight|packed"
    r"|weight_shape|blocks|biases|SCB|weight_format|codebooks?|q_invperm|q_perm|q_group_map)(?:\..*)?",
    re.ASCII | re.DOTALL,
)


def check_sizes(tensors: Mapping[str, TensorDescription], schema: Schema | None = None) -> Iterator[Finding]:
    """Checks for no tensors at all, and for tensors without elements, or without axes that the schema gives them."""
    if not tensors:
        yield error("model.empty", None, "there are no tensors")
    for name, known in tensors.items():
        if 0 in known.shape:
            yield warning("tensor.empty", name, f"has shape {list(known.shape)}, so it has no elements")
        elif not known.shape and not _is_scalar(name, schema):
            yield warning("tensor.scalar", name, f"is a single {known.dtype} without axes")


def _is_scalar(name: str, schema: Schema | None) -> bool:
    """Whether the schema says that a tensor has no axes."""
    found = None if schema is None else schema.find(name)
    return found is not None and found.entry.shape == ()


# ---- quantized weights ----


class Quantized(NamedTuple):
    """The weights of a checkpoint that are codes.

    Attributes:
        label: how they were recognized, for messages.
        names: tensors that are codes, scales, zero points and similar.
        modules: modules that have them: their names without the last part.
        configured: whether the config declares them.
    """

    label: str
    names: frozenset[str]
    modules: frozenset[str]
    configured: bool


def quantized_parts(
    quantization: Quantization | None,
    schema: Schema | None,
    tensors: Mapping[str, TensorDescription],
    codes: Mapping[str, Codes],
) -> Quantized | None:
    """Finds the tensors that are parts of quantized weights; None if there are none.

    Their names, shapes and values depend on the quantization method, not on a schema.

    Args:
        quantization: of the configuration; None without one.
        schema: schema of the architecture; None if it is unknown.
        tensors: all tensors.
        codes: the tensors that hold codes.
    """
    names = set(codes) | {code.scale for code in codes.values() if code.scale is not None}
    if quantization is not None:  # parts that belong to codes, also of methods whose codes look like plain integers
        for name in tensors:
            role = None if schema is None else schema.role(name)
            unlisted = schema is not None and role is None and schema.role(f"{module_of(name)}.weight") is not None
            if unlisted or (role is None and _PART.fullmatch(_last(name))):
                names.add(name)
    if not names:
        return None
    modules = frozenset(map(module_of, names)) - {""}
    inside = [name for name in tensors if module_of(name) in modules]
    names |= {name for name in inside if name.endswith(".weight") or _PART.fullmatch(_last(name))}
    label = "codes with separate scales" if quantization is None else str(quantization)
    return Quantized(label, frozenset(names), modules, quantization is not None)


def note_quantized(found: Quantized, *, values: bool) -> Finding:
    """The note about quantized weights."""
    what = "names, shapes and values" if values else "names and shapes"
    count = plural(len(found.names), "tensor")
    message = f"{found.label}: {what} of quantized weights were not checked ({count})"
    return note("quantization.unchecked", None, message)


def module_of(name: str) -> str:
    """The module of a tensor: its name without the last part, and without anything after ".weight."."""
    head, found, _ = name.rpartition(".weight.")
    return head if found else name.rpartition(".")[0]


def _last(name: str) -> str:
    _, found, last = name.rpartition(".weight.")
    return last if found else name.rpartition(".")[2]


# ---- without a schema ----


def check_layers(tensors: Mapping[str, TensorDescription], modules: frozenset[str] = frozenset()) -> Iterator[Finding]:
    """Checks for holes in the layer numbers, and for layers that lack tensors that the other layers have.

    Args:
        tensors: the tensors of the model.
        modules: modules with quantized weights, whose tensors differ from those of other layers.
    """
    families: dict[str, dict[int, set[str]]] = {}
    for name in tensors:
        place = _LAYER.match(name)
        for _ in range(_LAYERS_IN_LAYERS):
            if place is None:
                break
            numbered = _NUMBERED.fullmatch(name, place.end())
            if numbered is not None:
                families.setdefault(place[0], {}).setdefault(int(numbered[1]), set()).add(numbered[2])
            place = _LAYER.match(name[: place.end() - 1])
    for prefix, layers in families.items():
        if len(layers) < 2 or max(map(len, layers.values())) < 2:
            continue
        count = max(layers) + 1
        far = [layer for layer in sorted(layers) if layer >= _FAR and layer >= _FAR * len(layers)]
        for layer in far:
            message = f"layer {layer} is far beyond the other {len(layers) - 1}"
            yield warning("layers.far", f"{prefix}{layer}", message)
        if count <= 2 * len(layers):
            for layer in sorted(set(range(count)) - layers.keys()):
                yield error("layers.hole", f"{prefix}{layer}", f"layer {layer} of {count} is missing")
        counts = Counter(rest for parts in layers.values() for rest in parts)
        few = max(1, len(layers) // _FEW)
        usual = [rest for rest in sorted(counts) if len(layers) > 2 and counts[rest] >= len(layers) - few]
        for layer, parts in sorted(layers.items()):
            for rest in usual:
                if rest not in parts and module_of(f"{prefix}{layer}.{rest}") not in modules:
                    message = f"is missing; {counts[rest]} of the other {len(layers) - 1} layers have it"
                    yield warning("layers.missing", f"{prefix}{layer}.{rest}", message)


# ---- dtypes ----


def check_dtypes(
    tensors: Mapping[str, TensorDescription], config: Mapping[str, Any] | None, quantized: Quantized | None = None
) -> Iterator[Finding]:
    """Checks for tensors whose dtype differs between layers, and for a config dtype that no tensor has."""
    groups: dict[str, list[str]] = {}
    parts: frozenset[str] = frozenset() if quantized is None else quantized.names
    for name, known in tensors.items():
        if known.floating and not known.quantized and name not in parts:
            groups.setdefault(pattern_of(name), []).append(name)
    for names in groups.values():
        counts = Counter(tensors[name].dtype for name in names)
        if len(counts) > 1:
            usual, often = counts.most_common(1)[0]
            for name in names:
                if tensors[name].dtype != usual:
                    message = f"is {tensors[name].dtype}, but in {often} of {len(names)} layers it is {usual}"
                    yield warning("dtype.mixed", name, message)
    said = None if config is None else config.get("torch_dtype") or config.get("dtype")
    if not isinstance(said, str):
        return
    said = said.removeprefix("torch.")
    there = Counter(known.dtype for known in tensors.values() if known.floating)
    floating = (row := dtypes.BY_NAME.get(said)) is not None and row.floating
    if there and floating and said not in there and not (parts or any(known.quantized for known in tensors.values())):
        usual, often = there.most_common(1)[0]
        message = f"config.json says {said}, but no tensor has it; {often} of {len(tensors)} are {usual}"
        yield warning("dtype.config", None, message)
