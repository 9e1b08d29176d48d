"""Directories and local headers of zip archives that are read as columns mean what zipfile and single reads find."""

import io
import zipfile

import numpy as np
import pytest
from builders.inside import open_without_table, zips
from builders.thorough import part_of
from builders.torch_build import Storage, tensor, zip_entries, zip_file

from safeload import SafeloadError

pytestmark = pytest.mark.no_core

BYTES = (0, 1, 2, 8, 0x50, 0x7F, 0xFF)


def archive(entries, method=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as written:
        for name, data in entries.items():
            written.writestr(name, data)
    return out.getvalue()


def numpy_file():
    out = io.BytesIO()
    np.savez(out, a=np.ones(3), b=np.arange(5))
    return out.getvalue()


VALUE = {"a": tensor(Storage("0", np.ones((2, 3), np.float32))), "b": tensor(Storage("1", np.arange(4)))}
ARCHIVES = {
    "torch": archive({f"m/{name}": data for name, data in zip_entries(VALUE).items()}),
    "numpy": numpy_file(),
    "compressed": archive({"a": bytes(100), "bb": b"12"}, zipfile.ZIP_DEFLATED),
    "one": archive({"only": b""}),
}


def opened(path, content):
    path.write_bytes(content)
    return open_without_table(str(path))


def attempt(function, *args):
    try:
        return function(*args)
    except SafeloadError as error:
        return str(error)


def found(file):
    """The entries of an archive and where each begins; in place of what cannot be had, its error."""
    try:
        read = zips.Archive(file)
    except SafeloadError as error:
        return str(error)
    begins = [attempt(read.locate, name) for name in read.entries]
    return list(read.entries.values()), begins, attempt(read.check_overlap)


def directory(content):
    """The bytes of the directory of an archive."""
    return content[
        content.index(b"PK\x01\x02") : min(
            map(content.find, (b"PK\x05\x06", b"PK\x06\x06")), key=lambda at: at % len(content)
        )
    ]


def both(file, monkeypatch):
    """What is found through columns, and without them."""
    columns = found(file)
    with monkeypatch.context() as patch:
        patch.setattr(zips, "_read_plain", lambda data: None)
        return columns, found(file)


@pytest.mark.parametrize("name", ARCHIVES)
def test_columns_are_used_and_find_the_same(name, tmp_path, monkeypatch):
    file = opened(tmp_path / "a.zip", ARCHIVES[name])
    assert zips._read_plain(directory(ARCHIVES[name])) is not None
    columns, single = both(file, monkeypatch)
    assert columns == single
    assert [entry.name for entry in columns[0]] == zipfile.ZipFile(io.BytesIO(ARCHIVES[name])).namelist()


@pytest.mark.parametrize("k", range(2))
@pytest.mark.parametrize("name", ARCHIVES)
def test_any_byte_may_change(name, k, tmp_path, monkeypatch):
    """Of the directory, the end and the local headers: a fault has the same message, an archive the same entries."""
    content = ARCHIVES[name]
    infos = zipfile.ZipFile(io.BytesIO(content)).infolist()
    start = content.index(b"PK\x01\x02")
    places = [at for info in infos for at in range(info.header_offset, info.header_offset + 34)]
    places += range(start, len(content))
    good, changed = found(opened(tmp_path / "a.zip", content)), 0
    for at in part_of(places, k, 8):
        for value in BYTES:
            if content[at] != value:
                file = opened(tmp_path / "a.zip", content[:at] + bytes((value,)) + content[at + 1 :])
                columns, single = both(file, monkeypatch)
                assert columns == single, (at, value)
                changed += columns != good
                file.close()
    assert changed > 25


def test_any_end_may_be_cut_off(tmp_path, monkeypatch):
    content = ARCHIVES["torch"]
    for size in part_of(range(len(content)), 3, 10):
        columns, single = both(opened(tmp_path / "a.zip", content[:size]), monkeypatch)
        assert columns == single


def test_what_is_unusual_is_left_to_zipfile(tmp_path):
    """Names that are not ASCII, and fields that may change the meaning of others."""
    content = archive({"\N{SNOWMAN}": b"12"})
    named = opened(tmp_path / "named.zip", content)
    assert zips._read_plain(directory(content)) is None
    assert list(zips.Archive(named).entries) == ["\N{SNOWMAN}"]
    padded = opened(tmp_path / "padded.pt", zip_file(VALUE))  # fields after the names
    assert zips._read_plain(directory(zip_file(VALUE))) is None
    assert "archive/data/0" in zips.Archive(padded).entries


@pytest.mark.parametrize("size", [65_450, 32_690, 21_000, 0])
def test_local_headers_in_many_blocks(size, tmp_path, monkeypatch):
    """Each is found in some block of 64 KiB, or alone."""
    content = archive({f"{k:03}" * (k % 7 + 1): bytes(size + 2 * k) for k in range(60)})
    columns, single = both(opened(tmp_path / "a.zip", content), monkeypatch)
    assert columns == single
    infos = zipfile.ZipFile(io.BytesIO(content)).infolist()
    assert columns[1] == [info.header_offset + 30 + len(info.filename) for info in infos]
    assert all(type(begin) is int for begin in columns[1])


def test_entries_in_another_order_than_the_directory(tmp_path, monkeypatch):
    """The directory of two entries, exchanged."""
    content = archive({"a": b"1", "b": b"22"})
    start = content.index(b"PK\x01\x02")
    size = zips._CENTRAL.size + 1
    first, second = content[start : start + size], content[start + size : start + 2 * size]
    columns, single = both(
        opened(tmp_path / "a.zip", content[:start] + second + first + content[start + 2 * size :]), monkeypatch
    )
    assert columns == single
    assert [entry.name for entry in columns[0]] == ["b", "a"]
    assert columns[1][0] > columns[1][1]


def test_large_entries_are_not_read_around(tmp_path):
    """More than a page is read only where headers lie close together."""
    file = opened(tmp_path / "a.zip", archive({"a": bytes(1 << 20), "b": bytes(1 << 20)}))
    read = zips.Archive(file)
    assert read.locate("b") > 1 << 20
    assert len(read._window) == zips._WINDOW
