"""LoRA adapters as folders of another program: PEFT's for mlx-lm, MLX's and llama.cpp's for PEFT."""

import json

import numpy as np
import pytest
from builders import adapters, llama_models
from builders.adapters import assert_merged, assert_same
from builders.commands import run

import safeload
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

MODELS = llama_models.listed()
# Stacked experts, [in, out], joined q, k and v, a language model inside another, names of transformers 4.
LAYOUTS = ("llama3", "qwen3_moe", "gpt2", "gpt_bigcode", "phi3", "llava", "mixtral", "gemma3")
CONFIG = "adapter_config.json"


@pytest.fixture
def model(tmp_path):
    return adapters.models_in(tmp_path, "peft")


def settings(folder):
    return json.loads((folder / CONFIG).read_text())


@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back(name, model, tmp_path):
    base, adapter = model(name)
    expected = safeload.load(base, adapters=adapter, dtype="float32")
    safeload.convert(adapter, tmp_path / "mlx", base=base)
    safeload.convert(tmp_path / "mlx", tmp_path / "back", base=base)
    for path in ("mlx", "back"):
        assert_same(safeload.load(base, adapters=tmp_path / path, dtype="float32"), expected)
    before, after = safeload.load(adapter), safeload.load(tmp_path / "back")
    if name not in ("llava", "mixtral", "gemma3"):  # of which transformers 5 has other names in memory
        assert_same(after, {key: before[key] for key in after})
    assert len(before) == len(after)


def test_values_are_those_of_peft_transposed(model, tmp_path):
    base, adapter = model("llama3")
    report = safeload.convert(adapter, tmp_path / "mlx", base=base)
    assert (report.tensors, report.files) == (28, [str(tmp_path / "mlx" / "adapters.safetensors")])
    factors, own = safeload.load(tmp_path / "mlx"), safeload.load(adapter)
    for name, value in factors.items():
        end = {"a": "lora_A.weight", "b": "lora_B.weight"}[name[-1]]
        assert np.array_equal(value, own[f"base_model.model.{name[:-7]}.{end}"].T)
    keys = [f"mlp.{k}_proj" for k in ("down", "gate", "up")] + [f"self_attn.{k}_proj" for k in "koqv"]
    assert settings(tmp_path / "mlx") == {
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys},
    }


def test_one_rank_and_one_scale_for_mlx(model, tmp_path):
    """Smaller ranks are filled up with zeros."""
    config = {"use_rslora": True, "alpha_pattern": {"q_proj": 3}}
    base, adapter = model("llama3", **config)
    tensors = safeload.load(adapter)
    for module in {name.rpartition(".lora_")[0] for name in tensors if "k_proj" in name}:
        tensors[f"{module}.lora_A.weight"] = tensors[f"{module}.lora_A.weight"][:3]
        tensors[f"{module}.lora_B.weight"] = np.ascontiguousarray(tensors[f"{module}.lora_B.weight"][:, :3])
    save_file(tensors, adapter / "adapter_model.safetensors")
    content = {**settings(adapter), "rank_pattern": {"k_proj": 3}}
    (adapter / CONFIG).write_text(json.dumps(content))
    safeload.convert(adapter, tmp_path / "mlx", base=base, dtype="float32")
    assert settings(tmp_path / "mlx")["lora_parameters"]["rank"] == 4
    expected = safeload.load(base, adapters=adapter, dtype="float32")
    for name, value in safeload.load(base, adapters=tmp_path / "mlx", dtype="float32").items():
        assert_merged(value, expected[name], 8)


def test_embedding_and_head(model, tmp_path):
    entry = MODELS["qwen2"]
    tensors = {**entry["tensors"], "lm_head.weight": [408, 64]}
    entry = {**entry, "config": {**entry["config"], "tie_word_embeddings": False}, "tensors": tensors}
    base, adapter = model("qwen2", entry=entry, only=("embed_tokens", "lm_head"))
    safeload.convert(adapter, tmp_path / "mlx", base=base)
    safeload.convert(tmp_path / "mlx", tmp_path / "back", base=base)
    assert_same(safeload.load(tmp_path / "back"), safeload.load(adapter))
    assert_same(safeload.load(base, adapters=tmp_path / "mlx"), safeload.load(base, adapters=adapter))
    assert settings(tmp_path / "mlx")["lora_parameters"]["keys"] == ["lm_head", "model.embed_tokens"]


