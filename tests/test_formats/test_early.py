"""Remote folders: the index, config.json and the shards that the listing implies are requested at once."""

import contextlib
import json
import threading

import numpy as np
import pytest
from builders.http_faults import Fault
from builders.hub import Hub
from builders.remote import Served, ServedStore
from builders.threads import threads

import safeload
from safeload.errors import FormatError, RemoteError, missing_file
from safeload.numpy import save

ROOT = "mem://model"
INDEX = "model.safetensors.index.json"
# Seconds until a request counts as waiting for another.
SOON = 15


def shard(*names):
    return save(dict.fromkeys(names, np.arange(300, dtype=np.float32)))


def name_of(number, count, stem="model"):
    return f"{stem}-{number:05}-of-{count:05}.safetensors"


def model(count=3, listed=None):
    """The files of a model by name, with a tensor in each shard; the index lists the first ``listed`` of them."""
    shards = {name_of(k, count): shard(f"t{k}") for k in range(1, count + 1)}
    weight_map = {f"t{k}": name_of(k, count) for k in range(1, (listed or count) + 1)}
    return {**shards, INDEX: json.dumps({"weight_map": weight_map}).encode(), "config.json": b'{"a": 1}'}


class Recorded(Served):
    """Files by URL that remember what was opened and closed."""

    def __init__(self, files):
        super().__init__({f"{ROOT}/{name}": content for name, content in files.items()})
        self.opened, self.closed = [], []

    def open(self, path, window=0):
        store = super().open(path)
        self.opened.append((path.removeprefix(f"{ROOT}/"), window))
        close = ServedStore.close

        def closed():
            self.closed.append(path.removeprefix(f"{ROOT}/"))
            close(store)

        store.close = closed
        return store

    def when(self, name, action):
        self.failing[f"{ROOT}/{name}"] = lambda begin, end: action()


def raising(error):
    def action():
        raise error

    return action


def listing(files):
    with safeload.open(files.at(ROOT)) as checkpoint:
        return sorted(checkpoint.keys()), checkpoint.config


def test_index_config_and_shards_are_requested_at_once():
    files, names = Recorded(model()), sorted(model())
    together = threading.Barrier(len(names), timeout=SOON)
    for name in names:
        files.when(name, together.wait)
    assert listing(files) == (["t1", "t2", "t3"], {"a": 1})
    assert sorted(name for name, _ in files.opened) == names
    assert {window for name, window in files.opened if name.startswith("model-")} == {12 << 10}
    assert sorted(files.closed) == names
    assert not threads()


def test_a_single_file_and_config_are_requested_at_once():
    files = Recorded({"model.safetensors": shard("a"), "config.json": b'{"a": 1}'})
    together = threading.Barrier(2, timeout=SOON)
    for name in ("model.safetensors", "config.json"):
        files.when(name, together.wait)
    assert listing(files) == (["a"], {"a": 1})
    assert len(files.requests) == 2


def test_shards_that_the_index_omits_are_closed_and_their_errors_count_for_nothing():
    files = Recorded(model(4, listed=2))
    files.when(name_of(4, 4), raising(RemoteError("refused", "x")))
    with safeload.open(files.at(ROOT)) as checkpoint:
        assert sorted(checkpoint.keys()) == ["t1", "t2"]
        assert sorted(files.closed) == ["config.json", name_of(3, 4), INDEX]
    assert sorted(files.closed) == ["config.json", *(name_of(k, 4) for k in (1, 2, 3)), INDEX]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RemoteError("the server returned 500", "x"), "the server returned 500"),
        (missing_file("x", "No such file: x"), f"{INDEX} lists it: was the download finished"),
    ],
)
def test_the_error_of_a_listed_shard_is_raised(error, message):
    files = Recorded(model())
    files.when(name_of(2, 3), raising(error))
    with pytest.raises(type(error), match=message):
        listing(files)
    assert [path for path, _, _ in files.requests].count(f"{ROOT}/{name_of(2, 3)}") == 1
    assert not threads()


