"""Saving: bytes and refusals, modes and links, pipes and devices, durability, atomicity, memory."""

import contextlib
import errno
import gc
import itertools
import os
import random
import re
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy as upstream
from builders import inside
from builders.cuts import killed_at_the_end
from builders.inside import atomic_file, main, npy
from builders.thorough import part_of

import safeload
import safeload.gguf
import safeload.moon
from safeload import SafetensorError
from safeload.numpy import load, load_file, save, save_file

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX only")
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
SMALL = {"x": np.arange(10, dtype=np.float32)}
OLD = {"x": np.full(1000, 5, np.uint8)}


@pytest.fixture(autouse=True)
def known_umask():
    old = os.umask(0o022)
    yield
    os.umask(old)


@pytest.fixture(params=[True, False], ids=["durable", "not durable"])
def durable(request):
    return request.param


@pytest.fixture
def shared_folder():
    """A folder that any user may reach: pytest's own are for their owner alone."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def run_python(code, *arguments, **keywords):
    return subprocess.run(
        [sys.executable, "-I", "-c", code, *map(str, arguments)], capture_output=True, timeout=180, **keywords
    )


# Imports come first: nobody may not read a Python that is in root's home.
NOBODY = """
import os, sys, threading
import numpy as np
import safeload
from safeload.numpy import save, save_file
save({})  # imports the rest
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
"""


# ---- layouts ----

BASE = np.arange(2 * 3 * 4 * 5, dtype=np.int32).reshape(2, 3, 4, 5)
LAYOUTS = {
    "C": BASE,
    "Fortran": np.asfortranarray(BASE),
    "transposed": BASE.T,
    "axes permuted": BASE.transpose(2, 0, 3, 1),
    "every second": BASE[:, ::2, :, ::2],
    "reversed": BASE[::-1],
    "all reversed": BASE[::-1, ::-1, ::-1, ::-1],
    "last reversed": BASE[..., ::-1],
    "broadcast": np.broadcast_to(BASE[:, :1], (6, 2, 3, 4, 5)),
    "broadcast scalar": np.broadcast_to(np.float32(5), (4, 3)),
    "broadcast to nothing": np.broadcast_to(np.float32(5), (4, 0)),
    "column": BASE[0, 0, :, 1],
    "diagonal": np.diagonal(BASE[0, 0]),
    "a window": np.lib.stride_tricks.sliding_window_view(np.arange(50, dtype=np.uint16), 7),
    "unaligned": np.frombuffer(b"x" + BASE.tobytes(), np.uint8)[1:].view(np.int32),
    "big-endian": BASE.astype(">i4"),
    "big-endian transposed": BASE.astype(">i4").T,
    "big-endian reversed floats": np.linspace(0, 1, 30, dtype=">f8")[::-1],
    "big-endian complex": (np.arange(6) * (1 + 2j)).astype(">c8").reshape(2, 3).T,
    "big-endian scalar": np.array(258, ">u2"),
    "bool": (BASE % 2 == 0)[:, ::-1],
    "bf16 transposed": BASE.astype(ml_dtypes.bfloat16).T,
    "f8 reversed": BASE.astype(ml_dtypes.float8_e4m3fn)[::-1],
    "scalar": np.array(7, np.int64),
    "numpy scalar": np.float64(2.5),
    "empty Fortran": np.empty((0, 3, 2), order="F"),
    "read-only": np.frombuffer(bytes(range(16)), np.uint16),
    "matrix": np.arange(6).reshape(2, 3).view(type("Sub", (np.ndarray,), {}))[:, ::-1],
}


@pytest.mark.parametrize("array", LAYOUTS.values(), ids=LAYOUTS)
def test_any_layout_is_saved_as_its_values_issue_825(array, tmp_path, durable):
    expected = np.array(array, dtype=array.dtype.newbyteorder("<"), order="C", subok=False)
    content = save({"before": np.zeros(3, np.int8), "x": array, "z": np.ones(2)})
    assert content == upstream.save({"before": np.zeros(3, np.int8), "x": expected, "z": np.ones(2)})
    save_file({"before": np.zeros(3, np.int8), "x": array, "z": np.ones(2)}, tmp_path / "x", durable=durable)
    assert (tmp_path / "x").read_bytes() == content
    loaded = load(content)["x"]
    assert (loaded.shape, loaded.dtype) == (array.shape, expected.dtype)
    assert loaded.tobytes() == expected.tobytes()


def test_large_arrays_in_any_layout_are_saved_through_the_buffer(tmp_path):
    base = np.arange(5_000_000, dtype=np.int32).reshape(1000, 5000)
    tensors = {
        "transposed": base.T,
        "reversed": base[::-1, ::-1],
        "swapped": base.astype(">i4"),
        "broadcast": np.broadcast_to(base[:1], (1000, 5000)),
        "plain": base[:10],
    }
    save_file(tensors, tmp_path / "x", durable=False)
    loaded = load_file(tmp_path / "x")
    for name, array in tensors.items():
        assert np.array_equal(loaded[name], array), name


def test_arrays_that_share_memory_are_saved_each(tmp_path):
    base = np.arange(10)
    save_file({"a": base, "b": base, "c": base[2:5]}, tmp_path / "x", durable=False)
    assert {name: array.tolist() for name, array in load_file(tmp_path / "x").items()} == {
        "a": list(range(10)),
        "b": list(range(10)),
        "c": [2, 3, 4],
    }


def test_saving_changes_no_argument(tmp_path):
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    before, tensors, metadata = array.copy(), {"b": array, "a": np.zeros(1)}, {"z": "1", "a": "2"}
    save(tensors, metadata)
    save_file(tensors, tmp_path / "x", metadata, durable=False)
    assert (array == before).all()
    assert array.dtype == before.dtype
    assert list(tensors) == ["b", "a"]
    assert list(metadata) == ["z", "a"]


# ---- metadata ----


def test_metadata_is_written_in_sorted_order():
    metadata = {"b": "1", "a": "2", "B": "3", "\u00e9": "4", "": "5", "aa": "6", "\U0001f40d": "7", "\uffff": "8"}
    content = save(SMALL, metadata)
    header = content[8 : 8 + struct.unpack("<Q", content[:8])[0]].decode()
    positions = [header.index(f'"{key}":"{metadata[key]}"') for key in sorted(metadata)]
    assert positions == sorted(positions)
    assert save(SMALL, dict(reversed(metadata.items()))) == content


# ---- refusals ----


class TorchLike:
    shape, dtype = (3,), "torch.float32"

    def __str__(self):
        return "like torch"

    def numpy(self):
        return np.zeros(3, np.float32)

    def __array__(self, dtype=None, copy=None):
        return np.zeros(3, np.float32)


def refusing(tensors, metadata, error, match, folder):
    with pytest.raises(error, match=match):
        save(tensors, metadata)
    with pytest.raises(error, match=match):
        save_file(tensors, folder / "never", metadata)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("name", [1, None, b"x", ("a",), 1.5])
def test_a_name_that_is_no_str_is_a_type_error(name, tmp_path):
    refusing({name: np.zeros(1)}, None, TypeError, "name", tmp_path)


@pytest.mark.parametrize("value", [[1, 2], (1,), 3, 1.5, "text", None, b"bytes", {"a": 1}, TorchLike()], ids=str)
def test_a_value_that_is_no_array_is_a_type_error_that_names_the_tensor(value, tmp_path):
    refusing({"layer": value}, None, TypeError, "layer", tmp_path)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(1, np.complex128),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array([None]),
        np.zeros(1, "M8[s]"),
        np.zeros(1, "m8[s]"),
        np.zeros(1, [("a", np.int8)]),
        np.zeros(1, "V3"),
        np.zeros(1, ml_dtypes.int4),
        np.zeros(1, ml_dtypes.uint4),
        np.zeros(1, ml_dtypes.float4_e2m1fn),
        np.zeros(1, ml_dtypes.float6_e2m3fn),
        np.zeros(1, ml_dtypes.float8_e4m3b11fnuz),
        pytest.param(
            np.zeros(1, np.longdouble),
            marks=pytest.mark.skipif(np.longdouble(0).nbytes == 8, reason="longdouble is float64 here"),
        ),
    ],
    ids=lambda array: array.dtype.name,
)
def test_an_unsupported_dtype_is_named_with_its_tensor(array, tmp_path):
    shown = array.dtype.str if array.dtype.kind in "SU" else array.dtype.name
    refusing({"layer": array}, None, SafetensorError, f"layer.*{re.escape(shown)}", tmp_path)


def test_a_tensor_named_metadata_is_refused(tmp_path):
    refusing({"__metadata__": np.zeros(1)}, None, SafetensorError, "__metadata__", tmp_path)
    refusing({"__metadata__": np.zeros(1)}, {"a": "b"}, SafetensorError, "__metadata__", tmp_path)


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": None}, {"a": b"b"}, {b"a": "b"}, {"a": {"b": "c"}}])
def test_metadata_that_is_no_text_is_a_type_error(metadata, tmp_path):
    refusing(SMALL, metadata, TypeError, "metadata", tmp_path)


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({"\ud800": np.zeros(1)}, None),
        ({"ok\udfff": np.zeros(1)}, {}),
        (SMALL, {"\ud800": ""}),
        (SMALL, {"a": "\udc80"}),
    ],
)
def test_a_lone_surrogate_is_refused(tensors, metadata, tmp_path):
    refusing(tensors, metadata, SafetensorError, "surrogate", tmp_path)


@pytest.mark.parametrize("tensors", [None, 3, [("a", np.zeros(1))], np.zeros(3), "text"])
def test_what_is_no_dict_is_refused(tensors, tmp_path):
    with pytest.raises((TypeError, AttributeError)):
        save(tensors)
    with pytest.raises((TypeError, AttributeError)):
        save_file(tensors, tmp_path / "x")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("metadata", [3, "text", [("a", "b")]])
def test_metadata_that_is_no_dict_is_refused(metadata, tmp_path):
    with pytest.raises((TypeError, AttributeError)):
        save_file(SMALL, tmp_path / "x", metadata)
    assert os.listdir(tmp_path) == []


def test_a_header_above_its_limit_is_refused(tmp_path):
    huge = "x" * 50_000_000
    tensors = {huge + str(i): np.zeros(1, np.uint8) for i in range(2)}
    with pytest.raises(SafetensorError, match=r"100[,_]?000[,_]?000"):
        save(tensors)
    with pytest.raises(SafetensorError, match=r"100[,_]?000[,_]?000"):
        save_file(SMALL, tmp_path / "x", {"key": "\0" * 17_000_000})
    assert os.listdir(tmp_path) == []


# ---- modes, links, places ----


@posix
@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600), (0, 0o666)])
def test_a_new_file_gets_the_umasks_mode_issue_782(umask, expected, tmp_path, durable):
    os.umask(umask)
    save_file(SMALL, tmp_path / "x", durable=durable)
    assert mode(tmp_path / "x") == expected
    with (tmp_path / "plain").open("wb"):
        pass
    assert mode(tmp_path / "plain") == expected


@posix
@pytest.mark.parametrize("kept", [0o640, 0o664, 0o600, 0o400, 0o777])
def test_an_existing_file_keeps_its_mode_issue_782(kept, tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    os.chmod(tmp_path / "x", kept)
    save_file(SMALL, tmp_path / "x")
    assert mode(tmp_path / "x") == kept
    assert load_file(tmp_path / "x")["x"].tolist() == SMALL["x"].tolist()


@pytest.mark.skipif(os.name == "nt" or os.getuid() != 0, reason="only root gives files away")
def test_an_existing_file_keeps_its_owner(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    os.chown(tmp_path / "x", 65534, 65534)
    os.chmod(tmp_path / "x", 0o640)
    save_file(SMALL, tmp_path / "x")
    status = os.stat(tmp_path / "x")
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (65534, 65534, 0o640)


@posix
def test_on_windows_a_mode_is_not_kept(tmp_path, monkeypatch):
    """There it is the read-only attribute, with which the temporary file could be neither renamed nor deleted."""
    target = str(tmp_path / "x")
    save_file(OLD, target)
    os.chmod(target, 0o444)
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        save_file(SMALL, target)
    assert mode(target) == 0o644


@posix
@pytest.mark.parametrize(("number", "winerror"), [(errno.EACCES, 5), (errno.EINVAL, 1224)])
def test_on_windows_a_mapped_target_is_a_permission_error_that_says_so(number, winerror, tmp_path, monkeypatch):
    pauses = []

    def refuse(source, target):
        error = OSError(number, "as Windows says it", source)
        error.winerror = winerror
        raise error

    target = str(tmp_path / "x")
    save_file(OLD, target)
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        windows.setattr(os, "replace", refuse)
        windows.setattr(time, "sleep", pauses.append)
        with pytest.raises(
            PermissionError, match="does not replace a file that is mapped or open: delete the arrays"
        ) as caught:
            save_file(SMALL, target)
    assert caught.value.filename == target
    assert 0.1 < sum(pauses) < 1
    assert os.listdir(tmp_path) == ["x"]
    assert load_file(target)["x"].tolist() == OLD["x"].tolist()


@posix
def test_a_symlink_is_followed_issue_782(tmp_path):
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "target"
    target.write_bytes(b"old")
    (tmp_path / "link").symlink_to("real/target")
    (tmp_path / "link of link").symlink_to(tmp_path / "link")
    save_file(SMALL, tmp_path / "link of link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "link of link").is_symlink()
    assert target.read_bytes() == save(SMALL)
    assert os.listdir(tmp_path / "real") == ["target"]
    assert sorted(os.listdir(tmp_path)) == ["link", "link of link", "real"]


@posix
def test_a_dangling_symlink_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real/target")
    save_file(SMALL, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "target").read_bytes() == save(SMALL)
    assert mode(tmp_path / "real" / "target") == 0o644


@posix
def test_a_loop_of_symlinks_is_an_os_error(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links") as caught:
        save_file(SMALL, tmp_path / "a")
    assert caught.value.errno == errno.ELOOP
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert (tmp_path / "a").is_symlink()


def test_a_folder_as_target_is_is_a_directory(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        save_file(SMALL, tmp_path / "x")
    assert caught.value.filename == str(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]
    assert os.listdir(tmp_path / "x") == []


@posix
@pytest.mark.parametrize("ending", ["new/", "new//", "new/.", "missing/../new", "missing/new/", "old/."])
def test_a_path_that_open_refuses_is_refused_alike(ending, tmp_path, monkeypatch):
    """os.path.realpath makes other names of these: a file "new" would be written."""
    monkeypatch.chdir(tmp_path)
    save_file(OLD, "old")
    with pytest.raises(OSError, match="Errno") as wanted:
        os.open(ending, os.O_CREAT | os.O_WRONLY)
    writers = (
        lambda path: save_file(SMALL, path),
        lambda path: safeload.serialize_file({}, path),
        lambda path: safeload.gguf.save_file(SMALL, path),
        lambda path: safeload.moon.save_file({}, path),
        lambda path: npy.write_archive(SMALL, None, path),
        lambda path: npy.write(SMALL, None, path),
    )
    for write in writers:
        with pytest.raises(type(wanted.value)) as caught:
            write(ending)
        assert (caught.value.errno, caught.value.filename) == (wanted.value.errno, ending)
    with pytest.raises(NotADirectoryError, match="old/"):
        save_file(SMALL, "old/")
    assert os.listdir() == ["old"]
    np.testing.assert_array_equal(load_file("old")["x"], OLD["x"])


@posix
def test_a_folder_that_ends_in_a_slash_leads_to_its_files(tmp_path):
    save_file(SMALL, f"{tmp_path}//./../{tmp_path.name}//x")
    assert os.listdir(tmp_path) == ["x"]


def test_a_folder_that_is_missing_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        save_file(SMALL, tmp_path / "no" / "x")
    assert caught.value.filename == str(tmp_path / "no" / "x")
    assert caught.value.errno == errno.ENOENT


@posix
def test_a_file_as_folder_is_not_a_directory(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        save_file(SMALL, tmp_path / "file" / "x")


@posix
def test_an_unwritable_folder_is_a_permission_error_by_the_callers_name(shared_folder):
    os.chmod(shared_folder, 0o555)
    code = (
        NOBODY
        + """
