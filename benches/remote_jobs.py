"""Jobs on files behind URLs, ours and those of peers.

`python remote_jobs.py JOB URL [BYTES]` runs one in its own process, after it has touched and released so much memory.
"""

from __future__ import annotations

import fnmatch
import json
import os
import resource
import shutil
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import files
import ml_dtypes
import numpy as np

import safeload

INDEX = "model.safetensors.index.json"
REPOSITORY = "bench/model"
DOWNLOADS = files.CACHE / "downloads"

Arrays = dict[str, np.ndarray]


def empty() -> None:
    """Removes what earlier jobs have written, so that each downloads everything."""
    shutil.rmtree(DOWNLOADS, ignore_errors=True)
    DOWNLOADS.mkdir(parents=True)


# ---- ours ----


def load(url: str, **options: Any) -> Arrays:
    return safeload.load(f"{url}/{INDEX}", **options)


def load_f32(url: str) -> Arrays:
    return load(url, dtype="float32")


def load_hf(endpoint: str) -> Arrays:
    return safeload.load(f"hf://{REPOSITORY}", storage_options={"endpoint": endpoint, "token": False})


def listing(url: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    with safeload.open(f"{url}/{INDEX}") as checkpoint:
        return {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}


def listing_hf(endpoint: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    with safeload.open(f"hf://{REPOSITORY}", storage_options={"endpoint": endpoint, "token": False}) as checkpoint:
        return {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}


def stream(url: str, ahead: int = 256 << 20) -> int:
    with safeload.open(f"{url}/{INDEX}") as checkpoint:
        return sum(array.nbytes for _, array in checkpoint.stream(dtype="float32", ahead=ahead))


def convert(url: str) -> Path:
    safeload.convert(f"{url}/{INDEX}", DOWNLOADS / "converted", max_shard_size=1 << 30, overwrite=True)
    return DOWNLOADS / "converted"


# ---- peers ----


def _web() -> Any:
    import fsspec

    return fsspec.filesystem("http", skip_instance_cache=True)


def _shards(fs: Any, url: str) -> dict[str, list[str]]:
    """Names of tensors by URL of the shard."""
    found: dict[str, list[str]] = {}
    for name, file in json.loads(fs.cat_file(f"{url}/{INDEX}"))["weight_map"].items():
        found.setdefault(f"{url}/{file}", []).append(name)
    return found


def _arrays(content: bytes | memoryview) -> Arrays:
    """Of a safetensors file in memory, without a copy: safetensors.numpy.load has no BF16."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:end]))
    header.pop("__metadata__", None)
    data = memoryview(content)[end:]
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], ml_dtypes.bfloat16).reshape(entry["shape"])
        for name, entry in header.items()
    }


def load_fsspec(url: str) -> Arrays:
    """All shards at once: each is one request."""
    fs = _web()
    contents = fs.cat(list(_shards(fs, url)))
    return {name: array for content in contents.values() for name, array in _arrays(content).items()}


def load_fsspec_f32(url: str) -> Arrays:
    return {name: array.astype(np.float32) for name, array in load_fsspec(url).items()}


def headers_fsspec(url: str, shards: list[str] | None = None) -> dict[str, tuple[str, int, dict[str, Any]]]:
    """Shard, offset of the data and entry of each tensor: two requests to a shard, all shards at once."""
    fs = _web()
    shards = list(_shards(fs, url)) if shards is None else shards
    count = len(shards)
    sizes = [struct.unpack("<Q", begin)[0] for begin in fs.cat_ranges(shards, [0] * count, [8] * count)]
    texts = fs.cat_ranges(shards, [8] * count, [8 + size for size in sizes])
    found = {}
    for shard, size, text in zip(shards, sizes, texts, strict=True):
        for name, entry in json.loads(text).items():
            if name != "__metadata__":
                found[name] = shard, 8 + size, entry
    return found


def listing_fsspec(url: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (e["dtype"], tuple(e["shape"])) for name, (_, _, e) in headers_fsspec(url).items()}


def some_fsspec(url: str, pattern: str, shards: list[str] | None = None) -> Arrays:
    """The tensors that a pattern names: a request for each, all at once."""
    headers = headers_fsspec(url, shards)
    wanted = {name: entry for name, entry in headers.items() if fnmatch.fnmatchcase(name, pattern)}
    places = [(shard, *(begin + offset for offset in entry["data_offsets"])) for shard, begin, entry in wanted.values()]
    contents = _web().cat_ranges(*map(list, zip(*places, strict=True)))
    return {
        name: np.frombuffer(content, ml_dtypes.bfloat16).reshape(entry["shape"])
        for (name, (_, _, entry)), content in zip(wanted.items(), contents, strict=True)
    }


def load_obstore(url: str) -> Arrays:
    """All shards at once: each is one request."""
    import obstore
    from obstore.store import HTTPStore

    store = HTTPStore.from_url(url, client_options={"allow_http": True, "timeout": "10m"})

    def get(name: str) -> bytes:
        return bytes(obstore.get(store, name).bytes())

    shards = sorted(set(json.loads(get(INDEX))["weight_map"].values()))
    with ThreadPoolExecutor(len(shards)) as pool:
        return {name: array for content in pool.map(get, shards) for name, array in _arrays(content).items()}


def load_sockets(url: str) -> Arrays:
    """By bare sockets, a thread and a connection to a shard: the least that Python can do."""

    def get(name: str) -> memoryview:
        parts = urlsplit(f"{url}/{name}")
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            if parts.scheme == "https":
                connection = ssl.create_default_context().wrap_socket(connection, server_hostname=parts.hostname)
            text = f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
            connection.sendall(text.encode())
            head = b""
            while not head.endswith(b"\r\n\r\n"):  # a byte at a time, so that the rest is the body
                head += connection.recv(1)
            size = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            memory, at = memoryview(np.empty(size, np.uint8)), 0
            while at < size:
                at += connection.recv_into(memory[at:])
            return memory

    shards = sorted(set(json.loads(bytes(get(INDEX)))["weight_map"].values()))
    with ThreadPoolExecutor(len(shards)) as pool:
        return {name: array for content in pool.map(get, shards) for name, array in _arrays(content).items()}


def download(endpoint: str) -> Path:
    """The whole model, as huggingface_hub gets it: 8 files at a time."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(REPOSITORY, endpoint=endpoint, token=False, cache_dir=DOWNLOADS))


def load_streamer(url: str) -> dict[str, Any]:
    """By runai-model-streamer, which takes the first folder of the URL for a bucket: a range is read as from S3."""
    server, _, bucket = url.rpartition("/")
    os.environ.update(
        AWS_ENDPOINT_URL=server, RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING="0", AWS_EC2_METADATA_DISABLED="true",
        AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench", AWS_REGION="us-east-1",
    )  # fmt: skip
    from runai_model_streamer import SafetensorsStreamer

    shards = sorted({shard.rpartition("/")[2] for shard in _shards(_web(), url)})
    with SafetensorsStreamer() as streamer:
        streamer.stream_files([f"s3://{bucket}/{shard}" for shard in shards])
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def load_downloaded(endpoint: str) -> Arrays:
    from safetensors.numpy import load_file

    shards = sorted(download(endpoint).glob("*.safetensors"))
    return {name: array for shard in shards for name, array in load_file(shard).items()}


def listing_downloaded(endpoint: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    from safetensors import safe_open

    found = {}
    for shard in sorted(download(endpoint).glob("*.safetensors")):
        with safe_open(shard, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found.update({name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()})
    return found


def listing_hub(endpoint: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """huggingface_hub's own way to list without a download."""
    from huggingface_hub import HfApi

    metadata = HfApi(endpoint=endpoint, token=False).get_safetensors_metadata(REPOSITORY)
    return {
        name: (info.dtype, tuple(info.shape))
        for file in metadata.files_metadata.values()
        for name, info in file.tensors.items()
    }


# ---- a process for one job ----


def _peak() -> int:
    """Bytes; ru_maxrss begins with the memory of the process that started this one."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _import(job: Callable[[str], Any]) -> None:
    """Imports what the job imports when it is run."""
    _web()
    names = {"load_downloaded": ("huggingface_hub", "safetensors.numpy"), "load_obstore": ("obstore.store",)}
    names["load_streamer"] = ("runai_model_streamer",)
    for name in names.get(job.__name__, ()):
        import_module(name)


def main() -> None:
    job: Callable[[str], Any] = globals()[sys.argv[1]]
    url = sys.argv[2]
    _import(job)
    empty()
    ours = job in (load, load_f32, stream, convert)
    if ours:  # connections, threads, what the core takes at first
        listing(url)
        load(url, only="model.norm.weight", dtype="float32")
    if sys.argv[3:]:
        files.settle(int(sys.argv[3]))
    cpu, peak, started = _cpu(), _peak(), time.perf_counter()
    result = job(url)
    seconds, used = time.perf_counter() - started, _cpu() - cpu
    print(json.dumps({"seconds": seconds, "cpu": used, "growth": _peak() - peak}))
    sys.stdout.flush()
    del result
    os._exit(0)  # loops of asyncio complain when they are ended


if __name__ == "__main__":
    main()
