"""Recognized quantizations that safeload does not dequantize, with the tools that do.

A row of ``refused.json`` has a ``name``, which says why, the ``reader``, and what identifies it: the suffix
``main`` of codes with any tensor ``beside`` them (if ``fp8``, also of fp8 codes), or ``methods`` of the configuration.
Suffixes are more specific than a method, which can have different layouts.

Sources of the names: the quantizers of transformers, ExLlamaV2 and V3, AQLM, VPTQ, QuIP#, QTIP, SpQR, Marlin, HQQ,
EETQ; Quark's as in `quark`.
"""

from __future__ import annotations

from typing import Any

from ..base import dtypes, packing
from ..base.data import read_data
from .families import FP8, Family


def _family(row: dict[str, Any]) -> Family:
    codes = dtypes.FLOAT_CODES - FP8 | dtypes.INTEGER_CODES
    required = {packing.SCALE: row["beside"]} if "beside" in row else {}
    return Family(
        row["name"],
        row.get("main", ""),
        codes | FP8 if row.get("fp8") else codes,
        required,
        None,
        reader=row["reader"],
        methods=row.get("methods", ()),
    )


FAMILIES = [_family(row) for row in read_data(__name__, "refused.json")["refused"]]
