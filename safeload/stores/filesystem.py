"""URLs that fsspec reads, and those of files on this machine, as a `Backend`."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..base.url import CACHES, parsed, unescaped
from ..errors import FormatError, UnsupportedError, missing_file
from . import url as urls
from .foreign_errors import checked
from .local import LocalStore, open_local, replace
from .options import secrets_of, secrets_of_urls
from .presigned import Signer
from .store import ByteStore
from .thread_group import each

if TYPE_CHECKING:
    from .fsspec_store import FsspecHandle

# What to install for a scheme; fsspec itself names the package for all others.
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
# Filesystems whose `put_file` shows a file when all of it has arrived.
_ATOMIC = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "oss", "oci", "tos"))
_SCHEME = re.compile(r"(?:^|(?<=::))[A-Za-z][A-Za-z0-9+.-]+(?=://)")
# Schemes whose buckets have no user and no password.
_BUCKETS = frozenset(("s3", "s3a", "gs", "gcs"))


class LocalUrls:
    """``file://`` URLs."""

    def open(self, url: str) -> LocalStore:
        """See `Backend`."""
        shown = urls.shown(url)
        try:
            return open_local(urls.local_path(url), shown=shown)
        except FileNotFoundError:
            raise missing_file(shown, f"No such file or directory: {shown}") from None

    def is_folder(self, url: str) -> bool:
        """See `Backend`."""
        return os.path.isdir(urls.local_path(url))

    def listing(self, url: str) -> list[tuple[str, bool]]:
        """See `Backend`."""
        with os.scandir(urls.local_path(url)) as entries:
            return sorted((entry.name, entry.is_dir()) for entry in entries)

    def upload(self, source: str, url: str) -> None:
        """See `Backend`."""
        _copy(source, urls.local_path(url), urls.shown(url))

    def remove(self, several: Sequence[str]) -> None:
        """See `Backend`."""
        for url in several:
            with suppress(FileNotFoundError):
                os.remove(urls.local_path(url))

    def check_writable(self, url: str) -> None:
        """See `Backend`."""


