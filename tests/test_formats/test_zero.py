"""ZeRO checkpoints: what DeepSpeed wrote, vectors of any partition, and folders with a fault."""

import os
import pickle
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builders.paths import ROOT
from builders.random import rng
from builders.torch_build import Call, Ref, Storage, ordered, tensor, zip_file

import safeload
from safeload.errors import (
    ForbiddenError,
    FormatError,
    MissingShardError,
    SafeloadError,
    TensorNotFoundError,
    UnsupportedError,
)

pytestmark = pytest.mark.any_python

# tests/data/deepspeed/compare.sh lets DeepSpeed write all fixtures anew.
DATA = Path(os.environ.get("SAFELOAD_ZERO_FIXTURES") or ROOT / "tests" / "data" / "deepspeed")
FIXTURES = sorted(path.name for path in DATA.glob("zero?_?"))


def check_tensors(arrays, want):
    assert sorted(arrays) == sorted(want)
    for name, array in want.items():
        got = arrays[name]
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


def expected(fixture):
    """What zero_to_fp32 gives; of ZeRO 1 it leaves out the frozen weight."""
    want = safeload.load(DATA / f"{fixture}.safetensors")
    if fixture.startswith("zero1"):
        assert "frozen.weight" not in want
        want["frozen.weight"] = safeload.load(DATA / fixture, root="module")["frozen.weight"]
    return want


# ---- what DeepSpeed wrote ----


@pytest.mark.parametrize("fixture", FIXTURES)
def test_the_weights_are_those_of_zero_to_fp32(fixture, tmp_path):
    want = expected(fixture)
    for path in (DATA / fixture, DATA / fixture / "global_step1"):
        with safeload.open(path) as opened:
            assert (opened.format, opened.notes) == ("deepspeed", [])
            check_tensors(opened.load(), want)
            check_tensors(dict(opened.stream()), want)
            assert (opened.metadata["epoch"], opened.metadata["note"]) == (3, "text")
            assert opened.metadata["ds_config"]["zero_optimization"]["stage"] == int(fixture[4])
            assert all(opened.named_globals.values())
            part = opened.get_slice("mix.weight")
            assert part[1:4, 2].tolist() == want["mix.weight"][1:4, 2].tolist()
            assert (opened.take("embed.weight", [12, 0]) == want["embed.weight"][[12, 0]]).all()
            for again in (pickle.loads(pickle.dumps(opened)), opened):
                check_tensors(again.load(), want)
            assert pickle.loads(pickle.dumps(part))[...].tobytes() == want["mix.weight"].tobytes()
    safeload.convert(DATA / fixture, tmp_path / "out", max_shard_size=200)
    check_tensors(safeload.load(tmp_path / "out"), want)
    assert not safeload.check(DATA / fixture).errors
    assert not list(tmp_path.glob("*.tmp"))


def test_work_is_divided_among_processes(tmp_path):
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1) as executor:
        safeload.convert(DATA / "zero3_3", tmp_path / "out", max_shard_size=200, executor=executor)
    check_tensors(safeload.load(tmp_path / "out"), expected("zero3_3"))


def test_the_16_bit_weights_are_a_root():
    module = safeload.load(DATA / "zero2_3", root="module")
    assert module["embed.weight"].dtype == ml_dtypes.bfloat16
    assert (module["embed.weight"].astype(np.float32) - expected("zero2_3")["embed.weight"]).max() < 0.01
    assert sorted(module) == sorted(expected("zero2_3"))
    with pytest.raises(UnsupportedError, match="ZeRO 3 stores no 16-bit weights"):
        safeload.open(DATA / "zero3_2", root="module")
    with pytest.raises(TensorNotFoundError, match="no container 'optim'; containers: module"):
        safeload.open(DATA / "zero2_3", root="optim")


def test_a_file_opened_alone_is_a_torch_checkpoint():
    with safeload.open(DATA / "zero2_3" / "global_step1" / "mp_rank_00_model_states.pt", root="module") as opened:
        assert opened.format == "torch zip"


# ---- partitions made here, as the format says ----


SIZE = Ref("torch", "Size")


def flat(array):
    return tensor(Storage(str(id(array)), array))


def model_states(groups, module=None, **more):
    fields = {
        "module": ordered(module or {}),
        "buffer_names": [],
        "param_shapes": [ordered({n: Call(SIZE, shape) for n, shape in group.items()}) for group in groups],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "step": 7,
    }
    return fields | more


