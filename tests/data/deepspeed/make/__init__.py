"""Makes the fixtures of ``tests/data/deepspeed``; ``__main__`` says how to run it."""
