"""Folders as transformers, diffusers and the Hub's cache leave them: which model is read, what is said of the rest."""

import json
import os
from collections import Counter

import numpy as np
import pytest
from builders import torch_build

import safeload
from safeload import FormatError, SafeloadError, UnsupportedError
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core


def torch_bytes(tensors):
    """A torch checkpoint."""
    storages = {name: torch_build.Storage(str(k), array) for k, (name, array) in enumerate(tensors.items())}
    return torch_build.zip_file({name: torch_build.tensor(storage) for name, storage in storages.items()})


def put(folder, *names):
    """Weight files, each with a tensor named after its file; an index lists the shards with its stem."""
    folder.mkdir(exist_ok=True, parents=True)
    for name in names:
        if name.endswith(".json"):
            continue
        if name.endswith(".safetensors"):
            save_file({name: np.zeros(2, np.float32)}, folder / name, durable=False)
        else:
            (folder / name).write_bytes(torch_bytes({name: np.zeros(2, np.float32)}))
    for name in names:
        if name.endswith(".json"):
            stem, suffix = name.split(".")[0], name.split(".")[1]
            variant = name.split(".")[3] if name.count(".") == 4 else ""
            shards = [
                n for n in names if n.startswith(f"{stem}") and n.endswith(suffix) and "-of-" in n and variant in n
            ]
            put_index(folder, name, *(n for n in shards if bool(variant) or n.count(".") == 1))
    return folder


def put_index(folder, name, *files):
    (folder / name).write_text(json.dumps({"weight_map": {file: file for file in files}}))


def chosen(folder):
    with safeload.open(folder) as opened:
        return sorted(os.path.basename(path) for path in opened.files)


def shards(pattern):
    return [pattern.format(f"0000{k}-of-00002") for k in (1, 2)]


