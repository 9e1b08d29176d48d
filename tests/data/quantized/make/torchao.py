"""torchao: tensor subclasses flattened into a safetensors file, which its metadata describes."""

import numpy as np
import torch
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
    quantize_,
)
from torchao.quantization.quant_primitives import dequantize_affine

from .checkpoint import Checkpoint, fixture
from .restated import E4M3, groups, raw, widened

SHAPES = {"q_proj": (24, 64), "down_proj": (12, 96)}
CONFIGS = {
    "float8": Float8WeightOnlyConfig(),
    "int8": Int8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(torch.int4, PerGroup(32), MappingType.ASYMMETRIC),
}


@fixture(
    "torchao",
    writer="torchao 0.18.0 `quantize_`, `flatten_tensor_state_dict`",
    reader="torchao 0.18.0 `dequantize` to f32, scales cast to f32",
    shows="`X._weight_qdata` as Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor; zero points; types in the metadata",
)
def torchao(ckpt: Checkpoint) -> None:
    weights = {
        f"model.{kind}.{module}": ckpt.normal(*shape, dtype=torch.bfloat16)
        for kind in CONFIGS
        for module, shape in SHAPES.items()
    }
    layers = {kind: torch.nn.ModuleDict() for kind in CONFIGS}
    for name, weight in weights.items():
        _, kind, module = name.split(".")
        layers[kind][module] = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
        layers[kind][module].weight.data = weight
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict(layers)})
    for kind, config in CONFIGS.items():
        quantize_(model, config, filter_fn=lambda one, name, kind=kind: f".{kind}." in name)
    norm = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(40))}
    tensors, metadata = flatten_tensor_state_dict(model.state_dict() | norm)
    for module in weights:
        weight = model.get_submodule(module).weight
        codes, scale = tensors[f"{module}._weight_qdata"], tensors[f"{module}._weight_scale"]
        numbers = E4M3[raw(codes)] if ".float8." in module else raw(codes).astype(np.float32)
        zero = tensors.get(f"{module}._weight_zero_point")
        columns = numbers.shape[1]
        if zero is not None:
            numbers = numbers - groups(
                (raw(zero) if zero.dtype == torch.int8 else widened(zero)).astype(np.float32), columns
            )
        if ".int4." in module:
            found = dequantize_affine(
                weight.qdata, weight.block_size, scale.float(), zero, torch.int8, -8, 7, output_dtype=torch.float32
            )
        else:
            weight.scale = scale.float()
            found = weight.dequantize(torch.float32)
        ckpt.expect(f"{module}.weight", found, numbers * groups(widened(scale), columns))
    ckpt.write(tensors, ckpt.config(), metadata=metadata)


@fixture(
    "torchao_experts",
    writer="torchao 0.18.0 `FqnToConfig` of `Float8WeightOnlyConfig`, `flatten_tensor_state_dict`",
    reader="torchao 0.18.0 `dequantize` to f32, scales cast to f32",
    shows="stacked experts, parameters other than `weight`: `experts._gate_up_proj_qdata`",
)
def torchao_experts(ckpt: Checkpoint) -> None:
    experts = torch.nn.Module()
    for name, shape in {"gate_up_proj": (2, 16, 24), "down_proj": (2, 24, 16)}.items():
        experts.register_parameter(name, torch.nn.Parameter(ckpt.normal(*shape, dtype=torch.bfloat16), False))
    prefix = "model.layers.0.mlp.experts"
    model = experts
    for part in reversed(prefix.split(".")):
        model = torch.nn.ModuleDict({part: model})
    quantize_(model, FqnToConfig({r"re:.*experts\..*_proj": Float8WeightOnlyConfig()}), filter_fn=None)
    tensors, metadata = flatten_tensor_state_dict(
        model.state_dict() | {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(40))}
    )
    for name, weight in experts.named_parameters():
        codes, scale = tensors[f"{prefix}._{name}_qdata"], tensors[f"{prefix}._{name}_scale"]
        weight.scale = scale.float()
        ckpt.expect(f"{prefix}.{name}", weight.dequantize(torch.float32), E4M3[raw(codes)] * widened(scale))
    ckpt.write(tensors, ckpt.config(), metadata=metadata)
