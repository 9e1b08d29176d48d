"""Decide how each tensor of a result is made, and what else a result has."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes, log
from ...base.gc_pause import paused
from ...base.packing import MLX
from ...base.scheme import SCHEMES
from ...base.selecting import check_matches, renamed
from ...base.text import plural, show
from ...engine.read.lazy import LazyPacked
from ...errors import SafeloadError, UnsupportedError
from ...formats.gguf.imatrix import ImportanceMatrix
from ...formats.gguf.mixtures import FILE_TYPE, with_updated_file_type
from ...formats.registry import KERAS, SAFETENSORS
from ...models.diffusion import model_of, with_renamed_shapes
from ...models.family import changed_by_mlx
from ...models.layout import Layout
from ...packed import finder
from ...packed.quantization import is_kept_by, quantization_of
from ...stores.files import Location
from ..folders.shards import config_with
from ..quantize.checkpoint import ModelRules, Rules, Summary, described
from ..quantize.engine_layout import arranged
from ..quantize.engine_rules import EngineRules, not_as_in_mlx, nothing_left
from ..quantize.file_types import FileTypeRules, metadata_with, rules_for
from ..quantize.importance import read_importance
from ..quantize.keeping import Planned
from ..quantize.stack import Stack, plan
from ..sources.catalog import Catalog
from ..sources.description import TensorDescription
from ..sources.restructured import RestructuredCatalog
from .make import Decision, Outputs, outputs_of, spans_of
from .request import ConvertOptions, ConvertRequest, extras_for, is_restored, metadata_for

_F32 = dtypes.BY_CODE["F32"]
# Names of the stacked experts of a layer in mlx-lm.
_MLX_EXPERTS = re.compile(r"\.(?:switch_mlp|experts)\.(?:gate_proj|up_proj|down_proj|fc1|fc2)\.weight\Z")
# Dtypes of the weights of a model of llama.cpp.
_LLAMA_CPP_DTYPES = ("F32", "F16", "BF16")


class Conversion(NamedTuple):
    """A result with every tensor decided and named, and none read."""

    catalog: Catalog
    outputs: Outputs
    tensor_count: int
    left_out: tuple[str, ...]  # a sentence each about what the sources hold besides the tensors
    config: dict[str, Any] | None = None  # ``config.json`` of a folder; None if the source has none
    files: Mapping[str, Location | bytes] = {}  # other files of a folder: where to copy from, or the content
    summary: Summary | None = None  # the quantized tensors; None without ``quantize``
    parameters: int | None = None  # for the index of an engine that wants one for a single shard too
    restored: bool = False  # True if packed tensors are dequantized

    @property
    def may_hold_codes(self) -> bool:
        """True if tensors can be codes that a ``config.json`` describes."""
        return not self.restored and self.outputs.may_hold_codes


def prepare(stack: ExitStack, catalog: Catalog, request: ConvertRequest, threads: int | None = None) -> Conversion:
    """Merge adapters, which ``stack`` closes, decide about every tensor, and name the outputs."""
    copied = _copied(catalog, request, threads)
    if copied is not None:
        return copied
    options = request.options
    if options.get("adapters") is not None:
        from .merged import merged  # only here: most conversions merge nothing

        with_config = request.folder is not None
        catalog = merged(stack, catalog, options["adapters"], options.get("storage_options"), with_config=with_config)
    catalog = _as_model(catalog, request)
    with paused(len(catalog)):
        return _decided(catalog, _in_names_of(catalog, request), threads)


def _copied(catalog: Catalog, request: ConvertRequest, threads: int | None) -> Conversion | None:
    """Return a conversion that only copies and casts plain tensors, or dequantizes blocks; None for any other."""
    options, target, rename = request.options, request.target, request.options.get("rename")
    if request.format != SAFETENSORS or options.get("quantize") is not None or options.get("layout") is not None:
        return None
    if options.get("adapters") is not None or is_restored(catalog, request):
        return None
    tensors = catalog.plain(blocks=True)
    if tensors is None:
        return None
    refuses = target is not None or catalog.format == KERAS  # see `Decider`
    if refuses and dtypes.may_hold_codes(tensors.columns.numbers) and catalog.codes:
        return None
    if not request.every_tensor:
        tensors = tensors.named(catalog.choose(options.get("names"), options.get("only"), options.get("drop")))
    targets = numbers = tensors.ranges.numbers
    if target is not None:
        loaded = {number: dtypes.BY_NUMBER[number].loaded_as(target).number for number in {*numbers.tolist()}}
        targets = np.array([loaded.get(number, number) for number in range(256)])[numbers]
    spans = spans_of(tensors, targets)
    if spans is None:
        return None
    names = [*renamed(tensors.names, rename).values()] if rename else tensors.names
    outputs = Outputs(catalog, request.format, threads, tensors.names, names, (), tensors.columns.shapes, spans)
    outputs = outputs._replace(metadata=metadata_for(catalog, request))
    left_out = _left_out(catalog, {}, empty=not names)
    if request.folder is None:
        return Conversion(catalog, outputs, len(names), left_out)
    config = config_with(catalog.config, target, schemes=outputs.schemes)
    return Conversion(catalog, outputs, len(names), left_out, config, extras_for(catalog, request))


def _decided(catalog: Catalog, request: ConvertRequest, threads: int | None) -> Conversion:
    options, format, layout = request.options, request.format, request.options.get("layout")
    path, own = options.get("imatrix"), options.get("metadata") or {}
    matrix = None if path is None else read_importance(path)
    rules = _rules(catalog, request, matrix)
    engine = rules if isinstance(rules, EngineRules) else None
    decider = Decider(catalog, request, rules)
    stored = [*decider.descriptions, *decider.heads]
    if rules is not None and options.get("keep") is not None:
        rules.kept.check(stored)
    decisions = decider.of_layout(layout) if layout is not None else decider.of_tensors()
    if isinstance(rules, Rules) and rules.patterns:
        check_matches("quantize", rules.patterns, {*stored, *decisions})
    converts = request.target is not None or rules is not None
    if options.get("adapters") is not None and not converts and layout is None:
        for source in {source for name, decision in decisions.items() for source in decision.sources or (name,)}:
            catalog.check_kept(source)
    outputs = outputs_of(
        catalog,
        decisions,
        format,
        rename=options.get("rename"),
        threads=threads,
        tensors=decider.tensors,
        descriptions=decider.descriptions,
        matrix=matrix,
    )
    names = dict(zip(outputs.reads, outputs.names, strict=True))
    for name, output in zip(outputs.reads, outputs.made, strict=False):
        if isinstance(output, LazyPacked) and names[name] != name:
            _check_rename(name, names[name], output)
    if engine is None or not engine.engine.stacks_experts:
        _check_mlx(catalog, request, restored=decider.restored or engine is not None)
        if decider.restored:
            _warn_of_stacks(catalog, names, request.path)
    for (requested, scheme), count in decider.fallbacks.items():
        log.warning(
            "%s: %s got %s instead of %s, because rows are not whole blocks of %d elements",
            request.path,
            plural(count, "tensor"),
            scheme,
            requested,
            SCHEMES[requested].block,
        )
    metadata = metadata_for(catalog, request)
    if format == "gguf" and options.get("rename") is not None:
        metadata = with_renamed_shapes(metadata, names)
    chosen = (converts and not isinstance(rules, FileTypeRules)) or isinstance(catalog, RestructuredCatalog)
    if format == "gguf" and chosen and FILE_TYPE not in own:
        metadata = with_updated_file_type(metadata, outputs.made)
    if format == "gguf" and isinstance(rules, Rules):
        metadata = metadata_with(metadata, rules, matrix, own)
    if engine is not None:
        metadata = {"format": engine.engine.metadata, **own}
    outputs = outputs._replace(metadata=metadata, editable=engine is None)
    indexed = engine is not None and engine.engine.always_indexed
    return Conversion(
        catalog,
        outputs,
        len(names) - len(names.keys() & catalog.ignored.keys()),
        _left_out(catalog, decider.left_out, empty=not decisions and not decider.ignored),
        None if request.folder is None else decider.config(outputs.schemes, names),
        {**extras_for(catalog, request), **catalog.texts},
        decider.summary(outputs.nbytes),
        sum(math.prod(output.shape) for output in outputs.made) if indexed else None,
        decider.restored and engine is None,
    )


def _left_out(catalog: Catalog, objects: Mapping[str, str], *, empty: bool) -> tuple[str, ...]:
    """Warn of what the sources hold besides the converted tensors, and return a sentence each."""
    notes = [note for checkpoint in catalog.checkpoints for note in checkpoint.notes]
    if not (notes or objects or empty):
        return ()
    lines = [f"{show(name)} is left out: {label} is not a tensor" for name, label in objects.items()]
    if empty:
        about = "".join(f"; {line}" for line in (*lines, *notes))
        raise SafeloadError(f"{catalog.title}: no tensor to convert{about}", path=catalog.title)
    lines += [note for note in notes if "left out" in note or "not opened" in note]
    for line in lines:
        log.warning("%s: %s", catalog.title, line)
    return tuple(lines)


def _as_model(catalog: Catalog, request: ConvertRequest) -> Catalog:
    """Return the tensors that an engine needs, if the result is the file of an engine."""
    options, preset = request.options, request.preset
    if preset is not None and not is_restored(catalog, request):
        chosen = options.get("names") is not None or options.get("only") is not None
        return catalog if chosen else arranged(catalog, preset)
    if options.get("raw") or (request.format != "gguf" and not is_restored(catalog, request)):
        return catalog
    from ..architectures.comfyui import from_comfyui, recognized, to_comfyui  # only here: most need no architecture
    from ..architectures.llama_cpp import from_llama_cpp, source_of, to_llama_cpp

    diffusion = None
    if request.format != "gguf" and model_of(catalog.metadata) is not None:
        names, only, drop = options.get("names"), options.get("only"), options.get("drop")
        return from_comfyui(catalog, catalog.choose(names, only, drop, list(catalog.ignored)))
    if request.format == "gguf" and source_of(catalog.config) is None:
        diffusion = recognized(catalog)
        if diffusion is None:
            return catalog
    if request.selecting is not None:
        raise ValueError(f"{request.selecting}= would leave no complete model: pass raw=True to write single tensors")
    target = request.target
    if request.format == "gguf" and target is not None and target.code not in _LLAMA_CPP_DTYPES:
        engine = "llama.cpp" if diffusion is None else "ComfyUI"
        raise UnsupportedError(f'{engine} does not compute with {target.name}: pass dtype="float32" or "bfloat16"')
    if diffusion is not None:
        return to_comfyui(catalog, diffusion)
    if request.format == "gguf":
        return to_llama_cpp(catalog)
    model = from_llama_cpp(catalog)
    return model if preset is None else arranged(model, preset)


def _in_names_of(catalog: Catalog, request: ConvertRequest) -> ConvertRequest:
    """Return the request with names of the result in place of patterns that match names of the source only."""
    if not isinstance(catalog, RestructuredCatalog) or catalog.for_engine:
        return request
    options: ConvertOptions = {**request.options}
    quantize, keep = options.get("quantize"), options.get("keep")
    if isinstance(quantize, Mapping):
        options["quantize"] = {name: to for key, to in quantize.items() for name in catalog.matching(key)}
    if keep is not None and not callable(keep):
        patterns = [keep] if isinstance(keep, str) else list(keep)
        options["keep"] = [name for pattern in patterns for name in catalog.matching(pattern)]
    return request._replace(options=options)


def _rules(catalog: Catalog, request: ConvertRequest, matrix: ImportanceMatrix | None) -> Rules | EngineRules | None:
    options = request.options
    quantize = options.get("quantize")
    if quantize is None:
        return None
    if request.preset is not None:
        return EngineRules(request.preset, options.get("keep"))
    model = request.format == "gguf" and not options.get("raw")
    rules = rules_for(catalog, quantize, options.get("keep"), matrix, model=model)
    if isinstance(rules, FileTypeRules) and options.get("layout") is not None:
        raise ValueError(f"layout= has no llama.cpp names, which file type {rules.file_type} needs: pass raw=True")
    return rules


def _check_rename(name: str, new: str, output: LazyPacked) -> None:
    """Refuse a new name for a packed tensor if the quantization config would describe it differently."""
    module, renamed_module = name.removesuffix(".weight"), new.removesuffix(".weight")
    if not is_kept_by(output.packing.config, module, renamed_module):
        raise UnsupportedError(
            f"rename: tensor {show(name)} stays packed, and the quantization in its config.json names module "
            f"{show(module)}: pass dtype= to dequantize it",
            tensor=name,
        )


def _check_mlx(catalog: Catalog, request: ConvertRequest, *, restored: bool) -> None:
    """Refuse to write a folder for transformers from an MLX model that mlx-lm stores otherwise; warn of a file."""
    config = catalog.config
    quantization = quantization_of(config)
    of_mlx = catalog.metadata.get("format") == "mlx" or (quantization is not None and quantization.method == "mlx")
    # `restored`: the result is dequantized, or quantized for another engine.
    if not restored or not of_mlx or request.options.get("raw") or not changed_by_mlx(config):
        return
    why = not_as_in_mlx((config or {}).get("model_type"))
    if request.folder is None:
        log.warning("%s: %s: the result has MLX's names and values", request.path, why)
        return
    raise UnsupportedError(
        f"{catalog.title}: {why}. Convert the original checkpoint instead; raw=True writes MLX's names and values",
        path=catalog.title,
    )


def _warn_of_stacks(catalog: Catalog, names: Mapping[str, str], path: str) -> None:
    """Warn of dequantized experts under MLX names, because no other library loads these."""
    stacks = [new for name, new in names.items() if _MLX_EXPERTS.search(new) and _is_mlx(catalog, name)]
    if stacks:
        more = f" and {plural(len(stacks) - 1, 'more tensor')}" if stacks[1:] else ""
        log.warning(
            "%s: the experts of a layer are stacked as in MLX (%s%s), and transformers and vLLM do not load these "
            "names. Convert the original checkpoint instead of the MLX one, or split the stacks",
            path,
            show(stacks[0]),
            more,
        )


def _is_mlx(catalog: Catalog, name: str) -> bool:
    """Return True if a tensor is packed in an MLX file."""
    file, number = catalog.place(name)[1:] if name in catalog else (None, 0)
    packed = None if file is None else file.table.packed.get(number)
    return packed is not None and packed.packing.family == MLX


class Decider:
    """Decides how tensors are converted, and keeps a record for the summary."""

    def __init__(self, catalog: Catalog, request: ConvertRequest, rules: Rules | EngineRules | None) -> None:
        options, target, self._format = request.options, request.target, request.format
        names, only, drop = options.get("names"), options.get("only"), options.get("drop")
        self._catalog, self._target = catalog, target
        self._rules = rules  # None quantizes nothing
        self._engine = rules if isinstance(rules, EngineRules) else None
        self._diffusion = self._format == "gguf" and model_of(catalog.metadata) is not None
        self._quantized: dict[str, str] = {}
        self._kept: dict[str, str] = {}
        self.fallbacks: Counter[tuple[str, str]] = Counter()  # matrices by requested scheme and its fallback
        tied: Mapping[str, str] = {}
        if rules is not None:
            model = ModelRules.of(catalog)
            # llama.cpp and engines tie the head themselves, and a restored model has all of its tensors.
            ties = not isinstance(rules, (FileTypeRules, EngineRules)) and not isinstance(catalog, RestructuredCatalog)
            tied = model.tied_heads() if names is None and ties else {}
            if isinstance(rules, EngineRules):
                rules.set_model(model.schema, catalog, chosen=names is not None or only is not None)
            else:
                rules.schema = model.schema
        chosen = dict.fromkeys(catalog.choose(names, only, drop, [*tied, *catalog.ignored]))
        unknown = catalog.unknown() if names is None else {}
        # Entries other than tensors, with their types. Selecting such an entry by its exact name is an error.
        self.left_out = {name: entry.label for name, entry in unknown.items() if name in chosen and not entry.is_tensor}
        self.heads = {head: embedding for head, embedding in tied.items() if head in chosen}
        self.ignored = [name for name in catalog.ignored if name in chosen]
        beside = {*self.heads, *self.left_out, *(name for name in self.ignored if name not in catalog)}
        stored = [name for name in chosen if name not in beside]
        every = request.every_tensor and not self.left_out
        tensors = catalog.plain(None if every else stored, blocks=True) if type(catalog) is Catalog else None
        self.tensors = None if tensors is None else tensors.named(stored)
        self.descriptions = catalog.descriptions(stored, self.tensors)
        if isinstance(rules, FileTypeRules):
            rules.prepare(self.descriptions)
        if self._engine is not None:
            self.descriptions = {k: v for k, v in self.descriptions.items() if not self._engine.drops(k)}
        converts, packed = target is not None or rules is not None, self.tensors is None
        self.restored = converts and packed and any(tensor.packed for tensor in self.descriptions.values())
        unnamed = catalog.format == KERAS and not options.get("raw")  # in a copy nothing would tell codes from weights
        coded = self.tensors is None or dtypes.may_hold_codes(self.tensors.columns.numbers)
        if coded and (converts or self._format != SAFETENSORS or unnamed):
            cause = f"the format {self._format}" if target is None else "dtype="
            cause = cause if rules is None else "quantize="
            finder.refuse(catalog.codes, self.descriptions, f"convert with {cause}")

    def config(self, schemes: Collection[str], names: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the ``config.json`` of the result, or None if the source has none; ``names`` maps old to new names."""
        config = config_with(self._catalog.config, self._target, restored=self.restored, schemes=schemes)
        return config if self._engine is None else self._engine.config(config, self._quantized, self._kept, names)

    def summary(self, nbytes: int) -> Summary | None:
        """Return the summary of quantized and kept tensors, or None without ``quantize``."""
        if self._rules is None:
            return None
        heads = {head: self._catalog.about(self.heads[head]) for head in self.heads if head in self._quantized}
        before = sum([tensor.nbytes for tensor in self.descriptions.values()])
        return Summary(before, nbytes, self._quantized, self._kept, described({**self.descriptions, **heads}))

    def of_tensors(self) -> dict[str, Decision]:
        """Decide about tensors under their own names, and about tied heads."""
        if self.tensors is None:
            self._catalog.refuse_unknown(self.descriptions)
        names: Iterable[str] = self.descriptions
        if isinstance(self._rules, FileTypeRules):
            names = self._rules.ordered(names)
        decisions = {name: self._decide(name, self.descriptions[name]) for name in names}
        if self._engine is not None:
            return self._with_partners(decisions, self._engine)
        if self._rules is None and self._target is None and self._format in (SAFETENSORS, "gguf"):
            decisions.update(dict.fromkeys(self.ignored, Decision()))  # activation scales: all stays packed
        for head, embedding in self.heads.items():
            tensor = self._catalog.about(embedding)
            if tensor.quantized or not tensor.floating:
                continue
            scheme = self._planned(head, tensor).scheme
            if scheme is not None:
                decisions[head] = Decision(scheme=scheme, sources=(embedding,))
            elif embedding not in self.descriptions:  # a reader has no embedding in the result to tie the head to
                decisions[head] = self._decide(embedding, tensor)._replace(sources=(embedding,))
        return decisions

    def _with_partners(self, decisions: dict[str, Decision], engine: EngineRules) -> dict[str, Decision]:
        """Let weights that the engine fuses share a scale."""
        if not self._quantized:
            raise nothing_left(engine.preset, self._kept)
        for name in self._quantized:
            partners = engine.partners(name, self._quantized)
            decisions[name] = decisions[name]._replace(partners=partners if len(partners) > 1 else ())
        return decisions

    def of_layout(self, layout: Layout) -> dict[str, Decision]:
        """Decide about the tensors of a layout."""
        decisions: dict[str, Decision] = {}
        for stack in plan(self.descriptions, layout, self._target):
            name = stack.entry.name
            finder.refuse(self._catalog.codes, stack.names, "convert with layout=")
            planned = None if self._rules is None else self._planned(name, _description_of(stack))
            scheme, kept = (None, None) if planned is None else (planned.scheme, planned.reason or None)
            decisions[name] = Decision(stack.row.code, scheme, kept, tuple(stack.names), stack.entry)
        return decisions

    def _planned(self, name: str, tensor: TensorDescription) -> Planned:
        """Apply the rules to a tensor and record the outcome for the summary."""
        assert self._rules is not None
        planned = self._rules.plan(name, tensor)
        if planned.scheme is None:
            self._kept[name] = planned.reason
        else:
            self._quantized[name] = planned.scheme
            if planned.requested is not None:
                self.fallbacks[planned.requested, planned.scheme] += 1
        return planned

    def _decide(self, name: str, tensor: TensorDescription) -> Decision:
        row = tensor.row
        planned = None if self._rules is None else self._planned(name, tensor)
        kept = None if planned is None else planned.reason or None
        if self._engine is not None and planned is not None:
            if planned.scheme is not None:
                weight = self._engine.weight_dtype(tensor, self._target)
                return Decision(weight.code, planned.scheme)
            target = self._engine.kept_dtype(tensor, self._target)
            changes = target is not None and (tensor.floating or tensor.scheme is not None) and target is not row
            return Decision(target.code if changes and target is not None else None, kept=kept)
        if planned is not None and planned.scheme is not None:
            return Decision(scheme=planned.scheme)
        if planned is not None and planned.dtype is not None:
            return Decision(planned.dtype, kept=kept)
        if tensor.packed:
            if self._target is None and self._rules is None:
                return Decision()
            row = _F32
        elif tensor.scheme is not None and (self._target is None or (planned is not None and planned.already)):
            return Decision(kept=kept)
        if self._target is not None and (row.floating or tensor.scheme is not None):
            row = self._target
        if self._format == "gguf" and row.floating and row.block_bytes > 1 and self._is_kept_f32(name, tensor):
            row = _F32  # the writer still refuses unsupported dtypes
        unchanged = row is tensor.row and tensor.scheme is None
        if unchanged and self._format == SAFETENSORS and row not in dtypes.SAFETENSORS:
            raise dtypes.not_stored(row.name, name)
        return Decision(None if unchanged else row.code, kept=kept)

    def _is_kept_f32(self, name: str, tensor: TensorDescription) -> bool:
        """Return True if a tensor of a GGUF file is float32 whatever dtype is requested."""
        if name in self._catalog.kept_f32:
            return True
        # llama.cpp aborts on norms of any other dtype, ComfyUI does not.
        return len(tensor.shape) < 2 and (not self._diffusion or tensor.row is _F32)


def _description_of(stack: Stack) -> TensorDescription:
    row, shape = stack.row, stack.shape
    return TensorDescription(stack.entry.name, row.name, shape, row.nbytes(math.prod(shape)), row, row.floating)
