"""Statistics, differences and sizes."""
