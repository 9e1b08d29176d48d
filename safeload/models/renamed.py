"""What transformers 5 calls the tensors of a model in memory, and with it PEFT, by their names in published files.

``renamed.json`` holds transformers' conversion mapping; ``tests/data/renamed/make.py`` writes it. Its fields:

- ``rules``, by class or model_type, in order: [pattern, replacement, number to add to the captured index], or a change
  of tensors as {"from", "to", "as"}. A text stands for the rules of another key.
- ``classes``: names of classes, and the parts of their models as [scope, key of rules, key of the nested config, its
  model_type]. Rules of a scope see names behind that prefix; the scope null is the whole model.
- ``types``: the class with rules that a nested config of a model_type leads to.
- ``prefixes``: attributes of the inner model, such as "transformer", and the model types that have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

from ..core.files import read_data
from ..core.forking import cached_property
from ..core.text import show
from .schema import PLACEHOLDER, PREFIX, listed_in

_data = partial(read_data, __name__, "renamed.json")

# Names longer than this keep their names: patterns can take quadratic time.
_LONGEST = 250
# The attribute of the inner model of most classes, and of the language model inside others. Classes without a head, or
# for text only, have neither.
_PREFIX = "model"
_INNER = re.compile(r"(?:(?<=\.)|^)language_model\.", re.ASCII)
# The experts of a layer have the same rules: those of the first are enough.
_EXPERT, _FIRST = re.compile(r"\.experts\.(\d+)\.", re.ASCII), ".experts.0."
# Changes of tensors by "as": equal row ranges; stored tensors below each other; transposed matrices; experts, whose
# tensors are found by their own names; renames with a common intermediate name.
_DIVIDE, _JOIN, _TURN, _STACK, _GROUP = "divide", "join", "turn", "stack", "if the first is there"


class Divided(NamedTuple):
    """A tensor of the model that is one of several equal row ranges of a stored tensor."""

    stored: str
    number: int
    parts: int


class Joined(NamedTuple):
    """A tensor of the model that consists of stored tensors below each other."""

    stored: tuple[str, ...]


class Turned(NamedTuple):
    """A tensor of the model whose matrices are stored transposed."""

    stored: str


class Stacked(NamedTuple):
    """An expert's matrix, or a part of its rows, in a stack."""

    stored: str
    expert: int
    number: int  # of the part
    parts: int


class Unmapped(NamedTuple):
    """A tensor of the model that is computed from stored tensors in another way."""

    reason: str


Place: TypeAlias = "str | Divided | Joined | Turned | Unmapped"


class _Rule(NamedTuple):
    pattern: re.Pattern[str]  # a group "g0", "g1", ... for each source
    targets: tuple[str, ...]
    kind: str  # "" renames
    scopes: tuple[str, ...]  # prefixes to keep: the first that fits; ("",) for whole names
    offset: int = 0  # to add to the captured index

    def apply(self, name: str) -> tuple[int, list[str]] | None:
        """Return the number of the source that matches and the name with each target, or None."""
        scope = next(filter(name.startswith, self.scopes), None)
        rest = name if scope is None else name[len(scope) :]
        if scope is None or len(rest) > _LONGEST or (match := self.pattern.search(rest)) is None:
            return None
        group = next(key for key in self.pattern.groupindex if match[key] is not None)
        targets = self.targets if self.kind != _GROUP else (self.targets[int(group[1:])],)
        if any(r"\1" in target for target in targets):
            captured = match[self.pattern.groupindex[group] + 1]
            captured = str(int(captured) + self.offset) if self.offset else captured
            targets = tuple(target.replace(r"\1", captured) for target in targets)
        return int(group[1:]), [scope + rest.replace(match[0], target, 1) for target in targets]


def _changed(changes: Iterable[_Rule], name: str) -> tuple[str, int, list[str], int]:
    """Return how a tensor changes, the number of the source that it is, the names of the results, and all sources."""
    for rule in changes:
        if (change := rule.apply(name)) is not None:
            return rule.kind, *change, len(rule.pattern.groupindex)
    return "", 0, [name], 0


