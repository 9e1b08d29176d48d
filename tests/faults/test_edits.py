"""Each system call of each edit in turn: refused, or the last that the process does."""

import errno
import time

import numpy as np
import pytest
from builders.inside import main
from builders.thorough import THOROUGH
from faults.saves import contents, empty, killed
from faults.shim import (
    FAIL,
    FAIL_FROM,
    KILL,
    KILL_AFTER,
    MOST_CALLS,
    RENAME,
    RESERVE,
    SHORT,
    SYNC,
    UNLINK,
    WRITE,
    armed,
    places,
    sweep,
)

import safeload

NAMES = {KILL: "killed before", KILL_AFTER: "killed after"}
STEP = 1 if THOROUGH else 8
ALL = WRITE | RESERVE | SYNC | RENAME
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def recover(path):
    assert main(["edit", "--recover", str(path)]) == 0


def shift_names(path):
    """Rewrites a header of several blocks in place."""
    with safeload.edit(path) as file:
        for name in [*file][::3]:
            file.rename(name, f"{name}x")
        file.metadata["step"] = "2"


def set_metadata(path):
    with safeload.edit(path) as file:
        file.metadata["step"] = "9"


def outgrow(path):
    with safeload.edit(path) as file:
        file.metadata["long"] = "x" * 20_000


def drop(path):
    with safeload.edit(path) as file:
        del file["layers.3"]
        file["new"] = np.ones(100)


def set_gguf(path):
    with safeload.edit(path) as file:
        file.metadata["general.name"] = "NEW"


def grow_gguf(path):
    with safeload.edit(path) as file:
        file.metadata["general.name"] = "a much longer name" * 9


def write_safetensors(path):
    items = {f"layers.{k}": np.full(3, k, np.float32) for k in range(200)}
    safeload.save(items, path, metadata={"step": "1"})


def write_gguf(path):
    items = {f"blk.{k}.w": np.full(32, k, np.float32) for k in range(3)}
    safeload.gguf.save_file(items, path, {"general.architecture": "llama", "general.name": "old"})


EDITS = {
    "metadata": ("a.safetensors", write_safetensors, set_metadata),
    "names": ("a.safetensors", write_safetensors, shift_names),
    "metadata larger than the room": ("a.safetensors", write_safetensors, outgrow),
    "tensors": ("a.safetensors", write_safetensors, drop),
    "gguf": ("a.gguf", write_gguf, set_gguf),
    "gguf, longer": ("a.gguf", write_gguf, grow_gguf),
}


@pytest.fixture(params=EDITS)
def case(request, tmp_path):
    """The path of a file, what edits it, what restores it, and its old and new bytes."""
    name, write, change = EDITS[request.param]
    path = tmp_path / "place" / name
    versions = []
    for steps in ([write], [write, change]):
        empty(path.parent)
        for step in steps:
            step(path)
        versions.append(path.read_bytes())
    assert versions[0] != versions[1]

    def restore():
        empty(path.parent)
        path.write_bytes(versions[0])

    restore()
    return path, lambda: change(path), restore, versions


def opens(path):
    """Whether both safeload and upstream open a file."""
    if path.suffix == ".gguf":
        return fault_of(safeload.open, path) is None
    upstream = pytest.importorskip("safetensors")
    fault = fault_of(safeload.open, path)
    assert (fault is None) == (fault_of(upstream.safe_open, path, "numpy") is None)
    assert fault is None or "safeload edit --recover" in str(fault)
    return fault is None


def fault_of(reader, *arguments):
    """The error of a reader, or None."""
    try:
        with reader(*arguments) as file:
            file.keys()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("action", [KILL, KILL_AFTER] if THOROUGH else [KILL], ids=NAMES.get)
def test_a_crash_at_any_moment_leaves_the_old_or_the_new_file_after_recovery(case, action, monkeypatch):
    path, change, restore, versions = case
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    seen, broken = [], 0
    for nth in places(STEP):
        assert nth < MOST_CALLS
        restore()
        died = killed(change, path.parent, ALL | UNLINK, action, nth)
        before = path.read_bytes()
        if not opens(path):
            broken += 1
        else:
            assert before in versions
        recover(path)
        assert contents(path.parent).keys() == {path.name}
        seen.append(path.read_bytes())
        assert seen[-1] in versions
        assert before not in versions or seen[-1] == before
        assert opens(path)
        if not died:
            break
    assert seen[0] == versions[0]
    assert seen[-1] == versions[1]
    assert seen == sorted(seen, key=lambda content: content == versions[1])  # never back to the old one


