#!/usr/bin/env python3
"""Makes the pictures of the README from real files: ``docs/pictures/make.py [--report PATH] [--info PATH]``.

They show what the installed safeload prints and writes, each for light and for dark pages. Needs what
tests/test_cli/test_report_in_a_browser.py needs, and a system with pseudo terminals.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DATA = ROOT / "tests" / "data"

# Columns of the terminal; size of a character and of the frame in pixels.
COLUMNS, WIDTH, HEIGHT, FRAME = 90, 8.4, 20, 16

# Largest size of a picture, and of all of them.
LARGEST, TOTAL = 150 << 10, 600 << 10

# Ground, border and text of a terminal, and the colours of the SGR codes 2 (dim) and 31 to 36 (red to cyan).
_NAMES = ("ground", "border", "text", "2", "31", "32", "33", "34", "35", "36")
_LIGHT = "#ffffff #d5dce4 #17202b #566373 #b3261e #1a6b3c #855700 #2458a6 #7553b8 #0f6f7a"
_DARK = "#161d26 #2c3744 #e5ebf2 #9dabba #ff8f85 #52bf86 #f0b541 #8ab8f5 #ad93f0 #45bfcc"
MODES = {
    mode: dict(zip(_NAMES, colours.split(), strict=True)) for mode, colours in (("light", _LIGHT), ("dark", _DARK))
}

_SGR = re.compile(r"\x1b\[([0-9;]*)m")


def terminal_svg(command: str, printed: str, mode: str) -> str:
    """What a terminal shows of a command, as SVG whose text is text.

    Args:
        command: the line behind the prompt.
        printed: its output, with the SGR codes of colours.
        mode: "light" or "dark".
    """
    colours = MODES[mode]
    lines = [f"\x1b[2m$\x1b[0m \x1b[1m{command}\x1b[0m", *printed.rstrip().splitlines()]
    columns = max(len(_SGR.sub("", line)) for line in lines)
    width, height = columns * WIDTH + 2 * FRAME, len(lines) * HEIGHT + 2 * FRAME
    texts = []
    for row, line in enumerate(lines):
        for column, text, codes in _runs(line):
            colour = next((colours[code] for code in sorted(codes, reverse=True) if code in colours), colours["text"])
            weight = ' font-weight="bold"' if "1" in codes else ""
            texts.append(
                f'<text x="{FRAME + column * WIDTH:g}" y="{FRAME + row * HEIGHT + 15}" fill="{colour}"{weight} '
                f'textLength="{len(text) * WIDTH:g}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
            )
    newline = "\n"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}" '
        f'role="img"><title>{escape(command)}</title>\n'
        f'<rect x=".5" y=".5" width="{width - 1:g}" height="{height - 1}" rx="9" fill="{colours["ground"]}" '
        f'stroke="{colours["border"]}"/>\n<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, '
        f'\'DejaVu Sans Mono\', monospace" font-size="14" xml:space="preserve">\n{newline.join(texts)}\n</g></svg>\n'
    )


def _runs(line: str) -> Iterator[tuple[int, str, set[str]]]:
    """Texts of one style, without the blanks around them: column, text and SGR codes of each."""
    column = 0
    codes: set[str] = set()
    for k, part in enumerate(_SGR.split(line)):
        if k % 2:
            given = [code.lstrip("0") for code in part.split(";")]
            codes = set() if "" in given else {*codes, *given}
            continue
        for found in re.finditer(r"\S+(?: \S+)*", part):
            yield column + found.start(), found[0], codes
        column += len(part)


def output_of(arguments: list[str], folder: Path) -> str:
    """What a command prints to a terminal. It may fail: that is what `check` does for a bad file."""
    import pty  # not on Windows, where the tests read this file

    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "safeload", *arguments]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        printed = bytearray()
        while piece := _read(ours):
            printed += piece
        os.close(ours)
        assert process.stderr is not None
        complaints = process.stderr.read().decode()
    if process.returncode not in (0, 1) or complaints:
        raise SystemExit(f"{shlex.join(command)}: {complaints}")
    return printed.decode().replace("\r\n", "\n")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how Linux tells that the other end is closed
        return b""


def stopped_download(source: Path, target: Path) -> None:
    """A copy of its size of which only a third was written, as downloads are that allocate their file first."""
    content = source.read_bytes()
    with target.open("wb") as file:
        file.write(content[: len(content) // 3])
        file.truncate(len(content))


def report_pictures(page: Path) -> Iterator[tuple[str, bytes]]:
    """The top of a report as PNG: mode and content."""
    sys.path.insert(0, str(ROOT / "tests"))
    from builders import browser

    if lacking := browser.missing():
        raise SystemExit(f"not installed: {', '.join(lacking)}")
    driver = browser.start()
    try:
        browser.set_window(driver, 960, 740, 1.5)
        for mode in MODES:
            browser.set_media(driver, mode)
            driver.get(page.as_uri())
            yield mode, browser.screenshot(driver, whole=False)
    finally:
        driver.quit()


def main() -> None:
    """Makes all pictures, beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, default=DATA / "silero_vad_16k.safetensors", help="what the page shows")
    parser.add_argument("--info", type=Path, default=DATA / "silero_vad_16k.safetensors", help="what info prints")
    parser.add_argument("--out", type=Path, default=HERE, help="where the pictures go; beside this file by default")
    options = parser.parse_args()
    pictures: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for path in {options.report, options.info}:  # copies: only their names are on the pictures
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
        stopped_download(DATA / "silero_vad_16k.safetensors", folder / "model.safetensors")
        for name, command in (("info", ["info", options.info.name]), ("check", ["check", "model.safetensors"])):
            printed = output_of(command, folder)
            for mode in MODES:
                svg = terminal_svg(shlex.join(["safeload", *command]), printed, mode)
                pictures[f"{name}-{mode}.svg"] = svg.encode()
        output_of(["report", options.report.name, "-o", "report.html", "--quantize", "q8_0"], folder)
        for mode, png in report_pictures(folder / "report.html"):
            pictures[f"report-{mode}.png"] = png
    for name, content in pictures.items():
        if len(content) > LARGEST:
            raise SystemExit(f"{name}: {len(content):,} bytes are more than {LARGEST:,}")
    if sum(map(len, pictures.values())) > TOTAL:
        raise SystemExit(f"all pictures together have more than {TOTAL:,} bytes")
    options.out.mkdir(exist_ok=True)
    for name, content in pictures.items():
        (options.out / name).write_bytes(content)
        print(f"{options.out / name}: {len(content):,} bytes")


if __name__ == "__main__":
    main()
