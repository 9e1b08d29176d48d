"""Containers: tar archives (.nemo), llamafile, and the members that are read in place."""

import io
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from builders import torch_build
from builders.inside import registry
from builders.paths import ROOT
from builders.random import rng
from builders.remote import Served
from builders.thorough import part_of
from builders.torch_build import Storage, tensor

import safeload
from safeload.errors import FormatError, LimitError, SafeloadError, UnsupportedError
from safeload.numpy import load_file

pytestmark = pytest.mark.no_core

DCP = ROOT / "tests" / "data" / "dcp"
WEIGHTS = {
    "layers.0.w": rng.standard_normal((6, 5)).astype(np.float32),
    "layers.0.b": rng.standard_normal(5).astype(np.float16),
    "scalar": np.array(2.5, np.float32),
}


def check_tensors(arrays, want):
    assert sorted(arrays) == sorted(want)
    for name, array in want.items():
        got = arrays[name]
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


def tar_of(path, files, format=tarfile.PAX_FORMAT):
    """Write an archive of names and bytes; None for a folder."""
    with tarfile.open(path, "w", format=format) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content or b""))
    return path


def torch_bytes(weights):
    """A file of torch.save."""
    return torch_build.zip_file({name: tensor(Storage(name, a.ravel()), a.shape) for name, a in weights.items()})


def safetensors_bytes(weights):
    from safeload.numpy import save

    return save(weights)


def gguf_bytes(weights, tmp_path, name="m.gguf"):
    registry.BY_NAME["gguf"].load().write(weights, {"general.name": "m"}, tmp_path / name)
    return (tmp_path / name).read_bytes()


def folder_in(prefix, folder):
    return {f"{prefix}{p.relative_to(folder).as_posix()}": p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def check_like_a_file(path, want, tmp_path, *, zero_copy=True):
    """Every way to read, in this process and in others."""
    with safeload.open(path) as opened:
        check_tensors(opened.load(), want)
        check_tensors(opened.load(backend="pread"), want)
        check_tensors(dict(opened.stream()), want)
        name = "layers.0.w"
        assert opened.get_slice(name)[2:4, 1].tolist() == want[name][2:4, 1].tolist()
        assert (opened.take(name, [3, 0]) == want[name][[3, 0]]).all()
        check_tensors(pickle.loads(pickle.dumps(opened)).load(), want)
        assert opened.files == [str(path)]
        if zero_copy:
            assert opened[name].base is not None
            info = opened.tensors[name]
            with path.open("rb") as file:
                file.seek(info.offset)
                assert file.read(info.nbytes) == want[name].tobytes(), "its place in the container"
    with ProcessPoolExecutor(1) as executor:
        safeload.convert(path, tmp_path / "converted", max_shard_size=100, executor=executor)
    check_tensors(safeload.load(tmp_path / "converted"), want)
    report = safeload.check(path)
    assert report.ok, str(report)
    assert not [finding for finding in report.warnings if finding.code.startswith("file.")], str(report)


# ---- tar ----

MEMBERS = {
    "torch zip": lambda tmp_path: {"./model_config.yaml": b"a: 1\n", "./model_weights.ckpt": torch_bytes(WEIGHTS)},
    "safetensors": lambda tmp_path: {"README.md": b"text", "model.safetensors": safetensors_bytes(WEIGHTS)},
    "gguf": lambda tmp_path: {"model/": None, "model/m.gguf": gguf_bytes(WEIGHTS, tmp_path)},
}


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("kind", MEMBERS)
def test_a_weight_file_in_an_archive_opens_in_place(kind, format, tmp_path):
    path = tar_of(tmp_path / "model.nemo", MEMBERS[kind](tmp_path), format)
    with safeload.open(path) as opened:
        assert opened.format == kind
    check_like_a_file(path, WEIGHTS, tmp_path)


def test_the_folder_of_a_hub_model_opens_with_its_index_and_its_config(tmp_path):
    safeload.save(WEIGHTS, tmp_path / "model", max_shard_size=100)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "none", "architectures": ["A"]}')
    path = tar_of(tmp_path / "model.tar", folder_in("hub/", tmp_path / "model"))
    with safeload.open(path) as opened:
        assert opened.config["model_type"] == "none"
        assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    check_like_a_file(path, WEIGHTS, tmp_path)


