"""Orbax checkpoints: converting 1 GiB to safetensors and its memory, and one tensor of 20,000 chunks, against Orbax."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import files
import numpy as np
import pytest
import safetensors.numpy
from compare import Comparison, race, release

import safeload

orbax = pytest.importorskip("orbax.checkpoint")
pytest.importorskip("zstandard")

# Tensors of the checkpoint, and the shape of each: together 1 GiB of float32.
TENSORS, SHAPE = 16, (4096, 4096)
CHUNKS, CHUNK = 20_000, 4096
ROUNDS = 3
_GROWTH = """
import sys, safeload
def peak():  # ru_maxrss begins with the memory of the process that started this one
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
before = peak()
safeload.convert(sys.argv[1], sys.argv[2], overwrite=True)
print(peak() - before)
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder for checkpoints, in memory if there is one: the disk is not measured."""
    root = Path("/dev/shm") if os.path.isdir("/dev/shm") else files.CACHE
    if shutil.disk_usage(root).free < 5 << 30:
        pytest.skip("needs 5 GB of memory for files")
    folder = root / f"safeload-training-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def _save(folder: Path, tree: dict[str, np.ndarray], **save_args: Any) -> Path:
    if not folder.exists():
        arguments = {name: orbax.SaveArgs(**save_args) for name in tree}
        with orbax.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(folder, tree, save_args=arguments)
    return folder


def _restore(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    with orbax.PyTreeCheckpointer() as checkpointer:
        arguments = {name: orbax.RestoreArgs(restore_type=np.ndarray) for name in names}
        restored: dict[str, np.ndarray] = checkpointer.restore(folder, restore_args=arguments)
    return restored


@pytest.fixture(scope="module")
def gibibyte(place: Path) -> Path:
    """1 GiB in 16 tensors, each a compressed chunk of 64 MiB: the default of one process."""
    numbers = np.random.default_rng(0)
    return _save(place / "gibibyte", {f"t{k}": numbers.standard_normal(SHAPE, np.float32) for k in range(TENSORS)})


def test_convert_to_safetensors(gibibyte: Path, place: Path, table, report) -> None:
    names = [f"t{k}" for k in range(TENSORS)]

    def ours() -> object:
        return safeload.convert(gibibyte, place / "ours.safetensors", overwrite=True)

    def theirs() -> object:
        return safetensors.numpy.save_file(_restore(gibibyte, names), place / "theirs.safetensors")

    samples = race({"ours": ours, "theirs": theirs}, ROUNDS, prepare=release)
    assert safeload.diff(place / "ours.safetensors", place / "theirs.safetensors").same
    job = "Orbax checkpoint of 1 GiB to safetensors, in memory"
    row = table.add(job, "orbax, safetensors.numpy", Comparison(samples["ours"], samples["theirs"]), target=1)
    report(ours, [row], rounds=1, prepare=release)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak RSS is read from /proc")
def test_growth_of_memory(gibibyte: Path, place: Path, table, report) -> None:
    def grown() -> float:
        command = [sys.executable, "-I", "-c", _GROWTH, str(gibibyte), str(place / "grown.safetensors")]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    growth = Comparison([grown() for _ in range(ROUNDS)], [float(128 << 20)] * ROUNDS)
    job = "Orbax checkpoint of 1 GiB to safetensors, growth of peak memory"
    report(grown, [table.add(job, "limit: 128 MiB", growth, target=1, unit="B")], rounds=1)


def test_one_tensor_of_many_chunks(place: Path, table, report) -> None:
    tree = {"large": np.zeros(CHUNKS * CHUNK // 4, np.float32), "small": np.ones(CHUNK, np.float32)}
    folder = _save(place / "chunks", tree, chunk_byte_size=CHUNK)

    def ours() -> object:
        with safeload.open(folder) as checkpoint:
            return checkpoint["small"]

    samples = race({"ours": ours}, ROUNDS, prepare=release)
    job = f"open {CHUNKS:,} chunks and read a tensor of {CHUNK * 4 // 1024} KiB"
    row = table.add(job, "limit: 2 s", Comparison(samples["ours"], [2.0] * ROUNDS), target=1)
    report(ours, [row], rounds=1, prepare=release)
