"""An entry that cannot be read is listed and refused by name; it never closes the file, whatever the format."""

import io
import json
import pickle
import struct
import zipfile

import numpy as np
import pytest
from builders.inside import main
from builders.torch_build import Call, Ref, Storage, zip_file
from builders.torch_build import tensor as torch_tensor

import safeload
from safeload import UnsupportedError

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]
W = np.arange(6, dtype=np.float32)


def message(number, payload):
    payload = payload if isinstance(payload, bytes) else payload.encode()
    return bytes([number << 3 | 2, len(payload)]) + payload


def number(field, value):
    return bytes([field << 3, value])


def onnx_of(kind, count, *fields, sparse=False):
    odd = number(1, count) + number(2, kind) + message(8, "odd") + b"".join(fields)
    odd = message(15, message(1, odd) + number(3, 2) + number(3, 4)) if sparse else message(5, odd)
    whole = number(1, 6) + number(2, 1) + message(8, "w") + message(9, W.tobytes())
    graph = message(5, whole) + odd + message(2, "g")
    return number(1, 8) + message(7, graph) + message(8, message(1, "") + number(2, 17))


def npz(odd, save=np.savez):
    def write(path):
        save(path, w=W, odd=odd)
        return path

    return write


def pickled(odd, protocol=4):
    def write(path):
        path.write_bytes(pickle.dumps({"w": W, "odd": odd}, protocol))
        return path

    return write


def onnx(*arguments, **options):
    def write(path):
        path.write_bytes(onnx_of(*arguments, **options))
        return path

    return write


def hdf5(make):
    def write(path):
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            file["w"] = W
            make(h5py, file)
        return path

    return write


def torch_file(make, **options):
    def write(path):
        torch = pytest.importorskip("torch")
        torch.save({"w": torch.from_numpy(W.copy()), "odd": make(torch)}, path, **options)
        return path

    return write


def dcp(make):
    def write(path):
        torch = pytest.importorskip("torch")
        import torch.distributed.checkpoint as checkpoint

        state = {"w": torch.from_numpy(W.copy()), "odd": make(torch)}
        checkpoint.save(state, checkpoint_id=str(path), no_dist=True)
        return path

    return write


def flax(dtype, elements):
    def write(path):
        msgpack = pytest.importorskip("msgpack")

        def array(shape, name, raw):
            return msgpack.ExtType(1, msgpack.packb((shape, name, raw)))

        tree = {"w": array([6], "float32", W.tobytes()), "odd": array([2], dtype, elements)}
        path.write_bytes(msgpack.packb(tree, strict_types=True))
        return path

    return write


LONG = np.zeros(2, np.longdouble)
TEXT, OBJECTS, DATES = np.array("x"), np.array([None, 1]), np.array(["2020-01-01"], "M8[D]")


def tagged(tensor):
    """A tensor with an attribute of Python, which torch saves."""
    tensor.tag = 1
    return tensor


