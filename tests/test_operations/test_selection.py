"""Operations on some of the tensors: ``only=`` and ``drop=``, and what convert changes beside values."""

import json
import os
import time

import ml_dtypes
import numpy as np
import pytest
from builders.inside import main
from builders.models import small, write_folder
from builders.paths import ROOT
from safetensors import safe_open

import safeload
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.no_core

PACKED = ROOT / "tests" / "data" / "quantized"
WEIGHTS = {
    "h.0.attn.w": np.arange(64, dtype=np.float32).reshape(2, 32),
    "h.0.norm.w": np.full(3, np.nan, np.float32),
    "h.1.attn.w": np.ones((2, 32), np.float32),
    "h.1.norm.w": np.zeros(3, np.float32),
    "ids": np.arange(4),
}
SOME = [
    ({"only": "h.0.*"}, ["h.0.attn.w", "h.0.norm.w"]),
    ({"drop": ["*norm*", "ids"]}, ["h.0.attn.w", "h.1.attn.w"]),
    ({"only": ["*.w"], "drop": "h.1.*"}, ["h.0.attn.w", "h.0.norm.w"]),
]


@pytest.fixture
def source(tmp_path):
    save_file(WEIGHTS, tmp_path / "source.safetensors", {"origin": "here", "license": "none"})
    return tmp_path / "source.safetensors"


@pytest.mark.parametrize(("some", "names"), SOME, ids=["only", "drop", "both"])
def test_every_operation_takes_the_same_tensors(some, names, source, tmp_path):
    assert list(safeload.load(source, **some)) == names
    assert list(safeload.load(source, dtype="float16", backend="pread", **some)) == names
    with safeload.open(source) as opened:
        assert list(opened.load(**some)) == names
    assert list(safeload.stats(source, **some)) == names
    assert list(safeload.stats(WEIGHTS, **some)) == names
    assert list(safeload.diff(source, WEIGHTS, **some).tensors) == names
    assert list(safeload.check(source, **some).stats) == names
    safeload.convert(source, tmp_path / "x.npz", **some)
    with np.load(tmp_path / "x.npz") as written:
        assert written.files == names


def test_names_may_be_thinned_out_but_not_be_patterns_too(source, tmp_path):
    assert list(safeload.load(source, ["ids", "h.0.attn.w"], drop="h.*")) == ["ids"]
    for function in (safeload.load, safeload.stats, lambda *a, **o: safeload.convert(a[0], tmp_path / "x.npz", **o)):
        with pytest.raises(ValueError, match="names= takes exact names and only= takes patterns"):
            function(source, names=["ids"], only="*")
        with pytest.raises(safeload.TensorNotFoundError, match=r"only='h\.7\.\*' matches none of 5 names"):
            function(source, only="h.7.*")
    assert not (tmp_path / "x.npz").exists()
    with pytest.raises(ValueError, match="only= and drop= require a checkpoint"):
        safeload.stats(np.ones(2), only="*")


def test_names_of_either_side_are_compared(source):
    found = safeload.diff(source, {"h.0.attn.w": WEIGHTS["h.0.attn.w"], "new": np.ones(1)}, drop="h.1.*")
    assert (sorted(found.only_a), found.only_b, list(found.tensors)) == (["h.0.norm.w", "ids"], ["new"], ["h.0.attn.w"])
    assert safeload.diff(source, {"new": np.ones(1)}, only="new").only_b == ["new"]


def test_findings_about_other_tensors_are_left_out(tmp_path):
    config, tensors = small("llama")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_folder(tmp_path, config, tensors)
    errors = {found.tensor for found in safeload.check(tmp_path).errors}
    assert errors == {"model.norm.weight", "model.layers.1.mlp.up_proj.weight"}
    assert [found.tensor for found in safeload.check(tmp_path, drop="*norm*").errors] == [
        "model.layers.1.mlp.up_proj.weight"
    ]
    missing = safeload.check(tmp_path, only="model.layers.0.*")
    assert [found.tensor for found in missing.errors] == ["model.layers.1.mlp.up_proj.weight"]
    assert all(name.startswith("model.layers.0.") for name in missing.stats)


