"""``hf://owner/name[@revision][/path]``: the Hub's API resolves commits and lists files, our HTTP client reads them.

Datasets and spaces have ``datasets/`` and ``spaces/`` before the owner. The revision is one name; a slash in it is
written ``%2F``, except in ``refs/pr/1`` and ``refs/convert/parquet``.

Files in the cache of huggingface_hub are opened there. Nothing is requested offline, nor for a full commit if the cache
lists its files or has a complete snapshot. Any other revision takes one request for its commit:

1. ``/api/{models,datasets,spaces}/NAME[/revision/REVISION]`` is a JSON object: ``sha`` is the commit, each object in
   ``siblings`` has the path of a file as ``rfilename``.
2. ``/api/{models,datasets,spaces}/NAME/auth-check`` is an error if the files of the repository are refused.
3. An error has a word in ``X-Error-Code`` and a text in ``X-Error-Message``.
4. ``RateLimit: "api";r=0;t=55`` with status 429 asks to wait 55 seconds.

huggingface_hub supplies the token, the endpoint, the rules of names, and uploads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote

from .._version import __version__
from ..core.files import MAX_JSON, WINDOW, ByteStore, LocalStore, open_local, parse_json
from ..core.forking import ProcessLock
from ..core.text import debug, needed, show
from ..errors import FormatError, RemoteError, RemotePermissionError, UnsupportedError, missing_file
from . import url as urls
from .foreign import TRIES, checked, cleaned, secrets_of, status_of, translated
from .http import (
    Client,
    Exchange,
    Failure,
    HttpStore,
    RequestTarget,
    check_accepted,
    checked_headers,
    of_status,
    request,
    target_of,
    whole_body,
)
from .hub_cache import COMMIT, CachedRepository
from .remote_store import Backend

_KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_URL = re.compile(
    r"(?i:hf)://(?:(?P<kind>models|datasets|spaces)/)?"
    r"(?P<repo>(?!(?:models|datasets|spaces|buckets|kernels)/)[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/pr/\d+|refs/convert/\w+|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)
# The URL of a repository that had a name without an owner, such as "gpt2".
_OWNERLESS = re.compile(r"(?i:hf)://(?P<name>[A-Za-z0-9][\w.-]{0,95})(?P<revision>@[^/]+)?/?", re.ASCII)
_COMMIT = re.compile(r"[0-9A-Za-z]{1,64}")
_FULL_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
# Names that Git allows in a path.
_COMPONENT = re.compile(r"(?!\.{1,2}\Z)[^/\x00\ud800-\udfff]+")
# Storage options handled here.
_OPTIONS = ("endpoint", "token")
# The words in X-Error-Code of huggingface_hub's errors, and our words for errors without an answer of the Hub.
_CODES = {
    "GatedRepoError": "GatedRepo",
    "DisabledRepoError": "Disabled",
    "RevisionNotFoundError": "RevisionNotFound",
    "EntryNotFoundError": "EntryNotFound",
    "RepositoryNotFoundError": "RepoNotFound",
    "LocalTokenNotFoundError": "NoToken",
    "HFValidationError": "Invalid",
    "HfUriError": "Invalid",
}
_WRONG_TOKEN = "Invalid credentials"
_MISSING = {
    "RevisionNotFound": "the {kind} has no such branch, tag or commit",
    "EntryNotFound": "the {kind} has no such file",
    "RepoNotFound": "no such {kind}, or it is private; check the name, or log in with `hf auth login`",
}
_REFUSALS = {
    "GatedRepo": "access to this {kind} is restricted: accept its terms at {page}, and log in with `hf auth login`",
    "NoToken": "there is no token on this machine; log in with `hf auth login`",
    "WrongToken": f"the Hub refuses the token: {_WRONG_TOKEN}; log in with `hf auth login`, or set HF_TOKEN",
}

_Result = TypeVar("_Result")


class HubPlace(NamedTuple):
    """The parts of a URL."""

    kind: str  # "model", "dataset" or "space"
    repo: str  # owner and name
    revision: str | None  # a branch, a tag or a commit; None for the main branch
    path: str  # in the repository; empty for the whole repository
    shown: str = ""  # the URL in messages

    @property
    def cached(self) -> CachedRepository:
        return CachedRepository.of(self.kind, self.repo)

    @property
    def page(self) -> str:
        """The path of the repository's page on the Hub."""
        return self.repo if self.kind == "model" else f"{self.kind}s/{self.repo}"


