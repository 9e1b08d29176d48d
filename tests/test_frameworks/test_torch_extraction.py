"""PEFT loads adapters that safeload extracts, and then computes what the fine-tuned model computes."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", "5")

import safeload  # noqa: E402
import safeload.torch  # noqa: E402

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
}
MODELS = {
    "llama": {**SMALL, "tie_word_embeddings": False},
    "llama tied": {**SMALL, "tie_word_embeddings": True},
    "qwen2 with biases": SMALL,
    "gpt2 as [in, out]": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 16},
    "gpt_neox": {**SMALL, "tie_word_embeddings": False},
    "mixtral": {**SMALL, "num_local_experts": 3, "num_experts_per_tok": 2},
    "nomic_bert": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
}
INNER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
IMAGE = {**INNER, "image_size": 16, "patch_size": 8}
TEXT = {**SMALL, "head_dim": 16}
# Classes of which transformers renames tensors, joins or divides them.
RENAMED = {
    "ViTForImageClassification": IMAGE,
    "NomicBertForMaskedLM": {**INNER, "vocab_size": 50, "head_dim": 8},
    "Qwen2VLForConditionalGeneration": {
        "text_config": TEXT,
        "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2},
    },
    "Gemma3ForConditionalGeneration": {"text_config": TEXT, "vision_config": IMAGE, "mm_tokens_per_image": 4},
}
IDS = torch.arange(8)[None]


def logits(model):
    with torch.no_grad():
        output = model.eval()(input_ids=IDS)
        return output.logits if "logits" in output else output.last_hidden_state


def model_of(name, folder):
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name.split()[0]](**MODELS[name])
    kind = transformers.AutoModel if name == "nomic_bert" else transformers.AutoModelForCausalLM
    model = kind.from_config(config)
    model.save_pretrained(folder)
    return kind.from_pretrained(folder)


def changed(model, change, names=""):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if names in name:
                parameter += change * torch.randn_like(parameter)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS, ids=lambda name: name)
def test_a_model_whose_every_tensor_changed(name, tmp_path):
    """Of full rank, with the rest whole."""
    base = model_of(name, tmp_path / "base")
    fine = changed(model_of(name, tmp_path / "base"), 0.05)
    fine.save_pretrained(tmp_path / "fine")
    report = safeload.extract(tmp_path / "base", tmp_path / "fine", tmp_path / "adapter", rank=64, with_rest=True)
    assert report.left_out == {}
    expected = logits(fine)
    assert not torch.allclose(expected, logits(base), atol=1e-2)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(loaded.merge_and_unload()), expected, rtol=0, atol=1e-5)
    merged = safeload.load(tmp_path / "base", adapters=tmp_path / "adapter")
    for key, value in safeload.load(tmp_path / "fine").items():
        np.testing.assert_allclose(merged[key], value, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RENAMED)
def test_names_in_memory(name, tmp_path):
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    fine = model_class(model_class.config_class(**RENAMED[name]))
    fine.save_pretrained(tmp_path / "base")
    changed(fine, 0.05).save_pretrained(tmp_path / "fine")
    report = safeload.extract(tmp_path / "base", tmp_path / "fine", tmp_path / "adapter", rank=128, with_rest=True)
    assert report.left_out == {}
    base = model_class.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    for key, value in fine.state_dict().items():
        torch.testing.assert_close(loaded[key], value, rtol=0, atol=1e-5)
    merged = safeload.load(tmp_path / "base", adapters=tmp_path / "adapter")
    for key, value in safeload.load(tmp_path / "fine").items():
        np.testing.assert_allclose(merged[key], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2 as [in, out]"])
def test_peft_misses_no_key(name, tmp_path, recwarn):
    """A layer of two has changed, so that targets have whole names."""
    base = model_of(name, tmp_path / "base")
    inside = ".h.1." if "gpt2" in name else "layers.1."
    changed(model_of(name, tmp_path / "base"), 0.05, inside).save_pretrained(tmp_path / "fine")
    safeload.extract(tmp_path / "base", tmp_path / "fine", tmp_path / "adapter", rank=4, dtype="bfloat16")
    recwarn.clear()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert [str(warning.message) for warning in recwarn if "adapter keys" in str(warning.message)] == []
    result = loaded.load_adapter(tmp_path / "adapter", "again")
    assert result.unexpected_keys == []
    assert not any("lora_" in key for key in result.missing_keys if ".again" in key)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], "all-linear"], ids=["some", "all"])
def test_an_adapter_that_peft_merged(targets, tmp_path):
    base = model_of("llama", tmp_path / "base")
    trained = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=targets))
    changed(trained, 0.2, "lora_")
    trained.merge_and_unload().save_pretrained(tmp_path / "fine")
    report = safeload.extract(tmp_path / "base", tmp_path / "fine", tmp_path / "adapter", rank=4)
    before, after = (safeload.load(tmp_path / name) for name in ("base", "fine"))
    tensors = safeload.load(tmp_path / "adapter")
    assert (report.whole, report.left_out, report.rank) == ({}, {}, 4)
    for name in report.ranks:
        module = "base_model.model." + name.removesuffix(".weight")
        a, b = (tensors[f"{module}.lora_{factor}.weight"].astype(np.float64) for factor in "AB")
        change = after[name].astype(np.float64) - before[name]
        assert np.linalg.norm(change - b @ a) < 1e-5 * np.linalg.norm(change)
