"""The ``config.json`` of a destination whose source has none: it may describe weights that are gone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from ...base import dtypes, log
from ...engine.read.lazy import Lazy, LazyPacked
from ...errors import FormatError
from ...formats.folder import CONFIG, SINGLE
from ...formats.registry import SAFETENSORS
from ...packed.config import without_quantization
from ..folders.shard_folder import Folder, LocalFolder
from ..folders.shards import Output, config_with

_WIDEST_CODES = 4  # bytes of the integers that GPTQ and AWQ pack codes into


def may_hold_codes(outputs: Iterable[Output | np.dtype[Any]]) -> bool:
    """Whether tensors, or tensors of these dtypes, may be codes that a configuration describes."""
    return any(
        isinstance(output, LazyPacked)
        or (isinstance(output, Lazy) and _is_code(output.dtype))
        or (isinstance(output, np.dtype) and _is_code(output))
        for output in outputs
    )


def _is_code(dtype: np.dtype[Any]) -> bool:
    integer = dtype.kind in "iu" and dtype.itemsize <= _WIDEST_CODES
    return integer or (dtype.itemsize == 1 and dtype.kind != "b")


def cured(folder: Folder, target: dtypes.Dtype | None) -> dict[str, Any] | None:
    """Return the old ``config.json`` without its quantization; None if it has none, or cannot be read.

    Args:
        folder: the destination, whose new weights are not quantized.
        target: dtype that floating tensors were converted to; None if it is unchanged.
    """
    config = _quantized_config(folder)
    if config is None:
        return None
    log.warning(
        "%s: removed the quantization of the old weights, because the new weights have none and their source has no %s",
        folder.shown(CONFIG),
        CONFIG,
    )
    return config_with(config, target, restored=True)


def warn_of_old(path: str, format: str) -> None:
    """Warn of a ``config.json`` beside a new ``model.safetensors`` that says the weights are quantized."""
    if format != SAFETENSORS or os.path.basename(path) != SINGLE:
        return
    folder = LocalFolder(os.path.dirname(path) or ".")
    if _quantized_config(folder) is not None:
        log.warning(
            "%s describes a quantization that the weights in %s do not have: remove it, or other programs cannot load "
            "them; a conversion from a folder to a folder, with max_shard_size=, does so",
            folder.shown(CONFIG),
            SINGLE,
        )


def _quantized_config(folder: Folder) -> dict[str, Any] | None:
    try:
        if CONFIG not in folder.names():
            return None
        config = folder.read_json(CONFIG, CONFIG)
    except (FormatError, OSError):
        return None
    return config if without_quantization(config) != config else None
