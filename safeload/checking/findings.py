"""Findings, and the report of a check."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

from ..core.names import pattern_of
from ..core.showing import NARROW, Report, quantity, shorten, wrap
from ..core.text import clip, plural, printable, size
from ..errors import FormatError, UnsupportedError, exported, one_line
from .stats import StatsTable

Severity: TypeAlias = Literal["error", "warning", "note"]
ERROR: Severity = "error"
WARNING: Severity = "warning"
NOTE: Severity = "note"

# The errors of an unreadable file, which end a check.
UNREADABLE = (FormatError, UnsupportedError, OSError)

# Codes of findings about a single tensor begin with these.
_TENSOR_CODES = ("value.", "tensor.", "quantization.scale", "quantization.zero", "schema.shape")

# Warnings that a strict check accepts: matrices of a single value occur in good models.
HARMLESS_WARNINGS = ("value.constant", "value.zero")

_GROUP_FROM = 4  # fewer findings with equal messages about different tensors are not grouped
_MOST_FILES = 100  # more findings about files are grouped, too
_LISTED, _NAME_LENGTH = 8, 100  # names in a group, and characters in each

# Parts of messages to ignore when findings are grouped: numbers, quoted names, lists, "is" and "are".
_DETAILS = re.compile(
    r"""'(?:[^'\\]|\\.)*'  |  "(?:[^"\\]|\\.)*"  |  \[ [^]]* ]  |  \b(?:is|are)\b
    |  [-+]? (?: [0-9]+ (?:,[0-9]{3})* (?:\.[0-9]+)? (?:e[-+]?[0-9]+)?  |  \b(?:inf|nan)\b )""",
    re.ASCII | re.VERBOSE,
)


# The text of each rule, by its usual severity. The code of a finding is its rule up to the colon.
_RULES: Mapping[Severity, Mapping[str, str]] = {
    ERROR: {
        "adapter.base": "{problem}",
        "array.shape": "has shape {shape}, expected [{sizes}]",
        "file.crc": "zip entry {entry} of {path}{more}: {fault}",
        "file.forbidden": "{problem}",
        "file.format": "{problem}",
        "file.hole": "{zeros}: blocks of the file are lost",
        "file.hole:tail": "{where}{zeros}; was the download finished?",
        "file.limit": "{problem}",
        "file.read": "{problem}",
        "file.unknown_type:empty": "{dtype} tensor {shape} has no bytes: the file is truncated, or an offset is wrong",
        "file.unknown_type:missing": "{dtype} {reason}",
        "file.unsupported": "{problem}",
        "folder.ambiguous": "{unread} holds another model than {used}, which is read; some libraries read the other "
        "one: remove one of them",
        "gguf.key": "key {key} is missing; llama.cpp refuses the file",
        "gguf.key:tokenizer": "key {key} is {value}, expected one of {expected}",
        "gguf.key_type": "key {key} is {type}, expected {expected}; llama.cpp refuses the file",
        "gguf.shape": "{fault}; ComfyUI refuses the file",
        "gguf.vector": "is a {kind} of {dtype}, expected float32; llama.cpp cannot compute with it",
        "index.shard": "{name} is missing{listed}",
        "index.shard:opening": "{problem}",
        "index.tensor": "{name} lacks {absent:,} of the {listed} there, the first is {first}",
        "layers.hole": "layer {layer} of {layers} is missing",
        "model.empty": "no tensors",
        "model.parameters": "{parameters:,} parameters, expected {expected:,}",
        "quantization.scale": "{bad:,} of {total:,} {fault}, the first is {first}",
        "quantization.scale:int8": "scale{where} is {scale:g}, expected a finite number >= 0",
        "quantization.scale:limit": "scale is {scale:.9g}, expected {expected:.9g}{origin}",
        "schema.config": "schema {schema}: {problem}",
        "schema.config:key": "{config} says {key} {value}; all {tensors:,} tensors say {expected}",
        "schema.config:unreadable": "{problem}",
        "schema.layer_extra": "layer {layer} ({tensors}) is beyond the {layers} layers of the config",
        "schema.layer_missing": "layer {layer} of {layers} is missing, with all {tensors} tensors",
        "schema.missing": "is missing{why}",
        "schema.missing:everywhere": "is missing in each of the {layers} layers{total}",
        "schema.names": "is not in schema {schema} ({first}); only {known} of {tensors} names are",
        "schema.names:wrapped": "{problem}",
        "schema.shape": "has shape {shape}, but [{formula}] is [{sizes}] by the {source}",
        "schema.unexpected": "{why}",
        "source.changed": "{cause}",
        "source.form": "{problem}",
        "source.lost": "is missing: {tensors} of the source",
        "source.lost:one": "is missing, but the source has it",
        "source.more": "is not in the source",
        "source.setting": "{setting} is {value}, but {expected} in the source",
        "source.shape": "has shape {shape}, but {expected} in the source",
        "value.inf": "{bad:,} of {count:,} values {are} infinite{at}",
        "value.nan": "{bad:,} of {count:,} values {are} NaN{at}",
        "value.outlier": "a value of magnitude {absmax}, but 99.9 % of the values are below {bound}; is a bit flipped?",
    },
    WARNING: {
        "dtype.config": "dtype in config.json is {configured}, but no tensor has it; {often} of {tensors} are {usual}",
        "dtype.mixed": "is {dtype}, but {usual} in {often} of {layers} layers",
        "file.hole:rows": "{zeros}, which are whole rows",
        "file.hole:unwritten": "{zeros}",
        "file.unknown_type": "{dtype} {reason}: its values are not checked",
        "gguf.names": "no names of {architecture}, such as {name}: ComfyUI may not recognize the model",
        "head.tied": "differs from {embedding}, first at {index}, but the config ties them",
        "index.total_size": "total_size of {index} is {total_size}, but its tensors have {nbytes} bytes",
        "index.unlisted": "is in {shard} but not in {index}, so it is never read",
        "layers.far": "layer {layer} is far beyond the other {others}",
        "layers.missing": "is missing; {count} of the other {others} layers have it",
        "quantization.zero": "{zeros} 0, stored as -1: AutoGPTQ then corrupts the other zero points of the word",
        "schema.prefix": "names begin with {prefix}, but names of schema {schema} do not",
        "schema.prefix:wrapped": "names have wrappers ({wrappers}), which no schema has",
        "schema.unexpected:gptq": "{why}; AutoGPTQ stores zeros there",
        "tensor.empty": "has shape {shape}, so it has no elements",
        "tensor.scalar": "is a single {dtype} without axes",
        "value.constant": "all {count:,} values of the matrix are {value}",
        "value.range": "values range from {min} to {max}, outside [{low:g}, {high:g}]",
        "value.zero": "all {count:,} values of the matrix are 0",
    },
    NOTE: {
        "gguf.unchecked": "{subject}: keys and tensors were not checked against llama.cpp",
        "gguf.unchecked:diffusion": "{architecture} is a diffusion model: shapes were not checked",
        "gguf.unchecked:layers": "key {key} has a value per layer: names and shapes were not checked",
        "gguf.unchecked:no key": "no key {key}: llama.cpp does not load this file, so its rules were not checked",
        "head.unchecked": "architecture {architecture}: {heads} not checked",
        "index.fetch": "{problem}; {advice}; names and shapes in missing and damaged shards were not checked",
        "quantization.unchecked": "{label}: {checks} of quantized weights were not checked ({tensors})",
        "quantization.zero:format": "zero points have another format than the configuration says; safeload "
        "recognized it",
        "schema.unchecked": "{why}: names and shapes were not checked",
        "schema.unchecked:inner": "only the part under {key} was checked (schema {schema}): names and shapes of "
        "{tensors} were not checked",
        "schema.unchecked:quantized": "{tensors} outside schema {schema}, next to quantized weights: "
        "{what} not checked",
        "source.calibrated": "{tensors} differ from the source more than rounding does, as after GPTQ, AWQ or with an "
        "importance matrix",
        "source.rescaled": "factors of {tensors} are undone by other tensors, as after AWQ or SmoothQuant",
        "source.unchecked": "settings and tokenizer were not compared: {problem}",
        "source.left_out": "{tensors} of the source are left out by the form: {reason}",
    },
}
_SEVERITIES = {rule: severity for severity, texts in _RULES.items() for rule in texts}


@exported()
class Finding(NamedTuple):
    """A fault, a suspicion, or a note about a skipped check.

    Attributes:
        severity: "error", "warning" or "note".
        code: kind of finding, for programs, such as "value.nan". Stable between versions.
        tensor: name of the tensor; for a layer, the common prefix of its names; None for the file itself.
        message: description, with numbers.

    Example:
        >>> import safeload
        >>> finding = safeload.check("inf.safetensors").errors[0]
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


