"""``safeload bench``: time a file on this machine, with safeload and with other installed libraries."""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from ..base import dtypes
from ..base.layout import table
from ..base.text import plural, printable, size
from ..checkpoint import Checkpoint, codes_of
from ..formats.registry import row_of
from ..stores.url import is_url
from .common import STATUS, add_json, add_opening, add_path, columns, open_path, painter, positive
from .streams import refuse

_EPILOG = f"""examples:
  safeload bench model.safetensors
  safeload bench Llama-3.2-1B/ --rounds 9
  safeload bench model.pth --json

Times are medians. A ratio is the time of another library divided by safeload's time. Every round runs all libraries in
random order, with a warm page cache.

{STATUS}"""

Side = Callable[[], Any]

# The side that must never fail.
OURS = "safeload"
RATIO = "ratio (>1: safeload is faster)"


def register(parser: Any) -> None:
    """Add the arguments to the parser of the command."""
    parser.description = (
        "Time opening, loading and converting a file with safeload and with other installed libraries that "
        "can read it: safetensors.numpy, torch, gguf, numpy."
    )
    parser.epilog = _EPILOG
    add_path(parser, stdin=False)
    parser.add_argument("--rounds", metavar="N", type=positive, default=5, help="number of rounds; default: 5")
    add_opening(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Time ``options.path`` and return the exit status."""
    refuse(options.path, "bench times files")
    if is_url(options.path):
        raise ValueError("bench cannot time a URL; download the checkpoint first")
    with open_path(options.path, options) as opened:
        files, nbytes, format = list(opened.files), opened.nbytes, opened.format
        dtype_rows = [dtypes.BY_CODE.get(info.dtype) for info in opened.tensors.values()]
        floating = all(row is not None and row.floating for row in dtype_rows)
        floating = floating and not codes_of(opened)
    jobs = _jobs(options, files, format, floating=floating)
    _warm(files)
    results = [(job, _race(sides, options.rounds)) for job, sides in jobs.items()]
    if options.json:
        rows = [
            {"job": job, "side": side, "seconds": statistics.median(taken), "samples": taken}
            for job, sides in results
            for side, taken in sides.items()
        ]
        print(json.dumps({"path": options.path, "format": format, "nbytes": nbytes, "rows": rows}, indent=1))
        return 0
    paint = painter()
    print(f"{printable(options.path)}: {format}, {size(nbytes)}, {plural(options.rounds, 'round')}, page cache warm")
    cells = []
    for job, sides in results:
        ours = statistics.median(sides[OURS])
        for side, taken in sides.items():
            other = statistics.median(taken)
            ratio = "" if side == OURS else f"{other / ours:.3g}"
            cells.append((job if side == OURS else "", side, _seconds(other), ratio))
    header = ("job", "with", "median", RATIO)
    lines = table(header, cells, right=frozenset((2,)), columns=None)
    room = columns()
    fits = room is None or len(lines[0]) <= room
    print()
    print(paint(lines[0] if fits else lines[0].replace(RATIO, "ratio"), "head"))
    for line in lines[1:]:
        print(line)
    if not fits:
        print(f"\n{RATIO}")
    if all(len(taken) == 1 for _, taken in results):
        print("\nno other library that reads this format is installed")
    return 0


def _jobs(options: argparse.Namespace, files: list[str], format: str, *, floating: bool) -> dict[str, dict[str, Side]]:
    """Return the jobs to time: name to sides, safeload first."""

    def opened(action: Callable[[Checkpoint], Any]) -> Side:
        def side() -> Any:
            with open_path(options.path, options) as checkpoint:
                return action(checkpoint)

        return side

    jobs: dict[str, dict[str, Side]] = {
        "open and list": {OURS: opened(lambda c: list(c))},
        "load": {OURS: opened(lambda c: c.load())},
        "load, read every page": {OURS: opened(lambda c: _touch(c.load()))},
        "load into memory (pread)": {OURS: opened(lambda c: c.load(backend="pread"))},
    }
    if floating:
        jobs["load as float32"] = {OURS: opened(lambda c: c.load(dtype="float32"))}
    for name, action in _peers(files, format).items():
        jobs["load"][name] = action
        jobs["load into memory (pread)"][name] = action
        jobs["load, read every page"][name] = _touching(action)
    lister = _lister(files, format)
    if lister is not None:
        jobs["open and list"][lister[0]] = lister[1]
    if floating and format == "safetensors" and "safetensors.numpy" in jobs["load"]:
        peer = jobs["load"]["safetensors.numpy"]
        jobs["load as float32"]["safetensors.numpy"] = lambda: {
            name: array.astype("float32") for name, array in peer().items()
        }
    return jobs


def _touching(action: Side) -> Side:
    return lambda: _touch(action())


def _lister(files: list[str], format: str) -> tuple[str, Side] | None:
    if format != "safetensors":
        return None
    try:
        safe_open = _real_safetensors().safe_open
    except ImportError:
        return None

    def side() -> list[str]:
        names = []
        for path in files:
            with safe_open(path, "numpy") as handle:
                names += handle.keys()
        return names

    return "safetensors.safe_open", side


def _peers(files: list[str], format: str) -> dict[str, Side]:
    """Return another library's loader for all tensors of the files, as NumPy arrays if possible."""
    peer = row_of(format).peer
    try:
        load = None if peer is None else _PEERS[peer]()
    except ImportError:
        load = None
    if peer is None or load is None:
        return {}

    def side() -> dict[str, Any]:
        result: dict[str, Any] = {}
        for path in files:
            result.update(load(path))
        return result

    return {peer: side}


def _real_safetensors() -> Any:
    """Return the package safetensors, with its module numpy.

    Raises:
        ImportError: it is not installed, or safeload is in its place.
    """
    import ml_dtypes  # noqa: F401 - registers bfloat16 for safetensors.numpy
    import safetensors.numpy

    from ..compat.alias import is_alias

    if is_alias(safetensors):
        raise ImportError("safeload is in the place of safetensors")
    return safetensors


def _safetensors() -> Callable[[str], Any]:
    load_file: Callable[[str], Any] = _real_safetensors().numpy.load_file
    return load_file


def _torch() -> Callable[[str], Any]:
    import torch

    return lambda path: {path: torch.load(path, "cpu", weights_only=True)}


def _gguf() -> Callable[[str], Any]:
    from gguf import GGUFReader

    return lambda path: {t.name: t.data for t in GGUFReader(path).tensors}


def _numpy() -> Callable[[str], Any]:
    import numpy as np

    def load(path: str) -> dict[str, Any]:
        content = np.load(path)
        return {path: content} if isinstance(content, np.ndarray) else dict(content)

    return load


_PEERS = {"safetensors.numpy": _safetensors, "torch.load": _torch, "gguf.GGUFReader": _gguf, "numpy.load": _numpy}


def _touch(value: Any) -> int:
    """Read a byte of every page of every array."""
    import numpy as np

    if isinstance(value, dict):
        return sum(_touch(item) for item in value.values())
    if hasattr(value, "numpy"):  # a torch tensor
        import torch

        value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    array = getattr(value, "data", None) if not isinstance(value, np.ndarray) else value
    if not isinstance(array, np.ndarray) or array.size == 0:
        return 0
    return int(np.ascontiguousarray(array).reshape(-1).view(np.uint8)[::4096].sum())


def _warm(files: list[str]) -> None:
    """Read the files into the page cache."""
    buffer = bytearray(4 << 20)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _race(sides: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    """Time each side in every round; an untimed first round drops peers that cannot read the file."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    shuffle = random.Random(rounds).shuffle
    for turn in range(rounds + 1):
        order = list(taken)
        shuffle(order)
        for name in order:
            gc.collect()
            started = time.perf_counter()
            try:
                result = sides[name]()
            except Exception:  # other libraries raise arbitrary exceptions
                if name == OURS or turn:
                    raise
                del taken[name]
                continue
            seconds = time.perf_counter() - started
            del result
            if turn:
                taken[name].append(seconds)
    return taken


def _seconds(value: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"
