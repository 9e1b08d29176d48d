"""Experts that a base stores one by one, and a model of transformers as stacks, which adapters are made for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .adapter_base import Base

# By the name of a stack, the layers that its rows are put together of, in order: as transformers does when it loads.
_LAYERS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


class Apart(NamedTuple):
    """A stack that is stored expert by expert.

    Attributes:
        experts: their number.
        layers: names of the layers whose rows follow one another in each matrix.
        rows: of each layer.
        columns: of each layer.
    """

    experts: int
    layers: tuple[str, ...]
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        return self.experts, len(self.layers) * self.rows, self.columns

    def tensors(self, name: str) -> Iterator[tuple[str, int, int]]:
        """The tensors of a stack of this name, each with its expert and the first of its rows."""
        outer = name.rpartition(".")[0]
        for expert in range(self.experts):
            for k, layer in enumerate(self.layers):
                yield _name(outer, expert, layer), expert, k * self.rows


def _name(outer: str, expert: int, layer: str) -> str:
    return f"{outer}.{expert}.{layer}.weight"


class WithStacks:
    """What is asked of a base to place an adapter, as if it had stacks of the experts that it stores one by one.

    Attributes:
        title: of the base.
        model_type: of the base.
        apart: the stacks that were asked for.
    """

    def __init__(self, base: Base) -> None:
        self._base = base
        self.title = base.title
        self.model_type = base.model_type
        self.apart: dict[str, Apart] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._base or name in self.apart or self._find(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, or of a stack."""
        return self.apart[name].shape if name in self.apart else self._base.shape(name)

    def _find(self, name: str) -> bool:
        outer, _, last = name.rpartition(".")
        for layers in _LAYERS.get(last, ()):
            count = 0
            while all(_name(outer, count, layer) in self._base for layer in layers):
                count += 1
            shapes = {self._base.shape(_name(outer, k, layer)) for k in range(count) for layer in layers}
            if len(shapes) == 1 and len(shape := shapes.pop()) == 2:
                self.apart[name] = Apart(count, layers, *shape)
                return True
        return False
