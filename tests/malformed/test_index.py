"""index.json, config.json and folders, each with one fault: refused with a message that names the file."""

import gzip
import io
import json
import pickle
import re
import tarfile
import zipfile

import numpy as np
import pytest

import safeload
from safeload import FormatError, SafeloadError, UnsupportedError
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.no_core

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    save_file({"a": np.zeros(2, np.float32), "extra": np.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": np.ones(3, np.int8)}, tmp_path / "two.safetensors")
    return tmp_path


def write(folder, index):
    (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))


GOOD = {"a": "one.safetensors", "b": "two.safetensors"}


def test_tensors_that_the_index_leaves_out_are_ignored(folder):
    write(folder, {"weight_map": GOOD})
    assert set(safeload.open(folder)) == {"a", "b"}
    assert set(safeload.load(folder / INDEX)) == {"a", "b"}


@pytest.mark.parametrize("total", [0, -5, 10**30, "many", None])
def test_a_wrong_total_size_is_no_refusal(folder, total):
    write(folder, {"metadata": {"total_size": total}, "weight_map": GOOD})
    assert safeload.open(folder).metadata["total_size"] == total


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("", "is not JSON"),
        ("\n", "is not JSON"),
        ("weight_map", "is not JSON"),
        ("{'weight_map': {}}", "is not JSON"),
        ('{"weight_map": {},}', "is not JSON"),
        ('{"weight_map": {}} {}', "is not JSON"),
        ('{"weight_map": {}}\0', "is not JSON"),
        ('{"weight_map": {"a": "one.safetensors}}', "is not JSON"),
        ('{"weight_map": {} // comment\n}', "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "nested more than 64 levels deep"),
        ('{"a":' * 100_000, "nested more than 64 levels deep"),
        ('{"x": ' + "9" * 10_000 + "}", "is not JSON"),
        ("[]", "must be a JSON object, got list"),
        ("7", "must be a JSON object, got int"),
        ("{}", "an index of shards must have a weight_map, and this JSON object has none"),
        ('{"weight_map": []}', "weight_map must be an object, got list"),
        ('{"weight_map": null}', "weight_map must be an object, got NoneType"),
        ('{"weight_map": "one.safetensors"}', "weight_map must be an object, got str"),
        ('{"weight_map": true}', "weight_map must be an object, got bool"),
        ('{"weight_map": {}, "weight_map": {}}', "duplicate key 'weight_map'"),
        ('{"weight_map": {}, "weight\\u005fmap": {}}', "duplicate key 'weight_map'"),
        ('{"weight_map": {}, "metadata": {"x": 1, "x": 2}}', "duplicate key 'x'"),
        ('{"weight_map": {}, "metadata": []}', "metadata must be an object, got list"),
        ('{"weight_map": {"\\ud800": "one.safetensors"}}', "should be in one.safetensors, but is not there"),
        ('{"weight_map": {}, "metadata": 3}', "metadata must be an object, got int"),
        ('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "duplicate key 'a'"),
        ('{"weight_map": {"a": "two.safetensors"}}', "tensor 'a' should be in two.safetensors, but is not there"),
        ('{"weight_map": {"a": "one.safetensors", "c": "one.safetensors"}}', "tensor 'c' should be in one.safetensors"),
        *(
            (json.dumps({"weight_map": {"a": value}}), "weight_map['a'] must")
            for value in (
                "../one.safetensors",
                "sub/one.safetensors",
                "./one.safetensors",
                "one.safetensors/",
                "sub\\one.safetensors",
                "\\\\host\\share\\one.safetensors",
                "C:\\one.safetensors",
                "\ud800.safetensors",
                "/etc/passwd",
                "..",
                ".",
                "..\\one.safetensors",
                "C:one.safetensors",
                "one.safetensors\0",
                "",
                None,
                3,
                True,
                ["one.safetensors"],
                {"one.safetensors": 1},
            )
        ),
    ],
)
def test_a_malformed_index_is_refused(folder, index, message):
    write(folder, index)
    for path in (folder, folder / INDEX):
        with pytest.raises(FormatError) as caught:
            safeload.open(path)
        assert message in str(caught.value)
        assert caught.value.path == str(folder / INDEX)


@pytest.mark.parametrize("before", ["", "\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{GRINNING FACE}" * 100])
def test_the_offset_of_a_fault_in_an_index_counts_bytes(folder, before):
    text = f'{{"{before}": 1, wrong}}'.encode()
    (folder / INDEX).write_bytes(text)
    with pytest.raises(FormatError) as caught:
        safeload.open(folder)
    assert caught.value.offset == text.index(b"wrong")


def test_an_index_is_utf_8(folder):
    text = json.dumps({"weight_map": GOOD})
    (folder / INDEX).write_text(text, "utf-8-sig")
    assert set(safeload.open(folder)) == {"a", "b"}
    for content, offset in (
        (text.encode("utf-16"), 0),
        (b"\xef\xbb\xbf" + text.encode("utf-16-le")[:-1], 3 + 1),
        (b'{"\xff": 1}', 2),
        (b'\xef\xbb\xbf{"\xed\xa0\x80": 1}', 5),
        (b"\xef\xbb\xbf{,}", 4),
    ):
        (folder / INDEX).write_bytes(content)
        with pytest.raises(FormatError, match="is not JSON") as caught:
            safeload.open(folder)
        assert caught.value.offset == offset


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"n" * 100_000: "one.safetensors"}},
        {"weight_map": {"n" * 100_000: 3}},
        {"weight_map": {"a": "../" + "n" * 100_000}},
        {"weight_map": {"a": list(range(50_000))}},
        "{" + ",".join(['"' + "k" * 100_000 + '": 1'] * 2) + "}",
    ],
)
def test_a_long_text_of_an_index_is_clipped_in_messages(folder, index):
    write(folder, index)
    with pytest.raises(FormatError) as caught:
        safeload.open(folder)
    assert len(str(caught.value)) < 1000 + len(str(folder))


