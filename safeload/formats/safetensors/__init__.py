"""The safetensors format, and the quantized tensors that safeload keeps in it."""
