"""The package's JSON files: names and numbers that modules look up."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any


@cache
def read_data(module: str, file: str) -> dict[str, Any]:
    """Return the JSON object in a file beside a module, with tuples for arrays; nobody may change it.

    The module's loader reads it, from a zip archive too. Importing `importlib.resources` takes longer than most loads.
    """
    import json  # only here: it takes a millisecond, and most calls need no table

    spec: Any = sys.modules[module].__spec__
    content = spec.loader.get_data(os.path.join(os.path.dirname(spec.origin), file))
    result: dict[str, Any] = json.loads(content, object_pairs_hook=_object)
    return result


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = {key: _frozen(value) for key, value in pairs}
    if len(result) < len(pairs):
        raise ValueError(f"duplicate key in {[key for key, _ in pairs]}")
    return result


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if type(value) is list else value
