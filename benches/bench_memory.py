"""Memory of every operation: resident, committed, and in the page cache, against the size of the model.

    python benches/bench_memory.py                 # a table; SAFELOAD_BENCH_MEMORY=4 measures a model of 4 GiB
    python benches/bench_memory.py --check         # exit status 1 if a row exceeds its limit
    python benches/bench_memory.py --rows 'load*'

Each operation runs in a fresh process, first on a tiny model, so that modules and thread stacks do not count. A load
may take 1.02 times the size of its arrays; any other operation 64 MiB and its largest tensor, in the source and in the
result. With ``cache="drop"``, the page cache of source and result counts too, and may take 300 MiB.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import files
import ml_dtypes
import numpy as np
import pytest

import safeload

MIB = 1 << 20
GIB = int(os.environ.get("SAFELOAD_BENCH_MEMORY", "1"))
ROWS, COLUMNS = 4096, 8192  # of a matrix of 64 MiB in bf16
CACHED = 300 * MIB  # of source and result, with cache="drop"
SLACK = 64 * MIB
LOADED = 1.02
STEP = 0.002  # seconds between samples

# Linux's cachestat(2), of which Python has no function.
CACHESTAT = 451


class Job(NamedTuple):
    """An operation."""

    name: str
    code: str  # with `model`, a folder of inputs, and `out`, an empty folder
    loads: float = 0  # bytes of its arrays, as a multiple of the model's; 0 for an operation that returns none
    element: int = 4  # bytes of the largest element that a tensor has in the result
    drops: bool = False


OPEN = "checkpoint = safeload.open(model + '/model.safetensors')"
LOAD = "kept = safeload.load(model + '/model.safetensors', {})"
CONVERT = "safeload.convert(model + '/model.safetensors', out + '/{}', {})"
JOBS = (
    Job("open", OPEN, element=0),
    Job("load mmap, every page read", LOAD.format("") + "; [array.view('u1').max() for array in kept.values()]", 1),
    *(Job(f"load {backend}", LOAD.format(f"backend='{backend}'"), 1) for backend in ("pread", "direct", "auto")),
    Job("load, cache=drop", LOAD.format("cache='drop'"), 1, drops=True),
    Job("load as float32", LOAD.format("dtype='float32'"), 2),
    Job("load GGUF", "kept = safeload.load(model + '/model.gguf', backend='pread')", 34 / 64),
    Job("load GGUF as float16", "kept = safeload.load(model + '/model.gguf', dtype='float16')", 1),
    Job("load with an adapter", LOAD.format("adapters=model + '/adapter', backend='pread'"), 1),
    Job("stream", OPEN + "; [array.view('u1').max() for _, array in checkpoint.stream(ahead='64MiB')]", element=2),
    Job("convert, copied", CONVERT.format("copy.safetensors", ""), element=2),
    Job("convert, copied, cache=drop", CONVERT.format("copy.safetensors", "cache='drop'"), element=2, drops=True),
    Job("convert to float16", CONVERT.format("half.safetensors", "dtype='float16'"), element=2),
    Job(
        "convert to float16, cache=drop",
        CONVERT.format("half.safetensors", "dtype='float16', cache='drop'"),
        element=2,
        drops=True,
    ),
    Job("convert to shards", CONVERT.format("shards/", "dtype='float16', max_shard_size='300MB'"), element=2),
    Job("convert to npz", CONVERT.format("model.npz", "dtype='float32'")),
    Job("convert from GGUF", "safeload.convert(model + '/model.gguf', out + '/m.safetensors', dtype='float32')"),
    Job("convert to GGUF, Q8_0", CONVERT.format("model.gguf", "quantize='q8_0', raw=True"), element=2),
    Job(
        "convert to GGUF, Q8_0, cache=drop",
        CONVERT.format("model.gguf", "quantize='q8_0', raw=True, cache='drop'"),
        element=2,
        drops=True,
    ),
    Job("convert to GGUF, Q4_K", CONVERT.format("model.gguf", "quantize={'*': 'q4_k'}, raw=True"), element=2),
    Job("quantize to int8", CONVERT.format("model.safetensors", "quantize='int8'"), element=1),
    Job("quantize to Q4_0", CONVERT.format("model.safetensors", "quantize='q4_0'"), element=1),
    Job("merge an adapter", CONVERT.format("merged.safetensors", "adapters=model + '/adapter'"), element=4),
    Job("save", "safeload.save(arrays, out + '/saved.safetensors')", element=2),
    Job("save, cache=drop", "safeload.save(arrays, out + '/saved.safetensors', cache='drop')", element=2, drops=True),
    Job("check", "safeload.check(model + '/model.safetensors')", element=0),
    Job("check, cache=drop", "safeload.check(model + '/model.safetensors', cache='drop')", element=0, drops=True),
    Job("stats", "safeload.stats(model + '/model.safetensors', histogram=True)", element=0),
    Job("stats of GGUF", "safeload.stats(model + '/model.gguf')", element=0),
    Job("diff", "safeload.diff(model + '/model.safetensors', model + '/other.safetensors')", element=4),
)

CHILD = """
import logging
import sys
import safeload
logging.disable()  # that no engine loads these models
def run(model, out, arrays):
    {code}
    return locals()
