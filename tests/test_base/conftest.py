"""The marks of this folder's tests."""


def pytest_itemcollected(item):
    """Mark every test of this folder (pyproject.toml describes the marks)."""
    item.add_marker("no_core")
