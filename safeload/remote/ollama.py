"""``ollama://`` names: models that ollama keeps on this machine.

1. A name is ``ollama://[host/][namespace/]model[:tag]``; ollama fills in ``registry.ollama.ai``, ``library`` and
   ``latest``. Each component consists of letters, digits, dots, underscores and hyphens.
2. ``<models>/manifests/<host>/<namespace>/<model>/<tag>`` is a JSON object with ``layers``, each with a ``mediaType``,
   a ``digest`` and a ``size``.
3. ``<models>/blobs/sha256-<64 hexadecimal digits>`` is the content of a layer.
4. A model is one GGUF layer, or safetensors layers with a tensor or a group of tensors each. Adapters and projectors
   have layers of their own.

Names are resolved to paths of blobs at once, so nothing else ever opens an ``ollama://`` name: neither an index file
nor a plan can contain one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

from ..core.files import LOCAL, read_json
from ..core.opening import open_paths
from ..core.registry import GGUF, SAFETENSORS, Opened, Recipe, open_file
from ..core.text import error_about, folder_names, listed, plural, show
from ..errors import FormatError, MissingShardError, UnsupportedError, missing_file
from .url import shown

_BEGIN = "ollama://"
_COMPONENT = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}", re.ASCII)
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})", re.ASCII)
_DEFAULTS = ("registry.ollama.ai", "library")
_LATEST = "latest"

# Media types of layers, without their prefix.
_MEDIA = "application/vnd.ollama.image."
_MODEL, _TENSOR = "model", "tensor"
# Layers that change or complete a model, and are not opened with it.
_BESIDE = {"adapter": "adapter", "projector": "projector", "draft": "draft model"}

# Folders of ollama's service on Linux, which has an account of its own.
_SERVICES = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/.ollama/models")
# Maximum number of models in a message.
_LISTED = 8
# Maximum number of manifests to list; a registry has some hundreds.
MAX_MANIFESTS = 100_000


class OllamaName(NamedTuple):
    """The components of a name, as folders of the manifests."""

    host: str
    namespace: str
    model: str
    tag: str

    @property
    def url(self) -> str:
        """The shortest ``ollama://`` name."""
        parts = [self.host, self.namespace, self.model]
        for default in _DEFAULTS:
            if parts[0] != default:
                break
            del parts[0]
        return f"{_BEGIN}{'/'.join(parts)}" + ("" if self.tag == _LATEST else f":{self.tag}")


class Layer(NamedTuple):
    """A layer of a model."""

    kind: str  # the media type without its prefix
    path: str  # of the blob
    nbytes: int  # as the manifest says
    name: str  # of a tensor or a file; empty for other layers


class OllamaModel(NamedTuple):
    """A model on this machine."""

    name: OllamaName
    layers: tuple[Layer, ...]

    def of(self, kind: str) -> list[Layer]:
        return [layer for layer in self.layers if layer.kind == kind]

    @property
    def weights(self) -> list[Layer]:
        """The layers with the model's weights: a GGUF file, or safetensors files."""
        return self.of(_MODEL) or self.of(_TENSOR)

    @property
    def format(self) -> str:
        """The format that ollama gives the weights."""
        return GGUF if self.of(_MODEL) else SAFETENSORS


def is_name(path: object) -> bool:
    """Return whether a path is an ``ollama://`` name."""
    return isinstance(path, str) and path[: len(_BEGIN)].lower() == _BEGIN


def parse(url: str) -> OllamaName:
    """Parse a name."""
    text = url[len(_BEGIN) :]
    rest, colon, tag = text.rpartition(":")
    parts = (rest if colon else text).split("/")
    names = [*parts, tag] if colon else [*parts, _LATEST]
    if len(parts) > 3 or not all(map(_COMPONENT.fullmatch, names)):
        expected = "ollama://[host/][namespace/]model[:tag], of letters, digits, '.', '_', '-'"
        raise UnsupportedError(f"{show(shown(url))}: expected {expected}")
    return OllamaName(*_DEFAULTS[: 3 - len(parts)], *names)


def folders() -> list[str]:
    """Return the folders that can hold ollama's models: $OLLAMA_MODELS, or the defaults of this platform."""
    configured = os.environ.get("OLLAMA_MODELS", "").strip().strip("\"'")
    if configured:
        return [configured]
    own = os.path.join(os.path.expanduser("~"), ".ollama", "models")
    return [own, *_SERVICES] if sys.platform.startswith("linux") else [own]


