"""A plug-in of pytest: the texts of all errors that ``pytest.raises`` catches, as rows of the golden run.

``GOLDEN_ROWS`` in the environment is the file to write. Tests with random inputs of hypothesis are left out.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from builders.paths import ROOT

from golden.rows import normalised, of_error
from golden.tasks import ABSENT

found: dict[str, list[str]] = {}
item_now: list[str] = []
real_raises = pytest.raises


class Recorded:
    """A context manager of ``pytest.raises`` that adds what it has caught."""

    def __init__(self, inner):
        self.inner = inner

    def __enter__(self):
        self.info = self.inner.__enter__()
        return self.info

    def __exit__(self, *exception):
        caught = self.inner.__exit__(*exception)
        if caught and item_now:
            texts = found.setdefault(item_now[-1], [])
            text = without_folders(of_error(exception[1]))
            if text not in texts:
                texts.append(text)
        return caught


def without_folders(text):
    """The text without folders of tests."""
    text = normalised(text, Path(os.environ["GOLDEN_FOLDER"]))
    text = re.sub(r"<work>[/\w.-]*?/[A-Za-z0-9_]+\d+(?=[/'\",:; )]|$)", "<tmp>", text)
    return re.sub(r"<work>[/\w.-]*-\d+/\w*\d+(?=/)", "<tmp>", text)


def raises(*args, **kwargs):
    made = real_raises(*args, **kwargs)
    return Recorded(made) if hasattr(made, "__enter__") else made


def pytest_configure(config):
    for name in ABSENT:
        sys.modules[name] = None
    pytest.raises = raises


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if not item.get_closest_marker("hypothesis")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    item_now.append(item.nodeid)
    try:
        return (yield)
    finally:
        item_now.pop()


def pytest_sessionfinish(session):
    lines = []
    for test, texts in found.items():
        key = test.removeprefix("tests/").replace(".py::", "/").replace(str(ROOT), "")
        lines += [json.dumps([f"errors/{key}/{number}", text]) + "\n" for number, text in enumerate(texts, 1)]
    Path(os.environ["GOLDEN_ROWS"]).write_text("".join(lines), encoding="utf-8")
