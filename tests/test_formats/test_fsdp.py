"""Rank files of FSDP: what torch wrote, meshes made here, and folders with a fault."""

import contextlib
import math
import os
import pickle
import shutil
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from builders.paths import ROOT
from builders.random import rng
from builders.torch_build import Call, Ref, Storage, tensor, zip_file

import safeload
from safeload.errors import (
    ForbiddenError,
    FormatError,
    LimitError,
    MissingShardError,
    SafeloadError,
    TensorNotFoundError,
    UnsupportedError,
)

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

# tests/data/fsdp/compare.sh lets torch write all fixtures anew.
DATA = Path(os.environ.get("SAFELOAD_FSDP_FIXTURES") or ROOT / "tests" / "data" / "fsdp")
FIXTURES = sorted(path.stem for path in DATA.glob("*.safetensors"))


def check_tensors(arrays, want):
    assert sorted(arrays) == sorted(want)
    for name, array in want.items():
        got = arrays[name]
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


@pytest.mark.parametrize("fixture", FIXTURES)
def test_the_tensors_are_the_whole_ones(fixture, tmp_path):
    want = safeload.load(DATA / f"{fixture}.safetensors")
    with safeload.open(DATA / fixture) as opened:
        assert (opened.format, opened.notes, opened.metadata) == ("fsdp", [], {})
        check_tensors(opened.load(), want)
        check_tensors(dict(opened.stream()), want)
        assert all(opened.named_globals.values())
        assert opened.get_slice("rows")[3:6, 1].tolist() == want["rows"][3:6, 1].tolist()
        assert (opened.take("rows", [6, 0]) == want["rows"][[6, 0]]).all()
        check_tensors(pickle.loads(pickle.dumps(opened)).load(), want)
    with ProcessPoolExecutor(1) as executor:
        safeload.convert(DATA / fixture, tmp_path / "out", max_shard_size=300, executor=executor)
    check_tensors(safeload.load(tmp_path / "out"), want)
    assert not safeload.check(DATA / fixture).errors


# ---- meshes made here ----

PLACEMENTS = "torch.distributed.tensor.placement_types"


def placed(text):
    """A placement: "0" divides axis 0, "r" nothing, "s0" in strides."""
    if text == "r":
        return Call(Ref(PLACEMENTS, "Replicate"))
    kind = "_StridedShard" if text[0] == "s" else "Shard"
    return Call(Ref(PLACEMENTS, kind), state={"dim": int(text[-1])})


