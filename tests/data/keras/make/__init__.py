"""Makes the fixtures of ``tests/data/keras``; ``__main__`` says how to run it."""
