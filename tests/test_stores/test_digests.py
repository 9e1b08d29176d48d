"""Manifests and signed statements: every malformed one is refused by name, and no name leads out of the model."""

import base64
import copy
import hashlib
import json
from typing import NamedTuple

import pytest
from builders.inside import LOCAL, digests, parse_json, verified

from safeload import VerificationError
from safeload.errors import FormatError

pytestmark = pytest.mark.no_core

A, B = hashlib.sha256(b"a").hexdigest(), hashlib.sha256(b"b").hexdigest()


def root_of(resources):
    return hashlib.sha256(b"".join(bytes.fromhex(item["digest"]) for item in resources)).hexdigest()


def statement(resources, method="files", **serialization):
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "model", "digest": {"sha256": root_of(resources)}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {
            "serialization": {"method": method, "hash_type": "sha256", "allow_symlinks": False, **serialization},
            "resources": resources,
        },
    }


def resource(name, digest=A, algorithm="sha256"):
    return {"name": name, "digest": digest, "algorithm": algorithm}


GOOD = statement([resource("a.txt"), resource("d/b.txt", B)], ignore_paths=["model.sig", "d/c/"])
SHARDS = statement(
    [resource("a:0:5", A, "sha256-sharded-5"), resource("a:5:7", B, "sha256-sharded-5")], "shards", shard_size=5.0
)


def test_files_of_a_statement():
    signed = digests.files_of_statement(GOOD, "x")
    assert list(signed.files) == ["a.txt", "d/b.txt"]
    assert signed.files["d/b.txt"] == ((0, None, "sha256", B),)
    assert signed.ignored[:2] == ("model.sig", "d/c")
    shards = digests.files_of_statement(SHARDS, "x")
    assert shards.files["a"] == ((0, 5, "sha256", A), (5, 7, "sha256", B))
    backwards = copy.deepcopy(SHARDS)
    backwards["predicate"]["resources"].reverse()
    backwards["subject"][0]["digest"]["sha256"] = root_of(backwards["predicate"]["resources"])
    assert digests.files_of_statement(backwards, "x").files == shards.files


def changed(base, *path, value):
    made = copy.deepcopy(base)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


NAMES = ["/etc/passwd", "../x", "a/../../x", "a//b", "", "a/", "./a", "a\0b", "C:/x", "C:x", 7, None, ["a"], {"a": 1}]

BAD_STATEMENTS = {
    "another type": (
        changed(GOOD, "_type", value="https://in-toto.io/Statement/v0.1"),
        "expected an in-toto statement",
    ),
    "no type": ({}, "expected an in-toto statement"),
    "another predicate": (changed(GOOD, "predicateType", value="https://slsa.dev/v1"), "not a known model signature"),
    "no predicate": (changed(GOOD, "predicate", value=[]), "must have serialization and resources"),
    "resources that are no list": (changed(GOOD, "predicate", "resources", value={}), "must have serialization"),
    "another method": (
        changed(GOOD, "predicate", "serialization", "method", value="tensors"),
        "'tensors' is",
    ),
    "a resource that is no object": (changed(GOOD, "predicate", "resources", 0, value=3), "None"),
    "another algorithm": (changed(GOOD, "predicate", "resources", 0, "algorithm", value="md5"), "'md5' of 'a.txt'"),
    "an algorithm that is no text": (
        changed(GOOD, "predicate", "resources", 0, "algorithm", value=["sha256"]),
        "not known",
    ),
    "a short digest": (changed(GOOD, "predicate", "resources", 0, "digest", value=A[:-1]), "must have 64 hexadecimal"),
    "a digest of another algorithm": (
        changed(GOOD, "predicate", "resources", 0, "algorithm", value="blake2b"),
        "must have 128 hexadecimal",
    ),
    "a digest that is no text": (changed(GOOD, "predicate", "resources", 0, "digest", value=5), "must have 64"),
    "another root": (changed(GOOD, "subject", 0, "digest", "sha256", value=B), "the subject does not match"),
    "no subject": (changed(GOOD, "subject", value=[]), "the subject does not match"),
    "a subject that is no object": (changed(GOOD, "subject", value=[3]), "the subject does not match"),
    "two subjects": (changed(GOOD, "subject", value=GOOD["subject"] * 2), "the subject does not match"),
    "ignored paths that are no list": (
        changed(GOOD, "predicate", "serialization", "ignore_paths", value="a.txt"),
        "must be a list of paths",
    ),
    "the same file twice": (statement([resource("a"), resource("a", B)]), "'a' is listed twice"),
    "a gap between ranges": (statement([resource("a:0:5"), resource("a:6:7")], "shards"), "a gap at byte 5"),
    "overlapping ranges": (statement([resource("a:0:5"), resource("a:4:7")], "shards"), "overlap or leave a gap"),
    "the same range twice": (statement([resource("a:0:5"), resource("a:0:5")], "shards"), "overlap or leave a gap"),
    "a range that begins late": (statement([resource("a:1:5")], "shards"), "a gap at byte 0"),
    "an empty range": (statement([resource("a:0:0")], "shards"), "expected a path and a range"),
    "no range": (statement([resource("a")], "shards"), "expected a path and a range"),
    "an endless number": (statement([resource(f"a:0:{'9' * 5000}")], "shards"), "expected a path and a range"),
    **{
        f"the name {name!r}": (
            changed(GOOD, "predicate", "resources", 0, "name", value=name),
            "expected the path of a file inside the model",
        )
        for name in NAMES
    },
}


