"""safeload.numpy beside safetensors.numpy: signatures, bytes written, arrays loaded, the memory that they own."""

import gc
import inspect
import json
import mmap
import os
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy as upstream
from builders import inside
from builders.random import rng
from hypothesis import given, settings
from hypothesis import strategies as st

import safeload
from safeload.numpy import load, load_file, save, save_file

MIB = 1 << 20
NUMPY_DTYPES = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
ML_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
DTYPES = NUMPY_DTYPES | ML_DTYPES
BITS = {code: dtype.itemsize * 8 for code, dtype in DTYPES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
BACKENDS = ("mmap", "pread", "direct")


def random_array(dtype, shape):
    raw = rng.integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8)
    return np.ascontiguousarray(raw).view(dtype).reshape(shape)


def nbytes(code, shape):
    return int(np.prod(shape, dtype=np.int64)) * BITS[code] // 8


def raw_file(tensors, metadata=None, *, shift=0):
    """Bytes of a file of {name: (code, shape)}; ``shift`` moves the data off the multiples of 8."""
    header, position = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, (code, shape) in tensors.items():
        end = position + nbytes(code, shape)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + shift)
    data = (np.arange(position, dtype=np.uint32) * 7 % 251).astype(np.uint8)
    for name, (code, _) in tensors.items():
        if code == "BOOL":
            begin, end = header[name]["data_offsets"]
            data[begin:end] &= 1
    return struct.pack("<Q", len(text)) + text + data.tobytes()


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert same_bytes(array, theirs[name]), name


def run_python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-I", "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


# ---- signatures ----


@pytest.mark.parametrize("name", ["load", "load_file", "save", "save_file"])
def test_signature_takes_what_upstream_takes(name):
    theirs = inspect.signature(getattr(upstream, name)).parameters
    ours = inspect.signature(getattr(safeload.numpy, name)).parameters
    positional = [p for p in theirs.values() if p.kind is not p.KEYWORD_ONLY]
    assert [(p.name, p.kind, p.default) for p in ours.values() if p.kind is not p.KEYWORD_ONLY] == [
        (p.name, p.kind, p.default) for p in positional
    ]
    for parameter in theirs.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert ours[parameter.name].kind is parameter.KEYWORD_ONLY
            assert ours[parameter.name].default == parameter.default


@pytest.mark.parametrize(
    ("function", "keywords"),
    [
        (load, {"copy": True}),
        (
            load_file,
            {
                "backend": "mmap",
                "writable": True,
                "cache": "keep",
                **dict.fromkeys(("dtype", "names", "out", "threads", "progress")),
            },
        ),
        (save, {}),
        (save_file, {"overwrite": True, "durable": True}),
    ],
)
def test_what_is_ours_is_keyword_only_with_these_defaults(function, keywords):
    parameters = inspect.signature(function).parameters.values()
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == keywords


# ---- bytes written ----

ONE_OF_EACH = {code.lower(): random_array(dtype, (3, 5)) for code, dtype in DTYPES.items()}
WRITTEN = {
    "nothing": {},
    "one": {"a": np.arange(6, dtype=np.float32).reshape(2, 3)},
    "every dtype": ONE_OF_EACH,
    "every dtype backwards": dict(reversed(ONE_OF_EACH.items())),
    "every dtype as scalar": {code: random_array(dtype, ()) for code, dtype in DTYPES.items()},
    "every dtype empty": {code: np.empty((2, 0, 3), dtype) for code, dtype in DTYPES.items()},
    "one dtype, names unsorted": {name: np.full(2, i, np.int16) for i, name in enumerate(["b", "a", "B", "aa", ""])},
    "unicode": {
        name: np.zeros(1, np.int8) for name in ["é", "\u4e2d\u6587", "\U0001f40d", "e\u0301", "\ufffd", "\x7f"]
    },
    "escaped": {name: np.zeros(1, np.int8) for name in ['"', "\\", "/", "\n", "\t", "\r\b\f", "\0", "\x1f", "\u2028"]},
    "axes": {f"{n}": np.zeros((1,) * n, np.uint8) for n in range(20)},
    "header lengths": {"x" * n: np.zeros(1, np.uint8) for n in range(1, 9)},
}


METADATA = [None, {}, {"format": "np"}, {'\u4e2d\n"': "\\\0 \U0001f40d"}]


