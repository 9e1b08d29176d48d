"""Recognise files by their first bytes: formats without a magic number at offset 0, and unsupported formats."""

from __future__ import annotations

import codecs
import re
import struct
from contextlib import closing
from typing import NamedTuple

from ..errors import FormatError
from .text import show
from .weight_file import WeightFile, open_without_table

# Enough for tar's magic number at offset 257.
HEAD_SIZE = 512
# Largest header of a safetensors file that csrc/formats/safetensors.c accepts, without its length.
MAX_HEADER = 100_000_000
# Shorter runs of zeros at the end of a file do not indicate an unfinished download.
_MIN_ZEROS = 1024
# Bytes to check at the beginning and at the end of a long run of zeros.
_CHECKED_ZEROS = 1 << 20
# Characters of a text file to show in a message.
_EXCERPT = 160


class Kind(NamedTuple):
    """A kind of file, for messages."""

    noun: str  # with its article; completes "this is ..."
    advice: str = ""  # next step for the user
    damaged: bool = False  # holds no weights in any format

    def sentence(self, expected: str = "") -> str:
        """Return "this is ..., not ...: advice"."""
        text = f"this is {self.noun}"
        if expected:
            text += f", not {expected}"
        return f"{text}: {self.advice}" if self.advice else text


# Data files of torch.distributed.checkpoint: archives one after another, so the first bytes do not tell.
DCP_SUFFIX = ".distcp"
DCP_PART = Kind("a part of a torch.distributed checkpoint", "open its folder")

_OLD_GGML = Kind("a GGML file from before GGUF", "convert it with the scripts of llama.cpp or whisper.cpp")
_OLD_TORCH = Kind("a torch checkpoint from before 2017, in a tar archive", "load it with torch and save it again")
_OLD_TORCH_NAMES = (b"sys_info\0", b"storages\0", b"tensors\0", b"pickle\0")
_LLAMA2 = Kind("a llama2.c checkpoint", "export.py of llama2.c shows its layout, and numpy.memmap can read it")
_PROGRAM = Kind("a program", "safeload reads the model in a llamafile")
_DECOMPRESS = "decompress it first"
_TENSORFLOW = "tf.train.load_checkpoint(prefix) reads it"

