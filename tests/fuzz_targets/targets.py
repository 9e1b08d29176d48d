"""Fuzz targets for what is parsed in Python: functions of bytes that return, or raise when a property does not hold.

Of any bytes: tensors, or a refusal of ours with a message; nothing is imported or executed, and no file is opened but
those of the target. `TARGETS` has them by the name of their corpus.
"""

import atexit
import codecs
import contextlib
import difflib  # noqa: F401 - messages about missing names import it, which counts as forbidden below
import glob  # noqa: F401 - as do messages about missing paths
import io
import json
import math
import os
import re
import shutil
import struct
import sys
import tempfile
import textwrap  # noqa: F401 - as do reports
import threading
import unicodedata
import zipfile
from pathlib import Path

import ml_dtypes  # noqa: F401 - safeload imports it and its formats when first needed, which counts as forbidden below
import numpy as np

with contextlib.suppress(ImportError):
    import zstandard  # noqa: F401
try:
    import h5py
except ImportError:
    h5py = None
with contextlib.suppress(ImportError):
    import tokenizers  # noqa: F401
from builders import dcp_build, gguf_build, inside, orbax_build
from builders.inside import (
    LOCAL,
    Config,
    choosing,
    digests,
    families,
    model_families,
    npy,
    parse_json,
    registry,
    rules,
    sentencepiece,
    settings,
    tokenizer,
)
from builders.inside import base_urls as urls
from builders.models import BUILT_IN_SCHEMAS
from builders.paths import ROOT

import safeload
import safeload.remote
from safeload import QuantizedTensor, SafeloadError, moon
from safeload.numpy import save_file

# Imported when first needed, which counts as forbidden below.
inside.preload(
    "base_urls",
)
for row in registry.ROWS:
    row.load()
for container in registry.CONTAINERS:
    registry.module_of(container.module)
os.environ["SAFELOAD_NO_PLUGINS"] = "1"  # looking for these reads files of other distributions
families()
safeload.stats({"w": np.zeros(1, np.float32)})  # looks for codes
with contextlib.suppress(FileNotFoundError):
    safeload.convert({"w": np.zeros((1, 1), np.float32)}, "nowhere.npz", adapters="nowhere")  # merges

# Tensors are compared whole up to this many bytes: a torch tensor may repeat few bytes to 4 GiB.
MOST_BYTES = 1 << 24

DATA = ROOT / "tests" / "data"
FOLDER = Path(tempfile.mkdtemp(prefix="safeload-fuzz-"))
PACKAGE = os.path.dirname(safeload.__file__)  # whose tables are read on first use
OWN = os.path.join(tempfile.gettempdir(), "safeload-")  # also what npz unpacks
atexit.register(shutil.rmtree, FOLDER)
# What tells of missing paths and what edits are imported when first needed, too.
with contextlib.suppress(OSError):
    safeload.open(FOLDER / "missing")
save_file({"w": np.zeros(1, np.float32)}, FOLDER / "edited.safetensors")
with safeload.edit(FOLDER / "edited.safetensors") as edited:
    edited.metadata["k"] = "v"
safeload.check(FOLDER / "edited.safetensors")
(FOLDER / "edited.safetensors").unlink()


class Broken(Exception):  # noqa: N818 - no error of the library's
    """A property that does not hold."""


try:
    from urllib3.util import parse_url
except ImportError:
    parse_url = None
# In the seeds of `url`.
SECRET = re.compile("PASSWORD|SIGNATURE")


def require(condition, what):
    if not condition:
        raise Broken(what)


# ---- what a reader must not do ----

FORBIDDEN = {
    *("import", "exec", "pickle.find_class", "marshal.loads", "ctypes.dlopen", "os.system", "os.exec", "os.fork"),
    *("os.posix_spawn", "subprocess.Popen", "socket.connect", "socket.getaddrinfo", "shutil.rmtree"),
}
_seen = []
_watching = None  # None before the hook is installed, which is for good
_others = set()  # threads that ran before: what they do is nothing that a reader did


def _audit(event, arguments):
    if not _watching or threading.get_ident() in _others:
        return
    if event in FORBIDDEN:
        _seen.append((event, str(arguments)[:200]))
    elif event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if not path.startswith(OWN) and not (path.startswith(PACKAGE) and path.endswith(".json")):
            _seen.append((event, path))


