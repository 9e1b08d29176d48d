"""Files behind https and http URLs, read by range requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ..core.files import WINDOW, Span, compare
from ..core.forking import ProcessLock
from ..core.text import debug, show
from ..core.thread_group import current
from ..errors import RemoteError, RemotePermissionError, UnsupportedError, missing_file
from . import url as urls
from .foreign import is_weak
from .http_client import (
    TRANSPORT_ERRORS,
    Client,
    Exchange,
    Failure,
    RequestTarget,
    broken_off,
    of_error,
    of_status,
    retried,
    target_of,
)
from .remote_store import Backend, RemoteStore

# Maximum number of redirects per request.
MOST_REDIRECTS = 10
# A server without range support returns whole files: files up to this size are kept in memory.
WHOLE = 16 << 20

# States the commit of a branch or tag, also in a redirect.
_COMMIT = "X-Repo-Commit"
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
# A signature or a redirect may have expired: each store has another status for that. 407 is the proxy's.
_REFUSED = frozenset(range(400, 500)) - {407}
# The end of a message if access is refused.
_ADVICE = (
    "a token may be missing or wrong (storage_options={'headers': {'Authorization': ...}}), or a signed URL has expired"
)
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)")
# Bytes between two spans are received and discarded in pieces of this size.
_SCRATCH = 64 << 10
# Bytes of a whole file received at once.
_PIECE = 256 << 10

_Result = TypeVar("_Result")


class Web(Backend):
    """Files behind https and http URLs."""

    no_folders = "https has no folders: open an index (model.safetensors.index.json), one file, or a list of URLs"
    read_only = "https is read-only: write to a local folder, s3, gs or az"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._client = Client(options)

    def open(self, url: str, window: int = WINDOW) -> HttpStore:
        """Open a file. The user and password of a URL are sent only to its host."""
        return HttpStore(urls.shown(url), lambda: target_of(url, self._client.headers), self._client, window)


class _Transfer:
    """The state of a read: the missing bytes, and the memory for them."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._k = 0
        self._scratch = memoryview(b"")
        self.at, self.end = spans[0].offset, spans[-1].end  # the range of missing bytes

    def memory(self) -> memoryview:
        while self.at >= self._spans[self._k].end:
            self._k += 1
        span = self._spans[self._k]
        if self.at >= span.offset:
            return span.memory[self.at - span.offset :]
        self._scratch = self._scratch or memoryview(bytearray(_SCRATCH))
        return self._scratch[: span.offset - self.at]

    def receive(self, exchange: Exchange, path: str) -> None:
        """Receive the whole body of a response."""
        begin = self.at
        with current().filling():
            while self.at < self.end:
                count = exchange.receive(self.memory())
                if not count:
                    raise broken_off(path)
                self.at += count
        try:
            exchange.finish()
        except TRANSPORT_ERRORS:  # chunks with a wrong size: no byte of the response is certain
            self.at, self._k = begin, 0
            raise


@contextmanager
def _answered(
    client: Client,
    target: RequestTarget,
    url: urls.WebUrl,
    path: str,
    commits: set[str],  # gets those that the host of the target states
    *,
    what: str = "",  # for the log
    more: Callable[[urls.WebUrl], Mapping[str, str]] = lambda url: {},  # returns further headers
) -> Iterator[tuple[Exchange, urls.WebUrl]]:
    """Send a request, follow redirects, and yield the last response and its URL; errors are a `Failure`."""
    seen = set[urls.WebUrl]()
    while url not in seen:
        if len(seen) > MOST_REDIRECTS:
            raise Failure(RemoteError(f"the server redirects more than {MOST_REDIRECTS} times", path))
        seen.add(url)
        try:
            with client.exchange(url, {**target.headers_at(url), **more(url)}) as exchange:
                debug("%s: %s: %d", path, what or url.shown, exchange.status)
                commit = exchange.headers.get(_COMMIT)
                if commit is not None and url.origin == target.url.origin:
                    commits.add(commit)
                if exchange.status not in _REDIRECTS:
                    yield exchange, url
                    return
                exchange.drain()
                location = exchange.headers.get("Location") or ""
        except TRANSPORT_ERRORS as error:
            suffix = "" if url.origin == target.url.origin else f", after a redirect to {url.place}"
            raise of_error(error, path, client.timeout).noted(suffix) from None
        with suppress(UnicodeError):  # in UTF-8, as browsers do
            location = location.encode("latin-1").decode()
        location = location.strip(" \t")
        if not location:
            raise Failure(RemoteError("the server redirects without a Location header", path))
        try:
            following = url.redirected(location)
        except urls.UrlError as error:
            text = f"the server redirects to an invalid http or https URL: {error}"
            raise Failure(RemoteError(text, path)) from None
        if url.scheme == "https" and following.scheme != "https":
            text = f"the server redirects from https to http ({following.shown}), which is refused"
            raise Failure(RemoteError(text, path))
        url = following
    raise Failure(RemoteError("the server redirects in a loop", path))