def upstream_can(tensors, metadata):
    """Of no tensors and no keys upstream 0.8.0 makes broken JSON: see test_upstream_defects.py."""
    return bool(tensors) or metadata != {}


@pytest.mark.parametrize(
    ("what", "metadata"), [(what, m) for what, tensors in WRITTEN.items() for m in METADATA if upstream_can(tensors, m)]
)
def test_bytes_written_are_upstreams(what, metadata, tmp_path):
    tensors = WRITTEN[what]
    expected = upstream.save(tensors, metadata)
    assert save(tensors, metadata) == expected
    save_file(tensors, tmp_path / "x", metadata, durable=False)
    assert (tmp_path / "x").read_bytes() == expected


def test_save_takes_metadata_by_position_and_by_name(tmp_path):
    tensors, metadata = WRITTEN["one"], {"a": "b"}
    assert save(tensors, metadata) == save(tensors, metadata=metadata) == save(tensor_dict=tensors, metadata=metadata)
    save_file(tensor_dict=tensors, filename=str(tmp_path / "x"), metadata=metadata)
    assert (tmp_path / "x").read_bytes() == save(tensors, metadata)


def test_header_pads_the_data_to_a_multiple_of_eight():
    for n in range(1, 20):
        content = save({"x" * n: np.zeros(1)})
        (size,) = struct.unpack("<Q", content[:8])
        assert size % 8 == 0
        assert len(content) == 8 + size + 8


@pytest.mark.parametrize("count", [15, 16, 17])
@pytest.mark.parametrize("length", [1, 40, 50, 2000])
@pytest.mark.parametrize("tail", ["", "\n", '\x01"', "\U0001f40d"])
@pytest.mark.parametrize("metadata", METADATA)
def test_short_headers_are_upstreams_whatever_their_number_and_names(count, length, tail, metadata):
    """Short headers are built in one call, longer ones and those with newlines in several."""
    dtypes = [*DTYPES.values()]
    tensors = {
        f"{k}{'n' * length}{tail}": np.full((2, k % 3), k % 2, dtypes[k % len(dtypes)]) for k in reversed(range(count))
    }
    assert save(tensors, metadata) == upstream.save(tensors, metadata)


@pytest.mark.parametrize("rank", [15, 16, 17, 32])
@pytest.mark.parametrize("metadata", METADATA)
def test_short_headers_are_upstreams_whatever_their_axes(rank, metadata):
    tensors = {f"t{k}": np.full((1,) * (rank - 1) + (k,), k, np.int16) for k in range(4)}
    assert save(tensors, metadata) == upstream.save(tensors, metadata)


@pytest.mark.parametrize("room", range(30))
def test_a_header_that_just_fits_is_upstreams(room):
    tensors = {"n" * (1950 + 2 * room): np.ones((2, 2), np.float32)}
    assert save(tensors) == upstream.save(tensors)
    metadata = {"k" * (960 + room): "v" * (960 + room)}
    assert save({"n": np.ones(2)}, metadata) == upstream.save({"n": np.ones(2)}, metadata)


def test_keys_of_metadata_ascend_whatever_the_number_of_tensors():
    ascending = ["", "a", "b", "\uffff", "\U0001f40d"]
    metadata = {key: f"of {key}" for key in reversed(ascending)}
    for count in (1, 16, 17):
        content = save({f"t{k}": np.zeros(1) for k in range(count)}, metadata)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert list(header["__metadata__"]) == ascending
        assert header["__metadata__"] == metadata


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ARRAYS = st.builds(
    lambda dtype, shape, seed: (
        np.random.default_rng(seed)
        .integers(0, 2 if dtype.kind == "b" else 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
        .view(dtype)
        .reshape(shape)
    ),
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 9),
)
DICTS = st.dictionaries(TEXT.filter(lambda name: name != "__metadata__"), ARRAYS, max_size=6)


@settings(deadline=None, max_examples=150)
@given(DICTS, st.none() | st.dictionaries(TEXT, TEXT, max_size=1))
def test_bytes_written_are_upstreams_for_any_dict(tensors, metadata):
    content = save(tensors, metadata)
    if upstream_can(tensors, metadata):
        assert content == upstream.save(tensors, metadata)
    assert_same(load(content), tensors)


# ---- what is loaded ----


