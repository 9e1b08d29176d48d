"""The engine itself, below what loads and saves make of it."""

import ml_dtypes
import numpy as np
import pytest

from safeload import dtypes, jobs
from safeload._native import Error, check, ffi, lib
from safeload.errors import FormatError, SafeloadError
from safeload.files import native_path

rng = np.random.default_rng(3)


@pytest.fixture
def open_file(tmp_path):
    """Opens bytes as a file of the C core."""
    opened = []

    def open_bytes(data):
        path = tmp_path / f"{len(opened)}.bin"
        path.write_bytes(data)
        handle, size, error = ffi.new("int64_t *"), ffi.new("uint64_t *"), Error()
        check(lib.sl_file_open(native_path(path)[1], handle, size, error), error)
        opened.append(handle[0])
        return handle[0]

    yield open_bytes
    for handle in opened:
        lib.sl_file_close(handle)


def number(dtype):
    return dtypes.BY_NAME[np.dtype(dtype).name].number


def run(job, grid, threads=2):
    return jobs.run([job], lib.SL_READ, lambda job, position: ("file", "it"), grids=[grid], threads=threads)


@pytest.mark.parametrize("target", [np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (700, 1300), (1, 2_000_000), (2_000_000, 1)])
def test_a_file_is_transposed_on_its_way(open_file, shape, target):
    source = np.uint16 if target == np.uint16 else ml_dtypes.bfloat16
    x = rng.integers(0, 0x7F80, shape, np.uint16).view(source)  # no NaN among them
    handle = open_file(b"head" + x.tobytes())
    out = np.zeros(shape[::-1], target)
    size = out.dtype.itemsize
    grid = jobs.Grid(*shape, (shape[1] * 2, 2, size, shape[0] * size))
    job = jobs.Job(handle, 4, jobs.address_of(out), x.nbytes, number(source), number(target), 1)
    assert run(job, grid) == x.nbytes
    np.testing.assert_array_equal(out, x.T.astype(target))


@pytest.mark.parametrize("target", [np.float16, np.float32])
def test_columns_of_a_file_into_a_part_of_an_array(open_file, target):
    """Rows that lie apart on both sides."""
    x = rng.standard_normal((50, 400)).astype(np.float16)
    handle = open_file(x.tobytes())
    out = np.full((60, 300), -1, target)
    size = out.dtype.itemsize
    part = out[5:55, 10:210]
    job = jobs.Job(
        handle, 100 * 2, part.__array_interface__["data"][0], 50 * 200 * 2, number(np.float16), number(target), 1
    )
    run(job, jobs.Grid(50, 200, (800, 2, 300 * size, size)))
    want = np.full((60, 300), -1, target)
    want[5:55, 10:210] = x[:, 100:300]
    np.testing.assert_array_equal(out, want)


def test_a_file_that_ends_within_a_grid(open_file):
    handle = open_file(bytes(999))
    out = np.zeros((100, 5), np.uint16)
    job = jobs.Job(handle, 0, jobs.address_of(out), 1000, number(np.uint16), number(np.uint16), 1)
    with pytest.raises(FormatError, match="999") as caught:
        run(job, jobs.Grid(100, 5, (10, 2, 10, 2)))
    assert caught.value.offset == 999


@pytest.mark.parametrize(
    ("code", "grid", "size", "fragment"),
    [
        ("F4", (2, 4, (2, 1, 2, 1)), 4, "cannot be strided"),
        ("U8", (2, 4, (4, 1, 4, 1)), 9, "a grid of 2 x 4 elements is not 9 bytes"),
        ("U8", (1 << 40, 1 << 40, (4, 1, 4, 1)), 8, "is not 8 bytes"),
        ("U8", (2, 4, (3, 1, 4, 1)), 8, "its rows apart"),
        ("U8", (2, 4, (4, 2, 4, 1)), 8, "columns must be side by side"),
    ],
)
def test_grids_that_cannot_be(open_file, code, grid, size, fragment):
    handle = open_file(bytes(100))
    out = np.zeros(100, np.uint8)
    row = dtypes.BY_CODE[code].number
    with pytest.raises(SafeloadError, match=fragment):
        run(jobs.Job(handle, 0, jobs.address_of(out), size, row, row, 1), jobs.Grid(*grid))
    assert not out.any()
