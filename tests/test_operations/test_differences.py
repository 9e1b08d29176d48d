"""diff: structure and values of two checkpoints, across formats, dtypes and quantization."""

import json
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from builders.models import small, write_folder
from builders.torch_build import Storage, tensor, zip_file

import safeload
from safeload import TensorDiff, diff
from safeload.numpy import save_file

pytestmark = pytest.mark.any_python

EQUAL = TensorDiff(0.0, None, 0.0, 1.0, 0, 0)


@pytest.fixture
def llama(tmp_path):
    config, tensors = small("llama-gqa")
    folder = tmp_path / "a"
    folder.mkdir()
    return write_folder(folder, config, tensors), tensors


def test_the_same(llama, tmp_path):
    path, tensors = llama
    save_file(tensors, tmp_path / "b.safetensors")
    for other in (path, tmp_path / "b.safetensors", tensors, safeload.open(path)):
        report = diff(path, other)
        assert report.same
        assert report.within(0)
        assert set(report.tensors.values()) == {EQUAL}
        assert report.tensors.keys() == tensors.keys()
    assert str(report).endswith("the same: 30 tensors")


def test_structure():
    a = {"x": np.ones(2), "y": np.ones(3), "z": np.ones(4, np.float32), "w": np.ones(2)}
    b = {"y": np.ones(4), "z": np.ones(4), "v": np.ones(2), "w": np.ones(2)}
    report = diff(a, b)
    assert (report.only_a, report.only_b) == (["x"], ["v"])
    assert report.shapes == {"y": ((3,), (4,))}
    assert report.dtypes == {"z": ("float32", "float64")}
    assert report.tensors == {"z": EQUAL, "w": EQUAL}
    assert not report.same
    assert not report.within(1)
    assert diff({"z": a["z"]}, {"z": b["z"]}).within(0)
    assert not diff({"z": a["z"]}, {"z": b["z"]}).same
    text = str(report)
    for line in ("only in a\n  x\n", "only in b\n  v\n", "y: [3] and [4]", "float32 and float64: 1 tensor, z"):
        assert line in text
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["only_a"] == ["x"]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int16, np.uint8])
def test_values_against_numpy(dtype, tmp_path):
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((1111, 1003)) * 50).astype(np.float32)
    a, b = x.astype(dtype), (x + rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.1)).astype(dtype)
    exact_a, exact_b = a.astype(np.float64), b.astype(np.float64)
    difference = exact_a - exact_b
    largest, rms = np.abs(difference).max(), np.sqrt(np.mean(difference**2))
    cosine = (exact_a * exact_b).sum() / np.linalg.norm(exact_a) / np.linalg.norm(exact_b)
    unequal = np.count_nonzero(difference)
    save_file({"w": a}, tmp_path / "a")
    save_file({"w": b}, tmp_path / "b")
    for threads in (1, 3):
        for one, other in (({"w": a}, {"w": b}), (tmp_path / "a", tmp_path / "b"), (tmp_path / "a", {"w": b})):
            found = diff(one, other, threads=threads).tensors["w"]
            assert found.max == largest
            assert abs(difference[found.index]) == found.max
            assert found.rms == pytest.approx(rms, rel=1e-12)
            assert found.cosine == pytest.approx(cosine, rel=1e-12)
            assert found.unequal == unequal
            assert found.nonfinite == 0


def test_across_dtypes_and_quantization(llama):
    path, _ = llama
    for scheme in ("int8", "q8_0", "q4_0"):
        quantized = safeload.load_quantized(path, scheme)
        errors = safeload.quantization_error(path, quantized)
        report = diff(path, quantized)
        for name, error in errors.items():
            assert report.tensors[name].max == pytest.approx(error.max_error)
            assert report.tensors[name].rms == pytest.approx(error.rms_error)
            assert report.tensors[name].cosine > 0.98
        assert report.tensors["model.norm.weight"] == EQUAL  # float32 of the same value
        assert report.dtypes["model.norm.weight"] == ("bfloat16", "float32")
    assert report.dtypes["model.layers.0.mlp.up_proj.weight"] == ("bfloat16", "q4_0")


