"""Check the arguments of `check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...base.paths import PathLike
from ...base.selecting import Patterns, Selection
from ...base.text import show
from ...engine.run.progress import Progress
from ...engine.run.threads import check_threads
from ...errors import exported
from ...models.family import load as load_schema
from ...models.schema import Schema
from ..sources.executors import Executor, check_executor

# Default range of weights, and default absolute value of norm weights.
_LOW, _HIGH, _NORM = -128.0, 128.0, 4096.0


@exported()
class Limits(NamedTuple):
    """Limits for values.

    Attributes:
        low: smaller values are a warning.
        high: larger values are a warning.
        parameters: expected number of elements in all tensors; None accepts any.
        scale: expected scale of int8 tensors: a number, or numbers by name; None accepts any.
        absmax: largest absolute value before quantization to int8, so that scale is absmax / 127: a number, or numbers
            by name; None accepts any.
        norm: largest absolute value of norm weights. None means ``low`` and ``high`` if you set these, else 4096,
            because norm weights reach hundreds in good models (Gemma).

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> report = safeload.check(np.float32([0.5, 3]), limits=safeload.Limits(low=-1, high=1))
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
        """Return the range for norm weights."""
        if self.norm is not None:
            return -self.norm, self.norm
        default = (self.low, self.high) == (_LOW, _HIGH)
        return (-_NORM, _NORM) if default else (self.low, self.high)

    @classmethod
    def of(cls, value: Any) -> Limits:
        """Return limits from None, (low, high), a dict of fields, or limits."""
        if value is None:
            return cls()
        if isinstance(value, Limits):
            return value
        if isinstance(value, Mapping):
            unknown = sorted(set(value) - set(cls._fields))
            if unknown:
                raise ValueError(f"limits: unknown key {show(unknown[0])}, expected {', '.join(cls._fields)}")
            limits = cls(**value)
        elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
            limits = cls(*value)
        else:
            raise TypeError(f"limits must be (low, high) or a dict of {', '.join(cls._fields)}, got {show(value)}")
        if not limits.low <= limits.high:
            raise ValueError(f"limits: low must be <= high, got {limits.low} and {limits.high}")
        if limits.norm is not None and not limits.norm >= 0:
            raise ValueError(f"limits: norm must be >= 0, got {limits.norm}")
        return limits


class CheckSettings(NamedTuple):
    """The checked arguments of `check`."""

    config: Mapping[str, Any] | None  # parsed; None uses the config of the folder
    schema: Schema | None
    choose: bool  # True to choose a schema by the config
    limits: Limits
    values: bool  # True to read tensors
    selection: Selection  # the tensors to report about
    executor: Executor | None
    threads: int | None
    progress: Progress
    histogram: bool  # True to include histograms in statistics


def settings(
    config: PathLike | Mapping[str, Any] | None = None,
    schema: str | None = "auto",
    limits: Any = None,
    *,
    values: bool = True,
    only: Patterns = None,
    drop: Patterns = None,
    executor: Executor | None = None,
    threads: int | None = None,
    progress: Progress = None,
    histogram: bool = False,
) -> CheckSettings:
    """Check and convert the arguments of `check`."""
    bounds = Limits.of(limits)
    expected = load_schema(schema) if schema is not None and schema != "auto" else None
    check_threads(threads)
    check_executor(executor)
    return CheckSettings(
        config=_read_config(config),
        schema=expected,
        choose=schema == "auto",
        limits=bounds,
        values=values,
        selection=Selection(only, drop),
        executor=executor,
        threads=threads,
        progress=progress,
        histogram=histogram,
    )


def _read_config(config: PathLike | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if config is None or isinstance(config, Mapping):
        return config
    from ...stores.json_file import read_json

    parsed: Mapping[str, Any] = read_json(config, "config.json")
    return parsed
