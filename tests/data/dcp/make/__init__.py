"""Makes the fixtures of ``tests/data/dcp``; ``__main__`` says how to run it."""
