"""The less frequent opcodes of the pickle machine, one function each.

run.py has the frequent opcodes, and turns exceptions into errors: IndexError if the stack is empty or the bytes end
(`Machine.at` is then past the end), KeyError if a memo entry does not exist, ValueError if text cannot be decoded.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from ...errors import LimitError, UnsupportedError
from .keys import add, put
from .machine import MAX_INT_BYTES, Built, Fault, Foreign, Inert, LargeBytes, Machine, PickleEnd, describe

_U16, U32, _U64 = (struct.Struct(f"<{code}").unpack_from for code in "HIQ")
_I32, _F64 = struct.Struct("<i").unpack_from, struct.Struct(">d").unpack_from

Opcode = Callable[[Machine], None]


def _unknown(m: Machine) -> None:
    raise Fault("unknown opcode")


OPCODES: list[Opcode] = [_unknown] * 256


def _op(code: bytes) -> Callable[[Opcode], Opcode]:
    def add(function: Opcode) -> Opcode:
        OPCODES[code[0]] = function
        return function

    return add


# ---- the frame of a pickle ----


@_op(b"\x80")
def _proto(m: Machine) -> None:
    protocol = m.take(1)[0]
    if protocol > 5:
        raise Fault(f"protocol {protocol}, but the newest is 5", UnsupportedError)


@_op(b"\x95")
def _frame(m: Machine) -> None:
    _size(m, _U64, 8)  # only a hint for readers of streams


@_op(b".")
def _stop(m: Machine) -> None:
    raise PickleEnd


# ---- the stack and the memo ----


@_op(b"0")
def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_mark()


@_op(b"1")
def _pop_mark(m: Machine) -> None:
    m.pop_mark()


@_op(b"2")
def _dup(m: Machine) -> None:
    m.stack.append(m.stack[-1])


@_op(b"j")
def _long_binget(m: Machine) -> None:
    at = m.at
    m.at = at + 4
    m.stack.append(m.recall(U32(m.data, at)[0]))


@_op(b"g")
def _get(m: Machine) -> None:
    m.stack.append(m.recall(_integer(m.line())))


@_op(b"p")
def _put(m: Machine) -> None:
    m.remember(_integer(m.line()), m.stack[-1])


@_op(b"\x94")
def _memoize(m: Machine) -> None:
    m.memo[len(m.memo) + len(m.far)] = m.stack[-1]


# ---- scalars ----


def _constant(code: bytes, value: Any) -> None:
    def push(m: Machine) -> None:
        m.stack.append(value)

    _op(code)(push)


_constant(b"N", None)
_constant(b"\x88", True)


@_op(b"J")
def _binint(m: Machine) -> None:
    at = m.at
    m.at = at + 4
    m.stack.append(_I32(m.data, at)[0])


def _integer(digits: bytes) -> int:
    if len(digits) > MAX_INT_BYTES * 5 // 2 or not re.fullmatch(rb"-?[0-9]+", digits):
        raise Fault(f"{describe(digits)} is not an integer, or is too long")
    return int(digits)


@_op(b"I")
def _int(m: Machine) -> None:
    line = m.line()
    m.stack.append(line == b"01" if line in (b"00", b"01") else _integer(line))


@_op(b"L")
def _long(m: Machine) -> None:
    m.stack.append(_integer(m.line().removesuffix(b"L")))


@_op(b"\x8a")
def _long1(m: Machine) -> None:
    m.stack.append(int.from_bytes(m.take(m.take(1)[0]), "little", signed=True))


@_op(b"\x8b")
def _long4(m: Machine) -> None:
    size = _I32(m.take(4))[0]
    if not 0 <= size <= MAX_INT_BYTES:
        raise Fault(f"an integer of {size} bytes, the limit is {MAX_INT_BYTES}", LimitError)
    m.stack.append(int.from_bytes(m.take(size), "little", signed=True))


@_op(b"G")
def _binfloat(m: Machine) -> None:
    at = m.at
    m.at = at + 8
    m.stack.append(_F64(m.data, at)[0])


@_op(b"F")
def _float(m: Machine) -> None:
    line = m.line()
    if len(line) > 100:
        raise Fault(f"{describe(line)} is too long for a float")
    m.stack.append(float(line))


# ---- text and bytes ----


def _size(m: Machine, unpack: Callable[..., tuple[int]], width: int) -> int:
    """Read a length, which must not exceed the bytes left."""
    size = unpack(m.take(width))[0]
    if size > len(m.data) - m.at:
        m.at = len(m.data) + 1
        raise IndexError
    return size


@_op(b"\x8c")
def _short_binunicode(m: Machine) -> None:
    m.stack.append(str(m.take(m.take(1)[0]), "utf-8", "surrogatepass"))


@_op(b"\x8d")
def _binunicode8(m: Machine) -> None:
    m.stack.append(str(m.take(_size(m, _U64, 8)), "utf-8", "surrogatepass"))


@_op(b"V")
def _unicode(m: Machine) -> None:
    m.stack.append(str(m.line(len(m.data)), "raw-unicode-escape"))


def _bytes(m: Machine, value: bytes | bytearray) -> None:
    if value:
        m.places[id(value)] = m.at - len(value)
    m.stack.append(value)


# Bytes of a mapped pickle that are not copied.
_LARGE = 1 << 16


def _take_bytes(m: Machine, size: int) -> None:
    if size < _LARGE or type(m.data) is bytes:
        _bytes(m, m.take(size))
    else:
        m.stack.append(LargeBytes(m.data, m.at, size))
        m.at += size


@_op(b"C")
def _short_binbytes(m: Machine) -> None:
    _bytes(m, m.take(m.take(1)[0]))


@_op(b"B")
def _binbytes(m: Machine) -> None:
    _take_bytes(m, _size(m, U32, 4))


@_op(b"\x8e")
def _binbytes8(m: Machine) -> None:
    _take_bytes(m, _size(m, _U64, 8))


@_op(b"\x96")
def _bytearray8(m: Machine) -> None:
    _bytes(m, bytearray(m.take(_size(m, _U64, 8))))


def _python2(text: bytes) -> str | bytes:
    """Convert a str of Python 2: text if it is UTF-8, else bytes."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text


