"""List the globals of a pickle without building its values.

The machine of run.py refuses a pickle at its first fault, because it must build values. A list for judging must not end
there: this module follows the opcodes as CPython does, tracks only stack values that can name a global, and continues
where CPython would stop.

1. A value is a text, a small integer, a small tuple or dict of these, a call, or unknown. Texts name globals; the
   rest describes the arrays that joblib stores between opcodes.
2. Long arguments are skipped, not read. Memory is bounded by `MAX_TEXTS` and the number of opcodes.
3. Nothing is imported, looked up or called.
"""

from __future__ import annotations

import codecs
import math
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .machine import FROM_TYPE

# Opcodes of one pickle, and texts in its memo.
MAX_TRACED = 10_000_000
MAX_TEXTS = 2_000_000
# Longest text that can name a module or an attribute, and longest line of a number or name.
_LONGEST, _LINE = 1000, 10_000
# Longest line of any kind.
_LONGEST_LINE = 64 << 20
# Items of a tuple or dict that are kept: an array's state has fewer.
_ITEMS = 16
# Bytes to read at once: few at first, because most candidates of a search are not pickles.
_FIRST, _WINDOW = 512, 1 << 16
# Bytes of a line that count as an opcode.
_CHARGED = 64

_WRAPPER = "joblib.numpy_pickle.NumpyArrayWrapper"
_NAME, _DIGITS = re.compile(rb"[\w.\x80-\xff]*"), re.compile(rb"[\s0-9_+-]*")
_DTYPE = re.compile(r"[<>|=]?([?a-zA-Z])([0-9]{0,6})", re.ASCII)
# Elements of dtypes without a size in their name.
_SIZES = {"?": 1, "b": 1, "B": 1}


class Readable(Protocol):
    """Bytes at random access."""

    size: int

    def read_at(self, offset: int, size: int) -> bytes:
        """Return bytes, fewer at the end."""


class Traced(NamedTuple):
    """The globals that a pickle names and calls."""

    names: dict[str, int]  # its globals, with the offset of the first opcode that names each
    called: frozenset[str]  # those that it calls
    inner: list[tuple[int, int]]  # offset and size of the torch files inside it
    end: int  # offset after its STOP, or of the fault
    fault: str  # why it could not be followed to its STOP; empty if it could
    opcodes: int
    limited: bool  # the fault is a limit of this module, not of the pickle
    globals_at: frozenset[int] = frozenset()  # offsets of its GLOBAL and INST opcodes
    heads: frozenset[int] = frozenset()  # offsets of opcodes that only PROTO and FRAME precede


class _Unknown:
    """A value that names nothing."""


class _Computed:
    """The result of a call, which can be any value when the pickle runs."""

    __slots__ = ("args", "name")

    def __init__(self, name: str, args: Any) -> None:
        self.name = name
        self.args = args