@pytest.mark.parametrize("fixture", ["plain_4", "separate_2", "hf_4"])
def test_a_distributed_checkpoint_in_an_archive_opens(fixture, tmp_path):
    path = tar_of(tmp_path / "m.nemo", {"./model_config.yaml": b"", **folder_in("./model_weights/", DCP / fixture)})
    with safeload.open(DCP / fixture) as folder, safeload.open(path) as opened:
        want = folder.load()
        assert opened.format == "dcp"
        assert list(opened) == list(folder)
        assert dict(opened.metadata) == dict(folder.metadata)
        check_tensors(opened.load(), want)
        check_tensors(pickle.loads(pickle.dumps(opened)).load(), want)
        assert opened.files == [str(path)]
    safeload.convert(path, tmp_path / "out.safetensors")
    check_tensors(safeload.load(tmp_path / "out.safetensors"), want)


def test_long_names_and_large_numbers_are_those_of_tarfile(tmp_path):
    name = "/".join(["a" * 90] * 3 + ["schräg.safetensors"])
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = tar_of(tmp_path / "long.tar", {name: safetensors_bytes(WEIGHTS)}, format)
        check_tensors(safeload.load(path), WEIGHTS)
    data = bytearray(tar_of(tmp_path / "a.tar", {"m.safetensors": safetensors_bytes(WEIGHTS)}).read_bytes())
    data[124:136] = b"\x80" + int(data[124:135], 8).to_bytes(11, "big")
    path.write_bytes(with_checksum(data))
    check_tensors(safeload.load(path), WEIGHTS)


def test_several_folders_are_listed_and_root_chooses(tmp_path):
    half = {"b": WEIGHTS["layers.0.b"]}
    files = {"mp_rank_00/model_weights.ckpt": torch_bytes(WEIGHTS), "mp_rank_01/model_weights.ckpt": torch_bytes(half)}
    path = tar_of(tmp_path / "m.nemo", files)
    with pytest.raises(UnsupportedError, match=r"weights in 2 folders: mp_rank_00, mp_rank_01; choose one with root="):
        safeload.open(path)
    for root in ("mp_rank_01", "mp_rank_01/", "./mp_rank_01", "mp_rank_01/model_weights.ckpt"):
        with safeload.open(path, root=root) as opened:
            check_tensors(opened.load(), half)
            check_tensors(pickle.loads(pickle.dumps(opened)).load(), half)


def test_a_root_that_names_no_member_belongs_to_the_format_inside(tmp_path):
    nested = {"state": {n: tensor(Storage(n, a.ravel()), a.shape) for n, a in WEIGHTS.items()}, "step": 3}
    path = tar_of(tmp_path / "m.nemo", {"model_weights.ckpt": torch_build.zip_file(nested)})
    check_tensors(safeload.load(path, root="state"), WEIGHTS)
    with safeload.open(path) as opened:
        assert opened.metadata["step"] == 3
    with pytest.raises(SafeloadError, match=r"no container 'nowhere'"):
        safeload.open(path, root="nowhere")


def test_the_required_format_is_that_of_the_members(tmp_path):
    path = tar_of(tmp_path / "m.nemo", {"w.ckpt": torch_bytes(WEIGHTS)})
    check_tensors(safeload.load(path, format="torch"), WEIGHTS)
    inner = tar_of(tmp_path / "m.tar", {"m.safetensors": safetensors_bytes(WEIGHTS)})
    check_tensors(safeload.load(inner, format="safetensors"), WEIGHTS)
    with pytest.raises(FormatError, match=r"not gguf"):
        safeload.open(path, format="gguf")


def test_a_folder_with_one_archive_opens_it(tmp_path):
    tar_of(tmp_path / "m.nemo", {"w.ckpt": torch_bytes(WEIGHTS)})
    (tmp_path / "README.md").write_text("text")
    check_tensors(safeload.load(tmp_path), WEIGHTS)
    tar_of(tmp_path / "n.nemo", {"w.ckpt": torch_bytes(WEIGHTS)})
    with pytest.raises(UnsupportedError, match=r"no weights here; found README\.md, m\.nemo, n\.nemo"):
        safeload.open(tmp_path)


