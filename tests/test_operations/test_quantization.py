"""quantize, QuantizedTensor, load_quantized, saving and reopening."""

import json
import os
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from builders import models
from builders.random import rng
from builders.torch_build import Storage, tensor, zip_file

import safeload
from safeload import QuantizedTensor, RangeError, load_quantized, quantization_error, quantize
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.any_python

SCHEMES = ["int8", "q4_0", "q8_0", "q4_1", "q5_0", "q5_1"]
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int16]


def round_half_away(x):
    return np.trunc(x + np.copysign(np.float64(0.5), x))


def int8(x, axis=None):
    """What `safeload.quantize` documents, in plain numpy: codes and scale."""
    x = x.astype(np.float32)
    others = None if axis is None else tuple(k for k in range(x.ndim) if k != axis)
    absmax = np.abs(x).max(axis=others, keepdims=axis is not None, initial=0)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(127) / absmax
    good = np.isfinite(inverse)
    product = x * np.where(good, inverse, 0).astype(np.float32)
    codes = np.clip(round_half_away(product.astype(np.float64)), -128, 127).astype(np.int8)
    return codes, np.where(good, absmax / np.float32(127), 0).astype(np.float32).squeeze(others)


def q4_0(x):
    """rounding="absmax" as it is documented, in plain numpy: the bytes."""
    blocks = x.astype(np.float32).reshape(-1, 32)
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(7)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    good = np.isfinite(inverse)
    product = blocks * np.where(good, inverse, 0).astype(np.float32)
    q = (np.clip(round_half_away(product.astype(np.float64)), -8, 7) + 8).astype(np.uint8)
    packed = q[:, :16] | q[:, 16:] << 4
    scales = np.where(good, d, 0).astype(np.float16).view(np.uint8)
    return np.concatenate([scales, packed], axis=1).reshape(*x.shape[:-1], -1)


# ---- quantize ----


def test_the_worked_example():
    q = quantize(np.float32([-0.5, -0.25, 0.1, 0.5]), "int8")
    np.testing.assert_array_equal(q.data, np.int8([-127, -64, 25, 127]))
    assert q.scale.shape == ()
    assert q.scale == np.float32(0.5) / np.float32(127)


def test_half_codes_go_away_from_zero():
    x = np.float32([127, 63.5, -63.5, 0.5, -0.5, 1.5, -1.5, 0.49999997, -0.49999997, 0.0, -0.0])
    np.testing.assert_array_equal(quantize(x, "int8").data, [127, 64, -64, 1, -1, 2, -2, 0, 0, 0, 0])