@pytest.mark.parametrize("control", ["\x1b[31m", "\x07", "\x7f", "\x9b31m", "\n", "\u202e"])
def test_what_a_terminal_would_obey_is_escaped_in_messages(folder, control):
    for index in (
        {"weight_map": {control: "one.safetensors"}},
        {"weight_map": {control: 3}},
        {"weight_map": {"a": "../" + control}},
        f"{{{json.dumps(control)}: 1, {json.dumps(control)}: 2}}",
    ):
        write(folder, index)
        with pytest.raises(FormatError) as caught:
            safeload.open(folder)
        assert str(caught.value).isprintable()


def test_an_index_of_no_tensors_is_an_empty_checkpoint(folder):
    write(folder, {"weight_map": {}})
    with safeload.open(folder) as checkpoint:
        assert dict(checkpoint) == {}
        assert checkpoint.files == []


def test_an_index_that_is_no_text_is_refused(folder):
    (folder / INDEX).write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(FormatError, match="is not JSON"):
        safeload.open(folder)


def test_a_fault_in_a_shard_names_the_shard(folder):
    write(folder, {"weight_map": GOOD})
    (folder / "two.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(FormatError) as caught:
        safeload.open(folder)
    assert caught.value.path == str(folder / "two.safetensors")


def test_a_missing_shard_is_a_missing_file(folder):
    write(folder, {"weight_map": {**GOOD, "c": "three.safetensors"}})
    with pytest.raises(FileNotFoundError) as caught:
        safeload.open(folder)
    assert caught.value.filename == str(folder / "three.safetensors")


def test_several_indexes_are_ambiguous(folder):
    for name in ("some.safetensors.index.json", "other.safetensors.index.json"):
        (folder / name).write_text(json.dumps({"weight_map": GOOD}))
    with pytest.raises(FormatError, match="more than one index"):
        safeload.open(folder)
    assert set(safeload.open(folder / "some.safetensors.index.json")) == {"a", "b"}


def test_a_name_in_two_files_of_a_list_is_refused_naming_both(folder):
    save_file({"a": np.zeros(1)}, folder / "three.safetensors")
    with pytest.raises(FormatError) as caught:
        safeload.open([folder / "one.safetensors", folder / "two.safetensors", folder / "three.safetensors"])
    for part in ("'a'", "one.safetensors", "three.safetensors"):
        assert part in str(caught.value)


def test_a_folder_without_weights_says_what_is_there(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UnsupportedError, match=r"found notes\.txt"):
        safeload.open(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"2 GGUF files: a\.gguf, b\.gguf; open one of them"):
        safeload.open(tmp_path)


@pytest.mark.parametrize("config", ["[]", "{", '{"a": 1, "a": 2}'])
def test_a_malformed_config_is_refused(folder, config):
    write(folder, {"weight_map": GOOD})
    (folder / "config.json").write_text(config)
    with pytest.raises(FormatError, match=r"config\.json"):
        safeload.open(folder)


def tar_archive():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("notes.txt"))
    return out.getvalue()


