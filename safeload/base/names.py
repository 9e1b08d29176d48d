"""Tensor names: layer numbers, natural order, and families of names that differ only in numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from .runtime import paused

#: A number between dots or slashes, such as a layer's or an expert's; also after "layers_" and "blocks_", which Flax
#: writes.
NUMBER = re.compile(r"(?=[0-9])(?:(?<![^./])|(?<=layers_)|(?<=blocks_))(0|[1-9][0-9]{0,8})(?![^./])")

# Further numbers in a name are treated as text. The names of experts in layers have two.
_MOST_NUMBERS = 4

# The container and number of a layer, such as "layers.0", "h.11", "double_blocks.3" or Flax's "layers_0".
_LAYER = re.compile(r"(?<![^./])(?:\w*(?:layers?|blocks?)|h|blk)[./_](?:0|[1-9][0-9]{0,8})(?![^./])", re.ASCII)

_DIGITS = re.compile(r"[0-9]+")
_LARGEST_CHARACTER = 0x10FFFF


def pattern_of(name: str) -> str:
    """Return a tensor's name with ``{}`` for its numbers, which is equal in all layers."""
    return NUMBER.sub("{}", name)


def layer_of(name: str) -> str:
    """Return the prefix of a tensor's layer, such as "model.layers.0"; "" outside layers."""
    match = _LAYER.search(name)
    return "" if match is None else name[: match.end()]


def natural_key(name: str) -> tuple[str, str]:
    """Return a key that sorts names in natural order: layer 2 before layer 10."""
    return _DIGITS.sub(_with_length, name), name


def _with_length(digits: re.Match[str]) -> str:
    number = digits[0].lstrip("0")
    return chr(min(len(number), _LARGEST_CHARACTER)) + number


class NameFamily(NamedTuple):
    """Tensors that differ only in the numbers of their names; all combinations of these numbers exist."""

    name: str  # such as ``h.{0..11}.w``; the plain name of a single tensor
    first: int  # index of the first tensor
    number: int  # number of tensors


def families(names: Sequence[str], kinds: Iterable[Hashable]) -> list[NameFamily]:
    """Group tensors that differ only in the numbers of their names, in the order of each group's first tensor.

    Tensors of a family have equal ``kinds``, such as dtype and shape.
    """
    groups: dict[Hashable, tuple[int, list[str], list[tuple[int, ...]]]] = {}
    with paused(len(names)):
        for index, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            parts = NUMBER.split(name, _MOST_NUMBERS)
            texts = parts[::2]
            groups.setdefault((*texts, kind), (index, texts, []))[2].append(tuple(map(int, parts[1::2])))
        result = []
        for first, texts, numbers in groups.values():
            if len(numbers) == 1:
                result.append(NameFamily(names[first], first, 1))
            else:
                result += [
                    NameFamily(_spell(texts, product), first, math.prod(map(len, product)))
                    for product in _products(numbers)
                ]
    return result


_Product = tuple[tuple[int, ...], ...]


def _products(numbers: Sequence[tuple[int, ...]]) -> list[_Product]:
    """Split tuples of numbers into products of sets, because the layers of a model can have different experts."""
    if len(numbers) == 1 or not numbers[0]:
        return [tuple(zip(numbers[0], strict=True))]
    if len(numbers[0]) == 1:
        return [(tuple(sorted([number for (number,) in numbers])),)]
    rests: dict[int, list[tuple[int, ...]]] = {}
    for combination in numbers:
        rests.setdefault(combination[0], []).append(combination[1:])
    firsts: dict[tuple[_Product, ...], list[int]] = {}
    for first in sorted(rests):
        firsts.setdefault(tuple(_products(rests[first])), []).append(first)
    return [(tuple(group), *product) for products, group in firsts.items() for product in products]


def _spell(texts: Sequence[str], product: _Product) -> str:
    return "".join(text + numbers for text, numbers in zip(texts, (*map(_ranges, product), ""), strict=True))


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in braces, ``{0,2..5}``; a single number has no braces."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    spelled = ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
    return f"{{{spelled}}}"
