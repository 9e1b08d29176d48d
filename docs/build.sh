#!/usr/bin/env bash
# Builds the documentation into a folder, docs/_build unless one is given. Needs safeload with its extra `docs`, no
# network. A name that does not resolve, a page in no table of contents or any other warning fails the build.
set -euo pipefail
docs=$(dirname "$0")
sphinx-build --fail-on-warning --keep-going --quiet --builder html "$docs" "${1:-$docs/_build}"
