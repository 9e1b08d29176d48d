"""The layout of a model's tensors in the form of another program, both ways, by the table of the model's family.

The programs are llama.cpp, mlx-lm and the engines that load each expert by itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..core.names import grouped
from ..core.text import error_about, plural, show, warning
from ..errors import FormatError, UnsupportedError
from ..models.choosing import TIE
from ..models.family import (
    PLACE,
    GgufForm,
    GgufLayout,
    MlxForm,
    MmprojForm,
    changed_by_mlx,
    engine_model_types,
    gguf_form,
    is_of_experts,
    mlx_form,
    with_numbers,
    with_schema,
    without_numbers,
)
from ..models.module_names import stored_names
from ..models.schema import MAX_EXPERTS, NUMBER, PLACEHOLDER, PREFIX, language_of, listed_in
from ..quant.families import Preset, presets
from ..quant.mlx import without_older_keys
from ..quant.quantization import without_quantization
from .catalog import Catalog, RestructuredCatalog
from .llama_cpp.settings import ROPE_TENSORS, ModelConfig
from .recipes import Arrangement, Move, TensorRecipe, TensorView
from .rules import is_of_mlx, unlike_mlx

# How a model stores experts: one by one, or all in one tensor.
SINGLE, FUSED = "single", "fused"
# Our metadata key of a file whose names have no prefix in transformers.
NAME_PREFIX = "safeload.source.prefix"

# Suffixes of buffers that llama.cpp computes itself.
_BUFFERS = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")
# What every family leaves out, with the reason.
_LEFT_OUT = {
    f"*.{name}": "scales of the KV cache"
    for name in ("k_scale", "v_scale", "kv_scale", "k_cache_scale", "v_cache_scale", "kv_cache_scaling_factor")
}
# Parts of names in models of text and images or sound, which llama.cpp's converter drops from the language model too.
_LANGUAGE = "language_model."
_TOWERS = (
    *("mlp", "vit.", "vpm.", "siglip2.", "conformer.", "merger.", "resampler.", "sound_encoder.", "sound_projection."),
    "speech_embeddings.",
)
_TOWER_PARTS = (
    *("visual.", "vision.", "audio.", "talker.", "vision_", "audio_", "token2wav.", "code2wav.", "projector."),
    *("pre_mm_projector_norm", "image_newline", "view_seperator", "patch_embed", "patch_merger.", "patch_merge_mlp."),
    "model.connector.",
)
# Keys of their configs, which older versions of transformers have beside the keys of the language model.
_TOWER_CONFIGS = ("vision_config", "audio_config")
_MOST_SHOWN = 3
# Reasons that no warning tells, because nothing is lost.
_BUFFER, _TIED = "a buffer that {} computes", "tied to the embedding"
_UNSAID = ("a buffer that ", _TIED)


def has_towers(config: Mapping[str, Any]) -> bool:
    """Return True for a model of text and images or sound."""
    return language_of(config) is not config or any(key in config for key in _TOWER_CONFIGS)


def text_form_of(
    catalog: Catalog, form: GgufForm, name: str | None, model_type: Any, end: str = "ForCausalLM"
) -> GgufForm:
    """Return the family of a language model without its towers: a class with a head and the given end."""
    form = (gguf_form({"model_type": model_type})[1] or form).of_text
    if not form.class_name.endswith(end):
        text = f"the file has the language model of {name}, which has no class of its own in transformers"
        raise UnsupportedError(f"{catalog.title}: {text}; raw=True writes the tensors as they are")
    return form


def config_of_text(catalog: Catalog, form: GgufForm, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the language model of a model of text and images."""
    inner, name = language_of(config), next(iter(config["architectures"]), None)
    model_type = None if inner is config else inner.get("model_type")
    text_form = text_form_of(catalog, form, name, model_type)
    if inner is config and form.of_text is form:
        return {**config}
    plain = {k: v for k, v in inner.items() if not isinstance(v, Mapping) or "rope" in k or k == "per_layer_config"}
    plain = with_rotations_of(text_form, plain, form)
    outer = config.get(TIE)  # which counts for the whole model
    tied = {TIE: outer} if isinstance(outer, bool) else {}
    return {**plain, **tied, "architectures": [text_form.class_name], "model_type": text_form.model_type}


