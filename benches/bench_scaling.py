"""How cost grows: with the size of a file, the number of tensors and that of threads. The pictures of report.py.

More threads than processors are no measurement, and are left out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import files
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from bench_load import prepare
from bench_load import threads as processors
from compare import race, release, same_list

import safeload
import safeload.numpy

# MiB of BF16 in tensors of 8 MiB (the first file has one of 1 MiB).
SIZES = (1, 8, 64, 512, 2048)
COUNTS = (10, 100, 1000, 10_000, 100_000, 1_000_000)


@pytest.mark.parametrize("mib", SIZES)
def test_load_by_size(mib: int, table, benchmark) -> None:
    each = min(mib, 8)
    entries = [files.Entry(f"w{k}", "BF16", (each << 9, 1024)) for k in range(mib // each)]
    path = files.make(f"size-{mib}", entries, block=files.weights())
    if files.available_memory() < 8 * path.stat().st_size:
        pytest.skip("needs eight times as much memory")
    sides: dict[str, Callable[[], Any]] = {
        "safeload, mapped": lambda: safeload.numpy.load_file(path),
        "safeload, pread": lambda: safeload.numpy.load_file(path, backend="pread"),
        "safeload, as f32": lambda: safeload.numpy.load_file(path, dtype="float32"),
        "safetensors.numpy": lambda: safetensors.numpy.load_file(path),
        "safetensors.numpy, astype f32": lambda: {
            name: array.astype(np.float32) for name, array in safetensors.numpy.load_file(path).items()
        },
    }

    def check(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(array[..., ::7], theirs[name][..., ::7]) for name, array in ours.items())

    samples = race(sides, 15 if mib < 512 else files.LARGE_ROUNDS, check=check, prepare=prepare(path, 2))
    for side, seconds in samples.items():
        table.point("load_by_size", side, path.stat().st_size, seconds)
    benchmark.pedantic(sides["safeload, mapped"], rounds=3)


def sparse(count: int) -> Path:
    """A safetensors file of ``count`` tensors of 4 KiB that takes the room of its header."""
    path = files.CACHE / f"sparse-{count}-v{files.VERSION}.safetensors"
    if not path.exists():
        entry = {"dtype": "F32", "shape": [32, 32]}
        width = len(str(count - 1))
        header = {f"w{k:0{width}}": {**entry, "data_offsets": [k << 12, k + 1 << 12]} for k in range(count)}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        files.CACHE.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + (count << 12))
    return path


def tiny(count: int) -> Path:
    """A file of tensors of 32 bytes, all on the disk; of a million with longer names the header would be too large."""
    width = len(str(count - 1))
    return files.make(f"tiny-{count}", [files.Entry(f"w{k:0{width}}", "F32", (2, 4)) for k in range(count)])


@pytest.mark.parametrize("count", [count for count in COUNTS if count >= 1000])
def test_operations_by_tensors(count: int, tmp_path: Path, table) -> None:
    """What each tensor costs beside its bytes, of which it has 32."""
    path = tiny(count)
    tensors = safeload.numpy.load_file(path)
    out, folder = tmp_path / "out.safetensors", tmp_path / "folder"

    def stream() -> int:
        with safeload.open(path) as opened:
            return sum(1 for _ in opened.stream())

    sides: dict[str, Callable[[], Any]] = {
        "safeload.convert": lambda: safeload.convert(path, out, overwrite=True),
        "safeload.convert, f32 to bf16": lambda: safeload.convert(path, out, dtype="bfloat16", overwrite=True),
        "safeload.convert to a folder": lambda: safeload.convert(path, folder, overwrite=True, max_shard_size="1MB"),
        "safeload.numpy.save_file": lambda: safeload.numpy.save_file(tensors, out, durable=False),
        "safeload.diff": lambda: safeload.diff(path, path),
        "safeload.stats": lambda: safeload.stats(path),
        "safeload stream": stream,
        "safetensors.numpy, load and save": lambda: safetensors.numpy.save_file(
            safetensors.numpy.load_file(path), tmp_path / "theirs.safetensors"
        ),
    }
    largest = count > 100_000
    samples = race(sides, 1 if largest else 3 if count > 10_000 else 5, prepare=release, warm=not largest)
    for side, seconds in samples.items():
        table.point("operations_by_tensors", side, count, seconds)


@pytest.mark.parametrize("count", range(1, processors() + 1))
def test_load_by_threads(count: int, llama: Path, table) -> None:
    sides: dict[str, Callable[[], Any]] = {
        "safeload, pread": lambda: safeload.numpy.load_file(llama, backend="pread", threads=count),
        "safeload, as f32": lambda: safeload.numpy.load_file(llama, dtype="float32", threads=count),
        "safeload.stats": lambda: safeload.stats(llama, threads=count),
        "safeload.diff, with itself": lambda: safeload.diff(llama, llama, threads=count),
    }
    for side, seconds in race(sides, files.LARGE_ROUNDS, prepare=prepare(llama, 2)).items():
        table.point("by_threads", side, count, seconds)


_PEAK = """
import sys
from pathlib import Path
import ml_dtypes, numpy, {imports}
path, out = {paths!r}
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here, see proc(5)
before = peak()
kept = {call}
print(peak() - before)
"""

CALLS = {
    "safeload, open and list": ("safeload", "list(safeload.open(path))"),
    "safeload, load_file": ("safeload.numpy", "safeload.numpy.load_file(path)"),
    "safeload.convert": ("safeload", "safeload.convert(path, out, overwrite=True)"),
    "safeload.diff": ("safeload", "safeload.diff(path, path)"),
    "safeload.stats": ("safeload", "safeload.stats(path)"),
    "safetensors.numpy, load_file": ("safetensors.numpy", "safetensors.numpy.load_file(path)"),
}


def growth(side: str, path: Path, folder: Path) -> float:
    """Bytes by which the peak of resident memory grows, in a process of its own."""
    imports, call = CALLS[side]
    code = _PEAK.format(imports=imports, call=call, paths=(str(path), str(folder / "out.safetensors")))
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=folder)
    return max(4096.0, float(done.stdout))


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
@pytest.mark.parametrize("count", [count for count in COUNTS if count >= 1000])
def test_memory_by_tensors(count: int, tmp_path: Path, table) -> None:
    for side in CALLS:
        table.point("memory_by_tensors", side, count, [growth(side, tiny(count), tmp_path)])


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
@pytest.mark.parametrize("mib", SIZES)
def test_memory_by_size(mib: int, tmp_path: Path, table) -> None:
    each = min(mib, 8)
    entries = [files.Entry(f"w{k}", "BF16", (each << 9, 1024)) for k in range(mib // each)]
    path = files.make(f"size-{mib}", entries, block=files.weights())
    found = {side: [growth(side, path, tmp_path)] for side in CALLS}
    for side, values in found.items():
        table.point("memory_by_size", side, path.stat().st_size, values)
    assert statistics.median(found["safeload.convert"]) < 256 << 20
    assert statistics.median(found["safeload.diff"]) < 256 << 20


@pytest.mark.parametrize("count", COUNTS)
def test_open_by_tensors(count: int, table, benchmark) -> None:
    path = sparse(count)

    def ours() -> list[str]:
        with safeload.safe_open(path, framework="np") as file:
            return file.keys()

    def theirs() -> list[str]:
        with safetensors.safe_open(path, framework="np") as file:
            return list(file.keys())

    def all_views() -> list[str]:
        return list(safeload.numpy.load_file(path))

    sides = {
        "safeload, open and list": ours,
        "safetensors, open and list": theirs,
        "safeload, load_file": all_views,
    }
    if count <= 100_000:  # a million are 4 GB, which it copies
        sides["safetensors.numpy, load_file"] = lambda: list(safetensors.numpy.load_file(path))
    samples = race(sides, 15 if count < 100_000 else 3, check=same_list, number=10 if count <= 1000 else 1)
    for side, seconds in samples.items():
        table.point("open_by_tensors", side, count, seconds)
    benchmark.pedantic(ours, rounds=3)
