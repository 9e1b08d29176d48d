"""Save tensors as they come, edit files in place, make and apply patches."""
