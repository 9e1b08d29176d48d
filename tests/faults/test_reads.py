"""Each read of each operation in turn: short, interrupted, refused, of a file that was cut a moment before."""

import errno
import hashlib
import os

import numpy as np
import pytest
from faults.shim import FAIL, FAIL_FROM, INTERRUPT, READ, SHORT, THOROUGH, TRUNCATE, armed, sweep

import safeload
from safeload import SafeloadError
from safeload.engine.quantized_tensor import QuantizedTensor
from safeload.operations.manifest import make as make_manifest

NAMES = {FAIL: "once", FAIL_FROM: "from then on"}
FORMATS = [
    *("safetensors", "long header", "gguf", "moon", "npz", "npz, compressed"),
    *("torch zip", "torch legacy", "shards"),
]


def digest(value):
    """A value that is the same for the same names, shapes and bytes."""
    if isinstance(value, dict):
        return {name: digest(item) for name, item in value.items()}
    if isinstance(value, QuantizedTensor):
        return value.scheme, digest(value.data), None if value.scale is None else digest(value.scale)
    return value.dtype.name, value.shape, hashlib.sha1(np.ascontiguousarray(value).view(np.uint8)).hexdigest()


def listing(path):
    with safeload.open(path) as checkpoint:
        return [(info.name, info.dtype, info.shape) for info in checkpoint.tensors.values()], dict(checkpoint.metadata)


def slices(path):
    with safeload.open(path) as checkpoint:
        return digest({name: checkpoint.get_slice(name)[1:3] for name in checkpoint})


def filled(path):
    with safeload.open(path) as checkpoint:
        out = {name: np.empty(info.shape, np.float32) for name, info in checkpoint.tensors.items()}
        checkpoint.load(dtype="float32", out=out)
    return digest(out)


def transposed(path):
    """Through strides: the tensors of a layout are read as grids."""
    entry = safeload.StackedTensor("w", "middle.weight", transpose=True)
    return digest(safeload.stack(path, safeload.Layout("test", (entry,)), dtype="float32"))


def hashes(path):
    with safeload.open(path) as checkpoint:
        return make_manifest(checkpoint)["tensors"]


LOADS = {
    "list": listing,
    "load": lambda path: digest(safeload.load(path, backend="pread")),
    "load as f32": lambda path: digest(safeload.load(path, backend="pread", dtype="float32")),
    "slice": slices,
    "fill": filled,
}
WORK = {
    **LOADS,
    "transpose": transposed,
    "hash": hashes,
    "quantize to q8_0": lambda path: digest(safeload.load_quantized(path, "q8_0")),
    "quantize to int8": lambda path: digest(safeload.load_quantized(path, "int8")),
    "stats": lambda path: repr(safeload.stats(path)),
    "diff": lambda path: str(safeload.diff(path, path)).splitlines()[1:],
}
# Every format is read in each of the ways to read, two of them go through everything else.
CASES = [(format, name) for format in FORMATS for name in (WORK if format in ("shards", "gguf") else LOADS)]


@pytest.fixture(params=CASES, ids=lambda case: " - ".join(case))
def case(request, files):
    """The folder watched, an operation on a file in it, and what it comes to."""
    format, name = request.param
    path = files[format]

    def operation():
        return WORK[name](path)

    return path.parent, operation, operation()


def names_an_offset(error):
    """Of a JSON file, which is read whole, none is known; before Python 3.11 there is nowhere to put it."""
    notes = getattr(error, "__notes__", ())
    return error.filename.endswith(".json") or not hasattr(error, "add_note") or any(" at byte " in n for n in notes)


def test_short_reads_change_nothing(case):
    folder, operation, expected = case
    with armed(folder, READ, SHORT, value=4093) as shot:
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
    for shot, result, error in sweep(operation, folder, READ, action, errno.EIO):
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
    for shot, report, error in sweep(lambda: safeload.validate(path), path.parent, READ, FAIL_FROM, errno.EIO):
        if error is not None:  # it could not be opened
            assert isinstance(error, OSError), repr(error)
        elif shot.hit:
            reported += 1
            found = next(f.message for f in report.errors if os.strerror(errno.EIO) in f.message)
            assert str(path) in found
            assert " at byte " in found or not hasattr(Exception, "add_note")
    assert reported


@pytest.fixture
def whole(files):
    """Puts the files that were cut back as they were."""
    folder = files["shards"].parent
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def restore():
        for path, content in contents.items():
            if path.stat().st_size != len(content):
                path.write_bytes(content)

    yield restore
    restore()


@pytest.mark.parametrize("length", [0, 100] if THOROUGH else [100])
def test_a_file_that_is_cut_while_it_is_read_is_an_error_that_names_file_and_offset(case, whole, length):
    folder, operation, expected = case
    failures = 0
    for _shot, result, error in sweep(operation, folder, READ, TRUNCATE, length, before=whole):
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
