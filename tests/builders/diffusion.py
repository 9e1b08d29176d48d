"""Tiny diffusion models with the names of real ones, and what ComfyUI-GGUF's tools make of them.

Only the lengths of rows are true to their kind. `COMFYUI_GGUF` in the environment is the folder of a clone of
ComfyUI-GGUF, `COMFYUI_QUANTIZE` the path of a llama-quantize with its patch; only the makers of fixtures need them.
"""

import importlib
import os
import subprocess
import sys
from functools import cache

import ml_dtypes
import numpy as np

from builders.llama_quantize import noise

CLONE = os.environ.get("COMFYUI_GGUF")
CONVERTER = f"{CLONE}/tools"
PROGRAM = os.environ.get("COMFYUI_QUANTIZE")
# The file types that ComfyUI-GGUF writes; q2_k_s needs an importance matrix.
FILE_TYPES = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m"),
    *("q5_k_s", "q5_k_m", "q6_k"),
)
INNER = "model.diffusion_model."
# The architectures that its llama-quantize has rules for.
QUANTIZED = ("flux", "sdxl", "sd1")


def _linear(name, rows, columns):
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _flux(width=256, blocks=3):
    shapes = {**_linear("img_in", width, 64), **_linear("txt_in", width, 512)}
    for name in ("time_in", "vector_in", "guidance_in"):
        shapes |= {**_linear(f"{name}.in_layer", width, 256), **_linear(f"{name}.out_layer", width, width)}
    for k in range(blocks):
        for side in ("img", "txt"):
            block = f"double_blocks.{k}.{side}"
            shapes |= _linear(f"{block}_mod.lin", 12, width) | _linear(f"{block}_attn.qkv", 12, width)
            shapes |= _linear(f"{block}_attn.proj", 8, width) | _linear(f"{block}_mlp.0", 16, width)
            shapes |= _linear(f"{block}_mlp.2", 8, 4 * width)
            shapes |= {f"{block}_attn.norm.{role}_norm.scale": (32,) for role in ("query", "key")}
        block = f"single_blocks.{k}"
        shapes |= _linear(f"{block}.linear1", 20, width) | _linear(f"{block}.linear2", 8, 5 * width)
        shapes |= _linear(f"{block}.modulation.lin", 12, width)
        shapes |= {f"{block}.norm.{role}_norm.scale": (32,) for role in ("query", "key")}
    # Names and shapes that other rules of llama-quantize decide about.
    shapes |= {"single_blocks.0.odd.weight": (6, 288), "single_blocks.0.query_norm.weight": (6, width)}
    shapes |= {"single_blocks.0.cube.weight": (2, 4, width), "single_blocks.0.ff.net.2.weight": (6, width)}
    shapes |= {f"single_blocks.{k}.attn.to_v.weight": (6, width) for k in range(6)}
    return shapes | _linear("final_layer.linear", 16, width) | _linear("final_layer.adaLN_modulation.1", 8, width)


def _transformer(name, width, context):
    shapes = {f"{name}.norm.weight": (width,), f"{name}.norm.bias": (width,)}
    shapes |= {f"{name}.proj_in.weight": (width, width, 1, 1), f"{name}.proj_in.bias": (width,)}
    block = f"{name}.transformer_blocks.0"
    for attention, columns in (("attn1", width), ("attn2", context)):
        shapes[f"{block}.{attention}.to_q.weight"] = (width, width)
        shapes |= {f"{block}.{attention}.to_{role}.weight": (width, columns) for role in "kv"}
        shapes |= _linear(f"{block}.{attention}.to_out.0", width, width)
    shapes |= _linear(f"{block}.ff.net.0.proj", 8 * width, width) | _linear(f"{block}.ff.net.2", width, 4 * width)
    for k in (1, 2, 3):
        shapes |= {f"{block}.norm{k}.{kind}": (width,) for kind in ("weight", "bias")}
    return shapes | {f"{name}.proj_out.weight": (width, width, 1, 1), f"{name}.proj_out.bias": (width,)}


def _resnet(name, inputs, width):
    shapes = {f"{name}.in_layers.0.weight": (inputs,), f"{name}.in_layers.0.bias": (inputs,)}
    shapes |= {f"{name}.in_layers.2.weight": (width, inputs, 3, 3), f"{name}.in_layers.2.bias": (width,)}
    shapes |= _linear(f"{name}.emb_layers.1", width, 4 * width)
    shapes |= {f"{name}.out_layers.0.weight": (width,), f"{name}.out_layers.0.bias": (width,)}
    return shapes | {f"{name}.out_layers.3.weight": (width, width, 3, 3), f"{name}.out_layers.3.bias": (width,)}


