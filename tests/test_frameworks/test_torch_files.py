"""safeload.torch reads and writes what safetensors.torch reads and writes, and what that one gets wrong."""

import inspect
import io
import os
import random
import string
from pathlib import Path

import numpy as np
import pytest
from builders.torch_tensors import bits, every_dtype

torch = pytest.importorskip("torch")

import safetensors  # noqa: E402
import safetensors.torch as upstream  # noqa: E402

import safeload  # noqa: E402
import safeload.numpy  # noqa: E402
import safeload.torch as ours  # noqa: E402
from safeload import FormatError, SafetensorError, TensorNotFoundError, UnsupportedError  # noqa: E402

BACKENDS = ["mmap", "pread", "direct"]
TENSORS = every_dtype()

# Shapes that go wrong, by name.
SHAPES = {
    "scalar": torch.tensor(3.5),
    "scalar_bf16": torch.tensor(3.5, dtype=torch.bfloat16),
    "scalar_f8": torch.tensor(3.5).to(torch.float8_e4m3fn),
    "none": torch.zeros(0),
    "no_rows": torch.zeros(0, 3, dtype=torch.bfloat16),
    "no_columns": torch.zeros(3, 0, dtype=torch.uint16),
    "one": torch.ones(1, 1, 1),
    "deep": torch.arange(64, dtype=torch.int16).reshape([2] * 6),
    "odd": torch.ones(3, dtype=torch.uint8),  # what follows is unaligned
    "after odd": torch.ones(3, dtype=torch.int8),
    "\u00e9 \U0001f40d\n": torch.ones(2),
    "": torch.ones(2),
}


def same(mine, theirs):
    assert set(mine) == set(theirs)
    for name, tensor in theirs.items():
        assert bits(mine[name]) == bits(tensor), name


@pytest.mark.parametrize("name", ["load_file", "load", "save_file", "save", "load_model", "save_model"])
def test_signatures_take_what_upstreams_take(name):
    theirs = inspect.signature(getattr(upstream, name)).parameters
    mine = inspect.signature(getattr(ours, name)).parameters
    assert [(p.name, p.kind, p.default) for p in theirs.values()] == [
        (p.name, p.kind, p.default) for p in list(mine.values())[: len(theirs)]
    ]
    ours_alone = list(mine.values())[len(theirs) :]
    assert all(p.kind is p.KEYWORD_ONLY and p.default in (None, "keep") for p in ours_alone)


@pytest.mark.parametrize("code", TENSORS)
def test_every_dtype_both_ways(code, tmp_path):
    tensors = {"x": TENSORS[code], "after": torch.ones(3)}
    upstream.save_file(tensors, tmp_path / "theirs")
    ours.save_file(tensors, tmp_path / "mine")
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert ours.save(tensors) == upstream.save(tensors)
    same(ours.load((tmp_path / "mine").read_bytes()), tensors)
    for backend in BACKENDS:
        same(ours.load_file(tmp_path / "theirs", backend=backend), tensors)
        if (code, backend) != ("F4", "pread"):  # upstream fails
            same(ours.load_file(tmp_path / "theirs", backend=backend), upstream.load_file(tmp_path / "mine"))
    with ours.safe_open(tmp_path / "mine", "pt") as file:
        assert file.get_slice("x").get_dtype() == code


def test_every_dtype_is_there():
    assert len(TENSORS) == 20
    assert set(upstream._TYPES) | {"F8_E8M0", "F4"} == set(ours._TYPES)
    assert all(ours._TYPES[code] is dtype for code, dtype in upstream._TYPES.items())
    assert ours._SIZE == upstream._SIZE


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_that_go_wrong(backend, tmp_path):
    upstream.save_file(SHAPES, tmp_path / "x")
    assert ours.save(SHAPES) == (tmp_path / "x").read_bytes()
    same(ours.load_file(tmp_path / "x", backend=backend), upstream.load_file(tmp_path / "x"))
    same(ours.load((tmp_path / "x").read_bytes()), SHAPES)


