"""bitsandbytes: NF4 and FP4 in blocks of the flat tensor, and LLM.int8."""

import json
import re
from typing import Any

import numpy as np
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.functional import QuantState, dequantize_blockwise, int8_vectorwise_dequant, int8_vectorwise_quant
from bitsandbytes.nn import Linear4bit, Linear8bitLt, Params4bit

from .checkpoint import Checkpoint, fixture, name_of
from .restated import raw

PARTS = "bitsandbytes 0.50.2 `Linear4bit.state_dict`"
READER = "bitsandbytes 0.50.2 `dequantize_4bit` in f32, its path for any device"


def linear(weight: torch.Tensor, kind: str, nested: bool, storage: torch.dtype, block: int) -> dict[str, torch.Tensor]:
    """The state of a layer with this weight."""
    layer = Linear4bit(weight.shape[1], weight.shape[0], bias=False, quant_type=kind)
    layer.weight = parameter(weight, kind, nested, storage, block)
    return layer.to("cpu").state_dict()


def parameter(weight: torch.Tensor, kind: str, nested: bool, storage: torch.dtype, block: int) -> Params4bit:
    return Params4bit(
        weight, requires_grad=False, blocksize=block, compress_statistics=nested, quant_type=kind, quant_storage=storage
    )


def experts(weight: torch.Tensor, kind: str, storage: torch.dtype) -> dict[str, torch.Tensor]:
    """What transformers stores for experts that are a parameter of three axes, not a layer."""
    made = parameter(weight, kind, False, storage, 64).to("cpu")
    return {"weight": made.data, **{f"weight.{k}": v for k, v in made.quant_state.as_dict(packed=True).items()}}


def by_reader(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Its own dequantization, with its kernel for CPUs left out: that one begins a block at each row."""
    codes = state["weight"]
    read = QuantState.from_dict({k.removeprefix("weight."): v for k, v in state.items() if k != "weight"}, "cpu")
    scales = read.absmax
    if read.nested:
        scales = dequantize_blockwise(read.absmax, read.state2)
        scales += read.offset
    return _dequantize_4bit_compute(
        codes.view(torch.uint8).reshape(-1), scales, read.code, read.blocksize, read.shape, torch.float32
    )


def restated(state: dict[str, torch.Tensor]) -> np.ndarray:
    key = next(key for key in state if ".quant_state." in key)
    said = json.loads(raw(state[key]).tobytes())
    codes = np.frombuffer(raw(state["weight"]).tobytes(), np.uint8)
    count = int(np.prod(said["shape"]))
    nibbles = np.stack([codes >> 4, codes & 15], -1).reshape(-1)[:count]
    scales = raw(state["weight.absmax"])
    if "weight.nested_absmax" in state:
        nested = raw(state["weight.nested_absmax"]).repeat(said["nested_blocksize"])[: len(scales)]
        scales = raw(state["weight.nested_quant_map"])[scales] * nested + np.float32(said["nested_offset"])
    spread = scales.repeat(said["blocksize"])[:count]
    return (raw(state["weight.quant_map"])[nibbles] * spread).reshape(said["shape"])


def config(**values: Any) -> dict[str, Any]:
    """As transformers' `BitsAndBytesConfig` writes it."""
    return {
        "_load_in_4bit": False,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
        **values,
    }


def write(ckpt: Checkpoint, states: dict[str, dict[str, torch.Tensor]], said: dict[str, Any]) -> None:
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(40))}
    for module, state in states.items():
        prefix = f"model.layers.0.{module}."
        logical = prefix.removesuffix(".") if ".experts." in module else f"{prefix}weight"  # not of a layer
        tensors |= {logical + name.removeprefix("weight"): tensor for name, tensor in state.items()}
        ckpt.expect(logical, by_reader(state), restated(state))
    ckpt.write(tensors, ckpt.config(said))


@fixture(
    "bnb_nf4",
    writer=PARTS,
    reader=READER,
    shows="blocks of 64 of the flat tensor: whole in rows, across rows, with a short last one; an odd number of codes",
)
def bnb_nf4(ckpt: Checkpoint) -> None:
    shapes = {"self_attn.q_proj": (48, 64), "mlp.up_proj": (10, 96), "mlp.down_proj": (40, 72), "mlp.odd": (5, 27)}
    states = {
        module: linear(ckpt.normal(*shape, dtype=torch.bfloat16), "nf4", False, torch.uint8, 64)
        for module, shape in shapes.items()
    }
    write(ckpt, states, config())


