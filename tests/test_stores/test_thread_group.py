"""Threads that run tasks of a call: all at once or in order. They end with the call in every way there is."""

import functools
import itertools
import subprocess
import sys
import threading
import time

import pytest
from builders import inside
from builders.inside import thread_group
from builders.threads import threads

pytestmark = pytest.mark.inner

# Seconds: what is ended takes a few milliseconds, what is not 30 s, on machines of any speed.
SLEEP, SOON = 30, 15


def wait(condition):
    until = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


# ---- run ----


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_all_tasks_are_done(count):
    done = []
    thread_group.run((functools.partial(done.append, k) for k in range(count)), 8)
    assert sorted(done) == list(range(count))
    assert not threads()


def test_there_are_no_more_threads_than_tasks_and_than_the_limit():
    names, gate = set(), threading.Barrier(4)

    def task():
        names.add(threading.get_ident())
        gate.wait(SLEEP)

    thread_group.run([task] * 8, 4)
    assert len(names) == 4
    names.clear()
    thread_group.run([lambda: names.add(threading.get_ident())], 8)
    assert len(names) == 1


def test_the_first_error_is_raised_and_ends_the_others():
    ended = []

    def slow():
        try:
            thread_group.current().sleep(SLEEP)
        except thread_group.Stopped:
            ended.append(True)
            raise

    def bad():
        wait(lambda: len(threads()) >= 3)
        raise ValueError("first")

    begun = time.monotonic()
    with pytest.raises(ValueError, match="first") as caught:
        thread_group.run([slow, slow, bad, *[slow] * 100], 3)
    assert time.monotonic() - begun < SOON
    assert len(ended) == 2
    assert not threads()
    assert caught.value.__context__ is None


def test_an_error_of_the_tasks_themselves_is_raised():
    def tasks():
        yield lambda: None
        raise KeyError("tasks")

    with pytest.raises(KeyError, match="tasks"):
        thread_group.run(tasks(), 4)


def test_what_tick_raises_ends_the_tasks():
    def tick():
        raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        thread_group.run([lambda: thread_group.current().sleep(SLEEP)] * 4, 4, tick)
    assert time.monotonic() - begun < SOON
    assert not threads()


def test_tick_is_called_at_the_end():
    seen, done = [], []
    thread_group.run([lambda: done.append(1)], 1, lambda: seen.append(len(done)))
    assert seen[-1] == 1


def test_tasks_go_on_where_a_thread_cannot_be_started(monkeypatch):
    started = itertools.count()
    start = threading.Thread.start

    def some(self):
        if self.name == "safeload" and next(started) >= limit:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", some)
    limit, done = 2, []
    thread_group.run([lambda: done.append(1)] * 20, 8)
    assert len(done) == 20
    limit = 0
    with pytest.raises(RuntimeError, match="new thread"):
        thread_group.run([lambda: done.append(1)], 8)


