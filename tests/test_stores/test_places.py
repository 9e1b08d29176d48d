"""What callers pass as a path: locations, lists of them beside URLs, and what their errors may not say."""

import pickle
import traceback
from pathlib import Path

import numpy as np
import pytest
from builders.http_server import Server
from builders.inside import LOCAL, RemoteFiles, atomic_file
from builders.remote import Served

import safeload
import safeload.numpy
import safeload.remote

SECRETS = ("pass-word", "sig-nature", "frag-ment")
URL = "https://user:pass-word@host/m.safetensors?sig=sig-nature#frag-ment"


def everything(error):
    """All that an error, and those behind it, say."""
    found = []
    while error is not None:
        found += [str(error), repr(error), repr(error.args), repr(vars(error)), *traceback.format_exception_only(error)]
        found += [repr(getattr(error, name, None)) for name in ("filename", "filename2", "strerror", "__notes__")]
        error = error.__context__
    return "\n".join(found)


def test_a_location_is_a_path_in_a_store():
    files = RemoteFiles({"key": "se-cret"})
    folder = safeload.remote.Location(files, "s3://user:pass-word@bucket/model")
    assert (repr(folder), str(folder), folder.shown) == ("<Location s3://bucket/model>", *["s3://bucket/model"] * 2)
    file = folder / "a.safetensors"
    assert file.path == "s3://user:pass-word@bucket/model/a.safetensors"
    assert file == folder / "a.safetensors"
    assert len({file, folder / "a.safetensors", folder}) == 2
    assert file not in (folder, "s3://bucket/model/a.safetensors")
    kept = pickle.dumps(file)
    assert b"pass-word" not in kept
    assert b"se-cret" not in kept
    assert pickle.loads(kept).path == "s3://bucket/model/a.safetensors"


def test_a_location_of_this_machine_is_opened_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    safeload.numpy.save_file({"w": np.ones(3)}, "a.safetensors")
    location = safeload.remote.Location(LOCAL, "a.safetensors")
    assert list(safeload.load(location)) == ["w"]
    assert pickle.loads(pickle.dumps(location)).path == str(tmp_path / "a.safetensors")


def test_a_list_has_paths_of_one_store_and_of_this_machine(tmp_path):
    safeload.numpy.save_file({"here": np.ones(3)}, tmp_path / "a.safetensors")
    content = {f"mem://m/{name}.safetensors": safeload.numpy.save({name: np.ones(3)}) for name in "xy"}
    folder = Served(content).at("mem://m")
    here = tmp_path / "a.safetensors"
    assert set(safeload.load([folder / "x.safetensors", folder / "y.safetensors"])) == {"x", "y"}
    assert set(safeload.load([folder / "x.safetensors", here, folder / "y.safetensors"])) == {"x", "here", "y"}
    with Server({"/b.safetensors": safeload.numpy.save({"there": np.ones(3)})}) as server:
        for local in (here, str(here)):
            assert set(safeload.load([local, server.url("/b.safetensors")])) == {"here", "there"}


@pytest.mark.parametrize("first", ["location", "url"])
def test_a_url_is_not_looked_for_in_a_store_of_the_caller(first, tmp_path):
    several = [Served({}).at("mem://m/a.safetensors"), str(tmp_path), "https://host/b.safetensors"]
    with pytest.raises(ValueError, match="must be in one store"):
        safeload.open(several if first == "location" else several[::-1])


def test_a_url_with_a_nul_is_refused_as_a_path_is():
    with pytest.raises(ValueError, match="embedded null byte in path 'https://host/a\\\\x00b'"):
        safeload.open("https://user:pass-word@host/a\0b?sig=sig-nature")


@pytest.mark.parametrize("path", [URL, Path(URL), URL.encode(), URL + "x" * 5000], ids=["str", "Path", "bytes", "long"])
@pytest.mark.parametrize("function", ["load_file", "save_file", "AtomicFile", "convert"])
def test_functions_for_local_files_do_not_repeat_the_secrets_of_a_url(path, function):
    call = {
        "load_file": safeload.numpy.load_file,
        "save_file": lambda path: safeload.numpy.save_file({"w": np.ones(3)}, path),
        "AtomicFile": lambda path: atomic_file.AtomicFile(path, 5),
        "convert": lambda path: safeload.convert({"w": np.ones(3)}, path),
    }[function]
    with pytest.raises((OSError, ValueError, safeload.UnsupportedError, TypeError)) as caught:
        call(path)
    said = everything(caught.value)
    assert not any(secret in said for secret in SECRETS)
    if function in ("save_file", "AtomicFile"):
        assert "safeload.convert(..., URL) writes folders in stores" in str(caught.value)
        assert isinstance(caught.value, FileNotFoundError)
