"""API kept for compatibility with safetensors."""
