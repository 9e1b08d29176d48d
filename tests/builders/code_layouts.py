"""Folders of quantized weights with random codes in the layouts of published checkpoints, and their values."""

import json

import ml_dtypes
import numpy as np

from builders.packed_codes import AWQ_ORDER, stream, words
from safeload.numpy import save_file

NAME = "model.layers.0.mlp.up_proj"
FLOATS = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _away_from_zero(values):
    """Values whose 8 leading bits float16 can hold: those of BF16 are exact there."""
    return np.where(np.abs(values) < 2.0**-16, 2.0**-16, values)


def _random(dtype, group, bits, seed, shape):
    """Codes, scales and zero points."""
    rng, (rows, columns) = np.random.default_rng([seed, bits, group, *dtype.encode()]), shape
    codes = rng.integers(0, 1 << bits, shape, dtype=np.uint8)
    scales = _away_from_zero(rng.standard_normal((rows, columns // group)) * 0.02).astype(FLOATS[dtype])
    zeros = rng.integers(0, 1 << bits, scales.shape, dtype=np.uint8)
    return codes, scales, zeros


def _spread(grid, group):
    return np.repeat(grid, group, axis=-1)


def _value(codes, zeros, scales, group):
    return (codes.astype(np.float32) - _spread(zeros.astype(np.float32), group)) * _spread(
        scales.astype(np.float32), group
    )


def _u32(raw):
    return np.ascontiguousarray(raw).view("<u4").view(np.int32)


def awq(dtype, group, seed, shape, zero=None):
    codes, scales, zeros = _random(dtype, group, 4, seed, shape)
    zeros = zeros if zero is None else np.full_like(zeros, zero)
    parts = {
        "qweight": _u32(words(np.ascontiguousarray(codes.T)[None], 4, AWQ_ORDER)[0]),
        "qzeros": _u32(words(np.ascontiguousarray(zeros.T)[None], 4, AWQ_ORDER)[0]),
        "scales": scales.T.copy(),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return parts, config, _value(codes, zeros, scales, group)


def gptq(dtype, group, seed, shape, bits=4, zero=None, version="gptq", order=None):
    codes, scales, zeros = _random(dtype, group, bits, seed, shape)
    added = int(version == "gptq")
    zeros = np.maximum(zeros, added) if zero is None else np.full_like(zeros, zero)
    down = stream(np.ascontiguousarray(codes), bits).view("<u4").T
    parts = {
        "qweight": np.ascontiguousarray(down).view(np.int32),
        "qzeros": _u32(stream(np.ascontiguousarray(zeros.T - np.uint8(added)), bits)),
        "scales": scales.T.copy(),
        "g_idx": (np.arange(shape[1]) // group).astype(np.int32),
    }
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": order is not None,
        "sym": zero is not None,
    }
    values = _value(codes, zeros, scales, group)
    if order is not None:
        parts["g_idx"] = parts["g_idx"][::-1].copy()
        values = _value(codes, zeros[:, ::-1], scales[:, ::-1], group)
    return parts, {**config, "checkpoint_format": version}, values


def compressed(dtype, group, seed, shape, bits=4, symmetric=True):
    codes, scales, zeros = _random(dtype, group, bits, seed, shape)
    zeros = np.full_like(zeros, 1 << bits - 1) if symmetric else zeros
    parts = {
        "weight_packed": _u32(stream(codes, bits)),
        "weight_scale": scales,
        "weight_shape": np.int64(shape),
    }
    if not symmetric:
        down = stream(np.ascontiguousarray(zeros.T), bits).view("<u4").T
        parts["weight_zero_point"] = np.ascontiguousarray(down).view(np.int32)
    arguments = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    return parts, _groups("pack-quantized", arguments), _value(codes, zeros, scales, group)


def compressed_bytes(dtype, group, seed, shape, bits=4, symmetric=True):
    """A byte holds one code, which is a signed integer."""
    parts, config, values = compressed(dtype, group, seed, shape, bits, symmetric)
    codes, _, zeros = _random(dtype, group, bits, seed, shape)
    half = 1 << bits - 1
    parts = {"weight": codes.astype(np.int8) - np.int8(half), "weight_scale": parts["weight_scale"]}
    if not symmetric:
        parts["weight_zero_point"] = zeros.astype(np.int8) - np.int8(half)
    return parts, _groups("naive-quantized", config["config_groups"]["group_0"]["weights"]), values


def _groups(layout, weights):
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "format": layout}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def int8_rows(dtype, seed, shape):
    codes, scales, _ = _random(dtype, shape[1], 8, seed, shape)
    parts = {"weight": codes.view(np.int8), "weight_scale": scales}
    arguments = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return (
        parts,
        _groups("int-quantized", arguments),
        _value(codes.view(np.int8), np.zeros_like(scales), scales, shape[1]),
    )


def mlx(dtype, group, seed, shape, bits=4, zero=None):
    codes, scales, _ = _random(dtype, group, bits, seed, shape)
    biases = _away_from_zero(np.random.default_rng(seed).standard_normal(scales.shape) * 0.1).astype(FLOATS[dtype])
    biases = biases if zero is None else (scales.astype(np.float32) * -zero).astype(FLOATS[dtype])
    parts = {"weight": _u32(stream(codes, bits)).view(np.uint32), "scales": scales, "biases": biases}
    wide = codes.astype(np.float32) * _spread(scales.astype(np.float32), group)
    settings = {"group_size": group, "bits": bits, "mode": "affine"}
    return parts, settings, wide + _spread(biases.astype(np.float32), group)


def mxfp4(seed, shape, low=100, high=130):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    scales = rng.integers(low, high, (shape[0], shape[1] // 32), dtype=np.uint8)
    parts = {"weight_packed": stream(codes, 4), "weight_scale": scales}
    arguments = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    values = E2M1[codes] * _spread(np.ldexp(np.float32(1), scales.astype(int) - 127), 32)
    return parts, _groups("mxfp4-pack-quantized", {**arguments, "scale_dtype": "torch.uint8"}), values


def nvfp4(seed, shape, factor, modelopt):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    scales = rng.uniform(1, 448, (shape[0], shape[1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    factor = np.float32(factor)
    names = ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")
    parts = {names[0]: stream(codes, 4), "weight_scale": scales, names[1]: factor if modelopt else factor[None]}
    shared = scales.astype(np.float32) * factor if modelopt else scales.astype(np.float32) / factor
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if not modelopt:
        arguments = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
        config = _groups("nvfp4-pack-quantized", arguments)
    return parts, config, E2M1[codes] * _spread(shared, 16)


def fp8(seed, shape, block, scale=np.float32, powers=False):
    """Blocks of rows and columns; 0 for a whole side."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 127, shape, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    sides = [-(-side // (own or side)) for side, own in zip(shape, block, strict=True)]
    scales = np.exp2(rng.integers(-9, 3, sides)) if powers else rng.uniform(0.001, 0.01, sides)
    scales = scales.astype(scale)
    down, across = (np.arange(side) // (own or side) for side, own in zip(shape, block, strict=True))
    values = codes.astype(np.float32) * scales.astype(np.float32)[down[:, None], across]
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if block == (128, 128):
        return {"weight": codes, "weight_scale_inv": scales}, {**config, "weight_block_size": [128, 128]}, values
    strategy = "tensor" if block == (0, 0) else "channel"
    stored = scales.reshape(1) if strategy == "tensor" else scales
    arguments = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    return {"weight": codes, "weight_scale": stored}, _groups("float-quantized", arguments), values


def write(folder, made, dtype="float16"):
    """A Llama whose only quantized weight is the projection `NAME`; returns the values of that weight."""
    parts, config, values = made
    rows, columns = values.shape
    tensors = {f"{NAME}.{suffix}": np.asarray(array) for suffix, array in parts.items()}
    tensors["model.norm.weight"] = np.ones(columns, {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": dtype, "hidden_size": columns,
        "intermediate_size": rows, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    own = (
        {"quantization": config, "quantization_config": config} if "mode" in config else {"quantization_config": config}
    )
    (folder / "config.json").write_text(json.dumps({**settings, **own}))
    return np.asarray(values, np.float32)
