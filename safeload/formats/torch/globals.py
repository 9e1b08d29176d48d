"""The allowlist of globals in a checkpoint, and the inert values built from them.

``globals.json`` has a row for each global that `torch.save` writes for tensors and the values beside them; this module
has those that pickle writes for NumPy arrays. Nothing else is allowed. A row is a dtype or storage class, with its code
in the table of dtypes (null if no array can represent it) and the bytes of an element; a class of tensors that adds
nothing to the values; or a function, and which function of this module stands for it. These build descriptions from any
arguments of a pickle; tensors.py checks requested tensors. Sources: torch/storage.py (_dtype_to_storage_type_map),
torch/csrc/api/include/torch/types.h.

numpy writes ``_reconstruct(ndarray, (0,), b"b")`` and a state of (1, shape, dtype, True for Fortran order, bytes). In
protocol 5, it writes ``_frombuffer(bytes, dtype, shape, order)``. A scalar is ``scalar(dtype, bytes)``. Bytes are
``_codecs.encode(text, "latin1")`` below protocol 3. numpy 1 has ``numpy.core``, numpy 2 has ``numpy._core``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from math import prod
from typing import Any

from ...core import dtypes
from ...core.files import read_data
from ...core.text import show
from ...errors import LimitError, UnsupportedError
from ..unpickle import FROM_TYPE, Built, Fault, Foreign, Global, Inert, LargeBytes, add_elements, describe, put_items

# Python attributes of a tensor. Real ones have two or three, and tensors can share a dict of attributes.
MAX_ATTRIBUTES = 100
# First arguments to look at for the shape and the dtype of an unreadable tensor.
_FEW = 8
# Key of the unknown class of a tensor in `PickledTensor.pending`.
SUBCLASS = "subclass"
_TABLE = read_data(__name__, "globals.json")
# Attributes that torch implements itself. It never saves them as state, and setting some changes the values.
TENSOR_OWN = frozenset(_TABLE["attributes_of_torch"])


@dataclass(slots=True, eq=False, repr=False)
class Storage:
    """Bytes shared by tensors."""

    type: Global  # row of its class or dtype
    key: str  # its name in the file
    count: int  # elements of the whole storage
    part: tuple[int, int] | None = None  # first element and number of elements of a part of this storage; None for all
    raw: bytes | None = None  # its bytes, if they are in the pickle itself

    @property
    def nbytes(self) -> int:
        """Bytes of the whole storage of this key."""
        return self.count * self.type.itemsize


@dataclass(slots=True, eq=False, repr=False)
class PickledTensor:
    """A tensor as the pickle describes it, unchecked."""

    storage: Any  # a `Storage`; of an unreadable tensor, why it is unreadable
    offset: Any  # first element in the storage
    shape: Any
    strides: Any  # elements between neighbours along each axis
    _: KW_ONLY
    dtype: Global | None  # None for the dtype of the storage
    # Operations to apply to the elements, such as {"conj": True}, and an unknown class. Of an unreadable tensor its
    # dtype in listings, or the name of the unknown global.
    pending: Any


def _arity(args: tuple[Any, ...], low: int, high: int, function: str) -> None:
    if not low <= len(args) <= high:
        raise Fault(f"{function} takes {low if low == high else f'{low} to {high}'} arguments, got {len(args)}")


def _ordered_dict(args: tuple[Any, ...]) -> Any:
    """Make an empty dict, or a dict of a list of pairs (Python 2)."""
    items: dict[Any, Any] = {}
    if not args:  # as for each tensor
        return items
    _arity(args, 0, 1, "OrderedDict")
    if type(args[0]) not in (list, tuple) or any(type(p) not in (list, tuple) or len(p) != 2 for p in args[0]):
        raise Fault("OrderedDict takes a list of pairs")
    put_items(items, [x for pair in args[0] for x in pair], {})
    return items


def _container(
    name: str, kinds: tuple[type, ...], expected: str, make: Callable[[Any], Any], *, least: int = 0, inert: str = ""
) -> Callable[[tuple[Any, ...]], Any]:
    """Return a function that makes a container of another; ``inert`` names its result for a placeholder."""

    def build(args: tuple[Any, ...]) -> Any:
        _arity(args, least, 1, name)
        if inert and args and type(args[0]) is Inert:
            return Inert(inert, args)
        if args and type(args[0]) not in kinds:
            raise Fault(f"{name} takes a {expected}, got {describe(args[0])}")
        return make(*args)

    build.__name__ = f"_{name.rpartition('.')[2].lower()}"  # in the table of the allowlist
    return build


def _set(items: Iterable[Any] = ()) -> Any:
    elements: set[Any] = set()
    add_elements(elements, items, {})
    return elements


def _complex(args: tuple[Any, ...]) -> Any:
    _arity(args, 2, 2, "complex")
    if type(args[0]) is not float or type(args[1]) is not float:
        raise Fault(f"complex takes two floats, got {describe(args[0])} and {describe(args[1])}")
    return complex(*args)


def _device(args: tuple[Any, ...]) -> Any:
    """Return the text of a device, or of a layout."""
    _arity(args, 1, 2, "torch.device")
    if type(args[0]) is not str or any(type(index) is not int for index in args[1:]):
        raise Fault("torch.device takes a name and a number, and _get_layout a name")
    return ":".join(map(str, args))


def _tensor(args: tuple[Any, ...], dtype: Global | None, pending: Any) -> Any:
    storage, offset, shape, strides = args[:4]
    if type(storage) is Inert:
        return PickledTensor(storage, 0, shape, (), dtype=None, pending=storage.name)
    if type(storage) is not Storage:
        raise Fault(f"a tensor's first argument must be a storage, got {describe(storage)}")
    return PickledTensor(storage, offset, shape, strides, dtype=dtype, pending=pending)


def _rebuild_tensor(args: tuple[Any, ...]) -> Any:
    _arity(args, 4, 4, "_rebuild_tensor")
    return _tensor(args, None, None)


def _rebuild_tensor_v2(args: tuple[Any, ...]) -> Any:
    if len(args) == 6 and type(args[0]) is Storage:  # as torch writes it: the fast path
        return PickledTensor(args[0], args[1], args[2], args[3], dtype=None, pending=None)
    _arity(args, 6, 7, "_rebuild_tensor_v2")
    return _tensor(args, None, args[6] if len(args) > 6 else None)


def _rebuild_tensor_v3(args: tuple[Any, ...]) -> Any:
    _arity(args, 7, 8, "_rebuild_tensor_v3")
    dtype = args[6]
    if type(dtype) is Foreign:  # a newer torch has more
        return PickledTensor(args[0], 0, args[2], (), dtype=None, pending=dtype.name)
    if type(dtype) is not Global or dtype.kind != DTYPE:
        raise Fault(f"_rebuild_tensor_v3 takes a dtype, got {describe(dtype)}")
    return _tensor(args, dtype, args[7] if len(args) > 7 else None)


def _rebuild_parameter(args: tuple[Any, ...]) -> Any:
    _arity(args, 3, 4, "_rebuild_parameter")
    if type(args[0]) not in (PickledTensor, Inert):
        raise Fault(f"a parameter's first argument must be a tensor, got {describe(args[0])}")
    if len(args) > 3:
        _check_attributes(args[3])
    return args[0]


def _rebuild_from_type(args: tuple[Any, ...]) -> Any:
    """Make a tensor with Python attributes, which are dropped, of (function, class, arguments, attributes)."""
    _arity(args, 4, 4, "_rebuild_from_type_v2")
    function, cls, inner, attributes = args
    if type(function) in (Foreign, Inert) or type(cls) is Inert:
        return Inert(FROM_TYPE, args)
    # Only rows of tensors: nobody would count the copies of a container. Not itself, which could nest without end.
    if type(function) is not Global or function.kind != TENSOR or function.name == FROM_TYPE or not function.build:
        raise Fault(f"_rebuild_from_type_v2 takes a function that makes a tensor, got {describe(function)}")
    if type(cls) is not Foreign and (type(cls) is not Global or cls.kind != CLASS):
        raise Fault(f"_rebuild_from_type_v2 takes a class of tensors, got {describe(cls)}")
    if type(inner) is not tuple:
        raise Fault(f"arguments must be a tuple, got {describe(inner)}")
    if type(cls) is not Foreign or type(attributes) is dict:  # an unknown class has states of its own
        _check_attributes(attributes)
    tensor = function.build(inner)
    if type(cls) is Foreign and type(tensor) is PickledTensor and type(tensor.pending) is not str:
        pending = tensor.pending if type(tensor.pending) is dict else {}
        tensor.pending = {**pending, SUBCLASS: cls.name}
    return tensor


def _check_attributes(attributes: Any) -> None:
    """Refuse a tensor's state unless it is Python attributes, which leave its values alone."""
    if attributes is None:
        return
    if type(attributes) is not dict:
        text = f"the attributes of a tensor must be a dict, got {describe(attributes)}; save tensor.as_subclass"
        raise Fault(f"{text}(torch.Tensor) without attributes", UnsupportedError)
    if len(attributes) > MAX_ATTRIBUTES:
        raise Fault(f"a tensor with more than {MAX_ATTRIBUTES} attributes", LimitError)
    for name in attributes:
        if type(name) is not str:
            raise Fault(f"the name of a tensor's attribute must be a string, got {describe(name)}")
        if name in TENSOR_OWN:
            text = f"sets the attribute {show(name)} of a tensor, which torch.save never writes"
            raise Fault(f"{text} and can change its values", UnsupportedError)


