"""Arrays and scalars of numpy in pickles: files of their own, and within torch checkpoints."""

import collections
import contextlib
import datetime
import os
import pickle
import struct

import ml_dtypes
import numpy as np
import pytest
from builders.thorough import part_of
from builders.torch_build import Call, Ref, Storage, dump, legacy_file, tensor, zip_archive, zip_entries, zip_file

import safeload
from safeload import ForbiddenError, FormatError, LimitError, SafeloadError, UnsupportedError

ARRAYS = {
    "f": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "0-d": np.array(5.0),
    "empty": np.zeros((0, 3)),
    "empty fortran": np.zeros((3, 0), order="F"),
    "big-endian": np.arange(3, dtype=">f4") - 1,
    "big-endian complex": np.array([1 + 2j, -3j], ">c8"),
    "bool": np.array([True, False]),
    "bfloat16": np.arange(3).astype(ml_dtypes.bfloat16),
    "float8": np.arange(3).astype(ml_dtypes.float8_e4m3fn),
    "bytes above 127": np.arange(256, dtype=np.uint8),
    "steps": np.arange(10, dtype=np.int16)[::2],
    "axes": np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
    "float16": np.array([[1.5]], np.float16),
    "uint64": np.array([2**64 - 1], np.uint64),
}
NESTED = {
    **ARRAYS,
    "layers": [{"w": np.ones(2), "b": np.zeros(1, np.int8)}, (np.ones((1, 1)),)],
    "state": collections.OrderedDict(x=np.arange(2.0)),
}
SCALARS = {
    "float64": (np.float64(0.25), 0.25),
    "float32": (np.float32(2.5), 2.5),
    "int64": (np.int64(-3), -3),
    "bool": (np.bool_(True), True),
    "complex64": (np.complex64(1 + 2j), 1 + 2j),
    "bfloat16": (ml_dtypes.bfloat16(1.5), 1.5),
    "big-endian": (np.arange(3, dtype=">i4")[2], 2),
    "a dtype": (np.dtype("f4"), "float32"),
    "a type": (np.float16, "numpy.float16"),
}


def flat(value, prefix=""):
    for step, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, np.ndarray):
            yield f"{prefix}{step}", item
        else:
            yield from flat(item, f"{prefix}{step}.")


def check(checkpoint, want):
    assert list(checkpoint) == list(want)
    for loaded in (checkpoint, checkpoint.load(), checkpoint.load(backend="pread")):
        for name, array in want.items():
            got = loaded[name]
            assert (got.dtype, got.shape) == (array.dtype.newbyteorder("="), array.shape), name
            assert got.tobytes() == array.astype(got.dtype).tobytes(), name
            assert got.flags.aligned, name
            assert got.flags.writeable, name
    for name, array in want.items():
        assert checkpoint.get_slice(name)[...].tobytes() == array.astype(checkpoint[name].dtype).tobytes(), name
        assert checkpoint.tensors[name].nbytes == array.nbytes
    assert checkpoint.nbytes == sum(array.nbytes for array in want.values())


def opened(tmp_path, data, **options):
    path = tmp_path / "made.pkl"
    path.write_bytes(data)
    return safeload.open(path, **options)


def spellings(data):
    """As numpy 1 and numpy 2 write it. Of the same length only where text has no length before it."""
    yield data
    for old, new in ((b"numpy._core", b"numpy.core"), (b"numpy.core", b"numpy._core")):
        if b"c" + old in data:
            yield data.replace(b"c" + old, b"c" + new)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_of_arrays_is_a_checkpoint(tmp_path, protocol):
    for data in spellings(pickle.dumps(NESTED, protocol)):
        with opened(tmp_path, data) as checkpoint:
            check(checkpoint, dict(flat(NESTED)))
            assert checkpoint.format == "pickle"
            assert checkpoint.files == [str(tmp_path / "made.pkl")]
            assert checkpoint.metadata == {}
            assert all(checkpoint.named_globals.values())
        assert list(opened(tmp_path, data, root="layers.0")) == ["w", "b"]
        assert opened(tmp_path, data, format="pickle").format == "pickle"


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", ARRAYS)
def test_one_array_of_each_kind(tmp_path, name, protocol):
    check(opened(tmp_path, pickle.dumps({"w": ARRAYS[name]}, protocol)), {"w": ARRAYS[name]})
    check(opened(tmp_path, pickle.dumps(ARRAYS[name], protocol)), {"tensor": ARRAYS[name]})
    check(opened(tmp_path, pickle.dumps((ARRAYS[name],), protocol)), {"0": ARRAYS[name]})
    check(opened(tmp_path, pickle.dumps([ARRAYS[name]], protocol)), {"0": ARRAYS[name]})