def edit_folder(folder):
    with safeload.edit(folder) as file:
        file.rename("t3", "q")
        file["t5"] = np.zeros(2)
        file.metadata["step"] = "2"


def test_a_folder_is_the_old_or_the_new_one_at_any_moment(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    folder, items = tmp_path / "place" / "folder", {f"t{k}": np.full(100, k, np.float32) for k in range(8)}
    seen = []
    for nth in places(STEP):
        assert nth < MOST_CALLS
        empty(folder.parent)
        safeload.save(items, folder, max_shard_size=1000, metadata={"step": "1"})
        died = killed(lambda: edit_folder(folder), folder, ALL | UNLINK, KILL, nth)
        recover(folder)
        loaded = safeload.load(folder)
        changed = (len(loaded), "q" in loaded, loaded["t5"].shape == (2,))
        assert changed in ((8, False, False), (8, True, True)), nth
        seen.append(changed[1])
        if not died:
            break
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (False, True)


@pytest.mark.parametrize("action", [FAIL, FAIL_FROM], ids=["once", "from then on"])
def test_a_failing_disk_leaves_the_old_file_or_says_how_to_recover_it(case, action):
    path, change, restore, versions = case
    failures = 0
    for shot, _, error in sweep(change, path.parent, ALL, action, errno.ENOSPC, before=restore):
        if error is None:
            assert not shot.hit
            assert path.read_bytes() == versions[1]
            continue
        failures += 1
        assert isinstance(error, OSError), repr(error)
        if "--recover" in str(error):
            assert action == FAIL_FROM
            recover(path)
        folder_sync = shot.trace[-1][0] == f"S {path.parent}" and action == FAIL
        assert path.read_bytes() in (versions if folder_sync or action == FAIL_FROM else versions[:1])
        assert path.read_bytes() == versions[1] or "is in place" not in str(error)
        assert path.read_bytes() == versions[0] or "is in place" in str(error) or "--recover" in str(error)
        assert contents(path.parent).keys() == {path.name}
    assert failures > 1


@pytest.mark.parametrize("action", [FAIL, FAIL_FROM], ids=["once", "from then on"])
def test_a_folder_on_a_failing_disk_is_the_old_one_or_says_how_to_recover_it(tmp_path, action, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    folder, items = tmp_path / "place" / "folder", {f"t{k}": np.full(100, k, np.float32) for k in range(8)}

    def restore():
        empty(folder.parent)
        safeload.save(items, folder, max_shard_size=1000, metadata={"step": "1"})

    restore()
    files, failures = contents(folder).keys(), 0
    for shot, _, error in sweep(lambda: edit_folder(folder), folder, ALL, action, errno.ENOSPC, restore, STEP):
        if error is None:
            assert not shot.hit or shot.trace[shot.nth - 1][0][0] == "L"  # without links, the file is renamed
            assert "q" in safeload.load(folder)
            continue
        failures += 1
        assert isinstance(error, OSError), repr(error)
        if action == FAIL_FROM:
            recover(folder)
        loaded = safeload.load(folder)
        assert (len(loaded), "q" in loaded, loaded["t5"].shape == (2,)) in ((8, False, False), (8, True, True))
        new = "q" in loaded  # all but the last fsync succeeded, and the old shards stay
        assert (contents(folder).keys() > files) if new else (contents(folder).keys() == files)
        with safeload.edit(folder) as unchanged:
            steps = {shard.metadata["step"] for shard in unchanged._shards.values()}
        assert steps == {"2" if new else "1"} or action == FAIL_FROM
    assert failures > 1


def test_short_writes_change_nothing(case):
    path, change, _, versions = case
    with armed(path.parent, WRITE, SHORT, value=5) as shot:
        change()
    assert shot.calls > 1
    assert path.read_bytes() == versions[1]
