"""Each write, reservation, fsync and rename of each save in turn: short, refused, or the last that the process does."""

import errno
import re

import pytest
from builders.thorough import THOROUGH
from faults.saves import NEW, OLD, SAVES, TEMPORARY, contents, empty, killed
from faults.shim import (
    FAIL,
    INTERRUPT,
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

STEP = 1 if THOROUGH else 8
ALL = WRITE | RESERVE | SYNC | RENAME
# Python 3.12 warns of fork beside threads, of which numpy's libraries have some.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
NAMES = {KILL: "killed before", KILL_AFTER: "killed after"}


@pytest.fixture(scope="module", params=SAVES)
def save(request):
    return SAVES[request.param]


@pytest.fixture(scope="module")
def versions(save, tmp_path_factory):
    """The bytes of the old and the new file."""
    folder = tmp_path_factory.mktemp("versions")
    made = []
    for version in (OLD, NEW):
        save.write(folder / save.name, version)
        made.append((folder / save.name).read_bytes())
    assert made[OLD] != made[NEW]
    return made


@pytest.fixture
def place(save, versions, tmp_path):
    """The path of a file in a folder of its own, and what puts the old version there."""
    path = tmp_path / "place" / save.name

    def restore():
        empty(path.parent)
        path.write_bytes(versions[OLD])

    restore()
    return path, restore


@pytest.mark.parametrize("action", [SHORT, INTERRUPT], ids=["short", "interrupted"])
def test_writes_that_are_short_or_interrupted_change_nothing(save, versions, place, action):
    path, _ = place
    with armed(path.parent, WRITE | (RESERVE if action == INTERRUPT else 0), action, value=4093) as shot:
        save.write(path, NEW)
    assert shot.calls > 1
    assert contents(path.parent) == {path.name: versions[NEW]}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO] if THOROUGH else [errno.ENOSPC], ids=errno.errorcode.get)
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(save, versions, place, number):
    path, restore = place
    failures = 0
    for shot, _, error in sweep(lambda: save.write(path, NEW), path.parent, ALL, FAIL, number, before=restore):
        found = contents(path.parent)
        if error is None:
            assert not shot.hit
            assert found == {path.name: versions[NEW]}
            continue
        failures += 1
        assert isinstance(error, OSError), repr(error)
        assert (error.errno, error.filename) == (number, str(path)), shot.trace[-1]
        # The fsync of the folder comes after the rename: the new file is whole, but a crash might yet undo it.
        assert found == {path.name: versions[NEW if shot.trace[-1][0] == f"S {path.parent}" else OLD]}
    assert failures > 1


@pytest.mark.parametrize("existing", [True, False], ids=["over an old file", "a new file"])
@pytest.mark.parametrize("action", [KILL, KILL_AFTER] if THOROUGH else [KILL], ids=NAMES.get)
def test_a_crash_at_any_moment_leaves_the_old_or_the_new_file(save, versions, place, action, existing):
    path, restore = place
    seen = []
    for nth in places(STEP):
        assert nth < MOST_CALLS
        restore()
        if not existing:
            path.unlink()
        died = killed(lambda: save.write(path, NEW), path.parent, ALL | UNLINK, action, nth)
        found = contents(path.parent)
        seen.append(found.pop(path.name, None))
        assert seen[-1] in ((versions[OLD] if existing else None), versions[NEW]), nth
        assert all(TEMPORARY.fullmatch(name) for name in found), found.keys()
        if not died:
            assert not found
            break
    assert len(seen) > 3
    assert seen[0] != versions[NEW]
    assert seen[-1] == versions[NEW]
    assert seen == sorted(seen, key=lambda content: content == versions[NEW])  # never back to the old one


def test_what_is_renamed_has_reached_the_disk_and_so_does_its_name(save, place):
    """What a crash of the machine, which loses what was not synced, would find."""
    path, _ = place
    with armed(path.parent, ALL, FAIL, nth=MOST_CALLS) as shot:
        save.write(path, NEW)
    letters = "".join(line[0][0] for line in shot.trace)
    assert re.fullmatch("[AW]+SNS" if save.durable else "[AW]+N", letters), letters
    assert not save.durable or shot.trace[-1][0] == f"S {path.parent}"
