"""Files that another program wrote again: zipped torch checkpoints, tensors in pickles, dicts in npy files."""

import io
import pickle
import zipfile

import numpy as np
import pytest
from builders.torch_build import Call, Ref, Storage, legacy_file, tensor, zip_archive, zip_entries

import safeload
from safeload import ForbiddenError, FormatError, SafeloadError, UnsupportedError, gguf

pytestmark = pytest.mark.no_core

LOAD = Ref("torch.storage", "_load_from_bytes")
W = np.arange(12, dtype=np.float32).reshape(3, 4)


# ---- torch checkpoints, zipped again ----


def zipped(entries, method=zipfile.ZIP_DEFLATED, top="model/", more=()):
    """An archive as a zip program writes it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name in more:
            archive.writestr(name, b"x" * 100)
        for name, data in entries.items():
            archive.writestr(top + name, data)
    return out.getvalue()


def entries(order="little"):
    shared = Storage("0", W)
    value = {"w": tensor(shared, W.shape), "t": tensor(shared, (4, 3), (1, 4)), "v": tensor(shared, (2,), (4,), 1)}
    return zip_entries({**value, "n": np.arange(3), "step": 5}, order=order)


def expect(file):
    assert file["w"].tolist() == W.tolist()
    assert file["t"].tolist() == W.T.tolist()
    assert file["v"].tolist() == [1, 5]
    assert file["n"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("more", [(), ("model/",), ("__MACOSX/._x", ".DS_Store")])
def test_a_deflated_checkpoint_is_unpacked(tmp_path, more, order):
    path = tmp_path / "m.pt"
    path.write_bytes(zipped(entries(order), more=more))
    expect(safeload.load(path))
    expect(safeload.load(path, dtype="float32"))
    with safeload.open(path) as file:
        expect(file)
        expect(dict(file.stream()))
        assert file.get_slice("w")[1:2].tolist() == W[1:2].tolist()
        assert file.files == [str(path)]
        assert file.metadata["step"] == 5
        expect(file.__copy__())
    assert not safeload.check(path).errors
    assert safeload.stats(path, only="w")["w"].max == 11


def test_a_deflated_checkpoint_converts_and_shards(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(zipped(entries()))
    safeload.convert(tmp_path, tmp_path / "out.safetensors")
    expect(safeload.load(tmp_path / "out.safetensors"))


@pytest.mark.parametrize("some", ["data/0", "data.pkl", "byteorder"])
def test_a_checkpoint_can_be_deflated_in_part(tmp_path, some):
    path = tmp_path / "m.pt"
    path.write_bytes(zip_archive(entries(), deflate=(some,)))
    expect(safeload.load(path))


def test_a_changed_byte_in_a_deflated_checkpoint_is_found(tmp_path):
    content = bytearray(zipped(entries()))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        at = archive.getinfo("model/data/0").header_offset + 30 + len("model/data/0")
    content[at + 8] ^= 1
    (tmp_path / "m.pt").write_bytes(content)
    assert safeload.check(tmp_path / "m.pt").errors


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_named(tmp_path, method):
    (tmp_path / "m.pt").write_bytes(zipped(entries(), method))
    with pytest.raises(UnsupportedError, match="unsupported compression method"):
        safeload.open(tmp_path / "m.pt")


def test_a_bomb_is_refused_before_it_is_inflated(tmp_path):
    content = bytearray(zipped(entries()))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        begin = archive.start_dir
    at = content.index(b"model/data/0", begin) - 46
    content[at + 24 : at + 28] = (1 << 31).to_bytes(4, "little")
    (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(FormatError):
        safeload.open(tmp_path / "m.pt")


# ---- tensors in plain pickles ----


def pickled(array, shape=None, strides=None, offset=0, **lies):
    """A tensor as pickle.dump writes it: its storage is a torch file in the pickle."""
    storage = Storage("7", array)
    inner = legacy_file(storage, **lies)
    made = tensor(storage, array.shape if shape is None else shape, strides, offset)
    return Call(made.function, Call(LOAD, inner), *made.args[1:])


def dump(value, protocol=4):
    from builders.torch_build import dump as dumped

    return dumped(value, protocol)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_of_pickle_dump_are_read(tmp_path, protocol):
    path = tmp_path / "x.pkl"
    value = {"w": pickled(W), "t": [pickled(W, (4, 3), (1, 4)), pickled(W, (2,), (4,), 1)], "n": W, "step": 5}
    path.write_bytes(dump(value, protocol))
    loaded = safeload.load(path)
    assert loaded["w"].tolist() == loaded["n"].tolist() == W.tolist()
    assert loaded["t.0"].tolist() == W.T.tolist()
    assert loaded["t.1"].tolist() == [1, 5]
    assert not safeload.check(path).errors
    safeload.convert(path, tmp_path / "out.safetensors")
    assert safeload.load(tmp_path / "out.safetensors")["t.0"].tolist() == W.T.tolist()


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "int8", "uint8", "bool", "complex64"])
def test_every_dtype_of_pickle_dump(tmp_path, dtype):
    array = np.array([0, 1, 1], dtype)
    (tmp_path / "x.pkl").write_bytes(dump({"w": pickled(array)}))
    loaded = safeload.load(tmp_path / "x.pkl")["w"]
    assert (loaded.dtype, loaded.tolist()) == (array.dtype, array.tolist())


FAULTS = {
    "no torch file": Call(LOAD, b"not torch"),
    "no bytes": Call(LOAD, "text"),
    "no storage": Call(LOAD, legacy_file({"w": 1})),
    "a tensor": Call(LOAD, legacy_file(tensor(Storage("7", W)))),
    "cut": Call(LOAD, legacy_file(Storage("7", W))[:-4]),
    "code": Call(LOAD, pickle.dumps(print)),
    "nested": Call(LOAD, dump({"w": pickled(W)})),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_storage_is_named(tmp_path, name):
    (tmp_path / "x.pkl").write_bytes(
        dump({"w": Call(tensor(Storage("7", W)).function, FAULTS[name], 0, (1,), (1,), False, None)})
    )
    with pytest.raises((FormatError, UnsupportedError), match="pickle"):
        safeload.open(tmp_path / "x.pkl")


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    (tmp_path / "x.pkl").write_bytes(dump({"w": pickled(W, (13,), (1,))}))
    with pytest.raises(FormatError, match=r"tensor 'w'.*52 bytes of storage '7', which has 48"):
        safeload.open(tmp_path / "x.pkl")


def test_the_same_bytes_again_and_again_are_limited(tmp_path):
    inner = legacy_file(Storage("7", np.zeros(50_000, np.float32)))
    value = [Call(LOAD, inner) for _ in range(1000)]
    (tmp_path / "x.pkl").write_bytes(dump(value))
    with pytest.raises(SafeloadError):
        safeload.open(tmp_path / "x.pkl")


def test_scan_still_warns_of_the_pickle_in_the_bytes(tmp_path):
    (tmp_path / "x.pkl").write_bytes(dump({"w": pickled(W)}))
    assert "unknown" in str(safeload.scan(tmp_path / "x.pkl").to_dict())


def test_a_pickle_out_of_a_checkpoint_says_so(tmp_path):
    (tmp_path / "data.pkl").write_bytes(dump({"w": tensor(Storage("0", W))}, 2))
    with pytest.raises(SafeloadError, match="extracted from a torch checkpoint"):
        safeload.open(tmp_path / "data.pkl")


# ---- arrays of objects ----


@pytest.mark.parametrize("protocol", ["dict", "nested", "list", "array", "tensor", "fortran"])
def test_arrays_in_an_npy_file_of_objects_are_read(tmp_path, protocol):
    ragged = np.empty(2, object)
    ragged[:] = [W, W[0]]
    values = {
        "dict": ({"a": W}, {"a": W}),
        "nested": ({"conv1": {"kernel": W, "bias": W[0]}, "epoch": 3}, {"conv1.kernel": W, "conv1.bias": W[0]}),
        "list": ([W, {"a": W[0]}], {"0": W, "1.a": W[0]}),
        "array": (ragged, {"0": W, "1": W[0]}),
        "tensor": ({"a": W.astype(">f4")}, {"a": W}),
        "fortran": ({"a": np.asfortranarray(W)}, {"a": W}),
    }
    value, expected = values[protocol]
    boxed = value
    if not isinstance(value, np.ndarray):
        boxed = np.empty((), object)
        boxed[()] = value
    path = tmp_path / "x.npy"
    np.save(path, boxed, allow_pickle=True)
    loaded = safeload.load(path)
    assert {name: array.tolist() for name, array in loaded.items()} == {n: a.tolist() for n, a in expected.items()}
    assert not safeload.check(path).errors
    safeload.convert(path, tmp_path / "out.safetensors")
    assert safeload.load(tmp_path / "out.safetensors").keys() == expected.keys()


def test_code_in_an_npy_file_is_refused(tmp_path):
    boxed = np.empty((), object)
    boxed[()] = {"a": W, "f": print}
    np.save(tmp_path / "x.npy", boxed, allow_pickle=True)
    with pytest.raises(ForbiddenError, match=r"builtins\.print"):
        safeload.open(tmp_path / "x.npy")
    assert safeload.load(tmp_path / "x.npy", unknown_globals="inert")["a"].tolist() == W.tolist()


def test_bytes_after_the_objects_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.array([W, None], object), allow_pickle=True)
    with open(tmp_path / "x.npy", "ab") as file:
        file.write(b"more")
    with pytest.raises(UnsupportedError, match="4 bytes follow the pickle"):
        safeload.open(tmp_path / "x.npy")


# ---- Paddle ----

TUPLE = Ref("builtins", "tuple")


def test_tensors_of_a_plain_dict_of_paddle_have_the_names_of_their_keys(tmp_path):
    value = {"w": Call(TUPLE, ("linear_0.w_0", W)), "inner": {"b": [Call(TUPLE, ("linear_0.b_0", W[0]))]}, "step": 3}
    (tmp_path / "x.pdparams").write_bytes(dump(value))
    loaded = safeload.load(tmp_path / "x.pdparams")
    assert {name: array.tolist() for name, array in loaded.items()} == {"w": W.tolist(), "inner.b.0": W[0].tolist()}
    assert safeload.open(tmp_path / "x.pdparams").metadata["step"] == 3


def test_a_dict_that_holds_itself_ends(tmp_path):
    value = {"w": W}
    value["again"] = value
    (tmp_path / "x.pdparams").write_bytes(pickle.dumps(value))
    assert "w" in safeload.load(tmp_path / "x.pdparams")


# ---- llamafiles that are zip archives ----


def test_a_zip_archive_with_a_model_opens_as_the_model(tmp_path):
    gguf.save_file({"w": W}, tmp_path / "m.gguf", {"general.architecture": "llama"})
    content = (tmp_path / "m.gguf").read_bytes()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(".args", "-m\nm.gguf\n")
        archive.writestr("m.gguf", content)
    for name in ("x.llamafile", "x.zip"):
        (tmp_path / name).write_bytes(out.getvalue())
        with safeload.open(tmp_path / name) as file:
            assert file.format == "gguf"
            assert file["w"].tolist() == W.tolist()
            assert file.metadata["general.architecture"] == "llama"
    with zipfile.ZipFile(tmp_path / "y.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m.gguf", content)
    with pytest.raises(UnsupportedError, match="extract it with unzip"):
        safeload.open(tmp_path / "y.zip")
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("a.gguf", content)
        archive.writestr("b.gguf", content)
    with pytest.raises(UnsupportedError, match="2 GGUF files"):
        safeload.open(tmp_path / "z.zip")
