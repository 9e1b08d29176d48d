"""Schemas against what transformers writes: names, shapes, and parameter counts of published models."""

import json
import math

import pytest
from builders.inside import choosing
from builders.models import BUILT_IN_SCHEMAS
from builders.paths import ROOT

FOLDER = ROOT / "tests" / "data" / "architectures"
FAMILIES = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))}
PUBLISHED = FAMILIES.pop("published")
CASES = {case: one for family in FAMILIES.values() for case, one in family.items()}

# Tensors that transformers writes, but that good files of others lack: poolers that nothing uses, a tied bias, norms
# that came with a later BitNet.
OPTIONAL = ("pooler.dense.", "cls.predictions.decoder.bias", "ffn_sub_norm.", "attn_sub_norm.")
# Models that are published with transposed experts, which transformers 5 saves as it has them.
TRANSPOSED = "Qwen3VLMoe"


@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes_are_those_that_transformers_writes(case):
    config, shapes = CASES[case]["config"], CASES[case]["shapes"]
    choice = choosing.choose(config, "safetensors", shapes.keys())
    assert choice.complete
    wanted = choice.schema.expand(config, shapes.keys())
    found = {name: one.shape for name, one in wanted.items() if name in shapes}
    if case.startswith(TRANSPOSED):
        found = {name: tuple(a or b for a, b in zip(shape, shapes[name], strict=True)) for name, shape in found.items()}
    assert found == {name: tuple(shape) for name, shape in shapes.items()}
    required = {name for name, one in wanted.items() if one.required}
    assert required <= shapes.keys()
    assert all(any(text in name for text in OPTIONAL) for name in shapes.keys() - required)
    assert all(choice.schema.find(name).entry is one.entry for name, one in wanted.items())


@pytest.mark.parametrize("model", PUBLISHED)
def test_parameters_of_published_models(model):
    config = PUBLISHED[model]["config"]
    choice = choosing.choose(config, "safetensors", ())
    wanted = choice.schema.expand(config, ())
    assert sum(math.prod(one.shape) for one in wanted.values() if one.required) == PUBLISHED[model]["parameters"]


def test_every_schema_of_transformers_has_its_fixture():
    others = {"bert_multiple_choice", "llama_original", "moondream2"}
    assert BUILT_IN_SCHEMAS.keys() - FAMILIES.keys() == others
    listed = {name for schema in BUILT_IN_SCHEMAS.values() for name in schema.architectures}
    tested = {one["config"]["architectures"][0] for one in CASES.values()}
    assert listed - tested == {"BitnetForCausalLM"}  # another spelling of BitNetForCausalLM


# Sizes from params.json as Meta and Mistral published them, and parameters. Llama 2's vocabulary is that of its
# tokenizer: its params.json says -1.
ORIGINAL = {
    "Llama-2-7B": ({"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "vocab_size": -1}, 6_738_415_616),
    "Llama-2-13B": ({"dim": 5120, "multiple_of": 256, "n_heads": 40, "n_layers": 40, "vocab_size": -1}, 13_015_864_320),
    "Llama-2-70B": (
        {
            "dim": 8192,
            "multiple_of": 4096,
            "ffn_dim_multiplier": 1.3,
            "n_heads": 64,
            "n_kv_heads": 8,
            "n_layers": 80,
            "vocab_size": -1,
        },
        68_976_648_192,
    ),
    "Llama-3-8B": (
        {
            "dim": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "n_kv_heads": 8,
            "vocab_size": 128256,
            "multiple_of": 1024,
            "ffn_dim_multiplier": 1.3,
        },
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        {
            "dim": 2048,
            "n_layers": 16,
            "n_heads": 32,
            "n_kv_heads": 8,
            "vocab_size": 128256,
            "multiple_of": 256,
            "ffn_dim_multiplier": 1.5,
            "use_scaled_rope": True,
        },
        1_235_814_400,
    ),
    "Mistral-7B": (
        {
            "dim": 4096,
            "n_layers": 32,
            "head_dim": 128,
            "hidden_dim": 14336,
            "n_heads": 32,
            "n_kv_heads": 8,
            "norm_eps": 1e-05,
            "vocab_size": 32000,
        },
        7_241_732_096,
    ),
    "Mixtral-8x7B": (
        {
            "dim": 4096,
            "n_layers": 32,
            "head_dim": 128,
            "hidden_dim": 14336,
            "n_heads": 32,
            "n_kv_heads": 8,
            "vocab_size": 32000,
            "moe": {"num_experts_per_tok": 2, "num_experts": 8},
        },
        46_702_792_704,
    ),
}


@pytest.mark.parametrize("model", ORIGINAL)
def test_models_under_the_names_of_their_publishers(model):
    params, parameters = ORIGINAL[model]
    choice = choosing.choose(params, "torch", ())
    assert (choice.schema.name, choice.complete) == ("llama_original", True)
    required = [one for one in choice.schema.expand(params, ()).values() if one.required]
    sizes = [[32000 if size is None else size for size in one.shape] for one in required]
    assert sum(map(math.prod, sizes)) == parameters


def test_the_layers_for_multi_token_prediction_are_whole_or_absent():
    config = {**PUBLISHED["DeepSeek-V3"]["config"], "num_nextn_predict_layers": 1}
    schema = BUILT_IN_SCHEMAS["deepseek_v3"]
    without = schema.expand(config, ())
    # As in the index that is published, where the layer has the embedding and the head of the model once more.
    there = schema.expand(config, ["model.layers.61.eh_proj.weight"])
    more = {name: one for name, one in there.items() if name not in without}
    assert {one.layer for one in more.values()} == {61}
    assert sum(one.required for one in more.values()) == len(more) - 2
    assert more["model.layers.61.eh_proj.weight"].shape == (7168, 14336)
    assert more["model.layers.61.shared_head.head.weight"].shape == (129280, 7168)
    assert more["model.layers.61.mlp.experts.255.down_proj.weight"].shape == (7168, 2048)
    assert "model.layers.61.mlp.gate_proj.weight" not in there
    # The files that are published have 91,991 tensors of 684,531,386,000 elements: weights are in fp8, with a scale for
    # each block of 128 x 128.
    scaled = [name for name in there if name.endswith(("_proj.weight", "_mqa.weight")) and "eh_proj" not in name]
    scales = sum(math.prod(-(-size // 128) for size in there[name].shape) for name in scaled)
    assert len(there) + len(scaled) == 91_991
    assert sum(math.prod(one.shape) for one in there.values()) + scales == 684_531_386_000