def place_of(url: str) -> HubPlace:
    """Parse a URL."""
    match = _URL.fullmatch(url)
    if match is None:
        expected = "hf://owner/name[@revision][/path], hf://datasets/... or hf://spaces/..."
        advice = "for a bucket pass safeload.remote.of_fsspec(huggingface_hub.HfFileSystem(), path)"
        raise UnsupportedError(f"{urls.shown(url)}: expected {expected}; {advice}")
    kind = _KINDS[match["kind"] or "models"]
    revision = None if match["revision"] is None else unquote(match["revision"])
    if revision is not None and not {"", ".", ".."}.isdisjoint(revision.split("/")):  # another URL of the Hub
        raise UnsupportedError(f"{urls.shown(url)}: {show(revision)} cannot be a branch, a tag or a commit")
    return HubPlace(kind, match["repo"], revision, (match["path"] or "").strip("/"), urls.shown(url))


class Snapshot(NamedTuple):
    """A commit of a repository."""

    commit: str  # its digest
    files: Mapping[str, int | None]  # sizes by path; None if the cache does not list the file's size


class Hub(Backend):
    """Repositories of the Hugging Face Hub; each revision is resolved once, and stays at that commit."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        rest = {key: value for key, value in options.items() if key not in _OPTIONS}
        self._client = Client(rest, "hf", other_options=_OPTIONS)
        self.timeout = self._client.timeout
        endpoint, self._token = options.get("endpoint"), options.get("token")
        if not isinstance(endpoint, (str, type(None))):
            raise TypeError(f"endpoint must be a str, got {type(endpoint).__name__}")
        if not isinstance(self._token, (str, bool, type(None))):
            raise TypeError(f"token must be a str or a bool, got {type(self._token).__name__}")
        self._endpoint = endpoint.rstrip("/") if endpoint else None
        self._secrets = secrets_of(options)
        self._snapshots: dict[tuple[str, str, str | None], Snapshot] = {}  # by kind, repository and revision
        self._asking = ProcessLock()

    # ---- commits ----

    def snapshot(self, place: HubPlace) -> Snapshot:
        """Return the commit of a revision and its files."""
        snapshot = self._known(place)
        if snapshot is None:
            with self._asking.own:  # many threads open the shards of a folder
                snapshot = self._known(place) or self._keep(place, self._ask(place))
        return snapshot

    def _known(self, place: HubPlace) -> Snapshot | None:
        """Like `snapshot`, but return None if a request is allowed and necessary."""
        snapshot = self._snapshots.get(place[:3])
        revision, offline = place.revision or "main", urls.offline()
        if snapshot is not None or (offline is None and not COMMIT.fullmatch(revision)):
            return snapshot
        cached = place.cached
        commit = cached.commit_of(revision)
        if commit is not None:
            tree = cached.tree(commit)
            if tree is not None and offline is None:
                return self._keep(place, Snapshot(commit, tree))
            files = cached.files(commit) if offline is not None or cached.is_complete(commit) else frozenset()
            if files:
                return self._keep(place, Snapshot(commit, {name: (tree or {}).get(name) for name in files}))
        if offline is None:
            return None
        text = f"{offline} is set, which forbids network access, and the cache of huggingface_hub has no files of "
        raise UnsupportedError(f"{place.shown}: {text}{show(revision)} of this repository")

    def _keep(self, place: HubPlace, snapshot: Snapshot) -> Snapshot:
        debug("%s: commit %s, %d files", place.shown, snapshot.commit, len(snapshot.files))
        return self._snapshots.setdefault(place[:3], snapshot)

    def _place(self, url: str) -> HubPlace:
        """Parse a URL, and look up the owner for the message if it has none."""
        match = _OWNERLESS.fullmatch(url)
        if match is None:
            return place_of(url)
        urls.check_online(url)
        shown, name = urls.shown(url), match["name"]
        try:
            info = self._info(HubPlace("model", name, None, "", shown))
        except FileNotFoundError:
            return place_of(url)  # raises
        full = info.get("id")
        full = full if isinstance(full, str) and _FULL_NAME.fullmatch(full) else f"OWNER/{name}"
        raise UnsupportedError(f"{shown}: names have an owner: open hf://{full}{match['revision'] or ''}")

    def _ask(self, place: HubPlace) -> Snapshot:
        info, shown = self._info(place), place.shown
        commit, siblings = info.get("sha"), info.get("siblings") or []
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise RemoteError("the Hub did not report the commit", shown)
        if COMMIT.fullmatch(place.revision or "") and commit != place.revision:
            raise RemoteError(f"the Hub reports commit {commit}, expected {place.revision}", shown)
        if not isinstance(siblings, list):
            raise RemoteError(f"the Hub's list of files is {show(siblings)}", shown)
        sizes, files = place.cached.tree(commit) or {}, dict[str, int | None]()
        for file in siblings:
            name = file.get("rfilename") if isinstance(file, dict) else None
            if not isinstance(name, str) or not all(map(_COMPONENT.fullmatch, name.split("/"))):
                raise RemoteError(f"the Hub's list of files has an invalid path: {show(name)}", shown)
            files[name] = sizes.get(name)
        return Snapshot(commit, files)

    # ---- Backend ----

    def open(self, url: str, window: int = WINDOW) -> ByteStore:
        place = self._place(url)
        snapshot, shown = self._known(place), place.shown
        if snapshot is None:
            cached = _open_cached(place, place.revision or "", None)  # of a full commit, a file is enough
            if cached is not None:
                return cached
            snapshot = self.snapshot(place)
        if place.path not in snapshot.files:
            what = "this is a folder, not a file" if self.is_folder(url) else "the repository has no such file"
            raise missing_file(shown, f"{shown}: {what}, at commit {snapshot.commit}")
        cached = _open_cached(place, snapshot.commit, snapshot.files[place.path])
        if cached is not None:
            return cached
        urls.check_online(url)
        library, commit = _library(), snapshot.commit
        options = {"repo_type": place.kind, "revision": commit, "endpoint": self._endpoint}

        def resolve() -> RequestTarget:
            return self._target(lambda: library.hf_hub_url(place.repo, place.path, **options), place)

        try:
            store = HttpStore(shown, resolve, self._client, window)
        except RemotePermissionError as error:
            refused: list[Exception] = [error]
        else:
            stated = store.commits - {commit}
            if stated:
                store.close()
                raise RemoteError(f"the Hub returned the file of commit {show(stated.pop())}, expected {commit}", shown)
            store.commits.add(commit)  # a later answer that states another commit is refused
            store.version = (store.size, commit)  # that of a cached file
            return store
        refused[0] = self._reason(place) or refused[0]
        raise refused.pop()  # which refers to this frame

    def is_folder(self, url: str) -> bool:
        place = self._place(url)
        try:
            files = self.snapshot(place).files
        except FileNotFoundError:
            return False
        return not place.path or any(name.startswith(f"{place.path}/") for name in files)

    def listing(self, url: str) -> list[tuple[str, bool]]:
        place = self._place(url)
        begin = f"{place.path}/" if place.path else ""
        names = [name[len(begin) :] for name in self.snapshot(place).files if name.startswith(begin)]
        return sorted({(name.partition("/")[0], "/" in name) for name in names})

    def pinned(self, url: str) -> str:
        """Return the URL with its revision replaced by the resolved commit, if any, for other processes."""
        place = self._place(url)
        snapshot = self._snapshots.get(place[:3])
        if snapshot is None:
            return url
        return f"hf://{place.page}@{snapshot.commit}" + (f"/{place.path}" if place.path else "")

    def upload(self, source: str, url: str) -> None:
        """Upload a file in its own commit."""
        urls.check_online(url)
        place = self._place(url)
        if not place.path:
            raise UnsupportedError(f"{place.shown}: expected the path of a file in the repository")
        message = f"Upload {place.path.rpartition('/')[2]}"
        self._commit(place, [_library().CommitOperationAdd(place.path, source)], message)

    def remove(self, targets: Sequence[str]) -> None:
        """Remove all files in a single commit."""
        self.check_writable(targets[0])
        place = place_of(targets[0])
        files = self.snapshot(place).files
        existing = sorted({path for url in targets if (path := place_of(url).path) in files})
        if existing:
            message = f"Remove {existing[0].rpartition('/')[2]}" + (" and others" if existing[1:] else "")
            self._commit(place, [_library().CommitOperationDelete(path) for path in existing], message)

    def _commit(self, place: HubPlace, operations: list[Any], message: str) -> None:
        """Change a branch, which is resolved again on its next use."""
        writer = _library().HfApi(
            endpoint=self._url, token=self._token, library_name="safeload", library_version=__version__,
            headers=self._client.headers,
        )  # fmt: skip
        options = {"commit_message": message, "repo_type": place.kind, "revision": place.revision}
        self._checked(lambda: writer.create_commit(place.repo, operations, **options), place, TRIES)
        self._snapshots.pop(place[:3], None)

    def check_writable(self, url: str) -> None:
        """Check that the repository exists."""
        urls.check_online(url)
        place = self._place(url)
        self._snapshots.pop(place[:3], None)  # resolve the revision again
        self.snapshot(place)

    # ---- requests ----

    @property
    def _url(self) -> str:
        """The URL of the Hub, without a final slash."""
        _library()
        return self._endpoint or str(import_module("huggingface_hub.constants").ENDPOINT)

    def _info(self, place: HubPlace) -> dict[str, Any]:
        """Return the Hub's description of a revision."""

        def content_of(exchange: Exchange) -> bytes:
            self._check_accepted(exchange, place)
            expected, content = exchange.length, whole_body(exchange, MAX_JSON, place.shown)
            if content is not None:
                return content
            size = "more" if expected is None else f"{expected:,}"
            text = f"the Hub's response has {size} bytes, but the limit is {MAX_JSON:,}"
            raise Failure(RemoteError(text, place.shown))

        what = "" if place.revision is None else f"/revision/{quote(place.revision, safe='')}"
        try:
            return parse_json(self._api(place, what, content_of), "the Hub's response", place.shown)
        except FormatError as error:
            text = f"{error.args[0]}" if error.offset is None else f"{error.args[0]} at byte {error.offset}"
        raise RemoteError(text, place.shown)

    def _reason(self, place: HubPlace) -> Exception | None:
        """Return the Hub's own explanation for a refused file: a gated repository can be listed, but not read."""

        def check(exchange: Exchange) -> None:
            if exchange.status != 404 or "X-Error-Code" in exchange.headers:  # a mirror may lack this part of the API
                self._check_accepted(exchange, place)

        try:
            self._api(place, "/auth-check", check)
        except (RemotePermissionError, FileNotFoundError) as error:
            return error
        except OSError as error:
            debug("%s: no reason for the refusal: %s", place.shown, error)  # the refusal itself is raised
        return None

    def _api(self, place: HubPlace, what: str, use: Callable[[Exchange], _Result]) -> _Result:
        target = self._target(lambda: f"{self._url}/api/{place.kind}s/{place.repo}{what}", place)
        return request(self._client, target, place.shown, use)

    def _target(self, address: Callable[[], Any], place: HubPlace) -> RequestTarget:
        """Return a URL of the Hub with the token and the caller's headers."""
        _library()
        utils = import_module("huggingface_hub.utils")

        def parts() -> tuple[str, dict[str, str]]:
            utils.validate_repo_id(place.repo)
            named = {"library_name": "safeload", "library_version": __version__}
            return str(address()), utils.build_hf_headers(token=self._token, **named)

        url, headers = self._checked(parts, place)
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self._secrets:
            self._secrets.append(token)
        headers = {**headers, **{name.lower(): value for name, value in self._client.headers.items()}}
        return target_of(url, checked_headers(headers))

    # ---- refusals ----

    def _check_accepted(self, exchange: Exchange, place: HubPlace) -> None:
        """Refuse a response of the API that is no answer."""
        status, code = exchange.status, exchange.headers.get("X-Error-Code")
        if status in (200, 407):
            return check_accepted(exchange, place.shown)
        exchange.drain()
        text = cleaned(RuntimeError(exchange.headers.get("X-Error-Message", "")), self._secrets)
        if code not in ("GatedRepo", "RevisionNotFound"):
            if status == 401 and text.startswith(_WRONG_TOKEN):
                code = "WrongToken"
            elif status in (401, 404, 410):
                code = "RepoNotFound"
            elif text == "Access to this resource is disabled.":
                code = "Disabled"
        error = self._error(code, status, text, place)
        if error is not None:
            raise Failure(error)
        raise of_status(exchange, place.shown).noted(f": {text}" if text else "")

    def _checked(self, call: Callable[[], _Result], place: HubPlace, tries: int = 1) -> _Result:
        """Call huggingface_hub, and translate its errors with the Hub's own explanation."""

        def translate(error: Exception, *_: Any) -> Exception:
            code = next((_CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _CODES), None)
            status, text = status_of(error), cleaned(error, self._secrets)
            if code is None and status is None:
                return translated(error, place.shown, self._secrets)
            code = "WrongToken" if code is None and status == 401 else code
            return self._error(code, status, text, place) or RemoteError(text, place.shown)

        return checked(call, place.shown, self._secrets, tries=tries, translate=translate)

    def _error(self, code: str | None, status: int | None, text: str, place: HubPlace) -> Exception | None:
        """Return the error for a refusal that is no fault of the server."""
        shown = place.shown
        if code in _MISSING:
            return missing_file(shown, f"{shown}: {_MISSING[code].format(kind=place.kind)}")
        if code == "Invalid":
            return UnsupportedError(f"{shown}: {text}")
        if code in _REFUSALS:
            page = f"{urls.shown(self._url)}/{place.page}"
            return RemotePermissionError(_REFUSALS[code].format(kind=place.kind, page=page), shown)
        if code == "Disabled" or status == 403:
            return RemotePermissionError(text or "the Hub refuses access (403)", shown)
        return None


def _library() -> Any:
    """Import huggingface_hub: only here, because cached files need no requests, and the import takes 0.3 s."""
    return needed("huggingface_hub", "hf:// URLs need huggingface_hub")


def _open_cached(place: HubPlace, commit: str, nbytes: int | None) -> LocalStore | None:
    """Open a file in the cache; None if it was not downloaded, or if the network can replace a damaged copy."""
    path, shown = place.cached.file(commit, place.path), place.shown
    if path is None:
        return None
    try:
        store = open_local(path, shown=shown)
        if nbytes is not None and store.size != nbytes:
            store.close()
            text = f"the copy in the cache has {store.size:,} bytes, but the file has {nbytes:,}: delete {path}"
            raise FormatError(text, shown)
    except (OSError, FormatError) as error:
        if urls.offline() is not None:
            raise
        debug("%s", error)
        return None
    store.mark = commit
    debug("%s: opened %s", shown, path)
    return store
