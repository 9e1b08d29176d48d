"""The kernels of other engines' formats: every instruction set gives the bits of scalar C."""

import numpy as np
import pytest
from builders.engine_models import DTYPES, matrix

from safeload.base import dtypes, native, packing
from safeload.base.preset import PRESETS
from safeload.operations.quantize import encoding
from safeload.operations.quantize.encoding import Encoding
from safeload.operations.quantize.weights import in_memory

TIERS = [tier for tier in range(1, native.lib.SL_TIER_COUNT) if native.lib.sl_tier_available(tier)]


def encode(name, dtype, weights, tier, monkeypatch):
    monkeypatch.setattr(encoding, "TIER", tier)
    row = dtypes.BY_NAME[dtype]
    flat = weights.reshape(-1)
    values = in_memory(flat)
    return encoding.encode(Encoding("x", PRESETS[name], weights.shape, row), values, largest=4.0, threads=1)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRESETS)
def test_a_tier_gives_the_codes_of_scalar(name, dtype, tier, monkeypatch):
    flat = PRESETS[name].group in (None, 64) and PRESETS[name].engine != "mlx"
    shapes = [(24, 128), (16, 5120 if PRESETS[name].group is None else 384), *([(20, 77)] if flat else [])]
    for seed, shape in enumerate(shapes):
        weights = matrix(*shape, seed).astype(DTYPES[dtype])
        scalar = encode(name, dtype, weights, native.lib.SL_TIER_SCALAR, monkeypatch)
        parts = encode(name, dtype, weights, tier, monkeypatch)
        assert parts.keys() == scalar.keys()
        for role, part in parts.items():
            np.testing.assert_array_equal(part.view(np.uint8), scalar[role].view(np.uint8), err_msg=role)


@pytest.mark.parametrize("tier", [native.lib.SL_TIER_SCALAR, *TIERS])
def test_e4m3_is_the_nearest_number(tier, monkeypatch):
    numbers = np.arange(0x7F, dtype=np.uint8).view(dtypes.array_dtype(native.lib.SL_F8_E4M3)).astype(np.float32)
    between = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(between, np.float32(0)), between, np.nextafter(between, np.float32(448)), numbers]
    values = np.concatenate([*near, *(-x for x in near)]).astype(np.float32)
    weights = np.concatenate([values, [448]]).reshape(1, -1).astype(np.float32)  # the scale is 1
    parts = encode("fp8_dynamic", "float32", weights, tier, monkeypatch)
    expected = weights.astype(parts[packing.CODES].dtype)
    np.testing.assert_array_equal(parts[packing.CODES].view(np.uint8), expected.view(np.uint8))


def test_unknown_arguments_are_refused():
    job, position = native.ffi.new("sl_encoding *"), native.ffi.new("uint64_t *")
    job.row_block = job.group = 128
    assert native.lib.sl_encode(0, job, position) == native.lib.SL_E_ARGUMENT  # dtype
    setattr(job, "from", native.lib.SL_F32)
    assert native.lib.sl_encode(99, job, position) == native.lib.SL_E_ARGUMENT
    job.group, job.columns = 8, 64
    assert native.lib.sl_encode(0, job, position) == native.lib.SL_E_ARGUMENT
