"""Where the tests find the project, their data, and the larger real files beside a checkout."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
DATA = TESTS / "data"

# Outside the repository, and not on every machine.
SHARED = ROOT.parent / "shared" / "data"