@pytest.mark.parametrize("seed", range(20))
def test_any_dict_is_written_and_read_as_upstream_does(seed, tmp_path):
    rng = random.Random(seed)
    tensors = {}
    for _ in range(rng.randrange(12)):
        tensor = rng.choice(list(TENSORS.values()))
        rows = rng.choice([0, 1, 2, 5])
        name = "".join(rng.choices(string.printable, k=rng.randrange(8)))
        tensors[name] = tensor[:rows].clone() if rng.random() < 0.8 else tensor.clone()
    metadata = rng.choice([None, {"format": "pt"}])
    text = upstream.save(tensors, metadata)
    assert ours.save(tensors, metadata) == text
    ours.save_file(tensors, tmp_path / "x", metadata)
    assert (tmp_path / "x").read_bytes() == text
    mine = ours.load_file(tmp_path / "x")
    same(mine, upstream.load_file(tmp_path / "x"))
    filled = [name for name in mine if mine[name].numel()]
    assert filled == [name for name in upstream.load_file(tmp_path / "x") if mine[name].numel()]


def test_an_empty_dict_and_metadata(tmp_path):
    assert ours.save({}) == upstream.save({})
    assert ours.save({"a": torch.ones(1)}, {}) == upstream.save({"a": torch.ones(1)}, {})
    ours.save_file({}, tmp_path / "x", {})  # upstream writes a header that is not JSON
    assert ours.load_file(tmp_path / "x") == {}
    ours.save_file({}, tmp_path / "x", {"b": "2", "a": "1"})
    with ours.safe_open(tmp_path / "x", "pt") as file:
        assert list(file.metadata().items()) == [("a", "1"), ("b", "2")]


def test_an_ordered_dict_and_parameters_are_saved():
    state = torch.nn.Linear(3, 2).state_dict()
    assert ours.save(state) == upstream.save(state)
    layer = torch.nn.Linear(3, 2)
    assert ours.save(dict(layer.named_parameters())) == upstream.save(dict(layer.named_parameters()))


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview], ids=lambda kind: kind.__name__)
def test_content_of_any_kind_is_copied(wrap):
    data = wrap(ours.save(SHAPES))
    tensors = ours.load(data)
    same(tensors, SHAPES)
    tensors["one"].fill_(7)
    same(ours.load(data), SHAPES)


def test_a_path_is_not_content(tmp_path):
    for path in (str(tmp_path / "x"), tmp_path / "x"):
        with pytest.raises(TypeError, match=r"safeload\.torch\.load_checkpoint"):
            ours.load(path)
    for data in (b"", b"\xff" * 30, ours.save(SHAPES)[:-1]):
        with pytest.raises(FormatError):
            ours.load(data)
    with pytest.raises(TypeError):
        ours.load(3)