def loaders(path):
    yield "load", load(path.read_bytes())
    yield "mmap", load_file(path)
    yield "pread", load_file(path, backend="pread")


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,), (2, 0, 3), (1, 2, 3, 4)])
def test_load_equals_upstreams(shape, tmp_path):
    tensors = {code: random_array(dtype, shape) for code, dtype in NUMPY_DTYPES.items()}
    path = tmp_path / "x"
    upstream.save_file(tensors, path)
    expected = upstream.load_file(path)
    assert_same(expected, tensors)
    for _, loaded in loaders(path):
        assert_same(loaded, expected)
    assert_same(load(path.read_bytes()), upstream.load(path.read_bytes()))


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}])
def test_a_file_without_tensors_loads_as_an_empty_dict(metadata, tmp_path):
    (tmp_path / "x").write_bytes(save({}, metadata))
    for how, loaded in loaders(tmp_path / "x"):
        assert loaded == {}, how
    assert load(save({}, metadata), copy=False) == {}
    assert load_file(tmp_path / "x", names=[]) == {}


def test_load_gives_tensors_in_the_order_of_their_bytes(tmp_path):
    tensors = {"a": np.zeros(1, np.uint8), "c": np.zeros(1, np.float64), "b": np.zeros(1, np.float64)}
    (tmp_path / "x").write_bytes(save(tensors))
    for how, loaded in loaders(tmp_path / "x"):
        assert list(loaded) == ["b", "c", "a"], how


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("shift", [0, 1])
def test_every_dtype_loads_as_itself(code, shift, tmp_path):
    shapes = {"scalar": (), "vector": (5,), "matrix": (2, 3), "empty": (0, 3)}
    content = raw_file({name: (code, shape) for name, shape in shapes.items()}, shift=shift)
    (tmp_path / "x").write_bytes(content)
    data = content[8 + struct.unpack("<Q", content[:8])[0] :]
    for how, loaded in loaders(tmp_path / "x"):
        position = 0
        for name, shape in shapes.items():
            array = loaded[name]
            assert (array.dtype, array.shape) == (DTYPES[code], shape), how
            assert array.tobytes() == data[position : position + array.nbytes], how
            position += array.nbytes


@pytest.mark.parametrize(
    ("code", "shape", "expected"),
    [
        ("F4", (6,), (3,)),
        ("F4", (3, 4), (3, 2)),
        ("F4", (2, 3, 2), (2, 3, 1)),
        ("F4", (2, 3), (3,)),
        ("F4", (4, 1), (2,)),
        ("F4", (0,), (0,)),
        ("F4", (3, 0), (3, 0)),
        ("F4", (0, 4), (0, 2)),
        ("F6_E2M3", (4,), (3,)),
        ("F6_E2M3", (2, 8), (2, 6)),
        ("F6_E2M3", (2, 2), (3,)),
        ("F6_E2M3", (4, 3), (9,)),
        ("F6_E3M2", (5, 4), (5, 3)),
        ("F6_E3M2", (4, 1, 1), (3,)),
    ],
)
def test_packed_dtypes_load_as_raw_bytes(code, shape, expected, tmp_path):
    content = raw_file({"before": ("U8", (3,)), "x": (code, shape)})
    (tmp_path / "x").write_bytes(content)
    data = content[8 + struct.unpack("<Q", content[:8])[0] + 3 :]
    for how, loaded in loaders(tmp_path / "x"):
        assert (loaded["x"].dtype, loaded["x"].shape) == (np.uint8, expected), how
        assert loaded["x"].tobytes() == data, how


