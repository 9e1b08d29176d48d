"""Runs jobs described in an array, as the C core takes them: in time slices, past the page cache if asked to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from ...base.arrays import Array
from ...base.native import TIER, Error, ffi, lib, private_buffer
from ...stores.local import Claim, direct_of, none_free
from .threads import thread_count
from .weight_file import WeightFile

# Length of one time slice in C, after which signals are handled and progress is reported.
SLICE_MS = 50
# The same past the page cache, where the disk has nothing to do from the end of a slice until all readers are back.
# Statistics of 1 GiB took 0.49 s in slices of 50 ms, 0.43 in these, 0.49 in those of 1 s.
DIRECT_SLICE_MS = 200

# What a job reads: a file, a handle that the caller keeps open, or None for memory.
JobFile = WeightFile | int | None


def struct_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a struct of the C core, with fields at the compiler's offsets; pointers are uint64."""
    kind = ffi.typeof(name)
    fields = [(field, info.offset, info.type) for field, info in kind.fields]
    codes = {"int32_t": "i4", "uint32_t": "u4", "int64_t": "i8", "uint64_t": "u8", "double": "f8"}
    return np.dtype(
        {
            "names": [field for field, _, _ in fields],
            "formats": ["u8" if of.kind == "pointer" else codes[of.cname] for _, _, of in fields],
            "offsets": [offset for _, offset, _ in fields],
            "itemsize": ffi.sizeof(kind),
        }
    )


# A job, with its fields in the order of `Job`.
JOB = struct_dtype("sl_job")[
    ["file", "offset", "memory", "size", "from", "to", "op", "grid", "channels", "packed", "direct"]
]


class Runner:
    """Runs groups of jobs, one after the other.

    Args:
        total: bytes of all of them.
        threads: None for `thread_count`'s choice.
        direct: whether files are read past the page cache where the system allows it.

    Attributes:
        refused: whether a file that was to be read past the page cache had to be read through it.
    """

    def __init__(self, total: int, threads: int | None, *, direct: bool = False) -> None:
        self.refused = False
        self._total = total
        self._threads = threads
        self._direct = direct
        self._room: Any = None

    def run(
        self,
        part: Array,
        files: Sequence[JobFile],
        done: int,
        report: Callable[[int], object],
        fail: Callable[[int, Any, int], None],
    ) -> int:
        """Run one group of jobs, in parts if the process may not have all of their files open at once.

        Args:
            part: the jobs, of `JOB`; the columns of files are filled here.
            files: the file of each; it is opened if its descriptor was closed.
            done: bytes of the groups before.
            report: called with the number of bytes moved, after each time slice.
            fail: raises the error of a status, of the core's error and of the index of the job that failed.

        Returns:
            Bytes of all groups so far.

        Raises:
            OSError: a file cannot be opened again.
        """
        begin = 0
        with Claim() as claim:
            while True:
                left = files[begin:] if begin else files
                held, whole = self._open(left, claim)
                if whole:
                    return self._run(part[begin:], left, held, done, report, fail, begin)
                end = begin + next(k for k, file in enumerate(left) if file not in held)
                done = self._run(part[begin:end], left[: end - begin], held, done, report, fail, begin)
                begin = end
                del held  # before others are opened

    def _open(self, files: Sequence[JobFile], claim: Claim) -> tuple[dict[JobFile, int], bool]:
        """Open as many files as the budget and the system allow, at least one; return whether these are all."""
        distinct = dict.fromkeys(files)
        each = 2 if self._direct else 1  # past the page cache a file has a second handle
        most = max(1, claim.share(each * len(distinct)) // each)
        held = claim.held
        try:
            for file in distinct if most >= len(distinct) else islice(distinct, most):
                held[file] = _descriptor(file)
        except OSError as error:
            if not held or not none_free(error):
                raise
        return held, len(held) == len(distinct)

    def _run(
        self,
        part: Array,
        files: Sequence[JobFile],
        held: Mapping[JobFile, int],
        done: int,
        report: Callable[[int], object],
        fail: Callable[[int, Any, int], None],
        first: int,
    ) -> int:
        """Run jobs whose files are open; ``first`` is the index of the first one in its group."""
        part["file"] = [held[file] for file in files]
        direct = self._open_direct(files, part) if self._direct else {}
        count = thread_count(self._total, self._threads, direct=bool(direct))
        slice_ms = DIRECT_SLICE_MS if direct else SLICE_MS
        described = ffi.from_buffer("sl_job[]", part)
        cursor = ffi.new("sl_cursor *")
        error = Error()
        if direct:
            part["direct"] = [direct.get(file, 0) for file in files]
            if self._room is None:
                self._room = ffi.from_buffer(private_buffer(count * lib.SL_DIRECT_ROOM))
            cursor.room, cursor.rooms = self._room, count
        while not cursor.finished:
            status = lib.sl_jobs_run(described, len(part), TIER, count, slice_ms, cursor, error)
            if status != lib.SL_OK:
                fail(status, error, first + cursor.failed_job)
            report(done + cursor.bytes_done)
        return done + int(cursor.bytes_done)

    def _open_direct(self, files: Sequence[JobFile], part: Array) -> dict[JobFile, int]:
        """Handles for reads past the page cache, for as long as the dict lives.

        Args:
            files: of the jobs.
            part: the jobs.
        """
        plain = (part["grid"] == 0) & (part["packed"] == 0) & (part["size"] > 0)
        some = dict.fromkeys(file for file, one in zip(files, plain.tolist(), strict=True) if one)
        asked = {file: direct_of(file.store) for file in some if isinstance(file, WeightFile)}
        self.refused |= None in asked.values()
        return {file: handle for file, handle in asked.items() if handle is not None}


def _descriptor(file: JobFile) -> int:
    if file is None:
        return int(lib.SL_MEMORY)
    return file.descriptor if isinstance(file, WeightFile) else file
