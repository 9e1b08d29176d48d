"""``storage_options``: which of them may be known, and which are secrets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..base.url import Url
from . import url as urls

# Options that say where something is and name no one. All others may be secrets, and stay in this process.
PUBLIC = frozenset(
    (
        "account_name", "anon", "cache_check", "cache_storage", "check_files", "client_kwargs", "config_kwargs",
        "endpoint", "endpoint_url", "expiry_time", "project", "region", "region_name", "repo_type", "requester_pays",
        "revision", "same_names", "target_options", "target_protocol", "use_ssl", "verify", "version_aware",
    )
)  # fmt: skip
# Values of options that are shorter are words such as "us" or "true", and too common to be looked for.
_LEAST = 5


def public_options(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The ``storage_options`` that pickles, plans and journals carry; the others come from the worker's environment."""
    if options is None:
        return None
    found: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):  # options of a client, or of one link of a chain
            found[key] = public_options(value)
        elif key in PUBLIC and isinstance(value, (str, int, float, bool, type(None))):
            found[key] = urls.shown(value) if isinstance(value, str) and urls.is_url(value) else value
    return found


def secrets_of(options: Mapping[str, Any] | None) -> list[str]:
    """Texts in ``storage_options`` that no message may have, the longest first."""
    return sorted(set(_texts(options or {})), key=len, reverse=True)


def secrets_of_urls(chain: Iterable[Url]) -> Iterator[str]:
    """Yield the texts in the links of a chain that no message may have."""
    return (text for link in chain for text in link.secrets if len(text) >= _LEAST)


def _texts(options: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _texts(value)
        elif isinstance(value, (str, bytes)) and key not in PUBLIC and len(value) >= _LEAST:
            yield value if isinstance(value, str) else value.decode("latin-1")
