"""The command: ``safeload`` and ``python -m safeload``."""

import signal
import sys


def main() -> int:
    """Run the command and return its exit status. From here on, Ctrl-C ends it without a traceback."""
    # An interrupted import can raise anything: NumPy turns KeyboardInterrupt into ImportError. Until the command runs
    # and has files to remove, Ctrl-C ends the process at once. Another handler than Python's stays: nohup ignores it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
