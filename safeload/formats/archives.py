"""Open the weights in a container: an archive whose members are files, or a folder of files, of other formats.

1. A container is not a format: the checkpoint has the format of its members. Containers in containers are refused.
2. The weights are the only weight file of its folder, or else the folder, opened like any other. Of the folders with
   weights those nearest to the top count. If several remain, ``root=`` names one: the path of a file or folder in the
   container.
3. Tensors that lie unpacked in members lie at a known place in the container, so the table is the container's own, and
   its arrays are views like those of any file. What a member must join or unpack is a file beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.listed_table import ListedTable, Listing
from ..base.messages import error_about
from ..base.text import clip, printable
from ..engine.run.weight_file import WeightFile
from ..errors import FormatError, UnsupportedError
from ..stores.members import MemberFiles, MemberStore
from . import folder as folders
from .numbered import is_set
from .registry import Opened, OpenRequest, open_file

# Most names in a message.
_SHOWN = 20
# Suffixes of files that are read with others, or that describe them.
_PARTS = (".distcp", ".json")


def open_members(container: WeightFile, files: MemberFiles, request: OpenRequest, *, kind: str) -> Opened:
    """Open the weights in a container; ``kind`` names it in messages, with its article."""
    path, request = _choose(container, files, request._replace(files=files), kind)
    if files.is_folder(path):
        shards = folders.open_folder(path, request)
    else:
        shards = folders.open_parts(open_file(path, request), request)
    return onto(container, shards, path)


def _choose(container: WeightFile, files: MemberFiles, request: OpenRequest, kind: str) -> tuple[str, OpenRequest]:
    """Return the path of the weights, and the request for it."""
    inside = _files(files)
    root = None if request.root is None else request.root.removeprefix("./").rstrip("/")
    if root and root in {files.join(*place) for place in inside}:
        return root, request._replace(root=None)
    if root and files.is_folder(root):
        inside = [(folder, name) for folder, name in inside if f"{folder}/".startswith(f"{root}/")]
        request = request._replace(root=None)
    weights: dict[str, list[str]] = {}
    for folder, name in inside:
        if folders.is_weight_file(name):
            weights.setdefault(folder, []).append(name)
    if not weights:
        text = f"this is {kind} without weights: it holds {_listed([files.join(*place) for place in inside])}"
        raise error_about(UnsupportedError, text, path=container.path)
    top = min(map(_depth, weights))
    nearest = [folder for folder in weights if _depth(folder) == top]
    if len(nearest) > 1:
        text = f"weights in {len(nearest):,} folders: {_listed(nearest)}; choose one with root="
        raise error_about(UnsupportedError, text, path=container.path)
    folder = nearest[0]
    names = weights[folder]
    if len(names) == 1 and not names[0].endswith(_PARTS):
        return files.join(folder, names[0]), request
    if all(name.endswith(".gguf") for name in names) and not is_set(names):
        shown = _listed([files.join(folder, name) for name in names])
        text = f"it holds {len(names):,} GGUF files: {shown}; choose one with root="
        raise error_about(UnsupportedError, text, path=container.path)
    return folder, request


def _files(files: MemberFiles) -> list[tuple[str, str]]:
    """Return the folder and the name of each file."""
    return [(folder, name) for folder in files.folders for name, is_folder in files.listing(folder) if not is_folder]


def _depth(folder: str) -> int:
    return folder.count("/") + 1 if folder else 0


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(clip(printable(name or "."), 100) for name in names[:_SHOWN]) or "nothing"
    return f"{shown} ..." if len(names) > _SHOWN else shown


def onto(container: WeightFile, shards: folders.Shards, path: str) -> Opened:
    """Return members' tensors as those of their container."""
    beside = [file for file in shards.files if not isinstance(file.store, MemberStore)]
    if len(beside) > 1:
        for file in beside:
            file.close()
        text = f"{len(beside):,} of its files must be unpacked: extract {printable(path) or 'them'} first"
        raise error_about(UnsupportedError, text, path=container.path)
    listings: list[Listing] = []
    for name, (file, index) in shards.where.items():
        if isinstance(file.store, MemberStore):
            listings.append(_listing(name, file, index, file.store.begin))
    named: dict[str, bool] = {}
    unknown: dict[str, Any] = {}
    ternary: dict[str, tuple[int, ...]] = {}
    for file in shards.files:
        named.update(file.table.named_globals)
        unknown.update(file.table.unknown)
        ternary.update(file.table.ternary)
    table = ListedTable(listings, shards.metadata, named_globals=named)
    table.unknown, table.ternary = unknown, ternary
    container.table = table
    for file in beside:
        file.path = container.path
        file.stand_for(container, unpacked=file.unpacked)
    names = list(shards.where) if beside else ()
    return Opened(shards.format, container, beside, names, shards.notes, shards.config)


def _listing(name: str, file: WeightFile, index: int, shift: int) -> Listing:
    """Describe a tensor of a member by its place in the container."""
    table = file.table
    if table.scale(index) is not None or table.packed(index) is not None:
        raise FormatError("a member has scales before they were looked for", file.path)
    begin, end = table.byte_range(index)
    strides, big_endian = table.strides(index), table.big_endian(index)
    row, shape = table.row(index), table.shape(index)
    return Listing(name, row, shape, begin + shift, end + shift, strides, big_endian=big_endian)
