"""Schemas: values of expressions, tensors of published models, and which schema a config chooses."""

import math
import re
from importlib.resources import files

import pytest
from builders.inside import Config, choosing
from builders.inside import model_families as families
from builders.models import BUILT_IN_SCHEMAS, PUBLISHED, SMALL, small

from safeload import layouts

VALUES = {
    "a": 6,
    "b": 4,
    "zero": 0,
    "text": {"dim": 64},
    "big": (1 << 63) - 1,
    "none": None,
    "list": [5, 7, 9],
    "object": {"x": 1, "y": 2},
    "many": [0] * 10_001,
    "texts": ["x"],
    "word": "gated-gelu",
    "half": 1.5,
    "nan": float("nan"),
    "infinite": float("inf"),
    "huge": 1e300,
    "digits": 10**400,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("a", 6),
        ("a * b", 24),
        ("a+b*2", 14),
        ("(a + b) * 2", 20),
        ("a - b - 1", 1),
        ("a // b * b", 4),
        ("2 * (a // (b - 1))", 4),
        ("3*text.dim", 192),
        ("big", (1 << 63) - 1),
        ("a - b * 2", -2),
        ("a % b", 2),
        ("a > b", 1),
        ("a <= b", 0),
        ("a == 6 and b >= 6", 0),
        ("a == 7 or b >= 4", 1),
        ("not a", 0),
        ("not a == b", 1),
        ("zero and 1 // zero", 0),
        ("1 or 1 // zero", 1),
        ("len(list, 2)", 3),
        ("len(object, 9)", 2),
        ("len(none, 9)", 9),
        ("item(list, 1)", 7),
        ("item(a, 1)", 6),
        ("contains(list, a + 1)", 1),
        ("contains(list, 1)", 0),
        ("contains(none, 1)", 0),
        ("starts(word, gated)", 1),
        ("starts(word, relu)", 0),
        ("starts(none, gated)", 0),
        ("times(half, 2 * a + 1)", 19),
        ("times(a, 2)", 12),
        ("a + len(list, 0) * 2", 12),
    ],
)
def test_expressions(text, value):
    assert Config(VALUES, {}).evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a % zero", "'a % zero': division by zero"),
        ("a // (b - 4)", "division by zero"),
        ("len(a, 2)", "'a' in the config is 6, expected a list or an object"),
        ("contains(word, 1)", "expected a list of at most 10000 items"),
        ("contains(many, 1)", "expected a list of at most 10000 items"),
        ("item(list, 3)", "expected an integer, or a list of integers with item 3"),
        ("item(texts, 0)", "expected an integer, or a list"),
        ("starts(list, x)", "expected a string"),
        ("times(word, 1)", "expected a number"),
        ("times(nan, 1)", "expected a number"),
        ("times(infinite, 1)", "expected a number"),
        ("times(none, 1)", "'times(none, 1)': 'none' in the config is None, expected a number"),
        ("times(huge, 1)", "beyond 64 bits"),
        ("times(digits, 3)", "beyond 64 bits"),
        ("times(half, big)", "beyond 64 bits"),
        ("big + 1", "'big + 1': a value beyond 64 bits"),
        ("big * big", "beyond 64 bits"),
        ("digits", "beyond 64 bits"),
        ("huge", "beyond 64 bits"),
        ("0 - big - 1", "beyond 64 bits"),
        ("half", "'half' in config.json is 1.5, expected an integer"),
        ("text", "expected an integer"),
        ("text.width", "'text.width' is required, but config.json lacks it"),
        ("a.width", "'a.width' is required"),
    ],
)
def test_values_that_give_no_size(text, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        Config(VALUES, {}).evaluate(text)


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models(model):
    name, config, count, parameters = PUBLISHED[model]
    wanted = BUILT_IN_SCHEMAS[name].expand(config, ())
    required = [w for w in wanted.values() if w.required]
    assert len(required) == count
    if parameters is not None:
        assert sum(math.prod(w.shape) for w in required) == parameters


def test_names_of_published_models():
    gpt2 = BUILT_IN_SCHEMAS["gpt2"].expand(PUBLISHED["GPT-2"][1], ["h.0.ln_1.weight", "wte.weight"])
    assert gpt2["h.11.attn.c_attn.weight"].shape == (768, 2304)
    assert gpt2["h.11.mlp.c_fc.weight"].shape == (768, 3072)
    assert not gpt2["h.0.attn.bias"].required
    names = {"bert.embeddings.LayerNorm.gamma", "bert.encoder.layer.0.output.LayerNorm.beta"}
    bert = BUILT_IN_SCHEMAS["bert"].expand(PUBLISHED["BERT-base"][1], names)
    assert names <= bert.keys()
    assert "bert.embeddings.LayerNorm.weight" not in bert
    assert "cls.predictions.decoder.weight" in bert
    llama = BUILT_IN_SCHEMAS["llama"].expand(PUBLISHED["Llama-3.2-1B"][1], ())
    assert llama["model.layers.15.self_attn.k_proj.weight"].shape == (512, 2048)
    assert llama["lm_head.weight"].tied == "model.embed_tokens.weight"
    bare = BUILT_IN_SCHEMAS["qwen3"].expand(PUBLISHED["Qwen3-0.6B"][1], ["embed_tokens.weight", "norm.weight"])
    assert bare["layers.27.self_attn.q_norm.weight"].shape == (128,)
    assert "model.norm.weight" not in bare


def test_moondream_has_the_names_of_its_layout():
    wanted = BUILT_IN_SCHEMAS["moondream2"].expand(None, ())
    assert list(wanted) == [tensor.name for tensor in layouts.MOONDREAM2.tensors]
    assert list(wanted)[-4:] == ["v_proj_fc1_w", "v_proj_fc1_b", "v_proj_fc2_w", "v_proj_fc2_b"]
    assert wanted["t_Wqkv_w"].shape == (24, 6144, 2048)
    assert wanted["v_pos_embedding"].shape == (1, 729, 1152)
    assert wanted["v_patch_embedding_linear_w"].shape == (588, 1152)


def test_roles():
    llama = BUILT_IN_SCHEMAS["llama"]
    roles = {
        "model.embed_tokens.weight": "embedding",
        "model.layers.31.input_layernorm.weight": "norm",
        "model.layers.0.self_attn.q_proj.bias": "bias",
        "model.layers.0.mlp.up_proj.weight": "weight",
        "layers.7.mlp.up_proj.weight": "weight",
        "lm_head.weight": "head",
        "model.layers.01.mlp.up_proj.weight": None,
        "model.layers.0.mlp.up_proj.weight2": None,
        "visual.conv1.weight": None,
    }
    assert {name: llama.role(name) for name in roles} == roles
    assert BUILT_IN_SCHEMAS["moondream2"].role("t_out_proj_bias") == "bias"
    assert BUILT_IN_SCHEMAS["gpt2"].role("transformer.wpe.weight") == "embedding"


@pytest.mark.parametrize("kind", SMALL)
def test_the_schema_is_found_by_the_config(kind):
    config, tensors = small(kind)
    name = SMALL[kind][0]
    found = BUILT_IN_SCHEMAS[name]
    if name == "moondream2":
        assert choosing.choose(None, "moon", tensors.keys()).schema.name == name
        assert choosing.choose(None, "moon", ["a"]) is None
        assert choosing.choose(None, "safetensors", tensors.keys()) is None
        return
    assert choosing.choose(config, "safetensors", tensors.keys()) == (found, True, None)
    if families.family_files()[name].own.get("keys"):
        assert choosing.choose({**config, "vision_encoder": {"hidden_size": 4}}, None, ()) == (found, False, None)
        assert choosing.choose({**config, "moe": {"num_experts": 4}}, None, ()) == (found, True, None)
        assert choosing.choose({**config, "model_type": "something"}, None, ()) is None
        del config["dim"]
        assert choosing.choose(config, None, ()) is None
        return
    config.pop("architectures")
    assert choosing.choose(config, "safetensors", tensors.keys()) == (found, True, None)
    config["architectures"] = ["SomethingForSequenceClassification"]
    assert choosing.choose(config, "safetensors", tensors.keys()) == (found, False, None)
    config["model_type"] = "something"
    assert choosing.choose(config, "safetensors", tensors.keys()) is None


def test_no_architecture_is_in_two_schemas():
    for field in ("architectures", "model_types"):
        all_of_them = [text for family in families.with_schema().values() for text in getattr(family, field)]
        assert len(all_of_them) == len(set(all_of_them))


def test_defaults_and_configs():
    llama = BUILT_IN_SCHEMAS["llama"]
    config = dict(PUBLISHED["Llama-2-7B"][1])
    assert llama.expand({**config, "num_key_value_heads": None}, ())[
        "model.layers.0.self_attn.k_proj.weight"
    ].shape == (
        4096,
        4096,
    )
    assert llama.expand({**config, "hidden_size": 4096.0}, ())["model.norm.weight"].shape == (4096,)
    for change, reason in (
        ({"hidden_size": "many"}, "'hidden_size' in config.json is 'many', expected an integer"),
        ({"hidden_size": [1]}, "expected an integer"),
        ({"hidden_size": 1.5}, "expected an integer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be 0 to 10000, got -1"),
        ({"num_hidden_layers": 10**9}, "must be 0 to 10000, got"),
        ({"vocab_size": -5}, "the size vocab_size must be >= 0, got -5"),
        ({"vocab_size": None}, "'vocab_size' is required, but config.json lacks it"),
    ):
        with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
            llama.expand({**config, **change}, ())
    with pytest.raises(ValueError, match="division by zero"):
        llama.expand({**config, "num_attention_heads": 0}, ())
    with pytest.raises(ValueError, match=r"'vocab_size' is required, but there is no config\.json"):
        llama.expand(None, ())


def test_the_installed_package_has_every_family():
    there = {entry.name.removesuffix(".json") for entry in (files("safeload") / "models" / "families").iterdir()}
    assert there == set(families.family_files()) >= {"llama", "plain_in_mlx"}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("LlamaForRewardModel", "llama"),
        ("Qwen2ForRewardModel", "qwen2"),
        ("BertForSomethingNew", "bert"),
        ("T5ForSomethingNew", "t5"),
        ("DeepseekV3ForQuestionAnswering", "deepseek_v3"),
        ("Phi3VForCausalLM", None),
        ("Qwen2VLForConditionalGeneration", None),
        ("LlamaFormer", None),
        ("ForSequenceClassification", None),
        ("", None),
    ],
)
def test_the_family_of_an_architecture(architecture, name):
    choice = choosing.choose({"architectures": [architecture]}, None, ())
    assert choice == (None if name is None else (BUILT_IN_SCHEMAS[name], False, None))
    inner = {"architectures": [architecture], "text_config": {"model_type": "llama"}}
    assert choosing.choose(inner, None, ()) is None