def test_across_formats(tmp_path):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    (tmp_path / "x.pt").write_bytes(zip_file({"w": tensor(Storage("0", x.ravel()), (4, 3), (1, 4))}))
    np.savez(tmp_path / "x.npz", w=x.T)
    save_file({"w": x.T}, tmp_path / "x.safetensors")
    for one in ("x.pt", "x.npz", "x.safetensors"):
        for other in ("x.pt", "x.npz", "x.safetensors"):
            assert diff(tmp_path / one, tmp_path / other).same


def test_what_is_not_finite():
    nan, inf = np.nan, np.inf
    a = np.float32([nan, inf, 1, -inf, 5, 6])
    assert diff({"w": a}, {"w": a.astype(np.float64)}).tensors["w"] == EQUAL
    found = diff({"w": a}, {"w": np.float32([nan, -inf, nan, -inf, 5, 7])}).tensors["w"]
    assert (found.unequal, found.nonfinite, found.max, found.index) == (3, 2, 1.0, (5,))
    assert found.rms == pytest.approx(np.sqrt(1 / 2))
    report = diff({"w": a}, {"w": a * 2})
    assert not diff({"w": a[:1]}, {"w": np.zeros(1)}).within(1e9)
    assert "not finite" in str(diff({"w": a[:1]}, {"w": np.zeros(1)}))
    assert "not finite" not in str(report)


def test_odd_tensors():
    assert diff({}, {}).same
    assert diff({"e": np.zeros((0, 3))}, {"e": np.zeros((0, 3), np.float32)}).tensors["e"] == EQUAL
    assert diff({"s": np.array(3)}, {"s": np.array(4)}).tensors["s"].max == 1
    zero = diff({"w": np.zeros(3)}, {"w": np.ones(3)}).tensors["w"]
    assert np.isnan(zero.cosine)
    assert diff({"w": np.zeros(3)}, {"w": np.ones(3)}).to_json()["tensors"]["w"]["cosine"] is None
    c = np.complex64([1 + 1j, 2 - 1j])
    assert diff({"c": c}, {"c": c}).same
    found = diff({"c": c}, {"c": np.complex64([1 + 1j, 2 + 1j])}).tensors["c"]
    assert (found.max, found.index, found.unequal) == (2.0, (1,), 1)
    flags = diff({"b": np.array([True, False])}, {"b": np.array([True, True])}).tensors["b"]
    assert (flags.max, flags.index) == (1.0, (1,))


def test_lines_are_in_the_order_asked_for():
    a = {f"t{k}": np.ones(4) for k in (1, 2, 10)}
    b = {"t1": np.float64([1, 1, 1, 4]), "t2": np.full(4, 2.0), "t10": np.float64([1, 1, -1, 3])}
    report = diff(a, b)
    orders = {"name": "1 2 10", "max": "1 10 2", "rms": "1 10 2", "cosine": "10 1 2", "unequal": "2 10 1"}
    for key, names in orders.items():
        lines = [line.split()[0] for line in report.lines(80, sort=key) if line.startswith("t") and "." in line]
        assert lines[:3] == [f"t{k}" for k in names.split()], key


def test_the_largest_difference_comes_first():
    a = {f"t{k}": np.zeros(4) for k in range(5)}
    b = {f"t{k}": np.full(4, float(k)) for k in range(5)}
    report = diff(a, b)
    assert list(report.unequal) == ["t4", "t3", "t2", "t1"]
    lines = report.lines(80, rows=2)
    assert "... and 2 more" in lines
    assert all(len(line) <= 80 for line in report.lines(80))
    assert lines[-1] == "different: 4 differ in value; 5 tensors compared"


def test_progress(llama):
    path, _ = llama
    seen = []
    quantized = safeload.load_quantized(path, "int8")
    diff(path, quantized, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen)


# ---- relative changes and common rows ----


