"""Find the tensors of a base that an adapter changes, and the order of their axes.

An adapter's files state neither: PEFT asks the layers of the model. Names and shapes decide here, then known
architectures. Whatever remains ambiguous is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from ..base import dtypes
from ..base.arrays import Array
from ..base.forking import cached_property
from ..base.text import show
from ..engine.codes.source import Source
from ..errors import FormatError, UnsupportedError
from ..models.choosing import STACK
from ..models.module_names import stored_names
from ..models.tied import is_unclear, tied_heads
from ..packed.finder import CONV1D, CONV1D_MODELS
from .adapter import BIAS, EMBEDDING_A, VALUE, A, Adapter, B

# ---- bases ----


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


# ---- tied heads ----

# PEFT changes modules, not weights. A trained copy of a module (`modules_to_save`) and the factors of a module do not
# reach the module it is tied to. Only tensors that replace the weights of the base reach both.

# The end of the name of an embedding shared by an encoder, a decoder and a head.
_SHARED = "shared.weight"


class Heads(NamedTuple):
    """The tied heads of a base."""

    pairs: Mapping[str, str]  # head -> embedding
    untied: Mapping[str, str]  # head -> embedding, if the head gets its own weights


def heads_of(adapters: Sequence[Adapter], config: Mapping[str, Any] | None, names: Collection[str]) -> Heads:
    """Decide which tied heads of a base get weights of their own."""
    pairs = tied_heads(config, names)
    untied = {}
    if is_unclear(config, pairs):
        for adapter in adapters:
            for module, parts in adapter.modules.items():
                if EMBEDDING_A in parts:
                    text = (
                        f"the adapter changes the embedding {show(module)}; the base's config.json ties its head to an "
                        "embedding, but their names are not known, so the head would change too"
                    )
                    raise UnsupportedError(text, path=adapter.checkpoint.path, tensor=parts[EMBEDDING_A])
    for pair in pairs.items():
        changes = [(adapter, name) for adapter in adapters if (name := _changed_alone(adapter, *pair)) is not None]
        if changes and pair[1].endswith(_SHARED):
            adapter, name = changes[0]
            raise UnsupportedError(
                f"the adapter changes {show(name)}, but encoder, decoder and head share {show(pair[1])}: merging into "
                "one of them is not supported",
                path=adapter.checkpoint.path,
                tensor=name,
            )
        if changes:
            untied[pair[0]] = pair[1]
    return Heads(pairs, untied)


def _changed_alone(adapter: Adapter, head: str, embedding: str) -> str | None:
    """Return the changed tensor of a tied pair, or None if the adapter changes neither or both."""
    if adapter.mlx:  # its embeddings are their own heads
        return None
    pair, modules = (head, embedding), adapter.modules
    factors = [name for name in pair if modules.get(name.removesuffix(".weight"), {}).keys() & {A, EMBEDDING_A}]
    changed = factors or [name for name in pair if adapter.is_copy(name)]
    values = [modules[name][VALUE] for name in pair if VALUE in modules.get(name, ())]
    if not factors and (adapter.tying or not changed) and len(values) == 2:
        first, second = map(adapter.checkpoint.tensors.__getitem__, values)
        if (first.dtype, first.shape) == (second.dtype, second.shape):
            loaded = adapter.checkpoint.load(values)
            a, b = (np.ascontiguousarray(loaded[name]).reshape(-1).view(np.uint8) for name in values)
            if np.array_equal(a, b):
                return None
        if not changed:
            raise FormatError(
                f"tensors {show(values[0])} and {show(values[1])} of the adapter differ, but the base ties them and "
                "'modules_to_save' names neither",
                adapter.checkpoint.path,
                tensor=values[0],
            )
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
# Name parts in the model and in files (Mixtral, MiniMax, PhiMoE; Granite MoE; GPT-NeoX).
_RENAMED = (
    (".mlp.", ".block_sparse_moe."),
    (".mlp.router.", ".block_sparse_moe.gate."),
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
    (".router.weight", ".router.layer.weight"),
    ("lm_head.weight", "embed_out.weight"),
)


class Apart(NamedTuple):
    """A stack stored expert by expert."""

    experts: int
    layers: Sequence[str]  # names of the layers concatenated in each matrix, in order
    rows: int  # of each layer
    columns: int  # of each layer
    outer: str  # name of the experts' module

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        return self.experts, len(self.layers) * self.rows, self.columns

    def tensors(self) -> Iterator[tuple[str, int, int]]:
        """Yield each stored tensor with its expert and its first row in the expert's matrix."""
        for expert in range(self.experts):
            for k, layer in enumerate(self.layers):
                yield f"{self.outer}.{expert}.{layer}.weight", expert, k * self.rows


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
        places: Mapping[str, str | Apart] | None = None,  # found in the whole base, if this is a part of it
    ) -> None:
        self.title, self.names, self._shape, self.target = title, names, shape, target
        model_type = (config or {}).get("model_type")
        self.model_type = model_type if isinstance(model_type, str) else None
        self.is_part = places is not None
        # Stored names, and stacks of separately stored experts, by the names of the model looked up so far.
        self.places = dict(places or {})

    def find(self, name: str) -> str | Apart | None:
        """Return where a tensor of the model is stored; None if the base lacks it."""
        if name in self.names:
            return name
        if name not in self.places and not self.is_part:
            names = [name, *(name.replace(part, stored) for part, stored in _RENAMED if part in name)]
            for stored in names:
                place = stored if stored in self.names else self._stack(stored)
                if place is not None:
                    self.places[name] = place
                    return place
            place = next(filter(None, map(self._unwrapped.get, names)), None)
            if place is not None:
                self.places[name] = place
        return self.places.get(name)

    @cached_property
    def _unwrapped(self) -> dict[str, str]:
        """The stored names by their names without wrappers; few names are missing, so most bases need none."""
        return stored_names(self.names, self.title)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that `find` finds."""
        place = self.find(name) or name
        return place.shape if isinstance(place, Apart) else self._shape(place)

    def _stack(self, name: str) -> Apart | None:
        """Return the stack of this name, or None if the base lacks its experts."""
        outer, _, last = name.rpartition(".")
        choices: Sequence[tuple[str, ...]] = _LAYERS.get(last, ())
        if STACK in name:
            block, _, last = name.removesuffix(".weight").rpartition(STACK)
            outer, choices = f"{block}.experts", [(layer,) for layer in _MLX_LAYERS.get(last, ())]
        for layers in choices:
            count = 0
            while all(f"{outer}.{count}.{layer}.weight" in self.names for layer in layers):
                count += 1
            stack = Apart(count, layers, 0, 0, outer)
            shapes = {self._shape(stored) for stored, _, _ in stack.tensors()}
            if len(shapes) == 1 and len(shape := shapes.pop()) == 2:
                return stack._replace(rows=shape[0], columns=shape[1])
        return None


# ---- modules ----

# Models that store experts as [experts, in, out], which every version of PEFT knows.
_IN_FIRST = frozenset(("gpt_oss",))

# PEFT adds this to a module's name for each further parameter it changes.
_INSIDE = ".base_layer"
# Limit on the changes of one module to tell apart by shape, because every order is tried.
_MAX_PARAMETERS = 6


class Fit(NamedTuple):
    """How the modules of an adapter map to a base."""

    parameters: Mapping[str, str]  # module -> tensor, see `_parameters`; all other modules: ``weight``
    transposed: frozenset[str]  # modules with weights stored as [in, out]
    unclear: Mapping[str, str]  # module -> reason why it cannot be merged


def fitted(adapter: Adapter, base: Base) -> Fit:
    """Find the tensors of a base that an adapter changes."""
    unclear: dict[str, str] = {}
    parameters = _parameters(adapter, base, unclear)
    turned: dict[str, bool | None] = {}  # whether a weight is stored as [in, out]; None if it is square
    for module, parts in adapter.modules.items():
        name, sizes = parameters.get(module, f"{module}.weight"), _sizes(adapter, module)
        whole = module if VALUE in parts else f"{module}.bias" if BIAS in parts else name
        base.find(whole)  # so that a base with unclear names is refused at once
        if adapter.mlx or sizes is None or module in unclear or not base.find(name):
            continue
        shape = base.shape(name)
        if len(shape) != (3 if module in parameters else 2) or shape[:-2] == (1,):  # PEFT never transposes one expert
            continue
        if sizes in (shape[-2:], shape[:-3:-1]):
            turned[module] = None if sizes == sizes[::-1] else sizes != shape[-2:]
    turned.update(_guesses(adapter, turned, parameters, base.model_type))
    for module, order in turned.items():
        if order is None:
            name, experts = parameters.get(module, f"{module}.weight"), module in parameters
            orders = "[experts, out, in] or [experts, in, out]" if experts else "[out, in] or [in, out]"
            if experts:
                why = "Square experts do not show the order, and the adapter changes no other experts"
            else:
                why = "'fan_in_fan_out' may not hold for every layer of this adapter"
                if not base.model_type:
                    why += "; open the base as a folder, because its config.json may show the order"
            unclear[module] = (
                f"tensor {show(adapter.modules[module][A])} of the adapter changes {show(name)} of {base.title}, which "
                f"is {list(base.shape(name))}: {orders}? {why}"
            )
    flag = adapter.transposed
    transposed = frozenset(m for m in adapter.modules if turned.get(m, flag and m not in parameters))
    return Fit(parameters, transposed, unclear)


def _sizes(adapter: Adapter, module: str) -> tuple[int, ...] | None:
    """Return the rows of B and the columns of A, or None if the module lacks two matrices."""
    parts = adapter.modules[module]
    if not {A, B} <= parts.keys():
        return None
    a, b = adapter.shape(parts[A]), adapter.shape(parts[B])
    return (b[0], a[1]) if len(a) == len(b) == 2 else None


def _parameters(adapter: Adapter, base: Base, unclear: dict[str, str]) -> dict[str, str]:
    """Return the tensors named by ``target_parameters``, and MLX's stacks of separate experts, by module."""
    if adapter.mlx:
        stacks = {module: f"{module}.weight" for module in adapter.modules if STACK in module}
        return {module: name for module, name in stacks.items() if isinstance(base.find(name), Apart)}
    if not adapter.parameters:
        return {}
    targets: dict[str, list[str]] = {}  # by the end of their module's name
    for target in adapter.parameters:
        place, _, last = target.rpartition(".")
        targets.setdefault(place, []).append(last)
    depth = max(place.count(".") for place in targets) + 1
    wrapped: dict[str, list[str]] = {}
    for module, parts in adapter.modules.items():
        if A in parts:
            wrapped.setdefault(outermost(module), []).append(module)
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
    """Match the changes of one module with its parameters.

    PEFT stores no names of parameters. It nests the changes in the order in which the layer created its parameters.
    """
    absent = next((name for name in names if not base.find(name)), None)
    if absent is not None:
        return dict.fromkeys(modules, absent)
    orders = [tuple(names)]
    reason = ""
    if len(names) != len(modules):
        reason = f"it has {len(modules)} of this module, but 'target_parameters' names {len(names)} tensors there"
    elif 1 < len(names) <= _MAX_PARAMETERS:
        suits = {(module, name): _suits(adapter, module, base.shape(name)) for module in modules for name in names}
        fitting = [
            order for order in permutations(names) if all(map(suits.__getitem__, zip(modules, order, strict=True)))
        ]
        orders = fitting or orders
    if len(orders) > 1 or len(names) > _MAX_PARAMETERS:
        reason = "neither shapes nor names tell which change belongs to which tensor"
    if not reason:
        return dict(zip(modules, orders[0], strict=False))
    changes = " and ".join(show(adapter.modules[module][A]) for module in modules[:_MAX_PARAMETERS])
    of_base = " and ".join(map(show, names[:_MAX_PARAMETERS]))
    unclear.update(dict.fromkeys(modules, f"{changes} of the adapter change {of_base} of {base.title}: {reason}"))
    return dict.fromkeys(modules, names[0])


