"""The memory that a checkpoint would take, said without reading it, against that of what is really loaded."""

import contextlib

import ml_dtypes
import numpy as np
import pytest
from builders.inside import SCHEMES, sizes
from builders.models import small, write_folder
from builders.quantized import FOLDER
from builders.schemes import ENGINE_FORMATS

import safeload
from safeload.errors import UnsupportedError
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core


def nbytes(weights):
    return sum(value.nbytes for value in weights.values())


def assert_true(path):
    """Every size is that of the loaded arrays, and none is missing."""
    found = sizes(path)
    assert found.stored == nbytes(safeload.load(path))
    assert found.dtypes == {
        name: nbytes(safeload.load(path, dtype=name)) for name in ("float32", "float16", "bfloat16")
    }
    expected = {scheme: nbytes(safeload.load_quantized(path, scheme, requantize=True)) for scheme in SCHEMES}
    for preset in ENGINE_FORMATS:
        with contextlib.suppress(UnsupportedError):  # of engines that do not have the model
            expected[preset] = nbytes(safeload.load_quantized(path, preset, requantize=True))
    assert found.schemes == expected


def test_sizes_of_a_real_file(data):
    assert_true(data / "silero_vad_16k.safetensors")


@pytest.mark.parametrize("kind", ["llama-gqa", "llama-tied", "gpt2", "bert", "moondream2"])
def test_sizes_of_models_with_a_schema(kind, tmp_path):
    assert_true(write_folder(tmp_path, *small(kind)))


def test_sizes_of_gguf(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    write_folder(folder, *small("llama-gqa"))
    for scheme in (None, "q4_0"):
        path = tmp_path / f"{scheme}.gguf"
        safeload.convert(folder, path, quantize=scheme, raw=True)
        assert_true(path)


@pytest.mark.parametrize("name", ["fp8_block", "ct_pack_w4_g32_sym", "gpt_oss", "mlx_affine4_g64", "bitnet_times"])
def test_sizes_of_packed_checkpoints_are_those_of_their_logical_tensors(name):
    assert_true(FOLDER / name)


def test_sizes_of_every_kind_of_tensor(tmp_path):
    tensors = {
        "experts": np.ones((3, 4, 64), np.float16),
        "rows.odd": np.ones((4, 33), np.float32),
        "embed": np.ones((4, 32), ml_dtypes.bfloat16),
        "blocks.0.w": np.ones((2, 32)),
        "blocks.1.w": np.ones((2, 32)),
        "blocks.10.norm": np.ones((2, 32)),
        "empty": np.ones((0, 32), np.float32),
        "scalar": np.float32(1)[()].reshape(()),
        "step": np.array(3, np.int64),
        "complex": np.ones(3, np.complex64),
        "int8": safeload.quantize(np.ones((2, 32), np.float32), "int8", axis=0),
        "q8_0": safeload.quantize(np.ones((2, 32), np.float32), "q8_0"),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    assert_true(tmp_path / "x.safetensors")
    assert sizes(tensors).schemes == sizes(tmp_path / "x.safetensors").schemes


def test_a_head_is_counted_that_is_tied(tmp_path):
    folder = write_folder(tmp_path, *small("llama-tied"))
    assert "lm_head.weight" not in safeload.open(folder)
    tied, untied = (nbytes(safeload.load_quantized(folder, "q8_0", tie_lm_head=tie)) for tie in (True, False))
    assert sizes(folder).schemes["q8_0"] == tied > untied


def test_numbers_in_names_that_mean_a_layer_make_no_difference():
    """Names are grouped by what they say beside their numbers; each name here decides for itself."""
    names = [f"h.{k}.ln_{j}.weight" for k in (0, 1, 10) for j in (1, 2)] + [f"h.{k}.w.{k}" for k in range(12)]
    weights = {name: np.ones((32, 32), np.float16) for name in (*names, "0", "1.2.3", "01.02.norm", "x..y")}
    assert sizes(weights).schemes == {s: nbytes(safeload.load_quantized(weights, s)) for s in SCHEMES}


def test_blocks_without_a_kernel_have_only_the_sizes_that_leave_them_alone():
    blocks = safeload.QuantizedTensor("q8_k", (2, 256), np.zeros((2, 292), np.uint8))
    assert sizes({"w": blocks}) == (584, {}, {})
    assert set(sizes({"norm": blocks}).schemes) == set(SCHEMES)
    assert sizes({"norm": blocks, "x": np.ones((2, 32))}).schemes["q8_0"] == 584 + 68


def test_codes_that_are_not_dequantized_have_no_size_but_their_own(tmp_path):
    codes = {"a.qweight": np.zeros((8, 64), np.int32), "a.qzeros": np.zeros((1, 8), np.int32)}
    codes |= {"a.scales": np.ones((1, 64), np.float16), "a.g_idx": np.zeros(64, np.int32)}
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq", "format": "marlin"}}')
    save_file(codes, tmp_path / "model.safetensors")
    assert sizes(tmp_path) == (nbytes(codes), {}, {})
    with pytest.raises(safeload.UnsupportedError):
        safeload.load_quantized(tmp_path)
