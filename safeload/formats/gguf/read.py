"""Read GGUF files into tables with metadata, and open split files, whose first part holds the metadata of the model.

The parser is csrc/formats/gguf.c, which describes the format. llama.cpp and gguf-py write split files,
``X-00001-of-00003.gguf``, with keys ``split.*``: https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...base.native import Error, check, ffi, lib, pointer, short
from ...base.paths import PathLike
from ...base.table import Table
from ...base.text import error_about, show
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, MissingShardError, UnsupportedError
from ...models.diffusion import is_rearranged
from ..registry import Candidate, Content, OpenRequest
from .values import Metadata

# Bytes of a remote file to read first, and the factor for each further read. The header of a model with its vocabulary
# has 2 to 15 MB.
_FIRST, _GROWTH = 128 << 10, 8
PREFIX = "split."
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"

# The largest number with five digits.
MAX_PARTS = 99_999

_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.ASCII | re.DOTALL | re.IGNORECASE)


class GgufTable(Table):
    """The tensors of a GGUF file, in the order of their bytes."""

    def __init__(self, address: int, metadata: Metadata) -> None:
        super().__init__(address)
        self._gguf = metadata
        self.ternary, self.unknown = metadata.ternary, metadata.unknown
        self.quantized = any(row.blocked for row in self.rows)

    def may_be_packed(self) -> bool:
        return bool(self.ternary) or lib.SL_NVFP4 in self.numbers or is_rearranged(self._gguf)

    def metadata(self) -> Metadata:
        return self._gguf


def read_table(file: WeightFile) -> GgufTable:
    """Return the tensors of an open file."""
    table, gguf, error = ffi.new("sl_table **"), ffi.new("sl_gguf **"), Error()
    if not file.remote:
        status = file.local.use(short.sl_gguf_read, file.size, *map(pointer, (table, gguf, error)))
    else:
        head = file.read_at(0, _FIRST)
        while True:
            status = lib.sl_gguf_parse_head(ffi.from_buffer(head), len(head), file.size, table, gguf, error)
            if status != lib.SL_E_TRUNCATED:
                break
            head += file.read_at(len(head), max(error.position, _GROWTH * len(head)) - len(head))
    check(status, error, file.path)
    return GgufTable(pointer(table[0]), Metadata(gguf[0]))


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the table of an open file."""
    candidate.file.table = read_table(candidate.file)
    return Content(candidate.file)


def write(
    tensors: Mapping[str, Any],
    metadata: Mapping[Any, Any] | None,
    path: PathLike,
    *,
    overwrite: bool = True,
    durable: bool = True,
) -> None:
    """Write tensors of any format; see `write.save_converted`."""
    from .write import save_converted  # opening does not need it

    save_converted(tensors, metadata or {}, path, overwrite=overwrite, durable=durable)


# ---- split files ----


def is_part(file: WeightFile) -> bool:
    """Return True if an open GGUF file is part of a split model."""
    return _COUNT in (file.table.metadata() or {})


def open_parts(file: WeightFile, open_part: Callable[[str], WeightFile]) -> tuple[list[WeightFile], Mapping[str, Any]]:
    """Return all parts in order, given any part, and the metadata of the model."""
    count, number = _value(file, _COUNT), _value(file, _NUMBER)
    if not 1 <= count <= MAX_PARTS or not 0 <= number < count:
        raise FormatError(f"{_NUMBER} is {number} and {_COUNT} is {count}, expected 0 to count - 1", file.path)
    files = file.files
    folder, base = files.split(file.place if files.remote else file.path)
    name = _NAME.fullmatch(base)
    if count == 1:
        paths = [file.path]
    elif name is None or (int(name[2]), int(name[3])) != (number + 1, count):
        raise error_about(
            UnsupportedError,
            f"this is part {number + 1} of {count} of a split GGUF file; to find the other parts, its name must end in "
            f"-{number + 1:05}-of-{count:05}.gguf",
            path=file.path,
        )
    else:
        paths = [files.join(folder, f"{name[1]}-{k + 1:05}-of-{count:05}{name[4]}") for k in range(count)]
    missing = [] if files.remote else [path for path in paths if not os.path.lexists(path)]
    if not missing:
        try:
            parts = files.each(lambda k: file if k == number else open_part(paths[k]), range(count))
        except FileNotFoundError as error:
            missing = [error.filename]
    if missing:
        shown = ", ".join(show(files.split(path)[1])[1:-1] for path in missing[:5])
        raise MissingShardError(
            f"{len(missing):,} of {count:,} parts are missing: {shown}{', ...' if len(missing) > 5 else ''}",
            file.path,
        )
    total = _value(parts[0], _TENSORS)
    for k, part in enumerate(parts):
        for key, expected in ((_NUMBER, k), (_COUNT, count), (_TENSORS, total)):
            if (value := _value(part, key)) != expected:
                raise FormatError(f"{key} is {value}, but {expected} according to the other parts", part.path)
    stored = sum(part.table.count for part in parts)
    if stored != total:
        raise FormatError(f"{_TENSORS} is {total}, but the parts have {stored} tensors", parts[0].path)
    metadata = parts[0].table.metadata()
    assert isinstance(metadata, Metadata)
    return parts, metadata.without(PREFIX)


def _value(file: WeightFile, key: str) -> int:
    value = (file.table.metadata() or {}).get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise FormatError(f"{key} must be an integer, got {show(value)}", file.path)
    return int(value)
