"""Files of `torch.save` with a process's part of a checkpoint: pickles that describe tensors in their archives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..base.listed_table import Listing
from ..base.messages import error_about
from ..base.text import show
from ..engine.run.weight_file import WeightFile, open_without_table
from ..errors import FormatError, UnsupportedError
from ..stores.files import Files
from .boxed import InFile
from .torch.globals import SUBCLASS, PickledTensor
from .torch.tensors import TensorPlaces
from .torch.zip_file import read_tensors
from .unpickle.machine import describe
from .unpickle.run import Unpickled, check_foreign
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

    def listing(self, name: str, tensor: Any) -> Listing:
        """Return the place of a tensor."""
        if type(tensor) is not PickledTensor:
            raise error_about(
                FormatError, f"must be a tensor, got {describe(tensor)}", path=self.file.path, tensor=name
            )
        if type(tensor.pending) is dict and SUBCLASS in tensor.pending:  # it may be the part of a process
            text = f"is a {show(str(tensor.pending[SUBCLASS]).rpartition('.')[2])}, which safeload does not know"
            raise error_about(UnsupportedError, text, path=self.file.path, tensor=name)
        listing = self.places.place(name, tensor)
        if listing.unknown is not None:
            text = f": {listing.unknown.label} {listing.unknown.reason}"
            raise error_about(UnsupportedError, text, path=self.file.path, tensor=name)
        if listing.row.packed:
            text = f"is {listing.row.code}, which rank files are not known to hold"
            raise error_about(UnsupportedError, text, path=self.file.path, tensor=name)
        return listing

    def stored(self, listing: Listing) -> InFile:
        """Return the elements of a tensor as the content of a box."""
        return InFile(self.file.store, listing.begin, listing.strides)


def open_rank(files: Files, path: str, known: re.Pattern[str], *, inert: bool) -> RankFile:
    """Open the file of a process and run its pickle; ``known`` globals become placeholders, and all if ``inert``."""
    file = open_without_table(path, files=files)
    try:
        archive = Archive(file)
        archive.prefetch(archive.entries)
        pickled, places = read_tensors(archive, file, inert=True)
        named = dict.fromkeys(pickled.harmless, True) | {
            name: known.fullmatch(name) is not None for name in pickled.foreign
        }
        unknown = [name for name, harmless in named.items() if not harmless]
        check_foreign(unknown, file.path, inert, "the pickle references")
        return RankFile(file, pickled, places, named)
    except BaseException:
        file.close()
        raise
