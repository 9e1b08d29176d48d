"""GPTQ, auto-round and AWQ, with the modules that pack them: their source is run alone, without the packages around it.

``GPTQ_WRITERS`` is a folder with the sources of auto-gptq, auto-round and autoawq. Weights are those that the module's
own CPU forward multiplies a unit matrix by, its scales cast to f32.
"""

import importlib.util
import json
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .checkpoint import Checkpoint, fixture
from .restated import bits, widened

SOURCES = Path(os.environ.get("GPTQ_WRITERS", "writers"))
GPTQ, ROUND, AWQ = "auto-gptq 0.7.1", "auto-round 0.16.1", "autoawq 0.2.9"
Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
UP, DOWN, HEAD = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head"
# Column of a word that each of its nibbles holds, from the lowest up.
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


# ---- their modules ----


def stub(name: str, **members: Any) -> types.ModuleType:
    """A module in place of one that is not needed."""
    module = sys.modules.setdefault(name, types.ModuleType(name))
    module.__dict__.update(members)
    return module


def source(path: str, name: str) -> types.ModuleType:
    """A module of a package, run without the package's own imports."""
    spec = importlib.util.spec_from_file_location(name, SOURCES / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def modules() -> types.SimpleNamespace:
    """The classes that pack, by what they write."""
    if "transformers" not in sys.modules:
        stub("transformers", pytorch_utils=types.SimpleNamespace(Conv1D=type("Conv1D", (), {})))
    for name in ("auto_round", "auto_round_extension", "auto_round_extension.torch", "awq", "awq.utils"):
        stub(name)
    stub("auto_round.utils", get_packing_device=lambda device=None: "cpu")
    source("auto_round/utils/bit_packing.py", "auto_round.utils.bit_packing")
    stub("awq.utils.module", try_import=lambda name: (None, ""))
    stub("awq.utils.utils", get_best_device=lambda: "cpu")
    packing = source("awq/utils/packing_utils.py", "awq.utils.packing_utils")
    folder, rounds = "auto_gptq/nn_modules/qlinear", "auto_round_extension.torch"
    return types.SimpleNamespace(
        grouped=source(f"{folder}/qlinear_cuda_old.py", "qlinear_cuda_old").QuantLinear,
        mapped=source(f"{folder}/qlinear_cuda.py", "qlinear_cuda").QuantLinear,
        raw=source("auto_round_extension/torch/qlinear_torch.py", f"{rounds}.qlinear_torch").QuantLinear,
        less_one=source("auto_round_extension/torch/qlinear_torch_zp.py", f"{rounds}.qlinear_torch_zp").QuantLinear,
        gemm=source("awq/modules/linear/gemm.py", "awq_gemm").WQLinear_GEMM,
        gemv=source("awq/modules/linear/gemv.py", "awq_gemv").WQLinear_GEMV,
        packing=packing,
    )


# ---- weights, scales, zero points ----


def quantized(
    weight: torch.Tensor, groups: torch.Tensor, width: int, sym: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights on their grid, scales and zero points [out, groups] of the least and the largest value, as GPTQ's."""
    most, count = 2**width - 1, int(groups.max()) + 1
    parts = [weight[:, groups == k] for k in range(count)]
    low, high = (torch.stack([f(p) for p in parts], 1) for f in (lambda p: p.amin(1), lambda p: p.amax(1)))
    low, high = low.clamp(max=-1e-4), high.clamp(min=1e-4)
    if sym:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / most).to(dtype).float()
    zeros = torch.full_like(scales, 2 ** (width - 1)) if sym else torch.round(-low / scales).clamp(1, most)
    scale, zero = scales[:, groups], zeros[:, groups]
    return scale * (torch.round(weight / scale + zero).clamp(0, most) - zero), scales, zeros


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight.data, linear.bias = weight, None if bias is None else torch.nn.Parameter(bias)
    return linear


def restated(stored: Mapping[str, torch.Tensor], name: str, added: int) -> np.ndarray:
    """W[o, i] = (q[i, o] - z[g, o]) * scale[g, o]."""
    words, zeros, scales = (stored[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
    count, width = scales.shape[1], 32 * zeros.shape[1] // scales.shape[1]
    length = words.shape[0] * 32 // width
    codes = bits(words.numpy().T.view(np.uint32), width, length)
    zero = (bits(zeros.numpy().view(np.uint32), width, count) + added) & (1 << width) - 1
    groups = stored.get(f"{name}.g_idx", torch.arange(length) // -(-length // len(scales))).numpy()
    return (codes - zero.T[:, groups]).astype(np.float32) * widened(scales).T[:, groups]


def by_forward(module: torch.nn.Module, length: int) -> torch.Tensor:
    """The weight that a module's forward multiplies by, transposed back."""
    module.scales, module.bias = module.scales.float(), None
    return module(torch.eye(length)).T


def pack(
    ckpt: Checkpoint,
    tensors: dict[str, torch.Tensor],
    name: str,
    shape: tuple[int, int],
    kind: str,
    width: int,
    size: int,
    *,
    sym: bool = True,
    order: bool = False,
    dtype: torch.dtype = torch.float16,
    added: int = 1,
    bias: bool = False,
) -> None:
    """Adds the tensors of one module, and what they stand for."""
    out, length = shape
    group = length if size < 0 else size
    groups = torch.arange(length) // group
    if order:  # the columns in the order of what they matter, here by chance
        groups = groups[torch.randperm(length, generator=ckpt.random)]
    weight, scales, zeros = quantized(ckpt.normal(*shape), groups, width, sym, dtype)
    linear = linear_of(weight, ckpt.normal(out).half().float() if bias else None)
    make = getattr(modules(), kind)
    module = make(width, size, length, out, bias, **({"g_idx": True} if kind == "raw" and order else {}))
    module.device = "cpu"
    if kind in ("raw", "less_one"):
        module.pack(linear, scales, int(zeros[0, 0]) if sym else zeros, None, device="cpu")
    else:
        module.pack(linear, scales.clone(), zeros.clone(), groups.int())
    if kind == "raw" and order:
        module.g_idx = groups.int()
    module.scales = module.scales.to(dtype)
    parts = {f"{name}.{part}": tensor for part, tensor in module.state_dict().items() if part != "bias"}
    tensors.update(parts)
    if bias:
        tensors[f"{name}.bias"] = ckpt.plain(f"{name}.bias", linear.bias.detach().half())
    ckpt.expect(f"{name}.weight", by_forward(module, length), restated(parts, name, added))


def others(ckpt: Checkpoint, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    return {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(64, dtype))}


# ---- GPTQ ----


@fixture(
    "gptq4_g32_asym",
    writer=f"{GPTQ} `qlinear_cuda_old.QuantLinear.pack`",
    reader=f"{GPTQ}, its CPU forward, scales cast to f32",
    shows="4 bits, groups of 32, zero points less one; a bias; scales in the other shard",
)
def grouped(ckpt: Checkpoint) -> None:
    tensors = others(ckpt)
    pack(ckpt, tensors, Q, (64, 96), "grouped", 4, 32, sym=False, bias=True)
    pack(ckpt, tensors, UP, (96, 64), "grouped", 4, 32, sym=False)
    said = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "lm_head": False}
    said |= {"checkpoint_format": "gptq", "true_sequential": True, "damp_percent": 0.01}
    ckpt.write(tensors, ckpt.config(said, torch_dtype="float16"), second=lambda name: name.endswith("scales"))


@fixture(
    "gptq3_act_order",
    writer=f"{GPTQ} `qlinear_cuda.QuantLinear.pack`",
    reader=f"{GPTQ}, its CPU forward, scales cast to f32",
    shows="3 bits across words, `desc_act` with `g_idx` in any order, a ragged last group; a quantized `lm_head`",
)
def mapped(ckpt: Checkpoint) -> None:
    tensors = others(ckpt)
    pack(ckpt, tensors, Q, (64, 96), "mapped", 3, 64, sym=False, order=True)
    pack(ckpt, tensors, HEAD, (32, 128), "mapped", 3, 64, sym=False, order=True)
    said = {"quant_method": "gptq", "bits": 3, "group_size": 64, "desc_act": True, "sym": False, "lm_head": True}
    ckpt.write(tensors, ckpt.config(said, torch_dtype="float16"))


@fixture(
    "gptq2_older",
    writer=f"{GPTQ} `qlinear_cuda_old.QuantLinear.pack`, the older place of the config",
    reader=f"{GPTQ}, its CPU forward, scales cast to f32",
    shows="`quantize_config.json` beside a config.json that says nothing; 2 bits, `group_size` -1, no `g_idx`",
)
def older(ckpt: Checkpoint) -> None:
    tensors = others(ckpt)
    pack(ckpt, tensors, Q, (64, 96), "grouped", 2, -1, sym=False)
    said = {
        "bits": 2,
        "group_size": -1,
        "damp_percent": 0.01,
        "desc_act": False,
        "sym": False,
        "model_name_or_path": "",
    }
    (ckpt.folder / "quantize_config.json").write_text(json.dumps(said) + "\n")
    stored = {name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")}
    ckpt.write(stored, ckpt.config(torch_dtype="float16"))


@fixture(
    "gptq_dynamic_raw_zeros",
    writer=f"{ROUND} `qlinear_torch.QuantLinear.pack`, which it takes for GPTQModel; the config is GPTQModel's",
    reader=f"{ROUND}, its CPU forward, scales cast to f32",
    shows="symmetric zero points as they are, though `checkpoint_format` says less one; bf16 scales; `dynamic`: 8 bits "
    "for one module, none for another",
)
def dynamic(ckpt: Checkpoint) -> None:
    tensors = others(ckpt, torch.bfloat16)
    pack(ckpt, tensors, Q, (64, 96), "raw", 4, 32, order=True, dtype=torch.bfloat16, added=0)
    pack(ckpt, tensors, DOWN, (32, 64), "raw", 8, 64, order=True, dtype=torch.bfloat16, added=0)
    tensors[f"{K}.weight"] = ckpt.plain(f"{K}.weight", ckpt.normal(32, 96, dtype=torch.bfloat16))
    said = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True, "lm_head": False}
    said |= {"checkpoint_format": "gptq", "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:5.0.0"]}}
    said["dynamic"] = {"-:.*k_proj.*": {}, r"+:.*\.(down|gate)_proj$": {"bits": 8, "group_size": 64}}
    ckpt.write(tensors, ckpt.config(said))


# ---- auto-round ----


@fixture(
    "autoround_raw_zeros",
    writer=f"{ROUND} `qlinear_torch.QuantLinear.pack`",
    reader=f"{ROUND}, its CPU forward, scales cast to f32",
    shows="`packing_format` auto_round: zero points as they are, no `g_idx`; 5 bits, and 6 and 7 by `extra_config`",
)
def raw(ckpt: Checkpoint) -> None:
    tensors = others(ckpt)
    pack(ckpt, tensors, Q, (64, 96), "raw", 5, 32, sym=False, added=0)
    pack(ckpt, tensors, K, (32, 96), "raw", 6, 48, sym=False, added=0)
    pack(ckpt, tensors, DOWN, (32, 64), "raw", 7, 32, sym=False, added=0)
    tensors[f"{V}.weight"] = ckpt.plain(f"{V}.weight", ckpt.normal(32, 96, dtype=torch.float16))
    said = {"quant_method": "auto-round", "bits": 5, "group_size": 32, "sym": False, "packing_format": "auto_round"}
    said["extra_config"] = {
        K: {"bits": 6, "group_size": 48},
        V: {"bits": 16, "data_type": "fp"},
        ".*mlp\\.down_proj.*": {"bits": 7},
    }
    ckpt.write(tensors, ckpt.config({**said, "autoround_version": "0.16.1"}, torch_dtype="float16"))


@fixture(
    "autoround_gptq",
    writer=f"{ROUND} `qlinear_torch_zp.QuantLinear.pack`",
    reader=f"{ROUND}, its CPU forward, scales cast to f32",
    shows="`intel/auto-round` with `packing_format` auto_round:auto_gptq: symmetric zero points less one; 4 bits",
)
def less_one(ckpt: Checkpoint) -> None:
    tensors = others(ckpt)
    pack(ckpt, tensors, Q, (64, 96), "less_one", 4, 32)
    said = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 32, "sym": True}
    said["packing_format"] = "auto_round:auto_gptq"
    ckpt.write(tensors, ckpt.config(said, torch_dtype="float16"))


