"""The safetensors format, and safeload's quantized tensors in it."""
