"""Checkpoints of torch.distributed: files of torch's own writers, any chunks, and folders with a fault."""

import copy
import os
import pickle
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builders.dcp_build import Checkpoint, archive, grid, properties, record, sample, size, sparse
from builders.inside import local
from builders.paths import ROOT
from builders.random import rng
from builders.thorough import part_of
from builders.torch_build import Call, Ref, Storage, dump, tensor, zip_file

import safeload
from safeload.errors import (
    ForbiddenError,
    FormatError,
    LimitError,
    SafeloadError,
    TensorNotFoundError,
    UnsupportedError,
)

pytestmark = pytest.mark.no_core

# tests/data/dcp/compare.sh lets torch write all fixtures anew.
DATA = Path(os.environ.get("SAFELOAD_DCP_FIXTURES") or ROOT / "tests" / "data" / "dcp")
FIXTURES = sorted(path.name for path in DATA.glob("*_[0-9]"))
META = {"optim": {"param_groups": [{"lr": 0.1, "betas": [0.9, 0.95]}]}, "step": 17, "mixed": {"1": "text", "2": 3}}


def expected(fixture):
    """The whole tensors of a fixture, as torch gave them."""
    whole = safeload.load(DATA / f"expected_{fixture[-1]}.safetensors")
    hf = fixture.startswith("hf")
    return {name.removeprefix("model."): a for name, a in whole.items() if name.startswith("model.")} if hf else whole


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check_tensors(arrays, want):
    assert sorted(arrays) == sorted(want)
    for name, array in want.items():
        assert equal(arrays[name], array), name


@pytest.fixture(params=FIXTURES)
def fixture(request):
    if request.param.startswith("zstd"):
        pytest.importorskip("zstandard")
    return request.param


# ---- files of torch's writers ----


def test_every_way_to_read_gives_what_torch_gave(fixture):
    want = expected(fixture)
    with safeload.open(DATA / fixture) as opened:
        assert opened.format == "dcp"
        assert opened.files == [str(DATA / fixture)]
        check_tensors(opened.load(), want)
        check_tensors(opened.load(backend="pread", threads=2), want)
        check_tensors(dict(opened.stream(order="ready", ahead=100)), want)
        check_tensors({name: opened[name] for name in opened}, want)
        out = {name: np.empty_like(array) for name, array in want.items()}
        opened.load(out=out)
        check_tensors(out, want)
        for name, array in opened.load(dtype="float32").items():
            floating = want[name].dtype.kind in "fV" or want[name].dtype in (
                ml_dtypes.bfloat16,
                ml_dtypes.float8_e4m3fn,
            )
            assert equal(array, want[name].astype(np.float32) if floating else want[name])
        if not fixture.startswith("hf"):
            assert dict(opened.metadata) == META
            assert all(opened.named_globals.values())


def test_slices_and_rows_are_those_of_the_whole(fixture):
    want = expected(fixture)
    with safeload.open(DATA / fixture) as opened:
        for name, array in part_of([*want.items()], FIXTURES.index(fixture), 2):
            part = opened.get_slice(name)
            assert equal(part[...], array)
            if array.ndim:
                assert equal(opened.take(name, range(0, len(array), 2)), array[::2])
                assert equal(part[1:], np.ascontiguousarray(array[1:]))
                assert equal(part[..., 1:3], np.ascontiguousarray(array[..., 1:3]))
                assert equal(part[::-2, ...], np.ascontiguousarray(array[::-2]))
            assert equal(pickle.loads(pickle.dumps(part))[...], array)


