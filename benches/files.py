"""The files that the benches read: made once, without either library, and kept outside the repository."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

CACHE = Path(tempfile.gettempdir()) / "safeload-bench"

# Part of every file's name: a new number when what is generated changes.
VERSION = 2

# A row of gigabytes is one of which a side takes so much memory; before each of its samples so much is made hot. Small
# rows do not pay for it.
GIGABYTES, HOT = 1 << 30, 9_000_000_000

# Rounds of a row of gigabytes. To make memory hot takes 7 s before each sample, longer than what is timed.
LARGE_ROUNDS = 3

# Length of the random block that is repeated to fill a file. A prime, so that no two tensors hold the same bytes and
# one read from the wrong place is seen.
BLOCK = 67_108_859


class Entry(NamedTuple):
    """One tensor of a file to be made."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}[self.dtype]


def small(count: int, *, by_name: bool = True) -> list[Entry]:
    """Many small tensors named as a mixture-of-experts model names its own.

    Args:
        count: how many.
        by_name: in the order of their names, as safetensors writes tensors of one dtype; False for layer by layer, as
            other writers do.
    """
    parts = ("gate_proj", "up_proj", "down_proj", "q_proj", "k_proj")
    entries = [
        Entry(f"model.layers.{i // 500}.mlp.experts.{i // 5 % 100}.{parts[i % 5]}.weight", "F32", (2, 4))
        for i in range(count)
    ]
    return sorted(entries) if by_name else entries


def llama_1b() -> list[Entry]:
    """The 146 tensors of Llama-3.2-1B: 2.47 GB of BF16, no lm_head (it is tied to embed_tokens)."""

    def layer(i: int) -> Iterator[Entry]:
        shapes = {
            "input_layernorm": (2048,),
            "mlp.down_proj": (2048, 8192),
            "mlp.gate_proj": (8192, 2048),
            "mlp.up_proj": (8192, 2048),
            "post_attention_layernorm": (2048,),
            "self_attn.k_proj": (512, 2048),
            "self_attn.o_proj": (2048, 2048),
            "self_attn.q_proj": (2048, 2048),
            "self_attn.v_proj": (512, 2048),
        }
        for part, shape in shapes.items():
            yield Entry(f"model.layers.{i}.{part}.weight", "BF16", shape)

    entries = [Entry("model.embed_tokens.weight", "BF16", (128256, 2048))]
    for i in range(16):
        entries += layer(i)
    return [*entries, Entry("model.norm.weight", "BF16", (2048,))]