MODEL, DIFFUSION = shards("model-{}.safetensors"), shards("diffusion_pytorch_model-{}.safetensors")
CASES = {
    "file beside its index": (["model.safetensors", "model.safetensors.index.json", *MODEL], ["model.safetensors"]),
    "diffusers: index first": (
        ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json", *DIFFUSION],
        DIFFUSION,
    ),
    "torch: file beside its index": (
        ["pytorch_model.bin", "pytorch_model.bin.index.json", *shards("pytorch_model-{}.bin")],
        ["pytorch_model.bin"],
    ),
    "torch: diffusers": (
        [
            "diffusion_pytorch_model.bin",
            "diffusion_pytorch_model.bin.index.json",
            *shards("diffusion_pytorch_model-{}.bin"),
        ],
        shards("diffusion_pytorch_model-{}.bin"),
    ),
    "torch: set without index": (shards("pytorch_model-{}.bin"), shards("pytorch_model-{}.bin")),
    "torch: another stem": (["model.bin.index.json", *shards("model-{}.bin")], shards("model-{}.bin")),
    "torch: another stem without index": (shards("weights-{}.bin"), shards("weights-{}.bin")),
    "variant of diffusers": (
        ["diffusion_pytorch_model.safetensors.index.fp16.json", *shards("diffusion_pytorch_model.fp16-{}.safetensors")],
        shards("diffusion_pytorch_model.fp16-{}.safetensors"),
    ),
    "old variant of diffusers": (
        ["diffusion_pytorch_model.safetensors.index.fp16.json", *shards("diffusion_pytorch_model-{}.fp16.safetensors")],
        shards("diffusion_pytorch_model-{}.fp16.safetensors"),
    ),
    "variant without index": (shards("model-{}.fp16.safetensors"), shards("model-{}.fp16.safetensors")),
    "variant of transformers without index": (shards("model.fp16-{}.safetensors"), shards("model.fp16-{}.safetensors")),
    "torch: variant": (["pytorch_model.fp16.bin"], ["pytorch_model.fp16.bin"]),
    "torch: variant with an index": (
        ["pytorch_model.bin.index.fp16.json", *shards("pytorch_model.fp16-{}.bin")],
        shards("pytorch_model.fp16-{}.bin"),
    ),
    "without variant first": (
        [
            *MODEL,
            "model.safetensors.index.json",
            "model.safetensors.index.fp16.json",
            *shards("model.fp16-{}.safetensors"),
        ],
        MODEL,
    ),
    "file without variant beside an index with one": (
        ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"],
        ["diffusion_pytorch_model.safetensors"],
    ),
    "torch without variant before safetensors with one": (
        ["pytorch_model.bin", "model.fp16.safetensors"],
        ["pytorch_model.bin"],
    ),
    "safetensors before torch": (["pytorch_model.bin", "model.safetensors"], ["model.safetensors"]),
    "sets of both": ([*MODEL, *shards("pytorch_model-{}.bin")], MODEL),
    "training state beside": (["pytorch_model.bin", "training_args.bin", "optimizer.bin"], ["pytorch_model.bin"]),
    "state in a set": ([*shards("optimizer-{}.bin"), "pytorch_model.bin"], ["pytorch_model.bin"]),
    "index of another stem": (["model.safetensors", "x.safetensors.index.json"], ["model.safetensors"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_as_its_library_reads_it(name, tmp_path):
    names, expected = CASES[name]
    folder = put(tmp_path / "m", *names)
    assert chosen(folder) == sorted(expected)
    with safeload.open(folder) as opened:
        rest = sorted({n for n in names if not n.startswith(("training", "optimizer"))} - {*expected})
        notes = " ".join(opened.notes)
        assert all(n in notes for n in rest if opened.index is None or n != os.path.basename(str(opened.index)))
    assert not [finding for finding in safeload.check(folder).errors if finding.code != "folder.ambiguous"]


@pytest.mark.parametrize(
    "index", ["model.safetensors.index.json", "x.safetensors.index.json", "model.safetensors.index.fp16.json"]
)
@pytest.mark.parametrize(
    "whole",
    [
        "model.safetensors",
        "diffusion_pytorch_model.safetensors",
        "other.safetensors",
        "pytorch_model.bin",
        "model.fp16.safetensors",
        "consolidated.00.pth",
    ],
)
def test_an_index_without_its_shards_hides_no_whole_file(index, whole, tmp_path):
    folder = put(tmp_path / "m", whole)
    put_index(folder, index, "gone-1.safetensors", "gone-2.safetensors")
    assert chosen(folder) == [whole]
    assert not safeload.check(folder).errors


def test_an_index_without_its_shards_hides_no_gguf_file(tmp_path):
    safeload.gguf.save_file({"w": np.zeros(2, np.float32)}, tmp_path / "a.gguf")
    put_index(tmp_path, "model.safetensors.index.json", "model-00001-of-00002.safetensors")
    assert chosen(tmp_path) == ["a.gguf"]


def test_an_index_without_its_shards_alone_names_them(tmp_path):
    put_index(tmp_path, "model.safetensors.index.json", *MODEL)
    with pytest.raises(FileNotFoundError, match=f"{MODEL[0]}; model.safetensors.index.json lists it"):
        safeload.open(tmp_path)
    assert {finding.code for finding in safeload.check(tmp_path).errors} == {"index.shard"}


def test_a_partly_missing_set_is_named_beside_unrelated_files(tmp_path):
    put(tmp_path, MODEL[0], "training_args.bin")
    put_index(tmp_path, "model.safetensors.index.json", *MODEL)
    with pytest.raises(FileNotFoundError, match=MODEL[1]):
        safeload.open(tmp_path)


@pytest.mark.parametrize(
    "names", [["model.bf16.safetensors", "model.fp16.safetensors"], [*shards("a-{}.bin"), *shards("b-{}.bin")]]
)
def test_equals_are_refused_by_name(names, tmp_path):
    with pytest.raises(UnsupportedError) as caught:
        safeload.open(put(tmp_path / "m", *names))
    assert all(name in str(caught.value) for name in names)


# ---- a file and an index that are both whole ----


def both(folder, a, b, stem="model", suffix=".safetensors"):
    """A file with the tensors ``a``, and two shards with those of ``b``."""
    folder.mkdir(exist_ok=True)
    files = {f"{stem}{suffix}": a}
    files.update({name: {key: b[key]} for name, key in zip(shards(f"{stem}-{{}}{suffix}"), b, strict=True)})
    for name, tensors in files.items():
        if suffix == ".bin":
            (folder / name).write_bytes(torch_bytes(tensors))
        else:
            save_file(tensors, folder / name, durable=False)
    names = dict(zip(b, shards(f"{stem}-{{}}{suffix}"), strict=True))
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


ONES = {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
OTHERS = {
    "values": {**ONES, "b": np.zeros(4, np.float32)},
    "shape": {**ONES, "b": np.ones(5, np.float32)},
    "dtype": {**ONES, "b": np.ones(4, np.float16)},
    "names": {"a": ONES["a"], "c": ONES["b"]},
}


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
@pytest.mark.parametrize("how", OTHERS)
def test_check_finds_two_models_in_a_folder(how, stem, tmp_path):
    folder = both(tmp_path / "m", ONES, OTHERS[how], stem)
    counts = Counter(finding.code for finding in safeload.check(folder).errors)
    assert counts["folder.ambiguous"] == 1
    assert bool(safeload.check(folder, values=False).errors) == (how != "values")
    with safeload.open(folder) as opened:
        assert len(opened.files) == (1 if stem == "model" else 2)


def test_check_finds_two_models_of_torch(tmp_path):
    folder = both(tmp_path / "m", ONES, OTHERS["values"], "pytorch_model", ".bin")
    assert [finding.code for finding in safeload.check(folder).errors] == ["folder.ambiguous"]


def test_a_model_that_is_there_twice_is_no_error(tmp_path):
    assert safeload.check(both(tmp_path / "m", ONES, ONES)).ok


def test_a_model_beside_a_part_of_another_is_no_error(tmp_path):
    folder = both(tmp_path / "m", ONES, OTHERS["values"])
    os.remove(folder / MODEL[0])
    assert safeload.check(folder).ok
    assert safeload.load(folder)["b"].tolist() == [1, 1, 1, 1]


def test_edit_changes_the_model_that_is_read(tmp_path):
    folder = both(tmp_path / "m", ONES, OTHERS["values"])
    with safeload.edit(folder) as edit:
        edit.metadata["key"] = "value"
    with safeload.open(folder) as opened:
        assert opened.metadata["key"] == "value"


# ---- adapters ----


def test_a_complete_model_beside_the_config_of_an_adapter_is_none(tmp_path):
    folder = put(tmp_path / "m", "model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    with safeload.open(folder) as opened:
        assert not any("adapter" in note for note in opened.notes)
    put(folder, "adapter_model.safetensors")
    with safeload.open(folder) as opened:
        assert opened.notes == ("skipped: adapter_model.safetensors",) or not any("LoRA" in n for n in opened.notes)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapters.safetensors", "adapter_model.bin"])
def test_an_adapter_is_called_one(name, tmp_path):
    folder = put(tmp_path / "m", name)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    with safeload.open(folder) as opened:
        assert "a LoRA adapter" in opened.notes[0]


def test_an_adapter_in_a_file_called_model_is_called_one(tmp_path):
    save_file({"base_model.model.q.lora_A.weight": np.zeros((8, 4), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    with safeload.open(tmp_path) as opened:
        assert "a LoRA adapter" in opened.notes[0]


# ---- the Hub's cache, and links ----


@pytest.fixture
def cache(tmp_path):
    """A repository in the cache, with a snapshot for each name."""

    def make(*snapshots, main=None):
        root = tmp_path / "models--o--n"
        (root / "blobs").mkdir(parents=True)
        for k, name in enumerate(snapshots):
            folder = root / "snapshots" / name
            folder.mkdir(parents=True)
            save_file({"w": np.full(2, k, np.float32)}, root / "blobs" / f"blob{k}", durable=False)
            (folder / "model.safetensors").symlink_to(f"../../blobs/blob{k}")
        if main is not None:
            (root / "refs").mkdir()
            (root / "refs" / "main").write_text(main)
        return root

    return make


def test_a_repository_folder_stands_for_the_snapshot_of_main(cache):
    root = cache("1" * 40, "2" * 40, main="2" * 40)
    assert safeload.load(root)["w"].tolist() == [1, 1]
    assert safeload.check(root).ok
    assert safeload.info(root)
    assert safeload.stats(root)
    with safeload.open(root) as opened:
        assert all("2" * 40 in path for path in opened.files)
        assert opened.__copy__()["w"].tolist() == [1, 1]


@pytest.mark.parametrize("main", [None, "gone", "../../x", "", "\xff"])
def test_a_repository_folder_stands_for_its_only_snapshot(cache, main):
    assert safeload.load(cache("r", main=main))["w"].tolist() == [0, 0]


def test_several_snapshots_without_main_are_listed(cache):
    with pytest.raises(UnsupportedError, match="2 snapshots: r, s; open one"):
        safeload.open(cache("r", "s"))


def test_a_snapshot_is_converted_with_the_files_beside_it(cache, tmp_path):
    root = cache("r", main="r")
    (root / "snapshots" / "r" / "config.json").write_text('{"model_type": "x"}')
    safeload.convert(root, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "x"


def test_folders_called_snapshots_are_nothing_else(tmp_path):
    (tmp_path / "snapshots").mkdir()
    put(tmp_path, "model.safetensors")
    assert chosen(tmp_path) == ["model.safetensors"]
    (tmp_path / "empty" / "snapshots").mkdir(parents=True)
    (tmp_path / "empty" / "blobs").mkdir(parents=True)
    with pytest.raises(UnsupportedError, match="no weights here"):
        safeload.open(tmp_path / "empty")


@pytest.mark.parametrize("name", ["model.safetensors", "a.gguf", "pytorch_model.bin", MODEL[0], "config.json"])
def test_a_dangling_link_is_named_with_its_target(name, tmp_path):
    folder = tmp_path / "m"
    if name == MODEL[0]:
        put(folder, *MODEL, "model.safetensors.index.json")
        os.remove(folder / name)
    elif name == "config.json":
        put(folder, "model.safetensors")
    folder.mkdir(exist_ok=True)
    (folder / name).symlink_to("../blobs/gone")
    with pytest.raises(FileNotFoundError, match=rf"{name}, a link to \.\./blobs/gone, which does not exist"):
        safeload.open(folder)
    with pytest.raises(FileNotFoundError, match=r"a link to \.\./blobs/gone"):
        safeload.open(folder / name)
    findings = [str(finding) for finding in safeload.check(folder).errors]
    assert any("a link to ../blobs/gone" in finding for finding in findings)
    assert name == MODEL[0] or not any("index" in finding.split("(")[0] for finding in findings)


# ---- what is no checkpoint ----

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1000\n"


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json", "config.json"])
def test_a_pointer_of_git_lfs_is_called_one(name, tmp_path):
    put(tmp_path, MODEL[0], "x.safetensors") if name == "config.json" else put(tmp_path, *MODEL)
    (tmp_path / name).write_text(POINTER)
    if name == "config.json":
        os.remove(tmp_path / MODEL[0])
    if name.startswith("pytorch"):
        for shard in MODEL:
            os.remove(tmp_path / shard)
    with pytest.raises(FormatError, match="is a Git LFS pointer: run `git lfs pull`"):
        safeload.open(tmp_path)
    assert "Git LFS pointer" in str(safeload.check(tmp_path).errors[0])


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"7z\xbc\xaf\x27\x1c\0\4", "a 7z archive"),
        (b"Rar!\x1a\x07\1\0", "a RAR archive"),
        (b"|TZR|\n", "a file of tensorizer"),
        (b"\x30\0\0\0ET12", "an ExecuTorch program"),
        (b"\x12\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "parameters of MXNet"),
        (b"\x20\0\0\0ORTM", "a model of ONNX Runtime"),
        (b"\x15\0\0\0\2" + bytes(59) + b"\xef\xbe\xad\xde", "the weights of a Core ML package"),
        (b"\x08\6\x12\xda\1\n\x18\n\7input_2\x1a\r*\x0b", "a Core ML model"),
        (b"\x08\1\x12\xe8\x11\n\x16\n\5input\x1a\r*\x0b", "a Core ML model"),
        (b"\x08\1\x12\xe6\x95B\n\xc8$\x12\x9e$\nB\n\5AddV2", "a TensorFlow SavedModel"),
        (b"\6\0\0\0\x0c\0WhisperSpec\0\3\0\0\0", "a CTranslate2 model"),
        (b"\xba\x16\x4f\x2f\x0c\0\0\0", "a fastText model"),
        (b"CBM1", "a CatBoost model"),
        (b"{L\0\0\0\0\0\0\0\7learner{", "an XGBoost model"),
        (b'<?xml version="1.0"?>\n<net name="torch_jit" version="11">', "the graph of an OpenVINO model"),
    ],
)
def test_files_of_other_tools_are_named(content, kind, tmp_path):
    (tmp_path / "x").write_bytes(content + bytes(200))
    with pytest.raises(SafeloadError, match=kind):
        safeload.open(tmp_path / "x")


def test_an_unzipped_torch_checkpoint_is_called_one(tmp_path):
    for name in ("data.pkl", "version", "byteorder"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "data").mkdir()
    with pytest.raises(UnsupportedError, match="an unzipped torch checkpoint"):
        safeload.open(tmp_path)
