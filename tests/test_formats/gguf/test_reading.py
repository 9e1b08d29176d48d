"""Reading GGUF: against gguf-py, and what gguf-py does not read."""

import copy
import json
import pickle
import random

import gguf
import ml_dtypes
import numpy as np
import pytest
from builders import gguf_build as g
from builders.inside import dtypes, main
from builders.random import rng
from builders.thorough import part_of
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

import safeload
from safeload import FormatError, QuantizedTensor, UnsupportedError

ELEMENTS = {"F32": "f4", "F16": "f2", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}
BLOCKS = [kind for kind in GGMLQuantizationType if kind.name not in ELEMENTS and kind.name != "BF16"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def fields(path):
    """What gguf-py makes of the metadata, without what it adds itself."""
    reader = GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray) else value


def blocks(kind, shape):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return rng.integers(0, 256, (*shape[:-1], shape[-1] // block * size), np.uint8)


# ---- metadata ----


@pytest.mark.no_core
@pytest.mark.parametrize("name", part_of(["ggml-vocab-bert-bge.gguf", "ggml-vocab-phi-3.gguf"], 0, 2))
def test_vocabularies_have_the_metadata_that_gguf_py_reads(name, shared):
    path = shared / "gguf" / name
    want = fields(path)
    with safeload.open(path) as opened:
        assert (opened.format, len(opened), opened.nbytes) == ("gguf", 0, 0)
        metadata = opened.metadata
    assert list(metadata) == list(want)
    for key, value in want.items():
        assert plain(metadata[key]) == value, key
        assert metadata[key] is metadata[key]
    assert metadata == want


VALUES = {
    g.U8: (0, 255),
    g.I8: (-128, 127),
    g.U16: (0, 65535),
    g.I16: (-32768, 32767),
    g.U32: (0, 2**32 - 1),
    g.I32: (-(2**31), 2**31 - 1),
    g.F32: (0.1, -1e-45, float("inf")),
    g.BOOL: (False, True),
    g.STRING: ("", "ünï\0\n", "x" * 70_000),
    g.U64: (0, 2**64 - 1),
    g.I64: (-(2**63), 2**63 - 1),
    g.F64: (0.1, -5e-324, float("-inf")),
}


def test_metadata_of_every_type(path):
    entries = []
    for kind, values in VALUES.items():
        entries += [g.entry(f"{kind}.{k}", kind, value) for k, value in enumerate(values)]
        entries.append(g.entry(f"{kind}.array", g.ARRAY, (kind, values)))
        entries.append(g.entry(f"{kind}.empty", g.ARRAY, (kind, [])))
    path.write_bytes(g.build(entries))
    want = fields(path)
    metadata = safeload.open(path).metadata
    assert len(metadata) == len(entries)
    for kind, values in VALUES.items():
        for k in range(len(values)):
            value = metadata[f"{kind}.{k}"]
            assert value == want[f"{kind}.{k}"]
            assert isinstance(value, type(want[f"{kind}.{k}"]))
        array, empty = metadata[f"{kind}.array"], metadata[f"{kind}.empty"]
        assert plain(array) == want[f"{kind}.array"]
        assert plain(empty) == []
        if kind == g.STRING:
            assert isinstance(array, list)
        else:
            dtype = np.dtype(g.CODES[kind]) if kind != g.BOOL else np.dtype(bool)
            assert array.dtype == empty.dtype == dtype
            assert array.flags.writeable


def test_arrays_of_arrays(path):
    content = (g.ARRAY, [(g.I32, [1, -2]), (g.STRING, ["a", ""]), (g.BOOL, []), (g.F64, [0.5])])
    path.write_bytes(g.build([g.entry("n", g.ARRAY, content), g.entry("after", g.U8, 9)]))
    metadata = safeload.open(path).metadata
    value = metadata["n"]
    assert [plain(inner) for inner in value] == [[1, -2], ["a", ""], [], [0.5]]
    assert [getattr(inner, "dtype", None) for inner in value] == [np.int32, None, np.bool_, np.float64]
    assert metadata["after"] == 9
    # gguf-py, which flattens them, goes on at the same byte.
    content = (g.ARRAY, [(g.I32, [1, -2]), (g.I32, [3])])
    path.write_bytes(g.build([g.entry("n", g.ARRAY, content), g.entry("after", g.U8, 9)]))
    assert fields(path) == {"n": [1, -2, 3], "after": 9}
    assert [plain(inner) for inner in safeload.open(path).metadata["n"]] == [[1, -2], [3]]


def test_text_that_is_not_utf8_survives(path):
    tokens = [b"\xff\xfe", b"ok", "ö".encode()[:1]]
    path.write_bytes(g.build([g.entry("t", g.ARRAY, (g.STRING, tokens)), g.entry("s", g.STRING, b"\x80")]))
    metadata = safeload.open(path).metadata
    assert [token.encode("utf-8", "surrogateescape") for token in metadata["t"]] == tokens
    assert metadata["s"].encode("utf-8", "surrogateescape") == b"\x80"


def test_metadata_is_a_mapping_of_its_own(path):
    entries = [g.entry("a", g.U32, 1), g.entry("t", g.ARRAY, (g.STRING, ["x"] * 1000)), g.entry("v", g.STRING, "s")]
    path.write_bytes(g.build(entries))
    with safeload.open(path) as opened:
        metadata = opened.metadata
    path.unlink()  # it is not read again
    assert metadata["t"] == ["x"] * 1000
    assert repr(metadata) == "{'a': 1, 't': <array of 1,000>, 'v': 's'}"
    assert "a" in metadata
    assert "b" not in metadata
    assert metadata.get("b") is None
    with pytest.raises(KeyError):
        metadata["b"]
    assert metadata == dict(metadata) == pickle.loads(pickle.dumps(metadata)) == copy.deepcopy(metadata)
    assert metadata != {**metadata, "a": 2}
    assert metadata != {"a": 1}
    assert metadata != 5
    assert type(metadata["a"]).__name__ == "U32"  # what it is written as again
    assert json.loads(json.dumps({**metadata, "a": metadata["a"] + 1}))["a"] == 2
    assert metadata.stored("a") == bytes((4, 0, 0, 0, 1, 0, 0, 0))


def test_equality_looks_into_arrays(path):
    path.write_bytes(g.build([g.entry("n", g.ARRAY, (g.F32, [1.0, 2.0]))]))
    metadata = safeload.open(path).metadata
    assert metadata == safeload.open(path).metadata
    assert metadata == {"n": [1.0, 2.0]}
    assert metadata != {"n": [1.0, 2.5]}
    assert metadata != {"n": [1.0]}


def test_a_long_vocabulary_is_read_in_pieces(path):
    """Longer than what is read at first, with strings across every edge of the reads that follow."""
    random.seed(1)
    tokens = ["".join(random.choices("abcö", k=random.randrange(40))) for _ in range(60_000)]
    entries = [g.entry("t", g.ARRAY, (g.STRING, tokens)), g.entry("big", g.STRING, "z" * 3_000_000)]
    entries.append(g.entry("s", g.ARRAY, (g.F64, list(range(50_000)))))
    path.write_bytes(g.build(entries, [g.tensor("w", (3,), 0, 0)], bytes(12)))
    with safeload.open(path) as opened:
        assert opened.metadata["t"] == tokens
        assert len(opened.metadata["big"]) == 3_000_000
        assert opened.metadata["s"].sum() == sum(range(50_000))
        assert opened["w"].tolist() == [0, 0, 0]


# ---- tensors ----

SHAPES = [(256,), (512,), (3, 256), (2, 3, 512), (2, 1, 3, 256)]


def write_all(path, alignment=None):
    """By gguf-py: every type it knows in every number of dims."""
    writer = GGUFWriter(path, "test")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    want = {}
    for shape in SHAPES:
        for name, dtype in ELEMENTS.items():
            array = (rng.standard_normal(shape) * 50).astype(dtype)
            want[f"{name} {shape}"] = (name, shape, array)
            writer.add_tensor(f"{name} {shape}", array)
        array = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        want[f"BF16 {shape}"] = ("BF16", shape, array)
        writer.add_tensor(f"BF16 {shape}", array.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
        for kind in BLOCKS:
            data = blocks(kind, shape)
            want[f"{kind.name} {shape}"] = (kind.name, shape, data)
            writer.add_tensor(f"{kind.name} {shape}", data, raw_dtype=kind)
    writer.add_array("tokens", ["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return want


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
def test_every_type_and_shape_equals_gguf_py(path, alignment, backend):
    want = write_all(path, alignment)
    with safeload.open(path) as opened:
        loaded = opened.load(backend=backend)
        assert list(opened) == list(loaded) == list(want)
        for tensor in GGUFReader(path).tensors:
            name, shape, array = want[tensor.name]
            info, value = opened.tensors[tensor.name], loaded[tensor.name]
            assert (info.dtype, info.shape, info.nbytes) == (name, shape, tensor.n_bytes)
            assert info.offset == tensor.data_offset
            assert tuple(reversed(tensor.shape.tolist())) == shape
            if isinstance(value, QuantizedTensor):
                assert (value.scheme, value.shape) == (name.lower(), shape)
                data = value.data
            else:
                assert (value.dtype, value.shape) == (array.dtype, shape)
                data = value
            assert data.tobytes() == tensor.data.tobytes() == array.tobytes()
            assert data.flags.writeable
        assert opened.nbytes == sum(info.nbytes for info in opened.tensors.values())


def test_dtype_table_has_the_blocks_of_gguf_py():
    for kind in BLOCKS:
        row = dtypes.BLOCK_TYPES[kind.name.lower()]
        assert (row.block, row.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
        assert row.number == 64 + kind


def test_views_share_the_mapping_and_change_no_file(path):
    write_all(path)
    before = path.read_bytes()
    with safeload.open(path) as opened:
        array, quantized = opened["F32 (3, 256)"], opened["Q8_0 (3, 256)"]
        assert array is opened["F32 (3, 256)"]
        assert quantized is opened["Q8_0 (3, 256)"]
        assert not array.flags.owndata
        assert not quantized.data.flags.owndata
        array[:] = 0
        quantized.data[:] = 0
    assert array.sum() == 0  # closed, and still there
    assert path.read_bytes() == before


def test_slices(path):
    want = write_all(path)
    with safeload.open(path) as opened:
        part = opened.get_slice("F32 (2, 3, 512)")[1, ::2, 5:100:7]
        np.testing.assert_array_equal(part, want["F32 (2, 3, 512)"][2][1, ::2, 5:100:7])
        for name in ("Q4_0 (256,)", "Q4_0 (2, 3, 512)"):
            np.testing.assert_array_equal(opened.get_slice(name)[1:, ...], opened[name].dequantize()[1:])


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("scheme", ["Q4_0", "Q8_0"])
def test_loading_as_a_dtype_restores_blocks(path, scheme, backend):
    names = [f"{scheme} {shape}" for shape in SHAPES] + ["F16 (256,)", "I32 (256,)", "BF16 (3, 256)"]
    write_all(path)
    with safeload.open(path) as opened:
        got = opened.load(names, dtype="float32", backend=backend)
        into = {name: np.empty_like(array) for name, array in got.items()}
        filled = opened.load(names, dtype="float32", out=into)
        assert got["I32 (256,)"].dtype == np.int32
        for name in names[:-2]:
            value = opened[name]
            want = value.dequantize() if isinstance(value, QuantizedTensor) else value.astype(np.float32)
            np.testing.assert_array_equal(got[name].view(np.uint32), want.view(np.uint32))
            assert filled[name] is into[name]
            np.testing.assert_array_equal(filled[name].view(np.uint32), want.view(np.uint32))


def test_a_type_without_a_kernel_is_named(path):
    write_all(path)
    with safeload.open(path) as opened:
        with pytest.raises(UnsupportedError, match=r"cannot dequantize q8_k"):
            opened["Q8_K (256,)"].dequantize()
        with pytest.raises(UnsupportedError, match=r"'Q8_K \(256,\)': cannot convert Q8_K to F32"):
            opened.load(["Q8_K (256,)"], dtype="float32")


# ---- layouts of the file ----


def test_padding_between_tensors_and_any_order(path):
    """Tensors are listed in the order of their bytes; what lies between them belongs to none."""
    tensors = [g.tensor("late", (2,), 0, 256), g.tensor("early", (3,), 24, 64), g.tensor("new\nline", (1,), 24, 128)]
    data = bytearray(300)
    data[64:67], data[128], data[256:264] = b"\1\2\3", 9, np.float32([1.5, 2.5]).tobytes()
    path.write_bytes(g.build([], tensors, bytes(data)))
    with safeload.open(path) as opened:
        assert list(opened) == ["early", "new\nline", "late"]
        got = opened.load(backend="pread")
        assert {name: array.tolist() for name, array in got.items()} == {
            "early": [1, 2, 3],
            "new\nline": [9],
            "late": [1.5, 2.5],
        }
        assert opened["late"].tolist() == [1.5, 2.5]


def test_scalars_and_empty_tensors(path):
    tensors = [
        g.tensor("scalar", (), 0, 0),
        g.tensor("empty", (0, 3), 0, 32),
        g.tensor("empty blocks", (32, 0), 8, 32),
        g.tensor("after", (1,), 24, 32),
    ]
    path.write_bytes(g.build([], tensors, np.float32(1.5).tobytes() + bytes(28) + b"\7"))
    for backend in ("mmap", "pread", "direct"):
        got = safeload.load(path, backend=backend)
        assert got["scalar"].shape == ()
        assert got["scalar"] == 1.5
        assert got["empty"].shape == (3, 0)
        assert (got["empty blocks"].shape, got["empty blocks"].data.shape) == ((0, 32), (0, 34))
        assert got["after"].tolist() == [7]
        assert safeload.load(path, ["empty blocks"], dtype="float32")["empty blocks"].shape == (0, 32)


def test_without_tensors_the_data_may_begin_past_the_end(path):
    for alignment in (32, 2**30):
        path.write_bytes(g.build([g.entry("general.alignment", g.U32, alignment)]))
        with safeload.open(path) as opened:
            assert len(opened) == 0
            assert opened.load() == {}
            assert opened.metadata == {"general.alignment": alignment}
    path.write_bytes(g.build([g.entry("general.alignment", g.U32, 4096)], [g.tensor("w", (1,), 24, 0)]))
    with pytest.raises(FormatError, match="which has 0 bytes: 4007 of 4097 bytes are missing"):
        safeload.open(path)


def test_alignment_of_one_copies_what_is_not_aligned(path):
    entries = [g.entry("general.alignment", g.U32, 1)]
    path.write_bytes(g.build(entries, [g.tensor("w", (2,), 0, 1)], b"\0" + np.float32([1, 2]).tobytes(), alignment=1))
    for backend in ("mmap", "pread", "direct"):
        array = safeload.load(path, backend=backend)["w"]
        assert array.tolist() == [1, 2]
        assert array.flags.aligned


# ---- doors ----


def test_folders(path):
    path.write_bytes(g.build([g.entry("a", g.U32, 1)], [g.tensor("w", (2,), 24, 0)], b"\1\2"))
    (path.parent / "config.json").write_text('{"n": 1}')
    with safeload.open(path.parent) as opened:
        assert (opened.format, opened.files, opened.config) == ("gguf", [str(path)], {"n": 1})
        assert (dict(opened.metadata), opened["w"].tolist()) == ({"a": 1}, [1, 2])
    with safeload.open(path.parent, format="gguf") as opened:
        assert list(opened) == ["w"]
    with pytest.raises(UnsupportedError, match="no weights here"):
        safeload.open(path.parent, format="safetensors")


def test_the_suffix_says_nothing(path):
    path = path.with_suffix(".safetensors")
    path.write_bytes(g.build())
    assert safeload.open(path).format == "gguf"
    with pytest.raises(FormatError, match="this is a GGUF file, not a safetensors file"):
        safeload.numpy.load_file(path)
    with pytest.raises(FormatError, match="this is a GGUF file, not torch zip"):
        safeload.open(path, format="torch")
    with pytest.raises(UnsupportedError, match="root= selects a nested container, but gguf has none"):
        safeload.open(path, root="model")


def test_info(path, capsys):
    tokens = [f"token {k}" for k in range(20_000)]
    entries = [
        g.entry("general.name", g.STRING, "tiny"),
        g.entry("tokens", g.ARRAY, (g.STRING, tokens)),
        g.entry("scores", g.ARRAY, (g.F32, [float("nan"), 1.0])),
    ]
    path.write_bytes(g.build(entries, [g.tensor("w", (32, 2), 8, 0)], bytes(68)))
    assert main(["info", str(path)]) == 0
    out = capsys.readouterr().out
    assert "gguf, 1 tensor" in out
    assert "general.name: tiny" in out
    assert "tokens: 20,000 values, [" in out
    assert "w       Q8_0   [2, 32]" in out
    assert main(["info", "--json", str(path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["metadata"] == {"general.name": "tiny", "tokens": tokens, "scores": ["nan", 1.0]}
    assert shown["tensors"][0]["dtype"] == "Q8_0"
