"""compressed-tensors: what llm-compressor, Kimi and RedHatAI publish."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from safetensors.torch import load_file, save_file

from .checkpoint import ROOT, Checkpoint, fixture, name_of
from .linears import model_of, observe
from .restated import E2M1, E2M3, E4M3, bits, e8m0, groups, raw, spread, widened, words_alone

WRITER = "compressed-tensors 0.20.0 `ModelCompressor.compress_model`"
READER = "compressed-tensors 0.20.0 `decompress`, scales cast to f32"
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
HALF = {torch.float16, torch.bfloat16}


def decompressed(stored: dict[str, torch.Tensor], scheme: QuantizationScheme, form: str) -> torch.Tensor:
    """A module's weight as the library reads it, computed in float32."""
    stored = {name: value.float() if value.dtype in HALF else value for name, value in stored.items()}
    compressor = BaseCompressor.get_value_from_registry(form)
    if form == "nvfp4-pack-quantized":
        # Its decompress computes in bf16; the same steps with another dtype.
        packed = stored["weight_packed"]
        return dequantize(
            x_q=unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, dtype=torch.float32),
            scale=stored["weight_scale"].float(),
            global_scale=stored["weight_global_scale"],
            args=scheme.weights,
            dtype=torch.float32,
        )
    return compressor.decompress(stored, scheme)["weight"].float()


def integers(stored: dict[str, torch.Tensor], args: QuantizationArgs, unpack=bits) -> np.ndarray:
    """(q - z) * scale, with codes in 32-bit words or in bytes; zero points are packed down the rows."""
    if "weight_packed" in stored:
        rows, columns = stored["weight_shape"].tolist()[-2:]
        middle = 1 << args.num_bits - 1
        codes = unpack(raw(stored["weight_packed"]).view(np.uint32), args.num_bits, columns) - middle
    else:
        codes, middle = raw(stored["weight"]).astype(np.int32), None
        rows, columns = codes.shape[-2:]
    scale = widened(stored["weight_scale"])
    zero = np.zeros(scale.shape, np.int32)
    if "weight_zero_point" in stored:
        zero = raw(stored["weight_zero_point"])
        if zero.dtype == np.int32:
            turned = np.ascontiguousarray(zero.swapaxes(-1, -2)).view(np.uint32)
            zero = unpack(turned, args.num_bits, rows).swapaxes(-1, -2) - middle
    if args.strategy == "block":
        scale, zero = (spread(grid, codes.shape, tuple(args.block_structure)) for grid in (scale, zero))
        return (codes - zero.astype(np.int32)).astype(np.float32) * scale
    if scale.ndim == 1:
        return (codes - zero.astype(np.int32)).astype(np.float32) * scale
    zero = zero.astype(np.int32)
    if "weight_g_idx" in stored:
        of_column = raw(stored["weight_g_idx"])
        return (codes - zero[:, of_column]).astype(np.float32) * scale[:, of_column]
    return (codes - groups(zero, columns)).astype(np.float32) * groups(scale, columns)


def nvfp4(stored: dict[str, torch.Tensor], args: QuantizationArgs) -> np.ndarray:
    packed = raw(stored["weight_packed"])
    columns = packed.shape[-1] * 2
    scale = E4M3[raw(stored["weight_scale"])] / raw(stored["weight_global_scale"])
    return E2M1[bits(packed, 4, columns)] * groups(scale, columns)


def mxfp4(stored: dict[str, torch.Tensor], args: QuantizationArgs) -> np.ndarray:
    packed = raw(stored["weight_packed"])
    columns = packed.shape[-1] * 2
    return E2M1[bits(packed, 4, columns)] * groups(e8m0(raw(stored["weight_scale"])), columns)


def mxfp6(stored: dict[str, torch.Tensor], args: QuantizationArgs) -> np.ndarray:
    packed = raw(stored["weight_packed"])
    columns = packed.shape[-1] * 4 // 3
    return E2M3[bits(packed, 6, columns)] * groups(e8m0(raw(stored["weight_scale"])), columns)


