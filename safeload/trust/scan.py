"""`scan`: list the code that files name, above all the globals of pickles, and judge it.

Pickles are searched in archives, in compressed files, after other pickles and at an offset, code in configs of Keras:

1. A content is read as everything that it can be: always as pickles from byte 0, and as each kind that it begins or
   ends as. Names only decide whether a broken pickle is reported.
2. Zip archives are read by every directory at their end and, beyond these, by the local headers between their entries,
   as lenient readers do. Flags that hide entries from other readers are ignored.
3. Compressed contents are unpacked in memory, up to `MAX_UNPACKED` bytes for each and `MAX_TOTAL` for a file. Stored
   entries are read in place. A range of bytes is entered and searched once.
4. Content that cannot be entered, or that readers understand differently, is reported, never skipped.

This module judges files and loads none: it is lenient where readers of weights are strict.

The config of a Keras model is judged without building it:

1. A config is JSON: objects with "class_name", "config" and, since Keras 3, "module". It is a file, or text in an HDF5
   file or a protobuf.
2. Lambda layers and ``__lambda__`` hold code. Any other name is imported from its module.
3. What Keras registers for building layers is harmless, but for what loads files. Other modules are names to judge.
"""

from __future__ import annotations

import builtins
import bz2
import errno
import json
import lzma
import math
import os
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

from ..core.files import Files
from ..core.npy import HEADER_ERRORS, find_header, parse_header
from ..core.opening import Paths
from ..core.showing import Report, table
from ..core.text import os_error, plural, printable, show
from ..core.weight_file import open_without_table
from ..core.zip import Readable, ZipEntry, every_entry, local_readings
from ..errors import SafeloadError, exported, one_line, public
from ..formats.archives import is_header, number, records
from ..formats.dcp import RECORDS
from ..formats.torch.globals import ALLOWED, replaced_modules
from ..remote.places import places_of
from .trace import DANGEROUS, HARMLESS, MAX_TRACED, UNKNOWN, VERDICTS, Tracer, Verdict, judge, trace
from .verified import walk

# Rows of a file, and files below a table in a notebook.
MAX_FINDINGS, _ROWS = 10_000, 8
_READ = 1 << 16
_LOADED = "runs when the model is loaded"
_TITLES = ("global", "verdict", "in", "why")
# Globals that safeload reads pickles with: those of any pickle, and of the metadata of torch.distributed.checkpoint.
_ALLOWED = {**ALLOWED, **RECORDS}


@exported()
class ScanFinding(NamedTuple):
    """A global that a pickle names, or other code in a file.

    Attributes:
        path: of the file.
        place: names of the members around the pickle, such as "archive/data.pkl"; empty for the file itself.
        offset: byte where the pickle begins in its member.
        name: the global, such as "os.system", or a description of other code.
        verdict: "harmless", "unknown" or "dangerous".
        reason: why.
    """

    path: str
    place: str
    offset: int
    name: str
    verdict: Verdict
    reason: str

    @property
    def where(self) -> str:
        """The file and the member, for messages."""
        return f"{self.path}:{self.place}" if self.place else self.path


@exported()
class ScanReport(Report):
    """The result of `safeload.scan`. ``str()`` is a table; the report is false unless everything is harmless.

    Programs should look at ``verdict``: a file without findings can still be unreadable.

    Attributes:
        findings: `ScanFinding` for each global and pickle, the worst first.
        unreadable: what could not be judged: (file and member, reason).
        files: number of files.
        pickles: number of pickles in them.

    Example:
        >>> import safeload
        >>> report = safeload.scan("checkpoint.pt")
        >>> report.verdict, report.pickles, bool(report)
        ('harmless', 1, True)
    """

    _columns = ScanFinding._fields
    _json = (
        *("verdict", "files", "pickles", "findings"),
        ("unreadable", lambda report: [{"path": path, "reason": reason} for path, reason in report.unreadable]),
    )

    def __init__(self) -> None:
        self.findings: list[ScanFinding] = []
        self.unreadable: list[tuple[str, str]] = []
        self.files = 0
        self.pickles = 0

    @property
    def verdict(self) -> Verdict:
        """The worst verdict; what cannot be read is unknown."""
        verdicts = [UNKNOWN if self.unreadable else HARMLESS, *(finding.verdict for finding in self.findings)]
        return max(verdicts, key=VERDICTS.index)

    @property
    def status(self) -> int:
        """Exit status of ``safeload scan``: 0 harmless, 1 unknown or unreadable, 2 dangerous."""
        return VERDICTS.index(self.verdict)

    @property
    def ok(self) -> bool:
        """True if everything is harmless."""
        return self.verdict == HARMLESS

    def __bool__(self) -> bool:
        return self.ok

    def add(self, other: ScanReport) -> None:
        """Add the findings of another report."""
        self.findings = sorted([*self.findings, *other.findings], key=_worst_first)
        self.unreadable += other.unreadable
        self.files += other.files
        self.pickles += other.pickles

    def _values(self) -> Iterable[ScanFinding]:
        return self.findings

    def _about(self) -> Sequence[str]:
        return [self.lines(None)[-1], *(f"not judged: {path}" for path, _ in self.unreadable[:_ROWS])]

    def lines(self, columns: int | None = 80, *, harmless: bool = True) -> list[str]:
        """Return the report as lines of text.

        Args:
            columns: width in characters; None cuts nothing.
            harmless: list harmless globals too.

        Returns:
            Lines without line ends.
        """
        lines: list[str] = []
        findings = [f for f in self.findings if harmless or f.verdict != HARMLESS]
        if findings:
            rows = [(printable(f.name), f.verdict, printable(f.where), f.reason) for f in findings]
            lines = [*table(_TITLES, rows, right=frozenset(), columns=columns), ""]
        lines += [f"not judged: {printable(path)}: {printable(reason)}" for path, reason in self.unreadable]
        return [*lines, f"{self.verdict}: {plural(self.pickles, 'pickle')} in {plural(self.files, 'file')}"]