def _suits(adapter: Adapter, module: str, shape: tuple[int, ...]) -> bool:
    """Return whether a change can belong to a tensor of this shape."""
    sizes = _sizes(adapter, module)
    if len(shape) == 2:
        return sizes == shape
    return len(shape) == 3 and sizes in (shape[1:], shape[:0:-1])


# ---- orders of axes ----


def _guesses(
    adapter: Adapter, turned: Mapping[str, bool | None], parameters: Mapping[str, str], model_type: str | None
) -> dict[str, bool | None]:
    """Return whether square weights are stored as [in, out], from the orders of others; None if that is ambiguous.

    All parameters of a module have one order, because PEFT asks the module, and its default order has changed. Of
    layers PEFT asks each, and stores the ``fan_in_fan_out`` of the last one.
    """
    experts: dict[str, set[bool]] = {}  # orders by outermost module
    layers: dict[str, set[bool]] = {}  # by the last part of the module's name
    for module, order in turned.items():
        if order is not None:
            orders, key = (experts, outermost(module)) if module in parameters else (layers, _last(module))
            orders.setdefault(key, set()).add(order)
    every_expert, every_layer = set().union(*experts.values()), set().union(*layers.values())
    conv1d = set().union(*(orders for last, orders in layers.items() if last in CONV1D))
    flag = adapter.transposed
    plain = (module for module, parts in adapter.modules.items() if A in parts and module not in parameters)
    unsure = not conv1d and not flag and not all(_last(module) in CONV1D for module in plain)
    guesses: dict[str, bool | None] = {}
    for module in (module for module, order in turned.items() if order is None):
        last = _last(module)
        if module in parameters:
            known = {True} if model_type in _IN_FIRST else set()
            choices = [experts.get(outermost(module), set()), every_expert, known]
        elif model_type in CONV1D_MODELS:
            choices = [{last in CONV1D}]
        else:
            choices = [layers.get(last, set()), conv1d if last in CONV1D else set()]
            if every_layer <= {flag} and not (unsure and last in CONV1D):
                choices.append({flag})
        guesses[module] = next((next(iter(orders)) for orders in choices if len(orders) == 1), None)
    return guesses


def _last(module: str) -> str:
    return module.rpartition(".")[2]
