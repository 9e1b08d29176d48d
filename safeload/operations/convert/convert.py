"""Converts checkpoints to another format, dtype or layout, in memory that does not grow with the checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from ...base import dtypes
from ...base.selecting import Patterns, Renames
from ...engine.run.atomic_file import AtomicFile
from ...engine.run.progress import Progress, reporter
from ...engine.run.threads import check_threads
from ...formats.metadata import as_texts
from ...formats.registry import BY_NAME, WrittenName
from ...loading.adapter import Adapters
from ...models.layout import Layout
from ...stores.local import LocalStore
from ..folders import journal, unfinished
from ..folders.destinations import Destination
from ..folders.shard_folder import Folder, OldShards, check_free
from ..folders.shards import Beside, ShardWriter, divide, weight_map, write_shards, writer_of
from ..quantize.checkpoint import Keep, Scheme
from ..sources import executors
from ..sources.catalog import Catalog, Given
from ..sources.executors import Executor
from . import convert_folder
from .convert_report import ConvertReport
from .copying import Copies, CopyWriter, copies_of, files_of
from .old_config import cured, may_hold_codes, warn_of_old
from .outputs import reporting
from .planning import planned
from .preparing import ConvertOptions, ConvertRequest, catalog_of, prepare, wanted_of

# Options that leave tensors of the source out.
_CHOOSING = ("names", "only", "drop", "layout")
# The tensors of a shard.
Shard = TypeVar("Shard")


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
    if executor is not None or resume:
        report = _in_pieces(src, dst, options, overwrite, resume, executor, threads, progress)
    else:
        report = _at_once(src, dst, options, overwrite, threads, progress)
    return report._replace(seconds=time.perf_counter() - started)


def _at_once(
    src: Given | Sequence[Given],
    dst: Destination,
    options: ConvertOptions,
    overwrite: bool,
    threads: int | None,
    progress: Progress,
) -> ConvertReport:
    """Writes everything in this process: all files are put in place together, at the end."""
    wanted = wanted_of(dst, options)
    path, folder = wanted.path, wanted.folder
    old = None
    if folder is None:
        check_free(path, overwrite)
        old = OldShards(path, overwrite)
    else:
        folder.check_free(overwrite)
    with ExitStack() as stack:
        if old is not None:
            stack.enter_context(old)  # its end comes when the sources are closed
        catalog = stack.enter_context(catalog_of(src, options.get("storage_options")))
        if overwrite and os.name == "nt":
            _give_way(catalog, src)
        if old is not None:
            every = all(options.get(key) is None for key in _CHOOSING)
            old.check_source([file.path for file in catalog.weight_files], every_tensor=every)
        in_place = overwrite and folder is not None and unfinished.is_source(folder, catalog)
        copies = copies_of(catalog, wanted)
        if copies is not None:
            return _copied(copies, wanted, overwrite, in_place, threads, progress)
        made = prepare(stack, catalog, wanted, threads)
        outputs = reporting(made.outputs, stack.enter_context(reporter(progress, made.nbytes)))
        if folder is None:
            BY_NAME[wanted.format].load().write(outputs, made.metadata, path, overwrite=overwrite)
            files, size = [path], os.path.getsize(path)
            if made.work.restored or not may_hold_codes(made.outputs.values()):
                warn_of_old(path, wanted.format)
        else:
            shards = divide(outputs, wanted.limit)
            config = made.work.config()
            if config is None and overwrite and (made.work.restored or not may_hold_codes(made.outputs.values())):
                config = cured(folder, wanted.target)
            beside = partial(Beside, total_size=made.nbytes, config=config, extras=made.extras)
            write = partial(writer_of, texts=as_texts(made.metadata) or None)
            files, size = _sharded(shards, weight_map, write, beside, folder, overwrite, in_place)
        return ConvertReport(path, wanted.format, files, made.tensors, size, 0.0, made.work.summary(made.nbytes))


def _give_way(catalog: Catalog, src: Given | Sequence[Given]) -> None:
    """Lets sources that were opened here be replaced by what is made of them: Windows replaces no file that is in use.

    Those that the caller has open stay open.
    """
    catalog.mapped = False
    callers = {id(one) for one in (src if isinstance(src, (list, tuple)) else [src])}
    for opened in catalog.checkpoints:
        for file in opened.weight_files if id(opened) not in callers else ():
            if isinstance(file.store, LocalStore):
                file.store.gives_way = True


def _copied(
    copies: Copies, wanted: ConvertRequest, overwrite: bool, in_place: bool, threads: int | None, progress: Progress
) -> ConvertReport:
    """Writes tensors that are only copied or cast."""
    path, folder = wanted.path, wanted.folder
    plain = not may_hold_codes(map(dtypes.array_dtype, {*copies.targets.tobytes()}))
    done = 0

    with reporter(progress, copies.nbytes) as report:

        def written(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            report(done)

        if folder is None:
            writer = CopyWriter(copies, threads, written)
            with AtomicFile(path, writer.size, overwrite=overwrite) as file:
                writer.write_to(file)
            files, size = [path], writer.size
            if plain:
                warn_of_old(path, wanted.format)
        else:
            config = cured(folder, wanted.target) if copies.config is None and overwrite and plain else copies.config
            beside = partial(Beside, total_size=copies.nbytes, config=config, extras=copies.extras)
            write = partial(CopyWriter, threads=threads, report=written)
            files, size = _sharded(copies.divided(wanted.limit), files_of, write, beside, folder, overwrite, in_place)
    return ConvertReport(path, wanted.format, files, len(copies.names), size, 0.0, None)


def _sharded(
    shards: Mapping[str, Shard],
    map_of: Callable[[Mapping[str, Shard]], Mapping[str, str]],
    write: Callable[[Shard], ShardWriter],
    beside: Callable[[Mapping[str, str]], Beside],
    folder: Folder,
    overwrite: bool,
    in_place: bool,
) -> tuple[list[str], int]:
    """Writes a folder. Returns its shards, and their bytes."""
    # In a store no shard of the source is replaced.
    replacing = partial(unfinished.note, folder, {}, None) if in_place and not folder.files.remote else None
    names = folder.free_names([*shards])
    shards = {names[file]: shard for file, shard in shards.items()}
    writers = {file: partial(write, shard) for file, shard in shards.items()}
    size = write_shards(writers, beside(map_of(shards)), folder, overwrite, replacing)
    journal.forget(folder, [*shards])
    if overwrite:
        unfinished.forget(folder)
    return [folder.shown(file) for file in shards], size


def _in_pieces(
    src: Given | Sequence[Given],
    dst: Destination,
    options: ConvertOptions,
    overwrite: bool,
    resume: bool,
    executor: Executor | None,
    threads: int | None,
    progress: Progress,
) -> ConvertReport:
    """Writes a folder piece by piece: each shard is put in place, and recorded, when it is whole."""
    executors.check_executor(executor)
    plan, folder = planned(src, dst, overwrite, resume, options)
    sizes = [piece["nbytes"] for piece in plan.pieces]
    own = options.get("storage_options")
    run = convert_folder.PieceRunner(folder, own)
    with ExitStack() as stack:
        for place in {piece["folder"]: run.folder_of(piece) for piece in plan.pieces}.values():
            stack.enter_context(place.undone())
        results = executors.run(run, plan.pieces, executor, sizes=sizes, threads=threads, progress=progress)
    return convert_folder.complete(plan, results, folder, own, at_once=True)
