"""Quantization of arrays and checkpoints, its error, and stacked tensors."""
