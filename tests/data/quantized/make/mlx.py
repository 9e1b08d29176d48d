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


def model_of(weights: dict[str, torch.Tensor], biases: dict[str, torch.Tensor]) -> nn.Module:
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
            parent[last] = nn.Linear(weight.shape[1], weight.shape[0], bias=last in biases)
            if last in biases:
                parent[last].bias = to_mlx(biases[last])
        parent[last].weight = to_mlx(weight)
    return root


def restated(stored: dict[str, torch.Tensor], name: str, width: int, mode: str) -> np.ndarray:
    words = raw(stored[f"{name}.weight"]).view(np.uint32)
    scales, columns = stored[f"{name}.scales"], words.shape[-1] * 32 // width
    codes = bits(words, width, columns)
    if mode == "affine":
        product = codes.astype(np.float32) * groups(widened(scales), columns)
        return product + groups(widened(stored[f"{name}.biases"]), columns)
    grid = E4M3[raw(scales)] if mode == "nvfp4" else e8m0(raw(scales))
    if f"{name}.global_scale" in stored:
        grid = grid * (raw(stored[f"{name}.global_scale"]) / np.float32(6 * 448))[:, None, None]
    return (E4M3 if width == 8 else E2M1)[codes] * groups(grid, columns)


def by_library(parts: dict[str, mx.array], name: str, how: dict[str, object]) -> np.ndarray:
    """``mx.dequantize`` in f32; an expert at a time where each has a global scale, which is how it takes them."""
    weight, scales, biases = (parts.get(f"{name}.{part}") for part in ("weight", "scales", "biases"))
    how = {key: how[key] for key in ("group_size", "bits", "mode")} | {"dtype": mx.float32}
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    overall = parts.get(f"{name}.global_scale")
    if overall is None:
        return np.array(mx.dequantize(weight, scales, biases, **how))
    experts = zip(weight, scales, overall, strict=True)
    return np.stack([np.array(mx.dequantize(w, s, global_scale=g, **how)) for w, s, g in experts])


def make(
    ckpt: Checkpoint,
    shapes: dict[str, tuple[int, ...]],
    *,
    width: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    dtype: torch.dtype = torch.bfloat16,
    predicate: Callable[[str, nn.Module], bool | dict[str, object]] | None = None,
    global_scale: bool = False,
) -> None:
    weights = {name: ckpt.normal(*shape, dtype=dtype) for name, shape in shapes.items()}
    weights["model.norm"] = ckpt.norm(64, dtype)
    # A bias beside biases.
    model = model_of(weights, {"q_proj": ckpt.norm(shapes[Q][0], dtype)})
    config = ckpt.config(torch_dtype=name_of(dtype))
    with contextlib.redirect_stdout(io.StringIO()):
        how = {"mode": mode, "quant_predicate": predicate, "global_scale": global_scale}
        model, config = quantize_model(model, config, group_size, width, **how)
    save_model(ckpt.folder, model)
    save_config(config, ckpt.folder / "config.json")
    stored, parts = ckpt.read(), mx.load(str(ckpt.folder / "model.safetensors"))
    ckpt.plain(f"{Q}.bias", stored[f"{Q}.bias"])
    for name in weights:
        if f"{name}.scales" in stored:
            how = {**config["quantization"], **config["quantization"].get(name, {})}
            again = restated(stored, name, how["bits"], how["mode"])
            ckpt.expect(f"{name}.weight", by_library(parts, name, how), again)
        else:
            ckpt.plain(f"{name}.weight", stored[f"{name}.weight"])


def add(name: str, shows: str, shapes: dict[str, tuple[int, ...]] | None = None, **how: object) -> None:
    fixture(name, writer=WRITER, reader=READER, shows=shows)(lambda ckpt: make(ckpt, shapes or SHAPES, **how))


Q = "model.layers.0.self_attn.q_proj"
SHAPES = {"model.embed_tokens": (12, 64), Q: (10, 128)}
WIDE = {"model.embed_tokens": (6, 128), Q: (7, 256)}
SWITCH = "model.layers.0.mlp.switch_mlp"
EXPERTS = {f"{SWITCH}.gate_proj": (3, 16, 64), f"{SWITCH}.down_proj": (3, 24, 128), "model.layers.0.mlp.gate": (3, 64)}
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def mixed(path: str, module: nn.Module) -> bool | dict[str, object]:
    """As mlx_lm's recipes: more bits for some, none for others."""
    if path.endswith("down_proj"):
        return {"group_size": 32, "bits": 6, "mode": "affine"}
    return (
        {"group_size": 64, "bits": 8, "mode": "affine"}
        if path.endswith("embed_tokens")
        else not path.endswith("mlp.gate")
    )


add("mlx_affine1_g64", "1 bit", width=1, group_size=64, dtype=F16)
add("mlx_affine2_g32", "2 bits, groups of 32", width=2, group_size=32)
add("mlx_affine3_g64", "3 bits across the borders of bytes and words; f32", width=3, group_size=64, dtype=F32)
add("mlx_affine4_g64", "4 bits, groups of 64, bf16 scales and biases; the embedding too", width=4, group_size=64)
add(
    "mlx_affine4_g128", "4 bits, groups of 128; f32, where the sum is rounded", WIDE, width=4, group_size=128, dtype=F32
)
add("mlx_affine5_g64", "5 bits; f16", width=5, group_size=64, dtype=F16)
add("mlx_affine6_g64", "6 bits; f32", width=6, group_size=64, dtype=F32)
add("mlx_affine8_g32", "8 bits, groups of 32; f16", width=8, group_size=32, dtype=F16)
add(
    "mlx_experts",
    "experts stacked (`switch_mlp`), 4 bits; others for single modules in the config, 6 bits in groups of 32 and 8",
    {**SHAPES, **EXPERTS},
    width=4,
    group_size=64,
    predicate=mixed,
)
add("mlx_mxfp4", "mode `mxfp4`: U8 exponents, no biases", mode="mxfp4")
add("mlx_mxfp8", "mode `mxfp8`: E4M3 in U32 words", mode="mxfp8")
add("mlx_nvfp4", "mode `nvfp4`: scales are E4M3 in U8", mode="nvfp4")
add(
    "mlx_nvfp4_global_scale",
    "mode `nvfp4` with a `global_scale` for each expert: multiplied, over 2688",
    {**SHAPES, **EXPERTS},
    mode="nvfp4",
    global_scale=True,
)