def mxfp8(stored: dict[str, torch.Tensor], args: QuantizationArgs) -> np.ndarray:
    codes = raw(stored["weight"])
    return E4M3[codes] * groups(e8m0(raw(stored["weight_scale"])), codes.shape[-1])


def naive(stored: dict[str, torch.Tensor], args: QuantizationArgs) -> np.ndarray:
    return float8(stored, args) if args.type == "float" else integers(stored, args)


def float8(stored: dict[str, torch.Tensor], args: QuantizationArgs) -> np.ndarray:
    codes, scale = raw(stored["weight"]), widened(stored["weight_scale"])
    if args.strategy == "block":
        scale = spread(scale, codes.shape, tuple(args.block_structure))
    return E4M3[codes] * scale


RESTATED: dict[str, Callable[..., np.ndarray]] = {
    "pack-quantized": integers,
    "int-quantized": integers,
    "float-quantized": float8,
    "naive-quantized": naive,
    "nvfp4-pack-quantized": nvfp4,
    "mxfp4-pack-quantized": mxfp4,
    "mxfp6-pack-quantized": mxfp6,
    "mxfp8-quantized": mxfp8,
}


def make(
    ckpt: Checkpoint,
    groups_of: dict[str, QuantizationScheme],
    shapes: dict[str, tuple[int, int]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    form: str | None = None,
    second: Callable[[str], bool] | None = None,
    ignore: tuple[str, ...] = ("lm_head",),
) -> None:
    """Quantizes, compresses, writes and reads a small model of Linear layers, of which `lm_head` stays as it is."""
    weights = {name: ckpt.normal(*shape, dtype=dtype) for name, shape in shapes.items()}
    weights["lm_head"] = ckpt.normal(8, 16, dtype=dtype)
    model = model_of(weights)
    apply_quantization_config(model, QuantizationConfig(config_groups=groups_of, ignore=list(ignore)))
    for name in shapes:
        if hasattr(model.get_submodule(name), "quantization_scheme"):
            observe(model.get_submodule(name))
    compressor = ModelCompressor.from_pretrained_model(model, form)
    compressor.compress_model(model)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tensors["model.norm.weight"] = ckpt.norm(16, dtype)
    ckpt.write(tensors, ckpt.config(torch_dtype=name_of(dtype)), second=second)
    compressor.update_config(str(ckpt.folder))
    stored = ckpt.read()
    for name in (*weights, "model.norm"):
        scheme = name != "model.norm" and getattr(model.get_submodule(name), "quantization_scheme", None)
        if scheme:
            by_library = decompressed(parts_of(stored, name), scheme, scheme.format.value)
            again = RESTATED[scheme.format.value](parts_of(stored, name), scheme.weights)
            ckpt.expect(f"{name}.weight", by_library, again)
        else:
            ckpt.plain(f"{name}.weight", stored[f"{name}.weight"])


def parts_of(stored: dict[str, torch.Tensor], module: str) -> dict[str, torch.Tensor]:
    """The tensors of a module's weight, by their names in the module."""
    return {k.removeprefix(f"{module}."): value for k, value in stored.items() if k.startswith(f"{module}.weight")}


def linear(form: str | None = None, **weights: object) -> dict[str, QuantizationScheme]:
    """One group of all Linear layers with these arguments for their weights."""
    return {"group_0": QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=form)}


def preset(name: str, targets: tuple[str, ...] = ("Linear",)) -> dict[str, QuantizationScheme]:
    """One group of these layers with one of the library's named schemes."""
    return {"group_0": preset_name_to_scheme(name, list(targets))}


def add(name: str, shows: str, run: Callable[[Checkpoint], None]) -> None:
    fixture(name, writer=WRITER, reader=READER, shows=shows)(run)


# ---- pack-quantized ----