@fixture(
    "bnb_nf4_nested",
    writer=PARTS,
    reader=READER,
    shows="`bnb_4bit_use_double_quant`: absmax is U8, with scales and an offset of its own; blocks of 32 and 128",
)
def bnb_nf4_nested(ckpt: Checkpoint) -> None:
    shapes = {"self_attn.q_proj": (132, 64), "mlp.up_proj": (92, 90)}
    states = {
        module: linear(ckpt.normal(*shape, dtype=torch.float16), "nf4", True, torch.uint8, 32)
        for module, shape in shapes.items()
    }
    states["mlp.down_proj"] = linear(ckpt.normal(6, 256), "nf4", True, torch.uint8, 128)
    write(ckpt, states, config(bnb_4bit_use_double_quant=True))


@fixture(
    "bnb_fp4_bf16",
    writer="bitsandbytes 0.50.2 `Linear4bit.state_dict`, `Params4bit` for experts",
    reader=READER,
    shows="FP4; `bnb_4bit_quant_storage`: bytes of codes as BF16 and F32; experts, with blocks across rows too",
)
def bnb_fp4_bf16(ckpt: Checkpoint) -> None:
    states = {
        "self_attn.q_proj": linear(ckpt.normal(24, 64), "fp4", False, torch.bfloat16, 64),
        "self_attn.k_proj": linear(ckpt.normal(8, 40), "fp4", False, torch.float32, 64),
        "mlp.experts.gate_up_proj": experts(ckpt.normal(3, 8, 64), "fp4", torch.bfloat16),
        "mlp.experts.down_proj": experts(ckpt.normal(2, 4, 48), "fp4", torch.bfloat16),
    }
    write(ckpt, states, config(bnb_4bit_quant_storage=name_of(torch.bfloat16), bnb_4bit_quant_type="fp4"))


@fixture(
    "bnb_int8",
    writer="bitsandbytes 0.50.2 `Linear8bitLt.state_dict`",
    reader="bitsandbytes 0.50.2 `int8_vectorwise_dequant`",
    shows="LLM.int8: `SCB` [out], `weight_format` 0; two roundings",
)
def bnb_int8(ckpt: Checkpoint) -> None:
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(40))}
    for module, shape in {"self_attn.q_proj": (48, 40), "mlp.down_proj": (20, 71)}.items():
        layer = Linear8bitLt(shape[1], shape[0], bias=False, has_fp16_weights=False, threshold=6.0)
        layer.load_state_dict({"weight": ckpt.normal(*shape, dtype=torch.float16)})
        state = layer.to("cpu").state_dict()
        prefix = f"model.layers.0.{module}."
        tensors |= {prefix + name: tensor for name, tensor in state.items()}
        codes, scales = raw(state["weight"]).astype(np.float32), raw(state["SCB"])[:, None]
        ckpt.expect(
            f"{prefix}weight",
            int8_vectorwise_dequant(state["weight"], state["SCB"]),
            codes * scales * np.float32(7.874015718698502e-3),
        )
    ckpt.write(tensors, ckpt.config(config(load_in_4bit=False, load_in_8bit=True)))


# ---- GPTQModel ----


def gptqmodel(ckpt: Checkpoint, state: dict[str, torch.Tensor], module: str) -> dict[str, torch.Tensor]:
    """A layer under the names of its `_packed_state_key_to_buffer_name`; its reader gives them bitsandbytes' again."""
    prefix = f"model.layers.0.{module}."
    ckpt.expect(f"{prefix}weight", by_reader(state), restated(state))
    names = {key: re.sub(r"\.(quant_state)?.*", lambda m: f"_{m[1] or m[0][1:]}", key) for key in state}
    return {prefix + names[key]: tensor for key, tensor in state.items()}


def gptqmodel_config(**values: Any) -> dict[str, Any]:
    return {
        "bits": 4,
        "block_size": 64,
        "checkpoint_format": "nf4",
        "compress_statistics": True,
        "format": "nf4",
        "group_size": -1,
        "lm_head": False,
        "meta": {"quantizer": ["gptqmodel:7.7.0"]},
        "method": "bitsandbytes",
        "quant_method": "bitsandbytes",
        **values,
    }


