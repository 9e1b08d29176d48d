"""ONNX models: what onnx and torch wrote, models made here, external data, and files with a fault."""

import io
import os
import pickle
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from builders import onnx_build
from builders.http_server import Server
from builders.inside import onnx_model
from builders.onnx_build import (
    constant,
    described,
    external,
    floats,
    graph,
    message,
    model,
    number,
    packed,
    pair,
    sample,
    tensor,
    varint,
)
from builders.paths import ROOT
from builders.random import rng
from builders.thorough import part_of

import safeload
from safeload.errors import FormatError, LimitError, SafeloadError, TensorNotFoundError, UnsupportedError

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

# tests/data/onnx/compare.sh lets onnx and torch write all fixtures anew.
DATA = Path(os.environ.get("SAFELOAD_ONNX_FIXTURES") or ROOT / "tests" / "data" / "onnx")
FIXTURES = ("types", "nested", "torch", "external/model", "files/model")
A = np.arange(6, dtype=np.float32).reshape(2, 3)


def unpacked(info, array):
    """Elements of less than 8 bits in a byte each."""
    bits = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}.get(info.dtype)
    if bits is None:
        return array
    digits = np.unpackbits(array.reshape(-1), bitorder="little").reshape(-1, bits)
    return np.packbits(digits, axis=1, bitorder="little").reshape(info.shape)


def check_tensors(opened, arrays, want):
    assert sorted(arrays) == sorted(want)
    for name, expected in want.items():
        got = unpacked(opened.tensors[name], np.asarray(arrays[name]))
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), name


@pytest.mark.parametrize("fixture", FIXTURES)
def test_the_tensors_are_those_that_onnx_reads(fixture, tmp_path):
    want = safeload.load(DATA / f"{fixture}.safetensors")
    path = DATA / f"{fixture}.onnx"
    with safeload.open(path) as opened:
        assert opened.format == "onnx"
        check_tensors(opened, opened.load(), want)
        check_tensors(opened, dict(opened.stream()), want)
        check_tensors(opened, pickle.loads(pickle.dumps(opened)).load(), want)
        plain = [name for name in want if want[name].ndim and opened.tensors[name].dtype[:2] not in ("F4", "F6")]
        for name in plain:
            assert opened.get_slice(name)[1:].tobytes() == want[name][1:].tobytes()
        if fixture in ("types", "external/model"):
            with ProcessPoolExecutor(1) as executor:
                safeload.convert(path, tmp_path / "out", only=plain, max_shard_size=400, executor=executor)
            check_tensors(opened, safeload.load(tmp_path / "out"), {name: want[name] for name in plain})


def test_metadata_and_what_exporters_write():
    opened = safeload.open(DATA / "types.onnx")
    assert opened.metadata["producer_name"] == "safeload tests"
    assert opened.metadata["opset_import"] == {"": 21}
    assert opened.metadata["metadata_props"] == {"license": "MIT"}
    exported = safeload.open(DATA / "torch.onnx")
    assert exported.metadata["producer_name"] == "pytorch"
    assert {"0.weight", "1.bias"} <= set(exported)


def test_graphs_in_nodes_have_their_names_and_constants_a_root():
    path = DATA / "nested.onnx"
    opened = safeload.open(path)
    assert list(opened) == ["choice.else_branch.w", "choice.then_branch.w", "a"]
    assert opened.notes == [
        'Constant nodes hold 3 tensors that are not opened: pass root="constants" for these instead'
    ]
    constants = safeload.open(path, root="constants")
    assert set(constants) == {"c", "choice.then_branch.then_c", "choice.else_branch.else_c"}
    assert constants["c"].tolist() == [0, 1, 2]
    with pytest.raises(TensorNotFoundError, match=r"no container 'x'; an ONNX model has 'constants'"):
        safeload.open(path, root="x")


def test_a_graph_without_initializers_opens_its_constant_nodes(tmp_path):
    path = tmp_path / "paddle.onnx"
    path.write_bytes(model(graph(nodes=[constant("conv.w", tensor("", A))])))
    opened = safeload.open(path)
    assert opened.notes == []
    check_tensors(opened, opened.load(), {"conv.w": A})
    assert safeload.check(path).ok
    safeload.convert(path, tmp_path / "out.safetensors")
    np.testing.assert_array_equal(safeload.load(tmp_path / "out.safetensors")["conv.w"], A)