@contextlib.contextmanager
def watched():
    """Raises at its end when something forbidden was done."""
    global _watching
    if _watching is None:
        sys.addaudithook(_audit)
    _others.clear()
    _others.update({thread.ident for thread in threading.enumerate()} - {threading.get_ident()})
    _watching = True
    try:
        yield
    finally:
        _watching = False
        done = _seen.copy()
        _seen.clear()
        require(not done, f"it did {done}")  # also when what was watched raises


# ---- files ----


def check_refusal(error, size=None):
    """A refusal has a message fit for a terminal, and lies within the file."""
    text = str(error)
    require(text and not any(unicodedata.category(c) in ("Cc", "Cs") for c in text), f"message {text!r}")
    require(len(text) < 5000, f"a message of {len(text)} characters")
    offset = getattr(error, "offset", None)
    require(offset is None or (offset >= 0 and (size is None or offset <= size)), f"offset {offset} of {size}")


def check_tensor(checkpoint, name, read):
    info, value = checkpoint.tensors[name], checkpoint[name]
    require(info.name == name and info.offset >= 0, "infos by name")
    if isinstance(value, QuantizedTensor):
        require(value == read, "a quantized tensor reads as it maps")
        return
    require(value.flags.aligned, "aligned")
    require(value.dtype == read.dtype and value.shape == read.shape, "dtype and shape as mapped")
    require(value.tobytes() == read.tobytes(), "it reads as it maps")
    part = checkpoint.get_slice(name)[...]
    require(np.asarray(part).tobytes() == read.tobytes(), "a slice of all is all")


def check_checkpoint(checkpoint):
    require(len(checkpoint) == len(list(checkpoint)) == len(checkpoint.tensors), "as many names as tensors")
    repr(checkpoint.metadata)
    dict(checkpoint.metadata or {})
    sizes = {name: math.prod(info.shape) * 16 for name, info in checkpoint.tensors.items()}
    small = [name for name, size in sizes.items() if size <= MOST_BYTES][:20]
    read = checkpoint.load(small, backend="pread")
    for name in small:
        check_tensor(checkpoint, name, read[name])
    for name in sizes.keys() - small:
        checkpoint[name]
    with contextlib.suppress(SafeloadError):  # of what has no conversion
        checkpoint.load(small, dtype="float32")
    return read


def open_file(data, suffix, **options):
    """Opens a file of these bytes and looks at all of it; the tensors, None when it is refused."""
    path = FOLDER / f"input{suffix}"
    path.unlink(missing_ok=True)  # ext4 waits for the disk where a file is truncated and written again
    path.write_bytes(data)
    try:
        with watched(), safeload.open(path, **options) as checkpoint:
            return check_checkpoint(checkpoint)
    except SafeloadError as error:
        check_refusal(error, len(data))
        return None


def any_file(data):
    """A file of whatever format its first bytes say. Looked at as a whole, it is the same: sound, or not."""
    tensors = open_file(data, ".bin")
    with watched():
        report = safeload.check(FOLDER / "input.bin")
    unread = any(finding.code == "file.unknown_type" for finding in report.warnings)  # an entry, not the file
    require(tensors is not None or not report.ok or unread, "what cannot be opened is not sound")
    require(json.loads(json.dumps(report.to_json(), allow_nan=False))["ok"] == report.ok, "the report as JSON")


def torch(data):
    refused = open_file(data, ".pt", format="torch")
    inert = open_file(data, ".pt", format="torch", unknown_globals="inert")
    if refused is not None:
        require(inert is not None and refused.keys() == inert.keys(), "what is harmless reads the same as inert")


