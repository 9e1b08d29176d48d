"""LoRA adapters in ``safeload info``: method, changed modules, and whether they fit a base."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..base.text import plural, printable
from ..checkpoint import Checkpoint
from ..errors import SafeloadError, one_line
from ..loading import entry as loading
from .common import most_rows, rest, shown, storage_options

if TYPE_CHECKING:
    from ..loading.adapter import Adapter

# Maximum number of module kinds and tensor names in a line.
_KINDS, _NAMES = 12, 6
# Maximum number of problems on a terminal.
_ROWS = 100


class Fitting(NamedTuple):
    """How an adapter fits a base."""

    base: str  # path
    changed: int  # tensors of the base that the adapter changes
    packed: int  # changed tensors that are packed, and dequantized when merged
    total: int  # tensors of the base
    problems: list[str]  # messages about tensors that do not fit


class AdapterSummary(NamedTuple):
    """An adapter, summarized."""

    method: str  # "LoRA", "rsLoRA", "DoRA" or "rsLoRA and DoRA"
    writer: str  # "PEFT" or "MLX"
    ranks: list[int]  # ascending
    alphas: list[float]  # ascending; the scale factors of an MLX adapter
    modules: dict[str, int]  # modules by the last part of their names, most frequent first
    embeddings: list[str]
    parameters: list[str]  # name suffixes of changed tensors other than layer weights
    replaced: list[str]  # base tensors that the adapter stores whole
    biases: int  # biases that the adapter adds to
    config: dict[str, Any]
    fitting: Fitting | None  # None without a base


# An adapter; the reason why it cannot be merged; None for other checkpoints.
Found: TypeAlias = AdapterSummary | str | None


def about(path: str, opened: Checkpoint, options: argparse.Namespace) -> Found:
    """Summarize an adapter.

    Raises:
        ValueError: --base is passed, but this is not an adapter.
        SafeloadError, OSError: the base cannot be opened, or the adapter cannot be merged into it.
    """
    summary: Found = None
    if any(".lora_" in name or name.startswith("base_model.model.") for name in opened):
        try:
            summary = _described(opened, options)
        except FileNotFoundError:
            if options.base is not None:
                raise
        except (SafeloadError, OSError) as error:
            if options.base is not None:
                raise
            summary = f"it cannot be merged: {one_line(error)}"
    if summary is None and options.base is not None:
        raise ValueError(f"--base needs a LoRA adapter, got {shown(path)}")
    return summary


def _described(opened: Checkpoint, options: argparse.Namespace) -> AdapterSummary:
    from ..loading import adapter as parts  # imported here: few files are adapters
    from ..loading.adapter_fit import outermost

    adapter = parts.Adapter(opened)
    settings, modules = adapter.settings, adapter.modules
    factors = {name: module for name, module in modules.items() if {parts.A, parts.EMBEDDING_A} & module.keys()}
    names = [outermost(name) for name in factors]
    kinds = Counter(name.rpartition(".")[2] for name in names).most_common()
    ranks: Iterable[int | None] = {adapter.rank(name) for name in factors}
    alphas: Iterable[float] = {settings.alpha_of(name) for name in names}
    if settings.parameters:  # only a base has their names and numbers of matrices
        ranks, alphas = {settings.rank, *settings.ranks.values()}, {settings.alpha, *settings.alphas.values()}
    method = [name for name, used in (("rsLoRA", settings.rslora), ("DoRA", settings.dora)) if used]
    return AdapterSummary(
        " and ".join(method) or "LoRA",
        "MLX" if settings.mlx else "PEFT",
        sorted(filter(None, ranks)),
        sorted(alphas),
        dict(kinds),
        [name for name, module in factors.items() if parts.EMBEDDING_A in module],
        list(settings.parameters),
        [name for name, module in modules.items() if parts.VALUE in module],
        sum(parts.BIAS in module for module in modules.values()),
        adapter.config,
        None if options.base is None else _fitting(adapter, options),
    )


def _fitting(adapter: Adapter, options: argparse.Namespace) -> Fitting:
    from ..loading.adapter_base import CheckpointBase
    from ..loading.merge import fit

    with loading.open(options.base, storage_options=storage_options(options)) as base:
        problems: list[SafeloadError] = []
        whole, merge = fit(base, [adapter], problems)
        against = CheckpointBase(whole)
        packed = sum(against.target(name).row is None for name in merge.changes)
        messages = [str(error.args[0]).removeprefix(f"{error.path}: ") for error in problems]
        return Fitting(shown(options.base), len(merge.changes), packed, len(base), messages)


def lines(found: Found, options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines about an adapter."""
    if found is None:
        return
    if isinstance(found, str):
        yield found
        return
    of_mlx = found.writer == "MLX"
    rank, alpha = ("rank", "scale") if of_mlx else ("r", "alpha")
    if found.ranks:
        yield f"{found.method}: {rank} {_span(found.ranks)}, {alpha} {_span(found.alphas)}"
        kinds = [f"{count:,} {name}" for name, count in found.modules.items()]
        yield f"changes {plural(sum(found.modules.values()), 'module')}: {_some(kinds, _KINDS)}"
    if found.parameters:
        yield f"parameters: {_some(found.parameters, _NAMES)}"
    if found.embeddings:
        yield f"embeddings: {_some(found.embeddings, _NAMES)}"
    if found.biases:
        yield f"adds to {found.biases:,} bias{'es' if found.biases > 1 else ''}"
    if found.replaced:
        yield f"replaces {plural(len(found.replaced), 'tensor')}: {_some(found.replaced, _NAMES)}"
    if found.fitting is not None:
        yield from _of_fitting(found.fitting, options)


def _of_fitting(fitting: Fitting, options: argparse.Namespace) -> Iterator[str]:
    if not fitting.problems:
        packed = f", {fitting.packed:,} of them packed" if fitting.packed else ""
        yield f"fits {fitting.base}: changes {fitting.changed:,} of its {plural(fitting.total, 'tensor')}{packed}"
        return
    yield f"does not fit {fitting.base}: {plural(len(fitting.problems), 'problem')}"
    listed = fitting.problems[: most_rows(options, _ROWS)]
    yield from (f"  {problem}" for problem in listed)
    if len(listed) < len(fitting.problems):
        yield "  " + rest(len(fitting.problems) - len(listed), "problem", options)


def as_json(found: Found) -> dict[str, Any] | None:
    """Return a summary as JSON values."""
    if found is None or isinstance(found, str):
        return None if found is None else {"merged": False, "why": found}
    keys = ("base_model_name_or_path", "modules_to_save")
    plain = {"merged": True, **found._asdict(), **{key: found.config.get(key) for key in keys}}
    del plain["config"]
    fitting = plain.pop("fitting")
    if fitting is not None:
        plain["base"] = {"fits": not fitting.problems, **fitting._asdict()}
    return plain


def misfits(found: Found) -> bool:
    """True if --base was passed and the adapter does not fit."""
    return isinstance(found, AdapterSummary) and found.fitting is not None and bool(found.fitting.problems)


def _span(values: list[Any]) -> str:
    low, high = f"{values[0]:g}", f"{values[-1]:g}"
    return low if low == high else f"{low} to {high}"


def _some(texts: Iterable[str], most: int) -> str:
    every = [printable(text) for text in texts]
    return ", ".join(every[:most]) + (f" and {len(every) - most:,} more" if len(every) > most else "")
