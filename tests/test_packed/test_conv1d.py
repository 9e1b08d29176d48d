"""GPT-2's Conv1D stores [in, out]: codes of tools that quantize it as [out, in], copies, adapters, writing."""

import json
import shutil

import numpy as np
import pytest
from builders.quantized import FIXTURES

import safeload
from safeload.numpy import load_file, save_file

FIXTURE = FIXTURES["bnb_gpt2"]
SQUARE = "transformer.h.0.attn.c_proj.weight"
OBLONG = {"transformer.h.0.mlp.c_fc.weight": (64, 128), "transformer.h.0.attn.c_attn.weight": (64, 16)}


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FIXTURE.folder, tmp_path / "gpt2")


def change_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def assert_expected(source, **options):
    want = FIXTURE.expected()
    found = safeload.load(source, dtype="float32", **options)
    assert found.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(found[name], array)


def test_weights_have_the_axes_of_the_file(folder):
    assert_expected(folder)
    assert_expected(folder / "model.safetensors")  # config.json is beside it
    with safeload.open(folder) as checkpoint:
        assert {name: checkpoint.tensors[name].shape for name in OBLONG} == OBLONG
        rows = FIXTURE.expected()[SQUARE]
        np.testing.assert_array_equal(checkpoint.get_slice(SQUARE, dtype="float32")[5:9], rows[5:9])
        np.testing.assert_array_equal(checkpoint.take(SQUARE, [63, 0], dtype="float32"), rows[[63, 0]])
        vector = np.ones(64, np.float32)
        np.testing.assert_allclose(checkpoint[SQUARE] @ vector, rows @ vector, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["gpt2", "imagegpt", "openai-gpt", "decision_transformer", "clvp_decoder"])
def test_every_model_with_such_layers_is_known(model_type, folder):
    change_config(folder, model_type=model_type)
    assert_expected(folder)


def test_a_model_inside_another_is_known(folder):
    change_config(folder, model_type="vision-encoder-decoder", decoder={"model_type": "gpt2"})
    assert_expected(folder)


@pytest.mark.parametrize("model_type", ["gpt_bigcode", "gpt_neo", "qwen", "starcoder2", None])
def test_other_models_have_linear_layers_of_these_names(model_type, folder):
    change_config(folder, model_type=model_type)
    found = safeload.load(folder, dtype="float32")
    np.testing.assert_array_equal(found[SQUARE], FIXTURE.expected()[SQUARE].T)


def test_copies_keep_the_axes(folder, tmp_path):
    safeload.convert(folder, tmp_path / "alone.safetensors")
    safeload.convert(folder, tmp_path / "copy")
    safeload.convert(folder, tmp_path / "shards", max_shard_size="4KB", resume=True)
    safeload.save(safeload.load(folder), tmp_path / "saved.safetensors")
    for name in ("alone.safetensors", "copy", "shards", "saved.safetensors"):
        assert_expected(tmp_path / name)
    safeload.convert(folder, tmp_path / "plain", dtype="float32")
    np.testing.assert_array_equal(safeload.load(tmp_path / "plain")[SQUARE], FIXTURE.expected()[SQUARE])


def test_stored_codes_stay_as_they_are(folder):
    stored = safeload.load(folder, stored=True)
    assert {name: array.tobytes() for name, array in stored.items()} == {
        name: array.tobytes() for name, array in load_file(folder / "model.safetensors").items()
    }


def test_an_adapter_meets_the_axes_of_the_file(folder, tmp_path):
    a, b = np.ones((1, 64), np.float32), np.arange(64, dtype=np.float32).reshape(64, 1)
    (tmp_path / "lora").mkdir()
    prefix = "base_model.model.transformer.h.0.attn.c_proj"
    save_file({f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}, tmp_path / "lora/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "fan_in_fan_out": True, "target_modules": ["c_proj"]}
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(config))
    merged = safeload.load(folder, dtype="float32", adapters=tmp_path / "lora")[SQUARE]
    np.testing.assert_allclose(merged, FIXTURE.expected()[SQUARE] + (b @ a).T, rtol=1e-6)


@pytest.mark.parametrize("name", ["gptq4_g32_asym", "awq4_gemm"])
def test_codes_that_cannot_be_turned_are_refused(name, tmp_path):
    fixture, path = FIXTURES[name], tmp_path / "x"
    shutil.copytree(fixture.folder, path)
    renamed = {}
    for file in path.glob("*.safetensors"):
        tensors = {key.replace(".q_proj.", ".c_proj."): x.copy() for key, x in load_file(file).items()}
        renamed |= dict.fromkeys(tensors, file.name)
        save_file(tensors, file)
    index = path / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"weight_map": renamed}))
    change_config(path, model_type="gpt2")
    weight = next(key for key in renamed if ".c_proj." in key).rpartition(".")[0] + ".weight"
    with pytest.raises(safeload.UnsupportedError, match=r"Conv1D, which stores \[in, out\]"):
        safeload.load(path, dtype="float32")
    others = [key for key in safeload.open(path) if ".c_proj." not in key]
    assert safeload.load(path, others, dtype="float32").keys() == set(others)
    assert weight not in others


@pytest.mark.parametrize("scheme", ["bnb_nf4", "w4a16", "fp8_dynamic", "deepseek_fp8"])
def test_engines_leave_such_layers_alone(scheme, tmp_path):
    source = tmp_path / "gpt2"
    source.mkdir()
    weights = {SQUARE: np.eye(128, dtype=np.float32), "transformer.h.0.linear.weight": np.eye(128, dtype=np.float32)}
    save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    report = safeload.convert(source, tmp_path / "out", quantize=scheme, only="*")
    assert report.summary.kept == {SQUARE: "is a Conv1D, stored as [in, out]"}
    np.testing.assert_array_equal(safeload.load(tmp_path / "out", dtype="float32")[SQUARE], weights[SQUARE])
