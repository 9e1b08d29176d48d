"""K-quants from f32: the bytes of ggml's compiled reference in every tier, and what a block of other values becomes."""

import numpy as np
import pytest
from builders import ggml_reference
from builders.ggml_inputs import TYPES
from builders.inside import available_tiers, dtypes, ffi, lib, tier_name
from builders.kernel_inputs import F32_SPECIALS
from builders.random import rng

import safeload
from safeload import RangeError
from safeload.numpy import load_file

TIERS = pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)
BLOCK_BYTES = {"q4_k": 144, "q5_k": 176, "q6_k": 210}
SCHEMES = pytest.mark.parametrize("scheme", BLOCK_BYTES)
COUNT = 256 * 600


def of_runs(values, length):
    return np.repeat(values, length)[:COUNT]


DISTRIBUTIONS = {
    "normal": rng.standard_normal(COUNT) * 0.02,
    "heavy tails": rng.standard_t(1.5, COUNT),
    "one sign": rng.random(COUNT) + 1,
    "the other sign": -rng.random(COUNT) - 1,
    "runs of zeros": rng.standard_normal(COUNT) * of_runs(rng.random(COUNT // 32) < 0.5, 32),
    "half zeros": np.where(rng.random(COUNT) < 0.5, 0.0, rng.standard_normal(COUNT)),
    "constant runs": of_runs(rng.standard_normal(COUNT // 16), 16),
    "few values": rng.integers(-3, 4, COUNT) * 0.25,
    "of every size": rng.standard_normal(COUNT) * of_runs(10.0 ** rng.uniform(-30, 4, COUNT // 256), 256),
    "bf16": (rng.standard_normal(COUNT).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32),
}


def quantize(tier, scheme, x):
    x = np.ascontiguousarray(x, np.float32)
    row = dtypes.BLOCK_TYPES[scheme]
    out = np.full((x.size // 256, 256 // row.block * row.block_bytes), 0xA5, np.uint8)
    source, target = (ffi.cast("void *", array.ctypes.data) for array in (x, out))
    assert lib.sl_convert(tier, lib.SL_F32, row.number, source, target, x.size) == lib.SL_OK
    return out


@pytest.fixture(scope="module")
def ggml():
    library = ggml_reference.load()
    if library is None:
        pytest.skip("there is no wheel with ggml's reference here")
    return library


@SCHEMES
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_blocks_are_those_of_ggml_in_every_tier(ggml, name, scheme):
    x = DISTRIBUTIONS[name].astype(np.float32)
    want = ggml_reference.make_blocks(ggml, scheme, x, BLOCK_BYTES[scheme])
    for tier in available_tiers():
        np.testing.assert_array_equal(quantize(tier, scheme, x), want, err_msg=tier_name(tier))


@SCHEMES
def test_a_real_file_gives_the_blocks_of_ggml(ggml, data, scheme):
    arrays = load_file(data / "silero_vad_16k.safetensors").values()
    x = np.concatenate([a.ravel()[: a.size // 256 * 256] for a in arrays if a.dtype == np.float32])
    assert x.size > 100_000
    want = ggml_reference.make_blocks(ggml, scheme, x, BLOCK_BYTES[scheme])
    np.testing.assert_array_equal(safeload.quantize(x, scheme).data, want.ravel())


@pytest.mark.parametrize("scheme", TYPES)
def test_special_values_are_the_same_in_every_tier(scheme):
    """Also where a square overflows, a scale is subnormal, or nothing is finite."""
    x = rng.choice(F32_SPECIALS.view(np.float32), 256 * 400)
    x[: 256 * 200] = np.where(np.isfinite(x[: 256 * 200]), x[: 256 * 200], 1.0)
    x[: 256 * 20 : 5] = 0.0
    first, *others = (quantize(tier, scheme, x) for tier in available_tiers())
    for other in others:
        np.testing.assert_array_equal(other, first)


@SCHEMES
@TIERS
def test_zeros_are_zeros(tier, scheme):
    blocks = quantize(tier, scheme, np.zeros(512, np.float32))
    values = safeload.QuantizedTensor(scheme, (2, 256), blocks).dequantize()
    np.testing.assert_array_equal(values, 0)


@SCHEMES
@pytest.mark.parametrize(("bad", "called"), [(np.nan, "nan"), (np.inf, "infinity"), (-np.inf, "minus infinity")])
def test_what_is_not_finite_is_told_by_its_index(bad, called, scheme):
    x = rng.standard_normal((3, 512)).astype(np.float32)
    x[1, 300] = bad
    with pytest.raises(RangeError, match=rf"element \[1, 300\] is {called}: only finite numbers can be quantized"):
        safeload.quantize(x, scheme)


@SCHEMES
def test_a_scale_that_float16_cannot_hold_is_refused(scheme):
    x = np.ones((2, 256), np.float32)
    x[1, 7] = 1e10
    with pytest.raises(RangeError, match=r"element \[1, 7\] has magnitude 1e\+10, too large"):
        safeload.quantize(x, scheme)


@SCHEMES
def test_the_error_is_a_small_part_of_the_range(scheme):
    x = rng.standard_normal((16, 1024)).astype(np.float32)
    most = {"q4_k": 0.09, "q5_k": 0.045, "q6_k": 0.025}[scheme]
    error = safeload.quantize(x, scheme).dequantize() - x
    assert 0 < np.sqrt(np.mean(error**2)) < most


def test_rows_must_be_whole_super_blocks():
    with pytest.raises(ValueError, match=r"rows of 288, which is not a multiple of 256"):
        safeload.quantize(np.ones((2, 288), np.float32), "q4_k")