def open_model(url: str, recipe: Recipe, verify: Any) -> Opened:
    """Open the layers of a model by their paths."""
    model = find(url)
    paths = list(dict.fromkeys(layer.path for layer in model.weights))
    arguments = recipe.format, recipe.root, recipe.unknown_globals, recipe.stored
    if model.format == GGUF:
        opened = open_paths(paths[0], *arguments, verify=verify)
    else:
        with closing(open_file(paths[0], recipe.options._replace(files=LOCAL)).file) as first:
            if list(first.table.names) == ["data"] and model.weights[0].name != "data":
                text = 'the layers of this model name every tensor "data", as ollama did at first'
                raise error_about(UnsupportedError, f"{text}; pull or create the model again", path=url)
        opened = open_paths(paths, *arguments, verify=verify)
        schemes = ((file.table.metadata() or {}).get("quant_type") for file in opened.files)
        scheme = None if recipe.stored else next((scheme for scheme in schemes if scheme is not None), None)
        if scheme is not None:
            opened.close()
            text = f"ollama has quantized this model for MLX ({show(scheme)}), which safeload does not decode"
            raise error_about(UnsupportedError, f"{text}; stored=True opens the codes", path=url)
    beside = [(layer, what) for kind, what in _BESIDE.items() for layer in model.of(kind)]
    notes = [f"{what} in another layer, not opened: {layer.path}" for layer, what in beside]
    return opened._replace(title=model.name.url, notes=[*opened.notes, *notes])


def find(url: str) -> OllamaModel:
    """Find a model by its name; refuse a model without weights, with several, or whose blobs are missing or other."""
    name = parse(url)
    manifests = ((folder, os.path.join(folder, "manifests", *name)) for folder in folders())
    folder, path = next((pair for pair in manifests if os.path.isfile(pair[1])), ("", ""))
    if not path:
        known = [name.url for folder in folders() for name in names_in(folder, [])]
        advice = f"ollama has {listed(known, _LISTED)}"
        if not known:
            advice = f"ollama has no models in {' or '.join(folders())}; set OLLAMA_MODELS if they are elsewhere"
        raise missing_file(url, f"No such model: {url}; {advice}")
    model = read(folder, name)
    models, tensors = model.of(_MODEL), model.of(_TENSOR)
    if not models and not tensors:
        raise UnsupportedError(f"{path}: the model has no layer with weights: it runs elsewhere, or is not complete")
    if len(models) > 1 or (models and tensors):
        both = f" and {plural(len(tensors), 'tensor layer')}" if tensors else ""
        raise UnsupportedError(f"{path}: the model has {plural(len(models), 'model layer')}{both}, expected one kind")
    for layer in model.weights:
        try:
            nbytes = os.stat(layer.path).st_size
        except FileNotFoundError:
            message = f"a layer of {model.name.url} is missing: was the download finished?"
            raise MissingShardError(message, layer.path) from None
        if nbytes != layer.nbytes:
            message = f"the layer must have {layer.nbytes:,} bytes as its manifest says, but has {nbytes:,}"
            raise FormatError(message, layer.path)
    return model


def read(folder: str, name: OllamaName) -> OllamaModel:
    """Read the manifest of a model; the blobs are not looked at."""
    path = os.path.join(folder, "manifests", *name)
    entries = read_json(path, "the manifest").get("layers")
    if not isinstance(entries, list):
        raise FormatError(f"layers must be an array, got {type(entries).__name__}", path)
    layers = []
    for layer in entries:
        if not isinstance(layer, Mapping):
            raise FormatError(f"a layer must be an object, got {type(layer).__name__}", path)
        media, digest, nbytes, title = (layer.get(key) for key in ("mediaType", "digest", "size", "name"))
        match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
        if match is None:
            raise FormatError(f"a digest must be sha256: and 64 hexadecimal digits, got {show(digest)}", path)
        if not isinstance(media, str):
            raise FormatError(f"mediaType must be a string, got {show(media)}", path)
        if type(nbytes) is not int or nbytes < 0:
            raise FormatError(f"size must be a number of bytes, got {show(nbytes)}", path)
        kind = media.partition(";")[0].strip().removeprefix(_MEDIA)
        blob = os.path.join(folder, "blobs", f"sha256-{match[1].lower()}")
        layers.append(Layer(kind, blob, nbytes, title if isinstance(title, str) else ""))
    return OllamaModel(name, tuple(layers))


def names_in(folder: str, failures: list[OSError]) -> Iterator[OllamaName]:
    """Iterate over the names of a folder's manifests, in order."""

    def below(*parts: str) -> Iterator[OllamaName]:
        if len(parts) == len(OllamaName._fields):
            yield OllamaName(*parts)
            return
        for name in filter(_COMPONENT.fullmatch, folder_names(os.path.join(folder, "manifests", *parts), failures)):
            yield from below(*parts, name)

    return islice(below(), MAX_MANIFESTS)
