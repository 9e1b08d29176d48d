"""Advice for plausible mistakes: schemes for dtypes and back, fp8 without scales, optimizers, adapters as sources."""

import json
import logging
import pickle

import ml_dtypes
import numpy as np
import pytest
from builders.inside import main

import safeload
from safeload.numpy import save_file

W = {"w": np.ones((64, 64), np.float32)}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file(W, "a.safetensors")
    return "a.safetensors"


def folder(path, tensors, name="model.safetensors", config=CONFIG, config_name="config.json"):
    path.mkdir()
    save_file(tensors, path / name)
    (path / config_name).write_text(json.dumps(config))
    return path


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# ---- schemes and dtypes ----


@pytest.mark.parametrize(
    "scheme", ["fp8", "FP8", "float8", "float8_e4m3fn", "F8_E4M3", "e4m3", "e5m2", "torch.float8_e4m3fn", "fp8_e4m3"]
)
def test_fp8_as_a_scheme_names_the_formats_with_scales(scheme, file, capsys):
    for way in (
        lambda: safeload.convert(file, "b.safetensors", quantize=scheme),
        lambda: safeload.quantize(W["w"], scheme),
        lambda: safeload.load_quantized(file, scheme),
    ):
        with pytest.raises(ValueError, match="did you mean 'fp8_dynamic', 'fp8_block', "):
            way()
    assert main(["convert", file, "out/", "--quantize", scheme]) == 2
    assert "'fp8_dynamic', 'fp8_block', " in capsys.readouterr().err


NEAREST = {
    "nf4": "bnb_nf4",
    "fp4": "bnb_fp4",
    "nvfp": "nvfp4",
    "mxfp8": "mxfp8a16",
    "int4": "w4a16",
    "4bit": "w4a16",
    "8bit": "int8",
    "Q8": "int8",
    "q40": "q4_0",
    "q4-0": "q4_0",
    "bnb": "bnb_nf4",
    "w8a61": "w8a16",
    "deepseek": "deepseek_fp8",
}


@pytest.mark.parametrize("scheme", NEAREST)
def test_an_unknown_scheme_shows_the_five_nearest(scheme, file):
    with pytest.raises(ValueError, match="unknown scheme") as caught:
        safeload.convert(file, "b.safetensors", quantize=scheme)
    offered = str(caught.value).partition("did you mean ")[2].partition("?")[0].replace(" or ", ", ").split(", ")
    assert len(offered) == 5
    assert offered[0] == repr(NEAREST[scheme])


@pytest.mark.parametrize(
    ("dtype", "scheme"),
    [
        ("int8", "int8"), (np.int8, "int8"), ("q4_0", "q4_0"), ("Q8_0", "q8_0"), ("q4_k_m", "q4_k_m"),
        ("nf4", "bnb_nf4"), ("tq1_0", "tq1_0"),
        ("w4a16", "w4a16"), ("fp8_dynamic", "fp8_dynamic"), ("mlx4", "mlx4"), ("int4", "w4a16"), ("awq", "awq"),
        ("iq4_nl", "iq4_nl"), ("mxfp4", "mxfp4"), ("4bit", "w4a16"), ("bnb_nf4", "bnb_nf4"), (ml_dtypes.int4, "w4a16"),
        ("nvfp4", "nvfp4"),
    ],
)  # fmt: skip
def test_a_scheme_as_a_dtype_names_quantize(dtype, scheme, file, capsys):
    for way in (
        lambda: safeload.load(file, dtype=dtype),
        lambda: safeload.convert(file, "b.safetensors", dtype=dtype),
        lambda: safeload.open(file).load(dtype=dtype),
    ):
        with pytest.raises((TypeError, safeload.UnsupportedError), match=f'pass quantize="{scheme}" to safeload.conv'):
            way()
    if isinstance(dtype, str):
        with pytest.raises(SystemExit, match="2"):
            main(["convert", file, "b.safetensors", "--dtype", dtype])
        assert f"--quantize {scheme} " in capsys.readouterr().err


