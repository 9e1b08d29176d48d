"""Folders of weights: which of their files are opened, and what is said of the others; lists of files; split GGUF."""

import json
import logging
import os
import shutil

import numpy as np
import pytest
from builders import torch_build
from builders.gguf_build import BOOL, F32, I32, STRING, U16, part

import safeload
from safeload import FormatError, SafeloadError, UnsupportedError
from safeload.numpy import save_file

gguf = pytest.importorskip("gguf")

pytestmark = pytest.mark.no_core


def put(folder, *names):
    """Safetensors files, each with a tensor called as the file."""
    folder.mkdir(exist_ok=True)
    for name in names:
        save_file({name: np.zeros(2, np.float32)}, folder / name, durable=False)
    return folder


def chosen(folder):
    with safeload.open(folder) as opened:
        return [os.path.basename(path) for path in opened.files]


def put_index(folder, name, *files):
    (folder / name).write_text(json.dumps({"weight_map": {file: file for file in files}}))


SET = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["model.safetensors", "model.fp16.safetensors"], ["model.safetensors"]),
        (["model.safetensors", *SET], ["model.safetensors"]),
        (["model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (SET, SET),
        ([*SET, "consolidated.safetensors"], SET),
        ([*SET, "other-00001-of-00003.safetensors"], SET),
        (["x-00001-of-00001.safetensors"], ["x-00001-of-00001.safetensors"]),
        (["m-00001-of-000002.safetensors", "m-00002-of-000002.safetensors"], None),
        (["m-1-of-2.safetensors", "m-2-of-2.safetensors"], None),
        (["adapter_model.safetensors"], ["adapter_model.safetensors"]),
        (["diffusion_pytorch_model.safetensors"], ["diffusion_pytorch_model.safetensors"]),
        (["model.fp16.safetensors"], ["model.fp16.safetensors"]),
        (
            ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"],
            ["diffusion_pytorch_model.safetensors"],
        ),
        (["Some model of mine.safetensors"], ["Some model of mine.safetensors"]),
        (["a-00000-of-00000.safetensors"], ["a-00000-of-00000.safetensors"]),
    ],
)
def test_the_weights_of_a_folder_are_chosen_in_this_order(names, wanted, tmp_path):
    folder = put(tmp_path / "model", *names)
    assert chosen(folder) == (names if wanted is None else wanted)


def test_an_index_comes_first(tmp_path):
    folder = put(tmp_path / "model", "consolidated.safetensors", "a.safetensors", *SET)
    put_index(folder, "x.safetensors.index.json", "a.safetensors")
    assert chosen(folder) == ["a.safetensors"]
    put_index(folder, "y.safetensors.index.json", "a.safetensors")
    with pytest.raises(FormatError, match=r"more than one index: x.safetensors.index.json, y.safetensors.index.json"):
        safeload.open(folder)
    put_index(folder, "model.safetensors.index.json", *SET)
    assert chosen(folder) == SET
    with safeload.open(folder) as opened:
        assert opened.index == str(folder / "model.safetensors.index.json")


@pytest.mark.parametrize(
    "names",
    [
        ["a.safetensors", "b.safetensors"],
        ["model.fp16.safetensors", "model.bf16.safetensors"],
        ["diffusion_pytorch_model.bf16.safetensors", "diffusion_pytorch_model.fp16.safetensors"],
        [*SET, *(name.replace("model", "other") for name in SET)],
    ],
)
def test_several_files_left_over_are_listed_with_what_to_type(names, tmp_path):
    folder = put(tmp_path / "model", *names)
    with pytest.raises(UnsupportedError) as caught:
        safeload.open(folder)
    message = str(caught.value)
    assert all(name in message for name in names)
    assert "safeload.open([" in message
    assert ("variants of one model" in message) == all(name.split(".")[0] == names[0].split(".")[0] for name in names)
    if len(names) == 2:  # what is advised works
        paths = message[message.index("safeload.open([") + len("safeload.open(") : message.rindex(")")]
        assert set(safeload.load(json.loads(paths.replace("'", '"')))) == set(names)


