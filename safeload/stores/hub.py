"""``hf://`` URLs: the Hub's API resolves commits and lists files, and our HTTP client reads them.

Files in the cache of huggingface_hub are opened there. Nothing is requested offline, nor for a full commit if the cache
lists its files or has a complete snapshot. Any other revision takes one request for its commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from ..base import log
from ..base.cached import cached_property
from ..base.forking import ProcessLock
from ..base.text import show
from ..errors import FormatError, RemoteError, RemotePermissionError, UnsupportedError, missing_file
from . import url as urls
from .foreign_errors import retried
from .http import HttpStore
from .http_client import Client, RequestTarget
from .hub_api import HubApi, is_transient_write
from .hub_cache import COMMIT, CachedRepository
from .hub_place import HubPlace, place_of
from .local import LocalStore, open_local
from .options import secrets_of
from .stop import current
from .store import WINDOW, ByteStore
from .thread_group import Prefetch, Task

# The URL of a repository that had a name without an owner, such as "gpt2".
_OWNERLESS = re.compile(r"(?i:hf)://(?P<name>[A-Za-z0-9][\w.-]{0,95})(?P<revision>@[^/]+)?/?", re.ASCII)
_COMMIT = re.compile(r"[0-9A-Za-z]{1,64}")
_FULL_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
# Storage options handled here.
_OPTIONS = ("endpoint", "token")


class Snapshot(NamedTuple):
    """A commit of a repository."""

    commit: str  # its digest
    files: frozenset[str]  # their paths
    sizes: Mapping[str, int] = MappingProxyType({})  # of the files, if the cache lists them


class Hub:
    """Repositories of the Hugging Face Hub.

    Each revision is resolved once, in a single request, and stays at that commit for the lifetime of the object.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        rest = {key: value for key, value in options.items() if key not in _OPTIONS}
        self._client = Client(rest, "hf", other_options=_OPTIONS)
        self.kept, self.timeout = self._client.kept, self._client.timeout
        self._secrets = secrets_of(options)
        self._api = HubApi(options, self._client, self._secrets)
        self._snapshots: dict[tuple[str, str, str | None], Snapshot] = {}
        self._asking = ProcessLock()

    def __repr__(self) -> str:
        return "<Hub>"  # the token is secret

    @cached_property
    def _writer(self) -> Any:
        return self._api.writer()

    def snapshot(self, place: HubPlace, url: str) -> Snapshot:
        """Return the commit of a revision and its files."""
        snapshot = self._known(place, url, ask=True)
        assert snapshot is not None
        return snapshot

    def _known(self, place: HubPlace, url: str, *, ask: bool) -> Snapshot | None:
        """Like `snapshot`, but return None instead of sending a request unless ``ask``."""
        key = place.kind, place.repo, place.revision
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            with self._asking.own:  # many threads open the shards of a folder
                snapshot = self._snapshots.get(key)
                if snapshot is None:
                    shown = urls.shown(url)
                    snapshot = _in_cache(place, shown) or (self._ask(place, shown) if ask else None)
                    if snapshot is not None:
                        self._snapshots[key] = snapshot
                        log.debug("%s: commit %s, %d files", shown, snapshot.commit, len(snapshot.files))
        return snapshot

    def _place(self, url: str) -> HubPlace:
        """Parse a URL, and look up the owner for the message if it has none."""
        match = _OWNERLESS.fullmatch(url)
        if match is None:
            return place_of(url)
        urls.check_online(url)
        shown, name = urls.shown(url), match["name"]
        try:
            info = self._api.info(HubPlace("model", name, None, ""), shown)
        except FileNotFoundError:
            return place_of(url)  # raises
        full = info.get("id")
        full = full if isinstance(full, str) and _FULL_NAME.fullmatch(full) else f"OWNER/{name}"
        raise UnsupportedError(f"{shown}: names have an owner: open hf://{full}{match['revision'] or ''}")

    def _ask(self, place: HubPlace, shown: str) -> Snapshot:
        info = self._api.info(place, shown)
        commit, siblings = info.get("sha"), info.get("siblings") or []
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise RemoteError("the Hub did not report the commit", shown)
        if COMMIT.fullmatch(place.revision or "") and commit != place.revision:
            raise RemoteError(f"the Hub reports commit {commit}, expected {place.revision}", shown)
        if not isinstance(siblings, list):
            raise RemoteError(f"the Hub's list of files is {show(siblings)}", shown)
        names = set[str]()
        for file in siblings:
            name = file.get("rfilename") if isinstance(file, dict) else None
            if not isinstance(name, str) or not _is_path(name):
                raise RemoteError(f"the Hub's list of files has an invalid path: {show(name)}", shown)
            names.add(name)
        cached = CachedRepository.of(place.kind, place.repo)
        sizes = None if cached is None else cached.tree(commit)
        return Snapshot(commit, frozenset(names), sizes or {})

    # ---- Backend ----

    def open(self, url: str, window: int = WINDOW) -> ByteStore:
        place = self._place(url)
        shown = urls.shown(url)
        snapshot = self._known(place, url, ask=False)
        if snapshot is not None:
            return self._open(place, url, snapshot, window)
        cached = _open_cached(place, place.revision or "", None, shown)  # of a full commit, a file is enough
        if cached is not None:
            return cached
        if not _is_path(place.path) or _is_cached(place):
            return self._open(place, url, self.snapshot(place, url), window)
        revision = self._target(place, place.revision or "main", shown)
        early = _EarlyStore(lambda: HttpStore(shown, revision, self._client, window, retries=0))
        with closing(early):
            return self._open(place, url, self.snapshot(place, url), window, early=early)

    def _open(
        self, place: HubPlace, url: str, snapshot: Snapshot, window: int, *, early: _EarlyStore | None = None
    ) -> ByteStore:
        """Open a file of a commit."""
        shown = urls.shown(url)
        if place.path not in snapshot.files:
            what = "this is a folder, not a file" if self.is_folder(url) else "the repository has no such file"
            raise missing_file(shown, f"{shown}: {what}, at commit {snapshot.commit}")

        cached = _open_cached(place, snapshot.commit, snapshot.sizes.get(place.path), shown)
        if cached is not None:
            return cached
        urls.check_online(url)

        resolve = self._target(place, snapshot.commit, shown)
        try:
            store = None if early is None else early.take(snapshot.commit)
            if store is None:
                store = HttpStore(shown, resolve, self._client, window)
            else:
                store.pin(resolve)
            return _of_commit(store, snapshot.commit)
        except RemotePermissionError as error:
            refused: Exception = error
        refused = self._api.refusal_of(place, shown) or refused
        try:
            raise refused
        finally:
            del refused  # it refers to this frame

    def _target(self, place: HubPlace, revision: str, shown: str) -> Callable[[], RequestTarget]:
        """Return a function that returns the URL of a file and the headers for it."""
        return lambda: self._api.file(place, revision, shown)

    def is_folder(self, url: str) -> bool:
        place = self._place(url)
        try:
            files = self.snapshot(place, url).files
        except FileNotFoundError:
            return False
        return not place.path or any(name.startswith(f"{place.path}/") for name in files)

    def listing(self, url: str) -> list[tuple[str, bool]]:
        place = self._place(url)
        begin = f"{place.path}/" if place.path else ""
        entries = {
            (name[len(begin) :].partition("/")[0], "/" in name[len(begin) :])
            for name in self.snapshot(place, url).files
            if name.startswith(begin)
        }
        return sorted(entries)

    def pinned(self, url: str) -> str:
        """Return the URL with its revision replaced by the resolved commit, if any, for other processes."""
        place = self._place(url)
        snapshot = self._snapshots.get((place.kind, place.repo, place.revision))
        if snapshot is None:
            return url
        return f"hf://{place.page}@{snapshot.commit}" + (f"/{place.path}" if place.path else "")

    def upload(self, source: str, url: str) -> None:
        """Upload a file in its own commit."""
        urls.check_online(url)
        place = self._place(url)
        shown = urls.shown(url)
        if not place.path:
            raise UnsupportedError(f"{shown}: expected the path of a file in the repository")

        def commit() -> None:
            self._writer.upload_file(
                path_or_fileobj=source,
                path_in_repo=place.path,
                repo_id=place.repo,
                repo_type=place.kind,
                revision=place.revision,
                commit_message=f"Upload {place.path.rpartition('/')[2]}",
            )

        retried(commit, shown, self._secrets, transient=is_transient_write, translate=self._api.translated)
        self._forget(place)

    def remove(self, targets: Sequence[str]) -> None:
        """Remove all files in a single commit."""
        from huggingface_hub import CommitOperationDelete

        urls.check_online(targets[0])
        place, shown = place_of(targets[0]), urls.shown(targets[0])
        self._forget(place)
        files = self.snapshot(place, targets[0]).files
        existing = sorted({path for url in targets if (path := place_of(url).path) in files})
        if not existing:
            return

        def commit() -> None:
            self._writer.create_commit(
                place.repo,
                [CommitOperationDelete(path) for path in existing],
                commit_message=f"Remove {existing[0].rpartition('/')[2]}" + (" and others" if existing[1:] else ""),
                repo_type=place.kind,
                revision=place.revision,
            )

        retried(commit, shown, self._secrets, transient=is_transient_write, translate=self._api.translated)
        self._forget(place)

    def check_writable(self, url: str) -> None:
        """Check that the repository exists."""
        urls.check_online(url)
        place = self._place(url)
        self._forget(place)
        self.snapshot(place, url)

    def _forget(self, place: HubPlace) -> None:
        """Resolve the revision again on its next use."""
        self._snapshots.pop((place.kind, place.repo, place.revision), None)


