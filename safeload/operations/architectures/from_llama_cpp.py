"""Present a file of llama.cpp as a model of transformers: names, rows, config and tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...base import log
from ...base.messages import error_about
from ...base.text import show
from ...errors import FormatError, UnsupportedError
from ...models import gguf_sources
from ...models.diffusion import ARCHITECTURE
from ...models.expert_forms import MAX_EXPERTS
from ...models.gguf_sources import ENDS, SOURCES, Experts, GgufSource
from ...packed.quantization import without_quantization
from ...stores.json_file import parse_json
from ..sources.catalog import Catalog
from ..sources.recipes import Move, RowRange, TensorRecipe, TensorView
from ..sources.restructured import RestructuredCatalog
from .file_keys import FileKeys
from .foreign_config import class_of, config_of
from .to_llama_cpp import CONFIG_KEY, FORM_KEY, check_tensors, some_of
from .tokenizer_files import tokenizer_files

SINGLE, FUSED = "single", "fused"

_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,9})\.(.+)\.(weight|bias)", re.ASCII)
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
# Tensors with values that the config has.
_SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def from_llama_cpp(catalog: Catalog) -> Catalog:
    """Return the tensors, the config and the tokenizer's files of a model."""
    metadata = catalog.metadata
    architecture = str(metadata[ARCHITECTURE])
    known = sorted({source.architecture for source in SOURCES.values()})
    if architecture not in known:
        raise UnsupportedError(
            f"{catalog.title}: architecture {show(architecture)} cannot become a folder for transformers, expected "
            f"one of {', '.join(known)}; raw=True writes the tensors as they are"
        )
    catalog.refuse_codes(catalog, "convert to a model of transformers")
    notes: list[str] = []
    config = _own_config(catalog, architecture)
    if config is not None:
        name = str(config["architectures"][0])
        form = str(metadata.get(FORM_KEY, SINGLE))
    else:
        name = class_of(catalog)
        config, notes = config_of(catalog, name)
        form = SINGLE
    source = SOURCES[name]
    if source.experts is not None and not source.experts.single:
        form = FUSED
    recipes = _Restored(catalog, source, form).run()
    shapes = {tensor: tuple(catalog.about(tensor).shape) for tensor in catalog}
    rows = next(iter(shapes.get("token_embd.weight", ())), 0)
    check_tensors(shapes, metadata, rows, catalog.title, architecture)
    result = RestructuredCatalog(catalog, recipes, constants={}, metadata={}, config=config)
    result.texts, more = tokenizer_files(catalog, name)
    notes += more
    if notes:
        log.warning("%s: not recovered: %s", catalog.title, "; ".join(notes))
    return result


def _own_config(catalog: Catalog, architecture: str) -> dict[str, Any] | None:
    """Return the config that `to_llama_cpp` has kept, or None in a foreign file."""
    text = catalog.metadata.get(CONFIG_KEY)
    if not isinstance(text, str):
        return None
    config = parse_json(text.encode("utf-8", "surrogateescape"), CONFIG_KEY, catalog.title)
    listed = config.get("architectures")
    name = (
        listed[0]
        if isinstance(listed, list) and listed
        else gguf_sources.model_types().get(str(config.get("model_type")))
    )
    if not isinstance(name, str) or name not in SOURCES or SOURCES[name].architecture != architecture:
        raise FormatError(
            f"{CONFIG_KEY} names {show(name)}, but the file is of architecture {architecture}", catalog.title
        )
    return {**without_quantization(config), "architectures": [name]}


