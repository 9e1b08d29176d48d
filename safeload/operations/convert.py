"""Checkpoints written as another format, dtype or layout, tensor by tensor."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import checkpoint as checkpoints
from ..base import dtypes, log
from ..base.file import Array, PathLike, WeightFile
from ..base.text import clip, printable
from ..checkpoint import Checkpoint
from ..engine import jobs
from ..engine import source as sources
from ..engine.jobs import Progress
from ..engine.lazy import Lazy, LazyQuantized
from ..engine.load import distinct, parse_target
from ..engine.quantized_tensor import INT8, QuantizedTensor, storage_of
from ..errors import SafeloadError, TensorNotFoundError, UnsupportedError
from ..packed import grouping
from ..packed.grouping import Codes
from . import catalog
from . import quantize as quantization
from . import stack as stacking
from .quantize import Scheme, Summary
from .stack import Known, Layout

# What each suffix says; a path without one is a folder of safetensors shards.
SUFFIXES = {
    ".safetensors": "safetensors",
    ".gguf": "gguf",
    ".moon": "moon",
    ".bin": "moon",
    ".npz": "npz",
    ".npy": "npy",
}

# What config.json calls the dtype of the weights: until transformers 4.56, and since.
_DTYPE_KEYS = ("torch_dtype", "dtype")

_F32 = dtypes.BY_CODE["F32"]

_ARCHITECTURE = "general.architecture"
# Names that modules of transformers have; those of llama.cpp begin with blk, token_embd, output.
_HUGGING_FACE_NAME = re.compile(r"^(model|transformer|lm_head|language_model)\.|\.(layers|h|layer)\.[0-9]", re.ASCII)

# Powers of 1000 as Hugging Face counts them ("5GB"), and of 1024.
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}

Source = PathLike | Checkpoint | Mapping[str, Any]
# What a writer gets for each name.
Output = Lazy | LazyQuantized


def convert(
    src: Source | Sequence[Source],
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
    """Writes the tensors and the metadata of checkpoints into a file of another format, with the memory of one tensor.

    Names stay as they are: this is no converter between model architectures (llama.cpp's ``convert_hf_to_gguf.py`` is
    one). What a format cannot hold is refused before anything is written, with the name of the tensor.

    Args:
        src: what to read: a path, an open `Checkpoint` (``open(path, root="state_dict")``, say), a dict of arrays; or a
            list of these, whose tensors are merged.
        dst: what to write, by its suffix: ".safetensors", ".gguf", ".npz", ".npy" (of one tensor), ".moon" or ".bin"
            (both MOON). With ``max_shard_size`` a folder of safetensors shards with an index, and the source's
            ``config.json`` with the new dtype.
        dtype: what floating tensors become, and quantized ones are dequantized to. For ".gguf" tensors of one axis
            become float32 in any case, which is what llama.cpp wants of norms and biases.
        quantize: "int8", "q4_0", "q8_0", ... or a dict for mixed precision, as in `load_quantized`: the same tensors
            are quantized, tied heads included unless ``names`` is given; the others become ``dtype``. Q4_0 is rounded
            by "ggml" for ".gguf", else by "absmax": see `safeload.quantize`.
        layout: stacks layers, see `stack`; the result has its tensors in its order, and no others.
        names: exact names of the tensors to take; None for all.
        max_shard_size: bytes, or text such as "500MB" or "5GB"; a larger tensor has a shard of its own. The index is
            put in place last: until then a new folder has none, and an old one with another number of shards is what
            it was. Where there were as many shards before, a crash in the moment of the renames leaves some of both.
        overwrite: False to raise FileExistsError where something exists.
        threads: for reading and converting; None for what helps.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total) of the result.

    Raises:
        FileExistsError: ``dst`` exists, and ``overwrite`` is not set.
        UnsupportedError: a tensor that the format cannot hold; the message says which ``dtype`` to pass. A tensor that
            holds codes, such as fp8 with a scale beside it, where more is asked for than safetensors with all as
            stored.
        SafeloadError: a name that is in two sources.
        ValueError: wrong arguments.
        FormatError, OSError: a source cannot be read, or ``dst`` not be written; then there is no half file.

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
    src: Source | Sequence[Source],
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
    """`convert`; returns what was quantized, None where nothing was to be."""
    jobs.check_threads(threads)
    target = parse_target(dtype)
    path = os.fspath(dst)
    format = _format_of(path, max_shard_size)
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    _check_free(path, limit is not None, overwrite)
    with ExitStack() as stack:
        merged = _Merged(_open_all(src, stack), names)
        plan = _Plan(merged, target, quantize, format, threads)
        outputs = plan.of_layout(layout) if layout is not None else plan.of_tensors()
        total = sum(output.nbytes for output in outputs.values())
        report = stack.enter_context(jobs.reporter(progress, total))
        outputs = _reporting(outputs, report)
        if limit is not None:
            _write_shards(outputs, merged.metadata, config_with(merged.config, target), path, limit, overwrite)
        else:
            _WRITERS[format](outputs, merged.metadata, path, overwrite)
    return plan.summary(total)


