"""The API of the Hugging Face Hub, read by our HTTP client: commits, lists of files, and reasons of refusals.

1. ``/api/{models,datasets,spaces}/NAME[/revision/REVISION]`` is a JSON object: ``sha`` is the commit, each object in
   ``siblings`` has the path of a file as ``rfilename``.
2. ``/api/{models,datasets,spaces}/NAME/auth-check`` is an error if the files of the repository are refused.
3. An error has a word in ``X-Error-Code`` and a text in ``X-Error-Message``.
4. ``RateLimit: "api";r=0;t=55`` with status 429 asks to wait 55 seconds.

A response is held in memory, so its size is limited. huggingface_hub supplies the token and the endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any
from urllib.parse import quote

from .._version import __version__
from ..base.absent import not_installed
from ..base.log import debug
from ..errors import FormatError, RemoteError, RemotePermissionError, UnsupportedError, missing_file
from . import url as urls
from .foreign_errors import cleaned, is_transient, retried, translated
from .http import refusal, request
from .http_client import Client, Exchange, RequestTarget, checked_headers, target_of
from .hub_place import HubPlace, place_of
from .json_file import MAX_JSON, parse_json
from .retries import Failure, broken_off, of_status, requested_wait

_LENGTH = re.compile(r"[0-9]{1,18}")
# Bytes received at once.
_PIECE = 256 << 10
# huggingface_hub's errors for missing repositories, revisions and files, as opposed to missing access.
_MISSING = ("RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError", "RemoteEntryNotFoundError")
_WRONG_TOKEN = "Invalid credentials"
_DISABLED = "Access to this resource is disabled."


def library() -> Any:
    """Import huggingface_hub."""
    try:
        import huggingface_hub  # only here: cached files need no requests, and the import takes 0.3 s
    except ImportError as error:
        text = "hf:// URLs need huggingface_hub, which is not installed: pip install huggingface_hub"
        raise not_installed(error, text, "huggingface_hub") from None
    return huggingface_hub


class HubApi:
    """The API of a Hub, and the URLs of its files."""

    def __init__(self, options: Mapping[str, Any], client: Client, secrets: list[str]) -> None:
        endpoint = options.get("endpoint")
        if not isinstance(endpoint, (str, type(None))):
            raise TypeError(f"endpoint must be a str, got {type(endpoint).__name__}")
        self._token = options.get("token")
        if not isinstance(self._token, (str, bool, type(None))):
            raise TypeError(f"token must be a str or a bool, got {type(self._token).__name__}")
        self._endpoint = endpoint.rstrip("/") if endpoint else None
        self._client = client
        self._secrets = secrets

    def __repr__(self) -> str:
        return "<HubApi>"  # the token is secret

    @property
    def endpoint(self) -> str:
        """The URL of the Hub, without a final slash."""
        library()
        return self._endpoint or str(import_module("huggingface_hub.constants").ENDPOINT)

    def writer(self) -> Any:
        """Return huggingface_hub's own client, for uploads."""
        return library().HfApi(
            endpoint=self.endpoint,
            token=self._token,
            library_name="safeload",
            library_version=__version__,
            headers=self._client.headers,
        )

    # ---- requests ----

    def info(self, place: HubPlace, shown: str) -> dict[str, Any]:
        """Return the Hub's description of a revision."""

        def content_of(exchange: Exchange) -> bytes | Failure:
            return self._refusal(exchange, place, shown) or _content(exchange, shown)

        target = self._target(lambda: self._address(place, "revision", place.revision), shown)
        content = request(self._client, target, shown, content_of)
        try:
            return parse_json(content, "the Hub's response", shown)
        except FormatError as error:
            text = f"{error.args[0]}" if error.offset is None else f"{error.args[0]} at byte {error.offset}"
        raise RemoteError(text, shown)

    def refusal_of(self, place: HubPlace, shown: str) -> Exception | None:
        """Return the Hub's own explanation for a refused file: a gated repository can be listed, but not read."""

        def check(exchange: Exchange) -> Failure | None:
            if exchange.status == 404 and "X-Error-Code" not in exchange.headers:
                return None  # a mirror without this part of the API
            return self._refusal(exchange, place, shown)

        try:
            target = self._target(lambda: self._address(place, "auth-check"), shown)
            request(self._client, target, shown, check)
        except (RemotePermissionError, FileNotFoundError) as error:
            return error
        except OSError as error:
            debug("%s: no reason for the refusal: %s", shown, error)  # the refusal itself is raised
        return None

    def file(self, place: HubPlace, revision: str, shown: str) -> RequestTarget:
        """Return the URL of a file and the headers for it."""

        def address() -> str:
            return str(
                library().hf_hub_url(
                    place.repo, place.path, repo_type=place.kind, revision=revision, endpoint=self._endpoint
                )
            )

        return self._target(address, shown)

    def _address(self, place: HubPlace, what: str, revision: str | None = "") -> str:
        import_module("huggingface_hub.utils").validate_repo_id(place.repo)
        address = f"{self.endpoint}/api/{place.kind}s/{place.repo}"
        if revision is None:
            return address
        return f"{address}/{what}" + (f"/{quote(revision, safe='')}" if revision else "")

    def _target(self, address: Callable[[], str], shown: str) -> RequestTarget:
        """Return a URL of the Hub with the token and the caller's headers."""
        library()
        build: Callable[..., dict[str, str]] = import_module("huggingface_hub.utils").build_hf_headers

        def parts() -> tuple[str, dict[str, str]]:
            return address(), build(token=self._token, library_name="safeload", library_version=__version__)

        url, headers = retried(parts, shown, self._secrets, transient=lambda error: False, translate=self.translated)
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self._secrets:
            self._secrets.append(token)
        headers = {**headers, **{name.lower(): value for name, value in self._client.headers.items()}}
        return target_of(url, checked_headers(headers))

    # ---- refusals ----

    def _refusal(self, exchange: Exchange, place: HubPlace, shown: str) -> Failure | None:
        """Return why a response is not an answer, or None if it is one."""
        if exchange.status in (200, 407):
            return refusal(exchange, shown, self._client.credentials)
        exchange.drain()
        text = cleaned(RuntimeError(exchange.headers.get("X-Error-Message", "")), self._secrets)
        error = self._explained(exchange, text, place, shown)
        if error is not None:
            return Failure(error)
        failure = of_status(exchange.status, requested_wait(exchange.status, exchange.headers), shown)
        if text:
            failure.error.args = (f"{failure.error.args[0]}: {text}", *failure.error.args[1:])
        return failure

    def _explained(self, exchange: Exchange, text: str, place: HubPlace, shown: str) -> Exception | None:
        """Return the error for a refusal that is no fault of the server."""
        status, code = exchange.status, exchange.headers.get("X-Error-Code")
        if code == "GatedRepo":
            return RemotePermissionError(self._gated(place), shown)
        if code == "RevisionNotFound":
            return missing_file(shown, f"{shown}: the {place.kind} has no such branch, tag or commit")
        if status == 401 and text.startswith(_WRONG_TOKEN):
            return RemotePermissionError(_refused_token(), shown)
        if code == "RepoNotFound" or status in (401, 404, 410):
            return missing_file(shown, f"{shown}: {_no_repository(place.kind)}")
        if status == 403 or text == _DISABLED:
            return RemotePermissionError(text or "the Hub refuses access (403)", shown)
        return None

    def _gated(self, place: HubPlace) -> str:
        """Say how to get access to a gated repository."""
        page = f"{urls.shown(self.endpoint)}/{place.page}"
        return f"access to this {place.kind} is restricted: accept its terms at {page}, and log in with `hf auth login`"

    def translated(self, error: Exception, shown: str, *_: Any) -> Exception:
        """Return safeload's error for huggingface_hub's, with the Hub's own explanation."""
        names = [kind.__name__ for kind in type(error).__mro__]
        text = cleaned(error, self._secrets)
        if "GatedRepoError" in names:
            return RemotePermissionError(self._gated(place_of(shown)), shown)
        if "DisabledRepoError" in names:
            return RemotePermissionError(text, shown)
        if "LocalTokenNotFoundError" in names:
            return RemotePermissionError("there is no token on this machine; log in with `hf auth login`", shown)
        if any(name in names for name in _MISSING):
            return missing_file(shown, f"{shown}: {_missing(shown, names)}")
        if _status(error) == 401:
            return RemotePermissionError(_refused_token(), shown)
        if "HFValidationError" in names or "HfUriError" in names:
            return UnsupportedError(f"{shown}: {text}")
        if _status(error) == 403:
            return RemotePermissionError(text, shown)
        if _status(error) is not None:
            return RemoteError(text, shown)
        return translated(error, shown, self._secrets)


