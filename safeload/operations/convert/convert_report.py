"""What a conversion wrote."""

from __future__ import annotations

from typing import NamedTuple

from ...base.text import plural, printable, show, size
from ..quantize.checkpoint import Summary


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
