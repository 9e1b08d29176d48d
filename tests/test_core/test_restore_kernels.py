"""Packed codes become the numbers of a restatement in numpy, bit for bit, on every tier and however they are read."""

import os
import re
from functools import lru_cache, partial

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.inside import available_tiers, dtypes, ffi, jobs, lib, tier_name
from builders.packed_codes import BLOCKS, COLUMNS, PLANES, ROWS, WORDS, Case, Masked, i2_s, nvfp4
from builders.thorough import dealt

from safeload import FormatError, RangeError, SafeloadError

NUMBERS = {code: row.number for code, row in dtypes.BY_CODE.items()}
TIERS = pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)

ALL = ("zeros", "biases", "factors")
E4M3 = (NUMBERS["F8_E4M3"], ml_dtypes.float8_e4m3fn)
INT8 = (NUMBERS["I8"], np.int8)
BF16, F16, F32 = (NUMBERS["BF16"], ml_dtypes.bfloat16), (NUMBERS["F16"], np.float16), (NUMBERS["F32"], np.float32)
NVFP4, I2_S = (lib.SL_NVFP4, 64, 36, nvfp4), (lib.SL_I2_S, 128, 32, i2_s)


def made(*arguments, **more):
    """Makes a case when a test wants it."""
    return partial(Case, *arguments, **more)


def masked(*arguments, **more):
    return partial(Masked, *arguments, **more)


@lru_cache(maxsize=1)
def once(make):
    """A case of the lists below, made once for its tiers, dtypes and operations, which follow each other."""
    return make()


