"""Blocks of ggml to f32, in memory and out of a whole file, against gguf-py and ggml's compiled reference."""

from __future__ import annotations

import files
import numpy as np
import pytest
from builders import ggml_reference
from compare import Comparison, race, release, same_arrays, same_bytes
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

import safeload
from safeload import QuantizedTensor
from safeload.base import dtypes

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
        other = np.ones(count, np.float32)
        sides["ggml's C"] = lambda: ggml_reference.dequantize(library, scheme, data, count, other)

    def check(ours: np.ndarray, theirs: np.ndarray) -> None:
        assert same_bytes(ours, theirs)

    samples = race(sides, ROUNDS, check=check)
    job = f"{scheme} to f32, 8 Mi elements in memory, one thread"
    rows = [table.add(job, name, Comparison(samples["ours"], samples[name])) for name in sides if name != "ours"]
    report(sides["ours"], rows, rounds=3)


def test_a_whole_model(table, report) -> None:
    """Llama-3.2-1B in Q4_0, 1.1 GB, to 4.9 GB of f32."""
    if files.available_memory() < 14 << 30:
        pytest.skip("needs 14 GiB of memory")
    path = files.CACHE / f"llama-1b-q4_0-v{files.VERSION}.gguf"
    if not path.exists():
        safeload.convert(files.llama_folder(), path, quantize="q4_0")

    def by_hand() -> dict[str, np.ndarray]:
        return {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}

    def ready() -> None:
        if not files.cached(path):
            files.warm(path)
        release()
        files.settle(5 << 30)

    sides = {"ours": lambda: safeload.load(path, dtype="float32"), "gguf-py": by_hand}
    samples = race(sides, 3, check=same_arrays, prepare=ready)
    row = table.add("load a Q4_0 model of 1.1 GB as f32", "gguf-py", Comparison(samples["ours"], samples["gguf-py"]))
    report(sides["ours"], [row], rounds=1, prepare=ready)
