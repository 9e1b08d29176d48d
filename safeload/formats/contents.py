"""Find the pickles in a file, wherever they are: in archives, in compressed files, after other pickles, at an offset.

1. The first bytes of a content tell what it is; names only decide whether a broken pickle is reported.
2. Zip archives are read by their directory and, beyond it, by the local headers between its entries, as lenient readers
   do. Flags that hide entries from other readers are ignored.
3. Compressed contents are unpacked in memory, up to `MAX_UNPACKED` bytes for each and `MAX_TOTAL` for a file. Stored
   entries are read in place.
4. Content that cannot be entered is reported, never skipped.

This module is for judging files, not for loading them: it is lenient where readers of weights are strict.
"""

from __future__ import annotations

import bz2
import lzma
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from ..base.text import plural, show
from .torch.globals import ALLOWED
from .unpickle.trace import MAX_TRACED, Readable, Traced, trace
from .unpickle.verdicts import DANGEROUS, judge

# Bytes of an unpacked content, of all unpacked contents of a file, levels of nesting, and members of a file.
MAX_UNPACKED = 256 << 20
MAX_TOTAL = 1 << 30
MAX_NESTED = 8
MAX_MEMBERS = 200_000
# Opcodes of all pickles of a file, and bytes of an unrecognised content that are searched for pickles.
MAX_OPCODES = 20_000_000
MAX_SEARCHED = 1 << 30
# Opcodes that each attempt counts as.
_ATTEMPT = 50

_HEAD = 512
# Bytes to read at once. Compressed contents begin with a small read, because a malformed one ends there.
_CHUNK, _FIRST = 1 << 20, 1 << 12
_PICKLE_NAME = re.compile(r"\.(?:pkl|pickle|p|pt|pth|ckpt|bin|joblib|dill|data?|sav|model)\Z", re.IGNORECASE)
_PROTOCOL = re.compile(rb"\x80[\x02-\x05]")
# GLOBAL and INST of protocols 0 and 1, which have no magic number, for the modules that attacks name.
_TEXT_GLOBAL = re.compile(
    rb"[ci](?:__builtin__|builtins|os|posix|nt|subprocess|sys|runpy|importlib|socket|shutil)\n\w+\n"
)
# A name that can be imported, or stands for a hidden one.
_IMPORTABLE = re.compile(r"(?:[\w.-]|<\w+>|<not text>){3,300}|extension code -?[0-9]+ of copyreg")
_LAMBDA = re.compile(rb'"class_name"\s*:\s*"Lambda"')
_TENSORFLOW = re.compile(rb"\x12(?:\x08ReadFile|\x09WriteFile|\x06PyFunc|\x0fEagerPyFunc)")

# The bytes of tensors in torch checkpoints and packages.
_STORAGE = re.compile(r"(?:\A|/)(?:data/[0-9]+|\.data/[0-9]+\.storage)\Z")

# Formats that hold no pickles: they are not searched.
_WITHOUT = (b"GGUF", b"\x89HDF\r\n\x1a\n", b"NOOM")
# Archives that safeload does not enter.
_CLOSED = (
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed"),
    (b"\x04\x22\x4d\x18", "lz4-compressed"),
    (b"ZF0x", "a file of joblib before 0.10"),
)


class PickleSite(NamedTuple):
    """A pickle or another carrier of code in a file."""

    place: str  # the names of the members around it, such as "archive/data.pkl"; empty for the file itself
    offset: int  # of the pickle in its member
    traced: Traced | None  # what the pickle names; None for other code
    code: str = ""  # what else runs code
    fault: str = ""  # why the member could not be read


