"""Stores of other libraries and callers: an adapter of five calls, obstore's, errors, versions, and secret texts."""

from __future__ import annotations

import errno
import hashlib
import json
import operator
import os
import random
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..core.atomic_file import AtomicFile
from ..core.files import WINDOW, ByteStore, compare
from ..core.text import debug, error_about, printable, show
from ..core.thread_group import current, each, left_behind
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
from .remote_store import Backend, RemoteStore

_Result = TypeVar("_Result")

# Number of attempts per range (most libraries retry within each), and seconds before the second attempt, which double.
TRIES, PAUSE = 4, 0.5
# Maximum number of seconds a server can make us wait.
_LONGEST_PAUSE = 60.0
# A quota, of the Hub for example, is used up, and renewed after this many seconds.
_QUOTA = re.compile(r"\br=0;\s*t=([0-9]+)\s*$")
# Longer waits are shown as this one: a server can send thousands of digits.
_WAIT_SHOWN = 1e12
# Permanent system errors.
_PERMANENT = frozenset((errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR))
# Class names of library errors.
_LASTING = ("FileExpired", "LocalTokenNotFoundError", "OfflineModeIsEnabled")
_DENIED = re.compile(r"Credential|[Aa]uthenti|Authoriz|Forbidden|AccessDenied|PermissionDenied|TokenError|RefreshError")
_TRANSIENT = re.compile(r"Connect|Timeout|TimedOut|Incomplete|Payload|Stream|Protocol|Transport|ServerError|HttpError")
# Maximum length of a library's message, and the length searched for secrets.
_MOST, _SEARCHED = 500, 16 << 10
# No scheme is longer: without a limit the search would take quadratic time.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,31}://[^\s'\"<>|^`{}]+")
# Shapes of keys and tokens: AWS's, the Hub's, and values after their usual names.
_KEYS = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bhf_[A-Za-z0-9]{8,}|\b(?:Bearer|Basic)\s+\S+"
    r"|(?<=[=:])(?<=sig=|key=|ken=|ure=|ret=|ord=|ial=|ign=)[^&\s]+",
    re.IGNORECASE,
)


def checked(
    function: Callable[[], _Result],
    url: str,
    secrets: list[str],
    *,
    tries: int = 1,
    translate: Callable[..., Exception] | None = None,
) -> _Result:
    """Call another library, again after transient errors; raise its errors translated, unchained and secret-free."""
    for k in range(1, tries + 1):
        try:
            return function()
        except Exception as error:
            failure = [(translate or translated)(error, url, secrets)]
            if k == tries or not _is_transient(error):
                break
            headers = getattr(getattr(error, "response", None), "headers", None)
            requested = requested_wait(headers) if isinstance(headers, Mapping) else 0.0
            pause = max(PAUSE * 2 ** (k - 1) * random.uniform(0.5, 1), min(requested, _LONGEST_PAUSE))
        debug("%s: retry in %.1f s: %s", url, pause, failure[0].args[0] if failure[0].args else "")
        current().sleep(pause)
    raise failure.pop()  # which refers to this frame


def requested_wait(headers: Mapping[str, Any], *, quota: bool = True) -> float:
    """Return the seconds that a response asks to wait, as a number, a date or a quota; 0 if it does not."""
    from email.utils import parsedate_to_datetime  # only here: few responses ask for it

    rate = _QUOTA.search(str(headers.get("RateLimit"))) if quota else None
    text = str(headers.get("Retry-After") or (rate[1] if rate else "")).strip()
    if re.fullmatch(r"[0-9]+", text):
        return min(float(text), _WAIT_SHOWN)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError, OSError):
        return 0.0


