"""Quantize with importance: read importance matrices, and describe the jobs that use them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.native import lib
from ...base.paths import PathLike
from ...base.scheme import SCHEMES
from ...base.text import plural, show, subject
from ...base.url import is_url
from ...engine.codes.source import Source, of_numbers
from ...engine.run.job import Channels, Job, Origin
from ...engine.run.memory import private_array
from ...errors import FormatError
from ...formats.gguf import imatrix
from ...formats.gguf.imatrix import ImportanceMatrix
from ...formats.gguf.mixtures import EMBEDDINGS
from ...loading.entry import open as open_checkpoint
from ...stores.files import LOCAL
from ...stores.store import read_at
from ..sources.catalog import read_values

_MAGIC = b"GGUF"
_F32 = dtypes.BY_CODE["F32"]
# A file of the older format is read at once: 70B models have 30 MB.
MAX_FILE = 4 << 30


def read_importance(path: PathLike) -> ImportanceMatrix:
    """Read an importance matrix of llama.cpp's, in GGUF or in the older format."""
    shown = os.fspath(path)
    if not is_url(shown):
        with closing(LOCAL.open(shown)) as store:  # refuses pipes, which could block
            if read_at(store, 0, min(len(_MAGIC), store.size)) != _MAGIC:
                if store.size > MAX_FILE:
                    raise FormatError(f"{store.size:,} bytes are too large for an importance matrix", shown)
                return imatrix.of_dat(shown, read_at(store, 0, store.size))
    with open_checkpoint(shown) as checkpoint:
        names = [name for name in checkpoint if name.endswith((imatrix.SUMS, imatrix.COUNTS))]
        return imatrix.of_gguf(shown, checkpoint.load(names=names), checkpoint.metadata)


def check_importance(importance: Any, shape: tuple[int, ...], name: str = "") -> Array:
    """Return importance as float32 [matrices or 1, columns] for a tensor of this shape."""
    with np.errstate(over="ignore"):
        vectors = np.ascontiguousarray(np.asarray(importance), np.float32)
    columns = shape[-1] if shape else 1
    matrices = math.prod(shape[:-2])
    if vectors.shape not in ((columns,), (matrices, columns), (*shape[:-2], columns)):
        raise ValueError(
            f"{subject(name)}importance has shape {list(vectors.shape)}, expected [{columns}]"
            + (f" or {[*shape[:-2], columns]}" if len(shape) > 2 else "")
        )
    if not (np.isfinite(vectors) & (vectors >= 0)).all():
        raise ValueError(f"{subject(name)}importance must be finite and >= 0")
    return vectors.reshape(-1, columns)


def weighted_jobs(source: Source, scheme: str, memory: int, importance: Array, threads: int | None) -> Iterator[Job]:
    """Yield the jobs that quantize a tensor to ``memory`` (address), one for each matrix with its own importance."""
    target = SCHEMES[scheme].dtype
    columns = source.shape[-1]
    if source.packed is not None and (len(importance) > 1 or not source.in_order):
        # In another order than their values, or with an importance for each matrix.
        values = read_values(source, _F32, private_array(source.shape, np.dtype(np.float32)), threads)
        source = of_numbers(source.name, values, source.row, threads)
    first = source.work(lib.SL_OP_WEIGHTED, memory)._replace(target=target.number)
    if source.packed is not None:
        yield first._replace(channels=Channels(columns, 1, importance[0]))
        return
    elements = math.prod(source.shape) // len(importance)
    for index, vector in enumerate(importance):
        yield first._replace(
            offset=source.offset + source.row.nbytes(index * elements),
            size=source.row.nbytes(elements),
            memory=memory + target.nbytes(index * elements),
            channels=Channels(columns, 1, vector),
            origin=Origin(source.name, source.shape, source.owner, index * elements),
        )


def importance_by_name(
    importance: PathLike | Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    """Return the importance for each tensor to quantize that has one; see `check_importance`."""
    if isinstance(importance, Mapping):
        for name in importance:
            if name not in shapes:
                raise ValueError(f"imatrix= has importance for {show(name)}, which is not quantized to a type of ggml")
        return {name: check_importance(vector, shapes[name], name) for name, vector in importance.items()}
    return vectors_for(read_importance(importance), shapes)


def vectors_for(matrix: ImportanceMatrix, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Return the importance of a matrix for each tensor to quantize that has one."""
    vectors = {name: vector_for(matrix, name, shape) for name, shape in shapes.items()}
    importance = {name: vector for name, vector in vectors.items() if vector is not None}
    if shapes and not importance:
        raise ValueError(
            f"imatrix= {show(matrix.path)} has no entry for any of {plural(len(shapes), 'tensor')} to quantize, "
            f"such as {show(next(iter(shapes)))}"
        )
    return importance


def vector_for(matrix: ImportanceMatrix, name: str, shape: tuple[int, ...]) -> Array | None:
    """Return the importance of a tensor's columns, or None if the matrix has no entry for it."""
    vector = matrix.vectors.get(name)
    if vector is None:
        return None
    columns, matrices = shape[-1], math.prod(shape[:-2])
    if vector.size == columns * matrices:
        return vector.reshape(matrices, columns)
    if name in EMBEDDINGS:
        return None  # llama-quantize ignores such an entry
    raise FormatError(
        f"importance of {show(name)} has {vector.size:,} numbers, but the tensor has {columns:,} columns"
        + (f" in {matrices:,} matrices" if matrices > 1 else ""),
        matrix.path,
    )