@pytest.mark.parametrize("fixture", part_of(FIXTURES, 1, 2), indirect=True)
def test_operations_take_a_folder_like_any_other(fixture, tmp_path):
    want, path = expected(fixture), DATA / fixture
    safeload.convert(path, tmp_path / "one.safetensors")
    check_tensors(safeload.load(tmp_path / "one.safetensors"), want)
    with ProcessPoolExecutor(1) as executor:
        safeload.convert(path, tmp_path / "many", max_shard_size=300, executor=executor)
    check_tensors(safeload.load(tmp_path / "many"), want)
    assert safeload.diff(path, tmp_path / "many").same
    assert {name: stats.max for name, stats in safeload.stats(path).items()}[
        "rows" if "hf" in fixture else "model.rows"
    ] == 34
    assert not safeload.check(path).errors


def test_a_checkpoint_is_pickled_and_copied(fixture):
    with safeload.open(DATA / fixture) as opened:
        for again in (pickle.loads(pickle.dumps(opened)), copy.copy(opened)):
            with again:
                check_tensors(again.load(), expected(fixture))


def test_a_root_selects_a_container_of_tensors_and_values():
    want = {n.removeprefix("model."): a for n, a in expected("plain_4").items() if n.startswith("model.")}
    with safeload.open(DATA / "plain_4", root="model") as opened:
        check_tensors(opened.load(), want)
        assert dict(opened.metadata) == {}
        assert equal(pickle.loads(pickle.dumps(opened))["a.b/ü"], want["a.b/ü"])
    with safeload.open(DATA / "plain_4", root="optim") as opened:
        assert sorted(opened) == ["state.0.exp_avg", "state.0.step"]
        assert dict(opened.metadata) == META["optim"]
    with safeload.open(DATA / "plain_4", root="optim.state.0") as opened:
        assert sorted(opened) == ["exp_avg", "step"]
    for root in ("a", "model.a", "mode", "optim.state.0.step", ""):
        with pytest.raises(TensorNotFoundError, match="containers: mixed, model, optim"):
            safeload.open(DATA / "plain_4", root=root)


def test_only_the_data_files_of_the_selected_tensors_are_needed(tmp_path):
    made = Checkpoint().tensor("model.w", np.ones(3, np.float32)).tensor("optim.m", np.ones(3), files=("other.distcp",))
    made.write(tmp_path)
    (tmp_path / "other.distcp").unlink()
    assert list(safeload.load(tmp_path, root="model")) == ["w"]
    with pytest.raises(FileNotFoundError, match=r"other\.distcp; the checkpoint's metadata lists it"):
        safeload.open(tmp_path)


def test_the_data_files_are_not_called_skipped(fixture):
    with safeload.open(DATA / fixture) as opened:
        assert not [note for note in opened.notes if "distcp" in note]


@pytest.mark.parametrize("name", [".metadata", "__0.metadata", "__1.metadata"])
def test_any_metadata_file_opens_the_whole_checkpoint(name):
    folder = DATA / ("plain_2" if name == ".metadata" else "separate_2")
    check_tensors(safeload.load(folder / name), expected("plain_2"))


def test_a_part_opened_alone_says_what_it_is(tmp_path):
    with pytest.raises(SafeloadError, match=r"a part of a torch\.distributed checkpoint: open its folder"):
        safeload.open(DATA / "plain_4" / "__1_0.distcp")
    with safeload.open(DATA / "hf_4" / "shard-00002-model-00001-of-00001.safetensors") as opened:
        assert (opened.format, opened["rows"].shape) == ("safetensors", (2, 5))
    shutil.copy(DATA / "plain_4" / "__1_0.distcp", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"\.metadata"):
        safeload.open(tmp_path)


def test_a_folder_around_it_names_it(tmp_path):
    shutil.copytree(DATA / "plain_1", tmp_path / "weights")
    (tmp_path / "context").mkdir()
    with pytest.raises(UnsupportedError, match="Subfolders with weights: weights; open one of them"):
        safeload.open(tmp_path)


def test_a_consolidated_folder_opens_as_safetensors(tmp_path):
    shutil.copytree(DATA / "hf_4", tmp_path / "sharded")
    shutil.copy(DATA / "expected_4.safetensors", tmp_path / "model.safetensors")
    assert safeload.open(tmp_path).format == "safetensors"
    assert safeload.open(tmp_path / "sharded").format == "dcp"


