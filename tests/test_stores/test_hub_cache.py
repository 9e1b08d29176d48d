"""hf:// URLs and the cache of huggingface_hub: its files are opened, and nothing is requested that it has."""

import hashlib
import json
import os
import pickle
import shutil
import sys
from contextlib import suppress

import numpy as np
import pytest

pytest.importorskip("huggingface_hub")
pytest.importorskip("urllib3")

import huggingface_hub
from builders.hub import Hub
from builders.inside import RemoteFiles, local

import safeload
from safeload import FormatError, UnsupportedError, VerificationError
from safeload.numpy import save

pytestmark = pytest.mark.store_packages

A, B = save({"a": np.arange(500, dtype=np.float32)}), save({"b": np.ones(700, np.float16)})
INDEX = json.dumps({"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}).encode()
FILES = {
    "config.json": b'{"model_type": "none"}',
    "model.safetensors.index.json": INDEX,
    "a.safetensors": A,
    "b.safetensors": B,
    "unet/model.safetensors": B,
}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "SAFELOAD_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "HF_HOME", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def server():
    with Hub() as server:
        server.add("owner/name", FILES)
        yield server


@pytest.fixture
def repository(server):
    return server.repositories["owner/name"]


def download(server, cache, **options):
    """Have huggingface_hub fill its cache; return the commit."""
    options = {"endpoint": server.url(), "token": False, "cache_dir": cache, **options}
    folder = huggingface_hub.snapshot_download("owner/name", **options)
    server.requests.clear()
    server.cdn.requests.clear()
    return os.path.basename(folder)


def options_of(server):
    return {"endpoint": server.url(), "token": False}


def load(server, url):
    with safeload.open(url, storage_options=options_of(server)) as checkpoint:
        return checkpoint.config, checkpoint.load()


def assert_right(loaded):
    config, arrays = loaded
    assert config == {"model_type": "none"}
    np.testing.assert_array_equal(arrays["a"], np.arange(500, dtype=np.float32))
    assert arrays["b"].tolist() == [1.0] * 700


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "SAFELOAD_OFFLINE"])
@pytest.mark.parametrize("revision", ["", "@main", "@{}"])
def test_nothing_is_asked_offline(variable, revision, server, cache, monkeypatch):
    commit = download(server, cache)
    monkeypatch.setenv(variable, "1")
    assert_right(load(server, f"hf://owner/name{revision.format(commit)}"))
    assert not server.kinds


def test_a_complete_snapshot_of_a_commit_takes_no_request(server, cache):
    commit = download(server, cache)
    assert_right(load(server, f"hf://owner/name@{commit}"))
    files = RemoteFiles(options_of(server))
    assert files.listing(f"hf://owner/name@{commit}/unet") == [("model.safetensors", False)]
    assert isinstance(files.open(f"hf://owner/name@{commit}/unet/model.safetensors"), local.LocalStore)
    assert not server.kinds


def test_a_branch_takes_one_request_for_its_commit(server, cache):
    download(server, cache)
    assert_right(load(server, "hf://owner/name"))
    assert server.kinds == {"api": 1}


def test_a_branch_that_has_moved_is_read_at_its_new_commit(server, repository, cache):
    download(server, cache)
    repository.commit({**FILES, "a.safetensors": save({"a": np.zeros(500, np.float32)})})
    _, arrays = load(server, "hf://owner/name")
    assert not arrays["a"].any()
    assert server.kinds["resolve"] == 4  # another commit, whose files are not in the cache


def test_what_is_missing_comes_from_the_hub(server, cache):
    commit = download(server, cache, allow_patterns=["config.json", "a.*", "*.index.json"])
    assert_right(load(server, f"hf://owner/name@{commit}"))
    assert server.kinds == {"resolve": 1, "cdn": server.kinds["cdn"]}
    assert [request.path.rpartition("/")[2] for request in server.requests] == ["b.safetensors"]


