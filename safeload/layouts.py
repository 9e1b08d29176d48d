"""Built-in layouts of inference engines, for `safeload.stack` and `safeload.convert`."""

from __future__ import annotations

from .models.layout import Layout, built_in

__all__ = ["MOONDREAM2"]

#: Moondream 2 for engines in C, Zig and similar languages: 24 text and 27 vision layers. Matrices of the vision tower
#: are transposed. Tensors are in the order of the file that the engine's own converter writes.
MOONDREAM2: Layout = built_in()["moondream2"]


def __dir__() -> list[str]:
    return __all__
