# What type checkers see of the names that __init__.py imports on first use; a test compares the two.
from . import cluster as cluster
from . import errors as errors
from . import gguf as gguf
from . import jax as jax
from . import layouts as layouts
from . import moon as moon
from . import numpy as numpy
from . import plugins as plugins
from . import remote as remote
from . import torch as torch
from ._version import __version__ as __version__
from .checking.check import Limits as Limits
from .checking.check import check as check
from .checking.diff import DiffReport as DiffReport
from .checking.diff import LayerDiff as LayerDiff
from .checking.diff import TensorDiff as TensorDiff
from .checking.diff import diff as diff
from .checking.extract import ExtractReport as ExtractReport
from .checking.extract import extract as extract
from .checking.findings import CheckReport as CheckReport
from .checking.findings import Finding as Finding
from .checking.info import AdapterFitting as AdapterFitting
from .checking.info import AdapterSummary as AdapterSummary
from .checking.info import Info as Info
from .checking.info import info as info
from .checking.local_models import LocalModel as LocalModel
from .checking.local_models import LocalModels as LocalModels
from .checking.local_models import local_models as local_models
from .checking.report import report as report
from .checking.stats import HISTOGRAM_EDGES as HISTOGRAM_EDGES
from .checking.stats import StatsTable as StatsTable
from .checking.stats import TensorStats as TensorStats
from .checking.stats import stats as stats
from .cluster import run_piece as run_piece
from .compat.alias import install_as_safetensors as install_as_safetensors
from .compat.safe_open import PrefetchLoader as PrefetchLoader
from .compat.safe_open import SafeSlice as SafeSlice
from .compat.safe_open import _safe_open_handle as _safe_open_handle
from .compat.safe_open import safe_open as safe_open
from .compat.serialize import TensorMeta as TensorMeta
from .compat.serialize import TensorSpec as TensorSpec
from .compat.serialize import deserialize as deserialize
from .compat.serialize import serialize as serialize
from .compat.serialize import serialize_file as serialize_file
from .conversion.convert import convert as convert
from .conversion.decide import ConvertReport as ConvertReport
from .conversion.in_memory import QuantizationStats as QuantizationStats
from .conversion.in_memory import QuantizationTable as QuantizationTable
from .conversion.in_memory import QuantizedDict as QuantizedDict
from .conversion.in_memory import StackedDict as StackedDict
from .conversion.in_memory import load_quantized as load_quantized
from .conversion.in_memory import quantization_error as quantization_error
from .conversion.in_memory import stack as stack
from .conversion.quantize import quantize as quantize
from .conversion.resume import Plan as Plan
from .conversion.resume import finalize as finalize
from .conversion.resume import plan_convert as plan_convert
from .conversion.rules import KEPT_NAMES as KEPT_NAMES
from .conversion.rules import Summary as Summary
from .conversion.save import Writer as Writer
from .conversion.save import save as save
from .core.arrays import TensorLike as TensorLike
from .core.cast import astype as astype
from .core.checkpoint import Checkpoint as Checkpoint
from .core.checkpoint import TensorSlice as TensorSlice
from .core.checkpoint import load as load
from .core.checkpoint import open as open
from .core.load import LoadStats as LoadStats
from .core.memory import show_config as show_config
from .core.names import flatten as flatten
from .core.names import nest as nest
from .core.opening import Signature as Signature
from .core.quantized_tensor import QuantizedTensor as QuantizedTensor
from .core.stream import LayerStream as LayerStream
from .core.stream import TensorStream as TensorStream
from .core.table import TensorInfo as TensorInfo
from .editing.edit import Edit as Edit
from .editing.edit import edit as edit
from .editing.patch import PatchReport as PatchReport
from .editing.patch import apply_patch as apply_patch
from .editing.patch import make_patch as make_patch
from .errors import ForbiddenError as ForbiddenError
from .errors import FormatError as FormatError
from .errors import LimitError as LimitError
from .errors import RangeError as RangeError
from .errors import RemoteError as RemoteError
from .errors import RemotePermissionError as RemotePermissionError
from .errors import RemoteTimeoutError as RemoteTimeoutError
from .errors import SafeloadError as SafeloadError
from .errors import SafetensorError as SafetensorError
from .errors import TensorNotFoundError as TensorNotFoundError
from .errors import UnsupportedError as UnsupportedError
from .errors import VerificationError as VerificationError
from .models.family import ModelFamily as ModelFamily
from .models.family import families as families
from .models.layout import Layout as Layout
from .models.layout import StackedTensor as StackedTensor
from .trust.scan import ScanFinding as ScanFinding
from .trust.scan import ScanReport as ScanReport
from .trust.scan import scan as scan
from .trust.verify import FileCheck as FileCheck
from .trust.verify import TensorCheck as TensorCheck
from .trust.verify import VerifyReport as VerifyReport
from .trust.verify import verify as verify

__all__ = [
    "CheckReport",
    "Checkpoint",
    "ConvertReport",
    "DiffReport",
    "ForbiddenError",
    "FormatError",
    "Info",
    "QuantizedTensor",
    "RemoteError",
    "SafeloadError",
    "SafetensorError",
    "Signature",
    "TensorInfo",
    "TensorNotFoundError",
    "UnsupportedError",
    "VerificationError",
    "Writer",
    "__version__",
    "apply_patch",
    "astype",
    "check",
    "convert",
    "diff",
    "edit",
    "flatten",
    "info",
    "install_as_safetensors",
    "load",
    "load_quantized",
    "local_models",
    "make_patch",
    "nest",
    "open",
    "quantization_error",
    "quantize",
    "report",
    "safe_open",
    "save",
    "scan",
    "show_config",
    "stats",
    "verify",
]
