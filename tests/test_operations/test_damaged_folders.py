"""Verdicts about damaged folders and hostile metadata: what is there is still checked, and nothing is raised."""

import json
import os

import numpy as np
import pytest
from builders.models import small, write_folder

import safeload
from safeload import gguf

pytestmark = pytest.mark.no_core

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def llama():
    return small("llama", np.float32)


def codes(report):
    return {(finding.code, finding.tensor) for finding in report.errors}


def lose(folder, how):
    """Damage the first shard."""
    path = folder / SHARDS[0]
    if how == "missing":
        path.unlink()
    elif how == "dangling":
        path.unlink()
        path.symlink_to("../blobs/gone")
    elif how == "cut":
        os.truncate(path, path.stat().st_size - 8)
    elif how == "not weights":
        path.write_bytes(b"not weights")
    elif how == "pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1000\n")
    elif how == "empty":
        path.write_bytes(b"")


LOSSES = ["missing", "dangling", "cut", "not weights", "pointer", "empty"]


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("how", LOSSES)
def test_shapes_are_compared_beside_a_lost_shard(llama, tmp_path, how, values):
    config, tensors = llama
    tensors["model.norm.weight"] = np.ones(32, np.float32)
    lose(write_folder(tmp_path, config, tensors), how)
    report = safeload.check(tmp_path, values=values)
    assert ("schema.shape", "model.norm.weight") in codes(report)
    assert report.schema == "llama"
    assert report.compared == report.tensors == 15


def test_other_findings_of_the_remaining_shards(llama, tmp_path):
    config, tensors = llama
    tensors["model.norm.weight"] = np.full(64, np.nan, np.float32)
    tensors["model.layers.2.self_attn.r_proj.weight"] = np.ones((64, 64), np.float32)
    tensors["model.layers.9.self_attn.q_proj.weight"] = np.ones((64, 64), np.float32)
    lose(write_folder(tmp_path, config, tensors), "missing")
    report = safeload.check(tmp_path)
    found = {finding.code for finding in (*report.errors, *report.warnings)}
    assert {"index.shard", "value.nan", "schema.unexpected", "schema.layer_extra"} <= found
    assert not {code for code in found if "missing" in code}  # the other shard has the rest


def test_a_sound_rest_has_no_findings_of_its_own(llama, tmp_path):
    lose(write_folder(tmp_path, *llama), "missing")
    report = safeload.check(tmp_path)
    assert [finding.code for finding in report.errors] == ["index.shard"]
    assert not report.warnings


def test_a_wrong_size_in_the_config_is_found_without_all_shards(llama, tmp_path):
    config, tensors = llama
    lose(write_folder(tmp_path, {**config, "intermediate_size": 256}, tensors), "missing")
    (finding,) = [finding for finding in safeload.check(tmp_path).errors if finding.code == "schema.config"]
    assert "intermediate_size 256" in finding.message


def test_a_config_can_be_passed_for_a_damaged_folder(llama, tmp_path):
    config, tensors = llama
    lose(write_folder(tmp_path, config, tensors), "missing")
    (tmp_path / "config.json").unlink()
    assert safeload.check(tmp_path).schema is None
    report = safeload.check(tmp_path, config={**config, "vocab_size": 97, "tie_word_embeddings": False})
    assert report.schema == "llama"


def test_a_shard_that_lacks_a_tensor_is_compared(llama, tmp_path):
    config, tensors = llama
    tensors["model.norm.weight"] = np.ones(32, np.float32)
    write_folder(tmp_path, config, tensors)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["more"] = SHARDS[1]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {("index.tensor", None), ("schema.shape", "model.norm.weight")} <= codes(safeload.check(tmp_path))


def test_a_numbered_set_without_an_index_is_compared(llama, tmp_path):
    config, tensors = llama
    tensors["model.norm.weight"] = np.ones(32, np.float32)
    lose(write_folder(tmp_path, config, tensors), "missing")
    (tmp_path / "model.safetensors.index.json").unlink()
    assert ("schema.shape", "model.norm.weight") in codes(safeload.check(tmp_path))


INDEXES = [
    b"{",
    b"",
    b"[]",
    b"{}",
    b"\xff",
    b'{"weight_map": {"w": 3}}',
    b'{"weight_map": {"w": "../w"}}',
    b"[" * 99_999,
]


