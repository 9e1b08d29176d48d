"""Keras files: what Keras wrote, layouts of HDF5 made by h5py, and files with a fault."""

import contextlib
import io
import json
import os
import pickle
import shutil
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builders.inside import keras, open_without_table
from builders.paths import ROOT
from builders.random import rng
from builders.remote import Served
from builders.thorough import part_of

import safeload
from safeload.errors import (
    FormatError,
    LimitError,
    MissingShardError,
    SafeloadError,
    TensorNotFoundError,
    UnsupportedError,
)

h5py = pytest.importorskip("h5py")

pytestmark = pytest.mark.no_core

# tests/data/keras/compare.sh lets Keras write all fixtures anew.
DATA = Path(os.environ.get("SAFELOAD_KERAS_FIXTURES") or ROOT / "tests" / "data" / "keras")
FILES = ["model.keras", "model.weights.h5", "sharded.weights.json", "legacy.h5", "legacy_weights.h5"]


def check_tensors(arrays, want):
    assert sorted(arrays) == sorted(want)
    for name, array in want.items():
        got = arrays[name]
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


def expected(name):
    """What Keras holds in memory, by the names of the file."""
    return safeload.load(DATA / f"{name}.safetensors")


@pytest.fixture(scope="module")
def executor():
    """Another process, which all tests share: it imports what it needs once."""
    with ProcessPoolExecutor(1) as executor:
        yield executor


# ---- what Keras wrote ----


@pytest.mark.parametrize("name", FILES)
def test_every_way_to_read_gives_what_keras_holds(name, executor, tmp_path):
    want = expected(name)
    assert want
    with safeload.open(DATA / name) as opened:
        assert opened.format == "keras"
        check_tensors(opened.load(), want)
        check_tensors(opened.load(backend="pread"), want)
        check_tensors(dict(opened.stream()), want)
        check_tensors(pickle.loads(pickle.dumps(opened)).load(), want)
        for tensor, array in want.items():
            if array.ndim == 2:
                assert (opened.get_slice(tensor)[1:, ::2] == array[1:, ::2]).all()
                assert (opened.take(tensor, [1, 0]) == array[[1, 0]]).all()
    safeload.convert(DATA / name, tmp_path / "out", max_shard_size=200, executor=executor)
    check_tensors(safeload.load(tmp_path / "out"), want)
    assert not safeload.check(DATA / name).errors


def test_metadata_has_the_config(tmp_path):
    with safeload.open(DATA / "model.keras") as opened:
        assert opened.metadata["config"]["class_name"] == "Functional"
        assert opened.metadata["keras_version"][0] == "3"
    with safeload.open(DATA / "legacy.h5") as opened:
        assert opened.metadata["model_config"]["class_name"] == "Functional"
        assert opened.metadata["backend"]
    with safeload.open(DATA / "sharded.weights.json") as opened:
        assert opened.metadata["total_size"] > 0
        assert opened.index == str(DATA / "sharded.weights.json")


@pytest.mark.parametrize("name", FILES)
def test_root_selects_a_container(name):
    tops = {tensor.partition(".")[0] for tensor in expected(name)}
    for top in tops:
        with safeload.open(DATA / name, root=top) as opened:
            below = {n.removeprefix(f"{top}."): a for n, a in expected(name).items() if n.startswith(f"{top}.")}
            check_tensors(opened.load(), below)
            check_tensors(pickle.loads(pickle.dumps(opened)).load(), below)
    with pytest.raises(TensorNotFoundError, match=r"no container 'nowhere'; containers: "):
        safeload.open(DATA / name, root="nowhere")


@pytest.mark.parametrize("name", FILES)
def test_it_opens_from_a_store_and_a_file_object(name):
    served = Served.folder(DATA)
    with safeload.open(served.at(f"mem://model/{name}")) as opened:
        check_tensors(opened.load(), expected(name))
    if not name.endswith("json"):
        check_tensors(safeload.load(io.BytesIO((DATA / name).read_bytes())), expected(name))


