"""Faults of a server of files, one each, for `http_server.Server`: which answers they change, and how.

Each takes, besides its own arguments, those of `Fault`: for which path, from which request on, how often.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Request(NamedTuple):
    """A request as the server has seen it; header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    time: float

    @property
    def range(self) -> tuple[int, int] | None:
        """[begin, end) of the Range header."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None


@dataclass
class Answer:
    """What the server is about to send. Faults change it."""

    status: int
    headers: dict[str, str]
    content: Any = b""  # bytes, or the path of a file
    begin: int = 0
    end: int = 0
    most: int | None = None  # bytes of the body that are sent before the connection is closed
    reset: bool = False  # whether it is reset then
    stalled: float = 0.0  # seconds without a byte after `most`
    pause: float = 0.0  # seconds before the answer
    raw: bytes | None = None  # sent instead of everything


@dataclass
class Fault:
    """Changes answers.

    Args:
        change: called with the answer and the request.
        path: of the requests that it concerns; all if it is None.
        first: the number of the first of them that it concerns, from 0.
        times: how many of them.
    """

    change: Callable[[Answer, Request], None]
    path: str | None = None
    first: int = 0
    times: float = float("inf")
    seen: Any = field(default_factory=itertools.count)

    def apply(self, answer: Answer, request: Request) -> None:
        if self.path is None or urlsplit(request.path).path == self.path:
            number = next(self.seen)
            if self.first <= number < self.first + self.times:
                self.change(answer, request)


def change(**values: Any) -> Callable[[Answer, Request], None]:
    """Sets fields of the answer; ``headers`` are added, and removed where they are None."""

    def apply(answer: Answer, request: Request) -> None:
        for name, value in values.items():
            if name == "headers":
                for key, text in value.items():
                    answer.headers.pop(key, None)
                    if text is not None:
                        answer.headers[key] = text
            else:
                setattr(answer, name, value)

    return apply


def reset(after: int = 0, **when: Any) -> Fault:
    """The connection is reset after some bytes of the body."""
    return Fault(change(most=after, reset=True), **when)


def short(after: int = 0, **when: Any) -> Fault:
    """The connection is closed after some bytes of the body."""
    return Fault(change(most=after), **when)


def stall(after: int = 0, seconds: float = 60.0, **when: Any) -> Fault:
    """Nothing comes after some bytes of the body."""
    return Fault(change(most=after, stalled=seconds), **when)


def silent(seconds: float = 60.0, **when: Any) -> Fault:
    """No answer comes."""
    return Fault(change(pause=seconds), **when)


def status(code: int, retry_after: object = None, headers: Mapping[str, str] | None = None, **when: Any) -> Fault:
    """Another status, without the file."""
    added = dict(headers or {}, **({} if retry_after is None else {"Retry-After": str(retry_after)}))

    def apply(answer: Answer, request: Request) -> None:
        answer.status, answer.content, answer.begin, answer.end = code, b"no", 0, 2
        answer.headers = {"Content-Length": "2", **added}

    return Fault(apply, **when)


def whole(**when: Any) -> Fault:
    """200 and the whole file, whatever range was asked for."""

    def apply(answer: Answer, request: Request) -> None:
        if answer.status == 206:
            size = size_of(answer.content)
            answer.status, answer.begin, answer.end = 200, 0, size
            answer.headers.pop("Content-Range")
            answer.headers["Content-Length"] = str(size)

    return Fault(apply, **when)


def header(name: str, value: str | None, **when: Any) -> Fault:
    """A header with another value, or without it."""
    return Fault(change(headers={name: value}), **when)


def total(size: int, **when: Any) -> Fault:
    """Another size of the whole in Content-Range."""

    def apply(answer: Answer, request: Request) -> None:
        place = answer.headers.get("Content-Range")
        if place is not None:
            answer.headers["Content-Range"] = f"{place.rpartition('/')[0]}/{size}"

    return Fault(apply, **when)


def moved(by: int, **when: Any) -> Fault:
    """Other bytes than those that were asked for; Content-Range says so."""

    def apply(answer: Answer, request: Request) -> None:
        if answer.status == 206:
            answer.begin, answer.end = answer.begin + by, answer.end + by
            answer.headers["Content-Range"] = (
                f"bytes {answer.begin}-{answer.end - 1}/{answer.headers['Content-Range'].rpartition('/')[2]}"
            )

    return Fault(apply, **when)


def redirect(to: str, code: int = 302, **when: Any) -> Fault:
    """A redirect, to a URL or a path."""
    return status(code, headers={"Location": to}, **when)


def garbage(content: bytes = b"\x00\xff not HTTP\r\n\r\n", **when: Any) -> Fault:
    """Bytes that are not HTTP, and the end of the connection."""
    return Fault(change(raw=content), **when)


def size_of(content: Any) -> int:
    """Bytes of what is served."""
    return content.stat().st_size if isinstance(content, Path) else len(content)
