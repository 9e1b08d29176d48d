"""Resumed conversions whose sources changed: a shard depends only on its own sources."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders.clusters import OPTIONS, content, fp8_folder, record_of, records_in, run_pieces, waiting
from builders.cuts import survives
from builders.inside import local
from builders.thorough import part_of

import safeload
from safeload import RangeError
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

INDEX = "model.safetensors.index.json"
SHARDS = 4
LIMIT = {"max_shard_size": "17KB"}  # one of the tensors, 16 KiB each


def write_shard(folder, number, value=None):
    tensors = {f"t{number}": np.full((64, 64), number if value is None else value, np.float32)}
    save_file(tensors, folder / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors", durable=False)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(SHARDS):
        write_shard(folder, number)
    weight_map = {f"t{k}": f"model-{k + 1:05}-of-{SHARDS:05}.safetensors" for k in range(SHARDS)}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return folder


def inodes(folder):
    return {path.name: path.stat().st_ino for path in sorted(folder.rglob("*.safetensors"))}


def changed(before, after):
    return sorted(name for name in before if before[name] != after.get(name))


def values(folder):
    return {name: float(array[0, 0]) for name, array in sorted(safeload.load(folder).items())}


def test_the_id_of_a_piece_depends_on_its_own_sources_only(source, tmp_path):
    before = safeload.plan_convert(source, tmp_path / "made", **LIMIT)
    os.utime(source / "model-00003-of-00004.safetensors", ns=(1, 1))
    after = safeload.plan_convert(source, tmp_path / "made", **LIMIT)
    assert before.id != after.id
    assert [one["id"] == two["id"] for one, two in zip(before.pieces, after.pieces, strict=True)] == [1, 1, 0, 1]
    other = safeload.plan_convert(source, tmp_path / "made", dtype="f16", **LIMIT)
    assert not {piece["id"] for piece in other.pieces} & {piece["id"] for piece in after.pieces}


def test_a_record_has_the_versions_of_its_sources(source, tmp_path):
    run_pieces(source, tmp_path / "made", **LIMIT)
    for path in sorted(source.glob("*.safetensors")):
        record = json.loads(record_of(waiting(tmp_path / "made") / path.name).read_text())
        assert record["sources"] == [[path.name, path.stat().st_size, path.stat().st_mtime_ns]]
        assert str(tmp_path) not in json.dumps(record)


@pytest.mark.parametrize("executor", [False, True])
@pytest.mark.parametrize("over", [False, True], ids=["new", "over a checkpoint"])
def test_a_repaired_source_shard_leaves_the_other_shards(source, tmp_path, over, executor):
    made, options = tmp_path / "made", {"quantize": "int8", "overwrite": over, "max_shard_size": "5KB"}
    if over:
        safeload.convert(source, made, **LIMIT)
    write_shard(source, 2, np.nan)
    with pytest.raises(RangeError, match="only finite numbers"):
        safeload.convert(source, made, resume=True, **options)
    shards = [path.with_name(path.name.removesuffix(".json")) for path in records_in(made)]
    before = {path.name: path.stat().st_ino for path in shards}
    assert len(before) == 2
    write_shard(source, 2)
    pool = ThreadPoolExecutor(2) if executor else None
    safeload.convert(source, made, resume=True, executor=pool, **options)
    inodes = {path.stat().st_ino for path in made.glob("*.safetensors")}
    assert {*before.values()} <= inodes
    safeload.convert(source, tmp_path / "want", quantize="int8", max_shard_size="5KB")
    want = content(tmp_path / "want")
    found = content(made)
    assert {name: found.get(name) for name in want} == want
    assert not [path for path in made.iterdir() if path.name.startswith(".")]


def test_old_shards_of_the_folder_are_not_read_for_those_that_wait(source, tmp_path, monkeypatch):
    """They have the size of the new ones, so that only their bytes tell them apart."""
    made, options = tmp_path / "made", {"dtype": "bf16", "overwrite": True, "max_shard_size": "2KB"}
    safeload.convert(source, made, **options)
    write_shard(source, 3, np.nan)
    plan = safeload.plan_convert(source, made, **options)
    for piece in plan.pieces[:2]:
        safeload.run_piece(piece)
    read, hashed = local.read_from, set()

    def noted(store, offset, memory, path):
        hashed.add(path)
        read(store, offset, memory, path)

    monkeypatch.setattr(local, "read_from", noted)
    results = [safeload.run_piece(piece) for piece in plan.pieces[:2]]
    assert hashed == {str(waiting(made) / result["file"]) for result in results}


@pytest.mark.parametrize("index", [True, False], ids=["complete", "without its index"])
def test_a_source_that_changes_after_its_shard_was_written(source, tmp_path, index):
    """A complete folder has records only if the process was killed before it removed them."""
    made = tmp_path / "made"
    run_pieces(source, made, **LIMIT)
    if index:
        safeload.convert(source, tmp_path / "whole", **LIMIT)
        shutil.copy(tmp_path / "whole" / INDEX, made)
        for path in waiting(made).glob("*.safetensors"):
            path.rename(made / path.name)
    before = inodes(made)
    write_shard(source, 1, 7)
    if index:
        with pytest.raises(ValueError, match=r"before its source 'model-00002-of-00004.safetensors' changed"):
            safeload.convert(source, made, resume=True, **LIMIT)
        assert inodes(made) == before
    safeload.convert(source, made, resume=True, overwrite=index, **LIMIT)
    after = inodes(made)
    assert {name: after.get(name) for name in before if "00002" not in name} == {
        name: inode for name, inode in before.items() if "00002" not in name
    }
    new = {name for name in after if before.get(name) != after[name]}
    # A shard that an index names is never replaced.
    assert new == {"model-00002-of-00005.safetensors" if index else "model-00002-of-00004.safetensors"}
    assert values(made) == {"t0": 0, "t1": 7, "t2": 2, "t3": 3}


def test_all_sources_changed(source, tmp_path):
    """Another model of equal shape under the same path: each shard is written again."""
    made = tmp_path / "made"
    run_pieces(source, made, **LIMIT)
    for number in range(SHARDS):
        write_shard(source, number, 7)
    safeload.convert(source, made, resume=True, **LIMIT)
    assert values(made) == {f"t{number}": 7 for number in range(SHARDS)}


def test_scales_in_another_shard(tmp_path):
    """Pieces that read the repaired shard are done again, whether they read its values or its scales."""
    source, made = fp8_folder(tmp_path / "source"), tmp_path / "made"
    plan = safeload.plan_convert(source, made, **OPTIONS)
    scales = "model-00004-of-00004.safetensors"
    expected = [
        piece["file"]
        for piece in plan.pieces
        if scales in [os.path.basename(path) for one in piece["sources"] for path, *_ in one["files"]]
    ]
    assert expected
    run_pieces(source, made, **OPTIONS)
    before = inodes(made)
    os.utime(source / scales, ns=(1, 1))
    safeload.convert(source, made, resume=True, overwrite=True, **OPTIONS)
    assert changed(before, inodes(made)) == sorted(expected)
    shutil.rmtree(made)
    run_pieces(source, made, **OPTIONS)
    before = inodes(made)
    (source / "config.json").write_text((source / "config.json").read_text() + " ")
    safeload.convert(source, made, resume=True, **OPTIONS)
    assert changed(before, inodes(made)) == sorted(before)


def test_results_of_pieces_from_before_the_repair_do_not_complete_the_folder(source, tmp_path):
    made = tmp_path / "made"
    old = safeload.plan_convert(source, made, **LIMIT)
    results = [safeload.run_piece(piece) for piece in old.pieces]
    write_shard(source, 1, 7)
    plan = safeload.plan_convert(source, made, resume=True, **LIMIT)
    with pytest.raises(ValueError, match="no result for 4 pieces of 4"):
        safeload.finalize(plan, results)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    assert [result["written"] for result in results] == [False, True, False, False]
    safeload.finalize(plan, results)
    assert values(made)["t1"] == 7
    with pytest.raises(safeload.FormatError, match="has changed"):  # a worker that comes late writes nothing
        safeload.run_piece(old.pieces[1])
    assert values(made)["t1"] == 7


def test_killed_anywhere_after_a_repair_that_continues_in_the_folder_of_the_first_plan(source, tmp_path, monkeypatch):
    safeload.convert(source, tmp_path / "before", **LIMIT)
    options = {"metadata": {"a": "b"}, "overwrite": True, **LIMIT}
    for count in part_of(list(range(100)), 0, 4):
        made = tmp_path / f"made{count}"
        shutil.copytree(tmp_path / "before", made)
        write_shard(source, 1)
        first = safeload.plan_convert(source, made, **options)
        for piece in first.pieces:
            safeload.run_piece(piece)
        whole = {*inodes(waiting(made)).values()}
        write_shard(source, 1, 7)
        plan = safeload.plan_convert(source, made, resume=True, **options)
        results = [safeload.run_piece(piece) for piece in plan.pieces]
        if survives(lambda: safeload.finalize(plan, results), monkeypatch, count):  # noqa: B023
            break
        finished = len({path.name for path in records_in(made)}) < SHARDS  # killed while it removed its records
        safeload.convert(source, made, resume=True, **options)
        assert values(made) == {"t0": 0, "t1": 7, "t2": 2, "t3": 3}
        kept = whole & {path.stat().st_ino for path in made.glob("*.safetensors")}
        assert len(kept) == SHARDS - 1 or finished
        assert not [path for path in made.iterdir() if path.name.startswith(".")]
    assert count > 3 * SHARDS


def test_a_store_keeps_the_shards_whose_sources_are_unchanged(source, tmp_path):
    pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    fs, made = MemoryFileSystem(), "memory://repaired/made"
    fs.store.clear()
    run_pieces(source, made, **LIMIT)
    write_shard(source, 1, 7)
    plan = safeload.plan_convert(source, made, resume=True, **LIMIT)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    assert [result["written"] for result in results] == [False, True, False, False]
    safeload.finalize(plan, results)
    assert values(made) == {"t0": 0, "t1": 7, "t2": 2, "t3": 3}
    shards = [name for name in fs.find("/repaired/made") if not name.endswith(INDEX)]
    assert len(shards) == SHARDS + 1  # and config.json
    fs.store.clear()


def test_records_with_more_fields_keep_their_shards(source, tmp_path):
    made = tmp_path / "made"
    run_pieces(source, made, **LIMIT)
    before = inodes(made)
    for path in records_in(made):
        path.write_text(json.dumps({**json.loads(path.read_text()), "later": [1]}))
    safeload.convert(source, made, resume=True, **LIMIT)
    assert not changed(before, inodes(made))


@pytest.mark.parametrize("sources", [None, 7, [], [7], [[]], [["\x1b[2J", 1, 1]], [[[], 1, 1]]], ids=repr)
def test_sources_in_a_record_that_no_conversion_wrote(source, tmp_path, sources):
    made = tmp_path / "made"
    run_pieces(source, made, **LIMIT)
    for path in records_in(made):
        path.write_text(json.dumps({**json.loads(path.read_text()), "piece": "other", "sources": sources}))
    (made / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="from other sources") as caught:
        safeload.convert(source, made, resume=True, **LIMIT)
    assert str(caught.value).isprintable()
