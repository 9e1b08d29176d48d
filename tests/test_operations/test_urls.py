"""Operations on checkpoints behind URLs: the results of the local copy, in how many requests, and how they end."""

import shutil
import signal
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from builders import torch_build
from builders.http_faults import silent
from builders.http_server import Server
from builders.inside import manifest
from builders.paths import DATA
from builders.remote import Served
from builders.thorough import part_of

import safeload
from safeload.errors import RemoteError
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_threads_are_left():
    before = set(threading.enumerate())
    yield
    until = time.monotonic() + 5
    while left := [one for one in threading.enumerate() if one not in before and one.name.startswith("safeload")]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


@pytest.fixture(params=["http", "memory", "store"])
def place(request, model):
    """What every function takes in place of the folder ``model``."""
    if request.param == "http":
        pytest.importorskip("urllib3")
        with Server(model) as server:
            yield server.url("/model.safetensors.index.json")
    elif request.param == "memory":
        fs = pytest.importorskip("fsspec").filesystem("memory")
        folder = f"/urls-{time.monotonic_ns()}"
        fs.put(str(model), folder, recursive=True)
        yield f"memory:/{folder}"
        fs.rm(folder, recursive=True)
    else:
        yield Served.folder(model).at("mem://model")


def findings(report):
    return report.errors, report.warnings, report.notes, report.verdict, report.tensors, report.nbytes


def contents(folder):
    return {one.name: one.read_bytes() for one in folder.iterdir()}


def as_bytes(weights):
    return {
        name: value.data.tobytes() if hasattr(value, "scheme") else value.tobytes() for name, value in weights.items()
    }


def outcome(operation, place):
    """The result, or the kind of error."""
    try:
        return repr(operation(place))
    except safeload.SafeloadError as error:
        return type(error)


# ---- the same results ----


def test_stats(place, model):
    assert repr(safeload.stats(place, histogram=True)) == repr(safeload.stats(model, histogram=True))


def test_diff_of_either_side(place, model):
    for sides in ((place, model), (model, place), (place, place)):
        assert safeload.diff(*sides).same


def test_diff_of_other_dtypes(place, model, tmp_path):
    safeload.convert(model, tmp_path / "half.safetensors", dtype="float16")
    there, here = (safeload.diff(one, tmp_path / "half.safetensors") for one in (place, model))
    assert there.tensors == here.tensors
    assert there.dtypes == here.dtypes


@pytest.mark.parametrize("values", [True, False])
def test_validate(place, model, values):
    assert findings(safeload.check(place, values=values)) == findings(safeload.check(model, values=values))


def test_a_manifest(place, model):
    assert manifest.make(place) == manifest.make(model)


def test_load_quantized(place, model):
    weights = safeload.load_quantized(place, "q8_0")
    assert as_bytes(weights) == as_bytes(safeload.load_quantized(model, "q8_0"))
    errors = safeload.quantization_error(place, weights)
    assert errors == safeload.quantization_error(model, weights)


def test_stack(place, model):
    layout = safeload.Layout("norms", [safeload.StackedTensor("norm", "model.layers.{}.input_layernorm.weight")])
    assert as_bytes(safeload.stack(place, layout)) == as_bytes(safeload.stack(model, layout))


@pytest.mark.parametrize("resume", [False, True])
def test_convert_to_a_folder(place, model, tmp_path, resume):
    """With the tokenizer, where the store lists folders."""
    if resume and not isinstance(place, str):
        pytest.skip("a store of this process")
    options = {"dtype": "float16", "max_shard_size": "64KB", "resume": resume}
    safeload.convert(place, tmp_path / "there", **options)
    safeload.convert(model, tmp_path / "here", **options)
    there, here = contents(tmp_path / "there"), contents(tmp_path / "here")
    assert ("tokenizer.json" in there) == (not str(place).startswith("http"))
    missing = set() if "tokenizer.json" in there else {"tokenizer.json"}
    assert here.keys() - there.keys() == missing
    for name in there:
        assert there[name] == here[name] or name.endswith(".done.json"), name  # the plan has other sources


@pytest.mark.parametrize("suffix", ["safetensors", "gguf", "npz"])
def test_convert_to_a_file(place, model, tmp_path, suffix):
    for name, source in (("there", place), ("here", model)):
        safeload.convert(source, tmp_path / f"{name}.{suffix}", dtype="float32", raw=True)
    assert (tmp_path / f"there.{suffix}").read_bytes() == (tmp_path / f"here.{suffix}").read_bytes()


