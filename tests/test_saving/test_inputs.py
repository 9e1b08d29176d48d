"""No operation writes over what it reads, however that is spelled, and none writes memory under two names."""

import json
import os

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


def test_a_signature_replaces_no_file_that_is_signed(files, capsys):
    pytest.importorskip("model_signing")
    key = DATA / "signatures" / "test-key.pem"
    before = contents(files)
    target = os.fspath(files / "old.safetensors")
    for path in (files, target):
        assert main(["sign", os.fspath(path), "--key", os.fspath(key), "-o", target, "--overwrite"]) != 0
        assert "which is read" in capsys.readouterr().err
    assert contents(files) == before


@pytest.mark.parametrize("command", [["check", "--write-manifest"], ["report", "-o"]])
def test_other_commands_refuse_as_well(files, command, capsys):
    path = os.fspath(files / "old.safetensors")
    before = contents(files)
    assert main([command[0], path, command[1], path, "--overwrite"]) != 0
    assert "old.safetensors is a source file" in capsys.readouterr().err
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
