"""Flax weights: what flax wrote, trees made here, folders, and files with a fault."""

import contextlib
import io
import json
import os
import pickle
import shutil
import struct
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from builders.flax_build import CHUNKED, Raw, Scalar, array, chunked, extension, pack, single
from builders.http_server import Server
from builders.paths import ROOT
from builders.random import rng
from builders.thorough import part_of

import safeload
from safeload.errors import FormatError, LimitError, SafeloadError, TensorNotFoundError, UnsupportedError

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

# tests/data/flax/compare.sh lets flax write all fixtures anew.
DATA = Path(os.environ.get("SAFELOAD_FLAX_FIXTURES") or ROOT / "tests" / "data" / "flax")
FIXTURES = sorted(path.stem for path in DATA.glob("*.msgpack"))
A = np.arange(6, dtype=np.float32).reshape(2, 3)


def check_tensors(arrays, want):
    assert sorted(arrays) == sorted(want)
    for name, expected in want.items():
        got = np.asarray(arrays[name])
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), name


@pytest.mark.parametrize("fixture", [*FIXTURES, "sharded"])
def test_the_tensors_are_those_that_flax_restores(fixture, tmp_path):
    want = safeload.load(DATA / f"{fixture}.safetensors")
    path = DATA / (fixture if fixture == "sharded" else f"{fixture}.msgpack")
    with safeload.open(path) as opened:
        assert (opened.format, opened.notes) == ("flax", [])
        check_tensors(opened.load(), want)
        check_tensors(dict(opened.stream()), want)
        name = max(want, key=lambda name: want[name].size)
        assert opened.get_slice(name)[1:].tobytes() == want[name][1:].tobytes()
        check_tensors(pickle.loads(pickle.dumps(opened)).load(), want)
    assert {finding.code for finding in safeload.check(path).errors} <= {"value.nan"}  # float8_e8m0fnu has some
    with ProcessPoolExecutor(1) if fixture in ("chunked", "sharded") else contextlib.nullcontext() as executor:
        safeload.convert(path, tmp_path / "out", max_shard_size=400, executor=executor)
    check_tensors(safeload.load(tmp_path / "out"), want)


def test_all_else_is_metadata():
    metadata = safeload.open(DATA / "leaves.msgpack").metadata
    rest = {"step": 3, "rate": 0.5, "name": "bert", "none": None, "complex": 1 + 2j, "raw": b"\x00\xff", "yes": True}
    assert metadata == rest
    assert 'complex: "(1+2j)"' in str(safeload.info(DATA / "leaves.msgpack"))
    json.dumps(safeload.info(DATA / "leaves.msgpack").to_dict())
    assert safeload.open(DATA / "train_state.msgpack").metadata == {"step": 0, "opt_state": {"1": {}, "2": {}}}


def test_random_trees_come_back(tmp_path):
    def tree(depth):
        if depth and rng.integers(3):
            return {f"{key}{k}": tree(depth - 1) for k, key in enumerate(rng.choice(["a", "layer_", "é"], 3))}
        value = rng.standard_normal(tuple(rng.integers(0, 4, int(rng.integers(0, 4)))))
        value = np.asarray(value).astype(rng.choice(["f4", "f8", "i4", "u1", "c8"]))
        return chunked(value, int(rng.integers(1, 5))) if value.size > 6 and value.ndim and rng.integers(2) else value

    def flat(value, name=()):
        if isinstance(value, dict) and CHUNKED in value:
            parts, shape = value["chunks"], tuple(value["shape"].values())
            yield ".".join(name), np.concatenate([parts[str(k)] for k in range(len(parts))]).reshape(shape)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from flat(item, (*name, key))
        else:
            yield ".".join(name), value

    for k in range(30):
        value = {"top": tree(3), "step": k}
        (tmp_path / "t.msgpack").write_bytes(pack(value))
        want = {name: array for name, array in flat(value) if name != "step"}
        with safeload.open(tmp_path / "t.msgpack") as opened:
            check_tensors(opened.load(), want)
            assert list(opened.metadata) == ["step"]


def test_arrays_are_views_and_chunked_arrays_are_read_by_ranges(tmp_path):
    path = tmp_path / "m"
    big = np.arange(1000, dtype=np.int32).reshape(50, 20)
    path.write_bytes(
        pack({"whole": np.arange(4096).astype("i1"), "big": chunked(big, 333), "t": Scalar(np.float16(3))})
    )
    opened = safeload.open(path)
    assert np.shares_memory(opened["whole"], opened["whole"])  # of elements that are aligned anywhere
    assert (opened.get_slice("big")[16:18, 3:] == big[16:18, 3:]).all()
    assert (opened.take("big", [49, 0]) == big[[49, 0]]).all()
    assert opened["t"].shape == ()
    assert list(opened) == ["whole", "big", "t"]