def test_a_folder_with_one_keras_file_opens(tmp_path):
    for name in ("model.keras", "legacy.h5"):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(DATA / name, folder / name)
        check_tensors(safeload.load(folder), expected(name))
    shutil.copy(DATA / "legacy.h5", tmp_path / "model.keras" / "a.h5")
    with pytest.raises(UnsupportedError, match=r"2 Keras files: a.h5, model.keras; open one of them"):
        safeload.open(tmp_path / "model.keras")
    for path in DATA.glob("sharded*"):
        if path.suffix != ".safetensors":
            (tmp_path / "sharded").mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / "sharded" / path.name)
    check_tensors(safeload.load(tmp_path / "sharded"), expected("sharded.weights.json"))


def test_contiguous_variables_are_views_of_the_file():
    for name in ("model.keras", "model.weights.h5"):
        with safeload.open(DATA / name) as opened:
            for tensor, info in opened.tensors.items():
                with (DATA / name).open("rb") as file:
                    file.seek(info.offset)
                    assert file.read(info.nbytes) == opened[tensor].tobytes()


def test_a_missing_shard_and_a_shard_without_its_variables_are_errors(tmp_path):
    for path in DATA.glob("sharded*"):
        shutil.copy(path, tmp_path / path.name)
    index = tmp_path / "sharded.weights.json"
    content = json.loads(index.read_text())
    group = next(iter(content["weight_map"]))
    changes = {
        "another group": (
            {**content["weight_map"], "/nowhere/vars": "sharded_00000.weights.h5"},
            "should have variables",
        ),
        "a path": ({**content["weight_map"], group: "../a.h5"}, "bare name"),
        "a number": ({**content["weight_map"], group: 3}, "must name a file"),
        "a list of numbers": ({**content["weight_map"], group: [3]}, "must name a file"),
        "nothing": ({}, "weight_map must be an object"),
        "a list": ([], "weight_map must be an object"),
    }
    for weight_map, says in changes.values():
        index.write_text(json.dumps({**content, "weight_map": weight_map}))
        with pytest.raises(FormatError, match=says):
            safeload.open(index)
    index.write_text(json.dumps(content))
    (tmp_path / "sharded_00001.weights.h5").unlink()
    with pytest.raises((FileNotFoundError, MissingShardError), match=r"sharded_00001"):
        safeload.open(index)


def test_without_h5py_it_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ModuleNotFoundError, match=r"need h5py, which is not installed: pip install h5py"):
        safeload.open(DATA / "legacy.h5")


# ---- layouts ----


def open_store(path):
    return contextlib.closing(open_without_table(path))


def write(path, make, **options):
    with h5py.File(path, "w", **options) as file:
        make(file)
    return path


def read_all(path):
    """What h5py gives."""
    arrays = {}

    def visit(name, item):
        if isinstance(item, h5py.Dataset):
            value = item[()]
            if item.attrs.get("dtype") == "bfloat16":
                value = np.asarray(value).view(ml_dtypes.bfloat16)
            array = np.asarray(value)
            arrays[name.replace("/", ".")] = array.astype(array.dtype.newbyteorder("<"))

    with h5py.File(path) as file:
        file.visititems(visit)
    return arrays


DTYPES = ["<f4", ">f4", "<f2", "<f8", ">f8", "<i4", ">i2", "|i1", "|u1", "<u8", "?", "<c8", ">c8"]


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_datasets_of_every_dtype_are_those_of_h5py(libver, executor, tmp_path):
    def make(file):
        for dtype in DTYPES:
            values = rng.integers(0, 2 if dtype == "?" else 100, (7, 9)).astype(dtype)
            file[f"layers/{dtype[0] == '>'}_{dtype[1:]}/vars"] = values

    path = write(tmp_path / "m.h5", make, libver=libver)
    want = read_all(path)
    with safeload.open(path) as opened:
        check_tensors(opened.load(), want)
        check_tensors(dict(opened.stream()), want)
        for name, array in want.items():
            assert (opened.get_slice(name)[2:6, 3:8:2] == array[2:6, 3:8:2]).all()
            assert (opened.take(name, [6, 0, 3]) == array[[6, 0, 3]]).all()
        check_tensors(pickle.loads(pickle.dumps(opened)).load(), want)
    safeload.convert(path, tmp_path / "out", max_shard_size=300, executor=executor)
    check_tensors(safeload.load(tmp_path / "out"), want)


