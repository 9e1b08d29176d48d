"""safeload.jax against safetensors.flax on a CPU; JAX is installed for it: `pip install jax`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import files
import numpy as np
import pytest
from compare import Comparison, race, release

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="jax is absent")

import safetensors.flax as upstream  # noqa: E402

import safeload.jax as ours  # noqa: E402

PEER = "safetensors.flax.load_file"


def _ready(load: Callable[[Path], dict[str, jax.Array]], path: Path) -> Callable[[], dict[str, jax.Array]]:
    """Loads until the values have arrived: transfers of JAX go on after the call."""
    return lambda: jax.block_until_ready(load(path))


def _same(mine: dict[str, jax.Array], theirs: dict[str, jax.Array]) -> None:
    assert list(mine) == list(theirs)
    for name, array in mine.items():
        assert array.dtype == theirs[name].dtype
        assert np.array_equal(np.asarray(array).view(np.uint8), np.asarray(theirs[name]).view(np.uint8)), name


def _large() -> list[files.Entry]:
    return [files.Entry(f"layers.{k}.weight", "BF16", (2048, 4096)) for k in range(64)]


def test_load_1_gib_of_bf16(table, report) -> None:
    path = files.make("jax-64", _large())

    def prepare() -> None:
        if not files.cached(path):
            files.warm(path)
        release()
        files.settle(int(path.stat().st_size * 1.1))

    sides = {"ours": _ready(ours.load_file, path), PEER: _ready(upstream.load_file, path)}
    samples = race(sides, files.LARGE_ROUNDS, check=_same, prepare=prepare)
    row = table.add("load 1 GiB of bf16 in 64 tensors into JAX", PEER, Comparison(samples["ours"], samples[PEER]))
    report(sides["ours"], [row], rounds=1, prepare=prepare)


@pytest.mark.parametrize(("count", "rounds"), [(1, 400), (300, 60)])
def test_load_small_tensors(count: int, rounds: int, table, report) -> None:
    path = files.make(f"jax-small-{count}", files.small(count))
    sides = {"ours": _ready(ours.load_file, path), PEER: _ready(upstream.load_file, path)}
    samples = race(sides, rounds, check=_same)
    job = f"load {count} small tensor{'s' if count > 1 else ''} into JAX"
    row = table.add(job, PEER, Comparison(samples["ours"], samples[PEER]), target=1)
    report(sides["ours"], [row], rounds=3)


def test_one_small_tensor_in_memory(table, report) -> None:
    content = files.make("jax-small-1", files.small(1)).read_bytes()
    sides = {"ours": lambda: ours.load(content), PEER: lambda: upstream.load(content)}
    samples = race(sides, 400, check=_same, number=10)
    row = table.add(
        "load(bytes), 1 small tensor into JAX", "safetensors.flax", Comparison(*samples.values()), target=0.9
    )
    report(sides["ours"], [row], rounds=3)


def test_save_of_a_small_tensor(table, report) -> None:
    tensors = ours.load(files.make("jax-small-1", files.small(1)).read_bytes())
    sides = {"ours": lambda: ours.save(tensors), PEER: lambda: upstream.save({**tensors})}  # it changes its argument

    def check(mine: bytes, theirs: bytes) -> None:
        assert mine == theirs

    samples = race(sides, 400, check=check, number=10)
    compared = Comparison(samples["ours"], samples[PEER])
    row = table.add("save, 1 small tensor of JAX", "safetensors.flax.save", compared, target=1)
    report(sides["ours"], [row], rounds=3)
