"""`safeload.Writer` and `safeload.save`: tensors saved as they come."""

import errno
import io
import os
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from builders.inside import atomic_file

import safeload

upstream = pytest.importorskip("safetensors.numpy")


def tensors(count=6, rows=7):
    rng = np.random.default_rng(3)
    return {f"layers.{k}.weight": rng.standard_normal((rows, k + 1), np.float32) for k in range(count)}


def same(saved, expected):
    assert saved.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(saved[name], array, strict=True)


class Pipe:
    """A file object that only writes, a few bytes at a time."""

    def __init__(self, most=1000):
        self.data, self.most = b"", most

    def write(self, data):
        taken = data[: self.most]
        self.data += taken
        return len(taken)


# ---- destinations ----


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("source", [dict, lambda items: iter(items.items()), lambda items: list(items.items())])
def test_a_dict_or_an_iterator_becomes_a_file_that_upstream_reads(source, durable, tmp_path):
    path = tmp_path / "model.safetensors"
    safeload.save(source(tensors()), path, metadata={"format": "pt"}, durable=durable)
    same(upstream.load_file(path), tensors())
    assert safeload.open(path).metadata == {"format": "pt"}
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_large_stream_is_written_once(tmp_path):
    path = tmp_path / "large.safetensors"
    arrays = {f"t{k}": np.full((1 << 20), k, np.float32) for k in range(5)}
    safeload.save(iter(arrays.items()), path)
    same(upstream.load_file(path), arrays)
    assert path.stat().st_size == 5 * (4 << 20) + (128 << 10)


def test_a_large_stream_with_a_long_header_or_unaligned_tensors_is_laid_out_again(tmp_path):
    arrays = {f"{k:0500}": np.arange(k % 5, dtype=np.uint8) for k in range(400)}
    arrays["large"] = np.ones(5 << 20, np.float32)
    safeload.save(iter(arrays.items()), tmp_path / "a.safetensors")
    same(upstream.load_file(tmp_path / "a.safetensors"), arrays)
    with safeload.open(tmp_path / "a.safetensors") as checkpoint:
        assert checkpoint.tensors["large"].offset % 4 == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("place", ["folder", "memory://save-{}/model/"])
def test_a_folder_gets_shards_and_an_index(place, stream, tmp_path):
    if place.startswith("memory"):
        pytest.importorskip("fsspec")
    folder = str(tmp_path / "folder") if place == "folder" else place.format(tmp_path.name)
    items = tensors(8, 100)
    safeload.save(iter(items.items()) if stream else items, folder, max_shard_size="5KB")
    same(safeload.load(folder), items)
    with safeload.open(folder) as checkpoint:
        files = {info.file for info in checkpoint.tensors.values()}
    assert len(files) > 2
    with pytest.raises(FileExistsError):
        safeload.save(items, folder, max_shard_size="5KB")
    fewer = tensors(3, 100)
    safeload.save(iter(fewer.items()) if stream else fewer, folder, max_shard_size="2KB", overwrite=True)
    same(safeload.load(folder), fewer)


def test_a_folder_that_is_replaced_has_no_old_shard(tmp_path):
    safeload.save(iter(tensors(8, 100).items()), tmp_path / "x", max_shard_size="5KB")
    safeload.save(iter(tensors(2, 100).items()), tmp_path / "x", overwrite=True)
    assert os.listdir(tmp_path / "x") == ["model.safetensors"]


@pytest.mark.parametrize("source", ["save", "stream", "convert"])
def test_a_store_takes_a_single_file(source, tmp_path):
    pytest.importorskip("fsspec")
    url = f"memory://save-{tmp_path.name}/model.safetensors"
    arguments = {
        "save": lambda **options: safeload.save(tensors(), url, **options),
        "stream": lambda **options: safeload.save(iter(tensors().items()), url, **options),
        "convert": lambda **options: safeload.convert(tensors(), url, **options),
    }
    arguments[source]()
    same(safeload.load(url), tensors())
    with pytest.raises(FileExistsError):
        arguments[source]()
    arguments[source](overwrite=True)


@pytest.mark.parametrize("stream", [True, False])
def test_a_file_object_is_written_from_its_position_on(stream):
    file = io.BytesIO(b"head")
    file.seek(4)
    safeload.save(iter(tensors().items()) if stream else tensors(), file)
    assert file.getvalue()[:4] == b"head"
    assert file.tell() == len(file.getvalue())
    same(upstream.load(file.getvalue()[4:]), tensors())


