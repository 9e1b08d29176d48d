"""Tensors of torch against safetensors.torch, which is installed for it: `pip install torch`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import files
import pytest
import safetensors
from compare import Comparison, race, release

import safeload
import safeload.torch

torch = pytest.importorskip("torch", reason="torch is absent")

import safetensors.torch  # noqa: E402

PEER = "safetensors.torch"


def _bf16(count: int, shape: tuple[int, ...]) -> Path:
    entries = [files.Entry(f"model.layers.{k}.weight", "BF16", shape) for k in range(count)]
    return files.make(f"bf16-{count}x{'x'.join(map(str, shape))}", entries)


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        other = theirs[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        pair = [x[..., ::7].float().nan_to_num() for x in (tensor, other)]
        assert torch.equal(*pair), name


def _run(
    job: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    rounds: int,
    target: float,
    table,
    report,
    **options: Any,
) -> None:
    samples = race({"ours": ours, PEER: theirs}, rounds, check=_same, **options)
    row = table.add(job, PEER, Comparison(samples["ours"], samples[PEER]), target=target)
    report(ours, [row], rounds=3)


@pytest.mark.parametrize(
    ("count", "shape", "target"), [(1, (4,), 1), (1, (512, 512), 1), (300, (32, 32), 1.5)], ids=["4", "512 KiB", "300"]
)
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_load_file_of_small_tensors(
    count: int, shape: tuple[int, ...], target: float, backend: str, table, report
) -> None:
    path = _bf16(count, shape)
    job = f"safeload.torch.load_file, {count} x BF16 {list(shape)}, {backend}"
    ours = lambda: safeload.torch.load_file(path, backend=backend)  # noqa: E731
    theirs = lambda: safetensors.torch.load_file(path, backend=backend)  # noqa: E731
    _run(job, ours, theirs, 60, target if backend == "mmap" else 1, table, report, number=20)


def test_load_file_of_a_large_file(llama: Path, table, report) -> None:
    job = "safeload.torch.load_file 2.5 GB, mmap"
    ours = lambda: safeload.torch.load_file(llama)  # noqa: E731
    _run(job, ours, lambda: safetensors.torch.load_file(llama), 20, 1, table, report, number=5)


def _first(module: Any, path: Path, slices: bool) -> dict[str, Any]:
    with module.safe_open(path, framework="pt") as file:
        name = file.keys()[0]
        return {name: file.get_slice(name)[:2] if slices else file.get_tensor(name)}


@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize("slices", [False, True], ids=["get_tensor", "get_slice"])
def test_safe_open_and_one_tensor(slices: bool, count: int, table, report) -> None:
    path = _bf16(count, (32, 32))
    job = f'safe_open "pt", keys, one {"get_slice" if slices else "get_tensor"}, {count} x BF16 [32, 32]'
    ours, theirs = (lambda module=module: _first(module, path, slices) for module in (safeload, safetensors))
    _run(job, ours, theirs, 60, 1, table, report, number=20)


def test_load_as_f32(llama: Path, table, report) -> None:
    def prepare() -> None:
        if not files.cached(llama):
            files.warm(llama)
        release()
        files.settle(int(llama.stat().st_size * 2.2))

    _run(
        "safeload.torch.load_file 2.5 GB of BF16 as F32, against .float()",
        lambda: safeload.torch.load_file(llama, dtype="float32"),
        lambda: {name: tensor.float() for name, tensor in safetensors.torch.load_file(llama).items()},
        files.LARGE_ROUNDS,
        3,
        table,
        report,
        prepare=prepare,
    )


@pytest.mark.parametrize("count", [1, 300])
def test_content_both_ways(count: int, table, report) -> None:
    path = _bf16(count, (32, 32))
    data = path.read_bytes()
    tensors = safeload.torch.load(data)
    ours = lambda: safeload.torch.load(data)  # noqa: E731
    _run(f"safeload.torch.load(bytes), {count} x BF16 [32, 32]", ours, lambda: safetensors.torch.load(data), 60, 1,
         table, report, number=20)  # fmt: skip
    samples = race(
        {"ours": lambda: safeload.torch.save(tensors), PEER: lambda: safetensors.torch.save(tensors)}, 60, number=20
    )
    job = f"safeload.torch.save, {count} x BF16 [32, 32]"
    table.add(job, PEER, Comparison(samples["ours"], samples[PEER]), target=1)
