"""Checking 2.5 GB: validation and hashes against what a user would write with numpy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import files
import ml_dtypes  # noqa: F401 - safetensors.numpy finds bfloat16 only so
import numpy as np
import pytest
import safetensors.numpy
from compare import Comparison, prepared, race

import safeload
from safeload.trust import verify as manifest

ROUNDS = files.LARGE_ROUNDS


@pytest.fixture(scope="module")
def llama_folder() -> Path:
    folder = files.llama_folder()
    if files.available_memory() < 8 << 30:
        pytest.skip("needs 8 GB of memory: the page cache and numpy's copies of one shard")
    return folder


def by_hand(folder: Path) -> dict[str, tuple[Any, ...]]:
    """NaN, infinity, range, deviation, constant matrices and shapes, as a careful user checks them."""
    config = json.loads((folder / "config.json").read_text())
    hidden, kv = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    wanted = {"k_proj": (kv, hidden), "v_proj": (kv, hidden), "embed_tokens": (config["vocab_size"], hidden)}
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        for name, array in safetensors.numpy.load_file(shard).items():
            for part, shape in wanted.items():
                assert part not in name or array.shape == shape
            x = array.astype(np.float32)
            nan, inf = int(np.isnan(x).sum()), int(np.isinf(x).sum())
            low, high = float(x.min()), float(x.max())
            found[name] = nan, inf, low, high, float(x.mean(dtype=np.float64)), float(x.std(dtype=np.float64))
    return found


def test_validate(llama_folder: Path, table, report) -> None:
    def same(ours: safeload.CheckReport, theirs: dict[str, tuple[Any, ...]]) -> None:
        assert ours.ok
        assert not ours.warnings
        assert ours.schema == "llama"
        assert ours.stats.keys() == theirs.keys()
        for name, s in ours.stats.items():
            assert (s.nan, s.inf, s.min, s.max) == theirs[name][:4], name
            assert abs(s.mean - theirs[name][4]) < 1e-6, name
            assert abs(s.std - theirs[name][5]) < 1e-6, name

    sides = {"ours": lambda: safeload.check(llama_folder), "numpy loop": lambda: by_hand(llama_folder)}
    samples = race(sides, ROUNDS, check=same, prepare=prepared(llama_folder, 2 << 30))
    comparison = Comparison(samples["ours"], samples["numpy loop"])
    row = table.add("validate the 2.5 GB bf16 folder", "numpy loop", comparison, target=10)
    report(sides["ours"], [row], rounds=1, prepare=prepared(llama_folder, 2 << 30))


def test_manifest(llama_folder: Path, table, report) -> None:
    def ours() -> dict[str, str]:
        with safeload.open(llama_folder) as opened:
            return {name: entry["sha256"] for name, entry in manifest.make(opened)["tensors"].items()}

    def theirs() -> dict[str, str]:
        found = {}
        for shard in sorted(llama_folder.glob("*.safetensors")):
            for name, array in safetensors.numpy.load_file(shard).items():
                found[name] = hashlib.sha256(array.reshape(-1).view(np.uint8)).hexdigest()
        return found

    def same(one: dict[str, str], other: dict[str, str]) -> None:
        assert one == other

    sides = {"ours": ours, "safetensors.numpy, hashlib": theirs}
    samples = race(sides, ROUNDS, check=same, prepare=prepared(llama_folder, 2 << 30))
    peer = "safetensors.numpy, hashlib"
    row = table.add("SHA-256 of every tensor, 2.5 GB", peer, Comparison(samples["ours"], samples[peer]))
    report(ours, [row], rounds=1, prepare=prepared(llama_folder, 2 << 30))
