#!/usr/bin/env bash
# Runs the test suites of libraries that use safetensors twice, with safetensors and with safeload in its place, and compares
# the outcome of each test. Needs no network but for what it installs.
#
# usage: run.sh FOLDER [CLIENT ...]        all of CLIENTS without an argument
# FOLDER keeps environments, sources and reports for the next run. CLIENTS_QUANTO names a checkout of optimum-quanto, whose
# releases have no tests; without it git fetches one.
set -euo pipefail
unset PYTHONPATH # what is tested is what is installed

CLIENTS=(huggingface_hub accelerate peft quanto)
TORCH="torch==2.13.0"
QUANTO=https://github.com/huggingface/optimum-quanto

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- "${CLIENTS[@]}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# requirements CLIENT: what the client's tests need.
requirements() {
    case $1 in
    huggingface_hub) echo "huggingface_hub==2.4.0 $TORCH pytest-mock pytest-env jedi jinja2 pillow" ;;
    accelerate) echo "accelerate==1.15.0 $TORCH transformers==5.23.0 parameterized" ;;
    peft) echo "peft==0.21.2 $TORCH transformers==5.23.0 parameterized scipy scikit-learn datasets diffusers" ;;
    quanto) echo "optimum-quanto==0.2.7 $TORCH transformers==5.23.0 diffusers" ;;
    *) echo "unknown client $1; there are: ${CLIENTS[*]}" >&2 && return 2 ;;
    esac
}

# The tests that reach safetensors and no network.
tests() {
    case $1 in
    huggingface_hub) printf 'tests/%s.py\n' test_serialization test_hub_mixin test_hub_mixin_pytorch test_dduf ;;
    accelerate)
        printf 'tests/%s.py\n' test_modeling_utils test_utils test_state_checkpointing test_accelerator test_offload test_hooks \
            test_big_modeling
        ;;
    peft) printf '%s\n' tests/test_custom_models.py -k "save_pretrained or load or merge" ;;
    quanto) printf 'tests/%s\n' quantize/test_requantize.py tensor/weights nn/test_qlinear.py models ;;
    esac
}

# The source of a client, with its tests.
source_of() {
    local to=$folder/$1/source
    [ -d "$to" ] && return
    mkdir -p "$work/$1"
    if [ "$1" = quanto ]; then
        git clone -q --depth 1 "${CLIENTS_QUANTO:-$QUANTO}" "$work/$1/unpacked"
    else
        "$folder/$1/venv/bin/pip" download -q --no-deps --no-binary :all: -d "$work/$1" "$(requirements "$1" | cut -d' ' -f1)"
        tar -x -C "$work/$1" -f "$work/$1"/*.tar.gz
        mv "$work/$1"/*/ "$work/$1/unpacked"
        touch "$work/$1/unpacked/tests/__init__.py" # source distributions lack it
    fi
    mv "$work/$1/unpacked" "$to"
}

# run CLIENT safetensors|safeload: writes the report CLIENT/safetensors.xml or CLIENT/safeload.xml
run() {
    local python=$folder/$1/venv/bin/python arguments status=0
    mapfile -t arguments < <(tests "$1")
    local command=("$python")
    [ "$2" = safetensors ] || command+=(-m safeload.as_safetensors)
    rm -f "$folder/$1/$2.xml"
    (
        cd "$folder/$1/source"
        export HF_HUB_OFFLINE=1 HF_HOME="$work/hub" CUDA_VISIBLE_DEVICES=
        "${command[@]}" -c "import safetensors; assert type(safetensors.__loader__).__module__.startswith('safeload') == ('$2' == 'safeload')"
        timeout 3600 "${command[@]}" -m pytest -q -p no:cacheprovider -o addopts= --tb=short \
            --junit-xml="$folder/$1/$2.xml" "${arguments[@]}"
    ) >"$folder/$1/$2.log" 2>&1 || status=$?
    [ -s "$folder/$1/$2.xml" ] || { tail -n 30 "$folder/$1/$2.log" && echo "$1 with $2: exit status $status" && return 1; }
}

# A copy of what git tracks or would track, so that building leaves nothing behind.
mkdir "$work/safeload"
(cd "$root" && git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C "$work/safeload")
python3 -m pip wheel -q --no-deps -w "$work" "$work/safeload"

failed=()
for client; do
    printf -- '-- %s\n' "$client"
    read -r -a needed <<<"$(requirements "$client")"
    [ -d "$folder/$client/venv" ] || python3 -m venv "$folder/$client/venv"
    "$folder/$client/venv/bin/pip" install -q --no-compile pytest safetensors==0.8.0 "${needed[@]}"
    "$folder/$client/venv/bin/pip" install -q --force-reinstall --no-deps "$work"/*.whl
    "$folder/$client/venv/bin/pip" install -q numpy cffi ml_dtypes
    source_of "$client"
    if ! { run "$client" safetensors && run "$client" safeload &&
        python3 "$here/compare.py" "$folder/$client/safetensors.xml" "$folder/$client/safeload.xml"; }; then
        failed+=("$client")
    fi
done
[ ${#failed[@]} = 0 ] || { echo "outcomes differ: ${failed[*]}" && exit 1; }
