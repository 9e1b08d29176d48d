"""``safeload check --policy``: each rule refuses what breaks it, and unknown rules are refused by name."""

import json
import os
import pickle
import shutil
import sys

import numpy as np
import pytest
from builders.inside import main
from builders.paths import DATA

import safeload
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

SIGNED = DATA / "signatures"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.ones((2, 3), np.float32), "v": np.arange(4)}, folder / "model.safetensors", {"license": "MIT"})
    return folder


@pytest.fixture
def gate(tmp_path, folder, capsys):
    """Check a folder against rules; return the exit status and the codes of errors."""

    def run(path=folder, *options, **rules):
        policy = tmp_path / "gate.json"
        policy.write_text(json.dumps(rules))
        capsys.readouterr()
        status = main(["check", str(path), "--policy", str(policy), "--json", *options])
        output = capsys.readouterr()
        if status == 2:
            return status, output.err
        return status, [finding["code"] for finding in json.loads(output.out)["errors"]]

    return run


def test_a_good_model_passes(gate):
    rules = {"pickles": "none", "nan": False, "formats": ["safetensors"], "dtypes": ["f32", "I64"]}
    assert gate(**rules, license=["mit", "apache-2.0"]) == (0, [])
    assert gate() == (0, [])


def test_pickles(gate, folder):
    (folder / "optimizer.bin").write_bytes(pickle.dumps({"a": 1}))
    assert gate(pickles="none") == (1, ["policy.pickle"])
    assert gate(pickles="harmless") == (0, [])
    (folder / "evil.bin").write_bytes(b"cos\nsystem\n(S'echo owned'\ntR.")
    assert gate(pickles="harmless") == (1, ["policy.pickle"])
    assert gate(pickles="none") == (1, ["policy.pickle", "policy.pickle"])
    os.remove(folder / "evil.bin")
    (folder / "cut.zip").write_bytes(b"PK\3\4" + b"\xff" * 40)
    assert gate(pickles="harmless")[0] == 1


def test_nan_needs_values(gate, folder):
    assert gate(folder, "--structure", nan=False) == (1, ["policy.nan"])
    assert gate(folder, "--only", "w", nan=False) == (1, ["policy.nan"])
    save_file({"w": np.float32([1, np.nan])}, folder / "model.safetensors")
    assert gate(nan=False) == (1, ["value.nan"])
    assert "policy.nan" in gate(DATA / "quantized" / "bnb_nf4", "--stored", nan=False)[1]


def test_schemas(gate):
    assert gate(schema=True) == (1, ["policy.schema"])
    published = DATA / "quantized" / "modelopt_nvfp4"
    schema = safeload.check(published).schema
    assert gate(published, schema=True) == (0, [])
    assert gate(published, schema=[schema]) == (0, [])
    assert gate(published, schema=["other"]) == (1, ["policy.schema"])


def test_formats_and_dtypes(gate):
    assert gate(formats=["gguf", "npz"]) == (1, ["policy.format"])
    assert gate(dtypes=["BF16"]) == (1, ["policy.dtype"] * 2)


@pytest.mark.parametrize(
    ("card", "status"),
    [
        ("---\nlicense: mit\n---\n# Model\n", 0),
        ("---\ntags:\n- x\nlicense: 'MIT'\n---\n", 0),
        ("---\nlicense:\n- mit\n- apache-2.0\nlanguage: en\n---\n", 0),
        ("---\nlicense: [mit, apache-2.0]\n---\n", 0),
        ("---\nlicense: gpl-3.0\n---\n", 1),
        ("---\nlicense:\n- mit\n- other\n---\n", 1),
        ("license: mit\n", 1),  # no front matter
        ("---\nno end\nlicense: mit\n", 1),
        ("---\n---\nlicense: mit\n", 1),
        ("", 1),
    ],
)
def test_licenses_of_the_model_card(gate, folder, card, status):
    save_file({"w": np.ones(2, np.float32)}, folder / "model.safetensors")
    (folder / "README.md").write_text(card)
    assert gate(license=["mit", "Apache-2.0"]) == (status, ["policy.license"] * status)


