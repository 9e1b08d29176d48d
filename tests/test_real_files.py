"""Real files from other writers: every way to load gives what independent readers found in them."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from builders.paths import DATA, SHARED
from builders.quantized import FIXTURES

import safeload
from safeload.numpy import load, load_file

pytestmark = pytest.mark.any_python

EXPECTED = json.loads((DATA / "expected.json").read_text())
LOCAL = {name: want for name, want in EXPECTED.items() if name.endswith(".safetensors")}
OUTSIDE = (
    {k: v for k, v in json.loads((SHARED / "expected.json").read_text()).items() if k.startswith("safetensors/")}
    if SHARED.is_dir()
    else {}
)

needs_shared = pytest.mark.skipif(not OUTSIDE, reason="../shared/data is not here")
FILES = [
    *(pytest.param(DATA / name, want, id=name) for name, want in LOCAL.items()),
    *(pytest.param(SHARED / name, want, id=f"shared/{Path(name).name}") for name, want in OUTSIDE.items()),
    *([] if OUTSIDE else [pytest.param(None, None, id="shared", marks=needs_shared)]),
]

# What numpy calls the dtypes of these files; ml_dtypes' name where numpy has none.
NUMPY_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}


def digest(array):
    return hashlib.sha256(array.tobytes()).hexdigest()


def check_arrays(arrays, want):
    assert set(arrays) == set(want["tensors"])
    for name, entry in want["tensors"].items():
        array = arrays[name]
        assert array.dtype.name == NUMPY_NAMES[entry["dtype"]], name
        assert array.shape == tuple(entry["shape"]), name
        assert digest(array) == entry["sha256"], name
        assert array.flags.aligned, name
        assert array.flags.c_contiguous, name


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
@pytest.mark.parametrize(("path", "want"), FILES)
def test_every_way_of_loading_gives_the_expected_tensors(path, want, backend):
    check_arrays(load_file(path, backend=backend), want)
    with safeload.open(path) as checkpoint:
        check_arrays(checkpoint.load(backend=backend), want)
        check_arrays(checkpoint, want)
        assert {n: i.dtype for n, i in checkpoint.tensors.items()} == {
            n: e["dtype"] for n, e in want["tensors"].items()
        }
        assert checkpoint.metadata == (want["metadata"] or {})
    with safeload.safe_open(path, backend=backend) as opened:
        assert opened.metadata() == want["metadata"]
        check_arrays({name: opened.get_tensor(name) for name in opened.keys()}, want)  # noqa: SIM118 - upstream's name
        check_arrays(opened.get_tensors(), want)
        assert {name: opened.get_tensor_meta(name)[:2] for name in want["tensors"]} == {
            name: (entry["dtype"], entry["shape"]) for name, entry in want["tensors"].items()
        }


@pytest.mark.parametrize(("path", "want"), FILES)
def test_bytes_in_memory_give_the_expected_tensors(path, want):
    data = path.read_bytes()
    check_arrays(load(data), want)
    raw = dict(safeload.deserialize(data))
    assert {n: hashlib.sha256(e["data"]).hexdigest() for n, e in raw.items()} == {
        n: e["sha256"] for n, e in want["tensors"].items()
    }
    assert {n: (e["dtype"], e["shape"]) for n, e in raw.items()} == {
        n: (e["dtype"], e["shape"]) for n, e in want["tensors"].items()
    }


@needs_shared
@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("index", ["", "model.safetensors.index.json"])
def test_a_sharded_folder_is_the_union_of_its_shards(index, backend):
    folder = "safetensors/minilm-l0-sharded-f16"
    shards = {name: want for name, want in OUTSIDE.items() if name.startswith(folder + "/")}
    tensors = {name: entry for want in shards.values() for name, entry in want["tensors"].items()}
    with safeload.open(SHARED / folder / index) as checkpoint:
        check_arrays(checkpoint.load(backend=backend), {"tensors": tensors})
        check_arrays(checkpoint, {"tensors": tensors})
        assert {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()} == {
            name: (entry["dtype"], tuple(entry["shape"])) for name, entry in tensors.items()
        }
        assert len(checkpoint.files) == len(shards) == 4
        assert {Path(file) for file in checkpoint.files} == {SHARED / name for name in shards}
        for want in shards.values():
            assert (want["metadata"] or {}).items() <= checkpoint.metadata.items()
        assert checkpoint.metadata["total_size"] == checkpoint.nbytes == 3947776


@needs_shared
def test_the_same_weights_as_f16_and_bf16_agree_to_the_precision_of_both():
    bf16 = safeload.load(SHARED / "safetensors/minilm-l0-bf16.safetensors")
    f16 = safeload.load(SHARED / "safetensors/minilm-l0-sharded-f16")
    assert set(bf16) == set(f16)
    for name, array in bf16.items():
        np.testing.assert_allclose(array.astype(np.float32), f16[name].astype(np.float32), rtol=2**-8, atol=1e-6)


def test_readme_gives_origin_licence_and_digest_of_each_file(data):
    readme = (data / "README.md").read_text()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in readme.splitlines() if "|" in line][2:]
    others = ("README.md", "expected.json", "localhost.pem")
    paths = (path for path in data.rglob("*") if path.is_file() and path.name not in others)
    elsewhere = {
        data / "quantized",
        data / "architectures",
        data / "gguf",
        data / "lora",
        data / "lora_diffusion",
        data / "kinds",
        data / "dcp",
        data / "deepspeed",
        data / "fsdp",
        data / "orbax",
        data / "keras",
        data / "megatron",
        data / "manifests",
        data / "proof",
        data / "paddle",
        data / "flax",
        data / "onnx",
        data / "llama_cpp",
        data / "comfyui",
        data / "llama_quantize",
        data / "engines",
        data / "mlx",
        data / "renamed",
        data / "signatures",
    }  # these have a README of their own
    files = sorted(path.relative_to(data).as_posix() for path in paths if not elsewhere & set(path.parents))
    assert files == sorted(EXPECTED)
    assert sorted(row[0] for row in rows) == files
    for name, origin, licence, why, digest_there in rows:
        assert digest_there == f"`{hashlib.sha256((data / name).read_bytes()).hexdigest()}`", name
        assert origin, name
        assert licence, name
        assert why, name


def test_readme_of_the_quantized_checkpoints_has_a_row_for_each(data):
    rows = (data / "quantized/README.md").read_text().splitlines()
    assert [row.split()[1] for row in rows if row.startswith("| ")][1:] == list(FIXTURES)
    folders = {path.name for path in (data / "quantized").iterdir() if path.is_dir()}
    assert folders - {"expected", "make", "__pycache__"} == set(FIXTURES)


@pytest.mark.parametrize("name", FIXTURES)
def test_quantized_checkpoint_opens_with_the_tensors_that_its_weights_are_made_of(name):
    fixture = FIXTURES[name]
    with safeload.open(fixture.path, stored=True) as checkpoint:
        assert set(checkpoint.keys()) <= set(fixture.stored())  # a GGUF file has scales behind codes
    with safeload.open(fixture.path) as checkpoint:
        assert set(checkpoint.keys()) == set(fixture.expected())
    for weights in fixture.expected().values():
        assert weights.dtype == np.float32


@needs_shared
def test_what_is_expected_here_is_what_is_expected_there():
    assert {f"safetensors/{name}": want for name, want in LOCAL.items()}.items() <= OUTSIDE.items()
