"""What was found, and the report of it."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from ...base.text import clip, plural, printable, show, size
from ..stats import TensorStats

Severity: TypeAlias = Literal["error", "warning", "note"]
ERROR: Severity = "error"
WARNING: Severity = "warning"
NOTE: Severity = "note"

# Findings of the same kind about the same tensor of several layers are shown once from this many on.
_GATHERED_FROM = 4

# Values beyond these are worth a warning where the caller says nothing else: those of weights, and of norms.
_LOW, _HIGH, _NORM = -128.0, 128.0, 4096.0


class Finding(NamedTuple):
    """One thing that is wrong, or odd, or that was not checked.

    Attributes:
        severity: "error", "warning" or "note".
        code: what kind of thing, for programs: "value.nan". It stays the same between versions.
        tensor: name of the tensor; of a whole layer the text before its tensors' names; None for the file as such.
        message: the rest, in words and numbers.
    """

    severity: Severity
    code: str
    tensor: str | None
    message: str

    def __str__(self) -> str:
        subject = "" if self.tensor is None else f"{self.tensor}: "
        return f"{self.severity}: {subject}{self.message} ({self.code})"


def error(code: str, tensor: str | None, message: str) -> Finding:
    """A finding that makes the file a bad one."""
    return Finding(ERROR, code, tensor, message)


def warning(code: str, tensor: str | None, message: str) -> Finding:
    """A finding that may be meant so."""
    return Finding(WARNING, code, tensor, message)


def note(code: str, tensor: str | None, message: str) -> Finding:
    """A finding that says what was not checked, and why."""
    return Finding(NOTE, code, tensor, message)


class Limits(NamedTuple):
    """What values have to be.

    Attributes:
        low: below it a value is worth a warning.
        high: above it likewise.
        parameters: number of elements of all tensors together; None for any.
        scale: of int8 tensors: one number, or one for each name; None for any.
        absmax: of the values that int8 tensors were made from, which gives the scale absmax / 127; likewise.
        norm: largest absolute value of the weights of a norm; None for ``low`` and ``high`` where these are given, else
            for 4096: they scale what has been normalized, and reach some hundreds in good models (Gemma).
    """

    low: float = _LOW
    high: float = _HIGH
    parameters: int | None = None
    scale: float | Mapping[str, float] | None = None
    absmax: float | Mapping[str, float] | None = None
    norm: float | None = None

    def of_norms(self) -> tuple[float, float]:
        """What the weights of a norm are to stay within."""
        if self.norm is not None:
            return -self.norm, self.norm
        given = (self.low, self.high) != (_LOW, _HIGH)
        return (self.low, self.high) if given else (-_NORM, _NORM)

    @classmethod
    def of(cls, given: Any) -> Limits:
        """Limits from None, (low, high), a dict of the attributes, or limits.

        Raises:
            ValueError, TypeError: anything else.
        """
        if given is None:
            return cls()
        if isinstance(given, Limits):
            return given
        if isinstance(given, Mapping):
            unknown = sorted(set(given) - set(cls._fields))
            if unknown:
                raise ValueError(f"limits: unknown {show(unknown[0])}; known are {', '.join(cls._fields)}")
            limits = cls(**given)
        elif isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2:
            limits = cls(*given)
        else:
            raise TypeError(f"limits must be (low, high) or a dict of {', '.join(cls._fields)}, not {show(given)}")
        if not limits.low <= limits.high:
            raise ValueError(f"limits: low is {limits.low} and high is {limits.high}")
        if limits.norm is not None and not limits.norm >= 0:
            raise ValueError(f"limits: norm is {limits.norm}, a number from 0 is wanted")
        return limits


class ValidationReport:
    """What `safeload.validate` found. ``str()`` is a table; false when there are errors.

    Attributes:
        ok: whether there are no errors.
        errors: findings that make the file a bad one.
        warnings: findings that may be meant so.
        notes: findings that say what was not checked, and why.
        stats: name to `TensorStats` of every tensor of real numbers.
        source: what was looked at.
        format: of the file; None for arrays.
        files: paths.
        schema: name of the schema that names and shapes were compared with, None for none.
        tensors: how many.
        parameters: elements of all of them.
        nbytes: their bytes.
        values: whether tensors were read; False where only the structure was asked for.
        compared: tensors whose names and shapes were compared with the schema.
        seconds: how long it took.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.format: str | None = None
        self.files: list[str] = []
        self.schema: str | None = None
        self.tensors = 0
        self.parameters = 0
        self.nbytes = 0
        self.values = True
        self.compared = 0
        self.seconds = 0.0
        self.errors: list[Finding] = []
        self.warnings: list[Finding] = []
        self.notes: list[Finding] = []
        self.stats: dict[str, TensorStats] = {}

    def add(self, findings: Iterable[Finding]) -> None:
        """Adds findings, each to its list."""
        lists = {ERROR: self.errors, WARNING: self.warnings, NOTE: self.notes}
        for finding in findings:
            lists[finding.severity].append(finding)

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return not self.errors

    def __bool__(self) -> bool:
        return self.ok

    @property
    def verdict(self) -> str:
        """One line: "sound" or not, and how many errors, warnings and notes there are."""
        kinds = ((self.errors, ERROR), (self.warnings, WARNING), (self.notes, NOTE))
        counts = [plural(len(found), noun) for found, noun in kinds if found]
        sound = "sound as far as it was checked" if self.notes else "sound"
        if not self.values:
            sound = "sound as far as its structure goes, values were not read"
        return (sound if self.ok else "NOT SOUND") + (f": {', '.join(counts)}" if counts else "")

    @property
    def checked(self) -> str:
        """What was looked at: "111 names and shapes against schema llama, 42.1 M values"."""
        names = plural(self.tensors, "name")
        if self.schema is not None:
            shapes = "name and shape" if self.compared == 1 else "names and shapes"
            names = f"{self.compared:,} {shapes} against schema {self.schema}"
        count = sum(stats.count for stats in self.stats.values())
        return f"{names}, {_values(count) if self.values else 'no values'}"

    def lines(self, columns: int = 80) -> list[str]:
        """The report as text of so many columns."""
        what = [] if self.format is None else [self.format]
        if self.tensors:
            what += [plural(self.tensors, "tensor"), plural(self.parameters, "parameter"), size(self.nbytes)]
        if self.schema is not None:
            what.append(f"schema {self.schema}")
        head = printable(self.source) + (f": {', '.join(what)}" if what else "")
        lines = [*textwrap.wrap(head, columns, subsequent_indent="  "), self.verdict]
        rows = [
            (finding, more) for found in (self.errors, self.warnings, self.notes) for finding, more in gather(found)
        ]
        if rows:
            lines.append("")
        for finding, more in rows:
            lines.append(clip(f"{finding.severity:7}  {printable(finding.tensor or 'file')}  {finding.code}", columns))
            text = printable(finding.message) + (f"; and {more:,} more like it" if more else "")
            indent = " " * 9
            lines += textwrap.wrap(text, columns, initial_indent=indent, subsequent_indent=indent)
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"<ValidationReport {self.source!r}: {self.verdict}>"

    def to_json(self) -> dict[str, Any]:
        """Everything, for ``json.dump``; what is not finite is null."""
        return {
            "ok": self.ok,
            **{name: getattr(self, name) for name in ("source", "format", "files", "schema")},
            **{name: getattr(self, name) for name in ("tensors", "parameters", "nbytes", "values")},
            **{name: getattr(self, name) for name in ("compared", "checked", "seconds")},
            "errors": [finding._asdict() for finding in self.errors],
            "warnings": [finding._asdict() for finding in self.warnings],
            "notes": [finding._asdict() for finding in self.notes],
            "stats": {name: stats_json(stats) for name, stats in self.stats.items()},
        }


