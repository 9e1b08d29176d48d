"""Errors that name their file and tensor, and the check of texts to write."""

from __future__ import annotations

from typing import TypeVar

from ..errors import FormatError, SafeloadError
from .text import show, tensor_named

_Error = TypeVar("_Error", bound=SafeloadError)


def error_about(
    kind: type[_Error], text: str, *, path: str | None = None, offset: int | None = None, tensor: str | None = None
) -> _Error:
    """Return an error that names its file and tensor, such as "w.gguf: tensor 'x' has 5 dims".

    After a tensor, ``text`` is a predicate ("has 5 dims"), or a clause that begins with a colon.
    """
    if tensor is not None:
        text = f"{tensor_named(tensor)}{'' if text.startswith(':') else ' '}{text}"
    if path is not None and not issubclass(kind, FormatError):  # a FormatError ends with its path
        text = f"{path}: {text}"
    return kind(text, path=path, offset=offset, tensor=tensor)


def encode(text: str, subject: str, errors: str = "strict", *, tensor: str | None = None) -> bytes:
    """Encode a text as UTF-8. "surrogateescape" writes bytes that were not UTF-8 when they were read."""
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError:
        message = f"{subject} {show(text)} contains a lone surrogate, which UTF-8 cannot encode"
        raise SafeloadError(message, tensor=tensor) from None
