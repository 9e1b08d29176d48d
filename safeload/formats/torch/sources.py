"""Python sources in a torch.package, which imports them instead of installed modules."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .globals import ALLOWED

_PACKAGE = re.compile(r"[^/]*/\.data/extern_modules", re.IGNORECASE)
_SOURCE = re.compile(r"[^/]*/([^/]+?)(?:/.*)?\.py", re.DOTALL)
# megatron and pathlib: of the metadata of torch.distributed.checkpoint.
_ALLOWED_PACKAGES = {"megatron", "pathlib", *(name.partition(".")[0] for name in ALLOWED)}


def replaced_modules(names: Iterable[str]) -> str:
    """Return why the globals of an archive with these entries are not those of the allowlist, or ""."""
    names = list(names)
    if not any(_PACKAGE.fullmatch(name) for name in names):
        return ""
    sources = {match[1] for name in names if (match := _SOURCE.fullmatch(name))}
    replaced = ", ".join(sorted(sources & _ALLOWED_PACKAGES))
    return replaced and f"torch.package imports its source of {replaced} instead of the installed module"
