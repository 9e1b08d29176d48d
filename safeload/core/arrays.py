"""Arrays: values accepted as arrays or dicts of arrays, layouts of a file's tensors, arrays that share memory."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import UnsupportedError, exported
from . import dtypes
from .native import address_of
from .text import show, tensor_named

Array = np.ndarray[Any, Any]

# Largest size of an array in bytes: numpy's NPY_MAX_INTP.
MAX_ARRAY = (1 << 63) - 1

# Methods of a dict-like object, because `Mapping` recognizes only registered classes.
_METHODS = ("keys", "values", "items", "__getitem__", "__contains__", "__len__")


# safeload's modules for a library's arrays, by the top-level package of the array's class.
_FRAMEWORKS = {"torch": "torch", "jax": "jax", "jaxlib": "jax"}


@exported()
class TensorLike(Protocol):
    """What an array and a `QuantizedTensor` have in common: the type of ``checkpoint[name]``.

    Programs that need an array should call ``np.asarray(tensor)``, which dequantizes, or load with ``dtype``, which
    always gives arrays.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> with safeload.open("tiny-llama") as checkpoint:
        ...     tensor = checkpoint["model.norm.weight"]
        ...     tensor.shape, np.asarray(tensor, dtype="float32").max()
        ((64,), np.float32(1.0546875))
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, outermost axis first."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of ``np.asarray(tensor)``."""

    @property
    def ndim(self) -> int:
        """Number of axes."""

    @property
    def size(self) -> int:
        """Number of elements."""

    @property
    def nbytes(self) -> int:
        """Size in bytes; of a quantized tensor, with its scales."""

    def __array__(self) -> Array:
        """Return the values as an array."""

    def __getitem__(self, key: slice, /) -> Any:
        """Return rows of the first axis; a quantized tensor gives a quantized tensor."""


class ArraySpec(NamedTuple):
    """The layout of a tensor in its file, and of the loaded array."""

    dtype: np.dtype[Any]  # of the array
    shape: tuple[int, ...]  # of the array
    begin: int  # first byte in the file
    end: int  # one past the last byte
    source: int  # number of the dtype in the file
    target: int  # number of the array's dtype; equal to ``source`` if the bytes are not converted
    strides: tuple[int, ...] | None = None  # bytes between neighbours along each axis in the file; None for C order
    big_endian: bool = False  # whether the file's elements are big-endian


def as_array(value: Any, name: str = "") -> Array:
    """Convert a value to a numpy array."""
    refuse_masked(value, tensor_named(name) if name else "the array")
    return np.asarray(value)


def refuse_masked(value: Any, subject: str) -> None:
    """Refuse masked arrays, because their hidden values would be used as ordinary values."""
    # Not imported here, which takes milliseconds: masked arrays exist only if the caller has imported the module.
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)  # another thread may be importing the module
    if masked is not None and isinstance(value, masked):
        raise TypeError(f"{subject} is a masked array, and its mask would be lost: fill it first, with x.filled(...)")


