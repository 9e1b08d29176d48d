"""URLs read by fsspec, and ``file://`` URLs, each as a `Backend`."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..base.absent import is_absent, not_installed
from ..base.url import CACHES, parsed, unescaped
from ..errors import FormatError, UnsupportedError, missing_file
from . import url as urls
from .foreign_errors import checked
from .local import LocalStore, open_local, replace
from .options import secrets_of, secrets_of_urls
from .remote import checked_name
from .store import WINDOW, ByteStore
from .thread_group import each

if TYPE_CHECKING:
    from .fsspec_store import FsspecHandle

# The package to install for a scheme; fsspec itself names the package for other schemes.
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
# In these filesystems, `put_file` makes a file visible only when it is complete.
_ATOMIC = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "oss", "oci", "tos"))
_SCHEME = re.compile(r"(?:^|(?<=::))[A-Za-z][A-Za-z0-9+.-]+(?=://)")
# URLs with these schemes cannot carry a user and a password.
_BUCKETS = frozenset(("s3", "s3a", "gs", "gcs"))


class LocalUrls:
    """``file://`` URLs."""

    def open(self, url: str, window: int = WINDOW) -> LocalStore:
        shown = urls.shown(url)
        try:
            return open_local(urls.local_path(url), shown=shown)
        except FileNotFoundError:
            raise missing_file(shown, f"No such file or directory: {shown}") from None

    def is_folder(self, url: str) -> bool:
        return os.path.isdir(urls.local_path(url))

    def listing(self, url: str) -> list[tuple[str, bool]]:
        with os.scandir(urls.local_path(url)) as entries:
            return sorted((entry.name, entry.is_dir()) for entry in entries)

    def upload(self, source: str, url: str) -> None:
        _copy(source, urls.local_path(url), urls.shown(url))

    def remove(self, targets: Sequence[str]) -> None:
        for url in targets:
            if url.endswith("/"):
                with suppress(OSError):  # it may be missing, or have files
                    os.rmdir(urls.local_path(url))
                continue
            with suppress(FileNotFoundError):
                os.remove(urls.local_path(url))

    def check_writable(self, url: str) -> None:
        pass


class Filesystem:
    """A filesystem of fsspec."""

    def __init__(self, fs: Any = None, options: Mapping[str, Any] | None = None) -> None:
        _need_fsspec("a filesystem")
        from .fsspec_store import Signer

        self._handles = FsspecHandles(fs, options)
        self._signer = Signer()

    @property
    def escapes(self) -> bool:
        """Whether paths in URLs are escaped, by fsspec's http or by `object_store.of_fsspec`."""
        own = self._handles.own
        return own is not None and is_escaped(own.fs)

    def __repr__(self) -> str:
        return "<Filesystem>"  # options are secret

    def open(self, url: str, window: int = WINDOW) -> ByteStore:
        """Open a file; if it is on this machine, open it directly."""
        from .fsspec_store import FsspecStore

        handle, path = self._handles.find(url)
        shown = urls.shown(url)
        if _has_files(handle.fs):
            return open_local(_downloaded(handle, path, shown), shown=shown)
        _drop_outdated(handle, path, shown)
        signed = self._signer.open(handle, path, shown, window) if _is_s3(handle.fs) else None
        return FsspecStore(handle, path, shown, window) if signed is None else signed

    def is_folder(self, url: str) -> bool:
        """Return whether a URL is a folder; False if listing is forbidden, because a file could still be readable."""
        handle, path = self._handles.find(url)
        handle.fs.invalidate_cache(path)
        try:
            return bool(handle.ask(urls.shown(url), "isdir", path))
        except (FileNotFoundError, PermissionError, UnsupportedError):
            return False

    def listing(self, url: str) -> list[tuple[str, bool]]:
        handle, path = self._handles.find(url)
        handle.fs.invalidate_cache(path)
        shown = urls.shown(url)
        details = handle.ask(shown, "ls", path, detail=True)
        entries = set()
        for entry in details:
            fields = entry if isinstance(entry, Mapping) else {"name": entry}
            name = checked_name(fields.get("name"), shown)
            if fields["name"].rstrip("/") != path.rstrip("/"):
                entries.add((name, fields.get("type") == "directory"))
        return sorted(entries)

    def upload(self, source: str, url: str) -> None:
        """Upload a file.

        An interrupted multipart upload leaves hidden parts in the store; a lifecycle rule of the bucket should remove
        such parts.
        """
        from fsspec.implementations.local import LocalFileSystem

        handle, path = self._handles.find_writable(url)
        shown = urls.shown(url)
        if isinstance(handle.fs, LocalFileSystem):
            _copy(source, path, shown)
        elif _ATOMIC.intersection(_protocols(handle.fs)):
            handle.ask(shown, "put_file", source, path)
        else:
            _upload_and_rename(handle, source, path, shown)

    def remove(self, targets: Sequence[str]) -> None:
        def remove_one(url: str) -> None:
            handle, path = self._handles.find_writable(url)
            if url.endswith("/"):
                if not _ATOMIC.intersection(_protocols(handle.fs)):  # there, folders are only parts of names
                    with suppress(Exception):  # it may be missing, or have files
                        handle.fs.rmdir(path)
                return
            with suppress(FileNotFoundError):
                handle.ask(urls.shown(url), "rm_file", path)

        each(remove_one, targets)

    def check_writable(self, url: str) -> None:
        self._handles.find_writable(url)


