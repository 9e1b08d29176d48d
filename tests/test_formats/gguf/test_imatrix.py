"""Importance matrices: both formats, what llama-quantize makes of their numbers, and damaged files."""

import struct

import numpy as np
import pytest
from builders.inside import mixtures, rules
from builders.llama_quantize import model, save_imatrix
from builders.random import rng

import safeload
from safeload import FormatError, SafeloadError, gguf

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]


def entry(name, calls, values):
    return struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, len(values)) + np.float32(values).tobytes()


def of_entries(*entries):
    return struct.pack("<i", len(entries)) + b"".join(entries)


METADATA = {"imatrix.datasets": ["a"], "imatrix.chunk_count": np.uint32(2), "imatrix.chunk_size": np.uint32(512)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("older", [False, True])
def test_both_formats_are_read(folder, older):
    tensors, _ = model(layers=1, experts=2)
    save_imatrix("m", tensors, older=older)
    matrix = rules.read_importance("m")
    assert matrix.vectors["blk.0.ffn_up_exps.weight"].shape == (512,)
    assert matrix.datasets[0] == "wiki.txt"
    assert matrix.chunks == (3 if older else 9)
    assert list(matrix.metadata()) == [
        f"quantize.imatrix.{key}" for key in ("file", "dataset", "entries_count", "chunks_count")
    ]


def test_sums_are_divided_by_counts(folder):
    sums = np.float32([[2, 4], [6, 9], [1, 1]])
    gguf.save_file({"w.in_sum2": sums, "w.counts": np.float32([[2], [2.5], [0]])}, "m.gguf", METADATA)
    np.testing.assert_array_equal(rules.read_importance("m.gguf").vectors["w"], np.float32([1, 2, 2, 3, 1, 1]))
    content = of_entries(entry(b"a", 4, [2, 4]), entry(b"b", 0, [2, 4]), entry(b"c", -1, [5]))
    vectors = mixtures.of_dat("m", content).vectors
    assert {name: vector.tolist() for name, vector in vectors.items()} == {"a": [0.5, 1], "b": [2, 4], "c": [5]}


@pytest.mark.parametrize(
    "tail", [b"", b"\1", struct.pack("<i", 7), struct.pack("<ii", 7, 4) + b"ab", struct.pack("<ii", 7, -1)]
)
def test_the_end_of_the_older_format_is_optional(tail):
    matrix = mixtures.of_dat("m", of_entries(entry(b"a", 1, [2])) + tail)
    assert matrix.datasets == ()
    assert matrix.chunks == (7 if len(tail) >= 4 else 0)


def test_long_texts_are_cut_like_those_of_llama_quantize():
    matrix = mixtures.of_dat("é" * 100, of_entries(entry(b"a", 1, [2])))
    assert matrix.metadata()["quantize.imatrix.file"] == "é" * 63
    assert list(matrix.metadata()) == ["quantize.imatrix.file", "quantize.imatrix.entries_count"]


GOOD = of_entries(entry(b"a", 1, [2, 3]), entry(b"bc", 1, [4])) + struct.pack("<ii", 3, 1) + b"d"


@pytest.mark.parametrize("size", range(len(of_entries(entry(b"a", 1, [2, 3]), entry(b"bc", 1, [4])))))
def test_a_cut_file_is_refused(size):
    with pytest.raises(FormatError):
        mixtures.of_dat("m", GOOD[:size])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<i", 0) + bytes(40), "0 entries in 44 bytes"),
        (struct.pack("<i", -1) + bytes(40), "-1 entries"),
        (struct.pack("<i", 2**31 - 1) + bytes(40), "2,147,483,647 entries"),
        (struct.pack("<ii", 1, -5) + bytes(40), "needs -5 bytes"),
        (struct.pack("<ii", 1, 2**31 - 1) + bytes(40), "needs 2,147,483,647 bytes"),
        (struct.pack("<iicii", 1, 1, b"a", 1, 2**31 - 1) + bytes(40), "needs 8,589,934,588 bytes"),
        (struct.pack("<iicii", 1, 1, b"a", 1, 0) + bytes(40), "entry 0 has 0 values"),
        (struct.pack("<iicii", 1, 1, b"\xff", 1, 1) + bytes(40), "the name of entry 0 is not UTF-8"),
        (of_entries(entry(b"a", 1, [2]), entry(b"a", 1, [2])), "two entries for 'a'"),
        (of_entries(entry(b"a", 1, [np.nan])), "importance of 'a' is nan at 0"),
        (of_entries(entry(b"a", 1, [1, -2])), "importance of 'a' is -2.0 at 1"),
        (b"GGUM" + bytes(40), "neither GGUF nor an importance matrix"),
        (b"", "needs 4 bytes, but 0 are left"),
    ],
)
def test_damaged_files_are_refused(folder, content, message):
    (folder / "m.dat").write_bytes(content)
    with pytest.raises(FormatError, match=message):
        rules.read_importance("m.dat")


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({}, METADATA, "has no entries"),
        ({"w": [[1.0]]}, METADATA, "has no entries"),
        ({"w.in_sum2": [[1.0]]}, METADATA, "'w' has only one of .in_sum2 and .counts"),
        ({"w.counts": [[1.0]]}, METADATA, "'w' has only one of"),
        ({"w.in_sum2": [[1.0, 2, 3]], "w.counts": [[1.0], [1]]}, METADATA, "'w' has 3 sums and 2 counts"),
        ({"w.in_sum2": [[1.0]], "w.counts": [[np.inf]]}, METADATA, "a count of 'w' is not finite"),
        ({"w.in_sum2": [[np.inf]], "w.counts": [[1.0]]}, METADATA, "importance of 'w' is inf at 0"),
        ({"w.in_sum2": [[1.0]], "w.counts": [[1.0]]}, {}, "the metadata has no imatrix.datasets"),
        *(
            (
                {"w.in_sum2": [[1.0]], "w.counts": [[1.0]]},
                METADATA | {"imatrix.chunk_count": count},
                "must be an unsigned",
            )
            for count in ("2", -1, np.int64(1 << 32), np.array([1, 2], np.uint32))
        ),
    ],
)
def test_files_that_are_no_matrix_are_refused(folder, tensors, metadata, message):
    arrays = {name: np.float32(value) for name, value in tensors.items()}
    gguf.save_file(arrays, "m.gguf", metadata)
    with pytest.raises(SafeloadError, match=message):
        rules.read_importance("m.gguf")


