"""Where the configuration of open files is: in their metadata, in ``config.json``, or in what older tools wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..base import dtypes, packing
from ..base.text import show
from ..engine.run.weight_file import WeightFile
from ..errors import SafeloadError, UnsupportedError
from ..stores.files import Files
from ..stores.json_file import parse_json, read_if_there
from .config import quantization_of

# Files beside weights that may have the quantization of those.
BESIDE = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
# The methods of those of them that hold nothing but a quantization, and do not name it.
_METHODS_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def config_of(files: Sequence[WeightFile], config: Mapping[str, Any] | None, title: str) -> Mapping[str, Any] | None:
    """The configuration of files: what safeload stored in their metadata, else what stands beside them.

    Raises:
        UnsupportedError: several files with different quantizations.
        FormatError: the metadata is malformed.
    """
    found: list[tuple[str, Mapping[str, Any]]] = []
    beside: dict[str, Mapping[str, Any] | None] = {}
    for file in files:
        if not dtypes.may_hold_codes(file.table.numbers):
            continue
        own = _config_inside(file)
        if own is None:
            folder = file.files.split(file.place if file.remote else file.path)[0]
            if folder not in beside:
                beside[folder] = _config_beside(folder, file.files)
            own = beside[folder]
        if own is not None:
            found.append((file.path, own))
    if not found:
        return config
    said = [quantization_of(one) for _, one in found]
    for (path, _), quantization in zip(found, said, strict=True):
        if quantization != said[0]:
            raise UnsupportedError(
                f"{title}: {show(found[0][0])} and {show(path)} have different quantization configurations: open them "
                "apart, or with stored=True",
                path=path,
            )
    return found[0][1]


def _config_inside(file: WeightFile) -> Mapping[str, Any] | None:
    """The quantization that safeload stores in the metadata of a file of packed tensors."""
    text = (file.table.metadata() or {}).get(packing.CONFIG_KEY)
    if text is None:
        return None
    found: Mapping[str, Any] = parse_json(text.encode(), packing.CONFIG_KEY, file.path)
    return found


def _config_beside(folder: str, files: Files) -> Mapping[str, Any] | None:
    """``config.json`` of a folder, or what older tools wrote beside it, if it has a quantization."""
    for name in BESIDE:
        try:
            read = read_if_there(files.join(folder, name), name, files)
        except (SafeloadError, OSError):  # ignored: the file was not requested
            continue
        if read is not None and name in _METHODS_BESIDE and not {"bits", "w_bit"}.isdisjoint(read):
            return {"quantization_config": {"quant_method": _METHODS_BESIDE[name], **read}}
        if read is not None and name != "config.json" and isinstance(read.get("quantization"), Mapping):
            return {"quantization_config": {"quant_method": "modelopt", **read["quantization"]}}
        if read is not None and quantization_of(read) is not None:
            found: Mapping[str, Any] = read
            return found
    return None
