#!/usr/bin/env bash
# Compiles the C core with each program of this folder under the sanitizers that suit it, and runs them.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
core=$(cd "$here/../../csrc" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# -g1: reports name lines; what else -g writes takes GCC three times as long.
flags=(-std=gnu11 -O1 -g1 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -fno-sanitize-recover=all -I "$core")

# build FOLDER SANITIZERS: the core, once for all programs that use it
build() {
    mkdir "$work/$1"
    (cd "$work/$1" && gcc "${flags[@]}" "-fsanitize=$2" -c "$core"/*.c "$core"/*/*.c)
}

# program FOLDER SANITIZERS NAME [OPTION ...]
program() {
    gcc "${flags[@]}" "-fsanitize=$2" "$here/$3.c" "$work/$1"/*.o -o "$work/$3" -lpthread "${@:4}"
}

# What allocations.c counts and refuses.
wrapped=(malloc calloc realloc free mmap munmap pthread_create open close)
build memory address,undefined
program memory address,undefined allocations "${wrapped[@]/#/-Wl,--wrap=}"
program memory address,undefined operations
program memory address,undefined packed
program memory address,undefined encoded
for name in allocations operations packed encoded; do
    ASAN_OPTIONS=detect_leaks=1 "$work/$name"
done

build threads thread
program threads thread races
TSAN_OPTIONS=halt_on_error=1 "$work/races"
