"""What exists because safetensors has it."""