def _is_transient(error: Exception) -> bool:
    """Return whether a retry may help."""
    name, status = type(error).__name__, status_of(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    has_retried = type(error).__module__.startswith("obstore")
    if has_retried or isinstance(error, (FileNotFoundError, PermissionError, SafeloadError)) or name in _LASTING:
        return False
    if isinstance(error, OSError):
        return error.errno not in _PERMANENT
    return _TRANSIENT.search(name) is not None and _DENIED.search(name) is None


def status_of(error: Exception) -> int | None:
    """Return the status code of an error with a response, or None."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def translated(
    error: Exception, url: str, secrets: list[str], begin: int | None = None, end: int | None = None
) -> Exception:
    """Return safeload's error for a filesystem's or its library's error."""
    if isinstance(error, (SafeloadError, RemoteError)):
        return error
    name, text = type(error).__name__, cleaned(error, secrets)
    if isinstance(error, FileNotFoundError) or name == "NotFoundError":
        return missing_file(url, f"No such file or directory: {url}")
    if name in ("FileExpired", "PreconditionError"):
        return FormatError("the file has changed since it was opened: it was modified or replaced", url)
    if isinstance(error, (IsADirectoryError, NotADirectoryError)):
        return FormatError("this is a folder, not a file", url)
    if isinstance(error, NotImplementedError) or name == "NotSupportedError":
        return UnsupportedError(f"{url}: the filesystem does not support this{text and ': '}{text}")
    reason = text if text and text != "None" else name
    if isinstance(error, PermissionError) or (not isinstance(error, OSError) and _DENIED.search(name)):
        return RemotePermissionError(f"the store refuses access: {reason}", url, begin, end)
    if isinstance(error, TimeoutError) or "Timeout" in name:
        return RemoteTimeoutError(f"the store does not respond in time: {reason}", url, begin, end)
    if not isinstance(error, OSError) and reason != name:
        reason = f"{name}: {reason}"
    return RemoteError(f"the store cannot be read: {reason}" if begin is not None else reason, url, begin, end)


def cleaned(error: BaseException, secrets: list[str]) -> str:
    """Return the message of an error without secrets; it may be empty."""
    try:
        text = str(error).partition("\n\nDebug source")[0]  # obstore's error in Rust
    except Exception:  # the error of another library
        return ""
    for secret in secrets:
        text = text.replace(secret, "***")
    if len(text) > _SEARCHED:  # cut between words, because half a secret would have no recognizable shape
        text = text[:_SEARCHED]
        text = text[: max(text.rfind(" "), text.rfind("\n"))] or text
    text = _KEYS.sub("***", _URL.sub(lambda match: urls.shown(match[0]), text))
    text = printable(" ".join(text.split()))
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


# ---- the version of a file ----

# Fields that stores report of a file, but that do not describe its content: its name and place, access, permissions.
_NO_MARKS = re.compile(
    r"(name|path|size|type|mode|uid|gid|islink|n_?link)\Z|.*(url|link|expir|viewed|access)|(st_)?a_?time", re.IGNORECASE
)
# Beside a time of modification, these are the times of the last access (SFTP, SMB) and change of permissions (local).
_TIMES_BESIDE_MTIME = frozenset(("time", "created"))


def checked_size(value: object, path: str) -> int:
    """Return the size of a file as a store reports it."""
    try:
        size = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        size = -1
    if 0 <= size < 1 << 63:
        return size
    raise error_about(FormatError, f"the store reports a size of {show(value)}, expected 0 to 2**63 - 1", path=path)


def is_weak(etag: str) -> bool:
    """Return whether files with this ETag may differ in bytes."""
    return etag[:2].upper() == "W/"


def strong_etag(fields: Mapping[str, Any]) -> str | None:
    """Return the strong ETag among the fields that a store reports of a file; it decides alone."""
    tags = (value for name, value in fields.items() if isinstance(name, str) and name.lower() in ("etag", "e_tag"))
    return next((tag for tag in tags if isinstance(tag, str) and tag and not is_weak(tag)), None)


def marks_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return all fields that may tell contents apart, as text."""
    marks = {}
    for name, value in fields.items():
        passing = _NO_MARKS.match(str(name)) or (name in _TIMES_BESIDE_MTIME and fields.get("mtime") is not None)
        if not passing and value not in (None, ""):
            with suppress(TypeError, ValueError, RecursionError):  # no plain value
                marks[str(name)] = json.dumps(value, sort_keys=True, default=_plain)
    return marks


def _plain(value: object) -> str:
    if type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__:
        raise TypeError  # its text is its address in memory
    return str(value)


def digest_of(marks: Mapping[str, str]) -> str | None:
    """Return a short text that differs if a mark differs, is gone, or is new; None without marks."""
    return hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest() if marks else None


# ---- object stores ----


class ObjectStore(Backend):
    """An object store behind URLs, by five calls, which end at Ctrl-C and `stop`, and have safeload's errors."""

    name: str  # of the library's class
    secrets: list[str]  # for messages
    proves = False  # True if every `read` checks the version

    @abstractmethod
    def place(self, url: str) -> str:
        """Return the place of a URL in the store."""

    def writable(self, url: str) -> tuple[ObjectStore, str]:
        """Return the store and the place to write a URL, or refuse a store that cannot be written."""
        return self, self.place(url)

    @abstractmethod
    def entries(self, place: str, shown: str) -> Iterable[tuple[Any, bool]]:
        """Return the paths in a folder, and whether each is a folder; the folder itself may be among them."""

    @abstractmethod
    def stat(self, place: str, shown: str) -> tuple[int, str | None]:
        """Return the size of a file and a mark of its content."""

    @abstractmethod
    def read(self, place: str, shown: str, begin: int, end: int, version: tuple[Any, ...]) -> Any:
        """Return the bytes of a range; its errors are not translated yet."""

    @abstractmethod
    def write(self, source: str, place: str, shown: str) -> None:
        """Write a local file, which becomes visible only when it is complete."""

    @abstractmethod
    def delete(self, place: str, shown: str, *, folder: bool) -> None:
        """Delete a file, or an empty folder."""

    def open(self, url: str, window: int = WINDOW) -> ByteStore:
        return StoredObject(self, self.place(url), urls.shown(url), window)

    def is_folder(self, url: str) -> bool:
        place = self.place(url)
        return not place or any(True for _ in self.entries(place, urls.shown(url)))

    def listing(self, url: str) -> list[tuple[str, bool]]:
        place, shown, names = self.place(url), urls.shown(url), set()
        for path, is_folder in self.entries(place, shown):
            if not isinstance(path, str) or "\0" in path or re.search("[\ud800-\udfff]", path):
                raise error_about(FormatError, f"the store lists a name that is no text: {show(path)}", path=shown)
            if path.strip("/") != place.strip("/"):
                names.add((path.rstrip("/").rpartition("/")[2], is_folder))
        return sorted(names)

    def upload(self, source: str, url: str) -> None:
        store, place = self.writable(url)
        store.write(source, place, urls.shown(url))

    def remove(self, targets: Sequence[str]) -> None:
        def remove_one(url: str) -> None:
            store, place = self.writable(url)
            with suppress(FileNotFoundError):
                store.delete(place, urls.shown(url), folder=url.endswith("/"))

        each(remove_one, targets)

    def check_writable(self, url: str) -> None:
        self.writable(url)


class StoredObject(RemoteStore):
    """A file of an object store, read by ranges into separate buffers, because not every read can be aborted."""

    def __init__(self, objects: ObjectStore, place: str, url: str, window: int = WINDOW) -> None:
        super().__init__(url, objects.stat(place, url), window)
        self._objects, self._place = objects, place
        debug("%s: opened by %s", url, objects.name)

    def content(self, begin: int, end: int) -> memoryview:
        translate = partial(translated, begin=begin, end=end)
        secrets = self._objects.secrets
        return checked(lambda: self._range(begin, end), self.path, secrets, tries=TRIES, translate=translate)

    def _range(self, begin: int, end: int) -> memoryview:
        content = memoryview(self._objects.read(self._place, self.path, begin, end, self.version))
        if len(content) == end - begin:
            return content
        if len(content) > end - begin:
            raise UnsupportedError(f"{self.path}: the store does not support ranges of this file")
        self.confirm()
        raise RemoteError(f"expected {end - begin:,} bytes, got {len(content):,}", self.path, begin, end)

    def confirm(self) -> None:
        if not self._objects.proves:
            compare(self._objects.stat(self._place, self.path), self.version, self.path)


# ---- callers' stores ----

# Schemes of obstore's classes; any other class uses its own name.
_SCHEMES = {
    "S3Store": "s3", "GCSStore": "gs", "AzureStore": "az", "HTTPStore": "https", "LocalStore": "file",
    "MemoryStore": "memory",
}  # fmt: skip
# A mark that is no ETag.
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ForeignStore(RemoteStore):
    """A caller's store with the four members of `ByteStore`, read into separate buffers: nothing may abort it."""

    def __init__(self, store: ByteStore, path: str) -> None:
        self._store = store
        super().__init__(path, self._version())
        self.size = checked_size(store.size, path)

    def _version(self) -> tuple[Any, ...]:
        version = self._store.version
        return (self._store.size, *version) if isinstance(version, tuple) else (self._store.size, version)

    def content(self, begin: int, end: int) -> bytearray:
        memory = bytearray(end - begin)
        left_behind(lambda: self._store.read_into(begin, memory))
        return memory

    def confirm(self) -> None:
        if self._version() != self.version:
            raise FormatError("the file has changed since it was opened: its version differs", self.path)

    def close(self) -> None:
        super().close()
        self._store.close()


class Single(Backend):
    """A caller's store, which serves every URL."""

    no_folders, read_only = "a single store has no folders", "a single store is read-only"

    def __init__(self, store: ByteStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<{type(self._store).__name__}>"

    def open(self, url: str, window: int = WINDOW) -> RemoteStore:
        return self._store if isinstance(self._store, RemoteStore) else ForeignStore(self._store, urls.shown(url))


class Obstore(ObjectStore):
    """An obstore store, and its URLs; its calls run in threads of their own, because obstore waits for no signal."""

    proves = True

    def __init__(self, store: Any) -> None:
        self._store = store
        self.name = type(store).__name__
        config = getattr(store, "config", None)
        config = config if isinstance(config, Mapping) else {}
        scheme = _SCHEMES.get(self.name, self.name.lower())
        bucket = config.get("bucket") or config.get("container_name") or ""
        where = "/".join(part for part in (bucket, str(getattr(store, "prefix", None) or "").strip("/")) if part)
        self.root = urls.shown(f"{scheme}://{'/' if scheme == 'file' else ''}{where}").rstrip("/") + "/"  # in messages
        if self.root.count("/") < 3:  # "memory:/"
            self.root = f"{scheme}://"
        self.secrets = secrets_of(config)
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<Obstore {self.root}>"  # its configuration holds keys

    def place(self, url: str) -> str:
        self._check_process(url)
        if not f"{url}/".startswith(self.root):
            raise ValueError(f"{urls.shown(url)} is not in {self.root}")
        return url[len(self.root) :].strip("/")

    def entries(self, place: str, shown: str) -> Iterator[tuple[Any, bool]]:
        entries = self._ask(lambda: self._store.list_with_delimiter(place or None), shown)
        if isinstance(entries, Mapping):
            yield from ((entry["path"], False) for entry in entries["objects"])
            yield from ((prefix, True) for prefix in entries["common_prefixes"])

    def stat(self, place: str, shown: str) -> tuple[int, str | None]:
        return _version(self._ask(lambda: self._store.head(place), shown), shown)

    def read(self, place: str, shown: str, begin: int, end: int, version: tuple[Any, ...]) -> Any:
        options: dict[str, Any] = {"range": (begin, end)}
        if version[1] is not None and not _DIGEST.fullmatch(version[1]):
            options["if_match"] = version[1]

        def read() -> Any:
            self._check_process(shown)
            response = self._store.get(place, options=options)
            compare(_version(response.meta, shown), version, shown)
            return response.bytes()

        return left_behind(read)

    def write(self, source: str, place: str, shown: str) -> None:
        self._ask(lambda: self._store.put(place, Path(source)), shown)  # visible only when it is complete

    def delete(self, place: str, shown: str, *, folder: bool) -> None:
        if not folder:
            self._ask(lambda: self._store.delete(place), shown)

    def _ask(self, function: Callable[[], Any], shown: str) -> Any:
        self._check_process(shown)
        return checked(lambda: left_behind(function), shown, self.secrets)

    def _check_process(self, shown: str) -> None:
        """Refuse a forked process: it lacks obstore's threads, and a read would wait forever."""
        if os.getpid() != self._process:
            advice = "start processes with spawn or forkserver, and open the store there"
            raise UnsupportedError(f"{urls.shown(shown)}: obstore does not work in a forked process: {advice}")


def _version(meta: Mapping[str, Any], shown: str) -> tuple[int, str | None]:
    return checked_size(meta.get("size"), shown), strong_etag(meta) or digest_of(marks_of(meta))


def copy_whole(source: str, path: str) -> None:
    """Copy a local file to a local path, where it appears only when it is complete."""
    os.makedirs(os.path.dirname(path) or os.curdir, exist_ok=True)
    with open(source, "rb") as complete:
        size = os.fstat(complete.fileno()).st_size
        with AtomicFile(path, size, durable=False, follow=False) as file:
            file.copy(complete.fileno(), [(0, size)])


# ---- storage_options: which are public, and which are secret ----

# Options without any secret: they only locate files. All other options stay in this process.
PUBLIC = frozenset(
    (
        "account_name", "anon", "cache_check", "cache_storage", "check_files", "client_kwargs", "config_kwargs",
        "endpoint", "endpoint_url", "expiry_time", "project", "region", "region_name", "repo_type", "requester_pays",
        "revision", "same_names", "target_options", "target_protocol", "use_ssl", "verify", "version_aware",
    )
)  # fmt: skip
# Shorter values are words such as "us" or "true", which are too common to be masked.
LEAST = 5


def public_options(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the options for pickles, plans and journals; workers take the rest from their environment."""
    if options is None:
        return None
    public: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):  # options of a client, or of a link of a chain
            public[key] = public_options(value)
        elif key in PUBLIC and isinstance(value, (str, int, float, bool, type(None))):
            public[key] = urls.shown(value) if isinstance(value, str) and urls.is_url(value) else value
    return public


def secrets_of(options: Mapping[str, Any] | None) -> list[str]:
    """Return the secrets in ``storage_options``, longest first, to keep them out of messages."""
    texts: set[str] = set()
    for key, value in (options or {}).items():
        if isinstance(value, Mapping):
            texts.update(secrets_of(value))
        elif isinstance(value, (str, bytes)) and key not in PUBLIC and len(value) >= LEAST:
            texts.add(value if isinstance(value, str) else value.decode("latin-1"))
    return sorted(texts, key=len, reverse=True)
