"""Sockets that wait for bytes in slices of time, for systems where no other thread can end a read: Windows."""

from __future__ import annotations

import math
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from .stop import Stopped, current

# Seconds after which a thread that waits asks whether it should go on, and handles signals.
SLICE = 0.1

_Result = TypeVar("_Result")


class SlicedSocket(socket.socket):
    """A socket whose reads end with `stop.current`, and by Ctrl-C."""

    def recv(self, *arguments: Any) -> bytes:
        """As that of a socket."""
        return _in_slices(self, super().recv, *arguments)

    def recv_into(self, *arguments: Any) -> int:
        """As that of a socket."""
        return _in_slices(self, super().recv_into, *arguments)


class SlicedTlsSocket(SlicedSocket, ssl.SSLSocket):
    """The same over TLS, with its handshake. OpenSSL keeps the part of a record that has come in a slice."""

    def do_handshake(self, block: bool = False) -> None:
        """As that of a socket."""
        try:
            _in_slices(self, super().do_handshake, block)
        except (Stopped, KeyboardInterrupt):  # `ssl` closes it after other errors only
            self.close()
            raise


def _in_slices(waiting: socket.socket, call: Callable[..., _Result], *arguments: Any) -> _Result:
    """Calls what waits as long as a socket's timeout allows, again and again with a shorter one."""
    timeout = waiting.gettimeout()
    if timeout == 0:  # it never waits
        return call(*arguments)
    until = math.inf if timeout is None else time.monotonic() + timeout
    try:
        while (left := until - time.monotonic()) > 0:
            waiting.settimeout(min(SLICE, left))
            # TLS raises the second one where the clock stands exactly at the end of its wait.
            with suppress(TimeoutError, ssl.SSLWantReadError):
                return call(*arguments)
            current().check()
        raise TimeoutError("timed out")
    finally:
        waiting.settimeout(timeout)
