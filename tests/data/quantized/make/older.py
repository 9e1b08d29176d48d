"""The writer of compressed-tensors 0.12.2, in a process of its own: ``python -m make.older INPUT OUTPUT``.

``INPUT`` has the weights (`weights.safetensors`) and the arguments for them (`arguments.json`); `read.safetensors`
beside them is what the same version reads.
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors import __version__
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.quantized_compressors.pack_quantized import unpack_from_int32
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file

from .linears import model_of, observe


def read(stored: dict[str, torch.Tensor], args: QuantizationArgs) -> torch.Tensor:
    """The steps of its ``decompress_weight``, which refuses zero points that are packed."""
    scale, zero, shape = stored["weight_scale"].float(), stored.get("weight_zero_point"), stored["weight_shape"]
    if zero is not None:
        zero = unpack_from_int32(zero, args.num_bits, (int(shape[0]), scale.shape[-1]), packed_dim=0)
    codes = unpack_from_int32(stored["weight_packed"], args.num_bits, torch.Size(shape))
    return dequantize(x_q=codes, scale=scale, zero_point=zero, g_idx=stored.get("weight_g_idx"), args=args)


def main(source: Path, folder: Path) -> None:
    assert __version__ == "0.12.2", __version__
    weights = load_file(source / "weights.safetensors")
    args = QuantizationArgs(**json.loads((source / "arguments.json").read_text()))
    model = model_of(weights)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=args)}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    quantized = [name for name in weights if name != "lm_head"]
    for name in quantized:
        observe(model.get_submodule(name))
    compressor = ModelCompressor.from_pretrained_model(model, None, "pack-quantized")
    stored = {name: tensor.contiguous() for name, tensor in compressor.compress(model).items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    compressor.update_config(str(folder))
    found = {}
    for name in quantized:
        parts = {k.removeprefix(f"{name}."): value for k, value in stored.items() if k.startswith(f"{name}.weight")}
        found[f"{name}.weight"] = read(parts, args).contiguous()
    save_file(found, source / "read.safetensors")


main(*map(Path, sys.argv[1:]))
