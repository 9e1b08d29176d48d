"""File formats: each module turns a path into tables or a mapping, and writes if it can be written."""
