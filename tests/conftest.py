"""Fixtures of all tests, and what a parametrized case is called."""

import os

# Before numpy is first imported, here, in processes of xdist and in programs: OpenBLAS's threads take as long to start
# as the rest of the import of numpy, and keep a processor busy for a while after each product.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gc
import itertools
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from builders.paths import DATA, SHARED
from builders.random import seeded
from builders.thorough import THOROUGH
from builders.threads import await_no_threads, threads
from faults import shim

# Most processes that the whole suite runs in: some tests take a gigabyte of memory.
MOST_PROCESSES = 4
# The whole suite runs all cases of a test with up to FEW of them, and the first and then every fourth of others.
FEW, EVERY = 6, 4

# Otherwise the hundreds of programs that tests start would compile safeload anew, and each process of xdist every test.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite runs a part of the cases, and on several processors, unless ``--every`` and ``-n`` say otherwise.

    What is asked for by name runs whole, on one. In a process more than there are processors: a sixth of the time tests
    wait for programs, servers and the disk.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    worker = hasattr(config, "workerinput")
    if whole and config.option.every is None and not THOROUGH:  # xdist hands its processes the arguments alone
        config.option.every, config.option.few = EVERY, FEW
    if not whole or worker or not config.pluginmanager.hasplugin("xdist") or config.option.usepdb:
        return
    if config.option.numprocesses is None:
        config.option.numprocesses = min(MOST_PROCESSES, (os.cpu_count() or 1) + 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, metavar="N", help="run the first and then every Nth case of a test")
    parser.addoption("--few", type=int, default=1, metavar="N", help="run all cases of a test with up to N of them")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A suite that is repeated elsewhere keeps all tests, and some of the cases of each."""
    if hasattr(config, "workerinput"):
        # These wait for servers: at the end all processes would do so together, but the first gets the first tests.
        items.sort(key=lambda item: not item.location[0].startswith(("tests/test_stores", "tests/test_urls")))
    every, few = config.getoption("--every") or 1, config.getoption("--few")
    if every == 1:
        return
    tests = [item.nodeid.partition("[")[0] for item in items]
    counts, cases = Counter(tests), Counter[str]()
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item, test in zip(items, tests, strict=True):
        (left_out if counts[test] > few and cases[test] % every else chosen).append(item)
        cases[test] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


def pytest_configure(config: pytest.Config) -> None:
    """The process that deals tests out to others keeps their reports to the end and makes no garbage."""
    if hasattr(config, "workerinput"):
        if shows_letters(config):
            config.pluginmanager.register(_ShortReports())
    elif getattr(config.option, "numprocesses", None):
        gc.disable()
        if shows_letters(config):
            config.pluginmanager.register(_Lines(config))


def shows_letters(config: pytest.Config) -> bool:
    """Whether a passed test is a letter on the screen and nothing else."""
    option = config.option
    return option.durations is None and not getattr(option, "xmlpath", None) and option.verbose <= 0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[object]:
    """What is collected stays; looking for garbage among it takes a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if enabled:
            gc.enable()


def is_news(report: pytest.TestReport) -> bool:
    """Whether more than the summary of the call has to know of a part of a test."""
    return report.when == "call" or not report.passed


class _ShortReports:
    """Processes of xdist send a single message for a passed test: its report took longer than most tests."""

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in filter(is_news, runtestprotocol(item, log=False, nextitem=nextitem)):
            if report.passed:
                report.keywords = {}
            item.ihook.pytest_runtest_logreport(report=report)
        return True


class _Lines:
    """Ends a line of letters, which pytest 8 does when a test is finished."""

    def __init__(self, config: pytest.Config) -> None:
        self._hook = config.hook

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)