try:
    save_file({"x": np.zeros(3)}, sys.argv[1])
except PermissionError as error:
    print(error.errno, error.filename)
"""
    )
    result = run_python(code, shared_folder / "x")
    os.chmod(shared_folder, 0o777)
    assert result.stdout.decode() == f"{errno.EACCES} {shared_folder / 'x'}\n", result.stderr.decode()
    assert not (shared_folder / "x").exists()


@posix
@pytest.mark.parametrize(
    "name", ["x" * 243 + ".safetensors", "\u00e9" * 127, "\u4e2d" * 85, "x" + "\U0001f40d" * 63, "." * 200, "x" * 233]
)
def test_the_longest_names_that_the_system_has_can_be_saved(name, tmp_path, durable):
    assert len(os.fsencode(name)) <= 255
    for _ in range(2):
        save_file(SMALL, tmp_path / name, durable=durable)
        assert os.listdir(tmp_path) == [name]
    assert load_file(tmp_path / name)["x"].tolist() == SMALL["x"].tolist()


@linux
def test_a_name_that_is_too_long_is_refused_by_the_callers_name(tmp_path):
    name = str(tmp_path / ("x" * 256))
    with pytest.raises(OSError, match="too long") as caught:
        save_file(SMALL, name)
    assert (caught.value.errno, caught.value.filename) == (errno.ENAMETOOLONG, name)
    assert os.listdir(tmp_path) == []


@linux
def test_a_name_that_is_no_utf8_can_be_saved(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff" + b"\xfe" * 254)
    save_file(SMALL, name)
    assert load_file(name)["x"].tolist() == SMALL["x"].tolist()
    assert os.listdir(os.fsencode(tmp_path)) == [b"\xff" + b"\xfe" * 254]


def test_a_relative_path_is_one_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file(SMALL, "x")
    save_file(SMALL, Path("y"))
    assert sorted(os.listdir(tmp_path)) == ["x", "y"]


def test_a_nul_in_the_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match="null byte"):
        save_file(SMALL, str(tmp_path / "x") + "\0y")
    assert os.listdir(tmp_path) == []


# ---- pipes and devices ----


@posix
def test_a_fifo_is_written_through(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    tensors = {"big": np.arange(300_000), "t": np.arange(200_000, dtype=np.int16).reshape(2, -1).T, "s": np.array(1)}
    received = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    save_file(tensors, tmp_path / "pipe")
    reader.join(60)
    assert received == [save(tensors)]
    assert stat.S_ISFIFO(os.lstat(tmp_path / "pipe").st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


@posix
def test_a_fifo_is_not_opened_where_overwriting_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError):
        save_file(SMALL, tmp_path / "pipe", overwrite=False)


@posix
@pytest.mark.parametrize("via_link", [False, True])
def test_a_device_is_written_through_and_not_replaced(via_link, shared_folder):
    target = shared_folder / "link" if via_link else "/dev/null"
    if via_link:
        target.symlink_to("/dev/null")
    code = NOBODY + "save_file({'x': np.zeros(300_000), 't': np.zeros((500, 600)).T}, sys.argv[1])"
    result = run_python(code, target)
    assert result.returncode == 0, result.stderr.decode()
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert os.listdir(shared_folder) == (["link"] if via_link else [])


@linux
@pytest.mark.parametrize("array", ["np.zeros(300_000)", "np.zeros((500, 600)).T", "np.zeros(0)"])
def test_a_full_device_is_no_space_left(array):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    code = NOBODY + (
        f"try:\n    save_file({{'x': {array}}}, '/dev/full')\n"
        "except OSError as error:\n    print(error.errno, error.filename)"
    )
    result = run_python(code)
    assert result.stdout.decode() == f"{errno.ENOSPC} /dev/full\n", result.stderr.decode()
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@linux
def test_a_pipe_by_its_number_is_written_through():
    code = (
        NOBODY
        + """
