"""Which tensors of a base the modules of an adapter change, and which of these are stored as [in, out].

The files of an adapter say neither: PEFT asks the layers of the model. Here names and shapes decide, then what is known
of architectures. What they leave open is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import permutations
from typing import NamedTuple

from ..base.text import show
from .adapter import VALUE, A, Adapter, B
from .adapter_base import Base
from .adapter_experts import Apart, WithStacks
from .adapter_heads import Heads

# Models of transformers with layers of its class Conv1D, whose weights are [in, out], and the last names of these.
_CONV1D_MODELS = frozenset(("clvp", "clvp_decoder", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"))
_CONV1D = frozenset(("c_attn", "c_fc", "c_proj", "q_attn"))
# Models whose experts are stored as [experts, in, out], and which every version of PEFT takes as that.
_IN_FIRST = frozenset(("gpt_oss",))

# What PEFT puts into the name of a module for each further parameter of it that is changed.
_INSIDE = ".base_layer"
# Most changes of one module that are told apart by their shapes: every order is tried.
_MOST_TOGETHER = 6


class Fit(NamedTuple):
    """How the modules of an adapter belong to a base.

    Attributes:
        parameters: by module, the tensor that it changes where that is named by ``target_parameters``, such as the
            experts of a layer. All other modules change their ``weight``.
        transposed: modules whose weights are stored as [in, out].
        unclear: by module, why it cannot be merged.
        apart: by name, those of the parameters that the base does not have as one tensor.
        mirrored: by name of a tied tensor, the adapter's value for the tensor that it is tied to.
        redundant: tied heads that the adapter has values for, which are those of the embedding.
        renamed: by name in the model, tensors that the base stores under another name.
    """

    parameters: Mapping[str, str]
    transposed: frozenset[str]
    unclear: Mapping[str, str]
    apart: Mapping[str, Apart]
    mirrored: Mapping[str, str] = {}
    redundant: Set[str] = frozenset()
    renamed: Mapping[str, str] = {}


def fitted(adapter: Adapter, whole: Base, heads: Heads) -> Fit:
    """Find the tensors of a base that an adapter changes.

    Args:
        adapter: may name modules that the base lacks.
        whole: the base, with all its tensors and those of `Heads.untied`.
        heads: the tied heads of the base.
    """
    unclear: dict[str, str] = {}
    base = WithStacks(whole)
    parameters = _parameters(adapter, base, unclear)
    known: dict[str, bool] = {}
    square: list[str] = []
    for module, parts in () if adapter.settings.mlx else adapter.modules.items():
        name = module if VALUE in parts else tensor_of(module, parameters)
        sizes = _sizes(adapter, module)
        if name not in base or sizes is None or module in unclear:
            continue
        shape = base.shape(name)
        if len(shape) != (3 if module in parameters else 2) or shape[:-2] == (1,):  # one expert is added as it is
            continue
        if sizes == shape[-2:] == sizes[::-1]:
            square.append(module)
        elif sizes in (shape[-2:], shape[:-3:-1]):
            known[module] = sizes != shape[-2:]
    clues = _Clues(adapter, known, parameters, base.model_type)
    found = {module: clues.experts(module) if module in parameters else clues.layer(module) for module in square}
    for module, turned in found.items():
        if turned is None:
            unclear[module] = _open_order(adapter, module, tensor_of(module, parameters), base, module in parameters)
    known.update((module, turned) for module, turned in found.items() if turned is not None)
    flag = adapter.settings.transposed
    transposed = {module for module in adapter.modules if known.get(module, flag and module not in parameters)}
    mirrored = {name: value for name, value in heads.mirrored(adapter).items() if name in whole}
    redundant = heads.redundant(adapter)
    return Fit(parameters, frozenset(transposed), unclear, base.apart, mirrored, redundant, base.renamed)


def tensor_of(module: str, parameters: Mapping[str, str]) -> str:
    """The tensor of the base that the factors of a module change."""
    return parameters.get(module, f"{module}.weight")


def _sizes(adapter: Adapter, module: str) -> tuple[int, ...] | None:
    """What the product of a change gives and takes: the rows of B and the columns of A. None without two matrices."""
    parts = adapter.modules[module]
    if not {A, B} <= parts.keys():
        return None
    a, b = adapter.shape(parts[A]), adapter.shape(parts[B])
    return (b[0], a[1]) if len(a) == len(b) == 2 else None


# ---- parameters ----


def _parameters(adapter: Adapter, base: WithStacks, unclear: dict[str, str]) -> dict[str, str]:
    """The tensors that ``target_parameters`` names, by module."""
    if not adapter.settings.parameters:
        return {}
    named: dict[str, list[str]] = {}
    for target in adapter.settings.parameters:
        place, _, last = target.rpartition(".")
        named.setdefault(place, []).append(last)
    deepest = max(place.count(".") for place in named) + 1
    together: dict[str, list[str]] = {}
    for module, parts in adapter.modules.items():
        if A in parts:
            together.setdefault(outermost(module), []).append(module)
    found: dict[str, str] = {}
    for outer, modules in together.items():
        wanted = {f"{outer}.{last}": None for last in named.get("", ()) if f"{outer}.{last}" in base}
        for place in _ends(outer, deepest):
            wanted.update((f"{outer}.{last}", None) for last in named.get(place, ()))
        if wanted:
            found.update(_told_apart(adapter, sorted(modules, key=len), list(wanted), base, unclear))
    return found


def outermost(module: str) -> str:
    """The module that PEFT has wrapped, by the name of one of its changes."""
    end = len(module)
    while module.endswith(_INSIDE, 0, end):
        end -= len(_INSIDE)
    return module[:end]


def _ends(module: str, most: int) -> Iterator[str]:
    """The last parts of a name, up to so many."""
    parts = module.rsplit(".", most)
    for count in range(1, min(most, len(parts)) + 1):
        yield ".".join(parts[-count:])


def _told_apart(
    adapter: Adapter, modules: Sequence[str], names: Sequence[str], base: WithStacks, unclear: dict[str, str]
) -> dict[str, str]:
    """Which of some tensors each change of one module belongs to.

    PEFT writes no names of parameters, and nests the changes in the order in which the layer has made its parameters.
    """
    absent = next((name for name in names if name not in base), None)
    if absent is not None:
        return dict.fromkeys(modules, absent)
    orders = [tuple(names)]
    why = ""
    if len(names) != len(modules):
        why = f"it has {len(modules)} of this module, and 'target_parameters' names {len(names)} tensors there"
    elif 1 < len(names) <= _MOST_TOGETHER:
        suits = {(module, name): _suits(adapter, module, base.shape(name)) for module in modules for name in names}
        fitting = [
            order for order in permutations(names) if all(map(suits.__getitem__, zip(modules, order, strict=True)))
        ]
        orders = fitting or orders
    if len(orders) > 1 or len(names) > _MOST_TOGETHER:
        why = "their shapes do not tell which changes which, and their names do not say it"
    if why:
        changes = " and ".join(show(adapter.modules[module][A]) for module in modules[:_MOST_TOGETHER])
        of_base = " and ".join(map(show, names[:_MOST_TOGETHER]))
        message = f"{changes} of the adapter change {of_base} of {base.title}: {why}"
        unclear.update(dict.fromkeys(modules, message))
    return dict(zip(modules, orders[0], strict=False)) if not why else dict.fromkeys(modules, names[0])


def _suits(adapter: Adapter, module: str, shape: tuple[int, ...]) -> bool:
    """Whether a change may be one of a tensor of this shape."""
    sizes = _sizes(adapter, module)
    if len(shape) == 2:
        return sizes == shape
    return len(shape) == 3 and sizes in (shape[1:], shape[:0:-1])


# ---- orders of axes ----


class _Clues:
    """What tells the order of the axes of a square weight.

    Args:
        adapter: the adapter.
        known: by module, whether a weight that is not square is stored as [in, out].
        parameters: see `Fit`.
        model_type: of the base.
    """

    def __init__(
        self, adapter: Adapter, known: Mapping[str, bool], parameters: Mapping[str, str], model_type: str | None
    ) -> None:
        self._flag = adapter.settings.transposed
        self._model_type = model_type
        self._experts: dict[str, set[bool]] = {}  # by module, as far out as the names go
        self._layers: dict[str, set[bool]] = {}  # by the last part of their names
        for module, turned in known.items():
            if module in parameters:
                self._experts.setdefault(outermost(module), set()).add(turned)
            else:
                self._layers.setdefault(_last(module), set()).add(turned)
        layers = (module for module, parts in adapter.modules.items() if A in parts and module not in parameters)
        self._all_conv1d = all(_last(module) in _CONV1D for module in layers)

    def experts(self, module: str) -> bool | None:
        """Whether experts are stored as [experts, in, out]; None if that is open.

        All parameters of a module have one order: PEFT asks the module. Which one it takes by default has changed.
        """
        for known in (self._experts.get(outermost(module), set()), _united(self._experts)):
            if len(known) == 1:
                return next(iter(known))
        return True if self._model_type in _IN_FIRST else None

    def layer(self, module: str) -> bool | None:
        """Whether the weight of a layer is stored as [in, out]; None if that is open.

        PEFT asks each layer, and writes ``fan_in_fan_out`` as it was for the last one.
        """
        last = _last(module)
        if self._model_type in _CONV1D_MODELS:
            return last in _CONV1D
        alike = self._layers.get(last, set())
        if len(alike) != 1 and last in _CONV1D:
            alike = _united({name: known for name, known in self._layers.items() if name in _CONV1D})
            if not alike and not self._flag and not self._all_conv1d:
                return None
        if len(alike) == 1:
            return next(iter(alike))
        return self._flag if _united(self._layers) <= {self._flag} else None


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _united(known: Mapping[str, set[bool]]) -> set[bool]:
    return set().union(*known.values())


def _open_order(adapter: Adapter, module: str, name: str, base: WithStacks, experts: bool) -> str:
    """Why a square weight is refused."""
    shape, tensor = list(base.shape(name)), adapter.modules[module][A]
    orders = "[experts, out, in] or [experts, in, out]" if experts else "[out, in] or [in, out]"
    message = f"tensor {show(tensor)} of the adapter changes {show(name)} of {base.title}, which is {shape}: {orders}? "
    if experts:
        return f"{message}The adapter changes no experts that are not square, which would tell; PEFT asks the model"
    hint = "" if base.model_type else "; a base that is opened as a folder with its config.json may tell"
    return f"{message}'fan_in_fan_out' may not hold for every layer of this adapter{hint}"
