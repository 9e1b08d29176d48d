"""What `safeload.validate` looks at: files, names and shapes, values."""