def _unreadable(kind: str, reason: str) -> Callable[[tuple[Any, ...]], Any]:
    """Return a function that makes an unreadable tensor; its shape is the first tuple of the arguments."""

    def build(args: tuple[Any, ...]) -> Any:
        parts = args[:_FEW]
        if kind == "sparse":
            parts = args[1][:_FEW][::-1] if len(args) > 1 and type(args[1]) is tuple else ()
        elif args and type(args[0]) is dict:
            parts = (args[0].get("values"),)
        shape = next((part for part in parts if type(part) is tuple), ())
        source = next((part for part in parts if type(part) in (PickledTensor, Storage, Global)), None)
        if type(source) is PickledTensor:
            source = source.dtype or source.storage
        row = source.type if type(source) is Storage else source
        names = _TABLE["dtypes_of_storages"]
        label = kind if type(row) is not Global else f"{kind} {names.get(row.name, row.name.removeprefix('torch.'))}"
        return PickledTensor(reason, 0, shape, (), dtype=None, pending=label)

    return build


STORAGE, DTYPE, TENSOR, CONTAINER, VALUE, CLASS = "storage", "dtype", "tensor", "container", "value", "class"

# By name in a row.
_FUNCTIONS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        *(_ordered_dict, _complex, _device, _rebuild_tensor, _rebuild_tensor_v2, _rebuild_tensor_v3),
        *(_rebuild_parameter, _rebuild_from_type),
        # Schedules of learning rates have a Counter of their milestones, protocols below 4 write a set as a list, and
        # Paddle writes a tensor as a tuple of its name and its array.
        _container("Counter", (dict,), "dict", dict, inert="collections.Counter"),
        _container("set", (list, tuple), "list", _set, inert="builtins.set"),
        _container("tuple", (list, tuple), "list", tuple, least=1),
        _container("torch.Size", (list, tuple), "tuple", tuple, least=1),
    )
}
# The fields of each kind beside "kind".
_FIELDS: dict[str, frozenset[str]] = {
    **dict.fromkeys((TENSOR, CONTAINER, VALUE), frozenset(("build",))),
    **dict.fromkeys((STORAGE, DTYPE), frozenset(("code", "itemsize"))),
    CLASS: frozenset(),
}


