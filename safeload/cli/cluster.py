"""``--dask``: runs the pieces of a command on a Dask cluster."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._version import __version__
from ..base import log
from ..base.text import printable
from ..errors import FormatError, SafeloadError
from ..operations.sources.executors import Executor
from ..stores.json_file import read_json

# Seconds until a scheduler has answered.
_TIMEOUT = 10
# And between two looks for its file.
_INTERVAL = 0.05


def add_dask(parser: Any) -> None:
    """Adds --dask."""
    parser.add_argument(
        "--dask",
        metavar="ADDRESS",
        help='run on the workers of a Dask cluster, which see the same files: "tcp://HOST:8786" or its scheduler file',
    )


@contextmanager
def cluster(address: str | None) -> Iterator[Executor | None]:
    """The executor of a Dask cluster; None if there is no address.

    Args:
        address: of the scheduler, or the path of its scheduler file.

    Raises:
        SafeloadError: Dask is not installed, no scheduler answers, or the cluster fails.
        FormatError, OSError: a scheduler file that cannot be read.
        ValueError: what cannot be an address.
    """
    if address is None:
        yield None
        return
    try:
        from distributed import Client
    except ImportError as error:
        if error.name not in ("distributed", "dask"):
            raise  # it is installed, and broken
        raise SafeloadError("--dask needs Dask, which is not installed: pip install distributed") from None
    found = _address_in(address) if _is_file(address) else address
    _try(found)
    with _quiet(), Client(found, timeout=_TIMEOUT, set_as_default=False) as client:
        if client.scheduler_info()["workers"]:
            _check_workers(client, found)
        else:
            print(f"safeload: --dask {printable(found)}: no workers yet, waiting for one", file=sys.stderr, flush=True)
        with _failures(found):
            yield client.get_executor(pure=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Dask's log off stderr, where tracebacks would surround the one line that matters; not with --verbose."""
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
    """Refuses workers without this safeload: one that has none dies of its first piece, and Dask waits forever.

    Raises:
        SafeloadError: there is one.
    """
    from pkgutil import resolve_name

    for worker, version in client.run(resolve_name, "safeload:__version__", on_error="return").items():
        if isinstance(version, (ImportError, AttributeError)):
            said = f"{version}: every worker needs what is installed here"
        elif isinstance(version, str) and version != __version__:
            said = f"it has safeload {version}, and this is safeload {__version__}"
        else:
            continue
        raise SafeloadError(f"--dask {printable(address)}: worker {worker}: {said}")


def _is_file(address: str) -> bool:
    return ":" not in address or os.path.exists(address)


def _address_in(path: str) -> str:
    """The address in a scheduler file. One that is not there yet is waited for, as Dask's own programs do.

    Raises:
        FormatError: it is not such a file.
        OSError: it cannot be read.
    """
    until = time.monotonic() + (_TIMEOUT if path.endswith(".json") else 0)
    while True:
        try:
            found = read_json(path, "a scheduler file").get("address")
            break
        except (FormatError, FileNotFoundError):
            if time.monotonic() > until:
                raise
            time.sleep(_INTERVAL)
    if not isinstance(found, str):
        raise FormatError("not a scheduler file of Dask: it has no address", path)
    return found


def _try(address: str) -> None:
    """Connects to a scheduler, and closes the connection: a `Client` that fails takes 20 seconds to end.

    Raises:
        SafeloadError: nothing answers.
        ValueError: this is not an address, or it needs what is not configured.
    """
    import asyncio  # these only here: they take tens of milliseconds

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
    """Says in one line how a cluster has failed."""
    from concurrent.futures import CancelledError

    from distributed.scheduler import KilledWorker

    try:
        yield
    except KilledWorker as error:
        raise SafeloadError(
            f"--dask {printable(address)}: workers died again and again at one piece: {error}"
        ) from None
    except CancelledError:
        raise SafeloadError(f"--dask {printable(address)}: the connection to the scheduler was lost") from None
    except ImportError as error:
        raise SafeloadError(
            f"--dask {printable(address)}: {error}: every worker needs what is installed here"
        ) from None