def test_scalar_and_empty_datasets_come_back(tmp_path):
    def make(file):
        for dtype in DTYPES:
            file[f"a/{dtype[0] == '>'}{dtype[1:]}"] = rng.integers(0, 2, (3, 2)).astype(dtype)
            file[f"s/{dtype[0] == '>'}{dtype[1:]}"] = np.array(1, dtype)
        file["bf16"] = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
        file["bf16"].attrs["dtype"] = "bfloat16"
        file["empty"] = np.zeros((0, 4), "f4")
        file["tied"] = file["a/Falsef4"]
        file.create_group("nothing/below")

    path = write(tmp_path / "m.h5", make)
    want = read_all(path)  # without the second name of a dataset
    check_tensors(safeload.load(path), {**want, "tied": want["a.Falsef4"]})


def test_a_slice_reads_only_its_bytes(tmp_path):
    values = rng.standard_normal((512, 512)).astype("f4")
    path = write(tmp_path / "m.h5", lambda file: file.create_dataset("plain", data=values))
    served = Served({"mem://m.h5": path.read_bytes()})
    with safeload.open(served.at("mem://m.h5")) as opened:
        served.requests.clear()
        assert opened.get_slice("plain")[300, 130:140].tolist() == values[300, 130:140].tolist()
        assert 0 < sum(end - begin for _, begin, end in served.requests) <= 4096


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_may_be_compressed(compression, tmp_path):
    def make(file):
        file["layers/a/vars/0"] = np.arange(6, dtype="f4")
        file["layers/b/vars/0"] = np.eye(6)

    inner = write(tmp_path / "m.h5", make)
    path = tmp_path / "m.keras"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("metadata.json", '{"keras_version": "3"}')
        archive.writestr("config.json", '{"class_name": "A", "config": {}}')
        archive.write(inner, "model.weights.h5")
        archive.writestr("assets/vocabulary.txt", "a")
    with safeload.open(path) as opened:
        assert opened.notes == ["not read: assets/vocabulary.txt"]
        assert opened.metadata == {"keras_version": "3", "config": {"class_name": "A", "config": {}}}
        check_tensors(opened.load(), read_all(inner))
        check_tensors(pickle.loads(pickle.dumps(opened)).load(), read_all(inner))
    safeload.convert(path, tmp_path / "o.safetensors")
    check_tensors(safeload.load(tmp_path / "o.safetensors"), read_all(inner))
    assert not safeload.check(path).errors
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo("model.weights.h5")
    content[entry.header_offset + 30 + len(entry.filename) + entry.compress_size // 2] ^= 1
    path.write_bytes(content)
    assert safeload.check(path).errors, "the archive's checksum"


def test_an_archive_without_hdf5_weights_is_refused(tmp_path):
    path = tmp_path / "m.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.npz", b"")
    with pytest.raises(UnsupportedError, match=r"npz of pickled dicts"):
        safeload.open(path)


def test_listed_weights_come_first_and_must_exist(tmp_path):
    def make(file, listed=(b"z/kernel:0", b"b/bias:0")):
        group = file.create_group("model_weights")
        group.attrs["layer_names"] = [b"z"]
        layer = group.create_group("z")
        for name in (b"z/kernel:0", b"b/bias:0"):
            layer[name] = np.zeros(2, "f4")
        layer.attrs["weight_names0"] = [listed[0]]
        layer.attrs["weight_names1"] = list(listed[1:])

    path = write(tmp_path / "m.h5", make)
    names = ["model_weights.z.z.kernel:0", "model_weights.z.b.bias:0"]
    with safeload.open(path) as opened:
        assert list(opened) == names
    for missing in ((b"z/kernel:0", b"b/other"), (b"y/kernel:0", b"b/bias:0"), (b"z/kernel:0/more", b"b/bias:0")):
        path = write(tmp_path / "m.h5", lambda file, missing=missing: make(file, missing))
        with pytest.raises(FormatError, match=r"weight_names lists b'"):
            safeload.open(path)


