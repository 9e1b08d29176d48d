"""Layouts, stacking, and Moondream's layout."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from builders.models import moondream
from builders.random import rng

import safeload
from safeload import Layout, StackedTensor, quantize, stack
from safeload.layouts import MOONDREAM2
from safeload.numpy import save_file

pytestmark = pytest.mark.any_python

FLOATS = [
    *(np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]
LAYOUT = Layout(
    "tiny",
    [
        StackedTensor("w", "layers.{}.w.weight", transpose=True),
        StackedTensor("plain", "layers.{}.w.weight"),
        StackedTensor("b", "layers.{}.w.bias"),
        StackedTensor("embed", "embed.weight"),
        StackedTensor("turned", "embed.weight", transpose=True),
    ],
)


def model(layers=3, dtype=np.float32, rows=130, columns=70):
    tensors = {"embed.weight": rng.standard_normal((11, 7)).astype(dtype), "unused": np.arange(3)}
    for k in range(layers):
        tensors[f"layers.{k}.w.weight"] = rng.standard_normal((rows, columns)).astype(dtype)
        tensors[f"layers.{k}.w.bias"] = rng.standard_normal(columns).astype(dtype)
    return tensors


def expected(tensors, layers, dtype):
    weights = [tensors[f"layers.{k}.w.weight"].astype(dtype) for k in range(layers)]
    return {
        "w": np.stack([w.T for w in weights]),
        "plain": np.stack(weights),
        "b": np.stack([tensors[f"layers.{k}.w.bias"].astype(dtype) for k in range(layers)]),
        "embed": tensors["embed.weight"].astype(dtype),
        "turned": tensors["embed.weight"].T.astype(dtype),
    }


def same(got, want):
    assert list(got) == list(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype, name
        assert got[name].flags.c_contiguous
        assert got[name].shape == array.shape, name
        assert got[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("target", [None, np.float32, np.float16])
def test_stacks_are_numpys(tmp_path, dtype, target):
    tensors = model(12, dtype)
    file = tmp_path / "m.safetensors"
    save_file(tensors, file)
    want = expected(tensors, 12, dtype)
    if target is not None:
        want = {name: safeload.astype(array, target) for name, array in want.items()}
    for source in (file, str(file), safeload.open(file), tensors):
        got = stack(source, LAYOUT, dtype=target)
        same(got, want)
        assert got.left_out == ("unused",)


def test_any_number_of_threads_gives_the_same_bytes(tmp_path):
    tensors = model(4, ml_dtypes.bfloat16, 1500, 1111)
    save_file(tensors, tmp_path / "m.safetensors")
    want = expected(tensors, 4, np.float32)
    for threads in (1, 2, 3, 8):
        seen = []
        got = stack(tmp_path, LAYOUT, dtype="float32", threads=threads, progress=lambda *of, seen=seen: seen.append(of))
        same(got, want)
        assert seen[-1][0] == seen[-1][1] > 0, threads


def test_out_is_filled_or_refused_untouched():
    tensors = model()
    out = {name: np.full_like(array, 7) for name, array in stack(tensors, LAYOUT).items()}
    got = stack(tensors, LAYOUT, out=out)
    assert all(got[name] is out[name] for name in out)
    same(got, expected(tensors, 3, np.float32))
    for change, fragment in (
        (lambda o: o.pop("b"), "no array for 'b'"),
        (lambda o: o.update(x=o["b"]), "'x' is not a tensor of this layout"),
        (lambda o: o.update(b=o["b"].astype(np.float64)), "'b': out must be a NumPy array of float32"),
        (lambda o: o.update(w=o["w"].swapaxes(1, 2)), "'w': out must be a NumPy array"),
    ):
        wrong = {name: np.full_like(array, 7) for name, array in out.items()}
        change(wrong)
        with pytest.raises(ValueError, match=fragment):
            stack(tensors, LAYOUT, out=wrong)
        assert all((array == 7).all() for array in wrong.values())


def test_ten_layers_are_in_the_order_of_their_numbers():
    tensors = {f"l.{k}": np.float32([k]) for k in reversed(range(11))}
    np.testing.assert_array_equal(stack(tensors, Layout("l", [StackedTensor("l", "l.{}")]))["l"][:, 0], np.arange(11))


@pytest.mark.parametrize(
    ("change", "kind", "fragment"),
    [
        (
            lambda t: t.pop("layers.1.w.bias"),
            KeyError,
            "'b': layer 1 of 3 is missing: no tensor 'layers.1.w.bias'",
        ),
        (lambda t: t.pop("layers.2.w.bias"), KeyError, "'b': layer 2 of 3 is missing"),
        (lambda t: t.pop("embed.weight"), KeyError, "'embed': no tensor 'embed.weight'"),
        (
            lambda t: [t.pop(f"layers.{k}.w.bias") for k in range(3)],
            KeyError,
            "'b': no tensor matches 'layers.{}.w.bias' with a layer number",
        ),
        (
            lambda t: t.update({"layers.2.w.weight": np.zeros((130, 71), np.float32)}),
            safeload.SafeloadError,
            r"'layers.0.w.weight' has shape \[130, 70\], but 'layers.2.w.weight' has \[130, 71\]",
        ),
        (
            lambda t: t.update({"layers.1.w.bias": t["layers.1.w.bias"].astype(np.float16)}),
            safeload.SafeloadError,
            "'layers.0.w.bias' is float32, but 'layers.1.w.bias' is float16: pass dtype=",
        ),
        (
            lambda t: t.update({f"layers.{k}.w.weight": np.zeros((2, 2, 2), np.float32) for k in range(3)}),
            safeload.UnsupportedError,
            r"shape \[2, 2, 2\]: only matrices can be transposed",
        ),
        (
            lambda t: t.update({"embed.weight": quantize(np.ones((11, 7)), "int8")}),
            safeload.UnsupportedError,
            "'embed.weight' is int8: pass dtype= to stack",
        ),
    ],
)
def test_what_cannot_be_stacked(change, kind, fragment):
    tensors = model()
    change(tensors)
    with pytest.raises(kind, match=fragment) as caught:
        stack(tensors, LAYOUT)
    assert kind is not safeload.UnsupportedError or caught.value.tensor in tensors


def test_dtypes_that_differ_are_converted_to_one():
    tensors = model()
    tensors["layers.1.w.weight"] = tensors["layers.1.w.weight"].astype(np.float16)
    tensors["layers.2.w.weight"] = np.asfortranarray(tensors["layers.2.w.weight"].astype(">f8"))
    want = expected(tensors, 3, np.float32)
    same(stack(tensors, LAYOUT, dtype="float32"), want)


def test_quantized_tensors_are_restored(tmp_path):
    tensors = {f"l.{k}": quantize(rng.standard_normal((64, 32)), s) for k, s in enumerate(("q4_0", "int8", "q8_0"))}
    layout = Layout("l", [StackedTensor("l", "l.{}", transpose=True)])
    want = np.stack([t.dequantize().T for t in tensors.values()])
    np.testing.assert_array_equal(stack(tensors, layout, dtype="float32")["l"], want)
    save_file(tensors, tmp_path / "q.safetensors")
    np.testing.assert_array_equal(stack(tmp_path / "q.safetensors", layout, dtype="float32")["l"], want)


def test_a_file_that_shrinks(tmp_path):
    tensors = model(3, np.float16, 500, 500)
    file = tmp_path / "m.safetensors"
    save_file(tensors, file)
    with safeload.open(file) as opened:
        os.truncate(file, os.path.getsize(file) - 300_000)
        with pytest.raises(safeload.FormatError) as caught:
            stack(opened, LAYOUT)
        assert caught.value.path == str(file)


# ---- layouts as data ----


def test_layouts_as_json(tmp_path):
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(LAYOUT.to_json()))
    assert Layout.from_json(path) == LAYOUT
    assert Layout.from_json(LAYOUT.to_json()) == LAYOUT
    assert Layout.from_json({"name": "x", "tensors": [{"name": "a", "source": "b"}]}).tensors[0].transpose is False


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"name": "x"}', "a layout must be"),
        ('{"name": 3, "tensors": []}', "a layout must be"),
        ('{"name": "x", "tensors": [], "more": 1}', "a layout must be"),
        ('{"name": "x", "tensors": [3]}', r"tensors\[0\] must be"),
        ('{"name": "x", "tensors": [{"name": "a"}]}', r"tensors\[0\] must be"),
        ('{"name": "x", "tensors": [{"name": "a", "source": "b", "axis": 1}]}', r"tensors\[0\] must be"),
        ('{"name": "x", "tensors": [{"name": "a", "source": ""}]}', "source must be a nonempty string"),
        ('{"name": "x", "tensors": [{"name": 1, "source": "b"}]}', "name must be a nonempty string"),
        ('{"name": "x", "tensors": [{"name": "a", "source": "b", "transpose": 1}]}', "true or false"),
        ('{"name": "x", "tensors": [{"name": "a", "source": "{}.{}"}]}', "more than once"),
        (
            '{"name": "x", "tensors": [{"name": "a", "source": "b"}, {"name": "a", "source": "c"}]}',
            "duplicate tensor 'a'",
        ),
    ],
)
def test_json_that_is_no_layout(tmp_path, content, fragment):
    path = tmp_path / "layout.json"
    path.write_text(content)
    with pytest.raises(safeload.FormatError, match=fragment) as caught:
        Layout.from_json(path)
    assert caught.value.path == str(path)


# ---- Moondream ----


def test_moondream():
    tensors = moondream()
    got = stack(tensors, MOONDREAM2)
    assert got.left_out == ("model.region.coord_encoder.weight",)
    assert {name: array.shape for name, array in got.items()} == {
        "word_token_embedding": (20, 8),
        "t_ln_w": (2, 8),
        "t_ln_b": (2, 8),
        "t_Wqkv_w": (2, 24, 8),
        "t_Wqkv_b": (2, 24),
        "t_out_proj_w": (2, 8, 8),
        "t_out_proj_bias": (2, 8),
        "t_fc1_w": (2, 32, 8),
        "t_fc1_b": (2, 32),
        "t_fc2_w": (2, 8, 32),
        "t_fc2_b": (2, 8),
        "t_linear_w": (20, 8),
        "t_linear_b": (20,),
        "t_ln_out_w": (8,),
        "t_ln_out_b": (8,),
        "v_patch_embedding_linear_w": (12, 6),
        "v_patch_embedding_linear_b": (6,),
        "v_pos_embedding": (1, 5, 6),
        "v_Wqkv_w": (3, 6, 18),
        "v_Wqkv_b": (3, 18),
        "v_out_proj_w": (3, 6, 6),
        "v_out_proj_b": (3, 6),
        "v_fc1_w": (3, 6, 24),
        "v_fc1_b": (3, 24),
        "v_fc2_w": (3, 24, 6),
        "v_fc2_b": (3, 6),
        "v_norm1_w": (3, 6),
        "v_norm1_b": (3, 6),
        "v_norm2_w": (3, 6),
        "v_norm2_b": (3, 6),
        "v_norm_out_w": (6,),
        "v_norm_out_b": (6,),
        "v_proj_fc1_w": (12, 16),
        "v_proj_fc2_w": (16, 8),
        "v_proj_fc1_b": (16,),
        "v_proj_fc2_b": (8,),
    }
    np.testing.assert_array_equal(got["v_fc1_w"][2], tensors["model.vision.blocks.2.mlp.fc1.weight"].T)
    np.testing.assert_array_equal(got["t_fc1_w"][1], tensors["model.text.blocks.1.mlp.fc1.weight"])
    np.testing.assert_array_equal(got["v_norm2_b"][0], tensors["model.vision.blocks.0.ln2.bias"])


@pytest.mark.parametrize(
    ("number", "kind", "fragment"),
    [
        ("2", safeload.TensorNotFoundError, "layer 1 of 3 is missing"),
        (str(10**8), safeload.TensorNotFoundError, "layer 1 of 100000001 is missing"),
        (str(10**9 - 1), safeload.TensorNotFoundError, "layer 1 of 1000000000 is missing"),
        (str(10**9), safeload.TensorNotFoundError, "layer 1 of 1000000001 is missing"),
        (str(10**10), safeload.TensorNotFoundError, "layer 1 of 10000000001 is missing"),
        (str(10**17), safeload.TensorNotFoundError, "layer 1 of "),
        (str(10**18), safeload.SafeloadError, "number with 19 digits"),
        ("9" * 5000, safeload.SafeloadError, "number with 5000 digits"),
        ("01", safeload.SafeloadError, "'h.01.w' has a layer number with leading zeros"),
        ("00", safeload.SafeloadError, "leading zeros"),
        ("0000000000", safeload.SafeloadError, "leading zeros"),
    ],
)
def test_no_layer_is_left_out_for_its_number(number, kind, fragment, tmp_path):
    w = np.ones((2, 3), np.float32)
    tensors = {"h.0.w": w, f"h.{number}.w": w, "h.0.b": w}
    for layout in (
        Layout("e", [StackedTensor("w", "h.{}.w")]),
        # The other entry of the same layers, which has that layer not at all.
        Layout("e", [StackedTensor("b", "h.{}.b"), StackedTensor("w", "h.{}.w")]),
    ):
        with pytest.raises(kind, match=fragment):
            safeload.stack(tensors, layout)
        with pytest.raises(kind, match=fragment):
            safeload.convert(tensors, tmp_path / "x.npz", layout=layout)


def test_what_only_looks_like_a_layer_is_left_out():
    tensors = {"h.0.w": np.ones(2), "h.1.w": np.ones(2), "h.-1.w": np.ones(2), "h.x.w": np.ones(2), "h..w": np.ones(2)}
    tensors |= {"h.\u0661.w": np.ones(2), "x.h.2.w": np.ones(2), "h.2.w.x": np.ones(2), "h.1_0.w": np.ones(2)}
    stacked = safeload.stack(tensors, Layout("e", [StackedTensor("w", "h.{}.w")]))
    assert stacked["w"].shape == (2, 2)
    assert set(stacked.left_out) == tensors.keys() - {"h.0.w", "h.1.w"}


@pytest.mark.parametrize("dtype", [">i2", ">i4", ">u8", ">f2", ">f8", ">c8"])
@pytest.mark.parametrize("order", "CF")
def test_big_endian_arrays_in_memory(dtype, order):
    x = np.array([[1, 2, 300], [4, 5, 6]]).astype(dtype, order=order)
    if dtype == ">f8":
        x += 2.0**-40
    got = stack({"w": x}, Layout("one", [StackedTensor("w", "w")]))["w"]
    np.testing.assert_array_equal(got, x)
    assert got.dtype == np.dtype(dtype).newbyteorder("=")
    if dtype != ">c8":
        assert safeload.diff({"w": x}, {"w": got}).same