@pytest.mark.parametrize("case", BAD_STATEMENTS)
def test_malformed_statements_are_refused(case):
    content, message = BAD_STATEMENTS[case]
    with pytest.raises(VerificationError, match=message) as caught:
        digests.files_of_statement(content, "model.sig")
    assert str(caught.value).startswith("model.sig: ")


def test_the_first_predicate_lists_files_as_subjects():
    content = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "a", "digest": {"sha256": A}}],
        "predicateType": "https://model_signing/Digests/v0.1",
    }
    assert digests.files_of_statement(content, "x").files == {"a": ((0, None, "sha256", A),)}
    for subject in (None, [3], [{"name": "../a", "digest": {"sha256": A}}], [{"name": "a", "digest": {"sha1": A}}]):
        with pytest.raises(VerificationError):
            digests.files_of_statement({**content, "subject": subject}, "x")


def bundle(content, **fields):
    envelope = {"payloadType": "application/vnd.in-toto+json", "payload": base64.b64encode(content).decode()}
    return json.dumps({"dsseEnvelope": {**envelope, "signatures": [{"sig": ""}], **fields}}).encode()


BAD_BUNDLES = {
    "no envelope": (b"{}", "dsseEnvelope must be an object"),
    "no signature": (bundle(b"{}", signatures=[]), "expected exactly one signature, got 0"),
    "two signatures": (bundle(b"{}", signatures=[{}, {}]), "expected exactly one signature, got 2"),
    "signatures that are no list": (bundle(b"{}", signatures={}), "expected exactly one signature, got 0"),
    "another payload": (bundle(b"{}", payloadType="text/plain"), "the payload is 'text/plain'"),
    "no Base64": (bundle(b"{}", payload="%"), "the payload is not Base64"),
    "Base64 of another kind": (bundle(b"{}", payload="é"), "the payload is not Base64"),
}


@pytest.mark.parametrize("case", BAD_BUNDLES)
def test_malformed_bundles_are_refused(case):
    content, message = BAD_BUNDLES[case]
    with pytest.raises(VerificationError, match=message):
        digests._statement(parse_json(content, "the signature", "model.sig"), "model.sig")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a":1,"a":2}', bundle(b"no json"), bundle(b"[1]"), b"-----BEGIN"],
)
def test_what_is_no_json_is_refused(content):
    with pytest.raises((VerificationError, FormatError)):
        digests._statement(parse_json(content, "the signature", "model.sig"), "model.sig")


# ---- manifests of ours ----


def listing(**files):
    return {"safeload_manifest": 1, "files": files}


def test_files_of_a_manifest():
    files = digests.files_of_manifest(listing(a={"size": 3, "sha256": A.upper()}), "x")
    assert files == {"a": ((0, 3, "sha256", A),)}
    with pytest.raises(VerificationError, match="x: the manifest lists tensors, but no files"):
        digests.files_of_manifest({"safeload_manifest": 1, "tensors": {}}, "x")
    assert digests.is_manifest(b' {"safeload_manifest": 1')
    assert not digests.is_manifest(b'{"dsseEnvelope": {}')