def test_an_archive_is_read_from_a_store_a_file_object_and_a_list(tmp_path):
    path = tar_of(tmp_path / "m.nemo", {"w.ckpt": torch_bytes(WEIGHTS)})
    check_tensors(safeload.load(io.BytesIO(path.read_bytes())), WEIGHTS)
    other = tar_of(tmp_path / "n.nemo", {"w.ckpt": torch_bytes({"more": WEIGHTS["scalar"]})})
    check_tensors(safeload.load([path, other]), {**WEIGHTS, "more": WEIGHTS["scalar"]})
    with safeload.open(Served({"mem://m.nemo": path.read_bytes()}).at("mem://m.nemo")) as opened:
        check_tensors(opened.load(), WEIGHTS)
        assert opened.get_slice("layers.0.w")[5, 4] == WEIGHTS["layers.0.w"][5, 4]


def test_a_slice_in_an_archive_reads_only_its_bytes(tmp_path):
    large = {"w": np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)}
    path = tar_of(tmp_path / "m.tar", {"x.bin2": bytes(1 << 20), "w.ckpt": torch_bytes(large)})
    served = Served({"mem://m.tar": path.read_bytes()})
    with safeload.open(served.at("mem://m.tar")) as opened:
        assert sum(end - begin for _, begin, end in served.requests) < 1 << 20
        served.requests.clear()
        assert opened.get_slice("w")[1000, :4].tolist() == large["w"][1000, :4].tolist()
        assert sum(end - begin for _, begin, end in served.requests) <= 4096


def test_a_changed_archive_is_not_opened_again(tmp_path):
    path = tar_of(tmp_path / "m.nemo", {"w.ckpt": torch_bytes(WEIGHTS)})
    with safeload.open(path) as opened:
        pickled = pickle.dumps(opened)
    tar_of(path, {"w.ckpt": torch_bytes({"other": WEIGHTS["scalar"]})})
    with pytest.raises(FormatError, match=r"has changed since it was opened"):
        pickle.loads(pickled)


def test_nothing_is_executed(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'done'}",)

    path = tar_of(tmp_path / "m.nemo", {"w.ckpt": pickle.dumps(Attack(), 2)})
    with pytest.raises(SafeloadError):
        safeload.open(path)
    assert not (tmp_path / "done").exists()


# ---- malformed tar ----


def with_checksum(data, at=0):
    """Data with the right checksum in the header at a byte."""
    data = bytearray(data)
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return data


def set_field(begin, content):
    def change(data):
        data[begin : begin + len(content)] = content
        return with_checksum(data)

    return change


def pax(records):
    """Put a pax header with records before the first member."""

    def change(data):
        content = records if isinstance(records, bytes) else b"".join(map(record, records.items()))
        header = bytearray(data[:512])
        header[124:136], header[156:157] = b"%011o\0" % len(content), b"x"
        return bytes(with_checksum(header)) + content + bytes(-len(content) % 512) + bytes(data)

    return change