@pytest.mark.parametrize("kind", [21, 22, 23, 25, 26, 27, 28])
@pytest.mark.parametrize("raw", [True, False])
def test_a_tensor_without_rows_keeps_its_axes(kind, raw, tmp_path):
    path = tmp_path / "m.onnx"
    shapes = {"rows": (0, 3), "inner": (2, 0, 3), "columns": (2, 0), "whole": (0, 8)}
    empty = np.zeros(0, np.uint8)
    path.write_bytes(model(graph(*(tensor(n, empty, dims=dims, kind=kind, raw=raw) for n, dims in shapes.items()))))
    with safeload.open(path) as opened:
        for name, shape in shapes.items():
            assert opened.tensors[name].shape == shape
            assert opened[name].shape[:-1] == opened.get_slice(name).shape[:-1] == shape[:-1]
            assert opened.load(dtype="float32")[name].shape == shape


def test_random_models_come_back(tmp_path):
    for k in range(20):
        want, tensors = {}, []
        for j in range(int(rng.integers(0, 8))):
            shape = tuple(map(int, rng.integers(0, 4, int(rng.integers(0, 4)))))
            dtype = str(rng.choice(["float32", "float16", "int64", "int32", "uint8", "bool", "float64", "uint64"]))
            value = np.asarray(rng.standard_normal(shape) * 9).astype(dtype)
            name = f"t{j}.weight"
            kind = onnx_build.TYPES[dtype]
            want[name] = value
            flat = value.reshape(-1)
            if dtype == "float32" and rng.integers(2):
                tensors.append(described(name, kind, shape, floats(4, flat)))
            elif dtype in ("int64", "int32", "bool", "uint8", "uint64") and rng.integers(2):
                field = {"int64": 7, "uint64": 11}.get(dtype, 5)
                tensors.append(described(name, kind, shape, packed(field, map(int, flat))))
            else:
                tensors.append(tensor(name, value))
        path = tmp_path / f"{k}.onnx"
        path.write_bytes(model(graph(*tensors)))
        with safeload.open(path) as opened:
            check_tensors(opened, opened.load(), want)


@pytest.mark.parametrize("source", ["file object", "url"])
def test_any_source(source):
    path = DATA / "types.onnx"
    want = safeload.load(DATA / "types.safetensors")
    if source == "url":
        with Server(DATA) as server:
            for name in ("types", "external/model", "files/model"):
                opened = safeload.open(server.url(f"/{name}.onnx"))
                check_tensors(opened, opened.load(), safeload.load(DATA / f"{name}.safetensors"))
        return
    opened = safeload.open(io.BytesIO(path.read_bytes()))
    check_tensors(opened, opened.load(), want)


