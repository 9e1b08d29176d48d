#!/bin/sh
# Lets DeepSpeed train and save every fixture anew, and compares what safeload reads with what its own tool gives:
# compare.sh FOLDER, which keeps the environment of DeepSpeed. Needs safeload with its extra `test`, and a C++ compiler.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/v" ] || python3 -m venv "$kept/v"
"$kept/v/bin/pip" install -q torch==2.13.0 safetensors==0.8.0 numpy packaging ninja setuptools wheel
DS_BUILD_OPS=0 "$kept/v/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
rm -rf "$kept/fixtures"
mkdir "$kept/fixtures"
(cd "$here" && PATH="$kept/v/bin:$PATH" DS_ACCELERATOR=cpu python -W ignore -m make "$kept/fixtures")
SAFELOAD_ZERO_FIXTURES="$kept/fixtures" pytest "$here/../../test_formats/test_zero.py"
