"""Which files `verify` compares and manifests list: all that decide the weights, and not the document itself."""

import hashlib
import json
import os
import shutil
import struct

import numpy as np
import pytest
from builders.inside import main
from builders.paths import DATA

import safeload
from safeload import VerificationError

pytestmark = pytest.mark.no_core

RNG = np.random.default_rng(0)
GPTQ = {
    "l.qweight": RNG.integers(-(2**31), 2**31 - 1, (16, 64), dtype=np.int32),
    "l.qzeros": RNG.integers(0, 2**31 - 1, (1, 8), dtype=np.int32),
    "l.scales": RNG.random((1, 64)).astype(np.float16),
    "l.g_idx": np.zeros(128, np.int32),
}
SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
CONFIG = {"quantization_config": {**SETTINGS, "checkpoint_format": "gptq_v2"}}


def listing(folder, *names):
    """A manifest of files in a folder; of all if none is named."""
    names = names or [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    contents = {name: (folder / name).read_bytes() for name in names}
    files = {name: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in contents.items()}
    return json.dumps({"safeload_manifest": 1, "files": files})


@pytest.fixture
def model(tmp_path):
    """Codes in two shards, with an index, a configuration and a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    safeload.numpy.save_file(GPTQ, folder / shards[0])
    safeload.numpy.save_file({"norm": np.ones(4, np.float32)}, folder / shards[1])
    weight_map = {**dict.fromkeys(GPTQ, shards[0]), "norm": shards[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def statuses(report):
    return {file.file: file.status for file in report.faults}


# ---- folders ----

ADDED = {
    "config.json": json.dumps({"safeload_manifest": 1, **CONFIG}),
    "quantize_config.json": json.dumps({"safeload_manifest": 1, **SETTINGS}),
    "other.json": json.dumps({"safeload_manifest": 1, "files": {}}),
    "old.sha256.json": json.dumps({"safeload_manifest": 1, "tensors": {}}),
    "model.sig": "{}",
    "release.sig": json.dumps({"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json"}),
    "model.safetensors.sha256": "0" * 64,
    "sub/config.json": "{}",
    "sub/model.sig": "{}",
    ".hidden.json": '{"safeload_manifest": 1}',
    "empty": "",
    "model.safetensors": "",
}


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
@pytest.mark.parametrize("name", ADDED)
def test_a_file_that_was_added_is_not_covered(name, inside, model, tmp_path):
    if name == "config.json":
        (model / name).unlink()
    document = (model if inside else tmp_path) / "list.json"
    document.write_text(listing(model))
    assert safeload.verify(model, document).ok
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text(ADDED[name])
    assert statuses(safeload.verify(model, document)) == {name: "not covered"}
    assert statuses(safeload.verify(f"{model}/", document)) == {name: "not covered"}


@pytest.mark.parametrize("name", ["list.json", "model.sig", "x.sha256", "sub/list", ".list.json", "tokenizer.sig"])
def test_the_document_is_left_out_whatever_its_name(name, model):
    (model / "sub").mkdir()
    content = listing(model)
    (model / name).write_text(content)
    assert safeload.verify(model, model / name).ok
    (model / "copy.json").write_text(content)
    assert statuses(safeload.verify(model, model / name)) == {"copy.json": "not covered"}


def test_a_document_that_is_read_as_a_configuration_is_not_covered(model):
    (model / "config.json").unlink()
    document = {**json.loads(listing(model)), **CONFIG}
    (model / "config.json").write_text(json.dumps(document))
    assert statuses(safeload.verify(model, model / "config.json")) == {"config.json": "not covered"}
    with pytest.raises(VerificationError, match="does not cover"):
        safeload.load(model, verify=model / "config.json")


def test_a_shard_with_a_name_of_git_is_compared(model, tmp_path):
    (tmp_path / "list.json").write_text(listing(model))
    (model / ".gitignore").write_text("*.tmp")
    assert safeload.verify(model, tmp_path / "list.json").ok
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002-of-00002.safetensors", ".gitignore"))
    os.replace(model / "model-00002-of-00002.safetensors", model / ".gitignore")
    (tmp_path / "list.json").write_text(listing(model, *sorted(set(os.listdir(model)) - {".gitignore"})))
    assert statuses(safeload.verify(model, tmp_path / "list.json")) == {".gitignore": "not covered"}


# ---- an index, a file ----

PARTS = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "tokenizer.json"]
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("name", [*PARTS, INDEX])
def test_verify_of_an_index_compares_all_that_open_reads(name, model, tmp_path):
    document = tmp_path / "list.json"
    document.write_text(listing(model))
    report = safeload.verify(model / INDEX, document)
    assert report.ok
    assert sorted(file.file for file in report.files) == sorted([*PARTS, INDEX])
    content = (model / name).read_bytes()
    (model / name).write_bytes(content[:-1] + b" ")
    assert statuses(safeload.verify(model / INDEX, document)) == {name: "changed"}
    (model / name).write_bytes(content)
    document.write_text(listing(model, *({*PARTS, INDEX} - {name})))
    assert statuses(safeload.verify(model / INDEX, document)) == {name: "not covered"}
    if name != INDEX:
        document.write_text(listing(model))
        (model / name).unlink()
        assert statuses(safeload.verify(model / INDEX, document)) == {name: "missing"}


def test_settings_beside_an_index_in_the_current_folder_are_compared(model, tmp_path, monkeypatch):
    (tmp_path / "list.json").write_text(listing(model, *({*PARTS, INDEX} - {"tokenizer.json"})))
    monkeypatch.chdir(model)
    assert statuses(safeload.verify(INDEX, tmp_path / "list.json")) == {"tokenizer.json": "not covered"}


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json", "config.json"])
def test_verify_of_a_file_with_codes_compares_the_settings_that_decide_them(name, model, tmp_path):
    (model / "config.json").unlink()
    shard, document = model / PARTS[1], tmp_path / "list.json"
    document.write_text(listing(model))
    (model / name).write_text(json.dumps(CONFIG if name == "config.json" else SETTINGS))
    assert statuses(safeload.verify(shard, document)) == {name: "not covered"}
    document.write_text(listing(model))
    assert safeload.verify(shard, document).ok
    (model / name).write_text("{}")
    assert statuses(safeload.verify(shard, document)) == {name: "changed"}
    (model / name).unlink()
    assert statuses(safeload.verify(shard, document)) == {name: "missing"}


def test_verify_of_an_adapter_compares_its_settings(tmp_path):
    arrays = {"base_model.model.l.lora_A.weight": np.ones((2, 4), np.float32)}
    safeload.numpy.save_file(arrays, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    (tmp_path / "list.json").write_text(listing(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 8}')
    report = safeload.verify(tmp_path / "adapter_model.safetensors", tmp_path / "list.json")
    assert statuses(report) == {"adapter_config.json": "changed"}


def test_a_file_that_is_no_checkpoint_is_compared_alone(model, tmp_path):
    (tmp_path / "list.json").write_text(listing(model, "config.json"))
    report = safeload.verify(model / "config.json", tmp_path / "list.json")
    assert [(file.file, file.status) for file in report.files] == [("config.json", "ok")]


def test_a_shard_that_stands_for_a_folder_is_compared_with_the_folder(tmp_path):
    (model,) = [path for path in (DATA / "dcp").iterdir() if (path / ".metadata").is_file()][:1]
    folder = shutil.copytree(model, tmp_path / "model")
    (tmp_path / "list.json").write_text(listing(folder))
    assert safeload.verify(folder / ".metadata", tmp_path / "list.json").ok
    part = next(path for path in sorted(folder.iterdir()) if path.suffix == ".distcp")
    part.write_bytes(part.read_bytes() + b"x")
    assert part.name in statuses(safeload.verify(folder / ".metadata", tmp_path / "list.json"))


# ---- reading ----


@pytest.mark.parametrize("name", ["config.json", PARTS[1]])
def test_reading_consumes_no_file_that_is_not_listed(name, model, tmp_path):
    (tmp_path / "list.json").write_text(listing(model, *({*PARTS, INDEX} - {name})))
    for path in (model, model / INDEX, model / PARTS[1]):
        with pytest.raises(VerificationError, match="does not cover"):
            safeload.load(path, dtype="float32", verify=tmp_path / "list.json")


def test_a_conversion_copies_no_file_that_is_not_listed(model, tmp_path):
    (tmp_path / "list.json").write_text(listing(model, *({*PARTS, INDEX} - {"tokenizer.json"})))
    with pytest.raises(VerificationError, match=r"tokenizer\.json"):
        safeload.convert(model, tmp_path / "out", dtype="float16", verify=tmp_path / "list.json")


# ---- manifests ----


@pytest.mark.parametrize("path", ["", INDEX, PARTS[1], PARTS[2]])
@pytest.mark.parametrize("place", ["list.json", "model/list.json", "model/model.sig"])
def test_a_fresh_manifest_lists_what_verify_compares(path, place, model, tmp_path, capsys):
    (model / "other.json").write_text(json.dumps({"safeload_manifest": 1, "tensors": {}}))
    written = tmp_path / place
    command = ["verify", str(model / path), "--write", str(written)]
    for _ in range(2):  # the second takes the place of the first
        main(command)
        names = set(json.loads(written.read_text())["files"])
        report = safeload.verify(model / path, written)
        assert report.ok, str(report)
        assert names == {file.file for file in report.files}
        assert written.name not in names
        assert ("other.json" in names) == (not path)
    if path != PARTS[2]:
        (model / "config.json").write_text(json.dumps({"safeload_manifest": 1, **CONFIG}))
        assert statuses(safeload.verify(model / path, written)) == {"config.json": "changed"}


def test_a_long_header_hides_nothing(model, tmp_path):
    """What is read is what `open` reads, whatever a header says of itself."""
    (tmp_path / "list.json").write_text(listing(model))
    shard = model / PARTS[2]
    head = json.dumps({"__metadata__": {"safeload_manifest": "1"}}).encode()
    shard.write_bytes(struct.pack("<Q", len(head)) + head)
    assert statuses(safeload.verify(shard, tmp_path / "list.json")) == {PARTS[2]: "changed"}
