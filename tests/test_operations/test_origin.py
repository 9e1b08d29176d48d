"""`convert(record=True)`: what was read, how, and what was written, beside the result, for `verify`."""

import hashlib
import json
import re
import shutil

import numpy as np
import pytest
from builders.http_server import Server
from builders.hub import Hub
from builders.inside import main
from builders.models import small, write_folder
from builders.random import rng

import safeload
from safeload.numpy import save_file

X = np.float32(rng.standard_normal((8, 32)))


@pytest.fixture
def model(tmp_path):
    (tmp_path / "tiny").mkdir()
    write_folder(tmp_path / "tiny", *small("llama"))
    return tmp_path / "tiny"


def entry(path):
    return {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["a.safetensors", "a.gguf", "a.npz", "a.npy", "a.moon", "copy.safetensors"])
def test_a_file_has_a_record_beside_it_and_the_same_bytes(tmp_path, name):
    save_file({"w": X}, tmp_path / "source.safetensors")
    options = {} if name.startswith("copy") else {"dtype": "float32"}
    if name == "a.moon":
        options = {"format": "moon", "dtype": "float16"}
    plain, recorded = tmp_path / "plain" / name, tmp_path / "recorded" / name
    for path in (plain, recorded):
        path.parent.mkdir()
        safeload.convert(tmp_path / "source.safetensors", path, raw=True, record=path == recorded, **options)
    assert list(plain.parent.iterdir()) == [plain]
    assert plain.read_bytes() == recorded.read_bytes()
    record = json.loads((recorded.parent / f"{name}.origin.json").read_text())
    assert record["files"] == {name: entry(recorded)}
    assert record["origin"]["sources"] == [
        {"name": "source.safetensors", "files": {"source.safetensors": entry(tmp_path / "source.safetensors")}}
    ]
    assert record["origin"]["version"] == safeload.__version__
    assert str(tmp_path) not in json.dumps(record)
    assert safeload.verify(recorded).ok
    assert safeload.verify(recorded, tmp_path / "source.safetensors").ok


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_has_a_record_of_all_its_files(model, tmp_path, resume):
    for name in ("plain", "out"):
        safeload.convert(
            model, tmp_path / name, dtype="float16", max_shard_size="100KB", resume=resume, record=name == "out"
        )
    written = contents(tmp_path / "out")
    record = json.loads(written.pop("origin.json"))
    assert written == contents(tmp_path / "plain")
    assert record["files"] == {path.name: entry(path) for path in sorted((tmp_path / "plain").iterdir())}
    assert record["origin"]["options"] == {"dtype": "float16", "max_shard_size": 100_000, "format": "safetensors"}
    assert record["origin"]["sources"][0]["files"] == {path.name: entry(path) for path in sorted(model.iterdir())}
    report = safeload.verify(tmp_path / "out")
    assert (report.ok, report.source) == (True, str(tmp_path / "out" / "origin.json"))
    (tmp_path / "out" / "notes.txt").write_text("not by the conversion")
    assert safeload.verify(tmp_path / "out").ok
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    assert safeload.verify(tmp_path / "copy", tmp_path / "out").ok  # a copy, no source
    shard = next((tmp_path / "out").glob("*-00001-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    assert [check.file for check in safeload.verify(tmp_path / "out").faults] == [shard.name]


def test_options_that_no_record_can_hold_are_refused_before_anything_is_written(tmp_path):
    save_file({"w": X}, tmp_path / "source.safetensors")
    renames = {re.compile("W", re.IGNORECASE): "v"}, [("w", lambda match: "v")]
    for rename, why in zip(renames, ("store patterns as text", "cannot hold a function"), strict=True):
        with pytest.raises(ValueError, match=why):
            safeload.convert(tmp_path / "source.safetensors", tmp_path / "a.npz", rename=rename, record=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source.safetensors"]


def test_a_changed_source_is_named(model, tmp_path, capsys):
    safeload.convert(model, tmp_path / "tiny.gguf", raw=True, record=True)
    assert main(["verify", str(tmp_path / "tiny.gguf"), "--against", str(model)]) == 0
    (model / "config.json").write_text("{}")
    report = safeload.verify(tmp_path / "tiny.gguf", model)
    assert [check.file for check in report.faults] == [str(model / "config.json")]
    other = tmp_path / "other.safetensors"
    save_file({"w": X}, other)
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "tiny.gguf"), "--against", str(other)]) == 2
    assert "records no source with these files" in capsys.readouterr().err


def test_a_source_at_a_url_is_refused_without_its_secrets(model, tmp_path):
    safeload.convert(model, tmp_path / "out", dtype="float16", record=True)
    with pytest.raises(safeload.VerificationError, match="pass a source on this machine") as caught:
        safeload.verify(tmp_path / "out", "https://user:secret@example.com/m.safetensors?token=secret")
    assert "secret" not in str(caught.value)


