"""Files of fsspec's filesystems: calls that can be ended, ranges, versions, and errors in safeload's words."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.cached import CachingFileSystem

from ..base import log
from ..base.forking import ProcessLock
from ..errors import FormatError, RemoteError, UnsupportedError
from .foreign_errors import again, changed, checked
from .remote import RemoteStore, fill
from .stop import current
from .store import Span

# Seconds after which signals are handled while a call goes on in fsspec's thread: Windows interrupts no waiting.
_TICK = 0.2
# Keys of `info` that tell one content from another, the most exact first.
_VERSIONS = (
    "generation", "ETag", "etag", "e_tag", "VersionId", "version_id", "md5Hash", "content_md5", "md5", "xet_hash",
    "blob_id", "sha", "CRC", "checksum", "chksum", "mtime", "LastModified", "last_modified", "modified", "updated",
    "timeModified", "created",
)  # fmt: skip


class FsspecHandle:
    """A filesystem of fsspec that works in every process.

    An asynchronous one belongs to the thread that runs its event loop, which a fork does not copy.

    Args:
        fs: the filesystem.
        secrets: texts that no message may have.
    """

    def __init__(self, fs: Any, secrets: list[str]) -> None:
        self._fs = _usable(fs)
        self._process = os.getpid()
        self.secrets = secrets
        # A block cache shares its list of blocks between the files of all threads.
        self.turns = ProcessLock() if isinstance(fs, CachingFileSystem) else None

    @property
    def fs(self) -> Any:
        """The filesystem, in a forked process one of its own."""
        if self._process != os.getpid():
            self._fs, self._process = _renewed(self._fs), os.getpid()
        return self._fs

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Calls a method of the filesystem; the call ends with `stop.current`, and by Ctrl-C."""
        return self._call(self.fs, name, *arguments, **named)

    def _call(self, fs: Any, name: str, *arguments: Any, **named: Any) -> Any:
        if not isinstance(fs, AsyncFileSystem) or getattr(fs, "fs", None) is not None:  # a wrapper decides by itself
            return getattr(fs, name)(*arguments, **named)
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
        """`call`, with errors in safeload's words."""
        return checked(lambda: self.call(name, *arguments, **named), url, self.secrets)

    def info(self, url: str, path: str) -> dict[str, Any]:
        """What the store says about a path now, not what a cache says.

        Nor does it ask a cache, which looks into the folder: http has none.
        """

        def read() -> Any:
            fs = self.fs
            while isinstance(fs, CachingFileSystem):
                fs = fs.fs
            fs.invalidate_cache(path)
            method = getattr(fs, "_info", None) or fs.info
            again = {"refresh": True} if "refresh" in inspect.signature(method).parameters else {}
            return self._call(fs, "info", path, **again)

        return dict(checked(read, url, self.secrets))


def _usable(fs: Any) -> Any:
    # One that was made for a program's own event loop has none that other threads may use.
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


def version_of(info: dict[str, Any]) -> tuple[Any, ...]:
    """The version of a file by what `info` says: its size, and the first thing that tells its content from another."""
    found = next((info[key] for key in _VERSIONS if info.get(key) not in (None, "")), None)
    return info["size"], None if found is None else str(found)


class FsspecStore(RemoteStore):
    """A file of a filesystem, read by ranges. Each lands in memory of its own: not all that reads it can be ended.

    Args:
        handle: the filesystem.
        place: the path in it.
        url: as messages show it.
    """

    def __init__(self, handle: FsspecHandle, place: str, url: str) -> None:
        super().__init__()
        self.path = url
        self._handle = handle
        self._place = place
        info = handle.info(url, place)
        if info.get("type") == "directory":
            raise FormatError("this is a folder, not a file", url)
        if not isinstance(info.get("size"), int):
            raise UnsupportedError(f"{url}: the store does not say how long the file is, so it gives no ranges of it")
        self.size = info["size"]
        self.version = version_of(info)
        log.debug("%s: opened by %s", url, type(handle.fs).__name__)

    def read_spans(self, spans: Sequence[Span]) -> None:
        """Fills spans, see `RemoteStore.read_spans`."""
        begin, end = spans[0].offset, spans[-1].end
        fill(spans, begin, again(lambda: self._range(begin, end), self.path, self._handle.secrets, begin, end))

    def _range(self, begin: int, end: int) -> bytes:
        turns = self._handle.turns
        if turns is None:
            content = self._handle.call("cat_file", self._place, start=begin, end=end)
        else:
            with turns.own:
                content = self._handle.call("cat_file", self._place, start=begin, end=end)
        if len(content) == end - begin:
            return bytes(content)
        if len(content) > end - begin:
            raise UnsupportedError(f"{self.path}: the store does not give ranges of this file")
        self.confirm()
        raise RemoteError(f"{len(content):,} bytes came instead of {end - begin:,}", self.path, begin, end)

    def confirm(self) -> None:
        """Asks for the version once more."""
        found = version_of(self._handle.info(self.path, self._place))
        if found != self.version:
            raise changed(self.path, self.size, found[0])
