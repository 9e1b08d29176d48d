"""`families`: list the families of models that safeload knows."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import exported, public
from . import family as known


@exported()
class ModelFamily(NamedTuple):
    """A family of models.

    Attributes:
        name: name of the family; of its schema, if it has one.
        about: the models of the family.
        architectures: names in ``architectures`` of a config.json.
        model_types: values of ``model_type`` in a config.json.
        schema: True if `safeload.check` knows its tensors.
        gguf: architecture that `safeload.convert` writes to GGUF files and reads from them; "" if llama.cpp is not
            supported.
        engines: True if whole models can be written in the formats of engines, such as "w4a16".
        mlx: True if folders of mlx-lm can be converted to other formats.

    Example:
        >>> import safeload
        >>> {family.name: family.gguf for family in safeload.families()}["qwen3_moe"]
        'qwen3moe'
    """

    name: str
    about: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    schema: bool
    gguf: str
    engines: bool
    mlx: bool


@public
def families() -> list[ModelFamily]:
    """List the families of models that safeload knows, and for what, sorted by name.

    Models of other families load and convert too, but their tensors are not compared with a schema.

    Example:
        >>> import safeload
        >>> [family.name for family in safeload.families() if family.gguf == "llama"]
        ['llama', 'mistral', 'mixtral']
    """
    return [
        ModelFamily(
            name,
            family.about,
            family.architectures,
            family.model_types,
            family.has_schema,
            family.gguf.architecture if family.in_gguf else "",
            family.in_engines,
            family.in_mlx,
        )
        for name, family in known.families().items()
    ]
