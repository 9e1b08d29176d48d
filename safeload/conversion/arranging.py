"""Models as an engine loads them: with fused experts divided, or in the form of mlx-lm; and the way back from that."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from ..core.names import grouped
from ..core.text import error_about, show
from ..errors import FormatError, UnsupportedError
from ..models.choosing import TIE
from ..models.family import (
    PLACE,
    MlxForm,
    changed_by_mlx,
    engine_model_types,
    mlx_form,
    with_numbers,
    with_schema,
    without_numbers,
)
from ..models.schema import MAX_EXPERTS, PLACEHOLDER, PREFIX, listed_in
from ..quant.families import Preset, presets
from ..quant.mlx import without_older_keys
from ..quant.quantization import without_quantization
from .catalog import Catalog, RestructuredCatalog
from .forms import SINGLE, config_of_text, laid_out, published_recipes, refuse_missing, some_of
from .llama_cpp.settings import ModelConfig
from .recipes import Move, TensorRecipe, TensorView
from .rules import is_of_mlx, not_as_in_mlx

# Fused experts of a layer, and the separate experts in it.
_FUSED_WEIGHT = re.compile(r"(.*layers\.[0-9]+\.(?:.+\.)?experts)\.(gate_up_proj|down_proj)(?:\.weight)?", re.ASCII)
_FUSED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_OTHER_HALF = {"gate_up_proj": "down_proj", "down_proj": "gate_up_proj"}
_WEIGHT = ".weight"


def arranged(catalog: Catalog, preset: Preset, *, results: Collection[str] | None = None, told: bool = True) -> Catalog:
    """Return the tensors as an engine loads them; the catalog itself if names and shapes stay."""
    # `results` names the tensors of a piece of a whole model. Users are `told` once which tensors are left out.
    if preset.engine.stacks_experts:
        form = mlx_form(catalog.config)
        if form is None or is_of_mlx(catalog):
            return catalog
        return _to_mlx(catalog, preset, form, whole=results is None, told=told and results is None)
    model_type = None if catalog.config is None else catalog.config.get("model_type")
    if not (preset.engine.quantizes_experts and isinstance(model_type, str)):
        return catalog
    names, stacks = _published(catalog, model_type)
    if not (names or stacks or model_type in engine_model_types()):
        fused = {name: match for name in catalog if (match := _FUSED_WEIGHT.fullmatch(name)) is not None}
        stacks = {
            name: [f"{match[1]}.{PLACE}.{module}{_WEIGHT}" for module in _FUSED_PARTS[match[2]]]
            for name, match in fused.items()
            if _shows_rows(catalog, name, results)
        }
    if not (names or stacks):
        return catalog
    catalog.refuse_codes(catalog, f"convert to {preset.name}")
    return RestructuredCatalog(catalog, _parts(catalog, names, stacks))


def _published(catalog: Catalog, model_type: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the published names of tensors under names in memory, and of the experts in stacks, in order."""
    family = next((each for each in with_schema().values() if model_type in each.model_types), None)
    places = () if family is None else sorted(family.in_memory.items(), key=lambda item: item[1].part)
    older: dict[str, str] = {}
    experts: dict[str, list[str]] = {}
    for published, place in places:
        name, stack, alone = (PLACEHOLDER.sub(PLACE, text.replace(PREFIX, "")) for text in (published, *place[:2]))
        if alone != name:
            older[alone] = name
        if place.parts:
            experts.setdefault(stack, []).append(name)
    names, stacks = {}, {}
    for name in catalog if places else ():
        pattern, numbers = without_numbers(name)
        prefix, layers, rest = pattern.rpartition("layers.")  # any prefix
        if (stack_of := experts.get(layers + rest) or experts.get(layers + rest.removesuffix(_WEIGHT))) is not None:
            stacks[name] = [with_numbers(prefix + each, numbers) for each in stack_of]
        elif layers + rest in older:
            names[name] = with_numbers(prefix + older[layers + rest], numbers)
    return names, stacks


def like(catalog: Catalog, other: Catalog) -> Catalog:
    """Return the tensors in the form of the other catalog: of mlx-lm, or with separate experts."""
    names, theirs = ([name for name in each if isinstance(name, str)] for each in (catalog, other))
    if (
        (is_of_mlx(other) or not {*theirs} <= {*names})
        and mlx_form(catalog.config) is not None
        and not is_of_mlx(catalog)
    ):
        with suppress(UnsupportedError, FormatError):  # then the other's names say what is missing
            with_mlx = arranged(catalog, presets()["mlx4"], told=False)
            if {*theirs} <= {*with_mlx}:
                return with_mlx
    if any(map(_FUSED_WEIGHT.fullmatch, names)) and not any(map(_FUSED_WEIGHT.fullmatch, theirs)):
        return arranged(catalog, presets()["w4a16"])
    return catalog


def _shows_rows(catalog: Catalog, name: str, results: Collection[str] | None) -> bool:
    """Return True if the shapes of fused experts show that rows are outputs, as in most families."""
    block, _, module = name.rpartition(".experts.")
    if results is not None:
        separate = re.compile(rf"{re.escape(block)}\.experts\.[0-9]+\.")
        return any(map(separate.match, results))
    other = f"{block}.experts.{_OTHER_HALF[module.removesuffix(_WEIGHT)]}{_WEIGHT if module.endswith(_WEIGHT) else ''}"
    shapes = [catalog.about(each).shape for each in sorted((name, other)) if each in catalog]
    if len(shapes) != 2 or {len(shape) for shape in shapes} != {3}:
        return False
    (_, outputs, width), (_, rows, columns) = shapes  # of gate_up_proj last
    return (rows, columns) == (2 * width, outputs)


