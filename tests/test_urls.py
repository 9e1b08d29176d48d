"""Checkpoints by their URLs, from safeload.open to the command line, on real servers of this machine."""

import contextlib
import gc
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import types

import ml_dtypes
import numpy as np
import pytest
from builders.thorough import dealt

pytest.importorskip("urllib3")

from builders import http_faults as faults
from builders import inside
from builders.http_server import Server
from builders.paths import ROOT

import safeload
import safeload.numpy
from safeload.errors import RemoteError, RemotePermissionError, RemoteTimeoutError

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

SHARDS, LAYERS = 3, 6
SECRETS = ("s3cret-pass", "s1gnature", "t0ken-of-mine")


def tensors_of(layer):
    rng = np.random.default_rng(layer)
    return {
        f"model.layers.{layer}.{name}.weight": rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for name, shape in (("q_proj", (256, 256)), ("up_proj", (1024, 512)), ("norm", (256,)))
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of shards with an index."""
    folder, weight_map = tmp_path_factory.mktemp("model"), {}
    for k in range(SHARDS):
        tensors = {**tensors_of(2 * k), **tensors_of(2 * k + 1)}
        name = f"model-{k + 1:05}-of-{SHARDS:05}.safetensors"
        safeload.numpy.save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": LAYERS}))
    return folder


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    inside.tune(monkeypatch, retry_pause=0.001)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def same(found, want):
    assert sorted(found) == sorted(want)
    for name, array in want.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes()


def asked(server, before):
    """Bytes of the ranges of all requests but the first ones."""
    return sum(request.range[1] - request.range[0] for request in server.requests[before:])


INDEX = "/model.safetensors.index.json"
LAST = f"/model-{SHARDS:05}-of-{SHARDS:05}.safetensors"


@pytest.mark.parametrize("tls", [False, True])
def test_a_folder_over_http_has_the_arrays_of_the_local_one(model, tls):
    with Server(model, tls=tls) as server:
        options = {"verify": str(ROOT / "tests" / "data" / "localhost.pem")} if tls else None
        url = server.url(INDEX, host="localhost" if tls else "127.0.0.1")
        with safeload.open(url, storage_options=options) as opened:
            assert opened.config["model_type"] == "llama"
            assert len(server.requests) == 2 + SHARDS
            for dtype in (None, "float32"):
                same(opened.load(dtype=dtype), safeload.load(model, dtype=dtype))
            same(dict(opened.stream(dtype="float32")), safeload.load(model, dtype="float32"))
            assert opened.last_load.backend == "remote"


def test_a_layer_reads_its_bytes_alone(model):
    with Server(model) as server, safeload.open(server.url(INDEX)) as opened:
        before = len(server.requests)
        found = opened.load(only="model.layers.3.*", dtype="float32")
        assert asked(server, before) == sum(array.nbytes // 2 for array in found.values())


def test_one_tensor_of_5_gb_reads_its_bytes_and_not_a_mib_more(tmp_path):
    path, size = tmp_path / "model.safetensors", 5 << 30
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [size - 4096], "data_offsets": [0, size - 4096]},
            "b": {"dtype": "F32", "shape": [1024], "data_offsets": [size - 4096, size]},
        }
    ).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(8 + len(header) + size - 4096)
        file.write(np.arange(1024, dtype=np.float32).tobytes())
    with Server(tmp_path) as server, safeload.open(server.url("/model.safetensors")) as opened:
        before = len(server.requests)
        np.testing.assert_array_equal(opened["b"], np.arange(1024, dtype=np.float32))
        assert asked(server, before) == 4096
        np.testing.assert_array_equal(opened.get_slice("a")[-3:], [0, 0, 0])
        assert asked(server, before) < 4096 + (1 << 20)


# ---- faults ----

OTHER = "model-00001-of-00003.safetensors"
PASSING = {
    "reset": lambda: faults.reset(1000, path=LAST, first=1, times=2),
    "reset before the answer": lambda: faults.reset(0, path=LAST, first=1, times=1),
    "short": lambda: faults.short(70_000, path=LAST, first=1, times=2),
    "stalls": lambda: faults.stall(5000, path=LAST, first=1, times=1),
    "silent": lambda: faults.silent(path=LAST, first=1, times=1),
    "429": lambda: faults.status(429, retry_after=0, path=LAST, first=1, times=2),
    "503": lambda: faults.status(503, retry_after=0, path=LAST, first=1, times=2),
    "503 while opening": lambda: faults.status(503, path=INDEX, times=2),
    "redirect": lambda: faults.redirect(f"/{OTHER}?", path="/never"),
}
LASTING = {
    "reset": (lambda: faults.reset(1000, path=LAST, first=1), RemoteError, "the connection"),
    "short": (lambda: faults.short(1000, path=LAST, first=1), RemoteError, "broke off"),
    "stalls": (lambda: faults.stall(1000, path=LAST, first=1), RemoteTimeoutError, "no byte for 0.5 s"),
    "429": (lambda: faults.status(429, retry_after=0, path=LAST, first=1), RemoteError, "429 Too Many Requests"),
    "503 for an hour": (lambda: faults.status(503, retry_after=3600, path=LAST, first=1), RemoteError, "3600 s"),
    "200": (lambda: faults.whole(path=LAST, first=1), RemoteError, "the whole file instead of a range"),
    "another range": (lambda: faults.moved(8, path=LAST, first=1), RemoteError, "another range"),
    "403": (lambda: faults.status(403, path=LAST, first=1), RemotePermissionError, "refuses access"),
    "garbage": (lambda: faults.garbage(path=LAST, first=1), RemoteError, "not HTTP"),
    "redirects in a circle": (lambda: faults.redirect(LAST, path=LAST, first=1), RemoteError, "in a loop"),
}
CHANGED = {
    "another ETag": lambda: faults.header("ETag", '"another"', path=LAST, first=1),
    "412": lambda: faults.status(412, path=LAST, first=1),
    "another size": lambda: faults.total(77_777_777, path=LAST, first=1),
}
OPTIONS = {"timeout": 0.5, "connect_timeout": 5, "retries": 3}


@pytest.mark.parametrize(("fault", "dtype"), dealt(PASSING, [None, "float32"]))
def test_a_fault_that_passes_changes_no_byte(model, fault, dtype):
    with Server(model, faults=[PASSING[fault]()]) as server:
        same(
            safeload.load(server.url(INDEX), dtype=dtype, storage_options=OPTIONS),
            safeload.load(model, dtype=dtype),
        )


@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_lasts_ends_in_an_error_with_url_tensor_and_range(model, fault):
    make, kind, said = LASTING[fault]
    threads_before = threading.active_count()
    with Server(model) as server, safeload.open(server.url(INDEX), storage_options=OPTIONS) as opened:
        server.faults.append(make())
        server.faults[0].first = 0
        before = len(server.requests)
        with pytest.raises(OSError, match=said) as caught:
            opened.load(dtype="float32")
        assert type(caught.value) is kind
        assert caught.value.path == server.url(LAST)
        assert caught.value.tensor in opened
        assert caught.value.begin < caught.value.end
        assert f"tensor '{caught.value.tensor}': " in str(caught.value)
        assert f"({server.url(LAST)}, bytes [{caught.value.begin}, {caught.value.end}))" in str(caught.value)
        assert len(server.requests) - before <= 2 * (1 + OPTIONS["retries"]) + SHARDS
        assert threading.active_count() - threads_before <= 40  # tests before this one may have left some
        server.faults.clear()
        same(opened.load(), safeload.load(model))


@pytest.mark.parametrize("fault", CHANGED)
def test_a_file_that_changes_midway_is_an_error(model, fault):
    with Server(model) as server, safeload.open(server.url(INDEX)) as opened:
        server.faults.append(CHANGED[fault]())
        server.faults[0].first = 0
        with pytest.raises(safeload.FormatError, match="the file has changed since it was opened") as caught:
            opened.load()
        assert caught.value.path == server.url(LAST)


def test_a_header_that_lies_about_sizes_is_refused_before_memory_is_taken(tmp_path):
    (tmp_path / "a.safetensors").write_bytes((10**9).to_bytes(8, "little") + b"{" + bytes(1000))
    (tmp_path / "b.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{" + bytes(1000))
    with Server(tmp_path) as server:
        for name in ("a", "b"):
            with pytest.raises(safeload.SafeloadError, match=r"header"):
                safeload.open(server.url(f"/{name}.safetensors"))


def test_a_missing_file_and_a_missing_shard(model):
    with Server({INDEX: (model / INDEX[1:]).read_bytes()}) as server:
        with pytest.raises(FileNotFoundError, match=r"No such file.*none\.safetensors"):
            safeload.open(server.url("/none.safetensors"))
        with pytest.raises(FileNotFoundError, match=r"index\.json lists it"):
            safeload.open(server.url(INDEX))


# ---- secrets ----


def texts_of(error):
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return "".join(line for line in lines if not line.lstrip().startswith("File")) + repr(error) + repr(vars(error))


def ours_in(one):
    """The objects of safeload's classes that an object leads to, by what the garbage collector sees."""
    found, ahead = {}, [one]
    while ahead:
        for inner in gc.get_referents(ahead.pop()):
            if id(inner) in found or isinstance(inner, (type, types.ModuleType, types.FunctionType)):
                continue
            own = type(inner).__module__.partition(".")[0] == "safeload"
            if own or isinstance(inner, (dict, list, tuple)):
                found[id(inner)] = inner
                ahead.append(inner)
    return [inner for inner in found.values() if type(inner).__module__.partition(".")[0] == "safeload"]


def locals_of(error):
    """What tools for tracebacks show of the objects of safeload's classes in the frames of an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    values = [value for frame in frames for value in frame.f_locals.values()]
    return [repr(value) for value in values if type(value).__module__.partition(".")[0] == "safeload"]


def test_credentials_are_in_no_text_of_a_checkpoint(model, caplog):
    caplog.set_level(logging.DEBUG)
    with Server(model) as server:
        secret = server.url(f"{INDEX}?sig=s1gnature", user="me:s3cret-pass@")
        options = {"headers": {"X-Token": "t0ken-of-mine"}, **OPTIONS}
        with safeload.open(secret, storage_options=options) as opened:
            name = next(iter(opened))
            shown = [
                repr(opened),
                str(opened.files),
                opened._repr_html_(),
                str(opened.tensors[name]),
                str(opened.index),
            ]
            shown += [repr(opened.get_slice(name)), str(opened.notes), str(opened.path), repr(opened.stream())]
            # What tools for tracebacks show of local variables, and debuggers of attributes.
            inner = [opened, *opened.weight_files, *ours_in(opened)]
            assert len({type(one) for one in inner}) > 5
            shown += [*map(repr, inner)]
            shown += [repr(value) for file in opened.weight_files for value in vars(file.store).values()]
            opened.load([name])
            with pytest.raises(safeload.UnsupportedError, match="the query of this URL may be a secret") as caught:
                pickle.dumps(opened)
            shown.append(texts_of(caught.value))
            server.faults.append(faults.status(403))
            with pytest.raises(PermissionError) as caught:
                opened.load()
            shown += [texts_of(caught.value), *locals_of(caught.value)]
        with pytest.raises(PermissionError) as caught:
            safeload.open(secret, storage_options=options)
        shown += [texts_of(caught.value), *locals_of(caught.value)]
        assert server.requests[0].headers["x-token"] == "t0ken-of-mine"
        assert "sig=s1gnature" in server.requests[0].path
    shown += [record.getMessage() for record in caplog.records if record.name.startswith("safeload")]
    assert not [text for text in shown for one in SECRETS if one in text]


def test_a_pickle_opens_again_without_user_and_password(model):
    with Server(model) as server:
        with safeload.open(server.url(INDEX, user="me:s3cret-pass@"), storage_options={"retries": 2}) as opened:
            data = pickle.dumps(opened)
            piece = pickle.dumps(opened.get_slice("model.layers.0.norm.weight"))
        assert b"s3cret-pass" not in data + piece
        with pickle.loads(data) as again:
            assert again["model.layers.0.norm.weight"].shape == (256,)
        assert pickle.loads(piece)[:3].shape == (3,)
        assert "authorization" not in server.requests[-1].headers


# ---- what is understood, and what is not ----


@pytest.mark.parametrize("url", ["ftp://host/a.safetensors", "filecache::https://host/a", "sftp://me:s3cret@host/a"])
def test_other_schemes_and_chains_are_opened_when_asked_for(url):
    with pytest.raises(safeload.UnsupportedError, match="needs storage_options=") as caught:
        safeload.open(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "SAFELOAD_OFFLINE"])
def test_a_variable_forbids_the_network(variable, monkeypatch, model):
    monkeypatch.setenv(variable, "1")
    for url in ("https://host/a.safetensors", "hf://owner/name", "s3://bucket/key"):
        with pytest.raises(safeload.UnsupportedError, match=f"{variable} is set, which forbids network access"):
            safeload.open(url)
    same(safeload.load(model.as_uri()), safeload.load(model))


def test_functions_for_local_files_take_no_urls(model):
    with Server(model) as server:
        with pytest.raises(FileNotFoundError, match=r"safeload\.load"):
            safeload.numpy.load_file(server.url(LAST))
        with pytest.raises(FileNotFoundError, match=r"safeload\.load"):
            safeload.safe_open(server.url(LAST), "np")
        assert not server.requests


def test_https_has_no_folders(model):
    with Server(model) as server, pytest.raises((safeload.UnsupportedError, FileNotFoundError)):
        safeload.open(server.url("/"))


def test_a_file_url_is_the_file_itself(model):
    with safeload.open((model / LAST[1:]).as_uri()) as opened:
        opened.load()
        assert opened.last_load.backend == "mmap"


# ---- a store of the caller's ----


class Four:
    """The four members, and no more."""

    def __init__(self, content):
        self.content, self.version, self.closed = content, "v1", False

    @property
    def size(self):
        return len(self.content)

    def read_into(self, offset, memory):
        memory[:] = self.content[offset : offset + len(memory)]

    def close(self):
        self.closed = True


def test_an_object_with_four_members_is_opened(model):
    store = Four((model / LAST[1:]).read_bytes())
    with safeload.open(store) as opened:
        same(opened.load(dtype="float32"), safeload.load(model / LAST[1:], dtype="float32"))
        store.version = "v2"
        with pytest.raises(safeload.FormatError, match="changed since it was opened"):
            opened.load()
    assert store.closed


# ---- interrupted ----

PROGRAM = """
import sys, safeload
with safeload.open(sys.argv[1], storage_options={"timeout": 30}) as opened:
    print("opened", flush=True)
    try:
        if sys.argv[2] == "stream":
            for _ in opened.stream(): pass
        else:
            opened.load(dtype=sys.argv[2] if sys.argv[2] != "None" else None)
    except KeyboardInterrupt:
        import threading
        print("interrupted", threading.active_count(), flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGINT goes to the whole console there")
@pytest.mark.parametrize("way", ["None", "float32", "stream"])
def test_ctrl_c_ends_a_load_that_stalls(model, way):
    with Server(model, faults=[faults.stall(1000, path=LAST, first=1)]) as server:
        program = [sys.executable, "-c", PROGRAM, server.url(INDEX), way]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout.readline() == "opened\n"
            until = time.monotonic() + 60
            while len([r for r in server.requests if r.path == LAST]) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.2)
            begun = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted 1\n"
            assert time.monotonic() - begun < 20  # a second on an idle machine, and 30 with the time-out
            with contextlib.suppress(ProcessLookupError):
                process.kill()


# ---- the Hub and S3 ----


@pytest.mark.store_packages
def test_info_of_a_repository_lists_a_sharded_model(model, tmp_path):
    pytest.importorskip("huggingface_hub")
    from builders.hub import Hub, Repository

    repository = Repository()
    repository.commit({path.name: path.read_bytes() for path in model.iterdir()})
    with Hub() as hub:
        hub.repositories["owner/name"] = repository
        environment = {**os.environ, "HF_ENDPOINT": hub.url(), "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "safeload", "info", "hf://owner/name"],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "hf://owner/name" in done.stdout
        assert "up_proj" in done.stdout
        # One request of the API; of each file one, which for large ones the CDN answers.
        api = [request for request in hub.requests if request.path.startswith("/api/models/")]
        assert len(api) == 1
        assert len([request for request in hub.requests if "/resolve/" in request.path]) == SHARDS + 2
        assert len(hub.cdn.requests) <= SHARDS + 2


@pytest.mark.store_packages
def test_a_layer_of_an_object_store_reads_its_bytes_alone(model):
    moto = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://{host}:{port}"}
        fs = s3fs.S3FileSystem(**options, skip_instance_cache=True)
        fs.mkdir("layers")
        for path in model.iterdir():
            fs.put_file(str(path), f"layers/model/{path.name}")
        found = safeload.load("s3://layers/model/", only="model.layers.3.*", dtype="float32", storage_options=options)
        same(found, safeload.load(model, only="model.layers.3.*", dtype="float32"))
    finally:
        server.stop()


@pytest.mark.parametrize(
    "title", ["Directory listing for /model/", "Index of /model/", "INDEX OF /model"], ids=["python", "nginx", "apache"]
)
def test_a_listing_page_names_the_index_to_open(title):
    page = f'<!DOCTYPE HTML>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>'.encode()
    with Server({"/model": page, "/model/": page}) as server:
        for url in (server.url("/model"), server.url("/model/")):
            with pytest.raises(
                safeload.UnsupportedError, match="a page that lists a folder: http has no folders"
            ) as caught:
                safeload.open(url)
            assert f"open {server.url('/model')}/model.safetensors.index.json, or " in str(caught.value)