reading, writing = os.pipe()
tensors = {"x": np.arange(300_000), "t": np.zeros((500, 600)).T}
received = []
def read():
    with os.fdopen(reading, "rb") as file:
        received.append(file.read())
reader = threading.Thread(target=read)
reader.start()
try:
    save_file(tensors, f"/dev/fd/{writing}")
finally:
    os.close(writing)
    reader.join()
assert received == [save(tensors)]
"""
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr.decode()


@posix
def test_a_reader_that_goes_away_is_a_broken_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    def read_a_little():
        with (tmp_path / "pipe").open("rb", buffering=0) as file:
            file.read(100)

    reader = threading.Thread(target=read_a_little, daemon=True)
    reader.start()
    with pytest.raises(BrokenPipeError) as caught:
        save_file({"x": np.zeros(3_000_000)}, tmp_path / "pipe")
    reader.join(60)
    assert caught.value.filename == str(tmp_path / "pipe")
    assert stat.S_ISFIFO(os.lstat(tmp_path / "pipe").st_mode)


# ---- overwrite ----


def test_overwrite_false_refuses_what_exists_before_it_writes(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(FileExistsError) as caught:
        save_file(SMALL, tmp_path / "x", overwrite=False)
    assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(tmp_path / "x"))
    assert (tmp_path / "x").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_overwrite_false_writes_what_is_new(tmp_path, durable):
    save_file(SMALL, tmp_path / "x", overwrite=False, durable=durable)
    assert (tmp_path / "x").read_bytes() == save(SMALL)
    assert os.listdir(tmp_path) == ["x"]


def test_overwrite_false_refuses_what_appears_meanwhile(tmp_path, monkeypatch):
    real = os.fsync

    def appear(descriptor):
        (tmp_path / "x").write_bytes(b"other")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", appear)
    with pytest.raises(FileExistsError) as caught:
        save_file(SMALL, tmp_path / "x", overwrite=False)
    assert (tmp_path / "x").read_bytes() == b"other"
    assert os.listdir(tmp_path) == ["x"]
    assert caught.value.filename == str(tmp_path / "x")


@posix
def test_overwrite_false_works_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def refuse(*arguments, **keywords):
        raise OSError(errno.EOPNOTSUPP, "no links")

    monkeypatch.setattr(os, "link", refuse)
    save_file(SMALL, tmp_path / "x", overwrite=False)
    assert (tmp_path / "x").read_bytes() == save(SMALL)
    assert os.listdir(tmp_path) == ["x"]


# ---- durability ----


@pytest.fixture
def calls(monkeypatch):
    """What a save asks of the system, in order."""
    calls = []

    def spy(name):
        real = getattr(os, name)

        def call(*arguments, **keywords):
            what = name
            if name == "fsync":
                what = "fsync folder" if stat.S_ISDIR(os.fstat(arguments[0]).st_mode) else "fsync file"
            calls.append(what)
            return real(*arguments, **keywords)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "fdatasync", "sync", "replace", "rename"):
        if hasattr(os, name):
            spy(name)
    return calls


@posix
def test_a_durable_save_syncs_the_file_renames_it_and_syncs_the_folder(calls, tmp_path):
    save_file(SMALL, tmp_path / "x")
    assert calls == ["fsync file", "replace", "fsync folder"]


def test_a_save_that_is_not_durable_syncs_nothing(calls, tmp_path):
    save_file(SMALL, tmp_path / "x", durable=False)
    assert calls == ["replace"]


@posix
def test_the_file_is_complete_before_it_is_synced(tmp_path, monkeypatch):
    sizes = []
    real = os.fsync

    def look(descriptor):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            sizes.append(os.fstat(descriptor).st_size)
            (temporary,) = os.listdir(tmp_path)
            assert (tmp_path / temporary).read_bytes() == save(SMALL)
            assert not (tmp_path / "x").exists()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    save_file(SMALL, tmp_path / "x")
    assert sizes == [len(save(SMALL))]


# ---- atomicity ----


@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_what_fails_at_the_end_leaves_the_old_file_and_nothing_else(name, number, tmp_path, monkeypatch):
    path = tmp_path / "x"
    save_file(OLD, path)
    descriptors = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    def fail(*arguments, **keywords):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, name, fail)
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            save_file(SMALL, path)
    assert caught.value.errno == number
    assert path.read_bytes() == save(OLD)
    assert os.listdir(tmp_path) == ["x"]
    assert not descriptors or len(os.listdir("/proc/self/fd")) == descriptors


@linux
@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("array", ["np.zeros(1 << 20)", "np.zeros((1024, 1024)).T"])
def test_a_file_that_may_not_grow_leaves_the_old_one_and_nothing_else(array, existing, tmp_path):
    path = tmp_path / "x"
    if existing:
        save_file(OLD, path)
    code = f"""
