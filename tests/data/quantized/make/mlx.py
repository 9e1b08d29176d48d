"""MLX: affine codes with scales and biases, and its modes of microscaling, as mlx_lm.convert writes them."""

import contextlib
import io
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import quantize_model, save_config, save_model

from .checkpoint import Checkpoint, fixture, name_of
from .restated import E2M1, E4M3, bits, e8m0, groups, raw, widened

WRITER = "mlx 0.32.4, mlx-lm 0.32.2 `quantize_model`, `save_model`, `save_config`"
READER = "mlx 0.32.4 `mx.dequantize`, scales and biases cast to f32"
DTYPES = {torch.float16: mx.float16, torch.bfloat16: mx.bfloat16, torch.float32: mx.float32}


def to_mlx(tensor: torch.Tensor) -> mx.array:
    return mx.array(tensor.float().numpy()).astype(DTYPES[tensor.dtype])


def model_of(weights: dict[str, torch.Tensor]) -> nn.Module:
    """A module tree: an embedding, norms, stacks of experts by the axes of their weight, and Linear."""
    root = nn.Module()
    for name, weight in weights.items():
        *path, last = name.split(".")
        parent = root
        for part in path:
            if part not in parent:
                parent[part] = nn.Module()
            parent = parent[part]
        if weight.ndim == 1:
            parent[last] = nn.RMSNorm(weight.shape[0])
        elif last == "embed_tokens":
            parent[last] = nn.Embedding(*weight.shape)
        elif weight.ndim == 3:
            parent[last] = SwitchLinear(weight.shape[2], weight.shape[1], weight.shape[0], bias=False)
        else:
            parent[last] = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        parent[last].weight = to_mlx(weight)
    return root


def restated(
    codes: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor | None, width: int, mode: str
) -> np.ndarray:
    words = raw(codes).view(np.uint32)
    columns = words.shape[-1] * 32 // width
    codes = bits(words, width, columns)
    if mode == "affine":
        product = codes.astype(np.float32) * groups(widened(scales), columns)
        return product + groups(widened(biases), columns)
    values = (E4M3 if width == 8 else E2M1)[codes]
    return values * groups(E4M3[raw(scales)] if mode == "nvfp4" else e8m0(raw(scales)), columns)


def make(
    ckpt: Checkpoint,
    shapes: dict[str, tuple[int, ...]],
    *,
    width: int | None,
    group_size: int | None,
    mode: str = "affine",
    dtype: torch.dtype = torch.bfloat16,
    predicate: Callable[[str, nn.Module], bool | dict] | None = None,
    **config: object,
) -> None:
    weights = {name: ckpt.normal(*shape, dtype=dtype) for name, shape in shapes.items()}
    weights["model.norm"] = ckpt.norm(64, dtype)
    model = model_of(weights)
    with contextlib.redirect_stdout(io.StringIO()):
        model, written = quantize_model(
            model,
            ckpt.config(**{"torch_dtype": name_of(dtype), **config}),
            group_size,
            width,
            mode=mode,
            quant_predicate=predicate,
        )
    save_model(ckpt.folder, model)
    save_config(written, ckpt.folder / "config.json")
    stored = ckpt.read()
    for name in weights:
        if f"{name}.scales" not in stored:
            ckpt.plain(f"{name}.weight", stored[f"{name}.weight"])
            continue
        how = {**written["quantization"], **written["quantization"].get(name, {})}
        parts = mx.load(str(ckpt.folder / "model.safetensors"))
        scales, biases = parts[f"{name}.scales"], parts.get(f"{name}.biases")
        value = mx.dequantize(
            parts[f"{name}.weight"],
            scales.astype(mx.float32) if biases is not None else scales,
            biases.astype(mx.float32) if biases is not None else None,
            group_size=how["group_size"],
            bits=how["bits"],
            mode=how["mode"],
            dtype=mx.float32,
        )
        again = [stored[f"{name}.weight"], stored[f"{name}.scales"], stored.get(f"{name}.biases")]
        ckpt.expect(f"{name}.weight", np.array(value), restated(*again, how["bits"], how["mode"]))


def add(name: str, shows: str, shapes: dict[str, tuple[int, ...]] | None = None, **how: object) -> None:
    shapes = shapes or SHAPES
    fixture(name, writer=WRITER, reader=READER, shows=shows)(lambda ckpt: make(ckpt, shapes, **how))


SHAPES = {"model.embed_tokens": (20, 64), "model.layers.0.self_attn.q_proj": (24, 64), "lm_head": (20, 128)}

add("mlx_affine4_g64", "4 bits, groups of 64, bf16 scales and biases; the embedding too", width=4, group_size=64)
add("mlx_affine8_g32", "8 bits, groups of 32, f16", width=8, group_size=32, dtype=torch.float16)
