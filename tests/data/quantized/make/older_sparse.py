"""The sparse writers of compressed-tensors 0.12.2, in a process of its own.

Run as ``python -m make.older_sparse INPUT OUTPUT``.

``INPUT`` has the weights (`weights.safetensors`), the format and the arguments of a quantization or null
(`arguments.json`); `read.safetensors` beside them is what the same version reads.
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors import __version__
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import sparse24_bitmask_decompress
from compressed_tensors.compressors.sparse_compressors.sparse_bitmask import bitmask_decompress
from compressed_tensors.config import BitmaskConfig, Sparse24BitMaskConfig
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file

from .linears import model_of, observe

CONFIGS = {"sparse-bitmask": BitmaskConfig, "sparse-24-bitmask": Sparse24BitMaskConfig}
READERS = {"sparse-bitmask": bitmask_decompress, "sparse-24-bitmask": sparse24_bitmask_decompress}


def read(stored: dict[str, torch.Tensor], form: str, args: QuantizationArgs | None) -> torch.Tensor:
    """The steps of its ``decompress_model``, with scales cast to f32."""
    shape = torch.Size(stored["shape"].flatten().tolist())
    values = stored["compressed"]
    as_bytes = values.view(torch.int8) if values.dtype == torch.float8_e4m3fn else values
    dense = READERS[form](as_bytes, stored["bitmask"], shape).view(values.dtype)
    if args is None:
        return dense.float()
    zero = stored.get("weight_zero_point")
    return dequantize(x_q=dense, scale=stored["weight_scale"].float(), zero_point=zero, args=args)


def main(source: Path, folder: Path) -> None:
    assert __version__ == "0.12.2", __version__
    weights = load_file(source / "weights.safetensors")
    form, given = json.loads((source / "arguments.json").read_text())
    args = None if given is None else QuantizationArgs(**given)
    model = model_of(weights)
    sparse = [name for name in weights if name != "lm_head"]
    if args is not None:
        groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=args)}
        apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
        for name in sparse:
            observe(model.get_submodule(name))
    config = CONFIGS[form](targets=["Linear"], ignore=["lm_head"])
    if form == "sparse-bitmask":
        config.sparsity_structure = "unstructured"
    # It would choose 32-bit words for groups, which no mask is made of.
    whole = None if args is None else "float-quantized" if args.type == "float" else "int-quantized"
    compressor = ModelCompressor.from_pretrained_model(model, config, whole)
    stored = {name: tensor.contiguous() for name, tensor in compressor.compress(model).items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    compressor.update_config(str(folder))
    found = {}
    for name in sparse:
        parts = {k.removeprefix(f"{name}."): value for k, value in stored.items() if k.startswith(f"{name}.")}
        found[f"{name}.weight"] = read(parts, form, args).contiguous()
    save_file(found, source / "read.safetensors")


main(*map(Path, sys.argv[1:]))
