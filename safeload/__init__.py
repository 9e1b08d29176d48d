"""safeload opens any file or folder of model weights as arrays of numpy, torch or JAX, on a C core.

- `open`, `load`: safetensors, torch checkpoints, GGUF, files of numpy; folders, shards; URLs (hf://, s3://, https://,
  ...), of which only the bytes are read that are needed; true weights with ``dtype=``.
  ``open(path).stream()`` reads one tensor after the other, ahead of whoever takes them
- `load_quantized`, `quantize`, `quantization_error`: int8 and ggml's blocks
- `convert`, `stack`, `nest`, `flatten`: other formats, dtypes, names and layouts
- `validate`, `stats`, `diff`: whether a checkpoint is sound, and what is in it
- `safeload.remote`: paths in stores that the program has opened
- `safe_open`, `safeload.numpy`, `safeload.torch`, `safeload.jax`: drop-ins for ``safetensors``
- `safeload.torch.load_checkpoint`, `safeload.jax.load_checkpoint`: any format as tensors of torch, also on devices, or
  as arrays of JAX, also divided among devices. torch and JAX are imported when one of them is used

>>> from safeload.numpy import load_file, save_file
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .base import forking as _forking  # noqa: F401 - registers what a fork waits for
from .errors import (
    ForbiddenError,
    FormatError,
    LimitError,
    RangeError,
    RemoteError,
    RemotePermissionError,
    RemoteTimeoutError,
    SafeloadError,
    SafetensorError,
    TensorNotFoundError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from .base.table import TensorInfo
    from .checkpoint import Checkpoint
    from .compat.safe_open import _safe_open_handle, safe_open
    from .compat.safe_slice import SafeSlice
    from .compat.serialize import TensorMeta, TensorSpec, deserialize, serialize, serialize_file
    from .engine.codes.quantized_tensor import QuantizedTensor
    from .engine.read.load import LoadStats
    from .engine.run.cast import astype
    from .loading.entry import load, open
    from .models.layout import Layout, StackedTensor
    from .operations.convert.convert import convert
    from .operations.convert.convert_folder import finalize
    from .operations.convert.convert_report import ConvertReport
    from .operations.convert.planning import plan_convert
    from .operations.measure.diff import diff
    from .operations.measure.diff_report import DiffReport, TensorDiff
    from .operations.measure.stats import HISTOGRAM_EDGES, TensorStats, stats
    from .operations.pieces import run_piece
    from .operations.quantize.checkpoint import KEPT_NAMES, QuantizedDict, Summary, load_quantized
    from .operations.quantize.quantization_error import QuantizationError, quantization_error
    from .operations.quantize.quantize import quantize
    from .operations.quantize.stack import StackedDict, stack
    from .operations.sources.nest import flatten, nest
    from .operations.sources.plan import Plan
    from .operations.validate.findings import Finding, Limits, ValidationReport
    from .operations.validate.run import validate

# Modules of the public names, each imported on first access to one of its names: a program pays for what it uses, and
# `safeload --help` for nothing.
_LATER = {
    name: module
    for module, names in {
        "base.table": ("TensorInfo",),
        "checkpoint": ("Checkpoint",),
        "compat.safe_open": ("_safe_open_handle", "safe_open"),
        "compat.safe_slice": ("SafeSlice",),
        "compat.serialize": ("TensorMeta", "TensorSpec", "deserialize", "serialize", "serialize_file"),
        "engine.run.cast": ("astype",),
        "engine.read.load": ("LoadStats",),
        "engine.codes.quantized_tensor": ("QuantizedTensor",),
        "loading.entry": ("load", "open"),
        "models.layout": ("Layout", "StackedTensor"),
        "operations.convert.convert": ("convert",),
        "operations.convert.convert_folder": ("finalize",),
        "operations.convert.planning": ("plan_convert",),
        "operations.convert.convert_report": ("ConvertReport",),
        "operations.measure.diff": ("diff",),
        "operations.measure.diff_report": ("DiffReport", "TensorDiff"),
        "operations.pieces": ("run_piece",),
        "operations.sources.plan": ("Plan",),
        "operations.sources.nest": ("flatten", "nest"),
        "operations.quantize.quantization_error": ("QuantizationError", "quantization_error"),
        "operations.quantize.quantize": ("quantize",),
        "operations.quantize.checkpoint": ("KEPT_NAMES", "QuantizedDict", "Summary", "load_quantized"),
        "operations.quantize.stack": ("StackedDict", "stack"),
        "operations.measure.stats": ("HISTOGRAM_EDGES", "TensorStats", "stats"),
        "operations.validate.findings": ("Finding", "Limits", "ValidationReport"),
        "operations.validate.run": ("validate",),
    }.items()
    for name in names
}
_MODULES = ("jax", "layouts", "numpy", "remote", "torch")

__all__ = [
    "HISTOGRAM_EDGES",
    "KEPT_NAMES",
    "Checkpoint",
    "ConvertReport",
    "DiffReport",
    "Finding",
    "ForbiddenError",
    "FormatError",
    "Layout",
    "LimitError",
    "Limits",
    "LoadStats",
    "Plan",
    "QuantizationError",
    "QuantizedDict",
    "QuantizedTensor",
    "RangeError",
    "RemoteError",
    "RemotePermissionError",
    "RemoteTimeoutError",
    "SafeSlice",
    "SafeloadError",
    "SafetensorError",
    "StackedDict",
    "StackedTensor",
    "Summary",
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
    "finalize",
    "flatten",
    "load",
    "load_quantized",
    "nest",
    "open",
    "plan_convert",
    "quantization_error",
    "quantize",
    "run_piece",
    "safe_open",
    "serialize",
    "serialize_file",
    "show_config",
    "stack",
    "stats",
    "validate",
]


def show_config() -> None:
    """Prints versions, the instruction set in use, the number of threads and the compiler.

    Example:
        >>> import safeload
        >>> safeload.show_config()
        safeload         ...
        python           CPython ...
        numpy            ...
        instruction set  ...
        threads          ...
        compiler         ...
    """
    import platform

    import numpy

    from .base.native import TIER, available_tiers, ffi, lib, tier_name
    from .engine.run.threads import available_cpus

    others = ", ".join(tier_name(tier) for tier in available_tiers() if tier != TIER)
    rows = {
        "safeload": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}",
        "numpy": numpy.__version__,
        "instruction set": f"{tier_name(TIER)} (SAFELOAD_ISA takes also {others})" if others else tier_name(TIER),
        "threads": f"{available_cpus()} at most (SAFELOAD_NUM_THREADS)",
        "compiler": str(ffi.string(lib.sl_compiler()), "utf-8"),
    }
    for name, value in rows.items():
        print(f"{name:16} {value}")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    module = _LATER.get(name)
    if module is None and name in _modules():
        return import_module(f".{name}", __name__)
    if module is None:
        here = "; it is in safeload.numpy" if name in ("load_file", "save", "save_file") else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{here}")
    value = globals()[name] = getattr(import_module(f".{module}", __name__), name)
    return value


def __dir__() -> list[str]:
    # What is public: completion offers nothing else.
    public = (name for name in __all__ if not name.startswith("_"))
    return sorted({*public, *_modules(), *(name for name in globals() if name.startswith("__"))})


def _modules() -> tuple[str, ...]:
    """Names of the public modules, those of formats included."""
    from .formats.registry import ROWS

    return (*_MODULES, *(row.name for row in ROWS if row.public))
