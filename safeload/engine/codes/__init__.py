"""Codes and scales of quantized tensors, and the jobs that restore their values."""
