"""Arrays of every public function are the caller's own: no write reaches a file, another load or an array in use."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import safeload
import safeload.numpy
from safeload.numpy import save_file

VALUES = {f"t{k}": np.arange(5000, dtype=np.float32) + k for k in range(4)}


@pytest.fixture
def path(tmp_path):
    save_file(VALUES, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def opened(path, **options):
    with safeload.open(path) as checkpoint:
        return checkpoint.load(**options)


def streamed(path):
    with safeload.open(path) as checkpoint:
        return dict(checkpoint.stream(dtype="float32"))


def handled(path, framework):
    with safeload.safe_open(path, framework) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


NUMPY = {
    "load_file": safeload.numpy.load_file,
    "load": safeload.load,
    "load with pread": lambda path: opened(path, backend="pread"),
    "load as another dtype": lambda path: opened(path, dtype="float64"),
    "stream": streamed,
    "safe_open": lambda path: handled(path, "np"),
}


@pytest.mark.parametrize("door", NUMPY)
def test_arrays_are_the_callers_own(path, door):
    before = path.read_bytes()
    first, second = NUMPY[door](path), NUMPY[door](path)
    for name, array in first.items():
        assert array.flags.writeable
        array[...] = -1
        assert (array == -1).all()
        assert np.array_equal(second[name], VALUES[name])
    assert path.read_bytes() == before
    assert all(np.array_equal(array, VALUES[name]) for name, array in NUMPY[door](path).items())


def test_arrays_of_a_stream_that_are_kept_keep_their_values(path):
    """Memory is used again only when nothing shows it: a view, a reshaped array or a memoryview do."""
    kept = []
    with safeload.open(path) as checkpoint:
        for _ in range(5):
            for name, array in checkpoint.stream(dtype="float16", ahead=1):
                kept.append((name, array[7:], memoryview(array.reshape(50, 100)[3])))
    for name, part, memory in kept:
        expected = VALUES[name].astype(np.float16)
        assert np.array_equal(part, expected[7:])
        assert np.array_equal(np.asarray(memory), expected[300:400])


# ---- read-only on request, or where the system refuses anything else ----


@pytest.fixture
def paths(tmp_path, path):
    """Files of which some tensors cannot be views: of another byte order, unaligned, packed, small, converted."""
    save_file({"a": VALUES["t0"][:3]}, tmp_path / "small.safetensors")
    np.savez(tmp_path / "model.npz", big=VALUES["t0"].astype(">f4"), little=VALUES["t1"])
    safeload.convert(path, tmp_path / "model.gguf", quantize={"t1": "q8_0"})
    safeload.save({"packed": safeload.quantize(VALUES["t0"].reshape(50, 100), "int8"), **VALUES}, tmp_path / "folder")
    return [path, *(tmp_path / name for name in ("small.safetensors", "model.npz", "model.gguf", "folder"))]


def plain(values):
    for value in values:
        yield from [value] if isinstance(value, np.ndarray) else value.roles.values()


READ_ONLY = {
    "load": lambda path: safeload.load(path, writable=False),
    "load some": lambda path: opened(path, only="*[a0tdg]*", writable=False),
    "load with pread": lambda path: safeload.load(path, backend="pread", writable=False),
    "load as another dtype": lambda path: safeload.load(path, dtype="float64", writable=False),
    "open": lambda path: dict(safeload.open(path, writable=False)),
    "open, pickled": lambda path: dict(pickle.loads(pickle.dumps(safeload.open(path, writable=False)))),
}


@pytest.mark.parametrize("door", READ_ONLY)
def test_arrays_are_read_only_on_request(paths, door):
    for path in paths:
        found = READ_ONLY[door](path)
        usual = safeload.load(path, dtype="float64" if "dtype" in door else None)
        assert found
        for array, expected in zip(plain(found.values()), plain(usual[name] for name in found), strict=True):
            assert not array.flags.writeable
            assert array.tobytes() == expected.tobytes()
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


@pytest.mark.parametrize("options", [{}, {"names": ["t1"]}, {"backend": "pread"}, {"dtype": "float16"}])
def test_load_file_is_read_only_on_request(path, tmp_path, options):
    save_file({"t1": VALUES["t1"][:3]}, tmp_path / "small.safetensors")
    for each in (path, tmp_path / "small.safetensors"):
        found, usual = (safeload.numpy.load_file(each, writable=writable, **options) for writable in (False, True))
        assert found.keys() == usual.keys()
        for name, array in found.items():
            assert (array.flags.writeable, usual[name].flags.writeable) == (False, True)
            assert np.array_equal(array, usual[name])


@pytest.mark.parametrize("load", [safeload.load, safeload.numpy.load_file])
def test_read_only_arrays_of_the_caller_are_refused(path, load):
    with pytest.raises(ValueError, match="writable=False and out= exclude each other"):
        load(path, writable=False, out={name: np.empty_like(array) for name, array in VALUES.items()})


LIMITED = """
import resource, sys
import safeload, safeload.numpy
resource.setrlimit(resource.RLIMIT_DATA, (512 << 20, 512 << 20))
path, how = sys.argv[1:]
loads = {
    "load": safeload.load,
    "open": lambda path: dict(safeload.open(path)),
    "load_file": safeload.numpy.load_file,
    "load_file, by name": lambda path: safeload.numpy.load_file(path, names=["x"]),
    "read-only": lambda path: safeload.load(path, writable=False),
}
array = loads[how](path)["x"]
assert array.nbytes > 1 << 30 and array[-1] == 0
print(array.flags.writeable)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts private writable mappings as data")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's own memory counts too")
@pytest.mark.parametrize("how", ["load", "open", "load_file", "load_file, by name", "read-only"])
def test_a_limit_of_data_makes_arrays_read_only(tmp_path, how):
    size = (1 << 30) + 64
    header = b'{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    arguments = [sys.executable, "-I", "-c", LIMITED, tmp_path / "x.safetensors", how]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert ("x.safetensors: the system refuses a writable mapping of 1 GiB" in done.stderr) == (how != "read-only")


