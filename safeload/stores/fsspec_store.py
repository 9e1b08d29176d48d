"""Files of fsspec filesystems: abortable calls, ranges, versions, and S3 objects read through presigned URLs."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.cached import CachingFileSystem

from ..base import log
from ..base.forking import ProcessLock
from ..base.text import show
from ..errors import FormatError, RemoteError, UnsupportedError
from .foreign_errors import changed, checked, retried
from .remote import RemoteStore, checked_size, digest_of, fill, marks_of, strong_etag
from .stop import current, left_behind
from .store import WINDOW, Span

if TYPE_CHECKING:
    from .http import HttpStore
    from .http_client import Client, RequestTarget

# Seconds between signal checks while a call runs in fsspec's thread: Windows cannot interrupt a wait.
_TICK = 0.2


class FsspecHandle:
    """An fsspec filesystem for use in any process, forked processes included.

    An asynchronous filesystem belongs to the thread of its event loop, which a fork does not copy.
    """

    def __init__(self, fs: Any, secrets: list[str]) -> None:
        self._fs = _usable(fs)
        self._process = os.getpid()
        self.secrets = secrets
        self._passing: frozenset[str] | None = None  # fields of `info` that differ from call to call
        self._has_ukey = True  # until it fails
        # A block cache shares its list of blocks between the files of all threads.
        self.turns = ProcessLock() if isinstance(fs, CachingFileSystem) else None

    @property
    def fs(self) -> Any:
        """The filesystem; a forked process gets its own."""
        if self._process != os.getpid():
            self._fs, self._process = _renewed(self._fs), os.getpid()
        return self._fs

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the filesystem; `stop.current` and Ctrl-C abort it."""
        return self._call(self.fs, name, *arguments, **named)

    def _call(self, fs: Any, name: str, *arguments: Any, **named: Any) -> Any:
        if not isinstance(fs, AsyncFileSystem) or getattr(fs, "fs", None) is not None:  # a wrapper decides by itself
            return left_behind(lambda: getattr(fs, name)(*arguments, **named))
        future = asyncio.run_coroutine_threadsafe(getattr(fs, f"_{name}")(*arguments, **named), fs.loop)
        try:
            with current().aborting(future.cancel):
                while not wait([future], _TICK).done:
                    pass
                return future.result()
        except BaseException:
            future.cancel()
            raise

    def ask(self, url: str, name: str, *arguments: Any, **named: Any) -> Any:
        """Like `call`, but translate errors."""
        return checked(lambda: self.call(name, *arguments, **named), url, self.secrets)

    def info(self, url: str, path: str) -> dict[str, Any]:
        """Return the store's current information about a path, bypassing caches.

        Caches would list the folder, which http does not have.
        """

        def read() -> Any:
            fs = self._innermost()
            fs.invalidate_cache(path)
            method = getattr(fs, "_info", None) or fs.info
            refresh = {"refresh": True} if "refresh" in inspect.signature(method).parameters else {}
            return self._call(fs, "info", path, **refresh)

        info = checked(read, url, self.secrets)
        if not isinstance(info, Mapping):
            raise FormatError(f"the store reports {show(info)} instead of the properties of a file", url)
        return dict(info)

    def _innermost(self) -> Any:
        """Return the filesystem behind all caches."""
        fs = self.fs
        while isinstance(fs, CachingFileSystem):
            fs = fs.fs
        return fs

    def version(self, url: str, path: str) -> tuple[int, str | None]:
        """Return the size of a file, and a strong ETag or the digest of everything else that the store reports."""
        info = self.info(url, path)
        if info.get("type") == "directory":
            raise FormatError("this is a folder, not a file", url)
        size, tag = checked_size(info.get("size"), url), strong_etag(info)
        if tag is not None:
            return size, tag
        marks = self._marks(info, url, path)
        if self._passing is None:
            # A field that differs in three calls is no mark; a single difference means a changed file.
            again = self._marks(self.info(url, path), url, path)
            passing = _differences(marks, again)
            if passing:
                marks = self._marks(self.info(url, path), url, path)
                passing &= _differences(marks, again)
            self._passing = frozenset(passing)
        return size, digest_of({name: mark for name, mark in marks.items() if name not in self._passing})

    def _marks(self, info: dict[str, Any], url: str, path: str) -> dict[str, str]:
        """Return the marks of a file, with the filesystem's own `ukey` if it has any."""
        fs, marks = self._innermost(), marks_of(info)
        own = getattr(type(fs), "ukey", None) not in (None, AbstractFileSystem.ukey)
        if (
            own and self._has_ukey and getattr(fs, "fs", None) is None
        ):  # a wrapper repeats that of the filesystem beneath
            try:
                marks["ukey"] = str(checked(lambda: left_behind(lambda: fs.ukey(path)), url, self.secrets))
            except Exception:
                if self._passing is not None:
                    raise
                self._has_ukey = False
        return marks


