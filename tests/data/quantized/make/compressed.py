"""compressed-tensors: what llm-compressor, Kimi and RedHatAI publish."""

from collections.abc import Callable

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

from .checkpoint import Checkpoint, fixture, name_of
from .restated import E2M1, E2M3, E4M3, bits, e8m0, groups, raw, spread, widened

WRITER = "compressed-tensors 0.20.0 `ModelCompressor.compress_model`"
READER = "compressed-tensors 0.20.0 `decompress`, scales cast to f32"
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
HALF = {torch.float16, torch.bfloat16}


def model_of(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module tree with a Linear for each weight, by the name of its module."""
    root = torch.nn.Module()
    for name, weight in weights.items():
        *path, last = name.split(".")
        parent = root
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = parent.get_submodule(part)
        linear = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
        linear.weight.data.copy_(weight)
        parent.add_module(last, linear)
    return root


def observe(module: torch.nn.Linear) -> None:
    """Scales and zero points from the least and the largest value, as llm-compressor's `memoryless_minmax` observer."""
    args, weight = module.quantization_scheme.weights, module.weight.data
    global_scale = None
    if args.strategy == "tensor_group":
        global_scale = generate_gparam(*weight.float().aminmax())
        module.weight_global_scale.data.copy_(global_scale)
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif args.strategy == "channel":
        parts = weight.unsqueeze(1)
    elif args.strategy == "block":
        high, wide = args.block_structure
        rows, columns = -(-weight.shape[0] // high), -(-weight.shape[1] // wide)
        padded = torch.nn.functional.pad(
            weight, (0, columns * wide - weight.shape[1], 0, rows * high - weight.shape[0])
        )
        parts = padded.reshape(rows, high, columns, wide).transpose(1, 2).flatten(-2)
    else:
        parts = weight.unflatten(-1, (-1, args.group_size))
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale)
    module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(weight.dtype)
    if hasattr(module, "input_global_scale"):
        module.input_global_scale.data.fill_(6 * 448 / 12.5)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.reshape(module.weight_zero_point.shape)


def decompressed(stored: dict[str, torch.Tensor], scheme: QuantizationScheme, form: str) -> torch.Tensor:
    """A module's weight as the library reads it, computed in float32."""
    stored = {name: value.float() if value.dtype in HALF else value for name, value in stored.items()}
    compressor = BaseCompressor.get_value_from_registry(form)
    if form == "nvfp4-pack-quantized":
        # Its decompress computes in bf16; the same steps with another dtype.
        packed = stored["weight_packed"]
        return dequantize(
            x_q=unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, dtype=torch.float32),
            scale=stored["weight_scale"].float(),
            global_scale=stored["weight_global_scale"],
            args=scheme.weights,
            dtype=torch.float32,
        )
    return compressor.decompress(stored, scheme)["weight"].float()


def integers(stored: dict[str, torch.Tensor], args: QuantizationArgs, unpack=bits) -> np.ndarray:
    """(q - z) * scale, with codes in 32-bit words or in bytes; zero points are packed down the rows."""
    if "weight_packed" in stored:
        *lead, rows, columns = stored["weight_shape"].tolist()
        middle = 1 << args.num_bits - 1
        codes = unpack(raw(stored["weight_packed"]).view(np.uint32), args.num_bits, columns) - middle
    else:
        codes, middle = raw(stored["weight"]).astype(np.int32), None
        rows, columns = codes.shape[-2:]
    scale = widened(stored["weight_scale"])
    zero = np.zeros(scale.shape, np.int32)
    if "weight_zero_point" in stored:
        zero = raw(stored["weight_zero_point"])
        if zero.dtype == np.int32:
            turned = np.ascontiguousarray(zero.swapaxes(-1, -2)).view(np.uint32)
            zero = unpack(turned, args.num_bits, rows).swapaxes(-1, -2) - middle
    if scale.ndim == 1:
        return (codes - zero.astype(np.int32)).astype(np.float32) * scale
    assert "weight_g_idx" not in stored
    whole = (codes - groups(zero.astype(np.int32), columns)).astype(np.float32)
    return whole * groups(scale, columns)


def nvfp4(stored: dict[str, torch.Tensor], args: QuantizationArgs) -> np.ndarray:
    packed = raw(stored["weight_packed"])
    columns = packed.shape[-1] * 2
    scale = E4M3[raw(stored["weight_scale"])] / raw(stored["weight_global_scale"])
    return E2M1[bits(packed, 4, columns)] * groups(scale, columns)


def mxfp4(stored: dict[str, torch.Tensor], args: QuantizationArgs) -> np.ndarray:
    packed = raw(stored["weight_packed"])
    columns = packed.shape[-1] * 2
    return E2M1[bits(packed, 4, columns)] * groups(e8m0(raw(stored["weight_scale"])), columns)


