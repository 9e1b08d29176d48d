"""NVIDIA's modelopt: models quantized and exported by itself."""

import contextlib
import copy
import io
import json
import warnings
from collections.abc import Callable

import modelopt.torch.quantization as mtq
import numpy as np
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.quant_utils import from_quantized_weight, to_quantized_weight
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
from transformers import Llama4ForCausalLM, Llama4TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from .checkpoint import Checkpoint, fixture
from .restated import E2M1, E4M3, bits, e8m0, groups, raw, spread, widened

WRITER = "nvidia-modelopt 0.47.0 `mtq.quantize`, `export_hf_checkpoint`"
NVFP4_READER = "nvidia-modelopt 0.47.0 `NVFP4QTensor.dequantize`"


SMALL = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(**others: object) -> PreTrainedModel:
    """A llama of one layer that is small enough."""
    return LlamaForCausalLM(LlamaConfig(architectures=["LlamaForCausalLM"], **SMALL | others))


def llama4() -> PreTrainedModel:
    """The same with experts stacked in one tensor, [experts, in, out]."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
    more = {"intermediate_size_mlp": 48, "head_dim": 16}
    return Llama4ForCausalLM(Llama4TextConfig(architectures=["Llama4ForCausalLM"], **SMALL | experts | more))


def fill(ckpt: Checkpoint, model: PreTrainedModel) -> PreTrainedModel:
    """Values that do not depend on how the model initializes itself."""
    model.to(torch.bfloat16)
    for parameter in model.parameters():
        norm = parameter.ndim == 1
        parameter.data = ckpt.norm(len(parameter)) if norm else ckpt.normal(*parameter.shape, dtype=torch.bfloat16)
    return model


def export(
    ckpt: Checkpoint,
    quantization: dict[str, object],
    model: PreTrainedModel | None = None,
    *,
    keep: tuple[str, ...] = ("config.json",),
    change: Callable[[PreTrainedModel], None] = lambda model: None,
) -> dict[str, torch.Tensor]:
    """Calibrates, exports, removes what has nothing to do with weights; returns the stored tensors."""
    model = fill(ckpt, model or llama())
    tokens = torch.randint(0, 8, (2, 24), generator=ckpt.random)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mtq.quantize(model, copy.deepcopy(quantization), lambda quantized: quantized(tokens))
        change(model)
        export_hf_checkpoint(model, export_dir=ckpt.folder)
    for path in ckpt.folder.iterdir():
        if path.suffix != ".safetensors" and path.name not in keep:
            path.unlink()
    return ckpt.read()


def is_weight(name: str) -> bool:
    return name.endswith(("weight", "experts.gate_up_proj", "experts.down_proj"))


def expect_all(
    ckpt: Checkpoint,
    stored: dict[str, torch.Tensor],
    library: Callable[[dict[str, torch.Tensor], str], torch.Tensor],
    arithmetic: Callable[[dict[str, torch.Tensor], str], np.ndarray],
) -> None:
    """Every weight with a scale by the two of them, times `pre_quant_scale` if there is one; the others as they are.

    A scale is `X.weight_scale` beside `X.weight`, and `X_weight_scale` beside a stack of experts `X`.
    """
    aliases = {}
    for name, tensor in stored.items():
        aliases[name.replace("proj_weight_scale", "proj_scale")] = tensor
    for name in filter(is_weight, stored):
        if f"{name}_scale" not in aliases:
            ckpt.plain(name, stored[name])
            continue
        found, restated = library(aliases, name), arithmetic(aliases, name)
        smooth = stored.get(name.removesuffix("weight") + "pre_quant_scale")
        if smooth is not None:
            found, restated = found * smooth.float(), restated * widened(smooth)
        ckpt.expect(name, found, restated)


# ---- NVFP4 ----


def nvfp4_by_library(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    packed = stored[name]
    shape = torch.Size((*packed.shape[:-1], packed.shape[-1] * 2))
    double = stored[f"{name}_scale_2"]
    return NVFP4QTensor(shape, torch.float32, packed).dequantize(
        dtype=torch.float32,
        scale=stored[f"{name}_scale"],
        double_scale=double if double.ndim == 0 else double.reshape(-1, 1, 1),
        block_sizes={-1: 16},
    )


def nvfp4(stored: dict[str, torch.Tensor], name: str) -> np.ndarray:
    packed = raw(stored[name])
    columns = packed.shape[-1] * 2
    double = raw(stored[f"{name}_scale_2"])
    scale = E4M3[raw(stored[f"{name}_scale"])] * (double.reshape(-1, 1, 1) if double.ndim else double)
    return E2M1[bits(packed, 4, columns)] * groups(scale, columns)


def turned_for(function: Callable) -> Callable:
    """A stack of experts is stored [experts, in, out], and packed along the axis in the middle."""

    def run(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor | np.ndarray:
        if "experts" not in name:
            return function(stored, name)
        parts = {name: stored[name].mT.contiguous(), f"{name}_scale": stored[f"{name}_scale"].mT.contiguous()}
        return function(parts | {f"{name}_scale_2": stored[f"{name}_scale_2"]}, name).swapaxes(-1, -2)

    return run


@fixture(
    "modelopt_nvfp4",
    writer=WRITER,
    reader=NVFP4_READER,
    shows="`quantization_config` in config.json; `weight_scale_2` multiplies; `input_scale` to ignore",
)
def modelopt_nvfp4(ckpt: Checkpoint) -> None:
    expect_all(ckpt, export(ckpt, mtq.NVFP4_DEFAULT_CFG), nvfp4_by_library, nvfp4)


@fixture(
    "modelopt_nvfp4_hf_quant_config",
    writer=WRITER + ", the older place of the config",
    reader=NVFP4_READER,
    shows="`hf_quant_config.json` alone says that it is quantized; config.json does not",
)
def modelopt_nvfp4_hf_quant_config(ckpt: Checkpoint) -> None:
    stored = export(ckpt, mtq.NVFP4_DEFAULT_CFG, keep=("config.json", "hf_quant_config.json"))
    path = ckpt.folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config, indent=2) + "\n")
    expect_all(ckpt, stored, nvfp4_by_library, nvfp4)


@fixture(
    "modelopt_nvfp4_awq",
    writer=WRITER + "; the factors of `pre_quant_scale` are set, since its search for them needs a GPU",
    reader=NVFP4_READER + ", times `pre_quant_scale` of each column",
    shows="`quant_algo: NVFP4_AWQ`: `pre_quant_scale` [in] of one module; of the others it is in the norm or the layer "
    "before them",
)
def modelopt_nvfp4_awq(ckpt: Checkpoint) -> None:
    def smooth(model: PreTrainedModel) -> None:
        shared: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if getattr(getattr(module, "weight_quantizer", None), "is_enabled", False):
                # Modules that read the same input have the same factors.
                place = name.rsplit(".", 1)[0] + ("o" if "o_proj" in name else "d" if "down_proj" in name else "")
                factor = shared.setdefault(place, torch.exp(torch.randn(module.in_features, generator=ckpt.random) / 2))
                module.weight.data = (module.weight.data * factor).to(module.weight.dtype)
                module.weight_quantizer.amax = module.weight.data.abs().amax().float()
                module.input_quantizer.pre_quant_scale = (1 / factor).to(module.weight.dtype)

    stored = export(ckpt, mtq.NVFP4_DEFAULT_CFG, change=smooth)
    assert any(name.endswith("pre_quant_scale") for name in stored)
    expect_all(ckpt, stored, nvfp4_by_library, nvfp4)


@fixture(
    "modelopt_nvfp4_llama4",
    writer=WRITER,
    reader=NVFP4_READER + ", of the transposed experts",
    shows="experts `gate_up_proj` U8 [E, in / 2, out] with `gate_up_proj_weight_scale` [E, in / 16, out]: packed along "
    "the middle axis",
)
def modelopt_nvfp4_llama4(ckpt: Checkpoint) -> None:
    stored = export(ckpt, mtq.NVFP4_DEFAULT_CFG, llama4())
    expect_all(ckpt, stored, turned_for(nvfp4_by_library), turned_for(nvfp4))


@fixture(
    "modelopt_nvfp4_experts",
    writer="nvidia-modelopt 0.47.0 `NVFP4QTensor.get_weights_scaling_factor`, `to_quantized_weight`",
    reader=NVFP4_READER,
    shows="experts U8 [E, out, in / 2] with `weight_scale_2` [E]",
)
def modelopt_nvfp4_experts(ckpt: Checkpoint) -> None:
    tensors = {"model.norm.weight": ckpt.norm(16)}
    for projection, shape in {"gate_up_proj": (3, 20, 32), "down_proj": (3, 16, 48)}.items():
        name, weight = f"model.layers.0.mlp.experts.{projection}", ckpt.normal(*shape, dtype=torch.bfloat16)
        double = weight.float().abs().amax((1, 2)) / (6 * 448)
        scale, _ = NVFP4QTensor.get_weights_scaling_factor(weight, 16, double.reshape(-1, 1, 1))
        packed = to_quantized_weight(weight, scale, "nvfp4", double, 16)
        tensors |= {name: packed, f"{name}_weight_scale": scale, f"{name}_weight_scale_2": double}
    modelopt = {"producer": {"name": "modelopt"}, "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    ckpt.write(tensors, ckpt.config({**modelopt, "quant_method": "modelopt"}))
    expect_all(ckpt, tensors, nvfp4_by_library, nvfp4)


# ---- FP8 ----


def fp8_by_library(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """`FP8QTensor.dequantize` for a grid and for one scale; rows and experts by the axis that the exporter divided."""
    codes, scale = stored[name], stored[f"{name}_scale"]
    if scale.ndim == 4:
        grid = scale.reshape(scale.shape[0], scale.shape[2])
        kept = FP8QTensor(codes.shape, torch.float32, codes)
        return kept.dequantize(torch.float32, scale=grid, block_sizes={-1: 128, -2: 128})
    if scale.ndim == 0:
        return from_quantized_weight(codes, scale, "fp8", torch.float32)
    return codes.float() * scale.reshape(-1, *[1] * (codes.ndim - 1))


def fp8(stored: dict[str, torch.Tensor], name: str) -> np.ndarray:
    codes, scale = raw(stored[name]), raw(stored[f"{name}_scale"])
    if scale.ndim == 4:
        scale = spread(scale[:, 0, :, 0], codes.shape, (128, 128))
    elif scale.ndim == 1:
        scale = scale.reshape(-1, *[1] * (codes.ndim - 1))
    return E4M3[codes] * scale


def add(
    name: str,
    shows: str,
    quantization: dict[str, object],
    model: Callable[[], PreTrainedModel] = llama,
    reader: str = "nvidia-modelopt 0.47.0 `from_quantized_weight`",
) -> None:
    run = lambda ckpt: expect_all(ckpt, export(ckpt, quantization, model()), fp8_by_library, fp8)  # noqa: E731
    fixture(name, writer=WRITER, reader=reader, shows=shows)(run)


TORCH = "torch 2.13.0: `w.float() * s`"
KV = {**mtq.FP8_DEFAULT_CFG, "quant_cfg": [*mtq.FP8_DEFAULT_CFG["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]]}
add("modelopt_fp8", "`weight_scale` []; `input_scale`, `k_scale` and `v_scale` to ignore", KV)
add(
    "modelopt_fp8_channel",
    "`FP8_PER_CHANNEL_PER_TOKEN`: `weight_scale` [out]",
    mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    reader=TORCH,
)
add(
    "modelopt_fp8_blocks",
    "`fp8_pb_wo`: `weight_scale` [rows / 128, 1, columns / 128, 1] and no block size in the config; ragged",
    mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
    lambda: llama(hidden_size=132, intermediate_size=20, vocab_size=8),
    reader="nvidia-modelopt 0.47.0 `FP8QTensor.dequantize`",
)
add(
    "modelopt_fp8_llama4",
    "experts with one scale []: `gate_up_proj_weight_scale`",
    mtq.FP8_DEFAULT_CFG,
    llama4,
)
add(
    "modelopt_fp8_channel_llama4",
    "experts with `gate_up_proj_weight_scale` [E], the rest with a scale for each row",
    mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    llama4,
    reader=TORCH,
)


@fixture(
    "modelopt_mxfp8",
    writer=WRITER,
    reader="nvidia-modelopt 0.47.0 `MXFP8QTensor.dequantize`",
    shows="`quant_algo: MXFP8`: F8_E4M3 with U8 exponents, groups of 32",
)
def modelopt_mxfp8(ckpt: Checkpoint) -> None:
    def by_library(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        codes = stored[name]
        kept = MXFP8QTensor(codes.shape, torch.float32, codes)
        return kept.dequantize(torch.float32, scale=stored[f"{name}_scale"])

    def arithmetic(stored: dict[str, torch.Tensor], name: str) -> np.ndarray:
        codes = raw(stored[name])
        return E4M3[codes] * groups(e8m0(raw(stored[f"{name}_scale"])), codes.shape[-1])

    stored = export(ckpt, mtq.MXFP8_DEFAULT_CFG, llama(intermediate_size=64))
    expect_all(ckpt, stored, by_library, arithmetic)
