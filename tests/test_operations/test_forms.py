"""`diff` of two forms of a model: names and layouts of its family, the account of all tensors, judgement by format."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from builders import models
from builders.llama_models import plain, tensors_of, write_folder
from builders.llama_quantize import save_imatrix

import safeload
from safeload.numpy import load_file, save_file

# Models with each layout: permuted heads, stacked and fused experts, + 1, transposed, joined and split matrices,
# layers left out, computed values, several shapes.
NAMES = [
    *("llama3", "llama_model", "mixtral", "qwen3_moe", "gemma2", "gemma4_moe", "phi3_long", "gpt_oss", "qwen3_next"),
    *("nemotron_h_mtp", "falcon_h1", "mamba2", "gpt2", "bloom", "falcon", "granitemoe", "deepseek_v3", "glm4_moe"),
]


def kinds(report):
    return {re.match("as expected|calibrated|damaged|changed", text)[0] for text in report.judged.values()}


def is_whole(report, a, b):
    """Whether the report accounts for each stored tensor of both sides."""
    return [sum(account.values()) for account in report.accounts] == [len(safeload.open(a)), len(safeload.open(b))]


@pytest.fixture
def llama(tmp_path):
    return write_folder(tmp_path / "llama", plain()["llama3"])


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_and_its_gguf_file_are_equal_both_ways(name, tmp_path):
    folder = write_folder(tmp_path / name, plain()[name])
    for scheme in (None, "q4_k_m"):
        file = tmp_path / f"{scheme}.gguf"
        safeload.convert(folder, file, quantize=scheme)
        for a, b in ((folder, file), (file, folder)):
            report = safeload.diff(a, b)
            assert report.form.startswith("layout of llama.cpp")
            assert not (report.only_a)
            assert not (report.only_b)
            assert not (report.shapes)
            assert is_whole(report, a, b)
            assert kinds(report) <= {"as expected"}
            assert scheme is not None or all(d.max <= 0.01 for d in report.tensors.values())
            assert bool(report.judged) == (scheme is not None)


@pytest.mark.parametrize("name", ["llama3", "mixtral", "qwen3_moe"])
def test_a_file_without_safeloads_keys_and_a_model_without_config_are_compared(name, tmp_path):
    folder = write_folder(tmp_path / name, plain()[name])
    safeload.convert(folder, tmp_path / "m.gguf")
    with safeload.edit(tmp_path / "m.gguf") as file:
        for key in [key for key in file.metadata if key.startswith("safeload.")]:
            del file.metadata[key]
    assert not safeload.diff(folder, tmp_path / "m.gguf").unequal
    (tmp_path / "alone").mkdir()
    shutil.copy(folder / "model.safetensors", tmp_path / "alone" / "m.safetensors")
    assert not safeload.diff(tmp_path / "m.gguf", tmp_path / "alone" / "m.safetensors").unequal


def test_what_a_form_leaves_out_has_the_familys_reason(tmp_path):
    model = plain()["llama3"]
    scale = {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    folder = write_folder(tmp_path / "m", model, {**tensors_of(model), **scale})
    safeload.convert(folder, tmp_path / "m.gguf")
    report = safeload.diff(folder, tmp_path / "m.gguf")
    assert report.left_out_a == dict.fromkeys(scale, "scales of the KV cache")
    assert report.accounts[0]["left out"] == 1
    assert is_whole(report, folder, tmp_path / "m.gguf")
    assert "left out of a by the form" in str(report)


def test_a_tensor_that_the_file_lacks_is_only_in_the_model(llama, tmp_path):
    safeload.convert(llama, tmp_path / "m.gguf")
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["mtp.norm.weight"] = np.ones(64, np.float32)
    save_file(tensors, llama / "model.safetensors")
    report = safeload.diff(llama, tmp_path / "m.gguf")
    assert report.only_a == ["mtp.norm.weight"]
    assert [*report.left_out_a] == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert is_whole(report, llama, tmp_path / "m.gguf")


def test_heads_are_equal_by_tie(llama, tmp_path):
    config = json.loads((llama / "config.json").read_text())
    tensors = load_file(llama / "model.safetensors")
    tied = {name: x for name, x in tensors.items() if name != "lm_head.weight"}
    (llama / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    save_file(tied, llama / "model.safetensors")
    safeload.convert(llama, tmp_path / "tied.gguf")
    save_file({**tied, "lm_head.weight": tied["model.embed_tokens.weight"]}, llama / "model.safetensors")
    for a, b in ((llama, tmp_path / "tied.gguf"), (tmp_path / "tied.gguf", llama)):
        report = safeload.diff(a, b)
        assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
        assert not (report.unequal)
        assert not (report.only_a)
        assert not (report.only_b)
    # Two folders, of which one has the head that the config ties.
    other = shutil.copytree(llama, tmp_path / "without")
    save_file(tied, other / "model.safetensors")
    report = safeload.diff(llama, other)
    assert report.same
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    save_file({**tied, "lm_head.weight": tied["model.embed_tokens.weight"] * 2}, llama / "model.safetensors")
    assert [*safeload.diff(llama, other).unequal] == ["lm_head.weight"]


def test_damage_is_told_from_rounding(llama, tmp_path):
    safeload.convert(llama, tmp_path / "m.gguf", quantize="q4_0")
    report = safeload.diff(llama, tmp_path / "m.gguf")
    assert kinds(report) == {"as expected"}
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(llama / "model.safetensors")
    for change in (
        lambda x: x[::-1],
        lambda x: x * ml_dtypes.bfloat16(1.5),
        lambda x: np.where(np.arange(x.size).reshape(x.shape) == 77, ml_dtypes.bfloat16(9), x),
        np.zeros_like,
        lambda x: -x,
    ):
        save_file({**tensors, name: np.ascontiguousarray(change(tensors[name]))}, llama / "model.safetensors")
        report = safeload.diff(llama, tmp_path / "m.gguf")
        assert {each: text for each, text in report.judged.items() if not text.startswith("as expected")} == {
            name: "damaged q4_0"
        }
        assert "1 tensor: damaged q4_0" in str(report)


def test_codes_chosen_by_importance_are_calibrated_and_not_damaged(llama, tmp_path):
    safeload.convert(llama, tmp_path / "plain.gguf", dtype="float32")
    save_imatrix(tmp_path / "imatrix.gguf", safeload.load(tmp_path / "plain.gguf"))
    safeload.convert(llama, tmp_path / "m.gguf", quantize="q4_0", imatrix=tmp_path / "imatrix.gguf")
    assert kinds(safeload.diff(llama, tmp_path / "m.gguf")) <= {"as expected", "calibrated"}


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "fp8_dynamic", "fp8_block", "mlx4", "mlx8", "bnb_nf4", "bnb_fp4"])
def test_folders_of_engines_are_as_expected(scheme, tmp_path, monkeypatch):
    name, sizes = models.SMALL["llama"]
    monkeypatch.setitem(models.SMALL, "llama", (name, {**sizes, "hidden_size": 128, "intermediate_size": 256}))
    (tmp_path / "m").mkdir()
    folder = models.write_folder(tmp_path / "m", *models.small("llama", np.float32))
    safeload.convert(folder, tmp_path / "q", quantize=scheme)
    report = safeload.diff(folder, tmp_path / "q")
    assert kinds(report) == {"as expected"}
    assert not (report.only_a)
    assert not (report.only_b)


def test_stacked_experts_are_compared_with_separate_ones(tmp_path):
    folder = write_folder(tmp_path / "m", plain()["qwen3_moe"])
    safeload.convert(folder, tmp_path / "mlx", quantize="mlx8-g32")
    for a, b in ((folder, tmp_path / "mlx"), (tmp_path / "mlx", folder)):
        report = safeload.diff(a, b)
        assert not (report.only_a)
        assert not (report.only_b)
        assert not (report.shapes)
        assert kinds(report) <= {"as expected"}
        assert is_whole(report, a, b)


def test_names_with_wrappers_are_compared_without_them(llama, tmp_path):
    tensors = {f"module.{name}": x for name, x in load_file(llama / "model.safetensors").items()}
    save_file(tensors, tmp_path / "wrapped.safetensors")
    report = safeload.diff(tmp_path / "wrapped.safetensors", llama)
    assert report.same
    assert len(report.tensors) == len(tensors)


def test_patterns_select_published_names(llama, tmp_path):
    safeload.convert(llama, tmp_path / "m.gguf")
    report = safeload.diff(llama, tmp_path / "m.gguf", only="*.q_proj.weight")
    assert {name.split(".")[-2] for name in report.tensors} == {"q_proj"}
    assert report.accounts[0]["not selected"] == len(safeload.open(llama)) - len(report.tensors)


def test_forms_without_a_known_family_are_refused_by_name(llama, tmp_path):
    safeload.convert(llama, tmp_path / "m.gguf")
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(
        json.dumps({**config, "architectures": ["Qwen9ForCausalLM"], "model_type": "qwen9"})
    )
    with pytest.raises(safeload.UnsupportedError, match="'Qwen9ForCausalLM' is not known to have a form"):
        safeload.diff(llama, tmp_path / "m.gguf")
    other = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    (llama / "config.json").write_text(json.dumps({**config, **other}))
    with pytest.raises(safeload.UnsupportedError, match=r"is gpt2 in llama.cpp, but .* is llama"):
        safeload.diff(llama, tmp_path / "m.gguf")


def test_workers_compare_a_single_form(llama, tmp_path):
    safeload.convert(llama, tmp_path / "m.gguf")
    with (
        ThreadPoolExecutor(1) as executor,
        pytest.raises(ValueError, match="executor= compares checkpoints of one form"),
    ):
        safeload.diff(llama, tmp_path / "m.gguf", executor=executor)
