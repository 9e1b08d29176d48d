"""The dtype of a model's weights in its ``config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..base import dtypes

# Its keys: before transformers 4.56, and since.
_KEYS = ("torch_dtype", "dtype")
# The configuration whose dtype counts where the outermost has none: that of the language model.
_FIRST = "text_config"


def dtype_in(config: Mapping[str, Any] | None) -> dtypes.Dtype | None:
    """The floating dtype, of 16 bits or more, that the weights have once they are dequantized.

    That of the outermost configuration counts, else that of ``text_config``, else the one that all other nested
    configurations agree on.

    Args:
        config: parsed ``config.json``; None without one.

    Returns:
        The dtype; None where the config does not name one.
    """
    if config is None:
        return None
    own = _own(config)
    if own is not None:
        return own
    nested = {key: dtype_in(part) for key, part in _nested(config)}
    if nested.get(_FIRST) is not None:
        return nested[_FIRST]
    found = {row for row in nested.values() if row is not None}
    return found.pop() if len(found) == 1 else None


def with_dtype(config: Mapping[str, Any], dtype: dtypes.Dtype) -> dict[str, Any]:
    """A config that names another dtype, also in its nested configurations."""
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
