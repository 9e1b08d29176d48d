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


@pytest.mark.parametrize(
    ("every", "few", "kept"),
    [(3, 1, [0, 3, 6]), (2, 6, [0, 2, 4, 6]), (2, 7, range(7)), (None, 1, range(7)), (1, 1, range(7))],
)
def test_a_part_of_the_suite_keeps_every_test_and_some_of_its_cases(conftest, every, few, kept):
    names = ["a.py::alone", *(f"a.py::many[{k}]" for k in range(7)), "b.py::many[0]"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    left_out = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    options = {"--every": every, "--few": few}
    conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=options.__getitem__, hook=hook), items)
    assert [item.nodeid for item in items] == ["a.py::alone", *(f"a.py::many[{k}]" for k in kept), "b.py::many[0]"]
    assert len(items) + len(left_out) == len(names)


SOURCES = pytest.Config.ArgsSource


@pytest.mark.parametrize(
    ("source", "asked", "want"),
    [(SOURCES.TESTPATHS, None, (4, 6)), (SOURCES.TESTPATHS, 1, (1, 1)), (SOURCES.ARGS, None, (None, 1))],
    ids=["the whole suite", "all of it", "a file"],
)
def test_only_the_whole_suite_leaves_out_cases(conftest, monkeypatch, source, asked, want):
    monkeypatch.setattr(conftest, "THOROUGH", False)
    option = SimpleNamespace(every=asked, few=1, usepdb=True)
    plugins = SimpleNamespace(hasplugin=lambda name: True)
    conftest.pytest_cmdline_main(SimpleNamespace(args_source=source, option=option, pluginmanager=plugins))
    assert (option.every, option.few) == want


def test_every_file_says_what_it_shows():
    files = sorted(TESTS.rglob("*.py"))
    assert files
    titled = re.compile(r'(#.*\n)*"""[^"\s]')  # parsing all files takes a second
    assert [str(path) for path in files if not titled.match(path.read_text(encoding="utf-8"))] == []


def test_ids_of_cases_fit_a_line_and_are_the_same_in_every_run(request):
    names = [item.name for item in request.session.items]
    assert [name[:120] for name in names if len(name) > 120 or " at 0x" in name] == []
