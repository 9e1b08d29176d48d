"""Manifests of quantized tensors also cover the settings that turn stored bytes into values."""

import json
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
    return [(one.code, one.tensor) for one in manifest.compare(before, after)]


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
    assert findings(before, manifest.make(path)) == [("manifest.changed", "w")]


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
    assert any(code == "manifest.changed" for code, _ in findings(before, manifest.make(folder)))


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
    assert findings(before, after) == [("manifest.changed", name)]


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
    assert main(["check", "a.safetensors", "--manifest", "old.json", "--strict"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "manifest.outdated" in out
    assert "1 quantized tensor, but not" in out
    save_file({"w": safeload.quantize(X * 2, "int8", axis=0), "x": X}, "a.safetensors")
    assert main(["check", "a.safetensors", "--manifest", "old.json"]) == 1


@pytest.mark.parametrize("restoring", [1, None, "", "x" * 64, [], "a" * 63])
def test_damaged_digests_of_settings_are_refused(tmp_path, restoring):
    entry = {"dtype": "int8", "shape": [1], "sha256": "0" * 64, "restoring": restoring}
    (tmp_path / "m.json").write_text(json.dumps({"safeload_manifest": 1, "tensors": {"w": entry}}))
    with pytest.raises(safeload.FormatError, match="'restoring' of 'w' must be a SHA-256"):
        manifest.read(tmp_path / "m.json")


def test_a_fresh_manifest_covers_the_folder_but_for_files_of_git(tmp_path):
    model = shutil.copytree(DATA / "signatures" / "model", tmp_path / "model")
    shutil.copy(DATA / "signatures" / "files.sig", model / "model.sig")
    (model / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    written = tmp_path / "manifest.json"
    assert main(["check", str(model), "--schema", "none", "--write-manifest", str(written)]) == 0
    report = safeload.verify(model, written)
    assert report.ok, str(report)
    (model / "added.json").write_text("{}")
    assert [file.file for file in safeload.verify(model, written).faults] == ["added.json"]
