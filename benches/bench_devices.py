"""Files to a GPU: `safeload.torch` against safetensors, fastsafetensors, Run:ai's streamer and InstantTensor."""

from __future__ import annotations

import os
import threading
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

ROUNDS = 5
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

    with fastsafe_open([str(path)], device="cuda:0", nogds=True) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def _instanttensor(path: Path) -> dict[str, Any]:
    import instanttensor

    buffered = instanttensor.BackendPolicy.BUFFERED  # its default reads from the disk, past the page cache
    with instanttensor.safe_open([str(path)], framework="pt", device=0, backend=buffered) as file:
        return dict(file.tensors())


def _prefetch(opened: Any, threads: int) -> dict[str, Any]:
    with opened as file, file.prefetch(device="cuda:0", threads=threads) as loader:
        return dict(loader)


def _theirs(path: Path, threads: int = 8) -> dict[str, Any]:
    if not hasattr(safetensors.safe_open, "prefetch"):
        raise ImportError(f"safetensors {safetensors.__version__} has no prefetch")
    return _prefetch(safetensors.safe_open(path, "pt"), threads)


def _pinned_copies(nbytes: int) -> Callable[[], None]:
    """As many bytes from pinned memory that is filled: what the link gives."""
    source = torch.ones(RING, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(RING, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        for _ in range(-(-nbytes // RING)):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return copy


def _reads(path: Path, threads: int) -> Callable[[], None]:
    """As many bytes read into pinned memory, each thread with a buffer of its own: what the page cache gives."""
    total = path.stat().st_size
    buffers = [torch.ones(RING, dtype=torch.uint8, pin_memory=True).numpy() for _ in range(threads)]

    def read() -> None:
        def work(k: int) -> None:
            for begin in range(k * RING, total, threads * RING):
                os.preadv(file, [buffers[k][: total - begin]], begin)

        file = os.open(path, os.O_RDONLY)
        workers = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        os.close(file)

    return read


def _same(ours: Any, theirs: Any) -> None:
    if theirs is None:  # the limit
        return
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.device.type == theirs[name].device.type == "cuda"
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
    if len(ours) > 1000:  # a comparison waits for the device
        sides = [torch.cat([side[name].flatten() for name in ours]) for side in (ours, theirs)]
        assert torch.equal(sides[0].view(torch.uint8), sides[1].view(torch.uint8))
        return
    for name, tensor in ours.items():
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name  # NaN too


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
        "safetensors prefetch": lambda: _theirs(llama),
        "fastsafetensors": lambda: _fastsafetensors(llama),
        "runai-model-streamer": lambda: _streamer(llama),
        "instanttensor": lambda: _instanttensor(llama),
    }
    for name, load in peers.items():
        try:
            load()
        except Exception as error:  # not installed, or not made for this machine
            print(f"{name}: {error}")
            continue
        sides[name] = (
            (lambda load=load: _ready({key: tensor.float() for key, tensor in load().items()}))
            if dtype
            else (lambda load=load: _ready(load()))
        )
    threads = min(16, len(os.sched_getaffinity(0)))
    sides["limit: pinned copies of as many bytes"] = _pinned_copies(llama.stat().st_size)
    sides[f"limit: reads into pinned memory, {threads} threads"] = _reads(llama, threads)
    samples = race(sides, ROUNDS, check=_same, prepare=lambda: _prepare(llama))
    rows = [
        table.add(job, name, Comparison(samples["ours"], samples[name]), target=0.6 if name.startswith("limit") else 1)
        for name in sides
        if name != "ours"
    ]
    report(sides["ours"], rows, rounds=1, prepare=lambda: _prepare(llama))


@pytest.mark.parametrize("threads", [8, 16])
def test_prefetch(threads: int, llama: Path, table, report) -> None:
    def ours() -> Any:
        return _ready(_prefetch(safeload.safe_open(llama, "pt"), threads))

    def theirs() -> Any:
        return _ready(_theirs(llama, threads))

    try:
        theirs()
    except ImportError as error:
        pytest.skip(str(error))
    samples = race({"ours": ours, "theirs": theirs}, ROUNDS, check=_same, prepare=lambda: _prepare(llama))
    comparison = Comparison(samples["ours"], samples["theirs"])
    row = table.add(f"safe_open.prefetch 2.5 GB, {threads} threads", "safetensors", comparison, target=1)
    report(ours, [row], rounds=1, prepare=lambda: _prepare(llama))


@pytest.mark.parametrize("count", [300, 100_000])
def test_many_small_tensors(count: int, request, table, report) -> None:
    path = request.getfixturevalue("n300" if count == 300 else "n100k")

    def ours() -> Any:
        return _ready(safeload.torch.load_file(path, device="cuda"))

    def theirs() -> Any:
        return _ready(safetensors.torch.load_file(path, device="cuda"))

    rounds = ROUNDS if count == 300 else 2  # of seconds
    samples = race({"ours": ours, "theirs": theirs}, rounds, check=_same, prepare=lambda: _prepare(path))
    comparison = Comparison(samples["ours"], samples["theirs"])
    job = f"safeload.torch.load_file {count:,} tensors of 32 bytes to a GPU"
    report(ours, [table.add(job, "safetensors.torch", comparison, target=1)], rounds=1, prepare=lambda: _prepare(path))


def test_file_to_gpu_with_jax(llama: Path, table, report) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch has memory of the GPU too
    jax = pytest.importorskip("jax", reason="jax is absent")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    import safetensors.flax

    import safeload.jax

    def ours() -> Any:
        return jax.block_until_ready(safeload.jax.load_file(llama))

    def theirs() -> Any:
        return jax.block_until_ready(safetensors.flax.load_file(llama))

    def check(mine: Any, others: Any) -> None:
        assert list(mine) == list(others)
        for name, array in mine.items():
            assert array.devices() == others[name].devices()
            assert array.dtype == others[name].dtype
            assert bool((array.view("uint16") == others[name].view("uint16")).all()), name

    samples = race({"ours": ours, "theirs": theirs}, ROUNDS, check=check, prepare=lambda: _prepare(llama))
    comparison = Comparison(samples["ours"], samples["theirs"])
    job = "safeload.jax.load_file 2.5 GB to a GPU"
    report(ours, [table.add(job, "safetensors.flax", comparison, target=1)], rounds=1, prepare=lambda: _prepare(llama))