def with_rotations_of(text_form: GgufForm, config: Mapping[str, Any], form: GgufForm) -> dict[str, Any]:
    """Return a config without the rope parameters for images, which the family of the language model does not have."""
    lost = {*form.rope.parameters} - {*text_form.rope.parameters}
    result = {**config}
    for key in ("rope_parameters", "rope_scaling") if lost else ():
        if isinstance(rope := config.get(key), Mapping):
            kept = {name: value for name, value in rope.items() if name not in lost}
            result[key] = {name: "default" if value == "mrope" else value for name, value in kept.items()}
    return result


class LaidOut(NamedTuple):
    """A model in the layout of another program."""

    recipes: dict[str, TensorRecipe]  # in the order of their first source
    experts: str | None  # how the model stores them
    left_out: dict[str, str]  # why the program has no such tensor, by stored name
    unknown: list[str]  # stored names that the family does not know

    def tell(self, title: str, holder: str, *, warns: bool = True) -> None:
        """Warn of tensors that are left out, and refuse those that the program does not have."""
        for reason, names in grouped(self.left_out, self.left_out.__getitem__).items() if warns else ():
            if not reason.startswith(_UNSAID):
                warning("%s: left out (%s): %s", title, reason, some_of(names))
        refuse_unknown(self.unknown, title, holder)


def laid_out(catalog: Catalog, config: ModelConfig, form: GgufForm) -> LaidOut:
    """Lay out the tensors of a model in a form, and list the tensors that the form leaves out or does not place."""
    stored_by_name, left_out = _own_names(catalog, config, form)
    if isinstance(form, MmprojForm):
        recipes, _, _, unplaced = _placed(catalog, config, form, stored_by_name)
        return LaidOut(recipes, None, left_out, [stored_by_name[name] for name in unplaced])
    outer = (catalog.config or {}).get("tie_word_embeddings")
    tied = outer if isinstance(outer, bool) else config.values.get("tie_word_embeddings", form.usually_tied)
    if form.tied and tied is not True and form.head in stored_by_name:
        raise config.unsupported(f"tie_word_embeddings is false, but {form.engine} has no separate head here")
    buffer = _BUFFER.format(form.engine)
    kept: dict[str, str] = {}
    for name, stored in stored_by_name.items():
        if name.endswith(_BUFFERS) or (name == form.head and (form.tied or (tied is True and form.leaves_out))):
            left_out[stored] = _TIED if name == form.head else buffer
        else:
            kept[name] = stored
    recipes, experts, fused, unplaced = _placed(catalog, config, form, kept)
    left_out |= {stored_by_name[name]: buffer for name in unplaced if form.published.role(name) == "buffer"}
    unknown = [stored_by_name[name] for name in unplaced if stored_by_name[name] not in left_out]
    if form.complete:
        optional = {source for entry in form.schema.entries if entry.optional for source in form.layouts[entry.name]}
        for name in config.expected(form.published, stored_by_name):
            if name != form.head and name not in stored_by_name and without_numbers(name)[0] in optional:
                raise error_about(FormatError, "is missing", path=catalog.title, tensor=name)
    # A model without a head has names without a prefix, even if its config has the class of a model with a head.
    headless = config.headless or (form.prefix != "" and form.embedding in catalog)
    if not (tied is True or form.leaves_out or form.head in stored_by_name or form.tied or headless):
        text = "is missing, and tie_word_embeddings is not true"
        raise error_about(FormatError, text, path=catalog.title, tensor=form.head)
    for target, members in experts.items():
        items = next(iter(form.layouts[without_numbers(target)[0]].values())).items
        count = config.size("expert_count") if items is None else config.integer(items)
        recipes[target] = stack_of(catalog, target, count, members)
    # The layers for multi-token prediction can have experts in another form.
    forms: dict[bool, str] = {}
    for target, kind in (*((each, SINGLE) for each in experts), *((each, FUSED) for each in sorted(fused))):
        if forms.setdefault(_is_added(target, config), kind) != kind:
            raise FormatError("some layers have fused experts and some do not", catalog.title)
    kinds = " ".join(dict.fromkeys(forms[key] for key in sorted(forms))) or None
    return LaidOut(recipes, kinds, left_out, unknown)


