"""Paddle's .pdparams and .pdopt: what Paddle wrote, parts of large arrays, folders, and files with a fault."""

import json
import os
import pickle
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.paths import ROOT
from builders.random import rng
from builders.thorough import part_of

import safeload
from safeload.errors import ForbiddenError, FormatError, MissingShardError, SafeloadError, UnsupportedError

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

# tests/data/paddle/compare.sh lets Paddle write all fixtures anew.
DATA = Path(os.environ.get("SAFELOAD_PADDLE_FIXTURES") or ROOT / "tests" / "data" / "paddle")
FILES = sorted(path.name.removesuffix(".safetensors") for path in DATA.glob("*.safetensors"))
NAMES, PARTS = "StructuredToParameterName@@", "UnpackBigParamInfor@@"


def check_tensors(arrays, want):
    assert sorted(arrays) == sorted(want)
    for name, array in want.items():
        got = arrays[name]
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


def expected(name):
    """What Paddle gives; safetensors for NumPy has no bfloat16, so make.py stores its bits."""
    arrays = safeload.load(DATA / f"{name}.safetensors")
    return {n: a.view(ml_dtypes.bfloat16) if a.dtype == np.uint16 else a for n, a in arrays.items()}


@pytest.mark.parametrize("name", FILES)
def test_every_way_to_read_gives_what_paddle_gives(name, tmp_path):
    want = expected(name)
    with safeload.open(DATA / name) as opened:
        assert opened.format == "pickle"
        assert list(opened.metadata) == [NAMES]
        check_tensors(opened.load(), want)
        check_tensors(dict(opened.stream()), want)
        check_tensors(pickle.loads(pickle.dumps(opened)).load(), want)
        if "2.weight" in want:
            assert opened.get_slice("2.weight")[1:, 3:9].tobytes() == want["2.weight"][1:, 3:9].tobytes()
            assert (opened.take("2.weight", [2, 0]) == want["2.weight"][[2, 0]]).all()
    with ProcessPoolExecutor(1) as executor:
        safeload.convert(DATA / name, tmp_path / "out", max_shard_size=200, executor=executor)
    check_tensors(safeload.load(tmp_path / "out"), want)
    assert not safeload.check(DATA / name).errors


def write(path, value, protocol=4):
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def test_the_suffix_or_the_key_says_that_16_bits_are_bfloat16(tmp_path):
    bits = np.array([0x3F80, 0xC000], np.uint16)
    want = {"w": bits.view(ml_dtypes.bfloat16)}
    check_tensors(safeload.load(write(tmp_path / "a.pdparams", {"w": bits})), want)
    check_tensors(safeload.load(write(tmp_path / "a.bin", {"w": bits, NAMES: {}})), want)
    check_tensors(safeload.load(write(tmp_path / "a.pkl", {"w": bits})), {"w": bits})
    nested = write(tmp_path / "b.pdopt", {"master_weights": {"w": bits}, "LR_Scheduler": {"last_lr": 0.1}})
    check_tensors(safeload.load(nested), {"master_weights.w": want["w"]})
    check_tensors(safeload.load(nested, root="master_weights"), want)


def parts_of(array, sizes, name="w", **more):
    """A dict with an array in parts, and another one."""
    flat, at, state = array.ravel(), 0, {"b": np.arange(3, dtype=np.float32)}
    for k, size in enumerate(sizes):
        state[f"{name}@@.{k}"] = flat[at : at + size]
        at += size
    about = {"OriginShape": array.shape, "slices": [f"{name}@@.{k}" for k in range(len(sizes))], **more}
    return {**state, PARTS: {name: about}}


ARRAY = rng.standard_normal((6, 7)).astype(np.float32)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("sizes", [(42,), (41, 1), (7,) * 6, (1,) * 42])
def test_parts_of_every_size_are_joined(sizes, protocol, tmp_path):
    path = write(tmp_path / "w.pdparams", parts_of(ARRAY, sizes), protocol)
    want = {"w": ARRAY, "b": np.arange(3, dtype=np.float32)}
    with safeload.open(path) as opened:
        check_tensors(opened.load(), want)
        assert (opened.get_slice("w")[2:5, 1:6] == ARRAY[2:5, 1:6]).all()
        check_tensors(pickle.loads(pickle.dumps(opened)).load(), want)


