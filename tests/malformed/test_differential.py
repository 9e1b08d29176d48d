"""safetensors 0.8.0 beside us on every malformed case and on thousands of mutated files.

Both must refuse, or both accept and show the same, but for the differences listed here.
"""

import random
import re
from collections import Counter

import pytest
import safetensors
import safetensors.numpy
from builders.malformed import ACCEPTED, CASES, DEEPEST, GOOD_HEADER, build, change, nested, one
from builders.thorough import THOROUGH

import safeload

pytestmark = pytest.mark.no_core

# What only safetensors accepts: our message, and why we refuse.
ONLY_UPSTREAM = {
    "duplicate name": "one tensor would hide the other",
    "dtype: found '{' where a string": 'serde takes an enum also as {"F32": null}; no writer makes that',
    "no array can have the shape": "numpy refuses it when the tensor is asked for; we say so when the file is opened",
    "shape has more than 64 dims": "likewise",
}
NO_ARRAY = ("no array can have the shape", "shape has more than 64 dims")

# What only safeload accepts: upstream's message, and why it is harmless.
ONLY_US = {
    "number out of range": "in a field that is ignored: we check its grammar and never convert it",
}


def ours(content):
    try:
        return {
            name: (entry["dtype"], list(entry["shape"]), bytes(entry["data"]))
            for name, entry in safeload.deserialize(content)
        }, ""
    except safeload.SafeloadError as error:
        return None, str(error)


def theirs(content):
    try:
        return {
            name: (entry["dtype"], list(entry["shape"]), bytes(entry["data"]))
            for name, entry in safetensors.deserialize(content)
        }, ""
    except safetensors.SafetensorError as error:
        return None, str(error)


def compare(content):
    """None where the two agree, else the listed reason; anything else fails."""
    (a, our_message), (b, their_message) = ours(content), theirs(content)
    if a is None and b is None:
        return None
    if a is None:
        reason = next((key for key in ONLY_UPSTREAM if key in our_message), None)
        assert reason, f"only safetensors accepts {content!r}: {our_message}"
        if reason in NO_ARRAY:  # the reason itself is checked: upstream has no array to give either
            with pytest.raises((ValueError, KeyError)):  # KeyError: a dtype that its numpy face lacks
                safetensors.numpy.load(content)
        return reason
    if b is None:
        reason = next((key for key in ONLY_US if key in their_message), None)
        assert reason, f"only safeload accepts {content!r}: {their_message}"
        return reason
    assert a == b, content
    return None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdicts_on_malformed_files_agree(case):
    compare(case.content)


def compare_metadata(content, path):
    path.write_bytes(content)
    with safeload.safe_open(path) as a, safetensors.safe_open(path, "np") as b:
        assert a.metadata() == b.metadata(), content
        assert sorted(a.keys()) == sorted(b.keys()), content


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_both_accept_is_the_same(name, tmp_path):
    assert compare(ACCEPTED[name]) is None
    assert ours(ACCEPTED[name])[0] is not None
    compare_metadata(ACCEPTED[name], tmp_path / "accepted.safetensors")


def test_verdicts_on_a_file_cut_at_any_byte_agree():
    whole = build()
    differences = {length: compare(whole[:length]) for length in range(len(whole) + 1)}
    assert {length: difference for length, difference in differences.items() if difference is not None} == {}


@pytest.mark.parametrize(("opening", "inner", "closing"), [(b"[", b"", b"]"), (b'{"k":', b"1", b"}")])
@pytest.mark.parametrize("levels", range(DEEPEST - 3, DEEPEST + 7))
def test_both_stop_at_the_same_depth(levels, opening, inner, closing):
    content = nested(levels, opening, inner, closing)
    assert (theirs(content)[0] is not None) == (levels <= DEEPEST)
    assert compare(content) is None