def find(rule: str, tensor: str | None = None, *, severity: Severity | None = None, **facts: Any) -> Finding:
    """Return the finding of a rule about a tensor, or about the file; ``severity`` replaces the usual severity."""
    usual = _SEVERITIES[rule]
    return Finding(severity or usual, rule.partition(":")[0], tensor, _RULES[usual][rule].format_map(facts))


@exported()
class CheckReport(Report):
    """The result of `safeload.check`. ``str()`` is a table; the report is false if there are errors.

    It has a row for each finding, whose ``tensor`` is "" if it is about a file; ``stats`` has rows about all tensors.

    Attributes:
        ok: True if there are no errors.
        errors: faults; the weights cannot be used as they are.
        warnings: suspicions, which can turn out to be intended.
        notes: skipped checks, with the reasons.
        stats: `TensorStats` by name, for every tensor of real numbers.
        source: path, URL or title of the checkpoint.
        format: format of the file; None for arrays.
        files: paths of the files.
        schema: name of the schema for names and shapes; None without a schema.
        tensors: number of tensors.
        parameters: number of elements in all tensors.
        nbytes: bytes of all tensors.
        values: True if tensors were read, False if only the structure was checked.
        compared: number of tensors compared with the schema.
        seconds: duration of the checks.

    Example:
        >>> import safeload
        >>> report = safeload.check("tiny-llama")
        >>> report.ok, report.schema, report.tensors, len(report.errors)
        (True, 'llama', 30, 0)
    """

    _columns = Finding._fields
    _json = (
        *("ok", "source", "format", "files", "schema", "tensors", "parameters", "nbytes", "values"),
        *("compared", "checked", "seconds", "errors", "warnings", "notes", "stats"),
    )

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
        self.stats = StatsTable()

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings, each to the list of its severity."""
        lists = {ERROR: self.errors, WARNING: self.warnings, NOTE: self.notes}
        for finding in findings:
            lists[finding.severity].append(finding)

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Turn the error of an unreadable file into a finding."""
        try:
            yield
        except UNREADABLE as problem:
            self.add([find("file.read", problem=one_line(problem))])

    def leave_out(self, names: Collection[str]) -> None:
        """Remove findings about single tensors. Other findings can name a tensor as an example, and stay."""
        for findings in (self.errors, self.warnings, self.notes):
            findings[:] = [f for f in findings if not f.code.startswith(_TENSOR_CODES) or f.tensor not in names]

    @property
    def ok(self) -> bool:
        """True if there are no errors."""
        return not self.errors

    def __bool__(self) -> bool:
        return self.ok

    @property
    def verdict(self) -> str:
        """The numbers of errors and warnings: "no errors", "3 errors, 8 warnings"."""
        errors = plural(len(self.errors), ERROR) if self.errors else "no errors"
        return f"{errors}, {plural(len(self.warnings), WARNING)}" if self.warnings else errors

    @property
    def checked(self) -> str:
        """The extent of the checks: "111 names and shapes against schema llama, 42.1 M values"."""
        names = plural(self.tensors, "name")
        if self.schema is not None and self.compared:
            shapes = "name and shape" if self.compared == 1 else "names and shapes"
            names = f"{self.compared:,} {shapes} against schema {self.schema}"
        count = sum(stats.count for stats in self.stats.values())
        return f"{names}, {quantity(count, 'value') if self.values else 'no values'}"

    def lines(self, columns: int | None = 80) -> list[str]:
        counts = plural(self.tensors, "tensor"), plural(self.parameters, "parameter"), size(self.nbytes)
        schema = "" if self.schema is None else f"schema {self.schema}"
        details = ", ".join(filter(None, (self.format, *(counts if self.tensors else ()), schema)))
        head = printable(self.source) + (f": {details}" if details else "")
        lines = [*wrap(head, columns, hanging="  "), self.verdict]
        groups = gather(self)
        if groups:
            lines.append("")
        fixed = 11 + max((len(first.code) for first, *_ in groups), default=0)  # width of severity and code
        names = [printable(first.tensor or "file") for first, *_ in groups]
        apart = columns is not None and columns - fixed < min(NARROW, max(map(len, names), default=0))
        names = shorten(names, None if columns is None else columns - (9 if apart else fixed))
        for name, (finding, *more) in zip(names, groups, strict=True):
            lines.append(f"{finding.severity:7}  {name}" + ("" if apart else f"  {finding.code}"))
            if apart:
                lines.append(f"{'':9}{finding.code}")
            text = printable(finding.message) + (f"; {_summary(finding, more)}" if more else "")
            lines += wrap(text, columns, " " * 9)
        return lines

    def __repr__(self) -> str:
        return f"<CheckReport {self.source!r}: {self.verdict}>"

    def _values(self) -> Iterable[Finding]:
        return (f._replace(tensor=f.tensor or "") for f in (*self.errors, *self.warnings, *self.notes))

    def _about(self) -> Sequence[str]:
        return [f"{self.source}: {self.verdict}", *([f"checked: {self.checked}"] if self.tensors else [])]

    to_json = Report.to_dict