def pack(
    name: str,
    shows: str,
    width: int,
    group_size: int | None = None,
    *,
    symmetric: bool = True,
    strategy: str | None = None,
    shapes: dict[str, tuple[int, int]] | None = None,
    block: list[int] | None = None,
    **how: object,
) -> None:
    """Adds a fixture of integers packed in 32-bit words."""
    args = {"num_bits": width, "symmetric": symmetric, "strategy": strategy or ("group" if group_size else "channel")}
    if group_size:
        args["group_size"] = group_size
    if block:
        args |= {"strategy": "block", "block_structure": block}
    add(name, shows, lambda ckpt: make(ckpt, linear(**args), shapes or SHAPES, form="pack-quantized", **how))


SHAPES = {Q: (40, 128), DOWN: (24, 256)}
SMALL = {Q: (13, 64), DOWN: (10, 96)}
ODD = {Q: (13, 77), DOWN: (10, 131)}
F16, F32 = torch.float16, torch.float32

pack(
    "ct_pack_w4_g32_sym",
    "`pack-quantized`: int4, groups of 32, symmetric; scales in the other shard",
    4,
    32,
    second=lambda name: "scale" in name,
)
pack(
    "ct_pack_w4_g128_asym",
    "int4, groups of 128, zero points packed down the rows; f16",
    4,
    128,
    symmetric=False,
    dtype=F16,
)
pack("ct_pack_w1_g32_asym", "1 bit, zero points of 1 bit", 1, 32, symmetric=False, shapes=SMALL)
pack("ct_pack_w2_g32_asym", "2 bits, zero points", 2, 32, symmetric=False, shapes=SMALL)
pack("ct_pack_w3_g32_asym", "3 bits across the borders of words, zero points too", 3, 32, symmetric=False, shapes=SMALL)
pack("ct_pack_w5_g32", "5 bits; f32 scales", 5, 32, shapes=SMALL, dtype=F32)
pack("ct_pack_w6_g32_asym", "6 bits, zero points; f32 scales", 6, 32, symmetric=False, shapes=SMALL, dtype=F32)
pack("ct_pack_w7_g32", "7 bits", 7, 32, shapes=SMALL)
pack("ct_pack_w8_g32_asym", "8 bits, zero points; f32 scales", 8, 32, symmetric=False, shapes=SMALL, dtype=F32)
pack("ct_pack_w3_channel", "3 bits, one scale a row; odd row lengths, so that `weight_shape` is needed", 3, shapes=ODD)
pack("ct_pack_w4_channel_asym", "4 bits, one scale and zero point a row; odd sizes", 4, symmetric=False, shapes=ODD)
pack("ct_pack_w8_channel", "8 bits, one scale a row; f32", 8, shapes=ODD, dtype=F32)
pack("ct_pack_w4_tensor", "4 bits, one scale in all", 4, strategy="tensor", shapes=ODD)
pack(
    "ct_pack_w8_tensor_asym",
    "8 bits, one scale and one zero point in all, which is not packed: I8 [1]",
    8,
    strategy="tensor",
    symmetric=False,
    shapes=ODD,
)
pack(
    "ct_pack_w8_block",
    "`pack-quantized` with `block_structure`: 8 bits in blocks of 32 x 64, ragged; one tensor in a single block",
    8,
    block=[32, 64],
    shapes={Q: (10, 52), DOWN: (72, 131)},
)
pack(
    "ct_pack_w4_block_asym",
    "4 bits in blocks of 16 x 32 with zero points, which are not packed: I8; f16",
    4,
    symmetric=False,
    block=[16, 32],
    shapes={Q: (16, 96), DOWN: (40, 70)},
    dtype=F16,
)


