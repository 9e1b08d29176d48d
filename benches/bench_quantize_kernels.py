"""The quantization kernels in memory, with output that has been touched."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from bench_load import threads
from builders import ggml_reference
from compare import Comparison, race
from limits import READ, TWO_PASSES, reader, shared, storer, stream

import safeload
from safeload.core.native import TIER, ffi, lib

ROUNDS = 7
COUNT = 32 << 20  # 128 MiB of f32, four times a large third-level cache
BLOCK_BYTES = {"q4_0 absmax": 18, "q4_0": 18, "q8_0": 34}


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    """As weights are distributed."""
    return np.random.default_rng(6).standard_normal(COUNT, np.float32) * np.float32(0.02)


def _dtype(scheme: str) -> int:
    return {"q4_0 absmax": lib.SL_Q4_0_ABSMAX, "q4_0": lib.SL_Q4_0, "q8_0": lib.SL_Q8_0}[scheme]


def _converter(source: np.ndarray, target: np.ndarray, from_: str, to: str, workers: int) -> Callable[[], np.ndarray]:
    numbers = [lib.SL_F32 if name == "f32" else _dtype(name) for name in (from_, to)]
    sizes = [128 if name == "f32" else BLOCK_BYTES[name] for name in (from_, to)]

    def work(begin: int, end: int) -> None:
        places = [a.ctypes.data + begin // 32 * size for a, size in zip((source, target), sizes, strict=True)]
        assert lib.sl_convert(TIER, *numbers, *(ffi.cast("void *", p) for p in places), end - begin) == lib.SL_OK

    share = shared(work, COUNT, workers)
    return lambda: share() or target


def _numpy_q4_0(x: np.ndarray) -> np.ndarray:
    """rounding="absmax" as a user of numpy would write it."""
    x = x.reshape(-1, 32)
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(7)
    y = x * (np.float32(1) / d)
    q = np.clip(np.trunc(y + np.copysign(np.float32(0.5), y)), -8, 7).astype(np.int8).view(np.uint8) + np.uint8(8)
    return np.concatenate([d.astype(np.float16).view(np.uint8), q[:, :16] | q[:, 16:] << 4], axis=1)


def _same_blocks(ours: np.ndarray, theirs: np.ndarray | None) -> None:
    if theirs is not None:
        assert np.array_equal(ours[::7], theirs[::7])


@pytest.mark.parametrize("scheme", BLOCK_BYTES)
def test_blocks_from_f32_one_thread(scheme: str, weights, table, report) -> None:
    target = np.ones((COUNT // 32, BLOCK_BYTES[scheme]), np.uint8)
    sides = {"ours": _converter(weights, target, "f32", scheme, 1), READ: reader(weights, 1)}
    goals: dict[str, float | None] = {READ: None}
    if scheme == "q4_0 absmax":
        sides["numpy"] = lambda: _numpy_q4_0(weights)
        goals["numpy"] = 10
    else:
        gguf = pytest.importorskip("gguf.quants", reason="gguf is absent")
        kind = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}[scheme]
        sides["gguf-py"] = lambda: gguf.quantize(weights.reshape(-1, 32), kind)
        goals["gguf-py"] = 10
        if (library := ggml_reference.load()) is not None:
            other = np.ones_like(target)
            sides["ggml's C reference"] = lambda: ggml_reference.quantize(library, scheme, weights, other)
            goals["ggml's C reference"] = 4
    samples = race(sides, ROUNDS, check=_same_blocks)
    job = f"{scheme} from f32, 32 Mi elements in memory, one thread"
    rows = [
        table.add(job, peer, Comparison(samples["ours"], samples[peer]), target=goal) for peer, goal in goals.items()
    ]
    report(sides["ours"], rows, rounds=3)


@pytest.mark.parametrize("scheme", BLOCK_BYTES)
def test_blocks_from_f32_all_threads(scheme: str, weights, table, report) -> None:
    target = np.ones((COUNT // 32, BLOCK_BYTES[scheme]), np.uint8)
    sides = {"ours": _converter(weights, target, "f32", scheme, threads()), READ: reader(weights, threads())}
    samples = race(sides, ROUNDS)
    job = f"{scheme} from f32, 32 Mi elements in memory"
    rows = [table.add(job, READ, Comparison(samples["ours"], samples[READ]), target=0.6)]
    report(sides["ours"], rows, rounds=3)
    alone = np.zeros_like(target)
    assert np.array_equal(_converter(weights, alone, "f32", scheme, 1)(), target)


@pytest.mark.parametrize(("scheme", "block_bytes"), [("q4_k", 144), ("q5_k", 176), ("q6_k", 210)])
def test_k_quants_from_f32_one_thread(scheme: str, block_bytes: int, weights, table, report) -> None:
    if (library := ggml_reference.load()) is None:
        pytest.skip("there is no wheel with ggml's reference here")
    some = weights[: COUNT // 16]
    ours = lambda: safeload.quantize(some, scheme, threads=1).data.reshape(-1, block_bytes)  # noqa: E731
    peer = "ggml's C reference"
    sides = {"ours": ours, peer: lambda: ggml_reference.make_blocks(library, scheme, some, block_bytes)}
    samples = race(sides, ROUNDS, check=_same_blocks)
    job = f"{scheme} from f32, 2 Mi elements in memory, one thread"
    report(ours, [table.add(job, peer, Comparison(samples["ours"], samples[peer]), target=1)], rounds=3)


@pytest.mark.parametrize("scheme", ["q4_0", "q8_0"])
def test_blocks_to_f32(scheme: str, weights, table, report) -> None:
    gguf = pytest.importorskip("gguf.quants", reason="gguf is absent")
    kind = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}[scheme]
    blocks = np.ones((COUNT // 32, BLOCK_BYTES[scheme]), np.uint8)
    _converter(weights, blocks, "f32", scheme, threads())()
    target = np.ones((COUNT // 32, 32), np.float32)
    limit = "limit: memcpy of as many bytes"
    sides = {
        "ours": _converter(blocks, target, scheme, "f32", threads()),
        "gguf-py": lambda: gguf.dequantize(blocks, kind),
        limit: stream(blocks.nbytes + target.nbytes, threads()),
    }

    def check(ours: np.ndarray, theirs: np.ndarray) -> None:
        if theirs.dtype == np.float32:
            assert np.array_equal(ours[::7].view(np.uint32), theirs[::7].view(np.uint32))

    samples = race(sides, ROUNDS, check=check)
    job = f"{scheme} to f32, 32 Mi elements in memory"
    goals = {"gguf-py": None, limit: 0.6}
    rows = [
        table.add(job, peer, Comparison(samples["ours"], samples[peer]), target=goal) for peer, goal in goals.items()
    ]
    report(sides["ours"], rows, rounds=3)


def _int8(x: np.ndarray, target: np.ndarray, workers: int) -> Callable[[], np.ndarray]:
    """Two passes: the largest |x|, then the codes."""
    largest: list[int] = []
    factor = ffi.new("float *")

    def measure(begin: int, end: int) -> None:
        bits = ffi.new("uint32_t *")
        lib.sl_absmax(TIER, lib.SL_F32, ffi.cast("void *", x.ctypes.data + 4 * begin), end - begin, bits)
        largest.append(bits[0])

    def write(begin: int, end: int) -> None:
        source, codes = ffi.cast("void *", x.ctypes.data + 4 * begin), ffi.cast("int8_t *", target.ctypes.data + begin)
        lib.sl_to_int8(TIER, source, codes, end - begin, factor, 0)

    first, second = shared(measure, COUNT, workers), shared(write, COUNT, workers)

    def quantize() -> np.ndarray:
        largest.clear()
        first()
        factor[0] = np.float32(127) / np.uint32(max(largest)).view(np.float32)
        second()
        return target

    return quantize


def _numpy_int8(x: np.ndarray) -> np.ndarray:
    """As a user of numpy would write it; ties go to even."""
    scale = np.abs(x).max() / np.float32(127)
    return np.clip(np.round(x / scale), -128, 127).astype(np.int8)


def test_int8_from_f32(weights, table, report) -> None:
    target = np.ones(COUNT, np.int8)
    read, store = reader(weights, threads()), storer(np.ones(COUNT, np.int8), threads())

    def two_passes() -> None:
        read()
        read()
        store()

    sides = {
        "ours": _int8(weights, target, threads()),
        "numpy": lambda: _numpy_int8(weights),
        TWO_PASSES: two_passes,
    }

    def check(ours: np.ndarray, theirs: np.ndarray | None) -> None:
        if theirs is not None:  # x * (127 / absmax) and x / (absmax / 127) may lie on either side of a half
            apart = ours[::7].astype(np.int16) - theirs[::7]
            assert np.abs(apart).max() <= 1
            assert np.count_nonzero(apart) < apart.size / 10_000

    samples = race(sides, ROUNDS, check=check)
    job = "int8 from f32 (absmax, codes), 32 Mi elements in memory"
    goals = {"numpy": 8, TWO_PASSES: 0.8}
    rows = [
        table.add(job, peer, Comparison(samples["ours"], samples[peer]), target=goal) for peer, goal in goals.items()
    ]
    report(sides["ours"], rows, rounds=3)