@pytest.mark.parametrize("content", [b"[]", b'{"weight_map": {"a": "../b"}}', b'{"weight_map": 5}'])
def test_an_invalid_index_is_the_error_and_everything_is_closed(content):
    files = Recorded({**model(), INDEX: content})
    files.when(name_of(1, 3), raising(RemoteError("of no interest", "x")))
    with pytest.raises(FormatError, match=r"index\.json|weight_map"):
        listing(files)
    assert sorted(files.closed) == sorted(name for name, _ in files.opened if name != name_of(1, 3))
    assert not threads()


def test_an_index_that_cannot_be_read_ends_the_opening_of_shards():
    files, refused = Recorded(model()), RemoteError("refused", "x")
    files.when(INDEX, raising(refused))
    with pytest.raises(RemoteError, match="refused"):
        listing(files)
    assert not threads()


def test_an_invalid_config_is_an_error():
    files = Recorded({**model(), "config.json": b"no"})
    with pytest.raises(FormatError, match=r"config\.json is not JSON"):
        listing(files)
    assert listing(Recorded({name: content for name, content in model().items() if name != "config.json"}))[1] is None


def test_a_header_that_is_longer_takes_a_second_request():
    names = [f"model.layers.{k:05}.weight" for k in range(2000)]
    files = {**model(1), name_of(1, 1): shard(*names)}
    files[INDEX] = json.dumps({"weight_map": dict.fromkeys(names, name_of(1, 1))}).encode()
    assert listing(Recorded(files))[0] == names


MOST = [name_of(k, 30) for k in range(1, 31)]


@pytest.mark.parametrize(
    ("base", "beside", "shards"),
    [
        (INDEX, [name_of(2, 2), name_of(1, 2)], [name_of(1, 2), name_of(2, 2)]),
        (INDEX, [name_of(1, 2)], []),
        (INDEX, [name_of(1, 2), name_of(2, 2), "other-00001-of-00001.safetensors"], [name_of(1, 2), name_of(2, 2)]),
        (INDEX, ["other-00001-of-00001.safetensors"], []),
        (INDEX, ["model-00001-of-00001.bin"], []),
        (INDEX, [name_of(0, 2), name_of(1, 2), name_of(2, 2)], []),
        ("pytorch_model.bin.index.json", ["pytorch_model-00001-of-00001.bin"], ["pytorch_model-00001-of-00001.bin"]),
        (
            INDEX,
            [name_of(k, 30) for k in range(1, 31)],
            [name_of(k, 30) for k in range(1, 31)],
        ),
        (INDEX, [name_of(k, 31) for k in range(1, 32)], []),
        (INDEX, [], []),
    ],
    ids=range(10),
)
def test_complete_sets_with_the_name_of_the_index_are_implied(base, beside, shards):
    """They are opened although the index, which names none of them, has not been read."""
    content = dict.fromkeys(beside, shard("t"))
    files = Recorded({**content, base: json.dumps({"weight_map": {"w": "own.bin"}}).encode(), "own.bin": b""})
    with contextlib.suppress(safeload.SafeloadError):
        listing(files)
    assert base in dict(files.opened)
    assert sorted(name for name, _ in files.opened if name in content) == shards


# ---- the Hub ----


@pytest.mark.store_packages
def test_listing_a_model_of_the_hub_waits_for_three_answers(monkeypatch, tmp_path):
    """The commit, then all redirects, then all bytes: each answer waits for all requests of its kind."""
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("urllib3")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for variable in ("HF_HUB_OFFLINE", "SAFELOAD_OFFLINE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    files = {name: content.ljust(1000) for name, content in model(5).items() if name.endswith("json")}
    files = {**model(5), **files}
    with Hub() as server:
        server.add("owner/name", files)
        for host in (server, server.cdn):
            together = threading.Barrier(len(files), timeout=SOON)
            host.faults = [Fault(lambda _, request, wait=together.wait: "/api/" in request.path or wait())]
        options = {"endpoint": server.url(), "token": False}
        with safeload.open("hf://owner/name", storage_options=options) as checkpoint:
            assert sorted(checkpoint.keys()) == ["t1", "t2", "t3", "t4", "t5"]
        assert server.kinds == {"api": 1, "resolve": len(files), "cdn": len(files)}
    assert not threads()
