"""``safeload report``: the page is whole, harmless and works offline."""

import hashlib
import json
import os
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from builders.inside import main, report_page
from builders.models import small, write_folder
from builders.paths import DATA

from safeload import __version__
from safeload.numpy import save_file

VOID = {"meta", "br", "link", "img", "hr", "input", "wbr"}


class Page(HTMLParser):
    """Checks that tags are closed, and keeps ids, references, attributes of drawings and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tags, self.words, self.sources = [], [], set(), [], []
        self.drawings, self.headings, self.heads = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "svg":
            self.drawings.append(dict(attributes))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "th":
            self.heads.append(dict(attributes).get("scope"))
        for key, value in attributes:
            if key == "id":
                self.ids.append(value)
            if key in ("src", "href", "xlink:href", "action"):
                self.sources.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def report(capsys, *arguments):
    status = main(["report", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    config, tensors = small("llama-gqa")
    (tmp_path / "tiny").mkdir()
    return write_folder(tmp_path / "tiny", config, tensors)


def test_a_good_folder(folder, capsys):
    status, out, err = report(capsys, "tiny", "--quantize", "q4_0")
    assert (status, err) == (0, "")
    assert re.fullmatch(r"report\.html: [0-9.]+ KiB; tiny: no errors\n", out)
    text = (folder.parent / "report.html").read_text("utf-8")
    page = Page(text)
    assert page.tags.isdisjoint({"script", "iframe", "object", "img", "image", "link"})
    assert all(source.startswith("#") for source in page.sources)
    assert len(page.ids) == len(set(page.ids))
    references = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    assert references <= set(page.ids)
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", text)
    assert "viewport" in text
    words = " ".join(page.words)
    for wanted in ("Size breakdown", "Values by layer", "Magnitude distribution", "quantized to q4_0"):
        assert wanted in words
    assert "llama" in page.words
    assert "model.layers.2.mlp.up_proj.weight" in name_cells(text)


def name_cells(text):
    return [cell.replace("<wbr>", "") for cell in re.findall(r'<th scope="row" class="name mono">(.*?)</th>', text)]


def test_screen_readers_get_names_of_drawings_and_cells(folder, capsys):
    report(capsys, "tiny", "--quantize", "q4_0")
    text = (folder.parent / "report.html").read_text("utf-8")
    page = Page(text)
    assert '<html lang="en">' in text
    assert len(page.drawings) > 20
    assert all(drawing["role"] == "img" and drawing["aria-label"] for drawing in page.drawings)
    assert text.count("<svg") == len(re.findall(r"<svg[^>]*><title>[^<]+</title>", text))
    assert set(page.heads) == {"col", "row"}
    assert page.headings[0] == 1
    assert all(2 <= level <= before + 1 for before, level in zip(page.headings, page.headings[1:], strict=False))


def test_the_same_file_gives_the_same_page_at_the_same_date(folder, capsys, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for name in ("one.html", "two.html"):
        assert report(capsys, "tiny", "-o", name)[0] == 0
    assert (folder.parent / "one.html").read_bytes() == (folder.parent / "two.html").read_bytes()
    assert b"2023-11-14 22:13:20 UTC" in (folder.parent / "one.html").read_bytes()
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert report(capsys, "tiny", "-o", "now.html")[0] == 0
    assert b"2023-11-14" not in (folder.parent / "now.html").read_bytes()


@pytest.mark.parametrize("given", ["", "-1", "soon", "1e9", "9" * 13, "253402300800", "²"])
def test_a_date_that_is_not_one(folder, capsys, monkeypatch, given):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", given)
    status, _, err = report(capsys, "tiny")
    assert (status, err) == (2, f"safeload: SOURCE_DATE_EPOCH must be seconds since 1970, got {given!r}\n")


def test_the_head_says_what_the_page_is_about(folder, capsys):
    path = DATA / "silero_vad_16k.safetensors"
    assert report(capsys, path)[0] == 0
    text = (folder.parent / "report.html").read_text("utf-8")
    page = Page(text)
    for wanted in (str(path), "1.18 MiB (1,239,748 bytes)", hashlib.sha256(path.read_bytes()).hexdigest()):
        assert wanted in page.words
    assert f"safeload {__version__}" in page.words
    assert "<h1>silero_vad_16k.safetensors</h1>" in text


def test_every_file_of_a_folder_has_a_digest_unless_it_is_not_wanted(folder, capsys):
    def digests():
        return re.findall(r">([0-9a-f]{64})<", (folder.parent / "report.html").read_text("utf-8"))

    assert report(capsys, "tiny")[0] == 0
    shards = sorted(folder.glob("*.safetensors"))
    assert digests() == [hashlib.sha256(shard.read_bytes()).hexdigest() for shard in shards]
    assert report(capsys, "tiny", "--no-digest")[0] == 0
    assert digests() == []


def test_a_bad_file_has_a_page_too(folder, capsys):
    evil = "<script>alert(1)</script>\x1b[2J&$x$"
    tensors = {evil: np.float32([[np.nan, 1], [2, 3]]), "h.0.w": np.ones((2, 32)), "h.1.w": np.full((2, 32), np.inf)}
    save_file(tensors, "bad.safetensors", {"<b>": "<u>"})
    status, out, _ = report(capsys, "bad.safetensors", "-o", "bad.html", "--json", "--quantize", "q8_0")
    found = json.loads(out)
    assert (status, found["ok"], found["output"]) == (1, False, "bad.html")
    text = (folder.parent / "bad.html").read_text("utf-8")
    page = Page(text)
    assert page.tags.isdisjoint({"script", "u"})
    assert found["nbytes"] == len(text.encode())
    assert "value.nan" in page.words
    assert "\x1b" not in text
    path = folder.parent / "bad.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    status, out, _ = report(capsys, "bad.safetensors", "-o", "bad.html")
    assert status == 1
    assert "1 error" in out
    assert "file.format" in Page((folder.parent / "bad.html").read_text("utf-8")).words


def test_odd_files(folder, capsys):
    save_file({}, "empty.safetensors")
    assert report(capsys, "empty.safetensors")[0] == 1
    save_file({"n": np.arange(3), "z": np.zeros(0), "c": np.complex64([1]), "zero": np.zeros(4)}, "odd.safetensors")
    assert report(capsys, "odd.safetensors", "--quantize", "int8")[0] == 0
    Page((folder.parent / "report.html").read_text("utf-8"))


def test_a_missing_file(folder, capsys):
    assert report(capsys, "missing") == (1, "", "safeload: No such file or directory: missing\n")
    assert not (folder.parent / "report.html").exists()


def text_of(folder, name="report.html"):
    return (folder.parent / name).read_text("utf-8")


def test_names_are_escaped_in_charts_and_their_labels(folder, capsys):
    evil = '"><script>alert(1)</script>'
    save_file({f"h.{k}.{evil}": np.ones((8, 8)) for k in range(3)}, f"{'x' if os.name == 'nt' else '<b>'}.safetensors")
    name = next(path.name for path in folder.parent.glob("*.safetensors"))
    assert report(capsys, name, "--quantize", "q8_0")[0] == 0
    page = Page(text_of(folder))
    assert page.tags.isdisjoint({"script", "b>"})
    assert any(evil in drawing["aria-label"] for drawing in page.drawings)


def test_findings_that_say_the_same_are_one_with_a_list(folder, capsys):
    wide = {f"h.{k}.{kind}": np.float32([[-999, k]]) for k in range(40) for kind in "abcdefg"}
    save_file(wide, "wide.safetensors")
    assert report(capsys, "wide.safetensors")[0] == 0
    text = text_of(folder)
    assert text.count('<li class="warning">') == 1
    assert "280 tensors" in text
    assert all(f"<code>{name}</code>" in text for name in wide)


def test_many_findings_and_tensors_are_listed_up_to_a_limit(folder, capsys):
    save_file({f"t{k}": np.float32([[999, k]]) for k in range(5100)}, "many.safetensors")
    assert report(capsys, "many.safetensors")[0] == 0
    text = text_of(folder)
    assert "and 4,099 more; safeload check --json lists all" in text
    assert "the first 5,000 of 5,100 tensors" in text
    assert "Not printed: the first 5,000 of 5,100 tensors." in text
    assert len(text) < 2 << 20


@pytest.mark.parametrize(
    ("tensors", "mood"),
    [
        ({"w": np.float32([[1, 2]])}, "good"),
        ({"w": np.float32([[1, 999]])}, "odd"),
        ({"w": np.float32([[1, np.nan]])}, "bad"),
    ],
    ids=["good", "warning", "error"],
)
def test_the_verdict_has_the_colour_of_the_worst_finding(folder, capsys, tensors, mood):
    save_file(tensors, "x.safetensors")
    report(capsys, "x.safetensors")
    assert re.findall(r'class="verdict (\w+)"', text_of(folder)) == [mood]


def axes(text):
    """The texts of each horizontal axis."""
    return [re.findall(r"<span[^>]*>(.*?)</span>", axis) for axis in re.findall(r'<div class="x">(.*?)</div>', text)]


@pytest.mark.parametrize("layers", [2, 11, 12, 13, 41, 126, 999])
def test_the_axis_of_the_layers_ends_at_the_last_one(folder, capsys, layers):
    save_file({f"h.{k}.w": np.float32([[1, 2]]) for k in range(layers)}, "x.safetensors")
    report(capsys, "x.safetensors")
    drawn = min(layers, 512)
    found = [axis for axis in axes(text_of(folder)) if axis[0] == "0"]
    assert len(found) == 2
    for axis in found:
        assert (axis[0], axis[-1]) == ("0", str(drawn - 1))
        assert [int(text) for text in axis] == sorted({int(text) for text in axis})
        assert len(axis) <= 14
    assert ("The first 512 of 999 layers." in text_of(folder)) == (layers == 999)


@pytest.mark.parametrize(
    ("low", "high"), [(1e-30, 1e30), (0.01, 0.02), (0.5, 0.5), (3, 4000), (0, 0), (1e-45, 1e-44)], ids=str
)
def test_scales_have_few_round_numbers(folder, capsys, low, high):
    save_file({f"h.{k}.w": np.float32([[high if k else low]] * 2) for k in range(3)}, "x.safetensors")
    assert report(capsys, "x.safetensors")[0] == 0
    scales = re.findall(r'<div class="y">(.*?)</div>', text_of(folder))
    assert len(scales) == (2 if high else 1)
    for scale in scales:
        texts = re.findall(r"<span[^>]*>(.*?)</span>", scale)
        assert 1 <= len(texts) <= 6
        assert all(len(text) <= 8 for text in texts)
        assert all(0 <= float(at) <= 100 for at in re.findall(r"bottom:([-0-9.]+)%", scale))


def kinds_of(names):
    return {one.kind for one in report_page.content(dict.fromkeys(names, 1), {}).tensors}


def test_tensors_without_layers_are_shown_by_module_if_they_are_many():
    assert kinds_of(["a.weight", "a.bias", "b"]) == {"a.weight", "a.bias", "b"}
    many = [f"encoder.{name}.{last}" for name in "abcdefg" for last in ("weight", "bias")]
    assert kinds_of(many) == {f"encoder.{name}" for name in "abcdefg"}
    assert kinds_of([f"conv{k}.weight" for k in range(12)]) == {f"conv{k}.weight" for k in range(12)}
    assert kinds_of([f"tensor{k}_{k}.{last}" for k in range(20) for last in "ab"]) == {"tensor{}_{}"}
    assert len(kinds_of([letter * 3 for letter in "abcdefghijklmnopqrst"])) == 20


@pytest.mark.parametrize(
    "names",
    [
        ["9" * 5000 + ".w", "h." + "9" * 5000],
        ["." * 50_000 + "a"] + [f"{k}.." for k in "abcdefghijklm"],
        [""],
        ["{}", "$"],
    ],
    ids=["huge numbers", "many dots", "no name", "braces"],
)
def test_hostile_names_have_kinds_and_labels(names):
    shown = report_page.content(dict.fromkeys(names, 1), {})
    assert [one.name for one in shown.tensors] == names
    assert all(len(label) <= 48 for label in report_page.labels(kinds_of(names)).values())


def test_kinds_with_the_same_end_have_different_labels():
    assert report_page.labels(["text.{}.w.weight", "image.{}.w.weight", "text.{}.v.weight"]) == {
        "text.{}.w.weight": "text.{}.w.weight",
        "image.{}.w.weight": "image.{}.w.weight",
        "text.{}.v.weight": "v",
    }


def test_sizes_as_dtypes_and_schemes(folder, capsys):
    save_file({"w": np.ones((64, 64), np.float16)}, "x.safetensors")
    report(capsys, "x.safetensors")
    rows = re.findall(
        r'class="name">(.*?)</th>.*?"number">(.*?)</td><td class="number share soft">(.*?)<', text_of(folder)
    )
    assert ("as stored", "8 KiB", "1.00x") in rows
    assert ("float32", "16 KiB", "2.00x") in rows
    assert ("q8_0", "4.25 KiB", "0.53x") in rows
    save_file({"w": np.ones((64, 3), np.float16)}, "x.safetensors")  # rows are shorter than blocks
    report(capsys, "x.safetensors")
    assert "int8" in text_of(folder)
    assert "q8_0" not in text_of(folder)


def test_the_page_does_not_replace_the_file_that_it_is_about(folder, capsys):
    shard = "tiny/model-00001-of-00002.safetensors"
    before = (folder.parent / shard).read_bytes()
    for path in ("tiny", shard):
        status, _, err = report(capsys, path, "-o", shard)
        text = f"safeload: {shard} would replace {shard}, which is read: choose another path\n"
        assert (status, err.replace("\\", "/")) == (2, text)
    assert (folder.parent / shard).read_bytes() == before


def test_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    out = capsys.readouterr().out
    assert "examples:\n  safeload report " in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_a_download_that_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "half.safetensors"
    x = np.resize(np.float32([1, 2, 3]), (256, 1024))
    save_file(dict.fromkeys(("a.weight", "b.weight", "c.weight"), x), path)
    with path.open("r+b") as file:
        file.seek(-(2 << 20), 2)
        file.write(bytes(2 << 20))
    status, out, _ = report(capsys, path)
    assert status == 1
    assert out.endswith("half.safetensors: 1 error\n")
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "1 error" in text
    assert "file.hole" in text
    assert "was the download finished?" in text


def test_what_was_not_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config, tensors = small("llama-gqa")
    tensors["v_head.weight"] = np.float32([1, 2])
    status, out, _ = report(capsys, write_folder(tmp_path, config, tensors))
    assert status == 0
    assert out.endswith(": no errors\n")
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "head.unchecked" in text
    assert 'class="verdict calm"' in text


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
def test_no_file_of_the_source_is_replaced_by_the_page(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, tensors = small("llama")
    os.mkdir("model")
    write_folder(tmp_path / "model", config, tensors)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    before = (tmp_path / "model" / name).read_bytes()
    assert main(["report", "model", "-o", f"model/{name}"]) == 2
    assert "which is read: choose another path" in capsys.readouterr().err
    assert (tmp_path / "model" / name).read_bytes() == before
    for _ in range(2):
        assert main(["report", "model", "-o", "model/report.html"]) == 0
