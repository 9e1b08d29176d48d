"""Fixtures of ZeRO checkpoints, written by DeepSpeed and read by its own tool."""

import os
import shutil
from pathlib import Path

import deepspeed
import torch
import torch.multiprocessing
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file

# Name, stage, processes, and 16-bit dtype of each fixture.
FIXTURES = {
    "zero1_2": (1, 2, "bf16"),
    "zero2_1": (2, 1, "bf16"),
    "zero2_3": (2, 3, "bf16"),
    "zero3_2": (3, 2, "bf16"),
    "zero3_3": (3, 3, "bf16"),
}


class Model(torch.nn.Module):
    """Odd sizes, two groups of parameters, a frozen weight, a shared weight and buffers."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(13, 5)
        self.norm = torch.nn.LayerNorm(5)
        self.frozen = torch.nn.Linear(5, 7, bias=False)
        self.mix = torch.nn.Linear(5, 5)
        self.head = torch.nn.Linear(5, 13, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("scale", torch.arange(3) / 3)
        self.register_buffer("steps", torch.arange(4))

    def forward(self, tokens):
        hidden = self.norm(self.embed(tokens))
        return self.head(self.mix(hidden)) + self.frozen(hidden).mean()


def process(rank, folder, name):
    """Train for a step and save, as one of the processes."""
    stage, processes, dtype = FIXTURES[name]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29_700 + stage * 10 + processes))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0}], lr=0.01)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        dtype: {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loss = engine(torch.arange(4)).float().square().mean()
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(folder, client_state={"epoch": 3, "note": "text"})


def make(folder, names=tuple(FIXTURES)):
    """Make fixtures with DeepSpeed, and beside each the weights that DeepSpeed's own tool gives."""
    for name in names:
        path = f"{folder}/{name}"
        shutil.rmtree(path, ignore_errors=True)
        torch.multiprocessing.start_processes(process, (path, name), FIXTURES[name][1], start_method="spawn")
        for script in Path(path).glob("*.py"):
            script.unlink()
        whole = get_fp32_state_dict_from_zero_checkpoint(path)
        save_file({key: value.contiguous().clone() for key, value in whole.items()}, f"{path}.safetensors")
