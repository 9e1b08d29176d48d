"""Edit metadata and tensors of a file or folder."""

from __future__ import annotations

import os

from ...base.paths import PathLike
from ...engine.run.atomic_file import remove_abandoned
from ...errors import UnsupportedError, public
from ...formats.folder import INDEX, SINGLE
from ...stores.edit_journal import Locked, recover
from .edit_base import Edit, local_path, resolved
from .edit_file import edit_file
from .edit_folder import FolderEdit


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
    text = local_path(path)
    if os.path.isdir(text):
        return _of_folder(text, force=force, durable=durable)
    if text.endswith(".index.json"):
        return FolderEdit(text, force=force, durable=durable)
    return edit_file(text, force=force, durable=durable)


def _of_folder(path: str, *, force: bool, durable: bool) -> Edit:
    index, single = os.path.join(path, INDEX), os.path.join(path, SINGLE)
    if os.path.isfile(single):
        return edit_file(single, force=force, durable=durable)
    if os.path.isfile(index):
        return FolderEdit(index, force=force, durable=durable)
    raise UnsupportedError(f"{path}: a folder needs {INDEX} or {SINGLE} to be edited; pass the path of a file")


def recover_edit(path: PathLike) -> str:
    """Complete an interrupted edit of a file, or of the shards of a folder or index.

    Return "nothing" if no edit was interrupted, "old" if a file has its old header again, else "new". Temporary files
    that killed processes left are removed, unless a process is writing in the folder.
    """
    text = local_path(path)
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
