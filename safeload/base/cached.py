"""`functools.cached_property` without the lock of Python 3.10 and 3.11.

All instances share the lock, so a child forked during a computation would wait forever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property:  # noqa: N801 - the standard library's name
        """Compute an attribute once per instance; concurrent threads may each compute it."""

        def __init__(self, function):
            self.function = function
            self.__doc__ = function.__doc__

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = self.function(instance)
            return instance.__dict__.setdefault(self.function.__name__, value)
