"""Convert checkpoints to another format, dtype or layout, in bounded memory, and write the result at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from ..adapters.adapter import listed
from ..core.atomic_file import Digest
from ..core.checkpoint import Adapters
from ..core.files import LOCAL, LocalStore, Location, caching
from ..core.memory import Cache, check_threads
from ..core.names import Patterns, Renames
from ..core.opening import Signature, Verify
from ..core.progress import Meter, Progress
from ..core.registry import SAFETENSORS, WrittenName, written_suffixes
from ..core.runtime import paused
from ..core.text import PathLike, show, warning
from ..errors import SafeloadError, UnsupportedError, public
from ..formats.folder import CONFIG, INDEX, SINGLE
from ..models.layout import TOOLS, Layout
from . import decide, destinations, origin
from .catalog import Catalog, Given
from .decide import ConvertOptions, ConvertReport, ConvertRequest
from .destinations import Destination, SaveDestination
from .executors import Executor, check_executor
from .make import Outputs
from .rules import ConvertScheme, Keep
from .sink import Sink, free_names


@public
def convert(
    src: Given | Sequence[Given],
    dst: SaveDestination,
    *,
    dtype: Any = None,
    quantize: ConvertScheme | None = None,
    imatrix: PathLike | None = None,
    requantize: bool = False,
    exact: bool = False,
    scale_dtype: Literal["float32"] | None = None,
    part: decide.Part = None,
    layout: Layout | Literal["kohya", "diffusers"] | None = None,
    names: Iterable[str] | None = None,
    only: Patterns = None,
    drop: Patterns = None,
    keep: Keep = None,
    ignore: Keep = None,
    rename: Renames = None,
    metadata: Mapping[str, Any] | None = None,
    adapters: Adapters = None,
    base: Given | None = None,
    max_shard_size: int | str | None = None,
    format: WrittenName | None = None,
    extras: bool = True,
    raw: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    executor: Executor | None = None,
    threads: int | None = None,
    progress: Progress = None,
    cache: Cache = "keep",
    verify: Verify = None,
    record: bool = False,
) -> ConvertReport:
    """Convert checkpoints to another format, dtype or layout, in bounded memory.

    To safetensors, copied, cast and dequantized tensors pass through a ring of 64 MiB, which is filled ahead of the
    writer. Quantized and stacked tensors, and all tensors of other formats, are made one after another and take the
    memory of the largest.

    Names stay as they are unless you pass ``rename``. A model of transformers that becomes a ".gguf" file is converted
    to the form that llama.cpp runs, with its tokenizer: ``quantize`` and ``keep`` then match llama.cpp's names, or else
    names in the source, and options that select or rename tensors require ``raw``. An unsupported architecture is
    refused by name. The only weight file of a supported model, such as "Llama-3.2-1B/model.safetensors", stands for its
    folder. In the same way, a GGUF model becomes a folder for transformers, with config and tokenizer. A diffusion
    model, recognized by its tensor names, becomes a ".gguf" file for ComfyUI; such a file becomes a checkpoint again,
    with its tensors dequantized and in their original shapes.

    First ``names``, or ``only`` and ``drop``, select tensors; then ``adapters`` are merged; then ``dtype``,
    ``quantize`` and ``keep`` convert the tensors. All of these use the names in the source; ``rename`` comes last. If
    the format does not support a tensor, it is refused by name before anything is written.

    Args:
        src: a path or URL, an open `Checkpoint` (such as ``open(path, root="state_dict")``), a dict of arrays, or a
            list of these to merge.
        dst: the destination. Its suffix selects the format, such as ".safetensors", ".gguf", ".npz" or ".npy" (for a
            single tensor); the error for an unknown suffix lists all formats. A path without a suffix, a path with a
            final slash, and an existing folder are folders: they get ``model.safetensors``, or safetensors shards and
            an index, and the source's ``config.json`` with the new dtype, and without its quantization if the tensors
            are dequantized. A URL such as "s3://bucket/model/", or a path of `safeload.remote`, is a folder unless it
            has the suffix of a format: shards are uploaded one after another, the index last. A file object opened for
            writing in binary mode gets the file from its current position on, once the file is complete on this
            machine's disk: safetensors, unless ``format`` says otherwise.
        dtype: dtype for floating tensors, and for quantized and packed tensors, which are dequantized. In ".gguf" files
            tensors with a single axis always become float32, because llama.cpp requires it for norms and biases.
        quantize: "int8", "q4_0", "q8_0", ... or a dict from name patterns to schemes for mixed precision; every pattern
            must match a tensor. Quantizes the tensors that `load_quantized` does, including tied heads unless ``names``
            is given; ``dtype`` applies to the rest. Q4_0 is rounded by "ggml" for ".gguf", else by "absmax": see
            `safeload.quantize`. Only safeload reads these tensors in a folder; its ``config.json`` says so.

            If a model becomes a GGUF file, a bare name is one of llama.cpp's file types: each tensor gets the type that
            llama-quantize chooses. File types include mixtures: "q2_k_s", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s",
            "q4_k_m" (also called "q4_k"), "q5_k_s", "q5_k_m" and "mxfp4_moe". In a dict a name is a block type, and
            "*" can have a mixture.

            The formats of other engines, such as "w4a16", "fp8_dynamic", "mlx4" and "bnb_nf4", write the folder that
            the engine loads, see :doc:`/guide/engines`. They need the ``config.json`` of a model, which MLX's formats
            must support, or ``only``. "mlx" writes a folder for mlx-lm without codes.
        imatrix: path of a llama.cpp importance matrix for ``quantize``, in GGUF or in the older format. Tensors
            without an entry are quantized without importance. Needs a single file as destination.
        requantize: True to round the codes of a quantized source again if the format cannot hold them. Without it codes
            move unchanged, or are rounded to fewer bits; else the tensor is an error by name.
        exact: True to refuse a format that would change any value of a quantized source.
        scale_dtype: "float32" for scales of float32 in formats of engines whose scales have the dtype of the weights;
            weights are then quantized from float32. None keeps the scales of a quantized source.
        part: the part of a model of text and images to write for llama.cpp: "text" (None), or "vision", the file for
            ``--mmproj``, as float32, float16, bfloat16 or, with ``quantize="q8_0"``, in blocks.
        layout: stacks layers, see `stack`; the result has only the tensors of the layout, in its order.
        names: exact names of the tensors to convert; None for all.
        only: shell pattern, or list of patterns, of names to convert, such as ``"model.layers.0.*"``; instead of
            ``names``.
        drop: shell pattern, or list of patterns, of names to leave out.
        keep: shell pattern, list of patterns, or function of the name: tensors or modules for ``quantize`` to leave
            unquantized. After "re:" a pattern is a regular expression.
        ignore: the engines' name for ``keep``.
        rename: pairs (regular expression, replacement), or a dict, for ``re.sub`` to apply to each name in order.
        metadata: text for the header, merged with the metadata of the source; the value None removes a key. For
            ".gguf", values can also be numbers and lists.
        adapters: LoRA adapters to merge before tensors are converted: a path, a pair (path, weight), or a list of
            these, see `load`. If an adapter changes packed tensors, ``dtype`` or ``quantize`` is required.
        base: the model of the LoRA adapter ``src``. A ".gguf" file is written for llama.cpp; a folder for mlx-lm if the
            adapter is PEFT's, else for PEFT. Factors keep their dtype without ``dtype``; llama.cpp also has
            ``quantize="q8_0"``. The base is a folder of transformers, or for llama.cpp a GGUF file, of a family in
            `families`; or a diffusion model in the layout of Diffusers, whose adapter can also become a ".safetensors"
            file with the names of ``layout``, "kohya" or "diffusers". ``names``, ``only`` and ``drop`` select tensors
            of the adapter, ``rename`` needs a single file, and arguments for models alone are refused.
        max_shard_size: bytes, or text such as "500MB"; the default for folders is "5GB". A larger tensor gets a shard
            of its own. A single shard is called ``model.safetensors`` and has no index. Shards replace no file: if a
            name is taken, all get a larger total, such as "-of-00005" for four shards, and the old ones are removed
            once the index names the new ones. After a crash the folder has the old model, the new model, or an index
            of shards that are not there yet, which nothing opens. A store renames nothing, so new shards get different
            names.
        format: the format of the file, such as "gguf", if the suffix does not select it; the error for an unknown
            format lists all formats. A suffix of a different format is refused. ".bin", which other programs read as a
            torch file, requires ``format`` or ``layout``.
        extras: True to copy the tokenizer, the chat template and ``generation_config.json`` from a source folder to the
            destination folder, because other libraries need these files. Not available from https, which cannot list
            folders.
        raw: True to write tensors as they are: from transformers to a ".gguf" file that llama.cpp does not run, or
            from GGUF to a folder that transformers does not load. Names in ``quantize`` are block types then.
        storage_options: for URLs, in ``src`` and ``dst``: options of the filesystem behind the URL, see `open`. Workers
            of an executor only get options without secrets, and should take keys from their environment.
        overwrite: False to raise FileExistsError if the destination exists. In a folder, the old shards and
            ``model.safetensors`` are removed once the new checkpoint is complete. A file called ``model.safetensors``
            replaces an index and its shards beside it, even if these are the source, as long as every tensor is
            converted. If the source has no ``config.json``, the folder keeps its own, without the quantization of the
            old weights.
        resume: True to keep complete shards and their records in ``.safeload-resume/`` until all are there, and to
            continue an earlier call with the same options. Long conversions should set this.
        executor: runs a piece for each shard of a folder, in other processes or on other machines with the same
            files: any object with the ``submit`` of `concurrent.futures.Executor`, such as Dask's ``Client``.
            The result has the same bytes as that of a single process. Complete
            shards stay after an error, as with ``resume``.
        threads: for reading and converting. None: chosen automatically, or 1 per piece with an executor.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total) of the result.
        cache: "drop" leaves few pages of sources and results in the system's page cache, so that the conversion evicts
            no other program's files: pages are dropped behind reads (see `load`), and written pages once they are on
            the disk. Tensors that a conversion reads twice come from the disk twice.
        verify: what to verify the paths of ``src`` against, see `load`: only verified tensors and files are written.
            Not with ``executor``, ``resume`` or ``adapters``, whose files would be read unverified.
        record: True to write a record of origin: ``origin.json`` in a folder, ``NAME.origin.json`` beside a file. It
            has size and SHA-256 of files read and written, the revision of a source from the Hub, the options and
            the version of safeload, but no path of this machine and no secret. `verify` compares the result with it.

    Returns:
        A report of files, tensors, bytes, seconds and, with ``quantize``, the quantized tensors.

    Raises:
        FileExistsError: ``dst`` exists and ``overwrite`` is not set; or a ``model.safetensors`` of unknown origin
            would hide the new index.
        UnsupportedError: the format does not support a tensor; the message says which ``dtype`` to pass. Or a file type
            requires an importance matrix for a tensor. Or a tensor holds codes that cannot be dequantized, such as
            EXL2, or was opened as stored, unless the result is safetensors with all tensors as stored.
        SafeloadError: two sources have a tensor with the same name.
        TensorNotFoundError: a name is unknown, or a pattern matches no tensor.
        VerificationError: see `load`.
        ValueError: invalid arguments, such as a ``rename`` that gives two tensors the same name, ``executor`` without
            a folder as destination or with tensors in memory, or ``resume`` with different options.
        FormatError, OSError: a source cannot be read, or ``dst`` cannot be written. No partial file is left; if shards
            in a store cannot be removed, they have no index.

    Example:
        >>> import safeload
        >>> safeload.convert("tiny-llama", "tiny.npz", dtype="float16", only="model.norm.*").tensors
        1
        >>> safeload.load("tiny.npz")["model.norm.weight"].dtype
        dtype('float16')
    """
    given, place = locals(), cast("Destination", dst)
    options: Any = {key: given[key] for key in ConvertOptions.__annotations__}
    how: Any = {key: given[key] for key in ("overwrite", "resume", "threads", "progress", "verify", "record")}
    try:
        check_threads(threads)
        if verify is not None and verify is not False:
            for name, value in (("executor", executor), ("resume", resume or None), ("adapters", adapters)):
                if value is not None:
                    raise ValueError(f"verify= does not cover files that {name}= reads: pass only one of the two")
        started = time.perf_counter()
        if base is None and layout in TOOLS:
            raise ValueError(f'layout="{layout}" names the tool of an adapter, which needs base=')
        if base is not None:
            from .adapter_forms import for_llama_cpp, for_tools, to_folder  # only here: most conversions are of models

            written_to = destinations.is_written_to(dst)
            location = None if written_to or format == "gguf" else destinations.where(place, storage_options)
            if location is not None and destinations.is_folder(location, format):
                with caching(cache):
                    file, count, nbytes = to_folder(src, location, given)
                seconds = time.perf_counter() - started
                return ConvertReport(location.shown, SAFETENSORS, [file], count, nbytes, seconds, None)
            suffix = f".{format or SAFETENSORS}" if location is None else os.path.splitext(location.path.lower())[1]
            if suffix not in (".gguf", ".safetensors"):
                text = "base= writes a folder, a file for llama.cpp or a file for diffusion models"
                about = "" if format is None else f" with format={show(format)}"
                raise ValueError(f'{text}: {show(dst)}{about} must end with ".gguf" or ".safetensors"')
            arranged = for_llama_cpp if suffix == ".gguf" else for_tools
            src, changed = arranged(src, given, () if written_to else (place,))
            options |= changed
        with caching(cache):
            if destinations.is_written_to(dst):
                if record:
                    raise ValueError("record=True writes beside the destination, which is a file object: pass a path")
                if executor is not None or resume or max_shard_size is not None:
                    raise ValueError(
                        "executor=, resume= and max_shard_size= need a folder, but the destination is a file object"
                    )
                options["format"], name = format or SAFETENSORS, f"<{type(dst).__name__}>"
                suffix = next(iter(written_suffixes(options["format"])), "")
                with destinations.ObjectFile(dst).staging(f"converted{suffix}") as temporary:
                    request = decide.request_of(temporary, options, **{**how, "overwrite": False})
                    report = _at_once(src, request)._replace(destination=name, files=[name])
            elif executor is None and not resume:
                report = _at_once(src, decide.request_of(place, options, **how))
            else:
                from .resume import convert_in_pieces  # only here: most conversions are written at once

                check_executor(executor)
                report = convert_in_pieces(src, decide.request_of(place, options, **how), executor)
        return report._replace(seconds=time.perf_counter() - started)
    except SafeloadError as error:
        text = str(error)
        if (
            base is None
            and error.path not in [str(path) for path, _ in listed(adapters)]  # its tensors are not the result's
            and error.tensor is not None
            and type(error) in (SafeloadError, UnsupportedError)
            and "drop=" not in text
        ):
            advised = text.replace("leave it out", "leave it out with drop=")
            error.args = (advised if advised != text else f"{text}; drop= leaves it out",)
        raise


def _at_once(src: Given | Sequence[Given], request: ConvertRequest) -> ConvertReport:
    """Convert without records of complete shards. All files are put in place together, at the end."""
    options, overwrite, verify, folder, old = request.options, request.overwrite, request.verify, request.folder, []
    adapters = [path for path, _ in listed(options["adapters"])]
    documents = (verify.path, verify.key, *verify.certificates) if isinstance(verify, Signature) else (verify,)
    beside_sources = [*filter(None, (options["imatrix"], *adapters, *(() if verify is True else documents)))]
    with ExitStack() as stack:
        if folder is None and request.place.files.remote:
            store, name = destinations.file_in_store(request.place, overwrite=overwrite)
        elif folder is None:
            old = destinations.old_shards(request.path, overwrite)
            if beside_sources:
                destinations.refuse_inputs(request.path, beside_sources, beside=adapters)
        else:
            folder.check_free(overwrite=overwrite)
            for name in (SINGLE, INDEX, CONFIG) if beside_sources else ():
                destinations.refuse_inputs((folder.location / name).path, beside_sources)
        catalog = decide.open_sources(stack, src, request)
        if overwrite and os.name == "nt":
            _give_way(catalog, src)
        if folder is None and overwrite:
            whole = len(catalog.files) == 1  # a single file is replaced as a whole
            destinations.refuse_inputs(request.path, () if whole else catalog.files, beside=catalog.files)
        if old:
            read = [file.path for file in catalog.weight_files]
            destinations.check_shards(old, read, every_tensor=request.every_tensor)
        record = origin.recorder(stack, catalog, request) if request.record else None
        outputs, path = decide.prepare(stack, catalog, request), request.path
        total = outputs.nbytes if request.progress else 0
        files, meter = [path], stack.enter_context(closing(Meter(request.progress, total)))
        if folder is not None:
            files, nbytes = _write_folder(outputs, request, folder, meter.add, record)
            destinations.warn_of_schemes(path, outputs.schemes)
        elif request.place.files.remote:
            with store.staging(name) as staged:
                nbytes, text = _write_file(outputs, request, staged, meter.add, record)
            if text is not None:
                with store.staging(f"{name}.{origin.ORIGIN_NAME}") as staged:
                    Path(staged).write_bytes(text)
        else:
            beside = destinations.Output(
                "record=", f"{path}.{origin.ORIGIN_NAME}", "record", origin.is_manifest, overwrite, catalog.files
            )
            if record is not None:
                beside.check()
            nbytes, text = _write_file(outputs, request, path, meter.add, record)
            if text is not None:
                beside.write(text.decode())
            if request.format == SAFETENSORS and os.path.basename(path) == SINGLE:
                _warn_of_old_config(outputs, path)
    if old:
        destinations.remove_shards(old)  # after the sources are closed
    count, summary = outputs.tensor_count, outputs.summary
    return ConvertReport(path, request.format, files, count, nbytes, 0.0, summary, outputs.left_out)


def _give_way(catalog: Catalog, src: Given | Sequence[Given]) -> None:
    """Let the result replace sources opened by this call, because Windows does not replace files that are in use."""
    catalog.mapped = False
    # Checkpoints of the caller stay open.
    passed = {id(source) for source in (src if isinstance(src, (list, tuple)) else [src])}
    for checkpoint in catalog.checkpoints:
        for file in checkpoint.weight_files if id(checkpoint) not in passed else ():
            if isinstance(file.store, LocalStore):
                file.store.gives_way = True


def _write_file(
    outputs: Outputs,
    request: ConvertRequest,
    path: str,
    written: Callable[[int], object],
    record: origin.Record | None,
) -> tuple[int, bytes | None]:
    """Write a file; return its bytes, and its record of origin if there is one."""
    if record is None:
        return outputs.write_file(path, request.overwrite, written), None
    hashed = request.format in origin.HASHED
    with Digest() as digest:
        nbytes = outputs.write_file(path, request.overwrite, written, digest if hashed else None)
    entry = {"size": nbytes, "sha256": digest.hexdigest()} if hashed else origin.entry_of(Location(LOCAL, path))
    return nbytes, record({os.path.basename(request.path): entry})


def _write_folder(
    outputs: Outputs,
    request: ConvertRequest,
    folder: Sink,
    written: Callable[[int], object],
    record: origin.Record | None,
) -> tuple[list[str], int]:
    """Write a folder; return the paths of its shards and their bytes."""
    with paused(len(outputs.names)):
        parameters, shards = outputs.parameters, outputs.divided(request.limit)
        names = free_names(folder, [*shards])
        shards = {names[file]: shard for file, shard in shards.items()}
        files = dict(outputs.files)
        config = decide.config_for(outputs, folder, request)
        if config is not None:
            files[CONFIG] = destinations.config_text(config)
        if parameters is not None or [*shards] != [SINGLE]:
            stored = destinations.weight_map({file: shard.stored for file, shard in shards.items()})
            files[INDEX] = destinations.index_text(stored, outputs.nbytes, parameters)
    writers = {file: partial(shard.writer, written) for file, shard in shards.items()}
    nbytes = destinations.write_shards(
        writers,
        files,
        folder,
        overwrite=request.overwrite,
        record=None if record is None else partial(origin.with_record, record, files),
    )
    # Files of an older model beside a new tokenizer: transformers prefers some to the new ones.
    new_tokenizer = request.overwrite and any(isinstance(content, bytes) for content in outputs.files.values())
    older = sorted(destinations.extras_of(folder.location).keys() - outputs.files.keys()) if new_tokenizer else ()
    if older:
        warning(
            "%s: %s stays from before, and other programs may load it in place of the new tokenizer: remove it if it "
            "belongs to another model",
            folder.location.shown,
            " and ".join(map(show, older)),
        )
    return [folder.shown(file) for file in shards], nbytes


def _warn_of_old_config(outputs: Outputs, path: str) -> None:
    """Warn if a ``config.json`` beside a new ``model.safetensors`` claims a quantization that the weights lack."""
    beside = Sink(LOCAL, os.path.dirname(path) or ".")
    if decide.old_config(outputs, beside)[1]:
        warning(
            "%s describes a quantization that the weights in %s do not have. Remove it, or other programs cannot load "
            "the weights. A conversion from folder to folder, with max_shard_size=, removes it",
            beside.shown(CONFIG),
            SINGLE,
        )