# ---- faults ----


def external_link(file):
    file["link"] = h5py.ExternalLink("/etc/passwd", "/x")


def soft_link(file):
    file["link"] = h5py.SoftLink("/a")


def dangling(file):
    file["link"] = h5py.SoftLink("/nowhere")


def cycle(file):
    group = file.create_group("g/h")
    group["back"] = file["g"]


def root_cycle(file):
    file.create_group("g")["back"] = file["/"]


def diamond(file):
    file.create_group("g")
    file["h"] = file["g"]


def external_storage(file):
    file.create_dataset("x", (4,), "f4", external=[("/etc/passwd", 0, 16)])


def virtual(file):
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "x", (4,))
    file.create_virtual_dataset("x", layout)


def chunked(**options):
    return lambda file: file.create_dataset("x", data=np.zeros((8, 8), "i4"), chunks=(4, 4), **options)


def compact(file):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I32LE, h5py.h5s.create_simple((3,)), plist)


def never_written(file):
    file.create_dataset("x", (1000, 1000), "f4")


def huge(file):
    file.create_dataset("x", (1 << 40, 1 << 21), "f4")


def opaque(size):
    def make(file):
        file["x"] = np.zeros(3, np.dtype((np.void, size)))

    return make


def float8(file):
    file["x"] = np.zeros(3, ml_dtypes.float8_e4m3fn)


def marked(dtype, mark):
    def make(file):
        file["x"] = np.zeros(3, dtype)
        file["x"].attrs["dtype"] = mark

    return make


def of_dtype(dtype, shape=(3,)):
    return lambda file: file.create_dataset("x", shape, dtype)


def reference(file):
    file["y"] = np.zeros(2)
    file.create_dataset("x", data=np.array([file["y"].ref], dtype=h5py.ref_dtype))


def text(file):
    file["x"] = "text"


def texts(file):
    file["x"] = np.array([b"ab", b"c"])


def unusual_float(file):
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_ebias(100)
    h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((3,)))


def unusual_integer(file):
    kind = h5py.h5t.STD_I32LE.copy()
    kind.set_precision(20)
    h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((3,)))


def deep(file):
    group = file
    for _ in range(70):
        group = group.create_group("g")
    group["x"] = np.zeros(1)


def two_names(file):
    file["a.b"] = np.zeros(1)
    file["a/b"] = np.zeros(1)


def long_path(file):
    file["/".join(["a" * 900] * 5)] = np.zeros(1)


