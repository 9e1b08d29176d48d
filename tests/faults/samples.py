"""Small checkpoints of every format, large enough that reading one takes several calls."""

import json
import shutil

import ml_dtypes
import numpy as np
from builders import torch_build

import safeload
from safeload.numpy import save_file

SEED = 11


def tensors(dtype=np.float16):
    """Tensors of which one is read in several chunks, one is quantized in several passages, the others share a pool."""
    rng = np.random.default_rng(SEED)
    shapes = {"large.weight": (1700, 1024), "middle.weight": (256, 512), "norm.weight": (512,), "head.bias": (7,)}
    return {name: (rng.standard_normal(shape, np.float32) * 0.1).astype(dtype) for name, shape in shapes.items()}


def _torch(arrays):
    """What torch.save would be given."""
    storages = {name: torch_build.Storage(name, array) for name, array in arrays.items()}
    return torch_build.ordered({name: torch_build.tensor(storages[name], arrays[name].shape) for name in arrays})


def write(folder):
    """Path of each format's checkpoint, by the name of the format."""
    half = tensors()
    paths = {
        "safetensors": folder / "model.safetensors",
        "long header": folder / "long.safetensors",
        "gguf": folder / "model.gguf",
        "moon": folder / "model.moon",
        "npz": folder / "model.npz",
        "npz, compressed": folder / "packed.npz",
        "torch zip": folder / "model.pt",
        "torch legacy": folder / "legacy.pt",
        "shards": folder / "shards",
    }
    save_file(tensors(ml_dtypes.bfloat16), paths["safetensors"], {"format": "pt"}, durable=False)
    named = {f"{k}" * 2000: np.full(3, k, np.float32) for k in range(10, 30)}
    save_file(named, paths["long header"], durable=False)  # of more than the 32 KiB that are read at first
    for format in ("gguf", "moon", "npz"):
        safeload.convert(half, paths[format])
    np.savez_compressed(paths["npz, compressed"], **half)
    paths["torch zip"].write_bytes(torch_build.zip_file(_torch(half)))
    paths["torch legacy"].write_bytes(torch_build.legacy_file(_torch(half)))
    config = {"model_type": "llama", "hidden_size": 512}
    source = folder / "source"
    source.mkdir()
    save_file(tensors(ml_dtypes.bfloat16), source / "model.safetensors", durable=False)
    (source / "config.json").write_text(json.dumps(config))
    safeload.convert(source, paths["shards"], max_shard_size="1MB")
    shutil.rmtree(source)
    return paths
