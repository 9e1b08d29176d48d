"""safeload loads model weights into numpy: a drop-in for ``safetensors.numpy`` on a C core.

>>> from safeload.numpy import load_file, save_file
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .base.table import TensorInfo, TensorMeta, TensorSpec
from .checkpoint import Checkpoint, load, open
from .compat.safe_open import _safe_open_handle, safe_open
from .configuration import show_config
from .engine.cast import astype
from .engine.load import LoadStats
from .engine.quantized_tensor import QuantizedTensor
from .errors import (
    ForbiddenError,
    FormatError,
    LimitError,
    RangeError,
    SafeloadError,
    SafetensorError,
    TensorNotFoundError,
    UnsupportedError,
)
from .formats.safetensors.file import deserialize, serialize, serialize_file

if TYPE_CHECKING:
    from .operations.convert import convert
    from .operations.diff import DiffReport, TensorDiff, diff
    from .operations.quantize import QuantizationError, QuantizedDict, load_quantized, quantization_error, quantize
    from .operations.stack import Layout, StackedDict, StackedTensor, stack
    from .operations.stats import TensorStats, stats
    from .operations.validate.findings import Finding, Limits, ValidationReport
    from .operations.validate.run import validate

# Imported when they are first asked for: `import safeload` takes little longer than `import numpy`.
_LATER = {
    **dict.fromkeys(("Finding", "Limits", "ValidationReport"), "checks.findings"),
    **dict.fromkeys(("convert",), "conversion"),
    **dict.fromkeys(("DiffReport", "TensorDiff", "diff"), "differences"),
    **dict.fromkeys(
        ("QuantizationError", "QuantizedDict", "load_quantized", "quantization_error", "quantize"), "quantization"
    ),
    **dict.fromkeys(("Layout", "StackedDict", "StackedTensor", "stack"), "stacking"),
    **dict.fromkeys(("TensorStats", "stats"), "statistics"),
    **dict.fromkeys(("validate",), "validation"),
}
_MODULES = ("gguf", "layouts", "moon", "numpy")

__all__ = [
    "Checkpoint",
    "DiffReport",
    "Finding",
    "ForbiddenError",
    "FormatError",
    "Layout",
    "LimitError",
    "Limits",
    "LoadStats",
    "QuantizationError",
    "QuantizedDict",
    "QuantizedTensor",
    "RangeError",
    "SafeloadError",
    "SafetensorError",
    "StackedDict",
    "StackedTensor",
    "TensorDiff",
    "TensorInfo",
    "TensorMeta",
    "TensorNotFoundError",
    "TensorSpec",
    "TensorStats",
    "UnsupportedError",
    "ValidationReport",
    "__version__",
    "_safe_open_handle",
    "astype",
    "convert",
    "deserialize",
    "diff",
    "load",
    "load_quantized",
    "open",
    "quantization_error",
    "quantize",
    "safe_open",
    "serialize",
    "serialize_file",
    "show_config",
    "stack",
    "stats",
    "validate",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f".{name}", __name__)
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{module}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_MODULES})
