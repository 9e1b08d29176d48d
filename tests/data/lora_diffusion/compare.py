"""Lets LyCORIS and PEFT load adapters that safeload renamed, and merge random values: ``compare.py [SEEDS]``.

Needs the packages of `make.py`, and safeload. Prints what each case becomes, and fails if weights or factors differ.
"""

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from lycoris import LycorisNetwork, create_lycoris
from lycoris.wrapper import create_lycoris_from_weights
from make import unet_model
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import safeload

HERE = Path(__file__).parent
STATE = load_file(HERE / "unet_base.safetensors")
BLOCK = "mid_block.attentions.0.transformer_blocks.0"
TARGETS = [f"{BLOCK}.attn1.to_q", f"{BLOCK}.ff.net.0.proj", f"{BLOCK}.ff.net.2"]
KERNELS = ["mid_block.resnets.0.conv1", "mid_block.resnets.1.conv2", "mid_block.attentions.0.proj_in"]
OF_LYCORIS = {
    "locon": {"algo": "locon"},
    "locon tucker": {"algo": "locon", "use_tucker": True},
    "dora": {"algo": "locon", "dora_wd": True},
    "dora columns": {"algo": "locon", "dora_wd": True, "wd_on_output": False},
    "loha": {"algo": "loha"},
    "loha tucker": {"algo": "loha", "use_tucker": True},
    "loha dora": {"algo": "loha", "dora_wd": True},
    "lokr": {"algo": "lokr"},
    "lokr 2": {"algo": "lokr", "factor": 2},
    "lokr 4": {"algo": "lokr", "factor": 4},
    "lokr both": {"algo": "lokr", "decompose_both": True, "factor": 4},
    "lokr full": {"algo": "lokr", "full_matrix": True},
    "lokr tucker": {"algo": "lokr", "use_tucker": True, "factor": 2},
    "lokr unbalanced": {"algo": "lokr", "factor": 2, "unbalanced_factorization": True},
}
OF_PEFT = {
    "LoRA": LoraConfig(r=2, lora_alpha=3, alpha_pattern={"to_q": 5}, rank_pattern={"conv1": 3}),
    "DoRA": LoraConfig(r=2, lora_alpha=3, use_dora=True),
    "LoHa": LoHaConfig(r=2, alpha=3, alpha_pattern={"to_q": 5}),
    "LoHa core": LoHaConfig(r=2, alpha=3, use_effective_conv2d=True),
    "LoKr": LoKrConfig(r=1, alpha=3),
    "LoKr 4": LoKrConfig(r=1, alpha=3, decompose_factor=4),
    "LoKr both": LoKrConfig(r=1, alpha=3, decompose_factor=4, decompose_both=True),
    "LoKr core": LoKrConfig(r=1, alpha=3, decompose_factor=2, use_effective_conv2d=True),
    "LoKr whole": LoKrConfig(r=8, alpha=8),
    "LoKr whole scaled": LoKrConfig(r=8, alpha=4),
}


def model() -> UNet2DConditionModel:
    unet = unet_model().double()
    unet.load_state_dict({name: value.double() for name, value in STATE.items()})
    return unet


def shuffled(path, tensors, seed):
    """A file with its tensors in another order, and without alphas for every third seed."""
    names = [name for name in tensors if seed % 3 or not name.endswith(".alpha")]
    random.Random(seed).shuffle(names)
    save_file({name: tensors[name].contiguous() for name in names}, path)


def by_lycoris(options, path, seed):
    """Write an adapter of LyCORIS with random values."""
    LycorisNetwork.apply_preset({"target_name": TARGETS + KERNELS, "target_module": [], "enable_conv": True})
    torch.manual_seed(seed)
    network = create_lycoris(model(), 1.0, linear_dim=2, linear_alpha=1.0, conv_dim=1, conv_alpha=1.0, **options)
    network.apply_to()
    for name, value in network.named_parameters():
        value.data = value.float() + 0.2 if "dora_scale" in name else torch.randn_like(value).float() * 0.5
    shuffled(path, network.state_dict(), seed)


def in_lycoris(path):
    """Return the weights that LyCORIS computes from a file, as its forward pass does."""
    tensors = {name.replace("lora_unet_", "lycoris_", 1): value.double() for name, value in load_file(path).items()}
    network, _ = create_lycoris_from_weights(1.0, "", model(), tensors)
    merged = {}
    for lora in network.double().loras:
        name = next(each for each in TARGETS + KERNELS if lora.lora_name == "lycoris_" + each.replace(".", "_"))
        weight = STATE[f"{name}.weight"].double()
        kind = type(lora).__name__
        own = lora.make_weight() * lora.scale if kind == "LoConModule" else lora.get_weight(weight.shape)
        weight = weight + own.detach().reshape(weight.shape)
        merged[f"{name}.weight"] = lora.apply_weight_decompose(weight).detach() if lora.wd else weight
    return merged


