"""check: damaged folders, each fault named in a single run; and good folders of real writers, without an error."""

import io
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builders.inside import main
from builders.inside import model_families as families
from builders.models import small, write_folder
from builders.paths import DATA
from builders.quantized import FIXTURES
from builders.torch_build import Storage, tensor, zip_file

import safeload
from safeload import check, gguf
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

SHARDS = [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
MATRIX = "model.layers.1.mlp.up_proj.weight"
BLOCK = 4096

DAMAGES = []


def damage(base, *expected):
    """Register a damage of a folder: the codes of all errors, each with a part of its message."""

    def register(function):
        DAMAGES.append(pytest.param(base, function, expected, id=function.__name__))
        return function

    return register


# ---- folders ----


def llama(folder):
    write_folder(folder, *small("llama-gqa"), shards=3)


def wide(folder):
    """Four matrices of 1 MiB in F32, whose rows have 4,000 bytes; a vector before them shifts them."""
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.standard_normal((262, 1000)).astype(np.float32) for name in "abcd"}
    save_file({**tensors, "a.bias": np.ones(3, np.float32)}, folder / "model.safetensors", durable=False)


def torch_zip(folder):
    tensors = {name: tensor(Storage(name, np.float32([1, 2, 3, k]))) for k, name in enumerate("abc")}
    (folder / "pytorch_model.bin").write_bytes(zip_file(tensors))


def gguf_file(folder):
    save_gguf(folder, *gguf_model("llama"))


# Architectures with files that must say the size of a head.
WITH_LENGTHS = ("falcon-h1", "nemotron_h", "nemotron_h_moe", "gemma4", "qwen35", "qwen35moe", "qwen3next")


def gguf_model(name):
    """A model with all required tensors of an architecture, and its metadata."""
    sizes = {"context_length": 64, "embedding_length": 64, "block_count": 2, "feed_forward_length": 128}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    form = families.gguf_architectures()[name]
    sizes |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    sizes |= {"expert_shared_feed_forward_length": 48, "attention.sliding_window": 32, "interleave_moe_layer_step": 1}
    sizes |= {"expert_shared_count": 1, "expert_gating_func": 2, "rope.dimension_count": 8}
    sizes |= {"attention.q_lora_rank": 24, "attention.kv_lora_rank": 16}
    sizes |= {"attention.key_length_mla": 20, "attention.value_length_mla": 12}
    sizes |= {"attention.indexer.head_count": 2, "attention.indexer.key_length": 64, "attention.indexer.top_k": 32}
    sizes |= {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 4}
    sizes |= {"ssm.group_count": 2, "shortconv.l_cache": 3}
    sizes |= dict.fromkeys(("attention.key_length", "attention.value_length"), 16) if name in WITH_LENGTHS else {}
    sizes |= {"attention.key_length_swa": 16, "attention.value_length_swa": 16}
    sizes = {key: size for key, size in sizes.items() if name != "nemotron_h" or not key.startswith("expert_")}
    metadata = {f"{name}.{key}": np.uint32(value) for key, value in sizes.items()}
    more = {"u32": np.uint32(0), "f32": np.float32(1), "bool": True, "array of bools": np.array([True, False])}
    required = {key: form.keys[key].types[0] for key in form.required if key not in sizes}
    metadata |= {f"{name}.{key}": more[kind] for key, kind in required.items() if kind in more}
    tokens = [chr(33 + k) for k in range(40)]
    metadata |= {
        "general.architecture": name,
        **{f"{name}.{key}": np.float32(1e-6) for key in form.keys if key.endswith("_epsilon")},
        **{f"{name}.{key}": np.int32([2, 3, 3, 0]) for key in form.keys if key == "rope.dimension_sections"},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["! #"],
    }
    config = {key.replace(".", "_"): value for key, value in sizes.items()}
    config |= {"vocab_size": len(tokens), "attn_qkv": int(name == "phi3")}
    expected = form.schema.expand(config, ())
    rng = np.random.default_rng(0)
    required = {tensor.name: tensor.shape for tensor in expected.values() if tensor.required}
    required |= {key: (64,) for key, shape in required.items() if shape is None}
    required = {key: tuple(2 if size is None else size for size in shape) for key, shape in required.items()}
    return {key: rng.standard_normal(shape).astype(np.float32) for key, shape in required.items()}, metadata


