"""Quantization kernels: every tier against scalar C, scalar against numpy, gguf-py and ggml's compiled reference."""

import functools
import platform

import gguf.quants
import ml_dtypes
import numpy as np
import pytest
from builders import ggml_reference
from builders.inside import available_tiers, dtypes, ffi, lib, tier_name
from builders.kernel_inputs import F32_RANDOM, F32_SPECIALS, Guarded
from builders.random import rng
from builders.thorough import examples, part_of
from gguf import GGMLQuantizationType

from safeload.numpy import load_file

SCALAR = lib.SL_TIER_SCALAR
ALL_TIERS = pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)
TIERS = pytest.mark.parametrize("tier", [tier for tier in available_tiers() if tier != SCALAR], ids=tier_name)

DTYPES = {"q4_0 absmax": lib.SL_Q4_0_ABSMAX, "q4_0": lib.SL_Q4_0, "q8_0": lib.SL_Q8_0}
DTYPES |= {"q4_1": lib.SL_Q4_1, "q5_0": lib.SL_Q5_0, "q5_1": lib.SL_Q5_1}
BLOCK_BYTES = {"q4_0 absmax": 18, "q4_0": 18, "q8_0": 34, "q4_1": 20, "q5_0": 22, "q5_1": 24}
SCHEMES = pytest.mark.parametrize("scheme", ["q4_0 absmax", "q4_0", "q8_0"])
GGML_SCHEMES = pytest.mark.parametrize("scheme", ["q4_0", "q8_0"])
EVERY_SCHEME = pytest.mark.parametrize("scheme", BLOCK_BYTES)
ALL_GGML_SCHEMES = pytest.mark.parametrize("scheme", ["q4_0", "q8_0", "q4_1", "q5_0", "q5_1"])
GGUF_TYPES = {name: GGMLQuantizationType[name.upper()] for name in BLOCK_BYTES if name != "q4_0 absmax"}

# ggml's schemes are defined by what its reference does there where C leaves it open: infinity and NaN to integer.
X86 = platform.machine().lower() in ("x86_64", "amd64")


def address(array, offset=0):
    return ffi.cast("char *", array.ctypes.data) + offset


def blocks_of(scheme, raw):
    return raw.reshape(-1, BLOCK_BYTES[scheme])


