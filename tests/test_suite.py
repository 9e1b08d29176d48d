"""What holds for the tests themselves: short ids of cases, the same in every run; a first line in every file."""

import ast
from types import SimpleNamespace

import pytest
from builders.paths import TESTS


@pytest.fixture
def conftest(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))


def item(name):
    return SimpleNamespace(name=name, location=("tests/test_x.py", 1, name))


@pytest.mark.parametrize(
    "name", ["test_x[" + "a" * 113 + "]", "test_x[<X object at 0x7f40cdc58090>]"], ids=["long", "address"]
)
def test_a_bad_id_fails_the_collection(conftest, name):
    with pytest.raises(pytest.UsageError, match=r"tests/test_x\.py: test_x\["):
        conftest.pytest_collection_modifyitems([item("test_fine"), item(name)])


def test_an_id_of_a_line_is_fine(conftest):
    conftest.pytest_collection_modifyitems([item("test_x[" + "a" * 112 + "]")])


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (b"short", None),
        (bytes(100_000), "content of 100000 bytes"),
        ("x" * 32, None),
        ("x" * 33, "x" * 29 + "..."),
        ("\N{GRINNING FACE}" * 4, "\\U0001f600\\U0001f600\\U0001f600"[:29] + "..."),
        (7, None),
    ],
    ids=["few bytes", "many bytes", "a text", "a long text", "a text that is long when escaped", "a number"],
)
def test_long_values_are_cut(conftest, pytestconfig, value, want):
    assert conftest.pytest_make_parametrize_id(pytestconfig, value, "content") == want


def test_every_file_says_what_it_shows():
    files = sorted(TESTS.rglob("*.py"))
    assert files
    assert [str(path) for path in files if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None] == []
