"""Blocks of GGUF that a tensor beside them, or bytes behind them, scale once more: NVFP4, and I2_S of BitNet's fork."""

import json

import gguf as peer
import numpy as np
import pytest
from builders import gguf_build as g
from builders.quantized import FIXTURES
from builders.random import rng
from builders.remote import Served

import safeload
from safeload import FormatError, QuantizedTensor, SafeloadError, UnsupportedError
from safeload.gguf import save_file

pytestmark = pytest.mark.any_python

NVFP4 = peer.GGMLQuantizationType.NVFP4


def nvfp4(*shape):
    """Random blocks, whose scales are small enough for every sum."""
    return QuantizedTensor("nvfp4", shape, rng.integers(0, 256, (*shape[:-1], shape[-1] // 64 * 36), np.uint8))


def values_of(blocks):
    return peer.dequantize(blocks.data, NVFP4)


def contents(path):
    """Type, shape and bytes of each tensor, as gguf-py reads them."""
    return {t.name: (t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in peer.GGUFReader(path).tensors}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


# ---- NVFP4 ----


def test_blocks_without_a_scale_stay_blocks(path):
    blocks = {name: nvfp4(2, 128) for name in ("a.weight", "b.weight", "c", "d.weight")}
    scale = np.array([0.3], np.float32)
    save_file({**blocks, "b.scale": scale, "c.scale": scale, "d.input_scale": scale}, path)
    with safeload.open(path) as opened:
        assert {name: info.dtype for name, info in opened.tensors.items()} == {
            **dict.fromkeys(("a.weight", "c", "d.weight"), "NVFP4"),
            "b.weight": "nvfp4",
            "c.scale": "F32",
        }
        assert opened.tensors["b.weight"].parts == ("b.weight", "b.scale")
        got = opened.load(dtype="float32")
    for name, value in blocks.items():
        want = values_of(value) * scale if name == "b.weight" else values_of(value)
        np.testing.assert_array_equal(got[name], want)
    with safeload.open(path, stored=True) as opened:
        assert set(opened) == {*blocks, "b.scale", "c.scale", "d.input_scale"}
        np.testing.assert_array_equal(opened["b.weight"].dequantize(), values_of(blocks["b.weight"]))


@pytest.mark.parametrize(
    ("shape", "scale", "message"),
    [
        ((2, 64), np.ones(2, np.float32), r"b.scale \[2\] must hold a single scale or one per matrix of \[2, 64\]"),
        ((3, 2, 64), np.ones(2, np.float32), r"b.scale \[2\] must hold a single scale"),
        ((2, 64), np.ones(0, np.float32), r"b.scale \[0\] must hold a single scale"),
        ((2, 64), np.ones(1, np.float16), "b.scale is F16, but scales of nvfp4 must be F32"),
    ],
)
def test_a_scale_that_does_not_fit_is_refused(shape, scale, message, path):
    save_file({"b.weight": nvfp4(*shape), "b.scale": scale}, path)
    with pytest.raises(FormatError, match=f"tensor 'b.weight': {message}.*stored=True"):
        safeload.open(path)
    assert safeload.load(path, stored=True).keys() == {"b.weight", "b.scale"}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_refused_when_it_is_used(value, path):
    save_file({"b.weight": nvfp4(2, 64), "b.scale": np.array([value], np.float32), "a": np.ones(3, np.float32)}, path)
    with safeload.open(path) as opened:
        assert opened.load(["a"], dtype="float32")["a"].sum() == 3
        with pytest.raises(FormatError, match=r"'b.weight': its scale is (nan|inf) at \[0, 0\]"):
            opened.load(dtype="float32")


def test_the_scale_may_be_in_another_part(tmp_path):
    """As gguf-split divides a file: in the order of the tensors."""
    blocks = nvfp4(3, 2, 64)
    keys = ("split.no", "split.count", "split.tensors.count")
    for k, tensors in enumerate([{"b.weight": blocks}, {"b.scale": np.float32([0.5, 3, 0.1])}]):
        values = (np.uint16(k), np.uint16(2), np.int32(2))
        save_file(tensors, tmp_path / f"m-0000{k + 1}-of-00002.gguf", dict(zip(keys, values, strict=True)))
    want = values_of(blocks) * np.float32([0.5, 3, 0.1])[:, None, None]
    got = safeload.load(tmp_path / "m-00002-of-00002.gguf", dtype="float32")
    assert got.keys() == {"b.weight"}
    np.testing.assert_array_equal(got["b.weight"], want)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda b: {"b": b}, "'b' cannot store its scale: its name does not end in .weight"),
        (lambda b: {"b.weight": b, "b.scale": np.ones(1, np.float32)}, "'b.scale' is another tensor"),
    ],
)
def test_a_scale_needs_a_name(tensors, message, path, tmp_path):
    save_file({"b.weight": nvfp4(2, 64), "b.scale": np.ones(1, np.float32)}, path)
    with pytest.raises(SafeloadError, match=message):
        save_file(tensors(safeload.load(path)["b.weight"]), tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


# ---- I2_S ----


def ternary_file(values, scale, *entries):
    """A file as BitNet's fork writes it, of one tensor."""
    codes = (values + 1).astype(np.uint8).reshape(-1, 4, 32)
    data = (codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]).tobytes()
    data += np.float32(scale).tobytes() + bytes(28)
    described = g.tensor("w.weight", values.shape[::-1], 36, 0)
    return g.build([g.entry("general.file_type", g.U32, 40), *entries], [described], data)


def test_the_weights_are_those_of_the_safetensors_of_the_same_model(path, tmp_path):
    """microsoft/bitnet-b1.58-2B-4T and its GGUF: the same codes and scale, in another order."""
    values, scale = rng.integers(-1, 2, (12, 256)), np.float32(1.555)
    path.write_bytes(ternary_file(values, scale))
    planes = (values + 1).astype(np.uint8).reshape(4, 3, 256)
    packed = planes[0] | planes[1] << 2 | planes[2] << 4 | planes[3] << 6
    folder = tmp_path / "model"
    folder.mkdir()
    stored = {"w.weight": packed, "w.weight_scale": np.array([scale])}
    safeload.numpy.save_file(stored, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}
    (folder / "config.json").write_text(json.dumps(config))
    want = safeload.load(folder, dtype="float32")
    got = safeload.load(path, dtype="float32")
    assert got.keys() == want.keys()
    assert got["w.weight"].tobytes() == want["w.weight"].tobytes()
    assert [info.dtype for info in safeload.open(path).tensors.values()] == ["ternary"]


def test_shapes_of_one_axis_and_of_three(path):
    for shape in ((384,), (2, 3, 128), (0, 128), (5, 0)):
        values = rng.integers(-1, 2, shape)
        path.write_bytes(ternary_file(values, 0.25))
        with safeload.open(path) as opened:
            assert opened.tensors["w.weight"].shape == shape
            np.testing.assert_array_equal(opened.load(dtype="float16")["w.weight"], values / np.float16(4))


def test_a_code_of_no_value_is_refused_with_its_byte(path):
    content = bytearray(ternary_file(rng.integers(-1, 2, (3, 256)), 2))
    content[-32 - 64] |= 0xC0  # the first code of the last row
    path.write_bytes(content)
    message = rf"'w.weight': row 2, column 0 has code 3, which no value is stored as \(.*, byte {len(content) - 96}\)"
    served = Served({str(path): bytes(content)}).at(str(path))
    for given in (path, served):
        with safeload.open(given) as opened, pytest.raises(FormatError, match=r"row 2, column 0 has code 3"):
            opened.load(dtype="float32")
    with pytest.raises(FormatError, match=message):
        safeload.load(path, dtype="float32")


def test_the_file_type_may_come_in_any_place_and_once(path):
    later = g.entry("x", g.U8, 1)
    path.write_bytes(ternary_file(np.zeros((1, 128), int), 1, later))
    assert safeload.open(path).metadata["general.file_type"] == 40
    content = path.read_bytes().replace(
        g.entry("general.file_type", g.U32, 40), g.entry("general.file_type", g.U64, 40)
    )
    path.write_bytes(content)
    with pytest.raises(UnsupportedError, match="IQ4_NL_4_4"):
        safeload.load(path)


def test_a_file_without_the_file_type_would_not_be_read_again(path, tmp_path):
    path.write_bytes(ternary_file(np.zeros((2, 128), int), 1))
    tensors = safeload.load(path)
    with pytest.raises(UnsupportedError, match=r"'w.weight' is I2_S of BitNet, .* general.file_type 40"):
        save_file(tensors, tmp_path / "x.gguf")
    save_file(tensors, tmp_path / "y.gguf", {"general.file_type": 40})
    assert safeload.load(tmp_path / "y.gguf") == tensors


# ---- both ----


def test_a_copy_in_gguf_has_the_same_bytes(tmp_path):
    """Directly, from memory, and by way of safetensors, where parts are tensors of their own."""
    for name in ("gguf_nvfp4", "gguf_i2_s"):
        source, copies = FIXTURES[name].path, [tmp_path / f"{name}-{k}.gguf" for k in range(3)]
        safeload.convert(source, copies[0])
        save_file(safeload.load(source), copies[1], safeload.open(source).metadata)
        safeload.convert(source, tmp_path / f"{name}.safetensors")
        by_way = safeload.load(tmp_path / f"{name}.safetensors")
        save_file({key: by_way[key] for key in safeload.open(source)}, copies[2], safeload.open(source).metadata)
        for copy in copies:
            if name == "gguf_i2_s":
                assert copy.read_bytes() == source.read_bytes()
                continue
            want = contents(source)
            if copy is not copies[0]:  # what only activations need is not among the tensors
                want = {key: one for key, one in want.items() if "input_scale" not in key}
            assert contents(copy) == want


def test_names_that_change_keep_the_scale(tmp_path):
    source, want = FIXTURES["gguf_nvfp4"], FIXTURES["gguf_nvfp4"].expected()
    for suffix in ("gguf", "safetensors"):
        made = tmp_path / f"x.{suffix}"
        safeload.convert(source.path, made, names=["blk.0.attn_q.weight"], rename={"blk.0.attn_q.weight": "q.weight"})
        got = safeload.load(made, dtype="float32")
        assert got.keys() == {"q.weight"}
        np.testing.assert_array_equal(got["q.weight"], want["blk.0.attn_q.weight"])


def test_rows_are_read_alone():
    for name in ("gguf_nvfp4", "gguf_i2_s"):
        for key, want in FIXTURES[name].expected().items():
            with safeload.open(FIXTURES[name].path) as opened:
                np.testing.assert_array_equal(opened.get_slice(key, dtype="float32")[1:], want[1:])
                if want.ndim > 1:
                    np.testing.assert_array_equal(opened[key][1:2].dequantize(), want[1:2])
