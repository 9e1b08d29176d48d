"""Validation against schemas: experts, several stacks, params.json, packed weights, and configs that are hostile."""

import copy
import json
import time

import ml_dtypes
import numpy as np
import pytest
from builders.inside import choosing, main
from builders.models import BUILT_IN_SCHEMAS, SMALL, small
from builders.paths import ROOT
from builders.thorough import part_of
from builders.torch_build import Storage, tensor, zip_file

import safeload
from safeload import check
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

ARCHITECTURES = ROOT / "tests" / "data" / "architectures"


def codes(report):
    return [(f.severity, f.code, f.tensor) for f in (*report.errors, *report.warnings, *report.notes)]


def without(tensors, *parts):
    return {name: x for name, x in tensors.items() if not any(part in name for part in parts)}


# ---- experts ----

EXPERT = "model.layers.{}.mlp.experts.{}.up_proj.weight"


def test_experts_that_are_missing_or_too_many():
    config, tensors = small("qwen3_moe")
    assert codes(check(tensors, config=config)) == []
    lost = EXPERT.format(1, 3)
    assert codes(check(without(tensors, lost), config=config)) == [("error", "schema.missing", lost)]
    report = check(without(tensors, "experts.3."), config=config)
    assert [f.tensor for f in report.errors] == [
        f"model.layers.{k}.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up", "down") for k in range(3)
    ]
    report = check(without(tensors, ".up_proj."), config=config)
    assert codes(report) == [("error", "schema.missing", EXPERT.format(0, 0))]
    assert report.errors[0].message == "is missing in each of the 3 layers (12 tensors)"
    more = EXPERT.format(2, 4)
    report = check({**tensors, more: tensors[lost]}, config=config)
    assert codes(report) == [("error", "schema.unexpected", more)]
    assert report.errors[0].message == "is present, but num_experts or is_sparse_layer in the config excludes it"
    report = check({**tensors, EXPERT.format(3, 0): tensors[lost]}, config=config)
    assert report.errors[0].message == "layer 3 (1 tensor) is beyond the 3 layers of the config"


def test_dense_layers_among_those_with_experts():
    config, tensors = small("deepseek_v3")
    assert "model.layers.0.mlp.up_proj.weight" in tensors
    assert "model.layers.1.mlp.up_proj.weight" not in tensors
    report = check(tensors, config={**config, "first_k_dense_replace": 2})
    assert ("error", "schema.missing", "model.layers.1.mlp.up_proj.weight") in codes(report)
    assert ("error", "schema.unexpected", "model.layers.1.mlp.gate.weight") in codes(report)
    report = check(without(tensors, "layers.0."), config=config)
    assert codes(report) == [("error", "schema.layer_missing", "model.layers.0")]


def test_the_layer_for_multi_token_prediction():
    config, tensors = small("deepseek_v3")
    config["num_nextn_predict_layers"] = 1
    assert codes(check(tensors, config=config)) == []
    schema = BUILT_IN_SCHEMAS["deepseek_v3"]
    there = schema.expand(config, ["model.layers.3.enorm.weight"])
    rng = np.random.default_rng(5)
    needed = {name: one.shape for name, one in there.items() if one.layer == 3 and one.required}
    more = {name: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in needed.items()}
    assert "model.layers.3.mlp.experts.2.up_proj.weight" in more
    assert codes(check({**tensors, **more}, config=config)) == []
    del more["model.layers.3.eh_proj.weight"]
    assert codes(check({**tensors, **more}, config=config)) == [
        ("error", "schema.missing", "model.layers.3.eh_proj.weight")
    ]
    del config["num_nextn_predict_layers"]
    report = check({**tensors, **more}, config=config)
    assert codes(report) == [("error", "schema.layer_extra", "model.layers.3")]


