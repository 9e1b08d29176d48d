"""Load model weights from any file, folder or URL into NumPy, PyTorch or JAX.

- `open` and `load` read safetensors, torch checkpoints, GGUF, NumPy files, folders of shards and URLs (hf://, s3://,
  https://, ...), of which only the needed bytes are fetched. ``dtype=`` converts or dequantizes while reading.
  ``open(path).stream()`` reads ahead of a loop over the tensors.
- `load_quantized`, `quantize`, `quantization_error`: int8 and ggml's block formats
- `convert`, `stack`, `nest`, `flatten`: other formats, dtypes, names and layouts; `extract`: LoRA adapters
- `save`, `Writer`, `edit`, `make_patch`, `apply_patch`: save tensors as they come, change files, publish differences
- `verify`, `scan`: compare files with a signature or a manifest, judge the code that pickles name
- `info`, `check`, `stats`, `diff`, `report`: list, check, measure and compare checkpoints, as the commands do
- `safeload.remote`: paths in stores that your program has already opened
- `safe_open`, `safeload.numpy`, `safeload.torch`, `safeload.jax`: drop-in replacements for ``safetensors``
- `safeload.torch.load_checkpoint`, `safeload.jax.load_checkpoint`: any format as torch tensors or JAX arrays, on one
  device or several. torch and JAX are imported on first use

>>> from safeload.numpy import load_file, save_file
"""

from importlib import import_module

from ._version import __version__
from .core import forking as _forking  # noqa: F401 - registers hooks for forks

# The public names by module; their types are in __init__.pyi. A module is imported when one of its names is first
# used, so that programs pay only for the names they use, and `safeload --help` for none.
_MODULE_OF = {
    name: module
    for module, names in {
        "core.arrays": "TensorLike",
        "core.names": "flatten nest",
        "core.table": "TensorInfo",
        "core.checkpoint": "Checkpoint TensorSlice load open",
        "cluster": "run_piece",
        "compat.alias": "install_as_safetensors",
        "compat.safe_open": "PrefetchLoader SafeSlice _safe_open_handle safe_open",
        "compat.serialize": "TensorMeta TensorSpec deserialize serialize serialize_file",
        "core.stream": "LayerStream TensorStream",
        "core.quantized_tensor": "QuantizedTensor",
        "core.load": "LoadStats",
        "core.cast": "astype",
        "core.memory": "show_config",
        "errors": "ForbiddenError FormatError LimitError RangeError RemoteError RemotePermissionError "
        "RemoteTimeoutError SafeloadError SafetensorError TensorNotFoundError UnsupportedError VerificationError",
        "models.layout": "Layout StackedTensor",
        "models.family": "ModelFamily families",
        "conversion.convert": "convert",
        "conversion.decide": "ConvertReport",
        "conversion.in_memory": (
            "QuantizationStats QuantizationTable QuantizedDict StackedDict load_quantized quantization_error stack"
        ),
        "conversion.resume": "Plan finalize plan_convert",
        "checking.info": "AdapterFitting AdapterSummary Info info",
        "checking.local_models": "LocalModel LocalModels local_models",
        "checking.diff": "DiffReport LayerDiff TensorDiff diff",
        "checking.extract": "ExtractReport extract",
        "checking.stats": "HISTOGRAM_EDGES StatsTable TensorStats stats",
        "conversion.quantize": "quantize",
        "conversion.rules": "KEPT_NAMES Summary",
        "checking.report": "report",
        "editing.edit": "Edit edit",
        "editing.patch": "PatchReport apply_patch make_patch",
        "conversion.save": "Writer save",
        "trust.scan": "ScanFinding ScanReport scan",
        "checking.findings": "CheckReport Finding",
        "checking.check": "Limits check",
        "trust.verify": "FileCheck TensorCheck VerifyReport verify",
        "core.opening": "Signature",
    }.items()
    for name in names.split()
}
_MODULES = ("cluster", "errors", "gguf", "jax", "layouts", "moon", "numpy", "plugins", "remote", "torch")

# Every other name of the table is documented with its subject and resolves too, but neither `import *` nor completion
# offers it.
__all__ = [
    *("open", "load", "save", "convert", "check", "info", "report", "diff", "stats"),
    *("edit", "make_patch", "apply_patch"),
    *("quantize", "quantization_error", "load_quantized", "astype", "nest", "flatten"),
    *("safe_open", "scan", "verify", "local_models", "install_as_safetensors", "show_config"),
    *("Checkpoint", "QuantizedTensor", "TensorInfo", "Writer", "Signature"),
    *("Info", "CheckReport", "ConvertReport", "DiffReport"),
    *("SafeloadError", "SafetensorError", "FormatError", "UnsupportedError", "TensorNotFoundError"),
    *("ForbiddenError", "RemoteError", "VerificationError"),
    "__version__",
]

_DROP_INS = "it is in safeload.numpy, safeload.torch and safeload.jax"

# Advice for names that people try.
_INSTEAD = {
    "compare": "use safeload.diff(a, b)",
    "dequantize": 'pass dtype="float32" to safeload.load, or call the dequantize method of a QuantizedTensor',
    "describe": "use safeload.info(path)",
    "inspect": "use safeload.info(path)",
    "load_checkpoint": "it is in safeload.torch and safeload.jax; safeload.load returns NumPy arrays",
    "load_file": f"{_DROP_INS}; safeload.load reads any format",
    "load_model": "it is in safeload.torch",
    "merge": "pass adapters= to safeload.load or safeload.convert to merge LoRA adapters",
    "save_file": f"{_DROP_INS}; safeload.save writes files from a dict of arrays",
    "save_model": "it is in safeload.torch",
    "stream": "it is a method of a checkpoint: safeload.open(path).stream()",
    "summary": "use safeload.info(path)",
    "validate": "use safeload.check(path)",
    "take": "it is a method of a checkpoint: safeload.open(path).take(name, rows)",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        hint = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = globals()[name] = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    public = (name for name in __all__ if not name.startswith("_"))  # completion offers nothing else
    return sorted({*public, *_MODULES, *(name for name in globals() if name.startswith("__"))})