def test_sources_of_both_kinds_are_merged(place, model, tmp_path):
    save_file({"more": np.ones(3, np.float32)}, tmp_path / "more.safetensors", durable=False)
    more = tmp_path / "more.safetensors"
    safeload.convert([place, more], tmp_path / "there.safetensors")
    safeload.convert([model, more], tmp_path / "here.safetensors")
    assert (tmp_path / "there.safetensors").read_bytes() == (tmp_path / "here.safetensors").read_bytes()


QUANTIZED = sorted(one.name for one in (DATA / "quantized").iterdir() if (one / "config.json").exists())


@pytest.mark.parametrize("family", part_of(QUANTIZED, 0, 3))
def test_packed_folders(family):
    """True weights, their statistics and findings: as of the local copy, or the same error."""
    folder = DATA / "quantized" / family
    there = Served.folder(folder).at("mem://model")
    assert findings(safeload.check(there)) == findings(safeload.check(folder))
    for operation in (safeload.stats, manifest.make, lambda one: safeload.diff(one, folder).tensors):
        assert outcome(operation, there) == outcome(operation, folder)


@pytest.mark.parametrize("name", ["a.npz", "b.npz", "a.pth"])
def test_archives_have_their_entries_checked(name, tmp_path):
    weights = {"a": np.arange(100_000, dtype=np.float32), "b": np.ones((3, 5), np.float64)}
    torch = {name: torch_build.tensor(torch_build.Storage(name, array)) for name, array in weights.items()}
    if name.endswith("npz"):
        (np.savez if name == "a.npz" else np.savez_compressed)(tmp_path / name, **weights)
    else:
        (tmp_path / name).write_bytes(torch_build.zip_file(torch))
    good = (tmp_path / name).read_bytes()
    for at in (None, len(good) // 2):
        content = bytearray(good)
        if at is not None:
            content[at] ^= 1
        (tmp_path / name).write_bytes(content)
        there = Served({f"mem://{name}": bytes(content)}).at(f"mem://{name}")
        here = safeload.check(tmp_path / name)
        assert here.ok == (at is None)
        assert findings(safeload.check(there))[1:] == findings(here)[1:]
        assert len(safeload.check(there).errors) == len(here.errors)
        if at is None:
            assert manifest.make(there) == manifest.make(tmp_path / name)


# ---- requests ----


@pytest.fixture
def large(tmp_path):
    """A store with one file of 300 tensors, 40 MiB."""
    weights = {f"layer.{k}.weight": np.full((35_000,), k, np.float32) for k in range(300)}
    save_file(weights, tmp_path / "model.safetensors", durable=False)
    return Served.folder(tmp_path)


def test_structure_takes_the_header_only(large):
    report = safeload.check(large.at("mem://model/model.safetensors"), values=False)
    assert report.tensors == 300
    assert len(large.requests) <= 2
    assert large.nbytes() <= 256 << 10


def test_everything_is_read_once(large):
    size = len(large.content["mem://model/model.safetensors"])
    for operation in (safeload.stats, manifest.make, lambda one: safeload.load_quantized(one, "q8_0")):
        large.requests.clear()
        operation(large.at("mem://model/model.safetensors"))
        assert size <= large.nbytes() <= size + MIB
        assert large.most <= 32


def test_a_selection_reads_what_it_selects(large):
    safeload.stats(large.at("mem://model/model.safetensors"), only="layer.7.*")
    assert large.nbytes() < MIB


# ---- options, errors, ends ----


def test_options_reach_the_store(tmp_path):
    """Of every function that takes a path; here the credentials that a server asks for."""
    pytest.importorskip("urllib3")
    save_file({"w": np.ones((64, 64), np.float32)}, tmp_path / "a.safetensors", durable=False)
    layout = safeload.Layout("w", [safeload.StackedTensor("w", "w")])
    local = tmp_path / "a.safetensors"
    with Server(tmp_path) as server:
        url = server.url("/a.safetensors")
        calls = {
            "open": lambda **o: safeload.open(url, **o).close(),
            "load": lambda **o: safeload.load(url, **o),
            "stats": lambda **o: safeload.stats(url, **o),
            "diff a": lambda **o: safeload.diff(url, local, **o),
            "diff b": lambda **o: safeload.diff(local, url, **o),
            "validate": lambda **o: safeload.check(url, **o),
            "manifest": lambda **o: manifest.make(safeload.open(url, **o)),
            "load_quantized": lambda **o: safeload.load_quantized(url, "q8_0", **o),
            "quantization_error a": lambda **o: safeload.quantization_error(url, local, **o),
            "quantization_error b": lambda **o: safeload.quantization_error(local, url, **o),
            "stack": lambda **o: safeload.stack(url, layout, **o),
            "convert": lambda **o: safeload.convert(url, tmp_path / "out.npz", overwrite=True, **o),
            "resume": lambda **o: safeload.convert(url, tmp_path / "out", max_shard_size=9999, resume=True, **o),
        }
        for name, call in calls.items():
            server.requests.clear()
            call(storage_options={"headers": {"X-Key": "s3cr3t"}})
            assert server.requests, name
            assert {request.headers.get("x-key") for request in server.requests} == {"s3cr3t"}, name


def test_what_is_missing(place):
    wrong = place / "none.safetensors" if not isinstance(place, str) else place.rpartition("/")[0] + "/none.safetensors"
    for operation in (safeload.stats, safeload.check, manifest.make):
        with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
            operation(wrong)


def test_a_shard_that_is_missing_is_a_finding(model):
    there, here = Served.folder(model), safeload.check(model)
    del there.content["mem://model/model-00002-of-00003.safetensors"]
    report = safeload.check(there.at("mem://model"))
    assert here.ok
    assert [finding.code for finding in report.errors] == ["index.shard"]
    assert "model-00002-of-00003.safetensors" in report.errors[0].message
    there.content["mem://model/model-00003-of-00003.safetensors"] = b"\xff" * 100
    report = safeload.check(there.at("mem://model"))
    assert sorted(finding.code for finding in report.errors) == ["file.format", "index.shard"]
    assert "2 of 3 shards are missing or damaged; fetch again: " in report.notes[0].message


def test_damaged_shards_behind_https_are_all_named(model, tmp_path):
    pytest.importorskip("urllib3")
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    (folder / "model-00001-of-00003.safetensors").unlink()
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"\xff" * 100)
    with Server(folder) as server:
        report = safeload.check(server.url("/model.safetensors.index.json"))
    assert sorted(finding.code for finding in report.errors) == ["file.format", "index.shard"]
    assert "2 of 3 shards are missing or damaged; fetch again: " in report.notes[0].message