@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_the_numpy_expression(dtype, axis):
    x = (rng.standard_normal((7, 33, 65)) * 3).astype(dtype)
    q = quantize(x, "int8", axis=axis)
    codes, scale = int8(x, None if axis is None else axis % 3)
    np.testing.assert_array_equal(q.data, codes)
    np.testing.assert_array_equal(q.scale, scale)
    assert (q.scheme, q.shape, q.axis) == ("int8", x.shape, None if axis is None else axis % 3)
    expanded = scale if axis is None else np.expand_dims(scale, tuple(k for k in range(3) if k != axis % 3))
    np.testing.assert_array_equal(q.dequantize(), codes * expanded)
    np.testing.assert_array_equal(q.dequantize("bfloat16"), (codes * expanded).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_q4_0_is_the_numpy_expression(dtype):
    x = (rng.standard_normal((5, 3, 96)) * 3).astype(dtype)
    q = quantize(x, "q4_0")
    np.testing.assert_array_equal(q.data, q4_0(x))
    assert q.data.shape == (5, 3, 54)
    assert q.scale is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_number_of_threads_gives_the_same_bytes(scheme):
    """Several chunks, of which the channels of axis 0 and 1 are no divisors."""
    x = np.resize(rng.standard_normal(100_003), (1037, 4096)).astype(ml_dtypes.bfloat16)
    for axis in (None, 0, 1) if scheme == "int8" else (None,):
        q = quantize(x, scheme, axis=axis, threads=2)
        if scheme == "int8":
            codes, scale = int8(x, axis)
            np.testing.assert_array_equal(q.data, codes)
            np.testing.assert_array_equal(q.scale, scale)
        elif scheme == "q4_0":
            np.testing.assert_array_equal(q.data, q4_0(x))
        for threads in (1, 3, 8):
            assert q == quantize(x, scheme, axis=axis, threads=threads), threads


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 3), (900_000,), (2, 450_000), (450_000, 2)])
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_int8_of_any_shape(shape, axis):
    if not shape and axis is not None:
        with pytest.raises(ValueError, match="axis"):
            quantize(np.zeros(shape, np.float32), "int8", axis=axis)
        return
    x = np.resize(rng.standard_normal(9973).astype(np.float32), shape)
    q = quantize(x, "int8", axis=axis)
    codes, scale = int8(x, None if axis is None else axis % len(shape))
    np.testing.assert_array_equal(q.data, codes)
    np.testing.assert_array_equal(q.scale, scale.reshape(q.scale.shape))
    assert q.dequantize().shape == shape


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layouts_and_byte_orders(scheme):
    x = rng.standard_normal((64, 96)).astype(np.float32)
    want = quantize(x, scheme)
    for view in (np.asfortranarray(x), x[::-1][::-1], x.astype(">f4"), np.stack([x, x], 1)[:, 0]):
        assert quantize(view, scheme) == want
    assert quantize(x.tolist(), scheme) == want


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("absmax", [0.0, 1e-45, 1e-42, 1e-39])
def test_what_is_too_small_restores_to_zero_or_to_itself(scheme, absmax):
    x = np.zeros(64, np.float32)
    x[[3, 40]] = absmax, -absmax
    restored = quantize(x, scheme).dequantize()
    assert np.isfinite(restored).all()
    assert np.abs(restored - x).max() <= np.float32(absmax)  # a number of Python is a double to numpy 1