import resource, signal, sys
import numpy as np
from safeload.numpy import save_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    save_file({{"x": {array}}}, sys.argv[1])
except OSError as error:
    print(error.errno, error.filename)
"""
    result = run_python(code, path)
    assert result.stdout.decode() == f"{errno.EFBIG} {path}\n", result.stderr.decode()
    assert os.listdir(tmp_path) == (["x"] if existing else [])
    if existing:
        assert path.read_bytes() == save(OLD)


@linux
def test_a_file_larger_than_the_disk_is_refused_before_it_is_written(tmp_path, monkeypatch):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    save_file(OLD, tmp_path / "x")
    array = np.broadcast_to(np.uint8(0), (max(4 * free, 1 << 46) >> 10, 1 << 10))

    def write(*arguments, **keywords):
        raise AssertionError("written before space was reserved")

    monkeypatch.setattr(atomic_file.AtomicFile, "write", write)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - which of the two depends on the filesystem
        save_file({"x": array}, tmp_path / "x")
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert caught.value.filename == str(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == save(OLD)
    assert os.listdir(tmp_path) == ["x"]


@posix
@pytest.mark.parametrize("existing", [True, False])
def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(existing, tmp_path):
    path = tmp_path / "x"

    def work(report):
        for i in itertools.count(1):
            report(i)
            tensors = {"plain": np.full(1 << 20, i), "turned": np.full((1 << 10, 1 << 9), i).T}
            save_file(tensors, path, durable=False)

    chance = random.Random(5 if existing else 6)
    seen = set()
    for turn in range(6):
        if existing:
            save_file(
                {"plain": np.zeros(1 << 20, int), "turned": np.zeros((1 << 9, 1 << 10), int)}, path, durable=False
            )
        else:
            path.unlink(missing_ok=True)
        with killed_at_the_end(work) as reports:
            for save_number in range(1, 2 + turn % 2):
                assert int(reports.readline()) == save_number
            time.sleep(chance.random() * 0.05)
        if not existing and not path.exists():
            continue
        loaded = load_file(path, backend="pread")
        values = np.unique(np.concatenate([array.ravel() for array in loaded.values()]))
        assert len(values) == 1
        assert loaded["plain"].size == 1 << 20
        assert loaded["turned"].shape == (1 << 9, 1 << 10)
        seen.add(int(values[0]))
        for left in tmp_path.iterdir():
            if left != path:
                left.unlink()
    assert seen - {0}


def test_a_reader_beside_a_writer_always_finds_a_whole_file(tmp_path):
    path = tmp_path / "x"
    save_file({"x": np.zeros(100_000, int)}, path, durable=False)
    stop = threading.Event()

    def write():
        i = 0
        while not stop.is_set():
            i += 1
            with contextlib.suppress(PermissionError):  # Windows, while it is mapped
                save_file({"x": np.full(100_000, i)}, path, durable=False)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            array = load_file(path, backend="pread")["x"]
            assert array.shape == (100_000,)
            assert (array == array[0]).all()
    finally:
        stop.set()
        writer.join()
    assert os.listdir(tmp_path) == ["x"]


def test_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "x"

    def write(i):
        # Windows refuses one of two that replace the file at the same moment.
        with contextlib.suppress(PermissionError) if os.name == "nt" else contextlib.nullcontext():
            save_file({"x": np.full(100_000, i)}, path, durable=False)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    array = load_file(path)["x"]
    assert (array == array[0]).all()
    assert os.listdir(tmp_path) == ["x"]


@posix
def test_saving_over_a_mapped_file_leaves_its_arrays_alone(tmp_path, durable):
    path = tmp_path / "x"
    tensors = {"a": np.arange(1 << 19), "b": np.arange(10)}
    save_file(tensors, path, durable=durable)
    with safeload.open(path) as checkpoint:
        loaded, view = load_file(path), checkpoint["a"]
        save_file({"other": np.zeros(3)}, path, durable=durable)
        assert (loaded["a"] == tensors["a"]).all()
        assert (view == tensors["a"]).all()
        assert (checkpoint["b"] == tensors["b"]).all()
    assert list(load_file(path)) == ["other"]


@posix
def test_a_loaded_dict_can_be_saved_over_its_own_file(tmp_path):
    path = tmp_path / "x"
    save_file({"a": np.arange(1 << 19), "b": np.arange(10)}, path, durable=False)
    for _ in range(3):
        loaded = load_file(path)
        loaded["b"] += 1
        save_file(loaded, path, durable=False)
    assert load_file(path)["b"].tolist() == list(range(3, 13))
    assert (load_file(path)["a"] == np.arange(1 << 19)).all()


# ---- memory ----


@linux
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="ASan keeps freed memory")
@pytest.mark.parametrize(
    "array",
    part_of(["base", "base.T", "np.broadcast_to(base[:1], base.shape)", "base[::-1]", "base.view('>f4')"], 0, 2),
)
def test_no_second_copy_of_the_data_is_made(array, tmp_path):
    code = f"""
