import json
import logging
import os
import zipfile

import ml_dtypes
import numpy as np
import pytest
from models import SMALL, small, write_folder
from torch_build import Storage, tensor, zip_file

import safeload
from safeload import QuantizedTensor, validate
from safeload.numpy import save_file


def codes(report):
    return [(f.severity, f.code, f.tensor) for f in (*report.errors, *report.warnings)]


# ---- whole models ----


@pytest.mark.parametrize("kind", SMALL)
def test_a_small_model_of_each_schema_passes(kind, tmp_path):
    config, tensors = small(kind)
    schema = SMALL[kind][0]
    report = validate(tensors, config=config, schema=schema)
    assert codes(report) == []
    assert report.ok
    assert report.schema == schema
    assert report.parameters == sum(x.size for x in tensors.values())
    assert report.nbytes == sum(x.nbytes for x in tensors.values())
    assert report.stats.keys() == tensors.keys()
    if schema == "moondream2":
        return
    path = write_folder(tmp_path, config, tensors)
    report = validate(path)
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
    tensors[LAST][7] = 500


def mixed(tensors, config):
    tensors[MATRIX] = tensors[MATRIX].astype(np.float32)


def untied(tensors, config):
    config["tie_word_embeddings"] = True


def no_key(tensors, config):
    del config["hidden_size"]


def other_dtype(tensors, config):
    config["torch_dtype"] = "float16"


FAULTS = [
    (lose_layer, "error", "schema.layer_missing", "model.layers.1", "layer 1 of 3 is missing, all its 9 tensors"),
    (lose_tensor, "error", "schema.missing", MATRIX, "is missing"),
    (
        lose_everywhere,
        "error",
        "schema.missing",
        "model.layers.0.mlp.up_proj.weight",
        "is missing, and so in each of the 3 layers",
    ),
    (lose_head, "error", "schema.missing", "lm_head.weight", "is missing"),
    (
        wrong_gqa,
        "error",
        "schema.shape",
        KEY,
        "has shape [64, 64], but [num_key_value_heads * head_dim, hidden_size] is [32, 64] by the config",
    ),
    (extra, "error", "schema.unexpected", "model.layers.0.self_attn.rotary.weight", "is no tensor of schema llama"),
    (extra_layer, "error", "schema.layer_extra", "model.layers.3", "layer 3 with 9 tensors is beyond the 3 layers"),
    (bias, "error", "schema.unexpected", "model.layers.0.self_attn.q_proj.bias", "attention_bias in the config says"),
    (no_key, "error", "schema.config", None, "schema llama: 'hidden_size' is needed, but config.json has no such key"),
    (nan, "error", "value.nan", LAST, "1 of 64 values is NaN, the first at [63]"),
    (infinity, "error", "value.inf", MATRIX, "1 of 8,192 values is infinite, the first at [3, 5]"),
    (zeros, "warning", "value.zero", MATRIX, "all 8,192 values of the matrix are 0"),
    (constant, "warning", "value.constant", MATRIX, "all 8,192 values of the matrix are 0.5"),
    (large, "warning", "value.range", LAST, "to 500, outside [-128, 128]"),
    (mixed, "warning", "dtype.mixed", MATRIX, "is float32, but in 2 of 3 layers it is bfloat16"),
    (untied, "warning", "head.tied", "lm_head.weight", "differs from 'model.embed_tokens.weight' from [0, 0] on"),
    (other_dtype, "warning", "dtype.config", None, "config.json says float16, but no tensor is; 30 of 30 are bfloat16"),
]


