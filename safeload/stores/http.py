"""Files behind https and http URLs: each is read by requests for ranges of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from .._version import __version__
from ..base.forking import ProcessLock
from ..base.log import debug
from ..base.text import show
from ..base.url import WebUrl
from ..errors import RemoteError, RemotePermissionError, UnsupportedError, missing_file
from . import url as urls
from .connections import Exchange
from .http_client import Client, RequestTarget, redirected, target_of
from .local import compare
from .remote import WINDOW, RemoteStore
from .retries import TRANSPORT_ERRORS, Failure, Tries, broken_off, of_error, of_status
from .stop import current
from .store import Span

# Redirects of one request.
MOST_REDIRECTS = 10
# A server without ranges gives whole files: those of at most this many bytes are kept.
WHOLE = 16 << 20

_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)")
_LENGTH = re.compile(r"[0-9]{1,18}")
# Bytes between two spans are received, and thrown away, this many at a time.
_SCRATCH = 64 << 10

_Result = TypeVar("_Result")


class Web:
    """The files behind https and http URLs; see `remote_files.Backend`.

    Args:
        options: see `Client`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._client = Client(options)

    def open(self, url: str) -> HttpStore:
        """Opens a file. User and password of its URL are sent to its host only.

        Raises:
            FileNotFoundError: there is none.
            UnsupportedError: the server gives no ranges of it.
            RemoteError: it cannot be opened.
        """
        target = target_of(url, self._client.headers)
        return HttpStore(urls.shown(url), lambda: target, self._client)

    def is_folder(self, url: str) -> bool:
        """HTTP has files only."""
        return False

    def listing(self, url: str) -> NoReturn:
        """Never returns: HTTP has files only."""
        raise UnsupportedError(
            f"{urls.shown(url)}: https has no folders: open an index (model.safetensors.index.json), "
            "one file, or a list of URLs"
        )

    def upload(self, source: str, url: str) -> NoReturn:
        """Never returns: each server has its own way to write, if it has one."""
        self.check_writable(url)

    def remove(self, several: Sequence[str]) -> NoReturn:
        """Never returns, see `upload`."""
        self.check_writable(several[0])

    def check_writable(self, url: str) -> NoReturn:
        """Never returns, see `upload`."""
        raise UnsupportedError(f"{urls.shown(url)}: https cannot be written to: write to a local folder, s3, gs or az")


class _Route(NamedTuple):
    """The URL that answers.

    Attributes:
        url: of it, after redirects.
        redirected: whether it is another than the target's.
        proven: whether it has given bytes of the version that was opened.
    """

    url: WebUrl
    redirected: bool = False
    proven: bool = False

    def __repr__(self) -> str:
        return f"<_Route {self.url.shown}>"


