"""The lowest layer: the C core, dtypes, tables, files, text."""
