"""Objects of S3 by presigned URLs: s3fs signs, and the Web's reader reads straight into the arrays' memory.

Each range is read with ``If-Match``, which s3fs does not send, and opening takes one request instead of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from ..base import log
from ..base.forking import ProcessLock
from ..errors import FormatError, RemoteError

if TYPE_CHECKING:
    from .fsspec_store import FsspecHandle
    from .http import HttpStore
    from .http_client import Client, RequestTarget

# Seconds for which a URL is signed; when it has expired, which temporary credentials may do earlier, it is signed anew.
_VALID = 3600
# Settings of a connection that the Web's reader does not have.
_CONNECTION = frozenset(("client_cert", "proxies", "proxies_config"))


class Signer:
    """Opens objects by presigned URLs, as long as that works.

    Attributes:
        works: False once a URL was refused that s3fs could read.
    """

    def __init__(self) -> None:
        self.works = True
        self._client: Client | None = None
        self._making = ProcessLock()

    def open(self, handle: FsspecHandle, place: str, shown: str) -> HttpStore | None:
        """Opens an object; None if that takes s3fs: it may also have a better error.

        Raises:
            FileNotFoundError: there is no such object.
            FormatError: the answers are of different objects.
        """
        if not self.works or not _signable(handle.fs):
            return None

        def resolve() -> RequestTarget:
            from .http_client import RequestTarget, web_url

            fs = handle.fs
            named = {key: value for key, value in _settings(fs, "req_kw").items() if key == "RequestPayer" and value}
            url = str(handle.ask(shown, "url", place, expires=_VALID, **named))
            web, _ = web_url(url)
            signed = parse_qs(web.query or "").get("X-Amz-SignedHeaders", [""])[0].split(";")
            headers = {"x-amz-request-payer": named["RequestPayer"]} if "x-amz-request-payer" in signed else {}
            return RequestTarget(web, headers)

        try:
            from .http import HttpStore

            return HttpStore(shown, resolve, self._shared(handle))
        except (FormatError, FileNotFoundError):
            raise
        except (RemoteError, ImportError) as error:
            log.debug("%s: read by s3fs, as a signed URL was refused: %s", shown, type(error).__name__)
        return None

    def _shared(self, handle: FsspecHandle) -> Client:
        from .http_client import Client

        with self._making.own:
            if self._client is None:
                verify = _settings(handle.fs, "client_kwargs").get("verify")
                self._client = Client({} if verify is None else {"verify": verify}, "s3")
            return self._client


def _settings(fs: Any, name: str) -> dict[str, Any]:
    return dict(getattr(fs, name, None) or {})


def _signable(fs: Any) -> bool:
    """Whether a URL says all that a request needs: a customer's own encryption key has to be in headers."""
    keys = {*_settings(fs, "s3_additional_kwargs"), *_settings(fs, "req_kw"), *_settings(fs, "kwargs")}
    return not any(key.startswith("SSECustomer") for key in keys) and not _CONNECTION & {
        *_settings(fs, "config_kwargs")
    }