def _values(count: int) -> str:
    """A number of values for people: "8,192 values", "42.1 M values"."""
    millions = count / 1e6
    if millions < 1:
        return plural(count, "value")
    return f"{millions:.3g} M values" if millions < 999.5 else f"{millions:,.0f} M values"


def gather(findings: Sequence[Finding]) -> list[tuple[Finding, int]]:
    """Findings to be shown, and how many like each of them are not: those about the same tensor of other layers."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, pattern_of(finding.tensor or "")), []).append(finding)
    shown: list[tuple[Finding, int]] = []
    for group in groups.values():
        if len(group) < _GATHERED_FROM:
            shown += [(finding, 0) for finding in group]
        else:
            shown.append((group[0], len(group) - 1))
    return shown


_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])", re.ASCII)


def pattern_of(name: str) -> str:
    """A tensor's name with ``{}`` for the numbers in it: what it shares with other layers."""
    return _NUMBER.sub("{}", name)


def stats_json(stats: TensorStats) -> dict[str, Any]:
    """Statistics for ``json.dump``: null for what is not finite, lists for arrays and indices."""

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        return [plain(item) for item in (value.tolist() if hasattr(value, "tolist") else value)]

    return {name: plain(getattr(stats, name)) for name in STATS_FIELDS}


STATS_FIELDS = (
    *("count", "min", "max", "absmax", "mean", "std", "nan", "inf", "zeros"),
    *("first_nan", "first_inf", "histogram"),
)