def weights() -> bytes:
    """BF16 as trained weights are: normal, of deviation 0.02; whole elements, fewer than `BLOCK` bytes."""
    values = np.random.default_rng(21).standard_normal(BLOCK // 2, np.float32) * np.float32(0.02)
    return values.astype(ml_dtypes.bfloat16).tobytes()


def llama_folder(layers: int = 16) -> Path:
    """Llama-3.2-1B as a folder: two shards of `weights`, an index and a config.json; or its first layers."""
    later = tuple(f"model.layers.{i}." for i in range(layers, 16))
    entries = [entry for entry in llama_1b() if not entry.name.startswith(later)]
    folder = CACHE / (f"llama-1b-v{VERSION}" if layers == 16 else f"llama-1b-{layers}-layers-v{VERSION}")
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    half = len(entries) * 60 // 146
    for k, part in enumerate((entries[:half], entries[half:])):
        file = f"model-{k + 1:05}-of-00002.safetensors"
        make(file, part, path=folder / file, block=weights())
        weight_map |= dict.fromkeys((entry.name for entry in part), file)
    index = {"metadata": {"total_size": sum(e.nbytes for e in entries)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def remote_folder(layers: int) -> Path:
    """A model of 5 shards, to be read by URL: 121 MB of BF16 a layer, a norm of 4 KB in the last shard."""
    folder = CACHE / f"by-url-{layers}-v{VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    entries = [entry for entry in llama_1b() if ".layers.0." in entry.name]
    weight_map, block = {}, weights()
    for shard in range(5):
        own = [
            entry._replace(name=entry.name.replace(".0.", f".{layer}."))
            for layer in range(layers * shard // 5, layers * (shard + 1) // 5)
            for entry in entries
        ]
        if shard == 4:
            own.append(Entry("model.norm.weight", "BF16", (2048,)))
        file = f"model-{shard + 1:05}-of-00005.safetensors"
        make(file, own, path=folder / file, block=block)
        weight_map |= dict.fromkeys((entry.name for entry in own), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def sparse_file() -> Path:
    """5 GB of BF16 in 600 tensors of 8 MiB, of which ``model.layers.300.weight`` alone is on the disk."""
    folder = CACHE / f"sparse-v{VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    path, nbytes, count = folder / "model.safetensors", 8 << 20, 600
    header = {
        f"model.layers.{k}.weight": {
            "dtype": "BF16",
            "shape": [2048, 2048],
            "data_offsets": [k * nbytes, (k + 1) * nbytes],
        }
        for k in range(count)
    }
    text = json.dumps(header).encode()
    begin = 8 + len(text)
    if not path.exists() or path.stat().st_size != begin + count * nbytes:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.seek(begin + 300 * nbytes)
            file.write(np.random.default_rng(22).bytes(nbytes))
            file.truncate(begin + count * nbytes)
    return path


def fp8_folder(layers: int = 12, shards: int = 2) -> Path:
    """A model in fp8 with blocks of 128 x 128, 250 MB a layer, the scales of each shard in the next one."""
    folder = CACHE / f"fp8-{layers}-{shards}-v{VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[list[Entry]] = [[] for _ in range(shards)]
    for layer in range(layers):
        for k, (rows, columns) in enumerate(((8192, 8192), (8192, 11008), (11008, 8192))):
            name = f"model.layers.{layer}.mlp.{k}.weight"
            grid = (-(-rows // 128), -(-columns // 128))
            parts[layer % shards].append(Entry(name, "F8_E4M3", (rows, columns)))
            parts[(layer + 1) % shards].append(Entry(f"{name}_scale_inv", "F32", grid))
    codes = np.random.default_rng(32).integers(0, 126, BLOCK, np.uint8)
    small = np.float32([0.015625]).tobytes()
    weight_map = {}
    for k, entries in enumerate(parts):
        file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        entries.sort(key=lambda entry: entry.dtype != "F32")  # scales first, so that `make` can lay them out
        weight_map |= dict.fromkeys((entry.name for entry in entries), file)
        path = make(file, entries, path=folder / file, block=codes.tobytes())
        _fill_scales(path, small)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _fill_scales(path: Path, value: bytes) -> None:
    header, begin = header_of(path)
    with path.open("r+b") as file:
        for entry in header.values():
            if entry["dtype"] == "F32":
                low, high = entry["data_offsets"]
                file.seek(begin + low)
                file.write(value * ((high - low) // len(value)))


def make(name: str, entries: list[Entry], *, path: Path | None = None, block: bytes | None = None) -> Path:
    """Path of the file, written unless an earlier run has left it; ``block`` is repeated in it, else random bytes."""
    path = CACHE / f"{name}-v{VERSION}.safetensors" if path is None else path
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if path.exists() and path.stat().st_size == 8 + len(text) + end:
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(CACHE).free < end + (1 << 30):
        pytest.skip(f"{path} needs {end / 1e9:.1f} GB of disk and a little more")
    if block is None:
        block = np.random.default_rng(20).bytes(min(BLOCK, end))
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, end, len(block)):
            file.write(block[: min(len(block), end - begin)])
        os.fsync(file.fileno())
    temporary.rename(path)
    return path


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes F32 tensors in the order given, by the standard library."""
    header, end = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    CACHE.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    temporary.rename(path)


def sync(path: Path) -> None:
    """Waits until a file, and its name in its folder, are on the disk."""
    for place in (path, path.parent):
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def header_of(path: Path) -> tuple[dict[str, dict[str, object]], int]:
    """Header of a safetensors file by the standard library, and where the data begins: for the limits."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def warm(path: Path) -> None:
    """Brings a file into the page cache."""
    buffer = bytearray(16 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def cached(path: Path) -> bool:
    """Whether the page cache holds the file, judged by a page of every MiB."""
    if not hasattr(os, "RWF_NOWAIT"):
        return True
    descriptor = os.open(path, os.O_RDONLY)
    try:
        page = bytearray(4096)
        for offset in range(0, path.stat().st_size, 1 << 20):
            os.preadv(descriptor, [page], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # a filesystem that cannot tell
        return True
    finally:
        os.close(descriptor)
    return True


def settle(nbytes: int) -> None:
    """Takes memory and gives it back, so that the system hands out the same to whoever asks next.

    In a virtual machine with free page reporting, memory that has been free for 2 s goes back to the host, and taking
    it again costs ten times the copy that a bench wants to time: without this the order of the sides would decide.
    Both in small pages and in huge ones, which come from different lists of the kernel. For a row of gigabytes it is
    `HOT` bytes in all, more than any side of any row takes.

    Args:
        nbytes: what the side that takes most memory takes.
    """
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return
    held = [_touched(nbytes, mmap.MADV_NOHUGEPAGE), _touched(nbytes, mmap.MADV_HUGEPAGE)]
    if nbytes >= GIGABYTES:
        more = hot_memory() - 2 * nbytes
        held += [_touched(more, mmap.MADV_HUGEPAGE)] if more > 0 else []


def hot_memory() -> int:
    """Bytes that are made hot before each sample of a row of gigabytes: `HOT`, or half of what there is."""
    return min(HOT, available_memory() // 2)


def _touched(nbytes: int, advice: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    pages = np.frombuffer(memory, np.uint8)[::4096]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda some: some.fill(1), np.array_split(pages, os.cpu_count() or 1)))
    return memory


def available_memory() -> int:
    """Bytes that programs may still take, page cache included."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 1 << 62
