"""Open checkpoints and load arrays, with adapters merged into them."""