def test_what_is_missing_offline_is_named(server, cache, monkeypatch):
    download(server, cache, allow_patterns=["config.json", "a.*", "*.index.json"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors"):
        load(server, "hf://owner/name")
    with pytest.raises(UnsupportedError, match=r"HF_HUB_OFFLINE is set.* no files of 'v2'"):
        load(server, "hf://owner/name@v2")
    with pytest.raises(UnsupportedError, match="HF_HUB_OFFLINE"):
        load(server, "hf://owner/other")
    assert not server.kinds


def test_nothing_is_written_offline(server, cache, monkeypatch, tmp_path):
    download(server, cache)
    monkeypatch.setenv("SAFELOAD_OFFLINE", "1")
    (tmp_path / "x.bin").write_bytes(b"x")
    backend = RemoteFiles(options_of(server)).backend("hf://owner/name")
    for write in (
        lambda: backend.upload(str(tmp_path / "x.bin"), "hf://owner/name/x.bin"),
        lambda: backend.remove(["hf://owner/name/a.safetensors"]),
        lambda: backend.check_writable("hf://owner/name"),
    ):
        with pytest.raises(UnsupportedError, match="SAFELOAD_OFFLINE is set"):
            write()
    assert not server.requests


def test_a_cached_file_is_mapped(server, cache):
    commit = download(server, cache)
    with safeload.open(f"hf://owner/name@{commit}/a.safetensors") as checkpoint:
        assert checkpoint.files == [f"hf://owner/name@{commit}/a.safetensors"]
        assert not checkpoint["a"].flags.owndata


def test_a_cache_without_trees_counts_as_complete_if_its_weights_are(server, cache):
    """As versions of huggingface_hub before 2 leave it."""
    commit = download(server, cache)
    shutil.rmtree(cache / "models--owner--name" / "trees")
    url = f"hf://owner/name@{commit}"
    assert_right(load(server, url))
    assert not server.kinds
    (cache / "models--owner--name" / "snapshots" / commit / "b.safetensors").unlink()
    assert_right(load(server, url))
    assert server.kinds["api"] == server.kinds["resolve"] == 1


@pytest.mark.parametrize(
    ("files", "complete"),
    [
        ({"config.json": b"{}", "model.safetensors": A}, True),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": A}, True),
        ({"model.safetensors": A}, False),
        ({"config.json": b"{}"}, False),
        ({"config.json": b"{}", "x-00001-of-00002.safetensors": A}, False),
        ({"config.json": b"{}", "x-00001-of-00002.safetensors": A, "x-00002-of-00002.safetensors": B}, True),
        ({"config.json": b"{}", "x-00001-of-99999.safetensors": A}, False),
        ({"config.json": b"{}", "model.safetensors.index.json": b"[", "model.safetensors": A}, False),
        ({"config.json": b"{}", "m.index.json": b'{"weight_map": {"a": 5}}', "model.safetensors": A}, False),
    ],
)
def test_a_snapshot_is_complete_with_its_configuration_and_all_weights(files, complete, server, cache):
    """Or the Hub is asked which files there are."""
    commit, folder = server.repositories["owner/name"].refs["main"], cache / "models--owner--name"
    for name, content in files.items():
        path = folder / "snapshots" / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "blobs").mkdir()
    for more, asked in ((), not complete), (("abc.1234.incomplete",), True):
        for name in more:
            (folder / "blobs" / name).write_bytes(b"")
        server.requests.clear()
        server.cdn.requests.clear()
        with suppress(safeload.SafeloadError, FileNotFoundError):  # of weights whose configuration is missing
            load(server, f"hf://owner/name@{commit}")
        assert (server.kinds["api"] > 0) == asked, more
        assert asked or not server.kinds


def test_a_cache_without_symbolic_links_is_read(server, cache, monkeypatch):
    """As on Windows."""
    from huggingface_hub import file_download

    monkeypatch.setattr(file_download, "are_symlinks_supported", lambda *_: False)
    commit = download(server, cache)
    snapshot = cache / "models--owner--name" / "snapshots" / commit
    assert not any(path.is_symlink() for path in snapshot.rglob("*"))
    assert_right(load(server, f"hf://owner/name@{commit}"))
    assert not server.kinds


def test_a_link_to_a_blob_that_is_gone_is_absent(server, cache, monkeypatch):
    commit = download(server, cache)
    snapshot = cache / "models--owner--name" / "snapshots" / commit
    os.remove(os.path.realpath(snapshot / "a.safetensors"))
    assert_right(load(server, f"hf://owner/name@{commit}"))
    assert server.kinds["resolve"] == 1
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"a\.safetensors"):
        load(server, f"hf://owner/name@{commit}")


def shorten(path):
    """Replace a link by a copy without the last bytes; return the length."""
    content = path.read_bytes()[:-10]
    path.unlink()
    path.write_bytes(content)
    return len(content)


def test_a_copy_of_another_size_is_damaged(server, cache, monkeypatch):
    commit = download(server, cache)
    path = cache / "models--owner--name" / "snapshots" / commit / "a.safetensors"
    shorten(path)
    for url in ("hf://owner/name", f"hf://owner/name@{commit}"):
        assert_right(load(server, url))
    assert server.kinds["resolve"] == 2
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FormatError, match=r"the copy in the cache has .* bytes, but the file has"):
        load(server, "hf://owner/name")


def test_a_damaged_index_is_named_offline(server, cache, monkeypatch):
    commit = download(server, cache)
    path = cache / "models--owner--name" / "snapshots" / commit / "model.safetensors.index.json"
    left = shorten(path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FormatError, match=rf"the copy in the cache has {left} bytes, .*model.*index\.json"):
        load(server, "hf://owner/name")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{", b'{"format_version": 2, "files": {"x": {"size": 1}}}', b'{"format_version": 1}',
        b'{"format_version": 1, "files": {}}', b'{"format_version": 1, "files": {"../../x": {"size": 1}}}',
        b'{"format_version": 1, "files": {"x": {"size": -1}}}', b'{"format_version": 1, "files": {"x": 5}}',
        b"[" * 9999,
    ],
)  # fmt: skip
def test_a_damaged_list_of_files_is_ignored(content, server, cache):
    commit = download(server, cache)
    (cache / "models--owner--name" / "trees" / f"{commit}.json").write_bytes(content)
    assert_right(load(server, f"hf://owner/name@{commit}"))


