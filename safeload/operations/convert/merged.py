"""Merge adapters into the tensors of a conversion, as each tensor is read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.paths import absolute
from ...loading.adapter import Adapter, AdapterTarget, Apart, Base, Fit, Heads, heads_of, listed, opened
from ...loading.merge import Merge, check_floating, in_rows, target_of, warn_of_untied
from ...models.choosing import untied as without_ties
from ...stores.local import check_unchanged, identity_of
from ..sources.catalog import Catalog, Made, TensorDescription
from ..sources.executors import in_memory


def _target(catalog: Catalog, name: str) -> AdapterTarget:
    origin, file, _ = catalog.place(name)
    if file is not None:
        owner: Any = origin  # tensors of a dict have no file
        return target_of(owner, name)
    about = catalog.about(name)
    if not about.quantized:
        check_floating(name, about.row, None)
    work = np.dtype(np.float64 if about.row.code == "F64" and not about.quantized else np.float32)

    def rows(at: Any) -> Array:
        values: Array = catalog.array(name)[at].astype(work)
        return values

    source = None if about.quantized else in_rows(catalog.in_place(name), work)
    row = None if about.quantized else about.row
    return AdapterTarget(name, about.shape, row, work, rows, about.quantized, source)


def _merged(
    catalog: Catalog,
    adapters: Sequence[Adapter],
    heads: Heads,
    fits: Sequence[Fit] | None = None,
    places: Mapping[str, Any] | None = None,
) -> Catalog:
    """Return a catalog with adapters merged into its tensors, in float32, when a tensor is read."""
    # The embedding of each untied head that is not stored.
    aliases = {head: embedding for head, embedding in heads.untied.items() if head not in catalog}
    whole = catalog.with_aliases(aliases)
    names = {**dict.fromkeys(catalog), **aliases}  # a piece has more in its files
    target = partial(_target, whole)
    base = Base(whole.title, names, whole.config, lambda name: whole.about(name).shape, target, places=places)
    result, merge = Catalog.of(whole), Merge(base, adapters, heads, fits=fits)
    result.makes, result.merge, result.aliases = True, merge, aliases
    for name in merge.changes:
        about = whole.about(name)
        work = dtypes.BY_CODE["F64" if about.row.code == "F64" else "F32"]
        if not about.packed and (about.quantized or about.row.packed):  # merging turns blocks into numbers
            about = TensorDescription(name, work.name, about.shape, work.nbytes(math.prod(about.shape)), work, True)
        result.rows[name] = Made(partial(merge.values, name), work, about)
    if heads.untied and result.config is not None:
        result.config = without_ties(result.config)
    return result


def merged(
    stack: ExitStack,  # closes the adapters
    catalog: Catalog,
    adapters: Any,
    storage_options: Mapping[str, Any] | None = None,
    *,
    with_config: bool = False,  # True if the result has a config.json, which can untie the head
) -> Catalog:
    """Return a catalog with adapters merged, or the catalog itself if there are no adapters."""
    weighted = listed(adapters)
    if not weighted:
        return catalog
    opened_adapters = opened(stack, weighted, storage_options)
    heads = heads_of(opened_adapters, catalog.config, {name for name in catalog if isinstance(name, str)})
    result = _merged(catalog, opened_adapters, heads)
    if not with_config or catalog.config is None:
        warn_of_untied(heads, catalog.config)
    return result


# ---- in plans ----


def planned_adapters(catalog: Catalog) -> list[dict[str, Any]]:
    """Return the adapters of a catalog as plain data: a piece has too few tensors to fit them again."""
    if catalog.merge is None:
        return []
    merge, adapters = catalog.merge, []
    apart = {name: place for name, place in merge.base.places.items() if isinstance(place, Apart)}
    renamed = {name: place for name, place in merge.base.places.items() if isinstance(place, str)}
    for adapter, fit in zip(merge.adapters, merge.fits, strict=True):
        if adapter.checkpoint.weight_files[0].files.remote:
            raise in_memory("an adapter from a URL is open", "a conversion in pieces")
        paths = [*(file.place for file in adapter.checkpoint.weight_files), adapter.config_at.path]
        adapters.append(
            {
                "files": [[absolute(path), *identity_of(os.stat(path))[:2]] for path in paths],  # the config comes last
                "weight": adapter.weight,
                "parameters": fit.parameters,
                "transposed": sorted(fit.transposed),
                "apart": apart,
                "renamed": renamed,
                "tied": merge.heads.pairs,
                "untied": catalog.aliases,
            }
        )
    return adapters


def reopened(
    stack: ExitStack, catalog: Catalog, adapters: Sequence[Mapping[str, Any]], untied: Mapping[str, str]
) -> Catalog:
    """Return a catalog with the adapters of a piece merged; ``untied`` are its untied heads, with their embeddings."""
    weighted, fits = [], []
    for adapter in adapters:
        for path, size, version in adapter["files"]:
            check_unchanged(path, (size, version))
        paths = [path for path, _, _ in adapter["files"]]
        weighted.append((paths[0] if len(paths) == 2 else paths[:-1], adapter["weight"]))
        fits.append(Fit(adapter["parameters"], frozenset(adapter["transposed"]), {}))
    base = adapters[0]  # all were fitted to one base
    places = {**base["renamed"], **{name: Apart(*fields) for name, fields in base["apart"].items()}}
    return _merged(catalog, opened(stack, weighted), Heads(base["tied"], untied), fits, places)
