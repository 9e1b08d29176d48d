"""GGUF files as safeload writes them, read by safeload and by gguf-py."""

import itertools
import os

import gguf as peer
import ml_dtypes
import numpy as np
import pytest
from builders import ggml_reference
from builders.inside import dtypes, gguf_values
from builders.late_values import Late
from builders.paths import SHARED
from builders.random import rng
from builders.remote import Served

import safeload
from safeload import QuantizedTensor, SafeloadError, UnsupportedError, gguf

pytestmark = pytest.mark.any_python

VOCABULARIES = sorted((SHARED / "gguf").glob("*.gguf"))
T = peer.GGUFValueType
ELEMENTS = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float64": np.float64,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
}
RESTORED = {
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"),
    *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4", "iq4_nl"),
    *("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m"),
    *("iq4_xs", "tq1_0", "tq2_0", "nvfp4", "q1_0", "q2_0"),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def elements(shape, dtype):
    return (rng.standard_normal(shape) * 50).astype(dtype)


def blocks(scheme, shape):
    row = dtypes.BLOCK_TYPES[scheme]
    data = rng.integers(0, 256, (*shape[:-1], row.nbytes(shape[-1])), np.uint8)
    return QuantizedTensor(scheme, shape, data)


def read_by_peer(path):
    reader = peer.GGUFReader(path)
    return reader, {tensor.name: tensor for tensor in reader.tensors}


def types_of(path):
    """As gguf-py sees them: the type of each key, of arrays with the type of the elements."""
    return {key: field.types for key, field in peer.GGUFReader(path).fields.items() if not key.startswith("GGUF.")}


# ---- tensors ----


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 1, 4), (2, 3, 4, 5)])
def test_element_types(path, name, shape):
    want = {"first": elements(shape, ELEMENTS[name]), "second": elements((3,), np.float32)}
    gguf.save_file(want, path)
    with safeload.open(path) as opened:
        assert opened.format == "gguf"
        for key, array in want.items():
            assert (opened[key].dtype, opened[key].shape) == (array.dtype, array.shape)
            assert opened[key].tobytes() == array.tobytes()
    if name == "bfloat16" and shape == ():
        return  # gguf-py shows bf16 as bytes, for which it wants an axis
    _, found = read_by_peer(path)
    assert found["first"].shape.tolist() == list(reversed(shape))
    assert found["first"].data.tobytes() == want["first"].tobytes()
    assert found["second"].data.tobytes() == want["second"].tobytes()


@pytest.mark.parametrize("scheme", dtypes.BLOCK_TYPES)
def test_block_types(path, scheme):
    block = dtypes.BLOCK_TYPES[scheme].block
    want = {"a": blocks(scheme, (3, 2 * block)), "n": elements((5,), np.float32), "b": blocks(scheme, (2, 1, block))}
    gguf.save_file(want, path)
    with safeload.open(path) as opened:
        assert list(opened) == list(want)
        for name in "ab":
            assert opened[name] == want[name]
        assert opened["n"].tobytes() == want["n"].tobytes()
    if scheme.upper() not in peer.GGMLQuantizationType.__members__:
        return
    _, found = read_by_peer(path)
    for name in "ab":
        assert found[name].tensor_type.name.lower() == scheme
        assert found[name].data.tobytes() == want[name].data.tobytes()
        assert found[name].shape.tolist() == list(reversed(want[name].shape))


@pytest.mark.parametrize("scheme", dtypes.BLOCK_TYPES)
def test_load_restores_what_gguf_py_restores(path, scheme):
    given = blocks(scheme, (5, 2 * dtypes.BLOCK_TYPES[scheme].block))
    gguf.save_file({"n": elements((3,), np.float16), "a": given}, path)
    if scheme not in RESTORED:
        with pytest.raises(UnsupportedError, match=f"'a': cannot convert {scheme.upper()} to F32"):
            safeload.load(path, dtype="float32")
        return
    with np.errstate(all="ignore"):
        if scheme in ("q1_0", "q2_0"):
            want = ggml_reference.by_definition(int(scheme[1]), given.data.reshape(-1, 18)).reshape(5, -1)
        else:
            want = peer.dequantize(given.data, peer.GGMLQuantizationType[scheme.upper()])
    got = safeload.load(path, dtype="float32", threads=2)
    assert got["n"].dtype == np.float32
    nan = np.isnan(want)  # of random scales
    np.testing.assert_array_equal(np.isnan(got["a"]), nan)
    np.testing.assert_array_equal(got["a"].view(np.uint32)[~nan], want.view(np.uint32)[~nan])


