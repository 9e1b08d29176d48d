"""What the golden run reads: files of real writers, and files of the builders. A new fixture is a row of a list."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf as reference
import ml_dtypes
import numpy as np
from builders import (
    dcp_build,
    engine_models,
    flax_build,
    format_files,
    gguf_build,
    llama_models,
    llama_quantize,
    mixed_tensors,
    models,
    onnx_build,
    orbax_build,
    torch_build,
)
from builders.paths import DATA
from builders.quantized import FIXTURES
from builders.random import seeded
from builders.torch_build import Storage, tensor

import safeload


class Fixture(NamedTuple):
    """Something to open."""

    name: str
    make: Callable[[Path], Path]  # writes into an empty folder if it has to, and returns what to open
    options: dict[str, Any] = {}  # noqa: RUF012 - of `safeload.open`; never changed


def real(path: str, **options: Any) -> Fixture:
    """A file or folder of tests/data."""
    name = " ".join(["data/" + path, *(f"{key}={value}" for key, value in options.items())])
    return Fixture(name, lambda work: DATA / path, options)


def each(pattern: str, **options: Any) -> list[Fixture]:
    """Those of tests/data that match."""
    paths = (path.relative_to(DATA).as_posix() for path in sorted(DATA.glob(pattern)))
    return [real(path, **options) for path in paths if not path.endswith(("/make", ".py"))]


def unpacked(path: Path) -> Fixture:
    """A folder in a zip archive."""

    def make(work: Path) -> Path:
        shutil.unpack_archive(path, work / path.stem)
        return work / path.stem

    return Fixture(f"data/orbax/{path.stem}", make)


REAL = [
    *each("*.safetensors"),
    *each("torch/*.p*"),
    *each("torch/package*.pt", unknown_globals="inert"),
    *each("dcp/*[0-9]"),
    *each("deepspeed/*[0-9]"),
    *each("fsdp/*[0-9]"),
    *each("megatron/torch_dist_*"),
    *map(unpacked, sorted((DATA / "orbax").glob("*.zip"))),
    *each("keras/*.h5"),
    real("keras/model.keras"),
    real("keras/sharded.weights.json"),
    *each("flax/*.msgpack"),
    real("flax/sharded"),
    *each("onnx/*.onnx"),
    real("onnx/files/model.onnx"),
    real("onnx/external/model.onnx"),
    *each("paddle/*.pd*"),
    real("gguf/iq.gguf"),
    *each("lora/*.safetensors"),
    real("signatures/model"),
    *(Fixture(f"data/quantized/{name}", lambda work, name=name: FIXTURES[name].path) for name in FIXTURES),
]


# ---- made by builders ----


def plain(*dtypes: str) -> dict[str, np.ndarray]:
    """A tensor of each dtype and of each of a few shapes."""
    with seeded("golden"):
        return {
            f"{dtype}.{k}": mixed_tensors.tensor(dtype, shape)
            for dtype in dtypes
            for k, shape in enumerate(mixed_tensors.SHAPES)
        }


EVERY = mixed_tensors.DTYPES
COMMON = ("float64", "float32", "float16", "int64", "uint8", "bool")
# Dtypes that each format can store.
WRITTEN = {
    "safetensors": EVERY,
    "npz": (*COMMON, "complex64"),
    "npy": ("float32",),
    "gguf": ("float64", "float32", "float16", "bfloat16", "int64"),
    "moon": ("float16",),
    "torch zip": (*COMMON, "bfloat16", "complex64"),
    "torch legacy": (*COMMON, "bfloat16", "complex64"),
    "dcp": (*COMMON, "bfloat16"),
    "orbax": (*COMMON, "bfloat16"),
    "keras": COMMON,
    "flax": (*COMMON, "bfloat16"),
    "onnx": (*COMMON, "bfloat16", "float8_e4m3fn"),
    "pickle": COMMON,
}
NAMES = {"orbax": "_METADATA", "dcp": ".metadata"}


def of_format(name: str) -> Fixture:
    """A file of a format."""

    def make(work: Path) -> Path:
        weights = plain(*WRITTEN[name])
        if name == "npy":
            weights = {"float32.6": weights["float32.6"]}
        if name == "moon":
            weights = {key: array for key, array in weights.items() if array.size}
        if name in format_files.MAKERS:
            path = work / NAMES.get(name, "model.bin")
            format_files.MAKERS[name](weights, path)
            return path.parent if name in NAMES else path
        safeload.convert(weights, work / f"model.{name}")
        return work / f"model.{name}"

    return Fixture(f"format/{name}", make)


def content(name: str, function: Callable[[], bytes]) -> Fixture:
    """A file of some bytes."""

    def make(work: Path) -> Path:
        (work / Path(name).name).write_bytes(function())
        return work / Path(name).name

    return Fixture(name, make)


def folder(name: str, function: Callable[[Path], object]) -> Fixture:
    """A folder that a function fills."""

    def make(work: Path) -> Path:
        function(work / "model")
        return work / "model"

    return Fixture(name, make)


def block_type(kind: reference.GGMLQuantizationType) -> Fixture:
    """A GGUF file with random blocks of a type, which no reader should mind."""

    def write() -> bytes:
        block, size = reference.GGML_QUANT_SIZES[kind]
        random = np.random.Generator(np.random.PCG64(kind.value))
        data = random.integers(0, 256, 3 * 2 * size, np.uint8) & 0x3F  # small enough for finite scales
        return gguf_build.build([], [gguf_build.tensor("w", (2 * block, 3), kind.value, 0)], data.tobytes())

    return content(f"gguf/type-{kind.name}.gguf", write)


def torch_views() -> object:
    """Tensors that share a storage, with strides and offsets."""
    storage = Storage("0", np.arange(24, dtype=np.float32))
    views = {
        "whole": tensor(storage, (4, 6)),
        "turned": tensor(storage, (6, 4), (1, 6)),
        "tail": tensor(storage, (3,), (2,), 18),
    }
    other = Storage("1", np.arange(6, dtype=ml_dtypes.float8_e4m3fn))
    return {"model": views, "optimizer": {"state": {0: {"exp_avg": tensor(other, (2, 3))}}}, "epoch": 3}


def small_model(kind: str, **options: Any) -> Fixture:
    def make(path: Path) -> None:
        path.mkdir()
        models.write_folder(path, *models.small(kind), **options)

    return folder(f"model/{kind}", make)


def dcp(path: Path, **options: Any) -> None:
    weights = np.arange(60, dtype=np.float32).reshape(10, 6)
    made = dcp_build.Checkpoint(old=options.pop("old", False))
    files = ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp")
    made.tensor("grid", weights, dcp_build.grid((10, 6), (3, 2)), files=files).tensor(
        "b", np.ones(3, np.float16), **options
    )
    made.value("step", 3).write(path)


def orbax(path: Path, version: int, inner: tuple[int, ...] | None = None, **options: Any) -> None:
    made = orbax_build.OrbaxCheckpoint(version, **options)
    made.tensor("w", np.arange(96, dtype=np.float32).reshape(12, 8), (6, 4), inner)
    made.tensor("half", np.arange(5, dtype=np.float16)).tensor("one", np.array(2.5, np.float32))
    made.string(("note",), "text").leaf(("empty", 0), "None").write(path)


def parts_of_gguf(path: Path) -> None:
    path.mkdir()
    for k, names in enumerate((["a", "b"], ["c"])):
        (path / f"m-0000{k + 1}-of-00002.gguf").write_bytes(gguf_build.part(k, 2, 3, names))


def gguf_of(name: str, **options: Any) -> Fixture:
    def make(work: Path) -> Path:
        tensors, metadata = llama_quantize.model(**options)
        safeload.gguf.save_file(tensors, work / "model.gguf", metadata, durable=False)
        return work / "model.gguf"

    return Fixture(f"gguf/{name}", make)


BUILT = [
    *map(of_format, WRITTEN),
    *(block_type(kind) for kind in reference.GGMLQuantizationType),
    *(gguf_of(name, architecture=name) for name in ("llama", "qwen2", "gemma2")),
    gguf_of("experts", experts=3),
    folder("gguf/parts", parts_of_gguf),
    content("torch/views.pt", lambda: torch_build.zip_file(torch_views())),
    content(
        "torch/big-endian.pt",
        lambda: torch_build.zip_file({"w": tensor(Storage("0", np.arange(6, dtype=np.int32)))}, order="big"),
    ),
    content(
        "torch/deflated.pt",
        lambda: torch_build.zip_archive(
            torch_build.zip_entries({"w": tensor(Storage("0", np.arange(600.0)))}), deflate=("data/0",)
        ),
    ),
    content("torch/views.bin", lambda: torch_build.legacy_file(torch_views())),
    content("onnx/sample.onnx", onnx_build.sample),
    content(
        "flax/chunked.msgpack",
        lambda: flax_build.pack(
            {
                "w": flax_build.chunked(np.arange(24, dtype=np.float32).reshape(4, 6), 7),
                "s": flax_build.Scalar(np.float16(2)),
                "n": {"0": np.ones(3, np.int8)},
            }
        ),
    ),
    folder("dcp/sample", lambda path: dcp_build.sample().write(path)),
    folder("dcp/grid", dcp),
    folder("dcp/older", lambda path: dcp(path, old=True)),
    folder("orbax/sample", lambda path: orbax_build.sample().write(path)),
    folder("orbax/zarr2", lambda path: orbax(path, 2)),
    folder("orbax/zarr3", lambda path: orbax(path, 3)),
    folder("orbax/shards", lambda path: orbax(path, 3, inner=(2, 4))),
    folder("orbax/plain files", lambda path: orbax(path, 3, use_ocdbt=False)),
]

# Models whose files are plain; operations differ by them.
MODELS = [
    *map(small_model, models.SMALL),
    folder(
        "model/moondream.original",
        lambda path: safeload.save(models.moondream(), path, max_shard_size="2KB", durable=False),
    ),
    *(
        folder(f"engine/{dtype}", lambda path, dtype=dtype: engine_models.write_model(path, dtype))
        for dtype in engine_models.DTYPES
    ),
    folder("engine/ragged", lambda path: engine_models.write_model(path, "bfloat16", engine_models.RAGGED)),
    *(
        folder(f"engine/{kind}", lambda path, kind=kind: engine_models.write_experts(path, kind))
        for kind in engine_models.EXPERTS
    ),
    folder("engine/fused", lambda path: engine_models.write_experts(path, "qwen3_moe", fused=True)),
    *(
        folder(
            f"llama_cpp/{name}", lambda path, name=name: llama_models.write_folder(path, llama_models.listed()[name])
        )
        for name in llama_models.listed()
    ),
]

# Adapters with the base that each changes. Those that BLAS or LAPACK merges are not here: their last bits differ.
_LORA, _KINDS, _DIFFUSION = DATA / "lora", DATA / "kinds", DATA / "lora_diffusion"
_BASES = {"mixed": "mixed_base.safetensors", "experts": "experts_base.safetensors"}
OF_DIFFUSION = ("flux_diffusers", "flux_kohya", "flux_xlabs", "sd3_diffusers", "unet_kohya", "unet_old_diffusers")
OF_DIFFUSION = (*OF_DIFFUSION, "wan_comfyui", "wan_kohya")
ADAPTERS = {
    **{
        path.parent.name: (path.parent, _LORA / _BASES.get(path.parent.name, "base.safetensors"))
        for path in sorted(_LORA.glob("*/adapter_config.json"))
    },
    **{
        f"kinds/{name}": (_KINDS / name, _KINDS / "base.safetensors")
        for name in ("adalora", "adalora_turned", "ia3", "ia3_turned", "loha", "lokr_full", "vera", "vera_turned")
    },
    **{
        f"diffusion/{name}": (
            _DIFFUSION / f"{name}.safetensors",
            _DIFFUSION / f"{name.partition('_')[0]}_base.safetensors",
        )
        for name in OF_DIFFUSION
    },
}


def fixture(name: str) -> Fixture:
    return next(row for row in (*REAL, *BUILT, *MODELS) if row.name == name)


def made(name: str, work: Path) -> Path:
    """Write a fixture into a new folder of its name."""
    folder = work / "made" / name
    folder.mkdir(parents=True)
    return fixture(name).make(folder)
