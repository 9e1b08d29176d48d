"""Weights that transformers renames or stacks when it loads them: adapters name the model's, files the stored ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .adapter_base import Base

# By the name of a stack, the layers whose rows transformers concatenates to it, in order.
_LAYERS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),  # Nemotron-H has no gate
    "down_proj": (("down_proj",), ("w2",)),
}
# Parts of names in the model, and in files: of Mixtral, MiniMax and PhiMoE, of Granite MoE, and of GPT-NeoX.
_RENAMED = (
    (".mlp.", ".block_sparse_moe."),
    (".mlp.router.", ".block_sparse_moe.gate."),
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
    (".router.weight", ".router.layer.weight"),
    ("lm_head.weight", "embed_out.weight"),
)


class Apart(NamedTuple):
    """A stack that is stored expert by expert.

    Attributes:
        experts: their number.
        layers: names of the layers whose rows follow one another in each matrix.
        rows: of each layer.
        columns: of each layer.
        outer: name of the module that has the experts.
    """

    experts: int
    layers: tuple[str, ...]
    rows: int
    columns: int
    outer: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        return self.experts, len(self.layers) * self.rows, self.columns

    def tensors(self) -> Iterator[tuple[str, int, int]]:
        """The tensors of the stack, each with its expert and the first of its rows."""
        for expert in range(self.experts):
            for k, layer in enumerate(self.layers):
                yield _name(self.outer, expert, layer), expert, k * self.rows


def _name(outer: str, expert: int, layer: str) -> str:
    return f"{outer}.{expert}.{layer}.weight"


class WithStacks:
    """A base as adapters see it: under the names of the model, with stacks of the experts that it stores one by one.

    Attributes:
        title: of the base.
        model_type: of the base.
        apart: by name, the stacks that were asked for.
        renamed: by name, the stored tensors that were asked for under another name.
    """

    def __init__(self, base: Base) -> None:
        self._base = base
        self.title = base.title
        self.model_type = base.model_type
        self.apart: dict[str, Apart] = {}
        self.renamed: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._base or name in self.apart or name in self.renamed or self._find(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, or of a stack."""
        return self.apart[name].shape if name in self.apart else self._base.shape(self.renamed.get(name, name))

    def _find(self, name: str) -> bool:
        for stored in _spellings(name):
            if stored in self._base:
                self.renamed[name] = stored
                return True
            stack = self._stack(stored)
            if stack is not None:
                self.apart[name] = stack
                return True
        return False

    def _stack(self, name: str) -> Apart | None:
        """The experts that a stack of this name consists of; None if the base has none."""
        outer, _, last = name.rpartition(".")
        for layers in _LAYERS.get(last, ()):
            count = 0
            while all(_name(outer, count, layer) in self._base for layer in layers):
                count += 1
            shapes = {self._base.shape(_name(outer, k, layer)) for k in range(count) for layer in layers}
            if len(shapes) == 1 and len(shape := shapes.pop()) == 2:
                rows, columns = shape
                return Apart(count, layers, rows, columns, outer)
        return None


def _spellings(name: str) -> Iterator[str]:
    """The names that a tensor of the model may have in files, its own first."""
    yield name
    for part, stored in _RENAMED:
        if part in name:
            yield name.replace(part, stored)