def test_quantized_with_ggml_rounding_is_what_gguf_py_quantizes(path):
    x = rng.standard_normal((8, 64)).astype(np.float32)
    given = {s: safeload.quantize(x, s, rounding="ggml" if s == "q4_0" else None) for s in ("q4_0", "q8_0")}
    gguf.save_file(given, path)
    _, found = read_by_peer(path)
    for scheme, tensor in found.items():
        kind = peer.GGMLQuantizationType[scheme.upper()]
        np.testing.assert_array_equal(tensor.data, peer.quantize(x, kind))


def test_arrays_of_any_layout(path):
    x = rng.standard_normal((6, 4)).astype(np.float32)
    quantized = blocks("q4_0", (6, 64))
    strided = QuantizedTensor("q4_0", (3, 64), quantized.data[::2])
    given = {"t": x.T, "n": x[::-1], "big": x.astype(">f4"), "one": np.broadcast_to(x[0], (3, 4)), "q": strided}
    given["scalar"] = np.float32(2.5)
    gguf.save_file(given, path)
    got = safeload.load(path)
    for name in ("t", "n", "big", "one", "scalar"):
        np.testing.assert_array_equal(got[name], given[name])
    np.testing.assert_array_equal(got["q"].data, strided.data)
    if os.name != "nt":  # Windows replaces no file that is mapped
        gguf.save_file(got, path)  # over the file that its arrays show
        np.testing.assert_array_equal(safeload.load(path)["t"], x.T)


def test_empty_tensors(path):
    given = {"a": np.zeros((0, 5), np.float32), "b": np.ones(3, np.int8), "c": np.zeros((4, 0), np.int64)}
    gguf.save_file({**given, "q": blocks("q8_0", (0, 32))}, path)
    got = safeload.load(path)
    assert {name: got[name].shape for name in got} == {"a": (0, 5), "b": (3,), "c": (4, 0), "q": (0, 32)}
    np.testing.assert_array_equal(got["b"], given["b"])


def test_tensors_are_asked_for_their_values_one_after_the_other(path):
    x, made = elements((5, 32), np.float16), []
    scratch = np.empty(x.shape, np.float16)

    def make(name, value):
        made.append(name)
        scratch[...] = value  # what it made before is overwritten
        return scratch

    q = blocks("q8_0", (5, 32))
    given = {
        "a": Late(x.dtype, x.shape, lambda: make("a", x)),
        "b": Late(x.dtype, x.shape, lambda: make("b", x + 1)),
        "q": q,
        "empty": Late(x.dtype, (0, 3), lambda: np.empty((0, 3), np.float16)),
    }
    safeload.convert(given, path, raw=True)
    got = safeload.load(path)
    assert made[-2:] == ["a", "b"]
    np.testing.assert_array_equal(got["a"], x)
    np.testing.assert_array_equal(got["b"], x + 1)
    assert got["q"] == q


def test_each_tensor_of_the_source_is_read_once(path, tmp_path):
    """After the header, blocks that stay as they are and blocks that are dequantized."""
    given = {"a": elements((700, 320), np.float16), "q": blocks("q8_0", (64, 3200)), "r": blocks("q4_0", (64, 3200))}
    source, url = tmp_path / "source.gguf", "mem://m/source.gguf"
    gguf.save_file(given, source)
    for more in ({}, {"dtype": "float32"}):
        store = Served({url: source.read_bytes()})
        safeload.convert(store.at(url), path, raw=True, overwrite=True, **more)
        header, *read = [(begin, end) for _, begin, end in store.requests]
        read.sort()
        assert header == (0, 128 << 10)
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(read))
        assert 0 < read[0][0] < 1000
        assert read[-1][1] == source.stat().st_size
        want = safeload.load(source, **more)
        for name, value in safeload.load(path).items():
            assert np.asarray(value).tobytes() == np.asarray(want[name]).tobytes()


