"""MXFP4 experts of gpt-oss, under the names of transformers and under OpenAI's own."""

import numpy as np
import torch
from modelopt.torch.quantization.qtensor import MXFP4QTensor
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from .checkpoint import Checkpoint, fixture
from .restated import E2M1, bits, e8m0, groups

WRITER = "nvidia-modelopt 0.47.0 `MXFP4QTensor.quantize`, laid out as published"
READER = "transformers 5.23.0 `_convert_moe_packed_tensors`"
EXPERTS, HIDDEN, INTERMEDIATE = 2, 96, 32


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of 16 bytes and a scale for each, of a weight [experts, out, in]."""
    made, scales = MXFP4QTensor.quantize(weight.clone(), 32)
    blocks = made._quantized_data.reshape(*weight.shape[:-1], -1, 16)
    return blocks, scales.reshape(blocks.shape[:-1])


def restated(blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """[experts, out, in]: the low nibble of a byte is the even column."""
    rows = blocks.flatten(-2).numpy()
    columns = rows.shape[-1] * 2
    return E2M1[bits(rows, 4, columns)] * groups(e8m0(scales.numpy()), columns)


def projections(ckpt: Checkpoint):
    """Name of a projection and what is stored of it. One block is all zero: its scale is the code 0."""
    for name, shape in {
        "gate_up_proj": (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        "down_proj": (EXPERTS, HIDDEN, INTERMEDIATE),
    }.items():
        weight = ckpt.normal(*shape)
        weight[0, 1, :32] = 0
        blocks, scales = quantized(weight)
        assert scales.min() == 0
        yield name, blocks, scales, ckpt.norm(shape[1]) - 1


@fixture(
    "gpt_oss",
    writer=WRITER,
    reader=READER,
    shows="transformers' names; the result is transposed, [experts, in, out]; scales in the other shard; a block of "
    "zeros, of which the scale is 2^-127",
)
def gpt_oss(ckpt: Checkpoint) -> None:
    prefix = "model.layers.0.mlp.experts."
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(HIDDEN))}
    router = "model.layers.0.mlp.router.weight"
    tensors[router] = ckpt.plain(router, ckpt.normal(EXPERTS, HIDDEN, dtype=torch.bfloat16))
    for name, blocks, scales, bias in projections(ckpt):
        tensors |= {f"{prefix}{name}_blocks": blocks, f"{prefix}{name}_scales": scales}
        tensors[f"{prefix}{name}_bias"] = ckpt.plain(f"{prefix}{name}_bias", bias.expand(EXPERTS, -1))
        value = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        ckpt.expect(prefix + name, value, restated(blocks, scales).swapaxes(-1, -2))
    skip = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = ckpt.config(
        {"modules_to_not_convert": skip, "quant_method": "mxfp4"},
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS,
    )
    ckpt.write(tensors, config, second=lambda name: name.endswith("_scales"))


@fixture(
    "gpt_oss_original",
    writer=WRITER,
    reader=READER + ", transposed back as OpenAI's reader has it",
    shows="OpenAI's names, `mlp1_weight.blocks`; [experts, out, in]; no `quantization_config`; a `norm.scale` that is "
    "a parameter",
)
def gpt_oss_original(ckpt: Checkpoint) -> None:
    prefix = "block.0.mlp."
    tensors = {prefix + "norm.scale": ckpt.plain(prefix + "norm.scale", ckpt.norm(HIDDEN))}
    tensors[prefix + "gate.weight"] = ckpt.plain(
        prefix + "gate.weight", ckpt.normal(EXPERTS, HIDDEN, dtype=torch.bfloat16)
    )
    for (_, blocks, scales, bias), name in zip(projections(ckpt), ("mlp1", "mlp2"), strict=True):
        tensors |= {f"{prefix}{name}_weight.blocks": blocks, f"{prefix}{name}_weight.scales": scales}
        tensors[f"{prefix}{name}_bias"] = ckpt.plain(f"{prefix}{name}_bias", bias.expand(EXPERTS, -1))
        value = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(-1, -2)
        ckpt.expect(f"{prefix}{name}_weight", value, restated(blocks, scales))
    ckpt.write(tensors, {"num_hidden_layers": 1, "num_experts": EXPERTS, "hidden_size": HIDDEN})