# ---- AWQ ----


def awq(ckpt: Checkpoint, tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, int], size: int) -> None:
    """The layout of gemm, read by the package's `dequantize_gemm`."""
    weight, scales, zeros = quantized(ckpt.normal(*shape), torch.arange(shape[1]) // size, 4, False, torch.float16)
    linear = linear_of(weight, ckpt.normal(shape[0]).half().float())
    module = modules().gemm.from_linear(linear, 4, size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    parts = module.state_dict()
    read = modules().packing.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"].float(), 4, size)
    codes, zero = (
        bits(parts[part].numpy().view(np.uint32), 4, shape[0]).reshape(-1, shape[0] // 8, 8)[..., np.argsort(ORDER)]
        for part in ("qweight", "qzeros")
    )
    codes, zero = codes.reshape(shape[1], -1), zero.reshape(-1, shape[0]).repeat(size, 0)
    again = (codes - zero).astype(np.float32) * widened(parts["scales"]).repeat(size, 0)
    ckpt.expect(f"{name}.weight", read.T.contiguous(), np.ascontiguousarray(again.T))
    tensors.update({f"{name}.{part}": tensor for part, tensor in parts.items()})
    ckpt.plain(f"{name}.bias", parts["bias"])


@fixture(
    "awq4_gemm",
    writer=f"{AWQ} `WQLinear_GEMM.from_linear`",
    reader=f"{AWQ} `dequantize_gemm`, scales cast to f32",
    shows="permuted nibbles along the rows, groups of 32 and of a whole column; a bias",
)
def gemm(ckpt: Checkpoint) -> None:
    tensors = others(ckpt)
    awq(ckpt, tensors, Q, (64, 96), 32)
    awq(ckpt, tensors, DOWN, (96, 32), 32)
    said = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    ckpt.write(tensors, ckpt.config({**said, "modules_to_not_convert": None}, torch_dtype="float16"))


@fixture(
    "awq4_gemv",
    writer=f"{AWQ} `WQLinear_GEMV.from_linear`",
    reader=f"{AWQ} `unpack_awq`, times scales cast to f32: its forward needs a GPU",
    shows="plain rows; scales and zero points of a row padded to whole words, and those to two",
)
def gemv(ckpt: Checkpoint) -> None:
    tensors, shape, size = others(ckpt), (32, 192), 64
    weight, scales, zeros = quantized(ckpt.normal(*shape), torch.arange(shape[1]) // size, 4, False, torch.float16)
    module = modules().gemv.from_linear(linear_of(weight, None), 4, size, scales=scales, zeros=zeros)
    parts = module.state_dict()
    codes, zero = (part.int() & 15 for part in modules().packing.unpack_awq(parts["qweight"], parts["qzeros"], 4))
    groups = torch.arange(shape[1]) // size
    read = (codes - zero[:, groups]) * parts["scales"].float()[:, groups]
    codes = bits(parts["qweight"].numpy().view(np.uint32), 4, shape[1])
    zero = bits(parts["qzeros"].numpy().view(np.uint32), 4, 3).repeat(size, 1)
    again = (codes - zero).astype(np.float32) * widened(parts["scales"])[:, :3].repeat(size, 1)
    ckpt.expect(f"{Q}.weight", read, again)
    tensors.update({f"{Q}.{part}": tensor for part, tensor in parts.items()})
    said = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemv"}
    ckpt.write(tensors, ckpt.config(said, torch_dtype="float16"))
