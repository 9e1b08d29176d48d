"""Rows of reports: JSON of info, check, diff, stats, scan and verify, of good models and of damaged ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from builders.paths import DATA
from builders.torch_build import Call, Ref, zip_file

import safeload
import safeload.numpy

from . import fixtures
from .rows import Rows, digest, normalised, of_error, of_json

LLAMA = "model/llama-gqa"
NAME = "model-0000{}-of-00002.safetensors"


def flattened(subject: str, call: Callable[[], Any], *, table: bool = False) -> Rows:
    """The text of a report, its findings one by one, and its other fields; those of a table are rows."""
    try:
        report = call()
    except Exception as error:
        yield subject, of_error(error)
        return
    fields = report.to_dict()
    fields.pop("seconds", None)
    for name in ("findings", "errors", "warnings"):
        items = fields.pop(name, None)
        for number, item in enumerate(items if isinstance(items, list) else ()):
            yield f"{subject}/{name}/{number}", of_json(item)
    yield f"{subject}/text", shortened(str(report))
    if table:
        for name, value in fields.items():
            yield f"{subject}/{name}", of_json(value)
    else:
        yield subject, ", ".join(f"{name}: {shortened(of_json(value))}" for name, value in fields.items())


def shortened(text: str) -> str:
    """A long text as its beginning and its digest, after what depends on the machine is out of it."""
    text = " ".join(normalised(text, Path.cwd()).split())  # lines break where paths let them
    return text if len(text) <= 300 else f"{text[:60]}... #{digest(text.encode(), 12)}"


# ---- damages: each changes one thing of a folder ----


def flip(folder: Path) -> None:
    """A bit of the largest exponent."""
    path = folder / NAME.format(1)
    content = bytearray(path.read_bytes())
    content[-2:] = b"\x80\x7f"
    path.write_bytes(content)


def cut(folder: Path) -> None:
    path = folder / NAME.format(2)
    path.write_bytes(path.read_bytes()[:-5])


def zeros(folder: Path) -> None:
    path = folder / NAME.format(2)
    content = path.read_bytes()
    path.write_bytes(content[:-9000] + bytes(9000))


def lose_shard(folder: Path) -> None:
    (folder / NAME.format(1)).unlink()


def lose_tensor(folder: Path) -> None:
    change(folder, lambda tensors: tensors.popitem())


def add_tensor(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"more.weight": np.ones(3, np.float32)}))


def wrong_shape(folder: Path) -> None:
    def shorten(tensors: dict[str, Any]) -> None:
        name = next(name for name, array in sorted(tensors.items()) if array.ndim == 2)
        tensors[name] = np.ascontiguousarray(tensors[name][:-1])

    change(folder, shorten)


def wrong_dtype(folder: Path) -> None:
    def cast(tensors: dict[str, Any]) -> None:
        name = min(tensors)
        tensors[name] = tensors[name].astype(np.float32)

    change(folder, cast)


def change(folder: Path, function: Callable[[dict[str, Any]], object]) -> None:
    """Write a shard again with other tensors."""
    path = folder / NAME.format(2)
    tensors = {name: array.copy() for name, array in safeload.load(path).items()}
    function(tensors)
    safeload.numpy.save_file(tensors, path, durable=False)


def wrong_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4, "vocab_size": 7}))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def wrong_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["absent.weight"] = NAME.format(1)
    path.write_text(json.dumps(index))


DAMAGES = (
    flip, cut, zeros, lose_shard, lose_tensor, add_tensor, wrong_shape, wrong_dtype, wrong_config, no_config,
    broken_index, wrong_index,
)  # fmt: skip

NAMES = tuple(row.name for row in (*fixtures.REAL, *fixtures.BUILT, *fixtures.MODELS))
WITH_STATISTICS = ("data/silero", "data/multi", "format/", "gguf/type", "engine/ragged")
WITH_SCAN = ("data/torch/", "data/paddle/", "format/", "torch/")


def of_fixture(name: str, work: Path) -> Rows:
    """What all reports say of a fixture; statistics only of those whose tensors are few."""
    fixture = fixtures.fixture(name)
    try:
        path = fixtures.made(name, work)
    except Exception as error:
        yield f"reports/{name}", of_error(error)
        return
    yield from flattened(f"reports/{name}/info", lambda: safeload.info(path, **fixture.options))
    yield from flattened(f"reports/{name}/check", lambda: safeload.check(path))
    if name.startswith(WITH_STATISTICS):
        yield from flattened(f"reports/{name}/stats", lambda: safeload.stats(path), table=True)
    if name.startswith(WITH_SCAN):
        yield from flattened(f"reports/{name}/scan", lambda: safeload.scan(path))


def of_damage(damage: Callable[[Path], object], work: Path) -> Rows:
    """What is said of a folder with one fault."""
    good = fixtures.made(LLAMA, work)
    bad = work / "model"
    shutil.copytree(good, bad)
    damage(bad)
    name = damage.__name__
    yield from flattened(f"reports/damaged/{name}/check", lambda: safeload.check(bad))
    yield from flattened(f"reports/damaged/{name}/info", lambda: safeload.info(bad))
    yield from flattened(f"reports/damaged/{name}/diff", lambda: safeload.diff(good, bad))
    yield from flattened(f"reports/damaged/{name}/stats", lambda: safeload.stats(bad))


def of_pairs(work: Path) -> Rows:
    """Differences of models that are the same model otherwise stored."""
    base = fixtures.made("engine/bfloat16", work)
    targets: dict[str, dict[str, Any]] = {
        "float32.safetensors": {"dtype": "float32"},
        "float16.npz": {"dtype": "float16"},
        "q4_0.safetensors": {"quantize": "q4_0"},
        "q8_0.gguf": {"quantize": "q8_0", "raw": True},
        "w4a16": {"quantize": "w4a16"},
        "mlx4": {"quantize": "mlx4"},
        "part.safetensors": {"only": "*mlp*"},
        "renamed.safetensors": {"rename": [("^model", "m")]},
    }
    for target, options in targets.items():
        safeload.convert(base, work / target, **options)
        yield from flattened(f"reports/pairs/diff {target}", lambda target=target: safeload.diff(base, work / target))
    model = fixtures.made("llama_cpp/llama3", work)
    safeload.convert(model, work / "llama3.gguf")
    yield from flattened("reports/pairs/diff llama3.gguf", lambda: safeload.diff(model, work / "llama3.gguf"))
    yield from flattened("reports/pairs/info llama3.gguf", lambda: safeload.info(work / "llama3.gguf"))
    yield from flattened("reports/pairs/check llama3.gguf", lambda: safeload.check(work / "llama3.gguf"))


def of_pickles(work: Path) -> Rows:
    """Files that would run code."""
    globals_ = {
        "harmless": ("collections", "OrderedDict"),
        "system": ("os", "system"),
        "unknown": ("my.module", "Class"),
    }
    for name, (module, attribute) in globals_.items():
        path = work / f"{name}.pt"
        path.write_bytes(zip_file({"x": Call(Ref(module, attribute))}))
        yield from flattened(f"reports/pickles/{name}/scan", lambda path=path: safeload.scan(path))
        yield from flattened(f"reports/pickles/{name}/info", lambda path=path: safeload.info(path))
        yield from flattened(f"reports/pickles/{name}/check", lambda path=path: safeload.check(path))


def of_proofs(work: Path) -> Rows:
    """Manifests and signatures, of a folder that is good, and then changed."""
    shutil.copytree(DATA / "signatures/model", work / "model")
    key = DATA / "signatures/test-key.pub"
    for name in ("files", "shards", "single"):
        signature = safeload.Signature(DATA / f"signatures/{name}.sig", key=key)
        yield from flattened(
            f"reports/proofs/signature {name}", lambda signature=signature: safeload.verify(work / "model", signature)
        )
    safeload.check(work / "model")
    yield from flattened("reports/proofs/nothing", lambda: safeload.verify(work / "model"))


def of_adapters(_: Path) -> Rows:
    """Adapters, alone and with a base."""
    for name, (path, base) in fixtures.ADAPTERS.items():
        yield from flattened(f"reports/adapters/{name}", lambda path=path: safeload.info(path))
        yield from flattened(
            f"reports/adapters/{name} on base", lambda path=path, base=base: safeload.info(path, base=base)
        )
        yield from flattened(f"reports/adapters/{name} checked", lambda path=path: safeload.check(path))


OTHERS = {"pairs": of_pairs, "pickles": of_pickles, "proofs": of_proofs, "adapters": of_adapters}
