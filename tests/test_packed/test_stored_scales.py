"""Scales and zero points that the core converts as they are stored: the same bits as by way of float32."""

import json

import ml_dtypes
import numpy as np
import pytest
from builders.inside import dtypes, restore
from builders.quantized import FIXTURES, FOLDER
from builders.random import rng

import safeload
from safeload import FormatError
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

DTYPES = {
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


@pytest.mark.parametrize("name", FIXTURES)
def test_both_ways_give_the_same_bits(name, monkeypatch):
    direct = safeload.load(FOLDER / name, dtype="float32")
    monkeypatch.setattr(restore, "can_store", lambda *args, **options: False)
    by_floats = safeload.load(FOLDER / name, dtype="float32")
    assert direct.keys() == by_floats.keys()
    for key, values in direct.items():
        assert values.tobytes() == by_floats[key].tobytes(), key


@pytest.mark.parametrize("code", DTYPES)
def test_infinities_and_nan_are_recognized(code):
    row, dtype = dtypes.BY_CODE[code], np.dtype(DTYPES[code])
    kind = np.dtype(f"u{dtype.itemsize}")
    codes = np.arange(1 << 8 * dtype.itemsize, dtype=kind)
    values = codes.view(dtype).astype(np.float32)
    finite = np.isfinite(values)
    assert restore.all_finite(codes[finite].astype(kind.newbyteorder("<")).view(np.uint8), row)
    for number in codes[~finite][:: max(1, int((~finite).sum()) // 50)]:
        some = np.full(1 << 16, codes[finite][1], kind)
        some[-1 - int(number) % 7] = number
        assert not restore.all_finite(some.astype(kind.newbyteorder("<")).view(np.uint8), row)
    assert restore._FINITE[code][1] == values[finite].max()


def test_other_dtypes_become_floats_first():
    for code in ("F32", "F64", "I8", "F8_E4M3FNUZ"):
        assert not restore.all_finite(np.zeros(64, np.uint8), dtypes.BY_CODE[code])


def _nvfp4(folder, scales, shared):
    rows, columns = scales.shape[0], scales.shape[1] * 16
    tensors = {
        "w.weight": rng.integers(0, 256, (rows, columns // 2)).astype(np.uint8),
        "w.weight_scale": scales.astype(ml_dtypes.float8_e4m3fn),
        "w.weight_scale_2": np.float32([shared]),
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def _fields(tensor):
    packed, owner = tensor.restoring()
    jobs = list(restore.restore_jobs(packed, 0, dtypes.BY_CODE["F32"].number, "w.weight", owner=owner))
    return jobs[0].packed.prepare()


@pytest.mark.parametrize(("shared", "stored"), [(0.001, True), (1e36, False)])
def test_a_shared_scale_that_could_overflow_becomes_floats_first(shared, stored, tmp_path):
    scales = rng.integers(1, 9, (32, 5)).astype(np.float32)
    tensors = _nvfp4(tmp_path / "model", scales, shared)
    tensor = safeload.load(tmp_path / "model")["w.weight"]
    assert ("stored_scales" in _fields(tensor)) is stored
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = np.stack((tensors["w.weight"] & 15, tensors["w.weight"] >> 4), -1).reshape(32, -1)
    expected = e2m1[codes] * (scales * np.float32(shared)).repeat(16, 1)
    assert np.array_equal(tensor.dequantize().view(np.uint32), expected.view(np.uint32))


def test_a_scale_that_is_infinite_or_nan_is_named(tmp_path):
    scales = np.ones((32, 5), np.float32)
    scales[7, 3] = 448
    _nvfp4(tmp_path / "large", scales, 1e36)
    with pytest.raises(FormatError, match=r"its scale is inf at \[7, 3\]"):
        safeload.load(tmp_path / "large", dtype="float32")
    scales[7, 3] = np.nan
    _nvfp4(tmp_path / "nan", scales, 0.5)
    with pytest.raises(FormatError, match=r"its scale is nan at \[7, 3\]"):
        safeload.load(tmp_path / "nan", dtype="float32")
    _nvfp4(tmp_path / "shared", np.ones((32, 5), np.float32), np.inf)
    with pytest.raises(FormatError, match="its global is inf"):
        safeload.load(tmp_path / "shared", dtype="float32")


def test_shared_scales_of_experts():
    opened = safeload.load(FOLDER / next(iter(FIXTURES)))
    packing = next(v for v in opened.values() if isinstance(v, safeload.QuantizedTensor)).packing
    packing = packing._replace(scale_rule="multiplied", matrices=3)
    row, each = dtypes.BY_CODE["F8_E4M3"], np.float32([1, 2, 3])

    def fields(shared, matrices, rule="multiplied"):
        return restore.shared_fields(packing._replace(scale_rule=rule), row, np.float32(shared), matrices)

    assert fields(each, (0, 3))["shared"].tolist() == [1, 2, 3]
    assert fields(each, (0, 3))["shared_step"] == 1
    assert fields(each, (1, 1))["shared"].tolist() == [2]
    assert fields(each, (1, 1))["shared_step"] == 0
    assert fields([1, 2], (0, 3)) is None  # a scale per part of the rows
    assert fields([0], (0, 3), "divided") is None
    assert fields([0], (0, 3))["shared_step"] == 0