@cache
def _rules_of(key: str, scopes: tuple[str, ...]) -> tuple[_Rule, ...]:
    rows = _data()["rules"][key]
    while isinstance(rows, str):
        rows = _data()["rules"][rows]
    rules = []
    for row in rows:
        change = isinstance(row, Mapping)
        sources, targets = (row["from"], row["to"]) if change else (row[:1], row[1:2])
        order = sorted(range(len(sources)), key=lambda k: -len(sources[k]))  # the longest first, as in transformers
        pattern = re.compile("|".join(f"(?P<g{k}>{sources[k]})" for k in order))
        offset = 0 if change else next(iter(row[2:]), 0)
        rules.append(_Rule(pattern, tuple(targets), row["as"] if change else "", scopes, offset))
    return tuple(rules)


@cache
def _classes() -> dict[str, tuple[tuple[Any, ...], ...]]:
    return {name: parts for names, parts in _data()["classes"] for name in names}


def _prefixes(config: Mapping[str, Any]) -> list[str]:
    """Return the possible attributes of the inner model."""
    return [*(text for text, kinds in _data()["prefixes"].items() if config.get("model_type") in kinds), _PREFIX]


def _rules(config: Mapping[str, Any]) -> Iterator[_Rule]:
    """Yield the rules of a model in order."""
    data, kind = _data(), config.get("model_type")
    rules, types = data["rules"], data["types"]
    listed = [text for text in listed_in(config) if isinstance(text, str)]
    parts = next((_classes()[text] for text in listed if text in _classes()), None)
    if parts is None:
        keys = [text for text in (*listed, kind) if isinstance(text, str) and text in rules]
        inner = types.get(kind) if isinstance(kind, str) else None
        parts = tuple((None, key, "", "") for key in keys[:1])
        parts += () if inner in keys else (("", inner, "", ""),)
    root = [key for scope, key, _, _ in parts if scope is None]
    for scope, usual, path, usual_kind in parts:
        key, inner = usual, config
        for step in path.split(".") if path else ():
            inner = nested if isinstance(nested := inner.get(step), Mapping) else {}
        inner_kind = inner.get("model_type") if path else None
        if isinstance(inner_kind, str) and inner_kind != usual_kind:
            key = types.get(inner_kind, inner_kind if inner_kind in rules else None)
            key = None if key in root else key
        if key is not None:
            inside = f"{scope}." if scope else ""
            scopes = [f"{prefix}.{inside}" for prefix in _prefixes(config)] if scope is not None else []
            yield from _rules_of(key, (*scopes, inside))


def has_rules(config: Mapping[str, Any] | None) -> bool:
    """Return whether transformers renames tensors of this model."""
    return config is not None and next(_rules(config), None) is not None


class InMemory(NamedTuple):
    """Where transformers has a published tensor in memory."""

    name: str  # of the tensor, or of the stack of experts that has it
    alone: str  # of the tensor, before it is stacked
    part: int  # number of the part of the rows of each expert's matrix
    parts: int  # 0 without a stack


# Stand for placeholders in names; no name has such numbers.
_NUMBERS_FROM = 7_000_000


def in_memory(class_name: str, model_type: str, names: Iterable[str], prefixes: Sequence[str]) -> dict[str, InMemory]:
    """Return where a class of transformers has published tensors, by their names with placeholders for numbers.

    Names that it keeps are left out. Of a family's ``prefixes``, names have the first, or the placeholder.
    """
    rules = [*_rules({"architectures": [class_name], "model_type": model_type})]
    stacks = [rule for rule in rules if rule.kind == _STACK]
    result = {}
    for name in names if rules else ():
        begin = PREFIX if name.startswith(PREFIX) else prefixes[0]
        text, slots = name.replace(PREFIX, prefixes[0]), dict[str, str]()
        while (slot := PLACEHOLDER.search(text)) is not None:
            slots[number := str(_NUMBERS_FROM + len(slots))] = slot[0]
            text = text.replace(slot[0], number, 1)
        for rule in rules:
            if not rule.kind and (change := rule.apply(text)) is not None:
                text = change[1][0]
        alone = text
        _, part, (text,), parts = _changed(stacks, text)

        def published(text: str, name: str = name, begin: str = begin, slots: Mapping[str, str] = slots) -> str:
            if name.startswith(begin):
                prefix = max((prefix for prefix in prefixes if text.startswith(prefix)), key=len, default=None)
                text = text if prefix is None else begin + text.removeprefix(prefix)
            for number, slot in slots.items():
                text = text.replace(number, slot)
            return text

        place = InMemory(published(text), published(alone), part, parts)
        if place.name != name:
            result[name] = place
    return result