@pytest.mark.parametrize("protocol", range(6))
def test_scalars_are_metadata(tmp_path, protocol):
    value = {**{name: scalar for name, (scalar, _) in SCALARS.items()}, "w": np.ones(1)}
    for data in spellings(pickle.dumps(value, protocol)):
        metadata = opened(tmp_path, data).metadata
        assert metadata == {name: want for name, (_, want) in SCALARS.items()}
        assert [type(item) for item in metadata.values()] == [type(want) for _, want in SCALARS.values()]


@pytest.mark.parametrize("make", [zip_file, legacy_file])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("order", ["little", "big"])
def test_arrays_beside_tensors_of_torch(tmp_path, make, protocol, order):
    if make is legacy_file and order == "big":
        pytest.skip("legacy files have one order")
    weights = np.arange(4, dtype=np.float32)
    # Python's own pickler, which writes the storages here, fails on two empty arrays at protocol 5.
    arrays = {name: item for name, item in NESTED.items() if not name.startswith("empty")}
    value = {"first": ARRAYS["f"], "w": tensor(Storage("0", weights)), **arrays, "epoch": np.int64(3)}
    options = {"order": order} if make is zip_file else {}
    path = tmp_path / "made.pt"
    path.write_bytes(make(value, protocol=protocol, **options))
    with safeload.open(path) as checkpoint:
        check(checkpoint, {"first": ARRAYS["f"], "w": weights, **dict(flat(arrays))})
        assert checkpoint.metadata == {"epoch": 3}
        assert checkpoint.files == [str(path)]
    if make is zip_file:
        entries = zip_entries(value, protocol=protocol, order=order)
        path.write_bytes(zip_archive(entries, deflate=["data.pkl"]))
        check(safeload.open(path), {"first": ARRAYS["f"], "w": weights, **dict(flat(arrays))})


def test_arrays_in_a_folder_s_file(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(zip_file({"w": tensor(Storage("0", np.ones(2))), "a": np.zeros(3)}))
    checkpoint = safeload.open(tmp_path)
    assert {name: array.tolist() for name, array in checkpoint.items()} == {"w": [1, 1], "a": [0, 0, 0]}
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}')
    assert list(safeload.open(tmp_path / "pytorch_model.bin.index.json")) == ["a"]


def test_bytes_that_are_in_the_file_are_not_copied(tmp_path):
    array = np.arange(1000, dtype=np.float64)
    data = pickle.dumps({"a": array, "b": np.arange(3, dtype=">i2")}, 4)
    checkpoint = opened(tmp_path, data)
    assert checkpoint.tensors["a"].offset == data.index(array.tobytes())
    assert len(checkpoint.weight_files) == 2  # the other order lies in a temporary file
    assert len(opened(tmp_path, pickle.dumps({"a": array}, 4)).weight_files) == 1


@pytest.mark.skipif(os.name == "nt", reason="every file of Windows has a name")
def test_the_temporary_file_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    checkpoint = opened(tmp_path, pickle.dumps({"a": np.arange(256.0)}, 2))
    assert list((tmp_path / "temporary").iterdir()) == []
    assert checkpoint["a"][255] == 255


def test_one_array_under_many_names_is_one(tmp_path):
    array = np.arange(1000.0)
    for protocol in (2, 4, 5):
        checkpoint = opened(tmp_path, pickle.dumps({"a": array, "b": array, "c": [array]}, protocol))
        checkpoint["a"][0] = 9
        assert checkpoint["b"][0] == checkpoint["c.0"][0] == 9


def test_what_python_2_wrote(tmp_path):
    """Bytes are a str there; those of ASCII could as well be text."""
    for values in ([1.5, -2.0], np.frombuffer(b"abcdefgh" * 2).tolist()):
        array = np.array(values)
        data = (
            b"\x80\x02}q\x00U\x01wq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b"
            b"\x87Rq\x04(K\x01K\x02\x85cnumpy\ndtype\nq\x05U\x02f8K\x00K\x01\x87Rq\x06(K\x03U\x01<NNNJ\xff\xff\xff\xff"
            b"J\xff\xff\xff\xffK\x00tb\x89U\x10" + array.tobytes() + b"tbs."
        )
        assert pickle.loads(data, encoding="latin1")["w"].tolist() == values
        check(opened(tmp_path, data), {"w": array})


