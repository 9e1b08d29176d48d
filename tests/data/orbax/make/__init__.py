"""Makes the fixtures of ``tests/data/orbax``; ``__main__`` says how to run it."""