FAULTS = {
    "an external link": (external_link, UnsupportedError, "a link to another file is not followed"),
    "a soft link": (soft_link, UnsupportedError, "a soft link is not followed"),
    "a dangling link": (dangling, UnsupportedError, "a soft link is not followed"),
    "a cycle": (cycle, UnsupportedError, "is a group that is linked twice"),
    "a cycle to the root": (root_cycle, UnsupportedError, "linked twice"),
    "a diamond": (diamond, UnsupportedError, "linked twice"),
    "external storage": (external_storage, UnsupportedError, "is stored in another file"),
    "a virtual dataset": (virtual, UnsupportedError, "is virtual"),
    "chunks": (chunked(), UnsupportedError, "stored in chunks"),
    "gzip": (chunked(compression="gzip", shuffle=True, fletcher32=True), UnsupportedError, "stored in chunks"),
    "lzf": (chunked(compression="lzf"), UnsupportedError, "stored in chunks"),
    "empty chunks": (lambda file: file.create_dataset("x", (0, 4), "f4", chunks=(2, 2), maxshape=(None, 4)),
                     UnsupportedError, "stored in chunks"),
    "in a header": (compact, UnsupportedError, "in an object's header"),
    "never written": (never_written, UnsupportedError, "was never written"),
    "huge": (huge, UnsupportedError, "bytes than any memory"),
    "opaque 2": (opaque(2), UnsupportedError, "opaque data of 2 bytes, dtype None, has unknown values"),
    "opaque 3": (opaque(3), UnsupportedError, "is opaque"),
    "float8": (float8, UnsupportedError, "opaque data of 1 bytes"),
    "opaque 1 marked": (marked("V1", "bfloat16"), UnsupportedError, "is opaque"),
    "opaque 2 of another mark": (marked("V2", "float16"), UnsupportedError, "is opaque"),
    "f4 marked as bfloat16": (marked("f4", "bfloat16"), UnsupportedError, "is F32, but its attribute says bfloat16"),
    "a compound": (of_dtype([("a", "f4"), ("b", "i4")]), UnsupportedError, "is a compound"),
    "an array type": (of_dtype(np.dtype(("f4", (2,)))), UnsupportedError, "is an array type"),
    "an enumeration": (of_dtype(h5py.enum_dtype({"A": 0, "B": 1}, "i1")), UnsupportedError, "is an enumeration"),
    "a long enumeration": (
        of_dtype(h5py.enum_dtype({"FALSE": 0, "TRUE": 1, "X": 2}, "i1")), UnsupportedError, "is an enumeration"),
    "a wide boolean": (of_dtype(h5py.enum_dtype({"FALSE": 0, "TRUE": 1}, "i4")), UnsupportedError, "is an enumeration"),
    "variable length": (of_dtype(h5py.vlen_dtype("f4")), UnsupportedError, "is of variable length"),
    "a reference": (reference, UnsupportedError, "is a reference"),
    "text": (text, UnsupportedError, "is text"),
    "texts": (texts, UnsupportedError, "is text"),
    "a null dataspace": (lambda file: file.__setitem__("x", h5py.Empty("f4")), UnsupportedError, "has no shape"),
    "an unusual float": (unusual_float, UnsupportedError, "is an unusual float"),
    "an unusual integer": (unusual_integer, UnsupportedError, "is an unusual integer"),
    "f16": (of_dtype("g"), UnsupportedError, "is an unusual float"),
    "deep groups": (deep, LimitError, "nested more than 64 deep"),
    "two names": (two_names, FormatError, "two datasets are named 'a.b'"),
    "a long path": (long_path, LimitError, "longer than 4,096"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_name(fault, tmp_path, monkeypatch):
    make, error, says = FAULTS[fault]
    path = write(tmp_path / "m.h5", make)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=says.removeprefix("is ")) as caught:
        safeload.load(path)
    assert caught.value.path == str(path)


def test_objects_have_a_limit(tmp_path, monkeypatch):
    def make(file):
        for k in range(8):
            file[f"x{k}"] = np.zeros(1)
        file.attrs["layer_names"] = [b"x%d" % k for k in range(8)]

    path = write(tmp_path / "m.h5", make)
    monkeypatch.setattr(keras, "MAX_OBJECTS", 5)
    with pytest.raises(LimitError, match=r"more than"):
        safeload.open(path)


def test_texts_of_attributes_are_those_of_h5py(tmp_path):
    values = {
        "backend": "jax",
        "keras_version": np.bytes_("3.15.1"),
        "model_config": json.dumps({"a": "x" * 40_000}),
        "training_config": "schräg",
    }
    for libver in ("earliest", "v108", "latest"):
        for count in (1, 3, 300):
            names = [f"layer_{k}".encode() for k in range(count)]

            def make(file, names=names):
                for key, value in values.items():
                    file.attrs[key] = value
                for name in names:
                    file.create_group(name)
                file.attrs["layer_names"] = names[::-1]
                file["bf"] = np.arange(3).astype(ml_dtypes.bfloat16)
                for key, value in values.items():
                    file["bf"].attrs[key] = value[:10]
                file["bf"].attrs["dtype"] = "bfloat16"

            path = write(tmp_path / "m.h5", make, libver=libver)
            with h5py.File(path) as file, open_store(path) as opened:
                texts = keras.texts_of(opened, h5py.h5o.get_info(file.id).addr, keras._GROUP_TEXTS)
                for key, value in values.items():
                    assert texts[key].decode() == (value if isinstance(value, str) else value.decode())
                assert texts["layer_names"] == names[::-1]
            with safeload.open(path) as checkpoint:
                assert checkpoint["bf"].dtype == ml_dtypes.bfloat16
                assert checkpoint.metadata["model_config"]["a"] == "x" * 40_000


def bent_attribute(tmp_path, offset, content):
    """A file whose only text in a heap has a bent reference: length, heap, index."""

    def make(file):
        file["x"] = np.arange(3).astype(ml_dtypes.bfloat16)
        file["x"].attrs["dtype"] = "bfloat16"

    path = write(tmp_path / "m.h5", make)
    data = bytearray(path.read_bytes())
    at = data.index(b"\x08\0\0\0" + data.index(b"GCOL").to_bytes(8, "little"))
    data[at + offset : at + offset + len(content)] = content
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("offset", "content", "error", "says"),
    [
        (0, b"\xff\xff\xff\xff", LimitError, "has more than 67,108,864 bytes"),
        (0, b"\x40", FormatError, "a text that is not in its heap"),
        (4, b"\xff" * 8, FormatError, "global heap of HDF5 is malformed"),
        (4, b"\0" * 8, FormatError, "global heap of HDF5 is malformed"),
        (12, b"\7", FormatError, "a text that is not in its heap"),
        (0, b"\7", UnsupportedError, "opaque data of 2 bytes"),
    ],
    ids=["large", "other", "nowhere", "null", "no object", "short"],
)
def test_a_bent_reference_to_a_text_is_refused(offset, content, error, says, tmp_path):
    with pytest.raises(error, match=says):
        safeload.load(bent_attribute(tmp_path, offset, content))


