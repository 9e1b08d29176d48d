"""Writes files.json: digests of what ComfyUI-GGUF's tools make of the models in tests/builders/diffusion.py.

usage: COMFYUI_GGUF=FOLDER COMFYUI_QUANTIZE=.../llama-quantize PYTHONPATH=tests python make.py [FOLDER]
"""

import json
import sys
import tempfile
from pathlib import Path

from builders.diffusion import FILE_TYPES, MODELS, QUANTIZED, convert, model, quantize
from builders.llama_quantize import digest

from safeload.numpy import save_file

HERE = Path(__file__).resolve().parent
DTYPES = ("bfloat16", "float16", "float32")
MORE_DTYPES = ("float8_e4m3fn",)


def main(folder=HERE):
    converted, quantized = {}, {}
    with tempfile.TemporaryDirectory() as work:
        for name in MODELS:
            converted[name] = {}
            for dtype in DTYPES + (MORE_DTYPES if name in QUANTIZED else ()):
                save_file(model(name, dtype), f"{work}/x.safetensors")
                convert(f"{work}/x.safetensors", f"{work}/{name}-{dtype}.gguf")
                converted[name][dtype] = digest(Path(work, f"{name}-{dtype}.gguf").read_bytes())
        for name in QUANTIZED:
            quantized[name] = {}
            for file_type in FILE_TYPES:
                quantize(f"{work}/{name}-bfloat16.gguf", f"{work}/out.gguf", file_type)
                quantized[name][file_type] = digest(Path(work, "out.gguf").read_bytes())
    content = {"converted": converted, "quantized": quantized}
    Path(folder, "files.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
