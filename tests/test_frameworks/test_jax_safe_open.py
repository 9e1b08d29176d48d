"""safe_open(framework="flax") beside upstream's: arrays of JAX, slices, devices, copies."""

import copy
import os
import pickle
import threading

import ml_dtypes
import numpy as np
import pytest
from builders.random import rng

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax")

import safetensors  # noqa: E402

import safeload  # noqa: E402
import safeload.numpy  # noqa: E402

FRAMEWORKS = ("flax", "jax")
BACKENDS = ("mmap", "pread", "direct")


def same(array, expected):
    assert isinstance(array, jax.Array)
    array, expected = np.asarray(array), np.asarray(expected)
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    assert array.tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    arrays = {
        "large": rng.normal(size=(700, 900)).astype(np.float32),
        "middle": rng.normal(size=(100, 300)).astype(ml_dtypes.bfloat16),
        "small": np.arange(12, dtype=np.int32).reshape(3, 4),
        "scalar": np.float16(3),
        "empty": np.zeros((0, 5), np.uint8),
        "f8": rng.normal(size=(9, 7)).astype(ml_dtypes.float8_e4m3fn),
    }
    path = tmp_path_factory.mktemp("jax") / "x.safetensors"
    safeload.numpy.save_file(arrays, path, {"k": "v"})
    return path, arrays


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_tensor_is_an_array_of_jax(file, framework, backend):
    path, arrays = file
    with safeload.safe_open(path, framework, backend=backend) as opened:
        assert sorted(opened.keys()) == sorted(arrays)
        assert opened.metadata() == {"k": "v"}
        for name, expected in arrays.items():
            same(opened.get_tensor(name), expected)
            same(opened.get_tensor(name), expected)
        every = opened.get_tensors()
        assert list(every) == list(opened.offset_keys())
        for name, array in every.items():
            same(array, arrays[name])
        same(opened.get_tensors(dtype="float16")["large"], arrays["large"].astype(np.float16))
        with pytest.raises(safeload.UnsupportedError, match="jax_enable_x64"):
            opened.get_tensors(dtype="float64")
        with pytest.raises(safeload.TensorNotFoundError):
            opened.get_tensor("none")


@pytest.mark.parametrize("backend", BACKENDS)
def test_slices_are_upstreams(file, backend):
    path, arrays = file
    keys = {
        "large": [slice(2, 5), (slice(None), slice(3, 100)), (3, slice(None)), (..., 4), (5, 6), slice(0, 700), ()],
        "small": [slice(1, 2), (slice(0, 2), 1), (2, 3), ..., []],
        "scalar": [...],
    }
    with (
        safeload.safe_open(path, "flax", backend=backend) as mine,
        safetensors.safe_open(path, "flax", backend="pread" if backend == "direct" else backend) as theirs,
    ):
        for name, indices in keys.items():
            ours, upstream = mine.get_slice(name), theirs.get_slice(name)
            assert (ours.get_shape(), ours.get_dtype()) == (upstream.get_shape(), upstream.get_dtype())
            for key in indices:
                try:
                    expected = upstream[key]
                except Exception:
                    expected = jax.numpy.array(arrays[name][key])
                same(ours[key], expected)
        with pytest.raises(safeload.SafetensorError):
            mine.get_slice("small")[4:9]


def test_arrays_are_not_over_the_file(tmp_path):
    for pad in range(0, 64, 8):
        path = tmp_path / f"{pad}.safetensors"
        expected = {"a": rng.normal(size=(1024, 512)).astype(np.float32), "b": np.ones((100, 1000), np.float32)}
        safeload.numpy.save_file(expected, path, {"pad": "x" * pad})
        with safeload.safe_open(path, "flax") as opened:
            results = [opened.get_tensors(), {name: opened.get_tensor(name) for name in expected}]
            results.append({name: opened.get_slice(name)[:] for name in expected})
            out = {name: np.empty_like(array) for name, array in expected.items()}
            results.append(opened.get_tensors(out=out))
        for array in out.values():
            array[:] = 0
        with open(path, "r+b") as again:
            again.write(bytes(path.stat().st_size))
        for loaded in results:
            for name, array in expected.items():
                same(loaded[name], array)


def test_only_the_default_device_is_taken(file):
    path, _ = file
    for device in ("cuda", "cuda:0", 0, "meta", "tpu"):
        with pytest.raises(safeload.SafetensorError, match=r"not supported for framework jax.*sharding="):
            safeload.safe_open(path, "flax", device)
    with pytest.raises(safeload.SafetensorError, match="backend"):
        safeload.safe_open(path, "flax", backend="x")
    safeload.safe_open(path, "flax", None).close()


def test_handles_and_slices_pickle_and_copy(file):
    path, arrays = file
    with safeload.safe_open(path, "flax") as opened:
        for again in (pickle.loads(pickle.dumps(opened)), copy.copy(opened), copy.deepcopy(opened)):
            same(again.get_tensor("small"), arrays["small"])
        rows = opened.get_slice("large")
        for again in (pickle.loads(pickle.dumps(rows)), copy.copy(rows), copy.deepcopy(rows)):
            same(again[2:4], arrays["large"][2:4])


def test_threads_share_a_handle(file):
    path, arrays = file
    wrong = []
    with safeload.safe_open(path, "flax") as opened:

        def work():
            for name, expected in arrays.items():
                if np.asarray(opened.get_tensor(name)).tobytes() != expected.tobytes():
                    wrong.append(name)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_closed_handle_says_so_and_a_cut_file_is_an_error(tmp_path, file):
    path, _ = file
    opened = safeload.safe_open(path, "flax")
    opened.close()
    with pytest.raises(safeload.SafetensorError, match="closed"):
        opened.get_tensor("small")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes())
    with safeload.safe_open(cut, "flax") as opened:
        os.truncate(cut, 2000)
        with pytest.raises(safeload.FormatError, match=r"cut\.safetensors"):
            opened.get_tensor("large")
        with pytest.raises(safeload.FormatError, match=r"cut\.safetensors"):
            opened.get_slice("large")[:]
