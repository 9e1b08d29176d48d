#!/bin/sh
# Lets PEFT make and merge adapters of each kind, and compares: compare.sh FOLDER, which keeps the environment. Needs safeload.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/v" ] || python3 -m venv --system-site-packages "$kept/v"
"$kept/v/bin/pip" install -q torch transformers==5.24.0 peft==0.21.2
"$kept/v/bin/python" "$here/compare.py"