def is_transient_write(error: Exception) -> bool:
    """Return whether huggingface_hub may succeed with another attempt."""
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    return type(error).__name__ not in ("LocalTokenNotFoundError", "OfflineModeIsEnabled") and is_transient(error)


def _content(exchange: Exchange, shown: str) -> bytes | Failure:
    """Return the body of a response."""
    length = exchange.headers.get("Content-Length", "").strip()
    expected = int(length) if _LENGTH.fullmatch(length) else None
    content, memory = bytearray(), memoryview(bytearray(_PIECE))
    while (expected or 0) <= MAX_JSON and len(content) <= MAX_JSON:
        count = exchange.receive(memory)
        if not count:
            return broken_off(shown) if expected is not None and len(content) < expected else bytes(content)
        content += memory[:count]
    size = f"{expected:,}" if expected is not None else "more"
    return Failure(RemoteError(f"the Hub's response has {size} bytes, but the limit is {MAX_JSON:,}", shown))


def _refused_token() -> str:
    return f"the Hub refuses the token: {_WRONG_TOKEN}; log in with `hf auth login`, or set HF_TOKEN"


def _no_repository(kind: str) -> str:
    return f"no such {kind}, or it is private; check the name, or log in with `hf auth login`"


def _missing(shown: str, names: list[str]) -> str:
    """Say whether a repository, a revision or a file is missing."""
    kind = place_of(shown).kind
    if "RevisionNotFoundError" in names:
        return f"the {kind} has no such branch, tag or commit"
    if "EntryNotFoundError" in names:
        return f"the {kind} has no such file"
    return _no_repository(kind)


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