def index_of(element: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of an element, given its position in C order."""
    index = []
    for length in reversed(shape):  # not `np.unravel_index`, which refuses the shapes of hostile files
        element, k = divmod(element, length)
        index.append(k)
    return tuple(reversed(index))


def with_article(noun: str) -> str:
    """Return a noun with its indefinite article: "a list", "an ArrayImpl"."""
    return f"{'an' if noun[:1] in tuple('AEIOaeio') else 'a'} {noun}"


def not_an_array(subject: str, value: Any, expected: str = "a NumPy array", *, safetensors: bool = False) -> TypeError:
    """Return the error for a value that is not an array, with advice on how to make one."""
    kind = type(value)
    # None for a library's other objects, such as models and dtypes.
    library = kind.__module__.partition(".")[0] if hasattr(value, "__array__") else None
    if isinstance(value, Mapping):
        advice = "safeload.flatten(tree) turns nested dicts into a dict with dotted names"
    elif safetensors and library in _FRAMEWORKS:
        advice = f"use save and save_file of safeload.{_FRAMEWORKS[library]}"
    elif library == "torch":
        advice = "x.detach().cpu().numpy() converts it"
        if str(getattr(value, "dtype", "")) == "torch.bfloat16":
            advice = "x.detach().cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16) converts it"
    elif hasattr(value, "__array__") or _is_numbers(value):
        advice = "numpy.asarray(x) converts it"
    else:
        advice = ""
    what = "None" if value is None else with_article(kind.__name__)
    return TypeError(f"{subject} is {what}, not {expected}" + (f": {advice}" if advice else ""))


def _is_numbers(value: Any) -> bool:
    """Return whether numpy converts a Python value to an array of numbers."""
    if not isinstance(value, (int, float, complex, list, tuple)):
        return False
    try:
        return dtypes.row_of(np.asarray(value).dtype) is not None
    except (ValueError, OverflowError):
        return False


def check_mapping(value: Any, what: str, of: str = "names to arrays") -> None:
    """Refuse an argument unless it is a dict or dict-like."""
    if type(value) is dict or isinstance(value, Mapping):
        return
    if not all(hasattr(value, method) for method in _METHODS):
        raise TypeError(f"{what} must be a mapping of {of}, got {type(value).__name__}")


def array_spec(row: dtypes.Dtype, shape: tuple[int, ...], begin: int, end: int) -> ArraySpec:
    """Return the array over a tensor of logical ``shape``, without conversion."""
    if row.bits < 8:
        shape = dtypes.array_shape(row, shape, end - begin)
    return ArraySpec(dtypes.array_dtype(row.number), shape, begin, end, row.number, row.number)


def array_over(
    buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, strides: tuple[int, ...] | None = None
) -> Array:
    """Return an array over part of a buffer, which the array keeps alive; in C order unless strides are passed."""
    try:
        array: Array = np.ndarray(shape, dtype, buffer, offset, strides)
    except ValueError as error:
        raise UnsupportedError(f"numpy {np.__version__} does not support shape {list(shape)}: {error}") from None
    return array


def over(
    buffer: Any, kinds: Sequence[np.dtype[Any]], shapes: Sequence[tuple[int, ...]], places: Sequence[int]
) -> list[Array]:
    """Return arrays in C order over parts of a buffer, at byte offsets ``places``."""
    try:
        return list(map(np.ndarray, shapes, kinds, repeat(buffer), places))
    except ValueError:  # again, to find the array
        return [array_over(buffer, *place) for place in zip(kinds, shapes, places, strict=True)]


def array_fits(shape: tuple[int, ...], itemsize: int) -> bool:
    """Return whether NumPy allows an array of this shape; it counts a zero-length axis as length 1."""
    return itemsize * (math.prod(shape) or math.prod(dim for dim in shape if dim)) <= MAX_ARRAY


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the bytes between neighbours along each axis of an array in C order."""
    strides = [itemsize] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * shape[k + 1]
    return tuple(strides)


def foreign_order(big_endian: bool) -> bool:
    """Return whether a byte order differs from this machine's."""
    return big_endian != (sys.byteorder == "big")


def swappable(array: Array) -> Array:
    """Return a view with a correct `byteswap`, because ml_dtypes before 0.5.4 does not swap bfloat16."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def byteswapped(array: Array) -> Array:
    """Return a copy with the bytes of each element reversed."""
    swapped: Array = swappable(array).byteswap().view(array.dtype)
    return swapped


# ---- arrays to fill, and arrays that share memory ----


def check_out_names(out: Mapping[str, Array], names: Iterable[str], operation: str) -> None:
    """Check that ``out`` has arrays only for these tensors."""
    check_mapping(out, "out")
    unknown = sorted(set(out) - set(names), key=str)
    if unknown:
        raise ValueError(f"out: {show(unknown[0])} is not a tensor of this {operation}")


def check_fits(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], out: Mapping[str, Array]) -> None:
    """Check that ``out`` has an array for a tensor, and that the array fits."""
    array = out.get(name)
    if array is None:
        raise ValueError(f"out: no array for tensor {show(name)}")
    refuse_masked(array, f"out: {show(name)}")
    if not isinstance(array, np.ndarray):
        raise not_an_array(f"out: {show(name)}", array)
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"out: {show(name)} is {array.dtype} {show(list(array.shape))}, but the tensor needs {dtype} "
            f"{show(list(shape))}"
        )
    if not array.flags.carray:
        raise ValueError(f"out: {show(name)} must be C-contiguous, aligned and writable")


def overlapping(targets: Mapping[str, Array], sources: Iterable[Array]) -> set[str]:
    """Return the names of targets overlapping the memory of a source, gaps between elements included."""
    spans = sorted(map(_bounds, sources))
    begins, reach = [begin for begin, _ in spans], [*accumulate((end for _, end in spans), max)]
    names = set()
    for name, target in targets.items():
        begin, end = _bounds(target)
        count = bisect_left(begins, end)  # sources that begin before the target's end
        if target.size and count and reach[count - 1] > begin:
            names.add(name)
    return names


_OWNS_DATA = attrgetter("flags.owndata")


def check_disjoint(out: Mapping[str, Array], contents: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Refuse arrays to fill that share memory, except a single array for tied tensors.

    Tensors of equal bytes have equal ``contents``, and may share memory.
    """
    arrays = out.values()
    if all(map(_OWNS_DATA, arrays)) and len(set(map(id, arrays))) == len(arrays):
        return
    spans = {name: (address_of(array), array.nbytes) for name, array in out.items() if array.nbytes}
    check_spans(spans, spans, contents, "out")


def check_spans(
    spans: Mapping[str, tuple[int, int]],
    written: Container[str],
    contents: Callable[[], Mapping[str, Any]],
    argument: str,
) -> None:
    """Refuse memory that is written under two names, or written and kept; see `check_disjoint`."""
    known: Mapping[str, Any] | None = None
    last = {True: (0, 0, ""), False: (0, 0, "")}  # the span that ends last, among written and among kept spans
    for name, (following, size) in sorted(spans.items(), key=itemgetter(1)):
        writes = name in written
        for begin, nbytes, other in [last[True], *([last[False]] if writes else [])]:
            if following >= begin + nbytes:
                continue
            known = contents() if known is None else known
            if (begin, nbytes) == (following, size) and known.get(other) == known.get(name, other):
                continue
            raise ValueError(
                f"{argument}: {show(other)} and {show(name)} share memory; pass an array of its own for each tensor"
            )
        if following + size > sum(last[writes][:2]):
            last[writes] = (following, size, name)


def _bounds(array: Array) -> tuple[int, int]:
    """Return the first byte that an array of any strides uses, and one past the last."""
    begin = end = array.__array_interface__["data"][0]
    if not array.size:
        return begin, end
    for length, stride in zip(array.shape, array.strides, strict=True):
        reach = (length - 1) * stride
        begin, end = begin + min(reach, 0), end + max(reach, 0)
    return begin, end + array.dtype.itemsize