def zip_archive(name):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, b"")
    return out.getvalue()


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
FOREIGN = {
    "lfs": ("a Git LFS pointer", LFS_POINTER),
    "lfs with CRLF": ("a Git LFS pointer", LFS_POINTER.replace(b"\n", b"\r\n")),
    "html": ("an HTML page", b"<!DOCTYPE html>\n<html><body>Not found</body></html>"),
    "html of old": ("an HTML page", b'\n<!doctype HTML PUBLIC "-//W3C//DTD HTML 4.01//EN">'),
    "html without doctype": ("an HTML page", b"  <HTML><HEAD><TITLE>503</TITLE></HEAD></HTML>"),
    "xml": ("an XML page", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>'),
    "gzip": ("gzip-compressed", gzip.compress(bytes(1000))),
    "zstd": ("zstd-compressed", b"\x28\xb5\x2f\xfd" + bytes(40)),
    "hdf5": ("an HDF5 file", b"\x89HDF\r\n\x1a\n" + bytes(40)),
    "tar": ("a tar archive", tar_archive()),
    "zip": ("a zip archive", zip_archive("notes.txt")),
    "tar of torch": ("a torch checkpoint from before 2017", b"sys_info".ljust(257, b"\0") + b"ustar" + bytes(250)),
    **{
        f"pickle {protocol}": ("a pickle", pickle.dumps({"a": [1.5, 2.5]}, protocol=protocol))
        for protocol in range(2, 6)
    },
    "onnx": ("an ONNX model", b"\x08\x07\x12\x07pytorch" + bytes(40)),
    "empty": ("an empty file", b""),
}


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_of_another_kind_is_told_as_what_it_is(kind, name, tmp_path):
    what, content = FOREIGN[kind]
    path = tmp_path / name
    path.write_bytes(content)
    for backend in ("mmap", "pread", "direct"):
        with pytest.raises(FormatError, match=what) as caught:
            load_file(path, backend=backend)
        assert caught.value.path == str(path)
        with pytest.raises(FormatError, match=what):
            safeload.safe_open(path, backend=backend)
    if kind == "hdf5":
        pytest.importorskip("h5py")
    with pytest.raises(SafeloadError, match=what) as caught:
        safeload.open(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"hello world, this is text", "this is text: 'hello world, this is text'"),
        (b"hi", "this is text: 'hi'"),
        (b'{"error": "not found"}', 'this is JSON: \'{"error": "not found"}\''),
        (b"\xff" * 600, "no known weight format starts with ff ff ff ff"),
    ],
)
def test_bytes_of_no_known_kind_are_refused_and_shown(content, what, tmp_path):
    path = tmp_path / "model.xyz"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        load_file(path)
    assert caught.value.path == str(path)
    with pytest.raises(FormatError, match=re.escape(what)) as caught:
        safeload.open(path)
    assert caught.value.path == str(path)