@pytest.mark.parametrize(
    "files",
    [
        [],
        "a",
        {"a": 3},
        {"a": {}},
        {"a": {"size": -1, "sha256": A}},
        {"a": {"size": True, "sha256": A}},
        {"a": {"size": 1.0, "sha256": A}},
        {"a": {"size": 1 << 80, "sha256": A}},
        {"a": {"size": 1, "sha256": A + "0"}},
        {"a": {"size": 1, "sha256": "x" * 64}},
        {"../a": {"size": 1, "sha256": A}},
        {"/a": {"size": 1, "sha256": A}},
        {"": {"size": 1, "sha256": A}},
    ],
)
def test_malformed_manifests_are_refused(files):
    with pytest.raises(VerificationError, match=r"^list\.json: "):
        digests.files_of_manifest({"safeload_manifest": 1, "files": files}, "list.json")


def test_a_manifest_does_not_list_a_file_twice():
    with pytest.raises(FormatError, match="duplicate key 'a'"):
        parse_json(b'{"safeload_manifest": 1, "files": {"a": {}, "a": {}}}', "the manifest", "x")


@pytest.mark.parametrize("name", ["a", "a/b", "é", "a b", "ab:c", "..a", "a\\b", "C"])
def test_other_names_are_fine(name):
    assert list(digests.files_of_manifest(listing(**{name: {"size": 3, "sha256": A}}), "x")) == [name]


# ---- names and digests ----


class Range(NamedTuple):
    """Bytes of a file and their digest; ``end`` is None for the end of the file."""

    begin: int
    end: int | None
    algorithm: str
    digest: str


def test_names_are_relative_to_the_root(tmp_path):
    files = {"a": (), "d/b": ()}
    listed = digests.Expected("list", "none", str(tmp_path), files, ("ig",))
    assert listed.name_of(str(tmp_path / "d" / "b"), LOCAL) == "d/b"
    assert listed.name_of(str(tmp_path / "d" / ".." / "a"), LOCAL) in ("a", "d/../a")
    assert listed.name_of(str(tmp_path.parent / "a"), LOCAL) is None
    assert listed.covers(str(tmp_path / "a"), LOCAL)
    assert not listed.covers(str(tmp_path / "A"), LOCAL)
    assert listed.leaves_out("ig")
    assert listed.leaves_out("ig/x")
    assert not listed.leaves_out("igloo")


@pytest.mark.parametrize(
    ("algorithm", "digest"),
    [
        ("sha256", hashlib.sha256(b"hello").hexdigest()),
        ("blake2b", hashlib.blake2b(b"hello").hexdigest()),
        ("git-sha1", "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"),  # git hash-object
    ],
)
def test_digests(algorithm, digest):
    expected = (Range(0, None, algorithm, digest),)
    verified.compare_digests([memoryview(b"hel"), memoryview(b"lo")], expected, 5, path="x", source="y")
    with pytest.raises(VerificationError, match=rf"x: the file differs from y: expected {algorithm}"):
        verified.compare_digests([memoryview(b"help!")], expected, 5, path="x", source="y")


@pytest.mark.parametrize("pieces", [[7], [1] * 7, [3, 4], [5, 2], [6, 1], [0, 7]])
def test_ranges_and_pieces_need_not_agree(pieces):
    content, at, parts = b"abcdefg", 0, []
    for count in pieces:
        parts.append(memoryview(content)[at : at + count])
        at += count
    ranges = [(0, 5), (5, 7)]
    expected = [Range(b, e, "sha256", hashlib.sha256(content[b:e]).hexdigest()) for b, e in ranges]
    verified.compare_digests(parts, tuple(expected), 7, path="x", source="y")
    expected[1] = expected[1]._replace(digest=A)
    with pytest.raises(VerificationError, match=r"in bytes \[5, 7\)"):
        verified.compare_digests(parts, tuple(expected), 7, path="x", source="y")


def test_only_names_of_blobs_are_digests(tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name in (A, "a" * 40, f"sha256-{A}"):
        (blobs / name).write_bytes(b"")
        assert digests.digest_in_cache(str(blobs / name))[0].digest in name
        (tmp_path / name).write_bytes(b"")
        assert digests.digest_in_cache(str(tmp_path / name)) is None
    for name in ("x", "a" * 41, f"sha256-{A}.incomplete", A.upper()):
        assert digests.digest_in_cache(str(blobs / name)) is None
