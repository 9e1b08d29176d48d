"""Find the tensors of a base that adapters change, and in which order of axes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count, permutations, takewhile
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..core import dtypes
from ..core.arrays import Array
from ..core.forking import cached_property
from ..core.names import grouped
from ..core.source import Source
from ..core.text import show
from ..errors import FormatError, UnsupportedError
from ..models.choosing import EMBEDDINGS, STACK, is_unclear, tied_heads, vocabulary_sizes
from ..models.module_names import stored_names, unwrapped
from ..models.renamed import Divided, Joined, ModelNames, Turned, Unmapped, has_rules
from ..quant.finder import CONV1D_MODELS, is_conv1d
from . import diffusion, kinds
from .adapter import Adapter, Fit
from .diffusion import Assembled, Piece
from .kinds import BIAS, EMBEDDING_A, EMBEDDING_B, TOKENS, VALUE, A, changing

# ---- what an adapter changes ----

# The files of an adapter state neither the tensors of its base nor the order of their axes: PEFT asks the layers of the
# model. Names and shapes decide here, then known architectures. Whatever remains ambiguous is refused.


class AdapterTarget(NamedTuple):
    """A base tensor to merge into."""

    name: str
    shape: tuple[int, ...]
    row: dtypes.Dtype | None  # the dtype to keep without dtype=; None if the tensor is packed
    work: np.dtype[Any]  # the dtype to merge in
    # Values as `work`, at a range of the first axis. If rows are plain, also at (integer, range of the second axis).
    read: Callable[[Any], Array]
    together: bool = False  # values can only be read all at once
    source: Source | None = None  # the plain values, if jobs can read them a few rows at a time


def never_read(rows: Any) -> Array:
    """Stand for the values of a tensor that is only described."""
    raise AssertionError("the tensor is only described")


# ---- tied heads ----

# PEFT changes modules, not weights. A trained copy of a module (`modules_to_save`) and the factors of a module do not
# reach the module it is tied to. Only tensors that replace the weights of the base reach both.

# The end of the name of an embedding shared by an encoder, a decoder and a head.
_SHARED = "shared.weight"
# The ends of the names of tensors with a row for each token.
_VOCABULARY = (*EMBEDDINGS, ".lm_head.weight", ".lm_head.bias", ".embed_out.weight", ".predictions.bias")


class Heads(NamedTuple):
    """The tied heads of a base."""

    pairs: Mapping[str, str]  # head -> embedding
    untied: Mapping[str, str]  # head -> embedding, if the head gets its own weights
    added: Collection[str] = ()  # of a piece: its tensors that the base lacks, such as task heads


def heads_of(adapters: Sequence[Adapter], config: Mapping[str, Any] | None, names: Collection[str]) -> Heads:
    """Decide which tied heads of a base get weights of their own."""
    pairs = tied_heads(config, names)
    untied: dict[str, str] = {}
    if is_unclear(config, pairs):
        for adapter in adapters:
            for module, parts in adapter.modules.items():
                if parts.keys() & kinds.EMBEDDING_ROLES:
                    text = f"the adapter changes the embedding {show(module)}; the base's config.json ties its head to "
                    text += "an embedding, but their names are not known, so the head would change too"
                    raise UnsupportedError(text, path=adapter.checkpoint.path, tensor=next(iter(parts.values())))
    if not pairs:
        return Heads(pairs, untied)
    known = ModelNames(config, {unwrapped(name): name for name in (*names, *pairs)})
    for adapter in adapters:
        own = modules_by_tensor(adapter, known.find)
        for head, embedding in pairs.items():
            name = _changed_alone(adapter, own, (head, embedding))
            if name is not None and embedding.endswith(_SHARED):
                text = f"the adapter changes {show(name)}, but encoder, decoder and head share {show(embedding)}: "
                text += "merging into one of them is not supported"
                raise UnsupportedError(text, path=adapter.checkpoint.path, tensor=name)
            if name is not None:
                untied[head] = embedding
    return Heads(pairs, untied)


def modules_by_tensor(adapter: Adapter, find: Callable[[str], Any]) -> dict[str, list[str]]:
    """Return the modules of an adapter by the stored tensor that they change; ``find`` takes names of the model."""

    def tensor_of(module: str) -> str:
        name = module if VALUE in adapter.modules[module] else f"{module}.weight"
        place = find(name)
        return place if isinstance(place, str) else name

    return grouped(adapter.modules, tensor_of)


def _changed_alone(adapter: Adapter, own: Mapping[str, Sequence[str]], pair: tuple[str, str]) -> str | None:
    """Return the changed tensor of a tied pair, or None if the adapter changes neither or both."""
    if not adapter.by_module:  # its embeddings are their own heads
        return None
    modules = [(name, module) for name in pair for module in own.get(name, ())]
    factors = [name for name, module in modules if changing(adapter.modules[module])]
    changed = factors or [name for name, module in modules if adapter.is_copy(module)]
    values = [adapter.modules[module][VALUE] for _, module in modules if VALUE in adapter.modules[module]]
    rows = [adapter.modules[module][TOKENS] for _, module in modules if TOKENS in adapter.modules[module]]
    if len({(adapter.tokens[name], array.tobytes()) for name, array in adapter.checkpoint.load(rows).items()}) > 1:
        text = f"the adapter gives {show(pair[0])} and {show(pair[1])} different rows, but the base ties them"
        raise UnsupportedError(text, path=adapter.checkpoint.path, tensor=rows[0])
    if not factors and (adapter.tying or not changed) and len(values) == 2:
        first, second = map(adapter.checkpoint.tensors.__getitem__, values)
        if (first.dtype, first.shape) == (second.dtype, second.shape):
            loaded = adapter.checkpoint.load(values)
            a, b = (np.ascontiguousarray(loaded[name]).reshape(-1).view(np.uint8) for name in values)
            if np.array_equal(a, b):
                return None
        if not changed:
            text = f"tensors {show(values[0])} and {show(values[1])} of the adapter differ, but the base ties them and "
            raise FormatError(f"{text}'modules_to_save' names neither", adapter.checkpoint.path, tensor=values[0])
    return changed[0] if changed else None


# ---- stacks of experts, and renamed tensors ----

# transformers and mlx-lm rename or stack some weights on loading. Adapters have the model's names, files the stored.

# Layers concatenated by transformers, row by row and in order, under the last part of the stack's name.
_LAYERS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),  # Nemotron-H has no gate
    "down_proj": (("down_proj",), ("w2",)),
}
# The layers that mlx-lm stacks, under the last part of the stack's name.
_MLX_LAYERS = {"gate_proj": ("gate_proj", "w1"), "up_proj": ("up_proj", "w3"), "down_proj": ("down_proj", "w2")}
# Name parts in the model and in files without a config (Mixtral, MiniMax, PhiMoE; Granite MoE; GPT-NeoX).
_RENAMED = (
    (".mlp.", ".block_sparse_moe."),
    (".mlp.router.", ".block_sparse_moe.gate."),
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
    (".router.weight", ".router.layer.weight"),
    ("lm_head.weight", "embed_out.weight"),
)


class Apart(NamedTuple):
    """A stack stored expert by expert, or a matrix stored layer by layer."""

    experts: int  # 0 for a matrix
    layers: Sequence[str]  # names of the layers concatenated in each matrix, in order
    rows: int  # of each layer
    columns: int  # of each layer
    outer: str  # name of the experts' module

    @property
    def shape(self) -> tuple[int, ...]:
        return *([self.experts] if self.experts else []), len(self.layers) * self.rows, self.columns

    def tensors(self) -> Iterator[Piece]:
        """Yield each stored tensor with its expert and its rows in the expert's matrix."""
        for expert in range(self.experts or 1):  # without `product`, which would store all numbers that a plan names
            outer = f"{self.outer}.{expert}" if self.experts else self.outer
            for k, layer in enumerate(self.layers):
                rows = slice(k * self.rows, (k + 1) * self.rows)
                yield f"{outer}.{layer}.weight", (self.rows, self.columns), (expert, rows), None


