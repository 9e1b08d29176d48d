"""Pieces of stats, diff and check in columns, and conversions in pieces of plain, packed and quantized tensors."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.calls import count_calls
from builders.executors import Lazy, Plain
from builders.inside import Catalog, executors
from builders.mixed_tensors import many
from builders.quantized import FIXTURES
from builders.random import rng

import safeload
from safeload.numpy import save_file

pytestmark = [pytest.mark.inner, pytest.mark.any_python, pytest.mark.no_core]


@pytest.fixture
def mixed(tmp_path):
    """A folder of fp8 blocks, a file of int8 with scales, and a file of plain tensors, some of them empty."""
    folder = tmp_path / "fp8"
    folder.mkdir()
    codes = rng.standard_normal((256, 128)).astype(ml_dtypes.float8_e4m3fn)
    packed = {f"layers.{k}.up_proj.weight": codes for k in range(3)}
    packed |= {f"{name}_scale_inv": np.full((2, 1), 0.5 + k, np.float32) for k, name in enumerate(list(packed))}
    save_file({**packed, "norm.weight": np.ones(8, np.float32)}, folder / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization, "dtype": "bfloat16"}))
    wide = {f"layers.{k}.down_proj.weight": rng.standard_normal((8, 64)).astype(np.float32) for k in range(5)}
    safeload.convert(wide, tmp_path / "int8.safetensors", quantize="int8", keep="layers.0*")
    plain = {name: array for name, array in many(30, "plain.").items() if "float8" not in array.dtype.name}
    plain["large.weight"] = rng.standard_normal((256, 64)).astype(np.float32)
    save_file(plain, tmp_path / "plain.safetensors")
    return [folder, tmp_path / "int8.safetensors", tmp_path / "plain.safetensors"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# ---- conversions ----

MIXTURES = {
    "copies": {},
    "dequantized": {"dtype": "bfloat16"},
    "requantized": {"dtype": "float16", "quantize": {"layers.0.*": "q8_0", "large.*": "int8"}, "requantize": True},
    "one tensor": {"only": "layers.1.up_proj.weight", "dtype": "float32"},
    "only empty tensors": {"names": [name for name, array in many(30, "plain.").items() if not array.size][:3]},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_conversion_of_mixed_tensors_in_pieces_is_that_of_one_call(mixed, tmp_path, name):
    """A shard takes 9,000 bytes: "large.weight" and the packed tensors are larger."""
    options = {"max_shard_size": 9000, **MIXTURES[name]}
    safeload.convert(mixed, tmp_path / "whole", **options)
    with ThreadPoolExecutor(2) as executor:
        safeload.convert(mixed, tmp_path / "pieces", executor=executor, **options)
    assert contents(tmp_path / "pieces") == contents(tmp_path / "whole")


@pytest.mark.parametrize("name", ["copies", "dequantized", "requantized"])
def test_an_interrupted_conversion_of_mixed_tensors_continues(mixed, tmp_path, name):
    options = {"max_shard_size": 9000, **MIXTURES[name]}
    safeload.convert(mixed, tmp_path / "whole", **options)
    count = sum(path.suffix == ".safetensors" for path in (tmp_path / "whole").iterdir())

    class Interrupted(Lazy):
        def submit(self, *arguments):
            future = super().submit(*arguments)
            if len(self.futures) == count:
                self.futures[-1].set_exception(KeyboardInterrupt())
            return future

    with pytest.raises(KeyboardInterrupt):
        safeload.convert(mixed, tmp_path / "out", executor=Interrupted(begun=3), **options)
    executor = Lazy(begun=count)
    safeload.convert(mixed, tmp_path / "out", executor=executor, resume=True, **options)
    written = [future.result()["written"] for future in executor.futures]
    assert written == [False] * 3 + [True] * (count - 3)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# ---- stats, diff and check ----


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(inside.executors, "_SMALLEST", 4000)
    monkeypatch.setattr(inside.executors, "_TENSOR_COST", 100)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_mixed_tensors_are_read_in_pieces_as_in_one_call(mixed, tmp_path, kind):
    executor = Plain()
    files = [FIXTURES["fp8_block"].path, mixed[2]] if kind == "fp8" else mixed[1:]
    with safeload.open(files) as checkpoint:
        real = {name: array for name, array in checkpoint.load(dtype="float32").items() if array.dtype.kind != "c"}
        arrays = {name: array.astype(np.float32) * 2 for name, array in real.items()}
        save_file({**arrays, "large.weight": arrays["large.weight"][:100]}, tmp_path / "other.safetensors")
        pieces, whole = (safeload.stats(checkpoint, histogram=True, executor=each) for each in (executor, None))
        assert repr([*pieces.items()]) == repr([*whole.items()])
        for other in (checkpoint, tmp_path / "other.safetensors"):
            pieces, whole = (safeload.diff(checkpoint, other, executor=each).to_dict() for each in (executor, None))
            assert pieces == whole
        pieces, whole = (safeload.check(checkpoint, executor=each) for each in (executor, None))
    assert (pieces.errors, pieces.warnings, repr(pieces.stats)) == (whole.errors, whole.warnings, repr(whole.stats))
    assert {piece["operation"] for piece in executor.pieces} == {"stats", "diff", "validate"}
    assert len(executor.pieces) > 20


@pytest.mark.parametrize("columns", [True, False], ids=["columns", "tensors"])
def test_statistics_are_those_of_numpy(tmp_path, monkeypatch, columns):
    """Of a file in columns, and tensor by tensor."""
    if not columns:
        monkeypatch.setattr(Catalog, "plain", lambda *_: None)
    tensors = many(63)
    tensors["wild"] = np.float32([[3, np.nan, -np.inf], [np.nan, -0.0, np.inf]])
    tensors |= {"none": np.full((2, 2), np.nan), "huge": np.array([1e308, -1e308, 1.7e308])}
    tensors |= {"u64": np.array([0, 2**64 - 1], np.uint64), "i64": np.array([-(2**63), 2**63 - 1, 7])}
    tensors |= {"bool": np.array([True, False, True]), "complex": np.ones(3, np.complex64)}
    save_file(tensors, tmp_path / "x.safetensors")
    with safeload.open(tmp_path / "x.safetensors") as checkpoint:
        table = safeload.stats(checkpoint, histogram=True)
    assert list(table) == [name for name in checkpoint if tensors[name].dtype.kind != "c"]
    for name, row in table.items():
        array = np.asarray(tensors[name])
        finite = array[np.isfinite(array.astype(np.float64))]
        assert (row.shape, row.count, row.nbytes) == (array.shape, array.size, array.nbytes)
        assert row.nan + row.inf == array.size - finite.size
        assert row.zeros == int((finite == 0).sum())
        assert row.histogram.sum() == finite.size - row.zeros
        if finite.size:
            assert (row.min, row.max) == (finite.min(), finite.max())
            assert row.min <= row.mean <= row.max
            assert isinstance(row.min, int) == (array.dtype.kind in "iub")
        else:
            assert np.isnan([row.min, row.max, row.absmax, row.mean, row.std]).all()
    assert (table["wild"].first_nan, table["wild"].first_inf) == ((0, 1), (0, 2))
    assert (table["u64"].mean, table["i64"].min) == ((2**64 - 1) / 2, -(2**63))
    assert table["huge"].std == pytest.approx(1.1441e308, rel=1e-4)


def test_a_file_that_shrinks_names_the_tensor(tmp_path):
    """An error in columns is that of tensor by tensor."""
    path = tmp_path / "x.safetensors"
    save_file({f"{k:04}": np.full(100, k, np.float32) for k in range(50)}, path)
    with safeload.open(path) as checkpoint:
        with path.open("r+b") as file:
            file.truncate(checkpoint.tensors["0030"].offset + 8)
        with pytest.raises(safeload.FormatError) as caught:
            safeload.stats(checkpoint, threads=1)
    assert (caught.value.tensor, caught.value.path) == ("0030", str(path))


# ---- columns ----


@pytest.mark.parametrize("name", [*FIXTURES, "several", "safetensors", "gguf", "npz"])
def test_descriptions_and_sizes_are_those_of_single_tensors(request, tmp_path, name):
    source = FIXTURES[name].path if name in FIXTURES else tmp_path / f"x.{name}"
    if name == "several":
        source = request.getfixturevalue("mixed")
    elif name == "npz":
        np.savez(source, **{f"{k}": array for k, array in enumerate(many(21).values()) if array.dtype.kind != "V"})
    elif name not in FIXTURES:
        floats = {key: array for key, array in many(40).items() if array.dtype == np.float32 and array.size}
        safeload.convert(floats, source)
    with Catalog.of(source) as catalog:
        for names in ([*catalog], [*catalog][::-2], []):
            described = catalog.descriptions(names)
            assert described == {each: catalog.about(each) for each in names}
            assert list(described) == list(catalog.sizes(names)) == names
            assert catalog.sizes(names) == {each: about.nbytes for each, about in described.items()}


def test_a_piece_has_its_own_tensors_only(tmp_path):
    save_file(many(40), tmp_path / "x.safetensors")
    whole = [*safeload.stats(tmp_path / "x.safetensors")]
    executor = Plain()
    safeload.stats(tmp_path / "x.safetensors", names=whole[5:9], executor=executor)
    (piece,) = executor.pieces
    names = piece["names"]
    assert names == whole[5:9]
    with executors.opened(piece) as (_, (catalog,)):
        assert [*catalog] == names
        assert len(catalog) == 4
        assert [name for name in names if name in catalog] == names
        assert next(iter(whole)) not in catalog
    with (
        pytest.raises(safeload.TensorNotFoundError, match="nothing"),
        executors.opened({**piece, "names": [*names, "nothing"]}),
    ):
        pass


@pytest.mark.parametrize("operation", ["stats", "diff"])
def test_pieces_take_no_step_per_tensor(tmp_path, operation):
    steps = []
    for count in (400, 2400):
        path = tmp_path / f"{count}.safetensors"
        save_file({f"model.{k}": np.full(3, k, np.float32) for k in range(count)}, path)
        more = [path] if operation == "diff" else []

        def call(path=path, more=more):
            getattr(safeload, operation)(path, *more, executor=Lazy(begun=99))

        call()
        steps.append(count_calls(call))
    # Shapes become lists and tuples, and are multiplied; bytes and addresses are read in columns.
    assert steps[1] - steps[0] < 6 * 2000


def test_a_piece_decodes_few_tensors_of_a_large_file(tmp_path, monkeypatch):
    save_file({f"model.{k:05}": np.full(3, k, np.float32) for k in range(20_000)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(inside.executors, "_TENSOR_COST", 0)
    monkeypatch.setattr(inside.executors, "_SMALLEST", 1200)
    executor = Plain()
    expected = safeload.stats(tmp_path / "x.safetensors", only="model.000*")
    assert safeload.stats(tmp_path / "x.safetensors", only="model.000*", executor=executor) == expected
    assert len(executor.pieces) == 1
    safeload.run_piece(executor.pieces[0], threads=1)  # imports and compiles what the first piece of a process needs
    assert count_calls(lambda: safeload.run_piece(executor.pieces[0], threads=1)) < 4000


# ---- the division into pieces ----


def divided(sizes, files, file):
    """The groups of `executors.groups`, tensor by tensor."""
    cost = executors._TENSOR_COST
    total = sum(sizes) + cost * len(sizes)
    limit = max(executors._SMALLEST, min(executors._LARGEST, total // executors._PIECES))
    by_place = {}
    for k, number in enumerate(file):
        by_place.setdefault(files[number].place, []).append(k)
    groups, used = [], None
    for rows in by_place.values():
        first = files[file[rows[0]]]
        if first.unpacked:
            groups.append(rows)
            used = None
            continue
        if used is not None and used >= executors._SMALLEST:
            used = None
        costs = [sizes[k] + cost for k in rows]
        opening = max(1, cost * first.table.count / executors._OPENED)
        allowed = max(limit, sum(costs) / max(1, sum(costs) // opening) + cost)
        for k, each in zip(rows, costs, strict=True):
            if used is None or used + each > allowed:
                groups.append([])
                used = 0
            groups[-1].append(k)
            used += each
    return groups


@pytest.mark.parametrize("cost", [0, 100])
def test_groups_are_those_of_single_tensors(monkeypatch, cost):
    monkeypatch.setattr(inside.executors, "_SMALLEST", 4000)
    monkeypatch.setattr(inside.executors, "_LARGEST", 6000)
    monkeypatch.setattr(inside.executors, "_TENSOR_COST", cost)
    assert executors.groups([], [], []) == []
    for _ in range(60):
        count, places = int(rng.integers(1, 300)), int(rng.integers(1, 9))
        files = [
            SimpleNamespace(
                place=f"{rng.integers(places)}",
                unpacked=bool(rng.random() < 0.2),
                table=SimpleNamespace(count=int(rng.integers(0, 900))),
            )
            for _ in range(int(rng.integers(1, 12)))
        ]
        sizes = [int(size) for size in rng.integers(0, 900, count) * (rng.random(count) < 0.8)]
        sizes[count // 2] = 9000
        file = [int(number) for number in rng.integers(0, len(files), count)]
        groups = executors.groups(sizes, files, file)
        assert groups == divided(sizes, files, file)
        assert sorted(k for group in groups for k in group) == list(range(count))


def test_a_piece_takes_as_long_as_opening_its_file(tmp_path):
    """Of 100,000 tiny tensors, for which a limit of 16 MiB alone would open the file 25 times."""
    files = [SimpleNamespace(place="x", unpacked=False, table=SimpleNamespace(count=100_000))]
    groups = executors.groups([16] * 100_000, files, [0] * 100_000)
    assert [len(group) for group in groups] == [25_000] * 4