def mxfp6(stored: dict[str, torch.Tensor], args: QuantizationArgs) -> np.ndarray:
    packed = raw(stored["weight_packed"])
    columns = packed.shape[-1] * 4 // 3
    return E2M3[bits(packed, 6, columns)] * groups(e8m0(raw(stored["weight_scale"])), columns)


def mxfp8(stored: dict[str, torch.Tensor], args: QuantizationArgs) -> np.ndarray:
    codes = raw(stored["weight"])
    return E4M3[codes] * groups(e8m0(raw(stored["weight_scale"])), codes.shape[-1])


def float8(stored: dict[str, torch.Tensor], args: QuantizationArgs) -> np.ndarray:
    codes, scale = raw(stored["weight"]), widened(stored["weight_scale"])
    if args.strategy == "block":
        scale = spread(scale, codes.shape, tuple(args.block_structure))
    return E4M3[codes] * scale


RESTATED: dict[str, Callable[..., np.ndarray]] = {
    "pack-quantized": integers,
    "int-quantized": integers,
    "float-quantized": float8,
    "naive-quantized": float8,
    "nvfp4-pack-quantized": nvfp4,
    "mxfp4-pack-quantized": mxfp4,
    "mxfp6-pack-quantized": mxfp6,
    "mxfp8-quantized": mxfp8,
}


def make(
    ckpt: Checkpoint,
    groups_of: dict[str, QuantizationScheme],
    shapes: dict[str, tuple[int, int]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    form: str | None = None,
    second: Callable[[str], bool] | None = None,
    extra: dict[str, torch.Tensor] | None = None,
) -> None:
    """Quantizes, compresses, writes and reads a small model of Linear layers, of which `lm_head` stays as it is."""
    weights = {name: ckpt.normal(*shape, dtype=dtype) for name, shape in shapes.items()}
    weights["lm_head"] = ckpt.normal(8, 16, dtype=dtype)
    model = model_of(weights)
    apply_quantization_config(model, QuantizationConfig(config_groups=groups_of, ignore=["lm_head"]))
    for name in shapes:
        observe(model.get_submodule(name))
    compressor = ModelCompressor.from_pretrained_model(model, form)
    compressor.compress_model(model)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tensors["model.norm.weight"] = ckpt.plain("model.norm.weight", ckpt.norm(16, dtype))
    ckpt.plain("lm_head.weight", tensors["lm_head.weight"])
    ckpt.write(tensors | (extra or {}), ckpt.config(torch_dtype=name_of(dtype)), second=second)
    compressor.update_config(str(ckpt.folder))
    stored = ckpt.read()
    for name in shapes:
        parts = {
            key.removeprefix(f"{name}."): value for key, value in stored.items() if key.startswith(f"{name}.weight")
        }
        scheme = model.get_submodule(name).quantization_scheme
        by_library = decompressed(parts, scheme, scheme.format.value)
        ckpt.expect(f"{name}.weight", by_library, RESTATED[scheme.format.value](parts, scheme.weights))


def linear(**weights: object) -> dict[str, QuantizationScheme]:
    """One group of all Linear layers with these arguments for their weights."""
    return {"group_0": QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))}


def preset(name: str) -> dict[str, QuantizationScheme]:
    """One group of all Linear layers with one of the library's named schemes."""
    return {"group_0": preset_name_to_scheme(name, ["Linear"])}


def scales_apart(name: str) -> bool:
    return "scale" in name or "zero_point" in name


def add(name: str, shows: str, run: Callable[[Checkpoint], None]) -> None:
    fixture(name, writer=WRITER, reader=READER, shows=shows)(run)


SHAPES = {Q: (40, 128), DOWN: (24, 256)}

add(
    "ct_pack_w4_g32_sym",
    "`pack-quantized`: int4, groups of 32, symmetric; scales in the other shard",
    lambda ckpt: make(ckpt, linear(num_bits=4, strategy="group", group_size=32), SHAPES, second=scales_apart),
)
add(
    "ct_pack_w4_g128_asym",
    "int4, groups of 128, zero points packed down the rows; f16",
    lambda ckpt: make(
        ckpt, linear(num_bits=4, strategy="group", group_size=128, symmetric=False), SHAPES, dtype=torch.float16
    ),
)
add(
    "ct_nvfp4",
    "`nvfp4-pack-quantized`: the global scale divides; an `input_global_scale` to ignore",
    lambda ckpt: make(
        ckpt,
        preset("NVFP4"),
        {Q: (24, 64), DOWN: (16, 144)},
    ),
)
add(
    "ct_mxfp4",
    "`mxfp4-pack-quantized`: scales are U8 exponents",
    lambda ckpt: make(ckpt, preset("MXFP4A16"), {Q: (24, 64), DOWN: (16, 160)}),
)