# Where a tensor of the model is stored, if under its own name, then as a str.
Place: TypeAlias = str | Apart | Divided | Assembled


class Base:
    """The tensors of a model to merge adapters into, found by the names of the model."""

    def __init__(
        self,
        title: str,  # the path, for messages
        names: Collection[str],  # of the stored tensors
        config: Mapping[str, Any] | None,
        shape: Callable[[str], tuple[int, ...]],  # of a stored tensor
        target: Callable[[str], AdapterTarget],  # a stored tensor
        *,
        heads: Collection[str] = (),  # names of tied heads, stored or not
        places: Mapping[str, str | Apart | Divided | Assembled]
        | None = None,  # found in the whole base, if this is a part of it
    ) -> None:
        self.title, self.names, self._shape, self._target = title, names, shape, target
        model_type = (config or {}).get("model_type")
        self.model_type = model_type if isinstance(model_type, str) else None
        self.is_part = places is not None
        # Places other than a tensor of the same name, by the names of the model looked up so far.
        self.places = dict(places or {})
        self.unmapped: dict[str, str] = {}  # names of the model -> reason why they have no place
        self.turned: set[str] = set()  # names of the model whose matrices are stored transposed
        self._renames = has_rules(config)
        self._config, self._heads = config, heads
        # Tensors that an adapter brings whole, with another number of rows or in addition: their shapes and dtypes.
        self.grown: dict[str, AdapterTarget] = {}
        self.rows_before: dict[str, int] = {}  # of those with another number of rows

    @cached_property
    def diffusion(self) -> diffusion.Names | None:
        """The places of a diffusion model by the names of adapters' tools."""
        return None if self.is_part else diffusion.names_of(self.names)

    def grow(self, modules: Iterable[tuple[Adapter, Mapping[str, Mapping[str, str]]]], heads: Heads) -> None:
        """Find the embeddings and heads of a larger vocabulary, and the task heads that the base lacks."""
        sizes = vocabulary_sizes(self._config)
        values = ((a, module, parts[VALUE]) for a, own in modules for module, parts in own.items() if VALUE in parts)
        for adapter, module, value in values:
            place, shape = self.find(module), adapter.shape(value)
            row: dtypes.Dtype | None = dtypes.parse(adapter.checkpoint.tensors[value].dtype)
            if not adapter.by_module or row is None or not row.floating or module in self.unmapped:
                continue
            if place in heads.added or (place is None and self._is_task_head(adapter, module)):
                place = module
            elif isinstance(place, str) and place in self.names:
                before, row = self._shape(place), self._target(place).row
                grows = len(before) > 0 and before[0] != shape[0] and before[1:] == shape[1:]
                if not grows or not (before[0] in sizes or self.is_part or f".{place}".endswith(_VOCABULARY)):
                    continue
                self.rows_before[place] = before[0]
            else:
                continue
            work = np.dtype(np.float64 if row is not None and row.code == "F64" else np.float32)
            self.grown.setdefault(place, AdapterTarget(place, shape, row, work, never_read))
        if self.rows_before and not self.is_part:
            self._check_vocabulary()

    def _is_task_head(self, adapter: Adapter, module: str) -> bool:
        """Return whether an adapter brings a trained module below an outermost module that the base lacks."""
        outer = module.partition(".")[0] + "."
        known = any(name.startswith(outer) for name in (*self.names, *self._heads))
        return adapter.is_copy(module) and not known

    def _check_vocabulary(self) -> None:
        """Refuse vocabularies of two sizes."""
        first, before = next(iter(self.rows_before.items()))
        after = self.grown[first].shape[0]
        for name in (name for name in self.names if f".{name}".endswith(_VOCABULARY) or name in self.rows_before):
            rows = [*self.target(name).shape, 0][0]
            if rows != after and (name in self.grown or rows == before):
                text = (
                    f"the adapter gives {show(first)} {after} rows instead of {before}, but {show(name)} has {rows}: "
                )
                text += "train and save embedding and head together"
                raise UnsupportedError(text, path=self.title, tensor=name)

    def find(self, name: str) -> Place | None:
        """Return where a tensor of the model is stored; None if the base lacks it."""
        if name in self.grown:
            return name
        if name not in self.places and not self.is_part:
            if not self._renames and name in self.names:
                return name
            texts = [name, *(name.replace(part, stored) for part, stored in _RENAMED if part in name)]
            place = next((place for place in map(self._place, texts) if place is not None), None)
            if place is None or place == name:
                return place
            self.places[name] = place
        return self.places.get(name, name if name in self.names else None)

    @cached_property
    def _known(self) -> ModelNames:
        """The places by the names of the model; few names are missing, so most bases need none."""
        stored = stored_names(self.names, self.title)
        return ModelNames(self._config, {**dict(zip(self._heads, self._heads, strict=True)), **stored})

    def _place(self, name: str) -> Place | None:
        known = self._known.find(name)
        place = self.diffusion.find(name, self._shape) if known is None and self.diffusion is not None else known
        if isinstance(place, Turned):
            self.turned.add(name)
            return place.stored
        if isinstance(place, Joined):
            outers, layers, _ = zip(*(stored.rsplit(".", 2) for stored in place.stored), strict=True)
            apart = self._with_sizes(Apart(0, layers, 0, 0, outers[0]))
            if apart is not None:
                return apart
            place = Unmapped(f"transformers joins {', '.join(map(show, place.stored))}")
        if isinstance(place, Divided) and (not (shape := self._shape(place.stored)) or shape[0] % place.parts):
            place = Unmapped(f"{show(place.stored)} does not consist of {place.parts} equal parts")
        if isinstance(place, Unmapped):
            self.unmapped[name] = place.reason
            return None
        return self._stack(name) if place is None else place

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that `find` finds."""
        place = self.find(name) or name
        if isinstance(place, Divided):
            rows, *columns = self._shape(place.stored)
            return rows // place.parts, *columns
        if isinstance(place, (Apart, Assembled)):
            return tuple(place.shape)
        return self.grown[place].shape if place in self.grown else self._shape(place)

    def target(self, stored: str) -> AdapterTarget:
        """Return a stored tensor, or one that an adapter brings whole."""
        return self.grown[stored] if stored in self.grown else self._target(stored)

    def _stack(self, name: str) -> Apart | None:
        """Return the stack of this name, or None if the base lacks its experts."""
        outer, _, last = name.rpartition(".")
        choices: Sequence[tuple[str, ...]] = _LAYERS.get(last, ())
        if STACK in name:
            block, _, last = name.removesuffix(".weight").rpartition(STACK)
            outer, choices = f"{block}.experts", [(layer,) for layer in _MLX_LAYERS.get(last, ())]
        for layers in choices:
            first = self._known.find(f"{outer}.0.{layers[0]}.weight")
            if not isinstance(first, str) or not first.endswith(end := f".0.{layers[0]}.weight"):
                continue
            inner = first.removesuffix(end)
            present = (all(f"{inner}.{k}.{layer}.weight" in self.names for layer in layers) for k in count())
            stack = self._with_sizes(Apart(sum(takewhile(bool, present)), layers, 0, 0, inner))
            if stack is not None and stack.experts:
                return stack
        return None

    def _with_sizes(self, apart: Apart) -> Apart | None:
        """Return tensors with their common shape, or None if they are no matrices of one shape."""
        names = [stored for stored, *_ in apart.tensors()]
        shapes = {self._shape(stored) for stored in names} if all(name in self.names for name in names) else ()
        matrices = len(shapes) == 1 and len(shape := next(iter(shapes))) == 2
        return apart._replace(rows=shape[0], columns=shape[1]) if matrices else None


# ---- modules ----

# Models that store experts as [experts, in, out], which every version of PEFT knows.
_IN_FIRST = frozenset(("gpt_oss",))

# Models whose experts have no gate, so that shapes cannot tell up_proj, which they create first, from down_proj.
_UP_FIRST = frozenset(("nemotron_h",))

# PEFT adds this to a module's name for each further parameter it changes.
_INSIDE = ".base_layer"
# Limit on the changes of one module to tell apart by shape, because every order is tried.
_MAX_PARAMETERS = 6


def fitted(adapter: Adapter, base: Base) -> Fit:
    """Find the tensors of a base that an adapter changes."""
    if adapter.fit is not None:
        return adapter.fit
    unclear: dict[str, str] = {}
    parameters = _parameters(adapter, base, unclear)
    turned: dict[str, bool | None] = {}  # whether a weight is stored as [in, out]; None if it is square
    for module, parts in adapter.modules.items():
        name, sizes = parameters.get(module, f"{module}.weight"), adapter.sizes(module)
        whole = module if VALUE in parts else f"{module}.bias" if BIAS in parts else name
        base.find(whole)  # so that a base with unclear names is refused at once
        turns = "fan_in_fan_out" in (adapter.kind.known or ()) and bool(changing(parts))
        if not adapter.turns(module) or (sizes is None and not turns) or module in unclear or not base.find(name):
            continue
        shape = base.shape(name)
        # PEFT never transposes one expert.
        if len(shape) != (3 if module in parameters else 2) or shape[:-2] == (1,):
            continue
        orders = [sizes == shape[-2:], sizes == shape[:-3:-1]]
        if turns:
            places = (kinds.Place(shape, by_columns, adapter.settings, module) for by_columns in (False, True))
            orders = [adapter.kind.fits(adapter.shapes(parts), place) for place in places]
        if any(orders):
            turned[module] = None if all(orders) else orders[1]
    turned.update(_guesses(adapter, turned, parameters, base.model_type))
    for module, order in turned.items():
        if order is None:
            name, experts = parameters.get(module, f"{module}.weight"), module in parameters
            question = "[out, in] or [in, out]? 'fan_in_fan_out' may not hold for every layer of this adapter"
            if experts:
                question = "[experts, out, in] or [experts, in, out]? Square experts do not show the order, and the "
                question += "adapter changes no other experts"
            elif not base.model_type:
                question += "; open the base as a folder, because its config.json may show the order"
            tensor = show(next(iter(adapter.modules[module].values())))
            change = f"tensor {tensor} of the adapter changes {show(name)} of {base.title}"
            unclear[module] = f"{change}, which is {list(base.shape(name))}: {question}"
    transposed = frozenset(m for m in adapter.modules if turned.get(m, adapter.transposed and m not in parameters))
    return Fit(parameters, transposed, unclear)


def _parameters(adapter: Adapter, base: Base, unclear: dict[str, str]) -> dict[str, str]:
    """Return the tensors named by ``target_parameters``, and MLX's stacks of separate experts, by module."""
    if not adapter.joins_stacks:
        stacks = {module: f"{module}.weight" for module in adapter.modules if STACK in module}
        return {module: name for module, name in stacks.items() if isinstance(base.find(name), Apart)}
    if not adapter.parameters:
        return {}
    targets: dict[str, list[str]] = {}  # by the end of their module's name
    for target in adapter.parameters:
        place, _, last = target.rpartition(".")
        targets.setdefault(place, []).append(last)
    depth = max(place.count(".") for place in targets) + 1
    wrapped = grouped((module for module, parts in adapter.modules.items() if A in parts), outermost)
    parameters: dict[str, str] = {}
    for outer, modules in wrapped.items():
        last_parts = outer.rsplit(".", depth)[-depth:]
        places = (".".join(last_parts[begin:]) for begin in range(len(last_parts), -1, -1))
        targeted = ((place, f"{outer}.{last}") for place in places for last in targets.get(place, ()))
        names = [*dict.fromkeys(name for place, name in targeted if place or not outer or base.find(name))]
        if names:
            parameters.update(_matched(adapter, sorted(modules, key=len), names, base, unclear))
    return parameters


