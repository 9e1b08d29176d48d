"""safetensors 0.8.0 beside us on every malformed case and on thousands of mutated files.

Both must refuse, or both accept and show the same, but for the differences listed here.
"""

import random
import re

import pytest
import safetensors
from malformed.build import ACCEPTED, CASES, GOOD_HEADER, build, change, one

import safeload

# What only safetensors accepts: our message, and why we refuse.
ONLY_UPSTREAM = {
    "the name is there twice": "one tensor would hide the other",
    "dtype: found '{' where a string": 'serde takes an enum also as {"F32": null}; no writer makes that',
    "no array can have the shape": "numpy refuses it when the tensor is asked for; we say so when the file is opened",
    "shape has more than 64 dims": "likewise",
}

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


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_both_accept_is_the_same(name):
    assert compare(ACCEPTED[name]) is None
    assert ours(ACCEPTED[name])[0] is not None


EXAMPLES = [
    (
        build(
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"\0",
        ),
        "the name is there twice",
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
    assert compare(content) == reason


def test_every_listed_difference_has_an_example():
    assert {reason for _, reason in EXAMPLES} == {*ONLY_UPSTREAM, *ONLY_US}


TOKENS = [
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"0", b"1", b"-1", b"16", b"18446744073709551616", b"1.0", b"1e3",
    b"null", b"true", b'""', b"[]", b"{}", b" ", b"\n", b"\0", b"\x1f", b"\x7f", b"\xff", b"\xc3\xa9", b"\\u0061",
    b"\\ud83d\\ude00", b"\\ud800", b'"F32"', b'"U8"', b'"F4"', b'"a"', b'"b"', b'"dtype":', b'"shape":',
    b'"__metadata__":{},',
]  # fmt: skip

SEEDS = [GOOD_HEADER, *(content[8 : 8 + int.from_bytes(content[:8], "little")] for content in ACCEPTED.values())]


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


@pytest.mark.parametrize("seed", range(20))
def test_verdicts_on_mutated_files_agree(seed):
    rng = random.Random(seed)
    accepted = 0
    for _ in range(1000):
        content = mutate(rng)
        compare(content)
        accepted += ours(content)[0] is not None
    assert 50 < accepted < 950  # both verdicts were exercised
