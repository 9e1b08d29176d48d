"""safeload.open and Checkpoint: a mapping over a file or a folder, what closing leaves alive, what may be opened."""

import gc
import importlib.util
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.holes import extend

import safeload
from safeload import (
    Checkpoint,
    FormatError,
    LoadStats,
    QuantizedTensor,
    TensorInfo,
    TensorNotFoundError,
    UnsupportedError,
)
from safeload.numpy import save_file

BACKENDS = ("mmap", "pread", "direct")
TENSORS = {
    "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "large": np.arange(300_000, dtype=np.int64),
    "small": np.array([1, 2, 3], np.uint8),
    "empty": np.zeros((0, 3), np.int16),
    "bf16": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
}
# By the platform: Wine shows Windows programs a /proc too, that of its server.
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
needs_h5py = pytest.mark.skipif(importlib.util.find_spec("h5py") is None, reason="needs h5py")


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same(ours, expected):
    assert ours.keys() == expected.keys()
    for name, array in ours.items():
        assert same(array, expected[name]), name


def run_python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-I", "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def mapped(path):
    return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, {"format": "np"}, durable=False)
    return path


SHARDS = {
    "model-00001-of-00002.safetensors": {"a": np.full(3, 1.0), "b": np.full((2, 2), 2, np.int8)},
    "model-00002-of-00002.safetensors": {"c": np.full(5, 3, np.float16), "d": np.arange(200_000)},
}
ALL = {name: array for tensors in SHARDS.values() for name, array in tensors.items()}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for i, (name, tensors) in enumerate(SHARDS.items()):
        save_file(tensors, folder / name, {"format": "pt", f"shard{i}": "yes"}, durable=False)
    return folder


def write_index(folder, weight_map=None, **more):
    if weight_map is None:
        weight_map = {tensor: name for name, tensors in SHARDS.items() for tensor in tensors}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map, **more}))
    return path


# ---- a mapping ----


def test_a_checkpoint_is_not_made_of_a_path():
    with pytest.raises(TypeError, match=r"safeload\.open\(path\)"):
        safeload.Checkpoint("model.safetensors")


def test_a_checkpoint_is_a_mapping(path):
    with safeload.open(path) as checkpoint:
        assert isinstance(checkpoint, Mapping)
        assert isinstance(checkpoint, Checkpoint)
        assert len(checkpoint) == len(TENSORS)
        assert set(checkpoint) == set(checkpoint.keys()) == set(TENSORS)
        ranges = [(info.offset, info.offset + info.nbytes) for info in map(checkpoint.tensors.get, checkpoint)]
        assert ranges == sorted(ranges)
        assert "weight" in checkpoint
        assert "weigh" not in checkpoint
        assert 3 not in checkpoint
        assert_same(dict(checkpoint), TENSORS)
        assert_same(dict(checkpoint.items()), TENSORS)
        assert checkpoint.get("nothing") is None
        assert same(checkpoint.get("small"), TENSORS["small"])
        assert "model.safetensors" in repr(checkpoint)


def test_an_item_is_a_writable_view_of_the_same_memory_each_time(path):
    content = path.read_bytes()
    with safeload.open(path) as checkpoint:
        for name in TENSORS:
            array = checkpoint[name]
            assert array.flags.writeable
            assert array.flags.c_contiguous
            assert array.flags.aligned
            again = checkpoint[name]
            assert array.__array_interface__["data"][0] == again.__array_interface__["data"][0]
        checkpoint["large"][:] = -1
        assert (checkpoint["large"] == -1).all()
        checkpoint["small"][1] = 77
        assert checkpoint["small"].tolist() == [1, 77, 3]
        assert same(checkpoint["weight"], TENSORS["weight"])
    assert path.read_bytes() == content


def test_an_unaligned_item_is_the_same_memory_each_time_too(tmp_path):
    text = json.dumps({"x": {"dtype": "F64", "shape": [4], "data_offsets": [0, 32]}}).encode()
    text += b" " * (-len(text) % 8 + 1)
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + np.arange(4.0).tobytes())
    with safeload.open(tmp_path / "x") as checkpoint:
        assert checkpoint["x"].flags.aligned
        checkpoint["x"][0] = 9
        assert checkpoint["x"].tolist() == [9, 1, 2, 3]