def _summary(first: Finding, more: Sequence[Finding]) -> str:
    """Return a line about the rest of a group: "and 6 more like it", with names unless only the layer differs."""
    names: dict[str, str] = {}  # the name of a tensor, or the pattern of several, by pattern
    for finding in more:
        pattern = pattern_of(finding.tensor or "")
        names[pattern] = pattern if pattern in names else finding.tensor or ""
    text = f"and {len(more):,} more like it"
    if names.keys() <= {pattern_of(first.tensor or "")}:
        return text
    listed = ", ".join(clip(printable(name), _NAME_LENGTH) for name in [*names.values()][:_LISTED])
    rest = len(names) - _LISTED
    return f"{text}: {listed}" + (f" and {rest:,} other names" if rest > 0 else "")


def gather(report: CheckReport) -> list[list[Finding]]:
    """Return all findings in order; four or more with equal messages about different tensors form a group."""
    groups: list[list[Finding]] = []
    for findings in (report.errors, report.warnings, report.notes):
        by_message: dict[tuple[str, str], list[Finding]] = {}
        counts = Counter(finding.code for finding in findings if finding.tensor is None)
        for finding in findings:
            if finding.tensor is not None:
                message = _DETAILS.sub("#", finding.message)
            else:  # every file is named, unless there are very many
                message = finding.message if counts[finding.code] <= _MOST_FILES else ""
            by_message.setdefault((finding.code, message), []).append(finding)
        for alike in by_message.values():
            groups += [alike] if len(alike) >= _GROUP_FROM else [[finding] for finding in alike]
    return groups
