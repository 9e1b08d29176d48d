"""Quantizes the models of tests/builders/engine_models.py with the engines' own tools, and records what they write.

python make.py FOLDER, with tests/ on PYTHONPATH; README.md has the versions. FOLDER keeps the folders.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from builders.engine_models import ANY_SHAPE, DTYPES, EXPERTS, RAGGED, USUAL, described, write_experts, write_model

from safeload.numpy import load_file, save_file

COMPRESSED = ("w4a16", "w4a16_asym", "w8a16", "w8a8", "fp8_dynamic", "fp8_block", "nvfp4a16", "mxfp4a16")
COMPRESSED += ("w4afp8", "mxfp8a16")
MLX = {f"mlx{bits}": (bits, 64, "affine") for bits in (2, 3, 4, 5, 6, 8)}
MLX |= {f"mlx{bits}-g{group}": (bits, group, "affine") for bits in (2, 3, 4, 5, 6, 8) for group in (32, 128)}
MLX |= {"mlx-mxfp4": (4, 32, "mxfp4"), "mlx-nvfp4": (4, 16, "nvfp4"), "mlx-mxfp8": (8, 32, "mxfp8")}
# Formats that mlx-lm writes of models with experts.
MLX_EXPERTS = ("mlx4", "mlx3-g128", "mlx-mxfp4", "mlx-nvfp4", "mlx-mxfp8")
KEPT = ("lm_head.weight", "model.embed_tokens.weight")


def to_torch(array):
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array, np.float32))
    return tensor.to(getattr(torch, str(array.dtype)))


def to_numpy(tensor):
    import ml_dtypes
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.float().numpy().astype(ml_dtypes.bfloat16)
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return tensor.numpy()


def compressed(source, out, name):
    from llmcompressor import model_free_ptq

    ignore = ["re:.*lm_head", "re:.*embed_tokens"]
    model_free_ptq(source, out, scheme=name.upper(), ignore=ignore, max_workers=1, device="cpu")
    if name == "w4afp8":
        pack(out)


def pack(out):
    """Packs the codes of W4AFP8, of which llm-compressor stores a byte each: vLLM reads eight in a word."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    tensors = load_file(out / "model.safetensors")
    for key in [key for key, array in tensors.items() if array.dtype == np.int8]:
        codes = tensors.pop(key)
        tensors[f"{key}_packed"] = pack_to_int32(torch.from_numpy(codes.copy()), 4).numpy()
        tensors[f"{key}_shape"] = np.int64(codes.shape)
    save_file(tensors, out / "model.safetensors")
    text = (out / "config.json").read_text()
    (out / "config.json").write_text(text.replace("int-quantized", "pack-quantized"))


def mlx(source, out, name):
    import mlx.core as mx
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    bits, group, mode = MLX[name]
    model, config = load_model(source, lazy=True)
    cast = getattr(model, "cast_predicate", lambda _: True)  # as in mlx_lm.convert
    dtype = getattr(mx, config["torch_dtype"])
    model.update(tree_map_with_path(lambda key, x: x.astype(dtype) if cast(key) else x, model.parameters()))
    model, config = quantize_model(model, config, group, bits, mode=mode)
    save_model(out, model)
    save_config(config, out / "config.json")


def each_weight(source, out, name):
    """Applies a function of a library to each weight of a linear module, and writes its results."""
    out.mkdir(parents=True)
    function = fp8 if name == "deepseek_fp8" else bitsandbytes
    result = {}
    for key, array in load_file(source / "model.safetensors").items():
        linear = array.ndim == 2 and key not in KEPT
        result.update(function(key, to_torch(array), name) if linear else {key: array})
    save_file(result, out / "model.safetensors")


def fp8(key, weight, name):
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    settings = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=None)
    parts = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert({key: [weight]})
    return {part: to_numpy(value) for part, value in parts.items()}


def bitsandbytes(key, weight, name):
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight, blocksize=64, quant_type=name.removeprefix("bnb_"))
    parts = {f"{key}.{part}": to_numpy(value) for part, value in state.as_dict(packed=True).items()}
    return {key: to_numpy(codes), **parts}


def record(out, name):
    """Return what a tool has written."""
    result = {"tensors": described(out / "model.safetensors")}
    if (out / "config.json").exists():
        result["quantization_config"] = json.loads((out / "config.json").read_text())["quantization_config"]
    if name in MLX:
        result["index"] = json.loads((out / "model.safetensors.index.json").read_text())["metadata"]
    return result


def main(folder):
    expected = {}
    for kind in EXPERTS:
        source = write_experts(folder / kind, kind)
        for name in MLX_EXPERTS:
            out = folder / f"{kind}-{name}"
            mlx(source, out, name)
            expected[f"{kind}/bfloat16/{name}"] = record(out, name)
    for dtype in DTYPES:
        for widths, kind in ((USUAL, "usual"), (RAGGED, "ragged")):
            source = write_model(folder / kind / dtype, dtype, widths)
            names = ANY_SHAPE if widths is RAGGED else (*COMPRESSED, "deepseek_fp8", *MLX, "bnb_nf4", "bnb_fp4")
            for name in names:
                if dtype != "bfloat16" and "-g" in name:
                    continue
                out = folder / f"{kind}-{dtype}-{name}"
                write = compressed if name in COMPRESSED else mlx if name in MLX else each_weight
                write(source, out, name)
                expected[f"{kind}/{dtype}/{name}"] = record(out, name)
    text = json.dumps(expected, separators=(",", ":"), sort_keys=True).replace('},"', '},\n"')
    (Path(__file__).parent / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
