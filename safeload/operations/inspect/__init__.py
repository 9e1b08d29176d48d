"""Contents of checkpoints: tensors, metadata, adapters."""
