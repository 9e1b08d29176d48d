"""Connect to the host of a URL while the modules for its first request are imported, which takes longer."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..base.forking import ProcessLock
from ..base.url import UrlError, divided, web_url

# The module whose import the connect overlaps.
_CLIENT = "safeload.stores.connections"
# Seconds that the first request waits for the connect, and after which the connect ends.
_PATIENCE, _TIMEOUT = 0.25, 10.0
# Milliseconds between the checks whether anyone still needs the connection.
_SLICE = 50

_dials: dict[tuple[int, str, int], _Dial] = {}  # by process, host and port


class _Dial:
    """A TCP connection that a thread opens."""

    def __init__(self, host: str, port: int) -> None:
        self._place = host.strip("[]").encode("ascii"), port  # as text, it could import a codec in the thread
        self._lock = ProcessLock()
        self._done = threading.Event()
        self._socket: socket.socket | None = None
        self._claimed = False
        threading.Thread(target=self._run, name="safeload", daemon=True).start()

    def _run(self) -> None:
        connected = None
        try:
            with suppress(OSError, UnicodeError):
                connected = self._connect()
            with self._lock.own:
                if not self._claimed:
                    self._socket, connected = connected, None
        finally:
            self._done.set()
            if connected is not None:
                connected.close()

    def _connect(self) -> socket.socket | None:
        """Connect to the first address; if that fails, the first request tries all addresses."""
        family, kind, protocol, _, address = socket.getaddrinfo(*self._place, 0, socket.SOCK_STREAM)[0]
        connecting = socket.socket(family, kind, protocol)
        try:
            connecting.setblocking(False)
            connecting.connect_ex(address)
            poll, until = select.poll(), time.monotonic() + _TIMEOUT
            poll.register(connecting, select.POLLOUT)
            while not self._claimed and time.monotonic() < until:
                if poll.poll(_SLICE):
                    connecting.getpeername()  # raises an error if the connect has failed
                    return connecting
            raise OSError
        except BaseException:
            connecting.close()
            raise

    def claim(self, seconds: float = 0.0) -> socket.socket | None:
        """Return the socket if it is connected within this time, else None; it belongs to the caller."""
        self._done.wait(seconds)
        with self._lock.own:
            self._claimed = True
            connected, self._socket = self._socket, None
        return connected


@contextmanager
def dialled(url: str) -> Iterator[None]:
    """Begin to connect to the host of an https or http URL, if the block is going to import the HTTP client.

    The first request to the host takes the connection. If there may be a proxy, nothing is begun.
    """
    key = None if _CLIENT in sys.modules else _direct_host(url)
    if key is not None and key not in _dials:
        with suppress(RuntimeError, UnicodeError):  # no more threads, or a host that is not ASCII
            _dials[key] = _Dial(*key[1:])
    try:
        yield
    finally:
        dial = None if key is None else _dials.pop(key, None)
        connected = None if dial is None else dial.claim()
        if connected is not None:
            connected.close()


def take(host: str, port: int, timeout: float, options: Any) -> socket.socket | None:
    """Return a connected socket, if one was dialled and is ready soon."""
    dial = _dials.pop((os.getpid(), host, port), None) if _dials else None
    connected = None if dial is None else dial.claim(min(timeout, _PATIENCE))
    if connected is None:
        return None
    try:
        for option in options:
            connected.setsockopt(*option)
        connected.settimeout(timeout)
    except OSError:
        connected.close()
        return None
    return connected


def _direct_host(url: str) -> tuple[int, str, int] | None:
    """Return process, host and port if the URL is certainly read without a proxy."""
    if os.name != "posix" or sys.platform == "darwin":  # the system may have a proxy
        return None
    if any(name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name in os.environ):
        return None
    try:
        web = web_url(divided(url))[0]
    except UrlError:
        return None
    return os.getpid(), web.host, web.port
