#!/bin/sh
# What .ci/run leaves out because it takes hours: long.sh FOLDER [SECONDS for each fuzz target, 3600]
#   - faults: CI runs the half of the variants that differ most (tests/faults/README.md);
#   - random examples, what a byte or a key may be instead, where a conversion is killed, and which case meets which tier of
#     kernels: CI tries a part of it (tests/builders/thorough.py);
#   - packed tensors: each test of CI tries a checkpoint of every second kind with one value of an option
#     (tests/builders/quantized.py), this all;
#   - proof of a conversion, and a format that a folder has already: CI tries a half or a third of the formats with each model
#     or loss (tests/test_operations/test_proof.py and test_moved_codes.py), this all;
#   - a test with more than six cases: `pytest` runs every fourth of them, unless its file is named, this all;
#   - the suite under sanitizers, and with the wheel on 3.10: CI runs every twelfth case of a test, this all;
#   - how cost grows: CI compares 1,000 and 8,000 tensors (tests/test_operations/test_linear.py), this 10,000 and 80,000;
#   - torch and JAX: CI runs a part of their tests, this all, and upstream's (tests/frameworks/run.sh);
#   - Windows: CI runs a part of the suite under Wine (tests/windows/README.md), this the whole;
#   - clients: the test suites of libraries that load with safetensors (tests/clients/run.sh), which take an hour;
#   - the C core alone: CI compiles it for five processors and systems, this for all nine, s390x among them (tests/native/README.md);
#   - AArch64 (tests/aarch64/README.md) and other versions of Python and of packages (tests/pythons/README.md);
#   - quantization: CI reads committed digests, this compares with llama.cpp (tests/data/llama_quantize/compare.sh);
#   - training checkpoints: CI reads committed fixtures, this compares with the frameworks (tests/data/*/compare.sh);
#   - models for llama.cpp: CI compares with committed digests, this runs llama.cpp and transformers, there and back
#     (tests/data/llama_cpp/compare.sh);
#   - models for mlx-lm: CI compares with recorded digests, this runs mlx-lm (tests/data/mlx/compare.sh);
#   - models for ComfyUI: CI compares with committed digests, this with ComfyUI-GGUF's tools and loader (tests/data/comfyui/compare.sh);
#   - folders for engines: CI compares with recorded digests, this with the engines' tools themselves (tests/data/engines/compare.sh);
#   - adapters: CI merges committed adapters, this those that PEFT trains of every class of transformers (tests/data/renamed/compare.sh),
#     and those of each kind with other values (tests/data/kinds/compare.sh);
#   - proof: CI judges our own results, this those of the engines' tools beside their source (tests/data/proof/compare.sh);
#   - fuzzing: CI runs the committed corpora and a few random changes of them (tests/fuzz_targets/README.md).
# Needs safeload with its extra `test`, and what these folders' scripts need. FOLDER keeps what was found and downloaded, and a
# later run goes on from there.
set -eu
here=$(dirname "$0")
mkdir -p "$1"
kept=$(cd "$1" && pwd)
SAFELOAD_FULL_SWEEP=1 pytest "$here"
SAFELOAD_FULL_SWEEP=1 "$here/sanitizers/run.sh"
"$here/../.ci/run" sanitized "sanitized_suite --every 1" oldest "oldest_suite --every 1"
"$here/frameworks/run.sh" "$kept/frameworks"
SAFELOAD_WINE=$kept/wine "$here/windows/run.sh" all
"$here/native/run.sh"
AARCH64_ROOT=$kept/aarch64 "$here/aarch64/run.sh"
SAFELOAD_PYTHONS=$kept/pythons "$here/pythons/run.sh"
"$here/clients/run.sh" "$kept/clients"
for family in dcp deepspeed engines fsdp keras megatron orbax paddle flax onnx llama_cpp mlx llama_quantize comfyui renamed kinds proof; do
    "$here/data/$family/compare.sh" "$kept/$family"
done
"$here/fuzz_targets/run.sh" "${2:-3600}" "$kept/fuzz"
