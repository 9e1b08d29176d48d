"""Codes and scales of quantized tensors, and the jobs to restore their values."""
