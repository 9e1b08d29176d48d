"""``safe_open`` as the alias of safetensors has it: the real package opens files for frameworks that safeload lacks."""

from __future__ import annotations

from typing import Any

from ..base.paths import PathLike
from .alias import real_compiled_module
from .safe_open import CONVERSIONS, safe_open


class AliasSafeOpen(safe_open):
    """`safeload.safe_open`, or the ``safe_open`` of the real package for TensorFlow, MLX and Paddle."""

    def __new__(cls, filename: PathLike = "", framework: str = "numpy", *arguments: Any, **options: Any) -> Any:
        """Return the real package's object for its frameworks, if the package is installed."""
        real = real_compiled_module() if framework in CONVERSIONS else None
        return super().__new__(cls) if real is None else real.safe_open(filename, framework, *arguments, **options)
