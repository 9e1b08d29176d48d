"""Each read of each operation in turn: short, interrupted, refused, of a file that was cut a moment before."""

import copy
import errno
import os

import pytest
from builders.thorough import THOROUGH, part_of
from faults.reads import CASES, WORK
from faults.shim import FAIL, FAIL_FROM, INTERRUPT, READ, SHORT, TRUNCATE, armed, sweep

import safeload
from safeload import SafeloadError

STEP = 1 if THOROUGH else 17
# Less than the 32 KiB that are read of a header at first.
FEW = 4093 if THOROUGH else 16_381
NAMES = {FAIL: "once", FAIL_FROM: "from then on"}


@pytest.fixture(scope="module", params=CASES, ids=" - ".join)
def case(request, files):
    """The folder watched, an operation on a file in it, and what it comes to."""
    format, name = request.param
    path = files[format]

    def operation():
        return WORK[name](path)

    return path.parent, operation, copy.deepcopy(operation())


def names_an_offset(error):
    """Of a JSON file, which is read whole, none is known; before Python 3.11 there is nowhere to put it."""
    notes = getattr(error, "__notes__", ())
    return error.filename.endswith(".json") or not hasattr(error, "add_note") or any(" at byte " in n for n in notes)


def test_short_reads_change_nothing(case):
    folder, operation, expected = case
    with armed(folder, READ, SHORT, value=FEW) as shot:
        assert operation() == expected
    assert shot.hit


def test_interrupted_reads_change_nothing(case):
    folder, operation, expected = case
    with armed(folder, READ, INTERRUPT) as shot:
        assert operation() == expected
    assert shot.calls > 1


@pytest.mark.parametrize("action", [FAIL_FROM, FAIL] if THOROUGH else [FAIL_FROM], ids=NAMES.get)
def test_a_failing_disk_is_an_error_that_names_file_and_offset(case, action):
    folder, operation, expected = case
    failures = 0
    for shot, result, error in sweep(operation, folder, READ, action, errno.EIO, step=STEP):
        if error is None:
            # What is read again because the fast way gives no reason may come the second time.
            assert result == expected
            assert action == FAIL or not shot.hit
            continue
        failures += 1
        assert isinstance(error, OSError), repr(error)
        assert error.errno == errno.EIO
        assert str(folder) in error.filename
        assert names_an_offset(error), shot.nth
    assert failures or action == FAIL


@pytest.mark.parametrize("format", ["safetensors", "npz", "gguf"])
def test_check_reports_a_failing_disk(format, files):
    path, reported = files[format], 0
    for shot, report, error in sweep(lambda: safeload.check(path), path.parent, READ, FAIL_FROM, errno.EIO):
        if error is not None:  # it could not be opened
            assert isinstance(error, OSError), repr(error)
        elif shot.hit:
            reported += 1
            found = next(f.message for f in report.errors if os.strerror(errno.EIO) in f.message)
            assert str(path) in found
            assert " at byte " in found or not hasattr(Exception, "add_note")
    assert reported


@pytest.fixture(scope="session")
def contents(files):
    return {path: path.read_bytes() for path in files["shards"].parent.rglob("*") if path.is_file()}


@pytest.fixture
def whole(contents):
    """Puts the files that were cut back as they were."""

    def restore():
        for path, content in contents.items():
            if path.stat().st_size != len(content):
                path.write_bytes(content)

    yield restore
    restore()


@pytest.mark.parametrize("case", part_of(CASES, 0, 4), ids=" - ".join, indirect=True)
@pytest.mark.parametrize("length", [0, 100] if THOROUGH else [100])
def test_a_file_that_is_cut_while_it_is_read_is_an_error_that_names_file_and_offset(case, whole, length):
    folder, operation, expected = case
    failures = 0
    for _shot, result, error in sweep(operation, folder, READ, TRUNCATE, length, before=whole, step=STEP):
        if error is None:
            assert result == expected  # all that was wanted had been read
            continue
        failures += 1
        assert isinstance(error, (SafeloadError, OSError)), repr(error)
        assert str(folder) in (error.filename if isinstance(error, OSError) else str(error)), repr(error)
        if isinstance(error, OSError):
            assert names_an_offset(error), repr(error)
        else:  # what was cut before it was told what it is has no byte that is to blame
            at_open = "this is an empty file" in str(error) or "zip archive's directory" in str(error)
            assert at_open or error.offset is not None, repr(error)
    assert failures
