"""The API of safetensors beyond loading and saving: `safe_open`, `serialize`, and helpers of its modules."""
