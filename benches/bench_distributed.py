"""A torch.distributed checkpoint of 4 GB to safetensors, against torch's own tool and `save_file`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import files
import pytest
from bench_save import folder  # noqa: F401 - a fixture
from compare import Comparison, race, release

import safeload

pytest.importorskip("torch")

# 64 tensors of 64 MiB, and the processes that write them.
TENSORS, ROWS, COLUMNS, PROCESSES = 64, 4096, 8192, 4
ROUNDS = files.LARGE_ROUNDS
THEIRS = "dcp_to_torch_save, torch.load, save_file"

_WRITE = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
folder, tensors, rows, columns, processes = sys.argv[1], *map(int, sys.argv[2:])
def run(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29513", RANK=str(rank), WORLD_SIZE=str(processes))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (processes,))
    state = {}
    for k in range(tensors):
        numbers = torch.Generator().manual_seed(k * processes + rank)
        local = torch.randn(rows // processes, columns, generator=numbers).to(torch.bfloat16)
        state[f"model.layers.{k}.weight"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(run, nprocs=processes)
"""


def checkpoint() -> Path:
    """The checkpoint, written once by torch with FSDP's layout: every process has a quarter of the rows."""
    path = files.CACHE / f"dcp-{TENSORS}-{PROCESSES}-v{files.VERSION}"
    if not (path / ".metadata").exists():
        files.CACHE.mkdir(parents=True, exist_ok=True)
        script = files.CACHE / "write_dcp.py"
        script.write_text(_WRITE)
        arguments = [str(number) for number in (TENSORS, ROWS, COLUMNS, PROCESSES)]
        subprocess.run([sys.executable, "-W", "ignore", script, path, *arguments], check=True)
    return path


def ours(source: Path, place: Path) -> Path:
    target = place / "ours.safetensors"
    safeload.convert(source, target, overwrite=True)
    return target


def theirs(source: Path, place: Path) -> Path:
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(source, place / "whole.pt")
    target = place / "theirs.safetensors"
    save_file(torch.load(place / "whole.pt", mmap=True), target)
    (place / "whole.pt").unlink()
    return target


def same(one: Path, other: Path) -> None:
    """Compare the tensors of two files."""
    assert safeload.diff(one, other).same


def _empty(place: Path) -> None:
    for path in place.iterdir():
        path.unlink()


def test_to_safetensors(folder: Path, table, report) -> None:  # noqa: F811
    if shutil.disk_usage(folder).free < 16 << 30 or files.available_memory() < 12 << 30:
        pytest.skip("needs 16 GiB of disk and 12 GiB of memory")
    source = checkpoint()
    sides = {"ours": partial(ours, source, folder), THEIRS: partial(theirs, source, folder)}

    def prepare() -> None:
        release()
        for path in source.glob("*.distcp"):
            files.warm(path)

    samples = race(sides, ROUNDS, check=same, prepare=prepare)
    job = "a torch.distributed checkpoint of 4.3 GB, 4 processes, to one safetensors file"
    rows = [table.add(job, THEIRS, Comparison(samples["ours"], samples[THEIRS]), target=2)]
    _empty(folder)
    report(sides["ours"], rows, rounds=1, prepare=prepare)


_PEAK = """
import sys
from pathlib import Path
sys.path.insert(0, {benches!r})
import torch, safeload
import bench_distributed as bench
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Vm" + "HWM:"))
Path("/proc/self/clear_refs").write_text("5")
before = peak()
bench.{side}(Path({source!r}), Path({place!r}))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
def test_peak_memory(folder: Path, table) -> None:  # noqa: F811
    if shutil.disk_usage(folder).free < 16 << 30:
        pytest.skip("needs 16 GiB of disk")
    source = checkpoint()
    for side, peer, limit in (
        ("ours", "limit: 64 MiB and a tensor", 128 << 20),
        ("theirs", "limit: the checkpoint", 4 << 30),
    ):
        values = {"benches": str(Path(__file__).parent), "side": side, "source": str(source), "place": str(folder)}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _PEAK.format(**values)], check=True, capture_output=True, text=True
        )
        growth = max(1.0, float(done.stdout))
        job = f"growth of peak RSS of that conversion, {'safeload' if side == 'ours' else THEIRS}"
        table.add(job, peer, Comparison([growth], [float(limit)]), target=1 if side == "ours" else None, unit="B")
        _empty(folder)