# (offset, bytes at that offset, kind).
_FOREIGN = (
    # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
    (0, b"version https://git-lfs", Kind("a Git LFS pointer", "run `git lfs pull` to get the file itself")),
    # RFC 1952 and 8878, and the files of bzip2, xz and lz4.
    (0, b"\x1f\x8b", Kind("gzip-compressed", _DECOMPRESS)),
    (0, b"\x28\xb5\x2f\xfd", Kind("zstd-compressed", _DECOMPRESS)),
    (0, b"BZh", Kind("bzip2-compressed", _DECOMPRESS)),
    (0, b"\xfd7zXZ\0", Kind("xz-compressed", _DECOMPRESS)),
    (0, b"\x04\x22\x4d\x18", Kind("lz4-compressed", _DECOMPRESS)),
    (0, b"7z\xbc\xaf\x27\x1c", Kind("a 7z archive", "extract it first")),
    (0, b"Rar!\x1a\x07", Kind("a RAR archive", "extract it first")),
    (0, b"|TZR|\n", Kind("a file of tensorizer", "tensorizer.TensorDeserializer(path) reads it")),
    # file_identifier of executorch/schema/program.fbs; kMagic of mxnet's NDArray list, of arrays saved with names.
    (4, b"ET12", Kind("an ExecuTorch program", "its runtime reads it")),
    (0, b"\x12\x01\0\0\0\0\0\0", Kind("parameters of MXNet", "mxnet.nd.load(path) reads them")),
    # file_identifier of onnxruntime's ort.fbs; BlobMetadataSentinel of coremltools, behind a header of 64 bytes;
    # FASTTEXT_FILEFORMAT_MAGIC_INT32; CatBoost's; a UBJSON object of XGBoost, whose first key has a length of 8 bytes.
    (4, b"ORTM", Kind("a model of ONNX Runtime", "onnxruntime.InferenceSession(path) reads it")),
    (64, b"\xef\xbe\xad\xde", Kind("the weights of a Core ML package", "coremltools reads the package")),
    (0, b"\xba\x16\x4f\x2f", Kind("a fastText model", "fasttext.load_model(path) reads it")),
    (0, b"CBM1", Kind("a CatBoost model", "catboost.CatBoost().load_model(path) reads it")),
    (0, b"{L\0\0\0\0\0\0\0", Kind("an XGBoost model", "xgboost.Booster(model_file=path) reads it")),
    *((0, name, _OLD_TORCH) for name in _OLD_TORCH_NAMES),
    # Actually Portable Executables, as llamafiles are, and ELF.
    (0, b"MZqFpD", _PROGRAM),
    (0, b"\x7fELF", _PROGRAM),
    (257, b"ustar", Kind("a tar archive", "safeload reads the weights in it")),
    (0, b"PK\x05\x06", Kind("an empty zip archive")),
    # file_identifier of tensorflow/compiler/mlir/lite/schema/schema.fbs; a flatbuffer has it at byte 4.
    (4, b"TFL3", Kind("a TensorFlow Lite model", "tf.lite.Interpreter(path) reads it")),
    # BundleHeaderProto of tensorflow/core/protobuf/tensor_bundle.proto is the value of the key "", which comes first in
    # a table of LevelDB: 0 bytes shared with the key before, 0 bytes of its own, 6 bytes of value.
    (0, b"\0\0\x06\x08", Kind("the index of a TensorFlow checkpoint", _TENSORFLOW)),
    # llama_file_magic of llama.cpp before GGUF: ggml, ggmf, ggjt, little-endian.
    *((0, magic, _OLD_GGML) for magic in (b"lmgg", b"fmgg", b"tjgg")),
    # version1_export of https://github.com/karpathy/llama2.c/blob/master/export.py: 0x616b3432.
    (0, b"24ka", _LLAMA2),
)  # fmt: skip


def is_safetensors(head: bytes) -> bool:
    """Return True if a file can be safetensors: a header size within the limit, then JSON."""
    return (
        len(head) > 8 and int.from_bytes(head[:8], "little") <= MAX_HEADER and head[8:].lstrip(b" \t\r\n")[:1] == b"{"
    )


def is_zip(head: bytes) -> bool:
    """Return True if a file is a zip archive, empty or not."""
    return head[:4] in (b"PK\x03\x04", b"PK\x05\x06")


def is_tar(head: bytes) -> bool:
    """Return True if a file is a tar archive, but no torch checkpoint from before 2017."""
    return head[257:262] == b"ustar" and not head.startswith(_OLD_TORCH_NAMES)


def is_torch_legacy(head: bytes) -> bool:
    """Return True if a pickle begins with the magic number of legacy torch checkpoints."""
    return is_binary_pickle(head) and b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." in head[:32]


def is_binary_pickle(head: bytes) -> bool:
    """Return True if a file begins with a pickle of protocol 2 to 5."""
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5


def is_object(head: bytes) -> bool:
    """Return True if a file begins like a JSON object."""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")


def is_text_pickle(head: bytes) -> bool:
    """Return True if a file begins with a container in a pickle of protocol 0 or 1, which has no magic number."""
    if head[:1] not in (b"(", b"}", b"]", b"c"):
        return False
    globals_ = rb"c(?:collections|numpy[\w.]*|torch[\w.]*|joblib[\w.]*|copy_?reg|sklearn[\w.]*)\r?\n\w+\r?\n"
    return re.match(rb"\([dlt]p[0-9]+\n|\((?:[dl][(VSIFgc(]|dp)|[}\]][q(.]|\(?" + globals_, head) is not None


