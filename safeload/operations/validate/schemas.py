"""Compares names and shapes with a schema."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...base.text import plural, show
from ...models.choosing import Choice, Inner
from ...models.schema import PLACEHOLDER, PREFIX, ExpectedTensor, Schema, SchemaMatch
from ..sources.description import TensorDescription
from .findings import Finding, error, note, warning
from .names import Quantized, module_of

# A schema counts as the wrong one if fewer than one in this many tensors are in it.
_KNOWN_AT_LEAST = 10

# Names of the tensors of a head that the schema of a complete architecture lacks: a reward or value head on a causal
# model, the bias of a head.
_HEAD = re.compile(
    r"(?:\w*_)?(?:heads?|lm_head\d*|score|scorer|classifier|qa_outputs|pooler|summary)(?:\..*)?|cls\..*",
    re.ASCII | re.DOTALL,
)


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
    tensors: Mapping[str, TensorDescription],
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
    if inner is not None and _mostly_absent(wanted, tensors, modules):
        return unchecked(f"{inner.key}: more than half of the tensors of schema {schema.name} are missing")
    if tensors and (len(found) + len(parts)) * _KNOWN_AT_LEAST < len(tensors) and inner is None:
        if quantized is not None and quantized.configured:
            return unchecked(f"schema {schema.name}: fewer than a tenth of the tensors are in it")
        first = next((f", whose first name is {show(name)}" for name in wanted), ", which has no tensors by the config")
        message = f"is not in schema {schema.name}{first}; only {len(found)} of {len(tensors)}"
        return Comparison([error("schema.names", next(iter(tensors)), f"{message} names are")], 0)
    findings = list(_check_missing(choice, wanted, tensors, modules))
    if inner is not None and inner.whole:
        message = f"names begin with {show(inner.prefix)}, which those of schema {schema.name} do not"
        findings.append(warning("schema.prefix", next(name for name in tensors if name in wanted), message))
    findings += _check_unexpected(choice, config, wanted, tensors, quantized, inner)
    for name in found:
        shape = wanted[name].shape
        if shape is not None and tensors[name].shape != shape and not fits(tensors[name].shape, shape):
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


def _mostly_absent(
    wanted: Mapping[str, ExpectedTensor], tensors: Mapping[str, TensorDescription], modules: frozenset[str]
) -> bool:
    """Whether more than half of the required tensors are missing."""
    required = [w.name for w in wanted.values() if w.required and module_of(w.name) not in modules]
    return 2 * sum(name in tensors for name in required) < len(required)


def fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    """Whether a shape matches ``wanted``, in which None stands for any size."""
    return len(shape) == len(wanted) and all(b is None or a == b for a, b in zip(shape, wanted, strict=True))


def _check_missing(
    choice: Choice,
    wanted: Mapping[str, ExpectedTensor],
    tensors: Mapping[str, TensorDescription],
    modules: frozenset[str],
) -> Iterator[Finding]:
    """Missing tensors; a layer that lacks all of them, and a tensor that all layers lack, are reported once."""
    required = [w for w in wanted.values() if w.required and (choice.complete or w.entry.role != "head")]
    missing = [w for w in required if w.name not in tensors and module_of(w.name) not in modules]
    if not missing:
        return
    whole, lost = Counter(map(_layer_of, required)), Counter(map(_layer_of, missing))
    gone = {layer for layer in lost if layer is not None and lost[layer] == whole[layer]}
    layers = Counter(layer.stack for layer in whole if layer is not None)
    usual, everywhere = _remaining(required, gone), _remaining(missing, gone)
    said: set[Any] = set()
    for w in missing:
        layer, name = _layer_of(w), w.entry.name
        if layer is not None and layer in gone:
            if layer not in said:
                said.add(layer)
                message = (
                    f"layer {layer.number} of {layers[layer.stack]} is missing, and all {whole[layer]} of its tensors"
                )
                yield error("schema.layer_missing", f"{layer.stack}{layer.number}", message)
        elif layer is not None and len(usual[name]) > 1 and everywhere[name] == usual[name]:
            if name not in said:
                said.add(name)
                count = usual[name].total()
                each = "" if count == len(usual[name]) else f", {count:,} tensors in all"
                yield error("schema.missing", w.name, f"is missing, in each of the {len(usual[name])} layers{each}")
        else:
            also = ""
            if w.entry.role == "head" and w.entry.tied is not None:
                also = f", and the config does not tie it ({w.entry.tied_when})"
            yield error("schema.missing", w.name, f"is missing{also}")


class _Layer(NamedTuple):
    """A layer: the names of its tensors up to its number, and its number."""

    stack: str
    number: int


def _layer_of(wanted: ExpectedTensor) -> _Layer | None:
    return None if wanted.layer is None else _Layer(wanted.stack, wanted.layer)


def _remaining(tensors: Sequence[ExpectedTensor], gone: set[_Layer]) -> dict[str, Counter[_Layer]]:
    """For each entry of a schema: how many of its tensors are in which of the layers that are not ``gone``."""
    found: dict[str, Counter[_Layer]] = {}
    for w in tensors:
        layer = _layer_of(w)
        if layer is not None and layer not in gone:
            found.setdefault(w.entry.name, Counter())[layer] += 1
    return found


def _check_unexpected(
    choice: Choice,
    config: Mapping[str, Any] | None,
    wanted: Mapping[str, ExpectedTensor],
    tensors: Mapping[str, TensorDescription],
    quantized: Quantized | None,
    inner: Inner | None,
) -> Iterator[Finding]:
    """Tensors that the schema does not expect; heads and other parts are noted as unchecked."""
    report = error if choice.complete else warning
    unexpected = [name for name in tensors if name not in wanted]
    if not unexpected:
        return
    counts = Counter(layer.stack for layer in {_layer_of(w) for w in wanted.values()} if layer is not None)
    beyond: Counter[_Layer] = Counter()
    is_head = _heads_of(choice, wanted)
    heads, others, unknown = [], [], []
    for name in unexpected:
        if quantized is not None and (name in quantized.names or module_of(name) in quantized.modules):
            continue
        known = choice.schema.find(name)
        if known is None or (known.entry.architectures and is_head(name)):
            if inner is not None and not name.startswith(inner.prefix):
                others.append(name)
            elif is_head(name):
                heads.append(name)
            elif quantized is not None and quantized.configured:
                unknown.append(name)
            else:
                yield report("schema.unexpected", name, f"is not a tensor of schema {choice.schema.name}")
            continue
        if known.layer is not None and known.layer >= counts[known.stack]:
            beyond[_Layer(known.stack, known.layer)] += 1
        elif _is_written_by_gptq(name, tensors):
            message = f"{_why_unexpected(known, choice.schema)}; AutoGPTQ stores zeros there"
            yield warning("schema.unexpected", name, message)
        else:
            yield report("schema.unexpected", name, _why_unexpected(known, choice.schema))
    for layer, tensors_in_it in sorted(beyond.items()):
        message = f"layer {layer.number} with {tensors_in_it} tensors is beyond the {counts[layer.stack]} layers"
        yield report("schema.layer_extra", f"{layer.stack}{layer.number}", f"{message} of the config")
    if heads:
        yield _note_heads(config, heads)
    if unknown:
        unlisted = f"{plural(len(unknown), 'tensor')} that schema {choice.schema.name} does not have"
        what = "name and shape were" if len(unknown) == 1 else "names and shapes were"
        yield note("schema.unchecked", unknown[0], f"{unlisted}, next to quantized weights: {what} not checked")
    if inner is not None and others:
        message = f"only what {inner.key} describes was checked (schema {choice.schema.name}): names and shapes of"
        yield note("schema.unchecked", others[0], f"{message} {plural(len(others), 'other tensor')} were not")


def _is_written_by_gptq(name: str, tensors: Mapping[str, TensorDescription]) -> bool:
    """Whether this is a bias of a GPTQ weight: early writers store one for every layer."""
    weight = tensors.get(f"{module_of(name)}.weight")
    return name.endswith(".bias") and weight is not None and weight.packed and weight.dtype.startswith("gptq")


def _why_unexpected(known: SchemaMatch, schema: Schema) -> str:
    """What is wrong with a tensor of the schema that a model with this config does not have."""
    entry = known.entry
    if entry.architectures:
        return f"belongs to {' or '.join(entry.architectures)}, but the config names another architecture"
    if len(known.numbers) > 1:
        slot = PLACEHOLDER.findall(entry.name.replace(PREFIX, ""))[1]
        return f"is present, but {schema.counts[slot]} or {entry.when} in the config excludes it"
    if entry.when is not None:
        return f"is present, but {entry.when} in the config excludes it"
    return "is a duplicate of a tensor under another name"


def _heads_of(choice: Choice, wanted: Mapping[str, ExpectedTensor]) -> Callable[[str], bool]:
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