class Filesystem:
    """A filesystem of fsspec.

    Args:
        fs: of the caller's, or of `of_url`'s.
        options: ``storage_options`` of the URLs that are opened; None for a filesystem of the caller's.
    """

    def __init__(self, fs: Any = None, options: Mapping[str, Any] | None = None) -> None:
        _need_fsspec("a filesystem")
        self._options = _copied(options or {})
        self._known: dict[object, FsspecHandle] = {}
        self._own: FsspecHandle | None = None
        self._signer = Signer()
        self._secrets = secrets_of(self._options)
        if fs is not None:
            from .fsspec_store import FsspecHandle

            self._secrets = secrets_of(getattr(fs, "storage_options", None))
            self._own = FsspecHandle(fs, self._secrets)

    @property
    def escapes(self) -> bool:
        """Whether paths in URLs are escaped, by fsspec's http or by `objects.of_fsspec`."""
        return self._own is not None and is_escaped(self._own.fs)

    def __repr__(self) -> str:
        return "<Filesystem>"  # options are secrets

    @classmethod
    def of_url(cls, url: str, options: Mapping[str, Any]) -> Filesystem:
        """The filesystems of all URLs of the same scheme, or chain of schemes.

        Args:
            url: one of them.
            options: ``storage_options``, see ``fsspec.core.url_to_fs``.

        Raises:
            ImportError: a package is missing; the message names it.
            UnsupportedError: fsspec does not know the scheme.
        """
        _need_fsspec(urls.shown(url))
        made = cls(None, options)
        made._find(url)
        return made

    def _find(self, url: str) -> tuple[FsspecHandle, str]:
        """The filesystem of a URL, and the path in it."""
        self._check_credentials(url)
        if self._own is not None:
            local = self.escapes and urls.scheme_of(url) == "file"
            return self._own, str(self._own.fs._strip_protocol(unescaped(url) if local else url))
        from fsspec.core import url_to_fs

        from .fsspec_store import FsspecHandle

        url = _SCHEME.sub(lambda match: match[0].lower(), url)  # fsspec knows them in lower case only
        key = self._key(url)
        handle = self._known.get(key)
        if handle is not None and key != url:
            return handle, str(handle.fs._strip_protocol(url.rpartition("::")[2]))
        shown = urls.shown(url)
        options = _copied(self._options)  # fsspec changes what is in nested ones
        if urls.scheme_of(url) in ("s3", "s3a"):  # by itself botocore signs as AWS and others no longer accept
            options["config_kwargs"] = {"signature_version": "s3v4", **(options.get("config_kwargs") or {})}
        fs, path = checked(lambda: url_to_fs(url, **options), shown, self._secrets)
        return self._known.setdefault(key, FsspecHandle(fs, self._secrets)), str(path)

    def _check_credentials(self, url: str) -> None:
        """Refuse credentials where fsspec takes them for a bucket, and keep all others out of messages."""
        chain = parsed(url)
        for link in chain:
            if link.scheme in _BUCKETS and (link.credentials is not None or link.hides_place):
                raise UnsupportedError(
                    f"{urls.shown(url)}: {link.scheme}:// URLs have no credentials: pass storage_options= or set the "
                    "variables of the store's own tools"
                )
        known = {*self._secrets, *secrets_of_urls(chain)}
        if len(known) > len(self._secrets):  # in place: open files have the list, too
            self._secrets[:] = sorted(known, key=len, reverse=True)

    def _key(self, url: str) -> object:
        """The same for URLs of one filesystem. fsspec would make one for each thread, with a cache of its own."""
        import fsspec

        *before, last = url.split("::")
        for link in url.split("::"):
            _check_package(urls.scheme_of(link) if "://" in link else link, urls.shown(url))
        if any(link.partition("://")[0] not in CACHES or link.partition("://")[2] for link in before):
            return url  # a path in an archive
        cls = fsspec.get_filesystem_class(urls.scheme_of(last))
        return *before, urls.scheme_of(last), repr(sorted(cls._get_kwargs_from_urls(last).items()))

    def open(self, url: str) -> ByteStore:
        """See `Backend`. A file that the filesystem has on this machine is opened there."""
        from .fsspec_store import FsspecStore

        handle, path = self._find(url)
        shown = urls.shown(url)
        if _has_files(handle.fs):
            return open_local(self._downloaded(handle, path, shown), shown=shown)
        self._drop_outdated(handle, path, shown)
        signed = self._signer.open(handle, path, shown) if _is_s3(handle.fs) else None
        return FsspecStore(handle, path, shown) if signed is None else signed

    def _downloaded(self, handle: FsspecHandle, path: str, shown: str) -> str:
        """The path of a local copy, which a whole-file cache makes first."""
        from fsspec.implementations.cached import CachingFileSystem

        fs = handle.fs
        if not isinstance(fs, CachingFileSystem):
            return str(path)

        def fetch() -> str:
            with fs.open(path, "rb") as file:
                name: str = os.path.abspath(file.name)
                return name

        assert handle.turns is not None
        with handle.turns.own:
            complete = False
            try:
                name = checked(fetch, shown, self._secrets)
                complete = True
            finally:
                if not complete:  # the cache would take what there is for the file
                    _forget(fs, path)
        if getattr(fs, "compression", None) is None:
            self._check_size(handle, path, name, shown)
        return name

    def _check_size(self, handle: FsspecHandle, path: str, name: str, shown: str) -> None:
        try:
            whole = handle.info(shown, path)["size"]
        except Exception:  # the store is out of reach, and the cache is there for that
            return
        if isinstance(whole, int) and os.path.getsize(name) != whole:
            raise FormatError(
                f"the copy in the cache has {os.path.getsize(name):,} bytes, and the file {whole:,}: "
                f"delete {name}, or give check_files=True",
                shown,
            )

    def _drop_outdated(self, handle: FsspecHandle, path: str, shown: str) -> None:
        """Has a block cache forget blocks of another version than the one that the store has now."""
        from fsspec.implementations.cached import CachingFileSystem

        fs = handle.fs
        if isinstance(fs, CachingFileSystem):
            assert handle.turns is not None
            with handle.turns.own:
                found = fs._check_file(path)
                if found and found[0]["uid"] != checked(lambda: fs.fs.ukey(path), shown, self._secrets):
                    fs.pop_from_cache(path)

    def is_folder(self, url: str) -> bool:
        """See `Backend`. Where nothing may be listed there are no folders: a single file can be read all the same."""
        handle, path = self._find(url)
        handle.fs.invalidate_cache(path)
        try:
            return bool(handle.ask(urls.shown(url), "isdir", path))
        except (FileNotFoundError, PermissionError, UnsupportedError):
            return False

    def listing(self, url: str) -> list[tuple[str, bool]]:
        """See `Backend`."""
        handle, path = self._find(url)
        handle.fs.invalidate_cache(path)
        found = handle.ask(urls.shown(url), "ls", path, detail=True)
        here = path.rstrip("/")
        entries = {(entry["name"].rstrip("/"), entry["type"] == "directory") for entry in found}
        return sorted((name.rpartition("/")[2], folder) for name, folder in entries if name != here)

    def upload(self, source: str, url: str) -> None:
        """See `Backend`.

        A multipart upload that is broken off leaves parts in the store that no listing shows: a rule of the bucket
        removes them.
        """
        from fsspec.implementations.local import LocalFileSystem

        handle, path = self._find_to_write(url)
        shown = urls.shown(url)
        if isinstance(handle.fs, LocalFileSystem):
            _copy(source, path, shown)
        elif _ATOMIC.intersection(_protocols(handle.fs)):
            handle.ask(shown, "put_file", source, path)
        else:
            self._move_in(handle, source, path, shown)

    def remove(self, several: Sequence[str]) -> None:
        """See `Backend`."""

        def remove_one(url: str) -> None:
            handle, path = self._find_to_write(url)
            with suppress(FileNotFoundError):
                handle.ask(urls.shown(url), "rm_file", path)

        each(remove_one, several)

    def check_writable(self, url: str) -> None:
        """See `Backend`."""
        self._find_to_write(url)

    def _find_to_write(self, url: str) -> tuple[FsspecHandle, str]:
        """`_find`, behind all caches.

        Raises:
            UnsupportedError: it is one of those that cannot be written to.
        """
        from fsspec.implementations.cached import CachingFileSystem

        from .fsspec_store import FsspecHandle

        handle, path = self._find(url)
        while isinstance(handle.fs, CachingFileSystem):
            handle = FsspecHandle(handle.fs.fs, self._secrets)
        if {"http", "https"}.intersection(_protocols(handle.fs)):
            raise UnsupportedError(f"{urls.shown(url)}: http has no standard way to write files")
        return handle, path

    def _move_in(self, handle: FsspecHandle, source: str, path: str, shown: str) -> None:
        """Uploads to a hidden name in the same folder, and renames."""
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"
        try:
            handle.ask(shown, "put_file", source, temporary)
            handle.ask(shown, "mv", temporary, path)
            temporary = ""
        finally:
            if temporary:
                with suppress(Exception):  # it may not even be there; the error that led here is raised
                    handle.fs.rm_file(temporary)