@pytest.mark.parametrize(
    ("kind", "stack", "count"), [("t5", "decoder.block.", 2), ("whisper", "model.decoder.layers.", 3)]
)
def test_layers_of_an_encoder_and_a_decoder(kind, stack, count):
    config, tensors = small(kind)
    report = check(without(tensors, f"{stack}1."), config=config)
    assert codes(report) == [("error", "schema.layer_missing", f"{stack}1")]
    assert f"layer 1 of {count} is missing, with all" in report.errors[0].message
    lost = next(name for name in tensors if name.startswith(f"{stack}1."))
    part = lost.removeprefix(f"{stack}1.")
    report = check({name: x for name, x in tensors.items() if not name.endswith(part)}, config=config)
    assert [f.tensor for f in report.errors if f.tensor.startswith(stack)] == [f"{stack}0.{part}"]
    extra = {f"{stack}{count}.{part}": tensors[lost]}
    assert codes(check({**tensors, **extra}, config=config)) == [("error", "schema.layer_extra", f"{stack}{count}")]


def test_an_encoder_alone_may_have_its_decoder_beside_it():
    config, tensors = small("t5")
    config["architectures"] = ["T5EncoderModel"]
    assert codes(check(without(tensors, "lm_head", "decoder."), config=config)) == []
    assert codes(check(without(tensors, "lm_head"), config=config)) == []
    config["architectures"] = ["T5Model"]
    lost = {f.tensor for f in check(without(tensors, "decoder."), config=config).errors}
    assert {"decoder.block.0", "decoder.block.1", "decoder.final_layer_norm.weight"} < lost


def test_tied_heads_of_the_new_schemas():
    for kind, head, embedding in (
        ("t5", "lm_head.weight", "shared.weight"),
        ("whisper", "proj_out.weight", "model.decoder.embed_tokens.weight"),
    ):
        config, tensors = small(kind)
        schema = BUILT_IN_SCHEMAS[kind]
        assert choosing.absent_heads(schema, tensors.keys(), config) == {head: embedding}
        assert choosing.absent_heads(schema, tensors.keys(), {**config, "tie_word_embeddings": False}) == {}
        other = next(name for name in schema.architectures if name not in config["architectures"])
        assert choosing.absent_heads(schema, tensors.keys(), {**config, "architectures": [other]}) == {}


# ---- params.json ----


@pytest.fixture
def original():
    return small("llama_original", np.float32)


def write_pth(path, tensors):
    objects = {name: tensor(Storage(f"k{k}", x), x.shape) for k, (name, x) in enumerate(tensors.items())}
    path.write_bytes(zip_file(objects))


def test_a_folder_as_meta_publishes_it(original, tmp_path, capsys):
    params, tensors = original
    (tmp_path / "params.json").write_text(json.dumps(params))
    write_pth(tmp_path / "consolidated.00.pth", tensors)
    for path in (tmp_path, tmp_path / "consolidated.00.pth"):
        report = check(path)
        assert (report.schema, report.compared, codes(report)) == ("llama_original", 30, [])
    lost = "layers.2.feed_forward.w2.weight"
    write_pth(tmp_path / "consolidated.00.pth", without(tensors, lost))
    assert codes(check(tmp_path)) == [("error", "schema.missing", lost)]
    assert main(["check", str(tmp_path)]) == 1
    assert "29 names and shapes against schema llama_original" in capsys.readouterr().out
    # The argument counts more, and a slice of a model-parallel checkpoint is not the whole model.
    assert codes(check(tmp_path, config={**params, "n_layers": 2}))[0][1] == "schema.layer_extra"
    write_pth(tmp_path / "consolidated.01.pth", tensors)
    assert check(tmp_path / "consolidated.00.pth").schema is None


def test_a_folder_as_mistral_publishes_it(original, tmp_path):
    params, tensors = original
    save_file(tensors, tmp_path / "consolidated.safetensors")
    assert check(tmp_path).schema is None
    (tmp_path / "params.json").write_text(json.dumps({**params, "hidden_dim": 192}))
    assert codes(check(tmp_path)) == []
    # The config.json beside it is about names that these files do not have.
    (tmp_path / "config.json").write_text(json.dumps(small("mistral")[0]))
    assert check(tmp_path).schema == "llama_original"
    save_file(tensors, tmp_path / "other.safetensors")
    assert codes(check(tmp_path / "other.safetensors", config=tmp_path / "params.json")) == []