def test_tensors_says_what_there_is(path):
    with safeload.open(path) as checkpoint:
        assert set(checkpoint.tensors) == set(TENSORS)
        content = path.read_bytes()
        for name, info in checkpoint.tensors.items():
            array = TENSORS[name]
            assert isinstance(info, TensorInfo)
            assert info._fields == ("name", "dtype", "shape", "nbytes", "file", "offset", "parts")
            assert (info.name, info.shape, info.nbytes, info.file) == (name, array.shape, array.nbytes, str(path))
            assert info.parts == (name,)
            assert content[info.offset : info.offset + info.nbytes] == array.tobytes()
        codes = {name: info.dtype for name, info in checkpoint.tensors.items()}
        assert codes == {"weight": "F32", "large": "I64", "small": "U8", "empty": "I16", "bf16": "BF16"}
        with pytest.raises(TypeError):
            checkpoint.tensors["new"] = info
        assert checkpoint.tensors is checkpoint.tensors


def test_the_attributes_of_a_file(path):
    with safeload.open(path) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert checkpoint.files == [str(path)]
        assert checkpoint.metadata == {"format": "np"}
        assert checkpoint.config is None
        assert checkpoint.nbytes == sum(array.nbytes for array in TENSORS.values())
        assert checkpoint.last_load is None


