"""LoRA adapters merged while a base of 1 GB is loaded, against numpy and PEFT."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import files
import ml_dtypes
import numpy as np
import pytest
from compare import Comparison, race, release

import safeload

# 121 MB a layer.
LAYERS = int(os.environ.get("SAFELOAD_BENCH_LAYERS", "8"))
RANK, ALPHA = 16, 32
PREFIX = "base_model.model."


@pytest.fixture(scope="session")
def base() -> Path:
    """The layers of Llama-3.2-1B, as a folder."""
    entries = [
        entry
        for entry in files.llama_1b()
        if entry.name.startswith("model.layers.") and int(entry.name.split(".")[2]) < LAYERS
    ]
    folder = files.CACHE / f"layers-{LAYERS}-v{files.VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    files.make("model", entries, path=folder / "model.safetensors", block=files.weights())
    return folder


@pytest.fixture(scope="session")
def adapter(base: Path) -> Path:
    """An adapter of all its matrices, as PEFT writes it."""
    folder = base.parent / f"{base.name}-r{RANK}"
    folder.mkdir(exist_ok=True)
    header, _ = files.header_of(base / "model.safetensors")
    rng, tensors = np.random.default_rng(33), {}
    for name, entry in header.items():
        if len(entry["shape"]) == 2:
            rows, columns = entry["shape"]
            place = PREFIX + name.removesuffix(".weight")
            tensors[f"{place}.lora_A.weight"] = rng.standard_normal((RANK, columns), np.float32) * np.float32(0.02)
            tensors[f"{place}.lora_B.weight"] = rng.standard_normal((rows, RANK), np.float32) * np.float32(0.02)
    files.write(folder / "adapter_model.safetensors", tensors)
    targets = sorted({name.split(".")[-2] for name in header if len(header[name]["shape"]) == 2})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def by_numpy(base: Path, adapter: Path) -> dict[str, np.ndarray]:
    """What a user would write, tensor by tensor."""
    tensors, parts = (
        _mapped(next(folder.glob("*.safetensors")), dtype)
        for folder, dtype in ((base, ml_dtypes.bfloat16), (adapter, np.float32))
    )
    result = {}
    for name, weight in tensors.items():
        place = PREFIX + name.removesuffix(".weight")
        a, b = (parts.get(f"{place}.lora_{which}.weight") for which in "AB")
        if a is None or b is None:
            result[name] = weight.copy()
        else:
            result[name] = (weight.astype(np.float32) + ALPHA / RANK * (b @ a)).astype(weight.dtype)
    return result


def _mapped(path: Path, dtype: Any) -> dict[str, np.ndarray]:
    header, begin = files.header_of(path)
    data = np.memmap(path, np.uint8, "r")
    return {
        name: data[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]]
        .view(dtype)
        .reshape(entry["shape"])
        for name, entry in header.items()
    }


def by_peft(base: Path, adapter: Path) -> dict[str, Any]:
    """PEFT on modules of these names, with the weights that safetensors.torch loads."""
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file

    weights = load_file(base / "model.safetensors")
    model = torch.nn.Module()
    with torch.device("meta"):
        for name, value in weights.items():
            *path, last = name.split(".")[:-1]
            place = model
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, torch.nn.Module())
                place = getattr(place, part)
            layer = torch.nn.Linear(*value.shape[::-1], bias=False) if value.ndim == 2 else torch.nn.Module()
            if value.ndim == 1:
                layer.weight = torch.nn.Parameter(torch.empty(value.shape))
            place.add_module(last, layer)
    model.load_state_dict(weights, assign=True)
    merged = PeftModel.from_pretrained(model, str(adapter), low_cpu_mem_usage=True).merge_and_unload()
    return merged.state_dict()


def _prepare(base: Path) -> Callable[[], None]:
    def prepare() -> None:
        for file in base.glob("*.safetensors"):
            if not files.cached(file):
                files.warm(file)
        release()
        files.settle(2 << 30)

    return prepare


def close(ours: dict[str, np.ndarray], theirs: dict[str, Any]) -> None:
    """The same except for the last bit: sums in another order; PEFT rounds the change to BF16, too."""
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        other = theirs[name]
        other = other if isinstance(other, np.ndarray) else other.float().numpy()
        wide, other = array.astype(np.float32), other.astype(np.float32)
        assert np.all(np.abs(wide - other) <= 2**-7 * np.abs(wide) + 2**-13), name


@pytest.mark.parametrize("peer", ["numpy.memmap, astype, + s * (B @ A)", "safetensors.torch, PEFT merge_and_unload"])
def test_merging_while_loading(peer: str, base: Path, adapter: Path, table, report) -> None:
    if files.available_memory() < 12 << 30:
        pytest.skip("needs 12 GiB of memory")
    theirs = by_numpy
    if "PEFT" in peer:
        pytest.importorskip("peft", reason="PEFT is absent")
        theirs = by_peft
    sides = {"ours": lambda: safeload.load(base, adapters=adapter), peer: lambda: theirs(base, adapter)}
    samples = race(sides, files.LARGE_ROUNDS, check=close, prepare=_prepare(base))
    job = f"{LAYERS * 0.1217:.2g} GB of bf16, merging an adapter of rank {RANK}"
    row = table.add(job, peer, Comparison(samples["ours"], samples[peer]), target=3)
    report(sides["ours"], [row], rounds=1, prepare=_prepare(base))


@pytest.mark.parametrize("peer", ["torch.svd_lowrank, niter 4", "numpy.linalg.svd"])
def test_extracting(peer: str, tmp_path: Path, table) -> None:
    """The file and both reads are ours alone."""
    side = 2048 if "numpy" in peer else 4096
    change = np.random.default_rng(34).standard_normal((side, side), np.float32)
    change *= np.arange(1, side + 1, dtype=np.float32) ** -0.5
    base, fine = {"w.weight": np.zeros_like(change)}, {"w.weight": change}

    def ours() -> float:
        return safeload.extract(base, fine, tmp_path / "a", rank=RANK, overwrite=True).errors["w.weight"]

    def theirs() -> float:
        if "numpy" in peer:
            u, s, vt = np.linalg.svd(change, full_matrices=False)
        else:
            torch = pytest.importorskip("torch")
            u, s, v = (part.numpy() for part in torch.svd_lowrank(torch.from_numpy(change), RANK + 16, niter=4))
            vt = v.T
        lost = change - (u[:, :RANK] * s[:RANK]) @ vt[:RANK]
        return float(np.sqrt(np.square(lost, dtype=np.float64).sum() / np.square(change, dtype=np.float64).sum()))

    def close(mine: float, other: float) -> None:
        assert mine <= 1.01 * other

    samples = race({"ours": ours, peer: theirs}, files.LARGE_ROUNDS, check=close, warm="numpy" not in peer)
    table.add(f"{side} x {side}, an adapter of rank {RANK}", peer, Comparison(samples["ours"], samples[peer]))
