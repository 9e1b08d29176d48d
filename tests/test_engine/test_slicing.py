"""Slices read from files: numpy's basic indexing, upstream's refusals, no byte outside the range that is selected."""

import copy
import json
import math
import os
import pickle
import struct
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from builders import inside
from builders.holes import extend
from builders.thorough import examples
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import safeload
from safeload import QuantizedTensor, SafetensorError, gguf, safe_open
from safeload.numpy import load_file, save_file

jobs = inside.jobs

byte_bounds = np.byte_bounds if hasattr(np, "byte_bounds") else np.lib.array_utils.byte_bounds  # until numpy 2

DTYPES = [np.dtype(t) for t in (np.uint8, np.int16, np.float32, np.float64, np.complex64, bool, ml_dtypes.bfloat16)]


INT32 = np.dtype(np.int32)


def numbered(shape, dtype=INT32):
    count = np.arange(int(np.prod(shape, dtype=np.int64)))
    return (count % 2 if dtype.kind == "b" else count % 101).astype(dtype).reshape(shape)


def same(ours, expected):
    expected = np.asarray(expected)
    return (
        isinstance(ours, np.ndarray)
        and (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
        and ours.tobytes() == expected.tobytes()
    )


def assert_own_memory(array):
    assert array.flags.c_contiguous
    assert array.flags.aligned
    assert array.flags.writeable


def past_the_end(index, shape):
    """Whether a slice has a bound that safe_open refuses, as upstream does."""
    items = index if isinstance(index, tuple) else (index,)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        given = sum(item is not None for item in items) - 1
        items = (*items[:at], *[slice(None)] * (len(shape) - given), *items[at + 1 :])
    sliced = [item for item in items if item is not None]
    return any(
        isinstance(item, slice) and any(bound is not None and bound > size for bound in (item.start, item.stop))
        for item, size in zip(sliced, shape, strict=False)
    )


# ---- against numpy ----


@st.composite
def tensor_and_index(draw):
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=6))
    dtype = draw(st.sampled_from(DTYPES))
    index = draw(hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    return numbered(shape, dtype), index


@settings(deadline=None, max_examples=examples(150))
@given(tensor_and_index())
@example((numbered((3, 4)), ()))
@example((numbered(()), ...))
@example((numbered(()), None))
@example((numbered((0, 3)), (slice(None), 1)))
@example((numbered((4,)), slice(None, None, -1)))
@example((numbered((4,)), slice(-100, 100)))
@example((numbered((4,)), slice(3, 1)))
def test_basic_indexing_is_numpys(case):
    array, index = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        # A neighbour on each side, so that a read beyond the tensor shows.
        others = {"a": np.full(3, 99, array.dtype), "z": np.full(3, 98, array.dtype)}
        save_file({"m": array, **others}, path, durable=False)
        with safeload.open(path) as checkpoint:
            got = checkpoint.get_slice("m")[index]
            assert same(got, array[index])
            assert_own_memory(got)
        with safe_open(path) as file:
            if past_the_end(index, array.shape):
                with pytest.raises(SafetensorError, match="out of bounds"):
                    file.get_slice("m")[index]
            else:
                got = file.get_slice("m")[index]
                assert same(got, array[index])
                assert_own_memory(got)


SLICES = st.builds(
    slice,
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(-4, 4).filter(bool),
)


@settings(deadline=None, max_examples=examples(150))
@given(
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7),
    st.lists(SLICES | st.integers(-9, 9) | st.none() | st.just(...), max_size=6).map(tuple),
)
def test_checkpoint_slices_accept_and_refuse_as_numpy_does(shape, index):
    array = numbered(shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        save_file({"m": array}, path, durable=False)
        with safeload.open(path) as checkpoint:
            part = checkpoint.get_slice("m")
            try:
                expected = array[index]
            except IndexError:
                with pytest.raises(IndexError):
                    part[index]
            else:
                assert same(part[index], expected)


BIG_SHAPES = [(300, 5000), (3, 600_000), (40, 30, 700), (1_500_000,), (2, 3, 4, 50_000), (5, 1, 262_144), (70_000, 9)]
BIG_INDICES = [
    (slice(None, None, 2),),
    (slice(None, None, -3),),
    (-1,),
    (1,),
    (slice(1, 3),),
    (..., 7),
    (..., slice(5, 9)),
    (..., slice(None, None, 2)),
    (..., slice(None, None, -7)),
    (..., slice(1, -1)),
    (..., slice(-3, None, -1500)),
    (slice(None, None, 2), ..., slice(3, None, 2)),
    (slice(None, None, -1), ..., slice(None, None, -1)),
    (1, ..., slice(2, None, 5)),
    (slice(1, None), ..., slice(None, -1)),
    (None, slice(-2, None), ..., None, slice(None, 4)),
]


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    path = tmp_path_factory.mktemp("big") / "x"
    rng = np.random.default_rng(1)
    tensors = {str(shape): rng.integers(0, 1 << 30, shape, np.int32) for shape in BIG_SHAPES}
    save_file(tensors, path, durable=False)
    return path, tensors


@pytest.mark.parametrize("shape", BIG_SHAPES, ids=str)
def test_slices_of_large_rows_are_numpys(shape, big):
    path, tensors = big
    array = tensors[str(shape)]
    with safeload.open(path) as checkpoint, safe_open(path) as file:
        ours, handle = checkpoint.get_slice(str(shape)), file.get_slice(str(shape))
        for index in BIG_INDICES:
            if len([item for item in index if item is not None and item is not ...]) <= len(shape):
                assert same(ours[index], array[index]), index
                if not past_the_end(index, shape):
                    assert same(handle[index], array[index]), index
                assert_own_memory(ours[index])


def test_random_slices_of_large_tensors_are_numpys(big):
    path, tensors = big
    rng = np.random.default_rng(7)

    def item(size):
        kind = rng.integers(4)
        if kind == 0:
            return int(rng.integers(-size, size))
        if kind == 1:
            return slice(None)
        low, high = sorted(rng.integers(0, size + 1, 2).tolist())
        step = int(rng.choice([1, 1, 2, 3, 17, 1000]))
        return slice(low, high, step) if kind == 2 else slice(high - 1 - size, low - 1 - size, -step)

    with safeload.open(path) as checkpoint:
        for _ in range(60):
            name = str(BIG_SHAPES[rng.integers(len(BIG_SHAPES))])
            index = tuple(item(size) for size in tensors[name].shape)
            assert same(checkpoint.get_slice(name)[index], tensors[name][index]), (name, index)


def count_reads(monkeypatch):
    """Lists that fill with the reads made from now on: (offset, bytes) of each."""
    reads = []
    real = jobs.Batch.run

    def counting(batch, **keywords):
        reads.extend((job.offset, job.size) for job in batch.jobs)
        return real(batch, **keywords)

    monkeypatch.setattr(jobs.Batch, "run", counting)
    return reads


@pytest.mark.parametrize(
    ("shape", "index", "reads_expected"),
    [
        ((300, 5000), (slice(None), 7), 300),
        ((300, 5000), (slice(10, 20),), 1),
        ((300, 5000), (5, slice(100, 200)), 1),
        ((300, 5000), (5, slice(7, 8)), 1),
        ((300, 5000), (), 1),
        ((300, 5000), (slice(0, 300, 100), slice(0, 10)), 3),
        ((40, 30, 700), (slice(3, 5),), 1),
        ((40, 30, 700), (3, slice(4, 9)), 1),
        ((2, 3, 4, 50_000), (slice(None, None, -1), 0, 1, slice(0, 3)), 2),
    ],
)
def test_contiguous_and_distant_parts_are_read_exactly(shape, index, reads_expected, big, monkeypatch):
    path, tensors = big
    expected = tensors[str(shape)][index]
    with safeload.open(path) as checkpoint:
        begin = checkpoint.tensors[str(shape)].offset
        part = checkpoint.get_slice(str(shape))
        reads = count_reads(monkeypatch)
        assert same(part[index], expected)
    assert len(reads) == reads_expected
    assert sum(size for _, size in reads) == expected.nbytes
    address = expected.__array_interface__["data"][0] - tensors[str(shape)].__array_interface__["data"][0]
    if reads_expected == 1:
        assert reads == [(begin + address, expected.nbytes)]


@pytest.mark.parametrize("shape", BIG_SHAPES, ids=str)
def test_no_read_leaves_the_range_that_the_selection_spans(shape, big, monkeypatch):
    path, tensors = big
    array = tensors[str(shape)]
    reads = count_reads(monkeypatch)
    with safeload.open(path) as checkpoint:
        begin, part = checkpoint.tensors[str(shape)].offset, checkpoint.get_slice(str(shape))
        for index in BIG_INDICES:
            if len([item for item in index if item is not None and item is not ...]) > len(shape):
                continue
            reads.clear()
            expected = array[index]
            assert same(part[index], expected)
            low, high = byte_bounds(expected) if expected.size else (0, 0)
            base = array.__array_interface__["data"][0]
            total = sum(size for _, size in reads)
            if expected.ndim and expected.size > 1:
                # A strided row is read with what follows it up to the next: at most a row more at each end.
                row = array.strides[0]
                assert all(low - base - row <= offset - begin for offset, _ in reads), index
                assert all(offset - begin + size <= high - base + row for offset, size in reads), index
            assert total <= array.nbytes, index
            assert all(size <= max((1 << 20) + 4096, expected.nbytes) for _, size in reads), index


def test_both_ways_of_reading_are_tested_here(big, monkeypatch):
    path, _ = big
    reads = count_reads(monkeypatch)
    with safeload.open(path) as checkpoint:
        got = checkpoint.get_slice("(300, 5000)")[:, ::2]
        assert sum(size for _, size in reads) > got.nbytes
        assert len(reads) < 300
        reads.clear()
        got = checkpoint.get_slice("(300, 5000)")[:, :2]
        assert sum(size for _, size in reads) == got.nbytes
        assert len(reads) == 300


@pytest.fixture
def terabyte(tmp_path):
    """A sparse file: U8 [10_000_000, 10_000], every byte zero but for three."""
    path, shape = tmp_path / "x", (10_000_000, 10_000)
    header = {"m": {"dtype": "U8", "shape": shape, "data_offsets": [0, 10**11]}}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        begin = file.tell()
        try:
            extend(file, begin + 10**11)
        except OSError as error:
            pytest.skip(f"no sparse file of 100 GB here: {error}")
        for position in (0, 5_000_000 * 10_000 + 77, 10**11 - 1):
            file.seek(begin + position)
            file.write(b"\x07")
    return path


def test_slices_of_a_hundred_gigabytes_are_instant(terabyte):
    with safe_open(terabyte) as file:
        part = file.get_slice("m")
        assert part.get_shape() == [10_000_000, 10_000]
        assert part[0, :3].tolist() == [7, 0, 0]
        assert part[5_000_000, 70:80].tolist() == [0, 0, 0, 0, 0, 0, 0, 7, 0, 0]
        assert part[4_999_999:5_000_002, 77].tolist() == [0, 7, 0]
        assert part[-1, -1] == 7
        assert part[::5_000_000, 77].tolist() == [0, 7]
        assert part[::-4_999_999, -1].tolist() == [7, 0, 0]
        assert part[7:7].shape == (0, 10_000)
        assert part[:, 3:3].shape == (10_000_000, 0)
    with safeload.open(terabyte) as checkpoint:
        assert checkpoint.nbytes == 10**11
        assert checkpoint.get_slice("m")[5_000_000, 77] == 7


# ---- memory ----


def test_slices_have_memory_of_their_own(tmp_path):
    path = tmp_path / "x"
    save_file({"m": numbered((50, 60))}, path, durable=False)
    content = path.read_bytes()
    with safe_open(path) as file, safeload.open(path) as checkpoint:
        parts = [source.get_slice("m")[:, 3:] for source in (file, checkpoint) for _ in range(2)]
        part = file.get_slice("m")
        parts += [part[:, 3:], part[:, 3:], file.get_tensor("m"), checkpoint["m"]]
        for i, one in enumerate(parts):
            assert not any(np.shares_memory(one, other) for other in parts[:i])
        parts[0][...] = 0
        assert same(part[:, 3:], numbered((50, 60))[:, 3:])
    assert path.read_bytes() == content


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
def test_both_backends_slice_alike(backend, tmp_path):
    save_file({"m": numbered((50, 60))}, tmp_path / "x", durable=False)
    with safe_open(tmp_path / "x", backend=backend) as file:
        assert same(file.get_slice("m")[::-2, 5], numbered((50, 60))[::-2, 5])


@pytest.mark.parametrize("shift", range(1, 8))
def test_slices_of_unaligned_data_are_aligned(shift, tmp_path):
    array = numbered((4, 5), np.dtype(np.float64))
    text = json.dumps({"m": {"dtype": "F64", "shape": [4, 5], "data_offsets": [0, 160]}}).encode()
    text += b" " * (-len(text) % 8 + shift)
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + array.tobytes())
    with safe_open(tmp_path / "x") as file:
        for index in (np.s_[:], np.s_[1], np.s_[:, 2], np.s_[::2, ::-1], np.s_[3, 4]):
            got = file.get_slice("m")[index]
            assert same(got, array[index])
            assert_own_memory(got)


