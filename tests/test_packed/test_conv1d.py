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


def as_conv1d(name, path):
    """A fixture whose linear layers are named and configured as Conv1D layers, and the weights as the file has them."""
    shutil.copytree(FIXTURES[name].folder, path)
    layers = {".q_proj": ".c_attn", ".k_proj": ".q_attn", ".up_proj": ".c_fc", ".down_proj": ".c_proj"}

    def renamed(text):
        for old, new in layers.items():
            text = text.replace(old, new)
        return text

    for file in path.glob("*.safetensors"):
        save_file({renamed(key): array.copy() for key, array in load_file(file).items()}, file)
    for document in path.glob("*.json"):
        document.write_text(renamed(document.read_text()).replace("(down|", "(c_proj|").replace(")_proj$", ")$"))
    change_config(path, model_type="gpt2")
    with safeload.open(path) as checkpoint:
        quantized = {key for key, entry in checkpoint.tensors.items() if entry.dtype.startswith(("gptq", "awq"))}
    want = {renamed(key): array for key, array in FIXTURES[name].expected().items()}
    turned = {key for key in quantized if f".{key.split('.')[-2]}" in layers.values()}
    assert turned
    return {key: np.ascontiguousarray(array.T) if key in turned else array for key, array in want.items()}, turned


WORDS = ["gptq2_older", "gptq3_act_order", "gptq4_g32_asym", "autoround_raw_zeros", "gptq_dynamic_raw_zeros"]
WORDS += ["autoround_gptq", "awq4_gemm", "awq4_gemv"]


@pytest.mark.parametrize("name", WORDS)
def test_words_of_codes_have_the_axes_of_the_file(name, tmp_path):
    want, turned = as_conv1d(name, tmp_path / "x")
    found = safeload.load(tmp_path / "x", dtype="float32")
    assert found.keys() == want.keys()
    for key, array in want.items():
        np.testing.assert_array_equal(found[key], array)
    with safeload.open(tmp_path / "x") as checkpoint:
        for key in turned:
            rows = want[key]
            assert checkpoint.tensors[key].shape == rows.shape
            for index in np.s_[5:37], np.s_[-1], np.s_[3::7, 1:9], np.s_[:, 31], np.s_[40:40]:
                np.testing.assert_array_equal(checkpoint.get_slice(key, dtype="float32")[index], rows[index])
            np.testing.assert_array_equal(checkpoint.take(key, [31, 0, 7], dtype="float32"), rows[[31, 0, 7]])
            vector = np.linspace(-1, 1, rows.shape[1], dtype=np.float32)
            np.testing.assert_allclose(checkpoint[key] @ vector, rows @ vector, rtol=1e-4, atol=1e-4)
    stats = safeload.stats(tmp_path / "x")
    assert all(stats[key].absmax == np.abs(want[key]).max() for key in turned)


def test_blocks_across_rows_are_refused(folder):
    tensors = {name: array.copy() for name, array in load_file(folder / "model.safetensors").items()}
    (state,) = (name for name in tensors if name.startswith(SQUARE) and "quant_state" in name)
    text = bytes(tensors[state]).decode()
    assert '"shape": [64, 64]' in text
    tensors[state] = np.frombuffer(text.replace("[64, 64]", "[128, 32]").encode(), np.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(safeload.UnsupportedError, match=r"Conv1D, which stores \[in, out\], and its blocks cross"):
        safeload.load(folder, dtype="float32")
    others = [name for name in safeload.open(folder) if not name.startswith(SQUARE)]
    assert safeload.load(folder, others, dtype="float32").keys() == set(others)


def test_an_adapter_meets_the_axes_of_words(tmp_path):
    want, turned = as_conv1d("gptq3_act_order", tmp_path / "x")
    (key,) = turned
    rows, columns = want[key].shape
    a, b = np.ones((1, rows), np.float32), np.arange(columns, dtype=np.float32).reshape(-1, 1)
    (tmp_path / "lora").mkdir()
    prefix = f"base_model.model.{key.removesuffix('.weight')}"
    save_file({f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}, tmp_path / "lora/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "fan_in_fan_out": True, "target_modules": ["c_attn"]}
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(config))
    merged = safeload.load(tmp_path / "x", dtype="float32", adapters=tmp_path / "lora")[key]
    np.testing.assert_allclose(merged, want[key] + (b @ a).T, rtol=1e-6)


@pytest.mark.parametrize("name", ["gptq3_act_order", "gptq4_g32_asym", "awq4_gemm"])
def test_copies_of_words_keep_the_axes(name, tmp_path):
    want, turned = as_conv1d(name, tmp_path / "x")
    safeload.convert(tmp_path / "x", tmp_path / "alone.safetensors")
    safeload.convert(tmp_path / "x", tmp_path / "copy", max_shard_size="4KB", resume=True)
    safeload.convert(tmp_path / "x", tmp_path / "plain", dtype="float32")
    safeload.save(safeload.load(tmp_path / "x"), tmp_path / "saved.safetensors")
    safeload.convert(tmp_path / "x", tmp_path / "plain.npz", dtype="float32")
    for copy in ("alone.safetensors", "copy", "plain", "saved.safetensors", "plain.npz"):
        found = safeload.load(tmp_path / copy, dtype="float32")
        for key in turned:
            np.testing.assert_array_equal(found[key], want[key], err_msg=copy)
    with safeload.open(tmp_path / "x") as checkpoint:
        for key, array in checkpoint.stream(dtype="float32"):
            np.testing.assert_array_equal(array, want[key])


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
