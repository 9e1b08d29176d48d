"""`safeload.make_patch` and `apply_patch`: differences of files and of arrays in memory."""

import io
import json
import os

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.inside import main
from builders.thorough import THOROUGH

import safeload
from safeload import FormatError, SafeloadError, UnsupportedError
from safeload.numpy import load_file, save_file

upstream = pytest.importorskip("safetensors.numpy")

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.int64, bool, np.uint16, np.complex64]


def random_tensor(rng):
    shape = tuple(rng.integers(0, 9, rng.integers(0, 4)))
    return rng.integers(-100, 100, shape).astype(DTYPES[rng.integers(len(DTYPES))])


def random_pair(rng):
    """Two dicts of tensors: some equal, changed a little or a lot, retyped, reshaped, added or removed."""
    old = {f"t{k}": random_tensor(rng) for k in range(rng.integers(0, 6))}
    new = {}
    for name, array in old.items():
        fate = rng.integers(8)
        array = array.copy()
        if fate == 0:
            continue
        if fate == 1:
            array = random_tensor(rng)
        elif fate == 2 and array.size:
            array = array.astype(np.complex64).reshape(-1)
        elif fate > 3 and array.size:
            places = rng.integers(0, array.size, rng.integers(1, 4))
            array.reshape(-1)[places] = rng.integers(0, 100, len(places)).astype(array.dtype)
        new[name] = array
    new.update({f"n{k}": random_tensor(rng) for k in range(rng.integers(0, 2))})
    order = [*new]
    rng.shuffle(order)
    return old, {name: new[name] for name in order}


def same(a, b):
    assert a.keys() == b.keys()
    for name, array in a.items():
        assert (array.dtype, array.shape, array.tobytes()) == (b[name].dtype, b[name].shape, b[name].tobytes()), name


def test_random_pairs_are_exact(tmp_path):
    rng = np.random.default_rng(7)
    paths = [tmp_path / f"{name}.safetensors" for name in ("old", "new", "patch", "result")]
    for k in range(1000 if THOROUGH else 100):
        old, new = random_pair(rng)
        save_file(old, paths[0], {"k": str(k)} if k % 2 else None, durable=False)
        if k % 3:
            save_file(new, paths[1], {"new": "x" * int(rng.integers(50))}, durable=False)
        else:
            safeload.save(iter(new.items()), paths[1], overwrite=True, durable=False)
        report = safeload.make_patch(paths[0], paths[1], paths[2], overwrite=True, durable=False)
        assert safeload.apply_patch(*paths[0:3:2], paths[3], overwrite=True, durable=False) == report.result
        assert paths[3].read_bytes() == paths[1].read_bytes(), k
        arrays = {name: array.copy() for name, array in old.items()}
        assert safeload.apply_patch(arrays, paths[2]) == report.result
        same(arrays, new)


@pytest.fixture
def pair(tmp_path):
    """Paths of an old file, a new one, and the patch between them."""
    rng = np.random.default_rng(2)
    old = {"w": rng.standard_normal((100, 40), np.float32), "b": np.zeros(7, np.int8), "gone": np.ones(3)}
    new = {"w": old["w"].copy(), "b": old["b"], "added": np.arange(5.0), "nan": np.array([np.nan, -0.0])}
    new["w"][3, 4:7] = 8
    paths = [tmp_path / f"{name}.safetensors" for name in ("old", "new", "patch")]
    save_file(old, paths[0], {"step": "1"})
    save_file(new, paths[1], {"step": "2"})
    safeload.make_patch(*paths, metadata={"model_version": "2"})
    return paths


def test_a_patch_has_the_layout_of_trl(pair):
    with safeload.open(pair[2]) as patch:
        assert patch["w.indices"].tolist() == [124, 125, 126]
        assert (patch["w.indices"].dtype, patch["w.values"].dtype) == (np.int32, np.float32)
        assert patch["w.values"].tolist() == [8, 8, 8]
        metadata = patch.metadata
    assert (metadata["sparse"], metadata["model_version"], metadata["changed_params"]) == ("True", "2", "10")