def by_peft(config, folder, seed):
    torch.manual_seed(seed)
    config.target_modules = TARGETS + KERNELS
    adapted = get_peft_model(model().float(), config)
    for name, value in adapted.named_parameters():
        if value.requires_grad:
            value.data = value + 0.2 if "magnitude" in name else torch.randn_like(value) * 0.5
    adapted.save_pretrained(folder)


def in_peft(folder):
    adapted = PeftModel.from_pretrained(model(), folder).double()
    for name, value in load_file(folder / "adapter_model.safetensors").items():  # not rounded to the base's dtype
        assert any(torch.equal(value.double(), each) for each in adapted.state_dict().values()), name
    merged = adapted.merge_and_unload().state_dict()
    return {f"{name}.weight": merged[f"{name}.weight"] for name in TARGETS + KERNELS}


def check(what, found, expected):
    for name, value in expected.items():
        wrong = (found[name] - value).abs().max() / value.abs().max()
        assert wrong < 1e-6, (what, name, wrong)


def compare(what, path, expected):
    """Compare with the weights of LyCORIS, which guesses the shapes of LoKr, and does not load all that it saves."""
    try:
        merged = in_lycoris(path)
    except (RuntimeError, AttributeError) as error:
        return print(f"  {what}: {error}")
    return check(what, merged, {name: expected[name] for name in merged})


def alike(a, b):
    """Whether two files have the same factors; alphas in only one of the files are those of the ranks."""
    a, b = load_file(a), load_file(b)
    a = {name.replace("lycoris_", "lora_unet_", 1): value for name, value in a.items()}
    names = {name for name in a.keys() ^ b.keys() if not name.endswith(".alpha")}
    return not names and all(torch.equal(a[name], b[name]) for name in a.keys() & b.keys() if ".alpha" not in name)


def renamed(source, target, layout, what):
    """Convert twice, and return whether the adapter has a form there."""
    files = [target, target.with_name(f"again_{target.name}")]
    for file in files:
        place = file if layout else f"{file}/"
        try:
            safeload.convert(source, place, base=HERE / "unet_base.safetensors", layout=layout)
        except safeload.UnsupportedError as error:
            print(f"  {what}: {str(error).rpartition('of the adapter ')[2]}")
            return False
    files = files if layout else [file / "adapter_model.safetensors" for file in files]
    assert files[0].read_bytes() == files[1].read_bytes()
    return True


folder = Path(tempfile.mkdtemp())
for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
    print(f"seed {seed}")
    for case, options in OF_LYCORIS.items():
        place = folder / f"{seed} {case}".replace(" ", "_")
        place.mkdir()
        source, kohya, back = (place / f"{name}.safetensors" for name in ("source", "kohya", "back"))
        by_lycoris(options, source, seed)
        own = {
            name: torch.from_numpy(v)
            for name, v in safeload.load(HERE / "unet_base.safetensors", adapters=source, dtype="float64").items()
        }
        assert renamed(source, kohya, "kohya", f"{case} to kohya")
        assert alike(source, kohya), case
        if renamed(source, place / "peft", None, f"{case} to PEFT"):
            check(
                f"{case} in PEFT",
                in_peft(place / "peft"),
                {f"{n}.weight": own[f"{n}.weight"] for n in TARGETS + KERNELS},
            )
            assert renamed(place / "peft", back, "kohya", f"{case} back")
            assert alike(kohya, back), case
        compare(f"{case} in LyCORIS", kohya, own)
    for case, config in OF_PEFT.items():
        place = folder / f"{seed} {case}".replace(" ", "_")
        place.mkdir()
        by_peft(config, place / "source", seed)
        expected = in_peft(place / "source")
        if renamed(place / "source", place / "kohya.safetensors", "kohya", f"{case} to kohya"):
            compare(f"{case} in LyCORIS", place / "kohya.safetensors", expected)
            assert renamed(place / "kohya.safetensors", place / "back", None, f"{case} back"), case
            a, b = (load_file(place / name / "adapter_model.safetensors") for name in ("source", "back"))
            assert a.keys() == b.keys()
            assert all(torch.equal(a[name], b[name]) for name in a), case
            check(f"{case} back in PEFT", in_peft(place / "back"), expected)
        if renamed(place / "source", place / "d.safetensors", "diffusers", f"{case} to Diffusers"):
            unet = model()
            metadata = json.loads(safeload.open(place / "d.safetensors").metadata["lora_adapter_metadata"])
            unet.load_lora_adapter(load_file(place / "d.safetensors"), prefix="unet", metadata=metadata)
            unet.double()
            unet.fuse_lora()
            unet.unload_lora()
            check(f"{case} in Diffusers", unet.state_dict(), expected)
shutil.rmtree(folder)
print("all others are merged alike")
