"""Make the tensors of a conversion as decided, each when a writer reaches it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes, log, packing
from ...base.arrays import Array, foreign_order
from ...base.gc_pause import paused
from ...base.messages import error_about
from ...base.packing import MLX, Part
from ...base.scheme import SCHEMES, usual_axis
from ...base.selecting import check_matches, renamed
from ...base.text import plural, show
from ...engine.codes.quantized_tensor import QuantizedTensor, storage_of
from ...engine.codes.restore import read_array
from ...engine.codes.source import Source
from ...engine.read.lazy import Lazy, LazyEncoded, LazyPacked, LazyQuantized, Staged
from ...engine.read.plan import Entry
from ...engine.run import jobs
from ...engine.run.memory import private_array
from ...errors import UnsupportedError
from ...formats.gguf.imatrix import ImportanceMatrix
from ...formats.gguf.mixtures import FILE_TYPE, with_updated_file_type
from ...formats.metadata import as_texts
from ...formats.registry import SAFETENSORS, row_of
from ...models.diffusion import model_of, with_renamed_shapes
from ...models.family import changed_by_mlx
from ...models.layout import Layout
from ...packed.families import presets
from ...packed.quantization import is_kept_by, quantization_of
from ...stores.files import Location
from ..folders.shards import Output, ShardWriter, shard_bounds, weight_map, writer_of
from ..quantize.checkpoint import Rules, Summary
from ..quantize.encoding import Encoding, encode, global_scale, largest_in
from ..quantize.engine_layout import EngineCatalog, arranged
from ..quantize.engine_rules import EngineRules, not_as_in_mlx
from ..quantize.file_types import FileTypeRules, metadata_with, rules_for
from ..quantize.importance import read_importance, vectors_for
from ..quantize.quantize import Rounding, quantize_source
from ..quantize.stack import fill, plan
from ..quantize.weights import ScratchBuffers, Weights, weights_in
from ..sources.catalog import Catalog
from ..sources.description import TensorDescription
from ..sources.recipes import TensorRecipe
from ..sources.restructured import RestructuredCatalog
from .copies import Copies, copies_as_decided, may_be_code
from .decide import Decider, Decision, runs_of
from .request import ConvertOptions, ConvertRequest, extras_for, is_restored, metadata_for
from .small_groups import SmallGroups, SmallTensor

# Names of the stacked experts of a layer in mlx-lm.
_MLX_EXPERTS = re.compile(r"\.(?:switch_mlp|experts)\.(?:gate_proj|up_proj|down_proj|fc1|fc2)\.weight\Z")
# Dtypes of the weights of a model of llama.cpp.
_LLAMA_CPP_DTYPES = ("F32", "F16", "BF16")
_SMALL = 64 << 10  # bytes of a tensor that is quantized together with others
_KEPT_BYTES = 16 << 20  # of scales that are kept until they are written


class Outputs(NamedTuple):
    """A conversion with every tensor decided and named, and none read."""

    catalog: Catalog
    decider: Decider
    decisions: dict[str, Decision]  # by name before ``rename``
    tensors: dict[str, Output]  # by name in the result
    metadata: Mapping[Any, Any]
    extras: dict[str, Location]  # other files to copy into the folder, by name
    format: str
    maker: Maker
    engine_rules: EngineRules | None = None

    @property
    def tensor_count(self) -> int:
        """Number of tensors of the result."""
        return sum(name not in self.catalog.ignored for name in self.decisions)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the result."""
        return sum(output.nbytes for output in self.tensors.values())

    @property
    def texts(self) -> dict[str, str] | None:
        return as_texts(self.metadata) or None

    @property
    def config(self) -> dict[str, Any] | None:
        return self.decider.config(self.schemes, dict(zip(self.decisions, self.tensors, strict=True)))

    @property
    def parameters(self) -> int | None:
        if self.engine_rules is None or not self.engine_rules.engine.always_indexed:
            return None
        return sum(math.prod(output.shape) for output in self.tensors.values())

    @property
    def files(self) -> Mapping[str, Location | bytes]:
        """Other files of the folder: those to copy, and those that were made."""
        texts = self.catalog.texts if isinstance(self.catalog, RestructuredCatalog) else {}
        return {**self.extras, **texts}

    @property
    def schemes(self) -> tuple[str, ...]:
        return tuple(sorted({output.scheme for output in self.tensors.values() if isinstance(output, LazyQuantized)}))

    @property
    def summary(self) -> Summary | None:
        return self.decider.summary(self.nbytes)

    @property
    def planned_summary(self) -> dict[str, Any] | None:
        return self.decider.planned_summary(self.nbytes, self.decisions)

    @property
    def runs(self) -> list[dict[str, Any]]:
        return runs_of(self.decisions)

    @property
    def recipes(self) -> dict[str, TensorRecipe]:
        return self.catalog.recipes_of(self._reads) if isinstance(self.catalog, EngineCatalog) else {}

    @property
    def _reads(self) -> list[str]:
        return [*dict.fromkeys(name for decision in self.decisions.values() for name in decision.reads)]

    @property
    def reads(self) -> list[str]:
        """Names of tensors in the source's files."""
        names, catalog = self._reads, self.catalog
        if isinstance(catalog, EngineCatalog):
            names = [source for name in names for source in catalog.sources_of(name)]
        return names

    @property
    def may_hold_codes(self) -> bool:
        if self.decider.restored and self.engine_rules is None:
            return False
        outputs = self.tensors.values()
        return any(
            isinstance(output, LazyPacked | LazyEncoded) or (isinstance(output, Lazy) and may_be_code(output.dtype))
            for output in outputs
        )

    def divided(self, limit: int) -> dict[str, Outputs]:
        tensors, decisions = list(self.tensors.items()), list(self.decisions.items())
        bounds = shard_bounds([output.nbytes for output in self.tensors.values()], limit)
        return {
            file: self._replace(tensors=dict(tensors[rows]), decisions=dict(decisions[rows]))
            for file, rows in bounds.items()
        }

    def weight_map(self, shards: Mapping[str, Outputs]) -> dict[str, str]:
        return weight_map({file: shard.tensors for file, shard in shards.items()})

    def writer(self, written: Callable[[int], object]) -> ShardWriter:
        with paused(len(self.tensors)):
            return writer_of(self._begun(written), self.texts, editable=self.engine_rules is None)

    def _begun(self, written: Callable[[int], object]) -> dict[str, Output]:
        """Return the tensors for a new writer, which reports the bytes that it has written."""
        self.maker.begin(dict(zip(self.tensors, self.decisions, strict=True)))
        for output in self.tensors.values():
            output.report_to(written)
        return self.tensors

    def write_file(self, path: str, overwrite: bool, written: Callable[[int], object]) -> int:
        row_of(self.format).write(self._begun(written), self.metadata, path, overwrite=overwrite)
        return os.path.getsize(path)


