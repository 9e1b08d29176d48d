"""Malformed safetensors files by single fault injection: each case is a good file with one thing wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from safeload import FormatError, LimitError

LENGTH = 8  # bytes before the header

# The good file: two tensors, metadata, 24 bytes of data.
GOOD_HEADER = (
    b'{"__metadata__":{"format":"np"},'
    b'"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
    b'"b":{"dtype":"I64","shape":[],"data_offsets":[16,24]}}'
)
GOOD_DATA = bytes(range(24))


def build(header: bytes = GOOD_HEADER, data: bytes = GOOD_DATA, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


class Case(NamedTuple):
    name: str
    content: bytes
    error: type[Exception]
    message: str
    offset: int | None


@dataclass(frozen=True)
class At:
    """The place of a text in the file: of its first occurrence, plus ``after`` bytes."""

    text: bytes
    after: int = 0

    def find(self, content: bytes) -> int:
        return content.index(self.text) + self.after


CASES: list[Case] = []


def fault(
    name: str,
    message: str,
    offset: int | At | None,
    content: bytes,
    error: type[Exception] = FormatError,
) -> None:
    place = offset.find(content) if isinstance(offset, At) else offset
    CASES.append(Case(name, content, error, message, place))


def change(old: bytes, new: bytes) -> bytes:
    """The good file with one text of its header replaced."""
    assert GOOD_HEADER.count(old) == 1, old
    return build(GOOD_HEADER.replace(old, new))


def one(entry: bytes, data: bytes = b"", name: bytes = b'"t"') -> bytes:
    return build(b"{" + name + b":" + entry + b"}", data)


A, B = At(b'"a"'), At(b'"b"')
T = At(b'"t"')

# ---- size and truncation ----

for n in range(8):
    fault(f"file of {n} bytes", f"the file has {n} bytes", n, build()[:n])
fault("header size over the limit", "header too large: 100000001 bytes", 0, build(length=100_000_001))
fault("header size of 2^64-1", "header too large: 18446744073709551615 bytes", 0, build(length=2**64 - 1))
fault("header size at the limit in a short file", "ends past the end of the file", 0, build(length=100_000_000))
fault("header past the end", "ends past the end of the file", 0, build(length=len(GOOD_HEADER) + 25))
fault(
    "header over all of the data",
    "found byte 0x00 where the end of the header",
    At(b"}}", 2),
    build(length=len(GOOD_HEADER) + 24),
)
fault(
    "header size one too large",
    "found byte 0x00 where the end of the header",
    At(b"}}", 2),
    build(length=len(GOOD_HEADER) + 1),
)
fault(
    "header size one too small", "ends where ',' or '}' was expected", At(b"}}", 1), build(length=len(GOOD_HEADER) - 1)
)
fault("header of no bytes", "'{' was expected", 8, build(b"", b""))
fault("truncated data", "which has 23 bytes", B, build()[:-1])
fault("no data", "which has 0 bytes", A, build(data=b""))
fault("trailing byte", "1 bytes belong to no tensor", len(build()), build() + b"\0")
fault("data without tensors", "8 bytes belong to no tensor", 10, build(b"{}", bytes(8)))

# ---- ranges ----

fault("hole", "a hole of 4 bytes", B, build(GOOD_HEADER.replace(b"[16,24]", b"[20,28]"), bytes(28)))
fault("overlap", "an overlap of 8 bytes", B, change(b"[16,24]", b"[8,16]"))
fault("overlap of one byte", "an overlap of 1 bytes", B, build(GOOD_HEADER.replace(b"[16,24]", b"[15,23]"), bytes(23)))
fault(
    "same range twice",
    "an overlap of 16 bytes",
    At(b'"d"'),
    build(
        b'{"c":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},"d":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}}',
        bytes(16),
    ),
)
fault(
    "empty tensor inside another",
    "an overlap of 8 bytes",
    At(b'"z"'),
    change(b',"b"', b',"z":{"dtype":"U8","shape":[0],"data_offsets":[8,8]},"b"'),
)
fault(
    "empty tensor past the data",
    "a hole of 1 bytes",
    At(b'"z"'),
    change(b',"b"', b',"z":{"dtype":"U8","shape":[0],"data_offsets":[25,25]},"b"'),
)
fault(
    "both ranges moved from 0",
    "a hole of 8 bytes",
    A,
    build(GOOD_HEADER.replace(b"[0,16]", b"[8,24]").replace(b"[16,24]", b"[24,32]"), bytes(32)),
)
fault(
    "begin and end exchanged",
    "end before they begin",
    T,
    one(b'{"dtype":"U8","shape":[0],"data_offsets":[4,0]}', bytes(4)),
)
fault("first range not at 0", "a hole of 1 bytes", T, one(b'{"dtype":"U8","shape":[1],"data_offsets":[1,2]}', bytes(2)))
fault(
    "range ends before it begins",
    "end before they begin",
    T,
    one(b'{"dtype":"U8","shape":[0],"data_offsets":[1,0]}', b"\0"),
)
fault(
    "range past the data",
    "end past the data, which has 24 bytes",
    B,
    build(GOOD_HEADER.replace(b"[16,24]", b"[16,32]").replace(b'"shape":[]', b'"shape":[2]')),
)
fault(
    "huge range",
    "hold 18446744073709551615 bytes, but U8 [1] needs 1",
    T,
    one(b'{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551615]}', b"\0"),
)

# ---- shapes ----

fault(
    "size is not shape times dtype",
    "tensor 'a': data_offsets [0, 16) hold 16 bytes, but F32 [2, 3] needs 24",
    A,
    change(b"[2,2]", b"[2,3]"),
)
fault(
    "wrong dtype", "tensor 'a': data_offsets [0, 16) hold 16 bytes, but F64 [2, 2] needs 32", A, change(b"F32", b"F64")
)
fault("empty shape with data", "but F32 [0, 2] needs 0", A, change(b"[2,2]", b"[0,2]"))
fault(
    "elements overflow",
    "tensor 't': the size of U8 [4294967296, 4294967296] does not fit in 64 bits",
    T,
    one(b'{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}'),
)
fault(
    "bytes overflow",
    "the size of F64 [4611686018427387904] does not fit in 64 bits",
    T,
    one(b'{"dtype":"F64","shape":[4611686018427387904],"data_offsets":[0,0]}'),
)
fault(
    "overflow before a zero",
    "does not fit in 64 bits",
    T,
    one(b'{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}'),
)
fault(
    "empty shape that no array has",
    "no array can have the shape of U8 [0, 4294967296, 4294967296]",
    T,
    one(b'{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}'),
    LimitError,
)
fault(
    "F4 of an odd number",
    "F4 [3] is not a whole number of bytes",
    T,
    one(b'{"dtype":"F4","shape":[3],"data_offsets":[0,2]}', bytes(2)),
)
fault(
    "F6 of 2 elements",
    "F6_E2M3 [2] is not a whole number of bytes",
    T,
    one(b'{"dtype":"F6_E2M3","shape":[2],"data_offsets":[0,2]}', bytes(2)),
)
fault(
    "F6 of 3 elements",
    "F6_E3M2 [3] is not a whole number of bytes",
    T,
    one(b'{"dtype":"F6_E3M2","shape":[3],"data_offsets":[0,2]}', bytes(2)),
)
fault(
    "F4 of no dims",
    "F4 [] is not a whole number of bytes",
    T,
    one(b'{"dtype":"F4","shape":[],"data_offsets":[0,1]}', b"\0"),
)
fault(
    "elements of 2^64",
    "the size of U8 [2, 9223372036854775808] does not fit in 64 bits",
    T,
    one(b'{"dtype":"U8","shape":[2,9223372036854775808],"data_offsets":[0,0]}'),
)
fault(
    "65 dims",
    "tensor 't': shape has more than 64 dims",
    At(b"[1,1"),
    one(b'{"dtype":"U8","shape":[' + b",".join([b"1"] * 65) + b'],"data_offsets":[0,1]}', b"\0"),
    LimitError,
)

# ---- entries ----

fault("unknown dtype", "tensor 'a': unknown dtype 'F33', expected one of BOOL F4", At(b'"F33"'), change(b"F32", b"F33"))
fault("dtype in lower case", "unknown dtype 'f32', expected one of", At(b'"f32"'), change(b"F32", b"f32"))
fault("empty dtype", "unknown dtype '', expected one of", At(b'"",'), change(b'"F32"', b'""'))
for code in (
    b"F128",
    b"BF17",
    b"float32",
    b"F32 ",
    b"F3",
    b"F8_E4M3FNUZZ",
    b"\\u0000F32",
    "F\N{FULLWIDTH DIGIT THREE}2".encode(),
):
    fault(f"dtype {code!r}", "expected one of BOOL F4", At(b'"' + code + b'"'), change(b"F32", code))
fault("dtype is a number", "dtype: found '3' where a string was expected", At(b"32,"), change(b'"F32"', b"32"))
fault("dtype is null", "dtype: found 'n' where a string", At(b"null"), change(b'"F32"', b"null"))
fault("shape is a number", "shape: found '4' where '[' was expected", At(b"4,"), change(b"[2,2]", b"4"))
fault("shape is null", "shape: found 'n'", At(b"null"), change(b"[2,2]", b"null"))
fault("shape holds a string", "shape: found '\"' where an integer", At(b'"2"'), change(b"[2,2]", b'["2",2]'))
fault("shape holds a list", "shape: found '[' where an integer", At(b"[[2]", 1), change(b"[2,2]", b"[[2],2]"))
fault("negative dim", "shape: found '-' where an integer", At(b"-2"), change(b"[2,2]", b"[-2,2]"))
fault("fractional dim", "shape: found '.' where the end of an integer", At(b"2.0", 1), change(b"[2,2]", b"[2.0,2]"))
fault("dim with an exponent", "found 'e' where the end of an integer", At(b"2e0", 1), change(b"[2,2]", b"[2e0,2]"))
fault("leading zero", "shape: the number has a leading zero", At(b"02"), change(b"[2,2]", b"[02,2]"))
fault(
    "dim of 2^64",
    "shape: the number does not fit in 64 bits",
    At(b"18446744073709551616"),
    change(b"[2,2]", b"[18446744073709551616,2]"),
)
fault(
    "dim of a thousand digits",
    "the number does not fit in 64 bits",
    At(b"9999"),
    change(b"[2,2]", b"[" + b"9" * 1000 + b"]"),
)
fault("data_offsets is null", "data_offsets: found 'n'", At(b"null"), change(b"[0,16]", b"null"))
fault("one offset", "data_offsets must be two integers, found fewer", At(b"[16]"), change(b"[0,16]", b"[16]"))
fault(
    "three offsets", "data_offsets must be two integers, found more", At(b"[0,16,16]"), change(b"[0,16]", b"[0,16,16]")
)
fault("offsets as text", "data_offsets: found '\"'", At(b'"0"'), change(b"[0,16]", b'["0",16]'))
fault("negative offset", "data_offsets: found '-'", At(b"-1"), change(b"[0,16]", b"[-1,16]"))
# Every kind of JSON value in every place that wants another; a number as text and a number that is no integer too.
NUMBERS = (b"-0", b"-1", b"1.0", b"1e0", b"1E2", b"00", b"18446744073709551616", b"9" * 1000)
KINDS = (b"null", b"true", b"false", b"7", b'"7"', b"[7]", b"{}", b'{"F32":null}')
for field, good, first, wanted in (
    ("dtype", b'"F32"', b'"', "a string"),
    ("shape", b"[2,2]", b"[", "'['"),
    ("data_offsets", b"[0,16]", b"[", "'['"),
):
    for bad in (*KINDS, *NUMBERS):
        if bad[:1] != first:
            key = b'"' + field.encode() + b'":'
            fault(
                f"{field} is {bad[:24].decode()}",
                f"{field}: found '{bad[:1].decode()}' where {wanted} was expected",
                At(key + bad, len(key)),
                change(key + good, key + bad) if field != "data_offsets" else change(good, bad),
            )
for field, good, before, after in (("shape", b"[2,2]", b"[2,", b"]"), ("data_offsets", b"[0,16]", b"[", b",16]")):
    for bad in (*KINDS, *NUMBERS):
        if bad == b"7":
            continue
        message, k = {
            b"00": (f"{field}: the number has a leading zero", 0),
            b"18446744073709551616": (f"{field}: the number does not fit in 64 bits", 0),
            b"9" * 1000: (f"{field}: the number does not fit in 64 bits", 0),
            b"1.0": (f"{field}: found '.' where the end of an integer", 1),
            b"1e0": (f"{field}: found 'e' where the end of an integer", 1),
            b"1E2": (f"{field}: found 'E' where the end of an integer", 1),
        }.get(bad, (f"{field}: found '{bad[:1].decode()}' where an integer", 0))
        fault(
            f"{field} holds {bad[:24].decode()}",
            message,
            At(before + bad + after, len(before) + k),
            change(good, before + bad + after),
        )
fault("data_offsets is empty", "data_offsets must be two integers, found fewer", At(b"[]}"), change(b"[0,16]", b"[]"))
for field in (b'"dtype":"F32",', b'"shape":[2,2],'):
    key = field[1 : field.index(b'"', 1)].decode()
    fault(f"{key} is missing", f"tensor 'a': {key} is missing", A, change(field, b""))
    fault(f"{key} twice", f"tensor 'a': duplicate {key}", At(field + field, len(field)), change(field, field + field))
fault("data_offsets is missing", "tensor 'a': data_offsets is missing", A, change(b',"data_offsets":[0,16]', b""))
fault(
    "data_offsets twice",
    "tensor 'a': duplicate data_offsets",
    At(b',"data_offsets":[0,16],"d', 23),
    change(b',"data_offsets":[0,16]', b',"data_offsets":[0,16],"data_offsets":[0,16]'),
)
fault(
    "dtype twice, once escaped",
    "tensor 'a': duplicate dtype",
    At(b'"\\u0064type"'),
    change(b'"shape":[2,2]', b'"\\u0064type":"F32","shape":[2,2]'),
)
for bad in (b"true", b"7", b"-1"):
    fault(
        f"entry is {bad.decode()}", f"tensor entry: found '{bad[:1].decode()}' where '{{'", At(b":" + bad, 1), one(bad)
    )
fault("entry as an empty array", "has 3 elements, found fewer", T, one(b"[]"))
fault(
    "entry as an array in another order",
    "dtype: found '['",
    At(b"[1]"),
    one(b'[[1],"U8",[0,1]]', b"\0"),
)
fault("entry is null", "tensor entry: found 'n' where '{' was expected", At(b"null"), one(b"null"))
fault("entry is a string", "tensor entry: found '\"' where '{'", At(b'"x"'), one(b'"x"'))
fault("entry as a short array", "has 3 elements, found fewer", T, one(b'["U8",[1]]', b"\0"))
fault("entry as a long array", "has 3 elements, found more", T, one(b'["U8",[1],[0,1],0]', b"\0"))
fault("entry as an empty object", "dtype is missing", T, one(b"{}"))

# ---- names and metadata ----

fault(
    "a name twice",
    "tensor 'a': duplicate name, first at byte",
    At(b'"a":{"dtype":"I64"'),
    change(b'"b"', b'"a"'),
)
fault("a name twice, once escaped", "tensor 'a': duplicate name", At(b'"\\u0061"'), change(b'"b"', b'"\\u0061"'))
fault(
    "metadata twice",
    "duplicate __metadata__",
    At(b'"__metadata__":{}'),
    change(b'"a":{', b'"__metadata__":{},"a":{'),
)
fault(
    "metadata twice, once escaped",
    "duplicate __metadata__",
    At(b'"\\u005f_metadata__"'),
    change(b'"a":{', b'"\\u005f_metadata__":{},"a":{'),
)
fault(
    "metadata twice, once null",
    "duplicate __metadata__",
    At(b'"__metadata__":null'),
    change(b'"a":{', b'"__metadata__":null,"a":{'),
)
fault(
    "metadata looks like a tensor",
    "__metadata__: found '[' where a string",
    At(b"[2]"),
    change(b'{"format":"np"}', b'{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'),
)
for bad in (b"true", b"[]", b"-1.5", b'{"a":"b"}'):
    fault(
        f"metadata value is {bad.decode()}",
        f"__metadata__: found '{bad[:1].decode()}' where a string",
        At(b'"format":' + bad, 9),
        change(b'"np"', bad),
    )
for bad in (b"true", b"7"):
    fault(f"metadata is {bad.decode()}", "__metadata__: found", At(b":" + bad, 1), change(b'{"format":"np"}', bad))
fault("metadata value is a number", "__metadata__: found '1' where a string", At(b"1}"), change(b'"np"', b"1"))
fault("metadata value is null", "__metadata__: found 'n' where a string", At(b"null"), change(b'"np"', b"null"))
fault("metadata value is an object", "__metadata__: found '{' where a string", At(b"{}"), change(b'"np"', b"{}"))
fault("metadata is a list", "__metadata__: found '[' where '{'", At(b"[]"), change(b'{"format":"np"}', b"[]"))
fault("metadata is a string", "__metadata__: found '\"' where '{'", At(b'"x"'), change(b'{"format":"np"}', b'"x"'))
fault("metadata is nul", "found 'n' where a JSON value", At(b"nul,"), change(b'{"format":"np"}', b"nul"))

# ---- JSON ----

fault("header is a list", "the header: found '[' where '{' was expected", 8, build(b"[]", b""))
fault("header is null", "the header: found 'n' where '{'", 8, build(b"null", b""))
fault("header of spaces", "the JSON ends where '{'", 12, build(b"    ", b""))
fault("header with a byte order mark", "the header: found byte 0xef where '{'", 8, build(b"\xef\xbb\xbf{}", b""))
fault("no closing brace", "ends where ',' or '}' was expected", 8 + len(GOOD_HEADER) - 1, build(GOOD_HEADER[:-1]))
fault("text after the header", "found 'x' where the end of the header", At(b"}x", 1), build(GOOD_HEADER + b"x"))
fault("two objects", "found '{' where the end of the header", At(b"}{}", 1), build(GOOD_HEADER + b"{}"))
fault("NUL padding", "found byte 0x00 where the end of the header", At(b"}}\0", 2), build(GOOD_HEADER + b"\0\0"))
fault("trailing comma", "found '}' where a name in quotes", At(b",}", 1), build(GOOD_HEADER[:-1] + b",}"))
fault("comma first", "found ',' where a name in quotes", 9, build(b"{," + GOOD_HEADER[1:]))
fault("two commas", "found ',' where a name in quotes", At(b",,", 1), change(b',"a"', b',,"a"'))
fault("no comma", "found '\"' where ',' or '}'", At(b'}"a"', 1), change(b',"a"', b'"a"'))
fault("trailing comma in a shape", "found ']' where a value", At(b",]", 1), change(b"[2,2]", b"[2,2,]"))
fault("comment", "found '/' where", At(b"/*"), change(b',"a"', b',/**/"a"'))
fault("name without quotes", "found 'a' where a name in quotes", At(b"a:{"), change(b'"a"', b"a"))
fault("name in single quotes", "found ''' where a name in quotes", At(b"'a'"), change(b'"a"', b"'a'"))
fault("no colon", "found '{' where ':'", At(b'"a"{', 3), change(b'"a":', b'"a"'))
fault("string without end", "has no closing quote", At(b'"a'), build(b'{"a'))
fault("string that ends in a backslash", "invalid escape", At(b"\\"), build(b'{"a\\'))
fault("unknown escape", "invalid escape (byte 0x5c)", At(b"\\x"), change(b'"a"', b'"\\x61"'))
fault("short unicode escape", "invalid escape", At(b"\\u"), change(b'"a"', b'"\\u61"'))
fault("unicode escape of no digits", "invalid escape", At(b"\\u"), change(b'"a"', b'"\\u00g1"'))
fault("lone high surrogate", "invalid escape", At(b"\\ud800"), change(b'"a"', b'"\\ud800"'))
fault("lone low surrogate", "invalid escape", At(b"\\udc00"), change(b'"a"', b'"\\udc00"'))
fault("two high surrogates", "invalid escape", At(b"\\ud800"), change(b'"a"', b'"\\ud800\\ud800"'))
fault(
    "control character in a name",
    "an unescaped control character (byte 0x01)",
    At(b"\x01"),
    change(b'"a"', b'"\x01"'),
)
fault("newline in a name", "an unescaped control character (byte 0x0a)", At(b"\n"), change(b'"a"', b'"\n"'))
for name, bad in (
    ("lone continuation byte", b"\x80"),
    ("overlong slash", b"\xc0\xaf"),
    ("overlong three bytes", b"\xe0\x80\xaf"),
    ("overlong four bytes", b"\xf0\x80\x80\xaf"),
    ("encoded surrogate", b"\xed\xa0\x80"),
    ("above U+10FFFF", b"\xf4\x90\x80\x80"),
    ("byte 0xff", b"\xff"),
    ("character cut short", b"\xe2\x82"),
    ("five-byte form", b"\xf8\x88\x80\x80\x80"),
):
    fault(f"invalid UTF-8: {name}", "invalid UTF-8", At(bad), change(b'"a"', b'"' + bad + b'"'))
    fault(f"invalid UTF-8 in a value: {name}", "invalid UTF-8", At(bad), change(b'"np"', b'"' + bad + b'"'))
fault("invalid UTF-8 outside of strings", "found byte 0xff where", At(b"\xff"), change(b',"a"', b',\xff"a"'))
# The byte is that of the first character that cannot be part of a value: so many after the value's first.
for bad, k in (
    (b"yes", 0),
    (b"tru", 0),
    (b"nulll", 4),
    (b"True", 0),
    (b"NaN", 0),
    (b"Infinity", 0),
    (b"-Infinity", 1),
    (b"-", 1),
    (b"--1", 1),
    (b"+1", 0),
    (b"1.", 2),
    (b"1.e3", 2),
    (b".5", 0),
    (b"1e", 2),
    (b"1e+", 3),
    (b"01", 1),
    (b"-01", 2),
    (b"0x1", 1),
    (b"1_000", 1),
    (b"'x'", 0),
    (b"/*x*/1", 0),
    (b"//x\n1", 0),
    (b"[1,]", 3),
    (b"[1 2]", 3),
    (b"[,1]", 1),
    (b"[1}", 2),
    (b'{"k"}', 4),
    (b'{"k":}', 5),
    (b"{k:1}", 1),
    (b'{"k":1,}', 7),
    (b'{"k":1]', 6),
    (b"{1:1}", 1),
    (b"", 0),
    (b"\x0b1", 0),
    (b"\xa0", 0),
    (b"\0", 0),
):
    fault(
        f"ignored field is {bad!r}",
        "leading zero" if bad in (b"01", b"-01") else "was expected",
        At(b'"x":' + bad, 4 + k),
        change(b'"dtype":"F32"', b'"x":' + bad + b',"dtype":"F32"'),
    )
for bad, fragment in ((b"\\x", "invalid escape"), (b"\x1f", "an unescaped control"), (b"\xc0\x80", "invalid UTF-8")):
    fault(
        f"ignored string holds {bad!r}",
        fragment,
        At(b'"x":"' + bad, 5),
        change(b'"dtype":"F32"', b'"x":"' + bad + b'","dtype":"F32"'),
    )
    fault(
        f"ignored name holds {bad!r}",
        fragment,
        At(b'"x":{"' + bad, 6),
        change(b'"dtype":"F32"', b'"x":{"' + bad + b'":1},"dtype":"F32"'),
    )

# serde_json, and so upstream, stops at its level 128; the header and the entry are the first two.
DEEPEST = 125


def nested(levels: int, opening: bytes = b"[", inner: bytes = b"", closing: bytes = b"]") -> bytes:
    """The good file with an ignored field of so many levels."""
    return change(b'"dtype":"F32"', b'"x":' + opening * levels + inner + closing * levels + b',"dtype":"F32"')


fault(
    "too many lists in an ignored field",
    "nested deeper than",
    At(b'"x":[', 4 + DEEPEST),
    nested(DEEPEST + 1),
    LimitError,
)
fault(
    "too many objects in an ignored field",
    "nested deeper than",
    At(b'"x":{', 4 + DEEPEST * len(b'{"k":')),
    nested(DEEPEST + 1, b'{"k":', b"1", b"}"),
    LimitError,
)
fault(
    "a megabyte of brackets",
    "nested deeper than",
    At(b'"x":[', 4 + DEEPEST),
    change(b'"dtype":"F32"', b'"x":' + b"[" * 1_000_000 + b',"dtype":"F32"'),
    LimitError,
)

# Well-formed all the same.
ACCEPTED = {
    "good": build(),
    "white space before": build(b" \t\r\n" + GOOD_HEADER),
    "white space after": build(GOOD_HEADER + b" \t\r\n"),
    "white space everywhere": change(b'"a":{"dtype"', b' "a" : { "dtype" '),
    "unaligned data": build(GOOD_HEADER + b" " * (-len(GOOD_HEADER) % 8 + 1)),
    "metadata is null": change(b'{"format":"np"}', b"null"),
    "empty metadata": change(b'{"format":"np"}', b"{}"),
    "metadata of empty texts": change(b'{"format":"np"}', b'{"":""}'),
    "metadata key twice": change(b'{"format":"np"}', b'{"format":"pt","format":"np"}'),
    "metadata last": build(
        GOOD_HEADER.replace(b'"__metadata__":{"format":"np"},', b"")[:-1] + b',"__metadata__":{"k":"v"}}'
    ),
    "unknown fields": change(b'"dtype":"F32"', b'"x":[1,{"y":[-1.5e-3,true,false,null,""]}],"dtype":"F32","z":{}'),
    "unknown field twice": change(b'"dtype":"F32"', b'"x":1,"x":2,"dtype":"F32"'),
    "the deepest lists in an ignored field": nested(DEEPEST),
    "the deepest objects in an ignored field": nested(DEEPEST, b'{"k":', b"1", b"}"),
    "a long row of empty lists": change(b'"dtype":"F32"', b'"x":[' + b"[]," * 10_000 + b'0],"dtype":"F32"'),
    "numbers of every form": change(
        b'"dtype":"F32"',
        b'"x":[0,-0,1,-1,0.5,-0.5,1e3,1E3,1e+3,1e-3,0e0,1.5e-7,123456789012345678901234567890],"dtype":"F32"',
    ),
    "fields in another order": change(
        b'{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}', b'{"data_offsets":[0,16],"shape":[2,2],"dtype":"F32"}'
    ),
    "escaped metadata name": change(b'"__metadata__"', b'"\\u005f\\u005fmetadata__"'),
    "names close to the metadata's": build(
        b'{"__metadata":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"__metadata__ ":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        bytes(2),
    ),
    "field names close to the known ones": change(b'"dtype":"F32"', b'"Dtype":1,"dtype ":2,"shap":3,"dtype":"F32"'),
    "escaped field names": change(b'"dtype":"F32"', b'"d\\u0074ype":"F\\u0033\\u0032"'),
    "entry as an array": change(b'{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}', b'["F32",[2,2],[0,16]]'),
    "no tensors": build(b"{}", b""),
    "only metadata": build(b'{"__metadata__":{"a":"b"}}', b""),
    "name with a newline": change(b'"a"', b'"x\\ny"'),
    "name with a NUL": change(b'"a"', b'"x\\u0000y"'),
    "name with a quote": change(b'"a"', b'"x\\"y\\\\"'),
    "empty name": change(b'"a"', b'""'),
    "emoji": change(b'"a"', '"\N{GRINNING FACE}"'.encode()),
    "escaped emoji": change(b'"a"', b'"\\ud83d\\ude00"'),
    "zero-size tensors": one(b'{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]}'),
    "empty tensors between, before and after others": build(
        GOOD_HEADER[:-1] + b',"p":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
        b',"q":{"dtype":"F64","shape":[3,0],"data_offsets":[16,16]}'
        b',"r":{"dtype":"F4","shape":[0],"data_offsets":[24,24]}}'
    ),
    "a scalar in the shortest header": build(b'{"s":["U8",[],[0,1]]}', b"\0"),
    "scalars not in the order of the bytes": build(
        b'{"y":{"dtype":"U8","shape":[],"data_offsets":[1,2]},"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
        bytes(2),
    ),
    "32 dims": one(b'{"dtype":"U8","shape":[' + b",".join([b"1"] * 32) + b'],"data_offsets":[0,1]}', b"\0"),
    "header not in the order of the bytes": build(
        b'{"z":{"dtype":"U8","shape":[2],"data_offsets":[4,6]},"y":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"x":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}}',
        bytes(6),
    ),
}