@pytest.mark.parametrize(("fault", "severity", "code", "name", "message"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_each_fault_is_reported_as_exactly_that(fault, severity, code, name, message, llama, tmp_path):
    config, tensors = llama
    fault(tensors, config)
    for source in (tensors, write_folder(tmp_path, config, tensors)):
        report = validate(source, config=config if source is tensors else None, schema="auto")
        if source is tensors:
            report = validate(source, config=config, schema="llama")
        assert codes(report) == [(severity, code, name)]
        found = (report.errors or report.warnings)[0]
        assert message in found.message
        assert report.ok == (severity == "warning") == bool(report)
        assert code in str(report)
        assert str(name or "file") in str(report)


def test_the_last_value_of_the_last_shard(llama, tmp_path):
    config, tensors = llama
    last = max(tensors)
    tensors[last][-1] = np.nan
    path = write_folder(tmp_path, config, tensors, shards=3)
    assert codes(validate(path)) == [("error", "value.nan", last)]


def test_many_findings_of_a_kind_are_shown_once(llama):
    config, tensors = llama
    report = validate(tensors, config=config | {"num_key_value_heads": 4})
    assert len(report.errors) == 6
    assert str(report).count("schema.shape") == 6
    report = validate({f"layers.{k}.w": np.full((2, 2), np.nan, np.float32) for k in range(20)})
    assert len(report.errors) == 20
    assert str(report).count("value.nan") == 1
    assert "and 19 more like it" in str(report)


def test_a_tied_head_that_is_the_same(tmp_path):
    config, tensors = small("llama-tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert codes(validate(tensors, config=config)) == []
    assert codes(validate(write_folder(tmp_path, config, tensors))) == []
    tensors["lm_head.weight"][-1, -1] = 1
    report = validate(write_folder(tmp_path, config, tensors))
    assert codes(report) == [("warning", "head.tied", "lm_head.weight")]
    assert "from [95, 63] on" in report.warnings[0].message


def test_another_head_than_the_schema_has(llama):
    config, tensors = llama
    config["architectures"] = ["LlamaForSequenceClassification"]
    del tensors["lm_head.weight"]
    tensors["score.weight"] = np.ones((2, 64), np.float32) * [[0.1] * 32 + [0.2] * 32]
    assert codes(validate(tensors, config=config)) == [("warning", "schema.unexpected", "score.weight")]


def test_names_of_another_kind(llama):
    config, tensors = llama
    other = {name.replace("model.layers", "blk").replace("model.", "x."): x for name, x in tensors.items()}
    report = validate(other, config=config)
    assert [code for _, code, _ in codes(report)] == ["schema.names"]
    assert "only 1 of 30 are" in report.errors[0].message


# ---- without a schema ----


def test_layers_without_a_schema():
    def layer(k):
        return {f"encoder.layers.{k}.{part}": np.float32([[1, 2], [3, k]]) for part in ("a.weight", "b.weight", "c")}

    tensors = {name: x for k in range(5) for name, x in layer(k).items()}
    assert codes(validate(tensors)) == []
    hole = {name: x for name, x in tensors.items() if ".2." not in name}
    assert codes(validate(hole)) == [("error", "layers.hole", "encoder.layers.2")]
    del tensors["encoder.layers.3.b.weight"]
    report = validate(tensors)
    assert codes(report) == [("warning", "layers.missing", "encoder.layers.3.b.weight")]
    assert "4 of the other 4 layers have it" in report.warnings[0].message
    sequential = {f"features.{k}.weight": np.float32([[1, 2]]) for k in (0, 3, 6)}
    assert codes(validate(sequential)) == []
    assert validate(tensors, schema=None).schema is None


def test_a_schema_of_ones_own(tmp_path):
    tiny = {"name": "tiny", "layers": "n", "tensors": {"h.{}.w": {"shape": ["d", 2]}}}
    (tmp_path / "tiny.json").write_text(json.dumps(tiny))
    (tmp_path / "config.json").write_text(json.dumps({"n": 2, "d": 2}))
    tensors = {"h.0.w": np.float32([[1, 2], [3, 4]]), "h.1.w": np.float32([[1, 2]])}
    for schema in (tiny, tmp_path / "tiny.json"):
        report = validate(tensors, config=tmp_path / "config.json", schema=schema)
        assert codes(report) == [("error", "schema.shape", "h.1.w")]
        assert report.schema == "tiny"


# ---- sizes, arrays, limits ----


def test_sizes():
    assert codes(validate({})) == [("error", "model.empty", None)]
    report = validate({"e": np.zeros((0, 3)), "s": np.array(7), "x": np.float32([1, 2])})
    assert codes(report) == [("warning", "tensor.empty", "e"), ("warning", "tensor.scalar", "s")]
    assert report.ok


def test_one_array():
    x = np.float32([[1, 2, 3], [4, 5, 6]])
    report = validate(x, shape=(2, 3))
    assert (codes(report), report.tensors, report.parameters) == ([], 1, 6)
    assert codes(validate(x, shape=(None, 3))) == []
    report = validate(x, shape=(3, None))
    assert codes(report) == [("error", "array.shape", "array")]
    assert report.errors[0].message == "has shape [2, 3], wanted is [3, ?]"
    assert codes(validate(x, limits=(0, 5))) == [("warning", "value.range", "array")]
    quantized = safeload.quantize(x, "int8")
    assert codes(validate(quantized, shape=(2, 3))) == []


def test_limits():
    x = {"w": np.float32([[-200, 300]])}
    assert codes(validate(x)) == [("warning", "value.range", "w")]
    assert codes(validate(x, limits=(-1000, 1000))) == []
    assert codes(validate(x, limits={"low": -1000, "high": 1000, "parameters": 2})) == []
    report = validate(x, limits={"high": 300, "low": -200, "parameters": 3})
    assert codes(report) == [("error", "model.parameters", None)]
    assert report.errors[0].message == "2 parameters, expected are 3"
    assert codes(validate({"n": np.array([[1000, 2]])})) == []  # integers have no range


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"limits": 5}, TypeError),
        ({"limits": {"top": 5}}, ValueError),
        ({"limits": (2, 1)}, ValueError),
        ({"limits": "ab"}, TypeError),
        ({"shape": (1,)}, ValueError),
        ({"schema": "lama"}, ValueError),
        ({"schema": {"name": "x"}}, safeload.FormatError),
        ({"config": "missing.json"}, FileNotFoundError),
    ],
)
def test_wrong_arguments(arguments, kind):
    with pytest.raises(kind):
        validate({"w": np.ones(2)}, **arguments)
    with pytest.raises(TypeError):
        validate(np.ones(2), shape="ab")


