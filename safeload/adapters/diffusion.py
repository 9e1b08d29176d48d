"""Names in LoRA adapters of diffusion models, and where a base in either layout stores the tensors of that name.

kohya writes "_" for ".", so all names are compared with "_". ``diffusion.json`` has the prefixes of tools, and for each
model the names of a single file beside those of Diffusers.

Sources: https://github.com/kohya-ss/sd-scripts (networks), https://github.com/huggingface/diffusers (loaders:
single_file_utils.py, lora_conversion_utils.py), https://github.com/comfyanonymous/ComfyUI (comfy/lora.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from ..core.files import read_data
from ..models.diffusion import prefix_of
from ..models.renamed import Divided

_data = partial(read_data, __name__, "diffusion.json")

# The part of a pipeline that is the diffusion model itself, whatever a tool calls it.
_MODEL = ""
_END = re.compile(r"[._](weight|bias)\Z")


class Names(NamedTuple):
    """Where the tensors of a diffusion model are stored, by the names of tools."""

    components: frozenset[str]  # the parts of a pipeline that the base has
    pieces: Mapping[tuple[str, str], tuple[Divided, ...]]  # rows below each other; none if two tensors have one name

    def lacks(self, module: str) -> bool:
        """Return whether a module belongs to another part of a pipeline, such as a text encoder."""
        return component_of(module)[0] not in self.components

    def find(self, name: str) -> tuple[Divided, ...] | None:
        component, rest = component_of(name)
        return self.pieces.get((component, rest.replace(".", "_")))


def component_of(name: str) -> tuple[str, str]:
    """Return the part of a pipeline that an adapter's name begins with, and the rest."""
    prefixes = _data()["prefixes"]
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(prefix, _MODEL), name.removeprefix(prefix)


def spelled(module: str) -> str:
    """Return a module's name with the ends that Diffusers gives it today."""
    spellings: Sequence[tuple[str, str]] = _data()["spellings"]
    end, today = next((pair for pair in spellings if module.endswith(pair[0])), ("", ""))
    return module.removesuffix(end) + today


def names_of(names: Collection[str]) -> Names | None:
    """Return the places in a base with tensors of these names; None if it is no diffusion model with known names."""
    inner = prefix_of(names)
    for model in _data()["models"].values():
        if any(all(inner + mark in names for mark in marks) for marks in model["marks"]):
            return _indexed(names, inner, model)
    return None


def _indexed(names: Collection[str], inner: str, model: Mapping[str, Any]) -> Names:
    stored: dict[tuple[str, str, str], str] = {}  # part of the pipeline, module, "weight" or "bias" -> stored name
    for name in names:
        encoder = next((prefix for prefix in model["text_encoders"] if name.startswith(prefix)), None)
        prefix, component = (inner, _MODEL) if encoder is None else (encoder, model["text_encoders"][encoder])
        match = _END.search(name)
        if name.startswith(prefix) and match is not None:
            stored[component, name[len(prefix) : match.start()], match[1]] = name
    own: dict[tuple[str, str], tuple[Divided, ...]] = {}
    others: dict[tuple[str, str], tuple[Divided, ...]] = {}
    for (component, module, end), name in stored.items():
        key = _key(component, module, end)
        own[key] = () if key in own else (Divided(name, 0, 1),)
        for other, pieces in _elsewhere(component, module, end, stored, model):
            others.setdefault(_key(component, other, end), pieces)
    return Names(frozenset(component for component, _, _ in stored), {**others, **own})


def _key(component: str, module: str, end: str) -> tuple[str, str]:
    return component, f"{module}.{end}".replace(".", "_")


def _elsewhere(
    component: str, module: str, end: str, stored: Mapping[tuple[str, str, str], str], model: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Divided, ...]]]:
    """Yield the names of a stored tensor in the other layout, and the names of its parts or of the whole."""
    name = stored[component, module, end]
    for rules in (model["renamed"], [rule[::-1] for rule in model["renamed"][::-1]]):
        renamed = module
        for old, new in rules:
            renamed = _renamed(renamed, old, new) or renamed
        if renamed != module:
            yield renamed, (Divided(name, 0, 1),)
    for two in model["swapped"]:
        for old, new in (two, two[::-1]):
            if (swapped := _renamed(module, old, new)) is not None:
                yield swapped, (Divided(name, 1, 2), Divided(name, 0, 2))
    for whole, parts in model["joined"]:
        yield from _parts(module, name, whole, parts)
        first = parts[0][0]
        if (joined := _renamed(module, first, whole)) is not None:
            apart = [stored.get((component, _renamed(module, first, part) or "", end)) for part, _ in parts]
            if None not in apart:
                yield joined, tuple(Divided(one, 0, 1) for one in apart if one is not None)


def _parts(
    module: str, name: str, whole: str, parts: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, tuple[Divided, ...]]]:
    """Yield the names of the parts of a stored tensor, pairs of a name and a size; a part without a name has no use."""
    total, begin = sum(size for _, size in parts), 0
    for part, size in parts:
        if part and (other := _renamed(module, whole, part)) is not None:
            yield other, tuple(Divided(name, number, total) for number in range(begin, begin + size))
        begin += size


@cache
def _pattern(old: str) -> re.Pattern[str]:
    """Return a pattern of a rule: "*" is a number; a leading "." allows anything before it, a trailing one after it."""
    begin, end = "" if old.startswith(".") else r"\A", "" if old.endswith(".") else r"\Z"
    return re.compile(begin + re.escape(old).replace(r"\*", "([0-9]+)") + end, re.ASCII)


def _renamed(name: str, old: str, new: str) -> str | None:
    match = _pattern(old).search(name)
    if match is None:
        return None
    numbers: Sequence[str] = match.groups()
    return name[: match.start()] + new.replace("*", "{}").format(*numbers) + name[match.end() :]
