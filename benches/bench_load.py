"""load_file of 2.5 GB of BF16, page cache warm."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import files
import ml_dtypes  # without it safetensors.numpy cannot load BF16 at all
import numpy as np
import safetensors.numpy
from compare import Comparison, race, release, same_arrays, touch

import safeload.numpy

ROUNDS = files.LARGE_ROUNDS
PEER = "safetensors.numpy.load_file"


def prepare(path: Path, widening: int = 1) -> Callable[[], None]:
    """The same state before every sample: the file in the page cache, as much memory as a result needs at hand.

    Args:
        path: the file.
        widening: how many times larger than the file a result is.
    """

    def prepare() -> None:
        if not files.cached(path):
            files.warm(path)
        release()
        files.settle(int(path.stat().st_size * 1.1 * widening))
        # The caches hold nothing but that memory now, which a load of half a millisecond would pay for.
        time.sleep(0.02)
        for _ in range(20):
            files.header_of(path)

    return prepare


def bare_mapping(path: Path) -> Callable[[], dict[str, np.ndarray]]:
    """What no loader is spared: one mapping, and one array per tensor from a header that is already parsed."""
    header, data = files.header_of(path)
    layout = [(name, tuple(entry["shape"]), data + entry["data_offsets"][0]) for name, entry in header.items()]

    def load() -> dict[str, np.ndarray]:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return {name: np.ndarray(shape, ml_dtypes.bfloat16, mapping, offset) for name, shape, offset in layout}

    return load


def threads() -> int:
    """As many as safeload takes for a large file."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 16)


def _pieces(size: int) -> Iterator[slice]:
    step = 16 << 20
    return (slice(begin, min(begin + step, size)) for begin in range(0, size, step))


def plain_pread(path: Path) -> Callable[[], np.ndarray]:
    """The same bytes by preadv(2) into one fresh array (numpy asks for huge pages), with the same threads."""
    size = path.stat().st_size

    def read() -> np.ndarray:
        result = np.empty(size, np.uint8)
        descriptor = os.open(path, os.O_RDONLY)

        def piece(part: slice) -> None:
            view = memoryview(result[part])
            while view:
                view = view[os.preadv(descriptor, [view], part.stop - len(view)) :]

        with ThreadPoolExecutor(threads()) as pool:
            list(pool.map(piece, _pieces(size)))
        os.close(descriptor)
        return result

    return read


def plain_copy(path: Path) -> Callable[[], np.ndarray]:
    """As many bytes by memcpy from memory that has been touched into one fresh array, with the same threads."""
    size = path.stat().st_size
    source = np.ones(256 << 20, np.uint8)

    def copy() -> np.ndarray:
        result = np.empty(size, np.uint8)

        def piece(part: slice) -> None:
            begin = part.start % source.size
            result[part] = source[begin : begin + part.stop - part.start]

        with ThreadPoolExecutor(threads()) as pool:
            list(pool.map(piece, _pieces(size)))
        return result

    return copy


def same(ours: dict[str, np.ndarray], theirs: Any) -> None:
    """Limits that give bare bytes are not compared."""
    if isinstance(theirs, dict):
        same_arrays(ours, theirs)


def _run(job: str, sides: dict[str, Callable[[], Any]], targets: dict[str, float], path: Path, table, report) -> None:
    samples = race(sides, ROUNDS, check=same, prepare=prepare(path))
    rows = [
        table.add(job, name, Comparison(samples["ours"], samples[name]), target=targets.get(name))
        for name in sides
        if name != "ours"
    ]
    report(sides["ours"], rows, rounds=1, prepare=prepare(path))


def test_mmap(llama: Path, table, report) -> None:
    sides = {
        "ours": lambda: safeload.numpy.load_file(llama),
        PEER: lambda: safetensors.numpy.load_file(llama),
        'ours, backend="auto"': lambda: safeload.numpy.load_file(llama, backend="auto"),
        "limit: bare mmap, header already parsed": bare_mapping(llama),
    }
    _run("load_file 2.5 GB, mmap", sides, {PEER: 500}, llama, table, report)


def _many(path: Path) -> Callable[[], dict[str, np.ndarray]]:
    """One mapping and one array per tensor, from columns that are prepared: what plain code cannot do without."""
    header, data = files.header_of(path)
    layout = [(name, tuple(e["shape"]), data + e["data_offsets"][0]) for name, e in header.items()]
    float32 = np.dtype(np.float32)

    def load() -> dict[str, np.ndarray]:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return {name: np.ndarray(shape, float32, mapping, offset) for name, shape, offset in layout}

    return load


def test_many_tensors(n100k: Path, table, report) -> None:
    data = n100k.read_bytes()
    limit = "limit: np.ndarray over one mapping, header already parsed"
    jobs = {
        "load_file of 100,000 tensors, mmap": {
            "ours": lambda: safeload.numpy.load_file(n100k),
            PEER: lambda: safetensors.numpy.load_file(n100k),
            limit: _many(n100k),
        },
        'load_file of 100,000 tensors, backend="pread"': {
            "ours": lambda: safeload.numpy.load_file(n100k, backend="pread"),
            f'{PEER}(backend="pread")': lambda: safetensors.numpy.load_file(n100k, backend="pread"),
        },
        "load(bytes) of 100,000 tensors": {
            "ours": lambda: safeload.numpy.load(data),
            "safetensors.numpy.load": lambda: safetensors.numpy.load(data),
        },
    }
    for job, sides in jobs.items():
        samples = race(sides, 15, check=same_arrays)
        targets = {limit: 0.5}
        rows = [
            table.add(job, name, Comparison(samples["ours"], samples[name]), target=targets.get(name, 4))
            for name in sides
            if name != "ours"
        ]
    report(sides["ours"], rows, rounds=3)


def test_mmap_then_touch(llama: Path, table, report) -> None:
    bare = bare_mapping(llama)

    def touched(load: Callable[[], dict[str, np.ndarray]]) -> Callable[[], dict[str, np.ndarray]]:
        def run() -> dict[str, np.ndarray]:
            arrays = load()
            touch(arrays)
            return arrays

        return run

    sides = {
        "ours": touched(lambda: safeload.numpy.load_file(llama)),
        PEER: touched(lambda: safetensors.numpy.load_file(llama)),
        "limit: bare mmap, touched": touched(bare),
    }
    _run("load_file 2.5 GB, mmap, every page read once", sides, {PEER: 10}, llama, table, report)


def test_pread(llama: Path, table, report) -> None:
    """runai-model-streamer is in bench_streamer.py: it brings torch into the process."""
    sides = {
        "ours": lambda: safeload.numpy.load_file(llama, backend="pread"),
        PEER: lambda: safetensors.numpy.load_file(llama),
        f'{PEER}(backend="pread")': lambda: safetensors.numpy.load_file(llama, backend="pread"),
        **({"limit: preadv into one fresh array": plain_pread(llama)} if hasattr(os, "preadv") else {}),
        "limit: memcpy into one fresh array": plain_copy(llama),
    }
    targets = {PEER: 5, f'{PEER}(backend="pread")': 5}
    _run('load_file 2.5 GB, backend="pread"', sides, targets, llama, table, report)
