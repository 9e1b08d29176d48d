"""List the globals of a pickle without building its values, and judge each: harmless, unknown or dangerous.

The `Builder` of formats/unpickle.py refuses a pickle at its first fault, because it must build values. A list for
judging must not end there: this machine follows the opcodes as CPython does, tracks only stack values that can name a
global, and continues where CPython would stop.

1. A value is a text, a number, None, a small tuple or dict of these, a call, or unknown. Texts name globals; the rest
   describes the arrays that joblib stores between opcodes.
2. Long arguments are skipped, not read. Memory is bounded by `MAX_TEXTS` and the number of opcodes.
3. Nothing is imported, looked up or called.

The allowlist of `torch.globals` decides what is harmless. The table of dangerous names, ``dangerous.json``, decides
nothing else: it only gives a reason to names that are not on the allowlist anyway. It has names and modules by reason;
a module stands for everything in it. A name that is in neither is unknown, never harmless, like names that sound files
use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from ..core.files import read_data
from ..core.zip import Readable
from ..errors import FormatError, LimitError
from ..formats.unpickle import (
    FROM_TYPE,
    MAX_LINE,
    OPCODES,
    Fault,
    Foreign,
    Global,
    LargeBytes,
    Machine,
    unescaped,
    unknown,
)

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
_ARRAY_FIELDS = ("shape", "dtype", "numpy_array_alignment_bytes")
_NAME, _DIGITS = re.compile(rb"[\w.\x80-\xff]*"), re.compile(rb"[\s0-9_+-]*")
_SMALL = re.compile(rb"-?[0-9]{1,18}")
_DTYPE = re.compile(r"[<>|=]?([?a-zA-Z])([0-9]{0,6})", re.ASCII)
# Elements of dtypes without a size in their name.
_SIZES = {"?": 1, "b": 1, "B": 1}


@dataclass(slots=True, eq=False)
class _Computed:
    """The result of a call, which can be any value when the pickle runs."""

    name: str = ""
    args: tuple[Any, ...] = ()
    state: Any = None  # set by BUILD; unknown after a second BUILD


# Values that name nothing.
_UNKNOWN, _LONG_TEXT = object(), object()
EXTENSION = "extension code"
COMPUTED = "<computed>"
# The function that pickles methods and nested classes: harmless in itself, but it reaches anything.
GETATTR = frozenset(("builtins.getattr", "__builtin__.getattr"))
_LOAD = "torch.storage._load_from_bytes"
# Modules of which another module's attribute is as dangerous as they are: "logging.os.system".
_INSIDE = frozenset(
    ("os", "posix", "nt", "sys", "subprocess", "importlib", "ctypes", "runpy", "pty", "shutil", "socket")
)
# Attributes that no pickled method or nested class has.
_HIDING = _INSIDE.union(
    ("builtins", "eval", "exec", "compile", "system", "popen", "open", "load", "loads", "run", "call", "get"),
    ("format", "modules"),
)
NOT_TEXT = "<not text>"


class Tracer(Machine):
    """The machine that lists the globals that a pickle names and calls."""

    def __init__(self, content: Readable, begin: int, *, strict: bool, joblib: bool) -> None:
        super().__init__(begin)
        self._content = content
        self.strict = strict  # a missing value, mark or memo entry is a fault
        self.joblib = joblib  # the reader is joblib, which reads arrays between opcodes
        self.has_arrays = False  # of joblib
        self.start = begin  # of the current opcode
        self.count = 0  # memo entries, as MEMOIZE counts them
        self.names: dict[str, int] = {}  # globals, with the offset of the first opcode that names each
        self.called: set[str] = set()  # globals that the pickle calls
        self.inner: list[tuple[int, int]] = []  # offset and size of the torch files inside it
        self.globals_at: set[int] = set()  # offsets of its GLOBAL and INST opcodes
        self.heads: set[int] = set()  # offsets of opcodes that only PROTO and FRAME precede
        self.fault = ""  # why it could not be followed to its STOP; empty if it could
        self.limited = False  # the fault is a limit of this module, not of the pickle
        self.opcodes = 0  # also of long lines, which stand for several
        self.outer: list[Any] = []  # stacks and memos of the pickles around this one
        self._buffer, self._base, self._window = b"", 0, _FIRST

    @property
    def end(self) -> int:
        """The offset after STOP, or of the fault."""
        return self.start if self.fault else self.at

    def run(self, most: int) -> Tracer:
        """Follow at most ``most`` opcodes, and free their values."""
        is_head = True
        try:
            while True:
                self.opcodes += 1
                if self.opcodes > most:
                    raise Fault(f"more than {most:,} opcodes", LimitError)
                self.start = self.at
                code = self.take(1)[0]
                if is_head:
                    self.heads.add(self.start)
                    is_head = code in b"\x80\x95"
                if code in b"ci":
                    self.globals_at.add(self.start)
                if code == 0x2E:  # STOP
                    self.top()
                    if not self.outer:
                        break
                    self.stack, self.marks, self.memo, self.count = self.outer.pop()
                    continue
                function = OPCODES[code]
                if function is unknown:
                    raise Fault(f"0x{code:02x} is not an opcode")
                function(self)
        except Fault as problem:
            self.fault, self.limited = str(problem), problem.kind is LimitError
        self.stack, self.marks, self.memo, self.outer, self._buffer = [], [], {}, [], b""
        return self

    # ---- bytes ----

    def _fill(self, size: int = 0) -> None:
        """Read at least ``size`` bytes from here on."""
        self._base, self._buffer = self.at, self._content.read_at(self.at, max(size, self._window))
        self._window = min(2 * self._window, _WINDOW)

    def take(self, size: int) -> bytes:
        start = self.at - self._base
        data = self._buffer[start : start + size]
        if len(data) < size:
            self._fill(size)
            data = self._buffer[:size]
            if len(data) < size:
                raise Fault("the bytes end before the pickle does")
        self.at += size
        return data

    def skip(self, size: int, value: Any = None) -> Any:
        """Pass over bytes without a copy, and return a value in their place."""
        if size > self._content.size - self.at:
            raise Fault("an argument extends past the end")
        self.at += size
        return value

    def line(self, limit: int = MAX_LINE) -> bytes:
        """Return a line without its end; of a line of more than `MAX_LINE` bytes, only the beginning."""
        begin, line = self.at, b""
        while True:
            if self.at >= self._base + len(self._buffer):
                self._fill()
            start = self.at - self._base
            end = self._buffer.find(b"\n", start)
            if len(line) <= MAX_LINE:
                line += self._buffer[start:end] if end >= 0 else self._buffer[start:]
            self.at = self._base + (end if end >= 0 else len(self._buffer))
            if end >= 0 or not self._buffer or self.at - begin > _LONGEST_LINE:
                break
        self.opcodes += (self.at - begin) // _CHARGED
        if end < 0:
            raise Fault("a line without an end", LimitError if self._buffer else FormatError)
        self.at += 1
        return line[: MAX_LINE + 1]

    def name(self) -> str:
        fault = "a global with a name of more than 10,000 bytes"
        return self._short_line(_NAME, fault).decode("utf-8", "backslashreplace")

    def _short_line(self, plain: re.Pattern[bytes], fault: str) -> bytes:
        """Return a line that must not be long if it is ``plain``; otherwise only its beginning matters."""
        line = self.line()
        if len(line) <= MAX_LINE:
            return line
        if plain.fullmatch(line[:_LONGEST]):
            raise Fault(fault, LimitError)
        return line[:_LONGEST]

    def frame(self, size: int) -> None:
        pass

    def enter(self) -> None:
        """Begin a pickle inside this one."""
        if len(self.outer) >= _ITEMS:
            raise Fault("arrays of joblib nested too deep", LimitError)
        self.outer.append((self.stack, self.marks, self.memo, self.count))
        self.stack, self.marks, self.memo, self.count = [], [], {}, 0

    # ---- the stack and the memo ----

    def missing(self, what: str) -> Any:
        """Return a value in place of a missing value, which ends the run of every reader."""
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
            if type(item) is Foreign and item.name in GETATTR:
                self.names.setdefault(f"{COMPUTED}.getattr", self.start)
        return items

    def _changed(self) -> Any:
        """Return the value at the top, of which an opcode calls a method."""
        value = self.top()
        if type(value) is Foreign and not value.name.startswith(EXTENSION):
            self.called.add(value.name)
        return value

    def recall(self, number: int) -> Any:
        key = self.key(number)
        known = key in self.memo or len(self.memo) >= MAX_TEXTS
        return self.memo.get(key, _UNKNOWN) if known else self.missing(f"no memo entry {number}")

    def remember(self, number: int, value: Any) -> None:
        key = self.key(number)
        self.count += key not in self.memo
        if len(self.memo) >= MAX_TEXTS and key not in self.memo and value is not _UNKNOWN:
            raise Fault(f"more than {MAX_TEXTS:,} values in its memo", LimitError)
        if value is _UNKNOWN and len(self.memo) >= MAX_TEXTS:
            self.memo.pop(key, None)
        else:
            self.memo[key] = value

    def memoize(self) -> None:
        self.remember(self.count, self.top())

    def index(self) -> int:
        line = self._short_line(_DIGITS, "a memo index of more than 10,000 digits")
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
        return self.number(size, signed=True) if size <= 8 else self.skip(size, _UNKNOWN)

    def real(self, digits: bytes) -> Any:
        return _UNKNOWN

    def text(self, size: int) -> Any:
        return self.skip(size, _LONG_TEXT) if size > _LONGEST else self.take(size).decode("utf-8", "backslashreplace")

    string = text

    def quoted(self, line: bytes) -> Any:
        if not 2 <= len(line) <= _LONGEST or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            return _LONG_TEXT
        return unescaped(line[1:-1]).decode("utf-8", "backslashreplace")

    def escaped(self, line: bytes) -> Any:
        if len(line) > _LONGEST:
            return _LONG_TEXT
        try:
            return line.decode("raw-unicode-escape")
        except ValueError:
            raise Fault("a text with a bad escape") from None

    def content(self, size: int, kind: type = bytes) -> Any:
        return self.skip(size, LargeBytes(self._content, self.at, size))

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
        if type(into) is Foreign and into.name in self.called:  # no writer sets the attributes of a class or function
            self.names.setdefault(f"{COMPUTED}.{into.name}", self.start)
        if isinstance(into, _Computed):
            into.state = state if into.state is None else _UNKNOWN
            first = into.args[0] if into.args else None  # by copyreg._reconstructor, in protocols 0 and 1
            # joblib's description of an array, after which come BUILD and the bytes.
            if into.name.endswith(_WRAPPER) or (isinstance(first, Foreign) and first.name.endswith(_WRAPPER)):
                self.has_arrays = True
                if self.joblib:
                    _skip_array(self, into.state)

    # ---- globals, calls, and data outside the pickle ----

    def named(self, module: Any, name: Any) -> Any:
        if not all(type(part) in (str, _Computed) or part is _LONG_TEXT for part in (name, module)):
            self.missing("a name that is no text")
        full = f"{_part(module)}.{_part(name)}"
        self.names.setdefault(full, self.start)
        return Foreign(full)

    def extension(self, number: int) -> Any:
        if number <= 0:
            self.missing("an extension code below 1")
        full = f"{EXTENSION} {number} of copyreg"
        self.names.setdefault(full, self.start)
        return Foreign(full)

    def call(self, function: Any, args: Any) -> Any:
        name = function.name if isinstance(function, Foreign) else ""
        if isinstance(args, tuple) or not name.startswith(EXTENSION):  # a byte of chance is an extension code
            self.called.add(name)
        args = args if isinstance(args, tuple) else ()
        if name == FROM_TYPE:  # it calls its first argument with its third; a call of itself hides the target
            name = args[0].name if args and type(args[0]) is Foreign else FROM_TYPE
            args = args[2] if name != FROM_TYPE and len(args) > 2 and isinstance(args[2], tuple) else ()
            self.called.add(name)
            if name == FROM_TYPE:
                self.names.setdefault(f"{COMPUTED}.{FROM_TYPE}", self.start)
        if name in GETATTR:
            return self._attribute(args)
        if name == _LOAD and args and type(args[0]) is LargeBytes:
            self.inner.append((args[0].at, len(args[0])))
        return _Computed(name, args)

    def _attribute(self, args: tuple[Any, ...]) -> Any:
        """Return an attribute of a global or of an object that the pickle has built."""
        owner, name = args[:2] if len(args) > 1 else (None, None)
        plain = type(name) is str and not name.startswith("__") and name not in _HIDING
        if plain and type(owner) is Foreign:
            return self.named(owner.name, name)
        if plain and type(owner) is _Computed:
            return _Computed()
        return self.named(_Computed(), name if type(name) is str else _Computed())

    def joined(self, args: Any, keywords: Any) -> Any:
        return args

    def stored(self, key: Any, *, is_line: bool = False) -> Any:
        return _Computed()

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


def _skip_array(t: Tracer, state: Any) -> None:
    """Skip the bytes of an array, or enter the pickle of an array of objects."""
    plain = type(state) is dict and None not in state
    shape, dtype, alignment = map(state.get, _ARRAY_FIELDS) if plain else (None, None, None)
    size = _itemsize(dtype)
    if size == 0:
        t.enter()
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


def trace(content: Readable, begin: int, most: int = MAX_TRACED, *, strict: bool = False) -> Tracer:
    """Follow the opcodes of a pickle, at most ``most``, to its STOP or to a fault."""
    # If `strict`, a missing value, mark or memo entry is a fault too, as for every reader.
    traced = Tracer(content, begin, strict=strict, joblib=True).run(most)
    if traced.has_arrays:  # pickle's own reader takes their bytes for opcodes; by chance, these call nothing
        plain = Tracer(content, begin, strict=strict, joblib=False).run(most)
        traced.names = {name: at for name, at in plain.names.items() if name in plain.called} | traced.names
        traced.called |= plain.called & plain.names.keys()
        traced.inner = list(dict.fromkeys((*traced.inner, *plain.inner)))
        traced.opcodes += plain.opcodes
    return traced


# ---- verdicts ----

Verdict: TypeAlias = Literal["harmless", "unknown", "dangerous"]
# From the best to the worst; the position is the exit status of ``safeload scan``.
VERDICTS: tuple[Verdict, Verdict, Verdict] = ("harmless", "unknown", "dangerous")
HARMLESS, UNKNOWN, DANGEROUS = VERDICTS

_REASONS = {name: reason for reason, names in read_data(__name__, "dangerous.json").items() for name in names}
_BUILTINS = frozenset(("__builtin__", "__builtins__"))
# Parts of a name that lead from any object to any other.
_ATTRIBUTES = frozenset(
    ("__globals__", "__subclasses__", "__builtins__", "__code__", "__loader__", "__getattribute__", "__reduce_ex__")
)


def judge(name: str, allowed: Mapping[str, Global], *, called: bool) -> tuple[Verdict, str]:
    """Judge a global by its dotted name, module and attributes; return the verdict and the reason."""
    if name in allowed:
        if not called or allowed[name].build is not None:
            return HARMLESS, "on the allowlist"
        if name.endswith(".memmap"):
            return DANGEROUS, "reads or writes files"
        return UNKNOWN, "on the allowlist, but not to be called"
    if name in GETATTR:
        return UNKNOWN, "reads attributes; each is listed"
    parts = name.split(".")
    if COMPUTED in parts or NOT_TEXT in parts:
        return DANGEROUS, "hidden: its name is computed when the pickle runs"
    reason = _reason(parts)
    return (UNKNOWN, "not on the allowlist") if reason is None else (DANGEROUS, reason)


def _reason(parts: list[str]) -> str | None:
    """Return why a name is dangerous, or None."""
    if parts[0] in _BUILTINS:
        parts = ["builtins", *parts[1:]]
    for prefix in accumulate(parts, "{}.{}".format):
        if prefix in _REASONS:
            return _REASONS[prefix]
    for k, part in enumerate(parts[1:], 1):
        if part in _ATTRIBUTES:
            return "reaches any object by its name"
        if k + 1 < len(parts) and (part in _INSIDE or part in ("builtins", *_BUILTINS)):
            return _reason(parts[k:])
    return None