def test_a_file_object_that_cannot_seek_needs_the_tensors_in_order():
    with pytest.raises(ValueError, match="pass tensors="):
        safeload.Writer(Pipe())
    pipe, items = Pipe(), tensors()
    with safeload.Writer(pipe, tensors={name: (a.dtype, a.shape) for name, a in items.items()}) as writer:
        for name, array in items.items():
            writer.add(name, array)
    same(upstream.load(pipe.data), items)
    writer = safeload.Writer(Pipe(), tensors={"a": ("F32", (1,)), "b": ("F32", (1,))})
    with pytest.raises(ValueError, match="expected 'a', got 'b'"):
        writer.add("b", np.ones(1, np.float32))
    pipe = Pipe()
    safeload.save(items, pipe)
    same(upstream.load(pipe.data), items)


def test_a_pipe_is_written_directly(tmp_path):
    code = "import numpy as np, safeload; safeload.save({'w': np.arange(9.0)}, '/dev/stdout')"
    if not os.path.exists("/dev/stdout"):
        pytest.skip("needs /dev/stdout")
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True)
    same(upstream.load(done.stdout), {"w": np.arange(9.0)})


def test_declared_tensors_may_come_in_any_order(tmp_path):
    items = tensors()
    declared = {name: ("float32", array.shape) for name, array in items.items()}
    with safeload.Writer(tmp_path / "a.safetensors", tensors=declared) as writer:
        for name in reversed(items):
            writer.add(name, items[name])
    same(upstream.load_file(tmp_path / "a.safetensors"), items)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("c", np.ones(2, np.float32), "'c' is not in tensors="),
        ("a", np.ones(3, np.float32), r"is F32 \[3\], but tensors= has F32 \[2\]"),
        ("a", np.ones(2, np.float64), r"is F64 \[2\], but tensors= has F32 \[2\]"),
        (None, None, "the file is incomplete: tensors= declares 'a'; add every tensor before the end"),
    ],
)
@pytest.mark.parametrize("folder", [False, True])
def test_tensors_that_differ_from_their_declaration_are_refused(name, array, message, folder, tmp_path):
    def write():
        with safeload.Writer(tmp_path / ("x" if folder else "a.safetensors"), tensors={"a": ("F32", (2,))}) as writer:
            if name is not None:
                writer.add(name, array)

    with pytest.raises(ValueError, match=message):
        write()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("shape", [5, (2.0,), "ab", None, [[1]]])
def test_a_declared_shape_must_be_integers(shape, tmp_path):
    with pytest.raises(TypeError, match="the shape of 'a' must be a list of integers"):
        safeload.Writer(tmp_path / "a.safetensors", tensors={"a": ("F32", shape)})
    with pytest.raises(ValueError, match="must have sizes in"):
        safeload.Writer(tmp_path / "a.safetensors", tensors={"a": ("F32", (-1,))})


# ---- tensors ----


def test_every_kind_of_array_is_saved_as_its_values(tmp_path):
    shared = np.arange(6.0)
    items = {
        "scalar": np.float64(2),
        "0-d": np.array(7, np.int8),
        "empty": np.empty((0, 3), np.float16),
        "transposed": np.arange(6, dtype=np.int32).reshape(2, 3).T,
        "reversed": np.arange(9)[::-2],
        "broadcast": np.broadcast_to(np.float32(1), (3, 5)),
        "big endian": np.arange(4, dtype=">i4"),
        "bf16": np.ones(3, ml_dtypes.bfloat16),
        "complex": np.ones(2, np.complex64),
        "alias": shared,
        "another alias": shared[2:],
        'quote " and \\ and \n': np.ones(1, bool),
        "": np.ones(1, np.uint16),
        "ünï.☃": np.ones(1, np.uint64),
    }
    safeload.save(items, tmp_path / "a.safetensors")
    safeload.save(iter(items.items()), tmp_path / "b.safetensors")
    for path in ("a.safetensors", "b.safetensors"):
        loaded = safeload.load(tmp_path / path)
        for name, array in items.items():
            assert np.asarray(array).tobytes() == loaded[name].astype(np.asarray(array).dtype).tobytes(), name


