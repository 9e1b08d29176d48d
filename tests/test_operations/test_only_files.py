"""Conversions for engines of the only weight file of a model, passed by its own path."""

import io
import json
import os
import shutil

import numpy as np
import pytest
from builders import llama_models
from builders.engine_models import write_model
from builders.hub import Hub, Repository
from builders.inside import main

import safeload
from safeload.errors import UnsupportedError, VerificationError

pytestmark = pytest.mark.no_core

LLAMA = llama_models.listed()["llama3"]
FILE = "model.safetensors"
RAW = "no engine will load this file"


@pytest.fixture
def model(tmp_path):
    return llama_models.write_folder(tmp_path / "llama", LLAMA)


@pytest.fixture
def is_raw(tmp_path, caplog):
    """Whether a source becomes a file with its own names; the warning says so."""

    def convert(source, **options):
        caplog.clear()
        safeload.convert(source, tmp_path / "x.gguf", overwrite=True, **options)
        with safeload.open(tmp_path / "x.gguf") as file:
            raw = "blk.0.attn_q.weight" not in file
        assert raw == (RAW in caplog.text)
        return raw

    return convert


# ---- llama.cpp ----


@pytest.mark.parametrize("kind", ["path", "relative path", "list", "link", "pytorch_model.bin"])
def test_the_only_file_of_a_model_is_converted_as_its_folder(model, tmp_path, is_raw, kind, monkeypatch):
    pytest.importorskip("tokenizers")
    safeload.convert(model, tmp_path / "folder.gguf")
    source = model / FILE
    if kind == "relative path":
        monkeypatch.chdir(model)
        source = FILE
    elif kind == "list":
        source = [source]
    elif kind == "link":
        if os.name == "nt":
            pytest.skip("symbolic links need a privilege")
        os.rename(source, tmp_path / "blob")
        os.symlink(tmp_path / "blob", source)
    elif kind == "pytorch_model.bin":
        os.rename(source, model / kind)
        source = model / kind
    assert not is_raw(source)
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "folder.gguf").read_bytes()


def test_other_files_of_the_model_do_not_matter(model, is_raw):
    pytest.importorskip("tokenizers")
    shutil.copy(model / FILE, model / "consolidated.safetensors")
    shutil.copy(model / FILE, model / "optimizer.pt")
    assert not is_raw(model / FILE)
    assert is_raw(model / "consolidated.safetensors")


def test_a_shard_is_written_raw(model, tmp_path, is_raw):
    safeload.convert(model, tmp_path / "shards", max_shard_size="100KB")
    shard = next(name for name in sorted(os.listdir(tmp_path / "shards")) if name.startswith("model-00001-of"))
    assert is_raw(tmp_path / "shards" / shard)


@pytest.mark.parametrize(
    "config",
    [
        None,
        "{",
        "[]",
        "{}",
        '{"architectures": ["OPTForCausalLM"], "model_type": "opt"}',
        '{"architectures": [["LlamaForCausalLM"]], "model_type": ["llama"]}',
    ],
)
def test_without_a_supported_config_the_file_is_written_raw(model, is_raw, config):
    os.remove(model / "config.json")
    if config is not None:
        (model / "config.json").write_text(config)
    assert is_raw(model / FILE)


def test_tensors_that_the_config_does_not_describe_are_written_raw(model, is_raw):
    safeload.save({"model.vision.layers.0.weight": np.ones((4, 32), np.float32)}, model / FILE, overwrite=True)
    assert is_raw(model / FILE)


@pytest.mark.parametrize(
    "options", [{"raw": True}, {"only": "*.q_proj.weight"}, {"drop": "*norm*"}, {"rename": [("^model", "m")]}]
)
def test_options_for_single_tensors_write_raw(model, is_raw, options):
    assert is_raw(model / FILE, **options)


