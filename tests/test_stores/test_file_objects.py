"""File objects as sources: BytesIO, open files, pipes, decompressors, and objects that break their promises."""

import bz2
import copy
import gc
import gzip
import io
import lzma
import mmap
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import threading
import zipfile
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from builders.format_files import make
from builders.inside import local, registry
from builders.random import rng

import safeload
import safeload.numpy
from safeload.errors import FormatError, MissingShardError, UnsupportedError

WEIGHTS = {"layers.0.w": rng.standard_normal((300, 700)).astype(np.float32), "b": np.arange(7, dtype=np.float16)}
DATA = safeload.numpy.save(WEIGHTS)
BEFORE = b"bytes of another owner"

POSIX = pytest.mark.skipif(os.name == "nt", reason="descriptors are read on POSIX only")


def same(arrays, weights=WEIGHTS):
    """Whether arrays are the weights, in any order."""
    return set(arrays) == set(weights) and all(np.array_equal(arrays[name], weights[name]) for name in weights)


class Reader:
    """An object with the methods of a file that are named, and nothing else.

    Args:
        largest: most bytes that a read returns.
    """

    def __init__(self, data, methods="read seek tell", largest=1 << 30):
        self._file, self._largest = io.BytesIO(data), largest
        self.reads = []
        for method in methods.split():
            setattr(self, method, getattr(self, f"_{method}"))

    def _read(self, size=-1):
        self.reads.append(size)
        return self._file.read(self._largest if size < 0 else min(size, self._largest))

    def _seek(self, position, whence=0):
        return self._file.seek(position, whence)

    def _tell(self):
        return self._file.tell()


@contextmanager
def piped(data):
    """A pipe that another thread fills."""
    read, write = os.pipe()

    def fill():
        with os.fdopen(write, "wb") as out:
            out.write(data)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        with os.fdopen(read, "rb") as file:
            yield file
    finally:
        thread.join()


@contextmanager
def opened(kind, data, folder):
    """A file object of a kind with these bytes."""
    path = folder / "weights.bin"
    path.write_bytes(data)
    if kind in ("gzip", "bz2", "lzma"):
        module, fast = {"gzip": (gzip, {"compresslevel": 1}), "bz2": (bz2, {}), "lzma": (lzma, {"preset": 0})}[kind]
        path.write_bytes(module.compress(data, **fast))
        with module.open(path, "rb") as file:
            yield file
    elif kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("member", data)
        with zipfile.ZipFile(path) as archive, archive.open("member") as file:
            yield file
    elif kind == "tar":
        (folder / "member").write_bytes(data)
        with tarfile.open(path, "w:gz", compresslevel=1) as archive:
            archive.add(folder / "member", "member")
        with tarfile.open(path) as archive:
            yield archive.extractfile("member")
    elif kind == "mmap":
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            yield mapped
    elif kind in ("spooled", "rolled", "temporary", "named"):
        made = {
            "spooled": tempfile.SpooledTemporaryFile, "rolled": partial(tempfile.SpooledTemporaryFile, 10),
            "temporary": tempfile.TemporaryFile, "named": tempfile.NamedTemporaryFile,
        }[kind]  # fmt: skip
        with made() as file:
            file.write(data)
            file.seek(0)
            yield file
    else:
        modes = {"buffered": ("rb", -1), "raw": ("rb", 0), "updating": ("r+b", -1)}
        mode, buffering = modes[kind]
        with open(path, mode, buffering) as file:
            yield file


# Formats whose tensors are in other files than the one that lists them.
FOLDERS = ("dcp", "deepspeed", "fsdp", "orbax")
KINDS = (
    "buffered", "raw", "updating", "temporary", "named", "spooled", "rolled", "mmap", "gzip", "bz2", "lzma", "zip",
    "tar",
)  # fmt: skip


