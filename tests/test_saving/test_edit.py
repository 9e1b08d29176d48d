"""`safeload.edit`: metadata and tensors of files changed in place, or by a new file."""

import json
import os
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from builders import inside
from builders.inside import atomic_file, main
from builders.thorough import THOROUGH

import safeload
from safeload import UnsupportedError

upstream = pytest.importorskip("safetensors.numpy")

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX links and owners")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    items = {"a": np.arange(5.0), "b": np.ones(3, np.int8), "c": np.ones((2, 2), np.float32), "e": np.ones((0, 4))}
    safeload.save(items, path, metadata={"x": "1", "y": "2"})
    return path


def metadata_of(path):
    with safeload.open(path) as checkpoint:
        return dict(checkpoint.metadata)


def apply(path, *changes):
    with safeload.edit(path) as file:
        for change in changes:
            change(file)


def fail(file):
    raise RuntimeError


def recovered(path, capsys):
    """What the command says that it recovered."""
    assert main(["edit", "--recover", str(path)]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith(f"{path}: ")
    return out[len(f"{path}: ") : -1]


NOTHING, UNDONE = "no edit was interrupted", "the interrupted edit was undone"


# ---- safetensors ----


def test_metadata_and_names_change_in_place(path):
    inode, before = path.stat().st_ino, upstream.load_file(path)
    with safeload.edit(path) as file:
        assert (list(file), len(file), "a" in file, "z" in file) == (["a", "e", "c", "b"], 4, True, False)
        assert file.metadata == {"x": "1", "y": "2"}
        file.metadata["x"] = "new"
        file.metadata["ü"] = "☃" * 500
        del file.metadata["y"]
        file.rename("a", "alpha")
        file.rename("c", "a")
    assert path.stat().st_ino == inode
    assert metadata_of(path) == {"x": "new", "ü": "☃" * 500}
    after = upstream.load_file(path)
    for old, new in {"a": "alpha", "c": "a", "b": "b", "e": "e"}.items():
        np.testing.assert_array_equal(before[old], after[new], strict=True)
    assert os.listdir(path.parent) == [path.name]


def test_other_changes_make_a_new_file(path):
    inode = path.stat().st_ino
    with safeload.edit(path) as file:
        del file["b"]
        file["new"] = np.arange(6, dtype=np.float16).reshape(2, 3).T
        file["c"] = np.zeros(4, np.int64)
    after = upstream.load_file(path)
    assert path.stat().st_ino != inode
    assert after.keys() == {"a", "c", "e", "new"}
    np.testing.assert_array_equal(after["new"], np.arange(6, dtype=np.float16).reshape(2, 3).T)
    np.testing.assert_array_equal(after["a"], np.arange(5.0))
    with safeload.edit(path) as file:
        file.metadata["long"] = "x" * 10_000
    assert metadata_of(path)["long"] == "x" * 10_000
    inode = path.stat().st_ino
    with safeload.edit(path) as file:
        file.metadata["more"] = "x" * 3_000  # the new file has room again
    assert path.stat().st_ino == inode
    assert os.listdir(path.parent) == [path.name]


def test_a_file_without_room_gets_some(tmp_path):
    path = tmp_path / "a.safetensors"
    upstream.save_file({"w": np.arange(3.0)}, path)
    with safeload.edit(path) as file:
        assert file.metadata == {}
        file.metadata["k"] = "v"
    assert metadata_of(path) == {"k": "v"}
    np.testing.assert_array_equal(upstream.load_file(path)["w"], np.arange(3.0))


def test_an_edit_without_changes_or_with_an_exception_writes_nothing(path):
    before = path.read_bytes(), path.stat().st_mtime_ns
    with safeload.edit(path):
        pass
    with pytest.raises(RuntimeError):
        apply(path, lambda file: file.metadata.update(x="3"), lambda file: file.__delitem__("a"), fail)
    with safeload.edit(path) as file:
        file.rename("a", "z")
        file.rename("z", "a")
        file.metadata["x"] = "1"
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    with safeload.edit(path):  # the lock is free
        pass


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda file: file.rename("z", "y"), safeload.TensorNotFoundError, "no tensor 'z'"),
        (lambda file: file.rename("a", "b"), ValueError, "there is a tensor 'b' already"),
        (lambda file: file.rename("a", "__metadata__"), safeload.SafetensorError, "reserved"),
        (lambda file: file.rename("a", "\udc80"), safeload.SafetensorError, "surrogate"),
        (lambda file: file.__delitem__("z"), safeload.TensorNotFoundError, "no tensor 'z'"),
        (lambda file: file.metadata.update(k=3), TypeError, "must be str"),
        (lambda file: file.metadata.pop("z"), KeyError, "z"),
        (lambda file: file.__setitem__("a", [1]), TypeError, "is a list"),
        (lambda file: file.__setitem__(3, np.ones(1)), TypeError, "must be str"),
        (lambda file: file.__setitem__("q", safeload.quantize(np.ones(32, np.float32), "q8_0")), UnsupportedError, "q"),
    ],
)
def test_invalid_changes_are_refused(change, error, message, path):
    before = path.read_bytes()
    with pytest.raises(error, match=message), safeload.edit(path) as file:
        change(file)
    assert path.read_bytes() == before


