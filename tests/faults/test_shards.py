"""What is left of a conversion to shards that fails or is killed; `test_folders.py` tells which tensors are read then.

All files are written and synced under temporary names before the first is renamed:

- no file is ever less than whole, old or new, and a failure leaves no temporary one;
- no file that an index names is ever replaced: shards get free names;
- a new folder has no index before it has all the rest.
"""

import errno
import json

import numpy as np
import pytest
from builders.thorough import THOROUGH
from faults.saves import NEW, OLD, TEMPORARY, contents, convert_to_shards, empty, killed, write_sources
from faults.shim import (
    FAIL,
    KILL,
    KILL_AFTER,
    MOST_CALLS,
    READ,
    RENAME,
    RESERVE,
    SYNC,
    UNLINK,
    WRITE,
    armed,
    places,
    sweep,
)

import safeload

# As in test_saves.py.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
STEP = 1 if THOROUGH else 8
ALL = WRITE | RESERVE | SYNC | RENAME
NAMES = {KILL: "killed before", KILL_AFTER: "killed after"}
INDEX = "model.safetensors.index.json"
SMALL, LARGE = "100KB", "200KB"


@pytest.fixture
def folder(tmp_path):
    write_sources(tmp_path)
    return tmp_path / "shards"


def made(folder, version, size):
    """The files of a version."""
    empty(folder)
    convert_to_shards(folder, version, size)
    return contents(folder)


def restore(folder, files):
    empty(folder)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def version_of(folder):
    """The version that opening the folder gives, when all of its tensors are of one."""
    with safeload.open(folder) as checkpoint:
        loaded = {name: float(array[0, 0]) for name, array in checkpoint.load(backend="pread").items()}
    for version in (OLD, NEW):
        if loaded == {f"layer.{k}.weight": 10 * version + k for k in range(6)}:
            return version
    return None


def crashes(folder, before, size, action):
    """Kills a conversion at each call in turn; yields what it leaves but for temporary files, and whether it died."""
    for nth in places(STEP):
        assert nth < MOST_CALLS
        restore(folder, before)
        died = killed(lambda: convert_to_shards(folder, NEW, size), folder, ALL | UNLINK, action, nth)
        found = contents(folder)
        yield {name: content for name, content in found.items() if not TEMPORARY.fullmatch(name)}, died
        if not died:
            assert not any(map(TEMPORARY.fullmatch, found))
            return


@pytest.mark.parametrize("action", [KILL, KILL_AFTER] if THOROUGH else [KILL], ids=NAMES.get)
@pytest.mark.parametrize(("old_size", "new_size"), [(SMALL, LARGE), (LARGE, LARGE), (None, LARGE)])
def test_a_crash_while_shards_are_written(folder, action, old_size, new_size):
    old = {} if old_size is None else made(folder, OLD, old_size)
    if old_size is None:
        empty(folder)
    convert_to_shards(folder, NEW, new_size)
    new, versions = contents(folder), []
    assert not {name for name in new.keys() & old.keys() if name.endswith(".safetensors")}
    for found, died in crashes(folder, old, new_size, action):
        blocked = b"being-replaced" in found.get(INDEX, b"")  # an index that nothing opens
        rest = {name: content for name, content in found.items() if not (blocked and name == INDEX)}
        assert all(content in (old.get(name), new.get(name)) for name, content in rest.items())
        indexed = found.get(INDEX) == new[INDEX]
        assert indexed or {name for name in old if name.endswith(".safetensors")} <= found.keys()
        if indexed and not old:
            assert new.items() <= found.items()
        if INDEX in found:
            try:
                versions.append(version_of(folder))
            except FileNotFoundError:  # until the last shard has its name
                assert died
                assert indexed or blocked
                continue
            assert versions[-1] == (NEW if indexed else OLD)
            assert died or versions[-1] == NEW
    assert versions[-1] == NEW
    assert old_size is None or versions[0] == OLD


@pytest.mark.parametrize("existing", [True, False], ids=["over an old folder", "a new folder"])
def test_shards_that_cannot_be_written_leave_the_old_ones_and_nothing_else(folder, existing):
    new, old = made(folder, NEW, LARGE), made(folder, OLD, SMALL) if existing else {}
    failures = 0
    for shot, _, error in sweep(
        lambda: convert_to_shards(folder, NEW, LARGE),
        folder,
        ALL,
        FAIL,
        errno.ENOSPC,
        before=lambda: restore(folder, old),
    ):
        found = contents(folder)
        assert all(content in (old.get(name), new.get(name)) for name, content in found.items())
        if error is None:
            assert not shot.hit or shot.trace[shot.nth - 1][0][0] == "L"  # without links, the file is renamed
            assert found == new
            continue
        failures += 1
        assert isinstance(error, OSError)
        assert error.errno == errno.ENOSPC
        assert str(folder) in error.filename
        assert found == old
    assert failures > len(new)


def test_a_source_that_cannot_be_read_leaves_the_old_file_and_nothing_else(folder, tmp_path):
    old = made(folder, OLD, LARGE)
    failures = 0
    for shot, _, error in sweep(
        lambda: convert_to_shards(folder, NEW, LARGE), tmp_path / f"source-{NEW}", READ, FAIL, errno.EIO
    ):
        if error is None:
            break
        failures += 1
        assert isinstance(error, OSError), repr(error)
        assert (error.errno, str(tmp_path) in error.filename) == (errno.EIO, True), shot.nth
        assert contents(folder) == old
    assert failures


def test_the_index_is_renamed_when_all_it_names_has_reached_the_disk(folder):
    empty(folder)
    with armed(folder, ALL, FAIL, nth=MOST_CALLS) as shot:
        convert_to_shards(folder, NEW, LARGE)
    renamed, synced = [], set()
    for line in shot.trace:
        if line[0].startswith("S "):
            synced.add(line[0][2:])
        elif line[0][0] in "NL":  # shards get their names by links, which replace nothing
            assert line[0][2:] in synced
            assert not renamed or str(folder) in synced
            synced.discard(str(folder))
            renamed.append(line[1].rpartition("/")[2])
    shards = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()), reverse=True)
    assert renamed == ["config.json", *reversed(shards), INDEX]
    assert str(folder) in synced
    assert all(np.isfinite(array).all() for array in safeload.load(folder).values())
