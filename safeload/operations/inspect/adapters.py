"""LoRA adapters: method, changed modules, and whether they fit a base."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from ...base.text import plural, printable
from ...checkpoint import Checkpoint
from ...errors import SafeloadError, exported, one_line
from ...formats.opening import Paths
from ...loading import entry as loading

# Maximum number of module kinds and tensor names in a line.
_KINDS, _NAMES = 12, 6


@exported()
class AdapterFitting(NamedTuple):
    """How an adapter fits a base: ``adapter.fitting`` of `Info`.

    Attributes:
        base: path of the base.
        changed: number of base tensors that the adapter changes.
        packed: number of changed tensors that are packed, and dequantized when merged.
        total: number of base tensors.
        problems: messages about tensors that do not fit.

    Example:
        >>> import safeload
        >>> safeload.info("tiny-lora", base="tiny-llama").adapter.fitting.total
        30
    """

    base: str
    changed: int
    packed: int
    total: int
    problems: list[str]


@exported()
class AdapterSummary(NamedTuple):
    """A LoRA adapter, summarized: ``adapter`` of `Info`.

    Attributes:
        method: "LoRA", "rsLoRA", "DoRA" or "rsLoRA and DoRA".
        writer: "PEFT" or "MLX".
        ranks: ranks of its modules, ascending.
        alphas: alphas of its modules, ascending; the scale factors of an MLX adapter.
        modules: number of modules by the last part of their names, most frequent first.
        embeddings: names of embeddings that it changes.
        parameters: name suffixes of changed tensors other than layer weights.
        replaced: base tensors that it stores whole.
        biases: number of biases that it adds to.
        config: its parsed configuration.
        fitting: how it fits the base: ``fitting.problems`` is empty if it does. None without a base.

    Example:
        >>> import safeload
        >>> adapter = safeload.info("tiny-lora", base="tiny-llama").adapter
        >>> adapter.method, adapter.ranks, adapter.fitting.problems
        ('LoRA', [4], [])
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
    fitting: AdapterFitting | None


# An adapter; the reason why it cannot be merged; None for other checkpoints.
Found: TypeAlias = AdapterSummary | str | None


def about(path: str, opened: Checkpoint, base: Paths | None, storage_options: Mapping[str, Any] | None = None) -> Found:
    """Summarize an adapter."""
    summary: Found = None
    if any(".lora_" in name or name.startswith("base_model.model.") for name in opened):
        try:
            summary = _described(opened, base, storage_options)
        except FileNotFoundError:
            if base is not None:
                raise
        except (SafeloadError, OSError) as error:
            if base is not None:
                raise
            summary = f"it cannot be merged: {one_line(error)}"
    if summary is None and base is not None:
        raise ValueError(f"base= needs a LoRA adapter, got {path}")
    return summary


def _described(opened: Checkpoint, base: Paths | None, storage_options: Mapping[str, Any] | None) -> AdapterSummary:
    from ...loading import adapter as parts  # imported here: few files are adapters
    from ...loading.adapter_fit import outermost
    from ...loading.merge import fit

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
    fitting = None
    if base is not None:
        with loading.open(base, storage_options=storage_options) as opened_base:
            problems: list[SafeloadError] = []
            _, merge = fit(opened_base, [adapter], problems)
            packed = sum(merge.base.target(name).row is None for name in merge.changes)
            messages = [str(error.args[0]).removeprefix(f"{error.path}: ") for error in problems]
            fitting = AdapterFitting(opened_base.path, len(merge.changes), packed, len(opened_base), messages)
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
        fitting,
    )


def lines(found: Found, rows: int | None, rest: Callable[[int, str], str]) -> Iterator[str]:
    """Yield the lines about an adapter, with at most ``rows`` problems; ``rest`` returns a line for the rest."""
    if found is None:
        return
    if isinstance(found, str):
        yield found
        return
    rank, alpha = ("rank", "scale") if found.writer == "MLX" else ("r", "alpha")
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
    fitting = found.fitting
    if fitting is not None and fitting.problems:
        yield f"does not fit {fitting.base}: {plural(len(fitting.problems), 'problem')}"
        listed = fitting.problems[:rows]
        yield from (f"  {problem}" for problem in listed)
        if len(listed) < len(fitting.problems):
            yield "  " + rest(len(fitting.problems) - len(listed), "problem")
    elif fitting is not None:
        packed = f", {fitting.packed:,} of them packed" if fitting.packed else ""
        yield f"fits {fitting.base}: changes {fitting.changed:,} of its {plural(fitting.total, 'tensor')}{packed}"


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
    """True if a base was given and the adapter does not fit."""
    return isinstance(found, AdapterSummary) and found.fitting is not None and bool(found.fitting.problems)


def _span(values: list[Any]) -> str:
    low, high = f"{values[0]:g}", f"{values[-1]:g}"
    return low if low == high else f"{low} to {high}"


def _some(texts: Iterable[str], most: int) -> str:
    every = [printable(text) for text in texts]
    return ", ".join(every[:most]) + (f" and {len(every) - most:,} more" if len(every) > most else "")
