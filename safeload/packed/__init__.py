"""Published quantized checkpoints: which tensors hold codes, and where their scales are."""
