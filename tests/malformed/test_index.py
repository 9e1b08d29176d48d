import json

import numpy as np
import pytest

import safeload
from safeload import FormatError, SafeloadError, UnsupportedError
from safeload.numpy import load_file, save_file

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
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
        ('{"x": ' + "9" * 10_000 + "}", "is not JSON"),
        ("[]", "must be a JSON object, found list"),
        ("7", "must be a JSON object, found int"),
        ("{}", "weight_map must be an object, found NoneType"),
        ('{"weight_map": []}', "weight_map must be an object, found list"),
        ('{"weight_map": {}, "metadata": 3}', "metadata must be an object, found int"),
        ('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "key 'a' is there twice"),
        ('{"weight_map": {"a": "two.safetensors"}}', "tensor 'a' should be in two.safetensors, but is not there"),
        ('{"weight_map": {"a": "one.safetensors", "c": "one.safetensors"}}', "tensor 'c' should be in one.safetensors"),
        *(
            (json.dumps({"weight_map": {"a": value}}), "weight_map['a'] must")
            for value in (
                "../one.safetensors",
                "sub/one.safetensors",
                "/etc/passwd",
                "..",
                ".",
                "..\\one.safetensors",
                "C:one.safetensors",
                "one.safetensors\0",
                "",
                None,
                3,
                ["one.safetensors"],
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
    write(folder, {"weight_map": GOOD})
    (folder / "other.safetensors.index.json").write_text(json.dumps({"weight_map": GOOD}))
    with pytest.raises(FormatError, match="several indexes"):
        safeload.open(folder)
    assert set(safeload.open(folder / INDEX)) == {"a", "b"}


def test_without_an_index_a_name_in_two_files_is_refused_naming_both(folder):
    save_file({"a": np.zeros(1)}, folder / "three.safetensors")
    with pytest.raises(FormatError) as caught:
        safeload.open(folder)
    for part in ("'a'", "one.safetensors", "three.safetensors"):
        assert part in str(caught.value)


def test_a_folder_without_weights_says_what_is_there(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UnsupportedError, match=r"found notes\.txt"):
        safeload.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin: this version reads only safetensors"):
        safeload.open(tmp_path)


@pytest.mark.parametrize("config", ["[]", "{", '{"a": 1, "a": 2}'])
def test_a_malformed_config_is_refused(folder, config):
    (folder / "config.json").write_text(config)
    with pytest.raises(FormatError, match=r"config\.json"):
        safeload.open(folder)


FOREIGN = {
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
    "an HTML page": b"<!DOCTYPE html>\n<html><body>Not found</body></html>",
    "an XML page": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "gzip-compressed": b"\x1f\x8b\x08\x00" + bytes(40),
    "zstd-compressed": b"\x28\xb5\x2f\xfd" + bytes(40),
    "an HDF5 file": b"\x89HDF\r\n\x1a\n" + bytes(40),
    "a tar archive": bytes(257) + b"ustar\x0000" + bytes(248),
    "a GGUF file": b"GGUF\x03\x00\x00\x00" + bytes(40),
    "a zip archive": b"PK\x03\x04" + bytes(40),
    "a pickle": b"\x80\x02}q\x00." + bytes(40),
    "an ONNX model": b"\x08\x07\x12\x07pytorch" + bytes(40),
    "an empty file": b"",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_of_another_kind_is_told_as_what_it_is(what, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(FOREIGN[what])
    with pytest.raises(FormatError, match=what) as caught:
        load_file(path)
    assert caught.value.path == str(path)
    with pytest.raises(SafeloadError, match=what):
        safeload.open(path)


def test_bytes_of_no_known_kind_are_shown(tmp_path):
    path = tmp_path / "model.xyz"
    path.write_bytes(b"hello world, this is text")
    with pytest.raises(FormatError, match="starts with 68 65 6c 6c 6f"):
        safeload.open(path)
