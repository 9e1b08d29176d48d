"""The checks of `validate` that read tensors: CRC-32 of archives, scales, statistics, tied heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...models.schema import Schema
from ..measure.stats import TensorStats, measure
from ..sources.catalog import Catalog
from ..sources.description import TensorDescription
from . import files, values
from .findings import ERROR, Finding, ValidationReport
from .names import Quantized
from .settings import CheckSettings


class Model(NamedTuple):
    """Description of a model before its values are read.

    Attributes:
        known: its tensors.
        codes: tensors that hold codes, whose values are not checked.
        quantized: tensors that are parts of quantized weights.
        schema: the schema, None without one.
    """

    known: Mapping[str, TensorDescription]
    codes: frozenset[str]
    quantized: Quantized | None
    schema: Schema | None

    def role(self, name: str) -> str | None:
        """The role of a tensor; None without a schema, or if the schema lacks the tensor."""
        return None if self.schema is None else self.schema.role(name)


class Contents:
    """Reads tensors and archives, and finds what is wrong with them.

    All methods raise FormatError or OSError if a file cannot be read.

    Args:
        catalog: the tensors.
        wanted: the settings.

    Attributes:
        limits: those of the settings.
    """

    def __init__(self, catalog: Catalog, wanted: CheckSettings) -> None:
        self._catalog = catalog
        self._wanted = wanted
        self.limits = wanted.limits

    def crc(self) -> Iterator[Finding]:
        """Checks the bytes of each entry of a zip archive against its CRC-32."""
        entries = files.entries_of(self._catalog)
        for entry, fault in zip(entries, files.faults_of(entries, self._wanted.threads), strict=True):
            if fault is not None:
                yield files.crc_finding(entry, fault)

    def scales(self, name: str) -> list[Finding]:
        """Checks the scales of a quantized tensor."""
        return list(values.check_scales(self._catalog, name, self.limits, self._wanted.threads))

    def stats(self, names: Sequence[str]) -> dict[str, TensorStats]:
        """Statistics of those of the tensors that hold real numbers."""
        return measure(self._catalog, names, self._wanted.histogram, self._wanted.threads, self._wanted.progress)

    def tied(self, head: str, embedding: str) -> Finding | None:
        """Compares a head with the embedding that the config ties it to."""
        return values.check_tied(self._catalog, head, embedding)


def check_contents(
    report: ValidationReport,
    contents: Contents,
    model: Model,
    names: Sequence[str],
    pairs: Mapping[str, str],
    zero: set[str],
) -> None:
    """Checks everything that must be read, and adds the findings and the statistics to the report as they come.

    Args:
        report: gets them.
        contents: reads the tensors.
        model: description of the model.
        names: the tensors whose values are checked.
        pairs: tied heads, each with its embedding.
        zero: tensors already reported as zero.

    Raises:
        FormatError, OSError: a file cannot be read.
    """
    report.add(contents.crc())
    bad = set()
    for name in names:
        if model.known[name].quantized:
            found = contents.scales(name)
            report.add(found)
            if any(one.severity == ERROR for one in found):
                bad.add(name)
    report.stats = contents.stats(readable(names, model.known, bad))
    codes: frozenset[str] = frozenset() if model.quantized is None else model.quantized.names
    report.add(
        values.check_values(report.stats, model.known, contents.limits, bad, role=model.role, codes=codes, zero=zero)
    )
    tied = (contents.tied(*pair) for pair in pairs.items() if bad.isdisjoint(pair))
    report.add(finding for finding in tied if finding is not None)


def readable(names: Sequence[str], known: Mapping[str, TensorDescription], bad: set[str]) -> list[str]:
    """The tensors whose statistics are wanted: a second error about a packed one with bad scales would say the same."""
    return [name for name in names if not (name in bad and known[name].packed)]
