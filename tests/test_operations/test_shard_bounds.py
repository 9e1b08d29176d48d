"""Shards hold as many tensors as fit, in order."""

import json
import struct

from builders.holes import extend
from hypothesis import given, settings
from hypothesis import strategies as st

import safeload


def one_by_one(sizes, limit):
    shards = [[]]
    for size in sizes:
        if shards[-1] and sum(shards[-1]) + size > limit:
            shards.append([])
        shards[-1].append(size)
    return shards


def sparse(path, sizes):
    """Write a file with tensors of these sizes, and no bytes for them on the disk."""
    header, at = {}, 0
    for k, size in enumerate(sizes):
        header[f"{k:02}"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        extend(file, 8 + len(text) + at)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9) | st.integers(0, 1 << 38), min_size=1, max_size=30),
    st.integers(1, 20) | st.integers(1, 1 << 39),
)
def test_each_shard_takes_tensors_up_to_the_limit(tmp_path_factory, sizes, limit):
    folder = tmp_path_factory.mktemp("sparse")
    sparse(folder / "x.safetensors", sizes)
    plan = safeload.plan_convert(folder / "x.safetensors", folder / "out", max_shard_size=limit)
    shards = {
        piece["file"]: [int(name) for part in piece["tensors"] for name in part["names"]] for piece in plan.pieces
    }
    assert [[sizes[k] for k in shard] for shard in shards.values()] == one_by_one(sizes, limit)
    names = [f"model-{k + 1:05}-of-{len(shards):05}.safetensors" for k in range(len(shards))]
    assert list(shards) == (names if len(shards) > 1 else ["model.safetensors"])


def test_no_tensors_are_one_shard(tmp_path):
    safeload.save({}, tmp_path / "out", max_shard_size=1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
