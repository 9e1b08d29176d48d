"""What architectures and engines want, as data."""
