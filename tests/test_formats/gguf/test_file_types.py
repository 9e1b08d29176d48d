"""llama.cpp's file types: the types, bytes and metadata that llama-quantize writes (tests/data/llama_quantize)."""

import json

import numpy as np
import pytest
from builders import llama_quantize
from builders.inside import mixtures
from builders.llama_quantize import FILE_TYPES, digest, model, save_imatrix
from builders.paths import DATA
from builders.thorough import part_of

import safeload
from safeload import RangeError, UnsupportedError, gguf

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

FIXTURES = DATA / "llama_quantize"
TYPES = json.loads((FIXTURES / "types.json").read_text("utf-8"))
FILES = json.loads((FIXTURES / "files.json").read_text("utf-8"))


def shown(row):
    return " ".join(f"{key}={value}" for key, value in row["model"].items() if key != "more")


@pytest.mark.parametrize("row", TYPES["models"], ids=shown)
def test_each_tensor_gets_the_type_of_llama_quantize(row):
    tensors, metadata = model(**row["model"])
    kinds = {letter: kind or None for kind, letter in TYPES["letters"].items()}
    kinds = {letter: "float16" if kind == "f16" else kind for letter, kind in kinds.items()}
    shapes = {name: value.shape for name, value in tensors.items()}
    assert row["types"].keys() == set(FILE_TYPES)
    for file_type in part_of([*FILE_TYPES], TYPES["models"].index(row), 2):
        for imatrix, types in ((False, row["types"]), (True, row["types"] | row["with_imatrix"])):
            chosen = mixtures.choose(file_type, shapes, mixtures.ModelSizes.of(metadata), imatrix=imatrix)
            assert digest("\n".join(chosen).encode()) == row["order"]
            assert [each.type for each in chosen.values()] == [kinds[letter] for letter in types[file_type]], file_type


def test_the_table_has_every_type_and_rule():
    """Each cell of the rules decides about a tensor in the fixtures."""
    letters = {letter for row in TYPES["models"] for text in row["types"].values() for letter in text}
    assert {kind for kind, letter in TYPES["letters"].items() if letter in letters} == {
        "",
        "f16",
        *set(TYPES["letters"]),
    }
    assert set(FILE_TYPES) == set(mixtures.file_types())


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(**sizes):
        tensors, metadata = model(**sizes)
        gguf.save_file(tensors, "in.gguf", metadata)
        return tensors, metadata

    return make


@pytest.mark.parametrize("row", FILES, ids=lambda row: f"{shown(row)} {row['imatrix']}")
def test_files_equal_those_of_llama_quantize(row, source, tmp_path):
    tensors, _ = source(**row["model"])
    if row["imatrix"] is not None:
        save_imatrix(row["imatrix"], tensors, older=row["imatrix"].endswith("dat"))
    for file_type, expected in part_of([*row["digests"].items()], FILES.index(row), 2):
        safeload.convert("in.gguf", "out.gguf", quantize=file_type, imatrix=row["imatrix"], overwrite=True)
        assert digest((tmp_path / "out.gguf").read_bytes()) == expected, file_type


@pytest.mark.skipif(llama_quantize.PROGRAM is None, reason="LLAMA_QUANTIZE names no llama-quantize")
@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_a_larger_model_equals_that_of_llama_quantize(file_type, source, tmp_path):
    tensors, _ = source(layers=12, rows=96, width=1024, inner=1536, kv_heads=1, dtype="float16")
    save_imatrix("imatrix.gguf", tensors)
    llama_quantize.run("in.gguf", file_type, tmp_path, "theirs.gguf", "imatrix.gguf")
    safeload.convert("in.gguf", "ours.gguf", quantize=file_type, imatrix="imatrix.gguf")
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def schemes(path):
    checkpoint = safeload.open(path)
    return {name: checkpoint.tensors[name].dtype for name in checkpoint}


def test_a_bare_name_is_a_file_type_and_a_pattern_a_block_type(source):
    source(layers=8)
    safeload.convert("in.gguf", "bare.gguf", quantize="q4_k")
    safeload.convert("in.gguf", "raw.gguf", quantize="q4_k", raw=True)
    safeload.convert("in.gguf", "all.gguf", quantize={"*": "q4_k"})
    safeload.convert("in.gguf", "mixed.gguf", quantize={"*attn_q*": "q8_0", "*": "Q4_K_M"})
    assert (safeload.open("bare.gguf").metadata["general.file_type"], schemes("bare.gguf")["output.weight"]) == (
        15,
        "Q6_K",
    )
    assert {*schemes("raw.gguf").values()} == {"F32", "Q4_K"} == {*schemes("all.gguf").values()}
    mixed, bare = schemes("mixed.gguf"), schemes("bare.gguf")
    assert {name: kind for name, kind in mixed.items() if "attn_q" not in name} == {
        name: kind for name, kind in bare.items() if "attn_q" not in name
    }
    assert mixed["blk.0.attn_q.weight"] == "Q8_0"


def test_kept_and_equal_tensors_stay(source, tmp_path):
    source(layers=2)
    report = safeload.convert("in.gguf", "kept.gguf", quantize="q5_k_m", keep="*ffn_up*")
    assert report.summary.kept["blk.0.ffn_up.weight"] == "keep='*ffn_up*'"
    assert schemes("kept.gguf")["blk.0.ffn_up.weight"] == "F32"
    safeload.convert("in.gguf", "once.gguf", quantize="q5_k_m")
    safeload.convert("once.gguf", "twice.gguf", quantize="q5_k_m")
    assert (tmp_path / "once.gguf").read_bytes() == (tmp_path / "twice.gguf").read_bytes()
    again = safeload.convert("once.gguf", "other.gguf", quantize="q8_0", requantize=True)
    assert again.summary.quantized["blk.0.attn_q.weight"] == "q8_0"


