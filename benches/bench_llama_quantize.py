"""Quantization to ggml's types against ggml's C, and GGUF to GGUF against llama-quantize, with two threads each.

`GGML_LIBRARY` is the path of a libggml-base, `LLAMA_QUANTIZE` that of a llama-quantize, both built from the same
source: `cmake -B build -DGGML_NATIVE=OFF && cmake --build build --target llama-quantize`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import files
import ml_dtypes
import numpy as np
import pytest
from builders import ggml_inputs
from compare import Comparison, race
from limits import shared

import safeload
from safeload import gguf

ROUNDS = 5
THREADS = 2
ROWS, COLUMNS = 4096, 4096  # a matrix of a model with 8 billion weights, 64 MiB of f32
LIBRARY, PROGRAM = os.environ.get("GGML_LIBRARY"), os.environ.get("LLAMA_QUANTIZE")
# The layers of an 8 GB file of bf16: Llama-3-8B's matrices, 16 of 32 layers. Fewer for a try.
LAYERS = int(os.environ.get("SAFELOAD_BENCH_LAYERS", "16"))
WIDTH, INNER, KEYS, VOCABULARY = 4096, 14336, 1024, 128_256


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    """As weights are distributed."""
    return np.random.default_rng(6).standard_normal((ROWS, COLUMNS), np.float32) * np.float32(0.02)


@pytest.mark.skipif(LIBRARY is None, reason="GGML_LIBRARY names no libggml-base")
@pytest.mark.parametrize("importance", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("scheme", ggml_inputs.TYPES)
def test_types_from_f32(scheme: str, importance: bool, weights, table, report) -> None:
    if importance and scheme in ("q8_0", "mxfp4", "tq1_0", "tq2_0"):
        pytest.skip("importance changes nothing")
    library = ggml_inputs.load(LIBRARY)
    columns = np.random.default_rng(7).random(COLUMNS, np.float32) if importance else None
    some = weights if scheme in ("q4_0", "q8_0", "tq1_0", "tq2_0") and not importance else weights[: ROWS // 8]
    blocks = ggml_inputs.quantize(library, scheme, some[:1], columns)
    theirs = np.ones((len(some), blocks.shape[1]), np.uint8)

    def work(begin: int, end: int) -> None:
        theirs[begin:end] = ggml_inputs.quantize(library, scheme, some[begin:end], columns)

    share = shared(work, len(some), THREADS)
    options = {"importance": columns, "rounding": "ggml", "threads": THREADS}
    ours = lambda: safeload.quantize(some, scheme, **options).data  # noqa: E731
    peer = "ggml's C"
    sides = {"ours": ours, peer: lambda: share() or theirs}
    samples = race(sides, ROUNDS, check=np.testing.assert_array_equal)
    what = " with importance" if importance else ""
    job = f"{scheme}{what} from f32, {some.size >> 20} Mi elements in memory, two threads"
    report(ours, [table.add(job, peer, Comparison(samples["ours"], samples[peer]), target=1)], rounds=2)


def _model(path: Path) -> None:
    """Write a model of bf16 layer by layer, so that it takes little memory."""
    number, rng = np.uint32, np.random.default_rng(8)
    sizes = {"block_count": LAYERS, "context_length": 8192, "embedding_length": WIDTH, "feed_forward_length": INNER}
    sizes |= {"attention.head_count": 32, "attention.head_count_kv": 8}
    metadata = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    metadata |= {f"llama.{key}": number(value) for key, value in sizes.items()}
    metadata["llama.attention.layer_norm_rms_epsilon"] = np.float32(1e-5)
    shapes = {"token_embd.weight": (VOCABULARY, WIDTH), "output.weight": (VOCABULARY, WIDTH)}
    parts = {"attn_q": (WIDTH, WIDTH), "attn_k": (KEYS, WIDTH), "attn_v": (KEYS, WIDTH), "attn_output": (WIDTH, WIDTH)}
    parts |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    base = rng.standard_normal((VOCABULARY, WIDTH), np.float32) * np.float32(0.02)
    bits = (base.view(np.uint32) >> 16).astype(np.uint16)
    values = bits.view(ml_dtypes.bfloat16).reshape(-1)
    tensors = {name: values[: shape[0] * shape[1]].reshape(shape) for name, shape in shapes.items()}
    norm = np.ones(WIDTH, np.float32)
    tensors |= {f"blk.{layer}.{part}_norm.weight": norm for layer in range(LAYERS) for part in ("attn", "ffn")}
    gguf.save_file({**tensors, "output_norm.weight": norm}, path, metadata)


@pytest.fixture(scope="module")
def model() -> Path:
    """8 GB of bf16 with the shapes of Llama-3-8B."""
    path = files.CACHE / f"llama-{LAYERS}-layers-v{files.VERSION}.gguf"
    if not path.exists():
        files.CACHE.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, __file__, str(path)]  # in a process of its own, which gives its memory back
        subprocess.run(command, check=True, env=environment)
    return path


_CONVERT = """
import sys, safeload
safeload.convert(sys.argv[1], sys.argv[2], quantize=sys.argv[3], overwrite=True, threads=int(sys.argv[4]))
with open("/proc/self/status") as status:
    print(next(line for line in status if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.skipif(PROGRAM is None, reason="LLAMA_QUANTIZE names no llama-quantize")
@pytest.mark.parametrize("file_type", ["q4_k_m", "q8_0"])
def test_gguf_to_gguf(file_type: str, model: Path, table, report) -> None:
    ours_path, theirs_path = files.CACHE / "ours.gguf", files.CACHE / "theirs.gguf"
    peaks = []

    def ours() -> Path:
        command = [sys.executable, "-I", "-c", _CONVERT, model, ours_path, file_type, str(THREADS)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks.append(int(done.stdout) << 10)
        return ours_path

    def theirs() -> Path:
        command = [PROGRAM, model, theirs_path, file_type.upper(), str(THREADS)]
        subprocess.run(command, check=True, capture_output=True)
        return theirs_path

    def same(one: Path, other: Path | None) -> None:
        if other is not None:
            assert subprocess.run(["cmp", one, other]).returncode == 0

    try:
        samples = race({"ours": ours, "llama-quantize": theirs}, 2, check=same)
        comparison = Comparison(samples["ours"], samples["llama-quantize"])
        job = f"{model.stat().st_size / 1e9:.1f} GB of BF16 in GGUF to {file_type}, two threads"
        rows = [table.add(job, "llama-quantize", comparison, target=1.5)]
        report(ours, rows, rounds=1)
        print(f"\n{file_type}: peak memory {max(peaks) / 2**20:.0f} MiB, mapped pages included")
    finally:
        for path in (ours_path, theirs_path):
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    _model(Path(sys.argv[1]))
