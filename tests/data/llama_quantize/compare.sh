#!/bin/sh
# Builds llama.cpp's llama-quantize, writes every fixture anew and compares, also larger models and random blocks:
# compare.sh FOLDER, which keeps the source and the build. Needs cmake, a C++ compiler, and safeload with its extra `test`.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tests=$(cd "$here/../.." && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
cd "$kept"
[ -d source ] || {
    pip download -q --no-deps --no-binary :all: llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    mv llama_cpp_python-0.3.36/vendor/llama.cpp source
}
[ -x build/bin/llama-quantize ] || {
    # Without instructions of this machine: fused products would give other bits.
    cmake -S source -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
    cmake --build build -j 2 --target llama-quantize
}
GGML_LIBRARY=$(find "$kept/build/bin/" -name 'libggml-base.*' | head -n 1)
LLAMA_QUANTIZE=$kept/build/bin/llama-quantize
export GGML_LIBRARY LLAMA_QUANTIZE
PYTHONPATH=$tests python "$here/make.py" "$GGML_LIBRARY" "$kept"
for name in types files blocks; do cmp "$here/$name.json" "$kept/$name.json"; done
pytest "$tests/test_core/test_importance.py" "$tests/test_formats/gguf/test_file_types.py"
