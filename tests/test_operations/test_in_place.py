"""Conversions that replace their own source, killed anywhere: they continue, and nobody reads what is half replaced."""

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from builders.clusters import content, fp8_folder, usual
from builders.cuts import survives
from builders.inside import main, unfinished
from builders.thorough import part_of

import safeload
from safeload import FormatError
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

INDEX = "model.safetensors.index.json"
NOTE = unfinished.NAME
NAMES = [f"h.{k}.w" for k in range(4)]
LIMIT = {"max_shard_size": "5KB"}
AGAIN = {"overwrite": True, "resume": True}


@pytest.fixture
def adapter(tmp_path):
    rng, folder, tensors = np.random.default_rng(0), tmp_path / "adapter", {}
    for name in NAMES:
        module = f"base_model.model.{name.removesuffix('.w')}"
        tensors[f"{module}.w.lora_A.weight"] = rng.normal(size=(2, 64)).astype(np.float32)
        tensors[f"{module}.w.lora_B.weight"] = rng.normal(size=(16, 2)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["w"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def folder(tmp_path):
    """Four shards of one tensor each, a config and a tokenizer."""
    rng = np.random.default_rng(1)
    save_file(
        {f"{name}.weight": rng.normal(size=(16, 64)).astype(np.float32) for name in NAMES}, tmp_path / "s.safetensors"
    )
    made = tmp_path / "model"
    safeload.convert(tmp_path / "s.safetensors", made, **LIMIT)
    (made / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    (made / "tokenizer.json").write_text("{}")
    return made


def options_of(kind, adapter):
    return {
        "adapters": {"adapters": os.fspath(adapter), **LIMIT},
        "adapters and dtype": {"adapters": [(os.fspath(adapter), 0.5)], "dtype": "bfloat16", **LIMIT},
        "dtype": {"dtype": "bfloat16", **LIMIT},
        "int8": {"quantize": "int8", **LIMIT},
        "rename": {"rename": [("^h", "h.h")], **LIMIT},
        "larger shards": {"adapters": os.fspath(adapter), "max_shard_size": "9KB"},
        "smaller shards": {"rename": [("^h", "h.h")], "max_shard_size": "1KB"},
        "drop": {"drop": "h.3.*", **LIMIT},
    }[kind]


KINDS = ["adapters", "adapters and dtype", "dtype", "int8", "rename", "larger shards", "smaller shards", "drop"]


def killed_in_finalize(folder, options, monkeypatch, count):
    plan = safeload.plan_convert(folder, folder, overwrite=True, **options)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    return survives(lambda: safeload.finalize(plan, results), monkeypatch, count)


# For the names of options, how many calls a conversion makes before it replaces the index.
CALLS_BEFORE = {}


def half(folder, options, monkeypatch):
    """Kills a conversion of a folder when it has replaced the index; returns the content of the folder."""
    whole = shutil.copytree(folder, folder.with_name("whole"))
    before = content_of_files(folder)
    for count in range(CALLS_BEFORE.get(frozenset(options), 0), 20):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        assert not killed_in_finalize(folder, options, monkeypatch, count)
        after = content_of_files(folder)
        if before[INDEX] != after[INDEX]:
            assert NOTE in after
            CALLS_BEFORE[frozenset(options)] = count
            return after
    raise AssertionError("the index was not replaced")


def again(call):
    """The same call again, which may find that the first one came to its end."""
    try:
        call()
    except (ValueError, safeload.TensorNotFoundError) as error:
        if not re.search("is already the result of this call|matches none of", str(error)):
            raise


def content_of_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_killed_anywhere_the_same_call_continues(folder, adapter, tmp_path, monkeypatch, kind):
    options = options_of(kind, adapter)
    safeload.convert(folder, tmp_path / "want", **options)
    want = content(tmp_path / "want")
    first = KINDS.index(kind)
    for count in part_of(list(range(100)), first, 1 if first == 0 else 8):
        made = tmp_path / f"made{count}"
        shutil.copytree(folder, made)
        done = killed_in_finalize(made, options, monkeypatch, count)
        again(lambda made=made: safeload.convert(made, made, **AGAIN, **options))
        found = content(made)
        assert {name: found.get(name) for name in want} == want
        # A call that finds its own result keeps the records, and drop= refuses what has no such tensors.
        kept = {"adapters", "rename", "drop"} & options.keys()
        assert not [path.name for path in made.iterdir() if path.name.startswith(".") and not kept]
        assert {path.name for path in made.iterdir() if path.name.startswith(".")} <= {".safeload-resume"}
        if done:
            break
    assert count > 12


def test_killed_anywhere_while_pieces_run(folder, adapter, tmp_path, monkeypatch):
    options = options_of("adapters", adapter)
    safeload.convert(folder, tmp_path / "want", **options)
    want = content(tmp_path / "want")
    for count in range(0, 100, 4):
        made = tmp_path / f"made{count}"
        shutil.copytree(folder, made)
        if survives(lambda made=made: safeload.convert(made, made, **AGAIN, **options), monkeypatch, count):
            break
        if count % 8:  # and killed once more
            call = lambda made=made: safeload.convert(made, made, **AGAIN, **options)  # noqa: E731
            survives(lambda call=call: again(call), monkeypatch, count // 2)
        again(lambda made=made: safeload.convert(made, made, **AGAIN, **options))
        found = content(made)
        assert {name: found.get(name) for name in want} == want
    assert count > 24


@pytest.mark.parametrize("there", ["single file", "set without index", "single file by its path"])
def test_sources_without_an_index(folder, adapter, tmp_path, monkeypatch, there):
    options = options_of("adapters", adapter)
    safeload.convert(folder, tmp_path / "want", **options)
    want = {name: array.tobytes() for name, array in safeload.load(tmp_path / "want").items()}
    (folder / INDEX).unlink()
    if there != "set without index":
        for path in folder.glob("*.safetensors"):
            path.unlink()
        shutil.copy(tmp_path / "s.safetensors", folder / "model.safetensors")
    for count in part_of(list(range(100)), len(there), 9):
        made = tmp_path / f"made{count}"
        shutil.copytree(folder, made)
        source = made / "model.safetensors" if there.endswith("path") else made
        call = lambda made=made, source=source: safeload.convert(source, made, **AGAIN, **options)  # noqa: E731
        if survives(call, monkeypatch, count):
            break
        try:
            again(call)
        except FileNotFoundError:  # the single file was removed when the index was in place
            assert not source.exists()
        weights = json.loads((made / INDEX).read_text())["weight_map"]
        with safeload.open([made / file for file in sorted(set(weights.values()))]) as opened:
            assert {name: opened[name].tobytes() for name in opened} == want
    assert count > 12


@pytest.mark.parametrize(
    "call",
    [
        lambda folder, out: safeload.convert(folder, out, **LIMIT),
        lambda folder, out: safeload.convert(folder / INDEX, out / "x.safetensors"),
        lambda folder, out: safeload.convert([folder], out / "x.gguf"),
        lambda folder, out: safeload.convert(folder, folder, dtype="f16", overwrite=True, **LIMIT),
        lambda folder, out: safeload.convert(folder, folder, dtype="f16", **AGAIN, **LIMIT),
        lambda folder, out: safeload.convert(folder, folder, resume=True, **LIMIT),
        lambda folder, out: safeload.convert(folder, out, executor=ThreadPoolExecutor(1), **LIMIT),
        lambda folder, out: safeload.plan_convert(folder, out, **LIMIT),
        lambda folder, out: safeload.convert(links_to(folder, out), out / "x.safetensors"),
        lambda folder, out: safeload.convert(sorted(folder.glob("*.safetensors")), out / "x.safetensors"),
    ],
)
def test_no_other_call_reads_a_folder_that_is_half_replaced(folder, adapter, tmp_path, monkeypatch, call):
    options = options_of("adapters", adapter)
    before = half(folder, options, monkeypatch)
    (tmp_path / "out").mkdir()
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        call(folder, tmp_path / "out")
    if isinstance(caught.value, FileNotFoundError):  # of links elsewhere, which have no note
        assert "model.safetensors.index.json lists it" in str(caught.value)
    else:
        assert "an interrupted conversion has replaced some of its files. Repeat" in str(caught.value)
        assert str(folder) in str(caught.value)
        assert "adapters=" in str(caught.value)
    assert content_of_files(folder) == before
    assert not [
        path
        for path in (tmp_path / "out").rglob("*")
        if path.suffix in (".safetensors", ".gguf") and not path.is_symlink()
    ]


def links_to(folder, out):
    links = out / "links"
    links.mkdir()
    for path in folder.iterdir():
        if path.is_file() and not path.name.startswith("."):
            (links / path.name).symlink_to(path)
    return links


@pytest.mark.parametrize("kind", ["adapters", "rename"])
def test_a_conversion_in_one_go_that_was_killed(folder, adapter, tmp_path, monkeypatch, kind):
    """A call reads what it has left only if that is the old model."""
    options, refused = {**options_of(kind, adapter), "overwrite": True}, 0
    old = {INDEX: (folder / INDEX).read_bytes(), "model.safetensors": None}
    shutil.copytree(folder, tmp_path / "want")
    safeload.convert(tmp_path / "want", tmp_path / "want", **options)
    want = content_of_files(tmp_path / "want")
    for count in part_of(list(range(100)), kind == "rename", 2):
        made = tmp_path / f"made{count}"
        shutil.copytree(folder, made)
        if survives(lambda made=made: safeload.convert(made, made, **options), monkeypatch, count):
            break
        left = content_of_files(made)
        if {name: left.get(name) for name in (INDEX, "model.safetensors")} == old:
            safeload.convert(made, made, **options)
            assert usual(content_of_files(made)) == usual(want)
            continue
        refused += 1
        for resume in (False, True):
            with pytest.raises(ValueError, match=r"Restore the original files and delete \.safeload-unfinished\.json"):
                safeload.convert(made, made, resume=resume, **options)
        for path in folder.iterdir():
            shutil.copy(path, made)
        (made / NOTE).unlink()
        safeload.convert(made, made, **options)
        assert NOTE not in content_of_files(made)
    assert refused > 5


def test_the_command_continues_too(folder, adapter, tmp_path, monkeypatch, capsys):
    """Also where the index and the names in the shards no longer fit together."""
    options = options_of("rename", adapter)
    safeload.convert(folder, tmp_path / "want", **options)
    want = content(tmp_path / "want")
    half(folder, options, monkeypatch)
    command = ["convert", str(folder), str(folder), "--max-shard-size", "5KB", "--overwrite"]
    assert main(command) != 0
    assert "with --overwrite and --resume to complete it" in capsys.readouterr().err
    assert main([*command, "--rename", "^h", "h.h", "--resume"]) == 0
    found = content(folder)
    assert {name: found.get(name) for name in want} == want


def test_finalize_by_hand_after_it_was_killed(folder, tmp_path, monkeypatch):
    """Its config.json is the source's, and may be replaced already."""
    options = {"dtype": "bfloat16", **LIMIT}
    safeload.convert(folder, tmp_path / "want", **options)
    want = content(tmp_path / "want")
    for count in range(2, 100, 2):
        made = tmp_path / f"made{count}"
        shutil.copytree(folder, made)
        plan = json.loads(json.dumps(safeload.plan_convert(made, made, overwrite=True, **options)))
        results = [safeload.run_piece(piece) for piece in plan["pieces"]]
        done = survives(lambda plan=plan, results=results: safeload.finalize(plan, results), monkeypatch, count)
        if NOTE in content_of_files(made) or not (made / INDEX).exists():
            late = [safeload.run_piece(piece) for piece in plan["pieces"]]
            assert not any(result["written"] for result in late)
            results = late
        safeload.finalize(plan, results)
        found = content(made)
        assert {name: found.get(name) for name in want} == want
        assert NOTE not in found
        if done:
            break


def test_an_adapter_is_applied_once_by_calls_that_resume(folder, adapter, tmp_path):
    options = options_of("adapters", adapter)
    safeload.convert(folder, folder, **AGAIN, **options)
    once = content_of_files(folder)
    with pytest.raises(ValueError, match=r"is already the result of this call: pass"):
        safeload.convert(folder, folder, **AGAIN, **options)
    assert content_of_files(folder) == once
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    safeload.convert(folder, folder, **AGAIN, adapters=other, **LIMIT)
    assert content_of_files(folder) != once
    safeload.convert(folder, folder, overwrite=True, **options)
    safeload.convert(folder, folder, dtype="f16", **AGAIN, **LIMIT)
    safeload.convert(folder, folder, dtype="f16", **AGAIN, **LIMIT)


def test_a_folder_that_was_restored_is_a_source_again(folder, adapter, tmp_path):
    options = options_of("adapters", adapter)
    whole = Path(shutil.copytree(folder, tmp_path / "whole"))
    safeload.convert(folder, folder, **AGAIN, **options)
    merged = content(folder)
    for path in whole.iterdir():
        shutil.copy(path, folder)
    safeload.convert(folder, folder, **AGAIN, **options)
    assert content(folder) == merged


def test_a_shard_that_is_damaged_while_it_waits(folder, adapter, monkeypatch):
    options = options_of("adapters", adapter)
    half(folder, options, monkeypatch)
    (aside,) = (path for path in folder.iterdir() if path.is_dir() and path.name != ".safeload-resume")
    path = sorted(aside.glob("*.safetensors"))[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FormatError, match="does not match its record, and the conversion has replaced its sources"):
        safeload.convert(folder, folder, **AGAIN, **options)
    path.unlink()
    with pytest.raises(ValueError, match=r"is gone, and the conversion has replaced its sources: restore them"):
        safeload.convert(folder, folder, **AGAIN, **options)


def test_a_conversion_of_something_else_completes_the_folder(folder, adapter, tmp_path, monkeypatch):
    options = options_of("adapters", adapter)
    half(folder, options, monkeypatch)
    for how in ({}, {"resume": True}):
        safeload.convert(tmp_path / "s.safetensors", folder, overwrite=True, **how, **LIMIT)
        assert not (folder / NOTE).exists()
        assert len(safeload.convert(folder, tmp_path / "again", overwrite=True, **LIMIT).files) == 4


def test_a_destination_that_is_half_replaced_is_no_source(folder, tmp_path, monkeypatch):
    """Its own conversion has other sources, and continues by reading them."""
    made = tmp_path / "made"
    safeload.convert(folder, made, **LIMIT)
    plan = safeload.plan_convert(folder, made, overwrite=True, dtype="f16", **LIMIT)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    assert not survives(lambda: safeload.finalize(plan, results), monkeypatch, 6)
    with pytest.raises(ValueError, match="an interrupted conversion has replaced some of its files"):
        safeload.convert(made, tmp_path / "x.safetensors")
    safeload.convert(folder, made, dtype="f16", **AGAIN, **LIMIT)
    assert {array.dtype for array in safeload.load(made).values()} == {np.dtype("f2")}
    safeload.convert(made, tmp_path / "x.safetensors")


def test_codes_and_scales_in_different_shards(tmp_path, monkeypatch):
    folder, options = fp8_folder(tmp_path / "model"), {"dtype": "bfloat16", "max_shard_size": "400KB"}
    safeload.convert(folder, tmp_path / "want", **options)
    want = content(tmp_path / "want")
    for count in part_of(list(range(100)), 1, 7):
        made = tmp_path / f"made{count}"
        shutil.copytree(folder, made)
        done = killed_in_finalize(made, options, monkeypatch, count)
        safeload.convert(made, made, **AGAIN, **options)
        found = content(made)
        assert {name: found.get(name) for name in want} == want
        if done:
            break
    assert done


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../../../x"},
        {"id": 7},
        {"pieces": 7},
        {"pieces": [7]},
        {"pieces": [{"file": "../x.safetensors"}]},
        {"tensors": "x"},
        {"config": 7},
        {"quantized": 7},
        {"safeload_unfinished": 2},
        {"call": None},
        {"options": {"\x1b[2J": "\x1b[31m"}, "call": "", "version": "\x1b[2J"},
        None,
    ],
    ids=str,
)
def test_notes_that_no_conversion_wrote(folder, adapter, tmp_path, monkeypatch, change):
    options = options_of("adapters", adapter)
    half(folder, options, monkeypatch)
    text = "{" if change is None else json.dumps({**json.loads((folder / NOTE).read_text()), **change})
    (folder / NOTE).write_text(text)
    outside = {path for path in tmp_path.rglob("*") if folder not in path.parents}
    with pytest.raises((FormatError, ValueError)) as caught:
        safeload.convert(folder, folder, **AGAIN, **options)
    assert str(caught.value).isprintable()
    assert {path for path in tmp_path.rglob("*") if folder not in path.parents} == outside


def test_a_folder_in_a_store(folder, adapter, monkeypatch):
    """Its shards get other names, but its config and its index are removed before the new ones are there."""
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    fs, options = fsspec.filesystem("memory"), {**options_of("adapters and dtype", adapter)}
    want = safeload.load(folder, adapters=options["adapters"], dtype="bfloat16")
    left = [0]

    def counted(call):
        def counting(*arguments, **given):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return call(*arguments, **given)

        return counting

    seen = set()
    for count in part_of(list(range(100)), 0, 4):
        url = f"memory://in-place/{count}"
        fs.put(str(folder), url, recursive=True)
        plan = safeload.plan_convert(url, url, overwrite=True, **options)
        results = [safeload.run_piece(piece) for piece in plan.pieces]
        left[0] = count
        try:
            with monkeypatch.context() as patch:
                for name in ("put_file", "pipe_file", "mv", "rm_file", "rm"):
                    patch.setattr(MemoryFileSystem, name, counted(getattr(MemoryFileSystem, name)))
                safeload.finalize(plan, results)
            done = True
        except KeyboardInterrupt:
            done = False
        seen.add(b"being-replaced" in fs.cat_file(f"{url}/{INDEX}"))
        again(lambda url=url: safeload.convert(url, url, **AGAIN, **options))
        found = safeload.load(url)
        assert all(found[name].tobytes() == want[name].tobytes() for name in want)
        assert not fs.exists(f"{url}/{NOTE}")
        if done:
            break
    assert seen == {True, False}
    fs.rm("/in-place", recursive=True)
