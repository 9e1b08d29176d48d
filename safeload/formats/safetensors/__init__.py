"""The safetensors format, and the quantized tensors that safeload stores in it."""
