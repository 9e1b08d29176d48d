"""Files that commands write: what they replace, and what they refuse to."""

import json
import os
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest
from builders import inside
from builders.inside import main

import safeload
from safeload.numpy import save_file

W = {"w": np.ones((2, 2), np.float32)}
POSIX = pytest.mark.skipif(os.name == "nt", reason="not on Windows")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """m/ with weights, a config and notes, alone.safetensors, and other.safetensors that no command reads."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("m")
    for path in ("m/model.safetensors", "alone.safetensors", "other.safetensors"):
        save_file(W, path)
    (tmp_path / "m" / "config.json").write_text('{"model_type": "x"}')
    (tmp_path / "m" / "notes.txt").write_text("mine")
    index = {"weight_map": {"w": "model.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.fixture(params=["verify", "report"])
def write(request, capsys):
    """Runs a command that writes a file; its exit status, stdout and stderr."""

    def run(source, path, *more):
        option = {"verify": "--write", "report": "--output"}[request.param]
        status = main([request.param, str(source), option, str(path), *more])
        return (status, *capsys.readouterr())

    run.command, run.failed = request.param, {"verify": 2, "report": 1}[request.param]
    run.kind = {"verify": "manifest", "report": "report"}[request.param]
    return run


def content(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", ["other.safetensors", "m/../other.safetensors", "notes.txt", "page.html", "m.json"])
def test_a_file_of_something_else_stays(folder, write, name):
    for text in ("notes.txt", "page.html", "m.json"):
        (folder / text).write_text('<!doctype html><p>{"safeload_manifest": 1}')
    before = content(folder)
    status, out, err = write("m", name)
    kind = write.kind
    assert (status, out) == (write.failed, "")
    assert err == f"safeload: {name} already exists and is not a safeload {kind}; pass --overwrite to replace it\n"
    assert content(folder) == before
    assert write("m", name, "--overwrite")[0] == 0
    assert write("m", name)[0] == 0  # now safeload has written it
    assert [path.name for path in folder.rglob("*.tmp")] == []


def test_each_command_knows_only_its_own_files(folder, capsys):
    assert main(["verify", "m", "--write", "a"]) == main(["report", "m", "-o", "b"]) == 0
    before = content(folder)
    assert (main(["verify", "m", "--write", "b"]), main(["report", "m", "-o", "a"])) == (2, 1)
    assert content(folder) == before


SOURCES = {
    "the file": ("alone.safetensors", "alone.safetensors"),
    "another spelling": ("alone.safetensors", "./m/../alone.safetensors"),
    "a hard link": ("alone.safetensors", "hard"),
    "a symlink": ("alone.safetensors", "soft"),
    "weights of a folder": ("m", "m/model.safetensors"),
    "the config of a folder": ("m", "m/config.json"),
    "another file of a folder": ("m", "m/notes.txt"),
    "a symlink into a folder": ("m/", "into"),
    "a shard of an index": ("m/model.safetensors.index.json", "m/model.safetensors"),
    "an index": ("m/model.safetensors.index.json", "m/model.safetensors.index.json"),
    "the config beside an index": ("m/model.safetensors.index.json", "m/config.json"),
    "a file that cannot be opened": ("bad.safetensors", "bad.safetensors"),
}


@POSIX
@pytest.mark.parametrize("case", SOURCES)
@pytest.mark.parametrize("more", [(), ("--overwrite",)], ids=str)
def test_no_source_is_replaced(folder, write, case, more):
    os.link("alone.safetensors", "hard")
    os.symlink("alone.safetensors", "soft")
    os.symlink("m/config.json", "into")
    (folder / "bad.safetensors").write_bytes(b"not weights at all")
    before = content(folder)
    source, path = SOURCES[case]
    status, _, err = write(source, path, *more)
    assert (status, err) == (2, err)
    assert err.startswith(f"safeload: {path} would replace ")
    assert err.endswith(", which is read: choose another path\n")
    assert content(folder) == before


def test_a_source_by_its_url(folder, write):
    path = folder / "alone.safetensors"
    assert write(path.as_uri(), path, "--overwrite")[0] == 2
    assert write(path, path.as_uri(), "--overwrite")[2].endswith(f"needs a local file, got {path.as_uri()}\n")
    assert write(path, "s3://key:secret@bucket/page", "--overwrite")[2].count("secret") == 0


def test_a_neighbour_of_a_file_is_no_source(folder, write):
    (folder / "notes.txt").write_text("mine")
    assert "source" not in write("alone.safetensors", "notes.txt")[2]
    assert write("alone.safetensors", "notes.txt", "--overwrite")[0] == 0
    assert write("m", "m/new.txt")[0] == write("m", "m/new.txt")[0] == 0


def test_an_empty_file_is_replaced(folder, write):
    (folder / "new").touch()
    assert write("m", "new")[0] == 0
    assert (folder / "new").stat().st_size > 100


@pytest.mark.parametrize("path", ["m", "missing/new", "new/", ""])
def test_a_path_that_cannot_be_written_is_told_first(folder, write, path, monkeypatch):
    monkeypatch.setattr(safeload.Checkpoint, "__enter__", None)  # as a model is checked, or shown in a report
    status, out, err = write("m", path, "--overwrite")
    assert (status, out) == (write.failed, "")
    assert err.startswith("safeload: ")


@POSIX
def test_symlinks_modes_and_devices(folder, write):
    os.symlink("real", "link")  # leads nowhere yet
    for _ in range(2):
        assert write("m", "link")[0] == 0
    assert os.path.islink("link")
    os.chmod("real", 0o440)
    assert write("m", "link")[0] == 0
    assert stat.S_IMODE(os.stat("real").st_mode) == 0o440
    assert write("m", "/dev/null")[0] == 0
    os.mkfifo("pipe")
    texts = []
    reader = threading.Thread(target=lambda: texts.append((folder / "pipe").read_text("utf-8")))
    reader.start()
    assert write("m", "pipe")[0] == 0
    reader.join()
    assert texts[0]


def test_a_file_that_comes_meanwhile_stays(folder, write, monkeypatch):
    """It is created after the last look, when the text is about to be put in place."""
    check = inside.destinations.Output.check

    def late(self, sources=()):
        replaces = check(self, sources)
        if sources:
            (folder / "new").write_text("somebody's")
        return replaces

    monkeypatch.setattr(inside.destinations.Output, "check", late)
    status, _, err = write("m", "new")
    assert (status, "pass --overwrite to replace it" in err) == (write.failed, True)
    assert (folder / "new").read_text() == "somebody's"
    assert not list(folder.rglob("*.tmp"))


def test_stdout(folder, capfdbinary):
    done = subprocess.run(
        [sys.executable, "-m", "safeload", "report", "m", "-o", "-"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("<!doctype html>")
    assert done.stdout.endswith("</html>\n")
    assert done.stderr.startswith("stdout: ")
    assert main(["report", "m", "-o", "-", "--json"]) == main(["verify", "m", "--write", "-"]) == 2
    assert not os.path.exists("-")
