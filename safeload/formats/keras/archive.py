"""``.keras`` archives: a zip archive of ``config.json``, ``metadata.json`` and ``model.weights.h5``.

1. The weights are a file of HDF5 (file.py). Keras stores it uncompressed; then it is read in place. Compressed weights
   are unpacked into a temporary file.
2. ``metadata.json`` (``keras_version``, ``date_saved``) becomes the metadata, with ``config.json`` as its key "config".
   Layers in the config are not made, so nothing in it runs; ``safeload scan`` judges Lambda layers.
3. Other entries, such as ``assets/``, are not read. ``model.weights.npz`` holds pickled dicts of arrays: it is refused.
"""

from __future__ import annotations

from typing import Any, BinaryIO

from ...base.listed_table import ListedTable
from ...base.messages import error_about
from ...base.text import show
from ...engine.run.atomic_file import reserve
from ...engine.run.weight_file import WeightFile, open_temporary
from ...errors import UnsupportedError
from ...stores.json_file import parse_json
from ...stores.members import Member, MemberFiles
from ..opening import open_members
from ..registry import Candidate, Opened, OpenRequest, check_whole, find_row, opened_file
from ..zip import STORED, Archive

WEIGHTS = "model.weights.h5"
_NPZ = "model.weights.npz"
_CONFIG, _METADATA = "config.json", "metadata.json"


def enter(candidate: Candidate, request: OpenRequest) -> Opened:
    """Open the weights of an archive."""
    file, archive = candidate.file, candidate.archive
    if WEIGHTS not in archive.entries:
        text = f"the weights are {_NPZ}, an npz of pickled dicts: save the model again with h5py installed"
        raise error_about(UnsupportedError, text, path=file.path)
    metadata: dict[str, Any] = {}
    for name in (_METADATA, _CONFIG):
        if name in archive.entries:
            value = parse_json(archive.read(name)[0], name, file.path)
            metadata.update({"config": value} if name == _CONFIG else value)
    entry = archive.entries[WEIGHTS]
    if entry.method == STORED:
        archive.check_stored(WEIGHTS)
        members = {WEIGHTS: Member(archive.locate(WEIGHTS), entry.size)}
        archive.check_overlap()
        opened = open_members(file, MemberFiles(file.store, file.path, members), request, kind="a Keras archive")
    else:
        opened = _unpacked(file, archive, request)
    table = opened.file.table
    assert isinstance(table, ListedTable)
    table.add_metadata(metadata)
    return opened._replace(metadata=table.metadata() or {}, notes=[*opened.notes, *_notes(archive)])


def _unpacked(file: WeightFile, archive: Archive, request: OpenRequest) -> Opened:
    """Open compressed weights, unpacked into a temporary file."""
    check_whole(file, "compressed weights of a .keras archive must be unpacked as a whole")
    archive.check_packed(WEIGHTS)

    def write(out: BinaryIO, path: str) -> None:
        reserve(out.fileno(), archive.entries[WEIGHTS].size, path)
        for chunk in archive.inflate(WEIGHTS):
            out.write(chunk)

    temporary = open_temporary("safeload-keras-", write, shown=file.path)
    try:
        unpacked = Candidate(temporary)
        row = find_row(unpacked, request)
        content = row.load().read(unpacked, request)
        for part in (content.file, *content.others):
            part.stand_for(file)
    except BaseException:
        temporary.close()
        raise
    file.close()
    return opened_file(row.name, content)._replace(title=file.path)


def _notes(archive: Archive) -> list[str]:
    known = {WEIGHTS, _CONFIG, _METADATA}
    skipped = [name for name in archive.entries if name not in known and not name.endswith("/")]
    if not skipped:
        return []
    more = f" and {len(skipped) - 1:,} more" if len(skipped) > 1 else ""
    return [f"not read: {show(skipped[0])[1:-1]}{more}"]