def test_a_packed_tensor_has_its_logical_shape_in_tensors(tmp_path):
    text = json.dumps({"x": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with safeload.open(tmp_path / "x") as checkpoint:
        info = checkpoint.tensors["x"]
        assert (info.dtype, info.shape, info.nbytes) == ("F4", (2, 4), 4)
        assert (checkpoint["x"].dtype, checkpoint["x"].shape) == (np.uint8, (2, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_load_gives_fresh_arrays_and_says_what_it_did(backend, path):
    with safeload.open(path) as checkpoint:
        first, second = checkpoint.load(backend=backend), checkpoint.load(backend=backend)
        assert_same(first, TENSORS)
        assert_same(second, TENSORS)
        assert list(first) == list(checkpoint)
        for name in TENSORS:
            assert not np.shares_memory(first[name], second[name])
            assert not np.shares_memory(first[name], checkpoint[name])
        stats = checkpoint.last_load
        assert isinstance(stats, LoadStats)
        assert stats._fields == ("bytes", "tensors", "seconds", "backend", "reason")
        assert stats[:2] == (checkpoint.nbytes, len(TENSORS))
        assert 0 <= stats.seconds < 60
        assert stats.backend in (backend, "pread" if backend == "direct" else backend)  # as the system allows
        some = checkpoint.load(["small", "weight"], backend=backend)
        assert list(some) == ["small", "weight"]
        assert checkpoint.last_load[:2] == (51, 2)


def test_load_reports_progress_and_takes_threads(folder):
    calls = []
    with safeload.open(folder) as checkpoint:
        loaded = checkpoint.load(backend="pread", threads=3, progress=lambda done, total: calls.append((done, total)))
        assert_same(loaded, ALL)
        total = checkpoint.nbytes
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert calls[-1] == (total, total)


@pytest.mark.parametrize("several", [False, True])
def test_a_missing_name_of_an_iterator_is_refused(several, path, folder):
    names = ["a"] if several else ["weight"]
    with safeload.open(folder if several else path) as checkpoint:
        assert list(checkpoint.load(iter(names))) == names
        for refused in ([*names, "missing"], ["missing"], ["missing", *names]):
            with pytest.raises(TensorNotFoundError, match="missing"):
                checkpoint.load(iter(refused))
            with pytest.raises(TensorNotFoundError, match="missing"):
                list(checkpoint.stream(iter(refused)))


@pytest.mark.parametrize(
    "call", ["checkpoint['weigth']", "checkpoint.get_slice('weigth')", "checkpoint.load(['weigth'])"]
)
def test_a_missing_name_is_a_key_error_that_suggests(call, path, folder):
    with safeload.open(path) as checkpoint, pytest.raises(TensorNotFoundError, match="weight"):
        eval(call, {"checkpoint": checkpoint})
    with safeload.open(folder) as checkpoint, pytest.raises(KeyError, match="weigth"):
        eval(call, {"checkpoint": checkpoint})


def test_wrong_arguments_are_refused(path):
    with safeload.open(path) as checkpoint:
        with pytest.raises(TypeError):
            checkpoint.load("weight")
        with pytest.raises(safeload.SafeloadError, match="backend"):
            checkpoint.load(backend="x")
        with pytest.raises(ValueError, match="threads"):
            checkpoint.load(backend="pread", threads=0)
        with pytest.raises(UnsupportedError, match="cannot load as"):
            checkpoint.load(dtype="int8")
        with pytest.raises(ValueError, match="out: no array for tensor"):
            checkpoint.load(out={})
        with pytest.raises((TypeError, KeyError)):
            checkpoint[3]
    with pytest.raises(ValueError, match="format"):
        safeload.open(path, format="nonsense")
    with pytest.raises(ValueError, match="unknown_globals"):
        safeload.open(path, unknown_globals="nonsense")
    with pytest.raises(UnsupportedError, match="root"):
        safeload.open(path, root="model")


def test_load_is_open_and_load_in_one(path, folder):
    assert_same(safeload.load(path), TENSORS)
    assert_same(safeload.load(folder), ALL)
    assert list(safeload.load(path, ["small"], backend="pread", threads=1, format="safetensors")) == ["small"]
    calls = []
    safeload.load(path, names=["large"], backend="pread", progress=lambda *call: calls.append(call))
    assert calls[-1] == (2_400_000, 2_400_000)


def test_open_and_load_take_only_the_path_and_names_by_position(path):
    with pytest.raises(TypeError):
        safeload.open(path, "safetensors")
    with pytest.raises(TypeError):
        safeload.load(path, None, "safetensors")


# ---- closing ----


def test_after_close_views_live_and_access_is_a_value_error(path):
    checkpoint = safeload.open(path)
    view, part, loaded = checkpoint["large"], checkpoint.get_slice("weight"), checkpoint.load()
    checkpoint.close()
    checkpoint.close()
    assert same(view, TENSORS["large"])
    assert_same(loaded, TENSORS)
    for access in (
        lambda: checkpoint["large"],
        lambda: checkpoint["small"],
        lambda: checkpoint.load(),
        lambda: checkpoint.load(["small"]),
        lambda: checkpoint.get_slice("weight"),
        lambda: part[0],
    ):
        with pytest.raises(ValueError, match="closed"):
            access()
    assert "closed" in repr(checkpoint)


def test_with_closes_and_lets_exceptions_through(path):
    with safeload.open(path) as checkpoint:
        assert isinstance(checkpoint, Checkpoint)
    checkpoint = safeload.open(path)
    with pytest.raises(ZeroDivisionError), checkpoint:
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="closed"):
        checkpoint["large"]


@needs_proc
def test_a_mapping_dies_with_its_last_array(path):
    checkpoint = safeload.open(path)
    assert not mapped(path)
    large, weight = checkpoint["large"], checkpoint["weight"]
    assert mapped(path)
    checkpoint.close()
    part = large[5:10]
    del large
    gc.collect()
    assert mapped(path)
    assert part.tolist() == [5, 6, 7, 8, 9]
    del part
    gc.collect()
    assert mapped(path)
    del weight
    gc.collect()
    assert not mapped(path)


@needs_proc
def test_each_load_has_a_mapping_that_goes_with_its_arrays(path):
    with safeload.open(path) as checkpoint:
        first, second = checkpoint.load(), checkpoint.load()
        assert Path("/proc/self/maps").read_text(encoding="utf-8").count(str(path)) >= 2
        del first
        gc.collect()
        assert mapped(path)
        del second
        gc.collect()
        assert not mapped(path)


@needs_proc
def test_pread_maps_nothing(path):
    with safeload.open(path) as checkpoint:
        loaded = checkpoint.load(backend="pread")
        assert not mapped(path)
        assert_same(loaded, TENSORS)


@needs_proc
def test_no_descriptor_is_left_open(path, folder, tmp_path):
    before = descriptors()
    keep = []
    for _ in range(20):
        with safeload.open(path) as checkpoint:
            keep.append(checkpoint["large"])
        with safeload.open(folder) as checkpoint:
            keep.append(checkpoint["d"])
        safeload.load(folder)
        safeload.load(folder, backend="pread")
        safeload.open(path)
        safeload.open(folder)
    gc.collect()
    assert descriptors() == before


@needs_proc
@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"},
        {"a": "model-00001-of-00002.safetensors", "x": "model-00003.safetensors"},
    ],
)
def test_no_descriptor_is_left_open_where_opening_fails(weight_map, folder):
    write_index(folder, weight_map)
    before = descriptors()
    for _ in range(5):
        with pytest.raises((FormatError, FileNotFoundError)):
            safeload.open(folder)
    gc.collect()
    assert descriptors() == before


@needs_proc
def test_no_descriptor_is_left_open_where_config_json_is_broken(folder):
    (folder / "config.json").write_text("{")
    before = descriptors()
    for _ in range(5):
        with pytest.raises(FormatError, match=r"config\.json"):
            safeload.open(folder)
    gc.collect()
    assert descriptors() == before


# ---- folders ----


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_folder_has_the_tensors_of_all_its_shards(indexed, backend, folder):
    if indexed:
        write_index(folder, metadata={"total_size": 7})
    with safeload.open(folder) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert checkpoint.files == [str(folder / name) for name in SHARDS]
        assert_same(dict(checkpoint), ALL)
        assert_same(checkpoint.load(backend=backend), ALL)
        assert checkpoint.last_load.backend in (backend, "pread" if backend == "direct" else backend)
        assert checkpoint.nbytes == sum(array.nbytes for array in ALL.values())
        assert len(checkpoint) == len(ALL)
        assert {name: Path(info.file).name for name, info in checkpoint.tensors.items()} == {
            tensor: name for name, tensors in SHARDS.items() for tensor in tensors
        }
        assert checkpoint.metadata.items() >= {"format": "pt", "shard0": "yes", "shard1": "yes"}.items()
        assert checkpoint.metadata.get("total_size") == (7 if indexed else None)
        assert same(checkpoint.get_slice("d")[5:9], ALL["d"][5:9])
        assert list(checkpoint.load(["d", "a"])) == ["d", "a"]
        assert checkpoint["a"] is checkpoint["a"]


def test_an_index_is_opened_by_its_own_path(folder):
    index = write_index(folder)
    with safeload.open(index) as checkpoint:
        assert_same(dict(checkpoint), ALL)
        assert checkpoint.files == [str(folder / name) for name in SHARDS]


def test_the_index_is_authoritative(folder):
    save_file({"a": np.zeros(1)}, folder / "extra.safetensors", durable=False)
    write_index(folder, {"a": "model-00001-of-00002.safetensors", "d": "model-00002-of-00002.safetensors"})
    with safeload.open(folder) as checkpoint:
        assert set(checkpoint) == {"a", "d"}
        assert "b" not in checkpoint
        assert checkpoint["a"].tolist() == [1, 1, 1]
        assert checkpoint.nbytes == ALL["a"].nbytes + ALL["d"].nbytes
        assert set(checkpoint.load(backend="pread")) == {"a", "d"}
        with pytest.raises(TensorNotFoundError):
            checkpoint["b"]


def test_config_json_is_parsed(folder):
    config = {"hidden_size": 5, "nested": {"a": [1, None]}}
    (folder / "config.json").write_text(json.dumps(config))
    with safeload.open(folder) as checkpoint:
        assert checkpoint.config == config
    with safeload.open(write_index(folder)) as checkpoint:
        assert checkpoint.config == config


def test_a_tensor_that_its_shard_lacks_is_named(folder):
    write_index(folder, {"a": "model-00002-of-00002.safetensors"})
    with pytest.raises(FormatError, match=r"'a'.*model-00002-of-00002\.safetensors"):
        safeload.open(folder)


def test_a_missing_shard_is_file_not_found(folder):
    write_index(folder, {"a": "model-00003-of-00003.safetensors"})
    with pytest.raises(FileNotFoundError, match="model-00003-of-00003"):
        safeload.open(folder)


@pytest.mark.parametrize(
    "value",
    ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "sub\\x", "..", ".", "", 3, None, ["x"], "a\0b"],
)
def test_a_shard_that_is_no_bare_name_is_refused(value, folder):
    save_file({"a": np.zeros(1)}, folder.parent / "x.safetensors", durable=False)
    (folder / "sub").mkdir()
    save_file({"a": np.zeros(1)}, folder / "sub" / "x.safetensors", durable=False)
    write_index(folder, {"a": value})
    with pytest.raises(FormatError, match="weight_map"):
        safeload.open(folder)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b"{}", b'{"weight_map": []}', b'{"weight_map": {}, "metadata": 3}', b"\xff", b"[" * 100_000],
)
def test_a_broken_index_is_a_format_error_that_names_it(text, folder):
    (folder / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(FormatError, match=r"model\.safetensors\.index\.json"):
        safeload.open(folder)


def test_a_name_that_two_keys_of_the_index_give_is_refused(folder):
    name = next(iter(SHARDS))
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}", "a": "{name}"}}}}')
    with pytest.raises(FormatError, match="'a'"):
        safeload.open(folder)


