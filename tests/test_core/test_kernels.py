"""Each tier against scalar C bit for bit, and scalar against ml_dtypes and numpy."""

import os
import platform
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from builders.inside import available_tiers, dtypes, ffi, lib, tier_name
from builders.kernel_inputs import F32_RANDOM, F32_SPECIALS, Guarded, unsigned
from builders.random import rng
from builders.thorough import part_of

SCALAR = lib.SL_TIER_SCALAR
TIERS = [pytest.param(tier, id=tier_name(tier)) for tier in available_tiers() if tier != SCALAR]

TO_F32 = (
    *("BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"),
    *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F64"),
)
FROM_F32 = ("BF16", "F16", "F8_E4M3", "F8_E5M2", "F64")
PAIRS = [
    *((code, "F32") for code in TO_F32),
    *(("F32", code) for code in FROM_F32),
    *(("BF16", "F64"), ("F16", "F64"), ("F64", "F16"), ("F64", "BF16"), ("F64", "F8_E4M3")),
    *((code, "BF16") for code in ("I32", "U32", "I64", "U64")),
    *((code, to) for code in ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ") for to in ("F16", "BF16")),
]


def numpy_type(code):
    name = dtypes.BY_CODE[code].name
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def nbytes(code, count):
    return count * dtypes.BY_CODE[code].bits // 8


def convert(tier, source_code, target_code, source, count=None):
    source = np.ascontiguousarray(source)
    count = source.size if count is None else count
    out = np.zeros(nbytes(target_code, count), np.uint8)
    status = lib.sl_convert(
        tier,
        dtypes.BY_CODE[source_code].number,
        dtypes.BY_CODE[target_code].number,
        ffi.from_buffer(source) if source.size else ffi.NULL,
        ffi.from_buffer(out) if out.size else ffi.NULL,
        count,
    )
    assert status == lib.SL_OK
    return out.view(numpy_type(target_code)) if dtypes.BY_CODE[target_code].bits >= 8 else out


with np.errstate(all="ignore"):
    F64_SAMPLES = np.concatenate(
        [
            rng.integers(0, 2**64, 500_000, dtype=np.uint64).view(np.float64),
            rng.standard_normal(500_000) * 10.0 ** rng.integers(-9, 6, 500_000),
            F32_SPECIALS.astype(np.float64),
            np.nextafter(F32_SPECIALS.astype(np.float64), np.inf),
        ]
    )


def samples(code):
    """Inputs of one dtype: all of them up to 16 bits."""
    row = dtypes.BY_CODE[code]
    if code == "BOOL":
        return np.array([False, True])
    if row.bits <= 16:
        return np.arange(1 << row.bits, dtype=f"u{row.bits // 8}").view(numpy_type(code))
    if code == "F32":
        return np.concatenate([F32_SPECIALS, F32_RANDOM])
    if code == "F64":
        return F64_SAMPLES
    edges = np.array(
        [0, 1, 2**24 - 1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1], np.uint64
    )
    return np.concatenate([edges, rng.integers(0, 2**64, 100_000, dtype=np.uint64)]).astype(numpy_type(code))


@pytest.mark.parametrize("pair", PAIRS, ids="{0[0]} to {0[1]}".format)
@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_gives_the_bits_of_scalar(tier, pair):
    source = samples(pair[0])
    np.testing.assert_array_equal(unsigned(convert(tier, *pair, source)), unsigned(convert(SCALAR, *pair, source)))


@pytest.mark.parametrize("pair", PAIRS, ids="{0[0]} to {0[1]}".format)
@pytest.mark.parametrize("tier", TIERS)
def test_every_length_and_alignment_gives_the_bits_of_scalar(tier, pair):
    """Unaligned on both sides, with nothing written outside of the result."""
    source_size, target_size = nbytes(pair[0], 1), nbytes(pair[1], 1)
    numbers = [dtypes.BY_CODE[code].number for code in pair]
    source = np.resize(unsigned(rng.permutation(samples(pair[0])))[:400], 400).view(np.uint8)
    raw_in, raw_out = np.zeros(source.nbytes + 64, np.uint8), np.zeros(201 * target_size + 128, np.uint8)
    for shift in range(8):
        raw_in[shift : shift + source.nbytes] = source
        for count in part_of(range(201), shift, 4):
            raw_out[:] = 0xA5
            address = ffi.cast("char *", ffi.from_buffer(raw_out)) + shift
            assert (
                lib.sl_convert(tier, *numbers, ffi.cast("char *", ffi.from_buffer(raw_in)) + shift, address, count) == 0
            )
            want = convert(SCALAR, *pair, source[: count * source_size].view(numpy_type(pair[0])))
            got = raw_out[shift : shift + count * target_size]
            assert bytes(got) == want.tobytes()
            assert (raw_out[:shift] == 0xA5).all()
            assert (raw_out[shift + count * target_size :] == 0xA5).all()


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("pair", [*PAIRS, ("F4", "F32"), ("F6_E2M3", "F32"), ("BF16", "F16"), ("F4", "BF16")],
                         ids="{0[0]} to {0[1]}".format)  # fmt: skip
def test_nothing_is_touched_outside_of_source_and_destination(pair, at_end):
    step = 4 if dtypes.BY_CODE[pair[0]].bits < 8 else 1
    for count in [*part_of(range(0, 131, step), at_end, 2), 130 // step * step, 2048, 5000]:
        source = Guarded(nbytes(pair[0], count), at_end)
        target = Guarded(nbytes(pair[1], count), at_end)
        for tier in available_tiers():
            status = lib.sl_convert(
                tier,
                *(dtypes.BY_CODE[code].number for code in pair),
                ffi.cast("void *", source.address),
                ffi.cast("void *", target.address),
                count,
            )
            assert status == lib.SL_OK


def quieted(bits, exponent_mask, quiet_bit):
    """NaNs of a reference with the quiet bit set, as IEEE 754 conversions have it; the rest as it is."""
    nan = (bits & (exponent_mask | (quiet_bit - 1) | quiet_bit)) > exponent_mask
    return np.where(nan, bits | quiet_bit, bits)


@pytest.mark.parametrize("code", TO_F32)
def test_to_f32_is_that_of_ml_dtypes(code):
    source = samples(code)
    with np.errstate(all="ignore"):
        want = source.astype(np.float32).view(np.uint32)
    got = convert(SCALAR, code, "F32", source).view(np.uint32)
    np.testing.assert_array_equal(got, quieted(want, np.uint32(0x7F800000), np.uint32(0x00400000)))


@pytest.mark.parametrize(("code", "count"), [("BF16", 126), ("F16", 1022)])
def test_only_signalling_nans_differ_and_they_are_quieted(code, count):
    """ml_dtypes and numpy pass a signalling NaN on; hardware conversions (and IEEE 754, 6.2) quiet it.

    So does numpy where it converts F16 by hardware, as on AArch64.
    """
    source = samples(code)
    with np.errstate(all="ignore"):
        want = source.astype(np.float32).view(np.uint32)
    got = convert(SCALAR, code, "F32", source).view(np.uint32)
    different = got != want
    by_hardware = code == "F16" and platform.machine().lower() in ("aarch64", "arm64")
    assert different.sum() == count or (by_hardware and not different.any())
    assert np.isnan(source[different].astype(np.float32)).all()
    assert (got[different] == want[different] | 0x00400000).all()


@pytest.mark.parametrize("code", FROM_F32)
def test_from_f32_is_that_of_ml_dtypes(code):
    source = samples("F32")
    with np.errstate(all="ignore"):
        want = unsigned(source.astype(numpy_type(code)))
    got = unsigned(convert(SCALAR, "F32", code, source))
    if code == "F16":
        # numpy passes signalling NaNs on, with a bit set where the payload would vanish; F16C and IEEE 754 quiet them.
        raw = source.view(np.uint32)
        signalling = np.isnan(source) & (raw & 0x00400000 == 0)
        want = np.where(signalling, raw >> 16 & 0x8000 | 0x7E00 | raw >> 13 & 0x1FF, want)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("code", FROM_F32)
@pytest.mark.parametrize("source", ["F32", "F64"])
def test_nan_never_becomes_infinity_or_zero(source, code):
    if source == code:
        return
    nans = samples(source)[np.isnan(samples(source))]
    assert nans.size > 100
    with np.errstate(all="ignore"):
        assert np.isnan(convert(SCALAR, source, code, nans).astype(np.float32)).all()


def test_f64_to_f32_and_f16_round_once():
    finite = F64_SAMPLES[~np.isnan(F64_SAMPLES)]
    with np.errstate(all="ignore"):
        for code in ("F32", "F16"):
            np.testing.assert_array_equal(
                unsigned(convert(SCALAR, "F64", code, finite)), unsigned(finite.astype(numpy_type(code)))
            )


def test_f64_to_bf16_rounds_once_where_ml_dtypes_rounds_twice():
    """Just above the tie between two bf16: through f32 it lands on the tie and goes to even, the wrong way."""
    value = np.array([8.03125 + 2.0**-30])
    assert float(convert(SCALAR, "F64", "BF16", value)[0]) == 8.0625
    assert float(value.astype(np.float32).astype(ml_dtypes.bfloat16)[0]) == 8.0
    finite = F64_SAMPLES[np.isfinite(F64_SAMPLES) & (np.abs(F64_SAMPLES) < 3e38) & (np.abs(F64_SAMPLES) > 1e-30)]
    got = convert(SCALAR, "F64", "BF16", finite).astype(np.float64)
    spacing = 2.0 ** (np.floor(np.log2(np.abs(finite))) - 7)
    assert (np.abs(got - finite) <= spacing / 2).all()


def test_64_bit_integers_keep_what_f32_can_hold():
    values = np.array([2**24, 2**24 + 1, 2**24 + 2, 2**24 + 3, 2**63 - 1], np.int64)
    np.testing.assert_array_equal(convert(SCALAR, "I64", "F32", values), values.astype(np.float32))


@pytest.mark.parametrize(("code", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)])
@pytest.mark.parametrize("to", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)
def test_packed_floats_are_decoded_from_the_low_bits_up(tier, to, code, bits):
    codes = rng.integers(0, 1 << bits, 4 * 1000)
    codes[: 1 << bits] = np.arange(1 << bits)
    packed = np.packbits(((codes[:, None] >> np.arange(bits)) & 1).astype(np.uint8).ravel(), bitorder="little")
    want = codes.astype(np.uint8).view(getattr(ml_dtypes, dtypes.BY_CODE[code].name)).astype(numpy_type(to))
    np.testing.assert_array_equal(unsigned(convert(tier, code, to, packed, codes.size)), unsigned(want))


@pytest.mark.parametrize("pair", [("BF16", "F16"), ("F16", "BF16"), ("F8_E4M3", "F16"), ("F8_E5M2", "BF16"),
                                  ("F16", "F8_E4M3"), ("BF16", "F8_E5M2"), ("F8_E8M0", "F64")],
                         ids="{0[0]} to {0[1]}".format)  # fmt: skip
@pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)
def test_other_pairs_go_through_f32(tier, pair):
    source = samples(pair[0])
    through = convert(SCALAR, "F32", pair[1], convert(SCALAR, pair[0], "F32", source))
    np.testing.assert_array_equal(unsigned(convert(tier, *pair, source)), unsigned(through))