def test_other_dtypes_get_no_advice_about_schemes(file):
    for dtype in ("uint8", "int16", "flaot32", "float23", "zzz", "bool"):
        with pytest.raises((TypeError, safeload.UnsupportedError)) as caught:
            safeload.load(file, dtype=dtype)
        assert "quantize" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["fp8", "e4m3", "e5m2", "float8_e4m3fn", "F8_E5M2", ml_dtypes.float8_e4m3fn])
def test_a_model_folder_in_fp8_without_scales_is_warned_of(dtype, tmp_path, caplog):
    source = folder(tmp_path / "model", W)
    safeload.convert(source, tmp_path / "out", dtype=dtype)
    (warning,) = warnings(caplog)
    assert 'quantize="fp8_dynamic"' in warning
    assert "no library loads" in warning
    caplog.clear()
    safeload.convert(source, tmp_path / "resumed", dtype=dtype, resume=True)
    assert "no library loads" in warnings(caplog)[0]


def test_fp8_without_a_model_folder_is_not_warned_of(tmp_path, caplog):
    source = folder(tmp_path / "model", W)
    save_file(W, tmp_path / "flux.safetensors")
    safeload.convert(source, tmp_path / "one.safetensors", dtype="fp8")  # ComfyUI loads such files
    safeload.convert(tmp_path / "flux.safetensors", tmp_path / "out", dtype="fp8")
    safeload.convert(source, tmp_path / "half", dtype="float16")
    assert warnings(caplog) == []


# ---- optimizers ----


@pytest.mark.parametrize(
    ("names", "counted", "advice"),
    [
        (["model.w", "optimizer.state.0.exp_avg"], "1 of 2 tensors", "drop='optimizer.*'"),
        (["params.w", "opt_state.0.mu.w", "opt_state.0.nu.w"], "2 of 3 tensors", "drop='opt_state.*'"),
        (["state_dict.w", "optimizer_states.0.state.0.step"], "1 of 2 tensors", "drop='optimizer_states.*'"),
        (["app.model.w", "app.optim.state.w.exp_avg"], "1 of 2 tensors", "drop='app.optim.*'"),
        (["w", "optimizer_state_dict.state.0.x"], "1 of 2 tensors", "drop='optimizer_state_dict.*'"),
        (["layers/dense/vars/0", "optimizer/vars/0", "optimizer/vars/1"], "2 of 3 tensors", "drop='optimizer/*'"),
    ],
)
def test_optimizer_states_are_counted(names, counted, advice, tmp_path, caplog):
    save_file({name: np.ones(2, np.float32) for name in names}, tmp_path / "train.safetensors")
    safeload.convert(tmp_path / "train.safetensors", tmp_path / "x.npz")
    (warning,) = warnings(caplog)
    assert counted in warning
    assert advice in warning


def test_a_nested_training_checkpoint_is_told_its_root(tmp_path, caplog, capsys):
    x = np.ones(2, np.float32)
    state = {"model": {"w": x, "b": x}, "ema": {"w": x}, "epoch": 3, "optimizer": {"state": {0: {"exp_avg": x}}}}
    path = tmp_path / "train.pkl"
    path.write_bytes(pickle.dumps(state))
    safeload.convert(path, tmp_path / "x.safetensors")
    (warning,) = warnings(caplog)
    assert "1 of 4 tensors" in warning
    assert "root='model' or root='ema' or drop='optimizer.*'" in warning
    assert main(["convert", str(path), str(tmp_path / "y.safetensors")]) == 0
    assert "--root 'model'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [{"drop": "optimizer.*"}, {"only": "model.*"}, {"names": ["optimizer.state.0.x"]}], ids=str
)
def test_a_selection_without_a_mixture_is_not_warned_of(options, tmp_path, caplog):
    source = {"model.w": np.ones(2, np.float32), "optimizer.state.0.x": np.ones(2, np.float32)}
    safeload.convert(source, tmp_path / "x.safetensors", **options)
    assert warnings(caplog) == []


