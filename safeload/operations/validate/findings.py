"""Findings, limits and the validation report."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from ...base.layout import NARROW, quantity, shorten, wrap
from ...base.names import pattern_of
from ...base.text import clip, plural, printable, show, size
from ..measure.stats import TensorStats

Severity: TypeAlias = Literal["error", "warning", "note"]
ERROR: Severity = "error"
WARNING: Severity = "warning"
NOTE: Severity = "note"

# Beginnings of the codes of findings about one tensor.
_OF_ONE = ("value.", "tensor.", "quantization.scale", "quantization.zero", "schema.shape")

# From this many on, findings that say the same of different tensors are shown as one.
_GATHERED_FROM = 4

# Most names, and most characters of each, that stand after such a finding on a terminal.
_NAMED, _NAME_LENGTH = 8, 100

# What differs between two messages of one kind of finding: numbers, quoted names, lists, "is" and "are".
_DETAILS = re.compile(
    r"""'(?:[^'\\]|\\.)*'  |  "(?:[^"\\]|\\.)*"  |  \[ [^]]* ]  |  \b(?:is|are)\b
    |  [-+]? (?: [0-9]+ (?:,[0-9]{3})* (?:\.[0-9]+)? (?:e[-+]?[0-9]+)?  |  \b(?:inf|nan)\b )""",
    re.ASCII | re.VERBOSE,
)

# Default limits for values of weights and of norms; values beyond them are a warning.
_LOW, _HIGH, _NORM = -128.0, 128.0, 4096.0


class Finding(NamedTuple):
    """One fault, suspicion, or note of what was not checked.

    Attributes:
        severity: "error", "warning" or "note".
        code: kind of the finding, for programs: "value.nan". Stable between versions.
        tensor: name of the tensor; for a whole layer the common prefix of its names; None for the file itself.
        message: description, with numbers.

    Example:
        >>> import safeload
        >>> finding = safeload.validate("inf.safetensors").errors[0]
        >>> finding.severity, finding.code, finding.tensor
        ('error', 'value.inf', 'scores')
    """

    severity: Severity
    code: str
    tensor: str | None
    message: str

    def __str__(self) -> str:
        subject = "" if self.tensor is None else f"{self.tensor}: "
        return f"{self.severity}: {subject}{self.message} ({self.code})"


def error(code: str, tensor: str | None, message: str) -> Finding:
    """A finding that makes the file unsound."""
    return Finding(ERROR, code, tensor, message)


def warning(code: str, tensor: str | None, message: str) -> Finding:
    """A finding that may be intended."""
    return Finding(WARNING, code, tensor, message)


def note(code: str, tensor: str | None, message: str) -> Finding:
    """A finding that says what was not checked, and why."""
    return Finding(NOTE, code, tensor, message)


class Limits(NamedTuple):
    """Limits for values.

    Attributes:
        low: a smaller value is a warning.
        high: a larger value is a warning.
        parameters: total number of elements of all tensors; None for any.
        scale: scale of int8 tensors: one number, or one for each name; None for any.
        absmax: largest absolute value that int8 tensors were quantized from, so that their scale is absmax / 127: one
            number, or one for each name; None for any.
        norm: largest absolute value of the weights of a norm; None for ``low`` and ``high`` if these are given, else
            4096: norm weights scale normalized values, and reach some hundreds in good models (Gemma).

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> report = safeload.validate(np.float32([0.5, 3]), limits=safeload.Limits(low=-1, high=1))
        >>> [warning.code for warning in report.warnings]
        ['value.range']
    """

    low: float = _LOW
    high: float = _HIGH
    parameters: int | None = None
    scale: float | Mapping[str, float] | None = None
    absmax: float | Mapping[str, float] | None = None
    norm: float | None = None

    def of_norms(self) -> tuple[float, float]:
        """The range for the weights of a norm."""
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
                raise ValueError(f"limits: unknown {show(unknown[0])}, expected one of {', '.join(cls._fields)}")
            limits = cls(**given)
        elif isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2:
            limits = cls(*given)
        else:
            raise TypeError(f"limits must be (low, high) or a dict of {', '.join(cls._fields)}, not {show(given)}")
        if not limits.low <= limits.high:
            raise ValueError(f"limits: low is {limits.low} and high is {limits.high}")
        if limits.norm is not None and not limits.norm >= 0:
            raise ValueError(f"limits: norm is {limits.norm}, expected a number of at least 0")
        return limits


class ValidationReport:
    """The result of `safeload.validate`. ``str()`` is a table; the report is false if there are errors.

    Attributes:
        ok: whether there are no errors.
        errors: findings that make the file unsound.
        warnings: findings that may be intended.
        notes: findings that say what was not checked, and why.
        stats: name to `TensorStats` of every tensor of real numbers.
        source: what was checked.
        format: format of the file; None for arrays.
        files: paths of the files.
        schema: name of the schema that names and shapes were compared with, None for none.
        tensors: number of tensors.
        parameters: number of elements of all tensors.
        nbytes: bytes of all tensors.
        values: whether tensors were read; False if only the structure was checked.
        compared: number of tensors whose names and shapes were compared with the schema.
        seconds: duration of the checks.

    Example:
        >>> import safeload
        >>> report = safeload.validate("tiny-llama")
        >>> report.ok, report.schema, report.tensors, len(report.errors)
        (True, 'llama', 30, 0)
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

    def leave_out(self, names: Collection[str]) -> None:
        """Leaves out what was found about single tensors; a finding about several names one as an example."""
        for listed in (self.errors, self.warnings, self.notes):
            listed[:] = [found for found in listed if not found.code.startswith(_OF_ONE) or found.tensor not in names]

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return not self.errors

    def __bool__(self) -> bool:
        return self.ok

    @property
    def verdict(self) -> str:
        """One line: "sound" or not, and the number of errors, warnings and notes."""
        kinds = ((self.errors, ERROR), (self.warnings, WARNING), (self.notes, NOTE))
        counts = [plural(len(found), noun) for found, noun in kinds if found]
        sound = "sound as far as it was checked" if self.notes else "sound"
        if not self.values:
            sound = "sound as far as its structure goes, values were not read"
        return (sound if self.ok else "NOT SOUND") + (f": {', '.join(counts)}" if counts else "")

    @property
    def checked(self) -> str:
        """What was checked: "111 names and shapes against schema llama, 42.1 M values"."""
        names = plural(self.tensors, "name")
        if self.schema is not None and self.compared:
            shapes = "name and shape" if self.compared == 1 else "names and shapes"
            names = f"{self.compared:,} {shapes} against schema {self.schema}"
        count = sum(stats.count for stats in self.stats.values())
        return f"{names}, {quantity(count, 'value') if self.values else 'no values'}"

    def lines(self, columns: int | None = 80) -> list[str]:
        """The report as text.

        Args:
            columns: width in characters; None where names must not be cut.

        Returns:
            Lines without line ends.
        """
        what = [] if self.format is None else [self.format]
        if self.tensors:
            what += [plural(self.tensors, "tensor"), plural(self.parameters, "parameter"), size(self.nbytes)]
        if self.schema is not None:
            what.append(f"schema {self.schema}")
        head = printable(self.source) + (f": {', '.join(what)}" if what else "")
        lines = [*wrap(head, columns, hanging="  "), self.verdict]
        groups = [group for found in (self.errors, self.warnings, self.notes) for group in gather(found)]
        if groups:
            lines.append("")
        others = 11 + max((len(group.first.code) for group in groups), default=0)
        names = [printable(group.first.tensor or "file") for group in groups]
        apart = columns is not None and columns - others < min(NARROW, max(map(len, names), default=0))
        names = shorten(names, None if columns is None else columns - (9 if apart else others))
        for name, group in zip(names, groups, strict=True):
            finding = group.first
            lines.append(f"{finding.severity:7}  {name}" + ("" if apart else f"  {finding.code}"))
            if apart:
                lines.append(f"{'':9}{finding.code}")
            text = printable(finding.message) + (f"; {group.others}" if group.more else "")
            lines += wrap(text, columns, " " * 9)
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"<ValidationReport {self.source!r}: {self.verdict}>"

    def to_json(self) -> dict[str, Any]:
        """The whole report, for ``json.dump``; values that are not finite are null."""
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