@pytest.mark.parametrize("content", ["{", "[]", '{"dim": 64, "dim": 64}', "\x00", '{"dim": "x"}'])
def test_a_params_json_that_is_damaged(content, original, tmp_path):
    save_file(original[1], tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(content)
    report = check(tmp_path)
    found = ("error", "schema.config", None)
    assert codes(report) == ([] if "x" in content else [found])
    assert "x" in content or "params.json" in report.errors[0].message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_heads": 0}, "'dim // n_heads': division by zero"),
        ({"ffn_dim_multiplier": "1.3"}, "'ffn_dim_multiplier' in the config is '1.3', expected a number"),
        ({"ffn_dim_multiplier": float("nan")}, "'ffn_dim_multiplier' in the config is nan, expected a number"),
        ({"ffn_dim_multiplier": 1e300}, "a value beyond 64 bits"),
        ({"multiple_of": [1]}, "'multiple_of' in params.json is [1], expected an integer"),
        ({"n_layers": -1}, "n_layers must be 0 to 10000, got -1"),
        ({"vocab_size": "x"}, "'vocab_size' in params.json is 'x', expected an integer"),
    ],
)
def test_sizes_in_params_json_that_are_wrong(change, reason, original):
    params, tensors = original
    report = check(tensors, config={**params, **change})
    assert codes(report) == [("error", "schema.config", None)]
    assert reason in report.errors[0].message
    for vocabulary in (-1, None):
        assert codes(check(tensors, config={**params, "vocab_size": vocabulary})) == []


# ---- packed weights, by what they mean ----


def test_weights_in_fp8_with_scales_for_blocks(tmp_path):
    config, tensors = small("deepseek_v3")
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    stored = {}
    for name, x in tensors.items():
        if name.endswith("_proj.weight"):
            stored[name] = (x.astype(np.float32) * 100).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = np.full([-(-size // 32) for size in x.shape], 0.01, np.float32)
        else:
            stored[name] = x
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = check(tmp_path)
    assert (report.schema, report.compared, codes(report)) == ("deepseek_v3", len(tensors), [])
    (tmp_path / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 64}))
    (wrong,) = check(tmp_path).errors
    assert wrong.message.startswith("config.json says moe_intermediate_size 64; all ")


def test_experts_in_mxfp4():
    folder = ROOT / "tests" / "data" / "quantized" / "gpt_oss"
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "vocab_size": 8, "num_attention_heads": 2}
    report = check(folder, config=config)
    with safeload.open(folder) as opened:
        there = set(opened)
    assert {f.tensor for f in report.errors}.isdisjoint(there)
    assert {f.code for f in report.errors} == {"schema.missing"}
    assert report.compared == len(there) == 6
    report = check(folder, config={**config, "intermediate_size": 64})
    (wrong,) = (f for f in report.errors if f.code != "schema.missing")
    assert wrong.message == "config.json says intermediate_size 64; all 3 tensors say 32"


@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind != "moondream2"])
def test_any_model_may_have_its_names_after_a_prefix(kind):
    config, tensors = small(kind)
    report = check({f"module.{name}": x for name, x in tensors.items()}, config=config, values=False)
    assert [f.code for f in (*report.errors, *report.warnings)] == ["schema.prefix"]
    assert report.compared == len(tensors)


# ---- hostile configs ----

HOSTILE = (
    *(-1, 10**6, 10**9, 2**63, 10**40, 0.5, float("nan"), float("inf"), "many", "\x1b[31m", True, None),
    *([], [1], [[[]]], {}, {"a": {"b": []}}, [10**9] * 3),
)


@pytest.mark.parametrize("kind", SMALL)
def test_a_hostile_value_is_a_finding_that_names_its_key(kind):
    config, tensors = small(kind)
    schema = BUILT_IN_SCHEMAS[SMALL[kind][0]]
    inner = [(outer, key) for outer, value in config.items() if isinstance(value, dict) for key in value]
    for k, path in enumerate((*((key,) for key in config), *inner)):
        for value in part_of(HOSTILE, k, 2):
            changed = copy.deepcopy(config)
            place = changed if len(path) == 1 else changed[path[0]]
            place[path[-1]] = value
            started = time.perf_counter()
            said = refusal(schema, changed, tensors)
            assert "\x1b" not in said
            assert len(said) < 500
            choosing.choose_part(changed, "safetensors", tensors.keys())
            assert time.perf_counter() - started < 5


