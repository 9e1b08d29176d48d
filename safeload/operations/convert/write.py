"""Write a conversion to a file or a folder of shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ...base import dtypes, log
from ...base.gc_pause import paused
from ...base.results import Result
from ...base.text import plural, printable, show, size
from ...engine.run.progress import Progress, reporter
from ...errors import FormatError, exported
from ...formats.folder import CONFIG, INDEX, SINGLE
from ...formats.registry import SAFETENSORS
from ...packed.quantization import is_own, without_quantization
from ...stores.files import LOCAL
from ..folders.destinations import file_in_store
from ..folders.disk_sink import DiskSink
from ..folders.shards import (
    config_text,
    config_with,
    extras_of,
    index_text,
    warn_of_schemes,
    write_shards,
)
from ..folders.shards import weight_map as stored_in
from ..folders.sink import Sink, free_names
from ..quantize.checkpoint import Summary
from .decide import Conversion
from .make import Outputs
from .request import ConvertRequest


class _ConvertFields(NamedTuple):
    destination: str
    format: str
    files: list[str]
    tensors: int
    nbytes: int
    seconds: float
    summary: Summary | None
    left_out: Sequence[str] = ()


@exported()
class ConvertReport(Result, _ConvertFields):
    """The result of `convert`. ``str()`` gives the text that ``safeload convert`` prints.

    It has a single row, with the number of files; ``summary`` has rows about tensors.

    Attributes:
        destination: path of the file or the folder.
        format: format of the files.
        files: paths of the files with tensors.
        tensors: number of tensors.
        nbytes: bytes of the files.
        seconds: duration of the conversion.
        summary: the quantized tensors, and why each other tensor was kept; None without ``quantize``.
        left_out: what the sources hold besides the tensors in ``files``, such as texts of an npz archive: a sentence
            each.

    Example:
        >>> import numpy as np, safeload
        >>> print(safeload.convert({"w": np.ones((2, 64), np.float32)}, "w.safetensors", quantize="q8_0"))
        w.safetensors: safetensors, 1 tensor, 4.3 KiB
        512 bytes became 136 (3.76 times smaller)
             1 quantized to q8_0: w
    """

    __slots__ = ()

    _columns = ("destination", "format", "files", "tensors", "nbytes", "seconds")
    _json = _ConvertFields._fields

    def _values(self) -> Iterable[Any]:
        return [(self.destination, self.format, len(self.files), self.tensors, self.nbytes, self.seconds)]

    def _about(self) -> Sequence[str]:
        return [repr(self)[1:-1], *(line.strip() for line in str(self).splitlines()[1:])]

    def __str__(self) -> str:
        lines = [
            f"{self.destination}: {self._totals()}",
            *([] if self.summary is None else str(self.summary).splitlines()),
            *self.left_out,
        ]
        return "\n".join(map(printable, lines))

    def __repr__(self) -> str:
        return f"<ConvertReport {show(self.destination)}: {self._totals()}>"

    def _totals(self) -> str:
        files = f" in {len(self.files)} files" if len(self.files) > 1 else ""
        return f"{self.format}, {plural(self.tensors, 'tensor')}, {size(self.nbytes)}{files}"


def write(conversion: Conversion, request: ConvertRequest, *, overwrite: bool, progress: Progress) -> ConvertReport:
    """Write a conversion to its destination. All files are put in place together, at the end."""
    outputs, path, folder, done = conversion.outputs, request.path, request.folder, 0
    with reporter(progress, outputs.nbytes) as report:

        def written(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            report(done)

        if folder is not None:
            files, nbytes = _write_folder(conversion, request, folder, written, overwrite=overwrite)
            warn_of_schemes(path, outputs.schemes)
        elif request.place.files.remote:
            store, name = file_in_store(request.place, overwrite=overwrite)
            with store.staging(name) as staged:
                files, nbytes = [path], outputs.write_file(staged, False, written)
        else:
            files, nbytes = [path], outputs.write_file(path, overwrite, written)
            _warn_of_old_config(conversion, request)
    count, summary = conversion.tensor_count, conversion.summary
    return ConvertReport(path, request.format, files, count, nbytes, 0.0, summary, conversion.left_out)


def _write_folder(
    conversion: Conversion,
    request: ConvertRequest,
    folder: Sink,
    written: Callable[[int], object],
    *,
    overwrite: bool,
) -> tuple[list[str], int]:
    """Write a folder; return the paths of its shards and their bytes."""
    with paused(conversion.tensor_count):
        outputs, parameters = conversion.outputs, conversion.parameters
        shards = outputs.divided(request.limit)
        names = free_names(folder, [*shards])
        shards = {names[file]: shard for file, shard in shards.items()}
        files = dict(conversion.files)
        if parameters is not None or [*shards] != [SINGLE]:
            files[INDEX] = index_text(weight_map(shards), outputs.nbytes, parameters)
        config = config_text(config_for(conversion, folder, request.target, overwrite=overwrite))
    writers = {file: partial(shard.writer, written) for file, shard in shards.items()}
    nbytes = write_shards(writers, files, folder, overwrite=overwrite, config=config)
    # Files of an older model beside a new tokenizer: transformers prefers some to the new ones.
    new_tokenizer = overwrite and any(isinstance(content, bytes) for content in conversion.files.values())
    older = sorted(extras_of(folder.location).keys() - conversion.files.keys()) if new_tokenizer else ()
    if older:
        log.warning(
            "%s: %s stays from before, and other programs may load it in place of the new tokenizer: remove it if it "
            "belongs to another model",
            folder.location.shown,
            " and ".join(map(show, older)),
        )
    return [folder.shown(file) for file in shards], nbytes


def weight_map(shards: Mapping[str, Outputs]) -> dict[str, str]:
    """Return the shard of each stored tensor, and refuse two tensors with the same name."""
    files = {name: file for file, shard in shards.items() if shard.spans is not None for name in shard.names}
    return files or stored_in({file: shard.tensors for file, shard in shards.items()})


def config_for(
    conversion: Conversion, folder: Sink, target: dtypes.Dtype | None, *, overwrite: bool
) -> dict[str, Any] | None:
    """Return the new ``config.json`` of a folder, or None to leave it as it is.

    If the source has none, the old one gets the quantization of the new weights, or loses its own, unless the new
    weights can be the codes that it describes.
    """
    if conversion.config is not None or not overwrite:
        return conversion.config
    config, schemes = _old_config(conversion, folder), conversion.outputs.schemes
    if config is None:
        return None
    stale = without_quantization(config) != config
    if stale and not (is_own(config) and schemes):
        log.warning(
            "%s: removed the quantization of the old weights, because the new weights have none and their source has "
            "no %s",
            folder.shown(CONFIG),
            CONFIG,
        )
    return config_with(config, target, restored=stale, schemes=schemes) if stale or schemes else None


def _warn_of_old_config(conversion: Conversion, request: ConvertRequest) -> None:
    """Warn if a ``config.json`` beside a new ``model.safetensors`` claims a quantization that the weights lack."""
    folder, name = os.path.split(request.path)
    if request.format != SAFETENSORS or name != SINGLE:
        return
    beside = DiskSink(LOCAL, folder or ".")
    config = _old_config(conversion, beside)
    if config is None or (is_own(config) and conversion.outputs.schemes):
        return
    if without_quantization(config) != config:
        log.warning(
            "%s describes a quantization that the weights in %s do not have. Remove it, or other programs cannot load "
            "the weights. A conversion from folder to folder, with max_shard_size=, removes it",
            beside.shown(CONFIG),
            SINGLE,
        )


def _old_config(conversion: Conversion, folder: Sink) -> dict[str, Any] | None:
    """Return a folder's ``config.json``; None if none is readable, or the new weights can be the codes it describes."""
    if not conversion.restored and conversion.outputs.may_hold_codes:
        return None
    try:
        return folder.read_json(CONFIG, CONFIG) if CONFIG in folder.names() else None
    except (FormatError, OSError):
        return None
