"""Files of `torch.save` with a process's part of a checkpoint: pickles that describe tensors in their archives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..base.messages import error_about
from ..base.table import Listing
from ..base.text import show
from ..engine.run.weight_file import WeightFile, open_without_table
from ..errors import FormatError, UnsupportedError
from .boxed import BoxedListing, Region, boxed_file, in_one_box
from .registry import Content, OpenRequest
from .torch.globals import SUBCLASS, PickledTensor
from .torch.tensors import TensorPlaces
from .torch.zip_file import read_tensors
from .unpickle.machine import Unpickled, check_foreign, describe
from .zip import Archive


class RankFile(NamedTuple):
    """An open file of a process."""

    file: WeightFile
    pickled: Unpickled
    places: TensorPlaces
    named_globals: Mapping[str, bool]  # see `Table`

    @property
    def value(self) -> dict[Any, Any]:
        """The dict of the pickle."""
        value = self.pickled.value
        if type(value) is not dict:
            raise FormatError(f"expected a dict, got {describe(value)}", self.file.path)
        return value

    def field(self, name: str, kind: type[Any] | tuple[type[Any], ...], within: Any = None) -> Any:
        """Return a field of the pickle, or of a dict in it."""
        holder = self.value if within is None else within
        value = holder.get(name) if type(holder) is dict else None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise FormatError(f"the field {show(name)} is missing or malformed, got {describe(value)}", self.file.path)
        return value

    def unsupported(self, name: str, text: str) -> UnsupportedError:
        """Return the error for a tensor that safeload does not read."""
        return error_about(UnsupportedError, text, path=self.file.path, tensor=name)

    def fault(self, name: str, text: str) -> FormatError:
        """Return the error for a malformed tensor."""
        return error_about(FormatError, text, path=self.file.path, tensor=name)

    def listing(self, name: str, tensor: Any) -> Listing:
        """Return the place of a tensor."""
        if type(tensor) is not PickledTensor:
            raise self.fault(name, f"must be a tensor, got {describe(tensor)}")
        if type(tensor.pending) is dict and SUBCLASS in tensor.pending:  # it may be the part of a process
            kind = show(str(tensor.pending[SUBCLASS]).rpartition(".")[2])
            raise self.unsupported(name, f"is a {kind}, which safeload does not know")
        listing = self.places.place(name, tensor)
        if listing.unknown is not None:
            raise self.unsupported(name, f": {listing.unknown.label} {listing.unknown.reason}")
        if listing.row.packed:
            raise self.unsupported(name, f"is {listing.row.code}, which rank files are not known to hold")
        return listing

    def stored(self, listing: Listing) -> Region:
        """Return the elements of a tensor."""
        return Region(self.file.store, listing.begin, listing.strides)

    def whole(self, listing: Listing) -> BoxedListing:
        """Return a tensor in a single box."""
        return in_one_box(listing.row, listing.shape, self.stored(listing))


class RankFolder:
    """The folder of a checkpoint, and its open rank files; leaving it with an error closes them."""

    def __init__(self, file: WeightFile, known: re.Pattern[str], request: OpenRequest) -> None:
        self.file = file
        self._files, self._folder = file.files, file.files.split(file.place)[0]
        self.path = self._files.shown(self._folder)
        self.names = [name for name, is_folder in self._files.listing(self._folder) if not is_folder]
        self._known, self._inert = known, request.inert
        self._ranks: list[RankFile] = []

    def __enter__(self) -> RankFolder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for rank in self._ranks if kind is not None else ():
            rank.file.close()

    def open(self, name: str) -> RankFile:
        """Open a file and run its pickle; known globals become placeholders, and all if the request is inert."""
        file = open_without_table(self._files.join(self._folder, name), files=self._files)
        try:
            archive = Archive(file)
            archive.prefetch(archive.entries)
            pickled, places = read_tensors(archive, file, inert=True)
            named = dict.fromkeys(pickled.harmless, True)
            named |= {name: self._known.fullmatch(name) is not None for name in pickled.foreign}
            unknown = [name for name, harmless in named.items() if not harmless]
            check_foreign(unknown, file.path, self._inert, "the pickle references")
        except BaseException:
            file.close()
            raise
        self._ranks.append(RankFile(file, pickled, places, named))
        return self._ranks[-1]

    def content(self, tensors: Mapping[str, BoxedListing], metadata: Mapping[str, Any] | None) -> Content:
        """Return the tensors of all files."""
        named = {name: harmless for rank in self._ranks for name, harmless in rank.named_globals.items()}
        stores = [rank.file.store for rank in self._ranks]
        opened = boxed_file(self.file, tensors, stores, folder=self._folder, metadata=metadata, named_globals=named)
        return Content(opened)