def test_the_base_is_replaced_without_dst(pair):
    mapped = load_file(pair[0])
    before = mapped["w"].copy()
    safeload.apply_patch(pair[0], pair[2])
    assert pair[0].read_bytes() == pair[1].read_bytes()
    np.testing.assert_array_equal(mapped["w"], before)
    assert sorted(os.listdir(pair[0].parent)) == ["new.safetensors", "old.safetensors", "patch.safetensors"]
    with pytest.raises(SafeloadError, match="is not the base"):
        safeload.apply_patch(pair[0], pair[2])  # twice
    with pytest.raises(FileExistsError):
        safeload.apply_patch(pair[0], pair[2], pair[1])
    with pytest.raises(FileExistsError):
        safeload.make_patch(*pair)


def test_files_objects_and_urls(pair, tmp_path):
    pytest.importorskip("fsspec")
    out = io.BytesIO()
    safeload.apply_patch(pair[0], pair[2], out)
    assert out.getvalue() == pair[1].read_bytes()
    url = f"memory://patch-{tmp_path.name}"
    for name, path in zip(("old", "new"), pair, strict=False):
        safeload.convert(path, f"{url}/{name}.safetensors")
    report = safeload.make_patch(f"{url}/old.safetensors", f"{url}/new.safetensors", f"{url}/patch.safetensors")
    assert safeload.apply_patch(f"{url}/old.safetensors", f"{url}/patch.safetensors") == report.result
    same(safeload.load(f"{url}/old.safetensors"), safeload.load(f"{url}/new.safetensors"))


def test_patches_form_a_chain(tmp_path):
    weights, digests = {"w": np.zeros(1000, np.float32)}, []
    for k in range(4):
        changed = {"w": weights["w"].copy()}
        changed["w"][k * 10 : k * 10 + 5] += 1
        report = safeload.make_patch(weights, changed, tmp_path / f"{k}.safetensors")
        assert not digests or digests[-1] == report.base
        digests.append(report.result)
        weights = changed
    replayed = {"w": np.zeros(1000, np.float32)}
    with pytest.raises(SafeloadError, match="is not the base"):
        safeload.apply_patch(replayed, tmp_path / "1.safetensors")
    assert not replayed["w"].any()
    for k in range(4):
        assert safeload.apply_patch(replayed, tmp_path / f"{k}.safetensors") == digests[k]
    same(replayed, weights)