def test_a_missing_file_of_the_result_is_named_beside_its_source(model, tmp_path):
    safeload.convert(model, tmp_path / "out", dtype="float16", record=True)
    (tmp_path / "out" / "config.json").unlink()
    faults = safeload.verify(tmp_path / "out", model).faults
    assert [(check.file, check.status) for check in faults] == [("config.json", "missing")]


def test_paths_and_secrets_stay_out(tmp_path):
    save_file({"w": X}, tmp_path / "w.safetensors")
    with Server(tmp_path) as server:
        url = server.url("/w.safetensors").replace("://", "://user:secret@") + "?token=secret"
        safeload.convert(url, tmp_path / "out.npz", record=True, storage_options={"headers": {"Cookie": "secret"}})
    text = (tmp_path / "out.npz.origin.json").read_text()
    source = json.loads(text)["origin"]["sources"][0]
    assert source["url"].endswith("/w.safetensors")
    assert source["files"]["w.safetensors"]["size"] == (tmp_path / "w.safetensors").stat().st_size
    assert "secret" not in text
    assert str(tmp_path) not in text


@pytest.mark.skipif(not hasattr(shutil.os, "symlink"), reason="no symbolic links")
def test_a_snapshot_of_the_hub_names_its_revision(tmp_path):
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("ab" * 20)
    snapshot.mkdir(parents=True)
    save_file({"w": X}, snapshot / "model.safetensors")
    safeload.convert(snapshot, tmp_path / "out.npz", record=True)
    source = json.loads((tmp_path / "out.npz.origin.json").read_text())["origin"]["sources"][0]
    assert (source["repository"], source["revision"]) == ("owner/name", "ab" * 20)
    notes = safeload.info(tmp_path / "out.npz").notes
    assert notes[0].startswith(f"converted from owner/name at {'ab' * 20} by safeload {safeload.__version__}")


def test_a_source_from_the_hub_is_recorded_at_its_commit(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no cache"))
    for name in ("HF_HUB_OFFLINE", "SAFELOAD_OFFLINE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    save_file({"w": X}, tmp_path / "model.safetensors")
    with Hub() as server:
        server.add("owner/name", {"model.safetensors": (tmp_path / "model.safetensors").read_bytes()})
        options = {"endpoint": server.url(), "token": False}
        safeload.convert("hf://owner/name", tmp_path / "out.npz", record=True, storage_options=options)
    [source] = json.loads((tmp_path / "out.npz.origin.json").read_text())["origin"]["sources"]
    assert source["repository"] == "owner/name"
    assert re.fullmatch("[0-9a-f]{40}", source["revision"])
    assert source["url"] == f"hf://owner/name@{source['revision']}"
    assert [*source["files"]] == ["model.safetensors"]


def test_a_file_that_is_no_record_stays(tmp_path, capsys):
    save_file({"w": X}, tmp_path / "w.safetensors")
    out = tmp_path / "out"
    out.mkdir()
    (out / "out.npz.origin.json").write_text("mine")
    with pytest.raises(FileExistsError, match="is not a safeload record"):
        safeload.convert(tmp_path / "w.safetensors", out / "out.npz", record=True)
    assert [path.name for path in out.iterdir()] == ["out.npz.origin.json"]
    assert safeload.info(tmp_path / "w.safetensors").notes == []
    with pytest.raises(ValueError, match="pass a path"), open(tmp_path / "new", "wb") as file:
        safeload.convert(tmp_path / "w.safetensors", file, record=True)
    assert main(["convert", str(tmp_path / "w.safetensors"), "-", "--record"]) == 2
    safeload.convert({"w": X}, tmp_path / "memory.npz", record=True)
    record = json.loads((tmp_path / "memory.npz.origin.json").read_text())
    assert record["origin"]["sources"] == [{"name": "tensors in memory", "files": {}}]


@pytest.mark.parametrize("origin", [None, [], {"sources": 1}, {"sources": [1]}, {"sources": [{"files": {"../x": {}}}]}])
def test_a_hostile_record(tmp_path, origin):
    save_file({"w": X}, tmp_path / "w.safetensors")
    shutil.copy(tmp_path / "w.safetensors", tmp_path / "s.safetensors")
    record = {"safeload_manifest": 1, "files": {"w.safetensors": entry(tmp_path / "w.safetensors")}, "origin": origin}
    (tmp_path / "w.safetensors.origin.json").write_text(json.dumps(record))
    assert safeload.verify(tmp_path / "w.safetensors").ok
    safeload.info(tmp_path / "w.safetensors")
    with pytest.raises(safeload.VerificationError, match="records no source"):
        safeload.verify(tmp_path / "w.safetensors", tmp_path / "s.safetensors")
