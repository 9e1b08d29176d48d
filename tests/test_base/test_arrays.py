"""What counts as an array and as a dict of arrays, asked of every function that takes either."""

import os
import subprocess
import sys
import types

import numpy as np
import pytest
from builders.inside import npy

import safeload
import safeload.gguf
import safeload.moon
from safeload import Layout, QuantizedTensor, StackedTensor
from safeload.numpy import load_file, save, save_file

W = np.ones((32, 32), np.float32)
HALF = W.astype(np.float16)
LAYOUT = Layout("one", [StackedTensor("w", "h.{}.w")])
BLOCKS = safeload.quantize(W, "q4_0")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({"w": W}, "w.safetensors")


def masked(array=W):
    array = np.ma.array(array, mask=np.zeros(array.shape, bool))
    array[0] = np.ma.masked
    return array


TAKE_ARRAYS = {
    "save_file": lambda x: save_file({"fine": W, "w": x}, "new"),
    "save": lambda x: save({"w": x}),
    "gguf": lambda x: safeload.gguf.save_file({"w": x}, "new"),
    "gguf, metadata": lambda x: safeload.gguf.save_file({}, "new", {"w": x.reshape(-1)}),
    "gguf, nested metadata": lambda x: safeload.gguf.save_file({}, "new", {"w": [[1], x.reshape(-1)]}),
    "moon": lambda x: safeload.moon.save_file({"w": x.astype(np.float16)}, "new"),
    "npz": lambda x: npy.write_archive({"w": x}, None, "new"),
    "npy": lambda x: npy.write({"w": x}, None, "new"),
    **{
        f"convert to {suffix}": lambda x, suffix=suffix: safeload.convert(
            {"w": x}, f"new.{suffix}", dtype="float16", overwrite=True
        )
        for suffix in ("safetensors", "gguf", "npz", "npy", "moon")
    },
    "convert, stacked": lambda x: safeload.convert({"h.0.w": x}, "new.npz", layout=LAYOUT, overwrite=True),
    "astype": lambda x: safeload.astype(x, "float16"),
    "quantize": lambda x: safeload.quantize(x, "int8"),
    "load_quantized": lambda x: safeload.load_quantized({"w": x}, "int8"),
    "quantization_error": lambda x: safeload.quantization_error(x, BLOCKS),
    "quantization_error of dicts": lambda x: safeload.quantization_error({"w": x}, {"w": BLOCKS}),
    "QuantizedTensor": lambda x: QuantizedTensor("int8", x.shape, x.astype(np.int8), np.ones((), np.float32)),
    "stack": lambda x: safeload.stack({"h.0.w": x}, LAYOUT),
    "stats": lambda x: safeload.stats(x),
    "stats of a dict": lambda x: safeload.stats({"w": x}),
    "diff": lambda x: safeload.diff({"w": x}, {"w": W}),
    "diff, second": lambda x: safeload.diff({"w": W}, {"w": x}),
    "validate": lambda x: safeload.check({"w": x}),
    "validate an array": lambda x: safeload.check(x),
    "load(out=)": lambda x: safeload.load("w.safetensors", out={"w": x}),
    "load_file(out=)": lambda x: load_file("w.safetensors", out={"w": x}),
    "astype(out=)": lambda x: safeload.astype(W, "float32", out=x),
    "dequantize(out=)": lambda x: BLOCKS.dequantize(out=x),
    "stack(out=)": lambda x: safeload.stack({"h.0.w": W[0]}, LAYOUT, out={"w": x[:1]}),
}


@pytest.mark.parametrize("call", TAKE_ARRAYS)
def test_masked_arrays_are_refused(call):
    """The hidden values would be saved, measured and compared as if they were not hidden."""
    with pytest.raises(TypeError, match=r"is a masked array, .*filled") as caught:
        TAKE_ARRAYS[call](masked())
    assert os.listdir() == ["w.safetensors"]
    assert any(word in str(caught.value) for word in ("'w'", "'h.0.w'", "the array", "out", "int8 data", "the value"))
    TAKE_ARRAYS[call](masked().filled(0))


