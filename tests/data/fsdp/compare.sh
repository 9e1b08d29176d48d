#!/bin/sh
# Lets torch write every fixture anew and compares what safeload reads with the whole tensors: compare.sh FOLDER, which
# keeps the environment of torch. Needs safeload with its extra `test`.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/v" ] || python3 -m venv "$kept/v"
"$kept/v/bin/pip" install -q torch==2.13.0 safetensors==0.8.0 numpy
rm -rf "$kept/fixtures"
mkdir "$kept/fixtures"
(cd "$here" && "$kept/v/bin/python" -W ignore -m make "$kept/fixtures")
SAFELOAD_FSDP_FIXTURES="$kept/fixtures" pytest "$here/../../test_formats/test_fsdp.py"
