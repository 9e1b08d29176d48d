"""docs/pictures/make.py: terminals as SVG keep the text, its columns and its colours."""

import importlib.util
import xml.etree.ElementTree as ET

import pytest
from builders.paths import ROOT

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "pictures" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(make, printed, mode="light"):
    root = ET.fromstring(make.terminal_svg("safeload check <x>", printed, mode))
    assert root.find(f"{SVG}title").text == "safeload check <x>"
    return {found.text: found.attrib for found in root.iter(f"{SVG}text")}


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_and_weights_are_those_of_the_codes(make, mode):
    found = texts(make, "\x1b[31;1merror\x1b[0m plain\n\x1b[33mwarning\x1b[0m \x1b[2mdim\x1b[0m", mode)
    colours = make.MODES[mode]
    assert (found["error"]["fill"], found["error"]["font-weight"]) == (colours["31"], "bold")
    assert found["warning"]["fill"] == colours["33"]
    assert found["dim"]["fill"] == colours["2"]
    assert found["plain"]["fill"] == colours["text"]
    assert "font-weight" not in found["plain"]


def test_columns_and_rows_are_those_of_the_terminal(make):
    found = texts(make, "tensor    size\n\n  \x1b[1ma & <b>\x1b[0m   4 B")
    column = [float(found[text]["x"]) for text in ("tensor", "size", "a & <b>", "4 B")]
    assert [round((x - make.FRAME) / make.WIDTH) for x in column] == [0, 10, 2, 12]
    rows = [float(found[text]["y"]) for text in ("safeload check <x>", "tensor", "a & <b>")]
    assert [(y - rows[0]) / make.HEIGHT for y in rows] == [0, 1, 3]
    assert float(found["a & <b>"]["textLength"]) == pytest.approx(7 * make.WIDTH)
