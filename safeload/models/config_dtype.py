"""The weight dtype in a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
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
    named = (value for key in reversed(_KEYS) if isinstance(value := config.get(key), str) and dtypes.is_name(value))
    row = next(map(dtypes.parse, named), None)
    if row is not None and row.floating and row.bits >= 16:
        return row
    nested = {key: dtype_in(part) for key, part in config.items() if _is_config(key, part)}
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


def _is_config(key: str, value: Any) -> bool:
    return isinstance(value, Mapping) and key.endswith("config")


def _changed(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    result = {key: _changed(value, name) if _is_config(key, value) else value for key, value in config.items()}
    result.update((key, name) for key in _KEYS if isinstance(config.get(key), str))
    return result
