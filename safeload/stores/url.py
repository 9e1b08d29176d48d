"""URLs of weights: what is one, how messages show it, and which kinds are read without being asked for."""

from __future__ import annotations

import os
import re

from ..base.missing import of_page
from ..base.shown_url import links as links
from ..base.shown_url import shown as shown
from ..base.text import show
from ..errors import UnsupportedError

# A scheme has two letters or more: one is a drive of Windows. Chains of fsspec begin with "scheme::".
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:://|::)")

# Schemes that need no `storage_options`: a path in a configuration must not reach whatever fsspec can reach.
PLAIN = ("https", "http", "hf", "s3", "gs", "az", "file", "memory")
# Those that stay on this machine.
_HERE = ("file", "memory")
# Variables that forbid the network; huggingface_hub reads the first one the same way.
_OFFLINE = ("HF_HUB_OFFLINE", "SAFELOAD_OFFLINE")


def is_url(path: str) -> bool:
    """Whether a path is a URL, or a chain of them as fsspec has it: ``filecache::s3://bucket/key``."""
    return _URL.match(path) is not None


def scheme_of(url: str) -> str:
    """The scheme of a URL in lower case; of a chain the first one."""
    return re.split(r"://|::", url, maxsplit=1)[0].lower()


def needs_query(url: str) -> bool:
    """Whether a URL has a query, or a fragment, without which it leads elsewhere, or nowhere."""
    return any(mark in link for link in links(url) if "://" in link for mark in "?#")


def check_allowed(url: str, asked: bool) -> None:
    """Refuses URLs that a caller has not asked for.

    Args:
        url: a URL.
        asked: whether the caller has passed ``storage_options`` or a file system.

    Raises:
        UnsupportedError: a scheme that needs ``storage_options``, a chain without them, or the network while a variable
            forbids it.
    """
    scheme = scheme_of(url)
    chained = len(links(url)) > 1
    if not asked and (chained or scheme not in PLAIN):
        what = "a chain of URLs" if chained else f"the scheme {show(scheme)}"
        raise UnsupportedError(
            f"{shown(url)}: {what} is opened only with storage_options= (which may be empty): "
            f"without, only {', '.join(PLAIN)} are"
        )
    variable = offline()
    if variable is not None and any(scheme_of(link) not in _HERE for link in links(url) if "://" in link):
        raise UnsupportedError(f"{shown(url)}: {variable} is set, which forbids the network")


def check_no_page(url: str) -> None:
    """Refuses a page of the Hub, which is HTML about a model or a file of it.

    Raises:
        UnsupportedError: it says what to open instead.
    """
    plain = shown(url)
    page = of_page(plain)
    if page is not None and "/resolve/" not in plain and "/raw/" not in plain:
        raise UnsupportedError(f"{plain}: this is a page of the Hub: open {page}")


def offline() -> str | None:
    """The variable that forbids the network; None if none is set."""
    return next((name for name in _OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None)


def split(url: str) -> tuple[str, str]:
    """The folder of a URL, without a slash at its end, and the last name in it; a query stays with the folder.

    See `join` for the way back.
    """
    plain, mark, query = _divided(url)
    folder, _, name = plain.rstrip("/").rpartition("/")
    return f"{folder}{mark}{query}", name


def join(folder: str, name: str) -> str:
    """The URL of a name in a folder. A query is kept: like Azure's signatures, it may be valid for all of a folder."""
    plain, mark, query = _divided(folder)
    before = plain.rstrip("/")
    if before.endswith(":"):  # the root of a store: "memory://"
        before = f"{before}//"
    return f"{before}/{name}{mark}{query}"


def _divided(url: str) -> tuple[str, str, str]:
    """A URL before its query, the question mark, and the query: only the Web's schemes have one."""
    if scheme_of(url) not in ("http", "https"):
        return url, "", ""
    plain, mark, query = url.partition("#")[0].partition("?")
    return plain, mark, query


def local_path(url: str) -> str:
    """The path of a ``file://`` URL.

    Raises:
        UnsupportedError: it names another machine.
    """
    from urllib.parse import urlsplit  # only here: most paths are local
    from urllib.request import url2pathname

    if os.name == "nt":
        # What fsspec's `unstrip_protocol` makes of a path.
        url = re.sub(r"^(file://)([a-z]:/)", r"\1/\2", url, flags=re.IGNORECASE)
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise UnsupportedError(f"{shown(url)}: a file:// URL has three slashes before an absolute path")
    return url2pathname(parts.path)
