"""Layouts of inference engines: the tensors, and how to stack and transpose each; in Python or as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..core.files import read_json
from ..core.text import PathLike, show
from ..errors import FormatError, exported, public

# Placeholder for the layer number in a name.
LAYER = "{}"

_FIELDS = {"name", "tensors"}
_TENSOR_FIELDS = {"name", "source", "transpose"}
TOOLS = ("kohya", "diffusers")  # instead of a layout: the tool of an adapter's names


@exported()
@dataclass(frozen=True)
class StackedTensor:
    """One tensor of a `Layout`.

    Attributes:
        name: the name in the result.
        source: the name in the source, with ``{}`` in place of the layer number if each layer has such a tensor; the
            result then has shape [layers, ...].
        transpose: True to transpose each layer, which must be a matrix.

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
        for field, value in (("name", self.name), ("source", self.source)):
            if not isinstance(value, str) or not value:
                raise ValueError(f"{field} must be a nonempty string, got {show(value)}")
        if not isinstance(self.transpose, bool):
            raise ValueError(f"{show(self.name)}: transpose must be true or false, got {show(self.transpose)}")
        if self.source.count(LAYER) > 1:
            raise ValueError(f"{show(self.name)}: {show(self.source)} has {{}} more than once")

    @property
    def stacked(self) -> bool:
        """True if it has a layer axis."""
        return LAYER in self.source


@exported()
@dataclass(frozen=True)
class Layout:
    """The layout of the weights for an engine.

    Attributes:
        name: the name of the layout.
        tensors: the tensors, in the order of the result.

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
                raise TypeError(f"layout {show(self.name)}: tensors must be StackedTensor, got {type(tensor).__name__}")
        names = [tensor.name for tensor in self.tensors]
        duplicate = next((name for k, name in enumerate(names) if name in names[:k]), None)
        if duplicate is not None:
            raise ValueError(f"layout {show(self.name)}: duplicate tensor {show(duplicate)}")

    @classmethod
    @public
    def from_json(cls, source: PathLike | Mapping[str, Any]) -> Layout:
        """Read a layout from a JSON file, or from its parsed content.

        ``{"name": "tiny", "tensors": [{"name": "ffn", "source": "layers.{}.mlp.weight", "transpose": true}, ...]}``

        Raises:
            FormatError: the JSON does not describe a layout.
            OSError: the file cannot be read.
        """
        path = None if isinstance(source, Mapping) else os.fspath(source)
        content = source if isinstance(source, Mapping) else read_json(os.fspath(source), "the layout")
        entries = content.get("tensors")
        if not isinstance(content.get("name"), str) or not isinstance(entries, list) or content.keys() - _FIELDS:
            raise FormatError('a layout must be {"name": string, "tensors": [...]}', path)
        tensors = []
        for k, entry in enumerate(entries):
            if not isinstance(entry, Mapping) or not {"name", "source"} <= entry.keys() <= _TENSOR_FIELDS:
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
        """Return the layout for ``json.dump``; `from_json` reads it."""
        return {"name": self.name, "tensors": [asdict(tensor) for tensor in self.tensors]}


@cache
def built_in() -> dict[str, Layout]:
    """Return the built-in layouts by name."""
    return {path.stem: Layout.from_json(path) for path in sorted((Path(__file__).parent / "layouts").glob("*.json"))}
