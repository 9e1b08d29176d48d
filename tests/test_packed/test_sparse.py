"""compressed-tensors' sparse formats: names of all versions, ranges of rows, and what a store is asked for."""

import json

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.random import rng
from builders.remote import Served

import safeload
from safeload import FormatError, UnsupportedError
from safeload.numpy import save_file

CONFIG = {
    "quantization_config": {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}}
}
BF16 = ml_dtypes.bfloat16


def dense(shape, dtype=BF16, share=0.4):
    return np.where(rng.random(shape) < share, rng.standard_normal(shape), 0).astype(dtype)


def parts_of(values, stem, integers=np.int64):
    """The tensors that are stored for one, by name."""
    places = values != 0
    counts = places.sum(-1)
    offsets = np.cumsum(counts, dtype=integers).reshape(counts.shape) - counts.astype(integers)
    parts = {
        "shape": np.array(values.shape, integers),
        "compressed": values[places],
        "bitmask": np.packbits(places, axis=-1, bitorder="little"),
        "row_offsets": offsets,
    }
    return {f"{stem}.{name}": array for name, array in parts.items()}


def write(folder, *tensors):
    folder.mkdir(exist_ok=True)
    for k, some in enumerate(tensors):
        save_file(some, folder / f"model-{k + 1:05}-of-{len(tensors):05}.safetensors")
    index = {
        name: f"model-{k + 1:05}-of-{len(tensors):05}.safetensors" for k, some in enumerate(tensors) for name in some
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def assert_same(got, want):
    assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, np.ascontiguousarray(want).tobytes())


