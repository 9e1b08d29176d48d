"""Names of tensors: the numbers of their layers, their order, and layers that are alike in one name."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

#: A number that is a whole part of a name between dots or slashes, as those of layers and experts are; also after
#: "layers_" and "blocks_", as in names of Flax.
NUMBER = re.compile(r"(?=[0-9])(?:(?<![^./])|(?<=layers_)|(?<=blocks_))(0|[1-9][0-9]{0,8})(?![^./])")

# Most numbers in a name that are counted; more are text. The names of experts in layers have two.
_MOST_NUMBERS = 4

_DIGITS = re.compile(r"[0-9]+")
_LARGEST_CHARACTER = 0x10FFFF


def pattern_of(name: str) -> str:
    """A tensor's name with ``{}`` for its numbers, which is the same in all layers."""
    return NUMBER.sub("{}", name)


def natural_key(name: str) -> tuple[str, str]:
    """A key that sorts names in natural order: layer 2 before layer 10."""
    return _DIGITS.sub(_with_length, name), name


def _with_length(digits: re.Match[str]) -> str:
    number = digits[0].lstrip("0")
    return chr(min(len(number), _LARGEST_CHARACTER)) + number


class NameFamily(NamedTuple):
    """Tensors whose names differ only in numbers, and all combinations of these numbers exist.

    Attributes:
        name: ``h.{0..11}.w``; of a single tensor its name.
        first: index of the first of them.
        number: how many there are.
    """

    name: str
    first: int
    number: int


def families(names: Sequence[str], kinds: Iterable[Hashable]) -> list[NameFamily]:
    """Gathers tensors that differ only in the numbers of their names, in the order of the first of each.

    Args:
        names: names of the tensors.
        kinds: of each tensor what must be equal in a family, such as dtype and shape.
    """
    groups: dict[Hashable, tuple[int, list[str], list[tuple[int, ...]]]] = {}
    for index, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        parts = NUMBER.split(name, _MOST_NUMBERS)
        texts = parts[::2]
        groups.setdefault((*texts, kind), (index, texts, []))[2].append(tuple(map(int, parts[1::2])))
    found = []
    for first, texts, numbers in groups.values():
        if len(numbers) == 1:
            found.append(NameFamily(names[first], first, 1))
        else:
            found += [NameFamily(_spell(texts, product), first, _count(product)) for product in _products(numbers)]
    return found


_Product = tuple[tuple[int, ...], ...]


def _products(numbers: Sequence[tuple[int, ...]]) -> list[_Product]:
    """Splits tuples of numbers into products of sets: all experts of some layers, other experts of other layers."""
    if len(numbers) == 1 or not numbers[0]:
        return [tuple((number,) for number in numbers[0])]
    if len(numbers[0]) == 1:
        return [(tuple(sorted(number for (number,) in numbers)),)]
    after: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in numbers:
        after.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[_Product, ...], list[int]] = {}
    for first in sorted(after):
        alike.setdefault(tuple(_products(after[first])), []).append(first)
    return [(tuple(firsts), *product) for products, firsts in alike.items() for product in products]


def _count(product: _Product) -> int:
    count = 1
    for numbers in product:
        count *= len(numbers)
    return count


def _spell(texts: Sequence[str], product: _Product) -> str:
    return "".join(text + numbers for text, numbers in zip(texts, (*map(_ranges, product), ""), strict=True))


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in braces: ``{0,2..5}``; a single one without."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    spelled = ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
    return spelled if len(numbers) == 1 else f"{{{spelled}}}"