@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_alignment(path, alignment):
    given = {name: elements((k + 1,), np.int8) for k, name in enumerate("abcd")}
    gguf.save_file(given, path, {"general.alignment": alignment})
    reader, found = read_by_peer(path)
    assert reader.alignment == alignment
    assert types_of(path) == {"general.alignment": [T.UINT32]}
    assert os.path.getsize(path) % alignment == 0  # ggml reads the padding of the last tensor too
    for name, array in given.items():
        assert found[name].data_offset % alignment == 0
        assert found[name].data.tobytes() == array.tobytes()
    same = safeload.load(path)
    assert all(np.array_equal(same[name], given[name]) for name in given)


def test_nothing_at_all(path):
    gguf.save_file({}, path)
    assert path.read_bytes() == b"GGUF\3\0\0\0" + bytes(16)
    with safeload.open(path) as opened:
        assert not opened
        assert not opened.metadata


@pytest.mark.parametrize(
    ("given", "kind", "fragment"),
    [
        ({"a": np.zeros(2, bool)}, UnsupportedError, "'a' is bool, which GGUF does not support: its integers"),
        ({"a": np.zeros(2, np.uint8)}, UnsupportedError, "'a' is uint8"),
        ({"a": np.zeros(2, np.uint64)}, UnsupportedError, "'a' is uint64"),
        ({"a": np.zeros(2, np.complex64)}, UnsupportedError, "'a' is complex64"),
        ({"a": np.zeros(2, "U3")}, UnsupportedError, "'a' is str"),
        ({"a": np.zeros(2, ml_dtypes.float8_e4m3fn)}, UnsupportedError, r"float8_e4m3fn, .*: pass dtype=\"float16\""),
        ({"a": np.zeros(2, ml_dtypes.float4_e2m1fn)}, UnsupportedError, "float4_e2m1fn"),
        ({"a": safeload.quantize(np.zeros((2, 2)), "int8")}, UnsupportedError, r"int8 with scales.*quantize=\"q8_0\""),
        ({"a": [1.0]}, TypeError, "'a' is a list"),
        ({3: np.zeros(2, np.float32)}, TypeError, "int"),
        ({"\ud800": np.zeros(2, np.float32)}, SafeloadError, "lone surrogate"),
        ({"é" * 64: np.zeros(2, np.float32)}, SafeloadError, "128 bytes, but ggml reads at most 127"),
        ({"a": np.zeros((1,) * 5, np.float32)}, SafeloadError, "5 dims, but ggml reads at most 4"),
    ],
)
def test_tensors_that_gguf_does_not_have(path, given, kind, fragment):
    path.write_bytes(b"old")
    with pytest.raises(kind, match=fragment):
        gguf.save_file(given, path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_long_names(path):
    names = ["n" * 63, "n" * 64, "n" * 127]
    gguf.save_file({name: np.ones(1, np.float32) for name in names}, path)
    assert list(safeload.open(path)) == names


def test_overwrite(path):
    gguf.save_file({}, path, durable=False)
    with pytest.raises(FileExistsError):
        gguf.save_file({}, path, overwrite=False)


def test_a_tensor_that_cannot_be_made_leaves_the_old_file(path):
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError):
        safeload.convert({"a": Late(np.dtype(np.float32), (1,), lambda: 1 / 0)}, path, raw=True, overwrite=True)
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


# ---- metadata ----


