"""Bring two checkpoints into one form: the names and layouts that the family's file says, both ways.

The model of transformers is laid out as the conversion lays it out, without writing it, because the values of the other
form follow from those of transformers, rounded once; the way back would round them again. Names stay the published
ones, unless several published tensors become one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate, product
from typing import Any, NamedTuple, TypeAlias

from ..conversion.catalog import Catalog, RestructuredCatalog
from ..conversion.forms import laid_out, like
from ..conversion.llama_cpp.gguf_models import form_between, from_llama_cpp
from ..conversion.llama_cpp.settings import ROPE_TENSORS, rotation_factors
from ..conversion.recipes import Move, TensorRecipe, TensorView
from ..conversion.rules import is_of_mlx, schema_of, tied_heads
from ..core import dtypes
from ..models.family import gguf_form_of, without_numbers
from ..models.module_names import stored_names
from ..models.renamed import Joined, ModelNames, Place, Stacked, Turned, Unmapped, has_rules

_F32 = dtypes.BY_CODE["F32"]
_ROTATIONS = "factors of rotations, which follow from the config"


# Numbers of stored tensors by their fate, of each side.
Accounts: TypeAlias = tuple[Mapping[str, int], Mapping[str, int]]


class Forms(NamedTuple):
    """Two checkpoints with equal names for equal tensors, and the fate of the other tensors."""

    catalogs: tuple[Catalog, Catalog]
    form: str = ""  # the common form; "" for the names as stored
    left_out: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})  # of each side: the reason by stored name
    tied: Mapping[str, str] = {}  # heads that a side lacks, with the embedding in their place

    def stored(self, side: int, name: str) -> tuple[Catalog, list[str]]:
        """Return the stored tensors that a tensor is made of, or the tensor itself if it is made of the config."""
        catalog, names = self.catalogs[side], [name]
        while isinstance(catalog, RestructuredCatalog):
            sources = [source for name in names for source in catalog.sources_of(name)]
            if not sources:
                break
            catalog, names = catalog.base, sources
        return catalog, names

    def account(self, side: int, stored: Catalog, fates: Mapping[str, str]) -> Mapping[str, int]:
        """Count the stored tensors of a side by fate, given the fate of each tensor that was brought into form."""
        names: dict[str, list[str]] = {}
        for name in self.catalogs[side]:
            for source in self.stored(side, name)[1]:
                names.setdefault(self.tied.get(source, source), []).append(name)

        def fate_of(name: str) -> str:
            own = {fates[each] for each in names.get(name, ()) if each in fates}
            return "left out" if name in self.left_out[side] else min(own, default="not selected")

        return Counter(map(fate_of, stored))

    def quantized(self, name: str) -> bool:
        """True if a side has codes."""
        places = (self.stored(side, name) for side in (0, 1))
        return any(catalog.about(names[0]).quantized for catalog, names in places)

    def computed(self, side: int, name: str) -> bool:
        """True if values were computed for the common form, and so are not rounded as the tensor is stored."""
        catalog = self.catalogs[side]
        if not isinstance(catalog, RestructuredCatalog):
            return catalog.made(name) is not None
        sources = catalog.sources_of(name)
        return catalog.recipes[name].computes or any(catalog.base.made(source) is not None for source in sources)


def common_form(a: Catalog, b: Catalog) -> Forms:
    """Return two checkpoints in one form; as they are if names and programs agree, or no family is known."""
    if len(a) == len(b) and set(a) == set(b) and is_of_mlx(a) == is_of_mlx(b):
        return Forms((a, b))
    files = [_is_of_llama_cpp(catalog) for catalog in (a, b)]
    if files[0] != files[1] and not any(name in b for name in a):
        forms = _with_file(b, a) if files[0] else _with_file(a, b)
        return forms._replace(catalogs=forms.catalogs[::-1], left_out=forms.left_out[::-1]) if files[0] else forms
    catalogs, form = (a, b), ""
    if not any(catalog.makes or is_of_mlx(catalog) for catalog in (a, b)):
        catalogs, form = _with_common_names(a, b)
    if not form:
        catalogs = like(a, b), like(b, a)
        made_like = next((other for own, other in zip(catalogs, (b, a), strict=True) if own.makes), None)
        form = "" if made_like is None else f"experts as in {made_like.title}"
        form = "layout of mlx-lm" if made_like is not None and is_of_mlx(made_like) else form
    catalogs, tied = _with_heads(*catalogs)
    return Forms(catalogs, form, tied=tied)


def in_memory(a: Catalog, b: Catalog) -> tuple[Catalog, Catalog]:
    """Return two checkpoints under the names of transformers in memory, which PEFT needs."""
    a, b = (from_llama_cpp(catalog) if _is_of_llama_cpp(catalog) else catalog for catalog in (a, b))
    forms, config = common_form(a, b), a.config or b.config
    if forms.form or not has_rules(config):
        return forms.catalogs
    first, second = (
        _renamed(catalog, ModelNames(config, stored_names(catalog, catalog.title)).places) for catalog in forms.catalogs
    )
    return first, second


def _is_of_llama_cpp(catalog: Catalog) -> bool:
    form = gguf_form_of(catalog.metadata) if catalog.format == "gguf" else None
    return form is not None and any(without_numbers(name)[0] in form.layouts for name in catalog)


def _with_file(model: Catalog, file: Catalog) -> Forms:
    """Return a model of transformers in the layout of a file of llama.cpp, and the file under published names."""
    model, config, form = form_between(model, file)
    for catalog in (model, file):
        catalog.refuse_codes(catalog, "diff")
    laid = laid_out(model, config, form)
    recipes = laid.recipes
    factors = rotation_factors(config, form)
    recipes |= {name: TensorRecipe(x.shape, (), constant=x) for name, x in factors.items() if name in file}
    uses = Counter(source for recipe in recipes.values() for source in set(recipe.sources))
    ours: dict[str, TensorRecipe] = {}
    theirs: dict[str, TensorRecipe] = {}
    for target, recipe in recipes.items():
        items = recipe.items
        sources = [[*dict.fromkeys(item.sources)] for item in items]
        own = all(len(each) == 1 and uses[each[0]] == 1 for each in sources)
        stack = own and len(items) > 1 and target in file and file.about(target).shape == recipe.shape
        if stack:
            for number, (item, (name,)) in enumerate(zip(items, sources, strict=True)):
                ours[name] = item
                theirs[name] = TensorRecipe(item.shape, (Move(target, TensorView(number)),))
            continue
        name = sources[0][0] if own and len(items) == 1 else target
        ours[name] = recipe
        if target in file:
            theirs[name] = file.recipe(target)
    theirs |= {target: file.recipe(target) for target in file if target not in recipes}
    head, tied = stored_names(model, model.title).get(form.head), {}
    embedding = next(iter(recipes["token_embd.weight"].sources), "") if "token_embd.weight" in recipes else ""
    if embedding in theirs and head is not None and head not in theirs and head not in laid.unknown:
        theirs[head] = theirs[embedding]  # the file has none of its own
        ours.setdefault(head, model.recipe(head))
        tied[head] = embedding
    elif embedding in ours and head is None and "output.weight" in theirs:
        ours["output.weight"] = ours[embedding]
        tied["output.weight"] = embedding
    left_out = {name: why for name, why in laid.left_out.items() if name not in ours}
    for name in laid.unknown:
        ours[name] = model.recipe(name)
    without = {name: _ROTATIONS for name in ROPE_TENSORS if name in theirs and name not in recipes}
    for name in without:
        del theirs[name]
    sides = RestructuredCatalog(model, ours, restored=_F32), RestructuredCatalog(file, theirs, restored=_F32)
    return Forms(sides, f"layout of llama.cpp ({form.title})", (left_out, without), tied)


def _with_common_names(a: Catalog, b: Catalog) -> tuple[tuple[Catalog, Catalog], str]:
    """Return checkpoints under the names of transformers, or without wrappers of a framework, if names then agree."""
    common, config = sum(name in b for name in a), a.config or b.config
    renames = has_rules(config)
    if a.in_memory or b.in_memory or (common and not renames):
        return (a, b), ""
    stored = [stored_names(catalog, catalog.title) for catalog in (a, b)]
    known = [ModelNames(config, names) for names in stored]
    # Names in memory can stay: rules are for published names.
    choices = product(*[(dict(each.places), dict[str, Any](each.stored)) for each in known])
    sides = max(choices, key=lambda pair: len(pair[0].keys() & pair[1].keys()))
    for own, other, each in zip(sides, reversed(sides), reversed(known), strict=True):
        for stack, experts in each.stacks.items():
            if stack in own and stack not in other and experts.keys() <= other.keys():
                place = own.pop(stack)
                own.update((name, expert._replace(stored=place)) for name, expert in experts.items())
    if len(sides[0].keys() & sides[1].keys()) <= common:
        return (a, b), ""
    first, second = (_renamed(catalog, places) for catalog, places in zip((a, b), sides, strict=True))
    return (first, second), "names of transformers" if renames else "names without wrappers"


def _renamed(catalog: Catalog, places: Mapping[str, Any]) -> Catalog:
    if all(name == place for name, place in places.items()):
        return catalog
    recipes = {name: recipe for name, place in places.items() if (recipe := _placed(catalog, place)) is not None}
    used = {source for recipe in recipes.values() for source in recipe.sources}
    unplaced = {name: catalog.recipe(name) for name in catalog if name not in used}
    if unplaced.keys() & recipes.keys():  # every tensor must stay
        return catalog
    recipes |= unplaced
    return RestructuredCatalog(catalog, recipes)


def _placed(catalog: Catalog, place: Place | Stacked) -> TensorRecipe | None:
    """Return the recipe of a tensor of the model; None if it is computed, or if shapes do not allow it."""
    if isinstance(place, str):
        return catalog.recipe(place)
    if isinstance(place, Unmapped):
        return None
    stored = place.stored if isinstance(place, Joined) else (place.stored,)
    shapes = [catalog.about(name).shape for name in stored]
    (rows, *columns), *_ = (shape[isinstance(place, Stacked) :] or (0,) for shape in shapes)
    if isinstance(place, Joined):
        ends = [*accumulate(next(iter(shape), 0) for shape in shapes)]
        parts = [slice(end - shape[0], end) for shape, end in zip(shapes, ends, strict=True) if shape]
        moves = [Move(name, written=TensorView(rows=part)) for name, part in zip(stored, parts, strict=False)]
        fits = {shape[1:] for shape in shapes} == {tuple(columns)} and len(parts) == len(shapes)
        return TensorRecipe((ends[-1], *columns), tuple(moves)) if fits else None
    if isinstance(place, Turned):
        if len(columns) != 1:
            return None
        return TensorRecipe((columns[0], rows), (Move(place.stored, TensorView(transposed=True)),))
    if rows % place.parts or (isinstance(place, Stacked) and place.expert >= next(iter(shapes[0]), 0)):
        return None
    size, item = rows // place.parts, place.expert if isinstance(place, Stacked) else None
    part = slice(place.number * size, (place.number + 1) * size)
    return TensorRecipe((size, *columns), (Move(place.stored, TensorView(item, part)),))


def _with_heads(a: Catalog, b: Catalog) -> tuple[tuple[Catalog, Catalog], dict[str, str]]:
    """Give a side without a head that its config ties to the embedding this head, if the other side has one."""
    tied: dict[str, str] = {}
    result = []
    for own, other in ((a, b), (b, a)):
        known = {} if own.config is None or own.makes or own.in_memory else tied_heads(own, schema_of(own))
        heads = {head: embedding for head, embedding in known.items() if head in other and head not in own}
        tied |= heads
        result.append(own.with_aliases(heads) if heads else own)
    return (result[0], result[1]), tied
