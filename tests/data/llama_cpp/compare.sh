#!/bin/sh
# Compares llama.cpp with transformers on converted models: compare.sh FOLDER
# FOLDER keeps the environment. Needs a network the first time. LLAMA_CPP, a copy of llama.cpp's folder, adds its converter.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/venv" ] || python3 -m venv "$kept/venv"
"$kept/venv/bin/pip" install -q torch==2.13.0 transformers tokenizers sentencepiece mistral-common xllamacpp -e "$root"
cd "$kept"
PYTHONPATH="$root/tests" "$kept/venv/bin/python" "$here/compare.py" "$kept/models"
