"""Look at checkpoints: describe, check, measure and compare them, and report what was found."""
