"""Makes tiny diffusion models in both layouts, LoRA adapters with the names of each tool, and what Diffusers merges.

Needs torch, peft 0.21.2, diffusers 0.42.1 and lycoris-lora 4.1.3: ``python tests/data/lora_diffusion/make.py``. Weights
and products are float64 inside Diffusers, so that a merged tensor is rounded once.
"""

import inspect
import json
import re
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel, WanTransformer3DModel
from diffusers.loaders import lora_conversion_utils as tools
from diffusers.loaders import single_file_utils
from lycoris import LycorisNetwork, create_lycoris
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
WIDTH = 8  # of the transformers


def patched(function):
    """A converter of Diffusers for a Flux of the width here instead of 3072."""
    source = inspect.getsource(function).replace("12288", str(4 * WIDTH)).replace("3072", str(WIDTH))
    space = dict(inspect.getmodule(function).__dict__)
    exec(source, space)
    return space[function.__name__]


def weights(model):
    torch.manual_seed(1)
    return {name: (torch.randn(value.shape) * 0.5).half() for name, value in model.state_dict().items()}


def swapped(value):
    return torch.cat(value.chunk(2)[::-1])


def renamed(state, pairs):
    """The weights of Diffusers under the names of a single file, by pairs of patterns."""
    result, left = {}, dict(state)
    for old, new in pairs:
        for name in [name for name in left if re.fullmatch(rf"{old}\.(weight|bias)", name)]:
            result[re.sub(rf"^{old}\.", f"{new}.", name)] = left.pop(name)
    return result, left


def joined(state, outer, parts, whole):
    """Move the parts of joined weights to the whole, layer by layer."""
    found = {}
    for layer in sorted({match[1] for name in state if (match := re.match(rf"{outer}\.(\d+)\.", name))}):
        for end in ("weight", "bias"):
            names = [f"{outer}.{layer}.{part}.{end}" for part in parts]
            if all(name in state for name in names):
                found[f"{whole.format(layer)}.{end}"] = torch.cat([state.pop(name) for name in names])
    return found


def flux_single(state):
    state = dict(state)
    block, single = "transformer_blocks", "single_transformer_blocks"
    parts = joined(state, block, ("attn.to_q", "attn.to_k", "attn.to_v"), "double_blocks.{}.img_attn.qkv")
    added = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
    parts |= joined(state, block, added, "double_blocks.{}.txt_attn.qkv")
    parts |= joined(state, single, ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), "single_blocks.{}.linear1")
    pairs = [
        ("time_text_embed.timestep_embedder.linear_1", "time_in.in_layer"),
        ("time_text_embed.timestep_embedder.linear_2", "time_in.out_layer"),
        ("time_text_embed.text_embedder.linear_1", "vector_in.in_layer"),
        ("time_text_embed.text_embedder.linear_2", "vector_in.out_layer"),
        ("time_text_embed.guidance_embedder.linear_1", "guidance_in.in_layer"),
        ("time_text_embed.guidance_embedder.linear_2", "guidance_in.out_layer"),
        ("context_embedder", "txt_in"),
        ("x_embedder", "img_in"),
        (r"transformer_blocks.(\d+).norm1.linear", r"double_blocks.\1.img_mod.lin"),
        (r"transformer_blocks.(\d+).norm1_context.linear", r"double_blocks.\1.txt_mod.lin"),
        (r"transformer_blocks.(\d+).attn.to_out.0", r"double_blocks.\1.img_attn.proj"),
        (r"transformer_blocks.(\d+).attn.to_add_out", r"double_blocks.\1.txt_attn.proj"),
        (r"transformer_blocks.(\d+).ff.net.0.proj", r"double_blocks.\1.img_mlp.0"),
        (r"transformer_blocks.(\d+).ff.net.2", r"double_blocks.\1.img_mlp.2"),
        (r"transformer_blocks.(\d+).ff_context.net.0.proj", r"double_blocks.\1.txt_mlp.0"),
        (r"transformer_blocks.(\d+).ff_context.net.2", r"double_blocks.\1.txt_mlp.2"),
        (r"single_transformer_blocks.(\d+).norm.linear", r"single_blocks.\1.modulation.lin"),
        (r"single_transformer_blocks.(\d+).proj_out", r"single_blocks.\1.linear2"),
        ("proj_out", "final_layer.linear"),
        ("norm_out.linear", "final_layer.adaLN_modulation.1"),
    ]
    result, left = renamed(state, pairs)
    for name in left:
        new = name.replace("single_transformer_blocks", "single_blocks").replace("transformer_blocks", "double_blocks")
        for old, place in (
            ("attn.norm_added_q.weight", "txt_attn.norm.query_norm.scale"),
            ("attn.norm_added_k.weight", "txt_attn.norm.key_norm.scale"),
            ("attn.norm_q.weight", "norm.query_norm.scale" if "single" in name else "img_attn.norm.query_norm.scale"),
            ("attn.norm_k.weight", "norm.key_norm.scale" if "single" in name else "img_attn.norm.key_norm.scale"),
        ):
            new = new.replace(old, place)
        result[new] = left[name]
    for end in ("weight", "bias"):
        if (name := f"final_layer.adaLN_modulation.1.{end}") in result:
            result[name] = swapped(result[name])
    return {**result, **parts}


