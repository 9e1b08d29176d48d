"""Chunks that an Orbax checkpoint does not store cost nothing until they are read, and one odd array closes nothing."""

import json
import time
import tracemalloc

import numpy as np
import pytest
from builders.orbax_build import OrbaxCheckpoint

import safeload
from safeload import FormatError, LimitError, UnsupportedError


def sparse(folder, shape, chunks, stored, *, version=2, database=True, complete=False, dtype="uint8", name="w"):
    """A checkpoint with few of its chunks, and the values of the array by the index of each."""
    switches = {"use_ocdbt": database, "store_array_data_equal_to_fill_value": complete}
    made = OrbaxCheckpoint(version, **switches)
    made.tensor(name, np.zeros((0,) * len(shape), dtype), chunks)
    made.chunks.clear()
    made.tensor("other", np.arange(6, dtype=np.float32))
    made.arrays[name]["shape"] = list(shape)
    rng = np.random.default_rng(len(shape))
    values = {}
    for index in stored:
        values[index] = rng.integers(1, 100, chunks).astype(dtype)
        key = "/".join(["c", *map(str, index)]) if version == 3 else ".".join(map(str, index))
        made.chunks[f"{name}/{key}"] = values[index].tobytes()
    made.write(folder)
    return values


def dense(shape, chunks, values, dtype):
    whole = np.zeros([-(-n // c) * c for n, c in zip(shape, chunks, strict=True)], dtype)
    for index, value in values.items():
        whole[tuple(slice(k * c, (k + 1) * c) for k, c in zip(index, chunks, strict=True))] = value
    return whole[tuple(map(slice, shape))]


CASES = {
    "a million of one": ((1_048_000,), (1,), [(0,), (7,), (1_047_999,)], {}),
    "more than a million": ((3_000_001,), (1,), [(3_000_000,)], {}),
    "none at all": ((2_000_000,), (1,), [], {}),
    "two axes": ((3_000, 900), (1, 2), [(0, 0), (17, 449), (2_999, 3)], {}),
    "cut at the edge": ((5_001, 7), (2, 3), [(2_500, 2), (0, 1)], {}),
    "version 3": ((2_000, 700), (1, 1), [(5, 5), (1_999, 699)], {"version": 3}),
    "floats": ((50_000, 4), (1, 4), [(3, 0)], {"dtype": "float32", "version": 3}),
    "folders": ((40_000,), (2,), [(0,), (19_999,)], {"database": False}),
    "few chunks": ((10, 10), (3, 3), [(0, 0), (3, 3)], {}),
    "a scalar": ((), (), [], {}),
    "beside arrays below it": ((20_000,), (1,), [(5,), (19_000,)], {"name": "other.w"}),
}


@pytest.mark.parametrize("name", CASES)
def test_opening_costs_as_much_as_is_stored(name, tmp_path):
    shape, chunks, stored, options = CASES[name]
    values = sparse(tmp_path, shape, chunks, stored, **options)
    key = options.get("name", "w")
    safeload.open(tmp_path).close()  # imports
    tracemalloc.start()
    begin = time.process_time()
    opened = safeload.open(tmp_path)
    took, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    assert took < 1
    with opened:
        want = dense(shape, chunks, values, options.get("dtype", "uint8"))
        np.testing.assert_array_equal(opened[key], want)
        np.testing.assert_array_equal(opened["other"], np.arange(6))
        for backend in ("mmap", "pread"):
            np.testing.assert_array_equal(opened.load([key], backend=backend)[key], want)
        if shape:
            part = opened.get_slice(key)
            np.testing.assert_array_equal(part[-3:], want[-3:])
            np.testing.assert_array_equal(part[1 : shape[0] : 997], want[1 : shape[0] : 997])
            np.testing.assert_array_equal(opened.take(key, [0, shape[0] - 1]), want[[0, -1]])
    assert safeload.check(tmp_path).ok


def test_chunks_that_are_not_stored_are_converted(tmp_path):
    values = sparse(tmp_path, (30_001,), (1,), [(9,)], dtype="float64")
    safeload.convert(tmp_path, tmp_path / "o.npz")
    want = dense((30_001,), (1,), values, "float64")
    np.testing.assert_array_equal(safeload.load(tmp_path / "o.npz")["w"], want)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("shape", [(5_000,), (1 << 40, 3), (70, 70)])
def test_a_chunk_that_should_be_stored_is_named_at_once(shape, version, tmp_path):
    zero = (0,) * len(shape)
    sparse(tmp_path, shape, (1,) * len(shape), [zero], version=version, complete=True)
    missing = (*zero[:-1], 1)
    key = "/".join(["c", *map(str, missing)]) if version == 3 else r"\.".join(map(str, missing))
    begin = time.process_time()
    with pytest.raises(FormatError, match=rf"tensor 'w': its chunk {key} is missing"):
        safeload.open(tmp_path)
    assert time.process_time() - begin < 1


def test_keys_that_are_no_chunks_are_ignored(tmp_path):
    made = OrbaxCheckpoint(store_array_data_equal_to_fill_value=False)
    made.tensor("w", np.zeros(0, np.uint8), [1]).arrays["w"]["shape"] = [10_000]
    made.chunks = {f"w/{key}": b"\1" for key in ("00", "7", "10000", "-1", "x", "1.1", "", "٣", "9" * 30)}
    made.write(tmp_path)
    want = np.zeros(10_000, np.uint8)
    want[7] = 1
    np.testing.assert_array_equal(safeload.load(tmp_path)["w"], want)


@pytest.mark.parametrize(("size", "fits"), [(1 << 32, True), ((1 << 32) + (1 << 26), False), (1 << 44, False)])
def test_fill_values_stand_for_four_gibibytes_at_most(size, fits, tmp_path):
    sparse(tmp_path, (size,), (1,), [(0,)])
    if not fits:
        with pytest.raises(LimitError, match="chunks that are not stored stand for"):
            safeload.open(tmp_path)
        return
    with safeload.open(tmp_path) as opened:
        assert opened.get_slice("w")[-2:].tolist() == [0, 0]


ODD = {
    "compressor": {"compressor": {"id": "blosc"}},
    "filters": {"filters": [{"id": "delta"}]},
    "long double": {"dtype": "<f16"},
    "text": {"dtype": "<U3"},
    "half complex": {"dtype": "<c4"},
    "unknown field": {"strange": 1},
}


@pytest.mark.parametrize("database", [True, False])
@pytest.mark.parametrize("odd", ODD)
def test_an_array_that_cannot_be_read_is_listed(odd, database, tmp_path):
    made = OrbaxCheckpoint(use_ocdbt=database).tensor("w", np.arange(6, dtype=np.float32))
    made.tensor("odd", np.zeros(6, np.float32))
    made.arrays["odd"].update(ODD[odd])
    made.write(tmp_path)
    np.testing.assert_array_equal(safeload.load(tmp_path, only="w")["w"], np.arange(6))
    with safeload.open(tmp_path) as opened:
        assert set(opened) == {"w", "odd"}
        assert opened.tensors["odd"].shape == (6,)
        with pytest.raises(UnsupportedError, match=r"tensor 'odd': .* has .*only= or drop="):
            opened.load()
    with pytest.raises(UnsupportedError, match="drop="):
        safeload.convert(tmp_path, tmp_path / "o.safetensors")
    assert safeload.convert(tmp_path, tmp_path / "o.safetensors", drop="odd").tensors == 1


def test_complex128_is_read(tmp_path):
    value = np.arange(4) + 1j
    OrbaxCheckpoint().tensor("w", value).write(tmp_path)
    np.testing.assert_array_equal(safeload.load(tmp_path)["w"], value)


# ---- by tensorstore ----


def by_tensorstore(folder, arrays, driver, **options):
    """Arrays that tensorstore writes into one database, as Orbax has it do."""
    tensorstore = pytest.importorskip("tensorstore")
    tree = {}
    for name, (array, chunks) in arrays.items():
        metadata = {"shape": list(array.shape), "fill_value": 0}
        if driver == "zarr3":
            grid = {"name": "regular", "configuration": {"chunk_shape": chunks}}
            metadata |= {"chunk_grid": grid, "data_type": array.dtype.name}
        else:
            metadata |= {"chunks": chunks, "dtype": array.dtype.str, "compressor": None}
        store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/", **options}
        spec = {"driver": driver, "kvstore": store, "metadata": metadata, "create": True}
        tensorstore.open(spec).result().write(array).result()
        keys = [{"key": name, "key_type": 2}]
        tree[f"('{name}',)"] = {"key_metadata": keys, "value_metadata": {"value_type": "jax.Array"}}
    switches = {"use_ocdbt": True, "use_zarr3": driver == "zarr3", "store_array_data_equal_to_fill_value": False}
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": tree, **switches}))


@pytest.mark.parametrize("assume", [True, False])
@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_zeros_that_tensorstore_leaves_out(driver, assume, tmp_path):
    """And its databases whose first version is empty, unless they were created with a known configuration."""
    weights = np.zeros((64, 40), np.float32)
    weights[3, 5], weights[63, 39] = 1, 2
    arrays = {
        "zeros": (np.zeros((128, 32), np.float32), [1, 1]),
        "sparse": (weights, [1, 1]),
        "full": (np.arange(1, 7, dtype=np.int32), [6]),
        "scalar": (np.array(0, np.int32), []),
    }
    by_tensorstore(tmp_path, arrays, driver, **({"assume_config": True} if assume else {}))
    with safeload.open(tmp_path) as opened:
        assert set(opened) == set(arrays)
        for name, (array, _) in arrays.items():
            np.testing.assert_array_equal(opened[name], array)
            assert opened[name].dtype == array.dtype