class _Named:
    """A global."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Span:
    """Bytes of the pickle."""

    __slots__ = ("offset", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size


class TraceFault(Exception):  # noqa: N818 - ends a run; callers never see it
    """The pickle cannot be followed further."""


class TraceLimit(TraceFault):
    """The pickle may be sound, but is too large to follow, or unclear."""


_UNKNOWN, _LONG_TEXT = _Unknown(), _Unknown()
EXTENSION = "extension code"
COMPUTED = "<computed>"
# The function that pickles methods and nested classes: harmless in itself, but it reaches anything.
GETATTR = frozenset(("builtins.getattr", "__builtin__.getattr"))
_LOAD = "torch.storage._load_from_bytes"
# Attributes that no pickled method or nested class has.
_HIDING = frozenset(
    (
        *(
            "os",
            "posix",
            "nt",
            "sys",
            "subprocess",
            "builtins",
            "importlib",
            "ctypes",
            "runpy",
            "pty",
            "shutil",
            "socket",
            "eval",
        ),
        *("exec", "compile", "system", "popen", "open", "load", "loads", "run", "call", "get", "format", "modules"),
    )
)
NOT_TEXT = "<not text>"


class _Tracer:
    """The state of one run."""

    def __init__(self, content: Readable, begin: int, *, strict: bool) -> None:
        self.content = content
        self.strict = strict
        self.at = begin
        self.start = begin  # of the current opcode
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.count = 0  # memo entries, as MEMOIZE counts them
        self.names: dict[str, int] = {}
        self.called: set[str] = set()
        self.inner: list[tuple[int, int]] = []
        self.code = 0  # the current opcode
        self.nested = False  # the next bytes are a pickle inside this one
        self._buffer, self._base, self._window = b"", 0, _FIRST
        self.charged = 0  # opcodes that long lines stand for

    # ---- bytes ----

    def take(self, size: int) -> bytes:
        start = self.at - self._base
        data = self._buffer[start : start + size] if start >= 0 else b""
        if len(data) < size:
            self._base, self._buffer = self.at, self.content.read_at(self.at, max(size, self._window))
            self._window = min(2 * self._window, _WINDOW)
            data = self._buffer[:size]
            if len(data) < size:
                raise TraceFault("the bytes end before the pickle does")
        self.at += size
        return data

    def skip(self, size: int) -> None:
        if size > self.content.size - self.at:
            raise TraceFault("an argument extends past the end")
        self.at += size

    def line(self) -> bytes | None:
        """Return a line without its end, or None if it is long: it is skipped."""
        begin, at = self.at, self.at
        while True:
            data = self.content.read_at(at, _WINDOW if at > begin else 256)
            end = data.find(b"\n")
            if end >= 0:
                break
            at += len(data)
            if not data or at - begin > _LONGEST_LINE:
                self.charged += (at - begin) // _CHARGED
                raise (TraceLimit if data else TraceFault)("a line without an end")
        self.at = at + end + 1
        size = at + end - begin
        self.charged += size // _CHARGED
        return self.content.read_at(begin, size) if size <= _LINE else None

    # ---- values ----

    def missing(self, what: str) -> Any:
        """Return a value in place of a missing one, which ends the run of every reader."""
        if self.strict:
            raise TraceFault(what)
        return _UNKNOWN

    def top(self) -> Any:
        return self.stack[-1] if self.stack else self.missing("the stack is empty")

    def changed(self) -> Any:
        """Return the value at the top, of which an opcode calls a method."""
        value = self.top()
        if type(value) is _Named and not value.name.startswith(EXTENSION):
            self.called.add(value.name)
        return value

    def pop(self) -> Any:
        return self.stack.pop() if self.stack else self.missing("the stack is empty")

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            self.missing("no mark")
        items, self.stack = self.stack, self.marks.pop() if self.marks else []
        return self.passed(items)

    def passed(self, items: list[Any]) -> list[Any]:
        """Return items that go into a container or a call; getattr among them hides what it will read."""
        for item in items:
            if type(item) is _Named and item.name in GETATTR:
                self.names.setdefault(f"{COMPUTED}.getattr", self.start)
        return items

    def named(self, module: Any, name: Any) -> None:
        full = f"{_part(module)}.{_part(name)}"
        self.names.setdefault(full, self.start)
        self.stack.append(_Named(full))

    def call(self, function: Any, args: Any) -> None:
        name = function.name if isinstance(function, _Named) else ""
        args = args if isinstance(args, tuple) else None
        if args is not None or not name.startswith(EXTENSION):  # a byte of chance is an extension code
            self.called.add(name)
        if name == FROM_TYPE:
            name, args = self._passed_call(args)
        if name in GETATTR:
            self.attribute(args)
            return
        if name == _LOAD and args and type(args[0]) is _Span:
            self.inner.append((args[0].offset, args[0].size))
        self.stack.append(_Computed(name, args))

    def _passed_call(self, args: tuple[Any, ...] | None) -> tuple[str, tuple[Any, ...] | None]:
        """Return the call that `FROM_TYPE` makes; a call of `FROM_TYPE` itself hides its target."""
        function = args[0] if args else None
        name = function.name if type(function) is _Named else FROM_TYPE
        if name == FROM_TYPE:
            self.names.setdefault(f"{COMPUTED}.{FROM_TYPE}", self.start)
            return name, None
        self.called.add(name)
        inner = args[2] if args is not None and len(args) > 2 else None
        return name, inner if isinstance(inner, tuple) else None

    def attribute(self, args: tuple[Any, ...] | None) -> None:
        """Push an attribute of a global or of an object that the pickle has built."""
        owner, name = args[:2] if args is not None and len(args) > 1 else (None, None)
        plain = type(name) is str and not name.startswith("__") and name not in _HIDING
        if plain and type(owner) is _Named:
            self.named(owner.name, name)
        elif plain and type(owner) is _Computed:
            self.stack.append(_Computed("", None))
        else:
            self.named(_Computed("", None), name if type(name) is str else _Computed("", None))

    def put(self, number: int) -> None:
        value = self.top()
        self.count += number not in self.memo
        if len(self.memo) >= MAX_TEXTS and number not in self.memo and value is not _UNKNOWN:
            raise TraceLimit(f"more than {MAX_TEXTS:,} values in its memo")
        if value is _UNKNOWN and len(self.memo) >= MAX_TEXTS:
            self.memo.pop(number, None)
        else:
            self.memo[number] = value


def _part(value: Any) -> str:
    """Return a part of a global's name."""
    if type(value) is str:
        return value
    return COMPUTED if isinstance(value, _Computed) else NOT_TEXT


