"""Published quantized checkpoints: the weights that their readers find, whole, in a file of their own, and unpacked."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.quantized import FIXTURES, FOLDER, IN_GGUF, each_kind, each_kind_with

import safeload
from safeload import FormatError, TensorNotFoundError
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.no_core

FP8, SHAPE = "model.layers.0.self_attn.o_proj.weight", (192, 136)


def assert_same(got, want):
    """The same names, shapes and values; NaN nowhere. A zero may have another sign: modelopt's table has no -0."""
    assert got.keys() == want.keys()
    for name, values in want.items():
        found = got[name].astype(np.float32, copy=False)
        assert found.shape == values.shape
        np.testing.assert_array_equal(found, values, err_msg=name)


@pytest.mark.parametrize("name", FIXTURES)
def test_the_weights_are_those_that_the_libraries_reader_finds(name):
    want = FIXTURES[name].expected()
    assert_same(safeload.load(FOLDER / name, dtype="float32"), want)
    with safeload.open(FOLDER / name) as checkpoint:
        assert_same({key: np.asarray(value) for key, value in checkpoint.load().items()}, want)
        for key, info in checkpoint.tensors.items():
            assert info.shape == want[key].shape
            if len(info.parts) > 1:
                assert checkpoint[key].scheme == info.dtype
                assert checkpoint[key].parts.keys() == set(info.parts)


@each_kind_with("grid_bytes", {str(count): count for count in (1, 100, 700)})
def test_tensors_of_large_grids_are_restored_in_ranges_of_rows(fixture, grid_bytes, monkeypatch):
    inside.tune(monkeypatch, grid_bytes=grid_bytes)
    assert_same(safeload.load(fixture.folder, dtype="float32"), fixture.expected())


@each_kind(*IN_GGUF)
def test_a_file_of_packed_weights_opens_alone(fixture, tmp_path):
    """Saved and converted: the stored parts, unchanged, and what the config said of them."""
    path, want = fixture.folder, fixture.expected()
    save_file(safeload.load(path), tmp_path / "saved.safetensors")
    safeload.convert(path, tmp_path / "converted.safetensors")
    with safeload.open(path) as checkpoint, safeload.open(path, stored=True) as stored:
        labels = {key: (info.dtype, info.shape) for key, info in checkpoint.tensors.items()}
        parts = {part: stored[part] for info in checkpoint.tensors.values() for part in info.parts}
        for file in tmp_path.iterdir():
            assert {key: (info.dtype, info.shape) for key, info in safeload.open(file).tensors.items()} == labels
            assert_same(safeload.load(file, dtype="float32"), want)
            arrays = load_file(file)
            # A conversion also keeps what only activations need.
            kept = dict(stored) if file.stem == "converted" else parts
            assert arrays.keys() == kept.keys()
            for key, array in arrays.items():
                assert (array.dtype, array.tobytes()) == (kept[key].dtype, kept[key].tobytes())


def test_a_folder_of_dequantized_weights_has_a_config_without_a_quantization(tmp_path):
    for name in FIXTURES:
        path, made = FOLDER / name, tmp_path / name
        before = safeload.open(path).config
        safeload.convert(path, made, dtype="float32", raw=True, max_shard_size="20KB")
        assert_same(safeload.load(made), FIXTURES[name].expected())
        if before is not None and name != "bitnet_online":  # whose weights are not packed
            assert "quantization" not in json.dumps(json.loads((made / "config.json").read_text("utf-8")))


def test_stored_shows_the_tensors_as_the_files_name_them():
    for name in FIXTURES.keys() - set(IN_GGUF):
        fixture = FIXTURES[name]
        with safeload.open(fixture.folder, stored=True) as checkpoint:
            want = fixture.stored()
            assert checkpoint.keys() == want.keys()
            assert all(checkpoint[key].tobytes() == array.tobytes() for key, array in want.items())


def test_a_part_is_not_a_tensor():
    with safeload.open(FOLDER / "fp8_block") as checkpoint:
        with pytest.raises(TensorNotFoundError, match=rf"is a part of '{re.escape(FP8)}'; open with stored=True"):
            checkpoint[f"{FP8}_scale_inv"]
        with pytest.raises(TensorNotFoundError, match="scales activations, not weights; open with stored=True"):
            checkpoint[FP8.replace("weight", "activation_scale")]


def test_a_slice_reads_the_rows_that_it_selects():
    want = FIXTURES["fp8_block"].expected()[FP8]
    with safeload.open(FOLDER / "fp8_block") as checkpoint:
        rows = checkpoint.get_slice(FP8)
        assert (rows.shape, rows.dtype) == (SHAPE, np.float32)
        for index in np.s_[2:5], np.s_[-1], np.s_[130:, ::7], np.s_[::60, 3], np.s_[..., 0]:
            np.testing.assert_array_equal(rows[index], want[index])
        half = checkpoint.get_slice(FP8, dtype="bfloat16")[100:140]
        np.testing.assert_array_equal(half, want[100:140].astype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(np.asarray(checkpoint[FP8][128:192]), want[128:])


def write(folder, tensors, config):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


CODES = np.ones((130, 64), ml_dtypes.float8_e4m3fn)
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "tensor 'a.weight' holds F8_E4M3 codes, but the checkpoint has no scale"),
        ((3, 1), r"scales \[3, 1\] do not fit \[130, 64\] in blocks of 128 x 128: expected \[2, 1\]"),
        ((2, 2), r"scales \[2, 2\] do not fit \[130, 64\] in blocks of 128 x 128: expected \[2, 1\]"),
    ],
    ids=["none", "a row too many", "a column too many"],
)
def test_scales_that_are_missing_or_do_not_fit_are_an_error_of_open(scales, message, tmp_path):
    tensors = {"a.weight": CODES}
    if scales is not None:
        tensors["a.weight_scale_inv"] = np.ones(scales, np.float32)
    folder = write(tmp_path / "x", tensors, BLOCKS)
    with pytest.raises(FormatError, match=message):
        safeload.open(folder)
    assert safeload.load(folder, stored=True).keys() == tensors.keys()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_an_error_that_names_its_place(value, tmp_path):
    scales = np.ones((2, 1), np.float32)
    scales[1] = value
    folder = write(tmp_path / "x", {"a.weight": CODES, "a.weight_scale_inv": scales}, BLOCKS)
    with pytest.raises(FormatError, match=rf"tensor 'a.weight': its scale is {value} at \[1, 0\]"):
        safeload.load(folder, dtype="float32")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's own memory counts too")
def test_true_weights_take_the_memory_of_the_result_and_little_more(tmp_path):
    count, rows = 4, 4096
    tensors = {}
    for k in range(count):
        tensors[f"{k}.weight"] = np.zeros((rows, rows), ml_dtypes.float8_e4m3fn)
        tensors[f"{k}.weight_scale_inv"] = np.ones((rows // 128, rows // 128), np.float32)
    folder = write(tmp_path / "x", tensors, BLOCKS)
    script = """
        import sys
        import safeload
        def peak():  # ru_maxrss begins with the memory of the process that started this one
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM"))
        safeload.load(sys.argv[1], [], dtype="float32")
        before = peak()
        arrays = safeload.load(sys.argv[1], dtype="float32")
        print(peak() - before - sum(a.nbytes for a in arrays.values()) // 2**20)
    """
    done = subprocess.run(
        [sys.executable, "-I", "-c", textwrap.dedent(script), str(folder)], capture_output=True, text=True, check=True
    )
    shutil.rmtree(folder)
    assert int(done.stdout) <= 64