def quantize(tier, scheme, x):
    x = np.ascontiguousarray(x, np.float32)
    out = np.full(x.size // 32 * BLOCK_BYTES[scheme], 0xA5, np.uint8)
    assert lib.sl_convert(tier, lib.SL_F32, DTYPES[scheme], address(x), address(out), x.size) == lib.SL_OK
    return blocks_of(scheme, out)


def dequantize(tier, scheme, blocks):
    blocks = np.ascontiguousarray(blocks)
    out = np.empty((len(blocks), 32), np.float32)
    assert lib.sl_convert(tier, DTYPES[scheme], lib.SL_F32, address(blocks), address(out), out.size) == lib.SL_OK
    return out


def scales(blocks):
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").reshape(-1)


def first_not_finite(scheme, blocks):
    return lib.sl_blocks_finite(DTYPES[scheme], address(blocks), len(blocks))


def absmax(tier, x):
    """The bits of the largest |x|."""
    bits = ffi.new("uint32_t *")
    code = {"float32": lib.SL_F32, "bfloat16": lib.SL_BF16, "float16": lib.SL_F16}[x.dtype.name]
    assert lib.sl_absmax(tier, code, address(x), x.size, bits) == lib.SL_OK
    return bits[0]


def to_int8(tier, x, factors):
    x, factors = np.ascontiguousarray(x, np.float32), np.asarray(factors, np.float32)
    out = np.full(x.shape, 0x5A, np.int8)
    pointers = (address(x), ffi.cast("int8_t *", out.ctypes.data))
    each = factors.ndim > 0
    assert lib.sl_to_int8(tier, *pointers, x.size, ffi.cast("float *", factors.ctypes.data), each) == lib.SL_OK
    return out


# ---- what judges scalar: a transcription of the contract, gguf-py ----


def round_half_away(y):
    """Exact: an f32 and one half have their sum in f64."""
    return np.trunc(y.astype(np.float64) + np.copysign(0.5, y))


def f16_bytes(d):
    with np.errstate(over="ignore"):
        return d.astype("<f2").view(np.uint8).reshape(-1, 2)


def numpy_q4_0_absmax(x):
    """d = absmax / 7, q = clamp(round_half_away(x * (1 / d)), -8, 7) + 8; no inverse: scale 0 and every nibble 8."""
    x = x.reshape(-1, 32)
    d = np.abs(x).max(axis=1) / np.float32(7)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    none = ~np.isfinite(inverse) | (inverse == 0)
    d[none] = inverse[none] = 0
    q = (np.clip(round_half_away(x * inverse[:, None]), -8, 7) + 8).astype(np.uint8)
    return np.concatenate([f16_bytes(d), q[:, :16] | q[:, 16:] << 4], axis=1)


def numpy_int8(x, factors):
    return np.clip(round_half_away(x * np.asarray(factors, np.float32)), -128, 127).astype(np.int8)


def gguf_quantize(scheme, x):
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(x.reshape(-1, 32), GGUF_TYPES[scheme])


# ---- inputs ----

COUNT = 32 * examples(39_064)  # of each distribution, whole blocks; ten million in all in tests/long.sh


def of_blocks(values):
    return np.repeat(values, 32)


def spread(low, high):
    return of_blocks(10.0 ** rng.uniform(low, high, COUNT // 32))


def powers(low, high):
    return of_blocks(2.0 ** rng.integers(low, high, COUNT // 32))


def signs():
    return rng.choice([-1.0, 1.0], COUNT)


DISTRIBUTIONS = {
    "normal": lambda: rng.standard_normal(COUNT) * 0.02,
    "heavy-tailed": lambda: rng.standard_cauchy(COUNT),
    "all scales": lambda: rng.standard_normal(COUNT) * spread(-46, 38),
    "constants": lambda: of_blocks(rng.standard_normal(COUNT // 32)) * signs() * spread(-46, 5),
    "sparse": lambda: np.abs(rng.standard_normal(COUNT)) * (rng.random(COUNT) < 0.02) * signs(),
    "ties of q4_0": lambda: rng.integers(-16, 17, COUNT) / 2 * powers(-20, 5),
    "ties of q8_0": lambda: rng.integers(-254, 255, COUNT) / 2 * powers(-20, 5),
    "subnormal": lambda: rng.integers(-40, 41, COUNT) * 2.0**-149 * powers(0, 30),
}
EVERY_DISTRIBUTION = pytest.mark.parametrize("name", DISTRIBUTIONS)


@functools.cache
def distribution(name):
    x = np.clip(DISTRIBUTIONS[name](), -3e38, 3e38).astype(np.float32)
    x.flags.writeable = False
    return x


def odd_blocks():
    """Specials together, specials alone among normal values, random bits, and random bits of one exponent."""
    together = np.resize(rng.permutation(F32_SPECIALS), F32_SPECIALS.size // 32 * 32)
    alone = rng.standard_normal((F32_SPECIALS.size, 32)).astype(np.float32)
    alone[np.arange(len(alone)), rng.integers(0, 32, len(alone))] = F32_SPECIALS
    exponents = np.repeat(np.arange(0, 255, dtype=np.uint32) << 23, 32 * 40)
    similar = exponents | rng.permutation(F32_RANDOM.view(np.uint32))[: exponents.size] & 0x807FFFFF
    return np.concatenate([together, alone.ravel(), F32_RANDOM[: 32 * 10_000], similar.view(np.float32)])


ODD = odd_blocks()


# ---- blocks: every tier against scalar ----


@EVERY_SCHEME
@TIERS
def test_a_tier_quantizes_to_the_bytes_of_scalar(tier, scheme):
    for x in (ODD, *map(distribution, DISTRIBUTIONS)):
        np.testing.assert_array_equal(quantize(tier, scheme, x), quantize(SCALAR, scheme, x))


@TIERS
@pytest.mark.parametrize("scheme", ["q4_1", "q5_0", "q5_1"])
def test_a_tier_gives_zeros_the_sign_of_scalar(tier, scheme):
    """The first of several zeros is the least, or the largest, element of a block."""
    zeros = rng.choice(np.float32([0.0, -0.0]), 32 * 64)
    positive = np.where(rng.random(zeros.size) < 0.2, zeros, np.abs(rng.standard_normal(zeros.size, np.float32)))
    for x in (zeros, positive, -positive):
        np.testing.assert_array_equal(quantize(tier, scheme, x), quantize(SCALAR, scheme, x))


def every_scale(scheme):
    """All 65,536 values of d, before random codes."""
    codes = rng.integers(0, 256, (1 << 16, BLOCK_BYTES[scheme] - 2)).astype(np.uint8)
    return np.concatenate([np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2), codes], axis=1)


@GGML_SCHEMES
@TIERS
def test_a_tier_dequantizes_to_the_bits_of_scalar(tier, scheme):
    blocks = every_scale(scheme)
    got, want = dequantize(tier, scheme, blocks), dequantize(SCALAR, scheme, blocks)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@EVERY_SCHEME
@TIERS
def test_every_number_of_blocks_and_alignment_gives_the_bytes_of_scalar(tier, scheme):
    """Unaligned on both sides, with nothing written outside of the result."""
    raw_in, raw_out = np.zeros(128 * 40 + 64, np.uint8), np.zeros(34 * 40 + 128, np.uint8)
    for x in (distribution("normal"), ODD, distribution("sparse")):
        for shift in range(8):
            for count in (*range(11), 31, 32, 33, 35, 36, 37):
                source = x[: 32 * count].view(np.uint8)
                raw_in[shift : shift + source.size] = source
                raw_out[:] = 0xA5
                pointers = address(raw_in, shift), address(raw_out, shift)
                assert lib.sl_convert(tier, lib.SL_F32, DTYPES[scheme], *pointers, 32 * count) == lib.SL_OK
                want = quantize(SCALAR, scheme, x[: 32 * count])
                assert raw_out[shift : shift + want.size].tobytes() == want.tobytes()
                assert (raw_out[:shift] == 0xA5).all()
                assert (raw_out[shift + want.size :] == 0xA5).all()


@GGML_SCHEMES
@TIERS
def test_every_number_of_blocks_and_alignment_gives_the_values_of_scalar(tier, scheme):
    blocks = quantize(SCALAR, scheme, distribution("normal")[: 32 * 10])
    raw_in, raw_out = np.zeros(34 * 10 + 64, np.uint8), np.zeros(128 * 10 + 128, np.uint8)
    for shift in range(8):
        for count in range(11):
            source = blocks[:count].ravel()
            raw_in[shift : shift + source.size] = source
            raw_out[:] = 0xA5
            pointers = address(raw_in, shift), address(raw_out, shift)
            assert lib.sl_convert(tier, DTYPES[scheme], lib.SL_F32, *pointers, 32 * count) == lib.SL_OK
            want = dequantize(SCALAR, scheme, blocks[:count])
            assert raw_out[shift : shift + want.nbytes].tobytes() == want.tobytes()
            assert (raw_out[:shift] == 0xA5).all()
            assert (raw_out[shift + want.nbytes :] == 0xA5).all()


@pytest.mark.parametrize("at_end", [False, True])
@EVERY_SCHEME
def test_nothing_is_touched_outside_of_values_and_blocks(scheme, at_end):
    for count in (*range(1, 11), 32, 35, 36, 200):
        values, blocks = Guarded(128 * count, at_end), Guarded(BLOCK_BYTES[scheme] * count, at_end)
        values.bytes()[:] = distribution("normal")[: 32 * count].tobytes()
        pointers = [ffi.cast("void *", guarded.address) for guarded in (values, blocks)]
        for tier in available_tiers():
            assert lib.sl_convert(tier, lib.SL_F32, DTYPES[scheme], *pointers, 32 * count) == lib.SL_OK
            assert lib.sl_blocks_finite(DTYPES[scheme], pointers[1], count) == count
            if scheme != "q4_0 absmax":
                assert lib.sl_convert(tier, DTYPES[scheme], lib.SL_F32, *pointers[::-1], 32 * count) == lib.SL_OK


@SCHEMES
@pytest.mark.parametrize("code", ["BF16", "F16", "F64", "I8"])
@ALL_TIERS
def test_other_sources_go_through_f32(tier, code, scheme):
    row = dtypes.BY_CODE[code]
    x = (distribution("normal")[: 32 * 1000] * 1000).astype(dtypes.element_dtype(row.number))
    out = np.zeros(1000 * BLOCK_BYTES[scheme], np.uint8)
    assert lib.sl_convert(tier, row.number, DTYPES[scheme], address(x), address(out), x.size) == lib.SL_OK
    np.testing.assert_array_equal(blocks_of(scheme, out), quantize(SCALAR, scheme, x.astype(np.float32)))


# ---- blocks: scalar against its judges ----


@pytest.fixture(scope="session")
def ggml():
    library = ggml_reference.load()
    if library is None or not X86:
        pytest.skip("needs ggml's reference as compiled for x86, which comes with pywhispercpp's wheel")
    return library


def negative_zeros(x):
    """Blocks of zeros of which the first is -0."""
    x = x.reshape(-1, 32)
    return ~x.any(axis=1) & np.signbit(x[:, 0])


def assert_blocks_of_gguf(scheme, x):
    """Byte for byte, but for zeros: gguf-py takes -0 for the maximum of a block of zeros that starts with it.

    It then writes the scale +0 where ggml, whose maximum starts as +0, writes -0. A minimum of zero has the sign of the
    first zero in ggml, of any in gguf-py. The compiled reference decides.
    """
    x = x.reshape(-1, 32)
    if not X86:  # gguf-py leaves what infinity becomes as an integer to the processor
        codes = {"q4_0": 8, "q8_0": 127, "q4_1": 15, "q5_0": 16, "q5_1": 31}[scheme]
        with np.errstate(over="ignore"):
            d = (x.max(axis=1) - x.min(axis=1) if scheme[-1] == "1" else np.abs(x).max(axis=1)) / np.float32(codes)
        x = x[(d == 0) | (d > 2.0**-128)]
    got, want = quantize(SCALAR, scheme, x), gguf_quantize(scheme, x)
    if scheme in ("q4_0", "q5_0"):
        other = negative_zeros(x)
        assert (want[other, 1] == 0).all()
        want[other, 1] = 0x80
    if scheme in ("q4_1", "q5_1"):
        zero = x.min(axis=1) == 0
        first = x[np.arange(len(x)), (x == 0).argmax(axis=1)]
        np.testing.assert_array_equal(got[zero, 3], np.where(np.signbit(first[zero]), 0x80, 0))
        want[zero, 3] = got[zero, 3]
    np.testing.assert_array_equal(got, want)


@EVERY_DISTRIBUTION
def test_q4_0_absmax_is_that_of_a_numpy_transcription(name):
    x = distribution(name)
    np.testing.assert_array_equal(quantize(SCALAR, "q4_0 absmax", x), numpy_q4_0_absmax(x))


@ALL_GGML_SCHEMES
@EVERY_DISTRIBUTION
def test_blocks_are_those_of_ggml_as_compiled(ggml, name, scheme):
    x = distribution(name)
    np.testing.assert_array_equal(quantize(SCALAR, scheme, x), ggml_reference.quantize(ggml, scheme, x))


@pytest.mark.no_core
@ALL_GGML_SCHEMES
@EVERY_DISTRIBUTION
def test_blocks_are_those_of_gguf_py(name, scheme):
    assert_blocks_of_gguf(scheme, distribution(name))


@ALL_GGML_SCHEMES
def test_finite_odd_blocks_are_those_of_ggml(ggml, scheme):
    x = ODD.reshape(-1, 32)
    x = x[np.isfinite(x).all(axis=1)]
    assert len(x) > 10_000
    np.testing.assert_array_equal(quantize(SCALAR, scheme, x), ggml_reference.quantize(ggml, scheme, x))
    assert_blocks_of_gguf(scheme, x)


@ALL_GGML_SCHEMES
def test_a_real_file_gives_the_blocks_of_ggml_and_gguf_py(data, scheme, request):
    x = [a.ravel() for a in load_file(data / "silero_vad_16k.safetensors").values() if a.dtype == np.float32]
    x = np.concatenate([a[: a.size // 32 * 32] for a in x])
    assert x.size > 100_000
    assert_blocks_of_gguf(scheme, x)
    np.testing.assert_array_equal(quantize(SCALAR, "q4_0 absmax", x), numpy_q4_0_absmax(x))
    ggml = request.getfixturevalue("ggml")
    np.testing.assert_array_equal(quantize(SCALAR, scheme, x), ggml_reference.quantize(ggml, scheme, x))


@GGML_SCHEMES
def test_values_are_those_of_gguf_py(scheme):
    blocks = every_scale(scheme)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(blocks, GGUF_TYPES[scheme])
    got = dequantize(SCALAR, scheme, blocks)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


# ---- blocks: worked examples ----


@ALL_TIERS
def test_the_parts_of_a_q4_0_block(tier):
    """Element j in the low nibble of byte j, element j + 16 in the high one, 8 for 0."""
    x = np.zeros(32, np.float32)
    x[[0, 1, 16, 31]] = [7, -7, 3, -1.5]
    (block,) = quantize(tier, "q4_0 absmax", x)
    assert scales(block[None])[0] == 1
    assert block[2:].tolist() == [0xBF, 0x81, *[0x88] * 13, 0x68]
    np.testing.assert_array_equal(dequantize(tier, "q4_0", block[None])[0][[0, 1, 2, 16, 31]], [7, -7, 0, 3, -2])


@ALL_TIERS
def test_ties_go_away_from_zero_and_in_ggml_up(tier):
    x = np.zeros(32, np.float32)
    x[:7] = [7, 2.5, -2.5, 0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(0)), 6.5]
    codes = quantize(tier, "q4_0 absmax", x)[0, 2:9] & 15
    assert (codes.astype(int) - 8).tolist() == [7, 3, -3, 1, -1, 0, 7]
    x[:7] = [-8, 2.5, -2.5, 0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(0)), 7.5]
    codes = quantize(tier, "q4_0", x)[0, 2:9] & 15
    # The largest f32 below 0.5, plus 8.5, is 9.
    assert (codes.astype(int) - 8).tolist() == [-8, 3, -2, 1, 0, 1, 7]
    x[:7] = [127, 2.5, -2.5, 0.5, -63.5, np.nextafter(np.float32(0.5), np.float32(0)), -126.5]
    assert quantize(tier, "q8_0", x)[0, 2:9].view(np.int8).tolist() == [127, 3, -3, 1, -64, 0, -127]


@ALL_TIERS
def test_blocks_of_zeros(tier):
    plus, minus = np.zeros((1, 32), np.float32), np.full((1, 32), -0.0, np.float32)
    for zeros in (plus, minus):
        assert quantize(tier, "q4_0 absmax", zeros).tobytes() == b"\0\0" + b"\x88" * 16
        assert quantize(tier, "q4_0", zeros).tobytes() == b"\0\x80" + b"\x88" * 16
        assert quantize(tier, "q8_0", zeros).tobytes() == bytes(34)


def test_only_for_blocks_that_start_with_minus_zero_gguf_py_is_not_ggml(ggml):
    minus = np.full((1, 32), -0.0, np.float32)
    assert ggml_reference.quantize(ggml, "q4_0", minus).tobytes() == b"\0\x80" + b"\x88" * 16
    assert gguf_quantize("q4_0", minus).tobytes() == b"\0\0" + b"\x88" * 16
    plus = np.zeros((1, 32), np.float32)
    assert ggml_reference.quantize(ggml, "q4_0", plus).tobytes() == gguf_quantize("q4_0", plus).tobytes()


@ALL_TIERS
def test_one_huge_value_leaves_the_others_at_zero(tier):
    x = np.full((1, 32), 0.01, np.float32)
    x[0, 5] = -30000
    for scheme, error in (("q4_0 absmax", 14), ("q4_0", 8), ("q8_0", 8)):
        # Half a step of f16, times the largest code.
        values = dequantize(tier, scheme.split()[0], quantize(tier, scheme, x))[0]
        assert abs(values[5] + 30000) <= error
        assert (np.delete(values, 5) == 0).all()


@SCHEMES
@ALL_TIERS
def test_scales_without_an_inverse(tier, scheme):
    """Down to 2^-128 the inverse is infinite. A scale that f16 rounds to 0 may have one: its codes are as they are."""
    x = np.zeros((4, 32), np.float32)
    x[:, 0] = [2.0**-149, -(2.0**-127), 2.0**-100, 2.0**-130]
    blocks = quantize(tier, scheme, x)
    assert (scales(blocks) == 0).all()
    codes = blocks[:, 2:] & 15 if scheme != "q8_0" else blocks[:, 2:].view(np.int8)
    assert codes[:, 0].tolist() == {"q4_0 absmax": [8, 8, 15, 8], "q4_0": [8, 0, 0, 0], "q8_0": [0, 0, 127, 0]}[scheme]
    assert (dequantize(tier, scheme.split()[0], blocks) == 0).all()


@SCHEMES
@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf])
@ALL_TIERS
def test_the_scale_of_a_block_is_finite_unless_an_element_is_not(tier, odd, scheme):
    for count in (1, 4, 7, 40):
        x = rng.standard_normal((count, 32)).astype(np.float32)
        assert first_not_finite(scheme, quantize(tier, scheme, x)) == count
        for block in {0, count // 2, count - 1}:
            for element in (0, 7, 31):
                wrong = x.copy()
                wrong[block, element] = odd
                blocks = quantize(tier, scheme, wrong)
                assert first_not_finite(scheme, blocks) == block
                assert np.isfinite(scales(blocks)).sum() == count - 1
                np.testing.assert_array_equal(
                    np.delete(blocks, block, 0), quantize(tier, scheme, np.delete(x, block, 0))
                )


@SCHEMES
@ALL_TIERS
def test_the_scale_of_a_block_is_finite_unless_f16_cannot_hold_it(tier, scheme):
    """65520 lies halfway between the largest f16 and the next power of two, and rounds to infinity."""
    steps = {"q4_0 absmax": 7, "q4_0": -8, "q8_0": 127}[scheme]
    x = np.zeros((3, 32), np.float32)
    x[:, 9] = np.array([65519, 65520, 3e38 / abs(steps)]) * steps
    blocks = quantize(tier, scheme, x)
    assert scales(blocks).tolist() == [65504, np.inf, np.inf]
    assert first_not_finite(scheme, blocks) == 1
    odd = ODD.reshape(-1, 32)
    with np.errstate(invalid="ignore"):
        held = np.isfinite(odd).all(1) & (np.abs(odd).max(1) / np.float32(abs(steps)) < 65520)
    np.testing.assert_array_equal(np.isfinite(scales(quantize(tier, scheme, ODD))), held)


@SCHEMES
def test_no_blocks_are_finite(scheme):
    assert lib.sl_blocks_finite(DTYPES[scheme], ffi.NULL, 0) == 0


# ---- int8 ----


@ALL_TIERS
def test_absmax_of_f32_is_the_integer_maximum(tier):
    for x in (ODD, *map(distribution, DISTRIBUTIONS)):
        assert absmax(tier, x) == (x.view(np.uint32) & 0x7FFFFFFF).max()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@ALL_TIERS
def test_absmax_of_every_length_and_alignment(tier, dtype):
    dtype = np.dtype(dtype)
    values = np.abs(rng.standard_normal(300)).astype(dtype)
    raw = np.zeros(values.nbytes + 64, np.uint8)
    bits = ffi.new("uint32_t *")
    code = {"float32": lib.SL_F32, "bfloat16": lib.SL_BF16, "float16": lib.SL_F16}[dtype.name]
    for shift in range(4):
        raw[shift : shift + values.nbytes] = values.view(np.uint8)
        for count in range(300):
            assert lib.sl_absmax(tier, code, address(raw, shift), count, bits) == lib.SL_OK
            assert bits[0] == values[:count].astype(np.float32).max(initial=0).view(np.uint32)
    for place in range(300):
        signed = np.zeros(300, dtype)
        signed[place] = -3
        assert absmax(tier, signed) == np.float32(3).view(np.uint32)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@ALL_TIERS
def test_absmax_of_every_16_bit_value_is_exact(tier, dtype):
    every = np.arange(1 << 16, dtype=np.uint16)
    for value in (*every[::37], 0x7C00, 0x7C01, 0x7F80, 0x7F81, 0x7FFF, 0x8001, 0xFC00, 0xFFFF):
        x = np.full(200, value, np.uint16).view(dtype)
        with np.errstate(invalid="ignore"):
            want = np.abs(x[:1].astype(np.float32))[0]
        got = np.uint32(absmax(tier, x)).view(np.float32)
        assert got == want or (np.isnan(got) and np.isnan(want))


@ALL_TIERS
def test_absmax_of_f16_has_one_nan_wherever_and_whichever_they_are(tier):
    """Quieted, a signalling NaN can be larger than one whose code is larger."""
    for quiet, signalling in ((3, 64), (64, 3)):
        x = np.zeros(65, np.uint16)
        x[quiet], x[signalling] = 0x7E00, 0x7C01
        assert absmax(tier, x.view(np.float16)) == 0x7FC00000


@ALL_TIERS
def test_absmax_of_each_is_raised_and_never_lowered(tier):
    shuffled = rng.permutation(ODD.view(np.uint32)) & 0x7FFFFFFF
    for count in (*range(70), 1000, ODD.size):
        first = rng.integers(ODD.size - count + 1)
        x, held = ODD[ODD.size - count :], shuffled[first : first + count].copy()
        want = np.maximum(held, x.view(np.uint32) & 0x7FFFFFFF)
        assert lib.sl_absmax_each(tier, address(x), ffi.cast("uint32_t *", held.ctypes.data), count) == lib.SL_OK
        np.testing.assert_array_equal(held, want)


@TIERS
def test_a_tier_gives_the_int8_of_scalar(tier):
    for k, x in enumerate((ODD, *map(distribution, DISTRIBUTIONS))):
        for factor in part_of([1, 127 / 0.05, 1e-30, 1e38, np.inf, np.nan, 0, -3], k, 2):
            np.testing.assert_array_equal(to_int8(tier, x, factor), to_int8(SCALAR, x, factor))
        factors = rng.permutation(ODD)[: min(x.size, ODD.size)]
        x = x[: factors.size]
        np.testing.assert_array_equal(to_int8(tier, x, factors), to_int8(SCALAR, x, factors))


@pytest.mark.parametrize("name", ["normal", "heavy-tailed", "sparse", "ties of q8_0", "subnormal"])
def test_int8_is_that_of_numpy(name):
    x = distribution(name)
    inverse = np.float32(127) / np.abs(x).max()
    if np.isfinite(inverse):
        np.testing.assert_array_equal(to_int8(SCALAR, x, inverse), numpy_int8(x, inverse))
    np.testing.assert_array_equal(to_int8(SCALAR, x, 2.0**20), numpy_int8(x, 2.0**20))
    factors = np.resize(127 / np.abs(distribution("heavy-tailed")[:4096]), x.size).astype(np.float32)
    np.testing.assert_array_equal(to_int8(SCALAR, x, factors), numpy_int8(x, factors))


@ALL_TIERS
def test_int8_of_every_code_and_back(tier):
    codes = np.arange(-128, 128).astype(np.int8)
    scales_of = rng.standard_normal(256).astype(np.float32)
    values = codes.astype(np.float32) * scales_of
    np.testing.assert_array_equal(to_int8(tier, values, 1 / scales_of), codes)


@ALL_TIERS
def test_the_worked_example_of_int8(tier):
    x = np.array([-0.5, -0.25, 0.1, 0.5], np.float32)
    largest = np.uint32(absmax(tier, x)).view(np.float32)
    assert largest == 0.5
    assert to_int8(tier, x, np.float32(127) / largest).tolist() == [-127, -64, 25, 127]


@ALL_TIERS
def test_int8_rounds_half_away_from_zero_and_saturates(tier):
    below = np.nextafter(np.float32(0.5), np.float32(0))
    x = [
        -63.5,
        63.5,
        0.5,
        -0.5,
        below,
        -below,
        126.5,
        -127.5,
        127.49,
        127.5,
        -128.5,
        1e30,
        -1e30,
        np.inf,
        -np.inf,
        -0.0,
    ]
    want = [-64, 64, 1, -1, 0, 0, 127, -128, 127, 127, -128, 127, -128, 127, -128, 0]
    assert to_int8(tier, np.resize(np.float32(x), 16 * 7), 1).tolist() == want * 7
    assert to_int8(tier, np.full(40, np.nan), 1).tolist() == [127] * 40
    assert to_int8(tier, np.full(40, -np.nan), 1).tolist() == [127] * 40


@pytest.mark.parametrize("at_end", [False, True])
def test_int8_kernels_touch_nothing_else(at_end):
    factor = ffi.new("float *", 2.0)
    for count in (*range(1, 70), 1000):
        sizes = (4 * count, count, 4 * count, 4 * count)
        values, codes, factors, bits = (Guarded(size, at_end) for size in sizes)
        pointers = [ffi.cast("char *", guarded.address) for guarded in (values, codes, factors, bits)]
        x, q = pointers[0], ffi.cast("int8_t *", pointers[1])
        each = ffi.cast("float *", pointers[2])
        for tier in available_tiers():
            for code in (lib.SL_F32, lib.SL_F16, lib.SL_BF16):
                place = x if code == lib.SL_F32 else x + 2 * count if at_end else x
                assert lib.sl_absmax(tier, code, place, count, ffi.cast("uint32_t *", pointers[3])) == lib.SL_OK
            assert lib.sl_absmax_each(tier, x, ffi.cast("uint32_t *", pointers[3]), count) == lib.SL_OK
            for scale, of_each in ((factor, 0), (each, 1)):
                assert lib.sl_to_int8(tier, x, q, count, scale, of_each) == lib.SL_OK


def test_every_length_and_alignment_of_int8_gives_that_of_scalar():
    x, factors = distribution("heavy-tailed")[:200], distribution("normal")[:200].copy()
    raw, out = np.zeros(4 * 200 + 64, np.uint8), np.zeros(200 + 64, np.int8)
    pointer = ffi.cast("float *", factors.ctypes.data)
    want = to_int8(SCALAR, x, factors), to_int8(SCALAR, x, factors[0])
    for tier in available_tiers():
        for shift in range(8):
            raw[shift : shift + x.nbytes] = x.view(np.uint8)
            for count in range(131):
                for each in (0, 1):
                    out[:] = 0x55
                    target = ffi.cast("int8_t *", out.ctypes.data) + shift
                    assert lib.sl_to_int8(tier, address(raw, shift), target, count, pointer, each) == lib.SL_OK
                    assert (out[shift : shift + count] == want[1 - each][:count]).all()
                    assert (out[:shift] == 0x55).all()
                    assert (out[shift + count :] == 0x55).all()


def test_what_there_is_not_is_refused():
    bits, byte, one = ffi.new("uint32_t *"), ffi.new("int8_t *"), ffi.new("float *", 1)
    assert lib.sl_absmax(SCALAR, lib.SL_I8, ffi.NULL, 0, bits) == lib.SL_E_ARGUMENT
    assert lib.sl_absmax(99, lib.SL_F32, ffi.NULL, 0, bits) == lib.SL_E_ARGUMENT
    assert lib.sl_absmax_each(99, ffi.NULL, bits, 0) == lib.SL_E_ARGUMENT
    assert lib.sl_to_int8(99, ffi.NULL, byte, 0, one, 0) == lib.SL_E_ARGUMENT
    assert not lib.sl_convertible(lib.SL_Q4_0_ABSMAX, lib.SL_F32)
    assert lib.sl_convertible(lib.SL_BF16, lib.SL_Q4_0_ABSMAX)
    assert lib.sl_convertible(lib.SL_Q8_0, lib.SL_BF16)
