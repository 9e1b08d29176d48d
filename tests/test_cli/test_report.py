"""``safeload report``: the page is whole, harmless and works offline."""

import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from builders.models import small, write_folder

from safeload.cli import main
from safeload.numpy import save_file

pytest.importorskip("matplotlib")

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Checks that tags are closed, and keeps ids, references and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tags, self.words, self.sources = [], [], set(), [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
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
    assert re.fullmatch(r"report\.html: [0-9.]+ KiB; tiny is sound\n", out)
    text = (folder.parent / "report.html").read_text()
    page = Page(text)
    assert page.tags.isdisjoint({"script", "iframe", "object", "img", "image", "link"})
    assert all(source.startswith("#") for source in page.sources)
    assert len(page.ids) == len(set(page.ids))
    references = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    assert references <= set(page.ids)
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", text)
    assert "viewport" in text
    words = " ".join(page.words)
    for wanted in ("Where the bytes are", "Over the layers", "How large values are", "Quantized to q4_0", "llama"):
        assert wanted in words
    assert text.count("<svg") == 5
    assert "model.layers.2.mlp.up_proj.weight" in page.words


def test_the_same_file_gives_the_same_page(folder, capsys):
    for name in ("one.html", "two.html"):
        assert report(capsys, "tiny", "-o", name)[0] == 0
    assert (folder.parent / "one.html").read_bytes() == (folder.parent / "two.html").read_bytes()


def test_a_bad_file_has_a_page_too(folder, capsys):
    evil = "<script>alert(1)</script>\x1b[2J&$x$"
    tensors = {evil: np.float32([[np.nan, 1], [2, 3]]), "h.0.w": np.ones((2, 32)), "h.1.w": np.full((2, 32), np.inf)}
    save_file(tensors, "bad.safetensors", {"<b>": "<i>"})
    status, out, _ = report(capsys, "bad.safetensors", "-o", "bad.html", "--json", "--quantize", "q8_0")
    found = json.loads(out)
    assert (status, found["ok"], found["output"]) == (1, False, "bad.html")
    text = (folder.parent / "bad.html").read_text()
    page = Page(text)
    assert page.tags.isdisjoint({"script", "i"})
    assert found["nbytes"] == len(text.encode())
    assert "value.nan" in page.words
    assert "\x1b" not in text
    path = folder.parent / "bad.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    status, out, _ = report(capsys, "bad.safetensors", "-o", "bad.html")
    assert status == 1
    assert "NOT SOUND: 1 error" in out
    assert "file.format" in Page((folder.parent / "bad.html").read_text()).words


def test_odd_files(folder, capsys):
    save_file({}, "empty.safetensors")
    assert report(capsys, "empty.safetensors")[0] == 1
    save_file({"n": np.arange(3), "z": np.zeros(0), "c": np.complex64([1]), "zero": np.zeros(4)}, "odd.safetensors")
    assert report(capsys, "odd.safetensors", "--quantize", "int8")[0] == 0
    Page((folder.parent / "report.html").read_text())


def test_a_missing_file(folder, capsys):
    assert report(capsys, "missing") == (1, "", "safeload: No such file or directory: missing\n")
    assert not (folder.parent / "report.html").exists()


def test_without_matplotlib(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "safeload.cli.report_plots", raising=False)
    message = "safeload: report needs matplotlib: pip install 'safeload[report]'\n"
    assert report(capsys, "tiny") == (2, "", message)


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
    assert out.endswith("half.safetensors is NOT SOUND: 1 error\n")
    text = (tmp_path / "report.html").read_text()
    assert "NOT SOUND: 1 error" in text
    assert "file.hole" in text
    assert "was the download finished?" in text


def test_what_was_not_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config, tensors = small("llama-gqa")
    tensors["v_head.weight"] = np.float32([1, 2])
    status, out, _ = report(capsys, write_folder(tmp_path, config, tensors))
    assert status == 0
    assert out.endswith(" is sound as far as it was checked: 1 note\n")
    assert "head.unchecked" in (tmp_path / "report.html").read_text()
