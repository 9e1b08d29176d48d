"""Stacking layers into one tensor, and converting a folder into one file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import files
import numpy as np
import pytest
import safetensors.numpy
from bench_load import threads
from compare import Comparison, race, release, same_arrays, same_bytes
from limits import read_and_store

import safeload
import safeload.numpy
from safeload import Layout, StackedTensor

ROUNDS = files.LARGE_ROUNDS
LAYERS, SHAPE = 24, (6144, 2048)


@pytest.fixture(scope="session")
def layers() -> Path:
    """24 matrices of 6144 x 2048 in F16, 604 MB."""
    path = files.CACHE / f"layers-v{files.VERSION}.safetensors"
    entries = [files.Entry(f"blocks.{k}.qkv.weight", "F16", SHAPE) for k in range(LAYERS)]
    files.make("layers", entries, path=path, block=files.weights())
    files.warm(path)
    return path


def prepare(nbytes: int) -> Callable[[], None]:
    def prepare() -> None:
        release()
        files.settle(nbytes)

    return prepare


@pytest.mark.parametrize("transpose", [False, True], ids=["as they are", "transposed"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_stack(layers: Path, transpose: bool, dtype: str, table, report) -> None:
    layout = Layout("qkv", [StackedTensor("qkv", "blocks.{}.qkv.weight", transpose)])

    def by_hand(load: Callable[[Path], dict[str, np.ndarray]]) -> Callable[[], dict[str, np.ndarray]]:
        def run() -> dict[str, np.ndarray]:
            tensors = load(layers)
            parts = [tensors[f"blocks.{k}.qkv.weight"] for k in range(LAYERS)]
            stacked = np.stack([part.T if transpose else part for part in parts]).astype(dtype, copy=False)
            return {"qkv": np.ascontiguousarray(stacked)}  # np.stack of transposed views moves nothing across

        return run

    times = np.dtype(dtype).itemsize // 2
    limit = f"limit: read the file, store its bytes {'once' if times == 1 else 'twice'} in fresh memory"
    peers = {
        "safetensors.numpy, np.stack, ascontiguousarray": by_hand(safetensors.numpy.load_file),
        "safeload.numpy, np.stack, ascontiguousarray": by_hand(safeload.numpy.load_file),
    }
    sides = {
        "ours": lambda: dict(safeload.stack(layers, layout, dtype=dtype)),
        **peers,
        limit: read_and_store(layers, times, threads()),
    }

    def check(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray] | np.ndarray) -> None:
        if isinstance(theirs, dict):
            same_arrays(ours, theirs)

    ready = prepare(3 << 30)
    samples = race(sides, ROUNDS, check=check, prepare=ready)
    job = f"stack 24 layers of 6144 x 2048 f16 {'transposed ' if transpose else ''}to {dtype}"
    goals: dict[str, float | None] = dict.fromkeys(peers, 3 if transpose else None) | {limit: None}
    rows = [
        table.add(job, name, Comparison(samples["ours"], samples[name]), target=goal) for name, goal in goals.items()
    ]
    report(sides["ours"], rows, rounds=1, prepare=ready)


def test_a_folder_to_one_f16_file(tmp_path: Path, table, report) -> None:
    folder = files.llama_folder()
    if shutil.disk_usage(tmp_path).free < 10 << 30 or files.available_memory() < 12 << 30:
        pytest.skip("needs 10 GB of disk and 12 GiB of memory")

    def script() -> Path:
        """What a user would write, on disk as ours is."""
        tensors = {}
        for shard in sorted(folder.glob("*.safetensors")):
            tensors.update({n: a.astype(np.float16) for n, a in safetensors.numpy.load_file(shard).items()})
        out = tmp_path / "theirs.safetensors"
        safetensors.numpy.save_file(tensors, out)
        with out.open("rb") as file:
            os.fsync(file.fileno())
        return out

    def ours() -> Path:
        out = tmp_path / "ours.safetensors"
        safeload.convert(folder, out, dtype="float16", overwrite=True)
        return out

    def check(one: Path, other: Path) -> None:
        a, b = safeload.numpy.load_file(one), safeload.numpy.load_file(other)
        assert a.keys() == b.keys()
        assert all(same_bytes(a[name], b[name]) for name in a)

    def ready() -> None:
        for path in tmp_path.iterdir():
            path.unlink()
        os.sync()
        for shard in folder.glob("*.safetensors"):
            if not files.cached(shard):
                files.warm(shard)
        release()
        files.settle(6 << 30)

    sides = {"ours": ours, "safetensors.numpy, astype, save, fsync": script}
    samples = race(sides, ROUNDS, check=check, prepare=ready)
    rows = [
        table.add("2.5 GB bf16 folder to one f16 file", name, Comparison(samples["ours"], samples[name]))
        for name in sides
        if name != "ours"
    ]
    report(ours, rows, rounds=1, prepare=ready)
