"""The layout of tensors in llama.cpp, and the way back, by the table of the model's family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...base.text import error_about, plural, show
from ...errors import FormatError, UnsupportedError
from ...models.family import PLACE, GgufForm, GgufLayout, without_numbers
from ...models.module_names import stored_names
from ...models.schema import MAX_EXPERTS
from ..sources.catalog import Catalog, Move, TensorRecipe, TensorView
from .settings import ModelConfig, count_at

SINGLE, FUSED = "single", "fused"

_HEAD = "lm_head.weight"
# Suffixes of buffers that llama.cpp computes itself.
_BUFFERS = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")
# Tensors with values that the config has.
_SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_MOST_SHOWN = 3
# Stands for the recipe of a stack until all experts are found.
_LATER = TensorRecipe((), ())


def llama_cpp_recipes(
    catalog: Catalog, config: ModelConfig, form: GgufForm
) -> tuple[dict[str, TensorRecipe], str | None]:
    """Return the recipes of a file in the order of their first source, and how the model stores experts."""
    stored_by_name = stored_names(catalog, catalog.title)
    tied = config.values.get("tie_word_embeddings", form.tied)
    if form.tied and tied is not True and _HEAD in stored_by_name:
        raise config.unsupported("tie_word_embeddings is false, but llama.cpp has no separate head here")
    recipes: dict[str, TensorRecipe] = {}
    experts: dict[str, dict[int, str]] = {}  # stacks: the tensor of each expert
    forms: set[str] = set()
    unknown = []
    for name, stored in stored_by_name.items():
        if name.endswith(_BUFFERS) or (name == _HEAD and form.tied):
            continue
        pattern, numbers = without_numbers(name)
        placed = False
        for place, layout in form.targets.get(pattern, ()):
            target = place.replace(PLACE, numbers[0]) if numbers else place
            recipe = _LATER if layout.stack else _recipe(catalog, config, layout, stored, target)
            if recipe is None or (layout.stack and int(numbers[1]) >= MAX_EXPERTS):
                continue
            if layout.stack:
                experts.setdefault(target, {})[int(numbers[1])] = stored
            if layout.stack or layout.part is not None:
                forms.add(SINGLE if layout.stack else FUSED)
            if target in recipes and not layout.stack:
                raise error_about(FormatError, f"is a second {target}", path=catalog.title, tensor=stored)
            recipes.setdefault(target, recipe)
            placed = True
        if not placed:
            unknown.append(stored)
    _refuse(unknown, catalog.title, f"llama.cpp's {form.architecture}")
    if tied is not True and _HEAD not in stored_by_name and not form.tied:
        text = "is missing, and tie_word_embeddings is not true"
        raise error_about(FormatError, text, path=catalog.title, tensor=_HEAD)
    recipes.update((target, _stack(catalog, config, target, sources)) for target, sources in experts.items())
    if len(forms) > 1:
        raise FormatError("some layers have fused experts and some do not", catalog.title)
    return recipes, next(iter(forms), None)


def _recipe(catalog: Catalog, config: ModelConfig, layout: GgufLayout, name: str, target: str) -> TensorRecipe | None:
    """Return how a published tensor becomes a tensor, or the part of all experts; None if it does not fit."""
    shape = tuple(catalog.about(name).shape)
    if layout.part is not None:
        axes = 2 if target.endswith(".bias") else 3
        rows = shape[-1 if layout.transposed else -2] if len(shape) == axes else 1
        if rows % layout.part[1] or shape[0] > MAX_EXPERTS:
            raise error_about(FormatError, f"{list(shape)} does not hold gate and up of experts", tensor=name)
        rows //= layout.part[1]
        view = _rows(layout, rows)
        moves = tuple(Move(name, view(item), TensorView(item)) for item in range(shape[0]))
        return TensorRecipe((shape[0], rows, *(shape[1 : axes - 1] if layout.transposed else shape[2:axes])), moves)
    if layout.transposed:
        if len(shape) != 3 or shape[0] > MAX_EXPERTS:
            return None
        moves = tuple(Move(name, TensorView(k, transposed=True), TensorView(k)) for k in range(shape[0]))
        return TensorRecipe((shape[0], shape[2], shape[1]), moves)
    heads = config.size(*layout.heads) if layout.heads else 0
    if heads and (not shape or shape[0] % (2 * heads)):
        raise error_about(FormatError, f"{list(shape)} does not have {heads} heads", tensor=name)
    if layout.row and shape not in ((width := config.size("embedding_length"),), (1, width)):
        raise error_about(FormatError, f"must have the shape [1, {width}], got {list(shape)}", tensor=name)
    return TensorRecipe(shape, (Move(name),), heads, shift=layout.add)


def _stack(catalog: Catalog, config: ModelConfig, target: str, sources: Mapping[int, str]) -> TensorRecipe:
    count = config.size("expert_count")
    missing = next((k for k in range(count) if k not in sources), None)
    shapes = {tuple(catalog.about(name).shape) for name in sources.values()}
    if missing is not None or len(sources) != count:
        fault = f"expert {missing} is missing" if missing is not None else f"it has {len(sources)} experts"
        raise error_about(FormatError, f"needs {count} experts, but {fault}", path=catalog.title, tensor=target)
    if len(shapes) > 1:
        text = "is a stack of experts, but these have different shapes"
        raise error_about(FormatError, text, path=catalog.title, tensor=target)
    return TensorRecipe((count, *shapes.pop()), tuple(Move(sources[k], written=TensorView(k)) for k in range(count)))


def published_recipes(catalog: Catalog, form: GgufForm, experts: str) -> dict[str, TensorRecipe]:
    """Return the recipes of a model of transformers, in the order of the file."""
    recipes: dict[str, TensorRecipe] = {}
    unknown = []
    for name in catalog:
        if name in _SETTINGS:
            continue
        pattern, numbers = without_numbers(name)
        sources = [*form.layouts.get(pattern, {}).items()]
        if not sources:
            unknown.append(name)
            continue
        place, layout = sources[-1 if experts == FUSED else 0]  # of the published tensors that llama.cpp joins
        full, shape = place.replace(PLACE, numbers[0], 1) if numbers else place, tuple(catalog.about(name).shape)
        axes = 2 if name.endswith(".bias") else 3
        if "_exps." in name and (len(shape) != axes or not 0 < shape[0] <= MAX_EXPERTS):
            raise error_about(FormatError, f"{list(shape)} does not hold experts", path=catalog.title, tensor=name)
        if layout.stack:
            for k in range(shape[0]):
                recipes[full.replace(PLACE, str(k))] = TensorRecipe(shape[1:], (Move(name, TensorView(k)),))
        elif layout.part is not None:
            parts = {other.replace(PLACE, numbers[0]): layout for other, layout in form.targets[place]}
            recipes[full] = _whole(catalog, parts, layout)
        elif layout.transposed:
            moves = tuple(Move(name, TensorView(k), TensorView(k, transposed=True)) for k in range(shape[0]))
            recipes[full] = TensorRecipe((shape[0], shape[2], shape[1]), moves)
        elif layout.row and len(shape) == 1:
            recipes[full] = TensorRecipe((1, *shape), (Move(name, written=TensorView(0)),))
        else:
            keys = [f"{form.architecture}.{key}" for key in layout.heads]
            counts = (count_at(catalog, key) for key in keys)
            heads = next((count for count in counts if count is not None), None)
            if keys and not heads:
                raise FormatError(f"key {keys[-1]} must be a positive integer, got {heads}", catalog.title)
            if heads and (not shape or shape[0] % (2 * heads)):
                text = f"{list(shape)} does not have {heads} heads"
                raise error_about(FormatError, text, path=catalog.title, tensor=name)
            recipes[full] = TensorRecipe(shape, (Move(name),), heads or 0, inverse=True, shift=-layout.add)
    _refuse(unknown, catalog.title, "transformers")
    return recipes


def _whole(catalog: Catalog, parts: Mapping[str, GgufLayout], layout: GgufLayout) -> TensorRecipe:
    """Return gate and up of all experts as a single tensor."""
    shapes = {name: tuple(catalog.about(name).shape) if name in catalog else None for name in parts}
    first, shape = next(iter(shapes.items()))
    if shape is None:
        raise error_about(FormatError, "is missing", path=catalog.title, tensor=first)
    other = next((name for name in shapes if shapes[name] != shape), None)
    if other is not None:
        text = f"is missing or differs in shape from {show(first)}"
        raise error_about(FormatError, text, path=catalog.title, tensor=other)
    views = {name: _rows(part, shape[1]) for name, part in parts.items()}
    moves = tuple(Move(name, TensorView(k), view(k)) for k in range(shape[0]) for name, view in views.items())
    rows = shape[1] * len(parts)
    return TensorRecipe((shape[0], *shape[2:], rows) if layout.transposed else (shape[0], rows, *shape[2:]), moves)


def _rows(layout: GgufLayout, rows: int) -> Callable[[int], TensorView]:
    """Return which rows of an expert a part of so many rows is."""
    part, parts = layout.part or (0, 1)
    chosen = slice(part, None, parts) if layout.interleaved else slice(part * rows, (part + 1) * rows)
    return lambda item: TensorView(item, chosen, layout.transposed)


def _refuse(unknown: Sequence[str], title: str, holder: str) -> None:
    if unknown:
        text = f"{title}: {_some_of(unknown)}: {holder} has no such tensor; raw=True writes the tensors as they are"
        raise UnsupportedError(text, tensor=unknown[0])


def _some_of(names: Sequence[str]) -> str:
    """Return the first names, and how many follow."""
    more = f" and {plural(len(names) - _MOST_SHOWN, 'more tensor')}" if names[_MOST_SHOWN:] else ""
    return f"{', '.join(map(show, names[:_MOST_SHOWN]))}{more}"


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[Any, Any], tokens: int, title: str, form: GgufForm
) -> None:
    """Compare the tensors of a file with those that llama.cpp expects."""
    try:
        expected = form.schema.expand(form.sizes(metadata, shapes, tokens), shapes.keys())
    except ValueError as error:
        raise FormatError(f"sizes of the model: {error}", title) from None
    missing = [name for name, tensor in expected.items() if tensor.required and name not in shapes]
    if missing:
        raise FormatError(f"tensors are missing: llama.cpp needs {_some_of(missing)}", title, tensor=missing[0])
    for name, shape in shapes.items():
        if name not in expected:
            raise UnsupportedError(f"{title}: llama.cpp's {form.architecture} has no tensor {show(name)}", tensor=name)
        required_shape = expected[name].shape
        if required_shape is None:
            continue
        pairs = zip(shape, required_shape, strict=False)
        if len(shape) != len(required_shape) or any(size not in (None, own) for own, size in pairs):
            text = f"has the shape {list(shape)}, but the sizes of the model need {list(required_shape)}"
            raise error_about(FormatError, text, path=title, tensor=name)