def test_a_read_that_fails_is_a_finding_with_its_url(model):
    shard = "mem://model/model-00002-of-00003.safetensors"

    def fail(begin, end):
        raise RemoteError("the connection broke", shard, begin, end)

    there = Served.folder(model, head=16 << 10)
    with safeload.open(there.at("mem://model")) as opened:
        there.failing[shard] = fail
        report = safeload.check(opened)
        assert [finding.code for finding in report.errors] == ["file.read"]
        assert shard in report.errors[0].message
        with pytest.raises(RemoteError, match="the connection broke"):
            safeload.stats(opened)


def test_arrays_and_objects_are_told_apart():
    assert safeload.stats(np.ones(3)).count == 3
    assert safeload.stats([1.0, 2.0]).count == 2
    assert safeload.stats(ml_dtypes.bfloat16(2)).count == 1


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals")
@pytest.mark.parametrize("operation", ["stats", "validate", "diff", "manifest", "convert"])
def test_ctrl_c_ends_it_at_once(operation, tmp_path):
    pytest.importorskip("urllib3")
    save_file({f"w{k}": np.ones(MIB, np.float32) for k in range(12)}, tmp_path / "a.safetensors", durable=False)
    with Server(tmp_path, faults=[silent(first=1)]) as server:
        url, main = server.url("/a.safetensors"), threading.main_thread()
        call = {
            "stats": lambda: safeload.stats(url),
            "validate": lambda: safeload.check(url),
            "diff": lambda: safeload.diff(url, tmp_path / "a.safetensors"),
            "manifest": lambda: manifest.make(url),
            "convert": lambda: safeload.convert(url, tmp_path / "out.safetensors", dtype="float16"),
        }[operation]
        sent = []

        def press():
            until = time.monotonic() + 60
            while len(server.requests) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.2)
            sent.append(time.monotonic())
            signal.pthread_kill(main.ident, signal.SIGINT)

        thread = threading.Thread(target=press)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                call()
        finally:
            thread.join()
        assert time.monotonic() - sent[0] < 15  # of 30 s, after which a silent server is given up
        assert not (tmp_path / "out.safetensors").exists()
