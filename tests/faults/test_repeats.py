"""A call that is killed or fails at any call that changes a directory, and is then repeated as it was.

Before the repeat each reader finds the old model, the new model or an error. After it the folder holds what the same
call writes into a new folder, and files that were never part of a model.
"""

import errno
import itertools
import json

import numpy as np
import pytest
from builders.clusters import usual
from builders.thorough import THOROUGH, part_of
from faults.saves import TEMPORARY, contents, empty, killed
from faults.shim import CREATE, FAIL, KILL, KILL_AFTER, MOST_CALLS, RENAME, SYNC, UNLINK, armed

import safeload
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
DIFFUSERS = "diffusion_pytorch_model"
CHANGES = RENAME | UNLINK | CREATE | SYNC
SHARD = 1200
STEP = 1 if THOROUGH else 23


def model(version):
    return {f"w{k}": np.full(200, version, np.float32) for k in range(4)}


def nothing(folder):
    pass


def single(folder):
    safeload.save(model(0), folder)


def shards(folder):
    safeload.save(model(0), folder, max_shard_size=SHARD)


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


def write_with_writer(folder, source):
    with safeload.Writer(folder, max_shard_size=SHARD, overwrite=True) as writer:
        for name, array in model(1).items():
            writer.add(name, array)


def edit(folder, source):
    with safeload.edit(folder) as file:
        for name, array in model(1).items():
            file[name] = array


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


def taken(folder, files):
    """The tensors that a program takes which tries these files in turn; None if it finds none."""
    for name in files:
        path = folder / name
        if path.exists():
            if name.endswith(".safetensors"):
                return load_file(path)
            places = json.loads(path.read_text())["weight_map"]
            return {tensor: load_file(folder / file)[tensor] for tensor, file in places.items()}
    return None


READERS = [
    lambda folder: safeload.load(folder, backend="pread"),
    lambda folder: taken(folder, [SINGLE, INDEX]),
    lambda folder: taken(folder, [f"{DIFFUSERS}.safetensors.index.json", INDEX, SINGLE]),
]


def versions(folder):
    """The version that each reader finds; None for an error."""
    found = []
    for reader in READERS:
        try:
            tensors = reader(folder)
        except (OSError, safeload.SafeloadError, KeyError):
            tensors = None
        values = {float(value) for array in (tensors or {}).values() for value in np.unique(array)}
        assert len(values) <= 1, f"tensors of two models: {values}"
        assert tensors is None or len(tensors) == 4
        found.append(values.pop() if values else None)
    return found


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
    for nth in itertools.count(1 + hash(new) % STEP, STEP):
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
    for nth in itertools.count(1 + hash(new) % STEP, STEP):
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