# ---- dtypes ----


def test_bf16_slices_are_bf16(tmp_path):
    array = np.linspace(-3, 3, 60).astype(ml_dtypes.bfloat16).reshape(6, 10)
    save_file({"m": array}, tmp_path / "x", durable=False)
    with safe_open(tmp_path / "x") as file:
        part = file.get_slice("m")
        assert part.get_dtype() == "BF16"
        assert part.dtype == ml_dtypes.bfloat16
        for index in (np.s_[:], np.s_[2], np.s_[1:5:2, ::-3], np.s_[-1, -1]):
            assert same(part[index], array[index])


@pytest.mark.parametrize(
    ("code", "shape", "nbytes"),
    [
        *(("F4", [4, 6], 12), ("F4", [2, 3], 3), ("F6_E2M3", [3, 4], 9), ("F6_E3M2", [2, 2], 3), ("F4", [0, 4], 0)),
        *(("F4", [0, 3], 0), ("F6_E2M3", [2, 0, 3], 0), ("F6_E3M2", [0, 5], 0), ("F4", [3, 0], 0)),
    ],
)
def test_packed_dtypes_are_sliced_as_the_bytes_they_load_as(code, shape, nbytes, tmp_path):
    text = json.dumps({"m": {"dtype": code, "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(1, nbytes + 1)))
    array = load_file(tmp_path / "x")["m"]
    assert nbytes or array.shape[:-1] == tuple(shape[:-1])  # without rows, none ends inside a byte
    with safe_open(tmp_path / "x") as file, safeload.open(tmp_path / "x") as checkpoint:
        assert file.get_slice("m").get_shape() == shape
        assert file.get_slice("m").get_dtype() == code
        assert checkpoint.get_slice("m").shape == file.get_slice("m").shape == array.shape
        assert checkpoint.get_slice("m").dtype == np.uint8
        for index in (np.s_[:], np.s_[...], np.s_[::-1], np.s_[..., -1:], np.s_[1:]):
            assert same(checkpoint.get_slice("m")[index], array[index])
            if not past_the_end(index, array.shape):
                assert same(file.get_slice("m")[index], array[index])


def test_slices_are_converted_as_the_whole_is(tmp_path):
    values = np.linspace(-4, 4, 24, dtype=np.float32).reshape(4, 6)
    tensors = {"f": values, "b": values.astype(ml_dtypes.bfloat16), "i": np.arange(6)}
    save_file(tensors, tmp_path / "x.safetensors")
    with safeload.open(tmp_path / "x.safetensors") as opened:
        for dtype in ("float16", "float32", "fp8"):
            whole = opened.load(dtype=dtype)
            for name in tensors:
                part = opened.get_slice(name, dtype=dtype)
                assert (part.dtype, part.shape) == (whole[name].dtype, whole[name].shape)
                for again in (part, pickle.loads(pickle.dumps(part)), copy.copy(part)):
                    assert again[1:3].tobytes() == whole[name][1:3].tobytes()
        with pytest.raises(safeload.UnsupportedError, match="cannot load as int8"):
            opened.get_slice("f", dtype="int8")


ROWS = [1, -1, slice(1, 3), slice(None, None, -2), (slice(2), 1), (..., slice(3)), None, slice(9), (2, slice(1, 2))]


@pytest.mark.parametrize("scheme", ["int8", "q4_0", "q8_0"])
@pytest.mark.parametrize("shape", [(4, 64), (3, 2, 32), (64,)], ids=str)
def test_rows_of_quantized_tensors_are_dequantized_alone(scheme, shape, tmp_path):
    x = np.linspace(-2, 3, math.prod(shape), dtype=np.float32).reshape(shape)
    save_file({"w": safeload.quantize(x, scheme)}, tmp_path / "x.safetensors")
    with safeload.open(tmp_path / "x.safetensors") as opened:
        for dtype in (None, "float16"):
            part = opened.get_slice("w", dtype=dtype)
            whole = opened["w"].dequantize(dtype or "float32")
            assert (part.dtype, part.shape) == (whole.dtype, whole.shape)
            for index in ROWS[: None if len(shape) > 1 else 4]:
                want = np.asarray(whole[index])
                for again in (part, pickle.loads(pickle.dumps(part)), copy.copy(part)):
                    got = again[index]
                    assert (got.shape, got.dtype, got.tobytes()) == (want.shape, want.dtype, want.tobytes()), index
        with pytest.raises(IndexError):
            part[99]


def test_a_row_of_a_large_gguf_tensor_touches_little(tmp_path):
    rows = 200_000
    tensors = {"w": QuantizedTensor("q8_0", (rows, 1024), np.zeros((rows, 1024 // 32 * 34), np.uint8))}
    gguf.save_file(tensors, tmp_path / "x.gguf", durable=False)
    started = time.process_time()
    with safeload.open(tmp_path / "x.gguf") as opened:
        assert opened.get_slice("w")[rows - 2 :, :3].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert time.process_time() - started < 1


def test_elements_of_half_a_byte_are_converted_as_a_whole_only(tmp_path):
    header = json.dumps({"p": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\x21\x43")
    with safeload.open(tmp_path / "x.safetensors") as opened:
        with pytest.raises(safeload.UnsupportedError, match="'p' is F4, whose elements share bytes"):
            opened.get_slice("p", dtype="float32")
        assert opened.load(dtype="float32")["p"].shape == (2, 2)


def test_zero_size_and_zero_dimensional_tensors_are_sliced(tmp_path):
    arrays = {"e": np.zeros((3, 0, 2)), "z": np.zeros(0, np.uint8), "s": np.array(5, np.int16)}
    save_file(arrays, tmp_path / "x", durable=False)
    with safe_open(tmp_path / "x") as file, safeload.open(tmp_path / "x") as checkpoint:
        for source in (file, checkpoint):
            assert same(source.get_slice("s")[()], arrays["s"])
            assert same(source.get_slice("s")[...], arrays["s"])
            assert source.get_slice("s")[None].tolist() == [5]
            assert source.get_slice("e")[:].shape == (3, 0, 2)
            assert source.get_slice("e")[1].shape == (0, 2)
            assert source.get_slice("e")[::-2, :, 1].shape == (2, 0)
            assert source.get_slice("z")[:].shape == (0,)
            assert source.get_slice("z")[0:0].shape == (0,)


# ---- safe_open: upstream's refusals ----

ASSERTED = [
    (np.s_[2:, -6], "Invalid index -6 for dimension 1 of size 5"),
    ([0, 1], "Non empty lists are not implemented"),
    (np.s_[:, ::0], "Slice step must be a positive integer, got 0"),
    (
        np.s_[2:, 20],
        "Error during slicing [2:, 20] with shape [10, 5]: index 20 out of bounds for tensor dimension #1 of size 5",
    ),
    (
        np.s_[:20],
        "Error during slicing [:20] with shape [10, 5]: index 19 out of bounds for tensor dimension #0 of size 10",
    ),
    (
        np.s_[:, :20],
        "Error during slicing [:, :20] with shape [10, 5]: index 19 out of bounds for tensor dimension #1 of size 5",
    ),
    (
        np.s_[0, 0, 0],
        "Error during slicing [0, 0, 0] with shape [10, 5]: more slicing indexes than dimensions in tensor",
    ),
]


@pytest.mark.parametrize(("index", "message"), ASSERTED, ids=[str(index) for index, _ in ASSERTED])
def test_what_upstream_refuses_is_refused_in_its_words(index, message, tmp_path):
    save_file({"m": np.zeros((10, 5))}, tmp_path / "x", durable=False)
    with safe_open(tmp_path / "x") as file, pytest.raises(SafetensorError) as caught:
        file.get_slice("m")[index]
    assert str(caught.value) == message
    with safetensors.safe_open(tmp_path / "x", "np") as file, pytest.raises(safetensors.SafetensorError) as caught:
        file.get_slice("m")[index]
    assert str(caught.value) == message


@pytest.mark.parametrize("index", [np.s_[:"a"], np.s_[0.5:], np.s_[:, :9.5]], ids=str)
def test_a_bound_that_is_no_integer_is_a_type_error_as_upstream_raises(index, tmp_path):
    save_file({"m": np.zeros((4, 5))}, tmp_path / "x", durable=False)
    with safe_open(tmp_path / "x") as file, pytest.raises(TypeError, match="slice indices must be integers"):
        file.get_slice("m")[index]
    with safetensors.safe_open(tmp_path / "x", "np") as file, pytest.raises(TypeError, match="as an integer"):
        file.get_slice("m")[index]


# Not backwards, which upstream answers with any of four exceptions: its issue 843.
FORWARD = st.builds(
    lambda bounds, step, skip: slice(
        *[b if keep else None for b, keep in zip(sorted(bounds), skip, strict=True)], step
    ),
    st.tuples(st.integers(0, 7), st.integers(0, 7)),
    st.none() | st.integers(1, 3),
    st.tuples(st.booleans(), st.booleans()),
)


@settings(deadline=None, max_examples=examples(200))
@given(
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=6),
    st.lists(FORWARD | st.integers(-7, 7) | st.just(...), max_size=4).map(tuple),
)
def test_where_upstream_gives_an_array_we_give_the_same(shape, index):
    assume(index.count(...) <= 1)
    array = numbered(shape)
    assume(len(index) - index.count(...) <= len(shape))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        save_file({"m": array}, path, durable=False)
        with safetensors.safe_open(path, "np") as file:
            try:
                theirs = file.get_slice("m")[index]
            except safetensors.SafetensorError:
                theirs = None
        with safe_open(path) as file:
            if theirs is not None:
                assert same(file.get_slice("m")[index], theirs)
                assert same(file.get_slice("m")[index], array[index])
            else:
                try:
                    ours = file.get_slice("m")[index]
                except SafetensorError:
                    return
                assert same(ours, array[index])


def test_an_empty_list_selects_nothing_as_upstream_has_it(tmp_path):
    save_file({"m": numbered((10, 5))}, tmp_path / "x", durable=False)
    with safe_open(tmp_path / "x") as ours, safetensors.safe_open(tmp_path / "x", "np") as theirs:
        assert same(ours.get_slice("m")[[]], theirs.get_slice("m")[[]])
        assert ours.get_slice("m")[[]].shape == (0, 5)


@pytest.mark.parametrize("index", [1.5, "a", np.array([0, 1]), np.array([True] * 10), (0, [1]), (..., ...), {}])
def test_what_is_no_basic_index_is_a_safetensor_error_of_safe_open(index, tmp_path):
    save_file({"m": np.zeros((10, 5))}, tmp_path / "x", durable=False)
    with safe_open(tmp_path / "x") as file, pytest.raises(SafetensorError):
        file.get_slice("m")[index]


# ---- Checkpoint: numpy's refusals ----


@pytest.mark.parametrize(
    "index",
    [
        10,
        -11,
        np.s_[0, 5],
        np.s_[:, -6],
        np.s_[0, 0, 0],
        np.s_[:, :, :],
        np.s_[..., 0, 0, 0],
        1.5,
        "a",
        np.s_[..., ...],
    ],
    ids=lambda index: str(index).replace("slice(None, None, None)", ":").replace("Ellipsis", "..."),
)
def test_checkpoint_slices_raise_index_error_where_numpy_does(index, tmp_path):
    array = np.zeros((10, 5))
    with pytest.raises(IndexError):
        array[index]
    save_file({"m": array}, tmp_path / "x", durable=False)
    with safeload.open(tmp_path / "x") as checkpoint, pytest.raises(IndexError):
        checkpoint.get_slice("m")[index]


def test_checkpoint_slices_name_what_is_out_of_bounds(tmp_path):
    save_file({"m": np.zeros((10, 5))}, tmp_path / "x", durable=False)
    with safeload.open(tmp_path / "x") as checkpoint:
        with pytest.raises(IndexError, match="index 5 is out of bounds for axis 1 with size 5"):
            checkpoint.get_slice("m")[0, 5]
        with pytest.raises(IndexError, match="too many indices"):
            checkpoint.get_slice("m")[0, 0, 0]
        with pytest.raises(IndexError, match="single ellipsis"):
            checkpoint.get_slice("m")[..., ...]


@pytest.mark.parametrize("index", [[0, 1], np.array([0, 1]), True, np.array([True] * 10), np.True_])
def test_advanced_indices_say_to_take_rows(index, tmp_path):
    save_file({"m": np.zeros((10, 5))}, tmp_path / "x", durable=False)
    with safeload.open(tmp_path / "x") as checkpoint, pytest.raises(IndexError, match=r"take\(name, rows\)"):
        checkpoint.get_slice("m")[index]


@pytest.mark.parametrize(
    ("index", "error"), [(np.s_[::0], ValueError), (np.s_[1.5:], TypeError), (np.s_["a":], TypeError)]
)
def test_bad_slices_raise_what_numpy_raises(index, error, tmp_path):
    array = np.zeros((10, 5))
    with pytest.raises(error):
        array[index]
    save_file({"m": array}, tmp_path / "x", durable=False)
    with safeload.open(tmp_path / "x") as checkpoint, pytest.raises(error):
        checkpoint.get_slice("m")[index]


def test_integers_of_any_kind_are_taken(tmp_path):
    array = numbered((10, 5))
    save_file({"m": array}, tmp_path / "x", durable=False)

    class Three:
        def __index__(self):
            return 3

    with safeload.open(tmp_path / "x") as checkpoint, safe_open(tmp_path / "x") as file:
        for source in (checkpoint, file):
            part = source.get_slice("m")
            for three in (3, np.int8(3), np.uint64(3), Three(), np.array(3)):
                assert same(part[three], array[3])
                assert same(part[-3:, three], array[-3:, 3])
                assert same(part[: np.int64(3)], array[:3])


def test_a_checkpoints_slice_knows_shape_dtype_and_length(tmp_path):
    save_file({"m": numbered((10, 5)), "s": np.array(1.0)}, tmp_path / "x", durable=False)
    with safeload.open(tmp_path / "x") as checkpoint:
        part = checkpoint.get_slice("m")
        assert (part.shape, part.dtype, len(part)) == ((10, 5), np.int32, 10)
        assert "int32" in repr(part)
        with pytest.raises(TypeError):
            len(checkpoint.get_slice("s"))


@pytest.mark.skipif(os.name == "nt", reason="Windows does not truncate open files")
@pytest.mark.parametrize("index", [np.s_[900:], np.s_[900:, 3], np.s_[900::2, ::2]], ids=str)
def test_a_slice_of_a_truncated_file_is_a_format_error_with_tensor_and_offset(index, tmp_path):
    path = tmp_path / "x"
    save_file({"layer": numbered((1000, 2000))}, path, durable=False)
    with safe_open(path) as file, safeload.open(path) as checkpoint:
        size = checkpoint.tensors["layer"].offset + 950 * 8000
        os.truncate(path, size)
        for source in (file, checkpoint):
            with pytest.raises(safeload.FormatError, match="tensor 'layer'") as caught:
                source.get_slice("layer")[index]
            assert caught.value.path == str(path)
            assert size <= caught.value.offset <= size + 8000
        assert same(file.get_slice("layer")[:900], numbered((1000, 2000))[:900])