@pytest.mark.parametrize(
    ("there", "total", "missing"),
    [
        ([1], 2, ["m-00002-of-00002.safetensors"]),
        ([2], 2, ["m-00001-of-00002.safetensors"]),
        ([1, 3], 4, ["m-00002-of-00004.safetensors", "m-00004-of-00004.safetensors"]),
        ([1, 5], 2, ["m-00002-of-00002.safetensors"]),
        ([1], 99_999, ["99,998 missing", "m-00002-of-99999.safetensors"]),
        ([1], 999_999_999, ["999,999,998 missing"]),
    ],
)
def test_an_incomplete_set_names_what_is_missing(there, total, missing, tmp_path):
    folder = put(tmp_path / "model", *(f"m-{k:05}-of-{total:05}.safetensors" for k in there))
    with pytest.raises(FormatError) as caught:
        safeload.open(folder)
    assert all(part in str(caught.value) for part in missing)
    assert len(str(caught.value)) < 600 + len(str(folder))
    assert {finding.code for finding in safeload.check(folder).errors} == {"index.shard"}
    assert safeload.load(folder / f"m-{there[0]:05}-of-{total:05}.safetensors")  # by its path it opens


def test_a_pipeline_of_diffusers_says_where_its_weights_are(tmp_path):
    folder = put(tmp_path / "pipeline")
    (folder / "model_index.json").write_text("{}")
    (folder / "scheduler").mkdir()
    for inner in ("unet", "vae", "text_encoder"):
        put(folder / inner, "diffusion_pytorch_model.safetensors")
    with pytest.raises(UnsupportedError, match="weights in text_encoder, unet, vae: open one of them"):
        safeload.open(folder)
    assert chosen(folder / "unet") == ["diffusion_pytorch_model.safetensors"]
    put(folder, "v1-5.safetensors")
    with safeload.open(folder) as opened:
        assert "text_encoder, unet, vae" in opened.notes[0]


def test_what_was_passed_over_is_in_the_notes_and_in_the_log(tmp_path, caplog):
    folder = put(tmp_path / "model", "model.safetensors", "consolidated.safetensors", "model.fp16.safetensors")
    for name in ("readme.md", "training_args.bin", "optimizer.pt", "rng_state_0.pth"):
        (folder / name).write_text("")
    with caplog.at_level(logging.DEBUG, "safeload"), safeload.open(folder) as opened:
        assert opened.notes[0] == "skipped: consolidated.safetensors, model.fp16.safetensors"
        assert "consolidated" in opened.notes[1]
    assert "skipped: consolidated.safetensors, model.fp16.safetensors" in caplog.text


