"""``logging.getLogger("safeload")``: silent unless the program that uses us asks for it.

`logging` takes milliseconds to import; a program that wants to hear us has imported it, so we never do.
"""

from __future__ import annotations

import sys

NAME = "safeload"


def debug(message: str, *arguments: object) -> None:
    """A line for whoever debugs."""
    logging = sys.modules.get("logging")
    if logging is not None and hasattr(logging, "getLogger"):
        logger = logging.getLogger(NAME)
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())
        logger.debug(message, *arguments)
