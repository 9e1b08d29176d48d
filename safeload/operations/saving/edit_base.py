"""The interface of edits, and the paths that can be edited."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...base import url as urls
from ...base.paths import PathLike, native_path
from ...base.text import show
from ...errors import TensorNotFoundError, UnsupportedError, exported, public
from ...formats.safetensors.header import text
from .values import check_name

if TYPE_CHECKING:
    from typing_extensions import Self

# Folders of the Hub's cache, in which one file can belong to several snapshots.
_CACHED = ("models--", "datasets--", "spaces--")


class EditedMetadata(MutableMapping[str, Any]):
    """The metadata of an edited file: its values, and the changes to them."""

    def __init__(self, values: Mapping[str, Any], *, texts: bool) -> None:
        self._values = values
        self._texts = texts  # True if all values are text
        self.changes: dict[str, Any] = {}  # None for a removed key

    def __getitem__(self, key: str) -> Any:
        value = self.changes[key] if key in self.changes else self._values[key]
        if value is None:
            raise KeyError(key)
        return value

    @public
    def __setitem__(self, key: str, value: Any) -> None:
        text(key, "a metadata key")
        if self._texts:
            text(value, f"metadata {show(key)}")
        elif value is None:
            raise TypeError(f"metadata {show(key)} must not be None; use del to remove it")
        self.changes[key] = value

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        if key in self._values:
            self.changes[key] = None
        else:
            del self.changes[key]

    def __iter__(self) -> Iterator[str]:
        for key in dict.fromkeys([*self._values, *self.changes]):
            if self.changes.get(key, self) is not None:
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


@exported()
class Edit(ABC):
    """An edit of a file or folder, which `safeload.edit` begins. Leaving the ``with`` block writes it.

    Names are those of the stored tensors. After an exception nothing is written.

    Attributes:
        path: path of the file or folder.
        metadata: a mutable mapping; text to text in safetensors files, text to values in GGUF files.

    Example:
        >>> import numpy as np, safeload
        >>> safeload.save({"w": np.ones(2, np.float32)}, "w.safetensors")
        >>> with safeload.edit("w.safetensors") as file:
        ...     file["bias"] = np.zeros(2, np.float32)
        ...     list(file)
        ['w', 'bias']
    """

    path: str
    metadata: MutableMapping[str, Any]

    def __init__(self) -> None:
        self._stack = ExitStack()

    @abstractmethod
    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the tensors."""

    @abstractmethod
    def __contains__(self, name: object) -> bool:
        """Return True if there is a tensor with this name."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tensors."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a tensor.

        Raises:
            TensorNotFoundError: there is no tensor of the old name.
            ValueError: there is a tensor of the new name.
            UnsupportedError: GGUF, or the tensor is a part of a quantized tensor.
        """

    @abstractmethod
    def __delitem__(self, name: str) -> None:
        """Remove a tensor; see `rename` for errors."""

    @abstractmethod
    def __setitem__(self, name: str, array: Any) -> None:
        """Add or replace a tensor by an array, which must not change before the end of the block.

        Raises:
            TypeError, SafetensorError: see `Writer.add`.
        """

    @abstractmethod
    def _write(self) -> None:
        """Write the changes."""

    def __enter__(self) -> Self:
        return self

    @public
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is None:
                self._write()

    def _check_known(self, name: str) -> None:
        if name not in self:
            raise TensorNotFoundError(f"{self.path}: no tensor {show(name)}", tensor=str(name))

    def _check_new(self, name: str) -> None:
        if check_name(name) in self:
            raise ValueError(f"{self.path}: there is a tensor {show(name)} already")


def local_path(path: PathLike) -> str:
    """Return a path of this machine."""
    text = native_path(path)[0]
    if urls.is_url(text):
        raise UnsupportedError(f"{urls.shown(text)}: only files on this machine can be edited")
    return text


def resolved(path: str, *, force: bool) -> str:
    """Return the path of a file without symbolic links."""
    real = os.path.realpath(path, strict=True)
    for place in (os.path.abspath(path), real):
        parts = place.split(os.sep)
        if any(part.startswith(_CACHED) and inner in ("blobs", "snapshots") for part, inner in pairwise(parts)):
            raise UnsupportedError(
                f"{path} is in the cache of the Hugging Face Hub, which other programs share: copy the file and edit "
                "the copy"
            )
    links = os.stat(real).st_nlink
    if links > 1 and not force:
        raise UnsupportedError(f"{path} has {links} hard links, and an edit may change all of them; pass force=True")
    return real