def changed(**fields):
    return lambda: parts_of(ARRAY, (40, 2), **fields)


def without(name):
    def make():
        state = parts_of(ARRAY, (40, 2))
        del state[name]
        return state

    return make


def with_part(part):
    return lambda: {**parts_of(ARRAY, (40, 2)), "w@@.1": part}


FAULTS = {
    "a missing part": (without("w@@.1"), FormatError, r"its part 'w@@.1' does not exist"),
    "a part twice": (changed(slices=["w@@.0", "w@@.0"]), FormatError, "is used twice"),
    "too few elements": (changed(slices=["w@@.0"]), FormatError, "its parts have 40 elements"),
    "another shape": (changed(OriginShape=(6, 8)), FormatError, "has 48"),
    "a huge shape": (changed(OriginShape=(1 << 62, 1 << 62)), SafeloadError, "elements"),
    "a negative shape": (changed(OriginShape=(-6, -7)), FormatError, "must have slices and OriginShape"),
    "a shape of text": (changed(OriginShape=("6", "7")), FormatError, "must have slices and OriginShape"),
    "no shape": (changed(OriginShape=None), FormatError, "must have slices and OriginShape"),
    "no parts": (changed(slices=[]), FormatError, "must have slices and OriginShape"),
    "parts that are no list": (changed(slices="w@@.0"), FormatError, "must have slices and OriginShape"),
    "parts that are numbers": (changed(slices=[0, 1]), FormatError, "must have slices and OriginShape"),
    "a part of two axes": (with_part(np.zeros((1, 2), np.float32)), FormatError, "expected a vector of F32"),
    "a part of another dtype": (with_part(np.zeros(2, np.float64)), FormatError, "a part is F64"),
    "a part that is no array": (with_part("text"), FormatError, "does not exist"),
    "information that is no dict": (lambda: {"w": ARRAY, PARTS: [1]}, FormatError, "must be a dict"),
    "fields that are no dict": (lambda: {"w": ARRAY, PARTS: {"w": 1}}, FormatError, "must have slices"),
    "a name that is a number": (
        lambda: {"w": ARRAY.ravel(), PARTS: {1: {"slices": ["w"], "OriginShape": (42,)}}}, FormatError, "must have"),
    "a tensor whole and in parts": (
        lambda: {**parts_of(ARRAY, (40, 2)), "w": ARRAY}, FormatError, "is stored whole and in parts"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_name(fault, tmp_path):
    make, error, says = FAULTS[fault]
    for protocol in (2, 4):
        path = write(tmp_path / "w.pdparams", make(), protocol)
        with pytest.raises(error, match=says):
            safeload.open(path)


@pytest.mark.parametrize("which", [[0], [1], [0, 1]])
def test_a_part_that_cannot_be_read_makes_one_tensor_unreadable(which, tmp_path):
    state = parts_of(ARRAY, (40, 2))
    state |= {f"w@@.{k}": np.array([{}] * (40, 2)[k]) for k in which}
    path = write(tmp_path / "w.pdparams", state)
    with safeload.open(path) as opened:
        assert opened.tensors["w"].shape == ARRAY.shape
        check_tensors(opened.load(["b"]), {"b": state["b"]})
        for read in (
            lambda: opened["w"],
            opened.load,
            lambda: opened.load(dtype="float32"),
            lambda: opened.take("w", [0]),
        ):
            with pytest.raises(UnsupportedError, match=r"'w'.*object"):
                read()


def test_a_part_of_another_byte_order_is_swapped(tmp_path):
    path = write(tmp_path / "w.pdparams", with_part(ARRAY.ravel()[40:].astype(">f4"))())
    assert safeload.load(path)["w"].tobytes() == ARRAY.tobytes()


@pytest.mark.skipif(os.name == "nt", reason="large pickles are mapped on POSIX")
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_larger_than_memory_allows_is_mapped(protocol, tmp_path, monkeypatch):
    """With a limit of 64 KiB in place of 1 GiB."""
    large = rng.standard_normal((300, 400)).astype(np.float32)
    state = {
        **parts_of(large, (60_000, 60_000)),
        "small": ARRAY,
        "swapped": large.astype(">f4"),
        "blob": b"x" * 100_000,
    }
    path = write(tmp_path / "w.pdparams", state, protocol)
    want = {"w": large, "b": np.arange(3, dtype=np.float32), "small": ARRAY, "swapped": large}
    check_tensors(safeload.load(path), want)
    monkeypatch.setattr(inside.unpickler, "MAX_PICKLE", 1 << 16)
    with safeload.open(path) as opened:
        check_tensors(opened.load(), want)
        repr(opened.metadata)
        check_tensors(pickle.loads(pickle.dumps(opened)).load(), want)
    content = path.read_bytes()
    for size in range(0, len(content), 150_001):
        path.write_bytes(content[:size])
        with pytest.raises(SafeloadError):
            safeload.load(path)
    path.write_bytes(pickle.dumps({"w": large, "x": Attack(tmp_path / "done")}, protocol))
    with pytest.raises(ForbiddenError):
        safeload.open(path)
    assert not (tmp_path / "done").exists()


class Attack:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_nothing_is_executed(protocol, tmp_path):
    state = {**parts_of(ARRAY, (40, 2)), "x": Attack(tmp_path / "done")}
    path = write(tmp_path / "w.pdparams", state, protocol)
    with pytest.raises(ForbiddenError):
        safeload.open(path)
    check_tensors(safeload.load(path, unknown_globals="inert", only=["w"]), {"w": ARRAY})
    assert not (tmp_path / "done").exists()


def test_folders_of_paddlenlp_open(tmp_path):
    single = tmp_path / "single"
    single.mkdir()
    (single / "config.json").write_text('{"architectures": ["A"]}')
    shutil.copy(DATA / "net4.pdparams", single / "model_state.pdparams")
    shutil.copy(DATA / "net.pdopt", single / "optimizer.pdopt")
    with safeload.open(single) as opened:
        check_tensors(opened.load(), expected("net4.pdparams"))
        assert opened.config == {"architectures": ["A"]}
    shards = tmp_path / "shards"
    shards.mkdir()
    want = {"a": ARRAY, "b": ARRAY[0]}
    names = {}
    for k, (name, array) in enumerate(want.items()):
        file = f"model_state-0000{k + 1}-of-00002.pdparams"
        write(shards / file, {name: array})
        names[name] = file
    check_tensors(safeload.load(shards), want)
    (shards / "model_state.pdparams.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with safeload.open(shards) as opened:
        check_tensors(opened.load(), want)
        assert opened.index.endswith("index.json")
    (shards / "model_state.pdparams.index.json").unlink()
    (shards / "model_state-00001-of-00002.pdparams").unlink()
    with pytest.raises(MissingShardError, match=r"model_state-00001-of-00002\.pdparams"):
        safeload.open(shards)
    write(single / "other.pdparams", {"a": ARRAY})
    (single / "model_state.pdparams").rename(single / "first.pdparams")
    with pytest.raises(UnsupportedError, match=r"2 Paddle files: first\.pdparams, other\.pdparams"):
        safeload.open(single)


@pytest.mark.parametrize("name", ["net4.pdparams", "parts2.pdparams", "parts3.pdparams"])
def test_a_byte_changed_or_a_file_cut_anywhere_never_crashes(name, tmp_path):
    content = (DATA / name).read_bytes()
    path = tmp_path / name
    for at in part_of(range(0, len(content), 23), 0, 2):
        path.write_bytes(content[:at])
        with pytest.raises(SafeloadError):
            safeload.load(path)
        for value in (0, 0xFF, content[at] ^ 1):
            path.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
            try:
                with safeload.open(path) as opened:
                    opened.load()
            except SafeloadError:
                pass
