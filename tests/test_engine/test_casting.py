"""astype: floats as ml_dtypes converts them, everything else as numpy does, in any layout and number of threads."""

import ml_dtypes
import numpy as np
import pytest
from builders.random import rng

import safeload
from safeload import astype

pytestmark = pytest.mark.any_python

ComplexWarning = getattr(np, "exceptions", np).ComplexWarning  # of numpy itself before 1.25
FLOATS = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
OTHERS = [np.int8, np.uint16, np.int32, np.int64, np.uint64, np.bool_, np.complex64]


def bits(array):
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_floats_convert_as_ml_dtypes_does(source, target):
    x = (rng.standard_normal((33, 65)) * 3).astype(source)
    got = astype(x, target)
    assert got.dtype == np.dtype(target)
    assert got.shape == x.shape
    assert not np.shares_memory(got, x)
    if (source, target) == (np.float64, ml_dtypes.bfloat16):
        want = x.astype(target)  # ml_dtypes rounds twice here: off by one unit in about 1 of 100,000
        assert (np.abs(bits(got).astype(int) - bits(want).astype(int)) <= 1).all()
    else:
        eight_bits = np.dtype(target).itemsize == 1
        np.testing.assert_array_equal(bits(got), bits((x.astype(np.float32) if eight_bits else x).astype(target)))


@pytest.mark.parametrize("target", [np.float32, np.float64, np.float16, np.int16, np.int64, np.uint8])
@pytest.mark.parametrize("source", OTHERS)
def test_everything_else_is_numpys_astype(source, target):
    with np.errstate(all="ignore"):
        x = (
            (rng.standard_normal(1000) * 1e10).astype(np.complex128).astype(source)
            if source == np.complex64
            else (rng.integers(0, 2**63, 1000).astype(source))
        )
        if source == np.complex64:
            with pytest.warns(ComplexWarning):
                got = astype(x, target)
            with pytest.warns(ComplexWarning):
                want = x.astype(target)
        else:
            got, want = astype(x, target), x.astype(target)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == want.dtype


def test_integers_beyond_f32_survive():
    x = np.array([2**24 + 1, 2**53 + 1, 2**63 - 1])
    np.testing.assert_array_equal(astype(x, np.uint64), x.astype(np.uint64))
    assert astype(np.array([2.0**24 + 1]), np.float64)[0] == 2**24 + 1


def test_f64_to_f16_rounds_once():
    x = np.array([1 + 2.0**-11 + 2.0**-40])  # just above a tie of f16, on it in f32
    assert astype(x, "float16")[0] == np.float16(1 + 2.0**-10)
    assert x.astype(np.float32).astype(np.float16)[0] == np.float16(1)


@pytest.mark.parametrize("spelling", ["bfloat16", "BF16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)])
def test_a_dtype_may_be_spelled_in_any_way(spelling):
    assert astype(np.ones(3, np.float32), spelling).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    "layout", ["transposed", "reversed", "strided", "broadcast", "fortran", "big-endian", "0-d", "empty"]
)
def test_any_layout_converts_to_c_order(layout):
    base = rng.standard_normal((40, 50)).astype(np.float32)
    x = {
        "transposed": base.T,
        "reversed": base[::-1, ::-1],
        "strided": base[::3, 1::2],
        "broadcast": np.broadcast_to(base[0], (7, 50)),
        "fortran": np.asfortranarray(base),
        "big-endian": base.astype(">f4"),
        "0-d": base[3, 4],
        "empty": base[:0],
    }[layout]
    got = astype(x, "F16")
    np.testing.assert_array_equal(got, np.asarray(x).astype(np.float16))
    assert got.flags.c_contiguous
    assert got.shape == np.shape(x)


def test_threads_give_the_same_bytes():
    x = rng.integers(0, 65536, 6_500_001).astype(np.uint16).view(ml_dtypes.bfloat16)
    alone = bits(astype(x, np.float32, threads=1))
    for threads in (1, 2, 3, 8):
        np.testing.assert_array_equal(bits(astype(x, np.float32, threads=threads)), alone, str(threads))


def test_out_is_filled_and_returned():
    x = rng.standard_normal((5, 6)).astype(np.float32)
    out = np.empty((5, 6), np.float16)
    assert astype(x, "F16", out=out) is out
    np.testing.assert_array_equal(out, x.astype(np.float16))
    integers = np.empty((5, 6), np.int8)
    assert astype(x * 9, np.int8, out=integers) is integers
    np.testing.assert_array_equal(integers, (x * 9).astype(np.int8))


def test_out_that_overlaps_the_source_is_no_trap():
    memory = np.zeros(16, np.float32)
    memory[:8] = np.arange(8)
    source = memory[:8]
    out = memory.view(np.float64)[:8]
    np.testing.assert_array_equal(astype(source, np.float64, out=out), np.arange(8.0))


@pytest.mark.parametrize(
    "out",
    [
        np.empty((5, 6), np.float32),
        np.empty((6, 5), np.float16),
        np.empty((6, 5), np.float16).T,
        np.empty((5, 12), np.float16)[:, ::2],
        np.frombuffer(bytes(60), np.float16).reshape(5, 6),
        [[0.0] * 6] * 5,
    ],
)
def test_out_that_does_not_fit_is_refused(out):
    with pytest.raises(ValueError, match="out must be"):
        astype(np.ones((5, 6), np.float32), "F16", out=out)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="unknown dtype 'float99', expected one of"):
        astype(np.ones(3), "float99")
    with pytest.raises(TypeError, match="unknown dtype"):
        astype(np.ones(3), np.clongdouble)
    with pytest.raises(ValueError, match="threads"):
        astype(np.ones(3), "F32", threads=0)


