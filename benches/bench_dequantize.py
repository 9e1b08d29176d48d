"""Blocks of ggml to f32, in memory and out of a whole file, against gguf-py, ggml's C and the limits."""

from __future__ import annotations

import statistics

import files
import numpy as np
import pytest
from builders import ggml_reference
from compare import Comparison, race, release, same_arrays, same_bytes
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from limits import READ, reader, storers

import safeload
from safeload import QuantizedTensor
from safeload.core import dtypes
from safeload.core.native import TIER, ffi, lib

ROUNDS = 9
# Of ggml's C; where the machine cannot store much faster, storing is the goal.
AHEAD = 1.2
STORE = "limit: storing the result"
READ_AND_STORE = "limit: reading the blocks, storing the result"
SCHEMES = [
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4", "iq4_nl"),
    *("iq4_xs", "tq1_0", "tq2_0", "nvfp4"),
]
# Indices into grids of up to 2048 entries, whose whole table is to be used; with the byte of the scale's exponent.
GRIDS = {**dict.fromkeys(["iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s"], 1), "iq1_m": 55}


def blocks(scheme: str, count: int) -> np.ndarray:
    """Random bytes whose scales are finite."""
    row = dtypes.BLOCK_TYPES[scheme]
    some = np.random.default_rng(7).integers(0, 256 if scheme in GRIDS else 60, 1 << 20, np.uint8)
    data = np.resize(some, row.nbytes(count))
    if scheme in GRIDS:
        data[GRIDS[scheme] :: row.block_bytes] &= 0x3F
    return data


@pytest.mark.parametrize("scheme", [*SCHEMES, *GRIDS])
def test_one_thread(scheme: str, table, report) -> None:
    row = dtypes.BLOCK_TYPES[scheme]
    count = 8 << 20
    data = blocks(scheme, count)
    q = QuantizedTensor(scheme, (count,), data)
    kind = GGMLQuantizationType[scheme.upper()]
    out, by_kernel, other, spare = (np.ones(count, np.float32) for _ in range(4))
    places = (ffi.cast("void *", array.ctypes.data) for array in (data, by_kernel))
    call = (TIER, row.number, lib.SL_F32, *places, count)

    def kernel() -> np.ndarray:
        assert lib.sl_convert(*call) == lib.SL_OK
        return by_kernel

    stores = storers(spare)
    sides = {
        "ours": lambda: q.dequantize(out=out, threads=1),
        "kernel": kernel,
        "gguf-py": lambda: dequantize(data.reshape(1, -1), kind).ravel(),
        READ: reader(data, 1),
        **stores,
    }
    library = ggml_reference.load()
    if library is not None:
        sides["ggml's C"] = lambda: ggml_reference.dequantize(library, scheme, data, count, other)

    def check(ours: np.ndarray, theirs: np.ndarray | None) -> None:
        assert theirs is None or same_bytes(ours, theirs)

    samples = race(sides, ROUNDS, check=check)
    # The better one as a whole: the least of each round would be better than either.
    samples[STORE] = min((samples[name] for name in stores), key=statistics.median)
    samples[READ_AND_STORE] = [a + b for a, b in zip(samples[READ], samples[STORE], strict=True)]
    job = f"{scheme} to f32, 8 Mi elements in memory, one thread"
    rows = [table.add(job, "gguf-py", Comparison(samples["ours"], samples["gguf-py"]), target=10)]
    ahead = False
    if library is not None:
        compared = Comparison(samples["kernel"], samples["ggml's C"])
        ahead = compared.ratio() >= AHEAD
        rows.append(table.add(f"{job}, the kernel", "ggml's C", compared, target=AHEAD))
    for limit, goal in ((STORE, None if ahead else 0.9), (READ_AND_STORE, None)):
        compared = Comparison(samples["kernel"], samples[limit])
        rows.append(table.add(f"{job}, the kernel", limit, compared, target=goal))
    report(sides["ours"], rows, rounds=3)


def test_a_whole_model(table, report) -> None:
    """Llama-3.2-1B in Q4_0, 1.1 GB, to 4.9 GB of f32."""
    if files.available_memory() < 14 << 30:
        pytest.skip("needs 14 GiB of memory")
    path = files.CACHE / f"llama-1b-q4_0-v{files.VERSION}.gguf"
    if not path.exists():
        safeload.convert(files.llama_folder(), path, quantize="q4_0", raw=True)  # there is no tokenizer

    def by_hand() -> dict[str, np.ndarray]:
        return {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}

    def ready() -> None:
        if not files.cached(path):
            files.warm(path)
        release()
        files.settle(5 << 30)

    sides = {"ours": lambda: safeload.load(path, dtype="float32"), "gguf-py": by_hand}
    samples = race(sides, files.LARGE_ROUNDS, check=same_arrays, prepare=ready)
    row = table.add("load a Q4_0 model of 1.1 GB as f32", "gguf-py", Comparison(samples["ours"], samples["gguf-py"]))
    report(sides["ours"], [row], rounds=1, prepare=ready)
