"""Arrays to fill that overlap what is read: right values through a temporary, or an error before a byte is written."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import safeload
from safeload import Layout, QuantizedTensor, StackedTensor, quantize, stack
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

ONE = Layout("one", [StackedTensor("w", "w")])
TURNED = Layout("turned", [StackedTensor("w", "w", transpose=True)])
TWO = Layout("two", [StackedTensor("w", "l.{}.w")])


@pytest.mark.parametrize("shift", [0, 1, 7, 16, 31])
def test_stack_into_its_own_source_with_a_conversion(shift):
    buffer = np.zeros(128, "f4")
    source = buffer[shift : shift + 32]
    source[:] = np.arange(32)
    got = stack({"w": source}, ONE, dtype="float64", out={"w": buffer[:64].view("f8")})
    assert got["w"].tolist() == list(range(32))
    assert np.shares_memory(got["w"], buffer)


@pytest.mark.parametrize("layout", [ONE, TURNED])
@pytest.mark.parametrize("order", "CF")
def test_stack_onto_itself(layout, order):
    buffer = np.arange(36, dtype="i4").reshape(6, 6, order=order)
    want = buffer.T.copy() if layout is TURNED else buffer.copy()
    out = buffer if order == "C" else buffer.T
    np.testing.assert_array_equal(stack({"w": buffer}, layout, out={"w": out})["w"], want)


@pytest.mark.parametrize("swapped", [False, True])
def test_layers_that_change_places(swapped):
    buffer = np.arange(32, dtype="f4")
    halves = [buffer[:16].reshape(4, 4), buffer[16:].reshape(4, 4)]
    layers = {f"l.{k}.w": half for k, half in enumerate(halves[::-1] if swapped else halves)}
    want = np.stack(list(layers.values()))
    np.testing.assert_array_equal(stack(layers, TWO, out={"w": buffer.reshape(2, 4, 4)})["w"], want)


def test_an_array_to_fill_over_the_source_of_another():
    a, b = np.arange(4.0), np.arange(4.0) + 10
    layout = Layout("both", [StackedTensor("x", "a"), StackedTensor("y", "b")])
    got = stack({"a": a, "b": b}, layout, out={"x": b, "y": a})
    assert got["x"].tolist() == [0, 1, 2, 3]
    assert got["y"].tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("scheme", ["int8", "q4_0", "q5_1", "q8_0", "q6_k"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("at", ["begin", "end"])
def test_dequantize_over_its_own_codes(scheme, dtype, at):
    right = quantize(np.random.default_rng(0).standard_normal((8, 256)).astype("f4"), scheme)
    want = right.dequantize(dtype)
    out = np.zeros_like(want)
    raw = out.view("u1").reshape(-1)
    data = raw[: right.data.nbytes] if at == "begin" else raw[raw.size - right.data.nbytes :]
    data = data.view(right.data.dtype).reshape(right.data.shape)
    data[...] = right.data
    tensor = QuantizedTensor(scheme, right.shape, data, right.scale)
    assert tensor.dequantize(dtype, out=out) is out
    np.testing.assert_array_equal(out.view("u1"), want.view("u1"))


def test_dequantize_over_its_scales():
    right = quantize(np.random.default_rng(0).standard_normal((8, 64)).astype("f4"), "int8", axis=0)
    want = right.dequantize()
    out = np.zeros_like(want)
    scale = out.reshape(-1)[5:13].reshape(right.scale.shape)
    scale[...] = right.scale
    np.testing.assert_array_equal(QuantizedTensor("int8", (8, 64), right.data, scale, 0).dequantize(out=out), want)


def test_quantized_source_of_a_stack():
    right = quantize(np.ones((4, 64), "f4"), "q8_0")
    out = np.zeros((4, 64), "f4")
    data = out.view("u1").reshape(-1)[: right.data.nbytes].reshape(right.data.shape)
    data[...] = right.data
    tensor = QuantizedTensor("q8_0", (4, 64), data)
    np.testing.assert_array_equal(stack({"w": tensor}, ONE, dtype="float32", out={"w": out})["w"], right.dequantize())


@pytest.mark.parametrize("scheme", ["int8", "q8_0"])
def test_quantize_into_the_memory_of_its_source(scheme):
    x = np.random.default_rng(0).standard_normal((8, 64)).astype("f4")
    want = quantize(x.copy(), scheme)
    data = x.view("u1").reshape(-1)[: want.data.nbytes].view(want.data.dtype).reshape(want.data.shape)
    scale = None if want.scale is None else np.zeros_like(want.scale)
    assert quantize(x, scheme, out=QuantizedTensor(scheme, x.shape, data, scale)) == want


@pytest.mark.parametrize(("source", "target"), [("f4", "f8"), ("f8", "f4"), (">f4", "f4"), ("i8", "f4"), ("f8", "V2")])
@pytest.mark.parametrize("shift", [0, 8, 24])
def test_astype_into_its_own_source(source, target, shift):
    target = np.dtype(ml_dtypes.bfloat16 if target == "V2" else target)
    raw = np.zeros(512, "u1")
    x = raw[shift : shift + 32 * np.dtype(source).itemsize].view(source)
    x[:] = np.arange(32)
    out = raw[: 32 * target.itemsize].view(target)
    assert safeload.astype(x, target, out=out).astype(float).tolist() == list(range(32))


# ---- files ----


@pytest.fixture
def path(tmp_path):
    save_file({"a": np.arange(8, dtype="f4"), "b": np.arange(8, 16, dtype="f4")}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def mapped(path, mode="r+"):
    """The tensors of the file in the other order, in a mapping."""
    with safeload.open(path) as opened:
        begin = opened.weight_files[0].table.begins()[0]
    whole = np.memmap(path, "f4", mode, begin, (16,))
    return {"a": whole[8:], "b": np.asarray(whole)[:8]}


@pytest.mark.parametrize(
    "read",
    [
        lambda path, out: safeload.load(path, out=out),
        lambda path, out: safeload.load(path, out=out, backend="direct"),
        lambda path, out: safeload.open(path).load(["a"], out={"a": out["a"]}),
        lambda path, out: load_file(path, out=out),
        lambda path, out: list(safeload.open(path).stream(out=out)),
        lambda path, out: list(safeload.open(path).stream(out=out.__getitem__)),
        lambda path, out: stack(path, Layout("l", [StackedTensor("a", "a"), StackedTensor("b", "b")]), out=out),
    ],
)
def test_arrays_that_map_the_file_are_refused_before_a_byte_is_written(path, read):
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"'[ab]' maps .*x\.safetensors.*array in memory"):
        read(path, mapped(path))
    assert path.read_bytes() == before


def test_arrays_that_map_other_files_or_only_a_copy_are_filled(path, tmp_path):
    out = mapped(path, "c")
    assert safeload.load(path, out=out)["a"].tolist() == list(range(8))
    other = np.memmap(tmp_path / "other", "f4", "w+", 0, (2, 8))
    loaded = safeload.load(path, out={"a": other[0], "b": other[1]})
    assert loaded["b"].tolist() == list(range(8, 16))


# Ranges of a buffer, in units: contiguous, backwards, with gaps, empty.
PLACES = [slice(10, 20), slice(39, 29, -1), slice(60, 80, 5), slice(90, 90), slice(15, 25)]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("others", [False, True])
def test_only_arrays_that_overlap_a_source_are_filled_through_memory_of_their_own(place, others):
    """Gaps between the elements of a source are a part of it."""
    unit = 128 << 10
    count = len(range(*place.indices(100)))
    sources = {f"s{k}": other for k, other in enumerate(PLACES) if others and other != place}
    entries = [StackedTensor("w", "w"), *(StackedTensor(name, name) for name in sources)]
    stack({"w": np.ones(3)}, ONE)  # with what it imports
    for at in {*range(0, 101 - count, 5), 76, 77}:
        buffer = np.arange(100, dtype="u1")[:, None].repeat(unit, 1)
        weights = {name: buffer[other] for name, other in sources.items()} | {"w": buffer[place]}
        target = buffer[at : at + count]
        want = {name: array.copy() for name, array in weights.items()}
        out = {name: np.empty_like(array, order="C") for name, array in weights.items()} | {"w": target}
        tracemalloc.start()
        stack(weights, Layout("some", entries), out=out)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        for name, array in want.items():
            np.testing.assert_array_equal(out[name], array)
        overlaps = any(np.may_share_memory(target, array) for array in weights.values())
        copied = max((array.nbytes for array in weights.values() if not array.flags.c_contiguous), default=0)  # in turn
        assert (peak - copied > target.nbytes // 2) == overlaps or not count, at
