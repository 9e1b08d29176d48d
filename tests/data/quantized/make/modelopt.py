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
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from transformers import LlamaConfig, LlamaForCausalLM

from .checkpoint import Checkpoint, fixture
from .restated import E2M1, E4M3, bits, groups, raw, widened

WRITER = "nvidia-modelopt 0.47.0 `mtq.quantize`, `export_hf_checkpoint`"
NVFP4_READER = "nvidia-modelopt 0.47.0 `NVFP4QTensor.dequantize`"


def llama(ckpt: Checkpoint) -> LlamaForCausalLM:
    """A llama of one layer that is small enough."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        norm = parameter.ndim == 1
        parameter.data = ckpt.norm(len(parameter)) if norm else ckpt.normal(*parameter.shape, dtype=torch.bfloat16)
    return model


def export(
    ckpt: Checkpoint, quantization: dict, *, keep: tuple[str, ...] = ("config.json",)
) -> dict[str, torch.Tensor]:
    """Calibrates, exports, removes what has nothing to do with weights; returns the stored tensors."""
    model = llama(ckpt)
    tokens = torch.randint(0, 16, (2, 24), generator=ckpt.random)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mtq.quantize(model, copy.deepcopy(quantization), lambda quantized: quantized(tokens))
        export_hf_checkpoint(model, export_dir=ckpt.folder)
    for path in ckpt.folder.iterdir():
        if path.suffix != ".safetensors" and path.name not in keep:
            path.unlink()
    return ckpt.read()


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


def expect_all(
    ckpt: Checkpoint,
    stored: dict[str, torch.Tensor],
    library: Callable[[dict[str, torch.Tensor], str], torch.Tensor],
    arithmetic: Callable[[dict[str, torch.Tensor], str], np.ndarray],
) -> None:
    """Every weight with a scale by the two of them, times `pre_quant_scale` if there is one; the others as they are."""
    for name, tensor in stored.items():
        if not name.endswith("weight"):
            continue
        if f"{name}_scale" not in stored:
            ckpt.plain(name, tensor)
            continue
        found, restated = library(stored, name), arithmetic(stored, name)
        smooth = stored.get(name.removesuffix("weight") + "pre_quant_scale")
        if smooth is not None:
            found, restated = found * smooth.float(), restated * widened(smooth)
        ckpt.expect(name, found, restated)


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