def test_sums_must_be_float32(folder):
    gguf.save_file({"w.in_sum2": np.float16([[1]]), "w.counts": np.float32([[1]])}, "m.gguf", METADATA)
    with pytest.raises(FormatError, match="sums and counts of 'w' must be float32"):
        rules.read_importance("m.gguf")
    blocks = safeload.quantize(np.ones((1, 32), np.float32), "q8_0")
    gguf.save_file({"w.in_sum2": blocks, "w.counts": np.float32([[1]])}, "m.gguf", METADATA)
    with pytest.raises(FormatError, match="sums and counts of 'w' must be float32"):
        rules.read_importance("m.gguf")


def test_a_vector_must_fit_its_tensor():
    content = of_entries(*(entry(name, 1, np.ones(6)) for name in (b"w", b"token_embd.weight")))
    matrix = mixtures.of_dat("m", content)
    vectors = rules.vectors_for(matrix, {"other": (2, 6), "w": (3, 6), "token_embd.weight": (2, 8)})
    assert {name: vector.shape for name, vector in vectors.items()} == {"w": (1, 6)}
    assert rules.vectors_for(matrix, {"w": (2, 3, 3)})["w"].shape == (2, 3)
    with pytest.raises(FormatError, match="importance of 'w' has 6 numbers, but the tensor has 8 columns"):
        rules.vectors_for(matrix, {"w": (2, 8)})


def test_missing_files(folder):
    with pytest.raises(FileNotFoundError):
        rules.read_importance("none.gguf")


# ---- load_quantized ----


@pytest.mark.parametrize("older", [False, True])
def test_a_model_is_loaded_with_the_blocks_that_convert_writes(folder, older):
    tensors, metadata = model(layers=1, experts=2)
    gguf.save_file(tensors, "in.gguf", metadata)
    save_imatrix("m", tensors, older=older)
    safeload.convert("in.gguf", "out.gguf", quantize={"*": "q4_k"}, imatrix="m")
    loaded, plain = (safeload.load_quantized("in.gguf", "q4_k", imatrix=path) for path in ("m", None))
    written = safeload.load("out.gguf", dtype=None)
    quantized = [name for name in loaded.summary.quantized if name in written]
    vectors = rules.read_importance("m").vectors
    assert len(vectors.keys() & quantized) > 5
    for name in quantized:
        np.testing.assert_array_equal(loaded[name].data, written[name].data)
        assert np.array_equal(loaded[name].data, plain[name].data) == (name not in vectors)
    # Of quantized tensors too.
    again = safeload.load_quantized("out.gguf", {"blk.0.attn_k.*": "q5_k"}, imatrix="m", requantize=True)
    values = written["blk.0.attn_k.weight"].dequantize()
    expected = safeload.quantize(values, "q5_k", importance=vectors["blk.0.attn_k.weight"])
    assert again["blk.0.attn_k.weight"] == expected


def test_importance_by_name():
    weights = {name: rng.standard_normal((4, 256), np.float32) for name in "ab"}
    vector = rng.random(256)
    loaded = safeload.load_quantized(weights, "q4_0", imatrix={"a": vector})
    assert loaded["a"] == safeload.quantize(weights["a"], "q4_0", importance=vector)
    assert loaded["b"] == safeload.quantize(weights["b"], "q4_0", rounding="ggml")


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("q4_0", {"imatrix": {"a": np.ones(255)}}, r"importance has shape \[255\], expected \[256\]"),
        ("q4_0", {"imatrix": {"c": np.ones(256)}}, "importance for 'c', which is not quantized to a type of ggml"),
        ("q4_0", {"imatrix": {"a": np.ones(256)}, "rounding": "absmax"}, 'imatrix= implies rounding="ggml"'),
        ("q4_0", {"imatrix": "m"}, "imatrix= 'm' has no entry for any of 2 tensors to quantize, such as 'a'"),
        ({"a": "int8", "b": "q4_k"}, {"imatrix": {"a": np.ones(256)}}, "importance for 'a', which is not quantized"),
        ("int8", {"imatrix": {"a": np.ones(256)}}, "imatrix= applies to ggml's block types, got int8"),
        ("w4a16", {"imatrix": {"a": np.ones(256)}}, "w4a16 does not accept rounding=, axis= or imatrix="),
    ],
)
def test_wrong_importance_for_a_model(folder, scheme, options, message):
    save_imatrix("m", {"other.weight": np.ones((1, 256), np.float32)})
    with pytest.raises(ValueError, match=message):
        safeload.load_quantized({name: np.ones((4, 256), np.float32) for name in "ab"}, scheme, **options)