def outermost(module: str) -> str:
    """Return the name of the module inside PEFT's wrappers."""
    end = len(module)
    while module.endswith(_INSIDE, 0, end):
        end -= len(_INSIDE)
    return module[:end]


def _matched(
    adapter: Adapter, modules: Sequence[str], names: Sequence[str], base: Base, unclear: dict[str, str]
) -> dict[str, str]:
    """Match nested changes of a module with its parameters, in the order in which its layer created these."""
    absent = next((name for name in names if not base.find(name)), None)
    if absent is not None:
        return dict.fromkeys(modules, absent)
    orders, reason = [tuple(names)], ""
    if len(names) != len(modules):
        reason = f"it has {len(modules)} of this module, but 'target_parameters' names {len(names)} tensors there"
    elif 1 < len(names) <= _MAX_PARAMETERS:
        suits = {(module, name): _suits(adapter, module, base.shape(name)) for module in modules for name in names}
        tried = (order for order in permutations(names) if all(map(suits.get, zip(modules, order, strict=True))))
        orders = [*tried] or orders
        if base.model_type in _UP_FIRST and tuple(sorted(names)) in orders:  # down_proj is the last, so the outermost
            orders = [tuple(sorted(names))]
    if len(orders) > 1 or len(names) > _MAX_PARAMETERS:
        reason = "neither shapes nor names tell which change belongs to which tensor"
    if not reason:
        return dict(zip(modules, orders[0], strict=False))
    changes = " and ".join(show(adapter.modules[module][A]) for module in modules[:_MAX_PARAMETERS])
    of_base = " and ".join(map(show, names[:_MAX_PARAMETERS]))
    unclear.update(dict.fromkeys(modules, f"{changes} of the adapter change {of_base} of {base.title}: {reason}"))
    return dict.fromkeys(modules, names[0])