def test_one_huge_value_in_a_block():
    x = np.full(64, 0.001, np.float32)
    x[5] = 60000
    restored = quantize(x, "q4_0").dequantize()
    assert abs(restored[5] - 60000) < 60
    assert not restored[:5].any()
    np.testing.assert_allclose(restored[32:], 0.001, rtol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_not_finite_is_refused_with_its_index(scheme, bad, dtype):
    x = np.resize(rng.standard_normal(100_003).astype(dtype), (300, 20, 320))
    x[250, 3, 7] = x[250, 3, 8] = x[299, 19, 319] = bad
    word = {"nan": "nan", "inf": "infinity", "-inf": "minus infinity"}[str(bad)]
    with pytest.raises(RangeError, match=rf"^element \[250, 3, 7\] is {word}: only finite numbers"):
        quantize(x, scheme, threads=2)


@pytest.mark.parametrize(("scheme", "value"), [("q4_0", 65504 * 7.1), ("q8_0", -65504 * 127.1)])
def test_a_scale_beyond_float16_is_refused_with_the_index(scheme, value):
    x = np.ones((10, 64), np.float32)
    x[4, 33:36] = 1000, value, 5
    with pytest.raises(RangeError, match=rf"element \[4, 34\] has magnitude .*, too large for {scheme}"):
        quantize(x, scheme)
    quantize(x, "int8")


@pytest.mark.parametrize(
    ("call", "kind", "fragment"),
    [
        (lambda x: quantize(x, "iq3_s"), ValueError, "writable schemes are int8, q4_0, q8_0"),
        (
            lambda x: quantize(x, "q5_0", rounding="absmax"),
            ValueError,
            "does not support rounding 'absmax', only ggml",
        ),
        (lambda x: quantize(x, "q4_0", rounding="up"), ValueError, "'up', expected one of absmax, ggml"),
        (lambda x: quantize(x, "int8", rounding="ggml"), ValueError, "rounding= applies only to q4_0"),
        (lambda x: quantize(x, "q4_0", axis=0), ValueError, "axis= applies only to int8"),
        (lambda x: quantize(x, "int8", axis=2), ValueError, r"axis 2 is out of range for shape \[4, 64\]"),
        (lambda x: quantize(x, "int8", axis=-3), ValueError, "out of range"),
        (lambda x: quantize(x[:, :40], "q8_0"), ValueError, "has rows of 40, which is not a multiple of 32"),
        (lambda x: quantize(x[0, 0], "q4_0"), ValueError, "has no axes"),
        (lambda x: quantize(x.astype(np.complex64), "int8"), TypeError, "complex64"),
        (lambda x: quantize(["a"], "int8"), TypeError, "does not hold real numbers"),
        (lambda x: quantize(x, "int8", out=quantize(x, "q4_0")), ValueError, "out is"),
        (lambda x: quantize(x, "int8", out=x), TypeError, "QuantizedTensor"),
        (lambda x: quantize(x, "int8", threads=0), ValueError, "threads"),
    ],
)
def test_wrong_arguments(call, kind, fragment):
    with pytest.raises(kind, match=fragment):
        call(np.ones((4, 64), np.float32))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_out_is_filled(scheme):
    x, y = rng.standard_normal((2, 8, 64)).astype(np.float32)
    first = quantize(x, scheme)
    data = first.data
    assert quantize(y, scheme, out=first) is first
    assert first.data is data
    assert first == quantize(y, scheme)
    before = pickle.loads(pickle.dumps(first))
    y[7, 60] = np.nan
    with pytest.raises(RangeError):
        quantize(y, scheme, out=first)
    assert first == before
    out = np.empty((8, 64), np.float16)
    assert first.dequantize("float16", out=out) is out
    np.testing.assert_array_equal(out, first.dequantize("float16"))
    with pytest.raises(ValueError, match="out must be"):
        first.dequantize(out=out)


# ---- QuantizedTensor ----


def test_equality_repr_pickle():
    x = rng.standard_normal((8, 64)).astype(np.float32)
    for q in (quantize(x, "int8"), quantize(x, "int8", axis=1), quantize(x, "q4_0"), quantize(x, "q8_0")):
        assert q == q
        copy = pickle.loads(pickle.dumps(q))
        assert copy == q
        assert not np.shares_memory(copy.data, q.data)
        copy.data[3, 3] ^= 1
        assert copy != q
        assert q != x.tolist()
        assert q.scheme in repr(q)
        assert "[8, 64]" in repr(q)
        with pytest.raises(TypeError, match="unhashable"):
            hash(q)
    assert quantize(x, "q8_0") != quantize(x, "q4_0")
    assert repr(quantize(x, "int8", axis=1)) == "<QuantizedTensor int8 [8, 64], axis=1, 768 bytes>"
    assert quantize(x, "q4_0").nbytes == 8 * 36


@pytest.mark.parametrize(
    ("arguments", "kind", "fragment"),
    [
        (("q9", (32,), np.zeros(18, np.uint8)), ValueError, "unknown scheme 'q9', expected one of int8"),
        (("q4_0", (32,), np.zeros(17, np.uint8)), ValueError, r"must be uint8 \[18\]"),
        (("q4_0", (32,), np.zeros(18, np.int8)), ValueError, r"must be uint8 \[18\]"),
        (("q4_0", (33,), np.zeros(18, np.uint8)), ValueError, "has rows of 33, which is not a multiple of 32"),
        (("q4_0", (32,), np.zeros(18, np.uint8), np.float32(1)), ValueError, "scale must be None"),
        (("int8", (2,), np.zeros(2, np.int8)), TypeError, "scale must be a NumPy array"),
        (("int8", (2,), np.zeros(2, np.int8), np.zeros(2, np.float32)), ValueError, r"must be float32 \[\]"),
        (("int8", (2,), np.zeros(2, np.int8), np.zeros(2, np.float64), 0), ValueError, r"must be float32 \[2\]"),
        (("int8", (2,), [0, 0], np.zeros(2, np.float32), 0), TypeError, "data must be a NumPy array"),
    ],
)
def test_parts_that_do_not_fit(arguments, kind, fragment):
    with pytest.raises(kind, match=fragment):
        QuantizedTensor(*arguments)


def test_a_scheme_without_a_kernel_is_named():
    q = QuantizedTensor("q8_k", (256,), np.zeros(292, np.uint8))
    with pytest.raises(safeload.UnsupportedError, match="q8_k"):
        q.dequantize()
    with pytest.raises(safeload.UnsupportedError, match="int32"):
        quantize(np.ones(4, np.float32), "int8").dequantize("int32")


# ---- load_quantized ----


def llama(layers=2, dtype=ml_dtypes.bfloat16):
    """A small model with Llama's names."""
    shapes = {"model.embed_tokens.weight": (96, 64), "model.norm.weight": (64,)}
    for k in range(layers):
        base = f"model.layers.{k}."
        shapes |= {f"{base}self_attn.{p}_proj.weight": (64, 64) for p in "qkvo"}
        shapes |= {f"{base}mlp.gate_proj.weight": (128, 64), f"{base}mlp.down_proj.weight": (64, 128)}
        shapes |= {f"{base}input_layernorm.weight": (64,), f"{base}post_attention_layernorm.weight": (64,)}
    tensors = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    tensors["model.position_ids"] = np.arange(64, dtype=np.int64).reshape(2, 32)
    return tensors


@pytest.fixture
def folder(tmp_path):
    """Two shards with an index and a config."""
    tensors = llama()
    names = sorted(tensors)
    weight_map = {}
    for k, part in enumerate((names[::2], names[1::2])):
        file = f"model-{k + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True}))
    return tmp_path, tensors


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_llama_folder(folder, scheme):
    path, tensors = folder
    result = load_quantized(path, scheme)
    assert list(result)[-1] == "lm_head.weight"
    assert result.keys() == tensors.keys() | {"lm_head.weight"}
    for name, x in tensors.items():
        value = result[name]
        if "proj" in name:
            assert value == quantize(x, scheme), name
        elif name == "model.position_ids":
            np.testing.assert_array_equal(value, x)
            assert value.dtype == x.dtype
        else:
            assert value.dtype == np.float32
            np.testing.assert_array_equal(value, x.astype(np.float32))
    assert result["lm_head.weight"] == quantize(tensors["model.embed_tokens.weight"], scheme)
    summary = result.summary
    assert summary.bytes_before == sum(x.nbytes for x in tensors.values())
    assert summary.bytes_after == sum(v.nbytes for v in result.values())
    assert summary.quantized == dict.fromkeys([n for n in result if "proj" in n or "lm_head" in n], scheme)
    assert summary.kept["model.embed_tokens.weight"] == "is an embedding"
    assert summary.kept["model.position_ids"] == "is int64, not floating"
    assert summary.kept["model.norm.weight"] == "is 1-D, not 2-D or 3-D"
    assert f"13 quantized to {scheme}" in str(summary)


def test_a_summary_says_what_grew():
    grown = load_quantized({"norm": np.ones(5, np.float16)}).summary
    assert str(grown).startswith("10 bytes became 20 (2.00 times larger)")


def test_the_same_from_a_checkpoint_and_from_a_dict(folder):
    path, tensors = folder
    from_path = load_quantized(path, "q4_0", rounding="ggml")
    with safeload.open(path) as opened:
        from_open = load_quantized(opened, "q4_0", rounding="ggml")
    from_dict = load_quantized(tensors, "q4_0", rounding="ggml")
    for name, value in from_path.items():
        for other in (from_open[name], from_dict[name]):
            assert value == other if isinstance(value, QuantizedTensor) else np.array_equal(value, other), name
    assert not np.shares_memory(from_dict["model.norm.weight"], tensors["model.norm.weight"])


def test_no_tied_head_when_there_is_a_head_or_none_is_wanted(folder):
    path, tensors = folder
    assert "lm_head.weight" not in load_quantized(path, tie_lm_head=False)
    head = rng.standard_normal((96, 64)).astype(np.float32)
    assert load_quantized(tensors | {"lm_head.weight": head})["lm_head.weight"] == quantize(head, "q4_0")
    assert "lm_head.weight" not in load_quantized(tensors, keep="lm_head*")


def test_keep(folder):
    path, _ = folder
    kept = load_quantized(path, keep=["*.0.*", "*down_proj*"]).summary.kept
    assert kept["model.layers.0.self_attn.q_proj.weight"] == "keep='*.0.*'"
    assert kept["model.layers.1.mlp.down_proj.weight"] == "keep='*down_proj*'"
    assert load_quantized(path, keep=lambda name: "mlp" in name).summary.kept["model.layers.1.mlp.gate_proj.weight"]


def test_mixed_precision(folder):
    path, _ = folder
    scheme = {"*down_proj*": "q8_0", "*.1.self_attn.*": None, "*embed*": "int8", "*": "q4_0"}
    result = load_quantized(path, scheme)
    schemes = {name: getattr(value, "scheme", None) for name, value in result.items()}
    assert schemes["model.layers.0.mlp.down_proj.weight"] == "q8_0"
    assert schemes["model.layers.1.self_attn.q_proj.weight"] is None
    assert schemes["model.layers.0.self_attn.q_proj.weight"] == "q4_0"
    assert schemes["model.embed_tokens.weight"] == "int8"
    assert schemes["lm_head.weight"] == "q4_0"
    only = load_quantized(path, {"*mlp*": "q8_0"}).summary
    assert only.kept["model.layers.0.self_attn.q_proj.weight"] == "no pattern of scheme= matches"
    with pytest.raises(ValueError, match="iq3_s"):
        load_quantized(path, {"*": "iq3_s"})


def test_tensors_of_three_axes_and_odd_rows():
    tensors = {
        "experts": rng.standard_normal((3, 8, 64)).astype(np.float32),
        "odd": rng.standard_normal((8, 50)).astype(np.float16),
        "scalar": np.float32(3),
        "flags": np.ones((4, 32), bool),
    }
    result = load_quantized(tensors, "int8")
    np.testing.assert_array_equal(result["experts"].data, int8(tensors["experts"], 0)[0])
    assert result["experts"].axis == 0
    assert result["odd"].scheme == "int8"
    assert result["flags"].dtype == bool
    blocks = load_quantized(tensors)
    assert blocks["experts"] == quantize(tensors["experts"], "q4_0")
    assert blocks["odd"].dtype == np.float32
    assert blocks.summary.kept["odd"] == "rows of 50 elements are not whole blocks of 32"
    assert load_quantized(tensors, "int8", axis=1)["experts"].axis == 1
    with pytest.raises(ValueError, match="tensor 'odd': axis 2"):
        load_quantized({"odd": tensors["odd"]}, "int8", axis=2)


@pytest.mark.parametrize(("scheme", "instead"), [("q4_k", "q5_0"), ("q5_k", "q5_1"), ("q6_k", "q8_0")])
def test_rows_that_are_not_super_blocks_get_the_smaller_blocks_of_llama_cpp(scheme, instead, tmp_path):
    tensors = {f"m{length}": rng.standard_normal((4, length)).astype(np.float32) for length in (512, 896, 50)}
    made = load_quantized(tensors, scheme)
    assert made.summary.quantized == {"m512": scheme, "m896": instead}
    assert made.summary.kept == {"m50": "rows of 50 elements are not whole blocks of 256"}
    assert made["m896"] == quantize(tensors["m896"], instead)
    save_file(tensors, tmp_path / "in.safetensors")
    safeload.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", quantize=scheme)
    again = load_quantized(tmp_path / "out.safetensors", scheme)
    assert again["m896"] == made["m896"]
    assert again.summary.kept["m896"] == f"is already {instead}"
    with pytest.raises(ValueError, match="which is not a multiple of 256"):
        quantize(tensors["m896"], scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_value_that_cannot_be_quantized_is_named(folder, scheme):
    path, tensors = folder
    tensors["model.layers.1.mlp.gate_proj.weight"][17, 5] = np.nan
    file = next(p for p in path.glob("*.safetensors") if "model.layers.1.mlp.gate_proj.weight" in load_file(p))
    save_file({name: tensors[name] for name in load_file(file)}, file)
    with pytest.raises(RangeError, match=r"tensor 'model.layers.1.mlp.gate_proj.weight': element \[17, 5\] is nan"):
        load_quantized(path, scheme)


def test_a_file_that_shrinks_while_it_is_read(folder):
    path, _ = folder
    with safeload.open(path) as opened:
        file = opened.files[0]
        os.truncate(file, os.path.getsize(file) - 1000)
        with pytest.raises(safeload.FormatError) as caught:
            load_quantized(opened)
        assert file in str(caught.value)


def test_progress_and_a_real_file(shared):
    path = shared / "safetensors/minilm-l0-bf16.safetensors"
    seen = []
    result = load_quantized(path, "int8", progress=lambda done, total: seen.append((done, total)))
    plain = load_file(path)
    assert seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen)
    for name, value in result.items():
        if isinstance(value, QuantizedTensor):
            np.testing.assert_array_equal(value.data, int8(plain[name])[0])


# ---- quantization_error ----


def test_what_quantization_costs(folder):
    path, tensors = folder
    result = load_quantized(path, "q8_0")
    errors = quantization_error(path, result)
    assert errors.keys() == result.summary.quantized.keys()
    name = "model.layers.0.mlp.down_proj.weight"
    exact = tensors[name].astype(np.float64)
    difference = exact - result[name].dequantize()
    assert errors[name].max_error == np.abs(difference).max()
    assert errors[name].rms_error == pytest.approx(np.sqrt(np.square(difference).mean()))
    assert errors[name].snr_db == pytest.approx(10 * np.log10(np.square(exact).sum() / np.square(difference).sum()))
    assert errors["lm_head.weight"].snr_db > 40
    single = quantization_error(tensors[name], result[name])
    assert single == errors[name]
    zeros = np.zeros((2, 32), np.float32)
    assert quantization_error(zeros, quantize(zeros, "q4_0")) == (0.0, 0.0, np.inf)
    with pytest.raises(ValueError, match=r"\[2, 32\]"):
        quantization_error(zeros, result[name])
    with pytest.raises(safeload.TensorNotFoundError):
        quantization_error(path, {"nowhere": result[name]})


# ---- files ----


@pytest.mark.parametrize("scheme", SCHEMES)
def test_saved_and_opened_again_bit_for_bit(folder, tmp_path, scheme):
    result = load_quantized(folder[0], scheme, axis=1 if scheme == "int8" else None)
    file = tmp_path / "quantized.safetensors"
    save_file(result, file, {"note": "here"})
    with safeload.open(file) as opened:
        assert opened.keys() == result.keys()
        assert opened.metadata == {"note": "here"}
        assert opened.nbytes == sum(v.nbytes if not hasattr(v, "data") else v.data.nbytes for v in result.values())
        for load in (lambda: dict(opened), opened.load, lambda: opened.load(backend="pread")):
            for name, value in load().items():
                other = result[name]
                assert value == other if isinstance(other, QuantizedTensor) else np.array_equal(value, other), name
        restored = opened.load(dtype="float32")
        out = {name: np.empty_like(x) for name, x in restored.items()}
        opened.load(dtype="float32", out=out)
        for name, value in result.items():
            if isinstance(value, QuantizedTensor):
                np.testing.assert_array_equal(restored[name], value.dequantize())
                np.testing.assert_array_equal(out[name], value.dequantize())
                assert opened.tensors[name].shape == value.shape
                np.testing.assert_array_equal(opened.get_slice(name)[1:3], value.dequantize()[1:3])
        assert load_quantized(opened, "q8_0", requantize=True).keys() == result.keys()
    raw = load_file(file)
    assert all(isinstance(value, np.ndarray) for value in raw.values())
    if scheme == "int8":
        assert raw["lm_head.weight_scale"].dtype == np.float32
    again = tmp_path / "again.safetensors"
    save_file(safeload.load(file), again, {"note": "here"})
    assert again.read_bytes() == file.read_bytes()


def test_quantized_shards(folder, tmp_path):
    path, _ = folder
    shards = sorted(path.glob("*.safetensors"))
    want = load_quantized(path, "int8", tie_lm_head=False)
    for shard in shards:
        save_file({name: want[name] for name in load_file(shard)}, shard)
    (path / "model.safetensors.index.json").unlink()
    with safeload.open(path) as opened:
        assert opened.keys() == want.keys()
        for name, value in opened.items():
            assert value == want[name] if isinstance(value, QuantizedTensor) else np.array_equal(value, want[name])


def test_a_scale_that_would_replace_a_tensor(tmp_path):
    q = quantize(np.ones(4, np.float32), "int8")
    with pytest.raises(safeload.SafetensorError, match="'a_scale'"):
        save_file({"a": q, "a_scale": np.ones(3)}, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_metadata_of_another_file_is_not_kept(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"a": np.ones(3)}, file, {"safeload.quantized": "{}", "b": "c"})
    assert safeload.open(file).metadata == {"b": "c"}


_Q = {"scheme": "q4_0", "shape": [2, 32], "axis": None}
_I = {"scheme": "int8", "shape": [2, 3], "axis": None}


@pytest.mark.parametrize(
    ("description", "fragment"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be a JSON object, got list"),
        ({"blocks": 3}, "the entry of 'blocks' must be"),
        ({"blocks": {**_Q, "scheme": 4}}, "must be"),
        ({"blocks": {**_Q, "shape": "2"}}, "must be"),
        ({"blocks": {**_Q, "shape": [2, True]}}, "must be"),
        ({"blocks": {**_Q, "shape": [2, -32]}}, "must be"),
        ({"blocks": {**_Q, "shape": [2, 1 << 70]}}, "must be"),
        ({"blocks": {**_Q, "axis": 0.5}}, "must be"),
        ({"blocks": {**_Q, "axis": 0}}, "axis= applies only to int8"),
        ({"blocks": {**_Q, "scheme": "q17"}}, "unknown scheme 'q17', expected one of"),
        ({"blocks": {**_Q, "shape": [2, 33]}}, "not a multiple"),
        ({"blocks": {**_Q, "shape": []}}, "has no axes"),
        ({"blocks": {**_Q, "shape": [2, 64]}}, r"'blocks' is U8 \[2, 18\], but its description needs U8 \[2, 36\]"),
        ({"codes": _Q}, r"'codes' is I8 \[2, 3\], but its description needs U8 \[2, 18\]"),
        ({"codes": {**_I, "axis": 7}}, "axis 7 is out of range"),
        ({"codes": {**_I, "axis": 0}}, r"'codes_scale' is F32 \[\], but its description needs F32 \[2\]"),
        ({"lonely": {**_I, "shape": [4]}}, "has no 'lonely_scale'"),
        ({"nowhere": _I}, "'nowhere', which is not in the file"),
        ({"codes": _I, "codes_scale": {**_Q, "shape": [32]}}, "codes_scale"),
    ],
)
def test_descriptions_that_do_not_fit_their_file(tmp_path, description, fragment):
    tensors = {
        "blocks": np.zeros((2, 18), np.uint8),
        "codes": np.zeros((2, 3), np.int8),
        "codes_scale": np.float32(1),
        "lonely": np.zeros(4, np.int8),
    }
    file = tmp_path / "x.safetensors"
    text = description if isinstance(description, str) else json.dumps(description)
    header, data = {"__metadata__": {"safeload.quantized": text}}, b""
    for name, array in tensors.items():
        code, begin = {"u": "U8", "i": "I8", "f": "F32"}[array.dtype.kind], len(data)
        data += array.tobytes()
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [begin, len(data)]}
    content = json.dumps(header).encode()
    file.write_bytes(len(content).to_bytes(8, "little") + content + data)
    with pytest.raises(safeload.FormatError, match=fragment) as caught:
        safeload.open(file)
    assert caught.value.path == str(file)
    assert load_file(file).keys() == tensors.keys()


