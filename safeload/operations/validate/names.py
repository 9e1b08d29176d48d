"""Checks of names, shapes and dtypes: against a schema, against each other, against a config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...base import dtypes
from ...base.text import plural, show
from ...models.choosing import Choice, Inner
from ...models.schema import NUMBER, Schema, Wanted
from ...packed.config import quantization_of
from ...packed.grouping import Codes
from ..about import About
from .findings import Finding, error, note, pattern_of, warning

# Parts of a name that precede a layer number, for models without a schema. Other numbers, as in torch's Sequential,
# skip modules without weights.
_CONTAINERS = ("layers", "layer", "blocks", "block", "h", "blk")
# Most levels of nested layers, as in a hierarchical model, that are checked in a name; the innermost ones.
_LAYERS_IN_LAYERS = 8
_LAYER = re.compile(rf"(?:.*\.)?(?:{'|'.join(_CONTAINERS)})\.", re.ASCII)
_NUMBERED = re.compile(rf"({NUMBER})\.(.+)", re.ASCII | re.DOTALL)

# A schema counts as the wrong one if fewer than one in this many tensors are in it.
_KNOWN_AT_LEAST = 10

# A layer number at least this many times the number of layers is a mistake, not a model with a part elsewhere.
_FAR = 1000

# Names of the tensors of a head that the schema of a complete architecture lacks: a reward or value head on a causal
# model, the bias of a head.
_HEAD = re.compile(
    r"(?:\w*_)?(?:heads?|lm_head\d*|score|scorer|classifier|qa_outputs|pooler|summary)(?:\..*)?|cls\..*",
    re.ASCII | re.DOTALL,
)

# Modules in the layers of a decoder if the config sets add_cross_attention: BERT and its relatives, GPT-2.
_CROSS = re.compile(r"\.(?:cross_?attention|cross_?attn|ln_cross_attn|encoder_attn)\.", re.ASCII)

# Last part of the name of a tensor that belongs to a quantized weight: codes, scales, zero points.
_PART = re.compile(
    r".*(?:scales?|scale_inv|scale_\d|scale_ub|absmax|quant_map|quant_state|zeros|zero_point|g_idx|q_?weight|packed"
    r"|weight_shape|blocks|biases|SCB|weight_format|codebooks?|q_invperm|q_perm|q_group_map)(?:\..*)?",
    re.ASCII | re.DOTALL,
)


def check_sizes(tensors: Mapping[str, About]) -> Iterator[Finding]:
    """Checks for no tensors at all, and for tensors without elements or without axes."""
    if not tensors:
        yield error("model.empty", None, "there are no tensors")
    for name, known in tensors.items():
        if 0 in known.shape:
            yield warning("tensor.empty", name, f"has shape {list(known.shape)}, so it has no elements")
        elif not known.shape:
            yield warning("tensor.scalar", name, f"is a single {known.dtype} without axes")


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
    config: Mapping[str, Any] | None,
    schema: Schema | None,
    tensors: Mapping[str, About],
    codes: Mapping[str, Codes],
) -> Quantized | None:
    """Finds the tensors that are parts of quantized weights; None if there are none.

    Their names, shapes and values depend on the quantization method, not on a schema.

    Args:
        config: parsed ``config.json``; None without one.
        schema: schema of the architecture; None if it is unknown.
        tensors: all tensors.
        codes: the tensors that hold codes.
    """
    said = quantization_of(config)
    names = set(codes) | {code.scale for code in codes.values() if code.scale is not None}
    if said is not None:  # parts that belong to codes, also of methods whose codes look like plain integers
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
    label = "codes with separate scales" if said is None else str(said)
    return Quantized(label, frozenset(names), modules, said is not None)


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


# ---- with a schema ----


class Comparison(NamedTuple):
    """Result of a comparison of names and shapes with a schema.

    Attributes:
        findings: the findings.
        compared: number of tensors in the schema that were compared.
    """

    findings: list[Finding]
    compared: int


def check_schema(
    choice: Choice,
    config: Mapping[str, Any] | None,
    tensors: Mapping[str, About],
    *,
    quantized: Quantized | None = None,
    inner: Inner | None = None,
) -> Comparison:
    """Compares names and shapes with a schema: tensors that are missing, unexpected or of another shape.

    Args:
        choice: the schema.
        config: parsed config.json; that of the language model if the schema is for that part only.
        tensors: the tensors of the model.
        quantized: the tensors that the schema does not cover.
        inner: the part of the model that the schema is for; None for the whole.
    """
    schema = choice.schema
    parts: frozenset[str] = frozenset() if quantized is None else quantized.names
    modules: frozenset[str] = frozenset() if quantized is None else quantized.modules

    def unchecked(why: str) -> Comparison:
        return Comparison([note("schema.unchecked", None, f"{why}: names and shapes were not checked")], 0)

    try:
        wanted = schema.expand(config, tensors.keys())
    except ValueError as problem:
        if inner is not None:
            return unchecked(f"{inner.key}, schema {schema.name}: {problem}")
        return Comparison([error("schema.config", None, f"schema {schema.name}: {problem}")], 0)
    found = [name for name in tensors if name in wanted and name not in parts]
    required = [w for w in wanted.values() if w.required and module_of(w.name) not in modules]
    if inner is not None and 2 * sum(w.name in tensors for w in required) < len(required):
        return unchecked(f"{inner.key}: more than half of the tensors of schema {schema.name} are missing")
    if tensors and (len(found) + len(parts)) * _KNOWN_AT_LEAST < len(tensors) and inner is None:
        if quantized is not None and quantized.configured:
            return unchecked(f"schema {schema.name}: fewer than a tenth of the tensors are in it")
        example = next(iter(wanted))
        message = (
            f"is not in schema {schema.name}, whose first name is {show(example)}; only {len(found)} of {len(tensors)}"
        )
        return Comparison([error("schema.names", next(iter(tensors)), f"{message} names are")], 0)
    findings = list(_check_missing(choice, wanted, tensors, modules))
    if inner is not None and inner.whole:
        message = f"names begin with {show(inner.prefix)}, which those of schema {schema.name} do not"
        findings.append(warning("schema.prefix", next(name for name in tensors if name in wanted), message))
    findings += _check_unexpected(choice, config, wanted, tensors, quantized, inner)
    for name in found:
        shape = wanted[name].shape
        if shape is not None and not fits(tensors[name].shape, shape):
            said = ", ".join(wanted[name].entry.shape or ())
            sizes = ", ".join("?" if size is None else str(size) for size in shape)
            findings.append(
                error(
                    "schema.shape",
                    name,
                    f"has shape {list(tensors[name].shape)}, but [{said}] is [{sizes}] by the config",
                )
            )
    return Comparison(findings, len(found))


def fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    """Whether a shape matches ``wanted``, in which None stands for any size."""
    return len(shape) == len(wanted) and all(b is None or a == b for a, b in zip(shape, wanted, strict=True))


def _check_missing(
    choice: Choice, wanted: Mapping[str, Wanted], tensors: Mapping[str, About], modules: frozenset[str]
) -> Iterator[Finding]:
    """Missing tensors; a layer that lacks all of them, and a tensor that all layers lack, are reported once."""
    required = [w for w in wanted.values() if w.required and (choice.complete or w.entry.role != "head")]
    missing = [w for w in required if w.name not in tensors and module_of(w.name) not in modules]
    whole = Counter(w.layer for w in required)
    lost = Counter(w.layer for w in missing)
    layers = len(whole) - (None in whole)
    gone = {layer for layer in lost if layer is not None and lost[layer] == whole[layer]}
    everywhere = Counter(w.entry.name for w in missing if w.layer is not None and w.layer not in gone)
    said: set[Any] = set()
    for w in missing:
        if w.layer in gone:
            if w.layer not in said:
                said.add(w.layer)
                message = f"layer {w.layer} of {layers} is missing, with all its {whole[w.layer]} tensors"
                yield error("schema.layer_missing", _before_number(w), message)
        elif w.layer is not None and layers - len(gone) > 1 and everywhere[w.entry.name] == layers - len(gone):
            if w.entry.name not in said:
                said.add(w.entry.name)
                yield error("schema.missing", w.name, f"is missing, in each of the {layers} layers")
        else:
            also = ""
            if w.entry.role == "head" and w.entry.tied is not None:
                also = f", and the config does not tie it ({w.entry.tied_when})"
            yield error("schema.missing", w.name, f"is missing{also}")


def _before_number(w: Wanted) -> str:
    """The part of a name up to and including its layer number."""
    head = w.entry.name.partition("{}")[2]
    return w.name[: len(w.name) - len(head)] if w.name.endswith(head) else w.name


def _check_unexpected(
    choice: Choice,
    config: Mapping[str, Any] | None,
    wanted: Mapping[str, Wanted],
    tensors: Mapping[str, About],
    quantized: Quantized | None,
    inner: Inner | None,
) -> Iterator[Finding]:
    """Tensors that the schema does not expect; heads, cross-attention and other parts are noted as unchecked."""
    report = error if choice.complete else warning
    count = len({w.layer for w in wanted.values()} - {None})
    beyond: Counter[tuple[int, str]] = Counter()
    is_head = _heads_of(choice, wanted)
    crossed = config is not None and config.get("add_cross_attention") is True
    heads, others, unknown, crossing = [], [], [], []
    for name in tensors:
        if name in wanted:
            continue
        if quantized is not None and (name in quantized.names or module_of(name) in quantized.modules):
            continue
        known = choice.schema.find(name)
        if known is None:
            if inner is not None and not name.startswith(inner.prefix):
                others.append(name)
            elif is_head(name):
                heads.append(name)
            elif crossed and _CROSS.search(name):
                crossing.append(name)
            elif quantized is not None and quantized.configured:
                unknown.append(name)
            else:
                yield report("schema.unexpected", name, f"is not a tensor of schema {choice.schema.name}")
            continue
        entry, layer = known
        if layer is not None and layer >= count:
            stem = name[: len(name) - len(entry.name.partition("{}")[2])]
            beyond[layer, stem] += 1
        elif entry.when is not None:
            yield report("schema.unexpected", name, f"is present, but {entry.when} in the config excludes it")
        else:
            yield report("schema.unexpected", name, "is a duplicate of a tensor under another name")
    for (layer, stem), tensors_in_it in sorted(beyond.items()):
        message = f"layer {layer} with {tensors_in_it} tensors is beyond the {count} layers of the config"
        yield report("schema.layer_extra", stem, message)
    if heads:
        yield _note_heads(config, heads)
    if crossing:
        what = f"names and shapes of {plural(len(crossing), 'tensor')} of the cross-attention were not checked"
        yield note("schema.unchecked", crossing[0], f"add_cross_attention: {what}")
    if unknown:
        unlisted = f"{plural(len(unknown), 'tensor')} that schema {choice.schema.name} does not have"
        what = "name and shape were" if len(unknown) == 1 else "names and shapes were"
        yield note("schema.unchecked", unknown[0], f"{unlisted}, next to quantized weights: {what} not checked")
    if inner is not None and others:
        message = f"only what {inner.key} describes was checked (schema {choice.schema.name}): names and shapes of"
        yield note("schema.unchecked", others[0], f"{message} {plural(len(others), 'other tensor')} were not")


def _heads_of(choice: Choice, wanted: Mapping[str, Wanted]) -> Callable[[str], bool]:
    """A function that tells whether a tensor that the schema lacks belongs to a head.

    If the schema describes only a part of the model, everything outside of that part is a head. Otherwise the name
    decides.
    """
    if choice.complete:
        return lambda name: _HEAD.fullmatch(name) is not None
    inside = {w.name.partition(".")[0] for w in wanted.values() if w.entry.role != "head"}
    return lambda name: name.partition(".")[0] not in inside


def _note_heads(config: Mapping[str, Any] | None, heads: Sequence[str]) -> Finding:
    listed = None if config is None else config.get("architectures")
    architecture = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], str) else "of the model"
    shown = ", ".join(repr(name) for name in heads[:4]) + (f" and {len(heads) - 4:,} more" if len(heads) > 4 else "")
    verb = "heads {} were" if len(heads) > 1 else "head {} was"
    message = f"architecture {architecture[:100]}: {verb.format(shown)} not checked"
    return note("head.unchecked", heads[0], message)


# ---- without a schema ----


def check_layers(tensors: Mapping[str, About], modules: frozenset[str] = frozenset()) -> Iterator[Finding]:
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
        few = max(1, len(layers) // _KNOWN_AT_LEAST)
        usual = [rest for rest in sorted(counts) if len(layers) > 2 and counts[rest] >= len(layers) - few]
        for layer, parts in sorted(layers.items()):
            for rest in usual:
                if rest not in parts and module_of(f"{prefix}{layer}.{rest}") not in modules:
                    message = f"is missing; {counts[rest]} of the other {len(layers) - 1} layers have it"
                    yield warning("layers.missing", f"{prefix}{layer}.{rest}", message)


# ---- dtypes ----


def check_dtypes(
    tensors: Mapping[str, About], config: Mapping[str, Any] | None, quantized: Quantized | None = None
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
    row = dtypes.BY_NAME.get(said)
    floating = row is not None and row.floating
    if there and floating and said not in there and not (parts or any(known.quantized for known in tensors.values())):
        usual, often = there.most_common(1)[0]
        message = f"config.json says {said}, but no tensor has it; {often} of {len(tensors)} are {usual}"
        yield warning("dtype.config", None, message)