class ModelNames:
    """The stored tensors of a model by the names that transformers gives them in memory."""

    def __init__(self, config: Mapping[str, Any] | None, stored: Mapping[str, str]) -> None:
        """Take stored names by their names without wrappers."""
        self.stored = stored
        self._rules = tuple(_rules(config)) if config else ()
        self._prefixes = [f"{prefix}." for prefix in _prefixes(config or {})]
        # The places of the tensors by their names in memory; experts are not stacked. Then the experts in each stack
        # that transformers makes of them, by the name that `places` has.
        self.places, self.stacks = self._mapped()

    def _mapped(self) -> tuple[Mapping[str, Place], Mapping[str, Mapping[str, Stacked]]]:
        if not self._rules:
            return self.stored, {}
        experts = {name: match[1] for name in self.stored if (match := _EXPERT.search(name)) is not None}
        first = {name: name.replace(f".experts.{number}.", _FIRST, 1) for name, number in experts.items()}
        names = {first.get(name, name): first.get(name, name) for name in self.stored}
        for rule in self._rules:
            if rule.kind in ("", _GROUP):
                matches = {name: change for name, text in names.items() if (change := rule.apply(text)) is not None}
                if not rule.kind or any(source == 0 for source, _ in matches.values()):
                    names.update((name, targets[0]) for name, (_, targets) in matches.items())
        changes = [rule for rule in self._rules if rule.kind not in ("", _GROUP)]
        changed = {name: _changed(changes, text) for name, text in names.items()}
        places: dict[str, Place] = {}
        stacks: dict[str, dict[str, Stacked]] = {}
        joined: dict[str, dict[int, str]] = {}
        place: Place
        for name, stored in self.stored.items():
            kind, source, targets, sources = changed[first.get(name, name)]
            own = f".experts.{experts[name]}." if name in experts else _FIRST
            if kind == _STACK:
                stack, targets = targets[0], [names[first.get(name, name)]]
                if name in experts:
                    alone = targets[0].replace(_FIRST, own, 1)
                    stacks.setdefault(stack, {})[alone] = Stacked(stack, int(experts[name]), source, sources)
            for number, text in enumerate(targets):
                target, place = text.replace(_FIRST, own, 1), stored
                if kind == _DIVIDE:
                    place = Divided(stored, number, len(targets))
                elif kind == _JOIN and source not in joined.setdefault(target, {}):
                    joined[target][source] = stored
                    place = Joined(tuple(joined[target][k] for k in sorted(joined[target])))
                elif kind == _TURN:
                    place = Turned(stored)
                elif kind not in ("", _STACK):
                    place = Unmapped(f"transformers computes it from {show(stored)} in a way that is not supported")
                elif target in places:
                    place = Unmapped(f"more than one tensor is {show(target)} of the model, such as {show(stored)}")
                places[target] = place
        return places, stacks

    @cached_property
    def _bare(self) -> dict[str, list[str]]:
        """The names in memory by the names that classes with and without a head, and for text only, share."""
        bare: dict[str, list[str]] = {}
        for name in self.places:
            bare.setdefault(self._without_prefix(name), []).append(name)
        return bare

    def _without_prefix(self, name: str) -> str:
        name = _INNER.sub("", name)
        return name.removeprefix(next(filter(name.startswith, self._prefixes), ""))

    def find(self, name: str) -> Place | None:
        """Return where a tensor is, by its name in memory, in files, or in a class without a head or for text only."""
        if (place := self.places.get(name)) is not None:
            return place
        renamed = name
        for rule in self._rules:
            if not rule.kind and (change := rule.apply(renamed)) is not None:
                renamed = change[1][0]
        if (place := self.places.get(renamed)) is None and (place := self.stored.get(name)) is None:
            names = self._bare.get(self._without_prefix(renamed), ())
            place = self.places[names[0]] if len(names) == 1 else None
        return place
