"""The golden run's comparison: what differs is shown, and rows are accepted only for a reason."""

import pytest
from golden import records

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

OLD = {
    "reads/a/w": "float32 [2] 0123",
    "writes/b/config.json": '{"model_type": "llama"}',
    "errors/c[x]/1": "FormatError: the file has 3 bytes",
    "commands/d": "x" * 900 + "old" + "y" * 900,
}


@pytest.fixture
def folder(tmp_path):
    records.write(OLD, tmp_path)
    return tmp_path


CHANGES = {
    "a byte": ("reads/a/w", "float32 [2] 0124"),
    "a key of JSON": ("writes/b/config.json", '{"modeltype": "llama"}'),
    "a text": ("errors/c[x]/1", "FormatError: the file is short"),
    "the middle of a long text": ("commands/d", "x" * 900 + "new" + "y" * 900),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_shown_with_both_values(case, folder):
    key, value = CHANGES[case]
    difference = records.compare(records.read(folder), {**OLD, key: value})
    assert difference.changed == {key: (OLD[key], value)}
    text = "\n".join(records.shown(difference))
    assert key in text
    if len(value) < records.WIDTH:
        assert OLD[key] in text
        assert value in text
    else:
        assert "old" in text
        assert "new" in text


def test_equal_rows_show_nothing(folder):
    assert list(records.shown(records.compare(records.read(folder), OLD))) == []


def test_rows_come_and_go(folder):
    found = {**OLD, "writes/b/more.safetensors": "8 bytes 00"}
    del found["reads/a/w"]
    difference = records.compare(records.read(folder), found)
    assert (difference.changed, list(difference.missing), list(difference.new)) == (
        {},
        ["reads/a/w"],
        ["writes/b/more.safetensors"],
    )


def test_only_the_first_of_many_are_shown():
    lines = list(records.shown(records.compare({}, {f"k/{n}": "v" for n in range(50)})))
    assert (lines[0], lines[-1]) == ("50 rows new:", "  and 30 more")


def test_a_part_compares_a_part(folder):
    assert not records.compare(records.read(folder), {"reads/a/w": OLD["reads/a/w"]}, "reads/*").keys()


def test_patterns_know_nothing_but_stars():
    assert records.matches("errors/c[x]/*", "errors/c[x]/1")
    assert not records.matches("errors/c[x]", "errors/cx")
    assert records.may_have("writes/", "writes/b*")
    assert records.may_have("writes/b/config.json", "w*")
    assert not records.may_have("reads/", "writes/b*")


def test_accepting_changes_the_rows_that_match_and_says_why(folder):
    found = {**OLD, "reads/a/w": "new", "errors/c[x]/1": "new"}
    assert records.accept(found, "reads/*", "Because\nof this.", folder) == 1
    assert records.read(folder) == {**OLD, "reads/a/w": "new"}
    assert (folder / "CHANGES.md").read_text() == "- `reads/*`: Because of this. (1 changed)\n"
    gone = {key: value for key, value in OLD.items() if not key.startswith("commands/")}
    assert records.accept(gone, "commands/*", "It goes.", folder) == 1
    assert "commands/d" not in records.read(folder)


@pytest.mark.parametrize(("pattern", "reason"), [("reads/*", ""), ("reads/*", " \n"), ("writes/*", "A reason.")])
def test_accepting_needs_a_reason_and_a_change(pattern, reason, folder):
    with pytest.raises(ValueError, match="needs --reason" if not reason.strip() else "no row that differs matches"):
        records.accept({**OLD, "reads/a/w": "new"}, pattern, reason, folder)
    assert records.read(folder) == OLD
    assert not (folder / "CHANGES.md").exists()