@pytest.mark.parametrize(
    "call", ["load_file(path)", "load_file(path, backend='pread')", "load(open(path, 'rb').read())"]
)
def test_bf16_loads_where_nobody_imported_ml_dtypes(call, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(save({"x": np.array([1.5, -2.0], ml_dtypes.bfloat16)}))
    code = f"""
import sys
from safeload.numpy import load, load_file
path = sys.argv[1]
assert "ml_dtypes" not in sys.modules
x = {call.replace("open(path, 'rb').read()", "__import__('pathlib').Path(path).read_bytes()")}["x"]
assert x.dtype.name == "bfloat16", x.dtype
assert x.astype("f4").tolist() == [1.5, -2.0], x
"""
    result = run_python(code, path)
    assert result.returncode == 0, result.stderr


def test_ml_dtypes_is_not_imported_for_what_numpy_has(tmp_path):
    (tmp_path / "x").write_bytes(save({"x": np.zeros(3)}))
    code = "import sys, safeload.numpy as n; n.load_file(sys.argv[1])['x'].sum(); assert 'ml_dtypes' not in sys.modules"
    result = run_python(code, tmp_path / "x")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("shift", range(8))
def test_arrays_are_writable_aligned_and_in_c_order(shift, tmp_path):
    shapes = {f"{code} {shape}": (code, shape) for code in DTYPES for shape in [(), (3,), (2, 3), (0,)]}
    content = raw_file(shapes, shift=shift)
    (tmp_path / "x").write_bytes(content)
    for how, loaded in loaders(tmp_path / "x"):
        for name, array in loaded.items():
            assert array.flags.writeable, (how, name)
            assert array.flags.c_contiguous, (how, name)
            assert array.flags.aligned, (how, name)
            assert array.__array_interface__["data"][0] % array.dtype.alignment == 0, (how, name)
            array[...] = np.zeros((), array.dtype)
    assert (tmp_path / "x").read_bytes() == content


@pytest.mark.parametrize("backend", BACKENDS)
def test_writing_into_an_array_changes_no_file_and_no_other_load(backend, tmp_path):
    path = tmp_path / "x"
    save_file({"big": np.ones(1 << 18), "small": np.ones(3)}, path, durable=False)
    content = path.read_bytes()
    first, second = load_file(path, backend=backend), load_file(path, backend=backend)
    for array in first.values():
        array[:] = 7
    assert all((array == 1).all() for array in second.values())
    assert all((array == 1).all() for array in load_file(path).values())
    assert path.read_bytes() == content


def test_two_calls_never_share_memory(tmp_path):
    path = tmp_path / "x"
    save_file({"big": np.ones(1 << 18), "small": np.ones(3), "odd": np.ones(3, np.uint8)}, path, durable=False)
    content = path.read_bytes()
    calls = [
        *(load_file(path, backend=backend) for backend in BACKENDS * 2),
        load_file(path, names=["big"]),
        load(content),
        load(content),
        load(bytearray(content)),
    ]
    for i, one in enumerate(calls):
        for other in calls[:i]:
            for array in one.values():
                assert not any(np.shares_memory(array, there) for there in other.values())
    assert not any(np.shares_memory(a, np.frombuffer(content, np.uint8)) for a in calls[5].values())


def test_tensors_of_one_call_never_overlap(tmp_path):
    path = tmp_path / "x"
    save_file({str(i): np.full(5, i, np.int16) for i in range(200)}, path, durable=False)
    for how, loaded in loaders(path):
        for array in loaded.values():
            array[:] = array + 1
        assert [loaded[str(i)].tolist() for i in range(200)] == [[i + 1] * 5 for i in range(200)], how


@pytest.mark.skipif(os.name == "nt", reason="Windows does not delete mapped files")
@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_outlive_the_file(backend, tmp_path):
    path = tmp_path / "x"
    save_file({"big": np.arange(1 << 18), "small": np.arange(3)}, path, durable=False)
    loaded = load_file(path, backend=backend)
    path.unlink()
    gc.collect()
    assert (loaded["big"] == np.arange(1 << 18)).all()
    small = loaded["small"]
    del loaded
    gc.collect()
    assert small.tolist() == [0, 1, 2]


# ---- buffers ----


def test_any_contiguous_buffer_is_loaded_issue_529(tmp_path):
    tensors = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.array(7, np.uint8)}
    content = save(tensors)
    assert_same(load(content), tensors)
    assert_same(load(bytearray(content)), tensors)
    assert_same(load(memoryview(content)), tensors)
    assert_same(load(memoryview(content).cast("b")), tensors)
    assert_same(load(np.frombuffer(content, np.uint8)), tensors)
    padded = b"abc" + content
    assert_same(load(memoryview(padded)[3:]), tensors)
    (tmp_path / "x").write_bytes(content)
    with (tmp_path / "x").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert_same(load(mapped), tensors)


@pytest.mark.parametrize("data", [None, 3, "text", ["list"], object()])
def test_what_is_no_buffer_is_a_type_error(data):
    with pytest.raises(TypeError):
        load(data)


def test_a_strided_buffer_is_refused():
    content = np.repeat(np.frombuffer(save({"x": np.zeros(3)}), np.uint8), 2)
    with pytest.raises((ValueError, TypeError, BufferError)):
        load(content[::2])


