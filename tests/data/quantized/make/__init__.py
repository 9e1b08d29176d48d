"""Makes the fixtures of ``tests/data/quantized``; ``__main__`` says how to run it."""