class _Restored:
    """Builds the recipes of a model of transformers."""

    def __init__(self, catalog: Catalog, source: GgufSource, form: str) -> None:
        self._catalog = catalog
        self._title = catalog.title
        self._source = source
        self._form = form
        # The first name wins, except for the router of fused experts.
        pairs = [(target, module) for module, target in source.modules.items()]
        self._modules = dict(pairs if form == FUSED else reversed(pairs))
        self._ends = {target: module for module, target in ENDS.items()}

    def run(self) -> dict[str, TensorRecipe]:
        """Return the recipes in the order of the file."""
        recipes: dict[str, TensorRecipe] = {}
        unknown = []
        for name in self._catalog:
            if name in _SETTINGS:
                continue
            restored = dict(self._of(name))
            if not restored:
                unknown.append(name)
            recipes.update(restored)
        if unknown:
            raise UnsupportedError(
                f"{self._catalog.title}: {some_of(unknown)}: transformers has no such "
                "tensor; raw=True writes the tensors as they are",
                tensor=unknown[0],
            )
        return recipes

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._catalog.about(name).shape)

    def _of(self, name: str) -> Iterator[tuple[str, TensorRecipe]]:
        """Yield the tensors that a tensor of the file becomes, or becomes a part of."""
        module, _, suffix = name.rpartition(".")
        if module in self._ends and suffix == "weight":
            bare = f"{self._ends[module]}.weight"
            yield (bare if module == "output" else f"model.{bare}"), self._same(name, bare)
            return
        match = _BLOCK.fullmatch(name)
        if match is None:
            return
        layer, target, suffix = f"model.layers.{match[1]}.", match[2], match[3]
        if target in _EXPERTS and self._source.experts is not None:
            yield from self._experts(name, layer, target, suffix)
        elif target in self._modules:
            inner = self._modules[target]
            full = f"{layer}{inner}" if target == "attn_sinks" else f"{layer}{inner}.{suffix}"
            yield full, self._same(name, full, target)

    def _same(self, name: str, full: str, target: str = "") -> TensorRecipe:
        shape, heads = self._shape(name), 0
        if self._source.permuted and target in ("attn_q", "attn_k"):
            heads = self._heads(target)
            if not shape or shape[0] % (2 * heads):
                text = f"{list(shape)} does not have {heads} heads"
                raise error_about(FormatError, text, path=self._title, tensor=name)
        shift = -1.0 if self._source.norm_shift and full.endswith("norm.weight") else 0.0
        if target == "ffn_gate_inp_shexp" and len(shape) == 1:
            return TensorRecipe((1, *shape), (Move(name, written=TensorView(0)),))
        return TensorRecipe(shape, (Move(name),), heads, inverse=True, shift=shift)

    def _heads(self, target: str) -> int:
        prefix, keys = (
            f"{self._source.architecture}.attention.head_count",
            FileKeys(self._catalog.metadata, self._title),
        )
        heads = keys.count(f"{prefix}_kv") if target == "attn_k" else None
        heads = keys.count(prefix) if heads is None else heads
        if not heads:
            raise FormatError(f"key {prefix} must be a positive integer, got {heads}", self._title)
        return heads

    def _experts(self, name: str, layer: str, target: str, suffix: str) -> Iterator[tuple[str, TensorRecipe]]:
        experts, shape = self._source.experts, self._shape(name)
        assert experts is not None
        if len(shape) != (2 if suffix == "bias" else 3) or not 0 < shape[0] <= MAX_EXPERTS:
            raise error_about(FormatError, f"{list(shape)} does not hold experts", path=self._title, tensor=name)
        if self._form != FUSED:
            inner = {stack: module for module, stack in experts.single.items()}[target]
            for k in range(shape[0]):
                yield f"{layer}{inner.format(k)}.{suffix}", TensorRecipe(shape[1:], (Move(name, TensorView(k)),))
        elif target == "ffn_down_exps":
            yield self._fused_down(name, layer, experts, suffix)
        elif target == "ffn_gate_exps":
            yield self._fused(name, layer, experts, suffix)
        else:
            gate = name.replace("ffn_up_exps", "ffn_gate_exps")
            if gate not in self._catalog:
                raise error_about(FormatError, "is missing", path=self._title, tensor=gate)
            yield self._fused(gate, layer, experts, suffix)

    def _fused_down(self, name: str, layer: str, experts: Experts, suffix: str) -> tuple[str, TensorRecipe]:
        shape = self._shape(name)
        if suffix == "bias":
            return f"{layer}{experts.down}_bias", TensorRecipe(shape, (Move(name),))
        if not experts.interleaved:
            return f"{layer}{experts.down}", TensorRecipe(shape, (Move(name),))
        moves = tuple(Move(name, TensorView(k), TensorView(k, transposed=True)) for k in range(shape[0]))
        return f"{layer}{experts.down}", TensorRecipe((shape[0], shape[2], shape[1]), moves)

    def _fused(self, gate: str, layer: str, experts: Experts, suffix: str) -> tuple[str, TensorRecipe]:
        up, shape = gate.replace("ffn_gate_exps", "ffn_up_exps"), self._shape(gate)
        if up not in self._catalog or self._shape(up) != shape:
            text = f"is missing or differs in shape from {show(gate)}"
            raise error_about(FormatError, text, path=self._title, tensor=up)
        half = shape[1]
        moves = []
        for k in range(shape[0]):
            for part, name in enumerate((gate, up)):
                rows = RowRange(part, None, 2) if experts.interleaved else RowRange(part * half, (part + 1) * half)
                moves.append(Move(name, TensorView(k), TensorView(k, rows, experts.interleaved)))
        if suffix == "bias":
            return f"{layer}{experts.fused}_bias", TensorRecipe((shape[0], 2 * half), tuple(moves))
        result = (shape[0], shape[2], 2 * half) if experts.interleaved else (shape[0], 2 * half, shape[2])
        return f"{layer}{experts.fused}", TensorRecipe(result, tuple(moves))
