#!/bin/sh
# Runs the targets in C over their committed corpora and over what the tests' files give, under the sanitizers of gcc and
# clang: replay.sh WORK, an empty folder. Needs a Python in which safeload is installed.
set -eu
here=$(dirname "$0") work=$1
python "$here/corpus.py" unpack "$work/corpus"
python "$here/corpus.py" seeds "$work/seeds"
"$here/build.sh" replay "$work/gcc"
# clang looks for other faults, such as NULL + 0. Trapping needs no runtime library, which Debian has in a package apart.
CC=clang SANITIZE="-fsanitize=undefined -fsanitize-trap=undefined" "$here/build.sh" replay "$work/clang"
for target in json safetensors gguf; do
    for compiler in gcc clang; do
        log=$work/$compiler-$target.log
        "$work/$compiler/$target" "$work/corpus/$target"/* "$work/seeds/$target"/* >"$log" || {
            echo "$target ($compiler) failed with $(tail -n 1 "$log")"
            exit 1
        }
        echo "$target ($compiler): $(wc -l <"$log") inputs"
    done
done
