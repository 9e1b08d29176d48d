"""check: each fault of a model gives exactly its finding, and a good model gives none."""

import json
import logging
import os
import re
import zipfile

import ml_dtypes
import numpy as np
import pytest
from builders import inside, onnx_build
from builders.inside import main
from builders.models import BUILT_IN_SCHEMAS, SMALL, small, write_folder
from builders.thorough import dealt
from builders.torch_build import Storage, tensor, zip_file

import safeload
from safeload import QuantizedTensor, check
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]


def codes(report):
    return [(f.severity, f.code, f.tensor) for f in (*report.errors, *report.warnings, *report.notes)]


# ---- whole models ----


@pytest.mark.parametrize("kind", SMALL)
def test_a_small_model_of_each_schema_passes(kind, tmp_path):
    config, tensors = small(kind)
    schema = SMALL[kind][0]
    report = check(tensors, config=config, schema=schema)
    assert codes(report) == []
    assert report.ok
    assert report.schema == schema
    assert report.parameters == sum(x.size for x in tensors.values())
    assert report.nbytes == sum(x.nbytes for x in tensors.values())
    assert report.stats.keys() == tensors.keys()
    if schema == "moondream2":
        return
    path = write_folder(tmp_path, config, tensors)
    report = check(path)
    assert codes(report) == []
    assert (report.schema, report.format, len(report.files)) == (schema, "safetensors", 2)


@pytest.fixture
def llama():
    return small("llama-gqa")


LAST = "model.norm.weight"
MATRIX = "model.layers.1.mlp.up_proj.weight"
KEY = "model.layers.2.self_attn.k_proj.weight"


def lose_layer(tensors, config):
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]


def lose_tensor(tensors, config):
    del tensors[MATRIX]


def lose_everywhere(tensors, config):
    for name in [name for name in tensors if name.endswith("up_proj.weight")]:
        del tensors[name]


def lose_head(tensors, config):
    del tensors["lm_head.weight"]


def wrong_gqa(tensors, config):
    tensors[KEY] = np.repeat(tensors[KEY], 2, axis=0)


def extra(tensors, config):
    tensors["model.layers.0.self_attn.rotary.weight"] = tensors[MATRIX].copy()


def extra_layer(tensors, config):
    tensors |= {name.replace("layers.2", "layers.3"): x for name, x in tensors.items() if "layers.2" in name}


def bias(tensors, config):
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, ml_dtypes.bfloat16)


def nan(tensors, config):
    tensors[LAST][-1] = np.nan


def infinity(tensors, config):
    tensors[MATRIX][3, 5] = -np.inf


def zeros(tensors, config):
    tensors[MATRIX][...] = 0


def constant(tensors, config):
    tensors[MATRIX][...] = 0.5


def large(tensors, config):
    tensors[MATRIX][7, 7] = 500


def mixed(tensors, config):
    tensors[MATRIX] = tensors[MATRIX].astype(np.float32)


def untied(tensors, config):
    config["tie_word_embeddings"] = True


def no_key(tensors, config):
    del config["hidden_size"]


def other_dtype(tensors, config):
    config["torch_dtype"] = "float16"


FAULTS = [
    (
        lose_layer,
        "error",
        "schema.layer_missing",
        "model.layers.1",
        "layer 1 of 3 is missing, with all 9 tensors",
    ),
    (lose_tensor, "error", "schema.missing", MATRIX, "is missing"),
    (
        lose_everywhere,
        "error",
        "schema.missing",
        "model.layers.0.mlp.up_proj.weight",
        "is missing in each of the 3 layers",
    ),
    (lose_head, "error", "schema.missing", "lm_head.weight", "is missing"),
    (
        wrong_gqa,
        "error",
        "schema.shape",
        KEY,
        "has shape [64, 64], but [num_key_value_heads * head_dim, hidden_size] is [32, 64] by the config",
    ),
    (extra, "error", "schema.unexpected", "model.layers.0.self_attn.rotary.weight", "is not a tensor of schema llama"),
    (extra_layer, "error", "schema.layer_extra", "model.layers.3", "layer 3 (9 tensors) is beyond the 3 layers"),
    (
        bias,
        "error",
        "schema.unexpected",
        "model.layers.0.self_attn.q_proj.bias",
        "attention_bias in the config excludes it",
    ),
    (no_key, "error", "schema.config", None, "schema llama: 'hidden_size' is required, but config.json lacks it"),
    (nan, "error", "value.nan", LAST, "1 of 64 values is NaN, the first at [63]"),
    (infinity, "error", "value.inf", MATRIX, "1 of 8,192 values is infinite, the first at [3, 5]"),
    (zeros, "warning", "value.zero", MATRIX, "all 8,192 values of the matrix are 0"),
    (constant, "warning", "value.constant", MATRIX, "all 8,192 values of the matrix are 0.5"),
    (large, "warning", "value.range", MATRIX, "to 500, outside [-128, 128]"),
    (mixed, "warning", "dtype.mixed", MATRIX, "is float32, but bfloat16 in 2 of 3 layers"),
    (untied, "warning", "head.tied", "lm_head.weight", "differs from 'model.embed_tokens.weight', first at [0, 0]"),
    (
        other_dtype,
        "warning",
        "dtype.config",
        None,
        "dtype in config.json is float16, but no tensor has it; 30 of 30 are",
    ),
]


