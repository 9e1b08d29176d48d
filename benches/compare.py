"""Races: ours and its peers in one run, in shuffled order, in the same state, with equality checked beside the time."""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import files
import numpy as np

Side = Callable[[], Any]
Check = Callable[[Any, Any], None]

# Seconds of the untimed round before a race from which on there is none after it.
LONG = 5.0


@dataclass
class Comparison:
    """Samples of two sides, taken in pairs: sample i of one ran in the same round as sample i of the other.

    Attributes:
        ours: seconds (or bytes) of each round.
        theirs: likewise.
    """

    ours: list[float]
    theirs: list[float]

    def ratio(self, by: str = "median") -> float:
        """Theirs by ours: above 1 we are faster."""
        return getattr(statistics, by)(self.theirs) / getattr(statistics, by)(self.ours)

    @property
    def spread(self) -> tuple[float, float]:
        """Quartiles of the ratios of the rounds."""
        ratios = [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]
        if len(ratios) < 2:
            return ratios[0], ratios[0]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, high


def release() -> None:
    """Gives freed memory back to the system, so that no side lives on pages that the one before it has paid for."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def prepared(folder: Path, nbytes: int) -> Callable[[], None]:
    """Return what runs before each sample: the shards of a folder are cached, and this much memory was touched."""

    def prepare() -> None:
        for shard in folder.glob("*.safetensors"):
            if not files.cached(shard):
                files.warm(shard)
        release()
        files.settle(nbytes)

    return prepare


def race(
    sides: Mapping[str, Side],
    rounds: int,
    *,
    check: Check | None = None,
    prepare: Callable[[], object] | None = None,
    number: int = 1,
    warm: bool = True,
) -> dict[str, list[float]]:
    """Seconds of one call of each side, by round.

    Every round runs all sides in an order of its own. What a side returns is dropped outside the time.

    Args:
        sides: name to function; the first is ours.
        rounds: how many times each is timed.
        check: gets our result and another's and raises where they differ; run on an untimed round before the timed ones
            and, unless that took `LONG`, on another after them.
        prepare: brings the machine into the same state before every sample.
        number: calls to a sample, for what is too short for the clock.
        warm: False leaves out the untimed rounds, for jobs of minutes whose results the caller compares.
    """
    order = list(sides)
    samples: dict[str, list[float]] = {name: [] for name in sides}
    shuffle = random.Random(len(order) * rounds).shuffle
    begin = time.perf_counter()
    if warm:
        _check_round(sides, check)
    took = time.perf_counter() - begin
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            side = sides[name]
            if prepare is not None:
                prepare()
            if number == 1:
                started = time.perf_counter()
                result = side()
                samples[name].append(time.perf_counter() - started)
                del result
            else:
                started = time.perf_counter()
                for _ in range(number):
                    side()
                samples[name].append((time.perf_counter() - started) / number)
    if warm and check is not None and took < LONG:
        _check_round(sides, check)
    return samples


def _check_round(sides: Mapping[str, Side], check: Check | None) -> None:
    names = list(sides)
    ours = sides[names[0]]()
    for name in names[1:]:
        theirs = sides[name]()
        if check is not None:
            check(ours, theirs)
        del theirs


def ratio(
    ours: Side,
    theirs: Side,
    rounds: int,
    *,
    check: Check | None = None,
    prepare: Callable[[], object] | None = None,
    number: int = 1,
) -> Comparison:
    """A `race` of two."""
    samples = race({"ours": ours, "theirs": theirs}, rounds, check=check, prepare=prepare, number=number)
    return Comparison(samples["ours"], samples["theirs"])


def same_list(ours: list[str], theirs: list[str]) -> None:
    """The same names, whatever their order."""
    assert sorted(ours) == sorted(theirs)


def same_arrays(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    """The same names, dtypes, shapes and bytes."""
    assert sorted(ours) == sorted(theirs)
    for name, array in ours.items():
        other = theirs[name]
        assert (array.dtype, array.shape) == (other.dtype, other.shape), name
        assert same_bytes(array, other), name


def same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    """Byte for byte, by pieces: comparing makes an array of bools."""
    a, b = one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8)
    step = 16 << 20
    return a.size == b.size and all(np.array_equal(a[i : i + step], b[i : i + step]) for i in range(0, a.size, step))


def touch(arrays: Mapping[str, np.ndarray]) -> int:
    """Reads one byte of every page of every array."""
    return sum(int(array.reshape(-1).view(np.uint8)[::4096].sum()) for array in arrays.values())


@contextmanager
def spinning() -> Iterator[Callable[[], None]]:
    """A Python thread that never waits, as long as the block lasts.

    Yields a function that lets a random part of the interpreter's switch interval pass, so that samples start at any
    moment of it and not always right after the other thread had its turn.
    """
    stop = False

    def spin() -> None:
        while not stop:
            pass

    def drift() -> None:
        until = time.perf_counter() + random.random() * sys.getswitchinterval()
        while time.perf_counter() < until:
            pass

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield drift
    finally:
        stop = True
        thread.join()
