"""Makes the fixtures of ``tests/data/fsdp``; ``__main__`` says how to run it."""