def test_quantized_tensors_come_back_as_such(tmp_path):
    rng = np.random.default_rng(5)
    items = {
        scheme: safeload.quantize(rng.standard_normal((4, 64), np.float32), scheme)
        for scheme in ("int8", "q4_0", "q8_0")
    }
    ways = {
        "a.safetensors": lambda path: safeload.save(items, path),
        "b.safetensors": lambda path: safeload.save(iter(items.items()), path),
        "c.safetensors": lambda path: safeload.save(items, path, background=True).result(),
        "d": lambda path: safeload.save(iter(items.items()), path, max_shard_size=200),
        "e": lambda path: safeload.save(items, path, max_shard_size=200, background=True).result(),
    }
    for name, way in ways.items():
        way(tmp_path / name)
        with safeload.open(tmp_path / name) as checkpoint:
            assert {key: checkpoint.load(names=[key], dtype=None)[key] for key in checkpoint} == items, name
    writer = safeload.Writer(tmp_path / "f.safetensors")
    writer.add("int8_scale", np.ones(1, np.float32))
    with pytest.raises(ValueError, match="'int8_scale' was added before"):
        writer.add("int8", items["int8"])


def test_torch_tensors_of_any_layout_are_saved(tmp_path):
    torch = pytest.importorskip("torch")
    weight = torch.arange(6.0).reshape(2, 3)
    items = {
        "parameter": torch.nn.Parameter(weight),
        "transposed": weight.t(),
        "bf16": weight.to(torch.bfloat16),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "0-d": torch.tensor(5),
        "view": weight[1],
    }
    safeload.save(items, tmp_path / "a.safetensors")
    safeload.save(iter(items.items()), tmp_path / "b.safetensors")
    safeload.save(items, tmp_path / "c.safetensors", background=True).result()
    for path in "abc":
        loaded = safeload.torch.load_file(tmp_path / f"{path}.safetensors")
        assert all(torch.equal(loaded[name], value.detach()) for name, value in items.items())
    with pytest.raises(ValueError, match="sparse"):
        safeload.save({"s": weight.to_sparse()}, tmp_path / "d.safetensors")
    with pytest.raises(NotImplementedError, match="meta"):
        safeload.save({"s": weight.to("meta")}, tmp_path / "d.safetensors")


def test_jax_arrays_are_saved(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    safeload.save({"w": jnp.arange(5.0)}, tmp_path / "a.safetensors")
    safeload.save(iter({"w": jnp.arange(5.0)}.items()), tmp_path / "b.safetensors")
    for path in "ab":
        same(upstream.load_file(tmp_path / f"{path}.safetensors"), {"w": np.arange(5, dtype=np.float32)})


# ---- refusals ----


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("w", [1, 2], TypeError, "is a list"),
        ("w", np.array(["x"]), safeload.SafetensorError, "cannot be saved"),
        ("w", np.ma.masked_array([1.0]), TypeError, "masked"),
        (3, np.ones(1), TypeError, "must be str"),
        ("\ud800", np.ones(1), safeload.SafetensorError, "surrogate"),
        ("__metadata__", np.ones(1), safeload.SafetensorError, "reserved"),
    ],
    ids=["a list", "text", "masked", "a number", "a surrogate", "reserved"],
)
def test_what_cannot_be_saved_is_refused_and_leaves_nothing(name, value, error, message, tmp_path):
    for way in (dict, iter):
        items = [("a", np.ones(2)), (name, value)]
        for background in (False, True):
            with pytest.raises(error, match=message):
                safeload.save(way(items), tmp_path / "a.safetensors", background=background)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("folder", [False, True])
def test_bytes_of_a_tensor_that_failed_are_cut_off(folder, tmp_path, monkeypatch):
    written = atomic_file.AtomicFile.write

    def fail(file, pieces):
        written(file, pieces)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / ("out" if folder else "a.safetensors")
    first = np.arange(1 << 18, dtype=np.float32)
    with safeload.Writer(path) as writer:
        writer.add("first", first)
        with monkeypatch.context() as patch:
            patch.setattr(atomic_file.AtomicFile, "write", fail)
            with pytest.raises(OSError, match="No space left"):
                writer.add("second", np.ones((3000, 1500), np.float32).T)  # more than memory takes
    same(safeload.load(path), {"first": first})


def test_a_name_twice_is_a_value_error(tmp_path):
    items = [("a", np.ones(2)), ("a", np.ones(2))]
    for background in (False, True):
        with pytest.raises(ValueError, match="'a'"):
            safeload.save(iter(items), tmp_path / "a.safetensors", background=background)
    assert os.listdir(tmp_path) == []


