"""Let Megatron write the fixtures: python make.py FOLDER, with megatron-core, torch, psutil, packaging and safetensors.

A folder of ``torch_dist`` for 1, 2 and 4 processes on CPUs: tensors divided along the first and along the second axis,
a replicated one, layers stacked along an axis in front, and values. ``expected.safetensors`` holds the whole tensors
that `dist_checkpointing.load_plain_tensors` gives.
"""

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file


def dist_checkpointing():
    """Megatron's module; it asks for a CUDA device, also on CPUs."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *arguments: None
    from megatron.core import dist_checkpointing

    return dist_checkpointing


def state(rank, count):
    from megatron.core.dist_checkpointing import ShardedTensor

    numbers = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=numbers)

    embedding, linear = random(8, 6), random(4, 8).to(torch.bfloat16)
    norm, layers = random(5), random(4, 3)
    sharded = ShardedTensor.from_rank_offsets
    rows, columns = embedding.chunk(count)[rank], linear.chunk(count, 1)[rank]
    tensors = {
        "embedding": sharded("embedding.word_embeddings.weight", rows.clone(), (0, rank, count)),
        "linear": sharded("decoder.layers.mlp.linear_fc2.weight", columns.clone().contiguous(), (1, rank, count)),
        "norm": sharded("decoder.final_layernorm.weight", norm, replica_id=rank),
    }
    for k in range(rank, 4, count):
        name = "decoder.layers.input_layernorm.weight"
        tensors[f"layer{k}"] = sharded(name, layers[k].clone(), (0, k, 4), prepend_axis_num=1)
    return {**tensors, "iteration": 7, "args": {"lr": 0.5}}


def run(rank, count, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29500 + count), RANK=str(rank), WORLD_SIZE=str(count))
    dist.init_process_group("gloo", rank=rank, world_size=count)
    checkpoint = folder / f"torch_dist_{count}"
    dist_checkpointing().save(state(rank, count), str(checkpoint))
    dist.barrier()
    if count == 1:
        whole = dist_checkpointing().load_plain_tensors(str(checkpoint))
        save_file(
            {name: value.contiguous() for name, value in whole.items() if isinstance(value, torch.Tensor)},
            folder / "expected.safetensors",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    for count in (1, 2, 4):
        folder = Path(sys.argv[1])
        shutil.rmtree(folder / f"torch_dist_{count}", ignore_errors=True)
        (folder / f"torch_dist_{count}").mkdir()
        mp.spawn(run, (count, folder), nprocs=count)
