"""The rows of the speed gate: what each reads, what it times, and how close it must stay to the commit before.

`python gate_rows.py ROW INPUTS` times one row in this process and prints JSON; `gate.py` starts it for both sides.
Only safeload's public names are used, so that a row means the same for both.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

REPEATS = 5
SHORTEST = 20e-3  # seconds of a repeat: shorter jobs are called several times, as the first call is slower
CALLS, MEMORY = 1.05, 1.15  # limits of the ratio: bound by calls; by memory or disk
SLACK = 3e-6  # seconds of a call that no ratio counts
REPOSITORY = "bench/model"

Job = Callable[[], object]


class Row(NamedTuple):
    """A row: `job` gets the folder of the inputs and returns the call to time."""

    name: str
    job: Callable[[Path], Job]
    limit: float = CALLS
    needs: str = ""  # a package, without which the row is not measured
    starts: bool = False  # the call returns its own seconds, of a process that it starts


def _load_file(name: str, **options: Any) -> Callable[[Path], Job]:
    def job(inputs: Path) -> Job:
        from safeload.numpy import load_file

        path = inputs / name
        return lambda: load_file(path, **options)

    return job


def _touch(inputs: Path) -> Job:
    import numpy as np

    from safeload.numpy import load_file

    path = inputs / "large.safetensors"
    return lambda: sum(int(array.view(np.uint8).reshape(-1)[::4096].sum()) for array in load_file(path).values())


def _load(name: str, **options: Any) -> Callable[[Path], Job]:
    def job(inputs: Path) -> Job:
        import safeload

        path = inputs / name
        return lambda: safeload.load(path, **options)

    return job


def _open(name: str, *, shapes: bool = False) -> Callable[[Path], Job]:
    def job(inputs: Path) -> Job:
        import safeload

        path = inputs / name

        def listed() -> object:
            with safeload.open(path) as checkpoint:
                if shapes:
                    return {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
                return list(checkpoint)

        return listed

    return job


def _save_file(name: str) -> Callable[[Path], Job]:
    def job(inputs: Path) -> Job:
        from safeload.numpy import load_file, save_file

        tensors, target = load_file(inputs / name), _scratch() / "saved.safetensors"
        return lambda: save_file(tensors, target, durable=False)

    return job


def _bytes(inputs: Path) -> Job:
    from safeload.numpy import load

    content = (inputs / "small-1.safetensors").read_bytes()
    return lambda: load(content)


def _convert(name: str, target: str, **options: Any) -> Callable[[Path], Job]:
    def job(inputs: Path) -> Job:
        import safeload

        path, out = inputs / name, _scratch() / target
        return lambda: safeload.convert(path, out, overwrite=True, **options)

    return job


def _scratch() -> Path:
    """A folder in memory where the system has one: a disk varies by more than the gate allows."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(dir=memory if memory.is_dir() else None)
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


