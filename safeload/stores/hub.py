"""``hf://`` URLs: huggingface_hub says which commit and which files, and the Web's reader reads them.

A URL is ``hf://owner/name[@revision][/path]``; datasets and spaces have ``datasets/`` and ``spaces/`` before the owner.
The revision is one name; a slash in it is written ``%2F``, except in ``refs/pr/1`` and ``refs/convert/parquet``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from .._version import __version__
from ..base import log
from ..base.forking import ProcessLock
from ..base.text import show
from ..errors import RemoteError, RemotePermissionError, UnsupportedError, missing_file
from . import url as urls
from .foreign_errors import again, cleaned, in_our_words, may_pass
from .http import HttpStore
from .http_client import Client, RequestTarget, web_url
from .options import secrets_of
from .store import ByteStore

_KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_URL = re.compile(
    r"(?i:hf)://(?:(?P<kind>models|datasets|spaces)/)?"
    r"(?P<repo>(?!(?:models|datasets|spaces|buckets|kernels)/)[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/pr/\d+|refs/convert/\w+|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)
_COMMIT = re.compile(r"[0-9A-Za-z]{1,64}")
# Storage options of the Hub itself.
_OPTIONS = ("endpoint", "token")
# What the Hub says when there is nothing, as opposed to no access; by the names of huggingface_hub's classes.
_MISSING = ("RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError", "RemoteEntryNotFoundError")


class HubPlace(NamedTuple):
    """What a URL names.

    Attributes:
        kind: "model", "dataset" or "space".
        repo: owner and name.
        revision: a branch, a tag or a commit; None for the main branch.
        path: in the repository; empty for all of it.
    """

    kind: str
    repo: str
    revision: str | None
    path: str


def place_of(url: str) -> HubPlace:
    """Divides a URL.

    Raises:
        UnsupportedError: it does not name a repository.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise UnsupportedError(
            f"{urls.shown(url)}: expected hf://owner/name[@revision][/path], hf://datasets/... or hf://spaces/...; "
            "for a bucket pass safeload.remote.of_fsspec(huggingface_hub.HfFileSystem(), path)"
        )
    kind = _KINDS[match["kind"] or "models"]
    revision = None if match["revision"] is None else unquote(match["revision"])
    return HubPlace(kind, match["repo"], revision, (match["path"] or "").strip("/"))


class Snapshot(NamedTuple):
    """A commit of a repository.

    Attributes:
        commit: its digest.
        files: paths of its files.
    """

    commit: str
    files: frozenset[str]