def prepare(
    stack: ExitStack, catalog: Catalog, request: ConvertRequest, threads: int | None = None
) -> Outputs | Copies:
    """Merge adapters, which ``stack`` closes, decide about every tensor, and name the outputs."""
    options = request.options
    if options.get("adapters") is not None:
        from .merged import merged  # only here: most conversions merge nothing

        with_config = request.folder is not None
        catalog = merged(stack, catalog, options["adapters"], options.get("storage_options"), with_config=with_config)
    catalog = _as_model(catalog, request)
    request = _in_names_of(catalog, request)
    with paused(len(catalog)):
        return _prepared(catalog, request, threads)


def _as_model(catalog: Catalog, request: ConvertRequest) -> Catalog:
    """Return the tensors that an engine needs, if the result is the file of an engine."""
    options, rules = request.options, request.engine_rules
    if rules is not None and not is_restored(catalog, request):
        chosen = options.get("names") is not None or options.get("only") is not None
        return catalog if chosen else arranged(catalog, rules.preset)
    if options.get("raw") or (request.format != "gguf" and not is_restored(catalog, request)):
        return catalog
    from ..architectures.comfyui import from_comfyui, recognized, to_comfyui  # only here: most need no architecture
    from ..architectures.from_llama_cpp import from_llama_cpp
    from ..architectures.to_llama_cpp import source_of, to_llama_cpp

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
    return model if rules is None else arranged(model, rules.preset)


