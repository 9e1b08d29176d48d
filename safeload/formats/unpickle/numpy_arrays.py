"""Pickled NumPy arrays: the globals in their pickles, and the places of their elements.

numpy writes ``_reconstruct(ndarray, (0,), b"b")`` and a state of (1, shape, dtype, True for Fortran order, bytes). In
protocol 5, it writes ``_frombuffer(bytes, dtype, shape, order)``. A scalar is ``scalar(dtype, bytes)``. Bytes are
``_codecs.encode(text, "latin1")`` below protocol 3. numpy 1 has ``numpy.core``, numpy 2 has ``numpy._core``.

Elements that a pickle stores as uncompressed bytes are read from the file directly. All other arrays, and arrays
whose byte order differs from the rest of the file, are written to an unnamed temporary file when we open the pickle.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

from ...base import dtypes
from ...base.arrays import array_fits, c_strides
from ...base.table import ListedTable, Listing, unreadable
from ...engine.run.weight_file import WeightFile, open_temporary
from .machine import Built, Fault, Global, Inert, LargeBytes, Unpickled, describe

ARRAY, TYPE, BYTES = "array", "type", "bytes"

# Names of the numpy kinds in the table of dtypes, with a place for their bits.
_NAMES = {"f": "float{}", "i": "int{}", "u": "uint{}", "c": "complex{}"}
# Dtypes of arrays other than tensors.
_TEXTS = re.compile(r"Python objects|(object|str|bytes)|[<>|=]?[SUO][0-9]*", re.ASCII)
_SPEC = re.compile(r"([<>|=]?)([a-zA-Z?])([0-9]{0,4})", re.ASCII)
_ML_DTYPES = (
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
    *("int4", "uint4", "int2", "uint2"),
)
_CORES, _BUILTINS = ("numpy.core", "numpy._core"), ("builtins", "__builtin__")
_ARRAY_CLASSES = ("ndarray", "memmap", "matrix", "core.memmap.memmap", "matrixlib.defmatrix.matrix")
_NUMPY_TYPES = (
    *("bool", "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "intc", "uintc"),
    *("longlong", "ulonglong", "float16", "float32", "float64", "longdouble", "complex64", "complex128"),
    *("str_", "bytes_", "object_", "datetime64", "timedelta64", "void"),
)


# ---- the values ----


class NumpyDtype(Built):
    """A dtype of NumPy."""

    __slots__ = ("big_endian", "itemsize", "name", "row")

    def __init__(self, name: str, row: dtypes.Dtype | None, *, big_endian: bool = False) -> None:
        self.name = name  # as NumPy prints it
        self.row = row  # of the table of dtypes; None for dtypes that weights do not have
        self.big_endian = big_endian
        self.itemsize = row.bits // 8 if row is not None else 0

    def build(self, state: Any) -> None:
        """Set a state of (version, order, subarray, names, fields, size, alignment, flags)."""
        if type(state) is not tuple or len(state) < 7:
            raise Fault(f"a dtype's state must be a tuple of 7 to 9, got {_kind(state)}")
        if state[1] not in ("<", ">", "|", "="):
            raise Fault(f"a dtype's byte order must be one of < > | =, got {describe(state[1])}")
        self.big_endian = state[1] == ">"
        if state[2] is not None or state[3] is not None:
            self.name, self.row = "elements of several fields", None


@dataclass(slots=True, eq=False, repr=False)
class NumpyArray(Built):
    """A NumPy array as the pickle describes it, checked when it is requested."""

    shape: tuple[int, ...] = ()
    dtype: NumpyDtype | None = None  # None until the state is set
    order: tuple[int, ...] | None = None  # axes in memory, outermost first; None for C order
    raw: bytes | bytearray | LargeBytes = b""
    items: list[Any] | None = None  # the elements, if they are Python objects

    def build(self, state: Any) -> None:
        """Set a state of (version, shape, dtype, True for Fortran order, bytes); the oldest states have no version."""
        if type(state) is not tuple or len(state) not in (4, 5):
            raise Fault(f"an array's state must be a tuple of 4 or 5, got {_kind(state)}")
        shape, dtype, fortran, raw = state[-4:]
        if type(fortran) not in (bool, int):
            raise Fault(f"an array's order must be a boolean, got {describe(fortran)}")
        self.set(raw, dtype, shape, "F" if fortran else "C")

    def set(self, raw: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> None:
        """Check and set the elements, dtype, shape and order of the array."""
        if type(dtype) is not NumpyDtype:
            raise Fault(f"an array's dtype must be a numpy dtype, got {describe(dtype)}")
        if type(shape) is int:
            shape = (shape,)
        if type(shape) is not tuple or any(type(dim) is not int or not 0 <= dim < 1 << 63 for dim in shape):
            raise Fault(f"an array's shape must be a tuple of counts, got {_kind(shape)}")
        if len(shape) > 64:
            raise Fault(f"an array of {len(shape)} axes, the limit is 64")
        if order not in ("C", "F", "K"):
            raise Fault(f"an array's order must be C, F or K, got {describe(order)}")
        if order == "K" and (
            type(axes) is not tuple or {*map(type, axes)} - {int} or sorted(axes) != list(range(len(shape)))
        ):
            raise Fault(f"an array's axes must list each of its {len(shape)} axes once, got {_kind(axes)}")
        if type(raw) is str:  # written by Python 2, which has no bytes
            raw = raw.encode("utf-8", "surrogatepass")
        self.dtype = dtype
        if dtype.row is None:
            self.shape = shape
            self.items = raw if type(raw) is list else None
            return
        if type(raw) not in (bytes, bytearray, LargeBytes):
            raise Fault(f"an array's elements must be bytes, got {describe(raw)}")
        if order == "K":
            self.order = tuple(axes.index(axis) for axis in range(len(axes)))
            shape = tuple(shape[axis] for axis in axes)
        elif order == "F":
            self.order = tuple(range(len(shape)))[::-1]
        expected = prod(shape) * dtype.itemsize
        if len(raw) != expected:
            raise Fault(f"an array {list(shape)} of {dtype.name} needs {expected} bytes, but has {len(raw)}")
        self.shape, self.raw = shape, raw


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if type(value) is tuple else describe(value)


# ---- the globals ----


def _dtype(args: tuple[Any, ...]) -> Any:
    if not 1 <= len(args) <= 3:
        raise Fault(f"numpy.dtype takes 1 to 3 arguments, got {len(args)}")
    spec = args[0]
    if type(spec) is Global and spec.kind == TYPE:
        name = spec.name.rpartition(".")[2].rstrip("_")
        row = dtypes.BY_NAME.get(name)
        return NumpyDtype(name, None if row is None or row.packed else row)
    if type(spec) is bytes:
        spec = spec.decode("latin-1")
    match = _SPEC.fullmatch(spec) if type(spec) is str else None
    if match is None:
        if type(spec) is str and spec in dtypes.BY_NAME and not dtypes.BY_NAME[spec].packed:
            return NumpyDtype(spec, dtypes.BY_NAME[spec])
        raise Fault(f"{describe(spec)} is not a numpy dtype")
    order, kind, size = match.groups()
    name = "bool" if kind in "b?" and size in ("", "1") else "Python objects" if kind == "O" else ""
    if kind in _NAMES and size:
        name = _NAMES[kind].format(8 * int(size))
    row = dtypes.BY_NAME.get(name)
    return NumpyDtype(name or spec, row, big_endian=order == ">")


def _reconstruct(args: tuple[Any, ...]) -> Any:
    if len(args) != 3:
        raise Fault(f"_reconstruct takes 3 arguments, got {len(args)}")
    if type(args[0]) is Global and args[0].kind == ARRAY:
        return NumpyArray()
    if type(args[0]) is Global:
        raise Fault(f"_reconstruct takes a class of arrays, got {describe(args[0])}")
    return Inert(getattr(args[0], "name", "numpy.ndarray"), args)


def _frombuffer(args: tuple[Any, ...]) -> Any:
    if len(args) not in (4, 5):
        raise Fault(f"_frombuffer takes 4 or 5 arguments, got {len(args)}")
    array = NumpyArray()
    array.set(*args)
    return array


def _scalar(args: tuple[Any, ...]) -> Any:
    """Make a Python number of a scalar."""
    if len(args) != 2 or type(args[0]) is not NumpyDtype:
        raise Fault("a numpy scalar takes a dtype and bytes")
    dtype, raw = args
    if type(raw) is str:
        raw = raw.encode("utf-8", "surrogatepass")
    if dtype.row is None:
        return f"<scalar of {dtype.name}>"
    if type(raw) is not bytes or len(raw) != dtype.itemsize:
        size = len(raw) if type(raw) is bytes else describe(raw)
        raise Fault(f"a scalar of {dtype.name} needs {dtype.itemsize} bytes, got {size}")
    import numpy as np

    if dtype.big_endian != (sys.byteorder == "big"):
        raw = np.frombuffer(raw, f"u{dtype.row.swap}").byteswap().tobytes()
    value = np.frombuffer(raw, dtypes.element_dtype(dtype.row.number))[0].item()
    return value if type(value) in (bool, int, float, complex) else float(value)


def _encode(args: tuple[Any, ...]) -> Any:
    """Make bytes of a text, as which protocols 0 to 2 write bytes."""
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1", "iso-8859-1"):
        raise Fault("_codecs.encode takes a text and 'latin1'")
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        raise Fault("a text for bytes has characters beyond 255") from None


def _bytes(args: tuple[Any, ...]) -> Any:
    if args:
        raise Fault(f"bytes takes no arguments, got {len(args)}")
    return b""


def _bytearray(args: tuple[Any, ...]) -> Any:
    """Make a bytearray as protocols 2 to 4 do: from bytes, or from text and an encoding."""
    if len(args) == 2:
        return bytearray(_encode(args))
    if len(args) > 1 or (args and type(args[0]) is not bytes):
        raise Fault("bytearray takes bytes")
    return bytearray(*args)


ROWS = (
    *(Global(f"{core}.multiarray._reconstruct", ARRAY + " maker", _reconstruct) for core in _CORES),
    *(Global(f"{core}.multiarray.scalar", "value", _scalar) for core in _CORES),
    *(Global(f"{core}.numeric._frombuffer", ARRAY + " maker", _frombuffer) for core in _CORES),
    Global("numpy.dtype", "value", _dtype),
    *(Global(f"numpy.{name}", ARRAY) for name in _ARRAY_CLASSES),
    *(Global(f"numpy.{name}", TYPE) for name in _NUMPY_TYPES),
    *(Global(f"{module}.{name}", TYPE) for module in ("ml_dtypes", "ml_dtypes._ml_dtypes_ext") for name in _ML_DTYPES),
    Global("_codecs.encode", BYTES, _encode, copies=True),
    *(Global(f"{module}.bytes", BYTES, _bytes) for module in _BUILTINS),
    *(Global(f"{module}.bytearray", BYTES, _bytearray, copies=True) for module in _BUILTINS),
)


# ---- the elements ----


class ArrayPlaces:
    """The places of a pickle's arrays: in the file, or in a temporary file."""

    def __init__(self, pickled: Unpickled, path: str, *, big_endian: bool) -> None:
        self._pickled = pickled
        self._path = path
        self._big_endian = big_endian  # byte order of the file's other tensors
        self._chunks: list[bytes] = []
        self._size = 64  # leading zeros: the temporary file must not look like another format
        self._begins: dict[tuple[int, int], int] = {}
        self.listings: list[Listing] = []  # of the temporary file

    def place(self, name: str, array: NumpyArray) -> Listing | None:
        """Describe an array in the file; None if it goes into the temporary file."""
        dtype = array.dtype
        if dtype is None or dtype.row is None:
            label = "no dtype" if dtype is None else dtype.name
            is_tensor = _TEXTS.fullmatch(label) is None
            return unreadable(name, label, array.shape, "is not a dtype of weights", is_tensor=is_tensor)
        if not array_fits(array.shape, dtype.itemsize):
            text = "elements need more bytes than any memory has"
            return unreadable(name, dtype.name, array.shape, text)
        strides = None if array.order is None else _strides(array, dtype.itemsize)
        swapped = dtype.itemsize > 1 and len(array.raw) > 0
        begin = None if swapped and dtype.big_endian != self._big_endian else self._in_file(array.raw)
        if begin is not None:
            return Listing(name, dtype.row, array.shape, begin, begin + len(array.raw), strides)
        begin = self.put(array.raw, dtype.row.swap if swapped and dtype.big_endian else 1)
        self.listings.append(Listing(name, dtype.row, array.shape, begin, begin + len(array.raw), strides))
        return None

    def _in_file(self, raw: bytes | bytearray | LargeBytes) -> int | None:
        """Return the offset of the bytes in the file; None if the file does not hold them unencoded."""
        base = self._pickled.base
        if base is None:
            return None
        if not raw:
            return base
        if type(raw) is LargeBytes:
            return base + raw.at
        at = self._pickled.places.get(id(raw))
        if at is None or self._pickled.data[at : at + len(raw)] != raw:  # the id may have been reused
            return None
        return base + at

    def put(self, raw: bytes | bytearray | LargeBytes, width: int) -> int:
        """Add bytes to the temporary file, once, and return their offset; numbers of ``width`` bytes are swapped."""
        key = (id(raw), width)
        begin = self._begins.get(key)
        if begin is None:
            begin = self._begins[key] = self._size
            data = bytes(raw)
            if width > 1:
                import numpy as np

                data = np.frombuffer(data, f">u{width}").astype(f"<u{width}").tobytes()
            self._chunks += (data, bytes(-len(data) % 64))
            self._size += len(data) + -len(data) % 64
        return begin

    def beside(self) -> WeightFile | None:
        """Return the temporary file with its table; None if no array needs it."""
        if not self.listings:
            return None

        def write(out: BinaryIO, path: str) -> None:
            out.write(bytes(64))
            out.writelines(self._chunks)

        file = open_temporary("safeload-pickle-", write, shown=self._path)
        file.table = ListedTable(self.listings)
        return file


def _strides(array: NumpyArray, itemsize: int) -> tuple[int, ...] | None:
    """Return the strides in bytes; None for C order."""
    order: Any = array.order
    if 0 in array.shape or sum(dim > 1 for dim in array.shape) < 2:
        return None
    in_memory = c_strides(tuple(array.shape[axis] for axis in order), itemsize)
    strides = [0] * len(order)
    for axis, step in zip(order, in_memory, strict=True):
        strides[axis] = step
    return None if tuple(strides) == c_strides(array.shape, itemsize) else tuple(strides)