def test_without_copy_arrays_are_views_read_only_over_bytes():
    content = save({"x": np.arange(6, dtype=np.float32), "empty": np.zeros((0, 2))})
    array = load(content, copy=False)["x"]
    assert not array.flags.writeable
    assert np.shares_memory(array, np.frombuffer(content, np.uint8))
    assert array.tolist() == [0, 1, 2, 3, 4, 5]


def test_without_copy_arrays_are_writable_views_over_a_bytearray():
    content = bytearray(save({"x": np.arange(6, dtype=np.float32)}))
    array = load(content, copy=False)["x"]
    array[5] = 9
    assert load(bytes(content))["x"][5] == 9
    assert np.shares_memory(array, np.frombuffer(content, np.uint8))
    content[-4:] = struct.pack("<f", 11)
    assert array[5] == 11


def test_without_copy_arrays_keep_the_buffer_alive():
    array = load(bytearray(save({"x": np.arange(1000)})), copy=False)["x"]
    gc.collect()
    assert (array == np.arange(1000)).all()


def test_without_copy_what_is_not_aligned_is_copied():
    content = raw_file({"x": ("F64", (3,))}, shift=1)
    base = bytearray(len(content) + 16)
    start = -np.frombuffer(base, np.uint8).__array_interface__["data"][0] % 8
    view = memoryview(base)[start : start + len(content)]
    view[:] = content
    array = load(view, copy=False)["x"]
    assert array.flags.aligned
    assert same_bytes(array, load(content)["x"])
    assert not np.shares_memory(array, np.frombuffer(base, np.uint8))


# ---- names ----


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_select_and_order(backend, tmp_path):
    path = tmp_path / "x"
    save_file({name: np.full(3, i) for i, name in enumerate("abcd")}, path, durable=False)
    for names in (["d", "b"], ("b", "d"), iter("ca"), {"a": 1}, []):
        wanted = list(names) if not hasattr(names, "__next__") else ["c", "a"]
        loaded = load_file(path, names=names, backend=backend)
        assert list(loaded) == wanted
        assert all((loaded[name] == "abcd".index(name)).all() for name in wanted)


def test_a_name_given_twice_is_there_once(tmp_path):
    save_file({"a": np.zeros(3), "b": np.zeros(2)}, tmp_path / "x", durable=False)
    assert list(load_file(tmp_path / "x", names=["b", "a", "b"])) == ["b", "a"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unknown_name_is_a_key_error_and_a_safetensor_error(backend, tmp_path):
    save_file({"layer.weight": np.zeros(3)}, tmp_path / "x", durable=False)
    for expected in (safeload.TensorNotFoundError, KeyError, safeload.SafetensorError):
        with pytest.raises(expected, match=r"layer\.weigth") as caught:
            load_file(tmp_path / "x", names=["layer.weight", "layer.weigth"], backend=backend)
        assert "layer.weight" in str(caught.value).replace("layer.weigth", "")


@pytest.mark.parametrize("names", ["layer", [1], [None], 5])
def test_names_that_are_no_names_are_type_errors(names, tmp_path):
    save_file({"layer": np.zeros(3)}, tmp_path / "x", durable=False)
    with pytest.raises(TypeError):
        load_file(tmp_path / "x", names=names)


# ---- reading ----


def test_pread_reads_thousands_of_small_tensors(tmp_path):
    tensors = {f"layer.{i}": np.full((i % 7, 3), i % 101, list(NUMPY_DTYPES.values())[i % 12 + 1]) for i in range(5000)}
    path = tmp_path / "x"
    save_file(tensors, path, durable=False)
    assert_same(load_file(path, backend="pread"), tensors)
    assert_same(load_file(path), tensors)
    some = {name: tensors[name] for name in list(tensors)[::-3]}
    assert_same(load_file(path, backend="pread", names=some), some)


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    lengths = [limit * MIB + d for limit in (1, 4, 16) for d in (-1, 0, 1)] + [0, 1, 63, 64, 65] + [MIB - 1] * 17
    noise = rng.integers(0, 256, 17 * MIB, np.uint8)
    tensors = {f"{i:02}": noise[i : i + n] for i, n in enumerate(lengths)}
    path = tmp_path_factory.mktemp("sizes") / "x"
    save_file(tensors, path, durable=False)
    return path, tensors


@pytest.mark.parametrize("threads", [1, 2, 3, 8, None])
def test_any_number_of_threads_reads_the_same_bytes(sizes, threads):
    path, tensors = sizes
    assert_same(load_file(path, backend="pread", threads=threads), tensors)


def test_a_small_survivor_does_not_keep_a_large_tensor_alive(sizes):
    path, _ = sizes
    loaded = load_file(path, backend="pread")
    base = loaded["09"] if loaded["09"].nbytes else loaded["10"]
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert base.nbytes <= 17 * MIB
    assert not any(np.shares_memory(base, array) for array in loaded.values() if array.nbytes >= MIB)


def test_progress_rises_to_the_total(sizes):
    path, tensors = sizes
    total = sum(array.nbytes for array in tensors.values())
    calls = []
    load_file(path, backend="pread", threads=1, progress=lambda done, of: calls.append((done, of)))
    assert {of for _, of in calls} == {total}
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert done[-1] == total


def test_an_exception_in_progress_ends_the_load(sizes):
    def refuse(done, total):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        load_file(sizes[0], backend="pread", progress=refuse)


@pytest.mark.parametrize("installed", [True, False])
def test_progress_is_shown_with_and_without_tqdm(installed, monkeypatch, capsys, tmp_path):
    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    save_file({"x": np.arange(3)}, tmp_path / "x", durable=False)
    assert load_file(tmp_path / "x", backend="pread", progress=True)["x"].tolist() == [0, 1, 2]
    out, err = capsys.readouterr()
    assert out == ""
    assert "100%" in err


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("threads", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError)])
def test_bad_threads_are_refused(threads, error, backend, tmp_path):
    save_file({"x": np.arange(3)}, tmp_path / "x", durable=False)
    with pytest.raises(error):
        load_file(tmp_path / "x", backend=backend, threads=threads)


