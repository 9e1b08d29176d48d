"""Sign a small model with model-signing 1.1.1, for tests of signatures: ``python make.py`` in this folder.

Needs ``pip install model-signing pyopenssl``. Keys and certificates are for these tests only. Running it again makes
new keys, so all files change together.
"""

import base64
import datetime
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from model_signing import hashing, signing

from safeload.numpy import save_file

HERE = Path(__file__).parent
PEM = serialization.Encoding.PEM
DAY = datetime.timedelta(days=1)
BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)


def new_key(name):
    key = ec.generate_private_key(ec.SECP256R1())
    secret = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (HERE / f"{name}.pem").write_bytes(secret)
    public = key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (HERE / f"{name}.pub").write_bytes(public)
    return key


def certificate(name, key, issuer, issuer_key, *, ca):
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"test only {name}")])
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    usage |= {"decipher_only": False, "digital_signature": True, "key_cert_sign": ca, "crl_sign": ca}
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGIN)
        .not_valid_after(BEGIN + 36500 * DAY)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    (HERE / f"{name}.crt").write_bytes(made.public_bytes(PEM))
    return made


def model(folder):
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "notes").mkdir(parents=True)
    rng = np.random.default_rng(1)
    weights = {f"w{k}": rng.standard_normal((8, 16)).astype(np.float32) for k in range(4)}
    save_file({name: weights[name] for name in ("w0", "w1")}, folder / "model-00001-of-00002.safetensors")
    save_file({name: weights[name] for name in ("w2", "w3")}, folder / "model-00002-of-00002.safetensors")
    weight_map = {f"w{k}": f"model-0000{k // 2 + 1}-of-00002.safetensors" for k in range(4)}
    index = {"metadata": {"total_size": 2048}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "test"}')
    (folder / "notes" / "history.txt").write_text("first\n")
    (folder / ".gitattributes").write_text("* -text\n")


def signed(name, config, *, folder, ignored=(), shard_size=None, symlinks=False):
    hashes_of = hashing.Config()
    if shard_size:
        hashes_of.use_shard_serialization(shard_size=shard_size)
    hashes_of.set_ignored_paths(paths=ignored).set_allow_symlinks(symlinks)
    config.set_hashing_config(hashes_of).sign(folder, HERE / f"{name}.sig")


def old_signature(key, folder):
    """The statement of model-signing 0.2, with its encoding of what is signed."""
    subjects = [
        {
            "name": path.relative_to(folder).as_posix(),
            "digest": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    ]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://model_signing/Digests/v0.1",
        "predicate": {"unused": "Unused, just passed due to API requirements"},
    }
    payload, kind = json.dumps(statement).encode(), "application/vnd.in-toto+json"
    message = f"DSSEV1 {len(kind)} {kind} {len(payload)} {payload}".encode()
    signature = key.sign(message, ec.ECDSA(hashes.SHA256()))
    bundle = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": ""}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": kind,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    (HERE / "v0.1.sig").write_text(json.dumps(bundle))


def main():
    key, _, root_key, signer_key = map(new_key, ("test-key", "test-other-key", "test-root", "test-signer"))
    root = certificate("test-root", root_key, None, root_key, ca=True)
    certificate("test-signer", signer_key, root, root_key, ca=False)
    folder = HERE / "model"
    model(folder)

    def by_key():
        return signing.Config().use_elliptic_key_signer(private_key=HERE / "test-key.pem")

    def by_certificate():
        return signing.Config().use_certificate_signer(
            private_key=HERE / "test-signer.pem",
            signing_certificate=HERE / "test-signer.crt",
            certificate_chain=[HERE / "test-root.crt"],
        )

    signed("files", by_key(), folder=folder)
    signed("shards", by_key(), folder=folder, shard_size=300)
    signed("ignored", by_key(), folder=folder, ignored=["notes", "config.json"])
    signed("certificate", by_certificate(), folder=folder)
    signed("single", by_key(), folder=folder / "model-00001-of-00002.safetensors")
    links = HERE / "links"
    shutil.copytree(folder, links)
    target = links / "model-00001-of-00002.safetensors"
    target.unlink()
    target.symlink_to("../model/model-00001-of-00002.safetensors")
    signed("symlinks", by_key(), folder=links, symlinks=True)
    shutil.rmtree(links)
    old_signature(key, folder)
    for name in ("test-root.pem", "test-root.pub", "test-signer.pub", "test-other-key.pem"):
        (HERE / name).unlink()


if __name__ == "__main__":
    main()
