"""Which way tensors take to their arrays, and what is one run of jobs."""

import json

import ml_dtypes
import numpy as np
import pytest
from builders.inside import jobs
from builders.random import rng

import safeload
from safeload import quantize
from safeload.numpy import load_file, save_file


def raw_file(path, tensors, header_end=""):
    """A safetensors file whose tensors lie as given, one right after the other; ``header_end`` may make them odd."""
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8", "int64": "I64", "int8": "I8"}
    header, at = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": names[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = (json.dumps(header) + header_end).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in tensors.values()))


def mixed(count):
    """Tensors of all sizes and dtypes, empty and odd ones among them."""
    kinds = [np.float32, np.float16, ml_dtypes.bfloat16, np.uint8, np.int64, np.int8]
    shapes = [(3,), (), (0, 2), (4, 5), (1,), (7, 1, 3)]
    chosen = zip(rng.integers(0, len(kinds), count), rng.integers(0, len(shapes), count), strict=True)
    return {
        f"t{k}": rng.integers(-9 if kinds[i] is not np.uint8 else 0, 9, shapes[j]).astype(kinds[i])
        for k, (i, j) in enumerate(chosen)
    }


def assert_same(arrays, tensors, dtype=None):
    assert list(arrays) == list(tensors)
    for name, array in arrays.items():
        want = tensors[name]
        if dtype is not None and want.dtype.name in ("float32", "float16", "bfloat16"):
            want = want.astype(dtype)
        assert array.dtype == want.dtype
        assert array.shape == want.shape
        assert array.flags.aligned
        assert array.flags.c_contiguous
        assert array.flags.writeable
        np.testing.assert_array_equal(array, want)


@pytest.mark.parametrize("odd", range(8))
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
def test_small_tensors_of_any_dtype_at_any_offset(tmp_path, backend, dtype, odd):
    tensors = mixed(200)
    raw_file(tmp_path / "x", tensors, " " * odd)
    arrays = load_file(tmp_path / "x", backend=backend, dtype=dtype)
    assert_same(arrays, tensors, None if dtype is None else safeload.astype(np.zeros(1), dtype).dtype)
    for k, array in enumerate(arrays.values()):  # none shares memory with another
        array[...] = k % 100
    assert all((array == k % 100).all() for k, array in enumerate(arrays.values()))
    chosen = list(tensors)[::-3]
    assert_same(load_file(tmp_path / "x", backend=backend, names=chosen), {name: tensors[name] for name in chosen})


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_pools_of_bounded_size(tmp_path, dtype):
    """Tensors of less than 1 MiB share pools of up to 16 MiB."""
    tensors = {}
    for k, some in enumerate(np.array_split(np.array([*mixed(300).items()], object), 60)):
        tensors |= dict(some)
        tensors[f"middle.{k}"] = rng.integers(-9, 9, (200_000 + k,)).astype(np.float16)
    tensors |= {"large": rng.standard_normal((3000, 300)).astype(np.float16)} | {"last": np.ones(2, np.int8)}
    raw_file(tmp_path / "x", tensors)
    arrays = load_file(tmp_path / "x", backend="pread", dtype=dtype)
    assert_same(arrays, tensors, dtype)
    pools = {}
    for array in arrays.values():
        if 0 < array.nbytes < 1 << 20:
            while isinstance(array.base, np.ndarray):
                array = array.base
            pools[id(array)] = array
    assert 2 <= len(pools) <= 8
    assert max(array.nbytes for array in pools.values()) <= (16 << 20) + 64


def test_neighbours_are_read_by_one_job(tmp_path, monkeypatch):
    save_file({f"t{k}": np.full((4, 4), k, np.float16) for k in range(1000)}, tmp_path / "x", durable=False)
    ran = count_runs(monkeypatch)
    for dtype in (None, np.float32):
        arrays = load_file(tmp_path / "x", backend="pread", dtype=dtype, names=sorted(f"t{k}" for k in range(1000)))
        assert arrays["t999"].max() == 999
    assert [len(work) for work in ran] == [1, 1]


def count_runs(monkeypatch):
    """A list that gets the jobs of each run made from now on."""
    ran = []
    real = jobs.Batch.run

    def counting(batch, **keywords):
        ran.append(list(batch.jobs))
        return real(batch, **keywords)

    monkeypatch.setattr(jobs.Batch, "run", counting)
    return ran


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_int8_is_dequantized_in_the_one_run_that_reads(tmp_path, monkeypatch, backend, axis):
    values = {f"w{k}": rng.standard_normal((64, 96)).astype(np.float32) for k in range(5)}
    tensors = {name: quantize(x, "int8", axis=axis) for name, x in values.items()}
    plain = {"bias": rng.standard_normal(10).astype(np.float16), "steps": np.arange(3)}
    save_file({**tensors, **plain}, tmp_path / "x", durable=False)
    want = {name: q.dequantize("float32") for name, q in tensors.items()}
    with safeload.open(tmp_path / "x") as checkpoint:
        seen = []
        ran = count_runs(monkeypatch)
        arrays = checkpoint.load(dtype="float32", backend=backend, progress=lambda *report: seen.append(report))
        assert len(ran) == 1
        assert len([job for job in ran[0] if job.packed is not None]) == 5
        nbytes = 4 * 5 * 64 * 96 + plain["bias"].nbytes + (plain["steps"].nbytes if backend != "mmap" else 0)
        assert seen[-1] == (nbytes, nbytes)
        out = {name: np.zeros(array.shape, array.dtype) for name, array in arrays.items()}
        checkpoint.load(dtype="float32", out=out)
    for name, array in want.items():
        assert arrays[name].tobytes() == array.tobytes() == out[name].tobytes()
    assert arrays["bias"].dtype == np.float32


def test_what_is_named_after_an_empty_tensor(tmp_path):
    tensors = {"a": np.zeros((0, 3), np.float32), "b": np.ones(2, np.float32), "c": np.zeros(0, np.float16)}
    raw_file(tmp_path / "x", tensors)
    for backend in ("mmap", "pread", "direct"):
        for dtype in (None, np.float64):
            assert_same(load_file(tmp_path / "x", backend=backend, dtype=dtype), tensors, dtype)
    assert load_file(tmp_path / "x", names=[]) == {}