def test_a_task_that_cannot_be_ended_is_not_waited_for_long(monkeypatch):
    inside.tune(monkeypatch, interrupt_grace=0.1)
    gate = threading.Event()
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        thread_group.run([lambda: gate.wait(SLEEP)], 1, lambda: 1 // 0)
    assert time.monotonic() - begun < SOON
    gate.set()
    wait(lambda: not threads())


def test_the_end_of_a_call_ends_those_within_it():
    begun = threading.Event()

    def inner():
        begun.set()
        thread_group.current().sleep(SLEEP)

    def tick():
        if begun.is_set():
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        thread_group.run([lambda: thread_group.each(lambda item: inner(), range(4))] * 2, 2, tick)
    assert time.monotonic() - start < SOON
    wait(lambda: not threads())


def test_ctrl_c_pressed_twice_still_waits_for_the_threads():
    code = inside.program("""
import _thread, os, signal, threading, time
from builders.inside import thread_group
signal.signal(signal.SIGINT, signal.default_int_handler)
written = []
def task():
    try:
        thread_group.current().sleep(30)
    finally:
        time.sleep(0.4)
        written.append(time.monotonic())
def press():
    for _ in range(2):
        time.sleep(0.2)
        _thread.interrupt_main() if os.name == "nt" else os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press).start()
try:
    thread_group.run([task], 1)
except KeyboardInterrupt:
    print(len(written))
""")
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "1\n", done.stderr


# ---- each ----


def test_results_come_in_the_order_of_items():
    assert thread_group.each(lambda item: (time.sleep(0.01 * (3 - item)), item)[1], range(4), 4) == [0, 1, 2, 3]
    assert thread_group.each(str, []) == []
    assert thread_group.each(str, [None, None]) == ["None", "None"]
    here = threading.get_ident()
    assert thread_group.each(lambda item: threading.get_ident(), [1]) == [here]
    assert here not in thread_group.each(lambda item: threading.get_ident(), [1, 2])


# ---- in_order ----


@pytest.mark.parametrize("count", [1, 2, 8])
def test_results_of_threads_come_in_the_order_of_items_and_few_calls_run_ahead(count):
    begun = []

    def call(item):
        begun.append(item)
        time.sleep(0.001 * (item % 3))
        return item

    results = thread_group.in_order(call, iter(range(100)), count)
    for expected in range(100):
        assert next(results) == expected
        assert len(begun) <= expected + 2 * count + 2
    assert list(results) == []
    assert not threads()


def test_an_error_comes_at_its_turn_and_closing_the_results_ends_the_calls():
    def call(item):
        if item == 3:
            raise ValueError("the fourth")
        return item

    results = thread_group.in_order(call, range(10), 4)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="the fourth"):
        next(results)
    assert not threads()
    results = thread_group.in_order(lambda item: thread_group.current().sleep(SLEEP) if item else item, range(10), 4)
    assert next(results) == 0
    begun = time.monotonic()
    results.close()
    assert time.monotonic() - begun < SOON
    assert not threads()


def test_results_come_although_only_some_threads_can_be_started(monkeypatch):
    started = itertools.count()
    start = threading.Thread.start

    def refuse(self):
        if self.name == "safeload" and next(started):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert list(thread_group.in_order(str, range(20), 4)) == [*map(str, range(20))]
    started = itertools.count()
    tasks = (thread_group.Task(1, lambda k=k: k) for k in range(20))
    assert list(thread_group.Prefetch(tasks, 5, workers=3)) == [*range(20)]


# ---- Stop ----


def test_a_stopped_wait_ends_at_once():
    ending = thread_group.Stop()
    threading.Timer(0.05, ending.stop).start()
    begun = time.monotonic()
    with pytest.raises(thread_group.Stopped):
        ending.sleep(SLEEP)
    assert time.monotonic() - begun < SOON
    for use in (ending.check, lambda: ending.sleep(0)):
        with pytest.raises(thread_group.Stopped):
            use()
    with pytest.raises(thread_group.Stopped), ending.filling():
        pytest.fail("it was entered")
    with pytest.raises(thread_group.Stopped), ending.aborting(lambda: None):
        pytest.fail("it was entered")


def test_a_stop_aborts_and_the_failure_is_that_of_the_stop():
    ending, broken = thread_group.Stop(), threading.Event()
    outcome = []

    def work():
        try:
            with ending.aborting(broken.set):
                broken.wait(SLEEP)
                raise OSError("connection reset")
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait(lambda: ending._aborts)
    ending.stop()
    thread.join()
    assert isinstance(outcome[0], thread_group.Stopped)
    assert not ending._aborts


def test_a_failure_without_a_stop_stays_what_it_is():
    with pytest.raises(OSError, match="reset"), thread_group.Stop().aborting(pytest.fail):
        raise OSError("reset")


def test_a_stop_waits_until_nothing_is_written():
    ending, events = thread_group.Stop(), []

    def work():
        with ending.filling():
            events.append("begun")
            time.sleep(0.1)
            events.append("written")

    thread = threading.Thread(target=work)
    thread.start()
    wait(lambda: events)
    ending.stop()
    assert events == ["begun", "written"]
    thread.join()


def test_each_thread_has_its_own_stop():
    ending = thread_group.Stop()
    before = thread_group.current()
    with thread_group.belonging(ending):
        assert thread_group.current() is ending
        with thread_group.belonging(before):
            assert thread_group.current() is before
        assert thread_group.current() is ending
        assert thread_group.each(lambda item: thread_group.current() is ending, [1, 2]) == [False, False]
    assert thread_group.current() is before
    thread_group.current().check()
    with thread_group.current().aborting(pytest.fail), thread_group.current().filling():
        thread_group.current().sleep(0)
