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
from ..base.runtime import is_absent
from ..base.text import printable
from ..errors import FormatError, SafeloadError
from ..operations.sources.executors import Executor
from ..stores.json_file import read_json

_TIMEOUT = 10  # seconds to wait for a scheduler, or for its file
_ON_WORKERS = "install safeload and its packages on every worker"


def add_dask(parser: Any) -> None:
    """Add --dask."""
    text = 'run on a Dask cluster with access to the files: "tcp://HOST:8786", or a scheduler file'
    parser.add_argument("--dask", metavar="ADDRESS", help=text)


@contextmanager
def cluster(address: str | None) -> Iterator[Executor | None]:
    """Return the executor of a Dask cluster, by address or by path of a scheduler file, or None without an address."""
    if address is None:
        yield None
        return
    import logging  # only here: most commands need neither
    from concurrent.futures import CancelledError
    from pkgutil import resolve_name

    try:
        from distributed import Client, client
        from distributed.scheduler import KilledWorker
    except ImportError:
        if not is_absent("distributed") and not is_absent("dask"):
            raise  # Dask is installed but broken
        raise SafeloadError("--dask needs Dask, which is not installed: pip install distributed") from None
    is_file = ":" not in address or os.path.exists(address)
    scheduler = _address_in(address) if is_file else address
    option = f"--dask {printable(scheduler)}"
    _try(scheduler, option)
    if not logging.getLogger(log.NAME).isEnabledFor(logging.DEBUG):
        for name in ("distributed", "distributed.client"):  # their tracebacks would hide our message
            logging.getLogger(name).setLevel(logging.CRITICAL)
    lost = (CancelledError, getattr(client, "ClosedClientError", CancelledError))  # releases of 2023 have no such class
    try:
        with Client(scheduler, timeout=_TIMEOUT, set_as_default=False) as executor:
            waits = not executor.scheduler_info()["workers"]
            if waits:
                print(f"safeload: {option}: waiting for a worker", file=sys.stderr, flush=True)
            # Workers without this version of safeload would die at their first piece and leave Dask waiting.
            versions = {} if waits else executor.run(resolve_name, "safeload:__version__", on_error="return")
            for worker, version in versions.items():
                if isinstance(version, (ImportError, AttributeError)):
                    raise SafeloadError(f"{option}: worker {worker}: {version}; {_ON_WORKERS}")
                if isinstance(version, str) and version != __version__:
                    raise SafeloadError(f"{option}: worker {worker}: expected safeload {__version__}, got {version}")
            yield executor  # not its get_executor(): its future of a piece fails if the worker with the result dies
    except KilledWorker as error:
        raise SafeloadError(f"{option}: one piece killed several workers: {error}") from None
    except lost:
        raise SafeloadError(f"{option}: the connection to the scheduler was lost") from None
    except ImportError as error:
        raise SafeloadError(f"{option}: {error}; {_ON_WORKERS}") from None


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
            time.sleep(0.05)
    if not isinstance(address, str):
        raise FormatError("not a Dask scheduler file: it has no address", path)
    return address


def _try(address: str, option: str) -> None:
    """Connect to a scheduler and disconnect, because a failing `Client` takes 20 seconds to end."""
    import asyncio  # imported here: it takes tens of milliseconds

    from distributed import Security
    from distributed.comm import connect

    async def run() -> None:
        how: dict[str, Any] = Security().get_connection_args("client")
        await (await connect(address, timeout=_TIMEOUT, **how)).close()

    try:
        asyncio.run(run())
    except OSError:
        raise SafeloadError(f"{option}: no scheduler answered in {_TIMEOUT} seconds") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{option}: {error}") from None
