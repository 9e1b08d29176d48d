"""List the globals of a pickle without building its values.

The machine of run.py refuses a pickle at its first fault, because it must build values. A list for judging must not end
there: this machine follows the opcodes as CPython does, tracks only stack values that can name a global, and continues
where CPython would stop.

1. A value is a text, a number, None, a small tuple or dict of these, a call, or unknown. Texts name globals; the rest
   describes the arrays that joblib stores between opcodes.
2. Long arguments are skipped, not read. Memory is bounded by `MAX_TEXTS` and the number of opcodes.
3. Nothing is imported, looked up or called.
"""

from __future__ import annotations

import codecs
import math
import re
from typing import Any, NamedTuple

from ...errors import FormatError, LimitError
from ..zip import Readable
from .machine import FROM_TYPE, Fault
from .opcodes import MAX_LINE, OPCODES, Machine, unknown

# Opcodes of one pickle, and texts in its memo.
MAX_TRACED = 10_000_000
MAX_TEXTS = 2_000_000
# Longest text that can name a module or an attribute.
_LONGEST = 1000
# Longest line of any kind.
_LONGEST_LINE = 64 << 20
# Items of a tuple or dict that are kept: an array's state has fewer.
_ITEMS = 16
# Bytes to read at once: few at first, because most candidates of a search are not pickles.
_FIRST, _WINDOW = 512, 1 << 16
# Bytes of a line that count as an opcode.
_CHARGED = 64

# A class of joblib, which several of its modules import, and the attributes that tell the size of an array.
_WRAPPER = ".NumpyArrayWrapper"
_ATTRIBUTES = ("shape", "dtype", "numpy_array_alignment_bytes")
_NAME, _DIGITS = re.compile(rb"[\w.\x80-\xff]*"), re.compile(rb"[\s0-9_+-]*")
_SMALL = re.compile(rb"-?[0-9]{1,18}")
_DTYPE = re.compile(r"[<>|=]?([?a-zA-Z])([0-9]{0,6})", re.ASCII)
# Elements of dtypes without a size in their name.
_SIZES = {"?": 1, "b": 1, "B": 1}


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

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: Any) -> None:
        self.name = name
        self.args = args
        self.state: Any = None  # set by BUILD; unknown after a second one


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