class FindingGroup(NamedTuple):
    """Findings that say the same of different tensors: of the layers, and of several kinds of tensors.

    Attributes:
        first: the one to show.
        more: the others.
    """

    first: Finding
    more: Sequence[Finding] = ()

    @property
    def others(self) -> str:
        """One line about the others: "and 6 more like it", with names unless only the layer differs."""
        text = f"and {len(self.more):,} more like it"
        names: dict[str, list[str]] = {}
        for finding in self.more:
            name = finding.tensor or ""
            names.setdefault(pattern_of(name), []).append(name)
        if set(names) <= {pattern_of(self.first.tensor or "")}:
            return text
        shown = [pattern if len(same) > 1 else same[0] for pattern, same in names.items()]
        rest = len(shown) - _NAMED
        listed = ", ".join(clip(printable(name), _NAME_LENGTH) for name in shown[:_NAMED])
        return f"{text}: {listed}" + (f" and {rest:,} other names" if rest > 0 else "")


def gather(findings: Sequence[Finding]) -> list[FindingGroup]:
    """The findings to show, in order; four and more that say the same of different tensors are one group."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        said = "" if finding.tensor is None else _DETAILS.sub("#", finding.message)
        alike.setdefault((finding.code, said), []).append(finding)
    groups: list[FindingGroup] = []
    for same in alike.values():
        if len(same) < _GATHERED_FROM:
            groups += map(FindingGroup, same)
        else:
            groups.append(FindingGroup(same[0], same[1:]))
    return groups


def stats_json(stats: TensorStats) -> dict[str, Any]:
    """Statistics for ``json.dump``: null for values that are not finite, lists for arrays and indices."""

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