def test_opening_reads_no_elements(tmp_path):
    """Elements that lie beyond the end of the disk's blocks: a sparse file of a terabyte."""
    path, size = tmp_path / "m.onnx", 1 << 40
    path.write_bytes(model(graph(external("a", 1, [size // 4], location="m.data"))))
    with (tmp_path / "m.data").open("wb") as file:
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("this file system has no sparse files of this size")
        file.seek(size - 4)
        file.write(np.float32(2).tobytes())
    opened = safeload.open(path)
    assert opened.get_slice("a")[-2:].tolist() == [0, 2]
    assert opened.tensors["a"].file == str(tmp_path / "m.data")


def test_external_data_is_a_view_of_its_file(tmp_path):
    path = tmp_path / "m.onnx"
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "m.data").write_bytes(bytes(64) + A.tobytes())
    fields = external("a", 1, A.shape, location="./sub/m.data", offset=64, length=24, checksum="ff")
    path.write_bytes(model(graph(fields, external("rest", 1, [16], location="sub/m.data"))))
    opened = safeload.open(path)
    assert np.shares_memory(opened["a"], opened["a"])
    assert (opened["a"] == A).all()


@pytest.mark.parametrize("source", ["file", "folder", "url"])
def test_only_tensors_of_a_missing_file_are_refused(source, tmp_path):
    folder, target = tmp_path / "m", tmp_path / "o.safetensors"
    folder.mkdir()
    path = folder / "model.onnx"
    (folder / "there.data").write_bytes(A.tobytes())
    tensors = [external("there", 1, A.shape, location="there.data")]
    tensors += [external(f"gone {k}", 1, A.shape, location=f"sub/{k % 2}.data", offset=24 * k) for k in range(5)]
    path.write_bytes(model(graph(*tensors, tensor("inside", A))))
    with Server(folder) as server:
        place = {"file": path, "folder": folder, "url": server.url("/model.onnx")}[source]
        with safeload.open(place) as opened:
            assert list(opened) == ["there", *(f"gone {k}" for k in range(5)), "inside"]
            assert opened.tensors["gone 1"].shape == A.shape
            for name in ("there", "inside"):
                assert (opened[name] == A).all()
            with pytest.raises(UnsupportedError, match=r"'gone 1': FLOAT is stored in .*1\.data, which is missing:"):
                opened["gone 1"]
            assert opened.load(drop="gone*").keys() == {"there", "inside"}
        with pytest.raises(UnsupportedError, match=r"'gone 0': .*drop="):
            safeload.convert(place, target)
        safeload.convert(place, target, drop="gone*")
        assert set(safeload.open(target)) == {"there", "inside"}
        if source != "url":
            faults = [(finding.code, finding.tensor) for finding in safeload.check(place).errors]
            assert faults == [("file.unknown_type", f"gone {k}") for k in range(5)]
        else:
            assert sum(request.path.endswith("1.data") for request in server.requests) <= 6


def test_folders(tmp_path):
    shutil.copytree(DATA / "files", tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    assert sorted(safeload.open(tmp_path / "m")) == sorted(safeload.open(DATA / "files" / "model.safetensors"))
    (tmp_path / "m" / "model_int8.onnx").write_bytes(sample())
    assert safeload.open(tmp_path / "m").notes == ["skipped: model_int8.onnx"]
    (tmp_path / "m" / "model.onnx").rename(tmp_path / "m" / "decoder.onnx")
    with pytest.raises(UnsupportedError, match=r"2 files of ONNX: decoder.onnx, model_int8.onnx; open one of them"):
        safeload.open(tmp_path / "m")


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links")
def test_links_are_followed_as_those_of_shards(tmp_path):
    """The cache of the Hugging Face Hub links each name to a blob."""
    (tmp_path / "blob").write_bytes(A.tobytes())
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "m.data").symlink_to(tmp_path / "blob")
    (folder / "model.onnx").write_bytes(model(graph(external("a", 1, A.shape, location="m.data"))))
    assert (safeload.load(folder)["a"] == A).all()


# ---- faults ----


def with_tensor(*content):
    return model(graph(b"".join(content)))


def of(kind, dims, *fields):
    return with_tensor(described("t", kind, dims, *fields))


def outside(**entries):
    return with_tensor(external("t", 1, A.shape, **entries))


def nested(levels):
    content = graph(tensor("t", A))
    for _ in range(levels):
        content = graph(nodes=[message(2, "x") + message(5, message(1, "body"), message(6, content))])
    return model(content)


def change(old, new):
    """The sample with bytes replaced."""
    content = model(graph(tensor("t", A)))
    assert content.count(old) == 1
    return content.replace(old, new)


HEAD = number(1, 10) + message(2, "tests")
NAMES = ["..", "../x", "/etc/passwd", "a/../b", "a//b", "C:\\x", "a\\b", "c:x", "a\0b", ".", "", "a/", "././x", "/"]
NAMES.append("/".join("a" * 17))
FAULTS = {
    "no graph": (HEAD, FormatError, "the model has no graph"),
    "a graph beyond the end": (
        HEAD + b"\x3a\x05ab",
        FormatError,
        "field 7 of an ONNX model needs 5 bytes, but 2 are left",
    ),
    "a graph of a number": (HEAD + number(7, 1), FormatError, "a graph must be a message, got wire type 0"),
    "a cut number": (HEAD + b"\x08\xff", FormatError, "a number in an ONNX model is cut off, or has more than 10"),
    "a long number": (HEAD + b"\x08" + b"\xff" * 10 + b"\x01", FormatError, "has more than 10 bytes"),
    "field 0": (HEAD + b"\x00\x00", FormatError, "a field of an ONNX model has the number 0"),
    "a large field": (
        HEAD + varint(1 << 33) + b"\0",
        FormatError,
        "a field of an ONNX model has the number 1073741824",
    ),
    "a group": (HEAD + b"\x3b\x3c", FormatError, "field 7 of an ONNX model has the wire type 3, which is not in use"),
    "wire type 7": (HEAD + b"\x3f", FormatError, "has the wire type 7, which is not in use"),
    "eight bytes beyond": (HEAD + b"\x39abc", FormatError, "field 7 of an ONNX model needs 8 bytes, but 3 are left"),
    "four bytes beyond": (HEAD + b"\x3dabc", FormatError, "field 7 of an ONNX model needs 4 bytes, but 3 are left"),
    "a producer of a number": (HEAD + number(2, 4), FormatError, "producer_name must be text, got wire type 0"),
    "a producer not UTF-8": (HEAD + message(2, b"\xff"), FormatError, "producer_name is not UTF-8"),
    "a long producer": (HEAD + b"\x12\xff\xff\xff\xff\x0f", FormatError, "needs 4294967295 bytes, but 0 are left"),
    "props of a number": (HEAD + number(14, 1), FormatError, "an entry of metadata_props must be a message"),
    "props not UTF-8": (
        HEAD + message(14, message(1, b"\xff")),
        FormatError,
        "a text in an entry of metadata_props is",
    ),
    "an opset of text": (HEAD + message(8, b"\x0a"), FormatError, "a number in an opset_import is cut off"),
    "a tensor of a number": (model(graph(more=[number(5, 1)])), FormatError, "an initializer must be a message"),
    "a node of a number": (model(graph(more=[number(1, 1)])), FormatError, "a node must be a message"),
    "an attribute of a number": (model(graph(nodes=[number(5, 1)])), FormatError, "an attribute must be a message"),
    "a graph in a node of a number": (
        model(graph(nodes=[message(5, message(1, "b"), number(6, 1))])),
        FormatError,
        "a graph must be a message",
    ),
    "a node not UTF-8": (model(graph(nodes=[message(3, b"\xff")])), FormatError, "a name in a node is not UTF-8"),
    "no name": (with_tensor(tensor("", A)), FormatError, "an initializer has no name"),
    "a name not UTF-8": (with_tensor(message(8, b"a\xff")), FormatError, "the name of a tensor is not UTF-8"),
    "a name twice": (model(graph(tensor("t", A), tensor("t", A))), FormatError, "two tensors are named 't'"),
    "a constant twice": (
        model(graph(nodes=[constant("c", tensor("", A))] * 2)),
        FormatError,
        "two tensors are named 'c'",
    ),
    "sparse": (
        model(graph(more=[message(15, message(1, tensor("s", A)), message(2, tensor("", A)))])),
        UnsupportedError,
        "tensor 's': FLOAT is sparse, which safeload does not read",
    ),
    "deep": (nested(onnx_model.MAX_DEPTH + 2), LimitError, "graphs are nested more than 32 levels deep"),
    "many axes": (
        of(1, [1] * 65, floats(4, [1])),
        FormatError,
        "a tensor of more than 64 axes, the most that NumPy has",
    ),
    "many packed axes": (with_tensor(packed(1, [1] * 65)), FormatError, "dims has more than 64 numbers"),
    "dims of four bytes": (
        with_tensor(varint(1 << 3 | 5) + bytes(4)),
        FormatError,
        "dims must be numbers, got wire type",
    ),
    "a negative dim": (of(1, [-1], floats(4, [1])), FormatError, "no array can have the shape .18446744073709551615"),
    "huge dims": (of(1, [1 << 62, 1 << 62, 0]), FormatError, "no array can have the shape"),
    "no type": (of(0, [1], floats(4, [1])), UnsupportedError, "tensor 't': data type 0 is not a dtype"),
    "an unknown type": (
        of(99, [1], floats(4, [1])),
        UnsupportedError,
        "tensor 't': data type 99 is not a dtype",
    ),
    "strings": (
        of(8, [1], message(6, "a")),
        UnsupportedError,
        "tensor 't': STRING is not a dtype of weights",
    ),
    "strings of floats": (of(1, [1], message(6, "a")), UnsupportedError, "tensor 't': FLOAT is not a dtype"),
    "complex128": (of(15, [1], floats(10, [1], "d")), FormatError, "COMPLEX128 .1. needs 16 bytes"),
    "a segment": (
        of(1, [1], message(3), floats(4, [1])),
        UnsupportedError,
        "tensor 't': FLOAT is a segment of a tensor",
    ),
    "raw too short": (of(1, [3], message(9, bytes(8))), FormatError, r"FLOAT .3. needs 12 bytes, but raw_data has 8"),
    "raw too long": (of(1, [1], message(9, bytes(8))), FormatError, r"FLOAT .1. needs 4 bytes, but raw_data has 8"),
    "raw of a number": (of(1, [1], number(9, 4)), FormatError, "raw_data must be bytes, got wire type 0"),
    "raw empty": (of(1, [2], message(9)), FormatError, r"FLOAT .2. needs 8 bytes, but raw_data has 0"),
    "raw and floats": (of(1, [1], message(9, bytes(4)), floats(4, [1])), FormatError, "has raw_data and float_data"),
    "nothing": (of(1, [1]), FormatError, r"FLOAT .1. needs 4 bytes, but float_data has 0"),
    "no integers": (of(7, [1]), FormatError, r"INT64 .1. needs 1 numbers, but int64_data has 0 bytes"),
    "floats too few": (of(1, [3], floats(4, [1, 2])), FormatError, "needs 12 bytes, but float_data has 8"),
    "floats too many": (of(1, [1], floats(4, [1, 2])), FormatError, "needs 4 bytes, but float_data has 8"),
    "floats of doubles": (of(1, [1], floats(10, [1], "d")), FormatError, "has its elements in float_data, got double_"),
    "doubles in floats": (
        of(11, [1], floats(4, [1, 2])),
        FormatError,
        "has its elements in double_data, got float_data",
    ),
    "floats as varints": (of(1, [1], number(4, 4)), FormatError, "float_data must be numbers, got wire type 0"),
    "half floats": (
        of(1, [2], message(4, bytes(4)), message(4, bytes(3)), message(4, b"a")),
        UnsupportedError,
        "FLOAT is stored in several fields",
    ),
    "single numbers": (of(11, [1], b"\x51" + bytes(8)), UnsupportedError, "DOUBLE is stored in several"),
    "single varints": (of(7, [2], number(7, 1), number(7, 2)), UnsupportedError, "INT64 is stored in several fields"),
    "integers of floats": (
        of(6, [1], floats(4, [1])),
        FormatError,
        "INT32 has its elements in int32_data, got float_data",
    ),
    "too many bytes of integers": (
        of(6, [1], packed(5, [1] * 11)),
        FormatError,
        "needs 1 numbers, but int32_data has 11",
    ),
    "small integers too short": (
        of(22, [5], message(9, b"ab")),
        FormatError,
        r"INT4 .5. needs 3 bytes, but raw_data has",
    ),
    "float4 in half a byte": (
        of(23, [3], message(9, b"ab")),
        UnsupportedError,
        "3 elements of 4 bits, which end inside",
    ),
    "float4 in numbers": (
        of(23, [2, 1], packed(5, [1])),
        UnsupportedError,
        "as numbers, and its rows end inside a byte",
    ),
    "location 2": (of(1, [1], number(14, 2)), FormatError, "data_location is 2, expected 0 or 1"),
    "both": (
        with_tensor(external("t", 1, [1], location="m.data"), floats(4, [1])),
        FormatError,
        "both in the model and in",
    ),
    "external and raw": (
        with_tensor(external("t", 1, [1], location="m.data"), message(9, bytes(4))),
        FormatError,
        "has elements both in the model and in another file",
    ),
    "no location": (outside(offset=4), FormatError, "its location must be a file in the model's folder, got ''"),
    "no entries": (of(1, [1], number(14, 1)), FormatError, "its location must be a file in the model's folder"),
    "an entry of a number": (
        of(1, [1], number(14, 1), number(13, 1)),
        FormatError,
        "an entry of external_data must be",
    ),
    "many entries": (
        of(1, [1], *(pair(13, str(k), "") for k in range(onnx_model.MAX_EXTERNAL + 1))),
        FormatError,
        "external_data has more than 64 entries",
    ),
    "a folder": (outside(location="sub"), FormatError, "its location 'sub' is a folder"),
    "an offset beyond": (
        outside(location="m.data", offset=100),
        FormatError,
        "needs bytes 100 to 124 of 'm.data', which",
    ),
    "an end beyond": (
        outside(location="m.data", offset=41),
        FormatError,
        "needs bytes 41 to 65 of 'm.data', which has 64",
    ),
    "a negative offset": (
        outside(location="m.data", offset=-1),
        FormatError,
        "offset in external_data must be a number",
    ),
    "an offset of text": (outside(location="m.data", offset="x"), FormatError, "must be a number, got 'x'"),
    "an offset in Arabic": (outside(location="m.data", offset="\u0664"), FormatError, "must be a number, got"),
    "a long offset": (outside(location="m.data", offset="9" * 20), FormatError, "must be a number, got '999"),
    "another length": (
        outside(location="m.data", length=20),
        FormatError,
        "needs 24 bytes, but external_data says length 20",
    ),
    "a length of text": (outside(location="m.data", length="24.0"), FormatError, "must be a number, got '24.0'"),
    "a function not UTF-8": (
        model(graph(), message(25, message(1, b"\xff"))),
        FormatError,
        "the name of a function is not UTF-8",
    ),
    "a training of a number": (model(graph(), number(20, 1)), FormatError, "a training_info must be a message"),
    "a graph in a training": (
        model(graph(), message(20, message(2, graph(tensor("", A))))),
        FormatError,
        "an initializer has no name",
    ),
    **{
        f"location {name!r}"[:40]: (outside(location=name), FormatError, "must be a file in the model's folder")
        for name in NAMES
    },
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_refused_by_name(case, tmp_path):
    content, kind, text = FAULTS[case]
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    (tmp_path / "m.data").write_bytes(bytes(64))
    (tmp_path / "sub").mkdir()
    with pytest.raises(kind, match=text) as caught:
        safeload.load(path)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.offset is None or caught.value.offset <= len(content)


LATE = {
    "too few": (of(6, [3], packed(5, [1 << 20, 1])), "int32_data has 2 numbers, expected 3"),
    "too many": (of(6, [1], packed(5, [1, 2])), "int32_data has 2 numbers, expected 1"),
    "cut": (of(6, [1], message(5, b"\x80\x80")), "int32_data: the last number is cut off"),
    "long": (of(6, [2], message(5, b"\x80" * 11 + b"\x01")), "int32_data: a number has 12 bytes, the limit is 10"),
    "small": (of(22, [4], packed(5, [1 << 7])), "int32_data has 1 numbers, expected 2"),
}


@pytest.mark.parametrize("case", LATE)
def test_numbers_are_checked_when_they_are_read(case, tmp_path):
    content, text = LATE[case]
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with safeload.open(path) as opened, pytest.raises(FormatError, match=text) as caught:
        opened.load()
    assert caught.value.tensor == "t"


def refusal(path):
    """The message of our error, if there is one."""
    try:
        safeload.load(path, format="onnx")
    except (SafeloadError, FileNotFoundError) as error:
        return str(error)
    return None


def test_a_cut_and_a_changed_byte_are_errors_of_ours(tmp_path):
    whole = sample()
    path = tmp_path / "m.onnx"
    refused = 0
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        error = refusal(path)
        assert error is None or "m.onnx" in error
        refused += error is not None
    assert refused >= len(whole) - len(onnx_build.pair(14, "license", "MIT")) - 20
    for at in range(len(whole)):
        for value in part_of([0x80, 0xFF, whole[at] ^ 1], at, 3):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            assert "m.onnx" in (refusal(path) or "m.onnx")


def test_limits(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    path.write_bytes(model(graph(tensor("a", A), tensor("b", A), nodes=[message(5) * 2])))
    for module, name, limit, text in (
        (onnx_model, "MAX_FIELDS", 10, "the file has more than 10 fields"),
        (onnx_model, "MAX_TEXT", 10, "names and metadata have more than 10 bytes"),
        (onnx_model, "MAX_TENSORS", 1, "the model has more than 1 tensors"),
        (onnx_model, "MAX_ATTRIBUTES", 1, "more than 1 attributes in a node"),
    ):
        with monkeypatch.context() as context:
            context.setattr(module, name, limit)
            with pytest.raises(LimitError, match=text):
                safeload.open(path)


def test_info_has_the_size_of_each_file():
    folder = ROOT / "tests" / "data" / "onnx" / "files"
    sizes = {os.path.basename(path): size for path, size in safeload.info(folder / "model.onnx").files.items()}
    assert sizes == {name: (folder / name).stat().st_size for name in sizes}
    assert len(sizes) == 5