def _differences(marks: Mapping[str, str], others: Mapping[str, str]) -> set[str]:
    return {name for name in {*marks, *others} if marks.get(name) != others.get(name)}


def _usable(fs: Any) -> Any:
    # A filesystem made for the program's own event loop has no loop for other threads.
    if isinstance(fs, AsyncFileSystem) and fs.asynchronous:
        return type(fs)(*fs.storage_args, **{**fs.storage_options, "asynchronous": False, "loop": None})
    return fs


def _renewed(fs: Any) -> Any:
    if isinstance(fs, AsyncFileSystem):
        options = {key: _renewed(value) for key, value in fs.storage_options.items()}
        return type(fs)(*map(_renewed, fs.storage_args), **options, skip_instance_cache=True)
    if isinstance(fs, CachingFileSystem):
        fs.fs = _renewed(fs.fs)
    return fs


class FsspecStore(RemoteStore):
    """A file of an fsspec filesystem, read by ranges into separate buffers, because not every read can be aborted."""

    def __init__(self, handle: FsspecHandle, place: str, url: str, window: int = WINDOW) -> None:
        super().__init__(window)
        self.path = url
        self._handle = handle
        self._place = place
        self.version = handle.version(url, place)
        self.size: int = self.version[0]
        log.debug("%s: opened by %s", url, type(handle.fs).__name__)

    def read_spans(self, spans: Sequence[Span]) -> None:
        begin, end = spans[0].offset, spans[-1].end
        fill(spans, begin, retried(lambda: self._range(begin, end), self.path, self._handle.secrets, begin, end))

    def _range(self, begin: int, end: int) -> bytes:
        turns = self._handle.turns

        def read() -> Any:
            with nullcontext() if turns is None else turns.own:
                return self._handle.call("cat_file", self._place, start=begin, end=end)

        content = read() if turns is None else left_behind(read)
        if len(content) == end - begin:
            return bytes(content)
        if len(content) > end - begin:
            raise UnsupportedError(f"{self.path}: the store does not support ranges of this file")
        self.confirm()
        raise RemoteError(f"expected {end - begin:,} bytes, got {len(content):,}", self.path, begin, end)

    def confirm(self) -> None:
        version = self._handle.version(self.path, self._place)
        if version != self.version:
            raise changed(self.path, self.size, version[0])


# ---- presigned URLs ----

# Lifetime of a signature in seconds. Temporary credentials may expire earlier; the URL is then signed again.
_VALID = 3600
# Connection settings that our HTTP client does not support.
_CONNECTION = frozenset(("client_cert", "proxies", "proxies_config"))


class Signer:
    """Opens S3 objects through presigned URLs: s3fs signs, and `HttpStore` reads straight into the arrays' memory.

    Each range is read with ``If-Match``, which s3fs does not send, and opening takes one request instead of two.
    """

    def __init__(self) -> None:
        self._client: Client | None = None
        self._making = ProcessLock()

    def open(self, handle: FsspecHandle, place: str, shown: str, window: int) -> HttpStore | None:
        """Open an object; return None if s3fs has to read it, or may have a better error."""
        if not _signable(handle.fs):
            return None

        def resolve() -> RequestTarget:
            from .http_client import RequestTarget, web_url

            fs = handle.fs
            named = {key: value for key, value in _settings(fs, "req_kw").items() if key == "RequestPayer" and value}
            url = str(handle.ask(shown, "url", place, expires=_VALID, **named))
            web, _ = web_url(url)
            signed = parse_qs(web.query or "").get("X-Amz-SignedHeaders", [""])[0].split(";")
            headers = {"x-amz-request-payer": named["RequestPayer"]} if "x-amz-request-payer" in signed else {}
            return RequestTarget(web, headers)

        try:
            from .http import HttpStore

            return HttpStore(shown, resolve, self._shared(handle), window)
        except (FormatError, FileNotFoundError):
            raise
        except (RemoteError, ImportError) as error:
            log.debug("%s: read by s3fs, because a signed URL was refused: %s", shown, type(error).__name__)
        return None

    def _shared(self, handle: FsspecHandle) -> Client:
        from .http_client import Client

        with self._making.own:
            if self._client is None:
                verify = _settings(handle.fs, "client_kwargs").get("verify")
                self._client = Client({} if verify is None else {"verify": verify}, "s3")
            return self._client


def _settings(fs: Any, name: str) -> dict[str, Any]:
    return dict(getattr(fs, name, None) or {})


def _signable(fs: Any) -> bool:
    """Return whether a URL can carry the whole request: a customer's encryption key must be sent in headers."""
    keys = {*_settings(fs, "s3_additional_kwargs"), *_settings(fs, "req_kw"), *_settings(fs, "kwargs")}
    return not any(key.startswith("SSECustomer") for key in keys) and not _CONNECTION & {
        *_settings(fs, "config_kwargs")
    }
