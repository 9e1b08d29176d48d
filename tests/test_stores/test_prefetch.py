"""Tasks that run ahead of their consumer: order, bound, errors, and the end of the thread in every way there is."""

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
from builders import inside
from builders.inside import thread_group
from builders.threads import threads

pytestmark = pytest.mark.inner


def tasks(*sizes, done=None):
    """Tasks of these sizes that give their numbers, and note them in ``done``."""

    def run(k):
        thread_group.check_stopped()
        if done is not None:
            done.append(k)
        return k

    return (thread_group.Task(size, lambda k=k: run(k)) for k, size in enumerate(sizes))


def endless():
    """Work that ends only when it is not wanted any more."""
    while True:
        thread_group.check_stopped()
        time.sleep(0.001)


def until(condition, seconds=10):
    """Waits for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


# ---- order and bound ----


@pytest.mark.parametrize("limit", [0, 1, 7, 1000])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_results_come_in_order(limit, count):
    assert list(thread_group.Prefetch(tasks(*[1] * count), limit)) == list(range(count))


def test_nothing_runs_before_the_first_result_is_asked_for():
    done = []
    ahead = thread_group.Prefetch(tasks(1, 1, 1, 1, 1, done=done), 100)
    time.sleep(0.02)
    assert (done, threads()) == ([], [])
    assert next(ahead) == 0
    until(lambda: done == [0, 1, 2, 3, 4])
    ahead.close()


def test_what_is_made_and_not_taken_stays_below_the_limit():
    done = []
    ahead = thread_group.Prefetch(tasks(*[10] * 20, done=done), 45)
    for taken in range(1, 12):
        next(ahead)
        until(lambda taken=taken: len(done) == taken + 4)
        time.sleep(0.002)
        assert len(done) == taken + 4
        assert ahead.pending == 40
    ahead.close()


def test_a_task_that_is_larger_than_the_limit_waits_until_all_before_it_are_taken():
    done = []
    ahead = thread_group.Prefetch(tasks(1, 1, 100, 1, 1, done=done), 10)
    for taken, made_by_then in enumerate([2, 3, 5, 5, 5], 1):
        assert next(ahead) == taken - 1
        until(lambda wanted=made_by_then: len(done) == wanted)
        time.sleep(0.005)
        assert len(done) == made_by_then
    assert list(ahead) == []


def test_start_runs_in_the_consumers_thread_before_its_task():
    seen = []

    def task(k):
        return thread_group.Task(
            1,
            lambda: seen.append(("run", k, threading.get_ident())),
            lambda: seen.append(("start", k, threading.get_ident())),
        )

    assert list(thread_group.Prefetch(map(task, range(3)), 1)) == [None] * 3
    here = threading.get_ident()
    for k in range(3):
        begun, ran = (next(i for i, one in enumerate(seen) if one[:2] == (what, k)) for what in ("start", "run"))
        assert begun < ran
        assert seen[begun][2] == here != seen[ran][2]


# ---- errors ----


@pytest.mark.parametrize("limit", [0, 100])
def test_an_error_comes_at_its_turn_and_is_the_last(limit):
    def fail():
        raise OSError("the third")

    ahead = thread_group.Prefetch((thread_group.Task(1, fail if k == 2 else lambda k=k: k) for k in range(5)), limit)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(OSError, match="the third"):
        next(ahead)
    assert threads() == []
    assert list(ahead) == []


def test_an_error_keeps_nothing_alive_once_it_is_handled():
    class Held:
        pass

    held = Held()
    seen = weakref.ref(held)

    def run(held=held):
        raise ValueError("no")

    ahead = thread_group.Prefetch(iter([thread_group.Task(1, run)]), 1)
    del held, run
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            next(ahead)
        assert seen() is None
    finally:
        gc.enable()


def test_an_error_of_the_tasks_themselves_ends_it():
    def broken():
        yield from tasks(1, 1)
        raise KeyError("tasks")

    ahead = thread_group.Prefetch(broken(), 0)
    with pytest.raises(KeyError, match="tasks"):
        list(ahead)
    assert list(ahead) == []


def test_a_thread_that_cannot_start_is_an_error(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        ahead = thread_group.Prefetch(tasks(1), 1)
        with pytest.raises(RuntimeError, match="can't start"):
            next(ahead)
    assert list(ahead) == []


# ---- the end ----


def test_close_stops_a_task_in_the_middle_and_may_be_called_again():
    begun = threading.Event()
    jobs = [thread_group.Task(1, lambda: 0), thread_group.Task(1, lambda: [begun.set(), endless()])]
    ahead = thread_group.Prefetch(iter(jobs), 10)
    next(ahead)
    begun.wait()
    assert len(threads()) == 1
    ahead.close()
    assert threads() == []
    ahead.close()
    assert list(ahead) == []


def test_close_before_the_start_starts_nothing():
    ahead = thread_group.Prefetch(tasks(1, 1), 10)
    ahead.close()
    assert list(ahead) == []


def test_close_from_another_thread_ends_the_wait():
    ahead = thread_group.Prefetch(iter([thread_group.Task(1, endless)]), 1)
    closer = threading.Timer(0.05, ahead.close)
    closer.start()
    with pytest.raises(ValueError, match="closed"):
        next(ahead)
    closer.join()
    assert list(ahead) == []


def test_close_from_another_thread_at_any_moment_ends_it_well():
    """Either the end or the error for it, never one of the inside, and no thread begins afterwards."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for k in range(150):
            ahead = thread_group.Prefetch(tasks(*[1] * 200), 3)
            closer = threading.Thread(target=lambda ahead=ahead, k=k: (time.sleep(k % 30 * 2e-5), ahead.close()))
            closer.start()
            with contextlib.suppress(ValueError):
                assert (taken := list(ahead)) == list(range(len(taken)))
            closer.join()
            assert threads() == []
    finally:
        sys.setswitchinterval(interval)