def test_parts_of_quantized_tensors_stay_as_they_are_described(tmp_path):
    path = tmp_path / "q.safetensors"
    quantized = safeload.quantize(np.random.default_rng(1).standard_normal((4, 64), np.float32), "int8")
    safeload.save({"w": quantized, "plain": np.ones(3)}, path)
    for change in (lambda file: file.rename("w", "x"), lambda file: file.__delitem__("w_scale")):
        with pytest.raises(UnsupportedError, match="part of a quantized tensor"), safeload.edit(path) as file:
            change(file)
    with safeload.edit(path) as file:
        file.rename("plain", "x")
        file.metadata["a"] = "b"
    with safeload.open(path) as checkpoint:
        assert checkpoint.load(dtype=None)["w"] == quantized


def test_arrays_of_an_open_checkpoint_keep_their_values(path):
    mapped = safeload.load(path)
    checkpoint = safeload.open(path)
    with safeload.edit(path) as file:
        file.metadata["x"] = "other"
    np.testing.assert_array_equal(checkpoint["a"], np.arange(5.0))
    with safeload.edit(path) as file:
        file["a"] = np.zeros(9)
        del file["c"]
    np.testing.assert_array_equal(mapped["a"], np.arange(5.0))
    np.testing.assert_array_equal(mapped["c"], np.ones((2, 2)))


def test_an_edit_of_a_file_that_is_its_own_source(path):
    loaded = safeload.load(path)
    with safeload.edit(path) as file:
        file["copy"] = loaded["a"]
        file["a"] = loaded["a"] + 1
    np.testing.assert_array_equal(safeload.load(path)["copy"], np.arange(5.0))


@pytest.mark.no_core
def test_many_changes_take_linear_time(tmp_path):
    count = 100_000 if THOROUGH else 24_000
    safeload.save({f"t{k}": np.ones(1, np.int8) for k in range(count)}, tmp_path / "a.safetensors", durable=False)
    started = time.process_time()
    with safeload.edit(tmp_path / "a.safetensors", durable=False) as file:
        for k in range(0, count, 2):
            file.rename(f"t{k}", f"r{k}")
        for k in range(1, count, 4):
            del file[f"t{k}"]
    assert time.process_time() - started < count / 10_000
    assert len(safeload.open(tmp_path / "a.safetensors")) == count * 3 // 4


@pytest.mark.skipif(sys.platform != "linux", reason="a sparse file")
def test_metadata_of_a_large_file_changes_at_once(tmp_path):
    size, path = 50 << 30, tmp_path / "large.safetensors"
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode() + b" " * 4096
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    times = []
    for k in range(5):
        started = time.perf_counter()
        with safeload.edit(path, durable=False) as file:
            file.metadata["k"] = str(k)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.01
    assert path.stat().st_blocks * 512 < 1 << 20


