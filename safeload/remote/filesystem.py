"""URLs read by fsspec, and callers' filesystems: abortable calls, versions, caches, S3 through presigned URLs."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.cached import CachingFileSystem, WholeFileCacheFileSystem
from fsspec.implementations.local import LocalFileSystem

from ..core.files import WINDOW, ByteStore, open_local
from ..core.forking import ProcessLock, cached_property
from ..core.text import debug, is_absent, show
from ..core.thread_group import current, left_behind
from ..errors import FormatError, RemoteError, UnsupportedError
from . import url as urls
from .foreign import (
    LEAST,
    ObjectStore,
    StoredObject,
    checked,
    checked_size,
    copy_whole,
    digest_of,
    marks_of,
    secrets_of,
    strong_etag,
)

if TYPE_CHECKING:
    from .http import Client, HttpStore, RequestTarget

# The package to install for a scheme; fsspec itself names the package for other schemes.
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
# In these filesystems, `put_file` makes a file visible only when it is complete.
_ATOMIC = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "oss", "oci", "tos"))
_SCHEME = re.compile(r"(?:^|(?<=::))[A-Za-z][A-Za-z0-9+.-]+(?=://)")
# URLs with these schemes cannot carry a user and a password.
_BUCKETS = frozenset(("s3", "s3a", "gs", "gcs"))
# Seconds between signal checks while a call runs in fsspec's thread: Windows cannot interrupt a wait.
_TICK = 0.2


class Filesystem(ObjectStore):
    """A filesystem of fsspec behind URLs, or a caller's, for use in any process, forked processes included."""

    def __init__(self, fs: Any, secrets: list[str] | None = None, place: str | None = None) -> None:
        self._own = secrets is None
        self.secrets = secrets_of(getattr(fs, "storage_options", None)) if secrets is None else secrets
        # A filesystem made for the program's own event loop has no loop for other threads.
        if isinstance(fs, AsyncFileSystem) and fs.asynchronous:
            fs = type(fs)(*fs.storage_args, **{**fs.storage_options, "asynchronous": False, "loop": None})
        self._fs = fs
        self._process = os.getpid()
        self._place = place  # of the only URL, in an archive
        self.name = type(fs).__name__
        while getattr(fs, "fs", None) is not None:
            fs = fs.fs
        self.escapes = not {"http", "https", "file"}.isdisjoint(_protocols(fs))
        self._passing: frozenset[str] | None = None  # fields of `info` that differ from call to call
        self._has_ukey = True  # until it fails
        self._turns = ProcessLock()  # of a cache: one of blocks shares its list between the files of all threads

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any]) -> Filesystem:
        shown, options = urls.shown(url), _copied(options)  # fsspec changes nested options
        known = secrets_of(options)
        _check_credentials(url, known)
        url = _SCHEME.sub(lambda match: match[0].lower(), url)  # fsspec knows schemes in lower case only
        if urls.scheme_of(url) in ("s3", "s3a"):  # AWS no longer accepts botocore's default signature
            options["config_kwargs"] = {"signature_version": "s3v4", **(options.get("config_kwargs") or {})}
        fs, place = checked(lambda: fsspec.core.url_to_fs(url, **options), shown, known)
        return cls(fs, known, str(place) if key_of(url) == url else None)

    @property
    def fs(self) -> Any:
        """The filesystem; a forked process gets its own, because a fork does not copy the thread of an event loop."""
        if self._process != os.getpid():
            self._fs, self._process = _renewed(self._fs), os.getpid()
        return self._fs

    def place(self, url: str) -> str:
        _check_credentials(url, self.secrets)
        if self._place is not None:
            return self._place
        if not self._own:
            url = _SCHEME.sub(lambda match: match[0].lower(), url).rpartition("::")[2]
        elif self.escapes and urls.scheme_of(url) == "file":
            url = urls.unescaped(url)
        return str(self.fs._strip_protocol(url))

    def writable(self, url: str) -> tuple[ObjectStore, str]:
        """Return the filesystem behind all caches, and the place of a URL."""
        place, fs = self.place(url), self._innermost()
        if {"http", "https"}.intersection(_protocols(fs)):
            raise UnsupportedError(f"{urls.shown(url)}: http has no standard way to write files")
        return self if fs is self.fs else Filesystem(fs, self.secrets), place

    def open(self, url: str, window: int = WINDOW) -> ByteStore:
        """Open a file; if it is on this machine, open it directly."""
        place, shown, fs = self.place(url), urls.shown(url), self.fs
        is_cache = isinstance(fs, CachingFileSystem)
        # A block cache repeats the answer of the filesystem beneath.
        if isinstance(fs, WholeFileCacheFileSystem) if is_cache else getattr(fs, "local_file", False):
            return open_local(self._downloaded(place, shown) if is_cache else place, shown=shown)
        if is_cache:  # drop its blocks of a file of another version
            with self._turns.own:
                cached = fs._check_file(place)
                if cached and cached[0]["uid"] != checked(lambda: fs.fs.ukey(place), shown, self.secrets):
                    fs.pop_from_cache(place)
        return self._signed(place, shown, window) or StoredObject(self, place, shown, window)

    def is_folder(self, url: str) -> bool:
        """Return whether a URL is a folder; False if listing is forbidden, because a file could still be readable."""
        place = self.place(url)
        self.fs.invalidate_cache(place)
        try:
            return bool(self.ask(urls.shown(url), "isdir", place))
        except (FileNotFoundError, PermissionError, UnsupportedError):
            return False

    def ask(self, url: str, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the filesystem, and translate its errors."""
        return checked(lambda: _call(self.fs, name, *arguments, **named), url, self.secrets)

    def info(self, url: str, path: str) -> dict[str, Any]:
        """Return the store's information about a path; caches would list the folder, which http does not have."""

        def read() -> Any:
            fs = self._innermost()
            fs.invalidate_cache(path)
            method = getattr(fs, "_info", None) or fs.info
            refresh = {"refresh": True} if "refresh" in inspect.signature(method).parameters else {}
            return _call(fs, "info", path, **refresh)

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

    # ---- S3 through presigned URLs ----

    @cached_property
    def _client(self) -> Client:
        """The connections for presigned URLs."""
        from .http import Client

        verify = _settings(self.fs, "client_kwargs").get("verify")
        return Client({} if verify is None else {"verify": verify}, "s3")

    def _signed(self, place: str, shown: str, window: int) -> HttpStore | None:
        """Open an S3 object by a presigned URL; return None if s3fs has to read it, or may have a better error."""
        # `HttpStore` reads straight into the arrays' memory and sends If-Match, and opening takes one request, not two.
        fs = self.fs  # s3fs itself, not a cache of it
        config, keys = _settings(fs, "config_kwargs"), {*_settings(fs, "req_kw"), *_settings(fs, "kwargs")}
        if "s3" not in _protocols(fs) or not hasattr(fs, "call_s3") or _CONNECTION & {*config}:
            return None
        if any(key.startswith("SSECustomer") for key in {*keys, *_settings(fs, "s3_additional_kwargs")}):
            return None  # a customer's encryption key must be sent in headers

        def resolve() -> RequestTarget:
            req = _settings(self.fs, "req_kw")
            named = {key: value for key, value in req.items() if key == "RequestPayer" and value}
            url = str(self.ask(shown, "url", place, expires=_VALID, **named))
            signed = parse_qs(urls.divided(url).query or "").get("X-Amz-SignedHeaders", [""])[0].split(";")
            headers = {"x-amz-request-payer": named["RequestPayer"]} if "x-amz-request-payer" in signed else {}
            return target_of(url, headers)

        try:
            from .http import HttpStore, target_of

            return HttpStore(shown, resolve, self._client, window)
        except (FormatError, FileNotFoundError):
            raise
        except (RemoteError, ImportError) as error:
            debug("%s: read by s3fs, because a signed URL was refused: %s", shown, type(error).__name__)
        return None

    # ---- fsspec's caches ----

    def _downloaded(self, place: str, shown: str) -> str:
        """Return the path of the local copy, which a whole-file cache makes first."""
        fs = self.fs

        def fetch() -> str:
            with fs.open(place, "rb") as file:
                return str(os.path.abspath(file.name))

        with self._turns.own:
            try:
                name = checked(fetch, shown, self.secrets)
            except BaseException:
                cached = fs._check_file(place)  # otherwise the cache would serve the partial file
                with suppress(OSError, KeyError):
                    fs.pop_from_cache(place)
                if cached:
                    with suppress(OSError):
                        os.remove(cached[1] if isinstance(cached, tuple) else cached)
                raise
        if getattr(fs, "compression", None) is None:
            size = os.path.getsize(name)
            try:
                expected = self.info(shown, place)["size"]
            except Exception:  # the store is out of reach, and a cache is meant for that
                return name
            if isinstance(expected, int) and size != expected:
                text = f"the copy in the cache has {size:,} bytes, and the file {expected:,}"
                raise FormatError(f"{text}: delete {name}, or pass check_files=True", shown)
        return name

    # ---- the five calls ----

    def entries(self, place: str, shown: str) -> Iterator[tuple[Any, bool]]:
        self.fs.invalidate_cache(place)
        for entry in self.ask(shown, "ls", place, detail=True):
            fields = entry if isinstance(entry, Mapping) else {"name": entry}
            yield fields.get("name"), fields.get("type") == "directory"

    def stat(self, place: str, shown: str) -> tuple[int, str | None]:
        """Return the size of a file, and a strong ETag or the digest of everything else that the store reports."""
        info = self.info(shown, place)
        if info.get("type") == "directory":
            raise FormatError("this is a folder, not a file", shown)
        size, tag = checked_size(info.get("size"), shown), strong_etag(info)
        if tag is not None:
            return size, tag
        marks = self._marks(info, shown, place)
        if self._passing is None:
            # A field that differs in three calls is no mark; a single difference means a changed file.
            again = self._marks(self.info(shown, place), shown, place)
            passing = {name for name, _ in marks.items() ^ again.items()}
            if passing:
                marks = self._marks(self.info(shown, place), shown, place)
                passing &= {name for name, _ in marks.items() ^ again.items()}
            self._passing = frozenset(passing)
        return size, digest_of({name: mark for name, mark in marks.items() if name not in self._passing})

    def read(self, place: str, shown: str, begin: int, end: int, version: tuple[Any, ...]) -> Any:
        fs = self.fs
        if not isinstance(fs, CachingFileSystem):
            return _call(fs, "cat_file", place, start=begin, end=end)

        def read_in_turn() -> Any:
            with self._turns.own:
                return fs.cat_file(place, start=begin, end=end)

        return left_behind(read_in_turn)

    def write(self, source: str, place: str, shown: str) -> None:
        """Write a file; what an interrupted multipart upload leaves is for a lifecycle rule of the bucket to remove."""
        if isinstance(self.fs, LocalFileSystem):
            copy_whole(source, place)
        elif self._is_atomic():
            self.ask(shown, "put_file", source, place)
        else:  # to a hidden name in the same folder first
            folder, _, name = place.rpartition("/")
            temporary = f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"
            try:
                try:
                    self.ask(shown, "put_file", source, temporary)
                except FileNotFoundError:  # the folder is missing
                    self.ask(shown, "makedirs", folder, exist_ok=True)
                    self.ask(shown, "put_file", source, temporary)
                self.ask(shown, "mv", temporary, place)
            except BaseException:
                with suppress(Exception):  # it may not exist, and the first error is the one to raise
                    self.fs.rm_file(temporary)
                raise

    def delete(self, place: str, shown: str, *, folder: bool) -> None:
        if not folder:
            self.ask(shown, "rm_file", place)
        elif not self._is_atomic():  # there, folders are only parts of names
            with suppress(Exception):  # it may be missing, or have files
                self.fs.rmdir(place)

    def _is_atomic(self) -> bool:
        return not _ATOMIC.isdisjoint(_protocols(self.fs))

    def _marks(self, info: dict[str, Any], url: str, path: str) -> dict[str, str]:
        """Return the marks of a file, with the filesystem's own `ukey` if it has any."""
        fs, marks = self._innermost(), marks_of(info)
        own = getattr(type(fs), "ukey", None) not in (None, fsspec.AbstractFileSystem.ukey)
        # A wrapper repeats the `ukey` of the filesystem beneath.
        if own and self._has_ukey and getattr(fs, "fs", None) is None:
            try:
                marks["ukey"] = str(checked(lambda: left_behind(lambda: fs.ukey(path)), url, self.secrets))
            except Exception:
                if self._passing is not None:
                    raise
                self._has_ukey = False
        return marks


def key_of(url: str) -> object:
    """Return a key shared by all URLs of a filesystem; fsspec itself would make a filesystem per thread."""
    url = _SCHEME.sub(lambda match: match[0].lower(), url)
    *before, last = url.split("::")
    for link in url.split("::"):
        _check_package(urls.scheme_of(link) if "://" in link else link, urls.shown(url))
    if any(link.partition("://")[0] not in urls.CACHES or link.partition("://")[2] for link in before):
        return url  # a path in an archive
    cls = fsspec.get_filesystem_class(urls.scheme_of(last))
    return *before, urls.scheme_of(last), repr(sorted(cls._get_kwargs_from_urls(last).items()))


def _check_credentials(url: str, secrets: list[str]) -> None:
    """Refuse credentials that fsspec would mistake for a bucket, and add all others to the secrets of messages."""
    chain = urls.parsed(url)
    for link in chain:
        if link.scheme in _BUCKETS and (link.credentials is not None or link.hides_place):
            advice = "pass storage_options= or set the environment variables of the store's own tools"
            raise UnsupportedError(f"{urls.shown(url)}: {link.scheme}:// URLs cannot carry credentials: {advice}")
    known = {*secrets, *(text for link in chain for text in link.secrets if len(text) >= LEAST)}
    if len(known) > len(secrets):
        secrets[:] = sorted(known, key=len, reverse=True)


def _call(fs: Any, name: str, *arguments: Any, **named: Any) -> Any:
    """Call a method of a filesystem; `stop.current` and Ctrl-C abort it."""
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


def _renewed(fs: Any) -> Any:
    if isinstance(fs, AsyncFileSystem):
        options = {key: _renewed(value) for key, value in fs.storage_options.items()}
        return type(fs)(*map(_renewed, fs.storage_args), **options, skip_instance_cache=True)
    if isinstance(fs, CachingFileSystem):
        fs.fs = _renewed(fs.fs)
    return fs


def _protocols(fs: Any) -> tuple[str, ...]:
    """Return the names of a filesystem's scheme."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Copy options and the dicts inside, because fsspec changes nested dicts."""
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in options.items()}


def _check_package(scheme: str, shown: str) -> None:
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise UnsupportedError(f"{shown}: fsspec does not know the scheme {scheme}") from None
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        advice = f"pip install {package}" if package else str(error)
        text = f"{shown}: the scheme {scheme} needs a package that is not installed: {advice}"
        # fsspec itself says of any failure that packages should be installed; its cause says more.
        cause = error.__cause__
        missing = (getattr(cause, "name", None) or "").partition(".")[0]
        named = package == missing or missing in str(error)
        if cause is None or (missing and named and is_absent(missing)):
            raise ModuleNotFoundError(text, name=package) from None
        try:
            raise cause from None
        finally:
            del cause


# ---- presigned URLs ----

# Lifetime of a signature in seconds. Temporary credentials may expire earlier; the URL is then signed again.
_VALID = 3600
# Connection settings that our HTTP client does not support.
_CONNECTION = frozenset(("client_cert", "proxies", "proxies_config"))


def _settings(fs: Any, name: str) -> dict[str, Any]:
    return dict(getattr(fs, name, None) or {})
