"""Long safetensors headers: read from files in windows, as from memory; names in every order."""

import json

import pytest
from builders.random import rng

import safeload
from safeload.numpy import load

WINDOW, MEMBER = 131072, 4096  # csrc/formats/safetensors.c
BETWEEN = ["", "", "", " ", "\r\n\t "]


def member(name, index):
    return f'{json.dumps(name)}:{{"dtype":"U8","shape":[1],"data_offsets":[{index},{index + 1}]}}'


def build(members, count, padding=0):
    text = ("{" + ",".join(members) + "}" + " " * padding).encode()
    return len(text).to_bytes(8, "little") + text + bytes(k % 256 for k in range(count))


def named(names):
    return build(map(member, names, range(len(names))), len(names))


def listed(path):
    with safeload.open(path, stored=True) as checkpoint:
        return list(checkpoint.tensors.values()), checkpoint.metadata


def assert_reads_as_from_memory(path, content):
    path.write_bytes(content)
    (infos, metadata), expected = listed(path), load(content)
    assert [info.name for info in infos] == list(expected)
    assert [content[info.offset] for info in infos] == [int(array[0]) for array in expected.values()]
    return infos, metadata


@pytest.mark.parametrize("longest", [40, 700, MEMBER + 200, WINDOW])
def test_members_of_any_length_cross_the_ends_of_windows(tmp_path, longest):
    sizes = rng.integers(longest, size=2000 if longest < MEMBER else 100)
    names = [f"{k}é\n"[: rng.integers(1, 9)] + "x" * int(size) + f".{k}" for k, size in enumerate(sizes)]
    members = [rng.choice(BETWEEN) + member(name, k) + rng.choice(BETWEEN) for k, name in enumerate(names)]
    infos, _ = assert_reads_as_from_memory(tmp_path / "x.safetensors", build(members, len(names)))
    assert [info.name for info in infos] == names


@pytest.mark.parametrize("size", [10, MEMBER, 28_000, 40_000, WINDOW, 3 * WINDOW])
@pytest.mark.parametrize("place", [0, 700, 2000])
def test_metadata_of_any_size_at_any_place(tmp_path, size, place):
    members = [member(f"h.{k}.weight", k) for k in range(2000)]
    members.insert(place, '"__metadata__":' + json.dumps({"text": "y" * size}))
    _, metadata = assert_reads_as_from_memory(tmp_path / "x.safetensors", build(members, 2000))
    assert metadata == {"text": "y" * size}


def test_spaces_may_fill_windows_before_and_after_the_object(tmp_path):
    path, text = tmp_path / "x.safetensors", "{" + member("w", 0) + "}"
    for front in (0, 32_760, 32_761, 3 * WINDOW):
        for back in (40_000, WINDOW, WINDOW + 1, 3 * WINDOW):
            header = (" " * front + text + " " * back).encode()
            assert_reads_as_from_memory(path, len(header).to_bytes(8, "little") + header + b"\7")
            path.write_bytes(len(header).to_bytes(8, "little") + header[:-1] + b"}\7")
            with pytest.raises(safeload.FormatError, match="the end of the header") as caught:
                safeload.open(path)
            assert caught.value.offset == 8 + len(header) - 1


def verdict(read, source):
    try:
        read(source)
    except safeload.SafeloadError as error:
        return str(error)
    return "accepted"


def test_faults_in_any_window_are_told_as_in_memory(tmp_path):
    content, path = named([f"model.layers.{k}.weight" for k in range(6000)]), tmp_path / "x.safetensors"
    header_end = 8 + int.from_bytes(content[:8], "little")
    for at in [*rng.integers(8, header_end, 150), header_end - 1, 8]:
        fault = bytearray(content)
        fault[at] = rng.choice(list(b'\0"}],:9x\xff'))
        path.write_bytes(fault)
        from_file = verdict(listed, path).replace(f"{path}, ", "")
        assert from_file == verdict(load, bytes(fault))


def test_spaces_that_never_end_in_an_object_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((4 * WINDOW).to_bytes(8, "little") + b" " * 4 * WINDOW)
    with pytest.raises(safeload.FormatError, match="the header") as caught:
        safeload.open(path)
    assert caught.value.offset == 8 + 4 * WINDOW


def by_layer(count):
    parts = ("gate_proj", "up", "down_proj", "q", "q_norm", "")
    return [f"model.layers.{k // 600}.experts.{k // 6 % 100}.{parts[k % 6]}" for k in range(count)]


def shuffled(names):
    return [names[k] for k in rng.permutation(len(names))]


LAYERS = by_layer(3000)
CHAIN = ["a" * k for k in range(1, 1200)]
NAMES = {
    "by layer": LAYERS,
    "backwards": LAYERS[::-1],
    "shuffled": shuffled(LAYERS),
    "by part": sorted(LAYERS, key=lambda name: name[::-1]),
    "two dtypes": sorted(LAYERS[::2]) + sorted(LAYERS[1::2]),
    "deeper and deeper": ["b", *CHAIN],
    "ever less deep": [*CHAIN[::-1], "b"],
    "from the middle": [*CHAIN[600:], *CHAIN[:600][::-1], "b"],
    "from the middle, 60 levels": [*CHAIN[600:660], *CHAIN[:600][::-1], *LAYERS],
    "any bytes": [*LAYERS[::-1], *(f"h.{chr(k)}" for k in range(300) if chr(k) != "\n"), "h.", "", "h.\t\0", "\0"],
    "newlines": [*LAYERS[::-1], "h\n", "h", "h\nx"],
}


@pytest.mark.parametrize("order", NAMES)
def test_names_in_any_order_are_sorted_found_and_unique(tmp_path, order):
    names, path = NAMES[order], tmp_path / "x.safetensors"
    path.write_bytes(named(names))
    with safeload.safe_open(path, framework="np") as file:
        assert file.keys() == sorted(names)
        assert file.offset_keys() == names
        assert file.keys() == sorted(names)
    table = safeload.open(path).weight_files[0].table
    table._searches = -3 * len(names)  # so that C searches for all of them
    assert [table.find(name) for name in names] == list(range(len(names)))
    assert {table.find(name + "?!") for name in names} == {-1}
    assert table._index is None
    for place, again in ((0, len(names) - 1), (len(names) // 2, 0), (len(names) // 3, len(names) // 3 + 1)):
        twice = [*names[: again + 1], names[place], *names[again + 1 :]]
        path.write_bytes(named(twice))
        with pytest.raises(safeload.FormatError, match="duplicate name"):
            safeload.open(path)