@public
def scan(paths: Paths, *, storage_options: Mapping[str, Any] | None = None) -> ScanReport:
    r"""List and judge every global that pickles in files name, and other code that loading would run.

    Pickles are found wherever they are: in torch checkpoints, NumPy object arrays, joblib files, inside zip and tar
    archives (``.nemo``, ``.keras``, torch.package), nested and compressed, in sequence, or at an offset. A file
    is also followed as a pickle if it begins as another format, and calls before a fault count. Nothing is executed or
    imported. Globals on the allowlist with which safeload reads pickles are harmless; any other global is unknown, or
    dangerous if it is known to run code, reach files or the network, or hide a name. Keras Lambda layers count as
    dangerous, and modules in Keras configs are judged like globals. You should load a file with other libraries only if
    it is harmless, or if you trust its author.

    Args:
        paths: a file, a folder with its subfolders, a URL, or a list of these.
        storage_options: options of the filesystem behind a URL, see `safeload.open`.

    Returns:
        The report. Its ``verdict`` is the worst of all files; unreadable content is unknown.

    Raises:
        FileNotFoundError: a path does not exist.
        TypeError, ValueError: not a path.
        RemoteError, OSError: a path cannot be read.

    Example:
        >>> from pathlib import Path
        >>> import safeload
        >>> _ = Path("call.pkl").write_bytes(b"cos\nsystem\n(S'echo owned'\ntR.")
        >>> report = safeload.scan("call.pkl")
        >>> report.verdict, report.findings[0].name, report.findings[0].reason
        ('dangerous', 'os.system', 'runs programs')
    """
    report = ScanReport()

    def failed(shown: str, error: Exception) -> None:
        report.unreadable.append((shown, one_line(error)))

    for path in paths if isinstance(paths, (list, tuple)) else (paths,):
        (text,), files = places_of((path,), storage_options)
        if not files.remote and not os.path.lexists(text):
            raise os_error(errno.ENOENT, text)
        if not files.is_folder(text):
            _scan_file(report, text, files)
            continue
        for _, inner in walk(text, files, failed):
            try:
                _scan_file(report, inner, files)
            except (OSError, SafeloadError) as error:  # noqa: PERF203 - the next paths are still scanned
                failed(files.shown(inner), error)
    report.findings.sort(key=_worst_first)
    return report


def _worst_first(finding: ScanFinding) -> int:
    return -VERDICTS.index(finding.verdict)


def _scan_file(report: ScanReport, path: str, files: Files) -> None:
    try:
        file = open_without_table(path, files=files)
    except SafeloadError as error:  # not a regular file
        report.unreadable.append((files.shown(path), one_line(error)))
        return
    report.files += 1

    def read_remote(offset: int, size: int) -> bytes:
        if size < _READ:
            return file.read_at(offset, size)
        memory = bytearray(size)  # the windows of the store keep small reads only
        file.store.read_into(offset, memory)
        return bytes(memory)

    with closing(file), suppress(_Full):
        content = ScannedRange(read_remote if file.remote else file.read_at, file.size)
        _FileScan(report, files.shown(path), content).run(files.split(path)[1])


# ---- finding ----

# Bytes of an unpacked content, of all unpacked contents of a file, levels of nesting, and members of a file.
MAX_UNPACKED = 256 << 20
MAX_TOTAL = 1 << 30
MAX_NESTED = 8
MAX_MEMBERS = 200_000
# Opcodes of all pickles of a file, and bytes of an unrecognised content that are searched for pickles.
MAX_OPCODES = 20_000_000
MAX_SEARCHED = 1 << 30
# Opcodes that each attempt counts as, and opcodes per byte of a file and of what it unpacks to.
_ATTEMPT, _PER_BYTE = 50, 16
# Bytes of a head, and to read at once. Compressed contents begin with a small read, where malformed ones end.
_HEAD, _CHUNK, _FIRST = 512, 1 << 20, 1 << 12
_PICKLE_NAME = re.compile(r"\.(?:pkl|pickle|p|pt|pth|ckpt|bin|joblib|dill|data?|sav|model)\Z", re.IGNORECASE)
_ARRAY_FILES = (".bin", ".dat", ".data", ".model", ".p")  # suffixes that other files have as well
_PROTOCOL = re.compile(rb"\x80[\x02-\x05]")
# GLOBAL and INST of protocols 0 and 1, which have no magic number, for the modules that attacks name.
_TEXT_GLOBAL = re.compile(
    rb"[ci](?:__builtin__|builtins|os|posix|nt|subprocess|sys|runpy|importlib|socket|shutil)\n\w+\n"
)
# A name with an importable module, or hiding a name like that.
_IMPORTABLE = re.compile(r"[\w.-]+\.(?:[^\W\d]|<)[\w.<>-]*|<(?:computed|not text)>\..*", re.DOTALL)
_TENSORFLOW = re.compile(rb"\x12(?:\x08ReadFile|\x09WriteFile|\x06PyFunc|\x0fEagerPyFunc)")

