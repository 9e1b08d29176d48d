"""Tensors of ggml types that this version does not know: the file opens, and only their values are refused."""

import pickle
import struct

import numpy as np
import pytest
from builders import gguf_build as g
from builders.inside import main

import safeload
from safeload import FormatError, UnsupportedError

pytestmark = pytest.mark.any_python

A, Z = np.arange(8, dtype=np.float32), np.arange(64, dtype=np.float32).reshape(8, 8)
REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 36: "IQ4_NL_4_4", 38: "IQ4_NL_8_8"}
SIZE = 608


def content(kind=99, dims=(256, 2), offset=32, more=(), entries=()):
    tensors = [g.tensor("a.weight", [8], 0, 0), g.tensor("q.weight", dims, kind, offset)]
    tensors += [g.tensor("z.weight", [8, 8], 0, 32 + SIZE), *more]
    return g.build(entries, tensors, A.tobytes() + bytes(range(256)) * 2 + bytes(SIZE - 512) + Z.tobytes())


@pytest.fixture
def path(tmp_path):
    (tmp_path / "m.gguf").write_bytes(content())
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("kind", [*REMOVED, 43, 63, 64, 99, 200, 2**31, 2**32 - 1])
def test_the_file_opens_and_the_values_are_refused(kind, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(content(kind))
    label = f"ggml type {kind} ({REMOVED[kind]}, removed)" if kind in REMOVED else f"ggml type {kind}"
    with safeload.open(path) as opened:
        assert list(opened) == ["a.weight", "q.weight", "z.weight"]
        info = opened.tensors["q.weight"]
        assert (info.dtype, info.shape, info.nbytes, info.np_dtype) == (label, (2, 256), SIZE, None)
        np.testing.assert_array_equal(opened["a.weight"], A)
        np.testing.assert_array_equal(opened.get_slice("z.weight")[3:, ::2], Z[3:, ::2])
        np.testing.assert_array_equal(opened.load(["z.weight"], dtype="float16")["z.weight"], Z)
        assert pickle.loads(pickle.dumps(opened)).keys() == opened.keys()
        with pytest.raises(UnsupportedError) as caught:
            opened.load()
        assert f"tensor 'q.weight': {label} is unknown to this version" in str(caught.value)
        assert caught.value.tensor == "q.weight"


READS = {
    "load": safeload.load,
    "stored": lambda path: safeload.load(path, stored=True),
    "dtype": lambda path: safeload.load(path, dtype="float32"),
    "only": lambda path: safeload.load(path, only="q.*"),
    "pread": lambda path: safeload.load(path, backend="pread"),
    "direct": lambda path: safeload.load(path, backend="direct"),
    "out": lambda path: safeload.load(path, dtype="float32", out={"q.weight": np.empty((2, 256), np.float32)}),
    "item": lambda path: safeload.open(path)["q.weight"],
    "slice": lambda path: safeload.open(path).get_slice("q.weight")[:1],
    "slice dtype": lambda path: safeload.open(path).get_slice("q.weight", dtype="float32")[0],
    "stream": lambda path: list(safeload.open(path).stream()),
    "stream ready": lambda path: list(safeload.open(path).stream(dtype="float16", order="ready")),
    "convert": lambda path: safeload.convert(path, path.with_suffix(".safetensors")),
    "convert dtype": lambda path: safeload.convert(path, path.with_suffix(".safetensors"), dtype="float16"),
    "convert gguf": lambda path: safeload.convert(path, path.with_name("o.gguf")),
    "convert npz": lambda path: safeload.convert(path, path.with_suffix(".npz")),
    "convert moon": lambda path: safeload.convert(path, path.with_suffix(".moon")),
    "convert shards": lambda path: safeload.convert(path, path.with_name("folder"), max_shard_size="1KB"),
    "convert renamed": lambda path: safeload.convert(
        path, path.with_suffix(".safetensors"), rename=lambda name: f"x.{name}"
    ),
    "quantize": lambda path: safeload.convert(path, path.with_suffix(".safetensors"), quantize="int8"),
    "quantize gguf": lambda path: safeload.convert(path, path.with_name("o.gguf"), quantize="q8_0"),
    "diff": lambda path: safeload.diff(path, {"q.weight": np.zeros((2, 256), np.float32)}),
}


@pytest.mark.parametrize("way", READS)
def test_every_way_to_read_it_is_refused_by_name(way, path):
    before = set(path.parent.iterdir())
    with pytest.raises(UnsupportedError, match=r"tensor 'q.weight': ggml type 99 is unknown to this version"):
        READS[way](path)
    assert set(path.parent.iterdir()) == before, "nothing is left behind"


def test_operations_on_the_others(path):
    got = safeload.load(path, drop="q.*")
    assert got.keys() == {"a.weight", "z.weight"}
    for suffix in ("safetensors", "gguf", "npz"):
        target = path.with_name(f"o.{suffix}")
        safeload.convert(path, target, drop="q.*")
        np.testing.assert_array_equal(safeload.load(target)["z.weight"], Z)
    assert safeload.stats(path).keys() == {"a.weight", "z.weight"}
    assert safeload.diff(path, got, only=["a.*", "z.*"]).same


def test_check_warns_and_the_other_commands_answer(path, capsys):
    report = safeload.check(path)
    assert report.ok
    assert [(one.code, one.tensor) for one in report.warnings] == [("file.unknown_type", "q.weight")]
    assert "ggml type 99 is unknown to this version: its values are not checked" in str(report)
    for arguments in (
        ["info"],
        ["info", "--json"],
        ["check"],
        ["stats"],
        ["report", "-o", str(path.with_suffix(".html"))],
    ):
        assert main([*arguments, str(path)]) == 0, arguments
        out, err = capsys.readouterr()
        assert not err
        assert "ggml type 99" in out or arguments[0] in ("stats", "report")
    for arguments in (["convert", str(path), str(path.with_name("o.gguf"))], ["diff", str(path), str(path)]):
        main(arguments)
        out, err = capsys.readouterr()
        assert "Traceback" not in err


def test_places_of_the_bytes(tmp_path):
    """They end where the next tensor begins, or the file does: bounds are checked, whatever the size is."""
    path = tmp_path / "m.gguf"
    path.write_bytes(
        g.build([], [g.tensor("q", [4], 77, 32), g.tensor("a.weight", [8], 0, 0)], A.tobytes() + bytes(40))
    )
    opened = safeload.open(path)
    assert opened.tensors["q"].nbytes == 40
    np.testing.assert_array_equal(opened["a.weight"], A)
    path = tmp_path / "beside.gguf"
    entries, tensors = (
        [g.entry("general.file_type", g.U32, 40)],
        [g.tensor("t", (128, 2), 36, 0), g.tensor("b", (32,), 37, 96)],
    )
    path.write_bytes(g.build(entries, tensors, bytes(160)))
    assert safeload.open(path).tensors["b"].nbytes == 64
    assert safeload.load(path, ["t"], dtype="float32")["t"].shape == (2, 128)
    path = tmp_path / "two.gguf"
    path.write_bytes(content(more=[g.tensor("r", [], 77, 32), g.tensor("s", [2**40], 43, 32)]))
    opened = safeload.open(path)
    assert sum(opened.tensors[name].nbytes for name in ("q.weight", "r", "s")) == SIZE
    assert (opened.tensors["r"].shape, opened.tensors["s"].shape) == ((), (2**40,))
    for offset in (2**20, 2**40, 2**63):
        path.write_bytes(content(offset=offset))
        with pytest.raises(FormatError, match=r"tensor 'q.weight'.*end past the data"):
            safeload.open(path)
    path.write_bytes(content(dims=(2**32, 2**33)))
    with pytest.raises(FormatError, match=r"tensor 'q.weight'.*number of elements does not fit in 64 bits"):
        safeload.open(path)
    path.write_bytes(content(offset=33))
    with pytest.raises(FormatError, match=r"not a multiple of the alignment"):
        safeload.open(path)


def test_beside_packed_tensors(tmp_path):
    """NVFP4 with its scale gets a table of its own, which knows the unknown type too."""
    blocks = bytes(36 * 2)
    tensors = [
        g.tensor("n.weight", [64, 2], 40, 0),
        g.tensor("n.scale", [1], 0, 96),
        g.tensor("q.weight", [32], 99, 128),
    ]
    data = blocks + bytes(24) + struct.pack("<f", 2) + bytes(28) + bytes(64)
    path = tmp_path / "m.gguf"
    path.write_bytes(g.build([], tensors, data))
    with safeload.open(path) as opened:
        assert opened.tensors["n.weight"].dtype == "nvfp4"
        assert opened.tensors["q.weight"].dtype == "ggml type 99"
        assert opened.load(["n.weight"], dtype="float32")["n.weight"].shape == (2, 64)
        with pytest.raises(UnsupportedError, match="ggml type 99 is unknown"):
            opened["q.weight"]


@pytest.mark.parametrize("scheme", ["q8_0", "q4_k", "int8", {"q.*": "q8_0"}])
@pytest.mark.parametrize("kind", [4, 99, 2**32 - 1])
def test_quantizing_names_the_tensor(kind, scheme, tmp_path):
    """Its type is no scheme of ours, so that nothing may look it up as one."""
    (tmp_path / "m.gguf").write_bytes(content(kind))
    with pytest.raises(UnsupportedError, match=rf"tensor 'q.weight' is ggml type {kind}"):
        safeload.load_quantized(tmp_path / "m.gguf", scheme)


@pytest.mark.parametrize("dims", [(256, 2), (1,), (2, 3, 4)])
@pytest.mark.parametrize("truncated", [False, True], ids=["at the next offset", "cut"])
def test_a_tensor_without_bytes_is_an_error(dims, truncated, tmp_path, capsys):
    """Nothing says how long blocks of an unknown type are, but they are not empty."""
    path = tmp_path / "m.gguf"
    tensors = [g.tensor("a.weight", [8], 0, 0), g.tensor("q.weight", dims, 99, 32)]
    more = [] if truncated else [g.tensor("z.weight", [8, 8], 0, 32)]
    path.write_bytes(g.build([], tensors + more, A.tobytes() + (b"" if truncated else Z.tobytes())))
    report = safeload.check(path)
    assert [(one.code, one.tensor) for one in report.errors] == [("file.unknown_type", "q.weight")]
    assert "has no bytes" in str(report)
    assert main(["check", str(path)]) != 0
    np.testing.assert_array_equal(safeload.load(path, only="a.*")["a.weight"], A)


def test_an_empty_tensor_has_no_bytes(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(g.build([], [g.tensor("a.weight", [8], 0, 0), g.tensor("q.weight", (0, 2), 99, 32)], A.tobytes()))
    assert safeload.check(path).ok
