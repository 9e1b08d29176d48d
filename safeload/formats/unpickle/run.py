"""A pickle machine that builds inert values: it imports nothing and calls nothing of what a pickle names.

Opcodes of protocols 0 to 5 (https://github.com/python/cpython/blob/main/Lib/pickletools.py describes each) work on a
stack as in CPython, with these differences:

1. A global is looked up in a table that the caller gives. What is there is built by our own function of that row; any
   other name becomes a `Foreign`, what is made of it an `Inert`.
2. A persistent id is handed to the caller.
3. Dict keys and set elements are scalars or small tuples of them, and a key comes once: keys made to collide
   (pickle_keys.py) or to take forever to hash are refused, and no entry hides another.
4. Every length is checked against the bytes that are left before anything is allocated, and what is copied from values
   that the pickle can refer to again is counted (`Machine.charge`).

Values are None, bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, what rows and persistent
ids make, `Global`, `Foreign` and `Inert`. The opcodes are in pickle_opcodes.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ...base.text import show
from ...errors import ForbiddenError, FormatError, LimitError, UnsupportedError
from .machine import Fault, Global, Machine, Stop, describe
from .opcodes import OPCODES

# 50 times the opcodes of the largest real file known (400,000). Each allocates at most 216 bytes (an empty set) beyond
# what it copies from the file; a list of sets that becomes metadata takes some 340 a byte, which is the most.
MAX_OPCODES = 20_000_000
# Bytes of a pickle, which is read into memory. The largest real ones have some 10 MB; tensors are not in them.
MAX_PICKLE = 1 << 30
_ASKS = "the pickle asks"
# What an error says where the pickle is sound but for the globals.
ADVICE = '; unknown_globals="inert" reads the tensors around them'
# Names in one message.
MAX_SHOWN = 100


class TruncatedError(FormatError):
    """The bytes end before the pickle does."""


class Unpickled(NamedTuple):
    """What a pickle came to.

    Attributes:
        value: its object.
        end: position behind its STOP.
        size: its bytes.
        harmless: names of the globals it uses that are in the table.
        foreign: names of those that are not.
        data: bytes that hold it.
        places: see `Machine`.
        base: where in the file ``data`` begins; None when it is nowhere as such.
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
    start: int = 0,
    base: int | None = 0,
    inert: bool = False,
    complete: bool = True,
) -> Unpickled:
    """Runs a pickle.

    Args:
        data: bytes that hold it.
        table: the harmless globals by name.
        persistent: gets a persistent id, gives what it stands for or raises `Fault`.
        path: of the file, for messages.
        start: where in ``data`` it begins.
        base: where in the file ``data`` begins; None when it is nowhere as such.
        inert: whether foreign globals may be there, as placeholders.
        complete: whether more bytes than ``data`` there are not; else `TruncatedError` says that more are needed.

    Raises:
        ForbiddenError: foreign globals, all of them named.
        FormatError: a malformed pickle, with the byte.
        LimitError: a limit is exceeded.
        UnsupportedError: an opcode for data outside the pickle.
    """
    machine = Machine(data, start, table, persistent)
    try:
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
        machine.at - start,
        sorted(machine.harmless),
        sorted(machine.foreign),
        data,
        machine.places,
        base,
    )


def check_foreign(names: Sequence[str], path: str, inert: bool, asks: str, more: str = "") -> None:
    """Refuses globals off the list, unless they may be ``inert``.

    Raises:
        ForbiddenError: there are some; it names them.
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
    data, size = machine.data, len(machine.data)
    at = machine.at
    opcodes = OPCODES

    def place(position: int) -> int | None:
        return None if base is None else base + position

    try:
        for _ in range(MAX_OPCODES):
            at = machine.at
            if at >= size:
                break
            machine.at = at + 1
            opcodes[data[at]](machine)
    except Stop:
        if machine.marks or len(machine.stack) != 1:
            raise FormatError("the pickle stops with values left on its stack", path, place(at)) from None
        return machine.stack[0]
    except Fault as fault:
        where = FormatError(f"pickle opcode {_opcode(data, at)}: {fault}", path, place(at))
        raise where if fault.kind is FormatError else fault.kind(str(where)) from None
    except (IndexError, struct.error):
        if machine.at > size:
            message = f"pickle opcode {_opcode(data, at)}: its argument goes beyond the end"
            raise TruncatedError(message, path, place(at)) from None
        message = f"pickle opcode {_opcode(data, at)}: nothing on the stack for it"
        raise FormatError(message, path, place(at)) from None
    except KeyError as error:
        message = f"pickle opcode {_opcode(data, at)}: memo entry {describe(error.args[0])} was never set"
        raise FormatError(message, path, place(at)) from None
    except ValueError as error:  # text that is no UTF-8, digits that are none
        message = f"pickle opcode {_opcode(data, at)}: {show(str(error))}"
        raise FormatError(message, path, place(at)) from None
    if at >= size:
        raise TruncatedError("the pickle ends without STOP", path, place(size))
    raise LimitError(f"{path}: a pickle of more than {MAX_OPCODES} opcodes")


def _opcode(data: bytes, at: int) -> str:
    return ascii(chr(data[at])) if 32 <= data[at] < 127 else f"0x{data[at]:02x}"
