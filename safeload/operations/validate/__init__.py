"""Find faults in checkpoints: files, names and shapes, values."""
