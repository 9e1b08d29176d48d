"""``storage_options``: which options are public, and which are secret."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..base import url as urls
from ..base.url import Url

# Options without any secret: they only locate files. All other options stay in this process.
PUBLIC = frozenset(
    (
        "account_name", "anon", "cache_check", "cache_storage", "check_files", "client_kwargs", "config_kwargs",
        "endpoint", "endpoint_url", "expiry_time", "project", "region", "region_name", "repo_type", "requester_pays",
        "revision", "same_names", "target_options", "target_protocol", "use_ssl", "verify", "version_aware",
    )
)  # fmt: skip
# Shorter values are words such as "us" or "true", which are too common to be masked.
_LEAST = 5


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
    return sorted(set(_texts(options or {})), key=len, reverse=True)


def secrets_of_urls(chain: Iterable[Url]) -> Iterator[str]:
    """Return the secrets in the links of a chain."""
    return (text for link in chain for text in link.secrets if len(text) >= _LEAST)


def _texts(options: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _texts(value)
        elif isinstance(value, (str, bytes)) and key not in PUBLIC and len(value) >= _LEAST:
            yield value if isinstance(value, str) else value.decode("latin-1")
