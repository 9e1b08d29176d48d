"""Open checkpoints and load arrays, with or without adapters."""
