"""bitsandbytes: shapes, blocks and dtypes of storage beyond those of the fixtures, against its arithmetic in numpy."""

import json
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.inside import restore
from builders.thorough import part_of

import safeload
from safeload import QuantizedTensor, TensorNotFoundError, UnsupportedError
from safeload.numpy import load_file, save_file

CONFIG = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
STORAGE = (np.uint8, np.int8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int64)


def four_bits(shape, block=64, nested=0, storage=np.uint8, name="w", kind="nf4"):
    """Random codes of a tensor as bitsandbytes stores them, and their values."""
    rng = np.random.default_rng([*shape, block, nested])
    count = math.prod(shape)
    element = np.dtype(storage).itemsize
    size = math.ceil(count / 2 / element) * element
    codes, scales = rng.integers(0, 256, size, np.uint8), rng.random(-(-count // block), np.float32)
    table = rng.normal(size=16).astype(np.float32)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    tensors = {name: codes.view(storage)[:, None], f"{name}.absmax": scales, f"{name}.quant_map": table}
    if nested:
        stored = rng.integers(0, 256, scales.size, np.uint8)
        numbers, own = rng.normal(size=256).astype(np.float32), rng.random(-(-scales.size // nested), np.float32)
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 0.1}
        tensors |= {f"{name}.absmax": stored, f"{name}.nested_absmax": own, f"{name}.nested_quant_map": numbers}
        scales = numbers[stored] * own.repeat(nested)[: stored.size] + np.float32(0.1)
    tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    nibbles = np.stack([codes >> 4, codes & 15], -1).reshape(-1)[:count]
    return tensors, (table[nibbles] * scales.repeat(block)[:count]).reshape(shape)


def write(folder, tensors, config=CONFIG):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", durable=False)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


SHAPES = (
    (), (0,), (1,), (63,), (64,), (65,), (1000,), (0, 64), (64, 0), (3, 0, 5), (1, 1), (7, 9), (5, 64), (4, 48),
    (3, 4, 40), (2, 3, 128), (2, 2, 3, 24), (130, 66), (1, 4096),
)  # fmt: skip


@pytest.mark.parametrize(("block", "nested"), [(64, 0), (32, 4), (128, 256)])
def test_every_shape_has_the_values_of_the_flat_tensor(block, nested, tmp_path):
    tensors, want = {}, {}
    for k, shape in enumerate(SHAPES):
        some, want[f"w{k}"] = four_bits(shape, block, nested, STORAGE[k % len(STORAGE)], f"w{k}")
        tensors |= some
    folder = write(tmp_path / "x", tensors)
    got = safeload.load(folder, dtype="float32")
    assert got.keys() == want.keys()
    with safeload.open(folder) as opened:
        for name, values in want.items():
            np.testing.assert_array_equal(got[name], values, strict=True)
            np.testing.assert_array_equal(opened[name].dequantize(), values, strict=True)
            assert opened.tensors[name].dtype == f"nf4 b{block}"
            if values.ndim == 0:
                continue
            rows = opened.get_slice(name)
            for index in (
                0,
                -1,
                slice(1, None),
                slice(None, None, -2),
                slice(2, 2),
                slice(1, 3),
                ...,
                (slice(None), None),
            ):
                try:
                    part = values[index]
                except IndexError:
                    with pytest.raises(IndexError):
                        rows[index]
                    continue
                np.testing.assert_array_equal(rows[index], part)
    safeload.convert(folder, tmp_path / "one.safetensors")
    for name, values in safeload.load(tmp_path / "one.safetensors", dtype="float32").items():
        np.testing.assert_array_equal(values, want[name], strict=True)


@pytest.mark.parametrize("nested", [0, 4])
def test_rows_are_sliced_where_blocks_begin(nested, tmp_path):
    for k, shape in enumerate(((40, 64), (40, 24), (130,), (6, 4, 16), (5, 27))):
        for storage in part_of([np.uint8, np.float64], k + bool(nested), 2):
            tensors, want = four_bits(shape, 32, nested, storage)
            folder = tmp_path / str(len(list(tmp_path.iterdir())))  # Windows does not replace mapped files
            folder.mkdir()
            value = safeload.load(write(folder, tensors))["w"]
            taken = 0
            for begin in range(shape[0] + 1):
                for end in {begin, min(begin + 5, shape[0]), shape[0]}:
                    each = math.prod(shape[1:])
                    unit = 32 * nested if nested else 32
                    if begin * each % unit or (end * each % unit and end != shape[0]):
                        with pytest.raises(ValueError, match=rf"rows {begin} to {end} of nf4 b32 are not whole blocks"):
                            value[begin:end]
                        continue
                    rows = value[begin:end]
                    taken += end > begin
                    np.testing.assert_array_equal(rows.dequantize(), want[begin:end], strict=True)
                    np.testing.assert_array_equal(rows[:].dequantize(), want[begin:end])
                    assert pickle.loads(pickle.dumps(rows)) == rows
                    if begin:
                        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
                        save_file({"w": rows}, path, durable=False)
                        again = safeload.load(path)["w"]
                        np.testing.assert_array_equal(again.dequantize(), want[begin:end], strict=True)
            assert taken, shape


def test_without_a_config_names_are_enough(tmp_path):
    tensors, want = four_bits((7, 9), storage=ml_dtypes.bfloat16, kind="fp4")
    save_file(tensors, tmp_path / "x.safetensors")
    np.testing.assert_array_equal(safeload.load(tmp_path / "x.safetensors", dtype="float32")["w"], want)
    with safeload.open(tmp_path / "x.safetensors") as opened:
        assert opened.tensors.keys() == {"w"}
        assert opened.tensors["w"].dtype == "fp4 b64"
        with pytest.raises(TensorNotFoundError, match="is a part of 'w'"):
            opened["w.absmax"]
    with pytest.raises(UnsupportedError, match="'w' holds BF16 codes"):
        load_file(tmp_path / "x.safetensors", dtype="float32")


@pytest.mark.parametrize(("order", "name"), [(1, "col32"), (2, "col_turing"), (3, "col_ampere"), (9, "9")])
def test_orders_of_old_gpus_are_refused(order, name, tmp_path):
    tensors = {
        "w.weight": np.ones((4, 32), np.int8),
        "w.SCB": np.ones(4, np.float32),
        "w.weight_format": np.uint8(order),
    }
    folder = write(tmp_path, tensors, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}})
    with safeload.open(folder) as opened:
        assert opened.load().keys() == tensors.keys()
        with pytest.raises(UnsupportedError, match=r"'w.weight' holds I8 codes, whose scale is 'w.SCB'"):
            opened.load(dtype="float32")


def test_int8_without_a_format_and_with_a_column_of_scales(tmp_path):
    codes = np.arange(-64, 64, dtype=np.int8).reshape(4, 32)
    scales = np.float32([[1], [0.3], [7], [0]])
    save_file({"w.weight": codes, "w.SCB": scales}, tmp_path / "x.safetensors")
    want = codes.astype(np.float32) * scales * np.float32(1 / 127)
    packed = safeload.load(tmp_path / "x.safetensors")["w.weight"]
    assert isinstance(packed, QuantizedTensor)
    assert packed.scheme == "int8 row"
    np.testing.assert_array_equal(packed.dequantize(), want)
    np.testing.assert_array_equal(packed[1:3].dequantize(), want[1:3])


def test_a_flat_tensor_is_divided(tmp_path, monkeypatch):
    """One row of blocks: in ranges of columns, whose scales are all that is in memory."""
    tensors, want = four_bits((3126, 96), 64, 16)
    folder = write(tmp_path, tensors)
    inside.tune(monkeypatch, grid_bytes=4096)
    with safeload.open(folder) as opened:
        packed = opened.weight_files[0].table.packed.get(0).packing
        ranges = list(restore.ranges_of(packed))
        assert len(ranges) == 5
        assert [one.column for one in ranges] == [65536 * k for k in range(5)]
        assert sum(one.columns for one in ranges) == 300_096
        for dtype in ("float32", "float16"):
            np.testing.assert_array_equal(opened.load(dtype=dtype)["w"], want.astype(dtype))
        value = opened["w"]
        np.testing.assert_array_equal(value.dequantize(), want)
        quantized = safeload.load_quantized(opened, "q8_0", requantize=True)["w"]
    np.testing.assert_array_equal(quantized.data, safeload.quantize(want, "q8_0").data)


def test_wide_codes_of_a_shard_opened_alone_are_refused(tmp_path):
    """What says that they are codes is in the other shard: the index names it."""
    tensors, _ = four_bits((8, 64), storage=ml_dtypes.bfloat16)
    first = {"w": tensors.pop("w"), "other": np.zeros(3, np.uint8)}
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": tensors}
    for file, content in files.items():
        save_file(content, tmp_path / file)
    weight_map = {name: file for file, content in files.items() for name in content}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        UnsupportedError, match=r"'w' holds BF16 codes, whose scale is 'w.quant_state.bitsandbytes__nf4'"
    ):
        safeload.load(tmp_path / "model-00001-of-00002.safetensors", dtype="float32")
    with pytest.raises(UnsupportedError, match="'w' holds BF16 codes"):
        load_file(tmp_path / "model-00001-of-00002.safetensors", dtype="float32")
    assert safeload.load(tmp_path, dtype="float32")["w"].shape == (8, 64)
