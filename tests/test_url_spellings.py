"""URLs as strangers spell them: names that are data, tokens that stay with their origin, secrets that nothing shows."""

import contextlib
import json
import os
import pickle
import re
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders.thorough import part_of

pytest.importorskip("urllib3")

from builders import http_faults as faults
from builders import inside
from builders.http_server import Server
from builders.inside import main as cli

import safeload
import safeload.numpy
from safeload import remote
from safeload.errors import RemoteError

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

try:
    import fsspec
except ImportError:
    fsspec = None

INDEX = "/model.safetensors.index.json"
KEY = "t0ken-of-mine"


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    inside.tune(monkeypatch, retry_pause=0.001)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


MARKED = ["layer%31", "a#1", "b%20c", "..%2Fprivate", "%2e%2e%2Fprivate", "é中", "a+b", "a&b=c", "x%", "a b"]
MARKED += ["d?e", 'q"<>|'] if os.name != "nt" else []


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A folder for each name, whose index names a shard of it, beside files that the name might lead to."""
    base, folders = tmp_path_factory.mktemp("marked"), {}
    safeload.numpy.save_file({"w": np.float32([99])}, base / "private.safetensors")
    for number, name in enumerate(MARKED):
        folder = folders[name] = base / str(number)
        folder.mkdir()
        for decoy in ("layer1", "a", "b c", "private", "d", "x"):
            safeload.numpy.save_file({"w": np.float32([99])}, folder / f"{decoy}.safetensors")
        safeload.numpy.save_file({"w": np.float32([number])}, folder / f"{name}.safetensors")
        index = {"metadata": {}, "weight_map": {"w": f"{name}.safetensors"}}
        (folder / INDEX[1:]).write_text(json.dumps(index))
    return folders


def ways_to(folder, server, tmp_path):
    """What leads to the index of a folder, by store."""
    yield "path", str(folder), None
    yield "file", f"file://{'' if os.name != 'nt' else '/'}{folder.as_posix()}", None
    yield "http", server.url(INDEX), None
    yield "http with a query", server.url(INDEX) + "?signature=x/y", None
    if fsspec is not None:
        options = {"cache_storage": str(tmp_path / "cache")}
        yield "cached file", f"simplecache::file://{folder.as_posix()}/{INDEX[1:]}", options
        yield "filesystem", remote.of_fsspec(fsspec.filesystem("file"), folder.as_posix()), None
        memory = fsspec.filesystem("memory")
        for path in folder.iterdir():
            memory.pipe_file(f"/{folder.parent.name}/{folder.name}/{path.name}", path.read_bytes())
        yield "memory", f"memory://{folder.parent.name}/{folder.name}", None


def may_be_pickled(kind, name):
    """Whether no query may be secret, and no cache has options of its own."""
    return "query" not in kind and "cache" not in kind and not (kind == "memory" and re.search("[?#]", name))


@pytest.mark.parametrize("name", MARKED)
def test_names_of_shards_are_data_in_every_store(name, marked, tmp_path):
    with Server(marked[name]) as server:
        for kind, source, options in ways_to(marked[name], server, tmp_path):
            with safeload.open(source, storage_options=options) as opened:
                assert opened["w"].tolist() == [MARKED.index(name)], kind
                if may_be_pickled(kind, name):
                    assert pickle.loads(pickle.dumps(opened))["w"].tolist() == [MARKED.index(name)], kind
        assert not any(re.search(r"\.\.(/|%2f)", request.path, re.IGNORECASE) for request in server.requests)
        with ThreadPoolExecutor(1) as executor:
            ways = [*ways_to(marked[name], server, tmp_path)]
            for number, (kind, source, options) in enumerate(part_of(ways, MARKED.index(name), 2)):
                if may_be_pickled(kind, name):
                    out = tmp_path / f"out{number}"
                    safeload.convert(
                        source, out, max_shard_size="1MB", dtype="float64", executor=executor, storage_options=options
                    )
                    assert safeload.load(out)["w"].tolist() == [MARKED.index(name)], kind


@pytest.mark.parametrize(
    "name", ["../private", "..", "/private", "..\\private", "a/../../private", "http://h/x", "a:b", ""]
)
def test_names_that_lead_out_of_the_folder_are_refused_everywhere(name, marked, tmp_path):
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / INDEX[1:]).write_text(json.dumps({"metadata": {}, "weight_map": {"w": name}}))
    with Server(folder) as server:
        for _, source, options in ways_to(folder, server, tmp_path):
            with pytest.raises(safeload.FormatError, match="weight_map"):
                safeload.open(source, storage_options=options)
        assert {request.path.partition("?")[0] for request in server.requests} == {INDEX}


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:OTHER\\@127.0.0.1:OWN/a",
        "http://127.0.0.1:OTHER/@127.0.0.1:OWN/a",
        "http://127.0.0.1:OTHER?@127.0.0.1:OWN/a",
        "http://127.0.0.1:OTHER#@127.0.0.1:OWN/a",
        "http://127.0.0.1:OWN@127.0.0.1:OTHER/a",
        "http://127.0.0.1:OWN\\@127.0.0.1:OTHER/a",
        "http://127.0.0.1:OWN;@127.0.0.1:OTHER/a",
        "http:\\\\127.0.0.1:OTHER/a",
        "//127.0.0.1:OTHER/a",
        "\\\\127.0.0.1:OTHER/a",
        "/\\127.0.0.1:OTHER/a",
        "http:/127.0.0.1:OTHER/a",
        "http://127.0.0.1:OTHER\t@127.0.0.1:OWN/a",
        "HTTP://127.0.0.1:0OTHER/a",
        "http://localhost:OWN/a",
        "http://127.0.0.1.:OWN/a",
        "http://127.1:OWN/a",
        "http://[::ffff:127.0.0.1]:OWN/a",
    ],
)
def test_a_token_goes_to_its_own_origin_only(location):
    with Server({"/a": b"x" * 100}) as other, Server({"/a": b"y" * 100}) as own:
        location = location.replace("OTHER", str(other.port)).replace("OWN", str(own.port))
        own.faults.append(faults.redirect(location, times=1))
        with contextlib.suppress(RemoteError, FileNotFoundError, safeload.FormatError):
            safeload.open(own.url("/a"), storage_options={"headers": {"X-Key": KEY}, "retries": 0})
        assert not any("x-key" in request.headers for request in other.requests)
        assert "x-key" in own.requests[0].headers
        # After a 4xx of the redirect, the URL itself may be asked once more.
        own_place = ("/a", f"127.0.0.1:{own.port}")
        rest = [request for request in own.requests[1:] if (request.path, request.headers["host"]) != own_place]
        assert not any("x-key" in request.headers for request in rest)


@pytest.mark.parametrize("location", ["/b", "b", "./x/../b", "HTTP://127.0.0.1:OWN/b", "//127.0.0.1:OWN/b", "?b"])
def test_a_token_stays_with_its_origin(location):
    content = safeload.numpy.save({"w": np.float32([1])})
    with Server({"/a.safetensors": content, "/b": content}) as own:
        own.faults.append(faults.redirect(location.replace("OWN", str(own.port)), times=1))
        safeload.open(own.url("/a.safetensors"), storage_options={"headers": {"X-Key": KEY}}).close()
        assert len(own.requests) == 2
        assert all(request.headers["x-key"] == KEY for request in own.requests)


@pytest.mark.parametrize(
    "url",
    [
        "http://u:1/s3cret-pass@127.0.0.1/a.safetensors",
        "http://u:s3cret-pass",
        "http://u:s3cret-pass/a.safetensors",
        "http://u:x/s3cret-pass@127.0.0.1/a.safetensors",
        "http://u:s3cret-pass\\@127.0.0.1/a.safetensors",
        "http://u:s3cret-pass @127.0.0.1:1/a.safetensors",
        "http://u:s3cret-pass\n@127.0.0.1/a.safetensors",
        "http://s3cret-pass@127.0.0.1:1/a.safetensors",
        "http://127.0.0.1:1/a.safetensors?key=s3cret-pass",
        "http://127.0.0.1:1/a.safetensors#s3cret-pass",
        "simplecache::http://u:s3cret-pass@127.0.0.1:1/a.safetensors",
        "s3://u:s3cret-pass@bucket/a.safetensors",
        "s3://u:s3/s3cret-pass@bucket/a.safetensors",
        "hf://u:s3cret-pass@owner/name",
        "sftp://u:s3cret-pass@127.0.0.1:1/a",
        "file://u:s3cret-pass@host/a",
    ],
)
def test_no_spelling_of_a_url_shows_its_secret(url, capfd, tmp_path):
    calls = {
        "open": lambda: safeload.open(url, storage_options={}),
        "load_file": lambda: safeload.numpy.load_file(url),
        "convert": lambda: safeload.convert({"w": np.zeros(1)}, url, storage_options={}),
        "info": lambda: cli(["info", url]),
        "check": lambda: cli(["check", url]),
        "sign": lambda: cli(["sign", url, "--key", url]),
        "sign with a key": lambda: cli(["sign", str(tmp_path), "--key", url]),
        "verify with a key": lambda: cli(["verify", str(tmp_path / "model"), "--key", url]),
        "an unknown option": lambda: cli(["info", str(tmp_path), "--tokenizer", url, f"--words={url}"]),
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.sig").write_text("{}")
    for name, call in calls.items():
        text = ""
        try:
            call()
        except (Exception, SystemExit) as error:
            text = "".join(traceback.format_exception(error))
        assert "s3cret-pass" not in text + "".join(capfd.readouterr()), name
