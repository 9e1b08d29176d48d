"""diff compares tensors in blocks: the oracle computes each tensor as a whole with NumPy."""

import itertools
import os

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.inside import diff_values
from builders.remote import Served
from builders.thorough import THOROUGH, dealt

import safeload
from safeload import TensorDiff, diff
from safeload.errors import FormatError
from safeload.numpy import save_file

pytestmark = [pytest.mark.inner, pytest.mark.any_python]

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int8", "uint16", "bool", "complex64")
SHAPES = [(), (0, 3), (1,), (7,), (2, 3), (3, 1, 5), (64, 64), (100, 300)]
EQUAL = TensorDiff(0.0, None, 0.0, 1.0, 0, 0)


def oracle(a, b):
    """The differences of two tensors of one shape, in float64."""
    x, y = (np.asarray(value, np.complex128 if "c" in a.dtype.kind + b.dtype.kind else None) for value in (a, b))
    x, y = (np.ravel(value).view(np.float64) if value.dtype.kind == "c" else value.ravel() for value in (x, y))
    whole = x.dtype.kind in "iu" and y.dtype.kind in "iu"
    x, y = x.astype(np.float64), y.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    nonfinite = np.count_nonzero(~finite & (x != y) & ~(np.isnan(x) & np.isnan(y)))
    x, y = np.where(finite, x, 0), np.where(finite, y, 0)
    difference = np.abs(x - y)
    unequal = np.count_nonzero(difference) + nonfinite
    largest = difference.max(initial=0)
    with np.errstate(invalid="ignore", over="ignore"):
        cosine = (x * y).sum() / (np.sqrt((x * x).sum()) * np.sqrt((y * y).sum())) if unequal else 1.0
        rms = np.sqrt((difference**2).sum() / max(1, np.count_nonzero(finite)))
        change, norm = float(np.sqrt((difference**2).sum())), float(np.sqrt((x * x).sum()))
    at = difference.argmax() // (len(x) // a.size) if largest else None
    index = None if at is None else tuple(map(int, np.unravel_index(at, a.shape)))
    largest = int(largest) if whole else largest
    return TensorDiff(largest, index, rms, cosine, unequal, nonfinite, change, norm if unequal else None)


def check(report, a, b):
    assert list(report.tensors) == [name for name in a if name in b and a[name].shape == b[name].shape]
    for name, difference in report.tensors.items():
        expected = oracle(a[name], b[name])
        assert difference[:2] == expected[:2], name
        assert difference[4:6] == expected[4:6], name
        assert difference[2:4] == pytest.approx(expected[2:4], rel=1e-12, nan_ok=True), name
        assert difference.change == pytest.approx(expected.change, rel=1e-12), name
        assert (difference.norm is None) == (expected.norm is None), name
        assert difference.norm is None or difference.norm == pytest.approx(expected.norm, rel=1e-12), name


def tensor(dtype, shape, rng):
    return rng.integers(0, 2 if dtype == "bool" else 50, shape).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def models(seed, count=120):
    """Two models. Tensors are equal, differ in one element or in all; some differ in dtype too."""
    rng = np.random.default_rng(seed)
    a, b = {}, {}
    for k, (dtype, shape) in zip(range(count), itertools.cycle(itertools.product(DTYPES, SHAPES))):
        name = f"{k * 37 % count}"
        a[name] = tensor(dtype, shape, rng)
        b[name] = tensor(dtype, shape, rng) if k % 3 == 2 else a[name].copy()
        if k % 3 == 1 and a[name].size:
            b[name].reshape(-1)[rng.integers(a[name].size)] = tensor(dtype, (), rng)
        if k % 7 == 0 and dtype not in ("complex64", "float8_e4m3fn"):
            b[name] = b[name].astype(rng.choice([np.float64, np.float32, np.int64, np.complex64]))
    for name, values in {"nan": [np.nan, 1], "inf": [np.inf, -np.inf], "large": [1e300, -1e300]}.items():
        a[name] = np.array(values, np.float64)
        b[name] = a[name].copy()
        a[f"{name}, not in both"], b[f"{name}, not in both"] = a[name], np.array([0, 1.0])
    b["other shape"], a["other shape"] = np.zeros(3), np.zeros((3, 1))
    a["in a"], b["in b"] = np.ones(1), np.ones(1)
    return a, b


