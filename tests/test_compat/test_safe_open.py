"""safe_open, serialize and deserialize beside upstream's: methods, results, messages, refusals in the same order."""

import errno
import gc
import inspect
import json
import os
import pickle
import stat
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy as upstream

import safeload
from safeload import (
    FormatError,
    SafetensorError,
    TensorMeta,
    TensorNotFoundError,
    TensorSpec,
    _safe_open_handle,
    deserialize,
    safe_open,
    serialize,
    serialize_file,
)
from safeload.numpy import save_file

BACKENDS = ("mmap", "pread", "direct")
TENSORS = {
    "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "bias": np.arange(4, dtype=np.float64),
    "Zero": np.zeros((0, 3), np.int16),
    "scalar": np.array(3, np.int8),
    "large": np.arange(50_000, dtype=np.int64),
    "bf16": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "\u00e9": np.array([True, False]),
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, {"format": "np"}, durable=False)
    return path


def raw_file(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def run_python(code, *arguments, timeout=120):
    return subprocess.run(
        [sys.executable, "-I", "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=timeout
    )


def outcome(call):
    """What a call gives, or the class and text of what it raises."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


# ---- safe_open ----


def test_signatures_take_what_upstreams_take():
    names = list(inspect.signature(safe_open).parameters.values())
    theirs = list(inspect.signature(safetensors.safe_open).parameters.values())
    assert [(p.name, p.kind) for p in names] == [(p.name, p.kind) for p in theirs]
    assert [p.default for p in names[1:]] == ["numpy", "cpu", "mmap"]


@pytest.mark.parametrize("name", ["serialize", "serialize_file", "deserialize", "TensorSpec"])
def test_function_signatures_are_upstreams(name):
    ours = inspect.signature(getattr(safeload, name)).parameters.values()
    theirs = inspect.signature(getattr(safetensors, name)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


def test_every_public_method_of_upstream_is_there():
    ours, theirs = dir(safe_open), dir(safetensors.safe_open)
    assert {name for name in theirs if not name.startswith("__")} <= set(ours)
    assert {"__enter__", "__exit__"} <= set(ours)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("framework", ["np", "numpy"])
def test_everything_that_it_says_is_what_upstream_says(framework, backend, path):
    with safe_open(path, framework, "cpu", backend=backend) as ours, safetensors.safe_open(path, framework) as theirs:
        assert ours.keys() == theirs.keys() == sorted(TENSORS)
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata() == {"format": "np"}
        for name in ours.keys():  # noqa: SIM118 - no mapping: this is the method under test
            a, b = ours.get_tensor(name), theirs.get_tensor(name)
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
            assert ours.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()


def test_keys_are_sorted_by_code_point_and_offset_keys_by_bytes(tmp_path):
    names = ["b", "B", "a", "\U0001f40d", "\uffff", "\u00e9", "aa", ""]
    tensors = {name: np.full(1, i, np.uint8 if i % 2 else np.uint32) for i, name in enumerate(names)}
    upstream.save_file(tensors, tmp_path / "x")
    with safe_open(tmp_path / "x") as file, safetensors.safe_open(tmp_path / "x", "np") as theirs:
        assert file.keys() == sorted(names) == theirs.keys()
        assert file.offset_keys() == theirs.offset_keys()
        assert sorted(file.offset_keys()) == sorted(names)


def test_keys_of_one_call_may_be_changed_without_harm(path):
    with safe_open(path) as file:
        file.keys().clear()
        file.offset_keys().clear()
        file.metadata().clear()
        assert len(file.keys()) == len(file.offset_keys()) == len(TENSORS)
        assert file.metadata() == {"format": "np"}


@pytest.mark.parametrize(
    ("header", "metadata"),
    [
        ({}, None),
        ({"__metadata__": None}, None),
        ({"__metadata__": {}}, {}),
        ({"__metadata__": {"a": "", "": "b", "\u4e2d\n": "\0\u2028"}}, {"a": "", "": "b", "\u4e2d\n": "\0\u2028"}),
    ],
)
def test_metadata_none_empty_and_text(header, metadata, tmp_path):
    (tmp_path / "x").write_bytes(raw_file(header))
    with safe_open(tmp_path / "x") as file:
        assert file.metadata() == metadata
        assert file.keys() == file.offset_keys() == []
        assert file.get_tensors() == {}
        assert len(file) == 0
    with safetensors.safe_open(tmp_path / "x", "np") as theirs:
        assert theirs.metadata() == metadata


@pytest.mark.parametrize("backend", BACKENDS)
def test_get_tensors_gives_all_in_the_order_of_their_bytes(backend, path):
    with safe_open(path, backend=backend) as file:
        loaded = file.get_tensors()
        assert list(loaded) == file.offset_keys()
    for name, array in TENSORS.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].tobytes() == array.tobytes()
        assert loaded[name].flags.writeable
        assert loaded[name].flags.c_contiguous


def test_get_tensor_meta_is_the_headers_entry(tmp_path):
    header = {
        "a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [3, 7]},
        "c": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [7, 10]},
        "d": {"dtype": "I64", "shape": [], "data_offsets": [10, 18]},
        "e": {"dtype": "U8", "shape": [0, 5], "data_offsets": [18, 18]},
    }
    (tmp_path / "x").write_bytes(raw_file(header, bytes(18)))
    with safe_open(tmp_path / "x") as file:
        for name, entry in header.items():
            meta = file.get_tensor_meta(name)
            assert meta == TensorMeta(entry["dtype"], entry["shape"], tuple(entry["data_offsets"]))
            assert meta.dtype == entry["dtype"]
            assert meta.shape == entry["shape"]
            assert meta.data_offsets == tuple(entry["data_offsets"])
            assert file.get_slice(name).get_shape() == entry["shape"]
            assert file.get_slice(name).get_dtype() == entry["dtype"]
        assert file.get_tensor("a").shape == (3,)
        assert file.get_tensor("c").shape == (3,)


def test_len_iteration_and_in(path):
    with safe_open(path) as file:
        assert len(file) == len(TENSORS)
        assert list(file) == sorted(TENSORS)
        assert "weight" in file
        assert "weigh" not in file
        assert 3 not in file
        assert "\ud800" not in file
        assert {name: file.get_tensor(name).shape for name in file} == {n: a.shape for n, a in TENSORS.items()}


@pytest.mark.parametrize("method", ["get_tensor", "get_slice", "get_tensor_meta"])
def test_a_missing_name_is_named(method, path):
    with safe_open(path) as file:
        for expected in (TensorNotFoundError, SafetensorError, KeyError):
            with pytest.raises(expected) as caught:
                getattr(file, method)("wait")
            assert str(caught.value).startswith("File does not contain tensor wait")
        with pytest.raises(TensorNotFoundError, match="weight"):
            getattr(file, method)("weigth")
        with pytest.raises(TypeError):
            getattr(file, method)(3)


def test_a_tensor_not_found_error_survives_pickling(path):
    with safe_open(path) as file, pytest.raises(TensorNotFoundError) as caught:
        file.get_tensor("nope")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (TensorNotFoundError, str(caught.value))


# ---- closing ----

CALLS = {
    "keys": lambda file: file.keys(),
    "offset_keys": lambda file: file.offset_keys(),
    "metadata": lambda file: file.metadata(),
    "get_tensor": lambda file: file.get_tensor("weight"),
    "get_tensors": lambda file: file.get_tensors(),
    "get_slice": lambda file: file.get_slice("weight"),
    "get_tensor_meta": lambda file: file.get_tensor_meta("weight"),
    "len": len,
    "iteration": list,
    "in": lambda file: "weight" in file,
    "pickling": pickle.dumps,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_closed_file_says_so(call, path):
    with safe_open(path) as left:
        pass
    closed = safe_open(path)
    closed.close()
    for file in (left, closed):
        with pytest.raises(SafetensorError) as caught:
            call(file)
        assert str(caught.value) == "File is closed"
        file.close()
        assert "closed" in repr(file)


def test_with_gives_the_object_itself_and_lets_exceptions_through(path):
    file = safe_open(path)
    with file as inner:
        assert inner is file
    with pytest.raises(ZeroDivisionError), safe_open(path) as file:
        raise ZeroDivisionError
    with pytest.raises(SafetensorError, match="File is closed"):
        file.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_closed_handle_keeps_no_mapping(path):
    def mapped():
        return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")

    file = safe_open(path)
    array = file.get_tensor("large")
    assert mapped()
    file.close()
    assert mapped()
    assert (array == TENSORS["large"]).all()
    del array
    gc.collect()
    assert not mapped()


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_outlive_the_closed_file(backend, path):
    with safe_open(path, backend=backend) as file:
        arrays = [file.get_tensor("large"), file.get_tensor("large"), file.get_tensors()["large"]]
        arrays.append(file.get_slice("large")[:])
    if os.name != "nt":
        path.unlink()
    elif backend == "pread":  # Windows neither deletes nor writes to a mapped file
        path.write_bytes(b"")
    for array in arrays:
        assert (array == TENSORS["large"]).all()


def test_a_slice_outlives_the_with_block_as_upstreams_does(path):
    with safetensors.safe_open(path, "np") as theirs:
        slice_of_theirs = theirs.get_slice("weight")
    assert slice_of_theirs[1:2].tolist() == [[4, 5, 6, 7]]
    with safe_open(path) as ours:
        slice_of_ours = ours.get_slice("weight")
    assert slice_of_ours[1:2].tolist() == [[4, 5, 6, 7]]


def test_repr_names_the_file(path):
    with safe_open(path) as file:
        assert repr(str(path)) in repr(file)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_descriptor_is_left_open(path, tmp_path):
    (tmp_path / "bad").write_bytes(b"\xff" * 30)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with safe_open(path) as file:
            file.get_tensors()
        safe_open(path)
        for call in (
            lambda: safe_open(tmp_path / "bad"),
            lambda: safe_open(path, "tf"),
            lambda: safe_open(path, "np", "cuda"),
            lambda: safe_open(path, backend="x"),
        ):
            assert outcome(call)[0] in ("SafeloadError", "FormatError")
    assert len(os.listdir("/proc/self/fd")) == before


# ---- memory ----


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["large", "weight", "scalar", "bf16"])
def test_no_two_hand_outs_share_memory(name, backend, path):
    with safe_open(path, backend=backend) as file:
        arrays = [file.get_tensor(name) for _ in range(4)]
        arrays += [file.get_tensors()[name] for _ in range(2)]
        arrays += [file.get_slice(name)[...] for _ in range(2)]
        arrays.append(file.get_tensor(name))
    for i, array in enumerate(arrays):
        assert not any(np.shares_memory(array, other) for other in arrays[:i])
        array[...] = i
        assert array.flags.aligned
    content = path.read_bytes()
    assert all((array == i).all() for i, array in enumerate(arrays))
    assert content == path.read_bytes()


def test_threads_that_ask_for_one_tensor_at_once_share_no_memory(path):
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(40):
                barrier = threading.Barrier(8)
                with safe_open(path) as file:

                    def take(_, file=file, barrier=barrier):
                        barrier.wait(60)
                        return file.get_tensor("large")

                    arrays = list(pool.map(take, range(8)))
                addresses = {array.__array_interface__["data"][0] for array in arrays}
                assert len(addresses) == 8
                assert all((array == TENSORS["large"]).all() for array in arrays)
    finally:
        sys.setswitchinterval(old)


def test_writing_changes_no_file(path):
    content = path.read_bytes()
    with safe_open(path) as file:
        for name in file:
            file.get_tensor(name)[...] = 0
            file.get_tensor(name)[...] = 0
        file.get_slice("large")[5:9][...] = 0
        assert (file.get_tensor("large") == TENSORS["large"]).all()
    assert path.read_bytes() == content


# ---- pickling ----


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pickled_handle_opens_the_same_file(backend, path):
    with safe_open(path, "np", backend=backend) as file:
        file.get_tensor("large")
        text = pickle.dumps(file)
        with pickle.loads(text) as again:
            assert type(again) is safe_open
            assert again.keys() == file.keys()
            mine = again.get_tensor("large")
            assert (mine == TENSORS["large"]).all()
            assert not np.shares_memory(mine, file.get_tensor("large"))
    assert len(text) < 1000
    with pickle.loads(text) as again:
        assert again.metadata() == {"format": "np"}


def test_a_handle_pickles_into_another_process(path):
    with safe_open(path) as file:
        text = pickle.dumps(file)
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).get_tensor('bias').tolist())"
    result = run_python(code, text.hex())
    assert result.stdout == "[0.0, 1.0, 2.0, 3.0]\n", result.stderr


def test_a_safe_open_handle_pickles_by_path(path):
    with path.open("rb") as f, _safe_open_handle(f) as file:
        again = pickle.loads(pickle.dumps(file))
    with again:
        assert again.keys() == sorted(TENSORS)


def test_unpickling_where_the_file_is_gone_is_file_not_found(path):
    with safe_open(path) as file:
        text = pickle.dumps(file)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        pickle.loads(text)


# ---- refusals ----


def test_a_missing_file_is_judged_before_everything_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: safe_open("notafile", framework="pt"),
        lambda: safe_open("notafile", "nonsense", "nonsense", backend="nonsense"),
        lambda: safe_open(Path("notafile")),
        lambda: safeload.open("notafile"),
        lambda: safeload.numpy.load_file("notafile"),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            call()
        assert str(caught.value) == "No such file or directory: notafile"
        assert caught.value.errno == errno.ENOENT
        assert caught.value.filename == "notafile"
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.errno, again.filename) == (str(caught.value), errno.ENOENT, "notafile")
        assert isinstance(again, FileNotFoundError)


def test_a_bad_file_is_judged_before_the_framework(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff" * 30)
    with pytest.raises(FormatError):
        safe_open(tmp_path / "x", "nonsense", "nonsense", backend="nonsense")


@pytest.mark.parametrize(
    ("framework", "instead"),
    [
        ("tf", "tensorflow"),
        ("tensorflow", "tensorflow"),
        ("mlx", "mlx"),
        ("paddle", "paddle"),
        ("nonsense", "numpy"),
        ("", "numpy"),
        ("NumPy", "numpy"),
        (None, "numpy"),
        (3, "numpy"),
    ],
)
def test_another_framework_is_refused_with_what_to_use_instead(framework, instead, path):
    with pytest.raises(SafetensorError, match=instead) as caught:
        safe_open(path, framework)
    assert f"framework {framework}" in str(caught.value)
    assert "numpy" in str(caught.value)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, 1, "mps", "nonsense", ""])
def test_another_device_is_refused(device, path):
    with pytest.raises(SafetensorError, match=f"Device {device} is not supported for framework numpy"):
        safe_open(path, "numpy", device)


def test_the_framework_is_judged_before_the_device_and_that_before_the_backend(path):
    with pytest.raises(SafetensorError, match="framework tf"):
        safe_open(path, "tf", "cuda", backend="x")
    with pytest.raises(SafetensorError, match="Device cuda"):
        safe_open(path, "np", "cuda", backend="x")
    with pytest.raises(SafetensorError) as caught:
        safe_open(path, "np", "cpu", backend="x")
    assert "is invalid (expected one of: " in str(caught.value)


def test_a_folder_is_is_a_directory_and_the_error_names_the_function_for_folders(tmp_path):
    for call, function in (
        (lambda: safe_open(tmp_path), "safeload.open"),
        (lambda: safe_open(tmp_path, "pt"), "safeload.torch.load_checkpoint"),
        (lambda: safe_open(tmp_path, "flax"), "safeload.jax.load_checkpoint"),
        (lambda: safe_open(tmp_path, "nonsense"), "safeload.open"),
        (lambda: safeload.numpy.load_file(tmp_path), "safeload.load"),
        (lambda: safeload.numpy.load_file(tmp_path, dtype="float32", backend="direct"), "safeload.load"),
    ):
        with pytest.raises(IsADirectoryError) as caught:
            call()
        for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
            assert str(error) == f"Is a directory: {tmp_path}; {function} loads folders"
            assert (error.errno, error.filename, type(error).__name__) == (
                errno.EISDIR,
                str(tmp_path),
                "IsADirectoryError",
            )


# Imports come first, also those of the first use of a name: nobody may not read a Python that is in root's home.
NOBODY = """
import os, sys
import numpy, ml_dtypes, safeload
from safeload import safe_open
from safeload.numpy import load_file
def become_nobody():
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_a_permission_error_keeps_its_class(path):
    code = (
        NOBODY
        + """
os.chdir(os.path.dirname(sys.argv[1]))
name = os.path.basename(sys.argv[1])
calls = safe_open, load_file, safeload.open
become_nobody()
for call in calls:
    for framework in ("numpy", "tf"):
        try:
            call(name, framework) if call is safe_open else call(name)
        except PermissionError as error:
            print(error.errno, error.filename)
"""
    )
    os.chmod(path, 0)
    try:
        # A folder that nobody may search would be an error of its own.
        os.chmod(path.parent, 0o755)
        result = run_python(code, path)
    finally:
        os.chmod(path, 0o600)
    assert result.stdout == f"{errno.EACCES} {path.name}\n" * 6, result.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    code = """
import sys, safeload
from safeload.numpy import load_file
for call in (safeload.safe_open, load_file, safeload.open):
    try:
        call(sys.argv[1])
    except (safeload.SafeloadError, OSError) as error:
        print("not a regular file" in str(error) and sys.argv[1] in str(error))
"""
    result = run_python(code, tmp_path / "pipe", timeout=30)
    assert result.stdout == "True\n" * 3, result.stderr
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


@pytest.mark.skipif(os.name == "nt", reason="needs /dev")
@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero", "/dev/tty"])
def test_a_device_is_refused(device):
    with pytest.raises((SafetensorError, OSError)):
        safe_open(device)


@pytest.mark.parametrize("filename", [None, 3, 1.5, ["x"], object()])
def test_what_is_no_path_is_a_type_error(filename):
    with pytest.raises(TypeError):
        safe_open(filename)


def test_str_and_path_are_taken(path):
    for filename in (path, str(path)):
        with safe_open(filename) as file:
            assert len(file) == len(TENSORS)
    with safe_open(filename=path, framework="np", device="cpu") as file:
        assert len(file) == len(TENSORS)


@pytest.mark.skipif(sys.platform != "linux", reason="names are arbitrary bytes only there")
def test_a_name_that_is_no_utf8_is_taken(path):
    other = os.fsdecode(os.fsencode(path.parent) + b"/\xff\xfe")
    os.rename(path, other)
    with safe_open(other) as file:
        assert len(file) == len(TENSORS)
        assert len(pickle.loads(pickle.dumps(file))) == len(TENSORS)


# ---- _safe_open_handle ----


@pytest.mark.parametrize("mode", ["r", "rb"])
def test_an_open_file_is_taken_by_its_name(mode, path):
    with path.open(mode) as f:
        with _safe_open_handle(f, framework="np", device="cpu") as file:
            assert file.keys() == sorted(TENSORS)
            assert (file.get_tensor("large") == TENSORS["large"]).all()
            assert file.get_slice("weight")[1, 1:3].tolist() == [5, 6]
        assert not f.closed


def test_an_fsspec_file_is_taken(path):
    fsspec = pytest.importorskip("fsspec")
    with fsspec.filesystem("file").open(str(path), "rb") as f, _safe_open_handle(f, "np", "cpu") as file:
        assert file.metadata() == {"format": "np"}
        assert (file.get_tensor("bias") == TENSORS["bias"]).all()


@pytest.mark.parametrize("thing", ["a path", 3, None, object()])
def test_what_is_no_open_file_is_refused(thing):
    with pytest.raises((AttributeError, TypeError)):
        _safe_open_handle(thing, framework="np", device="cpu")


# ---- TensorSpec ----

NAMES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex64": 8,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [[], [0], [3], (2, 3), [2, 0, 5], np.array([4, 1])])
def test_a_tensor_spec_is_upstreams(name, shape):
    ours = TensorSpec(dtype=name, shape=shape, data_ptr=4096, data_len=7)
    theirs = safetensors.TensorSpec(dtype=name, shape=shape, data_ptr=4096, data_len=7)
    assert repr(ours) == repr(theirs)
    for field in ("dtype", "shape", "data_ptr", "data_len"):
        assert getattr(ours, field) == getattr(theirs, field)
        assert type(getattr(ours, field)) is type(getattr(theirs, field))


def test_a_packed_spec_doubles_its_last_axis():
    def shape(given):
        return TensorSpec(dtype="float4_e2m1fn_x2", shape=given, data_ptr=1, data_len=1).shape

    assert shape([3]) == [6]
    assert shape([5, 2]) == [5, 4]
    assert shape([2, 0]) == [2, 0]
    assert shape([]) == []


GOOD = {"dtype": "float32", "shape": [1], "data_ptr": 4096, "data_len": 4}


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "nonsense"},
        {"dtype": "F32"},
        {"dtype": ""},
        {"dtype": "float4_e2m1fn"},
        {"dtype": "complex128"},
        {"dtype": None},
        {"dtype": 3},
        {"shape": [-1]},
        {"shape": [1 << 64]},
        {"shape": [1.5]},
        {"shape": ["1"]},
        {"shape": "12"},
        {"shape": None},
        {"shape": 3},
        {"data_ptr": -1},
        {"data_ptr": 1 << 64},
        {"data_ptr": 1.5},
        {"data_ptr": None},
        {"data_len": -1},
        {"data_len": 1 << 64},
        {"data_len": "4"},
        {"dtype": "float4_e2m1fn_x2", "shape": [1 << 63]},
        {"another": 1},
    ],
    ids=str,
)
def test_a_wrong_spec_is_refused_with_upstreams_class(wrong):
    theirs = outcome(lambda: safetensors.TensorSpec(**GOOD | wrong))
    assert isinstance(theirs, tuple)
    expected = {"SafetensorError": "SafeloadError"}.get(theirs[0], theirs[0])
    ours = outcome(lambda: TensorSpec(**GOOD | wrong))
    assert isinstance(ours, tuple), ours
    assert ours[0] == expected


