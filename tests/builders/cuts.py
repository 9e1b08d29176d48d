"""Calls that are killed: among the renames of a folder, without a process of their own; in a process, at any moment."""

import contextlib
import gc
import os
import signal
import warnings


class Killed(BaseException):
    """What a signal would do: no handler of errors runs for it."""


def survives(function, monkeypatch, count):
    """Whether a function ends before it makes so many calls that rename or remove a file.

    It is killed, so to say, before the next such call, and nothing is done after.
    """
    left = [count]

    def counted(call):
        def counting(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return call(*arguments, **options)

        return counting

    try:
        with monkeypatch.context() as patch:
            for name in ("replace", "rename", "unlink", "rmdir"):
                patch.setattr(os, name, counted(getattr(os, name)))
            function()
    except Killed:
        return False
    finally:
        gc.collect()  # files under construction, which remove themselves, before another function is killed
    return True


@contextlib.contextmanager
def killed_at_the_end(work):
    """Run ``work(report)`` in a forked process and yield the lines that it reports; kill it at the end of the block."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside the threads of NumPy's libraries
        child = os.fork()
    if child == 0:
        status = 1
        try:
            work(lambda text: os.write(write, f"{text}\n".encode()))
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    try:
        with os.fdopen(read) as reports:
            try:
                yield reports
            finally:
                os.kill(child, signal.SIGKILL)
    finally:
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
