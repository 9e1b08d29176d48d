"""Int8 from codes that are stored in another order than their values: some rows at a time, with the same result."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.random import rng

import safeload
from safeload.numpy import load_file, save_file


def words(*shape):
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def gptq(inner=96, outer=80, scale=np.float16):
    tensors = {
        "a.qweight": words(inner // 8, outer),
        "a.qzeros": words(3, outer // 8),
        "a.scales": rng.random((3, outer)).astype(scale),
        "a.g_idx": rng.integers(0, 3, inner).astype(np.int32),
    }
    return tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}


def awq():
    tensors = {
        "a.qweight": words(64, 13),
        "a.qzeros": words(2, 13),
        "a.scales": rng.random((2, 104)).astype(np.float16),
    }
    return tensors, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def experts():
    tensors = {
        "a.gate_up_proj_blocks": rng.integers(0, 256, (5, 24, 2, 16), np.uint8),
        "a.gate_up_proj_scales": rng.integers(120, 130, (5, 24, 2), np.uint8),
    }
    return tensors, {"quant_method": "mxfp4"}


def written(folder, tensors, said):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", durable=False)
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    return folder


@pytest.mark.parametrize("most", [1, 96 * 32, 2 * 24 * 64, 1 << 20])
@pytest.mark.parametrize("make", [gptq, awq, experts])
def test_parts_of_any_size(make, most, tmp_path, monkeypatch):
    monkeypatch.setattr(inside.quantizing, "_AT_A_TIME", most)
    folder = written(tmp_path / "x", *make())
    ((name, dense),) = safeload.load(folder, dtype="float32").items()
    for axis in (None, *range(-dense.ndim, dense.ndim)):
        want = safeload.load_quantized({name: dense}, "int8", axis=axis)[name]
        for given in (folder, dict(safeload.load(folder))):
            assert safeload.load_quantized(given, "int8", axis=axis, requantize=True)[name] == want
    safeload.convert(folder, tmp_path / "y.safetensors", quantize="int8", requantize=True)
    safeload.convert({name: dense}, tmp_path / "z.safetensors", quantize="int8")
    of_codes, of_values = load_file(tmp_path / "y.safetensors"), load_file(tmp_path / "z.safetensors")
    assert of_codes.keys() == of_values.keys()
    for key, array in of_values.items():
        np.testing.assert_array_equal(of_codes[key], array)


def test_a_weight_that_is_not_finite_is_told_by_its_index(tmp_path, monkeypatch):
    """A finite scale can make infinite weights."""
    monkeypatch.setattr(inside.quantizing, "_AT_A_TIME", 96 * 32)
    tensors, said = gptq(scale=ml_dtypes.bfloat16)
    tensors["a.scales"][2, 70] = 3e38
    tensors["a.g_idx"][:50] = 1
    tensors["a.qweight"][:, 70] = -1
    folder = written(tmp_path / "x", tensors, said)
    dense = safeload.load(folder, dtype="float32")
    with pytest.raises(safeload.RangeError, match=r"tensor 'a.weight': .*\[70, ") as values:
        safeload.load_quantized(dense, "int8")
    with pytest.raises(safeload.RangeError) as codes:
        safeload.load_quantized(folder, "int8", requantize=True)
    assert str(codes.value) == str(values.value)


_GROWTH = inside.program("""
    import sys
    import safeload
    def peak():  # ru_maxrss begins with the memory of the process that started this one
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM"))
    safeload.load(sys.argv[1], [])
    from builders.inside import quantizing as module
    module._AT_A_TIME = 4 << 20
    loaded = safeload.load_quantized, safeload.convert  # their modules
    before = peak()
    if len(sys.argv) > 2:
        safeload.convert(sys.argv[1], sys.argv[2], quantize="int8", requantize=True)
    else:
        safeload.load_quantized(sys.argv[1], "int8", requantize=True)
    print(peak() - before)
""")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's own memory counts too")
def test_memory_is_the_result_and_little_more(tmp_path):
    """The values would take 160 MiB as float32; 16 MiB of them are restored at a time."""
    inner, outer = 2048, 20480
    said = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False}
    tensors = {
        "a.qweight": np.zeros((inner // 8, outer), np.int32),
        "a.qzeros": np.zeros((inner // 128, outer // 8), np.int32),
        "a.scales": np.ones((inner // 128, outer), np.float16),
        "a.g_idx": rng.permutation(inner).astype(np.int32) // 128,
    }
    folder = written(tmp_path / "x", tensors, said)
    for target in ([], [str(tmp_path / "y.safetensors")]):
        command = [sys.executable, "-I", "-c", textwrap.dedent(_GROWTH), str(folder), *target]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(done.stdout) <= inner * outer // 2**20 + 48
    shutil.rmtree(folder)
