"""The configs of Keras models: find the code that building the model runs, without building it.

1. A config is JSON: objects with "class_name", "config" and, since Keras 3, "module". It is a file, or text in an HDF5
   file or a protobuf.
2. Lambda layers and ``__lambda__`` hold code. Any other name is imported from its module.
3. What Keras registers for building layers is harmless, but for what loads files. Other modules are names to judge.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from .zip import Readable

# Largest config, in bytes.
MAX_CONFIG = 16 << 20
# The key of a class in every spelling of JSON.
_KEY = re.compile(
    b'"' + b"".join(b"(?:%c|\\\\u00%02x)" % (byte, byte) for byte in b"class_name") + rb'"\s*:', re.IGNORECASE
)
# What JSON never holds.
_NOT_TEXT = re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]")
# Beginnings of a content that are tried in vain: other text can precede a config.
_MOST_TRIES = 64
_CHUNK, _OVERLAP = 1 << 20, 128
_SIZES = (1 << 12, 1 << 18, MAX_CONFIG)  # of a config, tried in turn

_LAMBDA, _MARSHALLED = "a Keras Lambda layer, which holds code", "a marshalled function in a Keras config"
_KERAS = r"(?:tensorflow\.(?:python\.)?|tf_)?keras(?:\.src|\.api|\._tf_keras\.keras)*"
_BUILDING = re.compile(
    rf"keras\.[A-Z]\w*|{_KERAS}\.models(?:\.\w+)*\.(?:Sequential|Functional|Model)|{_KERAS}\.(?:layers|initializers|"
    r"regularizers|constraints|activations|losses|metrics|optimizers|dtype_policies|quantizers|ops|random|engine|"
    r"mixed_precision)(?:\.\w+)+"
)
_LOADING = frozenset(("TFSMLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper", "deserialize"))
# TensorFlow functions called by Keras 2 layers.
_COMPUTING = re.compile(
    r"(?:(?:math|nn|linalg|signal|image|random|strings|keras|activations|__operators__)\.)*"
    r"(?!py_function|numpy_function|load_|print)\w+"
)


class KerasConfig(NamedTuple):
    """The code and the imports of a config."""

    at: int  # offset of its first class
    code: list[str]  # descriptions of the code in it
    names: list[str]  # what it imports


def configs(content: Readable) -> Iterator[KerasConfig]:
    """Iterate over the configs in a content; ValueError if text around a class name is no JSON, or repeats a key."""
    begin = at = tries = 0
    while at < content.size:
        match = _KEY.search(content.read_at(at, _CHUNK + _OVERLAP))
        if match is None or match.start() >= _CHUNK:
            at += _CHUNK
            continue
        key = at + match.start()
        first = _first_of_text(content, begin, key)
        text = content.read_at(first, key - first)
        for beginning in re.finditer(rb"[{\[]", text):
            start = first + beginning.start()
            end, config = _parse(content, start, key)
            if end > key:
                break
            tries += 1
            if tries > _MOST_TRIES:
                raise ValueError(key)
        else:
            raise ValueError(key)
        yield config
        begin = at = end


def _first_of_text(content: Readable, begin: int, key: int) -> int:
    """Return the first byte of the text around a key."""
    first, size = key, _SIZES[0]
    while first > begin:
        size = min(2 * size, first - begin)
        controls = [match.end() for match in _NOT_TEXT.finditer(content.read_at(first - size, size))]
        if controls:
            return first - size + controls[-1]
        first -= size
        if key - first > MAX_CONFIG:
            raise ValueError(key)
    return first


def _parse(content: Readable, begin: int, key: int) -> tuple[int, KerasConfig]:
    """Return the end of the JSON value at an offset, 0 if it is none, and what is in it."""
    config = KerasConfig(key, [], [])
    decoder = json.JSONDecoder(object_pairs_hook=lambda pairs: _object(pairs, config))
    for size in _SIZES:
        if size <= key - begin:
            continue
        data = content.read_at(begin, size)
        end = _NOT_TEXT.search(data)
        config.code.clear()
        config.names.clear()
        try:  # Latin-1, so that characters are bytes
            _, last = decoder.raw_decode(data[: end.start() if end else None].decode("latin-1"))
        except (ValueError, RecursionError):
            if end is not None or len(data) < size:
                break
            continue
        return begin + last, config
    return 0, config


def _object(pairs: list[tuple[str, Any]], config: KerasConfig) -> dict[str, str]:
    """Judge an object, and return the texts its owner needs."""
    fields = dict(pairs)
    if sum(key in ("class_name", "config", "module") for key, _ in pairs) > len(
        fields.keys() & {"class_name", "config", "module"}
    ):
        raise ValueError("readers would see two classes")
    name = fields.get("class_name")
    if name == "Lambda":
        config.code.append(_LAMBDA)
    elif name == "__lambda__":
        config.code.append(_MARSHALLED)
    elif isinstance(name, str):
        config.names.extend(_imports(name, fields.get("module"), fields.get("config")))
    return {key: fields[key] for key in ("function", "vocabulary") if isinstance(fields.get(key), str)}


def _imports(name: str, module: Any, config: Any) -> Iterator[str]:
    """Yield the imported names of an object that are not known to be harmless."""
    if isinstance(config, dict):
        if "vocabulary" in config:
            yield f"keras.layers.{name} of a file"
        if name.endswith("OpLambda") and not _COMPUTING.fullmatch(config.get("function", "x")):
            yield f"tensorflow.{config['function']}"
    if name == "function" and isinstance(config, str):
        name = config
    if not isinstance(module, str):
        if name in _LOADING:
            yield f"keras.layers.{name}"
    elif module == "builtins":
        if hasattr(builtins, name):
            yield f"builtins.{name}"
    elif name in _LOADING or not _BUILDING.fullmatch(f"{module}.{name}"):
        yield f"{module}.{name}"