def local_part(array, placements, sizes, position):
    """A process's part, by torch.chunk."""
    for text, parts, k in zip(placements, sizes, position, strict=True):
        if text != "r":
            axis = int(text)
            step = max(1, -(-array.shape[axis] // parts))
            begin, end = (min(at * step, array.shape[axis]) for at in (k, k + 1))
            array = np.take(array, range(begin, end), axis)
    return array


def dtensor(array, shape, placed_as, sizes, position, *, old=False, **spec):
    mesh = {"_coordinate_on_dim": tuple(position)}
    if old:
        mesh["mesh"] = tensor(Storage("mesh", np.arange(math.prod(sizes), dtype=np.int32)), sizes)
    else:
        axes = tuple(Call(Ref("torch.distributed._mesh_layout", "_FlatLayout"), state={"shape": (n,)}) for n in sizes)
        mesh["_layout"] = Call(Ref("torch.distributed._mesh_layout", "_MeshLayout"), state={"axes": axes})
    fields = {
        "mesh": Call(Ref("torch.distributed.device_mesh", "DeviceMesh"), state=mesh),
        "placements": tuple(map(placed, placed_as)),
        **spec,
    }
    kind = Ref("torch.distributed._tensor.api" if old else "torch.distributed.tensor", "DTensor")
    part = tensor(Storage(str(id(array)), array.ravel()), array.shape)
    state = {"_local_tensor": part, "_spec": Call(Ref("torch.distributed._tensor", "DTensorSpec"), state=fields)}
    arguments = kind, Ref("torch", "float32"), Call(Ref("torch", "Size"), shape), (), 0, None, "cpu", False
    wrapper = Ref("torch._utils", "_rebuild_wrapper_subclass")
    return Call(Ref("torch._tensor", "_rebuild_from_type_v2"), wrapper, kind, arguments, state)


def write(folder, values):
    folder.mkdir(exist_ok=True)
    for rank, value in enumerate(values):
        (folder / f"model_world_size_{len(values)}_rank_{rank}.pt").write_bytes(zip_file(value))
    return folder


@pytest.mark.parametrize("old", [False, True])
def test_random_meshes_give_the_whole(old, tmp_path):
    for k in range(15):
        sizes = tuple(map(int, rng.integers(1, 4, int(rng.integers(1, 3)))))
        values, want, kept = [{} for _ in range(math.prod(sizes))], {}, []
        for number in range(3):
            shape = tuple(map(int, rng.integers(1, 8, int(rng.integers(1, 4)))))
            array = rng.standard_normal(shape).astype(np.float32)
            placements = [str(rng.choice(["r", *map(str, range(len(shape)))])) for _ in sizes]
            want[f"layer.{number}"] = array
            for value, position in zip(values, np.ndindex(sizes), strict=True):
                kept.append(np.ascontiguousarray(local_part(array, placements, sizes, position)))
                part = kept[-1].reshape(local_part(array, placements, sizes, position).shape)
                value[f"layer.{number}"] = dtensor(part, shape, placements, sizes, position, old=old)
                kept.append(part)
        check_tensors(safeload.load(write(tmp_path / str(k), values)), want)


WHOLE = np.arange(12, dtype=np.float32).reshape(4, 3)


def two(first=None, **spec):
    """The values of two processes, the first replaced or with another spec."""
    values = [{"w": dtensor(WHOLE[2 * k : 2 * k + 2].copy(), (4, 3), ["0"], (2,), (k,), **spec)} for k in range(2)]
    return values if first is None else [{"w": first}, values[1]]


ONE = WHOLE[:2].copy()
ORDER = (Call(Ref("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry"), 0, (1, 0)),)
NESTED = {}
for _ in range(66):
    NESTED = {"a": NESTED or 1}
PART = dtensor(ONE, (2, 3), ["r"], (2,), (0,))
FROM_TYPE = Ref("torch._tensor", "_rebuild_from_type_v2")
VALID = tensor(Storage("valid", ONE.ravel()), ONE.shape)
WITHIN: tuple = (VALID.function, Ref("torch", "Tensor"), VALID.args, {})  # the arguments of a tensor with attributes
FAULTS = {
    "long positions": (two(dtensor(ONE, (4, 3), ["0"], (2,), (0,) * 32)), FormatError, "up to 31 numbers"),
    "too deep": (two(NESTED), LimitError, "more than 64 levels of dicts"),
    "in a list": (two({"a": [1, PART]}), UnsupportedError, "in a list or another object"),
    "two values of a name": (two({1: dtensor(ONE, (2, 3), ["r"], (2,), (0,)), "1": 5}), FormatError, "named 'w.1'"),
    "strided": (two(dtensor(ONE, (4, 3), ["s0"], (2,), (0,))), UnsupportedError, "placed as '_StridedShard' of axis 0"),
    "another axis": (two(dtensor(ONE, (4, 3), ["2"], (2,), (0,))), UnsupportedError, "'Shard' of axis 2"),
    "another order": (two(shard_order=ORDER), UnsupportedError, "in another order than its mesh"),
    "another part": (two(dtensor(ONE, (4, 3), ["1"], (2,), (0,))), FormatError, r"should have \[4, 2\] of \[4, 3\]"),
    "another place": (two(dtensor(ONE, (4, 3), ["0"], (2,), (1,))), FormatError, "6 of 12 elements are in none"),
    "outside the mesh": (two(dtensor(ONE, (4, 3), ["0"], (2,), (7,))), FormatError, r"should have \[0, 3\]"),
    "no position": (two(dtensor(ONE, (4, 3), ["0"], (2,), ())), FormatError, "placements on a mesh"),
    "another shape": (
        two(dtensor(ONE, (3, 3), ["0"], (2,), (0,))),
        FormatError,
        "but F32 .* in another file",
    ),
    "huge": (two(dtensor(ONE, (1 << 61, 3), ["0"], (2,), (0,))), FormatError, "should have"),
    "negative": (two(dtensor(ONE, (-4, 3), ["0"], (2,), (0,))), FormatError, "must be up to 31 numbers"),
    "no mesh": (two(mesh=None), UnsupportedError, "mesh of unknown size"),
    "no placements": (two(placements=None), FormatError, "placements on a mesh"),
    "no tensor": (two(Call(FROM_TYPE, 1, 2, 3)), FormatError, "takes 4 arguments, got 3"),
    "itself": (
        two(Call(FROM_TYPE, FROM_TYPE, Ref("torch", "Tensor"), WITHIN, {})),
        FormatError,
        "takes a function that makes a tensor",
    ),
    "another class": (
        two(Call(FROM_TYPE, VALID.function, Ref("torch.distributed", "Part"), VALID.args, {})),
        UnsupportedError,
        "is a 'Part', which safeload does not know",
    ),
    "a container as a tensor": (
        two(Call(FROM_TYPE, Ref("collections", "OrderedDict"), Ref("torch", "Tensor"), (), {})),
        FormatError,
        "takes a function that makes a tensor",
    ),
    "a global": ([{"w": Call(Ref("os", "system"), "x")}] * 2, ForbiddenError, r"os\.system"),
    "a list": ([[1], [2]], FormatError, "expected a dict"),
    "a strange name": ([{None: 1}] * 2, FormatError, "a name must be text"),
    "other plain tensors": (
        [{"w": tensor(Storage("0", np.ones(n, np.float32)))} for n in (2, 3)],
        FormatError,
        r"is F32 \[3\] here, but F32 \[2\] in another file",
    ),
}


def test_attributes_of_a_tensor_leave_it_whole(tmp_path):
    values = [{"w": Call(FROM_TYPE, *WITHIN)}] * 2
    assert safeload.load(write(tmp_path / "a", values))["w"].tolist() == ONE.tolist()


def test_shared_dicts_are_a_limit(tmp_path):
    shared = b"}X\1\0\0\0xK\1s"  # {"x": 1}, and 40 times a dict that has the last one twice
    pickled = b"\x80\2" + shared
    for k in range(40):
        get = b"j" + k.to_bytes(4, "little")
        pickled += b"r" + get[1:] + b"0}(X\1\0\0\0a" + get + b"X\1\0\0\0b" + get + b"u"
    with zipfile.ZipFile(tmp_path / "model_world_size_1_rank_0.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickled + b".")
        archive.writestr("archive/version", "3\n")
    with pytest.raises(LimitError, match="values when shared dicts are unfolded"):
        safeload.open(tmp_path)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_name(fault, tmp_path):
    values, kind, message = FAULTS[fault]
    with pytest.raises(kind, match=message) as caught:
        safeload.load(write(tmp_path / "a", values))
    assert str(tmp_path) in str(caught.value)


def test_other_values_are_metadata_and_containers_are_roots(tmp_path):
    inner = [{"model": {"w": value["w"], "note": "text"}, "step": 3} for value in two()]
    folder = write(tmp_path / "a", inner)
    with safeload.open(folder) as opened:
        assert list(opened) == ["model.w"]
        assert opened.metadata == {"model.note": "text", "step": 3}
    assert safeload.load(folder, root="model")["w"].tolist() == WHOLE.tolist()
    with pytest.raises(TensorNotFoundError, match="no container 'x' with tensors"):
        safeload.open(folder, root="x")


def test_a_missing_rank_and_two_jobs_are_named(tmp_path):
    folder = write(tmp_path / "a", two())
    (folder / "model_world_size_2_rank_0.pt").rename(tmp_path / "other")
    with pytest.raises(MissingShardError, match="1 of 2 rank files are there; the first problem is rank 0"):
        safeload.open(folder)
    (tmp_path / "other").rename(folder / "model_world_size_3_rank_0.pt")
    with pytest.raises(UnsupportedError, match="rank files of jobs with 2 and 3 processes"):
        safeload.open(folder)


def test_bytes_cut_or_changed_anywhere_never_crash(tmp_path):
    for fixture in FIXTURES:
        shutil.copytree(DATA / fixture, tmp_path / fixture)
        path = next(iter(sorted((tmp_path / fixture).iterdir())))
        content = path.read_bytes()
        for size in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:size])
            with pytest.raises(SafeloadError):
                safeload.load(tmp_path / fixture)
        for _ in range(20):
            bent = bytearray(content)
            bent[int(rng.integers(len(bent)))] = int(rng.integers(256))
            path.write_bytes(bent)
            with contextlib.suppress(SafeloadError):
                safeload.load(tmp_path / fixture)
