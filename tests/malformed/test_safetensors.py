"""safetensors files with one fault each: refused with class, message and byte; what is well formed is accepted."""

import pickle
import re

import numpy as np
import pytest
from builders.malformed import ACCEPTED, CASES, GOOD_HEADER, build, change, one
from builders.remote import Served

import safeload
from safeload import FormatError, LimitError, SafeloadError
from safeload.numpy import load, load_file


def list_all(path, backend="mmap"):
    with safeload.safe_open(path, backend=backend) as file:
        return file.keys()


WAYS = {
    "load_file": load_file,
    "load_file pread": lambda path: load_file(path, backend="pread"),
    "safe_open": list_all,
    "safe_open pread": lambda path: list_all(path, "pread"),
    "open": safeload.open,
    "ranges": lambda path: safeload.open(Served({str(path): path.read_bytes()}, head=8).at(str(path))),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_fault_is_refused_with_its_class_message_and_byte(case, tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(case.content)
    for way in WAYS.values():
        with pytest.raises(SafeloadError) as caught:
            way(path)
        if not case.content:  # an empty file is told as what it is
            assert "this is an empty file" in str(caught.value)
            continue
        assert type(caught.value) is case.error
        assert case.message in str(caught.value)
        assert str(caught.value).endswith(f" ({path}, byte {case.offset})")
        if case.error is FormatError:
            assert caught.value.path == str(path)
            assert caught.value.offset == case.offset
            assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_in_memory_are_refused_likewise(case):
    for function in (load, lambda data: load(data, copy=False), safeload.deserialize):
        with pytest.raises(SafeloadError) as caught:
            function(case.content)
        assert type(caught.value) is case.error
        assert case.message in str(caught.value)
        assert str(caught.value).endswith(f" (byte {case.offset})")
        if case.error is FormatError:
            assert caught.value.path is None
            assert caught.value.offset == case.offset


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_well_formed_is_accepted(name, tmp_path):
    path = tmp_path / "good.safetensors"
    path.write_bytes(ACCEPTED[name])
    expected = {k: v.tobytes() for k, v in load(ACCEPTED[name]).items()}
    for backend in ("mmap", "pread", "direct"):
        arrays = load_file(path, backend=backend)
        assert {k: v.tobytes() for k, v in arrays.items()} == expected
        assert all(array.flags.aligned for array in arrays.values())
    assert list_all(path) == sorted(expected)


def test_truncation_at_every_byte_is_refused(tmp_path):
    path = tmp_path / "cut.safetensors"
    accepted = []
    for length in range(len(build())):
        path.write_bytes(build()[:length])
        for name, way in {**WAYS, "bytes": lambda path: load(path.read_bytes())}.items():
            if length == 0 and way is safeload.open:  # told as an empty file, see test_index.py
                continue
            try:
                way(path)
            except FormatError:
                continue
            accepted.append((length, name))
    assert accepted == []


@pytest.mark.parametrize(
    ("json", "name"),
    [
        (b'"x\\ny"', "x\ny"),
        (b'"\\n"', "\n"),
        (b'"x\\u0000y"', "x\0y"),
        (b'"\\"\\\\\\/"', '"\\/'),
        (b'"\\b\\f\\n\\r\\t"', "\b\f\n\r\t"),
        (b'""', ""),
        (b'" "', " "),
        (b'"\\u00e9\xc3\xa9"', "\N{LATIN SMALL LETTER E WITH ACUTE}" * 2),
        (b'"\\uD83D\\uDE00\xf0\x9f\x98\x80"', "\N{GRINNING FACE}" * 2),
        (b'"\\ud800\\udc00\\udbff\\udfff"', "\U00010000\U0010ffff"),
        (b'"\\uffff\\u0800\\u07ff\\u0080\\u007f"', "\uffff\u0800\u07ff\x80\x7f"),
        (b'"\x7f"', "\x7f"),
        ('"\ufeff\u202e\u2028"'.encode(), "\ufeff\u202e\u2028"),
    ],
)
def test_a_name_is_what_its_json_means(json, name, tmp_path):
    path = tmp_path / "named.safetensors"
    path.write_bytes(one(b'{"dtype":"U8","shape":[2],"data_offsets":[0,2]}', b"\x07\x08", name=json))
    for arrays in (load_file(path), load_file(path, backend="pread"), load(path.read_bytes()), safeload.load(path)):
        assert list(arrays) == [name]
        assert arrays[name].tolist() == [7, 8]
    assert list_all(path) == [name]
    with safeload.open(path) as checkpoint:
        assert name in checkpoint
        assert checkpoint[name].tolist() == [7, 8]


BITS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["C64", "F64", "I64", "U64"], 64),
}


