"""General metadata of a model: its name, its size and its settings of sampling."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...base.text import show
from ...errors import FormatError
from ...formats.gguf import values
from ...stores.files import Location
from ...stores.json_file import read_if_there
from .settings import ModelConfig

GENERATION = "generation_config.json"
_VERSION_LIKE = re.compile(r"v\d+(?:\.\d+)*|\d.*", re.ASCII)
# Longest name to write.
_LONGEST = 200

# Keys of `GENERATION`, and the type of their value.
_SAMPLING: dict[str, tuple[tuple[str, ...], type[int] | type[float]]] = {
    "top_k": (("top_k",), values.I32),
    "top_p": (("top_p",), values.F32),
    "min_p": (("min_p",), values.F32),
    "temp": (("temperature",), values.F32),
    "penalty_repeat": (("penalty_repeat", "repetition_penalty"), values.F32),
}
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def general_keys(folder: Location, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, Any]:
    """Return the general keys of a model."""
    name = folder.shown.replace("\\", "/").rstrip("/").rpartition("/")[2]
    named = config.values.get("_name_or_path")
    if isinstance(named, str) and named and named.count("/") <= 1:
        name = named.rpartition("/")[2]
    content = read_if_there((folder / GENERATION).path, GENERATION, folder.files) or {}
    keys = dict(_sampling(content, folder))
    if name.strip(". "):
        keys["general.name"] = title_of(name[:_LONGEST])
    return {**keys, "general.size_label": size_label(shapes)}


def _sampling(content: Mapping[str, Any], folder: Location) -> Iterator[tuple[str, Any]]:
    for key, (names, kind) in _SAMPLING.items():
        value = next((value for name in names if (value := content.get(name)) is not None), None)
        if value is None:
            continue
        whole = kind is values.I32
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not abs(value) < 1 << 31:
            raise FormatError(f"{GENERATION}: {names[-1]} must be a number, got {show(value)}", folder.shown)
        yield f"general.sampling.{key}", kind(value)


def title_of(name: str) -> str:
    """Return a model's name for people, as llama.cpp's converter writes it."""
    words = name.strip().replace("-", " ").split()
    return " ".join(word.title() if word.islower() and not _VERSION_LIKE.fullmatch(word) else word for word in words)


def size_label(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the number of parameters as llama.cpp's converter writes it: "8.0B", "8x7B"."""
    total = shared = single = 0
    counts = []
    for name, shape in shapes.items():
        size = math.prod(shape)
        total += size
        if "_exps." in name and len(shape) >= 3:
            count = max(1, shape[-2 if ".bias" in name else -3])
            single += size // count
            counts.append(count)
        else:
            shared += size
    if not counts:
        return _rounded(total)
    return f"{sum(counts) // len(counts)}x{_rounded(shared + single)}"


def _rounded(count: int) -> str:
    divisor, unit = next(((divisor, unit) for divisor, unit in _UNITS if count > divisor), (1e3, "K"))
    scaled = count / divisor if unit == "" else count * (1 / divisor)
    digits = max(2 - len(str(round(scaled)).lstrip("0")), 0)
    return f"{scaled:.{digits}f}{unit}"
