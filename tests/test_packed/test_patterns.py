"""Patterns of module names: they match as `re` does, in linear time, and whatever is not in the subset is refused."""

import random
import re
import time
import warnings

import pytest
from builders.inside import Pattern

from safeload import UnsupportedError

pytestmark = pytest.mark.no_core

ATOMS = [
    "a", "b", "c", ".", "\\.", "\\d", "\\w", "[ab]", "[^a]", "[a-c]", "(a|b)", "(?:ab|c)", "a*", "b+", "c?", ".*",
    "(a*)*",
    "(ab)*", "|", "^", "$", "(", ")", "a*?", "[a", "]", "\\", "{2}", "(?=a)", "1", "_", "-", "[\\d-]", "[a\\-c]",
    "[]a]", "(|a)",
    "()", "(a|)", "\\s", "\\S", "\\W", "\\b", "(?i)", "**", "[a-]", "[-a]", "[b-a]", "[\\w.]", "a|^b", "(^a)",
    "a$|b", "$a",
    "[^\\d]", "\\/", "\\-", "[\\.-z]", "[a\\]b]", "+", "?", "[+--]", "a??", "(a+)+b",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_random_patterns_match_as_those_of_re(seed):
    random_ = random.Random(seed)
    taken = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3000):
            text = "".join(random_.choice(ATOMS) for _ in range(random_.randrange(1, 7)))
            try:
                pattern = Pattern(text, "config_groups")
            except UnsupportedError:
                continue
            other = re.compile(text, re.ASCII)  # whatever is taken is a regular expression
            taken += 1
            for _ in range(4):
                name = "".join(random_.choice("abc.1_-/ \u00e9") for _ in range(random_.randrange(8)))
                assert pattern.matches(name) == bool(other.match(name)), (text, name)
    assert taken > 500


@pytest.mark.parametrize(
    "text",
    [
        "re", ".*lm_head", ".*mlp.gate$", "model.layers.0.self_attn.q_proj", r".*self_attn\.(q|k|v)_proj$",
        "^lm_head$",
        r"model\.layers\.\d+\.mlp\..*", ".*(gate|up|down)_proj.*", "vision_tower.*", r".*\.experts\.[0-9]+\.w[123]",
        "(?:.*_proj|lm_head)",
    ],
    ids=range(11),
)  # fmt: skip
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj", "lm_head", "model.layers.11.mlp.gate", "model.layers.3.mlp.gate_proj",
        "vision_tower.encoder", "model.layers.1.mlp.experts.12.w2", "",
    ],
    ids=range(7),
)  # fmt: skip
def test_published_patterns(text, name):
    assert Pattern(text, "config_groups").matches(name) == bool(re.match(text, name))


@pytest.mark.parametrize(
    "text",
    [
        "(a", "a)", "[a", "[]", "\\", "a{3}", "(?=a)", "(?P<a>b)", "(?i)a", "(?!a)", "(?#a)", "\\b", "\\1", "\\S",
        "*", "a**",
        "[z-a]", "[\\d-z]", "a^", "^*", "a" * 1001, "(" * 900, "(" * 400 + ")" * 400,
    ],
    ids=range(23),
)  # fmt: skip
def test_whatever_is_not_in_the_subset_is_refused(text):
    with pytest.raises(UnsupportedError, match=r"^config_groups: ") as caught:
        Pattern(text, "config_groups")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text", ["(a*)*" * 200, "(a|a|a|a)*" * 100, ("a?" * 250) + ("a" * 250), "(.*.*.*)*" * 100, "((a+)+)+" * 100 + "b"],
    ids=range(5),
)  # fmt: skip
def test_no_pattern_takes_longer_than_its_length_times_that_of_the_name(text):
    begin = time.process_time()
    Pattern(text, "config_groups").matches("a" * 1000)
    assert time.process_time() - begin < 10


def test_errors_show_the_pattern_escaped():
    with pytest.raises(UnsupportedError) as caught:
        Pattern("(\x1b[31m", "config_groups")
    assert "\x1b" not in str(caught.value)
