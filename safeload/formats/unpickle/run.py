"""A pickle machine that builds inert values: it neither imports nor calls the globals of a pickle.

Opcodes of protocols 0 to 5 (https://github.com/python/cpython/blob/main/Lib/pickletools.py describes each) work on a
stack as in CPython, with these differences:

1. Globals are looked up in the caller's table. A function of this package builds the value of a row. Any other name
   becomes a `Foreign`, and a call of it an `Inert`.
2. Persistent ids are passed to the caller.
3. Dict keys and set elements are scalars or small tuples of scalars. Keys are unique: no entry hides another.
   Colliding keys (keys.py) and keys with slow hashes are refused.
4. Every length is checked against the bytes left before anything is allocated. Bytes copied from values that the pickle
   can refer to again are counted (`Machine.charge`).

Values are None, bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, the values of rows and
persistent ids, `Global`, `Foreign` and `Inert`. `_run` has the opcodes of tensors, opcodes.py has the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

from ...base.gc_pause import paused
from ...base.messages import error_about
from ...base.text import show
from ...errors import ForbiddenError, FormatError, LimitError, UnsupportedError
from .machine import NEAR, Fault, Global, Machine, PickleEnd, describe
from .opcodes import OPCODES, U32

# 50 times the opcodes of the largest known real file (400,000). An opcode allocates at most 216 bytes (an empty set)
# beyond the bytes copied from the file. The worst case is a list of sets as metadata: about 340 bytes per byte of the
# pickle.
MAX_OPCODES = 20_000_000
# Bytes of a pickle, which is read into memory. The largest real pickles have about 10 MB: tensors are stored elsewhere.
MAX_PICKLE = 1 << 30
# Bytes of arguments, for opcodes with a case in `_run`.
_ARGUMENT = {0x4B: 1, 0x4D: 2, 0x58: 4, 0x68: 1, 0x71: 1, 0x72: 4}
_CLAUSE = "the pickle references"
# Added to the message if unknown globals are the only fault of the pickle.
ADVICE = '; unknown_globals="inert" reads the tensors around them'
# Maximum number of names in a message.
MAX_SHOWN = 100


class TruncatedError(FormatError):
    """The bytes end before the pickle ends."""


class Unpickled(NamedTuple):
    """The result of running a pickle."""

    value: Any
    end: int  # position after its STOP
    size: int  # in bytes
    harmless: list[str]  # names of its globals in the table
    foreign: list[str]  # names of its globals outside the table
    data: Any = b""  # the bytes that hold it
    places: Mapping[int, int] = MappingProxyType({})  # see `Machine`
    base: int | None = None  # offset of `data` in the file; None if the file stores it compressed
    members: Mapping[str, Collection[str]] = MappingProxyType({})  # see `Tree` of torch


def unpickle(
    data: Any,  # bytes that begin with the pickle, or a mapping, in which large bytes stay
    table: Mapping[str, Global],
    persistent: Callable[[Any], Any],  # returns the value for a persistent id, or raises `Fault`
    *,
    path: str,
    base: int | None = 0,  # offset of `data` in the file; None if the file stores it compressed
    inert: bool = False,
    complete: bool = True,  # False if the file has more bytes to read after a `TruncatedError`
) -> Unpickled:
    """Run a pickle; if ``inert``, unknown globals become placeholders instead of a `ForbiddenError` that lists all."""
    machine = Machine(data, table, persistent)
    try:
        with paused(len(data)):  # a pickle can make an object per byte
            value = _run(machine, path, base)
    except TruncatedError:
        if not complete:
            raise
        check_foreign(sorted(machine.foreign), path, inert, _CLAUSE, ", and is cut off")
        raise
    except (FormatError, LimitError, UnsupportedError) as error:
        check_foreign(sorted(machine.foreign), path, inert, _CLAUSE, f", and is malformed after that: {error}")
        raise
    check_foreign(sorted(machine.foreign), path, inert, _CLAUSE)
    return Unpickled(
        value,
        machine.at,
        machine.at,
        sorted(machine.harmless),
        sorted(machine.foreign),
        data,
        machine.places,
        base,
    )


def check_foreign(names: Sequence[str], path: str, inert: bool, clause: str, fault: str = "") -> None:
    """Refuse globals outside the table, unless ``inert``; ``clause`` begins the message, ``fault`` names a fault."""
    if inert or not names:
        return
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:MAX_SHOWN])
    if len(names) > MAX_SHOWN:
        shown += f" and {len(names) - MAX_SHOWN} more"
    globals_ = "a global that is" if len(names) == 1 else f"{len(names)} globals that are"
    advice = "" if fault else ADVICE
    text = f"{clause} {globals_} not on the allowlist: {shown}{fault}. Nothing was imported or called{advice}"
    raise error_about(ForbiddenError, text, path=path)


def _run(machine: Machine, path: str, base: int | None) -> Any:
    """Run the opcodes, return the value on the stack, and turn exceptions into errors with a position."""
    data, size = machine.data, len(machine.data)
    stack, marks, memo = machine.stack, machine.marks, machine.memo
    call, persistent = machine.call, machine.persistent
    at = room = 0

    def place(position: int) -> int | None:
        return None if base is None else base + position

    try:
        for _ in repeat(None, MAX_OPCODES):
            match data[at]:  # an IndexError at the end
                case 0x72:  # LONG_BINPUT
                    number = U32(data, at + 1)[0]
                    if number <= room or number <= (room := len(memo) + NEAR):
                        memo[number] = stack[-1]
                    else:
                        machine.remember(number, stack[-1])
                    at += 5
                case 0x4B:  # BININT1
                    stack.append(data[at + 1])
                    at += 2
                case 0x68:  # BINGET
                    number = data[at + 1]
                    stack.append(memo[number] if number in memo else machine.recall(number))
                    at += 2
                case 0x28:  # MARK
                    marks.append(stack)
                    stack = []
                    at += 1
                case 0x74:  # TUPLE
                    value = tuple(stack)
                    stack = marks.pop()
                    stack.append(value)
                    at += 1
                case 0x86:  # TUPLE2
                    value = stack.pop()
                    stack[-1] = (stack[-1], value)
                    at += 1
                case 0x58:  # BINUNICODE
                    end = at + 5 + U32(data, at + 1)[0]
                    if end > size:
                        machine.at = end
                        raise IndexError
                    text = data[at + 5 : end]
                    stack.append(text.decode() if text.isascii() else str(text, "utf-8", "surrogatepass"))
                    at = end
                case 0x52 | 0x81:  # REDUCE; NEWOBJ, which makes an object without calling its class
                    value = stack.pop()
                    machine.at = at + 1
                    stack[-1] = call(stack[-1], value)
                    at += 1
                case 0x51:  # BINPERSID
                    stack[-1] = persistent(stack[-1])
                    at += 1
                case 0x89:  # NEWFALSE
                    stack.append(False)
                    at += 1
                case 0x29:  # EMPTY_TUPLE
                    stack.append(())
                    at += 1
                case 0x4D:  # BININT2
                    stack.append(data[at + 1] | data[at + 2] << 8)
                    at += 3
                case 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                    at += 1
                case 0x71:  # BINPUT
                    number = data[at + 1]
                    if number <= room or number <= (room := len(memo) + NEAR):
                        memo[number] = stack[-1]
                    else:
                        machine.remember(number, stack[-1])
                    at += 2
                case code:
                    machine.at = at + 1
                    machine.stack = stack
                    OPCODES[code](machine)
                    stack, at = machine.stack, machine.at
        raise error_about(LimitError, f"the pickle has more than {MAX_OPCODES} opcodes", path=path)
    except PickleEnd:
        if marks or len(stack) != 1:
            raise FormatError("the pickle stops with values left on its stack", path, place(at)) from None
        return stack[0]
    except Fault as fault:
        message = f"pickle opcode {_opcode(data, at)}: {fault}"
        if fault.kind is FormatError:
            raise FormatError(message, path, place(at)) from None
        raise fault.kind(str(FormatError(message, path, place(at)))) from None
    except (IndexError, struct.error):
        if at < size:
            message = f"pickle opcode {_opcode(data, at)}: "
            if max(machine.at, at + 1 + _ARGUMENT.get(data[at], 0)) > size:
                message += "its argument extends past the end"
                raise TruncatedError(message, path, place(at)) from None
            raise FormatError(message + "the stack is empty", path, place(at)) from None
    except KeyError as error:
        message = f"pickle opcode {_opcode(data, at)}: memo entry {describe(error.args[0])} was never set"
        raise FormatError(message, path, place(at)) from None
    except ValueError as error:  # text that is not UTF-8, or invalid digits
        message = f"pickle opcode {_opcode(data, at)}: {show(str(error))}"
        raise FormatError(message, path, place(at)) from None
    raise TruncatedError("the pickle ends without STOP", path, place(size))


def _opcode(data: bytes, at: int) -> str:
    return ascii(chr(data[at])) if 32 <= data[at] < 127 else f"0x{data[at]:02x}"
