"""What tests of engines run: a quantized folder to convert, and workers that die in the middle of a shard.

Workers import this module: `tests/` is on their path.
"""

import hashlib
import json
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import ml_dtypes
import numpy as np

import safeload
from builders.inside import atomic_file, executors
from safeload.numpy import save_file

NAMES = [f"model.layers.{k}.mlp.down_proj.weight" for k in range(12)]
SHAPE = (256, 384)
FORMAT = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
# Makes a shard of two of the weights in bf16, and so 6 shards.
OPTIONS = {"dtype": "bfloat16", "max_shard_size": "400KB"}

RESUME = ".safeload-resume"  # the folder of unfinished conversions


def fp8_folder(folder: Path) -> Path:
    """Weights in blocks of 128 x 128 in three shards, and in a fourth one the scales of every other weight."""
    rng = np.random.default_rng(19)
    shards: list[dict[str, np.ndarray]] = [{}, {}, {}, {}]
    for k, name in enumerate(NAMES):
        home = shards[k % 3]
        home[name] = rng.standard_normal(SHAPE, np.float32).astype(ml_dtypes.float8_e4m3fn)
        scale = rng.random((SHAPE[0] // 128, SHAPE[1] // 128), np.float32) + np.float32(0.5)
        (shards[3] if k % 2 else home)[f"{name}_scale_inv"] = scale
    shards[0]["model.norm.weight"] = rng.random(SHAPE[1], np.float32).astype(ml_dtypes.bfloat16)
    folder.mkdir()
    weight_map = {}
    for k, shard in enumerate(shards):
        file = f"model-{k + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, durable=False)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"model_type": "other", "torch_dtype": "bfloat16", "quantization_config": FORMAT}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """The `usual` files of a folder, temporary ones too; without the records of its shards."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != RESUME and path.is_file()}
    return usual(files)


def usual(files: dict[str, bytes]) -> dict[str, bytes]:
    """Files with the names that shards have in a new folder: where names are taken, shards have a larger total."""
    try:
        shards = sorted(set(json.loads(files["model.safetensors.index.json"])["weight_map"].values()))
    except (KeyError, ValueError):
        return files
    totals = {shard[-17:-12] for shard in shards}
    if len(totals) != 1 or not shards[0][-17:-12].isdigit():
        return files
    old, new = f"-of-{totals.pop()}.", f"-of-{len(shards):05}."
    if any(new in name for name in files):
        return files
    return {
        name.replace(old, new) if name in shards else name: (
            data.replace(old.encode(), new.encode()) if name.endswith("index.json") else data
        )
        for name, data in files.items()
    }


def waiting(folder: Path) -> Path:
    """Where the shards of the only unfinished conversion of a folder wait."""
    (place,) = (folder / RESUME).iterdir()
    return place


def record_of(shard: Path) -> Path:
    """The record of a shard that waits."""
    return shard.with_name(f"{shard.name}.json")


def records_in(folder: Path) -> list[Path]:
    """The records in a folder."""
    return sorted(folder.rglob(f"{RESUME}/*/*.json"))


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Which file each name of a folder is, and when it was last written."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir() if path.is_file()}


def signed(piece: dict) -> dict:
    """A piece with the hash of its content: what someone could send who forges pieces."""
    given = {"id", "plan", "call", "folder", "file", "storage_options"}
    text = json.dumps({key: value for key, value in piece.items() if key not in given}, sort_keys=True, default=str)
    return {**piece, "id": hashlib.sha256(text.encode()).hexdigest()[: len(piece["id"])]}


def run_pieces(*arguments, **options) -> safeload.Plan:
    """Plan a conversion and write all of its shards with their records; the folder is not completed."""
    plan = safeload.plan_convert(*arguments, **options)
    for piece in plan.pieces:
        safeload.run_piece(piece)
    return plan


@contextmanager
def never_half(folder: Path, whole: dict[str, bytes]):
    """Looks all the time: no file has one of these names and another content."""
    halves, looks, ended = [], [], threading.Event()

    def look() -> None:
        while not ended.is_set():
            for name, want in whole.items():
                path = folder / name
                if path.exists() and path.read_bytes() != want:
                    halves.append(name)
            looks.append(time.monotonic())
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert len(looks) > 1
    assert not halves


def die_in(file: str, note: str | None = None) -> None:
    """Makes this process end itself by SIGKILL when it has begun to write a file.

    Args:
        file: its name.
        note: a file that gets the names of the folder at that moment; where it exists, all goes well. None: always.
    """
    write = atomic_file.AtomicFile.write

    def dying(self, pieces):
        write(self, pieces)
        if os.path.basename(self.path) != file:
            return
        if note is not None:
            try:
                descriptor = os.open(note, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                return
            os.write(descriptor, json.dumps(os.listdir(os.path.dirname(self.path))).encode())
            os.close(descriptor)
        os.kill(os.getpid(), signal.SIGKILL)

    atomic_file.AtomicFile.write = dying


def die_while_reading(note: str) -> None:
    """Makes this process end itself by SIGKILL when it has opened the files of a piece, once for all processes."""
    reopened = executors._reopened

    def dying(*arguments):
        opened = reopened(*arguments)
        with suppress(FileExistsError):
            os.close(os.open(note, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            os.kill(os.getpid(), signal.SIGKILL)
        return opened

    executors._reopened = dying
