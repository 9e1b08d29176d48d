"""Progress bars on stderr, for ``progress=True`` and the command line: tqdm's if it is installed, else our own.

On a terminal and in a notebook the bar is animated. Anywhere else (a file, a pipe, a log) a line is printed every ten
seconds and at the end. Nothing is printed if there is no stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from threading import RLock
from typing import Any, TypeAlias

from .text import is_terminal, size

Report = Callable[[int, int], object]
# Type of the argument ``progress``: True for a bar, or a callable that takes (bytes_done, bytes_total).
Progress = bool | Report | None
# For work in several steps: returns the bar of a step, by its label; the bar is None to show nothing.
Bars: TypeAlias = Callable[[str], AbstractContextManager[Report | None]]

# Seconds between two updates of the plain bar, and between two lines.
_INTERVAL, _LINE_INTERVAL = 0.1, 10.0


def _in_notebook() -> bool:
    """Return True if output goes to a notebook, which can animate bars although it is not a terminal."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    return "IPKernelApp" in getattr(shell, "config", ())


@contextmanager
def bar(label: str, *, leave: bool = False) -> Iterator[Report]:
    """Show a progress bar. Yields a function that takes the bytes done and the total, which may change."""
    notebook = _in_notebook()
    animated = notebook or is_terminal(sys.stderr)
    tqdm: Any = None
    if animated:
        with suppress(ImportError):
            tqdm = import_module("tqdm.auto" if notebook else "tqdm").tqdm  # the second is faster to import
    if tqdm is None:
        with _text(label, animated, leave) as report:
            yield report
        return
    from .showing import width  # only here: most loads draw nothing

    drawn: Any = None

    def draw(done: int, total: int) -> None:
        nonlocal drawn
        if drawn is None or drawn.total != total:
            if drawn is not None:
                drawn.close()
            options = {} if notebook else {"ncols": width()}
            drawn = tqdm(desc=label, total=total, unit="B", unit_scale=True, unit_divisor=1024, leave=leave, **options)
        drawn.update(done - drawn.n)

    try:
        yield draw
    finally:
        if drawn is not None:
            drawn.close()


# A report to nobody, by a function that does nothing with its argument.
_SILENT: AbstractContextManager[Callable[[int], object]] = nullcontext(bool)


def reporter(progress: Progress, total: int) -> AbstractContextManager[Callable[[int], object]]:
    """Yield a function that takes the bytes done and reports them as ``progress`` specifies."""
    return _reporting(progress, total) if progress or callable(progress) else _SILENT


@contextmanager
def _reporting(progress: Progress, total: int) -> Iterator[Callable[[int], object]]:
    with bars(progress, leave=True)("safeload") as report:
        yield bool if report is None else lambda done: report(done, total)


class Meter:
    """Count bytes for a progress report. Any thread may use it."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._bar = ExitStack()
        self._report = self._bar.enter_context(reporter(progress, total))
        self._called = callable(progress)
        self._total, self._done = total, 0
        self._lock = RLock()  # a report may close the owner of this meter

    def add(self, nbytes: int) -> None:
        """Add to the number of bytes done."""
        with self._lock:
            self._done += nbytes
            self._report(self._done)
            if self._done >= self._total:
                self.close()

    def close(self) -> None:
        """End the bar, even if bytes are missing."""
        with self._lock:
            self._bar.close()
            if not self._called:
                self._report = bool


def bars(progress: Progress, *, leave: bool = False) -> Bars:
    """Return the bars of work in several steps, as ``progress`` specifies."""
    if callable(progress):
        return lambda label: nullcontext(progress)
    return partial(bar, leave=leave) if progress else lambda label: nullcontext()


def _write(text: str) -> None:
    """Write text to stderr. Errors are ignored: work must not fail because its bar cannot be shown."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


@contextmanager
def _text(label: str, animated: bool, leave: bool) -> Iterator[Report]:
    """Show a percentage that is overwritten, or print lines."""
    started = time.monotonic()
    shown = 0.0 if animated else started
    done = total = 0

    def draw(now_done: int, now_total: int) -> None:
        nonlocal shown, done, total
        done, total, now = now_done, now_total, time.monotonic()
        percent = 100 * done // max(1, total)
        if animated and (now - shown >= _INTERVAL or done >= total):
            shown = now
            _write(f"\r{label}: {percent:3}%")
        elif not animated and now - shown >= _LINE_INTERVAL and done < total:
            shown = now
            _write(f"{label}: {percent}% of {size(total)}\n")

    try:
        yield draw
    finally:
        if animated and shown:
            _write("\n" if leave else "\r" + " " * (len(label) + 6) + "\r")
    if not animated and done >= total > 0:  # unless the work failed
        _write(f"{label}: 100% of {size(total)} in {time.monotonic() - started:.1f} s\n")
