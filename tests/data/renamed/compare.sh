#!/bin/sh
# Lets PEFT train and merge adapters of tiny models of every class of transformers, and compares; and compares models under old
# and new names: compare.sh FOLDER, which keeps the environment. Needs safeload.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/v" ] || python3 -m venv --system-site-packages "$kept/v"
"$kept/v/bin/pip" install -q torch transformers==5.24.0 peft==0.21.2
"$kept/v/bin/python" "$here/compare_names.py" "$kept/models"
"$kept/v/bin/python" "$here/compare.py" "$kept/models"
