"""Packed codes become codes of other layouts as in NumPy, bit for bit, on every tier and however they are read."""

import os
from functools import lru_cache, partial

import numpy as np
import pytest
from builders import inside
from builders.inside import available_tiers, dtypes, jobs, lib
from builders.packed_codes import AWQ_ORDER, BLOCKS, COLUMNS, PLANES, ROWS, WORDS, Case, Prepared, stream, words
from builders.thorough import dealt

from safeload import SafeloadError

F32, U8 = (dtypes.BY_CODE[code].number for code in ("F32", "U8"))
STREAM, HALVES, AWQ = lib.SL_ORDER_STREAM, lib.SL_ORDER_HALVES, lib.SL_ORDER_WORDS
FILLER = 0xA5  # of bytes that no job may touch


def halves(codes):
    """Blocks of 32 codes of 4 bits: codes 16 apart share a byte."""
    blocks = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 32, 32)
    return (blocks[..., :16] | blocks[..., 16:] << 4).reshape(*codes.shape[:-1], codes.shape[-1] // 2)


def numbered(layout, bits, shape, flip=0, **more):
    """A case whose values are its codes, with some bits flipped."""
    case = Case(layout, bits, shape, **more)
    index = {value: code for code, value in enumerate(case.table.tolist())}
    assert len(index) == 1 << bits
    case.codes_of = np.vectorize(index.__getitem__, otypes=[np.uint8])(case.values) ^ np.uint8(flip)
    case.fields["table"] = (np.arange(1 << bits) ^ flip).astype(np.float32)
    return case


def from_blocks(name, shape):
    """Blocks of a type of ggml with random scales: their bytes, and the codes at their end."""
    row, bits = dtypes.BLOCK_TYPES[name], 8 if name == "q8_0" else 4
    matrices, rows, columns = shape
    case = Case.__new__(Case)
    rng = np.random.default_rng([*shape, bits])
    stored = rng.integers(0, 256, (matrices, rows, columns // 32, row.block_bytes), dtype=np.uint8)
    case.codes = np.ascontiguousarray(stored.reshape(matrices, rows, -1))
    last = stored[..., -4 * bits :]
    codes = last if bits == 8 else np.concatenate([last & 15, last >> 4], axis=-1)
    case.codes_of = codes.reshape(shape)
    case.fields = {
        "layout": BLOCKS, "bits": bits, "codes": row.number, "forbidden": -1, "size": case.codes.nbytes,
        "matrices": matrices, "rows": rows, "columns": columns, "row_bytes": case.codes.shape[-1],
        "table": np.arange(1 << bits, dtype=np.float32),
    }  # fmt: skip
    return case


SOURCES = {
    **{f"rows {bits} bits": partial(numbered, ROWS, bits, (2, 7, 160)) for bits in range(1, 9)},
    **{f"rows {bits} bits transposed": partial(numbered, ROWS, bits, (2, 160, 67), transpose=True)
       for bits in (2, 4, 5, 8)},
    "nibbles transposed": partial(numbered, ROWS, 4, (2, 168, 72), transpose=True),
    "high nibbles transposed": partial(numbered, ROWS, 4, (1, 200, 40), flip=8, transpose=True, high_first=True),
    "wide words": partial(numbered, WORDS, 4, (1, 72, 2056), flip=5),
    "words of rows": partial(numbered, ROWS, 3, (1, 9, 96), word_codes=10),
    "high bits first": partial(numbered, ROWS, 4, (2, 5, 96), high_first=True),
    **{f"columns {bits} bits": partial(numbered, COLUMNS, bits, (2, 96, 75)) for bits in range(2, 9)},
    "columns in their own order": partial(numbered, COLUMNS, 4, (1, 32, 64), transpose=False),
    "words": partial(numbered, WORDS, 4, (2, 160, 72)),
    "words in their own order": partial(numbered, WORDS, 4, (1, 5, 64), transpose=False),
    "planes": partial(numbered, PLANES, 4, (2, 8, 64)),
    "interleaved planes": partial(numbered, PLANES, 2, (2, 8, 64), interleaved=True, high_first=True),
    **{name: partial(from_blocks, name, (2, 3, 192)) for name in ("q4_0", "q4_1", "q8_0", "mxfp4")},
    "tall": partial(numbered, WORDS, 4, (1, 4160, 136)),
    "wide": partial(numbered, ROWS, 4, (1, 3, 51200)),
    "wide and ragged": partial(numbered, ROWS, 5, (1, 2, 50001)),
    "one code": partial(numbered, ROWS, 2, (1, 1, 1)),
    "one row": partial(numbered, ROWS, 4, (1, 1, 4097)),
    "one column": partial(numbered, ROWS, 3, (3, 70, 1)),
    "one row transposed": partial(numbered, ROWS, 4, (1, 37, 1), transpose=True),
    "ragged rows": partial(numbered, ROWS, 4, (2, 9, 77)),
    "ragged tiles": partial(numbered, ROWS, 4, (2, 77, 9), transpose=True),
    "no rows": partial(numbered, ROWS, 4, (2, 0, 32)),
    "no columns": partial(numbered, ROWS, 4, (2, 3, 0)),
}  # fmt: skip


@lru_cache(maxsize=1)
def source(name):
    """A case of the list, made once for its targets, which follow each other."""
    return SOURCES[name]()


# Each target: bits (0 for those of the source), order, bytes between blocks, and the bytes after a row.
TARGETS = {
    **{f"{bits} bits": (bits, STREAM, 0, 0) for bits in (2, 3, 5, 6, 7)},
    "4 bits": (4, STREAM, 0, 3),
    "8 bits": (8, STREAM, 0, 0),
    "q4_0": (4, HALVES, 18, 2),
    "q8_0": (8, STREAM, 34, 2),
    "halves": (4, HALVES, 0, 1),
    "awq": (4, AWQ, 0, 0),
    "awq in blocks": (4, AWQ, 20, 0),
}


def packed(codes, bits, order, block_bytes):
    """Rows of codes as bytes."""
    codes = codes & np.uint8((1 << bits) - 1)
    if order == HALVES:
        rows = halves(codes)
    elif order == AWQ:
        rows = words(codes, 4, AWQ_ORDER)
    else:
        rows = codes if bits == 8 else stream(codes, bits)
    if not block_bytes:
        return rows
    own = 4 * bits
    spaced = np.full((*codes.shape[:-1], codes.shape[-1] // 32, block_bytes), FILLER, np.uint8)
    spaced[..., :own] = rows.reshape(*spaced.shape[:-1], own)
    spaced = spaced.reshape(*codes.shape[:-1], codes.shape[-1] // 32 * block_bytes)
    return spaced[..., : spaced.shape[-1] - (block_bytes - own)] if spaced.shape[-1] else spaced


def fits(shape, order, block_bytes):
    """Whether rows are whole units of an order."""
    unit = 32 if block_bytes or order == HALVES else 8 if order == AWQ else 1
    return shape[-1] % unit == 0


def move(case, bits, order, block_bytes, row_bytes, *, threads=1, place=None, fields=None):
    """What a job writes, between bytes that it may not touch."""
    count = case.codes_of.size
    rows = np.prod(case.codes_of.shape[:-1])
    out = np.full(64 + rows * row_bytes + 64, FILLER, np.uint8)
    source = (None, case.codes.ctypes.data) if place is None else place
    job = jobs.Job(*source, out.ctypes.data + 64, 4 * count, F32, U8, lib.SL_OP_RESTORE)
    layout = jobs.CodeLayout(bits, order, row_bytes, block_bytes)
    job = job._replace(packed=Prepared(fields or case.fields), codes=layout)
    jobs.Batch([job]).run(threads=threads)
    assert (out[:64] == FILLER).all()
    assert (out[64 + rows * row_bytes :] == FILLER).all()
    return out[64 : 64 + rows * row_bytes].reshape(rows, row_bytes)


PAIRS = [(source, target) for source in SOURCES for target in TARGETS]


@pytest.mark.parametrize(("pair", "tier"), dealt(PAIRS, available_tiers()), ids=str)
def test_codes_are_those_of_numpy(pair, tier, monkeypatch, tmp_path):
    inside.tune(monkeypatch, tier=tier)
    case, (bits, order, block_bytes, gap) = source(pair[0]), TARGETS[pair[1]]
    if not fits(case.codes_of.shape, order, block_bytes):
        with pytest.raises(SafeloadError, match="are not whole units of"):
            move(case, bits, order, block_bytes, 64 + 2 * case.codes_of.shape[-1])
        return
    expected = packed(case.codes_of, bits, order, block_bytes)
    expected = expected.reshape(np.prod(expected.shape[:-1]), expected.shape[-1])
    (tmp_path / "codes").write_bytes(b"\xff" * 7 + case.codes.tobytes())
    for threads in (1, 3):
        got = move(case, bits, order, block_bytes, expected.shape[-1] + gap, threads=threads)
        np.testing.assert_array_equal(got[:, : expected.shape[-1]], expected)
        assert (got[:, expected.shape[-1] :] == FILLER).all()
    with (tmp_path / "codes").open("rb") as file:
        got = move(case, bits, order, block_bytes, expected.shape[-1], threads=2, place=(handle_of(file), 7))
    np.testing.assert_array_equal(got, expected)


def handle_of(file):
    if os.name == "nt":
        import msvcrt

        return msvcrt.get_osfhandle(file.fileno())
    return file.fileno()


@pytest.mark.parametrize(("transpose", "tier"), dealt([False, True], available_tiers()))
def test_a_number_of_each_block_is_subtracted_and_codes_wrap(transpose, tier, monkeypatch):
    inside.tune(monkeypatch, tier=tier)
    case = numbered(ROWS, 4, (2, 70, 70), transpose=transpose)
    shifts = np.random.default_rng(1).integers(-200, 200, (2, 70, 3)).astype(np.float32)
    grid = {"row_block": 1, "column_block": 32, "grid_rows": 70, "grid_columns": 3, "grid_step": 210}
    fields = {**case.fields, **grid, "scales": np.ones_like(shifts), "zeros": shifts}
    each = np.repeat(shifts, 32, axis=2)[..., :70]
    each = each.swapaxes(1, 2) if transpose else each
    expected = (case.codes_of.astype(np.int64) - each.astype(np.int64)).astype(np.uint8)
    got = move(case, 8, STREAM, 0, 70, fields=fields)
    np.testing.assert_array_equal(got.reshape(expected.shape), expected)


@pytest.mark.parametrize(
    ("bits", "order", "block_bytes", "row_bytes", "message"),
    [
        (0, STREAM, 0, 64, "no codes of 0 bits in order 0 as dtype"),
        (9, STREAM, 0, 64, "no codes of 9 bits"),
        (4, 3, 0, 64, "no codes of 4 bits in order 3"),
        (4, -1, 0, 64, "no codes of 4 bits in order -1"),
        (3, HALVES, 0, 64, "no codes of 3 bits in order 1"),
        (8, AWQ, 0, 64, "no codes of 8 bits in order 2"),
        (4, STREAM, 0, 31, "rows of 31 bytes cannot hold 64 codes of 4 bits"),
        (4, STREAM, 0, 1 << 63, "cannot hold 64 codes"),
        (4, HALVES, 15, 64, "cannot hold 64 codes"),
        (4, HALVES, 18, 33, "rows of 33 bytes cannot hold 64 codes of 4 bits"),
        (8, STREAM, 1 << 63, 1 << 62, "cannot hold 64 codes"),
    ],
)
def test_a_target_that_cannot_hold_the_codes_is_refused(bits, order, block_bytes, row_bytes, message):
    case = numbered(ROWS, 4, (1, 3, 64))
    out = np.full(64, FILLER, np.uint8)
    job = jobs.Job(None, case.codes.ctypes.data, out.ctypes.data, 4 * 192, F32, U8, lib.SL_OP_RESTORE)
    job = job._replace(packed=case.prepared(), codes=jobs.CodeLayout(bits, order, row_bytes, block_bytes))
    with pytest.raises(SafeloadError, match=message):
        jobs.Batch([job]).run()
    assert (out == FILLER).all()


def test_only_restoring_to_bytes_takes_codes():
    case = numbered(ROWS, 4, (1, 3, 64))
    out = np.zeros(4096, np.uint8)
    job = jobs.Job(None, case.codes.ctypes.data, out.ctypes.data, 4 * 192, F32, U8, lib.SL_OP_RESTORE)
    job = job._replace(packed=case.prepared(), codes=jobs.CodeLayout(4, STREAM, 32))
    with pytest.raises(SafeloadError, match="as dtype"):
        jobs.Batch([job._replace(target=F32)]).run()
    with pytest.raises(SafeloadError, match="the operation finite takes no codes"):
        jobs.Batch([job._replace(op=lib.SL_OP_FINITE)]).run()


def test_blocks_that_do_not_end_with_their_codes_are_refused():
    case = from_blocks("q4_0", (1, 2, 64))
    for change in ({"bits": 5}, {"bits": 8}, {"codes": dtypes.BLOCK_TYPES["q4_k"].number}, {"forbidden": 3}):
        with pytest.raises(SafeloadError, match="do not end with 32 codes"):
            move(case, 8, STREAM, 0, 64, fields={**case.fields, **change})
