#!/bin/sh
# Lets llm-compressor, auto-round, GPTQModel, mlx-lm, llama.cpp's converter and llama-quantize convert small models, and fails
# if `check --source` accuses a right result: compare.sh FOLDER, which keeps the environments, llama.cpp's build and the results.
# Needs cmake and a C++ compiler.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/v" ] || python3 -m venv "$kept/v"
"$kept/v/bin/pip" install -q torch==2.13.0 llmcompressor==0.14.0.1 auto-round==0.15.1 sentencepiece -e "$root[gguf]"
[ -d "$kept/mlx" ] || python3 -m venv "$kept/mlx"
"$kept/mlx/bin/pip" install -q "mlx[cpu]==0.32.4" mlx-lm==0.32.2
[ -d "$kept/gptqmodel" ] || python3 -m venv "$kept/gptqmodel"
"$kept/gptqmodel/bin/pip" install -q setuptools wheel ninja torch==2.13.0 transformers==5.24.0 numpy==2.4.6 \
    accelerate datasets defuser device-smi logbar pypcre threadpoolctl tokenicer torchao
"$kept/gptqmodel/bin/pip" install -q --no-deps --no-build-isolation gptqmodel==7.7.0 # it asks for torch 2.14
cd "$kept"
[ -d source ] || {
    pip download -q --no-deps --no-binary :all: llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    mv llama_cpp_python-0.3.36/vendor/llama.cpp source
}
[ -x build/bin/llama-imatrix ] || {
    cmake -S source -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
    cmake --build build -j 2 --target llama-quantize llama-imatrix
}
export MLX_PYTHON="$kept/mlx/bin/python" GPTQMODEL_PYTHON="$kept/gptqmodel/bin/python" LLAMA_CPP="$kept/build/bin"
export CONVERTER="$kept/source" PYTHONPATH="$root/tests:$root/tests/data/llama_cpp"
"$kept/v/bin/python" "$here/judge.py" "$kept/results"
