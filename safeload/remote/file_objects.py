"""File objects as sources: `io.BytesIO`, open files, pipes, responses and other objects with ``read``.

A file object is read from its current position to its end, and its position is restored. There are four kinds:

1. `io.BytesIO`: its bytes are shared until its owner changes them.
2. Open regular files: a duplicate of the descriptor reads them, and maps them if the position is 0.
3. Other objects that can seek: read on demand, under a lock.
4. Pipes and decompressors: copied to a temporary file first, because they cannot seek, or decompress again if they do.
"""

from __future__ import annotations

import io
import os
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any, NoReturn

from ..core.files import WINDOW, ByteStore, Files, LocalStore, of_descriptor
from ..core.forking import ProcessLock
from ..core.text import show
from ..errors import FormatError, UnsupportedError, missing_file
from . import url as urls
from .remote_store import MemberStore, RemoteStore

# Modules of classes that seek by decompressing again from the beginning.
_DECOMPRESSORS = frozenset(
    ("gzip", "bz2", "lzma", "zipfile", "compression", "tarfile", "zlib", "zstandard", "pyzstd", "lz4")
)
# Bytes read at once.
_CHUNK = 1 << 20
# Paths of file objects begin like a URL, so callers cannot pass them as local paths: a number and a name follow.
_SCHEME = "file-object://"


class _Locked:
    """A file object's lock, shared by its stores: a seek and the read after it belong together."""

    def __init__(self, file: Any) -> None:
        self.file = file  # keeps its id
        self.lock = ProcessLock()

    @classmethod
    def of(cls, file: Any) -> _Locked:
        with _locks_lock.own:
            return _locks.setdefault(id(file), cls(file))

    @contextmanager
    def at(self, position: int, whence: int = os.SEEK_SET) -> Iterator[None]:
        """Move to a position, and back at the end."""
        with self.lock.own:
            before = self.file.tell()
            try:
                if (position, whence) != (before, os.SEEK_SET):
                    self.file.seek(position, whence)
                yield
            finally:
                self.file.seek(before)

    def end(self) -> int:
        with self.at(0, os.SEEK_END):
            return int(self.file.tell())


_locks: weakref.WeakValueDictionary[int, _Locked] = weakref.WeakValueDictionary()
_locks_lock = ProcessLock()


class FileObjectStore(RemoteStore):
    """The bytes of a file object from a position to its end, read on demand, or of an `io.BytesIO`."""

    here = True

    def __init__(self, source: _FileObject, locked: _Locked, start: int, data: bytes | None) -> None:
        end = locked.end() if data is None else len(data)
        source.refuse_end(end)
        super().__init__(source.name, (max(0, end - start), start if data is None else id(data)))
        self._locked: Any = locked  # None after `close`, like the data
        self._start, self._data = start, data

    def content(self, begin: int, end: int) -> memoryview:
        self.check_open()
        begin, end = self._start + begin, self._start + end
        if self._data is not None:
            content = memoryview(self._data)[begin:end]
        else:
            with self._locked.at(begin):
                content = _read(self._locked.file, end - begin, self.path)
        if len(content) < end - begin:
            at = begin + len(content) - self._start
            text = f"the file ends at byte {at}, but had {self.size} bytes when it was opened"
            raise FormatError(text, self.path, at)
        return content

    def confirm(self) -> None:
        self.check_open()
        if self._data is None and max(0, self._locked.end() - self._start) != self.size:
            raise FormatError("the file has changed since it was opened: its size differs", self.path)

    def close(self) -> None:
        super().close()
        self._locked = self._data = None