def _unet(ups, width=32, context=64):
    shapes = _linear("time_embed.0", 4 * width, width) | _linear("time_embed.2", 4 * width, 4 * width)
    shapes |= {"input_blocks.0.0.weight": (width, 4, 3, 3), "input_blocks.0.0.bias": (width,)}
    shapes |= _resnet("input_blocks.1.0", width, width) | _transformer("input_blocks.1.1", width, context)
    for k in (3, 6, 9)[: len(ups)]:
        shapes |= {f"input_blocks.{k}.0.op.weight": (width, width, 3, 3), f"input_blocks.{k}.0.op.bias": (width,)}
    shapes |= _resnet("middle_block.0", width, width) | _transformer("middle_block.1", width, context)
    for k, place in ups:
        name = f"output_blocks.{k}.{place}.conv"
        shapes |= {f"{name}.weight": (width, width, 3, 3), f"{name}.bias": (width,)}
        shapes |= _transformer(f"output_blocks.{k}.1", width, context) if place == 2 else {}
    # Elements that are no whole rows of 256, too few, or whole rows already.
    shapes |= {"odd.weight": (5, 3, 3, 3), "few.weight": (2, 128), "whole.weight": (4, 512), "five.weight": (6, 160)}
    shapes |= {"out.0.weight": (width,), "out.0.bias": (width,)}
    return shapes | {"out.2.weight": (4, width, 3, 3), "out.2.bias": (4,)}


def _sd1():
    return _unet(((2, 1), (5, 2), (8, 2)))


def _sdxl():
    label = _linear("label_emb.0.0", 128, 704) | _linear("label_emb.0.2", 128, 128)
    return _unet(((2, 2), (5, 2))) | label


def _unet_of_diffusers():
    shapes = {"conv_in.weight": (32, 4, 3, 3), "conv_out.weight": (4, 32, 3, 3)}
    shapes |= _linear("time_embedding.linear_1", 128, 32)
    shapes |= {"down_blocks.0.downsamplers.0.conv.weight": (32, 32, 3, 3)}
    return shapes | _transformer("down_blocks.0.attentions.0", 32, 64)


def _only(*names, width=128, more=()):
    """A model with the names that tell its architecture, and little else."""
    shapes = dict.fromkeys(names, (16, width))
    return shapes | {"norm.weight": (width,), "small.weight": (8, 128), "large.weight": (9, 128)} | dict(more)


#: Shapes by name. Only flux, sd1 and sdxl are quantized.
MODELS = {
    "flux": _flux,
    "sd1": _sd1,
    "sdxl": _sdxl,
    "sd1 of Diffusers": _unet_of_diffusers,
    "sd3": lambda: _only("joint_blocks.0.x_block.attn.qkv.weight", more={"pos_embed": (1, 36, 64)}.items()),
    "aura": lambda: _only("double_layers.3.modX.1.weight", more={"register_tokens": (1, 8, 256)}.items()),
    "hidream": lambda: _only(
        "caption_projection.0.linear.weight",
        "double_stream_blocks.0.block.ff_i.shared_experts.w3.weight",
        "double_stream_blocks.0.block.ff_i.gate.weight",
        "img_emb.emb_pos",
    ),
    "cosmos": lambda: _only(
        "blocks.0.mlp.layer1.weight",
        "blocks.0.adaln_modulation_cross_attn.1.weight",
        "pos_embedder.seq",
        "blocks.0.self_attn.q_norm._extra_state",
        "accum_iteration",
    ),
    "ltxv": lambda: _only(
        "adaln_single.emb.timestep_embedder.linear_2.weight",
        "transformer_blocks.27.scale_shift_table",
        "caption_projection.linear_2.weight",
    ),
    "hyvid": lambda: _only(
        "double_blocks.0.img_attn_proj.weight", "txt_in.individual_token_refiner.blocks.1.self_attn_qkv.weight"
    ),
    "wan": lambda: _only(
        "blocks.0.self_attn.norm_q.weight", "text_embedding.2.weight", "head.modulation", "blocks.0.modulation"
    ),
    "lumina2": lambda: _only("cap_embedder.1.weight", "context_refiner.0.attention.qkv.weight"),
}


def model(name, dtype="bfloat16", prefix=""):
    """The tensors of a model."""
    return {prefix + key: array.astype(getattr(ml_dtypes, dtype, dtype)) for key, array in _values(name).items()}


@cache
def _values(name):
    shapes = MODELS[name]().items()
    return {
        tensor: (noise(int(np.prod(shape)), seed) * 0.05).astype(np.float32).reshape(shape)
        for seed, (tensor, shape) in enumerate(shapes)
    }


def others(prefix=""):
    """Tensors of the other parts of a checkpoint."""
    names = ("first_stage_model.decoder.conv_in.weight", "cond_stage_model.transformer.text_model.embeddings.weight")
    return {f"{prefix}{name}": np.ones((4, 8), np.float16) for name in names}


def convert(source, destination):
    """Run ComfyUI-GGUF's converter."""
    if CONVERTER not in sys.path:
        sys.path.insert(0, CONVERTER)
    importlib.import_module("convert").convert_file(source, destination, interact=False)


def quantize(source, destination, file_type, imatrix=None):
    """Run llama-quantize with ComfyUI-GGUF's patch."""
    command = [
        PROGRAM,
        *([] if imatrix is None else ["--imatrix", imatrix]),
        source,
        destination,
        file_type.upper(),
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {(done.stdout + done.stderr)[-2000:]}")