# ---- other programs ----


def test_two_edits_of_a_file_exclude_each_other(path):
    with safeload.edit(path) as file:
        file.metadata["x"] = "5"
        with pytest.raises(BlockingIOError, match="another edit"):
            safeload.edit(path)
        code = "import sys, safeload\ntry: safeload.edit(sys.argv[1])\nexcept BlockingIOError: sys.exit(7)"
        assert subprocess.run([sys.executable, "-I", "-c", code, path], check=False).returncode == 7
    abandoned = safeload.edit(path)
    del abandoned
    with safeload.edit(path) as file:
        assert file.metadata["x"] == "5"


def test_a_file_that_another_program_changes_meanwhile_is_not_touched(path):
    for change in (lambda: path.write_bytes(path.read_bytes()), lambda: os.replace(path.with_suffix(".new"), path)):
        path.with_suffix(".new").write_bytes(path.read_bytes())
        steps = (lambda file: file.metadata.update(x="7"), lambda file: time.sleep(0.02), lambda file, c=change: c())
        with pytest.raises(safeload.SafeloadError, match="changed by another program"):
            apply(path, *steps)
        assert metadata_of(path)["x"] == "1"


@posix
def test_symbolic_links_are_followed_but_not_into_the_cache(path, tmp_path):
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    with safeload.edit(link) as file:
        file.metadata["x"] = "y" * 9000
    assert link.is_symlink()
    assert metadata_of(path)["x"] == "y" * 9000
    blob = tmp_path / "models--a--b" / "blobs" / "0123"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "main" / "model.safetensors"
    for folder in (blob.parent, snapshot.parent):
        folder.mkdir(parents=True)
    blob.write_bytes(path.read_bytes())
    snapshot.symlink_to(blob)
    outside = tmp_path / "outside.safetensors"
    outside.symlink_to(snapshot)
    for place in (blob, snapshot, outside):
        with pytest.raises(UnsupportedError, match="cache of the Hugging Face Hub"):
            safeload.edit(place)


@posix
def test_several_hard_links_are_refused_unless_forced(path, tmp_path):
    os.link(path, tmp_path / "other.safetensors")
    with pytest.raises(UnsupportedError, match="2 hard links"):
        safeload.edit(path)
    with safeload.edit(path, force=True) as file:
        file.metadata["x"] = "both"
    assert metadata_of(tmp_path / "other.safetensors")["x"] == "both"
    with safeload.edit(path, force=True) as file:
        del file["a"]
    assert "a" in safeload.open(tmp_path / "other.safetensors")


@pytest.mark.parametrize("url", ["https://example.org/a.safetensors", "s3://bucket/a.safetensors"])
def test_urls_cannot_be_edited(url):
    with pytest.raises(UnsupportedError, match="on this machine"):
        safeload.edit(url)