@pytest.mark.parametrize("source", ["bytes", "file object", "url"])
def test_any_source(source):
    want = safeload.load(DATA / "chunked.safetensors")
    path = DATA / "chunked.msgpack"
    if source == "url":
        with Server(DATA) as server:
            check_tensors(safeload.load(server.url("/chunked.msgpack")), want)
            index = server.url("/sharded/flax_model.msgpack.index.json")
            check_tensors(safeload.load(index), safeload.load(DATA / "sharded.safetensors"))
        return
    with io.BytesIO(path.read_bytes()) if source == "bytes" else path.open("rb") as content:
        check_tensors(safeload.load(content), want)


def test_root_selects_a_container_or_an_array():
    path = DATA / "train_state.msgpack"
    names = set(safeload.open(path, root="params"))
    assert "Dense_0.kernel" in names
    assert set(safeload.open(path, root="params.Dense_0")) == {"kernel", "bias"}
    assert list(safeload.open(path, root="params.Dense_0.bias")) == ["tensor"]
    with pytest.raises(
        TensorNotFoundError, match=r"no container 'x'; containers with tensors: params \(\d+ tensors\), opt_state"
    ):
        safeload.open(path, root="x")


def test_no_schema_of_pytorch_names_is_applied(tmp_path):
    single({"params": {"kernel": A}}, tmp_path / "flax_model.msgpack")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert safeload.check(tmp_path).schema is None
    assert not safeload.check(tmp_path).errors