class _Tracer(Machine):
    """The machine that lists globals; it raises nothing but `Fault`."""

    __slots__ = (
        *("called", "charged", "_content", "count", "has_arrays", "inner", "joblib", "memo", "names", "nested"),
        *("start", "strict", "_base", "_buffer", "_window"),
    )

    def __init__(self, content: Readable, begin: int, *, strict: bool, joblib: bool) -> None:
        super().__init__(begin)
        self._content = content
        self.strict = strict  # a missing value, mark or memo entry is a fault
        self.joblib = joblib  # the reader is joblib, which reads arrays between opcodes
        self.has_arrays = False  # of joblib
        self.start = begin  # of the current opcode
        self.memo: dict[int, Any] = {}
        self.count = 0  # memo entries, as MEMOIZE counts them
        self.names: dict[str, int] = {}
        self.called: set[str] = set()
        self.inner: list[tuple[int, int]] = []
        self.nested = False  # the next bytes are a pickle inside this one
        self.charged = 0  # opcodes that long lines stand for
        self._buffer, self._base, self._window = b"", 0, _FIRST

    # ---- bytes ----

    def take(self, size: int) -> bytes:
        start = self.at - self._base
        data = self._buffer[start : start + size] if start >= 0 else b""
        if len(data) < size:
            self._base, self._buffer = self.at, self._content.read_at(self.at, max(size, self._window))
            self._window = min(2 * self._window, _WINDOW)
            data = self._buffer[:size]
            if len(data) < size:
                raise Fault("the bytes end before the pickle does")
        self.at += size
        return data

    def skip(self, size: int) -> None:
        """Pass over bytes without a copy."""
        if size > self._content.size - self.at:
            raise Fault("an argument extends past the end")
        self.at += size

    def line(self, limit: int = MAX_LINE) -> bytes:
        """Return a line without its end; of a line of more than `MAX_LINE` bytes, only the beginning."""
        start = self.at - self._base
        end = self._buffer.find(b"\n", start) if start >= 0 else -1
        if end >= 0:
            self.at = self._base + end + 1
            self.charged += (end - start) // _CHARGED
            return self._buffer[start : min(end, start + MAX_LINE + 1)]
        begin, at, head = self.at, self.at, b""
        while True:
            data = self._content.read_at(at, _WINDOW if at > begin else 256)
            end = data.find(b"\n")
            head = head if len(head) > MAX_LINE else head + (data if end < 0 else data[:end])
            if end >= 0:
                break
            at += len(data)
            if not data or at - begin > _LONGEST_LINE:
                self.charged += (at - begin) // _CHARGED
                raise Fault("a line without an end", LimitError if data else FormatError)
        self.at = at + end + 1
        self.charged += (at + end - begin) // _CHARGED
        return head[: MAX_LINE + 1]

    def name(self) -> str:
        line = self.line()
        if len(line) > MAX_LINE:
            line = line[:_LONGEST]
            if _NAME.fullmatch(line):
                raise Fault("a global with a name of more than 10,000 bytes", LimitError)
        return line.decode("utf-8", "backslashreplace")

    def frame(self, size: int) -> None:
        pass

    # ---- the stack and the memo ----

    def missing(self, what: str) -> Any:
        """Return a value in place of a missing one, which ends the run of every reader."""
        if self.strict:
            raise Fault(what)
        return _UNKNOWN

    def pop(self) -> Any:
        return self.stack.pop() if self.stack else self.missing("the stack is empty")

    def top(self) -> Any:
        return self.stack[-1] if self.stack else self.missing("the stack is empty")

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            self.missing("no mark")
        items, self.stack = self.stack, self.marks.pop() if self.marks else []
        return self._passed(items)

    def _passed(self, items: list[Any]) -> list[Any]:
        """Return items that go into a container or a call; getattr among them hides what it will read."""
        for item in items:
            if type(item) is _Named and item.name in GETATTR:
                self.names.setdefault(f"{COMPUTED}.getattr", self.start)
        return items

    def _changed(self) -> Any:
        """Return the value at the top, of which an opcode calls a method."""
        value = self.top()
        if type(value) is _Named and not value.name.startswith(EXTENSION):
            self.called.add(value.name)
        return value

    def recall(self, number: int) -> Any:
        known = number in self.memo or len(self.memo) >= MAX_TEXTS
        return self.memo.get(number, _UNKNOWN) if known else self.missing(f"no memo entry {number}")

    def remember(self, number: int, value: Any) -> None:
        self.count += number not in self.memo
        if len(self.memo) >= MAX_TEXTS and number not in self.memo and value is not _UNKNOWN:
            raise Fault(f"more than {MAX_TEXTS:,} values in its memo", LimitError)
        if value is _UNKNOWN and len(self.memo) >= MAX_TEXTS:
            self.memo.pop(number, None)
        else:
            self.memo[number] = value

    def memoize(self) -> None:
        self.remember(self.count, self.top())

    def index(self) -> int:
        line = self.line()
        if len(line) > MAX_LINE:
            line = line[:_LONGEST]
            if _DIGITS.fullmatch(line):
                raise Fault("a memo index of more than 10,000 digits", LimitError)
        try:
            return int(line.partition(b"\0")[0])  # C reads "+1", " 1_0" and what precedes a NUL
        except ValueError:
            raise Fault("a memo index that is not a number") from None

    # ---- values ----

    def integer(self, digits: bytes) -> Any:
        return int(digits) if _SMALL.fullmatch(digits) else _UNKNOWN

    def long(self, size: int) -> Any:
        if size < 0:
            raise Fault("a negative length")
        return self.number(size, signed=True) if size <= 8 else self._skipped(size, _UNKNOWN)

    def _skipped(self, size: int, value: Any) -> Any:
        self.skip(size)
        return value

    def real(self, digits: bytes) -> Any:
        return _UNKNOWN

    def text(self, size: int) -> Any:
        if size > _LONGEST:
            return self._skipped(size, _LONG_TEXT)
        return self.take(size).decode("utf-8", "backslashreplace")

    string = text

    def quoted(self, line: bytes) -> Any:
        if not 2 <= len(line) <= _LONGEST or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            return _LONG_TEXT
        try:
            return codecs.escape_decode(line[1:-1])[0].decode("utf-8", "backslashreplace")
        except ValueError:
            raise Fault("a string with a bad escape") from None

    def escaped(self, line: bytes) -> Any:
        if len(line) > _LONGEST:
            return _LONG_TEXT
        try:
            return line.decode("raw-unicode-escape")
        except ValueError:
            raise Fault("a text with a bad escape") from None

    def content(self, size: int, kind: type = bytes) -> Any:
        return self._skipped(size, _Span(self.at, size))

    # ---- containers ----

    def new(self, kind: type, items: list[Any]) -> Any:
        if kind is dict:
            return _updated({}, items)
        return tuple(self._passed(items)) if kind is tuple and len(items) <= _ITEMS else _UNKNOWN

    def extend(self, values: list[Any], kind: type = list) -> None:
        self._passed(values)
        self._changed()

    def set_items(self, pairs: list[Any]) -> None:
        self._passed(pairs)
        into = self._changed()
        if type(into) is dict:
            _updated(into, pairs)

    def build(self, state: Any) -> None:
        into = self._changed()
        if type(into) is _Named and into.name in self.called:  # no writer sets the attributes of a class or function
            self.names.setdefault(f"{COMPUTED}.{into.name}", self.start)
        if isinstance(into, _Computed):
            into.state = state if into.state is None else _UNKNOWN
            if _wraps(into):
                self.has_arrays = True
                if self.joblib:
                    _skip_array(self, into.state)

    # ---- globals, calls, and data outside the pickle ----

    def named(self, module: Any, name: Any) -> Any:
        if not all(type(part) in (str, _Computed) or part is _LONG_TEXT for part in (name, module)):
            self.missing("a name that is no text")
        full = f"{_part(module)}.{_part(name)}"
        self.names.setdefault(full, self.start)
        return _Named(full)

    def extension(self, number: int) -> Any:
        if number <= 0:
            self.missing("an extension code below 1")
        full = f"{EXTENSION} {number} of copyreg"
        self.names.setdefault(full, self.start)
        return _Named(full)

    def call(self, function: Any, args: Any) -> Any:
        name = function.name if isinstance(function, _Named) else ""
        args = args if isinstance(args, tuple) else None
        if args is not None or not name.startswith(EXTENSION):  # a byte of chance is an extension code
            self.called.add(name)
        if name == FROM_TYPE:
            name, args = self._passed_call(args)
        if name in GETATTR:
            return self._attribute(args)
        if name == _LOAD and args and type(args[0]) is _Span:
            self.inner.append((args[0].offset, args[0].size))
        return _Computed(name, args)

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

    def _attribute(self, args: tuple[Any, ...] | None) -> Any:
        """Return an attribute of a global or of an object that the pickle has built."""
        owner, name = args[:2] if args is not None and len(args) > 1 else (None, None)
        plain = type(name) is str and not name.startswith("__") and name not in _HIDING
        if plain and type(owner) is _Named:
            return self.named(owner.name, name)
        if plain and type(owner) is _Computed:
            return _Computed("", None)
        return self.named(_Computed("", None), name if type(name) is str else _Computed("", None))

    def joined(self, args: Any, keywords: Any) -> Any:
        return args

    def stored(self, key: Any, *, is_line: bool = False) -> Any:
        return _Computed("", None)

    def buffer(self, value: Any) -> Any:
        return _UNKNOWN if value is None else value


