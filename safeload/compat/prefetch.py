"""``PrefetchLoader``: the tensors of a file on their way to a device, compatible with safetensors 0.9."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from types import TracebackType
from typing import Any

from ..base.messages import error_about
from ..base.text import clip, plural, printable, show
from ..engine.run.weight_file import WeightFile
from ..errors import RangeError, SafetensorError, exported, public
from ..stores.thread_group import Prefetch, Task


@exported()
class PrefetchLoader:
    """Tensors that threads load onto a device in the background. Each is returned once, by `take` or iteration.

    `safe_open.prefetch` makes it. A tensor owns its memory and is ready for use on any stream. Tensors that are not
    taken stay on the device until `close`, the end of a ``with`` block, or the last reference to the loader.

    Args:
        names: of the tensors, in file order.
        arrivals: yields name, tensor, and a function that waits until the tensor's bytes have been copied. It is
            advanced in another thread.

    Example:
        >>> from safeload import safe_open
        >>> with safe_open("model.safetensors", framework="pt") as file:  # doctest: +SKIP
        ...     with file.prefetch({"conv1.bias": None}, device="cuda") as loader:
        ...         bias = loader.take("conv1.bias")
    """

    def __init__(self, names: list[str], arrivals: Generator[tuple[str, Any, Callable[[], object]]]) -> None:
        self._names = names
        self._arrivals = arrivals
        self._left = dict.fromkeys(names)  # not taken
        self._landed: dict[str, tuple[Any, Callable[[], object]]] = {}  # waiting to be taken
        self._lock = threading.Lock()  # of the thread that takes arrivals
        self._closed = False
        # The last task finds the end, where the iterator waits for its copies.
        steps = (Task(0, lambda check: next(arrivals, None)) for _ in range(len(names) + 1))
        self._arriving: Prefetch[tuple[str, Any, Callable[[], object]] | None] = Prefetch(steps, 0)
        self._arriving.start()

    def names(self) -> list[str]:
        """Return the names of all tensors that this loader hands out, in file order."""
        return list(self._names)

    @public
    def take(self, name: str) -> Any:
        """Return a tensor, after waiting for its bytes.

        Raises:
            SafetensorError: the name is not in the plan, the tensor was taken before, or the loader is closed.
            FormatError, OSError: the file ends too early, or cannot be read.
        """
        if name not in self._left:
            state = "was already delivered" if name in self._names else "is not in the prefetch plan"
            raise error_about(SafetensorError, state, tensor=name)
        while name not in self._landed and self._land():
            pass
        return self._hand_out(name)

    @public
    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield name and tensor as they arrive, without the tensors that were taken."""
        while self._left:
            name = next(iter(self._landed), None)
            if name is not None:
                yield name, self._hand_out(name)
            elif not self._land():
                return

    def _land(self) -> bool:
        """Wait for the next arrival; return False if another thread got the last one."""
        with self._lock:
            self._check_open()
            try:
                arrival = next(self._arriving, None)
            except ValueError:
                self._check_open()  # closed while this thread waited
                raise
            if arrival is not None:
                name, tensor, wait = arrival
                self._landed[name] = tensor, wait
        return arrival is not None

    def _hand_out(self, name: str) -> Any:
        self._check_open()
        try:
            tensor, wait = self._landed.pop(name)
        except KeyError:  # another thread was faster
            raise error_about(SafetensorError, "was already delivered", tensor=name) from None
        del self._left[name]
        wait()
        return tensor

    def _check_open(self) -> None:
        if self._closed:
            raise SafetensorError("the prefetch loader is closed")

    def close(self) -> None:
        """Stop loading, and release the tensors that were not taken."""
        self._closed = True
        self._arriving.close()
        self._arrivals.close()  # no thread is in it any more
        self._landed.clear()

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._left)} left"
        return f"<{type(self).__name__}: {plural(len(self._names), 'tensor')}, {state}>"


def planned_rows(file: WeightFile, plan: Mapping[str, slice | None]) -> dict[str, range | None]:
    """Check a plan against a file and return the rows of each tensor; None for the whole tensor."""
    if not isinstance(plan, Mapping):
        raise SafetensorError(f"a prefetch plan maps names to None or a slice, got {type(plan).__name__}")
    rows: dict[str, range | None] = {}
    for name, value in plan.items():
        if not isinstance(name, str):
            raise SafetensorError(f"prefetch plan keys must be tensor names, got {type(name).__name__}")
        index = file.table.index(name)
        if value is None:
            rows[name] = None
        elif isinstance(value, slice):
            rows[name] = _rows(name, value, file, index)
        else:
            kind = clip(printable(type(value).__name__), 100)
            raise SafetensorError(f"prefetch plan values must be None or a slice, got {kind} for {show(name)}")
    if not rows:
        raise SafetensorError("the prefetch plan selects no tensors")
    return rows


def _rows(name: str, value: slice, file: WeightFile, index: int) -> range:
    """Return the rows that a slice of a plan selects. NumPy would clamp bounds; in a plan they are mistakes."""
    shape, (begin, end) = file.table.shape(index), file.table.byte_range(index)
    if not shape:
        raise SafetensorError(f"cannot slice rows of the 0-d tensor {show(name)}")
    for side, bound in (("start", value.start), ("stop", value.stop)):
        if bound is None:
            continue
        if isinstance(bound, bool) or not isinstance(bound, int):
            raise SafetensorError(f"prefetch plan slice bounds for {show(name)} must be integers or None")
        if not -shape[0] <= bound <= shape[0]:
            raise RangeError(
                f"prefetch plan slice {side} {show(bound)} for {show(name)} is out of range for {shape[0]} rows"
            )
    try:
        start, stop, step = value.indices(shape[0])
    except (TypeError, ValueError) as error:
        raise SafetensorError(f"invalid prefetch plan slice for {show(name)}: {error}") from None
    if step != 1:
        raise SafetensorError(f"prefetch plan slices must have step 1, got {show(step)} for {show(name)}")
    if shape[0] and (end - begin) % shape[0]:
        raise SafetensorError(f"cannot slice rows of {show(name)}: a row is not a whole number of bytes")
    return range(start, max(start, stop))