# ---- quantized tensors ----


def test_scales():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 64), np.float32)
    for scheme in ("q4_0", "q8_0"):
        good = safeload.quantize(x, scheme)
        assert codes(validate({"w": good})) == []
        size = 18 if scheme == "q4_0" else 34
        bad = safeload.quantize(x, scheme)
        bad.data.reshape(-1, size)[5, :2].view("<f2")[...] = np.inf
        report = validate({"w": bad})
        assert codes(report) == [("error", "quantization.scale", "w")]
        assert report.errors[0].message == (
            "1 of 8 blocks have a scale that is not finite, the first is block 5 with inf"
        )
    good = safeload.quantize(x, "int8", axis=0)
    assert codes(validate({"w": good})) == []
    scale = good.scale.copy()
    scale[2] = np.nan
    report = validate({"w": QuantizedTensor("int8", good.shape, good.data, scale, 0)})
    assert codes(report) == [("error", "quantization.scale", "w")]
    assert "scale 2 of axis 0 is nan" in report.errors[0].message
    report = validate({"w": QuantizedTensor("int8", good.shape, good.data, -good.scale, 0)})
    assert codes(report) == [("error", "quantization.scale", "w")]


def test_expected_scales(tmp_path):
    x = np.float32([[-1.27, 0.5], [0.1, 1]])
    w = safeload.quantize(x, "int8")
    assert codes(validate(w, limits={"absmax": np.abs(x).max()})) == []
    assert codes(validate({"w": w}, limits={"scale": {"w": 0.01}})) == []
    report = validate({"w": w}, limits={"scale": 0.02})
    assert codes(report) == [("error", "quantization.scale", "w")]
    assert "but scale is 0.02" in report.errors[0].message
    assert codes(validate({"w": w}, limits={"absmax": {"w": 2}})) == [("error", "quantization.scale", "w")]
    assert codes(validate({"w": w}, limits={"absmax": {"v": 2}})) == []
    save_file({"w": w}, tmp_path / "q.safetensors")
    assert codes(validate(tmp_path / "q.safetensors", limits={"scale": 0.01})) == []
    assert codes(validate(tmp_path / "q.safetensors", limits={"scale": 0.02})) != []


def test_a_quantized_llama(tmp_path):
    config, tensors = small("llama-tied")
    path = write_folder(tmp_path, config, tensors)
    for scheme in ("int8", "q4_0", "q8_0"):
        quantized = safeload.load_quantized(path, scheme)
        assert codes(validate(quantized, config=config)) == []


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
        report = validate(source)
        assert codes(report) == [("warning", "index.total_size", None)]
        assert f"total_size {index['metadata']['total_size']}" in report.warnings[0].message
    del index["metadata"]
    path.write_text(json.dumps(index))
    assert codes(validate(folder)) == []


def test_tensors_that_the_index_leaves_out(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][MATRIX]
    del index["metadata"]
    path.write_text(json.dumps(index))
    assert codes(validate(folder, schema=None)) == [
        ("warning", "index.unlisted", MATRIX),
        ("warning", "layers.missing", MATRIX),
    ]


def test_a_missing_shard(folder):
    os.remove(folder / "model-00002-of-00002.safetensors")
    report = validate(folder)
    assert codes(report) == [("error", "index.shard", None)]
    assert "model-00002-of-00002.safetensors is not there" in report.errors[0].message


