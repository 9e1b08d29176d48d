"""Merged models compute what PEFT's trained models compute: tied heads, experts, routers."""

import numpy as np
import pytest
from builders.adapters import write

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", "5")

import safeload  # noqa: E402
import safeload.torch  # noqa: E402

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


def trained_from(model, options):
    """A model that PEFT has changed."""
    trained = peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
    for parameter in trained.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return trained


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
    ids=lambda value: str(value)[:50],
)
def test_as_the_trained_model_computes(kind, options, model_of, tmp_path):
    base = model_of(kind)
    trained = trained_from(load(base), options)
    trained.save_pretrained(tmp_path / "adapter")
    safeload.convert(base, tmp_path / "merged", adapters=tmp_path / "adapter", max_shard_size="5GB")
    expected = logits(trained)
    assert not torch.allclose(expected, logits(load(base)), atol=1e-2)
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "gpt_neox"], ids=["tied", "not tied"])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (50, {"trainable_token_indices": [3, 7]}),
        (54, {"trainable_token_indices": [53]}),
        (54, {"modules_to_save": ["embed_tokens", "embed_in", "lm_head"]}),
        (47, {"target_modules": "all-linear"}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_after_tokens_were_added(kind, size, options, model_of, tmp_path):
    base = model_of(kind)
    model = load(base)
    model.resize_token_embeddings(size, mean_resizing=False)
    trained = trained_from(model, options)
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers="auto")
    safeload.convert(base, tmp_path / "merged", adapters=tmp_path / "adapter")
    tokens = torch.tensor([[0, 3, 7, size - 1]])
    merged = load(tmp_path / "merged")
    with torch.no_grad():
        expected, found = (each.eval()(input_ids=tokens).logits for each in (trained, merged))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    direct = safeload.torch.load_checkpoint(base, adapters=tmp_path / "adapter")
    written = safeload.torch.load_checkpoint(tmp_path / "merged")
    assert direct.keys() == written.keys()
    assert all(torch.equal(direct[name], tensor) for name, tensor in written.items())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_larger_vocabulary_has_the_dtype_of_the_base(packed, device, model_of, tmp_path):
    options = {"quantize": "int8"} if packed else {}
    safeload.convert(model_of("gpt_neox"), tmp_path / "base", dtype="bfloat16")
    safeload.convert(tmp_path / "base", tmp_path / "small", **options)
    vocabulary = ("gpt_neox.embed_in.weight", "embed_out.weight")
    embeddings = {name: np.ones((54, 32), np.float32) for name in vocabulary}
    lora = write(
        tmp_path / "lora", {**embeddings, "score.weight": np.ones((3, 32), np.float32)}, modules_to_save=["score"]
    )
    loaded = safeload.torch.load_checkpoint(tmp_path / "small", device=device, adapters=lora)
    assert {loaded[name].dtype for name in vocabulary} == {torch.bfloat16}
    assert {tuple(loaded[name].shape) for name in vocabulary} == {(54, 32)}
    assert (loaded["score.weight"].dtype, tuple(loaded["score.weight"].shape)) == (torch.float32, (3, 32))


@pytest.mark.filterwarnings("ignore")
def test_a_task_head(model_of, tmp_path):
    base = model_of("llama")
    options = {"num_labels": 3, "pad_token_id": 0}
    task = transformers.AutoModelForSequenceClassification
    trained = trained_from(task.from_pretrained(base, **options), {"task_type": "SEQ_CLS"})
    trained.save_pretrained(tmp_path / "adapter")
    safeload.convert(base, tmp_path / "merged", adapters=tmp_path / "adapter")
    expected = logits(trained)
    torch.testing.assert_close(
        logits(task.from_pretrained(tmp_path / "merged", **options)), expected, rtol=0, atol=1e-4
    )


INNER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
IMAGE = {**INNER, "image_size": 16, "patch_size": 8}
TEXT = {**SMALL, "head_dim": 16, "num_hidden_layers": 2}
NAMED = {
    "ViTForImageClassification": IMAGE,
    "BeitForImageClassification": IMAGE,
    "Dinov2ForImageClassification": {**IMAGE, "use_swiglu_ffn": True},
    "SwinForImageClassification": {
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "image_size": 32,
        "window_size": 2,
    },
    "NomicBertForMaskedLM": {**INNER, "vocab_size": 50, "head_dim": 8},
    "Qwen2VLForConditionalGeneration": {
        "text_config": TEXT,
        "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2},
    },
    "Gemma3ForConditionalGeneration": {"text_config": TEXT, "vision_config": IMAGE, "mm_tokens_per_image": 4},
    "LlavaForConditionalGeneration": {
        "text_config": TEXT,
        "vision_config": {**IMAGE, "model_type": "siglip_vision_model"},
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMED)
def test_published_names(name, tmp_path):
    """transformers writes base and result under the names of published files; PEFT names modules as in memory."""
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**NAMED[name]))
    model.save_pretrained(tmp_path / "base")
    trained = trained_from(model, {"target_modules": "all-linear"})
    trained.save_pretrained(tmp_path / "adapter")
    trained.merge_and_unload().save_pretrained(tmp_path / "merged")
    found = safeload.torch.load_checkpoint(tmp_path / "base", adapters=tmp_path / "adapter")
    expected = safeload.torch.load_checkpoint(tmp_path / "merged")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5)
