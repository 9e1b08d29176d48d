"""`scan`: list the code that files name, above all the globals of pickles, and judge it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from ...base.paths import os_error
from ...base.showing import Report, table
from ...base.text import plural, printable, show
from ...engine.run.weight_file import open_without_table
from ...errors import SafeloadError, exported, one_line, public
from ...formats.contents import PickleFinder
from ...formats.dcp import RECORDS
from ...formats.opening import Paths
from ...formats.torch.globals import ALLOWED
from ...formats.unpickle.trace import DANGEROUS, HARMLESS, UNKNOWN, VERDICTS, Verdict, judge, worst
from ...formats.verifying import walk
from ...stores.files import Files
from ...stores.places import places_of
from ...stores.remote import RemoteStore

# Rows of a file, and files below a table in a notebook.
MAX_FINDINGS, _ROWS = 10_000, 8
_READ = 1 << 16
_HEAD = ("global", "verdict", "in", "why")
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

    Example:
        >>> import safeload
        >>> safeload.scan("checkpoint.pt").findings[0].name
        'torch._utils._rebuild_tensor_v2'
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
        unread: list[Verdict] = [UNKNOWN] if self.unreadable else []
        return worst([*unread, *(finding.verdict for finding in self.findings)])

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
            lines = [*table(_HEAD, rows, right=frozenset(), columns=columns), ""]
        lines += [f"not judged: {printable(path)}: {printable(reason)}" for path, reason in self.unreadable]
        return [*lines, f"{self.verdict}: {plural(self.pickles, 'pickle')} in {plural(self.files, 'file')}"]


@public
def scan(paths: Paths, *, storage_options: Mapping[str, Any] | None = None) -> ScanReport:
    r"""List and judge every global that pickles in files name, and other code that loading would run.

    Pickles are found wherever they are: in torch checkpoints, NumPy object arrays, joblib files, inside zip and tar
    archives (``.nemo``, ``.keras``, torch.package), nested and compressed, one after another, or at an offset. A file
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

    def scan_inner(path: str, files: Files) -> None:  # an error does not stop the others
        try:
            _scan_file(report, path, files)
        except (OSError, SafeloadError) as error:
            failed(files.shown(path), error)

    for path in paths if isinstance(paths, (list, tuple)) else (paths,):
        (text,), files = places_of((path,), storage_options)
        if not files.remote and not os.path.lexists(text):
            raise os_error(errno.ENOENT, text)
        if not files.is_folder(text):
            _scan_file(report, text, files)
            continue
        for _, inner in walk(text, files, failed):
            scan_inner(inner, files)
    report.findings.sort(key=_worst_first)
    return report


def _worst_first(finding: ScanFinding) -> int:
    return -VERDICTS.index(finding.verdict)


class _RemoteContent:
    """A file in a store; large reads are not kept in its windows."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self.size = store.size

    def read_at(self, offset: int, size: int) -> bytes:
        size = max(0, min(size, self.size - offset))
        if size < _READ:
            return self._store.read_at(offset, size)
        memory = bytearray(size)
        self._store.read_into(offset, memory)
        return bytes(memory)


def _scan_file(report: ScanReport, path: str, files: Files) -> None:
    """Scan a file into a report."""
    try:
        file = open_without_table(path, files=files)
    except SafeloadError as error:  # not a regular file
        report.unreadable.append((files.shown(path), one_line(error)))
        return
    report.files += 1
    shown = files.shown(path)
    count = 0
    with closing(file):
        content = _RemoteContent(file.store) if isinstance(file.store, RemoteStore) else file
        for site in PickleFinder(content, files.split(path)[1]).find():
            place = (shown, site.place, site.offset)
            findings = []
            if site.traced is not None:
                for name in site.traced.names:
                    verdict, reason = judge(name, _ALLOWED, called=name in site.traced.called)
                    findings.append(ScanFinding(*place, show(name)[1:-1] if len(name) > 300 else name, verdict, reason))
                report.pickles += not site.code and (bool(findings) or not site.fault)
            elif site.code:
                findings.append(ScanFinding(*place, site.code, DANGEROUS, "runs when the model is loaded"))
            if count + len(findings) > MAX_FINDINGS:
                text = f"it names more than {MAX_FINDINGS:,} globals; the rest is not listed"
                report.unreadable.append((shown, text))
                findings = [finding for finding in findings if finding.verdict == DANGEROUS][:MAX_FINDINGS]
            count += len(findings)
            report.findings += findings
            if site.fault:
                where = f"{shown}:{site.place}" if site.place else shown
                at = f"the pickle at byte {site.offset:,} is malformed: " if site.traced is not None else ""
                report.unreadable.append((where, f"{at}{site.fault}"))
            if count > 2 * MAX_FINDINGS:
                return
