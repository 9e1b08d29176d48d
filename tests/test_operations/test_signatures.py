"""Model signatures: what model-signing signs we verify, and what we sign it verifies; nothing else passes."""

import json
import os
import shutil
import sys

import numpy as np
import pytest
from builders.inside import main
from builders.paths import DATA

import safeload
from safeload import Signature, VerificationError

pytestmark = pytest.mark.no_core

pytest.importorskip("OpenSSL")
hashing, signing, verifying = (
    pytest.importorskip(f"model_signing.{name}") for name in ("hashing", "signing", "verifying")
)

SIGNED = DATA / "signatures"
KEY, OTHER, SECRET = SIGNED / "test-key.pub", SIGNED / "test-other-key.pub", SIGNED / "test-key.pem"
METHODS = ("files", "shards", "v0.1")

links = pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need a privilege on Windows")


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(SIGNED / "model", tmp_path / "model")


def by(name, key=KEY):
    return Signature(SIGNED / f"{name}.sig", key=key)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# ---- signed by model-signing ----


@pytest.mark.parametrize("name", METHODS)
def test_signatures_of_the_library_verify(model, name):
    report = safeload.verify(model, by(name))
    assert report.ok
    assert report.proof == f"signed with the key of {KEY}"
    plain, arrays = safeload.load(model), safeload.load(model, verify=by(name))
    assert list(plain) == list(arrays)
    assert all(np.array_equal(plain[key], arrays[key]) for key in plain)
    with pytest.raises(VerificationError, match="the signature is not valid"):
        safeload.load(model, verify=by(name, OTHER))


@pytest.mark.parametrize("name", METHODS)
def test_one_flipped_byte_in_any_file_is_named(model, name):
    for path in sorted(path for path in model.rglob("*") if path.is_file() and not path.name.startswith(".")):
        flip(path)
        report = safeload.verify(model, by(name))
        assert [(file.file, file.status) for file in report.faults] == [(path.relative_to(model).as_posix(), "changed")]
        if path.parent == model:
            with pytest.raises(VerificationError, match=rf"{path.name}: the file differs from .*{name}\.sig"):
                safeload.load(model, verify=by(name))
        flip(path)
    assert safeload.verify(model, by(name)).ok


def test_certificates(model):
    signature = Signature(SIGNED / "certificate.sig", certificate=SIGNED / "test-root.crt")
    report = safeload.verify(model, signature)
    assert report.ok
    assert "test-root.crt vouches for" in report.proof
    assert len(safeload.load(model, verify=signature)) == 4
    several = Signature(signature.path, certificate=[SIGNED / "test-root.crt", SIGNED / "test-signer.crt"])
    assert safeload.verify(model, several).ok
    for trusted, message in (
        ({"certificate": SIGNED / "test-signer.crt"}, "the signature is not valid"),
        ({"certificate": KEY}, r"test-key\.pub: expected certificates in PEM"),
        ({"key": KEY}, r"was made with a certificate, not with a key: pass certificate="),
    ):
        with pytest.raises(VerificationError, match=message):
            safeload.verify(model, Signature(signature.path, **trusted))
    with pytest.raises(VerificationError, match="was made with a key, not with a certificate: pass key="):
        safeload.verify(model, Signature(SIGNED / "files.sig", certificate=SIGNED / "test-root.crt"))
    with pytest.raises(FileNotFoundError):
        safeload.verify(model, Signature(signature.path, certificate=SIGNED / "missing.crt"))
    with pytest.raises(ValueError, match="not with both"):
        Signature(signature.path, key=KEY, certificate=KEY)


def test_ignored_paths_are_left_out_and_not_consumed(model):
    (model / "notes" / "more.txt").write_text("x")
    flip(model / "notes" / "history.txt")
    assert safeload.verify(model, by("ignored")).ok
    with pytest.raises(VerificationError, match=r"config.json: .*does not cover"):
        safeload.load(model, verify=by("ignored"))
    os.remove(model / "config.json")
    assert len(safeload.load(model, verify=by("ignored"))) == 4


