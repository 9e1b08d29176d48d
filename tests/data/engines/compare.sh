#!/bin/sh
# Lets the engines' own tools write expected.json anew and compares it, then lets transformers and mlx-lm load what safeload writes:
# compare.sh FOLDER, which keeps the environment of the engines. Needs safeload's source tree and a C compiler.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tests=$(cd "$here/../.." && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/v" ] || python3 -m venv "$kept/v"
"$kept/v/bin/pip" install -q torch==2.13.0 transformers==5.17.0 accelerate requests safetensors pydantic loguru datasets "mlx[cpu]==0.32.4" "$tests/.."
"$kept/v/bin/pip" install -q --no-deps mlx-lm==0.32.2 bitsandbytes==0.50.2 compressed-tensors==0.19.0 llmcompressor==0.14.0.1
rm -rf "$kept/folders" "$kept/models"
cp "$here/expected.json" "$kept/recorded.json"
(cd / && PYTHONPATH=$tests "$kept/v/bin/python" -W ignore "$here/make.py" "$kept/folders")
cmp "$here/expected.json" "$kept/recorded.json"
(cd / && PYTHONPATH=$tests "$kept/v/bin/python" -W ignore "$here/live.py" "$kept/models")