def refusal(schema, config, tensors):
    """Why a schema cannot be expanded, or ""; nothing but a ValueError may be raised."""
    try:
        schema.expand(config, tensors.keys())
    except ValueError as problem:
        return str(problem)
    return ""


def test_the_tensors_of_a_config_are_counted_before_they_are_made():
    config, tensors = small("deepseek_v3")
    for change, reason in (
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be 0 to 10000, got 1000000000000"),
        ({"n_routed_experts": 10_001}, "n_routed_experts must be 0 to 10000, got 10001"),
        (
            {"num_hidden_layers": 9_000, "n_routed_experts": 9_000},
            "num_hidden_layers is 9000 and n_routed_experts is 9000: a model can have at most 500,000 tensors",
        ),
        ({"num_nextn_predict_layers": -3}, "num_nextn_predict_layers must be 0 to 10000, got -3"),
        ({"kv_lora_rank": {"a": 1}}, "'kv_lora_rank' in config.json is {'a': 1}, expected an integer"),
    ):
        started = time.process_time()
        report = check(tensors, config={**config, **change})
        assert time.process_time() - started < 10
        assert codes(report) == [("error", "schema.config", None)]
        assert reason in report.errors[0].message


def test_names_of_deepseek_v3_take_seconds():
    """About two; comparing each with all would take hours."""
    config = json.loads((ARCHITECTURES / "published.json").read_text())["DeepSeek-V3"]["config"]
    config |= {"num_hidden_layers": 122, "num_nextn_predict_layers": 1}
    wanted = BUILT_IN_SCHEMAS["deepseek_v3"].expand(config, ["model.layers.122.eh_proj.weight"])
    number = np.zeros((), ml_dtypes.bfloat16)
    known = {n: np.broadcast_to(number, w.shape) for n, w in wanted.items()}
    assert len(known) > 91_000
    started = time.process_time()  # what else runs on the machine takes none of it
    report = check(known, config=config, values=False)
    assert (report.schema, codes(report), report.compared) == ("deepseek_v3", [], len(known))
    assert time.process_time() - started < 10


W = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def linearized(name):
    """The name that llm-compressor gives a tensor of Mixtral: the module's in transformers 5, an expert a module."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return ".".join(W.get(part, part) for part in name.split("."))


@pytest.mark.parametrize("prefix", ["", "module.", "model.language_model."])
@pytest.mark.parametrize("renamed", [linearized, lambda name: name.replace(".block_sparse_moe.", ".mlp."), str])
def test_mixtrals_experts_are_known_under_the_names_of_both_tools(renamed, prefix):
    config, tensors = small("mixtral")
    named = {prefix + renamed(name): x for name, x in tensors.items()}
    report = check(named, config=config, values=False)
    assert [f.code for f in (*report.errors, *report.warnings)] == ["schema.prefix"] * bool(prefix)
    assert report.compared == len(tensors)
    wrong = next(name for name in named if renamed("w2") in name.split(".") or ".w2." in name)
    named[wrong] = named[wrong][:, :-1]
    assert "schema.shape" in [f.code for f in check(named, config=config, values=False).errors]


def test_mixtrals_fused_experts_are_known():
    config, tensors = small("mixtral")
    named = {name.replace(".block_sparse_moe.", ".mlp."): x for name, x in tensors.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}.block_sparse_moe.experts"
        experts = range(config["num_local_experts"])
        one = [[tensors[f"{block}.{k}.{w}.weight"] for k in experts] for w in ("w1", "w3", "w2")]
        gate, up, down = map(np.stack, one)
        named[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        named[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    report = check(named, config=config, values=False)
    assert [f.code for f in (*report.errors, *report.warnings)] == []
    assert report.compared == len(named)
    del named["model.layers.0.mlp.experts.down_proj"]
    assert "schema.missing" in [f.code for f in check(named, config=config, values=False).errors]
