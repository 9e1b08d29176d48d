"""The command: ``safeload`` and ``python -m safeload``. From here on, Ctrl-C ends it without a traceback."""

import signal
import sys

# An interrupted import can raise anything: NumPy turns KeyboardInterrupt into ImportError. Until the command runs and
# has files to remove, Ctrl-C ends the process at once. A handler other than Python's stays: nohup ignores the signal.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
