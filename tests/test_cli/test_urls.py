"""The command line on URLs: the output of the local copy, few requests, and no secret in anything that is printed."""

import json
import sys

import numpy as np
import pytest
from builders.http_server import Server
from builders.inside import main
from builders.models import small, write_folder

from safeload.numpy import save_file

pytest.importorskip("urllib3")

SECRET = "s3cr3t"
INDEX = "/model.safetensors.index.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("urls") / "model"
    folder.mkdir()
    write_folder(folder, *small("llama"), shards=3)
    weights = {f"layer.{k}.weight": np.full((35_000,), k, np.float32) for k in range(100)}
    save_file(weights, folder / "large.safetensors", durable=False)
    return folder


@pytest.fixture
def server(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Server(folder) as server:
        yield server


@pytest.fixture
def run(capsys):
    def run(*arguments):
        status = main([str(one) for one in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def asked(server):
    """How often each file was asked for."""
    paths = [request.path.partition("?")[0] for request in server.requests]
    server.requests.clear()
    return {path: paths.count(path) for path in paths}


def test_info(run, server, folder):
    """Without a second round of requests."""
    status, out, _ = run("info", server.url(INDEX))
    assert status == 0
    requests = asked(server)
    assert requests.pop("/config.json") == 1
    assert set(requests.values()) == {1}
    _, here, _ = run("info", folder / INDEX[1:])
    assert out.splitlines()[1:] == here.splitlines()[1:]
    assert out.splitlines()[0].startswith(f"{server.url(INDEX)}: 3 files, ")
    assert run(server.url(INDEX))[1] == out  # `safeload URL` means info


def test_info_as_json(run, server, folder):
    status, out, _ = run("info", server.url("/large.safetensors"), "--json")
    found = json.loads(out)
    assert status == 0
    assert found["files"] == [
        {"path": server.url("/large.safetensors"), "nbytes": (folder / "large.safetensors").stat().st_size}
    ]
    assert sum(asked(server).values()) <= 2


def test_several_urls(run, server):
    status, out, err = run("info", server.url("/large.safetensors"), server.url("/none.safetensors"), server.url(INDEX))
    assert status == 1
    assert out.count(server.url()) == 2
    assert err.count("\n") == 1
    assert "none.safetensors" in err


def test_check(run, server, folder):
    status, out, _ = run("check", server.url(INDEX), "--structure")
    assert (status, "no errors" in out) == (0, True)
    assert max(asked(server).values()) <= 2
    there, here = (json.loads(run("check", one, "--json")[1]) for one in (server.url(INDEX), folder / INDEX[1:]))
    for key in ("errors", "warnings", "notes", "tensors", "nbytes"):
        assert there[key] == here[key]


def test_check_structure_reads_the_header_only(run, server, folder):
    assert run("check", server.url("/large.safetensors"), "--structure")[0] == 0
    assert server.sent < 300_000
    assert sum(asked(server).values()) <= 2
    run("check", server.url("/large.safetensors"))
    assert server.sent > (folder / "large.safetensors").stat().st_size


def test_a_manifest(run, server, folder):
    assert run("verify", folder / INDEX[1:], "--write", "there.json")[0] == 0
    assert run("verify", server.url(INDEX), "--against", "there.json")[0] == 0


def test_stats(run, server, folder):
    there, here = (run("stats", one) for one in (server.url(INDEX), folder / INDEX[1:]))
    assert there == here


def test_diff(run, server, folder):
    assert run("diff", server.url(INDEX), folder / INDEX[1:])[0] == 0
    status, out, _ = run("diff", folder / INDEX[1:], server.url("/large.safetensors"), "--json")
    assert (status, json.loads(out)["same"]) == (1, False)


@pytest.mark.parametrize("options", [(), ("--resume",)])
def test_convert(run, server, folder, tmp_path, options):
    for source, name in ((server.url(INDEX), "there"), (folder / INDEX[1:], "here")):
        assert run("convert", source, name, "--dtype", "f16", "--max-shard-size", "64KB", *options)[0] == 0
    for one in (tmp_path / "here").glob("*.safetensors"):
        assert one.read_bytes() == (tmp_path / "there" / one.name).read_bytes()


def test_report(run, server):
    status, out, _ = run("report", f"{server.url('/large.safetensors')}?sig={SECRET}", "-o", "page.html")
    assert status == 0
    with open("page.html", encoding="utf-8") as file:
        page = file.read()
    assert "<title>large.safetensors" in page
    assert "SHA-256" not in page
    assert SECRET not in out + page


# ---- options ----


def test_options_reach_the_store(run, server):
    url = server.url("/large.safetensors")
    for command in (("info", url), ("stats", url), ("check", url), ("diff", url, url), ("convert", url, "a.npz")):
        server.requests.clear()
        assert run(*command, "--storage-option", f"headers.X-Key={SECRET}", "--storage-option", "timeout=20")[0] == 0
        assert {request.headers.get("x-key") for request in server.requests} == {SECRET}, command


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            ["anon=true", "key=k", "n=3", "x=1.5", "none=null"],
            {"anon": True, "key": "k", "n": 3, "x": 1.5, "none": None},
        ),
        (["a.b.c=1", "a.b.d=2", "a.e=x=y"], {"a": {"b": {"c": 1, "d": 2}, "e": "x=y"}}),
        (['a={"b": [1]}', 'number="123"', "empty="], {"a": {"b": [1]}, "number": "123", "empty": ""}),
        (["a=NaN", "b=Infinity", "c={", "d=True"], {"a": "NaN", "b": "Infinity", "c": "{", "d": "True"}),
    ],
)
def test_values_of_options(given, expected, run, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    class Kept(MemoryFileSystem):
        """Notes what it is made with."""

        protocol, store, pseudo_dirs, cachable, made = "kept", {}, [""], False, []

        def __init__(self, **options):
            self.made.append(options)
            super().__init__()

        @classmethod
        def _strip_protocol(cls, path):
            return "/" + path.removeprefix("kept://").strip("/")

    fsspec.register_implementation("kept", Kept, clobber=True)
    save_file({"w": np.zeros(3)}, tmp_path / "x", durable=False)
    Kept().pipe_file("kept://x.safetensors", (tmp_path / "x").read_bytes())
    Kept.made.clear()
    status, _, err = run("info", "kept://x.safetensors", *(f"--storage-option={word}" for word in given))
    assert (status, err, Kept.made[0]) == (0, "", expected)
    status, _, err = run("info", "kept://x.safetensors")
    assert status == 1
    assert "the scheme 'kept' needs --storage-option" in err  # None were passed, rather than an empty dict


@pytest.mark.parametrize("wrong", [SECRET, f"={SECRET}", f"a.={SECRET}", f".a={SECRET}", f"a=1 a.b={SECRET}"])
def test_options_that_are_none(run, server, wrong):
    options = [word for one in wrong.split() for word in ("--storage-option", one)]
    status, out, err = run("info", server.url(INDEX), *options)
    assert status == 2
    assert err.count("\n") == 1
    assert "--storage-option" in err
    assert SECRET not in out + err


# ---- secrets and errors ----


def test_nothing_that_is_printed_has_secrets(run, server):
    url = server.url("/large.safetensors", user=f"me:{SECRET}@") + f"?sig={SECRET}"
    option = ("--storage-option", f"headers.X-Key={SECRET}")
    for command in (
        ("info", url), ("info", url, url), ("info", url, "--json"), ("check", url), ("check", url, "--json"),
        ("stats", url), ("stats", url, "--json"), ("diff", url, url), ("diff", url, url, "--json"),
        ("convert", url, "a.npz", "--overwrite", "--json"), ("-v", "info", url),
    ):  # fmt: skip
        status, out, err = run(*command, *option)
        assert status == 0, err
        assert SECRET not in out + err, command
    wrong = url.replace("large", "none")
    for command in (("info", wrong), ("check", wrong), ("diff", wrong, url), ("convert", wrong, "b.npz")):
        status, out, err = run(*command, *option)
        assert (status, err.count("\n")) == (1, 1)
        assert SECRET not in out + err, command
    status, out, err = run("convert", url, "b", "--max-shard-size", "1MB", "--resume")
    assert (status, err.count("\n")) == (1, 1)
    assert "the query of this URL may be a secret" in err
    assert SECRET not in out + err


def test_schemes_that_need_options_are_refused_in_one_line(run):
    status, _, err = run("info", "nosuch://bucket/a.safetensors")
    assert (status, err.count("\n")) == (1, 1)
    assert "needs --storage-option KEY=VALUE; without it" in err


@pytest.mark.parametrize("count", [1, 2])
def test_a_missing_package_is_named_in_one_line(run, monkeypatch, count):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    status, _, err = run("info", *["hf://owner/name"] * count)
    assert (status, err.count("\n")) == (1, count)
    assert err.endswith("not installed: pip install huggingface_hub\n")


def test_the_network_may_be_forbidden(run, server, monkeypatch):
    monkeypatch.setenv("SAFELOAD_OFFLINE", "1")
    status, _, err = run("info", server.url(INDEX))
    assert (status, err.count("\n")) == (1, 1)
    assert "SAFELOAD_OFFLINE is set" in err
    assert not server.requests