@pytest.fixture
def files(tmp_path):
    a, b = models(62)
    save_file(a, tmp_path / "a.safetensors")
    save_file(dict(reversed(b.items())), tmp_path / "b.safetensors")
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


@pytest.mark.parametrize("seed", range(3) if THOROUGH else range(1))
@pytest.mark.parametrize(("size", "threads"), dealt([1024, 1 << 19], [3, 1]))
def test_random_tables(tmp_path, monkeypatch, size, threads, seed):
    """In files, in memory, and one of each; in small and in large blocks."""
    monkeypatch.setattr(inside.diff_values, "BYTES", size)
    monkeypatch.setattr(inside.diff_values, "NUMBERS", size)
    a, b = models(seed)
    save_file(a, tmp_path / "a")
    save_file(dict(reversed(b.items())), tmp_path / "b")
    for one, other in ((tmp_path / "a", tmp_path / "b"), (a, b), (tmp_path / "a", b)):
        report = diff(one, other, threads=threads)
        check(report, dict(safeload.open(one)) if one is not a else a, b)
        assert (report.only_a, report.only_b) == (["in a"], ["in b"])
        assert report.shapes == {"other shape": ((3, 1), (3,))}
        part = {name: difference for name, difference in report.tensors.items() if name[0] == "1"}
        assert repr(diff(one, other, only="1*").tensors) == repr(part)


def test_results_do_not_depend_on_neighbours_or_threads(files):
    a, b = files
    report = diff(a, b, threads=3)
    for name, difference in report.tensors.items():
        assert repr(diff(a, b, only=name, threads=1).tensors[name]) == repr(difference)
    assert repr(diff(safeload.load(a), b).tensors) == repr(report.tensors)


def test_equal_files_of_another_layout(files, tmp_path, monkeypatch):
    monkeypatch.setattr(diff_values, "_differences", lambda *_: pytest.fail("values were compared"))
    safeload.convert(files[0], tmp_path / "folder", max_shard_size=10_000)
    report = diff(files[0], tmp_path / "folder")
    assert report.same
    assert set(report.tensors.values()) == {EQUAL}


def test_each_byte_counts(tmp_path):
    """One bit at any place, of tensors that do not begin at whole words."""
    rng = np.random.default_rng(63)
    tensors = {f"{k}": rng.integers(0, 200, k + 1).astype(np.uint8) for k in range(5)}
    save_file(tensors, tmp_path / "a")
    for name, array in tensors.items():
        for place in range(array.size):
            array[place] ^= 1
            save_file(tensors, tmp_path / "b", durable=False)
            array[place] ^= 1
            report = diff(tmp_path / "a", tmp_path / "b")
            assert list(report.unequal) == [name]
            assert report.tensors[name].index == (place,)


def test_the_bytes_of_a_large_tensor_are_compared_up_to_the_first_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(inside.diff_values, "BYTES", 4096)
    x = np.arange(1 << 17, dtype=np.float32)
    save_file({"x": x, "y": x}, tmp_path / "a")
    save_file({"x": x + 1, "y": x}, tmp_path / "b")
    blocks = []
    compare = diff_values._same
    monkeypatch.setattr(diff_values, "_same", lambda a, b: blocks.append(a.size) or compare(a, b))
    assert diff(tmp_path / "a", tmp_path / "b", threads=1).tensors["x"].max == 1
    assert blocks == [4096] * (1 + 128)


@pytest.mark.parametrize("read", [str, safeload.load])
def test_progress_counts_every_element_once(files, read):
    calls = []
    diff(*map(read, files), progress=lambda *call: calls.append(call))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] > 0


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be made shorter")
def test_a_file_that_became_shorter(files):
    with safeload.open(files[1]) as opened:
        os.truncate(files[1], files[1].stat().st_size - 20)
        with pytest.raises(FormatError, match=r"b\.safetensors") as caught:
            diff(files[0], opened)
    assert caught.value.tensor is not None


def test_tensors_behind_a_network_are_read_ahead(files):
    served = Served({"mem://b/model.safetensors": files[1].read_bytes()}, latency=0.02)
    with safeload.open(served.at("mem://b/model.safetensors")) as opened:
        report = diff(files[0], opened)
    assert repr(report.tensors) == repr(diff(*files).tensors)
    assert len(served.requests) < 12
