#!/bin/sh
# What .ci/run leaves out because it takes hours: long.sh FOLDER [SECONDS for each fuzz target, 3600]
#   - fuzzing: CI runs the committed corpora and a few random changes of them (tests/fuzz/README.md).
# Needs what tests/fuzz/run.sh needs. FOLDER keeps what was found, and a later run goes on from there.
set -eu
here=$(dirname "$0")
"$here/fuzz/run.sh" "${2:-3600}" "$1/fuzz"