def _allowed(name: str, row: dict[str, Any]) -> Global:
    """Return the row of a global, and accept no other fields, functions and dtypes than those known."""
    kind, build, code = row["kind"], row.get("build"), row.get("code")
    if row.keys() - {"kind"} != _FIELDS[kind] or (code is not None and code not in dtypes.BY_CODE):
        raise ValueError(f"{name} is not a row of an allowed global: {row}")
    function = None if build is None else _FUNCTIONS[build]
    return Global(name, kind, function, code, row.get("itemsize", 0), copies=build is not None and kind != TENSOR)


# ---- NumPy's arrays ----

ARRAY, TYPE, BYTES = "array", "type", "bytes"

# Names of the numpy kinds in the table of dtypes, with a place for their bits.
_NAMES = {"f": "float{}", "i": "int{}", "u": "uint{}", "c": "complex{}"}
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


@dataclass(slots=True, eq=False, repr=False)
class NumpyDtype(Built):
    """A dtype of NumPy."""

    name: str  # as NumPy prints it
    row: dtypes.Dtype | None  # of the table of dtypes; None for dtypes that weights do not have
    big_endian: bool = False

    @property
    def itemsize(self) -> int:
        return self.row.bits // 8 if self.row is not None else 0

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
        if (expected := prod(shape) * dtype.itemsize) != len(raw):
            raise Fault(f"an array {list(shape)} of {dtype.name} needs {expected} bytes, but has {len(raw)}")
        self.shape, self.raw = shape, raw


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if type(value) is tuple else describe(value)