def test_a_file_more_or_less_is_named(model):
    (model / "extra.py").write_text("x")
    (model / "notes" / "history.txt").unlink()
    report = safeload.verify(model, by("files"))
    assert [(file.file, file.status) for file in report.faults] == [
        ("extra.py", "not covered"),
        ("notes/history.txt", "missing"),
    ]
    assert not report
    assert len(safeload.load(model, verify=by("files"))) == 4  # neither is consumed


@links
def test_a_link_that_leads_nowhere_is_not_covered(model, tmp_path):
    (model / "gone.bin").symlink_to(tmp_path / "nowhere")
    report = safeload.verify(model, by("files"))
    assert [(file.file, file.status) for file in report.faults] == [("gone.bin", "not covered")]


def test_a_model_that_is_one_file(model):
    path, signature = model / "model-00001-of-00002.safetensors", by("single")
    assert safeload.verify(path, signature).ok
    assert list(safeload.load(path, verify=signature)) == ["w0", "w1"]
    other = model / "model-00002-of-00002.safetensors"
    with pytest.raises(VerificationError, match="differs"):
        safeload.load(other, verify=signature)
    assert safeload.verify(path, by("files")).ok  # by the signature of its folder


@links
def test_symbolic_links_count_as_their_files(model, tmp_path):
    path = model / "model-00001-of-00002.safetensors"
    shutil.move(path, tmp_path / "blob")
    path.symlink_to(tmp_path / "blob")
    for name in ("symlinks", "files"):
        assert safeload.verify(model, by(name)).ok
        assert len(safeload.load(model, verify=by(name))) == 4
    flip(tmp_path / "blob")
    with pytest.raises(VerificationError, match=path.name):
        safeload.load(model, verify=by("symlinks"))


@pytest.mark.parametrize(
    "change",
    [
        lambda bundle: bundle["dsseEnvelope"]["signatures"].append(bundle["dsseEnvelope"]["signatures"][0]),
        lambda bundle: bundle["dsseEnvelope"]["signatures"][0].update(sig="AAAA"),
        lambda bundle: bundle["dsseEnvelope"].update(payload=bundle["dsseEnvelope"]["payload"][:-4]),
        lambda bundle: bundle.update(mediaType="text/plain"),
        lambda bundle: bundle.pop("verificationMaterial"),
        lambda bundle: bundle.update(dsseEnvelope=[]),
    ],
)
def test_changed_signatures_are_refused(model, tmp_path, change):
    bundle = json.loads((SIGNED / "files.sig").read_text())
    change(bundle)
    path = tmp_path / "x.sig"
    path.write_text(json.dumps(bundle))
    with pytest.raises(VerificationError, match=r"x\.sig: "):
        safeload.load(model, verify=Signature(path, key=KEY))


def test_the_signed_bytes_are_the_bytes_that_were_read(model, tmp_path, monkeypatch):
    """The library gets a copy: a file that changes while it is verified changes nothing."""
    path = tmp_path / "x.sig"
    shutil.copy(SIGNED / "files.sig", path)
    real = verifying.Config.verify

    def and_change(self, folder, signature):
        assert str(signature) != str(path)
        path.write_text("{}")
        return real(self, folder, signature)

    monkeypatch.setattr(verifying.Config, "verify", and_change)
    assert len(safeload.load(model, verify=Signature(path, key=KEY))) == 4


def test_a_missing_library_says_what_to_install(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "model_signing", None)
    monkeypatch.delitem(sys.modules, "model_signing.verifying")
    with pytest.raises(ModuleNotFoundError, match="pip install model-signing"):
        safeload.load(model, verify=by("files"))


# ---- signed by us ----


