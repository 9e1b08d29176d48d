"""What becomes of each tensor when a checkpoint is converted, in memory and as the plain data of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from ..._version import __version__
from ...base import dtypes
from ...base.scheme import SCHEMES
from ...base.text import show
from ...errors import FormatError
from ...models.layout import StackedTensor
from ..sources.plan import Piece, bare_name
from ..sources.sources import FileVersion, PlannedPath


class Decision(NamedTuple):
    """What becomes of one tensor, or of the layers that are stacked into one.

    Attributes:
        sources: names in the source: one, or those of the layers.
        dtype: code of the dtype that it is converted to; None to leave it as it is stored.
        scheme: scheme that it is quantized to, else None.
        kept: why ``quantize`` leaves it unquantized; None without ``quantize``, and if it is quantized.
        stack: the entry of the layout that it is made by; None without a layout. Its ``dtype`` is never None.
    """

    sources: tuple[str, ...]
    dtype: str | None = None
    scheme: str | None = None
    kept: str | None = None
    stack: StackedTensor | None = None

    @property
    def how(self) -> tuple[str | None, str | None, str | None]:
        """Dtype, scheme, and why it stays unquantized."""
        return self.dtype, self.scheme, self.kept


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorRun:
    """Neighbouring tensors in a piece that are converted alike."""

    names: tuple[str, ...]  # in the result; the layers of `stack`
    dtype: str | None = None  # this and the next two: see `Decision`
    scheme: str | None = None
    kept: str | None = None
    stack: StackedTensor | None = None
    of: str | None = None  # name in the source, if it differs

    def __post_init__(self) -> None:
        if self.dtype is not None:
            row_of(self.dtype)
        if self.scheme is not None and self.scheme not in SCHEMES:
            raise ValueError(f"unknown scheme {show(self.scheme)}")
        if self.stack is not None and self.dtype is None:
            raise ValueError(f"stack {show(self.stack.name)} must have a dtype")


@dataclass(frozen=True, eq=False, kw_only=True)
class ConversionPiece(Piece):
    """A shard of a conversion."""

    file: str
    nbytes: int  # of all tensors
    tensors: tuple[TensorRun, ...]
    metadata: dict[str, str] | None = None
    rename: tuple[tuple[str, str], ...] = ()  # patterns and replacements
    adapters: tuple[Any, ...] = ()  # see `merged.PlannedAdapter`
    continued: bool = False  # the shard is complete, and its sources are gone
    id: str  # hash of options and sources
    plan: str  # id of the plan
    folder: str
    options: dict[str, Any] = field(default_factory=dict)  # for the record
    in_place: str | None = None  # id of a conversion that replaces its own source
    storage_options: dict[str, Any] | None = None  # of the folder

    def __post_init__(self) -> None:
        bare_name(self.file)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedConfig:
    """Where the ``config.json`` of the result comes from, and what changes in it."""

    content: dict[str, Any] | None = None
    source: FileVersion | None = None  # instead of its content
    dtype: str | None = None  # code of the new dtype
    restored: bool = False  # whether packed tensors are dequantized

    def __post_init__(self) -> None:
        if self.dtype is not None:
            row_of(self.dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedSummary:
    """What the summary of a quantization needs beside the pieces."""

    before: int  # bytes
    kept: dict[str, str]  # why tensors of no piece stay unquantized


@dataclass(frozen=True, eq=False, kw_only=True)
class ConversionPlan:
    """A conversion to a folder of shards; see `Plan`."""

    safeload_plan: int = 1
    operation: str
    version: str = __version__
    options: dict[str, Any]
    pieces: tuple[ConversionPiece, ...]
    id: str
    folder: str
    in_place: bool = False  # whether it replaces its own source
    call: str | None = None  # id of the call, if it replaces its own source
    outdated: tuple[str, ...] = ()  # files to remove
    tensors: int
    config: PlannedConfig | None = None
    extras: dict[str, str | PlannedPath]
    quantized: PlannedSummary | None = None
    storage_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in (*self.outdated, *self.extras):
            bare_name(name)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardResult:
    """What `run_piece` returns for a shard."""

    plan: str
    file: str
    nbytes: int
    size: int
    sha256: str
    identity: list[int] | None = None  # see `Folder.identity`
    written: bool
    seconds: float


def runs_of(decisions: Mapping[str, Decision]) -> tuple[TensorRun, ...]:
    """Return decisions as runs; neighbours with the same decision share one."""
    runs = []
    for _, items in groupby(decisions.items(), key=lambda item: (item[1].how, _alone(*item))):
        group = list(items)
        name, first = group[0]
        alone = first.stack is None and first.sources != (name,)
        names = first.sources if first.stack is not None else tuple(name for name, _ in group)
        dtype, scheme, kept = first.how
        of = first.sources[0] if alone else None
        runs.append(TensorRun(names=names, dtype=dtype, scheme=scheme, kept=kept, stack=first.stack, of=of))
    return tuple(runs)


def _alone(name: str, decision: Decision) -> str | None:
    """A tensor that makes a run of its own has a key of its own."""
    return None if decision.sources == (name,) and decision.stack is None else name


def decisions_of(runs: Iterable[TensorRun]) -> dict[str, Decision]:
    """The inverse of `runs_of`."""
    decisions: dict[str, Decision] = {}
    for run in runs:
        if run.stack is not None:
            decisions[run.stack.name] = Decision(run.names, run.dtype, run.scheme, run.kept, run.stack)
            continue
        for name in run.names:
            source = name if run.of is None else run.of
            decisions[name] = Decision((source,), run.dtype, run.scheme, run.kept)
    return decisions


def row_of(code: str) -> dtypes.Dtype:
    """The dtype that a plan names.

    Raises:
        FormatError: there is no such dtype.
    """
    if code not in dtypes.BY_CODE:
        raise FormatError(f"invalid plan: unknown dtype {show(code)}")
    return dtypes.BY_CODE[code]
