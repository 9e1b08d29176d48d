"""Blocks of ggml to f32 in memory, against gguf-py and ggml's compiled reference."""

from __future__ import annotations

import ggml_reference
import numpy as np
import pytest
from compare import Comparison, race, same_bytes
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from safeload import QuantizedTensor, dtypes

ROUNDS = 5
SCHEMES = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4", "iq4_nl"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_thread(scheme: str, table, report) -> None:
    row = dtypes.BLOCK_TYPES[scheme]
    count = 8 << 20
    data = np.resize(np.random.default_rng(7).integers(0, 60, 1 << 20, np.uint8), row.nbytes(count))
    q = QuantizedTensor(scheme, (count,), data)
    kind = GGMLQuantizationType[scheme.upper()]
    out = np.ones(count, np.float32)
    sides = {
        "ours": lambda: q.dequantize(out=out, threads=1),
        "gguf-py": lambda: dequantize(data.reshape(1, -1), kind).ravel(),
    }
    library = ggml_reference.load()
    if library is not None:
        sides["ggml's C"] = lambda: ggml_reference.dequantize(library, scheme, data, count)

    def check(ours: np.ndarray, theirs: np.ndarray) -> None:
        assert same_bytes(ours, theirs)

    samples = race(sides, ROUNDS, check=check)
    job = f"{scheme} to f32, 8 Mi elements in memory, one thread"
    rows = [table.add(job, name, Comparison(samples["ours"], samples[name])) for name in sides if name != "ours"]
    report(sides["ours"], rows, rounds=3)
