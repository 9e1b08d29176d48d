"""Conversions in pieces that are interrupted anywhere, and what is in their folder already: nothing is lost or left."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from builders.clusters import content, record_of, records_in, run_pieces, waiting
from builders.cuts import survives
from builders.thorough import part_of

import safeload
from safeload import FormatError, RangeError
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

INDEX = "model.safetensors.index.json"
LIMIT = "60KB"


def stamps(folder):
    return {path.name: path.stat().st_ino for path in sorted(folder.rglob("*.safetensors"))}


def assert_made(made, want):
    """The folder has what a conversion in one go makes, and nothing of how it was made."""
    found = content(made)
    assert {name: found.get(name) for name in want} == want
    assert not [path.name for path in made.iterdir() if path.is_dir() or path.name.startswith(".")]


@pytest.mark.parametrize("limit", ["200KB", "100KB"])
def test_finalize_interrupted_anywhere_while_it_replaces_a_checkpoint(model, tmp_path, monkeypatch, limit):
    """The same call again keeps all shards, those that are moved already and those that are not."""
    options = {"metadata": {"new": "yes"}, "max_shard_size": "100KB"}
    safeload.convert(model, tmp_path / "want", **options)
    want = content(tmp_path / "want")
    safeload.convert(model, tmp_path / "before", max_shard_size=limit)
    for count in part_of(list(range(100)), limit == "100KB", 4):
        made = tmp_path / f"made{count}"
        shutil.copytree(tmp_path / "before", made)
        plan = safeload.plan_convert(model, made, overwrite=True, **options)
        results = [safeload.run_piece(piece) for piece in plan.pieces]
        whole = {*stamps(waiting(made)).values()}
        if survives(lambda: safeload.finalize(plan, results), monkeypatch, count):  # noqa: B023
            break
        finished = len({path.name for path in records_in(made)}) < len(whole)  # killed while it removed its records
        safeload.convert(model, made, resume=True, overwrite=True, **options)
        if finished:  # shards without a record were written again, under other names
            values = safeload.load(made)
            assert all(values[name].tobytes() == array.tobytes() for name, array in safeload.load(model).items())
        else:
            assert_made(made, want)
            assert {*stamps(made).values()} == whole
    assert count > 3 * len(plan.pieces)


def test_finalize_that_fails_leaves_an_existing_checkpoint(model, tmp_path):
    made, source = tmp_path / "made", shutil.copytree(model, tmp_path / "source")
    safeload.convert(model, made, max_shard_size=LIMIT)
    before = content(made)
    plan = safeload.plan_convert(source, made, overwrite=True, dtype="f16", max_shard_size=LIMIT)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    (source / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError):
        safeload.finalize(plan, results)
    assert {path.name: path.read_bytes() for path in made.iterdir() if path.is_file()} == before
    (source / "tokenizer.json").write_text("{}")
    safeload.finalize(plan, results)
    safeload.convert(source, tmp_path / "want", dtype="f16", max_shard_size=LIMIT)
    found = content(made)
    want = content(tmp_path / "want")
    assert {name: found.get(name) for name in want} == want


def test_one_go_over_a_folder_with_records_forgets_them(model, tmp_path):
    """They would say that its shards are of another conversion, which resume=True may write again."""
    made = tmp_path / "made"
    run_pieces(model, made, max_shard_size=LIMIT)
    safeload.convert(model, made, metadata={"a": "b"}, max_shard_size=LIMIT, overwrite=True)
    assert not [path for path in made.iterdir() if path.name.startswith(".")]
    with pytest.raises(FileExistsError, match="nothing to continue; pass overwrite=True to replace it"):
        safeload.convert(model, made, max_shard_size=LIMIT, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_success_leaves_no_record(model, tmp_path, resume):
    made = tmp_path / "made"
    run_pieces(model, made, max_shard_size=LIMIT)
    assert len(records_in(made)) == len(list(waiting(made).glob("*.safetensors")))
    (waiting(made) / ".x.json.0123456789abcdef.tmp").write_text("half")
    executor = None if resume else ThreadPoolExecutor(2)
    safeload.convert(model, made, max_shard_size=LIMIT, resume=resume, executor=executor, overwrite=not resume)
    safeload.convert(model, tmp_path / "want", max_shard_size=LIMIT)
    assert_made(made, content(tmp_path / "want"))


def test_what_others_put_beside_the_records_stays(model, tmp_path):
    run_pieces(model, tmp_path / "made", max_shard_size=LIMIT)
    notes = tmp_path / "made" / ".safeload-resume" / "notes.txt"
    notes.write_text("mine")
    safeload.convert(model, tmp_path / "made", max_shard_size=LIMIT, resume=True)
    assert notes.read_text() == "mine"
    assert not records_in(tmp_path / "made")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_unfinished_conversion_says_how_far_it_is(model, tmp_path, count):
    made, executor = tmp_path / "made", ThreadPoolExecutor(1)
    plan = safeload.plan_convert(model, made, max_shard_size=LIMIT)
    for piece in plan.pieces[:count]:
        safeload.run_piece(piece)
    made.mkdir(exist_ok=True)
    (made / f".{plan.pieces[-1]['file']}.0123456789abcdef.tmp").write_text("half")
    text = f"An unfinished conversion: {count} of {len(plan.pieces)} shards are there; pass resume=True to continue"
    for options in ({}, {"executor": executor}, {"dtype": "f16"}):
        with pytest.raises(FileExistsError, match=text if count else "File exists"):
            safeload.convert(model, made, max_shard_size=LIMIT, **options)
    safeload.convert(model, made, max_shard_size=LIMIT, resume=True)
    with pytest.raises(FileExistsError, match="File exists; pass overwrite=True"):
        safeload.convert(model, made, max_shard_size=LIMIT)


def test_a_single_shard_that_waits_for_its_config_is_unfinished(model, tmp_path):
    made = tmp_path / "made"
    run_pieces(model, made)
    assert [path.name for path in made.iterdir()] == [".safeload-resume"]
    with pytest.raises(FileExistsError, match="An unfinished conversion: 1 of 1 shard is there"):
        safeload.convert(model, made)
    safeload.convert(model, made, resume=True)
    safeload.convert(model, tmp_path / "want")
    assert_made(made, content(tmp_path / "want"))
    assert "model.safetensors.index.json" not in content(made)


def test_resume_after_a_folder_with_another_number_of_shards_was_replaced(model, tmp_path):
    made = tmp_path / "made"
    safeload.convert(model, made, max_shard_size="100KB", resume=True)
    safeload.convert(model, made, max_shard_size=LIMIT, resume=True, overwrite=True)
    assert len(list(made.glob("*.safetensors"))) == len(
        set(json.loads((made / INDEX).read_text())["weight_map"].values())
    )
    assert len(safeload.open(made)) == len(safeload.open(model))


@pytest.mark.parametrize("there", ["a complete set", "a single file", "a text"])
def test_resume_never_replaces_what_has_no_record(model, tmp_path, there):
    """A checkpoint may have no index, and a folder may be there for something else."""
    made = tmp_path / "made"
    made.mkdir()
    if there == "a complete set":
        safeload.convert(model, tmp_path / "whole", max_shard_size=LIMIT, metadata={"other": "yes"})
        for path in (tmp_path / "whole").glob("*.safetensors"):
            shutil.copy(path, made)
    elif there == "a single file":
        safeload.convert(model, made / "model.safetensors")
        (made / "config.json").write_text(json.dumps({"model_type": "mine"}))
    else:
        (made / "config.json").write_text("{}")
    before = content(made)
    with pytest.raises(FileExistsError, match=r"(no record of this conversion|complete checkpoint).*overwrite=True"):
        safeload.convert(model, made, max_shard_size=LIMIT, resume=True)
    assert content(made) == before


def test_what_workers_leave_that_are_killed_at_once(model, tmp_path):
    """Temporary files, and a shard whose record was not written yet: resume=True goes on."""
    made = tmp_path / "made"
    plan = safeload.plan_convert(model, made, max_shard_size=LIMIT)
    file = safeload.run_piece(plan.pieces[0])["file"]
    record = record_of(waiting(made) / file)
    record.rename(record.with_name(f".{record.name}.0123456789abcdef.tmp"))
    (made / f".{plan.pieces[1]['file']}.0123456789abcdef.tmp").write_text("half")
    safeload.convert(model, made, max_shard_size=LIMIT, resume=True)
    safeload.convert(model, tmp_path / "want", max_shard_size=LIMIT)
    assert_made(made, content(tmp_path / "want"))


def test_killed_workers_leave_nothing_where_they_replaced_a_checkpoint(model, tmp_path):
    made = tmp_path / "made"
    safeload.convert(model, made, max_shard_size=LIMIT)
    plan = safeload.plan_convert(model, made, max_shard_size=LIMIT, dtype="f32", overwrite=True)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    aside = waiting(made)
    (aside / f".{results[0]['file']}.0123456789abcdef.tmp").write_text("half")
    (made / f".{INDEX}.0123456789abcdef.tmp").write_text("half")
    record_of(aside / results[1]["file"]).write_bytes(b"\xff")
    safeload.finalize(plan, results)
    assert not [path for path in made.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("there", [False, True])
def test_a_call_that_fails_before_a_shard_is_whole_leaves_no_folder(tmp_path, there):
    made, source = tmp_path / "made", tmp_path / "nan.safetensors"
    save_file({"w.weight": np.full((64, 64), np.nan, np.float32)}, source)
    options = {"quantize": "int8", "max_shard_size": LIMIT, "overwrite": there}
    if there:
        safeload.convert(source, made, max_shard_size=LIMIT)
    before = there and content(made)
    for how in ({"resume": True}, {"executor": ThreadPoolExecutor(1)}):
        with pytest.raises(RangeError, match="only finite numbers"):
            safeload.convert(source, made, **options, **how)
        assert (made.exists() and content(made)) == before


def test_two_conversions_that_began_in_one_empty_folder(model, tmp_path):
    """The shards of each wait apart, and the second one replaces nothing."""
    plans = [
        safeload.plan_convert(model, tmp_path / "made", dtype=dtype, max_shard_size=LIMIT) for dtype in ("bf16", "f16")
    ]
    first, second = ([safeload.run_piece(piece) for piece in plan.pieces] for plan in plans)
    safeload.finalize(plans[0], first)
    with pytest.raises(FileExistsError, match="pass overwrite=True to replace it"):
        safeload.finalize(plans[1], second)
    assert {array.dtype.name for array in safeload.load(tmp_path / "made").values()} == {"bfloat16"}


@pytest.mark.parametrize(
    "change",
    [{"size": 1.0}, {"size": True}, {"sha256": None}, {"piece": None}],
    ids=str,
)
def test_a_record_that_nobody_wrote_is_none(model, tmp_path, change):
    made = tmp_path / "made"
    run_pieces(model, made, max_shard_size=LIMIT)
    path = records_in(made)[0]
    good = json.loads(path.read_text())
    change = {"size": float(good["size"])} if change == {"size": 1.0} else change
    path.write_text(json.dumps({**good, **change}))
    before = stamps(made)
    safeload.convert(model, made, max_shard_size=LIMIT, resume=True)
    assert [name for name, inode in stamps(made).items() if inode != before[name]] == [path.name.removesuffix(".json")]


@pytest.mark.parametrize(
    "change", [{"version": "\x1b[31m\n1"}, {"options": {"\x1b[2J\n": 1}}, {"version": [1]}], ids=str
)
def test_a_record_writes_nothing_to_the_terminal(model, tmp_path, change):
    made = tmp_path / "made"
    run_pieces(model, made, max_shard_size=LIMIT)
    for path in records_in(made):
        path.write_text(json.dumps({**json.loads(path.read_text()), "piece": "other", **change}))
    (made / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="was written with") as caught:
        safeload.convert(model, made, max_shard_size=LIMIT, resume=True)
    assert str(caught.value).isprintable()


def test_a_path_that_no_system_has(model, tmp_path):
    piece = safeload.plan_convert(model, tmp_path / "made", max_shard_size=LIMIT).pieces[0]
    piece["folder"] = "\0"
    with pytest.raises(FormatError, match=r"invalid plan: embedded null byte in path '\\x00'"):
        safeload.run_piece(piece)


@pytest.mark.parametrize("over", [False, True])
def test_a_piece_that_comes_late_changes_nothing_in_a_folder_that_is_complete(model, tmp_path, over):
    """As when an engine gives a piece to a second worker because it has lost sight of the first one."""
    made = tmp_path / "made"
    if over:
        safeload.convert(model, made, max_shard_size=LIMIT)
    plan = safeload.plan_convert(model, made, dtype="f16", max_shard_size="200KB", overwrite=over)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    safeload.finalize(plan, results)
    before = content(made)
    safeload.finalize(plan, results)
    assert content(made) == before
    again = [safeload.run_piece(piece) for piece in plan.pieces]
    after = {path.name: path.read_bytes() for path in made.iterdir() if path.is_file()}
    assert after == before
    with pytest.raises(FileExistsError, match="File exists; pass overwrite=True"):
        safeload.convert(model, made, dtype="f16", max_shard_size="200KB")
    safeload.finalize(plan, again)
    assert_made(made, before)


@pytest.mark.parametrize("plan", [None, 7, ["plan"]], ids=repr)
def test_a_piece_of_no_plan_writes_nothing(model, tmp_path, plan):
    """Its record would be illegible, and the shard never whole."""
    piece = safeload.plan_convert(model, tmp_path / "made", max_shard_size=LIMIT).pieces[0]
    with pytest.raises(FormatError, match="invalid piece: plan must be a string, got "):
        safeload.run_piece({**piece, "plan": plan})
    assert not (tmp_path / "made").exists()


@pytest.mark.skipif(os.name == "nt", reason="modes")
def test_shards_get_the_modes_of_the_shards_that_they_replace(model, tmp_path):
    made = tmp_path / "made"
    safeload.convert(model, made, max_shard_size="200KB")
    shards = sorted(made.glob("*.safetensors"))
    for path in shards:
        path.chmod(0o600)
    safeload.convert(model, made, metadata={"a": "b"}, max_shard_size="200KB", resume=True, overwrite=True)
    assert {path.stat().st_mode & 0o777 for path in made.glob("*.safetensors")} == {0o600}


@pytest.mark.parametrize("way", ["at once", "resumed"])
@pytest.mark.parametrize(
    "limits", [(LIMIT, None), (None, LIMIT), (None, None)], ids=["to one", "from one", "one to one"]
)
def test_killed_anywhere_while_a_single_shard_comes_or_goes(tmp_path, monkeypatch, limits, way):
    """A reader finds the old weights or the new ones, or no complete set; the next call leaves the new ones alone."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file({f"w{k}": np.full((100, 100), k, np.float16) for k in range(5)}, model / "model.safetensors")
    options = {"dtype": "f32", "max_shard_size": limits[1], "overwrite": True, "resume": way == "resumed"}
    safeload.convert(model, tmp_path / "before", max_shard_size=limits[0])
    safeload.convert(model, tmp_path / "want", dtype="f32", max_shard_size=limits[1])
    old, new = (safeload.load(tmp_path / name) for name in ("before", "want"))
    place = 2 * [(LIMIT, None), (None, LIMIT), (None, None)].index(limits) + (way == "resumed")
    for count in part_of(list(range(100)), place, 6):
        made = tmp_path / f"made{count}"
        shutil.copytree(tmp_path / "before", made)
        done = survives(lambda made=made: safeload.convert(model, made, **options), monkeypatch, count)
        with suppress(safeload.SafeloadError, FileNotFoundError):
            weights = safeload.load(made)
            expected = new if {array.dtype for array in weights.values()} == {np.dtype("f4")} else old
            assert {name: array.tobytes() for name, array in weights.items()} == {
                name: array.tobytes() for name, array in expected.items()
            }
        safeload.convert(model, made, **options)
        found = content(made)
        assert len(found) == len(content(tmp_path / "want"))
        assert not [name for name in found if name.startswith(".")]
        assert {name: array.tobytes() for name, array in safeload.load(made).items()} == {
            name: array.tobytes() for name, array in new.items()
        }
        if done:
            break
    assert count > 3
