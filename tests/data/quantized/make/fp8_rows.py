"""FP8 with a scale for a tensor or a row, and the names of DeepSeek V4, Mistral and MXFP8."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import fbgemm_fp8
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from .checkpoint import Checkpoint, fixture
from .fp8_blocks import DEQUANTIZE, QUANTIZE, in_torch, quantized, restated
from .restated import E2M1, E4M3, bits, e8m0, groups, raw, widened

TORCH = "torch 2.13.0: `w.float() * s`"
E4M3_MAX = 448


def tensor_wise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and one scale [], as AutoFP8 and ComfyUI compute them."""
    scale = weight.abs().amax().float() / E4M3_MAX
    return (weight.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def row_wise(weight: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and a scale for each row: what fbgemm's ``quantize_fp8_per_row`` computes on a GPU."""
    scale = weight.abs().amax(-1).float() / E4M3_MAX
    return (weight.float() / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


@fixture(
    "deepseek_v4",
    writer=QUANTIZE + ", `ue8m0`; nvidia-modelopt 0.47.0 `MXFP4QTensor` for the experts",
    reader=DEQUANTIZE + "; ragged blocks: two lines of torch",
    shows="`X.scale`, F8_E8M0; FP8 in blocks of 128 and FP4 experts in I8, groups of 32; `hc_attn_scale` "
    "and a `q_norm.scale` that are parameters; scales in the other shard",
)
def deepseek_v4(ckpt: Checkpoint) -> None:
    library = Fp8Dequantize(None)
    tensors: dict[str, torch.Tensor] = {}
    for name in ("layers.0.attn_norm.weight", "layers.0.attn.q_norm.scale"):
        tensors[name] = ckpt.plain(name, ckpt.norm(32))
    tensors["layers.0.hc_attn_scale"] = ckpt.plain("layers.0.hc_attn_scale", ckpt.norm(3, torch.float32))
    for module, shape in {"attn.wkv": (128, 256), "attn.wo_b": (130, 137)}.items():
        name = f"layers.0.{module}"
        codes, scales = quantized(ckpt.normal(*shape), scale_fmt="ue8m0")
        tensors |= {f"{name}.weight": codes, f"{name}.scale": scales}
        whole = not any(size % 128 for size in shape)
        value = library._dequantize_one(codes, scales, torch.float32) if whole else in_torch(codes, scales.float())
        ckpt.expect(f"{name}.weight", value, restated(codes, e8m0(raw(scales))))
    for expert in range(2):
        for module, shape in {"w1": (24, 64), "w2": (64, 32), "w3": (24, 64)}.items():
            name, weight = f"layers.0.ffn.experts.{expert}.{module}", ckpt.normal(*shape)
            made, scales = MXFP4QTensor.quantize(weight, 32)
            codes = made._quantized_data.view(torch.int8)
            scales = scales.reshape(shape[0], -1).view(torch.float8_e8m0fnu)
            tensors |= {f"{name}.weight": codes, f"{name}.scale": scales}
            again = E2M1[bits(raw(codes).view(np.uint8), 4, shape[1])] * groups(e8m0(raw(scales)), shape[1])
            ckpt.expect(f"{name}.weight", library._dequantize_one(codes, scales, torch.float32), again)
    fp8 = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }
    config = ckpt.config(fp8, architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", expert_dtype="fp4")
    ckpt.write(tensors, config, second=lambda name: name.endswith(".scale"))


@fixture(
    "mxfp8",
    writer="nvidia-modelopt 0.47.0 `MXFP8QTensor`, under the names of transformers' `mxfp8`",
    reader=DEQUANTIZE,
    shows="`quant_method: mxfp8`: F8_E4M3 with U8 exponents, groups of 32",
)
def mxfp8(ckpt: Checkpoint) -> None:
    in_groups(ckpt, {"self_attn.o_proj.weight": (40, 96), "mlp.down_proj.weight": (17, 64)}, "_scale_inv")


@fixture(
    "mxfp8_experts",
    writer="nvidia-modelopt 0.47.0 `MXFP8QTensor`, under the names that transformers' `inkling2_text` reads",
    reader=DEQUANTIZE,
    shows="experts `w13_weight` + `w13_weight_scale`; a `q_l2_clip.scale` that is a parameter",
)
def mxfp8_experts(ckpt: Checkpoint) -> None:
    name = "model.layers.0.attn.q_l2_clip.scale"
    shapes = {"mlp.experts.w13_weight": (2, 24, 64), "mlp.experts.w2_weight": (2, 40, 32)}
    in_groups(ckpt, shapes, "_scale", {name: ckpt.plain(name, ckpt.norm(4))})


def in_groups(
    ckpt: Checkpoint, shapes: dict[str, tuple[int, ...]], suffix: str, others: dict[str, torch.Tensor] | None = None
) -> None:
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(64)), **(others or {})}
    for module, shape in shapes.items():
        name, weight = f"model.layers.0.{module}", ckpt.normal(*shape)
        scales = MXFP8QTensor.get_weights_scaling_factor(weight)
        codes = MXFP8QTensor.quantize_with_scale(weight, scales)
        tensors |= {name: codes, f"{name}{suffix}": scales}
        value = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
        ckpt.expect(name, value, E4M3[raw(codes)] * groups(e8m0(raw(scales)), shape[-1]))
    fp8 = {"activation_scheme": "dynamic", "quant_method": "mxfp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]}
    ckpt.write(tensors, ckpt.config(fp8))


Codes = tuple[torch.Tensor, torch.Tensor]


def modules(
    ckpt: Checkpoint,
    shapes: dict[str, tuple[int, ...]],
    make: Callable[[torch.Tensor], Codes],
    suffix: str,
    **others: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """A scale under ``suffix`` for each weight, and the tensors ``others`` beside each of them."""
    tensors: dict[str, torch.Tensor] = {}
    for module, shape in shapes.items():
        codes, scale = make(ckpt.normal(*shape, dtype=torch.bfloat16))
        tensors |= {f"{module}.weight": codes, f"{module}{suffix}": scale}
        tensors |= {f"{module}.{name}": tensor.clone() for name, tensor in others.items()}
        ckpt.expect(f"{module}.weight", codes.float() * scale.float(), E4M3[raw(codes)] * widened(scale))
    return tensors


SHAPES = {"model.layers.0.self_attn.q_proj": (24, 50), "model.layers.0.mlp.down_proj": (17, 32)}


@fixture(
    "mistral_qscale",
    writer="torch 2.13.0, names of Mistral's `consolidated.safetensors`",
    reader=TORCH,
    shows="`X.qscale_weight` multiplies, `X.qscale_act` to ignore; params.json instead of config.json",
)
def mistral_qscale(ckpt: Checkpoint) -> None:
    shapes = {"layers.0.attention.wq": (24, 50), "layers.0.feed_forward.w2": (17, 32)}
    tensors = modules(ckpt, shapes, tensor_wise, ".qscale_weight", qscale_act=torch.tensor(0.0123))
    tensors["norm.weight"] = ckpt.plain("norm.weight", ckpt.norm(24))
    ckpt.write(tensors, file="consolidated.safetensors")
    params = {"dim": 24, "n_layers": 1, "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    (ckpt.folder / "params.json").write_text(json.dumps(params, indent=2) + "\n")


@fixture(
    "fp8_autofp8",
    writer="torch 2.13.0, names of neuralmagic's AutoFP8",
    reader=TORCH,
    shows="`quant_method: fp8` without `weight_block_size`: one `weight_scale` [], `input_scale` to ignore",
)
def fp8_autofp8(ckpt: Checkpoint) -> None:
    tensors = modules(ckpt, SHAPES, tensor_wise, ".weight_scale", input_scale=torch.tensor(0.0123))
    tensors["model.norm.weight"] = ckpt.plain("model.norm.weight", ckpt.norm(24))
    tensors["lm_head.weight"] = ckpt.plain("lm_head.weight", ckpt.normal(8, 24, dtype=torch.bfloat16))
    config = {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}
    ckpt.write(tensors, ckpt.config(config))


@fixture(
    "fp8_embedding",
    writer="torch 2.13.0, names of Qwen's FP8 embedding",
    reader=TORCH,
    shows="an embedding with `weight_scale` [1] beside a layer with a grid of scales",
)
def fp8_embedding(ckpt: Checkpoint) -> None:
    embedding = "model.embed_tokens.weight"
    tensors = modules(ckpt, {"model.embed_tokens": (20, 32)}, tensor_wise, ".weight_scale")
    tensors[f"{embedding}_scale"] = tensors[f"{embedding}_scale"].reshape(1)
    name = "model.layers.0.self_attn.o_proj.weight"
    codes, scales = quantized(ckpt.normal(130, 40))
    tensors |= {name: codes, f"{name}_scale_inv": scales}
    ckpt.expect(name, in_torch(codes, scales), restated(codes, raw(scales)))
    tensors["model.norm.weight"] = ckpt.plain("model.norm.weight", ckpt.norm(32))
    config = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    ckpt.write(tensors, ckpt.config({**config, "modules_to_convert": ["model.embed_tokens"]}))


@fixture(
    "fbgemm",
    writer="transformers 5.23.0 `FbgemmFp8Quantize`, its kernel in torch",
    reader=TORCH,
    shows="`weight_scale` [out, 1] in f32",
)
def fbgemm(ckpt: Checkpoint) -> None:
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    model = LlamaForCausalLM(config)
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(32))}
    with mock.patch.object(fbgemm_fp8, "quantize_fp8_per_row", row_wise, create=True):
        for module, shape in {"self_attn.q_proj": (32, 32), "mlp.down_proj": (32, 48)}.items():
            name = f"model.layers.0.{module}.weight"
            weight = {name: [ckpt.normal(*shape, dtype=torch.bfloat16)]}
            made = fbgemm_fp8.FbgemmFp8Quantize(None).convert(weight, model=model)
            tensors |= {key: value.detach() for key, value in made.items()}
            codes, scale = tensors[name], tensors[f"{name}_scale"]
            ckpt.expect(name, codes.float() * scale, E4M3[raw(codes)] * raw(scale))
    fp8 = {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"], "quant_method": "fbgemm_fp8"}
    ckpt.write(tensors, ckpt.config(fp8))


@fixture(
    "fbgemm_llama4",
    writer="transformers 5.23.0 `FbgemmFp8Quantize`, its kernel in torch",
    reader="torch 2.13.0, as `FbgemmFp8Llama4TextExperts.forward` uses the scales",
    shows="experts [E, in, out]: `gate_up_proj_scale` [E, 1, out]; `down_proj_scale` [E, out, 1], which runs "
    "along the last axis",
)
def fbgemm_llama4(ckpt: Checkpoint) -> None:
    experts, hidden, inner = 2, 24, 20
    config = SimpleNamespace(num_local_experts=experts, hidden_size=hidden, intermediate_size=inner, hidden_act="silu")
    module = fbgemm_fp8.FbgemmFp8Llama4TextExperts(config)
    prefix = "language_model.model.layers.0.feed_forward.experts."
    norm = "language_model.model.norm.weight"
    tensors = {norm: ckpt.plain(norm, ckpt.norm(hidden))}
    shapes = {"gate_up_proj": (experts, hidden, 2 * inner), "down_proj": (experts, inner, hidden)}
    for name, shape in shapes.items():
        # Its own quantizer looks the module up in the model; the module itself is the model here.
        weight = {name: [ckpt.normal(*shape, dtype=torch.bfloat16)]}
        with mock.patch.object(fbgemm_fp8, "quantize_fp8_per_row", row_wise, create=True):
            made = fbgemm_fp8.FbgemmFp8Quantize(None).convert(weight, model=module)
        codes, scale = (value.detach().contiguous() for value in made.values())
        assert codes.shape == shape
        assert scale.shape == getattr(module, f"{name}_scale").shape
        tensors |= {prefix + name: codes, f"{prefix}{name}_scale": scale}
        along = scale if name == "gate_up_proj" else scale.transpose(1, 2)
        ckpt.expect(prefix + name, codes.float() * along, E4M3[raw(codes)] * raw(scale).reshape(experts, 1, -1))
    fp8 = {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"], "quant_method": "fbgemm_fp8"}
    ckpt.write(tensors, ckpt.config(fp8, architectures=["Llama4ForConditionalGeneration"], model_type="llama4"))


def comfy(ckpt: Checkpoint, suffix: str, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    prefix = "model.diffusion_model.double_blocks.0.img_attn."
    shapes = {f"{prefix}qkv": (36, 24), f"{prefix}proj": (12, 33)}
    tensors = modules(ckpt, shapes, tensor_wise, suffix, **others)
    for name, tensor in {"qkv.bias": ckpt.norm(36), "norm.query_norm.scale": ckpt.norm(12)}.items():
        tensors[prefix + name] = ckpt.plain(prefix + name, tensor)
    return tensors


@fixture(
    "comfy_scaled_fp8",
    writer="torch 2.13.0, names of ComfyUI's `scaled_fp8`",
    reader=TORCH,
    shows="a single file without a config: `X.scale_weight` [], `X.scale_input` to ignore, the marker `scaled_fp8`, "
    "and a norm called `scale`",
)
def comfy_scaled_fp8(ckpt: Checkpoint) -> None:
    tensors = comfy(ckpt, ".scale_weight", scale_input=torch.tensor(1.0))
    tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    ckpt.write(tensors, file="flux_scaled_fp8.safetensors")


@fixture(
    "comfy_quant_fp8",
    writer="torch 2.13.0, names of ComfyUI's `comfy_quant`",
    reader=TORCH,
    shows="a single file without a config: `X.weight_scale` [] and `X.comfy_quant`, the JSON of a layer in U8",
)
def comfy_quant_fp8(ckpt: Checkpoint) -> None:
    mark = torch.frombuffer(bytearray(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    tensors = comfy(ckpt, ".weight_scale", input_scale=torch.tensor(1.0), comfy_quant=mark)
    ckpt.write(tensors, file="flux_fp8_mixed.safetensors")
