"""Configs that lack keys: GGUF metadata have the values of transformers' config classes."""

import pytest
from builders import llama_models
from builders.inside import model_families
from builders.inside import settings as inner

import safeload

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

MODELS = llama_models.listed()


def settings(name, **changes):
    config = {key: value for key, value in {**MODELS[name]["config"], **changes}.items() if value != "absent"}
    form = model_families.gguf_forms()[config["architectures"][0]]
    metadata, _ = inner.settings_of(inner.ModelConfig(config, "model", form), form)
    return {key.removeprefix(f"{form.architecture}."): value for key, value in metadata.items()}


def factors(name, **changes):
    """The metadata and factors of rotations."""
    config = {**MODELS[name]["config"], **changes}
    form = model_families.gguf_forms()[config["architectures"][0]]
    metadata, tensors = inner.settings_of(inner.ModelConfig(config, "model", form), form)
    return metadata, {key: value.tolist() for key, value in tensors.items()}


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("llama3", "head_dim", {"attention.key_length": 16, "attention.value_length": 16}),
        ("llama2", "num_key_value_heads", {"attention.head_count_kv": 4}),
        ("llama2", "rope_parameters", {"rope.freq_base": 10000.0}),
        ("mistral", "num_key_value_heads", {"attention.head_count_kv": 8}),
        ("mixtral", "num_local_experts", {"expert_count": 8}),
        ("mixtral", "rope_parameters", {"rope.freq_base": 1000000.0}),
        ("qwen2", "num_key_value_heads", {"attention.head_count_kv": 32}),
        ("qwen3", "head_dim", {"attention.key_length": 128, "attention.value_length": 128}),
        ("qwen3_moe", "num_key_value_heads", {"attention.head_count_kv": 4}),
        ("gemma", "head_dim", {"attention.key_length": 256}),
        ("gemma2", "attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
        ("gemma2", "sliding_window", {"attention.sliding_window": 4096}),
        ("phi3", "original_max_position_embeddings", {"rope.scaling.original_context_length": 4096}),
        ("gpt_oss", "rope_parameters", {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0}),
        ("gpt_oss", "sliding_window", {"attention.sliding_window": 128}),
        ("llama2", "rms_norm_eps", {"attention.layer_norm_rms_epsilon": pytest.approx(1e-6)}),
        ("llama2", "max_position_embeddings", {"context_length": 2048}),
        ("granite", "attention_multiplier", {"attention.scale": 1.0}),
        ("arcee", "head_dim", {"attention.key_length": 16, "attention.value_length": 16}),
        ("nemotron", "head_dim", {"attention.key_length": 16, "attention.value_length": 16}),
        ("ernie4_5_moe", "moe_num_shared_experts", {"expert_shared_count": 2}),
        ("arcee", "rope_parameters", {"rope.freq_base": 10000.0}),
        ("llama4", "head_dim", {"attention.key_length": 128, "rope.dimension_count": 128}),
        ("olmoe", "num_key_value_heads", {"attention.head_count_kv": 4}),
        ("qwen3", "max_position_embeddings", {"context_length": 32768}),
        ("smollm3", "rms_norm_eps", {"attention.layer_norm_rms_epsilon": pytest.approx(1e-6)}),
    ],
)
def test_a_key_that_the_config_lacks(name, key, expected):
    own = settings(name, **{key: "absent"})
    assert {key: own[key] for key in expected} == expected


def test_null_counts_if_the_value_depends_on_others():
    assert settings("llama2", head_dim=None) == settings("llama2", head_dim="absent") == settings("llama2")
    assert "attention.head_count_kv" not in settings(
        "mistral", num_key_value_heads=None
    )  # llama.cpp: that of all heads


@pytest.mark.parametrize("name", ["llama3", "llama4", "exaone4", "gpt_oss"])
def test_rotations_without_the_length_of_training_have_that_of_the_model(name):
    rope, whole = MODELS[name]["config"]["rope_parameters"], {"max_position_embeddings": 4096}
    key = "original_max_position_embeddings"
    absent = {k: v for k, v in rope.items() if k != key}
    made = [factors(name, **whole, rope_parameters=value) for value in (absent, {**rope, key: 4096}, rope)]
    assert made[0] == made[1] != made[2]


def test_older_settings_of_rotations_are_complete():
    own = settings("gpt_oss", rope_parameters="absent", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert own["rope.scaling.type"] == "linear"


def test_a_default_that_depends_on_a_missing_key_is_not_invented():
    with pytest.raises(safeload.FormatError, match="hidden_size is missing"):
        settings("llama2", hidden_size="absent", head_dim="absent")


def test_values_are_those_of_transformers():
    transformers = pytest.importorskip("transformers", "5.20")
    forms = {form.model_type: form for form in model_families.gguf_forms().values() if form.omitted}
    assert {"llama", "mistral", "qwen3", "gpt_oss"} <= forms.keys()
    outside = ("rope_theta", "partial_rotary_factor")
    for kind, form in forms.items():
        usual = transformers.AutoConfig.for_model(form.text_type or kind).get_text_config().to_dict()
        sizes = {key: usual[key] for key in ("hidden_size", "num_attention_heads") if key in usual}
        config = inner.ModelConfig(sizes, kind, form)
        usual |= {key: value for key, value in (usual.get("rope_parameters") or {}).items() if key in outside}
        assert {key: config.values[key] for key in form.omitted} == {key: usual[key] for key in form.omitted}, kind