def optimizer_states(stage, vectors, count, **more):
    stage = Call(Ref("deepspeed.runtime.zero.config", "ZeroStageEnum"), stage)
    key = "fp32_flat_groups" if stage.args[0] == 3 else "single_partition_of_fp32_groups"
    fields = {"zero_stage": stage, "partition_count": count, key: [flat(vector) for vector in vectors]}
    return {"optimizer_state_dict": fields | more}


def written(folder, stage, models, optimizers):
    folder.mkdir(exist_ok=True)
    for rank, value in enumerate(models):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        (folder / name).write_bytes(zip_file(value))
    for rank, value in enumerate(optimizers):
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(zip_file(value))
    return folder


def random_groups():
    groups = []
    for k in range(int(rng.integers(1, 4))):
        shapes = [tuple(map(int, rng.integers(1, 6, int(rng.integers(0, 4))))) for _ in range(int(rng.integers(1, 5)))]
        groups.append({f"g{k}.p{i}": rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)})
    return groups


def zero2(groups, processes, keep_padding, spaced):
    """The vectors of each process, and the paddings between parameters."""
    vectors, paddings = [[] for _ in range(processes)], []
    for group in groups:
        gaps = [int(rng.integers(0, 4)) if spaced else 0 for _ in group]
        pairs = zip(group.values(), gaps, strict=True)
        whole = np.concatenate([part for a, gap in pairs for part in (np.ravel(a), np.full(gap, 9, np.float32))])
        padded = np.append(whole, np.zeros(-len(whole) % (2 * processes), np.float32)) if keep_padding else whole
        share = -(-len(whole) // (2 * processes)) * 2
        for rank in range(processes):
            vectors[rank].append(padded[rank * share : (rank + 1) * share].copy())
        paddings.append(gaps)
    return vectors, paddings


def zero3(groups, processes, pieces):
    """The vectors of each process, divided anywhere."""
    vectors = []
    for rank in range(processes):
        parts = []
        for array in (array for group in groups for array in group.values()):
            share = -(-array.size // processes)
            padded = np.append(array.ravel(), np.zeros(share * processes - array.size, np.float32))
            parts.append(padded[rank * share : (rank + 1) * share])
        vectors.append(np.split(np.concatenate(parts).astype(np.float32), pieces))
    return vectors


@pytest.mark.parametrize("stage", [1, 3])
def test_vectors_of_random_partitions_give_the_parameters(stage, tmp_path):
    for k in range(12):
        groups, processes = random_groups(), int(rng.integers(1, 6))
        want = {name: array for group in groups for name, array in group.items()}
        shapes = [{name: array.shape for name, array in group.items()} for group in groups]
        if stage == 3:
            length = sum(-(-array.size // processes) for array in want.values())
            vectors = zero3(groups, processes, sorted(map(int, rng.integers(0, length + 1, 2))))
            optimizers = [optimizer_states(3, vector, processes) for vector in vectors]
            models = [model_states(shapes)] * processes
        else:
            vectors, paddings = zero2(groups, processes, keep_padding=bool(k % 2), spaced=k % 3 == 0)
            more = {"param_alignment_paddings": paddings} if k % 3 == 0 else {}
            optimizers = [optimizer_states(stage, v, [processes] * len(groups), **more) for v in vectors]
            models = [model_states(shapes)]
        folder = written(tmp_path / str(k), stage, models, optimizers)
        check_tensors(safeload.load(folder), {name: np.asarray(array) for name, array in want.items()})


def test_ten_ranks_are_sorted_as_numbers(tmp_path):
    array = np.arange(40, dtype=np.float32)
    parts = [array[4 * k : 4 * k + 4] for k in range(10)]
    optimizers = [optimizer_states(2, [part], [10]) for part in parts]
    folder = written(tmp_path / "a", 2, [model_states([{"w": (40,)}])], optimizers)
    assert safeload.load(folder)["w"].tolist() == array.tolist()


def sound(tmp_path, stage=2, **more):
    want = np.arange(10, dtype=np.float32)
    if stage == 3:
        optimizers = [optimizer_states(3, [want[:5]], 2), optimizer_states(3, [want[5:]], 2)]
        return written(tmp_path / "a", 3, [model_states([{"w": (2, 5)}], **more)] * 2, optimizers)
    optimizers = [optimizer_states(2, [want[:6]], [2]), optimizer_states(2, [want[6:]], [2])]
    return written(tmp_path / "a", 2, [model_states([{"w": (2, 5)}], **more)], optimizers)


MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
F32 = np.arange(10, dtype=np.float32)


def of_two(**more):
    return optimizer_states(2, [F32[:6]], [2], **more)


STATE = {"zero_stage": 2, "partition_count": [2]}
MATRIX = {"optimizer_state_dict": STATE | {"single_partition_of_fp32_groups": [tensor(Storage("0", F32[:6]), (2, 3))]}}
SIXTEEN, GLOBAL = F32[:6].astype(np.float16), Call(Ref("os", "system"), "x")
OPTIMIZER_FAULTS = {
    "no state": ({"a": 1}, FormatError, "'optimizer_state_dict' is missing"),
    "no dict": ([1], FormatError, "expected a dict"),
    "no vectors": ({"optimizer_state_dict": STATE}, FormatError, "single_partition"),
    "no tensors": (optimizer_states(2, [], [2]) | {}, FormatError, r"has \[0, 1\] vectors for 1 groups"),
    "another stage": (optimizer_states(3, [F32[:6]], 2), FormatError, "zero_stage 3 does not fit"),
    "a strange stage": ({"optimizer_state_dict": {"zero_stage": "2"}}, FormatError, "zero_stage '2' does not fit"),
    "too few": (optimizer_states(2, [F32[:1]], [2]), FormatError, "tensor 'w': its 10 elements at 0 reach beyond"),
    "too many": (optimizer_states(2, [np.zeros(60, np.float32)], [2]), FormatError, "the parameters have 10 elements"),
    "another count": (optimizer_states(2, [F32[:6]], [3]), MissingShardError, "partition_count is 3, but"),
    "no vector": (MATRIX, FormatError, "must be a vector of F32"),
    "of 16 bits": (optimizer_states(2, [SIXTEEN], [2]), FormatError, "must be a vector of F32, got F16"),
    "paddings": (of_two(param_alignment_paddings=[[0, 1]]), FormatError, "must be 1 numbers"),
    "negative paddings": (of_two(param_alignment_paddings=[[-1]]), FormatError, "must be 1 numbers"),
    "a global": (of_two(x=GLOBAL), ForbiddenError, r"os\.system"),
}
MODEL_FAULTS = {
    "no shapes": (model_states([{"w": (2, 5)}], param_shapes=3), FormatError, "'param_shapes' is missing or malformed"),
    "strange shapes": (model_states([], param_shapes=[5]), FormatError, "shapes must be a dict"),
    "negative": (model_states([{"w": (-2, 5)}]), FormatError, r"of parameter 'w' is malformed"),
    "huge": (model_states([{"w": (1 << 61, 5)}]), FormatError, "reach beyond the partitions"),
    "twice": (model_states([{"w": (5,)}, {"w": (5,)}]), FormatError, "two groups"),
    "aliases": (model_states([{"w": (2, 5)}], shared_params={"a": 1}), FormatError, "shared_params must map"),
    "no module": (model_states([{"w": (2, 5)}]) | {"module": 5}, FormatError, "'module' is missing"),
    "no fragment": (
        model_states([{"w": (2, 5)}], frozen_param_shapes={"f": (2,)}, frozen_param_fragments={}),
        FormatError,
        "tensor 'f' must be a tensor, got None",
    ),
    "experts": (model_states([{"w": (2, 5)}], ds_autoep_layers=[{}]), UnsupportedError, "AutoEP"),
    "buffers without names": (model_states([{"w": (2, 5)}], buffer_names=[["a"]]), FormatError, "must be names"),
    "a global": (model_states([{"w": (2, 5)}], args=Call(Ref("argparse", "Namespace"))), ForbiddenError, "argparse"),
}


@pytest.mark.parametrize("fault", OPTIMIZER_FAULTS)
def test_a_fault_of_optimizer_states_is_refused(fault, tmp_path):
    value, kind, message = OPTIMIZER_FAULTS[fault]
    folder = sound(tmp_path)
    (folder / OPTIMIZER.format(0)).write_bytes(zip_file(value))
    with pytest.raises(kind, match=message) as caught:
        safeload.load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_a_fault_of_model_states_is_refused(fault, tmp_path):
    value, kind, message = MODEL_FAULTS[fault]
    folder = sound(tmp_path)
    (folder / MODEL).write_bytes(zip_file(value))
    with pytest.raises(kind, match=message):
        safeload.load(folder)


def test_unknown_objects_become_placeholders(tmp_path):
    folder = sound(tmp_path, args=Call(Ref("argparse", "Namespace"), state={"lr": 1}))
    with pytest.raises(ForbiddenError, match=r"argparse\.Namespace"):
        safeload.open(folder)
    with safeload.open(folder, unknown_globals="inert") as opened:
        assert opened.metadata["args"] == {"<global>": "argparse.Namespace", "<state>": {"lr": 1}}
        assert opened.named_globals["argparse.Namespace"] is False
        assert opened["w"].shape == (2, 5)


def test_states_other_than_tensors_are_metadata_and_fragments_are_frozen_weights(tmp_path):
    one = np.ones(2, np.float16)
    more = {"frozen_param_shapes": {"f": (2,)}, "frozen_param_fragments": {"f": flat(one)}}
    folder = sound(tmp_path, **more)
    (folder / MODEL).write_bytes(
        zip_file(model_states([{"w": (2, 5)}], {"m._extra_state": b"x", "n": flat(F32)}, **more))
    )
    with safeload.open(folder) as opened:
        assert sorted(opened) == ["f", "n", "w"]
        assert opened["f"].dtype == np.float16
        assert opened.metadata["module"] == {"m._extra_state": b"x"}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_missing_process_is_named(stage, tmp_path):
    folder = sound(tmp_path, stage)
    (folder / OPTIMIZER.format(1)).unlink()
    with pytest.raises(MissingShardError, match="there are files of 1 processes: 0"):
        safeload.open(folder)
    (folder / OPTIMIZER.format(0)).rename(folder / OPTIMIZER.format(1))
    with pytest.raises(MissingShardError, match="there are files of 1 processes: 1"):
        safeload.open(folder)


@pytest.mark.parametrize(
    "name",
    ["mp_rank_01_model_states.pt", "layer_00-model_00-model_states.pt", "layer_0_expert_1_mp_rank_00_model_states.pt"],
)
def test_other_parallelism_is_refused_by_name(name, tmp_path):
    folder = sound(tmp_path)
    (folder / name).write_bytes(b"")
    with pytest.raises(UnsupportedError, match=f"{name}.* comes from tensor, pipeline or expert parallelism"):
        safeload.open(folder)


def test_the_tag_is_the_bare_name_of_a_folder(tmp_path):
    shutil.copytree(sound(tmp_path), tmp_path / "run" / "best")
    for tag, works in (("best", True), ("best\n", True), ("../a", False), ("", False), ("other", False), ("\0", False)):
        (tmp_path / "run" / "latest").write_text(tag)
        if works:
            assert list(safeload.load(tmp_path / "run")) == ["w"]
        else:
            with pytest.raises(UnsupportedError, match="no weights here"):
                safeload.open(tmp_path / "run")


@pytest.mark.parametrize("fixture", ["zero2_3", "zero3_2"])
def test_a_file_cut_or_missing_is_an_error(fixture, tmp_path):
    want = expected(fixture)
    source = DATA / fixture / "global_step1"
    for path in sorted(source.iterdir()):
        content = path.read_bytes()
        for size in (None, 0, len(content) // 2, len(content) - 1, int(rng.integers(len(content)))):
            folder = tmp_path / "cut"
            shutil.copytree(source, folder)
            (folder / path.name).unlink() if size is None else (folder / path.name).write_bytes(content[:size])
            with pytest.raises((SafeloadError, OSError)) if size is not None else _any():
                check_tensors(safeload.load(folder), want)
            shutil.rmtree(folder)


class _any:  # noqa: N801 - a context
    """Either an error of ours, or the same tensors."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        return kind is None or issubclass(kind, (SafeloadError, OSError))


def test_random_bytes_changed_anywhere_never_crash(tmp_path):
    for fixture in ("zero2_3", "zero3_2"):
        shutil.copytree(DATA / fixture / "global_step1", tmp_path / fixture)
        for path in sorted((tmp_path / fixture).iterdir()):
            content = path.read_bytes()
            for _ in range(15):
                bent = bytearray(content)
                bent[int(rng.integers(len(bent)))] = int(rng.integers(256))
                path.write_bytes(bent)
                with _any():
                    safeload.load(tmp_path / fixture)
            path.write_bytes(content)


def test_a_folder_without_model_states_says_so(tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(zip_file(ordered({"a": tensor(Storage("0", np.zeros(2, np.float32)))})))
    with pytest.raises(MissingShardError, match=r"no files of model states"):
        safeload.open(path, format="deepspeed")
