"""Make adapters.json: digests of the files that llama.cpp's converter makes of adapters, and a file of its own.

    PYTHONPATH=tests python tests/data/llama_cpp/make_adapters.py PATH_OF_LLAMA_CPP

Needs transformers, torch and gguf. PATH_OF_LLAMA_CPP is a copy of llama.cpp, such as vendor/llama.cpp in the source
distribution of llama-cpp-python. The adapters are those of `builders.adapters.of_model`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from builders import adapters, llama_models

HERE = Path(__file__).parent
TYPES = ("f32", "f16", "bf16", "q8_0")
# All types of these, and f32 of the others.
EVERY_TYPE = ("llama3", "mixtral", "qwen2", "qwen3_moe", "gemma2", "phi3")
# The converter does not know the pre-tokenizers of these.
LEFT_OUT = ("mistral3", "ministral3", "ministral3_images")


def converted(converter, adapter, base, path, outtype):
    command = [sys.executable, f"{converter}/convert_lora_to_gguf.py", adapter, "--base", base, "--outfile", path]
    path = f"{converter}/gguf-py{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    result = subprocess.run(
        [*map(str, command), "--outtype", outtype],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return result.returncode == 0 or result.stderr.strip().splitlines()[-1]


def main(converter):
    digests = {}
    for name, model in llama_models.listed().items():
        if name in LEFT_OUT:
            continue
        with tempfile.TemporaryDirectory() as folder:
            base = llama_models.write_folder(Path(folder) / name, model)
            adapter = adapters.of_model(Path(folder) / "my-lora", model)
            for outtype in TYPES if name in EVERY_TYPE else TYPES[:1]:
                path = Path(folder) / f"{outtype}.gguf"
                done = converted(converter, adapter, base, path, outtype)
                print(name, outtype, done, flush=True)
                if done is True:
                    digests.setdefault(name, {})[outtype] = llama_models.digest(path.read_bytes())
                    if (name, outtype) == ("llama3", "q8_0"):
                        shutil.copy(path, HERE.parent / "lora" / "gguf" / "llama3.gguf")
    (HERE / "adapters.json").write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
