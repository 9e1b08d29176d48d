"""The block type that ComfyUI-GGUF's llama-quantize chooses for each tensor of a diffusion model.

In ``image_types.json`` a kind is found by a part of the name; the first match counts. A cell has the type of the first
tensors of a kind, or of all, where it is not the base of the file type. ComfyUI-GGUF does not write ``refused`` file
types; ``foreign`` parts of names are those of other models, or of other parts of a checkpoint. Source:
https://github.com/city96/ComfyUI-GGUF/blob/main/tools/lcpp.patch (img_tensor_get_type).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from ...base.data import read_data
from ...base.messages import error_about
from ...base.scheme import SCHEMES
from ...errors import UnsupportedError
from ...models.diffusion import DIFFUSION_MODELS
from .mixtures import FLOAT16, TensorType, axes_of, file_types, is_quantized

_data = partial(read_data, __name__, "image_types.json")


def choose(file_type: str, shapes: Mapping[str, tuple[int, ...]], architecture: str) -> dict[str, TensorType]:
    """Return the type of each tensor; it depends on the place among its kind, so ``shapes`` must be in file order."""
    if file_type not in _available():
        raise UnsupportedError(
            f"file type {file_type} has no rules for diffusion models, expected one of {', '.join(_available())}"
        )
    row, data = file_types()[file_type], _data()
    counters: Counter[str] = Counter()
    types: dict[str, TensorType] = {}
    for name, shape in shapes.items():
        if not _is_quantized(name, shape, architecture):
            types[name] = TensorType(None)
            continue
        part = next((part for part in data["foreign"] if part in name), None)
        if part is not None:
            text = f"is no tensor of {architecture}, because of {part}"
            raise error_about(UnsupportedError, text, tensor=name)
        kind = next((kind for kind, parts in data["kinds"].items() if any(part in name for part in parts)), "")
        number = counters[kind]
        counters[kind] += 1
        cells = data["cells"].get(file_type, {}).get(kind, ())
        chosen = next((cell["type"] for cell in cells if number < cell.get("first", len(shapes))), row.base)
        whole = shape[-1] % SCHEMES[chosen].block == 0
        requires = whole and row.requires_imatrix and chosen == row.base
        types[name] = TensorType(chosen if whole else FLOAT16, None, requires)
    return types


def _available() -> list[str]:
    return [name for name in file_types() if name not in _data()["refused"]]


def _is_quantized(name: str, shape: tuple[int, ...], architecture: str) -> bool:
    if axes_of(shape) != 2 or not is_quantized(name, shape, architecture):
        return False
    parts = DIFFUSION_MODELS[architecture].unquantized or ()
    return not any(name == part[1:] if part.startswith("=") else part in name for part in parts)
