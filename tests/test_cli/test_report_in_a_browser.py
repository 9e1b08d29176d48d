"""The page of ``safeload report`` in Chromium: nothing is cut off, all of it can be read, in both modes and widths.

Needs Debian's chromium and chromium-driver, and selenium. Where CI sets SAFELOAD_BROWSER, their absence is a failure.
A folder in SAFELOAD_SCREENSHOTS gets the pictures.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from builders.browser import missing, screenshot, set_media, set_window, start
from builders.inside import main
from builders.models import small, write_folder
from builders.paths import DATA

from safeload.numpy import save_file

WIDTHS = (420, 1200)
MODES = ("light", "dark")
PAGES = ("real file", "layers", "faults", "truncated")

# What every check needs: texts with their rectangles, and the ground behind an element.
SHARED = """
const texts = () => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.data.trim() || parent.closest("svg title") || !parent.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    found.push({node, parent, boxes: [...range.getClientRects()]});
  }
  return found;
};
const parse = (text) => {
  const n = text.match(/[\\d.]+/g).map(Number);
  return [...n.slice(0, 3), n[3] ?? 1];
};
const over = (a, b) => [...[0, 1, 2].map((k) => a[k] * a[3] + b[k] * (1 - a[3])), 1];
const ground = (element) => {
  let colour = [0, 0, 0, 0], layers = [];
  for (let e = element; e; e = e.parentElement) layers.unshift(parse(getComputedStyle(e).backgroundColor));
  return layers.reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
};
const light = (c) => {
  const [r, g, b] = c.slice(0, 3).map((x) => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (a, b) => {
  const [x, y] = [light(a), light(b)].sort((m, n) => n - m);
  return (x + 0.05) / (y + 0.05);
};
"""

# Texts and boxes that stick out of the window or of their section, or that a box cuts off.
CUT = """
const found = [], root = document.documentElement, wide = root.clientWidth;
if (root.scrollWidth > wide) found.push(`the page scrolls: ${root.scrollWidth}`);
for (const e of document.querySelectorAll("body *")) {
  const box = e.getBoundingClientRect();
  if (!e.closest(".scroll table") && (box.right > wide + 0.5 || box.left < -0.5)) found.push(e.outerHTML.slice(0, 200));
  const style = getComputedStyle(e);
  if (!e.matches(".scroll") && style.overflowX != "visible" && e.scrollWidth > e.clientWidth && !e.closest("svg"))
    found.push(`${e.tagName} ${e.className} cuts its content`);
}
for (const {node, parent, boxes} of texts()) {
  const around = parent.closest("section, header, footer").getBoundingClientRect();
  if (!parent.closest(".scroll") && boxes.some((b) => b.right > around.right + 0.5 || b.left < around.left - 0.5))
    found.push(`${node.data} sticks out`);
}
for (const axis of document.querySelectorAll(".x, .y")) {
  const seen = [...axis.children].filter((e) => e.checkVisibility());
  const boxes = seen.map((e) => [e.textContent, e.getBoundingClientRect()]);
  for (const [k, [a, one]] of boxes.entries())
    for (const [b, other] of boxes.slice(k + 1))
      if (one.left < other.right + 6 && other.left < one.right + 6 && one.top < other.bottom && other.top < one.bottom)
        found.push(`${a} and ${b} touch`);
}
return found;
"""

# Boxes that scroll: whether they do, can be reached by keyboard, have shadows, and a hint stands above them.
SCROLLING = """
return [...document.querySelectorAll(".scroll")].map((e) => [
  e.scrollWidth > e.clientWidth,
  e.tabIndex === 0 && getComputedStyle(e).overflowX === "auto",
  getComputedStyle(e).backgroundImage.includes("gradient"),
  e.previousElementSibling.matches(".hint") && e.previousElementSibling.checkVisibility(),
]);
"""

PALE_TEXTS = """
const found = [];
for (const {node, parent} of texts()) {
  const style = getComputedStyle(parent), behind = ground(parent);
  const ratio = contrast(over(parse(parent.closest("svg") ? style.fill : style.color), behind), behind);
  if (ratio < 4.5) found.push(`${node.data.slice(0, 50)}: ${ratio.toFixed(2)}`);
}
return [texts().length, found];
"""

PALE_MARKS = """
const found = [], marks = document.querySelectorAll(
  '.bar span, .legend i:not(.step), .plot path:not(.rule), .heat path[fill-opacity="1"]'
);
for (const e of marks) {
  const style = getComputedStyle(e), html = !e.closest("svg");
  const colour = html ? style.backgroundColor : style.stroke != "none" ? style.stroke : style.fill;
  const behind = ground(e.parentElement);
  const ratio = contrast(over(parse(colour), behind), behind);
  if (ratio < 3) found.push(`${e.outerHTML.slice(0, 80)}: ${ratio.toFixed(2)}`);
}
return [marks.length, found];
"""


@pytest.fixture(scope="module")
def browser():
    lacking = missing()
    if lacking:
        assert not os.environ.get("SAFELOAD_BROWSER"), f"not installed: {', '.join(lacking)}"
        pytest.skip(f"not installed: {', '.join(lacking)}")
    driver = start()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of a real file, of a model with layers, of one with many faults, and of half a file."""
    folder = tmp_path_factory.mktemp("pages")
    real = DATA / "silero_vad_16k.safetensors"
    config, tensors = small("llama-gqa")
    (folder / "layers").mkdir()
    write_folder(folder / "layers", config, tensors)
    rng = np.random.default_rng(3)
    faults = {f"model.layers.{k}.{kind}.weight": rng.normal(0, 99, (8, 8)) for k in range(119) for kind in "qkv"}
    faults |= {"<b>&amp;" * 30: np.float32([[np.nan, 1e9]]), "x" * 200: np.ones((3, 3)), "empty": np.zeros((0, 7))}
    save_file(faults, folder / "faults.safetensors", {"key": "long value " * 50})
    (folder / "truncated.safetensors").write_bytes(real.read_bytes()[:-1000])
    sources = (real, folder / "layers", folder / "faults.safetensors", folder / "truncated.safetensors")
    for name, path in zip(PAGES, sources, strict=True):
        main(["report", str(path), "--quantize", "q8_0", "-o", str(folder / f"{name}.html")])
    return folder


def show(browser, path, mode, width):
    """Opens a page with all its lists."""
    set_media(browser, mode)
    set_window(browser, width, 900)
    browser.get(path.as_uri())
    folder = os.environ.get("SAFELOAD_SCREENSHOTS")
    if folder:
        name = f"{path.stem}-{mode}-{width}.png".replace(" ", "-")
        Path(folder, name).write_bytes(screenshot(browser, whole=True))
    browser.execute_script("for (const e of document.querySelectorAll('details')) e.open = true")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read(browser, pages, name, mode, width):
    show(browser, pages / f"{name}.html", mode, width)
    assert browser.execute_script(SHARED + CUT) == []
    count, pale = browser.execute_script(SHARED + PALE_TEXTS)
    assert count > 10
    assert pale == []
    count, pale = browser.execute_script(SHARED + PALE_MARKS)
    assert (count > 5) == (name != "truncated")
    assert pale == []
    paper = browser.execute_script(SHARED + "return light(ground(document.querySelector('section')))")
    assert paper > 0.9 if mode == "light" else paper < 0.05
    boxes = browser.execute_script(SCROLLING)
    assert any(scrolls for scrolls, *_ in boxes) == (width == 420 and name != "truncated")
    for scrolls, can_scroll, shadows, hint in boxes:
        assert can_scroll
        assert shadows
        assert hint or not scrolls or width > 700


def test_dark_pages_are_printed_on_white_paper_with_short_lists_open(browser, pages):
    show(browser, pages / "layers.html", "dark", 1200)
    browser.get((pages / "layers.html").as_uri())
    set_media(browser, "dark", "print")
    assert browser.execute_script(SHARED + "return ground(document.querySelector('section'))") == [255, 255, 255, 1]
    assert browser.execute_script(SHARED + PALE_TEXTS)[1] == []
    cells = browser.execute_script(
        "return [...document.querySelectorAll('details td')].map((e) => e.checkVisibility())"
    )
    assert len(cells) > 100
    assert all(cells)


def test_the_browser_reports_no_violation_of_the_policy(browser, pages):
    show(browser, pages / "faults.html", "light", 1200)
    assert [entry["message"] for entry in browser.get_log("browser")] == []
