"""npy files: numpy's own, faults, and what is written."""

import io
import os
import struct
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from builders.inside import npy
from builders.random import rng

import safeload


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.npy"


ARRAYS = {
    "matrix": rng.standard_normal((5, 7)).astype(np.float32),
    "fortran": np.asfortranarray(rng.standard_normal((4, 6, 3))),
    "big endian": np.arange(6, dtype=">f4").reshape(2, 3),
    "big endian, fortran": np.asfortranarray(np.arange(6, dtype=">i8").reshape(2, 3)),
    "scalar": np.float64(3.5).reshape(()),
    "empty": np.zeros((0, 4), np.int32),
    "flags": np.array([True, False, True]),
    "complex": (rng.standard_normal(4) + 1j).astype(np.complex64),
    "half": np.float16([1, 2]),
}


def written(array, version=(1, 0)):
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version)
    return out.getvalue()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("kind", ARRAYS)
def test_every_way_to_read_it(path, kind, version):
    want = ARRAYS[kind]
    path.write_bytes(written(want, version))
    with safeload.open(path) as opened:
        assert (opened.format, list(opened), opened.metadata) == ("npy", ["tensor"], {})
        assert opened.tensors["tensor"].shape == want.shape
        backends = ("mmap", "pread", "direct")
        for got in (opened["tensor"], *(opened.load(backend=backend)["tensor"] for backend in backends)):
            assert got.dtype == want.dtype.newbyteorder("=")
            np.testing.assert_array_equal(got, want)
            assert got.flags.writeable
        np.testing.assert_array_equal(opened.get_slice("tensor")[...], want)
    assert list(safeload.load(path, ["tensor"], format="npy")) == ["tensor"]
    assert safeload.check(path).ok or want.dtype.kind == "c" or want.size == 0
    np.testing.assert_array_equal(np.load(path), want)


def test_it_is_a_view(path):
    np.save(path, np.zeros(1 << 22, np.uint8))
    tracemalloc.start()
    array = safeload.load(path)["tensor"]
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    array[0] = 7
    assert np.load(path)[0] == 0


def test_the_content_counts_and_not_the_suffix(path, tmp_path):
    np.save(path, np.ones(3))
    other = tmp_path / "weights.safetensors"
    path.rename(other)
    assert safeload.open(other).format == "npy"
    with pytest.raises(safeload.FormatError, match="this is an npy file, not a safetensors file"):
        safeload.open(other, format="safetensors")
    with pytest.raises(safeload.UnsupportedError, match="npy has none"):
        safeload.open(other, root="model")
    with pytest.raises(safeload.FormatError, match="an npy file, not a safetensors file"):
        safeload.numpy.load_file(other)


# ---- faults ----


def header(text, version=(1, 0), size=None):
    data = text.encode()
    length = len(data) if size is None else size
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version[0] == 1 else "<I", length) + data


