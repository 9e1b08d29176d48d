"""Put safeload in the place of safetensors: Python runs this file at start if its folder is on PYTHONPATH.

Nothing is imported until the program asks for safetensors. If safeload does not work in this Python, the program gets
the real package. Any Python 3 can run this file, and Python 2 skips it without a message.
"""

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # programs that never ask for safetensors need no typing
if TYPE_CHECKING:
    from typing import Any  # noqa: F401 - in comments, because Python 2 has no annotations


class ShimFinder:
    """Pass what is asked about safetensors to safeload's finder."""

    _finder = None  # type: Any  # False if safeload does not work here

    def _ask(self):  # type: () -> Any
        if self._finder is None:
            try:
                from safeload.compat.alias import working_finder

                self._finder = working_finder()
            except Exception:
                self._finder = False
        return self._finder

    def find_spec(self, name, path=None, target=None):  # type: (str, object, object) -> Any
        """Return safeload's spec for a module of safetensors."""
        return self._ask().find_spec(name) if name.partition(".")[0] == "safetensors" and self._ask() else None

    def find_distributions(self, context=None):  # type: (Any) -> Any
        """Return safeload's distribution for safetensors."""
        name = getattr(context, "name", None) or ""  # none to list all distributions
        return self._ask().find_distributions(context) if name.lower() == "safetensors" and self._ask() else ()


sys.meta_path.insert(0, ShimFinder())

# Programs see the path without this folder, and the sitecustomize.py that it hides runs.
_here = os.path.dirname(os.path.abspath(__file__))
_path = [os.path.abspath(entry) for entry in sys.path]
_hidden = None
if _here in _path:
    _position = _path.index(_here)
    _hidden = PathFinder.find_spec("sitecustomize", _path[_position + 1 :])
    del sys.path[_position]
if _hidden is not None and _hidden.loader is not None:
    from importlib.util import module_from_spec

    sys.modules["sitecustomize"] = module_from_spec(_hidden)
    _hidden.loader.exec_module(sys.modules["sitecustomize"])
