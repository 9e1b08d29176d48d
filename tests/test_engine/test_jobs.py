"""The engine itself, below what loads and saves make of it."""

import os

import ml_dtypes
import numpy as np
import pytest
from builders.inside import dtypes, ffi, jobs, lib, local
from builders.packed_codes import ROWS, Case
from builders.random import rng

from safeload.errors import FormatError, SafeloadError


@pytest.fixture
def open_file(tmp_path):
    """Opens bytes as a file of the C core."""
    opened = []

    def open_bytes(data):
        path = tmp_path / f"{len(opened)}.bin"
        path.write_bytes(data)
        opened.append(local.open_local(path))
        return opened[-1].use(int)

    yield open_bytes
    for store in opened:
        store.close()


def number(dtype):
    return dtypes.BY_NAME[np.dtype(dtype).name].number


def run(job, grid, threads=2):
    job = job._replace(op=lib.SL_OP_GRID, grid=grid, origin=jobs.Origin("it", path="file"))
    return jobs.Batch([job]).run(threads=threads)


@pytest.mark.parametrize("target", [np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (700, 1300), (1, 2_000_000), (2_000_000, 1)])
def test_a_file_is_transposed_on_its_way(open_file, shape, target):
    source = np.uint16 if target == np.uint16 else ml_dtypes.bfloat16
    x = rng.integers(0, 0x7F80, shape, np.uint16).view(source)  # no NaN among them
    handle = open_file(b"head" + x.tobytes())
    out = np.zeros(shape[::-1], target)
    size = out.dtype.itemsize
    grid = jobs.JobGrid(*shape, (shape[1] * 2, 2, size, shape[0] * size))
    job = jobs.Job(handle, 4, out.ctypes.data, x.nbytes, number(source), number(target))
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
        handle, 100 * 2, part.__array_interface__["data"][0], 50 * 200 * 2, number(np.float16), number(target)
    )
    run(job, jobs.JobGrid(50, 200, (800, 2, 300 * size, size)))
    want = np.full((60, 300), -1, target)
    want[5:55, 10:210] = x[:, 100:300]
    np.testing.assert_array_equal(out, want)


def test_a_file_that_ends_within_a_grid(open_file):
    handle = open_file(bytes(999))
    out = np.zeros((100, 5), np.uint16)
    job = jobs.Job(handle, 0, out.ctypes.data, 1000, number(np.uint16), number(np.uint16))
    with pytest.raises(FormatError, match="999") as caught:
        run(job, jobs.JobGrid(100, 5, (10, 2, 10, 2)))
    assert caught.value.offset == 999


@pytest.mark.parametrize(
    ("code", "grid", "size", "fragment"),
    [
        ("F4", (2, 4, (2, 1, 2, 1)), 4, "no strided copies"),
        ("U8", (2, 4, (4, 1, 4, 1)), 9, "a grid of 2 x 4 elements is not 9 bytes"),
        ("U8", (1 << 40, 1 << 40, (4, 1, 4, 1)), 8, "is not 8 bytes"),
        ("U8", (2, 4, (3, 1, 4, 1)), 8, "rows must not overlap"),
        ("U8", (2, 4, (4, 2, 4, 1)), 8, "columns must be contiguous"),
    ],
)
def test_grids_that_cannot_be(open_file, code, grid, size, fragment):
    handle = open_file(bytes(100))
    out = np.zeros(100, np.uint8)
    row = dtypes.BY_CODE[code].number
    with pytest.raises(SafeloadError, match=fragment):
        run(jobs.Job(handle, 0, out.ctypes.data, size, row, row), jobs.JobGrid(*grid))
    assert not out.any()


# What each operation takes: a grid, channels, packed codes; and dtypes that it works on.
NO, YES, MAYBE = (False,), (True,), (False, True)
TAKES = {
    "copy": (NO, NO, NO, "F32", "F32"),
    "convert": (NO, NO, NO, "F32", "BF16"),
    "grid": (YES, NO, NO, "F32", "BF16"),
    "write": (NO, NO, NO, "F32", "F32"),
    "append": (NO, NO, NO, "F32", "F32"),
    "int8": (NO, YES, MAYBE, "F32", "I8"),
    "absmax": (NO, YES, MAYBE, "F32", "F32"),
    "finite": (NO, NO, MAYBE, "F32", "F32"),
    "stats": (NO, NO, MAYBE, "F32", "F32"),
    "histogram": (NO, NO, MAYBE, "F32", "F32"),
    "restore": (NO, NO, YES, "F32", "BF16"),
    "quantize with importance": (NO, YES, MAYBE, "F32", "Q4_0"),
    "merge": (NO, NO, NO, "F32", "BF16"),
    "write back": (NO, NO, NO, "F32", "F32"),
}


def handle_of(file):
    if os.name == "nt":
        import msvcrt

        return msvcrt.get_osfhandle(file.fileno())
    return file.fileno()


def op_name(op):
    return ffi.string(lib.sl_op_name(op)).decode()


