"""Rows by index: numpy's indexing of the loaded tensor, for every layout, reading little more than the rows."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from builders import torch_build
from builders.holes import extend
from builders.quantized import each_kind_with
from builders.random import rng
from builders.remote import Served
from builders.torch_build import Storage, tensor

import safeload
import safeload.numpy
from safeload import QuantizedTensor, UnsupportedError, quantize
from safeload.errors import FormatError, TensorNotFoundError

pytestmark = pytest.mark.any_python

COUNT = 37
WEIGHTS = {
    "f32": rng.standard_normal((COUNT, 5, 3)).astype(np.float32),
    "bf16": rng.standard_normal((COUNT, 64)).astype(ml_dtypes.bfloat16),
    "i8": rng.integers(-100, 100, (COUNT, 2), np.int8),
    "bool": rng.integers(0, 2, COUNT).astype(bool),
    "c64": np.arange(COUNT, dtype=np.complex64),
    "wide": rng.standard_normal((COUNT, 70_000)).astype(np.float16),
    "empty": np.empty((COUNT, 0), np.float32),
    "none": np.empty((0, 4), np.float32),
}

# Rows of a tensor with n of them, as a caller can write them.
SELECTIONS = {
    "list": lambda n: [3, 0, n - 1],
    "one": lambda n: [n // 2],
    "negative": lambda n: [-1, -n, 0],
    "duplicates": lambda n: [5, 5, 2, 5],
    "empty": lambda n: [],
    "empty array": lambda n: np.empty(0, np.uint8),
    "all": lambda n: range(n),
    "backwards": lambda n: range(n - 1, -1, -3),
    "mask": lambda n: np.arange(n) % 3 == 1,
    "list of bool": lambda n: [k % 4 == 0 for k in range(n)],
    "uint64": lambda n: np.array([n - 1, 1], np.uint64),
    "int8": lambda n: np.array([-2, 1], np.int8),
    "tuple": lambda n: (1, 2, 3, 7),
    "shuffled": lambda n: np.random.default_rng(n).permutation(n),
    "many": lambda n: np.random.default_rng(n).integers(-n, n, 500),
}
every_selection = pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS)


def fancy(array, rows):
    """What numpy makes of rows, empty lists included."""
    rows = np.asarray(rows)
    return array[rows if rows.size else np.empty(0, np.int64)]


def same(array, expected):
    return (array.dtype, array.shape) == (expected.dtype, expected.shape) and array.tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("take") / "weights.safetensors"
    safeload.numpy.save_file(WEIGHTS, path)
    return path


@every_selection
@pytest.mark.parametrize("name", [name for name in WEIGHTS if name != "none"])
def test_rows_are_those_of_the_loaded_tensor(name, select, path):
    with safeload.open(path) as checkpoint:
        rows = checkpoint.take(name, select(COUNT))
        assert same(rows, fancy(WEIGHTS[name], select(COUNT)))
        assert rows.flags.writeable
        assert rows.flags.c_contiguous
        rows[...] = 0
        assert same(checkpoint[name], WEIGHTS[name])


@every_selection
@pytest.mark.parametrize("dtype", ["float32", "bf16", "float8_e4m3fn"])
def test_rows_are_converted_as_load_converts(dtype, select, path):
    with safeload.open(path) as checkpoint:
        for name in ("f32", "bf16", "i8", "c64", "wide", "empty"):
            expected = fancy(checkpoint.load([name], dtype=dtype)[name], select(COUNT))
            assert same(checkpoint.take(name, select(COUNT), dtype), expected)


def test_a_tensor_without_rows_has_none_to_take(path):
    with safeload.open(path) as checkpoint:
        assert checkpoint.take("none", []).shape == (0, 4)
        assert checkpoint.take("none", np.empty(0, bool)).shape == (0, 4)
        with pytest.raises(IndexError, match="tensor 'none': row 0 is out of range: it has no rows"):
            checkpoint.take("none", [0])


def taken_as_stored(checkpoint, name, rows):
    """Rows, or the error."""
    try:
        return checkpoint.take(name, rows)
    except UnsupportedError as error:
        return error


@each_kind_with("select", {name: SELECTIONS[name] for name in ("list", "duplicates", "empty", "all", "mask", "many")})
def test_rows_of_quantized_checkpoints_are_those_of_the_loaded_tensors(fixture, select):
    with safeload.open(fixture.path) as checkpoint:
        for name, info in checkpoint.tensors.items():
            if not info.shape or info.shape[0] < 6:
                continue
            try:
                whole = checkpoint.load([name], dtype="float32")[name]
            except UnsupportedError:  # codes that only their library decodes
                with pytest.raises(UnsupportedError):
                    checkpoint.take(name, [0], "float32")
                continue
            rows = select(len(whole))
            expected = fancy(whole, rows)
            assert same(checkpoint.take(name, rows, "float32"), expected), name
            stored = taken_as_stored(checkpoint, name, rows)
            if isinstance(stored, UnsupportedError):
                assert f"tensor {name!r}: rows of {info.dtype} " in str(stored)
                assert "pass dtype=" in str(stored)
                assert info.parts
                continue
            assert stored.shape == expected.shape
            stored = stored.dequantize() if isinstance(stored, QuantizedTensor) else stored
            assert np.array_equal(np.asarray(stored, np.float32), expected, equal_nan=True), name


@pytest.mark.parametrize("scheme", ["q8_0", "q4_0", "int8"])
def test_rows_of_our_own_quantized_tensors_stay_quantized(scheme, tmp_path):
    x = rng.standard_normal((COUNT, 3, 64)).astype(np.float32)
    q = quantize(x, scheme, **({"axis": 0} if scheme == "int8" else {}))
    safeload.convert({"w": q, "v": quantize(x[0, 0], "q8_0")}, tmp_path / "q.safetensors")
    with safeload.open(tmp_path / "q.safetensors") as checkpoint:
        for select in SELECTIONS.values():
            rows = select(COUNT)
            taken = checkpoint.take("w", rows)
            assert isinstance(taken, QuantizedTensor)
            assert taken.scheme == scheme
            assert same(taken.dequantize(), fancy(q.dequantize(), rows))
            assert same(checkpoint.take("w", rows, "float16"), fancy(q.dequantize("float16"), rows))
        assert same(checkpoint.take("v", [63, 0, 33], "float32"), checkpoint["v"].dequantize()[[63, 0, 33]])
        with pytest.raises(
            UnsupportedError, match="tensor 'v': rows of q8_0 are taken in whole blocks of 32; pass dtype="
        ):
            checkpoint.take("v", [1])


def test_blocks_of_scales_are_taken_whole_or_converted(tmp_path):
    codes = rng.standard_normal((300, 256)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random((3, 2)).astype(np.float32) + 0.5
    safeload.numpy.save_file({"w.weight": codes, "w.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with safeload.open(tmp_path) as checkpoint:
        whole = checkpoint["w.weight"].dequantize()
        for rows in ([*range(128, 256), *range(128)], [*range(256, 300)], [*range(128), *range(256, 300)]):
            assert same(checkpoint.take("w.weight", rows).dequantize(), whole[rows])
        for rows in ([0], [*range(256, 300), *range(128)], [*range(127)], [*range(128)][::-1]):
            with pytest.raises(UnsupportedError, match="in whole blocks of 128; pass dtype="):
                checkpoint.take("w.weight", rows)
            assert same(checkpoint.take("w.weight", rows, "float32"), whole[rows])


def test_elements_that_share_bytes_are_decoded(tmp_path):
    raw = rng.integers(0, 256, 4 * 6 // 2, np.uint8)
    places = {"f4": ([4, 6], [0, 12]), "odd": ([6, 3], [12, 21]), "flat": ([10], [21, 26])}
    tensors = {name: {"dtype": "F4", "shape": s, "data_offsets": at} for name, (s, at) in places.items()}
    header = json.dumps(tensors).encode()
    data = struct.pack("<Q", len(header)) + header + raw.tobytes() + bytes(range(14))
    (tmp_path / "f4.safetensors").write_bytes(data)
    with safeload.open(tmp_path / "f4.safetensors") as checkpoint:
        values = checkpoint.load(dtype="float32")
        assert same(checkpoint.take("f4", [3, 1, 3]), checkpoint["f4"][[3, 1, 3]])
        for name, rows in (("f4", [3, 1, 3]), ("odd", [5, 0, 3]), ("flat", [9, 9, 0, 4])):
            assert same(checkpoint.take(name, rows, "float32"), values[name][rows])
        for name in ("odd", "flat"):
            with pytest.raises(UnsupportedError, match="whole blocks of 2; pass dtype="):
                checkpoint.take(name, [1])


@pytest.mark.parametrize("order", ["little", "big"])
def test_rows_of_strided_and_big_endian_tensors(order, tmp_path):
    base = np.arange(40 * 30, dtype=np.float32)
    storage = Storage("0", base)
    value = {
        "dense": tensor(storage, (40, 30)),
        "transposed": tensor(storage, (30, 40), (1, 30)),
        "every second": tensor(storage, (20, 30), (60, 1)),
        "columns": tensor(storage, (40, 10), (30, 3), 1),
        "repeated": tensor(storage, (40, 30), (0, 1)),
    }
    (tmp_path / "w.pt").write_bytes(torch_build.zip_file(value, order=order))
    with safeload.open(tmp_path / "w.pt") as checkpoint:
        arrays = checkpoint.load()
        for name, array in arrays.items():
            for select in SELECTIONS.values():
                rows = select(len(array))
                assert same(checkpoint.take(name, rows), fancy(np.ascontiguousarray(array), rows)), name
                expected = fancy(np.ascontiguousarray(array), rows).astype(np.float16)
                assert same(checkpoint.take(name, rows, "float16"), expected), name


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([COUNT], IndexError, r"tensor 'f32': row 37 is out of range: expected -37 to 36 \(element 0 of rows\)"),
        ([0, -COUNT - 1], IndexError, "row -38 is out of range: .*element 1 of rows"),
        ([1 << 80], IndexError, "out of range"),
        (np.array([1 << 63], np.uint64), IndexError, "row 9223372036854775808 is out of range"),
        (range(0, 1 << 80, 1 << 79), IndexError, "out of range"),
        (np.ones(COUNT - 1, bool), IndexError, "the mask must have 37 elements, got 36"),
        ([True], IndexError, "the mask must have 37"),
        ([1.0], TypeError, "tensor 'f32': rows must be integers or a boolean mask, got float64"),
        (["a"], TypeError, "rows must be integers or a boolean mask"),
        ([None], TypeError, "rows must be integers, got NoneType"),
        ([[1, 2]], TypeError, "rows must have 1 axis, got 2"),
        (3, TypeError, r"rows must be a list, an integer array or a mask, got int: get_slice\(name\)"),
        (np.int64(3), TypeError, "got int64"),
        (slice(2), TypeError, "got slice"),
        ("12", TypeError, "got str"),
        (None, TypeError, "got NoneType"),
    ],
)
def test_other_rows_are_refused_by_name(rows, error, message, path):
    with safeload.open(path) as checkpoint, pytest.raises(error, match=message):
        checkpoint.take("f32", rows)


def test_what_has_no_rows_is_refused(tmp_path):
    safeload.numpy.save_file({"s": np.float32(3).reshape(())}, tmp_path / "a.safetensors")
    checkpoint = safeload.open(tmp_path / "a.safetensors")
    with pytest.raises(UnsupportedError, match="tensor 's' has no axes, so it has no rows"):
        checkpoint.take("s", [0])
    with pytest.raises(TensorNotFoundError, match="tensor t"):
        checkpoint.take("t", [0])
    with pytest.raises(TypeError):
        checkpoint.take("s", [0], "no dtype")
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.take("s", [0])


def test_a_file_that_was_cut_is_an_error(path, tmp_path):
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes())
    with safeload.open(cut) as checkpoint:
        last = max(checkpoint.tensors.values(), key=lambda info: info.offset + info.nbytes)
        with cut.open("r+b") as file:
            file.truncate(last.offset + last.nbytes // 2)
        checkpoint.take(last.name, [0])
        with pytest.raises(FormatError):
            checkpoint.take(last.name, [0, COUNT - 1])


def test_rows_of_a_remote_tensor_are_few_requests_of_few_bytes(path):
    served = Served({"mem://m/w.safetensors": path.read_bytes()})
    with safeload.open(served.at("mem://m/w.safetensors")) as checkpoint:
        for rows, requests, most in (([30, 2, 2], 2, 2 * 140_000), ([4, 5, 6], 1, 3 * 140_000), ([], 0, 0)):
            served.requests.clear()
            assert same(checkpoint.take("wide", rows), fancy(WEIGHTS["wide"], rows))
            assert len(served.requests) <= requests
            assert served.nbytes() <= most
        served.requests.clear()
        checkpoint.take("f32", range(0, COUNT, 2))
        assert len(served.requests) <= 1


def test_rows_of_remote_packed_tensors_read_their_rows_only():
    from builders.quantized import FIXTURES

    fixture = FIXTURES["modelopt_nvfp4_experts"]
    served = Served.folder(fixture.path, head=0)
    with safeload.open(fixture.path) as local, safeload.open(served.at("mem://model")) as checkpoint:
        for name, info in checkpoint.tensors.items():
            if info.parts and len(info.shape) == 2:
                served.requests.clear()
                assert same(checkpoint.take(name, [3, 1], "float32"), local.load([name], dtype="float32")[name][[3, 1]])
                assert served.nbytes() < info.nbytes


def test_a_thousand_rows_of_8_gb_take_the_memory_of_the_rows(tmp_path):
    import tracemalloc

    shape, nbytes = [2_000_000, 2000], 8_000_000_000
    header = f'{{"w":{{"dtype":"F16","shape":{shape},"data_offsets":[0,{nbytes}]}}}}'.encode()
    with (tmp_path / "large.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        extend(file, 8 + len(header) + nbytes)
    rows = rng.integers(0, 2_000_000, 1000)
    with safeload.open(tmp_path / "large.safetensors") as checkpoint:
        tracemalloc.start()
        try:
            taken = checkpoint.take("w", rows)
            assert tracemalloc.get_traced_memory()[1] < 3 * taken.nbytes + (1 << 20)
        finally:
            tracemalloc.stop()
        assert taken.shape == (1000, 2000)
        assert not taken.any()


def test_a_million_elements_are_read_in_blocks(tmp_path):
    array = np.arange(3_000_000, dtype=np.int32)
    safeload.numpy.save_file({"w": array}, tmp_path / "w.safetensors")
    rows = rng.integers(0, len(array), 1_000_000)
    with safeload.open(tmp_path / "w.safetensors") as checkpoint:
        assert same(checkpoint.take("w", rows), array[rows])
        served = Served({"mem://m/w.safetensors": (tmp_path / "w.safetensors").read_bytes()}, head=1000)
    with safeload.open(served.at("mem://m/w.safetensors")) as checkpoint:
        served.requests.clear()
        assert same(checkpoint.take("w", rows), array[rows])
        assert len(served.requests) <= 4