def test_what_cannot_be_converted_is_refused():
    numbers = {code: row.number for code, row in dtypes.BY_CODE.items()}
    assert not lib.sl_convertible(numbers["F32"], numbers["I8"])
    assert not lib.sl_convertible(numbers["C64"], numbers["F32"])
    assert not lib.sl_convertible(numbers["F32"], lib.SL_Q8_K)
    assert not lib.sl_convertible(-1, numbers["F32"])
    assert lib.sl_convert(99, numbers["BF16"], numbers["F32"], ffi.NULL, ffi.NULL, 0) == lib.SL_E_ARGUMENT


def run_with_isa(value):
    code = "import safeload; safeload.show_config()"
    environment = {**os.environ, "SAFELOAD_ISA": value}
    return subprocess.run([sys.executable, "-I", "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)
def test_the_environment_chooses_the_instruction_set(tier):
    done = run_with_isa(tier_name(tier))
    assert done.returncode == 0, done.stderr
    assert any(line.split()[:3] == ["instruction", "set", tier_name(tier)] for line in done.stdout.splitlines())


def test_an_unknown_instruction_set_is_an_import_error_that_lists_the_available():
    unavailable = [tier_name(t) for t in range(lib.SL_TIER_COUNT) if not lib.sl_tier_available(t)]
    for value in ("mmx", *unavailable):
        done = run_with_isa(value)
        assert done.returncode != 0
        assert f"ImportError: SAFELOAD_ISA is {value!r}, but only " in done.stderr
        assert "scalar" in done.stderr
