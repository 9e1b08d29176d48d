"""GGUF tensors that ComfyUI-GGUF divides into rows of 256: every way in shows the original shapes."""

import copy
import pickle

import numpy as np
import pytest

import safeload
from safeload import SafeloadError, gguf

KEY = "comfy.gguf.orig_shape."
SHAPES = {
    "conv.weight": (64, 4, 3, 3),
    "lin.weight": (64, 320),
    "video.weight": (16, 4, 2, 2, 1),
    "norm.weight": (2304,),
}
SCHEMES = [None, "q8_0", "q4_0", "q5_1", "q4_k", "q6_k", "iq4_nl"]


@pytest.fixture(params=SCHEMES)
def stored(request, tmp_path, monkeypatch):
    """A file of one type, and its values in their original shapes."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(7)
    tensors, values, metadata = {}, {}, {"general.architecture": "sdxl"}
    for name, shape in SHAPES.items():
        rows = random.standard_normal((np.prod(shape) // 256, 256)).astype(np.float32)
        tensors[name] = rows if request.param is None else safeload.quantize(rows, request.param)
        dequantized = rows if request.param is None else tensors[name].dequantize()
        values[name] = dequantized.reshape(shape)
        metadata[KEY + name] = np.int32(shape)
    gguf.save_file(tensors, "x.gguf", metadata)
    return tensors, values


def same(array, expected):
    array = np.asarray(array)
    assert array.shape == expected.shape
    assert np.array_equal(array, expected)


def test_every_way_in_shows_the_original_shapes(stored):
    _, values = stored
    with safeload.open("x.gguf") as file:
        assert {name: info.shape for name, info in file.tensors.items()} == SHAPES
        again = pickle.loads(pickle.dumps(file)), copy.copy(file)
        for name, value in values.items():
            same(file[name], value)
            same(file.load([name], dtype="float32")[name], value)
            same(file.get_slice(name)[:], value)
            same(file.get_slice(name)[3:9], value[3:9])
            same(file.get_slice(name)[5], value[5])
            same(file.take(name, [1, 5, 3], dtype="float32"), value[[1, 5, 3]])
            for other in again:
                same(other[name], value)
        for dtype in (None, "float32"):
            for name, array in file.stream(dtype=dtype):
                same(array, values[name])
        out = {name: np.empty(value.shape, np.float32) for name, value in values.items()}
        file.load(dtype="float32", out=out)
        for name, array in out.items():
            same(array, values[name])
    for name, array in safeload.load("x.gguf").items():
        same(array, values[name])
    assert safeload.info("x.gguf")


def test_operations_see_the_original_shapes(stored):
    _, values = stored
    assert not safeload.check("x.gguf").errors
    assert not safeload.diff("x.gguf", values).unequal
    stats = safeload.stats("x.gguf")
    for name, value in values.items():
        assert stats[name].mean == pytest.approx(value.mean(dtype=np.float64), abs=1e-6)
    safeload.convert("x.gguf", "y.npz", dtype="float32")
    for name, array in safeload.load("y.npz").items():
        same(array, values[name])


def test_the_rows_of_the_file_are_there_on_request(stored):
    tensors, _ = stored
    with safeload.open("x.gguf", stored=True) as file:
        for name, tensor in tensors.items():
            same(file[name], np.asarray(tensor))
    safeload.convert("x.gguf", "raw.safetensors", raw=True)
    assert safeload.open("raw.safetensors").tensors["conv.weight"].shape == (9, 256)


@pytest.mark.parametrize("opened", [False, True])
def test_a_copy_has_the_same_bytes(stored, opened):
    if opened:
        with safeload.open("x.gguf") as file:
            safeload.convert(file, "y.gguf")
    else:
        safeload.convert("x.gguf", "y.gguf")
    with open("x.gguf", "rb") as a, open("y.gguf", "rb") as b:
        assert a.read() == b.read()


def test_blocks_that_cross_rows_are_saved_with_their_shape_or_refused(stored):
    tensors, values = stored
    with safeload.open("x.gguf") as file:
        loaded, metadata = file.load(["conv.weight"]), file.metadata
        if isinstance(tensors["conv.weight"], np.ndarray):
            pytest.skip("blocks only")
        gguf.save_file(loaded, "y.gguf", metadata)
        same(safeload.load("y.gguf")["conv.weight"], values["conv.weight"])
        with pytest.raises(SafeloadError, match=f"readers need {KEY}conv.weight"):
            gguf.save_file(loaded, "z.gguf", {})
        with pytest.raises(SafeloadError, match="blocks cross its rows: dequantize it"):
            safeload.save(loaded, "z.safetensors")


@pytest.mark.parametrize(
    "shape", [np.int32([3, 3]), np.int32([-1, -2304]), np.int64([64, 36]), "64 x 36", np.uint32(2304)]
)
def test_a_shape_that_does_not_fit_closes_no_file(tmp_path, shape):
    rows = np.ones((9, 256), np.float32)
    metadata = {
        "general.architecture": "sdxl",
        KEY + "a": shape,
        KEY + "b": np.int32([64, 4, 3, 3]),
        KEY + "c": np.int32([1]),
    }
    gguf.save_file({"a": rows, "b": rows}, tmp_path / "x.gguf", metadata)
    loaded = safeload.load(tmp_path / "x.gguf")
    assert loaded["a"].shape == (9, 256)
    assert loaded["b"].shape == (64, 4, 3, 3)
    assert [(finding.code, finding.tensor) for finding in safeload.check(tmp_path / "x.gguf").errors] == [
        ("gguf.shape", "a")
    ]


@pytest.mark.parametrize("target", ["y.npz", "y.safetensors", "folder/"])
@pytest.mark.parametrize("shape", [np.int32([3, 3]), np.int32([-1, -2304]), "64 x 36", np.zeros(0, np.int32)])
def test_a_shape_that_does_not_fit_is_the_fault_of_its_tensor(shape, target, tmp_path):
    rows, target = np.ones((9, 256), np.float32), str(tmp_path / target)
    metadata = {"general.architecture": "sdxl", KEY + "a": shape, KEY + "b": np.int32([64, 4, 3, 3])}
    path = tmp_path / "x.gguf"
    gguf.save_file({"a": rows, "b": rows}, path, metadata)
    for options in ({}, {"only": "*"}, {"names": ["a"]}, {"dtype": "float16"}):
        with pytest.raises(safeload.FormatError, match=r"tensor 'a': .*orig_shape\.a'.*drop="):
            safeload.convert(path, target, **options)
    for options in ({"drop": "a"}, {"only": "b"}, {"names": iter(["b"])}):
        safeload.convert(path, target, overwrite=True, **options)
        same(safeload.load(target)["b"], rows.reshape(64, 4, 3, 3))
    with pytest.raises(safeload.TensorNotFoundError):
        safeload.convert(path, target, overwrite=True, drop="nothing")
