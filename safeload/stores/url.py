"""Rules on which URLs may be opened: schemes, chains and networks. `base.url` does the parsing."""

from __future__ import annotations

import os
import re

from ..base.missing_path import of_page
from ..base.text import show
from ..base.url import UrlError as UrlError
from ..base.url import divided, file_path, parsed
from ..base.url import is_url as is_url
from ..base.url import join as join
from ..base.url import links as links
from ..base.url import scheme_of as scheme_of
from ..base.url import shown as shown
from ..base.url import split as split
from ..errors import UnsupportedError

# Schemes allowed without `storage_options`: a path in a configuration must not reach every filesystem of fsspec.
PLAIN = ("https", "http", "hf", "s3", "gs", "az", "file", "memory")
# Schemes without network access.
_HERE = ("file", "memory")
# Variables to forbid the network; huggingface_hub reads the first variable in the same way.
_OFFLINE = ("HF_HUB_OFFLINE", "SAFELOAD_OFFLINE")


def needs_query(url: str) -> bool:
    """Return whether a URL has a query or a fragment, without which it would lead elsewhere."""
    return any(link.tail for link in parsed(url) if link.place is not None)


def check_allowed(url: str, asked: bool) -> None:
    """Refuse URLs the caller may not have meant to open."""
    scheme = scheme_of(url)
    chained = len(links(url)) > 1
    if scheme == "ollama":  # `formats.opening` resolves the names that callers pass themselves
        raise UnsupportedError(
            f"{shown(url)}: an ollama:// name stands alone: it leads to files of this machine, so it cannot be in a "
            "list, a plan, an index or a destination"
        )
    if not asked and (chained or scheme not in PLAIN):
        what = "a chain of URLs" if chained else f"the scheme {show(scheme)}"
        raise UnsupportedError(
            f"{shown(url)}: {what} needs storage_options= (which may be empty); without it, safeload opens only "
            f"{', '.join(PLAIN)}"
        )
    if chained or scheme != "hf":  # `hub.Hub` looks into the cache before it needs the network
        check_online(url)


def check_online(url: str) -> None:
    """Refuse a URL that needs the network if a variable forbids it."""
    variable = offline()
    if variable is not None and any(scheme_of(link) not in _HERE for link in links(url) if "://" in link):
        raise UnsupportedError(f"{shown(url)}: {variable} is set, which forbids network access")


def check_no_page(url: str) -> None:
    """Refuse a page of the Hub, which is HTML about a model or a file."""
    plain = shown(url)
    page = of_page(plain)
    if page is not None and "/resolve/" not in plain and "/raw/" not in plain:
        raise UnsupportedError(f"{plain}: this is a web page of the Hub: open {page} instead")


def offline() -> str | None:
    """Return the variable that forbids the network, or None."""
    return next((name for name in _OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None)


def public(url: str) -> str:
    """Return a URL without secrets that still leads to its file."""
    if needs_query(url):
        raise UnsupportedError(
            f"{shown(url)}: the query of this URL may be a secret and must stay in this process: "
            "it cannot go into a pickle, a plan or a journal"
        )
    if any(link.hides_place for link in parsed(url)):
        raise UnsupportedError(f"{shown(url)}: the @ of this path may end a password: escape it as %40")
    return shown(url)


def local_path(url: str) -> str:
    """Return the path of a ``file://`` URL."""
    if os.name == "nt":
        # fsspec's `unstrip_protocol` writes two slashes before a drive.
        url = re.sub(r"^(file://)([a-z]:/)", r"\1/\2", url, flags=re.IGNORECASE)
    link = divided(url)
    try:
        path = file_path(link)
    except UrlError as error:
        raise UnsupportedError(f"{shown(url)}: {error}") from None
    if os.name != "nt":
        return path
    from urllib.request import url2pathname

    return url2pathname(link.path)
