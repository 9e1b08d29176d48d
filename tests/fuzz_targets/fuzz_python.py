"""Runs a target of targets.py under atheris: fuzz_python.py TARGET [libFuzzer's options] CORPUS..."""

import resource
import sys

import atheris

# What a file of some KiB makes of itself must fit in this, or it is a MemoryError and found.
MOST_MEMORY = 4 << 30

with atheris.instrument_imports(include=["safeload", "zipfile"]):
    import targets


def main():
    target = targets.TARGETS[sys.argv[1]]
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    # For -merge=1 libFuzzer starts its program again, through a shell.
    command = f"{sys.executable} {' '.join(sys.argv[:2])}"
    atheris.Setup([command, *sys.argv[2:]], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