# The bytes of tensors in torch checkpoints and packages.
_STORAGE = re.compile(r"((?:.*/)?)(?:data/[0-9]+|\.data/[0-9]+\.storage)")
_PICKLED = re.compile(r"((?:.*/)?)(?:data\.pkl|\.data/version)")
# Kinds of a range beside the compression methods of zip: any content, and an archive that is found by its end.
_ANY, _BY_END = -1, -2
# Memory of an lzma stream, and numbers of compression methods of zip.
_MAX_DICTIONARY, _METHODS = 1 << 28, 100

# Formats that hold no pickles: they are not searched.
_HDF5 = b"\x89HDF\r\n\x1a\n"
_WITHOUT = (b"GGUF", _HDF5, b"NOOM")
# Largest header of safetensors that is parsed to recognise the format.
_MAX_HEADER = 16 << 20
# Files that can hold the config of a Keras model.
_CONFIG_NAME = re.compile(r"\.(?:pb|keras|json|h5|hdf5)\Z", re.IGNORECASE)
_CLOSED = (  # archives that safeload does not enter
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed"),
    (b"\x04\x22\x4d\x18", "lz4-compressed"),
    (b"\x02\x21\x4c\x18", "lz4-compressed"),
    *((bytes((0x50 + number, 0x2A, 0x4D, 0x18)), "compressed in frames") for number in range(16)),
    (b"\x1f\x9d", "compressed by compress"),
    (b"LZIP", "lzip-compressed"),
    (b"\x89LZO\0\r\n", "lzop-compressed"),
    (b"ZF0x", "a file of joblib before 0.10"),
    (b"ZF", "a file of joblib before 0.10"),
)
# Beginnings of other content in the place of a tensor.
_STREAMS = (b"\x1f\x8b\x08", b"\xfd7zXZ\0", *(b"BZh%d" % level for level in range(1, 10)))
_ENTERED = (b"PK\x03\x04", b"\x93NUMPY", *_STREAMS, *(magic for magic, _ in _CLOSED if len(magic) >= 4))


class _Full(Exception):  # noqa: N818 - ends the search of a file
    """A file names twice as many globals as are listed."""


