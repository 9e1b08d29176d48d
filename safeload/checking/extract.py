"""Extract a LoRA adapter from a fine-tuned model: factors of its difference from the base, matrix by matrix.

A randomized SVD finds the factors (Halko, Martinsson, Tropp 2011, algorithms 4.4 and 5.1): products of the difference D
with random vectors, repeatedly multiplied by D and its transpose, span the range of its largest singular values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from ..adapters.adapter import PREFIX, WEIGHTS
from ..conversion.adapter_forms import refuse_folder_of, write_folder
from ..conversion.catalog import Catalog, Given, TensorDescription
from ..conversion.destinations import writer_of
from ..conversion.rules import reason_of_role
from ..core import dtypes
from ..core.arrays import Array, index_of
from ..core.atomic_file import existing_file
from ..core.cast import astype
from ..core.memory import check_threads
from ..core.names import Patterns, Selection, grouped
from ..core.progress import Meter, Progress
from ..core.registry import WEIGHT_SUFFIXES
from ..core.showing import Report, table
from ..core.tensors import Lazy
from ..core.text import PathLike, clip, error_about, native_path, plural, printable, show, size, warning
from ..errors import FormatError, SafeloadError, UnsupportedError, exported, public
from ..models.choosing import choose_part, tied_heads
from ..models.module_names import unwrapped
from ..models.schema import Schema, listed_in
from ..quant.finder import conv1d_model, is_named_conv1d
from ..remote.url import is_url
from .diff import reasons
from .forms import in_memory

# Random vectors beyond the rank, and products with D and its transpose: even for a matrix of random numbers, the
# hardest case, the error is then within 0.5 % of the least.
_OVERSAMPLING, _POWER = 16, 4
_SKETCHED = 4  # sides per vector: a full SVD takes less time for smaller matrices
_NOISE = 4  # singular values up to this many eps of the largest are rounding errors
_SEED = 0  # fixed, so results repeat
_TILE = 1 << 20  # elements of a product at a time
_WEIGHT = ".weight"
_F32, _F64 = dtypes.BY_CODE["F32"], dtypes.BY_CODE["F64"]
_STORED = [dtypes.BY_CODE[code] for code in ("F32", "BF16", "F16")]


@exported()
class ExtractReport(Report):
    """The result of `safeload.extract`. ``str()`` is a table.

    It has a row per changed tensor, whose ``status`` is "factored", "whole" or "left out". dtype, shape and nbytes
    describe the tensor in the fine-tuned model, if it is there. Numbers are 0 and nan for tensors without factors.

    Attributes:
        destination: path of the adapter's folder.
        base: title of the base, as in messages.
        fine: title of the fine-tuned model.
        nbytes: bytes of the adapter's weight file.
        ranks: rank of the factors of each matrix, by name.
        changes: Frobenius norm of the change D of each factored matrix.
        errors: relative error of each product, ``norm(D - B @ A) / norm(D)``.
        whole: why a tensor has no factors and is stored whole, by name.
        left_out: why a changed tensor is not in the adapter, by name.
        described: dtype, shape and bytes of every changed tensor.
        rank: largest rank.
        kept: 1 minus the sum of the squares of all D - B @ A, by the sum of the squares of all D.

    Example:
        >>> import safeload
        >>> safeload.convert("tiny-llama", "tuned", adapters="tiny-lora", dtype="float32").tensors
        30
        >>> report = safeload.extract("tiny-llama", "tuned", "again", rank=4)
        >>> report, report.kept > 0.999
        (<ExtractReport: again: LoRA of rank 4 for 6 matrices, 12 KiB>, True)
    """

    _columns = ("name", "dtype", "shape", "nbytes", "status", "rank", "change", "error", "reason")
    _json = (
        *("destination", "base", "fine", "nbytes", "rank", "kept"),
        *("ranks", "changes", "errors", "whole", "left_out"),
    )

    def __init__(self, destination: str, base: str, fine: str) -> None:
        self.destination, self.base, self.fine = destination, base, fine
        self.nbytes = 0
        self.ranks: dict[str, int] = {}
        self.changes: dict[str, float] = {}
        self.errors: dict[str, float] = {}
        self.whole: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.described: dict[str, tuple[str, tuple[int, ...], int]] = {}

    @property
    def rank(self) -> int:
        return max(self.ranks.values())

    @property
    def kept(self) -> float:
        lost = math.hypot(*(change * self.errors[name] for name, change in self.changes.items()))
        return 1 - (lost / math.hypot(*self.changes.values())) ** 2

    def lines(self, columns: int | None = 80) -> list[str]:
        head = ("tensor", "shape", "rank", "change", "error")
        cells = [
            (printable(name), str([*shape]), f"{rank}", f"{change:.4g}", f"{error:.4g}")
            for name, _, shape, _, status, rank, change, error, _ in self._values()
            if status == "factored"
        ]
        lines = [clip(printable(line), columns) for line in self._about()]
        return [*lines, "", *table(head, cells, right=frozenset((2, 3, 4)), columns=columns)]

    def _values(self) -> Iterable[Any]:
        for name, (dtype, shape, nbytes) in self.described.items():
            status = "factored" if name in self.ranks else "whole" if name in self.whole else "left out"
            numbers = self.ranks.get(name, 0), self.changes.get(name, math.nan), self.errors.get(name, math.nan)
            yield name, dtype, [*shape], nbytes, status, *numbers, {**self.whole, **self.left_out}.get(name, "")

    def _about(self) -> Sequence[str]:
        count = f"{len(self.ranks):,} {'matrix' if len(self.ranks) == 1 else 'matrices'}"
        return [
            f"{self.destination}: LoRA of rank {self.rank} for {count}, {size(self.nbytes)}",
            f"kept of the change of these matrices: {100 * self.kept:.4g} %",
            *(f"stored whole: {line}" for line in reasons(self.whole)),
            *(f"not in the adapter: {line}" for line in reasons(self.left_out)),
        ]


@public
def extract(
    base: Given,
    fine: Given,
    dst: PathLike,
    *,
    rank: int = 16,
    dtype: Any = "float32",
    with_rest: bool = False,
    only: Patterns = None,
    drop: Patterns = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> ExtractReport:
    """Extract a LoRA adapter from a fine-tuned model, as a folder for PEFT.

    Every changed matrix of a linear layer, and every changed 2-D or 3-D convolution, gets factors of its difference
    from the base. Their error is within 1 % of the least for their rank, and equal calls give equal bytes on a
    machine. Memory holds up to three matrices in float32, and the adapter. Quantized tensors are dequantized, and GGUF
    files of llama.cpp are read as models of transformers. Tensors get the names of transformers in memory.

    Args:
        base: path or URL of a file, a folder or an index.json; an open `Checkpoint`; or a dict of arrays.
        fine: the fine-tuned model, in any of these forms.
        dst: path of the folder to write, with adapter_model.safetensors and adapter_config.json.
        rank: largest rank of the factors. A difference of a smaller rank gets its own rank.
        dtype: dtype of the factors: "float32", "bfloat16" or "float16".
        with_rest: True to store other changed tensors whole: norms, biases, embeddings, tensors of another shape. PEFT
            loads them in place of the base's.
        only: shell pattern, or several, of the names to compare; None compares all.
        drop: shell pattern, or several, of names to skip.
        overwrite: True to replace an adapter in the folder. Other files stay.
        storage_options: options of the filesystems behind URLs, see `open`.
        threads: number of threads for reading; None chooses it. NumPy's BLAS chooses its own.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        The report, with rank and error of every matrix, and every changed tensor without a place in the adapter.

    Raises:
        SafeloadError: the models are equal, or differ only in tensors without factors.
        FormatError: a matrix has a NaN or an infinity; or see `open`.
        UnsupportedError: a tensor cannot be dequantized, or factors exceed ``dtype``; or see `open`.
        TensorNotFoundError: a pattern matches no name.
        FileExistsError: the folder has files and ``overwrite`` is not set.
        ValueError: ``dst`` is a URL or the folder of a source, or an argument is invalid.
        OSError: a file cannot be opened or written.

    Example:
        >>> import numpy as np, safeload
        >>> base = {"q.weight": np.eye(4, dtype=np.float32)}
        >>> safeload.extract(base, {"q.weight": base["q.weight"] + 1}, "plus-one").rank
        1
    """
    check_threads(threads)
    if type(rank) is not int or rank < 1:
        raise ValueError(f"rank must be an integer >= 1, got {show(rank)}")
    if (row := dtypes.parse(dtype)) not in _STORED:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {show(dtype)}")
    folder, _ = native_path(dst)
    with Catalog.of(base, storage_options) as stored, Catalog.of(fine, storage_options) as stored_fine:
        _check_folder(folder, (*stored.files, *stored_fine.files), overwrite=overwrite)
        report = ExtractReport(folder, stored.title, stored_fine.title)
        models = in_memory(stored, stored_fine)
        names = [*dict.fromkeys(name for model in models for name in model)]
        chosen = Selection(only, drop).of(names)
        for model in models:
            model.refuse_codes([name for name in chosen if name in model], "extract")
        schema, tied = _schema(models), tied_heads(models[0].config, dict.fromkeys(models[0]).keys())
        turns = conv1d_model(models[0].config or models[1].config) is not None
        sizes = {name: sum(model.about(name).nbytes for model in models if name in model) for name in chosen}
        factors: dict[str, tuple[Array, Array]] = {}
        with closing(Meter(progress, sum(sizes.values()))) as meter:
            for name, nbytes in sizes.items():
                reason = f"is tied to {tied[name]}" if name in tied else _reason(models, name, schema)
                about = (models[1] if name in models[1] else models[0]).about(name)
                described = about.code, about.shape, about.nbytes
                if reason and _differs(models, name, threads):
                    real = all(name in model and _is_real(model.about(name)) for model in models)
                    kept = with_rest and real and name not in tied
                    (report.whole if kept else report.left_out)[name] = reason
                    report.described[name] = described
                elif not reason and (change := _difference(models, name, threads)) is not None:
                    change = change.T if turns and is_named_conv1d(name) else change
                    left, right, report.changes[name], report.errors[name] = _factors(name, change, rank, row)
                    factors[name], report.ranks[name], report.described[name] = (left, right), len(right), described
                meter.add(nbytes)
        if not report.described:
            raise SafeloadError(f"{report.fine} equals {report.base}: there is no change to extract")
        if not factors:
            name, reason = next(iter({**report.whole, **report.left_out}.items()))
            example = f"{plural(len(report.described), 'changed tensor')} such as {show(name)}, which {reason}"
            raise UnsupportedError(f"{report.base} and {report.fine} differ in no matrix of a layer, but in {example}")
        in_model = _in_model(models, names)
        tensors: dict[str, Any] = {}
        for name, (left, right) in factors.items():
            module, convolution = PREFIX + in_model[name].removesuffix(_WEIGHT), report.described[name][1][2:]
            if convolution:
                left = left.reshape(*left.shape, *(1 for _ in convolution))
                right = right.reshape(len(right), -1, *convolution)
            tensors |= {f"{module}.lora_A.weight": right, f"{module}.lora_B.weight": left}
        for name in report.whole:
            about, (module, dot, last) = models[1].about(name), (PREFIX + in_model[name]).rpartition(".")
            own = row if about.quantized or about.row.packed else about.row
            inner = f"{module}.base_layer" if f"{module}.lora_A.weight" in tensors else module
            values = partial(_read, models[1], name, own, threads)
            tensors[inner + dot + last] = Lazy(dtypes.array_dtype(own.number), about.shape, values)
        file = writer_of(tensors, {"format": "pt"}, editable=False)
        write_folder(folder, WEIGHTS, file, _config(report, models, in_model), overwrite=overwrite)
        report.nbytes = file.size
    if report.left_out:
        first, reason = next(iter(report.left_out.items()))
        text = "%s: not in the adapter, although changed: %s, such as %s, which %s%s"
        advice = "" if with_rest else "; with_rest=True stores norms, biases and embeddings whole"
        warning(text, folder, plural(len(report.left_out), "tensor"), show(first), reason, advice)
    return report


# ---- tensors ----


def _schema(models: tuple[Catalog, Catalog]) -> Schema | None:
    choices = (choose_part(model.config, model.format, dict.fromkeys(model).keys()) for model in models)
    return next((choice.schema for choice in choices if choice is not None), None)


def _reason(models: tuple[Catalog, Catalog], name: str, schema: Schema | None) -> str:
    """Return why a tensor gets no factors; "" for a matrix."""
    base, fine = models
    if name not in base or name not in fine:
        return "is only in the base" if name in base else "is not in the base"
    abouts = fine.about(name), base.about(name)
    if (integer := next((about for about in abouts if not _is_real(about)), None)) is not None:
        return f"is {integer.code}, not floating"
    if reason := reason_of_role(schema, name):
        return reason
    shape, other = (about.shape for about in abouts)
    if shape != other:
        return f"is {[*shape]}, but {[*other]} in the base"
    # The kernels of a convolution with as many groups as inputs have a single channel.
    if len(shape) not in (2, 4, 5) or (len(shape) > 2 and shape[1] == 1):
        return f"is {len(shape)}-D"
    return "" if name.endswith(_WEIGHT) else "is no weight of a module"


def _in_model(models: tuple[Catalog, Catalog], names: Iterable[str]) -> dict[str, str]:
    """Return the names of tensors in the model: a class with a head adds a prefix if files lack it."""
    schema, config = _schema(models), models[0].config or models[1].config
    kind = next(iter(listed_in(config)), None)
    headless = not isinstance(kind, str) or (kind.endswith("Model") and "LMHead" not in kind)
    result = {}
    for name in names:
        match = None if schema is None or headless else schema.find(unwrapped(name))
        prefix = schema.prefixes[0] if schema is not None and match is not None and match.prefix == "" else ""
        result[name] = prefix + unwrapped(name)
    return result


def _is_real(about: TensorDescription) -> bool:
    return about.floating or about.quantized


def _read(model: Catalog, name: str, row: dtypes.Dtype, threads: int | None) -> Array:
    array: Array = np.empty(model.about(name).shape, dtypes.array_dtype(row.number))
    model.read_into(name, row, array, threads)
    return array


def _differs(models: tuple[Catalog, Catalog], name: str, threads: int | None) -> bool:
    """Return whether only one model has a tensor, or its shapes or values differ."""
    abouts = [model.about(name) for model in models if name in model]
    if len(abouts) == 1 or abouts[0].shape != abouts[1].shape:
        return True
    if all(map(_is_real, abouts)):
        a, b = (_read(model, name, _work(models, name), threads) for model in models)
    else:
        a, b = (model.array(name, threads) for model in models)
    return not np.array_equal(a, b, equal_nan=a.dtype.kind == b.dtype.kind == "f")


def _work(models: tuple[Catalog, Catalog], name: str) -> dtypes.Dtype:
    return _F64 if any(model.about(name).element is _F64 for model in models) else _F32


def _difference(models: tuple[Catalog, Catalog], name: str, threads: int | None) -> Array | None:
    """Return what the base lacks to be the fine-tuned model, as a matrix; None if they are equal."""
    base, fine = models
    row = _work(models, name)
    change = _read(fine, name, row, threads)
    with np.errstate(all="ignore"):
        change -= _read(base, name, row, threads)
    if not change.any():
        return None
    if not math.isfinite(_largest(change)):
        for model in (fine, base):
            finite = np.isfinite(_read(model, name, row, threads)).reshape(-1)
            if not finite.all():
                at = [*index_of(int(finite.argmin()), change.shape)]
                raise error_about(FormatError, f"has a NaN or an infinity at {at}", path=model.title, tensor=name)
        raise error_about(UnsupportedError, f"has a change beyond {row.name}", path=fine.title, tensor=name)
    return change.reshape(len(change), -1)


def _largest(values: Array) -> float:
    return max(float(values.max()), -float(values.min()))  # NaN if a value is NaN


# ---- factors ----


def _factors(name: str, matrix: Array, rank: int, row: dtypes.Dtype) -> tuple[Array, Array, float, float]:
    """Return B and A, the norm of a matrix, and the relative error of their product.

    The matrix is scaled in place, because squares of small and large numbers leave float32.
    """
    exponent = math.frexp(_largest(matrix))[1]
    np.ldexp(matrix, -exponent, out=matrix)
    u, s, vt = _svd(matrix, rank)
    count = int(np.count_nonzero(s > s[0] * _NOISE * np.finfo(matrix.dtype).eps))
    roots = np.sqrt(np.ldexp(s[:count].astype(np.float64), exponent))
    with np.errstate(over="ignore"):
        left, right = astype(u[:, :count] * roots, row.name), astype(vt[:count] * roots[:, None], row.name)
    b, a = np.ldexp(left.astype(np.float64), -exponent).astype(matrix.dtype), right.astype(matrix.dtype)
    if not math.isfinite(_largest(b)) or not math.isfinite(_largest(a)):
        raise error_about(UnsupportedError, f"has factors beyond {row.name}; pass another dtype", tensor=name)
    squares = lost = 0.0
    height = max(1, _TILE // matrix.shape[1])
    for rows in (slice(begin, begin + height) for begin in range(0, len(matrix), height)):
        squares += float(np.square(matrix[rows], dtype=np.float64).sum())
        lost += float(np.square(matrix[rows] - b[rows] @ a, dtype=np.float64).sum())
    return left, right, math.ldexp(math.sqrt(squares), exponent), math.sqrt(lost / squares)


def _svd(matrix: Array, rank: int) -> tuple[Array, Array, Array]:
    """Return the largest singular values, at most ``rank``, with their vectors."""
    vectors = rank + _OVERSAMPLING
    if _SKETCHED * vectors >= min(matrix.shape):
        u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    else:
        random = np.random.default_rng(_SEED).standard_normal((matrix.shape[1], vectors), np.float32)
        basis = np.linalg.qr(matrix @ random.astype(matrix.dtype))[0]
        for _ in range(_POWER):
            basis = np.linalg.qr(matrix.T @ basis)[0]
            basis = np.linalg.qr(matrix @ basis)[0]
        v, s, turned = np.linalg.svd(matrix.T @ basis, full_matrices=False)
        u, vt = basis @ turned.T, v.T
    return u[:, :rank], s[:rank], vt[:rank]


# ---- files ----


def _config(report: ExtractReport, models: tuple[Catalog, Catalog], in_model: Mapping[str, str]) -> dict[str, Any]:
    """Return the ``adapter_config.json``, without PEFT's defaults."""
    base, config = models[0], models[0].config or models[1].config
    modules = [name.removesuffix(_WEIGHT) for name in in_model.values() if name.endswith(_WEIGHT)]
    ranks = {in_model[name].removesuffix(_WEIGHT): rank for name, rank in report.ranks.items()}
    # The last part of names stands for all modules ending in it, unless a module without factors does, too.
    outer = {part for name in in_model.values() for part in name.split(".")[:-2]}
    groups = grouped(modules, lambda module: module.rpartition(".")[2])
    short = {end: group for end, group in groups.items() if end not in outer and ranks.keys() >= {*group}}
    ends = {module: end for end, group in short.items() for module in group}
    smaller = {module: rank for module, rank in ranks.items() if rank != report.rank}
    generates = any(str(kind).endswith(("ForCausalLM", "LMHeadModel")) for kind in listed_in(config))
    return {
        "base_model_name_or_path": None if base.in_memory else report.base.removeprefix("hf://"),
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if generates else None,
        "r": report.rank,
        "lora_alpha": report.rank,  # the factor of the product is 1
        "rank_pattern": smaller,
        "alpha_pattern": smaller,
        "target_modules": sorted({ends.get(module, module) for module in ranks}),
        "fan_in_fan_out": conv1d_model(config) is not None and any(map(is_named_conv1d, report.ranks)),
    }


def _check_folder(folder: str, sources: Iterable[str], *, overwrite: bool) -> None:
    """Refuse a folder before the work starts."""
    if is_url(folder):
        raise ValueError(f"extract writes a local folder, got {show(folder)}")
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise existing_file(folder, "This is a file, but an adapter needs a folder")
    if os.path.splitext(folder)[1].lower() in WEIGHT_SUFFIXES and not os.path.isdir(folder):
        raise ValueError(f"extract writes a folder, but {show(folder)} has the suffix of a file")
    refuse_folder_of(sources, folder)
    if not overwrite and os.path.isdir(folder) and os.listdir(folder):
        raise existing_file(folder)