def sd3_single(state):
    state = dict(state)
    block, joint = "transformer_blocks", "joint_blocks.{}."
    parts = joined(state, block, ("attn.to_q", "attn.to_k", "attn.to_v"), f"{joint}x_block.attn.qkv")
    parts |= joined(state, block, ("attn2.to_q", "attn2.to_k", "attn2.to_v"), f"{joint}x_block.attn2.qkv")
    added = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
    parts |= joined(state, block, added, f"{joint}context_block.attn.qkv")
    pairs = [
        ("time_text_embed.timestep_embedder.linear_1", "t_embedder.mlp.0"),
        ("time_text_embed.timestep_embedder.linear_2", "t_embedder.mlp.2"),
        ("time_text_embed.text_embedder.linear_1", "y_embedder.mlp.0"),
        ("time_text_embed.text_embedder.linear_2", "y_embedder.mlp.2"),
        ("context_embedder", "context_embedder"),
        ("pos_embed.proj", "x_embedder.proj"),
        (r"transformer_blocks.(\d+).norm1.linear", r"joint_blocks.\1.x_block.adaLN_modulation.1"),
        (r"transformer_blocks.(\d+).norm1_context.linear", r"joint_blocks.\1.context_block.adaLN_modulation.1"),
        (r"transformer_blocks.(\d+).attn.to_out.0", r"joint_blocks.\1.x_block.attn.proj"),
        (r"transformer_blocks.(\d+).attn2.to_out.0", r"joint_blocks.\1.x_block.attn2.proj"),
        (r"transformer_blocks.(\d+).attn.to_add_out", r"joint_blocks.\1.context_block.attn.proj"),
        (r"transformer_blocks.(\d+).ff.net.0.proj", r"joint_blocks.\1.x_block.mlp.fc1"),
        (r"transformer_blocks.(\d+).ff.net.2", r"joint_blocks.\1.x_block.mlp.fc2"),
        (r"transformer_blocks.(\d+).ff_context.net.0.proj", r"joint_blocks.\1.context_block.mlp.fc1"),
        (r"transformer_blocks.(\d+).ff_context.net.2", r"joint_blocks.\1.context_block.mlp.fc2"),
        ("norm_out.linear", "final_layer.adaLN_modulation.1"),
        ("proj_out", "final_layer.linear"),
    ]
    result, left = renamed(state, pairs)
    for name in left:
        if name != "pos_embed.pos_embed":
            new = name.replace("transformer_blocks", "joint_blocks")
            new = re.sub(r"(attn2?)\.norm_added_([qk])", r"context_block.\1.ln_\2", new)
            result[re.sub(r"(attn2?)\.norm_([qk])", r"x_block.\1.ln_\2", new)] = left[name]
    if "pos_embed.pos_embed" in left:
        result["pos_embed"] = left["pos_embed.pos_embed"]
    last = max((int(name.split(".")[1]) for name in result if name.startswith("joint_blocks")), default=0)
    for outer in ("final_layer", f"joint_blocks.{last}.context_block"):
        for end in ("weight", "bias"):
            if (name := f"{outer}.adaLN_modulation.1.{end}") in result:
                result[name] = swapped(result[name])
    return {**result, **parts}


