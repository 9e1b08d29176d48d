"""What tests of stores over HTTP share."""

import os

import pytest
from builders import inside


@pytest.fixture
def quick_web(monkeypatch):
    """No proxy of the environment, and tries that follow each other at once: waits are tested by their own test."""
    inside.tune(monkeypatch, retry_pause=0.01)
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def pytest_itemcollected(item):
    """Mark every test of this folder (pyproject.toml describes the marks)."""
    item.add_marker("no_core")
