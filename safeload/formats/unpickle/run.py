"""A pickle machine that builds inert values: it neither imports nor calls anything that a pickle names.

Opcodes of protocols 0 to 5 (https://github.com/python/cpython/blob/main/Lib/pickletools.py describes each) work on a
stack as in CPython, with these differences:

1. A global is looked up in the caller's table. A function of this package builds the value of a row; any other name
   becomes a `Foreign`, and a call of it an `Inert`.
2. A persistent id is passed to the caller.
3. Dict keys and set elements are scalars or small tuples of them, and keys are unique: keys that are chosen to collide
   (keys.py) or to take long to hash are refused, and no entry hides another.
4. Every length is checked against the bytes left before anything is allocated, and bytes copied from values that the
   pickle can refer to again are counted (`Machine.charge`).

Values are None, bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, the values of rows and
persistent ids, `Global`, `Foreign` and `Inert`. The opcodes of tensors are in `_run`, the others in opcodes.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

from ...base.gc_pause import paused
from ...base.text import show
from ...errors import ForbiddenError, FormatError, LimitError, UnsupportedError
from .machine import NEAR, Fault, Global, Machine, PickleEnd, describe
from .opcodes import OPCODES, U32

# 50 times the opcodes of the largest known real file (400,000). Each allocates at most 216 bytes (an empty set) beyond
# the bytes that it copies from the file; the worst case is a list of sets that becomes metadata, about 340 bytes
# for each byte of the pickle.
MAX_OPCODES = 20_000_000
# Bytes of a pickle, which is read into memory. The largest real ones have about 10 MB, as tensors are stored elsewhere.
MAX_PICKLE = 1 << 30
# Bytes of the arguments of the opcodes that are cases of `_run`.
_ARGUMENT = {0x4B: 1, 0x4D: 2, 0x58: 4, 0x68: 1, 0x71: 1, 0x72: 4}
_ASKS = "the pickle asks"
# Added to the message if unknown globals are the only fault of the pickle.
ADVICE = '; unknown_globals="inert" reads the tensors around them'
# Most names in one message.
MAX_SHOWN = 100


class TruncatedError(FormatError):
    """The bytes end before the pickle does."""


class Unpickled(NamedTuple):
    """The result of running a pickle.

    Attributes:
        value: its object.
        end: position after its STOP.
        size: its size in bytes.
        harmless: names of the globals it uses that are in the table.
        foreign: names of the globals it uses that are not in the table.
        data: bytes that hold it.
        places: see `Machine`.
        base: offset of ``data`` in the file; None if the file does not contain it uncompressed.
    """

    value: Any
    end: int
    size: int
    harmless: list[str]
    foreign: list[str]
    data: bytes = b""
    places: Mapping[int, int] = MappingProxyType({})
    base: int | None = None


def unpickle(
    data: bytes,
    table: Mapping[str, Global],
    persistent: Callable[[Any], Any],
    *,
    path: str,
    base: int | None = 0,
    inert: bool = False,
    complete: bool = True,
) -> Unpickled:
    """Runs a pickle.

    Args:
        data: bytes that begin with it.
        table: the harmless globals by name.
        persistent: takes a persistent id and returns its value or raises `Fault`.
        path: of the file, for messages.
        base: offset of ``data`` in the file; None if the file does not contain it uncompressed.
        inert: whether unknown globals are accepted, as placeholders.
        complete: whether ``data`` reaches the end of the file; otherwise `TruncatedError` asks for more bytes.

    Raises:
        ForbiddenError: unknown globals; the message lists all of them.
        FormatError: a malformed pickle; the error has the byte position.
        LimitError: a limit is exceeded.
        UnsupportedError: an opcode for data outside the pickle.
    """
    machine = Machine(data, table, persistent)
    try:
        with paused(len(data)):  # an object or so for each byte
            value = _run(machine, path, base)
    except TruncatedError:
        if not complete:
            raise
        check_foreign(sorted(machine.foreign), path, inert, _ASKS, ", and breaks off then")
        raise
    except (FormatError, LimitError, UnsupportedError) as error:
        check_foreign(sorted(machine.foreign), path, inert, _ASKS, f", and is malformed beyond that: {error}")
        raise
    check_foreign(sorted(machine.foreign), path, inert, _ASKS)
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


def check_foreign(names: Sequence[str], path: str, inert: bool, asks: str, more: str = "") -> None:
    """Refuses globals outside the table, unless they may be ``inert``.

    Raises:
        ForbiddenError: there are such globals; the message lists them.
    """
    if inert or not names:
        return
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:MAX_SHOWN])
    if len(names) > MAX_SHOWN:
        shown += f" and {len(names) - MAX_SHOWN} more"
    advice = "" if more else ADVICE
    raise ForbiddenError(
        f"{path}: {asks} for {'a global' if len(names) == 1 else f'{len(names)} globals'} off the list of "
        f"harmless ones: {shown}{more}. Nothing was imported or called{advice}"
    )


def _run(machine: Machine, path: str, base: int | None) -> Any:
    """Run the opcodes, return the value on the stack, and turn exceptions into errors with a position.

    Tensors consist of the opcodes that are cases here, which work on local variables; the others are functions in
    opcodes.py.
    """
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
                case 0x52 | 0x81:  # REDUCE; NEWOBJ, which constructs an object without calling its class
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
        raise LimitError(f"{path}: a pickle of more than {MAX_OPCODES} opcodes")
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
                message += "its argument goes beyond the end"
                raise TruncatedError(message, path, place(at)) from None
            raise FormatError(message + "nothing on the stack for it", path, place(at)) from None
    except KeyError as error:
        message = f"pickle opcode {_opcode(data, at)}: memo entry {describe(error.args[0])} was never set"
        raise FormatError(message, path, place(at)) from None
    except ValueError as error:  # text that is not UTF-8, or invalid digits
        message = f"pickle opcode {_opcode(data, at)}: {show(str(error))}"
        raise FormatError(message, path, place(at)) from None
    raise TruncatedError("the pickle ends without STOP", path, place(size))


def _opcode(data: bytes, at: int) -> str:
    return ascii(chr(data[at])) if 32 <= data[at] < 127 else f"0x{data[at]:02x}"