def filesystem_of(url: str, options: Mapping[str, Any]) -> Filesystem:
    """Return the filesystem for all URLs with the same scheme or chain of schemes."""
    _need_fsspec(urls.shown(url))
    filesystem = Filesystem(None, options)
    filesystem._handles.find(url)
    return filesystem


class FsspecHandles:
    """Finds the fsspec filesystem of a URL, and keeps a handle per filesystem."""

    def __init__(self, fs: Any, options: Mapping[str, Any] | None) -> None:
        self._options = _copied(options or {})
        self._known: dict[object, FsspecHandle] = {}
        self._secrets = secrets_of(self._options)
        self.own: FsspecHandle | None = None  # the caller's filesystem
        if fs is not None:
            from .fsspec_store import FsspecHandle

            self._secrets = secrets_of(getattr(fs, "storage_options", None))
            self.own = FsspecHandle(fs, self._secrets)

    def find(self, url: str) -> tuple[FsspecHandle, str]:
        """Return the filesystem of a URL, and the path in it."""
        self._check_credentials(url)
        if self.own is not None:
            local = is_escaped(self.own.fs) and urls.scheme_of(url) == "file"
            return self.own, str(self.own.fs._strip_protocol(unescaped(url) if local else url))
        from fsspec.core import url_to_fs

        from .fsspec_store import FsspecHandle

        url = _SCHEME.sub(lambda match: match[0].lower(), url)  # fsspec knows schemes in lower case only
        key = _cache_key(url)
        handle = self._known.get(key)
        if handle is not None and key != url:
            return handle, str(handle.fs._strip_protocol(url.rpartition("::")[2]))
        shown = urls.shown(url)
        options = _copied(self._options)  # fsspec changes nested options
        if urls.scheme_of(url) in ("s3", "s3a"):  # AWS no longer accepts botocore's default signature
            options["config_kwargs"] = {"signature_version": "s3v4", **(options.get("config_kwargs") or {})}
        fs, path = checked(lambda: url_to_fs(url, **options), shown, self._secrets)
        return self._known.setdefault(key, FsspecHandle(fs, self._secrets)), str(path)

    def find_writable(self, url: str) -> tuple[FsspecHandle, str]:
        """Like `find`, but behind all caches."""
        from fsspec.implementations.cached import CachingFileSystem

        from .fsspec_store import FsspecHandle

        handle, path = self.find(url)
        while isinstance(handle.fs, CachingFileSystem):
            handle = FsspecHandle(handle.fs.fs, self._secrets)
        if {"http", "https"}.intersection(_protocols(handle.fs)):
            raise UnsupportedError(f"{urls.shown(url)}: http has no standard way to write files")
        return handle, path

    def _check_credentials(self, url: str) -> None:
        """Refuse credentials that fsspec would mistake for a bucket, and keep all others out of messages."""
        chain = parsed(url)
        for link in chain:
            if link.scheme in _BUCKETS and (link.credentials is not None or link.hides_place):
                raise UnsupportedError(
                    f"{urls.shown(url)}: {link.scheme}:// URLs cannot carry credentials: pass storage_options= or set "
                    "the environment variables of the store's own tools"
                )
        known = {*self._secrets, *secrets_of_urls(chain)}
        if len(known) > len(self._secrets):  # in place, because open files share the list
            self._secrets[:] = sorted(known, key=len, reverse=True)


