"""Whether a checkpoint is sound: files, names and shapes, values."""
