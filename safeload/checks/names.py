"""Checks of names, shapes and dtypes: against a schema, against each other, against a config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..schema import Choice, ConfigError, Wanted
from .findings import Finding, error, pattern_of, warning

# Parts of a name after which a number is that of a layer, where no schema says so. Numbers elsewhere, as in Sequential
# of torch, have holes for what has no weights.
_CONTAINERS = ("layers", "layer", "blocks", "block", "h", "blk")
_LAYER = re.compile(rf"(?:.*\.)?(?:{'|'.join(_CONTAINERS)})\.", re.ASCII)
_NUMBERED = re.compile(r"(0|[1-9][0-9]{0,8})\.(.+)", re.ASCII | re.DOTALL)

# A schema is taken to be the wrong one when fewer than one of so many tensors are in it.
_KNOWN_AT_LEAST = 10


class Known(NamedTuple):
    """What is known of a tensor without reading it.

    Attributes:
        dtype: name, such as "bfloat16" or "q4_0".
        shape: logical shape.
        floating: whether it is of real floating-point numbers.
        quantized: whether it is int8 with a scale, or in blocks.
    """

    dtype: str
    shape: tuple[int, ...]
    floating: bool
    quantized: bool


def check_sizes(tensors: Mapping[str, Known]) -> Iterator[Finding]:
    """No tensors at all; tensors without elements or without axes."""
    if not tensors:
        yield error("model.empty", None, "there are no tensors")
    for name, known in tensors.items():
        if 0 in known.shape:
            yield warning("tensor.empty", name, f"has shape {list(known.shape)}, so no elements")
        elif not known.shape:
            yield warning("tensor.scalar", name, f"is a single {known.dtype} without axes")


# ---- with a schema ----


def check_schema(choice: Choice, config: Mapping[str, Any] | None, tensors: Mapping[str, Known]) -> Iterator[Finding]:
    """Names and shapes against a schema: what is missing, what is too much, what has another shape."""
    schema = choice.schema
    try:
        wanted = schema.expand(config, tensors.keys())
    except (ConfigError, ValueError) as problem:
        yield error("schema.config", None, f"schema {schema.name}: {problem}")
        return
    found = [name for name in tensors if name in wanted]
    if tensors and len(found) * _KNOWN_AT_LEAST < len(tensors):
        example = next(iter(wanted))
        yield error(
            "schema.names",
            next(iter(tensors)),
            f"is no name of schema {schema.name}, whose first is {example!r}; only {len(found)} of {len(tensors)} are",
        )
        return
    yield from _check_missing(choice, wanted, tensors)
    yield from _check_unexpected(choice, wanted, tensors)
    for name in found:
        shape = wanted[name].shape
        if shape is not None and not fits(tensors[name].shape, shape):
            said = ", ".join(wanted[name].entry.shape or ())
            sizes = ", ".join("?" if size is None else str(size) for size in shape)
            yield error(
                "schema.shape", name, f"has shape {list(tensors[name].shape)}, but [{said}] is [{sizes}] by the config"
            )


def fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    """Whether a shape is the wanted one, in which None stands for any size."""
    return len(shape) == len(wanted) and all(b is None or a == b for a, b in zip(shape, wanted, strict=True))


def _check_missing(choice: Choice, wanted: Mapping[str, Wanted], tensors: Mapping[str, Known]) -> Iterator[Finding]:
    required = [w for w in wanted.values() if w.required and (choice.complete or w.entry.role != "head")]
    missing = [w for w in required if w.name not in tensors]
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


def _check_unexpected(choice: Choice, wanted: Mapping[str, Wanted], tensors: Mapping[str, Known]) -> Iterator[Finding]:
    report = error if choice.complete else warning
    count = len({w.layer for w in wanted.values()} - {None})
    beyond: Counter[tuple[int, str]] = Counter()
    for name in tensors:
        if name in wanted:
            continue
        known = choice.schema.find(name)
        if known is None:
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


# ---- without a schema ----


def check_layers(tensors: Mapping[str, Known]) -> Iterator[Finding]:
    """Layers that have a hole in their numbers, or that lack tensors that all others have."""
    families: dict[str, dict[int, set[str]]] = {}
    for name in tensors:
        place = _LAYER.match(name)
        while place is not None:
            numbered = _NUMBERED.fullmatch(name, place.end())
            if numbered is not None:
                families.setdefault(place[0], {}).setdefault(int(numbered[1]), set()).add(numbered[2])
            place = _LAYER.match(name[: place.end() - 1])
    for prefix, layers in families.items():
        if len(layers) < 2 or max(map(len, layers.values())) < 2:
            continue
        count = max(layers) + 1
        if count <= 2 * len(layers):
            for layer in sorted(set(range(count)) - layers.keys()):
                yield error("layers.hole", f"{prefix}{layer}", f"layer {layer} of {count} is missing")
        counts = Counter(rest for parts in layers.values() for rest in parts)
        few = max(1, len(layers) // _KNOWN_AT_LEAST)
        usual = [rest for rest in sorted(counts) if len(layers) > 2 and counts[rest] >= len(layers) - few]
        for layer, parts in sorted(layers.items()):
            for rest in usual:
                if rest not in parts:
                    message = f"is missing; {counts[rest]} of the other {len(layers) - 1} layers have it"
                    yield warning("layers.missing", f"{prefix}{layer}.{rest}", message)


# ---- dtypes ----


def check_dtypes(tensors: Mapping[str, Known], config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """The same tensor in another dtype in some layer; no tensor in the dtype that the config names."""
    groups: dict[str, list[str]] = {}
    for name, known in tensors.items():
        if known.floating and not known.quantized:
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
    if there and said.startswith(("float", "bfloat")) and said not in there and not any_quantized(tensors):
        usual, often = there.most_common(1)[0]
        message = f"config.json says {said}, but no tensor is; {often} of {len(tensors)} are {usual}"
        yield warning("dtype.config", None, message)


def any_quantized(tensors: Mapping[str, Known]) -> bool:
    """Whether there is a quantized tensor."""
    return any(known.quantized for known in tensors.values())
