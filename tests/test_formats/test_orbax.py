"""Orbax checkpoints: folders of Orbax's own writer, any zarr arrays, and folders with a fault."""

import copy
import json
import os
import pickle
import shutil
import struct
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builders import inside, orbax_build
from builders.http_server import Server
from builders.inside import ocdbt
from builders.orbax_build import OrbaxCheckpoint, column, framed, sample, varint
from builders.paths import ROOT
from builders.random import rng
from builders.thorough import part_of

import safeload
from safeload.errors import FormatError, LimitError, SafeloadError, TensorNotFoundError, UnsupportedError

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

# tests/data/orbax/compare.sh lets Orbax write all fixtures anew.
DATA = Path(os.environ.get("SAFELOAD_ORBAX_FIXTURES") or ROOT / "tests" / "data" / "orbax")
FIXTURES = sorted(path.stem for path in DATA.glob("*_[0-9].zip"))
META = {"name": "text", "opt_state": {"1": {}, "2": None, "3": (), "4": []}}


def expected(fixture):
    """The arrays that Orbax restores; int4 is opened as int8."""
    want = {}
    with np.load(DATA / f"expected_{fixture[-1]}.npz") as archive:
        for key, array in archive.items():
            name, _, dtype = key.partition("|")
            if dtype:
                array = array.view(np.dtype(getattr(ml_dtypes, dtype))).reshape(array.shape[:-1])
            want[name] = array.astype(np.int8) if dtype == "int4" else array
    return want


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check_tensors(arrays, want):
    assert sorted(arrays) == sorted(want)
    for name, array in want.items():
        assert equal(arrays[name], array), name


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder with all fixtures, unpacked."""
    folder = tmp_path_factory.mktemp("orbax")
    for name in FIXTURES:
        shutil.unpack_archive(DATA / f"{name}.zip", folder / name)
    return folder


@pytest.fixture(params=FIXTURES)
def fixture(request):
    pytest.importorskip("zstandard")
    return request.param


@pytest.fixture
def compress():
    return pytest.importorskip("zstandard").compress


def numbers(*shape, dtype=np.float32):
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


# ---- folders of Orbax's writer ----


def test_every_way_to_read_gives_what_orbax_gave(data, fixture):
    want = expected(fixture)
    with safeload.open(data / fixture) as opened:
        assert opened.format == "orbax"
        check_tensors(opened.load(), want)
        check_tensors(opened.load(backend="pread", threads=2), want)
        check_tensors(dict(opened.stream(order="ready", ahead=100)), want)
        check_tensors({name: opened[name] for name in opened}, want)
        out = {name: np.empty_like(array) for name, array in want.items()}
        opened.load(out=out)
        check_tensors(out, want)
        for name, array in opened.load(dtype="float32", only=["params.*"]).items():
            floating = want[name].dtype.kind == "f" or want[name].dtype.name.startswith(("bfloat", "float8"))
            assert equal(array, want[name].astype(np.float32) if floating else want[name])
        assert dict(opened.metadata) == META
        assert opened.notes == ["'params.int4': opened as I8, with the same values"]


def test_slices_and_rows_are_those_of_the_whole(data, fixture):
    want = expected(fixture)
    with safeload.open(data / fixture) as opened:
        for name, array in part_of([*want.items()], FIXTURES.index(fixture), 2):
            part = opened.get_slice(name)
            assert equal(part[...], array)
            if array.ndim:
                assert equal(opened.take(name, range(0, len(array), 2)), array[::2])
                assert equal(part[1:], np.ascontiguousarray(array[1:]))
                assert equal(part[..., 1:3], np.ascontiguousarray(array[..., 1:3]))
                assert equal(part[::-2, ...], np.ascontiguousarray(array[::-2]))
            assert equal(pickle.loads(pickle.dumps(part))[...], array)


@pytest.mark.parametrize("fixture", ["ocdbt2_4", "small_4", "zarr3_2", "manager_1"])
def test_operations_take_a_folder_like_any_other(data, fixture, tmp_path):
    pytest.importorskip("zstandard")
    want, path = expected(fixture), data / fixture
    safeload.convert(path, tmp_path / "one.safetensors")
    check_tensors(safeload.load(tmp_path / "one.safetensors"), want)
    with ProcessPoolExecutor(1) as executor:
        safeload.convert(path, tmp_path / "many", max_shard_size=300, executor=executor)
    check_tensors(safeload.load(tmp_path / "many"), want)
    assert safeload.diff(path, tmp_path / "many").same
    assert safeload.stats(path)["params.rows"].max == 79
    assert not safeload.check(path).errors
    assert "orbax" in str(safeload.info(path))
    quantized = safeload.load_quantized(path, "int8")["params.columns"]
    assert np.abs(quantized.dequantize() - want["params.columns"]).max() < 0.5


def test_a_checkpoint_is_pickled_and_copied(data, fixture):
    with safeload.open(data / fixture) as opened:
        for again in (pickle.loads(pickle.dumps(opened)), copy.copy(opened)):
            with again:
                check_tensors(again.load(), expected(fixture))


def test_frameworks_load_it(data, fixture):
    want = expected(fixture)
    jax = pytest.importorskip("jax")
    import safeload.jax

    cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    arrays = safeload.jax.load_checkpoint(data / fixture, sharding=cpu, only="params.rows")
    assert equal(np.asarray(arrays["params.rows"]), want["params.rows"])


def test_torch_loads_it(data, fixture):
    torch = pytest.importorskip("torch")
    import safeload.torch

    tensors = safeload.torch.load_checkpoint(data / fixture)
    assert tensors["params.rows"].dtype == torch.bfloat16
    assert tensors["params.columns"].numpy().tobytes() == expected(fixture)["params.columns"].tobytes()


def test_a_root_selects_a_container_of_tensors_and_values(data):
    pytest.importorskip("zstandard")
    want = {n.removeprefix("params."): a for n, a in expected("small_4").items() if n.startswith("params.")}
    with safeload.open(data / "small_4", root="params") as opened:
        check_tensors(opened.load(), want)
        assert dict(opened.metadata) == {}
        assert equal(pickle.loads(pickle.dumps(opened))["a.b/ü"], want["a.b/ü"])
    with safeload.open(data / "small_4", root="opt_state") as opened:
        assert sorted(opened) == ["0.count", "0.mu"]
        assert dict(opened.metadata) == {"1": {}, "2": None, "3": (), "4": []}
    with safeload.open(data / "small_4", root="opt_state.0") as opened:
        assert sorted(opened) == ["count", "mu"]
    for root in ("a", "params.a", "param", "opt_state.0.mu", ""):
        with pytest.raises(TensorNotFoundError, match="containers: opt_state, params"):
            safeload.open(data / "small_4", root=root)


def test_the_file_of_the_tree_opens_the_checkpoint(data):
    pytest.importorskip("zstandard")
    check_tensors(safeload.load(data / "ocdbt3_4" / "_METADATA"), expected("ocdbt3_4"))
    assert safeload.open(data / "ocdbt3_4" / "_METADATA", format="orbax").format == "orbax"


def test_it_opens_from_a_store(data, fixture):
    fsspec = pytest.importorskip("fsspec")
    import safeload.remote

    memory = fsspec.filesystem("memory")
    memory.put(f"{data / fixture}/", f"/orbax/{fixture}/", recursive=True)
    with safeload.open(safeload.remote.of_fsspec(memory, f"/orbax/{fixture}")) as opened:
        check_tensors(opened.load(), expected(fixture))
        assert equal(opened.get_slice("params.square")[3:9, 5:], expected(fixture)["params.square"][3:9, 5:].copy())


def test_the_url_of_the_tree_opens_a_database_where_folders_are_not_listed(data):
    pytest.importorskip("zstandard")
    folder = data / "ocdbt2_4"
    files = {
        f"/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    with Server(files) as server, safeload.open(server.url("/_METADATA")) as opened:
        check_tensors(opened.load(), expected("ocdbt2_4"))
        assert len(server.requests) < 8


def test_the_databases_of_processes_are_joined_if_orbax_has_not(data, tmp_path):
    pytest.importorskip("zstandard")
    folder = tmp_path / "a"
    shutil.copytree(data / "ocdbt2_4", folder)
    (folder / "manifest.ocdbt").unlink()
    shutil.rmtree(folder / "d")
    with safeload.open(folder) as opened:
        check_tensors(opened.load(), expected("ocdbt2_4"))
        assert "manifest.ocdbt is missing: joined the databases of 4 processes" in opened.notes
    shutil.rmtree(folder / "ocdbt.process_2")
    with pytest.raises(FormatError, match=r"its chunk .* is missing"):
        safeload.open(folder)
    for part in folder.glob("ocdbt.process_*"):
        shutil.rmtree(part)
    with pytest.raises(FormatError, match=r"there is no manifest\.ocdbt.*was the checkpoint finished"):
        safeload.open(folder)


# ---- folders of steps and items ----


def test_a_folder_of_steps_opens_its_only_checkpoint(tmp_path):
    for path in ("7/state", "7/metrics", "8.orbax-checkpoint-tmp-1/state"):
        (tmp_path / path).mkdir(parents=True)
    with pytest.raises(UnsupportedError, match="no weights here"):
        safeload.open(tmp_path)
    sample().write(tmp_path / "7" / "state")
    sample().write(tmp_path / "8.orbax-checkpoint-tmp-1")
    for folder in (tmp_path, tmp_path / "7", tmp_path / "7" / "state"):
        assert sorted(safeload.load(folder)) == ["b", "w"]
        assert safeload.open(folder).files == [str(tmp_path / "7" / "state")]
    (tmp_path / "7" / "_CHECKPOINT_METADATA").write_bytes(b"{}")
    assert sorted(safeload.load(tmp_path)) == ["b", "w"]


def test_several_steps_or_items_are_refused_by_name(tmp_path):
    for step in (9, 10, 100):
        sample().write(tmp_path / f"step_{step}" / "default")
    with pytest.raises(UnsupportedError, match=r"3 Orbax steps: step_9, step_10, step_100; open one .* step_100$"):
        safeload.open(tmp_path)
    sample().write(tmp_path / "step_9" / "params")
    with pytest.raises(UnsupportedError, match="2 Orbax checkpoints: default, params; open one of them"):
        safeload.open(tmp_path / "step_9")


# ---- what zarr arrays can be ----


def test_random_trees_come_back(tmp_path, compress):
    dtypes = ["float32", "float16", "bfloat16", "int64", "uint8", "bool", "float64", "complex64", "float8_e5m2"]
    for k in range(24):
        made = OrbaxCheckpoint(2 + k % 2, compress=compress if k % 3 else None, use_ocdbt=k % 4 > 0)
        want = {}
        for number in range(int(rng.integers(1, 6))):
            shape = tuple(map(int, rng.integers(0, 12, int(rng.integers(0, 4)))))
            array = np.asarray(rng.integers(0, 90, shape)).astype(np.dtype(str(rng.choice(dtypes))))
            parts = [int(rng.integers(1, max(2, n + 1))) for n in shape]
            inner = [int(rng.choice([d for d in range(1, n + 1) if n % d == 0])) for n in parts]
            want[f"m.{number}"] = array
            made.tensor(f"m.{number}", array, parts, inner if k % 2 and number % 2 else None)
        made.write(tmp_path / str(k), leaves=int(rng.integers(1, 5)), inline=int(rng.choice([0, 50, 500])))
        with safeload.open(tmp_path / str(k)) as opened:
            check_tensors(opened.load(), want)


@pytest.mark.parametrize(
    ("fill", "dtype"),
    [(None, "float32"), (0, "int8"), (0.0, "float16"), (0.0, "bfloat16"), (False, "bool"), ([0.0, 0.0], "complex64")],
)
def test_chunks_that_were_not_stored_are_zeros(fill, dtype, tmp_path):
    array = np.ones((5, 6), np.dtype(dtype))
    made = OrbaxCheckpoint(3, store_array_data_equal_to_fill_value=False)
    made.tensor("w", array, (2, 3), fill_value=fill).tensor("s", array, (6, 6), (2, 3), fill_value=fill)
    del made.chunks["w/c/0/1"]
    shard = bytearray(made.chunks["s/c/0/0"])
    index = len(shard) - 4 - 16 * 6
    shard[index + 16 : index + 32] = b"\xff" * 16
    shard[-4:] = struct.pack("<I", ocdbt.crc32c(shard[index:-4]))
    made.chunks["s/c/0/0"] = bytes(shard)
    made.write(tmp_path)
    want = array.copy()
    want[:2, 3:] = 0
    check_tensors(safeload.load(tmp_path), {"w": want, "s": want})
    made.metadata["store_array_data_equal_to_fill_value"] = True
    made.write(tmp_path)
    with pytest.raises(FormatError, match="its chunk c/0/1 is missing"):
        safeload.load(tmp_path)
    made.chunks["w/c/0/1"] = made.chunks["w/c/0/0"]
    made.write(tmp_path)
    with pytest.raises(FormatError, match="lacks a chunk that should be stored"):
        safeload.load(tmp_path)


@pytest.mark.parametrize(
    ("fill", "dtype"),
    [(1, "int8"), (-0.0, "float32"), ("NaN", "float32"), ("0x0", "float16"), (True, "bool"), ({}, "int8")],
)
def test_other_fill_values_are_refused_if_needed(fill, dtype, tmp_path):
    made = OrbaxCheckpoint(3, store_array_data_equal_to_fill_value=False)
    made.tensor("w", np.ones(4, dtype), (2,), fill_value=fill).write(tmp_path)
    assert safeload.load(tmp_path)["w"].all()
    del made.chunks["w/c/1"]
    made.write(tmp_path)
    refused(tmp_path, UnsupportedError, "lacks chunks, and its fill value is .*; safeload reads 0")


def test_narrow_integers_are_opened_with_their_values(tmp_path):
    for version in (2, 3):
        made = OrbaxCheckpoint(version)
        for name in ("int4", "int2"):
            field = {"dtype": name} if version == 2 else {"data_type": name}
            made.tensor(name, numbers(20, dtype=np.int8), **field)
        made.write(tmp_path / str(version))
        arrays = safeload.load(tmp_path / str(version))
        assert arrays["int4"].tolist() == [k % 16 - 16 * (k % 16 > 7) for k in range(20)]
        assert arrays["int2"].tolist() == [k % 4 - 4 * (k % 4 > 1) for k in range(20)]


def test_large_frames_are_read_forward(tmp_path, compress, monkeypatch):
    inside.tune(monkeypatch, orbax_kept_frames=2)
    monkeypatch.setattr(inside.orbax_chunks, "_STREAMED", 100)
    monkeypatch.setattr(inside.orbax_chunks, "_unpacked", None)
    array = rng.standard_normal((64, 40)).astype(np.float32)
    for version in (2, 3):
        made = OrbaxCheckpoint(version, compress=compress).tensor("w", array, (20, 16)).tensor("x", array)
        made.write(tmp_path / str(version))
        with safeload.open(tmp_path / str(version)) as opened:
            check_tensors(opened.load(), {"w": array, "x": array})
            part = opened.get_slice("w")
            for rows in (slice(40, 60), slice(3, 9), slice(8, 30), slice(0, 1), slice(63, 64)):
                assert equal(part[rows, 10:35], array[rows, 10:35].copy())
            assert equal(opened.take("x", [60, 2, 30]), array[[60, 2, 30]])
            again = pickle.loads(pickle.dumps(opened))
            assert equal(again["w"], array)


def test_a_large_frame_cut_off_or_too_long_is_an_error(tmp_path, compress, monkeypatch):
    monkeypatch.setattr(inside.orbax_chunks, "_STREAMED", 100)
    array = rng.standard_normal((64, 40)).astype(np.float32)
    frame = compress(array.tobytes())
    longer = compress(array.tobytes() + b"x")
    for content in (frame[:-1], frame[:100], frame[:1] + b"?" + frame[2:], longer, compress(array.tobytes()[:-1])):
        made = OrbaxCheckpoint(compress=compress).tensor("w", array)
        made.chunks["w/0.0"] = content
        made.write(tmp_path)
        with pytest.raises(FormatError, match="zstd frame") as caught:
            safeload.load(tmp_path)
        assert caught.value.tensor == "w"


def test_names_may_be_anything(tmp_path):
    want = {"": numbers(3), "a/b/c": numbers(2), "a": numbers(4, 2), "a/c": numbers(3, 1), "é.0": numbers(1)}
    made = OrbaxCheckpoint(3)
    for name, array in want.items():
        made.tensor(name, array, steps=() if not name else tuple(name.split(".")))
    made.write(tmp_path)
    check_tensors(safeload.load(tmp_path), want)


def test_leaves_of_unknown_types_are_left_out_and_named(tmp_path):
    made = sample().leaf(("opt", "mine"), "my.Type")
    made.metadata["custom_metadata"] = {"run": 3}
    made.metadata["later"] = 1
    made.write(tmp_path)
    with safeload.open(tmp_path) as opened:
        assert dict(opened.metadata) == {"note": "text", "empty": [None], "custom_metadata": {"run": 3}}
        assert opened.notes == [
            "'opt.mine': left out, because only the program that wrote it knows its type",
            "'later': fields of _METADATA that safeload does not know",
        ]


# ---- what is read ----


def test_a_slice_reads_only_its_chunks(tmp_path, compress, monkeypatch):
    array = rng.standard_normal((64, 64)).astype(np.float32)
    made = (
        OrbaxCheckpoint(3)
        .tensor("other", numbers(100_000))
        .tensor("w", array, (8, 8))
        .tensor("v", array, (32, 64), (8, 8))
    )
    made.write(tmp_path)
    reads = []
    read_into = inside.local.LocalStore.read_into
    monkeypatch.setattr(
        inside.local.LocalStore,
        "read_into",
        lambda store, offset, memory: reads.append(memoryview(memory).nbytes) or read_into(store, offset, memory),
    )
    with safeload.open(tmp_path) as opened:
        nodes = sum(reads)
        assert nodes < 20_000
        reads.clear()
        assert equal(opened.get_slice("w")[16:24, 8:16], array[16:24, 8:16].copy())
        assert reads == [256]
        reads.clear()
        assert equal(opened.get_slice("v")[40:48, 8:16], array[40:48, 8:16].copy())
        assert sorted(reads) == [256, 16 * 32 + 4]
        reads.clear()
        assert equal(opened["w"], array)
        assert sum(reads) == array.nbytes


def test_twenty_thousand_chunks_open_in_seconds(tmp_path):
    array = numbers(200, 100)
    OrbaxCheckpoint().tensor("w", array, (1, 1)).write(tmp_path, leaves=7)
    begin = time.process_time()
    with safeload.open(tmp_path) as opened:
        assert time.process_time() - begin < 5
        assert equal(opened.get_slice("w")[150:153, 40:50], array[150:153, 40:50].copy())


def test_only_the_data_files_of_the_selected_tensors_are_needed(tmp_path):
    pytest.importorskip("zstandard")
    made = OrbaxCheckpoint(use_ocdbt=False).tensor("model.w", numbers(3)).tensor("optim.m", numbers(3))
    made.write(tmp_path)
    shutil.rmtree(tmp_path / "optim.m")
    assert list(safeload.load(tmp_path, root="model")) == ["w"]
    with pytest.raises(FileNotFoundError, match=r"optim\.m"):
        safeload.open(tmp_path)


# ---- live ----


def test_orbax_reads_the_same_from_random_trees(tmp_path):
    """tests/data/orbax/compare.sh runs this test, and the fixtures anew, with Orbax."""
    pytest.importorskip("zstandard")
    checkpoint = pytest.importorskip("orbax.checkpoint")
    jnp = pytest.importorskip("jax.numpy")
    dtypes = ["float32", "float16", "bfloat16", "int32", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "int4"]
    for k in range(8):
        want = {}
        for number in range(int(rng.integers(1, 8))):
            shape = tuple(map(int, rng.integers(1, 30, int(rng.integers(0, 4)))))
            array = jnp.asarray(rng.integers(0, 7, shape), str(rng.choice(dtypes)))
            want[f"l{number % 3}.w{number}"] = array
        tree = safeload.nest(want)
        save_args = {}
        for name in want:
            save_args[name] = checkpoint.SaveArgs(chunk_byte_size=64 if k % 2 else None)
        options = {"use_ocdbt": k % 3 > 0, "use_zarr3": k % 4 > 1, "use_compression": k < 6}
        with checkpoint.Checkpointer(checkpoint.PyTreeCheckpointHandler(**options)) as checkpointer:
            arguments = checkpoint.args.PyTreeSave(tree, save_args=safeload.nest(save_args))
            checkpointer.save(tmp_path / str(k), args=arguments)
        arrays = safeload.load(tmp_path / str(k))
        narrow = [name for name, array in want.items() if array.dtype == jnp.int4]
        arrays.update({name: arrays[name].astype(ml_dtypes.int4) for name in narrow})
        check_tensors(arrays, {name: np.asarray(array) for name, array in want.items()})


# ---- faults ----


def with_field(name, value, array="w"):
    def change(made):
        made.arrays[array][name] = value

    return change


def without_field(name, array="w"):
    def change(made):
        del made.arrays[array][name]

    return change


def with_metadata(**fields):
    return lambda made: made.metadata.update(fields)


def with_leaf(**fields):
    def change(made):
        made.metadata["tree_metadata"]["('w',)"].update(fields)

    return change


def with_key(*keys):
    return with_leaf(key_metadata=list(keys))


def with_value(**fields):
    def change(made):
        made.metadata["tree_metadata"]["('w',)"]["value_metadata"] = fields

    return change


def with_chunk(content, key="w/0.0"):
    def change(made):
        made.chunks[key] = content(made.chunks[key]) if callable(content) else content

    return change


def without_chunk(key="w/0.0"):
    return lambda made: made.chunks.pop(key)


BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
NEVER = [None, 3, "x", [], {}, 1.5, True, [[]], {"a": []}]
# Faults of arrays of version 2: (change, error, message).
V2_FAULTS = {
    **{
        f"shape {v!r}": (with_field("shape", v), FormatError, "shape must be|do not divide|mostly|chunk") for v in NEVER
    },
    **{f"chunks {v!r}": (with_field("chunks", v), FormatError, "chunks must be|do not divide") for v in NEVER},
    **{
        f"chunks {v!r}": (with_field("chunks", v), (FormatError, LimitError), "must be|divide|bytes|chunk")
        for v in ([0, 4], [-6, 4], [6.0, 4], [6], [6, 4, 1], [1 << 40, 4], [1 << 62, 4], [True, 4], [1, 4])
    },
    **{
        f"shape {v!r}": (with_field("shape", v), (FormatError, LimitError), "must be|divide|bytes|chunk|missing")
        for v in ([-12, 4], [12.0, 4], [12], [1 << 40, 4], [1 << 61, 1 << 61], [1 << 62, 4], [1] * 40, [13, 4], [12, 5])
    },
    **{f"dtype {v!r}": (with_field("dtype", v), UnsupportedError, "which no array can represent") for v in NEVER},
    **{
        f"dtype {v!r}": (with_field("dtype", v), UnsupportedError, "which no array can represent")
        for v in (
            "<f3",
            "<U4",
            "|O",
            "<M8[s]",
            "<f16",
            "float4_e2m1fn",
            "float8_e4m3b11fnuz",
            ">f4",
            ">c8",
            "<b4",
            "f4",
        )
    },
    "another dtype": (with_field("dtype", "<f8"), FormatError, "a chunk has 192 bytes, but 96 bytes store it"),
    "a smaller dtype": (with_field("dtype", "<f2"), FormatError, "a chunk must have 48 bytes, got 96"),
    **{f"order {v!r}": (with_field("order", v), UnsupportedError, "order") for v in (*NEVER, "A", "c", "F")},
    **{
        f"separator {v!r}": (with_field("dimension_separator", v), UnsupportedError, "separator")
        for v in (*NEVER, "..", "/")
    },
    **{
        f"compressor {v!r}": (with_field("compressor", v), UnsupportedError, "compressor .*; safeload reads zstd")
        for v in ("zstd2", {"id": "blosc"}, {"id": "gzip", "level": 1}, {"id": 3}, {}, [], {"id": ["zstd"]}, 3, True)
    },
    **{f"filters {v!r}": (with_field("filters", v), UnsupportedError, "filters") for v in ([{"id": "delta"}], 3, "x")},
    **{f"format {v!r}": (with_field("zarr_format", v), FormatError, "zarr_format must be 2") for v in (*NEVER, 1, "2")},
    "an unknown field": (with_field("scale", 2), UnsupportedError, "the field 'scale', which safeload does not know"),
    **{
        f"no {name}": (without_field(name), (FormatError, UnsupportedError), "must be|dtype|order|shape|chunks")
        for name in ("shape", "chunks", "dtype", "order", "zarr_format")
    },
    "no metadata": (lambda made: made.arrays.pop("w"), FormatError, r"'w' is not in manifest\.ocdbt"),
    "a missing chunk": (without_chunk(), FormatError, "its chunk 0.0 is missing"),
    "the last chunk is missing": (without_chunk("w/1.0"), FormatError, "its chunk 1.0 is missing"),
    "a short chunk": (with_chunk(lambda data: data[:-1]), FormatError, "has 96 bytes, but 95 bytes store it"),
    "a long chunk": (with_chunk(lambda data: data + b"x"), FormatError, "must have 96 bytes, got 97"),
    "an empty chunk": (with_chunk(b""), FormatError, "but 0 bytes store it"),
}
TREE_FAULTS = {
    **{
        f"tree {v!r}": (with_metadata(tree_metadata=v), FormatError, "tree_metadata must|leaf")
        for v in NEVER
        if v != {}
    },
    **{
        f"{name} {v!r}": (with_metadata(**{name: v}), FormatError, f"{name} must be true or false")
        for name in ("use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value")
        for v in (3, "x", [], 0)
    },
    "another version": (with_metadata(use_zarr3=True), FormatError, r"'w' is not in manifest\.ocdbt"),
    **{
        f"keys {v!r}": (with_leaf(key_metadata=v), FormatError, "must have key_metadata|malformed key")
        for v in NEVER
        if v != []
    },
    **{f"value {v!r}": (with_leaf(value_metadata=v), FormatError, "value_metadata") for v in NEVER},
    **{f"key {v!r}": (with_key(v), FormatError, "malformed key") for v in NEVER},
    **{
        f"key {key!r} of type {kind!r}": (with_key({"key": key, "key_type": kind}), FormatError, "malformed key")
        for key, kind in [
            ("w", 3),
            ("w", "2"),
            ("w", None),
            (3, 2),
            ("w", 1),
            ("-1", 1),
            ("٣", 1),
            ("w", True),
            ("9" * 40, 1),
        ]
    },
    "another name": (with_key({"key": "x", "key_type": 2}), FormatError, r"'x' is not in manifest\.ocdbt"),
    "the name of another": (with_key({"key": "b", "key_type": 2}), FormatError, "two leaves of the tree are named 'b'"),
    "a value below another": (
        lambda made: made.leaf(("note", "x"), "None"),
        FormatError,
        "is below another value|has the path",
    ),
    "type of another type": (with_value(value_type=3), FormatError, "malformed value_metadata"),
    "no type": (with_value(skip_deserialize=False), FormatError, "malformed value_metadata"),
    "skip of another type": (
        with_value(value_type="scalar", skip_deserialize=1),
        FormatError,
        "malformed value_metadata",
    ),
    "a string without text": (with_value(value_type="string"), FormatError, "must have the text 'w'"),
    "a text of another type": (lambda made: made.strings.update(note=3), FormatError, "must have the text 'note'"),
    "no strings": (lambda made: made.strings.clear(), None, "_strings"),
}


def with_codecs(*codecs):
    return with_field("codecs", list(codecs))


def with_shard(**fields):
    def change(made):
        made.arrays["s"]["codecs"][0]["configuration"].update(fields)

    return change


def with_index(position, *numbers):
    """Overwrite numbers of the index of a shard, and make its checksum again."""

    def change(made):
        shard = bytearray(made.chunks["s/c/0/0"])
        begin = len(shard) - 4 - 16 * 4
        shard[begin + 8 * position : begin + 8 * (position + len(numbers))] = struct.pack(f"<{len(numbers)}Q", *numbers)
        shard[-4:] = struct.pack("<I", ocdbt.crc32c(shard[begin:-4]))
        made.chunks["s/c/0/0"] = bytes(shard)

    return change


TRANSPOSE = {"name": "transpose", "configuration": {"order": [1, 0]}}
V3_FAULTS = {
    **{f"node_type {v!r}": (with_field("node_type", v), FormatError, "node_type") for v in (None, "group", 3, [])},
    **{
        f"data_type {v!r}": (with_field("data_type", v), UnsupportedError, "no array can represent")
        for v in (*NEVER, "r16", "<f4")
    },
    **{
        f"grid {v!r}": (with_field("chunk_grid", v), (FormatError, UnsupportedError), "chunk_grid|chunk_shape")
        for v in NEVER
    },
    "another grid": (
        with_field("chunk_grid", {"name": "rectilinear"}),
        UnsupportedError,
        "safeload reads regular grids",
    ),
    **{
        f"grid of {v!r}": (
            with_field("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": v}}),
            (FormatError, LimitError),
            "chunk_shape|divide|bytes|missing",
        )
        for v in (*NEVER, [0, 4], [1 << 50, 1], [6], [1, 1])
    },
    **{
        f"keys {v!r}": (with_field("chunk_key_encoding", v), (FormatError, UnsupportedError), "chunk_key_encoding")
        for v in (*NEVER, "v2", {"name": "default", "configuration": {"separator": "."}})
    },
    **{f"codecs {v!r}": (with_field("codecs", v), (FormatError, UnsupportedError), "codec") for v in NEVER},
    **{f"codec {v!r}": (with_codecs(v), (FormatError, UnsupportedError), "codec") for v in NEVER},
    **{f"a codec {v!r}": (with_codecs(BYTES, v), (FormatError, UnsupportedError), "codec") for v in NEVER},
    **{
        f"codec {name}": (with_codecs(BYTES, {"name": name}), UnsupportedError, f"codecs bytes, '{name}'")
        for name in ("crc32c", "gzip", "blosc", "lz4", "transpose", "bytes", "sharding_indexed", "vlen-utf8")
    },
    "bytes twice": (with_codecs(BYTES, BYTES), UnsupportedError, "codecs bytes, 'bytes'"),
    "zstd twice": (with_codecs(BYTES, "zstd", "zstd"), UnsupportedError, "codecs bytes, 'zstd', 'zstd'"),
    "transpose": (with_codecs(TRANSPOSE, BYTES), UnsupportedError, "little-endian bytes first"),
    "crc32c first": (with_codecs({"name": "crc32c"}, BYTES), UnsupportedError, "little-endian bytes first"),
    "only transpose": (with_codecs(TRANSPOSE), UnsupportedError, "little-endian bytes first"),
    **{
        f"endian {v!r}": (
            with_codecs({"name": "bytes", "configuration": {"endian": v}}),
            UnsupportedError,
            "little-endian bytes first",
        )
        for v in (None, "big", "middle", 3, [])
    },
    "transformers": (with_field("storage_transformers", [{"name": "x"}]), UnsupportedError, "storage_transformers"),
    "an unknown field": (with_field("scale", {"a": 1}), UnsupportedError, "the field 'scale'"),
    "transposed shards": (
        lambda made: made.arrays["s"]["codecs"].insert(0, TRANSPOSE),
        UnsupportedError,
        "little-endian bytes first",
    ),
    "compressed shards": (
        lambda made: made.arrays["s"]["codecs"].append({"name": "zstd"}),
        UnsupportedError,
        "codecs after sharding_indexed",
    ),
    "shards in shards": (
        lambda made: with_shard(codecs=copy.deepcopy(made.arrays["s"]["codecs"]))(made),
        UnsupportedError,
        "little-endian bytes first",
    ),
    **{
        f"inner {v!r}": (with_shard(chunk_shape=v), FormatError, "chunk_shape|divide")
        for v in (*NEVER, [3, 2], [0, 1], [2])
    },
    "tiny chunks": (with_shard(chunk_shape=[1, 1]), FormatError, "needs an index of 1,540 bytes, but it has"),
    **{f"index codecs {v!r}": (with_shard(index_codecs=v), (FormatError, UnsupportedError), "codec") for v in NEVER},
    **{
        f"index at {v!r}": (
            with_shard(index_location=v),
            UnsupportedError,
            "safeload reads bytes and crc32c at the end",
        )
        for v in (None, "start", "middle", 3)
    },
    "an index without checksum": (with_shard(index_codecs=[BYTES]), UnsupportedError, "an index of bytes at 'end'"),
    "a wrong checksum": (with_chunk(lambda data: data[:-1] + b"?", "s/c/0/0"), FormatError, "checksum of the index"),
    "a chunk beyond its shard": (with_index(0, 400), FormatError, "is outside its"),
    "a chunk far beyond": (with_index(0, 2**63), FormatError, "is outside its"),
    "a long inner chunk": (with_index(1, 97), FormatError, "a chunk must have 96 bytes, got 97"),
    "a short inner chunk": (with_index(1, 0), FormatError, "a chunk must have 96 bytes, got 0"),
    "an inner chunk that is absent": (with_index(0, 2**64 - 1, 2**64 - 1), FormatError, "lacks a chunk"),
    "half absent": (with_index(0, 2**64 - 1), FormatError, "is outside its"),
}


def version3():
    array = numbers(12, 4)
    return OrbaxCheckpoint(3).tensor("w", array, (6, 4)).tensor("s", numbers(8, 12), (8, 12), (4, 6))


def refused(folder, kind, message, *, within=None):
    kind = (FormatError, OSError) if kind is None else kind
    with pytest.raises(kind, match=message) as caught:
        safeload.load(folder)
    if isinstance(caught.value, FormatError):
        assert str(within or folder) in str(caught.value)


CASES = [(sample, V2_FAULTS), (sample, TREE_FAULTS), (version3, V3_FAULTS)]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_fault_is_refused_by_name(case, tmp_path):
    make, faults = CASES[case]
    for k, (change, kind, message) in enumerate(faults.values()):
        made = make()
        change(made)
        made.write(tmp_path / str(k))
        try:
            refused(tmp_path / str(k), kind, message)
        except BaseException as error:
            raise AssertionError(list(faults)[k]) from error


FILES = [("", "d/0")]
ROOT_NODE = (0, 0, 0)


def node_faults():
    """Manifests and nodes with a fault and a sound checksum: (manifest body, node body, error, message)."""
    entries = [("b/.zarray", b"{}"), ("w/.zarray", (0, 0, 4))]
    good = orbax_build.leaf(entries, FILES)

    def manifest(root=None, files=FILES, **fields):
        return lambda node: orbax_build.manifest_body(root or (0, 4, len(node)), files, **fields)

    def node(body):
        return body

    paths = ["../d", "/d", "a//b", "", ".", "a/..", "d\\x", "c:x", "a\0b", "a/./b", "d/"]
    for path in paths:
        yield (
            f"path {path!r}",
            manifest(files=[("", path)]),
            good,
            FormatError,
            "must be inside the checkpoint's folder",
        )
        body = orbax_build.leaf(entries, [("", path)])
        yield f"path {path!r} in a node", manifest(), body, FormatError, "must be inside the checkpoint's folder"
    bad_base = varint(1) + column([3]) + column([9]) + b"d/0"
    yield "a base path beyond the path", manifest(), b"\0" + bad_base + good[7:], FormatError, "longer than its path"
    yield "file 1", manifest((1, 4, 9)), good, FormatError, "data file 1 is not in the table"
    yield (
        "file 1 in a node",
        manifest(),
        orbax_build.leaf([("w/.zarray", (1, 0, 4))], FILES),
        FormatError,
        "data file 1",
    )
    yield "no files", manifest(files=[]), good, FormatError, "data file 0 is not in the table"
    yield "beyond the file", manifest((0, 1 << 40, 99)), good, FormatError, "reaches beyond the end of the file"
    yield "a long node", manifest((0, 4, 1 << 27)), good, FormatError, "reaches beyond the end of the file"
    yield "a huge node", manifest((0, 4, 1 << 40)), good, LimitError, "beyond the limits"
    yield "a high tree", manifest(height=17), good, LimitError, "beyond the limits"
    yield "another height", manifest(height=1), good, FormatError, "a node of height 1 says that it has height 0"
    yield "another kind", manifest(kind=1), good, UnsupportedError, "a manifest of kind 1"
    yield "no version", lambda _: manifest()(b"")[:34] + column([0, 0]), good, (FormatError, LimitError), "."
    yield "no keys", manifest(), b"\0" + orbax_build.table(FILES) + varint(0), FormatError, "a node has no keys"
    for count in (3, 1000, 1 << 20):
        yield (
            f"{count} keys",
            manifest(),
            good[:7] + varint(count) + good[8:],
            FormatError,
            "reaches|too early|prefix|shares",
        )
    yield "countless keys", manifest(), good[:7] + varint(1 << 60) + good[8:], LimitError, "the tree has more than"
    yield "countless files", manifest(), b"\0" + varint(1 << 40) + good[2:], LimitError, "data files, more than"
    yield "a number of 80 bits", manifest(), b"\0" + b"\xff" * 9 + b"\x7f", FormatError, "more than 64 bits"
    twice = orbax_build.leaf([("w/.zarray", b"{}"), ("w/.zarray", b"{}")], FILES)
    yield "a key twice", manifest(), twice, FormatError, "keys must ascend"
    order = orbax_build.leaf([("w", b"{}"), ("a", b"{}")], FILES)
    yield "keys in disorder", manifest(), order, FormatError, "keys must ascend"
    yield "bytes at the end", manifest(), good + b"x", FormatError, "bytes follow the last field"
    for cut in range(1, len(good), 5):
        yield f"a node of {cut} bytes", manifest(), good[:cut], SafeloadError, "."
    body = manifest()(bytes(99))
    for cut in range(0, len(body) - 24, 5):
        yield f"a manifest of {cut} bytes", lambda _, cut=cut: manifest()(bytes(99))[:cut], good, SafeloadError, "."
    kinds = bytearray(good)
    kinds[good.rindex(b"\0\1")] = 2
    yield "a kind of value", manifest(), bytes(kinds), FormatError, "must be inline"
    inner = orbax_build.interior(1, [("b", 0, 0, 0, 9)], FILES)
    yield "a child that is no node", manifest(height=1), inner, FormatError, "a node"
    yield (
        "a long prefix",
        manifest(height=1),
        orbax_build.interior(1, [("b", 7, 0, 0, 9)], FILES),
        FormatError,
        "longer than",
    )
    self_made = orbax_build.interior(1, [("b", 0, 0, 4, 50)], FILES)
    yield "a child above itself", manifest(height=1), self_made, FormatError, "a node"


NODE_FAULTS = list(node_faults())


def test_a_fault_of_the_database_is_refused(tmp_path):
    for k, (name, manifest, body, kind, message) in enumerate(NODE_FAULTS):
        folder = tmp_path / str(k)
        sample().write(folder)
        node = framed(orbax_build.NODE, body)
        (folder / "d" / "0").write_bytes(b"{}  " + node)
        (folder / "manifest.ocdbt").write_bytes(framed(orbax_build.MANIFEST, manifest(node)))
        try:
            refused(folder, kind, message)
        except BaseException as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("place", ["manifest.ocdbt", "d/0"])
def test_headers_of_manifests_and_nodes_are_checked(place, tmp_path):
    pytest.importorskip("zstandard")
    made = sample()
    made.write(tmp_path, inline=1 << 20)
    content = (tmp_path / place).read_bytes()
    for at, message in (
        (0, "must begin with"),
        (4, "says that it has"),
        (20, "checksum"),
        (len(content) - 1, "checksum"),
    ):
        bent = bytearray(content)
        bent[at] ^= 1
        (tmp_path / place).write_bytes(bent)
        refused(tmp_path, FormatError, message)
    for at, kind, message in ((12, UnsupportedError, "version 1"), (13, FormatError, "zstd frame"), (13, None, None)):
        bent = bytearray(content)
        bent[at] = 1 if message else 2
        bent[-4:] = struct.pack("<I", ocdbt.crc32c(bent[:-4]))
        (tmp_path / place).write_bytes(bent)
        refused(tmp_path, kind or UnsupportedError, message or "compression 2")
    (tmp_path / place).write_bytes(content[:10])
    refused(tmp_path, FormatError, "only 10 bytes|reaches beyond")


def test_there_are_hundreds_of_malformed_variants():
    assert len(V2_FAULTS) + len(TREE_FAULTS) + len(V3_FAULTS) + len(NODE_FAULTS) > 300


def test_chunks_that_share_bytes_cannot_make_a_large_tensor(tmp_path):
    made = sample()
    made.tensor("big", numbers(6_000), (6,))
    values = made.values()
    content = values["big/0"]
    entries = [(key, value) for key, value in sorted(values.items()) if not key.startswith("big/")]
    entries += [(f"big/{k}", (0, 0, len(content))) for k in range(1000)] + [("big/.zarray", values["big/.zarray"])]
    node = framed(orbax_build.NODE, orbax_build.leaf(sorted(entries, key=lambda pair: pair[0].encode()), FILES))
    made.write(tmp_path)
    (tmp_path / "d" / "0").write_bytes(content + node)
    manifest = framed(orbax_build.MANIFEST, orbax_build.manifest_body((0, len(content), len(node)), FILES))
    (tmp_path / "manifest.ocdbt").write_bytes(manifest)
    if len(content) * 1000 > len(content + node):
        values = {key: value for key, value in values.items() if not key.startswith("big/")}
    with pytest.raises(FormatError, match="chunks overlap in the file"):
        safeload.open(tmp_path)


def test_bombs_are_limits(tmp_path, compress, monkeypatch):
    monkeypatch.setattr(inside.ocdbt, "MAX_NODE", 1 << 20)
    array = numbers(4)
    made = OrbaxCheckpoint(compress=compress).tensor("w", array)
    made.chunks["w/0"] = compress(bytes(8 << 20))
    made.write(tmp_path / "a")
    refused(tmp_path / "a", FormatError, "holds more than 16 bytes")
    made = OrbaxCheckpoint(compress=compress).tensor("w", array)
    made.arrays["w"].update(shape=[1 << 40], chunks=[1 << 40])
    made.write(tmp_path / "b")
    refused(tmp_path / "b", FormatError, "bytes store it")
    made = OrbaxCheckpoint(store_array_data_equal_to_fill_value=False).tensor("w", array)
    made.arrays["w"].update(shape=[1 << 40], chunks=[1 << 39])
    made.chunks.clear()
    made.write(tmp_path / "c")
    refused(tmp_path / "c", LimitError, "not stored stand for")
    made.arrays["w"]["chunks"] = [1 << 20]
    made.write(tmp_path / "d")
    refused(tmp_path / "d", LimitError, "not stored stand for")
    made.arrays["w"]["chunks"] = [(1 << 30) - (1 << 19)]
    made.write(tmp_path / "e")
    refused(tmp_path / "e", LimitError, "not stored stand for")
    made = OrbaxCheckpoint(compress=compress).tensor("w", array)
    made.write(tmp_path / "f")
    (tmp_path / "f" / "manifest.ocdbt").write_bytes(framed(orbax_build.MANIFEST, bytes((1 << 20) + 1), compress))
    refused(tmp_path / "f", LimitError, "holds more than 1,048,576 bytes")


def test_limits_of_the_tree_are_limits(tmp_path, monkeypatch):
    sample().write(tmp_path)
    for name in ("MAX_KEYS", "MAX_TREE", "MAX_KEY_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(ocdbt, name, 3)
            refused(tmp_path, LimitError, "the tree has more than|keys or paths have more than")
    sample().leaf(("a",) * 257, "None").write(tmp_path / "deep")
    refused(tmp_path / "deep", LimitError, "nested 257 levels deep")
    sample().leaf(("a",) * 256, "None").write(tmp_path / "deep")
    safeload.open(tmp_path / "deep").close()
    made = OrbaxCheckpoint(use_ocdbt=False).tensor("w", np.ones((1,) * 32, np.float32))
    made.write(tmp_path / "axes")
    refused(tmp_path / "axes", FormatError, "up to 31 sizes")
    made = OrbaxCheckpoint().tensor("w", numbers(1), (1 << 20,), shape=[1])
    made.write(tmp_path / "padding")
    refused(tmp_path / "padding", LimitError, "mostly padding")


def shared_node(folder, node, parents):
    """A database whose root has the same node below it many times."""
    children = [(f"{k:06}", 6, 0, 0, len(node)) for k in range(parents)]
    root = framed(orbax_build.NODE, orbax_build.interior(1, children, FILES))
    (folder / "d").mkdir(parents=True)
    (folder / "d" / "0").write_bytes(node + root)
    body = orbax_build.manifest_body((0, len(node), len(root)), FILES, height=1)
    (folder / "manifest.ocdbt").write_bytes(framed(orbax_build.MANIFEST, body))
    (folder / "_METADATA").write_text(json.dumps(OrbaxCheckpoint().metadata))


def test_a_node_counts_each_time_it_is_read(tmp_path, compress, monkeypatch):
    body = orbax_build.leaf([("x", b"v")], [("", "f")] * 1000)
    shared_node(tmp_path / "files", framed(orbax_build.NODE, body, compress), 100)
    safeload.open(tmp_path / "files").close()
    monkeypatch.setattr(inside.ocdbt, "MAX_KEYS", 50_000)
    refused(tmp_path / "files", LimitError, "the nodes name more than 50,000 data files")
    body = orbax_build.leaf([("x", b"v")], FILES)
    empty = b"\0\0\0" * 1000  # blocks of zstd without content
    frame = b"\x28\xb5\x2f\xfd\0\x58" + empty + (len(body) << 3 | 1).to_bytes(3, "little") + body
    shared_node(tmp_path / "bytes", framed(orbax_build.NODE, body, lambda _: frame), 100)
    safeload.open(tmp_path / "bytes").close()
    monkeypatch.setattr(inside.ocdbt, "MAX_TREE", 200_000)
    refused(tmp_path / "bytes", LimitError, "200,000 bytes in nodes")


def test_metadata_of_arrays_and_chunks_in_shards_are_limited_together(tmp_path, monkeypatch):
    made = OrbaxCheckpoint(3)
    for k in range(4):
        made.tensor(f"w{k}", numbers(8), (8,), (1,))
    made.write(tmp_path)
    safeload.open(tmp_path).close()
    with monkeypatch.context() as patch:
        patch.setattr(inside.orbax_chunks, "MAX_JSON", 1500)
        refused(tmp_path, LimitError, "the metadata of its arrays has .* bytes, but the limit is 1,500")
    monkeypatch.setattr(inside.orbax_chunks, "MAX_IN_SHARDS", 31)
    refused(tmp_path, LimitError, "'w3': with it the shards have more than 31 chunks")


@pytest.mark.skipif(os.name == "nt", reason="needs symbolic links")
def test_folders_that_lead_in_circles_are_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(inside.orbax_chunks, "MAX_FOLDERS", 1000)
    OrbaxCheckpoint(use_ocdbt=False).tensor("w", numbers(2)).write(tmp_path)
    for name in ("1", "2"):
        (tmp_path / "w" / name).symlink_to(".")
    refused(tmp_path, LimitError, "in more than 1,000 folders")


@pytest.mark.parametrize("name", ["../w", "/etc/w", "a//b", "", "..", "a\\b", "a/../b"])
def test_names_of_folders_stay_in_the_checkpoint(name, tmp_path):
    made = OrbaxCheckpoint(use_ocdbt=False).tensor("w", numbers(2))
    made.metadata["tree_metadata"]["('w',)"]["key_metadata"] = [{"key": name, "key_type": 2}]
    made.write(tmp_path)
    refused(tmp_path, FormatError, "cannot be the name of a folder in the checkpoint")


@pytest.mark.parametrize("fixture", part_of(["ocdbt2_2", "raw3_4", "zarr3_1", "small_4"], 0, 2))
def test_a_file_cut_or_missing_is_an_error_and_never_another_value(data, fixture, tmp_path):
    pytest.importorskip("zstandard")
    want = expected(fixture)
    unread = ("_CHECKPOINT_METADATA", "commit_success.txt", "array_metadatas", "ocdbt.process_")
    sources = sorted(path for path in (data / fixture).rglob("*") if path.is_file())
    folder = tmp_path / "cut"
    shutil.copytree(data / fixture, folder)
    for source in sources if len(sources) < 20 else [*sources[:4], *sources[7::9]]:
        content = source.read_bytes()
        place = source.relative_to(data / fixture)
        for size in (None, *sorted({0, len(content) // 2, len(content) - 1, int(rng.integers(0, len(content) or 1))})):
            (folder / place).unlink() if size is None else (folder / place).write_bytes(content[:size])
            try:
                with safeload.open(folder) as opened:
                    arrays = opened.load()
                    assert dict(opened.metadata) == META
            except (SafeloadError, FileNotFoundError):
                pass
            else:
                assert all(equal(arrays[name], array) for name, array in want.items())
                assert size == len(content) or str(place).startswith(unread) or place.name == "manifest.ocdbt"
            (folder / place).write_bytes(content)


def test_random_bytes_changed_anywhere_never_crash(data, tmp_path):
    pytest.importorskip("zstandard")
    for fixture in ("ocdbt3_4", "zarr2_1"):
        folder = tmp_path / fixture
        shutil.copytree(data / fixture, folder)
        files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
        for path in [*files, *([folder / "_METADATA"] * 20), *([folder / "manifest.ocdbt"] * 20)]:
            if not path.exists():
                continue
            content = path.read_bytes()
            bent = bytearray(content)
            for _ in range(int(rng.integers(1, 4))):
                bent[int(rng.integers(len(bent)))] = int(rng.integers(256))
            path.write_bytes(bent)
            try:
                with safeload.open(folder) as opened:
                    opened.load()
                    dict(opened.metadata)
            except (SafeloadError, FileNotFoundError):
                pass
            path.write_bytes(content)


def test_a_checkpoint_that_changed_is_not_opened_again(tmp_path):
    sample().write(tmp_path)
    with safeload.open(tmp_path) as opened:
        pickled = pickle.dumps(opened)
    sample().string(("more",), "x").write(tmp_path)
    with pytest.raises(FormatError, match="has changed since it was opened"):
        pickle.loads(pickled)


def test_after_close_nothing_is_read(tmp_path):
    sample().write(tmp_path)
    opened = safeload.open(tmp_path)
    part = opened.get_slice("w")
    opened.close()
    for action in (lambda: opened["w"], lambda: part[1:, 1:2], lambda: part[1:]):
        with pytest.raises(ValueError, match="is closed"):
            action()


def test_zstd_without_its_package_says_what_to_install(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    with pytest.raises(ImportError, match="pip install zstandard"):
        safeload.open(data / "ocdbt2_1")


def test_json_that_is_no_tree_is_refused(tmp_path):
    for content in (
        b"{}",
        b"[]",
        b"{",
        b'{"tree_metadata": 1, "tree_metadata": 2}',
        b"\xff{",
        b'{"tree_metadata": ' + b"[" * 5000,
    ):
        (tmp_path / "_METADATA").write_bytes(content)
        with pytest.raises(SafeloadError):
            safeload.open(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 7, 2047, 2048, 2049, 10_000])
def test_checksums_of_any_length(size):
    data = bytes(rng.integers(0, 256, size, dtype=np.uint8))
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    assert ocdbt.crc32c(data) == crc ^ 0xFFFFFFFF
    assert ocdbt.crc32c(b"123456789") == 0xE3069283
