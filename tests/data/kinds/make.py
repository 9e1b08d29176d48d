"""Makes the adapters of this folder with PEFT, and what it merges them to in float64.

``python tests/data/kinds/make.py [CASE ...]`` needs torch, transformers and peft 0.21.2; the cases of OLD need the PEFT
of their names, and transformers 4.56.2. ``compare.py`` merges the same adapters with other values.
"""

import copy
import sys
from pathlib import Path

import peft
import torch
from peft import PeftModel, get_peft_model
from peft.tuners.boft import layer
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

HERE = Path(__file__).parent


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)
        self.square = nn.Linear(8, 8)
        self.mixed = Conv1D(6, 8)  # [in, out]
        self.turned = Conv1D(8, 8)
        self.image = nn.Conv2d(4, 6, 3)
        self.point = nn.Conv2d(4, 4, 1)
        self.line = nn.Conv1d(4, 6, 3)
        self.groups = nn.Conv2d(4, 6, 2, groups=2)
        self.volume = nn.Conv3d(2, 4, 2)


LINEAR, CONVOLUTIONS = ["up", "down", "square"], ["image", "point", "line", "groups"]
LYCORIS = {"alpha": 3, "target_modules": LINEAR + CONVOLUTIONS}
OFT = {"oft_block_size": 4, "target_modules": [*LINEAR, "image", "point"]}
CASES = {
    "loha": ("LoHa", {**LYCORIS, "r": 3, "rank_pattern": {"up": 2}, "alpha_pattern": {"image": 5}}),
    "loha_tucker": ("LoHa", {**LYCORIS, "r": 2, "use_effective_conv2d": True}),
    "lokr": ("LoKr", {**LYCORIS, "r": 1}),
    "lokr_both": ("LoKr", {**LYCORIS, "r": 1, "decompose_both": True, "decompose_factor": 4}),
    "lokr_tucker": ("LoKr", {**LYCORIS, "r": 1, "use_effective_conv2d": True, "target_modules": ["image", "groups"]}),
    "lokr_full": ("LoKr", {**LYCORIS, "r": 16, "decompose_factor": 2, "init_weights": "lycoris"}),
    "ia3": (
        "IA3",
        {
            "target_modules": [*LINEAR, "image", "point", "groups", "volume"],
            "feedforward_modules": ["down", "point", "groups"],
        },
    ),
    "ia3_turned": ("IA3", {"target_modules": ["mixed", "turned"], "feedforward_modules": ".*turned"}),
    "vera": ("Vera", {"r": 5, "target_modules": LINEAR}),
    "vera_turned": ("Vera", {"r": 5, "target_modules": ["mixed", "turned"]}),
    "adalora": ("AdaLora", {"init_r": 4, "lora_alpha": 3, "total_step": 9, "target_modules": [*LINEAR, "image"]}),
    "adalora_turned": ("AdaLora", {"init_r": 4, "lora_alpha": 0, "total_step": 9, "target_modules": ["mixed"]}),
    "oft": ("OFT", {**OFT, "target_modules": [*OFT["target_modules"], "embed"]}),
    "oft_exact": ("OFT", {**OFT, "use_cayley_neumann": False, "coft": True, "eps": 0.3}),
    "oft_share": ("OFT", {**OFT, "block_share": True, "num_cayley_neumann_terms": 7}),
    "boft": ("BOFT", {"boft_block_size": 4, "target_modules": [*LINEAR, "image", "point"]}),
    "boft_butterfly": (
        "BOFT",
        {"boft_block_size": 2, "boft_n_butterfly_factor": 3, "target_modules": ["up", "square"]},
    ),
    "dora": (
        "Lora",
        {"r": 2, "lora_alpha": 3, "use_dora": True, "target_modules": ["line", "volume", "image", "embed", "square"]},
    ),
}
# Cases of older versions of PEFT.
OLD = {
    "oft_0.15.2": ("OFT", {**OFT, "r": 0, "coft": True, "eps": 0.05}),
    "oft_0.17.1": ("OFT", {**OFT, "num_cayley_neumann_terms": 6, "coft": True, "eps": 0.9}),
}


class BlockDiagonal:
    """Stands for a kernel of CUDA, without which PEFT trains one factor of a butterfly."""

    @staticmethod
    def apply(blocks):
        return torch.stack([torch.block_diag(*each) for each in blocks])


layer.get_fbd_cuda, layer.FastBlockDiag = (lambda: True), BlockDiagonal


def model_of(seed=0):
    torch.manual_seed(seed)
    return Model()


def tuned(kind, options, seed):
    """A model, with an adapter of random values as after a training."""
    model = model_of()
    torch.manual_seed(seed)
    model = get_peft_model(model, getattr(peft, f"{kind}Config")(**copy.deepcopy(options)))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.requires_grad:
                factor = any(part in name for part in ("magnitude", "ia3_l", "boft_s", "oft_s"))
                value.copy_(value.abs() * 0.7 + 0.6 if factor else value + torch.randn_like(value) * 0.3)
    if kind == "AdaLora":  # as after its training: some ranks are gone
        kept = {f"{name}.lora_E.default": [True, name != "down", True, False] for name in options["target_modules"]}
        model.peft_config["default"].rank_pattern = kept
        with torch.no_grad():
            for name, value in model.named_parameters():
                if ".lora_E." in name:
                    value[[not each for each in kept[name.removeprefix("base_model.model.")]]] = 0
    return model


def made(kind, options, seed, folder):
    """Saves an adapter; returns the base, and what PEFT merges the saved adapter to in float64."""
    tuned(kind, options, seed).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    base = model_of().state_dict()
    merged = PeftModel.from_pretrained(model_of(), folder).double().merge_and_unload().state_dict()
    return base, {
        key: value.contiguous() for key, value in merged.items() if not torch.equal(value, base[key].double())
    }


if __name__ == "__main__":
    chosen = {name: case for name, case in {**CASES, **OLD}.items() if name in sys.argv[1:]} or CASES
    for name, case in chosen.items():
        weights, changed = made(*case, sum(map(ord, name)), HERE / name)
        save_file(weights, HERE / "base.safetensors")
        save_file(changed, HERE / f"{name}.safetensors")