class _EarlyStore:
    """A file of a branch or tag, opened while the API is asked for the commit."""

    def __init__(self, open_store: Callable[[], HttpStore]) -> None:
        self._stores: list[HttpStore] = []
        self._opening: Prefetch[None] = Prefetch([Task(1, lambda check: self._stores.append(open_store()))], 1)
        with suppress(RuntimeError):  # the system has no more threads
            self._opening.start()
            return
        self._opening.close()

    def take(self, commit: str) -> HttpStore | None:
        """Return the file if it could be opened and the Hub says that it is of this commit."""
        try:
            with current().aborting(self._opening.close):
                next(self._opening)
        except Exception as error:  # of no interest: the file of the commit is opened next
            log.debug("opened without its commit: %s", type(error).__name__)
            return None
        return self._stores.pop() if self._stores[0].commits == {commit} else None

    def close(self) -> None:
        """End the thread, and close the file if it was not taken."""
        self._opening.close()
        for store in self._stores:
            store.close()


def _is_cached(place: HubPlace) -> bool:
    """Return whether the cache has a file, or all weights of a folder, at the commit to which the revision led."""
    cached = CachedRepository.of(place.kind, place.repo)
    commit = None if cached is None else cached.commit_of(place.revision or "main")
    if cached is None or commit is None:
        return False
    return cached.file(commit, place.path) is not None or (
        (not place.path or place.path.endswith(".index.json")) and cached.is_complete(commit)
    )


