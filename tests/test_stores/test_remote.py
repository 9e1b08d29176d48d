"""What stores on a network have in common: windows for small reads, what is read ahead, and reads past the end."""

import copy
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from builders import inside
from builders.inside import RemoteStore, local
from builders.remote import WINDOW, Served

import safeload
import safeload.numpy
from safeload import FormatError

CONTENT = os.urandom(1 << 20)


class Store(RemoteStore):
    """Counts requests."""

    def __init__(self, content=CONTENT, **options):
        super().__init__("test://a", (len(content), None), **options)
        self.content = content
        self.requests = []
        self.lock = threading.Lock()

    def read_spans(self, spans):
        with self.lock:
            self.requests.append((spans[0].offset, spans[-1].end))
        for span in spans:
            span.memory[:] = self.content[span.offset : span.end]


def test_small_reads_are_answered_from_windows():
    store = Store()
    assert store.read_at(0, 8) == CONTENT[:8]
    assert store.read_at(8, 100_000) == CONTENT[8:100_008]
    assert store.requests == [(0, WINDOW)]
    assert store.read_at(WINDOW - 1, 2) == CONTENT[WINDOW - 1 : WINDOW + 1]
    assert store.requests[1:] == [(WINDOW, 2 * WINDOW)]


def test_windows_grow_from_the_size_of_the_first():
    """A header that is a little longer than a small first window costs few bytes more."""
    store = Store(window=1000)
    assert store.read_at(0, 8) == CONTENT[:8]
    assert store.read_at(500, 2000) == CONTENT[500:2500]
    assert store.read_at(4000, 2000) == CONTENT[4000:6000]
    assert store.requests == [(0, 1000), (1000, 5000), (5000, 21_000)]
    assert store.read_at(30_000, 8) == CONTENT[30_000:30_008]
    assert store.requests[3:] == [(30_000, 30_000 + WINDOW)]
    store = Store(window=2 * WINDOW)
    assert store.read_at(len(CONTENT) - 1, 1) == CONTENT[-1:]
    assert store.requests == [(len(CONTENT) - 2 * WINDOW, len(CONTENT))]


def test_the_window_at_the_end_reaches_back():
    store = Store()
    assert store.read_at(len(CONTENT) - 22, 100) == CONTENT[-22:]
    assert store.read_at(len(CONTENT) - 70_000, 10) == CONTENT[-70_000:-69_990]
    assert store.requests == [(len(CONTENT) - WINDOW, len(CONTENT))]


def test_reads_larger_than_a_window_take_one_request():
    store = Store()
    assert store.read_at(5, 500_000) == CONTENT[5:500_005]
    assert store.requests == [(5, 500_005)]


@pytest.mark.parametrize(("offset", "size"), [(len(CONTENT), 1), (len(CONTENT) + 5, 7), (3, 0), (3, -1)])
def test_there_is_nothing_past_the_end(offset, size):
    store = Store()
    assert store.read_at(offset, size) == b""
    assert store.requests == []


def test_reading_into_memory_past_the_end_is_an_error():
    store = Store()
    with pytest.raises(FormatError, match=r"the file ends at byte 1048576 \(test://a, byte 1048576\)"):
        store.read_into(len(CONTENT) - 3, bytearray(4))
    store.read_into(len(CONTENT) + 100, bytearray(0))
    assert store.requests == []


def test_memory_of_any_kind_is_filled():
    store = Store()
    array = np.zeros((4, 8), np.float64)
    store.read_into(7, array)
    assert array.tobytes() == CONTENT[7 : 7 + 256]
    store.read_into(9, memoryview(array)[1:2])
    assert array[1].tobytes() == CONTENT[9 : 9 + 64]


def test_windows_are_dropped_but_not_a_whole_file():
    store = Store()
    store.read_at(0, 1)
    store.settle()
    assert store.held(0, 1) is None
    small = Store(CONTENT[:1000])
    small.read_at(0, 1)
    small.settle()
    assert small.held(0, 1000) == CONTENT[:1000]
    small.close()
    assert small.held(0, 1) is None
    empty = Store(b"")
    empty.settle()
    assert empty.read_at(0, 10) == b""


def test_what_is_read_ahead_is_read_together():
    store = Store()
    store.keep(0, CONTENT[:1000])
    store.prefetch([(600_000, 600_010), (0, 500), (200_000, 200_500), (230_000, 230_001), (900_000, 9_000_000), (5, 5)])
    assert sorted(store.requests) == [(200_000, 230_001), (600_000, 600_010), (900_000, len(CONTENT))]
    store.requests.clear()
    assert store.read_at(900_000, 100) == CONTENT[900_000:900_100]
    assert store.read_at(230_000, 1) == CONTENT[230_000:230_001]
    assert store.requests == []