@pytest.fixture
def finetuned(llama, tmp_path):
    """A base and its finetuned edition: one matrix of a layer and the norm of another changed, four tokens added."""
    path, tensors = llama
    rng = np.random.default_rng(3)
    changed = dict(tensors)
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight"):
        x = tensors[name].astype(np.float32)
        changed[name] = (x * (1 + 0.01 * rng.standard_normal(x.shape))).astype(ml_dtypes.bfloat16)
    embedding = tensors["model.embed_tokens.weight"]
    changed["model.embed_tokens.weight"] = np.concatenate([embedding, embedding[:4]])
    save_file(changed, tmp_path / "b.safetensors")
    return path, tmp_path / "b.safetensors", tensors, changed


def norm_of(arrays):
    return np.sqrt(sum(np.square(x.astype(np.float64)).sum() for x in arrays))


def test_the_relative_change_of_tensors_and_layers(finetuned):
    path, other, a, b = finetuned
    report = diff(path, other)
    for name, found in report.tensors.items():
        change = norm_of([a[name].astype(np.float64) - b[name].astype(np.float64)])
        assert found.change == pytest.approx(change, rel=1e-12)
        assert found.relative_change == pytest.approx(change / norm_of([a[name]]), rel=1e-12)
    for layer, found in report.layers.items():
        names = [
            name for name in report.tensors if name.startswith(layer + ".") or (not layer and ".layers." not in name)
        ]
        unequal = [name for name in names if report.tensors[name].unequal]
        assert (found.tensors, found.unequal) == (len(names), len(unequal))
        change = norm_of([a[name].astype(np.float64) - b[name].astype(np.float64) for name in names])
        assert found.relative_change == pytest.approx(change / norm_of([a[name] for name in names]), rel=1e-9)
    assert [layer for layer, found in report.layers.items() if found.unequal] == ["model.layers.1", "model.layers.2"]
    text = str(report)
    assert "relative" in text
    assert "model.layers.1" in text.partition("by layer")[2]
    plain = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert plain["layers"]["model.layers.1"]["unequal"] == 1
    assert plain["tensors"]["model.layers.1.mlp.up_proj.weight"]["relative_change"] > 0
    assert report.lines(sort="relative")


def test_the_common_rows_of_a_resized_tensor(finetuned):
    path, other, a, b = finetuned
    name = "model.embed_tokens.weight"
    report = diff(path, other, only=name)
    assert report.shapes == {name: ((96, 64), (100, 64))}
    assert report.common_rows == {name: EQUAL}
    assert f"{name}: [96, 64] and [100, 64]; the first 96 rows are equal" in str(report)
    assert not report.same
    assert not report.within(1e9)
    for one, two in ((a, b), (b, a), (other, a), (safeload.load_quantized(path, "q8_0"), b)):
        assert list(diff(one, two, only=name).common_rows) == [name]
    shifted = {name: np.float32(b[name].astype(np.float32) + 0.5)}
    found = diff(path, shifted, only=name).common_rows[name]
    assert (found.max, found.unequal) == (pytest.approx(0.5, rel=0.01), 96 * 64)
    quantized = {name: safeload.quantize(np.float32(b[name]), "q8_0")}
    assert diff(quantized, path, only=name).common_rows[name].relative_change < 0.01


def test_shapes_without_common_rows():
    x = np.ones((3, 4))
    for other in (np.ones((3, 5)), np.ones(3), np.ones((0, 4)), np.array(1.0)):
        report = diff({"w": x}, {"w": other})
        assert (report.common_rows, list(report.shapes)) == ({}, ["w"])
    assert diff({"c": np.ones(3, np.complex64)}, {"c": np.ones(2, np.complex64)}).common_rows == {"c": EQUAL}


def test_the_report_of_an_executor_is_the_same(finetuned):
    path, other, *_ = finetuned
    alone = diff(path, other)
    with ThreadPoolExecutor(2) as executor:
        report = diff(path, other, executor=executor)
    assert report.to_json() == alone.to_json()
    assert report.lines() == alone.lines()


def test_zero_and_not_finite_tensors_have_a_relative_change():
    zero = diff({"w": np.zeros(3)}, {"w": np.ones(3)})
    assert zero.tensors["w"].relative_change == np.inf
    assert zero.to_json()["tensors"]["w"]["relative_change"] is None
    assert diff({"w": np.ones(3)}, {"w": np.float64([1, np.nan, 1])}).tensors["w"].relative_change == 0
    assert zero.layers[""].relative_change == np.inf
