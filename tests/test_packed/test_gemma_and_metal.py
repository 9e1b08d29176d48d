"""Layouts of transformers' quantizers "gemma" and "metal", by the formulas of their own readers."""

import json

import numpy as np
import pytest
from builders.random import rng

import safeload
from safeload import FormatError
from safeload.numpy import save_file

F32 = np.float32


def write(folder, tensors, **said):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))


def unpacked(stored, bits):
    """Codes from the low bits up, minus half of their range."""
    parts = [(stored >> shift & (1 << bits) - 1).astype(F32) for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(len(stored), -1) - (1 << bits - 1)


def test_gemma(tmp_path):
    four, two = rng.integers(0, 256, (6, 20), np.uint8), rng.integers(0, 256, (6, 10), np.uint8)
    eight, table = rng.integers(-128, 128, (6, 40), np.int8), rng.integers(0, 256, (9, 32), np.uint8)
    scales = rng.standard_normal((6, 1), F32)
    blocks = rng.standard_normal((9, 2), F32)
    tensors = {"layers.0.q_proj.weight": four, "layers.0.up.weight": two, "layers.0.down.weight": eight}
    tensors |= {name + "_scale": scales for name in list(tensors)}
    tensors |= {"embed.embedding_quantized": table, "embed.embedding_scale": blocks}
    tensors["layers.0.up.input_activation_scale"] = np.float32([1])
    overrides = {"up$": {"num_bits": 2}, r"layers\.\d+\.down": {"num_bits": 8}, "down|up": {"num_bits": 4}}
    write(tmp_path, tensors, quant_method="gemma", module_quant_configs=overrides)
    got = safeload.load(tmp_path, dtype="float32")
    want = {
        "layers.0.q_proj.weight": unpacked(four, 4) * scales,
        "layers.0.up.weight": unpacked(two, 2) * scales,
        "layers.0.down.weight": eight.astype(F32) * scales,
        "embed.weight": unpacked(table, 4) * blocks.repeat(32, 1),
    }
    assert got.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values)


def test_patterns_hold_for_a_copy_and_not_for_another_name(tmp_path):
    """The first pattern counts, in the order of the config; another name may have other bits."""
    tensors = {"up.weight": rng.integers(0, 256, (4, 8), np.uint8), "up.weight_scale": np.ones((4, 1), F32)}
    (tmp_path / "in").mkdir()
    overrides = {"up": {"num_bits": 2}, ".*": {"num_bits": 4}}
    write(tmp_path / "in", tensors, quant_method="gemma", module_quant_configs=overrides)
    safeload.convert(tmp_path / "in", tmp_path / "copy.safetensors")
    got = safeload.load(tmp_path / "copy.safetensors", dtype="float32")
    np.testing.assert_array_equal(got["up.weight"], unpacked(tensors["up.weight"], 2))
    with pytest.raises(safeload.UnsupportedError, match=r"'up\.weight' stays packed"):
        safeload.convert(tmp_path / "in", tmp_path / "other.safetensors", rename=[("^up", "other")])


@pytest.mark.parametrize("bits", [8, 3, "4", True])
def test_bits_that_do_not_fit_are_no_weights(tmp_path, bits):
    tensors = {"a.weight": np.ones((4, 4), np.uint8), "a.weight_scale": np.ones((4, 1), F32)}
    write(tmp_path, tensors, quant_method="gemma", num_bits=bits)
    with pytest.raises(FormatError, match=r"'a\.weight'.*num_bits"):
        safeload.load(tmp_path)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_metal(tmp_path, bits):
    words = rng.integers(0, 1 << 32, (5, 128 * bits // 32), np.uint32)
    scales, biases = rng.standard_normal((2, 5, 2), F32)
    tensors = {"a.weight": words, "a.scales": scales, "a.qbiases": biases}
    write(tmp_path, tensors, quant_method="metal", bits=bits, group_size=64)
    codes = np.stack([words >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)], -1).reshape(5, 128)
    want = codes.astype(F32) * scales.repeat(64, 1) + biases.repeat(64, 1)
    got = safeload.load(tmp_path, dtype="float32")
    assert got.keys() == {"a.weight"}
    np.testing.assert_array_equal(got["a.weight"], want)