def test_a_missing_shard_without_an_index(llama, tmp_path):
    path = write_folder(tmp_path, *llama, shards=3)
    os.remove(path / "model.safetensors.index.json")
    assert codes(validate(path)) == []
    os.remove(path / "model-00002-of-00003.safetensors")
    assert ("error", "index.shard", None) in codes(validate(path))
    assert codes(validate(path / "model-00001-of-00003.safetensors", schema=None))[:1] != [
        ("error", "index.shard", None)
    ]


def test_files_that_cannot_be_opened(tmp_path, folder):
    path = tmp_path / "bad.safetensors"
    save_file({"w": np.ones(4)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    report = validate(path)
    assert codes(report) == [("error", "file.format", None)]
    assert "end past the data" in report.errors[0].message
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert codes(validate(path)) == [("error", "file.unsupported", None)]
    with pytest.raises(FileNotFoundError):
        validate(tmp_path / "missing")
    (folder / "config.json").write_text("{")
    assert codes(validate(folder)) == [("error", "file.format", None)]


def test_a_file_that_shrinks_while_it_is_read(folder):
    with safeload.open(folder) as opened:
        last = opened.files[-1]
        os.truncate(last, os.path.getsize(last) - 10)
        report = validate(opened)
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
    assert codes(validate(path)) == []
    offset = safeload.open(path).tensors["b"].offset
    flip(path, offset + 1)
    report = validate(path)
    assert codes(report) == [("error", "file.crc", "b")]
    assert "data/b" in report.errors[0].message
    assert str(path) in report.errors[0].message


def test_crc_of_a_real_file(shared, tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes((shared / "torch" / "akiki-vad.pt").read_bytes())
    assert "file.crc" not in [code for _, code, _ in codes(validate(path))]
    with safeload.open(path) as opened:
        info = list(opened.tensors.values())[-1]
    flip(path, info.offset)
    found = [f for f in validate(path).errors if f.code == "file.crc"]
    assert [f.tensor for f in found] == [info.name]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() in found[0].message


def test_every_real_file_is_looked_at(shared):
    for path in sorted((shared / "safetensors").glob("*.safetensors")) + sorted((shared / "torch").glob("*.pt*")):
        if "lightning" in path.name or "gammas" in path.name or "classifii" in path.name:
            continue
        report = validate(path)
        assert report.ok, f"{path}: {report}"
        json.dumps(report.to_json(), allow_nan=False)


# ---- the report ----


def test_the_report_as_json(llama):
    config, tensors = llama
    tensors[LAST][:] = np.nan
    value = json.loads(json.dumps(validate(tensors, config=config).to_json(), allow_nan=False))
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
    lines = str(validate(tensors, config=config)).split("\n")
    assert lines[:3] == [
        "dict: 31 tensors, 123,330 parameters, 241 KiB, schema llama",
        "NOT SOUND: 2 errors",
        "",
    ]
    assert r"error    bad\x1b[31m\nname  schema.unexpected" in lines
    assert all(len(line) <= 80 for line in lines)
    assert repr(validate({"w": np.ones(2)})) == "<ValidationReport 'dict': sound>"


def test_debug_lines(caplog):
    with caplog.at_level(logging.DEBUG, "safeload"):
        validate({"w": np.ones(2)})
    assert "validate dict: schema None" in caplog.text


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_crc_of_npz(save, tmp_path):
    path = tmp_path / "x.npz"
    rng = np.random.default_rng(1)
    save(path, a=rng.standard_normal((20, 20)), b=rng.standard_normal((20, 20)))
    assert codes(validate(path)) == []
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("b.npy")
    flip(path, info.header_offset + 30 + len("b.npy") + (1000 if save is np.savez else 500))
    report = validate(path)
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
    assert codes(validate(tmp_path)) == []
    path = tmp_path / "pytorch_model-00001-of-00002.bin"
    flip(path, safeload.open(tmp_path).tensors["w0"].offset)
    assert codes(validate(tmp_path)) == [("error", "file.crc", "w0")]


# ---- without values ----


def test_structure_only(llama, tmp_path):
    config, tensors = llama
    tensors[LAST][:] = np.nan
    path = write_folder(tmp_path, config, tensors)
    report = validate(path, values=False)
    assert report.verdict == "sound as far as its structure goes, values were not read"
    assert (report.stats, report.to_json()["values"]) == ({}, False)
    assert validate(path).verdict == "NOT SOUND: 1 error"
    tensors[LAST] = np.ones(3, np.float32)
    report = validate(write_folder(tmp_path, config, tensors), values=False)
    assert codes(report)[0] == ("error", "schema.shape", LAST)
