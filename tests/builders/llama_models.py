"""Models of transformers for llama.cpp: config, tokenizer, and weights that depend on their names alone."""

import functools
import hashlib
import json
import shutil
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np

import safeload

from .paths import ROOT

DATA = ROOT / "tests" / "data" / "llama_cpp"


def weights(name, shape):
    """Random bfloat16 values; small enough for tiny models to have sensible activations."""
    random = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    scale, offset = (0.2, 1.0) if "norm" in name else (0.15, 0.0)
    # uniform, because the algorithm behind normal numbers may change between versions of NumPy
    values = ((random.random(shape) * 2 - 1) * scale * 1.7 + offset).astype(np.float32)
    return values.astype(ml_dtypes.bfloat16)  # from float32, because ml_dtypes before 0.7 rounds float64 twice


def codes(name, dtype, shape):
    """Random codes, or scales as quantizers write them: no NaN and no sign in float8."""
    random = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    if dtype == "F32":
        return (random.random(shape) * 3 + 0.5).astype(np.float32)
    if dtype == "F8_E4M3":
        return random.integers(0, 127, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
    return random.integers(*((110, 130) if "scale" in name else (0, 256)), shape, np.uint8)


@functools.cache
def listed(file="models.json"):
    """The models of a file by name, which nobody changes; "reference" is the result of llama.cpp's converter."""
    return json.loads((DATA / file).read_text(encoding="utf-8"))


@functools.cache
def plain():
    """The models without a tower."""
    return {name: model for name, model in listed().items() if "vision_config" not in model["config"]}


def texts():
    """50 texts for tokenizers."""
    return json.loads((DATA / "texts.json").read_text(encoding="utf-8"))


def pre_tokenizers():
    """The table of pre-tokenizers."""
    path = Path(safeload.__file__).parent / "conversion" / "llama_cpp" / "pre_tokenizers.json"
    return json.loads(path.read_text(encoding="utf-8"))


def tensors_of(model):
    """The tensors by name; codes have a dtype before their shape."""
    return {
        name: codes(name, shape[0], shape[1:]) if isinstance(next(iter(shape), 0), str) else weights(name, shape)
        for name, shape in model["tensors"].items()
    }


def write_folder(folder, model, tensors=None):
    """Write a model as `save_pretrained` does."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model["config"]))
    for file in sorted((DATA / model["tokenizer"]).iterdir()):
        shutil.copy(file, folder)
    for name, content in model.get("files", {}).items():
        (folder / name).write_text(json.dumps(content))
    safeload.save(tensors_of(model) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


# Tensors of which torch computes functions that are not exact.
INEXACT = ("ssm_a", "per_dim_scale.weight")


def comparable(value):
    """A value of GGUF metadata as JSON holds it: its type, and a digest of a long value."""
    kind = type(value).__name__.lower()
    if isinstance(value, np.ndarray):
        return [f"array {value.dtype}", len(value), digest(value.tobytes())]
    if isinstance(value, list):
        return ["array str", len(value), digest("\0".join(value).encode("utf-8", "surrogateescape"))]
    if isinstance(value, str):
        return ["str", value if len(value) < 100 else digest(value.encode())]
    return [kind, bool(value) if isinstance(value, bool) else float(value) if isinstance(value, float) else int(value)]


def described(path):
    """Metadata and tensors of a GGUF file as JSON, without what is ours."""
    with safeload.open(path) as file:
        metadata = {key: comparable(value) for key, value in file.metadata.items() if not key.startswith("safeload.")}
        tensors = {}
        for name in file:
            array = file[name]
            if isinstance(array, safeload.QuantizedTensor):  # in blocks, with their own scales and the scales beside
                parts = {part: np.ascontiguousarray(data) for part, data in array.parts.items()}
                tensors[name] = [
                    array.scheme,
                    list(array.shape),
                    *(digest(parts[part].tobytes()) for part in sorted(parts)),
                ]
                continue
            array = np.ascontiguousarray(array)
            content = array.view(np.int32).ravel().tolist() if name.endswith(INEXACT) else digest(array.tobytes())
            tensors[name] = [str(array.dtype), list(array.shape), content]
        content = path.read_bytes() if file.ignored else b""
        for name, part in file.ignored.items():  # factors of activations
            tensors[name] = [part.row.code, list(part.shape), digest(content[part.begin : part.end])]
    return {"metadata": metadata, "tensors": tensors}


def digest_of(path):
    """The digest of a GGUF file, without the values that torch does not compute exactly."""
    content = bytearray(path.read_bytes())
    with safeload.open(path) as file:
        for name, tensor in file.tensors.items():
            if name.endswith(INEXACT):
                content[tensor.offset : tensor.offset + tensor.nbytes] = bytes(tensor.nbytes)
    return digest(content)


def without_last_bits(tensors, reference):
    """Described tensors, with the values of a reference where these differ by 1 ulp: torch's exp is not exact."""

    def same(name, content):
        expected = reference[name][2] if name in reference else None
        close = isinstance(content, list) and isinstance(expected, list) and len(content) == len(expected)
        close = close and all(abs(a - b) <= 1 for a, b in zip(content, expected, strict=True))
        return expected if close else content

    return {name: [*about, same(name, content)] for name, (*about, content) in tensors.items()}
