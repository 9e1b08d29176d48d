"""What a user gets wrong, and what the message then says: one row for each mistake."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import safeload
from safeload.cli import main
from safeload.numpy import load_file, save_file

W = np.arange(256, dtype=np.float32).reshape(4, 64)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with one good file, and a home and a cache of the Hub of its own."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(home))
    for variable in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    save_file({"w": W, "embed": W}, "good.safetensors", durable=False)
    return tmp_path


def message(call, *kinds):
    """The message of the error that a call raises, which is of these kinds."""
    with pytest.raises(kinds or Exception) as caught:
        call()
    return str(caught.value)


def assert_says(text, *parts):
    """The message contains these parts; none that begins with "not: "."""
    for part in parts:
        if part.startswith("not: "):
            assert part[5:] not in text
        else:
            assert part in text


# ---- paths ----

SNAPSHOT = 'safeload.open(huggingface_hub.snapshot_download("meta-llama/Llama-3.2-1B"))'
LOCAL = "safeload opens local files: download it first"
PATHS = {
    "a plain name": ("missing.safetensors", ["not: ;"]),
    "a repository": ("meta-llama/Llama-3.2-1B", [SNAPSHOT]),
    "a repository and a slash": ("meta-llama/Llama-3.2-1B/", [SNAPSHOT]),
    "a folder that is here": ("home/Llama-3.2-1B", ["not: Hugging Face"]),
    "a file in a folder": ("checkpoints/model.safetensors", ["not: Hugging Face"]),
    "hf://": ("hf://a/b@v1", [LOCAL, 'huggingface_hub.snapshot_download("a/b", revision="v1")']),
    "a file of hf://": ("hf://a/b/x/c.gguf", [LOCAL, 'huggingface_hub.hf_hub_download("a/b", "x/c.gguf")']),
    "a data set of hf://": ("hf://datasets/a/b", ['snapshot_download("a/b", repo_type="dataset")']),
    "a page of the Hub": ("https://huggingface.co/a/b", [LOCAL, 'huggingface_hub.snapshot_download("a/b")']),
    "a link of the Hub": (
        "https://huggingface.co/a/b/resolve/main/c.safetensors",
        [LOCAL, 'huggingface_hub.hf_hub_download("a/b", "c.safetensors")'],
    ),
    "a URL": ("https://example.org/a b.gguf", [LOCAL, "curl -LO 'https://example.org/a b.gguf'"]),
    "a signed URL": (
        "https://me:password@example.org/a.gguf?sig=secret" + "x" * 300,
        ["https://example.org/a.gguf;", LOCAL, "curl -LO URL", "not: secret", "not: password"],
    ),
    "a URL of JSON": ("https://example.org/index.json", [LOCAL]),
    "a URL through pathlib": (Path("s3://bucket/a.gguf"), [LOCAL, "aws s3 cp s3://bucket/a.gguf ."]),
    "gs://": ("gs://bucket/a.gguf", [LOCAL, "gcloud storage cp gs://bucket/a.gguf ."]),
    "an unknown scheme": ("ipfs://x", [LOCAL]),
    "a broken URL": ("https://[x/", [LOCAL]),
    "file://": ("file:///a/b.gguf", ["pass the path itself, '/a/b.gguf'"]),
    "a drive": ("C:/models/a.gguf", ["not: URL", "not: download"]),
    "~ and no file": ("~/a.gguf", ["`~` is not expanded: os.path.expanduser gives ", "where there is nothing either"]),
    "~": ("~/b.gguf", ["`~` is not expanded: os.path.expanduser gives ", "b.gguf", "not: nothing"]),
    "a pattern": ("*.safetensors", ["patterns are not expanded: safeload.open takes a list, as sorted(glob.glob"]),
    "a pattern without a match": (
        "*.nothing",
        ["patterns are not expanded, and nothing matches this one", "not: list"],
    ),
    "an index": ("model.safetensors.index.json", ["not: ;"]),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_path_that_leads_nowhere(case, here):
    path, parts = PATHS[case]
    (here / "home" / "b.gguf").touch()
    ways = [safeload.open, safeload.load, lambda path: safeload.convert(path, "out.npz"), safeload.validate]
    texts = {message(lambda way=way: way(path), FileNotFoundError) for way in [*ways, load_file]}
    (text,) = texts  # the same from all of them
    shown = (
        os.fspath(path).replace(os.sep, "/").partition("?")[0].replace("me:password@", "").replace("s3:/b", "s3://b")
    )
    assert text.startswith(f"No such file or directory: {shown}")
    assert_says(text, *parts)


def test_the_pattern_of_the_message_works(here):
    assert list(safeload.open(sorted(here.glob("*.safetensors")))) == ["embed", "w"]


def test_a_repository_in_the_cache_is_named(here):
    cache = here / "cache" / "models--owner--name"
    for commit in ("old", "new"):
        (cache / "snapshots" / commit).mkdir(parents=True)
        save_file({"w": W}, cache / "snapshots" / commit / "model.safetensors", durable=False)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("old")
    text = message(lambda: safeload.open("owner/name"), FileNotFoundError)
    folder = str(cache / "snapshots" / "old")
    assert_says(text, f"the cache of huggingface_hub has this repository: safeload.open({folder!r})", "not: download")
    assert list(safeload.open(folder)) == ["w"]
    (cache / "snapshots" / "old" / "model.safetensors").unlink()
    assert_says(message(lambda: safeload.open("owner/name")), repr(str(cache / "snapshots" / "new")))
    (cache / "snapshots" / "new" / "model.safetensors").unlink()
    assert_says(message(lambda: safeload.open("owner/name")), "snapshot_download", "not: cache")


def test_the_command_line_says_it_too(here, capsys):
    assert main(["info", "hf://a/b"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert_says(err, "safeload: No such file or directory: hf://a/b; " + LOCAL)


def test_a_missing_file_is_a_plain_file_not_found_error(here):
    with pytest.raises(FileNotFoundError) as caught:
        load_file("missing")
    error = caught.value
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (str(one), one.filename, one.errno) == ("No such file or directory: missing", "missing", 2)
        assert (type(one).__module__, type(one).__qualname__) == ("builtins", "FileNotFoundError")
    program = "import safeload; safeload.open('missing')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "FileNotFoundError: No such file or directory: missing"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_the_content_of_a_file_is_not_a_path(kind, here):
    data = kind((here / "good.safetensors").read_bytes() * 1000)
    for way in (safeload.open, load_file):
        text = message(lambda way=way: way(data), TypeError)
        assert_says(text, "a path, not the content of a file", "safeload.numpy.load(data)")
        assert len(text) < 300