def test_two_indexes_are_refused_unless_one_has_the_usual_name(folder):
    index = write_index(folder)
    (folder / "other.safetensors.index.json").write_text("{}")
    with safeload.open(folder) as checkpoint:
        assert set(checkpoint) == set(ALL)
    index.rename(folder / "another.safetensors.index.json")
    with pytest.raises(FormatError, match=r"another\.safetensors\.index\.json.*other\.safetensors\.index\.json"):
        safeload.open(folder)


def test_a_folder_without_weights_lists_what_is_there(tmp_path):
    with pytest.raises(safeload.SafeloadError, match="nothing"):
        safeload.open(tmp_path)
    (tmp_path / "readme.txt").write_text("")
    (tmp_path / "sub").mkdir()
    with pytest.raises(safeload.SafeloadError, match=r"readme\.txt, sub"):
        safeload.open(tmp_path)


def test_hidden_files_are_no_weights(folder):
    (folder / ".model.safetensors.1234.tmp").write_bytes(b"half")
    (folder / "._model.safetensors").write_bytes(b"AppleDouble")
    with safeload.open(folder) as checkpoint:
        assert set(checkpoint) == set(ALL)


# ---- what a file is ----


@pytest.mark.parametrize(
    "name", ["model", "model.bin", "model.pt", "model.gguf", "model.npz", "model.json", "model.txt"]
)
def test_the_format_is_told_from_the_content(name, tmp_path):
    save_file({"x": np.arange(3)}, tmp_path / name, durable=False)
    for options in ({}, {"format": "safetensors"}):
        with safeload.open(tmp_path / name, **options) as checkpoint:
            assert checkpoint.format == "safetensors"
            assert checkpoint["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "HTML"),
        (b"\n <html>", "HTML"),
        (b'<?xml version="1.0"?><Error/>', "XML"),
        (b"\x1f\x8b\x08" + bytes(20), "gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(20), "zstd"),
        pytest.param(b"\x89HDF\r\n\x1a\n" + bytes(20), "HDF5", marks=needs_h5py),
        (bytes(257) + b"ustar" + bytes(250), "tar"),
    ],
    ids=["empty", "lfs", "html", "html", "xml", "gzip", "zstd", "hdf5", "tar"],
)
@pytest.mark.parametrize("name", ["model.safetensors", "model"])
def test_what_is_no_weight_file_is_named(content, kind, name, tmp_path):
    (tmp_path / name).write_bytes(content)
    for call in (safeload.open, safeload.safe_open, safeload.numpy.load_file):
        with pytest.raises(safeload.SafeloadError, match=kind) as caught:
            call(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


def test_noise_is_a_format_error(tmp_path):
    (tmp_path / "x").write_bytes(np.random.default_rng(3).integers(128, 256, 100, np.uint8).tobytes())
    with pytest.raises(FormatError) as caught:
        safeload.open(tmp_path / "x")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.path, again.offset) == (str(caught.value), caught.value.path, caught.value.offset)