class _FileObject:
    """A file object of the caller, or a copy."""

    def __init__(self, file: Any) -> None:
        kind = type(file).__name__
        self.name = _name_of(file)
        if isinstance(file, io.TextIOBase) or hasattr(file, "encoding"):
            advice = "pass its .buffer" if hasattr(file, "buffer") else "open it in binary mode"
            raise TypeError(f"{self.name}: expected a binary file, got a text file ({kind}): {advice}")
        if hasattr(file, "namelist"):
            raise TypeError(f"expected a binary file, got an archive ({kind}): pass archive.open(member)")
        if getattr(file, "closed", False) is True:
            raise ValueError(f"{self.name}: the file object is closed")
        if not _answers(file, "readable", True):
            raise ValueError(f'{self.name}: the file object is open for writing only; open it with "rb"')
        can_seek = all(callable(getattr(file, name, None)) for name in ("seek", "tell"))
        self._start: int | None = None  # of an object that can seek
        self._head = b""  # taken from an object that cannot seek
        self._latest: LocalStore | None = None  # opened before, and perhaps after the file object was closed
        self._locked = _Locked.of(file)
        self._real = _descriptor(file)
        if can_seek and _answers(file, "seekable", True):
            with self._locked.lock.own:
                self._start = int(file.tell())
        # A device has no size, and a decompressor begins again.
        raw, kinds = getattr(file, "raw", file), {kind.__module__.partition(".")[0] for kind in type(file).__mro__}
        is_device = type(raw) is io.FileIO and os.name != "nt" and stat.S_ISCHR(os.fstat(raw.fileno()).st_mode)
        cheap = self._start is not None and _DECOMPRESSORS.isdisjoint(kinds) and not is_device
        self._seeks = self._real is not None or cheap

    def open(self) -> ByteStore:
        """Open the bytes from the first position to the end."""
        if self._latest is not None and not self._latest.closed:
            return self._local(self._latest.use(of_descriptor, self.name))
        file = self._locked.file
        if getattr(file, "closed", False) is True:
            raise ValueError(f"{self.name}: the file object is closed")
        if not self._seeks:  # a temporary file without a name takes its place
            with self._restored():
                file = temporary_copy(file, self._head, self.name)
            weakref.finalize(self, file.close)
            self._locked, self._real = _Locked.of(file), _descriptor(file)
            self._start, self._head, self._seeks = 0, b"", True
        if self._real is not None:
            if _answers(file, "writable", False):
                file.flush()
            return self._local(of_descriptor(self._real, self.name))
        # If the owner of an `io.BytesIO` writes, it writes to a copy.
        data = file.getvalue() if type(file) is io.BytesIO else None
        return FileObjectStore(self, self._locked, self._start or 0, data)

    def _local(self, store: LocalStore) -> ByteStore:
        self._latest, start = store, self._start or 0
        self.refuse_end(store.size)
        return MemberStore(store, (start, store.size - start), self.name) if start else store

    def refuse_end(self, end: int) -> None:
        if self._start and self._start >= end:
            text = f"nothing to read: its position, {self._start:,}, is at the end; call seek(0) first"
            raise FormatError(text, self.name)

    def head(self, size: int) -> bytes | None:
        """Return the first bytes of an object that must be copied, or None if it is short or need not be copied."""
        if self._seeks or self._head:
            return None
        with self._restored():
            head = bytes(_read(self._locked.file, size, self.name))
            if self._start is None:
                self._head = head
        return head if len(head) == size else None

    def _restored(self) -> Any:
        """Begin at the first position, and return to it at the end, if the object can seek."""
        return self._locked.lock.own if self._start is None else self._locked.at(self._start)


def _name_of(file: Any) -> str:
    for attribute in ("name", "url"):
        name = getattr(file, attribute, None)
        if isinstance(name, bytes):
            name = os.fsdecode(name)
        if isinstance(name, int) and not isinstance(name, bool):
            return f"file descriptor {name}"
        if isinstance(name, str) and name and (attribute == "name" or urls.is_url(name)):
            return urls.shown(name) if urls.is_url(name) else name
    return type(file).__name__


def _answers(file: Any, method: str, default: bool) -> bool:
    """Return the answer of ``readable``, ``writable`` or ``seekable``."""
    function = getattr(file, method, None)
    return bool(function()) if callable(function) else default