@pytest.mark.parametrize(
    ("value", "types"),
    [
        ("", [T.STRING]),
        ("täxt\n", [T.STRING]),
        (np.str_("numpy's"), [T.STRING]),
        (True, [T.BOOL]),
        (np.False_, [T.BOOL]),
        (0, [T.INT32]),
        (-(2**31), [T.INT32]),
        (2**31 - 1, [T.INT32]),
        (2**31, [T.UINT32]),
        (2**32 - 1, [T.UINT32]),
        (2**32, [T.INT64]),
        (-(2**63), [T.INT64]),
        (2**63, [T.UINT64]),
        (2**64 - 1, [T.UINT64]),
        (0.5, [T.FLOAT32]),
        (float("inf"), [T.FLOAT32]),
        (0.1, [T.FLOAT64]),
        (1e300, [T.FLOAT64]),
        (np.uint8(3), [T.UINT8]),
        (np.int8(-3), [T.INT8]),
        (np.uint16(3), [T.UINT16]),
        (np.int16(-3), [T.INT16]),
        (np.uint32(3), [T.UINT32]),
        (np.int32(-3), [T.INT32]),
        (np.uint64(3), [T.UINT64]),
        (np.int64(-3), [T.INT64]),
        (np.float32(0.1), [T.FLOAT32]),
        (np.float64(0.5), [T.FLOAT64]),
        (np.array(7, np.uint16), [T.UINT16]),
        (gguf_values.U32(3), [T.UINT32]),
        (gguf_values.F64(0.5), [T.FLOAT64]),
        (["a", "", "ü"], [T.ARRAY, T.STRING]),
        (("a",), [T.ARRAY, T.STRING]),
        (np.array(["a", "bc"]), [T.ARRAY, T.STRING]),
        (np.array(["a", "bc"], object), [T.ARRAY, T.STRING]),
        ([True, False], [T.ARRAY, T.BOOL]),
        (np.array([True, False]), [T.ARRAY, T.BOOL]),
        ([1, -2], [T.ARRAY, T.INT32]),
        ([1, 2**31], [T.ARRAY, T.UINT32]),
        ([-1, 2**31], [T.ARRAY, T.INT64]),
        ([1, 2**63], [T.ARRAY, T.UINT64]),
        ([1, 0.5], [T.ARRAY, T.FLOAT32]),
        ([0.5, 0.1], [T.ARRAY, T.FLOAT64]),
        ([gguf_values.U8(1), gguf_values.U8(2)], [T.ARRAY, T.UINT8]),
        ([gguf_values.U8(1), 2], [T.ARRAY, T.INT32]),
        ([np.int64(1)], [T.ARRAY, T.INT64]),
        *((np.arange(3).astype(t), [T.ARRAY, T[t.upper()]]) for t in ("int8", "uint8", "int16", "uint16")),
        *((np.arange(3).astype(t), [T.ARRAY, T[t.upper()]]) for t in ("int32", "uint32", "int64", "uint64")),
        *((np.arange(3).astype(t), [T.ARRAY, T[t.upper()]]) for t in ("float32", "float64")),
        (np.arange(6, dtype=">u2")[::2], [T.ARRAY, T.UINT16]),
    ],
    ids=repr,
)
def test_metadata_types(path, value, types):
    gguf.save_file({}, path, {"key": value})
    assert types_of(path) == {"key": types}
    theirs = peer.GGUFReader(path).fields["key"].contents()
    plain = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    assert theirs == (list(plain) if isinstance(plain, tuple) else plain)
    got = safeload.open(path).metadata["key"]
    assert (got.tolist() if isinstance(got, np.ndarray) else got) == theirs
    before = path.read_bytes()
    gguf.save_file({}, path, {"key": got})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "value",
    [
        [],
        np.zeros(0, np.uint16),
        [[1, 2], [3]],
        [["a"], ["b", "c"], []],
        [np.zeros(2, np.uint8), np.ones(3, np.float64)],
        np.arange(6, dtype=np.int16).reshape(2, 3),
        float("nan"),
        [0.5, float("nan")],
        gguf_values.F32(0.1),
        "broken \udcff",  # a byte that is no UTF-8, as it is read
    ],
    ids=repr,
)
def test_metadata_that_gguf_py_cannot_show(path, value):
    gguf.save_file({}, path, {"key": value, "after": 1})
    before = path.read_bytes()
    metadata = safeload.open(path).metadata
    assert metadata["after"] == 1
    got = metadata["key"]
    assert repr(got) == repr(value) or isinstance(value, (float, list, np.ndarray))
    for given in (metadata, dict(metadata)):
        gguf.save_file({}, path, given)
        assert path.read_bytes() == before


def test_every_number_class_keeps_its_type(path):
    want = {f"n.{kind.__name__}": kind(3) for kind in gguf_values.NUMBERS.values()}
    gguf.save_file({}, path, want)
    first = types_of(path)
    assert len({str(types) for types in first.values()}) == len(gguf_values.NUMBERS)
    metadata = safeload.open(path).metadata
    gguf.save_file({}, path, {**metadata, "general.name": "another"})
    assert types_of(path) == {**first, "general.name": [T.STRING]}


