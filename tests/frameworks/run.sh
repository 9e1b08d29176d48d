#!/usr/bin/env bash
# Runs every test that needs torch, JAX or flax, in an environment of its own: safeload's own tests, upstream's, the pages
# and docstrings about them. .ci/run tries a part of them.
#
# usage: run.sh FOLDER [ARGUMENT ...]      arguments of pytest, in place of TESTS
# FOLDER keeps the environment and upstream's sources for the next run.
set -euo pipefail
unset PYTHONPATH # what is tested is what is installed

TESTS=(
    tests/test_frameworks
    tests/test_adapters.py
    tests/test_base/test_forking.py
    tests/test_compat/test_alias.py
    tests/test_compat/test_error_classes.py
    tests/test_compat/test_names.py
    tests/test_compat/test_upstream.py
    tests/test_engine/test_loading.py
    tests/test_engine/test_staging.py
    tests/test_formats/test_orbax.py
    tests/test_loading/test_verified.py
    tests/test_operations/test_diffusion_models.py
    tests/test_saving
    tests/test_typing.py
)

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A copy of what git tracks or would track, so that the build leaves nothing behind.
mkdir "$work/source"
(cd "$root" && git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C "$work/source")

[ -d "$folder/venv" ] || python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
pip wheel -q --no-deps -w "$work" "$work/source"
# One release of torch: where pip finds a build of it without CUDA, that saves 4 GB.
pip install -q --no-compile torch==2.13.0 mypy basedpyright peft 'transformers>=5' "$(echo "$work"/*.whl)[test,test-frameworks]"
pip install -q --no-compile --force-reinstall --no-deps "$work"/*.whl # of the same version as that of an earlier run
python -W ignore -c 'import flax, jax, peft, torch, transformers' # or their tests would be skipped
[ -d "$folder/upstream" ] || python "$root/tests/upstream/fetch.py" "$folder/upstream"
export SAFELOAD_UPSTREAM_SDISTS=$folder/upstream

cd "$work/source"
if [ $# -gt 0 ]; then
    pytest -q -rs "$@"
    exit
fi
pytest -q -n 2 -rs "${TESTS[@]}"
# Of the pages and docstrings, only those of torch and JAX: the others need neither.
pytest -q -rs tests/test_documentation.py -k 'frameworks or torch or jax'