def _placed(
    catalog: Catalog, config: ModelConfig, form: GgufForm, stored_by_name: Mapping[str, str]
) -> tuple[dict[str, TensorRecipe], dict[str, dict[int, TensorRecipe]], set[str], list[str]]:
    """Return recipes of tensors, the experts of each stack, the fused stacks, and the names without a place."""
    recipes: dict[str, TensorRecipe] = {}
    experts: dict[str, dict[int, TensorRecipe]] = {}
    unplaced, fused = [], set()
    for name, stored in stored_by_name.items():
        pattern, numbers = without_numbers(name)
        placed = False
        for place, layout in form.targets.get(name) or form.targets.get(pattern) or ():
            layer = int(numbers[0]) if numbers else None
            if layout.when is not None and not config.integer(layout.when, layer):
                placed |= form.leaves_out
                continue
            own = numbers if layout.number is None else [str(config.integer(layout.number, layer)), *numbers[1:]]
            target = with_numbers(place, own)
            if layout.stack and int(numbers[1]) < MAX_EXPERTS:
                recipe = catalog.recipe(stored)
                experts.setdefault(target, {})[int(numbers[1])] = recipe
                recipes.setdefault(target, recipe)  # in its place until all experts are found
                placed = True
            elif not layout.stack and (whole := _recipe(catalog, config, layout, stored, target)) is not None:
                if target in recipes:
                    raise error_about(FormatError, f"is a second {target}", path=catalog.title, tensor=stored)
                recipes[target] = whole
                fused |= {target} if layout.part is not None else set()
                placed = True
        if not placed:
            unplaced.append(name)
    return recipes, experts, fused, unplaced


def _is_added(name: str, config: ModelConfig) -> bool:
    """Return True for a tensor of a layer beyond the number in the config."""
    return any(int(number) >= config.size("block_count") for number in without_numbers(name)[1][:1])


def counted(catalog: Catalog, form: GgufForm) -> dict[str, int]:
    """Return the numbers of layers that follow from published names."""
    counts = dict.fromkeys(form.counted, 0)
    for name in stored_names(catalog, catalog.title) if counts else ():
        pattern, numbers = without_numbers(name.replace(_LANGUAGE, ""))
        for key, begin in form.counted.items():
            if pattern.startswith(begin):
                counts[key] = max(counts[key], int(numbers[0]) + 1)
    return counts


def _own_names(catalog: Catalog, config: ModelConfig, form: GgufForm) -> tuple[dict[str, str], dict[str, str]]:
    """Return the stored names of a form's tensors by their names in the table, and why the rest is left out."""
    towers = form.towers if isinstance(form, MmprojForm) else None
    multimodal = towers is None and has_towers(catalog.config or {})
    result: dict[str, str] = {}
    left_out: dict[str, str] = {}
    reasons = {**form.left_out, **_LEFT_OUT}
    layers = None if form.kept_layers is None else config.integer(form.kept_layers)
    for name, stored in stored_names(catalog, catalog.title).items():
        bare = name if towers is not None else name.replace(_LANGUAGE, "")
        if multimodal and (bare.startswith(_TOWERS) or any(part in bare for part in _TOWER_PARTS)):
            left_out[stored] = "language model only"
            continue
        bare = _under_usual_name(bare, config, form)
        pattern, numbers = without_numbers(bare)
        reason = next((why for text, why in reasons.items() if fnmatchcase(bare, text)), None)
        if layers is not None and numbers and int(numbers[0]) >= layers:
            reason = f"{form.engine} has {layers} layers"
        if reason is None and towers is not None and not (bare.startswith(towers) or pattern in form.targets):
            reason = "vision part only"
        if reason is not None:
            left_out[stored] = reason
            continue
        published = form.published_name(bare)
        if published in result:
            text = f"tensors {show(result[published])} and {show(stored)} are both {show(published)}"
            raise FormatError(text, catalog.title, tensor=stored)
        result[published] = stored
    return result, left_out


def _under_usual_name(name: str, config: ModelConfig, form: GgufForm) -> str:
    """Return a published name with the beginning that the table has."""
    for begin, (place, layer) in form.renames.items():
        match = re.match(re.escape(begin).replace(re.escape(PLACE), f"({NUMBER})"), name)
        if match is not None:
            own = int(match[1]) if PLACE in begin else 0
            number = config.integer(layer) + own if PLACE in place else 0
            return place.replace(PLACE, str(number)) + name[match.end() :]
    return name


