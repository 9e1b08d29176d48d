#!/usr/bin/env bash
# Compiles the C core with each program of this folder under the sanitizers that suit it, and runs them.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
core=$here/../../csrc
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags=(-std=gnu11 -O1 -g -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -fno-sanitize-recover=all -I "$core")

# What allocations.c counts and refuses.
wrapped=(malloc calloc realloc free mmap munmap pthread_create open close)
gcc "${flags[@]}" -fsanitize=address,undefined "$here/allocations.c" "$core"/*.c "$core"/*/*.c -o "$work/allocations" \
    -lpthread "${wrapped[@]/#/-Wl,--wrap=}"
ASAN_OPTIONS=detect_leaks=1 "$work/allocations"

for program in operations packed; do
    gcc "${flags[@]}" -fsanitize=address,undefined "$here/$program.c" "$core"/*.c "$core"/*/*.c -o "$work/$program" -lpthread
    ASAN_OPTIONS=detect_leaks=1 "$work/$program"
done

gcc "${flags[@]}" -fsanitize=thread "$here/races.c" "$core"/*.c "$core"/*/*.c -o "$work/races" -lpthread
TSAN_OPTIONS=halt_on_error=1 "$work/races"