@pytest.mark.parametrize(
    ("metadata", "kind", "fragment"),
    [
        ({"k": None}, TypeError, "metadata 'k': GGUF cannot store values of type NoneType"),
        ({"k": b"x"}, TypeError, "bytes"),
        ({"k": {"a": 1}}, TypeError, "dict"),
        ({"k": 1j}, TypeError, "complex"),
        ({"k": np.float16(1)}, TypeError, "float16"),
        ({"k": np.zeros(2, np.complex64)}, TypeError, "complex64"),
        ({"k": np.array([b"x"])}, TypeError, "GGUF cannot store values of dtype"),
        ({"k": ["a", 1]}, TypeError, "str"),
        ({"k": [True, 1]}, TypeError, "bools and numbers"),
        ({"k": [[1], 2]}, TypeError, "list"),
        ({"k": [[[1]]]}, TypeError, "arrays of arrays of arrays"),
        ({"k": 2**64}, SafeloadError, "metadata 'k': 18446744073709551616 does not fit"),
        ({"k": -(2**63) - 1}, SafeloadError, "does not fit"),
        ({"k": [-1, 2**63]}, SafeloadError, "does not fit"),
        ({"k": gguf_values.I8(200)}, SafeloadError, "does not fit int8"),
        ({"k": gguf_values.U16(-1)}, SafeloadError, "does not fit uint16"),
        ({"k": gguf_values.I64(2**63)}, SafeloadError, "does not fit int64"),
        ({"k": gguf_values.F32(1e300)}, SafeloadError, "does not fit float32"),
        ({"k": "\ud800"}, SafeloadError, "metadata 'k': .*lone surrogate"),
        ({"k": ["\ud800"]}, SafeloadError, "lone surrogate"),
        ({3: "x"}, TypeError, "a metadata key must be str"),
        ({"": "x"}, SafeloadError, "0 bytes, but GGUF allows 1 to 65535"),
        ({"k" * 65536: "x"}, SafeloadError, "65536 bytes"),
        ({"\ud800": "x"}, SafeloadError, "lone surrogate"),
        ({"general.alignment": 0}, SafeloadError, "must be a power of two up to 1073741824, got 0"),
        ({"general.alignment": -8}, SafeloadError, "got -8"),
        ({"general.alignment": 3}, SafeloadError, "got 3"),
        ({"general.alignment": 2**31}, SafeloadError, "got 2147483648"),
        ({"general.alignment": "32"}, TypeError, "must be int, got str"),
        ({"general.alignment": True}, TypeError, "must be int, got bool"),
    ],
    ids=lambda value: repr(value)[:24] if isinstance(value, dict) else None,
)
def test_metadata_that_gguf_does_not_have(path, metadata, kind, fragment):
    path.write_bytes(b"old")
    with pytest.raises(kind, match=fragment):
        gguf.save_file({}, path, metadata)
    assert path.read_bytes() == b"old"


# ---- the identity ----


@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=lambda p: p.name)
def test_vocabularies_are_written_as_they_were_read(path, vocabulary):
    with safeload.open(vocabulary) as opened:
        for metadata in (opened.metadata, dict(opened.metadata)):
            gguf.save_file(dict(opened), path, metadata)
            assert path.read_bytes() == vocabulary.read_bytes()


def test_a_file_of_gguf_py_is_written_as_it_was_read(path, tmp_path):
    writer = peer.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_scores([0.0, -1.0, 0.25])
    writer.add_bool("b", True)
    writer.add_float64("d", 0.5)
    writer.add_int8("i", -3)
    for k, dtype in enumerate((np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64)):
        writer.add_tensor(f"t.{k}", elements((3, k + 1), dtype))
    x = elements((4, 64), np.float32)
    for kind in (peer.GGMLQuantizationType.Q4_0, peer.GGMLQuantizationType.Q8_0, peer.GGMLQuantizationType.BF16):
        writer.add_tensor(kind.name, peer.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for metadata in (safeload.open(path).metadata, dict(safeload.open(path).metadata)):
        copy = tmp_path / "copy.gguf"
        gguf.save_file(safeload.load(path), copy, metadata)
        assert copy.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "fragment"), [("a\0b", r"'a\\x00b' contains NUL, where ggml would truncate it"), ("\ud800", "surrogate")]
)
def test_names_that_ggml_does_not_have(name, fragment, tmp_path):
    path = tmp_path / "x.gguf"
    with pytest.raises(safeload.SafeloadError, match=fragment):
        gguf.save_file({"fine": np.ones(2), name: np.ones(2)}, path)
    assert not path.exists()
