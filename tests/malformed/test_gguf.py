"""Malformed GGUF files by single fault injection: each case is a good file with one thing wrong, and its byte."""

import struct
import time
from typing import NamedTuple

import numpy as np
import pytest
from builders import gguf_build as g
from builders.holes import extend
from builders.remote import Served
from builders.thorough import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import safeload
from safeload import FormatError, LimitError, SafeloadError, UnsupportedError

# The good file: every kind of value, two tensors of elements and one of blocks (Q8_0), data of 192 bytes.
ENTRIES = {
    "general.architecture": g.entry("general.architecture", g.STRING, "llama"),
    "n": g.entry("n", g.U32, 7),
    "flag": g.entry("flag", g.BOOL, 1),
    "tokens": g.entry("tokens", g.ARRAY, (g.STRING, ["a", "bc", ""])),
    "scores": g.entry("scores", g.ARRAY, (g.F32, [0.5, -1.0])),
    "flags": g.entry("flags", g.ARRAY, (g.BOOL, [0, 1])),
    "nested": g.entry("nested", g.ARRAY, (g.ARRAY, [(g.U8, [1, 2, 3]), (g.STRING, ["x"])])),
}
TENSORS = {
    "w": g.tensor("w", (4, 2), 0, 0),
    "q": g.tensor("q", (32, 2), 8, 32),
    "b": g.tensor("b", (3,), 1, 128),
}
DATA = bytes(range(192))
HEAD = 24


class Case(NamedTuple):
    content: bytes
    error: type[Exception]
    message: str
    offset: int


CASES: dict[str, Case] = {}


def make(entries=None, tensors=None, data=DATA, **options):
    entries = ENTRIES if entries is None else entries
    tensors = TENSORS if tensors is None else tensors
    return g.build(list(entries.values()), list(tensors.values()), data, **options)


GOOD = make()


def fault(name, message, offset, content, error=FormatError):
    assert name not in CASES
    CASES[name] = Case(content, error, message, offset)


def entry_fault(name, message, at, content, error=FormatError, key="n"):
    """The good file with one entry replaced; ``at`` counts from that entry's first byte."""
    before = HEAD + sum(len(raw) for raw in list(ENTRIES.values())[: list(ENTRIES).index(key)])
    fault(name, message, before + at, make({**ENTRIES, key: content}), error)


def tensor_fault(name, message, at, content, error=FormatError, key="q", data=DATA):
    """Likewise with a tensor."""
    before = HEAD + sum(map(len, ENTRIES.values()))
    before += sum(len(raw) for raw in list(TENSORS.values())[: list(TENSORS).index(key)])
    fault(name, message, before + at, make(tensors={**TENSORS, key: content}, data=data), error)


# ---- the head ----

fault("version 0", "version 0 is not supported, only 2 and 3", 4, make(version=0))
fault("version 1", "version 1 (of August 2023) is not supported", 4, make(version=1), UnsupportedError)
fault("version 4", "version 4 is not supported, only 2 and 3", 4, make(version=4), UnsupportedError)
fault("version 2^32-1", "version 4294967295 is not supported", 4, make(version=2**32 - 1), UnsupportedError)
for big in (1, 2, 3):
    swapped = int.from_bytes(big.to_bytes(4, "big"), "little")
    fault(f"big-endian version {big}", "big-endian GGUF files are not", 4, make(version=swapped), UnsupportedError)
left = len(GOOD) - HEAD
for count in (2**40, 2**63, 2**64 - 1):
    fault(
        f"{count} tensors",
        f"{count} tensors with descriptions of at least 24 bytes, but the file has {left} bytes left",
        8,
        make(tensor_count=count),
    )
    fault(
        f"{count} entries",
        f"{count} metadata entries of at least 13 bytes, but the file has {left} bytes left",
        16,
        make(entry_count=count),
    )

# ---- metadata ----

