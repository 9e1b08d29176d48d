"""Checks of names, shapes and dtypes: against a schema, against each other, against a config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...base import dtypes
from ...base.text import plural, show
from ...models.choosing import Choice, Inner
from ...models.schema import NUMBER, ConfigError, Schema, Wanted
from ...packed import grouping
from ...packed.grouping import Codes
from ..catalog import About
from .findings import Finding, error, note, pattern_of, warning

# Parts of a name after which a number is that of a layer, where no schema says so. Numbers elsewhere, as in Sequential
# of torch, have holes for what has no weights.
_CONTAINERS = ("layers", "layer", "blocks", "block", "h", "blk")
# Layers in layers, as in a hierarchical model: so many of the innermost of a name are looked at.
_LAYERS_IN_LAYERS = 8
_LAYER = re.compile(rf"(?:.*\.)?(?:{'|'.join(_CONTAINERS)})\.", re.ASCII)
_NUMBERED = re.compile(rf"({NUMBER})\.(.+)", re.ASCII | re.DOTALL)

# A schema is taken to be the wrong one when fewer than one of so many tensors are in it.
_KNOWN_AT_LEAST = 10

# A layer whose number is so many times the number of layers is a mistake, not a model of which a part is elsewhere.
_FAR = 1000

# What the names of the tensors of a head begin with, where the model is a whole one by its architecture: a reward or
# value head on a causal model, the bias of a head.
_HEAD = re.compile(
    r"(?:\w*_)?(?:heads?|lm_head\d*|score|scorer|classifier|qa_outputs|pooler|summary)(?:\..*)?|cls\..*",
    re.ASCII | re.DOTALL,
)

# What a decoder has in its layers where the config says add_cross_attention: BERT and its kin, GPT-2.
_CROSS = re.compile(r"\.(?:cross_?attention|cross_?attn|ln_cross_attn|encoder_attn)\.", re.ASCII)

# The last part of the name of a tensor that stands beside or for a quantized weight: codes, scales, zero points.
_PART = re.compile(
    r".*(?:scales?|scale_inv|scale_\d|scale_ub|absmax|quant_map|quant_state|zeros|zero_point|g_idx|q_?weight|packed"
    r"|weight_shape|blocks|biases|SCB|weight_format|codebooks?|q_invperm|q_perm|q_group_map)(?:\..*)?",
    re.ASCII | re.DOTALL,
)


def check_sizes(tensors: Mapping[str, About]) -> Iterator[Finding]:
    """No tensors at all; tensors without elements or without axes."""
    if not tensors:
        yield error("model.empty", None, "there are no tensors")
    for name, known in tensors.items():
        if 0 in known.shape:
            yield warning("tensor.empty", name, f"has shape {list(known.shape)}, so no elements")
        elif not known.shape:
            yield warning("tensor.scalar", name, f"is a single {known.dtype} without axes")


# ---- quantized weights ----


class Quantized(NamedTuple):
    """The weights of a checkpoint that are codes.

    Attributes:
        label: what says so, for messages.
        names: tensors that are codes, or scales, zero points and the like.
        modules: what has them: their names without the last part.
        configured: whether it is the config that says so.
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
    """Which tensors are parts of quantized weights; None for no tensor.

    What such a tensor is called, and its shape and values, are the business of its family, not of a schema.

    Args:
        config: parsed ``config.json``; None without one.
        schema: of the architecture; None for one that is not known.
        tensors: all of them.
        codes: those that hold codes.
    """
    said = grouping.quantization_of(config)
    names = set(codes) | {code.scale for code in codes.values() if code.scale is not None}
    if said is not None:  # what stands beside codes, also of families whose codes nothing tells from integers
        for name in tensors:
            role = None if schema is None else schema.role(name)
            foreign = schema is not None and role is None and schema.role(f"{module_of(name)}.weight") is not None
            if foreign or (role is None and _PART.fullmatch(_last(name))):
                names.add(name)
    if not names:
        return None
    modules = frozenset(map(module_of, names)) - {""}
    inside = [name for name in tensors if module_of(name) in modules]
    names |= {name for name in inside if name.endswith(".weight") or _PART.fullmatch(_last(name))}
    label = "codes with scales beside them" if said is None else str(said)
    return Quantized(label, frozenset(names), modules, said is not None)


