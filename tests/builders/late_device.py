"""A stand-in for a device of torch."""

import threading
import time
import weakref
from queue import SimpleQueue

import torch

from builders.inside import torch_devices


class Late(torch_devices.Copies):
    """A device that copies behind the caller's back, late, and reads the buffer only then."""

    def __init__(self, delay=0.002):
        super().__init__(torch.device("cpu"), False)
        self.queue = SimpleQueue()
        self.done = {}
        self.lock = threading.Condition()
        self.delay = delay
        self.finished = 0
        self.buffers = []
        self.tensors = []
        self.converted = []
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while (work := self.queue.get()) is not None:
            time.sleep(self.delay)
            work()

    def buffer(self, nbytes):
        self.buffers.append(super().buffer(nbytes))
        return self.buffers[-1]

    def empty(self, shape, dtype):
        tensor = super().empty(shape, dtype)
        self.tensors.append(weakref.ref(tensor))
        return tensor

    def copy(self, destinations, buffer, places):
        work = super().copy
        self.queue.put(lambda: work(destinations, buffer, places))

    def convert(self, destination, source):
        self.converted.append((source.dtype, destination.dtype))
        self.queue.put(lambda: destination.copy_(source))

    def started(self, number):
        with self.lock:
            self.done[number] = False

        def end():
            with self.lock:
                self.done[number] = True
                self.lock.notify_all()

        self.queue.put(end)

    def wait(self, number):
        with self.lock:
            assert self.lock.wait_for(lambda: self.done.get(number, True), 30)

    def finish(self):
        over = threading.Event()
        self.queue.put(over.set)
        assert over.wait(30)
        self.finished += 1