def request(client: Client, target: RequestTarget, path: str, use: Callable[[Exchange], _Result]) -> _Result:
    """Request a whole response, and return the result of ``use``; transient failures are retried."""

    def attempt() -> _Result:
        with _answered(client, target, target.url, path, set()) as (exchange, _):
            return use(exchange)

    try:
        return retried(attempt, client.retries, lambda failure: debug("%s: %s", path, failure.error))
    finally:
        client.leave()


class HttpStore(RemoteStore):
    """A file read by GET requests for ranges."""

    def __init__(self, path: str, resolve: Callable[[], RequestTarget], client: Client, window: int = WINDOW) -> None:
        super().__init__(path, (0, None), window)  # the version of an empty file, until the file is open
        self.commits: set[str] = set()  # of the Hub, as the host of the URL states them
        self._resolve = resolve  # called from any thread, and again if access to its URL is refused
        self._client = client
        self._renewing = ProcessLock()
        self._marks: tuple[str | None, str | None] | None = None  # until the file is open
        client.users.add(self)
        try:
            self._target = resolve()
            self._route = self._target.url  # after redirects
            self._proven: urls.WebUrl | None = None  # has served bytes of the opened version
            self._persist(_Transfer([Span(0, memoryview(bytearray(window)))]))
        except BaseException:
            client.leave(self)
            raise

    def close(self) -> None:
        super().close()
        self._client.leave(self)

    def read_spans(self, spans: Sequence[Span]) -> None:
        spans = [span for span in spans if len(span.memory)]
        if spans:
            self._persist(_Transfer(spans))

    # ---- requests ----

    def _persist(self, transfer: _Transfer) -> None:
        """Request the missing bytes until all have arrived; errors are never chained to urllib3's."""
        renewed = False  # a URL is resolved again once

        def mended(failure: Failure) -> bool:
            nonlocal renewed
            if isinstance(failure.error, RemoteError):
                failure.error.begin, failure.error.end = transfer.at, transfer.end
            debug("%s: bytes [%d, %d): %s", self.path, transfer.at, transfer.end, failure.error.args[0])
            if failure.refused is None or renewed or not self._renew(*failure.refused):
                return False
            renewed = True
            current().sleep(failure.wait)
            return True

        retried(lambda: self._request(transfer), self._client.retries, mended, lambda: transfer.at)

    def _request(self, transfer: _Transfer) -> None:
        """Request the missing bytes once."""
        route, target, (etag, _) = self._route, self._target, self._marks or (None, None)
        what = f"bytes [{transfer.at}, {transfer.end})"

        def more(url: urls.WebUrl) -> dict[str, str]:
            headers = {"Range": f"bytes={transfer.at}-{transfer.end - 1}"}
            # Other servers along the redirects may have another ETag for the same file.
            if etag and not is_weak(etag) and url == self._proven:
                headers["If-Match"] = etag
            return headers

        with _answered(self._client, target, route, self.path, self.commits, what=what, more=more) as (exchange, url):
            try:
                check_accepted(exchange, self.path)
                if self._marks is None:
                    self._opened(exchange, url)
                else:
                    self._read(exchange, url, transfer)
            except Failure as failure:
                failure.refused = (route, url) if exchange.status in _REFUSED else None
                raise

    def _renew(self, seen: urls.WebUrl, refused: urls.WebUrl) -> bool:
        """Resolve the URL again, in a single thread, and return whether there is another URL to try."""
        lock = self._renewing.own
        while not lock.acquire(timeout=0.1):
            current().check()
        try:
            if self._route != seen:  # another thread was faster
                return True
            moved = refused != self._target.url
            if self._marks is None and not moved:  # it has just been resolved
                return False
            target = self._resolve()
            if target == self._target and not moved:
                return False
            self._target, self._route = target, target.url
            return True
        finally:
            lock.release()

    # ---- responses ----

    def _opened(self, exchange: Exchange, url: urls.WebUrl) -> None:
        """Take the size, the version and the first window from the response to the first request."""
        status, total = exchange.status, _total(exchange)
        if status == 200:  # a server without range support
            window = whole_body(exchange, WHOLE, self.path)
            if window is None:
                advice = "open filecache::URL with storage_options={}, which lets fsspec download it"
                text = f"this server does not support ranges: download the file, or {advice}"
                raise Failure(UnsupportedError(f"{self.path}: {text}"))
            total = len(window)
        elif status == 416 and total == 0:
            window = b""
        elif status != 206:
            raise of_status(exchange, self.path)
        elif total is None:
            place = show(exchange.headers.get("Content-Range"))
            text = f"the server does not report the file size (Content-Range: {place})"
            raise Failure(RemoteError(text, self.path))
        else:
            memory = bytearray(min(self.window, total))
            _check_range(exchange, 0, len(memory), self.path)
            _Transfer([Span(0, memoryview(memory))]).receive(exchange, self.path)
            window = bytes(memory)
        self.size = total
        self._marks = _marks_of(exchange)
        self.version = (self.size, " ".join(filter(None, self._marks)) or None)
        self._route = self._proven = url
        self.keep(0, window)

    def _read(self, exchange: Exchange, url: urls.WebUrl, transfer: _Transfer) -> None:
        """Take the missing bytes from a response."""
        total = _total(exchange)
        if total is not None:
            compare((total,), self.version[:1], self.path)
        other_version = exchange.status == 206 and _marks_of(exchange) != self._marks
        if exchange.status == 412 or other_version or len(self.commits) > 1:
            compare((self.size, ""), (self.size, "another"), self.path)
        _check_range(exchange, transfer.at, transfer.end, self.path)
        self._route = self._proven = url
        transfer.receive(exchange, self.path)