# ---- what is refused ----


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.array([1, None]), "Python objects"),
        (np.zeros(2, [("a", "i4")]), "elements of several fields"),
        (np.array(["text"]), "U4"),
        (np.array([b"text"]), "S4"),
        (np.array(["2020-01-01"], "M8[D]"), "M8"),
        (np.zeros(2, np.longdouble), "(<f16|float128)"),
        (np.zeros(2, "V3"), "V3"),
        (np.zeros(2, ml_dtypes.int4), "int4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_arrays_that_are_no_weights(tmp_path, value, what, protocol):
    data = pickle.dumps({"a": value, "w": np.ones(2)}, protocol)
    with opened(tmp_path, data) as file:
        np.testing.assert_array_equal(file["w"], np.ones(2))
        assert file.tensors["a"].shape == value.shape
        with pytest.raises(UnsupportedError, match=rf"tensor 'a': {what}.* is not a dtype of weights"):
            file.load()
    names, notes = opened(tmp_path, data, unknown_globals="inert"), value.dtype.kind in "OSU"
    assert list(names) == (["w"] if notes else ["a", "w"])
    assert bool(names.notes) == notes


def test_a_pickle_without_arrays(tmp_path):
    for value in ({"a": 1}, {}, 5, [], None, {"n": np.float64(1)}):
        for protocol in (2, 4):
            for kept in ("refuse", "inert"):
                with pytest.raises(UnsupportedError, match=r"a pickle that torch\.save did not write"):
                    opened(tmp_path, pickle.dumps(value, protocol), unknown_globals=kept)


def test_an_option_is_advised_only_where_it_helps(tmp_path):
    model = Ref("sklearn.linear_model._base", "LinearRegression")
    with_weights = dump(Call(model, state={"coef_": np.ones(3)}), 4)
    with pytest.raises(ForbiddenError, match=r"a scikit-learn model \(LinearRegression\), not .*inert"):
        opened(tmp_path, with_weights)
    assert list(opened(tmp_path, with_weights, unknown_globals="inert")) == ["<state>.coef_"]
    useless = (
        dump(Call(model, state={"k": 3}), 4),
        pickle.dumps(datetime.datetime(2020, 1, 1)),
        dump(Call(model, state={"coef_": np.ones(3)}), 4) + b"more",
        zip_file({"a": Call(Ref("os", "system"), "x")}),
        legacy_file({"a": Call(Ref("os", "system"), "x")}),
        zip_file({"a": Call(Ref("os", "system"), "x"), "b": tensor(Storage("0", np.ones(2)), (3,))}),
        dump({"w": np.ones(2), "x": Call(model)}, 2)[:-5],
    )
    for data in useless:
        with pytest.raises(ForbiddenError) as caught:
            opened(tmp_path, data)
        assert "inert" not in str(caught.value)
        with contextlib.suppress(SafeloadError):
            assert len(opened(tmp_path, data, unknown_globals="inert")) == 0


def test_joblib_is_named(tmp_path):
    wrapper = Call(Ref("joblib.numpy_pickle", "NumpyArrayWrapper"), state={"shape": (3,)})
    data = dump({"w": wrapper}, 4)
    for kept in ("refuse", "inert"):
        with pytest.raises(UnsupportedError, match="a joblib file"):
            opened(tmp_path, data[:-4] + bytes(24) + data[-4:], unknown_globals=kept)


def test_several_pickles_in_one_file(tmp_path):
    one = pickle.dumps({"w": np.ones(2)})
    with pytest.raises(UnsupportedError, match=rf"{len(one)} bytes follow the pickle, which ends at byte {len(one)}"):
        opened(tmp_path, one + one)


def test_the_format_may_be_insisted_on(tmp_path):
    data = pickle.dumps({"w": np.ones(2)})
    for other in ("torch", "torch legacy", "npz", "safetensors"):
        with pytest.raises(FormatError):
            opened(tmp_path, data, format=other)
    with pytest.raises(FormatError, match="not pickle"):
        opened(tmp_path, legacy_file({"w": tensor(Storage("0", np.ones(2)))}), format="pickle")


def test_many_arrays_over_one_buffer_take_its_memory_once(tmp_path):
    """5 bytes make another array of a megabyte: they share it, in the temporary file, too."""
    raw = bytes(range(256)) * 400
    for big in (b"<", b">"):
        body = (
            b"\x80\x04](\x8c\x13numpy._core.numeric\x8c\x0b_frombuffer\x93q\x01(\x96"
            + struct.pack("<Q", len(raw))
            + raw
            + b"cnumpy\ndtype\n(\x8c\x02f4\x89\x88tR(K\x03\x8c\x01"
            + big
            + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            + b"J"
            + struct.pack("<i", len(raw) // 4)
            + b"\x85\x8c\x01Ctq\x020"
            + b"h\x01h\x02R" * 3000
            + b"e."
        )
        body = body.replace(b"q\x01(\x96", b"q\x010(\x96")
        checkpoint = opened(tmp_path, body)
        assert len(checkpoint) == 3000
        file = checkpoint.weight_files[-1]
        assert file.size < 2 * len(body)


# ---- each structure with one fault ----

RECONSTRUCT = Ref("numpy._core.multiarray", "_reconstruct")
NDARRAY, DTYPE = Ref("numpy", "ndarray"), Ref("numpy", "dtype")
BUFFER, SCALAR = Ref("numpy._core.numeric", "_frombuffer"), Ref("numpy._core.multiarray", "scalar")
ENCODE = Ref("_codecs", "encode")
STATE_OF_DTYPE = (3, "<", None, None, None, -1, -1, 0)


def dtype(spec="f4", state=STATE_OF_DTYPE):
    return Call(DTYPE, spec, False, True, state=state)


def array(*state, args=(NDARRAY, (0,), b"b")):
    return Call(RECONSTRUCT, *args, state=state or None)


RAW = np.arange(6, dtype=np.float32).tobytes()
FAULTS = {
    "too few bytes": (array(1, (7,), dtype(), False, RAW), r"an array \[7\] of float32 needs 28 bytes, but has 24"),
    "too many bytes": (array(1, (5,), dtype(), False, RAW), "needs 20 bytes, but has 24"),
    "a negative axis": (array(1, (-6,), dtype(), False, RAW), "shape must be a tuple of counts"),
    "two negative axes": (array(1, (-2, -3), dtype(), False, RAW), "shape must be a tuple of counts"),
    "a product beyond 64 bits": (array(1, (2**62, 8), dtype(), False, RAW), "needs 147573952589676412928 bytes"),
    "a product that wraps to 6": (array(1, (2**63 - 1, 2, 3), dtype(), False, RAW), "needs "),
    "an axis of 2^64": (array(1, (2**64,), dtype(), False, b""), "shape must be a tuple of counts"),
    "a boolean axis": (array(1, (True, 6), dtype(), False, RAW), "shape must be a tuple of counts"),
    "65 axes": (array(1, (1,) * 65, dtype(), False, b"abcd"), "an array of 65 axes"),
    "empty with huge axes": (array(1, (0, 2**62), dtype(), False, b""), "need more bytes than any memory has"),
    "shape of text": (array(1, "6", dtype(), False, RAW), "shape must be a tuple of counts, got '6'"),
    "an order of text": (array(1, (6,), dtype(), "F", RAW), "order must be a boolean"),
    "text for bytes": (array(1, (6,), dtype(), False, 5), "elements must be bytes, got 5"),
    "objects for bytes": (array(1, (6,), dtype(), False, [1] * 6), "elements must be bytes, got list"),
    "no dtype": (array(1, (6,), "f4", False, RAW), "dtype must be a numpy dtype, got 'f4'"),
    "a state of 3": (array((6,), dtype(), RAW), "state must be a tuple of 4 or 5, got a tuple of 3"),
    "a state of 6": (array(1, (6,), dtype(), False, RAW, 0), "got a tuple of 6"),
    "a state that is none": (Call(RECONSTRUCT, NDARRAY, (0,), b"b", state={"a": 1}), "tuple of 4 or 5, got dict"),
    "no state": (array(), "no dtype is not a dtype"),
    "two arguments": (array(args=(NDARRAY, (0,))), "_reconstruct takes 3 arguments, got 2"),
    "another class": (array(args=(DTYPE, (0,), b"b")), "_reconstruct takes a class of arrays, got 'numpy.dtype'"),
    "dtype of nothing": (array(1, (6,), dtype(""), False, RAW), "'' is not a numpy dtype"),
    "dtype of code": (array(1, (6,), dtype("__import__('os')"), False, RAW), "is not a numpy dtype"),
    "dtype of many digits": (array(1, (6,), dtype("f" + "9" * 5000), False, RAW), "is not a numpy dtype"),
    "dtype of records": (array(1, (6,), dtype("f4,f4"), False, RAW), "'f4,f4' is not a numpy dtype"),
    "dtype of a list": (array(1, (6,), dtype([("a", "f4")]), False, RAW), "list is not a numpy dtype"),
    "dtype without arguments": (array(1, (6,), Call(DTYPE), False, RAW), "numpy.dtype takes 1 to 3 arguments, got 0"),
    "dtype with a short state": (array(1, (6,), dtype(state=(3, "<")), False, RAW), "dtype's state must be a tuple"),
    "dtype of no order": (array(1, (6,), dtype(state=(3, "?", *STATE_OF_DTYPE[2:])), False, RAW), "one of < > | ="),
    "a buffer of 3": (Call(BUFFER, bytearray(RAW), dtype(), (6,)), "_frombuffer takes 4 or 5 arguments, got 3"),
    "a buffer too short": (Call(BUFFER, bytearray(RAW), dtype(), (7,), "C"), "needs 28 bytes, but has 24"),
    "a buffer of order X": (Call(BUFFER, bytearray(RAW), dtype(), (6,), "X"), "order must be C, F or K, got 'X'"),
    "axes twice": (
        Call(BUFFER, bytearray(RAW), dtype(), (2, 3), "K", (0, 0)),
        "axes must list each of its 2 axes",
    ),
    "axes of text": (
        Call(BUFFER, bytearray(RAW), dtype(), (2, 3), "K", ("0", [])),
        "axes must list each of its 2 axes",
    ),
    "no axes": (Call(BUFFER, bytearray(RAW), dtype(), (2, 3), "K"), "axes must list each of its 2 axes"),
    "a scalar of 3 bytes": (Call(SCALAR, dtype(), b"abc"), "a scalar of float32 needs 4 bytes, got 3"),
    "a scalar of a list": (Call(SCALAR, dtype(), []), "needs 4 bytes, got list"),
    "a scalar without bytes": (Call(SCALAR, dtype()), "a numpy scalar takes a dtype and bytes"),
    "a scalar of text": (Call(SCALAR, "f4", b"abcd"), "a numpy scalar takes a dtype and bytes"),
    "another encoding": (Call(ENCODE, "abc", "rot13"), "takes a text and 'latin1'"),
    "an encoding of a list": (Call(ENCODE, "abc", []), "takes a text and 'latin1'"),
    "characters beyond 255": (Call(ENCODE, "\u0100", "latin1"), "characters beyond 255"),
    "bytes of a number": (Call(Ref("builtins", "bytes"), 1 << 40), "bytes takes no arguments"),
    "a dtype that is called": (Call(Ref("numpy", "float32"), 1), "'numpy.float32' cannot be called"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_each_fault_is_refused(tmp_path, case):
    value, message = FAULTS[case]
    good = np.ones(2)
    for protocol in (2, 4):
        pickled = {"good": good, "bad": value}
        for data in (
            dump(pickled, protocol),
            zip_file(pickled, protocol=protocol),
            legacy_file(pickled, protocol=protocol),
        ):
            with pytest.raises((FormatError, UnsupportedError), match=message) as caught:
                opened(tmp_path, data).load()
            assert "made.pkl" in str(caught.value)


def test_text_made_bytes_again_and_again_is_counted(tmp_path):
    data = b"\x80\x02](c_codecs\nencode\nq\x010X" + struct.pack("<I", 100_000) + b"a" * 100_000
    data += b"X\x06\0\0\0latin1\x86q\x020" + b"h\x01h\x02R" * 2000 + b"e."
    with pytest.raises(LimitError, match="copied values take"):
        opened(tmp_path, data)


SEEDS = [
    pickle.dumps({"a": np.arange(3.0), "s": np.float32(1), "o": [np.ones((2, 2), ">i2", order="F")]}, p)
    for p in (0, 2, 4, 5)
]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_one_byte_may_be_anything(tmp_path, seed):
    for k, at in enumerate(part_of(range(len(seed)), 0, 2)):
        for value in part_of([255, seed[at] ^ 1, ord("."), 0], k, 4):
            bent = seed[:at] + bytes((value,)) + seed[at + 1 :]
            with contextlib.suppress(SafeloadError), opened(tmp_path, bent, unknown_globals="inert") as checkpoint:
                checkpoint.load()


@pytest.mark.parametrize("seed", SEEDS)
def test_truncation_at_every_byte_is_refused(tmp_path, seed):
    for size in part_of(range(len(seed)), 0, 2):
        with pytest.raises(SafeloadError):
            opened(tmp_path, seed[:size])
