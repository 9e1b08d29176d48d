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
fault("header past the end", "ends past the end of the file", 0, build(length=len(GOOD_HEADER) + 25))
fault("header of no bytes", "'{' was expected", 8, build(b"", b""))
fault("truncated data", "which has 23 bytes", B, build()[:-1])
fault("no data", "which has 0 bytes", A, build(data=b""))
fault("trailing byte", "1 bytes belong to no tensor", len(build()), build() + b"\0")
fault("data without tensors", "8 bytes belong to no tensor", 10, build(b"{}", bytes(8)))

# ---- ranges ----

fault("hole", "a hole of 4 bytes", B, build(GOOD_HEADER.replace(b"[16,24]", b"[20,28]"), bytes(28)))
fault("overlap", "an overlap of 8 bytes", B, change(b"[16,24]", b"[8,16]"))
fault(
    "same range twice",
    "an overlap of 16 bytes",
    At(b'"d"'),
    build(
        b'{"c":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},"d":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}}',
        bytes(16),
    ),
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
    None,
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
    "65 dims",
    "tensor 't': shape has more than 64 dims",
    None,
    one(b'{"dtype":"U8","shape":[' + b",".join([b"1"] * 65) + b'],"data_offsets":[0,1]}', b"\0"),
    LimitError,
)

# ---- entries ----

fault("unknown dtype", "tensor 'a': dtype 'F33' is none of BOOL F4", At(b'"F33"'), change(b"F32", b"F33"))
fault("dtype in lower case", "dtype 'f32' is none of", At(b'"f32"'), change(b"F32", b"f32"))
fault("empty dtype", "dtype '' is none of", At(b'"",'), change(b'"F32"', b'""'))
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
for field in (b'"dtype":"F32",', b'"shape":[2,2],'):
    key = field[1 : field.index(b'"', 1)].decode()
    fault(f"{key} is missing", f"tensor 'a': {key} is missing", A, change(field, b""))
    fault(
        f"{key} twice", f"tensor 'a': {key} is given twice", At(field + field, len(field)), change(field, field + field)
    )
fault("data_offsets is missing", "tensor 'a': data_offsets is missing", A, change(b',"data_offsets":[0,16]', b""))
fault(
    "data_offsets twice",
    "tensor 'a': data_offsets is given twice",
    At(b',"data_offsets":[0,16],"d', 23),
    change(b',"data_offsets":[0,16]', b',"data_offsets":[0,16],"data_offsets":[0,16]'),
)
fault("entry is null", "tensor entry: found 'n' where '{' was expected", At(b"null"), one(b"null"))
fault("entry is a string", "tensor entry: found '\"' where '{'", At(b'"x"'), one(b'"x"'))
fault("entry as a short array", "has 3 elements, found fewer", T, one(b'["U8",[1]]', b"\0"))
fault("entry as a long array", "has 3 elements, found more", T, one(b'["U8",[1],[0,1],0]', b"\0"))
fault("entry as an empty object", "dtype is missing", T, one(b"{}"))

# ---- names and metadata ----

fault(
    "a name twice",
    "tensor 'a': the name is there twice, first at byte",
    At(b'"a":{"dtype":"I64"'),
    change(b'"b"', b'"a"'),
)
fault(
    "a name twice, once escaped", "tensor 'a': the name is there twice", At(b'"\\u0061"'), change(b'"b"', b'"\\u0061"')
)
fault(
    "metadata twice",
    "__metadata__ is given twice",
    At(b'"__metadata__":{}'),
    change(b'"a":{', b'"__metadata__":{},"a":{'),
)
fault("metadata value is a number", "__metadata__: found '1' where a string", At(b"1}"), change(b'"np"', b"1"))
fault("metadata value is null", "__metadata__: found 'n' where a string", At(b"null"), change(b'"np"', b"null"))
fault("metadata value is an object", "__metadata__: found '{' where a string", At(b"{}"), change(b'"np"', b"{}"))
fault("metadata is a list", "__metadata__: found '[' where '{'", At(b"[]"), change(b'{"format":"np"}', b"[]"))
fault("metadata is a string", "__metadata__: found '\"' where '{'", At(b'"x"'), change(b'{"format":"np"}', b'"x"'))
fault("metadata is nul", "found 'n' where a JSON value", At(b"nul,"), change(b'{"format":"np"}', b"nul"))

# ---- JSON ----

fault("header is a list", "the header: found '[' where '{' was expected", 8, build(b"[]", b""))
fault("header is null", "the header: found 'n' where '{'", 8, build(b"null", b""))
fault("header of spaces", "the header's JSON ends where '{'", 12, build(b"    ", b""))
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
    "a control character that is not escaped (byte 0x01)",
    At(b"\x01"),
    change(b'"a"', b'"\x01"'),
)
fault("newline in a name", "a control character that is not escaped (byte 0x0a)", At(b"\n"), change(b'"a"', b'"\n"'))
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
for name, bad in (
    ("a bare word", b"yes"),
    ("NaN", b"NaN"),
    ("half a number", b"-"),
    ("1.", b"1."),
    (".5", b".5"),
    ("1e", b"1e"),
    ("01", b"01"),
    ("+1", b"+1"),
    ("0x1", b"0x1"),
    ("True", b"True"),
    ("nothing", b""),
):
    fault(
        f"ignored field is {name}",
        "was expected" if bad != b"01" else "leading zero",
        None,
        change(b'"dtype":"F32"', b'"x":' + bad + b',"dtype":"F32"'),
    )
fault(
    "129 levels in an ignored field",
    "nested deeper than 128",
    None,
    change(b'"dtype":"F32"', b'"x":' + b"[" * 129 + b"]" * 129 + b',"dtype":"F32"'),
    LimitError,
)
fault(
    "a megabyte of brackets",
    "nested deeper than 128",
    None,
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
    "metadata key twice": change(b'{"format":"np"}', b'{"format":"pt","format":"np"}'),
    "metadata last": build(
        GOOD_HEADER.replace(b'"__metadata__":{"format":"np"},', b"")[:-1] + b',"__metadata__":{"k":"v"}}'
    ),
    "unknown fields": change(b'"dtype":"F32"', b'"x":[1,{"y":[-1.5e-3,true,false,null,""]}],"dtype":"F32","z":{}'),
    "unknown field twice": change(b'"dtype":"F32"', b'"x":1,"x":2,"dtype":"F32"'),
    "100 levels in an ignored field": change(b'"dtype":"F32"', b'"x":' + b"[" * 100 + b"]" * 100 + b',"dtype":"F32"'),
    "fields in another order": change(
        b'{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}', b'{"data_offsets":[0,16],"shape":[2,2],"dtype":"F32"}'
    ),
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
    "64 dims": one(b'{"dtype":"U8","shape":[' + b",".join([b"1"] * 32) + b'],"data_offsets":[0,1]}', b"\0"),
    "header not in the order of the bytes": build(
        b'{"z":{"dtype":"U8","shape":[2],"data_offsets":[4,6]},"y":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"x":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}}',
        bytes(6),
    ),
}