# Random data depends on the test alone, not on the tests before it: a failure can be repeated with -k.
@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    with seeded(collector.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with seeded(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[None]:
    with seeded(f"{request.node.nodeid} {fixturedef.argname} {getattr(request, 'param_index', 0)}"):
        return (yield)


# Deleting a file slows down the creation of others: ext4 passes over the inodes of all that were deleted in the last
# seconds. So folders of passed tests stay to the end, but without large files, of which a run makes gigabytes.
FOLDERS, FAILED = pytest.StashKey[list[Path]](), pytest.StashKey[bool]()
LARGE = 100_000
numbers = itertools.count()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    except BaseException:
        item.stash[FAILED] = True
        raise


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of the test's own, which stays if the test fails."""
    path = tmp_path_factory.getbasetemp() / f"{re.sub(r'[^0-9A-Za-z]', '_', request.node.name)[:30]}{next(numbers)}"
    path.mkdir(mode=0o700)
    yield path
    if FAILED in request.node.stash:
        return
    request.session.stash.setdefault(FOLDERS, []).append(path)
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(OSError):
                if os.lstat(os.path.join(folder, file)).st_size > LARGE:
                    os.remove(os.path.join(folder, file))


def pytest_sessionfinish(session: pytest.Session) -> None:
    for folder in session.stash.get(FOLDERS, ()):
        shutil.rmtree(folder, ignore_errors=True)


# What surrounds all tests is in hooks, because every test looks up each fixture that it uses.
@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Iterator[object]:
    # A shell has background jobs ignore SIGINT, and so would the tests of Ctrl-C and the programs they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with fsync_does_not_wait(), rewriting_does_not_wait():
        return (yield)


@contextmanager
def fsync_does_not_wait() -> Iterator[None]:
    """Tests save tens of thousands of files, and none of them needs to survive a power failure.

    The programs that they start call the real one, as do tests/faults, where it fails.
    """

    def fsync(descriptor: int) -> None:
        os.fstat(descriptor)

    with pytest.MonkeyPatch.context() as monkeypatch:
        if os.name == "posix" and shim.ENVIRONMENT not in os.environ:
            for name in ("fsync", "fdatasync"):
                monkeypatch.setattr(os, name, fsync, raising=False)
        yield


@contextmanager
def rewriting_does_not_wait() -> Iterator[None]:
    """Tests write thousands of variants of one file: over the old bytes, which takes a hundredth of the time.

    What replaces a truncated file ext4 takes to the disk at once, and the next truncation waits for that.
    """
    replace = Path.write_bytes

    def write_over(path: Path, data: bytes) -> int:
        try:
            with open(path, "r+b") as file:
                size = file.write(data)
                file.truncate()
                return size
        except OSError:
            return replace(path, data)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Path, "write_bytes", write_over)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """No thread outlives its test: those after it would count it."""
    yield
    await_no_threads()
    assert threads() == []
    if nextitem is None or nextitem.path != item.path:
        pass_over()  # pytest keeps a report of every test, and there are 24,000


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not here: the larger real files live outside the repository")
    return SHARED


# Processes of xdist begin nothing before its test.
@pytest.fixture(scope="session", autouse="PYTEST_XDIST_WORKER" not in os.environ)
def _ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[pytest.Function], object]]:
    """Begins what tests with the mark ``ahead`` wait for: it runs on another processor while the tests before them do.

    The mark has a function, which is called with a new folder and the test's parameters; in a process of its own, as
    tests change the environment and the working directory of this one.
    """
    begun: dict[str, Future] = {}

    def call_of(item: pytest.Function) -> Callable[[], object]:
        function = item.get_closest_marker("ahead").kwargs["function"]
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        return partial(function, tmp_path_factory.mktemp("ahead"), **parameters)

    def result_of(item: pytest.Function) -> object:
        return begun[item.nodeid].result() if item.nodeid in begun else call_of(item)()

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        # Processes of xdist keep the processors busy by themselves, and each has all of the tests in its list; new ones
        # of `pytest` and of `python -P`, unlike those of `python -m pytest`, would not find the tests.
        importable = any(Path(folder, "tests", "conftest.py").exists() for folder in sys.path)
        if (os.cpu_count() or 1) > 1 and "PYTEST_XDIST_WORKER" not in os.environ and importable:
            for item in request.session.items:
                skipped = any(any(mark.args) for mark in item.iter_markers("skipif"))
                if item.get_closest_marker("ahead") and not skipped:
                    begun[item.nodeid] = pool.submit(call_of(item))
        yield result_of
        pool.shutdown(cancel_futures=True)  # where pytest stops at the first failure


@pytest.fixture
def begun_ahead(request: pytest.FixtureRequest, _ahead: Callable[[pytest.Function], object]) -> object:
    """What the function of the test's mark ``ahead`` returns."""
    return _ahead(request.node)


# Ids of cases: readable in a terminal, and the same in every run; test_suite.py holds them to a line.
MOST_OF_A_TEXT = 32
MOST_BYTES = 12


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Long texts and bytes are cut; where that makes two ids the same, pytest numbers them."""
    if isinstance(val, bytes | bytearray) and len(val) > MOST_BYTES:
        return f"{argname} of {len(val)} bytes"
    if isinstance(val, str) and len(text := ascii(val)[1:-1]) > MOST_OF_A_TEXT:
        return f"{text[: MOST_OF_A_TEXT - 3]}..."
    return None


def pass_over() -> None:
    """What was made so far stays to the end: collections of garbage, of which some tests ask for many, pass it over."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    gc.freeze()  # with the garbage of the collection: looking for it takes most of a second in each process
