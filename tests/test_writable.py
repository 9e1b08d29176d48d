"""Arrays of every public function are the caller's own: no write reaches a file, another load or an array in use."""

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
