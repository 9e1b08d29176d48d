"""Layouts that engines need: which tensors, and how they are stacked and transposed; in Python or as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..base.paths import PathLike
from ..base.text import show
from ..errors import FormatError

# Placeholder for the layer number in a name.
LAYER = "{}"

_FIELDS = {"name", "tensors"}
_TENSOR_FIELDS = {"name", "source", "transpose"}


@dataclass(frozen=True)
class StackedTensor:
    """One tensor of a `Layout`.

    Attributes:
        name: its name in the result.
        source: name of the tensor in the source, with ``{}`` in place of the layer number if there is one for each
            layer; then the result has shape [layers, ...].
        transpose: whether each layer (a matrix) is transposed.

    Raises:
        ValueError: ``{}`` occurs more than once, a name is empty, or an attribute has the wrong type.

    Example:
        >>> from safeload import StackedTensor
        >>> StackedTensor("up", "layers.{}.mlp.up_proj.weight", transpose=True).transpose
        True
    """

    name: str
    source: str
    transpose: bool = False

    def __post_init__(self) -> None:
        for what, value in (("name", self.name), ("source", self.source)):
            if not isinstance(value, str) or not value:
                raise ValueError(f"{what} must be a nonempty string, not {show(value)}")
        if not isinstance(self.transpose, bool):
            raise ValueError(f"{show(self.name)}: transpose must be true or false, not {show(self.transpose)}")
        if self.source.count(LAYER) > 1:
            raise ValueError(f"{show(self.name)}: {show(self.source)} has {{}} more than once")

    @property
    def stacked(self) -> bool:
        """Whether it has a layer axis."""
        return LAYER in self.source


@dataclass(frozen=True)
class Layout:
    """The layout of the weights for an engine: its tensors, in the order of the result.

    Attributes:
        name: name of the layout.
        tensors: its tensors.

    Raises:
        TypeError: an item of ``tensors`` is not a `StackedTensor`.
        ValueError: two tensors have the same name.

    Example:
        >>> Layout("tiny", [StackedTensor("ffn", "layers.{}.mlp.weight", transpose=True)]).tensors[0].stacked
        True
    """

    name: str
    tensors: Sequence[StackedTensor]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        for tensor in self.tensors:
            if not isinstance(tensor, StackedTensor):
                raise TypeError(f"layout {show(self.name)}: tensors must be StackedTensor, not {type(tensor).__name__}")
        names = [tensor.name for tensor in self.tensors]
        duplicate = next((name for k, name in enumerate(names) if name in names[:k]), None)
        if duplicate is not None:
            raise ValueError(f"layout {show(self.name)}: duplicate tensor {show(duplicate)}")

    @classmethod
    def from_json(cls, source: PathLike | Mapping[str, Any]) -> Layout:
        """Reads a layout from a JSON file, or from its parsed content.

        ``{"name": "tiny", "tensors": [{"name": "ffn", "source": "layers.{}.mlp.weight", "transpose": true}, ...]}``

        Raises:
            FormatError: the JSON is not such a layout.
            OSError: the file cannot be read.
        """
        from ..stores.json_file import read_json  # imported here: it takes a millisecond

        path = None if isinstance(source, Mapping) else os.fspath(source)
        content = source if isinstance(source, Mapping) else read_json(os.fspath(source), "the layout")
        entries = content.get("tensors")
        if not isinstance(content.get("name"), str) or not isinstance(entries, list) or content.keys() - _FIELDS:
            raise FormatError('a layout must be {"name": string, "tensors": [...]}', path)
        tensors = []
        for k, entry in enumerate(entries):
            if (
                not isinstance(entry, Mapping)
                or entry.keys() - _TENSOR_FIELDS
                or not {"name", "source"} <= entry.keys()
            ):
                raise FormatError(f'tensors[{k}] must be {{"name": string, "source": string, "transpose": bool}}', path)
            try:
                tensors.append(StackedTensor(**entry))
            except ValueError as error:
                raise FormatError(f"tensors[{k}]: {error}", path) from None
        try:
            return cls(content["name"], tensors)
        except ValueError as error:
            raise FormatError(str(error), path) from None

    def to_json(self) -> dict[str, Any]:
        """The layout for ``json.dump``; `from_json` reads it."""
        return {
            "name": self.name,
            "tensors": [{"name": t.name, "source": t.source, "transpose": t.transpose} for t in self.tensors],
        }


@cache
def built_in() -> dict[str, Layout]:
    """The built-in layouts, by name."""
    folder = os.path.join(os.path.dirname(__file__), "layouts")
    names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    return {name.removesuffix(".json"): Layout.from_json(os.path.join(folder, name)) for name in names}