for size in (2**40, 2**63, 2**64 - 1):
    raw = struct.pack("<Q", size) + b"n" + ENTRIES["n"][9:]
    entry_fault(f"key of {size} bytes", f"metadata number 1: the key has {size} bytes, but the file has", 0, raw)
    head = g.text("n") + struct.pack("<I", g.STRING)
    entry_fault(
        f"text of {size} bytes",
        f"metadata 'n': the text has {size} bytes, but the file has",
        len(head),
        head + struct.pack("<Q", size) + b"abc",
    )
    for item, what in ((g.U8, "values"), (g.F64, "values"), (g.STRING, "strings"), (g.ARRAY, "arrays")):
        head = g.text("n") + struct.pack("<II", g.ARRAY, item)
        entry_fault(
            f"array of {size} of type {item}",
            f"metadata 'n': {size} {what} of at least { ({g.U8: 1, g.ARRAY: 12}.get(item, 8)) } bytes, but",
            len(head),
            head + struct.pack("<Q", size),
        )
    head = g.text("n") + struct.pack("<IIQ", g.ARRAY, g.STRING, 2) + g.text("ok")
    entry_fault(
        f"string of {size} bytes in an array",
        f"metadata 'n': a string of the array has {size} bytes, but the file has",
        len(head),
        head + struct.pack("<Q", size),
    )
    head = g.text("n") + struct.pack("<IIQI", g.ARRAY, g.ARRAY, 1, g.U16)
    entry_fault(
        f"inner array of {size}",
        f"metadata 'n': {size} values of at least 2 bytes, but the file has",
        len(head),
        head + struct.pack("<Q", size),
    )
for kind in (13, 14, 255, 2**31, 2**32 - 1):
    raw = g.text("n") + struct.pack("<I", kind) + bytes(8)
    entry_fault(f"value type {kind}", f"metadata 'n': unknown value type {kind}, GGUF's", 9, raw)
    raw = g.text("n") + struct.pack("<IIQ", g.ARRAY, kind, 0)
    entry_fault(f"array of type {kind}", f"metadata 'n': unknown value type {kind}, GGUF's", 13, raw)
raw = g.entry("n", g.ARRAY, (g.ARRAY, [(g.U8, [1]), (g.ARRAY, [(g.U8, [2])])]))
entry_fault("arrays of arrays of arrays", "metadata 'n': arrays of arrays of arrays", 38, raw, UnsupportedError)
raw = g.entry("n", g.ARRAY, (g.ARRAY, [(g.ARRAY, [])] * 1))
entry_fault("an empty array of arrays in an array", "arrays of arrays of arrays", 25, raw, UnsupportedError)
entry_fault("bool of 2", "metadata 'flag': a bool must be 0 or 1, found 2", 16, g.entry("flag", g.BOOL, 2), key="flag")
raw = g.entry("flags", g.ARRAY, (g.BOOL, [0, 1, 255]))
entry_fault("bool of 255 in an array", "metadata 'flags': a bool must be 0 or 1, found 255", 31, raw, key="flags")
for bad, at in ((b"\xff", 0), (b"ab\xc3", 2), (b"\xed\xa0\x80", 0), (b"a\xc0\x80", 1)):
    raw = g.entry(bad, g.U32, 1)
    entry_fault(f"key {bad!r}", "metadata number 1: the key holds invalid UTF-8 (byte 0x", 8 + at, raw)
raw = g.entry("general.architecture", g.U32, 1)
entry_fault("key twice", f"duplicate key, first at byte {HEAD}", 0, raw)

for alignment in (0, 3, 33, 2**31 + 1, 2**32 - 1):
    raw = g.entry("general.alignment", g.U32, alignment)
    message = f"metadata 'general.alignment': {alignment} is not a power of two"
    entry_fault(f"alignment {alignment}", message, 29, raw)
raw = g.entry("general.alignment", g.U32, 2**31)
entry_fault("alignment 2^31", "2147483648 exceeds the largest page size", 29, raw, LimitError)
for kind, content in ((g.U64, 32), (g.I32, 32), (g.STRING, "32"), (g.ARRAY, (g.U32, [32])), (g.BOOL, 1)):
    raw = g.entry("general.alignment", kind, content)
    entry_fault(f"alignment of type {kind}", f"its type is {kind}, but it must be 4 (u32)", 25, raw)

# ---- tensors ----

for size in (2**40, 2**63, 2**64 - 1):
    raw = struct.pack("<Q", size) + TENSORS["q"][8:]
    tensor_fault(f"name of {size} bytes", f"tensor number 1: the name has {size} bytes, but the file has", 0, raw)
for bad, at in ((b"\xff", 0), (b"q\xe2\x82", 1)):
    raw = g.tensor(bad, (32, 2), 8, 32)
    tensor_fault(f"name {bad!r}", "tensor number 1: the name holds invalid UTF-8", 8 + at, raw)
raw = g.tensor("w", (32, 2), 8, 32)
tensor_fault("name twice", "tensor 'w': duplicate name", 0, raw)
for rank in (65, 2**31, 2**32 - 1):
    raw = g.text("q") + struct.pack("<I", rank) + bytes(100)
    tensor_fault(f"{rank} dims", f"tensor 'q': {rank} dims, but arrays have at most 64", 9, raw)