@pytest.mark.parametrize("code", ["F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "BF16", "U8"])
def test_a_dtype_may_be_escaped_for_both(code):
    text = "".join(f"\\u{ord(c):04x}" for c in code)
    size = {"F6_E2M3": 3, "BF16": 8}.get(code, 4)
    content = one(f'{{"dtype":"{text}","shape":[4],"data_offsets":[0,{size}]}}'.encode(), bytes(size))
    assert theirs(content)[0] is not None
    assert compare(content) is None


@pytest.mark.parametrize(("code", "dim"), [("U8", 2**62), ("BOOL", 2**63 - 1), ("F32", 2 * 10**18), ("I64", 2**60 - 1)])
def test_an_empty_array_that_numpy_can_have_is_no_difference(code, dim):
    content = one(f'{{"dtype":"{code}","shape":[0,{dim}],"data_offsets":[0,0]}}'.encode())
    assert safetensors.numpy.load(content)["t"].shape == (0, dim)
    assert ours(content)[0] is not None


EXAMPLES = [
    (
        build(
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"\0",
        ),
        "duplicate name",
    ),
    (one(b'{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}', b"\0"), "dtype: found '{' where a string"),
    (one(b'{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}'), "no array can have the shape"),
    (
        one(b'{"dtype":"U8","shape":[' + b",".join([b"1"] * 65) + b'],"data_offsets":[0,1]}', b"\0"),
        "shape has more than 64 dims",
    ),
    (change(b'"dtype":"F32"', b'"x":1e999,"dtype":"F32"'), "number out of range"),
]


@pytest.mark.parametrize(("content", "reason"), EXAMPLES)
def test_each_listed_difference_is_one(content, reason):
    accepted = {side: find(content)[0] is not None for side, find in (("ours", ours), ("theirs", theirs))}
    assert accepted == {"ours": reason in ONLY_US, "theirs": reason in ONLY_UPSTREAM}
    assert compare(content) == reason


def test_every_listed_difference_has_an_example():
    assert {reason for _, reason in EXAMPLES} == {*ONLY_UPSTREAM, *ONLY_US}


TOKENS = [
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"0", b"1", b"-1", b"16", b"18446744073709551616", b"1.0", b"1e3",
    b"null", b"true", b'""', b"[]", b"{}", b" ", b"\n", b"\0", b"\x1f", b"\x7f", b"\xff", b"\xc3\xa9", b"\\u0061",
    b"\\ud83d\\ude00", b"\\ud800", b'"F32"', b'"U8"', b'"F4"', b'"a"', b'"b"', b'"dtype":', b'"shape":',
    b'"__metadata__":{},',
]  # fmt: skip

SEEDS = [
    GOOD_HEADER,
    *(content[8 : 8 + int.from_bytes(content[:8], "little")] for content in ACCEPTED.values() if len(content) < 1000),
]


def mutate(rng):
    header = bytearray(rng.choice(SEEDS))
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        at = rng.randrange(len(header) + 1)
        kind = rng.randrange(8)
        if kind == 0 and at < len(header):
            header[at] = rng.randrange(256)
        elif kind == 1:
            header[at:at] = rng.choice(TOKENS)
        elif kind == 2:
            del header[at : at + rng.choice((1, 1, 2, 5))]
        elif kind == 3:
            end = at + rng.randrange(12)
            header[at:end] = rng.choice(TOKENS)
        elif kind == 4:
            other = rng.randrange(len(header) + 1)
            header[at:at] = header[other : other + rng.randrange(20)]
        elif kind in (5, 6):  # these often leave it well-formed
            places = [match.end() for match in re.finditer(rb"[\[\]{},:]", header)] or [0]
            place = rng.choice(places)
            header[place:place] = rng.choice((b" ", b"\t\r\n", b'"\\n":{"a":[]},', b'"b\\u00e9":[1e5,"\xc3\xa9"],'))
        else:
            numbers = list(re.finditer(rb"\d+", header))
            if numbers:
                match = rng.choice(numbers)
                header[match.start() : match.end()] = str(int(match[0]) + rng.choice((-1, 1, 8))).encode()
    ends = [int(match[1]) for match in re.finditer(rb"\d+,(\d{1,4})\]", header)]
    size = max(ends, default=0) + rng.choice((0,) * 20 + (1, 24))
    return build(bytes(header), bytes(size), max(0, len(header) + rng.choice((0,) * 20 + (1, -1))))


@pytest.mark.parametrize("seed", range(20 if THOROUGH else 10))
def test_verdicts_on_mutated_files_agree(seed, tmp_path):
    rng = random.Random(seed)
    accepted = 0
    for _ in range(1000):
        content = mutate(rng)
        reason = compare(content)
        if reason is None and ours(content)[0] is not None:
            accepted += 1
            compare_metadata(content, tmp_path / "mutated.safetensors")
    assert 50 < accepted < 950  # both verdicts were exercised


# ---- files made from nothing, each well-formed but for at most one fault in an entry and one around it ----

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
SOUND = [
    b"null", b"true", b"false", b"0", b"-1", b"-0", b"0.0", b"1e3", b"1E-2", b"-1.5e-7", b"18446744073709551616", b'""',
    b"[]", b"{}", b"[1]", b'{"a":[{}]}', b'"\\ud83d\\ude00"', b'{"F32":null}', b'{"F32":{}}', b'{"F32":1}', b"1e999",
]  # fmt: skip
UNSOUND = [b"00", b"1.", b"-", b"nul", b"[1,]", b"{,}", b"[", b'"\x01"', b'"\xff"', b'"\\x"', b'"\\ud800"', b'"', b""]
NAMES = ["a", "b", "", "x\ny", "\0", '"\\/', "\xe9", "\N{GRINNING FACE}", "__metadata", "dtype", "x" * 300]


def spell(rng, text):
    """A JSON string of this text, some of it escaped though it need not be."""
    out = ""
    for c in text:
        if ord(c) < 32 or c in '"\\' or rng.random() < 0.1:
            units = c.encode("utf-16-be")
            out += "".join(f"\\u{units[k]:02x}{units[k + 1]:02X}" for k in range(0, len(units), 2))
        else:
            out += c
    return f'"{out}"'.encode()


class Maker:
    def __init__(self, rng):
        self.rng = rng

    def space(self):
        return self.rng.choice((b"", b"", b"", b" ", b"\n", b"\t\r"))

    def join(self, opening, parts, closing):
        inner = b",".join(self.space() + part + self.space() for part in parts)
        return opening + inner + closing

    def pair(self, name, value):
        return spell(self.rng, name) + self.space() + b":" + self.space() + value

    def value(self):
        return self.rng.choice(SOUND + UNSOUND)

    def tensor(self, begin):
        code = self.rng.choice(list(BITS))
        shape = [self.rng.choice((0, 1, 2, 3, 4, 8)) for _ in range(self.rng.randrange(4))]
        bits = BITS[code]
        for dim in shape:
            bits *= dim
        if bits % 8:
            shape.append(8)
            bits *= 8
        return code, shape, begin, begin + bits // 8

    def entry(self, code, shape, begin, end, fault):
        rng = self.rng
        if fault == "numbers":
            if rng.random() < 0.5:
                shape = [rng.choice((0, 1, 2, 2**31, 2**32, 2**62, 2**63, 2**64 - 1)) for _ in range(rng.randrange(5))]
            else:
                begin = max(0, begin + rng.choice((-1, 0, 1)))
                end = max(0, end + rng.choice((-1, 1, 2**63)))
        fields = {
            "dtype": spell(rng, code),
            "shape": self.join(b"[", [b"%d" % dim for dim in shape], b"]"),
            "data_offsets": self.join(b"[", [b"%d" % begin, b"%d" % end], b"]"),
        }
        if fault == "value":
            fields[rng.choice(list(fields))] = self.value()
        elif fault == "element":
            parts = [b"%d" % dim for dim in shape] or [b"1"]
            parts[rng.randrange(len(parts))] = self.value()
            fields["shape"] = self.join(b"[", parts, b"]")
        pairs = list(fields.items())
        if fault == "missing":
            pairs.pop(rng.randrange(3))
        elif fault == "twice":
            pairs.append(rng.choice(pairs))
        if rng.random() < 0.1:
            return self.join(b"[", [value for _, value in pairs], b"]")
        if rng.random() < 0.3:
            pairs.append((rng.choice(("x", "Dtype", "", "shape ")), rng.choice(SOUND)))
        if fault == "ignored":
            pairs.append(("y", self.value()))
        rng.shuffle(pairs)
        return self.join(b"{", [self.pair(*p) for p in pairs], b"}")

    def metadata(self, fault):
        rng = self.rng
        pairs = [
            self.pair(
                rng.choice(("k", "l", "\n", "\xe9")),
                self.value() if fault else spell(rng, rng.choice(("", "v", "\0", "\N{GRINNING FACE}", '"\\/'))),
            )
            for _ in range(rng.randrange(4))
        ]
        return self.pair("__metadata__", rng.choice(SOUND) if fault == "null" else self.join(b"{", pairs, b"}"))

    def file(self):
        rng = self.rng
        count = rng.randrange(5)
        names = rng.sample(NAMES, count) if rng.random() < 0.95 else rng.choices(NAMES, k=count)
        faults = [None] * count
        if count and rng.random() < 0.5:
            kinds = ("numbers", "value", "element", "missing", "twice", "ignored")
            faults[rng.randrange(count)] = rng.choice(kinds)
        members, end = [], 0
        for name, fault in zip(names, faults, strict=True):
            tensor = self.tensor(end)
            end = tensor[-1]
            members.append(self.pair(name, self.entry(*tensor, fault)))
        rng.shuffle(members)
        for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 1, 1, 2))):
            fault = rng.choice((None,) * 12 + ("null", "value"))
            members.insert(rng.randrange(len(members) + 1), self.metadata(fault))
        header = self.space() + self.join(b"{", members, b"}") + self.space() + b" " * rng.randrange(8)
        off = rng.choice((0,) * 40 + (1, -1))
        return build(header, rng.randbytes(max(0, end + rng.choice((0,) * 40 + (1, -1)))), len(header) + off)


@pytest.mark.parametrize("seed", range(10 if THOROUGH else 5))
def test_verdicts_on_made_files_agree(seed, tmp_path):
    maker = Maker(random.Random(seed))
    verdicts = Counter()
    for k in range(1000):
        content = maker.file()
        reason = compare(content)
        verdicts[reason, ours(content)[0] is not None] += 1
        if k % 4 == 0 and reason is None and ours(content)[0] is not None:
            compare_metadata(content, tmp_path / "made.safetensors")
    assert verdicts[None, True] > 200
    assert verdicts[None, False] > 200
