"""The API of safetensors beyond loading and saving."""
