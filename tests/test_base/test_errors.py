"""What errors carry beside their message."""

import copy
import json
import pickle

import ml_dtypes
import numpy as np
import pytest
from builders import gguf_build

import safeload
from safeload import errors
from safeload.numpy import load_file, save_file

FAMILY = [
    kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.SafeloadError) and not name.startswith("_")
]


@pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.__name__)
def test_all_of_the_family_carry_path_offset_and_tensor(kind):
    plain = kind("what is wrong")
    assert (plain.path, plain.offset, plain.tensor) == (None, None, None)
    assert str(plain) == "what is wrong"
    full = kind("what is wrong", path="a/file", offset=7, tensor="w")
    for error in (full, pickle.loads(pickle.dumps(full)), copy.copy(full)):
        assert type(error) is kind
        assert (error.path, error.offset, error.tensor) == ("a/file", 7, "w")
        assert str(error) == str(full)
    assert ("a/file" in str(full)) == issubclass(kind, errors.FormatError)


def test_format_error_takes_path_and_offset_by_position():
    error = errors.FormatError("wrong", "file", 3)
    assert (error.path, error.offset, error.tensor) == ("file", 3, None)
    assert str(error) == "wrong (file, byte 3)"


def test_a_missing_tensor(tmp_path):
    save_file({"a": np.zeros(3)}, tmp_path / "x", durable=False)
    with pytest.raises(errors.TensorNotFoundError) as caught:
        load_file(tmp_path / "x", names=["b"])
    assert caught.value.tensor == "b"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.tensor, str(again)) == ("b", str(caught.value))


@pytest.mark.parametrize("dtype", [None, np.float64])
def test_a_file_that_ends_too_early(tmp_path, dtype):
    path = tmp_path / "x"
    save_file({f"t{k}": np.zeros(1000, np.float32) for k in range(9)}, path, durable=False)
    with safeload.open(path) as checkpoint:
        at = checkpoint.tensors["t5"].offset + 40
        with path.open("r+b") as file:
            file.truncate(at)
        for load in (lambda: checkpoint.load(backend="pread", dtype=dtype), lambda: checkpoint.get_slice("t5")[:]):
            with pytest.raises(errors.FormatError, match="tensor 't5'") as caught:
                load()
            assert (caught.value.path, caught.value.offset, caught.value.tensor) == (str(path), at, "t5")


def test_a_value_that_a_scheme_cannot_hold(tmp_path):
    x = np.ones((4, 32), np.float32)
    x[2, 5] = np.nan
    with pytest.raises(errors.RangeError, match="element") as caught:
        safeload.quantize(x, "int8")
    assert caught.value.tensor is None
    path = tmp_path / "x"
    save_file({"w": x}, path, durable=False)
    with pytest.raises(errors.RangeError, match=r"tensor 'w': element \[2, 5\]") as caught:
        safeload.load_quantized(path, "int8", keep=None)
    assert (caught.value.path, caught.value.tensor) == (str(path), "w")


def test_a_conversion_that_there_is_not(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_build.build((), [gguf_build.tensor("w", [256], 15, 0)], bytes(292)))  # Q8_K
    with pytest.raises(errors.UnsupportedError, match="tensor 'w': cannot convert Q8_K to F32") as caught:
        safeload.load(path, dtype="float32")
    assert (caught.value.path, caught.value.tensor) == (str(path), "w")


def test_codes_that_are_no_weights(tmp_path):
    path = tmp_path / "x"
    codes = {"w.qweight": np.zeros((4, 4), np.int32), "w.scales": np.ones((1, 4), np.float16)}
    save_file(codes, path, durable=False)
    with pytest.raises(errors.UnsupportedError, match="codes") as caught:
        safeload.load(path, dtype="float32")
    assert (caught.value.path, caught.value.tensor) == (str(path), "w.qweight")


def test_a_dtype_that_cannot_be_saved(tmp_path):
    with pytest.raises(errors.SafeloadError, match="cannot be saved") as caught:
        save_file({"w": np.zeros(3, "U4")}, tmp_path / "x")
    assert caught.value.tensor == "w"


SURROGATE = {"a\udc00": np.float16([1])}
REFUSED = {
    "safetensors: name": ("x.safetensors", SURROGATE),
    "safetensors: dtype": ("x.safetensors", {"w": np.array(["text"])}),
    "npz: name": ("x.npz", SURROGATE),
    "npz: NUL": ("x.npz", {"a\0": np.float16([1])}),
    "npz: long": ("x.npz", {"a" * 70_000: np.float16([1])}),
    "npz: dtype": ("x.npz", {"w": np.ones(2, ml_dtypes.bfloat16)}),
    "npz: scheme": ("x.npz", {"w": safeload.quantize(np.ones((2, 32), np.float32), "q4_0")}),
    "gguf: name": ("x.gguf", SURROGATE),
    "gguf: NUL": ("x.gguf", {"a\0": np.float16([1])}),
    "gguf: long": ("x.gguf", {"a" * 70_000: np.float16([1])}),
    "gguf: dims": ("x.gguf", {"w": np.ones((1,) * 5, np.float16)}),
    "gguf: dtype": ("x.gguf", {"w": np.ones(2, np.uint16)}),
    "gguf: small float": ("x.gguf", {"w": np.ones((2, 2), ml_dtypes.float8_e4m3fn)}),
    "gguf: int8": ("x.gguf", {"w": safeload.quantize(np.ones((2, 32), np.float32), "int8")}),
    "moon: name": ("x.moon", SURROGATE),
    "moon: long": ("x.moon", {"a" * 70_000: np.float16([1])}),
    "moon: dtype": ("x.moon", {"w": np.float32([1])}),
    "moon: dims": ("x.moon", {"w": np.ones((1,) * 17, np.float16)}),
    "moon: scheme": ("x.moon", {"w": safeload.quantize(np.ones((2, 32), np.float32), "q4_0")}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_writer_names_the_tensor_that_it_refuses(case, tmp_path):
    name, tensors = REFUSED[case]
    with pytest.raises(errors.SafeloadError) as caught:
        safeload.convert(tensors, tmp_path / name)
    assert caught.value.tensor == next(iter(tensors))


@pytest.mark.parametrize("shard", [3, "../a.safetensors", "b.safetensors"])
def test_an_index_that_is_wrong_about_a_tensor_names_it(shard, tmp_path):
    for name in "ab":
        safeload.convert({name: np.float32([1])}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(errors.FormatError) as caught:
        safeload.open(index)
    assert (caught.value.path, caught.value.tensor) == (str(index), "a")


def test_a_duplicate_in_a_list_of_files_is_named(tmp_path):
    for name in "ab":
        safeload.convert({"w": np.float32([1])}, tmp_path / f"{name}.safetensors")
    with pytest.raises(errors.FormatError) as caught:
        safeload.open([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    assert caught.value.tensor == "w"
