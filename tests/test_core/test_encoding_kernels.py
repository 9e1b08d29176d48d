"""The kernels of other engines' formats: every instruction set gives the bits of scalar C."""

from itertools import product

import numpy as np
import pytest
from builders import inside
from builders.engine_models import DTYPES, matrix
from builders.inside import dtypes, ffi, lib, presets
from builders.inside import quantizing as encoding
from builders.random import rng
from builders.schemes import ENGINE_FORMATS
from builders.thorough import part_of

from safeload.errors import RangeError

PRESETS = {name: preset for name, preset in presets().items() if preset.parts}
TIERS = [tier for tier in range(1, lib.SL_TIER_COUNT) if lib.sl_tier_available(tier)]


def encode(name, dtype, weights, tier, monkeypatch):
    inside.tune(monkeypatch, tier=tier)
    row = dtypes.BY_NAME[dtype]
    flat = weights.reshape(-1)
    values = encoding.in_memory(flat)
    each = encoding.Encoding("x", PRESETS[name], weights.shape, row)
    dtype, shape = each.stored("codes")
    return encoding.encode(each, values, largest=4.0, codes=np.empty(shape, dtype), threads=1)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRESETS)
def test_a_tier_gives_the_codes_of_scalar(name, dtype, tier, monkeypatch):
    flat = PRESETS[name].group in (None, 64) and not PRESETS[name].engine.stacks_experts
    flat = flat and PRESETS[name].layout == lib.SL_LAYOUT_ROWS  # others have sides of multiples of 8
    shapes = [(24, 128), (16, 5120 if PRESETS[name].group is None else 384), *([(20, 77)] if flat else [])]
    for seed, shape in enumerate(shapes):
        weights = matrix(*shape, seed).astype(DTYPES[dtype])
        scalar = encode(name, dtype, weights, lib.SL_TIER_SCALAR, monkeypatch)
        parts = encode(name, dtype, weights, tier, monkeypatch)
        assert parts.keys() == scalar.keys()
        for role, part in parts.items():
            np.testing.assert_array_equal(part.view(np.uint8), scalar[role].view(np.uint8), err_msg=role)