def _part(value: Any) -> str:
    """Return a part of a global's name."""
    if type(value) is str:
        return value
    return COMPUTED if isinstance(value, _Computed) else NOT_TEXT


def _updated(into: dict[Any, Any], pairs: list[Any]) -> dict[Any, Any]:
    """Set the items of a dict; an item None marks a dict that is large, or has keys other than short texts."""
    if len(into) + len(pairs) // 2 <= _ITEMS and all(type(key) is str for key in pairs[::2]):
        into.update(zip(pairs[::2], pairs[1::2], strict=False))
    else:
        into[None] = None
    return into


# ---- joblib ----


def _wraps(value: _Computed) -> bool:
    """Return True if a call makes joblib's description of an array, after which come BUILD and the bytes."""
    if value.name.endswith(_WRAPPER):
        return True
    args: tuple[Any, ...] = value.args or ()  # copyreg._reconstructor, in protocols 0 and 1
    return bool(args) and isinstance(args[0], _Named) and args[0].name.endswith(_WRAPPER)


def _skip_array(t: _Tracer, state: Any) -> None:
    """Skip the bytes of an array, or enter the pickle of an array of objects."""
    plain = type(state) is dict and None not in state
    shape, dtype, alignment = map(state.get, _ATTRIBUTES) if plain else (None, None, None)
    size = _itemsize(dtype)
    if size == 0:
        t.nested = True
        return
    sizes = (*shape, alignment or 0) if type(shape) is tuple else (None,)
    if size is None or not all(isinstance(dim, int) and 0 <= dim < 1 << 48 for dim in sizes):
        raise Fault("an array of joblib whose size is not plain", LimitError)
    if alignment is not None:
        t.skip(t.take(1)[0])
    t.skip(size * math.prod(sizes[:-1]))


