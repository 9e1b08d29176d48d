"""Errors of other libraries in safeload's words: which may pass, and what their messages may not say."""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..base import log
from ..base.text import printable
from ..errors import (
    FormatError,
    RemoteError,
    RemotePermissionError,
    RemoteTimeoutError,
    SafeloadError,
    UnsupportedError,
    missing_file,
)
from . import url as urls
from .stop import current

_Result = TypeVar("_Result")

# How often a range is asked for: most libraries try again themselves, within one of these. Then seconds before the
# second time, which double.
TRIES, PAUSE = 4, 0.5
# Most seconds that a server may have us wait.
_LONGEST_PAUSE = 60.0
# In Retry-After, and in the RateLimit header of the Hub, whose "r" is what remains of the quota.
_SECONDS = re.compile(r"(?:^|\br=0;\s*t=)(\d{1,6})\s*$")
# System errors that stay.
_FINAL = frozenset((errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR))
# Errors of libraries that are not system errors, by the names of their classes.
_DENIED = re.compile(r"Credential|Authenti|Authoriz|Forbidden|AccessDenied|PermissionDenied|TokenError|RefreshError")
_PASSING = re.compile(r"Connect|Timeout|TimedOut|Incomplete|Payload|Stream|Protocol|Transport|ServerError|HttpError")
# Characters of another library's message that are shown, and those that are searched for secrets.
_MOST, _SEARCHED = 500, 16 << 10
# No scheme has more letters: without a limit the search takes quadratic time.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,31}://[^\s'\"<>|^`{}]+")
# What keys and tokens look like: those of AWS and of the Hub, and values behind their usual names.
_KEYS = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bhf_[A-Za-z0-9]{8,}|\b(?:Bearer|Basic)\s+\S+"
    r"|(?<=[=:])(?<=sig=|key=|ken=|ure=|ret=|ord=|ial=|ign=)[^&\s]+",
    re.IGNORECASE,
)


def checked(
    function: Callable[[], _Result], url: str, secrets: list[str], begin: int | None = None, end: int | None = None
) -> _Result:
    """Calls a function of another library; its errors, which may have secrets in them, are not even the cause of ours.

    Raises:
        FileNotFoundError, SafeloadError, RemoteError: see `in_our_words`.
    """
    try:
        return function()
    except Exception as error:
        ours = in_our_words(error, url, secrets, begin, end)
    try:
        raise ours
    finally:
        del ours  # which refers to this frame


def again(
    function: Callable[[], _Result],
    url: str,
    secrets: list[str],
    begin: int | None = None,
    end: int | None = None,
    *,
    passing: Callable[[Exception], bool] | None = None,
    words: Callable[..., Exception] | None = None,
) -> _Result:
    """`checked`, a few times while the error is one that may pass.

    Args:
        function: what to call.
        url: as messages show it.
        secrets: texts that no message may have.
        begin: first byte of what it reads.
        end: one past its last byte.
        passing: instead of `may_pass`.
        words: instead of `in_our_words`.
    """
    for k in range(TRIES):
        try:
            return function()
        except Exception as error:
            ours = (words or in_our_words)(error, url, secrets, begin, end)
            final = not (passing or may_pass)(error)
            pause = max(PAUSE * 2**k * random.uniform(0.5, 1), _wanted_pause(error))
        if final:
            break
        if k < TRIES - 1:
            log.debug("%s: tried again in %.1f s: %s", url, pause, ours.args[0] if ours.args else "")
            current().sleep(pause)
    try:
        raise ours
    finally:
        del ours  # which refers to this frame


def _wanted_pause(error: Exception) -> float:
    """Seconds that a server asks to wait for, in an error with its response: not more than a program would wait for."""
    headers = getattr(getattr(error, "response", None), "headers", None)
    if not isinstance(headers, Mapping):
        return 0.0
    found = _SECONDS.search(str(headers.get("Retry-After") or headers.get("RateLimit") or ""))
    return 0.0 if found is None else min(float(found[1]), _LONGEST_PAUSE)


def may_pass(error: Exception) -> bool:
    """Whether trying again may help."""
    if isinstance(error, (FileNotFoundError, PermissionError, SafeloadError)) or _name(error) == "FileExpired":
        return False
    if isinstance(error, OSError):
        return error.errno not in _FINAL
    return _PASSING.search(_name(error)) is not None and _DENIED.search(_name(error)) is None


def in_our_words(
    error: Exception, url: str, secrets: list[str], begin: int | None = None, end: int | None = None
) -> Exception:
    """The error to raise for one of a filesystem or of its library.

    Args:
        error: theirs.
        url: as messages show it.
        secrets: texts that no message may have.
        begin: first byte of what was asked for.
        end: one past its last byte.
    """
    if isinstance(error, (SafeloadError, RemoteError)):
        return error
    text = cleaned(error, secrets)
    if isinstance(error, FileNotFoundError):
        return missing_file(url, f"No such file or directory: {url}")
    if _name(error) == "FileExpired":
        return changed(url, 0)
    if isinstance(error, (IsADirectoryError, NotADirectoryError)):
        return FormatError("this is a folder, not a file", url)
    if isinstance(error, (NotImplementedError, UnsupportedError)):
        return UnsupportedError(f"{url}: the filesystem does not support this{text and ': '}{text}")
    said = text if text and text != "None" else _name(error)
    if isinstance(error, PermissionError) or (not isinstance(error, OSError) and _DENIED.search(_name(error))):
        return RemotePermissionError(f"the store refuses access: {said}", url, begin, end)
    if isinstance(error, TimeoutError) or "Timeout" in _name(error):
        return RemoteTimeoutError(f"the store does not answer in time: {said}", url, begin, end)
    if not isinstance(error, OSError) and said != _name(error):
        said = f"{_name(error)}: {said}"
    return RemoteError(f"the store cannot be read: {said}" if begin is not None else said, url, begin, end)


def _name(error: Exception) -> str:
    return type(error).__name__


def changed(url: str, before: int, now: int | None = None) -> FormatError:
    """The error for a file that is another one than when it was opened."""
    what = "it was replaced" if now in (None, before) else f"it had {before:,} bytes, and has {now:,}"
    return FormatError(f"the file has changed since it was opened: {what}", url)


def cleaned(error: BaseException, secrets: list[str]) -> str:
    """Return the message of an error without secrets; it may be empty."""
    try:
        text = str(error)
    except Exception:  # the error of another library
        return ""
    for secret in secrets:
        text = text.replace(secret, "***")
    if len(text) > _SEARCHED:  # cut between words: half a secret has no shape to find it by
        text = text[:_SEARCHED]
        text = text[: max(text.rfind(" "), text.rfind("\n"))] or text
    text = _KEYS.sub("***", _URL.sub(lambda match: urls.shown(match[0]), text))
    text = printable(" ".join(text.split()))
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
