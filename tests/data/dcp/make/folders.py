"""Fixtures of training checkpoints, written by torch."""

import dataclasses
import os
import pickle
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

# Fixtures of each number of processes; the test suite holds those of COMMITTED, tests/long.sh makes all.
KINDS = ("plain", "zstd", "safetensors", "separate", "hf", "hf_numbered")
COMMITTED = {1: ("plain", "hf"), 2: ("plain", "separate"), 4: ("plain", "zstd", "safetensors", "hf", "hf_numbered")}


def counted(*shape, dtype=torch.float32):
    """Elements in order, all exact in the dtype."""
    numbers = torch.arange(torch.Size(shape).numel()) % 97
    return (numbers % 2 == 0 if dtype == torch.bool else numbers).to(dtype).reshape(shape)


def state(processes):
    """Return a nested state dict with every kind of tensor that a rank can hold."""
    line = init_device_mesh("cpu", (processes,))
    model = {
        "rows": distribute_tensor(counted(7, 5, dtype=torch.bfloat16), line, [Shard(0)]),
        "columns": distribute_tensor(counted(6, 10), line, [Shard(1)]),
        "replicated": distribute_tensor(counted(3, 4, dtype=torch.float16), line, [Replicate()]),
        "one_row": distribute_tensor(counted(1, 4), line, [Shard(0)]),
        "plain": counted(11, dtype=torch.int64),
        "mask": counted(5, dtype=torch.bool),
        "scalar": torch.tensor(3.5),
        "transposed": counted(4, 6).t(),
        "empty": torch.zeros(0, 4),
        "a.b/ü": counted(2, 2, dtype=torch.uint8),
        "fp8": counted(4, 4).to(torch.float8_e4m3fn),
    }
    if processes == 4:
        square = init_device_mesh("cpu", (2, 2))
        model["square"] = distribute_tensor(counted(9, 11, 2), square, [Shard(0), Shard(1)])
        model["twice"] = distribute_tensor(counted(13, 3), square, [Shard(0), Shard(0)])
        model["hybrid"] = distribute_tensor(counted(5, 3), square, [Replicate(), Shard(0)])
    average = distribute_tensor(counted(9, 3), line, [Shard(0)])
    return {
        "model": model,
        "optim": {
            "state": {"0": {"step": torch.tensor(4.0), "exp_avg": average}},
            "param_groups": [{"lr": 0.1, "betas": [0.9, 0.95]}],
        },
        "step": 17,
        "mixed": [torch.ones(2), "text", 3],
    }


def tensors_of(tree, prefix=""):
    """Iterate over dotted names and whole tensors."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        name = f"{prefix}{key}"
        if isinstance(value, (dict, list)):
            yield from tensors_of(value, f"{name}.")
        elif isinstance(value, torch.Tensor):
            yield name, (value.full_tensor() if hasattr(value, "full_tensor") else value).contiguous()


def write(kind, processes, folder):
    """Write a fixture; every process calls it."""
    tree = state(processes)
    if kind in ("safetensors", "hf", "hf_numbered"):  # safetensors refuses strided tensors
        tree["model"]["transposed"] = tree["model"]["transposed"].contiguous()
    if kind == "zstd":
        writer = FileSystemWriter(folder, thread_count=2, _extensions=[ZStandard()])
    elif kind == "safetensors":
        writer = FileSystemWriter(folder, serialization_format=SerializationFormat.SAFETENSORS)
    elif kind.startswith("hf"):
        tree = tree["model"]
        numbers = {name: 1 + k % 2 for k, name in enumerate(tree)} if kind == "hf_numbered" else None
        writer = HuggingFaceStorageWriter(folder, fqn_to_index_mapping=numbers, save_distributed=True)
    else:
        writer = FileSystemWriter(folder)
    dcp.save(tree, storage_writer=writer, use_collectives=kind != "separate")


def process(rank, processes, folder, kinds):
    """Run a process of the job."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29_500 + processes))
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    for kind in kinds:
        write(kind, processes, f"{folder}/{kind}_{processes}")
        dist.barrier()
    whole = dict(tensors_of(state(processes)))
    if rank == 0:
        save_file(whole, f"{folder}/expected_{processes}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def make_old(source, folder):
    """Rewrite the metadata of a fixture as torch wrote it before 2.3: other class, no version, no transforms."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    shutil.copytree(source, folder, dirs_exist_ok=True)
    metadata = pickle.loads((Path(source) / ".metadata").read_bytes())
    for about in metadata.state_dict_metadata.values():
        if hasattr(about, "properties"):
            fields = dataclasses.asdict(about.properties)
            about.properties = TensorProperties(**fields)
    for info in metadata.storage_data.values():
        info.__dict__.pop("transform_descriptors", None)
    metadata.__dict__.pop("version", None)
    metadata.__dict__.pop("storage_meta", None)
    (Path(folder) / ".metadata").write_bytes(pickle.dumps(metadata, 2))


def make(folder, kinds_of):
    """Make the fixtures of each number of processes."""
    for processes, kinds in kinds_of.items():
        arguments = processes, str(folder), kinds
        torch.multiprocessing.start_processes(process, arguments, processes, start_method="spawn")
    make_old(f"{folder}/plain_2", f"{folder}/old_2")
