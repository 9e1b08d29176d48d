"""The API of safetensors beyond loading and saving, and the names that the drop-in modules import on first access."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

_PACKAGE = __name__.partition(".")[0]

# Names that every framework module of safetensors imports, with the module and the name of their definition.
SHARED = {
    "TensorSpec": ("compat.serialize", "TensorSpec"),
    "deserialize": ("compat.serialize", "deserialize"),
    "safe_open": ("compat.safe_open", "safe_open"),
    "serialize": ("compat.serialize", "serialize"),
    "serialize_file": ("compat.serialize", "serialize_file"),
}

# Names of the package itself.
PACKAGE = {
    **SHARED,
    "PrefetchLoader": ("compat.safe_open", "PrefetchLoader"),
    "PySafeSlice": ("compat.safe_open", "SafeSlice"),
    "SafetensorError": ("errors", "SafetensorError"),
    "TensorMeta": ("compat.serialize", "TensorMeta"),
    "_safe_open_handle": ("compat.safe_open", "_safe_open_handle"),
}


def imported(namespace: dict[str, Any], names: Mapping[str, tuple[str, ...]], name: str) -> Any:
    """Import a name into a module's namespace and return its value: the body of a module's ``__getattr__``.

    ``names`` has the module and the attribute of each name, or also a key of the attribute, which it may lack (None).
    """
    if name not in names:
        raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
    module, attribute, *key = names[name]
    value = getattr(import_module(f"{_PACKAGE}.{module}"), attribute)
    namespace[name] = value = value.get(*key) if key else value
    return value