NARROW = """
import resource, sys
import numpy as np
import safeload, safeload.numpy
from safeload.numpy import load_file
path, small, out = sys.argv[1:]
def work(path):
    assert len(safeload.open(path)) == 8
    assert not safeload.open(path)["t5"].any()
    assert list(safeload.load(path, only="t1")) == ["t1"]
    assert sum(array.nbytes for _, array in safeload.open(path).stream()) == safeload.open(path).nbytes
    assert len(safeload.stats(path)) == 8
    assert [finding.code for finding in safeload.check(path).errors] == ["file.hole"]
    assert not any(row.unequal for row in safeload.diff(path, path).tensors.values())
    safeload.convert(path, out, dtype="float16", overwrite=True)
work(small)  # imports, and starts what allocates
with open("/proc/self/statm") as file:
    pages = int(file.read().split()[0])
limit = pages * resource.getpagesize() + (192 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
work(path)
for load in (safeload.load, load_file):
    try:
        load(path)
    except MemoryError:
        continue
    raise AssertionError("the limit has no effect")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit addresses")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's own addresses count too")
def test_a_model_larger_than_all_addresses_is_opened_checked_and_converted(tmp_path):
    for name, size in (("small", 1 << 10), ("large", 48 << 20)):
        entries = {
            f"t{k}": {"dtype": "F32", "shape": [size // 4], "data_offsets": [k * size, (k + 1) * size]}
            for k in range(8)
        }
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        with open(tmp_path / f"{name}.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 8 * size)
    paths = [tmp_path / name for name in ("large.safetensors", "small.safetensors", "out.safetensors")]
    done = subprocess.run([sys.executable, "-I", "-c", NARROW, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.safetensors").stat().st_size > 4 * 48 << 20
