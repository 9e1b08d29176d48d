"""Write a conversion to a file or a folder of shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from ...base import dtypes, log
from ...base.gc_pause import paused
from ...base.results import Result
from ...base.text import plural, printable, show, size
from ...engine.run.progress import Progress, reporter
from ...errors import FormatError, SafeloadError, exported
from ...formats.folder import CONFIG, INDEX, SINGLE
from ...formats.registry import SAFETENSORS
from ...packed.quantization import is_own, without_quantization
from ...stores.files import LOCAL, Location
from ..folders.destinations import file_in_store
from ..folders.disk_sink import DiskSink
from ..folders.shards import (
    ShardWriter,
    config_text,
    config_with,
    extras_of,
    index_text,
    warn_of_schemes,
    write_shards,
)
from ..folders.sink import Sink, free_names
from ..quantize.checkpoint import Summary
from ..quantize.engine_rules import EngineRules
from ..sources.catalog import Catalog
from ..sources.recipes import TensorRecipe
from .decide import Decider
from .request import ConvertRequest

if TYPE_CHECKING:
    from typing_extensions import Self


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


class Conversion(Protocol):
    """Tensors to write: decided, and made or copied when the writer reaches them."""

    @property
    def catalog(self) -> Catalog:
        """The tensors to convert."""

    @property
    def decider(self) -> Decider | None:
        """The decider; None if every tensor is copied or cast."""

    @property
    def tensor_count(self) -> int:
        """Number of tensors."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""

    @property
    def config(self) -> dict[str, Any] | None:
        """The ``config.json`` of a folder; None if the source has none."""

    @property
    def schemes(self) -> tuple[str, ...]:
        """Safeload's schemes of quantized tensors."""

    @property
    def texts(self) -> Mapping[str, str] | None:
        """Metadata of the result, as text; None if it has none."""

    @property
    def files(self) -> Mapping[str, Location | bytes]:
        """Other files of a folder by name: where to copy from, or the content."""

    @property
    def summary(self) -> Summary | None:
        """The quantized tensors; None without ``quantize``."""

    @property
    def parameters(self) -> int | None:
        """Number of parameters for the index of an engine that wants one for a single shard too."""

    @property
    def may_hold_codes(self) -> bool:
        """True if tensors can be codes described by a ``config.json``."""

    def divided(self, limit: int) -> Mapping[str, Self]:
        """Return the shards of a folder by file name, each at most ``limit`` bytes."""

    def weight_map(self, shards: Mapping[str, Self]) -> Mapping[str, str]:
        """Return the shard of each tensor, by stored name."""

    def writer(self, written: Callable[[int], object]) -> ShardWriter:
        """Return the writer of a shard; it calls ``written`` with the bytes of tensors since the last call."""

    def write_file(self, path: str, overwrite: bool, written: Callable[[int], object]) -> int:
        """Write a file in the format of the conversion and return its size."""