def _cache_key(url: str) -> object:
    """Return a key shared by all URLs of a filesystem; fsspec itself would make a filesystem per thread."""
    import fsspec

    *before, last = url.split("::")
    for link in url.split("::"):
        _check_package(urls.scheme_of(link) if "://" in link else link, urls.shown(url))
    if any(link.partition("://")[0] not in CACHES or link.partition("://")[2] for link in before):
        return url  # a path in an archive
    cls = fsspec.get_filesystem_class(urls.scheme_of(last))
    return *before, urls.scheme_of(last), repr(sorted(cls._get_kwargs_from_urls(last).items()))


# ---- fsspec's caches ----


def _downloaded(handle: FsspecHandle, path: str, shown: str) -> str:
    """Return the path of the local copy, which a whole-file cache makes first."""
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
            name = checked(fetch, shown, handle.secrets)
            complete = True
        finally:
            if not complete:  # otherwise the cache would serve the partial file
                _forget(fs, path)
    if getattr(fs, "compression", None) is None:
        _check_size(handle, path, name, shown)
    return name


def _check_size(handle: FsspecHandle, path: str, name: str, shown: str) -> None:
    try:
        expected = handle.info(shown, path)["size"]
    except Exception:  # the store is out of reach, and a cache is meant for that
        return
    if isinstance(expected, int) and os.path.getsize(name) != expected:
        raise FormatError(
            f"the copy in the cache has {os.path.getsize(name):,} bytes, and the file {expected:,}: "
            f"delete {name}, or pass check_files=True",
            shown,
        )


def _drop_outdated(handle: FsspecHandle, path: str, shown: str) -> None:
    """Drop a block cache's blocks of a file if its version in the store has changed."""
    from fsspec.implementations.cached import CachingFileSystem

    fs = handle.fs
    if isinstance(fs, CachingFileSystem):
        assert handle.turns is not None
        with handle.turns.own:
            cached = fs._check_file(path)
            if cached and cached[0]["uid"] != checked(lambda: fs.fs.ukey(path), shown, handle.secrets):
                fs.pop_from_cache(path)


def _forget(fs: Any, path: str) -> None:
    """Remove a file from a whole-file cache."""
    cached = fs._check_file(path)
    with suppress(OSError, KeyError):
        fs.pop_from_cache(path)
    if cached:
        with suppress(OSError):
            os.remove(cached[1] if isinstance(cached, tuple) else cached)


# ---- writing ----


def _upload_and_rename(handle: FsspecHandle, source: str, path: str, shown: str) -> None:
    """Upload to a hidden name in the same folder, then rename."""
    folder, _, name = path.rpartition("/")
    temporary = f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"
    try:
        try:
            handle.ask(shown, "put_file", source, temporary)
        except FileNotFoundError:  # the folder is missing
            handle.ask(shown, "makedirs", folder, exist_ok=True)
            handle.ask(shown, "put_file", source, temporary)
        handle.ask(shown, "mv", temporary, path)
        temporary = ""
    finally:
        if temporary:
            with suppress(Exception):  # it may not exist, and the first error is the one to raise
                handle.fs.rm_file(temporary)


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


# ---- properties of filesystems ----


def _has_files(fs: Any) -> bool:
    """Return whether opened files are on this machine; a block cache repeats the answer of the filesystem beneath."""
    from fsspec.implementations.cached import CachingFileSystem, WholeFileCacheFileSystem

    if isinstance(fs, CachingFileSystem):
        return isinstance(fs, WholeFileCacheFileSystem)
    return bool(getattr(fs, "local_file", False))


def is_escaped(fs: Any) -> bool:
    """Return whether paths in URLs of a filesystem, or of the filesystem behind its caches, are escaped."""
    while getattr(fs, "fs", None) is not None:
        fs = fs.fs
    return not {"http", "https", "file"}.isdisjoint(_protocols(fs))


def _protocols(fs: Any) -> tuple[str, ...]:
    """Return the names of a filesystem's scheme."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _is_s3(fs: Any) -> bool:
    """Return whether this is s3fs itself, not a cache of it."""
    return "s3" in _protocols(fs) and hasattr(fs, "call_s3")


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Copy options and the dicts inside, because fsspec changes nested dicts."""
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in options.items()}


def _need_fsspec(what: str) -> None:
    try:
        import fsspec  # noqa: F401
    except ImportError as error:
        text = f"{what} needs fsspec, which is not installed: pip install fsspec"
        raise not_installed(error, text, "fsspec") from None


def _check_package(scheme: str, shown: str) -> None:
    import fsspec

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
