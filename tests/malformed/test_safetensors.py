import pickle

import pytest
from malformed.build import ACCEPTED, CASES, GOOD_HEADER, build, change, one

import safeload
from safeload import FormatError, LimitError, SafeloadError
from safeload.numpy import load, load_file


def list_all(path):
    with safeload.safe_open(path) as file:
        return file.keys()


WAYS = {
    "load_file": load_file,
    "load_file pread": lambda path: load_file(path, backend="pread"),
    "safe_open": list_all,
    "open": safeload.open,
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
        assert str(path) in str(caught.value)
        if case.error is FormatError:
            assert caught.value.path == str(path)
            assert isinstance(caught.value, ValueError)
            if case.offset is not None:
                assert caught.value.offset == case.offset
                assert f"byte {case.offset}" in str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_in_memory_are_refused_likewise(case):
    for function in (load, lambda data: load(data, copy=False), safeload.deserialize):
        with pytest.raises(SafeloadError) as caught:
            function(case.content)
        assert type(caught.value) is case.error
        assert case.message in str(caught.value)
        if case.error is FormatError:
            assert caught.value.path is None
            if case.offset is not None:
                assert caught.value.offset == case.offset


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_well_formed_is_accepted(name, tmp_path):
    path = tmp_path / "good.safetensors"
    path.write_bytes(ACCEPTED[name])
    expected = {k: v.tobytes() for k, v in load(ACCEPTED[name]).items()}
    for backend in ("mmap", "pread"):
        arrays = load_file(path, backend=backend)
        assert {k: v.tobytes() for k, v in arrays.items()} == expected
        assert all(array.flags.aligned for array in arrays.values())
    assert list_all(path) == sorted(expected)


@pytest.mark.parametrize("length", range(len(build())))
def test_truncation_at_every_byte_is_refused(length, tmp_path):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(build()[:length])
    with pytest.raises(FormatError):
        load_file(path)
    with pytest.raises(FormatError):
        load(build()[:length])


def test_names_in_messages_are_clipped_and_harmless():
    name = b"\\u001b[31m" + b"x" * 5000
    with pytest.raises(FormatError) as caught:
        load(one(b'{"dtype":"U8","shape":[2],"data_offsets":[0,1]}', b"\0", name=b'"' + name + b'"'))
    message = str(caught.value)
    assert "\x1b" not in message
    assert "'\\x1b[31mxxx" in message
    assert len(message) < 400


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
    with pytest.raises(FormatError, match=f"tensor '{names[100].decode()}': the name is there twice"):
        load(build(twice, bytes(2000)))


def test_the_good_file_of_this_suite_is_good():
    assert list(load(build(GOOD_HEADER))) == ["a", "b"]
