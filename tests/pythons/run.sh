#!/usr/bin/env bash
# Runs a part of the test suite with other versions of Python and of the packages that safeload needs.
#
# usage: run.sh [NAME ...]                 all of NAMES without an argument
#        run.sh NAME -- ARGUMENT ...       arguments of pytest, in place of TESTS
# SAFELOAD_PYTHONS is a folder that keeps the interpreters that are unpacked or built, for the next run.
set -euo pipefail
unset PYTHONPATH # what is tested is what is installed

NAMES=(oldest 3.10 3.11 3.12 3.13 3.14 3.13t)
# As pyproject.toml allows, with the oldest Python.
OLDEST=("numpy==1.24.0" "cffi==1.17.0" "ml_dtypes==0.5.0")
# What depends on them: the binding, dtypes, threads, files, sockets, command lines; not the kernels of C, nor what reads
# pages.
TESTS=(
    tests/malformed
    tests/test_adapters.py
    tests/test_base
    tests/test_checkpoint.py
    tests/test_cli
    tests/test_compat
    tests/test_engine
    tests/test_engines
    tests/test_formats
    tests/test_loading
    tests/test_mistakes.py
    tests/test_models
    tests/test_operations
    tests/test_packed
    tests/test_plugins.py
    tests/test_released.py
    tests/test_results.py
    tests/test_saving
    tests/test_stores
    tests/test_tracebacks.py
    tests/test_urls.py
)
# What the tests import.
HELPERS=(gguf pytest pytest-xdist pytest-benchmark hypothesis fsspec urllib3 sybil setuptools)
# And those that have no wheel for 3.13t.
WHEELS=(zstandard h5py tokenizers)

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
kept=${SAFELOAD_PYTHONS:-$work}
mkdir -p "$kept"

# A copy of what git tracks or would track, in which there is no safeload to import but the one installed.
mkdir "$work/source" "$work/tests"
(cd "$root" && git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C "$work/source")
(cd "$work/source" && tar -c README.md csrc docs pyproject.toml tests | tar -x -C "$work/tests")

# The path of CPython of a version.
installed() {
    local python
    for python in ~/.pyenv/versions/"$1".*/bin/python3 /usr/bin/python"$1" /usr/local/bin/python"$1"; do
        if [ -x "$python" ]; then echo "$python" && return; fi
    done
    echo "there is no Python $1 here" >&2
    return 1
}

# Debian's of another release, with the C library of that release, which it needs.
unpacked() {
    local to=$kept/python$1 loader=lib64/ld-linux-x86-64.so.2
    if [ ! -x "$to/usr/bin/python" ]; then
        "$here/unpack.sh" sid amd64 "$to" "python$1" libstdc++6 >&2
        [ -e "$to/$loader" ] || loader=usr/$loader
        cat >"$to/usr/bin/python" <<END
#!/bin/sh
exec "$to/$loader" --library-path "$to/usr/lib/x86_64-linux-gnu:$to/lib/x86_64-linux-gnu" --argv0 "\$0" "$to/usr/bin/python$1" "\$@"
END
        chmod +x "$to/usr/bin/python"
    fi
    echo "$to/usr/bin/python"
}

# Free-threaded CPython is in no package: it is built from Debian's source of the same version.
built() {
    local version=${1%t} to=$kept/python$1
    if [ ! -x "$to/bin/python$1" ]; then
        "$here/unpack.sh" sid source "$work/cpython" "python$version" >&2
        (cd "$work/cpython" && ./configure -q --disable-gil --disable-test-modules --prefix="$to" >&2 &&
            make -s -j2 >&2 && make -s install >&2)
    fi
    echo "$to/bin/python$1"
}

# safeload, and what it and the tests need, for an interpreter that has no pip: one on this machine that knows new versions.
install() {
    local python=$1 name=$2
    pip() { PYTHONPATH=$work/pip python3 -m pip --python "$python" install -q "$@"; }
    case $name in
    3*t)
        # No release of cffi takes 3.13t, but it works there; PyYAML, which gguf needs, works without its part in C; and
        # without the stable ABI there is no wheel of safeload but its own.
        pip --only-binary :all: setuptools wheel pycparser numpy ml_dtypes==0.5.4 tqdm requests "${HELPERS[@]/gguf/}"
        pip --no-deps gguf
        python3 -m pip install -q --no-deps --only-binary :all: --python-version 3.13 --abi cp313 \
            --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 pyyaml \
            --target "$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
        python3 -m pip download -q --no-deps --no-binary cffi -d "$work" cffi
        mkdir "$work/cffi"
        tar -x -C "$work/cffi" --strip-components=1 -f "$work"/cffi-*.tar.gz
        sed -i 's/sys.version_info < (3, 14)/sys.version_info < (3, 13)/' "$work/cffi/setup.py"
        pip --no-build-isolation --no-deps "$work/cffi"
        pip --no-build-isolation --no-deps "$work/source"
        ;;
    oldest) pip --only-binary :all: "${OLDEST[@]}" "$wheel" "${HELPERS[@]}" "${WHEELS[@]}" safetensors ;;
    *) pip --only-binary :all: "$wheel" "${HELPERS[@]}" "${WHEELS[@]}" safetensors ;;
    esac
}

# Arguments of pytest for what cannot pass with a Python.
left_out() {
    case $1 in
    3*t)
        # safetensors has no wheel for 3.13t.
        grep -rlE '^(import|from) safetensors' tests --include='test_*.py' | sed 's/^/--ignore=/'
        # Wait in half of the runs: a child of fork waits for the lock of a dict that a thread of its parent held. It is
        # CPython's lock, which 3.13 does not renew in the child.
        echo --deselect=tests/test_engine/test_concurrency.py::test_a_fork_beside_threads_that_load
        echo "--deselect=tests/test_stores/test_descriptor_budget.py::test_threads_stay_within_half_of_the_descriptors[forked"
        ;;
    esac
}

python_of() {
    case $1 in
    oldest) installed 3.10 ;;
    3.14) unpacked "$1" ;;
    3.1[0-3]) installed "$1" ;;
    3*t) built "$1" ;;
    *) echo "unknown name $1; there are: ${NAMES[*]}" >&2 && return 2 ;;
    esac
}

names=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do names+=("$1") && shift; done
[ ${#names[@]} -gt 0 ] || names=("${NAMES[@]}")
if [ $# -gt 1 ]; then shift && TESTS=("$@"); fi

python3 -m pip wheel -q --no-deps -w "$work" "$work/source"
python3 -m pip install -q --target "$work/pip" pip
wheel=$(ls "$work"/*-cp310-abi3-*.whl)
for name in "${names[@]}"; do
    printf -- '-- %s\n' "$name"
    base=$(python_of "$name")
    "$base" -m venv --without-pip "$work/$name"
    install "$work/$name/bin/python" "$name"
    cd "$work/tests"
    "$work/$name/bin/python" -W error -c 'import safeload; safeload.show_config()'
    mapfile -t leaving < <(left_out "$name")
    "$work/$name/bin/python" -m pytest -q -n 2 -rs -p no:cacheprovider "${TESTS[@]}" "${leaving[@]}"
done
echo "all passed: ${names[*]}"
