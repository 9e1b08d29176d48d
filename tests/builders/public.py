"""Every public name, and the functions that users call through it."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import safeload

PACKAGE = safeload.__path__[0]
REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "api"


def doors():
    """The modules with public names."""
    return [safeload, *(getattr(safeload, name) for name in safeload._MODULES)]


def public_names():
    """Public functions, classes and values by their name: of every door and of the reference."""
    names = {f"safeload.{name}": getattr(safeload, name) for name in safeload._MODULE_OF}
    for door in doors()[1:]:
        names.update({f"{door.__name__}.{name}": getattr(door, name) for name in door.__all__})
    for page in sorted(REFERENCE.glob("*.md")):
        for name in re.findall(
            r"^\.\. auto(?:function|class|exception):: ([\w.]+)", page.read_text("utf-8"), re.MULTILINE
        ):
            module, _, last = name.rpartition(".")
            names[name] = getattr(import_module(module), last)
    return names


def own(value):
    """Whether a function or class is safeload's."""
    return getattr(value, "__module__", None) is not None and value.__module__.partition(".")[0] == "safeload"


def classes():
    """Public classes, and the classes of safeload below and above them."""
    names = public_names()
    found = [value for value in names.values() if inspect.isclass(value) and own(value)]
    for kind in found:
        found += [other for other in (*type.__subclasses__(kind), *kind.__mro__) if own(other) and other not in found]
    return list(dict.fromkeys(found))


def functions():
    """Public functions by name, and the methods of public classes by class and name."""
    for value in dict.fromkeys(value for value in public_names().values() if inspect.isfunction(value)):
        yield f"{value.__module__}.{value.__qualname__}", value
    for kind in classes():
        for name, value in vars(kind).items():
            function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            internal = re.match(r"_(?!_)", name) or ":meta private:" in (getattr(value, "__doc__", None) or "")
            written = inspect.isfunction(function) and inspect.getfile(inspect.unwrap(function)).startswith(PACKAGE)
            if written and not internal:
                yield f"{kind.__qualname__}.{name}", function