@pytest.mark.parametrize("content", [b"", b"x" * 1000, "é".encode(), b"../../x", b"0" * 39, b"\xff" * 40])
def test_a_damaged_ref_is_absent(content, server, cache, monkeypatch):
    download(server, cache)
    (cache / "models--owner--name" / "refs" / "main").write_bytes(content)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnsupportedError, match="no files of 'main'"):
        load(server, "hf://owner/name")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_ref_or_a_list_of_files_that_would_block_is_absent(server, cache, monkeypatch):
    commit = download(server, cache)
    for path in (f"trees/{commit}.json", "refs/main"):
        (cache / "models--owner--name" / path).unlink()
        os.mkfifo(cache / "models--owner--name" / path)
    assert_right(load(server, f"hf://owner/name@{commit}"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnsupportedError, match="no files of 'main'"):
        load(server, "hf://owner/name")


@pytest.mark.parametrize(
    "url", ["hf://owner/name@{}/../../../secret", "hf://owner/name@..%2F..%2Fx/y", "hf://../name/x", "hf://owner/.."]
)
def test_no_url_leads_out_of_the_cache(url, server, cache, monkeypatch):
    commit = download(server, cache)
    (cache / "secret").write_bytes(A)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((UnsupportedError, FileNotFoundError)):
        load(server, url.format(commit))


def test_a_checkpoint_from_the_cache_is_the_same_as_one_from_the_hub(server, cache):
    commit = download(server, cache)
    options = options_of(server)
    files = RemoteFiles(options)
    url = f"hf://owner/name@{commit}/a.safetensors"
    with safeload.open(url, storage_options={"endpoint": server.url()}) as checkpoint:
        pickled = pickle.dumps(checkpoint)
    cached = files.open(url)
    shutil.rmtree(cache)
    assert RemoteFiles(options).open(url).version == cached.version == (len(A), commit)
    with pickle.loads(pickled) as again:
        np.testing.assert_array_equal(again["a"], np.arange(500, dtype=np.float32))


def test_cached_files_need_no_huggingface_hub(server, cache, monkeypatch):
    commit = download(server, cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert_right(load(server, f"hf://owner/name@{commit}"))
    with pytest.raises(ImportError, match="pip install huggingface_hub"):
        load(server, "hf://owner/name")


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "{}/x"}, "x"),
        ({"HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": "{}/y"}, "y"),
        ({"HF_HUB_CACHE": "", "HF_HOME": "{}/home"}, "home/hub"),
        ({"HF_HUB_CACHE": "", "XDG_CACHE_HOME": "{}/xdg"}, "xdg/huggingface/hub"),
        ({"HF_HUB_CACHE": "$PLACE/z", "PLACE": "{}"}, "z"),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(variables, folder, server, tmp_path, monkeypatch):
    commit = download(server, tmp_path / folder)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    assert_right(load(server, f"hf://owner/name@{commit}"))
    assert not server.kinds


# ---- verified ----


@pytest.mark.skipif(sys.platform == "win32", reason="the cache has no symbolic links on Windows")
@pytest.mark.parametrize("place", ["url", "folder"])
def test_cached_files_are_verified_by_their_etags(place, server, repository, cache):
    """Of weights the ETag is a SHA-256, as of files in Git LFS; of small files it is the SHA-1 of Git's blob."""
    commit = download(server, cache)
    snapshot = next((cache / "models--owner--name" / "snapshots").iterdir())
    for name, content in FILES.items():  # the imitated Hub has ETags of its own
        git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        etag = hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else git
        blob = cache / "models--owner--name" / "blobs" / etag
        blob.write_bytes(content)
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(blob)
    path = f"hf://owner/name@{commit}" if place == "url" else snapshot
    options = {"storage_options": options_of(server)} if place == "url" else {}
    arrays = safeload.load(path, verify=True, **options)
    assert_right(({"model_type": "none"}, arrays))
    assert safeload.verify(path, **options).ok
    for name in ("b.safetensors", "config.json"):
        blob = (snapshot / name).resolve()
        content = blob.read_bytes()
        blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(VerificationError, match=rf"{name}: the file differs from the Hub's cache"):
            safeload.load(path, verify=True, **options)
        assert name in [file.file for file in safeload.verify(path, **options).faults]
        blob.write_bytes(content)
    if place == "url":
        (snapshot / "b.safetensors").unlink()
        with pytest.raises(VerificationError, match=r"b\.safetensors: the Hub's cache has no digest of this file"):
            safeload.load(path, verify=True, **options)
