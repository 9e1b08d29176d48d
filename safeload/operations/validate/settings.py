"""The arguments of `validate`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...base.paths import PathLike
from ...base.selecting import Patterns, Selection
from ...engine.run.progress import Progress
from ...engine.run.threads import check_threads
from ...models.reading import load as load_schema
from ...models.schema import Schema
from ..sources.executors import Executor, check_executor
from .findings import Limits


class CheckSettings(NamedTuple):
    """The checked arguments of `validate`.

    Attributes:
        config: parsed config; None for that of a folder.
        schema: the given schema; None for none, or to choose one.
        choose: whether to choose a schema.
        limits: limits for values.
        values: whether to read tensors.
        selection: the tensors to report about.
        executor: see `validate`.
        threads: see `validate`.
        progress: see `validate`.
        histogram: whether the statistics include histograms.
    """

    config: Mapping[str, Any] | None
    schema: Schema | None
    choose: bool
    limits: Limits
    values: bool
    selection: Selection
    executor: Executor | None
    threads: int | None
    progress: Progress
    histogram: bool


def settings(
    config: PathLike | Mapping[str, Any] | None = None,
    schema: str | PathLike | Mapping[str, Any] | None = "auto",
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
    """Checks the arguments of `validate`.

    Raises:
        ValueError, TypeError, FormatError, OSError: see `validate`.
    """
    bounds = Limits.of(limits)
    asked = load_schema(schema) if schema is not None and schema != "auto" else None
    check_threads(threads)
    check_executor(executor)
    selection = Selection(only, drop)
    found = read_config(config)
    return CheckSettings(
        found, asked, schema == "auto", bounds, values, selection, executor, threads, progress, histogram
    )


def read_config(config: PathLike | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The parsed config, read from its file if given by path.

    Raises:
        FormatError: the file does not hold a JSON object.
        OSError: the file cannot be read.
    """
    if config is None or isinstance(config, Mapping):
        return config
    from ...stores.json_file import read_json

    found: Mapping[str, Any] = read_json(config, "config.json")
    return found
