"""AMD Quark: what configurations decide, layer by layer, and what is refused or wrong."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from builders.inside import main
from builders.packed_codes import AWQ_ORDER, stream, words
from builders.quantized import FIXTURES
from builders.random import rng

import safeload
from safeload import FormatError, QuantizedTensor, UnsupportedError
from safeload.numpy import load_file, save_file

F8, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
F32, OUT, IN = np.float32, 24, 64
ORDERS = {"reorder": AWQ_ORDER, "order": list(range(8))}


def config(order="reorder", layers=None, bias=None, **weight):
    spec = weight.pop("weight", weight)
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": spec, "bias": bias, "input_tensors": None},
        "layer_quant_config": layers or {},
        "exclude": ["lm_head"],
        "export": {"pack_method": order, "weight_format": "real_quantized"},
    }


def write(folder, tensors, said):
    while folder.exists():  # Windows does not replace mapped files
        folder = folder.with_name(f"{folder.name}x")
    folder.mkdir()
    save_file({n: np.asarray(t, order="C") for n, t in tensors.items()}, folder / "model.safetensors", durable=False)
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    return folder


def packed(codes, order):
    """Words of codes along the last axis."""
    return words((codes & 15).astype(np.uint8)[None], 4, ORDERS[order])[0].view("<i4")


def scales(*shape):
    return (rng.random(shape, F32) + F32(0.5)).astype(F32)


def integers(low, high, *shape):
    return rng.integers(low, high, shape)


def values(codes, zero, scale):
    return (codes - zero).astype(F32) * scale


def in_groups(order="reorder", *, signed=False, zeros="packed", out=OUT, size=32, names=("weight", "_scale", "")):
    """Tensors of words in groups of columns, and the weights."""
    low, count = (-8 if signed else 0), IN // size
    codes, scale = integers(low, low + 16, IN, out), scales(count, out)
    zero = np.zeros((count, out), int) if zeros is None else integers(low, low + 16, count, out)
    tensors = {"a.weight": packed(codes, order), "a.weight_scale": scale}
    if zeros is not None:
        tensors["a.weight_zero_point"] = packed(zero, order) if zeros == "packed" else zero.astype(F32)
    return tensors, values(codes, zero.repeat(size, 0), scale.repeat(size, 0)).T


GROUPS = {"dtype": "uint4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "symmetric": False}


# ---- what is read, but for what the fixtures show ----


def int4_columns(order):
    codes, zero, scale = integers(-8, 8, OUT, IN), integers(-8, 8, IN), scales(IN)
    tensors = {"a.weight": packed(codes, order), "a.weight_scale": scale}
    return {**tensors, "a.weight_zero_point": packed(zero[None], order)[0]}, values(codes, zero, scale)


def int8(zero=(), scale=(1,)):
    codes, one = integers(-128, 128, OUT, IN), scales(*scale)
    tensors = {"a.weight": codes.astype(np.int8), "a.weight_scale": one}
    return {**tensors, "a.weight_zero_point": np.full(zero, 3, np.int8)}, values(codes, 3, one)


def negative_zero_of_all():
    codes, scale = integers(-8, 8, OUT, IN), scales()
    tensors = {"a.weight": packed(codes, "order"), "a.weight_scale": scale}
    return {**tensors, "a.weight_zero_point": np.int32(-3)}, values(codes, -3, scale)


def floats(dtype, scale, spread):
    codes = rng.standard_normal((OUT, IN)).astype(dtype)
    return {"a.weight": codes, "a.weight_scale": scale}, codes.astype(F32) * spread(np.asarray(scale).astype(F32))


def mxfp8():
    exponents = integers(120, 130, OUT, 2).astype(np.uint8)
    tensors, _ = floats(F8, exponents, lambda x: F32(1))
    return tensors, tensors["a.weight"].astype(F32) * exponents.view(E8M0).astype(F32).repeat(32, 1)


def fp4(scale):
    codes = integers(0, 16, OUT, IN).astype(np.uint8)
    table = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F32)
    tensors = {"a.weight": stream(codes, 4), "a.weight_scale": scale}
    return tensors, table[codes] * scale.astype(F32).repeat(IN // scale.shape[1], 1)


def renamed(made, names):
    tensors, want = made
    return {names.get(name, name): tensor for name, tensor in tensors.items()}, want


DIFFUSERS = {
    "a.weight_scale": "a.weight_quantizer.scale",
    "a.weight_zero_point": "a.weight_quantizer.zero_point",
}
ROWS, TENSOR = {"qscheme": "per_channel", "ch_axis": 0}, {"qscheme": "per_tensor", "ch_axis": None}
COLUMNS, BLOCKS = {"qscheme": "per_channel", "ch_axis": 1}, {"qscheme": "per_block", "block_size": [12, 16]}
READ = {
    "float zero points": ({**GROUPS, "zero_point_type": "float32"}, "int4 g32 asym", in_groups(zeros="float")),
    "no zero points": ({**GROUPS, "dtype": "int4", "symmetric": True}, "int4 g32", in_groups(signed=True, zeros=None)),
    "negative zero points": ({**GROUPS, "dtype": "int4"}, "int4 g32 asym", in_groups(signed=True)),
    "a group for a row": ({**GROUPS, "group_size": -1}, "int4 row asym", in_groups(size=IN)),
    "as many rows as columns": (GROUPS, "int4 g32 asym", in_groups(out=IN)),
    "names of diffusers": (GROUPS, "int4 g32 asym", renamed(in_groups(), DIFFUSERS)),
    "int4 of columns": ({"dtype": "int4", **COLUMNS}, "int4 column asym", int4_columns("reorder")),
    "int8 with [1] beside []": ({"dtype": "int8", **TENSOR}, "int8 tensor asym", int8()),
    "int8 with [1] beside [1]": ({"dtype": "int8", **TENSOR, "symmetric": True}, "int8 tensor", int8((1,))),
    "int8 of columns": ({"dtype": "int8", **COLUMNS}, "int8 column asym", int8((IN,), (IN,))),
    "fp8 of columns": ({"dtype": "fp8_e4m3", **COLUMNS}, "fp8 column", floats(F8, scales(IN), lambda x: x)),
    "fp8 of all [1]": ({"dtype": "fp8_e5m2", **TENSOR}, "fp8 tensor", floats(E5M2, scales(1), lambda x: x)),
    "fp8 of all []": ({"dtype": "fp8_e4m3", **TENSOR}, "fp8 tensor", floats(F8, scales(), lambda x: x)),
    "fp8 in blocks": ({"dtype": "fp8_e4m3", **BLOCKS}, "fp8 12x16",
                      floats(F8, scales(2, 4), lambda x: x.repeat(12, 0).repeat(16, 1))),
    "fp8 in groups": ({"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 16}, "fp8 g16",
                      floats(F8, scales(OUT, 4), lambda x: x.repeat(16, 1))),
    "mxfp8": ({"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}, "mxfp8",
              mxfp8()),
    "fp4 with numbers": ({"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "scale_format": "float32"},
                         "fp4 g16", fp4(scales(OUT, 4).astype(ml_dtypes.bfloat16))),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_weights_by_the_formula(case, tmp_path):
    said, label, (tensors, want) = READ[case]
    folder = write(tmp_path / "x", tensors, config(**said))
    name = next(iter(tensors))
    value = safeload.load(folder)[name]
    assert isinstance(value, QuantizedTensor)
    assert value.scheme == label
    np.testing.assert_array_equal(value.dequantize(), want)
    with safeload.open(folder) as opened:
        np.testing.assert_array_equal(opened.get_slice(name)[7:18], want[7:18])
        assert list(opened) == [name]
    safeload.convert(folder, tmp_path / "one.safetensors")
    np.testing.assert_array_equal(safeload.load(tmp_path / "one.safetensors", dtype="float32")[name], want)
    assert load_file(tmp_path / "one.safetensors").keys() == tensors.keys()


def test_codes_in_order_need_no_whole_words_and_a_negative_zero_point_no_nibble(tmp_path):
    for (tensors, want), said in (
        (in_groups("order", out=21), GROUPS),
        (int4_columns("order"), {"dtype": "int4", **COLUMNS}),
        (negative_zero_of_all(), {"dtype": "int4", **TENSOR}),
    ):
        folder = write(tmp_path / "x", tensors, config("order", **said))
        np.testing.assert_array_equal(safeload.load(folder, dtype="float32")["a.weight"], want)


def test_biases_have_a_description_of_their_own(tmp_path):
    tensors, want = in_groups()
    real, whole = rng.standard_normal(OUT).astype(F8), integers(-128, 128, OUT).astype(np.int8)
    more = {"a.bias": real, "a.bias_scale": F32(0.5)}
    said = config(**GROUPS, bias={"dtype": "fp8_e4m3", "qscheme": "per_tensor"})
    got = safeload.load(write(tmp_path / "x", {**tensors, **more}, said), dtype="float32")
    np.testing.assert_array_equal(got["a.bias"], real.astype(F32) * F32(0.5))
    np.testing.assert_array_equal(got["a.weight"], want)
    more = {"a.bias": whole, "a.bias_scale": F32(0.5), "a.bias_zero_point": np.int8(2)}
    said = config(**GROUPS, bias={"dtype": "int8", "qscheme": "per_tensor"})
    got = safeload.load(write(tmp_path / "x", {**tensors, **more}, said), dtype="float32")
    np.testing.assert_array_equal(got["a.bias"], (whole.astype(F32) - 2) * F32(0.5))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("prefix", ["", "q"], ids=["names", "names of transformers 5.6"])
def test_the_custom_mode_of_awq(order, signed, prefix, tmp_path):
    names = {"a.weight": "a.qweight", "a.weight_scale": f"a.{prefix}scales", "a.weight_zero_point": f"a.{prefix}qzeros"}
    tensors, want = renamed(in_groups(order, signed=signed), names)
    said = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": not signed}
    for own in ({"pack_method": order}, {"export": {"pack_method": order}}):
        folder = write(tmp_path / "x", tensors, {**said, **own})
        np.testing.assert_array_equal(safeload.load(folder, dtype="float32")["a.weight"], want)
    with pytest.raises(FormatError, match="unknown pack_method 'sorted'"):
        safeload.open(write(tmp_path / "x", tensors, {**said, "pack_method": "sorted"}))


# ---- layers ----


def test_the_first_glob_that_matches_a_layer_counts(tmp_path):
    int4 = {"weight": {**GROUPS, "dtype": "int4"}}
    tensors, want = in_groups(signed=True)
    for layers in (
        {"*a": int4, "a": {"weight": {"dtype": "fp4"}}},
        {"b": {"weight": {"dtype": "fp4"}}, "[a-c]": int4},
        {"?": int4, "*": None},
    ):
        folder = write(tmp_path / "x", tensors, config(**GROUPS, layers=layers))
        np.testing.assert_array_equal(safeload.load(folder, dtype="float32")["a.weight"], want)
    said = {**config(**GROUPS), "layer_type_quant_config": {"Linear": int4, "Conv2d": None}}
    np.testing.assert_array_equal(
        safeload.load(write(tmp_path / "x", tensors, said), dtype="float32")["a.weight"], want
    )
    with pytest.raises(FormatError, match="has no dtype for its I32 codes"):
        safeload.open(write(tmp_path / "x", tensors, config(**GROUPS, layers={"a": {"weight": None}})))
    with pytest.raises(UnsupportedError, match=r"'a\.weight' holds I32 codes"):
        safeload.load(write(tmp_path / "x", tensors, config(layers={"[z-a]": int4}, **GROUPS)), dtype="float32")


@pytest.mark.parametrize(
    ("signed", "name", "new", "kept"),
    [
        (False, "a.q_proj", "b.v_proj", True),
        (True, "a.k_proj", "b.k_proj", True),
        (True, "a.k_proj", "a.v_proj", False),
    ],
)
def test_a_new_name_must_have_the_same_description(signed, name, new, kept, tmp_path):
    said = config(layers={"*k_proj": {"weight": {**GROUPS, "dtype": "int4"}}}, **GROUPS)
    tensors, want = in_groups(signed=signed)
    folder = write(tmp_path / "x", {f"{name}{key[1:]}": array for key, array in tensors.items()}, said)
    if kept:
        safeload.convert(folder, tmp_path / "out", rename=[(re.escape(name), new)])
        assert isinstance(safeload.load(tmp_path / "out")[f"{new}.weight"], safeload.QuantizedTensor)
        np.testing.assert_array_equal(safeload.load(tmp_path / "out", dtype="float32")[f"{new}.weight"], want)
    else:
        with pytest.raises(UnsupportedError, match=rf"'{name}.weight' stays packed.*names module '{name}'"):
            safeload.convert(folder, tmp_path / "out", rename=[(re.escape(name), new)])


def test_layers_that_keep_the_quantization_of_their_source(tmp_path):
    """As Quark leaves those of DeepSeek that it excludes."""
    codes, grid = rng.standard_normal((130, 200)).astype(F8), scales(2, 2)
    tensors, want = in_groups()
    more = {"b.weight": codes, "b.weight_scale_inv": grid}
    got = safeload.load(write(tmp_path / "x", {**tensors, **more}, config(**GROUPS)), dtype="float32")
    spread = grid.repeat(128, 0)[:130].repeat(128, 1)[:, :200]
    np.testing.assert_array_equal(got["b.weight"], codes.astype(F32) * spread)
    np.testing.assert_array_equal(got["a.weight"], want)


# ---- refused ----

ONLINE = [{"name": "rotation", "online_config": {"online_rotation_layers": ["a"]}}]
STAGES = [{"dtype": "fp4", "qscheme": "per_group", "group_size": 16}, {"dtype": "fp8_e5m3", "is_scale_quant": True}]


@pytest.mark.parametrize(
    ("said", "what"),
    [
        *[({"dtype": dtype}, f"Quark's {dtype}") for dtype in ("mx", "mx6", "mx9", "bfp16", "int2", "uint2", "int3")],
        ({"dtype": "fp4", "scale_format": "e5m3"}, "Quark's fp4 with scales of e5m3"),
        ({"weight": STAGES}, "Quark's fp4 and fp8_e5m3 in stages"),
        ({"dtype": "mxfp\x1b4" + "x" * 10**5}, "Quark's mxfp"),
    ],
    ids=range(10),
)
def test_what_is_not_read_is_named(said, what, tmp_path, capsys):
    tensors = {"a.weight": np.zeros((OUT, 8), np.uint8), "a.weight_scale": np.zeros((OUT, 4), np.uint8)}
    folder = write(tmp_path / "x", tensors, config(**said))
    assert safeload.load(folder).keys() == tensors.keys()
    with pytest.raises(UnsupportedError, match=rf"This is {what}.*AMD Quark reads it") as caught:
        safeload.load(folder, dtype="float32")
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert main(["info", str(folder)]) == 0
    assert re.search(rf"they are {what}", " ".join(capsys.readouterr().out.split()))
    # Without scales it is still not a fault of the checkpoint.
    assert safeload.load(write(folder, {"a.weight": tensors["a.weight"]}, config(**said))).keys() == {"a.weight"}


@pytest.mark.parametrize("made", [in_groups(), floats(F8, scales(), lambda x: x)], ids=["int4", "fp8"])
def test_a_rotated_basis(made, tmp_path):
    tensors, _ = made
    spec = GROUPS if len(tensors) == 3 else {"dtype": "fp8_e4m3"}
    rotation = {"a.input_rotation": np.ones((8, 8), np.int8)}
    for more, said in ((rotation, {}), ({}, {"algo_config": ONLINE}), (rotation, {"algo_config": ONLINE[0]})):
        folder = write(tmp_path / "x", {**tensors, **more}, {**config(**spec), **said})
        with pytest.raises(UnsupportedError, match="This is Quark's weights in a rotated basis"):
            safeload.load(folder, dtype="float32")
    offline = {**config(**spec), "algo_config": [{"name": "rotation", "r1": True, "online_config": None}, None]}
    assert safeload.load(write(tmp_path / "x", tensors, offline), dtype="float32")["a.weight"].shape == (OUT, IN)


def test_layouts_that_are_not_read(tmp_path):
    tensors, _ = in_groups()
    old = {**tensors, "a.weight_scale": tensors["a.weight_scale"].T}
    ragged, _ = in_groups(out=21)
    for stored in (old, ragged):
        folder = write(tmp_path / "x", stored, config(**GROUPS))
        assert safeload.load(folder).keys() == stored.keys()
        with pytest.raises(UnsupportedError, match=r"'a\.weight' holds I32 codes"):
            safeload.load(folder, dtype="float32")


# ---- wrong ----


def changed(name, of):
    return lambda tensors: {**tensors, f"a.weight{name}": of(tensors[f"a.weight{name}"])}


def without(name):
    return lambda tensors: {key: array for key, array in tensors.items() if key != f"a.weight{name}"}


def second(tensors):
    return {**tensors, "a.weight_scale_2": F32(1)}


FP4, E4M3 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 16}, {"dtype": "fp8_e4m3", "is_scale_quant": True}
NUMBERS = fp4(scales(OUT, 4))
WRONG = [
    (in_groups(), GROUPS, without("_scale"), "'a.weight' holds I32 codes, but the checkpoint has no scale"),
    (in_groups(), GROUPS, without("_zero_point"), "its zero points are missing"),
    (in_groups(), GROUPS, changed("_zero_point", lambda x: x[:1]), r"zero points are \[1, 3\], expected \[2, 3\]"),
    (in_groups(), GROUPS, changed("_zero_point", lambda x: x.astype(np.int64)), "zero points are I64, expected I32"),
    (in_groups(zeros="f"), GROUPS, changed("_zero_point", lambda x: x[:, :3]), r"\[2, 3\], expected \[2, 24\]"),
    (in_groups(), GROUPS, changed("_scale", lambda x: x[:, :7]), r"words \[64, 3\] and scales \[2, 7\] must be"),
    (in_groups(), GROUPS, changed("", lambda x: x[:63]), r"scales \[2, 24\] do not divide rows of 63"),
    (in_groups(), GROUPS, changed("", lambda x: x[:0]), "do not form a matrix"),
    (in_groups(), {**GROUPS, "group_size": 16}, dict, r"rows of 64 in groups of 16 \(group_size\)"),
    (in_groups(), {**GROUPS, "group_size": 2**70}, dict, r"in groups of \d+ \(group_size\)"),
    (in_groups(), {**GROUPS, "dtype": "fp4"}, dict, r"its codes \[64, 3\] are I32, but dtype is 'fp4'"),
    (in_groups(), {}, dict, "has no dtype for its I32 codes"),
    (in_groups(), {**GROUPS, "order": "sorted"}, dict, r"unknown export.pack_method 'sorted'"),
    (in_groups(), {**GROUPS, **ROWS}, dict, r"scales \[2, 24\] of \[64, 24\] do not fit qscheme 'per_channel'"),
    (in_groups(), GROUPS, second, "dtype has a single stage of scales"),
    (int4_columns("order"), {"dtype": "int4", **ROWS}, dict, r"scales \[64\] do not fit \[24, 64\] along axis 0"),
    (int4_columns("order"), {"dtype": "int4", **COLUMNS}, changed("_zero_point", lambda x: x[:7]), r"\[7\] do not fit"),
    (negative_zero_of_all(), {"dtype": "int4", **TENSOR}, changed("_zero_point", lambda x: np.ones(2, np.int32)),
     r"zero points \[2\] do not fit scales \[\]"),
    (int8(), {"dtype": "int8", **TENSOR}, changed("_zero_point", lambda x: np.ones(2, np.int8)), r"\[2\] do not fit"),
    (int8(), {"dtype": "int8", **ROWS}, changed("_scale", lambda x: scales(7)), r"scales \[7\] do not fit"),
    (int8(), {"dtype": "int8", "qscheme": "per_group"}, dict, r"must be \[in, out\] and \[groups, out\]"),
    (int8(), {"dtype": "uint8"}, dict, "are I8, but dtype is 'uint8'"),
    (NUMBERS, FP4, changed("_scale", lambda x: x[:, :3]), r"scales \[24, 3\] do not divide rows of 64"),
    (NUMBERS, FP4, changed("_scale", lambda x: x[:9]), r"scales \[9, 4\] do not fit codes \[24, 32\]"),
    (NUMBERS, {**FP4, "scale_format": "e8m0"}, dict, "are F32, but scale_format is 'e8m0'"),
    (NUMBERS, {**FP4, "dtype": "fp6_e2m3"}, dict, r"codes \[24, 32\] are not rows of 6-bit codes"),
    (NUMBERS, {"weight": [FP4, E4M3]}, dict, r"weight_scale_2\)"),
    (NUMBERS, {"weight": [FP4, E4M3]}, second, r"scales \[24, 4\] are F32 beside \[\], but dtype is 'fp8_e4m3'"),
    (NUMBERS, FP4, second, "dtype has a single stage of scales"),
]  # fmt: skip


@pytest.mark.parametrize("case", WRONG, ids=range(len(WRONG)))
def test_what_is_missing_or_does_not_fit_is_an_error_of_open(case, tmp_path):
    (tensors, _), said, change, message = case
    tensors = change(tensors)
    folder = write(tmp_path / "x", tensors, config(**said))
    with pytest.raises(FormatError, match=message):
        safeload.open(folder)
    assert safeload.load(folder, stored=True).keys() == tensors.keys()
    if len(tensors) > 1:  # alone it opens, and is not taken for numbers
        with pytest.raises((FormatError, UnsupportedError)):
            safeload.load(folder / "model.safetensors", dtype="float32")


def test_scales_of_a_square_matrix_need_an_axis(tmp_path):
    codes = integers(-128, 128, IN, IN).astype(np.int8)
    tensors = {"a.weight": codes, "a.weight_scale": scales(IN), "a.weight_zero_point": np.zeros(IN, np.int8)}
    for axis, spread in ((0, (IN, 1)), (-2, (IN, 1)), (1, (1, IN)), (-1, (1, IN))):
        folder = write(tmp_path / "x", tensors, config(dtype="int8", qscheme="per_channel", ch_axis=axis))
        want = codes.astype(F32) * tensors["a.weight_scale"].reshape(spread)
        np.testing.assert_array_equal(safeload.load(folder, dtype="float32")["a.weight"], want)
    with pytest.raises(FormatError, match=r"scales \[64\] can be per row or per column, and ch_axis is missing"):
        safeload.open(write(tmp_path / "x", tensors, config(dtype="int8", qscheme="per_channel", ch_axis=None)))


def weight_or_message(folder):
    try:
        return safeload.load(folder, dtype="float32")["a.weight"]
    except (FormatError, UnsupportedError) as error:
        return str(error)


def test_hostile_values_of_a_configuration_raise_nothing_else(tmp_path):
    tensors, want = in_groups()
    folder = write(tmp_path / "x", tensors, config(**GROUPS))
    junk = (None, [], {}, "", "\x1b[31m", 0, -1, 2**70, 1.5, True, [[[]]], {"a": []}, [None, "*"], "*" * 3000)
    ways = [
        (), ("layer_quant_config",), ("layer_type_quant_config",), ("algo_config",), ("export",),
        ("export", "pack_method"), ("global_quant_config",), ("global_quant_config", "weight"),
        *[("global_quant_config", "weight", key) for key in (*GROUPS, "scale_format")],
    ]  # fmt: skip
    for way in ways:
        for value in junk:
            said = config(**GROUPS)
            holder = said
            for key in way[:-1]:
                holder = holder[key]
            if way:
                holder[way[-1]] = value
            (folder / "config.json").write_text(json.dumps({"quantization_config": said if way else value}))
            got = weight_or_message(folder)
            if isinstance(got, str):
                assert "\x1b" not in got
                assert len(got) < 2000
            else:
                assert got.shape == want.shape


def test_rows_of_matrices_with_packed_zero_points_are_whole_words():
    fixture = FIXTURES["quark_integers"]
    name = "model.layers.0.self_attn.o_proj.weight"
    value, want = safeload.load(fixture.path)[name], fixture.expected()[name]
    np.testing.assert_array_equal(value[8:40].dequantize(), want[8:40])
    np.testing.assert_array_equal(value[8:40][16:].dequantize(), want[24:40])
    with pytest.raises(ValueError, match="rows 4 to 8 of int4 row asym are not whole blocks of 8 rows"):
        value[4:8]
