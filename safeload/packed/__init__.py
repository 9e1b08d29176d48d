"""Quantized checkpoints as their writers publish them: which tensors hold codes, and where their scales are."""
