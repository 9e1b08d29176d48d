"""``python -m safeload``."""

import sys

from .cli import main

sys.exit(main())
