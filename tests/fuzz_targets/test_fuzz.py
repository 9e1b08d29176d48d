"""The targets in Python over their corpora and over random changes of them; see README.md here for longer runs."""

import sys

import pytest
from builders.thorough import THOROUGH, part_of
from fuzz_targets import corpus, targets
from hypothesis import given, settings
from hypothesis import strategies as st

import safeload


@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_target_holds_for_every_input_that_is_known(name):
    inputs, seeds = corpus.read(name), corpus.seeds(name)
    assert len(inputs) + len(seeds) > 4
    for data in (*inputs, *part_of(seeds, 0, 6)):  # other tests have the other seeds
        targets.TARGETS[name](data)


def bent(data, content):
    """The content with pieces of it replaced, left out or put in twice."""
    content = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at, end = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
        end = min(end, at + 16)
        new = st.one_of(st.binary(max_size=8), st.sampled_from([content[at:end] * 2, b"\xff" * (end - at), b"\0" * 8]))
        content[at:end] = data.draw(new)
    return bytes(content)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_target_holds_for_bent_inputs(name):
    inputs = corpus.seeds(name)

    @given(st.data())
    @settings(max_examples=100 if THOROUGH else 12, deadline=10_000)  # ms: any one takes a few
    def hold(data):
        targets.TARGETS[name](bent(data, data.draw(st.sampled_from(inputs))))

    hold()


# ---- what the targets look for is found ----


def test_an_import_and_a_foreign_file_are_seen():
    with pytest.raises(targets.Broken, match="import"), targets.watched():
        import this_module_is_not_there  # noqa: F401
    with pytest.raises(targets.Broken, match="'open'"), targets.watched(), open(sys.executable, "rb"):
        pass
    with targets.watched():
        pass


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (safeload.SafeloadError(), 1),
        (safeload.FormatError("a\x1b[2J"), 1),
        (safeload.FormatError("a", "path", 2), 1),
        (safeload.FormatError("a", "path", -1), 1),
    ],
)
def test_a_bad_refusal_is_seen(error, size):
    targets.check_refusal(safeload.FormatError("a", "path", 1), 1)
    with pytest.raises(targets.Broken):
        targets.check_refusal(error, size)


def test_another_exception_is_no_refusal(monkeypatch):
    def fails(*_, **__):
        raise IndexError

    monkeypatch.setattr(targets.safeload, "open", fails)
    with pytest.raises(IndexError):
        targets.torch(b"")
