#!/bin/sh
# Builds llama-quantize with ComfyUI-GGUF's patch, makes every digest again and compares; reads converted models with
# ComfyUI-GGUF's loader: compare.sh FOLDER, which keeps sources, build and environment. Needs git, cmake and a C++ compiler.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
cd "$kept"
[ -d ComfyUI-GGUF ] || git clone https://github.com/city96/ComfyUI-GGUF
git -C ComfyUI-GGUF checkout -q 795e451
[ -d venv ] || python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 gguf safetensors tqdm -e "$root"
[ -d source ] || {
    # The patch is for tag b3962; this release has a llama.cpp of a few weeks before, to which it applies.
    pip download -q --no-deps --no-binary :all: llama-cpp-python==0.3.1
    tar xzf llama_cpp_python-0.3.1.tar.gz
    tr -d '\r' < ComfyUI-GGUF/tools/lcpp.patch | patch -s -p1 -d llama_cpp_python-0.3.1/vendor/llama.cpp
    mv llama_cpp_python-0.3.1/vendor/llama.cpp source
}
[ -x build/bin/llama-quantize ] || {
    # Without instructions of this machine: fused products would give other bits.
    cmake -S source -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DGGML_AVX=OFF -DGGML_AVX2=OFF \
        -DGGML_FMA=OFF -DGGML_F16C=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF
    cmake --build build -j 2 --target llama-quantize
}
COMFYUI_GGUF=$kept/ComfyUI-GGUF
COMFYUI_QUANTIZE=$kept/build/bin/llama-quantize
PYTHONPATH=$root/tests
export COMFYUI_GGUF COMFYUI_QUANTIZE PYTHONPATH
venv/bin/python "$here/make.py" "$kept"
cmp "$here/files.json" "$kept/files.json"
mkdir -p models
venv/bin/python "$here/compare.py" "$kept/models"