def _has_files(fs: Any) -> bool:
    """Whether what it opens is a file on this machine; a block cache says what the filesystem beneath it says."""
    from fsspec.implementations.cached import CachingFileSystem, WholeFileCacheFileSystem

    if isinstance(fs, CachingFileSystem):
        return isinstance(fs, WholeFileCacheFileSystem)
    return bool(getattr(fs, "local_file", False))


def is_escaped(fs: Any) -> bool:
    """Whether paths in URLs of a filesystem, or of the one behind caches, are escaped."""
    while getattr(fs, "fs", None) is not None:
        fs = fs.fs
    return not {"http", "https", "file"}.isdisjoint(_protocols(fs))


def _protocols(fs: Any) -> tuple[str, ...]:
    """The names of a filesystem's scheme."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _is_s3(fs: Any) -> bool:
    """Whether it is s3fs itself, not a cache of it."""
    return "s3" in _protocols(fs) and hasattr(fs, "call_s3")


def _copy(source: str, path: str, shown: str) -> None:
    folder, name = os.path.split(path)
    os.makedirs(folder or ".", exist_ok=True)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    try:
        shutil.copyfile(source, temporary)
        replace(temporary, path, shown)
    except BaseException:
        with suppress(OSError):
            os.remove(temporary)
        raise


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of options, down to the dicts in them: fsspec changes those."""
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in options.items()}


def _forget(fs: Any, path: str) -> None:
    """Removes a file from a whole-file cache."""
    found = fs._check_file(path)
    with suppress(OSError, KeyError):
        fs.pop_from_cache(path)
    if found:
        with suppress(OSError):
            os.remove(found[1] if isinstance(found, tuple) else found)


def _need_fsspec(what: str) -> None:
    try:
        import fsspec  # noqa: F401
    except ImportError as error:
        if error.name != "fsspec":
            raise
        raise ModuleNotFoundError(
            f"{what} needs fsspec, which is not installed: pip install fsspec", name="fsspec"
        ) from None


def _check_package(scheme: str, shown: str) -> None:
    import fsspec

    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise UnsupportedError(f"{shown}: fsspec does not know the scheme {scheme}") from None
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        advice = f"pip install {package}" if package else str(error)
        raise ModuleNotFoundError(
            f"{shown}: the scheme {scheme} needs a package that is not installed: {advice}", name=package
        ) from None