def good(shape="(2,)", descr="'<f4'", order="False"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


HEAD = header(good())


FAULTS = [
    (HEAD[:6], "does not begin with the npy magic", 0),
    (HEAD[:11], "does not begin with the npy magic", 0),
    (HEAD, r"F32 \[2\] needs 8 bytes, but the file has 0", len(HEAD)),
    (HEAD + bytes(7), r"F32 \[2\] needs 8 bytes, but the file has 7", len(HEAD) + 7),
    (HEAD + bytes(9), r"F32 \[2\] needs 8 bytes, but the file has 9", len(HEAD) + 8),
    (HEAD + bytes(8) + HEAD + bytes(8), "needs 8 bytes, but the file has", len(HEAD) + 8),
    (HEAD[:-3], r"its size of \d+ bytes", 0),
    (header(good(), (4, 0)) + bytes(8), r"npy version 4\.0", 0),
    (header(good(), (1, 1)) + bytes(8), r"npy version 1\.1", 0),
    (header(good(), (2, 0), 1 << 31) + bytes(8), "its size of 2147483660 bytes", 0),
    (header(good() + " " * 11_000) + bytes(8), "its size of 11", 0),
    (header("(" * 9_000) + bytes(8), "its npy header cannot be read", 0),
    (header("{'descr': '<f4'}") + bytes(8), "must have the keys", 0),
    (header("__import__('os')") + bytes(8), "its npy header cannot be read", 0),
    (header(good("[2]")) + bytes(8), "shape a tuple", 0),
    (header(good("(-2,)")) + bytes(8), "no array can have the shape", 0),
    (header(good("(True,)")) + bytes(4), "no array can have the shape", 0),
    (header(good("(2**40,)")) + bytes(8), "its npy header cannot be read", 0),
    (header(good(f"({1 << 61},)")) + bytes(8), r"F32 \[2305843009213693952\] needs", None),
    (header(good(f"(0, {1 << 62}, 4)")), "no array can have the shape", 0),
    (header(good(order="1")) + bytes(8), "fortran_order must be a bool", 0),
    (header(good(descr="'<f4,<f4'")) + bytes(16), "descr '<f4,<f4'", 0),
]


@pytest.mark.parametrize(("content", "fragment", "offset"), FAULTS)
def test_faults(path, content, fragment, offset):
    path.write_bytes(content)
    with pytest.raises(safeload.FormatError, match=fragment) as caught:
        safeload.open(path)
    assert caught.value.path == str(path)
    assert offset in (None, caught.value.offset)
    assert 0 <= caught.value.offset <= len(content)


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        (np.array(["a", "b"]), "<U1 is not a dtype of weights"),
        (np.ones(3, ml_dtypes.bfloat16), "NumPy files lose bfloat16 and float8"),
        (np.zeros(3, [("a", "f4")]), r"not a dtype of weights"),
        (np.ones(3, np.longdouble), "is not a dtype of weights"),
    ],
)
def test_arrays_that_are_refused(path, value, fragment):
    np.save(path, value)
    assert safeload.open(path).tensors["tensor"].shape == value.shape
    with pytest.raises(safeload.UnsupportedError, match=fragment):
        safeload.load(path)


def test_an_object_array_without_arrays_is_refused(path):
    np.save(path, np.array([1, "a", None], object))
    with pytest.raises(safeload.UnsupportedError, match="without NumPy arrays"):
        safeload.open(path)


# ---- write ----


@pytest.mark.parametrize("kind", ARRAYS)
def test_written_and_read_by_numpy(path, kind):
    want = ARRAYS[kind]
    npy.write({"anything": want}, None, path)
    got = np.load(path)
    assert got.dtype == want.dtype.newbyteorder("<")
    np.testing.assert_array_equal(got, want)
    expected = io.BytesIO()
    np.save(expected, np.ascontiguousarray(want, want.dtype.newbyteorder("<")).reshape(want.shape))
    assert path.read_bytes() == expected.getvalue()


def test_convert(path, tmp_path):
    source = tmp_path / "model.safetensors"
    safeload.numpy.save_file({"a": np.ones((2, 3), ml_dtypes.bfloat16), "b": np.zeros(2, np.float32)}, source)
    for names, fragment in (
        (None, "2 tensors"),
        ([], "no tensor to convert"),
        (["a"], "bfloat16, which npy does not support: pass"),
    ):
        with pytest.raises(safeload.SafeloadError, match=fragment):
            safeload.convert(source, path, names=names)
        assert not path.exists()
    safeload.convert(source, path, names=["a"], dtype="float32")
    np.testing.assert_array_equal(np.load(path), np.ones((2, 3), np.float32))
    back = tmp_path / "back.safetensors"
    safeload.convert(path, back)
    np.testing.assert_array_equal(safeload.load(back)["tensor"], np.ones((2, 3), np.float32))
    with pytest.raises(FileExistsError):
        safeload.convert(path, back)
    with pytest.raises(safeload.UnsupportedError, match="'w' is q4_0, which npy does not support"):
        safeload.convert({"w": safeload.quantize(np.ones((2, 32)), "q4_0")}, path, overwrite=True)


@pytest.mark.skipif(sys.platform == "win32", reason="no such devices")
def test_into_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    npy.write({"w": np.arange(5.0)[::-1]}, None, pipe)
    np.testing.assert_array_equal(np.load(io.BytesIO(os.read(descriptor, 10_000))), np.arange(5.0)[::-1])
    os.close(descriptor)