def test_an_adapter_is_named_in_the_notes(tmp_path, capsys):
    folder = put(tmp_path / "lora", "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    with safeload.open(folder) as opened:
        assert opened.notes[0].startswith("an adapter (PEFT)")
    from builders.inside import main

    assert main(["info", str(folder)]) == 0
    assert "an adapter (PEFT)" in capsys.readouterr().out


def test_a_file_that_is_no_file_is_an_error_and_not_passed_over(tmp_path):
    folder = put(tmp_path / "model", "other.safetensors")
    (folder / "model.safetensors").symlink_to("gone")
    if not (folder / "model.safetensors").is_symlink():
        pytest.skip("Wine says that it has made a symbolic link, and has not")
    with pytest.raises(FileNotFoundError):
        safeload.open(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert chosen(folder) == ["other.safetensors"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("\x1b[31m.safetensors", marks=pytest.mark.skipif(os.name == "nt", reason="no name for Windows")),
        "n" * 200 + ".safetensors",
    ],
)
def test_names_of_files_are_escaped_and_short_in_messages(name, tmp_path):
    folder = put(tmp_path / "model", "b.safetensors")
    save_file({"x": np.zeros(1)}, folder / name, durable=False)
    with pytest.raises(UnsupportedError) as caught:
        safeload.open(folder)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000 + 3 * len(str(folder))


# ---- lists ----


def test_a_list_is_the_union_of_its_files(tmp_path):
    folder = put(tmp_path / "model", "a.safetensors", "b.safetensors")
    paths = [folder / "b.safetensors", str(folder / "a.safetensors")]
    with safeload.open(paths) as opened:
        assert set(opened) == {"a.safetensors", "b.safetensors"}
        assert opened.files == [str(path) for path in paths]
        assert "and 1 more" in repr(opened)
    assert set(safeload.load(tuple(paths))) == {"a.safetensors", "b.safetensors"}
    assert set(safeload.load(paths[:1])) == {"b.safetensors"}
    with safeload.open(paths) as opened:
        assert safeload.check(opened).ok


def test_a_list_takes_folders_and_indexes(tmp_path):
    folder = put(tmp_path / "model", *SET)
    put_index(folder, "model.safetensors.index.json", *SET)
    other = put(tmp_path / "other", "x.safetensors")
    for first in (folder, folder / "model.safetensors.index.json"):
        assert set(safeload.load([first, other])) == {*SET, "x.safetensors"}


def test_a_list_that_makes_no_checkpoint_is_refused(tmp_path):
    folder = put(tmp_path / "model", "a.safetensors")
    with pytest.raises(ValueError, match="list of paths is empty"):
        safeload.open([])
    with pytest.raises(FormatError, match="is in both"):
        safeload.open([folder / "a.safetensors", folder])
    np.savez(tmp_path / "a.npz", w=np.zeros(2))
    with pytest.raises(UnsupportedError, match="all files of a list must have one format"):
        safeload.open([folder, tmp_path / "a.npz"])
    with pytest.raises(TypeError):
        safeload.open([folder, 3])
    with pytest.raises(FileNotFoundError):
        safeload.open([folder, tmp_path / "gone"])


# ---- torch ----


def test_shards_of_torch_open_without_their_index(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for k in (1, 2):
        value = {f"w{k}": torch_build.tensor(torch_build.Storage("0", np.arange(4.0)))}
        (folder / f"pytorch_model-0000{k}-of-00002.bin").write_bytes(torch_build.zip_file(value))
    assert set(safeload.load(folder)) == {"w1", "w2"}
    (folder / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(FormatError, match=r"pytorch_model-00001-of-00002.bin"):
        safeload.open(folder)


# ---- split GGUF ----


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """Five tensors in three parts, as gguf-py writes them."""
    folder = tmp_path_factory.mktemp("split")
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=2)
    writer.add_name("a name")
    for k in range(5):
        writer.add_tensor(f"w{k}", np.full((2, 32), k, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


PARTS = [f"model-0000{k}-of-00003.gguf" for k in (1, 2, 3)]


@pytest.mark.parametrize("name", ["", *PARTS])
def test_all_parts_of_a_gguf_open_by_the_folder_and_by_any_of_them(name, split):
    with safeload.open(split / name) as opened:
        assert [os.path.basename(path) for path in opened.files] == PARTS
        assert opened.format == "gguf"
        assert {key: array[0, 0] for key, array in opened.load().items()} == {f"w{k}": k for k in range(5)}
        assert opened.metadata["general.name"] == "a name"
        assert not [key for key in opened.metadata if key.startswith("split.")]
        assert opened.get_slice("w4")[1, 3] == 4
        assert safeload.check(opened, schema=None).ok


def test_a_split_gguf_is_converted_into_one_file(split, tmp_path):
    safeload.convert(split, tmp_path / "one.gguf")
    with safeload.open(tmp_path / "one.gguf") as opened:
        assert len(opened) == 5
        assert opened.metadata["general.name"] == "a name"
        assert not [key for key in opened.metadata if key.startswith("split.")]


def test_parts_in_a_list_are_opened_once(split):
    with safeload.open([split / name for name in PARTS]) as opened:
        assert len(opened) == 5


@pytest.mark.parametrize("gone", range(3))
def test_a_missing_part_is_named(gone, split, tmp_path):
    folder = shutil.copytree(split, tmp_path / "model")
    (folder / PARTS[gone]).unlink()
    for path in (folder, *(folder / name for k, name in enumerate(PARTS) if k != gone)):
        with pytest.raises(FormatError, match=PARTS[gone]):
            safeload.open(path)


def test_a_part_of_another_name_says_what_it_should_be(split, tmp_path):
    shutil.copy(split / PARTS[1], tmp_path / "part2.gguf")
    for path in (tmp_path, tmp_path / "part2.gguf"):
        with pytest.raises(UnsupportedError, match=r"part 2 of 3 .* must end in -00002-of-00003.gguf"):
            safeload.open(path)


def test_a_split_file_beside_another_is_ambiguous(split, tmp_path):
    folder = shutil.copytree(split, tmp_path / "model")
    shutil.copy(split / PARTS[0], folder / "mmproj.gguf")
    with pytest.raises(UnsupportedError, match=r"2 GGUF files: mmproj.gguf, model-00001-of-00003.gguf"):
        safeload.open(folder)


def put_parts(folder, *parts, count=2):
    for k, content in enumerate(parts):
        (folder / f"m-{k + 1:05}-of-{count:05}.gguf").write_bytes(content)
    return folder / f"m-00001-of-{count:05}.gguf"


def test_parts_byte_by_byte(tmp_path):
    path = put_parts(tmp_path, part(0, 2, 2, ["a"]), part(1, 2, 2, ["b"]))
    assert set(safeload.load(path)) == {"a", "b"}
    path = put_parts(tmp_path, part(0, 2, 1, []), part(1, 2, 1, ["b"]))  # metadata in a part of its own
    assert set(safeload.load(path)) == {"b"}
    path = put_parts(tmp_path, part(0, 1, 1, ["a"]), count=1)
    with safeload.open(path) as opened:
        assert dict(opened.metadata) == {}
        assert set(opened) == {"a"}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (part(0, 2, 3, ["a"]), part(1, 2, 3, ["b"]), "split.tensors.count is 3, but the parts have 2"),
        (part(0, 2, 2, ["a"]), part(1, 2, 3, ["b"]), "split.tensors.count is 3, but 2 according to the other parts"),
        (part(0, 2, 2, ["a"]), part(0, 2, 2, ["b"]), "split.no is 0, but 1 according to the other parts"),
        (part(0, 2, 2, ["a"]), part(1, 3, 2, ["b"]), "split.count is 3, but 2 according to the other parts"),
        (part(0, 2, 2, ["a"]), part(1, 2, 2, ["a"]), "tensor 'a' is in both"),
        (part(0, 2, 2, ["a"]), part(None, None, None, ["b"]), "split.no must be an integer"),
        (part(None, 2, 2, ["a"]), part(1, 2, 2, ["b"]), "split.no must be an integer, got None"),
        (part(2, 2, 2, ["a"]), part(1, 2, 2, ["b"]), "split.no is 2 and split.count is 2"),
        (part(0, 0, 2, ["a"]), part(1, 2, 2, ["b"]), "split.count is 0"),
        (
            part(0, "x" * 9000, 2, ["a"], types=(U16, STRING, I32)),
            b"",
            "split.count must be an integer, got 'xx",
        ),
        (part(0, 1, 2, ["a"], types=(U16, BOOL, I32)), b"", "split.count must be an integer, got True"),
        (part(0, 2.0, 2, ["a"], types=(U16, F32, I32)), b"", "split.count must be an integer, got 2.0"),
        (part(0, 2, -1, ["a"]), part(1, 2, -1, ["b"]), "split.tensors.count is -1"),
    ],
)
def test_parts_that_disagree_are_refused(first, second, message, tmp_path):
    path = put_parts(tmp_path, first, second)
    with pytest.raises(FormatError) as caught:
        safeload.open(path)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


def test_a_huge_count_of_parts_costs_nothing(tmp_path):
    path = tmp_path / "m-00001-of-65535.gguf"
    path.write_bytes(part(0, 65535, 1, ["a"]))
    with pytest.raises(SafeloadError, match="65,534 of 65,535 parts are missing"):
        safeload.open(path)


def test_the_error_for_a_folder_names_what_was_looked_for(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UnsupportedError) as caught:
        safeload.open(tmp_path)
    for pattern in ("*.safetensors", "*.distcp", "*.gguf", "*.pdparams", "*.onnx", "*.msgpack", "_METADATA"):
        assert pattern in str(caught.value).split("looked for ")[1], pattern
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UnsupportedError) as caught:
        safeload.open(tmp_path, format="keras")
    assert str(caught.value).endswith("found m.gguf, notes.txt; looked for *.keras, *.h5, *.nemo, *.llamafile")