def test_other_files_cannot_be_edited(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.ones(1))
    (tmp_path / "b.safetensors").write_bytes(b"")
    for name, error in (("a.npz", safeload.FormatError), ("b.safetensors", safeload.FormatError)):
        with pytest.raises(error):
            safeload.edit(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        safeload.edit(tmp_path / "none.safetensors")
    with pytest.raises(UnsupportedError, match="a folder needs"):
        safeload.edit(tmp_path)


# ---- recovery ----


def journal_of(path):
    return path.parent / f".{path.name}.safeload-edit"


def interrupt(path, content=b"\xff" * 30, key="k"):
    """What an edit leaves that was killed while it wrote the header, of which ``content`` was written."""
    data = path.read_bytes()
    # Its first sync is that of the journal.
    code = "import os, sys, safeload\nos.fsync = lambda descriptor: os._exit(3)\n"
    code += "with safeload.edit(sys.argv[1]) as file: file.metadata[sys.argv[2]] = 'v'"
    command = [sys.executable, "-c", code, str(path), key]
    assert subprocess.run(command, cwd=path.parent, timeout=60).returncode == 3  # imports nothing from here
    assert path.read_bytes() == data
    assert journal_of(path).exists()
    with path.open("r+b") as file:
        file.write(content)
    return data


def test_an_interrupted_edit_is_reported_and_undone(path, capsys, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    data = interrupt(path)
    for reader in (safeload.open, safeload.load, safeload.numpy.load_file, safeload.edit):
        with pytest.raises(safeload.FormatError, match=f"safeload edit --recover {path}"):
            reader(path)
    assert path.read_bytes() != data
    assert main(["edit", "--recover", str(path)]) == 0
    assert "undone" in capsys.readouterr().out
    assert path.read_bytes() == data
    assert os.listdir(path.parent) == [path.name]
    assert recovered(path, capsys) == NOTHING


@posix
@pytest.mark.parametrize("sealed", [False, True])
def test_recovery_leaves_files_that_are_being_written(path, sealed, capsys):
    left = path.parent / f".{path.name}.0123456789abcdef.tmp"
    left.write_bytes(b"of a killed process")
    data = path.read_bytes()
    with atomic_file.AtomicFile(path, len(data)) as file, atomic_file.AtomicFile(path.parent / "other.safetensors", 1):
        with file.stream() as stream:
            stream.write(data[:-8] + bytes(8))
        if sealed:  # as shards that wait for the last one
            file.seal()
        assert recovered(path, capsys) == recovered(path.parent, capsys) == NOTHING
        assert left.exists()
    assert path.read_bytes() == data[:-8] + bytes(8)
    assert recovered(path, capsys) == NOTHING
    assert not left.exists()
    assert not list(path.parent.glob("*.tmp"))


@posix
def test_recovery_leaves_temporary_files_of_filesystems_without_locks(path, monkeypatch, capsys):
    left = path.parent / f".{path.name}.0123456789abcdef.tmp"
    left.write_bytes(b"perhaps of a killed process")
    monkeypatch.setattr(inside.atomic_file, "lock", lambda descriptor: None)
    assert recovered(path, capsys) == NOTHING
    assert left.exists()


@posix
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_was_forked_during_a_save_does_not_lock_the_file(path):
    data = path.read_bytes()
    with atomic_file.AtomicFile(path, len(data)) as file:
        with file.stream() as stream:
            stream.write(data)
        begin, end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(end)
            os.read(begin, 1)
            os._exit(0)
    with safeload.edit(path) as edited:
        edited.metadata["step"] = "9"
    os.close(end)
    os.waitpid(child, 0)
    os.close(begin)
    assert safeload.open(path).metadata["step"] == "9"


def test_an_interrupted_edit_of_a_gguf_file_is_reported_and_undone(gguf, monkeypatch, capsys):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    data = interrupt(gguf, key="general.name")
    for reader in (safeload.open, safeload.edit):
        with pytest.raises(safeload.FormatError, match="safeload edit --recover"):
            reader(gguf)
    assert recovered(gguf, capsys) == UNDONE
    assert gguf.read_bytes() == data


def test_a_header_of_odd_length_is_edited_in_place(tmp_path):
    path = tmp_path / "odd.safetensors"
    header = b'{"w":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}' + b" " * 100
    header += b" " * (len(header) % 2 == 0)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    inode = path.stat().st_ino
    with safeload.edit(path) as file:
        file.metadata["k"] = "v"
    assert (path.stat().st_ino, metadata_of(path)) == (inode, {"k": "v"})
    with safeload.edit(path) as file:
        file.metadata["k"] = "v" * 300
    assert upstream.load_file(path)["w"].tobytes() == b"abc"
    assert metadata_of(path) == {"k": "v" * 300}


@pytest.mark.parametrize("fault", ["other file", "cut", "text", "folder", "link", "nonsense"])
def test_a_journal_that_does_not_belong_to_the_file_changes_nothing(fault, path, capsys):
    interrupt(path, b"")
    place, before = journal_of(path), path.read_bytes()
    with open(place, "rb") as file:
        journal = file.read()
    if fault == "other file":
        path.write_bytes(before + b"\0")
        before += b"\0"
    elif fault == "cut":
        with open(place, "wb") as file:
            file.write(journal[:-5])
    elif fault in ("text", "nonsense"):
        with open(place, "wb") as file:
            file.write(b"hello" if fault == "text" else b"safeload edit 1\n[" + b"[" * 100_000 + b"\n")
    else:
        os.unlink(place)
        if fault == "folder":
            os.mkdir(place)
        else:
            os.symlink(path, place)
    if fault in ("cut", "text", "nonsense"):
        assert recovered(path, capsys) == UNDONE
    else:
        assert main(["edit", "--recover", str(path)]) == 1
        assert capsys.readouterr().err.startswith("safeload: the journal of an edit ")
    assert path.read_bytes() == before


def test_a_file_that_was_replaced_after_an_interrupted_edit_is_kept(path, capsys):
    data = interrupt(path)
    other = bytearray(data)
    other[-1] ^= 1
    other[30] ^= 1  # in the header
    with path.open("r+b") as file:
        file.write(other)
    assert main(["edit", "--recover", str(path)]) == 1
    assert "another program has changed the file" in capsys.readouterr().err
    assert path.read_bytes() == other


def test_a_stale_journal_does_not_stop_the_next_edit(path):
    interrupt(path, b"")
    with safeload.edit(path) as file:
        file.metadata["x"] = "after"
    assert metadata_of(path)["x"] == "after"
    assert os.listdir(path.parent) == [path.name]


# ---- GGUF ----


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "m.gguf"
    metadata = {
        "general.architecture": "llama",
        "general.name": "x",
        "llama.block_count": np.uint32(3),
        "eps": np.float32(0.5),
        "flag": True,
        "numbers": np.arange(3, dtype=np.int16),
        "tokens": ["a", "b"],
    }
    safeload.gguf.save_file({"blk.0.w": np.ones((4, 32), np.float32), "b": np.ones(5, np.int8)}, path, metadata)
    return path


def test_gguf_metadata_changes_and_keeps_its_types(gguf):
    reader = pytest.importorskip("gguf").GGUFReader
    for name in ("y", "a much longer name" * 20):
        with safeload.edit(gguf) as file:
            file.metadata["general.name"] = name
            file.metadata["llama.block_count"] = 7
            file.metadata["eps"] = 2
            file.metadata["added"] = [1.5, 2.5]
        with safeload.open(gguf) as checkpoint:
            assert checkpoint.metadata["general.name"] == name
            assert type(checkpoint.metadata["llama.block_count"]).__name__ == "U32"
            assert type(checkpoint.metadata["eps"]).__name__ == "F32"
            np.testing.assert_array_equal(checkpoint.load()["blk.0.w"], np.ones((4, 32)))
        tensors = {tensor.name: tensor.data for tensor in reader(gguf).tensors}
        np.testing.assert_array_equal(tensors["b"], np.ones(5, np.int8))
    with safeload.edit(gguf) as file:
        del file.metadata["tokens"], file.metadata["added"]
    assert "tokens" not in metadata_of(gguf)


def described(name, length, kind, offset):
    """The description of a tensor with one axis."""
    return struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, length, kind, offset)


@pytest.mark.parametrize("kinds", [(0, 0), (250, 0), (250, 250)], ids=["known", "a new type first", "new types"])
@pytest.mark.parametrize("gap", [0, 64])
def test_bytes_before_the_first_known_tensor_of_a_gguf_file_stay(kinds, gap, tmp_path):
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + described(b"a", 8, kinds[0], gap)
    head += described(b"b", 8, kinds[1], gap + 32)
    data = bytes(range(gap + 64))
    (tmp_path / "m.gguf").write_bytes(head + bytes(-len(head) % 32) + data)
    for name in ("x", "y", "a much longer name" * 20):
        with safeload.edit(tmp_path / "m.gguf") as file:
            file.metadata["general.name"] = name
        content = (tmp_path / "m.gguf").read_bytes()
        assert content.endswith(data)
        assert (len(content) - len(data)) % 32 == 0
        if kinds[1] == 0:
            with safeload.open(tmp_path / "m.gguf", stored=True) as opened:
                assert opened.load(only=["b"])["b"].tobytes() == data[gap + 32 :]


def test_only_the_metadata_of_a_gguf_file_can_be_edited(gguf):
    before = gguf.read_bytes()
    for change, error in (
        (lambda file: file.rename("b", "c"), UnsupportedError),
        (lambda file: file.__delitem__("b"), UnsupportedError),
        (lambda file: file.__setitem__("b", np.ones(1)), UnsupportedError),
        (lambda file: file.metadata.update({"general.alignment": 64}), UnsupportedError),
        (lambda file: file.metadata.update({"llama.block_count": -1}), safeload.SafeloadError),
        (lambda file: file.metadata.update({"k": None}), TypeError),
        (lambda file: file.metadata.update({"k": object()}), TypeError),
    ):
        with pytest.raises(error), safeload.edit(gguf) as file:
            change(file)
    assert gguf.read_bytes() == before


# ---- folders ----


@pytest.fixture
def folder(tmp_path):
    items = {f"t{k}": np.full(100, k, np.float32) for k in range(10)}
    safeload.save(items, tmp_path / "folder", max_shard_size=1000, metadata={"a": "1"})
    return tmp_path / "folder"


def test_the_shard_and_the_index_of_a_folder_change(folder):
    with safeload.edit(folder) as file:
        assert len(file) == 10
        file.rename("t3", "q")
        del file["t9"]
        file["new"] = np.ones(3)
        file["t0"] = np.zeros(2)
        file.metadata["a"] = "b"
    loaded = safeload.load(folder)
    assert sorted(loaded) == ["new", "q", *(f"t{k}" for k in range(9) if k != 3)]
    assert (loaded["q"] == 3).all()
    assert loaded["t0"].shape == (2,)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {name for name in os.listdir(folder) if name.endswith(".safetensors")}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in loaded.values())
    for name in set(index["weight_map"].values()):
        assert metadata_of(folder / name)["a"] == "b"
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_metadata_of_a_folder_changes_in_place(folder):
    before = sorted(os.listdir(folder))
    with safeload.edit(folder / "model.safetensors.index.json") as file:
        file.metadata["a"] = "b"
    assert sorted(os.listdir(folder)) == before


