"""Blocks of ggml restored to f32: gguf-py and ggml's compiled reference decide, bit for bit."""

import ctypes
import runpy

import gguf
import numpy as np
import pytest
from builders import ggml_reference
from builders.inside import available_tiers, dtypes, ffi, lib, tier_name
from builders.kernel_inputs import Guarded
from builders.paths import ROOT
from builders.random import rng
from builders.thorough import part_of

import safeload
from safeload import QuantizedTensor

SCHEMES = [
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4", "iq4_nl"),
    *("iq4_xs", "tq1_0", "tq2_0", "nvfp4", "q1_0", "q2_0"),
]
GRIDS = ["iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m"]
SCHEMES += GRIDS
# Grids take every scale alike; d of IQ1_M lies in another place.
NOT_EVERY_SCALE = ("iq2_xxs", "iq2_xs", "iq3_xxs", "iq1_s")
# Offsets of the f16 scales in a block; None: in the top nibbles of its last four words.
HALVES = {
    **dict.fromkeys(GRIDS, (0,)),
    "iq1_m": (None,),
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs", "q1_0", "q2_0"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "mxfp4": (),
    "nvfp4": (),
}


def bits(array):
    return np.ascontiguousarray(array).view(np.uint32)


def put_halves(blocks, at, scales):
    """Gives each block its f16 scale."""
    if at is None:
        words = np.ascontiguousarray(blocks[:, -8:]).view("<u2") & 0x0FFF
        words |= scales.view(np.uint16).reshape(-1, 1) >> np.array([0, 4, 8, 12], np.uint16) << 12
        blocks[:, -8:] = words.view(np.uint8)
    else:
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)


def random_blocks(scheme, count):
    """Every bit random, but that the scales are finite."""
    row = dtypes.BLOCK_TYPES[scheme]
    blocks = rng.integers(0, 256, (count, row.block_bytes), np.uint8)
    for at in HALVES[scheme]:
        scales = (rng.standard_normal(count) * 10.0 ** rng.integers(-7, 4, count)).astype(np.float16)
        put_halves(blocks, at, scales)
    return blocks


def by_gguf(scheme, blocks):
    if scheme in ("q1_0", "q2_0"):
        with np.errstate(all="ignore"):
            return ggml_reference.by_definition(int(scheme[1]), blocks)
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType[scheme.upper()]).ravel()


def restore(scheme, blocks, **options):
    row = dtypes.BLOCK_TYPES[scheme]
    q = QuantizedTensor(scheme, (len(blocks) * row.block,), blocks.ravel())
    return q.dequantize(**options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_blocks_as_gguf_py_restores_them(scheme):
    blocks = random_blocks(scheme, 4000)
    np.testing.assert_array_equal(bits(restore(scheme, blocks)), bits(by_gguf(scheme, blocks)))


@pytest.mark.no_core
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s not in NOT_EVERY_SCALE])
def test_every_scale(scheme):
    """All 65,536 f16 (or 256 of 8 bits) scales, CI every tenth; NaN is compared as such."""
    row = dtypes.BLOCK_TYPES[scheme]
    if not HALVES[scheme]:
        blocks = rng.integers(0, 256, (256, row.block_bytes), np.uint8)
        blocks[:, :4] = np.arange(256)[:, None] if scheme == "nvfp4" else blocks[:, :4]
        blocks[:, 0] = np.arange(256)
    else:
        scales = np.array(part_of(list(range(65536)), SCHEMES.index(scheme), 10), np.uint16)
        blocks = random_blocks(scheme, len(scales))
        put_halves(blocks, HALVES[scheme][-1], scales)
    got = restore(scheme, blocks)
    want = by_gguf(scheme, blocks)
    np.testing.assert_array_equal(got, want)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(bits(got)[finite], bits(want)[finite])


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s not in ("q4_0", "q8_0", "q1_0", "q2_0")])
def test_what_ggml_makes_and_restores(scheme):
    library = ggml_reference.load()
    if library is None:
        pytest.skip("pywhispercpp, whose wheel holds ggml, is not installed")
    row = dtypes.BLOCK_TYPES[scheme]
    given = [random_blocks(scheme, 2000)]
    if scheme not in GRIDS:  # for these it makes tables for seconds: tests/data/iq.gguf has some
        x = rng.standard_normal(row.block * 400) * 0.05
        given.append(ggml_reference.make_blocks(library, scheme, x, row.block_bytes))
    for blocks in given:
        want = ggml_reference.dequantize(library, scheme, blocks, len(blocks) * row.block)
        np.testing.assert_array_equal(bits(restore(scheme, blocks)), bits(want))
        np.testing.assert_array_equal(bits(by_gguf(scheme, blocks)), bits(want))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)
def test_every_tier_at_any_alignment(scheme, tier):
    row = dtypes.BLOCK_TYPES[scheme]
    f32 = dtypes.BY_CODE["F32"].number
    blocks = random_blocks(scheme, 3)
    want = bits(by_gguf(scheme, blocks))
    for count in (0, 1, 2, 3):
        for offset in range(4):
            source = np.zeros(blocks.size + 4, np.uint8)
            source[offset : offset + blocks.size] = blocks.ravel()
            out = np.full(3 * row.block + 1, 7, np.float32)
            elements = count * row.block
            pointer = ffi.from_buffer(source[offset:])
            assert lib.sl_convert(tier, row.number, f32, pointer, ffi.from_buffer(out), elements) == lib.SL_OK
            np.testing.assert_array_equal(bits(out[:elements]), want[:elements])
            assert (out[elements:] == 7).all()


