"""safeload.stats: against numpy and math.fsum; the same bits for any tier, number of threads, place and alignment."""

import json
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.executors import Plain
from builders.inside import available_tiers, dtypes, ffi, jobs, lib, main, tier_name
from builders.kernel_inputs import F32_RANDOM, F32_SPECIALS, Guarded
from builders.paths import DATA, SHARED
from builders.random import rng
from builders.thorough import THOROUGH, part_of
from builders.torch_build import Storage, tensor, zip_file

import safeload
from safeload import HISTOGRAM_EDGES, FormatError, TensorNotFoundError, UnsupportedError, stats
from safeload.numpy import save_file

pytestmark = pytest.mark.any_python

SCALAR = lib.SL_TIER_SCALAR
TIERS = pytest.mark.parametrize("tier", [tier for tier in available_tiers() if tier != SCALAR], ids=tier_name)
REAL = [
    *sorted(DATA.glob("*.safetensors")),
    *sorted(
        path for folder in ("safetensors", "torch", "npz") for path in (SHARED / folder).glob("*.*") if path.is_file()
    ),
]

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
INTEGERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
# Around the length of a vector, a block (4096) and a segment (262,144).
LENGTHS = [0, 1, 2, 15, 16, 17, 33, 130, 4095, 4096, 4097, 12_345, 262_143, 262_144, 262_145]
LARGER_THAN_A_CHUNK = 3_400_003  # bytes; a chunk has 3 MiB


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def normal(name, shape, scale=0.02, shift=0.0):
    dtype = dtype_of(name)
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return rng.integers(low, high, shape, dtype, endpoint=True)
    return (rng.standard_normal(shape) * scale + shift).astype(dtype)


def finite_values(x):
    """As float64, in C order."""
    with np.errstate(all="ignore"):
        values = np.asarray(x).astype(np.float64).reshape(-1)
    return values[np.isfinite(values)]


def exact_moments(values):
    """Mean and population standard deviation with at most a few roundings: `Fraction` has none, fsum one."""
    magnitudes = np.abs(values[values != 0])
    # Fractions take long, and have to be where f64 does not hold the squares.
    if len(values) <= 1000 or magnitudes.min(initial=1) < 1e-150 or magnitudes.max(initial=1) > 1e150:
        numbers = [Fraction(v) for v in values.tolist()]
        mean = sum(numbers) / len(numbers)
        variance = sum((n - mean) ** 2 for n in numbers) / len(numbers)
        # The square root of a fraction that may be beyond f64, as 2**shift * sqrt(variance / 4**shift).
        shift = (variance.numerator.bit_length() - variance.denominator.bit_length()) // 2 if variance else 0
        return float(mean), math.ldexp(math.sqrt(variance / Fraction(4) ** shift), shift)
    mean = math.fsum(values.tolist()) / len(values)
    # The mean is off by half a unit in the last place; of the variance that is the square.
    return mean, math.sqrt(math.fsum(((values - mean) ** 2).tolist()) / len(values))


def first(mask):
    return tuple(int(k) for k in np.unravel_index(mask.argmax(), mask.shape)) if mask.any() else None


def sums(numbers):
    """The sum of integers and that of their squares, without a rounding."""
    if numbers.dtype.itemsize > 4:
        numbers = numbers.tolist()
        return sum(numbers), sum(n * n for n in numbers)
    numbers = numbers.astype(np.int64)
    high, low = numbers >> 16, numbers & 0xFFFF  # sums of their products fit 64 bits
    return int(numbers.sum()), (int(high @ high) << 32) + (int(high @ low) << 17) + int(low @ low)


def check_integers(found, numbers):
    """Extremes and mean are exact, and the deviation does not suffer from a large mean."""
    numbers = np.asarray(numbers).reshape(-1)
    low, high, (total, squares) = int(numbers.min()), int(numbers.max()), sums(numbers)
    mean = Fraction(total, numbers.size)
    assert (found.min, found.max, found.absmax, found.mean) == (low, high, max(high, -low), float(mean))
    variance = Fraction(squares, numbers.size) - mean**2
    assert found.std == pytest.approx(math.sqrt(variance), rel=1e-12)


