"""Names in LoRA adapters of diffusion models, and where a base in either layout stores the tensors of that name.

kohya writes "_" for ".", so all names are compared with "_". ``diffusion.json`` has the prefixes of tools, and for each
model the names of a single file beside those of Diffusers.

Sources: https://github.com/kohya-ss/sd-scripts (networks), https://github.com/huggingface/diffusers (loaders:
single_file_utils.py, lora_conversion_utils.py), https://github.com/comfyanonymous/ComfyUI (comfy/lora.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

from ..core.files import read_data
from ..core.text import show
from ..models.diffusion import prefix_of
from ..models.renamed import Divided, Unmapped

_data = partial(read_data, __name__, "diffusion.json")

# The part of a pipeline that is the diffusion model itself, whatever a tool calls it.
_MODEL = ""
_END = re.compile(r"[._](weight|bias)\Z")


# A stored tensor in a place: name, shape, number of the matrix there with the rows in it, and the tensor it is part of.
Piece: TypeAlias = tuple[str, tuple[int, ...], tuple[int, slice], Divided | None]


class Assembled(NamedTuple):
    """A tensor of the model that consists of stored tensors, or of parts of their rows, below each other."""

    pieces: Sequence[tuple[str, int, int, int]]  # stored tensor, part and number of parts as in `Divided`, and rows
    shape: Sequence[int]

    def tensors(self) -> Iterator[Piece]:
        """Yield each stored tensor with its rows in the tensor of the model."""
        begin = 0
        for stored, number, parts, rows in self.pieces:
            divided = Divided(stored, number, parts) if parts > 1 else None
            yield stored, (rows * parts, *self.shape[1:]), (0, slice(begin, begin + rows)), divided
            begin += rows


class Names(NamedTuple):
    """Where the tensors of a diffusion model are stored, by the names of tools."""

    components: frozenset[str]  # the parts of a pipeline that the base has
    pieces: Mapping[tuple[str, str], tuple[Divided, ...]]  # rows below each other; none if two tensors have one name

    def lacks(self, module: str) -> bool:
        """Return whether a module belongs to another part of a pipeline, such as a text encoder."""
        return component_of(module)[0] not in self.components

    def find(self, name: str, shape: Callable[[str], tuple[int, ...]]) -> str | Divided | Assembled | Unmapped | None:
        """Return the place of a tensor by a tool's name; ``shape`` returns the shape of a stored tensor."""
        component, rest = component_of(name)
        pieces = self.pieces.get((component, rest.replace(".", "_")))
        if not pieces:
            return None if pieces is None else Unmapped("several tensors of the base have this name")
        if len(pieces) == 1:
            return pieces[0] if pieces[0].parts > 1 else pieces[0].stored
        shapes = [shape(piece.stored) for piece in pieces]
        divides = all(each and each[0] % piece.parts == 0 for each, piece in zip(shapes, pieces, strict=True))
        if not divides or len({each[1:] for each in shapes}) > 1:
            stored = ", ".join(map(show, dict.fromkeys(piece.stored for piece in pieces)))
            return Unmapped(f"the shapes of {stored} do not fit its rows")
        rows = [each[0] // piece.parts for each, piece in zip(shapes, pieces, strict=True)]
        with_rows = [(*piece, count) for piece, count in zip(pieces, rows, strict=True)]
        return Assembled(with_rows, (sum(rows), *shapes[0][1:]))


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


def layout_of(names: Collection[str]) -> tuple[str, str | None] | None:
    """Return the part of a pipeline in a base, "unet" or "transformer", and the prefix of a single file's names.

    The prefix is None in the layout of Diffusers. None is returned for other models.
    """
    inner = prefix_of(names)
    for model, entry in _data()["models"].items():
        single, diffusers = (all(inner + mark in names for mark in marks) for marks in entry["marks"])
        if single or (diffusers and not inner):
            return "unet" if model == "unet" else "transformer", inner if single else None
    return None


def _indexed(names: Collection[str], inner: str, model: Mapping[str, Any]) -> Names:
    stored: dict[tuple[str, str, str], str] = {}  # part of the pipeline, module, "weight" or "bias" -> stored name
    for name in names:
        encoder = next((prefix for prefix in model["text_encoders"] if name.startswith(prefix)), None)
        prefix, component = (inner, _MODEL) if encoder is None else (encoder, model["text_encoders"][encoder])
        match = _END.search(name)
        if name.startswith(prefix) and match is not None:
            stored[component, name[len(prefix) : match.start()], match[1]] = name
    same: dict[tuple[str, str], tuple[Divided, ...]] = {}
    derived: dict[tuple[str, str], tuple[Divided, ...]] = {}
    for (component, module, end), name in stored.items():
        key = _key(component, module, end)
        same[key] = () if key in same else (Divided(name, 0, 1),)
        for renamed, pieces in _elsewhere(component, module, end, stored, model):
            derived.setdefault(_key(component, renamed, end), pieces)
    return Names(frozenset(component for component, _, _ in stored), {**derived, **same})


def _key(component: str, module: str, end: str) -> tuple[str, str]:
    return component, f"{module}.{end}".replace(".", "_")


def _elsewhere(
    component: str, module: str, end: str, stored: Mapping[tuple[str, str, str], str], model: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Divided, ...]]]:
    """Yield the names of a stored tensor in the other layout, and the names of its parts or of the whole."""
    name = stored[component, module, end]
    for rules in (model["renamed"], [rule[::-1] for rule in model["renamed"][::-1]]):
        forms = [module]  # several rules can fit: an upsampler follows one layer in sd1, and two in sdxl
        for old, new in rules:
            forms += [form for each in forms if (form := _renamed(each, old, new)) is not None]
        for form in forms[1:]:
            yield form, (Divided(name, 0, 1),)
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
                yield joined, tuple(Divided(piece, 0, 1) for piece in apart if piece is not None)


def _parts(
    module: str, name: str, whole: str, parts: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, tuple[Divided, ...]]]:
    """Yield the names of the parts of a stored tensor, pairs of a name and a size; a part without a name has no use."""
    total, begin = sum(size for _, size in parts), 0
    for part, size in parts:
        if part and (divided := _renamed(module, whole, part)) is not None:
            yield divided, tuple(Divided(name, number, total) for number in range(begin, begin + size))
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
