"""A config.json that a destination has while the source has none: no quantization of weights that are gone."""

import json
import logging
import os
import shutil

import numpy as np
import pytest
from builders.conversions import at_once, on_an_executor, planned, resumed
from builders.paths import DATA

import safeload
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
OLD = {"model_type": "llama", "torch_dtype": "bfloat16", "quantization_config": GPTQ}
NEW = {"l.0.weight": np.ones((8, 8), np.float32), "l.1.ids": np.arange(4), "l.1.mask": np.ones(4, bool)}

WAYS = pytest.mark.parametrize("way", [at_once, resumed, on_an_executor, planned])


@pytest.fixture
def old(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"l.0.qweight": np.zeros((1, 8), np.int32)}, folder / "model.safetensors")
    return folder


def source_of(tmp_path, tensors):
    save_file(tensors, tmp_path / "new.safetensors")
    return tmp_path / "new.safetensors"


def converted(way, src, folder, config, **options):
    (folder / "config.json").write_text(json.dumps(config))
    way(src, folder, max_shard_size="1MB", overwrite=True, **options)
    return json.loads((folder / "config.json").read_text())


@WAYS
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OLD, {"model_type": "llama", "torch_dtype": "bfloat16"}),
        ({"quantization": {"bits": 4, "group_size": 64}}, {}),
        ({"compression_config": {"format": "pack-quantized"}, "a": 1}, {"a": 1}),
        ({"text_config": {"quantization_config": GPTQ, "b": 2}}, {"text_config": {"b": 2}}),
    ],
)
def test_an_old_quantization_goes(tmp_path, old, way, config, expected, caplog):
    assert converted(way, source_of(tmp_path, NEW), old, config) == expected
    assert "removed the quantization of the old weights" in caplog.text


@WAYS
def test_the_dtype_is_that_of_the_new_weights(tmp_path, old, way):
    assert converted(way, source_of(tmp_path, NEW), old, OLD, dtype="float16")["torch_dtype"] == "float16"


@WAYS
@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"quantization_config": None}, {}])
def test_another_old_config_stays(tmp_path, old, way, config, caplog):
    assert converted(way, source_of(tmp_path, NEW), old, config) == config
    assert not caplog.records


@WAYS
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int8])
def test_codes_keep_the_old_quantization(tmp_path, old, way, dtype):
    tensors = {**NEW, "l.0.qweight": np.ones((1, 8), dtype)}
    assert converted(way, source_of(tmp_path, tensors), old, OLD) == OLD


@WAYS
def test_an_unreadable_config_stays(tmp_path, old, way):
    (old / "config.json").write_text("{")
    way(source_of(tmp_path, NEW), old, max_shard_size="1MB", overwrite=True)
    assert (old / "config.json").read_text() == "{"


@WAYS
@pytest.mark.parametrize("model", ["awq4_gemm", "gptqmodel_bnb_int8", "ct_pack_w8_block"])
def test_a_file_is_dequantized_into_its_own_folder(tmp_path, way, model):
    folder = tmp_path / "model"
    shutil.copytree(DATA / "quantized" / model, folder)
    expected = safeload.load(folder, dtype="float32")
    way(folder / "model.safetensors", folder, max_shard_size="1MB", overwrite=True, dtype="float32")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    loaded = safeload.load(folder)
    assert all(np.array_equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("relative", [False, True])
def test_a_file_warns_of_the_config_beside_it(tmp_path, old, relative, monkeypatch, caplog):
    (old / "config.json").write_text(json.dumps(OLD))
    monkeypatch.chdir(old)
    target = "model.safetensors" if relative else old / "model.safetensors"
    with caplog.at_level(logging.WARNING, "safeload"):
        safeload.convert(source_of(tmp_path, NEW), target, overwrite=True)
    assert "describes a quantization that the weights in model.safetensors do not have" in caplog.text
    assert json.loads((old / "config.json").read_text()) == OLD
    assert load_file(target).keys() == NEW.keys()


@pytest.mark.parametrize("name", ["other.safetensors", "model.npz"])
def test_other_files_do_not_warn(tmp_path, old, name, caplog):
    (old / "config.json").write_text(json.dumps(OLD))
    safeload.convert(source_of(tmp_path, NEW), old / name)
    assert not caplog.records


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_a_config_that_is_a_folder_stays(tmp_path, old):
    (old / "config.json").mkdir()
    safeload.convert(source_of(tmp_path, NEW), old, max_shard_size="1MB", overwrite=True)
    assert (old / "config.json").is_dir()
