"""Converts checkpoints to another format, dtype or layout, tensor by tensor."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from ..base import dtypes
from ..base.arrays import Array
from ..base.paths import PathLike
from ..base.scheme import usual_axis
from ..base.text import show
from ..engine import jobs
from ..engine.lazy import Lazy, LazyPacked, LazyQuantized
from ..engine.load import distinct, parse_target
from ..engine.progress import Progress, reporter
from ..engine.quantized_tensor import QuantizedTensor, storage_of
from ..engine.source import Source
from ..engine.threads import check_threads
from ..errors import TensorNotFoundError, UnsupportedError
from ..formats.metadata import as_texts
from ..formats.registry import BY_NAME, SUFFIXES
from ..models.layout import Layout
from ..packed import grouping
from .about import About
from .catalog import Catalog, Given, has_names
from .outputs import Scratch, itself, lazy_part, not_none, reporting
from .quantize import Rounding, quantize_source
from .quantize_checkpoint import Model, Planned, Rules, Scheme, Summary
from .shards import Output, config_with, parse_size, write_shards
from .stack import Stack, fill, plan

_F32 = dtypes.BY_CODE["F32"]


def convert(
    src: Given | Sequence[Given],
    dst: PathLike,
    *,
    dtype: Any = None,
    quantize: Scheme | None = None,
    layout: Layout | None = None,
    names: Iterable[str] | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress = None,
) -> None:
    """Writes the tensors and metadata of checkpoints into a file of another format, in the memory of one tensor.

    Names are unchanged: this does not convert between model architectures (llama.cpp's ``convert_hf_to_gguf.py`` does).
    A tensor that the format does not support is refused by name before anything is written.

    Args:
        src: a path, an open `Checkpoint` (such as ``open(path, root="state_dict")``) or a dict of arrays; or a list of
            these, whose tensors are merged.
        dst: the destination. Its suffix selects the format, such as ".safetensors", ".gguf", ".npz" or ".npy" (for one
            tensor); the error for an unknown suffix lists them all. With ``max_shard_size``
            it is a folder, which gets safetensors shards, an index, and the source's ``config.json`` with the new
            dtype, and without a quantization that the weights no longer have.
        dtype: dtype for floating tensors, and for quantized and packed ones, which are dequantized. For ".gguf" tensors
            of one axis always become float32, as llama.cpp requires for norms and biases.
        quantize: "int8", "q4_0", "q8_0", ... or a dict for mixed precision, as in `load_quantized`: the same tensors
            are quantized, including tied heads unless ``names`` is given; the others become ``dtype``. Q4_0 rounds by
            "ggml" for ".gguf", else by "absmax": see `safeload.quantize`.
        layout: stacks layers, see `stack`; the result has only the tensors of the layout, in its order.
        names: exact names of the tensors to convert; None for all.
        max_shard_size: bytes, or text such as "500MB" or "5GB"; a larger tensor gets a shard of its own. The index is
            renamed into place last: until then a new folder has none, and an old folder with another number of shards
            is still what it was. With the same number of shards as before, a crash during the renames leaves some of
            both.
        overwrite: False to raise FileExistsError if the destination exists.
        threads: for reading and converting; None: chosen automatically.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total) of the result.

    Raises:
        FileExistsError: ``dst`` exists, and ``overwrite`` is not set.
        UnsupportedError: the format does not support a tensor; the message says which ``dtype`` to pass. Or a tensor
            holds codes of a family that is not dequantized, such as GPTQ, or stored codes, and the result is not
            safetensors with all tensors as stored.
        SafeloadError: two sources have a tensor of the same name.
        ValueError: wrong arguments.
        FormatError, OSError: a source cannot be read, or ``dst`` cannot be written; no partial file is left.

    Example:
        >>> import safeload
        >>> safeload.convert("tiny-llama", "tiny.npz", dtype="float16", names=["model.norm.weight"])
        >>> safeload.load("tiny.npz")["model.norm.weight"].dtype
        dtype('float16')
    """
    write(
        src,
        dst,
        dtype=dtype,
        quantize=quantize,
        layout=layout,
        names=names,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        threads=threads,
        progress=progress,
    )


def write(
    src: Given | Sequence[Given],
    dst: PathLike,
    *,
    dtype: Any = None,
    quantize: Scheme | None = None,
    layout: Layout | None = None,
    names: Iterable[str] | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress = None,
) -> Summary | None:
    """`convert`; returns the summary of quantization, None without ``quantize``."""
    check_threads(threads)
    target = parse_target(dtype)
    path = os.fspath(dst)
    format = _format_of(path, max_shard_size)
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    _check_free(path, limit is not None, overwrite)
    with ExitStack() as stack:
        catalog = stack.enter_context(_catalog_of(src))
        work = _Plan(catalog, names, target, quantize, format, threads)
        outputs = work.of_layout(layout) if layout is not None else work.of_tensors()
        metadata = catalog.metadata
        total = sum(output.nbytes for output in outputs.values())
        report = stack.enter_context(reporter(progress, total))
        outputs = reporting(outputs, report)
        if limit is not None:
            write_shards(
                outputs,
                as_texts(metadata) or None,
                work.config(),
                path,
                limit,
                overwrite,
            )
        else:
            BY_NAME[format].load().write(outputs, metadata, path, overwrite=overwrite)
    return work.summary(total)


def _format_of(path: str, max_shard_size: int | str | None) -> str:
    suffix = os.path.splitext(path)[1].lower()
    if max_shard_size is not None:
        if suffix in SUFFIXES:
            raise ValueError(f"max_shard_size writes a folder, but {show(path)} has the suffix of a file")
        return "safetensors"
    if suffix not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise ValueError(f"{show(path)}: the suffix must be one of {known}; a folder needs max_shard_size")
    return SUFFIXES[suffix]


def _check_free(path: str, folder: bool, overwrite: bool) -> None:
    """Refuses an existing destination before anything is read."""
    if not overwrite and os.path.lexists(path) and not (folder and os.path.isdir(path) and not os.listdir(path)):
        raise FileExistsError(errno.EEXIST, "File exists and overwrite=False", path)


def _catalog_of(src: Given | Sequence[Given]) -> Catalog:
    if has_names(src):
        return Catalog.of(src)
    given: list[Given] = list(src)  # type: ignore[arg-type]
    if not given:
        raise ValueError("there is nothing to convert: no source")
    return Catalog.of(given)


# ---- plan ----


class _Plan:
    """Decides about each tensor, and gives lazy outputs that are made when a writer reaches them.

    Raises:
        UnsupportedError: a tensor that holds codes would be treated as numbers.
    """

    def __init__(
        self,
        catalog: Catalog,
        names: Iterable[str] | None,
        target: dtypes.Dtype | None,
        quantize: Scheme | None,
        format: str,
        threads: int | None,
    ) -> None:
        self._catalog = catalog
        self._chosen = names is not None
        self._abouts = _abouts(catalog, names)
        self._before = sum(about.nbytes for about in self._abouts.values())
        self._target = target
        self._format = format
        self._rules = None if quantize is None else Rules(quantize, None)
        self._model = Model.of(catalog, self._abouts.keys())
        if self._rules is not None:
            self._rules.schema = self._model.schema
        self._rounding: Rounding | None = "ggml" if format == "gguf" else None
        self._threads = threads
        self._scratch = Scratch()
        self._quantized_to: dict[str, str] = {}
        self._kept_because: dict[str, str] = {}
        if target is not None or quantize is not None or format != "safetensors":
            what = "quantize=" if quantize is not None else "dtype=" if target is not None else f"the format {format}"
            grouping.refuse(catalog.codes, self._abouts, f"convert with {what}")

    def config(self) -> dict[str, Any] | None:
        """The ``config.json`` of the result; None without one."""
        converts = self._target is not None or self._rules is not None
        restored = converts and any(about.packed for about in self._abouts.values())
        return config_with(self._catalog.config, self._target, restored=restored)

    def summary(self, nbytes: int) -> Summary | None:
        """Which tensors were quantized, and why the others were not; None without ``quantize``.

        Args:
            nbytes: bytes of the result.
        """
        if self._rules is None:
            return None
        return Summary(self._before, nbytes, self._quantized_to, self._kept_because)

    def of_tensors(self) -> dict[str, Output]:
        """Each tensor under its own name; tied heads, made of their embedding; activation scales if all stay packed."""
        outputs = {name: self._output(name, about) for name, about in self._abouts.items()}
        if self._chosen:
            return outputs
        if self._rules is None:
            if self._target is None and self._format == "safetensors":
                outputs.update((name, lazy_part(part)) for name, part in self._catalog.ignored.items())
            return outputs
        for head, embedding in self._model.tied_heads().items():
            about = self._abouts[embedding]
            if not about.quantized and about.floating:
                scheme = self._planned(head, about).scheme
                if scheme is not None:
                    outputs[head] = self._quantized(scheme, about.shape, partial(self._catalog.source, embedding, head))
        return outputs

    def _planned(self, name: str, about: About) -> Planned:
        """The decision about one tensor, recorded for `summary`."""
        assert self._rules is not None
        planned = self._rules.plan(name, about)
        if planned.scheme is None:
            self._kept_because[name] = planned.reason
        else:
            self._quantized_to[name] = planned.scheme
        return planned

    def of_layout(self, layout: Layout) -> dict[str, Output]:
        """The tensors of a layout."""
        outputs: dict[str, Output] = {}
        for planned in plan(self._abouts, layout, self._target):
            name, row = planned.entry.name, planned.row
            grouping.refuse(self._catalog.codes, planned.names, "convert with layout=")

            def make(planned: Stack = planned) -> Array:
                array = self._scratch.array(planned.shape, dtypes.array_dtype(planned.row.number))
                fill(self._catalog, [(planned, array)], threads=self._threads)
                return array

            scheme = None if self._rules is None else self._planned(name, _about_of(planned)).scheme
            if scheme is None:
                outputs[name] = Lazy(dtypes.array_dtype(row.number), planned.shape, make)
            else:
                outputs[name] = self._quantized(scheme, planned.shape, make)
        return outputs

    def _output(self, name: str, about: About) -> Output:
        row, shape = about.row, about.shape
        planned = None if self._rules is None else self._planned(name, about)
        if planned is not None and planned.scheme is not None:
            return self._quantized(planned.scheme, shape, partial(self._values, name))
        if about.packed:
            if self._target is None and self._rules is None:
                return self._packed(name, about)
            row = _F32
        elif about.scheme is not None and (self._target is None or (planned is not None and planned.already)):
            return self._kept(name, about)
        if self._target is not None and (row.floating or about.scheme is not None):
            row = self._target
        if self._format == "gguf" and row.floating and len(shape) < 2 and row.block_bytes > 1:
            row = _F32  # llama.cpp aborts on norms of any other dtype; a dtype that GGUF lacks is still refused
        if row.packed:
            raise UnsupportedError(f"tensor {show(name)} is {row.code}, which numpy does not support: pass dtype=")
        dtype = dtypes.array_dtype(row.number)
        return Lazy(dtype, shape, lambda: self._read(name, dtype, shape, row))

    def _values(self, name: str) -> Source | QuantizedTensor:
        """A tensor's values; packed ones are dequantized by the jobs that read them."""
        return self._catalog.restoring(name) or self._catalog.source(name)

    def _read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], row: dtypes.Dtype) -> Array:
        value = self._values(name)
        array = self._scratch.array(shape, dtype)
        if isinstance(value, QuantizedTensor):
            return value.dequantize(dtype, out=array, threads=self._threads)
        if value.size:
            jobs.Batch(value.jobs(jobs.address_of(array), row.number)).run(threads=self._threads)
        return jobs.native_order(array)

    def _quantized(self, scheme: str, shape: tuple[int, ...], value: Callable[[], Any]) -> LazyQuantized:
        """A tensor that is quantized when it is written."""
        axis = usual_axis(scheme, shape)
        (data_dtype, data_shape), scale = storage_of(scheme, shape, axis)

        def make() -> QuantizedTensor:
            given = value()
            # A stacked array is in the scratch memory itself.
            stacked = isinstance(given, np.ndarray)
            data = (
                jobs.private_array(data_shape, data_dtype) if stacked else self._scratch.array(data_shape, data_dtype)
            )
            rounding = self._rounding if scheme == "q4_0" else None
            return quantize_source(given, scheme, axis=axis, rounding=rounding, data=data, threads=self._threads)

        scales = None
        if scale is not None:
            scales = Lazy(scale[0], scale[1], lambda: not_none(make().scale))
        return LazyQuantized(scheme, shape, Lazy(data_dtype, data_shape, lambda: make().data), scales, axis)

    def _packed(self, name: str, about: About) -> LazyPacked:
        """A packed tensor, as it is stored."""
        if self._format != "safetensors":
            raise UnsupportedError(
                f"tensor {show(name)} is {about.scheme}, which {self._format} files do not hold: pass dtype="
            )
        value = self._catalog.value(name)
        assert isinstance(value, QuantizedTensor)
        assert value.packing is not None
        parts = {role: Lazy(part.dtype, part.shape, partial(itself, part)) for role, part in value.roles.items()}
        return LazyPacked(value.packing, value.names, parts)

    def _kept(self, name: str, about: About) -> LazyQuantized:
        """A quantized tensor, unchanged."""

        def make() -> QuantizedTensor:
            value = self._catalog.source(name)
            assert isinstance(value, QuantizedTensor)
            return value

        axis = about.axis
        assert about.scheme is not None
        (data_dtype, data_shape), scale = storage_of(about.scheme, about.shape, axis)
        scales = None if scale is None else Lazy(scale[0], scale[1], lambda: not_none(make().scale))
        return LazyQuantized(about.scheme, about.shape, Lazy(data_dtype, data_shape, lambda: make().data), scales, axis)


def _abouts(catalog: Catalog, names: Iterable[str] | None) -> dict[str, About]:
    """Descriptions of the tensors to convert.

    Raises:
        TensorNotFoundError: a name is unknown.
    """
    if names is None:
        return {name: catalog.about(name) for name in catalog}
    wanted = list(distinct(names))
    missing = next((name for name in wanted if name not in catalog), None)
    if missing is not None:
        raise TensorNotFoundError(f"there is no tensor {show(missing)} in any source")
    return {name: catalog.about(name) for name in wanted}


def _about_of(planned: Stack) -> About:
    """Describes a tensor that is stacked when it is written."""
    row, shape = planned.row, planned.shape
    return About(planned.entry.name, row.name, shape, row.nbytes(math.prod(shape)), row, row.floating)