@pytest.mark.parametrize("source", ["folder", "index"])
@pytest.mark.parametrize("content", INDEXES)
def test_shards_beside_a_damaged_index_are_checked(llama, tmp_path, content, source):
    config, tensors = llama
    tensors["model.norm.weight"] = np.full(64, np.nan, np.float32)
    write_folder(tmp_path, config, tensors)
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content)
    path = tmp_path if source == "folder" else index
    report = safeload.check(path)
    assert codes(report) == {("file.format", None), ("value.nan", "model.norm.weight")}
    assert report.tensors == len(tensors)
    lose(tmp_path, "cut")
    report = safeload.check(path)
    assert [finding.code for finding in report.errors].count("file.format") == 2
    (note,) = [finding.message for finding in report.notes if finding.code == "index.fetch"]
    assert f"fetch again: {index.name}, {SHARDS[0]}" in note
    assert safeload.check(tmp_path, values=False).errors


@pytest.mark.parametrize("how", LOSSES)
def test_a_folder_with_a_lost_shard_gets_a_page(llama, tmp_path, how):
    folder = tmp_path / "model"
    folder.mkdir()
    lose(write_folder(folder, *llama), how)
    assert not safeload.report(folder, tmp_path / "page.html").ok
    assert SHARDS[0] in (tmp_path / "page.html").read_text()


BAD = {
    "index is no JSON": {"model.safetensors.index.json": b"{"},
    "index is a list": {"model.safetensors.index.json": b"[]"},
    "index without a map": {"model.safetensors.index.json": b"{}"},
    "index leads outside": {"model.safetensors.index.json": b'{"weight_map": {"w": "../w.safetensors"}}'},
    "config is no JSON": {"config.json": b"{", "model.safetensors": None},
    "weights are cut": {"model.safetensors": b"\x10\0\0"},
    "GGUF is cut": {"a.gguf": b"GGUF\3\0\0\0"},
    "two GGUF files": {"a.gguf": b"GGUF", "b.gguf": b"GGUF"},
    "nothing": {},
    "a text": {"README.md": b"x"},
    "torch is cut": {"pytorch_model.bin": b"PK\3\4"},
}


@pytest.mark.parametrize("name", BAD)
def test_every_bad_folder_gets_a_page(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    for file, content in BAD[name].items():
        if content is None:
            safeload.save({"w": np.ones(4, np.float32)}, folder / file)
        else:
            (folder / file).write_bytes(content)
    report = safeload.report(folder, tmp_path / "page.html")
    assert report.errors
    assert (tmp_path / "page.html").exists()


def test_a_config_that_is_a_folder_is_a_finding(tmp_path):
    safeload.save({"w": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").mkdir()
    assert safeload.check(tmp_path).errors


# ---- hostile metadata ----

VALUES = [
    True,
    np.int8(-1),
    np.float32("nan"),
    "",
    "\udcff",
    ["a"],
    [["a"], ["b"]],
    np.int32([1, 2]),
    np.array([True]),
    [np.int32([1]), np.int32([2])],
    np.uint64(2**64 - 1),
]
KEYS = [
    "general.architecture",
    "general.type",
    "general.name",
    "tokenizer.ggml.model",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.merges",
    "llama.block_count",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.rope.dimension_count",
]


@pytest.mark.parametrize("key", KEYS)
def test_values_of_any_gguf_type_are_findings(tmp_path, key):
    tensors = {"token_embd.weight": np.ones((2, 32), np.float32), "blk.0.attn_q.weight": np.ones((32, 32), np.float32)}
    base = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "llama.block_count": np.uint32(1),
        "llama.embedding_length": np.uint32(32),
    }
    for value in VALUES:
        gguf.save_file(tensors, tmp_path / "a.gguf", {**base, key: value}, durable=False)
        report = safeload.check(tmp_path / "a.gguf", values=False)
        assert report.tensors == 2
        assert safeload.info(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    "value", [None, True, -1, 1e308, 10**30, "", "\ud800", [None], [[1]], [{}], {"a": {}}], ids=repr
)
def test_values_of_any_json_type_are_findings(llama, tmp_path, value):
    config, tensors = llama
    safeload.save(tensors, tmp_path / "model.safetensors", durable=False)
    for key in (*config, "quantization_config", "torch_dtype", "text_config", "head_dim", "rope_scaling"):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        assert safeload.check(tmp_path, values=False).tensors == len(tensors)