def test_more_threads_than_bytes_are_fine(tmp_path):
    save_file({"x": np.arange(3)}, tmp_path / "x", durable=False)
    assert load_file(tmp_path / "x", backend="pread", threads=100)["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("setting", ["0", "-1", "two", "1.5", "\u00b2", " "])
def test_a_bad_safeload_num_threads_is_named(setting, monkeypatch, tmp_path):
    save_file({"x": np.arange(3)}, tmp_path / "x", durable=False)
    monkeypatch.setenv("SAFELOAD_NUM_THREADS", setting)
    with pytest.raises(ValueError, match="SAFELOAD_NUM_THREADS"):
        load_file(tmp_path / "x", backend="pread")
    assert load_file(tmp_path / "x", backend="pread", threads=2)["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("setting", ["1", "7", ""])
def test_safeload_num_threads_is_the_default(setting, monkeypatch, sizes):
    monkeypatch.setenv("SAFELOAD_NUM_THREADS", setting)
    path, tensors = sizes
    assert_same(load_file(path, backend="pread", names=["00", "08"]), {name: tensors[name] for name in ("00", "08")})


def test_safeload_num_threads_and_the_argument_decide_the_count(monkeypatch):
    thread_count = inside.thread_count
    monkeypatch.setenv("SAFELOAD_NUM_THREADS", "5")
    assert thread_count(1, None) == 5
    assert thread_count(1, 3) == 3
    monkeypatch.delenv("SAFELOAD_NUM_THREADS")
    assert thread_count(1, None) == 1
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert 1 <= thread_count(1 << 40, None) <= min(16, cpus)


@pytest.mark.parametrize("backend", ["", "MMAP", "io_uring", None, 3])
def test_an_unknown_backend_is_refused_as_upstream_does(backend, tmp_path):
    save_file({"x": np.arange(3)}, tmp_path / "x", durable=False)
    with pytest.raises(safeload.SafetensorError, match=r"backend .* is invalid \(expected one of"):
        load_file(tmp_path / "x", backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_file_is_file_not_found(backend, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load_file(tmp_path / "nothing", backend=backend)
    assert str(caught.value) == f"No such file or directory: {tmp_path / 'nothing'}"


@pytest.mark.parametrize("path", [3, None, b"bytes", ["x"]])
def test_what_is_no_path_is_a_type_error_or_taken_as_os_fspath_does(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, FileNotFoundError)):
        load_file(path)


def test_a_nul_in_the_path_is_refused(tmp_path):
    save_file({"x": np.arange(3)}, tmp_path / "x", durable=False)
    with pytest.raises(ValueError, match="null byte"):
        load_file(f"{tmp_path / 'x'}\0.safetensors")


# ---- where the system refuses ----


def test_a_refused_mapping_is_read_instead(monkeypatch, tmp_path):
    path = tmp_path / "x"
    tensors = {
        "big": np.arange(1 << 18, dtype=np.int64),
        "small": np.arange(3, dtype=np.int64),
        "empty": np.zeros((0, 2)),
    }
    save_file(tensors, path, durable=False)

    def refuse(self, **_):
        raise OSError(12, "Cannot allocate memory", self.path)

    monkeypatch.setattr(inside.local.LocalStore, "map", refuse)
    loaded = load_file(path)
    assert_same(loaded, tensors)
    assert list(loaded) == ["big", "small", "empty"]
    with safeload.open(path) as checkpoint:
        assert_same(checkpoint.load(), tensors)
        assert checkpoint.last_load.backend == "pread"
        assert checkpoint["small"].tolist() == [0, 1, 2]
        assert checkpoint["small"] is checkpoint["small"]
    with safeload.safe_open(path) as file:
        assert (file.get_tensor("big") == tensors["big"]).all()


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS does not bind mappings elsewhere")
def test_where_the_address_space_is_too_small_for_the_mapping_the_file_is_read(tmp_path):
    path, size = tmp_path / "x", 8 << 30
    header = json.dumps(
        {
            "small": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]},
            "huge": {"dtype": "U8", "shape": [size - 5], "data_offsets": [5, size]},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"hello")
    os.truncate(path, 8 + len(header) + size)
    code = """
import resource, sys
import numpy, safeload
from safeload.numpy import load_file
with open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + (4 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with safeload.open(sys.argv[1]) as checkpoint:
    assert bytes(checkpoint.load(["small"])["small"]) == b"hello"
    assert checkpoint.last_load.backend == "pread", checkpoint.last_load
assert bytes(load_file(sys.argv[1], names=["small"])["small"]) == b"hello"
try:
    load_file(sys.argv[1])
except MemoryError:
    print("MemoryError")
"""
    result = run_python(code, path)
    assert (result.stdout, result.returncode) == ("MemoryError\n", 0), result.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows does not truncate open files")
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("kept", [0, 100, 5 * MIB, 9 * MIB + 3])
def test_a_file_truncated_after_opening_is_named_with_tensor_and_offset(kept, threads, tmp_path):
    path = tmp_path / "x"
    save_file({name: np.full(3 * MIB, i, np.uint8) for i, name in enumerate("abcd")}, path, durable=False)
    with safeload.open(path) as checkpoint:
        begins = {name: info.offset for name, info in checkpoint.tensors.items()}
        size = min(begins.values()) + kept
        os.truncate(path, size)
        with pytest.raises(safeload.FormatError) as caught:
            checkpoint.load(backend="pread", threads=threads)
    name = "abcd"[kept // (3 * MIB)]
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)
    assert size <= caught.value.offset < path.stat().st_size + 12 * MIB
    if threads == 1:
        assert caught.value.offset == size
        assert f"tensor '{name}'" in str(caught.value)
    assert f"byte {caught.value.offset}" in str(caught.value)
    assert "tensor '" in str(caught.value)


@pytest.mark.skipif(os.name == "nt", reason="Windows does not truncate open files")
def test_small_tensors_of_a_truncated_file_are_named_too(tmp_path):
    path = tmp_path / "x"
    save_file({f"{i:03}": np.full(100, i % 256, np.uint8) for i in range(300)}, path, durable=False)
    with safeload.open(path) as checkpoint:
        os.truncate(path, checkpoint.tensors["123"].offset + 7)
        with pytest.raises(safeload.FormatError, match="tensor '123'") as caught:
            checkpoint.load(backend="pread")
        assert caught.value.offset == checkpoint.tensors["123"].offset + 7
        assert checkpoint.load(["122", "000"], backend="pread")["122"].tolist() == [122] * 100


def test_upstream_reads_what_we_write_and_the_other_way_round(tmp_path):
    tensors = {code: random_array(dtype, (2, 3)) for code, dtype in NUMPY_DTYPES.items()}
    save_file(tensors, tmp_path / "ours", {"a": "b", "c": "d"}, durable=False)
    with safetensors.safe_open(tmp_path / "ours", "np") as file:
        assert file.metadata() == {"a": "b", "c": "d"}
        assert_same(file.get_tensors(), tensors)
    upstream.save_file(tensors, tmp_path / "theirs", {"a": "b", "c": "d"})
    assert_same(load_file(tmp_path / "theirs"), tensors)