@pytest.mark.parametrize(("fault", "severity", "code", "name", "message"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_each_fault_is_reported_as_exactly_that(fault, severity, code, name, message, llama, tmp_path):
    config, tensors = llama
    fault(tensors, config)
    for source in (tensors, write_folder(tmp_path, config, tensors)):
        report = check(source, config=config if source is tensors else None, schema="auto")
        if source is tensors:
            report = check(source, config=config, schema="llama")
        assert codes(report) == [(severity, code, name)]
        found = (report.errors or report.warnings)[0]
        assert message in found.message
        assert report.ok == (severity == "warning") == bool(report)
        assert code in str(report)
        assert str(name or "file") in str(report)


@pytest.mark.parametrize(
    ("value", "severity"),
    [
        (-np.inf, "warning"),
        ([np.inf], "warning"),
        (np.nan, "error"),
        ([np.inf, 0], "error"),
        ([[-np.inf] * 2], "error"),
    ],
)
def test_an_infinity_alone_can_be_a_constant_of_an_onnx_graph(value, severity, tmp_path):
    content = onnx_build.tensor("c", np.array(value, np.float32)), onnx_build.tensor("w", np.ones(3, np.float32))
    (tmp_path / "m.onnx").write_bytes(onnx_build.model(onnx_build.graph(*content)))
    report = check(tmp_path / "m.onnx")
    assert codes(report) == [(severity, f"value.{'nan' if value is np.nan else 'inf'}", "c")]
    save_file({"c": np.array(value, np.float32)}, tmp_path / "m.safetensors")
    assert codes(check(tmp_path / "m.safetensors"))[0][0] == "error"


def test_the_last_value_of_the_last_shard(llama, tmp_path):
    config, tensors = llama
    last = max(tensors)
    tensors[last][-1] = np.nan
    path = write_folder(tmp_path, config, tensors, shards=3)
    assert codes(check(path)) == [("error", "value.nan", last)]


def test_many_findings_of_a_kind_are_shown_once(llama):
    config, tensors = llama
    for k in range(3):
        for name in ("k_proj", "v_proj"):
            tensors[f"model.layers.{k}.self_attn.{name}.weight"] = np.ones((33 + k, 64), np.float32)
    report = check(tensors, config=config)
    assert len(report.errors) == 6
    assert str(report).count("schema.shape") == 1  # of k_proj and v_proj in three layers
    report = check({f"layers.{k}.w": np.full((2, 2), np.nan, np.float32) for k in range(20)})
    assert len(report.errors) == 20
    assert str(report).count("value.nan") == 1
    assert "and 19 more like it" in str(report)


def test_a_tied_head_that_is_the_same(tmp_path):
    config, tensors = small("llama-tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert codes(check(tensors, config=config)) == []
    assert codes(check(write_folder(tmp_path, config, tensors))) == []
    tensors["lm_head.weight"][-1, -1] = 1
    report = check(write_folder(tmp_path, config, tensors))
    assert codes(report) == [("warning", "head.tied", "lm_head.weight")]
    assert "first at [95, 63]" in report.warnings[0].message


def test_the_head_of_an_architecture(llama):
    config, tensors = llama
    config |= {"architectures": ["LlamaForTokenClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    head = tensors.pop("lm_head.weight")
    report = check(tensors, config=config)
    assert codes(report) == [("error", "schema.missing", name) for name in ("score.weight", "score.bias")]
    tensors |= {"score.weight": head[:3], "score.bias": np.float32([1, 2, 3])}
    assert codes(check(tensors, config=config)) == []
    report = check({**tensors, "score.weight": head[:2]}, config=config)
    assert codes(report) == [("error", "schema.shape", "score.weight")]
    assert "[num_labels, hidden_size] is [3, 64] by the config" in report.errors[0].message
    # Of another architecture, in which the bias and a language model's head are not used.
    config["architectures"] = ["LlamaForSequenceClassification"]
    report = check({**tensors, "lm_head.weight": head}, config=config)
    assert codes(report) == [("note", "head.unchecked", "score.bias")]
    assert "'score.bias', 'lm_head.weight' were not checked" in report.notes[0].message
    # The labels are 2 where the config does not name them.
    del config["id2label"]
    assert codes(check({**tensors, "score.weight": head[:2]}, config=config))[0][1] != "schema.shape"


def test_a_tensor_of_another_architecture():
    config, tensors = small("whisper")
    tensors["layer_weights"] = np.float32([1, 2, 3])
    report = check(tensors, config=config)
    assert codes(report) == [("error", "schema.unexpected", "layer_weights")]
    assert "belongs to WhisperForAudioClassification, but the config names another" in report.errors[0].message


def test_names_of_another_kind(llama):
    config, tensors = llama
    other = {name.replace("model.layers", "blk").replace("model.", "x."): x for name, x in tensors.items()}
    report = check(other, config=config)
    assert [code for _, code, _ in codes(report)] == ["schema.names"]
    assert "only 1 of 30 names are" in report.errors[0].message


# ---- without a schema ----


def test_layers_without_a_schema():
    def layer(k):
        return {f"encoder.layers.{k}.{part}": np.float32([[1, 2], [3, k]]) for part in ("a.weight", "b.weight", "c")}

    tensors = {name: x for k in range(5) for name, x in layer(k).items()}
    assert codes(check(tensors)) == []
    hole = {name: x for name, x in tensors.items() if ".2." not in name}
    assert codes(check(hole)) == [("error", "layers.hole", "encoder.layers.2")]
    del tensors["encoder.layers.3.b.weight"]
    report = check(tensors)
    assert codes(report) == [("warning", "layers.missing", "encoder.layers.3.b.weight")]
    assert "4 of the other 4 layers have it" in report.warnings[0].message
    sequential = {f"features.{k}.weight": np.float32([[1, 2]]) for k in (0, 3, 6)}
    assert codes(check(sequential)) == []
    assert check(tensors, schema=None).schema is None


def _stack(prefix, layers):
    parts = ("attention.q.weight", "mlp.up.weight", "norm.weight")
    return {f"{prefix}{k}.{part}": np.float32([[1, 2], [3, k]]) for k in range(layers) for part in parts}


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 6},
        {"n_layer": 6, "vocab_size": 5},
        {"model_type": "some", "text_config": {"num_layers": 6}, "vision_config": {"depth": 4}},
        {"vision_feature_layer": -2, "vision_config": {"num_hidden_layers": 4}, "text_config": {"n_layers": 6}},
    ],
    ids=" ".join,
)
def test_the_last_layer_that_a_config_states(config):
    tensors = _stack("model.layers.", 6) | _stack("vision.blocks.", 4)
    assert codes(check(tensors, config=config)) == []
    lost = {name: x for name, x in tensors.items() if ".layers.5." not in name}
    report = check(lost, config=config)
    assert codes(report) == [("error", "layers.hole", "model.layers.5")]
    assert report.errors[0].message == "layer 5 of 6 is missing"
    assert codes(check(lost)) == []


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 6, "encoder_layers": 5},  # another stack that is not in the file
        {"num_hidden_layers": 6, "depths": [2, 2, 6, 2, 2]},  # stages
        {"num_hidden_layers": 4, "num_kv_shared_layers": 6},
        {"vision_feature_layer": -2, "vision_config": {"num_hidden_layers": 6}},  # its last layer can be left out
    ],
    ids=str,
)
def test_configs_from_which_no_last_layer_follows(config):
    assert codes(check(_stack("model.layers.", 5) | _stack("decoder.layers.", 4), config=config)) == []
    assert codes(check(_stack("model.layers.", 5) | _stack("decoder.layers.", 6), config={"n_layer": 6})) == []


# Modules of each layer, as transformers 5.24 writes them: layers of another kind have other modules, or fewer.
ATTENTION, DENSE = ["self_attn.q_proj.weight", "self_attn.o_proj.weight", "norm.weight"], ["mlp.up_proj.weight"]
SPARSE = ["mlp.experts.0.w1.weight", "mlp.experts.1.w1.weight", "mlp.gate.weight", "post_mlp_layernorm.weight"]
STAGE = ["blocks.0.attn.weight", "blocks.0.attn.bias", "norm.weight"]
DOWN = ["downsample.norm.weight", "downsample.norm.bias", "downsample.reduction.weight"]
BERT = ["attn.Wqkv.weight", "attn.Wo.weight"]
BLOCK, EXPANSION = ["depthwise.conv.weight", "se.fc.weight"], ["expansion.conv.weight", "expansion.bn.weight"]
HASHED, GATED = ["ffn.gate.weight", "ffn.gate.tid2eid"], ["ffn.gate.weight", "ffn.gate.bias"]
KINDS = {
    "AXK1": ([[*ATTENTION, *DENSE], *[[*ATTENTION, *SPARSE]] * 29], [f"0.{ATTENTION[0]}", f"5.{SPARSE[1]}"]),
    "Swin": ([*[[*STAGE, *DOWN]] * 3, STAGE], [f"3.{STAGE[0]}", f"3.{STAGE[1]}", f"0.{STAGE[2]}"]),
    "DeepseekV4": ([HASHED, *[GATED] * 29], [f"1.{GATED[1]}", f"29.{GATED[1]}"]),
    "EfficientNet": ([*[BLOCK] * 2, *[[*BLOCK, *EXPANSION]] * 28], [f"0.{BLOCK[0]}", f"9.{EXPANSION[1]}"]),
    "ModernBERT": ([BERT, *[[*BERT, "attn_norm.weight"]] * 21], [f"0.{BERT[0]}", "21.attn_norm.weight"]),
}


@pytest.mark.parametrize("model", KINDS)
def test_layers_of_another_kind_have_lost_nothing(model):
    layers, losses = KINDS[model]
    names = [f"model.layers.{k}.{name}" for k, layer in enumerate(layers) for name in layer]
    tensors = {name: np.float32([[1, 2], [3, k % 9]]) for k, name in enumerate(names)}
    assert codes(check(tensors)) == []
    for name in losses:  # in layers of another kind, too
        lost = f"model.layers.{name}"
        report = check({other: x for other, x in tensors.items() if other != lost})
        assert codes(report) == [("warning", "layers.missing", lost)]


