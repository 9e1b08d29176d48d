"""Pieces of operations on URLs, in other processes: without secrets, and of the very version that was planned."""

import copy
import json
import operator
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders.executors import Plain, processes
from builders.http_server import Server
from builders.inside import manifest
from builders.paths import DATA
from builders.remote import Served

import safeload
import safeload.remote
from safeload.errors import MissingShardError
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

pytest.importorskip("urllib3")

SECRET = "s3cr3t-of-the-caller"
OPTIONS = {"headers": {"X-Key": SECRET}, "verify": True}
SHARDS = {"dtype": "float16", "max_shard_size": "64KB"}
SHARD = "/model-00002-of-00003.safetensors"


@pytest.fixture
def server(model):
    with Server({f"/{one.name}": one.read_bytes() for one in model.iterdir()}) as server:
        yield server


@pytest.fixture
def url(server):
    return server.url("/model.safetensors.index.json")


@pytest.fixture
def pool():
    with processes() as pool:
        yield pool


def shards(folder):
    return {one.name: one.read_bytes() for one in folder.glob("*.safetensors")}


def findings(report):
    return report.errors, report.warnings, report.notes


def test_processes_give_what_one_process_gives(url, model, pool, tmp_path):
    assert repr(safeload.stats(url, executor=pool)) == repr(safeload.stats(model))
    assert manifest.make(url, executor=pool) == manifest.make(model)
    assert findings(safeload.check(url, executor=pool)) == findings(safeload.check(model))
    assert safeload.diff(model, url, executor=pool).same
    safeload.convert(url, tmp_path / "there", executor=pool, **SHARDS)
    safeload.convert(model, tmp_path / "here", **SHARDS)
    assert shards(tmp_path / "there") == shards(tmp_path / "here")
    assert (tmp_path / "there" / "config.json").read_bytes() == (tmp_path / "here" / "config.json").read_bytes()


@pytest.mark.parametrize("family", ["fp8_block", "ct_int8_g32_asym", "ct_mxfp4"])
def test_packed_tensors_in_pieces(family):
    folder = DATA / "quantized" / family
    with Server(folder) as server:
        index = folder / "model.safetensors.index.json"
        here = index if index.exists() else folder / "model.safetensors"
        there = server.url(f"/{here.name}")
        assert repr(safeload.stats(there, executor=Plain())) == repr(safeload.stats(here))


def test_archives_in_pieces(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.ones((3, 4), np.float32), b=np.arange(100_000, dtype=np.float32))
    good = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(good[:300_000] + b"\xff" + good[300_001:])
    with Server(tmp_path) as server:
        found = safeload.check(server.url("/a.npz"), executor=Plain())
        assert findings(found) == findings(safeload.check(server.url("/a.npz")))
        assert [one.code for one in found.errors] == ["file.crc"]