def check(found, x, *, dtype=None):
    """Everything that `found` says of x."""
    x = np.asarray(x)
    with np.errstate(all="ignore"):
        values = x.astype(np.float64)
    assert found.dtype == (dtype or dtypes.BY_NAME[x.dtype.name].code)
    assert (found.shape, found.count) == (x.shape, x.size)
    nan, inf = np.isnan(values), np.isinf(values)
    assert (found.nan, found.inf, found.zeros) == (nan.sum(), inf.sum(), (values == 0).sum())
    assert (found.first_nan, found.first_inf) == (first(nan), first(inf))
    finite = finite_values(x)
    numbers = (found.min, found.max, found.absmax, found.mean, found.std)
    whole = x.dtype.kind in "iub" and x.size > 0
    assert [type(number) for number in numbers] == [int if whole else float] * 3 + [float] * 2
    if whole:
        check_integers(found, x)
        return
    if len(finite) == 0:
        assert all(math.isnan(number) for number in numbers)
        return
    assert (found.min, found.max, found.absmax) == (finite.min(), finite.max(), np.abs(finite).max())
    assert 0 not in (found.min, found.max) or all(math.copysign(1, n) == 1 for n in (found.min, found.max) if n == 0)
    mean, std = exact_moments(finite)
    assert abs(found.mean - mean) <= 1e-12 * found.absmax
    assert found.std == pytest.approx(std, rel=1e-12, abs=1e-15 * found.absmax if std else 0)


def same(a, b):
    """Whether all numbers are the same bits; NaN is NaN."""
    assert repr(a._replace(histogram=None)) == repr(b._replace(histogram=None))
    np.testing.assert_array_equal(a.histogram, b.histogram)


# ---- numpy and fsum ----


