"""The words that users and readers meet: the field's (docs/how-it-works.md), not phrases that read as translated."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What reads as translated, an example of it, and what a native speaker writes.
PHRASES = (
    (r"\bthere twice\b", "the name is there twice", "duplicate"),
    (r"\bgiven twice\b", "dtype is given twice", "duplicate"),
    (r"\bgiven often\b", "may be given often", "may be repeated"),
    (r"\bable are\b", "able are float64 and float32", "supported are"),
    (r"\b(?:what|as many as) helps?\b", "as many as help", "chosen automatically"),
    (r"\bno \w+ to (?:load|save) as\b", "int8 is no dtype to load as", "cannot load as"),
    (r"(?<!there )\b(?:is|are) no (?!longer\b|more\b)", "33 is no multiple of 32", "is not a"),
    (r"\bwhat is no\b", "what is no text", "values that are not"),
    (r"\ball that is no\b", "all that is no tensor", "everything that is not"),
    (r"\b(?:is|are) none of\b", "'x' is none of int8, q4_0", "unknown ..., expected one of"),
    (r"\bversions but\b", "versions but 2 and 3", "other than"),
    (r"(?<!all |not )\bbut for\b", "zero but for the tier", "except for"),
    (r"\blikewise\b", "likewise a multiple of 3", "also, in the same way"),
    (r"\b(?:as|are|is) so many\b|\bof so many\b|\bso many (?:bytes|elements|tensors)\b", "so many bytes of UTF-8", "n"),
    (r"\bshall\b", "what shall outlive the rest", "should, must"),
    (r"\btold by\b", "told by dtype", "recognised by"),
    (r"\btaken for\b", "codes are taken for weights", "treated as"),
    (r"\blets? (?:it|them) pass\b", "upstream lets it pass", "accepts"),
    (r"\bside by side\b", "columns lie side by side", "contiguous, adjacent"),
    (r"\bnobody\b", "nobody writes them", "no known writer"),
    (r"\bat memory's limit\b", "f64 is at memory's limit", "limited by memory"),
    (r"\bspelled out\b", "four elements, spelled out", "unrolled, written out"),
    (r"\bmended\b", "found and mended", "fixed"),
    (r"\bfloors?\b", "the floor below", "layer"),
    (r"\bdoors?\b", "one door for folders", "entry point"),
    (r"\bpassages?\b", "bytes of a passage", "staging buffer"),
    (r"\brestor(?:e|es|ed) to\b|\brestored blocks?\b", "the values that they restore to", "dequantize"),
    (r"\bsummer\b|\bsift|\bexamines?\b", "a summer sifts", "accumulator, filter, check"),
    (r"\bfold(?:s|ed|ing)?\b", "lanes are folded", "reduce"),
    (r"\bbent\b", "a bent file", "corrupted, mutated"),
)

FILES = (
    "*.md",
    "docs/**/*.md",
    "tests/*/README.md",
    "benches/README.md",
    "csrc/**/*.md",
    "csrc/**/*.c",
    "csrc/**/*.h",
    "safeload/**/*.py",
)
# BENCHMARKS.md is generated.
GENERATED = {ROOT / "BENCHMARKS.md"}


def files_of(patterns):
    return {path for pattern in patterns for path in ROOT.glob(pattern)} - GENERATED


CHECKED = sorted(files_of(FILES))


def words_of(path):
    """The text as one line. Sessions are left out of pages: the texts that they show stand in the code."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        text = re.sub(r"^```(?:pycon|console)$.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return " ".join(re.sub(r"^\s*\*\s", " ", text, flags=re.MULTILINE).split())


@pytest.mark.parametrize("path", CHECKED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_text_is_in_the_words_of_the_field(path):
    text = words_of(path)
    found = [
        f"{text[max(0, hit.start() - 40) : hit.end() + 40]!r}: write {better!r}"
        for pattern, _, better in PHRASES
        for hit in re.finditer(pattern, text, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("pattern", "example"), [row[:2] for row in PHRASES], ids=[row[1] for row in PHRASES])
def test_a_phrase_is_found_in_its_example(pattern, example):
    assert re.search(pattern, example, re.IGNORECASE)


def test_pages_headers_and_sources_are_among_the_files():
    names = {path.relative_to(ROOT).as_posix() for path in CHECKED}
    assert {"README.md", "docs/guide/loading.md", "csrc/sl_api.h", "csrc/formats/gguf.c"} <= names
