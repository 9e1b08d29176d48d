"""A store on the network without the network: files in memory that count how they are read."""

import threading
import time

import safeload.remote
from builders.inside import LOCAL, RemoteStore, thread_group
from safeload.errors import UnsupportedError, missing_file

WINDOW = 128 << 10  # bytes of the first request for a file


class ServedStore(RemoteStore):
    """One file; see `Served`."""

    def __init__(self, served, path):
        super().__init__(path, (len(served.content[path]), served.versions.get(path, "v1")))
        self._served = served
        if served.head:
            self.keep(0, served.request(path, 0, min(served.head, self.size)))

    def read_spans(self, spans):
        begin = spans[0].offset
        content = self._served.request(self.path, begin, spans[-1].end)
        thread_group.fill(spans, begin, content)

    def confirm(self):
        self._served.confirmed.append(self.path)


class Served:
    """Files by URL, as `Files` has them.

    Args:
        content: bytes by URL.
        head: bytes that opening a file reads.
        latency: seconds that each request takes.

    Attributes:
        requests: (URL, first byte, one past the last) of each.
        most: the largest number of requests at a time.
        confirmed: URLs of the stores that were asked whether they have changed.
    """

    remote = True
    inside = False

    def __init__(self, content, *, head=128 << 10, latency=0.0):
        self.content, self.head, self.latency = dict(content), head, latency
        self.versions = {}
        self.requests, self.confirmed = [], []
        self.most = self._now = 0
        self._lock = threading.Lock()
        self.failing = {}

    @classmethod
    def folder(cls, path, root="mem://model", **options):
        """The files of a local folder."""
        return cls({f"{root}/{one.name}": one.read_bytes() for one in path.iterdir() if one.is_file()}, **options)

    def at(self, path):
        """What `safeload.open` takes."""
        return safeload.remote.Location(self, path)

    def request(self, path, begin, end):
        with self._lock:
            self.requests.append((path, begin, end))
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            if self.latency:
                time.sleep(self.latency)
            if path in self.failing:
                self.failing[path](begin, end)
            return self.content[path][begin:end]
        finally:
            with self._lock:
                self._now -= 1

    def nbytes(self):
        """Bytes of all requests."""
        return sum(end - begin for _, begin, end in self.requests)

    def open(self, path, window=WINDOW):
        if "://" not in path:
            return LOCAL.open(path)
        if path not in self.content:
            raise missing_file(path, f"No such file: {path}")
        return ServedStore(self, path)

    def is_folder(self, path):
        return any(one.startswith(path.rstrip("/") + "/") for one in self.content)

    def listing(self, folder):
        start = folder.rstrip("/") + "/"
        inside = [one.removeprefix(start) for one in self.content if one.startswith(start)]
        return sorted({(one.partition("/")[0], "/" in one) for one in inside})

    def join(self, folder, name):
        return f"{folder.rstrip('/')}/{name}"

    def split(self, path):
        folder, _, name = path.rstrip("/").rpartition("/")
        return folder, name

    def absolute(self, path):
        return path

    def shown(self, path):
        return path

    def public(self, path):
        return path

    def public_options(self):
        raise UnsupportedError("a store of this process")

    def check_unchanged(self, path, seen):
        pass

    def each(self, function, items):
        return thread_group.each(function, items)


def read(store, begin=WINDOW, end=None):
    """Bytes of a store, from behind its first window on."""
    memory = bytearray((store.size if end is None else end) - begin)
    store.read_into(begin, memory)
    return bytes(memory)