def test_the_working_directory_may_change_meanwhile(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    writers = [safeload.Writer("a.safetensors"), safeload.Writer("folder")]
    large = {"a": np.ones(1 << 20)}
    pending = [safeload.save(large, path, background=True) for path in ("b.safetensors", "shards/")]
    monkeypatch.chdir(tmp_path / "there")
    for writer in writers:
        with writer:
            writer.add("w", np.ones(2))
    for saved in pending:
        saved.result()
    assert sorted(os.listdir(tmp_path / "here")) == ["a.safetensors", "b.safetensors", "folder", "shards"]
    assert os.listdir(tmp_path / "there") == []


def test_a_checkpoint_is_a_source(tmp_path):
    safeload.save(tensors(), tmp_path / "a.safetensors")
    with safeload.open(tmp_path / "a.safetensors") as checkpoint:
        safeload.save(checkpoint, tmp_path / "b.safetensors")
    same(safeload.load(tmp_path / "b.safetensors"), tensors())


WRONG = [
    (3, "a.safetensors", {}, TypeError),
    (["ab", "cd"], "a.safetensors", {}, TypeError),
    ([("a", np.ones(1)), None], "a.safetensors", {}, TypeError),
    ({}, "", {}, FileNotFoundError),
    ({}, "missing/a.safetensors", {}, FileNotFoundError),
    ({}, "a.safetensors", {"max_shard_size": 10}, ValueError),
    ({}, "a.safetensors", {"metadata": {"a": 1}}, TypeError),
    ({}, "a.safetensors", {"metadata": {"a": chr(0xDC80)}}, safeload.SafetensorError),
    ({}, bytes(1), {}, TypeError),
    ({}, 7, {}, TypeError),
    ({}, "https://example.org/a.safetensors", {}, safeload.UnsupportedError),
    ({}, io.BytesIO(), {"max_shard_size": 10}, ValueError),
]


@pytest.mark.parametrize("case", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("background", [False, True])
def test_wrong_arguments_are_refused_at_once(case, background, tmp_path, monkeypatch):
    items, dst, options, error = case
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error):
        safeload.save(items, dst, background=background, **options)
    if isinstance(items, dict):
        with pytest.raises(error):
            safeload.Writer(dst, **options)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dst", ["a.gguf", "a.pt", "a.SAFETENSOR"])
def test_other_suffixes_are_refused(dst, tmp_path):
    with pytest.raises(ValueError, match=r"use the suffix \.safetensors"):
        safeload.save(tensors(), tmp_path / dst)


def test_a_generator_that_raises_leaves_the_old_file(tmp_path):
    def broken():
        yield "a", np.ones(1 << 22)
        raise RuntimeError("no more")

    path = tmp_path / "a.safetensors"
    for dst in (path, tmp_path / "folder", io.BytesIO()):
        with pytest.raises(RuntimeError, match="no more"):
            safeload.save(broken(), dst)
    assert os.listdir(tmp_path) == []
    safeload.save(tensors(), path)
    before = path.read_bytes()
    for background in (True, False):
        with pytest.raises(RuntimeError):
            safeload.save(broken(), path, overwrite=True, background=background)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert path.read_bytes() == before


def test_an_existing_file_is_kept_without_overwrite(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"mine")
    for background in (False, True):
        with pytest.raises(FileExistsError):
            safeload.save(tensors(), path, background=background)
    with pytest.raises(FileExistsError):
        safeload.Writer(path)
    assert path.read_bytes() == b"mine"


def test_shards_hidden_by_a_new_file_are_replaced_with_it(tmp_path):
    safeload.save(tensors(8, 100), tmp_path, max_shard_size="5KB")
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileExistsError, match="index"):
        safeload.save(iter(tensors(2).items()), path)
    safeload.save(iter(tensors(2).items()), path, overwrite=True)
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("broken", ["raises", "returns nonsense", "closed", "text"])
def test_a_file_object_that_fails_is_an_error(broken):
    class Broken(io.BytesIO):
        def write(self, data):
            if broken == "raises" and self.tell() > 100:
                raise OSError(28, "No space left on device")
            return super().write(data) if broken == "raises" else len(data) + 5

    file = io.StringIO() if broken == "text" else Broken()
    if broken == "closed":
        file.close()
    with pytest.raises((OSError, TypeError, ValueError)):
        safeload.save({f"t{k}": np.ones(1 << 17) for k in range(20)}, file)
    if broken == "raises":
        assert file.getvalue() == b""


