"""Conversions in pieces: two workers against one process, and what a plan of a terabyte takes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import files
import numpy as np
import pytest
from compare import Comparison, race, release

import safeload
from safeload.numpy import save_file

ROUNDS = 5
LAYERS = SHARDS = 8
ONE = "safeload, one process with all threads"

_PLAN = """
import json, sys, time, safeload
def peak():  # ru_maxrss begins with the memory of the process that started this one
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
begin, before = time.perf_counter(), peak()
plan = safeload.plan_convert(sys.argv[1], "never-written", dtype="float32", max_shard_size="10GB")
took, grown = time.perf_counter() - begin, peak() - before
print(json.dumps([took, grown, len(json.dumps(plan))]))
"""


@pytest.fixture(scope="session")
def model() -> Path:
    """2 GB of fp8 in 8 shards, which become 4 GB of bf16."""
    return files.fp8_folder(LAYERS, SHARDS)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory where there is one: what is measured is not the disk."""
    root = Path("/dev/shm") if os.path.isdir("/dev/shm") else files.CACHE
    if shutil.disk_usage(root).free < 14 << 30:
        pytest.skip("needs 14 GB of memory for files")
    folder = root / f"safeload-pieces-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 24):
                digest.update(block)
        found[path.name] = digest.hexdigest()
    return found


def _same(ours: Path, theirs: Path) -> None:
    assert _digests(ours) == _digests(theirs)


@contextmanager
def _workers(engine: str, count: int) -> Iterator[Any]:
    """An executor with workers that have imported safeload."""
    if engine == "processes":
        with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield _ready(pool, count)
        return
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        yield _ready(client.get_executor(pure=False), count)


def _ready(executor: Any, count: int) -> Any:
    for future in [executor.submit(safeload.quantize, [0.0] * 32, "q8_0") for _ in range(4 * count)]:
        future.result()
    return executor


def _convert(model: Path, folder: Path, executor: Any = None) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    safeload.convert(model, folder, dtype="bfloat16", max_shard_size="600MB", executor=executor)
    return folder


@pytest.mark.parametrize("engine", ["processes", "Dask"])
def test_two_workers(model: Path, place: Path, engine: str, table, report) -> None:
    """With two cores one process with two threads keeps both busy, and hashes nothing: what counts is that two workers
    take half as long as one."""
    for path in model.glob("*.safetensors"):
        files.warm(path)
    alone = "the same with one worker"
    with _workers(engine, 2) as two, _workers(engine, 1) as one:
        sides = {
            "ours": partial(_convert, model, place / "ours", two),
            alone: partial(_convert, model, place / "alone", one),
            ONE: partial(_convert, model, place / "one"),
        }
        samples = race(sides, ROUNDS, check=_same, prepare=release)
        job = f"fp8 folder of 2 GB to bf16 in memory, two workers ({engine})"
        rows = [table.add(job, peer, Comparison(samples["ours"], samples[peer])) for peer in (alone, ONE)]
        report(sides["ours"], rows, rounds=1, prepare=release)


def test_one_piece_at_a_time(model: Path, place: Path, table, report) -> None:
    """What a worker with one core does: the rate from which the docs say what more machines would take."""
    options = {"dtype": "bfloat16", "max_shard_size": "600MB", "overwrite": True}
    plan = safeload.plan_convert(model, place / "ours", **options)
    piece = plan.pieces[0]

    def ours() -> Any:
        shutil.rmtree(place / "ours", ignore_errors=True)
        return safeload.run_piece(piece, threads=1)

    def copied() -> Any:
        return shutil.copyfile(model / "model-00001-of-00008.safetensors", place / "copy")

    limit = "limit: cp of its source, half the bytes"
    samples = race({"ours": ours, limit: copied}, ROUNDS, prepare=release)
    job = f"a piece on one thread, {piece['nbytes'] / 1e6:.0f} MB of bf16 written and hashed"
    report(ours, [table.add(job, limit, Comparison(samples["ours"], samples[limit]))], rounds=1, prepare=release)


TINY = 100_000


@pytest.fixture
def tiny(place: Path) -> Path:
    """A file of 100,000 tensors of 16 bytes."""
    names = [f"model.layers.{k // 100}.experts.{k % 100}.scale" for k in range(TINY)]
    path = place / "tiny.safetensors"
    save_file(dict.fromkeys(names, np.arange(4, dtype=np.float32)), path)
    return path