def test_lists_are_taken_as_numpy_takes_them():
    np.testing.assert_array_equal(astype([1, 2.5], "float32"), np.array([1, 2.5], np.float32))


def test_show_config_prints_the_choice(capsys):
    safeload.show_config()
    text = capsys.readouterr().out
    assert f"safeload         {safeload.__version__}" in text
    assert "instruction set" in text


def layouts(x):
    """Views of a 4-D array in orders that one run of memory does not have."""
    yield "transposed", x.T
    yield "two axes swapped", x.swapaxes(1, 2)
    yield "last axis first", np.moveaxis(x, -1, 0)
    yield "every other", x[::2, :, ::3]
    yield "big-endian", x.astype(x.dtype.newbyteorder(">"))
    yield "few, big-endian", x[0, 0, :2].astype(x.dtype.newbyteorder(">"))
    yield "last axis cut", x[..., 1:-1]
    yield "reversed", x[::-1, :, ::-1, ::-1]
    yield "broadcast", np.broadcast_to(x[:, :1], x.shape)
    yield "one axis", x[:, 0, 0, 0]
    yield "Fortran", np.asfortranarray(x)
    yield "one element", x[1:2, 2:3, 1:2, 4:5]
    yield "not aligned", np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1).reshape(x.shape).swapaxes(0, 3)


@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("target", [np.float32, None], ids=["converted", "copied"])
def test_any_layout(dtype, target):
    x = rng.integers(-100, 100, (5, 18, 20, 33)).astype(dtype)
    for what, view in layouts(x):
        got = astype(view, target or dtype)
        want = view.astype(target or dtype)
        assert got.flags.c_contiguous, what
        np.testing.assert_array_equal(got, want, err_msg=what)


def test_large_planes_in_any_number_of_threads():
    """Several chunks and tiles, none of them whole."""
    x = np.arange(1531 * 2053, dtype=np.uint32).reshape(1531, 2053)
    halves = (x % 0x7F80).astype(np.uint16).view(ml_dtypes.bfloat16)  # no NaN among them
    want = bits(halves.astype(np.float32).T)
    long = np.arange(4_000_000, dtype=np.uint16).reshape(2, -1)
    for threads in (1, 2, 3, 8):
        said = f"{threads} threads"
        np.testing.assert_array_equal(astype(x.T, np.uint32, threads=threads), x.T, said)
        np.testing.assert_array_equal(bits(astype(halves.T, np.float32, threads=threads)), want, said)
        np.testing.assert_array_equal(astype(long.T, np.uint16, threads=threads), long.T, said)
        np.testing.assert_array_equal(astype(long[:, ::-1], np.float32, threads=threads), long[:, ::-1], said)


def test_many_small_planes_are_left_to_numpy():
    x = (
        (np.arange(300 * 300 * 9) % 1000)
        .astype(np.float32)
        .reshape(3, 3, 300, 300)
        .transpose(2, 3, 0, 1)[:, :, ::-1, ::2]
    )
    np.testing.assert_array_equal(astype(x, np.float16), x.astype(np.float16))
