"""Makes the adapters of this folder with PEFT, and what it merges them to.

Needs torch, transformers and peft 0.21.2: ``python tests/data/lora/make.py``.
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

HERE = Path(__file__).parent


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(12, 20, bias=True)
        self.down = nn.Linear(20, 12, bias=False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.mixed = Conv1D(10, 12)  # [in, out]
        self.image = nn.Conv2d(3, 8, 3)
        self.point = nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(12, 5, bias=True)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))


class Experts(nn.Module):
    """As most of transformers: [experts, out, in]."""

    def __init__(self, count):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, 10, 8))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(count, 10))
        self.down_proj = nn.Parameter(torch.randn(count, 8, 5))


class Turned(nn.Module):
    """As gpt-oss: [experts, in, out], and one of them is square."""

    is_transposed = True

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 16))
        self.down_proj = nn.Parameter(torch.randn(3, 8, 8))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Gate()
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": one}) for one in (Experts(3), Turned(), Experts(1))])


class Attention(nn.Module):
    """Conv1D and Linear, and one of each is square."""

    def __init__(self):
        super().__init__()
        self.c_attn = Conv1D(18, 6)
        self.c_proj = Conv1D(6, 6)
        self.q_proj = nn.Linear(6, 6)
        self.up = nn.Linear(6, 8)


# Models with a base of their own, by case.
OTHERS = {"experts": Mixture, "mixed": Attention}
CASES = {
    "experts": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": [],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
        "rank_pattern": {"0.experts.down_proj": 3},
        "alpha_pattern": {"experts.gate_up_proj": 5},
    },
    "mixed": {"r": 2, "lora_alpha": 6, "use_dora": True, "target_modules": ["c_attn", "c_proj", "q_proj", "up"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["up", "down", "embed"],
        "rank_pattern": {"blocks.1.up": 2, r"blocks\.\d\.down": 3},
        "alpha_pattern": {"^blocks.0.down": 1.5, "up": 5},
        "modules_to_save": ["head"],
        "bias": "all",
    },
    "rslora": {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["up", "head"], "lora_bias": True},
    "dora": {"r": 3, "lora_alpha": 5, "use_dora": True, "target_modules": ["up", "embed", "image", "point"]},
    "plain": {"r": 3, "lora_alpha": 5, "target_modules": ["image", "point", "head"]},
    "transposed": {"r": 4, "lora_alpha": 8, "target_modules": ["mixed"], "fan_in_fan_out": True},
    "transposed_dora": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["mixed"],
        "fan_in_fan_out": True,
        "use_dora": True,
    },
}


def make(name, options):
    torch.manual_seed(0)
    model = OTHERS.get(name, Model)()
    base = {key: value.clone().contiguous() for key, value in model.state_dict().items()}
    torch.manual_seed(sum(map(ord, name)))
    tuned = get_peft_model(model, LoraConfig(**options))
    with torch.no_grad():
        for key, value in tuned.named_parameters():
            if value.requires_grad:  # as after a training
                value.copy_(value.abs() * 1.1 + 0.1 if "magnitude" in key else value + torch.randn_like(value) * 0.3)
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    tuned.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    merged = tuned.merge_and_unload().state_dict()
    changed = {key: value.contiguous() for key, value in merged.items() if not torch.equal(value, base[key])}
    save_file(changed, HERE / f"{name}.safetensors")
    return base


for case, settings in CASES.items():
    if len(sys.argv) == 1 or case in sys.argv[1:]:
        save_file(make(case, settings), HERE / (f"{case}_base.safetensors" if case in OTHERS else "base.safetensors"))