def _in_names_of(catalog: Catalog, request: ConvertRequest) -> ConvertRequest:
    """Return the request with names of the result in place of patterns that match names of the source only."""
    if not isinstance(catalog, RestructuredCatalog) or isinstance(catalog, EngineCatalog):
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
    quantize, engine_rules = options.get("quantize"), request.engine_rules
    if quantize is None or engine_rules is not None:
        return engine_rules
    model = request.format == "gguf" and not options.get("raw")
    rules = rules_for(catalog, quantize, options.get("keep"), matrix, model=model)
    if isinstance(rules, FileTypeRules) and options.get("layout") is not None:
        raise ValueError(f"layout= has no llama.cpp names, which file type {rules.file_type} needs: pass raw=True")
    return rules


def _prepared(catalog: Catalog, request: ConvertRequest, threads: int | None) -> Outputs | Copies:
    options, format, layout = request.options, request.format, request.options.get("layout")
    path = options.get("imatrix")
    matrix = None if path is None else read_importance(path)
    rules = _rules(catalog, request, matrix)
    decider = Decider(catalog, request, rules)
    if rules is not None:
        rules.kept.check(decider.names)
    decisions = decider.of_layout(layout) if layout is not None else decider.of_tensors()
    if isinstance(rules, Rules):
        check_matches("quantize", rules.patterns, {*decider.names, *decisions})
    converts = request.target is not None or rules is not None
    if options.get("adapters") is not None and not converts and layout is None:
        for source in {source for decision in decisions.values() for source in decision.sources}:
            catalog.check_kept(source)
    copies = None if matrix is not None else copies_as_decided(catalog, request, decider, decisions, threads)
    maker = Maker(catalog, decisions, format, threads=threads, descriptions=decider.descriptions, matrix=matrix)
    outputs = maker.outputs() if copies is None else {}
    rename = options.get("rename")
    names = {name: name for name in decisions} if rename is None else renamed(decisions, rename)
    for name, output in outputs.items() if rename is not None else ():
        _check_rename(name, names[name], output)
    if not (isinstance(rules, EngineRules) and rules.engine.stacks_experts):
        _check_mlx(catalog, request, restored=decider.restored or isinstance(rules, EngineRules))
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
    if copies is not None:
        return copies._replace(names=[*names.values()])
    outputs = {names[name]: output for name, output in outputs.items()}
    metadata = metadata_for(catalog, request)
    if format == "gguf" and rename is not None:
        metadata = with_renamed_shapes(metadata, names)
    own = options.get("metadata") or {}
    chosen = (converts and not isinstance(rules, FileTypeRules)) or isinstance(catalog, RestructuredCatalog)
    if format == "gguf" and chosen and FILE_TYPE not in own:
        metadata = with_updated_file_type(metadata, outputs.values())
    if format == "gguf" and isinstance(rules, Rules):
        metadata = metadata_with(metadata, rules, matrix, own)
    engine_rules = rules if isinstance(rules, EngineRules) else None
    if engine_rules is not None:
        metadata = {"format": engine_rules.engine.metadata, **own}
    extras = extras_for(catalog, request)
    return Outputs(catalog, decider, decisions, outputs, metadata, extras, format, maker, engine_rules)


def _check_rename(name: str, new: str, output: Output) -> None:
    """Refuse a new name for a packed tensor if the quantization config would describe it differently."""
    if new == name or not isinstance(output, LazyPacked):
        return
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
    packed = None if file is None else file.table.packed(number)
    return packed is not None and packed.packing.family == MLX


# ---- tensor by tensor ----