# ---- memory ----

_MEASURE = """
import sys
import safeload

path, scheme = sys.argv[1:]
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
before = peak()
result = safeload.load_quantized(path, scheme)
print(peak() - before, sum(v.nbytes for v in result.values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak RSS is read from /proc")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's own memory counts too")
@pytest.mark.parametrize("scheme", ["q4_0", "int8"])
def test_memory_is_the_result_and_little_more(tmp_path, scheme):
    """The line of 256 MiB is for 2.5 GB (benches/bench_quantize.py); these 120 MB would show any copy as f32."""
    block = rng.standard_normal((1024, 4096)).astype(ml_dtypes.bfloat16)
    save_file({f"model.layers.{k}.up_proj.weight": block for k in range(14)}, tmp_path / "m.safetensors")
    done = subprocess.run(
        [sys.executable, "-I", "-c", _MEASURE, str(tmp_path), scheme], capture_output=True, text=True, check=True
    )
    growth, result = map(int, done.stdout.split())
    assert growth < result + (64 << 20)


# ---- other formats ----


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("order", ["little", "big"])
def test_torch_checkpoints(tmp_path, scheme, order):
    """Also what is transposed, shared or big-endian in its file."""
    x = rng.standard_normal((64, 96)).astype(np.float32)
    storage = Storage("0", x.ravel())
    value = {
        "plain.weight": tensor(storage, (64, 96), (96, 1)),
        "turned.weight": tensor(storage, (96, 64), (1, 96)),
        "norm.weight": tensor(storage, (96,), (1,), 96),
    }
    path = tmp_path / "m.pth"
    path.write_bytes(zip_file(value, order=order))
    result = load_quantized(path, scheme)
    assert result["plain.weight"] == quantize(x, scheme)
    assert result["turned.weight"] == quantize(x.T, scheme)
    np.testing.assert_array_equal(result["norm.weight"], x[1])
    assert quantization_error(path, result)["turned.weight"].snr_db > 15


# ---- what schemas say ----


def test_a_schema_says_what_is_kept_and_tied(tmp_path):
    """GPT-2: its embedding is not called so, its head is tied by default, and ``attn.bias`` is a mask."""
    config, tensors = models.small("gpt2", np.float32)
    tensors["transformer.h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)
    path = models.write_folder(tmp_path, config, tensors)
    result = load_quantized(path, "q8_0")
    assert result["lm_head.weight"] == quantize(tensors["transformer.wte.weight"], "q8_0")
    assert result.summary.kept["transformer.wte.weight"] == "is an embedding"
    assert isinstance(result["transformer.h.0.attn.c_attn.weight"], QuantizedTensor)
    assert quantization_error(path, result)["lm_head.weight"].snr_db > 40
    assert "lm_head.weight" not in load_quantized(path, "q8_0", tie_lm_head=False)
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert "lm_head.weight" not in load_quantized(path, "q8_0")


def test_stacked_biases_and_norms_are_kept(tmp_path):
    """Moondream 2 as MOON: [layers, size] is no matrix there."""
    _, tensors = models.small("moondream2", np.float16)
    safeload.moon.save_file(tensors, tmp_path / "m.bin")
    summary = load_quantized(tmp_path / "m.bin", "int8").summary
    assert set(summary.quantized) == {
        *("t_Wqkv_w", "t_out_proj_w", "t_fc1_w", "t_fc2_w", "t_linear_w"),
        *("v_patch_embedding_linear_w", "v_Wqkv_w", "v_out_proj_w", "v_fc1_w", "v_fc2_w"),
        *("v_proj_fc1_w", "v_proj_fc2_w"),
    }
    assert summary.kept["t_fc1_b"] == "is a bias"
    assert summary.kept["t_ln_w"] == "is a norm"
    assert summary.kept["v_pos_embedding"] == "is an embedding"


def test_names_that_the_schema_does_not_know_go_by_patterns(tmp_path):
    config, tensors = models.small("llama", np.float32)
    tensors["adapter.embed"] = tensors["adapter.up"] = np.ones((32, 32), np.float32)
    summary = load_quantized(models.write_folder(tmp_path, config, tensors), "q4_0").summary
    assert summary.kept["adapter.embed"] == "matches *embed*"
    assert summary.quantized["adapter.up"] == "q4_0"


def test_conversion_goes_by_the_schema_too(tmp_path):
    config, tensors = models.small("gpt2", np.float32)
    path = models.write_folder(tmp_path, config, tensors)
    safeload.convert(path, tmp_path / "q.safetensors", quantize="q8_0")
    with safeload.open(tmp_path / "q.safetensors") as opened:
        assert isinstance(opened["transformer.h.1.mlp.c_fc.weight"], QuantizedTensor)
        assert isinstance(opened["transformer.wpe.weight"], np.ndarray)
