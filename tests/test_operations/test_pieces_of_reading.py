"""stats, diff, validate and manifests on an executor: what they find is what one process finds, bit for bit."""

import json
import os
import pickle
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders import inside
from builders.executors import Backwards, Lazy, Plain, echoed, processes
from builders.inside import local, manifest
from builders.models import small, write_folder
from builders.quantized import FIXTURES
from builders.thorough import part_of
from builders.torch_build import Ref, Storage, ordered, tensor, zip_file

import safeload
from safeload.errors import MissingShardError
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So many pieces as large checkpoints have."""
    monkeypatch.setattr(inside.executors, "_SMALLEST", 4000)
    monkeypatch.setattr(inside.executors, "_TENSOR_COST", 0)


def odd(seed=0):
    """Tensors of several dtypes, some with NaN and infinity, some without elements or axes."""
    rng = np.random.default_rng(seed)
    wild = rng.standard_normal((40, 30)).astype(np.float32)
    wild[3, 4], wild[5, 6], wild[7] = np.nan, -np.inf, 0
    return {
        "wild.weight": wild,
        "half": rng.standard_normal((33, 65)).astype(np.float16),
        "double": rng.standard_normal(1000) * 1e300,
        "long": rng.integers(-(2**62), 2**62, (7, 100)),
        "byte": rng.integers(0, 255, 5000).astype(np.uint8),
        "bool": rng.random(300) < 0.5,
        "complex": (rng.standard_normal((5, 5)) + 1j).astype(np.complex64),
        "none": np.zeros((0, 4), np.float32),
        "one": np.float32(3.25).reshape(()),
        "constant.weight": np.full((8, 8), 0.1, np.float32),
    }


def of_file(tmp_path):
    save_file(odd(), tmp_path / "x.safetensors", durable=False)
    return tmp_path / "x.safetensors"


def of_folder(tmp_path):
    config, tensors = small("llama-gqa")
    tensors["model.norm.weight"][3] = np.nan
    folder = write_folder(tmp_path, config, tensors, shards=3)
    # A tensor that the index leaves out, with the name of one that it lists elsewhere.
    last = folder / "model-00003-of-00003.safetensors"
    first = next(iter(load_file(folder / "model-00001-of-00003.safetensors")))
    save_file({**load_file(last, backend="pread"), first: np.ones(3), "unlisted": np.ones(2)}, last, durable=False)
    return folder


def of_tied_folder(tmp_path):
    config, tensors = small("llama-tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1, -1] = 1
    return write_folder(tmp_path, config, tensors)


def of_gguf(tmp_path):
    rng = np.random.default_rng(5)
    tensors = {f"blk.{k}.weight": rng.standard_normal((16, 64)).astype(np.float32) for k in range(6)}
    safeload.convert(tensors, tmp_path / "x.gguf", quantize="q4_0")
    return tmp_path / "x.gguf"


def of_npz(tmp_path):
    np.savez(tmp_path / "x.npz", **odd())
    return tmp_path / "x.npz"


def of_compressed_npz(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", **odd())
    return tmp_path / "x.npz"


def flipped(path, name):
    """A file in whose archive the bytes of an entry do not have its CRC-32."""
    with safeload.open(path) as opened:
        at = opened.tensors[name].offset
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    return path


def of_torch(tmp_path):
    shared = np.arange(2400, dtype=np.float32)
    state = {
        "strided": tensor(Storage("0", shared), (30, 40), (1, 30)),
        "shares": tensor(Storage("0", shared), (20,), (1,), 7),
        "plain": tensor(Storage("1", np.ones(500, np.float64))),
        "int": tensor(Storage("2", np.arange(2000, dtype=np.int32))),
    }
    path = tmp_path / "x.pt"
    path.write_bytes(zip_file(state))
    return flipped(path, "int")


def of_int8(tmp_path):
    tensors = small("llama-gqa")[1]
    safeload.convert(tensors, tmp_path / "x.safetensors", quantize="int8")
    return tmp_path / "x.safetensors"


def fixture(name):
    return lambda tmp_path: FIXTURES[name].path


def scales_apart(name, *, good=True):
    """A packed checkpoint whose scales are in another shard than their codes."""

    def made(tmp_path):
        source = FIXTURES[name]
        stored = {name: array.copy() for name, array in source.stored().items()}
        scales = [name for name, array in stored.items() if "scale" in name and array.dtype.kind == "f" and array.ndim]
        weight_map = {key: f"model-0000{1 + ('scale' in key)}-of-00002.safetensors" for key in stored}
        if not good:
            stored[scales[0]].flat[0] = np.nan
        for file in set(weight_map.values()):
            save_file({key: stored[key] for key in stored if weight_map[key] == file}, tmp_path / file, durable=False)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        if (source.folder / "config.json").exists():
            (tmp_path / "config.json").write_bytes((source.folder / "config.json").read_bytes())
        return tmp_path

    return made


SOURCES = {
    "safetensors": of_file,
    "folder": of_folder,
    "tied": of_tied_folder,
    "gguf": of_gguf,
    "npz": of_npz,
    "compressed npz": of_compressed_npz,
    "torch": of_torch,
    "legacy torch": lambda tmp_path: FIXTURES["ct_kimi"].path.parents[1] / "torch" / "legacy_with_offsets.pt",
    "int8": of_int8,
    "int4": fixture("ct_pack_w4_g32_sym"),
    "mxfp4": fixture("ct_mxfp4"),
    "nvfp4": fixture("ct_nvfp4"),
    "fp8 apart": scales_apart("ct_fp8_channel"),
    "bad scales": scales_apart("ct_fp8_channel", good=False),
}


def plain(found):
    """What an operation has found as text in which every bit of every number stands."""
    if isinstance(found, safeload.CheckReport | safeload.DiffReport):
        found = {key: value for key, value in vars(found).items() if key != "seconds"}
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    if isinstance(found, safeload.TensorStats):
        return repr(
            [*found[:-1], None if found.histogram is None else (found.histogram.dtype, found.histogram.tolist())]
        )
    return repr(found)


def everything(path, executor=None):
    """What the four operations find, or raise."""
    operations = {
        "stats": lambda: safeload.stats(path, histogram=True, executor=executor),
        "validate": lambda: safeload.check(path, executor=executor),
        "manifest": lambda: manifest.make(path, executor=executor),
        "diff": lambda: safeload.diff(path, other_of(path), executor=executor),
    }
    return {name: outcome(operation) for name, operation in operations.items()}


def outcome(operation):
    """What an operation returns, or raises, as text."""
    try:
        return plain(operation())
    except (safeload.SafeloadError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def other_of(path):
    """A checkpoint with other values, beside the first or in a file of its own; the same where it cannot be made."""
    return OTHERS.get(str(path), path)


OTHERS: dict[str, str] = {}


@pytest.fixture
def source(request, tmp_path):
    """A checkpoint, beside which stands another with other values."""
    folder = tmp_path / "source"
    folder.mkdir()
    path = SOURCES[request.param](folder)
    if request.param != "bad scales":
        other = tmp_path / "other.safetensors"
        arrays = {name: np.ascontiguousarray(x) for name, x in safeload.load(path, dtype="float16").items()}
        save_file({name: x if x.dtype == bool else x + x.dtype.type(1) for name, x in arrays.items()}, other)
        OTHERS[str(path)] = str(other)
    return path


@pytest.mark.parametrize("source", part_of([*SOURCES], 0, 2), indirect=True)
def test_every_format_without_a_mapping(source, monkeypatch):
    expected = everything(source)
    mapped = []
    original = local.LocalStore.map
    monkeypatch.setattr(local.LocalStore, "map", lambda store: mapped.append(store.path) or original(store))
    executor = Plain()
    assert everything(source, executor) == expected
    assert mapped == []
    assert {piece["operation"] for piece in executor.pieces} == {"stats", "validate", "manifest", "diff"}
    for piece in executor.pieces:
        again = (
            lambda piece=piece, threads=threads: echoed(safeload.run_piece(piece, threads=threads))
            for threads in (1, 3)
        )
        assert len(set(map(str, map(outcome, again)))) == 1


@pytest.fixture(scope="module")
def pool():
    with processes() as made:
        yield made


@pytest.mark.parametrize("source", ["folder", "torch", "fp8 apart"], indirect=True)
def test_other_processes(source, pool, monkeypatch, tmp_path):
    with ThreadPoolExecutor(3) as threads:
        assert everything(source, pool) == everything(source, threads) == everything(source)
    monkeypatch.chdir(source if source.is_dir() else source.parent)  # where the processes are not
    relative = "." if source.is_dir() else source.name
    assert plain(safeload.stats(relative, histogram=True, executor=pool)) == everything(source)["stats"]


def test_pieces_done_out_of_order(tmp_path):
    folder = of_folder(tmp_path)
    expected = Plain()
    steps = []
    want = plain(safeload.check(folder, executor=expected))
    executor = Backwards(len(expected.pieces))
    found = safeload.check(folder, executor=executor, progress=lambda *step: steps.append(step))
    assert plain(found) == want
    assert executor.done == expected.pieces[::-1]
    assert len(steps) == len(executor.done) > 3
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1] == sum(array.nbytes for array in safeload.load(folder).values())


def test_pieces_are_balanced_whatever_the_order_of_the_names(tmp_path):
    files = []
    for k in range(3):
        files.append(tmp_path / f"{k}.safetensors")
        save_file({f"{i:03}.{k}": np.ones(100, np.float32) for i in range(100)}, files[-1], durable=False)
    names = sorted(f"{i:03}.{k}" for k in range(3) for i in range(100))  # each in another file than the one before
    executor = Plain()
    with safeload.open(files) as checkpoint:
        found = safeload.stats(checkpoint, names=(name for name in names), executor=executor)
    assert list(found) == names
    assert len(executor.pieces) == 30
    for piece in executor.pieces:
        (source,) = piece["sources"]
        assert len(source["files"]) == 1
        assert len(piece["names"]) == 10


def test_small_files_share_a_piece_and_packed_archives_are_read_once(tmp_path, monkeypatch):
    for k in range(20):
        save_file({f"{k}": np.ones(10, np.float32)}, tmp_path / f"{k}.safetensors", durable=False)
    executor = Plain()
    with safeload.open([tmp_path / f"{k}.safetensors" for k in range(20)]) as checkpoint:
        safeload.stats(checkpoint, executor=executor)
    assert len(executor.pieces) == 1
    executor = Plain()
    np.savez_compressed(tmp_path / "x.npz", **{f"{k}": np.ones(3000) for k in range(10)})
    safeload.stats(tmp_path / "x.npz", executor=executor)
    assert len(executor.pieces) == 1


def test_many_tiny_tensors_are_several_pieces(tmp_path, monkeypatch):
    monkeypatch.undo()
    save_file({f"{k}": np.float32([k]) for k in range(10000)}, tmp_path / "x.safetensors", durable=False)
    executor = Lazy(begun=9)
    assert plain(safeload.stats(tmp_path / "x.safetensors", executor=executor)) == plain(
        safeload.stats(tmp_path / "x.safetensors")
    )
    assert len(executor.futures) == 3


def test_interrupted_while_it_waits(tmp_path):
    class Interrupted(Lazy):
        def submit(self, *arguments):
            future = super().submit(*arguments)
            if len(self.futures) == 3:
                future.set_exception(KeyboardInterrupt())
            return future

    executor = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        safeload.check(of_folder(tmp_path), executor=executor)
    assert [future.cancelled() for future in executor.futures].count(False) == 1


def test_selections(tmp_path):
    folder = of_folder(tmp_path)
    executor = Plain()
    for options in ({"only": "*mlp*"}, {"drop": ["*mlp*", "lm_head.*"]}, {"only": "*norm*", "drop": "model.norm*"}):
        assert plain(safeload.stats(folder, executor=executor, **options)) == plain(safeload.stats(folder, **options))
        assert plain(safeload.check(folder, executor=executor, **options)) == plain(safeload.check(folder, **options))
        assert plain(safeload.diff(folder, folder, executor=executor, **options)) == plain(
            safeload.diff(folder, folder, **options)
        )
    names = ["model.norm.weight", "lm_head.weight"]
    assert list(safeload.stats(folder, names=iter(names), executor=executor)) == names
    with pytest.raises(safeload.TensorNotFoundError, match="norm"):
        safeload.stats(folder, names=["norm"], executor=executor)


def test_checkpoints_opened_in_odd_ways(tmp_path):
    nested = ordered({"ema": ordered({"w": tensor(Storage("0", np.float32([1, 2, 3])))})})
    path = tmp_path / "x.pt"
    path.write_bytes(zip_file(ordered({"model": nested, "odd": Ref("my.module", "Config")})))
    tensors = small("llama-gqa")[1]
    safeload.convert(tensors, tmp_path / "q.safetensors", quantize="int8")
    cases = [
        (path, {"root": "model.ema", "unknown_globals": "inert"}),
        (tmp_path / "q.safetensors", {"stored": True}),
        (FIXTURES["ct_mxfp8"].path, {"stored": True}),
        ([FIXTURES["ct_pack_w4_g32_sym"].path, of_file(tmp_path)], {}),
    ]
    for where, options in cases:
        with safeload.open(where, **options) as checkpoint:
            expected = everything(checkpoint)
            assert everything(checkpoint, Plain()) == expected
            assert everything(pickle.loads(pickle.dumps(checkpoint)), Plain()) == expected
        assert any(isinstance(found, dict) and found for found in expected.values()), where
        with pytest.raises(ValueError, match="closed"):
            manifest.make(checkpoint, executor=Plain())


def test_expected_scales(tmp_path):
    path = of_int8(tmp_path)
    scale = {
        "model.layers.0.mlp.up_proj.weight": np.float32(0.1),
        "model.layers.0.mlp.down_proj.weight": None,
        "other": 1,
    }
    for limits in ({"scale": scale}, {"absmax": 3.3}, {"scale": 0.01, "absmax": {}}):
        executor = Plain()
        report = safeload.check(path, limits=limits, executor=executor)
        assert plain(report) == plain(safeload.check(path, limits=limits))
        assert report.errors
    assert "other" not in json.dumps(executor.pieces)


@pytest.mark.parametrize("empty", ["safetensors", "npz", "folder"])
def test_nothing_to_read(empty, tmp_path):
    path = tmp_path / f"x.{empty}"
    if empty == "npz":
        np.savez(path)
    elif empty == "safetensors":
        save_file({}, path)
    else:
        path.mkdir()
        (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    executor = Plain()
    assert everything(path, executor) == everything(path)
    assert executor.pieces == []


def test_tensors_in_memory_are_refused():
    for given in ({"x": np.ones(3)}, np.ones(3), safeload.quantize(np.ones((2, 32), np.float32), "q8_0")):
        for operation in (safeload.stats, safeload.check):
            with pytest.raises(ValueError, match=r"executor= needs the path of a checkpoint, or an open one"):
                operation(given, executor=Plain())
    given = {"x": np.ones(3)}
    with pytest.raises(ValueError, match="executor= needs the path"):
        safeload.diff(given, given, executor=Plain())
    with pytest.raises(ValueError, match="executor= needs the path"):
        manifest.make(given, executor=Plain())


def test_what_is_no_executor(tmp_path):
    path = of_file(tmp_path)
    more_doors = [
        lambda x, **more: safeload.diff(x, x, **more),
        lambda x, **more: safeload.verify(x, write=True, **more),
    ]
    for operation in (safeload.stats, safeload.check, *more_doors):
        with pytest.raises(TypeError, match=r"submit\(\).*got str"):
            operation(path, executor="dask")
        with pytest.raises(TypeError, match=r"submit\(\).*got type"):
            operation(path, executor=ThreadPoolExecutor)


# ---- faults ----


def test_a_piece_that_raises_ends_the_run(tmp_path):
    folder = of_folder(tmp_path)
    shard = folder / "model-00001-of-00003.safetensors"
    first = min(load_file(shard))
    executor = Lazy(begun=1)
    with safeload.open(folder) as checkpoint:
        shard.write_bytes(shard.read_bytes()[:-100])
        with pytest.raises(safeload.FormatError, match=r"the file has changed") as caught:
            safeload.stats(checkpoint, names=sorted(checkpoint), executor=executor)
    assert caught.value.path == str(shard)
    assert caught.value.tensor == first
    assert len(executor.futures) > 3
    assert [future.cancelled() for future in executor.futures] == [False] + [True] * (len(executor.futures) - 1)


def test_an_executor_that_refuses_a_piece(tmp_path):
    folder = of_folder(tmp_path)
    for operation in (safeload.stats, safeload.check):
        executor = Lazy(accepted=2)
        with pytest.raises(RuntimeError, match="no room"):
            operation(folder, executor=executor)
        assert [future.cancelled() for future in executor.futures] == [True, True]
    with ThreadPoolExecutor(1) as pool:
        pool.shutdown()
        with pytest.raises(RuntimeError, match="shutdown"):
            safeload.check(folder, executor=pool)


def test_an_error_of_the_executor_is_no_finding(tmp_path):
    class Broken(Plain):
        def _twice(self, *arguments):
            raise OSError("the scheduler is gone")

    with pytest.raises(OSError, match="the scheduler is gone"):
        safeload.check(of_file(tmp_path), executor=Broken())


@pytest.mark.skipif(sys.platform == "win32", reason="a file that is open stays until it is closed")
def test_a_shard_that_is_gone(tmp_path, pool):
    folder = of_folder(tmp_path)
    shard = folder / "model-00002-of-00003.safetensors"
    with safeload.open(folder) as checkpoint:
        shard.unlink()
        with pytest.raises(MissingShardError, match=r"of tensor '.*' (and of \d+ more tensors? )?is gone") as caught:
            safeload.stats(checkpoint, executor=pool)
        assert caught.value.path == str(shard)
        assert caught.value.tensor in checkpoint
        report = safeload.check(checkpoint, executor=pool)
        assert [finding.code for finding in report.errors] == ["file.read"]
        assert re.search(r"tensor '.*' (and of \d+ more tensors )?is gone", report.errors[0].message)
        assert str(shard) in report.errors[0].message
        assert report.stats == {}


@pytest.mark.parametrize("as_file", [False, True], ids=["by its folder", "by its file"])
def test_a_configuration_that_changes(as_file, tmp_path):
    """The codes would mean something else."""
    shutil.copytree(FIXTURES["ct_pack_w4_g128_asym"].folder, tmp_path, dirs_exist_ok=True)
    files = sorted(tmp_path.glob("*.safetensors"))
    with safeload.open(files if as_file else tmp_path) as checkpoint:
        expected = plain(safeload.stats(checkpoint))
        assert plain(safeload.stats(checkpoint, executor=Plain())) == expected
        config = tmp_path / "config.json"
        original = config.read_text()

        def change(piece):
            config.write_text(original + " ")

        with pytest.raises(safeload.FormatError, match=r"changed.*config\.json"):
            safeload.stats(checkpoint, executor=Plain(before=change))
        config.write_text(original)
        with pytest.raises((safeload.FormatError, OSError), match=r"config\.json"):
            safeload.stats(checkpoint, executor=Plain(before=lambda piece: config.unlink()))


def test_a_shard_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    """The piece has opened it: then the error is that of one process."""
    folder = of_folder(tmp_path)
    shard = folder / "model-00003-of-00003.safetensors"

    original, size = inside.executors._reopened, shard.stat().st_size

    def truncated(*arguments):
        os.truncate(shard, size)
        os.utime(shard, ns=(0, time))
        opened = original(*arguments)
        os.truncate(shard, size - 10)
        return opened

    monkeypatch.setattr(inside.executors, "_reopened", truncated)
    time = shard.stat().st_mtime_ns
    with safeload.open(folder) as checkpoint:
        found = safeload.check(checkpoint, executor=Plain())
        expected = safeload.check(checkpoint)
    assert [finding.code for finding in found.errors] == ["file.read"]
    assert str(shard) in found.errors[0].message
    assert found.errors == expected.errors


def test_run_piece_says_what_is_wrong_with_a_piece(tmp_path):
    executor = Plain()
    everything(of_torch(tmp_path), executor)
    for piece in executor.pieces:
        with pytest.raises(safeload.UnsupportedError, match="every worker needs the same version"):
            safeload.run_piece({**piece, "version": "0"})
        for key in ("operation", "sources", "names", "check", "against", "archives"):
            if not piece.get(key):
                continue
            for wrong in (None, 7, {}, [[]], [["a"]], [{}], [{"files": [["a"]]}]):
                assert refused({**piece, key: wrong}), (key, wrong)


def refused(piece):
    """Whether a piece is refused, or its result says what is wrong."""
    try:
        return any(table.startswith("unread ") and rows for table, rows in safeload.run_piece(piece).items())
    except safeload.SafeloadError as error:
        return bool(str(error))
