"""What upstream 0.8.0 gets wrong and we get right, one test each.

Each test shows upstream's behaviour first, so that a fixed upstream is noticed.
"""

import errno
import json
import os
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy as upstream

import safeload
from safeload import SafetensorError, safe_open
from safeload.numpy import load, load_file, save, save_file

pytestmark = pytest.mark.no_core

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX only")
X = np.array([[0, 1, 2], [3, 4, 5]], np.float32)


def raw_file(code, shape, data):
    text = json.dumps({"x": {"dtype": code, "shape": list(shape), "data_offsets": [0, len(data)]}}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def python(code, *arguments):
    result = subprocess.run(
        [sys.executable, "-I", "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    return result.stdout.strip() or result.stderr


@pytest.fixture
def umask():
    old = os.umask(0o022)
    yield
    os.umask(old)


# ---- arrays that are not in C order ----


@pytest.mark.parametrize(
    ("array", "inside"),  # whether upstream's wrong read stays inside the array's memory
    [
        (np.asfortranarray(X), True),
        (X.T, True),
        (X[:, ::2], True),
        (X[::-1], False),
        (X[:, ::-1], False),
        (np.broadcast_to(X[:, :1], (2, 5)), False),
    ],
    ids=["Fortran", "transposed", "strided", "rows reversed", "columns reversed", "broadcast"],
)
def test_issue_825_arrays_that_are_not_in_c_order_are_saved_as_their_values(array, inside, tmp_path):
    if inside:
        assert upstream.load(upstream.save({"x": array}))["x"].tolist() != array.tolist()
    assert load(save({"x": array}))["x"].tolist() == array.tolist()
    save_file({"x": array}, tmp_path / "x")
    assert load_file(tmp_path / "x")["x"].tolist() == array.tolist()
    assert upstream.load(save({"x": array}))["x"].tolist() == array.tolist()


# ---- modes and links ----


@posix
def test_issue_782_a_new_file_gets_the_umasks_mode(umask, tmp_path):
    upstream.save_file({"x": X}, tmp_path / "theirs")
    save_file({"x": X}, tmp_path / "ours")
    assert stat.S_IMODE(os.stat(tmp_path / "theirs").st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "ours").st_mode) == 0o644


@posix
def test_issue_782_an_existing_file_keeps_its_mode(umask, tmp_path):
    for name, function in (("theirs", upstream.save_file), ("ours", save_file)):
        (tmp_path / name).write_bytes(b"old")
        os.chmod(tmp_path / name, 0o664)
        function({"x": X}, tmp_path / name)
    assert stat.S_IMODE(os.stat(tmp_path / "theirs").st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "ours").st_mode) == 0o664


@posix
def test_issue_782_a_symlink_is_followed(tmp_path):
    for name, function in (("theirs", upstream.save_file), ("ours", save_file)):
        (tmp_path / f"{name} target").write_bytes(b"old")
        (tmp_path / name).symlink_to(f"{name} target")
        function({"x": X}, tmp_path / name)
    assert not (tmp_path / "theirs").is_symlink()
    assert (tmp_path / "theirs target").read_bytes() == b"old"
    assert (tmp_path / "ours").is_symlink()
    assert (tmp_path / "ours target").read_bytes() == save({"x": X})


# ---- dtypes ----


def test_issue_598_bf16_loads_though_nobody_imported_ml_dtypes(tmp_path):
    (tmp_path / "x").write_bytes(raw_file("BF16", [2], np.array([1.5, -2], ml_dtypes.bfloat16).tobytes()))
    code = """
import sys
from {}.numpy import load_file
try:
    print(load_file(sys.argv[1])["x"].astype("f4").tolist())
except Exception as error:
    print(type(error).__name__, error)
"""
    assert python(code.format("safetensors"), tmp_path / "x") == "TypeError data type 'bfloat16' not understood"
    assert python(code.format("safeload"), tmp_path / "x") == "[1.5, -2.0]"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("BF16", "bfloat16"),
        ("F8_E4M3", "float8_e4m3fn"),
        ("F8_E5M2", "float8_e5m2"),
        ("F8_E8M0", "float8_e8m0fnu"),
        ("F8_E4M3FNUZ", "float8_e4m3fnuz"),
        ("F8_E5M2FNUZ", "float8_e5m2fnuz"),
    ],
)
def test_issue_598_small_floats_load_as_ml_dtypes(code, name, tmp_path):
    dtype = np.dtype(getattr(ml_dtypes, name))
    data = np.ones(3, dtype).tobytes()
    (tmp_path / "x").write_bytes(raw_file(code, [3], data))
    with pytest.raises(KeyError):
        upstream.load(raw_file(code, [3], data))
    if code != "BF16":
        with pytest.raises(AttributeError):
            upstream.load_file(tmp_path / "x")
    for loaded in (load(raw_file(code, [3], data)), load_file(tmp_path / "x"), safeload.load(tmp_path / "x")):
        assert loaded["x"].dtype == dtype
        assert loaded["x"].astype(np.float32).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("code", "shape", "data", "expected"),
    [
        ("F4", (2, 4), b"\x10\x32\x54\x76", (2, 2)),
        ("F4", (2, 3), b"\x10\x32\x54", (3,)),
        ("F6_E2M3", (2, 4), b"abcdef", (2, 3)),
        ("F6_E3M2", (2, 2), b"abc", (3,)),
    ],
)
def test_packed_floats_load_as_raw_bytes_whose_logical_shape_is_in_the_meta(code, shape, data, expected, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(raw_file(code, shape, data))
    with pytest.raises((AttributeError, safetensors.SafetensorError)):
        upstream.load_file(path)
    loaded = load_file(path)["x"]
    assert (loaded.dtype, loaded.shape, loaded.tobytes()) == (np.uint8, expected, data)
    with safe_open(path) as file:
        assert file.get_tensor_meta("x") == (code, list(shape), (0, len(data)))


# ---- slices ----


@pytest.fixture
def sliced(tmp_path):
    arrays = {"m": np.arange(12).reshape(3, 4), "e": np.zeros((0, 3)), "s": np.array(3.0)}
    save_file(arrays, tmp_path / "x", durable=False)
    with safe_open(tmp_path / "x") as ours, safetensors.safe_open(tmp_path / "x", "np") as theirs:
        yield ours, theirs, arrays


@pytest.mark.parametrize("index", [np.s_[-2:], np.s_[:-1], np.s_[-3:-1], np.s_[:, -1:], np.s_[-1:, :-2]], ids=str)
def test_issue_560_negative_bounds_slice_as_numpy_does(index, sliced):
    ours, theirs, arrays = sliced
    with pytest.raises(OverflowError):
        theirs.get_slice("m")[index]
    assert ours.get_slice("m")[index].tolist() == arrays["m"][index].tolist()


@pytest.mark.parametrize("index", [np.s_[2:1], np.s_[:, 3:1]], ids=str)
def test_issue_843_a_slice_that_ends_before_it_starts_is_empty(index, sliced):
    ours, theirs, arrays = sliced
    with pytest.raises((SystemError, safetensors.SafetensorError)):
        theirs.get_slice("m")[index]
    assert ours.get_slice("m")[index].shape == arrays["m"][index].shape


@pytest.mark.parametrize("index", [np.s_[3:], np.s_[:, 4:], np.s_[3:3]], ids=str)
def test_issue_560_a_slice_that_starts_at_the_end_is_empty(index, sliced):
    ours, theirs, arrays = sliced
    with pytest.raises(safetensors.SafetensorError, match="out of bounds"):
        theirs.get_slice("m")[index]
    assert ours.get_slice("m")[index].shape == arrays["m"][index].shape


@pytest.mark.parametrize("index", [np.s_[:], np.s_[...], np.s_[:, 0:1], np.s_[0:0], np.s_[:, 1]], ids=str)
def test_issue_560_tensors_of_zero_size_are_sliced(index, sliced):
    ours, theirs, arrays = sliced
    with pytest.raises(safetensors.SafetensorError, match="out of bounds"):
        theirs.get_slice("e")[index]
    assert ours.get_slice("e")[index].shape == arrays["e"][index].shape


@pytest.mark.parametrize("index", [(), ..., None, (..., None)])
def test_issue_380_tensors_without_axes_are_sliced(index, sliced):
    ours, _, arrays = sliced
    assert ours.get_slice("s")[index].tolist() == arrays["s"][index].tolist()


@pytest.mark.parametrize(
    "index", [0, -1, np.s_[0, :], np.s_[:, -1], np.s_[0, 0], np.s_[np.int64(1), ::2], np.s_[..., 2]], ids=str
)
def test_issue_439_integers_are_indices(index, sliced):
    ours, _, arrays = sliced
    assert ours.get_slice("m")[index].tolist() == arrays["m"][index].tolist()


@pytest.mark.parametrize("index", [np.s_[::-1], np.s_[:, ::-2], np.s_[None], np.s_[..., None]], ids=str)
def test_issue_439_negative_steps_and_new_axes_are_indices_too(index, sliced):
    ours, theirs, arrays = sliced
    with pytest.raises(safetensors.SafetensorError):
        theirs.get_slice("m")[index]
    assert ours.get_slice("m")[index].tolist() == arrays["m"][index].tolist()


@pytest.mark.parametrize("index", [np.s_[0:0:2], np.s_[:, 2:2:3], np.s_[1:1:2, ::2]], ids=str)
def test_issue_855_an_empty_slice_with_a_step_is_empty(index, sliced):
    ours, _, arrays = sliced
    assert ours.get_slice("m")[index].shape == arrays["m"][index].shape


# ---- errors ----


@posix
def test_a_permission_error_keeps_its_class():
    code = """
import os, sys
import numpy, {0}
{0}.safe_open  # what is imported on first access must be before that is forbidden
os.chdir(sys.argv[1])
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    {0}.safe_open("x", "np")
except Exception as error:
    print(type(error).__name__, getattr(error, "errno", None), getattr(error, "filename", None))
"""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        save_file({"x": X}, Path(folder) / "x")
        os.chmod(Path(folder) / "x", 0)
        assert python(code.format("safetensors"), folder).startswith("FileNotFoundError")
        assert python(code.format("safeload"), folder) == f"PermissionError {errno.EACCES} x"


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_NOFILE as Linux has it")
def test_running_out_of_descriptors_keeps_its_class(tmp_path):
    save_file({"x": X}, tmp_path / "x")
    code = """
import os, resource, sys
import numpy, {0}
{0}.safe_open  # imported on first access, which takes descriptors
limit = len(os.listdir("/proc/self/fd")) + 20
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
keep = []
try:
    while len(keep) < 100:
        keep.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
try:
    {0}.safe_open(sys.argv[1], "np")
except Exception as error:
    print(type(error).__name__, getattr(error, "errno", None), getattr(error, "filename", None))
"""
    assert python(code.format("safetensors"), tmp_path / "x").startswith("FileNotFoundError")
    assert python(code.format("safeload"), tmp_path / "x") == f"OSError {errno.EMFILE} {tmp_path / 'x'}"


@posix
def test_a_folder_is_is_a_directory(tmp_path):
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the class is what is looked at
        safetensors.safe_open(tmp_path, "np")
    assert not isinstance(caught.value, IsADirectoryError)
    with pytest.raises(IsADirectoryError):
        safe_open(tmp_path)


@posix
def test_an_error_of_a_save_keeps_its_class(tmp_path):
    with pytest.raises(safetensors.SafetensorError):
        upstream.save_file({"x": X}, tmp_path / "no" / "x")
    with pytest.raises(FileNotFoundError) as caught:
        save_file({"x": X}, tmp_path / "no" / "x")
    assert caught.value.filename == str(tmp_path / "no" / "x")


# ---- buffers, metadata, names ----


@pytest.mark.parametrize("kind", [bytearray, memoryview, lambda content: np.frombuffer(content, np.uint8)])
def test_issue_529_load_takes_any_buffer(kind):
    content = save({"x": X})
    with pytest.raises(TypeError):
        upstream.load(kind(content))
    assert load(kind(content))["x"].tolist() == X.tolist()


def test_metadata_is_written_in_sorted_order():
    metadata = {str(i): "" for i in range(8)}
    assert len({upstream.save({"x": X}, metadata) for _ in range(50)}) > 1
    contents = {save({"x": X}, dict(items)) for items in (metadata.items(), reversed(metadata.items()))}
    assert len(contents) == 1
    (content,) = contents
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    assert list(header["__metadata__"]) == sorted(metadata)


def test_a_tensor_named_metadata_is_refused():
    with pytest.raises(safetensors.SafetensorError):
        upstream.load(upstream.save({"__metadata__": X}))
    with pytest.raises(SafetensorError, match="__metadata__"):
        save({"__metadata__": X})


def test_no_tensors_and_no_keys_are_a_file_that_can_be_read():
    with pytest.raises(safetensors.SafetensorError, match="JSON"):
        upstream.load(upstream.save({}, {}))
    content = save({}, {})
    assert upstream.load(content) == load(content) == {}


def test_a_null_pointer_is_refused_where_upstream_dies():
    code = """
import {0}, sys
if sys.platform != "win32":
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
spec = {0}.TensorSpec(dtype="float32", shape=[1], data_ptr=0, data_len=4)
try:
    {0}.serialize({{"x": spec}})
except {0}.SafetensorError as error:
    print("refused")
"""
    assert python(code.format("safetensors")) != "refused"
    assert python(code.format("safeload")) == "refused"


# ---- memory ----


def test_two_arrays_of_one_handle_share_no_memory_and_change_no_file(tmp_path):
    path = tmp_path / "x"
    save_file({"x": np.arange(100_000)}, path)
    content = path.read_bytes()
    with safe_open(path) as file:
        first, second = file.get_tensor("x"), file.get_tensor("x")
    first[:] = 0
    assert (second == np.arange(100_000)).all()
    assert path.read_bytes() == content