def test_a_missing_path_is_file_not_found(tmp_path):
    for call in (safeload.open, safeload.load):
        with pytest.raises(FileNotFoundError) as caught:
            call(tmp_path / "nothing")
        assert str(caught.value) == f"No such file or directory: {tmp_path / 'nothing'}"
        assert caught.value.filename == str(tmp_path / "nothing")


# ---- threads and processes ----


@pytest.mark.parametrize("sharded", [False, True])
def test_threads_read_one_checkpoint(sharded, path, folder):
    expected = ALL if sharded else TENSORS
    names = list(expected)
    for _ in range(5):
        with safeload.open(folder if sharded else path) as checkpoint, ThreadPoolExecutor(8) as pool:

            def work(i, checkpoint=checkpoint):
                found = {}
                for k in range(len(names)):
                    name = names[(i + k) % len(names)]
                    found[name] = checkpoint[name]
                    assert same(checkpoint.get_slice(name)[...], expected[name])
                    assert name in checkpoint.tensors
                assert_same(checkpoint.load(backend=BACKENDS[i % 2], threads=2), expected)
                return found

            results = list(pool.map(work, range(8)))
            for name in names:
                assert len({id(result[name]) for result in results}) == 1
                assert results[0][name] is checkpoint[name]
                assert same(results[0][name], expected[name])


