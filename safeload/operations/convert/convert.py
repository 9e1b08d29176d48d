"""Convert checkpoints to another format, dtype or layout, in memory that does not grow with the checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ...base.selecting import Patterns, Renames
from ...engine.run.progress import Progress
from ...engine.run.threads import check_threads
from ...formats.registry import WrittenName
from ...loading.adapter import Adapters
from ...models.layout import Layout
from ...stores.local import LocalStore
from ..folders import unfinished
from ..folders.destinations import Destination
from ..folders.shard_folder import OldShards, check_free
from ..quantize.checkpoint import Keep, Scheme
from ..sources import executors
from ..sources.catalog import Catalog, Given
from ..sources.executors import Executor
from . import run_plan
from .make import prepare
from .planning import planned
from .request import ConvertOptions, open_sources, request_of
from .write import Conversion, ConvertReport, copies_of, write


def convert(
    src: Given | Sequence[Given],
    dst: Destination,
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
    adapters: Adapters = None,
    max_shard_size: int | str | None = None,
    format: WrittenName | None = None,
    extras: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    executor: Executor | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> ConvertReport:
    """Writes the tensors and metadata of checkpoints into a file of another format, in little memory.

    To safetensors, tensors that are copied, converted or dequantized pass through a ring of 64 MiB, and are read ahead
    of what is written. Those that are quantized or stacked, and all of other formats, are made one at a time: they
    take the memory of the largest.

    Names stay as they are unless ``rename`` changes them: this does not convert between model architectures
    (llama.cpp's ``convert_hf_to_gguf.py`` does). First ``names`` or ``only`` and ``drop`` choose tensors, then
    ``adapters`` change them, then ``dtype``, ``quantize`` and ``keep`` convert them, all by the names of the source;
    ``rename`` comes last. A tensor that the format does not support is refused by name before anything is written.

    Args:
        src: a path or a URL, an open `Checkpoint` (such as ``open(path, root="state_dict")``) or a dict of arrays; or a
            list of these, whose tensors are merged.
        dst: the destination. Its suffix selects the format, such as ".safetensors", ".gguf", ".npz" or ".npy" (for one
            tensor); the error for an unknown suffix lists them all. With ``max_shard_size``
            it is a folder, which gets safetensors shards, an index, and the source's ``config.json`` with the new
            dtype, and without a quantization that the weights no longer have. A URL such as "s3://bucket/model/", or a
            path of `safeload.remote`, is always a folder: shards are uploaded one by one, and the index last.
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
        adapters: LoRA adapters to merge before tensors are converted: a path, a pair (path, weight), or a list of
            these, see `load`. Packed tensors that one changes need ``dtype`` or ``quantize``.
        max_shard_size: bytes, or text such as "500MB" or "5GB", which is what URLs get by default; a larger tensor gets
            a shard of its own. The index is put in place last: until then a new folder has none, and an old folder with
            another number of shards is still what it was. With the same number of shards as before, a crash during the
            renames leaves some of both; in a store, which renames nothing, the new shards get other names.
        format: the format of the file, such as "gguf", if the suffix does not select it; the error for an unknown one
            lists them all. A suffix of a different format is refused. ".bin", which other programs take for a torch
            file, needs ``format`` or ``layout``.
        extras: whether a folder that is made from a folder also gets the tokenizer, the chat template and
            ``generation_config.json``, so that other libraries load the result. From https, which lists no folders, it
            gets none of these.
        storage_options: for URLs, of ``src`` and of ``dst``: options of the filesystem that a URL leads to, see `open`.
            Workers of an executor get only those without secrets, and take keys from their environment.
        overwrite: False to raise FileExistsError if the destination exists. In a folder the shards and the
            ``model.safetensors`` of the old checkpoint are removed once the new one is complete; a file called
            ``model.safetensors`` replaces an index and its shards beside it, also if they are the source and every
            tensor is converted. If the source has no ``config.json``, that of the folder stays, without a quantization
            that the new weights do not have.
        resume: True to write a folder shard by shard, with a record beside each that is whole, and to go on where an
            earlier call with the same options stopped. A call that fails then leaves what is whole.
        executor: runs a piece for each shard of a folder, on other processes or machines that have the same files:
            anything with the ``submit`` of `concurrent.futures.Executor`, such as Dask's
            ``client.get_executor(pure=False)``. The files are those of one process. What is whole stays, as for
            ``resume``.
        threads: for reading and converting; None: chosen automatically, and one for each piece of an executor.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total) of the result.

    Returns:
        What was written: files, tensors, bytes, seconds, and with ``quantize`` which tensors were quantized.

    Raises:
        FileExistsError: ``dst`` exists, and ``overwrite`` is not set; or a ``model.safetensors`` of unknown origin
            would hide the new index.
        UnsupportedError: the format does not support a tensor; the message says which ``dtype`` to pass. Or a tensor
            holds codes of a family that is not dequantized, such as EXL2, or stored codes, and the result is not
            safetensors with all tensors as stored.
        SafeloadError: two sources have a tensor of the same name.
        TensorNotFoundError: an unknown name, or a pattern that matches none.
        ValueError: wrong arguments, such as ``rename`` that gives two tensors one name, ``executor`` without
            ``max_shard_size`` or for tensors in memory, or ``resume`` of a conversion with other options.
        FormatError, OSError: a source cannot be read, or ``dst`` cannot be written; no partial file is left. Shards in
            a store that could not be removed have no index.

    Example:
        >>> import safeload
        >>> safeload.convert("tiny-llama", "tiny.npz", dtype="float16", only="model.norm.*").tensors
        1
        >>> safeload.load("tiny.npz")["model.norm.weight"].dtype
        dtype('float16')
    """
    check_threads(threads)
    options: ConvertOptions = {
        "dtype": dtype,
        "quantize": quantize,
        "layout": layout,
        "names": names,
        "only": only,
        "drop": drop,
        "keep": keep,
        "rename": rename,
        "metadata": metadata,
        "adapters": adapters,
        "max_shard_size": max_shard_size,
        "format": format,
        "extras": extras,
        "storage_options": storage_options,
    }
    started = time.perf_counter()
    if executor is None and not resume:
        report = _at_once(src, dst, options, overwrite=overwrite, threads=threads, progress=progress)
    else:
        executors.check_executor(executor)
        plan, folder = planned(src, dst, options, overwrite=overwrite, resume=resume)
        own = storage_options
        report = run_plan.run_all(plan, folder, own, executor=executor, threads=threads, progress=progress)
    return report._replace(seconds=time.perf_counter() - started)


def _at_once(
    src: Given | Sequence[Given],
    dst: Destination,
    options: ConvertOptions,
    *,
    overwrite: bool,
    threads: int | None,
    progress: Progress,
) -> ConvertReport:
    """Convert in this process, without records of complete shards."""
    request = request_of(dst, options)
    folder, old = request.folder, None
    with ExitStack() as stack:
        if folder is None:
            check_free(request.path, overwrite)
            old = stack.enter_context(OldShards(request.path, overwrite))  # removes them after the sources are closed
        else:
            folder.check_free(overwrite)
        catalog = stack.enter_context(open_sources(src, options.get("storage_options")))
        if overwrite and os.name == "nt":
            _give_way(catalog, src)
        if old is not None:
            old.check_source([file.path for file in catalog.weight_files], every_tensor=request.every_tensor)
        in_place = overwrite and folder is not None and unfinished.is_source(folder, catalog)
        copies: Conversion | None = copies_of(catalog, request, threads)
        conversion = prepare(stack, catalog, request, threads) if copies is None else copies
        return write(conversion, request, overwrite=overwrite, in_place=in_place, progress=progress)


def _give_way(catalog: Catalog, src: Given | Sequence[Given]) -> None:
    """Let the result replace sources that were opened here: Windows does not replace files that are in use.

    Checkpoints that the caller opened stay open.
    """
    catalog.mapped = False
    passed = {id(source) for source in (src if isinstance(src, (list, tuple)) else [src])}
    for checkpoint in catalog.checkpoints:
        for file in checkpoint.weight_files if id(checkpoint) not in passed else ():
            if isinstance(file.store, LocalStore):
                file.store.gives_way = True