class PlannedConversion(Conversion, Protocol):
    """A conversion that can be divided into pieces. The last properties are of a shard."""

    @property
    def engine_rules(self) -> EngineRules | None:
        """The rules of an engine's format."""

    @property
    def extras(self) -> Mapping[str, Location]:
        """Other files to copy into the folder, by name."""

    @property
    def planned_summary(self) -> dict[str, Any] | None:
        """The summary without the tensors of pieces; None without ``quantize``."""

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The decisions."""

    @property
    def recipes(self) -> dict[str, TensorRecipe]:
        """Recipes of tensors that are not tensors of the source."""

    @property
    def reads(self) -> Sequence[str]:
        """Names of the tensors that are read from files."""


_Conversion = TypeVar("_Conversion", bound=Conversion)


def write(conversion: Conversion, request: ConvertRequest, *, overwrite: bool, progress: Progress) -> ConvertReport:
    """Write a conversion to its destination. All files are put in place together, at the end."""
    left_out = warn_of_left_out(conversion)
    path, folder, done = request.path, request.folder, 0
    with reporter(progress, conversion.nbytes) as report:

        def written(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            report(done)

        if folder is None and request.place.files.remote:
            store, name = file_in_store(request.place, overwrite=overwrite)
            with store.staging(name) as staged:
                files, nbytes = [path], conversion.write_file(staged, False, written)
        elif folder is None:
            files, nbytes = [path], conversion.write_file(path, overwrite, written)
            _warn_of_old_config(conversion, request)
        else:
            files, nbytes = _write_folder(conversion, request, folder, written, overwrite=overwrite)
            warn_of_schemes(path, conversion.schemes)
    count, summary = conversion.tensor_count, conversion.summary
    return ConvertReport(path, request.format, files, count, nbytes, 0.0, summary, left_out)


def warn_of_left_out(conversion: Conversion) -> tuple[str, ...]:
    """Warn of what the sources hold besides the converted tensors, and return a sentence each."""
    catalog, decider = conversion.catalog, conversion.decider
    objects = {} if decider is None else decider.left_out
    lines = [f"{show(name)} is left out: {label} is not a tensor" for name, label in objects.items()]
    notes = [note for checkpoint in catalog.checkpoints for note in checkpoint.notes]
    if conversion.tensor_count == 0 and (decider is None or not decider.ignored):
        about = "".join(f"; {line}" for line in (*lines, *notes))
        raise SafeloadError(f"{catalog.title}: no tensor to convert{about}", path=catalog.title)
    lines += [note for note in notes if "left out" in note or "not opened" in note]
    for line in lines:
        log.warning("%s: %s", catalog.title, line)
    return tuple(lines)


def _write_folder(
    conversion: _Conversion,
    request: ConvertRequest,
    folder: Sink,
    written: Callable[[int], object],
    *,
    overwrite: bool,
) -> tuple[list[str], int]:
    """Write a folder; return the paths of its shards and their bytes."""
    with paused(conversion.tensor_count):
        shards = conversion.divided(request.limit)
        names = free_names(folder, [*shards])
        shards = {names[file]: shard for file, shard in shards.items()}
        config = conversion.config
        if config is None and overwrite:
            config = config_without_codes(conversion, folder, request.target)
        weight_map = conversion.weight_map(shards)
    parameters = conversion.parameters
    files = dict(conversion.files)
    if parameters is not None or [*shards] != [SINGLE]:
        files[INDEX] = index_text(weight_map, conversion.nbytes, parameters)
    writers = {file: partial(shard.writer, written) for file, shard in shards.items()}
    nbytes = write_shards(writers, files, folder, overwrite=overwrite, config=config_text(config))
    if overwrite:
        _warn_of_older_files(conversion, folder)
    return [folder.shown(file) for file in shards], nbytes


def _warn_of_older_files(conversion: Conversion, folder: Sink) -> None:
    """Warn of an older model's files that stay beside a new tokenizer; transformers prefers some to the new ones."""
    if not any(isinstance(content, bytes) for content in conversion.files.values()):
        return
    older = sorted(extras_of(folder.location).keys() - conversion.files.keys())
    if older:
        log.warning(
            "%s: %s stays from before, and other programs may load it in place of the new tokenizer: remove it if it "
            "belongs to another model",
            folder.location.shown,
            " and ".join(map(show, older)),
        )


# ---- a config.json in the destination when the source has none ----


def config_without_codes(conversion: Conversion, folder: Sink, target: dtypes.Dtype | None) -> dict[str, Any] | None:
    """Return the destination's old ``config.json`` with the quantization of the new weights, or without any.

    None if the new weights can be the codes it describes, if it needs no change, or if it cannot be read.
    """
    config = None if conversion.may_hold_codes else _config_in(folder)
    if config is None:
        return None
    if without_quantization(config) == config:
        return config_with(config, target, schemes=conversion.schemes) if conversion.schemes else None
    if not (is_own(config) and conversion.schemes):
        _warn_of_removal(folder)
    return config_with(config, target, restored=True, schemes=conversion.schemes)


def _warn_of_removal(folder: Sink) -> None:
    log.warning(
        "%s: removed the quantization of the old weights, because the new weights have none and their source has no %s",
        folder.shown(CONFIG),
        CONFIG,
    )


def _warn_of_old_config(conversion: Conversion, request: ConvertRequest) -> None:
    """Warn if a ``config.json`` beside a new ``model.safetensors`` claims a quantization that the weights lack."""
    folder, name = os.path.split(request.path)
    if request.format != SAFETENSORS or name != SINGLE or conversion.may_hold_codes:
        return
    beside = DiskSink(LOCAL, folder or ".")
    config = _config_in(beside)
    if config is None or (is_own(config) and conversion.schemes):
        return
    if without_quantization(config) != config:
        log.warning(
            "%s describes a quantization that the weights in %s do not have. Remove it, or other programs cannot load "
            "the weights. A conversion from folder to folder, with max_shard_size=, removes it",
            beside.shown(CONFIG),
            SINGLE,
        )


def _config_in(folder: Sink) -> dict[str, Any] | None:
    """Return the folder's ``config.json``, or None if it is missing or unreadable."""
    try:
        if CONFIG not in folder.names():
            return None
        return folder.read_json(CONFIG, CONFIG)
    except (FormatError, OSError):
        return None