def test_it_opens_from_a_store(fixture):
    fsspec = pytest.importorskip("fsspec")
    import safeload.remote

    memory = fsspec.filesystem("memory")
    memory.put(f"{DATA / fixture}/", f"/dcp/{fixture}/", recursive=True)
    with safeload.open(safeload.remote.of_fsspec(memory, f"/dcp/{fixture}")) as opened:
        check_tensors(opened.load(), expected(fixture))
        assert equal(opened.get_slice(next(iter(opened)))[...], expected(fixture)[next(iter(opened))])


# ---- random trees ----


def test_random_trees_of_random_meshes_come_back(tmp_path):
    dtypes = ["float32", "float16", "bfloat16", "int64", "uint8", "bool", "float64", "int16"]
    for k in range(20):
        made, want = Checkpoint(old=k % 3 == 0), {}
        for number in range(int(rng.integers(1, 6))):
            shape = tuple(map(int, rng.integers(0, 12, int(rng.integers(0, 4)))))
            array = np.asarray(rng.integers(0, 90, shape)).astype(np.dtype(str(rng.choice(dtypes))))
            parts = [int(n) for n in rng.integers(1, 5, len(shape))]
            boxes = list(grid(shape, parts)) if shape else None
            files = [f"__{rank}_0.distcp" for rank in range(int(rng.integers(1, 4)))]
            want[f"m.{number}"] = array
            made.tensor(f"m.{number}", array, boxes, files=files)
        made.value("n.step", k).write(tmp_path / str(k))
        with safeload.open(tmp_path / str(k)) as opened:
            check_tensors(opened.load(), want)
            assert dict(opened.metadata) == {"n": {"step": k}}


def test_a_slice_reads_only_its_chunk(tmp_path, monkeypatch):
    array = rng.standard_normal((64, 64)).astype(np.float32)
    Checkpoint().tensor("w", array, grid((64, 64), (8, 8)), files=[f"__{k}_0.distcp" for k in range(64)]).write(
        tmp_path
    )
    reads, read = set(), local.LocalStore.read_into

    def noted(store, offset, memory):
        reads.add(os.path.basename(store.path))
        read(store, offset, memory)

    monkeypatch.setattr(local.LocalStore, "read_into", noted)
    with safeload.open(tmp_path) as opened:
        assert reads <= {".metadata"}
        reads.clear()
        assert equal(opened.get_slice("w")[16:24, 8:16], array[16:24, 8:16].copy())
        assert reads == {"__17_0.distcp"}
        assert equal(opened.take("w", [9]), array[[9]])
        assert reads == {"__17_0.distcp", *(f"__{k}_0.distcp" for k in range(8, 16))}


@pytest.mark.skipif(os.name == "nt", reason="sparse files")
def test_of_a_large_checkpoint_one_tensor_opens_at_once_and_reads_one_chunk(tmp_path, monkeypatch):
    folder = sparse(tmp_path / "large", tensors=100, chunks=16, rows=1024, columns=16384)
    assert sum(path.stat().st_size for path in folder.glob("*.distcp")) > 100 << 30
    sizes = []
    read = local.LocalStore.read_into

    def counted(store, offset, memory):
        sizes.append(memoryview(memory).nbytes)
        read(store, offset, memory)

    monkeypatch.setattr(local.LocalStore, "read_into", counted)
    with safeload.open(folder) as opened:
        assert sum(sizes) < 1 << 20, "the metadata alone"
        assert opened.tensors["model.layers.99.weight"].shape == (16384, 16384)
        sizes.clear()
        assert not opened.get_slice("model.layers.99.weight")[3072:4096].any()
        assert 64 << 20 <= sum(sizes) < 65 << 20, "a chunk, and what describes it, which each thread may read"
        sizes.clear()
        assert not opened.get_slice("model.layers.50.weight")[5000].any()
        assert sum(sizes) < 256 << 10, "a row"