def note_quantized(found: Quantized, *, values: bool) -> Finding:
    """What is said of quantized weights."""
    what = "names, shapes and values" if values else "names and shapes"
    count = plural(len(found.names), "tensor")
    message = f"{found.label}: {what} of quantized weights were not checked ({count})"
    return note("quantization.unchecked", None, message)


def module_of(name: str) -> str:
    """What a tensor belongs to: its name without the last part, and without what stands behind "weight"."""
    head, found, _ = name.rpartition(".weight.")
    return head if found else name.rpartition(".")[0]


def _last(name: str) -> str:
    _, found, last = name.rpartition(".weight.")
    return last if found else name.rpartition(".")[2]


# ---- with a schema ----


class Comparison(NamedTuple):
    """Names and shapes against a schema.

    Attributes:
        findings: what was found.
        compared: how many tensors are the schema's, and were looked at.
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
    """Names and shapes against a schema: what is missing, what is unexpected, what has another shape.

    Args:
        choice: the schema.
        config: parsed config.json; of the language model where that is only a part.
        tensors: that are there.
        quantized: those that are no business of the schema.
        inner: where the schema is that of a part of the model.
    """
    schema = choice.schema
    parts: frozenset[str] = frozenset() if quantized is None else quantized.names
    modules: frozenset[str] = frozenset() if quantized is None else quantized.modules

    def unchecked(why: str) -> Comparison:
        return Comparison([note("schema.unchecked", None, f"{why}: names and shapes were not checked")], 0)

    try:
        wanted = schema.expand(config, tensors.keys())
    except (ConfigError, ValueError) as problem:
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
            f"is no name of schema {schema.name}, whose first is {show(example)}; only {len(found)} of {len(tensors)}"
        )
        return Comparison([error("schema.names", next(iter(tensors)), f"{message} are")], 0)
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
    """Whether a shape is the wanted one, in which None stands for any size."""
    return len(shape) == len(wanted) and all(b is None or a == b for a, b in zip(shape, wanted, strict=True))


def _check_missing(
    choice: Choice, wanted: Mapping[str, Wanted], tensors: Mapping[str, About], modules: frozenset[str]
) -> Iterator[Finding]:
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
                message = f"layer {w.layer} of {layers} is missing, all its {whole[w.layer]} tensors"
                yield error("schema.layer_missing", _before_number(w), message)
        elif w.layer is not None and layers - len(gone) > 1 and everywhere[w.entry.name] == layers - len(gone):
            if w.entry.name not in said:
                said.add(w.entry.name)
                yield error("schema.missing", w.name, f"is missing, and so in each of the {layers} layers")
        else:
            also = ""
            if w.entry.role == "head" and w.entry.tied is not None:
                also = f", and the config does not tie it ({w.entry.tied_when})"
            yield error("schema.missing", w.name, f"is missing{also}")


def _before_number(w: Wanted) -> str:
    """The part of a name up to the number of its layer."""
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
                yield report("schema.unexpected", name, f"is no tensor of schema {choice.schema.name}")
            continue
        entry, layer = known
        if layer is not None and layer >= count:
            stem = name[: len(name) - len(entry.name.partition("{}")[2])]
            beyond[layer, stem] += 1
        elif entry.when is not None:
            yield report("schema.unexpected", name, f"is there, but {entry.when} in the config says that it is not")
        else:
            yield report("schema.unexpected", name, "is there under two names")
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
        yield note("schema.unchecked", unknown[0], f"{unlisted}, beside quantized weights: {what} not checked")
    if inner is not None and others:
        message = f"only what {inner.key} describes was checked (schema {choice.schema.name}): names and shapes of"
        yield note("schema.unchecked", others[0], f"{message} {plural(len(others), 'other tensor')} were not")


def _heads_of(choice: Choice, wanted: Mapping[str, Wanted]) -> Callable[[str], bool]:
    """Whether a tensor that the schema does not have is one of a head.

    Of a model that the schema describes only a part of, a head is what lies outside of that part; of a whole one it is
    what is called so.
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
    """Layers that have a hole in their numbers, or that lack tensors that all others have.

    Args:
        tensors: that are there.
        modules: that hold quantized weights, so that their tensors are others than elsewhere.
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
    """The same tensor in another dtype in some layer; no tensor in the dtype that the config names."""
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
        message = f"config.json says {said}, but no tensor is; {often} of {len(tensors)} are {usual}"
        yield warning("dtype.config", None, message)