def test_close_by_what_a_task_starts_with_begins_no_thread():
    jobs = [thread_group.Task(1, lambda: 0, lambda: ahead.close())]
    ahead = thread_group.Prefetch(iter(jobs), 1)
    with pytest.raises(ValueError, match="closed"):
        next(ahead)
    assert threads() == []


def test_the_last_reference_ends_it():
    ahead = thread_group.Prefetch(iter([thread_group.Task(1, lambda: 0), thread_group.Task(1, endless)]), 10)
    next(ahead)
    assert len(threads()) == 1
    del ahead
    assert threads() == []


def test_a_collection_in_its_own_thread_ends_it():
    """Garbage is collected in whichever thread allocates, and that cannot wait for itself."""
    ready, go = threading.Event(), threading.Event()

    def collect():
        ready.set()
        go.wait()
        gc.collect()

    gc.disable()
    try:
        ahead = thread_group.Prefetch(iter([thread_group.Task(1, lambda: 0), thread_group.Task(1, collect)]), 10)
        ahead.itself = ahead
        next(ahead)
        ready.wait()
        del ahead
        assert len(threads()) == 1
        go.set()
        until(lambda: threads() == [])
    finally:
        gc.enable()


def test_a_collection_in_the_middle_of_threading_itself_does_not_hang():
    """The end of a thread needs the lock under which `threading.enumerate` makes its list."""
    ahead = thread_group.Prefetch(iter([thread_group.Task(1, lambda: 0), thread_group.Task(1, endless)]), 10)
    next(ahead)
    started = time.monotonic()
    with threading._active_limbo_lock:
        del ahead
    assert time.monotonic() - started < 2
    until(lambda: threads() == [])


def test_results_that_are_not_taken_are_dropped_by_close():
    class Held:
        pass

    made = []

    def run():
        held = Held()
        made.append(weakref.ref(held))
        return held

    ahead = thread_group.Prefetch((thread_group.Task(1, run) for _ in range(4)), 10)
    next(ahead)
    until(lambda: len(made) == 4)
    ahead.close()
    assert [one() for one in made] == [None] * 4


PROGRAM = inside.program("""
    import sys, time
    from builders.inside import thread_group

    def endless():
        while True:
            thread_group.check_stopped()
            time.sleep(0.001)

    ahead = thread_group.Prefetch(iter([thread_group.Task(1, lambda: 0), thread_group.Task(1, endless)]), 10)
    next(ahead)
""")


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "ahead.itself = ahead", "sys.kept = ahead"])
def test_a_program_ends_with_an_iterator_that_is_half_consumed(end):
    code = textwrap.dedent(PROGRAM) + end
    started = time.monotonic()
    command = [sys.executable, "-I", "-X", "dev", "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - started < 10


# ---- fork ----

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
quiet = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@forks
@quiet
@pytest.mark.parametrize("begun", [False, True])
def test_after_a_fork_the_iterator_is_the_parents(begun):
    ahead = thread_group.Prefetch(tasks(*[1] * 6), 2)
    if begun:
        assert next(ahead) == 0
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                next(ahead)
            except RuntimeError as error:
                status = 0 if "fork" in str(error) else 2
            ahead.close()
            del ahead
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(ahead) == list(range(begun, 6))
