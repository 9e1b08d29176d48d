#!/usr/bin/env bash
# Compiles the C core and the programs of this folder for other processors and systems, runs them there or in an emulator,
# and compares what they print with kernels.expected and reader.expected.
#
# usage: run.sh [TARGET ...]     all of TARGETS without an argument
#        run.sh --write          writes the expected files anew, with GCC on this machine
set -euo pipefail

TARGETS=(gcc clang musl aarch64 s390x mingw mingw-clang macos-aarch64 macos-x86_64)
# As csrc/ffi_build.py, and every warning.
FLAGS=(-std=c11 -O2 -ffp-contract=off -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror)

here=$(cd "$(dirname "$0")" && pwd)
core=$(cd "$here/../../csrc" && pwd)
work=$(mktemp -d)
export WINEPREFIX=$work/wine
# Wine's server outlives the programs it serves by some seconds, and writes into its home when it ends. Where it has
# ended already, -k fails, which must not become this script's status.
trap '[ ! -d "$WINEPREFIX" ] || { wineserver -k || :; wineserver -w; }; rm -rf "$work"' EXIT

# build LINKER SUFFIX COMPILER...: each is one or more words
build() {
    local linker=$1 suffix=$2 program
    shift 2
    mkdir -p "$out/core"
    (cd "$out/core" && "$@" "${FLAGS[@]}" -I "$core" -c "$core"/*.c "$core"/*/*.c)
    for program in kernels files reader; do
        "$@" "${FLAGS[@]}" -I "$core" -c "$here/$program.c" -o "$out/$program.o"
        # shellcheck disable=SC2086
        $linker "$out/$program.o" "$out"/core/*.o -o "$out/$program$suffix" -lpthread
    done
}

# The three programs, each run by the words given; "large" as an argument of files where no emulator makes it slow.
run() {
    local suffix=$1 large=$2
    shift 2
    mkdir "$out/scratch"
    "$@" "$out/files$suffix" "$out/scratch" "$large"
    "$@" "$out/kernels$suffix" | tr -d '\r' >"$out/kernels.txt"
    (cd "$here" && "$@" "$out/reader$suffix" ../data/*.safetensors types.gguf) | tr -d '\r' >"$out/reader.txt"
}

compare() {
    diff "$here/kernels.expected" "$out/kernels.txt"
    diff "$here/reader.expected" "$out/reader.txt"
}

# here_with COMPILER LARGE: for this machine
here_with() {
    build "$1" "" "$1"
    run "" "$2"
    compare
}

# under_qemu PROCESSOR
under_qemu() {
    build "$1-linux-gnu-gcc" "" "$1-linux-gnu-gcc"
    run "" "" "qemu-$1" -L "/usr/$1-linux-gnu"
    compare
}

# under_wine LARGE COMPILER...
under_wine() {
    local large=$1
    shift
    build x86_64-w64-mingw32-gcc .exe "$@"
    # Without the parts that would be downloaded, and without chatter about screens that are not there.
    export WINEDEBUG=-all WINEDLLOVERRIDES="mscoree,mshtml="
    # One server until the end: it leaves soon after its last program, and the next program may meet it as it leaves.
    [ -d "$WINEPREFIX" ] || { mkdir "$WINEPREFIX" && wineserver -p; }
    run .exe "$large" wine
    compare
}

# The compiler is that of the target gcc, which has every warning of -O2: here it takes half the time.
with_musl() {
    local FLAGS=("${FLAGS[@]/-O2/-O1}")
    here_with musl-gcc ""
}

# Nothing here runs programs of macOS: they are compiled and linked.
for_macos() {
    local FLAGS=("${FLAGS[@]/-O2/-O0}") # Clang warns alike, and takes a third less time
    export ZIG_GLOBAL_CACHE_DIR=$work/zig ZIG_LOCAL_CACHE_DIR=$work/zig
    build "python3 -m ziglang cc -target $1-macos" "" python3 -m ziglang cc -target "$1-macos"
}

target() {
    out=$work/$1
    printf -- '-- %s\n' "$1"
    case $1 in
    gcc | clang) here_with "$1" large ;;
    musl) with_musl ;;
    aarch64 | s390x) under_qemu "$1" ;;
    mingw) under_wine large x86_64-w64-mingw32-gcc ;;
    # GCC for Windows has no vector tiers (its bug 54412), Clang has them.
    mingw-clang) under_wine "" clang --target=x86_64-w64-mingw32 ;;
    macos-*) for_macos "${1#macos-}" ;;
    *) echo "unknown target $1; there are: ${TARGETS[*]}" >&2 && exit 2 ;;
    esac
}

if [ "${1:-}" = --write ]; then
    out=$work/gcc
    build gcc "" gcc
    run "" ""
    cp "$out/kernels.txt" "$here/kernels.expected"
    cp "$out/reader.txt" "$here/reader.expected"
    exit
fi
[ $# -gt 0 ] || set -- "${TARGETS[@]}"
for name in "$@"; do target "$name"; done
echo "all as expected: $*"
