"""Models of transformers for llama.cpp: config, tokenizer, and weights that depend on their names alone."""

import hashlib
import json
import shutil
import zlib

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
    return ((random.random(shape) * 2 - 1) * scale * 1.7 + offset).astype(ml_dtypes.bfloat16)


def codes(name, dtype, shape):
    """Random codes, or scales as quantizers write them: no NaN and no sign in float8."""
    random = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    if dtype == "F32":
        return (random.random(shape) * 3 + 0.5).astype(np.float32)
    if dtype == "F8_E4M3":
        return random.integers(0, 127, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
    return random.integers(*((110, 130) if "scale" in name else (0, 256)), shape, np.uint8)


def listed(file="models.json"):
    """The models of a file by name; "reference" is the result of llama.cpp's converter."""
    return json.loads((DATA / file).read_text(encoding="utf-8"))


def texts():
    """50 texts for tokenizers."""
    return json.loads((DATA / "texts.json").read_text(encoding="utf-8"))


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
    safeload.save(tensors_of(model) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


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
            if isinstance(array, safeload.QuantizedTensor):  # in blocks, with their own scales and those beside them
                parts = {part: np.ascontiguousarray(data) for part, data in array.parts.items()}
                tensors[name] = [
                    array.scheme,
                    list(array.shape),
                    *(digest(parts[part].tobytes()) for part in sorted(parts)),
                ]
                continue
            array = np.ascontiguousarray(array)
            tensors[name] = [str(array.dtype), list(array.shape), digest(array.tobytes())]
        content = path.read_bytes() if file.ignored else b""
        for name, part in file.ignored.items():  # factors of activations
            tensors[name] = [part.row.code, list(part.shape), digest(content[part.begin : part.end])]
    return {"metadata": metadata, "tensors": tensors}
