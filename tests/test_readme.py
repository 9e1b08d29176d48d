"""README.md: its lines run in the checkout, its numbers are those of BENCHMARKS.md, its links live on an index too."""

import importlib
import re
import subprocess
import sys
from importlib.metadata import metadata

import numpy as np
import pytest
from builders.doc_examples import examples_of, failure_of
from builders.inside import registry
from builders.paths import ROOT

pytestmark = pytest.mark.no_core

README = (ROOT / "README.md").read_text("utf-8")


def test_it_is_two_screens():
    assert len(README.encode()) < 6_000


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="written with numpy 2")
def test_its_lines_run_in_the_checkout_and_leave_nothing_there(monkeypatch):
    monkeypatch.chdir(ROOT)
    before = sorted(ROOT.iterdir())
    examples = examples_of(ROOT / "README.md")
    assert len(examples) > 5
    failures = [failure for example in examples if (failure := failure_of(example))]
    assert not failures, "\n\n".join(failures)
    assert sorted(ROOT.iterdir()) == before


def test_its_first_command_lists_a_real_file():
    command = re.search(r"&& safeload (.*)", README)[1].split()
    done = subprocess.run(
        [sys.executable, "-I", "-m", "safeload", *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "15 tensors" in done.stdout


def test_pages_show_the_stored_measurements(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benches")
    report = importlib.import_module("report")
    results = report.read()
    assert report.with_measured_rows(README, results) == README, "run python benches/report.py --only-write"
    assert report.page(results) == (ROOT / "BENCHMARKS.md").read_text("utf-8")
    assert len(report.LOSSES) + len(report.WINS) <= 44
    ratios = [report.select(row, results)["ratio"] for row in report.LOSSES if row.label in report.FRONT_PAGE]
    assert ratios
    assert max(ratios) < 1, "README.md should show a row that safeload loses"


def test_its_table_has_every_format_and_says_what_is_written():
    section = README.partition("## Formats")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    for format in registry.ROWS:
        word = {"pickle": "pickles", "torch zip": "torch", "torch legacy": "before 1.6"}.get(format.name, format.name)
        row = next(row for row in rows if word in row.lower())
        written = row.split("|")[5].strip()
        assert (written == "yes" or word in written) == format.writes, format.name


def test_links_lead_to_files_of_the_checkout():
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", README)
    assert len(targets) > 8
    for target in (first or second for first, second in targets):
        assert (ROOT / target.partition("#")[0]).is_file(), target


def test_a_package_index_gets_no_link_that_dies_there():
    about = metadata("safeload")
    assert about["Description-Content-Type"] == "text/markdown"
    body = about["Description"] or about.get_payload()
    assert body.startswith("# safeload")
    assert "Threat model" in body
    assert "<picture" not in body
    assert not re.findall(r"\]\((?!https?://)[^)]+\)", body)