REFUSED = {
    "a list": ([torch.ones(1)], ValueError, "Expected a dict"),
    "None": (None, ValueError, "Expected a dict"),
    "an array": ({"a": np.ones(1)}, ValueError, "save NumPy arrays with safeload.numpy.save_file"),
    "a nested dict": ({"a": {"b": torch.ones(1)}}, ValueError, "safeload.flatten"),
    "a float": ({"a": 1.0}, ValueError, "Key `a` is invalid"),
    "a name that is not text": ({1: torch.ones(1)}, TypeError, "tensor name must be str"),
    "sparse": ({"a": torch.eye(2).to_sparse()}, ValueError, "to_dense"),
    "transposed": ({"a": torch.ones(2, 3).T}, ValueError, "not contiguous"),
    "expanded": ({"a": torch.ones(1).expand(4)}, ValueError, "not contiguous"),
    "twice": ({"b": SHAPES["one"], "a": SHAPES["one"]}, RuntimeError, "'a', 'b'.*save_model"),
    "overlapping": ({"a": TENSORS["F32"][:3], "b": TENSORS["F32"][2:]}, RuntimeError, "share memory"),
    "a transpose": ({"a": TENSORS["F32"], "b": TENSORS["F32"].T}, RuntimeError, "share memory"),
    "on meta": ({"a": torch.ones(2, device="meta")}, NotImplementedError, "Cannot copy out of meta tensor"),
    "complex128": ({"a": torch.ones(2, dtype=torch.complex128)}, KeyError, "'a'.*complex128.*cannot be saved"),
    "complex128, as SafetensorError": (
        {"a": torch.ones(2, dtype=torch.complex128)}, SafetensorError, "supported dtypes are bool"
    ),
    "a surrogate": ({"\ud800": torch.ones(2)}, SafetensorError, "surrogate"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_saved_is_refused_and_leaves_nothing(case, tmp_path):
    tensors, kind, text = REFUSED[case]
    for call in (lambda: ours.save(tensors), lambda: ours.save_file(tensors, tmp_path / "x")):
        with pytest.raises(kind, match=text) as caught:
            call()
        assert len(str(caught.value)) < 600
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", [case for case in REFUSED if "SafetensorError" not in case and case != "a surrogate"])
def test_upstream_raises_the_same_class(case):
    tensors, kind, _ = REFUSED[case]
    with pytest.raises(kind):
        upstream.save(tensors)


@pytest.mark.parametrize("rest", [0, 128])
def test_a_tensor_whose_memory_was_freed_is_refused(rest):
    tensor = torch.ones(100)[16:]
    tensor.untyped_storage().resize_(rest)
    for tensors in ({"a": tensor}, {"a": tensor, "b": torch.ones(2)}, {"a": tensor, "b": torch.ones(0)}):
        with pytest.raises(RuntimeError, match=r"'a': its memory was freed: .* needs 336 from element 16 on"):
            ours.save(tensors)


class MadeWhenAsked(dict):
    """Tensors of as many ones as the values say."""

    def items(self):
        return ((name, torch.ones(count)) for name, count in super().items())


@pytest.mark.parametrize("names", ["a", "abcdefgh"])
def test_a_dict_that_makes_its_tensors_when_asked_is_saved(names, tmp_path):
    tensors = MadeWhenAsked(dict.fromkeys(names, 1_000_000))
    expected = dict(tensors.items())
    same(ours.load(ours.save(tensors)), expected)
    ours.save_file(tensors, tmp_path / "x")
    same(ours.load_file(tmp_path / "x"), expected)


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, "text", ["a"]], ids=repr)
def test_metadata_that_is_not_text_is_refused(metadata):
    with pytest.raises(TypeError):
        ours.save({"a": torch.ones(1)}, metadata)


def test_disjoint_views_of_one_storage_are_saved():
    whole = torch.arange(12.0)
    tensors = {"a": whole[:4], "b": whole[4:8], "c": whole[8:]}
    assert ours.save(tensors) == upstream.save(tensors)
    same(ours.load(ours.save(tensors)), tensors)


def test_conjugate_and_negative_bits_are_saved_as_the_values_that_they_show(tmp_path):
    x = torch.randn(3, 4, dtype=torch.complex64)
    tensors = {"conj": x.conj(), "neg": torch._neg_view(torch.randn(5))}
    assert tensors["conj"].is_conj()
    assert tensors["neg"].is_neg()
    ours.save_file(tensors, tmp_path / "x")
    for name, tensor in ours.load_file(tmp_path / "x").items():
        assert torch.equal(tensor, tensors[name].resolve_conj().resolve_neg())
    assert torch.equal(x.conj().imag, -x.imag)  # the tensor itself is as it was


def test_a_file_gets_the_umasks_mode(tmp_path):
    before = os.umask(0o027)
    try:
        ours.save_file({"a": torch.ones(1)}, tmp_path / "x")
    finally:
        os.umask(before)
    if os.name != "nt":
        assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_dtype_converts_floating_tensors_only(tmp_path):
    plain = {code: tensor for code, tensor in TENSORS.items() if code not in ("F8_E8M0", "F4")}
    ours.save_file(plain, tmp_path / "x")
    for dtype in (torch.bfloat16, "bf16", np.float32, "float8_e4m3fn"):
        target = {np.float32: torch.float32, "float8_e4m3fn": torch.float8_e4m3fn}.get(dtype, torch.bfloat16)
        tensors = ours.load_file(tmp_path / "x", dtype=dtype)
        for code, tensor in tensors.items():
            floating = plain[code].is_floating_point()
            assert tensor.dtype == (target if floating else plain[code].dtype), code
    tensors = ours.load_file(tmp_path / "x", dtype="float32")
    for code in ("F16", "BF16", "F8_E4M3", "F8_E5M2"):
        assert torch.equal(tensors[code].nan_to_num(7), plain[code].float().nan_to_num(7))


