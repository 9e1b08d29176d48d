"""Families of quantized checkpoints."""
