"""The prose of docstrings, comments and pages uses common words about as often as other libraries of the field do."""

import ast
import functools
import re
from collections import Counter

import pytest
from builders.paths import ROOT
from builders.sources import parsed

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

# Occurrences per 1,000 words: least and most, measured over docstrings and comments of attrs, urllib3, aiohttp, NumPy,
# JAX, pydantic, click and pytest, with a margin. A rate outside is a symptom: rewrite the sentence, not the word.
RATES = {
    "what": (0, 1.0),
    "those": (0, 0.6),
    "others": (0, 0.3),
    "whose": (0, 0.9),
    "them": (0, 1.7),
    "that": (0, 13),
    "where": (0, 2.2),
    "one": (0, 3.0),
    "if": (6, 99),
    "should": (0.3, 9),
    "can": (1.5, 9),
}
# Names that tell how a value came about, not what it is.
GRAMMAR = {
    *("found", "one", "given", "wanted", "made", "said", "several", "some", "few", "most", "held", "others", "them"),
    *("asked", "told"),
}
MOST_GRAMMAR = 12

SOURCES = sorted((ROOT / "safeload").rglob("*.py"))
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)


# A string, in which # begins no comment, or a comment: tokenize takes ten times as long.
TOKEN = re.compile(
    r"""(\"{3}|'{3})(?:\\.|(?!\1).)*\1|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(#[^\n]*)""",
    re.DOTALL,
)


@functools.cache
def words_and_variables(text):
    """The words of docstrings and comments, without code, and the variables that are named after grammar."""
    prose = [token[2] for token in TOKEN.finditer(text) if token[2]]
    docstrings = filter(None, parsed(text).docstrings)
    prose += [re.sub(r"(?m)^\s*(>>>|\.\.\.).*$|``[^`]*``|`[^`]*`", " ", docstring) for docstring in docstrings]
    variables = []
    if not GRAMMAR.isdisjoint(re.findall(r"\w+", TOKEN.sub(" ", text))):
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name) and node.id in GRAMMAR)
        variables = [node.id for node in nodes if isinstance(node.ctx, ast.Store)]
    return re.findall(r"[a-z]+", " ".join(prose).lower()), variables


def words_of_source(text):
    return words_and_variables(text)[0]


def words_of_page(text):
    """The words of a page, without code blocks, code and link targets."""
    text = re.sub(r"(?ms)^```.*?^```", "", text)
    return re.findall(r"[a-z]+", re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", text).lower())


def outside(words):
    counts = Counter(words)
    rates = {word: 1000 * counts[word] / len(words) for word in RATES}
    return {word: round(rate, 2) for word, rate in rates.items() if not RATES[word][0] <= rate <= RATES[word][1]}


@pytest.mark.parametrize(
    ("paths", "words_of"), [(SOURCES, words_of_source), (PAGES, words_of_page)], ids=["code", "pages"]
)
def test_words_are_as_frequent_as_in_other_libraries(paths, words_of):
    assert outside([word for path in paths for word in words_of(path.read_text("utf-8"))]) == {}


def test_variables_are_named_for_their_content():
    names = Counter(name for path in SOURCES for name in words_and_variables(path.read_text("utf-8"))[1])
    assert sum(names.values()) <= MOST_GRAMMAR, names


def test_rates_outside_are_found():
    assert outside(["what"] * 10 + ["if"] * 10 + ["can", "should"] * 3 + ["x"] * 900) == {"what": 10.8}
    assert words_of_source('"""One `two`.\n\n>>> three\n"""  # four\n') == ["four", "one"]
    assert words_and_variables("found = 1\nx.found = others")[1] == ["found"]
    code = "x = '\\'#one' + \"'#two\" + r'''\n#three'''  # four 'five\n# six\"\n"
    assert words_of_source(code) == ["four", "five", "six"]
    assert words_of_page("One `two` [three](four)\n```text\nfive\n```\n") == ["one", "three"]
