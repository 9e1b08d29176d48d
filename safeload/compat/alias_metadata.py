"""What `importlib.metadata` tells about safetensors while safeload is in its place."""

from __future__ import annotations

import os
from importlib.metadata import Distribution
from pathlib import Path

from .._version import __version__


class AliasDistribution(Distribution):
    """A distribution without files."""

    def __init__(self, name: str, version: str) -> None:
        self._metadata = (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: provided by safeload {__version__}\n"
        )

    def read_text(self, filename: str | os.PathLike[str]) -> str | None:
        """Return the text of a metadata file, or None."""
        return self._metadata if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Return where a file of the distribution would be."""
        return Path(__file__).parent / path
