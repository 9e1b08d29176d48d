"""``logging.getLogger("safeload")``: silent unless the program that uses us asks for it, or should know.

`logging` takes milliseconds to import; a program that wants to hear the details has imported it, so `debug` never does.
"""

from __future__ import annotations

import sys

NAME = "safeload"


def debug(message: str, *arguments: object) -> None:
    """A line for whoever debugs."""
    logging = sys.modules.get("logging")
    if logging is not None and hasattr(logging, "getLogger"):
        logging.getLogger(NAME).debug(message, *arguments)


def warning(message: str, *arguments: object) -> None:
    """A line for whoever uses the result: on stderr, unless the program handles log records."""
    import logging

    logging.getLogger(NAME).warning(message, *arguments)
