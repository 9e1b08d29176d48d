"""File formats: each module reads a path into tables or a mapping, and writes the format where that is supported."""
