"""Edits of a folder of shards with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from ...base.text import show
from ...engine.run.atomic_file import AtomicFile, Swap
from ...errors import FormatError, UnsupportedError, public
from ...formats.folder import parse_index
from ...formats.numbered import PART
from ...stores.files import LOCAL
from ...stores.json_file import read_json
from ..folders.disk_sink import DiskSink, remove_killed
from ..folders.sink import free_names
from .edit_base import Edit, EditedMetadata, resolved
from .edit_file import SafetensorsEdit, edit_file


class FolderEdit(Edit):
    """An edit of the shards of an index."""

    def __init__(self, index: str, *, force: bool, durable: bool) -> None:
        super().__init__()
        self.path = index
        self._real = resolved(index, force=True)  # a new file replaces it
        self._content = read_json(self._real, "an index")
        parse_index(self._content, index, LOCAL)
        self._files: dict[str, str] = dict(self._content["weight_map"])
        self._shards: dict[str, SafetensorsEdit] = {}
        with self._stack:  # closed unless everything opens
            for file in dict.fromkeys(self._files.values()):
                shard = edit_file(os.path.join(os.path.dirname(self._real), file), force=force, durable=durable)
                if not isinstance(shard, SafetensorsEdit):
                    raise UnsupportedError(f"{shard.path}: only folders of safetensors shards can be edited")
                self._stack.enter_context(shard._stack)
                self._shards[file] = shard
            self._check_index()
            self._stack = self._stack.pop_all()
        first = next(iter(self._shards.values()), None)
        self.metadata = self._edited = EditedMetadata({} if first is None else dict(first.metadata), texts=True)

    def _check_index(self) -> None:
        for name, file in self._files.items():
            if name not in self._shards[file]:
                raise FormatError(f"the index names tensor {show(name)} in {file}, which does not have it", self.path)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._files])

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    @public
    def rename(self, old: str, new: str) -> None:
        self._check_known(old)
        if old != new:
            self._check_new(new)
            self._shards[self._files[old]].rename(old, new)
            self._files[new] = self._files.pop(old)

    @public
    def __delitem__(self, name: str) -> None:
        self._check_known(name)
        del self._shards[self._files[name]][name]
        del self._files[name]

    @public
    def __setitem__(self, name: str, array: Any) -> None:
        if name not in self:
            self._check_new(name)
        if not self._shards:
            raise UnsupportedError(f"{self.path} names no shard that could get a tensor")
        file = self._files.get(name) or next(reversed(self._shards))
        self._shards[file][name] = array
        self._files[name] = file

    def _write(self) -> None:
        for shard in self._shards.values():
            for key, value in self._edited.changes.items():
                if value is not None:
                    shard.metadata[key] = value
                elif key in shard.metadata:
                    del shard.metadata[key]
        replaced = {file: shard for file, shard in self._shards.items() if not shard.in_place}
        folder = os.path.dirname(self._real)
        numbered = {
            file: file if PART.fullmatch(file) else "-00001-of-00001".join(os.path.splitext(file)) for file in replaced
        }
        free = free_names(DiskSink(LOCAL, folder), numbered.values())
        names = {file: free[name] for file, name in numbered.items()}
        with ExitStack() as stack:
            # If this process is killed, the temporary index names the new shards, and the hidden one the old shards.
            index = self._new_index(stack, names) if replaced else None
            swap = stack.enter_context(Swap())
            for file, shard in replaced.items():
                if not len(shard):  # a shard without tensors leaves the folder
                    continue
                path = os.path.join(folder, names[file])
                swap.undo.append(partial(_remove, path))
                shard.write_to(path, overwrite=False)
            for file, shard in self._shards.items():
                if file not in replaced:
                    shard._write()
                    swap.undo.append(partial(_undo, shard))
            if index is not None:
                swap.put(str(index.temporary), self._real)
            finished = swap.finish([os.path.join(folder, file) for file in replaced])
            if index is not None:
                index.temporary = None  # it is in place
        if finished and replaced:
            remove_killed(DiskSink(LOCAL, folder))

    def _new_index(self, stack: ExitStack, names: dict[str, str]) -> AtomicFile:
        """Return the sealed index with the new names of shards."""
        content = dict(self._content)
        content["weight_map"] = {name: names.get(file, file) for name, file in self._files.items()}
        total = sum(shard.nbytes for shard in self._shards.values())
        if isinstance(content.get("metadata"), dict) and "total_size" in content["metadata"]:
            content["metadata"] = {**content["metadata"], "total_size": total}
        text = (json.dumps(content, indent=2) + "\n").encode()
        file = stack.enter_context(AtomicFile(self._real, len(text)))
        with file.stream() as stream:
            stream.write(text)
        file.seal()
        return file


def _undo(shard: SafetensorsEdit) -> None:
    with suppress(OSError):  # the first error tells more; `open` says if the header must be recovered
        shard.undo()


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