def test_plan_of_tiny_tensors(tiny: Path, place: Path, table, report) -> None:
    def plan() -> Any:
        return safeload.plan_convert(tiny, place / "never-written", dtype="bfloat16")

    samples = race({"ours": plan}, ROUNDS, prepare=release)["ours"]
    limit = Comparison(samples, [3e-6 * TINY] * len(samples))
    report(plan, [table.add(f"plan of {TINY:,} tiny tensors", "limit: 3 us a tensor", limit, target=1)], rounds=1)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_tiny_tensors_on_an_executor(tiny: Path, place: Path, engine: str, table, report) -> None:
    """A piece is planned, opened, hashed and checked too: at most twice the time of a call without an executor."""
    with ThreadPoolExecutor(2) if engine == "threads" else _workers(engine, 2) as executor:
        sides = {
            "ours": partial(_convert, tiny, place / "ours", executor),
            "convert": partial(_convert, tiny, place / "one"),
        }
        samples = race(sides, ROUNDS, check=_same, prepare=release)
        job = f"{TINY:,} tiny tensors to bf16 with executor= ({engine})"
        row = table.add(job, "without executor=", Comparison(samples["ours"], samples["convert"]), at_most=2)
        report(sides["ours"], [row], rounds=1, prepare=release)


READING = {
    "stats": lambda path, executor=None: safeload.stats(path, executor=executor),
    "diff": lambda path, executor=None: safeload.diff(path, path, executor=executor).tensors,
    "check": lambda path, executor=None: safeload.check(path, executor=executor).stats,
}


@pytest.mark.parametrize("operation", READING)
def test_tiny_tensors_are_read_on_an_executor(tiny: Path, operation: str, table, report) -> None:
    """A piece opens the file again, and its results travel as lists: at most twice the time of a single call."""
    with ThreadPoolExecutor(2) as executor:
        sides = {"ours": partial(READING[operation], tiny, executor), "whole": partial(READING[operation], tiny)}
        samples = race(sides, ROUNDS, check=_equal, prepare=release)
        job = f"{operation} of {TINY:,} tiny tensors with executor= (threads)"
        row = table.add(job, "without executor=", Comparison(samples["ours"], samples["whole"]), at_most=2)
        report(sides["ours"], [row], rounds=1, prepare=release)


def _equal(ours: Any, theirs: Any) -> None:
    assert ours == theirs


def _terabyte(folder: Path, tensors: int) -> Path:
    """200 sparse shards of 5 GiB with this many tensors in each."""
    folder.mkdir()
    weight_map = {}
    size = (5 << 30) // tensors // 2 * 2
    for shard in range(200):
        names = [f"model.layers.{shard}.mlp.experts.{k}.down_proj.weight" for k in range(tensors)]
        spans = {
            name: {"dtype": "BF16", "shape": [size // 2], "data_offsets": [k * size, (k + 1) * size]}
            for k, name in enumerate(names)
        }
        header = json.dumps(spans).encode()
        header += b" " * (-len(header) % 8)
        file = f"model-{shard + 1:05}-of-00200.safetensors"
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(header)) + header)
            out.truncate(8 + len(header) + tensors * size)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("tensors", [20, 450])
def test_plan_of_a_terabyte(tmp_path: Path, tensors: int, table, report) -> None:
    folder = _terabyte(tmp_path / "terabyte", tensors)

    def plan() -> list[float]:
        done = subprocess.run([sys.executable, "-I", "-c", _PLAN, folder], capture_output=True, text=True, check=True)
        found: list[float] = json.loads(done.stdout)
        return found

    runs = [plan() for _ in range(3)]
    count = 200 * tensors
    job = f"plan of 1 TiB in 200 shards, {count:,} tensors"
    took = table.add(job, "limit: 60 s", Comparison([one[0] for one in runs], [60.0] * 3), target=1)
    grown = Comparison([one[1] for one in runs], [4096.0 * (8192 + count)] * 3)
    memory = table.add(f"{job}, growth of peak memory", "limit: 32 MiB, 4 KiB a tensor", grown, target=1, unit="B")
    text = Comparison([one[2] for one in runs], [100.0 * count] * 3)
    size = table.add(f"{job}, as JSON", "limit: 100 KB for 1,000", text, target=1, unit="B")
    report(plan, [took, memory, size], rounds=1)
