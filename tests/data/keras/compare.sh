#!/bin/sh
# Lets Keras write every fixture anew, and compares what safeload reads with what Keras holds: compare.sh FOLDER, which keeps the
# environment of Keras. Needs safeload with its extra `test`.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/v" ] || python3 -m venv "$kept/v"
"$kept/v/bin/pip" install -q keras==3.15.1 jax h5py safetensors==0.8.0
rm -rf "$kept/fixtures"
mkdir "$kept/fixtures"
(cd "$here" && "$kept/v/bin/python" -W ignore -m make "$kept/fixtures")
SAFELOAD_KERAS_FIXTURES="$kept/fixtures" pytest "$here/../../test_formats/test_keras.py"
