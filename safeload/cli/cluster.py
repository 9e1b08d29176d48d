"""``--dask``: run the pieces of a command on a Dask cluster."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._version import __version__
from ..base import log
from ..base.absent import is_absent
from ..base.text import printable
from ..errors import FormatError, SafeloadError
from ..operations.sources.executors import Executor
from ..stores.json_file import read_json

# Seconds to wait for a scheduler.
_TIMEOUT = 10
# Seconds between two looks for its file.
_INTERVAL = 0.05


def add_dask(parser: Any) -> None:
    """Add --dask."""
    parser.add_argument(
        "--dask",
        metavar="ADDRESS",
        help='run on a Dask cluster with access to the files: "tcp://HOST:8786", or a scheduler file',
    )


@contextmanager
def cluster(address: str | None) -> Iterator[Executor | None]:
    """Return the executor of a Dask cluster, by address or by path of a scheduler file, or None without an address."""
    if address is None:
        yield None
        return
    try:
        from distributed import Client
    except ImportError:
        if not is_absent("distributed") and not is_absent("dask"):
            raise  # Dask is installed but broken
        raise SafeloadError("--dask needs Dask, which is not installed: pip install distributed") from None
    scheduler = _address_in(address) if _is_file(address) else address
    _try(scheduler)
    with _quiet(), Client(scheduler, timeout=_TIMEOUT, set_as_default=False) as client:
        if client.scheduler_info()["workers"]:
            _check_workers(client, scheduler)
        else:
            print(f"safeload: --dask {printable(scheduler)}: waiting for a worker", file=sys.stderr, flush=True)
        with _failures(scheduler):
            # Not its get_executor(): its future of a piece fails if the worker that holds the result dies.
            yield client


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Dask's log unless --verbose is set, because its tracebacks would hide our message."""
    import logging

    level = logging.DEBUG if logging.getLogger(log.NAME).isEnabledFor(logging.DEBUG) else logging.CRITICAL
    before = {name: logging.getLogger(name).level for name in ("distributed", "distributed.client")}
    for name in before:
        logging.getLogger(name).setLevel(max(level, before[name]))
    try:
        yield
    finally:
        for name in before:
            logging.getLogger(name).setLevel(before[name])


def _check_workers(client: Any, address: str) -> None:
    """Refuse workers without this version of safeload: they would die at their first piece and leave Dask waiting."""
    from pkgutil import resolve_name

    for worker, version in client.run(resolve_name, "safeload:__version__", on_error="return").items():
        if isinstance(version, (ImportError, AttributeError)):
            reason = f"{version}; install safeload and its packages on every worker"
        elif isinstance(version, str) and version != __version__:
            reason = f"expected safeload {__version__}, got {version}"
        else:
            continue
        raise SafeloadError(f"--dask {printable(address)}: worker {worker}: {reason}")


def _is_file(address: str) -> bool:
    return ":" not in address or os.path.exists(address)


def _address_in(path: str) -> str:
    """Return the address in a scheduler file, waiting for the file like Dask's own programs."""
    until = time.monotonic() + (_TIMEOUT if path.endswith(".json") else 0)
    while True:
        try:
            address = read_json(path, "a scheduler file").get("address")
            break
        except (FormatError, FileNotFoundError):
            if time.monotonic() > until:
                raise
            time.sleep(_INTERVAL)
    if not isinstance(address, str):
        raise FormatError("not a Dask scheduler file: it has no address", path)
    return address


def _try(address: str) -> None:
    """Connect to a scheduler and disconnect, because a failing `Client` takes 20 seconds to end."""
    import asyncio  # imported here: it takes tens of milliseconds

    from distributed import Security
    from distributed.comm import connect

    async def run() -> None:
        how: dict[str, Any] = Security().get_connection_args("client")
        connection = await connect(address, timeout=_TIMEOUT, **how)
        await connection.close()

    try:
        asyncio.run(run())
    except OSError:
        raise SafeloadError(f"--dask {printable(address)}: no scheduler answered in {_TIMEOUT} seconds") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"--dask {printable(address)}: {error}") from None


@contextmanager
def _failures(address: str) -> Iterator[None]:
    """Turn failures of a cluster into one-line errors."""
    from concurrent.futures import CancelledError

    from distributed import client
    from distributed.scheduler import KilledWorker

    lost = (CancelledError, getattr(client, "ClosedClientError", CancelledError))  # releases of 2023 have no such class
    try:
        yield
    except KilledWorker as error:
        raise SafeloadError(f"--dask {printable(address)}: one piece killed several workers: {error}") from None
    except lost:
        raise SafeloadError(f"--dask {printable(address)}: the connection to the scheduler was lost") from None
    except ImportError as error:
        raise SafeloadError(
            f"--dask {printable(address)}: {error}; install safeload and its packages on every worker"
        ) from None
