"""Merged models compute what PEFT's trained models compute: tied heads, experts, routers."""

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", "5")

import safeload  # noqa: E402

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
}
MODELS = {
    "llama": {**SMALL, "tie_word_embeddings": True},
    "gemma2": {**SMALL, "head_dim": 16},
    "gpt_neox": {**SMALL, "tie_word_embeddings": False},
    "mixtral": {**SMALL, "num_local_experts": 3, "num_experts_per_tok": 2},
    "granitemoe": {**SMALL, "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {**SMALL, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Folder of a model with random weights, by its type."""
    folder = tmp_path_factory.mktemp("models")

    def make(kind):
        if not (folder / kind).exists():
            torch.manual_seed(0)
            config = transformers.CONFIG_MAPPING[kind](**MODELS[kind])
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
        return folder / kind

    return make


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(8)[None]).logits


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"modules_to_save": ["embed_tokens"]}),
        ("llama", {"modules_to_save": ["lm_head"]}),
        ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
        ("llama", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
        ("llama", {"target_modules": ["embed_tokens"]}),
        ("llama", {"target_modules": ["lm_head"], "use_dora": True}),
        ("llama", {"target_modules": ["lm_head", "embed_tokens"], "ensure_weight_tying": True}),
        ("gemma2", {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]}),
        ("gpt_neox", {"target_modules": ["lm_head"]}),
        ("mixtral", {"target_parameters": EXPERTS}),
        ("mixtral", {"target_modules": ["w1", "w2", "w3", "gate"]}),
        ("mixtral", {"target_parameters": [*EXPERTS, "mlp.gate.weight"], "rank_pattern": {"experts.down_proj": 3}}),
        ("granitemoe", {"target_parameters": EXPERTS, "modules_to_save": ["router"]}),
        ("qwen3_moe", {"target_parameters": EXPERTS, "alpha_pattern": {"experts.gate_up_proj": 5}}),
    ],
    ids=str,
)
def test_as_the_trained_model_computes(kind, options, model_of, tmp_path):
    base = model_of(kind)
    trained = peft.get_peft_model(load(base), peft.LoraConfig(r=2, **options))
    for parameter in trained.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    trained.save_pretrained(tmp_path / "adapter")
    safeload.convert(base, tmp_path / "merged", adapters=tmp_path / "adapter", max_shard_size="5GB")
    expected = logits(trained)
    assert not torch.allclose(expected, logits(load(base)), atol=1e-2)
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected, rtol=0, atol=1e-4)