def test_licenses_of_metadata(gate, folder):
    assert gate(license=True) == (0, [])
    assert gate(license=["apache-2.0"]) == (1, ["policy.license"])
    (folder / "config.json").write_text('{"license": "other"}')
    assert gate(license=["mit"]) == (1, ["policy.license"])


def test_signatures(gate, tmp_path):
    pytest.importorskip("OpenSSL")
    pytest.importorskip("model_signing")
    model = shutil.copytree(SIGNED / "model", tmp_path / "signed")
    shutil.copy(SIGNED / "test-key.pub", tmp_path / "release.pub")
    assert gate(model, signed_by="release.pub") == (1, ["policy.signature"])  # there is none
    shutil.copy(SIGNED / "files.sig", model / "model.sig")
    assert gate(model, signed_by="release.pub") == (0, [])
    assert gate(model, signed_by=str(SIGNED / "test-other-key.pub")) == (1, ["policy.signature"])
    assert gate(model, signed_by="missing.pub") == (1, ["policy.signature"])
    shutil.copy(SIGNED / "certificate.sig", model / "other.sig")
    os.remove(model / "model.sig")
    assert gate(model, certificates=[str(SIGNED / "test-root.crt")], signature="other.sig") == (0, [])
    (model / "extra.py").write_text("x")
    assert gate(model, certificates=[str(SIGNED / "test-root.crt")], signature="other.sig") == (1, ["policy.signature"])


def test_warnings(gate, folder):
    save_file({"w": np.float32([[1, 1e6]])}, folder / "model.safetensors")
    assert gate() == (0, [])
    assert gate(warnings=False) == (1, ["policy.warning"])
    save_file({"w": np.zeros((4, 4), np.float32)}, folder / "model.safetensors")
    assert gate(warnings=False) == (0, [])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"picles": "none"}, "unknown key 'picles', expected one of pickles, nan"),
        ({"pickles": "all"}, 'pickles must be "none" or "harmless", got \'all\''),
        ({"nan": True}, "nan must be false, got True"),
        ({"nan": 0}, "nan must be false, got 0"),
        ({"schema": []}, "schema must be true or a list of schemas"),
        ({"formats": "gguf"}, "formats must be a list of formats"),
        ({"dtypes": [1]}, "dtypes must be a list of dtypes"),
        ({"license": False}, "license must be true or a list of licenses"),
        ({"signed_by": ""}, "signed_by must be the path of a public key"),
        ({"signature": "x.sig"}, "signature needs signed_by or certificates"),
        ({"signed_by": "a", "certificates": ["b"]}, "not both"),
    ],
)
def test_wrong_policies_are_wrong_usage(gate, rules, message):
    status, text = gate(**rules)
    assert status == 2
    assert message in text


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"nan": false, "nan": false}', "\xff"])
def test_what_is_no_json_is_wrong_usage(folder, tmp_path, content, capsys):
    (tmp_path / "p.json").write_bytes(content.encode("latin-1"))
    assert main(["check", str(folder), "--policy", str(tmp_path / "p.json")]) == 2
    assert "p.json" in capsys.readouterr().err


def test_toml(folder, tmp_path, capsys):
    policy = tmp_path / "gate.toml"
    policy.write_text('pickles = "none"  # a comment\nformats = ["gguf"]\n')
    status = main(["check", str(folder), "--policy", str(policy)])
    if sys.version_info < (3, 11):
        assert status == 2
        assert "write the policy as JSON" in capsys.readouterr().err
        return
    assert status == 1
    assert "policy.format" in capsys.readouterr().out
    policy.write_text("pickles = ")
    assert main(["check", str(folder), "--policy", str(policy)]) == 2
    assert main(["check", str(folder), "--policy", str(tmp_path / "gate.yaml")]) == 1  # missing
    (tmp_path / "gate.yaml").write_text("")
    assert main(["check", str(folder), "--policy", str(tmp_path / "gate.yaml")]) == 2


def test_a_damaged_model_breaks_its_policy_too(gate, folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    status, codes = gate(dtypes=["F32"], formats=["safetensors"], schema=True)
    assert status == 1
    assert {"policy.format", "policy.schema", "policy.unread"} <= set(codes)
