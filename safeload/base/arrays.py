"""Arrays: which values functions accept as an array or as a dict of arrays, and how a tensor of a file becomes one."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import UnsupportedError
from . import dtypes
from .text import show

Array = np.ndarray[Any, Any]

# Largest size of an array in bytes: numpy's NPY_MAX_INTP.
MAX_ARRAY = (1 << 63) - 1

# Methods that identify a dict-like object: `Mapping` recognises only classes that are registered with it.
_METHODS = ("keys", "values", "items", "__getitem__", "__contains__", "__len__")


# Modules of safeload that save the arrays of a library as safetensors, by the package of their class.
_FRAMEWORKS = {"torch": "torch", "jax": "jax", "jaxlib": "jax"}


class ArraySpec(NamedTuple):
    """How a tensor becomes an array.

    Attributes:
        dtype: of the array.
        shape: of the array.
        begin: first byte in the file.
        end: one past the last byte in the file.
        source: number of the dtype in the file.
        target: number of the dtype that it is converted to; ``source`` if its bytes are not converted.
        strides: bytes between neighbours along each axis in the file; None for C order.
        big_endian: whether elements are big-endian in the file.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int
    source: int
    target: int
    strides: tuple[int, ...] | None = None
    big_endian: bool = False


def as_array(value: Any, name: str = "") -> Array:
    """A value as a numpy array.

    Args:
        value: an array, or anything that numpy converts to one.
        name: of the tensor; "" for a single array.

    Raises:
        TypeError: see `refuse_masked`.
    """
    refuse_masked(value, f"tensor {show(name)}" if name else "the array")
    array: Array = np.asarray(value)
    return array


def refuse_masked(value: Any, subject: str) -> None:
    """Refuses masked arrays: their hidden values would be used as ordinary ones.

    Raises:
        TypeError: a masked array.
    """
    # No import here, which would take milliseconds: masked arrays exist only where the caller has imported the module.
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise TypeError(f"{subject} is a masked array, and its mask would be lost: fill it first, with x.filled(...)")


def index_of(element: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of an element, given its position in C order."""
    index = []
    for length in reversed(shape):
        element, k = divmod(element, length)
        index.append(k)
    return tuple(reversed(index))


def with_article(noun: str) -> str:
    """A noun with its indefinite article: "a list", "an ArrayImpl"."""
    return f"{'an' if noun[:1] in tuple('AEIOaeio') else 'a'} {noun}"


def not_an_array(subject: str, value: Any, wanted: str = "a numpy array", *, safetensors: bool = False) -> TypeError:
    """The error for a value that is not an array, with what makes one of it.

    Args:
        subject: how messages name the value.
        value: what was given.
        wanted: what it should be.
        safetensors: whether it was to be saved as safetensors, for which frameworks have a module of their own.
    """
    kind = type(value)
    # None for what is of a library and no array: a model, a dtype.
    library = kind.__module__.partition(".")[0] if hasattr(value, "__array__") else None
    if isinstance(value, Mapping):
        advice = "safeload.flatten(tree) makes names with dots of nested dicts"
    elif safetensors and library in _FRAMEWORKS:
        advice = f"safeload.{_FRAMEWORKS[library]} has save and save_file for these"
    elif library == "torch":
        advice = "x.detach().cpu().numpy() makes one"
        if str(getattr(value, "dtype", "")) == "torch.bfloat16":
            advice = "x.detach().cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16) makes one"
    elif hasattr(value, "__array__") or _is_numbers(value):
        advice = "numpy.asarray(x) makes one"
    else:
        advice = ""
    what = "None" if value is None else with_article(kind.__name__)
    return TypeError(f"{subject} is {what}, not {wanted}" + (f": {advice}" if advice else ""))


def _is_numbers(value: Any) -> bool:
    """Whether numpy makes an array of numbers of a Python value."""
    if not isinstance(value, (int, float, complex, list, tuple)):
        return False
    try:
        return np.asarray(value).dtype.name in dtypes.BY_NAME
    except (ValueError, OverflowError):
        return False


def check_mapping(value: Any, what: str, of: str = "names to arrays") -> None:
    """Refuses arguments that are neither a dict nor dict-like.

    Args:
        value: an argument.
        what: how messages name it.
        of: what it maps.

    Raises:
        TypeError: the argument is not a mapping.
    """
    if not isinstance(value, Mapping) and not all(hasattr(value, method) for method in _METHODS):
        raise TypeError(f"{what} must be a mapping of {of}, not {type(value).__name__}")


def array_spec(row: dtypes.Dtype, shape: tuple[int, ...], begin: int, end: int) -> ArraySpec:
    """The array that shows a tensor of logical ``shape`` without conversion."""
    if row.bits < 8:
        shape = dtypes.array_shape(row, shape, end - begin)
    return ArraySpec(dtypes.array_dtype(row.number), shape, begin, end, row.number, row.number)


def array_over(
    buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, strides: tuple[int, ...] | None = None
) -> Array:
    """An array over part of a buffer, which it keeps alive; in C order if no strides are given.

    Raises:
        UnsupportedError: too many axes for this numpy (at most 32 before numpy 2).
    """
    try:
        array: Array = np.ndarray(shape, dtype, buffer, offset, strides)
    except ValueError as error:
        raise UnsupportedError(f"numpy {np.__version__} cannot show shape {list(shape)}: {error}") from None
    return array


def empty_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A new array with undefined values.

    Raises:
        UnsupportedError: see `array_over`; also an empty shape that is too large for a dtype wider than the file's.
    """
    try:
        return np.empty(shape, dtype)
    except ValueError as error:
        raise UnsupportedError(f"numpy {np.__version__} cannot show shape {list(shape)} as {dtype}: {error}") from None


def array_fits(shape: tuple[int, ...], itemsize: int) -> bool:
    """Whether numpy allows an array of this shape. Numpy treats a zero-length axis as length 1 here."""
    return itemsize * (math.prod(shape) or math.prod(dim for dim in shape if dim)) <= MAX_ARRAY


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Bytes between neighbours along each axis of an array in C order."""
    strides = [itemsize] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * shape[k + 1]
    return tuple(strides)


def foreign_order(big_endian: bool) -> bool:
    """Whether a byte order differs from this machine's."""
    return big_endian != (sys.byteorder == "big")


def swappable(array: Array) -> Array:
    """A view that has a right `byteswap`: that of ml_dtypes before 0.5.4 leaves bfloat16 as it is."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def byteswapped(array: Array) -> Array:
    """A copy with the bytes of each element in the other order."""
    swapped: Array = swappable(array).byteswap().view(array.dtype)
    return swapped
