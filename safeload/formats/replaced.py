"""Notice that another program replaces a local folder while it is opened.

A writer replaces the index, or renames an old ``model.safetensors`` aside, before it changes ``config.json``, and puts
an index into the folder if there is none (`operations.folders.disk_sink`). So the files of a folder belong together
if the index, or without one each weight file, is still the same once all of them and the config are open.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ..errors import FormatError
from ..stores.files import LOCAL, Files
from ..stores.local import identity_of

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

# A file that was read: its path and identity; None if only its presence is known, () if it was not there.
Seen = Iterable[tuple[str, "tuple[Any, ...] | None"]]

_MOST_TRIES = 20


class ReplacedError(FormatError):
    """Another program replaced a folder while it was opened."""


def retried(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Repeat a function while a folder is replaced."""

    @wraps(function)
    def repeated(*args: _P.args, **options: _P.kwargs) -> _Result:
        for _ in range(_MOST_TRIES):
            with suppress(ReplacedError):
                return function(*args, **options)
        return function(*args, **options)

    return repeated


def settled(function: Callable[[], _Result], seen: Seen, files: Files) -> _Result:
    """Return the result of a function, unless its error is due to a file that has been replaced."""
    try:
        return function()
    except (FormatError, FileNotFoundError):
        check_same(seen, files)
        raise


def check_same(seen: Seen, files: Files, opened: Iterable[Any] = ()) -> None:
    """Close open files, and refuse them, if a file that was read has been replaced since."""
    for path, identity in seen if files is LOCAL else ():
        try:
            now: tuple[Any, ...] | None = identity_of(os.lstat(path) if identity is None else os.stat(path))
        except OSError:
            now = ()
        if now != identity and (identity is not None or not now):
            for file in opened:
                file.close()
            raise ReplacedError("another program replaced it while it was opened", path)
