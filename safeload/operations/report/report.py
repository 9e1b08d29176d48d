"""Write an HTML page about a checkpoint, with charts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from ...base.paths import PathLike, native_path
from ...base.scheme import parse
from ...engine.run.progress import Bars, Progress, bars
from ...errors import SafeloadError, public
from ...formats.registry import UnknownGlobals
from ...loading import entry as loading
from ...stores.places import Located, is_file_object
from ...stores.url import is_url
from ..folders.output import Output
from ..quantize.quantize import SchemeName
from ..validate.findings import CheckReport
from ..validate.run import validate_path
from ..validate.settings import settings
from .content import digest_section, findings_section, sections
from .page import facts, head, is_page, page
from .source import File, about, files_of, now


class PageRequest(NamedTuple):
    """Options of a page besides the findings and the contents."""

    scheme: SchemeName | None = None  # show the error of quantizing to this scheme
    digest: bool = True  # show the SHA-256 of local files
    threads: int | None = None
    bar: Bars = bars(None)


@public
def report(
    path: PathLike | Located,
    dst: PathLike,
    *,
    quantize: SchemeName | None = None,
    digest: bool = True,
    root: str | None = None,
    unknown_globals: UnknownGlobals = "refuse",
    stored: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress = None,
) -> CheckReport:
    """Write an HTML page with charts about a checkpoint, as ``safeload report`` does.

    The page has the findings of `check`, the contents, a size breakdown, the size when loaded or quantized, values by
    layer, the magnitude distribution, and the SHA-256 of the files. It is a single file that works offline. A bad file
    gets a page, too.

    Args:
        path: a weight file, a folder, an index.json, a URL, or a file object opened in binary mode.
        dst: path of the page.
        quantize: also show the error of each tensor when it is quantized to this scheme, such as "q4_0".
        digest: False omits the SHA-256 digests, which need a second read, and should be passed for checkpoints larger
            than memory. Digests are always omitted for URLs.
        root: nested container to report about, see `open`.
        unknown_globals: see `open`.
        stored: True shows codes and scales of a quantized checkpoint as the files store them.
        storage_options: options of the filesystem behind a URL, see `open`.
        overwrite: True replaces ``dst`` even if it is not a page that safeload wrote. Source files are never replaced.
        threads: number of threads; None chooses it.
        progress: True for a bar of each step, or a callable that gets (bytes_done, bytes_total) of each step.

    Returns:
        The report of the check, which is false if there are errors.

    Raises:
        FileExistsError: ``dst`` exists and is not a page that safeload wrote.
        ValueError: ``dst`` is a source file or a URL, ``path`` is a pipe, or ``quantize`` is not a scheme.
        OSError: a file cannot be opened or written.

    Example:
        >>> import safeload
        >>> safeload.report("tiny-llama", "tiny-llama.html").ok
        True
    """
    scheme = None if quantize is None else cast(SchemeName, parse(quantize))
    place, _ = native_path(dst)
    if is_file_object(path) and not getattr(path, "seekable", bool)():
        raise ValueError("report reads its source twice, and a pipe only once: save it to a file first")

    opening = {
        "root": root,
        "unknown_globals": unknown_globals,
        "stored": stored,
        "storage_options": storage_options,
    }
    sources = [os.fspath(path)] if isinstance(path, (str, os.PathLike)) else []
    output = Output("dst", place, "report", is_page, overwrite=overwrite, sources=sources)
    output.check()
    request = PageRequest(scheme, digest, threads, bars(progress))
    text, checked = page_of(path, opening, request)
    output.write(text, checked.files)
    return checked


def page_of(path: PathLike | Located, opening: Mapping[str, Any], request: PageRequest) -> tuple[str, CheckReport]:
    """Return the page about a checkpoint, and the report of its check."""
    date = now()
    with request.bar("report") as progress:
        checks = settings(threads=request.threads, progress=progress, histogram=True)
        report = validate_path(path, opening, checks)
    parts = [findings_section(report)]
    remote = is_url(report.source)
    local = isinstance(path, (str, os.PathLike)) and not remote
    files: list[File] = []
    if local:
        paths = report.files or [report.source]
        files = files_of(paths, digest=request.digest, threads=request.threads, bars=request.bar)
    try:
        checkpoint = loading.open(path, **opening) if report.files else None
    except (SafeloadError, OSError):
        if report.ok:
            raise
        checkpoint = None  # the findings say why
    if checkpoint is not None:
        with checkpoint as opened:
            parts += sections(opened, report, request.scheme, threads=request.threads, bars=request.bar)
            if not local:  # read only once
                files = [File(file.path, file.identity[0]) for file in opened.weight_files]
    parts.append(digest_section(files))
    mood = "bad" if report.errors else "odd" if report.warnings else "calm" if report.notes else "good"
    checked = f"checked: {report.checked}" if report.tensors else ""
    name = os.path.abspath(report.source) if local else report.source.rstrip("/")
    title = os.path.basename(name) or report.source
    top = head(title, report.verdict, mood, checked, facts(about(report.source, files, date), "meta"))
    return page(title, top, parts), report
