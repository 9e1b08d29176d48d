"""Verifying 2.5 GB while loading: against hashing alone, reading alone, and model-signing before loading."""

from __future__ import annotations

import hashlib
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import files
import ml_dtypes  # noqa: F401 - safetensors.numpy finds bfloat16 only so
import pytest
import safetensors.numpy
from compare import Comparison, prepared, race, same_arrays

import safeload
from safeload.core.memory import available_cpus
from safeload.trust.verify import digests_of

ROUNDS = files.LARGE_ROUNDS
_BUFFER = 1 << 20


@pytest.fixture(scope="module")
def llama_folder() -> Path:
    folder = files.llama_folder()
    if files.available_memory() < 10 << 30:
        pytest.skip("needs 10 GB of memory: the page cache, and the arrays of two sides")
    return folder


def _hash(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_BUFFER)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def hash_all(folder: Path) -> dict[str, str]:
    """SHA-256 of every shard, one per thread, through a buffer that stays in the cache."""
    shards = sorted(folder.glob("*.safetensors"))
    with ThreadPoolExecutor(available_cpus()) as pool:
        return dict(zip([shard.name for shard in shards], pool.map(_hash, shards), strict=True))


def test_verified_load(llama_folder: Path, tmp_path: Path, table, report) -> None:
    listed = tmp_path / "list.json"
    digests = digests_of(str(llama_folder), available_cpus())
    listed.write_text(json.dumps({"safeload_manifest": 1, "files": digests}))

    def same(ours: Any, theirs: Any) -> None:
        if next(iter(theirs)).endswith(".safetensors"):
            assert all(digests[name]["sha256"] == digest for name, digest in theirs.items())
        else:
            same_arrays(ours, theirs)

    sides = {
        "ours": lambda: safeload.load(llama_folder, verify=listed),
        "hashing": lambda: hash_all(llama_folder),
        "reading": lambda: safeload.load(llama_folder, backend="pread"),
    }
    samples = race(sides, ROUNDS, check=same, prepare=prepared(llama_folder, 3 << 30))
    larger = max(("hashing", "reading"), key=lambda side: statistics.median(samples[side]))
    comparison = Comparison(samples["ours"], samples[larger])
    peer = f"limit: {larger} alone"  # the longer of the two
    row = table.add("load the 2.5 GB bf16 folder, verified", peer, comparison, at_most=1.1)
    report(sides["ours"], [row], rounds=1, prepare=prepared(llama_folder, 3 << 30))


def test_signed_load(llama_folder: Path, tmp_path: Path, table, report) -> None:
    pytest.importorskip("OpenSSL")
    hashing, signing, verifying = (
        pytest.importorskip(f"model_signing.{name}") for name in ("hashing", "signing", "verifying")
    )
    keys = Path(__file__).parent.parent / "tests" / "data" / "signatures"
    path = tmp_path / "model.sig"
    signer = signing.Config().use_elliptic_key_signer(private_key=keys / "test-key.pem")
    signer.set_hashing_config(hashing.Config().set_allow_symlinks(True)).sign(llama_folder, path)
    signature = safeload.Signature(path, key=keys / "test-key.pub")

    def theirs() -> dict[str, Any]:
        verifying.Config().use_elliptic_key_verifier(public_key=keys / "test-key.pub").verify(llama_folder, path)
        arrays: dict[str, Any] = {}
        for shard in sorted(llama_folder.glob("*.safetensors")):
            arrays.update(safetensors.numpy.load_file(shard))
        return arrays

    peer = "model-signing, then safetensors.numpy"
    sides = {"ours": lambda: safeload.load(llama_folder, verify=signature), peer: theirs}
    samples = race(sides, ROUNDS, check=same_arrays, prepare=prepared(llama_folder, 3 << 30))
    row = table.add("load the 2.5 GB bf16 folder, signed", peer, Comparison(samples["ours"], samples[peer]), target=2)
    report(sides["ours"], [row], rounds=1, prepare=prepared(llama_folder, 3 << 30))