def _safe_open(count: int) -> Callable[[Path], Job]:
    def job(inputs: Path) -> Job:
        from safeload import safe_open

        path = inputs / f"small-{count}.safetensors"

        def each() -> object:
            with safe_open(path, framework="np") as file:
                return [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 - as its users write it

        return each

    return job


def _dequantize(name: str) -> Callable[[Path], Job]:
    def job(inputs: Path) -> Job:
        import numpy as np

        import safeload

        opened = safeload.load(inputs / name, backend="pread")
        (packed,) = (value for value in opened.values() if isinstance(value, safeload.QuantizedTensor))
        out = np.ones(packed.shape, np.float32)
        return lambda: packed.dequantize(out=out, threads=1)

    return job


def _quantize(scheme: str) -> Callable[[Path], Job]:
    def job(inputs: Path) -> Job:
        import safeload
        from safeload.numpy import load_file

        (matrix,) = load_file(inputs / "matrix.safetensors", backend="pread").values()
        return lambda: safeload.quantize(matrix, scheme, threads=1)

    return job


def _adapter(inputs: Path) -> Job:
    import safeload

    return lambda: safeload.load(inputs / "base", adapters=[inputs / "adapter"])


def _jax(inputs: Path) -> Job:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    from safeload.jax import load_file

    path = inputs / "small-1.safetensors"
    return lambda: jax.block_until_ready(load_file(path))


def _torch(inputs: Path) -> Job:
    from safeload.torch import load_file

    path = inputs / "small-10.safetensors"
    return lambda: load_file(path)


def _import(module: str, *before: str) -> Callable[[Path], Job]:
    """Import a door in a fresh interpreter, when it has imported the packages below it."""
    lines = [f"import {name}" for name in before]
    lines += ["import time", "t = time.perf_counter()", f"import {module}", "print(time.perf_counter() - t)"]
    return lambda inputs: lambda: float(_run("-c", "\n".join(lines)))


def _version(inputs: Path) -> Job:
    def started() -> float:
        begin = time.perf_counter()
        _run("-m", "safeload", "--version")
        return time.perf_counter() - begin

    return started


def _run(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.PIPE, text=True, cwd=os.sep
    ).stdout


def _hub(*, load: bool) -> Callable[[Path], Job]:
    def job(inputs: Path) -> Job:
        import safeload

        source = f"hf://{REPOSITORY}"
        options = {"endpoint": os.environ["GATE_HUB"], "token": False}

        def listed() -> object:
            with safeload.open(source, storage_options=options) as checkpoint:
                return {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}

        return (lambda: safeload.load(source, storage_options=options)) if load else listed

    return job


ROWS = (
    Row("load mapped", _load_file("large.safetensors")),
    Row("load and touch", _touch, MEMORY),
    Row("load by pread", _load_file("large.safetensors", backend="pread"), MEMORY),
    Row("load as f32", _load("large.safetensors", dtype="float32"), MEMORY),
    Row("load 100,000", _load_file("many.safetensors")),
    Row("open 100,000", _open("many.safetensors")),
    Row("dtype and shape of 100,000", _open("many.safetensors", shapes=True)),
    Row("save 100,000", _save_file("many.safetensors"), MEMORY),
    Row("convert 100,000 to bf16", _convert("many.safetensors", "out.safetensors", dtype="bfloat16"), MEMORY),
    Row("load one small", _load_file("small-1.safetensors")),
    Row("save one small", _save_file("small-1.safetensors"), MEMORY),
    Row("load(bytes) of one small", _bytes),
    Row("safe_open, 1", _safe_open(1)),
    Row("safe_open, 3", _safe_open(3)),
    Row("safe_open, 10", _safe_open(10)),
    Row("load four quantized as f32", _load("four", dtype="float32")),
    Row("convert two tensors", _convert("small-3.safetensors", "out.safetensors"), MEMORY),
    Row("GPTQ", _dequantize("gptq"), MEMORY),
    Row("AWQ", _dequantize("awq"), MEMORY),
    Row("fp8 blocks", _dequantize("fp8"), MEMORY),
    Row("MXFP4", _dequantize("mxfp4"), MEMORY),
    Row("Q4_0 write", _quantize("q4_0"), MEMORY),
    Row("Q4_K_M", _convert("model.gguf", "out.gguf", quantize="q4_k_m"), MEMORY),
    Row("open GGUF of 250,000 tokens", _open("vocabulary.gguf")),
    Row("torch zip", _load("torch.pt")),
    Row("DCP", _load("dcp"), MEMORY),
    Row("Orbax", _load("orbax"), MEMORY),
    Row("LoRA", _adapter, MEMORY),
    Row("JAX, one small", _jax, needs="jax"),
    Row("torch, ten small", _torch, needs="torch"),
    Row("import safeload", _import("safeload"), starts=True),
    Row("import safeload.numpy", _import("safeload.numpy", "numpy"), starts=True),
    Row("import safeload.torch", _import("safeload.torch", "torch"), needs="torch", starts=True),
    Row("import safeload.jax", _import("safeload.jax", "jax"), needs="jax", starts=True),
    Row("safeload --version", _version, starts=True),
    Row("list a Hub model", _hub(load=False), 1.10, needs="urllib3"),
    Row("load a Hub model", _hub(load=True), 1.10, needs="urllib3"),
)


def measure(row: Row, inputs: Path, planted: float = 0.0) -> dict[str, float]:
    """Return the seconds and processor seconds of one call, each the least of `REPEATS`.

    Args:
        row: what to time.
        inputs: the folder of the input files.
        planted: a share of its time by which each call is made slower, to see that the gate notices.
    """
    call = row.job(inputs)
    if row.starts:
        call()
        return {"seconds": min(float(call()) for _ in range(REPEATS)) * (1 + planted)}
    call()
    begin = time.perf_counter()
    result = call()
    number = max(1, int(SHORTEST / (time.perf_counter() - begin)))
    seconds, processor = [], []
    for _ in range(REPEATS):
        result = None  # freed before the clock starts
        gc.collect()
        begin, busy = time.perf_counter(), time.process_time()
        for _ in range(number):
            result = call()
        lasted = time.perf_counter() - begin
        while time.perf_counter() - begin < lasted * (1 + planted):
            pass
        seconds.append((time.perf_counter() - begin) / number)
        processor.append((time.process_time() - busy) / number)
    del result
    return {"seconds": min(seconds), "processor": min(processor), "calls": 2 + REPEATS * number}


def main() -> None:
    """Time the row that the arguments name."""
    row = next(row for row in ROWS if row.name == sys.argv[1])
    print(json.dumps(measure(row, Path(sys.argv[2]), float(os.environ.get("GATE_PLANT", "0")))))


if __name__ == "__main__":
    main()