def save_gguf(folder, tensors, metadata):
    gguf.save_file(tensors, folder / "model.gguf", metadata)


def numbered(folder):
    llama(folder)
    (folder / INDEX).unlink()


def cut(path, size):
    """Cut a file, to a size or by a number of bytes."""
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def overwrite(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def edit_json(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_tensors(folder, change):
    """Change the tensors of the shard with `MATRIX`, and the index with them."""
    index = json.loads((folder / INDEX).read_text())
    shard = index["weight_map"][MATRIX]
    tensors = load_file(folder / shard)
    change(tensors)
    save_file(tensors, folder / shard, durable=False)
    kept = {name: file for name, file in index["weight_map"].items() if file != shard}
    edit_json(folder / INDEX, weight_map=kept | dict.fromkeys(tensors, shard), metadata={})


# ---- files of a folder ----


@damage(llama, ("index.shard", f"{SHARDS[1]} is missing, but {INDEX} lists it"))
def a_missing_shard(folder):
    (folder / SHARDS[1]).unlink()


@damage(llama, *(("index.shard", f"{name} is missing") for name in SHARDS))
def all_shards_missing(folder):
    for name in SHARDS:
        (folder / name).unlink()


@damage(llama, ("file.format", "1 of "), ("file.format", SHARDS[2]), ("index.shard", SHARDS[1]))
def two_cut_shards_and_a_missing_one(folder):
    cut(folder / SHARDS[0], -1)
    cut(folder / SHARDS[2], -20_000)
    (folder / SHARDS[1]).unlink()


@damage(llama, ("file.format", "20000 of "))
def a_cut_shard(folder):
    cut(folder / SHARDS[0], -20_000)


@damage(llama, ("file.format", SHARDS[0]))
def a_shard_cut_in_its_header(folder):
    cut(folder / SHARDS[0], 100)


@damage(llama, ("file.format", SHARDS[0]), ("file.format", SHARDS[1]))
def two_empty_shards(folder):
    cut(folder / SHARDS[0], 0)
    cut(folder / SHARDS[1], 0)


@damage(llama, ("file.unsupported", "Git LFS"), ("file.format", SHARDS[1]))
def a_pointer_of_git_lfs_and_a_cut_shard(folder):
    (folder / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    cut(folder / SHARDS[1], -3)


@damage(llama, ("file.unsupported", "HTML"))
def an_error_page_in_place_of_a_shard(folder):
    (folder / SHARDS[0]).write_text("<!DOCTYPE html><title>404</title>")


@damage(llama, ("file.format", SHARDS[0]))
def a_header_of_absurd_size(folder):
    overwrite(folder / SHARDS[0], 0, b"\xff" * 8)


@damage(llama, ("file.format", SHARDS[0]), ("file.format", SHARDS[2]))
def two_headers_that_are_not_json(folder):
    overwrite(folder / SHARDS[0], 20, b"\x01\x02")
    overwrite(folder / SHARDS[2], 20, b"\x01\x02")


@damage(llama, ("file.format", "3 bytes belong to no tensor"))
def bytes_after_the_last_tensor(folder):
    with (folder / SHARDS[0]).open("ab") as file:
        file.write(b"abc")


@damage(llama, ("index.tensor", f"{SHARDS[0]} lacks 10 of the 10 tensors that {INDEX} lists there"))
def a_shard_twice_under_two_names(folder):
    shutil.copy(folder / SHARDS[1], folder / SHARDS[0])


@damage(llama, ("index.tensor", "lacks 1 of the 10 tensors"), ("index.shard", SHARDS[2]))
def a_shard_without_a_tensor_and_a_missing_one(folder):
    tensors = load_file(folder / SHARDS[0])
    save_file(dict(list(tensors.items())[1:]), folder / SHARDS[0], durable=False)
    (folder / SHARDS[2]).unlink()


@damage(numbered, ("index.shard", f"{SHARDS[0]} is missing"), ("index.shard", f"{SHARDS[1]} is missing"))
def two_missing_shards_without_an_index(folder):
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[1]).unlink()


@damage(numbered, ("index.shard", f"{SHARDS[0]} is missing"), ("file.format", "7 of "))
def a_missing_and_a_cut_shard_without_an_index(folder):
    (folder / SHARDS[0]).unlink()
    cut(folder / SHARDS[1], -7)


@damage(llama, ("file.format", "zeros from byte 0"))
def a_shard_of_zeros(folder):
    size = (folder / SHARDS[0]).stat().st_size
    (folder / SHARDS[0]).write_bytes(bytes(size))


@damage(llama, ("file.read", SHARDS[0]))
def a_folder_in_place_of_a_shard(folder):
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).mkdir()


@damage(llama, ("file.format", "index.json is not JSON"))
def a_cut_index(folder):
    cut(folder / INDEX, -10)


@damage(llama, ("file.format", "must be the bare name of a file in the same folder"))
def an_index_that_leads_out_of_the_folder(folder):
    edit_json(folder / INDEX, weight_map={"a": "../model.safetensors"})


@damage(llama, ("file.format", "weight_map must be an object, got list"))
def an_index_with_a_list(folder):
    edit_json(folder / INDEX, weight_map=[])


@damage(llama, ("file.format", "config.json is not JSON"), ("index.shard", SHARDS[1]))
def a_cut_config_and_a_missing_shard(folder):
    cut(folder / CONFIG, -10)
    (folder / SHARDS[1]).unlink()


@damage(llama, ("file.format", "config.json is not JSON: Invalid control character (/"))
def a_config_with_a_control_character(folder):
    (folder / CONFIG).write_text('{"model_type": "ll\x01ma"}')


@damage(llama, ("index.shard", SHARDS[0]), ("value.nan", "1 of 8,192 values is NaN"))
def a_missing_shard_and_nan_in_another(folder):
    edit_tensors(folder, lambda tensors: tensors[MATRIX].__setitem__((3, 4), np.nan))
    (folder / SHARDS[0]).unlink()


# ---- names and shapes ----


@damage(llama, ("schema.config", "config.json says hidden_size 128; all 30 tensors say 64"))
def a_wrong_width(folder):
    edit_json(folder / CONFIG, hidden_size=128)


@damage(
    llama,
    ("schema.config", "config.json says intermediate_size 100; all 9 tensors say 128"),
    ("schema.config", "config.json says vocab_size 7; all 2 tensors say 96"),
)
def two_wrong_sizes(folder):
    edit_json(folder / CONFIG, intermediate_size=100, vocab_size=7)


@damage(llama, ("schema.config", "'vocab_size' is required, but config.json lacks it"))
def a_config_without_a_size(folder):
    edit_json(folder / CONFIG, vocab_size=None)


@damage(llama, ("schema.layer_missing", "layer 3 of 4 is missing, with all 9 tensors"))
def a_config_with_more_layers(folder):
    edit_json(folder / CONFIG, num_hidden_layers=4)


@damage(llama, ("schema.layer_extra", "layer 2 (9 tensors) is beyond the 2 layers of the config"))
def a_config_with_fewer_layers(folder):
    edit_json(folder / CONFIG, num_hidden_layers=2)


@damage(llama, ("schema.missing", "is missing"))
def a_missing_tensor(folder):
    edit_tensors(folder, lambda tensors: tensors.pop(MATRIX))


@damage(llama, ("schema.missing", "is missing"), ("schema.unexpected", "is not a tensor of schema llama"))
def a_misspelled_tensor(folder):
    edit_tensors(folder, lambda tensors: tensors.update({f"{MATRIX}s": tensors.pop(MATRIX)}))


@damage(llama, ("schema.shape", "has shape [64, 128], but [intermediate_size, hidden_size] is [128, 64]"))
def a_transposed_matrix(folder):
    edit_tensors(folder, lambda tensors: tensors.update({MATRIX: tensors[MATRIX].T.copy()}))


# ---- values ----


@damage(llama, ("value.nan", "1 of 8,192 values is NaN"), ("value.inf", "1 of 8,192 values is infinite"))
def nan_and_infinity(folder):
    def change(tensors):
        tensors[MATRIX][3, 4], tensors[MATRIX][5, 6] = np.nan, np.inf

    edit_tensors(folder, change)


@damage(llama, ("value.outlier", "but 99.9 % of the values are below"))
def a_flipped_exponent_bit_in_bfloat16(folder):
    def change(tensors):
        tensors[MATRIX].view(np.uint16)[5, 5] = np.float32(0.02).astype(ml_dtypes.bfloat16).view(np.uint16) ^ (1 << 14)

    edit_tensors(folder, change)


def change_wide(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, durable=False)


@damage(wide, ("value.outlier", "is a bit flipped?"), ("value.outlier", "is a bit flipped?"))
def flipped_exponent_bits_in_float32(folder):
    def change(tensors):
        tensors["a.weight"][7, 7] = 1e37
        tensors["b.weight"][8, :5] = -70_000

    change_wide(folder, change)


def offset_of(folder, name):
    with safeload.open(folder) as opened:
        return opened.tensors[name].offset


def blank(folder, begin, size):
    overwrite(folder / "model.safetensors", begin, bytes(size))


def block_in(folder, name):
    """The first block boundary inside a tensor, past its first block."""
    return -(-offset_of(folder, name) // BLOCK) * BLOCK + BLOCK


@damage(wide, ("file.hole", "65,536 bytes from byte "))
def a_lost_run_of_blocks(folder):
    blank(folder, block_in(folder, "b.weight"), 16 * BLOCK)


@damage(wide, ("file.hole", " are zero in 'a.weight': blocks of the file are lost"), ("file.hole", "'c.weight'"))
def two_lost_runs_of_blocks(folder):
    blank(folder, block_in(folder, "a.weight"), 100 * BLOCK)
    blank(folder, block_in(folder, "c.weight"), 50 * BLOCK)


@damage(wide, ("file.hole", "are zero in 2 tensors, 'b.weight' to 'c.weight'"))
def zeros_that_go_on_into_another_tensor(folder):
    blank(folder, offset_of(folder, "b.weight") + 400_000, 1_100_000)


@damage(wide, ("file.hole", "are zero in 2 tensors, 'b.weight' to 'c.weight'"))
def neighbouring_matrices_of_zeros(folder):
    change_wide(
        folder, lambda tensors: tensors.update({f"{name}.weight": np.zeros((262, 1000), "f4") for name in "bc"})
    )


@damage(wide, ("file.hole", "bytes to the end of the file are zero: 2 tensors are all zero"))
def an_end_of_zeros(folder):
    size = (folder / "model.safetensors").stat().st_size
    blank(folder, size - 2_500_000, 2_500_000)


@damage(llama, ("quantization.scale", "expected a finite number >= 0"))
def a_scale_that_is_nan(folder):
    for path in folder.iterdir():
        path.unlink()
    quantized = safeload.quantize(np.float32([[1, 2], [3, 4]]), "int8")
    quantized.scale[...] = np.nan
    save_file({"w": quantized}, folder / "model.safetensors", durable=False)


# ---- other formats ----


@damage(torch_zip, ("file.crc", "zip entry 'archive/data/b'"))
def a_flipped_bit_in_a_torch_file(folder):
    path = folder / "pytorch_model.bin"
    offset = offset_of(folder, "b")
    overwrite(path, offset + 1, bytes([path.read_bytes()[offset + 1] ^ 1]))


@damage(torch_zip, ("file.format", "pytorch_model.bin"))
def a_cut_torch_file(folder):
    cut(folder / "pytorch_model.bin", -40)


@damage(gguf_file, ("file.format", "bytes are missing"))
def a_cut_gguf_file(folder):
    cut(folder / "model.gguf", -100)


def edit_gguf(folder, change):
    tensors, metadata = gguf_model("llama")
    change(tensors, metadata)
    save_gguf(folder, tensors, metadata)


@damage(gguf_file, ("gguf.key", "key llama.context_length is missing"), ("gguf.key", "key tokenizer.ggml.merges"))
def missing_keys_of_a_gguf_file(folder):
    def change(_, metadata):
        del metadata["llama.context_length"], metadata["tokenizer.ggml.merges"]

    edit_gguf(folder, change)


@damage(
    gguf_file,
    ("gguf.key_type", "key llama.block_count is i32, expected u32"),
    ("gguf.key_type", "key llama.attention.layer_norm_rms_epsilon is f64, expected f32"),
)
def keys_of_other_types_in_a_gguf_file(folder):
    def change(_, metadata):
        metadata |= {"llama.block_count": 2, "llama.attention.layer_norm_rms_epsilon": 1e-6}

    edit_gguf(folder, change)


@damage(gguf_file, ("gguf.vector", "is a vector of float16, expected float32"))
def a_norm_of_a_gguf_file_in_float16(folder):
    def change(tensors, _):
        tensors["blk.0.attn_norm.weight"] = tensors["blk.0.attn_norm.weight"].astype(np.float16)

    edit_gguf(folder, change)


@damage(gguf_file, ("schema.missing", "is missing"), ("schema.unexpected", "is not a tensor of schema gguf:llama"))
def a_name_of_hugging_face_in_a_gguf_file(folder):
    def change(tensors, _):
        tensors["model.norm.weight"] = tensors.pop("output_norm.weight")

    edit_gguf(folder, change)


@damage(gguf_file, ("schema.config", "metadata says feed_forward_length 64; all 6 tensors say 128"))
def a_wrong_size_in_a_gguf_file(folder):
    edit_gguf(folder, lambda _, metadata: metadata.update({"llama.feed_forward_length": np.uint32(64)}))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """One folder of each kind, to copy."""
    made = {}
    for make in (llama, wide, torch_zip, gguf_file, numbered):
        made[make] = tmp_path_factory.mktemp(make.__name__)
        make(made[make])
        assert not check(made[make]).errors
    return made


@pytest.mark.parametrize(("base", "function", "expected"), DAMAGES)
def test_a_damage_is_named(base, function, expected, bases, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(bases[base], folder)
    function(folder)
    report = check(folder)
    assert sorted(finding.code for finding in report.errors) == sorted(code for code, _ in expected), report
    unnamed = list(report.errors)
    for code, text in expected:
        finding = next((f for f in unnamed if f.code == code and text in str(f)), None)
        assert finding is not None, (text, report)
        unnamed.remove(finding)
    shown = " ".join(str(report).split())
    assert all(finding.code in shown for finding in report.errors)
    count = len(report.errors)
    assert report.verdict.split(",")[0] == ("1 error" if count == 1 else f"{count} errors")
    json.dumps(report.to_json(), allow_nan=False)


def test_there_are_enough_damages():
    assert len(DAMAGES) >= 40


def test_the_advice_lists_the_files_to_fetch(bases, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(bases[llama], folder)
    a_cut_config_and_a_missing_shard(folder)
    cut(folder / SHARDS[2], -5)
    assert main(["check", str(folder)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    listed = f"2 of 3 shards are missing or damaged; fetch again: {SHARDS[1]}, {SHARDS[2]}, config.json"
    assert listed in out


def test_an_unfinished_conversion_is_to_be_resumed(bases, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(bases[numbered], folder)
    (folder / SHARDS[1]).unlink()
    (folder / ".safeload-resume" / "0123456789abcdef").mkdir(parents=True)
    assert main(["check", str(folder)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "1 of 3 shards is missing or damaged; this is an unfinished conversion: repeat it with --resume;" in out


def test_the_bytes_of_missing_shards_are_counted(bases, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(bases[llama], folder)
    nbytes = sum(array.nbytes for array in load_file(folder / SHARDS[1]).values())
    a_missing_shard(folder)
    (note,) = check(folder, values=False).notes
    assert note.message.startswith(f"1 of 3 shards is missing or damaged ({nbytes:,} bytes)")


@pytest.mark.skipif(not hasattr(os, "SEEK_HOLE"), reason="the system does not tell of holes")
@pytest.mark.parametrize("values", [True, False])
def test_a_hole_of_the_file_system_is_named(bases, tmp_path, values):
    path = tmp_path / "model.safetensors"
    content = (bases[wide] / "model.safetensors").read_bytes()
    begin, end = 1 << 20, (1 << 20) + (1 << 20) + 4 * BLOCK
    with path.open("wb") as file:
        file.write(content[:begin])
        file.seek(end)
        file.write(content[end:])
    with path.open("rb") as file:
        if os.lseek(file.fileno(), 0, os.SEEK_HOLE) != begin:
            pytest.skip("the file system has no holes")
    report = check(path, values=values)
    assert [finding.code for finding in report.errors] == ["file.hole"]
    assert ", never written," in report.errors[0].message


# ---- good folders ----


def rng_weights(names, rows=300, columns=1024, dtype=np.float32):
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal((rows, columns)).astype(dtype) for name in names}


def pruned_rows():
    """Structured pruning: half of the rows, in runs of 80 KiB on block boundaries of the data."""
    tensors = rng_weights(("up.weight", "down.weight"))
    for x in tensors.values():
        x[20:40] = x[60:140] = 0
    return tensors


def pruned_values():
    """Unstructured pruning to 0.5 % of the values."""
    tensors = rng_weights(("up.weight", "down.weight"))
    rng = np.random.default_rng(2)
    return {name: x * (rng.random(x.shape) < 0.005) for name, x in tensors.items()}


def pruned_blocks():
    """Blocks of 32 x 32."""
    tensors = rng_weights(("up.weight",), rows=320)
    mask = np.random.default_rng(3).random((10, 32)) < 0.3
    return {name: x * np.kron(mask, np.ones((32, 32), np.float32)) for name, x in tensors.items()}


def padded_vocabulary():
    tensors = rng_weights(("embed.weight", "head.weight"), rows=600)
    for x in tensors.values():
        x[500:] = 0
    return tensors


def padded_at_both_ends():
    """Two neighbours, the first with a padded end."""
    tensors = rng_weights(("a.weight", "b.weight"))
    tensors["a.weight"][280:] = 0
    return tensors


def fresh_optimizer():
    names = [f"state.{k}.{kind}" for k in range(3) for kind in ("exp_avg", "exp_avg_sq")]
    return dict.fromkeys(names, np.zeros((300, 1024), np.float32)) | rng_weights(("model.w",))


def trained_optimizer():
    """Moments of an embedding whose last rows never had a gradient."""
    tensors = rng_weights(("exp_avg.embed.weight", "exp_avg_sq.embed.weight"), rows=600)
    for x in tensors.values():
        x[100:600] = 0
    return {name: x**2 * 1e-8 for name, x in tensors.items()}


def untrained_adapter():
    tensors = rng_weights([f"layers.{k}.q.lora_A.weight" for k in range(2)], rows=8)
    return tensors | {f"layers.{k}.q.lora_B.weight": np.zeros((65536, 8), np.float32) for k in range(4)}


def int8_codes():
    x = np.random.default_rng(4).integers(-127, 128, (1024, 1024)).astype(np.int8)
    x[100:300] = 0
    return {"w.codes": x}


def masks():
    mask = np.triu(np.full((1024, 1024), np.finfo(np.float32).min, np.float32), 1)
    return {"attn.mask": mask, "attn.bias": np.tril(np.ones((1024, 1024), np.float32))} | rng_weights(("w",))


def heavy_tails():
    """A few large values, as residual streams and routers have them."""
    tensors = rng_weights(("w",))
    tensors["w"][3, 5] = 60_000
    return tensors


def large_all_over():
    return {name: x * 1e8 for name, x in rng_weights(("w",)).items()}


def few_values():
    return {"temperature": np.float32([1e-3] * 500 + [1e9])}


GOOD = (pruned_rows, pruned_values, pruned_blocks, padded_vocabulary, padded_at_both_ends, fresh_optimizer)
GOOD += (trained_optimizer, untrained_adapter, int8_codes, masks, heavy_tails, large_all_over, few_values)


@pytest.mark.parametrize("scheme", [None, "int8", "q8_0", "q4_0", "q4_k"])
@pytest.mark.parametrize("make", GOOD)
def test_zeros_and_large_values_that_are_meant(make, scheme, tmp_path):
    tensors = make()
    if scheme is not None:
        floating = [x for x in tensors.values() if x.dtype == np.float32]
        if len(floating) < len(tensors) or make in (masks, large_all_over, few_values, untrained_adapter):
            pytest.skip("not a model to quantize")
        tensors = {name: safeload.quantize(x, scheme) if x.ndim == 2 else x for name, x in tensors.items()}
    suffix = "gguf" if scheme not in (None, "int8") else "safetensors"
    path = tmp_path / f"x.{suffix}"
    (gguf.save_file if suffix == "gguf" else save_file)(tensors, path)
    report = check(path)
    assert not report.errors, report
    assert not [finding for finding in report.warnings if finding.code == "file.hole" and make is not pruned_rows]


REAL = sorted(
    path
    for path in [*(DATA / "quantized").iterdir(), *(DATA / "lora").iterdir(), *DATA.glob("*.safetensors")]
    if path.suffix == ".safetensors" or path.name in FIXTURES or (path / "adapter_config.json").exists()
)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_files_have_no_error(path):
    """Files of other writers; their configs lack the sizes that a schema needs."""
    report = check(path, schema=None)
    assert [f for f in report.errors if not f.code.startswith("layers.")] == [], report
    assert len(REAL) >= 20


def test_shared_folders_have_no_error(shared):
    for path in [*(shared / "safetensors").iterdir(), shared / "npz" / "checkpoint20.npz"]:
        assert not check(path).errors, path


@pytest.mark.parametrize("name", families.gguf_architectures())
def test_a_gguf_file_with_all_that_llama_cpp_requires(name, tmp_path):
    save_gguf(tmp_path, *gguf_model(name))
    report = check(tmp_path)
    assert (report.errors, report.notes, report.schema) == ([], [], f"gguf:{name}"), report


@pytest.mark.parametrize("kind", ["llama-gqa", "qwen2", "gemma2", "phi3", "mixtral"])
def test_quantized_and_pruned_models_have_no_error(kind, tmp_path):
    config, tensors = small(kind)
    for folder, change in (("plain", None), ("int8", "int8"), ("q8_0", "q8_0")):
        path = tmp_path / folder
        path.mkdir()
        write_folder(path, config, tensors)
        source = safeload.load_quantized(path, change) if change else path
        assert not check(source, config=config).errors
    pruned = {name: np.where(np.abs(x.astype(np.float32)) < 0.02, x.dtype.type(0), x) for name, x in tensors.items()}
    assert not check(pruned, config=config).errors


# ---- the terminal ----


@pytest.mark.parametrize(
    ("change", "expected", "strict"),
    [({}, "no errors", 0), ({"z": np.zeros((2, 2))}, "no errors, 1 warning", 0), ({"r": np.float32([300])}, None, 1)],
)
def test_strict_accepts_matrices_of_a_single_value(change, expected, strict, tmp_path, capsys):
    path = tmp_path / "x.safetensors"
    save_file({"w": np.float32([1, 2]), **change}, path)
    assert main(["check", str(path)]) == 0
    assert expected is None or expected in capsys.readouterr().out.splitlines()
    assert main(["check", str(path), "--strict"]) == strict


def test_the_word_sound_is_gone():
    root = Path(safeload.__file__).parent
    texts = [path.read_text("utf-8") for path in [*root.glob("cli/*.py"), *root.glob("operations/checking/*.py")]]
    assert not any(" sound" in text or "SOUND" in text for text in texts)


# ---- elsewhere ----


def test_an_executor_finds_the_same_damages(bases, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(bases[wide], folder)
    flipped_exponent_bits_in_float32(folder)
    blank(folder, block_in(folder, "c.weight"), 50 * BLOCK)
    alone = check(folder)
    assert [finding.code for finding in alone.errors] == ["file.hole", "value.outlier", "value.outlier"]
    with ThreadPoolExecutor(2) as executor:
        report = check(folder, executor=executor)
    assert report.errors == alone.errors
    assert report.warnings == alone.warnings


@pytest.mark.parametrize(
    ("largest", "small", "expected"),
    [(70_000, 6.9, True), (70_000, 7.1, False), (65_000, 1e-3, False), (7e9, 6.9e5, True), (7e9, 7.1e5, False)],
)
def test_the_limit_of_an_outlier_is_exact(largest, small, expected):
    """On both sides of 10,000 times the percentile, in the bins of the histogram and beyond them."""
    x = np.full(2000, small, np.float32)
    x[7] = largest
    assert [finding.code for finding in check(x).errors] == ["value.outlier"] * expected
    x[:1002] = 0
    x[7] = largest
    assert not check(x).errors  # 999 values that are not zero


def test_very_many_missing_shards_are_grouped(tmp_path):
    names = {f"t{k}": f"m-{k}.safetensors" for k in range(300)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    report = check(tmp_path)
    assert len(report.errors) == 300
    assert "and 299 more like it" in " ".join(str(report).split())


def test_a_cut_file_object_is_named():
    buffer = io.BytesIO()
    np.save(buffer, np.ones(100))
    report = check(io.BytesIO(buffer.getvalue()[:-8]))
    assert [finding.code for finding in report.errors] == ["file.format"]
