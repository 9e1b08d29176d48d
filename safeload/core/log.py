"""``logging.getLogger("safeload")``: warnings for users, and details for programs if enabled.

Importing `logging` takes milliseconds, so `debug` never does: a program that wants the details has imported it already.
"""

from __future__ import annotations

import sys

NAME = "safeload"


def debug(message: str, *arguments: object) -> None:
    """Log a line for debugging."""
    logging = sys.modules.get("logging")
    if logging is not None and hasattr(logging, "getLogger"):
        logging.getLogger(NAME).debug(message, *arguments)


def warning(message: str, *arguments: object) -> None:
    """Log a line for the user: on stderr, unless the program handles log records."""
    import logging

    logging.getLogger(NAME).warning(message, *arguments)
