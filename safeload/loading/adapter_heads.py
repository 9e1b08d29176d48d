"""Tied heads: which get weights of their own because PEFT trains the head or the embedding without the other.

PEFT changes modules, not weights. A trained copy of a module (``modules_to_save``) and the factors of a module leave
the module that it is tied to as it was. Only tensors that replace the weights of the base reach both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base.text import show
from ..errors import FormatError, UnsupportedError
from ..models.tied import is_unclear, tied_heads
from .adapter import EMBEDDING_A, VALUE, A, Adapter

# The end of the name of an embedding that encoder, decoder and head share.
_SHARED = "shared.weight"


class Heads(NamedTuple):
    """The tied heads of a base.

    Attributes:
        pairs: embedding of each head.
        untied: embedding of each head that gets weights of its own.
    """

    pairs: Mapping[str, str]
    untied: Mapping[str, str]

    def mirrored(self, adapter: Adapter) -> dict[str, str]:
        """Return the tensors of an adapter that also replace what they are tied to, by the name of that tensor."""
        replaced: dict[str, str] = {}
        for pair in self.pairs.items():
            for name, other in (pair, pair[::-1]):
                value = adapter.modules.get(name, {}).get(VALUE)
                if value is not None and not adapter.is_copy(name) and other not in adapter.modules:
                    replaced[other] = value
        return replaced

    def redundant(self, adapter: Adapter) -> set[str]:
        """Return the heads whose values in an adapter are those of the embedding, which stays tied to them."""
        return {head for head in self.pairs if head not in self.untied and VALUE in adapter.modules.get(head, {})}


def heads_of(adapters: Sequence[Adapter], config: Mapping[str, Any] | None, names: Collection[str]) -> Heads:
    """Decide which tied heads of a base get weights of their own.

    Args:
        adapters: all that are merged.
        config: parsed ``config.json`` of the base; None without one.
        names: of the tensors of the base.

    Raises:
        FormatError: an adapter has different values for a head and an embedding that stay tied.
        UnsupportedError: the embedding is shared by an encoder, a decoder and a head, or by a head of unknown name.
    """
    pairs = tied_heads(config, names)
    untied = {}
    if is_unclear(config, pairs):
        _check_embeddings(adapters)
    for pair in pairs.items():
        changes = [(adapter, name) for adapter in adapters if (name := _apart(adapter, *pair)) is not None]
        if changes and pair[1].endswith(_SHARED):
            adapter, name = changes[0]
            raise UnsupportedError(
                f"the adapter changes {show(name)}, but encoder, decoder and head share {show(pair[1])}: merging into "
                "one of them is not supported",
                path=adapter.checkpoint.path,
                tensor=name,
            )
        if changes:
            untied[pair[0]] = pair[1]
    return Heads(pairs, untied)


def _check_embeddings(adapters: Iterable[Adapter]) -> None:
    """Refuse changes of an embedding that is tied to an unknown head."""
    for adapter in adapters:
        for module, parts in adapter.modules.items():
            if EMBEDDING_A in parts:
                raise UnsupportedError(
                    f"the adapter changes the embedding {show(module)}; the base's config.json ties its head to an "
                    "embedding, but their names are not known, so the head would change too",
                    path=adapter.checkpoint.path,
                    tensor=parts[EMBEDDING_A],
                )


def _apart(adapter: Adapter, head: str, embedding: str) -> str | None:
    """Return the tensor that an adapter changes without the one that it is tied to; None if it changes none or both."""
    if adapter.settings.mlx:  # its embeddings are their own heads
        return None
    modules = adapter.modules
    factors = [name for name in (head, embedding) if _has_factors(adapter, name)]
    changed = factors or [name for name in (head, embedding) if adapter.is_copy(name)]
    values = [modules.get(name, {}).get(VALUE) for name in (head, embedding)]
    if not factors and (adapter.settings.tying or not changed) and all(value is not None for value in values):
        if _equal(adapter, *map(str, values)):
            return None
        if not changed:
            raise FormatError(
                f"tensors {show(values[0])} and {show(values[1])} of the adapter differ, but the base ties them and "
                "'modules_to_save' names neither",
                adapter.checkpoint.path,
                tensor=values[0],
            )
    return changed[0] if changed else None


def _has_factors(adapter: Adapter, name: str) -> bool:
    return not {A, EMBEDDING_A}.isdisjoint(adapter.modules.get(name.removesuffix(".weight"), {}))


def _equal(adapter: Adapter, first: str, second: str) -> bool:
    """Whether two tensors of an adapter have the same bytes."""
    infos = adapter.checkpoint.tensors
    if (infos[first].dtype, infos[first].shape) != (infos[second].dtype, infos[second].shape):
        return False
    loaded = adapter.checkpoint.load([first, second])
    a, b = (np.ascontiguousarray(loaded[name]).reshape(-1).view(np.uint8) for name in (first, second))
    return bool(np.array_equal(a, b))
