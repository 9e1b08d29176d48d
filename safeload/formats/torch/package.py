"""The format of torch.package: a zip archive of code, data and pickles that share storages.

1. ``<top>/.data/version`` and ``<top>/.data/extern_modules`` are in every package.
2. ``save_pickle("package", "resource", value)`` makes ``<top>/package/resource``, with any suffix. Saved text, saved
   bytes and code are beside it. Pickles are recognised by their first bytes.
3. Storages are ``<top>/.data/<key>.storage``. In the pickles of scripts, the key includes that suffix.
4. An object that saves itself (``__reduce_package__``) is a persistent id ("reduce_package", number, function,
   arguments), before torch 1.11 without the number. The id of a script names its pickle,
   ``<top>/.data/ts_code/<id>/data.pkl``, and the tensors of that pickle take its place.

Tensor names begin with "package/resource" if there are several pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...base.messages import error_about
from ...base.text import show
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, LimitError, TensorNotFoundError, UnsupportedError
from .. import zip as archive
from ..foreign import is_binary_pickle
from ..unpickle import run as unpickler
from ..unpickle.machine import Fault, Foreign, Inert, describe
from ..unpickle.run import Unpickled, check_foreign, unpickle
from ..zip import DEFLATED, STORED, Archive
from .globals import ALLOWED, Storage, read_persistent_id

KIND = "a torch.package archive"

# The function that replaces the persistent id of a script.
_SCRIPT = "torch.jit._script.unpackage_script_module"
# Usual suffix of names for `save_pickle`. Entries without it can be anything that begins like a pickle.
SUFFIX = ".pkl"

_HOW = 'in a persistent id of "reduce_package"'


def top_of(zipped: Archive) -> str | None:
    """Return the top folder of a package, "" or with a trailing slash; None for other archives."""
    end = ".data/extern_modules"
    tops = (name.removesuffix(end) for name in zipped.entries if name.endswith(end) and name.count("/") <= 2)
    return next((top for top in tops if f"{top}.data/version" in zipped.entries and top[-1:] in ("", "/")), None)


class Package:
    """The pickles of a package; see `top_of` for ``top``."""

    def __init__(self, zipped: Archive, file: WeightFile, top: str) -> None:
        self._archive = zipped
        self._file = file
        self._top = top
        self._path = file.path
        self._storages: dict[str, dict[str, Storage]] = {}  # by type: tensors can view a storage as several types
        self._scripts: dict[str, list[Inert]] = {}
        self._objects: dict[str, Inert] = {}  # by number: objects that saved themselves
        self._read = [0, 0]  # bytes of compressed and of stored pickles

    def read(self, root: str | None, inert: bool) -> tuple[Unpickled, str | None]:
        """Return the objects of the pickles, by name if several, and ``root`` without the name of a pickle."""
        names = self._find()
        if not names:
            raise error_about(UnsupportedError, f"this is {KIND} without a pickle", path=self._path)
        chosen = [name for name in names if root is not None and (root == name or root.startswith(f"{name}."))]
        if chosen:
            names = chosen[:1]
            root = None if root == names[0] else (root or "")[len(names[0]) + 1 :]
        elif root is not None and len(names) > 1:
            shown = ", ".join(show(name)[1:-1] for name in names[:20]) + ", ..." * (len(names) > 20)
            text = f"no container {show(root)}; the pickles are {shown}"
            raise error_about(TensorNotFoundError, text, path=self._path)
        pickles = {}
        for name in names:
            pickled = self._unpickle(name, self._persistent)
            if pickled is not None:
                pickles[name] = pickled
        if not pickles:
            raise error_about(UnsupportedError, f"this is {KIND} without a readable pickle", path=self._path)
        parts = [*pickles.values(), *self._read_scripts()]
        foreign = sorted({name for part in parts for name in part.foreign})
        check_foreign(foreign, self._path, inert, f"this is {KIND}; its pickles reference")
        harmless = sorted({name for part in parts for name in part.harmless})
        value = {name: pickled.value for name, pickled in pickles.items()}
        if len(pickles) == 1:
            (value,) = value.values()
        return Unpickled(value, 0, sum(part.size for part in parts), harmless, foreign), root

    def _find(self) -> list[str]:
        """Return the names of the pickles; of scripts only if no other pickle could refer to them."""
        data = f"{self._top}.data/"
        names = [
            name.removeprefix(self._top)
            for name in self._archive.entries
            if name.startswith(self._top) and not name.startswith(data) and self._is_pickle(name)
        ]
        self._archive.check_overlap()  # before any is read, because entries could share bytes
        scripts = f"{data}ts_code/"
        return names or [
            name.removeprefix(self._top)
            for name in self._archive.entries
            if name.startswith(scripts) and name.endswith("/data.pkl") and name.count("/", len(scripts)) == 1
        ]

    def _is_pickle(self, name: str) -> bool:
        info = self._archive.entries[name]
        if info.size < 3 or name.endswith((".py", "/")):
            return False
        if info.method == STORED:
            head = self._file.read_at(self._archive.locate(name), 2)
        elif info.method == DEFLATED:
            head = next(self._archive.inflate(name), b"")
        else:
            return name.endswith(SUFFIX)
        return is_binary_pickle(head)

    def _unpickle(self, name: str, persistent: Callable[[Any], Any]) -> Unpickled | None:
        """Run a pickle; return None if the bytes only begin like a pickle."""
        whole = self._top + name
        info = self._archive.entries[whole]
        stored = info.method == STORED
        self._read[stored] += info.size
        for size, limit in zip(self._read, (archive.MAX_INFLATED, unpickler.MAX_PICKLE), strict=True):
            if size > limit:
                text = f"the pickles of the package have more than {limit} bytes"
                raise error_about(LimitError, text, path=self._path)
        data, base = self._archive.read(whole)
        try:
            pickled = unpickle(data, ALLOWED, persistent, path=self._path, base=base, inert=True)
        except FormatError:
            if name.endswith(SUFFIX):
                raise
            return None
        return pickled._replace(data=b"", places={})  # otherwise the bytes of all pickles would stay in memory

    def _persistent(self, value: Any) -> Any:
        if type(value) is not tuple or not value or value[0] != "reduce_package":
            return self._storage(value)
        if len(value) not in (3, 4) or type(value[-1]) is not tuple or type(value[-2]) not in (Foreign, Inert):
            raise Fault(f"expected a number, a function and its arguments {_HOW}")
        number, function, args = (None, *value[1:])[-3:]
        if number is not None and type(number) is not int:
            raise Fault(f"the number must be an integer, got {describe(number)}, {_HOW}")
        value = self._objects.get(str(number)) if number is not None else None
        if value is None:
            value = Inert(function.name, args)
            if number is not None:
                self._objects[str(number)] = value
            if function.name == _SCRIPT and len(args) == 1 and type(args[0]) is str:
                self._scripts.setdefault(args[0], []).append(value)
        return value

    def _storage(self, value: Any) -> Any:
        kind = value[1] if type(value) is tuple and len(value) > 1 else None
        return read_persistent_id(value, self._storages.setdefault(getattr(kind, "name", ""), {}))

    def _read_scripts(self) -> Iterator[Unpickled]:
        """Run the pickles of the named scripts and put each in place of its persistent id."""
        for key, placeholders in self._scripts.items():
            name = f".data/ts_code/{key}/data.pkl"
            if self._top + name not in self._archive.entries:
                raise FormatError(f"the package has no entry for script {show(key)}", self._path)
            script = self._unpickle(name, self._storage)
            assert script is not None  # the name has `SUFFIX`
            for placeholder in placeholders:
                _fill(placeholder, script.value)
            yield script


def _fill(placeholder: Inert, value: Any) -> None:
    """Replace the placeholder of a script with its object."""
    if type(value) is Inert:
        placeholder.name, placeholder.args = value.name, value.args
        placeholder.items, placeholder.state = value.items, value.state
    else:
        placeholder.state = value


def entry_of(zipped: Archive, storage: Storage, top: str) -> str:
    """Return the name of a storage's entry, even if the entry does not exist."""
    name = f"{top}.data/{storage.key}.storage"
    if name not in zipped.entries and storage.key.endswith(".storage"):  # in a script
        name = name.removesuffix(".storage")
    return name
