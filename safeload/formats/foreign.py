"""Recognises files by their first bytes: formats without a magic number at offset 0, and unsupported formats."""

from __future__ import annotations

from contextlib import closing

from ..engine.weight_file import open_without_table
from ..errors import FormatError

# Enough for tar's magic at 257.
HEAD_SIZE = 512

# (offset, bytes at that offset, description). Sources: the specifications of the formats; for LFS
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_FOREIGN = (
    (0, b"version https://git-lfs", "a Git LFS pointer: run `git lfs pull` to get the file itself"),
    (0, b"\x1f\x8b", "gzip-compressed: decompress it first"),
    (0, b"\x28\xb5\x2f\xfd", "zstd-compressed: decompress it first"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    *(
        (0, name, "a torch checkpoint of before 2017, in a tar archive: load it with torch and save it again")
        for name in (b"sys_info\0", b"storages\0", b"tensors\0", b"pickle\0")
    ),
    (257, b"ustar", "a tar archive: unpack it first"),
    (0, b"PK\x05\x06", "an empty zip archive"),
)


def is_safetensors(head: bytes) -> bool:
    """Whether the first bytes could be those of a safetensors file: a size within the limit, then JSON."""
    return (
        len(head) > 8 and int.from_bytes(head[:8], "little") <= 100_000_000 and head[8:].lstrip(b" \t\r\n")[:1] == b"{"
    )


def is_zip(head: bytes) -> bool:
    """Whether the first bytes are those of a zip archive, which may be empty."""
    return head[:4] in (b"PK\x03\x04", b"PK\x05\x06")


def is_torch_legacy(head: bytes) -> bool:
    """Whether a pickle begins with the number that torch writes before a checkpoint that is not a zip archive."""
    return is_binary_pickle(head) and b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." in head[:32]


def is_binary_pickle(head: bytes) -> bool:
    """Whether the first bytes are those of a pickle of protocol 2 to 5."""
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5


def is_pickle(head: bytes) -> bool:
    """Whether the first bytes are those of a pickle that `torch.save` did not write."""
    return (is_binary_pickle(head) and not is_torch_legacy(head)) or is_text_pickle(head)


def is_text_pickle(head: bytes) -> bool:
    """Whether the first bytes are those of a container in a pickle of protocol 0 or 1, which has no magic."""
    if head[:1] not in (b"(", b"}", b"]", b"c"):
        return False
    import re

    globals_ = rb"c(?:collections|numpy[\w.]*|torch[\w.]*|joblib[\w.]*|copy_?reg|sklearn[\w.]*)\r?\n\w+\r?\n"
    return re.match(rb"\([dlt]p[0-9]+\n|\((?:[dl][(VSIFgc(]|dp)|[}\]][q(.]|\(?" + globals_, head) is not None


def describe(head: bytes) -> str | None:
    """Describes a file that no row of the registry recognises, or only less exactly; None where unknown."""
    if not head:
        return "an empty file"
    for offset, magic, what in _FOREIGN:
        if head[offset : offset + len(magic)] == magic:
            return what
    # A protobuf: field 1 a small integer (ir_version), field 2 text (producer_name), as in ModelProto of onnx.proto.
    if len(head) > 3 and head[0] == 0x08 and head[1] < 32 and head[2] == 0x12:
        return "an ONNX model"
    text = head.lstrip()[:15].lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "an HTML page (a failed download?)"
    if is_text_pickle(head):
        return "a pickle of protocol 0 or 1"
    if text.startswith(b"<?xml"):
        return "an XML page (a failed download?)"
    return None


def read_head(path: str) -> bytes:
    """The first `HEAD_SIZE` bytes of a regular file; a blank for anything else, where a read could block forever."""
    try:
        with closing(open_without_table(path)) as file:
            return file.read_at(0, HEAD_SIZE)
    except (OSError, FormatError):  # the caller reports the error that led here
        return b" "