class Hub:
    """Repositories of the Hugging Face Hub.

    Each revision is resolved once, in one request, and stays at its commit for as long as this object lives.

    Args:
        options: ``token`` and ``endpoint``, by default huggingface_hub's own; the rest is for the Web's reader.

    Raises:
        ImportError: huggingface_hub is not installed.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        try:
            import huggingface_hub
        except ImportError as error:
            if error.name != "huggingface_hub":
                raise
            raise ModuleNotFoundError(
                "hf:// URLs need huggingface_hub, which is not installed: pip install huggingface_hub",
                name="huggingface_hub",
            ) from None
        self._token = options.get("token")
        self._endpoint = options.get("endpoint")
        rest = {key: value for key, value in options.items() if key not in _OPTIONS}
        self._client = Client(rest, "hf", other_options=_OPTIONS)
        self._api = huggingface_hub.HfApi(
            endpoint=self._endpoint, token=self._token, library_name="safeload", library_version=__version__
        )
        self._secrets = [*secrets_of(options), *filter(None, (huggingface_hub.get_token(),))]
        self._snapshots: dict[tuple[str, str, str | None], Snapshot] = {}
        self._asking = ProcessLock()

    def __repr__(self) -> str:
        return "<Hub>"  # the token is a secret

    def snapshot(self, place: HubPlace, url: str) -> Snapshot:
        """The commit of a revision, and its files.

        Raises:
            FileNotFoundError: there is no such repository or revision, or none that this token may know of.
            RemotePermissionError: the repository is gated, or the token is wrong.
            RemoteError: the Hub does not answer.
        """
        key = place.kind, place.repo, place.revision
        found = self._snapshots.get(key)
        if found is None:
            with self._asking.own:  # the shards of a folder are opened by many threads
                found = self._snapshots.get(key)
                if found is None:
                    found = self._snapshots[key] = self._ask(place, urls.shown(url))
                    log.debug("%s: commit %s, %d files", urls.shown(url), found.commit, len(found.files))
        return found

    def _ask(self, place: HubPlace, shown: str) -> Snapshot:
        def ask() -> Any:
            return self._api.repo_info(place.repo, revision=place.revision, repo_type=place.kind)

        info = again(ask, shown, self._secrets, passing=_may_pass, words=self._words)
        if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
            raise RemoteError("the Hub does not say which commit this is", shown)
        names = [file.rfilename for file in info.siblings or ()]
        for name in names:
            if not _is_path(name):
                raise RemoteError(f"the Hub lists files: expected paths in the repository, got {show(name)}", shown)
        return Snapshot(info.sha, frozenset(names))

    def _words(self, error: Exception, shown: str, *_: Any) -> Exception:
        """The Hub's own sentence where it refuses."""
        names = [kind.__name__ for kind in type(error).__mro__]
        said = cleaned(error, self._secrets)
        if "GatedRepoError" in names or "DisabledRepoError" in names or "LocalTokenNotFoundError" in names:
            return RemotePermissionError(said, shown)
        if any(name in names for name in _MISSING):
            return missing_file(shown, f"{said} ({shown})")
        if "HFValidationError" in names or "HfUriError" in names:
            return UnsupportedError(f"{shown}: {said}")
        if _status(error) in (401, 403):
            return RemotePermissionError(said, shown)
        if _status(error) is not None:
            return RemoteError(said, shown)
        return in_our_words(error, shown, self._secrets)

    # ---- Backend ----

    def open(self, url: str) -> ByteStore:
        """See `Backend`."""
        place = place_of(url)
        snapshot = self.snapshot(place, url)
        shown = urls.shown(url)
        if place.path not in snapshot.files:
            what = "this is a folder, not a file" if self.is_folder(url) else "there is no such file in the repository"
            raise missing_file(shown, f"{shown}: {what}, at commit {snapshot.commit}")

        def resolve() -> RequestTarget:
            from huggingface_hub import hf_hub_url
            from huggingface_hub.utils import build_hf_headers

            address = hf_hub_url(
                place.repo, place.path, repo_type=place.kind, revision=snapshot.commit, endpoint=self._endpoint
            )
            headers = build_hf_headers(token=self._token, library_name="safeload", library_version=__version__)
            return RequestTarget(web_url(address)[0], headers)

        try:
            return HttpStore(shown, resolve, self._client)
        except RemotePermissionError as error:
            ours = self._reason(place, shown) or error
        try:
            raise ours
        finally:
            del ours  # which refers to this frame

    def _reason(self, place: HubPlace, shown: str) -> Exception | None:
        """Why a file is refused, in the Hub's own sentence: a gated repository may be listed, but not read."""
        try:
            self._api.auth_check(place.repo, repo_type=place.kind)
        except Exception as error:
            return self._words(error, shown)
        return None

    def is_folder(self, url: str) -> bool:
        """See `Backend`."""
        place = place_of(url)
        try:
            files = self.snapshot(place, url).files
        except FileNotFoundError:
            return False
        return not place.path or any(name.startswith(f"{place.path}/") for name in files)

    def listing(self, url: str) -> list[tuple[str, bool]]:
        """See `Backend`."""
        place = place_of(url)
        begin = f"{place.path}/" if place.path else ""
        found = {
            (name[len(begin) :].partition("/")[0], "/" in name[len(begin) :])
            for name in self.snapshot(place, url).files
            if name.startswith(begin)
        }
        return sorted(found)

    def pinned(self, url: str) -> str:
        """The URL with the commit that its revision was resolved to, if it was: what another process opens."""
        place = place_of(url)
        snapshot = self._snapshots.get((place.kind, place.repo, place.revision))
        if snapshot is None:
            return url
        before = "" if place.kind == "model" else f"{place.kind}s/"
        return f"hf://{before}{place.repo}@{snapshot.commit}" + (f"/{place.path}" if place.path else "")

    def upload(self, source: str, url: str) -> None:
        """See `Backend`: one commit for each file."""
        place = place_of(url)
        shown = urls.shown(url)
        if not place.path:
            raise UnsupportedError(f"{shown}: expected a path in the repository to write to")

        def commit() -> None:
            self._api.upload_file(
                path_or_fileobj=source,
                path_in_repo=place.path,
                repo_id=place.repo,
                repo_type=place.kind,
                revision=place.revision,
                commit_message=f"Upload {place.path.rpartition('/')[2]}",
            )

        again(commit, shown, self._secrets, passing=_may_pass, words=self._words)
        self._forget(place)

    def remove(self, several: Sequence[str]) -> None:
        """See `Backend`: one commit for all of them."""
        from huggingface_hub import CommitOperationDelete

        place, shown = place_of(several[0]), urls.shown(several[0])
        self._forget(place)
        files = self.snapshot(place, several[0]).files
        there = sorted({found for url in several if (found := place_of(url).path) in files})
        if not there:
            return

        def commit() -> None:
            self._api.create_commit(
                place.repo,
                [CommitOperationDelete(path) for path in there],
                commit_message=f"Remove {there[0].rpartition('/')[2]}" + (" and others" if len(there) > 1 else ""),
                repo_type=place.kind,
                revision=place.revision,
            )

        again(commit, shown, self._secrets, passing=_may_pass, words=self._words)
        self._forget(place)

    def check_writable(self, url: str) -> None:
        """See `Backend`: the repository exists."""
        place = place_of(url)
        self._forget(place)
        self.snapshot(place, url)

    def _forget(self, place: HubPlace) -> None:
        """Has the next question about a revision asked anew."""
        self._snapshots.pop((place.kind, place.repo, place.revision), None)


def _is_path(name: object) -> bool:
    """Whether Git can have a file of this name."""
    if not isinstance(name, str) or any("\ud800" <= char <= "\udfff" for char in name):
        return False
    return "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _may_pass(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    return type(error).__name__ not in ("LocalTokenNotFoundError", "OfflineModeIsEnabled") and may_pass(error)
