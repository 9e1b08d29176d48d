"""Directories of zip archives mean what zipfile finds in them, and local headers what single reads find."""

import io
import operator
import struct
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


def large(entries):
    """An archive whose directory has the sizes and places of all entries in ZIP64 fields."""
    content, rows = archive(entries), b""
    for info in zipfile.ZipFile(io.BytesIO(content)).infolist():
        name, values = info.filename.encode(), (info.file_size, info.compress_size, info.header_offset)
        versions = 45, 45, 0, 0, 0, 0, info.CRC, 0xFFFFFFFF, 0xFFFFFFFF, len(name), 28, 0, 0, 0, 0, 0xFFFFFFFF
        rows += struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *versions) + name + struct.pack("<2H3Q", 1, 24, *values)
    start = content.index(b"PK\x01\x02")
    return (
        content[:start] + rows + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, *[len(entries)] * 2, len(rows), start, 0)
    )


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
    "names": archive({"\N{SNOWMAN}": b"12", "caf\N{LATIN SMALL LETTER E WITH ACUTE}": b"3", "a": b""}),
    "padded": zip_file(VALUE),  # with fields after the names
    "large": large({"a": b"12", "b": b"345"}),
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


def by_zipfile(content):
    """The entries of an archive as zipfile finds them; None if it refuses the archive."""
    fields = ("orig_filename", "flag_bits", "compress_type", "CRC", "compress_size", "file_size", "header_offset")
    try:
        infos = zipfile.ZipFile(io.BytesIO(content)).infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return None
    return [zips.ZipEntry(*operator.attrgetter(*fields)(info)) for info in infos]


def agrees(entries, content):
    """Whether entries, or the text of an error, are what zipfile finds; some archives that it reads are refused."""
    return isinstance(entries, str) or entries == by_zipfile(content)


@pytest.mark.parametrize("name", ARCHIVES)
def test_entries_are_those_of_zipfile(name, tmp_path):
    entries, begins, overlap = found(opened(tmp_path / "a.zip", ARCHIVES[name]))
    assert entries == by_zipfile(ARCHIVES[name])
    assert all(type(begin) is int for begin in begins)
    assert overlap is None


@pytest.mark.parametrize("k", range(2))
@pytest.mark.parametrize("name", ARCHIVES)
def test_any_byte_may_change(name, k, tmp_path):
    """Of the directory, the end and the local headers: the archive is refused, or has the entries of zipfile."""
    content = ARCHIVES[name]
    infos = zipfile.ZipFile(io.BytesIO(content)).infolist()
    start = content.index(b"PK\x01\x02")
    places = [at for info in infos for at in range(info.header_offset, info.header_offset + 34)]
    places += range(start, len(content))
    good, changed, read = found(opened(tmp_path / "a.zip", content)), 0, 0
    for at in part_of(places, k, 8):
        for value in BYTES:
            if content[at] != value:
                other = content[:at] + bytes((value,)) + content[at + 1 :]
                file = opened(tmp_path / "a.zip", other)
                what = found(file)
                entries = what if isinstance(what, str) else what[0]
                assert agrees(entries, other), (at, value)
                changed += what != good
                read += entries is not what
                file.close()
    assert changed > 25
    assert read > 25


def test_an_archive_without_entries(tmp_path):
    assert found(opened(tmp_path / "a.zip", archive({}))) == ([], [], None)


def test_any_end_may_be_cut_off(tmp_path):
    content = ARCHIVES["torch"]
    for size in part_of(range(len(content)), 3, 10):
        assert isinstance(found(opened(tmp_path / "a.zip", content[:size])), str)
        assert by_zipfile(content[:size]) is None


@pytest.mark.parametrize("size", [65_450, 32_690, 21_000, 0])
def test_local_headers_in_many_blocks(size, tmp_path):
    """Each is found in some block of 64 KiB, or alone."""
    content = archive({f"{k:03}" * (k % 7 + 1): bytes(size + 2 * k) for k in range(60)})
    entries, begins, _ = found(opened(tmp_path / "a.zip", content))
    assert entries == by_zipfile(content)
    assert begins == [entry.at + 30 + len(entry.name) for entry in entries]
    assert all(type(begin) is int for begin in begins)


def test_entries_in_another_order_than_the_directory(tmp_path):
    """The directory of two entries, exchanged."""
    content = archive({"a": b"1", "b": b"22"})
    start = content.index(b"PK\x01\x02")
    size = zips._CENTRAL.size + 1
    first, second = content[start : start + size], content[start + size : start + 2 * size]
    content = content[:start] + second + first + content[start + 2 * size :]
    entries, begins, _ = found(opened(tmp_path / "a.zip", content))
    assert entries == by_zipfile(content)
    assert [entry.name for entry in entries] == ["b", "a"]
    assert begins[0] > begins[1]


def test_large_entries_are_not_read_around(tmp_path):
    """More than a page is read only where headers lie close together."""
    file = opened(tmp_path / "a.zip", archive({"a": bytes(1 << 20), "b": bytes(1 << 20)}))
    read = zips.Archive(file)
    assert read.locate("b") > 1 << 20
    assert len(read._window) == zips._WINDOW
