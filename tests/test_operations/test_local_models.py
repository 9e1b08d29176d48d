"""`safeload.local_models` and `safeload ls`: models on this machine, wherever they are, however damaged."""

import json
import os
import sys

import numpy as np
import pytest
from builders import inside
from builders.inside import main

import safeload
import safeload.gguf
from safeload.numpy import save, save_file

pytestmark = pytest.mark.no_core

WEIGHTS = {"w": np.arange(6, dtype=np.float32)}
COMMITS = ["a" * 40, "b" * 40]


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    for name in ("OLLAMA_MODELS", "HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(inside.ollama, "_SERVICES", ())
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def write(path, content=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save(WEIGHTS) if content is None else content)
    return path


def gguf(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    safeload.gguf.save_file({"w": np.ones((2, 32), np.float32)}, path)
    return path


def index(*shards):
    return json.dumps({"weight_map": {f"w{k}": name for k, name in enumerate(shards)}}).encode()


def table(models):
    return [(model.name, model.source, model.format, model.path, model.note) for model in models]


def test_nothing_is_found_on_a_new_machine(capsys):
    models = safeload.local_models()
    assert (list(models), models.notes, str(models), models.rows()) == ([], [], "no models found", [])
    assert main(["ls"]) == 0
    assert capsys.readouterr().out == "no models found\n"
    assert main(["ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"models": [], "notes": []}


def test_snapshots_of_the_hub_have_names_that_open(tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--owner--name"
    for commit in COMMITS:
        write(repository / "snapshots" / commit / "model.safetensors")
        write(repository / "snapshots" / commit / "unet" / "model.safetensors")
        write(repository / "snapshots" / commit / "optimizer.pt", b"x")
    write(repository / "refs" / "main", COMMITS[1].encode())
    write(repository / "refs" / "refs" / "pr" / "1", COMMITS[0].encode())
    write(tmp_path / "hub" / "datasets--owner--data" / "snapshots" / COMMITS[0] / "x.safetensors")
    write(tmp_path / "hub" / "models--gpt2" / "snapshots" / COMMITS[0] / "model.safetensors")
    models = safeload.local_models()
    assert [model.path for model in models] == [
        str(tmp_path / "hub" / "models--gpt2" / "snapshots" / COMMITS[0]),
        "hf://owner/name",
        "hf://owner/name/unet",
        "hf://owner/name@refs%2Fpr%2F1",
        "hf://owner/name@refs%2Fpr%2F1/unet",
    ]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model in models:
        np.testing.assert_array_equal(safeload.load(model.path)["w"], WEIGHTS["w"])


def test_layers_of_ollama_have_names_that_open(tmp_path, monkeypatch):
    folder = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    blob = gguf(folder / "blobs" / f"sha256-{'0' * 64}")
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'0' * 64}"}
    layer["size"] = blob.stat().st_size
    for place, layers in {
        "registry.ollama.ai/library/a/latest": [layer],
        "registry.ollama.ai/library/a/gone": [{**layer, "digest": f"sha256:{'1' * 64}"}],
        "registry.ollama.ai/library/cloud/latest": [],
        "hf.co/o/n/Q4_K_M": [layer],
        "registry.ollama.ai/library/bad/latest": 5,
    }.items():
        write(folder / "manifests" / place, json.dumps({"layers": layers}).encode())
    write(folder / "manifests" / "registry.ollama.ai" / ".DS_Store", b"")
    models = safeload.local_models()
    assert [(model.name, model.format, model.path, bool(model.note)) for model in models] == [
        ("a", "gguf", "ollama://a", False),
        ("a:gone", "gguf", "ollama://a:gone", True),
        ("bad", "", "ollama://bad", True),
        ("hf.co/o/n:Q4_K_M", "gguf", "ollama://hf.co/o/n:Q4_K_M", False),
    ]
    assert models[1].note == "incomplete: 1 of 1 layer missing"
    assert models[0].nbytes == layer["size"]
    assert safeload.load(models[0].path)["w"].all()


def test_models_of_lm_studio_are_where_its_settings_say(home, tmp_path):
    first = gguf(home / ".lmstudio" / "models" / "owner" / "name" / "x-Q4.gguf")
    second = gguf(home / ".cache" / "lm-studio" / "models" / "o" / "n" / "y.gguf")
    third = gguf(tmp_path / "elsewhere" / "o" / "z" / "z.gguf")
    write(home / ".lmstudio" / "settings.json", json.dumps({"downloadsFolder": str(tmp_path / "elsewhere")}).encode())
    models = safeload.local_models()
    assert table(models) == [
        ("o/n", "lmstudio", "gguf", str(second.parent), ""),
        ("o/z", "lmstudio", "gguf", str(third.parent), ""),
        ("owner/name", "lmstudio", "gguf", str(first.parent), ""),
    ]
    for content in (
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 99_999,
        b'{"downloadsFolder": 5}',
        b'{"downloadsFolder": "\\u0000"}',
    ):
        write(home / ".lmstudio" / "settings.json", content)
        assert len(safeload.local_models()) == 2


def test_named_folders_are_searched(tmp_path):
    root = tmp_path / "models"
    write(root / "one" / "model.safetensors")
    write(root / "sharded" / "model-00001-of-00002.safetensors")
    write(root / "sharded" / "model-00002-of-00002.safetensors")
    write(root / "cut" / "model-00001-of-00003.safetensors")
    write(root / "indexed" / "model.safetensors.index.json", index("a.safetensors", "b.safetensors"))
    write(root / "indexed" / "a.safetensors")
    write(root / "broken" / "model.safetensors.index.json", b"{")
    gguf(root / "many" / "x-Q4.gguf")
    gguf(root / "many" / "x-Q8.gguf")
    write(root / "torch" / "pytorch_model.bin", b"x")
    write(root / "other" / "README.md", b"x")
    write(root / ".hidden" / "model.safetensors")
    models = safeload.local_models([root])
    assert [
        (name, format, os.path.relpath(path, root), note[:10]) for name, _, format, path, note in table(models)
    ] == [
        ("broken", "safetensors", "broken", "damaged: i"),
        ("cut/model-00001-of-00003.safetensors", "safetensors", "cut/model-00001-of-00003.safetensors", "incomplete"),
        ("indexed", "safetensors", "indexed", "incomplete"),
        ("many/x-Q4.gguf", "gguf", "many/x-Q4.gguf", ""),
        ("many/x-Q8.gguf", "gguf", "many/x-Q8.gguf", ""),
        ("one", "safetensors", "one", ""),
        ("sharded", "safetensors", "sharded", ""),
        ("torch", "torch", "torch", ""),
    ]
    assert {model.source for model in models} == {"folder"}
    by_name = {model.name: model for model in models}
    assert by_name["sharded"].nbytes == 2 * len(save(WEIGHTS))
    assert by_name["indexed"].note == "incomplete: 1 of 2 shards missing"
    assert by_name["cut/model-00001-of-00003.safetensors"].note.endswith("model-00002-of-00003.safetensors is missing")
    for name in ("one", "many/x-Q4.gguf"):
        assert len(safeload.load(by_name[name].path)) == 1


def test_a_folder_is_a_path_or_several(tmp_path):
    write(tmp_path / "a" / "model.safetensors")
    write(tmp_path / "b" / "model.safetensors")
    assert [model.name for model in safeload.local_models(tmp_path / "a")] == ["a"]
    assert [model.name for model in safeload.local_models(str(tmp_path / "a"))] == ["a"]
    assert [model.name for model in safeload.local_models(iter([tmp_path / "b", tmp_path / "a"]))] == ["a", "b"]
    assert len(safeload.local_models([tmp_path / "a", tmp_path / "a"])) == 1
    with pytest.raises(FileNotFoundError, match="none"):
        safeload.local_models(tmp_path / "none")
    with pytest.raises(NotADirectoryError):
        safeload.local_models(tmp_path / "a" / "model.safetensors")
    with pytest.raises(TypeError):
        safeload.local_models([5])


@pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links and modes")
def test_loops_and_forbidden_folders_are_survived(tmp_path, monkeypatch):
    root = tmp_path / "models"
    write(root / "a" / "model.safetensors")
    os.symlink(root, root / "a" / "loop")
    os.symlink("self", root / "self")
    os.symlink(root / "a", root / "again")
    os.symlink("nowhere", root / "dangling.safetensors")
    os.mkfifo(root / "pipe.safetensors")
    (tmp_path / "hub").mkdir()
    os.symlink("models--x--y", tmp_path / "hub" / "models--x--y")
    refused = {str(root / "secret"), str(tmp_path / "hub")}
    (root / "secret").mkdir()
    scandir, listdir = os.scandir, os.listdir

    def refuse(function):
        def refusing(path="."):
            if str(path) in refused:
                raise PermissionError(13, "Permission denied", str(path))
            return function(path)

        return refusing

    monkeypatch.setattr(os, "scandir", refuse(scandir))
    monkeypatch.setattr(os, "listdir", refuse(listdir))
    models = safeload.local_models(root)
    assert [model.name for model in models] == ["a"]
    assert len(models.notes) == 2
    assert all("Permission denied" in note for note in models.notes)
    assert all(note in str(models) for note in models.notes)


@pytest.mark.skipif(sys.platform == "win32", reason="these names are not allowed there")
def test_hostile_names_are_escaped(tmp_path, capsys):
    name = "\x1b[31m<b>\n"
    write(tmp_path / name / "model.safetensors")
    models = safeload.local_models(tmp_path)
    assert models[0].name == name
    assert main(["ls", str(tmp_path)]) == 0
    for text in (str(models), models._repr_html_(), capsys.readouterr().out):
        assert "\x1b" not in text
        assert "\\x1b[31m" in text
    assert "<b>" not in models._repr_html_()


def test_the_result_is_a_sequence_of_plain_rows(tmp_path, capsys):
    for name in ("m10", "m9"):
        write(tmp_path / name / "model.safetensors")
    models = safeload.local_models(tmp_path)
    assert [model.name for model in models] == ["m9", "m10"]
    assert (len(models), models[0], models[-1:]) == (2, next(iter(models)), list(models)[1:])
    fields = ["name", "source", "format", "nbytes", "path", "note"]
    assert [list(row) for row in models.rows()] == [fields] * 2
    assert {type(value) for row in models.rows() for value in row.values()} == {str, int}
    assert json.loads(json.dumps(models.to_dict())) == {"models": models.rows(), "notes": []}
    assert repr(models) == "<LocalModels: 2 models>"
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == models.to_dict()
    assert main(["ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == str(models).splitlines()
    assert lines[0].split() == ["model", "format", "size", "open"]
    assert lines[-1].startswith("2 models, ")
    assert main(["ls", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err


def test_a_snapshot_of_huggingface_hub_itself(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("urllib3")
    from builders.hub import Hub, Repository

    with Hub() as server:
        server.repositories["owner/name"] = repository = Repository()
        commit = repository.commit({"config.json": b"{}", "model.safetensors": save({"w": np.ones(999, np.float32)})})
        for revision in (None, commit):
            huggingface_hub.snapshot_download(
                "owner/name", revision=revision, endpoint=server.url(), token=False, cache_dir=tmp_path / "hub"
            )
    [model] = safeload.local_models()
    assert (model.name, model.source, model.format, model.path) == (
        "owner/name",
        "hub",
        "safetensors",
        "hf://owner/name",
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert safeload.load(model.path)["w"].sum() == 999


def test_a_saved_model_is_listed_with_its_size(tmp_path):
    save_file(WEIGHTS, tmp_path / "x.safetensors")
    [model] = safeload.local_models(tmp_path)
    assert model.nbytes == (tmp_path / "x.safetensors").stat().st_size
