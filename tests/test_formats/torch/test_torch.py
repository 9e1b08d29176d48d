"""Torch checkpoints, zip and legacy: real files, and ones made without torch for what no real file at hand shows."""

import hashlib
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.paths import DATA, SHARED
from builders.random import rng
from builders.torch_build import (
    OD,
    PARAMETER,
    REBUILD_V1,
    UNTYPED,
    Call,
    Ref,
    Storage,
    dump,
    legacy_file,
    ordered,
    storages_of,
    tensor,
    zip_archive,
    zip_entries,
    zip_file,
)

import safeload
from safeload import ForbiddenError, FormatError, LimitError, TensorNotFoundError, UnsupportedError

pytestmark = pytest.mark.no_core

KEPT_INERT = "tensors_when_unknown_objects_are_kept_inert"


def expected(folder):
    if not folder.is_dir():
        return {}
    text = (folder / "expected.json").read_text()
    entries = json.loads(re.sub(r"<state>\._(?:parameters|buffers|modules)\.", "", text))  # older names
    return {folder / name: want for name, want in entries.items() if name.startswith("torch")}


LOCAL, OUTSIDE = expected(DATA), expected(SHARED)
needs_shared = pytest.mark.skipif(not OUTSIDE, reason="../shared/data is not here")
FILES = {**LOCAL, **OUTSIDE}
READ = {path: want for path, want in FILES.items() if "tensors" in want or KEPT_INERT in want}


def name_of(path):
    return f"{path.parent.name}/{path.name}" if isinstance(path, Path) else ""


def same(got, want, name=""):
    assert (got.dtype, got.shape) == (want.dtype, want.shape), name
    assert got.tobytes() == want.tobytes(), name
    assert got.flags.aligned, name
    assert got.flags.writeable, name


