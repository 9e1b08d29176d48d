"""Quantization to ggml's types against ggml's C, and of a whole model against llama-quantize, with two threads each.

`GGML_LIBRARY` is the path of a libggml-base, `LLAMA_QUANTIZE` that of a llama-quantize, both built from the same
source: `cmake -B build -DGGML_NATIVE=OFF && cmake --build build --target llama-quantize`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import files
import ml_dtypes
import numpy as np
import pytest
from builders import ggml_inputs, llama_models
from compare import Comparison, race
from limits import shared

import safeload

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
    report(ours, [table.add(job, peer, Comparison(samples["ours"], samples[peer]), target=1.5)], rounds=2)


def _config() -> dict[str, Any]:
    config = {**llama_models.listed()["llama3"]["config"], "tie_word_embeddings": False, "vocab_size": VOCABULARY}
    config |= {"num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    return config | {"hidden_size": WIDTH, "intermediate_size": INNER, "max_position_embeddings": 8192}


def _tensors() -> dict[str, np.ndarray]:
    """The tensors of a model, views of 1 GiB of bf16, each from another element on."""
    rng = np.random.default_rng(8)
    block = rng.standard_normal(16_777_213, np.float32) * np.float32(0.02)
    # Multiples of 2^-20 are the same numbers in f16, so that llama-quantize gives equal blocks from f16.
    block = np.round(block * np.float32(1 << 20)) * np.float32(2.0**-20)
    values = np.resize(block.astype(ml_dtypes.bfloat16), VOCABULARY * WIDTH + 1_000_000)
    parts = {"self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (KEYS, WIDTH), "self_attn.v_proj": (KEYS, WIDTH)}
    parts |= {"self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH)}
    parts["mlp.down_proj"] = (WIDTH, INNER)
    shapes = {"lm_head.weight": (VOCABULARY, WIDTH), "model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    tensors = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{part}.weight": shape for part, shape in parts.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = np.ones(WIDTH, ml_dtypes.bfloat16)
    tensors["model.norm.weight"] = np.ones(WIDTH, ml_dtypes.bfloat16)
    for begin, (name, shape) in zip(rng.integers(0, 1_000_000, len(shapes)), shapes.items(), strict=True):
        tensors[name] = values[begin : begin + shape[0] * shape[1]].reshape(shape)
    return tensors


def _write(folder: Path) -> None:
    """Write a model as the Hub distributes it."""
    folder.mkdir(parents=True)
    safeload.save(_tensors(), folder, max_shard_size="5GB")
    for file in sorted((llama_models.DATA / "llama3").iterdir()):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(_config()))


@pytest.fixture(scope="module")
def folder() -> Path:
    """8 GB of bf16 with the shapes of Llama-3-8B."""
    path = files.CACHE / f"llama-{LAYERS}-layers-v{files.VERSION}"
    if not (path / "config.json").exists():
        shutil.rmtree(path, ignore_errors=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, __file__, str(path)]  # in a process of its own, which gives its memory back
        subprocess.run(command, check=True, env=environment)
    return path


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[Path]:
    """The model as a GGUF file."""
    path = folder.with_name(f"{folder.name}-{request.param}.gguf")
    safeload.convert(folder, path, dtype=request.param, overwrite=True)
    yield path
    path.unlink()


_CONVERT = """
import sys, safeload
safeload.convert(sys.argv[1], sys.argv[2], quantize=sys.argv[3], overwrite=True, threads=int(sys.argv[4]))
with open("/proc/self/status") as status:
    print(next(line for line in status if line.startswith("VmHWM")).split()[1])
"""


def _ours(source: Path, file_type: str, peaks: list[int]) -> Path:
    command = [sys.executable, "-I", "-c", _CONVERT, source, files.CACHE / "ours.gguf", file_type, str(THREADS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peaks.append(int(done.stdout) << 10)
    return files.CACHE / "ours.gguf"


def _theirs(source: Path, file_type: str) -> Path:
    assert PROGRAM is not None
    command = [PROGRAM, source, files.CACHE / "theirs.gguf", file_type.upper(), str(THREADS)]
    subprocess.run(command, check=True, capture_output=True)
    return files.CACHE / "theirs.gguf"


def _same(one: Path, other: Path) -> None:
    """Compare the blocks of all tensors."""
    with safeload.open(one) as a, safeload.open(other) as b:
        assert set(a) == set(b)
        for name in a:
            x, y = a[name], b[name]
            assert np.array_equal(getattr(x, "data", x), getattr(y, "data", y)), name


@pytest.mark.skipif(PROGRAM is None, reason="LLAMA_QUANTIZE names no llama-quantize")
@pytest.mark.parametrize("file_type", ["q4_k_m", "q8_0"])
@pytest.mark.parametrize("model", ["float16"], indirect=True)
def test_folder_to_gguf(file_type: str, folder: Path, model: Path, table, report) -> None:
    """A model from the Hub; llama-quantize needs it as a GGUF file, which takes it time that is not counted."""
    peaks: list[int] = []
    sides = {"ours": lambda: _ours(folder, file_type, peaks), "llama-quantize": lambda: _theirs(model, file_type)}
    size = sum(shard.stat().st_size for shard in folder.glob("*.safetensors"))
    _race(f"folder of {size / 1e9:.1f} GB of BF16", "llama-quantize from F16", sides, file_type, peaks, table, report)


@pytest.mark.skipif(PROGRAM is None, reason="LLAMA_QUANTIZE names no llama-quantize")
@pytest.mark.parametrize("file_type", ["q4_k_m", "q8_0"])
@pytest.mark.parametrize("model", ["bfloat16"], indirect=True)
def test_gguf_to_gguf(file_type: str, model: Path, table, report) -> None:
    peaks: list[int] = []
    sides = {"ours": lambda: _ours(model, file_type, peaks), "llama-quantize": lambda: _theirs(model, file_type)}
    _race(
        f"{model.stat().st_size / 1e9:.1f} GB of BF16 in GGUF", "llama-quantize", sides, file_type, peaks, table, report
    )


def _race(what, peer, sides, file_type, peaks, table, report) -> None:
    """Each side runs once, because llama-quantize takes minutes."""
    try:
        samples = race(sides, 1, warm=False)
        _same(files.CACHE / "ours.gguf", files.CACHE / "theirs.gguf")
        job = f"{what} to {file_type}, two threads"
        rows = [table.add(job, peer, Comparison(samples["ours"], samples["llama-quantize"]), target=1.5)]
        limit = Comparison([float(max(peaks))], [float(1 << 30)])
        rows.append(table.add("peak memory of that, mapped pages included", "limit: 1 GiB", limit, target=1, unit="B"))
        report(os.getpid, rows, rounds=1)  # the rows are in extra_info
    finally:
        for name in ("ours.gguf", "theirs.gguf"):
            (files.CACHE / name).unlink(missing_ok=True)


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