# ---- opcodes ----

_OPCODES: dict[int, Callable[[_Tracer], None]] = {}


def _op(codes: bytes) -> Callable[[Callable[[_Tracer], None]], Callable[[_Tracer], None]]:
    def add(function: Callable[[_Tracer], None]) -> Callable[[_Tracer], None]:
        for code in codes:
            _OPCODES[code] = function
        return function

    return add


def _plain(code: bytes, value: Any, width: int = 0) -> None:
    """Add an opcode that pushes a value that names nothing, after an argument of a fixed width."""

    def push(t: _Tracer) -> None:
        if width:
            t.take(width)
        t.stack.append(value)

    _op(code)(push)


for _code, _value in ((b"N", _UNKNOWN), (b"\x88", 1), (b"\x89", 0), (b"]", _UNKNOWN), (b"\x8f", _UNKNOWN)):
    _plain(_code, _value)
_plain(b")", ())
_plain(b"G", _UNKNOWN, 8)
_plain(b"\x97", _UNKNOWN)


@_op(b"\x80")
def _proto(t: _Tracer) -> None:
    if t.take(1)[0] > 5:
        raise TraceFault("a protocol above 5")


@_op(b"\x95")
def _frame(t: _Tracer) -> None:
    t.take(8)


@_op(b"\x98")
def _readonly(t: _Tracer) -> None:
    pass


def _number(code: bytes, width: int, *, signed: bool) -> None:
    def push(t: _Tracer) -> None:
        t.stack.append(int.from_bytes(t.take(width), "little", signed=signed))

    _op(code)(push)


_number(b"K", 1, signed=False)
_number(b"M", 2, signed=False)
_number(b"J", 4, signed=True)


def _sized(code: bytes, width: int, *, text: bool, integer: bool = False) -> None:
    """Add an opcode whose argument has a length before it."""

    def push(t: _Tracer) -> None:
        size = int.from_bytes(t.take(width), "little", signed=code in b"T\x8b")
        if size < 0:
            raise TraceFault("a negative length")
        if (text and size <= _LONGEST) or (integer and size <= 8):
            data = t.take(size)
            value = data.decode("utf-8", "backslashreplace") if text else int.from_bytes(data, "little", signed=True)
            t.stack.append(value)
        else:
            begin = t.at
            t.skip(size)
            t.stack.append(_LONG_TEXT if text else _UNKNOWN if integer else _Span(begin, size))

    _op(code)(push)


