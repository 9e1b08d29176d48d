"""Save tensors as they come and in the background, edit metadata, make and apply patches; against other tools."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import files
import numpy as np
import pytest
import safetensors.numpy
from bench_save import _empty, folder, tensors  # noqa: F401 - a fixture
from compare import Comparison, race, release

import safeload

# Bytes of a model, and of the tensors that a generator makes.
SIZE, EACH = 1 << 30, 64 << 20
ROUNDS = files.LARGE_ROUNDS


def produced(nbytes: int) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of 64 MiB, made one at a time."""
    for k in range(nbytes // EACH):
        yield f"t{k}", np.full(EACH // 4, k, np.float32)


def test_save_as_tensors_come(folder: Path, table, report) -> None:  # noqa: F811
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: safeload.save(produced(SIZE), folder / "ours.safetensors", overwrite=True, durable=False),
        "theirs": lambda: safetensors.numpy.save_file(dict(produced(SIZE)), folder / "theirs.safetensors"),
    }

    def prepare() -> None:
        _empty(folder)
        release()
        files.settle(2 * SIZE)

    samples = race(sides, ROUNDS, prepare=prepare)
    rows = [
        table.add(
            "save of a generator, 1 GiB, durable=False",
            "safetensors.numpy.save_file of a dict",
            Comparison(samples["ours"], samples["theirs"]),
            target=1,
        )
    ]
    report(sides["ours"], rows, rounds=1, prepare=prepare)


_GROWTH = """
import sys
from pathlib import Path
sys.path.insert(0, {benches!r})
import safeload
from bench_saving import produced
safeload.save(produced(64 << 20), {path!r}, overwrite=True)  # what the first call imports
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
Path("/proc/self/clear_refs").write_text("5")
before = peak()
safeload.save(produced(100 * (64 << 20)), {path!r}, overwrite=True, durable=False)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
def test_a_generator_takes_the_memory_of_a_tensor(folder: Path, table) -> None:  # noqa: F811
    code = _GROWTH.format(benches=str(Path(__file__).parent), path=str(folder / "x.safetensors"))
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=folder)
    growth = max(1.0, float(done.stdout))
    table.add(
        "save of a generator of 100 tensors of 64 MiB, growth of peak RSS",
        "limit: 128 MiB",
        Comparison([growth], [float(128 << 20)]),
        target=1,
        unit="B",
    )


def test_save_in_the_background(folder: Path, table, report) -> None:  # noqa: F811
    """How long the caller is blocked, from the second save on."""
    data = tensors(SIZE)
    copies = {name: np.empty_like(array) for name, array in data.items()}
    pending = []

    def ours() -> None:
        path = folder / "ours.safetensors"
        pending.append(safeload.save(data, path, background=True, overwrite=True, durable=False))

    def memcpy() -> None:
        for name, array in data.items():
            np.copyto(copies[name], array)

    def prepare() -> None:
        while pending:
            pending.pop().result()
        release()

    for _ in range(2):  # the buffer is new in the first save
        ours()
        prepare()
    samples = race({"ours": ours, "memcpy": memcpy}, ROUNDS, prepare=prepare)
    prepare()
    job = "save of 1 GiB with background=True, until it returns"
    rows = [table.add(job, "limit: numpy.copyto", Comparison(samples["ours"], samples["memcpy"]), target=1 / 1.3)]
    torch = pytest.importorskip("torch")
    state = {name: torch.from_numpy(array) for name, array in data.items()}
    samples = race({"ours": ours, "theirs": lambda: torch.save(state, folder / "theirs.pt")}, ROUNDS, prepare=prepare)
    prepare()
    rows.append(table.add(job, "torch.save", Comparison(samples["ours"], samples["theirs"])))
    report(ours, rows, rounds=3, prepare=prepare)


def test_edit_metadata(folder: Path, table, report) -> None:  # noqa: F811
    path = folder / "model.safetensors"
    safeload.save(tensors(SIZE), path, metadata={"step": "0"})
    steps = iter(range(1_000_000))

    def ours() -> None:
        with safeload.edit(path) as file:
            file.metadata["step"] = str(next(steps))

    def theirs() -> None:
        metadata = {"step": str(next(steps))}
        safetensors.numpy.save_file(safetensors.numpy.load_file(path), folder / "new.safetensors", metadata)
        files.sync(folder / "new.safetensors")

    samples = race({"ours": ours, "theirs": theirs}, ROUNDS, prepare=release)
    peer = "safetensors.numpy load_file, save_file, fsync"
    comparison = Comparison(samples["ours"], samples["theirs"])
    report(ours, [table.add("edit of metadata, 1 GiB", peer, comparison, target=10)], rounds=3)


def deltas(place: Path) -> tuple[Path, Path]:
    """A model of BF16 weights and its next step: 2 % of the elements differ in their last bit."""
    rng = np.random.default_rng(5)
    old = {f"layers.{k}": rng.integers(0, 1 << 15, (4096, 1024), np.uint16) for k in range(32)}
    new = {name: array ^ (rng.random(array.shape, np.float32) < 0.02) for name, array in old.items()}
    paths = place / "old.safetensors", place / "new.safetensors"
    for path, arrays in zip(paths, (old, new), strict=True):
        weights = {name: array.view(np.float16) for name, array in arrays.items()}
        safeload.save(weights, path, overwrite=True, durable=False)
    return paths


def test_patch(folder: Path, table, report) -> None:  # noqa: F811
    old, new = deltas(folder)
    patch = folder / "patch.safetensors"

    def make() -> Path:
        safeload.make_patch(old, new, patch, overwrite=True, durable=False)
        return patch

    def apply() -> Path:
        safeload.apply_patch(old, patch, folder / "result.safetensors", overwrite=True, durable=False)
        return folder / "result.safetensors"

    tools = {
        "zstd --patch-from": (
            ["zstd", "-q", "-f", "--long=31", f"--patch-from={old}", new, "-o", folder / "zstd.patch"],
            ["zstd", "-q", "-f", "-d", "--long=31", f"--patch-from={old}", folder / "zstd.patch", "-o", folder / "z"],
            folder / "zstd.patch",
        ),
        "xdelta3": (
            ["xdelta3", "-f", "-e", "-s", old, new, folder / "xdelta.patch"],
            ["xdelta3", "-f", "-d", "-s", old, folder / "xdelta.patch", folder / "x"],
            folder / "xdelta.patch",
        ),
    }
    makers: dict[str, Callable[[], object]] = {"ours": make}
    appliers: dict[str, Callable[[], object]] = {"ours": apply}
    for name, (encode, decode, _) in tools.items():
        if shutil.which(encode[0]):
            makers[name] = lambda command=encode: subprocess.run(command, check=True)
            appliers[name] = lambda command=decode: subprocess.run(command, check=True)
    rows = []
    for job, sides in (("make_patch of 256 MiB", makers), ("apply_patch to a file of 256 MiB", appliers)):
        samples = race(sides, ROUNDS, prepare=release)
        rows += [table.add(job, name, Comparison(samples["ours"], samples[name])) for name in sides if name != "ours"]
    assert apply().read_bytes() == new.read_bytes()
    ours = float(patch.stat().st_size)
    for name in makers:
        if name != "ours":
            theirs = float(tools[name][2].stat().st_size)
            table.add("size of a patch of 2 % of the elements", name, Comparison([ours], [theirs]), unit="B")
    if rows:
        report(make, rows, rounds=1)


def test_patch_arrays(folder: Path, table, report) -> None:  # noqa: F811
    """Applied to arrays in memory, without hashing, against one copy of all bytes."""
    old, new = deltas(folder)
    patch = folder / "patch.safetensors"
    safeload.make_patch(old, new, patch, overwrite=True, durable=False)
    arrays = {name: array.copy() for name, array in safeload.load(old).items()}
    copies = {name: np.empty_like(array) for name, array in arrays.items()}

    def ours() -> None:
        safeload.apply_patch(arrays, patch, check=False)

    def memcpy() -> None:
        for name, array in arrays.items():
            np.copyto(copies[name], array)

    samples = race({"ours": ours, "memcpy": memcpy}, ROUNDS, prepare=release)
    job = "apply_patch to arrays of 256 MiB, 2 % of the elements, check=False"
    comparison = Comparison(samples["ours"], samples["memcpy"])
    report(ours, [table.add(job, "limit: numpy.copyto", comparison, target=0.5)], rounds=3)
