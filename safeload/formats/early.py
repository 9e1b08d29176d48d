"""Open files of a remote folder while other files are still awaited, so that fewer answers follow each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..stores.files import Files
from ..stores.json_file import read_version
from ..stores.thread_group import HEADS
from .numbered import sets_of
from .registry import Opened, OpenRequest, open_file
from .safetensors.header import EARLY_WINDOW

_First = TypeVar("_First")
_Second = TypeVar("_Second")


def together(
    files: Files, first: Callable[[], _First], second: Callable[[], _Second]
) -> tuple[_First, Callable[[], _Second]]:
    """Return the result of ``first``, and a function that returns the result of ``second`` or raises its error."""
    if not files.remote:  # nothing to gain from calling both at once
        return first(), second
    tasks: list[Callable[[], Any]] = [first, lambda: attempt(second)]
    result, outcome = files.each(lambda task: task(), tasks)
    return result, outcome


def attempt(function: Callable[[], _Second]) -> Callable[[], _Second]:
    """Call a function, and return a function that returns its result, or raises its error."""
    try:
        result = function()
    except Exception as error:
        failure = [error]

        def fail() -> _Second:
            raise failure.pop()  # the traceback refers to this frame

        return fail
    return lambda: result


class Listed(NamedTuple):
    """An index, and files that were opened while it was read; see `read_with_shards`."""

    content: dict[str, Any]  # of the index
    version: tuple[Any, ...]  # likewise
    shards: dict[str, Callable[[], Opened]]  # by name: returns the open shard, or raises its error
    config: Callable[[], dict[str, Any] | None] | None  # returns ``config.json`` or raises its error, if it was read

    def close(self) -> None:
        """Close the shards that were not taken."""
        _close(self.shards)


def read_with_shards(
    path: str, beside: Sequence[str], request: OpenRequest, read_config: Callable[[], dict[str, Any] | None]
) -> Listed:
    """Read an ``index.json``, and meanwhile open the shards that the names ``beside`` it imply."""
    files = request.files
    folder, base = files.split(path)
    names = implied_shards(base, beside) if files.remote else []
    if not names:
        return Listed(*read_version(path, "index.json", files), {}, None)
    early = request._replace(window=EARLY_WINDOW)
    shards: dict[str, Callable[[], Opened]] = {}

    def open_shard(name: str) -> None:
        shards[name] = attempt(lambda: open_file(files.join(folder, name), early))

    # The index decides: shards that it does not list are closed, and their errors are ignored.
    tasks: list[Callable[[], Any]] = [
        partial(read_version, path, "index.json", files),
        lambda: attempt(read_config),
        *(partial(open_shard, name) for name in names),
    ]
    try:
        (content, version), config, *_ = files.each(lambda task: task(), tasks)
    except BaseException:
        _close(shards)
        raise
    return Listed(content, version, shards, config)


def implied_shards(base: str, beside: Sequence[str]) -> list[str]:
    """Return the shards that an index of this name should list: a complete set, small enough to be opened at once."""
    for numbered in sets_of(beside):
        if base == f"{numbered.stem}{numbered.suffix}.index.json":
            return numbered.in_order if numbered.complete and len(numbered.files) <= HEADS - 2 else []
    return []


def _close(shards: dict[str, Callable[[], Opened]]) -> None:
    for opened in shards.values():
        try:
            files = opened().files
        except Exception:  # it could not be opened
            continue
        for file in files:
            file.close()
