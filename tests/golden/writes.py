"""Rows of writing: each file that an operation makes of fixed inputs. A new case is a row of a list here."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from builders import diffusion, engine_models, llama_models, llama_quantize, mixed_tensors, models
from builders.paths import DATA
from builders.quantized import FIXTURES, KINDS
from builders.random import seeded

import safeload
import safeload.layouts
import safeload.moon
import safeload.numpy

from . import fixtures
from .rows import Rows, attempt, digest, of_array, of_error, of_files, of_json, of_value


class Case(NamedTuple):
    """Something that writes into a folder; what it returns is a row too."""

    name: str
    run: Callable[[Path, Path], Any]  # of a folder for its input, and an empty one for its output


SCHEMES = (
    *("int8", "q4_0", "q8_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"),
    *("mxfp4", "tq1_0", "tq2_0"),
)
PRESETS = (
    *("w4a16", "w4a16_asym", "w8a16", "w8a8", "fp8_dynamic", "fp8_block", "nvfp4a16", "mxfp4a16", "deepseek_fp8"),
    *("mlx2", "mlx3", "mlx4", "mlx5", "mlx6", "mlx8", "mlx-mxfp4", "mlx-nvfp4", "mlx-mxfp8", "bnb_nf4", "bnb_fp4"),
)
GROUPS = tuple(f"mlx{bits}-g{group}" for bits in (2, 3, 4, 5, 6, 8) for group in (32, 128))
FORMATS = ("safetensors", "npz", "gguf", "moon")


def of_case(case: Case, work: Path) -> Rows:
    """A row for each file, and one for the result or the error."""
    source, out = work / "in", work / "out"
    source.mkdir()
    out.mkdir()
    try:
        result = case.run(source, out)
    except Exception as error:
        result = of_error(error)
    yield f"writes/{case.name}", "none" if result is None else str(result)
    for name, content in of_files(out):
        yield f"writes/{case.name}/{name}", content


def mixed(count: int = 12, stem: str = "") -> dict[str, np.ndarray]:
    with seeded("golden"):
        return mixed_tensors.many(count, stem)


def halves() -> dict[str, np.ndarray]:
    """Float16 tensors, which every format has."""
    return {name: array.astype(np.float16) for name, array in engine_models.tensors("float32").items()}


def converted(name: str, source: Any, target: str = "out", **options: Any) -> Case:
    """A conversion of a fixture, or of what a function makes."""

    def run(into: Path, out: Path) -> object:
        given = fixtures.made(source, into) if isinstance(source, str) else source(into)
        opening = fixtures.fixture(source).options if isinstance(source, str) else {}
        given = safeload.open(given, **opening) if opening else given
        return safeload.convert(given, out / target, **options)

    return Case(f"convert/{name}", run)


def gguf_model(**options: Any) -> Callable[[Path], Path]:
    def make(into: Path) -> Path:
        tensors, metadata = llama_quantize.model(**options)
        safeload.gguf.save_file(tensors, into / "model.gguf", metadata, durable=False)
        return into / "model.gguf"

    return make


def diffusion_model(name: str) -> Callable[[Path], Path]:
    def make(into: Path) -> Path:
        safeload.save(diffusion.model(name), into / "model.safetensors", durable=False)
        return into / "model.safetensors"

    return make


def with_importance(file_type: str) -> Case:
    def run(into: Path, out: Path) -> object:
        path = gguf_model()(into)
        llama_quantize.save_imatrix(into / "imatrix.gguf", llama_quantize.model()[0])
        return safeload.convert(path, out / "out.gguf", quantize=file_type, imatrix="in/imatrix.gguf")

    return Case(f"convert/imatrix/{file_type}", run)


def there_and_back(name: str) -> Case:
    def run(into: Path, out: Path) -> object:
        safeload.convert(fixtures.made(f"llama_cpp/{name}", into), into / "model.gguf")
        return safeload.convert(into / "model.gguf", out / "model")

    return Case(f"convert/gguf to transformers/{name}", run)


# ---- the operations but convert ----


def save(_: Path, out: Path) -> None:
    safeload.save(mixed(), out / "mixed.safetensors", metadata={"b": "2", "a": "1"}, durable=False)
    safeload.save(mixed(40), out / "shards", max_shard_size="5KB", durable=False)
    safeload.save({}, out / "empty.safetensors", durable=False)
    tree = {"a": {"b": np.ones(2), "c": np.zeros((), np.int8)}}
    safeload.save(safeload.flatten(tree), out / "nested.safetensors", durable=False)
    safeload.numpy.save_file(mixed(), out / "drop-in.safetensors", {"format": "np"})
    (out / "bytes.safetensors").write_bytes(safeload.numpy.save(mixed(), {"format": "np"}))
    safeload.gguf.save_file(halves(), out / "halves.gguf", {"general.architecture": "llama", "n": np.uint8(3)})
    safeload.moon.save_file(halves(), out / "halves.moon")


def save_quantized(_: Path, out: Path) -> None:
    weights = {"w": engine_models.matrix(16, 256, 1)}
    for scheme in SCHEMES:
        tensors = {"w": safeload.quantize(weights["w"], scheme), "plain": weights["w"][:2]}
        safeload.save(tensors, out / f"{scheme}.safetensors", durable=False)


def write(_: Path, out: Path) -> None:
    with safeload.Writer(out / "one.safetensors", metadata={"k": "v"}, durable=False) as writer:
        for name, array in mixed().items():
            writer.add(name, array)
    with safeload.Writer(out / "shards", max_shard_size="5KB", durable=False) as writer:
        for name, array in mixed(40).items():
            writer.add(name, array)
    known = {name: (array.dtype, array.shape) for name, array in mixed().items()}
    with safeload.Writer(out / "known.safetensors", tensors=known, durable=False) as writer:
        for name, array in mixed().items():
            writer.add(name, array)


def edit(_: Path, out: Path) -> None:
    safeload.save(mixed(), out / "a.safetensors", metadata={"k": "v"}, durable=False)
    safeload.gguf.save_file(halves(), out / "b.gguf", {"general.architecture": "llama"})
    shutil.copytree(DATA / "signatures/model", out / "model")
    with safeload.edit(out / "a.safetensors", durable=False) as file:
        file.metadata["license"] = "MIT"
        del file.metadata["k"]
        for name in list(mixed())[:3]:
            file.rename(name, f"new.{name}")
    with safeload.edit(out / "b.gguf", durable=False) as file:
        file.metadata["general.name"] = "name"
    with safeload.edit(out / "model", durable=False) as folder:
        folder.metadata["license"] = "MIT" * 99


def patch(into: Path, out: Path) -> str:
    old, new = engine_models.tensors("bfloat16"), engine_models.tensors("bfloat16")
    new["model.norm.weight"] = new["model.norm.weight"] * np.float32(2).astype(new["model.norm.weight"].dtype)
    del new["lm_head.weight"]
    new["added"] = np.arange(5)
    safeload.save(old, into / "old.safetensors", durable=False)
    safeload.save(new, into / "new.safetensors", durable=False)
    report = safeload.make_patch(into / "old.safetensors", into / "new.safetensors", out / "patch.safetensors")
    return (
        f"{report} {safeload.apply_patch(into / 'old.safetensors', out / 'patch.safetensors', out / 'new.safetensors')}"
    )


def stack(into: Path, out: Path) -> str:
    safeload.save(models.moondream(24, 27), into / "model.safetensors", durable=False)
    layout = safeload.layouts.MOONDREAM2
    safeload.convert(into / "model.safetensors", out / "out.moon", layout=layout, dtype="float16")
    safeload.convert(into / "model.safetensors", out / "out.safetensors", layout=layout)
    stacked = safeload.stack(into / "model.safetensors", layout)
    return of_json({name: of_array(array, 16) for name, array in stacked.items()})


def quantize(scheme: str) -> Case:
    """Each rounding of a scheme, of matrices and of stacks of matrices, with importance and without."""

    def run(_: Path, out: Path) -> str:
        weights = engine_models.matrix(24, 512, 3)
        calls = {
            "matrix": lambda: safeload.quantize(weights, scheme),
            "bfloat16": lambda: safeload.quantize(safeload.astype(weights, "bfloat16"), scheme),
            "stack": lambda: safeload.quantize(weights.reshape(2, 12, 512), scheme),
            "axis 0": lambda: safeload.quantize(weights, scheme, axis=0),
            "absmax": lambda: safeload.quantize(weights, scheme, rounding="absmax"),
            "ggml": lambda: safeload.quantize(weights, scheme, rounding="ggml"),
            "importance": lambda: safeload.quantize(weights, scheme, importance=np.abs(weights[9]) + 1),
        }
        return of_json({name: attempt(lambda call=call: both(call())) for name, call in calls.items()})

    return Case(f"quantize/{scheme}", run)


def both(value: safeload.QuantizedTensor) -> str:
    """Codes and values."""
    return of_value(value, 24) + " " + of_array(value.dequantize(), 16)


def load_quantized(scheme: str) -> Case:
    def run(into: Path, out: Path) -> str:
        folder = fixtures.made("model/llama-gqa", into)
        made = safeload.load_quantized(folder, scheme)
        error = safeload.quantization_error(folder, made)
        values = {name: of_value(value, 16) for name, value in made.items()}
        return of_json({"summary": str(made.summary), "error": str(error), **values})

    return Case(f"load_quantized/{scheme}", run)


def casts(_: Path, out: Path) -> str:
    """Every number of 16 bits and many others, to every dtype."""
    names = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    values = np.arange(65536, dtype=np.uint16).view(np.float16)
    result = {}
    for source in names:
        given = safeload.astype(values, source)
        for target in names:
            cast = safeload.astype(given, target)
            ordinary = np.where(np.isnan(cast.astype(np.float64)), cast.dtype.type(0), cast)  # but not signs of NaN
            result[f"{source} to {target}"] = of_array(ordinary, 16)
    return of_json(result)


def serialize(_: Path, out: Path) -> str:
    arrays = {"b": np.arange(4, dtype=np.float32), "a": np.arange(2)}
    specs = {
        name: safeload.TensorSpec(array.dtype.name, array.shape, array.ctypes.data, array.nbytes)
        for name, array in arrays.items()
    }
    return digest(safeload.serialize(specs, {"k": "v"}))


def ways(into: Path, out: Path) -> None:
    """The ways to run a conversion."""
    folder = fixtures.made("engine/bfloat16", into)
    options: dict[str, Any] = {"dtype": "float32", "max_shard_size": "200KB"}
    safeload.convert(folder, out / "at once", **options)
    safeload.convert(folder, out / "resumed", resume=True, **options)
    with ThreadPoolExecutor(2) as pool:
        safeload.convert(folder, out / "pool", executor=pool, **options)
    plan = safeload.plan_convert(folder, out / "planned", **options)
    safeload.finalize(json.loads(json.dumps(plan)), map(safeload.run_piece, plan.pieces))


def report(into: Path, out: Path) -> None:
    safeload.report(fixtures.made("engine/bfloat16", into), out / "report.html")


def npy(_: Path, out: Path) -> None:
    safeload.convert({"w": np.arange(6.0).reshape(2, 3)}, out / "w.npy")


OPERATIONS = [
    *(
        Case(function.__name__, function)
        for function in (save, save_quantized, write, edit, patch, stack, casts, serialize, ways, report, npy)
    ),
    *map(quantize, SCHEMES),
    *map(load_quantized, ("q4_0", "int8", "q4_k", "q8_0", "tq2_0")),
]

LLAMA = "engine/bfloat16"
CONVERSIONS: list[Case] = [
    # formats and dtypes
    *(converted(f"to {format}", LLAMA, f"out.{format}", dtype="float16", raw=True) for format in FORMATS),
    *(
        converted(f"to {dtype}", LLAMA, "out.safetensors", dtype=dtype)
        for dtype in ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    ),
    converted("shards", LLAMA, max_shard_size="100KB"),
    converted("selection", LLAMA, "out.safetensors", only="*.mlp.*", drop="*up*", rename=[(r"^model\.", "")]),
    converted("metadata", LLAMA, "out.safetensors", metadata={"license": "MIT"}),
    converted("mixed tensors", lambda _: mixed(), "out.safetensors"),
    *(converted(f"from {row.name}", row.name, "out.safetensors") for row in fixtures.BUILT),
    *(
        converted(f"from {row.name}", row.name, "out.safetensors")
        for row in fixtures.REAL
        if "quantized/" not in row.name
    ),
    # quantized checkpoints, with their values and as they are stored
    *(converted(f"dequantized {name}", f"data/quantized/{name}", dtype="bfloat16") for name in FIXTURES),
    *(converted(f"stored {name}", f"data/quantized/{name}") for name in KINDS),
    *(converted(f"to q8_0 {name}", f"data/quantized/{name}", "out.gguf", quantize="q8_0", raw=True) for name in KINDS),
    # ggml's blocks
    *(converted(f"{s} in safetensors", LLAMA, "out.safetensors", quantize=s) for s in SCHEMES),
    *(converted(f"{s} in gguf", LLAMA, "out.gguf", quantize=s, raw=True) for s in SCHEMES),
    converted("patterns", LLAMA, "out.gguf", quantize={"*down*": "q6_k", "*mlp*": "q4_k", "*": None}, raw=True),
    # engines
    *(converted(f"{p} {d}", f"engine/{d}", quantize=p) for p in PRESETS for d in engine_models.DTYPES),
    *(converted(f"{preset} ragged", "engine/ragged", quantize=preset) for preset in PRESETS),
    *(converted(f"{group} bfloat16", LLAMA, quantize=group) for group in GROUPS),
    *(
        converted(f"{preset} {kind}", f"engine/{kind}", quantize=preset)
        for kind in (*engine_models.EXPERTS, "fused")
        for preset in ("w4a16", "fp8_dynamic", "nvfp4a16", "mlx4", "bnb_nf4", "deepseek_fp8")
    ),
    *(
        converted(f"{preset} {kind}", f"model/{kind}", quantize=preset)
        for kind in models.SMALL
        for preset in ("w8a8", "mlx4-g32", "bnb_fp4")
    ),
    # llama.cpp
    *(converted(f"llama.cpp {name}", f"llama_cpp/{name}", "out.gguf") for name in llama_models.listed()),
    *(
        converted(f"llama.cpp {name} {type}", f"llama_cpp/{name}", "out.gguf", quantize=type)
        for name in llama_models.listed()
        for type in ("q8_0", "q4_k_m", "q4_0", "mxfp4_moe")
    ),
    *map(there_and_back, llama_models.listed()),
    *(converted(f"llama.cpp small {kind}", f"model/{kind}", "out.gguf") for kind in models.SMALL),
    *(
        converted(f"gguf {name} {type}", gguf_model(**options), "out.gguf", quantize=type)
        for name, options in {
            "llama": {},
            "many layers": {"layers": 9, "kv_heads": 1},
            "experts": {"experts": 4, "layers": 3},
            "fused": {"architecture": "phi3", "fused": True, "tied": True},
            "gemma2": {"architecture": "gemma2", "tied": True, "dtype": "float16"},
            "odd": {"width": 288, "inner": 320},
        }.items()
        for type in llama_quantize.FILE_TYPES
    ),
    *map(with_importance, ("q2_k_s", "q4_k_m", "iq4_xs", "q4_0")),
    # ComfyUI
    *(converted(f"ComfyUI {name}", diffusion_model(name), "out.gguf") for name in diffusion.MODELS),
    *(
        converted(f"ComfyUI {name} {type}", diffusion_model(name), "out.gguf", quantize=type)
        for name in ("flux", "sd1", "sdxl")
        for type in ("q4_0", "q8_0", "q4_k_m", "q3_k_s", "q5_1")
    ),
    # adapters
    *(
        converted(f"adapter {name}", lambda _, base=base: base, "out.safetensors", adapters=adapter)
        for name, (adapter, base) in fixtures.ADAPTERS.items()
    ),
    *(
        converted(
            f"adapter {name} as {layout or 'PEFT'}", lambda _, name=name: fixtures.ADAPTERS[name][0], target, **how
        )
        for name in (f"diffusion/{name}" for name in fixtures.OF_DIFFUSION)
        for layout, target in (("kohya", "out.safetensors"), ("diffusers", "out.safetensors"), (None, "out/"))
        for how in ({"base": fixtures.ADAPTERS[name][1], "layout": layout},)
    ),
]


def all_cases() -> Iterator[Case]:
    yield from OPERATIONS
    yield from CONVERSIONS