def test_values_are_read_with_the_first_access(tmp_path):
    made = (
        Checkpoint().tensor("w", np.ones(2)).value("a.x", [1, {"y": (2, None)}]).value("b", Call(Ref("evil", "run"), 7))
    )
    made.write(tmp_path)
    data = bytearray((tmp_path / "__0_0.distcp").read_bytes())
    with safeload.open(tmp_path) as opened:
        assert list(opened.metadata) == ["a", "b"]
        assert opened.metadata["a"] == {"x": [1, {"y": (2, None)}]}
        assert opened.metadata["b"] == {"<global>": "evil.run", "<args>": (7,)}
    begin = next(offset for name, *_, offset, _, _ in made.chunks if name == "a.x")
    data[begin] ^= 1
    (tmp_path / "__0_0.distcp").write_bytes(data)
    with safeload.open(tmp_path) as opened:
        assert opened["w"].sum() == 2
        with pytest.raises(FormatError):
            opened.metadata["b"]


def test_paths_tell_levels_from_dots_and_may_be_absent(tmp_path):
    one = np.ones(1, np.float32)
    made = (
        Checkpoint()
        .tensor("a.b.c", one, path=("a.b", "c"))
        .tensor("x.y", one, path=None)
        .value("p.q", 1, path=("p.q",))
    )
    made.write(tmp_path)
    assert list(safeload.load(tmp_path, root="a.b")) == ["c"]
    assert dict(safeload.open(tmp_path).metadata) == {"p.q": 1}
    made.paths = None
    made.write(tmp_path)
    assert sorted(safeload.load(tmp_path)) == ["a.b.c", "x.y"]
    with pytest.raises(TensorNotFoundError, match="containers: none"):
        safeload.open(tmp_path, root="x")


def test_megatron_is_noted(tmp_path):
    made = Checkpoint().tensor("w", np.ones(4, np.float32)).tensor("flat", np.ones((2, 2), np.float32))
    whole = made.metadata()
    whole.function = Ref("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")
    whole.state["mcore_data"] = {"flat": {"nd_reformulated_orig_global_shape": (4,)}, "w": {}}
    made.metadata = lambda: whole
    made.write(tmp_path)
    (tmp_path / "common.pt").write_bytes(zip_file({"iteration": 3}))
    with safeload.open(tmp_path) as opened:
        assert list(opened) == ["w"]
        assert opened.notes[0].startswith("left out: 'flat', which Megatron stores flattened")
        assert "common.pt" in opened.notes[1]


# ---- faults ----


def chunk_of(made, name="w", k=0):
    return [chunk for chunk in made.chunks if chunk[0] == name][k]


def changed(position, value, **which):
    def change(made):
        chunk_of(made, **which)[position] = value

    return change


def with_about(*about):
    def change(made):
        made.about["w"] = [*about, *made.about["w"][len(about) :]]

    return change


def with_content(content, name="b"):
    def change(made):
        chunk = chunk_of(made, name)
        chunk[2:5] = ["__9_0.distcp", 0, len(content)]
        made.files["__9_0.distcp"] = bytearray(content)

    return change


def with_boxes(*boxes):
    def change(made):
        made.about["w"][2] = list(boxes)
        for k, (offsets, _) in enumerate(boxes[:2]):
            chunk_of(made, k=k)[1] = offsets

    return change


def with_state(**fields):
    def change(made):
        whole = made.metadata()
        whole.state.update(fields)
        made.metadata = lambda: whole

    return change


def add_transform(*transforms):
    return lambda made: changed(5, list(transforms))(made)