def test_what_is_read_ahead_takes_no_memory_for_what_is_between():
    """The headers of an archive with a million small entries would bring all of it."""
    size = 64 << 20
    store = Store(bytes(size))
    store.prefetch([(at, at + 500) for at in range(0, size, 60_000)])
    assert max(end - begin for begin, end in store.requests) <= 8 << 20
    assert len(store.requests) == 8
    assert sum(len(content) for _, content in store._windows) == 500 * -(-size // 60_000)
    store.requests.clear()
    assert store.read_at(600_000, 500) == bytes(500)
    assert store.requests == []


def test_threads_may_read_while_others_fetch():
    store = Store()
    store.prefetch([(k * 100_000 % len(CONTENT), k * 100_000 % len(CONTENT) + 1) for k in range(100)])
    failures = []

    def work(seed):
        generator = np.random.default_rng(seed)
        try:
            for _ in range(300):
                at = int(generator.integers(len(CONTENT)))
                assert store.read_at(at, 10) == CONTENT[at : at + 10]
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


def test_a_window_that_another_thread_has_filled_meanwhile_gives_no_more_than_was_asked_for(monkeypatch):
    store = Store()
    held = store.held

    def late(offset, size):
        found = held(offset, size)
        store.keep(0, CONTENT[:WINDOW])
        return found

    monkeypatch.setattr(store, "held", late)
    assert store.read_at(5, 10) == CONTENT[5:15]


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_stores_are_not_copied(way):
    with pytest.raises(TypeError, match="test://a: an open file cannot be copied or pickled"):
        way(Store())


def test_a_span_knows_its_end():
    assert local.Span(5, memoryview(bytearray(3))).end == 8


@pytest.mark.parametrize("size", [5, 100_000])
@pytest.mark.parametrize("where", ["memory", "local"])
def test_a_closed_checkpoint_gives_nothing_more_not_even_what_came_with_the_first_request(size, where, tmp_path):
    content = safeload.numpy.save({"w": np.arange(float(size))})
    (tmp_path / "a.safetensors").write_bytes(content)
    store = Served({"mem://m/a.safetensors": content})
    opened = safeload.open(tmp_path / "a.safetensors" if where == "local" else store.at("mem://m/a.safetensors"))
    rows, stream = opened.get_slice("w"), opened.stream()
    opened.close()
    store.requests.clear()
    for use in (
        lambda: opened["w"],
        opened.load,
        lambda: rows[:3],
        lambda: pickle.dumps(rows),
        lambda: copy.copy(rows),
        lambda: list(stream),
        lambda: safeload.stats(opened),
        lambda: safeload.check(opened),
        lambda: safeload.load_quantized(opened, "int8"),
        lambda: safeload.convert(opened, tmp_path / "b.safetensors"),
    ):
        with pytest.raises(ValueError, match=r"a\.safetensors is closed"):
            use()
    assert not store.requests


# ---- forks ----

FORKED = inside.program("""
import os, signal, sys, threading, warnings
warnings.simplefilter("ignore")
from builders.inside import RemoteStore
from builders.remote import WINDOW

class Store(RemoteStore):
    def read_spans(self, spans):
        for offset, memory in spans:
            memory[:] = bytes(k % 251 for k in range(offset, offset + len(memory)))

def right(begin):
    assert store.read_at(begin, 5) == bytes(k % 251 for k in range(begin, begin + 5))

class Slow(list):
    def insert(self, *arguments):
        hold_up()
        super().insert(*arguments)
    def clear(self):
        hold_up()
        super().clear()

def hold_up():
    if threading.get_ident() == thread.ident:
        begun.set()
        ended.wait(20)

store, begun, ended = Store("memory://x", (10 * WINDOW,)), threading.Event(), threading.Event()
right(0)
right(5 * WINDOW)
store._windows = Slow(store._windows)
thread = threading.Thread(target={work})
thread.start()
begun.wait(20)
child = os.fork()
if child == 0:
    signal.alarm(10)
    for begin in (0, 3 * WINDOW, 5 * WINDOW, 7 * WINDOW, 0, 3 * WINDOW):
        right(begin)
    store.settle()
    right(0)
    store.close()
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
ended.set()
thread.join()
right(3 * WINDOW)
print(status)
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("work", ["lambda: right(3 * WINDOW)", "store.settle"])
def test_a_child_reads_although_a_thread_of_its_parent_held_the_lock(work):
    program = FORKED.replace("{work}", work)
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0\n", "")