@pytest.mark.parametrize("name", FLOATS + INTEGERS)
def test_equals_numpy_and_fsum(name):
    large = [*LENGTHS[-3:], min(LARGER_THAN_A_CHUNK // dtype_of(name).itemsize, 1_700_003)]
    for length in (*LENGTHS[:-3], *part_of(large, (FLOATS + INTEGERS).index(name), 4)):
        x = normal(name, length)
        check(stats(x), x)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_real_files(path):
    try:
        opened = safeload.open(path)
    except safeload.SafeloadError:
        pytest.skip("is refused, see test_torch.py and test_npz.py")
    with opened:
        found = stats(opened)
        infos = opened.tensors
        assert set(found) == {name for name in opened if not infos[name].dtype.startswith("C")}
        for name, one in found.items():
            check(one, opened[name], dtype=infos[name].dtype)


NAN, INF = math.nan, math.inf
CRAFTED = {
    "all NaN": [NAN] * 5000,
    "all Inf": [INF, -INF] * 2500,
    "NaN and Inf": [NAN, INF, -INF] * 100,
    "empty": [],
    "one": [-3.5],
    "one NaN": [NAN],
    "one zero": [-0.0],
    "zeros": [0.0, -0.0] * 3000,
    "negative zero and above": [-0.0, 1.0],
    "below and negative zero": [-1.0, -0.0],
    "the same": [0.1] * 10_000,
    "the same but one": [0.1] * 9999 + [0.2],
    "NaN first": [NAN, 1.0, 2.0],
    "Inf last": [1.0, 2.0, INF],
    "one finite": [NAN] * 4096 + [7.0] + [INF] * 5000,
    "mean near zero": [1.0, -1.0, 1e-8] * 5000,
    "mean far from zero": [1000.0 + k / 8 for k in range(-4000, 4000)],
    "mean farther": [65504.0, 65472.0] * 3000,
    "halves far apart": [60000.0] * 4096 + [-60000.0] * 4096,
    "blocks far apart": [6e4 + (k % 7) / 8 for k in range(4096)] + [6e-5 * (k % 5) for k in range(5000)],
}


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("values", CRAFTED.values(), ids=CRAFTED)
def test_crafted(name, values):
    x = np.array(values, np.float64).astype(dtype_of(name))
    check(stats(x), x)
    check(stats(x.reshape(1, -1, 1)), x.reshape(1, -1, 1))


def test_subnormals():
    for name, word in (("float16", np.uint16), ("bfloat16", np.uint16), ("float32", np.uint32), ("float64", np.uint64)):
        x = np.arange(1, 5000, dtype=word).view(dtype_of(name))[:120]
        check(stats(x), x)
        check(stats(np.concatenate([x, -x, x])), np.concatenate([x, -x, x]))


F64_EXTREMES = {
    "largest": [1.7e308, -1.7e308, 1.6e308],
    "largest of one sign": [1.7e308, 1.7e308, 1.6e308] * 2000,
    "smallest": [5e-324, 1e-323, -5e-324] * 2000,
    "small": [1e-200, 3e-200, -2e-200] * 2000,
    "both": [1.5e308] * 4096 + [5e-324] * 4096 + [1.0] * 100,
    "small then ordinary": [2e-310] * 4096 + [0.5, -0.25] * 4096,
    "squares overflow": [1e155, -1e155, 2e160] * 3000,
    "squares vanish": [1e-170, -3e-165] * 3000,
    "zeros among small": [0.0, 1e-300] * 4096,
    "with NaN": [1e300, NAN, -1e300, INF] * 2000,
}


@pytest.mark.parametrize("values", F64_EXTREMES.values(), ids=F64_EXTREMES)
def test_f64_that_squares_cannot_hold(values):
    x = np.array(values)
    check(stats(x), x)


def test_whole_ranges_of_the_small_types():
    for word, names in ((np.uint8, [n for n in FLOATS if "float8" in n]), (np.uint16, ["float16", "bfloat16"])):
        bits = np.arange(np.iinfo(word).max + 1).astype(word)
        for name in names:
            check(stats(bits.view(dtype_of(name))), bits.view(dtype_of(name)))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_mean_and_deviation_of_a_shifted_tensor(name):
    """The mean is a thousand deviations away: sums of squares alone would lose 20 bits of the variance."""
    x = normal(name, 500_000, 1e-3 if name == "float32" else 0.05, shift=1.0)
    check(stats(x), x)


@pytest.mark.parametrize(("k", "center", "spread"), [(k, *pair) for k, pair in enumerate([
    (0, 1), (2**24, 3), (2**31 - 4, 3), (2**40, 5), (2**40, 2**41), (2**53, 1000), (2**60 + 1, 7), (2**63 - 9, 8),
    (0, 2**63 - 1), (-(2**63) + 8, 8), (2**64 - 6, 5), (2**63, 2**63 - 1),
])])  # fmt: skip
@pytest.mark.parametrize("length", [1, 2, 1000, 4096, 4097, 300_000])
def test_integers_are_exact(k, center, spread, length):
    rng = np.random.default_rng(5)
    offsets = rng.integers(-spread, spread, length if k % 3 == 0 or THOROUGH else min(length, 5000), endpoint=True)
    for name in INTEGERS[1:]:
        info = np.iinfo(name)
        least, most = max(info.min - center, -spread), min(info.max - center, spread)
        fitting = offsets[(offsets >= least) & (offsets <= most)] if least <= most else offsets[:0]
        if not fitting.size or (fitting.size > 5000 and info.bits < 64):
            continue
        x = np.array([center + offset for offset in fitting.tolist()], name)
        check_integers(stats(x, threads=2), x)
        assert stats(x, histogram=True)._replace(histogram=None) == stats(x)
        assert stats(x.astype(x.dtype.newbyteorder(">"))[::-1])[2:8] == pytest.approx(stats(x)[2:8], rel=1e-12)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_in_files_keep_every_bit(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    info = np.iinfo("u1" if name == "bool" else name)
    x = np.array([info.max, info.min, 1]).astype(name) if name == "bool" else np.array([info.max, info.min, 1], name)
    save_file({"x": x}, "x.safetensors")
    found = stats("x.safetensors", executor=Plain())["x"]
    check_integers(found, x)
    assert found == stats("x.safetensors")["x"]
    assert main(["stats", "x.safetensors", "--json"]) == 0
    (written,) = json.loads(capsys.readouterr().out)["tensors"]
    assert (written["min"], written["max"], written["mean"]) == (x.min(), x.max(), found.mean)
    assert main(["stats", "x.safetensors"]) == 0
    assert f" {int(x.max())} " in capsys.readouterr().out
    main(["report", "x.safetensors", "-o", "x.html"])
    with open("x.html", encoding="utf-8") as page:
        assert f">{int(x.max())}<" in page.read()


# ---- where the first is ----


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float8_e5m2"])
def test_first_nan_and_infinity(name):
    x = normal(name, (3, 700, 257))
    for at in (0, 1, 4095, 4096, 262_143, 262_144, 262_145, x.size - 1):
        flawed = x.copy()
        flawed.reshape(-1)[at] = NAN
        flawed.reshape(-1)[at // 2] = -INF
        found = stats(flawed, threads=2)
        index = [tuple(int(k) for k in np.unravel_index(k, x.shape)) for k in (at, at // 2)]
        assert found.first_inf == index[1]
        assert found.first_nan == (index[0] if at != at // 2 else None)


# ---- histograms ----


def bins_of(x):
    values = np.abs(finite_values(x))
    values = values[values > 0]
    return np.bincount(np.clip(np.frexp(values)[1] - 1 + 48, 0, 63), minlength=64)


def test_edges():
    assert HISTOGRAM_EDGES.shape == (65,)
    assert (HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[48], HISTOGRAM_EDGES[64]) == (2.0**-48, 1.0, 65536.0)
    x = np.concatenate([HISTOGRAM_EDGES[:-1], np.nextafter(HISTOGRAM_EDGES[1:], 0)])
    np.testing.assert_array_equal(stats(x, histogram=True).histogram, np.full(64, 2))
    assert stats(x).histogram is None


@pytest.mark.parametrize("name", FLOATS + INTEGERS)
def test_histogram(name):
    for length in (0, 1, 3, 5000, 600_000):
        x = normal(name, length, 3.0)
        found = stats(x, histogram=True)
        assert found.histogram.dtype == np.int64
        np.testing.assert_array_equal(found.histogram, bins_of(x))
        same(found._replace(histogram=None), stats(x))


def test_histogram_of_what_is_beyond_its_edges():
    for x in (F32_SPECIALS, np.array([5e-324, 1e-300, 1e300, 1.7e308, NAN, INF, 0.0, -0.0, 2.0**-149, -(2.0**127)])):
        found = stats(x, histogram=True)
        np.testing.assert_array_equal(found.histogram, bins_of(x))
        assert found.histogram.sum() == found.count - found.nan - found.inf - found.zeros


# ---- the same bits ----


def odd(name, length):
    """Weights, and now and then something that a block has to be looked at twice for."""
    x = normal(name, length)
    if dtype_of(name).kind == "f" or name == "bfloat16":
        for k in range(0, length, 9001):
            x[k] = [NAN, INF, -INF, -0.0, 60000.0][k // 9001 % 5]
        x[length // 2 :][:8192] = 1.0
    return x


@TIERS
@pytest.mark.parametrize("histogram", [False, True])
@pytest.mark.parametrize("name", FLOATS + INTEGERS)
def test_tiers_give_scalars_bits(name, histogram, tier, monkeypatch):
    for length in (*range(0, 131, 13), 4097, *part_of([300_007], (FLOATS + INTEGERS).index(name) + histogram, 2)):
        for x in (normal(name, length), odd(name, length)):
            inside.tune(monkeypatch, tier=SCALAR)
            wanted = stats(x, histogram=histogram)
            inside.tune(monkeypatch, tier=tier)
            same(stats(x, histogram=histogram), wanted)


def record(monkeypatch, tier, name, address, length):
    """The record of one segment of bytes anywhere in memory, as bytes."""
    inside.tune(monkeypatch, tier=tier)
    row = dtypes.BY_NAME[name]
    out = np.full(1, 0x5A, np.uint8).repeat(ffi.sizeof("sl_stats"))
    job = jobs.Job(None, address, out.ctypes.data, row.nbytes(length), row.number, op=lib.SL_OP_STATS)
    jobs.Batch([job]).run(threads=1)
    return out.tobytes()


@pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)
@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int64"])
def test_any_alignment_between_guard_pages(name, tier, monkeypatch):
    for length in (1, 7, 15, 16, 17, 31, 33, 100, 130):
        x = odd(name, length)
        aligned = record(monkeypatch, SCALAR, name, x.ctypes.data, length)
        for at_end in (False, True):
            guarded = Guarded(x.nbytes, at_end)
            guarded.bytes()[:] = x.tobytes()
            assert record(monkeypatch, tier, name, guarded.address, length) == aligned
        raw = np.empty(x.nbytes + 64, np.uint8)
        for shift in range(1, 33, 5):
            raw[shift : shift + x.nbytes] = x.view(np.uint8)
            assert record(monkeypatch, tier, name, raw.ctypes.data + shift, length) == aligned


@TIERS
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16"])
def test_random_bits(name, tier, monkeypatch):
    x = F32_RANDOM.view(dtype_of(name)) if name != "float32" else np.concatenate([F32_SPECIALS, F32_RANDOM])
    for part in (x[:4096], x[:5000], x):
        inside.tune(monkeypatch, tier=SCALAR)
        wanted = stats(part, histogram=True)
        inside.tune(monkeypatch, tier=tier)
        same(stats(part, histogram=True), wanted)
        with np.errstate(invalid="ignore"):  # signalling NaN, where ml_dtypes widens first
            assert wanted.first_nan == first(np.isnan(part))


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float8_e4m3fn", "int32"])
def test_threads_and_files_do_not_show(name, tmp_path):
    x = odd(name, 4_000_001)
    wanted = stats(x, histogram=True, threads=1)
    for threads in (2, 3, 8):
        same(stats(x, histogram=True, threads=threads), wanted)
    save_file({"other": np.zeros(3, np.uint8), "x": x}, tmp_path / "x.safetensors")
    for threads in (1, 3):
        same(stats(tmp_path / "x.safetensors", histogram=True, threads=threads)["x"], wanted)


def test_layout_in_memory_does_not_show():
    x = normal("float32", (300, 500))
    wanted = stats(x)
    same(stats(np.asfortranarray(x)), wanted)
    same(stats(x.astype(">f4")), wanted)
    same(stats(x[::-1][::-1]), wanted)
    wide = np.zeros((300, 1000), np.float32)
    wide[:, ::2] = x
    same(stats(wide[:, ::2]), wanted)
    assert stats(np.broadcast_to(np.float32(2), (5, 6))).mean == 2


# ---- checkpoints ----


def test_dict_and_checkpoint(tmp_path):
    tensors = {name: normal(name, (40, 64)) for name in [*FLOATS, *INTEGERS] if name != "float8_e4m3fnuz"}
    tensors["scalar"] = np.float32(3)
    tensors["empty"] = np.zeros((0, 4), np.float16)
    tensors["complex"] = np.ones(3, np.complex64)
    save_file(tensors, tmp_path / "m.safetensors")
    found = stats(tmp_path / "m.safetensors")
    with safeload.open(tmp_path / "m.safetensors") as opened:
        assert list(found) == [name for name in opened if name != "complex"]
        some = ["empty", "float16"]
        assert list(stats(opened, names=some)) == some
    in_memory = stats(tensors)
    assert list(in_memory) == [name for name in tensors if name != "complex"]
    for name, one in found.items():
        check(one, tensors[name])
        same(one, in_memory[name])


def test_quantized_tensors_as_they_restore(tmp_path):
    x = normal("float32", (96, 256))
    quantized = {
        "int8": safeload.quantize(x, "int8"),
        "rows": safeload.quantize(x, "int8", axis=0),
        "columns": safeload.quantize(x, "int8", axis=1),
        "q4_0": safeload.quantize(x, "q4_0"),
        "q8_0": safeload.quantize(x, "q8_0"),
    }
    save_file(quantized, tmp_path / "q.safetensors")
    found = stats(tmp_path / "q.safetensors", histogram=True)
    assert {name: one.dtype for name, one in found.items()} == {
        **dict.fromkeys(("int8", "rows", "columns"), "I8"),
        "q4_0": "Q4_0",
        "q8_0": "Q8_0",
    }
    for name, value in quantized.items():
        same(found[name]._replace(dtype="F32", nbytes=x.nbytes), stats(value.dequantize(), histogram=True))
        same(found[name], stats(value, histogram=True))


def test_blocks_of_gguf(tmp_path):
    row_bytes = {"q4_k": 144, "q6_k": 210, "q5_0": 8 * 22, "mxfp4": 8 * 17, "q8_k": 292}
    tensors = {}
    for scheme, size in row_bytes.items():
        data = rng.integers(0, 60, (6, size), np.uint8)
        tensors[scheme] = safeload.QuantizedTensor(scheme, (6, 256), data)
    safeload.gguf.save_file(tensors, tmp_path / "m.gguf")
    found = stats(tmp_path / "m.gguf")
    assert set(found) == set(row_bytes) - {"q8_k"}
    for name, one in found.items():
        same(one._replace(dtype="F32", nbytes=6 * 256 * 4), stats(tensors[name].dequantize()))
    with pytest.raises(UnsupportedError, match="q8_k"):
        stats(tensors["q8_k"])


def test_packed_floats_are_decoded(tmp_path):
    raw = rng.integers(0, 256, 4096, np.uint8).tobytes()
    header = b'{"f4":{"dtype":"F4","shape":[64,128],"data_offsets":[0,4096]}}'
    path = tmp_path / "f4.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw)
    found = stats(path)["f4"]
    check(found, safeload.load(path, dtype="float32")["f4"], dtype="F4")


@pytest.mark.parametrize("order", ["little", "big"])
def test_strides_and_byte_order_of_torch_files(order, tmp_path):
    x = np.arange(60, dtype=np.float32).reshape(6, 10)
    storage = Storage("0", x)
    both = {"t": tensor(storage, (10, 6), (1, 10)), "x": tensor(storage, (6, 10))}
    (tmp_path / "t.pth").write_bytes(zip_file(both, order=order))
    found = stats(tmp_path / "t.pth")
    check(found["t"], x.T)
    check(found["x"], x)


# ---- arguments and errors ----


def test_scalars_and_lists():
    assert stats(3.5).shape == ()
    assert stats(-2).min == -2
    assert stats([[1, 2], [3, 4]]).mean == 2.5
    assert stats(np.float32(NAN)).first_nan == ()


def test_small_types_of_ml_dtypes_that_no_file_has():
    x = np.array([1, -2, 3], ml_dtypes.int4)
    assert (stats(x).min, stats(x).max, stats(x).dtype) == (-2, 3, "int4")
    assert stats(np.array([0.5, -6], ml_dtypes.float4_e2m1fn)).min == -6


def test_refusals():
    with pytest.raises(UnsupportedError, match=r"complex64 values have no order; pass x\.real and x\.imag"):
        stats(np.ones(2, np.complex64))
    for x in (np.array(["a"]), np.array([object()]), np.array(["2026-01-01"], "M8[D]"), np.zeros(2, "V3")):
        with pytest.raises(TypeError, match="it does not hold numbers"):
            stats(x)
    with pytest.raises(ValueError, match="threads must be >= 1, got 0"):
        stats([1.0], threads=0)
    with pytest.raises(ValueError, match="names=, only= and drop= require a checkpoint or a dict"):
        stats([1.0], names=["x"])
    with pytest.raises(TensorNotFoundError, match="does not contain tensor y"):
        stats({"x": np.ones(2)}, names=["y"])
    with pytest.raises(FileNotFoundError):
        stats("nowhere.safetensors")


def test_a_file_that_shrinks_is_an_error_with_its_place(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": normal("float32", 1_000_000), "b": normal("float32", 1_000_000)}, path)
    with safeload.open(path) as opened:
        with path.open("r+b") as file:
            file.truncate(5_000_000)
        assert stats(opened, names=[next(iter(opened))])
        with pytest.raises(FormatError, match=r"tensor 'b'.*m\.safetensors") as caught:
            stats(opened)
        assert caught.value.path == str(path)


def test_progress():
    seen = []
    stats({"x": np.zeros(3_000_000, np.float32)}, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (12_000_000, 12_000_000)


def test_peak_and_outliers_describe_the_spread():
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    values[:50] *= 100
    for scale in (1e-3, 1.0, 37.0):
        stats = safeload.stats(values * np.float32(scale), histogram=True)
        rms = np.sqrt(np.mean(np.float64(values) ** 2))
        bound = 2.0 ** np.ceil(np.log2(6 * rms * scale))
        assert stats.outliers == np.count_nonzero(np.abs(values * np.float32(scale)) >= bound) / values.size > 0
        assert stats.peak == stats.absmax / stats.std
    # The mean is no outlier: norms have values around 1.
    assert safeload.stats(np.float32(1 + 0.01 * values[50:]), histogram=True).outliers == 0


def test_peak_and_outliers_of_odd_tensors():
    for x in (np.zeros(0, np.float32), np.full(3, np.nan, np.float32)):
        stats = safeload.stats(x, histogram=True)
        assert np.isnan(stats.peak)
        assert np.isnan(stats.outliers)
    assert safeload.stats(np.zeros(3, np.float32), histogram=True).outliers == 0
    assert np.isnan(safeload.stats(np.ones(3, np.float32)).peak)
    assert np.isnan(safeload.stats(np.ones(3, np.float32)).outliers)
    huge = safeload.stats(np.float32([3e38, 1, 1, 1]), histogram=True)  # beyond the last edge: no bin can tell
    assert huge.outliers == 0