def test_metadata_is_kept_and_can_be_set(source):
    _, metadata = source(layers=1)
    safeload.convert(
        "in.gguf", "out.gguf", quantize="q4_k_s", metadata={"general.name": "x", "general.file_type": np.uint32(7)}
    )
    result = dict(safeload.open("out.gguf").metadata)
    assert (result["general.name"], result["general.file_type"], result["general.quantization_version"]) == ("x", 7, 2)
    assert metadata.keys() < result.keys()


def test_what_needs_importance_is_refused_by_name(source, tmp_path):
    tensors, _ = source(layers=2)
    with pytest.raises(
        UnsupportedError, match=r"'blk.0.attn_k.weight' becomes q2_k, .* q2_k_s requires .* pass imatrix="
    ):
        safeload.convert("in.gguf", "out.gguf", quantize="q2_k_s")
    del tensors["blk.1.ffn_up.weight"]
    save_imatrix("imatrix.gguf", tensors)
    with pytest.raises(UnsupportedError, match=r"'blk.1.ffn_up.weight' .*'imatrix.gguf' has no entry"):
        safeload.convert("in.gguf", "out.gguf", quantize="q2_k_s", imatrix="imatrix.gguf")
    assert not (tmp_path / "out.gguf").exists()
    safeload.convert("in.gguf", "out.gguf", quantize="q2_k", imatrix="imatrix.gguf")  # others may lack an entry


def test_mixtures_need_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gguf.save_file({"a.weight": np.ones((2, 256), np.float32)}, "bare.gguf")
    for options in ({"quantize": "q4_k_m"}, {"quantize": {"*": "q4_k_m"}}):
        with pytest.raises(ValueError, match=r"'q4_k_m' is a llama\.cpp mixture: use 'q4_k' for all matrices"):
            safeload.convert("bare.gguf", "out.gguf", **options)
    safeload.convert("bare.gguf", "out.gguf", quantize="q2_k")
    assert schemes("out.gguf") == {"a.weight": "Q2_K"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"imatrix": "imatrix.gguf"}, "imatrix= has the importance of columns for quantize=: pass quantize= too"),
        ({"quantize": "q4_k_m", "imatrix": "none.gguf"}, "has no entry for any of 16 tensors"),
        ({"quantize": {"*attn_q*": "q4_k_m"}}, "is a llama.cpp mixture"),
        ({"quantize": "q4_k_m", "raw": True}, "is a llama.cpp mixture"),
        ({"quantize": "q4_k_x"}, "unknown scheme 'q4_k_x'"),
    ],
)
def test_wrong_arguments(source, options, message):
    tensors, _ = source(layers=2)
    save_imatrix("imatrix.gguf", tensors)
    save_imatrix("none.gguf", {"other.weight": np.ones((1, 256), np.float32)})
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        safeload.convert("in.gguf", "out.gguf", **options)


def test_an_imatrix_is_for_a_file(source):
    tensors, _ = source(layers=1)
    save_imatrix("imatrix.gguf", tensors)
    with pytest.raises(ValueError, match="imatrix= applies to a single file"):
        safeload.convert("in.gguf", "folder/", quantize="q4_k", imatrix="imatrix.gguf")
    # A file of safetensors takes block types with importance.
    safeload.convert("in.gguf", "out.safetensors", quantize="q4_k", imatrix="imatrix.gguf")
    vector = llama_quantize.importance_of(tensors)["blk.0.attn_q.weight"][0][0] / np.float32(512)
    expected = safeload.quantize(tensors["blk.0.attn_q.weight"], "q4_k", importance=vector)
    assert safeload.open("out.safetensors")["blk.0.attn_q.weight"] == expected


def test_values_that_are_not_finite_are_told_by_their_tensor(source, tmp_path):
    tensors, metadata = source(layers=2, experts=4)
    save_imatrix("imatrix.gguf", tensors)
    tensors["blk.1.ffn_up_exps.weight"][2, 1, 7] = np.nan
    gguf.save_file(tensors, "in.gguf", metadata)
    for options in ({}, {"imatrix": "imatrix.gguf"}):
        for file_type in ("q4_k_m", "iq4_xs", "mxfp4"):
            with pytest.raises(RangeError, match=r"'blk.1.ffn_up_exps.weight'.* \[2, 1, 7\] is nan"):
                safeload.convert("in.gguf", "out.gguf", quantize=file_type, **options)
    assert not (tmp_path / "out.gguf").exists()


def test_experts_outside_of_layers_are_refused(source):
    source(layers=2, experts=4, more=[["blk.9.ffn_up_exps.weight", [4, 2, 256]]])
    with pytest.raises(UnsupportedError, match=r"'blk.9.ffn_up_exps.weight' is in none of the 2 layers"):
        safeload.convert("in.gguf", "out.gguf", quantize="q4_k_m")


@pytest.mark.parametrize("value", ["many", True, 2.5, [], [np.arange(2)], -1, 0, 2**64])
def test_sizes_of_the_wrong_kind_make_no_model(value):
    metadata = {"general.architecture": "llama", "llama.block_count": value, "llama.attention.head_count": value}
    sizes = mixtures.ModelSizes.of(metadata)
    assert sizes is None or (sizes.layers == 2**64 and sizes.heads == sizes.kv_heads)
    assert mixtures.ModelSizes.of({"general.architecture": 3}) is None
