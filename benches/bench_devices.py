"""Files to a GPU: `safeload.torch` against safetensors.torch, fastsafetensors, Run:ai's streamer and pinned copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import files
import pytest
from compare import Comparison, race

import safeload.torch

torch = pytest.importorskip("torch", reason="torch is absent")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

import safetensors.torch  # noqa: E402

ROUNDS = files.LARGE_ROUNDS
RING = 16 << 20


def _ready(tensors: Any) -> Any:
    torch.cuda.synchronize()
    return tensors


def _streamer(path: Path) -> dict[str, Any]:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        return {name: tensor.to("cuda") for name, tensor in streamer.get_tensors()}


def _fastsafetensors(path: Path) -> dict[str, Any]:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(filenames=[str(path)], nogds=True, device="cuda:0") as file:
        return {name: file.get_tensor(name).clone() for name in file.get_keys()}  # its own end with the file


def _pinned_copies(nbytes: int) -> Callable[[], None]:
    """As many bytes from pinned memory that is filled: what the link gives."""
    source = torch.ones(RING, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(RING, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        for _ in range(-(-nbytes // RING)):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return copy


def _same(ours: Any, theirs: Any) -> None:
    if theirs is None:  # the limit
        return
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.device.type == theirs[name].device.type == "cuda"
        assert torch.equal(tensor, theirs[name]), name


def _prepare(path: Path) -> None:
    if not files.cached(path):
        files.warm(path)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [None, "float32"], ids=["as stored", "as F32"])
def test_file_to_gpu(dtype: str | None, llama: Path, table, report) -> None:
    job = "safeload.torch.load_file 2.5 GB to a GPU" + (", BF16 as F32" if dtype else "")
    sides: dict[str, Callable[[], Any]] = {
        "ours": lambda: _ready(safeload.torch.load_file(llama, device="cuda", dtype=dtype))
    }
    peers = {
        "safetensors.torch": lambda: safetensors.torch.load_file(llama, device="cuda"),
        "fastsafetensors": lambda: _fastsafetensors(llama),
        "runai-model-streamer": lambda: _streamer(llama),
    }
    for name, load in peers.items():
        try:
            load()
        except ImportError as error:
            print(f"{name}: {error}")
            continue
        sides[name] = (
            (lambda load=load: _ready({key: tensor.float() for key, tensor in load().items()}))
            if dtype
            else (lambda load=load: _ready(load()))
        )
    sides["limit: pinned copies of as many bytes"] = _pinned_copies(llama.stat().st_size)
    samples = race(sides, ROUNDS, check=_same, prepare=lambda: _prepare(llama))
    rows = [
        table.add(job, name, Comparison(samples["ours"], samples[name]), target=0.8 if name.startswith("limit") else 1)
        for name in sides
        if name != "ours"
    ]
    report(sides["ours"], rows, rounds=1, prepare=lambda: _prepare(llama))