# ---- real files ----


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct", "one by one"])
@pytest.mark.parametrize("path", READ, ids=name_of)
def test_real_files_give_the_expected_tensors(path, backend):
    want = READ[path]
    inert = KEPT_INERT in want
    tensors = want[KEPT_INERT] if inert else want["tensors"]
    before = path.read_bytes()
    with safeload.open(path, unknown_globals="inert" if inert else "refuse") as checkpoint:
        assert list(checkpoint) == list(tensors)
        assert checkpoint.format == ("torch legacy" if before[:1] == b"\x80" else "torch zip")
        got = checkpoint if backend == "one by one" else checkpoint.load(backend=backend)
        for name, entry in tensors.items():
            array = got[name]
            assert list(array.shape) == entry["shape"], name
            assert hashlib.sha256(array.tobytes()).hexdigest() == entry["sha256"], name
            if "dtype" in entry:
                assert f"torch.{array.dtype.name}" == entry["dtype"], name
            if "stride" in entry and array.size:
                assert [step // array.itemsize for step in array.strides] == entry["stride"], name
            assert array.flags.aligned, name
            assert array.flags.writeable, name
            whole = checkpoint.get_slice(name)[...]
            assert whole.flags.c_contiguous, name
            assert whole.tobytes() == array.tobytes(), name
            assert checkpoint.tensors[name].nbytes == array.nbytes, name
        for name in tensors:  # only now: some show the same bytes
            array = got[name]
            if array.dtype != bool and array.size:
                array += array.dtype.type(1)  # writable, and changes no file
    assert path.read_bytes() == before


@pytest.mark.parametrize("path", [path for path in FILES if path.name == "broken.pt"], ids=name_of)
def test_a_broken_file_is_refused(path):
    with pytest.raises(FormatError, match="this is text: 'abc"):
        safeload.open(path)


@needs_shared
def test_a_pickled_network_is_refused_naming_its_foreign_globals():
    path = SHARED / "torch/admet-lightning.pt"
    with pytest.raises(ForbiddenError) as caught:
        safeload.open(path)
    for name in (
        "lightning.fabric.utilities.data.AttributeDict",
        "torch.nn.modules.linear.Identity",
        "torchmetrics.metric.jit_distributed_available",
        "chemprop.nn.metrics.BinaryAUROC",
    ):
        assert name in str(caught.value)
    assert "11 globals" in str(caught.value)
    assert "OrderedDict" not in str(caught.value)
    with safeload.open(path, unknown_globals="inert") as checkpoint:
        found = checkpoint.metadata["hyper_parameters"]
        assert found["<global>"] == "lightning.fabric.utilities.data.AttributeDict"
        assert found["metrics"][0]["<global>"] == "chemprop.nn.metrics.BinaryAUROC"
        json.dumps(checkpoint.metadata, default=list)  # it has sets
    with safeload.open(path, unknown_globals="inert", root="state_dict") as checkpoint:
        assert len(checkpoint) == 12
        assert "metrics.0.task_weights" in checkpoint
    with safeload.open(path, unknown_globals="inert", root="hyper_parameters.metrics.1") as checkpoint:
        assert list(checkpoint) == ["task_weights"]


@needs_shared
def test_a_checkpoint_and_its_safetensors_agree_bit_for_bit():
    torch = safeload.load(SHARED / "torch/akiki-vad.pt", root="state_dict")
    plain = safeload.load(SHARED / "safetensors/akiki-vad.safetensors")
    assert set(torch) == set(plain)
    for name, array in plain.items():
        same(torch[name], array, name)
    with safeload.open(SHARED / "torch/akiki-vad.pt") as checkpoint:
        assert checkpoint.metadata["spec"]["sample_rate"] == 16000
        assert "state_dict" not in checkpoint.metadata


@needs_shared
def test_what_is_expected_here_is_what_is_expected_there():
    made_elsewhere = [(path, want) for path, want in LOCAL.items() if not path.name.startswith("package-")]
    there = {(path.name, json.dumps(want, sort_keys=True)) for path, want in OUTSIDE.items()}
    assert {(path.name, json.dumps(want, sort_keys=True)) for path, want in made_elsewhere} <= there


# ---- made files ----

DTYPES = [
    *("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64"),
    *("bfloat16", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def sample(name, count=24):
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()


class Made:
    """A value with every dtype, shared and strided tensors, and what its tensors are."""

    def __init__(self):
        self.value, self.want = {}, {}
        for k, name in enumerate(DTYPES):
            array = sample(name)
            self.add(name, Storage(str(k), array), (4, 6), (6, 1))
        shared = Storage("shared", sample("float32", 100))
        self.add("whole", shared, (100,), (1,))
        self.add("part", shared, (5, 4), (4, 1), 20)
        self.add("transposed", shared, (4, 5), (1, 4), 20)
        self.add("stepped", shared, (10,), (3,), 1)
        self.add("expanded", shared, (3, 2), (0, 1), 7)
        self.add("unit", shared, (1, 3, 1), (50, 1, 7))
        self.add("scalar", shared, (), (), 99)
        eight = Storage("bytes", sample("float8_e5m2", 40))
        self.add("f8.whole", eight, (40,), (1,))
        self.add("f8.part", eight, (3, 3), (1, 3), 5)
        self.add("empty", Storage("none", np.zeros(0, np.float32)), (0, 3), (3, 1))

    def add(self, name, storage, shape, strides, offset=0):
        self.value[name] = tensor(storage, shape, strides, offset)
        item = storage.array.itemsize
        view = np.ndarray(shape, storage.array.dtype, storage.array, offset * item, tuple(s * item for s in strides))
        self.want[name] = view.copy()


MADE = Made()
WAYS = {
    "zip": lambda value: zip_file(value),
    "zip protocol 3": lambda value: zip_file(value, protocol=3),
    "zip protocol 4": lambda value: zip_file(value, protocol=4),
    "zip protocol 5": lambda value: zip_file(value, protocol=5),
    "zip not aligned": lambda value: zip_file(value, align=1),
    "zip big-endian": lambda value: zip_file(value, order="big"),
    "zip without byteorder": lambda value: zip_archive(
        {name: data for name, data in zip_entries(value).items() if name != "byteorder"}
    ),
    "zip with another prefix": lambda value: zip_file(value, prefix="\N{SNOWMAN} free text/"),
    "zip without prefix": lambda value: zip_file(value, prefix=""),
    "zip with a compressed pickle": lambda value: zip_file(value, deflate=["data.pkl"]),
    "legacy": legacy_file,
    "legacy and something behind": lambda value: legacy_file(value, more=b"more"),
}


@pytest.fixture(params=WAYS)
def made(request, tmp_path):
    path = tmp_path / "file without suffix"
    path.write_bytes(WAYS[request.param](MADE.value))
    return path


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
def test_every_dtype_and_layout(made, backend):
    with safeload.open(made) as checkpoint:
        assert checkpoint.metadata == {}
        loaded = checkpoint.load(backend=backend)
        assert list(loaded) == list(checkpoint) == list(MADE.want)
        for name, want in MADE.want.items():
            same(loaded[name], want, name)
            same(checkpoint[name], want, name)
            same(checkpoint.get_slice(name)[...], want, name)
            assert checkpoint[name] is checkpoint[name]
        assert {info.dtype for info in checkpoint.tensors.values()} >= {"BF16", "F8_E8M0", "U16", "C64", "BOOL"}


def sharing(arrays):
    names = [name for name, array in arrays.items() if array.size]
    return {frozenset(pair) for pair in itertools.combinations(names, 2) if np.may_share_memory(*map(arrays.get, pair))}


def test_shared_storages_share_memory(made):
    inner = {"part", "transposed", "stepped", "expanded", "unit", "scalar"}
    want = {frozenset(("whole", name)) for name in inner}
    want |= {frozenset(("part", "transposed")), frozenset(("stepped", "part")), frozenset(("f8.whole", "f8.part"))}
    with safeload.open(made) as checkpoint:
        for arrays in (checkpoint.load(), checkpoint.load(backend="pread"), {n: checkpoint[n] for n in checkpoint}):
            assert want <= sharing(arrays)
            assert all(len({"f8.whole", "f8.part"} & pair) != 1 for pair in sharing(arrays))
        checkpoint["whole"][21] = 1234
        assert checkpoint["part"][0, 1] == checkpoint["transposed"][1, 0] == 1234
        assert checkpoint.load()["whole"][21] != 1234


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
def test_conversion(made, backend):
    with safeload.open(made) as checkpoint:
        loaded = checkpoint.load(dtype="float32", backend=backend)
        out = {name: np.empty(array.shape, array.dtype) for name, array in loaded.items()}
        checkpoint.load(dtype="float32", out=out)
        for name, array in MADE.want.items():
            floating = array.dtype.kind not in "iubc"
            want = safeload.astype(array, "float32") if floating else array
            same(loaded[name], want, name)
            same(out[name], want, name)
            if floating and array.dtype != np.float32:
                assert loaded[name].flags.c_contiguous, name
    with pytest.raises(TensorNotFoundError):
        safeload.load(made, ["nothing"])


def test_parameters_and_the_oldest_rebuild_function(tmp_path):
    storage = Storage("0", sample("float32", 6))
    value = {
        "parameter": Call(PARAMETER, tensor(storage, (2, 3)), True, Call(OD)),
        "with state": Call(
            Ref("torch._utils", "_rebuild_parameter_with_state"), tensor(storage), True, Call(OD), {"a": 1}
        ),
        "v1": Call(REBUILD_V1, storage, 1, (5,), (1,)),
        "metadata": tensor(storage, (6,), (1,), 0, {"conj": False, "neg": False}),
        "float4": Call(
            *(Ref("torch._utils", "_rebuild_tensor_v3"), Storage("4", np.arange(6, dtype=np.uint8), type=UNTYPED), 0),
            *((2, 3), (3, 1), False, Call(OD), Ref("torch", "float4_e2m1fn_x2")),
        ),
    }
    path = tmp_path / "x.pt"
    for content in (zip_file(value), legacy_file(value)):
        path.write_bytes(content)
        with safeload.open(path) as checkpoint:
            same(checkpoint["parameter"], storage.array.reshape(2, 3))
            same(checkpoint["with state"], storage.array)
            same(checkpoint["v1"], storage.array[1:])
            same(checkpoint["float4"], np.arange(6, dtype=np.uint8).reshape(2, 3))
            assert checkpoint.tensors["float4"][1:4] == ("F4", (2, 6), 6)
            assert checkpoint.load(dtype="float32")["float4"].shape == (2, 6)
            assert checkpoint["parameter"].base is not None
            assert np.may_share_memory(checkpoint["parameter"], checkpoint["v1"])


def test_legacy_parts_of_storages(tmp_path):
    whole = sample("float32", 20)
    root = Storage("7", whole)
    part = Storage("7", whole, part=("8", 5, 10))
    part.count = 20
    value = {"root": tensor(root), "part": tensor(part, (3, 2), (2, 1), 2), "end": tensor(part, (1,), (1,), 9)}
    path = tmp_path / "x.pt"
    path.write_bytes(legacy_file(value))
    with safeload.open(path) as checkpoint:
        same(checkpoint["part"], whole[7:13].reshape(3, 2))
        same(checkpoint["end"], whole[14:15])
        assert np.may_share_memory(checkpoint["part"], checkpoint["root"])
    value["beyond"] = tensor(part, (1,), (1,), 10)
    path.write_bytes(legacy_file(value))
    with pytest.raises(FormatError, match=r"tensor 'beyond': .* uses 44 bytes of storage '7', which has 40"):
        safeload.open(path)


def test_python_2_strings(tmp_path):
    """A checkpoint as Python 2 has pickled it: byte strings, an OrderedDict of a list of pairs."""
    pid = b"(U\x07storagectorch\nFloatStorage\nU\x03123U\x03cpuK\x02NtQ"
    made = b"ctorch._utils\n_rebuild_tensor\n(" + pid + b"K\0(K\x02t(K\x01ttR"
    value = b"\x80\x02ccollections\nOrderedDict\n(](](U\x03a.w" + made + b"e](U\x04note" + b"U\x02hie" + b"etR."
    head = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}U\x0dlittle_endian\x88s."
    path = tmp_path / "old.pth"
    path.write_bytes(head + value + b"\x80\x02]U\x03123a." + struct.pack("<q2f", 2, 1.5, -2))
    with safeload.open(path) as checkpoint:
        assert checkpoint["a.w"].tolist() == [1.5, -2]
        assert checkpoint.metadata == {"note": "hi"}


def one(k=0):
    return tensor(Storage(str(k), np.full(2, k, np.float32)))


# ---- attributes ----

FROM_TYPE, TENSOR_CLASS = Ref("torch._tensor", "_rebuild_from_type_v2"), Ref("torch", "Tensor")


def with_attributes(made, attributes, *, cls=TENSOR_CLASS):
    return Call(FROM_TYPE, made.function, cls, made.args, attributes)


def within_itself(levels):
    """A valid tensor, in so many calls of the function for attributes that call it again."""
    made = one()
    for _ in range(levels):
        made = with_attributes(made, {})
    return made


def test_attributes_of_tensors_are_dropped(tmp_path):
    storage, shared = Storage("0", sample("float32", 6)), {"tag": "x", "list": [1, {"a": one(1)}]}
    parameter = Ref("torch.nn.parameter", "Parameter")
    value = {
        "buffer": with_attributes(tensor(storage), {"persistent": True, "_is_buffer": True}),
        "none": with_attributes(tensor(storage, (2,), (2,), 1), None),
        "v3": with_attributes(tensor(Storage("u", sample("float8_e4m3fn", 4))), shared),
        "parameter": with_attributes(Call(PARAMETER, tensor(storage, (2, 3)), True, Call(OD)), shared, cls=parameter),
        "ordered": with_attributes(tensor(storage), ordered(shared), cls=Ref("torch.nn.parameter", "Buffer")),
        "class": TENSOR_CLASS,
    }
    path = tmp_path / "x.pt"
    for content in (zip_file(value), legacy_file(value)):
        path.write_bytes(content)
        for inert in ("refuse", "inert"):
            with safeload.open(path, unknown_globals=inert) as checkpoint:
                assert list(checkpoint) == list(value)[:-1]
                assert checkpoint.metadata == {"class": "torch.Tensor"}
                same(checkpoint["buffer"], storage.array)
                same(checkpoint["none"], storage.array[1:4:2])
                same(checkpoint["parameter"], storage.array.reshape(2, 3))
        assert safeload.scan(path).verdict == "harmless"


ATTRIBUTES = {
    "data": (with_attributes(one(), {"data": one(1)}), UnsupportedError, "sets the attribute 'data' of a tensor"),
    "class": (with_attributes(one(), {"a": 1, "__class__": TENSOR_CLASS}), UnsupportedError, "'__class__' of a tensor"),
    "grad": (with_attributes(one(), {"grad": None}), UnsupportedError, "'grad' of a tensor"),
    "data of a parameter": (
        Call(Ref("torch._utils", "_rebuild_parameter_with_state"), one(), True, Call(OD), {"data": one(1)}),
        UnsupportedError,
        "sets the attribute 'data' of a tensor",
    ),
    "slots": (with_attributes(one(), ({}, {"data": one(1)})), UnsupportedError, "must be a dict, got tuple"),
    "a number as a name": (with_attributes(one(), {1: 1}), FormatError, "must be a string, got 1"),
    "many": (with_attributes(one(), {f"a{k}": k for k in range(101)}), LimitError, "more than 100 attributes"),
    "three arguments": (Call(FROM_TYPE, one().function, TENSOR_CLASS, one().args), FormatError, "takes 4 arguments"),
    "a list of arguments": (
        Call(FROM_TYPE, one().function, TENSOR_CLASS, [*one().args], {}),
        FormatError,
        "arguments must be a tuple, got list",
    ),
    "no arguments": (Call(FROM_TYPE, one().function, TENSOR_CLASS, (), {}), FormatError, "takes 6 to 7 arguments"),
    "another class": (
        with_attributes(one(), {}, cls=Ref("my.module", "Scaled")),
        ForbiddenError,
        r"a global that is not on the allowlist: my\.module\.Scaled\.",
    ),
    "another function": (
        Call(FROM_TYPE, Ref("os", "system"), TENSOR_CLASS, ("true",), {}),
        ForbiddenError,
        r"allowlist: os\.system\.",
    ),
    "a container": (Call(FROM_TYPE, OD, TENSOR_CLASS, (), {}), FormatError, "a function that makes a tensor"),
    "a class as a function": (Call(FROM_TYPE, TENSOR_CLASS, TENSOR_CLASS, (), {}), FormatError, "that makes a tensor"),
    "a function as a class": (with_attributes(one(), {}, cls=OD), FormatError, "takes a class of tensors"),
    "a call of a class": (Call(TENSOR_CLASS, [1.0]), FormatError, r"'torch\.Tensor' cannot be called"),
    "itself": (
        within_itself(2),
        FormatError,
        r"makes a tensor, got 'torch\._tensor\._rebuild_from_type_v2'",
    ),
}


@pytest.mark.parametrize("fault", ATTRIBUTES)
def test_attributes_that_could_change_a_tensor_are_refused_by_name(fault, tmp_path):
    value, kind, message = ATTRIBUTES[fault]
    for content in (zip_file({"w": value}), legacy_file({"w": value})):
        (tmp_path / "x.pt").write_bytes(content)
        with pytest.raises(kind, match=message):
            safeload.open(tmp_path / "x.pt")


def test_a_tensor_nested_in_itself_takes_no_depth_of_the_stack(tmp_path):
    """100,000 levels, written by hand: a tuple of the function, its class, the inner tuple and {}."""
    head = b"\x80\2ctorch._tensor\n_rebuild_from_type_v2\nq\0ctorch\nTensor\nq\1"
    levels = 100_000
    nested = b"(h\0h\1" * levels + b")" + b"}t" * levels
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("archive/data.pkl", head + b"00h\0" + nested + b"R.")
        archive.writestr("archive/version", "3\n")
    for inert in ("refuse", "inert"):
        with pytest.raises(FormatError, match=r"takes a function that makes a tensor, got 'torch\._tensor"):
            safeload.open(tmp_path / "x.pt", unknown_globals=inert)
    assert safeload.scan(tmp_path / "x.pt").verdict == "dangerous"


# ---- names, root, metadata ----


def opened(tmp_path, value, **options):
    path = tmp_path / "made.pt"
    path.write_bytes(zip_file(value))
    return safeload.open(path, **options)


def test_names(tmp_path):
    t = [one(k) for k in range(9)]
    value = ordered({"a": t[0], "b": {"c": [t[1], 5, (t[2],)], 7: t[3]}, "d.e": t[4], None: {True: t[5], 1.5: t[6]}})
    checkpoint = opened(tmp_path, value)
    assert list(checkpoint) == ["a", "b.c.0", "b.c.2.0", "b.7", "d.e", "None.True", "None.1.5"]
    assert [checkpoint[name][0] for name in checkpoint] == [0, 1, 2, 3, 4, 5, 6]
    assert checkpoint.metadata == {"b": {"c": [None, 5, None]}}


def test_roots_that_are_no_dict(tmp_path):
    checkpoint = opened(tmp_path, one(3))
    assert list(checkpoint) == ["tensor"]
    assert checkpoint.metadata == {}
    checkpoint = opened(tmp_path, [one(), {"lr": 1}, one(), [one()], 5])
    assert list(checkpoint) == ["0", "2", "3.0"]
    assert checkpoint.metadata == {"1": {"lr": 1}, "4": 5}
    checkpoint = opened(tmp_path, 5)
    assert (list(checkpoint), checkpoint.metadata) == ([], {"value": 5})
    assert checkpoint.load() == {}
    assert opened(tmp_path, {}).metadata == {}


def test_metadata_is_all_that_is_no_tensor(tmp_path):
    value = {
        "state_dict": ordered({"w": one()}, state={"_metadata": {"": {"version": 1}}}),
        "epoch": 3,
        "optimizer": {"state": {0: {"step": 5, "exp_avg": one(1)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "size": Call(Ref("torch", "Size"), [1, 2]),
        "device": Call(Ref("torch", "device"), "cuda", 1),
        "dtype": Ref("torch", "float16"),
        "storage": Storage("bare", np.zeros(3, np.int16)),
        "empty": {},
        "only tensors": [one(2), {"x": one(3)}],
    }
    checkpoint = opened(tmp_path, value)
    assert checkpoint.metadata == {
        "epoch": 3,
        "optimizer": {"state": {0: {"step": 5}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "size": (1, 2),
        "device": "cuda:1",
        "dtype": "torch.float16",
        "storage": "<storage bare of 3 elements of torch.ShortStorage>",
        "empty": {},
    }
    assert list(checkpoint)[:2] == ["state_dict.w", "optimizer.state.0.exp_avg"]


COUNTER = Ref("collections", "Counter")


@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
def test_counters_sets_and_complex_numbers_are_metadata(tmp_path, module):
    """As torch.save writes the state of a MultiStepLR, sets and complex numbers."""
    path = tmp_path / "t.pt"
    set_ref, complex_ref = Ref(module, "set"), Ref(module, "complex")
    value = {
        "w": tensor(Storage("0", np.arange(3, dtype=np.float32))),
        "schedule": {"milestones": Call(COUNTER, {2: 2, 5: 1}), "gamma": 0.1},
        "set": Call(set_ref, [1, "a", (2, 3)]),
        "complex": Call(complex_ref, 1.0, -2.0),
        "empty": [Call(COUNTER, {}), Call(COUNTER), Call(set_ref, []), Call(set_ref)],
    }
    path.write_bytes(zip_file(value))
    with safeload.open(path) as checkpoint:
        same(checkpoint["w"], np.arange(3, dtype=np.float32))
        assert checkpoint.metadata == {
            "schedule": {"milestones": {2: 2, 5: 1}, "gamma": 0.1},
            "set": {1, "a", (2, 3)},
            "complex": 1 - 2j,
            "empty": [{}, {}, set(), set()],
        }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Call(COUNTER, [1, 1]), "Counter takes a dict, got list"),
        (Call(COUNTER, {}, {}), "Counter takes 0 to 1 arguments, got 2"),
        (Call(Ref("builtins", "set"), [[]]), "a list as a key"),
        (Call(Ref("builtins", "set"), [{}]), "a dict as a key"),
        (Call(Ref("builtins", "set"), [([],)]), "a list as a key"),
        (Call(Ref("builtins", "set"), "text"), "set takes a list, got 'text'"),
        (Call(Ref("builtins", "complex"), 1 << 1500, 0.0), "complex takes two floats"),
        (Call(Ref("builtins", "complex"), "1j"), "complex takes 2 arguments, got 1"),
    ],
)
def test_malformed_counters_sets_and_complex_numbers_are_refused(tmp_path, value, message):
    path = tmp_path / "t.pt"
    path.write_bytes(zip_file({"w": tensor(Storage("0", np.zeros(1, np.float32))), "x": value}))
    with pytest.raises(FormatError, match=message):
        safeload.open(path)


def test_root_selects_and_strips(tmp_path):
    value = {"model": {"ema": {"w": one(1)}, "w": one(2)}, "model.ema": {"v": one(3)}, "epoch": 5, "t": one(4)}
    for root, want in (
        ("model", ["ema.w", "w"]),
        ("model.ema", ["v"]),  # the key as it is comes first
        ("t", ["tensor"]),
    ):
        checkpoint = opened(tmp_path, value, root=root)
        assert list(checkpoint) == want
        assert checkpoint.metadata == {}
    assert list(opened(tmp_path, {"a": {"b": {"w": one()}}}, root="a.b")) == ["w"]
    assert list(opened(tmp_path, [one(), [one(), one()]], root="1")) == ["0", "1"]


@pytest.mark.parametrize("build", [zip_file, legacy_file])
@pytest.mark.parametrize(
    ("root", "metadata"),
    [
        (
            None,
            {
                "model": {"config": {"dim": 4}, "rest": [1, None]},
                "args": {"key": "sk-secret"},
                "runs": [None, {"lr": 3}],
            },
        ),
        ("model", {"config": {"dim": 4}, "rest": [1, None]}),
        ("model.rest", {"0": 1}),
        ("model.w", {}),
        ("runs", {"1": {"lr": 3}}),
        ("runs.0", {}),
        ("pure", {}),
    ],
)
def test_root_leaves_out_the_metadata_of_the_rest(tmp_path, build, root, metadata):
    model = {"w": one(1), "config": {"dim": 4}, "rest": [1, one(2)]}
    value = {"model": model, "args": {"key": "sk-secret"}, "runs": [{"w": one(3)}, {"lr": 3}], "pure": {"w": one(4)}}
    path = tmp_path / "made.pt"
    path.write_bytes(build(value))
    with safeload.open(path, root=root) as checkpoint:
        assert checkpoint.metadata == metadata
        safeload.convert(checkpoint, tmp_path / "out.safetensors")
    texts = safeload.open(tmp_path / "out.safetensors").metadata
    assert {key: json.loads(text) for key, text in texts.items()} == metadata


@pytest.mark.parametrize("root", ["", "nothing", "epoch", "model.", "model.x", ".model", "model.w.x"])
def test_a_missing_root_lists_what_is_there(tmp_path, root):
    value = {"model": {"w": one(1), "ema": {"w": one(2)}}, "epoch": 5, "notes": {"a": 1}}
    with pytest.raises(TensorNotFoundError) as caught:
        opened(tmp_path, value, root=root)
    message = f"made.pt: no container {root!r}; containers with tensors: model (2 tensors), model.ema (1 tensor)"
    assert str(caught.value).endswith(message)


def test_a_collision_is_refused(tmp_path):
    for value in ({"a": {"b": one()}, "a.b": one(1)}, {0: one(), "0": one(1)}, {"x": [one()], "x.0": one()}):
        with pytest.raises(FormatError, match="two tensors are named "):
            opened(tmp_path, value)


def test_one_tensor_under_two_names_is_there_twice(tmp_path):
    tied = one()
    checkpoint = opened(tmp_path, {"embed": tied, "head": tied, "again": {"x": tied}})
    assert list(checkpoint) == ["embed", "head", "again.x"]
    checkpoint["embed"][0] = 9
    assert checkpoint["head"][0] == checkpoint["again.x"][0] == 9


def test_inert_objects(tmp_path):
    c = Ref("some.where", "Class")
    held = Call(c, one(1), 5, state={"_parameters": {"w": one(2)}, "training": True})
    held.items = [("k", one(3)), ("n", 1)]
    value = {"net": held, "class": c, "w": one(4), "plain": Call(c, state=7)}
    with pytest.raises(ForbiddenError, match=r"a global that is not on the allowlist: some\.where\.Class"):
        opened(tmp_path, value)
    checkpoint = opened(tmp_path, value, unknown_globals="inert")
    assert list(checkpoint) == ["net.<args>.0", "net.k", "net.<state>._parameters.w", "w"]
    assert checkpoint.metadata == {
        "net": {"<global>": "some.where.Class", "<args>": (None, 5), "n": 1, "<state>": {"training": True}},
        "class": "<global some.where.Class>",
        "plain": {"<global>": "some.where.Class", "<state>": 7},
    }
    assert list(opened(tmp_path, held, unknown_globals="inert", root="<state>")) == ["_parameters.w"]


def test_foreign_storages_and_tensors_are_listed_when_inert(tmp_path):
    strange = Storage("0", np.zeros(2, np.float32), type=Ref("torch.some", "Storage"))
    value = {"strange": tensor(strange), "other": Call(Ref("torch._utils", "_rebuild_other"), 1), "w": one(1)}
    with pytest.raises(ForbiddenError, match=r"torch\._utils\._rebuild_other, torch\.some\.Storage"):
        opened(tmp_path, value)
    with opened(tmp_path, value, unknown_globals="inert") as checkpoint:
        assert list(checkpoint) == ["strange", "w"]
        with pytest.raises(UnsupportedError, match=r"tensor 'strange': torch\.some\.Storage makes the tensor"):
            checkpoint.load()


def test_containers_that_hold_themselves(tmp_path):
    path = tmp_path / "loop.pt"
    entries = zip_entries({"w": one()})
    made = dump(one())[2:-1]
    for body, names, metadata in (
        (b"}q\xfeU\x04selfh\xfesU\x01w" + made + b"s.", ["w"], {"self": "<cycle>"}),
        (b"]q\xfeh\xfea" + made + b"a.", ["1"], {"0": "<cycle>"}),
        (b"}U\x01a}q\xfeU\x01b]q\xfdh\xfeah\xfdassU\x01w" + made + b"s.", ["w"], {"a": {"b": ["<cycle>", "<cycle>"]}}),
    ):
        path.write_bytes(zip_archive({**entries, "data.pkl": b"\x80\x02" + body}))
        with safeload.open(path) as checkpoint:
            assert list(checkpoint) == names
            assert checkpoint.metadata == metadata


def test_laughing_lists_are_counted_not_unfolded(tmp_path):
    path = tmp_path / "laugh.pt"
    entries = zip_entries({"w": one()})
    made = dump(one())[2:-1]
    for start, message in ((b"]K\x01a", "values when shared containers"), (b"]" + made + b"a", "names of tensors")):
        levels = b"".join(b"q" + bytes((k,)) + b"0](" + (b"h" + bytes((k,))) * 10 + b"e" for k in range(100, 130))
        path.write_bytes(zip_archive({**entries, "data.pkl": b"\x80\x02" + start + levels + b"."}))
        with pytest.raises(LimitError, match=f"more than .* {message if start[1:2] == b'K' else ''}"):
            safeload.open(path)


def test_deep_nesting_is_a_limit(tmp_path):
    path = tmp_path / "deep.pt"
    entries = zip_entries({"w": one()})
    for depth in (201, 100_000):
        path.write_bytes(zip_archive({**entries, "data.pkl": b"]" * (depth + 1) + b"a" * depth + b"."}))
        with pytest.raises(LimitError, match="more than 200 levels of containers"):
            safeload.open(path)
    path.write_bytes(zip_archive({**entries, "data.pkl": b"]" * 201 + b"a" * 200 + b"."}))
    json.dumps(safeload.open(path).metadata)


def test_long_names_are_a_limit(tmp_path):
    """A short file has long names: each begins with that of its container."""
    opened(tmp_path, {"x" * 400_000: {f"{k}": one(k) for k in range(10)}})
    with pytest.raises(LimitError, match="more than 100,000,000 characters in the names"):
        opened(tmp_path, {"x" * 10_000_000: {f"{k}": one(k) for k in range(10)}})


def test_a_pickle_too_large_to_be_one_is_a_limit(tmp_path, monkeypatch):

    value = {"w": one(), "text": "x" * 5000}
    path = tmp_path / "large.pt"
    monkeypatch.setattr(inside.torch_zip, "_WINDOW", 16)  # and so many windows are read
    path.write_bytes(legacy_file(value))
    assert safeload.load(path)["w"].tolist() == [0, 0]
    monkeypatch.setattr(inside.unpickler, "MAX_PICKLE", 1000)
    for content in (legacy_file(value), zip_file(value)):
        path.write_bytes(content)
        with pytest.raises(LimitError, match=r"has more than 1000 bytes"):
            safeload.open(path)


def test_zip64(tmp_path, monkeypatch):
    """Sizes and offsets in ZIP64 fields, as where they need more than 32 bits."""
    monkeypatch.setattr("zipfile.ZIP64_LIMIT", 20)
    value = {"a": tensor(Storage("0", np.arange(100.0))), "b": one(5)}
    content = zip_file(value, align=1)
    assert content.count(b"\xff\xff\xff\xff") > 8
    path = tmp_path / "large.pt"
    path.write_bytes(content)
    monkeypatch.undo()
    loaded = safeload.load(path)
    assert loaded["a"].tolist() == list(range(100))
    assert loaded["b"].tolist() == [5, 5]


# ---- archives of other makers ----


def script_entries():
    network = Call(Ref("__torch__", "Net"), state={"weight": one(), "training": True})
    return {**zip_entries(network), "constants.pkl": dump(()), "code/__torch__.py": b"class Net: ..."}


def test_torchscript(tmp_path):
    path = tmp_path / "script.pt"
    path.write_bytes(zip_archive(script_entries()))
    with pytest.raises(UnsupportedError, match=r"TorchScript archive: .*__torch__\.Net.*inert"):
        safeload.open(path)
    assert list(safeload.open(path, unknown_globals="inert")) == ["weight"]
    path.write_bytes(zip_archive({**script_entries(), "data.pkl": dump({"weight": one()})}))
    assert list(safeload.open(path)) == ["weight"]


def package(pickles, **more):
    """Entries of a package: pickles by "package/resource"."""
    storages = {key: item for value in pickles.values() for key, item in storages_of(value).items()}
    return {
        **{
            f".data/{str(key).removesuffix('.storage')}.storage": item.array.tobytes() for key, item in storages.items()
        },
        **{name: dump(value, 3) for name, value in pickles.items()},
        ".data/extern_modules": b"torch\n",
        ".data/version": b"6\n",
        **more,
    }


class Reduced(Storage):
    """A persistent id of what saves itself into a package."""

    def __init__(self, *value):
        super().__init__(None, np.zeros(0))
        self.value = value

    def id(self, legacy):
        return ("reduce_package", *self.value)


SCRIPT = Ref("torch.jit._script", "unpackage_script_module")


def open_package(tmp_path, entries, **options):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pt"  # Windows does not write to a mapped file
    path.write_bytes(zip_archive(entries))
    return safeload.open(path, **options)


def test_a_package_of_one_pickle_has_no_prefix(tmp_path):
    storage = Storage(0, np.arange(3, dtype=np.float32))
    beside = {
        "text/readme.txt": b"hello",
        "text/blob.pkl": b"no pickle",
        "text/blob": b"\x80\x03 no pickle",
        "a.py": b"\x80\x03N.",
    }
    for name in ("model/model.pkl", "model", "a/b/c/weights.bin"):
        entries = package({name: {"w": tensor(storage), "lr": 0.5}}, **beside)
        for order in (entries, dict(reversed(entries.items()))):
            checkpoint = open_package(tmp_path, order)
            assert checkpoint["w"].tolist() == [0, 1, 2]
            assert checkpoint.metadata == {"lr": 0.5}
        assert list(open_package(tmp_path, entries, root=f"{name}")) == ["w"]
    path = tmp_path / "flat.pt"
    path.write_bytes(zip_archive(entries, prefix=""))
    assert list(safeload.open(path)) == ["w"]


def test_a_class_in_a_package_is_forbidden_or_inert(tmp_path):
    network = Call(Ref("torch.nn", "Linear"), state={"w": one()})
    entries = package({"a/net.pkl": network, "b/net.pkl": {"w": one(1)}, "c/net.pkl": Call(Ref("my", "Config"))})
    with pytest.raises(
        ForbiddenError, match=r"a torch\.package archive; its pickles reference 2 .*my\.Config, torch\.nn"
    ):
        open_package(tmp_path, entries)
    checkpoint = open_package(tmp_path, entries, unknown_globals="inert")
    assert list(checkpoint) == ["a/net.pkl.<state>.w", "b/net.pkl.w"]
    assert checkpoint.metadata == {
        "a/net.pkl": {"<global>": "torch.nn.Linear"},
        "c/net.pkl": {"<global>": "my.Config"},
    }
    assert list(open_package(tmp_path, entries, root="b/net.pkl")) == ["w"]  # one that asks for nothing
    assert list(open_package(tmp_path, entries, root="a/net.pkl.<state>", unknown_globals="inert")) == ["w"]
    with pytest.raises(TensorNotFoundError, match=r"no container 'net'; the pickles are a/net\.pkl, b/net\.pkl, c/net"):
        open_package(tmp_path, entries, root="net")
    with pytest.raises(TensorNotFoundError, match="no container 'x'"):
        open_package(tmp_path, entries, root="b/net.pkl.x")


def test_scripts_in_a_package_are_where_they_were(tmp_path):
    inner = dump(Call(Ref("__torch__", "Net"), state={"weight": tensor(Storage("0.storage", np.ones(2, np.float32)))}))
    shared = tensor(Storage(0, np.ones(2, np.float32)))
    for number in ((140_000_000_000_000,), ()):  # before torch 1.11 without a number
        script = Reduced(*number, SCRIPT, ("5",))
        entries = package({"net/net.pkl": {"s": script, "again": script, "w": shared}})
        del entries[".data/None.storage"]
        entries |= {".data/ts_code/5/data.pkl": inner, ".data/ts_code/5/constants.pkl": b"\x80\x02)."}
        checkpoint = open_package(tmp_path, entries, unknown_globals="inert")
        assert list(checkpoint) == ["s.weight", "again.weight", "w"]
        assert checkpoint["s.weight"].tolist() == [1, 1]
        assert checkpoint.named_globals["__torch__.Net"] is False
        with pytest.raises(ForbiddenError, match=r"__torch__\.Net, torch\.jit\._script\.unpackage_script_module"):
            open_package(tmp_path, entries)
    del entries["net/net.pkl"]  # nothing names the script
    assert list(open_package(tmp_path, entries, unknown_globals="inert")) == ["weight"]


def test_what_else_reduces_itself_in_a_package(tmp_path):
    graph = Reduced(
        7, Ref("torch.fx.graph_module", "reduce_package_graph_module"), ({"_parameters": {"w": one()}}, "m")
    )
    entries = package({"a/b.pkl": [graph, graph]}) | {".data/0.storage": one().args[0].array.tobytes()}
    assert list(open_package(tmp_path, entries, unknown_globals="inert")) == [
        "0.<args>.0._parameters.w",
        "1.<args>.0._parameters.w",
    ]


# ---- the door ----


def test_format_may_be_insisted_on(tmp_path, data):
    archive, legacy = tmp_path / "a", tmp_path / "b"
    archive.write_bytes(zip_file({"w": one()}))
    legacy.write_bytes(legacy_file({"w": one()}))
    plain = data / "silero_vad_16k.safetensors"
    for path, able in ((archive, "torch zip"), (legacy, "torch legacy")):
        for format in (None, "torch", able):
            assert safeload.open(path, format=format).format == able
    with pytest.raises(FormatError, match=r"this is a pickle .*, not torch zip"):
        safeload.open(legacy, format="torch zip")
    with pytest.raises(FormatError, match=r"this is a zip archive .*, not torch legacy"):
        safeload.open(archive, format="torch legacy")
    with pytest.raises(FormatError, match="not a safetensors file"):
        safeload.open(archive, format="safetensors")
    with pytest.raises(FormatError, match="this is a safetensors file, not torch zip"):
        safeload.open(plain, format="torch")
    with pytest.raises(ValueError, match="expected one of safetensors, torch, torch zip, torch legacy"):
        safeload.open(plain, format="pth")
    with pytest.raises(ValueError, match="unknown_globals"):
        safeload.open(archive, unknown_globals="allow")
    with pytest.raises(UnsupportedError, match="safetensors has none"):
        safeload.open(plain, root="x")
    with pytest.raises(FileNotFoundError):
        safeload.open(tmp_path / "missing.pt", format="torch")


def index(names, file):
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, file)})


def test_a_folder_is_resolved_in_order(tmp_path):
    from safeload.numpy import save_file

    def put(name, k):
        (tmp_path / name).write_bytes(zip_file({"w": one(k)}))

    def first():
        checkpoint = safeload.open(tmp_path)
        return [Path(file).name for file in checkpoint.files], int(checkpoint["w"][0]), checkpoint.format

    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    put("consolidated.00.pth", 1)
    assert first() == (["consolidated.00.pth"], 1, "torch zip")
    put("consolidated.01.pth", 1)
    with pytest.raises(UnsupportedError, match=r"2 files consolidated\.00\.pth to consolidated\.01\.pth are model-par"):
        safeload.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(legacy_file({"w": one(2)}))
    assert first() == (["pytorch_model.bin"], 2, "torch legacy")
    put("shard.bin", 3)
    (tmp_path / "pytorch_model.bin.index.json").write_text(index(["w"], "shard.bin"))
    assert first() == (["pytorch_model.bin"], 2, "torch legacy")  # as in transformers
    (tmp_path / "pytorch_model.bin").unlink()
    assert first() == (["shard.bin"], 3, "torch zip")
    assert list(safeload.open(tmp_path / "pytorch_model.bin.index.json")) == ["w"]
    save_file({"w": np.full(2, 4, np.float32)}, tmp_path / "z.safetensors")
    assert first() == (["z.safetensors"], 4, "safetensors")
    save_file({"w": np.full(2, 5, np.float32)}, tmp_path / "y.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index(["w"], "y.safetensors"))
    assert first() == (["y.safetensors"], 5, "safetensors")
    assert safeload.open(tmp_path, format="torch").files == [str(tmp_path / "shard.bin")]
    assert safeload.open(tmp_path).config == {"model_type": "x"}


def test_shards_of_an_index(tmp_path):
    shared = Storage("0", np.arange(12, dtype=np.float32))
    first = {
        "a": tensor(shared, (6,)),
        "b": tensor(shared, (2, 3), (1, 2), 3),
        "ignored": tensor(shared, (3,), (1,), 4),
    }
    (tmp_path / "one.bin").write_bytes(zip_file(first, align=1))
    (tmp_path / "two.bin").write_bytes(legacy_file({"c": one(7), "ignored": one(8)}))
    where = {"a": "one.bin", "b": "one.bin", "c": "two.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    with safeload.open(tmp_path) as checkpoint:
        assert set(checkpoint) == set(where)
        assert checkpoint["b"].tolist() == [[3, 5, 7], [4, 6, 8]]
        assert np.may_share_memory(checkpoint["a"], checkpoint["b"])
        assert "ignored" not in checkpoint
        with pytest.raises(TensorNotFoundError):
            checkpoint["ignored"]
        assert checkpoint.nbytes == 24 + 24 + 8
        assert set(checkpoint.load(backend="pread")) == set(where)
    where["d"] = "two.bin"
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(FormatError, match=r"tensor 'd' should be in two\.bin"):
        safeload.open(tmp_path)


def test_torch_and_what_reads_pickles_are_not_imported(tmp_path):
    paths = []
    for k, content_of in enumerate(WAYS.values()):
        paths.append(tmp_path / f"{k}")
        paths[-1].write_bytes(content_of(MADE.value))
    code = (
        "import sys, safeload; before = set(sys.modules)\n"
        f"assert not {{'zipfile', {inside.path('unpickler')!r}, {inside.path('torch_zip')!r}}} & before, before\n"
        "for path in sys.argv[1:]:\n"
        "    safeload.open(path).load()\n"
        "    assert not any(name.split('.')[0] == 'torch' for name in sys.modules), path"
    )
    subprocess.run([sys.executable, "-c", code, *map(str, paths)], check=True, cwd=os.sep)


def test_a_pickle_that_torch_did_not_write(tmp_path):
    import pickle

    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UnsupportedError, match=r"a pickle that torch\.save did not write"):
        safeload.open(path)
    path.write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(ForbiddenError, match="getcwd"):
        safeload.open(path)
    with pytest.raises(UnsupportedError, match="did not write"):
        safeload.open(path, unknown_globals="inert")