def test_what_is_missing_is_said_whatever_is_selected(tmp_path):
    config, tensors = small("llama")
    write_folder(tmp_path, config, {name: x for name, x in tensors.items() if ".up_proj." not in name})
    for some in ({"only": "model.layers.1.*"}, {"drop": "model.layers.0.*"}, {"only": "model.norm.weight"}):
        assert not safeload.check(tmp_path, **some).ok
    wrong = {f"q{k}.w": x for k, x in enumerate(tensors.values())}
    assert not safeload.check(wrong, config=config, only="q3.w").ok


@pytest.fixture
def folder(tmp_path):
    """A small llama in a folder of its own."""
    (tmp_path / "model").mkdir()
    config, tensors = small("llama")
    write_folder(tmp_path / "model", config, tensors)
    return tmp_path / "model"


@pytest.fixture
def tied(tmp_path):
    """A small llama whose head is its embedding."""
    config, tensors = small("llama")
    config["tie_word_embeddings"] = True
    tensors.pop("lm_head.weight", None)
    (tmp_path / "tied").mkdir()
    write_folder(tmp_path / "tied", config, tensors)
    return tmp_path / "tied"


def test_a_tied_head_is_made_if_it_is_wanted(tied, tmp_path):
    def heads(**options):
        safeload.convert(tied, tmp_path / "x.safetensors", quantize="q8_0", overwrite=True, **options)
        return "lm_head.weight" in safeload.open(tmp_path / "x.safetensors")

    assert heads()
    assert heads(drop="model.layers.*")
    assert not heads(drop="lm_head*")
    assert not heads(only="model.embed*")


# ---- convert: names, metadata, other files ----


def test_names_change_last(source, tmp_path):
    safeload.convert(
        source,
        tmp_path / "x.safetensors",
        only="h.*.attn.w",
        quantize="q8_0",
        keep="h.1.*",
        rename=[(r"^h\.", "layers."), ("attn", "attention")],
    )
    written = safeload.load(tmp_path / "x.safetensors")
    assert sorted(written) == ["layers.0.attention.w", "layers.1.attention.w"]
    assert written["layers.0.attention.w"].scheme == "q8_0"
    assert written["layers.1.attention.w"].dtype == np.float32
    with pytest.raises(ValueError, match=r"tensors 'h\.0\.attn\.w' and 'h\.1\.attn\.w' the same name"):
        safeload.convert(source, tmp_path / "y.safetensors", rename=[(r"\.\d", "")])
    with pytest.raises(ValueError, match="keep= selects tensors that quantize= leaves unquantized"):
        safeload.convert(source, tmp_path / "y.safetensors", keep="*")
    assert not (tmp_path / "y.safetensors").exists()


@pytest.mark.parametrize("name", ["fp8_block", "ct_pack_w4_g32_sym", "mlx_affine4_g64", "gpt_oss", "bitnet_times"])
def test_packed_tensors_keep_their_parts_under_new_names(name, tmp_path):
    folder = PACKED / name
    before = safeload.load(folder, dtype="float32")
    for target, options in ((tmp_path / "x.safetensors", {}), (tmp_path / "shards", {"max_shard_size": "1GB"})):
        safeload.convert(folder, target, rename=("^model", "language_model"), **options)
        after = safeload.load(target, dtype="float32")
        assert len(after) == len(before)
        for old, values in before.items():
            new = old.replace("model", "language_model", 1) if old.startswith("model") else old
            assert after[new].tobytes() == values.tobytes(), old


def test_metadata_is_merged_and_removed(source, tmp_path):
    def metadata(**options):
        safeload.convert(source, tmp_path / "x.safetensors", overwrite=True, **options)
        with safe_open(tmp_path / "x.safetensors", "numpy") as opened:
            return opened.metadata()

    assert metadata() == metadata(metadata={}) == {"origin": "here", "license": "none"}
    changed = metadata(metadata={"license": "MIT", "origin": None, "absent": None, "layers": 2})
    assert changed == {"license": "MIT", "layers": "2"}
    with pytest.raises(TypeError, match="metadata: safetensors cannot store 'x' of type object"):
        metadata(metadata={"x": object()})
    with pytest.raises(TypeError, match="metadata: keys must be str, got 1"):
        metadata(metadata={1: "x"})
    with pytest.raises(ValueError, match="npz files have no metadata, but metadata= has 'x'"):
        safeload.convert(source, tmp_path / "x.npz", metadata={"x": "y"})
    safeload.convert(source, tmp_path / "x.npz", metadata={"origin": None})