def test_a_folder_edit_that_fails_leaves_the_folder(folder):
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    with pytest.raises(safeload.TensorNotFoundError):
        apply(folder, lambda file: file.rename("t1", "x"), lambda file: file.__delitem__("nothing"))
    index = folder / "model.safetensors.index.json"
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before
    index.write_text(json.dumps({"weight_map": {"t0": "../model.safetensors"}}))
    with pytest.raises(safeload.FormatError, match="the bare name of a file in the same folder"):
        safeload.edit(folder)


# ---- the command ----


def test_the_command_edits(path, gguf, capsys):
    arguments = ["--metadata", "x=a=b", "--metadata", "y", "--rename", "^a$", "alpha", "--drop", "b"]
    assert main(["edit", str(path), *arguments]) == 0
    assert capsys.readouterr().out == f"{path}: 4 changes\n"
    assert metadata_of(path) == {"x": "a=b"}
    assert set(safeload.load(path)) == {"alpha", "c", "e"}
    values = {"llama.block_count": "9", "eps": "1.5", "flag": "false", "numbers": "[4]", "general.name": "7", "n": "8"}
    assert main(["edit", str(gguf), *(f"--metadata={key}={value}" for key, value in values.items())]) == 0
    metadata = metadata_of(gguf)
    assert (metadata["llama.block_count"], metadata["eps"], metadata["flag"]) == (9, 1.5, False)
    assert (metadata["numbers"].tolist(), metadata["general.name"], metadata["n"]) == ([4], "7", "8")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ([], 2),
        (["--recover", "--drop", "a"], 2),
        (["--metadata", "none"], 2),
        (["--rename", "z", "y"], 2),
        (["--rename", "(", "y"], 2),
        (["--rename", "^[ab]$", "x"], 2),
        (["--rename", "^a$", ""], 2),
        (["--drop", "z"], 2),
        (["--drop", "z*"], 2),
        (["--drop", "a", "--rename", "a", "x"], 2),
    ],
)
def test_wrong_arguments_change_nothing(arguments, status, path, capsys):
    before = path.read_bytes()
    assert main(["edit", str(path), *arguments]) == status
    assert path.read_bytes() == before
    error = capsys.readouterr().err
    assert not arguments or any(name.strip("-") in error for name in arguments if name.startswith("--"))