def test_torch_tensors_change_in_place(tmp_path):
    torch = pytest.importorskip("torch")
    old = {"w": torch.zeros(50, 4, dtype=torch.bfloat16), "p": torch.nn.Parameter(torch.ones(3)), "0": torch.tensor(1)}
    new = {name: tensor.detach().clone() for name, tensor in old.items()}
    new["w"][7, 2] = 3
    new["p"][1] = torch.nan
    new["0"] += 4
    safeload.make_patch(old, {**new, "added": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "p.safetensors")
    addresses = {name: tensor.data_ptr() for name, tensor in old.items()}
    safeload.apply_patch(old, tmp_path / "p.safetensors")
    assert addresses == {name: old[name].data_ptr() for name in addresses}
    assert all(torch.equal(old[name].detach(), new[name]) for name in ("w", "0"))
    assert old["p"][1].isnan()
    assert (old["added"].dtype, old["added"].tolist()) == (torch.bfloat16, [1, 1])


def trl_patch(path, arrays, name="w"):
    """What TRL writes, by upstream's writer."""
    metadata = {"sparse": "True", "model_version": "3", "sparsity": "0.99", "changed_params": "3"}
    upstream.save_file({f"{name}.{suffix}": array for suffix, array in arrays.items()}, path, metadata)


@pytest.mark.parametrize("order", [[5, 0, 3999], [0, 5, 3999]])
def test_patches_of_trl_apply_without_check(order, pair, tmp_path):
    path = tmp_path / "trl.safetensors"
    trl_patch(path, {"indices": np.array(order, np.int32), "values": np.array(order, np.float32)})
    with pytest.raises(UnsupportedError, match="pass check=False"):
        safeload.apply_patch(pair[0], path)
    expected = {name: array.copy() for name, array in load_file(pair[0]).items()}
    expected["w"].reshape(-1)[order] = order
    arrays = {name: array.copy() for name, array in load_file(pair[0]).items()}
    assert safeload.apply_patch(arrays, path, check=False) is None
    same(arrays, expected)
    assert safeload.apply_patch(pair[0], path, check=False) is None
    same(load_file(pair[0]), expected)
    assert safeload.open(pair[0]).metadata == {"step": "1"}


@pytest.mark.parametrize(
    ("arrays", "name", "message"),
    [
        (
            {"indices": np.array([4000], np.int32), "values": np.ones(1, np.float32)},
            "w",
            "has 4000 elements.* index 4000",
        ),
        ({"indices": np.array([-1], np.int32), "values": np.ones(1, np.float32)}, "w", "index -1"),
        ({"indices": np.array([1, 1], np.int32), "values": np.ones(2, np.float32)}, "w", "an index twice"),
        ({"indices": np.array([1], np.int32), "values": np.ones(2, np.float32)}, "w", r"values F32 \[2\]"),
        ({"indices": np.array([1], np.int32), "values": np.ones(1, np.float16)}, "w", r"values F16 \[1\]"),
        ({"indices": np.array([1.0]), "values": np.ones(1, np.float32)}, "w", "I32 or I64"),
        ({"indices": np.array([[1]], np.int32), "values": np.ones((1, 1), np.float32)}, "w", "flat"),
        ({"indices": np.array([1], np.int32)}, "w", "indices without values"),
        ({"values": np.ones(3, np.float32)}, "w", r"F32 \[100, 40\] in the header, but its values are F32 \[3\]"),
        ({"indices": np.array([1], np.int32), "values": np.ones(1, np.float32)}, "x", "is not in the result"),
        ({"weights": np.ones(1)}, "w", "belongs to no tensor"),
    ],
)
def test_malformed_patches_change_nothing(arrays, name, message, pair, tmp_path):
    path, before = tmp_path / "trl.safetensors", pair[0].read_bytes()
    trl_patch(path, arrays, name)
    with pytest.raises(FormatError, match=message):
        safeload.apply_patch(pair[0], path, check=False)
    weights = {key: array.copy() for key, array in load_file(pair[0]).items()}
    with pytest.raises(FormatError, match=message):
        safeload.apply_patch(weights, path, check=False)
    same(weights, load_file(pair[0]))
    assert pair[0].read_bytes() == before


def test_a_damaged_patch_or_base_is_refused(pair, tmp_path):
    data = bytearray(pair[2].read_bytes())
    damaged = tmp_path / "damaged.safetensors"
    start = 8 + int.from_bytes(data[:8], "little")
    for at in range(start, len(data), 17):
        copy = data.copy()
        copy[at] ^= 4
        damaged.write_bytes(copy)
        with pytest.raises(FormatError, match="damaged"):
            safeload.apply_patch(pair[0], damaged)
    base = bytearray(pair[0].read_bytes())
    base[-1] ^= 1
    damaged.write_bytes(base)
    with pytest.raises(SafeloadError, match="is not the base"):
        safeload.apply_patch(damaged, pair[2])
    assert pair[0].read_bytes() != pair[1].read_bytes()


@pytest.mark.parametrize(
    "facts",
    [
        "[]",
        "{",
        "[" * 100_000,
        '{"version": 1}',
        json.dumps({"version": 1, "base": "", "result": "", "header": 1 << 60, "size": 1 << 62, "digest": ""}),
        json.dumps({"version": 1, "base": "", "result": "", "header": 100_000_000, "size": 1, "digest": ""}),
        json.dumps({"version": 1, "base": "", "result": "", "header": 16, "size": -1, "digest": ""}),
        json.dumps({"version": 1, "base": "", "result": "", "header": 99_000_000, "size": 99_000_000, "digest": ""}),
        json.dumps({"version": True, "base": 1, "result": "", "header": 16, "size": 16, "digest": ""}),
        json.dumps({"version": 9, "base": "", "result": "", "header": 16, "size": 16, "digest": ""}),
    ],
)
@pytest.mark.parametrize("header", [np.zeros(16, np.uint8), np.frombuffer(b"\2\0\0\0\0\0\0\0{}", np.uint8), None])
def test_hostile_facts_are_refused(facts, header, pair, tmp_path):
    path = tmp_path / "hostile.safetensors"
    save_file({} if header is None else {"safeload.header": header}, path, {"safeload.patch": facts})
    for check in (True, False):
        with pytest.raises(SafeloadError):
            safeload.apply_patch(pair[0], path, tmp_path / "out.safetensors", check=check)
    assert not (tmp_path / "out.safetensors").exists()


def test_arrays_that_cannot_change_are_refused_before_any_changes(pair):
    arrays = {name: array.copy() for name, array in load_file(pair[0]).items()}
    arrays["w"].flags.writeable = False
    with pytest.raises(UnsupportedError, match="must be writable"):
        safeload.apply_patch(arrays, pair[2])
    arrays["w"] = np.asfortranarray(arrays["w"])
    with pytest.raises(UnsupportedError, match="C-contiguous"):
        safeload.apply_patch(arrays, pair[2])
    assert arrays.keys() == load_file(pair[0]).keys()
    with pytest.raises(ValueError, match="takes no dst"):
        safeload.apply_patch(arrays, pair[2], "out.safetensors")


def test_folders_and_other_formats_are_refused(pair, tmp_path):
    np.savez(tmp_path / "a.npz", w=np.ones(1))
    for other, error in ((tmp_path, UnsupportedError), (tmp_path / "a.npz", SafeloadError)):
        with pytest.raises(error):
            safeload.make_patch(pair[0], other, tmp_path / "p.safetensors")
        with pytest.raises(error):
            safeload.apply_patch(other, pair[2])
    with pytest.raises(ValueError, match="a patch is a file"):
        safeload.make_patch(pair[0], pair[1], tmp_path / "folder")


def test_files_with_quantized_tensors_are_exact(tmp_path):
    rng = np.random.default_rng(4)
    weights = rng.standard_normal((4, 64), np.float32)
    for name, weight in {"old": weights, "new": weights + 0.5}.items():
        safeload.save({"w": safeload.quantize(weight, "int8"), "b": np.ones(3)}, tmp_path / f"{name}.safetensors")
    paths = [tmp_path / f"{name}.safetensors" for name in ("old", "new", "patch")]
    safeload.make_patch(*paths)
    safeload.apply_patch(paths[0], paths[2])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_indices_of_large_tensors_have_64_bits(pair, tmp_path, monkeypatch):
    inside.tune(monkeypatch, patch_int32=100)
    safeload.make_patch(pair[0], pair[1], tmp_path / "p.safetensors")
    assert safeload.load(tmp_path / "p.safetensors")["w.indices"].dtype == np.int64
    safeload.apply_patch(pair[0], tmp_path / "p.safetensors", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == pair[1].read_bytes()


@pytest.mark.skipif(os.name == "nt", reason="symbolic links")
def test_a_file_in_the_cache_of_the_hub_is_not_replaced(pair, tmp_path):
    blob = tmp_path / "models--a--b" / "blobs" / "0123"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(pair[0].read_bytes())
    (tmp_path / "link.safetensors").symlink_to(blob)
    with pytest.raises(UnsupportedError, match="cache of the Hugging Face Hub"):
        safeload.apply_patch(tmp_path / "link.safetensors", pair[2])
    assert blob.read_bytes() == pair[0].read_bytes()
    safeload.apply_patch(tmp_path / "link.safetensors", pair[2], tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == pair[1].read_bytes()


def test_equal_files_give_a_patch_that_only_names_the_header(pair, tmp_path):
    report = safeload.make_patch(pair[0], pair[0], tmp_path / "p.safetensors")
    assert (report.changed, report.tensors, report.base) == (0, 0, report.result)
    safeload.apply_patch(pair[0], tmp_path / "p.safetensors", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == pair[0].read_bytes()


def test_f4_tensors_are_exact(tmp_path):
    for k in range(2):
        header = json.dumps({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
        (tmp_path / f"{k}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes([k, 7]))
    safeload.make_patch(tmp_path / "0.safetensors", tmp_path / "1.safetensors", tmp_path / "p.safetensors")
    safeload.apply_patch(tmp_path / "0.safetensors", tmp_path / "p.safetensors")
    assert (tmp_path / "0.safetensors").read_bytes() == (tmp_path / "1.safetensors").read_bytes()


def test_a_real_step_of_adamw_is_as_small_as_trls(tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layers = {f"{k}.weight": torch.nn.Parameter(torch.randn(256, 256) * 0.02) for k in range(4)}
    optimizer = torch.optim.AdamW(layers.values(), lr=3e-6)
    before = {name: value.detach().to(torch.bfloat16) for name, value in layers.items()}
    sum((value * torch.randn_like(value)).sum() for value in layers.values()).backward()
    optimizer.step()
    after = {name: value.detach().to(torch.bfloat16) for name, value in layers.items()}
    report = safeload.make_patch(before, after, tmp_path / "p.safetensors")
    changed = {name: before[name].view(torch.int16) != after[name].view(torch.int16) for name in before}
    count = sum(int(mask.sum()) for mask in changed.values())
    assert 0 < count == report.changed < 0.2 * 4 * 256 * 256
    trl = {}
    for name, mask in changed.items():
        places = mask.reshape(-1).nonzero().reshape(-1)
        trl[f"{name}.indices"] = places.to(torch.int32)
        trl[f"{name}.values"] = after[name].reshape(-1)[places]
    safeload.torch.save_file(trl, tmp_path / "trl.safetensors")
    safeload.torch.save_file(after, tmp_path / "after.safetensors")
    header = 8 + int.from_bytes((tmp_path / "after.safetensors").read_bytes()[:8], "little")
    limit = 1.01 * (tmp_path / "trl.safetensors").stat().st_size + header + 1024  # digests
    assert (tmp_path / "p.safetensors").stat().st_size < limit
    safeload.apply_patch(before, tmp_path / "p.safetensors")
    assert all(torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)) for name in after)


def test_the_command(pair, tmp_path, capsys):
    patch, out = str(tmp_path / "p.safetensors"), str(tmp_path / "out.safetensors")
    old, new = map(str, pair[:2])
    assert main(["patch", "make", old, new, patch]) == 0
    assert "10 of" in capsys.readouterr().out
    assert main(["patch", "make", old, new, patch]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main(["patch", "apply", old, patch, out]) == 0
    assert (tmp_path / "out.safetensors").read_bytes() == pair[1].read_bytes()
    assert main(["patch", "apply", old, patch]) == 0
    assert pair[0].read_bytes() == pair[1].read_bytes()
    assert main(["patch", "apply", old, patch]) == 1
    trl_patch(tmp_path / "trl.safetensors", {"indices": np.zeros(1, np.int32), "values": np.ones(1, np.float32)})
    capsys.readouterr()
    assert main(["patch", "apply", old, str(tmp_path / "trl.safetensors")]) == 1
    assert "--no-check" in capsys.readouterr().err
    assert main(["patch", "apply", old, str(tmp_path / "trl.safetensors"), "--no-check"]) == 0
