"""What holds for the tests themselves: short ids of cases, the same in every run; a first line in every file."""

import re
from types import SimpleNamespace

import pytest
from builders.paths import TESTS

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]


@pytest.fixture
def conftest(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))


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


@pytest.mark.parametrize("when", ["setup", "call", "teardown"])
@pytest.mark.parametrize("outcome", ["passed", "failed", "skipped"])
def test_processes_report_calls_and_whatever_does_not_pass(conftest, when, outcome):
    report = pytest.TestReport("test_x.py::test", ("test_x.py", 0, "test"), {}, outcome, None, when)
    assert conftest.is_news(report) == (when == "call" or outcome != "passed")


def test_a_repeated_suite_keeps_every_test_and_some_of_its_cases(conftest):
    names = ["a.py::alone", *(f"a.py::many[{k}]" for k in range(7)), "b.py::many[0]"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    left_out = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: 3, hook=hook), items)
    assert [item.nodeid for item in items] == [
        "a.py::alone", "a.py::many[0]", "a.py::many[3]", "a.py::many[6]", "b.py::many[0]",
    ]  # fmt: skip
    assert len(items) + len(left_out) == len(names)


def test_every_file_says_what_it_shows():
    files = sorted(TESTS.rglob("*.py"))
    assert files
    titled = re.compile(r'(#.*\n)*"""[^"\s]')  # parsing all files takes a second
    assert [str(path) for path in files if not titled.match(path.read_text(encoding="utf-8"))] == []


def test_ids_of_cases_fit_a_line_and_are_the_same_in_every_run(request):
    names = [item.name for item in request.session.items]
    assert [name[:120] for name in names if len(name) > 120 or " at 0x" in name] == []
