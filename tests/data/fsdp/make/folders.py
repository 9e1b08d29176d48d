"""Fixtures of rank files: `torch.save` of each process's state dict, as verl and others call it."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import save_file
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

# Name and processes of each fixture.
FIXTURES = {"line_2": 2, "square_4": 4, "older_2": 2}


def counted(*shape, dtype=torch.float32):
    """Elements in order, all exact in the dtype."""
    return (torch.arange(torch.Size(shape).numel()) % 97).to(dtype).reshape(shape)


def state(name, rank, processes):
    """Return the state dict of a process, and the whole tensors."""
    if name.startswith("older"):
        return older(rank, processes)
    line = init_device_mesh("cpu", (processes,), mesh_dim_names=("fsdp",))
    tensors = {
        "rows": distribute_tensor(counted(7, 5, dtype=torch.bfloat16), line, [Shard(0)]),
        "columns": distribute_tensor(counted(6, 10), line, [Shard(1)]),
        "replicated": distribute_tensor(counted(3, 4), line, [Replicate()]),
        "one_row": distribute_tensor(counted(1, 4), line, [Shard(0)]),
        "parameter": torch.nn.Parameter(distribute_tensor(counted(5, 2), line, [Shard(0)])),
        "plain": counted(11, dtype=torch.int64),
    }
    if processes == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
        tensors["square"] = distribute_tensor(counted(9, 11, 2), square, [Shard(0), Shard(1)])
        tensors["twice"] = distribute_tensor(counted(13, 3), square, [Shard(0), Shard(0)])
        tensors["hybrid"] = distribute_tensor(counted(5, 3), square, [Replicate(), Shard(0)])
    whole = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in tensors.items()}
    return tensors, whole


def older(rank, processes):
    """Return ShardedTensors, as FSDP gives them without a device mesh."""
    tensors, whole = {}, {"rows": counted(7, 5), "more": counted(4, 3, dtype=torch.bfloat16)}
    for name, tensor in whole.items():
        parts = torch.chunk(tensor, processes)
        begin = sum(len(part) for part in parts[:rank])
        metadata = ShardMetadata([begin, 0], list(parts[rank].shape), f"rank:{rank}/cpu")
        shard = sharded_tensor.Shard(parts[rank].clone(), metadata)
        tensors[name] = sharded_tensor.init_from_local_shards([shard], *tensor.shape)
    return tensors, whole


def process(rank, folder, name):
    """Run a process of the job."""
    processes = FIXTURES[name]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29_800 + processes + 10 * len(name)))
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    tensors, whole = state(name, rank, processes)
    os.makedirs(f"{folder}/{name}", exist_ok=True)
    torch.save(tensors, f"{folder}/{name}/model_world_size_{processes}_rank_{rank}.pt")
    torch.save({"lr": 0.1}, f"{folder}/{name}/optim_world_size_{processes}_rank_{rank}.pt")
    if rank == 0:
        save_file({key: value.detach().contiguous() for key, value in whole.items()}, f"{folder}/{name}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def make(folder):
    """Make all fixtures, and beside each the whole tensors."""
    for name, processes in FIXTURES.items():
        torch.multiprocessing.start_processes(process, (str(folder), name), processes, start_method="spawn")
