"""safeload loads model weights into numpy: a drop-in for ``safetensors.numpy`` on a C core.

>>> from safeload.numpy import load_file, save_file
"""

from __future__ import annotations

from ._version import __version__
from .casting import astype
from .checkpoint import Checkpoint, load, open
from .configuration import show_config
from .conversion import convert
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
from .formats.safetensors import deserialize, serialize, serialize_file
from .handle import _safe_open_handle, safe_open
from .loading import LoadStats
from .quantization import QuantizationError, QuantizedDict, load_quantized, quantization_error, quantize
from .quantized import QuantizedTensor
from .stacking import Layout, StackedDict, StackedTensor, stack
from .tensor import TensorInfo, TensorMeta, TensorSpec

__all__ = [
    "Checkpoint",
    "ForbiddenError",
    "FormatError",
    "Layout",
    "LimitError",
    "LoadStats",
    "QuantizationError",
    "QuantizedDict",
    "QuantizedTensor",
    "RangeError",
    "SafeloadError",
    "SafetensorError",
    "StackedDict",
    "StackedTensor",
    "TensorInfo",
    "TensorMeta",
    "TensorNotFoundError",
    "TensorSpec",
    "UnsupportedError",
    "__version__",
    "_safe_open_handle",
    "astype",
    "convert",
    "deserialize",
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
]
