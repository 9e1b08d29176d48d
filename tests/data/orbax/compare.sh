#!/bin/sh
# Lets Orbax write every fixture anew, with 1, 2 and 4 processes, and random trees, and compares what safeload reads with
# what Orbax gives: compare.sh FOLDER, which keeps the environment. Needs a checkout with a compiler: safeload is installed there too.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
kept=$(cd "$1" && pwd)
[ -d "$kept/v" ] || python3 -m venv "$kept/v"
"$kept/v/bin/pip" install -q orbax-checkpoint==0.12.8 jax==0.10.2 zstandard==0.25.0 "$here/../../..[test]"
rm -rf "$kept/fixtures"
mkdir "$kept/fixtures"
(cd "$here" && "$kept/v/bin/python" -W ignore -m make "$kept/fixtures" --all)
SAFELOAD_ORBAX_FIXTURES="$kept/fixtures" "$kept/v/bin/pytest" "$here/../../test_formats/test_orbax.py"
