"""LoRA adapters as PEFT writes them, and what is merged right."""

import json
import zlib

import numpy as np

from builders import llama_models
from builders.paths import DATA
from safeload.numpy import save_file

#: Adapters by PEFT itself, see the README there.
LORA = DATA / "lora"
PREFIX = "base_model.model."


def assert_merged(found, expected, terms):
    """Sums of so many products in any order, of values of about 1, and a few roundings after them."""
    bound = (terms + 6) * np.finfo(np.float32).eps * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def assert_same(found, expected):
    """Arrays of the same names, dtypes and values."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert np.array_equal(found[name], value), name


def write(folder, tensors, config=None, **more):
    """An adapter of PEFT."""
    folder.mkdir(exist_ok=True)
    named = {PREFIX + name: value for name, value in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", durable=False)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4} if config is None else config
    (folder / "adapter_config.json").write_text(json.dumps({**config, **more}))
    return folder


def pair(rows=6, columns=5, rank=2, module="w", seed=0):
    """A and B of a module."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((rank, columns), np.float32), rng.standard_normal((rows, rank), np.float32)
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


#: Parts of the names of weights that few adapters change.
_OFTEN_FROZEN = ("norm", "embed", "lm_head", "router", "gate.weight", "wte", "wpe", "vision", "visual", "conv1d")


def factors(name, rows, columns, rank):
    """A and B that depend on a name alone."""
    random = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    return [(random.random(shape) * 2 - 1).astype(np.float32) for shape in ((rank, columns), (rows, rank))]


def of_model(folder, model, *, only=None, rank=4, dtype=np.float32, **config):
    """An adapter of PEFT for the matrices of a model of `llama_models`, or for those named with one of ``only``."""
    in_first = model["config"].get("model_type") == "gpt2"  # Conv1D
    tensors = {}
    for name, shape in model["tensors"].items():
        parts = only or ("layers", "layer.", ".h.", "blocks")
        chosen = any(part in name for part in parts) and (only or not any(part in name for part in _OFTEN_FROZEN))
        if not (chosen and name.endswith(".weight") and len(shape) == 2):
            continue
        module, ends = name.removesuffix(".weight"), ("lora_A.weight", "lora_B.weight")
        rows, columns = shape[::-1] if in_first and ".h." in name else shape
        if "embed_tokens" in name:
            rows, columns, ends = columns, rows, ("lora_embedding_A", "lora_embedding_B")
        pair = factors(name, rows, columns, rank)
        tensors |= {f"{module}.{end}": part.astype(dtype) for end, part in zip(ends, pair, strict=True)}
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "fan_in_fan_out": in_first}
    return write(folder, tensors, settings, **config)


def models_in(folder, adapter):
    """A function that returns the folder of a model and that of an adapter for it."""

    def write(name, *, entry=None, **options):
        entry = llama_models.listed()[name] if entry is None else entry
        return llama_models.write_folder(folder / name, entry), of_model(folder / adapter, entry, **options)

    return write