@fixture(
    "gptqmodel_bnb_nf4",
    writer="bitsandbytes 0.50.2 `Linear4bit.state_dict`, named as GPTQModel 7.7.0 `BitsAndBytesLinear` names it",
    reader=READER,
    shows="`X.weight_absmax`, `X.weight_quant_state` and so on: nested scales, its default; FP4 without",
)
def gptqmodel_bnb_nf4(ckpt: Checkpoint) -> None:
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(40))}
    for module, shape in {"self_attn.q_proj": (132, 64), "mlp.up_proj": (92, 90)}.items():
        state = linear(ckpt.normal(*shape, dtype=torch.float16), "nf4", True, torch.uint8, 64)
        tensors |= gptqmodel(ckpt, state, module)
    tensors |= gptqmodel(ckpt, linear(ckpt.normal(40, 72), "fp4", False, torch.uint8, 64), "mlp.down_proj")
    ckpt.write(tensors, ckpt.config(gptqmodel_config()))


@fixture(
    "gptqmodel_bnb_int8",
    writer="bitsandbytes 0.50.2 `int8_vectorwise_quant`, named as GPTQModel 7.7.0 `BitsAndBytesLinear` names it",
    reader="bitsandbytes 0.50.2 `int8_vectorwise_dequant`, as GPTQModel's `model_dequant` calls it",
    shows="LLM.int8 with `X.weight_scb`, without a format",
)
def gptqmodel_bnb_int8(ckpt: Checkpoint) -> None:
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(40))}
    for module, shape in {"self_attn.q_proj": (48, 40), "mlp.down_proj": (20, 71)}.items():
        codes, scales, _ = int8_vectorwise_quant(ckpt.normal(*shape, dtype=torch.float16), threshold=0.0)
        weight = f"model.layers.0.{module}.weight"
        tensors |= {weight: codes, f"{weight}_scb": scales}
        again = raw(codes).astype(np.float32) * raw(scales)[:, None] * np.float32(7.874015718698502e-3)
        ckpt.expect(weight, int8_vectorwise_dequant(codes, scales), again)
    said = {"bits": 8, "checkpoint_format": "int8", "format": "int8"}
    ckpt.write(tensors, ckpt.config(gptqmodel_config(**said)))


# ---- Conv1D ----


@fixture(
    "bnb_gpt2",
    writer="bitsandbytes 0.50.2 `Linear4bit.state_dict`, `Linear8bitLt.state_dict` of transposed weights",
    reader="bitsandbytes 0.50.2 `dequantize_4bit` in f32, `int8_vectorwise_dequant`, transposed back",
    shows="codes are [out, in], the weights of GPT-2's files [in, out]; a square one",
)
def bnb_gpt2(ckpt: Checkpoint) -> None:
    tensors = {"transformer.h.0.ln_1.weight": ckpt.plain("transformer.h.0.ln_1.weight", ckpt.norm(64))}
    for module, shape in {"attn.c_proj": (64, 64), "mlp.c_fc": (64, 128)}.items():
        state = linear(ckpt.normal(*shape, dtype=torch.bfloat16).T.contiguous(), "nf4", False, torch.uint8, 64)
        prefix = f"transformer.h.0.{module}."
        tensors |= {prefix + name: tensor for name, tensor in state.items()}
        ckpt.expect(f"{prefix}weight", by_reader(state).T.contiguous(), restated(state).T)
    layer = Linear8bitLt(64, 16, bias=False, has_fp16_weights=False, threshold=6.0)
    layer.load_state_dict({"weight": ckpt.normal(64, 16, dtype=torch.float16).T.contiguous()})
    state = layer.to("cpu").state_dict()
    tensors |= {f"transformer.h.0.attn.c_attn.{name}": tensor for name, tensor in state.items()}
    codes, scales = raw(state["weight"]).astype(np.float32), raw(state["SCB"])[:, None]
    ckpt.expect(
        "transformer.h.0.attn.c_attn.weight",
        int8_vectorwise_dequant(state["weight"], state["SCB"]).T.contiguous(),
        (codes * scales * np.float32(7.874015718698502e-3)).T,
    )
    ckpt.write(tensors, {**ckpt.config(config()), "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
