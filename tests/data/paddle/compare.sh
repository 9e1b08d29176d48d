#!/bin/sh
# Lets Paddle write every fixture anew, and compares what safeload reads with what Paddle gives: compare.sh FOLDER, which keeps
# the environment of Paddle. Needs safeload with its extra `test`.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/v" ] || python3 -m venv "$kept/v"
"$kept/v/bin/pip" install -q paddlepaddle==3.3.1 safetensors==0.8.0
rm -rf "$kept/fixtures"
mkdir "$kept/fixtures"
(cd "$here" && "$kept/v/bin/python" -W ignore make.py "$kept/fixtures")
SAFELOAD_PADDLE_FIXTURES="$kept/fixtures" pytest "$here/../../test_formats/test_paddle.py"