def hostile(kind, dtype, shape):
    """Finite weights of a kind, from the test's random numbers."""
    size, item = shape[0] * shape[1], np.dtype(DTYPES[dtype]).itemsize
    integer = {2: np.uint16, 4: np.uint32}[item]
    if kind == "any bits":
        bits = rng.integers(0, 1 << 8 * item, size, dtype=np.uint64).astype(integer)
    elif kind == "subnormal":
        sign = rng.integers(0, 2, size, dtype=np.uint64) << np.uint64(8 * item - 1)
        bits = (rng.integers(0, 1 << 8 * item - 6, size, dtype=np.uint64) | sign).astype(integer)
    elif kind == "ties":
        bits = (rng.integers(-48, 49, size) / np.float32(8)).astype(DTYPES[dtype]).view(integer)
    else:  # blocks of all sizes, with zeros of both signs
        values = rng.standard_normal(size) * np.exp2(rng.integers(-24, 14, size // 16 + 1).repeat(16)[:size])
        values *= rng.integers(-1, 2, size)
        bits = values.astype(DTYPES[dtype]).view(integer)
    values = bits.view(DTYPES[dtype])
    return np.where(np.isfinite(values.astype(np.float32)), values, DTYPES[dtype](1)).reshape(shape)


def encode_or_error(*arguments):
    try:
        return {role: part.tobytes() for role, part in encode(*arguments).items()}
    except RangeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("dtype", "kind"), part_of([*product(DTYPES, ["any bits", "subnormal", "ties", "blocks"])], 0, 3)
)
@pytest.mark.parametrize("name", ENGINE_FORMATS)
def test_a_tier_gives_the_codes_of_scalar_for_hostile_weights(name, dtype, kind, monkeypatch):
    preset = PRESETS[name]
    ragged = preset.flat or preset.row_block > 1 or preset.group is None
    shapes = [(3, 128), (2, 4096 + 128), (130, 257) if ragged else (130, 256)]
    for shape in shapes if preset.layout == lib.SL_LAYOUT_ROWS else [(8, 128), (8, 4096 + 128), (136, 256)]:
        weights = hostile(kind, dtype, shape)
        for bad in (None, np.nan, np.inf, -np.inf):
            if bad is not None:
                weights[-1, -3] = bad
            scalar = encode_or_error(name, dtype, weights, lib.SL_TIER_SCALAR, monkeypatch)
            assert bad is None or isinstance(scalar, str)  # an earlier block may fail
            for tier in TIERS:
                assert encode_or_error(name, dtype, weights, tier, monkeypatch) == scalar


@pytest.mark.parametrize("tier", [lib.SL_TIER_SCALAR, *TIERS])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_codes_are_packed_from_the_lowest_bits(bits, tier, monkeypatch):
    name = f"mlx{bits}-g32"
    for columns in (32, 64, 96, 160, 4096, 4128):
        weights = hostile("blocks", "float32", (3, columns))
        words = encode(name, "float32", weights, tier, monkeypatch)["codes"].astype("<u4").view(np.uint8)
        assert words.shape == (3, columns * bits // 8)
        unpacked = np.unpackbits(words, axis=1, bitorder="little").reshape(3, columns, bits)
        codes = np.packbits(unpacked, axis=2, bitorder="little")[..., 0]
        parts = encode(name, "float32", weights, tier, monkeypatch)
        scales, biases = (parts[role].repeat(32, axis=1) for role in ("scale", "bias"))
        with np.errstate(all="ignore"):
            expected = np.rint((weights - biases) / scales).clip(0, (1 << bits) - 1)
        np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("tier", [lib.SL_TIER_SCALAR, *TIERS])
def test_e4m3_is_the_nearest_number(tier, monkeypatch):
    numbers = np.arange(0x7F, dtype=np.uint8).view(dtypes.array_dtype(lib.SL_F8_E4M3)).astype(np.float32)
    between = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(between, np.float32(0)), between, np.nextafter(between, np.float32(448)), numbers]
    values = np.concatenate([*near, *(-x for x in near)]).astype(np.float32)
    weights = np.concatenate([values, [448]]).reshape(1, -1).astype(np.float32)  # the scale is 1
    parts = encode("fp8_dynamic", "float32", weights, tier, monkeypatch)
    expected = weights.astype(parts["codes"].dtype)
    np.testing.assert_array_equal(parts["codes"].view(np.uint8), expected.view(np.uint8))


def test_unknown_arguments_are_refused():
    job, position = ffi.new("sl_encoding *"), ffi.new("uint64_t *")
    job.row_block = job.group = 128
    assert lib.sl_encode(0, job, position) == lib.SL_E_ARGUMENT  # dtype
    setattr(job, "from", lib.SL_F32)
    assert lib.sl_encode(99, job, position) == lib.SL_E_ARGUMENT
    job.group, job.columns = 8, 64
    assert lib.sl_encode(0, job, position) == lib.SL_E_ARGUMENT


@pytest.mark.parametrize("tier", [lib.SL_TIER_SCALAR, *TIERS])
def test_a_group_can_exceed_the_columns_by_far(tier):
    weights, results = rng.standard_normal((3, 100), np.float32), []
    for group in (100, 101, (1 << 64) - 1):
        scales, codes = np.zeros(3, np.float32), np.zeros((3, 100), np.uint8)
        job, position = ffi.new("sl_encoding *"), ffi.new("uint64_t *")
        setattr(job, "from", lib.SL_F32)
        job.method, job.bits, job.is_signed = lib.SL_ENCODE_INT, 8, 1
        job.rows, job.columns, job.row_block, job.group, job.row_bytes = 3, 100, 1, group, 100
        for field, kind, array in (
            ("weights", "void", weights),
            ("scales", "float", scales),
            ("codes", "uint8_t", codes),
        ):
            setattr(job, field, ffi.cast(f"{kind} *", array.ctypes.data))
        assert lib.sl_encode(tier, job, position) == lib.SL_OK
        results.append((scales.tobytes(), codes.tobytes()))
    assert np.frombuffer(results[0][0], np.float32).all()
    assert results[1:] == results[:1] * 2
