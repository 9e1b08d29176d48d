"""The model that engines convert, and what one process makes of it."""

import pytest
from builders.clusters import OPTIONS, content, fp8_folder

import safeload


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return fp8_folder(tmp_path_factory.mktemp("source") / "fp8")


@pytest.fixture(scope="module")
def local(source, tmp_path_factory):
    """What one process makes of it."""
    folder = tmp_path_factory.mktemp("local") / "bf16"
    safeload.convert(source, folder, **OPTIONS)
    made = content(folder)
    assert len(made) == 9  # 6 shards, index, config and tokenizer
    return made


def pytest_itemcollected(item):
    """Mark every test of this folder (pyproject.toml describes the marks)."""
    item.add_marker("no_core")