def wan_single(state):
    result = {}
    for name in state:
        new = name
        for old, place in (
            ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
            ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
            ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
            ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
            ("condition_embedder.time_proj", "time_projection.1"),
            ("condition_embedder.image_embedder.norm1", "img_emb.proj.0"),
            ("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
            ("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
            ("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
            ("attn1.norm_", "self_attn.norm_"),
            ("attn2.norm_added_k", "cross_attn.norm_k_img"),
            ("attn2.norm_", "cross_attn.norm_"),
            ("attn2.add_k_proj", "cross_attn.k_img"),
            ("attn2.add_v_proj", "cross_attn.v_img"),
            ("attn1.to_out.0", "self_attn.o"),
            ("attn2.to_out.0", "cross_attn.o"),
            ("attn1.to_", "self_attn."),
            ("attn2.to_", "cross_attn."),
            ("ffn.net.0.proj", "ffn.0"),
            ("ffn.net.2", "ffn.2"),
            (".norm2.", ".norm3."),
            ("proj_out", "head.head"),
        ):
            new = new.replace(old, place)
        new = re.sub(r"(blocks\.\d+)\.scale_shift_table", r"\1.modulation", new)
        result["head.modulation" if new == "scale_shift_table" else new] = state[name]
    return result


def unet_single(state):
    """The names of a UNet of two levels of two layers, as in Stable Diffusion 1."""
    result = {}
    for name in state:
        new = name
        for old, place in (
            (r"^time_embedding\.linear_1", "time_embed.0"),
            (r"^time_embedding\.linear_2", "time_embed.2"),
            (r"^conv_in\.", "input_blocks.0.0."),
            (r"^conv_norm_out\.", "out.0."),
            (r"^conv_out\.", "out.2."),
            (r"^mid_block\.resnets\.0\.", "middle_block.0."),
            (r"^mid_block\.attentions\.0\.", "middle_block.1."),
            (r"^mid_block\.resnets\.1\.", "middle_block.2."),
            (r"^down_blocks\.0\.downsamplers\.0\.conv", "input_blocks.3.0.op"),
            (r"^up_blocks\.0\.upsamplers\.0\.conv", "output_blocks.2.1.conv"),
            *(
                (rf"^down_blocks\.{i}\.resnets\.{j}\.", f"input_blocks.{3 * i + j + 1}.0.")
                for i in (0, 1)
                for j in (0, 1)
            ),
            *(
                (rf"^down_blocks\.{i}\.attentions\.{j}\.", f"input_blocks.{3 * i + j + 1}.1.")
                for i in (0, 1)
                for j in (0, 1)
            ),
            *(
                (rf"^up_blocks\.{i}\.resnets\.{j}\.", f"output_blocks.{3 * i + j}.0.")
                for i in (0, 1)
                for j in (0, 1, 2)
            ),
            *(
                (rf"^up_blocks\.{i}\.attentions\.{j}\.", f"output_blocks.{3 * i + j}.1.")
                for i in (0, 1)
                for j in (0, 1, 2)
            ),
        ):
            new = re.sub(old, place, new)
        if ".resnets." in name:
            for old, place in (
                (".norm1.", ".in_layers.0."),
                (".conv1.", ".in_layers.2."),
                (".time_emb_proj.", ".emb_layers.1."),
                (".norm2.", ".out_layers.0."),
                (".conv2.", ".out_layers.3."),
                (".conv_shortcut.", ".skip_connection."),
            ):
                new = new.replace(old, place)
        result[new] = state[name]
    return result


def factors(shapes, form, rank=2, alpha=None, convolutions=True):
    """An adapter of modules: names in a tool's form -> shape of the weight."""
    down, up = form
    torch.manual_seed(len(shapes) + rank)
    adapter = {}
    for module, shape in shapes.items():
        ones = [1] * (len(shape) - 2)
        adapter[f"{module}{down}"] = torch.randn(rank, *shape[1:]).half()
        adapter[f"{module}{up}"] = torch.randn(shape[0], rank, *ones).half()
        if alpha is not None:
            adapter[f"{module}.alpha"] = torch.tensor(alpha)
    return adapter


KOHYA = (".lora_down.weight", ".lora_up.weight")
PEFT = (".lora_A.weight", ".lora_B.weight")


def copied(adapter):
    return {name: value.clone() for name, value in adapter.items()}  # a converter scales some in place


def merged(model, state, adapter, prefix, **options):
    """What Diffusers fuses, in float64."""
    model.load_state_dict({name: value.double() for name, value in state.items()})
    model.double()
    model.load_lora_adapter({name: value.double() for name, value in adapter.items()}, prefix=prefix, **options)
    model.fuse_lora()
    model.unload_lora()
    result = {name: value for name, value in model.state_dict().items() if not torch.equal(value, state[name].double())}
    assert result
    return result


def chosen(state, *patterns):
    """The shapes of weights of some modules."""
    ends = [name.removesuffix(".weight") for name in state if name.endswith(".weight")]
    return {end: state[f"{end}.weight"].shape for end in ends if any(re.search(pattern, end) for pattern in patterns)}


def under(prefix, shapes, separator="."):
    return {prefix + name.replace(".", separator): shape for name, shape in shapes.items()}


def save(model, tool, adapter, expected, metadata=None):
    name = f"{model}_{tool}"
    save_file({key: value.contiguous() for key, value in adapter.items()}, HERE / f"{name}.safetensors", metadata)
    (HERE / "merged").mkdir(exist_ok=True)
    save_file({k: v.float().contiguous() for k, v in expected.items()}, HERE / "merged" / f"{name}.safetensors")


def rows_of(state, single):
    """Where a single file's tensors are in those of Diffusers: a name, or names with the first and the last row."""
    names = list(state)
    numbers = {}
    for k, name in enumerate(names):
        shape = state[name].shape
        rows = torch.arange(shape[0], dtype=torch.float64) + 100_000 * k
        numbers[name] = rows.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    places = {}
    for name, value in single(numbers).items():
        runs = []
        for row in value.reshape(value.shape[0], -1)[:, 0].long().tolist():
            origin, at = names[row // 100_000], row % 100_000
            if runs and runs[-1][0] == origin and runs[-1][2] == at:
                runs[-1][2] += 1
            else:
                runs.append([origin, at, at + 1])
        whole = len(runs) == 1 and runs[0][1:] == [0, len(state[runs[0][0]])]
        places[name] = runs[0][0] if whole else runs
    return places


def bases(name, model, single, back=None, prefix=""):
    state = weights(model)
    save_file(state, HERE / f"{name}_base.safetensors")
    alone = {key: value.contiguous() for key, value in single(state).items()}
    if back is not None:  # the converter of Diffusers knows this layout
        known = back(dict(alone))
        assert all(torch.equal(known[key], state[key]) for key in known), name
        assert {key for key in state if key not in known} <= {"pos_embed.pos_embed"}, state.keys() - known.keys()
    places = {prefix + key: runs for key, runs in rows_of(state, single).items()}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(runs)}" for key, runs in places.items())
    (HERE / f"{name}_single.json").write_text(f"{{\n{lines}\n}}\n")
    return state, alone


def flux():
    model = FluxTransformer2DModel(
        1, 4, num_layers=1, num_single_layers=1, attention_head_dim=4, num_attention_heads=2, joint_attention_dim=8,
        pooled_projection_dim=8, guidance_embeds=True, axes_dims_rope=(2, 2, 0),
    )  # fmt: skip
    back = patched(single_file_utils.convert_flux_transformer_checkpoint_to_diffusers)
    state, alone = bases("flux", model, flux_single, back)
    blocks = chosen(alone, r"attn\.(qkv|proj)$", "mlp", "linear[12]$", "mod.lin$", "modulation")
    kohya = factors(under("lora_unet_", {k: v for k, v in blocks.items() if "final" not in k}, "_"), KOHYA, 2, 1.0)
    converted = patched(tools._convert_kohya_flux_lora_to_diffusers)(copied(kohya))
    save("flux", "kohya", kohya, merged(model, state, converted, "transformer"))
    names = chosen(alone, r"single_blocks.0.linear2", "(img|txt)_attn")
    spelled = {}
    for name, shape in names.items():
        name = name.replace("single_blocks.0.linear2", "single_blocks.0.processor.proj_lora")
        for side, number in (("img", 1), ("txt", 2)):
            name = name.replace(f"{side}_attn.qkv", f"processor.qkv_lora{number}")
            name = name.replace(f"{side}_attn.proj", f"processor.proj_lora{number}")
        spelled[name] = shape
    spelled["single_blocks.0.processor.qkv_lora"] = (3 * WIDTH, WIDTH)
    xlabs = factors(spelled, (".down.weight", ".up.weight"), 3)
    converted = tools._convert_xlabs_flux_lora_to_diffusers(copied(xlabs))
    save("flux", "xlabs", xlabs, merged(model, state, converted, "transformer"))
    names = under(
        "transformer.", chosen(state, r"attn\.", "ff", "proj_mlp", "proj_out", "norm_out.linear", "x_embedder")
    )
    names = {name: shape for name, shape in names.items() if len(shape) == 2}
    own = factors(names, PEFT, 4)
    config = {"r": 4, "lora_alpha": 6, "alpha_pattern": {"proj_mlp": 3}, "rank_pattern": {}, "peft_type": "LORA"}
    config |= {"use_rslora": True, "target_modules": sorted({name.removeprefix("transformer.") for name in names})}
    metadata = {f"transformer.{key}": value for key, value in config.items()}
    expected = merged(model, state, own, "transformer", metadata=metadata)
    header = {"lora_adapter_metadata": json.dumps(metadata)}
    save("flux", "diffusers", own, expected, header)


def sd3():
    model = SD3Transformer2DModel(
        4, 1, 4, num_layers=2, attention_head_dim=4, num_attention_heads=2, joint_attention_dim=8,
        caption_projection_dim=8, pooled_projection_dim=8, out_channels=4, pos_embed_max_size=4,
        dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    back = single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers
    state, _ = bases("sd3", model, sd3_single, back, "model.diffusion_model.")
    names = chosen(state, r"attn2?\.(to|add)_", "ff", "norm_out.linear", "proj_out", "context_embedder")
    own = factors(under("transformer.", names), PEFT, 2)
    save("sd3", "diffusers", own, merged(model, state, own, "transformer"))


def wan():
    model = WanTransformer3DModel(
        (1, 2, 2), num_attention_heads=2, attention_head_dim=6, in_channels=4, out_channels=4, text_dim=8, freq_dim=8,
        ffn_dim=16, num_layers=1, image_dim=8, added_kv_proj_dim=12,
    )  # fmt: skip
    back = single_file_utils.convert_wan_transformer_to_diffusers
    state, alone = bases("wan", model, wan_single, back)
    names = chosen(alone, r"(self|cross)_attn\.(q|k|v|o|k_img|v_img)$", "ffn")
    comfy = factors(under("diffusion_model.", names), KOHYA, 2, 4.0)
    converted = tools._convert_non_diffusers_wan_lora_to_diffusers(copied(comfy))
    save("wan", "comfyui", comfy, merged(model, state, converted, "transformer"))
    musubi = factors(under("lora_unet_", names, "_"), KOHYA, 2, 1.0)
    converted = tools._convert_musubi_wan_lora_to_diffusers(copied(musubi))
    save("wan", "kohya", musubi, merged(model, state, converted, "transformer"))


def unet_model():
    return UNet2DConditionModel(
        8, block_out_channels=(8, 8), layers_per_block=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=8, attention_head_dim=4,
        norm_num_groups=4,
    )  # fmt: skip


def unet():
    model = unet_model()
    state, _ = bases("unet", model, unet_single, None, "model.diffusion_model.")
    attention = chosen(state, r"attentions.*(to_[qkv]$|to_out|proj_in$|ff\.net)")
    layers = chosen(state, r"mid_block.*(to_[qkv]$|to_out|proj_in$|ff\.net)", "0.conv1$", "(down|up)samplers")
    layers |= chosen(state, r"down_blocks.1.*(conv_shortcut|time_emb_proj)$", r"up_blocks.1.resnets.2.conv_shortcut")
    layers |= chosen(state, r"up_blocks.1.attentions.2.*to_out")
    kohya = factors(under("lora_unet_", layers, "_"), KOHYA, 2, 1.0)
    converted, alphas = tools._convert_non_diffusers_lora_to_diffusers(copied(kohya))
    expected = merged(model, state, converted, "unet", network_alphas=alphas)
    kohya |= factors({"lora_te_text_model_encoder_layers_0_mlp_fc1": (8, 8)}, KOHYA)
    save("unet", "kohya", kohya, expected)
    old = {
        name: shape
        for name, shape in attention.items()
        if "to_" in name and name.startswith("down_blocks.0.attentions.1")
    }
    names = {re.sub(r"\.to_out\.0$", ".to_out", name): shape for name, shape in old.items()}
    names = {re.sub(r"\.(to_\w+)$", r".processor.\1_lora", name): shape for name, shape in names.items()}
    old = factors(under("unet.", names), (".down.weight", ".up.weight"), 3)
    save("unet", "old_diffusers", old, merged(model, state, old, "unet"))
    names = under(
        "unet.",
        {name: shape for name, shape in attention.items() if len(shape) == 2 and "up_blocks.1.attentions.2" in name},
    )
    dora = factors(names, PEFT, 2)
    dora |= {f"{name}.lora_magnitude_vector": torch.rand(shape[0]).half() + 1 for name, shape in names.items()}
    save("unet", "dora", dora, merged(model, state, dora, "unet"))


def lycoris():
    """Modules of LyCORIS, as its forward pass changes weights: for LoHa and LoKr its merge_to takes alpha / r twice."""
    state = load_file(HERE / "unet_base.safetensors")
    block = "mid_block.attentions.0.transformer_blocks.0"
    targets = [f"{block}.attn1.to_q", f"{block}.ff.net.2", "mid_block.resnets.0.conv1"]
    LycorisNetwork.apply_preset({"target_name": targets, "target_module": [], "enable_conv": True})
    for tool, options in (
        ("loha", {"algo": "loha", "use_tucker": True}),
        ("lokr", {"algo": "lokr", "factor": 2}),
        ("locon", {"algo": "locon", "use_tucker": True}),
        ("locon_dora", {"algo": "locon", "dora_wd": True}),
    ):
        model = unet_model().double()
        model.load_state_dict({name: value.double() for name, value in state.items()})
        torch.manual_seed(3)
        network = create_lycoris(model, 1.0, linear_dim=2, linear_alpha=1.0, conv_dim=2, conv_alpha=1.0, **options)
        network.apply_to()
        network.double()
        for name, value in network.named_parameters():
            value.data = (value + 0.2 if "dora_scale" in name else torch.randn_like(value) * 0.5).half().double()
        adapter = {k: v.float() if k.endswith("alpha") else v.half() for k, v in network.state_dict().items()}
        network.restore()
        network.merge_to(1.0)
        expected = {name: model.state_dict()[name] for name in (f"{target}.weight" for target in targets)}
        for lora in network.loras if options["algo"] in ("loha", "lokr") else ():
            target = next(each for each in targets if lora.lora_name == "lycoris_" + each.replace(".", "_"))
            before = state[f"{target}.weight"].double()
            expected[f"{target}.weight"] = before + lora.get_weight(before.shape).detach()
        save("unet", tool, adapter, expected)


if __name__ == "__main__":
    for make in (flux, sd3, wan, unet, lycoris):
        make()
