"""Ternary weights of BitNet b1.58: four planes of two bits, and a scale that multiplies or divides."""

import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, WeightQuant, pack_weights, unpack_weights

from .checkpoint import EXPECTED, Checkpoint, fixture
from .restated import raw, widened

WRITER = "transformers 5.23.0 `pack_weights`"
SHAPES = {"self_attn.q_proj": (48, 40), "mlp.down_proj": (40, 72)}


def ternary(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values -1, 0, 1 and what they are divided by: onebitllms 0.0.4 `_weight_quant`."""
    scale = 1.0 / weight.abs().mean().clamp_(min=1e-05)
    return (weight * scale).round().clamp_(-1, 1), scale


def planes(packed: torch.Tensor) -> np.ndarray:
    """Row k * R + i has its code in bits 2k and 2k + 1 of row i, of R rows; a code is the value plus 1."""
    stored = raw(packed)
    return np.concatenate([(stored >> 2 * plane & 3).astype(np.float32) - 1 for plane in range(4)])


def offline(ckpt: Checkpoint, linear_class: str | None, dtype: torch.dtype, stored_as, read, restate) -> None:
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(40))}
    for module, shape in SHAPES.items():
        name = f"model.layers.0.{module}.weight"
        values, divisor = ternary(ckpt.normal(*shape))
        packed, scale = pack_weights(values), stored_as(divisor).reshape(1).to(dtype)
        tensors |= {name: packed, f"{name}_scale": scale}
        ckpt.expect(name, read(packed, scale), restate(planes(packed), widened(scale)))
    config = {"modules_to_not_convert": ["lm_head"], "quant_method": "bitnet"}
    if linear_class is not None:
        config |= {"linear_class": linear_class, "quantization_mode": "offline"}
    ckpt.write(tensors, ckpt.config(config, architectures=["BitNetForCausalLM"], model_type="bitnet"))


@torch.no_grad()
def by_autobitlinear(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What the layer makes of the identity: its weight, transposed."""
    layer = AutoBitLinear(packed.shape[1], packed.shape[0] * 4, bias=False)
    layer.weight.copy_(unpack_weights(packed, torch.float32))
    layer.weight_scale = scale.float()
    return layer(torch.eye(packed.shape[1])).T.contiguous()


@torch.no_grad()
def by_bitlinear(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The layer's last step on the product with the identity, of which the scale is 1."""
    layer = BitLinear(packed.shape[1], packed.shape[0] * 4, bias=False, dtype=torch.float32)
    product = torch.nn.functional.linear(torch.eye(packed.shape[1]), unpack_weights(packed, torch.float32))
    return layer.post_quant_process(product, scale.float(), torch.tensor(1.0)).T.contiguous()


@fixture(
    "bitnet_times",
    writer=WRITER,
    reader="transformers 5.23.0 `AutoBitLinear.forward` of the identity",
    shows="`linear_class: autobitlinear`: the bf16 scale is the mean of the absolute weights and multiplies",
)
def bitnet_times(ckpt: Checkpoint) -> None:
    offline(ckpt, "autobitlinear", torch.bfloat16, lambda divisor: 1 / divisor, by_autobitlinear, np.multiply)


@fixture(
    "bitnet_divided",
    writer=WRITER,
    reader="transformers 5.23.0 `BitLinear.post_quant_process` of the identity",
    shows="`linear_class: bitlinear`: the scale is one over that mean and divides",
)
def bitnet_divided(ckpt: Checkpoint) -> None:
    offline(ckpt, "bitlinear", torch.bfloat16, lambda divisor: divisor, by_bitlinear, np.divide)


@fixture(
    "bitnet_online",
    writer="torch 2.13.0, bf16",
    reader="as stored; `bitnet_online.weight_quant.npz`: transformers 5.23.0 `WeightQuant` in f32",
    shows="`quantization_mode: online`: master weights, not packed and not to be changed unless asked",
)
def bitnet_online(ckpt: Checkpoint) -> None:
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(40))}
    quantized: dict[str, np.ndarray] = {}
    for module, shape in SHAPES.items():
        name = f"model.layers.0.{module}.weight"
        tensors[name] = ckpt.plain(name, ckpt.normal(*shape, dtype=torch.bfloat16))
        quantized[name] = WeightQuant.apply(tensors[name].float()).numpy()
        scale = np.float32(1) / tensors[name].float().abs().mean().clamp(min=1e-5).numpy()
        assert np.array_equal(quantized[name], np.clip(np.rint(widened(tensors[name]) * scale), -1, 1) / scale)
    np.savez_compressed(EXPECTED / f"{ckpt.name}.weight_quant.npz", **quantized)
    config = {
        "linear_class": "autobitlinear",
        "modules_to_not_convert": ["lm_head"],
        "quant_method": "bitnet",
        "quantization_mode": "online",
    }
    ckpt.write(tensors, ckpt.config(config, architectures=["BitNetForCausalLM"], model_type="bitnet"))


@fixture(
    "bitnet_falcon",
    writer="onebitllms 0.0.4 `quantize_to_1bit`",
    reader="transformers 5.23.0 `BitLinear.post_quant_process` of the identity",
    shows="a whole model as Falcon-E's: no `linear_class` in the config, so the scale divides",
)
def bitnet_falcon(ckpt: Checkpoint) -> None:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():
        norm = parameter.ndim == 1
        parameter.data = ckpt.norm(len(parameter)) if norm else ckpt.normal(*parameter.shape, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as source:
        model.save_pretrained(source)
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}))).save_pretrained(source)
        onebitllms().quantize_to_1bit(source, str(ckpt.folder))
    for path in ckpt.folder.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    stored = ckpt.read()
    for name, tensor in stored.items():
        scale = stored.get(f"{name}_scale")
        if scale is not None:
            ckpt.expect(name, by_bitlinear(tensor, scale), planes(tensor) / widened(scale))
        elif name.endswith("weight"):
            ckpt.plain(name, tensor)


def onebitllms() -> ModuleType:
    """The module of its writer alone: the package itself imports kernels for a GPU."""
    place = Path(importlib.util.find_spec("onebitllms").origin).parent / "utils" / "quantization_utils.py"
    spec = importlib.util.spec_from_file_location("quantization_utils", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