def test_a_writer_is_used_once(tmp_path):
    with safeload.Writer(tmp_path / "a.safetensors") as writer:
        writer.add("a", np.ones(1))
    with pytest.raises(ValueError, match="closed"):
        writer.add("b", np.ones(1))
    writer.close()
    with pytest.raises(ValueError, match="closed"), writer:
        pass
    safeload.Writer(tmp_path / "never.safetensors")  # creates nothing
    unfinished = safeload.Writer(tmp_path / "unfinished.safetensors")
    unfinished.add("a", np.ones(1))
    del unfinished
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_an_empty_file_has_no_tensors(tmp_path):
    safeload.save({}, tmp_path / "a.safetensors")
    safeload.save(iter(()), tmp_path / "b.safetensors")
    safeload.save(iter(()), tmp_path / "c")
    for path in ("a.safetensors", "b.safetensors", "c"):
        assert safeload.load(tmp_path / path) == {}


# ---- costs ----


def test_4_kib_stay_free_after_the_header(tmp_path):
    safeload.save(tensors(), tmp_path / "a.safetensors")
    safeload.save(iter(tensors().items()), tmp_path / "b.safetensors")
    safeload.convert(tensors(), tmp_path / "c.safetensors")
    for path in "abc":
        data = (tmp_path / f"{path}.safetensors").read_bytes()
        header = data[8 : 8 + int.from_bytes(data[:8], "little")]
        assert len(header) - len(header.rstrip(b" ")) >= 4096


def test_a_generator_is_saved_in_the_memory_of_a_tensor(tmp_path):
    def produce():
        for k in range(12):
            yield f"t{k}", np.full(1 << 20, k, np.float64)

    tracemalloc.start()
    try:
        safeload.save(produce(), tmp_path / "a.safetensors", durable=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20  # a tensor has 8 MiB


# ---- in the background ----


def test_arrays_may_change_once_save_returns(tmp_path):
    for k in range(4):
        array, odd = np.full(3 << 20, k, np.float32), np.arange(20, dtype=np.int16)[::2]
        saved = safeload.save({"a": array, "odd": odd}, tmp_path / f"{k}.safetensors", background=True)
        array[:] = -1
        saved.result()
        loaded = upstream.load_file(tmp_path / f"{k}.safetensors")
        same(loaded, {"a": np.full(3 << 20, k, np.float32), "odd": np.arange(20, dtype=np.int16)[::2]})


def test_saves_of_different_sizes_share_a_buffer(tmp_path):
    pending = []
    for k, size in enumerate([10, 15 << 20, 5 << 20, 1, 20 << 20]):
        items = {f"{part}": np.full(size, part + k, np.uint8) for part in range(3)}
        pending.append((k, size, safeload.save(iter(items.items()), tmp_path / f"{k}.safetensors", background=True)))
    for k, size, saved in pending:
        saved.result()
        loaded = safeload.load(tmp_path / f"{k}.safetensors")
        assert all((loaded[f"{part}"] == part + k).all() and loaded[f"{part}"].size == size for part in range(3))


def test_the_future_raises_the_error_of_the_save(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    target = folder / "a.safetensors"
    large = {"a": np.ones(1 << 20)}
    first = safeload.save(large, tmp_path / "b.safetensors", background=True)
    first.result()
    os.rmdir(folder)
    with pytest.raises(FileNotFoundError):
        safeload.save(large, target, background=True).result()
    safeload.save(large, tmp_path / "c.safetensors", background=True).result()  # the buffer is free again


def test_the_interpreter_waits_for_pending_saves(tmp_path):
    code = (
        "import numpy as np, safeload, sys\n"
        "safeload.save({'a': np.ones(8 << 20)}, sys.argv[1] + '/a.safetensors', background=True)\n"
        "safeload.save({'b': np.ones(1)}, sys.argv[1] + '/b.safetensors', background=True)\n"
        "def late(): safeload.save({'c': np.ones(1)}, sys.argv[1] + '/c.safetensors', background=True)\n"
        "import atexit; atexit.register(late)\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code, tmp_path], check=True)
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors", "c.safetensors"]
    assert safeload.load(tmp_path / "a.safetensors")["a"].size == 8 << 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_waits_for_nor_removes_a_pending_save(tmp_path):
    saved = safeload.save({"a": np.ones(8 << 20)}, tmp_path / "a.safetensors", background=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                saved.result()
            except RuntimeError:
                safeload.save({"b": np.ones(4)}, tmp_path / "b.safetensors", background=True).result()
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    saved.result()
    assert safeload.load(tmp_path / "a.safetensors")["a"].size == 8 << 20
    assert safeload.load(tmp_path / "b.safetensors")["b"].size == 4
