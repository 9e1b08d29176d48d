"""Converts checkpoints to another format, dtype or layout, in memory that does not grow with the checkpoint."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from ..base.arrays import check_mapping
from ..base.paths import PathLike, native_path
from ..base.selecting import Patterns, Renames, check_matches, renamed
from ..base.text import parse_size, plural, printable, show, size
from ..engine.lazy import LazyPacked
from ..engine.load import parse_target
from ..engine.progress import Progress, reporter
from ..engine.threads import check_threads
from ..errors import UnsupportedError
from ..formats.metadata import as_texts
from ..formats.registry import BY_NAME, SUFFIXES
from ..models.layout import Layout
from ..packed.config import is_kept_by
from .catalog import Catalog, Given, has_names
from .conversion import Conversion, Some
from .making import Maker
from .outputs import reporting
from .quantize_checkpoint import Keep, Rules, Scheme, Summary
from .shards import Beside, Output, divide, extras_of, weight_map, write_shards


class ConvertReport(NamedTuple):
    """What `convert` wrote. ``str()`` is what ``safeload convert`` prints.

    Attributes:
        destination: path of the file or the folder.
        format: of the files.
        files: paths of the files that hold the tensors.
        tensors: number of tensors.
        nbytes: bytes of the files.
        seconds: how long it took.
        summary: which tensors were quantized, and why the others were not; None without ``quantize``.

    Example:
        >>> import numpy as np, safeload
        >>> print(safeload.convert({"w": np.ones((2, 64), np.float32)}, "w.safetensors", quantize="q8_0"))
        w.safetensors: safetensors, 1 tensor, 312 B
        512 bytes became 136 (3.76 times smaller)
             1 quantized to q8_0: w
    """

    destination: str
    format: str
    files: list[str]
    tensors: int
    nbytes: int
    seconds: float
    summary: Summary | None

    def __str__(self) -> str:
        lines = [
            f"{self.destination}: {self._what()}",
            *([] if self.summary is None else str(self.summary).splitlines()),
        ]
        return "\n".join(map(printable, lines))

    def __repr__(self) -> str:
        return f"<ConvertReport {show(self.destination)}: {self._what()}>"

    def _what(self) -> str:
        files = f" in {len(self.files)} files" if len(self.files) > 1 else ""
        return f"{self.format}, {plural(self.tensors, 'tensor')}, {size(self.nbytes)}{files}"


def convert(
    src: Given | Sequence[Given],
    dst: PathLike,
    *,
    dtype: Any = None,
    quantize: Scheme | None = None,
    layout: Layout | None = None,
    names: Iterable[str] | None = None,
    only: Patterns = None,
    drop: Patterns = None,
    keep: Keep = None,
    rename: Renames = None,
    metadata: Mapping[str, Any] | None = None,
    max_shard_size: int | str | None = None,
    extras: bool = True,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress = None,
) -> ConvertReport:
    """Writes the tensors and metadata of checkpoints into a file of another format, in little memory.

    To safetensors, tensors that are copied, converted or dequantized pass through a ring of 64 MiB, and are read ahead
    of what is written. Those that are quantized or stacked, and all of other formats, are made one at a time: they
    take the memory of the largest.

    Names stay as they are unless ``rename`` changes them: this does not convert between model architectures
    (llama.cpp's ``convert_hf_to_gguf.py`` does). First ``names`` or ``only`` and ``drop`` choose tensors, then
    ``dtype``, ``quantize`` and ``keep`` convert them, all by the names of the source; ``rename`` comes last. A tensor
    that the format does not support is refused by name before anything is written.

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
        only: shell pattern, or several, of the names to convert, such as ``"model.layers.0.*"``; instead of ``names``.
        drop: shell pattern, or several, of names to leave out.
        keep: shell pattern, or several, of tensors that ``quantize`` leaves unquantized, or a function of the name.
        rename: pairs (regular expression, replacement) that ``re.sub`` applies to each name of the result, in order;
            or a dict of these.
        metadata: text for the header, merged with that of the source; the value None removes a key. Values for
            ".gguf" may also be numbers and lists.
        max_shard_size: bytes, or text such as "500MB" or "5GB"; a larger tensor gets a shard of its own. The index is
            renamed into place last: until then a new folder has none, and an old folder with another number of shards
            is still what it was. With the same number of shards as before, a crash during the renames leaves some of
            both.
        extras: whether a folder that is made from a folder also gets the tokenizer, the chat template and
            ``generation_config.json``, so that other libraries load the result.
        overwrite: False to raise FileExistsError if the destination exists.
        threads: for reading and converting; None: chosen automatically.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total) of the result.

    Returns:
        What was written: files, tensors, bytes, seconds, and with ``quantize`` which tensors were quantized.

    Raises:
        FileExistsError: ``dst`` exists, and ``overwrite`` is not set.
        UnsupportedError: the format does not support a tensor; the message says which ``dtype`` to pass. Or a tensor
            holds codes of a family that is not dequantized, such as GPTQ, or stored codes, and the result is not
            safetensors with all tensors as stored.
        SafeloadError: two sources have a tensor of the same name.
        TensorNotFoundError: an unknown name, or a pattern that matches none.
        ValueError: wrong arguments, such as ``rename`` that gives two tensors one name.
        FormatError, OSError: a source cannot be read, or ``dst`` cannot be written; no partial file is left.

    Example:
        >>> import safeload
        >>> safeload.convert("tiny-llama", "tiny.npz", dtype="float16", only="model.norm.*").tensors
        1
        >>> safeload.load("tiny.npz")["model.norm.weight"].dtype
        dtype('float16')
    """
    started = time.perf_counter()
    check_threads(threads)
    target = parse_target(dtype)
    if keep is not None and quantize is None:
        raise ValueError("keep= says what quantize= leaves unquantized: pass quantize= too")
    rules = None if quantize is None else Rules(quantize, keep)
    path = native_path(dst)[0]
    format = _format_of(path, max_shard_size)
    limit = None if max_shard_size is None else parse_size(max_shard_size, "max_shard_size")
    _check_free(path, limit is not None, overwrite)
    with ExitStack() as stack:
        catalog = stack.enter_context(_catalog_of(src))
        work = Conversion(catalog, Some(names, only, drop), target, rules, format)
        if not callable(keep):
            check_matches("keep", keep, work.names)
        decisions = work.of_layout(layout) if layout is not None else work.of_tensors()
        tensors = sum(name not in catalog.ignored for name in decisions)
        outputs = _renamed(Maker(catalog, decisions, format, threads).outputs(), rename)
        texts = _merged(catalog.metadata, metadata, format)
        total = sum(output.nbytes for output in outputs.values())
        report = stack.enter_context(reporter(progress, total))
        outputs = reporting(outputs, report)
        if limit is not None:
            shards = divide(outputs, limit)
            others = extras_of(catalog.folder) if extras and catalog.folder is not None else {}
            beside = Beside(weight_map(shards), total, work.config(), others)
            files = write_shards(shards, as_texts(texts) or None, beside, path, overwrite)
        else:
            BY_NAME[format].load().write(outputs, texts, path, overwrite=overwrite)
            files = [path]
    nbytes = sum(map(os.path.getsize, files))
    seconds = time.perf_counter() - started
    return ConvertReport(path, format, files, tensors, nbytes, seconds, work.summary(total))


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


def _renamed(outputs: Mapping[str, Output], rename: Renames) -> dict[str, Output]:
    """The tensors under their new names.

    Raises:
        ValueError: see `renamed`.
        UnsupportedError: a packed tensor would get a name under which its configuration describes it in another way.
    """
    names = renamed(outputs, rename)
    for name, output in outputs.items():
        _check_rename(name, names[name], output)
    return {names[name]: output for name, output in outputs.items()}


def _check_rename(name: str, new: str, output: Output) -> None:
    """Refuses a new name of a packed tensor under which its configuration would describe it in another way.

    Raises:
        UnsupportedError: the configuration has an entry for its module.
    """
    if new == name or not isinstance(output, LazyPacked):
        return
    module, renamed_module = name.removesuffix(".weight"), new.removesuffix(".weight")
    if not is_kept_by(output.packing.config, module, renamed_module):
        raise UnsupportedError(
            f"rename: tensor {show(name)} stays packed, and the quantization in its config.json names module "
            f"{show(module)}: pass dtype= to dequantize it",
            tensor=name,
        )


def _merged(own: Mapping[Any, Any], given: Mapping[str, Any] | None, format: str) -> Mapping[Any, Any]:
    """The metadata of the result: that of the sources, with what the caller adds, replaces and removes.

    Raises:
        TypeError: it is not a mapping of text.
        ValueError: the format has no metadata to add to.
    """
    if not given:
        return own
    check_mapping(given, "metadata", "text to text")
    merged = dict(own)
    for key, value in given.items():
        if not isinstance(key, str):
            raise TypeError(f"metadata: a key is text, found {show(key)}")
        if value is None:
            merged.pop(key, None)
        elif not BY_NAME[format].metadata:
            raise ValueError(f"{format} files have no metadata, but metadata= has {show(key)}")
        elif not as_texts({key: value}):
            raise TypeError(f"metadata: {show(key)} is of type {type(value).__name__}, which {format} does not hold")
        else:
            merged[key] = value
    return merged
