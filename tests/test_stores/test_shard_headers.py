"""The first request for a shard that an index lists: its size is estimated from the names of the tensors."""

import json

import numpy as np
import pytest
from builders.http_server import Server
from builders.remote import WINDOW

import safeload

pytest.importorskip("urllib3")
pytestmark = pytest.mark.usefixtures("quick_web")

INDEX = "/model.safetensors.index.json"
SHARDS = ("/model-00001-of-00002.safetensors", "/model-00002-of-00002.safetensors")


def shard(names, metadata=None, **dumps):
    """A file of F32 tensors [2, 3] whose values count up, as another writer may lay it out."""
    header = {} if metadata is None else {"__metadata__": metadata}
    for k, name in enumerate(names):
        header[name] = {"dtype": "F32", "shape": [2, 3], "data_offsets": [24 * k, 24 * k + 24]}
    text = json.dumps(header, **dumps).encode()
    data = np.arange(6 * len(names), dtype="<f4").tobytes()
    return len(text).to_bytes(8, "little") + text + data + bytes(WINDOW)[: -len(data) % 8]


def model(first, second, listed=None):
    """The files of a model by path; ``listed`` are the tensors that its index has."""
    names = {**dict.fromkeys(first[0], SHARDS[0][1:]), **dict.fromkeys(second[0], SHARDS[1][1:])}
    listed = names if listed is None else {name: names[name] for name in listed}
    files = {SHARDS[0]: shard(*first[:1], **first[1]), SHARDS[1]: shard(*second[:1], **second[1])}
    return {**files, INDEX: json.dumps({"weight_map": listed}).encode()}


def listed(files, **options):
    """Shapes of the tensors, values of the second shard's, and the ranges that were asked of each shard."""
    with Server(files, **options) as server:
        with safeload.open(server.url(INDEX)) as checkpoint:
            shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
            values = checkpoint["model.norm.weight"].ravel().tolist()
        ranges = {path: [one.range for one in server.requests if one.path == path] for path in SHARDS}
    return shapes, values, ranges


NAMES = [f"model.layers.{k:04}.self_attn.q_proj.weight" for k in range(3000)]
A_FEW = [["model.norm.weight"], {}]


@pytest.mark.parametrize("count", [1, 9, 3000])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_one_small_request_gets_the_header(count, separators):
    files = model([NAMES[:count], {"separators": separators}], A_FEW)
    shapes, values, ranges = listed(files)
    assert sorted(shapes) == sorted([*NAMES[:count], *A_FEW[0]])
    assert values == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    header = 8 + int.from_bytes(files[SHARDS[0]][:8], "little")
    assert len(ranges[SHARDS[0]]) == 1
    begin, end = ranges[SHARDS[0]][0]
    assert begin == 0
    assert header <= end <= 2 * header + (9 << 10)
    assert (end > WINDOW) == (count == 3000)


@pytest.mark.parametrize(
    "first",
    [
        [["a"], {"metadata": {"notes": "x" * 300_000}}],
        [["\N{GRINNING FACE}" * 60 + str(k) for k in range(300)], {}],  # 12 bytes of JSON for a character
    ],
    ids=["metadata", "escapes"],
)
def test_a_longer_header_takes_a_second_request(first):
    files = model(first, A_FEW)
    shapes, _, ranges = listed(files)
    assert sorted(shapes) == sorted([*first[0], *A_FEW[0]])
    (begin, end), (again, _), *rest = ranges[SHARDS[0]]
    assert (begin, end) == (0, listed(model([first[0], {}], A_FEW))[2][SHARDS[0]][0][1])  # as without metadata
    assert end < 8 + int.from_bytes(files[SHARDS[0]][:8], "little")
    assert again == end
    assert not rest


def test_tensors_that_the_index_omits_count_for_nothing():
    files = model([NAMES, {}], A_FEW, [NAMES[5], *A_FEW[0]])
    shapes, _, ranges = listed(files)
    assert sorted(shapes) == sorted([NAMES[5], *A_FEW[0]])
    assert [begin for begin, _ in ranges[SHARDS[0]]] == [0, ranges[SHARDS[0]][0][1]]


def test_a_server_without_ranges_gives_whole_shards():
    shapes, values, ranges = listed(model([NAMES[:9], {}], A_FEW), ranges=False)
    assert (len(shapes), values) == (10, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert all(len(asked) == 1 for asked in ranges.values())


def test_estimates_are_limited():
    _, _, ranges = listed(model([[f"{'x' * 1000}{k}" for k in range(2000)], {}], A_FEW))
    assert ranges[SHARDS[0]][0] == (0, 1 << 20)


def test_other_shards_take_the_usual_window():
    index, shard = "/pytorch_model.bin.index.json", "/pytorch_model-00001-of-00001.bin"
    weights = json.dumps({"weight_map": dict.fromkeys(NAMES, shard[1:])}).encode()
    with Server({index: weights, shard: bytes(4 * WINDOW)}) as server:
        with pytest.raises(safeload.SafeloadError):
            safeload.open(server.url(index))
        assert next(one.range for one in server.requests if one.path == shard) == (0, WINDOW)
