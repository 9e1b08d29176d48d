"""Present a model with experts under the names and shapes that an engine loads: stacked for MLX, separate for others.

Transformers stores experts one by one, or fused: ``gate_up_proj`` [experts, 2 * width, columns] and ``down_proj``.
llm-compressor divides fused experts; mlx-lm stacks separate experts. Source: mlx-lm ``models/*.py``, ``sanitize``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ...base.messages import error_about
from ...base.text import show
from ...errors import FormatError, UnsupportedError
from ...models.choosing import STACK
from ...models.family import MlxExperts, mlx_experts_of
from ...models.schema import MAX_EXPERTS
from ...packed.families import Preset, presets
from ..sources.catalog import Catalog, Move, RestructuredCatalog, TensorRecipe, TensorView

_WEIGHT = ".weight"
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,9})\.", re.ASCII)
# Fused experts of a layer, and the separate experts in it.
_FUSED = re.compile(r"(model\.layers\.[0-9]+\.mlp\.experts)\.(gate_up_proj|down_proj)", re.ASCII)
_FUSED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FUSED_TYPES = frozenset(("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"))


def arranged(catalog: Catalog, preset: Preset, *, whole: bool = True) -> Catalog:
    """Return the tensors as an engine loads them; the catalog itself if names and shapes stay.

    The layers are complete only if the catalog has the ``whole`` model.
    """
    model_type = None if catalog.config is None else catalog.config.get("model_type")
    if not isinstance(model_type, str):
        return catalog
    experts = mlx_experts_of(model_type) if preset.engine.stacks_experts else None
    divides = preset.engine.quantizes_experts and model_type in _FUSED_TYPES
    if experts is None and not (divides and any(map(_FUSED.fullmatch, catalog))):
        return catalog
    catalog.refuse_codes(catalog, f"convert to {preset.name}")
    parts = _parts(catalog, divides=divides)
    recipes = parts if experts is None else _stacked(catalog, preset, experts, parts)
    if whole and experts is not None:
        _check_layers(recipes, _size(catalog, "num_hidden_layers"), preset, experts)
    return RestructuredCatalog(
        catalog, recipes, metadata=catalog.metadata, config=catalog.config, format=catalog.format, for_engine=True
    )


def like(catalog: Catalog, other: Catalog) -> Catalog:
    """Return the tensors with experts as the other catalog stores them: stacked or separate."""
    names, theirs = ([name for name in each if isinstance(name, str)] for each in (catalog, other))
    if any(STACK in name for name in theirs) and not any(STACK in name for name in names):
        return arranged(catalog, presets()["mlx4"])
    if any(map(_FUSED.fullmatch, names)) and not any(map(_FUSED.fullmatch, theirs)):
        return arranged(catalog, presets()["w4a16"])
    return catalog


def _moved(name: str, shape: tuple[int, ...], *view: TensorView) -> TensorRecipe:
    """Return the recipe of a tensor that is a tensor of the source, or a part of it."""
    return TensorRecipe(shape, (Move(name, *view),))


def _parts(catalog: Catalog, *, divides: bool) -> dict[str, TensorRecipe]:
    """Return all tensors of a model, with separate experts."""
    parts = {}
    for name in catalog:
        shape = tuple(catalog.about(name).shape)
        match = _FUSED.fullmatch(name) if divides else None
        if match is None or len(shape) != 3:
            parts[name] = _moved(name, shape)
            continue
        modules = _FUSED_PARTS[match[2]]
        if shape[1] % len(modules) or not 0 < shape[0] <= MAX_EXPERTS:
            raise error_about(FormatError, f"{list(shape)} does not hold experts", tensor=name)
        rows = shape[1] // len(modules)
        for expert in range(shape[0]):
            for k, module in enumerate(modules):
                part = slice(None) if len(modules) == 1 else slice(k * rows, (k + 1) * rows)
                full = f"{match[1]}.{expert}.{module}{_WEIGHT}"
                if full in catalog:
                    raise error_about(FormatError, f"is also a part of {show(name)}", tensor=full)
                parts[full] = _moved(name, (rows, shape[2]), TensorView(expert, part))
    return parts


# ---- mlx-lm ----


def _stacked(
    catalog: Catalog, preset: Preset, experts: MlxExperts, parts: Mapping[str, TensorRecipe]
) -> dict[str, TensorRecipe]:
    """Return the recipes of a model for mlx-lm, in the order of their first source."""
    names = "|".join(map(re.escape, experts.modules))
    expert = re.compile(
        rf"(model\.layers\.[0-9]+\.{re.escape(experts.block)})\.experts\.(0|[1-9][0-9]{{0,9}})\.({names})\.weight",
        re.ASCII,
    )
    recipes: dict[str, TensorRecipe] = {}
    stacks: dict[str, dict[int, TensorRecipe]] = {}
    for name, part in parts.items():
        match, layer = expert.fullmatch(name), _LAYER.match(name)
        dropped = layer is not None and experts.dropped is not None and name.startswith(experts.dropped)
        if dropped and layer is not None and int(layer[1]) >= _size(catalog, "num_hidden_layers"):
            continue  # mlx-lm leaves out layers beyond the last
        if match is not None:
            stack = f"{match[1]}{STACK}{experts.modules[match[3]]}{_WEIGHT}"
            recipes.setdefault(stack, TensorRecipe((), ()))
            stacks.setdefault(stack, {})[int(match[2])] = part
        elif experts.split_heads and name.endswith(".self_attn.kv_b_proj.weight"):
            recipes.update(_heads(catalog, name, part))
        elif ".experts." in name:
            raise UnsupportedError(f"{preset.name}: mlx-lm has no tensor {show(name)}", tensor=name)
        else:
            recipes[name] = part
    for stack, members in stacks.items():
        recipes[stack] = _stack(catalog, experts, stack, members)
    return recipes


def _stack(catalog: Catalog, experts: MlxExperts, stack: str, members: Mapping[int, TensorRecipe]) -> TensorRecipe:
    renamed = experts.renamed
    count = _size(catalog, renamed if renamed is not None and renamed in (catalog.config or {}) else experts.experts)
    missing = next((k for k in range(count) if k not in members), None)
    if missing is not None or len(members) != count:
        fault = f"expert {missing} is missing" if missing is not None else f"it has {len(members)}"
        raise error_about(FormatError, f"needs {count} experts, but {fault}", path=catalog.title, tensor=stack)
    shapes = {part.shape for part in members.values()}
    if len(shapes) > 1:
        text = "is a stack of experts, but these have different shapes"
        raise error_about(FormatError, text, path=catalog.title, tensor=stack)
    moves = tuple(members[k].moves[0]._replace(written=TensorView(k)) for k in range(count))
    return TensorRecipe((count, *shapes.pop()), moves)


def _heads(catalog: Catalog, name: str, part: TensorRecipe) -> dict[str, TensorRecipe]:
    """Divide the up-projection of latent attention by heads."""
    sizes = ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    heads, keys, values = (_size(catalog, key) for key in sizes)
    if len(part.shape) != 2 or heads > MAX_EXPERTS or part.shape[0] != heads * (keys + values):
        text = f"{list(part.shape)} does not have {heads} heads of {keys} + {values} rows"
        raise error_about(FormatError, text, tensor=name)
    module, columns, source = name.removesuffix("kv_b_proj.weight"), part.shape[1], part.moves[0].source
    embed, unembed = [], []
    for k in range(heads):
        begin = k * (keys + values)
        middle, end = begin + keys, begin + keys + values
        embed.append(Move(source, TensorView(rows=slice(begin, middle)), TensorView(k, transposed=True)))
        unembed.append(Move(source, TensorView(rows=slice(middle, end)), TensorView(k)))
    return {
        f"{module}embed_q.weight": TensorRecipe((heads, columns, keys), tuple(embed)),
        f"{module}unembed_out.weight": TensorRecipe((heads, values, columns), tuple(unembed)),
    }


def _check_layers(recipes: Iterable[str], count: int, preset: Preset, experts: MlxExperts) -> None:
    """Refuse layers that mlx-lm's model does not have."""
    layers = {int(match[1]): name for name in recipes if (match := _LAYER.match(name))}
    beyond = next((layer for layer in sorted(layers) if layer >= count), None)
    if beyond is not None:
        raise UnsupportedError(
            f"{preset.name}: mlx-lm does not load layer {beyond}, because the config has {count} layers: "
            f"leave it out in a conversion before this one, with drop= and model.layers.{beyond}.*",
            tensor=layers[beyond],
        )
    sparse = {int(match[1]) for name in recipes if STACK in name and (match := _LAYER.match(name))}
    dense = next((layer for layer in sorted(layers) if layer not in sparse), None)
    if experts.in_every_layer and dense is not None:
        raise UnsupportedError(
            f"{preset.name}: layer {dense} has no experts, and mlx-lm expects experts in every layer",
            tensor=layers[dense],
        )


def _size(catalog: Catalog, key: str) -> int:
    value = (catalog.config or {}).get(key)
    if type(value) is not int or value <= 0:
        raise FormatError(f"config.json: {key} must be a positive integer, got {show(value)}", catalog.title)
    return value