def parse_size(size: int | str) -> int:
    """Bytes of "500MB", "5GB", "2GiB" or a number.

    Raises:
        ValueError: it is no size, or not positive.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f'max_shard_size {size!r} is no size such as "500MB" or "5GB"')
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise ValueError(f"max_shard_size is {size}, but a shard needs at least one byte")
    return size


def _format_of(path: str, max_shard_size: int | str | None) -> str:
    suffix = os.path.splitext(path)[1].lower()
    if max_shard_size is not None:
        if suffix in SUFFIXES:
            raise ValueError(f"with max_shard_size the destination is a folder, but {path!r} is the name of a file")
        return "safetensors"
    if suffix not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise ValueError(f"{path!r}: the suffix says what to write, one of {known}; a folder needs max_shard_size")
    return SUFFIXES[suffix]


def _check_free(path: str, folder: bool, overwrite: bool) -> None:
    """Refuses what exists before anything is read."""
    if not overwrite and os.path.lexists(path) and not (folder and os.path.isdir(path) and not os.listdir(path)):
        raise FileExistsError(errno.EEXIST, "File exists and overwrite=False", path)


# ---- read ----


def _open_all(src: Source | Sequence[Source], stack: ExitStack) -> list[Checkpoint | Mapping[str, Any]]:
    if isinstance(src, Mapping):
        return [src]
    given = [src] if isinstance(src, (str, os.PathLike)) else list(src)
    if not given:
        raise ValueError("there is nothing to convert: no source")
    return [one if isinstance(one, Mapping) else stack.enter_context(checkpoints.open(one)) for one in given]


class _Part(NamedTuple):
    """A tensor of one of the sources."""

    origin: Checkpoint | Mapping[str, Any]
    place: tuple[WeightFile, int] | None


class _Merged:
    """The tensors of all sources under their names.

    Attributes:
        parts: name to tensor, in the order of the sources.
        metadata: of all sources; of a key that is in several the last value.
        config: the first ``config.json``.
        format: of the sources; None for arrays and for more than one format.
        chosen: whether only some of the tensors are taken.
        codes: the tensors that hold codes, also of those that are not taken.
    """

    def __init__(self, origins: Sequence[Checkpoint | Mapping[str, Any]], names: Iterable[str] | None) -> None:
        self.parts: dict[str, _Part] = {}
        self.metadata: dict[Any, Any] = {}
        self.config: dict[str, Any] | None = None
        formats = {origin.format if isinstance(origin, Checkpoint) else None for origin in origins}
        self.format = formats.pop() if len(formats) == 1 else None
        self.chosen = names is not None
        for origin in origins:
            if isinstance(origin, Checkpoint):
                found = {name: _Part(origin, (file, index)) for name, file, index in origin._parts()}
                self.metadata.update(_metadata_of(origin))
                self.config = self.config or origin.config
            else:
                found = {name: _Part(origin, None) for name in origin}
            for name, part in found.items():
                if name in self.parts:
                    raise SafeloadError(f"tensor {name!r} is in both {_where(self.parts[name])} and {_where(part)}")
            self.parts.update(found)
        self.codes = self._find_codes()
        if names is not None:
            wanted = list(distinct(names))
            missing = next((name for name in wanted if name not in self.parts), None)
            if missing is not None:
                raise TensorNotFoundError(f"there is no tensor {missing!r} in any source")
            self.parts = {name: self.parts[name] for name in wanted}

    def _find_codes(self) -> Mapping[str, Codes]:
        """The tensors that hold codes: their scales may come from another source."""
        origins = {id(part.origin): part.origin for part in self.parts.values()}
        if len(origins) == 1:
            return catalog.codes_of(next(iter(origins.values())))
        found = {name: codes for origin in origins.values() for name, codes in catalog.codes_of(origin).items()}
        plain = {
            name: grouping.Stored(known.row, known.shape)
            for name, known in self.known().items()
            if known.scheme is None
        }
        return {**grouping.find(plain, self.config), **found}

    def known(self) -> dict[str, Known]:
        """What can be said of each tensor before it is read."""
        known = {}
        for name, part in self.parts.items():
            if part.place is not None:
                known[name] = stacking.known_of_file(*part.place)
            else:
                known[name] = stacking.known_of_value(name, part.origin[name])
        return known

    def value(self, name: str, called: str | None = None) -> sources.Source | QuantizedTensor:
        """A tensor as a source, or quantized as it is; ``called`` is what messages name it if not by its name."""
        part = self.parts[name]
        if part.place is not None and isinstance(part.origin, Checkpoint):
            value = catalog.of_file(part.origin, name, *part.place)
        else:
            given = part.origin[name]
            value = given if isinstance(given, QuantizedTensor) else sources.of_array(name, given)
        return value._replace(name=called) if called is not None and isinstance(value, sources.Source) else value


def _metadata_of(origin: Checkpoint) -> Mapping[str, Any]:
    """Its metadata, without what an index says of its own files: the result has other ones."""
    if origin._where is None:
        return origin.metadata
    return {key: value for key, value in origin.metadata.items() if key != "total_size" or isinstance(value, str)}


def _where(part: _Part) -> str:
    return part.place[0].path if part.place is not None else "a dict"


# ---- plan ----


class _Scratch:
    """Memory that one tensor after the other is made in."""

    def __init__(self) -> None:
        self._memory: Array = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if size > self._memory.size:
            self._memory = np.empty(0, np.uint8)  # the old one goes before the new one comes
            self._memory = jobs.private_array((size,), np.dtype(np.uint8))
        array: Array = np.ndarray(shape, dtype, self._memory)
        return array


class _Plan:
    """What becomes of each tensor, as outputs that make themselves when a writer comes to them.

    Raises:
        UnsupportedError: a tensor that holds codes would be taken for numbers.
    """

    def __init__(
        self,
        merged: _Merged,
        target: dtypes.Dtype | None,
        quantize: Scheme | None,
        format: str,
        threads: int | None,
    ) -> None:
        self._merged = merged
        self._target = target
        self._format = format
        self._rules = None if quantize is None else quantization.Rules(quantize, None)
        self._model = quantization.Model.of(merged.parts.keys(), merged.config, merged.format, merged.metadata)
        if self._rules is not None:
            self._rules.schema = self._model.schema
        self._rounding = "ggml" if format == "gguf" else None
        self._threads = threads
        self._scratch = _Scratch()
        self._before = 0
        self._quantized_to: dict[str, str] = {}
        self._kept_because: dict[str, str] = {}
        if target is not None or quantize is not None or format != "safetensors":
            what = "quantize=" if quantize is not None else "dtype=" if target is not None else f"the format {format}"
            grouping.refuse(merged.codes, merged.parts, f"convert with {what}")

    def summary(self, nbytes: int) -> Summary | None:
        """What was quantized, and why the rest was not; None where nothing was to be.

        Args:
            nbytes: of the result.
        """
        if self._rules is None:
            return None
        return Summary(self._before, nbytes, self._quantized_to, self._kept_because)

    def of_tensors(self) -> dict[str, Output]:
        """Each tensor under its own name, and tied heads that are quantized from their embedding."""
        known = self._merged.known()
        self._before = sum(tensor.nbytes for tensor in known.values())
        outputs = {name: self._output(name, tensor) for name, tensor in known.items()}
        if self._rules is None or self._merged.chosen:
            return outputs
        for head, embedding in self._model.tied_heads().items():
            tensor = known[embedding]
            if tensor.scheme is None and tensor.row.floating:
                scheme = self._planned(head, tensor).scheme
                if scheme is not None:
                    outputs[head] = self._quantized(scheme, tensor.shape, partial(self._merged.value, embedding, head))
        return outputs

    def _planned(self, name: str, known: Known) -> quantization.Planned:
        """Whether a tensor is quantized; noted for `summary`."""
        assert self._rules is not None
        planned = self._rules.plan(name, known.row, known.shape, known.scheme)
        if planned.scheme is None:
            self._kept_because[name] = planned.reason
        else:
            self._quantized_to[name] = planned.scheme
        return planned

    def of_layout(self, layout: Layout) -> dict[str, Output]:
        """The tensors of a layout."""
        known = self._merged.known()
        self._before = sum(tensor.nbytes for tensor in known.values())
        outputs: dict[str, Output] = {}
        for planned in stacking.plan_known(known, layout, self._target):
            name, row = planned.entry.name, planned.row
            grouping.refuse(self._merged.codes, planned.names, "convert with layout=")

            def make(planned: stacking.Stack = planned) -> Array:
                array = self._scratch.array(planned.shape, dtypes.array_dtype(planned.row.number))
                stacking.fill_from(self._merged.value, [(planned, array)], threads=self._threads)
                return array

            scheme = None if self._rules is None else self._planned(name, Known(row, planned.shape)).scheme
            if scheme is None:
                outputs[name] = Lazy(dtypes.array_dtype(row.number), planned.shape, make)
            else:
                outputs[name] = self._quantized(scheme, planned.shape, make)
        return outputs

    def _output(self, name: str, known: Known) -> Output:
        row, shape = known.row, known.shape
        planned = None if self._rules is None else self._planned(name, known)
        if planned is not None and planned.scheme is not None:
            return self._quantized(planned.scheme, shape, lambda: self._merged.value(name))
        if known.scheme is not None and (self._target is None or (planned is not None and planned.already)):
            return self._kept(name, known)
        if self._target is not None and (row.floating or known.scheme is not None):
            row = self._target
        if self._format == "gguf" and row.floating and len(shape) < 2 and row.block_bytes > 1:
            row = _F32  # llama.cpp aborts on norms of any other dtype; what GGUF has no type for stays to be refused
        if row.packed:
            raise UnsupportedError(f"tensor {name!r} is {row.code}, which has no array type: pass dtype=")
        dtype = dtypes.array_dtype(row.number)
        return Lazy(dtype, shape, lambda: self._read(name, dtype, shape, row))

    def _read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], row: dtypes.Dtype) -> Array:
        value = self._merged.value(name)
        array = self._scratch.array(shape, dtype)
        if isinstance(value, QuantizedTensor):
            return value.dequantize(dtype, out=array, threads=self._threads)
        if value.size:
            jobs.Batch([value.job(jobs.address_of(array), row.number)]).run(threads=self._threads)
        return jobs.native_order(array)

    def _quantized(self, scheme: str, shape: tuple[int, ...], value: Callable[[], Any]) -> LazyQuantized:
        """A tensor that is quantized when it is written."""
        axis = 0 if scheme == INT8 and len(shape) == 3 else None
        (data_dtype, data_shape), scale = storage_of(scheme, shape, axis)

        def make() -> QuantizedTensor:
            given = value()
            # A stacked array is in the scratch itself.
            stacked = isinstance(given, np.ndarray)
            data = (
                jobs.private_array(data_shape, data_dtype) if stacked else self._scratch.array(data_shape, data_dtype)
            )
            rounding = self._rounding if scheme == "q4_0" else None
            return quantization.quantize_source(
                given, scheme, axis=axis, rounding=rounding, data=data, threads=self._threads
            )

        scales = None
        if scale is not None:
            scales = Lazy(scale[0], scale[1], lambda: _not_none(make().scale))
        return LazyQuantized(scheme, shape, Lazy(data_dtype, data_shape, lambda: make().data), scales, axis)

    def _kept(self, name: str, known: Known) -> LazyQuantized:
        """A quantized tensor as it is."""

        def make() -> QuantizedTensor:
            value = self._merged.value(name)
            assert isinstance(value, QuantizedTensor)
            return value

        axis = known.axis
        assert known.scheme is not None
        (data_dtype, data_shape), scale = storage_of(known.scheme, known.shape, axis)
        scales = None if scale is None else Lazy(scale[0], scale[1], lambda: _not_none(make().scale))
        return LazyQuantized(known.scheme, known.shape, Lazy(data_dtype, data_shape, lambda: make().data), scales, axis)


def _not_none(array: Array | None) -> Array:
    assert array is not None
    return array


def _reporting(outputs: Mapping[str, Output], report: Callable[[int], object]) -> dict[str, Output]:
    """The same outputs, which report their bytes when they have been made."""
    done = 0

    def wrap(lazy: Lazy) -> Lazy:
        def make() -> Array:
            nonlocal done
            array = lazy.make()
            done += array.nbytes
            report(done)
            return array

        return Lazy(lazy.dtype, lazy.shape, make)

    wrapped: dict[str, Output] = {}
    for name, output in outputs.items():
        if isinstance(output, Lazy):
            wrapped[name] = wrap(output)
        else:
            scale = None if output.scale is None else wrap(output.scale)
            wrapped[name] = LazyQuantized(output.scheme, output.shape, wrap(output.data), scale, output.axis)
    return wrapped


# ---- write ----


def _texts(metadata: Mapping[Any, Any]) -> dict[str, str]:
    """Metadata as safetensors holds it: text to text; what is no text as JSON, what is neither left out."""
    import json  # only here: it takes a millisecond that every import would pay

    texts = {}
    for key, value in metadata.items():
        if isinstance(value, str):
            texts[str(key)] = value
            continue
        try:
            plain = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
            texts[str(key)] = json.dumps(plain, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            continue
    return texts


def _write_safetensors(outputs: dict[str, Output], metadata: Mapping[Any, Any], path: str, overwrite: bool) -> None:
    from ..formats.safetensors import file as safetensors
    from ..formats.safetensors import quantized

    packed, texts = quantized.pack(outputs, _texts(metadata) or None)
    safetensors.Writer(packed, texts).to_file(path, overwrite=overwrite)


def _write_moon(outputs: dict[str, Output], metadata: Mapping[Any, Any], path: str, overwrite: bool) -> None:
    from ..formats import moon

    moon.save(outputs, path, overwrite=overwrite)


def config_with(config: Mapping[str, Any] | None, target: dtypes.Dtype | None) -> dict[str, Any] | None:
    """A ``config.json`` that is true of weights of another dtype, nested configurations included.

    Args:
        config: of the source; None for none.
        target: what floating tensors became; None for what they were.
    """
    if config is None or target is None:
        return None if config is None else dict(config)

    def changed(part: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: target.name
            if key in _DTYPE_KEYS and isinstance(value, str)
            else changed(value)
            if isinstance(value, Mapping) and key.endswith("config")
            else value
            for key, value in part.items()
        }

    result = changed(config)
    if not any(isinstance(result.get(key), str) for key in _DTYPE_KEYS):
        result[_DTYPE_KEYS[0]] = target.name
    return result


def _write_shards(
    outputs: dict[str, Output],
    metadata: Mapping[Any, Any],
    config: Mapping[str, Any] | None,
    folder: str,
    limit: int,
    overwrite: bool,
) -> None:
    """Shards, an index and the config: all under temporary names first, the index in place last."""
    import json

    from ..engine.atomic_file import AtomicFile
    from ..formats.safetensors import file as safetensors
    from ..formats.safetensors import quantized

    shards: list[dict[str, Output]] = [{}]
    size = 0
    for name, output in outputs.items():
        if shards[-1] and size + output.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = output
        size += output.nbytes
    files = [f"model-{k + 1:05}-of-{len(shards):05}.safetensors" for k in range(len(shards))]
    texts = _texts(metadata) or None
    packed = [quantized.pack(shard, texts) for shard in shards]
    weight_map = {name: file for file, (shard, _) in zip(files, packed, strict=True) for name in shard}
    total = sum(output.nbytes for output in outputs.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    made = not os.path.isdir(folder)
    os.makedirs(folder, exist_ok=True)
    try:
        with ExitStack() as stack:  # closed in reverse: what is entered first is put in place last
            small = {"model.safetensors.index.json": index}
            if config is not None:
                small["config.json"] = dict(config)
            for file, content in small.items():
                data = np.frombuffer((json.dumps(content, indent=2) + "\n").encode(), np.uint8)
                written = stack.enter_context(AtomicFile(os.path.join(folder, file), data.size, overwrite=overwrite))
                written.write([(jobs.address_of(data), data.size)])
                written.seal()
            for file, (shard, shard_texts) in zip(files, packed, strict=True):
                writer = safetensors.Writer(shard, shard_texts)
                place = os.path.join(folder, file)
                shard_file = stack.enter_context(AtomicFile(place, writer.size, overwrite=overwrite))
                writer.write_to(shard_file)
                shard_file.seal()  # there may be more shards than descriptors
    except BaseException:
        if made:
            _remove_if_empty(folder)
        raise


def _remove_if_empty(folder: str) -> None:
    with suppress(OSError):
        os.rmdir(folder)


def _write_npz(outputs: dict[str, Output], metadata: Mapping[Any, Any], path: str, overwrite: bool) -> None:
    from ..formats import npz

    npz.save(outputs, path, overwrite=overwrite)


def _write_npy(outputs: dict[str, Output], metadata: Mapping[Any, Any], path: str, overwrite: bool) -> None:
    from ..formats import npy

    npy.save(outputs, path, overwrite=overwrite)


def _write_gguf(outputs: dict[str, Output], metadata: Mapping[Any, Any], path: str, overwrite: bool) -> None:
    from ..formats.gguf import write as gguf_writing

    values = _gguf_values(metadata)
    _warn_of_gguf(outputs, values, path)
    gguf_writing.save(outputs, path, values, overwrite=overwrite)


def _warn_of_gguf(outputs: Mapping[str, Output], values: Mapping[str, Any], path: str) -> None:
    """Says what an engine will miss in a GGUF file: conversion copies tensors, it makes no model of them."""
    missing = []
    if not isinstance(values.get(_ARCHITECTURE), str):
        missing.append(f"the metadata has no {_ARCHITECTURE}")
    foreign = next((name for name in outputs if _HUGGING_FACE_NAME.search(name)), None)
    if foreign is not None:
        missing.append(f"{clip(printable(foreign), 80)} is a name of Hugging Face, not of llama.cpp")
    if outputs and missing:
        log.warning(
            "%s: no engine will load this file: %s. llama.cpp's convert_hf_to_gguf.py makes a model that engines load",
            printable(path),
            "; ".join(missing),
        )


def _gguf_values(metadata: Mapping[Any, Any]) -> dict[str, Any]:
    """Metadata as GGUF holds it: what has no type there as JSON, what is neither left out."""
    from ..formats.gguf import write as gguf_writing

    values: dict[str, Any] = {}
    for key, value in metadata.items():
        if gguf_writing.can_hold(value):
            values[str(key)] = value
        else:
            values.update(_texts({key: value}))
    return values


_WRITERS: dict[str, Callable[[dict[str, Output], Mapping[Any, Any], str, bool], None]] = {
    "safetensors": _write_safetensors,
    "moon": _write_moon,
    "npz": _write_npz,
    "npy": _write_npy,
    "gguf": _write_gguf,
}
