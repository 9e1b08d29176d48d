"""Folders with quantized tensors of safeload say so, and no other library takes their codes for weights."""

import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import safeload
from safeload import FormatError, QuantizedTensor
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

NAME = "h.0.w.weight"
WEIGHTS = {
    f"h.{k}.{n}.weight": np.random.default_rng(k).normal(size=(8, 256)).astype("f4") for k in range(2) for n in "wv"
}
CONFIG = {"model_type": "other", "torch_dtype": "float32"}
WAYS = {
    "at once": lambda src, dst, **options: safeload.convert(src, dst, **options),
    "resumed": lambda src, dst, **options: safeload.convert(src, dst, resume=True, **options),
    "on an executor": lambda src, dst, **options: safeload.convert(src, dst, executor=ThreadPoolExecutor(2), **options),
}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def config(folder):
    return json.loads((folder / "config.json").read_text())


def stored(folder):
    """What other libraries load."""
    return {name: array for path in folder.glob("*.safetensors") for name, array in load_file(path).items()}


def values(folder):
    return {name: array.tobytes() for name, array in safeload.load(folder, dtype="float32").items()}


@pytest.mark.parametrize("limit", [None, 3000], ids=["one shard", "shards"])
@pytest.mark.parametrize("scheme", ["int8", "q8_0", {"h.0.*": "q4_k", "*": "int8"}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_config_names_the_schemes(source, tmp_path, caplog, way, scheme, limit):
    out, options = tmp_path / "out", {"max_shard_size": limit}
    with caplog.at_level(logging.WARNING, logger="safeload"):
        WAYS[way](source, out, quantize=scheme, **options)
    schemes = sorted(set(scheme.values())) if isinstance(scheme, dict) else [scheme]
    assert config(out) == {**CONFIG, "quantization_config": {"quant_method": "safeload", "schemes": schemes}}
    assert [record.message for record in caplog.records] == [
        f"{out}: only safeload reads the quantized tensors ({', '.join(schemes)}); transformers, vLLM and other "
        "engines do not load them"
    ]
    with safeload.open(out) as opened:
        assert sorted(opened) == sorted(WEIGHTS)
        assert {tensor.scheme for tensor in opened.values()} == set(schemes)
    with safeload.open(out) as opened:
        assert opened.config["quantization_config"]["quant_method"] == "safeload"


def test_codes_of_int8_have_a_name_of_their_own(source, tmp_path):
    """A foreign loader then reports missing weights instead of loading codes."""
    safeload.convert(source, tmp_path / "out", quantize="int8", max_shard_size=3000)
    names = sorted(stored(tmp_path / "out"))
    assert names == sorted([*(f"{name}.codes" for name in WEIGHTS), *(f"{name}_scale" for name in WEIGHTS)])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == names


def test_both_forms_are_read(source, tmp_path):
    """A file, and folders of earlier releases, store codes under the name of their tensor."""
    safeload.convert(source, tmp_path / "out", quantize="int8")
    safeload.convert(source, tmp_path / "out.safetensors", quantize="int8")
    assert NAME in load_file(tmp_path / "out.safetensors")
    (tmp_path / "old").mkdir()
    shutil.copy(tmp_path / "out.safetensors", tmp_path / "old" / "model.safetensors")
    assert values(tmp_path / "old") == values(tmp_path / "out") == values(tmp_path / "out.safetensors")
    safeload.convert(tmp_path / "old", tmp_path / "new")
    assert f"{NAME}.codes" in stored(tmp_path / "new")


@pytest.mark.parametrize("way", WAYS)
def test_a_quantized_folder_is_a_source(source, tmp_path, way):
    first, convert = tmp_path / "first", WAYS[way]
    convert(source, first, quantize="int8", max_shard_size=3000)
    convert(first, tmp_path / "copy", max_shard_size=9000)
    assert config(tmp_path / "copy") == config(first)
    assert values(tmp_path / "copy") == values(first)
    assert isinstance(safeload.load(tmp_path / "copy")[NAME], QuantizedTensor)
    convert(first, tmp_path / "back", dtype="float32")
    assert config(tmp_path / "back") == {**CONFIG, "torch_dtype": "float32"}
    assert values(tmp_path / "back") == values(first)
    convert(first, tmp_path / "again", quantize="q8_0", requantize=True)
    assert config(tmp_path / "again")["quantization_config"]["schemes"] == ["q8_0"]
    convert(first, first, dtype="float32", overwrite=True, max_shard_size=9000)
    assert "quantization_config" not in config(first)
    assert values(first) == values(tmp_path / "copy")


def test_a_config_in_the_destination_follows_the_weights(source, tmp_path, caplog):
    """The source is a file without a config."""
    out, file = tmp_path / "out", source / "model.safetensors"
    out.mkdir()
    (out / "config.json").write_text(json.dumps(CONFIG))
    safeload.convert(file, out, quantize="q8_0", overwrite=True)
    assert config(out)["quantization_config"] == {"quant_method": "safeload", "schemes": ["q8_0"]}
    safeload.convert(file, out, quantize="int8", overwrite=True)
    assert config(out)["quantization_config"]["schemes"] == ["int8"]
    safeload.convert(file, out, overwrite=True)
    assert config(out) == CONFIG


def test_a_folder_that_stays_unquantized_says_nothing(source, tmp_path, caplog):
    safeload.convert(source, tmp_path / "out", quantize="int8", keep="*")
    assert config(tmp_path / "out") == CONFIG
    safeload.convert(source, tmp_path / "q.safetensors", quantize="int8")
    assert not caplog.records


@pytest.mark.parametrize("limit", [None, 3000], ids=["one shard", "shards"])
def test_a_name_that_the_codes_need_is_refused(tmp_path, limit):
    weights = {**WEIGHTS, f"{NAME}.codes": np.ones(3, np.float32)}
    with pytest.raises(safeload.SafetensorError, match=f"'{NAME}(.codes)?'"):
        safeload.convert(weights, tmp_path / "out", quantize="int8", max_shard_size=limit)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": "other"}, "the entry of"),
        ({"codes": 7}, "the entry of"),
        ({"codes": f"{NAME}_scale"}, "the entry of"),
        ({"codes": NAME}, "which is not in the file"),
        ({"codes": None}, "the entry of"),
        ({"shape": [8, 255]}, "but its description needs"),
    ],
    ids=str,
)
def test_hostile_descriptions(source, tmp_path, change, message):
    out = tmp_path / "out"
    safeload.convert(source, out, quantize="int8", only=NAME)
    with safeload.open(out, stored=True) as opened:
        described = json.loads(opened.metadata["safeload.quantized"])
    described[NAME] |= change
    save_file(stored(out), tmp_path / "x.safetensors", {"x": "y"})
    rewrite(tmp_path / "x.safetensors", described)
    with pytest.raises(FormatError, match=message):
        safeload.open(tmp_path / "x.safetensors")


