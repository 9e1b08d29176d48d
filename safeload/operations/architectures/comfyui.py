"""Present a diffusion model as the GGUF file that ComfyUI loads, and such a file as a checkpoint again."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ...base import dtypes, log
from ...base.text import error_about, plural, show
from ...errors import FormatError, UnsupportedError
from ...formats.gguf import mixtures, values
from ...models.diffusion import (
    ARCHITECTURE,
    SHAPE_KEY,
    diffusion_models,
    has_marks,
    original_shape,
    prefix_of,
)
from ..sources.catalog import Catalog, Move, RestructuredCatalog, TensorRecipe

# Tensors with at most this many elements stay float32.
_SMALL = 1024
# Tensors with at least this many elements get rows of `_ROW`.
_DIVIDED, _ROW = 512, 256
# The shapes that metadata holds are int32.
_LONGEST_AXIS = (1 << 31) - 1
# Dtypes whose vectors and small tensors become float32; in other checkpoints they become float16 as all tensors.
_WIDE = ("F32", "BF16")


def recognized(catalog: Catalog) -> tuple[str, str] | None:
    """Return the architecture of a diffusion model that is not a GGUF file, and the prefix of its names, or None."""
    if catalog.format == "gguf":
        return None
    names = dict.fromkeys(catalog).keys()
    prefix = prefix_of(names)
    for architecture, model in diffusion_models().items():
        if model.diffusers is not None and prefix + model.diffusers in names:
            raise UnsupportedError(
                f"{catalog.title}: tensor {show(model.diffusers)} is from Diffusers, but ComfyUI loads {architecture} "
                "from GGUF only in the layout of the original checkpoint: convert that one, or pass raw=True to write "
                "the tensors as they are"
            )
        if has_marks(names, model, prefix):
            return architecture, prefix
    return None


def to_comfyui(catalog: Catalog, diffusion: tuple[str, str]) -> Catalog:
    """Return the tensors and the metadata of a diffusion model as ComfyUI needs them."""
    architecture, prefix = diffusion
    model = diffusion_models()[architecture]
    names = {name: name.removeprefix(prefix) for name in catalog if name.startswith(prefix)}
    names = {name: bare for name, bare in names.items() if not any(part in bare for part in model.left_out)}
    catalog.refuse_codes(names, "convert for ComfyUI")
    rest = [name for name in catalog if name not in names]
    if rest:
        log.warning(
            "%s: only the diffusion model (%s) is converted, without %s, such as %s",
            catalog.title,
            architecture,
            plural(len(rest), "other tensor"),
            show(rest[0]),
        )
    recipes: dict[str, TensorRecipe] = {}
    metadata = {
        ARCHITECTURE: architecture,
        mixtures.QUANTIZATION_VERSION: values.U32(mixtures.CURRENT_VERSION),
        mixtures.FILE_TYPE: values.U32(1),  # replaced once types are decided
    }
    for name, bare in names.items():
        about = catalog.about(name)
        shape, count = tuple(about.shape), math.prod(about.shape)
        code = None if about.quantized else about.row.code
        small = len(shape) == 1 or count <= _SMALL or any(part in bare for part in model.kept_f32)
        dtype = "F32" if code in _WIDE and small else "BF16" if code == "BF16" else "F16"
        if model.rearranged and len(shape) > 1 and count >= _DIVIDED and count % _ROW == 0 and shape[-1] % _ROW:
            if max(shape) > _LONGEST_AXIS:
                text = f"{list(shape)} cannot be divided into rows of {_ROW}, because its shape does not fit int32"
                raise error_about(UnsupportedError, text, tensor=name)
            metadata[SHAPE_KEY + bare] = np.array(shape, np.int32)
            shape = (count // _ROW, _ROW)
        if not about.quantized and (not about.floating or about.row.packed):
            text = f"is {about.dtype}, but ComfyUI loads only floating-point numbers from GGUF"
            raise error_about(UnsupportedError, f"{text}; raw=True writes the tensors as they are", tensor=name)
        recipes[bare] = TensorRecipe(shape, (Move(name),), dtype=dtype)
    kept = [name for name, recipe in recipes.items() if recipe.dtype == "F32"]
    return RestructuredCatalog(catalog, recipes, metadata=metadata, format="gguf", kept_f32=kept)


def from_comfyui(catalog: Catalog, chosen: Iterable[str]) -> Catalog:
    """Return the tensors of a GGUF file of a diffusion model in their original shapes."""
    catalog.refuse_codes(catalog, "convert a diffusion model")
    metadata = catalog.metadata
    shapes = {name: tuple(catalog.about(name).shape) for name in catalog}
    try:
        for name in shapes.keys() & chosen:
            original_shape(metadata, name, shapes[name])
    except FormatError as error:
        raise error_about(FormatError, f": {error}; drop= leaves it out", path=catalog.title, tensor=name) from None
    recipes = {name: TensorRecipe(shape, (Move(name),)) for name, shape in shapes.items()}
    # Without the keys about the types and shapes of the GGUF file.
    general = {k: v for k, v in metadata.items() if k not in mixtures.FILE_KEYS and not str(k).startswith(SHAPE_KEY)}
    bf16 = any(not (about := catalog.about(name)).quantized and about.row.code == "BF16" for name in catalog)
    restored = dtypes.BY_CODE["BF16" if bf16 else "F16"]
    return RestructuredCatalog(catalog, recipes, metadata=general, restored=restored)