def is_onnx(head: bytes) -> bool:
    """Return True if a file begins like an ONNX model."""
    # Field 1 of ModelProto (ir_version) is a small integer; then come texts (fields 2, 3, 4 and 6: producer, version,
    # domain, doc_string), numbers (field 5) and messages (fields 7 and 8: graph and opset_import).
    first_text = rb"[\x12\x1a\x22][\x01-\x7f][\w.+-]"
    return (
        re.match(rb"\x08[\x01-\x7f](?:[\x12\x1a\x22]\0)*(?:" + first_text + rb"|[\x28\x32\x3a\x42])", head) is not None
    )


# Bytes of the length of a MessagePack value by its first byte, and bytes of a value or header without a length.
_MSGPACK = {
    0xC0: (0, 0), 0xC2: (0, 0), 0xC3: (0, 0), 0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xCA: (0, 4), 0xCB: (0, 8),
    0xCC: (0, 1), 0xCD: (0, 2), 0xCE: (0, 4), 0xCF: (0, 8), 0xD0: (0, 1), 0xD1: (0, 2), 0xD2: (0, 4), 0xD3: (0, 8),
    0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0), 0xDC: (0, 2), 0xDD: (0, 4), 0xDE: (0, 2), 0xDF: (0, 4),
}  # fmt: skip
# An extension of type 1 to 3: an array of shape, dtype and elements, or of the parts of a complex number.
_FLAX_EXTENSION = rb"(?s:[\xd4-\xd8]|\xc7.|\xc8..|\xc9....)(?:[\x01\x03]\x93[\x90-\x9f\xdc]|\x02\x92)"


def is_flax(head: bytes) -> bool:
    """Return True if a file begins with a MessagePack map, or an array of Flax's, followed by such values."""
    if re.match(_FLAX_EXTENSION, head):
        return True
    if not re.match(rb"(?s:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9.|\xda..)[^\x00-\x1f\x80-\xbf]", head):
        return False  # a map with a first key of text
    at = 0
    while at < len(head):
        code = head[at]
        if 0xA0 <= code <= 0xBF:
            at += 1 + code - 0xA0
        elif code <= 0x9F or code >= 0xE0 or code in _MSGPACK:
            width, size = _MSGPACK.get(code, (0, 0))
            at += 1 + width + size + (int.from_bytes(head[at + 1 : at + 1 + width], "big") if size == 0 else 0)
        else:
            return re.match(_FLAX_EXTENSION, head[at:]) is not None
    return True


def describe(head: bytes, path: str = "") -> Kind | None:
    """Describe a file that no row of the registry recognises, or not as exactly; None if its kind is unknown."""
    if not head:
        return Kind("an empty file", damaged=True)
    for offset, magic, kind in _FOREIGN:
        if head[offset : offset + len(magic)] == magic:
            return kind
    if is_text_pickle(head):
        return Kind("a pickle of protocol 0 or 1")
    text = head.lstrip()[:15].lower()
    if text.startswith((b"<!doctype html", b"<html")):
        if b"<title>directory listing for" not in head.lower() and b"<title>index of" not in head.lower():
            return Kind("an HTML page (a failed download?)")
        if "://" not in path:
            return Kind("an HTML page that lists a folder")
        folder = path.rstrip("/")
        advice = f"http has no folders; open {folder}/model.safetensors.index.json, or {folder}/model.safetensors if "
        return Kind("a page that lists a folder", f"{advice}the weights are a single file")
    if text.startswith(b"<?xml"):
        if b"<net " in head:
            return Kind("the graph of an OpenVINO model", "openvino.Core().read_model(path) reads it and its weights")
        return Kind("an XML page (a failed download?)")
    if path.endswith(".aria2"):
        return Kind("a control file of aria2: the download beside it is not finished", damaged=True)
    if re.match(rb"x[\x01\x5e\x9c\xda]", head) and describe_text(head) is None:  # RFC 1950
        return Kind("zlib-compressed", "joblib writes such files, and joblib.load reads them")
    # Version and name of ModelSpec in CTranslate2's python/ctranslate2/specs/model_spec.py.
    if re.match(rb"[\x01-\x0f]\0{3}.\0[A-Z]\w+Spec\0", head, re.DOTALL):
        return Kind(
            "a CTranslate2 model", "ctranslate2 and faster-whisper read its folder; convert the original instead"
        )
    # Model and ModelDescription of mlmodel/format/Model.proto: specification version, description of inputs.
    if re.match(rb"\x08[\x01-\x0f]\x12[\x80-\xff]{0,4}.\x0a[\x80-\xff]{0,2}.\x0a", head, re.DOTALL):
        return Kind("a Core ML model", "coremltools.models.MLModel(path) reads it")
    # SavedModel of tensorflow/core/protobuf/saved_model.proto: version 1, then a MetaGraphDef, beginning with field 1.
    if re.match(rb"\x08\x01\x12[\x80-\xff]{0,4}[\x00-\x7f]\x0a", head):
        return Kind("a TensorFlow SavedModel", "tf.saved_model.load(folder).variables gives its weights")
    if re.search(r"\.data-\d{5}-of-\d{5}$", path):
        return Kind("the data of a TensorFlow checkpoint", _TENSORFLOW)
    return _LLAMA2 if _is_llama2(head) else None


