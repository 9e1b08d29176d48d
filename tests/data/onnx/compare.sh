#!/bin/sh
# Lets onnx and torch write every fixture anew and compares what safeload reads: compare.sh FOLDER, which keeps the environment.
# Needs safeload with its extra `test`.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/v" ] || python3 -m venv "$kept/v"
"$kept/v/bin/pip" install -q onnx==1.23.2 onnxscript torch==2.13.0 safetensors==0.8.0
rm -rf "$kept/fixtures"
mkdir "$kept/fixtures"
"$kept/v/bin/python" -W ignore "$here/make.py" "$kept/fixtures"
SAFELOAD_ONNX_FIXTURES="$kept/fixtures" pytest "$here/../../test_formats/test_onnx.py"
