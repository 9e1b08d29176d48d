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
from .base.arrays import TensorLike as TensorLike
from .base.names import flatten as flatten
from .base.names import nest as nest
from .base.table import TensorInfo as TensorInfo
from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import TensorSlice as TensorSlice
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
from .engine.codes.quantized_tensor import QuantizedTensor as QuantizedTensor
from .engine.read.load import LoadStats as LoadStats
from .engine.run.cast import astype as astype
from .engine.run.memory import show_config as show_config
from .engine.stream import LayerStream as LayerStream
from .engine.stream import TensorStream as TensorStream
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
from .loading.entry import load as load
from .loading.entry import open as open
from .models.family import ModelFamily as ModelFamily
from .models.family import families as families
from .models.layout import Layout as Layout
from .models.layout import StackedTensor as StackedTensor
from .operations.checking.check import Limits as Limits
from .operations.checking.check import check as check
from .operations.checking.diff import DiffReport as DiffReport
from .operations.checking.diff import LayerDiff as LayerDiff
from .operations.checking.diff import TensorDiff as TensorDiff
from .operations.checking.diff import diff as diff
from .operations.checking.findings import CheckReport as CheckReport
from .operations.checking.findings import Finding as Finding
from .operations.checking.info import AdapterFitting as AdapterFitting
from .operations.checking.info import AdapterSummary as AdapterSummary
from .operations.checking.info import Info as Info
from .operations.checking.info import info as info
from .operations.checking.local_models import LocalModel as LocalModel
from .operations.checking.local_models import LocalModels as LocalModels
from .operations.checking.local_models import local_models as local_models
from .operations.checking.report import report as report
from .operations.checking.stats import HISTOGRAM_EDGES as HISTOGRAM_EDGES
from .operations.checking.stats import StatsTable as StatsTable
from .operations.checking.stats import TensorStats as TensorStats
from .operations.checking.stats import stats as stats
from .operations.convert.convert import convert as convert
from .operations.convert.decide import ConvertReport as ConvertReport
from .operations.convert.in_memory import QuantizedDict as QuantizedDict
from .operations.convert.in_memory import StackedDict as StackedDict
from .operations.convert.in_memory import load_quantized as load_quantized
from .operations.convert.in_memory import stack as stack
from .operations.convert.resume import Plan as Plan
from .operations.convert.resume import finalize as finalize
from .operations.convert.resume import plan_convert as plan_convert
from .operations.quantize.quantization_error import QuantizationStats as QuantizationStats
from .operations.quantize.quantization_error import QuantizationTable as QuantizationTable
from .operations.quantize.quantization_error import quantization_error as quantization_error
from .operations.quantize.quantize import quantize as quantize
from .operations.quantize.rules import KEPT_NAMES as KEPT_NAMES
from .operations.quantize.rules import Summary as Summary
from .operations.saving.edit import Edit as Edit
from .operations.saving.edit import edit as edit
from .operations.saving.patch import PatchReport as PatchReport
from .operations.saving.patch import apply_patch as apply_patch
from .operations.saving.patch import make_patch as make_patch
from .operations.saving.save import Writer as Writer
from .operations.saving.save import save as save
from .operations.trust.scan import ScanFinding as ScanFinding
from .operations.trust.scan import ScanReport as ScanReport
from .operations.trust.scan import scan as scan
from .operations.trust.verify import FileCheck as FileCheck
from .operations.trust.verify import VerifyReport as VerifyReport
from .operations.trust.verify import verify as verify
from .stores.signature import Signature as Signature

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