TORCH = [
    ("coo", lambda t: t.eye(2).to_sparse(), "sparse float32"),
    ("hybrid coo", lambda t: t.ones(2, 3, dtype=t.float64).to_sparse(1), "sparse float64"),
    ("csr", lambda t: t.eye(2).bfloat16().to_sparse_csr(), "sparse bfloat16"),
    ("csc", lambda t: t.eye(2).to_sparse_csc(), "sparse float32"),
    ("bsr", lambda t: t.eye(4).to_sparse_bsr((2, 2)), "sparse float32"),
    ("sparse with attributes", lambda t: tagged(t.eye(2).to_sparse()), "sparse float32"),
    ("sparse parameter", lambda t: t.nn.Parameter(t.eye(2).to_sparse()), "sparse float32"),
    ("nested", lambda t: t.nested.nested_tensor([t.ones(2), t.ones(3)]), "nested float32"),
    ("per tensor", lambda t: t.quantize_per_tensor(t.ones(2), 0.1, 0, t.qint8), "quantized qint8"),
    ("qint32", lambda t: tagged(t.quantize_per_tensor(t.ones(2), 0.1, 0, t.qint32)), "quantized qint32"),
    (
        "per channel",
        lambda t: t.quantize_per_channel(t.ones(2, 2), t.ones(2), t.zeros(2), 0, t.quint8),
        "quantized quint8",
    ),
    ("meta", lambda t: t.empty(2, 3, device="meta"), "meta float32"),
    ("meta parameter", lambda t: t.nn.Parameter(t.empty(2, device="meta", dtype=t.float16)), "meta float16"),
    ("lazy parameter", lambda t: t.nn.LazyLinear(2).weight, "uninitialized"),
    ("lazy buffer", lambda t: t.nn.LazyBatchNorm1d().running_mean, "uninitialized"),
    ("bits", lambda t: t.zeros(4, dtype=t.uint8).view(t.bits8), "bits8"),
    ("bits of two bytes", lambda t: t.zeros(4, dtype=t.int16).view(t.bits16), "bits16"),
]
# file name, writer, label of the odd entry, and whether it is a tensor
CASES = {
    "npz text": ("m.npz", npz(TEXT), "<U1", False),
    "npz bytes": ("m.npz", npz(np.array([b"ab"])), "|S2", False),
    "npz objects": ("m.npz", npz(OBJECTS), "Python objects", False),
    "npz longdouble": ("m.npz", npz(LONG), str(LONG.dtype.name), True),
    "npz dates": ("m.npz", npz(DATES), "datetime64[D]", True),
    "npz structured": ("m.npz", npz(np.zeros(2, [("a", "f4")])), None, True),
    "npz void": ("m.npz", npz(np.zeros(2, "V2")), "void16", True),
    "npz compressed text": ("m.npz", npz(TEXT, np.savez_compressed), "<U1", False),
    "npz compressed longdouble": ("m.npz", npz(LONG, np.savez_compressed), str(LONG.dtype.name), True),
    "pickle text": ("m.pkl", pickled(np.array(["x"])), None, False),
    "pickle objects": ("m.pkl", pickled(OBJECTS), "Python objects", False),
    "pickle dates": ("m.pkl", pickled(DATES, 2), None, True),
    "pickle longdouble": ("m.pkl", pickled(LONG, 5), None, True),
    "onnx text": ("m.onnx", onnx(8, 1, message(6, "text")), "STRING", False),
    "onnx unknown type": ("m.onnx", onnx(99, 1, message(9, "abcd")), "data type 99", True),
    "onnx segment": ("m.onnx", onnx(1, 1, message(3, b""), message(9, "abcd")), "FLOAT", True),
    "onnx sparse": ("m.onnx", onnx(1, 1, message(9, "abcd"), sparse=True), "FLOAT", True),
    "onnx half a byte": ("m.onnx", onnx(23, 3, message(9, "ab")), "FLOAT4E2M1", True),
    "hdf5 text": ("m.h5", hdf5(lambda h, f: f.create_dataset("odd", data="text")), "text", False),
    "hdf5 lzf": (
        "m.h5",
        hdf5(lambda h, f: f.create_dataset("odd", data=np.ones(64), chunks=(32,), compression="lzf")),
        "float64",
        True,
    ),
    "hdf5 holes": (
        "m.h5",
        hdf5(lambda h, f: f.create_dataset("odd", (100,), "f4", chunks=(10,)).__setitem__(slice(0, 10), 1)),
        "float32",
        True,
    ),
    "hdf5 fill value": ("m.h5", hdf5(lambda h, f: f.create_dataset("odd", (10**9,), "f4", fillvalue=3)), None, True),
    "hdf5 longdouble": ("m.h5", hdf5(lambda h, f: f.create_dataset("odd", data=LONG)), "an unusual float", True),
    "hdf5 null": ("m.h5", hdf5(lambda h, f: f.__setitem__("odd", h.Empty("f4"))), None, True),
    "hdf5 soft link": ("m.h5", hdf5(lambda h, f: f.__setitem__("odd", h.SoftLink("/w"))), "a soft link", True),
    "flax text": ("m.msgpack", flax("str32", bytes(2)), "str32", True),
    "flax int4": ("m.msgpack", flax("int4", bytes(2)), "int4", True),
    "torch complex32": ("m.pt", torch_file(lambda t: t.zeros(2, dtype=t.complex32)), "complex32", True),
    "torch conjugate": ("m.pt", torch_file(lambda t: t.tensor([1j]).conj()), "complex64", True),
    "torch negative": ("m.pt", torch_file(lambda t: t.tensor([1j]).conj().imag), "float32", True),
    "torch legacy complex32": (
        "m.pt",
        torch_file(lambda t: t.tensor([1j]).conj(), _use_new_zipfile_serialization=False),
        "complex64",
        True,
    ),
    **{
        f"torch {name}{' legacy' * legacy}": (
            "m.pt",
            torch_file(make, **({"_use_new_zipfile_serialization": False} if legacy else {})),
            label,
            True,
        )
        for name, make, label in TORCH
        for legacy in (False, True)
        if not legacy or name in ("coo", "per tensor", "meta")
    },
    "dcp complex32": ("dcp", dcp(lambda t: t.zeros(2, dtype=t.complex32)), "complex32", True),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    name, write, label, is_tensor = CASES[request.param]
    return write(tmp_path / name), label, is_tensor, tmp_path


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_rest_of_the_file_loads(case, capsys):
    path, label, *_ = case
    options = {"format": "flax"} if path.suffix == ".msgpack" else {}
    np.testing.assert_array_equal(safeload.load(path, only="w", **options)["w"], W)
    np.testing.assert_array_equal(safeload.load(path, drop="odd", **options)["w"], W)
    with safeload.open(path, **options) as opened:
        assert set(opened) == {"w", "odd"}
        info = opened.tensors["odd"]
        assert label is None or info.dtype == label
        assert info.np_dtype is None
        np.testing.assert_array_equal(opened["w"], W)
        for read in (
            opened.load,
            lambda: opened["odd"],
            lambda: opened.get_slice("odd"),
            lambda: list(opened.stream()),
        ):
            with pytest.raises(UnsupportedError, match="select the other tensors by names, only= or drop=") as caught:
                read()
            assert caught.value.tensor == "odd"
            assert info.dtype in str(caught.value)
    assert main(["info", str(path)]) == 0
    assert info.dtype in capsys.readouterr().out
    if not options:
        report = safeload.check(path)
        assert report.ok == (info.dtype.split()[0] not in ("meta", "uninitialized"))  # nothing stores their values
        findings = report.warnings if report.ok else report.errors
        assert ("file.unknown_type", "odd") in [(one.code, one.tensor) for one in findings]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_convert_names_what_it_leaves_out(case, capsys):
    path, _, is_tensor, folder = case
    if path.suffix == ".msgpack":
        path = path.rename(path.with_name("flax_model.msgpack"))
    for target in ("o.safetensors", "o.npz", "folder/"):
        target = str(folder / target)
        status = main(["convert", str(path), target])
        out, err = capsys.readouterr()
        if is_tensor:
            assert status == 1
            assert "'odd'" in err
            assert "--drop" in err
            assert main(["convert", str(path), target, "--drop", "odd"]) == 0
        else:
            assert status == 0
            assert "'odd' is left out" in err
            assert "'odd' is left out" in out
        np.testing.assert_array_equal(safeload.load(target)["w"], W)
        assert list(safeload.open(target)) == ["w"]


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_state_dict_opens(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    dynamic = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    torch.save(dynamic.state_dict(), tmp_path / "m.pt")
    with safeload.open(tmp_path / "m.pt") as opened:
        odd = {name: info for name, info in opened.tensors.items() if info.np_dtype is None}
        codes = "_packed_params._packed_params.0"
        assert {name: (info.dtype, info.shape) for name, info in odd.items()} == {
            f"0.{codes}": ("quantized qint8", (3, 4)),
            f"2.{codes}": ("quantized qint8", (2, 3)),
        }
        found = opened.load(drop=f"*{codes}")
    np.testing.assert_array_equal(found["0._packed_params._packed_params.1"], model[0].bias.detach().numpy())
    assert found["0.scale"].shape == found["2.zero_point"].shape == ()


ODD_ARGUMENTS = [(), (1,), ((), ()), ({}, 3), (None, (None, None)), ("torch.sparse_coo", (1, (1, -1)))]


@pytest.mark.parametrize("args", ODD_ARGUMENTS)
@pytest.mark.parametrize("name", ["sparse", "sparse_csr", "q", "nested", "meta"])
def test_arguments_that_torch_never_writes_are_the_fault_of_that_entry(name, args, tmp_path):
    function = "meta_tensor_no_storage" if name == "meta" else f"{name}tensor" if name == "q" else f"{name}_tensor"
    odd = Call(Ref("torch._utils", f"_rebuild_{function}"), *args)
    path = tmp_path / "m.pt"
    path.write_bytes(zip_file({"odd": odd, "w": torch_tensor(Storage("0", W))}))
    with safeload.open(path) as opened:
        assert list(opened) == ["odd", "w"]
        np.testing.assert_array_equal(opened.load(only="w")["w"], W)
        with pytest.raises(UnsupportedError, match="tensor 'odd': "):
            opened.load()


def test_a_text_is_refused_if_it_is_asked_for(tmp_path):
    np.savez(tmp_path / "m.npz", w=W, odd=TEXT)
    target = tmp_path / "o.safetensors"
    with pytest.raises(UnsupportedError, match="tensor 'odd': <U1 is not a dtype of weights"):
        safeload.convert(tmp_path / "m.npz", target, names=["w", "odd"])
    report = safeload.convert(tmp_path / "m.npz", target)
    assert report.left_out == ("'odd' is left out: <U1 is not a tensor",)
    assert json.dumps(report.to_dict())
    report = safeload.convert(tmp_path / "m.npz", target, drop="odd", overwrite=True)
    assert not report.left_out
    report = safeload.convert(tmp_path / "m.npz", tmp_path / "f", max_shard_size="1KB", resume=True)
    assert report.left_out == ("'odd' is left out: <U1 is not a tensor",)
    for only in ("odd", ["odd", "nothing*"]):
        with pytest.raises(safeload.SafeloadError, match=r"no tensor to convert|nothing"):
            safeload.convert(tmp_path / "m.npz", target, only=only, overwrite=True)
    np.testing.assert_array_equal(safeload.load(target)["w"], W)


def test_constants_are_tensors_without_initializers_and_a_note_beside_them(tmp_path, capsys):
    tensor = number(1, 6) + number(2, 1) + message(8, "w") + message(9, W.tobytes())
    attribute = message(1, "value") + message(5, tensor) + b"\xa0\x01\x04"
    node = message(2, "w") + message(4, "Constant") + message(5, attribute)
    for count in (1, 2):
        graph = message(1, node) + message(2, "g") + message(5, tensor.replace(b"w", b"v")) * (count - 1)
        path = tmp_path / f"{count}.onnx"
        path.write_bytes(number(1, 8) + message(7, graph) + message(8, message(1, "") + number(2, 17)))
        status = main(["convert", str(path), str(tmp_path / f"{count}.safetensors")])
        err = capsys.readouterr().err
        assert status == 0
        assert ("Constant nodes hold 1 tensor" in err) == ("--root" in err) == (count == 2)
        (loaded,) = safeload.load(tmp_path / f"{count}.safetensors").values()
        np.testing.assert_array_equal(loaded, W.ravel())
    assert main(["convert", str(tmp_path / "1.onnx"), str(tmp_path / "c.safetensors"), "--root", "constants"]) == 0


@pytest.mark.parametrize("target", ["x.safetensors", "x.npz", "x.gguf", "folder/"])
def test_no_tensors_are_an_error(target, tmp_path):
    for source in ({}, {"a": W}):
        options = {"drop": "a"} if source else {}
        with pytest.raises(safeload.SafeloadError, match="no tensor to convert"):
            safeload.convert(source, tmp_path / target, **options)
        assert not any(tmp_path.iterdir())


def test_an_entry_in_an_archive(tmp_path):
    import tarfile

    np.savez(tmp_path / "m.npz", w=W, odd=TEXT)
    with tarfile.open(tmp_path / "m.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.add(tmp_path / "m.npz", "m.npz")
    np.testing.assert_array_equal(safeload.load(tmp_path / "m.tar", only="w")["w"], W)
    with pytest.raises(UnsupportedError, match="'odd': <U1"):
        safeload.load(tmp_path / "m.tar")


# ---- complex numbers ----

C = (np.arange(6) + 1j * np.arange(6)[::-1]).reshape(2, 3)


@pytest.mark.parametrize("dtype", ["<c16", ">c16", "<c8", ">c8"])
@pytest.mark.parametrize("name", ["m.npz", "m.npy", "m.pkl", "m.h5"])
def test_complex_numbers_are_read_and_not_cast(name, dtype, tmp_path):
    value, path = C.astype(dtype), tmp_path / name
    if name == "m.npz":
        np.savez(path, tensor=value)
    elif name == "m.npy":
        np.save(path, value)
    elif name == "m.pkl":
        path.write_bytes(pickle.dumps({"tensor": value}))
    else:
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            file["tensor"] = value
    native = value.dtype.newbyteorder("=")
    with safeload.open(path) as opened:
        assert opened.tensors["tensor"].dtype == f"C{8 * native.itemsize}"
        assert opened.tensors["tensor"].np_dtype == native
        np.testing.assert_array_equal(opened.get_slice("tensor")[1:, ::2], C[1:, ::2])
        np.testing.assert_array_equal(opened.take("tensor", [1, 0, 1]), C[[1, 0, 1]])
    for backend in ("mmap", "pread", "direct"):
        for dtype in (None, "float16"):
            got = safeload.load(path, dtype=dtype, backend=backend)["tensor"]
            assert got.dtype == native
            np.testing.assert_array_equal(got, C)
    for cast in ("complex64", "complex128"):
        with pytest.raises(UnsupportedError, match=f"cannot load as {cast}"):
            safeload.load(path, dtype=cast)
    for target in ("o.npz", "o.npy"):
        safeload.convert(path, tmp_path / target)
        stored = np.load(tmp_path / target)
        np.testing.assert_array_equal(stored if target == "o.npy" else stored["tensor"], C)
    assert safeload.diff(path, tmp_path / "o.npz").same
    assert safeload.check(path).ok
    assert not safeload.stats(path).keys() - {"tensor"}


@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}, {"max_shard_size": "1KB"}, {"quantize": "int8"}])
@pytest.mark.parametrize("source", ["file", "dict"])
def test_safetensors_has_no_complex128(source, options, tmp_path):
    tensors, folder = {"c": C, "w": np.ones((2, 32), np.float32)}, "max_shard_size" in options
    np.savez(tmp_path / "m.npz", **tensors)
    given, target = (
        tmp_path / "m.npz" if source == "file" else tensors,
        tmp_path / ("out" if folder else "o.safetensors"),
    )
    with pytest.raises(
        safeload.SafeloadError, match=r"tensor 'c': dtype 'complex128' cannot be saved.*drop="
    ) as caught:
        safeload.convert(given, target, **options)
    assert caught.value.tensor == "c"
    assert not target.exists()
    assert safeload.convert(given, target, drop="c", **options).tensors == 1
    for save in (safeload.numpy.save_file, safeload.save):
        with pytest.raises(safeload.SafeloadError, match="complex128"):
            save({"c": C}, tmp_path / "n.safetensors")