class MemoryContent:
    """A content in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read_at(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]


class ContentRange:
    """A range of a content."""

    def __init__(self, content: Readable, begin: int, size: int) -> None:
        self._content, self._begin = content, max(0, begin)
        self.size = max(0, min(size, content.size - self._begin))

    def read_at(self, offset: int, size: int) -> bytes:
        return self._content.read_at(self._begin + offset, max(0, min(size, self.size - offset)))


class PickleFinder:
    """The search of one file.

    Args:
        content: the file.
        name: its name, for the suffix.
    """

    def __init__(self, content: Readable, name: str) -> None:
        self._content = content
        self._name = name
        self._unpacked = 0
        self._members = 0
        self._opcodes = MAX_OPCODES
        self._searched = 0
        self._unsearched = 0  # contents that came after `MAX_SEARCHED` bytes

    def find(self) -> Iterator[PickleSite]:
        """Iterate over the pickles of the file.

        Raises:
            OSError: the file cannot be read.
        """
        yield from self._enter(self._content, "", self._name, 0)
        if self._members > MAX_MEMBERS:
            yield PickleSite("", 0, None, fault=f"it has more than {MAX_MEMBERS:,} members; the rest was not looked at")
        if self._unsearched:
            text = f"not searched for pickles: {plural(self._unsearched, 'member')} after these {MAX_SEARCHED:,} bytes"
            yield PickleSite("", 0, None, fault=text)
        if self._opcodes <= 0:
            yield PickleSite(
                "", 0, None, fault=f"its pickles have more than {MAX_OPCODES:,} opcodes; the rest was not followed"
            )

    # ---- kinds ----

    def _enter(self, content: Readable, place: str, name: str, level: int) -> Iterator[PickleSite]:
        head = content.read_at(0, _HEAD)
        self._members += 1
        if level > MAX_NESTED:
            yield PickleSite(place, 0, None, fault=f"archives are nested more than {MAX_NESTED} levels deep")
            return
        if self._members > MAX_MEMBERS:
            return
        closed = next((kind for magic, kind in _CLOSED if head.startswith(magic)), None)
        unpack = _unpacker(head)
        if closed is not None:
            yield PickleSite(place, 0, None, fault=f"this is {closed}: unpack it and scan the content")
        elif head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
            yield from self._zip(content, place, level)
        elif head[257:262] == b"ustar" or (name.lower().endswith((".tar", ".nemo")) and _is_tar(head)):
            yield from self._tar(content, place, level)
        elif head[:6] == b"\x93NUMPY":
            yield from self._npy(content, place, head)
        elif unpack is not None:
            yield from self._compressed(content, place, name, level, unpack)
        elif not head.startswith(_WITHOUT) and not _is_safetensors(head):
            yield from self._loose(content, place, name, level)
        elif head.startswith(b"\x89HDF"):
            yield from self._text(content, place, _LAMBDA, "a Keras Lambda layer, which holds code")
        if (
            head[:4] != b"PK\x03\x04"
            and head[257:262] != b"ustar"
            and any(entries for _, entries in islice(_archives(content), 1))
        ):  # a file that is two at once
            yield from self._zip(content, place, level)

    def _loose(self, content: Readable, place: str, name: str, level: int) -> Iterator[PickleSite]:
        """Follow the pickles at the beginning of a content, then search the rest."""
        at, expected = 0, _PICKLE_NAME.search(name) is not None
        while at < content.size:
            traced = self._trace(content, at)
            binary = _is_binary(content.read_at(at, 2))
            if traced.fault and not (_credible(traced) and (binary or expected or _attacks(traced))):
                if at == 0 and (binary or (expected and not _is_array_file(name))):
                    yield PickleSite(place, at, traced, fault=traced.fault)
                break
            if traced.names or binary or at > 0 or traced.end == content.size:
                yield PickleSite(place, at, traced, fault=traced.fault)
                yield from self._inside(content, place, traced, level)
            at = max(traced.end, at + 1)
            if traced.fault:
                break
        yield from self._search(content, place, at, level)
        if name.endswith((".pb", ".keras", ".json")):
            yield from self._text(content, place, _LAMBDA, "a Keras Lambda layer, which holds code")
            yield from self._text(content, place, _TENSORFLOW, "a TensorFlow operation that reaches files or Python")

    def _inside(self, content: Readable, place: str, traced: Traced, level: int) -> Iterator[PickleSite]:
        """Enter the torch files that a pickle holds as bytes."""
        for offset, size in traced.inner:
            yield from self._enter(ContentRange(content, offset, size), f"{place}@{offset}", ".pt", level + 1)

    def _trace(self, content: Readable, at: int) -> Traced:
        traced = trace(content, at, max(1, min(MAX_TRACED, self._opcodes)))
        self._opcodes -= traced.opcodes + _ATTEMPT
        return traced

    def _search(self, content: Readable, place: str, begin: int, level: int) -> Iterator[PickleSite]:
        """Search bytes for pickles that begin somewhere."""
        if begin < content.size and self._searched > MAX_SEARCHED:
            self._unsearched += 1
            return
        at, overlap = begin, 64
        beyond = begin  # no pickle before this offset is followed again
        while at < content.size:
            data = content.read_at(at, _CHUNK + overlap)
            self._searched += len(data)
            if self._searched > MAX_SEARCHED:
                break
            for pattern in (_PROTOCOL, _TEXT_GLOBAL):
                for match in pattern.finditer(data):
                    start = at + match.start()
                    if start < beyond or match.start() >= _CHUNK or self._opcodes <= 0:
                        continue
                    traced = self._trace(content, start)
                    if traced.names and not traced.fault and _credible(traced):
                        beyond = traced.end
                        yield PickleSite(place, start, traced)
                        yield from self._inside(content, place, traced, level)
            if self._opcodes <= 0:
                break
            at += _CHUNK
        if at < content.size:
            text = f"it was searched for pickles up to byte {at:,}; the rest was not looked at"
            yield PickleSite(place, at, None, fault=text)

    def _text(self, content: Readable, place: str, pattern: re.Pattern[bytes], code: str) -> Iterator[PickleSite]:
        """Report text that stands for code."""
        at = 0
        while at < content.size:
            match = pattern.search(content.read_at(at, _CHUNK + 64))
            if match is not None:
                yield PickleSite(place, at + match.start(), None, code=code)
                return
            at += _CHUNK

    # ---- containers ----

    def _npy(self, content: Readable, place: str, head: bytes) -> Iterator[PickleSite]:
        """Follow the pickle of an array of objects."""
        start = 10 if head[6:7] == b"\x01" else 12
        size = int.from_bytes(head[8:start], "little")
        header = content.read_at(start, min(size, _CHUNK))
        if b"O" not in header and content.read_at(start + size, 1) != b"\x80":
            return
        traced = self._trace(content, start + size)
        if b"O" in header or traced.names:
            yield PickleSite(place, start + size, traced, fault=traced.fault)

    def _compressed(
        self, content: Readable, place: str, name: str, level: int, unpack: Callable[[], Any]
    ) -> Iterator[PickleSite]:
        data, fault = self._unpack(content, unpack())
        if data or not fault:
            inner = re.sub(r"\.(?:gz|bz2|xz|lzma|z|zlib)\Z", "", name, flags=re.IGNORECASE)
            yield from self._enter(MemoryContent(data), place, inner, level + 1)
        if fault:
            yield PickleSite(place, 0, None, fault=fault)

    def _unpack(self, content: Readable, machine: Any) -> tuple[bytes, str]:
        """Return the unpacked bytes as far as the limits and the data allow, and the fault, if any."""
        room = min(MAX_UNPACKED, MAX_TOTAL - self._unpacked)
        if room <= 0:
            return b"", f"the file unpacks to more than {MAX_TOTAL:,} bytes"
        chunks: list[bytes] = []
        at = count = 0
        step = _FIRST
        fault = ""
        try:
            while at < content.size and not machine.eof:
                data = content.read_at(at, step)
                at, step = at + len(data), min(4 * step, _CHUNK)
                while True:
                    chunk = machine.decompress(data, _CHUNK)
                    count += len(chunk)
                    chunks.append(chunk)
                    if count > room:
                        fault = f"it unpacks to more than {room:,} bytes"
                        break
                    data = getattr(machine, "unconsumed_tail", b"")
                    if not data and (machine.eof or len(chunk) < _CHUNK or getattr(machine, "needs_input", True)):
                        break
                if fault or (not data and at >= content.size):
                    break
        except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
            fault = f"it cannot be unpacked: {show(str(error))[1:-1]}"
        self._unpacked += count
        return b"".join(chunks)[:room], fault

    def _zip(self, content: Readable, place: str, level: int) -> Iterator[PickleSite]:
        """Enter the entries of a zip archive and of archives right before it: those of the directories, and others."""
        archives = list(_archives(content))
        at = 0
        for end, entries in reversed(archives):
            storages = any(entry.name.endswith(("data.pkl", ".data/version")) for entry in entries.values())
            for begin in sorted(entries):
                yield from self._between(content, place, level, at, begin)
                entry, data, size = _local(content, entries[begin])
                at = max(at, data + size)
                if storages and _STORAGE.search(entry.name) and entry.method == 0:
                    continue  # the bytes of a tensor
                yield from self._entry(ContentRange(content, data, size), place, level, entry)
            yield from self._between(content, place, level, at, end)
            at = max(at, end)
        if not archives:
            yield from self._between(content, place, level, 0, content.size)
            yield PickleSite(place, 0, None, fault="the zip archive has no directory: it is cut or damaged")

    def _between(self, content: Readable, place: str, level: int, begin: int, end: int) -> Iterator[PickleSite]:
        """Enter local headers that no directory lists, and search what else is there."""
        if end - begin < 30:
            return
        gap = ContentRange(content, begin, end - begin)
        at = 0
        while at < gap.size and self._searched <= MAX_SEARCHED:
            data = gap.read_at(at, _CHUNK + 4)
            self._searched += len(data)
            for match in re.finditer(rb"PK\x03\x04", data):
                if self._members > MAX_MEMBERS:
                    return
                start = begin + at + match.start()
                hidden = ArchiveMember(start, "", 0, 0, 0)
                entry, first, size = _local(content, hidden)
                if entry.method in (0, 8) and first < end:
                    size = size or end - first
                    yield from self._entry(ContentRange(content, first, size), place, level, entry)
            at += _CHUNK
        yield from self._search(gap, place, 0, level)

    def _entry(self, packed: Readable, place: str, level: int, entry: ArchiveMember) -> Iterator[PickleSite]:
        """Enter an entry of a zip archive."""
        inner = f"{place}/{entry.name}" if place else entry.name
        self._members += 1
        if self._members > MAX_MEMBERS or packed.size == 0 or entry.name.endswith("/"):
            return
        machine = _ENTRY_UNPACKERS.get(entry.method)
        if entry.flags & 1:
            yield from self._encrypted(packed, inner, level, entry)
        elif entry.method == 0:
            yield from self._enter(packed, inner, entry.name, level + 1)
        elif machine is None:
            yield PickleSite(inner, 0, None, fault=f"its compression method {entry.method} is not supported")
        else:
            unpacked, fault = self._unpack(packed, machine())
            if unpacked:
                yield from self._enter(MemoryContent(unpacked), inner, entry.name, level + 1)
            if fault:
                yield PickleSite(inner, 0, None, fault=fault)

    def _encrypted(self, packed: Readable, place: str, level: int, entry: ArchiveMember) -> Iterator[PickleSite]:
        """Enter an entry that is marked as encrypted: some readers ignore the mark, so attacks set it."""
        content = packed
        if entry.method != 0:
            machine = _ENTRY_UNPACKERS.get(entry.method)
            content = MemoryContent(b"" if machine is None else self._unpack(packed, machine())[0])
        entered = self._enter(content, place, entry.name, level + 1)
        inside = [site for site in entered if site.code or (site.traced is not None and site.traced.names)]
        yield from inside
        if not inside:
            yield PickleSite(place, 0, None, fault="it is encrypted")

    def _tar(self, content: Readable, place: str, level: int) -> Iterator[PickleSite]:
        at, pax = 0, 0
        while at + 512 <= content.size:
            header = content.read_at(at, 512)
            if not header.strip(b"\0"):  # archives can follow each other
                data = content.read_at(at, _CHUNK)
                self._searched += len(data)
                if self._searched > MAX_SEARCHED:
                    text = f"it was searched for members up to byte {at:,}; the rest was not looked at"
                    yield PickleSite(place, at, None, fault=text)
                    return
                zeros = len(data) - len(data.lstrip(b"\0"))
                at += max(512, zeros - zeros % 512)
                continue
            size = _tar_number(header[124:136])
            kind = header[156:157]
            if size is None:
                yield PickleSite(place, at, None, fault="the tar archive has a malformed header")
                return
            name = header[:100].partition(b"\0")[0].decode("utf-8", "backslashreplace")
            if kind in b"xg":
                pax = _pax_size(content.read_at(at + 512, min(size, _CHUNK)))
            elif kind not in b"LK":
                size, pax = pax or size, 0
                if kind in b"0\x007S" and size:
                    inner = f"{place}/{name}" if place else name
                    yield from self._enter(ContentRange(content, at + 512, size), inner, name, level + 1)
            at += 512 + -(-size // 512) * 512


# ---- recognising ----


def _is_safetensors(head: bytes) -> bool:
    return len(head) > 8 and int.from_bytes(head[:8], "little") <= 100_000_000 and head[8:9] == b"{"


def _is_binary(head: bytes) -> bool:
    """Return whether a content begins as pickles of protocols 2 to 5 do."""
    return len(head) > 1 and head[0] == 0x80 and head[1] <= 5


def _is_array_file(name: str) -> bool:
    """Return whether a name has a suffix that other files have as well."""
    return name.endswith((".bin", ".dat", ".data", ".model", ".p"))


def _credible(traced: Traced) -> bool:
    """Return whether bytes are a pickle, not chance: it ends, or every name can be imported."""
    return (bool(traced.names) or not traced.fault) and all(map(_IMPORTABLE.fullmatch, traced.names))


def _attacks(traced: Traced) -> bool:
    """Return whether a pickle calls something dangerous before its fault."""
    return any(judge(name, ALLOWED, called=True).verdict == DANGEROUS for name in traced.called & traced.names.keys())


def _unpacker(head: bytes) -> Callable[[], Any] | None:
    if head[:2] == b"\x1f\x8b":
        return lambda: zlib.decompressobj(31)
    if len(head) > 1 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0:
        return zlib.decompressobj
    if head[:3] == b"BZh":
        return bz2.BZ2Decompressor
    if head[:6] == b"\xfd7zXZ\0" or head[:3] == b"\x5d\0\0":
        return lzma.LZMADecompressor
    return None


# ---- zip ----

_ENTRY_UNPACKERS: dict[int, Callable[[], Any]] = {
    8: lambda: zlib.decompressobj(-15),
    12: bz2.BZ2Decompressor,
}


class ArchiveMember(NamedTuple):
    """An entry of a zip archive, as a header or the directory has it."""

    at: int  # of the local header
    name: str
    method: int
    flags: int
    packed: int  # bytes


def _archives(content: Readable) -> Iterator[tuple[int, dict[int, ArchiveMember]]]:
    """Yield the archives in a content, the last one first: the offset of the end record, and the entries by offset.

    Checkpoints of torch.distributed have an archive for each chunk, one right after another.
    """
    end, members = content.size, 0
    while (record := _end_of_zip(ContentRange(content, 0, end))) is not None and members < MAX_MEMBERS:
        entries = {entry.at: entry for entry in _directory(ContentRange(content, 0, end), record)}
        yield record, entries
        members += len(entries) + 1
        end = min((begin for begin in entries if begin >= 0), default=record)
        if end >= record:
            return


def _end_of_zip(content: Readable) -> int | None:
    """Return the offset of the last end record."""
    last = content.size - 22
    if last >= 0 and (record := content.read_at(last, 22)).startswith(b"PK\x05\x06") and record.endswith(b"\0\0"):
        return last
    start = max(0, content.size - 22 - 0xFFFF)
    at = content.read_at(start, content.size - start).rfind(b"PK\x05\x06")
    return None if at < 0 else start + at


def _directory(content: Readable, end: int) -> Iterator[ArchiveMember]:
    """Iterate over the entries of the directory before an end record, as far as it can be read."""
    record = content.read_at(end, 22)
    if len(record) < 22:
        return
    size, offset = struct.unpack_from("<II", record, 12)
    first = end - size
    locator = content.read_at(max(0, end - 20), 20) if end >= 20 else b""
    if locator[:4] == b"PK\x06\x07":
        # The locator counts from the beginning of its archive, which other bytes can precede.
        for at64 in (end - 20 - 56, struct.unpack_from("<Q", locator, 8)[0]):
            record64 = content.read_at(min(at64, content.size), 56) if at64 >= 0 else b""
            if record64[:4] == b"PK\x06\x06" and len(record64) == 56:
                size, offset = struct.unpack_from("<QQ", record64, 40)
                first = at64 - size
                break
    shift = first - offset if content.read_at(max(0, first), 4) == b"PK\x01\x02" and first >= 0 else 0
    at = first if shift else offset
    for _ in range(MAX_MEMBERS):
        head = content.read_at(min(at, content.size), 46)
        if len(head) < 46 or head[:4] != b"PK\x01\x02":
            return
        flags, method = struct.unpack_from("<HH", head, 8)
        packed, full = struct.unpack_from("<II", head, 20)
        name_size, extra_size, comment_size = struct.unpack_from("<HHH", head, 28)
        local = struct.unpack_from("<I", head, 42)[0]
        rest = content.read_at(at + 46, name_size + extra_size)
        name = rest[:name_size].decode("utf-8", "backslashreplace")
        packed, local = _zip64(rest[name_size:], full, packed, local)
        yield ArchiveMember(local + shift, name, method, flags, packed)
        at += 46 + name_size + extra_size + comment_size


def _zip64(extra: bytes, full: int, packed: int, local: int) -> tuple[int, int]:
    """Return packed size and offset, from the ZIP64 field if they are there."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            data = extra[at + 4 : at + 4 + size]
            values = list(struct.unpack_from(f"<{len(data) // 8}Q", data))
            large = 0xFFFFFFFF
            if full == large and values:
                values.pop(0)
            if packed == large and values:
                packed = values.pop(0)
            if local == large and values:
                local = values.pop(0)
        at += 4 + size
    return packed, local


