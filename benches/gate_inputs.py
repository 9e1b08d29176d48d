"""The input files of the speed gate, made once by the builders of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import files
import ml_dtypes
import numpy as np

VERSION = 1  # a new number when what is generated changes
FOLDER = files.CACHE / f"gate-v{VERSION}"
HERE = Path(__file__).resolve().parent
INPUTS = FOLDER / "inputs"


def make(side: Path) -> None:
    """Make the inputs that are missing, in a process that imports safeload from a side."""
    if (INPUTS / "complete").exists():
        return
    paths = [side, HERE.parent / "tests", HERE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    subprocess.run([sys.executable, str(Path(__file__).resolve())], env=environment, cwd=os.sep, check=True)


def _plain() -> None:
    normal = files.weights()
    files.make("", [files.Entry(f"layers.{k}.weight", "BF16", (2048, 4096)) for k in range(4)],
               path=INPUTS / "large.safetensors", block=normal)  # fmt: skip
    files.make("", [files.Entry("w", "BF16", (4096, 4096))], path=INPUTS / "matrix.safetensors", block=normal)
    files.make("", files.small(100_000), path=INPUTS / "many.safetensors")
    for count in (1, 3, 10):
        entries = [files.Entry(f"model.layers.{k}.weight", "F32", (32, 32)) for k in range(count)]
        files.make("", entries, path=INPUTS / f"small-{count}.safetensors")
    hub = INPUTS / "hub"
    hub.mkdir(exist_ok=True)
    weight_map = {}
    for shard in range(5):
        file, name = f"model-{shard + 1:05}-of-00005.safetensors", f"model.layers.{shard}.weight"
        files.make("", [files.Entry(name, "BF16", (1024, 4096))], path=hub / file, block=normal)
        weight_map[name] = file
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _packed() -> None:
    import bench_restore as restore

    restore.ROWS, restore.COLUMNS = 4096, 4096
    families = {"gptq": restore.gptq, "awq": restore.awq, "fp8": restore.fp8, "mxfp4": restore.mxfp4}
    for name, family in families.items():
        tensors, config, _ = family()
        restore.write(INPUTS / name, tensors, config)
    restore.ROWS, restore.COLUMNS = 256, 256
    tensors, config, _ = restore.int4()
    renamed = {f"{layer}.{name}": array for layer in range(4) for name, array in tensors.items()}
    restore.write(INPUTS / "four", renamed, config)


def _models() -> None:
    import bench_adapters as adapters
    import bench_gguf
    from builders import gguf_build as g

    base, adapter = INPUTS / "base", INPUTS / "adapter"
    base.mkdir(exist_ok=True)
    adapter.mkdir(exist_ok=True)
    names = [f"model.layers.{k}.mlp.up_proj" for k in range(4)]
    entries = [files.Entry(f"{name}.weight", "BF16", (2048, 2048)) for name in names]
    files.make("", entries, path=base / "model.safetensors", block=files.weights())
    rng, tensors = np.random.default_rng(33), {}
    for name in names:
        for part, shape in (("A", (16, 2048)), ("B", (2048, 16))):
            values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
            tensors[f"{adapters.PREFIX}{name}.lora_{part}.weight"] = values
    files.write(adapter / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))

    bench_gguf.make_vocabulary(INPUTS / "vocabulary.gguf")
    names = ["token_embd.weight", *(f"blk.0.ffn_{part}.weight" for part in ("up", "down", "gate")), "output.weight"]
    values = np.frombuffer(files.weights()[: 2 * 512 * 2048 * len(names)], ml_dtypes.bfloat16).astype(np.float16)
    size = 2 * 512 * 2048
    dims = [(2048, 512)] * len(names)
    tensors_of_gguf = [g.tensor(name, dims[k], 1, size * k) for k, name in enumerate(names)]
    metadata = [g.entry("general.architecture", g.STRING, "llama"), g.entry("llama.block_count", g.U32, 1)]
    (INPUTS / "model.gguf").write_bytes(g.build(metadata, tensors_of_gguf, values.tobytes()))


def _training() -> None:
    from builders import dcp_build, orbax_build
    from builders.torch_build import Storage, ordered, tensor, zip_file

    rng = np.random.default_rng(7)
    arrays = {f"layers.{k}.weight": rng.standard_normal((64, 64), np.float32) for k in range(400)}
    parts = {name: tensor(Storage(str(k), array), array.shape) for k, (name, array) in enumerate(arrays.items())}
    (INPUTS / "torch.pt").write_bytes(zip_file(ordered(parts)))
    dcp, orbax = dcp_build.Checkpoint(), orbax_build.OrbaxCheckpoint()
    for name, array in list(arrays.items())[:100]:
        dcp.tensor(name, array, dcp_build.grid(array.shape, (4, 1)), files=("__0_0.distcp", "__1_0.distcp"))
        orbax.tensor(name, array, [16, 64])
    dcp.write(INPUTS / "dcp")
    orbax.write(INPUTS / "orbax")


if __name__ == "__main__":
    INPUTS.mkdir(parents=True, exist_ok=True)
    for part in (_plain, _packed, _models, _training):
        part()
    (INPUTS / "complete").touch()
