"""Find the keys of a config that explain wrong shapes: one wrong size makes the shapes of many tensors wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ...base.text import show
from ...models.expressions import Config, names_in
from ...models.schema import ANY, ExpectedTensor, Schema
from ..sources.description import TensorDescription
from .findings import Finding, find

# A single tensor does not outvote the config.
_TENSORS_AT_LEAST = 2
# Maximum numbers of wrong keys to find, of keys to try for each, and of wrong tensors to look at.
_KEYS, _TRIALS, _LOOKED_AT = 4, 4, 1000

_Expected = Mapping[str, ExpectedTensor]
# The name of a tensor and an axis; -1 if its number of axes is wrong.
_Axis = tuple[str, int]


class Causes(NamedTuple):
    """The keys that explain wrong shapes."""

    findings: list[Finding]
    expected: _Expected  # the tensors of the corrected config


class _Trial(NamedTuple):
    """A corrected key."""

    key: str
    value: int
    tensors: int  # tensors with this key in their shapes, which all agree
    expected: _Expected
    wrong: set[_Axis]  # sizes that are still wrong


def fits(shape: tuple[int, ...], expected: tuple[int | None, ...] | None) -> bool:
    """True if a shape matches the expected shape, in which None matches any size; None matches any shape."""
    if expected is None:
        return True
    return len(shape) == len(expected) and all(b is None or a == b for a, b in zip(shape, expected, strict=True))


def find_causes(
    schema: Schema,
    config: Mapping[str, Any] | None,
    tensors: Mapping[str, TensorDescription],
    names: Sequence[str],
    expected: _Expected,
) -> Causes:
    """Find keys of the config on which all tensors agree that they have another value."""
    findings: list[Finding] = []
    current = dict(config or {})
    wrong = _wrong(tensors, names, expected)
    while len(wrong) >= _TENSORS_AT_LEAST and len(findings) < _KEYS:
        trials = [trial for trial in _trials(schema, current, tensors, names, wrong) if len(trial.wrong) < len(wrong)]
        if not trials:
            break
        best = min(trials, key=lambda trial: len(trial.wrong))
        facts = {"key": show(best.key)[1:-1], "value": current[best.key], "tensors": best.tensors}
        findings.append(find("schema.config:key", config=schema.config, expected=best.value, **facts))
        current[best.key] = best.value
        expected, wrong = best.expected, best.wrong
    return Causes(findings, expected)


def _trials(
    schema: Schema,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorDescription],
    names: Sequence[str],
    wrong: set[_Axis],
) -> Iterator[_Trial]:
    """Yield the corrected keys on which all tensors with this key agree."""
    expected = schema.expand(config, tensors.keys())
    votes: Counter[tuple[str, int]] = Counter()
    for name in islice(dict.fromkeys(name for name, _ in sorted(wrong)), _LOOKED_AT):
        if name in expected:
            votes.update(set(_proposals(schema, config, tensors[name].shape, expected[name])))
    for (key, value), _ in votes.most_common(_TRIALS):
        try:
            corrected = schema.expand({**config, key: value}, tensors.keys())
        except ValueError:
            continue
        users = {axis for name in names if name in corrected for axis in _axes_with(key, name, corrected[name])}
        off = _wrong(tensors, names, corrected)
        count = len({name for name, _ in users})
        if count >= _TENSORS_AT_LEAST and users.isdisjoint(off):
            yield _Trial(key, value, count, corrected, off)


def _wrong(tensors: Mapping[str, TensorDescription], names: Sequence[str], expected: _Expected) -> set[_Axis]:
    """Return the axes with other sizes than expected."""
    wrong: set[_Axis] = set()
    for name in names:
        shape = tensors[name].shape
        sizes = expected[name].shape if name in expected else ()
        if sizes is None or fits(shape, sizes):
            continue
        axes = range(len(shape)) if len(shape) == len(sizes) else (-1,)
        wrong.update((name, k) for k in axes if k < 0 or sizes[k] not in (None, shape[k]))
    return wrong


def _axes_with(key: str, name: str, expected: ExpectedTensor) -> Iterator[_Axis]:
    """Yield the axes of a tensor with a key in their formulas."""
    for axis, formula in enumerate(expected.entry.shape or ()):
        if formula != ANY and key in names_in(formula.removesuffix(ANY)):
            yield name, axis


def _proposals(
    schema: Schema, config: Mapping[str, Any], shape: tuple[int, ...], expected: ExpectedTensor
) -> Iterable[tuple[str, int]]:
    """Yield the values of single keys that would give a tensor its size on an axis."""
    formulas = expected.entry.shape or ()
    if expected.shape is None or len(shape) != len(expected.shape):
        return
    for size, usual, formula in zip(shape, expected.shape, formulas, strict=True):
        if usual is None or not usual or size == usual:
            continue
        bare = formula.removesuffix(ANY)
        for key in names_in(bare):
            value = config.get(key)
            if type(value) is not int or size * value % usual:
                continue
            proposed = size * value // usual
            try:
                fitting = Config({**config, key: proposed}, schema.defaults).evaluate(bare) == size
            except ValueError:
                continue
            if fitting:
                yield key, proposed