def test_gguf_keeps_the_types_of_other_keys(tmp_path):
    gguf = pytest.importorskip("gguf")
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "a.safetensors")
    path = tmp_path / "x.gguf"
    safeload.convert(tmp_path / "a.safetensors", path, metadata={"general.architecture": "llama", "n": np.uint32(3)})
    safeload.convert(path, tmp_path / "y.gguf", metadata={"general.name": "y"})
    fields = gguf.GGUFReader(tmp_path / "y.gguf").fields
    assert fields["n"].types == [gguf.GGUFValueType.UINT32]
    assert fields["general.name"].contents() == "y"


EXTRAS = ["tokenizer.json", "tokenizer_config.json", "spiece.model", "chat_template.jinja", "generation_config.json"]


def test_a_folder_made_from_a_folder_gets_its_tokenizer(folder, tmp_path):
    source = folder
    for name in (*EXTRAS, "README.md", "modeling_own.py"):
        (source / name).write_text(name * 1000)
    (source / "tokenizer").mkdir()
    (tmp_path / "blob").write_bytes(b"")
    if os.name != "nt":
        (source / "vocab.json").symlink_to(tmp_path / "blob")  # as in the hub's cache
        os.mkfifo(source / "tokenizer.pipe")
    more = [] if os.name == "nt" else ["vocab.json"]

    safeload.convert(source, tmp_path / "made", max_shard_size="1GB", dtype="float16")
    weights = ["config.json", "model.safetensors"]
    assert sorted(os.listdir(tmp_path / "made")) == sorted([*EXTRAS, *more, *weights])
    assert all((tmp_path / "made" / name).read_text() == name * 1000 for name in EXTRAS)

    with safeload.open(source / "model.safetensors.index.json") as opened:
        safeload.convert(opened, tmp_path / "again", max_shard_size="1GB")
    assert set(EXTRAS) <= set(os.listdir(tmp_path / "again"))
    safeload.convert(source, tmp_path / "bare", max_shard_size="1GB", extras=False)
    assert sorted(os.listdir(tmp_path / "bare")) == weights
    shard = next(source.glob("*.safetensors"))
    safeload.convert(shard, tmp_path / "file", max_shard_size="1GB")
    assert not set(EXTRAS) & set(os.listdir(tmp_path / "file"))

    safeload.convert(source, source, max_shard_size="1GB", overwrite=True, only="model.norm.weight")
    assert (source / "tokenizer.json").read_text() == "tokenizer.json" * 1000
    assert list(safeload.load(source)) == ["model.norm.weight"]


