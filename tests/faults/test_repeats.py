"""A call that is killed or fails at any call that changes a directory, and is then repeated as it was.

Before the repeat each reader finds the old model, the new model or an error. After it the folder holds what the same
call writes into a new folder, and files that were never part of a model.
"""

import errno
import itertools
import json

import pytest
from builders.clusters import usual
from builders.thorough import THOROUGH, part_of
from faults.folders import (
    CHANGES,
    CONFIG,
    INDEX,
    SHARD,
    SINGLE,
    calls,
    edit,
    model,
    shards,
    single,
    taken,
    versions_of,
    write_with_writer,
)
from faults.saves import TEMPORARY, contents, empty, killed
from faults.shim import FAIL, KILL, KILL_AFTER, MOST_CALLS, armed

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
DIFFUSERS = "diffusion_pytorch_model"


def nothing(folder):
    pass


def index_and_single(folder):
    """Two old models: an index with its shards, and the file that most libraries prefer."""
    safeload.save(model(-1), folder, max_shard_size=SHARD)
    save_file(model(0), folder / SINGLE, durable=False)


def index_of_single(folder):
    single(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(model(0), SINGLE)}))


def diffusers(folder):
    shards(folder)
    for path in [*folder.iterdir()]:
        content = path.read_bytes().replace(b"model-", DIFFUSERS.encode() + b"-")
        path.with_name(path.name.replace("model", DIFFUSERS)).write_bytes(content)
        path.unlink()


OLD = {
    "nothing": nothing,
    "single": single,
    "shards": shards,
    "index and single": index_and_single,
    "index of single": index_of_single,
    "diffusers": diffusers,
}


def convert(folder, source, **options):
    safeload.convert(source, folder, overwrite=True, **options)


NEW = {
    "save": lambda folder, source: safeload.save(model(1), folder, max_shard_size=SHARD, overwrite=True),
    "save one": lambda folder, source: safeload.save(model(1), folder, overwrite=True),
    "Writer": write_with_writer,
    "convert": lambda folder, source: convert(folder, source, max_shard_size=SHARD),
    "convert to one": convert,
    "edit": edit,
    "patch": lambda folder, source: safeload.apply_patch(
        folder / SINGLE, source / "patch.safetensors", folder / SINGLE, overwrite=True, check=False
    ),
}
WHOLE = [name for name in NEW if name not in ("edit", "patch")]
CASES = [*itertools.product(WHOLE, OLD, ["same config", "other config"]), ("edit", "shards", "same config")]
CASES += [("edit", "single", "same config"), ("patch", "single", "same config")]
FOREIGN = {"notes.txt": b"mine", "consolidated.safetensors.txt": b"mine"}


@pytest.fixture(params=part_of(CASES, 5, 17), ids=", ".join)
def case(request, tmp_path):
    """The folder, what restores it, the call, its name, and what the call writes into a new folder."""
    new, old, config = request.param
    folder, source, fresh = tmp_path / "place" / "folder", tmp_path / "source", tmp_path / "fresh"
    source.mkdir()
    save_file(model(1), source / SINGLE, durable=False)
    (source / CONFIG).write_text('{"version": 1}\n')
    save_file(model(0), tmp_path / "old.safetensors", durable=False)
    safeload.make_patch(tmp_path / "old.safetensors", source / SINGLE, source / "patch.safetensors", durable=False)
    empty(folder)
    OLD[old](folder)
    (folder / CONFIG).write_text(json.dumps({"version": 1 if config == "same config" else 0}, indent=2) + "\n")
    for name, content in FOREIGN.items():
        (folder / name).write_bytes(content)
    before = contents(folder)

    def restore():
        empty(folder)
        for name, content in before.items():
            (folder / name).write_bytes(content)

    def call():
        NEW[new](folder, source)

    if new in WHOLE:
        fresh.mkdir()
        (fresh / CONFIG).write_bytes(before[CONFIG])
        NEW[new](fresh, source)
    else:
        call()
        fresh = folder
    want = {**usual(contents(fresh)), **FOREIGN}
    restore()
    return folder, restore, call, new, want


READERS = [
    lambda folder: safeload.load(folder, backend="pread"),
    lambda folder: taken(folder, [SINGLE, INDEX]),
    lambda folder: taken(folder, [f"{DIFFUSERS}.safetensors.index.json", INDEX, SINGLE]),
]


def versions(folder):
    return versions_of(folder, READERS)


def check_repeat(folder, call, new, want):
    call()
    left = contents_below(folder)
    if new in ("edit", "patch") and INDEX not in left:  # a single file: the temporary file of a killed call stays
        left = {name: content for name, content in left.items() if not TEMPORARY.fullmatch(name)}
    assert usual(left) == want


def contents_below(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("action", [KILL, KILL_AFTER] if THOROUGH else [KILL])
def test_after_a_kill_the_repeat_leaves_what_a_fresh_call_writes(case, action):
    folder, restore, call, new, want = case
    old = versions(folder)
    for nth in calls(new, 23):
        assert nth < MOST_CALLS
        restore()
        died = killed(call, folder, CHANGES, action, nth)
        found = versions(folder)
        changed = json.loads((folder / CONFIG).read_text())["version"] if (folder / CONFIG).exists() else None
        if "convert" in new:
            assert all(version in (None, changed) or changed == 1 != found[0] for version in found[:1])
        assert all(version in (None, 1, before) for version, before in zip(found, old, strict=True)), (nth, found)
        if not died:
            assert found[0] == 1
            assert usual(contents_below(folder)) == want
            return
        check_repeat(folder, call, new, want)


def test_after_a_failure_the_repeat_leaves_what_a_fresh_call_writes(case):
    folder, restore, call, new, want = case
    old, before = versions(folder), contents(folder)
    for nth in calls(new, 23):
        assert nth < MOST_CALLS
        restore()
        error = None
        with armed(folder, CHANGES, FAIL, nth, errno.EIO) as shot:
            try:
                call()
            except OSError as raised:
                error = raised
        found = versions(folder)
        if error is None:
            assert found[0] == 1, shot.trace[nth - 1 :]
            if not shot.hit:
                return
        elif "is in place" in str(error):
            assert found[0] == 1
        else:
            assert found == old, shot.trace[nth - 1 :]
        if error is not None and found == old:
            unlinked = shot.trace[nth - 1][0].startswith("U")
            left = {name for name in contents_below(folder) if not (unlinked and TEMPORARY.fullmatch(name))}
            assert left == before.keys(), shot.trace[nth - 1]
        check_repeat(folder, call, new, want)
