"""Read converted diffusion models with ComfyUI-GGUF's own loader and compare names, shapes and values.

    COMFYUI_GGUF=FOLDER PYTHONPATH=tests python tests/data/comfyui/compare.py FOLDER

Needs torch and gguf. Of ComfyUI itself only the names of modules are needed, which stand-ins provide.
"""

import importlib
import sys
import types
from pathlib import Path

import numpy as np
import torch
from builders.diffusion import CLONE, INNER, MODELS, QUANTIZED, model, others

import safeload
from safeload.numpy import save_file


def loader():
    """ComfyUI-GGUF's loader and its dequantization."""
    modules = {name: types.ModuleType(name) for name in ("comfy", "comfy.ops", "comfy.lora", "comfy.model_management")}
    kinds = {kind: getattr(torch.nn, kind) for kind in ("Linear", "Conv2d", "Embedding", "LayerNorm", "GroupNorm")}
    modules["comfy.ops"].manual_cast = type("manual_cast", (), kinds)
    for name, module in modules.items():
        sys.modules[name] = module
        if "." in name:
            setattr(modules["comfy"], name.rpartition(".")[2], module)
    package = types.ModuleType("comfyui_gguf")
    package.__path__ = [CLONE]
    sys.modules["comfyui_gguf"] = package
    return importlib.import_module("comfyui_gguf.loader"), importlib.import_module("comfyui_gguf.dequant")


def compare(name, options, folder):
    reading, dequantizing = loader()
    tensors = model(name, prefix=INNER)
    save_file({**tensors, **others()}, folder / "x.safetensors")
    safeload.convert(folder / "x.safetensors", folder / "x.gguf", overwrite=True, **options)
    state, architecture = reading.gguf_sd_loader(str(folder / "x.gguf"), return_arch=True)
    assert architecture == name.split()[0], architecture
    safeload.convert(folder / "x.gguf", folder / "back.safetensors", dtype="float32", overwrite=True)
    back = safeload.load(folder / "back.safetensors")
    assert state.keys() == back.keys()
    assert {INNER + key for key in back} <= tensors.keys()
    for key, value in back.items():
        theirs = dequantizing.dequantize_tensor(state[key], torch.float32, torch.float32).numpy()
        assert tuple(state[key].shape) == value.shape == tensors[INNER + key].shape, key
        assert np.array_equal(theirs.reshape(value.shape), value), key
        if not options:
            assert np.array_equal(value, tensors[INNER + key].astype(np.float32)), key
    print(f"{name} {options}: {len(back)} tensors equal")


def main(folder):
    for name in MODELS:
        for quantize in (None, *(("q4_k_m", "q8_0", "q5_k_s", "q3_k_l") if name in QUANTIZED else ())):
            compare(name, {} if quantize is None else {"quantize": quantize}, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