def test_what_has_no_folder_is_written_raw(model, is_raw):
    assert is_raw(io.BytesIO((model / FILE).read_bytes()))
    with open(model / FILE, "rb") as file:
        assert is_raw(file)
    assert is_raw(safeload.load(model))
    with safeload.open(model / FILE) as opened:
        assert is_raw(opened)


def test_a_model_without_a_tokenizer_is_refused_by_name(model, tmp_path):
    for name in ("tokenizer.json", "tokenizer.model"):
        if (model / name).exists():
            os.remove(model / name)
    with pytest.raises(safeload.SafeloadError, match=r"tokenizer.*raw=True"):
        safeload.convert(model / FILE, tmp_path / "x.gguf")


def test_a_url_of_the_only_file(model, tmp_path, is_raw):
    pytest.importorskip("tokenizers")
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for name in os.listdir(model):
        memory.pipe(f"/only-file/{name}", (model / name).read_bytes())
    assert not is_raw(f"memory://only-file/{FILE}", storage_options={})
    memory.rm("/only-file/config.json")
    assert is_raw(f"memory://only-file/{FILE}", storage_options={})


@pytest.mark.store_packages
def test_the_only_file_of_a_repository_of_the_hub(model, tmp_path, is_raw, monkeypatch):
    pytest.importorskip("huggingface_hub")
    for key in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with Hub() as hub:
        hub.repositories["owner/name"] = Repository()
        hub.repositories["owner/name"].commit({file.name: file.read_bytes() for file in model.iterdir()})
        options = {"endpoint": hub.url(), "token": hub.token}
        assert not is_raw(f"hf://owner/name/{FILE}", storage_options=options)
        (model / "config.json").write_text("{}")
        hub.repositories["owner/name"].commit({file.name: file.read_bytes() for file in model.iterdir()})
        assert is_raw(f"hf://owner/name/{FILE}", storage_options=options)


def test_the_files_beside_it_must_be_verified_too(model, tmp_path, is_raw):
    pytest.importorskip("tokenizers")

    def manifest(path):
        assert main(["verify", str(path), "--write", str(tmp_path / "m.json"), "--overwrite"]) == 0
        return tmp_path / "m.json"

    assert not is_raw(model / FILE, verify=manifest(model))
    covers_weights = manifest(model / FILE)
    listed = json.loads(covers_weights.read_text())
    del listed["files"]["tokenizer.json"]
    covers_weights.write_text(json.dumps(listed))
    with pytest.raises(VerificationError, match=r"tokenizer\.json: .* does not cover this file"):
        is_raw(model / FILE, verify=covers_weights)
    assert is_raw(model / FILE, verify=covers_weights, raw=True)


# ---- formats of engines ----


@pytest.fixture
def llama(tmp_path):
    return write_model(tmp_path / "m", "float16")


@pytest.mark.parametrize("name", ["w4a16", "mlx4"])
def test_formats_of_engines_take_the_only_file(llama, tmp_path, name):
    safeload.convert(llama, tmp_path / "a", quantize=name)
    safeload.convert(llama / FILE, tmp_path / "b", quantize=name)
    safeload.convert(llama / FILE, tmp_path / "c", quantize=name, resume=True)
    names = sorted(os.listdir(tmp_path / "a"))
    for other in ("b", "c"):
        assert sorted(os.listdir(tmp_path / other)) == names
        assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / other / file).read_bytes() for file in names)


def test_formats_of_engines_need_a_supported_config(llama, tmp_path):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "architectures": ["X"], "model_type": "x"}))
    with pytest.raises(UnsupportedError, match=r"mlx4 needs a config\.json with a model_type"):
        safeload.convert(llama / FILE, tmp_path / "a", quantize="mlx4")
    report = safeload.convert(llama / FILE, tmp_path / "a", quantize="w4a16")
    assert "no family known for x: every matrix but norms" in str(report)
    safeload.convert(llama / FILE, tmp_path / "b", quantize="w4a16", only="*.q_proj.weight")