def test_another_format_is_sent_to_convert(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.ones(2))
    assert main(["edit", str(tmp_path / "x.npy"), "--metadata", "a=b"]) == 1
    assert "`safeload convert` makes a safetensors file from other formats" in capsys.readouterr().err


@pytest.mark.parametrize("shards", [1, 3])
def test_patterns_of_the_command_select_as_those_of_convert(tmp_path, shards):
    tensors = {f"layers.{k}.{part}": np.full((4, 4), k, np.float32) for k in range(4) for part in ("w", "b")}
    size = None if shards == 1 else sum(x.nbytes for x in tensors.values()) // shards
    for name in ("edited", "source"):
        safeload.save(tensors, tmp_path / name, max_shard_size=size or "1GB")
    # The layers change places: each new name is the old name of another tensor.
    arguments = ["--drop", "layers.3.*", "--drop", "*.0.b", "--rename", r"\.([012])\.", r".\1x."]
    arguments += ["--rename", "0x", "2", "--rename", "1x", "0", "--rename", "2x", "1"]
    assert main(["edit", str(tmp_path / "edited"), *arguments]) == 0
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "converted"), *arguments]) == 0
    edited, converted = safeload.load(tmp_path / "edited"), safeload.load(tmp_path / "converted")
    assert {name: x[0, 0] for name, x in edited.items()} == {name: x[0, 0] for name, x in converted.items()}
    assert {name: int(x[0, 0]) for name, x in edited.items()} == {
        "layers.2.w": 0,
        "layers.0.w": 1,
        "layers.0.b": 1,
        "layers.1.w": 2,
        "layers.1.b": 2,
    }


