"""Processes that are killed among the renames of a folder, without a process of their own."""

import gc
import os


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