def test_folders(tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    single({"a": A}, folder / "flax_model.msgpack")
    single({"b": A}, folder / "other.msgpack")
    assert list(safeload.open(folder)) == ["a"]
    assert safeload.open(folder).notes == ["skipped: other.msgpack"]
    (folder / "config.json").write_text("{}")
    assert safeload.open(folder, format="flax").config == {}
    shutil.copy(folder / "flax_model.msgpack", folder / "x.msgpack")
    (folder / "flax_model.msgpack").unlink()
    with pytest.raises(UnsupportedError, match=r"2 files of Flax weights: other.msgpack, x.msgpack; open one"):
        safeload.open(folder)
    safeload.convert({"s": A}, folder / "model.safetensors")
    assert list(safeload.open(folder)) == ["s"]
    index = tmp_path / "flax_model.msgpack.index.json"
    index.write_text(json.dumps({"weight_map": {"a/b": "../x.msgpack"}}))
    with pytest.raises(FormatError, match="bare name"):
        safeload.open(tmp_path)


def test_a_file_can_be_one_array_or_have_lists(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(pack(A))
    check_tensors(safeload.load(path), {"tensor": A})
    path.write_bytes(pack({"layers": [A, {"b": A}], "7": 1}))
    assert sorted(safeload.open(path)) == ["layers.0", "layers.1.b"]
    path.write_bytes(b"\x82\xa1a\x01\x07" + pack(A))  # a key that is an integer
    check_tensors(safeload.load(path), {"7": A})


# ---- faults ----


def chunk(**changes):
    value = chunked(A, 4)
    value.update(changes)
    return {"a": {key: item for key, item in value.items() if item is not None}}


DEEP = b"\x81\xa1a" * (100 + 1) + b"\x01"
FAULTS = {
    "nothing in the map": (b"\x81\xa1a", FormatError, r"a value needs 1 bytes, but the file ends after 0 .*byte 3"),
    "more after the value": (pack({"a": A}) + b"\0", FormatError, "1 bytes follow the value of the file"),
    "the byte c1": ({"a": Raw(b"\xc1")}, FormatError, "a value begins with the byte 0xc1, which MessagePack does not"),
    "a key twice": (b"\x82\xa1a\x01\xa1a\x02", FormatError, "the key 'a' occurs twice in a map .*byte 4"),
    "a key of nil": (b"\x82\xa1a\x01\xc0\x02", FormatError, "a key must be text or an integer"),
    "a key of a map": (b"\x82\xa1a\x01\x80\x02", FormatError, "a key must be text or an integer"),
    "a key not UTF-8": (b"\x82\xa1a\x01\xa1\xff\x02", FormatError, "a key is not UTF-8: invalid start byte .*byte 5"),
    "a text not UTF-8": ({"a": Raw(b"\xa2a\xff")}, FormatError, "a value is not UTF-8"),
    "a long key": ({"a": 1, "b" * ((1 << 16) + 1): 1}, LimitError, "a key has 65,537 bytes, the limit is 65,536"),
    "a map of many": (
        {"a": Raw(b"\xdf\xff\xff\xff\xff")},
        FormatError,
        "map of 4,294,967,295 entries, but only 0 bytes",
    ),
    "a list of many": ({"a": Raw(b"\xdd\xff\xff\xff\xff\x01")}, FormatError, "array of 4,294,967,295 entries"),
    "a text of many": ({"a": Raw(b"\xdb\x7f\xff\xff\xff")}, LimitError, "outside arrays have more than"),
    "bytes of many": ({"a": Raw(b"\xc6\x00\xff\xff\xff")}, FormatError, "a value needs 16777215 bytes, but the file"),
    "deep": (DEEP, LimitError, "nested more than 100 levels deep"),
    "deep lists": ({"a": Raw(b"\x91" * 200 + b"\x01")}, LimitError, "nested more than 100 levels"),
    "an unknown extension": ({"a": Raw(extension(4, b"x"))}, UnsupportedError, "extension type 4 is none of"),
    "a timestamp": ({"a": Raw(b"\xd6\xff1234")}, UnsupportedError, "extension type -1 is none of Flax's"),
    "a long extension": ({"a": Raw(b"\xc9\xff\xff\xff\xff\x01")}, FormatError, "an extension of 4294967295 bytes, but"),
    "an empty extension": ({"a": Raw(b"\xc7\x00\x01")}, FormatError, "an array needs 1 bytes, but the file ends"),
    "an extension of a number": ({"a": Raw(extension(1, b"\x01"))}, FormatError, "a shape needs 1 bytes"),
    "an array of two parts": ({"a": Raw(extension(1, pack([[2], "int8"])))}, FormatError, "an array must be its shape"),
    "a shape of text": (
        {"a": Raw(extension(1, pack(["2", "int8", b"ab"])))},
        FormatError,
        "an array must be its shape",
    ),
    "many axes": ({"a": Raw(array(A, shape=[1] * 65))}, FormatError, "an array of 65 axes, but NumPy has at most 64"),
    "a dim of text": (
        {"a": Raw(array(A, shape=[Raw(b"\xa0"), 3]))},
        FormatError,
        "a shape must be numbers of at least 0",
    ),
    "a dim of a bool": ({"a": Raw(array(A, shape=[True, 6]))}, FormatError, "a shape must be numbers of at least 0"),
    "a negative dim": ({"a": Raw(array(A, shape=[-2, -3]))}, FormatError, "numbers of at least 0, got .-2, -3."),
    "a huge dim": ({"a": Raw(array(A, shape=[1 << 63, 0]))}, FormatError, "a shape must be numbers"),
    "huge dims": ({"a": Raw(array(A, shape=[1 << 62, 1 << 62, 0]))}, FormatError, "no array can have the shape"),
    "a dim too large": ({"a": Raw(array(A, shape=[3, 3]))}, FormatError, r"F32 .3, 3. needs 36 bytes, but .* have 24"),
    "a dim too small": ({"a": Raw(array(A, shape=[2, 2]))}, FormatError, "needs 16 bytes, but its elements have 24"),
    "another dtype": ({"a": Raw(array(A, dtype="float64"))}, FormatError, r"F64 .2, 3. needs 48 bytes"),
    "a dtype of a number": ({"a": Raw(array(A, dtype=4))}, FormatError, "the dtype of an array must be a name"),
    "a long dtype": ({"a": Raw(array(A, dtype="f" * 101))}, FormatError, "the dtype of an array must be a name"),
    "text": ({"a": Raw(array(A, dtype="str32"))}, UnsupportedError, "tensor 'a': str32 is not a dtype of weights"),
    "complex128": ({"a": Raw(array(A, dtype="complex128"))}, FormatError, r"C128 .2, 3. needs 96 bytes"),
    "int4": ({"a": Raw(array(A, dtype="int4"))}, UnsupportedError, "tensor 'a': int4 is not a dtype of weights"),
    "float4": ({"a": Raw(array(A, dtype="float4_e2m1fn"))}, UnsupportedError, "stores its elements in a byte each"),
    "a dtype of bytes": ({"a": Raw(array(A, dtype="\udcff\udcfe"))}, UnsupportedError, r"tensor 'a': \\\\xff"),
    "elements of a number": ({"a": Raw(array(A, elements=4))}, FormatError, "the elements of an array must be bytes"),
    "no elements": ({"a": Raw(array(A, elements=b""))}, FormatError, "needs 24 bytes, but its elements have 0"),
    "elements beyond": ({"a": Raw(array(A)[:-4])}, FormatError, "an extension of 38 bytes, but the file ends after 34"),
    "more in the array": (
        {"a": Raw(extension(1, array(A)[3:] + b"\0"))},
        FormatError,
        "an extension should end at byte",
    ),
    "a complex of one": ({"a": Raw(extension(2, pack([1.0])))}, FormatError, "a complex number must be two numbers"),
    "a complex of text": ({"a": Raw(extension(2, pack(["1", 2.0])))}, FormatError, "must be two numbers"),
    "a complex and more": ({"a": Raw(extension(2, pack([1.0, 2.0]) + b"\0"))}, FormatError, "an extension should end"),
    "chunks without a shape": (
        chunk(shape=None),
        FormatError,
        "a chunked array must have a shape and chunks, numbered",
    ),
    "no chunks": (chunk(chunks={}), FormatError, "the chunks of an array must be arrays of one axis"),
    "chunks from 1": (chunk(chunks={"1": A.reshape(-1)}), FormatError, "a shape and chunks, numbered from 0"),
    "chunks of numbers": (chunk(chunks={"0": 1}), FormatError, "the chunks of an array must be arrays of one axis"),
    "chunks in a list": (chunk(chunks=[A.reshape(-1)]), FormatError, "a shape and chunks, numbered from 0"),
    "chunks of two axes": (chunk(chunks={"0": A}), FormatError, "the chunks of an array must be arrays of one axis"),
    "more in a chunked array": (chunk(dtype="float32"), FormatError, "a chunked array must have a shape and chunks"),
    "a chunk missing": (chunk(chunks={"0": A[0]}), FormatError, "has 6 elements, but its chunks have 3"),
    "a chunk too many": (chunk(chunks={"0": A[0], "1": A[0], "2": A[0]}), FormatError, "but its chunks have 9"),
    "chunks of two dtypes": (chunk(chunks={"0": A[0], "1": A[1].astype("i4")}), FormatError, "have several dtypes"),
    "a chunked shape of text": (chunk(shape={"0": "2", "1": 3}), FormatError, "a shape must be numbers"),
    "a chunked negative shape": (chunk(shape={"0": -2, "1": -3}), FormatError, "a shape must be numbers"),
    "a chunked huge shape": (chunk(shape={"0": 1 << 62, "1": 1 << 62}), FormatError, "no array can have the shape"),
    "chunks in chunks": (chunk(chunks={"0": chunked(A, 2)}), FormatError, "arrays of one axis"),
    "two of a name": ({"a.b": A, "a": {"b": A}}, FormatError, "two tensors are named 'a.b'"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_refused_by_name(case, tmp_path):
    content, kind, text = FAULTS[case]
    path = tmp_path / "m.msgpack"
    path.write_bytes(content if isinstance(content, bytes) else pack({"first": A, **content}))
    with pytest.raises(kind, match=text) as caught:
        safeload.load(path, format="flax")
    assert str(path) in str(caught.value)
    assert caught.value.offset is None or caught.value.offset <= path.stat().st_size


def refusal(path):
    """The message of our error, if there is one."""
    try:
        safeload.load(path, format="flax")
    except SafeloadError as error:
        return str(error)
    return None


def test_a_cut_and_a_changed_byte_are_errors_of_ours(tmp_path):
    whole = pack({"params": {"a": A, "big": chunked(A, 4)}, "step": 3, "rate": 0.5, "c": 1j})
    path = tmp_path / "m.msgpack"
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(SafeloadError, match=r"m\.msgpack"):
            safeload.load(path, format="flax")
    for at in range(len(whole)):
        for value in part_of([0, 0x7F, 0x80, 0x8F, 0xC1, 0xC9, 0xDF, 0xFF, whole[at] ^ 1], at, 6):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            assert "m.msgpack" in (refusal(path) or "m.msgpack")


def test_limits(tmp_path):
    path = tmp_path / "m.msgpack"
    long = {"k" * 65_000: {str(k): np.zeros(1, np.int8) for k in range(1_540)}}  # names of 100 million characters
    for content, text in (
        (b"\x81\xa1a\xdd" + struct.pack(">I", 2_000_001) + bytes(2_000_001), "more than 2,000,000 values"),
        (pack({"a": A, "text": "x" * (64 << 20)}), "outside arrays have more than 67,108,864 bytes"),
        (pack(long), "characters in the names of tensors"),
    ):
        path.write_bytes(content)
        with pytest.raises(LimitError, match=text):
            safeload.open(path)