def pickle(data):
    """The pickle of a torch archive that is sound but for it, so that it may change its length."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in (("data.pkl", data), ("data/0", bytes(24)), ("data/1", bytes(64)), ("version", b"3")):
            archive.writestr(f"archive/{name}", content)
    torch(out.getvalue())


def moon_file(data):
    tensors = open_file(data, ".moon", format="moon")
    if tensors is None:
        return
    again = FOLDER / "again.moon"
    moon.save_file(tensors, again, durable=False)
    if sum(array.nbytes for array in tensors.values()) <= MOST_BYTES and len(tensors) < 20:
        require(again.read_bytes() == data, "written again it is the same file")


def npz_file(data):
    tensors = open_file(data, ".npz", format="npz")
    if tensors is None:
        return
    again = FOLDER / "again.npz"
    if any("\0" in name for name in tensors):  # readers of npz end a name there
        return
    npy.write_archive(tensors, None, again, durable=False)
    read = safeload.load(again, format="npz")
    require(read.keys() == tensors.keys(), "written again it has the same names")
    for name, array in tensors.items():
        require(array.dtype == read[name].dtype and array.tobytes() == read[name].tobytes(), "and the same arrays")


def npy_file(data):
    tensors = open_file(data, ".npy", format="npy")
    if tensors is None:
        return
    again = FOLDER / "again.npy"
    npy.write(tensors, None, again, durable=False)
    read = np.load(again)
    array = tensors["tensor"]
    require(array.dtype == read.dtype and array.shape == read.shape, "numpy reads the same shape and dtype")
    require(array.tobytes() == read.tobytes(), "and the same elements")


def gguf_values(data):
    """The reader is in C and has a target of its own; the values of the metadata are unpacked in Python."""
    open_file(data, ".gguf", format="gguf")


def imatrix_file(data):
    """An importance matrix: numbers that quantizers may use, or a refusal."""
    path = FOLDER / "fuzz.imatrix"
    path.write_bytes(data)
    try:
        with watched():
            matrix = rules.read_importance(path)
    except SafeloadError as error:
        check_refusal(error, len(data))
        return
    require(
        sum(vector.nbytes for vector in matrix.vectors.values()) <= 2 * len(data) + 16, "no more numbers than bytes"
    )
    for name, vector in matrix.vectors.items():
        require(isinstance(name, str) and vector.dtype == np.float32 and vector.ndim == 1, "float32 by name")
        require(bool((np.isfinite(vector) & (vector >= 0)).all()), "finite and not negative")
    require(all(len(str(value)) <= 127 for value in matrix.metadata().values()), "short texts")


def quantized(data):
    """The description of what is quantized in a safetensors file, which save() would not write beside plain arrays."""
    try:
        metadata = {"safeload.quantized": data.decode()}
    except UnicodeDecodeError:
        return
    header = {
        "__metadata__": metadata,
        "w": {"dtype": "I8", "shape": [2, 4], "data_offsets": [0, 8]},
        "w_scale": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        "b": {"dtype": "U8", "shape": [3, 36], "data_offsets": [16, 124]},
    }
    text = json.dumps(header).encode()
    open_file(struct.pack("<Q", len(text)) + text + bytes(124), ".safetensors", format="safetensors")


# ---- packed tensors ----

PACKED = FOLDER / "packed"
PACKED.mkdir()
# Of the data of such a file.
MOST_PACKED = 1 << 16


def _file_of(described):
    """A safetensors file of these names, dtypes and shapes, with bytes of no meaning; None if they are none.

    A text after the shape is what the tensor begins with: the JSON of bitsandbytes.
    """
    header, begin, texts = {}, 0, []
    for name, entry in described.items():
        if not (isinstance(entry, list) and len(entry) in (2, 3) and isinstance(entry[1], list)):
            return None
        dtype, shape = entry[:2]
        row = inside.dtypes.BY_CODE.get(dtype) if isinstance(dtype, str) else None
        if row is None or not all(type(length) is int and 0 <= length < 1 << 62 for length in shape):
            return None
        end = begin + -(-math.prod(shape) * row.bits // 8)
        if end > MOST_PACKED:
            return None
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        if len(entry) == 3 and isinstance(entry[2], str):
            texts.append((begin, entry[2].encode("utf-8", "replace")[: end - begin]))
        begin = end
    try:
        text = json.dumps(header).encode()
    except UnicodeEncodeError:
        return None
    data = bytearray(k * 37 & 127 for k in range(begin))
    for at, content in texts:
        data[at : at + len(content)] = content
    return struct.pack("<Q", len(text)) + text + data


def grouping(data):
    """A config, and names, dtypes, shapes of tensors: {"config": ..., "tensors": {name: [dtype, shape, text]}}."""
    try:
        given = json.loads(data)
        content = _file_of(given["tensors"])
        text = json.dumps(given.get("config"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
    if content is None:
        return
    (PACKED / "model.safetensors").write_bytes(content)
    (PACKED / "config.json").write_text(text)
    for path in (PACKED, PACKED / "model.safetensors"):
        _open_packed(path)


def _open_packed(path):
    try:
        with watched(), safeload.open(path) as checkpoint:
            check_checkpoint(checkpoint)
            _check_packed(checkpoint)
    except SafeloadError as error:
        check_refusal(error)


def _check_packed(checkpoint):
    for name, value in checkpoint.load().items():
        if not isinstance(value, QuantizedTensor) or value.size * 8 > MOST_BYTES:
            continue
        require(value.shape == tuple(checkpoint.tensors[name].shape), "the shape that is said")
        with contextlib.suppress(SafeloadError):  # values that are not numbers
            values = value.dequantize()
            require(values.shape == value.shape, "values of its shape")
            read = checkpoint.load([name], dtype="float32")[name]
            require(read.tobytes() == values.tobytes(), "the values that reading gives")
            again = checkpoint.get_slice(name)[...]
            require(again.tobytes() == values.tobytes(), "the values that a slice gives")


# ---- adapters ----

BASE, ADAPTER = FOLDER / "base", FOLDER / "adapter"
for folder_of in (BASE, ADAPTER):
    folder_of.mkdir()


def adapters(data):
    """An adapter and a base: {"adapter": a config, "config": one, "base": {name: [dtype, shape]}, "tensors": these}."""
    try:
        given = json.loads(data)
        contents = [_file_of(given[key]) for key in ("base", "tensors")]
        texts = [json.dumps(given.get(key) or {}) for key in ("config", "adapter")]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
    if None in contents:
        return
    for place, content, text in zip((BASE, ADAPTER), contents, texts, strict=True):
        (place / "model.safetensors").write_bytes(content)
        (place / ("config.json" if place == BASE else "adapter_config.json")).write_text(text)
    try:
        with watched():
            plain = safeload.load(BASE, dtype="float32")
            merged = safeload.load(BASE, adapters=ADAPTER, dtype="float32")
            some = safeload.load(BASE, list(plain)[::2], adapters=[(ADAPTER, 1.0)], dtype="float32")
    except SafeloadError as error:
        check_refusal(error)
        return
    require(merged.keys() == plain.keys(), "the names of the base")
    for name, value in merged.items():
        require((value.shape, value.dtype) == (plain[name].shape, plain[name].dtype), "its shapes and dtypes")
        require(name not in some or some[name].tobytes() == value.tobytes(), "the same again")


# ---- JSON ----

SHARDS = FOLDER / "index"
SHARDS.mkdir()
save_file({"a": np.zeros(2, np.float32), "extra": np.ones(1)}, SHARDS / "one.safetensors")
save_file({"b": np.ones(3, np.int8)}, SHARDS / "two.safetensors")

# Read once: encodings of zip archives, pickles and messages, the number of processors, the schemas of safeload.
for encoding in ("cp437", "raw_unicode_escape", "unicode_escape"):
    codecs.lookup(encoding)
safeload.load(SHARDS / "one.safetensors", backend="pread")
BUILT_IN = BUILT_IN_SCHEMAS


def index(data):
    (SHARDS / "model.safetensors.index.json").write_bytes(data)
    try:
        with watched(), safeload.open(SHARDS) as checkpoint:
            check_checkpoint(checkpoint)
            require(set(checkpoint) <= {"a", "b", "extra"}, "only tensors of the shards")
            outside = [path for path in checkpoint.files if Path(path).parent != SHARDS]
            require(not outside, f"files outside of the folder: {outside}")
    except SafeloadError as error:
        check_refusal(error, len(data))
    except OSError as error:
        require(Path(error.filename).parent == SHARDS, f"{error.filename!r} is outside of the folder")


DCP = FOLDER / "dcp"


def dcp(data, name=".metadata"):
    """A file of a checkpoint of torch.distributed whose other files are sound."""
    if not DCP.exists():
        dcp_build.sample().write(DCP)
    sound = (DCP / name).read_bytes()
    (DCP / name).write_bytes(data)
    try:
        with watched(), safeload.open(DCP) as checkpoint:
            check_checkpoint(checkpoint)
            dict(checkpoint.metadata)
    except SafeloadError as error:
        check_refusal(error)
    except FileNotFoundError as error:
        require(Path(error.filename).parent == DCP, f"{error.filename!r} is outside of the folder")
    finally:
        (DCP / name).write_bytes(sound)


def dcp_data(data):
    dcp(data, "__0_0.distcp")


ONNX = FOLDER / "onnx"


def onnx(data):
    """A model beside a file of external data."""
    ONNX.mkdir(exist_ok=True)
    (ONNX / "m.data").write_bytes(bytes(64))
    one_file(data, ONNX / "model.onnx", "onnx")


def flax(data):
    one_file(data, FOLDER / "flax_model.msgpack", "flax")


def one_file(data, path, format):
    """A file of a format that is read in Python."""
    path.write_bytes(data)
    try:
        with watched(), safeload.open(path, format=format) as checkpoint:
            check_checkpoint(checkpoint)
            json.dumps(checkpoint.metadata, default=str)
    except SafeloadError as error:
        check_refusal(error, len(data))
    except FileNotFoundError as error:
        require(path.parent in Path(error.filename).parents, f"{error.filename!r} is outside of the folder")


RANKS = FOLDER / "ranks"


def rank_file(data, fixture, name):
    """A rank file of a training checkpoint with other files that are sound."""
    folder = RANKS / fixture
    if not folder.exists():
        shutil.copytree(DATA / fixture, folder)
    (folder / name).write_bytes(data)
    try:
        with watched(), safeload.open(folder) as checkpoint:
            check_checkpoint(checkpoint)
    except SafeloadError as error:
        check_refusal(error)
    finally:
        shutil.copyfile(DATA / fixture / name, folder / name)


def fsdp(data):
    rank_file(data, "fsdp/line_2", "model_world_size_2_rank_0.pt")


def zero(data):
    rank_file(data, "deepspeed/zero2_1/global_step1", "mp_rank_00_model_states.pt")


def zero_optimizer(data):
    rank_file(data, "deepspeed/zero3_2/global_step1", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")


def orbax(data):
    """The tree of an Orbax checkpoint."""
    orbax_files("_METADATA", {"_METADATA": data})


def orbax_files(name, changed):
    """An Orbax checkpoint with a few files changed."""
    folder = FOLDER / "orbax" / name
    if not folder.exists():
        orbax_build.sample().write(folder, leaves=2)
    for path, content in changed.items():
        (folder / path).write_bytes(content)
    try:
        with watched(), safeload.open(folder) as checkpoint:
            check_checkpoint(checkpoint)
            dict(checkpoint.metadata)
    except SafeloadError as error:
        check_refusal(error)
    except FileNotFoundError as error:
        require(folder in Path(error.filename).parents, f"{error.filename!r} is outside of the folder")


def orbax_manifest(data):
    """The body of a manifest, with a sound header and checksum."""
    orbax_files("manifest", {"manifest.ocdbt": orbax_build.framed(orbax_build.MANIFEST, data)})


def orbax_node(data):
    """The body of a node, with a sound header and checksum, after 200 bytes of chunks."""
    node = orbax_build.framed(orbax_build.NODE, data)
    body = orbax_build.manifest_body((0, 200, len(node)), [("", "d/0")], height=data[:1] == b"\1")
    manifest = orbax_build.framed(orbax_build.MANIFEST, body)
    orbax_files("node", {"d/0": bytes(200) + node, "manifest.ocdbt": manifest})


def orbax_array(data):
    """The metadata of an array: version 2, or version 3 if it says so."""
    version = 3 if b'"node_type"' in data else 2
    base = "zarr.json" if version == 3 else ".zarray"
    made = orbax_build.OrbaxCheckpoint(version).tensor("w", np.arange(48, dtype=np.float32).reshape(12, 4), (6, 4))
    tree = json.dumps(made.metadata).encode()
    files = orbax_build.ocdbt({**made.values(), f"w/{base}": data})
    orbax_files("array", {"_METADATA": tree, **files})


def tar(data):
    """An archive: no tensor lies outside of it."""
    open_file(data, ".tar")


def llamafile(data):
    open_file(data, ".llamafile")


def keras(data):
    """Twice the same, so that no state of libhdf5 decides."""
    first, second = open_file(data, ".h5"), open_file(data, ".h5")
    require((first is None) == (second is None), "opens once, and not again")


def paddle(data):
    open_file(data, ".pdparams")


PARTS = FOLDER / "parts"


def write_parts():
    PARTS.mkdir()
    (PARTS / "m-00002-of-00002.gguf").write_bytes(gguf_build.part(1, 2, 2, ["b"]))


write_parts()


def gguf_split(data):
    """The first of two parts."""
    path = PARTS / "m-00001-of-00002.gguf"
    path.write_bytes(data)
    try:
        with watched(), safeload.open(path) as checkpoint:
            check_checkpoint(checkpoint)
            require(all(Path(file).parent == PARTS for file in checkpoint.files), "only files of the folder")
    except SafeloadError as error:
        check_refusal(error)


CONFIGURED = FOLDER / "configured"
CONFIGURED.mkdir()
save_file({"w": np.zeros(1, np.float32)}, CONFIGURED / "model.safetensors")


def read_config(data):
    """The values of a config.json beside weights."""
    (CONFIGURED / "config.json").write_bytes(data)
    with watched(), safeload.open(CONFIGURED, stored=True) as checkpoint:
        return checkpoint.config


def config(data):
    """A config.json, for every schema that there is."""
    try:
        values = read_config(data)
    except SafeloadError as error:
        check_refusal(error, len(data))
        return
    for made in BUILT_IN.values():
        _expand(made, values)
    choosing.choose(values, "safetensors", ["lm_head.weight"])


def sentencepiece_model(data):
    """A tokenizer.model, and its pieces written again."""
    with watched():
        try:
            model = sentencepiece.parse_model(data, "tokenizer.model")
        except SafeloadError as error:
            check_refusal(error, len(data))
            return
        again = sentencepiece.parse_model(sentencepiece.serialized(model.pieces, model.add_prefix, {}), "again")
    require(repr(again.pieces) == repr(model.pieces), "written again it has the same pieces")
    require(again.add_prefix == model.add_prefix and again.kind == tokenizer.BPE, "and the same settings")


def tokenizer_json(data):
    """A tokenizer.json for llama.cpp."""
    (FOLDER / "tokenizer.json").write_bytes(data)
    try:
        files = tokenizer.TokenizerFiles(safeload.remote.Location(LOCAL, str(FOLDER)))
        with watched(), contextlib.suppress(ImportError):
            vocabulary = tokenizer.vocabulary_of(files, 64)
            config = settings.ModelConfig({}, "m", model_families.gguf_forms()["LlamaForCausalLM"])
            keys = dict(tokenizer.special_keys(files, config, vocabulary.texts))
            require(len(vocabulary.texts) == len(vocabulary.types) == 64, "a token for each row")
            require(all(0 <= keys[key] < 64 for key in keys if key.endswith("_token_id")), "ids of tokens")
    except SafeloadError as error:
        check_refusal(error)
    finally:
        (FOLDER / "tokenizer.json").unlink()


def model_config(data):
    """A config.json for llama.cpp."""
    try:
        values = read_config(data) or {}
    except SafeloadError as error:
        check_refusal(error)
        return
    for source in model_families.gguf_forms().values():
        try:
            with watched():
                _, factors = settings.settings_of(settings.ModelConfig(values, "m", source), source)
        except SafeloadError as error:
            check_refusal(error)
            continue
        require(all(np.isfinite(array).all() for array in factors.values()), "factors are finite")


@contextlib.contextmanager
def refusing_config():
    """Takes the refusal of a config, and no other error."""
    try:
        yield
    except ValueError as error:
        require(type(error).__name__ == "ConfigError", f"the refusal is {error!r}")


def _expand(made, values):
    names = ["lm_head.weight", "model.layers.0.input_layernorm.weight", "h.1.ln_1.bias"]
    # 500,000 tensors are allowed, and take seconds.
    with watched(), refusing_config():
        keys = Config(values, made.defaults)
        counts = [text for text in (made.layers, made.more_layers, *made.counts.values()) if text is not None]
        if any(keys.evaluate(text) > 100 for text in counts):
            return
        wanted = made.expand(values, names)
        for name, entry in wanted.items():
            require(entry.name == name, "wanted by name")
            require(entry.shape is None or all(dim is None or dim >= 0 for dim in entry.shape), "sizes are sizes")
            require(made.find(name) is not None, f"{name!r} is a name of the schema")
        made.pairs(names, values)


def _divided_by_others(text):
    """Scheme, host, port, path and query of a URL, as the standard library and urllib3 read it."""
    from urllib.parse import urlsplit

    parts = urlsplit(text)
    require(parts.username is None and parts.password is None, "others find a user")
    yield parts.scheme, parts.hostname, parts.port, parts.path, parts.query
    if parse_url is not None:
        theirs = parse_url(text)
        require(theirs.auth is None, "urllib3 finds a user")
        yield theirs.scheme, theirs.host, theirs.port, theirs.path, theirs.query or ""


def url(data):
    """A URL of the web that is opened is read alike by others, and no URL is shown with its query or password."""
    text = data.decode("utf-8", "surrogateescape")
    shown = urls.shown(text)
    require(urls.shown(shown) == shown, f"shown as {shown!r}, and that as {urls.shown(shown)!r}")
    links = urls.parsed(text)
    for link in links:
        if link.place is not None:
            require("?" not in link.shown and "#" not in link.shown, f"{link.shown!r} has a query")
    if urls.is_url(text):
        folder = urls.split(text)[0]
        with contextlib.suppress(urls.UrlError):
            joined = urls.join(folder, "a?b#c %41::d")
            require(urls.split(joined)[1] == "a?b#c %41::d", f"{joined!r} has another name")
            require(len(urls.links(joined)) == len(urls.links(folder)), f"{joined!r} is another chain")
    with contextlib.suppress(safeload.UnsupportedError):
        urls.local_path(text)
    try:
        web, _ = urls.web_url(urls.divided(text))
    except urls.UrlError as error:
        require(not SECRET.search(str(error)), "the error quotes the URL")
        return
    require(urls.web_url(urls.divided(web.text)) == (web, None), f"{web.text!r} is read otherwise")
    zone = web.host.strip("[]").replace("%25", "%").lower()
    ours = web.scheme, zone, web.port, web.path.lower(), (web.query or "").lower()
    for scheme, host, port, path, query in _divided_by_others(web.text):
        zone = host.strip("[]").replace("%25", "%").lower()
        theirs = scheme, zone, port or {"http": 80, "https": 443}[scheme], path.lower(), query.lower()
        require(theirs == ours, f"{web.text!r} is {theirs} for others")
    with contextlib.suppress(urls.UrlError):
        target = web.redirected(text)
        require(target.scheme in ("http", "https"), "redirected elsewhere")


def signed_list(data):
    """A manifest of ours, a bundle of a model signature or its statement: names inside the model, or a refusal."""
    try:
        with watched():
            document = parse_json(data, "the list", "list")
            if digests.is_manifest(data[:64]):
                files = digests.files_of_manifest(document, "list")
            else:
                statement = digests._statement(document, "list") if "dsseEnvelope" in document else document
                files = digests.files_of_statement(statement, "list").files
    except SafeloadError as error:
        check_refusal(error)
        return
    for name, file in files.items():
        require(name == "." or not {"", ".", ".."} & {*name.split("/")}, f"the name {name!r}")
        at = 0
        for part in file:
            empty = len(file) == 1 and part.end == 0
            require(part.begin == at and (part.end is None or part.end > at or empty), "ranges without gaps")
            require(bytes.fromhex(part.digest), "a digest")
            at = part.end


TARGETS = {
    "any": any_file,
    "torch": torch,
    "pickle": pickle,
    "moon": moon_file,
    "npz": npz_file,
    "npy": npy_file,
    "gguf_values": gguf_values,
    "imatrix": imatrix_file,
    "quantized": quantized,
    "grouping": grouping,
    "adapters": adapters,
    "index": index,
    "dcp": dcp,
    "dcp_data": dcp_data,
    "fsdp": fsdp,
    "zero": zero,
    "zero_optimizer": zero_optimizer,
    "orbax": orbax,
    "orbax_manifest": orbax_manifest,
    "orbax_node": orbax_node,
    "orbax_array": orbax_array,
    "tar": tar,
    "llamafile": llamafile,
    "paddle": paddle,
    "flax": flax,
    "onnx": onnx,
    "gguf_split": gguf_split,
    "config": config,
    "sentencepiece": sentencepiece_model,
    "tokenizer": tokenizer_json,
    "model_config": model_config,
    "url": url,
    "signed_list": signed_list,
}
if h5py is not None:
    TARGETS["keras"] = keras
