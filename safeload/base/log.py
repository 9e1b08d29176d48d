"""``logging.getLogger("safeload")``: warnings, and details for programs that ask for them.

Importing `logging` takes milliseconds. A program that wants the details has imported it already, so `debug` never does.
"""

from __future__ import annotations

import sys

NAME = "safeload"


def debug(message: str, *arguments: object) -> None:
    """Logs a line for debugging."""
    logging = sys.modules.get("logging")
    if logging is not None and hasattr(logging, "getLogger"):
        logging.getLogger(NAME).debug(message, *arguments)


def warning(message: str, *arguments: object) -> None:
    """Logs a line for the user of the result: on stderr, unless the program handles log records."""
    import logging

    logging.getLogger(NAME).warning(message, *arguments)
