"""safetensors, NumPy files, quantized blocks, reading and writing: it imports no other folder of the package."""