def convert(tier, scheme, blocks, dtype):
    """The bits that a tier makes of blocks."""
    row, target = dtypes.BLOCK_TYPES[scheme], dtypes.BY_CODE[dtype]
    out = np.zeros(len(blocks) * row.block * target.bits // 8, np.uint8)
    places = (ffi.from_buffer(np.ascontiguousarray(blocks).ravel()), ffi.from_buffer(out))
    assert lib.sl_convert(tier, row.number, target.number, *places, len(blocks) * row.block) == lib.SL_OK
    return out.view(f"u{target.bits // 8}")


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if HALVES[scheme]])
@pytest.mark.parametrize("tier", [t for t in available_tiers() if t != lib.SL_TIER_SCALAR], ids=tier_name)
def test_a_tier_gives_the_bits_of_scalar_with_scales_that_are_not_finite(scheme, tier):
    """NaNs of both signs and several payloads, infinities, zeros of both signs and subnormals, each with each."""
    odd = np.array(
        [
            0x7C01,
            0x7E00,
            0x7FFF,
            0xFC01,
            0xFE55,
            0xFFFF,
            0x7C00,
            0xFC00,
            0x0000,
            0x8000,
            0x0001,
            0x83FF,
            0x7BFF,
            0x3C00,
        ],
        np.uint16,
    )
    each = np.array(np.meshgrid(odd, odd)).reshape(2, -1)
    blocks = random_blocks(scheme, 4 * each.shape[1])
    for at, scales in zip(HALVES[scheme], each, strict=False):
        put_halves(blocks, at, np.tile(scales, 4))
    for dtype in ("F32", "F16", "BF16"):
        want = convert(lib.SL_TIER_SCALAR, scheme, blocks, dtype)
        np.testing.assert_array_equal(convert(tier, scheme, blocks, dtype), want)
    values, by_gguf_py = convert(tier, scheme, blocks, "F32"), by_gguf(scheme, blocks)
    known = ~np.isnan(by_gguf_py)
    np.testing.assert_array_equal(values[known], bits(by_gguf_py)[known])
    assert np.isnan(values.view(np.float32)[~known]).all()


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)
def test_nothing_beyond_the_ends_is_touched(scheme, tier, at_end):
    row = dtypes.BLOCK_TYPES[scheme]
    for count in range(4):
        blocks = random_blocks(scheme, count)
        source, target = Guarded(blocks.nbytes, at_end), Guarded(4 * count * row.block, at_end)
        ctypes.memmove(source.address, blocks.ctypes.data, blocks.nbytes)
        places = (ffi.cast("void *", place.address) for place in (source, target))
        f32 = dtypes.BY_CODE["F32"].number
        assert lib.sl_convert(tier, row.number, f32, *places, count * row.block) == lib.SL_OK
        np.testing.assert_array_equal(np.frombuffer(target.bytes(), np.uint32), bits(restore(scheme, blocks)))


@pytest.mark.no_core
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_byte_of_a_block_takes_every_value(scheme):
    """CI tries every fifth value of each byte."""
    size = dtypes.BLOCK_TYPES[scheme].block_bytes
    cases = np.array(part_of(list(range(256 * size)), SCHEMES.index(scheme), 10))
    blocks = random_blocks(scheme, len(cases))
    blocks[np.arange(len(cases)), cases // 256] = cases % 256
    got, want = restore(scheme, blocks), by_gguf(scheme, blocks)
    known = ~np.isnan(want)  # the sign and payload of NaN are the processor's
    np.testing.assert_array_equal(bits(got)[known], bits(want)[known])
    assert np.isnan(got[~known]).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_dtypes_and_threads(scheme):
    blocks = random_blocks(scheme, 32_000 if scheme == "q6_k" else 50)
    want = by_gguf(scheme, blocks)
    for threads in (1, 3):
        np.testing.assert_array_equal(bits(restore(scheme, blocks, threads=threads)), bits(want))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(restore(scheme, blocks, dtype="float16"), want.astype(np.float16))


def test_the_grids_are_those_of_gguf_py():
    """And every entry of each is used: indices are all that random blocks have, 32 or 64 a block."""
    maker = runpy.run_path(str(ROOT / "csrc" / "kernels" / "make_iq_grids.py"))
    assert maker["source"]() == maker["PATH"].read_text("utf-8")


@pytest.mark.parametrize("scheme", sorted(dtypes.BLOCK_TYPES.keys() - set(SCHEMES)))
def test_types_without_a_kernel_are_named(scheme):
    row = dtypes.BLOCK_TYPES[scheme]
    q = QuantizedTensor(scheme, (row.block,), np.zeros(row.block_bytes, np.uint8))
    with pytest.raises(safeload.UnsupportedError, match=f"cannot dequantize {scheme} to float32"):
        q.dequantize()