def test_a_source_that_cannot_be_read_leaves_no_folder(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    shard = max(folder.glob("*.safetensors"))
    with safeload.open(folder) as opened:
        os.truncate(shard, shard.stat().st_size - 1)
        with pytest.raises(safeload.FormatError):
            safeload.convert(opened, tmp_path / "made", max_shard_size="1GB")
    assert not (tmp_path / "made").exists()


# ---- the command ----


def test_the_command_takes_the_same_options(source, tmp_path, capsys):
    target = tmp_path / "x.safetensors"
    arguments = ["convert", str(source), str(target), "--overwrite"]
    more = ["--only", "h.*", "--drop", "h.1.*", "--drop", "*norm*", "--dtype", "bfloat16", "--quantize", "q8_0"]
    more += ["--keep", "*attn*", "--rename", r"^h\.(\d)", r"layers.\1", "--metadata", "origin", "--metadata", "a=b=c"]
    assert main([*arguments, *more]) == 0
    written = load_file(target)
    assert list(written) == ["layers.0.attn.w"]
    assert written["layers.0.attn.w"].dtype == ml_dtypes.bfloat16
    with safe_open(target, "numpy") as opened:
        assert opened.metadata() == {"license": "none", "a": "b=c"}
    assert main([*arguments, "--only", "nothing*"]) == 2
    assert "--only 'nothing*' matches none of 5 names" in capsys.readouterr().err
    assert main([*arguments, "--rename", "(", ""]) == 2
    assert "not a valid regular expression" in capsys.readouterr().err
    assert list(load_file(target)) == ["layers.0.attn.w"]


def test_extras_can_be_left_out_by_the_command(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    for more, there in (([], True), (["--no-extras"], False)):
        made = tmp_path / f"made{len(more)}"
        assert main(["convert", str(folder), str(made), "--max-shard-size", "1GB", *more]) == 0
        assert (made / "tokenizer.json").exists() == there
        assert json.loads((made / "config.json").read_text())["model_type"] == "llama"


# ---- what must not be lost or taken for something else ----


def test_a_new_name_under_which_a_module_has_another_quantization_is_refused(tmp_path):
    """MLX may give a module bits of its own, by its name."""
    with pytest.raises(safeload.UnsupportedError, match=r"the quantization in its config.json names module '.*': pass"):
        safeload.convert(PACKED / "mlx_experts", tmp_path / "x.safetensors", rename=("^model", "language.model"))
    assert not (tmp_path / "x.safetensors").exists()
    safeload.convert(
        PACKED / "mlx_experts", tmp_path / "x.safetensors", rename=("^model", "language.model"), dtype="float32"
    )
    before, after = safeload.load(PACKED / "mlx_experts", dtype="float32"), safeload.load(tmp_path / "x.safetensors")
    assert [x.tobytes() for _, x in sorted(after.items())] == [x.tobytes() for _, x in sorted(before.items())]


def test_a_part_and_a_tensor_of_one_name_in_two_shards_are_refused(tmp_path):
    weights = {"x": np.ones((40, 32), np.float32), "w": np.ones((64, 32), np.float32)}
    with pytest.raises(safeload.SafetensorError, match="two tensors would be stored as 'w_scale'"):
        safeload.convert(
            weights, tmp_path / "made", quantize={"w": "int8"}, max_shard_size=5000, rename=[("^x$", "w_scale")]
        )
    assert not (tmp_path / "made").exists()


def test_a_head_is_chosen_apart_from_its_embedding(tied, tmp_path):
    target = tmp_path / "x.safetensors"
    safeload.convert(tied, target, quantize="q8_0", only="lm_head*")
    assert [value.scheme for value in safeload.load(target).values()] == ["q8_0"]
    safeload.convert(tied, target, quantize="q8_0", drop="*embed*", overwrite=True)
    assert "lm_head.weight" in safeload.open(target)
    safeload.convert(tied, target, quantize="q8_0", only="lm_head*", keep="lm_head*", dtype="float32", overwrite=True)
    head = safeload.load(target)["lm_head.weight"]
    np.testing.assert_array_equal(head, small("llama")[1]["model.embed_tokens.weight"].astype(np.float32))


def test_a_typo_of_keep_is_an_error(source, tmp_path):
    with pytest.raises(safeload.TensorNotFoundError, match=r"keep='h\.0\.atn\*' matches none of 5 names; similar"):
        safeload.convert(source, tmp_path / "x.safetensors", quantize="q8_0", keep=["h.*", "h.0.atn*"])
    for keep in ([3], b"h.*"):
        with pytest.raises(TypeError, match="keep must be"):
            safeload.convert(source, tmp_path / "x.safetensors", quantize="q8_0", keep=keep)


def test_weights_are_no_extras(folder, tmp_path):
    (folder / "tokenizer_weights.safetensors").write_bytes(b"")
    (folder / "tokenizer.model").write_bytes(b"x")
    safeload.convert(folder, tmp_path / "made", max_shard_size="1GB")
    assert "tokenizer_weights.safetensors" not in os.listdir(tmp_path / "made")
    assert "tokenizer.model" in os.listdir(tmp_path / "made")


@pytest.mark.parametrize("size", ["9" * 400 + "GB", "1e5", "0MB"])
def test_sizes_of_shards_are_sizes(size, folder, tmp_path):
    if size.startswith("9"):
        safeload.convert(folder, tmp_path / "made", max_shard_size=size)
        return
    with pytest.raises(ValueError, match="max_shard_size"):
        safeload.convert(folder, tmp_path / "made", max_shard_size=size)


def test_a_thousand_names_are_as_fast_as_one():
    weights = dict.fromkeys((f"h.{k}.w" for k in range(50_000)), np.zeros(1, np.float32))
    started = time.process_time()
    found = safeload.stats(weights, only=[f"h.{k}.w" for k in range(1000)])
    assert len(found) == 1000
    assert time.process_time() - started < 5  # 9 s where each pattern is compared with each name
