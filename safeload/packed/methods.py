"""The known settings of each quantization method, a row per writer in ``methods.json``.

A key of a configuration either changes the values of weights, and ``values`` lists the supported settings in lower
case; or families ``read`` it and compare it with shapes; or it does not affect weights (``ignored``, and ``anywhere``
for module lists, activations, the KV cache, kernels and the writer). If any other key is set, such as ``rotation``, the
values are unknown. "@calibration" stands for the list of this name: there are lists for calibration by GPTQ and its
relatives (optimum, AutoGPTQ, GPTQModel), and for auto-round, which adds its keys to all its formats.

Sources: the configuration classes of transformers 5.23, compressed-tensors 0.20 and 0.12, GPTQModel 7.7, AutoGPTQ 0.7,
optimum, autoawq 0.2.9, auto-round 0.16, nvidia-modelopt 0.47, amd-quark 0.13, mlx-lm 0.32, lmdeploy; published configs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from ..base import packing
from ..base.data import read_data

_data = partial(read_data, __name__, "methods.json")

QUARK = "quark"
GGUF = "gguf"  # safeload's own, for ggml blocks in a safetensors file
AUTO_ROUND = ("auto-round", "intel/auto-round")
# The method of a config.json with a ``quant_algo`` under "quantization"; the keys are modelopt's.
TENSORRT = "TensorRT-LLM"
# Quark's orders of the codes in a word, by ``pack_method``.
QUARK_ORDERS = {"reorder": packing.WORDS, "order": packing.ROWS}


class Method(NamedTuple):
    """The settings of a quantization method."""

    # values of ``quant_method`` under which codes outside all families are an error of the checkpoint
    names: tuple[str, ...]
    # other values of ``quant_method``, or of its predecessors in early files; synonyms of a single name
    aliases: tuple[str, ...]
    without_family: tuple[str, ...]  # formats and algorithms
    values: Mapping[str, tuple[str, ...]]  # keys with an effect on weights, and their supported values
    known: frozenset[str]  # other keys that do not make values unknown


def _method(
    *,
    names: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    without_family: tuple[str, ...] = (),
    values: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    read: tuple[str, ...] = (),
    ignored: tuple[str, ...] = (),
) -> Method:
    supported = {key: tuple(_expanded(texts)) for key, texts in values.items()}
    known = frozenset(_expanded((*read, *ignored, "@anywhere"))) - supported.keys()
    return Method(names, tuple(_expanded(aliases)), without_family, supported, known)


def _expanded(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        yield from _data()["lists"][text[1:]] if text.startswith("@") else (text,)


@cache
def _by_name() -> dict[str, Method]:
    rows = [_method(**row) for row in _data()["methods"]]
    return {name: row for row in rows for name in (*row.names, *row.aliases)}


@cache
def part_of(key: str) -> Method:
    """Return the settings of a part: "sparsity", the "weights" of a config group, or Quark's "spec" of a tensor."""
    return _method(**_data()["parts"][key])


def quark_dtypes() -> Mapping[str, Mapping[str, Any]]:
    """Return Quark's dtypes of codes: the ``stored`` dtypes, the ``bits`` of a code, and the ``numbers`` of codes."""
    dtypes: Mapping[str, Mapping[str, Any]] = _data()["quark_dtypes"]
    return dtypes


def method_of(name: str) -> Method | None:
    """Return the settings of a method, or None if the method is unknown."""
    return _by_name().get(name)


def canonical_name(name: str) -> str:
    """Return the table's name of a method: vLLM ignores case, and accepts more names than writers use."""
    lower = name.lower()
    row = method_of(lower)
    if row is None:
        return name
    return row.names[0] if lower in row.aliases and len(row.names) == 1 else lower


def unknown_setting(settings: Mapping[str, Any], method: Method) -> tuple[str, Any] | None:
    """Return the first key and value with an unknown effect on weights, or None."""
    for key, value in settings.items():
        if key in method.known or value is None or value is False or value in ("", [], {}):
            continue
        supported = method.values.get(key, ())
        if not isinstance(value, (str, int, float)) or str(value).lower() not in supported:
            return key, value
    return None
