"""Torch checkpoints against torch itself, which is installed for it: `pip install torch`."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import files
import numpy as np
import pytest
from compare import Comparison, race, release, same_list

import safeload
from safeload.formats.torch.globals import ALLOWED, read_persistent_id
from safeload.formats.unpickle import unpickle

torch = pytest.importorskip("torch", reason="torch is absent")

PEER = "torch.load(mmap=True, weights_only=True)"
# As many as make 400,000 opcodes with 107,000 memo entries.
MANY = 13_400


def _save(name: str, state: Callable[[], dict[str, Any]]) -> Path:
    path = files.CACHE / f"{name}-v{files.VERSION}.pt"
    if not path.exists():
        files.CACHE.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        torch.save(state(), temporary)
        temporary.rename(path)
    return path


def _small(count: int) -> Path:
    return _save(f"torch-{count}", lambda: {e.name: torch.ones(e.shape) for e in files.small(count)})


def _list_ours(path: Path) -> list[str]:
    with safeload.open(path) as checkpoint:
        return list(checkpoint)


def _list_theirs(path: Path) -> list[str]:
    return list(torch.load(path, mmap=True, weights_only=True))


_TIMED = "import sys, time; t = time.perf_counter(); {}; print(len(names), time.perf_counter() - t)"
_PROGRAMS = {
    "ours": "import safeload; names = list(safeload.open(sys.argv[1]))",
    PEER: "import torch; names = list(torch.load(sys.argv[1], mmap=True, weights_only=True))",
}


def test_open_and_list_with_imports(table, report) -> None:
    path, rounds = _small(300), 20
    # Both sides with their byte code, as they are when installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def seconds(program: str) -> float:
        # Not in the repository, where the source tree would be found first.
        command = [sys.executable, "-c", _TIMED.format(_PROGRAMS[program]), str(path)]
        found = subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=files.CACHE, env=environment
        ).stdout.split()
        assert found[0] == "300"
        return float(found[1])

    samples: dict[str, list[float]] = {program: [] for program in _PROGRAMS}
    order = list(_PROGRAMS)
    for program in order:
        seconds(program)  # byte code written, files in the page cache
    for _ in range(rounds):
        random.shuffle(order)
        for program in order:
            samples[program].append(seconds(program))
    job = "open a torch zip of 300 tensors and list it, imports included"
    row = table.add(job, PEER, Comparison(samples["ours"], samples[PEER]), target=10)
    report(lambda: seconds("ours"), [row], rounds=3)


@pytest.mark.parametrize(("count", "rounds"), [(300, 40), (MANY, 7)])
def test_open_and_list_with_torch_imported(count: int, rounds: int, table, report) -> None:
    path = _small(count)
    samples = race({"ours": lambda: _list_ours(path), PEER: lambda: _list_theirs(path)}, rounds, check=same_list)
    job = f"open a torch zip of {count:,} tensors and list it, torch already imported"
    target = 4 if count == MANY else None
    row = table.add(job, PEER, Comparison(samples["ours"], samples[PEER]), target=target)
    report(lambda: _list_ours(path), [row], rounds=rounds)


def test_load_many(table, report) -> None:
    path = _small(MANY)

    def ours() -> dict[str, np.ndarray]:
        return safeload.load(path)

    def theirs() -> dict[str, Any]:
        return dict(torch.load(path, mmap=True, weights_only=True))

    def check(ours: dict[str, np.ndarray], theirs: dict[str, Any]) -> None:
        assert list(ours) == list(theirs)
        assert all(np.array_equal(ours[name], theirs[name].numpy()) for name in list(ours)[::100])

    samples = race({"ours": ours, PEER: theirs}, 7, check=check)
    job = f"load a torch zip of {MANY:,} tensors, torch already imported"
    row = table.add(job, PEER, Comparison(samples["ours"], samples[PEER]), target=4)
    report(ours, [row], rounds=7)


class _Unchecked(pickle.Unpickler):
    """The standard library's machine in C, for which globals are functions that return nothing."""

    def find_class(self, module: str, name: str) -> Callable[..., None]:
        return lambda *args: None

    def persistent_load(self, value: Any) -> None:
        return None


def test_400_000_opcodes(table, report) -> None:
    from torch import _weights_only_unpickler

    with zipfile.ZipFile(_small(MANY)) as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    storage = torch.storage.TypedStorage(wrap_storage=torch.UntypedStorage(32), dtype=torch.float32, _internal=True)

    def ours() -> list[str]:
        storages: dict[str, Any] = {}
        return list(unpickle(data, ALLOWED, lambda value: read_persistent_id(value, storages), path="").value)

    def theirs() -> list[str]:
        unpickler = _weights_only_unpickler.Unpickler(BytesIO(data), encoding="utf-8")
        unpickler.persistent_load = lambda value: storage
        return list(unpickler.load())

    def limit() -> list[str]:
        return list(_Unchecked(BytesIO(data)).load())

    restricted, unchecked = "torch's restricted unpickler", "limit: pickle in C, nothing checked, no tensor described"
    samples = race({"ours": ours, restricted: theirs, unchecked: limit}, 7, check=same_list)
    job = "unpickle 400,000 opcodes"
    row = table.add(job, restricted, Comparison(samples["ours"], samples[restricted]), target=4)
    rows = [row, table.add(job, unchecked, Comparison(samples["ours"], samples[unchecked]))]
    report(ours, rows, rounds=5)


def test_load_as_f32(llama: Path, table, report) -> None:
    import safetensors.torch

    path = _save("torch-llama-1b-bf16", lambda: safetensors.torch.load_file(llama))
    files.warm(path)
    peer = f"{PEER}, float()"

    def prepare() -> None:
        if not files.cached(path):
            files.warm(path)
        release()
        files.settle(2 * path.stat().st_size)

    def theirs() -> dict[str, Any]:
        return {name: t.float() for name, t in torch.load(path, mmap=True, weights_only=True).items()}

    def check(ours: dict[str, np.ndarray], theirs: dict[str, Any]) -> None:
        assert list(ours) == list(theirs)
        for name, array in ours.items():
            assert np.array_equal(array[..., ::7], theirs[name].numpy()[..., ::7], equal_nan=True), name

    sides = {"ours": lambda: safeload.load(path, dtype="float32"), peer: theirs}
    samples = race(sides, files.LARGE_ROUNDS, check=check, prepare=prepare)
    row = table.add(
        "load a torch zip of 2.5 GB bf16 as f32", peer, Comparison(samples["ours"], samples[peer]), target=1.5
    )
    report(sides["ours"], [row], rounds=1, prepare=prepare)
