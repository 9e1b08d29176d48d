"""What a pickle may cost: memory for each of its bytes, and time, also where it is made to cost the most."""

import struct
import time
import tracemalloc

import numpy as np
import pytest
from builders.inside import torch_globals, unpickler
from builders.thorough import THOROUGH, dealt
from builders.torch_build import Storage, dump, tensor, zip_archive

import safeload
from safeload import LimitError

pytestmark = pytest.mark.any_python

U4 = struct.Struct("<I").pack
# Bytes of memory for a byte of pickle; docs/threat-model.md names it.
MOST = 340


def text(value):
    return b"X" + U4(len(value)) + value.encode()


def named(module, name):
    return f"c{module}\n{name}\n".encode()


def calls(function, args, count):
    """One call, made again and again with the same arguments."""
    return b"](" + function + b"q\x010" + args + b"q\x020" + b"h\x01h\x02R" * count + b"e."


ONE = dump(tensor(Storage("0", np.zeros(2, np.float32))))[2:-1]
N, FEW, LONG = (10_000, 3_000, 50_000) if THOROUGH else (5_000, 2_000, 50_000)  # few of what takes long
DENSE = {
    "sets": b"(" + b"\x8f" * N + b"l.",
    "sets in tuples": b"(" + b"\x8f\x85" * FEW + b"l.",
    "lists": b"(" + b"]" * N + b"l.",
    "dicts": b"(" + b"}" * N + b"l.",
    "tuples in tuples": b"(" + (b"N" + b"\x85" * 150) * (N // 150) + b"l.",
    "frozensets": b"(" + b"(\x91" * N + b"l.",
    "inert": b"(" + named("m", "C") + b"2)R" * FEW + b"l.",
    "memo": b"(" + b"N\x94" * N + b"l.",
    "memo out of order": b"N" + b"".join(b"r" + U4(k * 1000 + 99) for k in range(N)) + b".",
    "torch.device": calls(named("torch", "device"), text("x" * LONG) + b"K\x00\x86", N),
    "torch.Size": calls(named("torch", "Size"), b"](" + b"N" * LONG + b"e\x85", N),
    "OrderedDict": calls(
        named("collections", "OrderedDict"),
        b"](" + b"".join(b"M" + U4(k)[:2] + b"N\x86" for k in range(N)) + b"e\x85",
        N,
    ),
    "Counter": calls(
        named("collections", "Counter"), b"}(" + b"".join(b"M" + U4(k)[:2] + b"N" for k in range(N)) + b"u\x85", N
    ),
    "set": calls(named("builtins", "set"), b"](" + b"".join(b"M" + U4(k)[:2] for k in range(N)) + b"e\x85", N),
    "small sets": calls(named("builtins", "set"), b"](K\x01K\x02K\x03e\x85", N),
    "NEWOBJ_EX": b"]("
    + named("m", "C")
    + b"q\x010("
    + b"N" * LONG
    + b"tq\x02}NNsq\x03"
    + b"h\x01h\x02h\x03\x92" * N
    + b"e.",
    "names of globals": b"("
    + text("a" * 490)
    + b"q\x010"
    + b"".join(b"h\x01U\x05%05d\x93" % k for k in range(N))
    + b"l.",
    "a storage's key": (
        b"](" + b"(" + text("storage") + named("torch", "FloatStorage") + text("x" * LONG) + text("cpu") + b"K\x01tQ"
        b"q\x010" + b"h\x01" * N + b"e."
    ),
    "parts of a storage": (
        b"](" + b"(" + text("storage") + named("torch", "FloatStorage") + text("x" * LONG) + text("cpu") + b"K\x01"
        b"(NK\x00K\x01ttq\x010" + b"h\x01Q" * N + b"e."
    ),
    "tuples as keys": b"(" + b"N" * 90 + b"tq\x010(" + b"}h\x01]s" * FEW + b"l.",
    "a tensor's names": ONE + b"q\xff0(" + b"h\xff" * N + b"l.",
    "a tensor's long names": b"}" + text("x" * LONG) + ONE + b"q\xff0(" + b"h\xff" * N + b"ls.",
    "names of a shared container": ONE + b"q\xff0(" + b"h\xff" * 1000 + b"lq\xfe0(" + b"h\xfe" * 1000 + b"l.",
    "long keys in tuples of their own": (
        ONE + b"q\xff0](\x8e" + struct.pack("<Q", LONG) + b"\xff" * LONG + b"q\xfe0" + b"}h\xfe\x85h\xffs" * N + b"e."
    ),
    "prefixes of names": (
        ONE + b"q\xff0" + text("x" * LONG) + b"q\xfe0}h\xfeh\xffs" + b"q\xfd0}h\xfeh\xfds" * 150 + b"."
    ),
}


def peak(path):
    tracemalloc.start()
    try:
        safeload.open(path, unknown_globals="inert")
    except LimitError:
        pass
    finally:
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return size


def peaks(folder, case):
    """Of a pickle of nothing, and of a dense one."""
    path = folder / "dense.pt"
    path.write_bytes(zip_archive({"data.pkl": b"\x80\x04N.", "data/0": bytes(8)}))
    usual = max(peak(path) for _ in range(2))
    path.write_bytes(zip_archive({"data.pkl": b"\x80\x04" + DENSE[case], "data/0": bytes(8)}))
    return usual, peak(path)


@pytest.mark.ahead(function=peaks)
@pytest.mark.parametrize("case", DENSE)
def test_memory_is_in_proportion_to_the_pickle(case, begun_ahead):
    usual, dense = begun_ahead
    assert dense - usual < MOST * len(DENSE[case]) + (2 << 20)  # a small pickle may copy and name as it likes


def test_metadata_cannot_be_made_long_by_repeating_a_text(tmp_path):
    """As JSON each reference is the text itself: two bytes would be a megabyte of output."""
    path = tmp_path / "long.pt"
    for items in (b"h\x01" * 2000, b"h\x01\x85" * 2000):
        data = b"\x80\x04](" + text("x" * 1_000_000) + b"q\x010" + items + b"e."
        path.write_bytes(zip_archive({"data.pkl": data}))
        with pytest.raises(LimitError, match="values when shared containers are unfolded"):
            safeload.open(path)


# ---- keys ----

P1, P2, P5 = 11400714785074694791, 14029467366897019727, 2870177450012600261  # Objects/tupleobject.c
WORD = (1 << 64) - 1


def _rotate(x, by):
    return ((x << by) | (x >> (64 - by))) & WORD


def _lane(acc, x):
    return (_rotate((acc + x * P2) & WORD, 31) * P1) & WORD


def colliding_pairs(count):
    """Pairs of integers whose hashes are equal: the last steps of the hash, backwards."""
    inverse_1, inverse_2 = pow(P1, -1, 1 << 64), pow(P2, -1, 1 << 64)
    target = _rotate(_lane(_lane(P5, 12345), 6789) * inverse_1 & WORD, 33)
    found, first = [], 20_000
    while len(found) < count:
        first += 1
        second = (target - _lane(P5, first)) * inverse_2 & WORD
        if second < (1 << 61) - 1:
            found.append((first, second))
        elif (1 << 64) - ((1 << 61) - 1) <= second < WORD:
            found.append((first, second - (1 << 64)))
    return found


def pickled(key):
    if isinstance(key, tuple):
        return b"(" + b"".join(map(pickled, key)) + b"t"
    if isinstance(key, frozenset):
        return b"(" + b"".join(map(pickled, key)) + b"\x91"
    if isinstance(key, float):
        return b"G" + struct.pack(">d", key)
    data = key.to_bytes(9, "little", signed=True)
    return b"\x8a\x09" + data


def run_of_slots():
    """Keys of distinct hashes: a run of slots in the order of the table's jumps, and keys that lead to its start."""
    mask, slot, run = (1 << 14) - 1, 77, []
    for _ in range(9500):
        run.append(slot)
        slot = (slot * 5 + 1) & mask
    taken, early = set(run), set(run[:4000])
    leading = []
    for key in range(1 << 14, 1 << 18):
        slot, rest = key & mask, key
        while rest and slot in taken:
            rest >>= 5
            slot = (slot * 5 + rest + 1) & mask
        if not rest and slot in early:
            leading.append(key)
    return run + leading[:1400]


PAIRS = colliding_pairs(3000)
COLLIDING = {
    "pairs": PAIRS,
    "pairs in tuples": [(pair,) for pair in PAIRS],
    "pairs in frozensets": [frozenset([pair]) for pair in PAIRS],
    "behind others": [(k, k) for k in range(1000)] + PAIRS,
}
PACKED = {
    "dict": lambda keys: b"}(" + b"".join(pickled(key) + b"N" for key in keys) + b"u.",
    "dict in steps": lambda keys: b"}" + b"".join(pickled(key) + b"Ns" for key in keys) + b".",
    "DICT": lambda keys: b"(" + b"".join(pickled(key) + b"N" for key in keys) + b"d.",
    "set": lambda keys: b"\x8f(" + b"".join(map(pickled, keys)) + b"\x90.",
    "frozenset": lambda keys: b"(" + b"".join(map(pickled, keys)) + b"\x91.",
    "inert": lambda keys: b"cm\nC\n)R(" + b"".join(pickled(key) + b"N" for key in keys) + b"u.",
}


def load(data):
    return unpickler.unpickle(data, {}, lambda value: value, path="p.pkl", inert=True).value


def test_complex_keys_made_to_collide_are_refused():
    """The hash of a complex number is that of its parts: real + 1000003 * imaginary."""
    numbers = [(-1000003.0 * k, float(k)) for k in range(3000)]
    assert len({hash(complex(*pair)) for pair in numbers}) == 1
    calls_of_complex = b"".join(b"h\x01" + pickled(a) + pickled(b) + b"\x86R" for a, b in numbers)
    data = named("builtins", "complex") + b"q\x010cbuiltins\nset\n](" + calls_of_complex + b"e\x85R."
    with pytest.raises(LimitError, match="keys with colliding hashes"):
        unpickler.unpickle(data, torch_globals.ALLOWED, lambda value: value, path="p.pkl", inert=True)


@pytest.mark.parametrize(("into", "keys"), dealt(PACKED, COLLIDING))
def test_keys_made_to_collide_are_refused(keys, into):
    assert len(set(map(hash, COLLIDING[keys][-3000:]))) == 1
    with pytest.raises(LimitError, match="keys with colliding hashes"):
        load(PACKED[into](COLLIDING[keys]))


def test_keys_that_meet_in_the_table_without_equal_hashes_are_refused():
    keys = run_of_slots()
    assert len(set(map(hash, keys))) == len(keys) == 10_900
    with pytest.raises(LimitError, match="keys with colliding hashes"):
        load(PACKED["dict"](keys))


@pytest.mark.parametrize("sign", [1, -1])
def test_memo_numbers_cannot_collide(sign):
    step = (1 << 61) - 1
    numbers = [sign * (k * step + 5) for k in range(30_000)]
    data = b"".join(b"K\x01p%d\n0" % number for number in numbers)
    started = time.process_time()
    assert load(data + b"g%d\n." % numbers[-1]) == 1
    assert time.process_time() - started < 2


USUAL = {
    "in order": list(range(5000)),
    "from one": list(range(1, 5000)),
    "from a thousand": list(range(1000, 6000)),
    "downwards": list(range(5000, 0, -1)),
    "negative": [-k for k in range(5000)],
    "addresses": [140_000_000_000_000 + 4096 * k for k in range(5000)],
    **{f"multiples of 2**{k}": [j << k for j in range(5000)] for k in range(0, 50, 7)},
    "pairs": [(j, k) for j in range(70) for k in range(70)],
    "fractions": [k / 2 for k in range(5000)],
    "small fractions": [k / 2**20 for k in range(5000)],
    "tenths": [k * 0.1 for k in range(5000)],
    "large": [k * 1e300 for k in range(5000)],
    "frozensets": [frozenset((k, k + 1)) for k in range(5000)],
    "triples": [(k, (k % 7, 0.5)) for k in range(5000)],
}


@pytest.mark.parametrize(("keys", "into"), dealt(USUAL, ["dict", "set", "frozenset"]))
def test_usual_keys_pass(keys, into):
    value = load(PACKED[into](USUAL[keys]))
    assert value == {"dict": dict.fromkeys, "set": set, "frozenset": frozenset}[into](USUAL[keys])


def test_an_element_may_come_twice_in_a_set_also_in_a_large_one():
    keys = [k * 977 for k in range(500)] * 2
    assert load(PACKED["set"](keys)) == set(keys)
    with pytest.raises(safeload.FormatError, match="a duplicate key"):
        load(PACKED["dict"](keys))


def test_the_table_has_the_steps_that_cpython_has():
    table = unpickler.KeyTable({})
    for key in range(1000):
        table.add(key)
    assert table._steps == 1000  # in order: each finds its slot free


def test_a_long_key_is_turned_into_text_once(tmp_path):
    key = b"\x8e" + struct.pack("<Q", 1_000_000) + b"\xff" * 1_000_000
    path = tmp_path / "k.pt"
    spent = []
    for count in (1, 500):
        inner = b"}h\xfe]s" * count + b"}h\xfe(h\xffls" * (count > 1)
        data = b"\x80\x04" + ONE + b"q\xff0](" + key + b"q\xfe0" + inner + b"e."
        path.write_bytes(zip_archive({"data.pkl": data, "data/0": bytes(8)}))
        started = time.process_time()
        assert len(safeload.open(path)) == (count > 1)
        spent.append(time.process_time() - started)
    assert spent[1] < spent[0] + 0.2


def test_a_long_key_around_many_levels_is_not_copied_for_each(tmp_path):
    key, levels = b"X" + U4(1_000_000) + b"k" * 1_000_000, 150
    path = tmp_path / "k.pt"
    inner = b"}" + key + b"}X\1\0\0\0a" * levels + ONE + b"s" * (levels + 1)
    path.write_bytes(zip_archive({"data.pkl": b"\x80\x02" + inner + b".", "data/0": bytes(8)}))
    tracemalloc.start()
    try:
        assert list(safeload.open(path)) == ["k" * 1_000_000 + ".a" * levels]
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()