class ScannedRange:
    """A range of the file or of unpacked bytes."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, place: str = "", level: int = 0) -> None:
        self._read = read  # returns bytes of the source
        self.place = place  # see `ScanFinding`
        self.level = level  # of nesting
        self.root = object()  # stands for the source, which can then be freed
        self.begin, self.size = 0, size

    @classmethod
    def of(cls, data: bytes, place: str = "", level: int = 0) -> ScannedRange:
        return cls(lambda offset, size: data[offset : offset + size], len(data), place, level)

    def part(self, begin: int, size: int, place: str, level: int) -> ScannedRange:
        begin = self.begin + max(0, begin)
        part = ScannedRange(self._read, max(0, min(size, self.begin + self.size - begin)), place, level)
        part.root, part.begin = self.root, begin
        return part

    def name(self, inner: str) -> str:
        """Return the place of a member of this archive."""
        return f"{self.place}/{inner}" if self.place else inner

    def read_at(self, offset: int, size: int) -> bytes:
        return self._read(self.begin + offset, max(0, min(size, self.size - offset)))


class _FileScan:
    """The search of one file."""

    def __init__(self, report: ScanReport, shown: str, content: ScannedRange) -> None:
        self._report = report
        self._shown = shown
        self._content = content
        self._listed = 0  # findings in the report
        self._encrypted = False  # faults of encrypted entries say nothing
        self._unpacked = 0
        self._members = 0
        self._opcodes = 0
        self._searched = 0
        self._unsearched = 0  # contents that came after `MAX_SEARCHED` bytes
        self._entered: dict[tuple[object, int, int], int] = {}  # largest size by root, first byte and kind
        self._calls: set[tuple[str, bool]] = set()  # names in pickles, and whether they were called
        # The searched ranges, apart and in order, by root and what was searched for.
        self._ranges: dict[tuple[object, str], list[tuple[int, int]]] = {}

    def run(self, name: str) -> None:
        """Report what a file of this name holds, and what of it cannot be judged."""
        file = self._content
        self._enter(file, name)
        if self._members > MAX_MEMBERS:
            self._fault(file, f"it has more than {MAX_MEMBERS:,} members; the rest was not looked at")
        if count := self._unsearched:
            self._fault(file, f"not searched for pickles: {plural(count, 'member')} after these {MAX_SEARCHED:,} bytes")
        if self._opcodes >= self._most:
            self._fault(file, f"its pickles have more than {self._most:,} opcodes; the rest was not followed")

    def _fault(self, content: ScannedRange, text: str, *, named: bool = False) -> None:
        """Report why a content cannot be judged; ``named`` if it has findings."""
        if self._listed > 2 * MAX_FINDINGS:
            raise _Full
        if named or not self._encrypted:
            self._report.unreadable.append((f"{self._shown}:{content.place}" if content.place else self._shown, text))

    def _code(self, content: ScannedRange, at: int, code: Iterable[tuple[str, Verdict, str]]) -> None:
        """Report the name, the verdict and the reason of all code at a place."""
        if self._listed > 2 * MAX_FINDINGS:
            raise _Full
        findings = [ScanFinding(self._shown, content.place, at, *finding) for finding in code]
        if self._listed + len(findings) > MAX_FINDINGS:
            text = f"it names more than {MAX_FINDINGS:,} globals; the rest is not listed"
            self._report.unreadable.append((self._shown, text))
            findings = [finding for finding in findings if finding.verdict == DANGEROUS][:MAX_FINDINGS]
        self._listed += len(findings)
        self._report.findings += findings

    def _pickle(self, content: ScannedRange, at: int, traced: Tracer, fault: str) -> None:
        """Report a pickle, and enter the torch files that it holds as bytes."""
        if traced.names or not self._encrypted:
            self._code(content, at, _judged(traced.names, traced.called))
            self._report.pickles += bool(traced.names) or not fault
        if fault:
            self._fault(content, f"the pickle at byte {at:,} is malformed: {fault}", named=bool(traced.names))
        for offset, size in traced.inner:
            self._enter(content.part(offset, size, f"{content.place}@{offset}", content.level + 1), ".pt")

    @property
    def _most(self) -> int:
        return min(MAX_OPCODES, _PER_BYTE * (self._content.size + self._unpacked) + 4096)

    def _is_new(self, content: ScannedRange, kind: int) -> bool:
        """Return True if a range was not entered as this kind, or only a part of it from its beginning or end."""
        key = (content.root, content.begin + (content.size if kind == _BY_END else 0), kind)
        if self._entered.get(key, -1) >= content.size:
            return False
        self._entered[key] = content.size
        return True

    def _not_searched(self, content: ScannedRange, begin: int, what: str) -> list[tuple[int, int]]:
        """Return the unsearched ranges after an offset; from now on they count as searched."""
        at, end = content.begin + begin, content.begin + content.size
        if at >= end:
            return []
        ranges = self._ranges.setdefault((content.root, what), [])
        near = slice(bisect_left(ranges, at, key=itemgetter(1)), bisect_right(ranges, end, key=itemgetter(0)))
        first, new = at, []
        for known, last in ranges[near]:
            if at < known:
                new.append((at - content.begin, known - content.begin))
            first, at = min(first, known), max(at, last)
        if at < end:
            new.append((at - content.begin, content.size))
        ranges[near] = [(first, max(at, end))]
        return new

    # ---- kinds ----

    def _enter(self, content: ScannedRange, name: str) -> None:
        if not self._is_new(content, _ANY):
            return
        self._members += 1
        if content.level > MAX_NESTED:
            self._fault(content, f"archives are nested more than {MAX_NESTED} levels deep")
            return
        if self._members > MAX_MEMBERS:
            return
        head = content.read_at(0, _HEAD)
        closed = next((kind for magic, kind in _CLOSED if head.startswith(magic)), None)
        unpack = _unpacker(head)
        is_zip, is_tar = head[:4] in (b"PK\x03\x04", b"PK\x05\x06"), head[257:262] == b"ustar" or is_header(head)
        is_npy = head.startswith(b"\x93NUMPY")
        plain = not (
            closed or is_zip or is_tar or is_npy or head.startswith(_WITHOUT) or _is_safetensors(content, head)
        )
        if unpack is not None:
            sure = unpack[1] and plain
            self._compressed(content, name, unpack[0], sure=sure)
            plain = plain and not sure
        is_new_end = self._is_new(content, _BY_END)
        listed = every_entry(content, MAX_MEMBERS) if is_new_end else []
        if is_zip:
            self._zip(content, listed)
        end = self._pickles(content, name, plain=plain)
        if closed is not None:
            self._fault(content, f"this is {closed}: unpack it and scan the content")
        if is_tar:
            self._tar(content)
        if is_npy:
            self._npy(content)
        if plain or (end and not is_zip):
            self._rest(content, end)
        if listed and not is_zip:
            self._zip(content, listed)
        if head.startswith(b"PK\x03\x04") and is_new_end and not listed:
            self._fault(content, "the zip archive has no directory: it is cut or damaged")
        is_keras_zip = is_zip and name.endswith(".keras")
        if head.startswith(_HDF5) or _is_json(head) or (_CONFIG_NAME.search(name) and not is_keras_zip):
            self._configs(content, head)
        if name.endswith((".pb", ".keras", ".json")):  # the first operation of TensorFlow that runs code
            for at in islice(_matches(content, _TENSORFLOW), 1):
                self._code(content, at, [("a TensorFlow operation that reaches files or Python", DANGEROUS, _LOADED)])

    def _pickles(self, content: ScannedRange, name: str, at: int = 0, *, plain: bool) -> int:
        """Follow consecutive pickles at an offset, and return the end of the last whole pickle."""
        # Only in `plain` content, of no other kind, does the name decide whether a broken pickle is reported.
        begin, expected = at, plain and _PICKLE_NAME.search(name) is not None and not name.endswith(_ARRAY_FILES)
        while at < content.size:
            traced = self._trace(content, at, strict=True)
            head = content.read_at(at, _HEAD)
            binary = plain and len(head) > 1 and head[0] == 0x80 and head[1] <= 5  # protocols 2 to 5
            if traced.fault and (binary or expected):
                lenient = self._trace(content, at)
                traced = lenient if lenient.fault or lenient.names else traced
            certain = at == 0 and (binary or expected)
            if not (certain or traced.limited or (plain and at == 0 and not traced.fault)):
                is_text = all(byte >= 32 or byte in b"\t\r\n" for byte in head)
                traced.names = _counted(traced, called=not (binary or expected) and is_text)
                if traced.fault and (not traced.names or (not plain and _verdicts(traced, traced.names) <= {HARMLESS})):
                    break
            calls = {(name, name in traced.called) for name in traced.names}
            # A zip archive can be a pickle by chance.
            repeated = bool(calls) and calls <= self._calls and not plain and not traced.limited
            self._calls |= calls
            whole = plain and (binary or at > begin or traced.end == content.size)
            if not repeated and (traced.fault or calls or whole):
                self._pickle(content, at, traced, traced.fault if certain or traced.limited else "")
            if traced.fault:
                break
            at = traced.end
        return at

    def _rest(self, content: ScannedRange, at: int, *, search: bool = True) -> None:
        """Enter and search a tensor, or the bytes after pickles and arrays, if these are of another kind."""
        rest = content.part(at, content.size - at, f"{content.place}@{at}", content.level + 1)
        head = rest.read_at(0, _HEAD) if at or not search else b""
        unpack = _unpacker(head)
        if head.startswith(_ENTERED) or is_header(head):
            self._enter(rest, "")
        elif unpack is not None:
            rest.place, rest.level = content.place, content.level
            self._compressed(rest, "", unpack[0], sure=False)
        if search:
            self._search(content, at)

    def _trace(self, content: Readable, at: int, *, strict: bool = False) -> Tracer:
        traced = trace(content, at, max(1, min(MAX_TRACED, self._most - self._opcodes)), strict=strict)
        self._opcodes += traced.opcodes + _ATTEMPT
        return traced

    def _search(self, content: ScannedRange, begin: int) -> None:
        """Search bytes for pickles that begin somewhere."""
        # No pickle before an offset is followed again, nor from an opcode that the last of its kind passed alike.
        beyond, followed = begin, [set[int](), set[int]()]  # binary, text
        for at, end in self._not_searched(content, begin, "pickles"):
            if self._searched > MAX_SEARCHED:
                self._unsearched += 1
                return
            while at < end:
                size = min(_CHUNK, end - at)
                data = content.read_at(at, size + 64)
                self._searched += len(data)
                if self._searched > MAX_SEARCHED:
                    break
                for text, pattern in enumerate((_PROTOCOL, _TEXT_GLOBAL)):
                    for match in pattern.finditer(data):
                        start = at + match.start()
                        if start < beyond or start in followed[text] or match.start() >= size:
                            continue
                        if self._opcodes >= self._most:
                            break
                        traced = self._trace(content, start, strict=not text)
                        followed[text] = traced.globals_at if text else traced.heads
                        names: Any = _counted(traced)
                        if text and traced.fault:  # calls of something dangerous before the fault
                            names = DANGEROUS in _verdicts(traced, traced.called & traced.names.keys())
                        if traced.limited or names:
                            beyond = max(traced.end, start + 1)
                            self._pickle(content, start, traced, traced.fault if traced.limited else "")
                if self._opcodes >= self._most:
                    break
                at += size
            if at < end:
                self._fault(content, f"it was searched for pickles up to byte {at:,}; the rest was not looked at")
                return

    def _configs(self, content: ScannedRange, head: bytes) -> None:
        """Judge the configs of Keras models, which are JSON: a file, or text within other bytes."""
        text: Readable = content
        if b"\0" in head[:64] and _is_json(head) and content.size <= MAX_CONFIG:
            data = content.read_at(0, content.size)
            try:  # as `json.loads` reads bytes
                text = ScannedRange.of(data.decode(json.detect_encoding(data)).encode())
            except UnicodeError:
                return
        try:
            for at, code, names in configs(text):
                imported = dict.fromkeys(names)
                lambdas = [(line, DANGEROUS, _LOADED) for line in dict.fromkeys(code)]
                self._code(content, at, [*lambdas, *_judged(imported, imported)])
        except ValueError:
            self._fault(content, "a Keras config that cannot be parsed")

    # ---- containers ----

    def _npy(self, content: ScannedRange) -> None:
        """Follow the pickles of object arrays in npy files in turn."""
        at = 0
        while content.read_at(at, 6) == b"\x93NUMPY":
            head = content.read_at(at, 12)
            begin = at + (10 if head[6:7] == b"\x01" else 12)
            begin += int.from_bytes(head[8 : begin - at], "little")
            try:
                text, _ = find_header(content, at, content.size - at)
                dtype, _, shape = parse_header(re.sub(rb"(?<=[0-9])L(?=[,)])", b" ", text))  # integers of Python 2
                size = dtype.itemsize * math.prod(shape)
                if size < 0:
                    raise ValueError
            except (*HEADER_ERRORS, Warning):
                dtype = None
                self._fault(content, "the header of its array cannot be read")
            objects = dtype is None or dtype.hasobject
            traced = self._trace(content, begin, strict=not objects)
            if objects or _counted(traced):
                self._pickle(content, begin, traced, traced.fault if dtype is not None else "")
            if objects and traced.fault:
                return
            at = traced.end if objects else begin + size
        if at < content.size:
            at = self._pickles(content, "", at, plain=True)
            self._rest(content, at)

    def _compressed(self, content: ScannedRange, name: str, make: Callable[[], Any], *, sure: bool) -> None:
        """Enter the content of a file that is or may be compressed."""
        data, fault, _ = self._unpack(content, make)
        if data or (sure and not fault):
            inner = re.sub(r"\.(?:gz|bz2|xz|lzma|z|zlib)\Z", "", name, flags=re.IGNORECASE) if sure else ""
            self._enter(ScannedRange.of(data, content.place, content.level + 1), inner)
        if fault and sure:
            self._fault(content, fault)

    def _unpack(self, content: Readable, make: Callable[[], Any], *, members: bool = True) -> tuple[bytes, str, int]:
        """Return the unpacked bytes as far as the limits and the data allow, the fault, if any, and the bytes used."""
        room = min(MAX_UNPACKED, MAX_TOTAL - self._unpacked)
        if room <= 0:
            return b"", f"the file unpacks to more than {MAX_TOTAL:,} bytes", 0
        chunks: list[bytes] = []
        machine, chunk, data, fault = make(), b"", b"", ""
        at = count = 0
        step = _FIRST
        try:
            while count <= room and (members or not machine.eof):  # further members, unless there can be none
                if not data and (machine.eof or (len(chunk) < _CHUNK and getattr(machine, "needs_input", True))):
                    data = content.read_at(at, step)
                    at, step = at + len(data), min(4 * step, _CHUNK)
                    if not data:
                        fault = "" if machine.eof else "it cannot be unpacked: it is cut off"
                        break
                if machine.eof:
                    data = data.lstrip(b"\0")
                    if not data:
                        continue
                    machine = make()
                chunk = machine.decompress(data, _CHUNK)
                chunks.append(chunk)
                count += len(chunk)
                data = machine.unused_data if machine.eof else getattr(machine, "unconsumed_tail", b"")
            if count > room:
                fault = f"it unpacks to more than {room:,} bytes"
        except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, MemoryError) as error:
            fault = f"it cannot be unpacked: {show(str(error))[1:-1]}"
        self._unpacked += count
        return b"".join(chunks)[:room], fault, at - len(data)

    def _zip(self, content: ScannedRange, listed: list[ZipEntry]) -> None:
        """Enter the entries of zip archives, listed in a directory or not."""
        folders = {match[1] for entry in listed if (match := _PICKLED.fullmatch(entry.name))}
        if fault := replaced_modules(entry.name for entry in listed):
            self._fault(content, fault)
        at = 0
        for entry in sorted(listed, key=lambda entry: entry.at):
            self._between(content, at, entry.at)
            begin, readings = local_readings(content, entry)
            storage = _STORAGE.fullmatch(entry.name)
            used = []
            for reading in readings:
                is_tensor = storage is not None and storage[1] in folders and reading.method == 0
                if not is_tensor:
                    used.append(self._entry(content, begin, reading.packed, reading))
                    continue
                tensor = content.part(begin, reading.packed, content.name(reading.name), content.level)
                used.append(tensor.size)
                self._rest(tensor, 0, search=False)
                end = self._pickles(tensor, "", plain=False)
                if end:
                    self._rest(tensor, end)
            at = max(at, begin + min(used))
        self._between(content, at, content.size)

    def _between(self, content: ScannedRange, begin: int, end: int) -> None:
        """Enter local headers that no directory lists, and search the bytes between entries."""
        if end - begin < 30:
            return
        gap = content.part(begin, end - begin, content.place, content.level)
        for at, last in self._not_searched(gap, 0, "headers"):
            while at < last and self._searched <= MAX_SEARCHED:
                data = gap.read_at(at, min(_CHUNK, last - at) + 3)
                self._searched += len(data)
                for match in re.finditer(rb"PK\x03\x04", data):
                    if self._members > MAX_MEMBERS:
                        return
                    start = begin + at + match.start()
                    first, [entry] = local_readings(content, ZipEntry("", 0, 0, 0, 0, 0, start), listed=False)
                    if entry.method < _METHODS and first < end:
                        self._entry(content, first, entry.packed or end - first, entry)
                at += _CHUNK
        self._search(gap, 0)

    def _entry(self, archive: ScannedRange, begin: int, size: int, entry: ZipEntry) -> int:
        """Enter an entry of a zip archive and return the number of bytes it takes."""
        content = packed = archive.part(begin, size, archive.name(entry.name), archive.level + 1)
        self._members += 1
        if self._members > MAX_MEMBERS or packed.size == 0 or not self._is_new(packed, entry.method):
            return packed.size
        fault, used = "", packed.size
        if entry.method != 0:
            data, fault = b"", f"its compression method {entry.method} is not supported"
            if machine := _ENTRY_UNPACKERS.get(entry.method):
                data, fault, used = self._unpack(packed, machine, members=False)
            content = ScannedRange.of(data, packed.place, packed.level)
        outer, listed = self._encrypted, self._listed
        self._encrypted = outer or bool(entry.flags & 1)  # some readers ignore the mark, so attacks set it
        if content.size:
            self._enter(content, entry.name)
        self._encrypted = outer
        if entry.flags & 1:
            fault, used = "" if self._listed > listed else "it is encrypted", packed.size
        if fault:
            self._fault(packed, fault)
        return used

    def _tar(self, content: ScannedRange) -> None:
        at, pax = 0, 0
        while at + 512 <= content.size:
            header = content.read_at(at, 512)
            if not header.strip(b"\0"):  # archives can follow each other
                data = content.read_at(at, _CHUNK)
                self._searched += len(data)
                if self._searched > MAX_SEARCHED:
                    self._fault(content, f"it was searched for members up to byte {at:,}; the rest was not looked at")
                    return
                zeros = len(data) - len(data.lstrip(b"\0"))
                at += max(512, zeros - zeros % 512)
                continue
            size, kind = number(header[124:136]), header[156:157]
            if size is None or not is_header(header):
                self._fault(content, "the tar archive has a malformed header")
                return
            name = header[:100].partition(b"\0")[0].decode("utf-8", "backslashreplace")
            fault = "readers disagree about its size" if kind in b"123456" and (pax or size) else ""
            if kind not in b"xXgLK":
                size, pax = pax or size, 0
            member = content.part(at + 512, size, content.name(name), content.level + 1)
            if kind in b"xXg":
                pax, fault = _pax_size(content.read_at(at + 512, min(size, _CHUNK)), kind)
                fault = fault or ("its description is too long" if size > _CHUNK else "")
            elif kind not in b"LK":
                self._enter(member, name)
                fault = fault or ("it is a sparse file" if kind == b"S" else "")
            if fault:
                self._fault(member, f"this tar member cannot be judged: {fault}")
            at += 512 + -(-size // 512) * 512


# ---- recognising ----


def _is_safetensors(content: Readable, head: bytes) -> bool:
    size = int.from_bytes(head[:8], "little")
    if 2 <= size <= min(_MAX_HEADER, content.size - 8) and head[8:9] == b"{":
        with suppress(ValueError, RecursionError):
            return isinstance(json.loads(content.read_at(8, size)), dict)
    return False


def _is_json(head: bytes) -> bool:
    """Return True if a content begins as JSON does, in any encoding."""
    return head[:64].lstrip(b"\0\xff\xfe\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")


def _counted(traced: Tracer, *, called: bool = True) -> dict[str, int]:
    """Return the names of a pickle that count: called names, and names too unlikely by chance."""
    # Of a pickle with a fault, only the called names count if `called`.
    return {
        name: at
        for name, at in traced.names.items()
        if name in traced.called or (_IMPORTABLE.fullmatch(name) and not (called and traced.fault))
    }


def _judged(names: Iterable[str], called: Collection[str]) -> list[tuple[str, Verdict, str]]:
    """Return each global as a report names it, its verdict and the reason."""
    return [
        (show(name)[1:-1] if len(name) > 300 else name, *judge(name, _ALLOWED, called=name in called)) for name in names
    ]


def _verdicts(traced: Tracer, names: Iterable[str]) -> set[Verdict]:
    return {judge(name, ALLOWED, called=name in traced.called)[0] for name in names}


def _unpacker(head: bytes) -> tuple[Callable[[], Any], bool] | None:
    """Return the decompressor for a content that begins like this, and True if it must be compressed; else None."""
    if head[:2] == b"\x1f\x8b":
        return lambda: zlib.decompressobj(31), True
    if head[:3] == b"BZh":
        return bz2.BZ2Decompressor, True
    if head[:6] == b"\xfd7zXZ\0":
        return lambda: lzma.LZMADecompressor(memlimit=_MAX_DICTIONARY), True
    if len(head) > 1 and head[0] & 15 == 8 and head[0] < 0x80 and int.from_bytes(head[:2], "big") % 31 == 0:
        return zlib.decompressobj, head[0] == 0x78
    if len(head) > 13 and head[0] < 225 and head[13] == 0 and (head[5:13] == b"\xff" * 8 or head[10:13] == bytes(3)):
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=_MAX_DICTIONARY), head[:3] == b"]\0\0"
    return None


_ENTRY_UNPACKERS: dict[int, Callable[[], Any]] = {8: lambda: zlib.decompressobj(-15), 12: bz2.BZ2Decompressor}


def _pax_size(description: bytes, kind: bytes) -> tuple[int, str]:
    """Return the size of the next member in a description, 0 for none, and why the description is not understood."""
    try:
        fields = records(description, "", 0)
    except SafeloadError as error:
        return 0, str(error)
    size = fields.get(b"size", b"0")
    if kind == b"g" and b"size" in fields:
        return 0, "it sets the size of all members"
    return (int(size), "") if re.fullmatch(rb"[0-9]{1,18}", size) else (0, "its size is not a number")


# ---- configs of Keras ----

# Largest config, in bytes.
MAX_CONFIG = 16 << 20
# The key of a class in every spelling of JSON.
_KEY = re.compile(
    b'"' + b"".join(b"(?:%c|\\\\u00%02x)" % (byte, byte) for byte in b"class_name") + rb'"\s*:', re.IGNORECASE
)
# What JSON never holds.
_NOT_TEXT = re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]")
# Beginnings of a content that are tried in vain: other text can precede a config.
_MOST_TRIES = 64
_OVERLAP = 128
_SIZES = (1 << 12, 1 << 18, MAX_CONFIG)  # of a config, tried in turn

_LAMBDA, _MARSHALLED = "a Keras Lambda layer, which holds code", "a marshalled function in a Keras config"
_KERAS = r"(?:tensorflow\.(?:python\.)?|tf_)?keras(?:\.src|\.api|\._tf_keras\.keras)*"
_BUILDING = re.compile(
    rf"keras\.[A-Z]\w*|{_KERAS}\.models(?:\.\w+)*\.(?:Sequential|Functional|Model)|{_KERAS}\.(?:layers|initializers|"
    r"regularizers|constraints|activations|losses|metrics|optimizers|dtype_policies|quantizers|ops|random|engine|"
    r"mixed_precision)(?:\.\w+)+"
)
_LOADING = frozenset(("TFSMLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper", "deserialize"))
# TensorFlow functions called by Keras 2 layers.
_COMPUTING = re.compile(
    r"(?:(?:math|nn|linalg|signal|image|random|strings|keras|activations|__operators__)\.)*"
    r"(?!py_function|numpy_function|load_|print)\w+"
)


def configs(content: Readable) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield offset, code and imports of each config; ValueError if a class stands outside of JSON or repeats a key."""
    begin = tries = 0
    for key in _matches(content, _KEY):
        if key < begin:  # within the config before
            continue
        first = _first_of_text(content, begin, key)
        for beginning in re.finditer(rb"[{\[]", content.read_at(first, key - first)):
            end, code, names = _parse(content, first + beginning.start(), key)
            if end > key:
                break
            tries += 1
            if tries > _MOST_TRIES:
                raise ValueError(key)
        else:
            raise ValueError(key)
        yield key, code, names
        begin = end