def test_an_array_while_another_thread_imports_masked_arrays(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy.ma", types.ModuleType("numpy.ma"))
    for call in TAKE_ARRAYS.values():
        call(W)


def test_masks_without_a_hidden_value_and_the_masked_scalar_are_refused():
    for value in (np.ma.array([1.0, 2.0]), np.ma.masked, np.ma.array(1.0, mask=True)):
        with pytest.raises(TypeError, match="masked"):
            save_file({"w": value}, "new")


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize(
    "kind", [np.asmatrix, lambda x: x.view(np.recarray), lambda x: x.view(type("Own", (np.ndarray,), {}))]
)
def test_other_subclasses_are_arrays(kind):
    array = kind(np.arange(12.0).reshape(3, 4))
    for path, write in {
        "s": lambda path: save_file({"w": array}, path),
        "g": lambda path: safeload.gguf.save_file({"w": array}, path),
        "z": lambda path: npy.write_archive({"w": array}, None, path),
        "y": lambda path: npy.write({"w": array}, None, path),
    }.items():
        write(path)
        np.testing.assert_array_equal(next(iter(safeload.load(path).values())), np.asarray(array))


def test_a_mapped_array_is_an_array():
    np.save("m.npy", W)
    save_file({"w": np.load("m.npy", mmap_mode="r")}, "new")
    np.testing.assert_array_equal(load_file("new")["w"], W)


def test_numpys_masks_are_not_imported(tmp_path):
    code = "import sys, safeload; safeload.numpy.save({}); sys.exit('numpy.ma' in sys.modules and 'numpy.ma' not in B)"
    code = f"import sys, numpy; B = set(sys.modules); import safeload.numpy; {code}"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0


TAKE_DICTS = {
    "save_file": ("tensors", lambda x: save_file(x, "new")),
    "save": ("tensors", lambda x: save(x)),
    "save_file, metadata": ("metadata", lambda x: save_file({"w": W}, "new", x)),
    "save_file, quantized, metadata": ("metadata", lambda x: save_file({"w": BLOCKS}, "new", x)),
    "serialize": ("tensors", lambda x: safeload.serialize(x)),
    "serialize, metadata": ("metadata", lambda x: safeload.serialize({}, x)),
    "serialize_file": ("tensors", lambda x: safeload.serialize_file(x, "new")),
    "gguf": ("tensors", lambda x: safeload.gguf.save_file(x, "new")),
    "gguf, metadata": ("metadata", lambda x: safeload.gguf.save_file({"w": W}, "new", x)),
    "moon": ("tensors", lambda x: safeload.moon.save_file(x, "new")),
    "npz": ("tensors", lambda x: npy.write_archive(x, None, "new")),
    "npy": ("tensors", lambda x: npy.write(x, None, "new")),
    "load(out=)": ("out", lambda x: safeload.load("w.safetensors", out=x)),
    "load_file(out=)": ("out", lambda x: load_file("w.safetensors", out=x)),
    "stack(out=)": ("out", lambda x: safeload.stack({"h.0.w": W}, LAYOUT, out=x)),
}


@pytest.mark.parametrize(
    "value", [[W], (), 1, "text", b"bytes", W, {"w"}, object(), iter([])], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("call", TAKE_DICTS)
def test_what_is_no_mapping_is_named(call, value):
    what, function = TAKE_DICTS[call]
    with pytest.raises(TypeError, match=f"{what} must be a mapping of .*, got {type(value).__name__}"):
        function(value)
    assert os.listdir() == ["w.safetensors"]


def test_what_works_like_a_dict_is_taken():
    class Like:
        """A mapping that nobody registered."""

        def __init__(self):
            self._held = {"w": W}

        def __getattr__(self, name):
            return getattr(self._held, name)

        def __getitem__(self, name):
            return self._held[name]

        def __contains__(self, name):
            return name in self._held

        def __len__(self):
            return len(self._held)

        def __iter__(self):
            return iter(self._held)

    save_file(Like(), "new")
    npy.write_archive(Like(), None, "new.npz")
    for way in (safeload.open, np.load):
        with way("new.npz") as opened:
            save_file(opened, "new")
        np.testing.assert_array_equal(load_file("new")["w"], W)


@pytest.mark.parametrize("layout", [1, "moondream2", None, {"name": "x", "tensors": []}, [StackedTensor("a", "b")]])
def test_a_layout_is_a_layout(layout):
    with pytest.raises(TypeError, match=r"layout must be a safeload\.Layout, got"):
        safeload.stack({"h.0.w": W}, layout)
    if layout is not None:
        with pytest.raises(TypeError, match=r"layout must be a safeload\.Layout, got"):
            safeload.convert("w.safetensors", "new.npz", layout=layout)


def test_a_layout_is_made_of_stacked_tensors():
    with pytest.raises(TypeError, match="'x': tensors must be StackedTensor, got dict"):
        Layout("x", [{"name": "a", "source": "b"}])


def test_what_has_been_quantized_must_be_in_the_source():
    with pytest.raises(safeload.TensorNotFoundError, match="w; similar names: w2"):
        safeload.quantization_error({"w2": W}, {"w": BLOCKS})
    with pytest.raises(TypeError, match="a tensor name must be str, got int"):
        safeload.quantization_error({1: W}, {"w": BLOCKS})