def check_accepted(exchange: Exchange, path: str) -> None:
    """Refuse a response that holds no bytes of the file."""
    status = exchange.status
    if status in (200, 206, 412, 416):
        encoding = exchange.headers.get("Content-Encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return
        text = f"the server sent the file compressed ({show(encoding)}), although the request refused compression"
        raise Failure(RemoteError(text, path))
    exchange.drain()
    if status in (404, 410):
        like_folder = path.startswith("http") and "." not in path.partition("?")[0].rpartition("/")[2]
        advice = f"; {Web.no_folders}" if like_folder else ""
        raise Failure(missing_file(path, f"No such file: {path} (the server returned {status}){advice}"))
    if status in (401, 403):
        raise Failure(RemotePermissionError(f"the server refuses access ({status}): {_ADVICE}", path))
    if status == 407:
        raise Failure(RemotePermissionError("the proxy requires a user and a password", path))
    raise of_status(exchange, path)


def whole_body(exchange: Exchange, limit: int, path: str) -> bytes | None:
    """Return the body of a response, or None if it has more bytes than the limit."""
    content, memory = bytearray(), memoryview(bytearray(_PIECE))
    while (exchange.length or 0) <= limit and len(content) <= limit:  # the length is None if the server does not tell
        count = exchange.receive(memory)
        if not count:
            if exchange.length:  # bytes that have not arrived
                raise broken_off(path)
            return bytes(content)
        content += memory[:count]
    return None


def _check_range(exchange: Exchange, begin: int, end: int, path: str) -> None:
    """Refuse a response that does not hold exactly the bytes [begin, end)."""
    headers = exchange.headers
    place = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip().lower())
    length = headers.get("Content-Length")
    if exchange.status == 200:
        what = "the server returned the whole file instead of a range"
    elif exchange.status != 206:
        raise of_status(exchange, path)
    elif headers.get("Content-Type", "").strip().lower().startswith("multipart/"):
        what = "the server returned several parts instead of one range"
    elif place is None or place[1] is None or (int(place[1]), int(place[2]) + 1) != (begin, end):
        what = f"the server returned another range ({show(headers.get('Content-Range'))})"
    elif length is not None and length.strip() != str(end - begin):
        what = f"the server returned {show(length)} bytes, expected {end - begin}"
    else:
        return
    raise Failure(RemoteError(what, path))


def _marks_of(exchange: Exchange) -> tuple[str | None, str | None]:
    """Return the marks whose difference is a change: the ETag, and the time unless a strong ETag decides alone."""
    etag, modified = exchange.headers.get("ETag") or None, exchange.headers.get("Last-Modified") or None
    return etag, modified if etag is None or is_weak(etag) else None


def _total(exchange: Exchange) -> int | None:
    """Return the size of the file as the response states it, or None."""
    place = _CONTENT_RANGE.fullmatch(exchange.headers.get("Content-Range", "").strip().lower())
    return None if place is None or place[3] == "*" else int(place[3])