@pytest.mark.parametrize(
    "listed", [None, 5, "LlamaForCausalLM", [], [None], [5, {}], ["ForA" * 200_000 + "!"], ["x"] * 10**6]
)
def test_architectures_that_are_none(listed):
    assert choosing.choose({"architectures": listed}, None, ()) is None


def test_the_language_model_in_a_config():
    names = ["vision.embed.weight", "text.model.embed_tokens.weight", "text.model.norm.weight", "text.lm_head.weight"]
    inner = {"model_type": "qwen3", "hidden_size": 4}
    found = choosing.choose_part({"a": {"b": inner}, "vision_config": {"model_type": "x"}}, None, names)
    assert found.inner[:3] == (inner, "b", "text.model.")
    assert found.schema.role("text.model.norm.weight") == "norm"
    assert found.schema.role("text.lm_head.weight") == "head"
    assert found.schema.role("vision.embed.weight") is None
    assert choosing.choose_part({"a": {"b": {"c": {"d": inner}}}}, None, names) is None
    assert choosing.choose_part({"text_config": inner}, None, ["a"]) is None
    assert choosing.choose_part(None, None, names) is None
    # What a hostile file may bring: many embeddings, many configs.
    many = [f"{k}.embed_tokens.weight" for k in range(100_000)]
    assert choosing.choose_part({"text_config": inner}, None, many) is not None
    assert choosing.choose_part({str(k): {"x": {}} for k in range(100_000)}, None, names) is None
