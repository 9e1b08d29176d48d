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