import sys
import numpy as np
from safeload.numpy import save_file
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
save_file({{"warm": np.zeros((3, 2)).T}}, sys.argv[1], durable=False)
base = np.zeros((4600, 4600), np.float32)  # 84 MB that are resident only once they are touched
base.fill(1)
array = {array}
before = peak()
save_file({{"x": array}}, sys.argv[1], durable=False)
print(before, peak() - before)
"""
    result = run_python(code, tmp_path / "x")
    before, growth = map(int, result.stdout.split())
    size = (tmp_path / "x").stat().st_size
    (tmp_path / "x").unlink()
    assert size > 84_000_000
    assert before > 84_000_000
    assert growth < 64 << 20, growth  # less than a copy


def test_upstream_reads_what_a_streamed_save_wrote(tmp_path):
    array = np.arange(3_000_000, dtype=np.float32).reshape(1000, 3000)
    save_file({"t": array.T, "p": array}, tmp_path / "x", {"a": "b"}, durable=False)
    with safetensors.safe_open(tmp_path / "x", "np") as file:
        assert np.array_equal(file.get_tensor("t"), array.T)
        assert np.array_equal(file.get_tensor("p"), array)


@pytest.mark.skipif(os.name == "nt", reason="Windows removes no file that is open")
def test_the_exception_of_a_signal_right_after_the_file_was_created_removes_it(tmp_path, monkeypatch):
    create = os.open

    def interrupted(path, flags, *mode):
        create(path, flags, *mode)
        raise KeyboardInterrupt

    monkeypatch.setattr(inside.atomic_file.os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic_file.AtomicFile(tmp_path / "x", 5)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_a_file_whose_block_never_began_is_removed(tmp_path):
    file = atomic_file.AtomicFile(tmp_path / "x", 5)
    assert len(os.listdir(tmp_path)) == 1
    del file
    gc.collect()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_exception_in_a_forked_child_leaves_the_file_to_its_parent(tmp_path):
    data = np.arange(5, dtype=np.uint8)
    with atomic_file.AtomicFile(tmp_path / "x", 5) as file:
        child = os.fork()
        if child == 0:
            try:
                file.__exit__(SystemExit, SystemExit(), None)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        (temporary,) = os.listdir(tmp_path)
        assert main(["edit", "--recover", str(tmp_path)]) == 0
        assert os.listdir(tmp_path) == [temporary]
        file.write([(data.ctypes.data, 5)])
    assert (tmp_path / "x").read_bytes() == data.tobytes()
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_sealed_file_needs_no_descriptor_and_appears_at_the_end(durable, tmp_path):
    data = np.arange(5, dtype=np.uint8)
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else None
    with atomic_file.AtomicFile(tmp_path / "x", 5, durable=durable) as file:
        file.write([(data.ctypes.data, 5)])
        file.seal()
        file.seal()  # twice is once
        if before is not None:
            assert len(os.listdir("/proc/self/fd")) == before
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "x").read_bytes() == data.tobytes()
    assert os.listdir(tmp_path) == ["x"]

    def fail():
        with atomic_file.AtomicFile(tmp_path / "y", 5, durable=durable) as file:
            file.seal()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.listdir(tmp_path) == ["x"]