class Maker:
    """Turns decisions into lazy outputs."""

    def __init__(
        self,
        catalog: Catalog,
        decisions: Mapping[str, Decision],  # by the names for messages
        format: str,
        *,
        threads: int | None,
        descriptions: Mapping[str, TensorDescription] | None = None,  # available already
        matrix: ImportanceMatrix | None = None,  # by names in the source
    ) -> None:
        self._importance: dict[str, Array] = {}
        self._catalog = catalog
        self._decisions = decisions
        self._descriptions = {} if descriptions is None else descriptions
        self._format = format
        self._rounding: Rounding | None = "ggml" if format == "gguf" else None
        self._threads = threads
        self._scratch, self._codes = _Scratch(), _Scratch()
        self._buffers = ScratchBuffers()
        self._small = SmallGroups(threads)
        self._kept_parts: dict[str, dict[str, Array]] = {}  # computed parts that have not been written, by tensor
        self._kept_bytes = 0
        self._maxima: dict[tuple[str, ...], float] = {}  # largest magnitudes, by weights
        self._entries: dict[str | None, dict[str, Entry]] = {}
        if matrix is not None:
            quantized = [name for name, decision in decisions.items() if decision.scheme is not None]
            self._importance = vectors_for(matrix, {name: self._about(name).shape for name in quantized})

    def outputs(self) -> dict[str, Output]:
        """Return all tensors, in the order of the decisions."""
        return {name: self._output(name, decision) for name, decision in self._decisions.items()}

    def begin(self, names: Mapping[str, str]) -> None:
        """Prepare for a writer of tensors: small ones are quantized together, in the order of the file."""
        # `names` leads from names to write to names in the decisions.
        in_order = sorted(names) if self._format == SAFETENSORS else names
        self._small.begin(names[name] for name in in_order)

    def _output(self, name: str, decision: Decision) -> Output:
        if decision.stack is not None:
            return self._stacked(name, decision)
        (source,) = decision.sources
        if source not in self._catalog:
            return _stored(self._catalog.ignored[source], self._threads)
        tensor = self._about(source)
        if decision.scheme in presets():
            return self._encoded(source, decision, tensor)
        if decision.scheme is not None and self._is_small(source, tensor) and name not in self._importance:
            return self._quantized_in_group(decision.scheme, source, name, tensor)
        if decision.scheme is not None:
            values = partial(self._values, source, name)
            return self._quantized(decision.scheme, tensor.shape, values, self._importance.get(name))
        if decision.dtype is None and tensor.packed:
            return self._packed(source, tensor)
        if decision.dtype is None and tensor.scheme is not None:
            return self._kept(source, tensor)
        row = tensor.row if decision.dtype is None else dtypes.BY_CODE[decision.dtype]
        if row.packed:
            text = f"is {row.code}, which NumPy does not support: pass dtype="
            raise error_about(UnsupportedError, text, tensor=source)
        dtype, shape = dtypes.array_dtype(row.number), tensor.shape
        staged = self._staged(source, decision.dtype, row)
        return Lazy(dtype, shape, partial(self._read, source, dtype, shape, row), staged)

    def _about(self, source: str) -> TensorDescription:
        return self._descriptions.get(source) or self._catalog.about(source)

    def _values(self, source: str, name: str) -> Source | QuantizedTensor:
        """Return a tensor's values; jobs dequantize packed tensors as they read."""
        return self._catalog.restoring(source, name) or self._catalog.source(source, name)

    def _staged(self, source: str, code: str | None, row: dtypes.Dtype) -> Staged | None:
        """Return the staged read for the safetensors writer, or None if the tensor must be built in memory."""
        if self._format != SAFETENSORS:
            return None
        if code not in self._entries:  # single lookups take longer than reading small tensors
            plain = [each for each in self._decisions.values() if each.scheme is None and each.stack is None]
            names = [each.sources[0] for each in plain if each.dtype == code and each.sources[0] in self._catalog]
            self._entries[code] = self._catalog.described(names, None if code is None else dtypes.BY_CODE[code])
        entry = self._entries[code].get(source)
        return None if entry is None or entry.target != row.number else Staged(entry, self._threads)

    def _read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], row: dtypes.Dtype) -> Array:
        array = self._scratch.array(shape, dtype)
        self._catalog.read_into(name, row, array, self._threads)
        return array

    def _stacked(self, name: str, decision: Decision) -> Output:
        assert decision.stack is not None
        assert decision.dtype is not None
        layers = {source: self._about(source) for source in decision.sources}
        (stack,) = plan(layers, Layout(name, [decision.stack]), dtypes.BY_CODE[decision.dtype])

        def make() -> Array:
            array = self._scratch.array(stack.shape, dtypes.array_dtype(stack.row.number))
            fill(self._catalog, [(stack, array)], threads=self._threads)
            return array

        if decision.scheme is not None:
            return self._quantized(decision.scheme, stack.shape, make)
        return Lazy(dtypes.array_dtype(stack.row.number), stack.shape, make)

    def _quantized(
        self, scheme: str, shape: tuple[int, ...], read: Callable[[], Any], importance: Array | None = None
    ) -> LazyQuantized:
        """Return a tensor to quantize when it is written."""
        axis = usual_axis(scheme, shape)
        (data_dtype, data_shape), scale = storage_of(scheme, shape, axis)

        def make() -> QuantizedTensor:
            value = read()
            stacked = isinstance(value, np.ndarray)  # occupies the scratch memory itself
            data = private_array(data_shape, data_dtype) if stacked else self._scratch.array(data_shape, data_dtype)
            rounding = self._rounding if scheme == "q4_0" else None
            return quantize_source(
                value,
                scheme,
                axis=axis,
                rounding=rounding,
                data=data,
                threads=self._threads,
                importance=importance,
            )

        return LazyQuantized(
            scheme, shape, Lazy(data_dtype, data_shape, lambda: make().data), _scale(scale, make), axis
        )

    def _is_small(self, source: str, tensor: TensorDescription) -> bool:
        """Return True if a tensor is quantized together with others: it is small, plain, and in a local file."""
        if tensor.nbytes > _SMALL or not tensor.floating or tensor.scheme is not None:
            return False
        file = self._catalog.place(source).file if type(self._catalog) is Catalog else None
        return file is not None and not file.remote

    def _quantized_in_group(self, scheme: str, source: str, name: str, tensor: TensorDescription) -> LazyQuantized:
        """Return a small tensor to quantize with its neighbours."""
        shape, axis = tensor.shape, usual_axis(scheme, tensor.shape)
        codes, scale = storage_of(scheme, shape, axis)

        def read() -> Source:
            value = self._catalog.source(source, name)
            assert isinstance(value, Source)
            return value

        rounding = self._rounding if scheme == "q4_0" else None
        self._small.add(name, SmallTensor(scheme, shape, axis, tensor.nbytes, read, rounding))
        scales = None if scale is None else Lazy(*scale, partial(self._small.scale, name))
        return LazyQuantized(scheme, shape, Lazy(*codes, partial(self._small.codes, name)), scales, axis)

    def _encoded(self, source: str, decision: Decision, tensor: TensorDescription) -> LazyEncoded:
        """Return a weight to quantize for an engine when it is written."""
        assert decision.scheme is not None
        assert decision.dtype is not None
        row = dtypes.BY_CODE[decision.dtype]
        encoding = Encoding(source, presets()[decision.scheme], tensor.shape, row)
        constants = encoding.constants()
        parts = {}
        for role, part in encoding.preset.parts.items():
            if role in constants:
                make = partial(constants.__getitem__, role)
            else:
                make = partial(self._part_of, encoding, decision.partners, role)
            parts[part.suffix] = Lazy(*encoding.stored(role), make)
        return LazyEncoded(encoding.preset.name, tensor.shape, parts)

    def _part_of(self, encoding: Encoding, partners: tuple[str, ...], role: str) -> Array:
        """Return a part of a quantized weight."""
        # Files hold all codes before all scales, or after them. Scales are kept from one to the other as long as they
        # take little memory, and computed again otherwise.
        name = encoding.name
        kept = self._kept_parts.get(name, {})
        if role in kept:
            self._kept_bytes -= kept[role].nbytes
            return kept.pop(role)
        largest = self._largest(encoding, partners) if packing.GLOBAL in encoding.preset.parts else None
        if role == packing.GLOBAL:
            assert largest is not None
            return jobs.native_order(np.array([global_scale(largest, encoding.row)]))
        codes = None
        if role == packing.CODES:
            dtype, shape = encoding.stored(role)
            codes = self._codes.array(shape, dtype)
        parts = encode(
            encoding,
            self._weights(name, encoding.row),
            largest=largest,
            codes=codes,
            only_scales=role != packing.CODES,
            threads=self._threads,
        )
        rest = {other: part for other, part in parts.items() if other not in (role, packing.CODES)}
        size = sum(part.nbytes for part in rest.values())
        if self._kept_bytes + size <= _KEPT_BYTES:
            self._kept_parts[name] = rest
            self._kept_bytes += size
        return parts[role]

    def _largest(self, encoding: Encoding, partners: tuple[str, ...]) -> float:
        """Return the largest magnitude in a weight and its partners."""
        names = partners or (encoding.name,)
        if names not in self._maxima:
            encodings = (encoding._replace(name=name, shape=self._about(name).shape) for name in names)
            self._maxima[names] = max(
                largest_in(each, self._weights(each.name, each.row), self._threads) for each in encodings
            )
        return self._maxima[names]

    def _weights(self, name: str, row: dtypes.Dtype) -> Weights:
        return weights_in(self._catalog, name, row, self._buffers, self._scratch.array, threads=self._threads)

    def _packed(self, name: str, tensor: TensorDescription) -> LazyPacked:
        """Return a packed tensor as stored."""
        place = self._catalog.place(name)
        packed = None if place.file is None else place.file.table.packed(place.number)
        value = None if packed is not None else self._catalog.value(name)
        assert value is None or isinstance(value, QuantizedTensor)
        kind = packed.packing if packed is not None else None if value is None else value.packing
        assert kind is not None
        if self._format != SAFETENSORS and (self._format, kind.family) != ("gguf", packing.GGUF):
            text = f"is {tensor.scheme}, which {self._format} files cannot store: pass dtype="
            raise error_about(UnsupportedError, text, tensor=name)
        if packed is not None:  # read in chunks, never mapped
            lazy = {role: _stored(part, self._threads) for role, part in packed.parts.items()}
            return LazyPacked(packed.packing, packed.names(name), lazy)
        assert value is not None
        parts = {
            role: Lazy(part.dtype, part.shape, partial(np.ascontiguousarray, part))
            for role, part in value.roles.items()
        }
        return LazyPacked(kind, value.names, parts)

    def _kept(self, name: str, tensor: TensorDescription) -> LazyQuantized:
        """Return a quantized tensor, unchanged."""

        def make() -> QuantizedTensor:
            value = self._catalog.source(name)
            assert isinstance(value, QuantizedTensor)
            return value

        axis, scheme, shape = tensor.axis, tensor.scheme, tensor.shape
        assert scheme is not None
        (data_dtype, data_shape), scale = storage_of(scheme, shape, axis)
        return LazyQuantized(
            scheme, shape, Lazy(data_dtype, data_shape, lambda: make().data), _scale(scale, make), axis
        )


def _scale(layout: tuple[np.dtype[Any], tuple[int, ...]] | None, make: Callable[[], QuantizedTensor]) -> Lazy | None:
    if layout is None:
        return None

    def scale() -> Array:
        array = make().scale
        assert array is not None
        return array

    return Lazy(*layout, scale)


def _stored(part: Part, threads: int | None) -> Lazy:
    """Return a stored tensor of a file, unchanged."""
    number = part.row.number
    dtype, shape = dtypes.array_dtype(number), dtypes.array_shape(part.row, part.shape, part.end - part.begin)
    staged = None
    if not foreign_order(False):
        staged = Staged(Entry(part.name, part.file, -1, part.begin, part.end, shape, number, number), threads)
    return Lazy(dtype, shape, partial(read_array, part), staged)


class _Scratch:
    """Memory reused from tensor to tensor."""

    def __init__(self) -> None:
        self._memory: Array = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array over the memory, which grows if necessary."""
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if size > self._memory.size:
            self._memory = np.empty(0, np.uint8)  # frees the old memory before new memory is allocated
            self._memory = private_array((size,), np.dtype(np.uint8))
        array: Array = np.ndarray(shape, dtype, self._memory)
        return array