def _dtype(args: tuple[Any, ...]) -> Any:
    _arity(args, 1, 3, "numpy.dtype")
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
    return NumpyDtype(name or spec, dtypes.BY_NAME.get(name), big_endian=order == ">")


def _reconstruct(args: tuple[Any, ...]) -> Any:
    _arity(args, 3, 3, "_reconstruct")
    if type(args[0]) is Global:
        if args[0].kind != ARRAY:
            raise Fault(f"_reconstruct takes a class of arrays, got {describe(args[0])}")
        return NumpyArray()
    return Inert(args[0].name if type(args[0]) in (Foreign, Inert, NumpyDtype) else "numpy.ndarray", args)


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


# ---- the allowlist ----

# Built once for all threads, because rows are compared by identity.
ALLOWED: dict[str, Global] = {
    **{name: _allowed(name, row) for name, row in _TABLE["globals"].items()},
    **{name: Global(name, TENSOR, _unreadable(**row)) for name, row in _TABLE["unreadable"].items()},
    **{name: Global(name, VALUE) for name in _TABLE["schemes_of_quantized"]},
    **{row.name: row for row in ROWS},
}


def read_persistent_id(value: Any, storages: dict[str, Storage] | None) -> Any:
    """Return the storage of a persistent id, or the class in a ``("module", class, ...)`` of old files.

    A storage is ("storage", class, key, location, elements), in legacy files with a sixth item: None or (key, first
    element, elements) of a part. Ids of one key must agree; ``storages`` has those so far, None for files without.
    """
    if storages is None:
        text = "unexpected persistent id: the storages are not in this file; if the pickle was extracted from a torch "
        raise Fault(f"{text}checkpoint, open the checkpoint instead, which is a zip file")
    if type(value) is tuple and len(value) == 4 and value[0] == "module":
        return value[1]
    if type(value) is not tuple or len(value) not in (5, 6) or value[0] != "storage":
        raise Fault(f"a persistent id must be a tuple of 'storage' and 4 or 5 more values, got {_show_id(value)}")
    _, type_, key, _, count = value[:5]
    part = value[5] if len(value) == 6 else None
    if type(type_) in (Foreign, Inert):
        return Inert(type_.name, (key,))
    if type(type_) is not Global or type_.kind != STORAGE:
        raise Fault(f"a storage's class must be a storage class of torch, got {describe(type_)}")
    if type(key) is int and abs(key) < 1 << 63:  # torch.package
        key = str(key)
    if type(key) is not str:
        raise Fault(f"a storage's key must be a string, got {describe(key)}")
    if type(count) is not int or not 0 <= count < 1 << 63:
        raise Fault(f"storage {describe(key)}: the number of elements is {describe(count)}")
    first = storages.get(key)
    if first is None:
        first = storages[key] = Storage(type_, key, count)
    elif first.type is not type_ or first.count != count:
        text = f"storage {describe(key)} has {count} elements of {type_.name}, but had {first.count} of "
        raise Fault(f"{text}{first.type.name} before")
    if part is None:
        return first
    if type(part) is not tuple or len(part) != 3 or any(type(x) is not int for x in part[1:]):
        raise Fault(f"storage {describe(key)}: a part must be (key, first, elements), got {_show_id(part)}")
    _, begin, size = part
    if begin < 0 or size < 0 or begin + size > count:
        raise Fault(f"storage {describe(key)}: a part has elements [{begin}, {begin + size}) of {count}")
    return Storage(type_, key, count, (begin, size))


def _show_id(value: Any) -> str:
    if type(value) is not tuple:
        return describe(value)
    return f"({', '.join(describe(item) for item in value[:6])}{', ...' if len(value) > 6 else ''})"


_PACKAGE = r"(?i)[^/]*/\.data/extern_modules"
_SOURCE = r"(?s)[^/]*/([^/]+?)(?:/.*)?\.py"


def replaced_modules(names: Iterable[str]) -> str:
    """Return why the globals of a torch.package are not those of the allowlist, or "": its sources come first."""
    names = list(names)
    if not any(re.fullmatch(_PACKAGE, name) for name in names):
        return ""
    sources = {match[1] for name in names if (match := re.fullmatch(_SOURCE, name))}
    # megatron and pathlib: of the metadata of torch.distributed.checkpoint.
    replaced = ", ".join(sorted(sources & {"megatron", "pathlib", *(name.partition(".")[0] for name in ALLOWED)}))
    return replaced and f"torch.package imports its source of {replaced} instead of the installed module"