for model, out in zip(sys.argv[1::2], sys.argv[2::2]):
    arrays = safeload.load(model + "/model.safetensors") if "arrays" in {code!r} else None
    for array in arrays.values() if arrays else ():
        array.view("u1").max()  # every page
    print("ready", flush=True)
    sys.stdin.readline()
    kept = run(model, out, arrays)
    print("done", flush=True)
    sys.stdin.readline()
    del kept, arrays
"""


class Memory(NamedTuple):
    """Bytes of a process, and of its files in the page cache."""

    resident: int
    anonymous: int
    committed: int  # private and writable, whether or not it is touched
    cached: int

    def beyond(self, other: Memory) -> Memory:
        return Memory(*(max(0, a - b) for a, b in zip(self, other, strict=True)))


def cached(path: str) -> int:
    """Bytes of a file in the page cache, of all files of a folder, or of a file that is gone."""
    if os.path.isdir(path):
        return sum(cached(os.path.join(path, name)) for name in os.listdir(path))
    asked, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        if ctypes.CDLL(None, use_errno=True).syscall(CACHESTAT, descriptor, asked, counts, 0) != 0:
            raise OSError(ctypes.get_errno(), "cachestat(2) needs Linux 6.5")
    finally:
        os.close(descriptor)
    return int(counts[0]) * os.sysconf("SC_PAGESIZE")


def memory_of(process: int, folders: list[str]) -> Memory:
    with open(f"/proc/{process}/status") as status:
        sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in status if line.endswith(" kB\n")}
    return Memory(sizes["VmRSS"], sizes["RssAnon"], sizes["VmData"], sum(map(cached, folders)))


def measure(job: Job, tiny: Path, model: Path, out: Path) -> tuple[Memory, float]:
    """The largest growth during a job, and its seconds. The model is not in the page cache when it starts."""
    places = [str(tiny), str(out / "tiny"), str(model), str(out / "large")]
    for folder in places[1::2]:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
    command = [sys.executable, "-c", CHILD.format(code=job.code), *places]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def step(word: str) -> None:
            assert child.stdin is not None
            assert child.stdout is not None
            if child.stdout.readline().strip() != word:
                raise SystemExit(f"{job.name} has failed")

        def go() -> None:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()

        for word in ("ready", "done"):
            step(word)
            go()
        step("ready")
        for file in model.rglob("*.*"):
            files.sync(file)
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        before = most = memory_of(child.pid, places[2:])
        started = time.perf_counter()
        go()
        while not select.select([child.stdout], [], [], STEP)[0]:
            most = Memory(*map(max, most, memory_of(child.pid, places[2:])))
        seconds = time.perf_counter() - started
        step("done")
        most = Memory(*map(max, most, memory_of(child.pid, places[2:])))
        go()
    return most.beyond(before), seconds


def write_model(folder: Path, layers: int, rows: int, columns: int) -> None:
    """Writes a model in bf16, another that differs, its Q8_0 in GGUF, and an adapter of rank 8."""
    if (folder / "complete").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "adapter").mkdir(parents=True)
    rng = np.random.default_rng(0)
    block = (rng.standard_normal((rows, columns), np.float32) / 50).astype(ml_dtypes.bfloat16)

    def tensors(seed: int) -> Iterator[tuple[str, np.ndarray]]:
        for k in range(layers):
            yield f"model.layers.{k}.proj.weight", np.roll(block, k + seed, axis=0)
            yield f"model.layers.{k}.norm.weight", block[0].copy()

    safeload.save(tensors(0), folder / "model.safetensors")
    safeload.save(tensors(1), folder / "other.safetensors")
    safeload.convert(folder / "model.safetensors", folder / "model.gguf", quantize="q8_0", raw=True)
    sides = {"A": rng.standard_normal((8, columns), np.float32), "B": rng.standard_normal((rows, 8), np.float32)}
    prefix = "base_model.model.model.layers"
    pairs = {f"{prefix}.{k}.proj.lora_{side}.weight": sides[side] for k in range(layers) for side in sides}
    safeload.save(pairs, folder / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    (folder / "complete").touch()


class Result(NamedTuple):
    """A measured job: growth and limit in bytes."""

    job: Job
    memory: Memory
    limit: int
    seconds: float

    @property
    def counted(self) -> int:
        """What is compared with the limit: mapped pages count for loads, the page cache if pages are dropped."""
        cached = self.memory.cached if self.job.drops else 0
        return cached + (self.memory.resident if self.job.loads else self.memory.anonymous)

    @property
    def over(self) -> bool:
        return self.counted > self.limit


def limit_of(job: Job, nbytes: int) -> int:
    if job.loads:
        return int(LOADED * job.loads * nbytes) + (CACHED if job.drops else 0)
    tensor = ROWS * COLUMNS * (2 + job.element)
    return SLACK + tensor if not job.drops else max(CACHED, SLACK + tensor)


def measured(patterns: list[str]) -> Iterator[Result]:
    folder = files.CACHE / f"memory-{files.VERSION}"
    tiny, model = folder / "tiny", folder / f"{GIB}GiB"
    write_model(tiny, 2, 64, 256)
    write_model(model, 16 * GIB, ROWS, COLUMNS)
    nbytes = safeload.open(model / "model.safetensors").nbytes
    for job in JOBS:
        if any(fnmatchcase(job.name, pattern) for pattern in patterns):
            memory, seconds = measure(job, tiny, model, folder / "out")
            yield Result(job, memory, limit_of(job, nbytes), seconds)
    shutil.rmtree(folder / "out", ignore_errors=True)


def shown(result: Result) -> str:
    sizes = " ".join(f"{size / MIB:9,.0f}" for size in (*result.memory, result.counted, result.limit))
    return f"{result.job.name:34} {sizes} {result.seconds:7.1f}  {'OVER' if result.over else ''}".rstrip()


HEAD = f"{f'growth in MiB, model of {GIB} GiB':34} " + " ".join(
    f"{name:>9}" for name in ("resident", "anonymous", "committed", "cached", "counted", "limit")
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a row exceeds its limit")
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="names of rows")
    options = parser.parse_args()
    print(f"{HEAD} {'seconds':>7}")
    over = 0
    for result in measured(options.rows):
        print(shown(result), flush=True)
        over += result.over
    return int(options.check and over > 0)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc, and cachestat(2) of Linux 6.5")
def test_memory() -> None:
    assert [shown(result) for result in measured(["*"]) if result.over] == []


if __name__ == "__main__":
    sys.exit(main())