def _itemsize(dtype: Any) -> int | None:
    """Return the bytes of an element of a pickled dtype, 0 for objects, None if it is not plain."""
    if not isinstance(dtype, _Computed) or dtype.name != "numpy.dtype" or not dtype.args:
        return None
    spec, state = dtype.args[0], dtype.state
    match = _DTYPE.fullmatch(spec) if type(spec) is str else None
    if match is None:
        return None
    kind, size = match[1], int(match[2] or 0)
    if state is not None:  # (version, order, subarray, names, fields, size, alignment, flags), which replaces the size
        if type(state) is not tuple or len(state) not in (8, 9) or state[0] not in (3, 4) or state[2] is not None:
            return None
        full, flags = state[5], state[7]
        if not isinstance(full, int) or not isinstance(flags, int):
            return None
        if flags & 1:  # it has objects
            return 0
        if kind in "SUV":
            return full if full > 0 else None
    if kind == "O":
        return 0 if state is None else None
    return (4 * size if kind == "U" else size or _SIZES.get(kind)) or None


# ---- a run ----


def trace(content: Readable, begin: int, most: int = MAX_TRACED, *, strict: bool = False) -> Traced:
    """Follow the opcodes of a pickle, at most ``most``, to its STOP or to a fault."""
    # If `strict`, a missing value, mark or memo entry is a fault too, as for every reader.
    traced, has_arrays = _follow(content, begin, most, strict=strict, joblib=True)
    if not has_arrays:
        return traced
    # Pickle's own reader takes the bytes of joblib's arrays for opcodes. By chance, they call nothing.
    plain, _ = _follow(content, begin, most, strict=strict, joblib=False)
    return traced._replace(
        names={name: at for name, at in plain.names.items() if name in plain.called} | traced.names,
        called=traced.called | (plain.called & plain.names.keys()),
        inner=list(dict.fromkeys((*traced.inner, *plain.inner))),
        opcodes=traced.opcodes + plain.opcodes,
    )


def _follow(content: Readable, begin: int, most: int, *, strict: bool, joblib: bool) -> tuple[Traced, bool]:
    """Return what a pickle names, and True if it has arrays of joblib."""
    tracer = _Tracer(content, begin, strict=strict, joblib=joblib)
    outer: list[_Tracer] = []
    opcodes = 0
    globals_at: set[int] = set()
    heads: set[int] = set()
    fault, limited, is_head = "", False, True
    try:
        while True:
            opcodes += 1
            if opcodes + tracer.charged > most:
                raise Fault(f"more than {most:,} opcodes", LimitError)
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
            function = OPCODES[code]
            if function is unknown:
                raise Fault(f"0x{code:02x} is not an opcode")
            function(tracer)
            if tracer.nested:
                tracer.nested = False
                if len(outer) >= _ITEMS:
                    raise Fault("arrays of joblib nested too deep", LimitError)
                inner = _Tracer(content, tracer.at, strict=strict, joblib=joblib)
                inner.charged = tracer.charged
                inner.names, inner.called, inner.inner = tracer.names, tracer.called, tracer.inner
                outer.append(tracer)
                tracer = inner
    except Fault as problem:
        fault, limited = str(problem), problem.kind is LimitError
    traced = Traced(
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
    return traced, (outer or [tracer])[0].has_arrays
