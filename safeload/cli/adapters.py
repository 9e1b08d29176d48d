"""What ``safeload info`` says of a LoRA adapter: its method, what it changes, and whether it fits a base."""

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

# Kinds of modules, and names of tensors, that a line has at most.
_KINDS, _NAMES = 12, 6
# Problems that a terminal shows.
_ROWS = 100


class Fitting(NamedTuple):
    """How an adapter fits a base.

    Attributes:
        base: path of the base.
        changed: number of its tensors that the adapter changes.
        packed: how many of these are packed, and dequantized when they are merged.
        total: number of all its tensors.
        problems: messages of what does not fit.
    """

    base: str
    changed: int
    packed: int
    total: int
    problems: list[str]


class AdapterSummary(NamedTuple):
    """An adapter as it is described.

    Attributes:
        method: "LoRA", "rsLoRA", "DoRA" or both of these.
        writer: "PEFT" or "MLX".
        ranks: of all modules, ascending.
        alphas: of all modules, ascending; of MLX the factors.
        modules: number of modules by the last part of their names; most first.
        embeddings: modules that are embeddings.
        parameters: ends of the names of tensors that are changed beside weights of layers.
        replaced: tensors of the base that it has its own values for.
        biases: number of biases that it adds to.
        config: its configuration.
        fitting: how it fits a base; None where no base is given.
    """

    method: str
    writer: str
    ranks: list[int]
    alphas: list[float]
    modules: dict[str, int]
    embeddings: list[str]
    parameters: list[str]
    replaced: list[str]
    biases: int
    config: dict[str, Any]
    fitting: Fitting | None


# An adapter; why it is not merged where it cannot be; None for anything else.
Found: TypeAlias = AdapterSummary | str | None


def about(path: str, opened: Checkpoint, options: argparse.Namespace) -> Found:
    """Describes an adapter.

    Raises:
        ValueError: a base is given, and this is not an adapter.
        SafeloadError, OSError: the base cannot be opened; or one is given, and the adapter cannot be merged.
    """
    found: Found = None
    if any(".lora_" in name or name.startswith("base_model.model.") for name in opened):
        try:
            found = _described(opened, options)
        except FileNotFoundError:
            if options.base is not None:
                raise
        except (SafeloadError, OSError) as error:
            if options.base is not None:
                raise
            found = f"merging refuses it: {one_line(error)}"
    if found is None and options.base is not None:
        raise ValueError(f"--base is for LoRA adapters, and {shown(path)} is not one")
    return found


def _described(opened: Checkpoint, options: argparse.Namespace) -> AdapterSummary:
    from ..loading import adapter as parts  # only here: few files are adapters
    from ..loading.adapter_fit import outermost

    adapter = parts.Adapter(opened)
    settings, modules = adapter.settings, adapter.modules
    factors = {name: one for name, one in modules.items() if {parts.A, parts.EMBEDDING_A} & one.keys()}
    names = [outermost(name) for name in factors]
    kinds = Counter(name.rpartition(".")[2] for name in names).most_common()
    ranks: Iterable[int | None] = {adapter.rank(name) for name in factors}
    alphas: Iterable[float] = {settings.alpha_of(name) for name in names}
    if settings.parameters:  # whose names, and numbers of matrices, only a base tells
        ranks, alphas = {settings.rank, *settings.ranks.values()}, {settings.alpha, *settings.alphas.values()}
    method = [name for name, used in (("rsLoRA", settings.rslora), ("DoRA", settings.dora)) if used]
    return AdapterSummary(
        " and ".join(method) or "LoRA",
        "MLX" if settings.mlx else "PEFT",
        sorted(filter(None, ranks)),
        sorted(alphas),
        dict(kinds),
        [name for name, one in factors.items() if parts.EMBEDDING_A in one],
        list(settings.parameters),
        [name for name, one in modules.items() if parts.VALUE in one],
        sum(parts.BIAS in one for one in modules.values()),
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
    """The lines of the listing."""
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
    some = fitting.problems[: most_rows(options, _ROWS)]
    yield from (f"  {problem}" for problem in some)
    if len(some) < len(fitting.problems):
        yield "  " + rest(len(fitting.problems) - len(some), "problem", options)


def as_json(found: Found) -> dict[str, Any] | None:
    """The same as plain data."""
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
    """Whether a base was given, and the adapter does not fit it."""
    return isinstance(found, AdapterSummary) and found.fitting is not None and bool(found.fitting.problems)


def _span(values: list[Any]) -> str:
    low, high = f"{values[0]:g}", f"{values[-1]:g}"
    return low if low == high else f"{low} to {high}"


def _some(texts: Iterable[str], most: int) -> str:
    every = [printable(text) for text in texts]
    return ", ".join(every[:most]) + (f" and {len(every) - most:,} more" if len(every) > most else "")