@fixture(
    "ct_pack_experts",
    writer="compressed-tensors 0.20.0 `PackedQuantizationCompressor.compress`",
    reader=READER,
    shows="experts in one tensor of three axes, `weight_shape` has three entries; 5 bits, zero points"
    " packed in each expert",
)
def ct_pack_experts(ckpt: Checkpoint) -> None:
    groups_of = linear(num_bits=5, symmetric=False, strategy="group", group_size=32)
    scheme = groups_of["group_0"]
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(16))}
    for name, shape in {"gate_up_proj": (3, 26, 64), "down_proj": (3, 21, 32)}.items():
        module, weight = f"model.layers.0.mlp.experts.{name}", ckpt.normal(*shape, dtype=torch.bfloat16)
        parts = weight.unflatten(-1, (-1, 32))
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), scheme.weights)
        made = compressor.compress(
            {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero}, scheme
        )
        tensors |= {f"{module}.{part}": value for part, value in made.items()}
        ckpt.expect(f"{module}.weight", decompressed(made, scheme, "pack-quantized"), integers(made, scheme.weights))
    ckpt.write(tensors, ckpt.config())
    config = QuantizationConfig(config_groups=groups_of, ignore=["lm_head"], format="pack-quantized")
    ModelCompressor(config).update_config(str(ckpt.folder))


@fixture(
    "ct_kimi",
    writer=WRITER,
    reader=READER,
    shows="`quantization_config` inside `text_config`; experts only, int4 in groups of 32; `weight_shape` is I32",
)
def ct_kimi(ckpt: Checkpoint) -> None:
    layer = "language_model.model.layers.1"
    shapes = {
        f"{layer}.mlp.experts.{expert}.{name}": shape
        for expert in range(2)
        for name, shape in {"gate_proj": (24, 64), "up_proj": (24, 64), "down_proj": (32, 32)}.items()
    }
    shapes |= {f"{layer}.self_attn.o_proj": (16, 32), f"{layer}.mlp.shared_experts.up_proj": (16, 32)}
    ignore = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")
    make(ckpt, linear(num_bits=4, strategy="group", group_size=32), shapes, ignore=ignore)
    tensors = {n: t.int() if n.endswith("weight_shape") else t for n, t in ckpt.read().items()}
    config = json.loads((ckpt.folder / "config.json").read_text())
    text = {"model_type": "kimi_k2", "quantization_config": config.pop("quantization_config")}
    kimi = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    ckpt.write(tensors, config | kimi)


# ---- whole bytes ----

add(
    "ct_int8_channel",
    "`int-quantized`: I8, one scale a row; f32",
    lambda ckpt: make(ckpt, preset("W8A8"), ODD, dtype=F32),
)
add(
    "ct_int8_tensor_asym",
    "I8, one scale and one zero point in all",
    lambda ckpt: make(
        ckpt, linear(num_bits=8, strategy="tensor", symmetric=False), ODD, form="int-quantized", dtype=F32
    ),
)
add(
    "ct_int8_g32_asym",
    "I8 in groups of 32, a zero point for each; f16",
    lambda ckpt: make(
        ckpt,
        linear(num_bits=8, strategy="group", group_size=32, symmetric=False),
        SMALL,
        form="int-quantized",
        dtype=F16,
    ),
)
add(
    "ct_naive_int4",
    "`naive-quantized`: codes of 4 bits in whole bytes",
    lambda ckpt: make(ckpt, linear(num_bits=4, strategy="channel"), ODD, form="naive-quantized"),
)
add("ct_fp8_tensor", "`float-quantized`: one scale [1]; an `input_scale`", lambda ckpt: make(ckpt, preset("FP8"), ODD))
add("ct_fp8_channel", "one scale a row", lambda ckpt: make(ckpt, preset("FP8_DYNAMIC"), ODD, dtype=F32))
add(
    "ct_fp8_block",
    "blocks of 128 x 128, ragged; bf16 scales",
    lambda ckpt: make(ckpt, preset("FP8_BLOCK"), {Q: (130, 140), DOWN: (20, 130)}),
)
add(
    "ct_naive_fp8",
    "`naive-quantized`: weights alone",
    lambda ckpt: make(ckpt, linear(num_bits=8, type="float", strategy="channel"), ODD),
)

# ---- microscaling ----

