"""The program `safeload` in this process."""

from builders.inside import main


def run(capsys, *arguments):
    """Runs a command and returns its exit status, stdout and stderr."""
    try:
        status = main([str(a) for a in arguments])
    except SystemExit as exit_:
        status = exit_.code
    return status, *capsys.readouterr()