for dims in ((2**32, 2**32), (2**63, 2), (2**16,) * 4, (2**64 - 1, 2**64 - 1)):
    raw = g.tensor("q", dims, 0, 32)
    tensor_fault(f"dims {dims}", "tensor 'q': the size of F32 [", 0, raw)
raw = g.tensor("q", (2**61, 2), 0, 32)
tensor_fault("dims whose bytes overflow", "tensor 'q': the size of F32 [2, 2305843009213693952] does not", 0, raw)
raw = g.tensor("q", (2**40, 2**40, 0), 0, 32)
tensor_fault("dims beside zero", "no array can have the shape of F32", 0, raw, LimitError)
raw = g.tensor("q", (2**60,), 24, 2**64 - 32)
message = f"the offset {2**64 - 32} and {2**60} bytes do not fit in 64 bits"
tensor_fault("offset and size overflow", message, 25, raw)
# I2_S of BitNet's fork: 64 bytes of codes for 256 elements, then 32 of the scale.
FORK = g.entry("general.file_type", g.U32, 40)


def fork_fault(name, message, at, dims, data, *more, error=FormatError):
    """``at`` is an offset into the description of a tensor, or past the header into the data."""
    content = g.build([FORK], [g.tensor("t", dims, 36, 0), *more], data)
    data_begin = -(-len(g.build([FORK], [g.tensor("t", dims, 36, 0), *more])) // 32) * 32
    fault(f"I2_S {name}", message, data_begin if at is None else HEAD + len(FORK) + at, content, error)


for dims in ((64, 4), (), (1, 128)):
    message = f"rows of {dims[0] if dims else 1} elements are not whole blocks of 128 (I2_S)"
    fork_fault(f"of {dims}", message, 17 + 8 * len(dims), dims, bytes(96))
fork_fault("of many", "the number of elements does not fit in 64 bits", 33, (2**60, 2**60), bytes(96))
fork_fault("in a short file", "end past the data, which has 95 bytes", 0, (128, 2), bytes(95))
message = "type 36 with general.file_type 40 has 96 bytes as I2_S, but 160 bytes are there"
fork_fault("with a hole", message, None, (128, 2), bytes(164), g.tensor("b", (1,), 0, 160), error=UnsupportedError)
fork_fault("with more behind it", message, None, (128, 2), bytes(160), error=UnsupportedError)

for kind, dims in ((8, (33, 2)), (8, (16, 4)), (8, ()), (14, (128, 2)), (2, (1,)), (40, (32,)), (41, (64,))):
    raw = g.tensor("q", dims, kind, 32)
    tensor_fault(f"type {kind} {dims}", "tensor 'q': the rows of ", 0, raw)
for offset in (1, 16, 33, 2**64 - 1):
    raw = g.tensor("q", (32, 2), 8, offset)
    tensor_fault(f"offset {offset}", f"the offset {offset} is not a multiple of the alignment 32", 33, raw)
raw = g.tensor("b", (3,), 1, 96)
tensor_fault(
    "overlap", "tensor 'b': bytes of the data [96, 102) begin at 96, but the tensors before end at 100", 0, raw, key="b"
)
raw = g.tensor("q", (32, 2), 8, 0)
tensor_fault("overlap from the start", "an overlap of 32 bytes", 0, raw)
for offset in (192, 2**40, 2**64 - 128):
    raw = g.tensor("b", (3,), 1, offset)
    message = f"tensor 'b': bytes of the data [{offset}, {offset + 6}) end past the data, which has 192 bytes"
    tensor_fault(f"offset {offset} past the end", message, 0, raw, key="b")
tensor_fault(
    "one byte short", "tensor 'b': bytes of the data [128, 134) end past", 0, TENSORS["b"], key="b", data=DATA[:133]
)


def ways(path):
    yield lambda: safeload.open(path)
    yield lambda: safeload.open(path, format="gguf")
    yield lambda: safeload.load(path, backend="pread")
    yield lambda: safeload.open(path.parent)
    yield lambda: safeload.open(Served({str(path): path.read_bytes()}, head=8).at(str(path)))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def test_the_file_that_the_faults_are_made_of_is_good(path):
    for version in (2, 3):
        path.write_bytes(make(version=version))
        with safeload.open(path) as opened:
            assert (opened.format, opened.metadata.version) == ("gguf", version)
            assert [(i.name, i.dtype, i.shape) for i in opened.tensors.values()] == [
                ("w", "F32", (2, 4)),
                ("q", "Q8_0", (2, 32)),
                ("b", "F16", (3,)),
            ]
            assert opened.load().keys() == {"w", "q", "b"}
            assert opened.metadata["tokens"] == ["a", "bc", ""]


@pytest.mark.parametrize("name", CASES)
def test_each_fault_is_refused_with_its_class_message_and_byte(name, path):
    case = CASES[name]
    path.write_bytes(case.content)
    for way in ways(path):
        started = time.perf_counter()
        with pytest.raises(SafeloadError) as caught:
            way()
        assert time.perf_counter() - started < 1
        assert type(caught.value) is case.error
        assert case.message in str(caught.value)
        assert str(caught.value).endswith(f"({path}, byte {case.offset})")
        if case.error is FormatError:
            assert (caught.value.path, caught.value.offset) == (str(path), case.offset)


def test_truncation_at_every_byte_is_refused(path):
    lengths = range(1, len(GOOD) - len(DATA) + 134)
    refusals = {}
    for length in lengths:
        path.write_bytes(GOOD[:length])
        try:
            safeload.open(path)
        except FormatError as error:
            refusals[length] = error
    assert [length for length in lengths if length not in refusals] == []
    assert {error.path for error in refusals.values()} == {str(path)}
    assert [length for length, error in refusals.items() if not 0 <= error.offset <= length] == []


def test_padding_at_the_end_may_be_missing(path):
    path.write_bytes(GOOD[: len(GOOD) - len(DATA) + 134])
    assert safeload.load(path)["b"].shape == (3,)


def test_another_magic_is_no_gguf(path):
    path.write_bytes(make(magic=b"GGML"))
    with pytest.raises(FormatError, match="no known weight format starts with 47 47 4d 4c"):
        safeload.open(path)
    path.write_bytes(make(magic=b"GGUX"))
    with pytest.raises(FormatError):
        safeload.open(path, format="gguf")


def test_a_name_of_any_bytes_is_shown_harmlessly(path):
    path.write_bytes(make(tensors={"x": g.tensor("\x1b[2Jx" + "y" * 500, (1,) * 65, 0, 0)}))
    with pytest.raises(FormatError, match="65 dims") as caught:
        safeload.open(path)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_header_beyond_the_limit_is_refused_before_it_is_read(path):
    """The file claims a key of 2 GiB and has them, as a hole."""
    with path.open("wb") as file:
        file.write(make(tensors={}, data=b"", entry_count=8) + struct.pack("<Q", 2 << 30))
        at = file.tell()
        extend(file, 3 << 30)
    started = time.perf_counter()
    with pytest.raises(LimitError, match=f"extends past byte 134217728.*byte {at}"):
        safeload.open(path)
    assert time.perf_counter() - started < 1


def test_many_small_values_do_not_pass_the_limit_by(path):
    """What is read ahead may reach beyond the limit; what follows there is refused all the same."""
    with path.open("wb") as file:
        file.write(make(entries={}, tensors={}, data=b"", entry_count=1) + g.text("k"))
        file.write(struct.pack("<IIQ", g.ARRAY, g.STRING, 1 << 26) + struct.pack("<Q", 100 << 20))
        extend(file, 1 << 31)  # a string of 100 MiB, then empty ones
    with pytest.raises(LimitError, match="extends past byte 134217728"):
        safeload.open(path)


def test_counts_are_not_believed_ahead(path):
    """Room is taken for what has been read, not for all that a sparse file could have."""
    with path.open("wb") as file:
        file.write(make(entries={}, tensors={}, data=b"", tensor_count=2**31))
        extend(file, 1 << 36)
    with pytest.raises(LimitError, match="extends past byte 134217728"):
        safeload.open(path)


@settings(max_examples=examples(300), deadline=None)
@given(at=st.integers(0, len(GOOD) - 1), new=st.binary(min_size=1, max_size=9))
def test_bent_bytes_open_or_are_refused(at, new, tmp_path_factory):
    path = tmp_path_factory.mktemp("bent") / "model.gguf"
    content = bytearray(GOOD)
    content[at : at + len(new)] = new
    path.write_bytes(content)
    started = time.perf_counter()
    try:
        with safeload.open(path, format="gguf") as opened:
            for value in opened.load(backend="pread").values():
                assert isinstance(value, (np.ndarray, safeload.QuantizedTensor))
            repr(opened.metadata)
            dict(opened.metadata)
    except SafeloadError:
        pass
    assert time.perf_counter() - started < 1
