"""Compares two reports of pytest: the outcome of each test has to be equal. Run by run.sh.

python compare.py SAFETENSORS.xml SAFELOAD.xml
"""

import sys
from collections import Counter
from xml.etree import ElementTree

# What pytest's report has inside a test case that did not pass.
OUTCOMES = ("error", "failure", "skipped")


def outcomes(path):
    """How often each test of a report had each outcome."""
    counts = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        counts[name, " and ".join(kind for kind in OUTCOMES if case.find(kind) is not None) or "passed"] += 1
    return counts


def summary(counts):
    """The number of tests by outcome."""
    totals = Counter()
    for (_, outcome), count in counts.items():
        totals[outcome] += count
    return ", ".join(f"{totals[outcome]} {outcome}" for outcome in sorted(totals, key=lambda name: name != "passed"))


def main(safetensors, safeload):
    """Print what differs and return an exit status."""
    theirs, ours = outcomes(safetensors), outcomes(safeload)
    print(f"safetensors: {summary(theirs)}; safeload: {summary(ours)}")
    for sign, name, counts in (("-", "safetensors", theirs - ours), ("+", "safeload", ours - theirs)):
        for test, outcome in sorted(counts):
            print(f"{sign} {name}: {outcome}: {test}")
    if not any(outcome == "passed" for _, outcome in theirs):
        print("no test passed, which compares nothing")
        return 1
    return int(theirs != ours)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