def test_from_llama_cpp_to_peft(model, tmp_path, capsys):
    base, adapter = model("llama3", alpha_pattern={"q_proj": 3})
    path = tmp_path / "adapter.gguf"
    safeload.convert(adapter, path, base=base)
    status, out, _ = run(capsys, "convert", path, tmp_path / "back", "--base", base)
    assert (status, out.split("\n")[0]) == (0, f"{tmp_path / 'back'}: safetensors, 28 tensors, 32.4 KiB")
    expected = safeload.load(base, adapters=adapter, dtype="float32")
    for name, value in safeload.load(base, adapters=tmp_path / "back", dtype="float32").items():
        assert_merged(value, expected[name], 8)


def test_files_there_are_replaced_only_on_request(model, tmp_path):
    base, adapter = model("llama3")
    safeload.convert(adapter, tmp_path / "mlx", base=base)
    with pytest.raises(FileExistsError):
        safeload.convert(adapter, tmp_path / "mlx", base=base, dtype="float16")
    safeload.convert(adapter, tmp_path / "mlx", base=base, dtype="float16", overwrite=True)
    with safeload.open(tmp_path / "mlx") as file:
        assert {tensor.dtype for tensor in file.tensors.values()} == {"F16"}


@pytest.mark.parametrize("read", ["adapter", "base", "own", "beside"])
def test_no_file_that_is_read_is_replaced(read, model, tmp_path):
    base, adapter = model("llama3")
    safeload.convert(base, tmp_path / "base.gguf")
    safeload.convert(adapter, tmp_path / "own.gguf", base=base)
    source, destination, base = {
        "adapter": (adapter, adapter, base),
        "base": (adapter, tmp_path / "base.gguf", tmp_path / "base.gguf"),
        "own": (tmp_path / "own.gguf", tmp_path / "own.gguf", base),
        "beside": (adapter, base, base),
    }[read]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"which is read: choose another (path|folder)"):
        safeload.convert(source, destination, base=base, overwrite=True)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


# ---- square layers of MLX ----


@pytest.mark.parametrize("more", [False, True])
def test_square_layers_of_mlx_into_conv1d(more, model, tmp_path):
    """mlx-lm has the layers of GPT-2 as [out, in], transformers as [in, out]: other layers show it."""
    base, _ = model("gpt2")
    adapter = adapters.of_model(tmp_path / "few", MODELS["gpt2"], only=(".attn.c_",) if more else (".attn.c_proj",))
    safeload.convert(adapter, tmp_path / "mlx", base=base)
    if more:
        merged = safeload.load(base, adapters=tmp_path / "mlx", dtype="float32")
        assert_same(merged, safeload.load(base, adapters=adapter, dtype="float32"))
    else:
        with pytest.raises(safeload.UnsupportedError, match=r"\[out, in\] or \[in, out\]\?"):
            safeload.load(base, adapters=tmp_path / "mlx")


# ---- refusals ----


def refused(match, source, destination, error=safeload.UnsupportedError, **options):
    with pytest.raises(error, match=match):
        safeload.convert(source, destination, **options)
    assert not destination.exists()


def test_models_that_mlx_lm_does_not_have(model, tmp_path):
    base, adapter = model("bloom")
    refused("model_type 'bloom' is not known to have a form in mlx-lm", adapter, tmp_path / "mlx", base=base)


def test_a_base_in_gguf_has_no_names_for_folders(model, tmp_path):
    base, adapter = model("llama3")
    safeload.convert(base, tmp_path / "base.gguf")
    refused("needs a base with a config.json", adapter, tmp_path / "mlx", base=tmp_path / "base.gguf")