def test_a_heap_that_makes_libhdf5_loop_is_refused(tmp_path):
    def make(file):
        file.attrs["backend"] = "jax"
        file["x"] = np.zeros(2)

    for size in (0, 8, 15):
        path = write(tmp_path / "m.h5", make)
        content = bytearray(path.read_bytes())
        heap = content.index(b"GCOL")
        content[heap + 16 : heap + 18] = b"\0\0"  # free space
        content[heap + 24 : heap + 32] = size.to_bytes(8, "little")
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"the attribute 'backend' has a text that is not in its heap"):
            safeload.open(path)


@pytest.mark.parametrize("options", [{"userblock_size": 512}, {"track_order": True}])
def test_unusual_files_are_refused_or_read(options, tmp_path):
    def make(file):
        file["z"], file["a"] = np.ones(2), np.zeros(2)

    path = write(tmp_path / "m.h5", make, **options)
    if "userblock_size" in options:
        with pytest.raises(SafeloadError):
            safeload.open(path)
    else:
        check_tensors(safeload.load(path), read_all(path))
    plist = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    plist.set_sizes(4, 4)
    h5py.h5f.create(str(path).encode(), fcpl=plist).close()
    with pytest.raises(UnsupportedError, match=r"addresses of another size"):
        safeload.open(path)


@pytest.mark.parametrize("name", ["model.keras", "legacy.h5"])
def test_a_file_cut_anywhere_is_an_error(name, tmp_path):
    content = (DATA / name).read_bytes()
    path = tmp_path / name
    for size in part_of(list(range(0, len(content), 101)), 0, 8):
        path.write_bytes(content[:size])
        with pytest.raises(SafeloadError):
            safeload.load(path)


def test_bytes_changed_anywhere_never_crash(tmp_path):
    content = (DATA / "legacy.h5").read_bytes()
    path = tmp_path / "legacy.h5"
    for at in part_of(list(range(8, len(content), 7)), 0, 384):
        for value in (0, 0xFF):
            changed = bytearray(content)
            changed[at] = value
            path.write_bytes(changed)
            try:
                with safeload.open(path) as opened:
                    opened.load()
            except SafeloadError:
                pass