RUNS = zip_file(Call(Ref("os", "system"), "x"), align=400)
TRAVERSAL = ["../x", "a/b", "..", "", "/etc/passwd", "a\\b", "c:x", "\0"]
FAULTS = {
    **{f"path {name!r}": (changed(2, name), FormatError, "relative_path must be the bare name") for name in TRAVERSAL},
    "path of another type": (changed(2, 7), FormatError, "relative_path must be the bare name"),
    "negative offset": (changed(3, -1), FormatError, "must be from 0 to"),
    "huge offset": (changed(3, 1 << 61), FormatError, "lie outside the file"),
    "huge length": (changed(4, 1 << 61), FormatError, "lie outside the file"),
    "offset of another type": (changed(3, 1.5), FormatError, "must be integers"),
    "short length": (changed(4, 10), FormatError, "has 48 bytes, but 10 bytes store it"),
    "length of the whole file": (changed(4, 100), FormatError, "zip"),
    "other chunk's place": (changed(1, (1, 0)), FormatError, "the chunk at .0, 0. has no place"),
    "missing file": (changed(2, "__7_0.distcp"), FileNotFoundError, "the checkpoint's metadata lists it"),
    "huge shape": (with_about("float32", (1 << 61, 4)), LimitError, "more bytes than any memory has"),
    "large shape": (with_about("float32", (1 << 40, 4)), FormatError, "elements are in none"),
    "large chunk": (with_boxes(((0, 0), (1 << 40, 4))), FormatError, "but .* bytes store it"),
    "negative shape": (with_about("float32", (-6, 4)), FormatError, "the size must be integers|must be from 0"),
    "shape of another type": (with_about("float32", ("6", 4)), FormatError, "the size must be integers"),
    "40 axes": (with_about("float32", (1,) * 40, [((0,) * 40, (1,) * 40)]), LimitError, "40 axes, more than 31"),
    "complex32": (with_about("complex32", (6, 4)), UnsupportedError, "complex32 cannot be represented by an array"),
    "no dtype": (with_about("Tensor", (6, 4)), FormatError, r"no dtype of torch, got 'torch\.Tensor'"),
    "another dtype": (with_about("int32", (6, 4)), FormatError, "says its chunk is I32 .*, but it is F32"),
    "a hole": (with_boxes(((0, 0), (3, 4))), FormatError, "12 of 24 elements are in none of its 1 chunks"),
    "an overlap": (with_boxes(((0, 0), (3, 4)), ((2, 0), (4, 4))), FormatError, "overlap|bytes store it"),
    "outside": (with_boxes(((0, 0), (3, 4)), ((4, 0), (3, 4))), FormatError, "is not inside shape"),
    "another rank": (with_boxes(((0,), (3,))), FormatError, "is not inside shape"),
    "a chunk of another shape": (with_content(archive(np.ones((3, 1), np.float32))), FormatError, r"is F32 \[3, 1\]"),
    "no tensor in the chunk": (with_content(zip_file({"a": 1})), FormatError, "single tensor, got 0|bytes store"),
    "two tensors in the chunk": (
        with_content(zip_file([tensor(Storage("0", np.ones(3, np.float32)))] * 2)),
        FormatError,
        "must hold a single tensor, got 2",
    ),
    "a global in the chunk": (with_content(RUNS), ForbiddenError, r"os\.system"),
    "no archive": (with_content(b"x" * 1000), FormatError, "zip"),
    "a big-endian chunk": (
        with_content(zip_file(tensor(Storage("0", np.ones(3, np.float32))), order="big")),
        UnsupportedError,
        "big-endian",
    ),
    "another transform": (add_transform("stream.lz4/1"), UnsupportedError, "of transforms safeload reads"),
    "another version of zstd": (add_transform("stream.zstd/2"), UnsupportedError, r"zstd/2"),
    "two transforms": (add_transform("stream.zstd/1", "stream.zstd/1"), UnsupportedError, "a single"),
    "transforms of another type": (changed(5, 3), FormatError, "must be a list of texts"),
    "no zstd frame": (add_transform("stream.zstd/1"), FormatError, "zstd frame cannot be read"),
    "no records": (with_state(state_dict_metadata=3), FormatError, "state_dict_metadata must be a dict, got 3"),
    "no storage": (with_state(storage_data=None), FormatError, "storage_data must be a dict, got None"),
    "empty storage": (with_state(storage_data={}), FormatError, "has no place"),
    "a strange record": (with_state(state_dict_metadata={"w": 5}), FormatError, "must be described as tensor or bytes"),
    "a strange name": (with_state(state_dict_metadata={5: 5}), FormatError, "a name must be text"),
    "a record without fields": (
        with_state(state_dict_metadata={"w": record("TensorStorageMetadata", (1, 2))}),
        FormatError,
        "expected a TensorStorageMetadata with fields",
    ),
    "another global": (with_state(extra=Call(Ref("os", "system"), "rm")), ForbiddenError, r"os\.system"),
    "a strange key of storage": (with_state(storage_data={"w": 1}), FormatError, "expected a MetadataIndex"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_name(fault, tmp_path):
    change, kind, message = FAULTS[fault]
    if "zstd frame" in message:
        pytest.importorskip("zstandard")
    made = sample()
    change(made)
    made.write(tmp_path)
    with pytest.raises((kind, OSError) if kind is FileNotFoundError else kind, match=message) as caught:
        safeload.load(tmp_path)
    if isinstance(caught.value, FormatError):
        assert str(tmp_path) in str(caught.value)


def test_chunks_that_share_bytes_cannot_make_a_large_tensor(tmp_path):
    made = sample()
    part = chunk_of(made, "b")
    shape = (3 * 1000,)
    made.about["big"] = ["float32", shape, [((3 * k,), (3,)) for k in range(1000)]]
    made.chunks += [["big", (3 * k,), *part[2:]] for k in range(1000)]
    made.paths["big"] = ("big",)
    made.write(tmp_path)
    with pytest.raises(FormatError, match="chunks overlap in the file"):
        safeload.open(tmp_path)


def test_a_frame_that_expands_beyond_its_shape_is_a_limit(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.compress(bytes(64 << 20))
    made = sample()
    chunk = chunk_of(made, "b")
    chunk[2:] = ["__9_0.distcp", 0, len(bomb), ["stream.zstd/1"]]
    made.files["__9_0.distcp"] = bytearray(bomb)
    made.write(tmp_path)
    with pytest.raises(LimitError, match="the most that its shape needs"):
        safeload.load(tmp_path)


@pytest.mark.parametrize("fixture", ["plain_2", "separate_2", "safetensors_4", "hf_numbered_4", "zstd_4"])
def test_a_file_cut_or_missing_is_an_error_and_never_another_value(fixture, tmp_path):
    if fixture.startswith("zstd"):
        pytest.importorskip("zstandard")
    want = expected(fixture)
    for source in sorted((DATA / fixture).iterdir()):
        content = source.read_bytes()
        sizes = sorted({0, 1, len(content) // 2, len(content) - 1, *map(int, rng.integers(0, len(content), 4))})
        for nbytes in [None, *sizes]:
            folder = tmp_path / "cut"
            shutil.copytree(DATA / fixture, folder)
            (folder / source.name).unlink() if nbytes is None else (folder / source.name).write_bytes(content[:nbytes])
            try:
                with safeload.open(folder) as opened:
                    arrays = opened.load()
                    dict(opened.metadata)
            except (SafeloadError, FileNotFoundError):
                pass
            else:  # of sharded safetensors a missing last shard of rows goes unnoticed, and so does a whole tensor's
                assert nbytes is None or nbytes == len(content) or all(equal(a, want[n]) for n, a in arrays.items())
                assert nbytes is not None or fixture.startswith(("hf", "separate"))
            shutil.rmtree(folder)


def test_random_bytes_changed_anywhere_never_crash(tmp_path):
    shutil.copytree(DATA / "plain_4", tmp_path / "a")
    for name in (".metadata", "__1_0.distcp"):
        content = (DATA / "plain_4" / name).read_bytes()
        for _ in range(40):
            bent = bytearray(content)
            for _ in range(int(rng.integers(1, 4))):
                bent[int(rng.integers(len(bent)))] = int(rng.integers(256))
            (tmp_path / "a" / name).write_bytes(bent)
            try:
                with safeload.open(tmp_path / "a") as opened:
                    opened.load()
                    dict(opened.metadata)
            except (SafeloadError, FileNotFoundError):
                pass
        (tmp_path / "a" / name).write_bytes(content)


SHARDING = {
    "no json": ("[", "is not JSON"),
    "a list": ("[]", "must give 1 offsets"),
    "no offsets": ('{"w": {}}', "must give 1 offsets"),
    "negative": ('{"w": {"saved_offsets": [-1]}}', "must give 1 offsets"),
    "of another rank": ('{"w": {"saved_offsets": [0, 0]}}', "must give 1 offsets"),
    "no numbers": ('{"w": {"saved_offsets": [true]}}', "must give 1 offsets"),
    "huge": ('{"w": {"saved_offsets": [4611686018427387000]}}', "more bytes than any memory|elements are in none"),
    "a hole": ('{"w": {"saved_offsets": [5]}}', "5 of 8 elements are in none"),
}


@pytest.mark.parametrize("case", SHARDING)
def test_offsets_of_sharded_safetensors_are_checked(case, tmp_path):
    text, message = SHARDING[case]
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    from safeload.numpy import save_file

    save_file({"w": np.ones(3, np.float32)}, path, metadata={"DCP_SHARDING_INFO": text, "format": "pt"})
    with pytest.raises((FormatError, LimitError), match=message):
        safeload.open(tmp_path)
    save_file({"w": np.ones(3, np.float32)}, path)
    with pytest.raises(FormatError, match="the header has no DCP_SHARDING_INFO"):
        safeload.open(tmp_path)


def test_a_checkpoint_that_changed_is_not_opened_again(tmp_path):
    sample().write(tmp_path)
    with safeload.open(tmp_path) as opened:
        pickled = pickle.dumps(opened)
    sample().value("more", 1).write(tmp_path)
    with pytest.raises(FormatError, match="has changed since it was opened"):
        pickle.loads(pickled)


def test_after_close_nothing_is_read(tmp_path):
    sample().write(tmp_path)
    opened = safeload.open(tmp_path)
    part = opened.get_slice("w")
    opened.close()
    for action in (lambda: opened["w"], lambda: part[1:, 1:2], lambda: part[1:]):
        with pytest.raises(ValueError, match="is closed"):
            action()


def test_zstd_without_its_package_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    with pytest.raises(ModuleNotFoundError, match="pip install zstandard"):
        safeload.open(DATA / "zstd_4")


def test_chunks_that_tensors_share_are_limited_by_the_pickle(tmp_path):
    sizes = {"offsets": size((0,)), "sizes": size((0,))}
    chunks = [record("ChunkStorageMetadata", sizes)] * 500
    fields = {"properties": properties("float32"), "size": size((0,)), "chunks": chunks}
    about = record("TensorStorageMetadata", fields)
    metadata = {"state_dict_metadata": {f"t{k}": about for k in range(500)}, "storage_data": {}, "planner_data": None}
    (tmp_path / ".metadata").write_bytes(dump(record("Metadata", metadata), 4))
    with pytest.raises(LimitError, match=r"its tensors have more than .* chunks"):
        safeload.open(tmp_path / ".metadata", format="dcp")


def test_boxes_have_a_limit_of_axes(tmp_path):
    array = np.ones((1,) * 32, np.float32)
    Checkpoint().tensor("w", array).write(tmp_path)
    with pytest.raises(LimitError, match="has 32 axes, more than 31"):
        safeload.open(tmp_path)