@_op(b"U")
def _short_binstring(m: Machine) -> None:
    m.stack.append(_python2(m.take(m.take(1)[0])))


@_op(b"T")
def _binstring(m: Machine) -> None:
    size = _I32(m.take(4))[0]
    if size < 0:
        raise Fault(f"a string of {size} bytes")
    m.stack.append(_python2(m.take(size)))


_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"a": b"\a", b"f": b"\f", b"v": b"\v"}


def _unescape(match: re.Match[bytes]) -> bytes:
    text = match[1]
    if text[:1] == b"x":
        return bytes((int(text[1:], 16),))
    if text.isdigit():
        return bytes((int(text, 8) & 0xFF,))
    return _ESCAPES.get(text, text)


@_op(b"S")
def _string(m: Machine) -> None:
    line = m.line(len(m.data)).strip()
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise Fault(f"{describe(line)} is not a quoted string")
    m.stack.append(_python2(re.sub(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", _unescape, line[1:-1])))


# ---- containers ----


@_op(b"\x87")
def _tuple3(m: Machine) -> None:
    stack = m.stack
    third = stack.pop()
    second = stack.pop()
    stack[-1] = (stack[-1], second, third)


@_op(b"]")
def _empty_list(m: Machine) -> None:
    m.stack.append([])


@_op(b"l")
def _list(m: Machine) -> None:
    items = m.pop_mark()
    m.stack.append(items)


def _extend(m: Machine, into: Any, values: list[Any]) -> None:
    if type(into) is list:
        into.extend(values)
    elif type(into) is Inert:
        put(into, [x for pair in enumerate(values, len(into.items)) for x in pair], m.watched)
    else:
        raise Fault(f"appending to {describe(into)}, which is not a list")


@_op(b"a")
def _append(m: Machine) -> None:
    value = m.stack.pop()
    _extend(m, m.stack[-1], [value])


@_op(b"e")
def _appends(m: Machine) -> None:
    values = m.pop_mark()
    _extend(m, m.stack[-1], values)


@_op(b"}")
def _empty_dict(m: Machine) -> None:
    m.stack.append({})


@_op(b"d")
def _dict(m: Machine) -> None:
    items: dict[Any, Any] = {}
    put(items, m.pop_mark(), m.watched)
    m.stack.append(items)


@_op(b"s")
def _setitem(m: Machine) -> None:
    value = m.stack.pop()
    key = m.stack.pop()
    put(m.stack[-1], [key, value], m.watched)


@_op(b"u")
def _setitems(m: Machine) -> None:
    pairs, into = m.pop_mark(), m.stack[-1]
    if pairs:
        put(into, pairs, m.watched)


@_op(b"\x8f")
def _empty_set(m: Machine) -> None:
    m.stack.append(set())


@_op(b"\x90")
def _additems(m: Machine) -> None:
    values = m.pop_mark()
    into = m.stack[-1]
    if type(into) is set:
        add(into, values, m.watched)
    elif type(into) is Inert:
        _extend(m, into, values)
    else:
        raise Fault(f"adding to {describe(into)}, which is not a set")


_NO_ELEMENTS: frozenset[Any] = frozenset()


@_op(b"\x91")
def _frozenset(m: Machine) -> None:
    elements: set[Any] = set()
    add(elements, m.pop_mark(), {})
    m.stack.append(frozenset(elements) if elements else _NO_ELEMENTS)


# ---- globals, and opcodes that call in other machines ----


def _named(m: Machine, module: Any, name: Any) -> None:
    if type(module) is not str or type(name) is not str:
        raise Fault(f"a global must be named by two strings, got {describe(module)} and {describe(name)}")
    if len(module) + len(name) > 1000:
        raise Fault(f"a global's name of {len(module) + len(name)} characters, the limit is 1000", LimitError)
    m.stack.append(m.global_named(f"{module}.{name}"))


@_op(b"c")
def _global(m: Machine) -> None:
    module = m.line().decode()
    _named(m, module, m.line().decode())


@_op(b"\x93")
def _stack_global(m: Machine) -> None:
    name = m.stack.pop()
    _named(m, m.stack.pop(), name)


def _extension(m: Machine, code: int) -> None:
    """Push a global by its number in copyreg.add_extension."""
    m.stack.append(m.global_named(f"extension code {code} of copyreg"))


@_op(b"\x82")
def _ext1(m: Machine) -> None:
    _extension(m, m.take(1)[0])


@_op(b"\x83")
def _ext2(m: Machine) -> None:
    _extension(m, _U16(m.take(2))[0])


@_op(b"\x84")
def _ext4(m: Machine) -> None:
    _extension(m, _I32(m.take(4))[0])


@_op(b"\x92")
def _newobj_ex(m: Machine) -> None:
    keywords = m.stack.pop()
    args = m.stack.pop()
    if keywords and type(args) is tuple:
        m.charge(8 * len(args))
        args = (*args, keywords)
    m.stack[-1] = m.call(m.stack[-1], args)


@_op(b"i")
def _inst(m: Machine) -> None:
    module = m.line().decode()
    name = m.line().decode()
    args = tuple(m.pop_mark())
    _named(m, module, name)
    m.stack[-1] = m.call(m.stack[-1], args)


@_op(b"o")
def _obj(m: Machine) -> None:
    function, *args = m.pop_mark() or [None]
    m.stack.append(m.call(function, tuple(args)))


@_op(b"b")
def _build(m: Machine) -> None:
    state = m.stack.pop()
    into = m.stack[-1]
    if type(into) is Inert:
        into.state = state if into.state is None else (into.state, state)
    elif isinstance(into, Built):
        into.build(state)
    elif type(into) is not dict and type(into) is not Foreign:
        raise Fault(f"a state set on {describe(into)}")
    # The state of an OrderedDict is its attributes, which are not items: torch sets `_metadata` (versions of modules).


# ---- data outside the pickle ----


@_op(b"P")
def _persid(m: Machine) -> None:
    m.stack.append(m.persistent(m.line().decode()))


@_op(b"\x97")
def _next_buffer(m: Machine) -> None:
    raise Fault("a buffer outside the pickle", UnsupportedError)


OPCODES[0x98] = _next_buffer  # READONLY_BUFFER
