"""The weight dtype in a ``config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..base import dtypes

# The keys before and since transformers 4.56.
_KEYS = ("torch_dtype", "dtype")
# The nested configuration to prefer if the outermost has no dtype: the language model's.
_FIRST = "text_config"


def dtype_in(config: Mapping[str, Any] | None) -> dtypes.Dtype | None:
    """Return the floating dtype of the dequantized weights, at least 16 bits wide, or None.

    The outermost configuration decides, else ``text_config``, else all other nested configurations if they agree.
    """
    if config is None:
        return None
    row = _own(config)
    if row is not None:
        return row
    nested = {key: dtype_in(part) for key, part in _nested(config)}
    if nested.get(_FIRST) is not None:
        return nested[_FIRST]
    rows = {row for row in nested.values() if row is not None}
    return rows.pop() if len(rows) == 1 else None


def with_dtype(config: Mapping[str, Any], dtype: dtypes.Dtype) -> dict[str, Any]:
    """Return a config with another dtype, nested configurations included."""
    result = _changed(config, dtype.name)
    if not any(isinstance(result.get(key), str) for key in _KEYS):
        result[_KEYS[0]] = dtype.name
    return result


def _own(config: Mapping[str, Any]) -> dtypes.Dtype | None:
    for key in reversed(_KEYS):
        value = config.get(key)
        if isinstance(value, str) and dtypes.is_name(value):
            row = dtypes.parse(value)
            return row if row.floating and row.bits >= 16 else None
    return None


def _nested(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("config"):
            yield key, value


def _changed(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    nested = dict(_nested(config))
    return {
        key: name
        if key in _KEYS and isinstance(value, str)
        else _changed(nested[key], name)
        if key in nested
        else value
        for key, value in config.items()
    }
