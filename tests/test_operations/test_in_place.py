"""Conversions that replace their own source, killed anywhere: a reader finds the old model, the new one or an error."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from builders.clusters import content, fp8_folder, usual
from builders.cuts import survives
from builders.thorough import part_of

import safeload
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

INDEX = "model.safetensors.index.json"
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


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def values(folder):
    """Tensors with the config beside them; None for an error."""
    with suppress(safeload.SafeloadError, FileNotFoundError), safeload.open(folder) as opened:
        return {name: np.array(opened[name]).tobytes() for name in opened}, opened.config
    return None


def run_all(folder, options):
    plan = json.loads(json.dumps(safeload.plan_convert(folder, folder, overwrite=True, **options)))
    return plan, [safeload.run_piece(piece) for piece in plan["pieces"]]


@pytest.mark.parametrize("kind", KINDS)
def test_killed_anywhere_it_is_the_old_model_or_the_new_one(folder, adapter, tmp_path, monkeypatch, kind):
    """And whoever has the plan and the results completes it."""
    options = options_of(kind, adapter)
    safeload.convert(folder, tmp_path / "want", **options)
    want = content(tmp_path / "want")
    old, new, seen = values(folder), values(tmp_path / "want"), []
    first = KINDS.index(kind)
    for count in part_of(list(range(100)), first, 1 if first == 0 else 8):
        made = tmp_path / f"made{count}"
        shutil.copytree(folder, made)
        plan, results = run_all(made, options)
        done = survives(lambda plan=plan, results=results: safeload.finalize(plan, results), monkeypatch, count)
        seen.append(values(made))
        assert seen[-1] in (old, new, None)
        safeload.finalize(plan, results)
        found = content(made)
        assert {name: found.get(name) for name in want} == want
        assert not [path for path in made.rglob("*") if path.name.startswith(".")]
        if done:
            break
    assert seen[-1] == new
    assert count > 12


@pytest.mark.parametrize("kind", ["adapters", "rename", "dtype"])
def test_a_conversion_in_one_go_that_is_killed(folder, adapter, tmp_path, monkeypatch, kind):
    options = {**options_of(kind, adapter), "overwrite": True}
    shutil.copytree(folder, tmp_path / "want")
    safeload.convert(tmp_path / "want", tmp_path / "want", **options)
    old, new = values(folder), values(tmp_path / "want")
    for count in part_of(list(range(100)), len(kind), 2):
        made = tmp_path / f"made{count}"
        shutil.copytree(folder, made)
        done = survives(lambda made=made: safeload.convert(made, made, **options), monkeypatch, count)
        found = values(made)
        assert found in (old, new, None)
        if found == old:
            safeload.convert(made, made, **options)
            assert usual(files_in(made)) == usual(files_in(tmp_path / "want"))
        if done:
            break
    assert found == new


def test_killed_while_pieces_run_the_same_call_continues(folder, adapter, tmp_path, monkeypatch):
    """Until the first file is replaced; a call that finds its own result does not apply it again."""
    options = options_of("adapters", adapter)
    safeload.convert(folder, tmp_path / "want", **options)
    old, new = values(folder), values(tmp_path / "want")
    for count in range(100):
        made = tmp_path / f"made{count}"
        shutil.copytree(folder, made)
        done = survives(lambda made=made: safeload.convert(made, made, **AGAIN, **options), monkeypatch, count)
        found = values(made)
        assert found in (old, new, None)
        records = [*made.rglob(".safeload-resume/*/*.json")]
        if found == old:
            safeload.convert(made, made, **AGAIN, **options)
            assert values(made) == new
        elif found == new and len(records) == len(NAMES):
            with pytest.raises(ValueError, match=r"is already the result of this call: pass"):
                safeload.convert(made, made, **AGAIN, **options)
            assert values(made) == new
        if done:
            break
    assert count > 24


@pytest.mark.parametrize(
    "call",
    [
        lambda folder, out: safeload.convert(folder, out, **LIMIT),
        lambda folder, out: safeload.convert(folder / INDEX, out / "x.safetensors"),
        lambda folder, out: safeload.convert([folder], out / "x.gguf"),
        lambda folder, out: safeload.convert(folder, folder, dtype="f16", overwrite=True, **LIMIT),
        lambda folder, out: safeload.convert(folder, folder, dtype="f16", **AGAIN, **LIMIT),
        lambda folder, out: safeload.convert(folder, out, executor=ThreadPoolExecutor(1), **LIMIT),
        lambda folder, out: safeload.plan_convert(folder, out, **LIMIT),
    ],
)
def test_no_other_call_reads_a_folder_that_is_half_replaced(folder, adapter, tmp_path, monkeypatch, call):
    """Its index names a file that is never there."""
    options, whole = options_of("dtype", adapter), shutil.copytree(folder, tmp_path / "whole")
    for count in range(100):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        plan, results = run_all(folder, options)
        assert not survives(lambda plan=plan, results=results: safeload.finalize(plan, results), monkeypatch, count)
        if b"being-replaced" in (folder / INDEX).read_bytes():
            break
    before = files_in(folder)
    (tmp_path / "out").mkdir()
    with pytest.raises(FileNotFoundError, match=r"being-replaced"):
        call(folder, tmp_path / "out")
    assert files_in(folder) == before
    assert not [*(tmp_path / "out").rglob("*.*")]


def test_another_conversion_completes_the_folder(folder, tmp_path, monkeypatch):
    plan, results = run_all(folder, {"dtype": "bfloat16", **LIMIT})
    assert not survives(lambda: safeload.finalize(plan, results), monkeypatch, 4)
    for how in ({}, {"resume": True}):
        safeload.convert(tmp_path / "s.safetensors", folder, overwrite=True, **how, **LIMIT)
        assert len(safeload.convert(folder, tmp_path / "again", overwrite=True, **LIMIT).files) == 4


def test_codes_and_scales_in_different_shards(tmp_path, monkeypatch):
    folder, options = fp8_folder(tmp_path / "model"), {"dtype": "bfloat16", "max_shard_size": "400KB"}
    safeload.convert(folder, tmp_path / "want", **options)
    want, old, new = content(tmp_path / "want"), values(folder), values(tmp_path / "want")
    for count in part_of(list(range(100)), 1, 7):
        made = tmp_path / f"made{count}"
        shutil.copytree(folder, made)
        plan, results = run_all(made, options)
        done = survives(lambda plan=plan, results=results: safeload.finalize(plan, results), monkeypatch, count)
        assert values(made) in (old, new, None)
        safeload.finalize(plan, results)
        found = content(made)
        assert {name: found.get(name) for name in want} == want
        if done:
            break
    assert done


def test_a_shard_that_is_damaged_while_it_waits_is_made_again(folder, adapter):
    options = options_of("adapters", adapter)
    run_all(folder, options)
    path = sorted(Path(folder).rglob(".safeload-resume/*/*.safetensors"))[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    safeload.convert(folder, folder, **AGAIN, **options)
    assert whole in files_in(folder).values()


def test_a_folder_in_a_store(folder, adapter, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    fs, options = fsspec.filesystem("memory"), {**options_of("adapters and dtype", adapter)}
    want = safeload.load(folder, adapters=options["adapters"], dtype="bfloat16")
    old, left = values(folder), [0]

    def counted(call):
        def counting(*arguments, **given):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return call(*arguments, **given)

        return counting

    for count in part_of(list(range(100)), 0, 4):
        url = f"memory://in-place/{count}"
        fs.put(str(folder), url, recursive=True)
        plan, results = run_all(url, options)
        left[0] = count
        done = False
        with suppress(KeyboardInterrupt), monkeypatch.context() as patch:
            for name in ("put_file", "pipe_file", "mv", "rm_file", "rm"):
                patch.setattr(MemoryFileSystem, name, counted(getattr(MemoryFileSystem, name)))
            safeload.finalize(plan, results)
            done = True
        new = {name: array.tobytes() for name, array in want.items()}
        found = values(url)
        assert found in (old, None) or found[0] == new
        safeload.finalize(plan, results)
        assert values(url)[0] == new
        if done:
            break
    assert done
    fs.rm("/in-place", recursive=True)
