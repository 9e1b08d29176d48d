"""Fixtures under the shim; without it the tests of this folder are not collected."""

import os

import pytest
from faults import samples, shim

# Elsewhere than under the shim there is nothing to see; tests/test_faults.py runs this folder under it.
collect_ignore_glob = [] if shim.ENVIRONMENT in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The same tensors in every format, in a folder that the shim watches: see `samples.write`."""
    folder = tmp_path_factory.mktemp("watched")
    return samples.write(folder)