# Each is one kind of published checkpoints, or an edge of what the fields allow.
CASES = {
    **{f"rows {bits} bits": made(ROWS, bits, (2, 7, 131), (3, 16), ("zeros",)) for bits in range(1, 9)},
    **{f"rows {bits} bits transposed": made(ROWS, bits, (2, 66, 67), (64, 9), ALL, transpose=True)
       for bits in range(1, 9)},
    **{f"words of rows {bits} bits": made(ROWS, bits, (2, 5, 71), (1, 8), ("biases",), word_codes=32 // bits)
       for bits in range(1, 9)},
    "words that are not full": made(ROWS, 3, (1, 3, 41), word_codes=7, gap=3),
    "rows with unused bytes": made(ROWS, 5, (3, 4, 9), (2, 2), gap=5),
    "rows that begin with the high bits": made(ROWS, 4, (2, 9, 77), (1, 64), high_first=True),
    "the same transposed": made(ROWS, 4, (2, 33, 77), (1, 64), high_first=True, transpose=True),
    "tiles of all rows": made(ROWS, 4, (1, 257, 77), (3, 16), ALL, transpose=True),
    "tiles of groups": made(COLUMNS, 4, (1, 520, 71), (1, 1), ("groups", *ALL)),
    "mxfp4": made(ROWS, 4, (4, 90, 160), (1, 32), transpose=True),
    "flat nibbles": made(ROWS, 4, (1, 1, 9999), (1, 64)),
    "fp8 of ragged blocks": made(ROWS, 8, (1, 130, 300), (128, 128), numbers=E4M3),
    "fp8 of rows transposed": made(ROWS, 8, (2, 130, 65), (1, 65), numbers=E4M3, transpose=True),
    "fp8 divided by ragged blocks": made(ROWS, 8, (2, 130, 300), (128, 128), ("divide",), numbers=E4M3),
    "fp8 divided by rows": made(ROWS, 8, (1, 19, 65), (1, 65), ("divide", "factors"), numbers=E4M3),
    "int8 divided by a scale each": made(ROWS, 8, (1, 3, 70), (1, 1), ("divide", "shared"), numbers=INT8),
    "int8 with column factors": made(ROWS, 8, (2, 3, 70), (1, 70), ("factors",), numbers=INT8),
    "only factors": made(ROWS, 4, (2, 3, 35), None, ("factors",)),
    "only a table": made(ROWS, 6, (1, 11, 13)),
    "a scale for each value": made(ROWS, 4, (1, 5, 77), (1, 1), ALL),
    "a scale for all": made(ROWS, 4, (3, 5, 77), (5, 77), ("shared", *ALL)),
    "blocks longer than rows": made(ROWS, 4, (2, 5, 77), (1000, 1 << 40), ("zeros",)),
    "groups of columns": made(ROWS, 4, (2, 6, 150), (2, 1), ("groups", *ALL)),
    "groups of columns transposed": made(ROWS, 2, (2, 70, 150), (70, 1), ("groups", "zeros"), transpose=True),
    "groups in rows of several kernels' lengths": made(ROWS, 4, (1, 2, 5001), (1, 1), ("groups", *ALL)),
    **{f"columns {bits} bits": made(COLUMNS, bits, (2, 96, 75), (32, 1), ("zeros",)) for bits in range(1, 9)},
    "columns of groups": made(COLUMNS, 4, (2, 128, 70), (1, 1), ("groups", *ALL)),
    **{f"columns {bits} bits of groups": made(COLUMNS, bits, (2, 352, 37), (1, 1), ("sequence", "groups", *ALL))
       for bits in range(1, 9)},
    "rows of groups that fill no square": made(COLUMNS, 8, (2, 268, 21), (1, 1), ("sequence", "groups", "zeros")),
    "more groups than rows": made(COLUMNS, 8, (3, 4, 70), (1, 1), ("sequence", "groups", "shared")),
    "groups whose columns share scales": made(COLUMNS, 4, (2, 72, 33), (1, 3), ("sequence", "groups", "zeros")),
    "columns with unused bytes": made(COLUMNS, 3, (2, 160, 33), (32, 2), ("zeros",), gap=2),
    "columns of two tiles beside each other": made(COLUMNS, 4, (1, 1024, 3111), (128, 1), ("zeros",)),
    "groups of two tiles beside each other": made(COLUMNS, 4, (1, 2048, 1700), (1, 1), ("groups", *ALL)),
    "a last band of one word": made(COLUMNS, 8, (1, 68, 129), (128, 1)),
    "permuted words": made(WORDS, 4, (2, 100, 72), (32, 1), ("zeros",)),
    "permuted words of groups": made(WORDS, 4, (1, 64, 136), (1, 3), ("groups", *ALL)),
    "permuted words of rows": made(WORDS, 4, (2, 9, 72), (1, 72), ALL, transpose=False),
    "permuted words of rows in groups": made(WORDS, 4, (1, 2, 5016), (1, 1), ("groups", "factors"), transpose=False),
    "permuted words with unused bytes": made(WORDS, 4, (3, 7, 8), (7, 8), ("shared",), gap=1),
    **{f"planes {bits} bits{' interleaved' * k}{' high first' * high}":
       made(PLANES, bits, (2, 24, 83), (5, 16), ("zeros",), interleaved=bool(k), high_first=bool(high))
       for bits in (2, 4) for k in (0, 1) for high in (0, 1)},
    "ternary planes": made(PLANES, 2, (1, 64, 300), (64, 300)),
    "planes with unused bytes": made(PLANES, 2, (2, 8, 31), (2, 31), ("biases",), gap=7),
    "blocks": made(BLOCKS, 4, (3, 5, 192), (5, 192), numbers=NVFP4),
    "blocks of one scale with unused bytes": made(BLOCKS, 4, (2, 3, 64), (3, 64), ("shared",), numbers=NVFP4, gap=3),
    "blocks in a grid of their own": made(BLOCKS, 4, (2, 3, 192), (2, 48), ALL, numbers=NVFP4),
    "ternary blocks": made(BLOCKS, 2, (2, 7, 384), (7, 384), ("shared",), numbers=I2_S),
    "bf16 in a mask": masked(BF16, (1, 9, 203)),
    "f16 in a mask of matrices": masked(F16, (3, 5, 64), share=0.9),
    "f32 in a mask in parts": masked(F32, (2, 7, 131), mask_columns=40),
    "fp8 in a mask with scales": masked(E4M3, (1, 40, 150), (16, 64)),
    "int8 in a mask with zeros": masked(INT8, (2, 6, 77), (2, 7), ALL, mask_columns=13),
    "a mask and groups": masked(INT8, (1, 5, 99), (1, 1), ("groups", "zeros")),
    "few values in a mask": masked(F32, (1, 60, 301), share=0.01),
    "nothing in a mask": masked(BF16, (1, 1, 50)),
    "no blocks": made(BLOCKS, 2, (1, 3, 0), (1, 1), numbers=I2_S),
    "one value": made(ROWS, 1, (1, 1, 1), (1, 1), ALL),
    "no matrices": made(ROWS, 4, (0, 3, 5)),
    "no rows": made(COLUMNS, 4, (2, 0, 5)),
    "no columns of a mask": masked(F16, (2, 4, 0)),
    "no columns": made(PLANES, 2, (2, 4, 0)),
}  # fmt: skip


@pytest.fixture
def on(monkeypatch):
    """Chooses the tier of the jobs that follow."""
    return lambda tier: inside.tune(monkeypatch, tier=tier)


def handle_of(file):
    if os.name == "nt":
        import msvcrt

        return msvcrt.get_osfhandle(file.fileno())
    return file.fileno()


def written(tmp_path, case, before=7):
    """An open file that holds the codes of a case after ``before`` bytes."""
    path = tmp_path / "codes"
    path.write_bytes(b"\xff" * before + case.codes.tobytes())
    return path.open("rb")


def assert_equal(got, want):
    if not np.array_equal(got, want):  # by far the quicker one
        np.testing.assert_array_equal(got, want)  # which says where they differ


def restore(case, code="F32", *, place=None, threads=1, op=lib.SL_OP_RESTORE):
    """What a job makes of a case, read from memory or a place in a file; nothing around it is touched."""
    row = dtypes.BY_NUMBER[getattr(lib, f"SL_{code}")]
    size = case.values.size // row.block * row.block_bytes
    out = np.full(size + 128, 0xA5, np.uint8)
    source = (None, case.codes.ctypes.data) if place is None else place
    job = jobs.Job(*source, out.ctypes.data + 64, 4 * case.values.size, NUMBERS["F32"], row.number, op)
    jobs.Batch([job._replace(packed=case.prepared())]).run(threads=threads)
    assert (out[:64] == 0xA5).all()
    assert (out[64 + size :] == 0xA5).all()
    return out[64 : 64 + size]


def converted(values, code):
    """Values as another dtype by the conversions that other tests look at."""
    row = dtypes.BY_NUMBER[getattr(lib, f"SL_{code}")]
    values = values.astype("<f4")
    out = np.empty(values.size // row.block * row.block_bytes, np.uint8)
    job = jobs.Job(None, values.ctypes.data, out.ctypes.data, values.nbytes, NUMBERS["F32"], row.number)
    jobs.Batch([job._replace(op=lib.SL_OP_COPY if code == "F32" else lib.SL_OP_CONVERT)]).run(threads=1)
    return out


def assert_restores(case, tmp_path, code="F32", threads=(1, 3)):
    want = converted(case.values, code)
    for count in threads:
        assert_equal(restore(case, code, threads=count), want)
        with written(tmp_path, case) as file:
            assert_equal(restore(case, code, place=(handle_of(file), 7), threads=count), want)


@pytest.mark.parametrize(("name", "tier"), dealt(CASES, available_tiers()))
def test_values_are_those_of_numpy(name, tier, on, tmp_path):
    on(tier)
    assert_restores(once(CASES[name]), tmp_path)


@pytest.mark.parametrize("seed", range(150))
def test_random_descriptions_restore_to_the_values_of_numpy(seed, on, tmp_path):
    rng = np.random.default_rng(seed)
    layout = int(rng.integers(4))
    bits = {WORDS: 4, PLANES: int(rng.choice([2, 4]))}.get(layout, int(rng.integers(1, 9)))
    rows, columns = (int(k) for k in rng.integers(1, 200, 2))
    more = {"gap": int(rng.integers(4))}
    if layout == ROWS:
        more["transpose"] = bool(rng.integers(2))
        if not more["transpose"] and rng.integers(2):
            more["word_codes"] = int(rng.integers(1, 32 // bits + 1))
        more["high_first"] = bits == 4 and "word_codes" not in more and bool(rng.integers(2))
    elif layout == COLUMNS:
        rows = 32 * -(-rows // 32)
        more["transpose"] = bool(rng.integers(2))
    elif layout == WORDS:
        columns = 8 * -(-columns // 8)
        more["transpose"] = bool(rng.integers(2))
    else:
        rows = 8 // bits * -(-rows * bits // 8)
        more |= {"high_first": bool(rng.integers(2)), "interleaved": bool(rng.integers(2))}
    kinds = [kind for kind in (*ALL, "groups", "shared", "sequence") if rng.integers(2)]
    blocks = [int(k) for k in rng.integers(1, 70, 2)] if rng.integers(8) else None
    case = Case(layout, bits, (int(rng.integers(1, 4)), rows, columns), blocks, kinds, seed=seed, **more)
    on(available_tiers()[seed % len(available_tiers())])
    assert_restores(case, tmp_path, threads=(1 + seed % 3,))


@pytest.mark.parametrize(("columns", "tier"), dealt(range(1, 131), available_tiers()))
def test_rows_of_every_length_begin_anywhere_in_a_byte(columns, tier, on):
    """A single stream with many blocks, and rows that a piece of a conversion cuts."""
    on(tier)
    for case in (
        Case(ROWS, 4, (1, 5, columns), (1, 7), ("zeros", "biases"), high_first=columns % 2 == 0),
        Case(ROWS, 1 + columns % 8, (1, 3, columns), (2, 32)),
        Case(PLANES, 2, (1, 4, columns), (1, 16), ("zeros",)),
        Case(COLUMNS, 4, (1, 8 * (columns % 3 + 1), columns), (8, 1), ("zeros",)),
        Case(COLUMNS, 1 + columns % 8, (1, 32, columns), (8, 1), ("zeros",), transpose=False),
        Case(WORDS, 4, (1, columns, 8), (16, 1), ("zeros",)),
        Case(ROWS, 4, (1, columns, 19), (1, 16), transpose=True),
    ):
        assert_equal(restore(case).view("<f4"), case.values.ravel())


# Chunks are 3 MiB of values, pieces 192 KiB of values, reads at most 192 KiB of codes; those of tiles, of 64 rows and
# more, at most 1 MiB.
CHUNK, STAGING, TILE_READ = 3 << 20, 192 << 10, 1 << 20
BORDERS = {
    **{f"a chunk and {more} values": made(ROWS, 5, (1, 1, CHUNK // 4 + more), (1, 4096)) for more in (-1, 0, 1)},
    **{f"a piece and {more} values": made(ROWS, 3, (1, 1, STAGING // 4 + more), (1, 4096)) for more in (-1, 0, 1)},
    **{f"rows of half a read and {more} bytes": made(ROWS, 4, (1, 3, STAGING + 2 * more), (1, 128))
       for more in (-1, 0, 1)},
    **{f"rows of a read and {more} bytes": made(ROWS, 8, (1, 5, STAGING + more), (2, 128)) for more in (-1, 0, 1)},
    "rows that do not divide a read": made(ROWS, 4, (1, 1000, 1501), (1, 32), ("zeros",)),
    "words that do not divide a read": made(ROWS, 7, (1, 3, 400_001), (1, 1024), word_codes=3),
    "planes that do not divide a read": made(PLANES, 2, (2, 128, 5001), (128, 5001)),
    "planes of long rows": made(PLANES, 4, (1, 4, STAGING + 3), (1, 64), interleaved=True),
    **{f"transposed rows of {TILE_READ // 64} and {more} bytes":
       made(ROWS, 4, (1, 130, TILE_READ // 32 + 2 * more), (1, 32), transpose=True) for more in (-1, 0, 1)},
    "nibbles that do not fill the last word": made(ROWS, 4, (1, 65, TILE_READ // 32 + 77), (1, 32), transpose=True),
    "fp8 transposed": made(ROWS, 8, (1, 70, TILE_READ // 64 + 999), (128, 128), numbers=E4M3, transpose=True),
    "columns of long rows": made(COLUMNS, 4, (1, 136, TILE_READ // 32 + 99), (64, 1), ("zeros",)),
    "untransposed columns of 5 bits in long rows":
       made(COLUMNS, 5, (1, 32, TILE_READ // 24 + 98), (8, 1), ("zeros",), transpose=False, gap=4),
    "columns of 3 bits in long rows": made(COLUMNS, 3, (1, 160, TILE_READ // 24 + 98), (32, 1), ("zeros",)),
    "groups in long rows": made(COLUMNS, 8, (1, 64, TILE_READ // 64 + 99), (1, 1), ("sequence", "groups", "zeros")),
    "permuted words of long rows": made(WORDS, 4, (1, 96, TILE_READ // 32 + 72), (32, 1), ("zeros",)),
    "tiles of fewer rows in a file": made(ROWS, 4, (1, 600, 2 * 6000), (1, 32), transpose=True),
    "blocks of a chunk and one more": made(BLOCKS, 4, (1, 1, CHUNK // 4 + 64), (1, CHUNK), numbers=NVFP4),
    "blocks of long rows": made(BLOCKS, 2, (1, 3, 128 * 3075), (3, CHUNK), numbers=I2_S),
    "blocks of rows that do not divide a read": made(BLOCKS, 4, (1, 301, 64 * 31), (301, CHUNK), numbers=NVFP4),
    "several tiles": made(COLUMNS, 4, (3, 520, 136), (128, 1), ("zeros",)),
    "values of a mask that do not divide a read": masked(BF16, (1, 300, 3001)),
    "a long row of a mask": masked(F32, (1, 2, STAGING * 3 + 5), mask_columns=1 << 16),
    "bytes of a long row of a mask": masked(E4M3, (1, 2, CHUNK // 4 + 1), (2, 1 << 20)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "tier"), dealt(BORDERS, available_tiers()))
def test_values_at_the_ends_of_reads_and_chunks(name, tier, on, tmp_path):
    on(tier)
    assert_restores(once(BORDERS[name]), tmp_path, threads=(1, 3) if tier == available_tiers()[-1] else (3,))


@pytest.mark.parametrize("columns", [(0, 40), (4056, 4096), (1024, 2048), (8, 4096)])
@pytest.mark.parametrize("layout", [COLUMNS, WORDS])
def test_columns_of_a_wider_matrix(layout, columns, tmp_path):
    """Their last row ends with their codes, and there the file may end."""
    case = once(made(layout, 4, (1, 136, 4096), (32, 1), ("zeros", "biases")))
    first, end = columns
    part = object.__new__(Case)
    begin, width = (first * 4, (end - first) * 4) if layout == COLUMNS else (first // 2, (end - first) // 2)
    size = case.codes.nbytes - case.codes.shape[-1] + width
    part.codes = case.codes.reshape(-1)[begin : begin + size].copy()
    part.values = np.ascontiguousarray(case.values[:, first:end])
    grids = {name: np.ascontiguousarray(case.fields[name][..., first:end]) for name in ("scales", "zeros", "biases")}
    count = {"size": size, "columns": end - first, "grid_columns": end - first}
    part.fields = {**case.fields, **grids, **count, "grid_step": grids["scales"].size}
    assert_restores(part, tmp_path)
    part.fields["size"] -= 1
    with pytest.raises(SafeloadError, match="their rows need"):
        restore(part)


TARGETS = ("BF16", "F16", "F64", "F8_E4M3", "Q8_0", "Q4_0", "Q5_1")
# Whole blocks in their own order and transposed.
TO_BLOCKS = {
    "rows": made(ROWS, 3, (2, 33, 96), (1, 16), ("zeros",)),
    "flat": made(ROWS, 4, (1, 1, CHUNK // 4 + 64), (1, 64)),
    "transposed": made(ROWS, 4, (2, 160, 77), (1, 32), transpose=True),
    "transposed in long rows": made(ROWS, 8, (1, 96, 4099), (16, 64), ("factors",), numbers=INT8, transpose=True),
    "columns": made(COLUMNS, 4, (1, 224, 131), (32, 1), ("zeros",)),
    "columns of groups": made(COLUMNS, 4, (1, 288, 35), (1, 1), ("sequence", "groups", "zeros")),
    "words": made(WORDS, 4, (2, 96, 200), (32, 1), ("zeros",)),
    "planes": made(PLANES, 2, (1, 64, 160), (64, 160)),
    "blocks": made(BLOCKS, 4, (2, 3, 192), (3, 192), numbers=NVFP4),
    "mask": masked(E4M3, (1, 40, 96), (1, 96)),
}


@pytest.mark.parametrize(("name", "code", "tier"), [
    (name, *rest) for k, name in enumerate(TO_BLOCKS) for rest in dealt([*TARGETS[k:], *TARGETS[:k]], available_tiers())
])  # fmt: skip
def test_another_dtype_is_the_conversion_of_the_values(name, code, tier, on, tmp_path):
    on(tier)
    assert_restores(once(TO_BLOCKS[name]), tmp_path, code)


def test_blocks_that_rows_do_not_fill_are_refused():
    for case in (Case(ROWS, 4, (1, 33, 96), transpose=True), Case(ROWS, 4, (1, 3, 33))):
        with pytest.raises(SafeloadError, match="not a whole number of blocks of"):
            restore(case, "Q8_0")


@pytest.mark.parametrize(
    "case",
    [
        made(ROWS, 8, (1, 33, 96), (1, 96), ("divide",), numbers=E4M3, transpose=True),
        made(ROWS, 8, (1, 33, 96), (1, 96), ("divide", "zeros"), numbers=E4M3),
        made(ROWS, 8, (1, 33, 96), (1, 1), ("divide", "groups"), numbers=E4M3),
        made(ROWS, 4, (1, 33, 96), (1, 96), ("divide",)),
        made(COLUMNS, 8, (1, 32, 96), (32, 1), ("divide",)),
    ],
    ids=["transposed", "zeros", "groups", "table", "columns"],
)
def test_division_of_other_codes_is_refused(case):
    with pytest.raises(SafeloadError, match="are divided by scales"):
        restore(case(), "F32")


@pytest.mark.parametrize("transpose", [False, True])
def test_a_value_too_large_for_its_block_is_told_by_its_index(transpose):
    case = Case(ROWS, 4, (2, 64, 32), (1, 32), transpose=transpose)
    case.fields["scales"][1, 5, 0] = 3e38
    with pytest.raises(RangeError, match=r"element \d+ (has magnitude .*, too large for q8_0|is .*infinity)") as caught:
        restore(case, "Q8_0")
    index = int(re.search(r"element (\d+)", str(caught.value)).group(1))
    assert np.unravel_index(index, case.values.shape)[:: 2 if transpose else 1][:2] == (1, 5)


# ---- operations on values that are never stored ----

# Codes in the order of their values, with segments of statistics and chunks that end inside of rows.
IN_ORDER = {
    "rows": made(ROWS, 4, (2, 37, 1001), (1, 64), ("zeros",)),
    "one long row": made(ROWS, 3, (1, 1, 900_001), (1, 512), ("biases",)),
    "fp8": made(ROWS, 8, (1, 900, 1100), (128, 128), numbers=E4M3),
    "groups": made(ROWS, 4, (1, 64, 2050), (1, 1), ("groups", *ALL)),
    "planes": made(PLANES, 2, (1, 400, 901), (400, 901)),
    "columns": made(COLUMNS, 4, (2, 64, 2050), (16, 1), ("zeros",), transpose=False),
    "columns of codes across words": made(COLUMNS, 3, (1, 96, 2050), (1, 1), ("groups", *ALL), transpose=False),
    "blocks": made(BLOCKS, 4, (1, 300, 1408), (300, 1408), numbers=NVFP4),
    "mask": masked(BF16, (1, 701, 1203)),
}


def summary(case, op, packed, threads, channels=None, place=None):
    """What an operation writes for the codes of a case, or for its values."""
    out = np.zeros(4 * case.values.size + 65536, np.uint8)
    values = case.values.astype("<f4")
    source = (None, (case.codes if packed else values).ctypes.data) if place is None else place
    job = jobs.Job(*source, out.ctypes.data, values.nbytes, NUMBERS["F32"], NUMBERS["I8"], op, channels=channels)
    jobs.Batch([job._replace(packed=case.prepared() if packed else None)]).run(threads=threads)
    return out


def channels_of(case, axis):
    """Channels along an axis: one for each matrix, row, or column; for -1 adjacent values alternate."""
    inner = int(np.prod(case.values.shape[axis:][1:])) if axis != -1 else 1
    count = case.values.shape[axis]
    factors = np.linspace(0.5, 90, count).astype(np.float32)
    return jobs.Channels(count, inner, factors)


@pytest.mark.parametrize("op", ["INT8", "ABSMAX", "FINITE", "STATS", "HISTOGRAM"])
@pytest.mark.parametrize(("name", "tier"), dealt(IN_ORDER, available_tiers()))
def test_an_operation_on_codes_is_that_on_their_values(name, op, tier, on, tmp_path):
    on(tier)
    case, number = once(IN_ORDER[name]), getattr(lib, f"SL_OP_{op}")
    for axis in (0, 1, -1) if op in ("INT8", "ABSMAX") else (None,):
        channels = None if axis is None else channels_of(case, axis)
        want = summary(case, number, False, 1, channels)
        assert want.any() == (op != "FINITE")
        for threads in (1, 3):
            assert_equal(summary(case, number, True, threads, channels), want)
            with written(tmp_path, case) as file:
                got = summary(case, number, True, threads, channels, (handle_of(file), 7))
            assert_equal(got, want)


@pytest.mark.parametrize("op", ["INT8", "ABSMAX", "FINITE", "STATS", "HISTOGRAM"])
@pytest.mark.parametrize("case", [Case(ROWS, 4, (1, 8, 8), transpose=True), Case(COLUMNS, 4, (1, 8, 8)),
                                  Case(WORDS, 4, (1, 8, 8))], ids=["transposed", "columns", "words"])  # fmt: skip
def test_codes_in_another_order_than_their_values_are_only_restored(case, op):
    channels = channels_of(case, 0) if op in ("INT8", "ABSMAX") else None
    with pytest.raises(SafeloadError, match="needs codes in the order of their values"):
        summary(case, getattr(lib, f"SL_OP_{op}"), True, 1, channels)


@pytest.mark.parametrize("at", [0, 1, 99_999, 900 * 1100 - 1])
def test_a_value_that_is_not_finite_is_found_where_it_is(at):
    case = Case(ROWS, 8, (1, 900, 1100), (128, 128), numbers=E4M3)
    case.codes.reshape(-1)[at] = 0x7F
    with pytest.raises(RangeError, match=rf"element {at} is nan"):
        summary(case, lib.SL_OP_FINITE, True, 2)


@pytest.mark.parametrize("row", [0, 5, 63])
@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_code_that_no_writer_stores_is_a_fault_of_the_file(where, row, tmp_path):
    case = Case(PLANES, 2, (1, 64, 300), (64, 300))
    case.codes &= 0b01010101
    case.fields["forbidden"] = 3
    restore(case)
    case.codes[0, row % 16, 299] |= 3 << row // 16 * 2
    with written(tmp_path, case) as file:
        place = (handle_of(file), 7) if where == "file" else None
        with pytest.raises(FormatError, match=f"row {row}, column 299 has code 3"):
            restore(case, place=place)


@pytest.mark.parametrize("at", [0, 127, 128 + 33, 2 * 3072 + 3071])
@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_code_that_no_writer_stores_in_ternary_blocks(where, at, tmp_path):
    case = Case(BLOCKS, 2, (1, 3, 3072), (3, 3072), numbers=I2_S)
    case.codes &= 0b01010101
    case.fields["forbidden"] = 3
    restore(case)
    row, column = divmod(at, 3072)
    byte, plane = column // 128 * 32 + column % 32, column % 128 // 32
    case.codes[0, row, byte] |= 3 << 6 - 2 * plane
    with written(tmp_path, case) as file:
        place = (handle_of(file), 7) if where == "file" else None
        with pytest.raises(FormatError, match=f"row {row}, column {column} has code 3"):
            restore(case, place=place)


@TIERS
@pytest.mark.parametrize("columns", range(1, 70))
def test_rows_of_a_mask_begin_and_end_anywhere(columns, tier, on):
    on(tier)
    for case in (Masked(F32, (1, 7, columns), share=0.6), Masked(BF16, (1, 5, columns), mask_columns=3)):
        assert_equal(restore(case).view("<f4"), case.values.ravel())


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [(0, 0, "row 30 has places for 1 values in its mask, but 0 are stored"),
     (1, 900, "row 31 has places for 999 values in its mask, but 1000 are stored"),
     (299, 999, r"row 329 has places for (\d+) values in its mask, but (?!\1)\d+ are stored")],
)  # fmt: skip
@pytest.mark.parametrize("code", ["F32", "BF16"])
def test_a_mask_with_another_number_of_values_is_a_fault_of_the_file(code, row, column, message, tmp_path):
    case = Masked(BF16, (1, 300, 1000))
    case.fields["first_row"] = 30
    case.fields["mask"][0, row, column // 8] ^= 1 << column % 8
    with written(tmp_path, case) as file:
        for place in (None, (handle_of(file), 7)):
            with pytest.raises(FormatError, match=message):
                restore(case, code, place=place, threads=2)


def test_bits_after_the_last_column_mean_nothing():
    case = Masked(F16, (1, 20, 50))
    case.fields["mask"][..., -1] |= 0b11111100
    assert_equal(restore(case).view("<f4"), case.values.ravel())


@pytest.mark.parametrize("at", [0, 7, 20])
@pytest.mark.parametrize("by", [-(1 << 40), -3, -1, 1, 3, 1 << 40, 1 << 63])
def test_starts_that_are_not_those_of_the_mask_are_refused(at, by):
    case = Masked(F16, (1, 20, 50))
    case.fields["starts"][at] = (int(case.fields["starts"][at]) + by) % 2**64
    with pytest.raises(FormatError, match=r"row \d+"):
        restore(case)


def test_fields_are_at_the_offsets_that_jobs_assume():
    assert set(CASES["mxfp4"]().fields) <= {name for name, _ in ffi.typeof("sl_packed").fields}
