"""Quantizing with and without importance: ggml's bytes, in every tier (tests/data/llama_quantize/blocks.json)."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from builders import ggml_inputs
from builders.ggml_inputs import IMPORTANCE, KINDS, TYPES
from builders.inside import SCHEMES, available_tiers, ffi, lib, tier_name
from builders.llama_quantize import digest
from builders.paths import DATA
from builders.random import rng

import safeload
from safeload import RangeError

BLOCKS = json.loads((DATA / "llama_quantize" / "blocks.json").read_text("utf-8"))
WEIGHTED = [name for name in TYPES if SCHEMES[name].weighted]


def pointer(array, kind="void *"):
    return ffi.cast(kind, array.ctypes.data)


def quantize(tier, scheme, x, importance):
    row = SCHEMES[scheme]
    number = getattr(lib, f"SL_{scheme.upper()}")
    out = np.full((len(x), x.shape[1] // row.block * row.dtype.block_bytes), 0xA5, np.uint8)
    if importance is None or not row.weighted:
        status = lib.sl_convert(tier, lib.SL_F32, number, pointer(x), pointer(out), x.size)
    else:
        weights = pointer(importance, "float *")
        status = lib.sl_quantize_weighted(tier, number, pointer(x), weights, pointer(out), *x.shape)
    assert status == lib.SL_OK
    return out


@pytest.mark.parametrize("scheme", TYPES)
@pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)
def test_blocks_are_those_of_ggml(tier, scheme):
    for kind, digests in BLOCKS[scheme].items():
        for name, expected in digests.items():
            blocks = quantize(tier, scheme, KINDS[kind], IMPORTANCE[name])
            assert digest(blocks.tobytes()) == expected, (kind, name)


def test_the_digests_are_of_all_cases():
    cases = {
        (scheme, kind, name) for scheme, kinds in BLOCKS.items() for kind, names in kinds.items() for name in names
    }
    assert cases == set(ggml_inputs.cases())
    assert len({name for kinds in BLOCKS.values() for names in kinds.values() for name in names.values()}) > 300


@pytest.mark.skipif("GGML_LIBRARY" not in os.environ, reason="GGML_LIBRARY names no libggml-base")
@pytest.mark.parametrize("scheme", TYPES)
def test_random_blocks_are_those_of_ggml(scheme):
    ggml = ggml_inputs.load(os.environ["GGML_LIBRARY"])
    for _ in range(20):
        scales = 10.0 ** rng.uniform(-20, 3, (64, 16)).repeat(64, axis=1)
        x = np.float32(rng.standard_t(rng.uniform(1.2, 9), (64, 1024)) * scales)
        for weights in (None, np.float32(rng.random(1024) ** rng.uniform(0, 20))):
            expected = ggml_inputs.quantize(ggml, scheme, x, weights)
            for tier in available_tiers():
                np.testing.assert_array_equal(quantize(tier, scheme, x, weights), expected, err_msg=tier_name(tier))


@pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)
def test_blocks_too_small_for_mxfp4_have_no_nan(tier):
    """ggml writes the exponent of a NaN, and refuses it."""
    x = np.full((1, 64), 2.0**-126, np.float32)
    x[0, 32:] = 2.0**-140
    blocks = quantize(tier, "mxfp4", x, None)
    values = safeload.QuantizedTensor("mxfp4", (64,), blocks.ravel()).dequantize()
    np.testing.assert_array_equal(values, np.where(np.arange(64) < 32, np.float32(2.0**-126), 0))


def ue4m3(x):
    """ggml's codes of E4M3 for numbers of at least 0: halves up, from 256 on the largest."""
    mantissa, exponent = np.frexp(x)  # x = (1 + m / 8) * 2^e, with e = exponent - 1
    normal = (np.floor((2 * mantissa - 1) * 8 + 0.5) + 8 * (exponent + 6)).astype(np.int64)
    normal = np.where((x >= 256) | (normal > 0x77), 0x7E, normal)
    small = np.minimum(x, np.float32(1)) * np.float32(512)
    return np.where(x < 2.0**-6, np.minimum(np.floor(small + np.float32(0.5)), 7), normal).astype(np.uint8)


