"""A config as integers for the expressions of a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.text import show
from .expressions import evaluate

# Name that stands for the number of a layer in a condition.
LAYER_NUMBER = "layer"


class ConfigError(ValueError):
    """A config lacks a key that a schema needs, or has a wrong value there."""


class Config:
    """The values of a config as integers, with a schema's defaults for missing keys.

    Args:
        values: parsed config.json; None without one.
        defaults: name to number or expression.
        file: what the config's file is called, for messages.
    """

    def __init__(
        self, values: Mapping[str, Any] | None, defaults: Mapping[str, int | str], file: str = "config.json"
    ) -> None:
        self._values = values
        self._defaults = defaults
        self._file = file
        self._open: list[str] = []
        self._layer: int | None = None
        self._depends = False
        self._found: dict[tuple[str, int | None], tuple[int, bool]] = {}

    def evaluate(self, text: str) -> int:
        """The value of an expression over the config.

        Raises:
            ConfigError: a key is missing, or its value is not an integer.
            ExpressionError: the expression has no value.
        """
        return evaluate(text, self, self.value)

    def holds(self, text: str, layer: int) -> tuple[bool, bool]:
        """Whether a condition holds in a layer, and whether that may differ in another one.

        Raises:
            ConfigError, ExpressionError: see `evaluate`.
        """
        self._layer, self._depends = layer, False
        try:
            return self.evaluate(text) != 0, self._depends
        finally:
            self._layer = None

    def _default(self, name: str, text: str) -> int:
        """The value of a default; each is found once in a layer, however many others need it."""
        key = name, self._layer
        if key not in self._found:
            self._open.append(name)
            depends, self._depends = self._depends, False
            self._found[key] = self.evaluate(text), self._depends
            self._depends |= depends
            self._open.pop()
        value, depends = self._found[key]
        self._depends |= depends
        return value

    def value(self, name: str) -> Any:
        """The value of a key as it is, or its default; None for neither."""
        found = self._find(name)
        default = self._defaults.get(name)
        if found is not None or default is None:
            return found
        return self(name) if isinstance(default, str) else default

    def _find(self, name: str) -> Any:
        found: Any = self._values
        for key in name.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def __call__(self, name: str) -> int:
        """The value of a key; "text.dim" is the key "dim" in the object "text".

        Raises:
            ConfigError: the key is missing, or its value is not an integer.
        """
        if name == LAYER_NUMBER:
            if self._layer is None:
                raise ConfigError(f"{name!r} is known only in the condition of a tensor with a number in its name")
            self._depends = True
            return self._layer
        value = self._find(name)
        if value is None and name in self._defaults:
            value = self._defaults[name]
            if isinstance(value, str):
                if name in self._open:
                    raise ConfigError(
                        f"the default of {show(name)} depends on itself: {' -> '.join([*self._open, name])}"
                    )
                value = self._default(name, value)
        if value is None:
            where = f"there is no {self._file}" if self._values is None else f"{self._file} lacks it"
            raise ConfigError(f"{show(name)} is required, but {where}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int):
            raise ConfigError(f"{show(name)} in {self._file} is {show(value)}, expected an integer")
        return int(value)