def _suits(adapter: Adapter, module: str, shape: tuple[int, ...]) -> bool:
    sizes = adapter.sizes(module)
    return sizes == shape if len(shape) == 2 else len(shape) == 3 and sizes in (shape[1:], shape[:0:-1])


# ---- orders of axes ----


def _guesses(
    adapter: Adapter, turned: Mapping[str, bool | None], parameters: Mapping[str, str], model_type: str | None
) -> dict[str, bool | None]:
    """Return whether square weights are stored as [in, out], from the orders of others; None if that is ambiguous."""
    # PEFT asks a module for the order of all its parameters, and each layer for its own; it stores that of the last.
    experts: dict[str, set[bool]] = {}  # orders by outermost module
    layers: dict[str, set[bool]] = {}  # by the last part of the module's name
    for module, order in turned.items():
        if order is not None:
            orders, key = (experts, outermost(module)) if module in parameters else (layers, _last(module))
            orders.setdefault(key, set()).add(order)
    every_expert, every_layer = set().union(*experts.values()), set().union(*layers.values())
    conv1d, flag = set().union(*(orders for last, orders in layers.items() if is_conv1d(last))), adapter.transposed
    plain = (
        module
        for module, parts in adapter.modules.items()
        if changing(parts) - {EMBEDDING_A, EMBEDDING_B} and module not in parameters
    )
    unsure = not conv1d and not flag and not all(map(is_conv1d, plain))
    guesses: dict[str, bool | None] = {}
    for module in (module for module, order in turned.items() if order is None):
        last = _last(module)
        if module in parameters:
            known = {True} if model_type in _IN_FIRST else set()
            choices = [experts.get(outermost(module), set()), every_expert, known]
        elif model_type in CONV1D_MODELS and adapter.of_transformers:
            choices = [{is_conv1d(last)}]
        else:
            choices = [layers.get(last, set()), conv1d if is_conv1d(last) else set()]
            unknown = not adapter.of_transformers and model_type in (None, *CONV1D_MODELS)
            if every_layer <= {flag} and not (unsure and is_conv1d(last)) and not unknown:
                choices.append({flag})
        guesses[module] = next((next(iter(orders)) for orders in choices if len(orders) == 1), None)
    return guesses


def _last(module: str) -> str:
    return module.rpartition(".")[2]
