"""Large results in used memory are stored past the cache, most from 24 MiB: the same bytes, none outside."""

import ml_dtypes
import numpy as np
import pytest
from builders.inside import available_tiers, dtypes, ffi, jobs, lib
from builders.packed_codes import COLUMNS, ROWS, WORDS, Case
from builders.thorough import dealt

import safeload

MARGIN, UNTOUCHED = 67, 0xA5  # no multiple of a cache line


def large(size, fill):
    """Fill memory that has been written to, between margins, and return the bytes filled."""
    memory = np.full(size + 2 * MARGIN, UNTOUCHED, np.uint8)
    fill(memory.ctypes.data + MARGIN)
    assert (memory[:MARGIN] == UNTOUCHED).all()
    assert (memory[MARGIN + size :] == UNTOUCHED).all()
    return memory[MARGIN : MARGIN + size]


@pytest.mark.parametrize(("layout", "options"), [
    (ROWS, {}), (ROWS, {"transpose": True}), (COLUMNS, {}), (WORDS, {"transpose": True}),
])  # fmt: skip
def test_packed_codes(layout, options):
    case = Case(layout, 4, (1, 2624, 2600), (1, 40), ("zeros",), **options)

    def fill(address):
        job = jobs.Job(
            None, case.codes.ctypes.data, address, case.values.nbytes, lib.SL_F32, lib.SL_F32, lib.SL_OP_RESTORE
        )
        jobs.Batch([job._replace(packed=case.prepared())]).run(threads=3)

    assert np.array_equal(large(case.values.nbytes, fill), case.values.astype("<f4").view(np.uint8).ravel())


@pytest.mark.parametrize("code", ["U8", "U16", "U32", "U64"])
@pytest.mark.parametrize("shape", [(2112, 4224), (2083, 4219)])
def test_transposed_matrices(shape, code):
    """From 8 MiB on; several lines of a row are stored together."""
    row = dtypes.BY_CODE[code]
    size, rows = row.block_bytes, shape[0]
    columns = shape[1] // size
    values = np.random.default_rng(0).integers(0, 256, (rows, columns * size), np.uint8).view(f"<u{size}")

    def fill(address):
        strides = columns * size, size, size, rows * size
        job = jobs.Job(None, values.ctypes.data, address, values.nbytes, row.number, row.number, lib.SL_OP_GRID)
        jobs.Batch([job._replace(grid=jobs.JobGrid(rows, columns, strides))]).run(threads=3)

    assert np.array_equal(large(values.nbytes, fill), np.ascontiguousarray(values.T).view(np.uint8).ravel())


@pytest.mark.parametrize("transpose", [False, True])
def test_packed_codes_rounded(transpose):
    case = Case(ROWS, 4, (2, 2624, 2600), (1, 40), transpose=transpose)
    size = case.values.size * 2

    def fill(address):
        job = jobs.Job(None, case.codes.ctypes.data, address, 2 * size, lib.SL_F32, lib.SL_BF16, lib.SL_OP_RESTORE)
        jobs.Batch([job._replace(packed=case.prepared())]).run(threads=2)

    expected = safeload.astype(case.values, "bfloat16").view(np.uint16).astype("<u2").view(np.uint8).ravel()
    assert np.array_equal(large(size, fill), expected)


@pytest.mark.parametrize(
    ("codes", "tier"),
    dealt([("BF16", "F32"), ("F32", "BF16"), ("Q8_0", "F32"), ("BF16", "F16")], available_tiers()),
)
def test_conversions(codes, tier):
    """By a call and by jobs, against conversions of small parts."""
    source, target = (dtypes.BY_NUMBER[getattr(lib, f"SL_{code}")] for code in codes)
    count, step = (25 << 20) // target.block_bytes, 1 << 20
    block = np.random.default_rng(1).integers(0, 60, source.nbytes(1 << 16), np.uint8)  # no NaN, no infinity
    data = np.resize(block, source.nbytes(count))
    expected = np.empty(target.nbytes(count), np.uint8)

    def convert(address, begin, some):
        place, out = (ffi.cast("void *", at) for at in (data.ctypes.data + source.nbytes(begin), address))
        assert lib.sl_convert(tier, source.number, target.number, place, out, some) == lib.SL_OK

    for begin in range(0, count, step):
        convert(expected.ctypes.data + target.nbytes(begin), begin, min(step, count - begin))

    def by_job(address):
        place = None, data.ctypes.data, address, data.nbytes
        jobs.Batch([jobs.Job(*place, source.number, target.number, lib.SL_OP_CONVERT)]).run(threads=3)

    assert np.array_equal(large(expected.size, lambda address: convert(address, 0, count)), expected)
    assert np.array_equal(large(expected.size, by_job), expected)


def test_arrays_of_the_caller():
    x = np.random.default_rng(2).standard_normal((3001, 2500), np.float32).astype(ml_dtypes.bfloat16)
    out = np.ones(x.shape, np.float32)
    assert safeload.astype(x, np.float32, out=out) is out
    assert np.array_equal(out, x.astype(np.float32))
