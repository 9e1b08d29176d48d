#!/bin/sh
# Lets flax write every fixture anew and compares what safeload reads: compare.sh FOLDER, which keeps the environment.
# Needs safeload with its extra `test`.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/v" ] || python3 -m venv "$kept/v"
"$kept/v/bin/pip" install -q flax==0.12.8 optax safetensors==0.8.0
rm -rf "$kept/fixtures"
mkdir "$kept/fixtures"
"$kept/v/bin/python" -W ignore "$here/make.py" "$kept/fixtures"
SAFELOAD_FLAX_FIXTURES="$kept/fixtures" pytest "$here/../../test_formats/test_flax.py"
