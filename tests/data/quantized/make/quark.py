"""AMD Quark: a model quantized and exported by its own `ModelQuantizer` and `export_safetensors`.

What its modules dequantize to is read from the modules that were exported: they hold the stored tensors.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quark.torch import ModelQuantizer, export_safetensors
from quark.torch.quantization.config.config import (
    FP4PerGroupSpec,
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerGroupSpec,
    OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec,
    OCP_MXFP6E3M2Spec,
    ProgressiveSpec,
    QConfig,
    QLayerConfig,
    ScaleQuantSpec,
    Uint4PerChannelSpec,
    Uint4PerGroupSpec,
    Uint4PerTensorSpec,
    Uint8PerChannelSpec,
)
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from .checkpoint import Checkpoint, fixture
from .restated import E2M1, E2M3, E4M3, bits, e8m0, groups, raw, widened

QUARK = "amd-quark 0.13 `ModelQuantizer`, `export_safetensors`"
READER = "amd-quark 0.13, the weights of its `QParamsLinear`, which are f32"
# Column of a word that each of its nibbles holds, from the lowest up.
ORDERS = {"reorder": [0, 2, 4, 6, 1, 3, 5, 7], "order": list(range(8))}
E3M2 = np.array([(-1) ** (c >> 5) * (c % 4 / 16 if c >> 2 & 7 == 0 else (1 + c % 4 / 4) * 2.0 ** ((c >> 2 & 7) - 3))
                 for c in range(64)], np.float32)  # fmt: skip

MIN_MAX = {"scale_type": "float", "round_method": "half_even", "is_dynamic": False}
GROUPS = {"ch_axis": -1, "group_size": 32, "scale_type": "float", "is_dynamic": False}


def layer(spec: Any, inputs: Any = None, outputs: Any = None) -> QLayerConfig:
    made = [None if one is None else one.to_quantization_spec() for one in (spec, inputs, outputs)]
    return QLayerConfig(weight=made[0], input_tensors=made[1], output_tensors=made[2])


Tensors = dict[str, torch.Tensor]


def exported(ckpt: Checkpoint, config: QConfig, order: str, width: int) -> tuple[Tensors, Tensors]:
    """The stored tensors of a small llama, and the weights of its quantized modules."""
    sizes = {"hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).bfloat16().eval()
    for name, weight in model.named_parameters():
        made = ckpt.norm(width) if name.endswith("norm.weight") else ckpt.normal(*weight.shape, dtype=torch.bfloat16)
        weight.data = made
    tokens = torch.randint(0, 8, (1, 16), generator=ckpt.random)
    quantized = ModelQuantizer(config).quantize_model(model, [tokens]).eval()
    ModelQuantizer.freeze(quantized)
    with tempfile.TemporaryDirectory() as folder:
        export_safetensors(quantized, folder, pack_method=order)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(Path(folder) / file, ckpt.folder / file)
    kinds = [(name, one) for name, one in quantized.named_modules() if type(one).__name__ == "QParamsLinear"]
    return load_file(ckpt.folder / "model.safetensors"), {n: one._get_qweight(one.weight) for n, one in kinds}


def words(stored: torch.Tensor, order: str) -> np.ndarray:
    """The codes of words along the last axis."""
    codes = bits(stored.numpy().view(np.uint32), 4, stored.shape[-1] * 8)
    return codes.reshape(*stored.shape, 8)[..., np.argsort(ORDERS[order])].reshape(codes.shape)


def integers(stored: Mapping[str, torch.Tensor], name: str, spec: Mapping[str, Any], order: str) -> np.ndarray:
    """(code - zero point) * scale; of codes in groups, transposed; of those in fp8, times the scale of that."""
    second = "_2" if f"{name}.weight_scale_2" in stored else ""
    codes, zero = stored[f"{name}.weight"], stored[f"{name}.weight_zero_point{second}"]
    scale = widened(stored[f"{name}.weight_scale{second}"])
    if spec["dtype"] in ("int4", "uint4"):
        number = lambda part: words(part, order) if part.ndim else part.numpy() & 15  # noqa: E731
        signed = spec["dtype"] == "int4"
        codes, zero = ((c ^ 8) - 8 if signed else c for c in map(number, (codes, zero)))
    else:
        codes, zero = codes.numpy().astype(np.int32), zero.numpy().astype(np.int32)
    if spec["qscheme"] == "per_group":
        codes, zero, scale = codes.T, groups(zero.T, len(codes)), groups(scale.T, len(codes))
    elif spec["qscheme"] == "per_channel":
        zero, scale = zero[:, None], scale[:, None]
    values = (codes - zero).astype(np.float32) * scale
    return values * widened(stored[f"{name}.weight_scale"]) if second else values


def reals(stored: Mapping[str, torch.Tensor], name: str, spec: Mapping[str, Any]) -> np.ndarray:
    """Code times scale; a scale in fp8 is multiplied by its own first."""
    codes, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
    if spec["dtype"] == "fp8_e4m3":
        numbers = E4M3[raw(codes)]
        return numbers * (widened(scale)[:, None] if scale.ndim else widened(scale))
    table, width = {"fp4": (E2M1, 4), "fp6_e2m3": (E2M3, 6), "fp6_e3m2": (E3M2, 6)}[spec["dtype"]]
    numbers = table[bits(codes.numpy(), width, codes.shape[-1] * 8 // width)]
    second = stored.get(f"{name}.weight_scale_2")
    scales = e8m0(raw(scale)) if second is None else E4M3[raw(scale)] * widened(second)
    return numbers * groups(scales, numbers.shape[-1])


def make(
    ckpt: Checkpoint, first: Any, others: Mapping[str, QLayerConfig], order: str = "reorder", width: int = 64
) -> None:
    """A fixture with one scheme for most modules, and those of others by the globs of their names."""
    config = QConfig(layer(first), layer_quant_config=dict(others), exclude=["lm_head"])
    stored, weights = exported(ckpt, config, order, width)
    said = json.loads((ckpt.folder / "config.json").read_text())["quantization_config"]
    for name, by_reader in weights.items():
        own = said["layer_quant_config"].get(f"*{name.rpartition('.')[2]}", said["global_quant_config"])["weight"]
        specs = own if isinstance(own, list) else [own]
        integer = next((spec for spec in specs if "int" in spec["dtype"]), None)
        again = reals(stored, name, specs[0]) if integer is None else integers(stored, name, integer, order)
        ckpt.expect(f"{name}.weight", by_reader, again)
    for name, tensor in stored.items():
        if name.rpartition(".")[0] not in weights and not name.endswith(("k_scale", "v_scale")):
            ckpt.plain(name, tensor)


def integer_layers() -> dict[str, QLayerConfig]:
    scales = {"observer_method": "min_max", **MIN_MAX}
    in_fp8 = ProgressiveSpec(
        first_stage=FP8E4M3PerTensorSpec(observer_method="min_max", scale_type="float32", is_dynamic=False),
        second_stage=Int4PerChannelSpec(symmetric=True, ch_axis=0, **{**MIN_MAX, "scale_type": "float32"}),
    )
    return {
        "*k_proj": layer(Int4PerGroupSpec(**GROUPS)),
        "*v_proj": layer(Int4PerChannelSpec(symmetric=False, ch_axis=0, **MIN_MAX)),
        "*o_proj": layer(Uint4PerChannelSpec(symmetric=False, ch_axis=0, **MIN_MAX)),
        "*gate_proj": layer(Int8PerGroupSpec(symmetric=False, round_method="half_even", **GROUPS)),
        "*up_proj": layer(Uint4PerTensorSpec(symmetric=False, **scales)),
        "*down_proj": layer(in_fp8),
    }


@fixture(
    "quark_integers",
    writer=QUARK,
    reader=READER,
    shows="`pack_method` reorder; uint4 in groups, transposed, and by the globs of `layer_quant_config` int4 in groups "
    "of which all zero points are 0, int4 and uint4 of rows, uint4 of one scale, int8 in groups, int4 of rows in fp8",
)
def quark_integers(ckpt: Checkpoint) -> None:
    make(ckpt, Uint4PerGroupSpec(**GROUPS), integer_layers())


@fixture(
    "quark_in_order",
    writer=QUARK,
    reader=READER,
    shows="`pack_method` order: plain words; uint4 in groups, transposed, int4 of rows; uint8 of rows",
)
def quark_in_order(ckpt: Checkpoint) -> None:
    layers = {name: one for name, one in integer_layers().items() if name in ("*v_proj", "*up_proj")}
    layers["*o_proj"] = layer(Uint8PerChannelSpec(symmetric=False, ch_axis=0, **MIN_MAX))
    make(ckpt, Uint4PerGroupSpec(**GROUPS), layers, "order", 32)


@fixture(
    "quark_floats",
    writer=QUARK,
    reader=READER,
    shows="MXFP4, and by `layer_quant_config` fp8 of a tensor with scales of activations to ignore, fp8 of rows, MXFP6 "
    "of both kinds, NVFP4",
)
def quark_floats(ckpt: Checkpoint) -> None:
    fp8 = FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False)
    e4m3_scales = ScaleQuantSpec(
        first_stage=FP4PerGroupSpec(ch_axis=-1, group_size=16, is_dynamic=False, scale_type="float32"),
        second_stage=FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False, scale_type="float32"),
    )
    layers = {
        "*k_proj": layer(fp8, fp8, fp8),
        "*v_proj": layer(FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0)),
        "*o_proj": layer(OCP_MXFP6E2M3Spec(ch_axis=-1, is_dynamic=False)),
        "*gate_proj": layer(OCP_MXFP6E3M2Spec(ch_axis=-1, is_dynamic=False)),
        "*up_proj": layer(e4m3_scales),
    }
    make(ckpt, OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False), layers)
