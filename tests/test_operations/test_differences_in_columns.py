"""diff compares plain tensors of files in columns, and finds what it finds tensor by tensor."""

import itertools
import os

import ml_dtypes
import numpy as np
import pytest
from builders.remote import Served

import safeload
from safeload import diff
from safeload.errors import FormatError
from safeload.numpy import save_file
from safeload.operations.measure import diff_columns
from safeload.operations.sources.catalog import Catalog
from safeload.stores.files import Location

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int8", "uint16", "bool", "complex64")
SHAPES = [(), (0, 3), (1,), (7,), (2, 3), (3, 1, 5), (64, 64), (100, 300)]


def tensor(dtype, shape, rng):
    return rng.integers(0, 2 if dtype == "bool" else 50, shape).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def models(count=120):
    """Two models: a third of the tensors are equal, others differ in some elements, in all, or in dtype too."""
    rng = np.random.default_rng(62)
    a, b = {}, {}
    for k, (dtype, shape) in zip(range(count), itertools.cycle(itertools.product(DTYPES, SHAPES))):
        name = f"{k * 37 % count}"
        a[name] = tensor(dtype, shape, rng)
        b[name] = tensor(dtype, shape, rng) if k % 3 == 2 else a[name].copy()
        if k % 3 == 1 and a[name].size:
            b[name].reshape(-1)[-1:] = tensor(dtype, (1,), rng)
        if k % 7 == 0 and dtype not in ("complex64", "float8_e4m3fn"):
            b[name] = b[name].astype(np.float64 if k % 2 else np.float32)
    for name, values in {"nan": [np.nan, 1], "inf": [np.inf, -np.inf], "large": [1e300, -1e300]}.items():
        a[name] = np.array(values, np.float64)
        b[name] = a[name].copy()
        a[f"{name}, not in both"], b[f"{name}, not in both"] = a[name], np.array([0, 1.0])
    b["other shape"], a["other shape"] = np.zeros(3), np.zeros((3, 1))
    a["in a"], b["in b"] = np.ones(1), np.ones(1)
    return a, b


@pytest.fixture
def files(tmp_path):
    a, b = models()
    save_file(a, tmp_path / "a.safetensors")
    save_file(dict(reversed(b.items())), tmp_path / "b.safetensors")
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


def tensor_by_tensor(monkeypatch, *given, **options):
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "plain", lambda catalog: None)
        return diff(*given, **options)


def same(found, want):
    assert {name: value for name, value in vars(found).items() if name != "tensors"} == {
        name: value for name, value in vars(want).items() if name != "tensors"
    }
    assert list(found.tensors) == list(want.tensors)
    for name, one in found.tensors.items():
        other = want.tensors[name]
        exact = (one.max, one.index, one.unequal, one.nonfinite)
        assert exact == (other.max, other.index, other.unequal, other.nonfinite), name
        assert one.rms == pytest.approx(other.rms, rel=1e-12), name
        assert one.cosine == pytest.approx(other.cosine, rel=1e-12, nan_ok=True), name


@pytest.mark.parametrize("block", [1000, 1 << 19])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_differences_are_those_of_tensor_by_tensor(files, monkeypatch, block, threads):
    monkeypatch.setattr(diff_columns, "_BLOCK", block)
    same(diff(*files, threads=threads), tensor_by_tensor(monkeypatch, *files))
    same(diff(*reversed(files), only="1*"), tensor_by_tensor(monkeypatch, *reversed(files), only="1*"))


def test_equal_files_of_another_layout(files, tmp_path, monkeypatch):
    monkeypatch.setattr(diff_columns, "_measured", lambda *_: pytest.fail("values were compared"))
    safeload.convert(files[0], tmp_path / "folder", max_shard_size=10_000)
    report = diff(files[0], tmp_path / "folder")
    assert report.same
    assert set(report.tensors.values()) == {diff_columns.EQUAL}


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


def test_a_large_tensor_that_differs_is_not_compared_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(diff_columns, "_BLOCK", 4096)
    x = np.arange(1 << 17, dtype=np.float32)
    save_file({"x": x, "y": x}, tmp_path / "a")
    save_file({"x": x + 1, "y": x}, tmp_path / "b")
    made = []
    monkeypatch.setattr(diff_columns, "_Block", lambda *block: made.append(1) or _BLOCK(*block))
    filled = []
    fill = diff_columns.Spans.fill
    monkeypatch.setattr(diff_columns.Spans, "fill", lambda *given, **more: filled.append(1) or fill(*given, **more))
    assert diff(tmp_path / "a", tmp_path / "b", threads=1).tensors["x"].max == 1
    assert len(made) == 256
    assert len(filled) == 2 * (128 + 1)


_BLOCK = diff_columns._Block


def test_progress_counts_every_element_once(files):
    seen = []
    diff(*files, progress=lambda *at: seen.append(at))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be made shorter")
def test_a_file_that_became_shorter(files):
    with safeload.open(files[1]) as opened:
        os.truncate(files[1], files[1].stat().st_size - 20)
        with pytest.raises(FormatError, match=r"b\.safetensors") as caught:
            diff(files[0], opened)
    assert caught.value.tensor is not None


def test_tensors_behind_a_network_are_read_ahead(files, monkeypatch):
    served = Served({"mem://b/model.safetensors": files[1].read_bytes()}, latency=0.02)
    with safeload.open(Location(served, "mem://b/model.safetensors")) as opened:
        found = diff(files[0], opened)
    same(found, _titled(tensor_by_tensor(monkeypatch, *files), found))
    assert len(served.requests) < 12


def _titled(report, like):
    report.a, report.b = like.a, like.b
    return report