class _Wanted:
    """The bytes that a request is for, and where they go.

    Attributes:
        at: the first byte that is still missing.
        end: one past the last byte.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._k = 0
        self._scratch = memoryview(b"")
        self.at, self.end = spans[0].offset, spans[-1].end

    def memory(self) -> memoryview:
        """Where the next bytes go."""
        while self.at >= self._spans[self._k].end:
            self._k += 1
        span = self._spans[self._k]
        if self.at >= span.offset:
            return span.memory[self.at - span.offset :]
        self._scratch = self._scratch or memoryview(bytearray(_SCRATCH))
        return self._scratch[: span.offset - self.at]

    def receive(self, exchange: Exchange) -> bool:
        """Receives the body of an answer. Returns whether it had all bytes."""
        with current().filling():
            while self.at < self.end:
                count = exchange.receive(self.memory())
                if not count:
                    return False
                self.at += count
        return True


# What is done with an answer: it gives what was wanted, or says why not.
_Use = Callable[[Exchange, WebUrl], "_Result | Failure"]


class HttpStore(RemoteStore):
    """A file read by GET requests for ranges.

    Args:
        path: its URL as messages show it.
        resolve: gives the URL to read. Called in any thread, and again when access to that URL is refused.
        client: shared by files with the same options.

    Raises:
        FileNotFoundError: there is none.
        UnsupportedError: the server gives no ranges of it.
        RemoteError: it cannot be opened.
    """

    def __init__(self, path: str, resolve: Callable[[], RequestTarget], client: Client) -> None:
        super().__init__()
        self.path = path
        self._resolve = resolve
        self._client = client
        self._renewing = ProcessLock()
        self._etag: str | None = None
        self._modified: str | None = None
        client.connections.join(self)
        try:
            self._target = resolve()
            self._route = _Route(self._target.url)
            self._persist(_Wanted([Span(0, memoryview(bytearray(WINDOW)))]), self._opened)
        except BaseException:
            client.connections.leave(self)
            raise

    def __repr__(self) -> str:
        return f"<HttpStore {self.path}>"

    def close(self) -> None:
        """Releases the connections, if no other file uses them."""
        super().close()
        self._client.connections.leave(self)

    def read_spans(self, spans: Sequence[Span]) -> None:
        """See `RemoteStore.read_spans`."""
        spans = [span for span in spans if len(span.memory)]
        if not spans:
            return
        wanted = _Wanted(spans)
        self._persist(wanted, lambda exchange, url: self._read(exchange, url, wanted))

    # ---- requests ----

    def _persist(self, wanted: _Wanted, use: _Use[_Result]) -> _Result:
        """Requests what is missing until it is there. What it raises has no error of urllib3 behind it."""
        tries, renewed = Tries(self._client.retries, wanted.at), False
        while True:
            route = self._route
            found: _Result | Failure
            try:
                found = self._request(route, wanted, use)
            except TRANSPORT_ERRORS as error:
                found = of_error(error, self.path, self._client.timeout)
            if not isinstance(found, Failure):
                return found
            if isinstance(found.error, RemoteError):
                found.error.begin, found.error.end = wanted.at, wanted.end
            debug("%s: bytes [%d, %d): %s", self.path, wanted.at, wanted.end, found.error.args[0])
            if found.refused and not renewed and self._renew(route):
                renewed = True
            else:
                try:
                    tries.failed(found, wanted.at)
                finally:
                    del found  # whose error refers to this frame

    def _request(self, route: _Route, wanted: _Wanted, use: _Use[_Result]) -> _Result | Failure:
        """Asks for what is missing, once, and follows redirects."""
        url, seen = route.url, set[WebUrl]()
        while url not in seen:
            if len(seen) > MOST_REDIRECTS:
                return Failure(RemoteError(f"the server redirects more than {MOST_REDIRECTS} times", self.path))
            seen.add(url)
            with self._client.connections.exchange(url, self._headers(route, url, wanted)) as exchange:
                debug("%s: bytes [%d, %d): %d", self.path, wanted.at, wanted.end, exchange.status)
                if exchange.status not in _REDIRECTS:
                    return self._refusal(exchange) or use(exchange, url)
                exchange.drain()
                following = redirected(url, exchange.headers.get("Location"), self.path)
            if isinstance(following, Failure):
                return following
            url = following
        return Failure(RemoteError("the server redirects in a circle", self.path))

    def _headers(self, route: _Route, url: WebUrl, wanted: _Wanted) -> dict[str, str]:
        headers = {"User-Agent": f"safeload/{__version__}"}
        if url.origin == self._target.url.origin:
            headers.update(self._target.headers)
        headers["Range"] = f"bytes={wanted.at}-{wanted.end - 1}"
        headers["Accept-Encoding"] = "identity"
        # Other servers on the way may call the same file by another ETag.
        if route.proven and url == route.url and self._etag is not None and not self._etag.startswith("W/"):
            headers["If-Match"] = self._etag
        return headers

    def _refusal(self, exchange: Exchange) -> Failure | None:
        """Why an answer has no bytes of the file; None if it may have them."""
        status = exchange.status
        if status in (200, 206, 412, 416):
            encoding = exchange.headers.get("Content-Encoding", "").strip().lower()
            if encoding in ("", "identity"):
                return None
            text = f"the server sends the file compressed ({show(encoding)}), although it was asked not to"
            return Failure(RemoteError(text, self.path))
        exchange.drain()
        if status in (404, 410):
            return Failure(missing_file(self.path, f"No such file: {self.path} (the server answers {status})"))
        if status in (401, 403):
            text = f"the server refuses access ({status}): {self._client.credentials}"
            return Failure(RemotePermissionError(text, self.path), refused=True)
        if status == 407:
            return Failure(RemotePermissionError("the proxy asks for user and password", self.path))
        return of_status(status, exchange.headers.get("Retry-After"), self.path)

    def _renew(self, seen: _Route) -> bool:
        """Resolves the URL again, in one thread. Returns whether there is another to try."""
        lock = self._renewing.own
        while not lock.acquire(timeout=0.1):
            current().check()
        try:
            if self._route is not seen:  # another thread was faster
                return True
            target = self._resolve()
            if target == self._target and not seen.redirected:
                return False
            self._target, self._route = target, _Route(target.url)
            return True
        finally:
            lock.release()

    # ---- answers ----

    def _opened(self, exchange: Exchange, url: WebUrl) -> Failure | None:
        """Takes size, version and the first window from the answer to the first request."""
        found = self._whole(exchange) if exchange.status == 200 else self._head(exchange)
        if isinstance(found, Failure):
            return found
        self.size, window = found
        self._etag, self._modified = exchange.headers.get("ETag") or None, exchange.headers.get("Last-Modified")
        self.version = (self.size, self._etag or self._modified)
        self._route = _Route(url, url != self._target.url, True)
        self.keep(0, window)
        return None

    def _head(self, exchange: Exchange) -> tuple[int, bytes] | Failure:
        """The size of a file, and its beginning."""
        total = _total(exchange)
        if exchange.status == 416 and total == 0:
            return 0, b""
        if exchange.status != 206:
            return of_status(exchange.status, None, self.path)
        if total is None:
            return Failure(RemoteError("the server does not say how large the file is", self.path))
        window = bytearray(min(WINDOW, total))
        failure = self._misplaced(exchange, 0, len(window))
        if failure is not None:
            return failure
        if not _Wanted([Span(0, memoryview(window))]).receive(exchange):
            return broken_off(self.path)
        exchange.finish()
        return total, bytes(window)

    def _whole(self, exchange: Exchange) -> tuple[int, bytes] | Failure:
        """The size of a small file, and all of it, from a server that gives no ranges."""
        length = exchange.headers.get("Content-Length", "")
        size = int(length) if _LENGTH.fullmatch(length) else None
        content = bytearray(WHOLE + 1 if size is None else size if size <= WHOLE else 0)
        wanted = _Wanted([Span(0, memoryview(content))])
        wanted.receive(exchange)
        if (size or 0) > WHOLE or wanted.at > WHOLE:
            return Failure(
                UnsupportedError(
                    f"{self.path}: this server gives no ranges of a file: download it, or open filecache::URL "
                    "with storage_options={}, which is fsspec's way to do that"
                )
            )
        if size is not None and wanted.at < size:
            return broken_off(self.path)
        return wanted.at, bytes(content[: wanted.at])

    def _read(self, exchange: Exchange, url: WebUrl, wanted: _Wanted) -> Failure | None:
        """Takes the bytes that are missing from an answer."""
        route = self._route
        known = route.proven and url == route.url
        self._compare(exchange, known)
        failure = self._misplaced(exchange, wanted.at, wanted.end)
        if failure is not None:
            return failure
        if not known:
            self._route = _Route(url, url != self._target.url, True)
        if not wanted.receive(exchange):
            return broken_off(self.path)
        exchange.finish()
        return None

    def _misplaced(self, exchange: Exchange, begin: int, end: int) -> Failure | None:
        """What is wrong with an answer that should have the bytes [begin, end) and no others."""
        headers = exchange.headers
        place = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip().lower())
        length = headers.get("Content-Length")
        if exchange.status == 200:
            what = "the server answers with the whole file where a range of it was requested"
        elif exchange.status != 206:
            return of_status(exchange.status, None, self.path)
        elif headers.get("Content-Type", "").strip().lower().startswith("multipart/"):
            what = "the server answers in several parts where one range was requested"
        elif place is None or place[1] is None or (int(place[1]), int(place[2]) + 1) != (begin, end):
            what = f"the server answers with another range ({show(headers.get('Content-Range'))})"
        elif length is not None and length.strip() != str(end - begin):
            what = f"the server answers with {show(length)} bytes"
        else:
            return None
        return Failure(RemoteError(what, self.path))

    def _compare(self, exchange: Exchange, known: bool) -> None:
        """Raises FormatError if an answer is of another version than the one that was opened.

        Args:
            exchange: has the answer.
            known: whether its URL has given bytes of that version before, and was asked for it.
        """
        total = _total(exchange)
        if total is not None:
            compare((total,), self.version[:1], self.path)
        etag, modified = exchange.headers.get("ETag") or None, exchange.headers.get("Last-Modified")
        if exchange.status == 412:
            same = False
        elif exchange.status != 206:
            same = True  # an error for other reasons
        elif self._etag is not None and etag is not None:
            same = _opaque(etag) == _opaque(self._etag) and (_is_strong(etag) or self._agrees(modified))
        elif self._etag is not None and not known:
            same = False  # it does not say of which it is
        else:
            same = self._agrees(modified)
        if not same:
            compare((self.size, ""), (self.size, "another"), self.path)

    def _agrees(self, modified: str | None) -> bool:
        return modified is None or self._modified is None or modified == self._modified


def _total(exchange: Exchange) -> int | None:
    """The size of the file, as an answer says it."""
    place = _CONTENT_RANGE.fullmatch(exchange.headers.get("Content-Range", "").strip().lower())
    return None if place is None or place[3] == "*" else int(place[3])


def _is_strong(etag: str) -> bool:
    return not etag.startswith("W/")


def _opaque(etag: str) -> str:
    return etag.removeprefix("W/")
