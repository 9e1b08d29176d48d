#!/usr/bin/env bash
# Builds the extension for AArch64, and runs a part of the test suite with Debian's Python for AArch64 under qemu-user.
#
# usage: run.sh [ARGUMENT ...]     arguments of pytest, in place of MODULES
# AARCH64_ROOT=FOLDER keeps what was downloaded and unpacked, and a later run goes on from there.
set -euo pipefail

# What computes, and what reads and writes: kernels, packed tensors, formats, the engine.
MODULES=(
    tests/test_native.py
    tests/test_core
    tests/test_packed
    tests/test_checkpoint.py
    tests/test_compat/test_numpy.py
    tests/test_engine
    tests/test_formats/test_contract.py
    tests/test_formats/test_moon.py
    tests/test_formats/test_npz.py
)
# What qemu-user cannot pass, whatever is asked for.
LEFT_OUT=(
    # Its own memory counts, against a limited address space and in what a process has: 36 MB of translated code and
    # 30 MB of heap beside a result of 40.
    tests/test_compat/test_numpy.py::test_where_the_address_space_is_too_small_for_the_mapping_the_file_is_read
    tests/test_packed/test_int8_by_parts.py::test_memory_is_the_result_and_little_more
    # It is too slow: a thread is not started before the first answer is there.
    tests/test_formats/test_ranges.py::test_an_index_of_163_shards_and_91_000_tensors_takes_two_requests_a_shard_32_at_a_time
    # It keeps 290 KB of each thread that has ended.
    tests/test_engine/test_stream.py::test_two_hundred_streams_leave_nothing_behind
    # Where a process with threads has forked, the first new thread of the child ends it: "core.c:221: assertion failed".
    tests/test_engine/test_stream.py::test_after_a_fork_the_stream_is_the_parents
    "tests/test_engine/test_stream.py::test_processes_stream_beside_a_parent_that_streams[fork]"
)
# As csrc/ffi_build.py.
FLAGS=(-std=c11 -O2 -ffp-contract=off -fvisibility=hidden -fPIC -DPy_LIMITED_API=0x030A0000)
PACKAGES=(python3.11 libpython3.11-dev libstdc++6)

here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
core=$source/csrc
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=${AARCH64_ROOT:-$work/root}
python=$root/usr/bin/python # the wrapper below: no kernel here starts programs of AArch64
packages=$root/usr/local/lib/python3.11/dist-packages

if [ ! -x "$python" ]; then
    echo "-- Python for AArch64"
    # A list of packages of its own, in which nothing is installed: what this machine has is not looked at nor changed.
    apt=(apt-get -q -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root
        -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o "Dir::State::status=$work/status")
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$root"
    : >"$work/status"
    "${apt[@]}" update
    "${apt[@]}" install --download-only -y --no-install-recommends "${PACKAGES[@]}" >"$work/apt.log" || {
        cat "$work/apt.log"
        exit 1
    }
    for package in "$work"/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
    python3 -m pip download -q --no-deps --only-binary :all: --platform manylinux_2_28_aarch64 \
        --platform manylinux_2_17_aarch64 --python-version 3.11 -r "$here/requirements.txt" -d "$work/wheels"
    mkdir -p "$packages"
    for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$packages"; done
    # Beside Python itself: it finds its library by the name it was called by, and starts children by that name too.
    printf '#!/bin/sh\nexec qemu-aarch64 -L "%s" -0 "$0" "%s/usr/bin/python3.11" "$@"\n' "$root" "$root" >"$python"
    chmod +x "$python"
fi

echo "-- the extension"
rm -rf "$packages/safeload"
tar -c -C "$source" --exclude=__pycache__ --exclude='_core.*' safeload | tar -x -C "$packages"
PYTHONPATH=$core python3 -c 'import sys, ffi_build; ffi_build.ffibuilder.emit_c_code(sys.argv[1])' "$work/_core.c"
mkdir "$work/objects"
(cd "$work/objects" && aarch64-linux-gnu-gcc "${FLAGS[@]}" -I "$core" -I "$root/usr/include/python3.11" \
    -idirafter "$root/usr/include" -c "$work/_core.c" "$core"/*.c "$core"/*/*.c)
aarch64-linux-gnu-gcc -shared "$work"/objects/*.o -o "$packages/safeload/_core.abi3.so" -lpthread

echo "-- tests"
mkdir "$work/source"
tar -c -C "$source" --exclude=__pycache__ README.md csrc docs pyproject.toml tests | tar -x -C "$work/source"
cd "$work/source" # where there is no safeload to import but the one installed
[ $# -gt 0 ] || set -- "${MODULES[@]}"
"$python" -c 'import safeload; safeload.show_config()'
"$python" -m pytest -q -rs -p no:cacheprovider "${LEFT_OUT[@]/#/--deselect=}" "$@"