for _code, _width in ((b"\x8c", 1), (b"X", 4), (b"\x8d", 8), (b"U", 1), (b"T", 4)):
    _sized(_code, _width, text=True)
for _code, _width in ((b"C", 1), (b"B", 4), (b"\x8e", 8), (b"\x96", 8)):
    _sized(_code, _width, text=False)
for _code, _width in ((b"\x8a", 1), (b"\x8b", 4)):
    _sized(_code, _width, text=False, integer=True)


@_op(b"IL")
def _decimal(t: _Tracer) -> None:
    line = t.line()
    digits = line is not None and re.fullmatch(rb"-?[0-9]{1,18}L?", line)
    t.stack.append(int(line.rstrip(b"L")) if digits and line is not None else _UNKNOWN)


@_op(b"F")
def _float(t: _Tracer) -> None:
    t.line()
    t.stack.append(_UNKNOWN)


@_op(b"S")
def _string(t: _Tracer) -> None:
    line = (t.line() or b"").strip()
    value: Any = _LONG_TEXT
    if 2 <= len(line) <= _LONGEST and line[:1] == line[-1:] and line[:1] in (b"'", b'"'):
        try:
            value = codecs.escape_decode(line[1:-1])[0].decode("utf-8", "backslashreplace")
        except ValueError:
            raise TraceFault("a string with a bad escape") from None
    t.stack.append(value)


@_op(b"V")
def _unicode(t: _Tracer) -> None:
    line = t.line()
    if line is None or len(line) > _LONGEST:
        t.stack.append(_LONG_TEXT)
        return
    try:
        t.stack.append(line.decode("raw-unicode-escape"))
    except ValueError:
        raise TraceFault("a text with a bad escape") from None


@_op(b"c")
def _global(t: _Tracer) -> None:
    module, name = _lines(t)
    t.named(module, name)


@_op(b"i")
def _inst(t: _Tracer) -> None:
    t.named(*_lines(t))
    function = t.pop()  # named first: readers differ in what they do before they miss a mark
    t.call(function, tuple(t.pop_mark()))


def _lines(t: _Tracer) -> tuple[str, str]:
    """Return module and name; an end of line may be missing only where the bytes end."""
    parts = []
    for _ in range(2):
        begin, line = t.at, t.line()
        if line is None:
            line = t.content.read_at(begin, _LONGEST)
            if _NAME.fullmatch(line):
                raise TraceLimit("a global with a name of more than 10,000 bytes")
        parts.append(line.decode("utf-8", "backslashreplace"))
    return parts[0], parts[1]


@_op(b"\x93")
def _stack_global(t: _Tracer) -> None:
    name, module = t.pop(), t.pop()
    if not all(type(part) in (str, _Computed) or part is _LONG_TEXT for part in (name, module)):
        t.missing("a name that is no text")
    t.named(module, name)


def _extension(code: bytes, width: int) -> None:
    def push(t: _Tracer) -> None:
        number = int.from_bytes(t.take(width), "little", signed=width == 4)
        if number <= 0:
            t.missing("an extension code below 1")
        full = f"{EXTENSION} {number} of copyreg"
        t.names.setdefault(full, t.start)
        t.stack.append(_Named(full))

    _op(code)(push)


for _code, _width in ((b"\x82", 1), (b"\x83", 2), (b"\x84", 4)):
    _extension(_code, _width)


@_op(b"(")
def _mark(t: _Tracer) -> None:
    t.marks.append(t.stack)
    t.stack = []


@_op(b"0")
def _pop(t: _Tracer) -> None:
    if t.stack:
        t.stack.pop()
    else:
        t.pop_mark()


@_op(b"1")
def _pop_mark(t: _Tracer) -> None:
    t.pop_mark()


@_op(b"2")
def _dup(t: _Tracer) -> None:
    t.stack.append(t.top())


def _tuple(items: list[Any]) -> Any:
    return tuple(items) if len(items) <= _ITEMS else _UNKNOWN