def _local(content: Readable, entry: ArchiveMember) -> tuple[ArchiveMember, int, int]:
    """Return an entry as its local header has it where the directory says nothing, its first byte and its size."""
    head = content.read_at(entry.at, 30) if 0 <= entry.at < content.size else b""
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        return entry, entry.at + 30, entry.packed
    flags, method = struct.unpack_from("<HH", head, 6)
    packed = struct.unpack_from("<I", head, 18)[0]
    name_size, extra_size = struct.unpack_from("<HH", head, 26)
    name = entry.name or content.read_at(entry.at + 30, name_size).decode("utf-8", "backslashreplace")
    begin = entry.at + 30 + name_size + extra_size
    if not entry.name:
        size = packed if packed != 0xFFFFFFFF else 0
        return ArchiveMember(entry.at, name, method, flags, size), begin, size
    return entry, begin, min(entry.packed, max(0, content.size - begin))


# ---- tar ----


def _is_tar(head: bytes) -> bool:
    return len(head) == 512 and _tar_number(head[124:136]) is not None and _tar_number(head[148:156]) is not None


def _tar_number(field: bytes) -> int | None:
    if field[:1] in (b"\x80", b"\xff"):
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else None
    digits = field.strip(b"\0 ")
    if not digits:
        return 0
    return int(digits, 8) if re.fullmatch(rb"[0-7]+", digits) else None


def _pax_size(records: bytes) -> int:
    match = re.search(rb"\d+ size=(\d{1,18})\n", records)
    return int(match[1]) if match else 0