def unit_update(rows, columns):
    return jobs.Update(np.ones((rows, 1), np.float32), jobs.panels_of(np.ones((1, columns), np.float32)), 1.0)


@pytest.mark.parametrize("op", range(lib.SL_OP_COUNT), ids=op_name)
def test_only_merging_takes_a_merge(op):
    merges = op == lib.SL_OP_MERGE
    job = jobs.Job(None, 0, 0, 0, op=op, merge=None if merges else jobs.Updates(1, []))
    with pytest.raises(SafeloadError, match=f"{op_name(op)} {'needs' if merges else '(takes no|needs)'} "):
        jobs.Batch([job]).run()


def test_the_operations_are_these():
    assert [op_name(op) for op in range(lib.SL_OP_COUNT)] == list(TAKES)
    assert lib.sl_op_name(-1) == lib.sl_op_name(lib.SL_OP_COUNT) == ffi.NULL


@pytest.mark.parametrize("with_packed", [False, True])
@pytest.mark.parametrize("with_channels", [False, True])
@pytest.mark.parametrize("with_grid", [False, True])
@pytest.mark.parametrize("op", range(lib.SL_OP_COUNT), ids=op_name)
def test_an_operation_refuses_what_it_does_not_take(op, with_grid, with_channels, with_packed, tmp_path):
    *taken, source, target = TAKES[op_name(op)]
    if op in (lib.SL_OP_STATS, lib.SL_OP_HISTOGRAM) and with_channels:
        if with_packed:
            pytest.skip("channels are of int8, and codes stand for f32")
        source = "I8"
    rows = {row.code: row for row in dtypes.BY_NUMBER.values()}
    source, target = rows[source], rows[target]
    x = np.arange(96).astype(source.name)
    out = np.zeros(4096, np.uint8)
    grid = jobs.JobGrid(
        8, 12, (12 * source.block_bytes, source.block_bytes, target.block_bytes, 8 * target.block_bytes)
    )
    columns = 96 if op == lib.SL_OP_WEIGHTED else 12
    channels = jobs.Channels(columns, 1, np.ones(columns, np.float32))
    case = Case(ROWS, 4, (1, 8, 12))
    path = tmp_path / "written"
    with path.open("wb") as file:
        writes = op in (lib.SL_OP_WRITE, lib.SL_OP_WRITE_BACK, lib.SL_OP_APPEND)
        begin = case.codes.ctypes.data if with_packed else x.ctypes.data
        place = (handle_of(file), 0, out.ctypes.data) if writes else (None, begin, out.ctypes.data)
        takes = grid if with_grid else None, channels if with_channels else None
        job = jobs.Job(*place, x.nbytes, source.number, target.number, op, *takes)
        merge = jobs.Updates(12, [unit_update(8, 12)]) if op == lib.SL_OP_MERGE else None
        batch = jobs.Batch([job._replace(packed=case.prepared() if with_packed else None, merge=merge)])
        if all(given in allowed for given, allowed in zip((with_grid, with_channels, with_packed), taken, strict=True)):
            assert batch.run() == x.nbytes
            assert out.any() != (writes or op == lib.SL_OP_FINITE)
            assert path.stat().st_size == (x.nbytes if writes else 0)
            return
        what = rf"the operation {op_name(op)} (takes no|needs) (a grid|channels|packed codes)"
        with pytest.raises(SafeloadError, match=what):
            batch.run()
    assert not out.any()
    assert path.stat().st_size == 0


def test_an_operation_that_there_is_not():
    for op in (-1, lib.SL_OP_COUNT):
        with pytest.raises(SafeloadError, match=f"unknown operation {op}"):
            jobs.Batch([jobs.Job(None, 0, 0, 0, op=op)]).run()


@pytest.mark.parametrize(
    ("columns", "rows"), [((1 << 62) - 256, 1), (1 << 60, 4)], ids=["a row", "rows of all threads"]
)
def test_rows_that_exceed_memory_are_refused(columns, rows, open_file):
    """The sum of a thread's buffers, and the product with the number of threads, must not wrap around."""
    factors, blocks = np.ones(256, np.float32), np.zeros(1 << 20, np.uint8)
    channels = ffi.new(
        "sl_channels *", {"count": columns, "inner": 1, "factors": ffi.cast("float *", factors.ctypes.data)}
    )
    job, cursor, error = ffi.new("sl_job *"), ffi.new("sl_cursor *"), ffi.new("sl_error *")
    setattr(job, "from", lib.SL_BF16)
    job.op, job.to, job.file, job.size = lib.SL_OP_WEIGHTED, lib.SL_Q4_0, open_file(bytes(1 << 20)), 2 * columns * rows
    job.memory, job.channels = ffi.cast("void *", blocks.ctypes.data), channels
    assert lib.sl_jobs_run(job, 1, lib.SL_TIER_SCALAR, rows, 0, cursor, error) == lib.SL_E_MEMORY
