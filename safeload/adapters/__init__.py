"""LoRA adapters: found, fitted to a base, merged."""