def test_a_module_named_as_a_wrapper():
    # Levit has it around what it adds to its input; the wrappers of torch have names of their own.
    x = np.float32([[1, 2], [3, 4]])
    names = [f"encoder.layers.{k}.module.{part}.weight" for k in range(3) for part in ("queries", "projection")]
    assert codes(check(dict.fromkeys(names, x))) == []
    wrapped = [name.replace("module", "_fsdp_wrapped_module") for name in names]
    assert codes(check(dict.fromkeys(wrapped, x))) == [("warning", "schema.prefix", wrapped[0])]


def test_lists_of_convolutions_have_no_holes():
    # The numbers between belong to activations: EnCodec in Bark, the subsampling of Canary, heads of PP-DocLayout.
    lists = {
        "encoder.layers": ("0.conv", "1.block.1.conv", "1.block.3.conv", "3.conv", "4.block.1.conv", "6.conv"),
        "encoder.subsampling.layers": ("0", "2", "3", "5", "6"),
        "scale_heads.2.layers": ("0.conv", "0.norm", "2.conv", "2.norm"),
    }
    names = [f"{stack}.{module}" for stack, modules in lists.items() for module in modules]
    x = np.float32([[1, 2], [3, 4]])
    assert codes(check({f"{name}.{part}": x for name in names for part in ("weight", "bias")})) == []


# ---- sizes, arrays, limits ----


def test_sizes():
    assert codes(check({})) == [("error", "model.empty", None)]
    # Of the models that transformers 5.24 builds, a tenth has scalars, but none as a weight.
    sound = {"bn.num_batches_tracked": np.array(7), "logit_scale": np.array(2.5, np.float32)}
    report = check({"e": np.zeros((0, 3)), "s.weight": np.array(7), "x": np.float32([1, 2]), **sound})
    assert codes(report) == [("warning", "tensor.empty", "e"), ("warning", "tensor.scalar", "s.weight")]
    assert report.ok


def test_one_array():
    x = np.float32([[1, 2, 3], [4, 5, 6]])
    report = check(x, shape=(2, 3))
    assert (codes(report), report.tensors, report.parameters) == ([], 1, 6)
    assert codes(check(x, shape=(None, 3))) == []
    report = check(x, shape=(3, None))
    assert codes(report) == [("error", "array.shape", "array")]
    assert report.errors[0].message == "has shape [2, 3], expected [3, ?]"
    assert codes(check(x, limits=(0, 5))) == [("warning", "value.range", "array")]
    quantized = safeload.quantize(x, "int8")
    assert codes(check(quantized, shape=(2, 3))) == []


def test_limits():
    x = {"w": np.float32([[-200, 300]])}
    assert codes(check(x)) == [("warning", "value.range", "w")]
    assert codes(check(x, limits=(-1000, 1000))) == []
    assert codes(check(x, limits={"low": -1000, "high": 1000, "parameters": 2})) == []
    report = check(x, limits={"high": 300, "low": -200, "parameters": 3})
    assert codes(report) == [("error", "model.parameters", None)]
    assert report.errors[0].message == "2 parameters, expected 3"
    assert codes(check({"n": np.array([[1000, 2]])})) == []  # integers have no range


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"limits": 5}, TypeError),
        ({"limits": {"top": 5}}, ValueError),
        ({"limits": (2, 1)}, ValueError),
        ({"limits": "ab"}, TypeError),
        ({"shape": (1,)}, ValueError),
        ({"schema": "lama"}, ValueError),
        ({"schema": {"name": "x"}}, ValueError),
        ({"config": "missing.json"}, FileNotFoundError),
    ],
)
def test_wrong_arguments(arguments, kind):
    with pytest.raises(kind):
        check({"w": np.ones(2)}, **arguments)
    with pytest.raises(TypeError):
        check(np.ones(2), shape="ab")


# ---- quantized tensors ----


def test_scales():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 64), np.float32)
    for scheme in ("q4_0", "q8_0"):
        good = safeload.quantize(x, scheme)
        assert codes(check({"w": good})) == []
        size = 18 if scheme == "q4_0" else 34
        bad = safeload.quantize(x, scheme)
        bad.data.reshape(-1, size)[5, :2].view("<f2")[...] = np.inf
        report = check({"w": bad})
        assert codes(report) == [("error", "quantization.scale", "w")]
        assert report.errors[0].message == (
            "1 of 8 blocks have a scale that is not finite, the first is block 5 with inf"
        )
    split = QuantizedTensor("iq1_m", (4, 256), np.full((4, 56), 0x31, np.uint8))
    assert codes(check({"w": split})) == []
    split.data[2].view("<u2")[-4:] = 0xCFFF, 0xBFFF, 0xCFFF, 0xFFFF  # the nibbles of 0xfcbc, a NaN
    report = check({"w": split})
    assert codes(report) == [("error", "quantization.scale", "w")]
    assert "1 of 4 blocks have a scale that is not finite, the first is block 2 with nan" in report.errors[0].message
    good = safeload.quantize(x, "int8", axis=0)
    assert codes(check({"w": good})) == []
    scale = good.scale.copy()
    scale[2] = np.nan
    report = check({"w": QuantizedTensor("int8", good.shape, good.data, scale, 0)})
    assert codes(report) == [("error", "quantization.scale", "w")]
    assert "scale 2 of axis 0 is nan" in report.errors[0].message
    report = check({"w": QuantizedTensor("int8", good.shape, good.data, -good.scale, 0)})
    assert codes(report) == [("error", "quantization.scale", "w")]


def test_expected_scales(tmp_path):
    x = np.float32([[-1.27, 0.5], [0.1, 1]])
    w = safeload.quantize(x, "int8")
    assert codes(check(w, limits={"absmax": np.abs(x).max()})) == []
    assert codes(check({"w": w}, limits={"scale": {"w": 0.01}})) == []
    report = check({"w": w}, limits={"scale": 0.02})
    assert codes(report) == [("error", "quantization.scale", "w")]
    assert "expected 0.02" in report.errors[0].message
    assert codes(check({"w": w}, limits={"absmax": {"w": 2}})) == [("error", "quantization.scale", "w")]
    assert codes(check({"w": w}, limits={"absmax": {"v": 2}})) == []
    save_file({"w": w}, tmp_path / "q.safetensors")
    assert codes(check(tmp_path / "q.safetensors", limits={"scale": 0.01})) == []
    assert codes(check(tmp_path / "q.safetensors", limits={"scale": 0.02})) != []


def test_a_quantized_llama(tmp_path):
    config, tensors = small("llama-tied")
    path = write_folder(tmp_path, config, tensors)
    for scheme in ("int8", "q4_0", "q8_0"):
        quantized = safeload.load_quantized(path, scheme)
        assert codes(check(quantized, config=config)) == []


# ---- files ----


@pytest.fixture
def folder(llama, tmp_path):
    return write_folder(tmp_path, *llama)


def test_a_wrong_total_size(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] += 1
    path.write_text(json.dumps(index))
    for source in (folder, path):
        report = check(source)
        assert codes(report) == [("warning", "index.total_size", None)]
        assert f"is {index['metadata']['total_size']}" in report.warnings[0].message
    del index["metadata"]
    path.write_text(json.dumps(index))
    assert codes(check(folder)) == []


def test_tensors_that_the_index_leaves_out(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][MATRIX]
    del index["metadata"]
    path.write_text(json.dumps(index))
    assert codes(check(folder, schema=None)) == [
        ("warning", "index.unlisted", MATRIX),
        ("warning", "layers.missing", MATRIX),
    ]


def test_a_missing_shard(folder):
    os.remove(folder / "model-00002-of-00002.safetensors")
    report = check(folder)
    assert codes(report) == [("error", "index.shard", None), ("note", "index.fetch", None)]
    assert "model-00002-of-00002.safetensors is missing" in report.errors[0].message