@pytest.mark.parametrize("row", [row for row in registry.ROWS if row.name not in FOLDERS], ids=lambda row: row.name)
@pytest.mark.parametrize("kind", ["BytesIO", "buffered", "gzip", "reader", "pipe"])
def test_every_format_is_read_from_every_kind_of_file_object(row, kind, tmp_path):
    weights = {"tensor": WEIGHTS["layers.0.w"]} if row.name == "npy" else WEIGHTS
    if row.name == "moon":
        weights = {name: array.astype(np.float16) for name, array in weights.items()}
    data = make(row, weights, tmp_path / "made").read_bytes()
    assert len(data) > 300_000
    if kind == "BytesIO":
        assert same(safeload.load(io.BytesIO(data)), weights)
    elif kind == "reader":
        assert same(safeload.load(Reader(data)), weights)
    elif kind == "pipe":
        with piped(data) as file:
            assert same(safeload.load(file), weights)
    else:
        with opened(kind, data, tmp_path) as file:
            assert same(safeload.load(file, dtype="float32"), weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_object_is_read_from_its_position_and_left_there(kind, tmp_path):
    with opened(kind, DATA, tmp_path) as file:
        assert same(safeload.load(file))
        assert (file.tell(), file.closed) == (0, False)
    with opened(kind, BEFORE + DATA, tmp_path) as file:
        file.seek(len(BEFORE))
        assert same(safeload.load(file))
        assert (file.tell(), file.closed) == (len(BEFORE), False)
        assert same(dict(safeload.open(file).stream()))
        assert file.tell() == len(BEFORE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_position_is_restored_after_an_error(kind, tmp_path):
    with opened(kind, BEFORE + DATA[:-1], tmp_path) as file:
        file.seek(len(BEFORE))
        with pytest.raises(FormatError, match="the file is truncated"):
            safeload.load(file)
        assert (file.tell(), file.closed) == (len(BEFORE), False)


def test_compressed_npz_and_broken_zip_are_read_as_from_a_path(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", **WEIGHTS)
    data = (tmp_path / "a.npz").read_bytes()
    assert same(safeload.load(io.BytesIO(data)))
    assert same(safeload.load(Reader(data)))
    with pytest.raises(FormatError, match="BytesIO"):
        safeload.load(io.BytesIO(data[:-30]))


@POSIX
def test_an_open_file_is_mapped_and_outlives_its_object(tmp_path):
    with opened("buffered", DATA, tmp_path) as file:
        checkpoint = safeload.open(file)
    assert isinstance(checkpoint.weight_files[0].store, local.LocalStore)
    os.unlink(tmp_path / "weights.bin")
    assert same(checkpoint)
    assert same(checkpoint.load(backend="pread"))
    assert same(copy.copy(checkpoint))


def test_bytes_of_a_bytesio_are_those_at_opening():
    file = io.BytesIO(DATA)
    checkpoint = safeload.open(file)
    arrays = checkpoint.load()
    file.write(bytes(len(DATA)))
    file.truncate(10)
    file.close()
    assert same(arrays)
    assert same(checkpoint)
    arrays["b"][:] = 0
    assert same(checkpoint.load())


def test_a_load_leaves_no_buffer_of_a_bytesio_exported():
    file = io.BytesIO(DATA)
    arrays = safeload.load(file)
    file.write(b"more")
    file.truncate()
    assert same(arrays)


def test_bytes_that_were_written_and_not_flushed_are_read(tmp_path):
    with open(tmp_path / "w", "w+b", buffering=1 << 20) as file:
        file.write(DATA)
        file.seek(0)
        assert same(safeload.load(file))
        file.seek(0, 2)
        file.write(b"x" * 5)
        file.seek(0)
        with pytest.raises(FormatError):
            safeload.load(file)


def test_every_function_of_checkpoints_takes_file_objects(tmp_path):
    for file in (io.BytesIO(DATA), Reader(DATA)):
        assert safeload.check(file, values=False).ok
        assert set(safeload.stats(file)) == set(WEIGHTS)
        assert safeload.diff(file, io.BytesIO(DATA)).same
        safeload.convert(file, tmp_path / "out.npz", overwrite=True)
        assert same(safeload.load(tmp_path / "out.npz"))
        assert set(safeload.load_quantized(file, "q8_0")) == set(WEIGHTS)
    merged = safeload.convert([io.BytesIO(DATA), {"more": np.ones(3)}], tmp_path / "merged.safetensors")
    assert merged.tensors == 3


def test_a_list_of_file_objects_is_opened_as_one_checkpoint(tmp_path):
    parts = [io.BytesIO(safeload.numpy.save({name: array})) for name, array in WEIGHTS.items()]
    assert same(safeload.load(parts))
    path = tmp_path / "more.safetensors"
    safeload.numpy.save_file({"more": np.ones(3)}, path)
    assert set(safeload.load([*parts, path])) == {*WEIGHTS, "more"}
    with pytest.raises(FormatError, match="'b'"):
        safeload.load([parts[1], parts[1]])
    with pytest.raises(ValueError, match="one store"):
        safeload.load([parts[0], "https://host/a.safetensors"])


def test_a_short_read_is_continued_and_requests_are_bounded():
    file = Reader(DATA, largest=1000)
    assert same(safeload.load(file))
    assert max(file.reads) <= 1 << 20
    assert min(file.reads) > 0
    assert same(safeload.load(Reader(DATA, "read", largest=7 << 10)))


def test_only_the_bytes_of_a_tensor_are_read():
    weights = {name: np.full((1000, 1000), k, np.float32) for k, name in enumerate("abcd")}
    file = Reader(safeload.numpy.save(weights))
    with safeload.open(file) as checkpoint:
        file.reads.clear()
        assert checkpoint["c"][0, 0] == 2
        assert sum(file.reads) == 4_000_000
        file.reads.clear()
        assert checkpoint.get_slice("b")[500:502].sum() == 2000
        assert sum(file.reads) == 8000


def test_two_threads_read_one_file_object():
    weights = {f"w{k}": np.full(200_000, k, np.int32) for k in range(20)}
    file, results = Reader(safeload.numpy.save(weights)), []

    def load():
        results.extend(same(safeload.load(file), weights) for _ in range(3))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 12
    assert file.tell() == 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: io.StringIO("text"), TypeError, "expected a binary file, got a text file"),
        (lambda path: io.TextIOWrapper(io.BytesIO(DATA)), TypeError, "pass its .buffer"),
        (lambda path: path.open(encoding="latin1"), TypeError, "pass its .buffer"),
        (lambda path: path.open("ab"), ValueError, 'open for writing only; open it with "rb"'),
        (lambda path: io.BytesIO(b""), FormatError, "empty file"),
        (lambda path: Reader(DATA[:50], "read"), FormatError, "Reader"),
        (lambda path: Reader(b"<html>" * 1000, "read"), UnsupportedError, "an HTML page"),
        (lambda path: SimpleNamespace(read=lambda size: "text"), TypeError, "read.. must return bytes, got str"),
        (lambda path: SimpleNamespace(read=lambda size: None), BlockingIOError, "non-blocking"),
        (lambda path: SimpleNamespace(read=lambda size: DATA), FormatError, r"read\(512\) returned"),
        (lambda path: object(), TypeError, "expected a path, URL, file object, fsspec path or store"),
        (lambda path: io.BytesIO, TypeError, "expected a path"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(make, error, message, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(DATA)
    file = make(path)
    with pytest.raises(error, match=message):
        safeload.load(file)
    if isinstance(file, io.IOBase):
        assert not file.closed
        file.close()
        with pytest.raises(TypeError if hasattr(file, "encoding") else ValueError, match=r"binary|closed"):
            safeload.load(file)


def test_an_archive_is_not_one_of_its_members(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive, pytest.raises(TypeError, match=r"archive\.open"):
        safeload.load(archive)


def test_a_position_at_the_end_is_explained(tmp_path):
    file = io.BytesIO()
    file.write(DATA)
    with pytest.raises(FormatError, match=rf"its position, {len(DATA):,}, is at the end; call seek\(0\)"):
        safeload.load(file)
    with open(tmp_path / "w", "w+b") as file:
        file.write(DATA)
        with pytest.raises(FormatError, match=r"call seek\(0\)"):
            safeload.load(file)


def test_errors_have_the_name_of_the_file_object(tmp_path):
    with opened("buffered", DATA[:-1], tmp_path) as file, pytest.raises(FormatError) as error:
        safeload.load(file)
    assert error.value.path == str(tmp_path / "weights.bin")
    named = io.BytesIO(DATA[:-1])
    for name, shown in ((None, "BytesIO"), (7, "file descriptor 7"), ("https://me:pass-word@host/a?sig=x", "host/a")):
        if name is not None:
            named = type("BytesIO", (io.BytesIO,), {"name": name})(DATA[:-1])
        with pytest.raises(FormatError, match=shown) as error:
            safeload.load(named)
        assert "pass-word" not in str(error.value)


def test_an_endless_input_of_unknown_content_ends_at_once():
    class Endless:
        read = staticmethod(lambda size: b"\x01" * size)

    with pytest.raises(FormatError, match="no known weight format starts with 01 01"):
        safeload.load(Endless())


def test_a_file_that_lies_about_its_size_or_loses_bytes_is_an_error():
    class Liar(io.BytesIO):
        def seek(self, position, whence=0):
            return super().seek(position, whence) + (10_000_000 if whence == 2 else 0)

        def tell(self):
            end = super().tell()
            return end + 10_000 if end == len(self.getvalue()) else end

    with pytest.raises(FormatError):
        safeload.load(Liar(DATA))
    file = Reader(DATA)
    with safeload.open(file) as checkpoint:
        file._file.truncate(100_000)
        with pytest.raises(FormatError, match="the file ends at byte"):
            checkpoint.load()
        assert file.tell() == 0


def test_a_file_object_that_grows_is_an_error():
    file = Reader(DATA)
    with safeload.open(file) as checkpoint:
        checkpoint.load()
        file._file.seek(0, 2)
        file._file.write(b"more")
        with pytest.raises(FormatError, match="changed since it was opened"):
            checkpoint.load()


def test_an_error_of_the_file_object_reaches_the_caller():
    class Failing(io.BytesIO):
        def read(self, size=-1):
            if self.tell() > 100:
                raise OSError(5, "the disk is on fire")
            return super().read(size)

    file = Failing(DATA)
    with pytest.raises(OSError, match="on fire"):
        safeload.load(file)
    assert file.tell() == 0


def test_a_closed_file_object_fails_the_next_read(tmp_path):
    file = type("Named", (io.BytesIO,), {})(DATA)
    checkpoint = safeload.open(file)
    file.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.load()
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.load()


def test_a_file_object_stays_in_its_process():
    checkpoint = safeload.open(io.BytesIO(DATA))
    with pytest.raises(UnsupportedError, match="BytesIO: a file object stays in this process"):
        pickle.dumps(checkpoint)
    assert same(copy.copy(checkpoint))


def test_a_copy_sees_that_a_bytesio_has_changed():
    file = io.BytesIO(DATA)
    checkpoint = safeload.open(file)
    file.write(bytes(10))
    with pytest.raises(FormatError, match="changed since it was opened"):
        copy.copy(checkpoint)


@pytest.mark.skipif(os.name == "nt", reason="on Windows an open file has a name")
@pytest.mark.parametrize("kind", ["gzip", "pipe"])
def test_a_copied_file_object_leaves_no_file_and_no_descriptor(kind, tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with opened("gzip", DATA, tmp_path) if kind == "gzip" else piped(DATA) as file:
        checkpoint = safeload.open(file)
        again = copy.copy(checkpoint)
    assert list(folder.iterdir()) == []
    checkpoint.close()
    assert same(again)
    again.close()
    store = checkpoint.weight_files[0].store
    assert isinstance(store, local.LocalStore)
    assert store._descriptor is None
    gc.collect()


def test_parts_of_a_split_gguf_are_found_in_the_list(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=1)
    for name, array in WEIGHTS.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 2
    files = [path.open("rb") for path in paths]
    try:
        assert same(safeload.load(files))
        with pytest.raises(MissingShardError, match="1 of 2 parts are missing"):
            safeload.load(files[0])
    finally:
        for file in files:
            file.close()


def test_standard_input_is_read_from_a_pipe_and_from_a_file(tmp_path):
    code = textwrap.dedent("""
        import sys, safeload
        print(sorted(safeload.load(sys.stdin.buffer)))
    """)
    path = tmp_path / "a.safetensors"
    path.write_bytes(DATA)
    command = [sys.executable, "-I", "-c", code]
    with path.open("rb") as file:
        for keywords in ({"input": DATA}, {"stdin": file}):
            result = subprocess.run(command, capture_output=True, check=True, **keywords)
            assert result.stdout.decode().strip() == str(sorted(WEIGHTS))


def test_a_response_of_urllib_is_read(tmp_path):
    from urllib.request import urlopen

    from builders.http_server import Server

    (tmp_path / "a.safetensors").write_bytes(DATA)
    with Server(tmp_path) as server, urlopen(server.url("/a.safetensors")) as response:
        assert same(safeload.load(response))


@pytest.mark.store_packages
def test_an_open_file_of_fsspec_is_read_from_its_position():
    fsspec = pytest.importorskip("fsspec")
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/file-objects/a", BEFORE + DATA)
    fs.pipe_file("/file-objects/b", DATA)
    try:
        with fs.open("/file-objects/b") as file:
            assert same(safeload.load(file))
            assert file.tell() == 0
        with fs.open("/file-objects/a") as file:
            file.seek(len(BEFORE))
            assert same(safeload.load(file))
            assert file.tell() == len(BEFORE)
        with fsspec.open("memory://file-objects/b") as file:
            assert same(safeload.load(file))
    finally:
        fs.rm("/file-objects", recursive=True)


@POSIX
@pytest.mark.parametrize("holes", [False, True])
def test_a_check_leaves_the_position(tmp_path, holes):
    path = tmp_path / "m.safetensors"
    safeload.numpy.save_file({"w": np.ones(1 << 20, np.float32)}, path, durable=False)
    if holes:
        with open(path, "r+b") as file:
            file.truncate(1 << 20)
            file.truncate(5 << 20)
    with open(path, "rb") as file:
        for _ in range(2):
            safeload.check(file)
            assert file.tell() == 0