def test_f4_is_decoded_by_dtype_and_pairs_without(tmp_path):
    ours.save_file({"x": TENSORS["F4"]}, tmp_path / "x")
    values = ours.load_file(tmp_path / "x", dtype="float32")["x"]
    assert values.shape == (5, 12)
    codes = TENSORS["F4"].view(torch.uint8)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert torch.equal(values, table[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(1))


def f6(shape, nbytes, code="F6_E2M3"):
    header = f'{{"x":{{"dtype":"{code}","shape":{list(shape)},"data_offsets":[0,{nbytes}]}}}}'.encode()
    return len(header).to_bytes(8, "little") + header + bytes(nbytes)


@pytest.mark.parametrize("data", [f6([4], 3), f6([2, 3], 3, "F4")], ids=["F6", "F4 of an odd length"])
def test_what_torch_has_no_dtype_for_is_refused_unless_it_is_decoded(data, tmp_path):
    (tmp_path / "x").write_bytes(data)
    calls = [lambda: ours.load(data), lambda: ours.load_file(tmp_path / "x", "meta")]
    for backend in BACKENDS:
        calls.append(lambda backend=backend: ours.load_file(tmp_path / "x", backend=backend))
        file = ours.safe_open(tmp_path / "x", "pt", backend=backend)
        calls += [lambda file=file: file.get_tensor("x"), file.get_tensors, lambda file=file: file.get_slice("x")[:1]]
    calls.append(lambda: ours.load_checkpoint(tmp_path / "x"))
    for call in calls:
        with pytest.raises(UnsupportedError, match="pass dtype=") as caught:
            call()
        assert caught.value.tensor == "x"
    assert not ours.load_file(tmp_path / "x", dtype="float32")["x"].any()
    assert not ours.load_checkpoint(tmp_path / "x", dtype="float32")["x"].any()


def test_fp8_is_given_as_such_and_never_without_its_scale_as_numbers(tmp_path):
    tensors = {"w": TENSORS["F8_E4M3"], "w_scale_inv": torch.ones(1, 1)}
    ours.save_file(tensors, tmp_path / "x")
    assert ours.load_file(tmp_path / "x")["w"].dtype is torch.float8_e4m3fn
    with pytest.raises(UnsupportedError, match="load_file"):
        ours.load_file(tmp_path / "x", dtype="float32")
    with ours.safe_open(tmp_path / "x", "pt") as file, pytest.raises(UnsupportedError):
        file.get_tensors(dtype="float32")


def test_names_threads_and_progress(tmp_path):
    ours.save_file(TENSORS, tmp_path / "x")
    seen = []
    tensors = ours.load_file(
        tmp_path / "x", names=iter(["F32", "BOOL"]), backend="pread", threads=2, progress=lambda *a: seen.append(a)
    )
    assert list(tensors) == ["F32", "BOOL"]
    assert seen[-1] == (150, 150)
    assert ours.load_file(tmp_path / "x", names=[]) == {}
    with pytest.raises(TensorNotFoundError, match="similar names: F32"):
        ours.load_file(tmp_path / "x", names=["F33"])
    with pytest.raises(TypeError, match="got a single str"):
        ours.load_file(tmp_path / "x", names="F32")
    with pytest.raises(TypeError):
        ours.load_file(tmp_path / "x", dtype="int7")


@pytest.mark.parametrize("device", ["cpu", None, "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=repr)
def test_the_cpu_by_any_name(device, tmp_path):
    ours.save_file(TENSORS, tmp_path / "x")
    same(ours.load_file(tmp_path / "x", device), TENSORS)
    same(ours.load_file(tmp_path / "x", device=device, backend="pread", dtype=None), TENSORS)


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("device", ["meta", torch.device("meta")], ids=repr)
def test_on_meta_nothing_is_read(device, dtype, tmp_path):
    plain = {code: tensor for code, tensor in TENSORS.items() if dtype is None or code not in ("F8_E8M0", "F4")}
    ours.save_file({**plain, **SHAPES}, tmp_path / "x")
    want = ours.load_file(tmp_path / "x", dtype=dtype)
    with ours.safe_open(tmp_path / "x", "pt", device) as file:
        loads = [file.get_tensors(dtype=dtype), ours.load_checkpoint(tmp_path / "x", device=device, dtype=dtype)]
        if dtype is None:
            loads.append({name: file.get_tensor(name) for name in want})
            assert file.get_slice("deep")[1:, 0].shape == (1, 2, 2, 2, 2)
    for tensors in (ours.load_file(tmp_path / "x", device, dtype=dtype), *loads):
        assert list(tensors) == list(want) or set(tensors) == set(want)
        for name, tensor in tensors.items():
            assert tensor.device.type == "meta"
            assert (tensor.dtype, tensor.shape) == (want[name].dtype, want[name].shape)


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_another_device_gets_every_tensor_as_it_is_stored(dtype, tmp_path, monkeypatch):
    """No device but the CPU may be there: what would be moved to one says so."""
    from builders.inside import torch_arrays, torch_devices

    plain = {code: tensor for code, tensor in TENSORS.items() if dtype is None or code not in ("F8_E8M0", "F4")}
    large = torch.arange(1 << 20).float()  # 4 MiB, which go through pinned buffers
    ours.save_file({**plain, **SHAPES, "large": large}, tmp_path / "x")
    want = ours.load_file(tmp_path / "x", dtype=dtype)
    elsewhere = torch.device("cpu")
    for name in ("device_of", "parsed_device"):
        monkeypatch.setattr(torch_arrays, name, lambda device: elsewhere)
    moved = []
    load = torch_devices.load

    def recorded(entries, device, **options):
        moved.append(device)
        return load(entries, device, **options)

    monkeypatch.setattr(torch_devices, "load", recorded)
    same(ours.load_file(tmp_path / "x", "cuda", dtype=dtype), want)
    same(ours.load_checkpoint(tmp_path / "x", device="cuda", dtype=dtype), want)
    some = ours.load_file(tmp_path / "x", "cuda", dtype=dtype, names=["one", "BF16"])
    assert list(some) == ["one", "BF16"]
    assert moved == [elsewhere] * 3
    with ours.safe_open(tmp_path / "x", "pt", "cuda") as file:
        same(file.get_tensors(dtype=dtype), want)
        if dtype is None:
            same({name: file.get_tensor(name) for name in want}, want)
            before = len(moved)
            file.get_tensor("large")
            file.get_tensor("one")
            assert len(moved) == before + 1
            same({name: file.get_slice(name)[...] for name in want}, want)


@pytest.mark.parametrize(
    ("device", "kind", "text"),
    [
        ("nonsense", SafetensorError, "device nonsense is invalid"),
        ("", SafetensorError, "is invalid"),
        ("cpu:1", SafetensorError, "device cpu:1"),
        (-1, SafetensorError, "device -1"),
        (3.5, SafetensorError, "device 3.5 is invalid"),
        (True, SafetensorError, "device True is invalid: expected a name"),
        ([], SafetensorError, "is invalid"),
        (10**30, SafetensorError, "device 1000"),
        *([] if torch.xpu.is_available() else [("xpu", UnsupportedError, "device xpu is not available")]),
        *([] if torch.accelerator.is_available() else [(0, UnsupportedError, "device 0 is not available")]),
        ("a" * 100_000, SafetensorError, "is invalid"),
        ("cuda\x1b[2J", SafetensorError, "is invalid"),
    ],
)
def test_a_device_that_is_not_there_leaves_nothing_behind(device, kind, text, tmp_path):
    ours.save_file(TENSORS, tmp_path / "x")
    for call in (
        lambda: ours.load_file(tmp_path / "x", device),
        lambda: ours.load_checkpoint(tmp_path / "x", device=device),
        lambda: ours.safe_open(tmp_path / "x", "pt", device).get_tensor("BF16"),
        lambda: ours.load_model(torch.nn.Linear(1, 1), tmp_path / "x", device=device),
    ):
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        with pytest.raises(kind, match=text) as caught:
            call()
        assert len(str(caught.value)) < 700
        assert "\x1b" not in str(caught.value)
        del caught  # the frames of its traceback refer to the file
        assert (len(os.listdir("/proc/self/fd")) if before else 0) == before


def test_a_backend_or_a_path_that_is_wrong(tmp_path):
    ours.save_file(TENSORS, tmp_path / "x")
    with pytest.raises(SafetensorError, match="backend 'disk' is invalid"):
        ours.load_file(tmp_path / "x", backend="disk")
    with pytest.raises(FileNotFoundError):
        ours.load_file(tmp_path / "none", "nonsense")
    with pytest.raises(IsADirectoryError):
        ours.load_file(tmp_path)
    torch.save({"w": torch.ones(2)}, tmp_path / "x.bin")
    with pytest.raises(FormatError, match="torch"):
        ours.load_file(tmp_path / "x.bin")


def test_paths_are_text_or_pathlike(tmp_path):
    ours.save_file(TENSORS, str(tmp_path / "x"))
    same(ours.load_file(Path(tmp_path / "x")), ours.load_file(os.fspath(tmp_path / "x")))


def test_helpers_that_other_libraries_import(tmp_path):
    keep = []
    specs = ours._flatten_as_ptr(TENSORS, keep)
    theirs = upstream._flatten_as_ptr(TENSORS, [])
    for name, spec in specs.items():
        assert (spec.dtype, spec.shape, spec.data_ptr, spec.data_len) == (
            theirs[name].dtype, theirs[name].shape, theirs[name].data_ptr, theirs[name].data_len
        )  # fmt: skip
    assert safeload.serialize(specs) == upstream.save(TENSORS)
    same(ours._view2torch(safeload.deserialize(ours.save({**TENSORS, **SHAPES}))), {**TENSORS, **SHAPES})
    assert ours._getdtype("BF16") is torch.bfloat16
    assert ours.safe_open is safeload.safe_open
    with pytest.raises(AttributeError):
        ours._nothing  # noqa: B018
    assert "load_file" in dir(ours)


def test_numpys_save_names_the_module_for_tensors():
    with pytest.raises(TypeError, match=r"use save and save_file of safeload\.torch"):
        safeload.numpy.save({"a": torch.ones(1, dtype=torch.bfloat16)})
    for other in (torch.nn.Linear(1, 1), torch.float32):
        with pytest.raises(TypeError, match=r"is a \w+, not a NumPy array$"):
            safeload.numpy.save({"a": other})


def test_a_file_by_torch_save_of_a_loaded_tensor_has_only_its_bytes(tmp_path):
    ours.save_file(
        {"a": torch.ones(10), "b": torch.ones(1 << 20), "c": torch.ones(7, dtype=torch.bfloat16)}, tmp_path / "x"
    )
    with ours.safe_open(tmp_path / "x", "pt") as file:
        loaded = {
            **ours.load_file(tmp_path / "x"),
            "slice": file.get_slice("b")[5:20],
            "large": file.get_slice("b")[1 << 18 :],
        }
    for name in ("a", "c", "slice", "large"):
        out = io.BytesIO()
        torch.save(loaded[name], out)
        assert len(out.getvalue()) < loaded[name].nbytes + 4096
        out.seek(0)
        assert torch.equal(torch.load(out), loaded[name])
    assert safetensors.torch.save(loaded)  # upstream sees no shared memory either


def test_parts_of_a_storage_are_saved_if_they_are_apart():
    whole = torch.arange(24.0).view(6, 4)
    apart = {"c": whole[4:], "a": whole[:2], "b": whole[2:4]}
    assert ours.save(apart) == upstream.save(apart)
    for overlapping in ({**apart, "d": whole[3:5]}, {**apart, "d": whole}, {"a": whole[:2], "b": whole[:2]}):
        with pytest.raises(RuntimeError, match="share memory"):
            ours.save(overlapping)


def test_tensors_without_memory_of_their_own_are_refused():
    def refused(tensor):
        with pytest.raises(RuntimeError, match="keeps its values in other tensors"):
            ours.save({"a": tensor})
        return tensor

    refused(torch._efficientzerotensor((3,)))
    for transformed in (torch.func.vmap(refused), torch.func.functionalize(refused)):
        transformed(torch.ones(2, 3))
