"""Opening a file and listing its tensors.

`FREE_THREADED_PYTHON` is the path of an interpreter without the GIL in which safeload is installed (not from another
checkout), such as the one that tests/pythons/run.sh builds.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import files
import pytest
import safetensors
from compare import Comparison, race, same_list, spinning

import safeload

PEER = "safetensors.safe_open"
FREE_THREADED = os.environ.get("FREE_THREADED_PYTHON")

# Per file: rounds, calls to a sample, the ratio to be reached.
SIZES = {"n300": (100, 10, 2), "n100k": (15, 1, 10), "n100k_by_layer": (15, 1, 10)}


def _sides(path: Path) -> dict[str, Callable[[], list[str]]]:
    def ours() -> list[str]:
        with safeload.safe_open(path, framework="np") as file:
            return file.keys()

    def ours_open() -> list[str]:
        with safeload.open(path) as checkpoint:
            return list(checkpoint)

    def theirs() -> list[str]:
        with safetensors.safe_open(path, framework="np") as file:
            return list(file.keys())

    # What no reader in Python is spared: reading the header and making one str per name.
    header, data = files.header_of(path)
    names = "\n".join(header)

    def limit() -> list[str]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.pread(descriptor, data, 0)
        finally:
            os.close(descriptor)
        return names.split("\n")

    return {"safe_open": ours, "open": ours_open, PEER: theirs, "limit: read the header, make the names": limit}


@pytest.mark.parametrize("size", SIZES)
def test_open_and_list(size: str, table, report, request) -> None:
    rounds, number, target = SIZES[size]
    sides = _sides(request.getfixturevalue(size))
    samples = race(sides, rounds, check=same_list, number=number)
    rows = []
    for ours in ("safe_open", "open"):
        job = f"{ours} and list, {size}"
        rows.append(table.add(job, PEER, Comparison(samples[ours], samples[PEER]), target=target))
        limit = next(name for name in samples if name.startswith("limit"))
        rows.append(table.add(job, limit, Comparison(samples[ours], samples[limit])))
    report(sides["safe_open"], rows, rounds=rounds, number=number)


@pytest.mark.parametrize(("size", "rounds"), [("n300", 400), ("n100k", 25)])
def test_open_and_list_beside_a_spinning_thread(size: str, rounds: int, table, report, request) -> None:
    sides = _sides(request.getfixturevalue(size))
    sides = {name: side for name, side in sides.items() if not name.startswith("limit")}
    rows = []
    with spinning() as drift:
        samples = race(sides, rounds, check=same_list, prepare=drift)
        for ours in ("safe_open", "open"):
            for by in ("median", "mean"):
                job = f"{ours} and list, {size}, beside a spinning thread"
                rows.append(table.add(job, PEER, Comparison(samples[ours], samples[PEER]), target=1, by=by))
        report(sides["safe_open"], rows, rounds=rounds, prepare=drift)


@pytest.mark.parametrize(("size", "rounds", "files_each"), [("n300", 30, 20), ("n100k", 10, 1)])
def test_open_and_list_in_eight_threads(size: str, rounds: int, files_each: int, table, report, request) -> None:
    """Beside safetensors, and beside one thread that opens as many."""
    sides = _sides(request.getfixturevalue(size))

    def several(side: Callable[[], list[str]], count: int = files_each) -> list[str]:
        for _ in range(count):
            names = side()
        return names

    with ThreadPoolExecutor(8) as pool:

        def in_threads(side: Callable[[], list[str]]) -> Callable[[], list[str]]:
            return lambda: list(pool.map(several, [side] * 8))[-1]

        ours, one = in_threads(sides["open"]), "safeload.open in one thread"
        named = {"open": ours, PEER: in_threads(sides[PEER]), one: lambda: several(sides["open"], 8 * files_each)}
        samples = race(named, rounds, check=same_list)
        job = f"open and list, {size}, in 8 threads"
        rows = [
            table.add(job, PEER, Comparison(samples["open"], samples[PEER]), target=1),
            table.add(job, one, Comparison(samples["open"], samples[one])),
        ]
        report(ours, rows, rounds=rounds)


@pytest.mark.skipif(FREE_THREADED is None, reason="FREE_THREADED_PYTHON names no interpreter without the GIL")
@pytest.mark.parametrize(
    ("job", "size", "rounds", "calls"),
    [("open", "n300", 30, 200), ("open", "n100k", 10, 4), ("load_file", "n300", 30, 100)],
)
def test_eight_threads_without_the_gil(job: str, size: str, rounds: int, calls: int, table, request) -> None:
    """Beside one thread that does as much, in the same process."""
    assert FREE_THREADED is not None
    program = Path(__file__).with_name("eight_threads.py")
    path = request.getfixturevalue(size)
    done = subprocess.run(
        [FREE_THREADED, "-I", str(program), job, str(path), str(rounds), str(calls)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=os.sep,
    )
    samples = json.loads(done.stdout)
    what, one = ("open and list", "safeload.open") if job == "open" else (job, f"safeload.numpy.{job}")
    title = f"{what}, {size}, in 8 threads, CPython {samples['python']} without the GIL"
    table.add(title, f"{one} in one thread", Comparison(samples["threads"], samples["one"]), target=1.7)


@pytest.mark.parametrize("size", ["n300", "n100k"])
def test_open_and_describe(size: str, table, report, request) -> None:
    """Dtype and shape of every tensor too, as each side has them: ours are tuples, theirs lists."""
    path = request.getfixturevalue(size)
    rounds, number, _ = SIZES[size]

    def ours() -> dict[str, tuple[str, tuple[int, ...]]]:
        with safeload.open(path) as checkpoint:
            return {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}

    def theirs() -> dict[str, tuple[str, list[int]]]:
        with safetensors.safe_open(path, framework="np") as file:
            found = {}
            for name in file.keys():  # noqa: SIM118 - it has no other iteration
                tensor = file.get_slice(name)
                found[name] = (tensor.get_dtype(), tensor.get_shape())
            return found

    def check(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        assert {name: (dtype, list(shape)) for name, (dtype, shape) in ours.items()} == theirs

    samples = race({"ours": ours, "theirs": theirs}, rounds, check=check, number=number)
    row = table.add(
        f"open, dtype and shape of all, {size}",
        f"{PEER}, get_slice",
        Comparison(samples["ours"], samples["theirs"]),
        target=2,
    )
    report(ours, [row], rounds=rounds, number=number)