def rewrite(path, described):
    """Describe the tensors of a file, as `save_file` refuses to."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = {**json.loads(data[8 : 8 + size]), "__metadata__": {"safeload.quantized": json.dumps(described)}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def test_codes_of_a_tensor_that_is_stored_too(source, tmp_path):
    """In one file, and in two shards."""
    out = tmp_path / "out"
    safeload.convert(source, out, quantize="int8", only=NAME)
    described = {NAME: {"scheme": "int8", "shape": [8, 256], "axis": None, "codes": f"{NAME}.codes"}}
    one = tmp_path / "one.safetensors"
    save_file({**stored(out), NAME: WEIGHTS[NAME]}, one)
    rewrite(one, described)
    with pytest.raises(FormatError, match=r"holds the codes of 'h\.0\.w\.weight', which is stored too"):
        safeload.open(one)
    two = tmp_path / "two"
    two.mkdir()
    save_file({NAME: WEIGHTS[NAME]}, two / "model-00001-of-00002.safetensors")
    shutil.copy(out / "model.safetensors", two / "model-00002-of-00002.safetensors")
    with pytest.raises(FormatError, match=r"has a tensor 'h\.0\.w\.weight' too"):
        safeload.open(two)


def test_a_fallback_is_told(tmp_path, caplog):
    """Rows of 64 elements are no super-blocks of 256."""
    weights = {"a": np.ones((4, 64), np.float32), "b": np.ones((4, 64), np.float32), "c": np.ones((4, 256), np.float32)}
    path = tmp_path / "x.safetensors"
    safeload.convert(weights, path, quantize={"a": "q6_k", "*": "q4_k"})
    assert [record.message for record in caplog.records] == [
        f"{path}: 1 tensor got q8_0 instead of q6_k, because rows are not whole blocks of 256 elements",
        f"{path}: 1 tensor got q5_0 instead of q4_k, because rows are not whole blocks of 256 elements",
    ]
