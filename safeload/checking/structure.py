"""Check names, shapes and dtypes: against each other, and against the schema and the config of the model.

One wrong size in the config makes the shapes of many tensors wrong; then the finding names its key. A GGUF file is
checked against the rules of llama.cpp or ComfyUI for its architecture: keys, their types, vectors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..conversion.catalog import TensorDescription
from ..core import dtypes
from ..core.names import grouped, pattern_of
from ..core.text import listed, plural, show
from ..errors import FormatError
from ..formats.gguf import F32, U32
from ..models import family as rows
from ..models.choosing import Choice, layer_counts
from ..models.diffusion import ARCHITECTURE, MMPROJ, SHAPE_KEY, TYPE, has_marks, model_of, original_shape, prefix_of
from ..models.module_names import unwrapped
from ..models.schema import ANY, NUMBER, PLACEHOLDER, PREFIX, Config, ExpectedTensor, Schema, SchemaMatch, names_in
from ..quant.finder import Codes
from ..quant.quantization import Quantization
from .findings import ERROR, WARNING, Finding, find
from .info import text_in

# Name parts before a layer number, for models without a schema. Other numbers can have gaps: torch's Sequential also
# counts modules without weights.
_CONTAINERS = ("layers", "layer", "blocks", "block", "h", "blk")
_LEVELS = 8  # of nested layers to check in a name, from the innermost
_LAYER = re.compile(rf"(?:.*\.)?(?:{'|'.join(_CONTAINERS)})\.", re.ASCII)
_NUMBERED = re.compile(rf"({NUMBER})\.(.+)", re.ASCII | re.DOTALL)

# Tensors of all layers but the first, in ModernBERT, Inkling 2, Zaya and MiMo-V2-Flash.
_NOT_FIRST = (
    *("layers.0.attn_norm.weight", "layers.0.attention_input.query"),
    *("layers.0.mlp.gate.router_states_scale", "layers.0.self_attn.sinks"),
)
_USUAL = 10  # a tensor is usual if at most a tenth of the layers lack it
# A layer number this many times the number of layers is a mistake. With a smaller gap, layers can be stored elsewhere.
_FAR = 1000
_KNOWN_AT_LEAST = 10  # a schema with fewer than a tenth of the tensors is wrong
_TENSORS_AT_LEAST = 2  # a single tensor does not outvote the config
# Maximum numbers of wrong keys to find, of keys to try for each, and of wrong axes to look at.
_KEYS, _TRIALS, _LOOKED_AT = 4, 4, 1000

# Last name part of the tensors of a quantized weight: codes, scales, zero points.
_PART = re.compile(
    r".*(?:scales?|scale_inv|scale_\d|scale_ub|absmax|quant_map|quant_state|zeros|zero_point|g_idx|q_?weight|packed"
    r"|weight_shape|blocks|biases|SCB|weight_format|codebooks?|q_invperm|q_perm|q_group_map)(?:\..*)?",
    re.ASCII | re.DOTALL,
)

# Names of head tensors outside the schema of a complete architecture, such as a reward or value head on a causal model,
# or the bias of a head.
_HEAD = re.compile(
    r"(?:\w*_)?(?:heads?|lm_head\d*|score|scorer|classifier|qa_outputs|pooler|summary)(?:\..*)?|cls\..*",
    re.ASCII | re.DOTALL,
)

# Descriptions of tensors, and expected tensors, by name.
Descriptions: TypeAlias = Mapping[str, TensorDescription]
_Expected: TypeAlias = Mapping[str, ExpectedTensor]
_Axis = tuple[str, int]  # the name of a tensor and an axis; -1 if its number of axes is wrong
_Layer = tuple[str, int]  # the names of its tensors up to the layer number, and the number


def check_sizes(tensors: Descriptions) -> Iterator[Finding]:
    """Find models without tensors, tensors without elements, and weights that are scalars."""
    if not tensors:
        yield find("model.empty")
    for name, about in tensors.items():
        if 0 in about.shape:
            yield find("tensor.empty", name, shape=list(about.shape))
        elif not about.shape and name.endswith(".weight"):  # others can be: num_batches_tracked, logit_scale
            yield find("tensor.scalar", name, dtype=about.dtype)


# ---- quantized weights ----


class Quantized(NamedTuple):
    """The quantized weights of a checkpoint."""

    label: str = ""  # how they were recognized, for messages
    names: frozenset[str] = frozenset()  # codes, scales, zero points and similar tensors; empty without any
    modules: frozenset[str] = frozenset()  # modules with quantized weights
    configured: bool = False  # True if the config declares quantization

    def unwrapped(self) -> Quantized:
        """Return the weights under names without wrappers."""
        names, modules = (frozenset(map(unwrapped, texts)) for texts in (self.names, self.modules))
        return self._replace(names=names, modules=modules)


def quantized_parts(
    quantization: Quantization | None, schema: Schema | None, tensors: Descriptions, codes: Mapping[str, Codes]
) -> Quantized:
    """Return the tensors of quantized weights; a schema does not apply to any."""
    # Their names, shapes and values depend on the quantization method.
    scales = {code.scale for code in codes.values() if code.scale is not None}  # an unopened shard may hold some
    names = set(codes) | (scales & tensors.keys())
    if quantization is not None:  # includes methods with plain integers as codes
        for name in tensors:
            role = None if schema is None else schema.role(name)
            unlisted = schema is not None and role is None and schema.role(f"{module_of(name)}.weight") is not None
            if unlisted or (role is None and _is_part(name)):
                names.add(name)
    if not names:
        return Quantized()
    modules = frozenset(map(module_of, names)) - {""}
    names |= {name for name in tensors if module_of(name) in modules and (name.endswith(".weight") or _is_part(name))}
    label = "codes with separate scales" if quantization is None else str(quantization)
    return Quantized(label, frozenset(names), modules, quantization is not None)


def module_of(name: str) -> str:
    """Return the module of a tensor: its name up to the last part, or up to ".weight."."""
    module, separator, _ = name.rpartition(".weight.")
    return module if separator else name.rpartition(".")[0]


def _is_part(name: str) -> bool:
    return _PART.fullmatch(name.removeprefix(module_of(name)).removeprefix(".weight.").removeprefix(".")) is not None


# ---- without a schema ----


def check_layers(tensors: Descriptions, modules: Set[str], config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Find gaps in layer numbers, and layers without some tensors of most layers; quantized ``modules`` can differ.

    The last layer is missing if the config states one more, which no stack has, and nowhere as many as there are.
    """
    stacks = _stacks(tensors)
    stated, lengths = layer_counts(config or {})
    absent = stated - {max(layers) + 1 for layers in stacks.values()}
    for prefix, layers in stacks.items():
        if len(layers) < 2 or max(map(len, layers.values())) < 2:
            continue
        count = max(layers) + 1
        outermost = not any(part.isdecimal() for part in prefix.split("."))
        if outermost and count + 1 in absent and count not in stated | lengths:
            count += 1
        for layer in sorted(layer for layer in layers if layer >= _FAR * len(layers)):
            yield find("layers.far", f"{prefix}{layer}", layer=layer, others=len(layers) - 1)
        counts = Counter(rest for parts in layers.values() for rest in parts)
        least = len(layers) - max(1, len(layers) // _USUAL)
        usual = [rest for rest in sorted(counts) if len(layers) > 2 and counts[rest] >= least]
        # Activations have numbers, too, in a list of convolutions: layers of a model have several modules in common.
        if count <= 2 * len(layers) and len({_child(rest) for rest in usual if "." in rest}) > 1:
            for layer in sorted(set(range(count)) - layers.keys()):
                yield find("layers.hole", f"{prefix}{layer}", layer=layer, layers=count)
        # EfficientNet and EfficientLoFTR have a module of several tensors in all layers but the first ones.
        sizes, first = Counter(map(_child, usual)), {*map(_child, layers[min(layers)])}
        for layer, parts in sorted(layers.items()):
            own = first | {*map(_child, parts)}
            for rest in _lost(usual, parts, alike=len(layers) >= _USUAL):
                name, whole = f"{prefix}{layer}.{rest}", sizes[_child(rest)] > 1 and _child(rest) not in own
                if module_of(name) not in modules and not whole and not name.endswith(_NOT_FIRST):
                    yield find("layers.missing", name, count=counts[rest], others=len(layers) - 1)


def _child(rest: str) -> str:
    return rest.partition(".")[0]


def _lost(usual: Sequence[str], parts: Set[str], *, alike: bool) -> list[str]:
    """Return the usual tensors that a layer has lost, without those that a layer of another kind replaces or omits.

    A layer of another kind, such as a dense one among layers with experts, has tensors of its own. It can lack modules,
    as can a stage of a vision model, whose layers are not ``alike``: then a loss is a single tensor.
    """
    absent, present = [rest for rest in usual if rest not in parts], parts & {*usual}
    own = {*map(module_of, parts - present)} - {""}
    counts = Counter(map(_child, absent))
    single = {child for rest in present if counts[child := _child(rest)] == 1}
    every = len(absent) < 2 or (alike and not own)
    return [rest for rest in absent if module_of(rest) not in own and (every or _child(rest) in single)]


def _stacks(names: Iterable[str]) -> dict[str, dict[int, set[str]]]:
    """Return the layers of each stack: the name parts after the layer number, by number, by the prefix before it."""
    stacks: dict[str, dict[int, set[str]]] = {}
    for name in names:
        prefix = _LAYER.match(name)
        for _ in range(_LEVELS):
            if prefix is None:
                break
            numbered = _NUMBERED.fullmatch(name, prefix.end())
            if numbered is not None:
                stacks.setdefault(prefix[0], {}).setdefault(int(numbered[1]), set()).add(numbered[2])
            prefix = _LAYER.match(name[: prefix.end() - 1])
    return stacks


# ---- dtypes ----


def check_dtypes(tensors: Descriptions, config: Mapping[str, Any] | None, parts: Set[str]) -> Iterator[Finding]:
    """Find tensors with a different dtype in other layers, and a wrong dtype in the config; skip quantized parts."""
    plain = (name for name, about in tensors.items() if about.floating and not about.quantized and name not in parts)
    for names in grouped(plain, pattern_of).values():
        counts = Counter(tensors[name].dtype for name in names)
        if len(counts) > 1:
            usual, often = counts.most_common(1)[0]
            for name in names:
                if (dtype := tensors[name].dtype) != usual:
                    yield find("dtype.mixed", name, dtype=dtype, usual=usual, often=often, layers=len(names))
    configured = None if config is None else config.get("torch_dtype") or config.get("dtype")
    if not isinstance(configured, str) or parts or any(about.quantized for about in tensors.values()):
        return
    configured = configured.removeprefix("torch.")
    counts = Counter(about.dtype for about in tensors.values() if about.floating)
    row = dtypes.BY_NAME.get(configured)
    if counts and row is not None and row.floating and configured not in counts:
        usual, often = counts.most_common(1)[0]
        yield find("dtype.config", configured=configured, usual=usual, often=often, tensors=len(tensors))


# ---- with a schema ----


def check_schema(
    choice: Choice,
    config: Mapping[str, Any] | None,  # its part for the language model if the schema covers that part only
    tensors: Descriptions,
    quantized: Quantized,  # tensors outside the schema
) -> tuple[list[Finding], int, Mapping[str, str]]:
    """Compare names and shapes with a schema; return findings, the number of compared tensors, and tied heads."""
    schema, inner = choice.schema, choice.inner
    tied: dict[str, str] = {}  # the embedding of each head

    def unchecked(why: str) -> tuple[list[Finding], int, Mapping[str, str]]:
        return [find("schema.unchecked", why=why)], 0, tied

    try:
        expected = schema.expand(config, tensors.keys())
    except ValueError as problem:
        if inner is not None:
            return unchecked(f"{inner.key}, schema {schema.name}: {problem}")
        return [find("schema.config", schema=schema.name, problem=problem)], 0, tied
    tied.update({w.name: w.tied for w in expected.values() if w.tied is not None})
    names = [name for name in tensors if name in expected and name not in quantized.names]
    required = [w for w in expected.values() if w.required and module_of(w.name) not in quantized.modules]
    if inner is not None and 2 * sum(w.name in tensors for w in required) < len(required):
        return unchecked(f"{inner.key}: more than half of the tensors of schema {schema.name} are missing")
    if tensors and (len(names) + len(quantized.names)) * _KNOWN_AT_LEAST < len(tensors) and inner is None:
        if quantized.configured:
            return unchecked(f"schema {schema.name}: fewer than a tenth of the tensors are in it")
        first = next((f"its first name is {show(name)}" for name in expected), "it has no tensors for this config")
        facts: dict[str, Any] = {"schema": schema.name, "first": first, "known": len(names), "tensors": len(tensors)}
        return [find("schema.names", next(iter(tensors)), **facts)], 0, tied
    findings, corrected = _find_causes(schema, config, tensors, names, expected)
    findings += _check_missing(choice, expected, {w.name for w in required if w.name not in tensors})
    if inner is not None and inner.whole:
        first = next(name for name in tensors if name in expected)
        findings.append(find("schema.prefix", first, prefix=show(inner.prefix), schema=schema.name))
    findings += _check_unexpected(choice, config, expected, tensors, quantized)
    source = "metadata" if schema.config == rows.METADATA else "config"
    for name in names:
        w = corrected.get(name, expected[name])
        if w.wrong_axes(shape := tensors[name].shape):
            facts = {"shape": list(shape), "formula": ", ".join(w.entry.shape or ()), "sizes": spelled(w.shape or ())}
            findings.append(find("schema.shape", name, **facts, source=source))
    return findings, len(names), tied


def spelled(sizes: tuple[int | None, ...]) -> str:
    """Return expected sizes as text; None is any size."""
    return ", ".join("?" if size is None else str(size) for size in sizes)


def _layer_of(expected: ExpectedTensor) -> _Layer | None:
    return None if expected.layer is None else (expected.stack, expected.layer)


def _check_missing(choice: Choice, expected: _Expected, absent: Set[str]) -> Iterator[Finding]:
    """Find missing tensors; report whole layers, and tensors missing in all layers, only once."""
    required = [w for w in expected.values() if w.required and (choice.complete or w.entry.role != "head")]
    missing = [w for w in required if w.name in absent]
    if not missing:
        return
    counts, lost = (Counter(map(_layer_of, tensors)) for tensors in (required, missing))
    gone = {layer for layer in lost if layer is not None and lost[layer] == counts[layer]}
    layers = Counter(layer[0] for layer in counts if layer is not None)
    # By entry, outside the layers that are missing whole: its tensors, its missing tensors, its layers.
    usual, everywhere = (
        Counter(w.entry.name for w in tensors if w.layer is not None and _layer_of(w) not in gone)
        for tensors in (required, missing)
    )
    spread = Counter(name for name, layer in {(w.entry.name, _layer_of(w)) for w in required} if layer not in gone)
    reported: set[Any] = set()
    for w in missing:
        layer, name = _layer_of(w), w.entry.name
        if layer is not None and layer in gone:
            if layer not in reported:
                reported.add(layer)
                stack, number = layer
                facts: dict[str, Any] = {"layer": number, "layers": layers[stack], "tensors": counts[layer]}
                yield find("schema.layer_missing", f"{stack}{number}", **facts)
        elif layer is not None and spread[name] > 1 and everywhere[name] == usual[name]:
            if name not in reported:
                reported.add(name)
                total = "" if usual[name] == spread[name] else f" ({usual[name]:,} tensors)"
                yield find("schema.missing:everywhere", w.name, layers=spread[name], total=total)
        else:
            untied = w.entry.role == "head" and w.entry.tied is not None
            why = f", and the config does not tie it ({w.entry.tied_when})" if untied else ""
            yield find("schema.missing", w.name, why=why)


def _check_unexpected(
    choice: Choice, config: Mapping[str, Any] | None, expected: _Expected, tensors: Descriptions, quantized: Quantized
) -> Iterator[Finding]:
    """Find tensors outside the schema; note heads and other parts as unchecked."""
    severity, schema, inner = ERROR if choice.complete else WARNING, choice.schema, choice.inner
    unexpected = [name for name in tensors if name not in expected]
    if not unexpected:
        return
    counts = Counter(layer[0] for layer in {_layer_of(w) for w in expected.values()} if layer is not None)
    beyond: Counter[_Layer] = Counter()
    # If the schema covers a part of the model, everything outside is a head.
    inside = {w.name.partition(".")[0] for w in expected.values() if w.entry.role != "head"}
    heads, outside, unknown = [], [], []
    for name in unexpected:
        if name in quantized.names or module_of(name) in quantized.modules:
            continue
        match = schema.find(name)
        is_head = _HEAD.fullmatch(name) is not None if choice.complete else name.partition(".")[0] not in inside
        if match is None or (match.entry.architectures and is_head):
            if inner is not None and (not name.startswith(inner.prefix) or (is_head and not inner.whole)):
                outside.append(name)
            elif is_head:
                heads.append(name)
            elif quantized.configured:
                unknown.append(name)
            else:
                yield find("schema.unexpected", name, severity=severity, why=f"is not a tensor of schema {schema.name}")
        elif match.layer is not None and match.layer >= counts[match.stack]:
            beyond[match.stack, match.layer] += 1
        else:
            # Early writers of GPTQ store a bias for every layer.
            weight = tensors.get(f"{module_of(name)}.weight") if name.endswith(".bias") else None
            gptq = weight is not None and weight.packed and weight.dtype.startswith("gptq")
            rule, usual = ("schema.unexpected:gptq", WARNING) if gptq else ("schema.unexpected", severity)
            yield find(rule, name, severity=usual, why=_why_unexpected(match, schema))
    for (stack, layer), count in sorted(beyond.items()):
        facts = {"layer": layer, "layers": counts[stack], "tensors": plural(count, "tensor")}
        yield find("schema.layer_extra", f"{stack}{layer}", severity=severity, **facts)
    if heads:
        classes = None if config is None else config.get("architectures")
        named = isinstance(classes, list) and classes and isinstance(classes[0], str)
        subject = listed(map(repr, heads), 4)
        subject = f"heads {subject} were" if len(heads) > 1 else f"head {subject} was"
        architecture = classes[0][:100] if classes and named else "of the model"
        yield find("head.unchecked", heads[0], architecture=architecture, heads=subject)
    if unknown:
        what = "name and shape were" if len(unknown) == 1 else "names and shapes were"
        tensor_count = plural(len(unknown), "tensor")
        yield find("schema.unchecked:quantized", unknown[0], tensors=tensor_count, schema=schema.name, what=what)
    if inner is not None and outside:
        rest = plural(len(outside), "other tensor")
        yield find("schema.unchecked:inner", outside[0], key=inner.key, schema=schema.name, tensors=rest)


def _why_unexpected(match: SchemaMatch, schema: Schema) -> str:
    """Explain why a model with this config should not have a tensor of the schema."""
    entry = match.entry
    if entry.architectures:
        return f"belongs to {' or '.join(entry.architectures)}, but the config names another architecture"
    if len(match.numbers) > 1:
        slot = PLACEHOLDER.findall(entry.name.replace(PREFIX, ""))[1]
        return f"is present, but {schema.counts[slot]} or {entry.when} in the config excludes it"
    if entry.when is not None:
        return f"is present, but {entry.when} in the config excludes it"
    return "is a duplicate of a tensor under another name"


# ---- wrong sizes in the config ----


def _find_causes(
    schema: Schema, config: Mapping[str, Any] | None, tensors: Descriptions, names: Sequence[str], expected: _Expected
) -> tuple[list[Finding], _Expected]:
    """Find keys of the config on which all tensors agree that they have another value, and the tensors with it."""
    findings: list[Finding] = []
    current = dict(config or {})
    wrong = _wrong(tensors, names, expected)
    while len(wrong) >= _TENSORS_AT_LEAST and len(findings) < _KEYS:
        # The values of single keys that would give each tensor its size on an axis.
        proposals: set[tuple[str, str, int]] = set()  # name of a tensor, key, value
        for name, axis in sorted(wrong)[:_LOOKED_AT]:
            w = expected.get(name)
            usual = None if w is None or axis < 0 else (w.shape or ())[axis]
            if w is None or not usual:
                continue
            size, formula = tensors[name].shape[axis], (w.entry.shape or ())[axis].removesuffix(ANY)
            for key in names_in(formula):
                value = current.get(key)
                if type(value) is int and size * value % usual == 0:
                    proposed = size * value // usual
                    with suppress(ValueError):
                        if Config({**current, key: proposed}, schema.defaults).evaluate(formula) == size:
                            proposals.add((name, key, proposed))
        votes = Counter((key, value) for _, key, value in proposals)
        best, least = None, len(wrong)
        for (key, value), _ in votes.most_common(_TRIALS):
            try:
                corrected = schema.expand({**current, key: value}, tensors.keys())
            except ValueError:
                continue
            users = {
                (name, axis)  # with the key in its formula
                for name in names
                if name in corrected
                for axis, formula in enumerate(corrected[name].entry.shape or ())
                if formula != ANY and key in names_in(formula.removesuffix(ANY))
            }
            off = _wrong(tensors, names, corrected)
            count = len({name for name, _ in users})
            if count >= _TENSORS_AT_LEAST and users.isdisjoint(off) and len(off) < least:
                best, least = (key, value, count, corrected, off), len(off)
        if best is None:
            break
        key, value, count, expected, wrong = best
        facts = {"key": show(key)[1:-1], "value": current[key], "tensors": count}
        findings.append(find("schema.config:key", config=schema.config, expected=value, **facts))
        current[key] = value
    return findings, expected


def _wrong(tensors: Descriptions, names: Sequence[str], expected: _Expected) -> set[_Axis]:
    """Return the axes with other sizes than expected."""
    known = [name for name in names if name in expected]
    wrong = {(name, axis) for name in known for axis in expected[name].wrong_axes(tensors[name].shape)}
    return wrong | {(name, -1) for name in names if name not in expected and tensors[name].shape}


# ---- GGUF ----

_TOKENIZER = "tokenizer.ggml.model"
_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
# Optional keys with a size.
_MORE_SIZES = ("feed_forward_length", "attention.head_count_kv", "expert_feed_forward_length")
# Files of these types have the architecture of another file, and other tensors.
_OTHER_TYPES = ("adapter", "imatrix", "vocab")


def check_gguf(
    metadata: Mapping[Any, Any], tensors: Descriptions
) -> tuple[list[Finding], Choice | None, Mapping[str, Any] | None]:
    """Return findings on a GGUF file, and its schema with the integers of the metadata, if tensors can be compared."""
    architecture = metadata.get(ARCHITECTURE)
    if not tensors:
        return [], None, None
    if architecture is None:
        return [find("gguf.unchecked:no key", key=ARCHITECTURE)], None, None
    diffusion = model_of(metadata)
    if diffusion is not None:
        findings = []
        if not has_marks(tensors.keys(), diffusion, prefix_of(tensors.keys())):
            findings.append(find("gguf.names", architecture=architecture, name=diffusion.marks[-1][0]))
        for key in metadata:
            name = key.removeprefix(SHAPE_KEY)
            if name == key or name not in tensors:
                continue
            try:
                original_shape(metadata, name, tensors[name].shape)
            except FormatError as fault:
                findings.append(find("gguf.shape", name, fault=fault))
        return [*findings, find("gguf.unchecked:diffusion", architecture=architecture)], None, None
    kind, form = text_in(metadata, TYPE), rows.gguf_form_of(metadata)
    if form is None or kind in _OTHER_TYPES:
        named = kind in (*_OTHER_TYPES, MMPROJ)
        subject = f"{kind} file" if named else f"architecture {show(architecture)}"
        return [find("gguf.unchecked", subject=subject)], None, None
    tower = isinstance(form, rows.MmprojForm)
    architecture = form.architecture
    faults = list(_check_keys(metadata, form))
    findings = [finding for _, finding in faults]
    for name, about in tensors.items():
        if (len(about.shape) == 1 or name.endswith(".bias")) and about.dtype != "float32":
            kind = "bias" if name.endswith(".bias") else "vector"
            findings.append(find("gguf.vector", name, kind=kind, dtype=about.dtype))
    required = [key for key in form.required if not form.keys[key].types[0].startswith("array")]
    counts = [name for name, key in form.keys.items() if key.types[0] == rows.U32] if tower else []
    sizes = [f"{architecture}.{key}" for key in counts or (*rows.SIZES, *required, *_MORE_SIZES)]
    listed = [name for name, key in form.keys.items() if key.each_layer is not None or form.can_be_list(name)]
    by_layer = {f"{architecture}.{name}" for name in listed}
    array = next((key for key in sizes if key not in by_layer and isinstance(metadata.get(key), np.ndarray)), None)
    if array is not None:
        findings.append(find("gguf.unchecked:layers", key=array))
    if array is not None or any(key in sizes for key, _ in faults):
        return findings, None, None
    tokens = metadata.get(_TOKENS)
    count = len(tokens) if isinstance(tokens, (list, tuple)) else None
    return findings, Choice(form.schema, True), form.sizes(metadata, tensors, count)


def _check_keys(metadata: Mapping[Any, Any], form: rows.GgufForm) -> Iterator[tuple[str, Finding]]:
    """Yield missing keys and keys of a wrong type, each with its finding."""
    required = [f"{form.architecture}.{key}" for key in form.required_keys]
    model = text_in(metadata, _TOKENIZER)
    if not isinstance(form, rows.MmprojForm):
        required += [_TOKENIZER] if model in rows.NO_TOKENS else [_TOKENIZER, _TOKENS]
        required += [_MERGES] if model in ("gpt2", "gemma4") else []
    yield from ((key, find("gguf.key", key=key)) for key in required if key not in metadata)
    types: dict[str, tuple[str, ...]] = {key: (kind,) for key, kind in rows.GENERAL_TYPES.items()}
    types |= {f"{form.architecture}.{name}": key.types for name, key in form.keys.items()}
    for key, kinds in types.items():
        if key in metadata and not any(_has_type(metadata[key], kind) for kind in kinds):
            value = metadata[key]
            name = "string" if isinstance(value, str) else type(value).__name__.lower()
            name = "an array" if isinstance(value, (list, tuple)) else name
            name = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else name
            yield key, find("gguf.key_type", key=key, type=name, expected=" or ".join(kinds))
    if model is not None and model not in rows.TOKENIZERS:
        expected = ", ".join(rows.TOKENIZERS)
        yield _TOKENIZER, find("gguf.key:tokenizer", key=_TOKENIZER, value=show(model), expected=expected)


# Kinds of NumPy's dtypes by type of an array.
_ARRAYS = {rows.NUMBERS: "iuf", rows.BOOLS: "b", rows.FLOATS: "f"}


def _has_type(value: Any, kind: str) -> bool:
    if kind == rows.TEXTS:
        return isinstance(value, (list, tuple)) and (not value or isinstance(value[0], str))
    if kind in _ARRAYS:
        return isinstance(value, np.ndarray) and value.dtype.kind in _ARRAYS[kind]
    return type(value) is {rows.U32: U32, rows.F32: F32, rows.BOOL: bool, rows.TEXT: str}[kind]
