"""Edit metadata and tensors of a file, or of a folder of shards with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from ...base import url as urls
from ...base.paths import PathLike, native_path
from ...base.text import show
from ...engine.run.atomic_file import AtomicFile, Swap, remove_abandoned
from ...errors import FormatError, UnsupportedError, public
from ...formats.folder import INDEX, SINGLE, parse_index
from ...formats.numbered import PART
from ...stores.edit_journal import Locked, recover
from ...stores.files import LOCAL
from ...stores.json_file import read_json
from ..folders.disk_sink import DiskSink, remove_killed
from ..folders.sink import free_names
from .edit_file import Edit, SafetensorsEdit, edit_file, resolved


@public
def edit(path: PathLike, *, force: bool = False, durable: bool = True) -> Edit:
    """Change metadata, names and tensors of a safetensors file or folder, or the metadata of a GGUF file.

    Changes of metadata and names are written in place if the header has enough room, as in files by `Writer`, `save`,
    `convert` and `edit`; this takes milliseconds, however large the file is. All other changes write a new file, which
    shares blocks with the old file if the system can, and rename it. In both cases there is the old content or the new
    content after a crash: if `open` reports an interrupted edit, ``safeload edit --recover FILE`` completes it. Arrays
    of an open checkpoint keep their values.

    In a folder with an index, shards with changed tensors get new names before the index names them. Metadata is
    changed in each shard.

    Args:
        path: a ".safetensors" or ".gguf" file, a folder, or an index. Symbolic links are followed, but not into the
            cache of the Hugging Face Hub.
        force: True to edit a file that has several hard links. An edit in place then changes the file behind all links;
            a new file replaces only this link.
        durable: False to skip the fsync of files.

    Returns:
        An edit, for a ``with`` statement: ``file.metadata``, ``file.rename(old, new)``, ``del file[name]``,
        ``file[name] = array``.

    Raises:
        FormatError: the file breaks its format.
        UnsupportedError: the file has another format or several hard links, or is in the Hub's cache.
        BlockingIOError: another edit of the file is in progress.
        SafeloadError: another program has changed the file by the end of the block.
        OSError: the file cannot be read or written.

    Example:
        >>> import numpy as np, safeload
        >>> safeload.save({"w": np.ones(2, np.float32)}, "edited.safetensors", metadata={"step": "1"})
        >>> with safeload.edit("edited.safetensors") as file:
        ...     file.metadata["step"] = "2"
        ...     file.rename("w", "weight")
        >>> safeload.open("edited.safetensors").metadata, list(safeload.open("edited.safetensors"))
        ({'step': '2'}, ['weight'])
    """
    text = _local_path(path)
    if os.path.isdir(text):
        file = next((name for name in (SINGLE, INDEX) if os.path.isfile(os.path.join(text, name))), None)
        if file is None:
            raise UnsupportedError(f"{text}: a folder needs {INDEX} or {SINGLE} to be edited; pass the path of a file")
        text = os.path.join(text, file)
    if text.endswith(".index.json"):
        return _FolderEdit(text, force=force, durable=durable)
    return edit_file(text, force=force, durable=durable)


def _local_path(path: PathLike) -> str:
    """Return a path of this machine."""
    text = native_path(path)[0]
    if urls.is_url(text):
        raise UnsupportedError(f"{urls.shown(text)}: only files on this machine can be edited")
    return text


class _FolderEdit(Edit):
    """An edit of the shards of an index."""

    _tensors: dict[str, str]  # the shard of each tensor

    def __init__(self, index: str, *, force: bool, durable: bool) -> None:
        self._real = resolved(index, force=True)  # a new file replaces it
        self._content = read_json(self._real, "an index")
        parse_index(self._content, index, LOCAL)
        self._tensors = dict(self._content["weight_map"])
        self._shards: dict[str, SafetensorsEdit] = {}
        with ExitStack() as stack:
            for file in dict.fromkeys(self._tensors.values()):
                shard = edit_file(os.path.join(os.path.dirname(self._real), file), force=force, durable=durable)
                stack.enter_context(shard._stack)
                if not isinstance(shard, SafetensorsEdit):
                    raise UnsupportedError(f"{shard.path}: only folders of safetensors shards can be edited")
                self._shards[file] = shard
            for name, file in self._tensors.items():
                if name not in self._shards[file]:
                    raise FormatError(f"the index names tensor {show(name)} in {file}, which does not have it", index)
            self._stack = stack.pop_all()
        super().__init__(index, next((dict(shard.metadata) for shard in self._shards.values()), {}))

    def _rename(self, old: str, new: str) -> None:
        self._shards[self._tensors[old]].rename(old, new)
        super()._rename(old, new)

    def _remove(self, name: str) -> None:
        del self._shards[self._tensors[name]][name]
        super()._remove(name)

    def _put(self, name: str, array: Any) -> None:
        if not self._shards:
            raise UnsupportedError(f"{self.path} names no shard that could get a tensor")
        file = self._tensors.get(name) or next(reversed(self._shards))
        self._shards[file][name] = array
        self._tensors[name] = file

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
                if len(shard):  # a shard without tensors leaves the folder
                    path = os.path.join(folder, names[file])
                    swap.undo.append(partial(_attempt, os.unlink, path))
                    shard.write_to(path, overwrite=False)
            for file, shard in self._shards.items():
                if file not in replaced:
                    shard._write()
                    swap.undo.append(partial(_attempt, shard.undo))
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
        content["weight_map"] = {name: names.get(file, file) for name, file in self._tensors.items()}
        if isinstance(content.get("metadata"), dict) and "total_size" in content["metadata"]:
            total = sum(shard.nbytes for shard in self._shards.values())
            content["metadata"] = {**content["metadata"], "total_size": total}
        text = (json.dumps(content, indent=2) + "\n").encode()
        file = stack.enter_context(AtomicFile(self._real, len(text)))
        with file.stream() as stream:
            stream.write(text)
        file.seal()
        return file


def _attempt(step: Callable[..., object], *arguments: Any) -> None:
    """Take a step back; the first error tells more, and `open` says if a header must be recovered."""
    with suppress(OSError):
        step(*arguments)


def recover_edit(path: PathLike) -> str:
    """Complete an interrupted edit of a file, or of the shards of a folder or index.

    Return "nothing" if no edit was interrupted, "old" if a file has its old header again, else "new". Temporary files
    that killed processes left are removed, unless a process is writing in the folder.
    """
    text = _local_path(path)
    folder = text if os.path.isdir(text) else os.path.dirname(text) if text.endswith(".index.json") else None
    if folder is None:
        return _recover_file(text)
    remove_abandoned(folder or ".", [INDEX])
    shards = sorted(name for name in os.listdir(folder or ".") if name.endswith(".safetensors") and name[0] != ".")
    results = [_recover_file(os.path.join(folder, name)) for name in shards]
    return next((result for result in ("old", "new") if result in results), "nothing")


def _recover_file(path: str) -> str:
    real = resolved(path, force=True)
    with Locked(real) as file:
        result = recover(file)
        remove_abandoned(os.path.dirname(real) or ".", [os.path.basename(real)])
    return result
