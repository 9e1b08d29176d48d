"""Files of every format, and folders, on a store that gives ranges: what is read when, and that it is right."""

import io
import json
import os
import zipfile

import numpy as np
import pytest
from builders.paths import DATA
from builders.remote import Served
from builders.thorough import THOROUGH, part_of

import safeload.numpy
from safeload.errors import FormatError, MissingShardError, UnsupportedError

pytestmark = [pytest.mark.no_core, pytest.mark.any_python]

URL = "mem://model"
FILES = sorted(
    path
    for path in DATA.rglob("*")
    if path.suffix in (".safetensors", ".gguf", ".npz", ".pt", ".pth", ".moon", ".npy", ".bin")
    and path.is_file()
    and "deepspeed" not in path.parts  # names too long for the id of a test; test_zero.py opens them
)
FOLDERS = sorted({path.parent for path in DATA.rglob("*.json") if any(path.parent.glob("*.safetensors"))})


def contents(value):
    """The bytes of an array, or of the parts of a quantized tensor."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    parts = {role: np.asarray(part).tobytes() for role, part in value.parts.items()} or value.data.tobytes()
    return value.scheme, value.shape, parts


def outcome(function, *arguments, **options):
    """What a function returns, or the class of what it raises."""
    try:
        return function(*arguments, **options)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("path", part_of(FILES + FOLDERS, 0, 2), ids=lambda path: path.relative_to(DATA).as_posix())
def test_a_real_file_is_read_from_ranges_as_from_the_disk(path):
    root = f"{URL}/{path.name}" if path.is_dir() else URL
    store = Served.folder(path if path.is_dir() else path.parent, root)
    there, here = outcome(safeload.open, store.at(f"{URL}/{path.name}")), outcome(safeload.open, path)
    if isinstance(here, type):
        assert there is here
        return
    assert [*there] == [*here]
    assert [(i.dtype, i.shape, i.nbytes, i.offset) for i in there.tensors.values()] == [
        (i.dtype, i.shape, i.nbytes, i.offset) for i in here.tensors.values()
    ]
    for dtype in (None, "float32", "bfloat16") if THOROUGH else (None, "float32"):
        found, want = outcome(there.load, dtype=dtype), outcome(here.load, dtype=dtype)
        if isinstance(want, type):
            assert found is want
        else:
            assert {n: contents(v) for n, v in found.items()} == {n: contents(v) for n, v in want.items()}


def small(count, prefix="model.layers", size=2):
    return {f"{prefix}.{k}.self_attn.q_proj.weight": np.full(size, k, np.float32) for k in range(count)}


def test_a_file_of_300_tensors_is_listed_with_one_request():
    store = Served({f"{URL}/a.safetensors": safeload.numpy.save(small(300))})
    assert len(safeload.open(store.at(f"{URL}/a.safetensors"))) == 300
    assert len(store.requests) == 1


def test_a_header_longer_than_the_first_request_takes_two():
    store = Served({f"{URL}/a.safetensors": safeload.numpy.save(small(5000))})
    assert len(safeload.open(store.at(f"{URL}/a.safetensors"))) == 5000
    assert [begin for _, begin, _ in store.requests] == [0, store.head]


def sharded(shards, each, size=2, **options):
    """A folder of shards with an index and a configuration."""
    content, weight_map = {}, {}
    for k in range(shards):
        name, tensors = f"model-{k + 1:05}-of-{shards:05}.safetensors", small(each, f"model.layers.{k}", size)
        content[f"{URL}/{name}"] = safeload.numpy.save(tensors)
        weight_map.update(dict.fromkeys(tensors, name))
    content[f"{URL}/model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    content[f"{URL}/config.json"] = b'{"model_type": "llama"}'
    return Served(content, **options)


def test_an_index_of_163_shards_and_91_000_tensors_takes_two_requests_a_shard_32_at_a_time():
    store = sharded(163, 559, latency=0.02)
    opened = safeload.open(store.at(URL))
    assert len(opened) == 163 * 559
    assert opened.config == {"model_type": "llama"}
    assert len(store.requests) <= 3 + 2 * 163
    # Wine has not begun the last when the first have ended.
    assert store.most == 32 or (os.name == "nt" and 24 <= store.most < 32)
    # Nothing but heads: the first request of each file, and what is left of a longer header.
    assert store.nbytes() <= sum(min(len(c), store.head) for c in store.content.values()) + (20 << 20)


def test_a_layer_of_a_folder_reads_its_bytes_alone():
    store = sharded(8, 4, 1 << 16)
    opened = safeload.open(store.at(URL))
    store.requests.clear()
    found = opened.load(only="model.layers.3.*", dtype="float64")
    assert [array[0] for array in found.values()] == [0, 1, 2, 3]
    assert [(path, end - begin) for path, begin, end in store.requests] == [
        (f"{URL}/model-00004-of-00008.safetensors", 4 << 18)
    ]


@pytest.mark.parametrize("path", ["model.safetensors.index.json", "", "model-00002-of-00003.safetensors"])
def test_a_folder_an_index_and_a_shard_are_opened_by_their_urls(path):
    store = sharded(3, 2)
    opened = safeload.open(store.at(f"{URL}/{path}".rstrip("/")))
    assert len(opened) == (2 if path.endswith("safetensors") else 6)
    assert opened.files[0].startswith(URL)


def test_a_list_of_files_is_their_union():
    store = sharded(3, 2)
    paths = [store.at(URL) / f"model-0000{k}-of-00003.safetensors" for k in (1, 3)]
    assert len(safeload.open(paths)) == 4


def test_shards_without_an_index_and_what_is_missing():
    store = sharded(3, 2)
    del store.content[f"{URL}/model.safetensors.index.json"]
    assert len(safeload.open(store.at(URL))) == 6
    del store.content[f"{URL}/model-00002-of-00003.safetensors"]
    with pytest.raises(MissingShardError, match="2 of 3 shards"):
        safeload.open(store.at(URL))


def test_a_shard_that_the_index_lists_and_the_store_has_not():
    store = sharded(3, 2)
    del store.content[f"{URL}/model-00002-of-00003.safetensors"]
    with pytest.raises(FileNotFoundError, match=r"00002-of-00003.*index\.json lists it"):
        safeload.open(store.at(URL))


def test_an_index_names_bare_files_only():
    store = sharded(1, 1)
    store.content[f"{URL}/model.safetensors.index.json"] = b'{"weight_map": {"w": "https://elsewhere/a.safetensors"}}'
    with pytest.raises(FormatError, match="must be the bare name of a file"):
        safeload.open(store.at(URL))
    assert all(path.startswith(URL) for path, _, _ in store.requests)


def test_a_folder_without_weights_says_what_is_there():
    with pytest.raises(UnsupportedError, match=r"mem://model: no weights here; found README\.md"):
        safeload.open(Served({f"{URL}/README.md": b"hello"}).at(URL))
    with pytest.raises(FileNotFoundError):
        safeload.open(Served({}).at(f"{URL}/a.safetensors"))


def test_the_local_headers_of_an_archive_are_read_many_at_a_time():
    memory = io.BytesIO()
    np.savez(memory, **{f"a{k}": np.full(1 << 15, k, np.int64) for k in range(100)})
    store = Served({f"{URL}/a.npz": memory.getvalue()}, latency=0.01)
    opened = safeload.open(store.at(f"{URL}/a.npz"))
    assert len(opened) == 100
    assert len(store.requests) <= 100 + 4
    assert store.nbytes() < 1 << 20
    assert store.most > 8
    assert (opened["a77"] == 77).all()


@pytest.mark.parametrize("name", ["a.npz", "a.pt"])
def test_what_must_be_read_whole_is_said_with_the_way(name):
    memory = io.BytesIO()
    if name == "a.npz":
        np.savez_compressed(memory, w=np.random.default_rng(0).random(40_000))
        assert zipfile.ZipFile(memory).infolist()[0].compress_type
    else:
        memory.write((DATA / "torch" / "facenet-pnet.pt").read_bytes().ljust(200_000, b"\0"))
    store = Served({f"{URL}/{name}": memory.getvalue()})
    with pytest.raises(UnsupportedError, match=rf"whole.*safeload\.open\(\"filecache::{URL}/{name}\""):
        safeload.open(store.at(f"{URL}/{name}"))


@pytest.mark.parametrize("head", [8, 64, 1000])
def test_any_first_window_gives_the_same(head):
    path = DATA / "silero_vad_16k.safetensors"
    store = Served({f"{URL}/a.safetensors": path.read_bytes()}, head=head)
    assert [*safeload.open(store.at(f"{URL}/a.safetensors"))] == [*safeload.open(path)]


@pytest.mark.parametrize("size", [0, 7, 8, 9, 100, 5000])
def test_a_truncated_file_has_the_error_of_a_local_one(size, tmp_path):
    content = (DATA / "silero_vad_16k.safetensors").read_bytes()[:size]
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(FormatError) as local:
        safeload.open(tmp_path / "a.safetensors")
    with pytest.raises(FormatError) as there:
        safeload.open(Served({f"{URL}/a.safetensors": content}).at(f"{URL}/a.safetensors"))
    assert there.value.args == local.value.args
    assert (there.value.path, there.value.offset) == (f"{URL}/a.safetensors", local.value.offset)
