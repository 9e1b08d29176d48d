"""diff of 64-bit integers is exact: the oracle is Python's own arithmetic."""

import json
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from builders.executors import Plain
from builders.inside import main

from safeload import diff
from safeload.numpy import save_file

pytestmark = pytest.mark.any_python

EDGES = [0, 1, -1, 2**52, 2**53, 2**53 + 1, -(2**53) - 1, 2**60, 2**60 + 1, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1]
NUMBERS = {
    "i8": EDGES,
    "u8": [*map(abs, EDGES), 2**64 - 1, 2**64 - 2],
    "i4": [-5, 7, 2**31 - 1, -(2**31)],
    "u1": [0, 255],
    "?": [False, True],
    "f2": [0.5, -2.0, 65504.0],
    "f4": [0.25, -(2.0**63), 2.0**64],
    "f8": [0.5, 2.0**53, 2.0**53 + 2, -(2.0**63), 2.0**64, 1e300, 5e-324],
}
WIDE = [(a, b) for a, b in product(NUMBERS, NUMBERS) if "i8" in (a, b) or "u8" in (a, b)]


def both(a, b):
    """Every number of a dtype beside every number of another."""
    rows = list(product(NUMBERS[a], NUMBERS[b]))
    return np.array([p for p, _ in rows], a), np.array([q for _, q in rows], b)


def check(found, x, y):
    distances = [abs(Fraction(p) - Fraction(q)) for p, q in zip(x.ravel().tolist(), y.ravel().tolist(), strict=True)]
    largest = max(distances)
    assert found.unequal == sum(distance != 0 for distance in distances)
    if x.dtype.kind in "iu" and y.dtype.kind in "iu":
        assert found.max == largest
        assert found.index == (None if largest == 0 else np.unravel_index(distances.index(largest), x.shape))
    else:
        assert found.max == pytest.approx(float(largest), rel=1e-15)
    if largest < 1e100:
        rms = float(sum(distance**2 for distance in distances) / len(distances)) ** 0.5
        assert found.rms == pytest.approx(rms, rel=1e-12)


@pytest.mark.parametrize(("a", "b"), WIDE)
def test_every_pair_of_dtypes(tmp_path, a, b):
    x, y = both(a, b)
    # Tensors one by one, all at once, many small ones in a file, and large ones, which are compared in pieces.
    with np.errstate(over="ignore"):
        check(diff({"x": x}, {"x": y}).tensors["x"], x, y)
        save_file({"all": x, **{str(k): x[k : k + 1] for k in range(x.size)}}, tmp_path / "a.safetensors")
        save_file({"all": y, **{str(k): y[k : k + 1] for k in range(x.size)}}, tmp_path / "b.safetensors")
        report = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    check(report.tensors["all"], x, y)
    for k in range(x.size):
        check(report.tensors[str(k)], x[k : k + 1], y[k : k + 1])


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors(tmp_path, threads):
    x = np.full((3, 400_000), 2**60)
    y = x.copy()
    y[2, 399_999] -= 1
    y[1, 5] += 3
    save_file({"x": x}, tmp_path / "a.safetensors")
    save_file({"x": y}, tmp_path / "b.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", threads=threads).tensors["x"]
    assert (found.max, found.index, found.unequal) == (3, (1, 5), 2)
    assert found.cosine == pytest.approx(1.0)
    assert found.rms == pytest.approx((10 / x.size) ** 0.5)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("layout", ["C", "F"])
def test_arrays_in_memory_of_any_layout(order, layout):
    x = np.array([[2**60, 1, 2], [3, 4, 2**62]]).astype(f"{order}i8", order=layout)
    y = x.copy()
    assert diff({"x": x}, {"x": y}).same
    y[1, 2] += 1
    assert diff({"x": x}, {"x": y}).tensors["x"][:2] == (1, (1, 2))


@pytest.mark.parametrize("factor", [1.0, -1.0])
def test_squares_beyond_float64(factor):
    x = np.full(1_200_000, 1e151)
    x[:10] *= factor * 1e100
    report = diff({"x": x}, {"x": x * np.sign(x)})
    assert report.tensors["x"].unequal == (10 if factor < 0 else 0)
    assert diff({"x": x}, {"x": x * 2}).tensors["x"].rms > 1e151


def test_nan_and_infinity_beside_large_integers():
    x, y = np.full(4, 2**60 + 1), np.array([np.nan, np.inf, 2.0**60, -np.inf])
    found = diff({"x": x}, {"x": y}).tensors["x"]
    assert (found.max, found.index, found.unequal, found.nonfinite) == (1, (2,), 4, 3)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (2, 2)])
def test_tiny_and_empty_tensors(shape):
    x = np.full(shape, 2**63, np.uint64)
    assert diff({"x": x}, {"x": x.copy()}).same
    found = diff({"x": x}, {"x": x + np.uint64(1)}).tensors["x"]
    assert (found.max, found.unequal) == ((1 if x.size else 0), x.size)


def test_tolerances_beyond_2_to_the_53_are_exact():
    report = diff({"x": np.array([0])}, {"x": np.array([2**53 + 1])})
    assert not report.within(2.0**53)
    assert report.within(2**53 + 1)
    assert report.within(2.0**53 + 2)


def test_an_executor_and_the_command_line_report_the_integer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_file({"x": np.array([-(2**63)])}, "a.safetensors")
    save_file({"x": np.array([2**64 - 1], np.uint64)}, "b.safetensors")
    largest = 2**63 + 2**64 - 1
    assert diff("a.safetensors", "b.safetensors", executor=Plain()).tensors["x"].max == largest
    assert main(["diff", "a.safetensors", "b.safetensors", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["tensors"]["x"]["max"] == largest