@pytest.mark.parametrize("name", ["\ud800.safetensors", "../a.safetensors", "a\0.safetensors", "", 1, [], "."])
def test_an_index_that_names_no_file_beside_it_is_refused(tmp_path, name):
    safeload.save({"a": np.ones(4, np.float32)}, tmp_path / "folder")
    index = tmp_path / "folder" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(safeload.FormatError, match=r"weight_map\['a'\] must"):
        safeload.edit(index)


def shard_names(folder):
    return sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))


def test_changed_shards_get_names_that_every_library_takes(folder):
    old = shard_names(folder)
    first = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    with safeload.edit(folder) as file:
        file["t0"] = np.zeros(3)
    (new,) = set(shard_names(folder)) - set(old)
    number, total = first["t0"][6:11], int(first["t0"][15:20])
    assert new == f"model-{number}-of-{total + 1:05}.safetensors"
    assert len(shard_names(folder)) == len(old)


@pytest.mark.parametrize("count", [1, 2])
def test_a_shard_without_tensors_leaves_the_folder(folder, count):
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    gone = sorted(set(places.values()))[:count]
    with safeload.edit(folder) as file:
        for name in [name for name, shard in places.items() if shard in gone]:
            del file[name]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {name for name, shard in places.items() if shard not in gone}
    assert shard_names(folder) == sorted(set(places.values()) - set(gone)) == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in safeload.load(folder).values())


def test_a_shard_that_the_index_of_a_single_file_names(tmp_path):
    safeload.save({"a": np.ones(3), "b": np.ones(2)}, tmp_path / "model.safetensors")
    text = json.dumps({"weight_map": dict.fromkeys("ab", "model.safetensors")})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with safeload.edit(tmp_path) as file:
        file["a"] = np.zeros(3)
    assert shard_names(tmp_path) == ["model.safetensors"]  # which is the model, as in transformers
    assert safeload.load(tmp_path)["a"].tolist() == [0, 0, 0]