def _is_llama2(head: bytes) -> bool:
    """Return True if a file begins with seven plausible model sizes, as written by legacy_export of llama2.c."""
    if len(head) < 32:
        return False
    sizes: tuple[int, ...] = struct.unpack_from("<7i", head)
    dim, hidden, layers, heads, kv_heads, vocabulary, length = sizes
    return (
        32 <= dim < hidden <= 1 << 17
        and 0 < layers <= 256
        and 0 < kv_heads <= heads <= 256
        and dim % heads == heads % kv_heads == 0
        and 256 <= abs(vocabulary) <= 1 << 20
        and 16 <= length <= 1 << 24
    )


def describe_text(head: bytes) -> Kind | None:
    """Describe a text file, such as a server's error page; None for any other file."""
    wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    decode = codecs.utf_16_decode if wide else codecs.utf_8_decode  # C functions, because bytes.decode imports a codec
    try:
        text = decode(head.removeprefix(codecs.BOM_UTF8), "strict", False)[0]  # the head may end within a character
    except UnicodeDecodeError:
        return None
    if not text.strip() or not all(c.isprintable() or c in "\t\n\f\r" for c in text):
        return None
    words = " ".join(text.split())
    excerpt = show(words if len(words) <= _EXCERPT else f"{words[:_EXCERPT]}...")
    return Kind("JSON" if words[0] in "{[" else "text", excerpt, damaged=True)


def unfinished(file: WeightFile) -> FormatError | None:
    """Return the error for a file that has only zeros after some byte of its header, or None."""
    # An interrupted download leaves such a file if it was allocated first. The middle of a large file is not read.
    length = int.from_bytes(file.read_at(0, 8), "little")
    head = file.read_at(0, min(8 + length, file.size) if length <= MAX_HEADER else HEAD_SIZE)
    begin = len(head.rstrip(b"\0"))
    if begin == len(head) or file.size - begin < _MIN_ZEROS:
        return None
    for at in (len(head), max(len(head), file.size - _CHECKED_ZEROS)):
        chunk = file.read_at(at, _CHECKED_ZEROS)
        if chunk.count(0) < len(chunk):
            return None
    how_far = "to the end" if file.size - len(head) <= 2 * _CHECKED_ZEROS else "on"
    return FormatError(f"zeros from byte {begin} {how_far}: the download is not finished", file.path, begin)


def read_head(path: str) -> bytes:
    """Return the first `HEAD_SIZE` bytes of a regular file, or a blank for anything else, which could block forever."""
    try:
        with closing(open_without_table(path)) as file:
            return file.read_at(0, HEAD_SIZE)
    except (OSError, FormatError):  # the caller reports its own error
        return b" "
