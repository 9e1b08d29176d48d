#!/bin/sh
# Lets Megatron write every fixture anew, and compares what safeload reads with what it gives: compare.sh FOLDER, which keeps
# the environment of Megatron. Needs safeload with its extra `test`.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/v" ] || python3 -m venv "$kept/v"
"$kept/v/bin/pip" install -q torch==2.13.0 numpy psutil packaging safetensors==0.8.0
"$kept/v/bin/pip" install -q --no-deps megatron-core==0.16.1
rm -rf "$kept/fixtures"
mkdir "$kept/fixtures"
(cd "$here" && "$kept/v/bin/python" -W ignore make.py "$kept/fixtures")
SAFELOAD_MEGATRON_FIXTURES="$kept/fixtures" pytest "$here/../../test_formats/test_megatron.py"