def test_a_safetensors_file_that_says_c128_is_refused(tmp_path):
    header = json.dumps({"c": {"dtype": "C128", "shape": [1], "data_offsets": [0, 16]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(safeload.FormatError, match="unknown dtype 'C128', expected one of BOOL"):
        safeload.open(path)


def test_complex_tensors_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    value = torch.from_numpy(C)
    for name, options in (("a.pt", {}), ("b.pt", {"_use_new_zipfile_serialization": False})):
        torch.save({"c": value, "t": value.t(), "s": value.to(torch.complex64)}, tmp_path / name, **options)
        got = safeload.load(tmp_path / name)
        np.testing.assert_array_equal(got["c"], C)
        np.testing.assert_array_equal(got["t"], C.T)
        np.testing.assert_array_equal(got["s"], C.astype(np.complex64))
        tensors = safeload.torch.load_checkpoint(tmp_path / name)
        assert tensors["c"].dtype == torch.complex128
        assert torch.equal(tensors["t"], value.t())


def test_an_entry_whose_header_is_damaged_is_still_a_fault_of_the_file(tmp_path):
    content = io.BytesIO()
    np.save(content, np.ones(3))
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        archive.writestr("w.npy", content.getvalue())
        archive.writestr("odd.npy", content.getvalue()[:-1])
    with pytest.raises(safeload.FormatError, match="'odd'"):
        safeload.open(tmp_path / "m.npz")


@pytest.mark.filterwarnings("ignore")
def test_a_pending_conjugate_in_torch_distributed_is_refused_by_name(tmp_path):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    path = tmp_path / "d"
    tensors = {"w": torch.arange(6.0), "odd": torch.tensor([1j]).conj()}
    dcp.save(tensors, checkpoint_id=path, no_dist=True)
    assert safeload.load(path, only="w")["w"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UnsupportedError, match=r"'odd'.*resolve_conj"):
        safeload.load(path)
    assert any("resolve_conj" in finding.message for finding in safeload.check(path).errors)
    target = tmp_path / "o.safetensors"
    safeload.convert(path, target, drop="odd")
    assert list(safeload.open(target)) == ["w"]
