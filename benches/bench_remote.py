"""Files behind URLs: listing, loading, converting, against downloads; on links of 1 Gbit/s with 5 and 50 ms of latency.

The servers are those of the tests, in processes of their own. `SAFELOAD_BENCH_LAYERS=20` has a model of 2.4 GB instead
of 0.6 GB.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import files
import numpy as np
import pytest
import remote_jobs as jobs
from compare import Comparison, race, release, same_arrays, same_bytes

import safeload

for package in ("urllib3", "fsspec", "aiohttp", "huggingface_hub"):
    pytest.importorskip(package)

ROUNDS = 3
LAYERS = int(os.environ.get("SAFELOAD_BENCH_LAYERS", "5"))
GBIT = 125e6  # bytes per second of 1 Gbit/s
ROOM = 256 << 20
TESTS = Path(__file__).resolve().parent.parent / "tests"
LINK = "limit: the link"
SOCKETS = "limit: bare sockets"
FSSPEC, OBSTORE = "fsspec.cat, np.frombuffer", "obstore.get, np.frombuffer"
HUB = "huggingface_hub.snapshot_download, load_file"

Sides = dict[str, Callable[[], Any]]


class Remote:
    """A server in a process of its own.

    Attributes:
        url: of the folder that it serves; of the Hub.
        process: it.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"builders.{module}", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.url = self._line().strip()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def link(self, latency: float = 0.0, bandwidth: float | None = None) -> None:
        """Sets seconds before each answer, and bytes per second."""
        self.told(latency=latency, bandwidth=bandwidth)

    def told(self, **attributes: Any) -> dict[str, int]:
        """What was counted since the last time; sets attributes."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(attributes) + "\n")
        self.process.stdin.flush()
        return json.loads(self._line())


@contextmanager
def served(module: str, folder: Path, *arguments: str) -> Iterator[Remote]:
    for path in folder.iterdir():
        if path.is_file() and "sparse" not in folder.name and folder != files.CACHE:
            files.warm(path)
    remote = Remote(module, str(folder), *arguments)
    try:
        yield remote
    finally:
        remote.process.stdin.close()
        remote.process.wait(10)


@pytest.fixture(scope="module")
def model() -> Path:
    folder = files.remote_folder(LAYERS)
    if files.available_memory() < 6 * nbytes(folder):
        pytest.skip("needs six times the model of memory: the page cache, results of two sides, and room")
    return folder


@pytest.fixture(scope="module")
def web(model: Path) -> Iterator[Remote]:
    with served("http_server", model) as remote:
        yield remote


@pytest.fixture(scope="module")
def hub(model: Path) -> Iterator[Remote]:
    # No Xet: the stand-in has files, and so have servers that are no Hub.
    os.environ.update(HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    with served("hub", model, jobs.REPOSITORY) as remote:
        yield remote


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def named(latency: float, bandwidth: float | None) -> str:
    return f"{'1 Gbit/s' if bandwidth else 'no limit'}, {latency * 1000:g} ms"


def prepare(size: int = 0) -> None:
    jobs.empty()
    release()
    if size:
        files.settle(size)


def by_link(samples: list[float], size: float) -> Comparison:
    """With the time that a link of 1 Gbit/s takes for bytes."""
    return Comparison(samples, [size / GBIT] * len(samples))


def same(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    """The same arrays, where one side may have converted BF16 to F32."""
    assert sorted(ours) == sorted(theirs)
    for name, array in ours.items():
        other = theirs[name]
        assert array.shape == other.shape, name
        if array.dtype == other.dtype:
            assert same_bytes(array, other), name
        else:
            assert same_bytes(array, other.astype(array.dtype)), name


def equal(ours: Any, theirs: Any) -> None:
    assert ours == theirs


LINKS = [(0.005, GBIT), (0.05, GBIT)]


# ---- listing ----


@pytest.mark.parametrize("link", LINKS, ids=lambda link: named(*link))
def test_listing(hub: Remote, web: Remote, link: tuple[float, float], table, report) -> None:
    hub.link(*link)
    web.link(*link)
    job, ours = f"list a model of 5 shards on the Hub, {named(*link)}", partial(jobs.listing_hf, hub.url)
    rows = []
    peer = "huggingface_hub.get_safetensors_metadata"
    sides: Sides = {"ours": ours, peer: partial(jobs.listing_hub, hub.url)}
    samples = race(sides, 3 * ROUNDS, check=equal)
    rows.append(table.add(job, peer, Comparison(samples["ours"], samples[peer]), target=1.1))
    peer = "huggingface_hub.snapshot_download, safe_open"
    sides = {"ours": ours, peer: partial(jobs.listing_downloaded, hub.url)}
    samples = race(sides, ROUNDS, check=equal, prepare=prepare)
    rows.append(table.add(job, peer, Comparison(samples["ours"], samples[peer]), target=20))
    sides = {"ours": partial(jobs.listing, web.url), "fsspec": partial(jobs.listing_fsspec, web.url)}
    samples = race(sides, 3 * ROUNDS, check=equal)
    job = f"list a model of 5 shards by the URL of its index, {named(*link)}"
    peer = "fsspec: index, lengths, headers by cat_ranges"
    rows.append(table.add(job, peer, Comparison(samples["ours"], samples["fsspec"]), target=1))
    report(sides["ours"], rows, rounds=ROUNDS)


# ---- loading ----


@pytest.mark.parametrize("link", [*LINKS, (0.05, None)], ids=lambda link: named(*link))
def test_load(web: Remote, model: Path, link: tuple[float, float | None], table, report) -> None:
    web.link(*link)
    size = nbytes(model)
    sides: Sides = {"ours": partial(jobs.load, web.url), FSSPEC: partial(jobs.load_fsspec, web.url)}
    if link[1] is None and find_spec("obstore") is not None:  # all are as fast as a slow link
        sides[OBSTORE] = partial(jobs.load_obstore, web.url)
    samples = race(sides, ROUNDS, check=same_arrays, prepare=lambda: prepare(2 * size))
    job = f"load {size / 1e9:.1f} GB, {named(*link)}"
    rows = [table.add(job, p, Comparison(samples["ours"], samples[p]), target=1) for p in list(sides)[1:]]
    if link[1]:
        rows.append(table.add(job, LINK, by_link(samples["ours"], size), target=0.9))
    report(sides["ours"], rows, rounds=1)


def test_load_as_f32(web: Remote, model: Path, table, report) -> None:
    link = LINKS[0]
    web.link(*link)
    size = nbytes(model)
    plain = "without conversion"
    sides: Sides = {
        "ours": partial(jobs.load_f32, web.url),
        plain: partial(jobs.load, web.url),
        f"{FSSPEC}, astype": partial(jobs.load_fsspec_f32, web.url),
    }
    samples = race(sides, ROUNDS, check=same, prepare=lambda: prepare(3 * size))
    job = f"load {size / 1e9:.1f} GB of BF16 as F32, {named(*link)}"
    rows = [
        table.add(job, p, Comparison(samples["ours"], samples[p]), target=0.95 if p == plain else 1)
        for p in list(sides)[1:]
    ]
    rows.append(table.add(job, LINK, by_link(samples["ours"], size), target=0.9))
    report(sides["ours"], rows, rounds=1)


def test_load_from_the_hub(hub: Remote, model: Path, table, report) -> None:
    link = LINKS[0]
    hub.link(*link)
    size = nbytes(model)
    sides: Sides = {"ours": partial(jobs.load_hf, hub.url), HUB: partial(jobs.load_downloaded, hub.url)}
    samples = race(sides, ROUNDS, check=same_arrays, prepare=lambda: prepare(2 * size))
    job = f"load {size / 1e9:.1f} GB from the Hub, {named(*link)}"
    rows = [table.add(job, HUB, Comparison(samples["ours"], samples[HUB]), target=1)]
    rows.append(table.add(job, LINK, by_link(samples["ours"], size), target=0.9))
    report(sides["ours"], rows, rounds=1)


@pytest.mark.parametrize("link", LINKS, ids=lambda link: named(*link))
def test_one_layer(web: Remote, model: Path, link: tuple[float, float], table, report) -> None:
    web.link(*link)
    pattern = "model.layers.1.*"
    sides: Sides = {
        "ours": partial(jobs.load, web.url, only=pattern),
        "fsspec": partial(jobs.some_fsspec, web.url, pattern),
    }
    samples = race(sides, ROUNDS, check=same_arrays)
    size = sum(array.nbytes for array in jobs.load(web.url, only=pattern).values())
    job = f"one layer of a model, {size / 1e6:.0f} MB, {named(*link)}"
    peer = "fsspec: headers, then cat_ranges"
    rows = [
        table.add(job, peer, Comparison(samples["ours"], samples["fsspec"]), target=1),
        table.add(job, LINK, by_link(samples["ours"], size)),
    ]
    report(sides["ours"], rows, rounds=ROUNDS)


def test_one_tensor(table, report) -> None:
    path, name = files.sparse_file(), "model.layers.300.weight"
    with served("http_server", path.parent) as remote:
        url = f"{remote.url}/{path.name}"
        remote.link(*LINKS[0])

        def ours() -> dict[str, np.ndarray]:
            with safeload.open(url) as checkpoint:
                return {name: checkpoint[name]}

        sides: Sides = {"ours": ours, "fsspec": partial(jobs.some_fsspec, remote.url, name, [url])}
        samples = race(sides, 3 * ROUNDS, check=same_arrays)
        header, begin = files.header_of(path)
        low, high = header[name]["data_offsets"]
        counted = []
        for _ in range(ROUNDS):
            remote.told()
            ours()
            counted.append(float(remote.told()["sent"] - begin - (high - low)))
        job = f"one tensor of 8 MiB from a file of 5 GB, {named(*LINKS[0])}"
        peer = "fsspec: header, then cat_ranges"
        rows = [
            table.add(job, peer, Comparison(samples["ours"], samples["fsspec"]), target=1),
            table.add(
                "one tensor of 8 MiB from a file of 5 GB, bytes sent beside the header and it",
                "1 MiB",
                Comparison(counted, [float(1 << 20)] * ROUNDS),
                at_most=1,
                unit="B",
            ),
        ]
        report(ours, rows, rounds=ROUNDS)


def test_stream_and_convert(web: Remote, hub: Remote, model: Path, table, report) -> None:
    link = LINKS[0]
    web.link(*link)
    hub.link(*link)
    size = nbytes(model)
    sides: Sides = {
        "stream": partial(jobs.stream, web.url),
        "convert": partial(jobs.convert, web.url),
        "download": partial(jobs.download, hub.url),
    }
    samples = race(sides, ROUNDS, prepare=prepare)
    jobs.empty()
    converted = jobs.convert(web.url)
    same_arrays(safeload.load(converted), safeload.load(model))
    rows = [
        table.add(
            f"stream {size / 1e9:.1f} GB of BF16 as F32, {named(*link)}",
            LINK,
            by_link(samples["stream"], size),
            target=0.9,
        )
    ]
    job = f"convert {size / 1e9:.1f} GB into a local folder, {named(*link)}"
    peer = "huggingface_hub.snapshot_download"
    rows += [
        table.add(job, LINK, by_link(samples["convert"], size), target=0.9),
        table.add(job, peer, Comparison(samples["convert"], samples["download"]), target=1),
    ]
    report(sides["stream"], rows, rounds=1)
    jobs.empty()


# ---- what it costs ----


def alone(job: Callable[..., Any], url: str, touched: int = 0, **environment: str) -> dict[str, float]:
    """Runs a job in a process of its own: seconds, those of the processor, growth of the peak of memory.

    Args:
        touched: bytes of memory that the process touches and releases before; see `files.settle`.
    """
    command = [sys.executable, jobs.__file__, job.__name__, url, *([str(touched)] if touched else [])]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_growth_of_memory(web: Remote, model: Path, table, report) -> None:
    web.link()
    size = nbytes(model)
    results = {jobs.load: size, jobs.load_f32: 2 * size, jobs.stream: 256 << 20, jobs.convert: 0}
    names = ("load", "load as F32", "stream as F32, ahead of 256 MiB", "convert")
    rows = []
    for (job, result), name in zip(results.items(), names, strict=True):
        peaks = [alone(job, web.url)["growth"] for _ in range(ROUNDS)]
        rows.append(
            table.add(
                f"{name} {size / 1e9:.1f} GB by URL, growth of peak memory",
                "result + 256 MiB",
                Comparison(peaks, [float(result + ROOM)] * ROUNDS),
                at_most=1,
                unit="B",
            )
        )
    report(lambda: alone(jobs.load, web.url), rows, rounds=1)
    jobs.empty()


def test_beside_the_streamer(model: Path, table, report) -> None:
    """Each in processes of their own: the streamer imports torch."""
    for package in ("runai_model_streamer", "runai_model_streamer_s3"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is absent")
    rows = []
    with served("http_server", model.parent) as remote:
        url = f"{remote.url}/{model.name}"
        for link in (LINKS[0], (0.05, None)):
            remote.link(*link)
            took: dict[Callable[..., Any], list[float]] = {jobs.load: [], jobs.load_streamer: []}
            for _ in range(ROUNDS):
                for job, times in took.items():
                    times.append(alone(job, url)["seconds"])
            job = f"load {nbytes(model) / 1e9:.1f} GB in a fresh process, {named(*link)}"
            comparison = Comparison(*took.values())
            rows.append(table.add(job, "runai-model-streamer, as from S3", comparison, target=1))
        report(lambda: alone(jobs.load, url), rows, rounds=1)


@pytest.mark.parametrize("kind", ["1 Gbit/s", "no limit", "TLS, no limit"])
def test_processor(model: Path, hub: Remote, kind: str, table, report) -> None:
    """Seconds of the client's processor for each GB, alternating."""
    tls = kind.startswith("TLS")
    bandwidth = GBIT if kind == "1 Gbit/s" else None
    environment = {"SSL_CERT_FILE": str(TESTS / "data" / "localhost.pem")} if tls else {}
    with served("http_server", model, *(["--tls"] if tls else [])) as remote:
        remote.link(0.005, bandwidth)
        hub.link(0.005, bandwidth)
        sides: dict[str, tuple[Callable[..., Any], str]] = {
            "ours": (jobs.load, remote.url),
            FSSPEC: (jobs.load_fsspec, remote.url),
            SOCKETS: (jobs.load_sockets, remote.url),
        }
        if not tls:
            sides[HUB] = jobs.load_downloaded, hub.url
            if find_spec("obstore") is not None:
                sides[OBSTORE] = jobs.load_obstore, remote.url
        used: dict[str, list[float]] = {peer: [] for peer in sides}
        took: dict[str, list[float]] = {peer: [] for peer in sides}
        for _ in range(ROUNDS):
            for peer, (job, url) in sides.items():
                found = alone(job, url, 2 * nbytes(model), **environment)
                used[peer].append(found["cpu"] / nbytes(model) * 1e9)
                took[peer].append(found["seconds"])
        speeds = {peer: round(nbytes(model) / statistics.median(times) / 1e6) for peer, times in took.items()}
        print(f"{kind}: {speeds} MB/s")
        job = f"processor's time of the client for 1 GB, {kind}, 5 ms"
        targets = {FSSPEC: 1.2, SOCKETS: None}
        rows = [table.add(job, p, Comparison(used["ours"], used[p]), target=targets.get(p, 1)) for p in list(sides)[1:]]
        report(lambda: alone(jobs.load, remote.url, **environment), rows, rounds=1)
    jobs.empty()