@_op(b"t")
def _tuple_of_mark(t: _Tracer) -> None:
    items = t.pop_mark()  # first, because it replaces the stack
    t.stack.append(_tuple(items))


@_op(b"\x85\x86\x87")
def _short_tuple(t: _Tracer) -> None:
    count = t.code - 0x84
    items = t.passed([t.pop() for _ in range(count)])
    t.stack.append(tuple(reversed(items)))


@_op(b"}")
def _empty_dict(t: _Tracer) -> None:
    t.stack.append({})


def _set_items(t: _Tracer, pairs: list[Any]) -> None:
    into = t.changed()
    if type(into) is dict and len(into) + len(pairs) // 2 <= _ITEMS:
        into.update((key, value) for key, value in zip(pairs[::2], pairs[1::2], strict=False) if type(key) is str)


@_op(b"s")
def _setitem(t: _Tracer) -> None:
    value = t.pop()
    _set_items(t, t.passed([t.pop(), value]))


@_op(b"u")
def _setitems(t: _Tracer) -> None:
    _set_items(t, t.pop_mark())


@_op(b"d")
def _dict(t: _Tracer) -> None:
    pairs = t.pop_mark()
    t.stack.append({})
    _set_items(t, pairs)


@_op(b"a")
def _append(t: _Tracer) -> None:
    t.passed([t.pop()])
    t.changed()


@_op(b"e\x90")
def _appends(t: _Tracer) -> None:
    t.pop_mark()
    t.changed()


@_op(b"l\x91")
def _list(t: _Tracer) -> None:
    t.pop_mark()
    t.stack.append(_UNKNOWN)


@_op(b"R\x81")
def _reduce(t: _Tracer) -> None:
    args = t.pop()
    t.call(t.pop(), args)


@_op(b"\x92")
def _newobj_ex(t: _Tracer) -> None:
    t.pop()
    args = t.pop()
    t.call(t.pop(), args)


@_op(b"o")
def _obj(t: _Tracer) -> None:
    function, *args = t.pop_mark() or [_UNKNOWN]
    t.call(function, _tuple(args))


@_op(b"b")
def _build(t: _Tracer) -> None:
    state = t.pop()
    into = t.changed()
    if type(into) is _Named and into.name in t.called:  # no writer sets the attributes of a class or function
        t.names.setdefault(f"{COMPUTED}.{into.name}", t.start)
    if isinstance(into, _Computed) and _wraps(into) and type(state) is dict:
        _skip_array(t, state)


@_op(b"P")
def _persid(t: _Tracer) -> None:
    t.line()
    t.stack.append(_Computed("", None))


@_op(b"Q")
def _binpersid(t: _Tracer) -> None:
    t.pop()
    t.stack.append(_Computed("", None))


@_op(b"g")
def _get(t: _Tracer) -> None:
    _recall(t, _index(t))


@_op(b"h")
def _binget(t: _Tracer) -> None:
    _recall(t, t.take(1)[0])


@_op(b"j")
def _long_binget(t: _Tracer) -> None:
    _recall(t, struct.unpack("<I", t.take(4))[0])


def _recall(t: _Tracer, number: int) -> None:
    known = number in t.memo or len(t.memo) >= MAX_TEXTS
    t.stack.append(t.memo.get(number, _UNKNOWN) if known else t.missing(f"no memo entry {number}"))


@_op(b"p")
def _put(t: _Tracer) -> None:
    t.put(_index(t))


@_op(b"q")
def _binput(t: _Tracer) -> None:
    t.put(t.take(1)[0])


@_op(b"r")
def _long_binput(t: _Tracer) -> None:
    t.put(struct.unpack("<I", t.take(4))[0])


@_op(b"\x94")
def _memoize(t: _Tracer) -> None:
    t.put(t.count)