def library_verifies(model, signature, *, key=None, **shards):
    config = verifying.Config()
    if key is None:
        config.use_elliptic_key_verifier(public_key=KEY)
    else:
        config.use_certificate_verifier(certificate_chain=[key])
    hashes = hashing.Config()
    if shards:
        hashes.use_shard_serialization(**shards)
    hashes.set_ignored_paths(paths=["model.sig"]).set_allow_symlinks(True)
    config.set_hashing_config(hashes).verify(model, signature)


def sign(*arguments):
    return main(["sign", *map(str, arguments)])


def test_the_library_verifies_what_we_sign(model, capsys):
    assert sign(model, "--key", SECRET) == 0
    verifying.Config().use_elliptic_key_verifier(public_key=KEY).verify(model, model / "model.sig")
    assert main(["verify", str(model), "--key", str(KEY)]) == 0
    assert "6 files" not in capsys.readouterr().out
    assert sign(model, "--key", SECRET, "--shard-size", 300) == 0  # a signature may be replaced
    library_verifies(model, model / "model.sig", shard_size=300)
    assert main(["verify", str(model), "--key", str(KEY)]) == 0
    flip(model / "config.json")
    with pytest.raises(ValueError, match="Signature mismatch"):
        library_verifies(model, model / "model.sig", shard_size=300)
    assert main(["verify", str(model), "--key", str(KEY)]) == 1
    assert "config.json  changed" in capsys.readouterr().out


@links
def test_links_are_signed_on_request(model, tmp_path, capsys):
    shutil.move(model / "config.json", tmp_path / "blob")
    (model / "config.json").symlink_to(tmp_path / "blob")
    assert sign(model, "--key", SECRET) == 1
    assert "because it is a symlink" in capsys.readouterr().err
    assert not (model / "model.sig").exists()
    assert sign(model, "--key", SECRET, "--symlinks", "--ignore", "notes") == 0
    library_verifies_links = verifying.Config().use_elliptic_key_verifier(public_key=KEY)
    hashes = hashing.Config().set_ignored_paths(paths=["model.sig", "notes"]).set_allow_symlinks(True)
    library_verifies_links.set_hashing_config(hashes).verify(model, model / "model.sig")
    assert main(["verify", str(model), "--key", str(KEY)]) == 0


def test_certificates_are_put_into_signatures(model):
    crt = SIGNED / "test-signer.crt"
    assert sign(model, "--key", SIGNED / "test-signer.pem", "--certificate", crt) == 0
    root = SIGNED / "test-root.crt"
    library_verifies(model, model / "model.sig", key=root)
    assert main(["verify", str(model), "--certificate", str(root)]) == 0
    assert main(["verify", str(model), "--key", str(KEY)]) == 2


def test_a_file_is_signed_beside_it(model):
    path = model / "model-00001-of-00002.safetensors"
    assert sign(path, "--key", SECRET) == 0
    verifying.Config().use_elliptic_key_verifier(public_key=KEY).verify(path, f"{path}.sig")
    assert main(["verify", str(path), "--key", str(KEY)]) == 0
    assert len(safeload.load(path, verify=Signature(f"{path}.sig", key=KEY))) == 2


def test_a_file_that_is_no_signature_is_not_replaced(model, capsys):
    (model / "model.sig").write_text("notes")
    assert sign(model, "--key", SECRET) == 1
    assert "is not a safeload signature; pass --overwrite to replace it" in capsys.readouterr().err
    assert sign(model, "--key", SECRET, "--overwrite") == 0
    assert sign(model, "--key", KEY) == 1
    assert sign(model, "--key", model / "missing.pem") == 1
    assert sign(model / "missing", "--key", SECRET) == 1
    assert sign(model, "--key", SECRET, "--chain", KEY) == 2
    with pytest.raises(SystemExit, match=r"^2$"):
        sign(model, "--key", SECRET, "--shard-size", 0)