@pytest.mark.parametrize("name", ["optional.w", "adopt.w", "model.optics.w", "optimus.layers.0.w", "my_optimizer.w"])
def test_names_that_only_resemble_an_optimizer_are_not_counted(name, tmp_path, caplog):
    safeload.convert({"w": W["w"], name: W["w"]}, tmp_path / "x.safetensors")
    assert warnings(caplog) == []


# ---- adapters as sources ----

LORA = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
KINDS = {
    "PEFT": [f"{LORA}A.weight", f"{LORA}B.weight"],
    "state dict": [f"{LORA}A.default.weight", f"{LORA}B.default.weight"],
    "MLX": ["model.layers.0.q_proj.lora_a", "model.layers.0.q_proj.lora_b"],
    "kohya": ["lora_unet_x.alpha", "lora_unet_x.lora_down.weight", "lora_unet_x.lora_up.weight"],
    "diffusers": ["unet.x.attn.to_q.lora_A.weight", "unet.x.attn.to_q.lora_B.weight"],
    "old diffusers": ["unet.x.processor.to_q_lora.down.weight", "unet.x.processor.to_q_lora.up.weight"],
    "ComfyUI": ["diffusion_model.x.lora_A.weight", "diffusion_model.x.lora_B.weight", "diffusion_model.x.alpha"],
    "LoHa": ["lycoris_x.hada_w1_a", "lycoris_x.hada_w1_b", "lycoris_x.alpha"],
    "OFT": ["lora_unet_x.oft_blocks", "lora_unet_x.alpha"],
    "wrapped": [f"_orig_mod.{LORA}A.weight", f"module.{LORA}B.weight"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_beside_a_model_is_refused(kind, tmp_path, capsys):
    base = folder(tmp_path / "base", {"model.layers.0.self_attn.q_proj.weight": W["w"]})
    adapter = tmp_path / "adapter.safetensors"
    save_file({name: np.ones((2, 2), np.float32) for name in KINDS[kind]}, adapter)
    for sources in ([base, adapter], [adapter, base]):
        for way in (lambda s=sources: safeload.load(s), lambda s=sources: safeload.convert(s, tmp_path / "out")):
            with pytest.raises(safeload.UnsupportedError, match=r"adapter.safetensors is an? \w+ adapter") as caught:
                way()
            merged = kind != "OFT"
            assert ("adapters=" if merged else "safeload does not merge it") in str(caught.value)
    assert main(["convert", str(base), str(adapter), str(tmp_path / "out")]) == 1
    assert ("pass it as --adapter" if merged else "does not merge it") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_adapter_alone_is_converted_and_noted(tmp_path, caplog):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    tensors = {name: np.ones((2, 2), np.float32) for name in KINDS["PEFT"]}
    adapter = folder(tmp_path / "lora", tensors, "adapter_model.safetensors", config, "adapter_config.json")
    assert safeload.convert(adapter, tmp_path / "x.safetensors").tensors == 2
    (warning,) = warnings(caplog)
    assert "a LoRA adapter (PEFT)" in warning
    assert "adapters=" in warning
    assert "pass it as adapters= with its base" in safeload.open(adapter).notes[0]
    assert "pass it as adapters= with its base" in safeload.info(tmp_path / "x.safetensors").notes[0]


def test_a_model_with_factors_inside_is_no_adapter(tmp_path, caplog):
    module = "base_model.model.model.q_proj"
    names = [f"{module}.base_layer.weight", f"{module}.lora_A.default.weight", f"{module}.lora_B.default.weight"]
    save_file({name: np.ones((2, 2), np.float32) for name in names}, tmp_path / "whole.safetensors")
    assert safeload.open(tmp_path / "whole.safetensors").notes == []
    assert safeload.convert(tmp_path / "whole.safetensors", tmp_path / "x.npz").tensors == 3
    assert warnings(caplog) == []