def _recipe(catalog: Catalog, config: ModelConfig, layout: GgufLayout, name: str, target: str) -> TensorRecipe | None:
    """Return how a published tensor becomes a tensor, or the part of all experts; None if it does not fit."""
    shape = catalog.about(name).shape
    if layout.inputs is not None and shape[-1:] == ((width := config.integer(layout.inputs)),):
        if shape[-2:-1] == (width,):
            raise error_about(FormatError, f"{list(shape)} does not show whether it is transposed", tensor=name)
        layout = layout._replace(transposed=False)
    if layout.of_experts(target):
        axes, (_, parts) = 2 if target.endswith(".bias") else 3, layout.part or (0, 1)
        if layout.part is None and (len(shape) != axes or shape[0] > MAX_EXPERTS):
            return None
        rows = shape[-1 if layout.transposed else -2] if len(shape) == axes else 1
        if rows % parts or shape[0] > MAX_EXPERTS:
            raise error_about(FormatError, f"{list(shape)} does not hold gate and up of experts", tensor=name)
        moves = tuple(Move(name, _part(layout, rows // parts, k), TensorView(k)) for k in range(shape[0]))
        columns = shape[1 : axes - 1] if layout.transposed else shape[2:axes]
        return TensorRecipe((shape[0], rows // parts, *columns), moves)
    _check_row(config, layout, shape, name)
    arrangement, inner = _arrangement(config, layout, shape, name)
    return TensorRecipe(inner, (Move(name, arrangement=arrangement),))


def _check_row(config: ModelConfig, layout: GgufLayout, shape: tuple[int, ...], name: str) -> None:
    """Refuse a tensor that must be a row, which files have with an axis more or less."""
    if layout.row and shape not in ((width := config.size("embedding_length"),), (1, width)):
        raise error_about(FormatError, f"must have the shape [1, {width}], got {list(shape)}", tensor=name)


def _arrangement(
    config: ModelConfig, layout: GgufLayout, shape: tuple[int, ...], name: str
) -> tuple[Arrangement | None, tuple[int, ...]]:
    """Return how a form arranges a published tensor, None if it keeps their order, and the shape of the result."""
    if layout.flat:
        shape = (*shape[:1], math.prod(shape[1:]))
    heads = config.size(*layout.heads) if layout.heads else 0
    if heads and (not shape or shape[0] % (2 * heads)):
        raise error_about(FormatError, f"{list(shape)} does not have {heads} heads", tensor=name)
    rows: list[Mapping[str, Any]] = [*layout.rows]
    if heads:
        rows.append({"split": (str(heads), "2", "-1"), "order": (0, 2, 1)})
    if len(shape) < (2 if layout.columns or layout.transposed else 1 if rows else 0):
        raise error_about(FormatError, f"has the shape {list(shape)}, expected more axes", tensor=name)
    row_places = config.places(rows, shape[0], name) if rows else None
    if row_places is not None and np.array_equal(row_places, np.arange(shape[0])):
        row_places = None  # all rows in their order
    column_places = config.places(layout.columns, shape[1], name) if layout.columns else None
    counts = [len(places) for places in (row_places, column_places) if places is not None]
    inner = (
        (*counts, *shape[len(counts) :]) if row_places is not None else (*shape[:1], *counts, *shape[1 + len(counts) :])
    )
    items = None
    if layout.items is not None:
        count = config.integer(layout.items)
        if not 0 < count <= MAX_EXPERTS or not inner or inner[0] % count:
            raise error_about(FormatError, f"{list(shape)} does not hold {count} matrices", tensor=name)
        items = inner = (count, inner[0] // count, *inner[1:])
    if layout.transposed:
        inner = (*inner[:-2], inner[-1], inner[-2])
    if layout.shape is not None:
        final = config.shape(layout.shape, math.prod(inner))
        if math.prod(final) != math.prod(inner):
            raise error_about(FormatError, f"{list(shape)} cannot be {list(final)}", tensor=name)
        inner = final
    factors = config.factors(layout.times, inner[0]) if layout.times and inner else ()
    flat = layout.flat and column_places is not None
    computed = factors, layout.function, layout.add
    arrangement = Arrangement(flat, row_places, column_places, items, layout.transposed, *computed)
    ordered = row_places is None and column_places is None and not (layout.transposed or arrangement.computes)
    return None if ordered else arrangement, inner


def published_recipes(catalog: Catalog, config: ModelConfig, form: GgufForm, experts: str) -> dict[str, TensorRecipe]:
    """Return the recipes of a model of transformers, in the order of the file."""
    names = [name for name in catalog if name not in ROPE_TENSORS]
    refuse_unknown(
        [name for name in names if not form.layouts.get(without_numbers(name)[0])], catalog.title, "transformers"
    )
    recipes: dict[str, TensorRecipe] = {}
    for name in names:
        pattern, numbers = without_numbers(name)
        # Of the published tensors that llama.cpp joins, the last has fused experts.
        kind = experts.split()[-1 if " " in experts and _is_added(name, config) else 0]
        sources = [*form.layouts[pattern].items()]
        if len(form.sources[pattern]) > 1:  # the config can exclude some
            sources = [source for source in sources if config.has(form.published, source[0], numbers)] or sources
        place, layout = sources[-1 if kind == FUSED else 0]
        full, shape = with_numbers(place, numbers), catalog.about(name).shape
        axes = 1 if name.endswith(".scale") else 2 if name.endswith(".bias") else 3
        if is_of_experts(name) and (len(shape) != axes or not 0 < shape[0] <= MAX_EXPERTS):
            raise error_about(FormatError, f"{list(shape)} does not hold experts", path=catalog.title, tensor=name)
        if layout.stack and not (shape and shape[0] <= MAX_EXPERTS):
            raise error_about(FormatError, f"{list(shape)} does not hold a stack", path=catalog.title, tensor=name)
        _check_row(config, layout, shape, name)
        if numbers:
            full = _renamed(full, config, form)
        if layout.stack:
            for k in range(shape[0]):
                recipes[full.replace(PLACE, str(k))] = TensorRecipe(shape[1:], (Move(name, TensorView(k)),))
        elif layout.of_experts(name):
            parts = {other.replace(PLACE, numbers[0]): layout for other, layout in form.targets[place]}
            recipes[full] = _whole(catalog, parts, layout)
        elif layout.row and len(shape) == 1:
            recipes[full] = TensorRecipe((1, *shape), (Move(name, written=TensorView(0)),))
        elif full not in recipes:
            targets = ((with_numbers(other, numbers), part) for other, part in form.targets[place])
            joined = [(target, part) for target, part in targets if target in catalog]
            recipes[full] = _joined(catalog, config, form, full, joined)
    prefix = form.prefix if NAME_PREFIX in catalog.metadata else ""
    return {name.removeprefix(prefix): recipe for name, recipe in recipes.items()}


def refuse_missing(catalog: Catalog, recipes: Mapping[str, TensorRecipe], config: ModelConfig, form: GgufForm) -> None:
    """Refuse a file without tensors that transformers would fill with random numbers."""
    absent = (name for name in config.expected(form.published, recipes) if name not in recipes)
    parts = {name: form.parts_of(name) for name in absent if name != form.head or NAME_PREFIX not in catalog.metadata}
    known = ((name, places) for name, places in parts.items() if places or form.leaves_out)
    missing = [name for name, places in known if not any(place in catalog for place in places)]
    if missing:
        text = f"tensors are missing: the config needs {some_of(missing)}"
        raise FormatError(text, catalog.title, tensor=missing[0])


def _renamed(name: str, config: ModelConfig, form: GgufForm) -> str:
    """Return the published name of a tensor in a layer for which `laid_out` takes another name."""
    for begin, (place, layer) in form.renames.items():
        match = re.match(re.escape(place).replace(re.escape(PLACE), f"({NUMBER})"), name)
        if match is None or PLACE not in place or (first := config.integer(layer)) == 0:
            continue
        own = int(match[1]) - first
        if own == 0 or (own > 0 and PLACE in begin):
            return begin.replace(PLACE, str(own)) + name[match.end() :]
    return name


def _joined(
    catalog: Catalog, config: ModelConfig, form: GgufForm, name: str, parts: Sequence[tuple[str, GgufLayout]]
) -> TensorRecipe:
    """Return a published tensor from the tensors that a form makes of it."""
    shapes = [catalog.about(part).shape for part, _ in parts]
    shape = shapes[0]
    if any(layout.rearranges for _, layout in parts):
        shape = config.shape_of(form.published, name)
    moves, values = [], 0
    for (part, layout), stored in zip(parts, shapes, strict=True):
        arrangement, expected = _arrangement(config, layout, shape, part)
        if expected != stored:
            text = f"has the shape {list(stored)}, but {show(name)} needs {list(expected)}"
            raise error_about(FormatError, text, path=catalog.title, tensor=part)
        values += math.prod(stored)
        inverse = None if arrangement is None else arrangement._replace(inverse=True, shift=-arrangement.shift)
        moves.append(Move(part, arrangement=inverse))
    if values != math.prod(shape):
        text = f"needs {math.prod(shape):,} values, but its parts have {values:,}"
        raise error_about(FormatError, text, path=catalog.title, tensor=name)
    return TensorRecipe(shape, tuple(moves))


def _whole(catalog: Catalog, parts: Mapping[str, GgufLayout], layout: GgufLayout) -> TensorRecipe:
    """Return the matrices of all experts as a single tensor: gate and up, or one of them."""
    shapes = {name: catalog.about(name).shape if name in catalog else None for name in parts}
    first, shape = next(iter(shapes.items()))
    if shape is None:
        raise error_about(FormatError, "is missing", path=catalog.title, tensor=first)
    other = next((name for name in shapes if shapes[name] != shape), None)
    if other is not None:
        text = f"is missing or differs in shape from {show(first)}"
        raise error_about(FormatError, text, path=catalog.title, tensor=other)
    items = product(range(shape[0]), parts.items())
    moves = tuple(Move(name, TensorView(k), _part(part, shape[1], k)) for k, (name, part) in items)
    rows = shape[1] * len(parts)
    return TensorRecipe((shape[0], *shape[2:], rows) if layout.transposed else (shape[0], rows, *shape[2:]), moves)


def _part(layout: GgufLayout, rows: int, expert: int) -> TensorView:
    """Return which part of a published expert is stored as a matrix of so many rows."""
    if layout.part is None:
        return TensorView(expert, transposed=layout.transposed)
    part, parts = layout.part
    chosen = slice(part, None, parts) if layout.interleaved else slice(part * rows, (part + 1) * rows)
    return TensorView(expert, chosen, layout.transposed)


def refuse_unknown(unknown: Sequence[str], title: str, holder: str) -> None:
    """Refuse tensors that a form does not have."""
    if unknown:
        advice = "raw=True writes the tensors as they are"
        if holder == MlxForm.engine:
            advice = "leave it out in a conversion before this one, with drop="
        elif holder != "transformers":
            advice = f"drop= leaves tensors out, {advice}"
        text = f"{title}: {some_of(unknown)}: {holder} has no such tensor; {advice}"
        raise UnsupportedError(text, tensor=unknown[0])


def some_of(names: Sequence[str]) -> str:
    """Return the first names, and how many follow."""
    more = f" and {plural(len(names) - _MOST_SHOWN, 'more tensor')}" if names[_MOST_SHOWN:] else ""
    return f"{', '.join(map(show, names[:_MOST_SHOWN]))}{more}"


def stack_of(catalog: Catalog, name: str, count: int, members: Mapping[int, TensorRecipe]) -> TensorRecipe:
    """Return the recipe of a stack of this many experts."""
    missing = next((k for k in range(count) if k not in members), None)
    if missing is not None or len(members) != count:
        fault = f"expert {missing} is missing" if missing is not None else f"it has {len(members)} experts"
        raise error_about(FormatError, f"needs {count} experts, but {fault}", path=catalog.title, tensor=name)
    shapes = {part.shape for part in members.values()}
    if len(shapes) > 1:
        text = "is a stack of experts, but these have different shapes"
        raise error_about(FormatError, text, path=catalog.title, tensor=name)
    moves = (members[k].moves[0]._replace(written=TensorView(k)) for k in range(count))
    return TensorRecipe((count, *shapes.pop()), tuple(moves))


# ---- models as an engine loads them ----

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
        if (separate := experts.get(layers + rest) or experts.get(layers + rest.removesuffix(_WEIGHT))) is not None:
            stacks[name] = [with_numbers(prefix + each, numbers) for each in separate]
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
        raise unlike_mlx(catalog)
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