def _index(t: _Tracer) -> int:
    begin, line = t.at, t.line()
    if line is None:
        line = t.content.read_at(begin, _LONGEST)
        if _DIGITS.fullmatch(line):
            raise TraceLimit("a memo index of more than 10,000 digits")
    try:
        return int(line.partition(b"\0")[0])  # C reads "+1", " 1_0" and what precedes a NUL
    except ValueError:
        raise TraceFault("a memo index that is not a number") from None


# ---- joblib ----


def _wraps(value: _Computed) -> bool:
    """Return True if a call makes joblib's description of an array, after which come BUILD and the bytes."""
    if value.name == _WRAPPER:
        return True
    args: tuple[Any, ...] = value.args or ()  # copyreg._reconstructor, in protocols 0 and 1
    return bool(args) and isinstance(args[0], _Named) and args[0].name == _WRAPPER


def _skip_array(t: _Tracer, state: dict[str, Any]) -> None:
    """Skip the bytes of an array, or enter the pickle of an array of objects."""
    shape, dtype = state.get("shape"), state.get("dtype")
    size = _itemsize(dtype)
    if size == 0:
        t.nested = True
        return
    if size is None or type(shape) is not tuple or not all(type(dim) is int and 0 <= dim < 1 << 48 for dim in shape):
        raise TraceLimit("an array of joblib whose size is not plain")
    if type(state.get("numpy_array_alignment_bytes")) is int:
        t.skip(t.take(1)[0])
    t.skip(size * math.prod(shape))


def _itemsize(dtype: Any) -> int | None:
    """Return the bytes of an element of a pickled dtype, 0 for objects, None if it is not plain."""
    if not isinstance(dtype, _Computed) or dtype.name != "numpy.dtype" or not dtype.args:
        return None
    spec = dtype.args[0]
    match = _DTYPE.fullmatch(spec) if type(spec) is str else None
    if match is None:
        return None
    if match[1] == "O":
        return 0
    if match[1] == "U":
        return 4 * int(match[2] or 0) or None
    return (int(match[2]) if match[2] else _SIZES.get(match[1])) or None


# ---- a run ----


def trace(content: Readable, begin: int, most: int = MAX_TRACED, *, strict: bool = False) -> Traced:
    """Follow the opcodes of a pickle, at most ``most``, to its STOP or to a fault."""
    # If `strict`, a missing value, mark or memo entry is a fault too, as for every reader.
    tracer = _Tracer(content, begin, strict=strict)
    outer: list[_Tracer] = []
    opcodes = 0
    globals_at: set[int] = set()
    heads: set[int] = set()
    fault, limited, is_head = "", False, True
    try:
        while True:
            opcodes += 1
            if opcodes + tracer.charged > most:
                raise TraceLimit(f"more than {most:,} opcodes")
            tracer.start = tracer.at
            code = tracer.take(1)[0]
            if is_head:
                heads.add(tracer.start)
                is_head = code in b"\x80\x95"
            if code in b"ci":
                globals_at.add(tracer.start)
            if code == 0x2E:  # STOP
                tracer.top()
                if not outer:
                    break
                end, charged = tracer.at, tracer.charged
                tracer = outer.pop()
                tracer.at, tracer.charged = end, charged
                continue
            function = _OPCODES.get(code)
            if function is None:
                raise TraceFault(f"0x{code:02x} is not an opcode")
            tracer.code = code
            function(tracer)
            if tracer.nested:
                tracer.nested = False
                if len(outer) >= _ITEMS:
                    raise TraceLimit("arrays of joblib nested too deep")
                inner = _Tracer(content, tracer.at, strict=strict)
                inner.charged = tracer.charged
                inner.names, inner.called, inner.inner = tracer.names, tracer.called, tracer.inner
                outer.append(tracer)
                tracer = inner
    except TraceFault as problem:
        fault, limited = str(problem), isinstance(problem, TraceLimit)
    return Traced(
        tracer.names,
        frozenset(tracer.called),
        tracer.inner,
        tracer.start if fault else tracer.at,
        fault,
        opcodes + tracer.charged,
        limited,
        frozenset(globals_at),
        frozenset(heads),
    )
