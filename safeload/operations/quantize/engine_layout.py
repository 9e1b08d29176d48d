"""Present a model with experts under the names and shapes that an engine loads: stacked for MLX, separate for others.

Transformers stores experts one by one, or fused: ``gate_up_proj`` [experts, 2 * width, columns] and ``down_proj``.
llm-compressor divides fused experts; mlx-lm stacks separate experts. Source: mlx-lm ``models/*.py``, ``sanitize``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ...base.messages import error_about
from ...base.preset import BITSANDBYTES, MLX, PRESETS, Preset
from ...base.text import show
from ...errors import FormatError, UnsupportedError
from ...models.expert_forms import MAX_EXPERTS, STACK
from ...models.family import MlxExperts, mlx_experts_of
from ..sources.catalog import Catalog
from ..sources.description import TensorDescription
from ..sources.recipes import Move, RowRange, TensorRecipe, TensorView
from ..sources.restructured import RestructuredCatalog
from .keeping import EXPRESSION, Keep, compiled

_WEIGHT = ".weight"
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,9})\.", re.ASCII)
# Fused experts of a layer, and the separate experts in it.
_FUSED = re.compile(r"(model\.layers\.[0-9]+\.mlp\.experts)\.(gate_up_proj|down_proj)", re.ASCII)
_FUSED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FUSED_TYPES = frozenset(("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"))


class SourcePart(NamedTuple):
    """A matrix of the model that is a tensor of the source, or a part of it."""

    source: str
    view: TensorView
    shape: tuple[int, ...]


class EngineCatalog(RestructuredCatalog):
    """The tensors of a model as an engine names and shapes them, each with a recipe."""

    def __init__(self, base: Catalog, recipes: Mapping[str, TensorRecipe]) -> None:
        super().__init__(base, recipes, constants={}, metadata=base.metadata, config=base.config, format=base.format)
        self.texts = base.texts if isinstance(base, RestructuredCatalog) else {}

    def about(self, name: str) -> TensorDescription:
        source = self._renamed(name)
        return super().about(name) if source is None else self.base.about(source)._replace(name=name)

    def is_unchanged(self, name: str) -> bool:
        """Return True if a tensor of the source has these values."""
        return self._renamed(name) is not None

    def kept(self, keep: Keep) -> Keep:
        """Return ``keep`` in names of this catalog."""
        if keep is None:
            return None
        if callable(keep):
            function = keep
            return [name for name in self if self._selects(name, lambda text: bool(function(text)))]
        patterns = [keep] if isinstance(keep, str) else list(keep)
        return [name for pattern in patterns for name in (self._matching(pattern) or [pattern])]

    def _matching(self, pattern: Any) -> list[str]:
        if not isinstance(pattern, str):
            return []
        if pattern.startswith(EXPRESSION):
            expression = compiled(pattern)
            return [name for name in self if self._selects(name, lambda text: expression.match(text) is not None)]
        return [name for name in self if self._selects(name, lambda text: fnmatchcase(text, pattern))]

    def _selects(self, name: str, matches: Callable[[str], bool]) -> bool:
        """Return True if a name, its module, or all of its sources match."""

        def either(text: str) -> bool:
            return matches(text) or matches(text.removesuffix(_WEIGHT))

        if either(name):
            return True
        sources = self.sources_of(name)
        selected = [source for source in sources if either(source)]
        if selected and len(selected) < len(sources):
            raise UnsupportedError(
                f"keep= selects {show(selected[0])} and not {show(next(s for s in sources if s not in selected))}, but "
                f"the engine stores both in {show(name)}: select all or none",
                tensor=name,
            )
        return bool(selected)


def arranged(catalog: Catalog, preset: Preset, *, whole: bool = True) -> Catalog:
    """Return the tensors as an engine loads them; the catalog itself if names and shapes stay.

    The layers are complete only if the catalog has the ``whole`` model.
    """
    model_type = None if catalog.config is None else catalog.config.get("model_type")
    if not isinstance(model_type, str):
        return catalog
    experts = mlx_experts_of(model_type) if preset.engine == MLX else None
    divides = preset.engine != BITSANDBYTES and model_type in _FUSED_TYPES  # bitsandbytes leaves experts
    if experts is None and not (divides and any(map(_FUSED.fullmatch, catalog))):
        return catalog
    catalog.refuse_codes(catalog, f"convert to {preset.name}")
    parts = _parts(catalog, divides=divides)
    if experts is None:
        return EngineCatalog(catalog, {name: _recipe(part) for name, part in parts.items()})
    stacks = _Stacks(catalog, preset, experts)
    recipes = stacks.recipes(parts)
    if whole:
        stacks.check_layers(recipes)
    return EngineCatalog(catalog, recipes)


def like(catalog: Catalog, other: Catalog) -> Catalog:
    """Return the tensors with experts as the other catalog stores them: stacked or separate."""
    names, theirs = ([name for name in each if isinstance(name, str)] for each in (catalog, other))
    if any(STACK in name for name in theirs) and not any(STACK in name for name in names):
        return arranged(catalog, PRESETS["mlx4"])
    if any(map(_FUSED.fullmatch, names)) and not any(map(_FUSED.fullmatch, theirs)):
        return arranged(catalog, PRESETS["w4a16"])
    return catalog


def _parts(catalog: Catalog, *, divides: bool) -> dict[str, SourcePart]:
    """Return all tensors of a model, with separate experts."""
    parts = {}
    for name in catalog:
        shape = tuple(catalog.about(name).shape)
        match = _FUSED.fullmatch(name) if divides else None
        if match is None or len(shape) != 3:
            parts[name] = SourcePart(name, TensorView(), shape)
            continue
        modules = _FUSED_PARTS[match[2]]
        if shape[1] % len(modules) or not 0 < shape[0] <= MAX_EXPERTS:
            raise error_about(FormatError, f"{list(shape)} does not hold experts", tensor=name)
        rows = shape[1] // len(modules)
        for expert in range(shape[0]):
            for k, module in enumerate(modules):
                part = RowRange() if len(modules) == 1 else RowRange(k * rows, (k + 1) * rows)
                full = f"{match[1]}.{expert}.{module}{_WEIGHT}"
                if full in catalog:
                    raise error_about(FormatError, f"is also a part of {show(name)}", tensor=full)
                parts[full] = SourcePart(name, TensorView(expert, part), (rows, shape[2]))
    return parts


def _recipe(part: SourcePart) -> TensorRecipe:
    return TensorRecipe(part.shape, (Move(part.source, part.view),))


class _Stacks:
    """Builds the recipes of a model for mlx-lm."""

    def __init__(self, catalog: Catalog, preset: Preset, experts: MlxExperts) -> None:
        self._title, self._preset, self._experts = catalog.title, preset, experts
        self._config = catalog.config or {}
        names = "|".join(map(re.escape, experts.modules))
        self._expert = re.compile(
            rf"(model\.layers\.[0-9]+\.{re.escape(experts.block)})\.experts\.(0|[1-9][0-9]{{0,9}})\.({names})\.weight",
            re.ASCII,
        )

    def recipes(self, parts: Mapping[str, SourcePart]) -> dict[str, TensorRecipe]:
        """Return the recipes, in the order of their first source."""
        recipes: dict[str, TensorRecipe] = {}
        stacks: dict[str, dict[int, SourcePart]] = {}
        for name, part in parts.items():
            match = self._expert.fullmatch(name)
            if self._is_dropped(name):
                continue
            if match is not None:
                stack = f"{match[1]}{STACK}{self._experts.modules[match[3]]}{_WEIGHT}"
                recipes.setdefault(stack, TensorRecipe((), ()))
                stacks.setdefault(stack, {})[int(match[2])] = part
            elif self._experts.split_heads and name.endswith(".self_attn.kv_b_proj.weight"):
                recipes.update(self._heads(name, part))
            elif ".experts." in name:
                raise UnsupportedError(f"{self._preset.name}: mlx-lm has no tensor {show(name)}", tensor=name)
            else:
                recipes[name] = _recipe(part)
        for stack, members in stacks.items():
            recipes[stack] = self._stacked(stack, members)
        return recipes

    def _is_dropped(self, name: str) -> bool:
        """Return True for a tensor of a layer that mlx-lm leaves out, because it lies beyond the last."""
        prefix, match = self._experts.dropped, _LAYER.match(name)
        if prefix is None or match is None or not name.startswith(prefix):
            return False
        return int(match[1]) >= self._size("num_hidden_layers")

    def _stacked(self, stack: str, members: Mapping[int, SourcePart]) -> TensorRecipe:
        renamed = self._experts.renamed
        count = self._size(renamed if renamed is not None and renamed in self._config else self._experts.experts)
        missing = next((k for k in range(count) if k not in members), None)
        if missing is not None or len(members) != count:
            fault = f"expert {missing} is missing" if missing is not None else f"it has {len(members)}"
            raise error_about(FormatError, f"needs {count} experts, but {fault}", path=self._title, tensor=stack)
        shapes = {part.shape for part in members.values()}
        if len(shapes) > 1:
            text = "is a stack of experts, but these have different shapes"
            raise error_about(FormatError, text, path=self._title, tensor=stack)
        moves = tuple(Move(members[k].source, members[k].view, TensorView(k)) for k in range(count))
        return TensorRecipe((count, *shapes.pop()), moves)

    def _heads(self, name: str, part: SourcePart) -> dict[str, TensorRecipe]:
        """Divide the up-projection of latent attention by heads."""
        heads, keys, values = map(self._size, ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
        if len(part.shape) != 2 or heads > MAX_EXPERTS or part.shape[0] != heads * (keys + values):
            text = f"{list(part.shape)} does not have {heads} heads of {keys} + {values} rows"
            raise error_about(FormatError, text, tensor=name)
        module, columns = name.removesuffix("kv_b_proj.weight"), part.shape[1]
        first = [k * (keys + values) for k in range(heads)]
        embed = tuple(
            Move(part.source, TensorView(rows=RowRange(begin, begin + keys)), TensorView(k, transposed=True))
            for k, begin in enumerate(first)
        )
        unembed = tuple(
            Move(part.source, TensorView(rows=RowRange(begin + keys, begin + keys + values)), TensorView(k))
            for k, begin in enumerate(first)
        )
        return {
            f"{module}embed_q.weight": TensorRecipe((heads, columns, keys), embed),
            f"{module}unembed_out.weight": TensorRecipe((heads, values, columns), unembed),
        }

    def check_layers(self, recipes: Mapping[str, TensorRecipe]) -> None:
        """Refuse layers that mlx-lm's model does not have."""
        count = self._size("num_hidden_layers")
        layers = {int(match[1]): name for name in recipes if (match := _LAYER.match(name))}
        beyond = next((layer for layer in sorted(layers) if layer >= count), None)
        if beyond is not None:
            raise UnsupportedError(
                f"{self._preset.name}: mlx-lm does not load layer {beyond}, because the config has {count} layers: "
                f"leave it out in a conversion before this one, with drop= and model.layers.{beyond}.*",
                tensor=layers[beyond],
            )
        sparse = {int(match[1]) for name in recipes if STACK in name and (match := _LAYER.match(name))}
        dense = next((layer for layer in sorted(layers) if layer not in sparse), None)
        if self._experts.in_every_layer and dense is not None:
            raise UnsupportedError(
                f"{self._preset.name}: layer {dense} has no experts, and mlx-lm expects experts in every layer",
                tensor=layers[dense],
            )

    def _size(self, key: str) -> int:
        value = self._config.get(key)
        if type(value) is not int or value <= 0:
            raise FormatError(f"config.json: {key} must be a positive integer, got {show(value)}", self._title)
        return value