def test_filesystems_of_fsspec(model, tmp_path):
    fs = pytest.importorskip("fsspec").filesystem("memory")
    folder = f"/plans-{time.monotonic_ns()}"
    fs.put(str(model), folder, recursive=True)
    try:
        with ThreadPoolExecutor(2) as pool:
            for place in (f"memory:/{folder}", safeload.remote.of_fsspec(fs, folder)):
                assert repr(safeload.stats(place, executor=pool)) == repr(safeload.stats(model))
        plan = safeload.Plan(
            json.loads(json.dumps(safeload.plan_convert(f"memory:/{folder}", tmp_path / "o", **SHARDS)))
        )
        safeload.finalize(plan, [safeload.run_piece(piece) for piece in plan.pieces])
        assert (tmp_path / "o" / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()
    finally:
        fs.rm(folder, recursive=True)


# ---- secrets ----


def test_plans_have_no_secrets(url, tmp_path):
    user = url.replace("http://", "http://me:" + SECRET + "@")
    plan = safeload.plan_convert(user, tmp_path / "out", storage_options=OPTIONS, **SHARDS)
    text = json.dumps(plan) + repr(plan) + str(pickle.dumps(plan))
    assert SECRET not in text
    assert plan.pieces[0]["sources"][0]["storage_options"] == {"headers": {}, "verify": True}
    assert plan.id == safeload.plan_convert(url, tmp_path / "out", storage_options=OPTIONS, **SHARDS).id


def test_pieces_get_secrets_from_whoever_runs_them(server, url, tmp_path):
    plan = safeload.plan_convert(url, tmp_path / "out", storage_options=OPTIONS, **SHARDS)
    server.requests.clear()
    results = [safeload.run_piece(piece, storage_options={"headers": {"X-Key": "own"}}) for piece in plan.pieces]
    assert {one.headers.get("x-key") for one in server.requests} == {"own"}
    report = safeload.finalize(plan, results, storage_options={"headers": {"X-Key": "own"}})
    assert report.tensors == len(safeload.open(url))
    written = b"".join(one.read_bytes() for one in (tmp_path / "out").iterdir())
    assert SECRET.encode() not in written


def test_what_executors_get_has_no_secrets(url):
    executor = Plain()
    safeload.stats(url, storage_options=OPTIONS, executor=executor)
    safeload.check(url, storage_options=OPTIONS, executor=executor)
    assert executor.pieces
    assert SECRET not in json.dumps(executor.pieces)


def test_a_url_that_needs_its_query_is_refused(url, tmp_path):
    signed = f"{url}?sig={SECRET}"
    calls = [
        lambda: safeload.stats(signed, executor=Plain()),
        lambda: manifest.make(signed, executor=Plain()),
        lambda: safeload.check(signed, executor=Plain()),
        lambda: safeload.plan_convert(signed, tmp_path / "out", **SHARDS),
        lambda: pickle.dumps(safeload.open(signed)),
        lambda: pickle.dumps(safeload.open(signed).get_slice("model.norm.weight")),
    ]
    for call in calls:
        with pytest.raises(safeload.UnsupportedError, match="the query of this URL may be a secret") as caught:
            call()
        assert SECRET not in str(caught.value)
    assert safeload.stats(signed)  # in this process it is no obstacle
    with safeload.open(signed) as opened:
        shown = [repr(opened), opened.index, *opened.files, *(info.file for info in opened.tensors.values())]
        assert SECRET not in str(shown)


def test_a_store_of_this_process_is_refused(model, tmp_path):
    there = Served.folder(model).at("mem://model")
    with pytest.raises(safeload.UnsupportedError, match="a store of this process"):
        safeload.stats(there, executor=Plain())
    with pytest.raises(safeload.UnsupportedError, match="a store of this process"):
        safeload.plan_convert(there, tmp_path / "out", **SHARDS)


# ---- the version that was planned ----


def test_a_shard_that_changes_is_refused(server, url, tmp_path):
    plan = safeload.plan_convert(url, tmp_path / "out", **SHARDS)
    before = server.files[SHARD]
    for content in (before[:-1] + bytes([before[-1] ^ 1]), before + bytes(8), b"no weights"):
        server.files[SHARD] = content
        with pytest.raises(
            safeload.FormatError, match=r"the file of tensor .* has changed since it was opened"
        ) as caught:
            list(map(safeload.run_piece, plan.pieces))
        assert caught.value.path == server.url(SHARD)
        assert caught.value.tensor is not None
    del server.files[SHARD]
    with pytest.raises(MissingShardError, match="is gone, or not on this machine"):
        list(map(safeload.run_piece, plan.pieces))


@pytest.mark.parametrize(
    "source",
    [
        {"folder": "http://127.0.0.1", "files": [["a", 1]]},
        {"folder": "http://127.0.0.1", "files": [["a", 1, {}]]},
        {"folder": "http://127.0.0.1", "files": [["a", 1, "v", "x"]]},
        {"folder": "http://127.0.0.1", "files": [["a", 1, "v"]], "storage_options": 3},
        {"folder": 3, "files": [["a", 1, "v"]]},
    ],
)
def test_what_is_no_source_is_refused(source):
    piece = {"operation": "stats", "version": safeload.__version__, "names": ["a"], "sources": [source]}
    with pytest.raises(safeload.FormatError):
        safeload.run_piece(piece)


# ---- pickles and copies ----


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("again", [pickled, copy.copy, copy.deepcopy])
def test_checkpoints_and_slices_are_opened_again(url, again):
    with safeload.open(url) as opened:
        whole = opened.load()
        with again(opened) as other:
            assert list(other) == list(opened)
            assert all(np.array_equal(other[name], whole[name]) for name in other)
        lazy = again(opened.get_slice("model.norm.weight"))
        assert np.array_equal(lazy[:3], whole["model.norm.weight"][:3])


def test_slices_of_packed_tensors_are_opened_again():
    folder = DATA / "quantized" / "fp8_block"
    with Server(folder) as server:
        one = next(one.name for one in folder.iterdir() if one.name.endswith(("index.json", "model.safetensors")))
        with safeload.open(server.url(f"/{one}")) as opened:
            name = next(name for name, info in opened.tensors.items() if len(info.parts) > 1)
            lazy = opened.get_slice(name)
            assert np.array_equal(pickled(lazy)[:4], lazy[:4])


def test_copies_keep_the_options_and_pickles_do_not(server, url):
    with safeload.open(url, storage_options=OPTIONS) as opened:
        assert SECRET.encode() not in pickle.dumps(opened)
        server.requests.clear()
        copy.copy(opened).close()
        assert {one.headers.get("x-key") for one in server.requests} == {SECRET}
        server.requests.clear()
        pickled(opened).close()
        assert {one.headers.get("x-key") for one in server.requests} == {None}


@pytest.mark.parametrize("again", [pickled, copy.copy])
def test_an_object_that_has_changed_is_not_opened_again(server, url, again):
    with safeload.open(url) as opened:
        name = next(info.name for info in opened.tensors.values() if info.file.endswith(SHARD))
        lazy = opened.get_slice(name)
        for content in (bytes(len(server.files[SHARD])), b"no weights"):
            server.files[SHARD] = content
            with pytest.raises(safeload.FormatError, match="changed since it was opened"):
                again(opened)
            with pytest.raises(safeload.FormatError, match="changed since it was opened"):
                again(lazy)


def test_a_process_opens_what_it_is_sent(url, model, pool, tmp_path):
    with safeload.open(url) as opened:
        lazy = opened.get_slice("model.norm.weight")
        np.testing.assert_array_equal(pool.submit(operator.getitem, lazy, slice(1)).result(), lazy[:1])
        assert pool.submit(len, opened).result() == len(opened)


def test_a_single_file_in_pieces(tmp_path):
    save_file({"a": np.ones(9, np.float32)}, tmp_path / "a.safetensors", durable=False)
    with Server(tmp_path) as server:
        there = safeload.stats(server.url("/a.safetensors"), executor=Plain())
        assert repr(there) == repr(safeload.stats(tmp_path / "a.safetensors"))