def record(item):
    key, value = item
    text = b" %s=%s\n" % (key, value)
    size = len(text) + 1
    size = len(text) + len(str(size + len(text) // 10))
    while len(b"%d" % size) + len(text) != size:
        size += 1
    return b"%d%s" % (size, text)


FAULTS = {
    "a parent": (set_field(0, b"../m.safetensors\0"), FormatError, "leads out of the archive"),
    "a parent inside": (set_field(0, b"a/../../m.safetensors\0"), FormatError, "leads out"),
    "an absolute name": (set_field(0, b"/etc/m.safetensors\0"), FormatError, "is absolute"),
    "a drive": (set_field(0, b"c:m.safetensors\0"), FormatError, "is absolute"),
    "a backslash": (set_field(0, b"a\\m.safetensors\0"), FormatError, "backslash"),
    "an empty name": (set_field(0, bytes(100)), FormatError, "is not normalized"),
    "a dot": (set_field(0, b"a/./m.safetensors\0"), FormatError, "is not normalized"),
    "a name that ends with a slash": (set_field(0, b"a/m.safetensors/\0"), FormatError, "is not normalized"),
    "a prefix that leads out": (set_field(345, b"..\0"), FormatError, "leads out"),
    "a deep name": (pax({b"path": b"a/" * 40 + b"m"}), FormatError, "folders deep"),
    "a long name": (pax({b"path": b"a" * 5000}), FormatError, "longer than"),
    "a NUL in a name": (pax({b"path": b"a\0b"}), FormatError, "NUL"),
    "a hard link": (set_field(156, b"1"), UnsupportedError, "is a hard link"),
    "a symbolic link": (set_field(156, b"2"), UnsupportedError, "is a symbolic link"),
    "a character device": (set_field(156, b"3"), UnsupportedError, "is a device"),
    "a block device": (set_field(156, b"4"), UnsupportedError, "is a device"),
    "a pipe": (set_field(156, b"6"), UnsupportedError, "is a pipe"),
    "a sparse file": (set_field(156, b"S"), UnsupportedError, "is a sparse file"),
    "a volume": (set_field(156, b"M"), UnsupportedError, "another volume"),
    "a label": (set_field(156, b"V"), UnsupportedError, "label of a volume"),
    "an incremental folder": (set_field(156, b"D"), UnsupportedError, "incremental"),
    "an unknown kind": (set_field(156, b"Z"), UnsupportedError, "unknown kind 'Z'"),
    "a negative size": (set_field(124, b"\xff" * 12), FormatError, "got a negative number"),
    "a size that is no number": (set_field(124, b"0000000009a\0"), FormatError, "octal number"),
    "a signed size": (set_field(124, b"-0000000001\0"), FormatError, "octal number"),
    "a size beyond the end": (set_field(124, b"77777777777\0"), FormatError, "reaches beyond the end"),
    "a huge size": (set_field(124, b"\x80" + b"\xff" * 11), FormatError, "reaches beyond the end"),
    "a wrong checksum": (lambda data: data[:148] + b"0000001\0" + data[156:], FormatError, "checksum"),
    "no checksum": (lambda data: data[:148] + b"\xffabc\0\0\0\0" + data[156:], FormatError, "checksum"),
    "a negative size of pax": (pax({b"size": b"-1"}), FormatError, "must be a number"),
    "a huge size of pax": (pax({b"size": b"9" * 18}), FormatError, "reaches beyond the end"),
    "a fraction of pax": (pax({b"size": b"1.5"}), FormatError, "must be a number"),
    "sparse pax 0.0": (pax({b"GNU.sparse.size": b"1"}), UnsupportedError, "sparse"),
    "sparse pax 0.1": (pax({b"GNU.sparse.map": b"0,1"}), UnsupportedError, "sparse"),
    "sparse pax 1.0": (pax({b"GNU.sparse.major": b"1"}), UnsupportedError, "sparse"),
    "another encoding": (pax({b"hdrcharset": b"BINARY"}), UnsupportedError, "encoded as"),
    "a record without a length": (pax(b"path=a\n"), FormatError, "description of a tar member is malformed"),
    "a record that is too long": (pax(b"99 path=a\n"), FormatError, "malformed"),
    "a record that is too short": (pax(b"3 path=a\n"), FormatError, "malformed"),
    "a record without an end": (pax(b"9 path=ab"), FormatError, "malformed"),
    "a record without a key": (pax(b"9 abcdef\n"), FormatError, "malformed"),
    "a member of another file": (
        lambda data: data[:1536] + bytes(with_checksum(data[:512])) + data[1536:], FormatError, "two tar members"),
    "bytes after the end": (lambda data: data + b"x" * 512, FormatError, "other than zeros follow"),
    "another archive": (lambda data: data + data, FormatError, "other than zeros follow"),
    "much after the end": (lambda data: data + bytes(2 << 20), FormatError, "follow the end"),
    "no end": (lambda data: data[:1536], FormatError, "cut off"),
    "half an end": (lambda data: data[:2048], FormatError, "cut off"),
    "a header of noise": (lambda data: data[:1536] + b"\1" * 512 + data[2048:], FormatError, "no magic number"),
}  # fmt: skip


def plain_tar(tmp_path):
    """An archive with a member of one block, so that the second header would be at 1536."""
    weights = {"w": np.arange(160, dtype=np.float32)}
    path = tar_of(tmp_path / "m.tar", {"m.safetensors": safetensors_bytes(weights)}, tarfile.USTAR_FORMAT)
    data = path.read_bytes()
    assert 512 < int(data[124:135], 8) <= 1024
    return path, bytearray(data)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_archive_is_refused_by_name(fault, tmp_path):
    change, error, says = FAULTS[fault]
    path, data = plain_tar(tmp_path)
    path.write_bytes(change(data))
    with pytest.raises(error, match=says) as caught:
        safeload.open(path)
    assert caught.value.path == str(path)


def test_a_file_and_a_folder_of_one_name_are_refused(tmp_path):
    path = tar_of(tmp_path / "m.tar", {"a": b"x", "a/m.safetensors": safetensors_bytes(WEIGHTS)})
    with pytest.raises(FormatError, match=r"'a' is a file, but 'a/m.safetensors' lies in it"):
        safeload.open(path)


def test_a_global_header_may_comment_but_not_set_sizes(tmp_path):
    for headers, accepted in (({"comment": "x"}, True), ({"path": "a"}, False), ({"size": "1"}, False)):
        path = tmp_path / "m.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers=headers) as archive:
            content = safetensors_bytes(WEIGHTS)
            info = tarfile.TarInfo("m.safetensors")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        if accepted:
            check_tensors(safeload.load(path), WEIGHTS)
        else:
            with pytest.raises(FormatError, match=r"a global tar header sets"):
                safeload.open(path)


def test_too_many_members_are_refused(tmp_path):
    header = bytearray(tarfile.TarInfo("000000").tobuf())
    path, content, total = tmp_path / "m.tar", bytearray(), int(header[148:154], 8) - 6 * ord("0")
    for k in range(100_001):
        header[:6] = name = b"%06d" % k
        header[148:154] = b"%06o" % (total + sum(name))
        content += header
    path.write_bytes(content)
    with pytest.raises(LimitError, match=r"more than 100,?000 members"):
        safeload.open(path)


def test_a_folder_with_a_size_is_refused(tmp_path):
    data = plain_tar(tmp_path)[1]
    header = bytearray(data[:512])
    header[:100], header[124:136], header[156:157] = b"d".ljust(100, b"\0"), b"%011o\0" % 512, b"5"
    path = tmp_path / "folder.tar"
    path.write_bytes(bytes(with_checksum(header)) + data)  # a member of this folder, or one that is skipped?
    with pytest.raises(FormatError, match="is a folder of 512 bytes"):
        safeload.open(path)


def test_a_long_description_is_refused(tmp_path):
    data = bytearray(plain_tar(tmp_path)[1])
    header = bytearray(data[:512])
    header[124:136], header[156:157] = b"%011o\0" % (2 << 20), b"L"
    path = tmp_path / "long.tar"
    path.write_bytes(bytes(with_checksum(header)) + b"a" * (2 << 20) + data)
    with pytest.raises(LimitError, match=r"description of a tar member has"):
        safeload.open(path)


def test_an_archive_cut_anywhere_is_an_error(tmp_path):
    path, data = plain_tar(tmp_path)
    for size in [*range(0, 512, 37), *range(512, 2560, 101)]:
        path.write_bytes(data[:size])
        with pytest.raises(SafeloadError):
            safeload.load(path)


def test_a_byte_changed_anywhere_never_crashes_nor_leaves_the_archive(tmp_path):
    path, data = plain_tar(tmp_path)
    for at in part_of(list(range(512)), 0, 4):
        for value in (0, 0x31, 0x80, 0xFF):
            changed = bytearray(data)
            changed[at] = value
            for final in (changed, with_checksum(changed)):
                path.write_bytes(final)
                try:
                    with safeload.open(path) as opened:
                        assert list(opened) == ["w"]
                except SafeloadError:
                    pass


def test_archives_in_archives_and_archives_without_weights_are_refused(tmp_path):
    inner = tar_of(tmp_path / "inner.tar", {"m.safetensors": safetensors_bytes(WEIGHTS)}).read_bytes()
    path = tar_of(tmp_path / "outer.tar", {"inner.bin": inner})
    with pytest.raises(UnsupportedError, match=r"outer.tar/inner.bin: this is a tar archive in another archive"):
        safeload.open(path)
    path = tar_of(tmp_path / "none.tar", {"README": b"text"})
    with pytest.raises(UnsupportedError, match=r"this is a tar archive without weights: it holds README"):
        safeload.open(path)
    path = tar_of(tmp_path / "empty.tar", {})
    with pytest.raises(SafeloadError):
        safeload.open(path)


def test_a_compressed_archive_says_what_to_do(tmp_path):
    path = tmp_path / "m.nemo"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(ROOT / "README.md", "README.md")
    with pytest.raises(UnsupportedError, match=r"gzip-compressed: decompress it first"):
        safeload.open(path)


def test_members_that_must_be_unpacked_are_refused_unless_there_is_one(tmp_path):
    packed = io.BytesIO()
    np.savez_compressed(packed, **WEIGHTS)
    path = tar_of(tmp_path / "m.tar", {"w.npz": packed.getvalue()})
    check_tensors(safeload.load(path), WEIGHTS)


# ---- llamafile ----


def zipalign(data, name, content, *, align, method=0):
    """Append an entry to a program with an archive, as zipalign of llamafile does."""
    end = data.rindex(b"PK\x05\x06")
    count, size, offset = struct.unpack_from("<HII", data, end + 10)
    if offset == 0xFFFFFFFF:
        end = data.rindex(b"PK\x06\x06")
        count, size, offset = struct.unpack_from("<QQQ", data, end + 32)
    directory = data[offset : offset + size]
    encoded = name.encode()
    at = offset  # the directory is overwritten
    at += -(at + 30 + len(encoded) + 20) % align
    packed = content if method == 0 else zlib.compress(content, wbits=-15)
    fields = 0x800, method, 0x6000, 0x576E, zlib.crc32(content), 0xFFFFFFFF, 0xFFFFFFFF
    local = struct.pack("<4sH3HHIII2H", b"PK\x03\x04", 20, *fields, len(encoded), 20) + encoded
    local += struct.pack("<HHQQ", 1, 16, len(content), len(packed))
    central = struct.pack("<4sHH3HHIII3H", b"PK\x01\x02", 0x314, 20, *fields, len(encoded), 28, 0)
    central += struct.pack("<HHII", 0, 0, 0o100644 << 16, 0xFFFFFFFF) + encoded
    central += struct.pack("<HHQQQ", 1, 24, len(content), len(packed), at)
    data = data[:offset].ljust(at, b"\0") + local + packed
    begin, directory = len(data), directory + central
    data += directory + struct.pack("<4sQHHII4Q", b"PK\x06\x06", 44, 0x314, 20, 0, 0, count + 1, count + 1,
                                    len(directory), begin)  # fmt: skip
    data += struct.pack("<4sIQI", b"PK\x06\x07", 0, begin + len(directory), 1)
    return data + struct.pack("<4s4HIIH", b"PK\x05\x06", 0, 0, count + 1, count + 1, len(directory), 0xFFFFFFFF, 0)


def llamafile(path, entries, **options):
    """A file of `llamafile_bytes`."""
    path.write_bytes(llamafile_bytes(entries, **options))
    return path


def llamafile_bytes(entries, *, align=4096, program=b"MZqFpD='\n" + bytes(3000)):
    """A program with a zip archive at its end, whose GGUF files zipalign has added."""
    out = io.BytesIO(program)
    out.seek(0, os.SEEK_END)
    with zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("usr/share/zoneinfo/UTC", b"x" * 500)
        for name, content in entries.items():
            if not name.endswith(".gguf"):
                archive.writestr(name, content)
    data = out.getvalue()
    for name, content in entries.items():
        if name.endswith(".gguf"):
            data = zipalign(data, name, content, align=align)
    return data


@pytest.mark.parametrize("program", [b"MZqFpD='\n", b"\x7fELF", b"\xcf\xfa\xed\xfe"])
def test_the_gguf_of_a_program_opens_in_place(program, tmp_path):
    entries = {".args": b"-m\nm.gguf\n", "m.gguf": gguf_bytes(WEIGHTS, tmp_path)}
    path = llamafile(tmp_path / "m.llamafile", entries, program=program + bytes(2000))
    with safeload.open(path) as opened:
        assert opened.format == "gguf"
        assert opened.tensors["layers.0.w"].offset % 32 == 0
    with safeload.open(tmp_path / "m.gguf") as plain, safeload.open(path) as opened:
        assert dict(opened.metadata) == dict(plain.metadata)
    check_like_a_file(path, WEIGHTS, tmp_path)


def test_of_several_models_root_chooses(tmp_path):
    other = {"layers.0.w": WEIGHTS["layers.0.w"] + 1}
    entries = {"a.gguf": gguf_bytes(WEIGHTS, tmp_path), "mmproj.gguf": gguf_bytes(other, tmp_path, "o.gguf")}
    path = llamafile(tmp_path / "m.llamafile", entries)
    with pytest.raises(UnsupportedError, match=r"2 GGUF files: a.gguf, mmproj.gguf; choose one with root="):
        safeload.open(path)
    check_tensors(safeload.load(path, root="mmproj.gguf"), other)
    check_tensors(safeload.load(path, root="a.gguf"), WEIGHTS)


def test_the_parts_of_a_split_model_belong_together(tmp_path):
    from builders import gguf_build

    parts = {f"m-0000{k + 1}-of-00002.gguf": gguf_build.part(k, 2, 2, [name]) for k, name in enumerate("ab")}
    for name, content in parts.items():
        (tmp_path / name).write_bytes(content)
    want = safeload.load(tmp_path / "m-00001-of-00002.gguf")
    path = llamafile(tmp_path / "m.llamafile", parts)
    check_tensors(safeload.load(path), want)
    check_tensors(safeload.load(path, root="m-00002-of-00002.gguf"), want)
    with safeload.open(path) as opened:
        assert not [key for key in opened.metadata if key.startswith("split.")]
    del parts["m-00002-of-00002.gguf"]
    with pytest.raises(FormatError, match=r"1 of 2 parts are missing"):
        safeload.open(llamafile(path, parts))


def test_a_program_without_a_model_is_no_weight_file(tmp_path):
    path = tmp_path / "program"
    for content, says in ((b"\x7fELF" + b"x" * 5000, "a program"), (b"MZ" + b"\1" * 600, "no known weight format")):
        path.write_bytes(content)
        with pytest.raises(SafeloadError, match=says):
            safeload.open(path)
    llamafile(path, {"readme.txt": b"x" * 100})
    for way in (safeload.open, load_file):
        with pytest.raises(SafeloadError, match=r"this is a program.*safeload reads the model in a llamafile"):
            way(path)


def test_a_malformed_program_is_refused_and_never_crashes(tmp_path):
    path = llamafile(tmp_path / "m.llamafile", {"m.gguf": gguf_bytes(WEIGHTS, tmp_path)}, align=64)
    data = path.read_bytes()
    first, directory = data.index(b"PK\x03\x04"), data.index(b"PK\x01\x02")
    places = [*range(first, first + 36), *range(directory, len(data))]
    for at in part_of(places, 0, 2):
        for value in (0, 1, 0x80, 0xFF):
            changed = bytearray(data)
            changed[at] = value
            path.write_bytes(changed)
            try:
                with safeload.open(path) as opened:
                    arrays = opened.load()
            except SafeloadError:
                pass
            else:
                check_tensors(arrays, WEIGHTS)


@pytest.mark.parametrize("name", ["../m.gguf", "/m.gguf", "a//m.gguf", "a\\m.gguf"])
def test_names_that_lead_out_of_a_program_are_refused(name, tmp_path):
    content = gguf_bytes(WEIGHTS, tmp_path)
    with pytest.raises(FormatError, match=r"the name of the zip entry"):
        safeload.open(llamafile(tmp_path / "m.llamafile", {name: content}))


def test_a_compressed_model_is_refused(tmp_path):
    content = gguf_bytes(WEIGHTS, tmp_path)
    path = llamafile(tmp_path / "m.llamafile", {"m.GGUF": content})
    with pytest.raises(UnsupportedError, match=r"is compressed: extract it"):
        safeload.open(path)
