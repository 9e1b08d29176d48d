#!/bin/sh
# Lets mlx-lm write models.json anew and compares it, then lets mlx-lm load what safeload writes: compare.sh FOLDER, which keeps
# the environment. Needs a network the first time.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tests=$(cd "$here/../.." && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/v" ] || python3 -m venv "$kept/v"
"$kept/v/bin/pip" install -q "mlx[cpu]==0.32.4" mlx-lm==0.32.2 "$tests/.."
cp "$here/models.json" "$kept/recorded.json"
(cd / && PYTHONPATH=$tests "$kept/v/bin/python" -W ignore "$here/make.py" "$kept/models")
cmp "$here/models.json" "$kept/recorded.json"
(cd / && PYTHONPATH=$tests "$kept/v/bin/python" -W ignore "$here/live.py" "$kept/models")