def _matches(content: Readable, pattern: re.Pattern[bytes]) -> Iterator[int]:
    """Yield the offset of each match of a pattern for short texts, and read every byte once."""
    for at in range(0, content.size, _CHUNK):
        for match in pattern.finditer(content.read_at(at, _CHUNK + _OVERLAP)):
            if match.start() < _CHUNK:
                yield at + match.start()


def _first_of_text(content: Readable, begin: int, key: int) -> int:
    """Return the first byte of the text around a key."""
    first, size = key, _SIZES[0]
    while first > begin:
        size = min(2 * size, first - begin)
        controls = [match.end() for match in _NOT_TEXT.finditer(content.read_at(first - size, size))]
        if controls:
            return first - size + controls[-1]
        first -= size
        if key - first > MAX_CONFIG:
            raise ValueError(key)
    return first


def _parse(content: Readable, begin: int, key: int) -> tuple[int, list[str], list[str]]:
    """Return the end of the JSON value at an offset, 0 if it is none, and the code and the imports in it."""
    code: list[str] = []
    names: list[str] = []

    def judged(pairs: list[tuple[str, Any]]) -> dict[str, str]:
        """Judge an object, and return the texts its owner needs."""
        fields, keys = dict(pairs), [key for key, _ in pairs if key in ("class_name", "config", "module")]
        if len(keys) > len(set(keys)):
            raise ValueError("readers would see two classes")
        name = fields.get("class_name")
        if name in ("Lambda", "__lambda__"):
            code.append(_LAMBDA if name == "Lambda" else _MARSHALLED)
        elif isinstance(name, str):
            names.extend(_imports(name, fields.get("module"), fields.get("config")))
        return {key: fields[key] for key in ("function", "vocabulary") if isinstance(fields.get(key), str)}

    decoder = json.JSONDecoder(object_pairs_hook=judged)
    for size in _SIZES:
        if size <= key - begin:
            continue
        data = content.read_at(begin, size)
        end = _NOT_TEXT.search(data)
        code.clear()  # of a shorter text, which was cut off
        names.clear()
        try:  # Latin-1, so that characters are bytes
            _, last = decoder.raw_decode(data[: end.start() if end else None].decode("latin-1"))
        except (ValueError, RecursionError):
            if end is not None or len(data) < size:
                break
            continue
        return begin + last, code, names
    return 0, code, names


def _imports(name: str, module: Any, config: Any) -> Iterator[str]:
    """Yield the imported names of an object that are not known to be harmless."""
    if isinstance(config, dict):
        if "vocabulary" in config:
            yield f"keras.layers.{name} of a file"
        if name.endswith("OpLambda") and not _COMPUTING.fullmatch(config.get("function", "x")):
            yield f"tensorflow.{config['function']}"
    if name == "function" and isinstance(config, str):
        name = config
    if not isinstance(module, str):
        if name in _LOADING:
            yield f"keras.layers.{name}"
    elif module == "builtins":
        if hasattr(builtins, name):
            yield f"builtins.{name}"
    elif name in _LOADING or not _BUILDING.fullmatch(f"{module}.{name}"):
        yield f"{module}.{name}"