def test_keys_of_other_kinds_are_named(model, tmp_path, capsys):
    rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa").generate_private_key(65537, 2048)
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    secret, public = tmp_path / "rsa.pem", tmp_path / "rsa.pub"
    secret.write_bytes(rsa.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(rsa.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    assert sign(model, "--key", secret) == 1
    assert "rsa.pem is not a key on the curve P-256, P-384 or P-521" in capsys.readouterr().err
    for key in (public, secret, SECRET):
        with pytest.raises(VerificationError, match=rf"{key.name}: expected a public key on the curve P-256"):
            safeload.verify(model, by("files", key))


def test_an_encrypted_key_takes_its_password_from_the_environment(model, tmp_path, monkeypatch):
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    key = serialization.load_pem_private_key(SECRET.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    how = serialization.BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how))
    assert sign(model, "--key", locked) == 1
    monkeypatch.setenv("SAFELOAD_KEY_PASSWORD", "secret")
    assert sign(model, "--key", locked) == 0
    assert main(["verify", str(model), "--key", str(KEY)]) == 0


# ---- the command ----


def test_convert_verifies_its_sources(model, tmp_path, capsys):
    arguments = ["convert", str(model), str(tmp_path / "out.safetensors"), "--verify", str(SIGNED / "files.sig")]
    assert main(arguments) == 1
    assert "pass --key or --certificate" in capsys.readouterr().err
    assert main([*arguments[:3], "--key", str(KEY)]) == 2
    assert main([*arguments, "--key", str(KEY), "--stored"]) == 2
    assert main([*arguments, "--key", str(KEY), "--adapter", "x"]) == 2
    flip(model / "model-00002-of-00002.safetensors")
    assert main([*arguments, "--key", str(KEY)]) == 1
    assert not (tmp_path / "out.safetensors").exists()
    flip(model / "model-00002-of-00002.safetensors")
    assert main([*arguments, "--key", str(KEY)]) == 0
    assert len(safeload.load(tmp_path / "out.safetensors")) == 4


def test_json_and_exit_status(model, tmp_path, capsys):
    arguments = ["verify", str(model), "--against", str(SIGNED / "files.sig")]
    assert main([*arguments, "--key", str(KEY), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], len(report["files"]), report["files"][0]["status"]) == (True, 5, "ok")
    assert main(arguments) == 2
    assert "pass --key or --certificate" in capsys.readouterr().err
    assert main([*arguments, "--key", str(OTHER)]) == 2
    assert main([*arguments, "--key", str(tmp_path / "no.pub")]) == 2
    with pytest.raises(SystemExit):
        main([*arguments, "--key", "a", "--certificate", "b"])
    (model / "extra").write_text("x")
    assert main([*arguments, "--key", str(KEY)]) == 1
    output = capsys.readouterr().out
    assert "extra  not covered" in output
    assert "1 of 6 files does not match" in output


def test_the_report_shows_itself(model):
    report = safeload.verify(model, by("files"))
    assert str(report) == report.verdict
    assert repr(report).startswith("<VerifyReport: 5 files")
    assert "<table" in report._repr_html_()
    assert list(report.rows()[0]) == ["name", "kind", "status", "nbytes", "reason"]
    assert json.loads(json.dumps(report.to_dict()))["proof"].startswith("signed with")


def test_signing_with_the_library_again(model, tmp_path):
    """Other hashes than SHA-256, which no command writes."""
    for algorithm in ("blake2", "blake3"):
        hashes = hashing.Config().use_file_serialization(hashing_algorithm=algorithm)
        signing.Config().use_elliptic_key_signer(private_key=SECRET).set_hashing_config(hashes).sign(
            model, tmp_path / "x.sig"
        )
        assert safeload.verify(model, Signature(tmp_path / "x.sig", key=KEY)).ok
        flip(model / "config.json")
        assert not safeload.verify(model, Signature(tmp_path / "x.sig", key=KEY)).ok
        flip(model / "config.json")
