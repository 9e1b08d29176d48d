"""No operation writes over what it reads, however that is spelled, and none writes memory under two names."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from builders.inside import main
from builders.paths import DATA

import safeload
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

OLD = {"w": np.zeros(1000, np.float32), "v": np.ones(8, np.float32)}
NEW = {**OLD, "w": np.where(np.arange(1000) == 7, np.float32(1), OLD["w"])}


@pytest.fixture
def files(tmp_path):
    save_file(OLD, tmp_path / "old.safetensors", {"step": "1"})
    save_file(NEW, tmp_path / "new.safetensors", {"step": "2"})
    safeload.make_patch(tmp_path / "old.safetensors", tmp_path / "new.safetensors", tmp_path / "patch.safetensors")
    return tmp_path


def same(path):
    return path


def other_spelling(path):
    return path.parent / ".." / path.parent.name / "." / path.name


def url(path):
    return path.as_uri()


def symbolic_link(path):
    link = path.with_name("symbolic.safetensors")
    link.symlink_to(path)
    return link


def hard_link(path):
    link = path.with_name("hard.safetensors")
    os.link(path, link)
    return link


def relative(path):
    return os.path.relpath(path)


SPELLINGS = [same, other_spelling, url, relative]
SPELLINGS += [] if os.name == "nt" else [symbolic_link, hard_link]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def refused(folder, call, match="which is read"):
    before = contents(folder)
    with pytest.raises(ValueError, match=match):
        call()
    assert contents(folder) == before


@pytest.mark.parametrize("spelled", SPELLINGS)
@pytest.mark.parametrize("name", ["old", "new"])
def test_a_patch_replaces_neither_of_its_sides(files, name, spelled):
    target = spelled(files / f"{name}.safetensors")
    old, new = files / "old.safetensors", files / "new.safetensors"
    refused(files, lambda: safeload.make_patch(old, new, target, overwrite=True))


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_a_result_replaces_no_patch(files, spelled):
    patch = files / "patch.safetensors"
    target = spelled(patch)
    refused(files, lambda: safeload.apply_patch(files / "old.safetensors", patch, target, overwrite=True))


def test_a_patch_is_not_applied_to_itself(files):
    refused(files, lambda: safeload.apply_patch(files / "patch.safetensors", files / "patch.safetensors"))


def test_the_command_refuses_too(files, capsys):
    old, new, patch = (os.fspath(files / f"{name}.safetensors") for name in ("old", "new", "patch"))
    before = contents(files)
    assert main(["patch", "make", old, new, new, "--overwrite"]) != 0
    assert main(["patch", "apply", old, patch, patch, "--overwrite"]) != 0
    assert capsys.readouterr().err.count("which is read") == 2
    assert contents(files) == before


@pytest.mark.parametrize("spelled", SPELLINGS)
@pytest.mark.parametrize("as_folder", [False, True])
def test_a_conversion_replaces_no_adapter(files, spelled, as_folder):
    folder = files / "adapter"
    folder.mkdir()
    save_file({"base_model.model.m.lora_A.weight": np.ones((1, 4), np.float32)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    path = folder / "adapter_model.safetensors"
    target, adapter = spelled(path), folder if as_folder else path
    source = files / "old.safetensors"
    refused(folder, lambda: safeload.convert(source, target, adapters=os.fspath(adapter), overwrite=True))


def test_a_conversion_replaces_no_importance_matrix(files):
    target = files / "model.gguf"
    target.write_bytes((files / "old.safetensors").read_bytes())
    source = files / "old.safetensors"
    refused(files, lambda: safeload.convert(source, target, quantize="q8_0", imatrix=target, raw=True, overwrite=True))


@pytest.fixture
def model(tmp_path):
    """A folder of shards with its index and config, and a manifest."""
    folder = tmp_path / "model"
    safeload.save(OLD, folder, max_shard_size=4000)
    (folder / "config.json").write_text("{}")
    (folder / "quantize_config.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"tokens")
    return folder


INDEX = "model.safetensors.index.json"
PARTS = ["model-00002-of-00002.safetensors", INDEX, "config.json", "quantize_config.json", "tokenizer.model"]


@pytest.mark.parametrize("spelled", SPELLINGS)
@pytest.mark.parametrize(
    ("source", "name"),
    [*((source, name) for source in ("", PARTS[1]) for name in PARTS), *((PARTS[0], name) for name in PARTS[1:])],
)
def test_a_file_replaces_no_part_of_its_source(model, source, name, spelled):
    target = spelled(model / name)
    refused(
        model, lambda: safeload.convert(model / source, target, format="safetensors", dtype="bfloat16", overwrite=True)
    )


def test_a_file_replaces_none_of_several_sources(files):
    save_file({"u": NEW["w"]}, files / "other.safetensors")
    sources = [files / "old.safetensors", files / "other.safetensors"]
    refused(files, lambda: safeload.convert(sources, sources[1], overwrite=True))


@pytest.mark.parametrize("suffix", ["npz", "gguf"])
def test_a_file_replaces_no_source_of_another_format(files, suffix):
    target = files / f"second.{suffix}"
    safeload.convert({"u": NEW["w"]}, target, raw=True)
    refused(files, lambda: safeload.convert([files / "old.safetensors", target], target, raw=True, overwrite=True))


@pytest.mark.parametrize("name", ["onnx/external", "onnx/files", "dcp/plain_2", "deepspeed/zero2_3/global_step1"])
def test_a_file_replaces_no_part_of_a_checkpoint_of_several_files(tmp_path, name):
    folder = tmp_path / "folder"
    shutil.copytree(DATA / name, folder)
    source = folder / "model.onnx" if "onnx" in name else folder
    files = list(folder.iterdir()) if source == folder else list(map(Path, safeload.open(source).files))
    assert len(files) > 1
    for file in files:
        target = tmp_path / f"{file.name}.npz"
        os.link(file, target)
        refused(folder, partial(safeload.convert, source, target, dtype="float32", overwrite=True))
        assert target.samefile(file)


def test_the_command_replaces_no_layout(files):
    layout = files / "layout.json"
    layout.write_text("{}")
    command = ["convert", files / "old.safetensors", layout, "--layout", layout, "--format", "npz", "--overwrite"]
    assert main(list(map(os.fspath, command))) != 0
    assert layout.read_text() == "{}"


def test_a_file_of_a_store_replaces_none_of_several_sources():
    fs = pytest.importorskip("fsspec").filesystem("memory")
    places = [f"memory://inputs/{name}.safetensors" for name in ("a", "b")]
    for place in places:
        safeload.save({place[-13]: NEW["w"]}, place, overwrite=True)
    before = {place: fs.cat_file(place) for place in places}
    with pytest.raises(ValueError, match="which is read"):
        safeload.convert(places, places[1], overwrite=True)
    assert {place: fs.cat_file(place) for place in places} == before
    safeload.convert(places[0], places[0], dtype="bfloat16", overwrite=True)
    assert fs.cat_file(places[0]) != before[places[0]]
    fs.rm("/inputs", recursive=True)


@pytest.mark.skipif(os.name == "nt", reason="not on Windows")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("options", [{}, {"resume": True}, {"max_shard_size": 4000}], ids=str)
def test_links_in_a_folder_are_replaced_and_lead_to_what_was_there(tmp_path, name, link, options):
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    save_file(OLD, source / "model.safetensors")
    for other in ("config.json", "tokenizer.json"):
        (source / other).write_text('{"torch_dtype": "float32"}')
    link(source / name, folder / name)
    before = contents(source)
    safeload.convert(source, folder, dtype="bfloat16", overwrite=True, **options)
    assert contents(source) == before
    assert {info.dtype for info in safeload.open(folder).tensors.values()} == {"BF16"}
    assert not (folder / "config.json").is_symlink()
    if name != "tokenizer.json":  # which stays as it is
        assert not [path for path in folder.iterdir() if path.is_symlink()]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", INDEX])
def test_a_folder_replaces_no_document_to_verify_with_and_no_adapter(files, name):
    (files / "folder").mkdir()
    target = files / "folder" / name
    main(["verify", os.fspath(files / "old.safetensors"), "--write", os.fspath(target)])
    convert = partial(safeload.convert, files / "old.safetensors", files / "folder", overwrite=True)
    for options in ({"verify": target}, {"adapters": os.fspath(target)}):
        refused(files / "folder", partial(convert, **options))


def test_the_only_weight_file_is_replaced(files):
    (files / "model").mkdir()
    (files / "model" / "config.json").write_text("{}")
    path = files / "model" / "model.safetensors"
    for source in (path, path.parent):
        save_file(OLD, path)
        safeload.convert(source, path, dtype="bfloat16", overwrite=True)
        assert {info.dtype for info in safeload.open(path).tensors.values()} == {"BF16"}


@pytest.mark.parametrize("name", ["list.json", "model.sig", "public.pem", "trusted.pem"])
def test_a_conversion_replaces_no_document_to_verify_with(files, name):
    main(["verify", os.fspath(files / "old.safetensors"), "--write", os.fspath(files / "list.json")])
    for other in ("model.sig", "public.pem", "trusted.pem"):
        (files / other).write_text("{}")
    target = files / name
    way = {"trusted.pem": {"certificate": [files / "trusted.pem"]}}.get(name, {"key": files / "public.pem"})
    verify = target if name == "list.json" else safeload.Signature(files / "model.sig", **way)
    source = files / "old.safetensors"
    refused(files, lambda: safeload.convert(source, target, format="safetensors", verify=verify, overwrite=True))


def test_a_signature_replaces_no_configuration(model, capsys):
    pytest.importorskip("model_signing")
    key = DATA / "signatures" / "test-key.pem"
    (model / "link.sig").symlink_to(model / PARTS[0])
    before = contents(model)
    for name, options in [(name, options) for name in [*PARTS, "link.sig"] for options in ([], ["--overwrite"])]:
        assert main(["sign", os.fspath(model), "--key", os.fspath(key), "-o", os.fspath(model / name), *options]) != 0
        assert capsys.readouterr().err
        assert contents(model) == before
    (model / "link.sig").unlink()
    signature = os.fspath(model / "signed.json")
    for _ in range(2):  # the second replaces the first
        assert main(["sign", os.fspath(model), "--key", os.fspath(key), "-o", signature]) == 0


@pytest.mark.parametrize("command", [["verify", "--write"], ["report", "-o"]])
@pytest.mark.parametrize("name", PARTS[1:])
def test_other_commands_replace_no_document_beside_a_file(model, command, name, capsys):
    before = contents(model)
    for source in ("", PARTS[0]):
        path = os.fspath(model / source)
        assert main([command[0], path, command[1], os.fspath(model / name), "--overwrite"]) != 0
        assert "which is read" in capsys.readouterr().err
        assert contents(model) == before


def test_a_signature_replaces_no_file_that_is_signed(files, capsys):
    pytest.importorskip("model_signing")
    key = DATA / "signatures" / "test-key.pem"
    before = contents(files)
    target = os.fspath(files / "old.safetensors")
    for path in (files, target):
        assert main(["sign", os.fspath(path), "--key", os.fspath(key), "-o", target, "--overwrite"]) != 0
        assert "which is read" in capsys.readouterr().err
    assert contents(files) == before


@pytest.mark.parametrize("command", [["verify", "--write"], ["report", "-o"]])
def test_other_commands_refuse_as_well(files, command, capsys):
    path = os.fspath(files / "old.safetensors")
    before = contents(files)
    assert main([command[0], path, command[1], path, "--overwrite"]) != 0
    assert "which is read" in capsys.readouterr().err
    assert contents(files) == before


# ---- metadata ----


def test_a_patch_of_dicts_keeps_the_metadata_of_the_file(files):
    safeload.make_patch(OLD, NEW, files / "dicts.safetensors")
    safeload.apply_patch(files / "old.safetensors", files / "dicts.safetensors")
    opened = safeload.open(files / "old.safetensors")
    assert opened.metadata == {"step": "1"}
    assert opened["w"][7] == 1


@pytest.mark.parametrize("base", ["file", "dict"])
def test_a_patch_to_a_dict_keeps_the_metadata_and_the_digest(files, base):
    side = OLD if base == "dict" else files / "old.safetensors"
    report = safeload.make_patch(side, NEW, files / "p.safetensors")
    digest = safeload.apply_patch(files / "old.safetensors", files / "p.safetensors", files / "result.safetensors")
    assert digest == report.result
    assert safeload.open(files / "result.safetensors").metadata == {"step": "1"}
    again = safeload.make_patch(files / "result.safetensors", files / "new.safetensors", files / "q.safetensors")
    assert (again.base, again.changed) == (digest, 0)


def test_a_patch_to_a_file_gives_its_bytes(files):
    save_file(NEW, files / "bare.safetensors")
    safeload.make_patch(files / "old.safetensors", files / "bare.safetensors", files / "p.safetensors")
    safeload.apply_patch(files / "old.safetensors", files / "p.safetensors")
    assert (files / "old.safetensors").read_bytes() == (files / "bare.safetensors").read_bytes()


def test_a_dict_with_added_and_removed_tensors_keeps_the_metadata(files):
    new = {"w": NEW["w"], "x": np.arange(3)}
    safeload.make_patch(files / "old.safetensors", new, files / "p.safetensors")
    safeload.apply_patch(files / "old.safetensors", files / "p.safetensors")
    opened = safeload.open(files / "old.safetensors")
    assert (sorted(opened), opened.metadata, opened["x"].tolist()) == (["w", "x"], {"step": "1"}, [0, 1, 2])


# ---- memory ----


def patched(old, new, arrays, path):
    safeload.make_patch(old, new, path, overwrite=True)
    return safeload.apply_patch(arrays, path)


@pytest.mark.parametrize("second", ["changes", "stays"])
@pytest.mark.parametrize("shift", [0, 1, 49])
def test_arrays_that_share_memory_are_not_patched(tmp_path, shift, second):
    memory = np.zeros(200, np.float32)
    arrays = {"a": memory[:100], "b": memory[shift : 100 + shift]}
    old = {name: array.copy() for name, array in arrays.items()}
    new = {name: array.copy() for name, array in old.items()}
    new["a"][50] = 1
    if second == "changes":
        new["b"][51] = 2
    with pytest.raises(ValueError, match=r"arrays: '[ab]' and '[ab]' share memory"):
        patched(old, new, arrays, tmp_path / "p.safetensors")
    assert not memory.any()


def test_a_tied_array_is_patched_if_both_names_change_alike(tmp_path):
    memory = np.zeros(100, np.float32)
    new = np.where(np.arange(100) == 3, np.float32(1), memory)
    path = tmp_path / "p.safetensors"
    patched({"a": memory.copy(), "b": memory.copy()}, {"a": new, "b": new}, {"a": memory, "b": memory}, path)
    assert memory.sum() == 1


def test_views_that_stay_may_share_memory(tmp_path):
    memory, own = np.zeros(100, np.float32), np.zeros(10, np.float32)
    arrays = {"a": memory[:60], "b": memory[40:], "c": own}
    old = {name: array.copy() for name, array in arrays.items()}
    patched(old, {**old, "c": np.where(np.arange(10) == 1, np.float32(5), own)}, arrays, tmp_path / "p.safetensors")
    assert own.sum() == 5
