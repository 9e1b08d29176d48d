"""The parts of ``hf://`` URLs: ``hf://owner/name[@revision][/path]``.

Datasets and spaces have ``datasets/`` and ``spaces/`` before the owner. The revision is one name; a slash in it is
written ``%2F``, except in ``refs/pr/1`` and ``refs/convert/parquet``.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from ..base.text import show
from ..errors import UnsupportedError
from . import url as urls

_KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_URL = re.compile(
    r"(?i:hf)://(?:(?P<kind>models|datasets|spaces)/)?"
    r"(?P<repo>(?!(?:models|datasets|spaces|buckets|kernels)/)[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/pr/\d+|refs/convert/\w+|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)


class HubPlace(NamedTuple):
    """The parts of a URL."""

    kind: str  # "model", "dataset" or "space"
    repo: str  # owner and name
    revision: str | None  # a branch, a tag or a commit; None for the main branch
    path: str  # in the repository; empty for the whole repository

    @property
    def page(self) -> str:
        """The path of the repository's page on the Hub."""
        return self.repo if self.kind == "model" else f"{self.kind}s/{self.repo}"


def place_of(url: str) -> HubPlace:
    """Parse a URL."""
    match = _URL.fullmatch(url)
    if match is None:
        raise UnsupportedError(
            f"{urls.shown(url)}: expected hf://owner/name[@revision][/path], hf://datasets/... or hf://spaces/...; "
            "for a bucket pass safeload.remote.of_fsspec(huggingface_hub.HfFileSystem(), path)"
        )
    kind = _KINDS[match["kind"] or "models"]
    revision = None if match["revision"] is None else unquote(match["revision"])
    if revision is not None and not {"", ".", ".."}.isdisjoint(revision.split("/")):  # another URL of the Hub
        raise UnsupportedError(f"{urls.shown(url)}: {show(revision)} cannot be a branch, a tag or a commit")
    return HubPlace(kind, match["repo"], revision, (match["path"] or "").strip("/"))
