"""Programs that several processes of torch run together on this machine, as ranks of a mesh."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

from builders import inside

# What every program begins with.
_PROLOGUE = inside.program("""
import os, sys
import numpy as np, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
import safeload
from safeload.torch import load_checkpoint

folder, rank, ranks, meeting = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=ranks)
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))

def same(tensor, expected):
    assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), (tensor.shape, expected.shape)
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, expected)]
    assert torch.equal(*bits)

# Whether a DTensor is what torch makes of the whole tensor.
def divided(tensor, whole, mesh, placements):
    assert type(tensor) is DTensor and tensor.shape == whole.shape
    assert tensor.stride() == torch.empty(whole.shape).stride() and tensor.device_mesh == mesh
    bits = whole.view(torch.uint8) if whole.element_size() == 1 else whole  # torch cannot divide all dtypes
    expected = distribute_tensor(bits.contiguous(), mesh, placements, src_data_rank=None)
    assert tensor.placements == expected.placements
    same(tensor.to_local(), expected.to_local().view(whole.dtype))

def refused(kind, text, **options):
    try:
        load_checkpoint(folder + "/model", mesh=mesh, **options)
    except kind as error:
        assert type(error) is kind and text in str(error), (type(error), str(error))
    else:
        raise AssertionError(f"not refused: {text}")

# Bytes that the system has read for this process; pages of mapped files do not count.
def read():
    with open("/proc/self/io") as counts:
        return int(next(counts).split()[1])
""")
_EPILOGUE = """
dist.barrier()
dist.destroy_process_group()
print("done")
"""


def run(program: str, folder: Path, ranks: int) -> None:
    """Run a program in several processes, whose argument is a folder, and require that all reach its end."""
    meeting = folder / uuid.uuid4().hex
    command = [sys.executable, "-I", "-c", _PROLOGUE + program + _EPILOGUE, str(folder)]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(meeting)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        results = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (out, errors) in zip(running, results, strict=True):
        assert (process.returncode, out) == (0, "done\n"), out + errors