def test_threads_load_different_files(tmp_path):
    for i in range(8):
        tensors = {f"{k}": np.full(100_000 + k, i * 10 + k, np.int32) for k in range(5)}
        save_file(tensors, tmp_path / f"{i}", durable=False)

    def work(i):
        for backend in BACKENDS * 3:
            for name, array in safeload.load(tmp_path / f"{i}", backend=backend).items():
                assert array.shape == (100_000 + int(name),)
                assert (array == i * 10 + int(name)).all()
        return i

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == list(range(8))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_checkpoint_works_in_a_forked_child(path):
    code = """
import os, sys
import numpy as np
import safeload
checkpoint = safeload.open(sys.argv[1])
assert checkpoint.load(backend="pread", threads=4)["large"][5] == 5
view = checkpoint["large"]
child = os.fork()
if child == 0:
    status = 1
    try:
        assert (view == np.arange(300_000)).all()
        view[:] = 7
        assert (checkpoint["large"] == 7).all()
        assert (checkpoint.load(backend="pread", threads=4)["large"] == np.arange(300_000)).all()
        assert (checkpoint.load()["large"] == np.arange(300_000)).all()
        assert checkpoint.get_slice("weight")[1, 1:3].tolist() == [5, 6]
        checkpoint.close()
        status = 0
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (view == np.arange(300_000)).all()
assert (checkpoint.load(backend="pread", threads=4)["large"] == np.arange(300_000)).all()
assert checkpoint["small"].tolist() == [1, 2, 3]
"""
    result = run_python(code, path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("backend", ["pread", "direct"])
def test_ctrl_c_ends_a_long_load(backend, tmp_path):
    path, size = tmp_path / "x", 2 << 30
    text = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with open(path, "r+b") as file:
        extend(file, 8 + len(text) + size)
    code = """
import _thread, os, signal, sys
import safeload
calls = []
def progress(done, total):
    calls.append(done)
    if len(calls) == 1:
        _thread.interrupt_main() if os.name == "nt" else os.kill(os.getpid(), signal.SIGINT)
try:
    safeload.load(sys.argv[1], backend=sys.argv[2], threads=1, progress=progress)
except KeyboardInterrupt:
    print("interrupted", calls[-1] < 2 << 30)
"""
    result = run_python(code, path, backend)
    assert result.stdout == "interrupted True\n", result.stderr
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- where the system refuses ----


def test_a_refused_mapping_is_read_and_said(monkeypatch, folder):
    local = inside.local
    real = local.LocalStore.map

    def refuse_one(self, **how):
        if "model-00002" in self.path:
            raise OSError(12, "Cannot allocate memory", self.path)
        return real(self, **how)

    monkeypatch.setattr(local.LocalStore, "map", refuse_one)
    with safeload.open(folder) as checkpoint:
        assert_same(checkpoint.load(), ALL)
        assert list(checkpoint.load()) == list(checkpoint)
        assert checkpoint.last_load.backend == "pread"
        assert_same(checkpoint.load(["a", "b"]), {name: ALL[name] for name in "ab"})
        assert checkpoint.last_load.backend == "mmap"
        assert_same(dict(checkpoint), ALL)
        assert checkpoint["d"] is checkpoint["d"]


@pytest.mark.skipif(os.name == "nt", reason="Windows does not truncate open files")
def test_a_truncated_shard_is_named(folder):
    with safeload.open(folder) as checkpoint:
        shard = folder / "model-00002-of-00002.safetensors"
        os.truncate(shard, checkpoint.tensors["d"].offset + 1000)
        with pytest.raises(FormatError, match="tensor 'd'") as caught:
            checkpoint.load(backend="pread")
        assert caught.value.path == str(shard)
        assert caught.value.offset == checkpoint.tensors["d"].offset + 1000
        assert_same(checkpoint.load(["a", "b"], backend="pread"), {name: ALL[name] for name in "ab"})


def test_a_description_says_how_large_a_tensor_is_and_what_array_it_becomes(tmp_path):
    matrix = np.ones((2, 32), np.float32)
    tensors = {
        "b": matrix.astype(ml_dtypes.bfloat16),
        "int8": safeload.quantize(matrix, "int8"),
        "q8_0": safeload.quantize(matrix, "q8_0"),
        "scalar": np.zeros((), np.int16),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    with safeload.open(tmp_path / "x.safetensors") as opened:
        infos = opened.tensors
        assert {name: (info.dtype, info.size, info.ndim) for name, info in infos.items()} == {
            "b": ("BF16", 64, 2),
            "int8": ("int8", 64, 2),
            "q8_0": ("Q8_0", 64, 2),
            "scalar": ("I16", 1, 0),
        }
        for name, value in opened.items():
            assert infos[name].np_dtype == (None if isinstance(value, QuantizedTensor) else value.dtype)
