"""`verify --write` and `--against`: a digest for each file and tensor, settings of quantized tensors included."""

import hashlib
import json
import os
import re
import shutil

import numpy as np
import pytest
from builders.inside import main, manifest
from builders.paths import DATA
from builders.random import rng

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

QUANTIZED = DATA / "quantized"
X = np.float32(rng.standard_normal((64, 64)) * np.arange(1, 65)[:, None] / 64)


def findings(before, after):
    checks = manifest.compare(before["tensors"], after["tensors"], "list.json")
    return [(check.status, check.tensor) for check in checks if check.status != "ok"]


@pytest.fixture
def copy_of(tmp_path):
    def copy(name):
        return shutil.copytree(QUANTIZED / name, tmp_path / name)

    return copy


def replace_in_header(path, before, after):
    """Replace text of the header by text of the same length, all bytes of tensors stay."""
    content = path.read_bytes()
    assert content.count(before) == 1
    assert len(before) == len(after)
    path.write_bytes(content.replace(before, after))


def change_config(folder, pattern, replacement):
    config = folder / "config.json"
    changed, count = re.subn(pattern, replacement, config.read_text())
    assert count
    config.write_text(changed)


def test_int8_axis(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": safeload.quantize(X, "int8", axis=0), "plain": X}, path)
    before = manifest.make(path)
    replace_in_header(path, b'\\"axis\\": 0', b'\\"axis\\": 1')
    assert findings(before, manifest.make(path)) == [("changed", "w")]


@pytest.mark.parametrize(
    ("fixture", "pattern", "replacement"),
    [
        ("gptq4_g32_asym", r'"checkpoint_format": "gptq"', '"checkpoint_format": "gptq_v2"'),
        ("bitnet_divided", r'"linear_class": "\w+"', '"linear_class": "autobitlinear"'),
        ("bitnet_times", r'"linear_class": "\w+"', '"linear_class": "bitlinear"'),
    ],
)
def test_settings_in_config_json(copy_of, fixture, pattern, replacement):
    folder = copy_of(fixture)
    before, values = manifest.make(folder), safeload.load(folder, dtype="float32")
    change_config(folder, pattern, replacement)
    after = safeload.load(folder, dtype="float32")
    changed = {name for name in values if not np.array_equal(values[name], after[name])}
    assert changed
    assert {name for _, name in findings(before, manifest.make(folder))} >= changed


@pytest.mark.parametrize("fixture", ["fp8_block_bf16_scale", "ct_pack_w4_g32_sym", "mlx_affine4_g64"])
def test_dtype_of_scales(copy_of, fixture):
    """BF16 scales that are declared as F16, or the reverse, are other numbers in the same bytes."""
    folder = copy_of(fixture)
    before = manifest.make(folder)
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        for name, entry in header.items():
            if "scale" in name and entry["dtype"] in ("BF16", "F16"):
                entry["dtype"] = "F16" if entry["dtype"] == "BF16" else "BF16"
        text = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
        path.write_bytes((len(text)).to_bytes(8, "little") + text + content[end:])
    assert any(code == "changed" for code, _ in findings(before, manifest.make(folder)))


@pytest.mark.parametrize("change", ["grid", "zeros", "numbers", "scale_rule", "factor", "layout", "high_first"])
def test_each_setting_counts(change):
    """Every field of a packing that arithmetic uses is in the digest."""
    tensor = safeload.load(QUANTIZED / "gptq4_g32_asym", only="*.weight")
    name, packed = next((name, one) for name, one in tensor.items() if isinstance(one, safeload.QuantizedTensor))
    packing = packed.packing
    values = {
        "grid": packing.grid._replace(column_block=64),
        "zeros": packing.zeros._replace(added=1 - packing.zeros.added),
        "numbers": "nf4",
        "scale_rule": "inverse",
        "factor": 2.0,
        "layout": packing.layout + 1,
        "high_first": not packing.high_first,
    }
    other = type(packed).of_parts(packing._replace(**{change: values[change]}), packed.names, packed.roles)
    before, after = manifest.make({name: packed}), manifest.make({name: other})
    assert findings(before, after) == [("changed", name)]


def test_digests_stay(tmp_path):
    """Manifests are kept for years: neither names of families nor new fields may change a digest."""
    q = safeload.quantize(X, "int8", axis=0)
    made = manifest.make({"w": q, "b": safeload.quantize(X, "q8_0"), "x": X})["tensors"]
    assert "restoring" not in made["b"]
    assert "restoring" not in made["x"]
    assert made["w"]["restoring"] == "5a55dcd6eced94b74b9f725f950e9b25bd679a0cfd03a29113f782e66a4a478c"
    gptq = manifest.make(QUANTIZED / "gptq4_g32_asym")["tensors"]
    digests = sorted(entry["restoring"] for entry in gptq.values() if "restoring" in entry)
    assert digests[0] == "6b872440ae4bca3d199473b3fd4d4abc6529925559912d385cb103a806e1d3eb"


def test_files_and_memory_agree(tmp_path):
    tensors = {"none": safeload.quantize(X, "int8"), "last": safeload.quantize(X, "int8", axis=1)}
    save_file(tensors, tmp_path / "a.safetensors")
    assert manifest.make(tmp_path / "a.safetensors") == manifest.make(tensors)
    packed = safeload.load(QUANTIZED / "ct_nvfp4")
    assert manifest.make(packed) == manifest.make(QUANTIZED / "ct_nvfp4")


def test_older_manifests_still_verify(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_file({"w": safeload.quantize(X, "int8", axis=0), "x": X}, "a.safetensors")
    made = manifest.make("a.safetensors")
    del made["tensors"]["w"]["restoring"]
    (tmp_path / "old.json").write_text(json.dumps(made))
    assert main(["verify", "a.safetensors", "--against", "old.json"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("2 tensors match old.json")
    assert "it covers the bytes of 1 quantized tensor, but not the settings" in err
    save_file({"w": safeload.quantize(X * 2, "int8", axis=0), "x": X}, "a.safetensors")
    assert main(["verify", "a.safetensors", "--against", "old.json"]) == 1


@pytest.mark.parametrize("keys", [("tensors", "files"), ("tensors",), ("files",)])
def test_a_manifest_by_check_write_manifest_is_read(copy_of, tmp_path, keys):
    """tests/data/manifests: written by `check --write-manifest`, before `verify --write` took its place."""
    written = json.loads((DATA / "manifests" / "gptq4_g32_asym.json").read_text())
    old, folder = tmp_path / "old.json", copy_of("gptq4_g32_asym")
    old.write_text(json.dumps({"safeload_manifest": 1, **{key: written[key] for key in keys}}))
    report = safeload.verify(folder, old)
    assert report.ok
    assert [len(report.files), len(report.tensors)] == ([4, 0] if "files" in keys else [0, 4])
    shard = folder / "model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[7000] ^= 1
    shard.write_bytes(content)
    report = safeload.verify(folder, old)
    changed = [] if keys == ("files",) else ["model.layers.0.self_attn.q_proj.weight"]
    assert [check.tensor for check in report.tensors if check.status != "ok"] == changed
    assert [file.file for file in report.files if file.status != "ok"] == ([shard.name] if "files" in keys else [])


@pytest.mark.parametrize("restoring", [1, None, "", "x" * 64, [], "a" * 63])
def test_damaged_digests_of_settings_are_refused(tmp_path, restoring):
    entry = {"dtype": "int8", "shape": [1], "sha256": "0" * 64, "restoring": restoring}
    (tmp_path / "m.json").write_text(json.dumps({"safeload_manifest": 1, "tensors": {"w": entry}}))
    save_file({"w": X}, tmp_path / "w.safetensors")
    with pytest.raises(safeload.VerificationError, match="'restoring' of 'w' must be a SHA-256"):
        safeload.verify(tmp_path / "w.safetensors", tmp_path / "m.json")


def test_a_fresh_manifest_covers_the_folder_but_for_files_of_git(tmp_path):
    model = shutil.copytree(DATA / "signatures" / "model", tmp_path / "model")
    shutil.copy(DATA / "signatures" / "files.sig", model / "model.sig")
    (model / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    written = tmp_path / "manifest.json"
    assert main(["verify", str(model), "--write", str(written)]) == 0
    report = safeload.verify(model, written)
    assert report.ok, str(report)
    (model / "added.json").write_text("{}")
    assert [file.file for file in safeload.verify(model, written).faults] == ["added.json"]


# ---- writing and comparing ----


@pytest.fixture
def model(tmp_path):
    (tmp_path / "m").mkdir()
    save_file({"w": X, "v": X[0]}, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text("{}")
    return tmp_path / "m"


def statuses(report):
    return {check[0]: check.status for check in report.faults}


def test_the_manifest_stands_in_the_folder_and_does_not_list_itself(model):
    for _ in range(2):
        report = safeload.verify(model, write=True)
        assert (report.ok, report.source) == (True, str(model / "sha256.json"))
        assert [file.file for file in report.files] == ["config.json", "model.safetensors"]
        assert [check.tensor for check in report.tensors] == ["v", "w"]
        listed = json.loads((model / "sha256.json").read_text())
        assert [*listed["files"]] == ["config.json", "model.safetensors"]
        assert safeload.verify(model).ok
        assert not list(model.glob(".*"))
    moved = model.rename(model.with_name("moved"))
    assert safeload.verify(moved).ok
    assert safeload.load(moved, verify=True).keys() == {"v", "w"}


def test_files_beside_each_other_have_manifests_of_their_own(model):
    for name in ("a", "b"):
        shutil.copy(model / "model.safetensors", model / f"{name}.safetensors")
        assert safeload.verify(model / f"{name}.safetensors", write=True).source.endswith(
            f"/{name}.safetensors.sha256.json"
        )
    assert safeload.verify(model / "a.safetensors").ok
    assert safeload.verify(model / "b.safetensors").source.endswith("b.safetensors.sha256.json")


def test_what_differs_is_named(model):
    safeload.verify(model, write=True)
    save_file({"w": X, "v": X[1]}, model / "model.safetensors")
    assert statuses(safeload.verify(model)) == {"model.safetensors": "changed", "v": "changed"}
    save_file({"w": X, "u": X[1]}, model / "model.safetensors")
    expected = {"model.safetensors": "changed", "v": "missing", "u": "not covered"}
    assert statuses(safeload.verify(model)) == expected
    (model / "config.json").rename(model / "settings.json")
    (model / "added.txt").write_text("x")
    report = safeload.verify(model)
    names = {"config.json": "missing", "settings.json": "not covered", "added.txt": "not covered"}
    assert statuses(report) == {**expected, **names}
    reasons = {file.file: file.reason for file in report.files}
    assert reasons["settings.json"].endswith("its content is that of config.json")
    assert "content" not in reasons["added.txt"]


def test_a_change_beside_the_weights_reads_no_tensor(model):
    safeload.verify(model, write=True)
    (model / "config.json").write_text('{"a": 1}')
    report = safeload.verify(model)
    assert (statuses(report), report.tensors) == ({"config.json": "changed"}, [])


def test_against_another_model(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    report = safeload.verify(copy, model)
    assert (report.ok, report.source, len(report.files)) == (True, str(model), 2)
    renamed = shutil.copy(model / "model.safetensors", tmp_path / "other.safetensors")
    assert safeload.verify(renamed, model / "model.safetensors").ok
    safeload.convert(model, tmp_path / "w.npz")
    report = safeload.verify(tmp_path / "w.npz", model, tensors=True)
    assert (report.ok, report.files, len(report.tensors)) == (True, [], 2)
    save_file({"w": X + 1, "v": X[0]}, copy / "model.safetensors")
    assert statuses(safeload.verify(copy, model)) == {"model.safetensors": "changed", "w": "changed"}
    assert statuses(safeload.verify(tmp_path / "w.npz", copy, tensors=True)) == {"w": "changed"}


def test_the_exit_status_says_if_a_comparison_was_possible(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "m"]) == 2  # nothing to verify against
    assert main(["verify", "absent"]) == main(["verify", "m", "--against", "absent"]) == 2
    assert main(["verify", "m", "--write"]) == main(["verify", "m"]) == 0
    assert capsys.readouterr().err.endswith("m/sha256.json: SHA-256 of 2 files and 2 tensors\n")
    (model / "config.json").unlink()
    assert main(["verify", "m", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["files"][0]["status"] == "missing"
    with pytest.raises(ValueError, match="pass only one of them"):
        safeload.verify(model, "list.json", write=True)
    (model / "sha256.json").write_text('{"safeload_manifest": 1, "files": {}}')
    with pytest.raises(safeload.VerificationError, match="has no digests of tensors"):
        safeload.verify(model, tensors=True)
    with pytest.raises(safeload.VerificationError, match=r"^https://example.com/m.safetensors: .* no digests"):
        safeload.verify("https://user:secret@example.com/m.safetensors", model / "sha256.json", tensors=True)


def test_a_model_that_does_not_open_has_a_manifest_of_its_files(model, caplog):
    (model / "model.safetensors").write_bytes(b"none")
    report = safeload.verify(model, write=True)
    assert (report.ok, len(report.files), report.tensors) == (True, 2, [])
    assert "lists files, but no tensors" in caplog.text
    assert safeload.verify(model).ok


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written(model, tmp_path):
    model.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match=r"sha256\.json"):
            safeload.verify(model, write=True)
        assert safeload.verify(model, write=tmp_path / "list.json").ok
    finally:
        model.chmod(0o700)


@pytest.mark.skipif(os.name == "nt", reason="no symbolic links")
def test_a_snapshot_of_the_hub(model, tmp_path):
    blobs, snapshot = tmp_path / "models--o--n" / "blobs", tmp_path / "models--o--n" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blobs / digest)
        (snapshot / path.name).symlink_to(blobs / digest)
    assert safeload.verify(snapshot).source == "the Hub's cache"
    assert safeload.verify(snapshot, write=True).ok
    report = safeload.verify(snapshot)
    assert (report.ok, report.source) == (True, str(snapshot / "sha256.json"))