def _in_cache(place: HubPlace, shown: str) -> Snapshot | None:
    """Return the snapshot of a revision if the cache has it and no request is allowed or necessary; else None."""
    revision, offline = place.revision or "main", urls.offline()
    full = COMMIT.fullmatch(revision) is not None
    if offline is None and not full:
        return None
    cached = CachedRepository.of(place.kind, place.repo)
    commit = None if cached is None else cached.commit_of(revision)
    if cached is not None and commit is not None:
        tree = cached.tree(commit)
        if tree is not None and offline is None:
            return Snapshot(commit, frozenset(tree), tree)
        files = cached.files(commit) if offline is not None or cached.is_complete(commit) else frozenset()
        if files:
            return Snapshot(commit, files, tree or {})
    if offline is None:
        return None
    raise UnsupportedError(
        f"{shown}: {offline} is set, which forbids network access, and the cache of huggingface_hub has no files of "
        f"{show(revision)} of this repository"
    )


def _open_cached(place: HubPlace, commit: str, nbytes: int | None, shown: str) -> LocalStore | None:
    """Open a file in the cache; None if it was not downloaded, or if the network can replace a damaged copy."""
    cached = CachedRepository.of(place.kind, place.repo)
    path = None if cached is None else cached.file(commit, place.path)
    if path is None:
        return None
    try:
        store = open_local(path, shown=shown)
    except (OSError, FormatError):
        if urls.offline() is not None:
            raise
        return None
    if nbytes is not None and store.size != nbytes:
        store.close()
        text = f"the copy in the cache has {store.size:,} bytes, but the file has {nbytes:,}: delete {path}"
        if urls.offline() is not None:
            raise FormatError(text, shown)
        log.debug("%s: %s", shown, text)
        return None
    store.mark = commit
    log.debug("%s: opened %s", shown, path)
    return store


def _of_commit(store: HttpStore, commit: str) -> HttpStore:
    """Return a store whose version is its commit, equal to that of a cached file."""
    stated = store.commits - {commit}
    if stated:
        store.close()
        raise RemoteError(f"the Hub returned the file of commit {show(stated.pop())}, expected {commit}", store.path)
    store.commits.add(commit)  # a later answer that states another commit is refused
    store.version = (store.size, commit)
    return store


def _is_path(name: str) -> bool:
    """Return whether Git allows this path."""
    if any("\ud800" <= char <= "\udfff" for char in name):
        return False
    return "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))