FOUR = {Q: (24, 64), DOWN: (16, 160)}
add(
    "ct_nvfp4",
    "`nvfp4-pack-quantized`: the global scale divides; an `input_global_scale` to ignore",
    lambda ckpt: make(ckpt, preset("NVFP4"), {Q: (24, 64), DOWN: (16, 144)}),
)
add("ct_mxfp4", "`mxfp4-pack-quantized`: scales are U8 exponents", lambda ckpt: make(ckpt, preset("MXFP4A16"), FOUR))
add("ct_mxfp6", "`mxfp6-pack-quantized`: four codes in three bytes", lambda ckpt: make(ckpt, preset("MXFP6A16"), FOUR))
add("ct_mxfp8", "`mxfp8-quantized`: F8_E4M3 with U8 exponents", lambda ckpt: make(ckpt, preset("MXFP8A16"), FOUR))


@fixture(
    "ct_mixed",
    writer=WRITER,
    reader=READER,
    shows="`mixed-precision`: a format for each of the two groups, int4 and FP8, chosen by regular expressions",
)
def ct_mixed(ckpt: Checkpoint) -> None:
    first = QuantizationScheme(
        targets=["re:.*mlp.*"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    )
    make(ckpt, {"group_0": first, "group_1": preset_name_to_scheme("FP8_DYNAMIC", ["re:.*self_attn.*"])}, FOUR)


# ---- version 0.12.2 ----


def older(name: str, shows: str, shapes: dict[str, tuple[int, int]], dtype: torch.dtype = F16, **args: object) -> None:
    """Adds a fixture of the older version, which runs in a process of its own."""

    @fixture(
        name,
        writer="compressed-tensors 0.12.2 `ModelCompressor.compress`",
        reader="compressed-tensors 0.12.2 `unpack_from_int32`, `dequantize`, scales cast to f32",
        shows=shows,
    )
    def run(ckpt: Checkpoint) -> None:
        weights = {module: ckpt.normal(*shape, dtype=dtype) for module, shape in shapes.items()}
        weights["lm_head"] = ckpt.normal(8, 16, dtype=dtype)
        (ckpt.folder / "config.json").write_text(json.dumps(ckpt.config(torch_dtype=name_of(dtype))))
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder)
            save_file(weights, source / "weights.safetensors")
            (source / "arguments.json").write_text(json.dumps(args))
            place = os.path.abspath(os.environ["OLDER_COMPRESSED_TENSORS"])
            command = [sys.executable, "-m", "make.older", folder, str(ckpt.folder)]
            subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": place}, check=True)
            found = load_file(source / "read.safetensors")
        stored = ckpt.read()
        ckpt.plain("lm_head.weight", stored["lm_head.weight"])
        for module in shapes:
            again = integers(parts_of(stored, module), QuantizationArgs(num_bits=args["num_bits"]), words_alone)
            ckpt.expect(f"{module}.weight", found[f"{module}.weight"], again)


OLD = {Q: (13, 64), DOWN: (14, 160)}
ALONE = "whole codes in each word: the layout before version 0.17"
older("ct_old_w3_g32", f"3 bits, {ALONE}", OLD, num_bits=3, strategy="group", group_size=32)
older(
    "ct_old_w5_g32_asym",
    f"5 bits, {ALONE}; packed zero points, which have as many words in both layouts",
    OLD,
    num_bits=5,
    strategy="group",
    group_size=32,
    symmetric=False,
)
older("ct_old_w6_channel", f"6 bits, {ALONE}; odd row lengths", ODD, num_bits=6, strategy="channel")
older("ct_old_w7_g32", f"7 bits, {ALONE}; f32 scales", OLD, F32, num_bits=7, strategy="group", group_size=32)
older(
    "ct_old_g_idx",
    "`weight_g_idx`: groups of columns that are not neighbours (`actorder: group`)",
    OLD,
    num_bits=4,
    strategy="group",
    group_size=32,
    actorder="group",
)
older(
    "ct_old_g_idx_asym",
    "the same with zero points",
    OLD,
    num_bits=8,
    strategy="group",
    group_size=32,
    actorder="group",
    symmetric=False,
)
