"""Makes the fixtures of quantized checkpoints again, with the packages that wrote the published ones.

    python -m venv v && . v/bin/activate
    pip install gguf==0.19.0 pywhispercpp==1.5.1
    pip install numpy ml_dtypes torch==2.13.0 mlx==0.32.4 mlx-cpu==0.32.4 safetensors==0.8.0 accelerate \\
        huggingface_hub tokenizers pydantic loguru psutil regex scipy pulp omegaconf ninja nvidia-ml-py requests rich
    pip install --no-deps transformers==5.23.0 compressed-tensors==0.20.0 nvidia-modelopt==0.47.0 mlx-lm==0.32.2 \\
        onebitllms==0.0.4 bitsandbytes==0.50.2 optimum-quanto==0.2.7 torchao==0.18.0
    pip install --no-deps --target older compressed-tensors==0.12.2
    export OLDER_COMPRESSED_TENSORS=$PWD/older
    pip install --no-deps --target writers auto-gptq==0.7.1 auto-round==0.16.1
    pip download --no-deps --no-binary :all: autoawq==0.2.9 && tar xzf autoawq-0.2.9.tar.gz -C writers --strip 1
    export GPTQ_WRITERS=$PWD/writers
    pip install datasets joblib onnx==1.22.0 onnxscript onnxslim plotly frozendict
    pip install --no-deps amd-quark==0.13
    cd tests/data/quantized && python -m make [NAME...]

With names, only the packages of their makers are needed. Linux on x86-64, Python 3.11, CPU only. Values are seeded by
the name of the fixture. Each maker writes a folder with the format's own writer, reads it with the format's own reader
in float32, and asserts that the arithmetic of `make.restated` finds equal values; `README.md` is written from what the
makers say about themselves.
"""

import importlib
import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # transformers' bitnet compiles three lines of arithmetic otherwise

import torch

from .checkpoint import EXPECTED, FIXTURES, ROOT, Checkpoint

MAKERS = (
    "bitnet", "bitsandbytes", "compressed", "fp8_blocks", "fp8_rows", "gguf_files", "gpt_oss", "gptq", "mlx",
    "modelopt", "quanto", "quark", "sparse", "torchao",
)  # fmt: skip

HEAD = """# Quantized checkpoints

Small folders as published ones are, written by the packages that write those. `expected/` has the true weights as
float32 by logical name, as the packages that read them find them (numpy's npz). `make/` makes all of it again
(`python -m make`, from here; this page too) and has the arithmetic a second time, in numpy: the two must agree.
A writer that runs on a GPU alone is restated where it says so; its layout and names are kept.

| fixture | writer | reader | what it shows |
|---|---|---|---|
"""


def register(maker: str, *, optional: bool) -> None:
    """Imports a module of makers, which registers their fixtures."""
    try:
        importlib.import_module(f".{maker}", __package__)
    except ImportError as error:
        if not optional:
            raise
        print(f"without {maker}: {error}")


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for maker in MAKERS:
        register(maker, optional=bool(names))
    for name in names or FIXTURES:
        ckpt = Checkpoint(name)
        FIXTURES[name].make(ckpt)
        ckpt.finish()
        size = sum(path.stat().st_size for path in ckpt.folder.rglob("*") if path.is_file())
        print(f"{name}: {size:,} + {(EXPECTED / f'{name}.npz').stat().st_size:,} bytes, {len(ckpt.expected)} tensors")
    page = ROOT / "README.md"
    rows = {row.split(" | ")[0][2:]: row for row in page.read_text().splitlines(True)[HEAD.count("\n") :]}
    made = {name: f"| {name} | {one.writer} | {one.reader} | {one.shows} |\n" for name, one in FIXTURES.items()}
    rows = {**rows, **made} if names else made  # of makers without their packages, the rows stay
    page.write_text(HEAD + "".join(row for _, row in sorted(rows.items())))


main(sys.argv[1:])
