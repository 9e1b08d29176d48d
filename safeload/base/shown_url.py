"""How messages show URLs: without what may be secret."""

from __future__ import annotations

import re

# Between two links of a chain. Addresses of IPv6 and queries may have "::" too, with no scheme behind it.
_CHAINED = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]+(?:://|::))")
# A link of a chain: its scheme, and where that is, the rest as RFC 3986 divides it.
_LINK = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(?:://([^/?#]*)([^?#]*)(.*))?", re.DOTALL)
# Schemes where what stands before "@" is the name of a repository or a container.
_NAMED = ("hf", "abfs", "abfss", "az")


def links(url: str) -> list[str]:
    """The links of a chain; a plain URL is a chain of one."""
    return _CHAINED.split(url)


def shown(url: str) -> str:
    """A URL as messages, reprs and pickles have it: without user, password, query and fragment, which may be secret."""
    return "::".join(map(_shown_link, links(url)))


def _shown_link(link: str) -> str:
    match = _LINK.fullmatch(link)
    if match is None or match[2] is None:
        return re.split("[?#]", link, maxsplit=1)[0]
    scheme, host, path = match[1].lower(), match[2], match[3]
    user, at, place = host.rpartition("@")
    if scheme in _NAMED and ":" not in user:
        return f"{scheme}://{host}{path}"
    if not at and "@" in link and not re.fullmatch(r"[^:]*|\[.*\]|.*:[0-9]*", host):
        # A password with a mark in it that is not escaped: what looks like path and query is the rest of it.
        return f"{scheme}://{re.split('[?#]', link.rpartition('@')[2], maxsplit=1)[0]}"
    return f"{scheme}://{place}{path}"
