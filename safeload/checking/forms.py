"""Bring two checkpoints into one form: the names and layouts that the family's file says, both ways.

The model of transformers is laid out as the conversion lays it out, without writing it, because the values of the other
form follow from those of transformers, rounded once; the way back would round them again. Names stay the published
ones, unless several published tensors become one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from ..conversion.arranging import like
from ..conversion.catalog import Catalog, RestructuredCatalog, TensorDescription
from ..conversion.forms import laid_out
from ..conversion.llama_cpp.gguf_models import form_between
from ..conversion.llama_cpp.settings import ROPE_TENSORS, rotation_factors
from ..conversion.recipes import Move, TensorRecipe, TensorView
from ..conversion.rules import is_of_mlx, schema_of, tied_heads
from ..core import dtypes
from ..core.packing import Packed
from ..models.diffusion import ARCHITECTURE
from ..models.family import gguf_architectures, without_numbers
from ..models.module_names import stored_names

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

    def about(self, side: int, name: str) -> TensorDescription:
        """Describe a tensor as it is stored, also if it was brought into another form."""
        catalog, stored = self._stored(side, name)
        return catalog.about(stored)

    def packed(self, side: int, name: str) -> Packed | None:
        """Return a packed tensor as it is stored."""
        catalog, stored = self._stored(side, name)
        return catalog.packed(stored)

    def calibrated(self, side: int) -> bool:
        """True if a GGUF file says that an importance matrix chose its codes."""
        return "quantize.imatrix.file" in self.catalogs[side].metadata

    def accounts(self, of: tuple[Catalog, Catalog], fates: tuple[Mapping[str, str], Mapping[str, str]]) -> Accounts:
        """Count the stored tensors of each side by fate, given the fate of each tensor that was brought into form."""
        return tuple(Counter(self._fates(side, of[side], fates[side])) for side in (0, 1))  # type: ignore[return-value]

    def _fates(self, side: int, stored: Catalog, fates: Mapping[str, str]) -> Iterator[str]:
        names: dict[str, list[str]] = {}
        for name in self.catalogs[side]:
            for source in self._sources(self.catalogs[side], name):
                names.setdefault(source, []).append(name)
        for name in stored:
            own = {fates[each] for each in names.get(name, ()) if each in fates}
            yield "left out" if name in self.left_out[side] else min(own, default="not selected")

    def _sources(self, catalog: Catalog, name: str) -> list[str]:
        if not isinstance(catalog, RestructuredCatalog):
            return [self.tied.get(name, name)]
        return [stored for source in catalog.sources_of(name) for stored in self._sources(catalog.base, source)]

    def quantized(self, name: str) -> bool:
        """True if a side has codes."""
        return any(self.about(side, name).quantized for side in (0, 1))

    def computed(self, side: int, name: str) -> bool:
        """True if values were computed for the common form, and so are not rounded as the tensor is stored."""
        catalog = self.catalogs[side]
        if not isinstance(catalog, RestructuredCatalog):
            return catalog.made(name) is not None
        sources = catalog.sources_of(name)
        return catalog.recipes[name].computes or any(catalog.base.made(source) is not None for source in sources)

    def _stored(self, side: int, name: str) -> tuple[Catalog, str]:
        catalog = self.catalogs[side]
        while isinstance(catalog, RestructuredCatalog):
            sources = catalog.sources_of(name)
            if not sources:  # made of the config
                break
            catalog, name = catalog.base, sources[0]
        return catalog, name


def common_form(a: Catalog, b: Catalog) -> Forms:
    """Return two checkpoints in one form; as they are if their names agree or no family is known."""
    if len(a) == len(b) and set(a) == set(b):
        return Forms((a, b))
    files = [_is_of_llama_cpp(catalog) for catalog in (a, b)]
    if files[0] != files[1] and not any(name in b for name in a):
        forms = _with_file(b, a) if files[0] else _with_file(a, b)
        return forms._replace(**{key: getattr(forms, key)[::-1] for key in _OF_SIDES}) if files[0] else forms
    catalogs = like(a, b), like(b, a)
    made_like = next((other for own, other in zip(catalogs, (b, a), strict=True) if own.makes), None)
    form = "" if made_like is None else f"experts as in {made_like.title}"
    form = "layout of mlx-lm" if made_like is not None and is_of_mlx(made_like) else form
    if not any(catalog.makes for catalog in (*catalogs, a, b)):
        catalogs, unwrapped = _without_wrappers(*catalogs)
        form = "names without wrappers" if unwrapped else ""
    catalogs, tied = _with_heads(*catalogs)
    return Forms(catalogs, form, tied=tied)


_OF_SIDES = ("catalogs", "left_out")


def _is_of_llama_cpp(catalog: Catalog) -> bool:
    form = gguf_architectures().get(str(catalog.metadata.get(ARCHITECTURE))) if catalog.format == "gguf" else None
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
    names: dict[str, str] = {}  # of the result, by name in the file
    for target, recipe in recipes.items():
        items = recipe.items
        sources = [[*dict.fromkeys(item.sources)] for item in items]
        own = all(len(each) == 1 and uses[each[0]] == 1 for each in sources)
        stack = own and len(items) > 1 and target in file and tuple(file.about(target).shape) == recipe.shape
        if stack:
            for number, (item, (name,)) in enumerate(zip(items, sources, strict=True)):
                ours[name] = item
                theirs[name] = TensorRecipe(item.shape, (Move(target, TensorView(number)),))
                names[name] = target
            continue
        name = sources[0][0] if own and len(items) == 1 else target
        ours[name], names[name] = recipe, target
        if target in file:
            theirs[name] = _whole(file, target)
    known = set(names.values())
    for target in file:
        if target not in known:
            theirs[target] = _whole(file, target)
    head, tied = _head_of(model, form.head), {}
    embedding = next(iter(recipes["token_embd.weight"].sources), "") if "token_embd.weight" in recipes else ""
    if embedding in theirs and head is not None and head not in theirs and head not in laid.unknown:
        theirs[head] = theirs[embedding]  # the file has none of its own
        ours.setdefault(head, _whole(model, head))
        tied[head] = embedding
    elif embedding in ours and head is None and "output.weight" in theirs:
        ours["output.weight"] = ours[embedding]
        tied["output.weight"] = embedding
    left_out = {name: why for why, listed in laid.left_out.items() for name in listed if name not in ours}
    for name in laid.unknown:
        ours[name] = _whole(model, name)
    without = {name: _ROTATIONS for name in ROPE_TENSORS if name in theirs and name not in recipes}
    for name in without:
        del theirs[name]
    sides = [
        RestructuredCatalog(base, new, metadata=base.metadata, config=base.config, restored=_F32, for_engine=True)
        for base, new in ((model, ours), (file, theirs))
    ]
    return Forms((sides[0], sides[1]), f"layout of llama.cpp ({form.architecture})", (left_out, without), tied)


def _whole(catalog: Catalog, name: str) -> TensorRecipe:
    return TensorRecipe(tuple(catalog.about(name).shape), (Move(name),))


def _head_of(model: Catalog, name: str) -> str | None:
    return stored_names(model, model.title).get(name)


def _without_wrappers(a: Catalog, b: Catalog) -> tuple[tuple[Catalog, Catalog], bool]:
    """Return checkpoints of which one has names with the wrappers of a framework without these wrappers."""
    if any(name in b for name in a) or a.in_memory or b.in_memory:
        return (a, b), False
    stored = [stored_names(catalog, catalog.title) for catalog in (a, b)]
    if stored[0].keys().isdisjoint(stored[1]):
        return (a, b), False
    first, second = (_renamed(catalog, names) for catalog, names in zip((a, b), stored, strict=True))
    return (first, second), True


def _renamed(catalog: Catalog, names: Mapping[str, str]) -> Catalog:
    if all(name == stored for name, stored in names.items()):
        return catalog
    recipes = {name: _whole(catalog, stored) for name, stored in names.items()}
    return RestructuredCatalog(catalog, recipes, metadata=catalog.metadata, config=catalog.config, for_engine=True)


def _with_heads(a: Catalog, b: Catalog) -> tuple[tuple[Catalog, Catalog], dict[str, str]]:
    """Give a side without a head that its config ties to the embedding this head, if the other side has one."""
    tied: dict[str, str] = {}
    result = []
    for own, other in ((a, b), (b, a)):
        heads = {} if own.config is None or own.makes or own.in_memory else _tied_in(own, other)
        tied |= heads
        result.append(own.with_aliases(heads) if heads else own)
    return (result[0], result[1]), tied


def _tied_in(own: Catalog, other: Iterable[str]) -> dict[str, str]:
    names = set(other)
    return {head: name for head, name in tied_heads(own, schema_of(own)).items() if head in names and head not in own}
