"""Globs of module names: they match as `fnmatch` does, in time that no glob can make long."""

import fnmatch
import random
import time

import pytest
from builders.inside import Globs

from safeload import UnsupportedError

pytestmark = pytest.mark.no_core

ATOMS = ["a", "b", ".", "*", "?", "[ab]", "[!a]", "[a-c]", "[", "]", "**", "[]a]", "[!]a]", "\\", "[\\a]", "[^a]", "-"]


@pytest.mark.parametrize("seed", range(2))
def test_random_globs_match_as_those_of_fnmatch(seed):
    random_ = random.Random(seed)
    taken = matched = 0
    for _ in range(1000):
        text = "".join(random_.choice(ATOMS) for _ in range(random_.randrange(7)))
        try:
            globs = Globs([text], "layer_quant_config")
        except UnsupportedError:
            continue
        taken += 1
        for _ in range(6):
            name = "".join(random_.choice("aabbc.-]\\[!^") for _ in range(random_.randrange(6)))
            want = fnmatch.fnmatchcase(name, text)
            matched += want
            assert (globs.first(name) is not None) == want, (text, name)
    assert taken > 800
    assert matched > 200


def test_the_first_that_matches_counts_whether_name_or_glob():
    globs = Globs(["*.gate", "a.gate", "a.up", "a.*", "b.down", "*"], "layer_quant_config")
    found = {name: globs.first(name) for name in ("a.gate", "a.up", "a.down", "b.down", "c")}
    assert found == {"a.gate": "*.gate", "a.up": "a.up", "a.down": "a.*", "b.down": "b.down", "c": "*"}
    assert Globs(["a", "a.*b"], "").first("a.c") is None


def test_globs_that_take_others_long_do_not():
    name = "a" * 5000
    begin = time.process_time()
    for text in ("*a" * 400 + "*b", "a*" * 400 + "b", "[ab]*" * 150 + "c"):
        assert Globs([text], "").first(name[: 300 if "[" in text else None]) is None
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("text", ["?" * 2000, "[z-a]"])
def test_what_is_not_matched_is_refused(text):
    with pytest.raises(UnsupportedError, match="layer_quant_config: "):
        Globs([text], "layer_quant_config")