def test_an_unknown_dtype_is_named_with_those_there_are():
    with pytest.raises(SafetensorError, match="nonsense") as caught:
        TensorSpec(**GOOD | {"dtype": "nonsense"})
    assert all(name in str(caught.value) for name in NAMES)


def test_a_spec_takes_keywords_only_and_all_of_them():
    with pytest.raises(TypeError):
        TensorSpec("float32", [1], 4096, 4)
    for name in GOOD:
        with pytest.raises(TypeError):
            TensorSpec(**{key: value for key, value in GOOD.items() if key != name})


def test_a_spec_does_not_change():
    spec = TensorSpec(**GOOD)
    for name in GOOD:
        with pytest.raises(AttributeError):
            setattr(spec, name, GOOD[name])
    spec.shape.append(5)
    assert spec.shape == [1]


# ---- serialize, serialize_file, deserialize ----


def described(module, arrays):
    return {
        f"{name} {i}": module.TensorSpec(dtype=name, shape=shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
        for i, (name, shape, array) in enumerate(arrays)
    }


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_serialize_writes_upstreams_bytes(metadata, tmp_path):
    arrays = [
        (name, shape, np.arange(int(np.prod(shape)) * size, dtype=np.uint8))
        for name, size in NAMES.items()
        for shape in ([], [3], [2, 3], [0, 2])
        if name != "float4_e2m1fn_x2" or shape
    ]
    expected = safetensors.serialize(described(safetensors, arrays), metadata)
    ours = serialize(described(safeload, arrays), metadata)
    assert type(ours) is bytes
    assert ours == expected
    assert serialize(tensor_dict=described(safeload, arrays), metadata=metadata) == expected
    assert serialize_file(described(safeload, arrays), tmp_path / "a", metadata) is None
    serialize_file(tensor_dict=described(safeload, arrays), filename=str(tmp_path / "b"), metadata=metadata)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == expected


def test_serialize_of_nothing_is_an_empty_file():
    assert serialize({}) == safetensors.serialize({}) == serialize({}, None)
    assert deserialize(serialize({})) == []


@pytest.mark.parametrize("function", [serialize, lambda d: serialize_file(d, "never")])
@pytest.mark.parametrize(
    "tensors",
    [
        {"test": {"dtype": "float32", "shape": [1], "data_ptr": 0, "data_len": 0}},
        {"test": np.zeros(3)},
        {"test": None},
        {3: TensorSpec(dtype="uint8", shape=[0], data_ptr=0, data_len=0)},
    ],
)
def test_what_is_no_spec_or_no_name_is_a_type_error(tensors, function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError):
        function(tensors)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("length", [0, 7, 9, 1 << 40])
def test_a_data_len_that_does_not_fit_is_refused_before_any_byte_is_read(length, tmp_path):
    array = np.zeros(2, np.float32)
    spec = TensorSpec(dtype="float32", shape=[2], data_ptr=array.ctypes.data, data_len=length)
    for call in (lambda: serialize({"layer": spec}), lambda: serialize_file({"layer": spec}, tmp_path / "x")):
        with pytest.raises(SafetensorError, match=r"^Error while serializing") as caught:
            call()
        for part in ("layer", str(length), "8"):
            assert part in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_null_pointer_is_refused_unless_there_is_nothing_to_read():
    with pytest.raises(SafetensorError, match="null"):
        serialize({"x": TensorSpec(dtype="float32", shape=[1], data_ptr=0, data_len=4)})
    empty = serialize({"x": TensorSpec(dtype="float32", shape=[0, 4], data_ptr=0, data_len=0)})
    assert [name for name, _ in deserialize(empty)] == ["x"]


def test_a_shape_whose_size_overflows_is_refused():
    spec = TensorSpec(dtype="float64", shape=[1 << 40, 1 << 40], data_ptr=4096, data_len=0)
    with pytest.raises(SafetensorError):
        serialize({"x": spec})


def test_a_shape_of_half_bytes_is_refused():
    spec = TensorSpec(dtype="float4_e2m1fn_x2", shape=[], data_ptr=4096, data_len=1)
    assert outcome(lambda: serialize({"x": spec}))[0] in ("SafeloadError", "FormatError")


def test_deserialize_gives_what_upstreams_gives(path):
    content = path.read_bytes()
    with safetensors.safe_open(path, "np") as file:
        names = file.offset_keys()
    theirs, ours = dict(safetensors.deserialize(content)), deserialize(content)
    assert ours == [(name, theirs[name]) for name in names]
    for name, entry in ours:
        assert {key: type(value) for key, value in entry.items()} == {k: type(v) for k, v in theirs[name].items()}
    for kind in (bytearray, memoryview):
        assert deserialize(kind(content)) == ours


def test_deserialize_hands_out_memory_of_its_own(path):
    content = bytearray(path.read_bytes())
    first, second = deserialize(content), deserialize(content)
    first[0][1]["data"][:] = b"\xff" * len(first[0][1]["data"])
    assert deserialize(content) == second


def test_deserialize_refuses_what_is_malformed():
    for content in (b"", b"\0" * 7, b"\xff" * 20, raw_file({}) + b"x"):
        assert outcome(lambda content=content: safetensors.deserialize(content))[0] == "SafetensorError"
        with pytest.raises(FormatError):
            deserialize(content)
