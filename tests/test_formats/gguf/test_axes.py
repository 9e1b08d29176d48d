"""Tensors with more axes than ggml has: gguf-py writes and reads them for video models."""

import numpy as np
import pytest
from builders import gguf_build as g

import safeload

SHAPES = [(2, 3, 1, 2, 2), (1,) * 5, (1,) * 64, (2, 1, 3, 1, 2, 1, 2), (2,) * 8]


def file_of(path, shape, kind=0, data=None, arch="wan"):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    data = values.tobytes() if data is None else data
    head = np.arange(8, dtype=np.float32)
    begin = len(data) + -len(data) % 32
    tensors = [g.tensor("patch.weight", shape[::-1], kind, 0), g.tensor("head", [8], 0, begin)]
    entries = [g.entry("general.architecture", g.STRING, arch)] if arch else []
    path.write_bytes(g.build(entries, tensors, data + bytes(begin - len(data)) + head.tobytes()))
    return values, head


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)} axes of {max(shape)}")
def test_they_are_read_and_written(shape, tmp_path):
    path = tmp_path / "x.gguf"
    values, head = file_of(path, shape)
    with safeload.open(path) as opened:
        assert opened.tensors["patch.weight"].shape == shape
        np.testing.assert_array_equal(opened["patch.weight"], values)
        np.testing.assert_array_equal(opened.get_slice("patch.weight")[:1], values[:1])
        np.testing.assert_array_equal(opened["head"], head)
    for name in ("x.safetensors", "x.npz", "y.gguf"):
        safeload.convert(path, tmp_path / name)
        np.testing.assert_array_equal(safeload.load(tmp_path / name)["patch.weight"], values)


def test_blocks_of_five_axes_are_dequantized(tmp_path):
    blocks = safeload.quantize(np.linspace(-1, 1, 2 * 3 * 32, dtype=np.float32).reshape(6, 32), "q8_0")
    file_of(tmp_path / "x.gguf", (1, 2, 1, 3, 32), 8, blocks.data.tobytes())
    values = safeload.load(tmp_path / "x.gguf", dtype="float32")["patch.weight"]
    np.testing.assert_array_equal(values, blocks.dequantize().reshape(1, 2, 1, 3, 32))


def test_an_unknown_type_of_five_axes_is_listed(tmp_path):
    _, head = file_of(tmp_path / "x.gguf", (5, 4, 3, 2, 1), 99)
    with safeload.open(tmp_path / "x.gguf") as opened:
        assert opened.tensors["patch.weight"].shape == (5, 4, 3, 2, 1)
        np.testing.assert_array_equal(opened["head"], head)
        with pytest.raises(safeload.UnsupportedError, match="ggml type 99"):
            opened["patch.weight"]


@pytest.mark.parametrize("arch", [None, "llama", "qwen2", "gemma3"])
def test_a_file_that_only_llama_cpp_could_read_has_four_at_most(arch, tmp_path):
    values, _ = file_of(tmp_path / "x.gguf", SHAPES[0], arch=arch)
    np.testing.assert_array_equal(safeload.load(tmp_path / "x.gguf")["patch.weight"], values)
    with pytest.raises(safeload.SafeloadError, match=r"'patch.weight' has 5 dims, but ggml reads at most 4"):
        safeload.convert(tmp_path / "x.gguf", tmp_path / "y.gguf")
    safeload.convert(tmp_path / "x.gguf", tmp_path / "z.safetensors")
    assert safeload.open(tmp_path / "z.safetensors").tensors["patch.weight"].shape == SHAPES[0]