def _descriptor(file: Any) -> int | None:
    """Return the descriptor of a regular file; None on Windows, and for classes that may unpack what it reads."""
    if os.name == "nt":
        return None
    if type(file).__module__ == "tempfile" and type(file).__name__ == "_TemporaryFileWrapper":
        file = file.file
    raw = file.raw if type(file) in (io.BufferedReader, io.BufferedRandom) else file
    if type(raw) is not io.FileIO:
        return None
    number = raw.fileno()
    return number if stat.S_ISREG(os.fstat(number).st_mode) else None


def temporary_copy(file: Any, head: bytes, name: str) -> IO[bytes]:
    """Copy a stream, after its first bytes, to a temporary file without a name, and return it at its end."""
    with ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryFile(prefix="safeload-"))
        out.write(head)
        while part := _part(file, _CHUNK, name):
            out.write(part)
        out.flush()
        stack.pop_all()
        return out


def _part(file: Any, size: int, name: str) -> bytes:
    """Return the next bytes, or none at the end."""
    part = file.read(size)
    if part is None:
        raise BlockingIOError(f"{name}: the file object is non-blocking and has no bytes yet; make it blocking")
    if not isinstance(part, (bytes, bytearray, memoryview)):
        raise TypeError(f"{name}: read() must return bytes, got {type(part).__name__}; open the file in binary mode")
    part = bytes(part)
    if len(part) > size:
        raise FormatError(f"read({size}) returned {len(part):,} bytes", name)
    return part


def _read(file: Any, size: int, name: str) -> memoryview:
    """Return the next bytes; fewer only at the end."""
    view, count = memoryview(bytearray(size)), 0
    while count < size:
        part = _part(file, min(size - count, _CHUNK), name)
        if not part:
            break
        view[count : count + len(part)] = part
        count += len(part)
    return view[:count]


class FileObjects(Files):
    """The file objects of a call. Paths are their names with a number; other paths are files of this machine."""

    remote = True

    def __init__(self) -> None:
        self._sources: dict[str, _FileObject] = {}

    def __repr__(self) -> str:
        return f"<FileObjects {', '.join(map(self.shown, self._sources))}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r}: file objects cannot be pickled")

    def add(self, file: Any) -> str:
        """Add a file object, and return its path."""
        source = _FileObject(file)
        path = f"{_SCHEME}{len(self._sources)}/{source.name}"
        self._sources[path] = source
        return path

    def heads(self, size: int) -> Iterator[tuple[str, bytes]]:
        """Yield names and first bytes of the objects that must be copied before they are opened."""
        for source in self._sources.values():
            head = source.head(size)
            if head is not None:
                yield source.name, head

    def is_local(self, path: str) -> bool:
        return not path.startswith(_SCHEME)

    def open(self, path: str, window: int = WINDOW) -> ByteStore:
        source = self._sources.get(path)
        if source is not None:
            return source.open()
        if path.startswith(_SCHEME):
            raise missing_file(self.shown(path), f"No such file object: {show(self.shown(path))}")
        return super().open(path)

    def is_folder(self, path: str) -> bool:
        return not path.startswith(_SCHEME) and super().is_folder(path)

    def listing(self, folder: str) -> list[tuple[str, bool]]:
        return [] if folder == _SCHEME else super().listing(folder)

    def join(self, folder: str, name: str) -> str:
        """Return the path of a name beside a file object: another file object with this name, or a missing one."""
        if folder != _SCHEME:
            return super().join(folder, name)
        paths = (path for path, source in self._sources.items() if os.path.basename(source.name) == name)
        return next(paths, f"{_SCHEME}/{name}")

    def split(self, path: str) -> tuple[str, str]:
        return (_SCHEME, os.path.basename(self.shown(path))) if path.startswith(_SCHEME) else super().split(path)

    def shown(self, path: str) -> str:
        return path.removeprefix(_SCHEME).partition("/")[2] if path.startswith(_SCHEME) else path

    def public(self, path: str) -> str:
        if path.startswith(_SCHEME):
            raise UnsupportedError(f"{self.shown(path)}: a file object stays in this process; pass a path instead")
        return super().public(path)

    def public_options(self) -> NoReturn:
        raise UnsupportedError(f"{self!r}: file objects stay in this process; pass paths to other processes")
