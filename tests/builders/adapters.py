"""LoRA adapters as PEFT writes them, and what is merged right."""

import json

import numpy as np

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