def test_a_missing_shard_without_an_index(llama, tmp_path):
    path = write_folder(tmp_path, *llama, shards=3)
    os.remove(path / "model.safetensors.index.json")
    assert codes(check(path)) == []
    os.remove(path / "model-00002-of-00003.safetensors")
    assert ("error", "index.shard", None) in codes(check(path))
    assert codes(check(path / "model-00001-of-00003.safetensors", schema=None))[:1] != [("error", "index.shard", None)]


@pytest.mark.parametrize("name", ["model-0000{}-of-000003", "model-0000{}-of-00003", "m-{}-of-3", "w-0{}-of-03"])
def test_shards_are_numbered_with_any_number_of_digits(name, tmp_path):
    for k in (1, 3):
        save_file({f"w{k}": np.float32([1, 2])}, tmp_path / f"{name.format(k)}.safetensors")
    report = check(tmp_path)
    assert codes(report) == [("error", "index.shard", None), ("note", "index.fetch", None)]
    assert report.errors[0].message == f"{name.format(2)}.safetensors is missing"
    assert "1 of 3 shards is missing or damaged; fetch again: " in report.notes[0].message


def test_files_that_cannot_be_opened(tmp_path, folder):
    path = tmp_path / "bad.safetensors"
    save_file({"w": np.ones(4)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    report = check(path)
    assert codes(report) == [("error", "file.format", None)]
    assert "end past the data" in report.errors[0].message
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert codes(check(path)) == [("error", "file.unsupported", None)]
    with pytest.raises(FileNotFoundError):
        check(tmp_path / "missing")
    (folder / "config.json").write_text("{")
    assert codes(check(folder)) == [("error", "file.format", None)]


def test_a_file_that_shrinks_while_it_is_read(folder):
    with safeload.open(folder) as opened:
        last = opened.files[-1]
        os.truncate(last, os.path.getsize(last) - 10)
        report = check(opened)
    assert [code for _, code, _ in codes(report)] == ["file.read"]
    assert last in report.errors[0].message


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_crc_of_a_torch_file(tmp_path):
    tensors = {name: tensor(Storage(name, np.float32([1, 2, 3, k]))) for k, name in enumerate("abc")}
    path = tmp_path / "x.pt"
    path.write_bytes(zip_file(tensors))
    assert codes(check(path)) == []
    offset = safeload.open(path).tensors["b"].offset
    flip(path, offset + 1)
    report = check(path)
    assert codes(report) == [("error", "file.crc", "b")]
    assert "data/b" in report.errors[0].message
    assert str(path) in report.errors[0].message


def test_crc_of_a_real_file(shared, tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes((shared / "torch" / "akiki-vad.pt").read_bytes())
    assert "file.crc" not in [code for _, code, _ in codes(check(path))]
    with safeload.open(path) as opened:
        info = list(opened.tensors.values())[-1]
    flip(path, info.offset)
    found = [f for f in check(path).errors if f.code == "file.crc"]
    assert [f.tensor for f in found] == [info.name]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() in found[0].message


def test_every_real_file_is_looked_at(shared):
    for path in sorted((shared / "safetensors").glob("*.safetensors")) + sorted((shared / "torch").glob("*.pt*")):
        if "lightning" in path.name or "gammas" in path.name or "classifii" in path.name:
            continue
        report = check(path)
        assert report.ok, f"{path}: {report}"
        json.dumps(report.to_json(), allow_nan=False)


# ---- the report ----


def test_the_report_as_json(llama):
    config, tensors = llama
    tensors[LAST][:] = np.nan
    value = json.loads(json.dumps(check(tensors, config=config).to_json(), allow_nan=False))
    assert value["ok"] is False
    assert value["errors"] == [
        {
            "severity": "error",
            "code": "value.nan",
            "tensor": LAST,
            "message": "64 of 64 values are NaN, the first at [0]",
        }
    ]
    assert value["stats"][LAST]["min"] is None
    assert value["stats"][LAST]["first_nan"] == [0]
    assert value["stats"][MATRIX]["count"] == 8192
    assert (value["tensors"], value["schema"]) == (30, "llama")


def test_the_report_as_text(llama, tmp_path, monkeypatch):
    config, tensors = llama
    tensors["bad\x1b[31m\nname"] = np.ones(2, np.float32)
    nan(tensors, config)
    lines = str(check(tensors, config=config)).split("\n")
    assert lines[:3] == [
        "dict: 31 tensors, 123,330 parameters, 241 KiB, schema llama",
        "2 errors",
        "",
    ]
    assert r"error    bad\x1b[31m\nname  schema.unexpected" in lines
    assert all(len(line) <= 80 for line in lines)
    assert repr(check({"w": np.ones(2)})) == "<CheckReport 'dict': no errors>"


def test_debug_lines(caplog):
    with caplog.at_level(logging.DEBUG, "safeload"):
        check({"w": np.ones(2)})
    assert "validate dict: schema None" in caplog.text


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_crc_of_npz(save, tmp_path):
    path = tmp_path / "x.npz"
    rng = np.random.default_rng(1)
    save(path, a=rng.standard_normal((20, 20)), b=rng.standard_normal((20, 20)))
    assert codes(check(path)) == []
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("b.npy")
    flip(path, info.header_offset + 30 + len("b.npy") + (1000 if save is np.savez else 500))
    report = check(path)
    if save is np.savez:
        assert codes(report) == [("error", "file.crc", "b")]
    else:  # numpy.savez_compressed: unpacked when it is opened
        assert not report.ok


def test_two_files_may_have_entries_of_the_same_name(tmp_path):
    for k in range(2):
        data = zip_file({f"w{k}": tensor(Storage("0", np.float32([1, 2, 3, k])))})
        (tmp_path / f"pytorch_model-0000{k + 1}-of-00002.bin").write_bytes(data)
    weight_map = {f"w{k}": f"pytorch_model-0000{k + 1}-of-00002.bin" for k in range(2)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert codes(check(tmp_path)) == []
    path = tmp_path / "pytorch_model-00001-of-00002.bin"
    flip(path, safeload.open(tmp_path).tensors["w0"].offset)
    assert codes(check(tmp_path)) == [("error", "file.crc", "w0")]


# ---- without values ----


def test_structure_only(llama, tmp_path):
    config, tensors = llama
    tensors[LAST][:] = np.nan
    path = write_folder(tmp_path, config, tensors)
    report = check(path, values=False)
    assert report.verdict == "no errors"
    assert (report.stats, report.to_json()["values"]) == ({}, False)
    assert check(path).verdict == "1 error"
    tensors[LAST] = np.ones(3, np.float32)
    report = check(write_folder(tmp_path, config, tensors), values=False)
    assert codes(report)[0] == ("error", "schema.shape", LAST)


# ---- files that were never written to their end ----

holes = pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="the system does not tell of holes")


def weights(rows, names=("a.weight", "b.weight", "c.weight", "d.weight")):
    """Matrices of rows x 1024 F32, none of them zero."""
    return {name: np.resize(np.float32([1, 2, k + 3]), (rows, 1024)) for k, name in enumerate(names)}


def end_is_hole(path, keep):
    """What a downloader leaves that sets the size of its file first and then stops."""
    size = path.stat().st_size
    os.truncate(path, keep)
    os.truncate(path, size)
    with path.open("rb") as file:
        try:
            data = os.lseek(file.fileno(), size - 1, os.SEEK_DATA)
        except OSError:
            return size - keep
    pytest.skip(f"the file system has no holes: data at {data}")


def end_is_zero(path, keep):
    """Likewise, the rest written as zeros."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(keep)
        file.write(bytes(size - keep))


def hole_of(report):
    assert [f.code for f in report.errors] == ["file.hole"], report
    assert not [f for f in report.warnings if f.code == "value.zero"]
    return report.errors[0].message


def save_gguf(tensors, path):
    from safeload import gguf

    gguf.save_file(tensors, path)


@holes
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize(
    ("save", "suffix"), [(save_file, "safetensors"), (save_gguf, "gguf")], ids=["safetensors", "gguf"]
)
def test_a_file_whose_end_is_a_hole(save, suffix, values, tmp_path):
    path = tmp_path / f"x.{suffix}"
    save(weights(64), path)
    assert codes(check(path, schema=None)) == []
    end_is_hole(path, path.stat().st_size // 2 - 4096)
    message = hole_of(check(path, values=values))
    assert "zero, a hole that was never written" in message or "of them never written" in message
    assert "2 tensors are all zero, the first is 'c" in message
    assert message.endswith("; was the download finished?")
    assert main(["check", str(path), *([] if values else ["--structure"])]) == 1


@pytest.mark.parametrize(
    ("save", "suffix"), [(save_file, "safetensors"), (save_gguf, "gguf")], ids=["safetensors", "gguf"]
)
def test_a_file_whose_end_is_zero(save, suffix, tmp_path):
    path = tmp_path / f"x.{suffix}"
    save(weights(256), path)
    end_is_zero(path, path.stat().st_size - (2 << 20))
    report = check(path)
    message = hole_of(report)
    assert codes(report)[0] == ("error", "file.hole", None)
    assert report.verdict == "1 error"
    assert "2,097,152 bytes to the end of the file are zero: 2 tensors are all zero, the first is 'c.weight'" in message
    assert report.to_json()["errors"][0]["code"] == "file.hole"
    assert main(["check", str(path)]) == 1
    assert main(["check", str(path), "--structure"]) == 0  # nothing is read, and it is no hole


def test_quantized_tensors_at_a_zero_end(tmp_path):
    for scheme in ("int8", "q8_0"):
        quantized = {name: safeload.quantize(x, scheme) for name, x in weights(1024).items()}
        path = tmp_path / f"{scheme}.{'safetensors' if scheme == 'int8' else 'gguf'}"
        (save_file if scheme == "int8" else save_gguf)(quantized, path)
        assert codes(check(path, schema=None)) == []
        end_is_zero(path, path.stat().st_size - (9 << 18))
        assert "2 tensors are all zero, the first is 'c.weight'" in hole_of(check(path))


def test_every_shard_is_looked_at(tmp_path):
    weight_map = {}
    for k in range(1, 4):
        shard = weights(512, (f"layers.{k - 1}.a", f"layers.{k - 1}.b"))
        path = tmp_path / f"model-0000{k}-of-00003.safetensors"
        save_file(shard, path)
        weight_map |= dict.fromkeys(shard, path.name)
        if k != 1:
            end_is_zero(path, path.stat().st_size - (4 << 20))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    report = check(tmp_path)
    assert [f.code for f in report.errors] == ["file.hole"] * 2
    assert report.errors[0].message.startswith("model-00002-of-00003.safetensors: 4,194,304 bytes")
    assert "2 tensors are all zero, the first is 'layers.1.a'" in report.errors[0].message


@pytest.mark.parametrize(
    "zero",
    [
        ("y.bias", "z.bias"),
        ("base_model.model.y.lora_B.weight", "base_model.model.z.lora_B.default.weight"),
        ("y.lora_up.weight", "z.lora_linear_layer.up.weight"),
        ("y.running_mean", "z.num_batches_tracked"),
        ("y.attn.masked_bias", "z.beta"),
        ("z.weight",),  # a padded embedding, or a matrix that is zero
    ],
    ids=lambda names: names[0],
)
def test_zeros_at_the_end_that_are_meant_so(zero, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({**weights(64, ("a.weight",)), **{name: np.zeros((512, 1024), np.float32) for name in zero}}, path)
    for values in (True, False):
        report = check(path, values=values)
        assert report.ok
        assert "file.hole" not in [code for _, code, _ in codes(report)]


def test_short_ends_of_zeros(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({**weights(64), "y.weight": np.zeros((8, 8), np.float32), "z.weight": np.zeros((8, 8), np.float32)}, path)
    assert [code for _, code, _ in codes(check(path))] == ["value.zero"] * 2
    embedding = weights(4096)["a.weight"]
    embedding[1024:] = 0
    save_file({"a.weight": weights(8)["a.weight"], "embed_tokens.weight": embedding}, path)
    assert codes(check(path)) == []
    save_file({}, path)
    assert codes(check(path)) == [("error", "model.empty", None)]
    save_file({"e": np.zeros((0, 4), np.float32)}, path)
    assert codes(check(path)) == [("warning", "tensor.empty", "e")]


@holes
def test_a_hole_in_the_only_tensor(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(weights(512, ("w",)), path)
    end_is_hole(path, 1 << 20)
    assert "beginning inside 'w'" in hole_of(check(path))
    assert "beginning inside 'w'" in hole_of(check(path, values=False))


@holes
def test_a_block_of_a_large_tensor_that_a_writer_left_out(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(weights(4096, ("w",)), path)
    end_is_hole(path, path.stat().st_size - 8192)
    assert codes(check(path, values=False)) == [("warning", "file.hole", None)]


def test_formats_that_do_not_open_without_their_end(tmp_path):
    from safeload import moon

    tensors = {name: x.astype(np.float16) for name, x in weights(64, ("a", "b", "c")).items()}
    moon.save_file(tensors, tmp_path / "x.moon")
    np.savez(tmp_path / "x.npz", **tensors)
    parts = {name: tensor(Storage(name, np.float32([1, 2] * 5000))) for name in tensors}
    (tmp_path / "x.pt").write_bytes(zip_file(parts))
    for path in sorted(tmp_path.iterdir()):
        end_is_zero(path, path.stat().st_size // 2)
        for values in (True, False):
            assert codes(check(path, values=values)) == [("error", "file.format", None)], path


def test_zeros_in_an_archive_have_a_checksum(tmp_path):
    zero = np.zeros((512, 1024), np.float32)
    path = tmp_path / "x.pt"
    path.write_bytes(zip_file({"a": tensor(Storage("0", zero)), "b": tensor(Storage("1", zero))}))
    assert "file.hole" not in [code for _, code, _ in codes(check(path))]
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", a=zero, b=zero)
        assert "file.hole" not in [code for _, code, _ in codes(check(tmp_path / "x.npz"))]


@holes
def test_an_array_that_we_have_unpacked_ourselves(tmp_path, monkeypatch):
    """A file system that stores zeros as holes does so with the unpacked file too."""
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros((512, 1024), np.float32))
    monkeypatch.setattr(inside.validated_zeros, "hole_begin", lambda file: 1000)
    assert check(tmp_path / "x.npz", values=False).ok


def test_the_zeros_are_found_wherever_they_begin(tmp_path):
    path = tmp_path / "x.safetensors"
    piece = 4 << 20
    for count in (1, 4095, 65536, 65537, piece, piece + 65536, piece + 65537, 3 * piece):
        data = np.ones(3 * piece, np.uint8)
        data[len(data) - count :] = 0
        save_file({"w": data}, path)
        with safeload.open(path) as opened:
            file = opened.weight_files[0]
            assert inside.validated_zeros.zeros_end(file, file.size, file.size - data.size) == file.size - count


# ---- quantized weights of other libraries ----


def codes_of(family, module, rows, columns):
    """The tensors that a family of quantized checkpoints has in place of a matrix."""
    scale = np.full((rows, columns // 32), 0.1, ml_dtypes.bfloat16)
    words = np.ones((columns // 8, rows), np.int32)
    weight = f"{module}.weight"
    if family == "fp8":
        values = np.resize(np.float32([-416, 448, 3, 1]), (rows, columns)).astype(ml_dtypes.float8_e4m3fn)
        return {weight: values, f"{weight}_scale_inv": np.full((1, 1), 1e-4, np.float32)}
    if family in ("gptq", "awq"):
        more = {f"{module}.g_idx": np.zeros(columns, np.int32)} if family == "gptq" else {}
        across = np.ones((columns, rows // 8), np.int32)
        parts = {"qweight": words if family == "gptq" else across, "qzeros": 0 * across[:4]}
        parts["scales"] = np.full((4, rows), 500, np.float16)
        return {**{f"{module}.{part}": x for part, x in parts.items()}, **more}
    if family == "compressed-tensors":
        shape = np.array([rows, columns])
        parts = {"packed": words.T, "scale": scale, "shape": shape, "global_scale": np.float32([3000])}
        return {f"{weight}_{part}": x for part, x in parts.items()}
    if family == "bitsandbytes":
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
        parts = {
            "absmax": np.full(rows * columns // 64, 0.1, np.float32),
            "quant_map": np.linspace(-1, 1, 16, dtype=np.float32),
            "quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
        }
        return {weight: np.ones((rows * columns // 2, 1), np.uint8), **{f"{weight}.{p}": x for p, x in parts.items()}}
    if family == "bitnet":
        return {weight: np.ones((rows // 4, columns), np.uint8), f"{weight}_scale": np.ones(1, np.float32)}
    parts = {"weight": words.T.astype(np.uint32), "scales": scale, "biases": scale * 5000}
    return {f"{module}.{part}": x for part, x in parts.items()}


FAMILIES = {
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "awq": {"text_config": {"quantization_config": {"quant_method": "awq"}}},
    "compressed-tensors": {"compression_config": {"quant_method": "compressed-tensors"}},
    "bitsandbytes": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "bitnet": {"quantization_config": {"quant_method": "bitnet"}},
    "mlx": {"quantization": {"group_size": 32, "bits": 4}},
}


# Those whose packed weights safeload.open dequantizes.
DEQUANTIZED = ("fp8", "gptq", "awq", "bitsandbytes", "bitnet", "mlx")


def packed(family, kind="llama-gqa"):
    config, tensors = small(kind)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        tensors |= codes_of(family, name.removesuffix(".weight"), *tensors.pop(name).shape)
    return {**config, **FAMILIES[family]}, tensors


@pytest.mark.parametrize(("family", "kind"), dealt(FAMILIES, ["llama-gqa", "qwen2", "gemma2", "phi3"]))
def test_quantized_weights_are_said_not_to_be_checked(family, kind, tmp_path, capsys):
    config, tensors = packed(family, kind)
    report = check(tensors, config=config)
    assert codes(report) == [("note", "quantization.unchecked", None)]
    assert report.ok
    assert f" {family}: names, shapes and values of quantized weights were not checked" in report.notes[0].message
    assert report.verdict == "no errors"
    assert "quantization.unchecked" in str(report)
    assert report.to_json()["notes"] == [report.notes[0]._asdict()]
    path = write_folder(tmp_path, config, tensors)
    if family in DEQUANTIZED:  # in files they are what they mean, and are checked like any other
        assert main(["check", str(path), "--structure"]) == 0
        out = capsys.readouterr().out
        assert "quantization.unchecked" not in out
        assert f"checked: {len(safeload.open(path))} names and shapes against schema" in out
        return
    assert main(["check", str(path), "--strict"]) == 0
    assert "note     file  quantization.unchecked" in capsys.readouterr().out
    assert main(["check", str(path), "--structure", "--stored"]) == 0
    assert "names and shapes of quantized weights" in capsys.readouterr().out.replace("\n         ", " ")


@pytest.mark.parametrize(("family", "kind"), dealt(DEQUANTIZED, ["llama-gqa", "qwen2", "gemma2", "phi3"]))
def test_packed_weights_of_a_folder_are_checked(family, kind, tmp_path, capsys):
    config, tensors = packed(family, kind)
    path = write_folder(tmp_path, config, tensors)
    report = check(path, limits=(-1e9, 1e9))
    assert (codes(report), report.verdict) == ([], "no errors")
    assert report.stats.keys() == small(kind)[1].keys()
    assert main(["check", str(path)]) == 0
    assert "quantization.unchecked" not in capsys.readouterr().out


def test_biases_that_the_writer_of_gptq_adds(tmp_path):
    config, tensors = packed("gptq")
    bias = "model.layers.0.mlp.up_proj.bias"
    tensors[bias] = np.zeros(128, np.float16)
    found = check(write_folder(tmp_path, config, tensors), limits=(-1e9, 1e9))
    assert codes(found) == [("warning", "schema.unexpected", bias)]
    assert "AutoGPTQ stores zeros there" in found.warnings[0].message


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_quantized_is_checked_all_the_same(family):
    config, tensors = packed(family)
    tensors["model.layers.1.input_layernorm.weight"] = np.ones(3, np.float32)
    tensors[LAST] = np.full(64, np.nan, np.float32)
    del tensors["lm_head.weight"]
    found = [(f.code, f.tensor) for f in check(tensors, config=config).errors]
    assert found == [
        ("schema.missing", "lm_head.weight"),
        ("schema.shape", "model.layers.1.input_layernorm.weight"),
        ("value.nan", LAST),
    ]
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]
    assert ("error", "schema.layer_missing", "model.layers.1") in codes(check(tensors, config=config))


def test_quantized_weights_that_no_schema_knows():
    for family, more in FAMILIES.items():
        _, tensors = packed(family)
        report = check(tensors, config={"model_type": "unknown", **more})
        assert codes(report) == [("note", "quantization.unchecked", None)], family


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_weights_that_the_config_does_not_tell_of(family):
    """The first GPTQ and modelopt folders said it in a file beside config.json."""
    config, tensors = packed(family)
    for key in FAMILIES[family]:
        del config[key]
    report = check(tensors, config=config)
    assert codes(report) == [("note", "quantization.unchecked", None)]
    assert report.notes[0].message.startswith("codes with separate scales: names, shapes and values")


def test_a_scale_in_a_shard_that_is_not_open_is_not_counted(tmp_path):
    parts = {"m.weight": np.ones((4, 4), ml_dtypes.float8_e4m3fn), "m.weight_scale_inv": np.ones((1, 1), np.float32)}
    names = {name: f"model-0000{k}-of-00002.safetensors" for k, name in enumerate(parts, 1)}
    for name, array in parts.items():
        save_file({name: array}, tmp_path / names[name])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    [note] = check(tmp_path / names["m.weight"]).notes
    assert note.message.endswith("were not checked (1 tensor)")


def test_integers_beside_a_scale_are_codes():
    """No schema, no config; beside a scale that cannot be theirs they are what they are."""
    w = {"m.weight": np.int8([[1, 2]]), "m.weight_scale": np.float32([500])}
    assert codes(check(w)) == [("note", "quantization.unchecked", None)]
    w = {"m.weight": np.int8([[1, 2]]), "m.weight_scale": np.full((40, 3), 500, np.float32)}
    assert [code for _, code, _ in codes(check(w))] == ["value.range", "value.constant"]


def test_what_else_is_beside_quantized_weights():
    config, tensors = packed("gptq")
    tensors |= {"model.rotation": np.float32([1, 2]), "score.weight": np.float32([1, 2])}
    report = check(tensors, config=config)
    assert report.ok
    assert [(f.code, f.tensor) for f in report.notes[1:]] == [
        ("head.unchecked", "score.weight"),
        ("schema.unchecked", "model.rotation"),
    ]
    inner = {key: value for key, value in config.items() if key != "architectures"} | {"model_type": "llama"}
    outer = {"model_type": "some", "text_config": inner}
    report = check({f"language_model.{name}": x for name, x in tensors.items()}, config=outer)
    assert report.ok
    assert "quantization_config gptq" in report.notes[0].message
    assert {f.code for f in report.notes} == {"quantization.unchecked", "schema.unchecked"}


def test_quantized_weights_under_names_of_no_schema():
    config, _ = small("llama-gqa")
    tensors = {f"some.{k}.q_weight": np.ones((2, 2), np.int32) for k in range(50)}
    tensors |= {f"else.{k}.table": np.ones(2, np.float32) for k in range(500)}
    config["quantization_config"] = {"quant_method": "exl3"}
    report = check(tensors, config=config)
    assert report.ok
    assert [f.code for f in report.notes] == ["quantization.unchecked", "schema.unchecked"]
    del config["quantization_config"]
    assert codes(check(tensors, config=config))[0][1] == "schema.names"


def test_fp8_codes_without_a_config():
    w = codes_of("fp8", "m", 64, 64)
    assert codes(check(w)) == [("note", "quantization.unchecked", None)]
    w.pop("m.weight_scale_inv")
    assert codes(check(w)) == [("warning", "value.range", "m.weight")]
    w |= {"m.weight_scale": np.float32([np.inf])}
    assert codes(check(w))[0] == ("error", "value.inf", "m.weight_scale")


def test_a_config_that_says_quantized_of_what_is_not(llama):
    config, tensors = llama
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert codes(check(tensors, config=config)) == []
    for odd in (None, [], {}, "gptq", 4, {"quant_method": ["x"]}):
        config["quantization_config"] = odd
        assert codes(check(tensors, config=config)) == []


# ---- models with other heads, and models in models ----

HEADS = {
    "ForProcessRewardModel": ("score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias"),
    "ForRewardModel": ("v_head.summary.weight",),
    "Model": (),
}
CLASSES = {
    "llama-gqa": ("llama", "Llama"),
    "mistral": ("mistral", "Mistral"),
    "qwen2": ("qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3"),
    "gemma2": ("gemma2", "Gemma2"),
    "phi3": ("phi3", "Phi3"),
    "gpt2": ("gpt2", "GPT2"),
    "bert": ("bert", "Bert"),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", CLASSES)
def test_a_model_with_another_head(kind, head):
    model_type, family = CLASSES[kind]
    config, whole = small(kind)
    config["architectures"] = [family + head]
    extra = {name: np.float32([[1, 2]] * 3) for name in HEADS[head]}
    base = {name: x for name, x in whole.items() if not name.startswith(("lm_head.", "cls."))}
    for tensors in (base, {re.sub(r"^(model|transformer|bert)\.", "", name): x for name, x in base.items()}):
        for more in ({"model_type": model_type}, {}):
            report = check({**tensors, **extra}, config={**config, **more})
            assert report.schema == model_type
            assert report.ok
            assert not report.warnings
            assert [f.code for f in report.notes] == ["head.unchecked"] * bool(extra)
            if extra:
                assert f"architecture {family}{head}: head" in report.notes[0].message
                assert f"{next(iter(extra))!r}" in report.notes[0].message
    name = next(name for name in base if ".1." in name)
    broken = {key: x for key, x in base.items() if key != name}
    assert ("error", "schema.missing", name) in codes(check({**broken, **extra}, config=config))


@pytest.mark.parametrize(
    ("kind", "class_name", "added"),
    [
        ("bert", "BertModel", "bert.encoder.layer.{}.crossattention.self.query.weight"),
        ("gpt2", "GPT2LMHeadModel", "transformer.h.{}.ln_cross_attn.weight"),
    ],
)
def test_a_decoder_with_cross_attention(kind, class_name, added):
    config, tensors = small(kind)
    config["architectures"] = [class_name]
    whole = {**config, "add_cross_attention": True}
    wanted = BUILT_IN_SCHEMAS[kind].expand(whole, tensors)
    crossing = [one for one in wanted.values() if one.required and "cross" in one.name]
    rng = np.random.default_rng(5)
    tensors |= {one.name: rng.standard_normal(one.shape, np.float32) for one in crossing}
    assert codes(check(tensors, config=whole)) == []
    report = check(tensors, config=config)
    assert codes(report) == [("error", "schema.unexpected", one.name) for one in crossing]
    assert report.errors[0].message == "is present, but add_cross_attention in the config excludes it"
    for k in range(3):
        del tensors[added.format(k)]
    report = check(tensors, config=whole)
    assert codes(report) == [("error", "schema.missing", added.format(0))]
    assert report.errors[0].message == "is missing in each of the 3 layers"


def test_heads_beside_a_whole_model(llama):
    config, tensors = llama
    heads = ("v_head.summary.weight", "lm_head.bias", "reward_head.weight", "medusa_head.0.linear.weight", "score.bias")
    tensors |= {name: np.float32([1, 2]) for name in heads}
    report = check(tensors, config=config)
    assert codes(report) == [("note", "head.unchecked", heads[0])]
    assert report.notes[0].message.endswith("and 1 more were not checked")
    tensors["ahead.weight"] = np.float32([1, 2])
    assert codes(check(tensors, config=config))[0] == ("error", "schema.unexpected", "ahead.weight")


PLACES = [
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
    ("language_model.", ""),
    ("model.language_model.model.", "model.language_model."),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[0])
@pytest.mark.parametrize("kind", ["llama-gqa", "mistral", "qwen2", "gemma3"])
def test_a_language_model_in_a_model(kind, place, tmp_path):
    config, whole = small(kind)
    del config["architectures"]
    config["model_type"] = {"llama-gqa": "llama", "gemma3": "gemma3_text"}.get(kind, kind)
    tensors = {
        place[0] + name.removeprefix("model.") if name.startswith("model.") else place[1] + name: x
        for name, x in whole.items()
    }
    others = ["multi_modal_projector.linear_1.weight", "vision_tower.encoder.layers.0.fc.weight"]
    tensors |= {name: np.float32([[1, 2]]) for name in others}
    outer = {
        "architectures": ["SomeForConditionalGeneration"],
        "model_type": "some",
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 3},
        "text_config": config,
    }
    report = check(write_folder(tmp_path, outer, tensors))
    assert codes(report) == [("note", "schema.unchecked", others[0])]
    assert "only the part under text_config was checked" in report.notes[0].message
    assert "2 other tensors were not" in report.notes[0].message
    assert report.compared == len(tensors) - 2
    lost = place[0] + "layers.1.mlp.down_proj.weight"
    assert codes(check({n: x for n, x in tensors.items() if n != lost}, config=outer))[0][1:] == (
        "schema.missing",
        lost,
    )
    del config["hidden_size"]
    report = check(tensors, config=outer)
    assert codes(report) == [("note", "schema.unchecked", None)]
    assert "'hidden_size' is required" in report.notes[0].message
    assert codes(check(tensors, config={**outer, "text_config": {"model_type": "unknown"}})) == []
    deep = {"model_type": "some", "thinker_config": {"text_config": config | {"hidden_size": 64}}}
    assert codes(check(tensors, config=deep)) == [("note", "schema.unchecked", others[0])]


def test_a_tensor_of_the_whole_model_under_the_name_of_a_head():
    # Sam 3 projects texts once more than its text encoder, whose class the config does not name.
    config, whole = small("clip_text")
    config = {key: value for key, value in {**config, "projection_dim": 4}.items() if key != "architectures"}
    outer = {"architectures": ["SomeModel"], "model_type": "some", "text_config": config}
    tensors = {f"text_encoder.{name}": x for name, x in whole.items()}
    values = np.arange(5 * config["hidden_size"], dtype=np.float32).reshape(5, -1) / 1000
    tensors |= {"text_encoder.text_projection.weight": values[:4], "text_projection.weight": values[:3]}
    report = check(tensors, config=outer)
    assert codes(report) == [("note", "schema.unchecked", "text_projection.weight")]
    report = check({**tensors, "text_encoder.text_projection.weight": values}, config=outer)
    assert codes(report)[0] == ("error", "schema.shape", "text_encoder.text_projection.weight")


def test_a_model_under_other_names(llama):
    config, whole = llama
    for prefix in ("module.model.", "_orig_mod.model.", "language_model.model."):
        outer = prefix.removesuffix("model.")
        tensors = {outer + name: x for name, x in whole.items()}
        report = check(tensors, config=config)
        assert codes(report) == [("warning", "schema.prefix", f"{outer}model.embed_tokens.weight")]
        del tensors[f"{outer}lm_head.weight"]
        assert codes(check(tensors, config=config))[0] == ("error", "schema.missing", "lm_head.weight")


# ---- norms, numbers, what was looked at ----


def test_norms_reach_further_than_weights(tmp_path):
    config, tensors = small("gemma2")
    norm = "model.layers.1.post_feedforward_layernorm.weight"
    tensors[norm][3] = 600
    path = write_folder(tmp_path, config, tensors)
    assert codes(check(path)) == []
    assert codes(check(tensors)) == []  # by their names
    assert main(["check", str(path), "--strict"]) == 0
    assert main(["check", str(path), "--strict", "--range", "-100", "100"]) == 1
    assert codes(check(path, limits=(-100, 100))) == [("warning", "value.range", norm)]
    assert codes(check(path, limits={"norm": 500})) == [("warning", "value.range", norm)]
    tensors[norm][3] = 5000
    report = check(tensors, config=config)
    assert codes(report) == [("warning", "value.range", norm)]
    assert "to 4992, outside [-4096, 4096]" in report.warnings[0].message
    with pytest.raises(ValueError, match="norm must be >= 0, got -1"):
        check(tensors, limits={"norm": -1})


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("model.norm.weight", True),
        ("blk.3.attn_norm.weight", True),
        ("h.0.ln_1.weight", True),
        ("ln_f.weight", True),
        ("encoder.LayerNorm.gamma", True),
        ("layers.0.q_norm.weight", True),
        ("layers.0.norm1.weight", True),
        ("layers.0.input_layernorm.weight", True),
        ("layers.0.normal.weight", False),
        ("layers.0.fc.weight", False),
        ("link.weight", False),
    ],
)
def test_norms_by_their_names(name, norm):
    assert codes(check({name: np.float32([1, 300])})) == ([] if norm else [("warning", "value.range", name)])
    matrix = np.float32([[1, 300], [1, 2]])
    assert codes(check({name: matrix})) == [("warning", "value.range", name)]


def test_long_names(llama):
    config, tensors = llama
    for piece in ("_", ".", "norm_", "a.weight.", "lora_b", "1.", "layers.1.", "head_", "scale."):
        name = piece * (100_000 // len(piece)) + "!"
        for more in ({}, FAMILIES["gptq"]):
            report = check({**tensors, name: np.float32([1, 300])}, config={**config, **more})
            assert report.seconds < 2
        for count in (1, 3):
            assert check({f"{k}{name}": np.float32([1, 2]) for k in range(count)}).seconds < 2


def test_layers_of_many_digits(llama):
    config, tensors = llama
    far = 10**10
    tensors |= {name.replace("layers.2", f"layers.{far}"): x for name, x in tensors.items() if "layers.2" in name}
    report = check(tensors, config=config)
    assert codes(report) == [("error", "schema.layer_extra", f"model.layers.{far}")]
    assert codes(check(tensors, schema=None)) == [("warning", "layers.far", f"model.layers.{far}")]
    huge = "9" * 4300
    tensors = {f"layers.{k}.{part}": np.float32([1, 2]) for k in (0, 1, 2, huge) for part in "ab"}
    assert codes(check(tensors)) == [("warning", "layers.far", f"layers.{huge}")]
    check({name.replace(huge, "9" * 5000): x for name, x in tensors.items()})  # longer than Python makes numbers of


def test_what_was_looked_at(llama, tmp_path, capsys):
    config, tensors = llama
    path = write_folder(tmp_path, config, tensors)
    report = check(path)
    assert (report.compared, report.checked) == (30, "30 names and shapes against schema llama, 123,328 values")
    assert report.to_json()["checked"] == report.checked
    assert 0 < report.seconds == report.to_json()["seconds"]
    assert check(path, values=False).checked == "30 names and shapes against schema llama, no values"
    assert check(path, schema=None).checked == "30 names, 123,328 values"
    assert check({"w": np.zeros((1, 1))}).checked == "1 name, 1 value"
    assert check({}).checked == "0 names, 0 values"
    assert check({"w": np.zeros(42_100_000, np.int8)}).checked == "1 name, 42.1 M values"
    assert main(["check", str(path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"checked: 30 names and shapes against schema llama, 123,328 values, \d+\.\d s", last)
    (path / "model-00001-of-00002.safetensors").write_bytes(b"bad")
    assert main(["check", str(path)]) == 1
    # Those of the other shard.
    assert "checked: 15 names and shapes against schema llama, 49,408 values" in capsys.readouterr().out


def test_a_schema_that_nothing_was_compared_with_is_not_said_to_be_checked(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors")
    report = check(tmp_path)
    assert (report.schema, report.checked) == ("llama", "1 name, 4 values")


# ---- findings that say the same ----


def values_in(names, value=300.0):
    return {name: np.full((2, 3), value, np.float32) + np.arange(3, dtype=np.float32) for name in names}


def test_findings_that_say_the_same_of_several_kinds_are_shown_as_one():
    kinds = ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj")
    report = safeload.check(values_in(f"model.layers.{k}.{kind}.weight" for k in range(3) for kind in kinds))
    assert len(report.warnings) == len(report.to_json()["warnings"]) == 9
    lines = report.lines(1000)
    assert [line.split() for line in lines if line.startswith("warning")] == [
        ["warning", "model.layers.0.mlp.up_proj.weight", "value.range"]
    ]
    assert lines[-1].endswith(
        "outside [-128, 128]; and 8 more like it: model.layers.{}.mlp.down_proj.weight, "
        "model.layers.{}.self_attn.q_proj.weight, model.layers.{}.mlp.up_proj.weight"
    )


def test_single_tensors_that_say_the_same_are_named_up_to_a_limit():
    report = safeload.check(values_in(["first", "x" * 300, *"abcdefghijkl"]))
    tail = report.lines(1000)[-1].partition("like it: ")[2]
    assert re.fullmatch(r"x{49}…x{50}, a, b, c, d, e, f, g and 5 other names", tail)


def test_layers_that_say_the_same_of_one_kind_are_only_counted():
    report = safeload.check(values_in(f"h.{k}.w" for k in range(5)))
    assert report.lines(1000)[-1].endswith("; and 4 more like it")


def test_three_findings_and_different_messages_are_shown_one_by_one():
    assert str(safeload.check(values_in("abc"))).count("value.range") == 3
    mixed = values_in("abc") | {name: np.full((2, 2), np.nan, np.float32) for name in "de"}
    text = str(safeload.check(mixed))
    assert (text.count("value.range"), text.count("value.nan")) == (3, 2)


def test_whole_numbers_and_others_say_the_same():
    report = safeload.check(
        {name: np.float32([[-top, top]]) for name, top in zip("abcd", (300, 300.5, 1e9, 2e3), strict=True)}
    )
    assert str(report).count("value.range") == 1


def test_one_value_and_several_say_the_same():
    bad = {name: np.float32([[np.nan] * (1 + k), [1.0] * (1 + k)]) for k, name in enumerate("abcd")}
    text = str(safeload.check(bad))
    assert "1 of 2 values is NaN, the first at [0, 0]; and 3 more like it: b, c, d" in " ".join(text.split())