@pytest.mark.parametrize("escape", [False, True])
@pytest.mark.parametrize("code", BITS)
def test_every_dtype_is_known_by_its_code_also_when_all_of_it_is_escaped(code, escape):
    text = "".join(f"\\u{ord(c):04x}" for c in code) if escape else code
    entry = f'{{"dtype":"{text}","shape":[4],"data_offsets":[0,{BITS[code] // 2}]}}'
    ((_, found),) = safeload.deserialize(one(entry.encode(), bytes(BITS[code] // 2)))
    assert (found["dtype"], found["shape"]) == (code, [4])


@pytest.mark.parametrize("code", ["U8", "F16", "F32", "F64"])
def test_an_empty_shape_is_refused_only_where_no_array_can_have_it(code):
    """numpy itself is asked, on both sides of its limit."""
    largest = (2**63 - 1) // (BITS[code] // 8)
    for dim in (largest, largest // 2 + 1, 2**32):
        np.empty((0, dim), f"V{BITS[code] // 8}")
        entry = f'{{"dtype":"{code}","shape":[0,{dim}],"data_offsets":[0,0]}}'
        assert load(one(entry.encode()))["t"].shape == (0, dim)
    with pytest.raises((ValueError, OverflowError)):
        np.empty((0, largest + 1), f"V{BITS[code] // 8}")
    entry = f'{{"dtype":"{code}","shape":[0,{largest + 1}],"data_offsets":[0,0]}}'
    with pytest.raises(LimitError, match="no array can have the shape"):
        load(one(entry.encode()))


def test_64_dims_are_accepted():
    shape = [1] * 63 + [3]
    content = one(f'{{"dtype":"U8","shape":{shape},"data_offsets":[0,3]}}'.replace(" ", "").encode(), bytes(3))
    ((_, found),) = safeload.deserialize(content)
    assert found["shape"] == shape
    if int(np.__version__.split(".")[0]) >= 2:  # before, arrays had 32 at most
        assert load(content)["t"].shape == tuple(shape)


def test_a_header_of_the_largest_size_is_accepted_and_one_byte_more_is_not():
    header = b"{}".ljust(100_000_000)
    assert load(build(header, b"")) == {}
    with pytest.raises(FormatError, match="header too large: 100000001 bytes, safetensors allows 100000000") as caught:
        load(build(header + b" ", b""))
    assert caught.value.offset == 0


def test_names_in_messages_are_clipped_and_harmless():
    name = b"\\u001b[31m" + b"x" * 5000
    with pytest.raises(FormatError) as caught:
        load(one(b'{"dtype":"U8","shape":[2],"data_offsets":[0,1]}', b"\0", name=b'"' + name + b'"'))
    message = str(caught.value)
    assert "\x1b" not in message
    assert "'\\x1b[31mxxx" in message
    assert len(message) < 400


CONTROLS = [chr(c) for c in (*range(0x20), *range(0x7F, 0xA0))]


@pytest.mark.parametrize(
    "fault",
    [
        b'{"dtype":"U8","shape":[2],"data_offsets":[0,1]}',
        b'{"shape":[2],"data_offsets":[0,1]}',
        b'{"dtype":"X","shape":[2],"data_offsets":[0,1]}',
    ],
)
def test_no_control_character_of_a_name_reaches_a_message(fault):
    """Also those from 0x80 to 0x9f: 0x9b begins a terminal's commands as ESC [ does."""
    for c in CONTROLS:
        with pytest.raises(FormatError) as caught:
            load(one(fault, b"\0", name=b'"\\u%04x"' % ord(c)))
        assert not set(str(caught.value)) & set(CONTROLS), ascii(c)


def test_no_control_character_of_a_dtype_reaches_a_message():
    for raw in ('"\\u009b"', '"\x9b"', '"\\u0007"', '"\x7f"'):
        with pytest.raises(FormatError) as caught:
            load(one(b'{"dtype":' + raw.encode() + b',"shape":[1],"data_offsets":[0,1]}', b"\0"))
        assert not set(str(caught.value)) & set(CONTROLS), ascii(raw)


@pytest.mark.parametrize("field", ["name", "dtype"])
def test_a_long_text_of_a_file_is_clipped_in_every_message(field):
    long = b'"' + b"x" * 1_000_000 + b'"'
    entry = b'{"dtype":%s,"shape":[2],"data_offsets":[0,1]}' % (long if field == "dtype" else b'"U8"')
    for name in (long, b'"t"') if field == "dtype" else (long,):
        with pytest.raises(FormatError) as caught:
            load(one(entry, b"\0", name=name))
        assert "xxx..." in str(caught.value)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("dim", [1, 2**32, 2**64 - 1])
def test_a_shape_that_a_message_cuts_short_does_not_look_whole(dim):
    shape = [dim] * 60 + [2]
    entry = f'{{"dtype":"U8","shape":{shape},"data_offsets":[0,0]}}'
    with pytest.raises(FormatError) as caught:
        load(one(entry.encode()))
    shown = re.search(r"U8 (\[.*?\])", str(caught.value))[1]
    assert shown == str(shape) or "..." in shown


def test_a_clipped_name_is_not_cut_inside_a_character():
    for shift in range(4):
        name = "x" * shift + "\N{GRINNING FACE}" * 100
        with pytest.raises(FormatError) as caught:
            load(one(b'{"dtype":"U8","shape":[2],"data_offsets":[0,1]}', b"\0", name=f'"{name}"'.encode()))
        assert "\N{REPLACEMENT CHARACTER}" not in str(caught.value)


def test_the_message_of_a_wrong_size_is_the_documented_one(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(one(b'{"dtype":"F32","shape":[2,2],"data_offsets":[0,4]}', bytes(4), name=b'"h.0.w"'))
    with pytest.raises(FormatError) as caught:
        load_file(path)
    assert str(caught.value) == (
        f"tensor 'h.0.w': data_offsets [0, 4) hold 4 bytes, but F32 [2, 2] needs 16 ({path}, byte 9)"
    )


def test_errors_survive_pickling():
    with pytest.raises(FormatError) as caught:
        load(change(b"[2,2]", b"[2,3]"))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.path, again.offset) == (str(caught.value), caught.value.path, caught.value.offset)
    limit = pickle.loads(pickle.dumps(LimitError("x")))
    assert str(limit) == "x"


def test_a_long_header_is_checked_as_a_short_one(tmp_path):
    """Headers of more than 32 KiB take another path through the reader."""
    entries = [b'"t%06d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}' % (i, i, i + 1) for i in range(2000)]
    good = build(b"{" + b",".join(entries) + b"}", bytes(2000))
    path = tmp_path / "long.safetensors"
    path.write_bytes(good)
    assert len(load_file(path)) == 2000
    bad = good.replace(b'"t001999":{"dtype":"U8","shape":[1]', b'"t001999":{"dtype":"U8","shape":[2]')
    path.write_bytes(bad)
    with pytest.raises(FormatError) as caught:
        load_file(path)
    assert caught.value.offset == bad.index(b'"t001999"')


def test_two_thousand_names_in_any_order_twice_are_found():
    names = [b"%d" % (i * 7919 % 2003) for i in range(2000)]
    entries = [b'"%s":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}' % (n, i, i + 1) for i, n in enumerate(names)]
    header = b"{" + b",".join(entries) + b"}"
    assert len(load(build(header, bytes(2000)))) == 2000
    twice = header.replace(b'"%s"' % names[1500], b'"%s"' % names[100])
    with pytest.raises(FormatError, match=f"tensor '{names[100].decode()}': duplicate name"):
        load(build(twice, bytes(2000)))


def test_the_good_file_of_this_suite_is_good():
    assert list(load(build(GOOD_HEADER))) == ["a", "b"]