@pytest.mark.parametrize("integers", [np.int64, np.int32])
def test_names_of_all_versions_and_parts_in_any_shard(integers, tmp_path):
    weights = {
        "a.b.weight": ("a.b", dense((9, 21))),
        "a.c.weight": ("a.c.weight", dense((3, 8), np.float16)),
        "a.c.bias": ("a.c.bias", dense(30, np.float32)),
        "norm.weight": ("norm", dense(5, share=1)),
        "zero.weight": ("zero", np.zeros((4, 3), BF16)),
        "empty.weight": ("empty", np.zeros((0, 3), BF16)),
        "narrow.weight": ("narrow", np.zeros((3, 0), BF16)),
    }
    stored = {}
    for stem, values in weights.values():
        stored |= parts_of(values, stem, integers)
    names = sorted(stored)
    folder = write(tmp_path / "x", {n: stored[n] for n in names[::2]}, {n: stored[n] for n in names[1::2]})
    with safeload.open(folder) as opened:
        assert opened.keys() == weights.keys()
        for name, (_, values) in weights.items():
            label = "sparse " + {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[values.dtype.name]
            assert (opened.tensors[name].dtype, opened.tensors[name].shape) == (label, values.shape)
            assert_same(opened[name].dequantize(values.dtype), values)
            assert_same(opened.load([name], dtype=values.dtype)[name], values)
    safeload.convert(folder, tmp_path / "one.safetensors")
    got = safeload.load(tmp_path / "one.safetensors", dtype="float32")
    assert all(np.array_equal(got[name], values.astype(np.float32)) for name, (_, values) in weights.items())


def test_a_tensor_of_three_axes_stays_as_it_is_stored(tmp_path):
    folder = write(tmp_path, parts_of(dense((2, 3, 8)), "a"))
    with safeload.open(folder) as opened:
        assert opened.keys() == {"a.shape", "a.compressed", "a.bitmask", "a.row_offsets"}
        with pytest.raises(
            UnsupportedError, match=r"tensor 'a.compressed' holds BF16 values, whose mask is 'a.bitmask'"
        ):
            opened.load(dtype="float32")


def test_values_without_a_config_or_with_a_weight_of_the_same_name(tmp_path):
    values = dense((4, 9))
    save_file(parts_of(values, "a.weight"), tmp_path / "alone.safetensors")
    assert_same(safeload.load(tmp_path / "alone.safetensors", dtype="bfloat16")["a.weight"], values)
    folder = write(tmp_path / "both", {**parts_of(values, "a.weight"), "a.weight": values})
    with pytest.raises(FormatError, match=r"'a.weight': stored twice, as itself and as 'a.weight.compressed'"):
        safeload.open(folder)


@pytest.mark.parametrize("columns", [203, 65_536, 65_537, 200_003])
def test_rows_longer_than_a_step_are_found_and_checked(columns, tmp_path):
    """A step has 65,536 columns."""
    values = dense((5, columns))
    stored = parts_of(values, "a")
    assert_same(safeload.load(write(tmp_path, stored), dtype="bfloat16")["a.weight"], values)
    stored["a.bitmask"][:, -1] |= 0xFF << (columns - 1) % 8 + 1 & 0xFF  # after the last column
    assert_same(safeload.load(write(tmp_path, stored), dtype="bfloat16")["a.weight"], values)
    stored["a.bitmask"][3, 7] ^= 2
    with pytest.raises(FormatError, match=r"tensor 'a.weight': row 3 has places for \d+ values in its mask, but \d+"):
        safeload.load(write(tmp_path, stored), dtype="bfloat16")


@pytest.mark.parametrize("grid_bytes", [1, 100, 1 << 20])
def test_ranges_of_rows_are_those_of_the_whole(grid_bytes, tmp_path, monkeypatch):
    inside.tune(monkeypatch, grid_bytes=grid_bytes)
    values = dense((40, 77))
    values[7:9] = 0
    with safeload.open(write(tmp_path, parts_of(values, "a"))) as opened:
        lazy, packed = opened.get_slice("a.weight", dtype="bfloat16"), opened["a.weight"]
        for rows in (slice(0, 3), slice(7, 9), slice(5, 40), slice(39, 40), slice(4, 4)):
            assert_same(lazy[rows], values[rows])
            assert_same(packed[rows].dequantize("bfloat16"), values[rows])
        assert_same(packed[3:30][5:10].dequantize("bfloat16"), values[8:13])
        assert_same(lazy[-2, ::5], values[-2, ::5])


def test_a_range_that_is_damaged_says_which_row_of_the_tensor_it_is(tmp_path):
    stored = parts_of(dense((40, 77)), "a")
    stored["a.bitmask"][20, 0] ^= 1
    stored["a.row_offsets"][33] = -5
    with safeload.open(write(tmp_path, stored)) as opened:
        lazy = opened.get_slice("a.weight")
        assert lazy[:20].shape == (20, 77)
        with pytest.raises(FormatError, match="row 20 has places for"):
            lazy[15:25]
        with pytest.raises(FormatError, match="row_offsets: row 33 begins at value -5"):
            lazy[30:35]
        with pytest.raises(ValueError, match="rows 30 to 33 would be values"):
            opened["a.weight"][30:33]
    stored["a.row_offsets"][0] = 1
    with safeload.open(write(tmp_path, stored)) as opened:
        with pytest.raises(FormatError, match="row_offsets: row 0 begins at value 1"):
            opened.get_slice("a.weight")[:2]
        with pytest.raises(ValueError, match="rows 0 to 2 would be values 1 to"):
            opened["a.weight"][:2]


def test_a_store_is_asked_for_the_rows_alone(tmp_path):
    values = dense((2000, 800), share=0.9)
    served = Served.folder(write(tmp_path, parts_of(values, "a")), head=4096)
    with safeload.open(served.at("mem://model")) as opened:
        del served.requests[:]
        assert_same(opened.get_slice("a.weight", dtype="bfloat16")[1500:1520], values[1500:1520])
        asked = sum(end - begin for _, begin, end in served.requests)
        assert asked < 200_000  # of nearly 3 MB
        assert_same(opened.load(dtype="bfloat16")["a.weight"], values)