def nvfp4(x):
    """quantize_row_nvfp4_ref of ggml, in NumPy."""
    runs = x.reshape(-1, 4, 16)
    codes = ue4m3(np.abs(runs).max(-1) / np.float32(6))
    scale = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 2
    numbers = np.float32([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
    errors = np.abs(numbers[:, None, None, None] * scale[..., None] - runs)
    nearest = errors.argmin(0).astype(np.uint8)  # the first of several
    pairs = nearest[..., :8] | nearest[..., 8:] << 4
    return np.concatenate([codes, pairs.reshape(-1, 32)], axis=1)


@pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)
def test_nvfp4_is_its_formula(tier):
    scales = 2.0 ** rng.uniform(-30, 14, (512, 16)).repeat(16, axis=1)
    random = np.float32(rng.standard_t(3, (512, 256)) * scales)
    random[:8] = np.float32([0, 2.0**-149, 448 * 6, 449 * 6, 255 * 6, 256 * 6, 1e30, 3e38])[:, None]
    random[8:12] = np.arange(256) * np.float32([0.25, 0.125, 6, 12.5])[:, None]
    for x in (random, *KINDS.values()):
        blocks = quantize(tier, "nvfp4", x, None)
        np.testing.assert_array_equal(blocks.reshape(-1, 36), nvfp4(x))


def test_no_quantization_with_importance_of_other_types():
    x, weights = np.ones((1, 64), np.float32), np.ones(64, np.float32)
    for number, columns in ((lib.SL_Q8_0, 64), (lib.SL_Q4_K, 64), (lib.SL_Q4_0, 40), (-1, 64)):
        status = lib.sl_quantize_weighted(0, number, pointer(x), pointer(weights, "float *"), pointer(x), 1, columns)
        assert status == lib.SL_E_ARGUMENT


# ---- safeload.quantize ----


@pytest.mark.parametrize("scheme", WEIGHTED)
def test_sources_of_any_dtype_give_the_same_blocks(scheme):
    weights = IMPORTANCE["squares"]
    half = KINDS["normal"].astype(ml_dtypes.bfloat16)
    expected = quantize(lib.SL_TIER_SCALAR, scheme, half.astype(np.float32), weights)
    for x in (half, half.astype(np.float64), np.asfortranarray(half.astype(np.float32))):
        for threads in (1, 3):
            blocks = safeload.quantize(x, scheme, importance=weights, threads=threads).data
            np.testing.assert_array_equal(blocks.reshape(expected.shape), expected)


@pytest.mark.parametrize("scheme", ["q4_0", "q3_k", "iq4_nl"])
def test_each_matrix_of_a_stack_can_have_an_importance_of_its_own(scheme):
    x = rng.standard_normal((3, 5, 512)).astype(np.float32)
    weights = rng.random((3, 512)).astype(np.float32)
    stack = safeload.quantize(x, scheme, importance=weights)
    for matrix, own, blocks in zip(x, weights, stack.data, strict=True):
        np.testing.assert_array_equal(safeload.quantize(matrix, scheme, importance=own).data, blocks)
    shared = safeload.quantize(x, scheme, importance=weights[1])
    np.testing.assert_array_equal(shared.data[1], stack.data[1])


def test_a_row_longer_than_a_buffer():
    x = rng.standard_normal((3, 1 << 20)).astype(np.float16)
    weights = rng.random(1 << 20).astype(np.float32)
    rows = [safeload.quantize(row[None], "q4_0", importance=weights).data[0] for row in x]
    np.testing.assert_array_equal(safeload.quantize(x, "q4_0", importance=weights, threads=2).data, rows)


def test_types_without_a_choice_ignore_importance():
    x = rng.standard_normal((2, 512)).astype(np.float32)
    for scheme in ("q8_0", "mxfp4", "nvfp4", "tq1_0", "tq2_0"):
        assert safeload.quantize(x, scheme, importance=np.zeros(512)) == safeload.quantize(x, scheme)


def test_importance_lowers_the_weighted_error():
    x = rng.standard_normal((64, 512)).astype(np.float32)
    weights = np.where(rng.random(512) < 0.1, 100, 0.01)
    for scheme in WEIGHTED:
        plain, weighted = (safeload.quantize(x, scheme, rounding="ggml", importance=w) for w in (None, weights))
        errors = [(weights * (q.dequantize() - x) ** 2).sum() for q in (plain, weighted)]
        assert errors[1] < errors[0], scheme


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("q4_k", {"importance": np.ones(255)}, r"importance has shape \[255\], expected \[256\] or \[2, 256\]"),
        ("q4_k", {"importance": np.full(256, -1.0)}, "must be finite and >= 0"),
        ("q4_k", {"importance": np.full(256, np.nan)}, "must be finite and >= 0"),
        ("q4_k", {"importance": np.full(256, 1e300)}, "must be finite and >= 0"),
        ("q4_0", {"importance": np.ones(256), "rounding": "absmax"}, 'importance= implies rounding="ggml"'),
        ("int8", {"importance": np.ones(256)}, "applies to ggml's block types, got int8"),
        ("bitnet", {"importance": np.ones(256)}, "bitnet does not accept"),
    ],
)
def test_wrong_importance(scheme, options, message):
    with pytest.raises(ValueError, match=message):
        safeload.quantize(np.ones((2, 3, 256), np.float32), scheme, **options)


@pytest.mark.parametrize("scheme", [*WEIGHTED, "mxfp4", "nvfp4", "tq1_0", "tq2_0"])
@pytest.mark.parametrize(("bad", "called"), [(np.nan, "nan"), (np.inf, "infinity"), (-np.inf, "minus infinity")])
def test_what_is_not_finite_is_told_by_its_index(scheme, bad, called):
    x = rng.standard_normal((2, 3, 512)).astype(np.float32)
    x[1, 2, 300] = bad
    for weights in (None, np.ones(512), np.ones((2, 512))):
        with pytest.raises(RangeError, match=rf"element \[1, 2, 300\] is {called}: only finite numbers"):
            safeload.quantize(x, scheme, importance=weights)


@pytest.mark.parametrize("scheme", [name for name in WEIGHTED if not name.startswith("iq")])
def test_a_scale_that_float16_cannot_hold_is_refused(scheme):
    x = np.ones((2, 256), np.float32)
    x[1, 7] = 1e10
    with pytest.raises(RangeError, match=r"element \[1, 7\] has magnitude 1e\+10, too large"):
        safeload.quantize(x, scheme, importance=np.ones(256))


def test_empty_arrays():
    for shape in ((0, 256), (3, 0, 256)):
        assert safeload.quantize(np.zeros(shape, np.float32), "q4_k", importance=np.ones(256)).shape == shape
