"""Rows of the golden run: a key and a text on one line, with everything normalised that depends on the machine."""

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from builders.paths import ROOT

import safeload

Rows = Iterator[tuple[str, str]]
# Longer texts are stored by their digest and their beginning.
LONGEST = 2000


def digest(content: Any, length: int = 32) -> str:
    """The first digits of the SHA-256."""
    return hashlib.sha256(content).hexdigest()[:length]


def escaped(text: str) -> str:
    """A text on one line without tabs, the same in every encoding."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text.replace("\\", "\\\\"))
    if len(shown) <= LONGEST:
        return shown
    return f"{shown[:200]}... ({len(shown)} characters, SHA-256 {digest(shown.encode())})"


def normalised(text: str, work: Path) -> str:
    """A text without paths, times, ports, addresses and versions."""
    for path, name in ((work, "<work>"), (ROOT, "<tree>")):
        text = text.replace(str(path), name)
    text = text.replace(safeload.__version__, "<version>")
    text = re.sub(r"\b\d+\.\d+ s\b", "<time> s", text)
    text = re.sub(r'("seconds": )[\d.e-]+', r"\1<time>", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "<date>", text)
    text = re.sub(r"-[0-9a-f]{8}(-\d{5}-of-\d{5})", r"-<random>\1", text)
    # The wording and position of json's own errors differ between versions of Python.
    text = re.sub(r"(is not JSON: )[A-Z].*?\(([^()]*), byte \d+\)", r"\1<json> (\2)", text)
    text = text.replace("(4300 digits)", "(4300)")
    text = re.sub(r"\b0x[0-9a-f]{8,}\b", "<address>", text)
    return re.sub(r"(127\.0\.0\.1|localhost):\d+", r"\1:<port>", text)


def of_error(error: BaseException) -> str:
    """Class and message."""
    return f"{type(error).__name__}: {error}"


def attempt(call: Callable[[], str]) -> str:
    """What a call returns, or its error."""
    try:
        return call()
    except Exception as error:
        return of_error(error)


def of_array(array: Any, length: int = 32) -> str:
    """Dtype, shape and digest of elements."""
    array = np.asarray(array)
    return f"{array.dtype.name} {list(array.shape)} {digest(np.ascontiguousarray(array).tobytes(), length)}"


def of_value(value: Any, length: int = 32) -> str:
    """The same of an array or of a quantized tensor with its scheme and parts."""
    if not isinstance(value, safeload.QuantizedTensor):
        return of_array(value, length)
    parts = {"data": value.data, **({} if value.scale is None else {"scale": value.scale})}
    content = " ".join(f"{name} {of_array(part, length)}" for name, part in parts.items())
    return f"{value.scheme} {list(value.shape)} axis {value.axis}: {content}"


def of_json(value: Any) -> str:
    """JSON of a report; its keys keep their order, which users see."""
    return json.dumps(value, ensure_ascii=False, default=str)


def of_files(root: Path) -> Iterable[tuple[str, str]]:
    """Path and content of each file below a folder, or of a file: JSON as text, the rest as size and digest."""
    for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
        if path.is_file():
            content = path.read_bytes()
            name = path.relative_to(root).as_posix() if root.is_dir() else path.name
            if path.suffix == ".npz":  # versions of zipfile write other headers
                with zipfile.ZipFile(io.BytesIO(content)) as archive:
                    for member in archive.infolist():
                        yield f"{name}/{member.filename}", f"{member.file_size} bytes {digest(archive.read(member))}"
                continue
            is_text = path.suffix in (".json", ".jinja", ".txt", ".html")
            yield name, content.decode() if is_text else f"{len(content)} bytes {digest(content)}"