def test_tied_embeddings(model, tmp_path):
    """In mlx-lm the head changes with the embedding, in PEFT it does not."""
    base, adapter = model("qwen2", only=("embed_tokens",))
    refused("there is one tensor for both", adapter, tmp_path / "mlx", base=base)
    rng = np.random.default_rng(0)
    (tmp_path / "own").mkdir()
    factors = {"a": rng.standard_normal((408, 2), np.float32), "b": rng.standard_normal((2, 64), np.float32)}
    tensors = {f"model.embed_tokens.lora_{end}": value for end, value in factors.items()}
    save_file(tensors, tmp_path / "own" / "adapters.safetensors")
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 1.0}}
    (tmp_path / "own" / CONFIG).write_text(json.dumps(config))
    refused("which is the head too: PEFT's modules change alone", tmp_path / "own", tmp_path / "peft2", base=base)


def test_stacks_are_no_modules(model, tmp_path):
    """gpt-oss has the experts of a layer in one parameter, also in files."""
    base, _ = model("gpt_oss")
    gate = "blk.0.ffn_gate_exps.weight"
    safeload.convert(base, tmp_path / "base.gguf")
    experts, rows, columns = safeload.open(tmp_path / "base.gguf").tensors[gate].shape
    factors = {"a": np.ones((experts, 2, columns), np.float32), "b": np.ones((experts, rows, 2), np.float32)}
    metadata = {"general.architecture": "gpt-oss", "general.type": "adapter", "adapter.type": "lora"}
    path = tmp_path / "adapter.gguf"
    safeload.gguf.save_file({f"{gate}.lora_{end}": value for end, value in factors.items()}, path, metadata)
    changed = safeload.load(base, adapters=path, dtype="float32")
    plain = safeload.load(base, dtype="float32")
    (name,) = (name for name, value in plain.items() if not np.array_equal(value, changed[name]))
    assert name == "model.layers.0.mlp.experts.gate_up_proj"
    assert_merged(changed[name][..., ::2], plain[name][..., ::2] + np.float32(2), 4)
    assert np.array_equal(changed[name][..., 1::2], plain[name][..., 1::2])
    refused("which is no module of transformers", path, tmp_path / "peft2", base=base)


def test_options_of_files(model, tmp_path):
    base, adapter = model("llama3")
    refused(
        "quantize= applies to adapters for llama.cpp", adapter, tmp_path / "mlx", ValueError, base=base, quantize="q8_0"
    )
    refused("must be float32, float16 or bfloat16", adapter, tmp_path / "mlx", ValueError, base=base, dtype="float64")


def test_norms_of_mlx_are_those_of_peft(model, tmp_path):
    """Both divide a row by its norm after the change."""
    base, adapter = model("llama3", only=("layers.0.self_attn.q_proj", "layers.0.mlp.down_proj"))
    safeload.convert(adapter, tmp_path / "mlx", base=base)
    tensors, weights = safeload.load(tmp_path / "mlx"), safeload.load(base, dtype="float32")
    for module in {name.rpartition(".")[0] for name in tensors}:
        tensors[f"{module}.m"] = np.linalg.norm(weights[f"{module}.weight"], axis=1) + np.float32(0.5)
    save_file(tensors, tmp_path / "mlx" / "adapters.safetensors")
    (tmp_path / "mlx" / CONFIG).write_text(json.dumps({**settings(tmp_path / "mlx"), "fine_tune_type": "dora"}))
    safeload.convert(tmp_path / "mlx", tmp_path / "back", base=base)
    assert settings(tmp_path / "back")["use_dora"] is True
    before, after = (safeload.load(base, adapters=tmp_path / name, dtype="float32") for name in ("mlx", "back"))
    assert not all(np.array_equal(before[name], value) for name, value in weights.items())
    assert_same(after, before)
    refused("has the norms of", tmp_path / "mlx", tmp_path / "a.gguf", base=base)
