"""FP8 with a grid of scales: DeepSeek, Qwen, MiniMax, and what transformers makes of them."""

from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from .checkpoint import Checkpoint, fixture
from .restated import E4M3, e8m0, raw, spread, widened

BLOCK = (128, 128)
QUANTIZE = "transformers 5.23.0 `Fp8Quantize`"
DCP = "torch 2.13.0 `QuantizedHuggingFaceStorageReader`"
DEQUANTIZE = "transformers 5.23.0 `Fp8Dequantize._dequantize_one`"
TORCH = "torch 2.13.0: `w.float() * s.float().repeat_interleave(...)`"


def quantizer(block: tuple[int, int] | None, scale_fmt: str = "float") -> SimpleNamespace:
    """As much of transformers' quantizer as its conversions look at."""
    return SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt))


def quantized(
    weight: torch.Tensor, block: tuple[int, int] = BLOCK, scale_fmt: str = "float"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales; ragged edges are padded, since transformers leaves them unquantized, and cut off again."""
    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    made = Fp8Quantize(quantizer(block, scale_fmt))._quantize_one("x.weight", padded)
    return made["x.weight"][..., :rows, :columns].contiguous(), made["x.weight_scale_inv"]


def in_torch(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """The two lines that everybody writes."""
    grid = scales.repeat_interleave(block[0], -2)[..., : codes.shape[-2], :]
    return codes.float() * grid.repeat_interleave(block[1], -1)[..., : codes.shape[-1]]


def restated(codes: torch.Tensor, scales: np.ndarray, block: tuple[int, int] = BLOCK) -> np.ndarray:
    return E4M3[raw(codes)] * spread(scales, tuple(codes.shape), block)


def read_by_dcp(ckpt: Checkpoint, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    found = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
    reader = QuantizedHuggingFaceStorageReader(str(ckpt.folder), target_dtype=torch.float32, block_size=128)
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def config(ckpt: Checkpoint, block: tuple[int, int] = BLOCK, **others: object) -> dict[str, object]:
    fp8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block)}
    return ckpt.config({**fp8, **others})


# The second row count is not a multiple of its number of scales, the first is: 192 / 2 is not the block.
SHAPES = {"self_attn.o_proj": (192, 136), "self_attn.kv_a_proj_with_mqa": (9, 257)}


@fixture(
    "fp8_block",
    writer=QUANTIZE,
    reader=DCP,
    shows="128 x 128 blocks, ragged at both edges; f32 scales in the other shard; an `activation_scale` to ignore",
)
def fp8_block(ckpt: Checkpoint) -> None:
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(64))}
    for module, shape in SHAPES.items():
        codes, scales = quantized(ckpt.normal(*shape))
        tensors |= {f"model.layers.0.{module}.weight": codes, f"model.layers.0.{module}.weight_scale_inv": scales}
    tensors["model.layers.0.self_attn.o_proj.activation_scale"] = torch.tensor(0.0123)
    ckpt.write(tensors, config(ckpt), second=lambda name: "scale" in name)
    found = read_by_dcp(
        ckpt, {n: t.shape for n, t in tensors.items() if n.endswith("proj.weight") or "mqa.weight" in n}
    )
    found = {name: value for name, value in found.items() if not name.endswith("scale_inv")}
    for name, value in found.items():
        ckpt.expect(name, value, restated(tensors[name], raw(tensors[f"{name}_scale_inv"])))


def with_scales(ckpt: Checkpoint, convert, widen, **others: str) -> None:
    """The same matrix with scales of another dtype."""
    name = "model.layers.0.self_attn.o_proj.weight"
    codes, scales = quantized(ckpt.normal(192, 136), scale_fmt=others.get("scale_fmt", "float"))
    stored = convert(scales)
    tensors = {name: codes, f"{name}_scale_inv": stored}
    tensors["model.norm.weight"] = ckpt.plain("model.norm.weight", ckpt.norm(64))
    ckpt.write(tensors, config(ckpt, **others))
    by_torch = in_torch(
        codes, stored.view(torch.float8_e8m0fnu).float() if stored.dtype == torch.uint8 else stored.float()
    )
    ckpt.expect(name, by_torch, restated(codes, widen(stored)))


@fixture("fp8_block_bf16_scale", writer=QUANTIZE, reader=TORCH, shows="scales stored as BF16")
def fp8_block_bf16_scale(ckpt: Checkpoint) -> None:
    with_scales(ckpt, lambda scales: scales.to(torch.bfloat16), widened)


@fixture("fp8_block_e8m0", writer=QUANTIZE + ", `ue8m0`", reader=TORCH, shows="scales stored as F8_E8M0")
def fp8_block_e8m0(ckpt: Checkpoint) -> None:
    with_scales(ckpt, lambda scales: scales, lambda stored: e8m0(raw(stored)), scale_fmt="ue8m0")


@fixture("fp8_block_u8", writer=QUANTIZE + ", `ue8m0`", reader=TORCH, shows="the same scales stored as U8")
def fp8_block_u8(ckpt: Checkpoint) -> None:
    with_scales(ckpt, lambda scales: scales.view(torch.uint8), lambda stored: e8m0(raw(stored)), scale_fmt="ue8m0")


@fixture(
    "fp8_experts",
    writer=QUANTIZE,
    reader=DEQUANTIZE,
    shows="experts stacked in one tensor of three axes: `gate_up_proj` + `gate_up_proj_scale_inv`, and `X.weight` + "
    "`X.weight_scale_inv`; blocks of 32 x 32",
)
def fp8_experts(ckpt: Checkpoint) -> None:
    block, layer = (32, 32), "model.layers.0."
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(64))}
    shapes = {
        "mlp.experts.gate_up_proj": (3, 64, 64),
        "mlp.experts.down_proj": (3, 64, 32),
        "moe.up_proj.weight": (2, 32, 64),
    }
    for name, shape in shapes.items():
        made = Fp8Quantize(quantizer(block))._quantize_one(layer + name, ckpt.normal(*shape))
        expect_grid(ckpt, made, block)
        tensors |= made
    ckpt.write(tensors, config(ckpt, block, modules_to_not_convert=["lm_head"]))


def expect_grid(ckpt: Checkpoint, made: dict[str, torch.Tensor], block: tuple[int, int]) -> None:
    """What transformers restores of a weight and its scales, of which it takes the block from their shapes."""
    (name, codes), (_, scales) = made.items()
    value = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    ckpt.expect(name, value, restated(codes, raw(scales), block))


@fixture(
    "fp8_no_blocks",
    writer=QUANTIZE + ", `weight_block_size` null",
    reader=DEQUANTIZE,
    shows="`weight_block_size: null`: `weight_scale_inv` [] and [1, 1]; experts with [E, 1, 1], and with [E, 2, 1]: "
    "one for the gates and one for the rest",
)
def fp8_no_blocks(ckpt: Checkpoint) -> None:
    quantize = Fp8Quantize(quantizer(None))._quantize_one
    layer, experts = "model.layers.0.self_attn.", "model.layers.0.mlp.experts."
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(64))}
    for name in (f"{layer}q_proj.weight", f"{layer}o_proj.weight"):
        made = quantize(name, ckpt.normal(20, 37))
        expect_grid(ckpt, made, (20, 37))
        tensors |= made
    # As `FP8Linear` has it.
    scalar = f"{layer}q_proj.weight_scale_inv"
    tensors[scalar] = tensors[scalar].reshape(())
    made = quantize(f"{experts}down_proj", ckpt.normal(3, 24, 20))
    expect_grid(ckpt, made, (24, 20))
    tensors |= made
    # As transformers' converters join the experts' gate_proj and up_proj, and `FP8Experts` has them.
    gate, up = (list(quantize(name, ckpt.normal(3, 20, 24)).values()) for name in ("gate", "up"))
    made = {f"{experts}gate_up_proj": torch.cat((gate[0].view(torch.uint8), up[0].view(torch.uint8)), 1)}
    made[f"{experts}gate_up_proj"] = made[f"{experts}gate_up_proj"].view(torch.float8_e4m3fn)
    made[f"{experts}gate_up_proj_scale_inv"] = torch.cat((gate[1], up[1]), 1)
    expect_grid(ckpt, made, (20, 24))
    ckpt.write(
        tensors | made, ckpt.config({"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": None})
    )
