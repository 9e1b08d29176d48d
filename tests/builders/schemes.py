"""The formats of engines that ``safeload convert --help`` lists."""

import contextlib
import io
import os
import re
from unittest import mock

from builders.inside import main


def _help():
    text = io.StringIO()
    settings = mock.patch.dict(os.environ, COLUMNS="9999")
    with settings, contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(["convert", "--help"])
    return text.getvalue()


# Without "mlx", which quantizes nothing.
_LISTED = re.search(r"also the formats of engines: (.*)", _help())[1].split(", ")
ENGINE_FORMATS = [name for name in _LISTED if name != "mlx"]