def _parts(catalog: Catalog, names: Mapping[str, str], stacks: Mapping[str, Sequence[str]]) -> dict[str, TensorRecipe]:
    """Return all tensors of a model, with separate experts."""
    parts = {}
    for name in catalog:
        shape, modules = catalog.about(name).shape, stacks.get(name, ())
        if not modules or len(shape) != 3:
            parts[names.get(name, name)] = TensorRecipe(shape, (Move(name),))
            continue
        if shape[1] % len(modules) or not 0 < shape[0] <= MAX_EXPERTS:
            raise error_about(FormatError, f"{list(shape)} does not hold experts", tensor=name)
        rows = shape[1] // len(modules)
        for expert, (k, module) in product(range(shape[0]), enumerate(modules)):
            part = slice(None) if len(modules) == 1 else slice(k * rows, (k + 1) * rows)
            full = with_numbers(module, [str(expert)])
            if full in catalog:
                raise error_about(FormatError, f"is also a part of {show(name)}", tensor=full)
            parts[full] = TensorRecipe((rows, shape[2]), (Move(name, TensorView(expert, part)),))
    return parts


# ---- mlx-lm ----


def _with_dtypes(catalog: Catalog, recipes: Mapping[str, TensorRecipe]) -> dict[str, TensorRecipe]:
    """Return recipes that keep the dtype of floating sources where values are computed."""
    result = {}
    for name, recipe in recipes.items():
        about = catalog.about(recipe.moves[0].source)
        keeps = recipe.computes and not about.quantized and about.floating and about.row.bits > 8
        result[name] = recipe._replace(dtype=about.row.code) if keeps else recipe
    return result


def _to_mlx(catalog: Catalog, preset: Preset, form: MlxForm, *, whole: bool, told: bool) -> Catalog:
    """Return a model as mlx-lm has it after ``sanitize``."""
    catalog.refuse_codes(catalog, f"convert to {preset.name}")
    config = ModelConfig(catalog.config or {}, catalog.title, form)
    laid = laid_out(catalog, config, form)
    laid.tell(catalog.title, form.holder, warns=told)
    recipes = laid.recipes
    if whole:
        _check_layers(recipes, config, form, preset.name)
    prefix = form.types[(catalog.config or {})["model_type"]]
    recipes = {prefix + name: recipe for name, recipe in _with_dtypes(catalog, recipes).items()}
    if all(recipe.renamed == name for name, recipe in recipes.items()) and len(recipes) == len(catalog):
        return catalog
    return RestructuredCatalog(catalog, recipes)


def _check_layers(recipes: Mapping[str, TensorRecipe], config: ModelConfig, form: MlxForm, title: str) -> None:
    """Refuse layers that mlx-lm does not have, and layers without what it has in each."""
    numbers = {name: int(number) for name in recipes for number in without_numbers(name)[1][:1]}
    layers = grouped(numbers, numbers.__getitem__)
    known = config.find(form.keys["block_count"].config) is not None  # else mlx-lm refuses the config by itself
    count = config.size("block_count") if known else len(layers)
    beyond = min((layer for layer in layers if layer >= count), default=None)
    if beyond is not None:
        text = f"{title}: mlx-lm does not load layer {beyond}, because the config has {count} layers: "
        text += f"leave it out in a conversion before this one, with drop= and model.layers.{beyond}.*"
        raise UnsupportedError(text, tensor=layers[beyond][0])
    part = form.in_every_layer
    dense = [layer for layer, names in layers.items() if part and not any(part in name for name in names)]
    if dense:
        text = f"{title}: layer {min(dense)} has no experts, and mlx-lm expects experts in every layer"
        raise UnsupportedError(text, tensor=layers[min(dense)][0])
    heads = form.parts_of(form.head)
    if config.values.get(TIE) is False and heads and heads[0] not in recipes:
        raise error_about(FormatError, f"is missing, and {TIE} is not true", tensor=form.head)


def from_mlx(catalog: Catalog) -> Catalog:
    """Return a model of mlx-lm as transformers has it; the catalog itself if nothing differs."""
    config: dict[str, Any] = catalog.config or {}
    form = mlx_form(config)
    if not changed_by_mlx(config):
        return catalog
    if form is None:
        raise UnsupportedError(
            f"{catalog.title}: {not_as_in_mlx(config.get('model_type'))}. Convert the original checkpoint instead; "
            "raw=True writes MLX's names and values",
            path=catalog.title,
        )
    catalog.refuse_codes(catalog, "convert to a model of transformers")
    prefix = form.types[config["model_type"]]
    strange = [name for name in catalog if not name.startswith(prefix)]
    if strange:
        text = (
            f"{catalog.title}: {some_of(strange)}: mlx-lm has no such tensor; raw=True writes the tensors as they are"
        )
        raise UnsupportedError(text, tensor=strange[0])
    config = {
        **without_older_keys(without_quantization(config), form),
        "architectures": [*listed_in(config), form.class_name][:1],
    }
    if prefix:
        config, form = config_of_text(catalog, form, config), form.of_text
    bare = {name.removeprefix(prefix): catalog.recipe(name) for name in catalog}
    inner = RestructuredCatalog(catalog, bare) if prefix else catalog
    settings = ModelConfig(config, catalog.title, form)
    recipes = published_recipes(inner, settings, form, SINGLE)
    refuse_missing(inner, recipes, settings, form)
    return RestructuredCatalog(inner, _with_dtypes(inner, recipes), metadata={"format": "pt"}, config=config)
